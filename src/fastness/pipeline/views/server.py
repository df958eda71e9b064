"""A view of a running server: the files of an online backup, opened locally.

    CACHE/<server>/tables/<name>-<sha256>.sst   tables of its key space, cached for the next view: they never change
    CACHE/<server>/.view-<id>/kv/               the snapshot of the key space: links to these
    CACHE/<server>/.view-<id>/activity/

A cached table is used if it has the size and the end of the server's, and the hash in its own name. Otherwise it is
fetched again, so that damage of the cache repairs itself.

Objects come from the store in the config. Without one, the server sends them: data for executors is staged, and the
rest is fetched when it is read.
"""

import hashlib
import os
import shutil
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from obstore.store import MemoryStore

import fastness
from fastness.backends.objects import ObjectMeta, ObjectStore, check_path
from fastness.backends.objects.encrypted import decrypted, universe_of_path
from fastness.backends.objects.store import Names
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy, FastnessError, NotFound, ObjectNotFound, SchemaMismatch, Unreachable, Unsupported
from fastness.handles.sync.backups import Backups
from fastness.kv.formats import FORMAT
from fastness.kv.value_cipher import ValueCipher
from fastness.limits import OBJECT_LIST_MAX, VIEW_LOCK_WAIT_SECONDS_MAX
from fastness.names import folder_at
from fastness.pipeline.config import Config
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.views import folders
from fastness.pipeline.views.manifests import FOLDER
from fastness.pipeline.views.view import View
from fastness.wire.backups import BackupBegun, BackupFile

_POLL_SECONDS: Final = 0.2
_INTACT_MAX: Final = 100_000
_intact: Final[set[tuple[str, int, int, int]]] = set()  # Cached tables whose hash was checked, as they were then.
_TAIL_BYTES: Final = 4_096  # The end of an SST file has the ids of the database and process that wrote it.


def open_server(config: Config) -> View:
    """A view of the server at a URL.

    Raises:
        Unreachable: the server cannot be reached.
        PathUnusable: the certificates cannot be used.
        NotAllowed: the token does not allow backups of all universes.
        Unsupported: its data is not in a directory.
        Busy: other views and backups of it are in progress for too long.
        SchemaMismatch: the server has a newer data format.
        EncryptionKeyMissing: it has encrypted universes, and the master key is missing here.
    """
    stores = Stores(config.storage)
    with ExitStack() as resources:
        patience = config.patience_seconds
        plane = resources.enter_context(
            fastness.connect(config.data, token=config.token, tls=config.tls(), patience_seconds=patience)
        )
        begun = _begin(plane.backups)
        resources.callback(_end, plane.backups, begun.id)
        if begun.data_format != FORMAT:
            raise SchemaMismatch(
                f"The server's data have format {begun.data_format}, this version supports {FORMAT}; upgrade Fastness"
            )
        cache = _cache(config.data)
        folder = resources.enter_context(folders.temporary(cache))
        logs = _download(plane.backups, begun.id, folder, cache / "tables", with_logs=config.objects is None)
        database = resources.enter_context(RocksDatabase(folder / "kv", cipher=config.cipher()))
        objects = (
            stores(config.objects) if config.objects else BackupObjects(plane.backups, begun.id, logs, database.cipher)
        )
        return View(
            database,
            objects=objects,
            objects_url=config.objects,
            logs=(folder / "activity",),
            stores=stores,
            store_id=config.objects or config.data,
            universes=config.universes,
            resources=resources.pop_all(),
        )


