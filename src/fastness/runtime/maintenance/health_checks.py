"""Health checks of a data directory.

Every check scans one kind of data. It yields a number of checked items, 0 to show progress during long steps, and a
finding for each problem. Damage that stops a scan is a finding too. Nothing is repaired: Fastness never repairs damage
silently.
"""

import hashlib
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import cbor2
import msgspec

from fastness.backends.objects import ObjectStore
from fastness.errors import Corrupt, FastnessError, ObjectNotFound
from fastness.kv import Database, Subspace, Transaction, prefix_range, unpack
from fastness.layers import blobs, inboxes, journal_records, journals, runs, segments, snapshots, worlds
from fastness.layers.blobs import Blob
from fastness.layers.queues import keys as queue_keys
from fastness.layers.queues import message_leases
from fastness.layers.queues.counters import QueueCounters, total_counters
from fastness.layers.queues.failures import failures_of
from fastness.layers.queues.key_flow import KEY_DUE
from fastness.layers.queues.key_states import KeyState, decode_state
from fastness.layers.queues.keys import QueueKey, QueueKeys
from fastness.layers.worlds import World, WorldState
from fastness.limits import PRIORITY_MAX
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import rotation
from fastness.runtime.maintenance.key_counts import count_keys, counts_of
from fastness.runtime.maintenance.scan import names, scan_range, universes
from fastness.wire import stored_messages
from fastness.wire.health_checks import Finding
from fastness.wire.runs import RUN_PREFIX
from fastness.wire.stored_messages import StoredMessage, format_id
from fastness.wire.worlds import Segment

SAMPLED_FIRST: Final = 64  # Large blobs that are always hashed.
SAMPLED_OF_REST: Final = 0.05  # The share of the other large blobs that is hashed, unless `deep`.
_GONE: Final = (WorldState.DELETING, WorldState.DELETED)

CheckResults: TypeAlias = Iterator[int | Finding]


def all_checks(
    database: Database, objects: ObjectStore | None, logs: Path | None, *, deep: bool, live: Database | None = None
) -> dict[str, Callable[[], CheckResults]]:
    """All checks by the name of what they check.

    `logs` is the folder of session logs that are not rotated yet. `live` is the open database that `database` is a copy
    of, if any.
    """
    return {
        "keys": lambda: key_space(database),
        "blobs": lambda: all_blobs(database, objects, deep=deep),
        "worlds": lambda: all_worlds(database, objects, live),
        "messages": lambda: all_queues(database),
        "session logs": lambda: all_session_logs(objects, logs, deep=deep),
    }


def key_space(database: Database) -> CheckResults:
    """Read every key and value once, which verifies the checksums of the storage engine."""
    try:
        for _ in scan_range(database, *prefix_range(b"")):
            yield 1
    except Corrupt as error:
        yield Finding("key space", f"it cannot be read completely ({error})")


def all_blobs(database: Database, objects: ObjectStore | None, *, deep: bool) -> CheckResults:
    """Every blob exists with its recorded size; a sample, or with `deep` all, is hashed."""
    sample, large = random.Random(0), 0
    for universe in universes(database):
        keys = Subspace("u", universe, "cas")
        for key, value in scan_range(database, *keys.range()):
            yield 1
            digest = keys.unpack(key)[0]
            blob = msgspec.msgpack.decode(value, type=Blob)
            large += blob.inline is None
            is_hashed = deep or blob.inline is not None or large <= SAMPLED_FIRST or sample.random() < SAMPLED_OF_REST
            fault = yield from _blob_fault(objects, universe, digest, blob, is_hashed=is_hashed)
            if fault is not None:
                yield Finding(f"blob {digest.hex()} of {universe}", fault)


def all_session_logs(objects: ObjectStore | None, folder: Path | None, *, deep: bool) -> CheckResults:
    """Session logs have no damaged lines; rotated ones have a valid manifest entry and the bytes of their hash.

    Without `deep`, a sample of the rotated ones is hashed. A rotated file without an entry is not a finding if the
    local file is still there: its rotation was interrupted, and is repeated from it.
    """
    local_hashes: set[str] = set()
    for local in () if folder is None else rotation.local_paths(folder):
        with suppress(FileNotFoundError):  # It was rotated meanwhile.
            yield 1
            data = local.read_bytes()
            local_hashes.add(rotation.hash_when_rotated(local.stem, local.parent.name, data))
            yield from _damaged_lines(str(local), data)
    if objects is not None:
        yield from _rotated_session_logs(objects, local_hashes, deep=deep)


