"""Backups over a port: what `checkpoints` does, off the caller's thread, and as streams of bytes."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from holdfast.backends.objects import ObjectStore
from holdfast.errors import InvalidArgument, NotFound, ObjectNotFound, Unsupported
from holdfast.runtime.maintenance.checkpoints import Checkpoints, Lines
from holdfast.wire.backups import BackupBegun, BackupEnded


class AsyncBackupStore:
    """Makes, tells of and hands out the checkpoints of a plane."""

    def __init__(
        self, checkpoints: Checkpoints, objects: ObjectStore | None, run_in_thread: Callable[..., Any]
    ) -> None:
        """`run_in_thread` calls something that waits for files or stores."""
        self._checkpoints = checkpoints
        self._objects = objects
        self._aside = run_in_thread

    async def begin(self) -> BackupBegun:
        """Make a checkpoint."""
        begun: BackupBegun = await self._aside(self._checkpoints.begin)
        return begun

    async def end(self, id: str) -> BackupEnded:
        """Remove a checkpoint; whether it was there."""
        return BackupEnded(await self._aside(self._checkpoints.end, id))

    async def files(self, id: str) -> AsyncIterator[bytes]:
        """Every file that belongs to a checkpoint, as lines of JSON."""
        return self._pages(await self._aside(self._checkpoints.files, id))

    async def examine(self, *, deep: bool) -> AsyncIterator[bytes]:
        """What is found by looking at everything, as lines of JSON."""
        return self._pages(await self._aside(self._checkpoints.examined, deep=deep))

    async def open(self, id: str, path: str, start: int, length: int | None) -> AsyncIterator[bytes]:
        """The bytes of a file that belongs to a checkpoint.

        Raises:
            NotFound: there is no such checkpoint, or no such file.
        """
        store: ObjectStore = await self._aside(self._checkpoints.store, id)
        part, _, rest = path.partition("/")
        if part not in ("keyspace", "activity", "objects"):
            raise InvalidArgument(f"{path[:80]!r} is no file of a backup; ask for one that its list names")
        if part == "objects":
            if self._objects is None:
                raise Unsupported("The plane has no object store, and so no objects")
            store, path = self._objects, rest
        try:
            return await store.open_async(path, start, length)
        except ObjectNotFound:
            raise NotFound(f"{path[:200]} is not there, or not any more; begin another backup") from None

    async def _pages(self, lines: Lines) -> AsyncIterator[bytes]:
        try:
            while page := await self._aside(lines.page):
                yield page
        finally:
            lines.close()
