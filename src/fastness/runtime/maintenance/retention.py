"""Retention of archived worlds, dead letters, results of finished calls and messages, audit logs, and lock sessions.

Archived worlds and dead letters are deleted beyond an age or a number of bytes, the oldest first. Results are deleted
when they expire, even if no call or message follows, and lock sessions are ended, even if no other session needs their
locks. Each step can be repeated, so several processes may do it at once, and a deletion that was interrupted is
finished by the next pass.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from fastness.errors import Closed, FastnessError, WorldNotActive, WorldNotFound
from fastness.kv import Database, Transaction
from fastness.kv.value_cipher import PLANE
from fastness.layers import audit, collections, idempotency, locks, queues, segments, worlds
from fastness.layers.lock_records import SessionKey
from fastness.layers.queues import QueueKey, dead_letters, upkeep
from fastness.layers.queues.dead_letters import LetterSize
from fastness.layers.worlds import World, WorldMeta, WorldState
from fastness.limits import MESSAGES_MAX, PAGE_ITEMS
from fastness.runtime.maintenance.scan import scan_range, universes, walk
from fastness.runtime.maintenance.skipping import skip_undecryptable
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.tiers import Tier
from fastness.wire.worlds import Described

_log = logging.getLogger("fastness.upkeep")


class Deleter(Protocol):
    """The world store, as the retention uses it."""

    def delete(self, world: World, incarnation: int | None = None, *, archived_ms: int | None = None) -> Described: ...


class ArchivedWorld(NamedTuple):
    """A world that is archived, or whose deletion was interrupted."""

    world: World
    meta: WorldMeta


# Archived worlds.


def trim_worlds(database: Database, store: Deleter, options: SpaceOptions) -> int:
    """Delete the archived worlds of all universes that are past their retention; how many."""
    if options.archived_keep_seconds is None and options.archived_bytes_max is None:
        return 0
    count = 0
    for universe in universes(database):
        with skip_undecryptable(database, universe, "the retention of archived worlds"):
            count += _trim_worlds_of(database, store, options, universe)
    return count


def _trim_worlds_of(database: Database, store: Deleter, options: SpaceOptions, universe: str) -> int:
    found = sorted(_archived(database, universe), key=lambda each: (each.meta.archived_ms, each.meta.created_ms))
    excess, sizes = 0, {}
    if options.archived_bytes_max is not None:
        sizes = {each.world: size_of(database, each.world) for each in found}
        excess = sum(sizes.values()) - options.archived_bytes_max
    now_ms = database.read(_now_ms)
    count = 0
    for each in found:
        is_old = (
            options.archived_keep_seconds is not None
            and each.meta.archived_ms + round(options.archived_keep_seconds * 1_000) <= now_ms
        )
        if not is_old and excess <= 0 and each.meta.state is WorldState.ARCHIVED:
            continue
        if _delete_world(store, each):
            count, excess = count + 1, excess - sizes.get(each.world, 0)
    return count


def _delete_world(store: Deleter, archived: ArchivedWorld) -> bool:
    world, meta = archived
    try:
        store.delete(world, meta.incarnation, archived_ms=meta.archived_ms)
    except Closed:
        raise
    except (WorldNotActive, WorldNotFound):
        return False  # It was resumed, or deleted by another process.
    except FastnessError as error:
        _log.warning("archived world %s/%s could not be deleted: %s", world.universe, world.name, error)
        return False
    _log.info("archived world %s/%s deleted", world.universe, world.name)
    return True


def _archived(database: Database, universe: str) -> Iterator[ArchivedWorld]:
    for name in walk(database, worlds.names, universe):
        meta = database.read(_find_meta, world := World(universe, name))
        if meta is not None and meta.state in (WorldState.ARCHIVED, WorldState.DELETING):
            yield ArchivedWorld(world, meta)


def size_of(database: Database, world: World) -> int:
    """The bytes of a world's keys and segments. Blobs are not counted: others may name them too."""
    size = sum(len(key) + len(value) for key, value in scan_range(database, *worlds.subspace(world).range()))
    after = -1
    while page := database.read(segments.page, world, after=after, limit=PAGE_ITEMS):
        size += sum(segment.size for segment in page)
        after = page[-1].end
    return size


def _find_meta(tx: Transaction, world: World) -> WorldMeta | None:
    try:
        return worlds.last_meta(tx, world)
    except WorldNotFound:
        return None


# Dead letters.


