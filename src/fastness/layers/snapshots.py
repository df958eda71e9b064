"""Snapshots of a world's state, and the baseline that a restore starts from.

    snapshot/<height>   ->  a SnapshotRecord, immutable
    baseline            ->  the active baseline, a SnapshotRecord; it only moves forward
    manifest/<height>   ->  the hash of the world's definition from this height on

A snapshot at height h has applied every record below h, so a replay continues at h. Its bytes are a blob. A snapshot
qualifies as the baseline if it is complete: its bytes are stored, all receipts below its height have arrived (its
receipt horizon is its height), and its manifest is the journal's manifest at that height. Promotion of any other
snapshot is refused, because a world would start from a baseline that contradicts its journal.

What a caller does not state is inferred from the journal. The horizon is the height if no effect below it is pending;
otherwise it stays unknown until a later promotion. An effect in flight is pending too. The manifest is the one that
applies at the height. Its hash is opaque to the plane: the manifest itself may be stored anywhere.
"""

import hashlib
from typing import Final, TypeVar

import msgspec

from fastness.errors import (
    BaselineRegressed,
    Conflict,
    Corrupt,
    InvalidArgument,
    MissingObject,
    PromotionRefused,
    SnapshotExists,
    SnapshotNotFound,
)
from fastness.kv import Transaction, pages
from fastness.layers import blobs, effects, journal_records, journals, worlds
from fastness.layers.blobs import Blob
from fastness.layers.journal_records import Kind
from fastness.layers.worlds import World, subspace
from fastness.wire.canonical import canonical
from fastness.wire.worlds import Snapshot

NO_MANIFEST: Final = hashlib.sha256(b"").hexdigest()  # The manifest hash of a world without a manifest.
NOW: Final = -1  # As logical time: use the time of the commit.
Value = TypeVar("Value", int, str)

_GENESIS: Final = canonical(None)  # The state that the first replay starts from.


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True):
    """The blob of a snapshot, and what it covers.

    A horizon of None is unknown. In a draft, a horizon or a manifest of None is inferred.
    """

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


def commit(
    tx: Transaction, world: World, draft: SnapshotRecord, *, promote: bool | None = None
) -> tuple[SnapshotRecord, bool]:
    """Index a snapshot whose bytes are stored, and record it in the journal; whether it is the baseline now.

    It becomes the baseline if it qualifies; with `promote=True` it must, and with `promote=False` it does not.
    Repeating the call changes nothing. In `draft`, a time of `NOW`, and a horizon or manifest of None, are filled in.

    Raises:
        SnapshotExists: another snapshot is indexed at its height.
        InvalidArgument: its height is beyond the journal's head.
        PromotionRefused: `promote` is set, and it does not qualify as the baseline.
        BaselineRegressed: `promote` is set, and the baseline is at a greater height.
    """
    worlds.require_active(tx, world)
    if not 0 <= draft.height <= journals.head(tx, world):
        raise InvalidArgument(f"Height {draft.height} is beyond the journal's head; use the height that was applied")
    known = _find(tx, world, draft.height)
    record = _completed(tx, world, draft, known)
    if known is not None and not is_completion(record, of=known):
        raise SnapshotExists(f"Another snapshot of {world.name} is indexed at height {record.height}; use that one")
    refusal = None if promote is False else _refusal(tx, world, record)
    if promote and refusal is not None:
        raise refusal
    events = [] if known is not None else [journal_records.of(Kind.SNAPSHOT, msgspec.structs.asdict(record))]
    if _has_bytes(tx, world, record):
        blobs.use(tx, world.universe, record.snapshot_ref)
    if record != known:
        tx.put(_key(world, record.height), _encode(record))
    if promote is not False and refusal is None:
        events += _set_baseline(tx, world, record)
    if events:
        journals.write(tx, world, events, journals.head(tx, world))
    return record, baseline(tx, world) == record


def promote(tx: Transaction, world: World, height: int) -> SnapshotRecord:
    """Make the snapshot at this height the baseline. Repeating it changes nothing.

    Raises:
        SnapshotNotFound: there is no snapshot at that height.
        PromotionRefused: it does not qualify as the baseline.
        BaselineRegressed: the baseline is at a greater height.
    """
    worlds.require_active(tx, world)
    known = at(tx, world, height)
    record = _completed(tx, world, known, known)
    refusal = _refusal(tx, world, record)
    if refusal is not None:
        raise refusal
    if record != known:
        tx.put(_key(world, height), _encode(record))
    if events := _set_baseline(tx, world, record):
        journals.write(tx, world, events, journals.head(tx, world))
    return record


def describe(record: SnapshotRecord, *, is_baseline: bool) -> Snapshot:
    """A snapshot as it is shown to callers."""
    return Snapshot(**msgspec.structs.asdict(record), is_baseline=is_baseline)


def is_completion(record: SnapshotRecord, *, of: SnapshotRecord) -> bool:
    """Whether `record` is the snapshot `of`, perhaps with a horizon that was unknown before."""
    horizon = _first(of.receipt_horizon_height, record.receipt_horizon_height)
    return record == msgspec.structs.replace(of, receipt_horizon_height=horizon)


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
            if _incompleteness(tx, target, record) is None:
                tx.put(subspace(target).key("baseline"), _encode(record))
                return