def _rotated_session_logs(objects: ObjectStore, local_hashes: set[str], *, deep: bool) -> CheckResults:
    sample, count = random.Random(0), 0
    unlisted: dict[str, str] = {}  # Bodies, which come before the entries.
    for path, is_entry in rotation.rotated_paths(objects):
        try:
            if is_entry:
                yield 0
                unlisted.pop(rotation.body_start(path), None)
                if not _exists(objects, body := rotation.read_manifest(objects, path).path):
                    yield Finding(f"session log {body}", "it is not in the object store, but has a manifest entry")
                continue
            yield 1
            count += 1
            if rotation.hash_in_name(path) not in local_hashes:
                unlisted[rotation.start_of(path)] = path
            is_hashed = deep or count <= SAMPLED_FIRST or sample.random() < SAMPLED_OF_REST
            if is_hashed and not rotation.is_intact(path, data := objects.get(path)):
                yield Finding(f"session log {path}", "its content does not match the SHA-256 in its name")
            elif is_hashed:
                yield from _damaged_lines(path, data)  # It may have been damaged before it was rotated.
        except ObjectNotFound:
            continue  # It was removed meanwhile.
        except FastnessError as error:
            yield Finding(f"session log {path}", f"it cannot be read ({error})")
    for path in unlisted.values():
        if _exists(objects, path):  # Otherwise it was removed.
            yield Finding(
                f"session log {path}",
                "it has no manifest entry; its records are read, but its age does not remove it",
                "restore the entry from a backup, or, if a server ended while it moved the file, start it again",
            )


def _damaged_lines(path: str, data: bytes) -> CheckResults:
    damaged = log_format.damaged_lines(data)
    if damaged:
        yield Finding(f"session log {path}", f"{damaged:,} of its lines are damaged; the others are read")


def _exists(objects: ObjectStore, path: str) -> bool:
    try:
        objects.head(path)
    except ObjectNotFound:
        return False
    return True


def _blob_fault(
    objects: ObjectStore | None, universe: str, digest: bytes, blob: Blob, *, is_hashed: bool
) -> Generator[int, None, str | None]:
    if blob.inline is not None:
        is_right = len(blob.inline) == blob.size and hashlib.sha256(blob.inline).digest() == digest
        return None if is_right else "its content does not match its hash"
    if objects is None:
        return "its body is not in the object store: no object store is configured"
    path = blobs.object_path(universe, digest, blob.upload)
    try:
        size = objects.head(path).size
        if size != blob.size:
            return f"its body has {size:,} bytes, but {blob.size:,} were recorded"
        if is_hashed:
            sha = hashlib.sha256()
            for part in objects.open(path):
                sha.update(part)
                yield 0
            if sha.digest() != digest:
                return "its content does not match its hash"
    except ObjectNotFound:
        return "its body is not in the object store"
    except FastnessError as error:
        return f"its body cannot be read ({error})"
    return None


def all_worlds(database: Database, objects: ObjectStore | None, live: Database | None = None) -> CheckResults:
    """Journals have no gaps, segments match their checksums, snapshots have their bytes, inboxes their items.

    Every run that has not ended has a host, work for one, or something that it waits for.
    """
    for universe in universes(database):
        for name in names(database, Subspace("u", universe, "w")):
            yield 1
            world = World(universe, name)
            for found in _world(database, objects, world):
                if isinstance(found, Finding) and live is not None and _is_gone(live, world):
                    break  # It was deleted meanwhile, with its segments.
                yield found


def _world(database: Database, objects: ObjectStore | None, world: World) -> CheckResults:
    try:
        if not _is_gone(database, world):
            for check in (_segments, _journal, _snapshots, _inbox, _run):
                yield from check(database, objects, world)
    except FastnessError as error:
        yield Finding(f"world {world.name} of {world.universe}", f"it cannot be read ({error})")


def _is_gone(database: Database, world: World) -> bool:
    return database.read(worlds.last_meta, world).state in _GONE


