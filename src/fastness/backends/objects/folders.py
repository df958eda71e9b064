"""Objects in a local folder, with the durability and the if-match support that obstore's LocalStore lacks."""

import asyncio
import errno
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

from fastness.backends.objects.bodies import check_bytes
from fastness.backends.objects.failures import headline, object_error, translate_errors
from fastness.backends.objects.paths import check_path
from fastness.backends.objects.store import ObjectMeta, ObjectStore, put_mode
from fastness.errors import ObjectChanged, ObjectNotFound, PathUnusable
from fastness.folders import DurableFolders, make_folder, sync_folder
from fastness.limits import OBJECT_LOCAL_READ_BYTES, OBJECT_STAGED_SECONDS_MAX
from fastness.private_files import open_private

if TYPE_CHECKING:
    from obstore import PutMode


class FolderStore(ObjectStore):
    """Objects as files below a local folder, durable when a write returns.

    obstore reads and lists here, but does not write: its LocalStore never syncs a file or a folder and has no if-match.
    A write fills a staged file, syncs it, moves it into place atomically (a hard link for create-only, otherwise a
    rename) and syncs the folder. So a power loss leaves the old object, the new one or none, never a partial one.
    A reader may see a new object shortly before it is durable; `create` syncs before it raises ObjectExists.

    Staged files have names that are invalid as paths and that listings skip. Leftovers of a crash are removed after a
    day.

    If-match compares under a lock of this process, since a Fastness data directory belongs to one process. Create-only
    is exact between processes too.

    A folder cannot hold both `a` and `a/b`, nor a segment of over 255 bytes; writing them raises InvalidArgument.
    """

    _read_bytes = OBJECT_LOCAL_READ_BYTES

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._staging = self._root / ".staging"
        self._folders = DurableFolders(self._root)
        try:
            make_folder(self._root)
            sync_folder(self._root.parent)  # An earlier process may have ended before it did.
            make_folder(self._staging)
            _remove_stale_files(self._staging)
            _discard(_new_file(self._staging))  # Fails now, not at the first write, if the folder is not writable.
            super().__init__(LocalStore(self._root))
        except (OSError, BaseError) as error:
            raise PathUnusable(
                f"The folder {self._root} cannot hold objects ({headline(error)}); make it writable or choose another"
            ) from error

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        return self._write(path, chunks, put_mode(create_only=create_only))

    async def write_async(self, path: str, chunks: AsyncIterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        with self._stage(path) as staged:
            async for chunk in chunks:
                await asyncio.to_thread(_append, staged, path, chunk)
        return await asyncio.to_thread(self._publish, staged, path, put_mode(create_only=create_only))

    def delete(self, path: str) -> None:
        target = self._root / check_path(path)
        with translate_errors(path, writes=True):
            with _PUBLISH_LOCK, suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
            if target.parent.is_dir():
                sync_folder(target.parent)

    async def delete_async(self, path: str) -> None:
        await asyncio.to_thread(self.delete, path)

    def _put(self, path: str, data: bytes, mode: "PutMode", content_type: str | None = None) -> ObjectMeta:
        del content_type  # A file has no content type.
        return self._write(path, (data,), mode)

    async def _put_async(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        return await asyncio.to_thread(self._put, path, data, mode)

    def _write(self, path: str, chunks: Iterable[bytes], mode: "PutMode") -> ObjectMeta:
        with self._stage(path) as staged:
            for chunk in chunks:
                _append(staged, path, chunk)
        return self._publish(staged, path, mode)

    @contextmanager
    def _stage(self, path: str) -> Iterator[IO[bytes]]:
        """A new staged file to fill. `_publish` removes it in the end; it is removed at once if filling it fails."""
        with translate_errors(check_path(path), writes=True):
            staged = _new_file(self._staging)
        try:
            yield staged
        except BaseException:
            _discard(staged)
            raise

    def _publish(self, staged: IO[bytes], path: str, mode: "PutMode") -> ObjectMeta:
        target = self._root / path
        try:
            with translate_errors(path, writes=True):
                staged.flush()
                _UNIQUE_TIMES.set_on(staged)
                os.fsync(staged.fileno())
                with _PUBLISH_LOCK:
                    if isinstance(mode, dict) and not self._has_etag(path, mode["e_tag"]):
                        raise object_error(ObjectChanged, path)
                    self._folders.make(target.parent)
                    _move_into_place(staged.name, target, create_only=mode == "create")
                    meta = self.head(path)
                sync_folder(target.parent)
                return meta
        finally:
            _discard(staged)

    def _has_etag(self, path: str, etag: str | None) -> bool:
        with suppress(ObjectNotFound):
            return self.head(path).etag == etag
        return False


class _UniqueTimes:
    """Gives every file of this process a unique modification time.

    A local etag is inode, microsecond and size. Inodes are reused and the kernel's file clock has a resolution of
    milliseconds, so without this a new version could have the etag of an old one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_us = 0

    def set_on(self, file: IO[bytes]) -> None:
        with self._lock:
            self._last_us = max(self._last_us + 1, time.time_ns() // 1_000)
            stamp_ns = self._last_us * 1_000
        os.utime(file.fileno(), ns=(stamp_ns, stamp_ns))


_UNIQUE_TIMES: Final = _UniqueTimes()
_PUBLISH_LOCK: Final = threading.Lock()  # Makes compare and rename atomic, for all local folders of the process.


def _new_file(staging: Path) -> IO[bytes]:
    return open(staging / f"{secrets.token_hex(16)}#0", "xb", opener=open_private)


def _append(staged: IO[bytes], path: str, chunk: bytes) -> None:
    with translate_errors(path, writes=True):
        staged.write(check_bytes(chunk))


def _move_into_place(staged: str, target: Path, *, create_only: bool) -> None:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has this path")
    if not create_only:
        os.replace(staged, target)
        return
    try:
        os.link(staged, target)
    except FileExistsError:
        # The caller may rely on the existing object, so it must be durable.
        sync_folder(target.parent)
        raise


def _discard(staged: IO[bytes]) -> None:
    with suppress(OSError):  # Closing flushes the buffer, which fails again on a full disk.
        staged.close()
    Path(staged.name).unlink(missing_ok=True)


def _remove_stale_files(staging: Path) -> None:
    for leftover in staging.glob("*#0"):
        with suppress(FileNotFoundError):
            if leftover.stat().st_mtime < time.time() - OBJECT_STAGED_SECONDS_MAX:
                leftover.unlink()
