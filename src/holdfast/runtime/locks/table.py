"""The lock table: threads and asyncio tasks of one process exclude each other, and never wait in a circle.

Levels have a declared order, `database → entity_type → record_id`, or the six resources of seed 000:
`identity → contacts → dedupe → inbox → outbox → readstate`. Within a level the order is that of the names.

    asked ──► checked against the order ──► taken, node by node ──► held ──► released, the last one first
                │                              │       ▲
                ▼                              ▼       │ granted by whoever releases
              LockOrderViolation             waits in the node's line ──► LockTimeout, cancelled: all is given back

Two may hold the same node at once where there is a `+`. Whoever locks a row first takes the intent on its type and on
the database, which is how row locks and table locks meet:

            IS   IX   S    X
        IS  +    +    +    .      IS   intends to read something inside
        IX  +    +    .    .      IX   intends to write something inside
        S   +    .    +    .      S    reads all of it
        X   .    .    .    .      X    writes all of it

Why there is no deadlock: an owner waits only for a node that comes after everything it holds. It waits there for those
who hold the node, who can themselves be waiting only for later nodes, and for those before it in the node's line. So
along any chain of waiting the node grows, or stays while the place in line shrinks: the chain ends, with somebody who
does not wait. Nobody overtakes, so everybody gets a turn. A node that is held in a covering mode is never waited for.

An owner is the asyncio task that asks, or outside of tasks the thread. Inside a task, `acquire` stops the whole event
loop while it waits, and with it the tasks that may have to release first: use `acquire_async` there.
"""

import asyncio
import threading
from asyncio.events import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Final, NamedTuple, Self, TypeVar

import msgspec

from holdfast import limits
from holdfast.errors import Busy, Closed, InvalidArgument, LockTimeout
from holdfast.kv.fork_safety import forget_in_children
from holdfast.runtime.locks.rules import (
    Claim,
    Key,
    Levels,
    LevelStats,
    LockRegistry,
    Mode,
    Owner,
    Path,
    Step,
    known_mode,
)

__all__ = ["DATA_LEVELS", "RESOURCE_LEVELS", "Held", "HolderInfo", "LevelStats", "LockTable", "Mode"]

DATA_LEVELS: Final = ("database", "entity_type", "record_id")
RESOURCE_LEVELS: Final = ("identity", "contacts", "dedupe", "inbox", "outbox", "readstate")
HOLDERS_NAMED: Final = 3  # In an error; a table may have thousands.


class HolderInfo(msgspec.Struct, frozen=True):
    """Somebody who holds something, or waits for it."""

    path: tuple[str, str]
    mode: Mode
    owner: str
    held_seconds: float | None = None
    waiting_seconds: float | None = None