def _journal(database: Database, _objects: ObjectStore | None, world: World) -> CheckResults:
    where = f"world {world.name} of {world.universe}"
    head, expected = database.read(lambda tx: (journals.head(tx, world), journals.first_hot(tx, world)))
    prefix = worlds.subspace(world).key("journal", "e")
    for key, record in scan_range(database, *prefix_range(prefix)):
        yield 0
        height = int.from_bytes(key[len(prefix) :], "big")
        if height < expected:
            continue  # An interrupted compaction left it; a segment contains it.
        if height > expected:
            yield Finding(
                where, f"its journal has a gap: record {_span(expected, height - 1)} is missing, below its head {head}"
            )
        expected = height + 1
        try:
            cbor2.loads(journal_records.split(record)[1])
        except (cbor2.CBORDecodeError, IndexError, ValueError):
            yield Finding(where, f"record {height} of its journal is damaged")
    if expected < head:
        yield Finding(
            where, f"its journal is truncated: record {_span(expected, head - 1)} is missing, below its head {head}"
        )
    elif expected > head:
        yield Finding(where, f"its journal has records up to {expected - 1}, beyond its head {head}")


def _segments(database: Database, objects: ObjectStore | None, world: World) -> CheckResults:
    where = f"world {world.name} of {world.universe}"
    expected = 0
    for _, value in scan_range(database, *Subspace("u", world.universe, "segments", world.name).range()):
        yield 0
        segment = msgspec.msgpack.decode(value, type=Segment)
        if segment.start != expected:
            yield Finding(where, f"its segments have a gap: record {_span(expected, segment.start - 1)} is missing")
        expected = segment.end + 1
        try:
            if objects is None:
                raise ObjectNotFound(segment.object_path)
            segments.parse(objects.get(segment.object_path), segment)
        except ObjectNotFound:
            yield Finding(where, f"the segment {segment.object_path} is not in the object store")
        except FastnessError as error:
            yield Finding(where, f"the segment {segment.object_path} is damaged ({error})")
    hot = database.read(journals.first_hot, world)
    if expected < hot:
        yield Finding(where, f"record {_span(expected, hot - 1)} is neither hot nor in a segment")


def _snapshots(database: Database, _objects: ObjectStore | None, world: World) -> CheckResults:
    where = f"world {world.name} of {world.universe}"
    head = database.read(journals.head, world)
    start = 0
    while page := database.read(lambda tx, start=start: snapshots.page(tx, world, start=start, limit=100)):
        for each in page:
            if each.height > head:
                yield Finding(where, f"the snapshot at {each.height} is beyond its head {head}")
            if database.read(blobs.find, world.universe, blobs.digest_of(each.snapshot_ref)) is None:
                yield Finding(where, f"the bytes of the snapshot at {each.height} are not stored")
        start = page[-1].height + 1
    baseline = database.read(snapshots.baseline, world)
    if database.read(snapshots.at, world, baseline.height) != baseline:
        yield Finding(where, f"its baseline is not the snapshot at {baseline.height}")


def _inbox(database: Database, _objects: ObjectStore | None, world: World) -> CheckResults:
    where = f"world {world.name} of {world.universe}"
    following = database.read(inboxes.next_sequence, world)
    cursor = database.read(inboxes.cursor, world)
    if cursor is not None and cursor >= following:
        yield Finding(where, f"its inbox is drained up to {cursor}, but only {following} items were ever added")
    prefix = worlds.subspace(world).key("inbox", "e")
    first = database.read(lambda tx: int.from_bytes(tx.get(worlds.subspace(world).key("inbox", "first")) or b"", "big"))
    expected = first
    for key, _ in scan_range(database, *prefix_range(prefix)):
        yield 0
        sequence = int.from_bytes(key[len(prefix) :], "big")
        if sequence != expected:
            yield Finding(where, f"its inbox has a gap: item {_span(expected, sequence - 1)} is missing")
        expected = sequence + 1
    if expected < following:
        yield Finding(where, f"its inbox is truncated: item {_span(expected, following - 1)} is missing")


def _run(database: Database, _objects: ObjectStore | None, world: World) -> CheckResults:
    if world.name.startswith(RUN_PREFIX) and database.read(runs.is_stuck, world):
        yield Finding(
            f"run {world.name.removeprefix(RUN_PREFIX)} of {world.universe}",
            "it is running, but has no host, no work that a host would find, and nothing that it waits for",
            "start a host of this universe: hosts find such runs, and continue them. Please report it",
        )


def all_queues(database: Database) -> CheckResults:
    """Counters match the messages, and every message can be delivered."""
    for universe in universes(database):
        for name in names(database, Subspace("u", universe, "q")):
            queue = QueueKey(universe, name)
            where = f"queue {name} of {universe}"
            try:
                for found in _queue_faults(database, queue):
                    yield Finding(where, found) if isinstance(found, str) else found
            except (FastnessError, msgspec.MsgspecError) as error:
                yield Finding(where, f"it cannot be read ({error})")


