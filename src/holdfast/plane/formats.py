"""The data format of this version."""

from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.errors import NotFound, PathUnusable, SchemaMismatch

FORMAT: Final = 1  # The format of a data directory.
MARKER: Final = "holdfast.json"  # The file that records it.


def check_marker(path: Path) -> None:
    """Raise unless the folder is a data directory in a format that this version supports.

    Raises:
        NotFound: it is not a data directory.
        SchemaMismatch: a newer Holdfast wrote it.
    """
    if not (path / "kv" / "CURRENT").exists():
        raise NotFound(f"{path} is not a Holdfast data directory (kv/CURRENT is missing); check the path")
    try:
        found: Any = msgspec.json.decode((path / MARKER).read_bytes())
        format = found["format"]
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise PathUnusable(f"{path / MARKER} cannot be read ({error}); restore it from a backup") from error
    if format != FORMAT:
        raise SchemaMismatch(f"{path} has format {format} and this version supports {FORMAT}; upgrade Holdfast")
