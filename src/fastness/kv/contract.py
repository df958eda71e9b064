"""The ordered, transactional key space that every layer builds on.

    database.transact(work, *args, tier=...)   runs work(tx, *args), commits its writes, returns its result
    database.read(work, *args)                 runs work(tx, *args) on a snapshot, without blocking writers
    database.watch(prefix)                     wakes when a key below prefix may have changed

What every backend guarantees, and `fastness.testing.conformance` tests:

- Strictly serializable: transactions behave as if run one at a time, each between its call and its return.
- A function that raises has written nothing.
- A transaction returns once its tier's guarantee holds, not before. It never returns data that a power loss could
  still revert: at CRITICAL, a read-only transaction and one that raises also wait for the sync that covers what they
  read.
- With `may_lose`, a CRITICAL transaction that writes waits for the CRITICAL commits before it that it may show, which
  called `tx.expose()`, and not for its own, unless it called `tx.keep()`: a power failure may revert it. Commits are
  lost from the end only, so a later CRITICAL commit keeps it. A backend may also wait for more.
- `tx.fence_floor` is higher than every fence that a lost commit may have issued (`fence_floor.py`).
- `work` may run several times (conflicts are retried), so it must touch nothing but its transaction.
- A wake-up from `watch` is a hint and may be spurious. A watch that was opened before a read never misses a later
  write.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from fastness.errors import FastnessError, Unsupported
from fastness.kv.contention import Contention
from fastness.kv.events import Publish, discard
from fastness.kv.watches import OnCommit, Watch
from fastness.tiers import Tier

Result = TypeVar("Result")
Work = Callable[..., Result]  # Called with the transaction first. `Concatenate` would reject every lambda.


class ReplayedPosition(NamedTuple):
    """How far the server that serves stale reads has replayed the primary's log."""

    is_standby: bool = False  # False: no standby answers, and the primary serves them.
    position: str = ""
    lag_ms: int | None = None  # None: not known.
    measured_ms: int = 0


