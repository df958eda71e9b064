"""Fault injection, at points that a test or a random seed chooses.

A wrapped database or object store calls its `Faults` at named points, and raises the error that they return.

    transact: begin    nothing has happened yet
    transact: commit   the work ran, nothing is written
    transact: answer   it is committed, the caller does not know yet
    put: begin, put: tear (half of the body is stored), put: answer, and so on for every operation of an object store

`ChosenFault` fails at the point with a given number. A test can count the points of a protocol first, then fail at each
of them; new points are covered automatically. `SeededFaults` fails at random, reproducibly for a seed.
"""

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, Generic, NamedTuple, Protocol, cast

from fastness.backends.objects import ObjectStore
from fastness.errors import CommitUnknown, Unreachable
from fastness.kv import Database, Pair, Result, Transaction, Work, fence_floor
from fastness.kv.wrapped_database import WrappedDatabase
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier

Undo = dict[bytes, bytes | None]


class _Writes(NamedTuple):
    """What a transaction wrote."""

    undo: Undo  # How to revert it.
    may_lose: bool = False  # A power loss may revert it after its caller has the result.
    is_exposed: bool = False  # Transactions that may be lost wait for it.


_NO_WRITES: Final = _Writes({})


class Crash(BaseException):
    """A process crash: a BaseException, so handlers for ordinary errors do not catch it."""


class Faults(Protocol):
    """Decides where to fail."""

    def at(self, point: str) -> BaseException | None:
        """The error to raise at this point, if any."""
        ...


class ChosenFault:
    """Fails once, at the point with the number `fail_at` (from 0). `points` lists all points reached so far."""

    def __init__(self, fail_at: int | None = None, error: Callable[[], BaseException] = Crash) -> None:
        self.points: list[str] = []
        self._fail_at = fail_at
        self._error = error

    def at(self, point: str) -> BaseException | None:
        self.points.append(point)
        return self._error() if len(self.points) - 1 == self._fail_at else None


