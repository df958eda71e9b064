"""The files that hold the watermarks of a table.

    _watermarks/0c1f…9a.parquet   is_base                    all watermarks that are not 0
    _watermarks/77d0…02.parquet   predecessor 0c1f…9a        those that one commit has moved
    _watermarks/5e3b…c1.parquet   predecessor 77d0…02        those that the next one has moved

A file's name is its fingerprint. A commit names the last file of such a chain, so that a commit costs what it moves,
and not what the table has. Readers of Delta tables skip folders whose name starts with an underscore.

A file is written before the commit that names it. One that no commit names was left by a run that was killed or lost a
race, and `delete_unused` deletes it.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from fastness.errors import DamagedDatabase, ObjectNotFound
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import fingerprints
from fastness.pipeline.lake.atomic_files import replace_file
from fastness.pipeline.lake.locations import Location

FOLDER: Final = "_watermarks"
ADVICE: Final = "restore the lake, or delete it and ingest again"

_SUFFIX: Final = ".parquet"
_PREDECESSOR: Final = "fastness.predecessor"
_IS_BASE: Final = "fastness.is_base"
_SCHEMA: Final = pa.schema([("name", pa.string()), ("value", pa.int64())])


class WatermarkFile(NamedTuple):
    """The content of a file."""

    fingerprint: int
    values: dict[str, int]
    predecessor: int  # The fingerprint of the file before; 0 if this is the first one.
    is_base: bool  # It has all watermarks, so the files before it are not needed.
    size: int


def path_of(fingerprint: int) -> str:
    """The path of a file below its table."""
    return f"{FOLDER}/{_name(fingerprint)}"


def encode(values: Mapping[str, int], *, predecessor: int, is_base: bool) -> bytes:
    """The bytes of a file."""
    names = sorted(values)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        _SCHEMA,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"name": "DELTA_BYTE_ARRAY", "value": "PLAIN"},
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(pa.table([names, [values[name] for name in names]], schema=_SCHEMA))
        writer.add_key_value_metadata({_PREDECESSOR: f"{predecessor:x}", _IS_BASE: str(is_base)})
    return bytes(sink.getvalue())


def write(location: Location, data: bytes) -> int:
    """Write a file of a table durably; returns its fingerprint.

    It is written even if it exists, so that it is as young as the commit that will name it.
    """
    fingerprint = fingerprints.of_bytes(data)
    replace_file(location.child(FOLDER), _name(fingerprint), data)
    return fingerprint


def chain(location: Location, fingerprint: int, until: int = 0) -> Iterator[WatermarkFile]:
    """The files from the newest one, which is named, back to the first that is needed, or to the one before `until`.

    Raises:
        DamagedDatabase: one of them is missing or damaged.
    """
    while fingerprint not in (0, until):
        file = read(location, fingerprint)
        yield file
        fingerprint = 0 if file.is_base else file.predecessor


def read(location: Location, fingerprint: int) -> WatermarkFile:
    """A file of a table, verified.

    Raises:
        DamagedDatabase: it is missing or damaged.
    """
    path = path_of(fingerprint)
    try:
        data = bytes(location.read(path))
    except ObjectNotFound as error:
        raise DamagedDatabase(f"The watermarks {location.url}/{path} are missing; {ADVICE}") from error
    if fingerprints.of_bytes(data) != fingerprint:
        raise DamagedDatabase(f"The watermarks {location.url}/{path} do not match their hash; {ADVICE}")
    file = pq.ParquetFile(pa.BufferReader(data))
    metadata, rows = {key.decode(): value.decode() for key, value in file.metadata.metadata.items()}, file.read()
    names, numbers = (rows.column(name).to_numpy().tolist() for name in _SCHEMA.names)  # Faster than `to_pylist`.
    values = dict(zip(names, numbers, strict=True))
    return WatermarkFile(
        fingerprint, values, int(metadata[_PREDECESSOR], 16), metadata[_IS_BASE] == str(True), len(data)
    )


def delete_unused(location: Location, used: set[int], before_ms: int | None) -> list[str]:
    """Delete the files that are not used, or only those older than a time; returns their paths."""
    store = Stores(location.storage)(location.store_url)
    kept = {path_of(fingerprint) for fingerprint in used}
    unused = [
        meta.path
        for meta, at_ms in store.times(FOLDER)
        if meta.path not in kept and (before_ms is None or at_ms < before_ms)
    ]
    for path in unused:
        store.delete(path)
    return unused


def _name(fingerprint: int) -> str:
    return f"{fingerprint:0{fingerprints.DIGITS}x}{_SUFFIX}"
