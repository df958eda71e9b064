"""The ordered, transactional key space that everything else is a thin layer over.

    database.transact(work, *args, tier=...)   runs work(tx, *args), commits what it wrote, returns its result
    database.read(work, *args)                 runs work(tx, *args) on a snapshot; writers are not held up
    database.watch(prefix)                     wakes when a key below prefix may have changed

What every backend promises, and `holdfast.testing.conformance` proves:

- Strictly serializable: transactions behave as if run one at a time, each between its call and its return.
- A function that raises has written nothing.
- A transaction returns once its tier's promise holds, not before. It never shows what a power loss could
  take back: at CRITICAL even a reading one, and one that raises, waits for the sync that covers what it saw.
- `work` may run several times (conflicts are retried), so it touches nothing but its transaction.
- A wake-up from `watch` is a hint. It may come for nothing; one that is registered before a read never
  misses a later write.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from holdfast.errors import HoldfastError, Unsupported
from holdfast.kv.watches import OnCommit, Watch
from holdfast.tiers import Tier

Result = TypeVar("Result")
Work = Callable[..., Result]  # Called with the transaction first; a Concatenate here would refuse every lambda.


class Database(ABC):
    """An open key space. Safe to use from many threads and from event loops at once."""

    @abstractmethod
    def transact(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)`, commit what it wrote and return its result.

        Raises:
            TransactionConflict: it lost to other transactions as often as it may.
            NestedTransaction: called from inside a transaction of this database.
            NotSynchronous: `work` is a coroutine function or a generator.
            CommitUnknown: the answer to the commit was lost; it may have happened.
        """

    @abstractmethod
    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any
    ) -> Result:
        """`transact` for an event loop: `work` is still a plain function, only the waiting is awaited."""

    @abstractmethod
    def read(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        """Run `work` on a snapshot of the key space; a write raises ReadOnlyTransaction."""

    @abstractmethod
    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        """`read` for an event loop. A long `work` belongs in `read` on a thread of its own."""

    @abstractmethod
    def watch(self, prefix: bytes) -> Watch:
        """A watch that wakes when a key that starts with `prefix` may have changed. Close it after use."""

    @abstractmethod
    def subscribe(self, told: OnCommit) -> Callable[[], None]:
        """Have `told` called with the keys and ranges that each commit may have changed, of other processes too, until
        the function that this returns is called.

        It is called on whatever thread hears of the commit, before the commit is durable; it must be quick, and must
        neither call the database nor keep what it is given.
        """

    @abstractmethod
    def sync(self) -> None:
        """Return once everything committed so far survives power loss."""

    @abstractmethod
    def close(self) -> None:
        """Sync, then release everything. Closing twice is fine; any other use afterwards raises Closed."""

    def checkpoint(self, path: Path) -> None:
        """Write a consistent copy of the key space to the new folder `path`, while others go on.

        Raises:
            Unsupported: this backend is backed up by its own tools.
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
            with suppress(HoldfastError):  # A device that is full cannot be synced either; what came first is told.
                self.close()


class View(Protocol):
    """What a backend lets a transaction read: the committed pairs, at one moment."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[tuple[bytes, bytes]]:
        """At most `limit` pairs with begin <= key < end, in key order or against it."""
        ...