def baseline(tx: Transaction, world: World) -> SnapshotRecord:
    """The active baseline.

    Raises:
        WorldNotFound: the world does not exist.
    """
    found = find_baseline(tx, world)
    if found is None:
        worlds.describe(tx, world)
        raise SnapshotNotFound(f"World {world.name} has no baseline; it was not created by create_world")
    return found


def find_baseline(tx: Transaction, world: World) -> SnapshotRecord | None:
    """The active baseline; None if the world has none, because it does not exist or is damaged."""
    stored = tx.get(subspace(world).key("baseline"))
    return None if stored is None else _decode(stored)


def require_complete(tx: Transaction, world: World) -> SnapshotRecord:
    """The active baseline, after checking that a restore can start from it.

    Raises:
        Corrupt: the baseline contradicts the index or the journal, or its bytes are not stored.
    """
    record = baseline(tx, world)
    if _find(tx, world, record.height) != record or record.height > journals.head(tx, world):
        raise Corrupt(
            f"The baseline of world {world.name} at height {record.height} is not a snapshot of its journal; "
            "restore a backup, or compute the state from the first record with replay"
        )
    if not _has_bytes(tx, world, record):
        raise MissingObject(
            f"The bytes of the baseline of world {world.name} at height {record.height} are not stored; "
            "restore a backup, or compute the state from the first record with replay"
        )
    return record


def at(tx: Transaction, world: World, height: int) -> SnapshotRecord:
    """The snapshot at exactly this height.

    Raises:
        SnapshotNotFound: there is none.
    """
    found = _find(tx, world, height)
    if found is None:
        raise SnapshotNotFound(f"World {world.name} has no snapshot at height {height}; list its snapshots")
    return found


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


def _completed(tx: Transaction, world: World, draft: SnapshotRecord, known: SnapshotRecord | None) -> SnapshotRecord:
    """The snapshot with everything that its caller left out: as it was stored before, or else inferred."""
    same = known if known is not None and known.snapshot_ref == draft.snapshot_ref else draft
    time_ns = same.logical_time_ns if draft.logical_time_ns == NOW else draft.logical_time_ns
    horizon = _first(draft.receipt_horizon_height, same.receipt_horizon_height)
    if horizon is None and not effects.has_unfinished(tx, world, draft.height):
        horizon = draft.height
    manifest = _first(draft.manifest_hash, same.manifest_hash)
    return msgspec.structs.replace(
        draft,
        logical_time_ns=tx.now_ms * 1_000_000 if time_ns == NOW else time_ns,
        receipt_horizon_height=horizon,
        manifest_hash=manifest_at(tx, world, draft.height) if manifest is None else manifest,
    )


def _refusal(tx: Transaction, world: World, record: SnapshotRecord) -> Conflict | None:
    """Why a completed snapshot cannot become the baseline; None if it qualifies."""
    current = baseline(tx, world)
    if record.height < current.height:
        return BaselineRegressed(
            f"The baseline of {world.name} is at height {current.height}; a snapshot at {record.height} is older"
        )
    return _incompleteness(tx, world, record)


def _incompleteness(tx: Transaction, world: World, record: SnapshotRecord) -> PromotionRefused | None:
    """Why a world cannot start from this snapshot; None if it can."""
    if record.receipt_horizon_height is None:
        return PromotionRefused(
            f"An effect that a record below height {record.height} of {world.name} requests is pending; promote the "
            "snapshot when all receipts below it have arrived"
        )
    if record.receipt_horizon_height != record.height:
        return PromotionRefused(
            f"Promotion needs receipt_horizon_height={record.height} (the snapshot's height), not "
            f"{record.receipt_horizon_height}; wait until all receipts below it have arrived"
        )
    current_hash = manifest_at(tx, world, record.height)
    if record.manifest_hash != current_hash:
        return PromotionRefused(
            f"The snapshot's manifest hash is {record.manifest_hash}, but the journal has {current_hash} at height "
            f"{record.height}; take a snapshot under that manifest"
        )
    if not _has_bytes(tx, world, record):
        return PromotionRefused(
            f"The bytes of the snapshot at height {record.height} are not stored as blob {record.snapshot_ref}; "
            "take the snapshot again"
        )
    return None


def _set_baseline(tx: Transaction, world: World, record: SnapshotRecord) -> list[bytes]:
    """Make a snapshot the baseline; the journal record of it, unless it was the baseline already."""
    if baseline(tx, world) == record:
        return []
    tx.put(subspace(world).key("baseline"), _encode(record))
    return [journal_records.of(Kind.BASELINE, msgspec.structs.asdict(record))]


def _has_bytes(tx: Transaction, world: World, record: SnapshotRecord) -> bool:
    return blobs.find(tx, world.universe, blobs.digest_of(record.snapshot_ref)) is not None


def _find(tx: Transaction, world: World, height: int) -> SnapshotRecord | None:
    stored = tx.get(_key(world, height))
    return None if stored is None else _decode(stored)


def _first(value: Value | None, other: Value | None) -> Value | None:
    return other if value is None else value


def _key(world: World, height: int) -> bytes:
    return subspace(world).key("snapshot", height)
