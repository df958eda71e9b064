"""Backups for a transport: runs `Checkpoints` in threads, and returns lists as streams of bytes."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from fastness.backends.objects import ObjectStore
from fastness.backends.objects.encrypted import as_stored
from fastness.errors import InvalidArgument, NotFound, ObjectNotFound, Unsupported
from fastness.runtime.maintenance.checkpoints import Checkpoints, LineStream
from fastness.wire.backups import BackupBegun, BackupEnded


class AsyncBackupStore:
    """Creates, lists, serves and removes the checkpoints of a plane."""

    def __init__(
        self, checkpoints: Checkpoints, objects: ObjectStore | None, run_in_thread: Callable[..., Any]
    ) -> None:
        """`run_in_thread` calls a function that blocks on files or stores."""
        self._checkpoints = checkpoints
        self._objects = objects
        self._run_in_thread = run_in_thread

    async def begin(self) -> BackupBegun:
        """Create a checkpoint."""
        checkpoint: BackupBegun = await self._run_in_thread(self._checkpoints.begin)
        return checkpoint

    async def end(self, id: str) -> BackupEnded:
        """Remove a checkpoint; whether it was there."""
        return BackupEnded(await self._run_in_thread(self._checkpoints.end, id))

    async def files(self, id: str) -> AsyncIterator[bytes]:
        """Every file that belongs to a checkpoint, as lines of JSON."""
        return self._pages(await self._run_in_thread(self._checkpoints.files, id))

    async def examine(self, *, deep: bool) -> AsyncIterator[bytes]:
        """The results of all health checks, as lines of JSON."""
        return self._pages(await self._run_in_thread(self._checkpoints.run_checks, deep=deep))

    async def open(self, id: str, path: str, start: int, length: int | None) -> AsyncIterator[bytes]:
        """The bytes of one file of a checkpoint.

        Raises:
            NotFound: there is no such checkpoint, or no such file.
        """
        store: ObjectStore = await self._run_in_thread(self._checkpoints.store, id)
        part, _, rest = path.partition("/")
        if part not in ("keyspace", "activity", "objects"):
            raise InvalidArgument(f"{path[:80]!r} is not a file of a backup; request a path from its file list")
        if part == "objects":
            if self._objects is None:
                raise Unsupported("The plane has no object store, so its backups have no objects")
            store, path = as_stored(self._objects), rest
        try:
            return await store.open_async(path, start, length)
        except ObjectNotFound:
            raise NotFound(f"{path[:200]} does not exist, or was removed; begin another backup") from None

    async def _pages(self, lines: LineStream) -> AsyncIterator[bytes]:
        try:
            while page := await self._run_in_thread(lines.page):
                yield page
        finally:
            lines.close()