class BackupObjects(ObjectStore):
    """The objects of a backup, fetched from the server and decrypted here. Read-only."""

    def __init__(self, backups: Backups, id: str, logs: list[ObjectMeta], cipher: ValueCipher) -> None:
        """Create the store; `logs` are rotated session logs and their manifests, the only objects that are listed."""
        super().__init__(MemoryStore())
        self._backups = backups
        self._id = id
        self._cipher = cipher
        self._logs = sorted(logs, key=lambda meta: meta.path)

    def get(self, path: str) -> bytes:
        return b"".join(self.open(path))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        return b"".join(self.open(path, start, length))

    def open(self, path: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        universe = universe_of_path(path)
        try:
            if universe is None or self._cipher.newest_key(universe) is None:
                return self._backups.open(self._id, f"objects/{path}", start=start, length=length)
            content = decrypted(self._cipher, path, self._backups.open(self._id, f"objects/{path}"))
            return _part_of(content, start, length)
        except NotFound as error:
            self._check_checkpoint()
            raise ObjectNotFound(f"{path} is not in the server's object store") from error

    def list(self, prefix: str = "", *, after: str | None = None, limit: int = OBJECT_LIST_MAX) -> "list[ObjectMeta]":
        begin = bisect_right(self._logs, after or "", key=lambda meta: meta.path)
        wanted = f"{prefix.removesuffix('/')}/" if prefix else ""
        return [meta for meta in self._logs[begin:] if meta.path.startswith(wanted)][:limit]

    def names(self, folder: str) -> Names:
        start = len(folder) + 1
        names = (meta.path[start:] for meta in self._logs if meta.path.startswith(f"{folder}/"))
        return [name for name in names if "/" not in name]

    def folders(self, prefix: str) -> Names:
        start = len(prefix) + 1
        paths = (meta.path[start:] for meta in self._logs if meta.path.startswith(f"{prefix}/"))
        return sorted({path.partition("/")[0] for path in paths if "/" in path})

    def _check_checkpoint(self) -> None:
        """Raise Unreachable if the server removed the checkpoint: then objects are not missing, but unreadable."""
        try:
            b"".join(self._backups.open(self._id, "keyspace/CURRENT", length=1))
        except NotFound as error:
            raise Unreachable("The server has removed the checkpoint of this view; run the job again") from error


def _part_of(content: Iterator[bytes], start: int, length: int | None) -> Iterator[bytes]:
    position, end = 0, None if length is None else start + length
    for part in content:
        found = part[max(start - position, 0) : None if end is None else max(end - position, 0)]
        position += len(part)
        if found:
            yield found
        if end is not None and position >= end:
            return


def _begin(backups: Backups) -> BackupBegun:
    """Begin a backup. A server allows a few at a time, and those of other views are mostly short."""
    until = time.monotonic() + VIEW_LOCK_WAIT_SECONDS_MAX
    while True:
        try:
            return backups.begin()
        except Unsupported as error:
            raise Unsupported(
                "The server's data is in PostgreSQL; use its URL instead (--data postgresql://user@host/database), "
                "and the object store with --objects"
            ) from error
        except Busy:
            if time.monotonic() >= until:
                raise
            time.sleep(_POLL_SECONDS)


def _end(backups: Backups, id: str) -> None:
    with suppress(FastnessError):  # It expires on the server.
        backups.end(id)


def _cache(url: str) -> Path:
    home = folder_at(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    views = home / "fastness" / "views"
    views.mkdir(mode=0o700, parents=True, exist_ok=True)
    return views / hashlib.sha256(url.encode()).hexdigest()[:16]


def _download(backups: Backups, id: str, folder: Path, tables: Path, *, with_logs: bool) -> list[ObjectMeta]:
    """Fetch the key space and local session logs into `folder`; returns the rotated session logs and manifests."""
    (folder / "kv").mkdir()
    tables.mkdir(exist_ok=True)
    logs: list[ObjectMeta] = []
    named: set[str] = set()
    for file in backups.files(id):
        part, _, rest = check_path(file.path).partition("/")  # Never trust paths from the network.
        if part == "objects":
            if rest.startswith((f"{FOLDER}/", "activity/")):
                logs.append(ObjectMeta(rest, file.size, ""))
            elif not with_logs:
                break  # Files of the backup come first; objects are read from their store.
        elif part == "activity":
            _save(backups, id, file, folder / file.path)
        elif rest.endswith(".sst"):
            named.add(rest)
            _place_table(backups, id, file, tables, folder / "kv" / rest)
        elif rest != "LOCK":
            _save(backups, id, file, folder / "kv" / rest)
    for known in tables.iterdir():
        if f"{known.name.partition('-')[0]}.sst" not in named:
            known.unlink(missing_ok=True)
    return logs


def _place_table(backups: Backups, id: str, file: BackupFile, tables: Path, path: Path) -> None:
    """Put a table into the view: a link to the cached one, if that is the same file and undamaged."""
    for cached in tables.glob(f"{path.stem}-*.sst"):
        with suppress(FileNotFoundError):  # Another view may delete it.
            if (
                cached.stat().st_size == file.size
                and _file_tail(cached) == _remote_tail(backups, id, file)
                and _is_intact(cached)
            ):
                _link(cached, path)
                return
            cached.unlink()
    _save(backups, id, file, path)
    draft = tables / f"{path.stem}-{uuid.uuid4().hex}.draft"
    with suppress(FileNotFoundError):  # Another view may delete the draft as unknown.
        _link(path, draft)
        draft.replace(tables / f"{path.stem}-{_hash(path)}.sst")


def _is_intact(cached: Path) -> bool:
    """Whether a cached table has the hash in its name. A process computes it once, and again after a change."""
    status = cached.stat()
    state = (str(cached), status.st_ino, status.st_mtime_ns, status.st_size)
    if state not in _intact:
        if _hash(cached) != cached.stem.partition("-")[2]:
            return False
        if len(_intact) >= _INTACT_MAX:
            _intact.clear()
        _intact.add(state)
    return True


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(backups: Backups, id: str, file: BackupFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as target:
        size = sum(target.write(chunk) for chunk in backups.open(id, file.path, length=file.size))
    if size != file.size:
        raise Unreachable(f"{file.path} was truncated: {size} of {file.size} bytes; try again")


def _file_tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        return file.read()


def _remote_tail(backups: Backups, id: str, file: BackupFile) -> bytes:
    start = max(file.size - _TAIL_BYTES, 0)
    return b"".join(backups.open(id, file.path, start=start, length=file.size - start))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
