"""Generated from handles/locks.py by tools/make_twins.py; change that file instead."""

from collections.abc import Mapping, Sequence

from holdfast.errors import NotEmbedded
from holdfast.wire import Transport
from holdfast.wire.transport import HeldLock, LockStats, LockTable


class Locks:
    """The plane's locks, in this order: those of agents, the database, entity types, records. Within this process only.

    The levels of agents are `identity`, `contacts`, `dedupe`, `inbox`, `outbox` and `readstate`. The ingress holds
    `dedupe` and the inboxes and outboxes of its pushes while it stores them. To exclude other processes, use a lease
    and its fence.
    """

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe

    def acquire(self, path: Sequence[str], mode: str = "X", *, timeout_seconds: float | None = None) -> HeldLock:
        """The lock at `[level, name]`, like `["entity_type", "task"]`, `["record_id", "task/1"]`, `["inbox", "bob"]`.

        A context manager, which releases it at its end. Modes are S and X, and the intents IS and IX, which are
        acquired automatically on the levels above.

        Raises:
            LockOrderViolation: it comes before a lock that the caller holds; waiting could deadlock.
            LockTimeout: it was not released within `timeout_seconds` (default: 5 for a record, 10 above).
        """
        return self._table().acquire(path, mode, timeout_seconds=timeout_seconds)

    def acquire_all(
        self, paths: Sequence[Sequence[str]], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> HeldLock:
        """Several locks, all or none, acquired in the order that cannot deadlock: all of agents, or all of data."""
        return self._table().acquire_all(paths, mode, timeout_seconds=timeout_seconds)

    def stats(self) -> Mapping[str, LockStats]:
        """For each level, how often its locks were acquired and waited for, and for how long."""
        return self._table().stats()

    def _table(self) -> LockTable:
        if self._transport.locks is None:
            raise NotEmbedded("Locks work within one process; use plane.lease with a server")
        return self._transport.locks(self._universe)
