"""Gathering: calls that an event loop makes at the same time become one transaction.

    alone:      call ──► its own transaction, at once
    others are waiting for their sync: this turn's calls ──► one transaction ──► one sync ──► each its own answer

A transaction of an embedded store costs about as much as a small operation itself, so many callers do twice the work
without this. Each call stays by itself: one that raises has written nothing and disturbs nobody.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.kv import Database, Transaction
from holdfast.kv.groups import GROUP_BYTES
from holdfast.tiers import Tier

Run = Callable[[Transaction, Any], Any]
Notes = list[tuple[Any, ...]]
Waiting = tuple[Run, Any, "asyncio.Future[Any]"]


class Gathering:
    """The calls of one event loop that are under way. Only CRITICAL ones: the others do not wait for anything."""

    def __init__(self, database: Database, tell: Callable[[Notes], None]) -> None:
        self._transact = database.transact_async
        self._tell = tell
        self._under_way = 0
        self._waiting: list[Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()  # An event loop keeps only weak references to its tasks.

    async def call(self, run: Run, request: Any) -> Any:
        """The answer of `run(tx, request)`, once it is synced."""
        self._under_way += 1
        try:
            if self._under_way == 1:
                answer, notes = await self._transact(_alone, run, request, tier=Tier.CRITICAL)
                if notes:
                    self._tell(notes)
                return answer
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiting.append((run, request, future))
            if len(self._waiting) == 1:
                loop.call_soon(self._start)
            return await future
        finally:
            self._under_way -= 1

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._commit(waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, waiting: list[Waiting]) -> None:
        while waiting:
            try:
                outcomes, notes = await self._transact(_together, waiting, tier=Tier.CRITICAL)
            except BaseException as error:
                for _, _, future in waiting:
                    if not future.done():
                        future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return
            if notes:
                self._tell(notes)
            for (_, _, future), (answer, wrong) in zip(waiting, outcomes, strict=False):
                if future.done():
                    continue  # Whoever asked was cancelled, and what they asked for has happened.
                if wrong is not None:
                    future.set_exception(wrong)
                else:
                    future.set_result(answer)
            waiting = waiting[len(outcomes) :]


def _alone(tx: Transaction, run: Run, request: Any) -> tuple[Any, Notes]:
    return run(tx, request), tx.notes


def _together(tx: Transaction, waiting: Sequence[Waiting]) -> tuple[list[tuple[Any, Exception | None]], Notes]:
    """The outcome of each call; fewer than there are calls if they did not all fit."""
    outcomes: list[tuple[Any, Exception | None]] = []
    for run, request, _ in waiting:
        inner = tx.inside()
        try:
            outcomes.append((run(inner, request), None))
        except Exception as error:
            outcomes.append((None, error))
        else:
            tx.absorb(inner)
        finally:
            inner.end()
        if tx.size_bytes > GROUP_BYTES:
            break
    return outcomes, tx.notes
