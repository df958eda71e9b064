"""Rotation of closed session log files into the object store, and the listing of all files.

    closed ──► body in the object store ──► manifest entry ──► local file removed
               └──────────────── locked during the rotation ─────────────────┘

    activity/<universe>/<date>/<session>_<kind>_<sha256>.jsonl
    activity-manifest/<universe>/<date>_<time>_<session>_<kind>_<first 16 of the sha256>.json

An unlocked file is finished: its writer closed it or is dead, and any process may rotate it. The stored objects are a
function of the bytes of the file, so every step can be repeated after a crash with the same result.

A body whose manifest entry is damaged or missing is read all the same: its own header has what a reader needs. So the
bodies of each day are listed beside its entries. While the local file of a body without an entry is there, that is read
instead: a crash may have left a part of the body.
"""

import fcntl
import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Final, TypeAlias

import msgspec

from fastness.backends.objects import ObjectStore
from fastness.errors import Backend, HashMismatch, ObjectExists, ObjectNotFound
from fastness.json_checksums import add_checksum, has_valid_checksum
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Content, FileName, Header, LogFile

_log = logging.getLogger("fastness.activity")

_BODIES: Final = "activity"
_MANIFESTS: Final = "activity-manifest"
CLOSED_NAMES: Final = 1_024  # Of a process's own closed files, which it need not read again.
SHORT_HASH: Final = 16  # Digits of the SHA-256 in the name of a manifest entry.
_SHORT_HASH_IN_NAME: Final = slice(-SHORT_HASH - len(".json"), -len(".json"))

_ListedFile: TypeAlias = tuple[str, Callable[[], LogFile | None]]  # When it was opened, and a loader.


class Manifest(msgspec.Struct, frozen=True):
    """The metadata of a rotated file in the object store, where a checksum follows it."""

    path: str
    sha256: str
    bytes: int
    records: int
    universe: str
    session: str
    kind: str
    writer: str
    opened_ms: int
    closed_ms: int
    first_at_ms: int
    last_at_ms: int


class FailureTracker:
    """Counts failures, and logs a warning when failures start and when they end, not every time."""

    def __init__(self, activity: str) -> None:
        self.count = 0
        self.last_error: str | None = None
        self._activity = activity
        self._failing: set[Hashable] = set()
        self._lock = threading.Lock()

    def record(self, subject: Hashable, error: Exception) -> None:
        with self._lock:
            self.count += 1
            self.last_error = f"{type(error).__name__}: {error}"
            is_new = not self._failing
            self._failing.add(subject)
        if is_new:
            _log.warning("%s fails and will be retried: %s", self._activity, error)

    def resolve(self, subject: Hashable, *, is_abandoned: bool = False) -> None:
        with self._lock:
            was_last = self._failing == {subject}
            self._failing.discard(subject)
        if was_last and not is_abandoned:
            _log.warning("%s works again", self._activity)


class Rotation:
    """Moves closed files into the object store; without one, files stay where they are."""

    def __init__(
        self, folder: Path, objects: ObjectStore | None, check_space: Callable[[], None] = lambda: None
    ) -> None:
        self.rotated = 0
        self._check_space = check_space
        self.failures = FailureTracker("Moving session logs into the object store")
        self.due = threading.Event()
        self._folder = folder
        self._objects = objects
        self._waiting: deque[Path] = deque()
        self._has_scanned = objects is None
        self.closed: deque[str] = deque(maxlen=CLOSED_NAMES)  # The names of the files that were added last.
        self._run_lock = threading.Lock()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting) or not self._has_scanned

    def add(self, path: Path) -> None:
        """Add a closed file to the next `run`."""
        self.closed.append(path.stem)
        if self._objects is not None:
            self._waiting.append(path)
            self.due.set()

    def run(self) -> None:
        """Rotate added files, failed files and, the first time, files that dead processes left.

        A file that fails stays for the next run. After a Backend error the remaining files are not tried.
        """
        if self._objects is None:
            return
        with self._run_lock:
            if not self._has_scanned:
                self._find_leftovers()
            for _ in range(len(self._waiting)):
                path = self._waiting.popleft()
                try:
                    self._check_space()
                    self.rotated += rotate(path, self._objects)
                    self.failures.resolve(path)
                except Exception as error:  # An error of one file must not end the rotation thread.
                    self._waiting.append(path)
                    self.failures.record(path, error)
                    if isinstance(error, Backend):
                        break

    def _find_leftovers(self) -> None:
        """Add the files that dead processes left; after an error, the next run tries again."""
        try:
            self._waiting.extend([path for path, _ in _local_paths(self._folder)])
        except Exception as error:
            self.failures.record(self._folder, error)
        else:
            self._has_scanned = True
            self.failures.resolve(self._folder)


