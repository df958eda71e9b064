"""The progress of a migration, stored in its target, and the merging of queue counters.

    ("fastness", "migration")  ->  copying ──► checking ──► done

The record changes in the transactions that copy, so a migration resumes exactly where it stopped. Until it is `done`,
the key space cannot be opened as a plane. Afterwards the record stays to document the source; a later migration does
not copy it.

Everything is copied unchanged except queue counters and the fence floor. PostgreSQL has one record of counters per
process that ever wrote to the queue, and a directory has a single one. Several records are merged into one. The floor
is raised, because the last commits of the source may have been lost.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from fastness.errors import Conflict, InvalidKey, MigrationUnfinished, TargetNotEmpty
from fastness.kv import Pair, Subspace, Transaction, fence_floor, formats, pages, prefix_range, unpack
from fastness.layers import lineages
from fastness.layers.queues import counters
from fastness.layers.queues import keys as queue_keys
from fastness.layers.queues.counters import QueueCounters
from fastness.layers.queues.keys import QueueKey, QueueKeys
from fastness.wire import stored_messages

KEY: Final = Subspace("fastness").key("migration")
BEGIN, END = prefix_range(b"")
_COUNTERS_ELEMENT: Final = Subspace("tally").prefix
_decode_counters = msgspec.msgpack.Decoder(QueueCounters).decode


class State(StrEnum):
    """The phase of a migration."""

    COPYING = "copying"
    CHECKING = "checking"
    DONE = "done"


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a migration."""

    source: str  # Without a password.
    began_ms: int
    state: State = State.COPYING
    at: bytes = BEGIN  # All keys below are copied or checked, depending on the state.
    keys: int = 0  # How many keys that are.
    ranges: int = 0  # Ranges compared.
    again: int = 0  # Ranges copied a second time, because the source had changed.
    digest: bytes = b""  # Of the digests of all ranges so far.
    objects: int = 0
    object_bytes: int = 0
    logs: int = 0  # Session logs that were not yet in the object store.
    ended_ms: int = 0


_decode = msgspec.msgpack.Decoder(Migration).decode
_encode = msgspec.msgpack.Encoder().encode


def load(tx: Transaction) -> Migration | None:
    """The migration that this key space is or was the target of; None if there is none."""
    stored = tx.get(KEY)
    return None if stored is None else _decode(stored)


def begin(tx: Transaction, source: str) -> Migration:
    """Start a migration to this key space, or resume the one that was started.

    Raises:
        TargetNotEmpty: the key space holds other data.
    """
    before = load(tx)
    if before is None:
        if any(key not in (lineages.KEY, formats.KEY, fence_floor.KEY) for key, _ in tx.scan(BEGIN, END, limit=4)):
            raise TargetNotEmpty("The target already holds a plane, which was not changed; choose an empty target")
        before = Migration(source=source, began_ms=tx.now_ms)
        tx.delete(lineages.KEY)  # The target becomes the source's plane.
        formats.record(tx)
        tx.put(KEY, _encode(before))
    elif before.source != source:
        content = "a plane" if before.state is State.DONE else "an unfinished migration"
        raise TargetNotEmpty(f"The target holds {content} from {before.source}; choose an empty target")
    return before


def save_progress(
    tx: Transaction,
    before: Migration,
    after: Migration,
    pairs: Iterable[Pair] = (),
    *,
    cleared: tuple[bytes, bytes] | None = None,
) -> Migration:
    """Write `pairs` and the new progress; returns the stored progress.

    Raises:
        Conflict: another process has changed the progress.
    """
    if load(tx) != before:
        raise Conflict("Another process migrates to this target; wait for it, or stop it and run this again")
    if cleared is not None:
        tx.delete_range(*cleared)
    for key, value in pairs:
        tx.put(key, value)
    if after.state is State.DONE:
        after = msgspec.structs.replace(after, ended_ms=tx.now_ms)
    tx.put(KEY, _encode(after))
    return after


def withdraw(tx: Transaction, begun: Migration) -> None:
    """Remove the record of a migration that has copied nothing yet."""
    if load(tx) == begun and begun.at == BEGIN and begun.state is State.COPYING:
        tx.delete(KEY)
        tx.delete(formats.KEY)


def check_complete(tx: Transaction) -> None:
    """Raise MigrationUnfinished if this key space is the target of an unfinished migration."""
    migration = load(tx)
    if migration is not None and migration.state is not State.DONE:
        raise MigrationUnfinished(
            f"This is the target of an unfinished migration from {migration.source}; finish it with "
            "`fastness migrate SOURCE TARGET`, which resumes where it stopped, or empty the target"
        )


def queue_of_counters_key(key: bytes) -> QueueKeys | None:
    """The keys of the queue whose counters are stored under `key`; None for all other keys."""
    if _COUNTERS_ELEMENT not in key:
        return None
    try:
        elements = unpack(key)
    except InvalidKey:
        return None
    match elements:
        case ("u", str(universe), "q", str(queue), "tally", str()):
            return queue_keys.keys_of(QueueKey(universe, queue))
    return None


def merged_counters(tx: Transaction, queue: QueueKeys) -> Pair:
    """The counters of all writers of a queue as the record of a single writer; a single writer's own are unchanged."""
    values = [value for page in pages(tx, *queue.all_counters.range()) for key, value in page]
    if len(values) == 1 and tx.get(queue.own_counters) is not None:
        return queue.own_counters, values[0]
    merged = counters.merged_counters(tx, queue, [_decode_counters(value) for value in values])
    return queue.own_counters, stored_messages.encode(merged)
