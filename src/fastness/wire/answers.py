"""Decodes the answer to a request."""

from collections.abc import Callable
from typing import Any

import msgspec

from fastness.wire.atomic import Answers, CommitAtomic
from fastness.wire.requests import Request, answer_type

_decoders: dict[Any, Callable[[Any], Any]] = {}


class _RawAnswers(msgspec.Struct, frozen=True):
    """Answers of an atomic list, each still to be decoded as the type of its operation's answer."""

    answers: list[msgspec.Raw]


_decode_answers = msgspec.msgpack.Decoder(_RawAnswers).decode


def decoder_of(request: Any) -> Callable[[Any], Any]:
    """A function that decodes the answer to a request."""
    if isinstance(request, CommitAtomic):
        kinds = [type(operation) for operation in request.operations]
        return lambda data: Answers(
            [_decoder(kind)(answer) for kind, answer in zip(kinds, _decode_answers(data).answers, strict=True)]
        )
    return _decoder(type(request))


def read_answer(request: Any, data: Any) -> Any:
    """The decoded answer to a request."""
    return decoder_of(request)(data)


def _decoder(kind: type[Request[Any]]) -> Callable[[Any], Any]:
    decode = _decoders.get(kind)
    if decode is None:
        decode = _decoders[kind] = msgspec.msgpack.Decoder(answer_type(kind)).decode
    return decode