def rotate(path: Path, objects: ObjectStore) -> bool:
    """Store a closed file, then remove it; False if it is empty, missing, or locked.

    A file of damaged lines is not empty: they are kept, and counted when they are read.
    """
    name = log_format.parse_name(path.stem)
    with _locked(path) as file:
        if file is None or name is None:
            return False
        universe, data = path.parent.name, file.read()
        content = log_format.content(data, universe, name)
        has_lines = content.records + content.damaged > 0
        if has_lines:
            # A power loss may undo the removal below. The file must then still have the bytes that are stored here:
            # with others, its records would be stored twice.
            os.fsync(file.fileno())
            _store(objects, universe, name, content, data[: content.size])
        path.unlink()
        return has_lines


def copy(path: Path, objects: ObjectStore) -> Manifest | None:
    """Store a closed file and keep it; its manifest, or None if it is empty."""
    name = log_format.parse_name(path.stem)
    if name is None:
        return None
    universe, data = path.parent.name, path.read_bytes()
    content = log_format.content(data, universe, name)
    if content.records + content.damaged == 0:
        return None
    return _store(objects, universe, name, content, data[: content.size])


def files_in_order(
    folder: Path,
    objects: ObjectStore | None,
    universe: str,
    *,
    second: str = "",
    session: str | None = None,
    kind: str | None = None,
) -> Iterator[LogFile]:
    """The files of a universe opened at `second` or later, each once. Other sessions and kinds may be included."""
    # Local files are listed before the manifest: a file that is rotated in between is in both, and the manifest wins.
    local = [file for file in local_files(folder, universe) if file.second >= second]
    rotated: Iterable[_ListedFile] = ()
    if objects is not None:
        rotated = _rotated(objects, universe, second, local=local, session=session, kind=kind)
    yield from _in_order(local, rotated)


def merge_files(local: Iterable[LogFile], objects: ObjectStore, entries: Iterable[str]) -> Iterator[LogFile]:
    """Local files and the files of sorted manifest entries in order, each once. Entries are read one after another."""
    named = ((path, log_format.parse_name(name_of(path))) for path in entries)
    rotated = ((name.second, partial(_rotated_file, objects, path, name)) for path, name in named if name is not None)
    yield from _in_order(local, rotated)


def local_files(folder: Path, universe: str) -> list[LogFile]:
    """The files of a universe that are not rotated yet."""
    return list(_local_files(folder, universe))


def manifest_entries(objects: ObjectStore, universe: str, local: Iterable[LogFile] = ()) -> list[str]:
    """The sorted paths of a universe's manifest entries, as `entries_since`."""
    stored = [f"{_manifests(universe)}/{name}" for name in objects.names(_manifests(universe))]
    return list(_with_missing(objects, universe, stored, local))


def entries_since(
    objects: ObjectStore,
    universe: str,
    day: str = "",
    *,
    local: Iterable[LogFile] = (),
    session: str | None = None,
    kind: str | None = None,
) -> Iterator[str]:
    """The manifest entries of a universe whose files were opened on `day` or later, in order.

    If the entry of a body is missing, its path is returned nonetheless: `rotated_file` finds the body. It is left out
    if the body is that of a file in `local`, which were listed before. Entries of other sessions and kinds may be left
    out.
    """

    def stored() -> Iterator[str]:
        after: str | None = f"{_manifests(universe)}/{day}" if day else None
        while page := objects.list(_manifests(universe), after=after):
            yield from (meta.path for meta in page)
            after = page[-1].path

    return _with_missing(objects, universe, stored(), local, day=day, session=session, kind=kind)


