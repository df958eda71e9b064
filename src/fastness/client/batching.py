"""Client-side batching: small puts and acks of the same queue that share a frame become one call.

    puts (or acks) of one queue ──► one call in the frame ──► each caller receives its part of the answer

Every call has a fixed cost at both ends, and so has its idempotency key. A put call is all or nothing, so when the
server rejects a batch as invalid, nothing was written and each put is sent again by itself. Acks have an outcome per
message anyway.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

import msgspec

from fastness.client.pending_calls import AnswerFuture
from fastness.errors import FastnessError, Validation
from fastness.limits import MESSAGES_MAX
from fastness.wire.frames import AnyRequest
from fastness.wire.queues import AckMessages, NewResult, Outcomes, PackedAck, PutMessages, Receipts, RefusedAck

_SPLIT_CALLERS_MIN: Final = 16  # The answer to a batch of at least this many callers is delivered in two halves.
_BYTES_MAX: Final = 262_144  # Payload bytes per call. Larger calls gain little from batching.

BatchableRequest = PutMessages | AckMessages


def is_batchable(request: AnyRequest) -> TypeGuard[BatchableRequest]:
    """Whether the call can be merged with others."""
    return isinstance(request, (PutMessages, AckMessages))


class BatchableCall(NamedTuple):
    """A call that waits for the next frame, and the future of its answer."""

    request: BatchableRequest
    future: AnswerFuture


class SendRequest(Protocol):
    """Adds a call to the next frame and returns the future of its answer."""

    def __call__(self, request: BatchableRequest) -> AnswerFuture: ...


class RequestBatcher:
    """Collects the puts and acks for the next frame of one connection."""

    def __init__(self, send: SendRequest, call_soon: Callable[..., object] | None = None) -> None:
        """`call_soon` is that of the callers' event loop; None: the callers are threads."""
        self._send = send
        self._call_soon = call_soon
        self._waiting: dict[tuple[Any, ...], list[BatchableCall]] = {}

    @property
    def has_calls(self) -> bool:
        """Whether calls wait for the next frame."""
        return bool(self._waiting)

    def add(self, call: BatchableCall) -> None:
        """Add a call to the next frame."""
        request = call.request
        option = request.must_exist if isinstance(request, PutMessages) else request.late
        group = (type(request), request.queue, request.universe, request.tier, option)
        if group in self._waiting:
            self._waiting[group].append(call)
        else:
            self._waiting[group] = [call]

    def send(self) -> int:
        """Send the waiting calls in batches. Returns how many calls were saved by batching."""
        if not self._waiting:
            return 0
        waiting, self._waiting = self._waiting, {}
        saved = 0
        for calls in waiting.values():
            alive = [each for each in calls if not each.future.done()]
            try:
                batches = _batches(alive)
            except Exception:  # A malformed request. Sent by itself it fails alone, and the others still go out.
                batches = [[each] for each in alive]
            for batch in batches:
                self._send_batch(batch)
                saved += len(batch) - 1
        return saved

    def _send_batch(self, batch: Sequence[BatchableCall]) -> None:
        try:
            answer = self._send(
                batch[0].request if len(batch) == 1 else _merged_request([each.request for each in batch])
            )
        except Exception as error:  # The call is too long for a frame, or cannot be encoded.
            self._fail(batch, error)
        else:
            answer.add_done_callback(partial(self._on_answer, batch))

    def _on_answer(self, batch: Sequence[BatchableCall], answer: AnswerFuture) -> None:
        if answer.cancelled():
            for each in batch:
                each.future.cancel()
        elif (error := answer.exception()) is not None:
            self._fail(batch, error)
        elif len(batch) == 1:
            _set_result(batch[0].future, answer.result())
        elif self._call_soon is None or len(batch) < _SPLIT_CALLERS_MIN:
            _distribute(batch, answer.result(), 0)
        else:
            # Callers usually call again as soon as they have their answer. Answered in two halves, they call again in
            # two frames, so the server works on one while this process prepares the other.
            half = len(batch) // 2
            start = _distribute(batch[:half], answer.result(), 0)
            self._call_soon(_distribute, batch[half:], answer.result(), start)

    def _fail(self, batch: Sequence[BatchableCall], error: BaseException) -> None:
        is_invalid = isinstance(error, Validation) or not isinstance(error, FastnessError)
        if is_invalid and len(batch) > 1:  # One call is invalid, and nothing was written.
            for each in batch:
                if not each.future.done():
                    self._send_batch([each])
            return
        for each in batch:
            if not each.future.done():
                each.future.set_exception(error)


def _batches(calls: Sequence[BatchableCall]) -> list[list[BatchableCall]]:
    batches: list[list[BatchableCall]] = []
    count = size = 0
    for call in calls:
        request, length = call.request, 0
        if isinstance(request, PutMessages):
            length = sum([len(each.payload) for each in request.messages])
        elif request.results:
            length = sum([len(each.value) for each in request.results if each is not None])
        items = _count(request)
        if not batches or count + items > MESSAGES_MAX or size + length > _BYTES_MAX:
            batches.append([])
            count = size = 0
        batches[-1].append(call)
        count, size = count + items, size + length
    return batches


def _count(request: BatchableRequest) -> int:
    """The number of messages that a request is about."""
    if isinstance(request, PutMessages):
        return len(request.messages)
    return len(request.leases) + sum([each.mask.bit_count() for each in request.packed])


def _merged_request(requests: Sequence[BatchableRequest]) -> BatchableRequest:
    first = requests[0]
    if isinstance(first, PutMessages):
        messages = [message for each in requests if isinstance(each, PutMessages) for message in each.messages]
        return msgspec.structs.replace(first, messages=messages)
    acks = [each for each in requests if isinstance(each, AckMessages)]
    packed: dict[tuple[bytes, int], PackedAck] = {}
    for part in [part for each in acks for part in each.packed]:
        before = packed.get((part.lease, part.fence))
        packed[part.lease, part.fence] = part if before is None else before.merged_with(part)
    leases = [lease for each in acks for lease in each.leases]
    results: list[NewResult | None] = []
    if any(each.results for each in acks):
        for ack in acks:  # Each result belongs to the lease at its position.
            results += [*ack.results, *[None] * (len(ack.leases) - len(ack.results))]
    return msgspec.structs.replace(first, leases=leases, packed=list(packed.values()), results=results)


def _distribute(batch: Sequence[BatchableCall], answer: Receipts | Outcomes, start: int) -> int:
    """Give each caller its part of the answer, from item `start` on. Returns the index after the last item used."""
    for request, future in batch:
        end = start
        if isinstance(request, PutMessages) and isinstance(answer, Receipts):
            end = start + len(request.messages)
            _set_result(future, Receipts(answer.receipts[start:end]))
        elif isinstance(request, AckMessages) and isinstance(answer, Outcomes):
            end = start + len(request.leases)
            refused = [each for each in answer.refused if _is_about(request, each)] if answer.refused else []
            _set_result(future, Outcomes(answer.outcomes[start:end], refused))
        start = end
    return start


def _is_about(request: AckMessages, refused: RefusedAck) -> bool:
    return any(each.lease == refused.lease and each.mask >> refused.position & 1 for each in request.packed)


def _set_result(future: AnswerFuture, answer: Any) -> None:
    if not future.done():  # A caller that was cancelled no longer waits; its call was carried out all the same.
        future.set_result(answer)
