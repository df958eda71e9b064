"""What a view tells, wherever its key space came from."""

import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from holdfast.backends.objects import ObjectStore
from holdfast.errors import (
    BlobNotFound,
    HashMismatch,
    InvalidArgument,
    InvalidName,
    MissingObject,
    ObjectNotFound,
    SnapshotNotFound,
    WorldNotFound,
)
from holdfast.kv import Database, Subspace, Transaction, pages
from holdfast.layers import blobs, journals, snapshots, worlds
from holdfast.layers.segments import SegmentRecord
from holdfast.layers.snapshots import SnapshotRecord
from holdfast.layers.worlds import World, WorldState
from holdfast.limits import PIECE_ENTRIES, PIECE_PAGE
from holdfast.names import checked_name
from holdfast.pipeline.journal_chunks import Piece, Stores, WorldView
from holdfast.pipeline.logs import LogPiece
from holdfast.pipeline.views import manifests, rows
from holdfast.pipeline.views.manifests import Manifests
from holdfast.pipeline.views.rows import BlobRow, ChangeRow, EntityRow, MailRow, MessageRow, Reference
from holdfast.pipeline.views.stages import Stage
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity import rotation
from holdfast.runtime.activity.format import LogFile
from holdfast.runtime.maintenance import scan

Result = TypeVar("Result")

_GONE = (WorldState.DELETING, WorldState.DELETED)