class Database(ABC):
    """An open key space. Safe to use from many threads and from event loops at once."""

    contention: Contention | None = None  # Counted where several processes write.
    data_format = 0  # The format that transactions write, if it is not this version's newest. See `kv.formats`.
    defaults: Mapping[type, object] = {}  # Policies of this process, by their class; for layers, where none is stored.
    usage: "UsageCounter | None" = None  # Counts what is written. None: nothing is counted.
    publish: Publish = staticmethod(discard)  # Called with the events of a transaction once `transact` can return.
    low_space = False  # Whether the disk is nearly full: transactions that add data are refused.
    object_bytes_max: int | None = None  # A larger object would take the reserve; None: objects are on another disk.

    @property
    def refuses_writes(self) -> bool:
        """Whether the disk is so full that all other writes are refused, too."""
        return False

    @property
    def failure(self) -> FastnessError | None:
        """Why writes fail until `reopen` succeeds; None while they work."""
        return None

    @property
    def stale(self) -> "Database":
        """The same key space, with reads that may lag behind; it is closed with this one."""
        return self

    @property
    def replayed_position(self) -> ReplayedPosition | None:
        """How far behind `stale` is, as of a recent read of it; None if it never lags."""
        return None

    def reopen(self) -> None:  # noqa: B027
        """Open the key space again after a failure; acknowledged writes are intact. Does nothing if it works.

        Raises:
            DiskFull, PathUnusable, DamagedDatabase, DatabaseFailed: it cannot be opened yet; try again later.
        """

    def limit_disk_use(self, *, free_bytes: int, reserve_bytes: int) -> None:
        """Refuse new data while less than `reserve_bytes` are free."""
        self.low_space = free_bytes < reserve_bytes

    def erase_replaced(self, begin: bytes, end: bytes) -> None:  # noqa: B027
        """Remove replaced and deleted values of this range from the disk, where the key space decides that itself."""

    def check_reachable(self) -> None:  # noqa: B027
        """Return if the key space can be written to now, without waiting for that.

        Raises:
            Unreachable: no server answers, or none accepts writes.
        """

    @abstractmethod
    def transact(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        """Run `work(tx, *args, **kwargs)`, commit its writes and return its result.

        Pass `may_lose` if a power failure may revert the writes after the return.

        Raises:
            TransactionConflict: it conflicted with other transactions on every attempt.
            NestedTransaction: called from inside a transaction of this database.
            NotSynchronous: `work` is a coroutine function or a generator.
            CommitUnknown: the answer to the commit was lost; it may have happened.
        """

    @abstractmethod
    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        """`transact` for an event loop. `work` is still a plain function; only the wait for durability is awaited."""

    @abstractmethod
    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        """Run `work` on a snapshot of the key space; a write raises ReadOnlyTransaction."""

    @abstractmethod
    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        """`read` for an event loop. Run a long `work` with `read` in a thread instead."""

    @abstractmethod
    def size_of(self, begin: bytes, end: bytes, *, pairs_max: int | None = None) -> int | None:
        """The bytes of all keys and values with begin <= key < end; None if there are more than `pairs_max` pairs.

        All of them are of one snapshot. Call it in a thread if the range may be long.
        """

    @abstractmethod
    def watch(self, prefix: bytes, *others: bytes, additions: bool = False) -> Watch:
        """A watch that wakes when a key that starts with one of the prefixes may have changed. Close it after use.

        With `additions` it may sleep when such a key is deleted.
        """

    @abstractmethod
    def subscribe(self, on_commit: OnCommit) -> Callable[[], None]:
        """Call `on_commit` with the keys and ranges that each commit may have changed, including other processes'
        commits. Returns a function that ends the subscription.

        The callback runs on any thread, before the commit is durable. It must be quick, must not call the database and
        must not keep its arguments.
        """

    @abstractmethod
    def sync(self) -> None:
        """Return once everything committed so far survives power loss."""

    @abstractmethod
    def close(self) -> None:
        """Sync, then release everything. Closing twice is fine; any other use afterwards raises Closed."""

    def within(self, connection: object) -> "CallerTransaction":
        """The transaction of the caller's own database connection, in which functions can write to the key space.

        Raises:
            Unsupported: only PostgreSQL has such connections.
        """
        del connection
        raise Unsupported(
            f"{type(self).__name__} cannot write in a transaction of another database; open the plane on PostgreSQL, "
            "or use transact"
        )

    def checkpoint(self, path: Path) -> None:
        """Write a consistent copy of the key space to the new folder `path`. Transactions continue meanwhile.

        Raises:
            Unsupported: this backend needs its own backup tools.
        """
        raise Unsupported(f"{type(self).__name__} has no checkpoints; back it up with its own tools instead of {path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with suppress(FastnessError):  # The sync fails too on a full device; the first error is the one to raise.
                self.close()


class UsageCounter(Protocol):
    """Counts what transactions write. Layers find it in `Transaction.usage`, and ask it what may be written.

    What a transaction adds is counted before it is committed. A measurement must not drop it until the transaction has
    ended, so the backend reports when transactions begin and end.
    """

    def begin(self) -> int:
        """A transaction begins; the ticket that `end` takes."""

    def end(self, ticket: int) -> None:
        """The transaction was committed, or is given up."""

    def add_writes(self, writes: Mapping[bytes, bytes | None]) -> None:
        """Count the bytes of a transaction that is about to be committed."""

    def of_caller(self) -> "CallerUsage":
        """The counter for a transaction that its caller commits, some time after it has ended here."""


class CallerUsage(Protocol):
    """Counts what a transaction writes that its caller commits."""

    def add_writes(self, writes: Mapping[bytes, bytes | None]) -> None:
        """Count the bytes of the transaction."""


class CallerTransaction(Protocol):
    """A transaction that the caller has begun on a connection of its own, and commits or rolls back itself."""

    def run(self, work: Work[Result], /, *args: Any, **kwargs: Any) -> Result:
        """The result of `work(tx, *args, **kwargs)`, whose writes become part of the transaction. It runs once."""
        ...

    async def run_async(self, work: Work[Result], /, *args: Any, **kwargs: Any) -> Result:
        """`run` for an event loop."""
        ...


class View(Protocol):
    """A backend's committed pairs as of one point in time."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[tuple[bytes, bytes]]:
        """At most `limit` pairs with begin <= key < end, in key order, or in reverse order."""
        ...


class LockingView(View, Protocol):
    """A view of a key space that several processes write to."""

    def share(self, prefix: bytes) -> None:
        """See `Transaction.share`."""
        ...

    def unshare(self, prefix: bytes) -> None:
        """See `Transaction.unshare`."""
        ...

    def prefetch(self, *keys: bytes) -> None:
        """See `Transaction.prefetch`."""
        ...
