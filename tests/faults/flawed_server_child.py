"""The CLI with a deliberate flaw, to show that histories find it: `flawed_server_child.py FLAW serve …`."""

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from fastness import limits
from fastness.backends.postgres import groups, listener, locked_view, sessions
from fastness.errors import QueueMessageLeaseMismatch
from fastness.layers import leases, lock_records
from fastness.layers.queues import enqueue, settling
from fastness.lock_rules import Mode


def isolate_nothing() -> None:
    """Transactions take no locks, and see each other's commits in the middle."""
    groups.LockedView = locked_view.SnapshotView  # type: ignore[attr-defined]


def accept_old_fences() -> None:
    """An ack is accepted although the lease of its message has ended."""
    checked: Any = settling._ack

    def unchecked(*args: Any, **options: Any) -> Any:
        try:
            return checked(*args, **options)
        except QueueMessageLeaseMismatch:
            return "", False

    settling._ack = unchecked


def grant_held_leases() -> None:
    """A lease is granted although another owner holds it."""
    leases.Grant.holds_at = lambda self, now_ms: False  # type: ignore[method-assign]


def miss_notifications() -> None:
    """The commits of other servers wake no one."""
    listener.is_own = lambda payload, writer: True  # type: ignore[attr-defined]
    limits.WATCH_RECHECK_SECONDS = 3_600.0  # type: ignore[misc]


def lose_commits() -> None:
    """Some commits are acknowledged, and not made."""
    commit, numbers = sessions.Session.commit, count()

    def commit_most(self: sessions.Session, tx: Any, log_position: bytes) -> None:
        if tx.has_writes and next(numbers) % 40 == 39:
            self.rollback()
        else:
            commit(self, tx, log_position)

    sessions.Session.commit = commit_most  # type: ignore[method-assign]


def forget_keys() -> None:
    """A put that is repeated with its idempotency key is stored again."""
    enqueue._duplicate_of = lambda *args: None


def ignore_exclusive_holders() -> None:
    """A shared lock is granted although another session holds an exclusive one."""
    conflicts = lock_records.LockKeys.conflicts

    def of_others(self: lock_records.LockKeys, mode: Mode) -> list[tuple[bytes, bytes]]:
        return [] if mode is Mode.SHARED else conflicts(self, mode)

    lock_records.LockKeys.conflicts = of_others  # type: ignore[method-assign]


def forget_intents() -> None:
    """A lock of a whole table is granted although rows of it are held."""
    conflicts = lock_records.LockKeys.conflicts

    def without_intents(self: lock_records.LockKeys, mode: Mode) -> list[tuple[bytes, bytes]]:
        return conflicts(self, mode)[:1]

    lock_records.LockKeys.conflicts = without_intents  # type: ignore[method-assign]


def end_sessions_early() -> None:
    """The locks of a session are granted to others before its lease ends."""
    lock_records.Session.is_expired = lambda self, now_ms: now_ms >= self.expires_ms - self.lease_ms * 0.99  # type: ignore[method-assign]


FLAWS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        isolate_nothing,
        accept_old_fences,
        grant_held_leases,
        miss_notifications,
        lose_commits,
        forget_keys,
        ignore_exclusive_holders,
        forget_intents,
        end_sessions_early,
    )
}


if __name__ == "__main__":
    from fastness.cli.main import main

    FLAWS[sys.argv.pop(1)]()
    main()