class SeededFaults:
    """Refuses calls, loses answers and delays at random, reproducibly for a seed."""

    def __init__(
        self,
        seed: int,
        *,
        refused: float = 0.0,
        lost: float = 0.0,
        delayed: float = 0.0,
        clock: ManualClock | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._refused = refused
        self._lost = lost
        self._delayed = delayed
        self._clock = clock

    def at(self, point: str) -> BaseException | None:
        if self._clock is not None and self._random.random() < self._delayed:
            self._clock.advance_ms(self._random.randrange(1, 10_000))
        after = point.endswith(": answer")
        if self._random.random() >= (self._lost if after else self._refused):
            return None
        return (
            CommitUnknown(f"Answer lost on purpose at {point}")
            if after
            else Unreachable(f"Refused on purpose at {point}")
        )


class FaultyDatabase(WrappedDatabase):
    """A database that fails where its faults decide, and that can simulate a power loss.

    Works on any backend. `power_loss` needs one caller at a time, as in a simulation.
    """

    def __init__(self, inner: Database, faults: Faults | None = None) -> None:
        super().__init__(inner)
        self.faults: Faults = faults or ChosenFault()
        self._unsynced: list[tuple[int, Undo]] = []  # The number of each commit that a power loss would revert.
        self._commits = 0
        self._critical_commit = self._exposed_commit = 0
        self._lost: list[tuple[int, int]] = []  # The first and the last commit that each power loss has reverted.

    def transact(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        result: Result = self.commit(work, *args, tier=tier, may_lose=may_lose, **kwargs).wait()
        return result

    def commit(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> "Committed[Result]":
        """The first half of `transact`: what it returns is not synced yet, and others may read what it wrote."""
        self._reach("transact: begin")
        try:
            result, writes = self._inner.transact(self._run, work, args, kwargs, may_lose, tier=tier, may_lose=may_lose)
        except Exception as error:
            return Committed(self, None, error, self._commits if tier is Tier.CRITICAL else 0)
        return Committed(self, result, None, self._note_commit(writes, tier))

    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        self._reach("transact: begin")
        with self._sync_reads_on_error(tier):
            outcome: tuple[Result, _Writes] = await self._inner.transact_async(
                self._run, work, args, kwargs, may_lose, tier=tier, may_lose=may_lose
            )
        result, writes = outcome
        return Committed(self, result, None, self._note_commit(writes, tier)).wait()

    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        self._reach("read: begin")
        with self._sync_reads_on_error(tier):
            result = self._inner.read(work, *args, tier=tier, **kwargs)
        return Committed(self, result, None, self._note_commit(_NO_WRITES, tier)).wait()

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        self._reach("read: begin")
        with self._sync_reads_on_error(tier):
            result = await self._inner.read_async(work, *args, tier=tier, **kwargs)
        return Committed(self, result, None, self._note_commit(_NO_WRITES, tier)).wait()

    def sync(self) -> None:
        self._reach("sync: begin")
        self._inner.sync()
        self.sync_up_to(self._commits)

    def power_loss(self) -> int:
        """Revert every unsynced commit, and do what opening the key space again does. Returns how many there were."""
        lost, self._unsynced = self._unsynced, []
        for _, undo in reversed(lost):
            self._inner.transact(_apply, undo)
        if lost:
            self._lost.append((lost[0][0], lost[-1][0]))
        self._inner.transact(fence_floor.raise_floor)
        self._commits += 1
        self._critical_commit = self._exposed_commit = self._commits
        return len(lost)

    def sync_up_to(self, commit: int) -> None:
        """Make every commit up to this number durable.

        Raises:
            CommitUnknown: it was lost with the power.
        """
        if any(first <= commit <= last for first, last in self._lost):
            raise CommitUnknown("The power was lost before the sync")
        self._unsynced = [each for each in self._unsynced if each[0] > commit]

    def _run(
        self, tx: Transaction, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any], may_lose: bool
    ) -> "tuple[Result, _Writes]":
        result = work(tx, *args, **kwargs)
        writes = _Writes(_previous_values(tx), may_lose and not tx.is_kept, tx.is_exposed)
        self._reach("transact: commit")
        return result, writes

    @contextmanager
    def _sync_reads_on_error(self, tier: Tier) -> Iterator[None]:
        """A CRITICAL transaction that raises has synced what it read, like one that returns."""
        try:
            yield
        except Exception:
            if tier is Tier.CRITICAL:
                self.sync_up_to(self._commits)
            raise

    def _note_commit(self, writes: "_Writes", tier: Tier) -> int:
        """Number a commit; returns the one that must be durable before its caller gets the result."""
        before = self._exposed_commit if writes.undo else self._critical_commit
        if writes.undo:
            self._commits += 1
            self._unsynced.append((self._commits, writes.undo))
            if tier is Tier.CRITICAL and not writes.may_lose:
                self._critical_commit = self._commits
                if writes.is_exposed:
                    self._exposed_commit = self._commits
        if tier is not Tier.CRITICAL:
            return 0
        return before if writes.may_lose else self._commits

    def _reach(self, point: str) -> None:
        error = self.faults.at(point)
        if error is not None:
            raise error


class Committed(Generic[Result]):
    """A transaction whose caller has no answer yet."""

    def __init__(self, database: FaultyDatabase, result: Result | None, error: Exception | None, commit: int) -> None:
        self._database = database
        self._result = result
        self._error = error
        self._commit = commit  # To be durable before the answer; 0: none.

    def wait(self) -> Result:
        """The result, or the error of the transaction, once what it needs is durable.

        Raises:
            CommitUnknown: the power was lost before that.
        """
        self._database.sync_up_to(self._commit)
        if self._error is not None:
            raise self._error
        self._database._reach("transact: answer")
        return cast("Result", self._result)


def faulty_objects(inner: ObjectStore, faults: Faults) -> ObjectStore:
    """An object store that fails, truncates bodies and loses answers where its faults decide."""
    return cast("ObjectStore", _FaultyObjects(inner, faults))


class _FaultyObjects:
    """Calls its faults at `<operation>: begin`, `: tear` (if there is a whole body) and `: answer`."""

    def __init__(self, inner: ObjectStore, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method):
            return method
        operation = name.removesuffix("_async")

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._reach(f"{operation}: begin")
            torn = self._tear(operation, args)
            result = method(*torn[0], **kwargs) if torn else method(*args, **kwargs)
            return self._answer(operation, result, torn)

        @wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            self._reach(f"{operation}: begin")
            torn = self._tear(operation, args)
            result = await (method(*torn[0], **kwargs) if torn else method(*args, **kwargs))
            return self._answer(operation, result, torn)

        return call_async if inspect.iscoroutinefunction(method) else call

    def _tear(self, operation: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], BaseException] | None:
        """The arguments with half of the body, and the error to raise then; None if this call stores the whole body."""
        if operation not in ("put", "create", "replace"):
            return None
        error = self._faults.at(f"{operation}: tear")
        return ((args[0], args[1][: len(args[1]) // 2], *args[2:]), error) if error is not None else None

    def _answer(self, operation: str, result: Any, torn: tuple[Any, BaseException] | None) -> Any:
        if torn is not None:
            raise torn[1]
        self._reach(f"{operation}: answer")
        return result

    def _reach(self, point: str) -> None:
        error = self._faults.at(point)
        if error is not None:
            raise error


def _previous_values(tx: Transaction) -> Undo:
    """The current values of the keys that `tx` is about to change."""
    undo: Undo = {key: tx.view.get(key) for key in tx.writes}
    for begin, end in tx.cleared:
        page: list[Pair] = tx.view.scan(begin, end, 1_000, False)
        while page:
            undo.update(page)
            page = tx.view.scan(page[-1][0] + b"\x00", end, 1_000, False)
    return undo


def _apply(tx: Transaction, undo: Undo) -> None:
    for key, value in undo.items():
        if value is None:
            tx.delete(key)
        else:
            tx.put(key, value)
