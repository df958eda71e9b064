"""Generated from handles/backups.py by tools/make_twins.py; change that file instead."""

from collections.abc import Iterator

import msgspec

from fastness.errors import Unreachable
from fastness.wire import Transport
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


class Backups:
    """Backups of a whole plane, with every universe. `fastness backup` is built on these calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def begin(self) -> BackupBegun:
        """Create a checkpoint of the plane as it is now. It exists until `end`, or until it is unused for an hour.

        Raises:
            Unsupported: the plane is not in a directory.
            Busy: the maximum number of checkpoints exists.
        """
        return self._transport.call(BeginBackup())

    def files(self, id: str) -> Iterator[BackupFile]:
        """Every file of a checkpoint: the key space, the objects that it refers to, and session logs.

        Raises:
            NotFound: there is no such checkpoint.
        """
        return _files(self._transport.receive(ListBackup(id)))

    def open(self, id: str, path: str, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes of one of its files, or a range of them.

        Raises:
            NotFound: there is no such checkpoint, or no such file.
        """
        return self._transport.receive(OpenBackup(id, path, start, length))

    def end(self, id: str) -> bool:
        """Remove a checkpoint; whether it existed. Ending it twice is fine."""
        return (self._transport.call(EndBackup(id))).ended

    def examine(self, *, deep: bool = False) -> Iterator[Seen]:
        """Check everything that the plane stores, as it is now; progress and findings.

        `deep` hashes every blob instead of a sample of the large ones. Nothing is repaired.

        Raises:
            Unsupported: the plane is not in a directory.
        """
        return _seen(self._transport.receive(RunCheckups(deep)))


def _files(chunks: Iterator[bytes]) -> Iterator[BackupFile]:
    for line in _lines(chunks):
        if line.file is not None:
            yield line.file


def _seen(chunks: Iterator[bytes]) -> Iterator[Seen]:
    for line in _lines(chunks):
        if line.seen is not None:
            yield line.seen


def _lines(chunks: Iterator[bytes]) -> Iterator[Line]:
    """The lines of a streamed list, up to its end marker."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for encoded in lines:
            line = _decode(encoded)
            if line.problem is not None:
                raise error_of(line.problem)
            if line.end:
                return
            yield line
    raise Unreachable("The list was cut off before its end; request it again")
