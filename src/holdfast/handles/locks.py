"""Locks among the threads and tasks of this process, in a declared order."""

from collections.abc import Sequence
from typing import Any

from holdfast.errors import NotEmbedded
from holdfast.wire import AsyncTransport


class AsyncLocks:
    """The plane's lock table: database, then entity types, then records. It knows nothing of other processes.

    What must hold between processes needs a lease and its fence.
    """

    def __init__(self, transport: AsyncTransport, universe: str) -> None:
        self._transport = transport
        self._universe = universe

    async def acquire(self, path: Sequence[str], mode: str = "X", *, timeout_seconds: float | None = None) -> Any:
        """The lock at `[level, name]`, as in `["entity_type", "task"]` or `["record_id", "task/123"]`.

        A context manager; `release` gives it back. Modes are S and X, and the intents IS and IX, which a lock takes by
        itself on what its record is in.

        Raises:
            LockOrderViolation: it comes before something that the caller holds; waiting could become a deadlock.
            LockTimeout: others kept it for all of `timeout_seconds` (5 for a record, 10 for more).
        """
        return await self._table().acquire_async(path, mode, timeout_seconds=timeout_seconds)

    async def acquire_all(
        self, paths: Sequence[Sequence[str]], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> Any:
        """Several locks, all or none, taken in the order that cannot deadlock."""
        return await self._table().acquire_all_async(paths, mode, timeout_seconds=timeout_seconds)

    def stats(self) -> Any:
        """How often locks of each level were taken and waited for, and how long."""
        return self._table().stats()

    def _table(self) -> Any:
        tables = getattr(self._transport, "locks", None)
        if tables is None:
            raise NotEmbedded("Locks are between the threads of one process; use plane.lease with a server")
        return tables(self._universe)