def _queue_faults(database: Database, queue: QueueKey) -> Iterator[int | str]:
    keys = queue_keys.keys_of(queue)
    counters: QueueCounters = database.read(total_counters, keys)
    counted = QueueCounters()
    for key, value in scan_range(database, *keys.ready_range()):
        yield 1
        message = stored_messages.decode(value)
        place = key[len(keys.ready) :]
        priority = queue_keys.priority_at(place)
        counted.ready[priority] = counted.ready.get(priority, 0) + 1
        yield from _message_faults(database, queue, message)
        if message.key is None and key != keys.ready_key(message):
            yield f"message {format_id(message.id)} is stored under the wrong priority"
        if place[1:] < counters.fronts.get(priority, b""):
            yield f"message {format_id(message.id)} is before the front of the queue and is never delivered"
    for _, value in scan_range(database, *keys.delayed_range()):
        yield 1
        message = stored_messages.decode(value)
        counted.delayed += 1
        yield from _message_faults(database, queue, message)
        if database.read(lambda tx, message=message: tx.get(keys.due_key(message.due_ms, message.id))) is None:
            yield f"message {format_id(message.id)} has no due entry, so it stays delayed forever"
        if message.due_ms < counters.next_due_ms:
            yield f"message {format_id(message.id)} is due before the next due time of the queue"
    for key, value in scan_range(database, *keys.due_range(0)):
        leased = database.read(message_leases.messages_at, keys, key, value)
        counted.leased += len(leased)
        for message in leased:
            yield 1
            yield from _message_faults(database, queue, message)
        if leased and keys.due_at(key) < counters.next_due_ms:
            yield f"a lease of {leased[0].owner} ends before the next due time of the queue"
    for _, value in scan_range(database, *keys.waiting.range()):
        yield 1
        counted.blocked += 1
        yield from _message_faults(database, queue, stored_messages.decode(value))
    yield from _counter_faults(counters, counted)
    yield from _key_faults(database, keys)


def _key_faults(database: Database, keys: QueueKeys) -> Iterator[str]:
    """The states of keys match the messages, and every key with waiting messages goes on."""
    counted = count_keys(database, keys)
    stored = {
        str(unpack(key[len(keys.key_states.prefix) :])[0]): decode_state(value)
        for key, value in scan_range(database, *keys.key_states.range())
    }
    for name in sorted({*counted, *stored}):
        state, expected = stored.get(name, KeyState()), counted.get(name, KeyState())
        if counts_of(state) != counts_of(expected):
            yield f"the state of key {name!r} does not match its messages"
        elif state.waiting and not state.ready_place and not state.leased and not state.due_ms:
            yield f"messages of key {name!r} wait, and nothing lets it go on"
        due_key = keys.due_key(state.due_ms, KEY_DUE + name.encode())
        if state.due_ms and database.read(_get, due_key) is None:
            yield f"key {name!r} has no due entry, so it does not go on in time"


def _get(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


def _message_faults(database: Database, queue: QueueKey, message: StoredMessage) -> Iterator[str]:
    id = format_id(message.id)
    if message.has_body:
        body = database.read(lambda tx: tx.get(queue_keys.keys_of(queue).body_key(message.id)))
        if body is None or len(body) != message.size:
            yield f"the payload of message {id} is missing or has the wrong size"
    elif message.blob is None and len(message.payload or b"") != message.size:
        yield f"the payload of message {id} has the wrong size"
    elif message.blob is not None:
        stored = database.read(blobs.find, queue.universe, blobs.digest_of(message.blob))
        if stored is None:
            yield f"the payload of message {id} is a blob that is not stored"
    if message.has_failures and not database.read(failures_of, queue, [message])[message.id]:
        yield f"the failed attempts of message {id} are missing"


def _counter_faults(counters: QueueCounters, counted: QueueCounters) -> Iterator[str]:
    for priority in range(PRIORITY_MAX + 1):
        stored, found = counters.ready.get(priority, 0), counted.ready.get(priority, 0)
        if stored != found:
            yield f"its counter says that {stored:,} messages of priority {priority} are ready, but there are {found:,}"
    for state in ("delayed", "leased", "blocked"):
        stored, found = getattr(counters, state), getattr(counted, state)
        if stored != found:
            yield f"its counter says that {stored:,} messages are {state}, but there are {found:,}"


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"
