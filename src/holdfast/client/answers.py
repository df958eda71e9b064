"""What is known of a request before it is sent: how its answer is read, and what to do if nobody hears it."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.wire.atomic import Answers, CommitAtomic
from holdfast.wire.entities import DeleteEntity, PutEntity, WriteEntities
from holdfast.wire.frames import AnyRequest
from holdfast.wire.leases import AcquireLease, Granted, LeaseProof, ReleaseLease
from holdfast.wire.queues import Deliveries, MessageLease, NackMessages, ReceiveMessages, RedriveMessages
from holdfast.wire.requests import answer_type

# These change nothing that could be doubled: sending them again needs no key.
_HARMLESS: Final = (
    "Get", "List", "Read", "Describe", "Scan", "Peek", "Find", "Check", "Log", "Receive", "Acquire", "Open",
)  # fmt: skip

# The server does these without looking at their keys. Done twice, they would count twice, or overwrite somebody else.
_DOUBLES: Final = (WriteEntities, PutEntity, DeleteEntity, RedriveMessages)

_decoders: dict[Any, Callable[[Any], Any]] = {}


class _AnswersOnTheWay(msgspec.Struct, frozen=True):
    """Answers of an atomic list, each to be decoded by the type that its operation has."""

    answers: list[msgspec.Raw]


_decode_answers = msgspec.msgpack.Decoder(_AnswersOnTheWay).decode


def is_harmless(request: Any) -> bool:
    """Whether sending it twice does no harm, so that it needs no key."""
    return type(request).__name__.startswith(_HARMLESS)


def doubles(request: AnyRequest) -> bool:
    """Whether it could happen twice if it were sent twice, whatever its key."""
    return isinstance(request, _DOUBLES)


def decoder_of(request: AnyRequest) -> Callable[[Any], Any]:
    """Reads the answer to a request."""
    if isinstance(request, CommitAtomic):
        kinds = [type(operation) for operation in request.operations]
        return lambda data: Answers(
            [_decoder(kind)(answer) for kind, answer in zip(kinds, _decode_answers(data).answers, strict=True)]
        )
    return _decoder(type(request))


def _decoder(kind: type[Any]) -> Callable[[Any], Any]:
    decode = _decoders.get(kind)
    if decode is None:
        decode = _decoders[kind] = msgspec.msgpack.Decoder(answer_type(kind)).decode
    return decode


def undo_of(request: AnyRequest) -> Callable[[Any], AnyRequest | None] | None:
    """Makes of an answer that nobody hears the request that takes it back; None if there is nothing to take back."""
    if isinstance(request, ReceiveMessages):
        return lambda answer: _deferred(request, answer)
    if isinstance(request, AcquireLease):
        return lambda answer: _released(request, answer)
    return None


def _deferred(request: ReceiveMessages, answer: Deliveries) -> NackMessages | None:
    """Nobody has seen these messages: that is no failure of theirs."""
    leases = [MessageLease(each.id, each.lease_id, each.fence) for each in answer.messages]
    return NackMessages(request.queue, leases, intent="defer", universe=request.universe) if leases else None


def _released(request: AcquireLease, answer: Granted) -> ReleaseLease:
    return ReleaseLease(LeaseProof(answer.key, answer.lease_id, answer.fence, answer.txn_id, request.universe))
