"""How far a migration has come, in the target itself; and what changes on the way.

    ("holdfast", "migration")  ->  copying ──► checking ──► done

The record moves in the transactions that copy, so whoever goes on after a crash goes on exactly there. Until it says
`done`, the key space cannot be opened as a plane. It stays afterwards, as a note of where the plane came from, and is
no part of what is migrated the next time.

Everything is copied as it is but one thing: a PostgreSQL has a tally of a queue for each process that ever wrote to it,
and a directory has one in all. Several tallies become one.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from holdfast.errors import Conflict, InvalidKey, MigrationUnfinished, TargetNotEmpty
from holdfast.kv import Pair, Subspace, Transaction, pages, prefix_range, unpack
from holdfast.layers.queues import keys as queue_keys
from holdfast.layers.queues.counters import NEVER_MS, QueueCounters, add_counters
from holdfast.layers.queues.keys import QueueKey, QueueKeys

KEY: Final = Subspace("holdfast").key("migration")
BEGIN, END = prefix_range(b"")
_IN_A_TALLY: Final = Subspace("tally").prefix
_decode_counters = msgspec.msgpack.Decoder(QueueCounters).decode


class State(StrEnum):
    """What a migration is doing."""

    COPYING = "copying"
    CHECKING = "checking"
    DONE = "done"


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """A migration, as the target knows it."""

    source: str  # Where it comes from, without a password.
    began_ms: int
    state: State = State.COPYING
    at: bytes = BEGIN  # All that sorts below is copied, or checked.
    keys: int = 0  # How many that was.
    ranges: int = 0  # That were compared,
    again: int = 0  # and that had to be copied a second time, since the source had changed.
    digest: bytes = b""  # Of the digests of all ranges so far.
    objects: int = 0
    object_bytes: int = 0
    logs: int = 0  # Session logs that were not in the object store yet.
    ended_ms: int = 0


_decode = msgspec.msgpack.Decoder(Migration).decode
_encode = msgspec.msgpack.Encoder().encode


def found(tx: Transaction) -> Migration | None:
    """The migration that this key space is, or was, the target of."""
    stored = tx.get(KEY)
    return None if stored is None else _decode(stored)


def begin(tx: Transaction, source: str) -> Migration:
    """Begin a migration to this key space, or go on with the one that was begun.

    Raises:
        TargetNotEmpty: it holds something else.
    """
    before = found(tx)
    if before is None:
        if tx.scan(BEGIN, END, limit=1):
            raise TargetNotEmpty("The target holds a plane already, which is left as it is; choose an empty one")
        before = Migration(source=source, began_ms=tx.now_ms)
        tx.put(KEY, _encode(before))
    elif before.source != source:
        word = "a plane" if before.state is State.DONE else "the beginning of a migration"
        raise TargetNotEmpty(f"The target holds {word} from {before.source}; choose an empty one")
    return before


def move_on(
    tx: Transaction,
    before: Migration,
    after: Migration,
    pairs: Iterable[Pair] = (),
    *,
    cleared: tuple[bytes, bytes] | None = None,
) -> Migration:
    """Write `pairs`, and that the migration has come so far; what it is now.

    Raises:
        Conflict: somebody else has gone on with it.
    """
    if found(tx) != before:
        raise Conflict("Another process migrates to this target; let it, or stop it and run this again")
    if cleared is not None:
        tx.delete_range(*cleared)
    for key, value in pairs:
        tx.put(key, value)
    if after.state is State.DONE:
        after = msgspec.structs.replace(after, ended_ms=tx.now_ms)
    tx.put(KEY, _encode(after))
    return after


def withdraw(tx: Transaction, begun: Migration) -> None:
    """Forget a migration that has copied nothing yet."""
    if found(tx) == begun and begun.at == BEGIN and begun.state is State.COPYING:
        tx.delete(KEY)


def check_complete(tx: Transaction) -> None:
    """Raise MigrationUnfinished if this key space is not all of a plane yet."""
    migration = found(tx)
    if migration is not None and migration.state is not State.DONE:
        raise MigrationUnfinished(
            f"This is the target of a migration from {migration.source} that is not complete; finish it with "
            "holdfast migrate, which goes on where it was, or empty it"
        )


def queue_of_tally(key: bytes) -> QueueKeys | None:
    """The keys of the queue that a key is a tally of; None for all other keys."""
    if _IN_A_TALLY not in key:
        return None
    try:
        elements = unpack(key)
    except InvalidKey:
        return None
    match elements:
        case ("u", str(universe), "q", str(queue), "tally", str()):
            return queue_keys.keys_of(QueueKey(universe, queue))
    return None


def united_tally(tx: Transaction, subspace: QueueKeys) -> Pair:
    """All tallies of a queue as the one that a single writer has: as it is if it is alone, otherwise their sum."""
    values = [value for page in pages(tx, *subspace.all_counters.range()) for key, value in page]
    if len(values) == 1 and tx.get(subspace.own_counters) is not None:
        return subspace.own_counters, values[0]
    united = QueueCounters()
    all_counters = [_decode_counters(value) for value in values]
    for counters in all_counters:
        add_counters(united, counters)
    # Fronts are of no use where several write; from none, everything is found. The first note says what is due first.
    first = tx.scan(*subspace.due_range(0), limit=1)
    united.next_due_ms = united.due_front_ms = (
        int.from_bytes(first[0][0][len(subspace.due) :][:8], "big") if first else NEVER_MS
    )
    united.last_id = max(counters.last_id for counters in all_counters)
    united.disorder = max(counters.disorder for counters in all_counters)
    united.swept_minute = min(counters.swept_minute for counters in all_counters)
    latest = max(all_counters, key=lambda counters: counters.budget_ms)
    united.budget, united.budget_ms = latest.budget, latest.budget_ms
    return subspace.own_counters, queue_keys.encode(united)
