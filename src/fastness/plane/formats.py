"""The format of a data directory, which a file in it records."""

import shlex
from pathlib import Path
from typing import Any, Final

import msgspec

from fastness.errors import DamagedDatabase, NotFound, PathUnusable
from fastness.kv.formats import FORMAT, check_supported

MARKER: Final = "fastness.json"  # The file that records it.


def check_used(path: Path) -> None:
    """Raise DamagedDatabase if the folder was a data directory and has lost its key space.

    The marker is written after the key space, so a folder with the marker had one.
    """
    kv = path / "kv"
    if (path / MARKER).is_file() and not (kv / "CURRENT").exists():
        what = "has lost files (CURRENT is missing)" if kv.is_dir() and any(kv.iterdir()) else "is missing"
        raise DamagedDatabase(
            f"{path} has been used and its key space {kv} {what}; restore it from a backup, or choose another folder"
        )


def check_exists(path: Path) -> None:
    """Raise unless the folder is a data directory with a key space.

    Raises:
        NotFound: it is not a data directory.
        DamagedDatabase: its key space is missing.
    """
    check_used(path)
    if not (path / "kv" / "CURRENT").exists():
        url = shlex.quote(f"dir:{path}")
        raise NotFound(
            f"There is no plane in {path}; check the path, or create one with `fastness serve --data {url}` or a "
            f"command that writes, such as `fastness --url {url} queue put QUEUE BODY`"
        )


def check_marker(path: Path, *, oldest: int = FORMAT) -> None:
    """Raise unless the folder is a data directory in a format from `oldest` to this version's newest.

    Raises:
        NotFound: it is not a data directory.
        DamagedDatabase: its key space is missing.
        SchemaMismatch: it has another format.
    """
    check_exists(path)
    try:
        found: Any = msgspec.json.decode((path / MARKER).read_bytes())
        format = int(found["format"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise PathUnusable(f"{path / MARKER} cannot be read ({error}); restore it from a backup") from error
    check_supported(str(path), format, oldest=oldest)