def _with_missing(
    objects: ObjectStore,
    universe: str,
    stored: Iterable[str],
    local: Iterable[LogFile],
    *,
    day: str = "",
    session: str | None = None,
    kind: str | None = None,
) -> Iterator[str]:
    """The stored entries, in order, and those that are missing."""
    sources: dict[str, list[LogFile]] = {}  # The local files that a body may be of.
    for file in local:
        if (file_name := log_format.parse_name(file.name)) is not None:
            sources.setdefault(_body_path(universe, file_name, ""), []).append(file)
    days = [(each, "") for each in objects.folders(bodies_folder(universe)) if each >= day]
    listed = ((second_of(entry, universe)[: len("2026-11-15")], entry) for entry in stored)
    for each, group in groupby(merge(listed, sorted(days), key=itemgetter(0)), key=itemgetter(0)):
        entries = [entry for _, entry in group]
        if "" in entries:
            entries.remove("")
            found = {body_start(entry) for entry in entries}
            for name in objects.names(f"{bodies_folder(universe)}/{each}"):
                body = f"{bodies_folder(universe)}/{each}/{name}"
                labels, _, end = name.rpartition("_")
                if start_of(body) in found or not log_format.may_hold(labels, session, kind):
                    continue
                same_labels = sources.get(body.removesuffix(end) + log_format.SUFFIX, ())
                if not any(_is_source(file, body) for file in same_labels):
                    entries += [entry] if (entry := _missing_entry(objects, universe, body)) is not None else []
        yield from sorted(entries)


def _is_source(file: LogFile, body: str) -> bool:
    """Whether a body is that of a local file, whose rotation has not ended."""
    try:
        data = Path(file.path).read_bytes()
    except FileNotFoundError:
        return False  # Its rotation has ended, so there is an entry now.
    return hash_when_rotated(file.name, file.universe, data) == hash_in_name(body)


def _missing_entry(objects: ObjectStore, universe: str, body: str) -> str | None:
    """The path that the manifest entry of a body should have; None if it is not one, or was removed meanwhile."""
    day, _, labels = body.removeprefix(f"{bodies_folder(universe)}/").rpartition("_")[0].partition("/")
    name = log_format.parse_name(f"{day}_00-00-00_{labels}")
    if name is None:
        return None
    try:
        first_line = objects.get_range(body, 0, log_format.HEADER_BYTES_MAX).partition(b"\n")[0]
    except ObjectNotFound:
        return None
    header = log_format.header_of(first_line, universe, name)
    stem = log_format.file_name(header).removesuffix(log_format.SUFFIX)
    stem = stem if stem.startswith(day) else name.stem
    return f"{_manifests(universe)}/{stem}_{hash_in_name(body)[:SHORT_HASH]}.json"


def short_hash(entry: str) -> str:
    """The start of a rotated file's SHA-256, which is in the name of its manifest entry."""
    return entry[_SHORT_HASH_IN_NAME]


def second_of(entry: str, universe: str) -> str:
    """When the file of a manifest entry was opened, as in its name."""
    start = len(_MANIFESTS) + len(universe) + 2
    return entry[start : start + log_format.SECOND_CHARACTERS]


def _in_order(local: Iterable[LogFile], rotated: Iterable[_ListedFile]) -> Iterator[LogFile]:
    loaded_files = sorted(local, key=lambda file: file.second)
    listed: Iterable[_ListedFile] = [(file.second, partial(_loaded, file)) for file in loaded_files]
    for _, group in groupby(merge(listed, rotated, key=itemgetter(0)), key=itemgetter(0)):
        loaded = [load() for _, load in group]
        by_id = {file.id: file for file in loaded if file is not None}
        yield from (by_id[id] for id in sorted(by_id))


def lock(descriptor: int, path: Path) -> bool:
    """Lock the open file without waiting; whether that succeeded and `path` still refers to it."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes] | None]:
    """The locked file; None if it is missing or locked by another process."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file if lock(file.fileno(), path) else None


