"""The lock table: deadlock-free locks among the threads and asyncio tasks of one process.

Modes and levels are those of `fastness.lock_rules`; a table may have other levels, as for leases.

    requested ──► checked against the order ──► acquired, node by node ──► held ──► released in reverse order
                    │                              │       ▲
                    ▼                              ▼       │ granted by a release
                  LockOrderViolation             waits in the node's line ──► LockTimeout, cancelled: all is released

Why there is no deadlock: an owner waits only for a node that comes after everything it holds. It waits for the holders
of the node, which can themselves wait only for later nodes, and for the claims before it in the node's line. So along
any chain of waiting owners the node increases, or stays the same while the position in line decreases: the chain ends
with an owner that does not wait. Lines are FIFO, so no claim starves. A node that the owner already holds in a mode
that includes the requested one is never waited for.

The owner is the calling asyncio task, or outside of tasks the thread. Inside a task, `acquire` blocks the whole event
loop while it waits, including the tasks that may have to release first: use `acquire_async` there.
"""

import asyncio
import threading
from asyncio.events import _get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Any, Final, NamedTuple, Self, TypeVar

from fastness import limits
from fastness.errors import Busy, Closed, InvalidArgument, LockTimeout
from fastness.kv.fork_safety import invalidate_in_children
from fastness.lock_rules import (
    DATA_LEVELS,
    Key,
    Levels,
    Mode,
    Path,
    Step,
    parse_mode,
    released_error,
    timeout_error,
)
from fastness.runtime.locks.registry import Claim, LockRegistry, NoTask, Owner
from fastness.threads import run_in_thread
from fastness.wire.leases import LockPlace
from fastness.wire.locks import LevelStats

__all__ = ["DATA_LEVELS", "Held", "LevelStats", "LockTable", "Mode"]

HOLDERS_NAMED: Final = 3  # In an error message; a lock may have thousands of holders.