class View:
    """One moment of a plane."""

    def __init__(
        self,
        database: Database,
        *,
        objects: ObjectStore | None,
        objects_url: str | None,
        logs: Path | None,
        stores: Stores,
        place: str,
        universes: tuple[str, ...] = (),
        resources: ExitStack | None = None,
    ) -> None:
        """`logs` is the folder of session logs that are not in the object store; `resources` go when it is closed.

        `place` tells the object store from others.
        """
        self.database = database
        self.objects = objects
        self.objects_url = objects_url  # None: executors cannot reach the objects, so what they need is staged.
        self.stores = stores
        self._logs = logs
        self._place = place
        self._universes = universes
        self._resources = resources or ExitStack()

    def universes(self) -> Iterator[str]:
        """The names of all universes, or of those that were asked for. Some may have nothing but session logs."""
        every = heapq.merge(scan.universes(self.database), self._local_universes(), self._rotated_universes())
        for name, _ in itertools.groupby(every):
            if not self._universes or name in self._universes:
                yield name

    def worlds(self, universe: str) -> Iterator[WorldView]:
        """Every world that has a history, in the order of their names; those that were deleted have none."""
        for name in self.world_names(universe):
            found = self.world(universe, name)
            if found is not None:
                yield found

    def world_names(self, universe: str) -> Iterator[str]:
        """The names of all worlds in order, of deleted ones too."""
        return scan.names(self.database, Subspace("u", universe, "w"))

    def head(self, universe: str, name: str) -> int:
        """How many records a world has."""
        return self.database.read(journals.head, World(universe, name))

    def world(self, universe: str, name: str) -> WorldView | None:
        """One world, or None if it is not there or has no history any more."""
        return self.database.read(_world, World(universe, name))

    def pieces(self, world: WorldView, start: int, staging: str) -> list[Piece]:
        """The records from `start` up to the head, in order and without a gap, as what executors can read.

        Cold segments are read where they are. Hot records are staged below the store `staging`, and segments too where
        executors cannot reach the object store. Heights that nothing holds are a piece without a path.
        """
        return list(self.reached(self.located(world, start, staging), staging))

    def located(self, world: WorldView, start: int, staging: str) -> list[Piece]:
        """What `pieces` gives, with segments where they are, whether executors can reach that or not."""
        where, found, height = World(world.universe, world.name), list[Piece](), start
        stage = Stage(self.stores.staging(staging), staging)
        while height < world.head:
            # What is hot and what is cold is looked at in one transaction: a compaction may go on behind it.
            cold, hot, until = self.database.read(_next, where, height, world.head, min(PIECE_PAGE, PIECE_ENTRIES))
            if hot:
                found += stage.add(world, height, hot)
            else:
                found += stage.rest(world)
                found += [self._cold(world, segment, height) for segment in cold]
                if not cold:
                    found.append(_missing(world, height, until - 1))
            height = until
        found += stage.rest(world)
        return found

    def reached(self, pieces: Iterable[Piece], staging: str) -> Iterator[Piece]:
        """The same pieces in order, as what executors can read.

        Give it those of many worlds: segments that have to be staged are on their way several at a time.
        """
        if self.objects_url is not None:
            return iter(pieces)
        return Stage(self.stores.staging(staging), staging).copies(pieces, self._object)

    def blob(self, universe: str, hash: str) -> bytes:
        """The bytes of a blob, checked.

        Raises:
            BlobNotFound: nothing is known of it.
            MissingObject: it is known, and its bytes are not in the object store.
            HashMismatch: they are other bytes.
        """
        digest = blobs.digest_of(hash)
        blob = self.database.read(blobs.find, universe, digest)
        if blob is None:
            raise BlobNotFound(f"There is no blob {hash} in {universe}")
        data = blob.inline if blob.inline is not None else self._object(blobs.object_path(universe, digest))
        if hashlib.sha256(data).digest() != digest:
            raise HashMismatch(f"Blob {hash} has other bytes than its name says; restore it from a backup")
        return data

    def logs(self, universe: str) -> Iterator[LogFile]:
        """The files of session logs, in order, each as long as it is now."""
        rotated = None if self.objects is None else Manifests(self.objects, self._place)
        return rotation.files_in_order(self._logs or _NOWHERE, rotated, universe)

    def log_body(self, file: LogFile) -> bytes:
        """The bytes of a file; at most as many as it had when it was listed.

        Raises:
            MissingObject: it is not there any more.
        """
        if file.is_rotated:
            return self._object(file.path)
        try:
            with Path(file.path).open("rb") as stream:
                return stream.read(file.size)
        except FileNotFoundError as error:
            raise MissingObject(f"{file.path} is not there any more; look for the file again") from error

    def log_piece(self, file: LogFile, staging: str, *, start: int = 0, n: int = 0) -> LogPiece:
        """The lines of a file from the offset `start` on, as what an executor can read.

        A file in the object store is read where it is. Others are staged below the store `staging`.

        Raises:
            MissingObject: it is not there any more, not even in the object store.
        """
        labels = (file.universe, file.session, file.kind, file.id)
        if file.is_rotated and self.objects_url is not None:
            return LogPiece(*labels, self.objects_url, file.path, start, file.size, 0, n)
        try:
            data = self.log_body(file)[start:]
        except MissingObject:
            rotated = None if file.is_rotated else self._rotated_since(file)
            if rotated is None:
                raise
            return self.log_piece(rotated, staging, start=start, n=n)
        path = f"logs/{hashlib.sha256(data).hexdigest()}{log_format.SUFFIX}"
        self.stores.staging(staging).put(path, data)
        return LogPiece(*labels, staging, path, start, start + len(data), start, n, staged=True)

    def log_end(self, file: LogFile) -> int:
        """Behind the last whole line of a file; a line that is not whole may be about to be written."""
        if file.is_rotated:
            return file.size
        with suppress(FileNotFoundError), Path(file.path).open("rb") as stream:
            end = file.size
            while end:
                begin = max(end - _LOOK_BYTES, 0)
                stream.seek(begin)
                found = stream.read(end - begin).rfind(b"\n")
                if found >= 0:
                    return begin + found + 1
                end = begin
        return 0

    def messages(self, universe: str) -> Iterator[MessageRow]:
        """Every message that is in a queue, dead letters too."""
        return rows.messages(self.database, universe)

    def dead_letters(self, universe: str) -> Iterator[MessageRow]:
        """Every dead letter that is still there, with the error that it died of."""
        return rows.dead_letters(self.database, universe)

    def mails(self, universe: str) -> Iterator[MailRow]:
        """Every mail that is not confirmed."""
        return rows.mails(self.database, universe)

    def entities(self, universe: str) -> Iterator[EntityRow]:
        """Every entity, deleted ones too."""
        return rows.all_entities(self.database, universe)

    def entity_changes(self, universe: str) -> Iterator[ChangeRow]:
        """Every change of every entity that its history still has."""
        return rows.entity_changes(self.database, universe)

    def blobs(self, universe: str) -> Iterator[BlobRow]:
        """Every blob that is recorded."""
        return rows.blobs(self.database, universe)

    def references(self, universe: str) -> Iterator[Reference]:
        """Whatever in the key space names a blob. Segments and the bytes of blobs may name more: see `hashes_in`."""
        return rows.references(self.database, universe)

    def close(self) -> None:
        """Let go of everything. Closing twice is fine."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _local_universes(self) -> list[str]:
        folders = self._logs.iterdir() if self._logs is not None and self._logs.is_dir() else ()
        return sorted(folder.name for folder in folders if folder.is_dir() and _is_name(folder.name))

    def _rotated_universes(self) -> list[str]:
        found: list[str] = []
        after = None
        while self.objects is not None and (page := self.objects.list(manifests.FOLDER, after=after, limit=1)):
            found.append(page[0].path.split("/")[1])
            after = f"{manifests.FOLDER}/{found[-1]}/~"  # Names of files begin with a year, and so come before it.
        return sorted(filter(_is_name, found))  # Paths of `main-2/` come before those of `main/`; names do not.

    def _rotated_since(self, file: LogFile) -> LogFile | None:
        """A file that was rotated since it was listed, as it is now."""
        return next((each for each in self.logs(file.universe) if each.id == file.id and each.is_rotated), None)

    def _object(self, path: str) -> bytes:
        if self.objects is None:
            raise InvalidArgument(f"{path} is in an object store that was not named; name it (--objects s3://…)")
        try:
            return self.objects.get(path)
        except ObjectNotFound as error:
            raise MissingObject(f"{path} is not in the object store; restore it from a backup") from error

    def _cold(self, world: WorldView, segment: SegmentRecord, height: int) -> Piece:
        return Piece(
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


def _world(tx: Transaction, world: World) -> WorldView | None:
    try:
        state: str = worlds.describe(tx, world).state
    except WorldNotFound:
        return None
    except msgspec.MsgspecError:
        state = "unknown"  # A newer version may know more states; what it has written can still be read.
    if state in _GONE:
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
        list(_understood(tx, *worlds.subspace(world).range("snapshot"), _decode_snapshot)),
        list(_understood(tx, *_segments_of(world).range(), _decode_segment)),
        state,
    )


def _understood(tx: Transaction, begin: bytes, end: bytes, decode: Callable[[bytes], Result]) -> Iterator[Result]:
    """The records of a range, without those that are of no kind that this version knows."""
    for page in pages(tx, begin, end):
        for _, value in page:
            with suppress(msgspec.MsgspecError):
                yield decode(value)


def _segments_of(world: World) -> Subspace:
    return Subspace("u", world.universe, "segments", world.name)


def _next(
    tx: Transaction, world: World, height: int, head: int, limit: int
) -> tuple[list[SegmentRecord], list[bytes], int]:
    """What holds the records from `height` on, segments or hot records, and the height behind them.

    If neither does, the first height behind it that something could hold.
    """
    index = _segments_of(world)
    behind = _understood(tx, index.key(height), index.range()[1], _decode_segment)
    cold = [each for each in itertools.islice(behind, limit) if each.start < head]
    reached = height
    for n, segment in enumerate(cold):
        if segment.start > reached:
            if n:
                return cold[:n], [], reached
            break
        reached = segment.end + 1
    else:
        if cold:
            return cold, [], reached
    until = cold[0].start if cold else head
    first, hot = journals.next_run(tx, world, height, until, limit)
    return ([], [], first) if first > height else ([], hot, height + len(hot))


def _missing(world: WorldView, start: int, end: int) -> Piece:
    return Piece(world.universe, world.name, start, end, "", "", "", 0, hot=True, first=start)


def _is_name(text: str) -> bool:
    try:
        return checked_name("universe", text) == text
    except InvalidName:
        return False


_NOWHERE = Path("/nonexistent")
_LOOK_BYTES = 65_536
_decode_snapshot = msgspec.msgpack.Decoder(SnapshotRecord).decode
_decode_segment = msgspec.msgpack.Decoder(SegmentRecord).decode
