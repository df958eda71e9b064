"""A view of a plane, independent of where its key space came from."""

import copy
import hashlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec

from fastness.backends.objects import ObjectStore
from fastness.backends.objects.encrypted import encrypted
from fastness.errors import (
    BlobNotFound,
    Corrupt,
    HashMismatch,
    InvalidArgument,
    InvalidName,
    MissingObject,
    NotFound,
    ObjectNotFound,
    SnapshotNotFound,
    WorldNotFound,
)
from fastness.kv import Database, Subspace, Transaction, pages
from fastness.kv.value_cipher import cipher_of
from fastness.layers import blobs, journals, lineages, segments, snapshots, tokens, worlds
from fastness.layers.lineages import Identity
from fastness.layers.snapshots import SnapshotRecord
from fastness.layers.tokens import Token
from fastness.layers.worlds import World, WorldState
from fastness.limits import CHUNK_ENTRIES, CHUNK_PAGE, PAGE_ITEMS
from fastness.names import checked_name
from fastness.pipeline.journal_chunks import JournalChunk, Stores, WorldView
from fastness.pipeline.logs import LogChunk
from fastness.pipeline.tombstones import Hidden
from fastness.pipeline.views import manifests, rows
from fastness.pipeline.views.chunk_stager import ChunkStager
from fastness.pipeline.views.manifests import Manifests
from fastness.pipeline.views.rows import (
    BlobRow,
    ChangeRow,
    EntityRow,
    LeaseRow,
    MailRow,
    MessageRow,
    ReceiptRow,
    Reference,
    StateRow,
)
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import rotation
from fastness.runtime.activity.format import LogFile
from fastness.runtime.maintenance import scan
from fastness.wire.queues import Schedule
from fastness.wire.worlds import Segment

Result = TypeVar("Result")

_DELETED_STATES = (WorldState.DELETING, WorldState.DELETED)


class WorldSummary(NamedTuple):
    """What shows whether a world has new records."""

    name: str
    head: int
    cold_below: int  # The height after the last segment.
    incarnation: int | None  # None: only `View.world` shows it.


class _ListedLogs(NamedTuple):
    """The session logs of a universe, in any order: the local ones, and the manifest entries of the others."""

    local: list[LogFile]
    entries: list[str]