def trim_dead_letters(database: Database, options: SpaceOptions) -> int:
    """Delete the oldest dead letters of the universes that have more bytes of them than allowed; how many."""
    if options.dead_letter_bytes_max is None:
        return 0
    count = 0
    for universe in universes(database):
        with skip_undecryptable(database, universe, "the retention of dead letters"):
            count += _trim_dead_letters_of(database, universe, options.dead_letter_bytes_max)
    return count


def _trim_dead_letters_of(database: Database, universe: str, bytes_max: int) -> int:
    found = [
        (letter, queue) for queue in _dead_letter_queues(database, universe) for letter in _letters(database, queue)
    ]
    excess = sum(letter.bytes for letter, _ in found) - bytes_max
    surplus: dict[QueueKey, list[LetterSize]] = {}
    for letter, queue in sorted(found, key=lambda each: each[0].died_ms):
        if excess <= 0:
            break
        excess -= letter.bytes
        surplus.setdefault(queue, []).append(letter)
    count = 0
    for queue, letters in surplus.items():
        for at in range(0, len(letters), MESSAGES_MAX):
            count += database.transact(dead_letters.drop, queue, letters[at : at + MESSAGES_MAX])
    if count:
        _log.info("%s dead letters of %s deleted", count, universe)
    return count


def _letters(database: Database, queue: QueueKey) -> Iterator[LetterSize]:
    after: bytes | None = b""
    while after is not None:
        page, after = database.read(dead_letters.sizes, queue, after=after, limit=PAGE_ITEMS)
        yield from page


def _dead_letter_queues(database: Database, universe: str) -> list[QueueKey]:
    names = list(walk(database, queues.names, universe))
    return [QueueKey(universe, name) for name in sorted(database.read(dead_letters.queues_of, universe, names))]


# Results.


def delete_results(database: Database) -> None:
    """Delete the expired results of keyed calls, and the expired idempotency keys and ack records of queues."""
    with skip_undecryptable(database, PLANE, "the deletion of expired results"):
        while database.read(idempotency.has_expired_keys, tier=Tier.IMPORTANT):
            database.transact(idempotency.forget, tier=Tier.IMPORTANT)
    for universe in universes(database):
        for queue in (QueueKey(universe, name) for name in walk(database, queues.names, universe)):
            with skip_undecryptable(database, universe, "the deletion of expired results"):
                if database.read(upkeep.has_expired_keys, queue, tier=Tier.IMPORTANT):
                    database.transact(upkeep.delete_expired_keys, queue, tier=Tier.IMPORTANT)


# Lock sessions.


def end_lock_sessions(database: Database) -> int:
    """End the expired lock sessions of all universes that no other session has met; how many."""
    count = 0
    for universe in universes(database):
        with skip_undecryptable(database, universe, "the end of expired lock sessions"):
            count += _end_lock_sessions_of(database, universe)
    return count


def _end_lock_sessions_of(database: Database, universe: str) -> int:
    now_ms, after, count = database.read(_now_ms), "", 0
    while page := database.read(locks.page, universe, after=after, limit=PAGE_ITEMS):
        after = page[-1][0]
        for number, session in page:
            if session.is_expired(now_ms):
                count += len(database.transact(locks.reap, SessionKey(universe, number), tier=Tier.IMPORTANT))
    return count


# Rows of collections.


def trim_audit(database: Database, options: SpaceOptions) -> int:
    """Delete the entries of all audit logs that are past their retention; how many."""
    if options.audit_keep_seconds is None:
        return 0
    keep_ms = round(options.audit_keep_seconds * 1_000)
    count = 0
    for universe in (None, *universes(database)):
        with skip_undecryptable(database, universe or PLANE, "the retention of the audit log"):
            while deleted := database.transact(audit.expire, universe, keep_ms, tier=Tier.IMPORTANT):
                count += deleted
    return count


def delete_expired_rows(database: Database) -> None:
    """Delete the rows of collections in all universes whose time to live has passed."""
    for universe in universes(database):
        with skip_undecryptable(database, universe, "the deletion of expired rows"):
            _delete_expired_rows_of(database, universe)


def _delete_expired_rows_of(database: Database, universe: str) -> None:
    after: str | None = ""
    while after is not None:
        found, next = database.read(collections.due_partitions, universe, after=after, tier=Tier.IMPORTANT)
        for partition in found:
            while database.transact(collections.sweep, universe, partition, tier=Tier.IMPORTANT):
                pass
        after = next or None


def _now_ms(tx: Transaction) -> int:
    return tx.now_ms
