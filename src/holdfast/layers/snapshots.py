"""Snapshots of a world's state, and the baseline that a restore starts from.

    snapshot/<height>   ->  a SnapshotRecord, immutable
    baseline            ->  the active baseline, a SnapshotRecord; it only moves forward
    manifest/<height>   ->  the hash of what defines the world from this height on

A snapshot at height h has applied every record below h, so a replay goes on at h. Its bytes are a blob. A snapshot may
become the baseline only if nothing it depends on lies beyond it: all receipts below its height are in (its receipt
horizon is its height), and its manifest is the one that the journal has at that height. Otherwise promotion fails
closed: a baseline that contradicts the journal would boot, and be wrong.
"""

import hashlib
from typing import Final

import msgspec

from holdfast.errors import BaselineRegressed, InvalidArgument, PromotionRefused, SnapshotExists, SnapshotNotFound
from holdfast.kv import Transaction, pages
from holdfast.layers import blobs, journal_records, journals, worlds
from holdfast.layers.blobs import Blob
from holdfast.layers.journal_records import Kind
from holdfast.layers.worlds import World, subspace
from holdfast.wire.canonical import canonical

NO_MANIFEST: Final = hashlib.sha256(b"").hexdigest()  # What a world that names no manifest has.
NOW: Final = -1  # The logical time of a snapshot that does not say when it was taken.
_GENESIS: Final = canonical(None)  # The state that every replay starts from.


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True):
    """Where a snapshot's bytes are, and what it covers."""

    snapshot_ref: str
    height: int
    logical_time_ns: int
    receipt_horizon_height: int | None
    manifest_hash: str | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SnapshotRecord).decode


def found(tx: Transaction, world: World, manifest_hash: str = NO_MANIFEST) -> None:
    """Make a world, with the empty state as its first baseline."""
    meta = worlds.create(tx, world)
    digest = hashlib.sha256(_GENESIS).digest()
    blobs.record(tx, world.universe, digest, Blob(len(_GENESIS), _GENESIS))
    record = SnapshotRecord(digest.hex(), 0, meta.created_ms * 1_000_000, 0, manifest_hash)
    tx.put(subspace(world).key("manifest", 0), manifest_hash.encode())
    tx.put(_key(world, 0), _encode(record))
    tx.put(subspace(world).key("baseline"), _encode(record))


def index(tx: Transaction, world: World, record: SnapshotRecord) -> bool:
    """Note a snapshot whose bytes are stored; whether it is new. The identical record again changes nothing.

    Raises:
        SnapshotExists: another one is indexed at its height.
        InvalidArgument: it claims to cover what the journal does not have.
    """
    if not 0 <= record.height <= journals.head(tx, world):
        raise InvalidArgument(f"Height {record.height} lies beyond the journal's head; snapshot what was applied")
    known = tx.get(_key(world, record.height))
    if known is None:
        tx.put(_key(world, record.height), _encode(record))
        return True
    if _decode(known) != record:
        raise SnapshotExists(
            f"Another snapshot of {world.name} is indexed at {record.height}; use the one that is there"
        )
    return False


def commit(tx: Transaction, world: World, record: SnapshotRecord, *, promote: bool) -> SnapshotRecord:
    """Index a snapshot, note it in the journal, and make it the baseline if asked to: all or nothing.

    Doing it again changes nothing. A snapshot that does not say when it was taken was taken now.

    Raises:
        PromotionRefused: it does not qualify as a baseline.
        BaselineRegressed: the baseline is ahead of it already.
    """
    worlds.require_active(tx, world)
    if record.logical_time_ns == NOW:
        record = msgspec.structs.replace(record, logical_time_ns=_time_of(tx, world, record))
    if promote:
        _check_promotion(tx, world, record)
    height = journals.head(tx, world)
    events = [journal_records.of(Kind.SNAPSHOT, msgspec.structs.asdict(record))] if index(tx, world, record) else []
    if promote and baseline(tx, world) != record:
        tx.put(subspace(world).key("baseline"), _encode(record))
        events.append(journal_records.of(Kind.BASELINE, msgspec.structs.asdict(record)))
    if events:
        journals.write(tx, world, events, height)
    return record