class View:
    """A read-only snapshot of a plane."""

    def __init__(
        self,
        database: Database,
        *,
        objects: ObjectStore | None,
        objects_url: str | None,
        logs: Sequence[Path],
        stores: Stores,
        store_id: str,
        universes: tuple[str, ...] = (),
        is_live: bool = False,
        resources: ExitStack | None = None,
    ) -> None:
        """Create a view; `logs` are the folders of local session logs, and `resources` are released when it is closed.

        `store_id` identifies the object store across views. `is_live`: other processes write while it is read.
        """
        self.database = database
        self.objects = objects
        self.objects_url = objects_url  # None: executors cannot read the object store, so objects are staged.
        self.stores = stores
        self.is_live = is_live
        self._logs = tuple(logs)
        self._store_id = store_id
        self._universes = universes
        self._resources = resources or ExitStack()
        self._pinned_logs: dict[str, _ListedLogs] | None = None
        self._rotated: list[str] | None = None  # The universes with rotated logs: a folder is listed as a whole.
        self._opened_ms = time.time_ns() // 1_000_000
        self.hidden = Hidden()
        if self._has_encrypted_universe():
            self.objects_url = None  # Executors have no keys.
            if objects_url is not None and objects is not None:
                self.objects = encrypted(objects, database)

    def _has_encrypted_universe(self) -> bool:
        cipher = cipher_of(self.database)
        found = [] if cipher is None else [name for name in cipher.universes if name]
        return any(not self._universes or name in self._universes for name in found)

    def without(self, hidden: Hidden) -> "View":
        """The same view without what was forgotten. Only the original is to be closed."""
        if hidden == self.hidden:
            return self
        shown = copy.copy(self)
        shown.hidden = hidden
        return shown

    def identity(self) -> Identity:
        """The plane's identity.

        Raises:
            NotFound: the plane was not completely created.
        """
        found = self.database.read(lineages.load)
        if found is None:
            raise NotFound("The plane has no identity yet; open it once, with: fastness --url URL status")
        return found

    def universes(self) -> Iterator[str]:
        """The names of all universes, or of the selected ones. Some may have session logs only."""
        if self._pinned_logs is not None:
            yield from self._pinned_logs
            return
        every = heapq.merge(scan.universes(self.database), self._local_universes(), self._rotated_universes())
        for name, _ in itertools.groupby(every):
            if not self._universes or name in self._universes:
                yield name

    def pin(self) -> None:
        """List the universes and session logs now, for all later reads: new ones appear while a view is open.

        The key space of a directory or server does not change; every read of a PostgreSQL has its own snapshot.
        """
        self._pinned_logs = {universe: self._list_logs(universe) for universe in self.universes()}

    def worlds(self, universe: str) -> Iterator[WorldView]:
        """Every world that has a journal, by name; deleted ones have none."""
        for name in self.world_names(universe):
            found = self.world(universe, name)
            if found is not None:
                yield found

    def world_summaries(self, universe: str) -> Iterator["WorldSummary"]:
        """What shows whether a world has new records, for every world by name. Many are read in one transaction.

        Deleted and hidden worlds may be included.
        """
        after = ""
        while page := self.database.read(_summaries, universe, after, PAGE_ITEMS):
            yield from page
            after = page[-1].name

    def world_names(self, universe: str) -> Iterator[str]:
        """The sorted names of all worlds, including those that are being deleted."""
        return scan.names(self.database, Subspace("u", universe, "w"))

    def head(self, universe: str, name: str) -> int:
        """The number of records of a world."""
        return self.database.read(journals.head, World(universe, name))

    def world(self, universe: str, name: str) -> WorldView | None:
        """One world; None if it does not exist or was deleted."""
        if self.hidden.targets and self.hidden.hides("world", universe, name, self.incarnation(universe, name)):
            return None
        return self.database.read(_world, World(universe, name))

    def incarnation(self, universe: str, name: str) -> int:
        """How often a world of this name was created."""
        try:
            return self.database.read(worlds.last_meta, World(universe, name)).incarnation
        except WorldNotFound:
            return 0

    def hot_record_hash(self, universe: str, name: str, height: int) -> str | None:
        """The SHA-256 of a record in the key space, hex; None if it is not there any more."""
        first, hot = self.database.read(journals.next_run, World(universe, name), height, height + 1, 1)
        return hashlib.sha256(hot[0]).hexdigest() if hot and first == height else None

    def record_hash(self, universe: str, name: str, height: int) -> str | None:
        """The SHA-256 of a record, hex; None if it cannot be read."""
        found = self.hot_record_hash(universe, name, height)
        world = None if found is not None else self.world(universe, name)
        cold = () if world is None else world.segments
        segment = next((each for each in cold if each.start <= height <= each.end), None)
        if segment is None:
            return found
        try:
            records = segments.parse(self._read_object(segment.object_path), segment)
        except Corrupt:
            return None  # Reading it reports the damage.
        return hashlib.sha256(records[height - segment.start]).hexdigest()

    def chunks(self, world: WorldView, start: int, staging: str) -> list[JournalChunk]:
        """The records from `start` up to the head as chunks that executors can read, in order and without a gap.

        Cold segments are read in place. Hot records are staged in the store `staging`, and segments too if executors
        cannot reach the object store. Missing records are a chunk without a path.
        """
        return list(self.make_readable(self.locate_chunks(world, start, staging), staging))

    def locate_chunks(self, world: WorldView, start: int, staging: str) -> list[JournalChunk]:
        """Like `chunks`, but segments are not staged, whether executors can reach them or not."""
        where, found, height = World(world.universe, world.name), list[JournalChunk](), start
        stage = ChunkStager(self.stores.staging(staging), staging)
        while height < world.head:
            # Hot and cold records are read in one transaction: a compaction may run at the same time.
            cold, hot, until = self.database.read(
                _next_records, where, height, world.head, min(CHUNK_PAGE, CHUNK_ENTRIES)
            )
            if hot:
                found += stage.add(world, height, hot)
            else:
                found += stage.flush(world)
                found += [self._cold_chunk(world, segment, height) for segment in cold]
                if not cold:
                    found.append(_missing_chunk(world, height, until - 1))
            height = until
        found += stage.flush(world)
        return found

    def make_readable(self, chunks: Iterable[JournalChunk], staging: str) -> Iterator[JournalChunk]:
        """The same chunks in order, staged if executors cannot reach the object store.

        Pass the chunks of many worlds at once: several are copied concurrently.
        """
        if self.objects_url is not None:
            return iter(chunks)
        return ChunkStager(self.stores.staging(staging), staging).copy_cold(chunks, self._read_object)

    def blob(self, universe: str, hash: str) -> bytes:
        """The bytes of a blob, verified.

        Raises:
            BlobNotFound: the blob is not recorded.
            MissingObject: it is recorded, but its object is missing.
            HashMismatch: its bytes do not match the hash.
        """
        digest = blobs.digest_of(hash)
        blob = self.database.read(blobs.find, universe, digest)
        if blob is None:
            raise BlobNotFound(f"There is no blob {hash} in {universe}")
        path = blobs.object_path(universe, digest, blob.upload)
        data = blob.inline if blob.inline is not None else self._read_object(path)
        if hashlib.sha256(data).digest() != digest:
            raise HashMismatch(f"Blob {hash} does not match its hash; restore it from a backup")
        return data

    def logs(self, universe: str, *, is_known: Callable[[str], bool] | None = None) -> Iterator[LogFile]:
        """The session log files in order, each with the size it had when it was listed.

        Rotated files whose manifest entry `is_known`, by its path, are left out, and their entries are not read.
        """
        found = self._all_logs(universe, is_known)
        return (file for file in found if not self.hidden.hides("session", universe, file.session))

    def _all_logs(self, universe: str, is_known: Callable[[str], bool] | None = None) -> Iterator[LogFile]:
        if self._pinned_logs is None:
            listed = self._list_logs(universe)
        else:
            listed = self._pinned_logs.get(universe, _ListedLogs([], []))
        return self._load_logs(universe, listed, is_known)

    def _list_logs(self, universe: str) -> "_ListedLogs":
        # Before the manifests: a file that is rotated in between is in both, and the manifest wins.
        local = [file for folder in self._logs for file in rotation.local_files(folder, universe)]
        entries = [] if self.objects is None else rotation.manifest_entries(self.objects, universe, local)
        return _ListedLogs(local, entries)

    def _load_logs(
        self, universe: str, listed: "_ListedLogs", is_known: Callable[[str], bool] | None = None
    ) -> Iterator[LogFile]:
        entries: Iterable[str] = listed.entries
        if is_known is not None:
            local = {file.second for file in listed.local}  # They may be rotated, and then their entry wins.
            entries = [
                path
                for path in entries
                if not is_known(path) or (local and rotation.second_of(path, universe) in local)
            ]
        if self.objects is None:
            return iter(sorted(listed.local, key=lambda file: (file.second, file.id)))
        rotated = Manifests(self.objects, self._store_id)
        return rotation.merge_files(listed.local, rotated, rotated.fetched(entries))

    def rotated_logs(self, universe: str) -> dict[str, str | None]:
        """The manifest entry of each session log in the object store, both by path; None if it has no entry.

        A file that is still local has no entry yet. Files that were written after the view was opened are left out.
        """
        if self.objects is None:
            return {}
        # Bodies first: an entry is written after its body.
        bodies = dict.fromkeys(self._list_objects(rotation.bodies_folder(universe)))
        found: dict[str, str | None] = {}
        by_hash = {rotation.hash_in_name(path)[: rotation.SHORT_HASH]: path for path in bodies}
        for entry in self._list_objects(f"{manifests.FOLDER}/{universe}"):
            short = entry.removesuffix(".json").rpartition("_")[2]
            found[by_hash.get(short, f"{rotation.bodies_folder(universe)}/…_{short}")] = entry
        unlisted = [path for path in bodies if path not in found]
        if unlisted:
            local = {
                rotation.hash_when_rotated(file.name, file.universe, self.log_body(file))
                for file in self._all_logs(universe)
                if not file.is_rotated
            }
            young = {
                meta.path
                for meta, at_ms in self.objects.times(rotation.bodies_folder(universe))
                if at_ms >= self._opened_ms
            }
            found |= {path: None for path in unlisted if rotation.hash_in_name(path) not in local and path not in young}
        return found

    def _list_objects(self, prefix: str) -> Iterator[str]:
        after = None
        while self.objects is not None and (page := self.objects.list(prefix, after=after)):
            yield from (meta.path for meta in page)
            after = page[-1].path

    def log_body(self, file: LogFile) -> bytes:
        """The bytes of a file, up to the size it had when it was listed.

        Raises:
            MissingObject: it is not there any more.
        """
        if file.is_rotated:
            return self._read_object(file.path)
        try:
            with Path(file.path).open("rb") as stream:
                return stream.read(file.size)
        except FileNotFoundError as error:
            raise MissingObject(f"{file.path} does not exist any more; list the files again") from error

    def log_chunk(self, file: LogFile, staging: str, *, start: int = 0, n: int = 0) -> LogChunk:
        """The lines of a file from the offset `start` on, as a chunk that executors can read.

        A file in the object store is read in place. Others are staged in the store `staging`.

        Raises:
            MissingObject: it does not exist any more, not even in the object store.
        """
        labels = (file.universe, file.session, file.kind, file.id)
        if file.is_rotated and self.objects_url is not None:
            return LogChunk(*labels, self.objects_url, file.path, start, file.size, 0, n)
        try:
            data = self.log_body(file)[start:]
        except MissingObject:
            rotated = None if file.is_rotated else self._rotated_since(file)
            if rotated is None:
                raise
            return self.log_chunk(rotated, staging, start=start, n=n)
        path = f"logs/{hashlib.sha256(data).hexdigest()}{log_format.SUFFIX}"
        self.stores.staging(staging).put(path, data)
        return LogChunk(*labels, staging, path, start, start + len(data), start, n, staged=True)

    def log_end(self, file: LogFile) -> int:
        """The offset after the last complete line of a file; the rest may still be being written."""
        if file.is_rotated:
            return file.size
        with suppress(FileNotFoundError), Path(file.path).open("rb") as stream:
            end = file.size
            while end:
                begin = max(end - _BLOCK_BYTES, 0)
                stream.seek(begin)
                found = stream.read(end - begin).rfind(b"\n")
                if found >= 0:
                    return begin + found + 1
                end = begin
        return 0

    def queue_names(self, universe: str) -> Iterator[str]:
        """The sorted names of all queues."""
        found = scan.names(self.database, Subspace("u", universe, "q"))
        return (name for name in found if not self.hidden.hides("queue", universe, name))

    def messages(self, universe: str, *, with_payloads: bool = True) -> Iterator[MessageRow]:
        """Every message in a queue, including dead letters; without payloads, large ones are not read."""
        found = rows.messages(self.database, universe, with_payloads=with_payloads)
        return (row for row in found if not self._hides_message(row))

    def dead_letters(self, universe: str) -> Iterator[MessageRow]:
        """Every dead letter, with its last error."""
        return (row for row in rows.dead_letters(self.database, universe) if not self._hides_message(row))

    def mails(self, universe: str) -> Iterator[MailRow]:
        """Every unconfirmed mail."""
        return (row for row in rows.mails(self.database, universe) if not self._hides_mail(row))

    def receipts(self, universe: str) -> Iterator[ReceiptRow]:
        """Every receipt that its sender may still read."""
        return (row for row in rows.receipts(self.database, universe) if not self._hides_mail(row))

    def states(self, universe: str) -> Iterator[StateRow]:
        """Every state document."""
        found = rows.states(self.database, universe)
        return (row for row in found if not self.hidden.hides("states.key", universe, row.key))

    def leases(self, universe: str) -> Iterator[LeaseRow]:
        """The latest grant of every lease, held or not."""
        found = rows.all_leases(self.database, universe)
        return (row for row in found if not self.hidden.hides("leases.owner", universe, row.owner))

    def schedules(self, universe: str) -> Iterator[tuple[str, Schedule]]:
        """Every schedule, with its queue."""
        found = rows.schedules(self.database, universe)
        return (row for row in found if not self.hidden.hides("queue", universe, row[0]))

    def tokens(self) -> list[Token]:
        """Every access token of the plane, usable or not."""
        return self.database.read(tokens.all_tokens)

    def entities(self, universe: str) -> Iterator[EntityRow]:
        """Every entity, including deleted ones."""
        for row in rows.all_entities(self.database, universe):
            is_hidden = self.hidden.hides("kind", universe, row.kind) or self.hidden.hides(
                "entity_changes.id", universe, row.id
            )
            if not is_hidden:
                yield row

    def entity_changes(self, universe: str) -> Iterator[ChangeRow]:
        """Every change in every entity's history."""
        return rows.entity_changes(self.database, universe)

    def blobs(self, universe: str) -> Iterator[BlobRow]:
        """Every recorded blob."""
        return rows.blobs(self.database, universe)

    def references(self, universe: str) -> Iterator[Reference]:
        """Every reference to a blob in the key space. Segments and blobs may contain more: see `hashes_in`."""
        return rows.references(self.database, universe)

    def close(self) -> None:
        """Release all resources. Closing twice is fine."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hides_message(self, row: MessageRow) -> bool:
        queues = (row.queue,) if row.origin is None else (row.queue, row.origin)
        return any(self.hidden.hides("queue", row.universe, name) for name in queues)

    def _hides_mail(self, row: MailRow | ReceiptRow) -> bool:
        hides = self.hidden.hides
        return hides("mail.sender", row.universe, row.sender) or hides("mail.recipient", row.universe, row.recipient)

    def _local_universes(self) -> list[str]:
        folders = [folder for logs in self._logs if logs.is_dir() for folder in logs.iterdir()]
        return sorted({folder.name for folder in folders if folder.is_dir() and _is_name(folder.name)})

    def _rotated_universes(self) -> list[str]:
        if self._rotated is None:
            self._rotated = self._list_rotated_universes()
        return self._rotated

    def _list_rotated_universes(self) -> list[str]:
        found = [] if self.objects is None else self.objects.folders(manifests.FOLDER)
        return sorted(filter(_is_name, found))

    def _rotated_since(self, file: LogFile) -> LogFile | None:
        """The rotated version of a file that was listed before its rotation."""
        files = self._load_logs(file.universe, self._list_logs(file.universe))
        return next((each for each in files if each.id == file.id and each.is_rotated), None)

    def _read_object(self, path: str) -> bytes:
        if self.objects is None:
            raise InvalidArgument(f"{path} is in an object store that is not configured; set --objects s3://…")
        try:
            return self.objects.get(path)
        except ObjectNotFound as error:
            raise MissingObject(f"{path} is not in the object store; restore it from a backup") from error

    def _cold_chunk(self, world: WorldView, segment: Segment, height: int) -> JournalChunk:
        return JournalChunk(
            world.universe,
            world.name,
            segment.start,
            segment.end,
            self.objects_url or "",
            segment.object_path,
            segment.checksum,
            segment.size,
            hot=False,
            first=max(segment.start, height),
            last=min(segment.end, world.head - 1),
        )


def _summaries(tx: Transaction, universe: str, after: str, limit: int) -> list[WorldSummary]:
    index = Subspace("u", universe, "segments")
    end, next_cold = index.range()[1], b""
    found: list[WorldSummary] = []
    for world in journals.heads(tx, universe, after, limit):
        prefix, cold_below, incarnation = index.key(world.name), 0, world.incarnation
        if next_cold < prefix:  # One scan skips all worlds up to the next one with segments.
            next_cold = next((key for key, _ in tx.scan(prefix, end, limit=1)), end)
        if next_cold.startswith(prefix):
            ((_, last),) = tx.scan(prefix, prefix + b"\xff", limit=1, reverse=True)
            try:
                cold_below = _decode_segment(last).end + 1
            except msgspec.MsgspecError:
                incarnation = None
        found.append(WorldSummary(world.name, world.head, cold_below, incarnation))
    return found


def _world(tx: Transaction, world: World) -> WorldView | None:
    state, incarnation = "unknown", 1  # A newer version may have more states; the data is still readable.
    try:
        meta = worlds.describe(tx, world)
        state, incarnation = meta.state, meta.incarnation
    except WorldNotFound:
        return None
    except msgspec.MsgspecError:
        pass
    if state in _DELETED_STATES:
        return None
    try:
        baseline = snapshots.baseline(tx, world)
    except (SnapshotNotFound, msgspec.MsgspecError):
        baseline = None
    return WorldView(
        world.universe,
        world.name,
        journals.head(tx, world),
        journals.first_hot(tx, world),
        baseline,
        list(_decodable(tx, *worlds.subspace(world).range("snapshot"), _decode_snapshot)),
        list(_decodable(tx, *_segments_of(world).range(), _decode_segment)),
        state,
        incarnation,
    )


def _decodable(tx: Transaction, begin: bytes, end: bytes, decode: Callable[[bytes], Result]) -> Iterator[Result]:
    """The decodable records of a range; those of unknown newer kinds are skipped."""
    for page in pages(tx, begin, end):
        for _, value in page:
            with suppress(msgspec.MsgspecError):
                yield decode(value)


def _segments_of(world: World) -> Subspace:
    return Subspace("u", world.universe, "segments", world.name)


def _next_records(
    tx: Transaction, world: World, height: int, head: int, limit: int
) -> tuple[list[Segment], list[bytes], int]:
    """The segments or the hot records from `height` on, and the height after them.

    If there are neither, the next height that may exist.
    """
    index = _segments_of(world)
    later = _decodable(tx, index.key(height), index.range()[1], _decode_segment)
    cold = [each for each in itertools.islice(later, limit) if each.start < head]
    covered = height
    for n, segment in enumerate(cold):
        if segment.start > covered:
            if n:
                return cold[:n], [], covered
            break
        covered = segment.end + 1
    else:
        if cold:
            return cold, [], covered
    until = cold[0].start if cold else head
    first, hot = journals.next_run(tx, world, height, until, limit)
    return ([], [], first) if first > height else ([], hot, height + len(hot))


def _missing_chunk(world: WorldView, start: int, end: int) -> JournalChunk:
    return JournalChunk(world.universe, world.name, start, end, "", "", "", 0, hot=True, first=start)


def _is_name(text: str) -> bool:
    try:
        return checked_name("universe", text) == text
    except InvalidName:
        return False


_NO_FOLDER = Path("/nonexistent")
_BLOCK_BYTES = 65_536
_decode_snapshot = msgspec.msgpack.Decoder(SnapshotRecord).decode
_decode_segment = msgspec.msgpack.Decoder(Segment).decode
