"""Formats: what this version writes, and what it can read."""

from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.errors import NotFound, PathUnusable, SchemaMismatch

FORMAT: Final = 1  # Of a data directory.
MARKER: Final = "holdfast.json"  # The file in it that says so.


def check_marker(path: Path) -> None:
    """Raise unless the folder is a data directory of a format that this version knows.

    Raises:
        NotFound: it is none.
        SchemaMismatch: a newer Holdfast wrote it.
    """
    if not (path / "kv" / "CURRENT").exists():
        raise NotFound(f"{path} is no data directory of Holdfast (there is no kv/CURRENT); check the path")
    try:
        found: Any = msgspec.json.decode((path / MARKER).read_bytes())
        format = found["format"]
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise PathUnusable(f"{path / MARKER} cannot be read ({error}); restore it from a backup") from error
    if format != FORMAT:
        raise SchemaMismatch(f"{path} has format {format} and this version knows {FORMAT}; upgrade Holdfast")
