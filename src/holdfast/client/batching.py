"""Merging: small calls that leave in one frame become one call.

    puts, and acks, of one queue ──► one call in the frame ──► to each caller its part of the answer

A call has a price of its own at both ends, whatever is in it, and so has the key under which it happens once. Puts are
taken all or none, so where one of them is wrong and nothing was written, each goes by itself. Acks are answered one by
one anyway.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from holdfast.errors import HoldfastError, Validation
from holdfast.limits import MESSAGES_MAX
from holdfast.wire.queues import AckMessages, Outcomes, PutMessages, Receipts

MERGED: Final = (PutMessages, AckMessages)

_HALVED: Final = 16  # A call of so many callers is answered in two halves.
_BYTES_MAX: Final = 262_144  # Of payloads in one call; larger ones have little to gain.

Merged = PutMessages | AckMessages


class Small(NamedTuple):
    """A call that waits to be sent, and whoever waits for its answer."""

    request: Merged
    future: "asyncio.Future[Any]"


class Send(Protocol):
    """Puts a call into the frame that is being made; its answer."""

    def __call__(self, request: Merged) -> "asyncio.Future[Any]": ...


class CallMerger:
    """The puts and acks that go into the next frame of one connection."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[tuple[Any, ...], list[Small]] = {}

    def add(self, small: Small) -> None:
        """Have a call in the next frame."""
        request = small.request
        kind = (type(request), request.queue, request.universe, request.tier)
        if kind in self._waiting:
            self._waiting[kind].append(small)
        else:
            self._waiting[kind] = [small]

    def send(self) -> int:
        """Put what waits into the frame; how many calls that saves."""
        if not self._waiting:
            return 0
        waiting, self._waiting = self._waiting, {}
        saved = 0
        for smalls in waiting.values():
            alive = [each for each in smalls if not each.future.done()]
            try:
                batches = _batches(alive)
            except Exception:  # One of them is no call: by itself it is told so, and the others go.
                batches = [[each] for each in alive]
            for batch in batches:
                self._carry(batch)
                saved += len(batch) - 1
        return saved

    def _carry(self, batch: Sequence[Small]) -> None:
        try:
            answer = self._send(batch[0].request if len(batch) == 1 else _together(batch))
        except Exception as error:  # It does not fit a frame, or cannot be encoded.
            self._fail(batch, error)
        else:
            answer.add_done_callback(partial(self._answered, batch))

    def _answered(self, batch: Sequence[Small], answer: "asyncio.Future[Any]") -> None:
        if answer.cancelled():
            for each in batch:
                each.future.cancel()
        elif (error := answer.exception()) is not None:
            self._fail(batch, error)
        elif len(batch) == 1:
            _tell(batch[0].future, answer.result())
        elif len(batch) < _HALVED:
            _share(batch, answer.result(), 0)
        else:
            # Whoever is answered asks again, most likely. Told in two halves, they ask in two frames, and while the
            # server is at one of them this process is at the other; told at once, both would wait for each other.
            half = len(batch) // 2
            start = _share(batch[:half], answer.result(), 0)
            asyncio.get_running_loop().call_soon(_share, batch[half:], answer.result(), start)

    def _fail(self, batch: Sequence[Small], error: BaseException) -> None:
        wrong = isinstance(error, Validation) or not isinstance(error, HoldfastError)
        if wrong and len(batch) > 1:  # One of them is, and nothing was written.
            for each in batch:
                if not each.future.done():
                    self._carry([each])
            return
        for each in batch:
            if not each.future.done():
                each.future.set_exception(error)


def _batches(smalls: Sequence[Small]) -> list[list[Small]]:
    batches: list[list[Small]] = []
    count = size = 0
    for small in smalls:
        request, length = small.request, 0
        if isinstance(request, PutMessages):
            length = sum([len(each.payload) for each in request.messages])
        items = len(_items(request))
        if not batches or count + items > MESSAGES_MAX or size + length > _BYTES_MAX:
            batches.append([])
            count = size = 0
        batches[-1].append(small)
        count, size = count + items, size + length
    return batches


def _items(request: Merged) -> list[Any]:
    return request.messages if isinstance(request, PutMessages) else request.leases


def _together(batch: Sequence[Small]) -> Merged:
    first = batch[0].request
    items = [item for each in batch for item in _items(each.request)]
    if isinstance(first, PutMessages):
        return msgspec.structs.replace(first, messages=items)
    return msgspec.structs.replace(first, leases=items)


def _share(batch: Sequence[Small], answer: Receipts | Outcomes, start: int) -> int:
    """Give each caller the part of the answer that is its own, from the item `start` on; where the next one's is."""
    for request, future in batch:
        end = start + len(_items(request))
        if isinstance(answer, Receipts):
            _tell(future, Receipts(answer.receipts[start:end]))
        else:
            _tell(future, Outcomes(answer.outcomes[start:end]))
        start = end
    return start


def _tell(future: "asyncio.Future[Any]", answer: Any) -> None:
    if not future.done():  # Otherwise whoever asked was cancelled, and what they asked for has happened.
        future.set_result(answer)
