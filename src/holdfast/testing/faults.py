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
from pathlib import Path
from typing import Any, Protocol, cast

from holdfast.backends.objects import ObjectStore
from holdfast.errors import CommitUnknown, Unreachable
from holdfast.kv import Database, OnCommit, Pair, Result, Transaction, Watch, Work
from holdfast.testing.clock import ManualClock
from holdfast.tiers import Tier

Undo = dict[bytes, bytes | None]


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


class FaultyDatabase(Database):
    """A database that fails where its faults decide, and that can simulate a power loss.

    Works on any backend. `power_loss` needs one caller at a time, as in a simulation.
    """

    def __init__(self, inner: Database, faults: Faults | None = None) -> None:
        self._inner = inner
        self.faults: Faults = faults or ChosenFault()
        self._unsynced: list[Undo] = []

    def transact(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        self._reach("transact: begin")
        with self._sync_reads_on_error(tier):
            outcome: tuple[Result, Undo] = self._inner.transact(self._run, work, args, kwargs, tier=tier)
        return self._acknowledge(*outcome, tier)

    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any
    ) -> Result:
        self._reach("transact: begin")
        with self._sync_reads_on_error(tier):
            outcome: tuple[Result, Undo] = await self._inner.transact_async(self._run, work, args, kwargs, tier=tier)
        return self._acknowledge(*outcome, tier)

    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        self._reach("read: begin")
        with self._sync_reads_on_error(tier):
            result = self._inner.read(work, *args, tier=tier, **kwargs)
        return self._acknowledge(result, {}, tier)

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        self._reach("read: begin")
        with self._sync_reads_on_error(tier):
            result = await self._inner.read_async(work, *args, tier=tier, **kwargs)
        return self._acknowledge(result, {}, tier)

    def watch(self, prefix: bytes) -> Watch:
        return self._inner.watch(prefix)

    def subscribe(self, on_commit: OnCommit) -> Callable[[], None]:
        return self._inner.subscribe(on_commit)

    def sync(self) -> None:
        self._reach("sync: begin")
        self._inner.sync()
        self._unsynced.clear()

    def checkpoint(self, path: Path) -> None:
        self._inner.checkpoint(path)

    def close(self) -> None:
        self._inner.close()

    def power_loss(self) -> int:
        """Revert every unsynced commit. Returns how many there were."""
        lost, self._unsynced = self._unsynced, []
        for undo in reversed(lost):
            self._inner.transact(_apply, undo)
        return len(lost)

    def _run(
        self, tx: Transaction, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Result, Undo]:
        result = work(tx, *args, **kwargs)
        undo = _previous_values(tx)
        self._reach("transact: commit")
        return result, undo

    @contextmanager
    def _sync_reads_on_error(self, tier: Tier) -> Iterator[None]:
        """A CRITICAL transaction that raises has synced what it read, like one that returns."""
        try:
            yield
        except Exception:
            if tier is Tier.CRITICAL:
                self._unsynced.clear()
            raise

    def _acknowledge(self, result: Result, undo: Undo, tier: Tier) -> Result:
        if undo:
            self._unsynced.append(undo)
        if tier is Tier.CRITICAL:
            self._unsynced.clear()  # Its sync covers all earlier commits, including what it read.
        self._reach("transact: answer")
        return result

    def _reach(self, point: str) -> None:
        error = self.faults.at(point)
        if error is not None:
            raise error


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
