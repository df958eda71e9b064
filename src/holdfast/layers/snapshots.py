"""Snapshots of a world's state, and the baseline that a restore starts from.

    snapshot/<height>   ->  a SnapshotRecord, immutable
    baseline            ->  the active baseline, a SnapshotRecord; it only moves forward
    manifest/<height>   ->  the hash of the world's definition from this height on

A snapshot at height h has applied every record below h, so a replay continues at h. Its bytes are a blob. A snapshot
can become the baseline only if it is complete: all receipts below its height have arrived (its receipt horizon is its
height), and its manifest is the journal's manifest at that height. Otherwise promotion is refused, because a world
would start from a baseline that contradicts its journal.
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

NO_MANIFEST: Final = hashlib.sha256(b"").hexdigest()  # The manifest hash of a world without a manifest.
NOW: Final = -1  # As logical time: use the time of the commit.
_GENESIS: Final = canonical(None)  # The state that the first replay starts from.


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True):
    """The blob of a snapshot, and what it covers."""

    snapshot_ref: str
    height: int
    logical_time_ns: int
    receipt_horizon_height: int | None
    manifest_hash: str | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SnapshotRecord).decode


def create_world(tx: Transaction, world: World, manifest_hash: str = NO_MANIFEST) -> None:
    """Create a world, with the empty state as its first baseline."""
    meta = worlds.create(tx, world)
    digest = hashlib.sha256(_GENESIS).digest()
    blobs.record(tx, world.universe, digest, Blob(len(_GENESIS), _GENESIS))
    record = SnapshotRecord(digest.hex(), 0, meta.created_ms * 1_000_000, 0, manifest_hash)
    tx.put(subspace(world).key("manifest", 0), manifest_hash.encode())
    tx.put(_key(world, 0), _encode(record))
    tx.put(subspace(world).key("baseline"), _encode(record))


def index(tx: Transaction, world: World, record: SnapshotRecord) -> bool:
    """Index a snapshot whose bytes are stored; whether it is new. Repeating it changes nothing.

    Raises:
        SnapshotExists: another snapshot is indexed at its height.
        InvalidArgument: its height is beyond the journal's head.
    """
    if not 0 <= record.height <= journals.head(tx, world):
        raise InvalidArgument(f"Height {record.height} is beyond the journal's head; use the height that was applied")
    known = tx.get(_key(world, record.height))
    if known is None:
        tx.put(_key(world, record.height), _encode(record))
        return True
    if _decode(known) != record:
        raise SnapshotExists(f"Another snapshot of {world.name} is indexed at height {record.height}; use that one")
    return False


def commit(tx: Transaction, world: World, record: SnapshotRecord, *, promote: bool) -> SnapshotRecord:
    """Index a snapshot, record it in the journal, and make it the baseline if `promote`: all or nothing.

    Repeating it changes nothing. A snapshot with the logical time `NOW` gets the time of this commit.

    Raises:
        PromotionRefused: it does not qualify as a baseline.
        BaselineRegressed: the baseline is at a greater height.
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
    """Copy the manifests and snapshots of a fork's source up to `height`.

    The newest copied snapshot that qualifies becomes the fork's baseline; the one at height 0 always does.
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
        WorldNotFound: the world does not exist.
    """
    stored = tx.get(subspace(world).key("baseline"))
    if stored is None:
        worlds.describe(tx, world)
        raise SnapshotNotFound(f"World {world.name} has no baseline; it was not created by create_world")
    return _decode(stored)


def at(tx: Transaction, world: World, height: int) -> SnapshotRecord:
    """The snapshot at exactly this height.

    Raises:
        SnapshotNotFound: there is none.
    """
    stored = tx.get(_key(world, height))
    if stored is None:
        raise SnapshotNotFound(f"World {world.name} has no snapshot at height {height}; list its snapshots")
    return _decode(stored)


def page(tx: Transaction, world: World, *, start: int = 0, limit: int) -> list[SnapshotRecord]:
    """At most `limit` snapshots from the height `start` on, in order."""
    _, end = subspace(world).range("snapshot")
    return [_decode(value) for _, value in tx.scan(_key(world, start), end, limit=limit)]


def set_manifest(tx: Transaction, world: World, manifest_hash: str, *, expected_head: int) -> int:
    """Record in the journal that another manifest applies from here on; returns the height of the record."""
    record = journal_records.of(Kind.MANIFEST, manifest_hash)
    height = journals.append(tx, world, [record], expected_head=expected_head)
    tx.put(subspace(world).key("manifest", height + 1), manifest_hash.encode())
    return height


def manifest_at(tx: Transaction, world: World, height: int) -> str:
    """The manifest that applies after the records below `height`."""
    begin, _ = subspace(world).range("manifest")
    latest = tx.scan(begin, subspace(world).key("manifest", height) + b"\x00", limit=1, reverse=True)
    return latest[0][1].decode() if latest else NO_MANIFEST


def _check_promotion(tx: Transaction, world: World, record: SnapshotRecord) -> None:
    current = baseline(tx, world)
    if record.height < current.height:
        raise BaselineRegressed(
            f"The baseline of {world.name} is at height {current.height}; a snapshot at {record.height} is older"
        )
    if record.receipt_horizon_height != record.height:
        raise PromotionRefused(
            f"Promotion needs receipt_horizon_height={record.height} (the snapshot's height), not "
            f"{record.receipt_horizon_height}; wait until all receipts below it have arrived"
        )
    if record.manifest_hash is None:
        raise PromotionRefused(
            "Promotion needs manifest_hash, and the snapshot has none; pass the world's manifest hash"
        )
    current_hash = manifest_at(tx, world, record.height)
    if record.manifest_hash != current_hash:
        raise PromotionRefused(
            f"The snapshot's manifest hash is {record.manifest_hash}, but the journal has {current_hash} at height "
            f"{record.height}; take a snapshot under that manifest"
        )


def _time_of(tx: Transaction, world: World, record: SnapshotRecord) -> int:
    """The current time, or the stored time of the same snapshot, so that a retry matches it."""
    known = tx.get(_key(world, record.height))
    if known is not None and (same := _decode(known)).snapshot_ref == record.snapshot_ref:
        return same.logical_time_ns
    return tx.now_ms * 1_000_000


def _key(world: World, height: int) -> bytes:
    return subspace(world).key("snapshot", height)
