"""Merging: small calls that are made at the same time become one.

    alone:             call ──► the server, at once
    others under way:  this turn's puts, or acks, of one queue ──► one call ──► to each caller its part of the answer

A call has a price of its own at both ends, whatever is in it, and so has the key under which it happens once. Puts are
taken all or none, so where one of them is wrong and nothing was written, each goes by itself. Acks are answered one by
one anyway.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.errors import HoldfastError, Validation
from holdfast.limits import MESSAGES_MAX
from holdfast.wire.queues import AckMessages, Outcomes, PutMessages, Receipts

MERGED: Final = (PutMessages, AckMessages)

_BYTES_MAX: Final = 262_144  # Of payloads in one call; larger ones have little to gain.

Merged = PutMessages | AckMessages
Ask = Callable[[Any], Awaitable[Any]]


class _Waiting(NamedTuple):
    request: Merged
    future: "asyncio.Future[Any]"


class Merging:
    """The puts and acks of one event loop that are under way."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._under_way = 0
        self._waiting: dict[tuple[Any, ...], list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # An event loop keeps only weak references to its tasks.

    async def call(self, request: Merged) -> Any:
        """The answer to `request`, which may have travelled with others."""
        self._under_way += 1
        try:
            if self._under_way == 1:
                return await self._ask(request)
            loop = asyncio.get_running_loop()
            waiting = _Waiting(request, loop.create_future())
            kind = (type(request), request.queue, request.universe, request.tier)
            if not self._waiting:
                loop.call_soon(self._start)
            if kind in self._waiting:
                self._waiting[kind].append(waiting)
            else:
                self._waiting[kind] = [waiting]
            return await waiting.future
        finally:
            self._under_way -= 1

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for calls in waiting.values():
            for batch in _batches([each for each in calls if not each.future.done()]):
                task = asyncio.get_running_loop().create_task(self._carry(batch))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _carry(self, batch: Sequence[_Waiting]) -> None:
        try:
            if len(batch) == 1:
                _tell(batch[0].future, await self._ask(batch[0].request))
                return
            answer = await self._ask(_together(batch))
        except Validation as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # One of them is wrong, and nothing was written.
                await asyncio.gather(*(self._carry([each]) for each in batch))
        except HoldfastError as error:
            _fail(batch, error)
        except BaseException as error:
            _fail(batch, error)
            raise
        else:
            _share(batch, answer)


def _batches(calls: list[_Waiting]) -> list[list[_Waiting]]:
    batches: list[list[_Waiting]] = []
    count = size = 0
    for call in calls:
        items = _items(call.request)
        length = (
            sum(len(each.payload) for each in call.request.messages) if isinstance(call.request, PutMessages) else 0
        )
        if not batches or count + len(items) > MESSAGES_MAX or size + length > _BYTES_MAX:
            batches.append([])
            count = size = 0
        batches[-1].append(call)
        count, size = count + len(items), size + length
    return batches


def _items(request: Merged) -> list[Any]:
    return request.messages if isinstance(request, PutMessages) else request.leases


def _together(batch: Sequence[_Waiting]) -> Merged:
    first = batch[0].request
    items = [item for each in batch for item in _items(each.request)]
    if isinstance(first, PutMessages):
        return msgspec.structs.replace(first, messages=items)
    return msgspec.structs.replace(first, leases=items)


def _share(batch: Sequence[_Waiting], answer: Receipts | Outcomes) -> None:
    """Give each caller the part of the answer that is its own."""
    start = 0
    for request, future in batch:
        end = start + len(_items(request))
        if isinstance(answer, Receipts):
            _tell(future, Receipts(answer.receipts[start:end]))
        else:
            _tell(future, Outcomes(answer.outcomes[start:end]))
        start = end


def _tell(future: "asyncio.Future[Any]", answer: Any) -> None:
    if not future.done():  # Otherwise whoever asked was cancelled, and what they asked for has happened.
        future.set_result(answer)


def _fail(batch: Sequence[_Waiting], error: BaseException) -> None:
    for each in batch:
        if not each.future.done():
            each.future.set_exception(error)
