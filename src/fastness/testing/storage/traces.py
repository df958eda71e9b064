"""Records the file operations of a process: builds the recorder, prepares its environment, reads its trace."""

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

_SOURCE: Final = Path(__file__).parent / "recorder.c"
_RECORD: Final = struct.Struct("=QQQIIII")


class CompilerMissing(Exception):
    """There is no C compiler, so the recorder cannot be built."""


class Kind(StrEnum):
    """What an event did."""

    CREATE = "C"
    WRITE = "W"
    TRUNCATE = "T"
    SYNC = "S"
    RENAME = "R"
    LINK = "L"
    REMOVE = "U"
    MAKE_FOLDER = "M"
    MARK = "K"


class Event(msgspec.Struct, frozen=True):
    """One successful operation on a file or name."""

    kind: Kind
    inode: int = 0
    offset: int = 0  # Of a write; of a truncation, the new length.
    path: str = ""
    target: str = ""  # The new name of a rename or link.
    data: bytes = b""


class Recorder(msgspec.Struct, frozen=True):
    """A built recorder."""

    library: Path

    def environment(self, root: Path, *, marks: Path, trace: Path | None = None) -> dict[str, str]:
        """The environment of a process whose operations below `root` are recorded in `trace`, if it is given.

        `root` must exist and be empty. What the process writes to the file `marks` becomes marks in the trace.
        """
        added = {
            "LD_PRELOAD": str(self.library),
            "FASTNESS_STORAGE_ROOT": str(root.resolve(strict=True)),
            "FASTNESS_STORAGE_MARKS": str(marks.resolve()),
        }
        if trace is not None:
            added["FASTNESS_STORAGE_TRACE"] = str(trace.resolve())
        return {**os.environ, **added}


def build_recorder(folder: Path) -> Recorder:
    """Compile the recorder into `folder`.

    Raises:
        CompilerMissing: there is no `cc` on this machine.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise CompilerMissing("The storage recorder needs a C compiler; install one that is called cc")
    library = folder / "recorder.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(_SOURCE)],
        check=True,
        capture_output=True,
    )
    return Recorder(library)


def read_trace(path: Path) -> list[Event]:
    """The events of a trace, in the order in which they took effect."""
    return list(_events(path.read_bytes()))


def _events(data: bytes) -> Iterator[Event]:
    position = 0
    while position < len(data):
        kind, inode, offset, *sizes, _ = _RECORD.unpack_from(data, position)
        position += _RECORD.size
        parts: list[bytes] = []
        for size in sizes:
            parts.append(data[position : position + size])
            position += size
        path, target, content = parts
        yield Event(Kind(chr(kind)), inode, offset, os.fsdecode(path), os.fsdecode(target), content)
