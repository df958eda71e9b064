"""Objects in a local folder, with the durability and the if-match that obstore's own LocalStore lacks."""

import asyncio
import errno
import itertools
import os
import secrets
import threading
import time
from collections.abc import AsyncIterable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from obstore.exceptions import BaseError
from obstore.store import LocalStore

from holdfast.backends.objects.bodies import check_bytes
from holdfast.backends.objects.failures import failure, headline, translated
from holdfast.backends.objects.paths import check_path
from holdfast.backends.objects.store import ObjectMeta, ObjectStore, put_mode
from holdfast.errors import ObjectChanged, ObjectNotFound, PathUnusable
from holdfast.limits import OBJECT_LOCAL_READ_BYTES, OBJECT_STAGED_SECONDS_MAX

if TYPE_CHECKING:
    from obstore import PutMode


class FolderStore(ObjectStore):
    """Objects as files below a local folder, durable when a write returns.

    obstore reads and lists here, but does not write: its LocalStore never syncs a file or a folder and has no if-match.
    A write fills a staged file, syncs it, gives it its name in one step (a hard link for create-only, otherwise a
    rename) and syncs the folder. A power loss therefore leaves the old object, the new one or none, never half of one.
    A reader may see a new object in the moment before it is durable; `create` syncs before it reports ObjectExists.

    Staged files have names that no path may have and that listings skip; what a crash left is swept a day later.

    If-match is a comparison under a lock of this process, for a Holdfast data directory belongs to one process.
    Create-only is exact between processes too.

    A folder cannot hold both `a` and `a/b`, nor a segment of over 255 bytes; writing them raises InvalidArgument.
    """

    _read_bytes = OBJECT_LOCAL_READ_BYTES

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._staging = self._root / ".staging"
        try:
            _make_folder(self._staging)
            _sweep(self._staging)
            _discard(_new_file(self._staging))  # Shows now, not at the first write, whether the folder can be written.
            super().__init__(LocalStore(self._root))
        except (OSError, BaseError) as error:
            raise PathUnusable(
                f"The folder {self._root} cannot hold objects ({headline(error)}); make it writable or choose another"
            ) from error

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        return self._write(path, chunks, put_mode(create_only=create_only))

    async def write_async(self, path: str, chunks: AsyncIterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        with self._filling(path) as staged:
            async for chunk in chunks:
                await asyncio.to_thread(_append, staged, path, chunk)
        return await asyncio.to_thread(self._publish, staged, path, put_mode(create_only=create_only))

    def delete(self, path: str) -> None:
        target = self._root / check_path(path)
        with translated(path, writes=True):
            with _NAMING, suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
            if target.parent.is_dir():
                _sync_folder(target.parent)

    async def delete_async(self, path: str) -> None:
        await asyncio.to_thread(self.delete, path)

    def _put(self, path: str, data: bytes, mode: "PutMode", content_type: str | None = None) -> ObjectMeta:
        del content_type  # A folder has no place for it.
        return self._write(path, (data,), mode)

    async def _put_async(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        return await asyncio.to_thread(self._put, path, data, mode)

    def _write(self, path: str, chunks: Iterable[bytes], mode: "PutMode") -> ObjectMeta:
        with self._filling(path) as staged:
            for chunk in chunks:
                _append(staged, path, chunk)
        return self._publish(staged, path, mode)

    @contextmanager
    def _filling(self, path: str) -> Iterator[IO[bytes]]:
        """A new staged file for `_publish`, which discards it in the end; it is gone at once when filling it fails."""
        with translated(check_path(path), writes=True):
            staged = _new_file(self._staging)
        try:
            yield staged
        except BaseException:
            _discard(staged)
            raise

    def _publish(self, staged: IO[bytes], path: str, mode: "PutMode") -> ObjectMeta:
        target = self._root / path
        try:
            with translated(path, writes=True):
                staged.flush()
                _STAMPS.put_on(staged)
                os.fsync(staged.fileno())
                with _NAMING:
                    if isinstance(mode, dict) and not self._is_at(path, mode["e_tag"]):
                        raise failure(ObjectChanged, path)
                    _name(staged.name, target, create_only=mode == "create")
                    meta = self.head(path)
                _sync_folder(target.parent)
                return meta
        finally:
            _discard(staged)

    def _is_at(self, path: str, etag: str | None) -> bool:
        with suppress(ObjectNotFound):
            return self.head(path).etag == etag
        return False


class _Stamps:
    """Gives every file of this process a time of its own.

    A local etag is inode, microsecond and size. Inodes are used again and a kernel's clock may stand still for
    milliseconds, so without this a new version could have an old one's etag.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_us = 0

    def put_on(self, file: IO[bytes]) -> None:
        with self._lock:
            self._last_us = max(self._last_us + 1, time.time_ns() // 1_000)
            stamp_ns = self._last_us * 1_000
        os.utime(file.fileno(), ns=(stamp_ns, stamp_ns))


_STAMPS: Final = _Stamps()
_NAMING: Final = threading.Lock()  # Makes a comparison and a rename one step, in every local folder of the process.


def _new_file(staging: Path) -> IO[bytes]:
    return open(staging / f"{secrets.token_hex(16)}#0", "xb")


def _append(staged: IO[bytes], path: str, chunk: bytes) -> None:
    with translated(path, writes=True):
        staged.write(check_bytes(chunk))


def _name(staged: str, target: Path, *, create_only: bool) -> None:
    _make_folder(target.parent)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has this name")
    if not create_only:
        os.replace(staged, target)
        return
    try:
        os.link(staged, target)
    except FileExistsError:
        # Whoever is told that the object is there may rely on it, so it must not be lost any more.
        _sync_folder(target.parent)
        raise


def _discard(staged: IO[bytes]) -> None:
    with suppress(OSError):  # Closing writes what is buffered, and fails again on a full disk.
        staged.close()
    Path(staged.name).unlink(missing_ok=True)


def _sweep(staging: Path) -> None:
    for leftover in staging.glob("*#0"):
        with suppress(FileNotFoundError):
            if leftover.stat().st_mtime < time.time() - OBJECT_STAGED_SECONDS_MAX:
                leftover.unlink()


def _make_folder(folder: Path) -> None:
    """Create the folder and what is missing above it, each durable before anything goes into it."""
    missing = list(itertools.takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    for each in reversed(missing):
        try:
            each.mkdir()
        except FileExistsError:
            if not each.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "an object has the name of a folder", str(each)) from None
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