def _manifest(universe: str, name: FileName, content: Content, body: bytes) -> Manifest:
    digest = hashlib.sha256(body).hexdigest()
    return Manifest(
        path=_body_path(universe, name, digest),
        sha256=digest,
        bytes=len(body),
        records=content.records,
        universe=universe,
        session=content.header.session,
        kind=content.header.kind,
        writer=content.header.writer,
        opened_ms=content.header.opened_ms,
        closed_ms=content.last_at_ms,  # Not the time of closing: a repeated rotation must store the same.
        first_at_ms=content.first_at_ms,
        last_at_ms=content.last_at_ms,
    )


def expected_manifest(path: str, body: bytes) -> Manifest | None:
    """The manifest entry that a rotated file must have, computed from its bytes; None if `path` is not that of one."""
    universe, _, stem = path.removeprefix(f"{_MANIFESTS}/").removesuffix(".json").partition("/")
    name = log_format.parse_name(stem.rpartition("_")[0])
    return None if name is None else _manifest(universe, name, log_format.content(body, universe, name), body)


def _store(objects: ObjectStore, universe: str, name: FileName, content: Content, body: bytes) -> Manifest:
    manifest = _manifest(universe, name, content, body)
    _store_once(objects, manifest.path, body)
    entry = f"{_manifests(universe)}/{name.stem}_{manifest.sha256[:SHORT_HASH]}.json"
    _store_once(objects, entry, add_checksum(msgspec.json.encode(manifest)))
    return manifest


def _store_once(objects: ObjectStore, path: str, data: bytes) -> None:
    try:
        objects.create(path, data)
    except ObjectExists:
        # The same path has the same bytes, or a prefix of them if the store is not atomic and was interrupted.
        if objects.head(path).size != len(data):
            objects.put(path, data)


def _local_paths(folder: Path, universe: str = "*") -> Iterator[tuple[Path, FileName]]:
    for path in sorted(folder.glob(f"{universe}/*{log_format.SUFFIX}")):
        if (name := log_format.parse_name(path.stem)) is not None:
            yield path, name


def _local_files(folder: Path, universe: str) -> Iterator[LogFile]:
    for path, name in _local_paths(folder, universe):
        with suppress(FileNotFoundError), path.open("rb") as file:
            first_line = file.readline(log_format.HEADER_BYTES_MAX)
            # Without a complete line, its writer has not written the header yet, or died before that.
            if first_line.endswith(b"\n") or len(first_line) == log_format.HEADER_BYTES_MAX:
                header = log_format.header_of(first_line, universe, name)
                yield _log_file(name, header, str(path), os.fstat(file.fileno()).st_size, is_rotated=False)


def _rotated(
    objects: ObjectStore, universe: str, second: str, *, local: Iterable[LogFile], session: str | None, kind: str | None
) -> Iterator[_ListedFile]:
    """The manifest entries in the order of their names, loaded lazily."""
    day = second.partition("_")[0]
    for path in entries_since(objects, universe, day, local=local, session=session, kind=kind):
        name = log_format.parse_name(name_of(path))
        if name is not None and name.second >= second and log_format.may_hold(name.labels, session, kind):
            yield name.second, partial(_rotated_file, objects, path, name)


def rotated_file(objects: ObjectStore, entry: str) -> LogFile | None:
    """The file of a manifest entry, even if that is damaged or missing; None if the body is missing, too."""
    name = log_format.parse_name(name_of(entry))
    return None if name is None else _rotated_file(objects, entry, name)


def _rotated_file(objects: ObjectStore, path: str, name: FileName) -> LogFile | None:
    try:
        found = read_manifest(objects, path)
    except (HashMismatch, ObjectNotFound) as error:
        file = _file_without_manifest(objects, path, name)
        outcome = "its records cannot be found" if file is None else "its records are read all the same"
        _log.warning("%s; %s", error, outcome)
        return file
    return _log_file(name, found, found.path, found.bytes, is_rotated=True)


def read_manifest(objects: ObjectStore, path: str) -> Manifest:
    """The manifest entry at a path.

    Raises:
        HashMismatch: it is damaged.
        ObjectNotFound: there is none.
    """
    data = objects.get(path)
    try:
        found = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise HashMismatch(f"The manifest entry {path} is damaged ({error})") from None
    if not has_valid_checksum(data):
        raise HashMismatch(f"The manifest entry {path} is damaged (its checksum does not match)")
    if not _names_its_body(path, found):
        raise HashMismatch(f"The manifest entry {path} is damaged (it does not name the file that it is for)")
    return found