def copy_below(tx: Transaction, source: World, target: World, height: int) -> None:
    """Give a fork the manifests and snapshots of its source up to `height`.

    The newest of these snapshots that qualifies is the fork's baseline; the one at height 0 always does.
    """
    for name in ("manifest", "snapshot"):
        begin, _ = subspace(source).range(name)
        for pairs in pages(tx, begin, subspace(source).key(name, height) + b"\x00"):
            for key, value in pairs:
                tx.put(subspace(target).key(*subspace(source).unpack(key)), value)
    begin, end = subspace(target).range("snapshot")
    for pairs in pages(tx, begin, end, reverse=True):
        for record in (_decode(value) for _, value in pairs):
            if record.receipt_horizon_height == record.height and record.manifest_hash is not None:
                tx.put(subspace(target).key("baseline"), _encode(record))
                return


def baseline(tx: Transaction, world: World) -> SnapshotRecord:
    """The active baseline.

    Raises:
        WorldNotFound: nobody made the world.
    """
    stored = tx.get(subspace(world).key("baseline"))
    if stored is None:
        worlds.describe(tx, world)
        raise SnapshotNotFound(f"World {world.name} has no baseline; it was not made by create")
    return _decode(stored)


def at(tx: Transaction, world: World, height: int) -> SnapshotRecord:
    """The snapshot at exactly this height."""
    stored = tx.get(_key(world, height))
    if stored is None:
        raise SnapshotNotFound(f"World {world.name} has no snapshot at {height}; list those it has")
    return _decode(stored)


def page(tx: Transaction, world: World, *, start: int = 0, limit: int) -> list[SnapshotRecord]:
    """At most `limit` snapshots from the height `start` on, in order."""
    _, end = subspace(world).range("snapshot")
    return [_decode(value) for _, value in tx.scan(_key(world, start), end, limit=limit)]


def set_manifest(tx: Transaction, world: World, manifest_hash: str, *, expected_head: int) -> int:
    """Note in the journal that the world is defined by another manifest from here on; the height of the note."""
    note = journal_records.of(Kind.MANIFEST, manifest_hash)
    height = journals.append(tx, world, [note], expected_head=expected_head)
    tx.put(subspace(world).key("manifest", height + 1), manifest_hash.encode())
    return height


def manifest_at(tx: Transaction, world: World, height: int) -> str:
    """The manifest that the records below `height` leave in force."""
    begin, _ = subspace(world).range("manifest")
    latest = tx.scan(begin, subspace(world).key("manifest", height) + b"\x00", limit=1, reverse=True)
    return latest[0][1].decode() if latest else NO_MANIFEST


def _check_promotion(tx: Transaction, world: World, record: SnapshotRecord) -> None:
    current = baseline(tx, world)
    if record.height < current.height:
        raise BaselineRegressed(f"The baseline of {world.name} is at {current.height} and does not go back")
    if record.receipt_horizon_height != record.height:
        raise PromotionRefused(
            f"The receipt horizon is {record.receipt_horizon_height}, and a baseline's is its height, {record.height}; "
            "wait until all receipts below it are in"
        )
    if record.manifest_hash is None:
        raise PromotionRefused("The snapshot names no manifest, so a restore could not tell what it belongs to")
    in_force = manifest_at(tx, world, record.height)
    if record.manifest_hash != in_force:
        raise PromotionRefused(
            f"The snapshot's manifest is {record.manifest_hash}, and the journal has {in_force} at {record.height}"
        )


def _time_of(tx: Transaction, world: World, record: SnapshotRecord) -> int:
    """Now, or the time under which the same snapshot is known: a retry must find itself."""
    known = tx.get(_key(world, record.height))
    if known is not None and (same := _decode(known)).snapshot_ref == record.snapshot_ref:
        return same.logical_time_ns
    return tx.now_ms * 1_000_000


def _key(world: World, height: int) -> bytes:
    return subspace(world).key("snapshot", height)