class LockTable:
    """Locks by level and name. One table serves any number of threads, event loops and tasks."""

    def __init__(
        self,
        levels: Sequence[str] = DATA_LEVELS,
        *,
        nested: bool = True,
        waiters_max: int = limits.LOCK_WAITERS_MAX,
    ) -> None:
        if waiters_max.__class__ is not int or waiters_max < 0:
            raise InvalidArgument(f"waiters_max must be a whole number from 0 up, not {waiters_max!r}")
        self.levels = Levels(levels, nested=nested)
        self._waiters_max = waiters_max
        self._start_empty()
        forget_in_children(self)

    def _start_empty(self) -> None:
        self._mutex = threading.Lock()  # For the book. Nobody else's code runs while somebody has it.
        self._book = LockRegistry(self.levels)
        self._thread = threading.local()
        # A finalizer may release locks while its own thread has the mutex. So a release is left here, for whoever has
        # the mutex next: nobody ever waits in order to release.
        self._leaving: deque[Claim] = deque()

    def forget_after_fork(self) -> None:
        """Start empty: those who held and waited are the parent's."""
        self._book.forget()  # What the child still has in its hands must not release anything of its new book.
        self._start_empty()

    def acquire(self, path: Path, mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None) -> "Held":
        """Lock `path`, and hold it until the end of a `with` block or until `release`.

        Raises:
            LockOrderViolation: the caller holds something that comes after it, or holds it in too weak a mode.
            LockTimeout: others kept it for all of `timeout_seconds`; 0 tries without waiting.
            Busy: too many wait already.
        """
        mode = known_mode(mode)
        return self._acquire(self.levels.steps(path, mode), mode, timeout_seconds)

    async def acquire_async(
        self, path: Path, mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> "Held":
        """`acquire` for an event loop. Cancelled at any moment, it leaves nothing locked."""
        mode = known_mode(mode)
        return await self._acquire_async(self.levels.steps(path, mode), mode, timeout_seconds)

    def acquire_all(
        self, paths: Sequence[Path], mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> "Held":
        """Lock all of `paths`, in whatever order they are named, or none of them. Raises what `acquire` does."""
        mode = known_mode(mode)
        return self._acquire(self.levels.steps_for_all(paths, mode), mode, timeout_seconds)

    async def acquire_all_async(
        self, paths: Sequence[Path], mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> "Held":
        """`acquire_all` for an event loop."""
        mode = known_mode(mode)
        return await self._acquire_async(self.levels.steps_for_all(paths, mode), mode, timeout_seconds)

    def stats(self) -> dict[str, LevelStats]:
        """What each level has seen so far, by its name."""
        return self._look(LockRegistry.stats)

    def holders(self) -> list[HolderInfo]:
        """Who holds and who waits for what, now: in the order of locking, and those who wait in that of their line."""
        everybody, now = self._look(LockRegistry.everybody), monotonic()
        return [
            HolderInfo(
                self.levels.path(key),
                mode,
                _name(owner),
                held_seconds=None if waits else now - since,
                waiting_seconds=now - since if waits else None,
            )
            for key, mode, owner, since, waits in everybody
        ]

    def line(self, path: Path) -> int:
        """How many hold `path` or wait for it."""
        key = self.levels.steps(path, Mode.EXCLUSIVE)[-1][0]
        return self._look(lambda book: len([*book.holding(key), *book.lines.get(key, ())]))

    def _look(self, look: "Callable[[LockRegistry], Found]") -> "Found":
        with self._mutex:
            self._let_go()
            found = look(self._book)
        self._settle()
        return found

    def _acquire(self, steps: list[Step], mode: Mode, timeout_seconds: float | None) -> "Held":
        seconds = self.levels.patience(timeout_seconds, steps)
        held = Held(self, self._owner(), steps, mode)
        try:
            bell = self._take(held, seconds, ThreadBell)
            if bell is not None:
                self._reap()
                bell.wait(seconds)
                self._finish(held, seconds)
        except BaseException:
            held.release()
            raise
        return held

    async def _acquire_async(self, steps: list[Step], mode: Mode, timeout_seconds: float | None) -> "Held":
        seconds = self.levels.patience(timeout_seconds, steps)
        # What was begun without a task is nobody but itself: its thread does not hold what it holds.
        owner = self._owner() if asyncio.current_task() else Owner(_Taskless())
        held = Held(self, owner, steps, mode)
        try:
            bell = self._take(held, seconds, TaskBell)
            if bell is not None:
                self._reap()
                await bell.wait(seconds)
                self._finish(held, seconds)
        except BaseException:  # A cancellation too, and the end of a coroutine that nobody runs any more.
            held.release()
            raise
        return held

    def _owner(self) -> Owner:
        loop = _get_running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        if task is not None:
            return self._book.owners.get(task) or Owner(task)
        try:
            owner: Owner = self._thread.owner
        except AttributeError:
            owner = self._thread.owner = Owner(threading.current_thread())
        return owner

    def _take(self, held: "Held", seconds: float, new_bell: "Callable[[], AnyBell]") -> "AnyBell | None":
        """Take everything for `held`; if somebody is in the way, stand in line and return the bell to wait for."""
        book = self._book
        if book.unaware and not seconds:
            self._reap()
        try:
            with self._mutex:
                if self._leaving:
                    self._let_go()
                if held.owner.grants:
                    book.check(held)
                if book.advance(held):
                    return None
                if not seconds:
                    obstacle = self._give_up(held)
                elif book.waiting >= self._waiters_max:
                    raise Busy(f"{book.waiting:,} wait for locks already, as many as waiters_max; try again later")
                else:
                    bell = new_bell()
                    held.bell = bell
                    book.stand_in_line(held)
                    return bell
        finally:
            if self._leaving or book.served:
                self._settle()
        raise self._timeout(obstacle, seconds)

    def _finish(self, held: "Held", seconds: float) -> None:
        """Return if everything came while `held` slept; else give it all back and say who was in the way."""
        if held.waits:
            self._reap()
        try:
            with self._mutex:
                self._let_go()
                self._book.unaware.discard(held)
                if held.taken == len(held.steps):
                    return
                obstacle = self._give_up(held)
        finally:
            self._settle()
        raise self._timeout(obstacle, seconds)

    def _leave(self, claim: Claim) -> None:
        if self._mutex.acquire(False):
            try:
                self._book.undo(claim)
            finally:
                self._mutex.release()
            if not self._leaving and not self._book.served:
                return
        else:
            self._leaving.append(claim)
        self._settle()

    def _settle(self) -> None:
        """Carry out the releases that wait for it, and wake those who got something by them.

        Everybody who had the mutex calls this afterwards, so nothing stays undone because somebody else had it.
        """
        book = self._book
        while True:
            if self._leaving and self._mutex.acquire(blocking=False):
                try:
                    self._let_go()
                finally:
                    self._mutex.release()
            elif book.served:
                with suppress(IndexError):  # Another thread wakes them too.
                    served = book.served.popleft()
                    if served.bell is not None and not served.bell.ring():
                        self._leaving.append(served)
            else:
                return

    def _reap(self) -> None:
        """Take back what was granted to tasks whose event loop was closed before they could notice."""
        for claim in tuple(self._book.unaware):
            if claim.bell is not None and claim.bell.deaf:
                self._leave(claim)

    def _let_go(self) -> None:
        while self._leaving:
            self._book.undo(self._leaving.popleft())

    def _give_up(self, claim: Claim) -> "Obstacle":
        book, key = self._book, claim.next[0]
        obstacle = Obstacle(key, list(islice(book.holding(key), HOLDERS_NAMED)), len(book.lines.get(key, ())))
        book.counters[key[0]].timeouts += 1
        book.undo(claim)
        return obstacle

    def _timeout(self, obstacle: "Obstacle", seconds: float) -> LockTimeout:
        holders = ", ".join(f"{_name(owner)} ({mode})" for owner, mode in obstacle.holding)
        return LockTimeout(
            f"{self.levels.describe(obstacle.key)} is held by {holders}, with {obstacle.in_line} in line, after "
            f"{seconds:g} s of waiting. Try again later, or give more timeout_seconds"
        )


class Obstacle(NamedTuple):
    """Who was in the way of a claim that gave up."""

    key: Key
    holding: list[tuple[Owner, Mode]]
    in_line: int


class Held(Claim):
    """Locks that are held until `release`, or until the end of a `with` or `async with` block."""

    __slots__ = ("_released", "_table", "mode")

    def __init__(self, table: LockTable, owner: Owner, steps: list[Step], mode: Mode) -> None:
        self.owner = owner
        self.steps = steps
        self.taken = 0
        self.waits = False
        self.bell = None
        self.mode = mode
        self._table = table
        self._released = False

    @property
    def paths(self) -> list[tuple[str, str]]:
        """What was asked for, in the order in which it was taken."""
        return [self._table.levels.path(key) for key, _, asked in self.steps if asked]

    def release(self) -> None:
        """Let go of everything, the last taken first. It never waits, and does nothing the second time."""
        if not self._released:
            self._released = True
            self._table._leave(self)

    def __enter__(self) -> Self:
        if self._released:
            raise Closed("These locks were released; acquire them again")
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.release()


class ThreadBell:
    """Wakes one thread."""

    __slots__ = ("_silence",)
    deaf = False

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def wait(self, seconds: float) -> None:
        self._silence.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    def ring(self) -> bool:
        self._silence.release()
        return True


class TaskBell:
    """Wakes one asyncio task, from any thread."""

    __slots__ = ("_loop", "_rung")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = self._loop.create_future()

    async def wait(self, seconds: float) -> None:
        alarm = self._loop.call_later(seconds, _wake, self._rung)
        try:
            await self._rung
        finally:
            alarm.cancel()

    def ring(self) -> bool:
        if _get_running_loop() is self._loop:
            _wake(self._rung)
            return True
        try:
            self._loop.call_soon_threadsafe(_wake, self._rung)
        except RuntimeError:  # The loop was closed, and its tasks are gone with it.
            return False
        return True

    @property
    def deaf(self) -> bool:
        return self._loop.is_closed()


class _Taskless:
    """Somebody who has no task yet."""

    def get_name(self) -> str:
        return "of a call"


Found = TypeVar("Found")
AnyBell = TypeVar("AnyBell", ThreadBell, TaskBell)


def _wake(rung: "asyncio.Future[None]") -> None:
    if not rung.done():
        rung.set_result(None)


def _name(owner: Owner) -> str:
    who = owner.who
    return f"thread {who.name}" if isinstance(who, threading.Thread) else f"task {who.get_name()}"