def hash_in_name(path: str) -> str:
    """The SHA-256 in the path of a rotated file."""
    return path.removesuffix(log_format.SUFFIX).rpartition("_")[2]


def hash_when_rotated(stem: str, universe: str, data: bytes) -> str:
    """The SHA-256 that a local file gets in the object store, where bad lines at its end are cut off."""
    name = log_format.parse_name(stem)
    size = len(data) if name is None else log_format.content(data, universe, name).size
    return hashlib.sha256(data[:size]).hexdigest()


def is_intact(path: str, data: bytes) -> bool:
    """Whether the bytes of a rotated file have the SHA-256 that its path names."""
    return hashlib.sha256(data).hexdigest() == hash_in_name(path)


def _names_its_body(path: str, manifest: Manifest) -> bool:
    universe, _, stem = path.removeprefix(f"{_MANIFESTS}/").removesuffix(".json").partition("/")
    stem, _, short = stem.rpartition("_")
    name = log_format.parse_name(stem)
    return (
        name is not None
        and manifest.universe == universe
        and manifest.sha256[:SHORT_HASH] == short
        and manifest.path == _body_path(universe, name, manifest.sha256)
        and f"{manifest.session}_{manifest.kind}" == name.labels
    )


def _file_without_manifest(objects: ObjectStore, path: str, name: FileName) -> LogFile | None:
    """The rotated file whose manifest entry is damaged, described by its own header; None if it is missing."""
    universe, start = path.split("/")[1], body_start(path)
    folder = start.rpartition("/")[0]
    # Paths sort by name, so the first one after its beginning is the file.
    for meta in objects.list(folder, after=start, limit=1):
        if meta.path.startswith(start):
            header = log_format.header_of(objects.get(meta.path).partition(b"\n")[0], universe, name)
            return _log_file(name, header, meta.path, meta.size, is_rotated=True)
    return None


def body_start(entry: str) -> str:
    """How the path of the body begins that a manifest entry is for."""
    universe, _, stem = entry.removeprefix(f"{_MANIFESTS}/").removesuffix(".json").partition("/")
    stem, _, short = stem.rpartition("_")
    name = log_format.parse_name(stem)
    return "" if name is None else start_of(_body_path(universe, name, short))


def start_of(body: str) -> str:
    """The path of a body up to the first digits of its hash."""
    start, _, digest = body.removesuffix(log_format.SUFFIX).rpartition("_")
    return f"{start}_{digest[:SHORT_HASH]}"


def _log_file(name: FileName, header: Header | Manifest, path: str, size: int, *, is_rotated: bool) -> LogFile:
    return LogFile(
        name.stem, header.universe, header.session, header.kind, header.opened_ms, header.writer, path, size, is_rotated
    )


def name_of(entry: str) -> str:
    """The name of the file of a manifest entry, without its suffix."""
    return entry.rpartition("/")[2].rpartition("_")[0]


def _loaded(file: LogFile) -> LogFile:
    return file


def _manifests(universe: str) -> str:
    return f"{_MANIFESTS}/{universe}"


def _body_path(universe: str, name: FileName, digest: str) -> str:
    return f"{_BODIES}/{universe}/{name.day}/{name.labels}_{digest}{log_format.SUFFIX}"


def local_paths(folder: Path) -> Iterator[Path]:
    """The path of every file that is not rotated yet."""
    return (path for path, _ in _local_paths(folder))


def bodies_folder(universe: str) -> str:
    """The folder of a universe's rotated files."""
    return f"{_BODIES}/{universe}"


def rotated_paths(objects: ObjectStore) -> Iterator[tuple[str, bool]]:
    """The path of every rotated file (False) and of every manifest entry (True)."""
    for folder in (_BODIES, _MANIFESTS):
        after: str | None = None
        while page := objects.list(folder, after=after):
            yield from ((meta.path, folder == _MANIFESTS) for meta in page)
            after = page[-1].path