class LockTable:
    """Locks by level and name. One table serves any number of threads, event loops and tasks."""

    def __init__(
        self,
        levels: Sequence[str] = DATA_LEVELS,
        *,
        nested: bool = True,
        waiters_max: int = limits.LOCK_WAITERS_MAX,
        find_type: Callable[[str], str | None] | None = None,
    ) -> None:
        """`find_type` returns the full name, `type/id`, of a record that is named by its id alone."""
        if waiters_max.__class__ is not int or waiters_max < 0:
            raise InvalidArgument(f"waiters_max must be an integer of at least 0, not {waiters_max!r}")
        self.levels = Levels(levels, nested=nested, find_type=find_type)
        self.has_callers = False  # Whether callers of the plane acquire locks here, besides writes of entities.
        self._waiters_max = waiters_max
        self._reset()
        invalidate_in_children(self)

    def _reset(self) -> None:
        self._mutex = threading.Lock()  # Guards the registry. No caller's code runs while it is held.
        self._registry = LockRegistry(self.levels)
        self._thread = threading.local()
        # A finalizer may release locks while its own thread holds the mutex. Such a release is queued here and applied
        # by the next holder of the mutex, so that a release never blocks.
        self._pending_releases: deque[Claim] = deque()

    def invalidate_after_fork(self) -> None:
        """Start empty: the holders and waiters belong to the parent process."""
        self._registry.clear()  # Locks inherited by the child must not release anything in its new registry.
        self._reset()

    def acquire(self, path: Path, mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None) -> "Held":
        """Lock `path`, and hold it until the end of a `with` block or until `release`.

        Raises:
            LockOrderViolation: the caller holds a lock that comes after it, or holds it in a weaker mode.
            LockTimeout: it was not granted within `timeout_seconds`; 0 tries without waiting.
            Busy: `waiters_max` claims are already waiting.
        """
        mode = parse_mode(mode)
        return self._acquire(self.levels.steps(path, mode), mode, timeout_seconds)

    async def acquire_async(
        self, path: Path, mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> "Held":
        """`acquire` for an event loop. When cancelled, it leaves nothing locked."""
        mode = parse_mode(mode)
        return await self._acquire_async(self.levels.steps(path, mode), mode, timeout_seconds)

    def acquire_all(
        self, paths: Sequence[Path], mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> "Held":
        """Lock all of `paths`, listed in any order, or none of them. Raises what `acquire` raises."""
        mode = parse_mode(mode)
        return self._acquire(self.levels.steps_for_all(paths, mode), mode, timeout_seconds)

    async def acquire_all_async(
        self, paths: Sequence[Path], mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> "Held":
        """`acquire_all` for an event loop."""
        mode = parse_mode(mode)
        return await self._acquire_async(self.levels.steps_for_all(paths, mode), mode, timeout_seconds)

    def stats(self) -> dict[str, LevelStats]:
        """The statistics of each level, by its name."""
        return self._inspect(LockRegistry.stats)

    def holders(self) -> list[LockPlace]:
        """The current holders and waiters in lock order; the waiters of one lock in the order of its line."""
        entries, now = self._inspect(LockRegistry.entries), monotonic()
        return [
            LockPlace(
                list(self.levels.path(key)),
                str(mode),
                _name(owner),
                held_seconds=None if is_waiting else now - since,
                waiting_seconds=now - since if is_waiting else None,
            )
            for key, mode, owner, since, is_waiting in entries
        ]

    def line_length(self, path: Path) -> int:
        """The number of owners that hold `path` or wait for it."""
        key = self.levels.steps(path, Mode.EXCLUSIVE)[-1][0]
        return self._inspect(lambda registry: len([*registry.holding(key), *registry.lines.get(key, ())]))

    def _inspect(self, inspect: "Callable[[LockRegistry], Found]") -> "Found":
        with self._mutex:
            self._apply_releases()
            found = inspect(self._registry)
        self._finish_releases()
        return found

    def _acquire(self, steps: list[Step], mode: Mode, timeout_seconds: float | None) -> "Held":
        seconds = self.levels.timeout_for(timeout_seconds, steps)
        held = Held(self, self._owner(), steps, mode)
        try:
            waiter = self._try_acquire(held, seconds, ThreadWaiter)
            if waiter is not None:
                self._reclaim_orphans()
                waiter.wait(seconds)
                self._finish(held, seconds)
        except BaseException:
            held.release()
            raise
        return held

    async def _acquire_async(self, steps: list[Step], mode: Mode, timeout_seconds: float | None) -> "Held":
        seconds = self.levels.timeout_for(timeout_seconds, steps)
        # A coroutine that runs without a task is its own owner, not its thread.
        owner = self._owner() if asyncio.current_task() else Owner(NoTask())
        held = Held(self, owner, steps, mode)
        try:
            waiter = self._try_acquire(held, seconds, TaskWaiter)
            if waiter is not None:
                self._reclaim_orphans()
                await waiter.wait(seconds)
                self._finish(held, seconds)
        except BaseException:  # Including cancellation and GeneratorExit.
            held.release()
            raise
        return held

    def _owner(self) -> Owner:
        loop = _get_running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        if task is not None:
            return self._registry.owners.get(task) or Owner(task)
        try:
            owner: Owner = self._thread.owner
        except AttributeError:
            owner = self._thread.owner = Owner(threading.current_thread())
        return owner

    def _try_acquire(self, held: "Held", seconds: float, new_waiter: "Callable[[], AnyWaiter]") -> "AnyWaiter | None":
        """Acquire everything for `held`; on a conflict, queue it and return the waiter to wait on."""
        registry = self._registry
        if registry.unnoticed and not seconds:
            self._reclaim_orphans()
        try:
            with self._mutex:
                if self._pending_releases:
                    self._apply_releases()
                if held.owner.grants:
                    registry.check(held)
                if registry.advance(held):
                    return None
                if not seconds:
                    obstacle = self._abandon(held)
                elif registry.waiting >= self._waiters_max:
                    raise Busy(f"{registry.waiting:,} lock requests are already waiting (waiters_max); try again later")
                else:
                    waiter = new_waiter()
                    held.waiter = waiter
                    registry.enqueue(held)
                    return waiter
        finally:
            if self._pending_releases or registry.completed:
                self._finish_releases()
        raise self._timeout(obstacle, seconds)

    def _finish(self, held: "Held", seconds: float) -> None:
        """Return if `held` was completed while it waited; otherwise release it and raise LockTimeout."""
        if held.is_waiting:
            self._reclaim_orphans()
        try:
            with self._mutex:
                self._apply_releases()
                self._registry.unnoticed.discard(held)
                if held.taken == len(held.steps):
                    return
                obstacle = self._abandon(held)
        finally:
            self._finish_releases()
        raise self._timeout(obstacle, seconds)

    def _release_claim(self, claim: Claim) -> None:
        if self._mutex.acquire(False):
            try:
                self._registry.release(claim)
            finally:
                self._mutex.release()
            if not self._pending_releases and not self._registry.completed:
                return
        else:
            self._pending_releases.append(claim)
        self._finish_releases()

    def _finish_releases(self) -> None:
        """Apply queued releases, and wake the claims that they completed.

        Every holder of the mutex calls this afterwards, so a release that was queued meanwhile is never left behind.
        """
        registry = self._registry
        while True:
            if self._pending_releases and self._mutex.acquire(blocking=False):
                try:
                    self._apply_releases()
                finally:
                    self._mutex.release()
            elif registry.completed:
                with suppress(IndexError):  # Another thread wakes claims concurrently.
                    completed = registry.completed.popleft()
                    if completed.waiter is not None and not completed.waiter.wake():
                        self._pending_releases.append(completed)
            else:
                return

    def _reclaim_orphans(self) -> None:
        """Release locks granted to tasks whose event loop was closed before they resumed."""
        for claim in tuple(self._registry.unnoticed):
            if claim.waiter is not None and claim.waiter.is_closed:
                self._release_claim(claim)

    def _apply_releases(self) -> None:
        while self._pending_releases:
            self._registry.release(self._pending_releases.popleft())

    def _abandon(self, claim: Claim) -> "Obstacle":
        registry, key = self._registry, claim.next[0]
        obstacle = Obstacle(key, list(islice(registry.holding(key), HOLDERS_NAMED)), len(registry.lines.get(key, ())))
        registry.counters[key[0]].timeouts += 1
        registry.release(claim)
        return obstacle

    def _timeout(self, obstacle: "Obstacle", seconds: float) -> LockTimeout:
        holders = [f"{_name(owner)} ({mode})" for owner, mode in obstacle.holding]
        return timeout_error(self.levels.describe(obstacle.key), seconds, holders, obstacle.in_line)


class Obstacle(NamedTuple):
    """The holders and waiters that blocked an abandoned claim."""

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
        self.is_waiting = False
        self.waiter = None
        self.mode = mode
        self._table = table
        self._released = False

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The requested paths, in lock order."""
        return [self._table.levels.path(key) for key, _, requested in self.steps if requested]

    def release(self) -> None:
        """Release everything in reverse order. It never blocks, and is idempotent."""
        if not self._released:
            self._released = True
            self._table._release_claim(self)

    def __enter__(self) -> Self:
        if self._released:
            raise Closed("These locks were already released; acquire them again")
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    fence = None  # Other processes cannot acquire it, so there is nothing to compare.
    proof = None
    is_lost = False

    @property
    def fences(self) -> dict[tuple[str, str], int]:
        return {}

    def check(self) -> None:
        """Return if the locks are held.

        Raises:
            LeaseExpired: they were released.
        """
        if self._released:
            raise released_error()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.release()


class AsyncHeld:
    """`Held` for an event loop: `release` is awaited, as it is for locks that processes share."""

    __slots__ = ("_held",)

    fence = None
    proof = None
    is_lost = False

    def __init__(self, held: Held) -> None:
        self._held = held

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The requested paths, in lock order."""
        return self._held.paths

    @property
    def fences(self) -> dict[tuple[str, str], int]:
        return self._held.fences

    def check(self) -> None:
        """Return if the locks are held; raises LeaseExpired if they were released."""
        self._held.check()

    async def release(self) -> None:
        """Release everything in reverse order. It never blocks, and is idempotent."""
        self._held.release()

    async def __aenter__(self) -> Self:
        self._held.__enter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._held.release()


class LocksBegun(Exception):
    """The first caller has acquired a lock since a transaction without locks began. Repeat it with locks."""


class CallerLocks:
    """The lock table as callers of a plane use it."""

    def __init__(self, table: LockTable, wait_for_writes: Callable[[], None]) -> None:
        """`wait_for_writes` returns when all writes have ended that began before it was called."""
        self.acquire: Callable[..., Held] = self._acquire_first
        self.acquire_all: Callable[..., Held] = self._acquire_all_first
        self.stats = table.stats
        self._table = table
        self._wait_for_writes = wait_for_writes
        self._is_used = False

    def _acquire_first(self, *args: Any, **kwargs: Any) -> Held:
        self._begin_use()
        return self._table.acquire(*args, **kwargs)

    def _acquire_all_first(self, *args: Any, **kwargs: Any) -> Held:
        self._begin_use()
        return self._table.acquire_all(*args, **kwargs)

    def _begin_use(self) -> None:
        """From now on all durable writes of entities lock their rows; wait for those that began before."""
        if not self._is_used:
            self._table.has_callers = True
            self._wait_for_writes()
            self._is_used = True
            self.acquire = self._table.acquire  # Not a method of its own: a call more is a cost for every lock.
            self.acquire_all = self._table.acquire_all

    async def acquire_async(
        self, path: Path, mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> AsyncHeld:
        """`LockTable.acquire_async`."""
        if not self._is_used:
            await run_in_thread(self._begin_use)
        return AsyncHeld(await self._table.acquire_async(path, mode, timeout_seconds=timeout_seconds))

    async def acquire_all_async(
        self, paths: Sequence[Path], mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> AsyncHeld:
        """`LockTable.acquire_all_async`."""
        if not self._is_used:
            await run_in_thread(self._begin_use)
        return AsyncHeld(await self._table.acquire_all_async(paths, mode, timeout_seconds=timeout_seconds))


class ThreadWaiter:
    """Wakes one thread."""

    __slots__ = ("_sleep_lock",)
    is_closed = False

    def __init__(self) -> None:
        self._sleep_lock = threading.Lock()
        self._sleep_lock.acquire()

    def wait(self, seconds: float) -> None:
        self._sleep_lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    def wake(self) -> bool:
        self._sleep_lock.release()
        return True


class TaskWaiter:
    """Wakes one asyncio task, from any thread."""

    __slots__ = ("_loop", "_woken")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = self._loop.create_future()

    async def wait(self, seconds: float) -> None:
        timer = self._loop.call_later(seconds, _wake, self._woken)
        try:
            await self._woken
        finally:
            timer.cancel()

    def wake(self) -> bool:
        if _get_running_loop() is self._loop:
            _wake(self._woken)
            return True
        try:
            self._loop.call_soon_threadsafe(_wake, self._woken)
        except RuntimeError:  # The loop is closed, and its tasks are gone.
            return False
        return True

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()


Found = TypeVar("Found")
AnyWaiter = TypeVar("AnyWaiter", ThreadWaiter, TaskWaiter)


def _wake(woken: "asyncio.Future[None]") -> None:
    if not woken.done():
        woken.set_result(None)


def _name(owner: Owner) -> str:
    identity = owner.identity
    if isinstance(identity, threading.Thread):
        return f"thread {identity.name}"
    return f"task {identity.get_name()}"
