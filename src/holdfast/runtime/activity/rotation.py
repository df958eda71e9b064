"""Closed files of session logs, moved into the object store, and where every file is found again.

    closed ──► body in the object store ──► manifest entry ──► removed here
               └──────────── locked by whoever rotates it ────────────┘

    activity/<universe>/<date>/<session>_<kind>_<sha256>.jsonl
    activity-manifest/<universe>/<date>_<time>_<session>_<kind>_<first 16 of the sha256>.json

A file that nobody has locked is finished: its writer closed it or is dead, and anybody may rotate it. Everything that
is stored follows from the bytes of the file, so every step can be repeated after a crash and gives the same objects.
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
from typing import IO, TypeAlias

import msgspec

from holdfast.backends.objects import ObjectStore
from holdfast.errors import Backend, ObjectExists, ObjectNotFound
from holdfast.runtime.activity import format as log_format
from holdfast.runtime.activity.format import Content, FileName, Header, LogFile

_log = logging.getLogger("holdfast.activity")

_Found: TypeAlias = tuple[str, Callable[[], LogFile | None]]  # The second in which it began, and how to load it.


class Manifest(msgspec.Struct, frozen=True):
    """What the object store knows of a rotated file."""

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


class Failures:
    """Counts what fails, and warns when that begins and when it is over, not every time."""

    def __init__(self, what: str) -> None:
        self.count = 0
        self.last_error: str | None = None
        self._what = what
        self._failing: set[Hashable] = set()
        self._lock = threading.Lock()

    def note(self, who: Hashable, error: Exception) -> None:
        with self._lock:
            self.count += 1
            self.last_error = f"{type(error).__name__}: {error}"
            is_new = not self._failing
            self._failing.add(who)
        if is_new:
            _log.warning("%s fails, and is tried again: %s", self._what, error)

    def over(self, who: Hashable, *, is_given_up: bool = False) -> None:
        with self._lock:
            was_last = self._failing == {who}
            self._failing.discard(who)
        if was_last and not is_given_up:
            _log.warning("%s works again", self._what)


class Rotation:
    """Moves closed files into the object store, or leaves them where they are if there is none."""

    def __init__(self, folder: Path, objects: ObjectStore | None) -> None:
        self.rotated = 0
        self.failures = Failures("Moving session logs into the object store")
        self.due = threading.Event()
        self._folder = folder
        self._objects = objects
        self._waiting: deque[Path] = deque()
        self._has_looked = objects is None
        self._turn = threading.Lock()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting) or not self._has_looked

    def add(self, path: Path) -> None:
        """Have a closed file rotated by the next `run`."""
        if self._objects is not None:
            self._waiting.append(path)
            self.due.set()

    def run(self) -> None:
        """Rotate what was added, what failed before and, the first time, what dead processes left.

        A file that fails stays for the next run. When the store itself does not work, the others are not tried.
        """
        if self._objects is None:
            return
        with self._turn:
            if not self._has_looked:
                self._look()
            for _ in range(len(self._waiting)):
                path = self._waiting.popleft()
                try:
                    self.rotated += rotate(path, self._objects)
                    self.failures.over(path)
                except Exception as error:  # Whatever is wrong with one file must not end the thread that rotates.
                    self._waiting.append(path)
                    self.failures.note(path, error)
                    if isinstance(error, Backend):
                        break

    def _look(self) -> None:
        """Find what dead processes left, now or with the next run."""
        try:
            self._waiting.extend([path for path, _ in _local_paths(self._folder)])
        except Exception as error:
            self.failures.note(self._folder, error)
        else:
            self._has_looked = True
            self.failures.over(self._folder)


def rotate(path: Path, objects: ObjectStore) -> bool:
    """Store a closed file, then remove it; False if it holds nothing, is gone, or somebody has it locked."""
    name = log_format.parsed_name(path.stem)
    with _locked(path) as file:
        if file is None or name is None:
            return False
        universe, data = path.parent.name, file.read()
        content = log_format.content(data, universe, name)
        if content.records:
            _store(objects, universe, name, content, data[: content.size])
        path.unlink()
        return content.records > 0


def copy(path: Path, objects: ObjectStore) -> Manifest | None:
    """Store a closed file and leave it where it is; what is stored, or None if it holds nothing."""
    name = log_format.parsed_name(path.stem)
    if name is None:
        return None
    universe, data = path.parent.name, path.read_bytes()
    content = log_format.content(data, universe, name)
    return _store(objects, universe, name, content, data[: content.size]) if content.records else None


def files_in_order(
    folder: Path,
    objects: ObjectStore | None,
    universe: str,
    *,
    second: str = "",
    session: str | None = None,
    kind: str | None = None,
) -> Iterator[LogFile]:
    """The files of a universe that began at `second` or later, each once. Others than asked for may be among them."""
    # The local ones are listed before the manifest is: what is rotated in between is in both, and is taken from there.
    files = sorted(_local_files(folder, universe), key=lambda file: file.second)
    here: Iterable[_Found] = [(file.second, partial(_same, file)) for file in files if file.second >= second]
    there: Iterable[_Found] = () if objects is None else _rotated(objects, universe, second, session, kind)
    for _, group in groupby(merge(here, there, key=itemgetter(0)), key=itemgetter(0)):
        loaded = [load() for _, load in group]
        by_id = {file.id: file for file in loaded if file is not None}
        yield from (by_id[id] for id in sorted(by_id))


def lock(descriptor: int, path: Path) -> bool:
    """Lock the open file without waiting; whether that succeeded and the path still is that file's."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes] | None]:
    """The file, locked; None if it is gone or somebody else has it locked."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file if lock(file.fileno(), path) else None


def _store(objects: ObjectStore, universe: str, name: FileName, content: Content, body: bytes) -> Manifest:
    digest = hashlib.sha256(body).hexdigest()
    manifest = Manifest(
        path=f"activity/{universe}/{name.day}/{name.labels}_{digest}{log_format.SUFFIX}",
        sha256=digest,
        bytes=len(body),
        records=content.records,
        universe=universe,
        session=content.header.session,
        kind=content.header.kind,
        writer=content.header.writer,
        opened_ms=content.header.opened_ms,
        closed_ms=content.last_at_ms,  # The moment of closing is not in the bytes, and a repetition must not differ.
        first_at_ms=content.first_at_ms,
        last_at_ms=content.last_at_ms,
    )
    _store_once(objects, manifest.path, body)
    _store_once(objects, f"{_manifests(universe)}/{name.stem}_{digest[:16]}.json", msgspec.json.encode(manifest))
    return manifest


def _store_once(objects: ObjectStore, path: str, data: bytes) -> None:
    try:
        objects.create(path, data)
    except ObjectExists:
        # The same path has the same bytes, or fewer of them if a store that is no better was interrupted.
        if objects.head(path).size != len(data):
            objects.put(path, data)


def _local_paths(folder: Path, universe: str = "*") -> Iterator[tuple[Path, FileName]]:
    for path in sorted(folder.glob(f"{universe}/*{log_format.SUFFIX}")):
        if (name := log_format.parsed_name(path.stem)) is not None:
            yield path, name


def _local_files(folder: Path, universe: str) -> Iterator[LogFile]:
    for path, name in _local_paths(folder, universe):
        with suppress(FileNotFoundError), path.open("rb") as file:
            first_line = file.readline(log_format.HEADER_BYTES_MAX)
            # Without a whole line it is about to get its header, or died before that.
            if first_line.endswith(b"\n") or len(first_line) == log_format.HEADER_BYTES_MAX:
                header = log_format.header_of(first_line, universe, name)
                yield _log_file(name, header, str(path), os.fstat(file.fileno()).st_size, is_rotated=False)


def _rotated(
    objects: ObjectStore, universe: str, second: str, session: str | None, kind: str | None
) -> Iterator[_Found]:
    """The manifest entries in the order of their names, each read when it is needed."""
    after = f"{_manifests(universe)}/{second}" if second else None
    while page := objects.list(_manifests(universe), after=after):
        for meta in page:
            stem = meta.path.rpartition("/")[2].rpartition("_")[0]
            name = log_format.parsed_name(stem)
            if name is not None and log_format.may_hold(name.labels, session, kind):
                yield name.second, partial(_rotated_file, objects, meta.path, name)
        after = page[-1].path


def _rotated_file(objects: ObjectStore, path: str, name: FileName) -> LogFile | None:
    try:
        found = msgspec.json.decode(objects.get(path), type=Manifest)
    except (ValueError, ObjectNotFound) as error:
        _log.warning("the manifest entry %s cannot be read and is passed over: %s", path, error)
        return None
    return _log_file(name, found, found.path, found.bytes, is_rotated=True)


def _log_file(name: FileName, header: Header | Manifest, path: str, size: int, *, is_rotated: bool) -> LogFile:
    return LogFile(
        name.stem, header.universe, header.session, header.kind, header.opened_ms, header.writer, path, size, is_rotated
    )


def _same(file: LogFile) -> LogFile:
    return file


def _manifests(universe: str) -> str:
    return f"activity-manifest/{universe}"
