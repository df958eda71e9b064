"""Writes small files of a lake atomically: reports, watermarks and the records of runs."""

import os
import tempfile
from pathlib import Path
from typing import Final

from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake.locations import Location

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".parquet": "application/vnd.apache.parquet",
}


def replace_file(location: Location, path: str, data: bytes) -> None:
    """Write a file atomically: a reader gets the old version or the new one."""
    if not location.is_local:
        Stores(location.storage)(location.url).put(path, data, content_type=_TYPES[Path(path).suffix])
        return
    folder = Path(location.url)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, staged = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(staged).replace(folder / path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise
    location.sync(path)
