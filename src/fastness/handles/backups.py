"""Backups of a running plane, and its health checks."""

from collections.abc import AsyncIterator

import msgspec

from fastness.errors import Unreachable
from fastness.wire import AsyncTransport
from fastness.wire.backups import (
    BackupBegun,
    BackupFile,
    BeginBackup,
    EndBackup,
    Line,
    ListBackup,
    OpenBackup,
)
from fastness.wire.health_checks import RunCheckups, Seen
from fastness.wire.problems import error_of

_decode = msgspec.json.Decoder(Line).decode


class AsyncBackups:
    """Backups of a whole plane, with every universe. `fastness backup` is built on these calls."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def begin(self) -> BackupBegun:
        """Create a checkpoint of the plane as it is now. It exists until `end`, or until it is unused for an hour.

        Raises:
            Unsupported: the plane is not in a directory.
            Busy: the maximum number of checkpoints exists.
        """
        return await self._transport.call(BeginBackup())

    async def files(self, id: str) -> AsyncIterator[BackupFile]:
        """Every file of a checkpoint: the key space, the objects that it refers to, and session logs.

        Raises:
            NotFound: there is no such checkpoint.
        """
        return _files(await self._transport.receive(ListBackup(id)))

    async def open(self, id: str, path: str, *, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes of one of its files, or a range of them.

        Raises:
            NotFound: there is no such checkpoint, or no such file.
        """
        return await self._transport.receive(OpenBackup(id, path, start, length))

    async def end(self, id: str) -> bool:
        """Remove a checkpoint; whether it existed. Ending it twice is fine."""
        return (await self._transport.call(EndBackup(id))).ended

    async def examine(self, *, deep: bool = False) -> AsyncIterator[Seen]:
        """Check everything that the plane stores, as it is now; progress and findings.

        `deep` hashes every blob instead of a sample of the large ones. Nothing is repaired.

        Raises:
            Unsupported: the plane is not in a directory.
        """
        return _seen(await self._transport.receive(RunCheckups(deep)))


async def _files(chunks: AsyncIterator[bytes]) -> AsyncIterator[BackupFile]:
    async for line in _lines(chunks):
        if line.file is not None:
            yield line.file


async def _seen(chunks: AsyncIterator[bytes]) -> AsyncIterator[Seen]:
    async for line in _lines(chunks):
        if line.seen is not None:
            yield line.seen


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[Line]:
    """The lines of a streamed list, up to its end marker."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for encoded in lines:
            line = _decode(encoded)
            if line.problem is not None:
                raise error_of(line.problem)
            if line.end:
                return
            yield line
    raise Unreachable("The list was cut off before its end; request it again")
