"""Backups of a running plane: a checkpoint of its key space, and the files that belong to it.

    begin ──► files ──► open each of them ──► end

A checkpoint is a consistent snapshot. It exists until it is ended, or until it is unused for an hour. Objects are
immutable, so those that it refers to can be read later.
"""

import msgspec

from fastness.wire.health_checks import Seen
from fastness.wire.problems import Problem
from fastness.wire.requests import Operation, Request, Route


class BackupBegun(msgspec.Struct, frozen=True):
    """A checkpoint: its id, its time, and the format and version that wrote it."""

    id: str
    at_ms: int
    data_format: int
    version: str
    encrypted: bool = False  # Whether a universe is encrypted, so that restoring needs the master key.


class BackupFile(msgspec.Struct, frozen=True):
    """A file of a backup, below `keyspace/`, `objects/` or `activity/`; its SHA-256 if it is known."""

    path: str
    size: int
    sha256: str | None = None


class BackupEnded(msgspec.Struct, frozen=True):
    """Whether the checkpoint existed until now."""

    ended: bool


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a streamed list: a file, or a progress report. An empty line is a keepalive."""

    file: BackupFile | None = None
    seen: Seen | None = None
    problem: Problem | None = None  # The list ends here with an error.
    end: bool = False  # The list is complete.


class BeginBackup(Request[BackupBegun], frozen=True, tag="backups.begin"):
    """Create a checkpoint."""

    operation = Operation(
        audited=True,
        stores=True,
        all_queues=True,
        repeatable="a checkpoint that is not used is removed after an hour",
        http=(Route("POST", "/v1/backups", "Create a checkpoint of all data, for a backup.", status=201),),
    )


class ListBackup(Request[Line], frozen=True, tag="backups.files"):
    """Every file of a checkpoint; streamed."""

    operation = Operation(reads=True, network=False, all_queues=True)

    id: str


class OpenBackup(Request[BackupFile], frozen=True, tag="backups.open"):
    """The bytes of a file, or `length` of them from `start` on; streamed."""

    operation = Operation(reads=True, network=False, all_queues=True)

    id: str
    path: str
    start: int = 0
    length: int | None = None


class EndBackup(Request[BackupEnded], frozen=True, tag="backups.end"):
    """Remove a checkpoint. Ending it twice is fine."""

    operation = Operation(
        all_queues=True,
        repeatable="an ended backup stays ended; only the answer differs",
        http=(Route("DELETE", "/v1/backups/{id}", "Remove a checkpoint."),),
    )

    id: str
