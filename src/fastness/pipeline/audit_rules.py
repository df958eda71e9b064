"""Audit rules: check that a world is consistent with its journal. No Spark here; executors audit one world at a time.

    every chunk      exists, matches its checksum, and leaves no gap in the heights
    every record     decodes; the snapshots, baselines and manifests it records match the index
    every snapshot   is at or below the head, and its blob exists and matches its hash
    the baseline     is one of the snapshots, qualifies as one, and is not older than the journal says
    with a reducer   every snapshot equals the fold of the records below it, and a restore equals the full replay

Damage interrupts the fold. It resumes at the next snapshot, so that later damage is found too, but the reported state
covers only the records before the first damage.
"""

import hashlib
from typing import Any, Final

import cbor2
import msgspec

from fastness.errors import Corrupt, FastnessError, HashMismatch, ObjectNotFound
from fastness.layers.journal_records import Kind
from fastness.layers.snapshots import NO_MANIFEST, SnapshotRecord, is_completion
from fastness.limits import FINDINGS_PER_WORLD_MAX, STATE_REPORTED_BYTES_MAX
from fastness.pipeline import codec, replays
from fastness.pipeline.journal_chunks import JournalChunk, OpenStore, staged_object_missing
from fastness.wire.canonical import canonical
from fastness.wire.restores import Entry


class Finding(msgspec.Struct, frozen=True):
    """A problem with a world, at a height or from that height on."""

    height: int
    reason: str  # A short code: missing, checksum, malformed, schema, contradicts, index, blob, reducer, lake.
    detail: str


class SnapshotBody(msgspec.Struct, frozen=True):
    """A snapshot and the location of its bytes: inline, or in a store. Without a size, the blob is not recorded."""

    record: SnapshotRecord
    size: int | None = None
    inline: bytes | None = None
    store: str = ""
    path: str = ""
    staged: bool = False  # Written for this audit only; if it is missing, the plane is not damaged.


class PayloadBody(msgspec.Struct, frozen=True):
    """A payload that is a blob, and the location of its bytes: inline, or in a store."""

    hash: str
    inline: bytes | None = None
    store: str = ""
    path: str = ""


class AuditInput(msgspec.Struct, frozen=True):
    """Everything needed to audit one world."""

    universe: str
    world: str
    head: int
    baseline: SnapshotRecord | None
    snapshots: list[SnapshotBody]
    chunks: list[JournalChunk]
    lake_next: int = 0  # The lake has the records below this height,
    lake_gaps: list[tuple[int, int]] = []  # except these ranges (inclusive).
    program: str | None = None  # That hosts run the world with.
    payloads: list[PayloadBody] = []  # Of its items, if the reducer reads them.

    @property
    def size(self) -> int:
        """The bytes to read."""
        return sum(chunk.size for chunk in self.chunks) + sum(body.size or 0 for body in self.snapshots)


class AuditResult(msgspec.Struct, frozen=True):
    """The outcome of auditing one world."""

    universe: str
    world: str
    height: int  # Every record below it is applied to the state.
    state: bytes | None  # None: too large to store.
    digest: str
    findings: list[Finding]
    records: int
    snapshots: int
    bytes: int
    lake_count: int  # How many records the lake should have,
    lake_sum: str  # and the sum of their `record_checksum`. A string: JSON and msgpack integers end at 64 bits.

    @property
    def verdict(self) -> str:
        """ok, contradicts, or incomplete."""
        if not self.findings:
            return "ok"
        return "contradicts" if any(each.reason in _CONTRADICTIONS for each in self.findings) else "incomplete"


def record_checksum(height: int, hash: str) -> int:
    """A checksum of a record at its height. Sums of these differ if a record is missing, duplicated or misplaced."""
    return int(hash[:_CHECKSUM_DIGITS], 16) * (height + 1)


def audit_world(audit_input: AuditInput, open_store: OpenStore, reducer: str | None = None) -> AuditResult:
    """Check a world's index, records, snapshots and restore.

    Errors of unreachable stores are raised: they are not damage, and a retry may succeed.
    """
    audit_world = _WorldAuditor(audit_input, open_store, reducer)
    audit_world.check_index()
    for chunk in audit_input.chunks:
        audit_world.check_chunk(chunk)
    return audit_world.verdict()


