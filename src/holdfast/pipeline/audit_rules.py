"""Verdicts: whether a world is what its journal says. No Spark in it; executors call it, a world at a time.

    every piece      is there, has its checksum, and leaves no height out
    every record     can be read; what it notes of snapshots, baselines and manifests is what the index has
    every snapshot   lies below the head, and its bytes are there and have their hash
    the baseline     is one of the snapshots, qualifies as one, and is not behind what the journal notes
    with a reducer   every snapshot is the fold of what lies below it, and a restore equals the full replay

Damage ends a fold: what lies above it is folded from the next snapshot on, so that more damage is found, but the state
of the world is told only up to the first record that is missing.
"""

import hashlib
from typing import Any, Final

import cbor2
import msgspec

from holdfast.errors import Corrupt, HoldfastError, ObjectNotFound
from holdfast.layers.journal_records import Kind
from holdfast.layers.snapshots import NO_MANIFEST, SnapshotRecord
from holdfast.limits import FINDINGS_OF_A_WORLD, STATE_BYTES_TOLD
from holdfast.pipeline import codec, replays
from holdfast.pipeline.journal_chunks import OpenStore, Piece, not_staged
from holdfast.wire.canonical import canonical
from holdfast.wire.restores import Entry


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong with a world, at a height or from there on."""

    height: int
    reason: str  # A short word: missing, checksum, malformed, schema, contradicts, index, blob, reducer, lake.
    detail: str


class Body(msgspec.Struct, frozen=True):
    """A snapshot, and where its bytes are: here, or in a store. Without a size, nothing knows of them."""

    record: SnapshotRecord
    size: int | None = None
    inline: bytes | None = None
    store: str = ""
    path: str = ""
    staged: bool = False  # The object was written for this look alone; that it is not there says nothing of the plane.


class Case(msgspec.Struct, frozen=True):
    """A world to be judged."""

    universe: str
    world: str
    head: int
    baseline: SnapshotRecord | None
    snapshots: list[Body]
    pieces: list[Piece]
    lake_next: int = 0  # Up to where the lake has its records,
    lake_lacks: list[tuple[int, int]] = []  # but for these heights, both ends included.

    @property
    def size(self) -> int:
        """How much there is to do, in bytes."""
        return sum(piece.size for piece in self.pieces) + sum(body.size or 0 for body in self.snapshots)


class Verdict(msgspec.Struct, frozen=True):
    """What was found."""

    universe: str
    world: str
    height: int  # Every record below it is applied to the state.
    state: bytes | None  # None: it is too large to be told.
    digest: str
    findings: list[Finding]
    records: int
    snapshots: int
    bytes: int
    lake_count: int  # Of the records that the lake should have,
    lake_sum: str  # and what `place_value` gives for each of them, summed up. JSON and msgpack end at 64 bits.

    @property
    def verdict(self) -> str:
        """ok, contradicts, or incomplete."""
        if not self.findings:
            return "ok"
        return "contradicts" if any(each.reason in _CONTRADICTIONS for each in self.findings) else "incomplete"


def place_value(height: int, hash: str) -> int:
    """A number for a record at its height. Sums of these differ if a record is missing, twice there or elsewhere."""
    return int(hash[:_PLACE_DIGITS], 16) * (height + 1)


def judge(case: Case, open_store: OpenStore, reducer: str | None = None) -> Verdict:
    """Look at everything that a world consists of.

    Stores that do not answer raise their errors: they are no damage, and another attempt may find them well.
    """
    judge = _Judge(case, open_store, reducer)
    judge.look_at_the_index()
    for piece in case.pieces:
        judge.take(piece)
    return judge.verdict()


class _Judge:
    """What is known of a world while its records pass by."""

    def __init__(self, case: Case, open_store: OpenStore, reducer: str | None) -> None:
        self._case = case
        self._open = open_store
        self._reducer = replays.reducer_of(reducer)
        self._compares = reducer is not None
        self._bodies = {body.record.height: body for body in case.snapshots}
        self._manifest = self._bodies[0].record.manifest_hash or NO_MANIFEST if 0 in self._bodies else NO_MANIFEST
        self._findings: list[Finding] = []
        self._height = 0  # The next record.
        self._state: Any = None
        self._knows_state = True
        self._told: tuple[int, Any] | None = None  # The state below the first damage.
        self._read_heights: set[int] = set()  # Of snapshots whose bytes were looked at.
        self._restored: Any = None
        self._is_restoring = False
        self._records = self._bytes = self._lake_count = self._lake_sum = 0

    def look_at_the_index(self) -> None:
        """Check what can be checked without a record."""
        case = self._case
        for body in case.snapshots:
            record = body.record
            if not 0 <= record.height <= case.head:
                self._find(record.height, "index", f"the snapshot lies beyond the head {case.head}")
        base = case.baseline
        if base is None:
            self._find(0, "index", "the world has no baseline")
            return
        known = self._bodies.get(base.height)
        if known is None or known.record != base:
            self._find(base.height, "index", "the baseline is not the snapshot of its height")
        if base.height > case.head:
            self._find(base.height, "index", f"the baseline lies beyond the head {case.head}")
        if base.receipt_horizon_height != base.height or base.manifest_hash is None:
            self._find(base.height, "index", "the baseline does not qualify: its receipts or its manifest are missing")

    def take(self, piece: Piece) -> None:
        """Check and fold the records of the next piece."""
        start = max(piece.start, piece.first)
        if start > self._height:
            self._lose(start - 1, "missing", "nothing holds these records")
        try:
            records = codec.read_piece(piece, self._open(piece.store))
        except Corrupt as error:
            self._lose(piece.end, codec.reason_of(error), str(error))
            return
        self._bytes += piece.size
        for record in records[self._height - piece.start :]:
            self._arrive()
            try:
                number, value = cbor2.loads(record)
                kind = _KINDS[number]
            except Exception as error:  # Whatever a decoder raises over bytes that it does not understand.
                self._lose(self._height, *_fault(record, error))
                continue
            self._apply(record, number, kind, value)
            self._height += 1

    def verdict(self) -> Verdict:
        """What came of it, once every piece was taken."""
        case = self._case
        if self._height < case.head:
            self._lose(case.head - 1, "missing", "nothing holds these records")
        self._arrive()
        self._check_restore()
        for body in case.snapshots:
            if body.record.height not in self._read_heights:
                self._read(body)
        height, state = self._told or (self._height, self._state)
        encoded = self._encoded(height, state)
        return Verdict(
            case.universe,
            case.world,
            height,
            encoded if len(encoded) <= STATE_BYTES_TOLD else None,
            hashlib.sha256(encoded).hexdigest(),
            self._findings,
            self._records,
            len(case.snapshots),
            self._bytes,
            self._lake_count,
            str(self._lake_sum),
        )

    def _apply(self, record: bytes, number: int, kind: str, value: Any) -> None:
        self._records += 1
        self._count_for_the_lake(record)
        if number >= Kind.SNAPSHOT:
            self._check_note(number, value)
        if self._knows_state:
            try:
                self._state = self._reduced(self._state, record, kind, value)
            except Exception as error:  # A reducer is somebody's code.
                self._find(self._height, "reducer", f"the reducer failed ({type(error).__name__}: {error})")
                self._forget()
        if self._is_restoring:
            try:
                self._restored = self._reduced(self._restored, record, kind, value)
            except Exception as error:
                self._find(self._height, "contradicts", f"a restore fails here ({type(error).__name__}: {error})")
                self._restored, self._is_restoring = None, False

    def _reduced(self, state: Any, record: bytes, kind: str, value: Any) -> Any:
        if self._reducer is replays.chain:  # It needs nothing but the bytes, which are canonical already.
            return hashlib.sha256((state or b"") + record).digest()
        return self._reducer(state, Entry(self._height, kind, value))

    def _arrive(self) -> None:
        """At a height: compare the state with the snapshot that is there, or go on from it where none is known."""
        body = self._bodies.get(self._height)
        if body is None:
            return
        self._check_manifest(body.record)
        if not self._compares:
            return
        data = self._read(body)
        if data is None:
            return
        if self._knows_state:
            if self._encoded(self._height, self._state) != data:
                self._find(self._height, "contradicts", "the snapshot is not the fold of the records below it")
        elif (state := self._decoded(data)) is not _NO_STATE:
            self._state, self._knows_state = state, True
        if body.record == self._case.baseline and (state := self._decoded(data)) is not _NO_STATE:
            self._restored, self._is_restoring = state, True

    def _check_note(self, number: int, value: Any) -> None:
        """What the journal notes of snapshots, and what the index has, are the same."""
        if number == Kind.MANIFEST:
            self._manifest = value
            return
        try:
            note = msgspec.convert([value[name] for name in SnapshotRecord.__struct_fields__], SnapshotRecord)
        except (msgspec.ValidationError, KeyError, TypeError):
            self._find(self._height, "malformed", "it notes a snapshot and does not say which")
            return
        known = self._bodies.get(note.height)
        if known is None:
            self._find(note.height, "index", f"record {self._height} notes a snapshot that the index does not have")
        elif known.record != note:
            self._find(note.height, "contradicts", f"record {self._height} notes another snapshot than the index has")
        base = self._case.baseline
        if number == Kind.BASELINE and base is not None and base.height < note.height:
            self._find(base.height, "contradicts", f"record {self._height} notes a later baseline, at {note.height}")

    def _check_manifest(self, record: SnapshotRecord) -> None:
        if record == self._case.baseline and self._knows_manifest and record.manifest_hash != self._manifest:
            self._find(
                record.height,
                "contradicts",
                f"the manifest of the baseline is {record.manifest_hash}, and the journal has {self._manifest} there",
            )

    @property
    def _knows_manifest(self) -> bool:
        return self._told is None  # Records that are missing may have changed it.

    def _check_restore(self) -> None:
        if not (self._is_restoring and self._knows_state) or self._told is not None:
            return
        if self._encoded(self._height, self._restored) != self._encoded(self._height, self._state):
            self._find(self._height, "contradicts", "a restore from the baseline is not what a full replay gives")

    def _read(self, body: Body) -> bytes | None:
        """The bytes of a snapshot, if they are what they should be."""
        ref, height = body.record.snapshot_ref, body.record.height
        self._read_heights.add(height)
        try:
            data = self._open(body.store).get(body.path) if body.inline is None and body.path else body.inline
        except ObjectNotFound as error:
            if body.staged:
                raise not_staged(body.path, body.store) from error
            data = None
        fault = None
        if body.size is None:
            fault = f"the blob {ref} of the snapshot is not stored"
        elif data is None:
            fault = f"the blob {ref} of the snapshot is not in the object store"
        elif len(data) != body.size or hashlib.sha256(data).hexdigest() != ref:
            fault = f"the blob {ref} of the snapshot has other bytes than its name says"
        if fault is None:
            return data
        self._find(height, "blob", fault)
        return None

    def _decoded(self, data: bytes) -> Any:
        try:
            return replays.state_of(data)
        except Exception:  # Whatever a decoder raises over bytes that it does not understand.
            self._find(self._height, "blob", "the state of the snapshot is no CBOR")
            return _NO_STATE

    def _encoded(self, height: int, state: Any) -> bytes:
        try:
            return canonical(state)
        except HoldfastError as error:
            self._find(height, "reducer", f"the state has no CBOR form ({error})")
            return b""

    def _lose(self, end: int, reason: str, detail: str) -> None:
        """Records up to `end` are missing: the fold ends here, and may go on from a snapshot behind them."""
        start = self._height
        self._find(start, reason, detail if start == end else f"{start} to {end}: {detail}")
        self._forget()
        self._height = end + 1

    def _forget(self) -> None:
        if self._told is None:
            self._told = (self._height, self._state)
        self._state, self._knows_state = None, False
        self._restored, self._is_restoring = None, False

    def _count_for_the_lake(self, record: bytes) -> None:
        height = self._height
        if height < self._case.lake_next and not any(low <= height <= high for low, high in self._case.lake_lacks):
            self._lake_count += 1
            self._lake_sum += place_value(height, hashlib.sha256(record).hexdigest())

    def _find(self, height: int, reason: str, detail: str) -> None:
        found = Finding(height, reason, detail)
        if len(self._findings) < FINDINGS_OF_A_WORLD and found not in self._findings:
            self._findings.append(found)


def _fault(record: bytes, error: Exception) -> tuple[str, str]:
    if len(record) > 1 and record[0] == _PAIR and record[1] not in _KINDS:
        return "schema", f"its kind is {record[1]}, which this version does not know; upgrade Holdfast"
    return "malformed", f"it is no record ({type(error).__name__}: {error}); restore it from a backup"


_KINDS: Final = {int(kind): kind.name.lower() for kind in Kind}
_PAIR: Final = 0x82  # CBOR: an array of two.
_NO_STATE: Final = object()
_CONTRADICTIONS: Final = frozenset(("contradicts", "index", "lake"))
_PLACE_DIGITS: Final = 12
