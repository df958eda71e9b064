"""Gathering: calls that an event loop makes at the same time become one transaction.

    alone:      call ──► its own transaction, at once
    others are waiting for their sync: this turn's calls ──► one transaction ──► one sync ──► each its own answer

A transaction of an embedded store costs about as much as a small operation itself, so many callers do twice the work
without this. Each call stays by itself: one that raises has written nothing and disturbs nobody.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.kv import Database, Transaction
from holdfast.kv.groups import Work, run_group
from holdfast.tiers import Tier

Run = Callable[[Transaction, Any], Any]
Notes = list[tuple[Any, ...]]


class Gathering:
    """The calls of one event loop that are under way. Only CRITICAL ones: the others do not wait for anything."""

    def __init__(self, database: Database, tell: Callable[[Notes], None]) -> None:
        self._transact = database.transact_async
        self._tell = tell
        self._under_way = 0
        self._works: list[Work] = []
        self._callers: list[asyncio.Future[Any]] = []  # Whoever waits for each of them.
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
            self._works.append((run, request))
            self._callers.append(future)
            if len(self._works) == 1:
                loop.call_soon(self._start)
            return await future
        finally:
            self._under_way -= 1

    def _start(self) -> None:
        works, self._works = self._works, []
        callers, self._callers = self._callers, []
        task = asyncio.get_running_loop().create_task(self._commit(works, callers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, works: list[Work], callers: "list[asyncio.Future[Any]]") -> None:
        while works:
            try:
                outcomes, notes = await self._transact(_together, works, tier=Tier.CRITICAL)
            except BaseException as error:
                for caller in callers:
                    if not caller.done():
                        caller.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return
            if notes:
                self._tell(notes)
            for caller, outcome in zip(callers, outcomes, strict=False):
                if caller.done():
                    continue  # Whoever asked was cancelled, and what they asked for has happened.
                if isinstance(outcome, Exception):
                    caller.set_exception(outcome)
                else:
                    caller.set_result(outcome)
            works, callers = works[len(outcomes) :], callers[len(outcomes) :]


def _alone(tx: Transaction, run: Run, request: Any) -> tuple[Any, Notes]:
    return run(tx, request), tx.notes


def _together(tx: Transaction, works: list[Work]) -> tuple[list[Any], Notes]:
    return run_group(tx, works, Exception), tx.notes