class _WorldAuditor:
    """The state of an audit while it reads a world's records in order."""

    def __init__(self, audit_input: AuditInput, open_store: OpenStore, reducer: str | None) -> None:
        self._case = audit_input
        self._open = open_store
        found = replays.reducer_of(reducer, audit_input.world, audit_input.program)
        self._reducer = found or replays.chain
        self._compares_snapshots = reducer is not None and found is not None
        self._payloads = {each.hash: each for each in audit_input.payloads}
        self._bodies = {body.record.height: body for body in audit_input.snapshots}
        self._manifest = self._bodies[0].record.manifest_hash or NO_MANIFEST if 0 in self._bodies else NO_MANIFEST
        self._findings: list[Finding] = []
        self._height = 0  # Of the next record.
        self._state: Any = None
        self._is_state_known = True
        self._sound_state: tuple[int, Any] | None = None  # The state before the first damage, with its height.
        self._checked_heights: set[int] = set()  # Heights of the snapshots whose bytes were checked.
        self._restored: Any = None
        self._is_restoring = False
        self._records = self._bytes = self._lake_count = self._lake_sum = 0

    def check_index(self) -> None:
        """Check the snapshot index and the baseline."""
        audit_input = self._case
        for body in audit_input.snapshots:
            record = body.record
            if not 0 <= record.height <= audit_input.head:
                self._add_finding(record.height, "index", f"the snapshot is above the head {audit_input.head}")
        base = audit_input.baseline
        if base is None:
            self._add_finding(0, "index", "the world has no baseline")
            return
        known = self._bodies.get(base.height)
        if known is None or known.record != base:
            self._add_finding(base.height, "index", "the baseline differs from the snapshot at its height")
        if base.height > audit_input.head:
            self._add_finding(base.height, "index", f"the baseline is above the head {audit_input.head}")
        if base.receipt_horizon_height != base.height or base.manifest_hash is None:
            self._add_finding(
                base.height, "index", "the baseline does not qualify: its receipt horizon or its manifest is missing"
            )

    def check_chunk(self, chunk: JournalChunk) -> None:
        """Check and fold the records of the next chunk."""
        start = max(chunk.start, chunk.first)
        if start > self._height:
            self._skip_damaged(start - 1, "missing", "neither the key space nor a segment has these records")
        try:
            records = codec.read_chunk(chunk, self._open(chunk.store))
        except Corrupt as error:
            self._skip_damaged(chunk.end, codec.reason_of(error), str(error))
            return
        self._bytes += chunk.size
        for record in records[self._height - chunk.start :]:
            self._check_snapshot_here()
            try:
                number, value = cbor2.loads(record)
                kind = codec.KINDS[number]
            except Exception as error:  # A decoder may raise anything on bytes it does not understand.
                self._skip_damaged(self._height, *codec.record_fault(record, error))
                continue
            self._apply(record, number, kind, value)
            self._height += 1

    def verdict(self) -> AuditResult:
        """The result, after the last chunk was checked."""
        audit_input = self._case
        if self._height < audit_input.head:
            self._skip_damaged(audit_input.head - 1, "missing", "neither the key space nor a segment has these records")
        self._check_snapshot_here()
        self._check_restore()
        for body in audit_input.snapshots:
            if body.record.height not in self._checked_heights:
                self._read_snapshot(body)
        height, state = self._sound_state or (self._height, self._state)
        encoded = self._encode_state(height, state)
        return AuditResult(
            audit_input.universe,
            audit_input.world,
            height,
            encoded if len(encoded) <= STATE_REPORTED_BYTES_MAX else None,
            hashlib.sha256(encoded).hexdigest(),
            self._findings,
            self._records,
            len(audit_input.snapshots),
            self._bytes,
            self._lake_count,
            str(self._lake_sum),
        )

    def _apply(self, record: bytes, number: int, kind: str, value: Any) -> None:
        self._records += 1
        self._add_to_lake_checksum(record)
        if number >= Kind.SNAPSHOT:
            self._check_snapshot_record(number, value)
        if self._is_state_known:
            try:
                self._state = self._reduce(self._state, record, kind, value)
            except Exception as error:  # A reducer is user code.
                self._add_finding(self._height, "reducer", f"the reducer failed ({type(error).__name__}: {error})")
                self._drop_state()
        if self._is_restoring:
            try:
                self._restored = self._reduce(self._restored, record, kind, value)
            except Exception as error:
                self._add_finding(
                    self._height, "contradicts", f"a restore fails at this height ({type(error).__name__}: {error})"
                )
                self._restored, self._is_restoring = None, False

    def _reduce(self, state: Any, record: bytes, kind: str, value: Any) -> Any:
        if self._reducer is replays.chain:  # It needs only the bytes, which are canonical already.
            return hashlib.sha256((state or b"") + record).digest()
        return self._reducer(state, Entry(self._height, kind, self._with_payload(kind, value)))

    def _with_payload(self, kind: str, value: Any) -> Any:
        """The value of an item with the bytes of a payload that is a blob, if the reducer reads them."""
        if kind != "ingress" or not getattr(self._reducer, "reads_payloads", False):
            return value
        blob = value.get("payload_blob")
        if blob is None:
            return value
        body = self._payloads.get(blob)
        data = None if body is None else body.inline
        if body is not None and body.path:
            data = self._open(body.store).get(body.path)
        if data is None or hashlib.sha256(data).hexdigest() != blob:
            raise HashMismatch(f"the payload {blob} is missing or damaged")
        return {**value, "payload": data}

    def _check_snapshot_here(self) -> None:
        """Compare the state with the snapshot at this height, or resume from it if the state is unknown."""
        body = self._bodies.get(self._height)
        if body is None:
            return
        self._check_manifest(body.record)
        if not self._compares_snapshots:
            return
        data = self._read_snapshot(body)
        if data is None:
            return
        if self._is_state_known:
            if self._encode_state(self._height, self._state) != data:
                self._add_finding(
                    self._height, "contradicts", "the snapshot differs from the fold of the records below it"
                )
        elif (state := self._decode_state(data)) is not _UNDECODABLE:
            self._state, self._is_state_known = state, True
        if body.record == self._case.baseline and (state := self._decode_state(data)) is not _UNDECODABLE:
            self._restored, self._is_restoring = state, True

    def _check_snapshot_record(self, number: int, value: Any) -> None:
        """Check a snapshot or baseline that the journal records against the index."""
        if number == Kind.MANIFEST:
            self._manifest = value
            return
        try:
            recorded = msgspec.convert([value[name] for name in SnapshotRecord.__struct_fields__], SnapshotRecord)
        except (msgspec.ValidationError, KeyError, TypeError):
            self._add_finding(self._height, "malformed", "a snapshot record lacks the snapshot's fields")
            return
        known = self._bodies.get(recorded.height)
        if known is None:
            self._add_finding(
                recorded.height, "index", f"record {self._height} records a snapshot that is not in the index"
            )
        elif not is_completion(known.record, of=recorded):
            self._add_finding(
                recorded.height,
                "contradicts",
                f"record {self._height} records a snapshot that differs from the one in the index",
            )
        base = self._case.baseline
        if number == Kind.BASELINE and base is not None and base.height < recorded.height:
            self._add_finding(
                base.height, "contradicts", f"record {self._height} records a later baseline, at {recorded.height}"
            )

    def _check_manifest(self, record: SnapshotRecord) -> None:
        if record == self._case.baseline and self._is_manifest_known and record.manifest_hash != self._manifest:
            self._add_finding(
                record.height,
                "contradicts",
                f"the baseline has manifest {record.manifest_hash}, the journal has {self._manifest} at this height",
            )

    @property
    def _is_manifest_known(self) -> bool:
        return self._sound_state is None  # Missing records may have changed it.

    def _check_restore(self) -> None:
        if not (self._is_restoring and self._is_state_known) or self._sound_state is not None:
            return
        if self._encode_state(self._height, self._restored) != self._encode_state(self._height, self._state):
            self._add_finding(self._height, "contradicts", "a restore from the baseline differs from a full replay")

    def _read_snapshot(self, body: SnapshotBody) -> bytes | None:
        """The bytes of a snapshot; None, with a finding, if they are missing or wrong."""
        ref, height = body.record.snapshot_ref, body.record.height
        self._checked_heights.add(height)
        try:
            data = self._open(body.store).get(body.path) if body.inline is None and body.path else body.inline
        except ObjectNotFound as error:
            if body.staged:
                raise staged_object_missing(body.path, body.store) from error
            data = None
        fault = None
        if body.size is None:
            fault = f"the blob {ref} of the snapshot is not recorded"
        elif data is None:
            fault = f"the blob {ref} of the snapshot is not in the object store"
        elif len(data) != body.size or hashlib.sha256(data).hexdigest() != ref:
            fault = f"the blob {ref} of the snapshot does not match its hash"
        if fault is None:
            return data
        self._add_finding(height, "blob", fault)
        return None

    def _decode_state(self, data: bytes) -> Any:
        try:
            return replays.state_of(data)
        except Exception:  # A decoder may raise anything on bytes it does not understand.
            self._add_finding(self._height, "blob", "the state of the snapshot is not valid CBOR")
            return _UNDECODABLE

    def _encode_state(self, height: int, state: Any) -> bytes:
        try:
            return canonical(state)
        except FastnessError as error:
            self._add_finding(height, "reducer", f"the state cannot be encoded as CBOR ({error})")
            return b""

    def _skip_damaged(self, end: int, reason: str, detail: str) -> None:
        """Skip damaged records up to `end`: the fold stops, and may resume at a later snapshot."""
        start = self._height
        self._add_finding(start, reason, detail if start == end else f"{start} to {end}: {detail}")
        self._drop_state()
        self._height = end + 1

    def _drop_state(self) -> None:
        if self._sound_state is None:
            self._sound_state = (self._height, self._state)
        self._state, self._is_state_known = None, False
        self._restored, self._is_restoring = None, False

    def _add_to_lake_checksum(self, record: bytes) -> None:
        height = self._height
        if height < self._case.lake_next and not any(low <= height <= high for low, high in self._case.lake_gaps):
            self._lake_count += 1
            self._lake_sum += record_checksum(height, hashlib.sha256(record).hexdigest())

    def _add_finding(self, height: int, reason: str, detail: str) -> None:
        found = Finding(height, reason, detail)
        if len(self._findings) < FINDINGS_PER_WORLD_MAX and found not in self._findings:
            self._findings.append(found)


_UNDECODABLE: Final = object()
_CONTRADICTIONS: Final = frozenset(("contradicts", "index", "lake"))
_CHECKSUM_DIGITS: Final = 12
