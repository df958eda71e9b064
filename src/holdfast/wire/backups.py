"""Backups of a plane that goes on: a checkpoint of its key space, and the files that belong to it.

    begin ──► files ──► open each of them ──► end

A checkpoint is of one moment, and stays until it is ended or nobody has used it for an hour. What it names in the
object store is written once, so whatever is read later belongs to the same moment.
"""

import msgspec

from holdfast.wire.health_checks import Seen
from holdfast.wire.problems import Problem
from holdfast.wire.requests import Operation, Request


class BackupBegun(msgspec.Struct, frozen=True):
    """A checkpoint: its id, when it was made, and what wrote it."""

    id: str
    at_ms: int
    data_format: int
    version: str


class BackupFile(msgspec.Struct, frozen=True):
    """A file that belongs to a backup, below `keyspace/`, `objects/` or `activity/`; its SHA-256 where it is known."""

    path: str
    size: int
    sha256: str | None = None


class BackupEnded(msgspec.Struct, frozen=True):
    """Whether the checkpoint was there until now."""

    ended: bool


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a list that is streamed: a file, or what was seen. An empty one says that the plane is at work."""

    file: BackupFile | None = None
    seen: Seen | None = None
    problem: Problem | None = None  # The list ends here, before its end.
    end: bool = False  # This was all of it.


class BeginBackup(Request[BackupBegun], frozen=True, tag="backups.begin"):
    """Make a checkpoint."""

    operation = Operation(repeatable="a checkpoint that is not used is removed after an hour")


class ListBackup(Request[Line], frozen=True, tag="backups.files"):
    """Every file that belongs to a checkpoint; streamed."""

    operation = Operation(reads=True, network=False)

    id: str


class OpenBackup(Request[BackupFile], frozen=True, tag="backups.open"):
    """The bytes of a file, or `length` of them from `start` on; streamed."""

    operation = Operation(reads=True, network=False)

    id: str
    path: str
    start: int = 0
    length: int | None = None


class EndBackup(Request[BackupEnded], frozen=True, tag="backups.end"):
    """Remove a checkpoint. Ending it twice is fine."""

    operation = Operation(repeatable="an ended backup stays ended; only the answer differs")

    id: str
