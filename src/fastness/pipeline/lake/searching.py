"""Searches every file of a lake for a text: rows, Delta logs with their statistics, checkpoints, hashes, reports."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import cbor2
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from fastness.limits import OBJECT_LIST_MAX, ROWS_BATCH
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake.locations import Location

_PARQUET: Final = b"PAR1"


class Search(msgspec.Struct):
    """What was searched, and where the texts were found."""

    files: int = 0
    bytes: int = 0
    found: dict[str, int] = {}  # The number of cells or lines, by file.
    unreadable: list[str] = []  # Files that cannot be decoded, so that nothing is known about them.


def search(location: Location, texts: Sequence[str], *, only: tuple[str, ...] = ("",)) -> Search:
    """Read every file of a lake, or those in some folders.

    A text counts if it stands by itself: `ada` is in `ada@main`, and not in `adapter`.
    """
    result = Search()
    needles = _Needles(texts)
    for path in (path for prefix in only for path in paths(location, prefix)):
        data = bytes(location.read(path))
        result.files += 1
        result.bytes += len(data)
        try:
            count = int(needles.are_in(path)) + sum(needles.are_in(cell) for cell in _cells(data))
        except (pa.ArrowException, OSError):
            result.unreadable.append(path)
            continue
        if count:
            result.found[path] = count
    return result


def paths(location: Location, prefix: str = "") -> Iterator[str]:
    """The files below a location, or in a folder of it; local ones of any name, also hidden ones."""
    if location.is_local:
        for folder, _, names in os.walk(os.path.join(location.url, prefix)):
            yield from (str(Path(folder, name).relative_to(location.url)) for name in sorted(names))
        return
    store, after = Stores(location.storage)(location.url), None
    while page := store.list(prefix.rstrip("/"), after=after, limit=OBJECT_LIST_MAX):
        yield from (meta.path for meta in page)
        after = page[-1].path


class _Needles:
    def __init__(self, texts: Sequence[str]) -> None:
        spellings = {spelling for text in texts for spelling in (text, msgspec.json.encode(text)[1:-1].decode())}
        words = "|".join(re.escape(text) for text in sorted(spellings, key=len, reverse=True))
        self._text = re.compile(rf"(?<![\w-])(?<!\w\.)(?:{words})(?![\w-])(?!\.\w)")
        self._plain = sorted(spellings)
        self._binary = [cbor2.dumps(text) for text in texts]

    def are_in(self, cell: str | bytes) -> bool:
        if isinstance(cell, bytes):
            return any(form in cell for form in self._binary)
        return any(text in cell for text in self._plain) and self._text.search(cell) is not None


def _cells(data: bytes) -> Iterator[str | bytes]:
    if not data.startswith(_PARQUET):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            yield data  # A text file is not CBOR, but the hexadecimal digits `cada` look like the CBOR of `ada`.
            text = data.decode(errors="replace")
        yield from text.splitlines()
        return
    file = pq.ParquetFile(pa.BufferReader(data))
    yield from _texts(_statistics(file))
    for batch in file.iter_batches(batch_size=ROWS_BATCH):
        for column in batch.columns:
            if pa.types.is_string(column.type) or pa.types.is_binary(column.type) or pa.types.is_nested(column.type):
                yield from _texts(column.to_pylist())
            elif pa.types.is_dictionary(column.type):
                yield from _texts(column.dictionary.to_pylist())


def _statistics(file: pq.ParquetFile) -> list[Any]:
    """The texts in a file's footer: the least and greatest values of columns, and its metadata."""
    footer = file.metadata
    found: list[Any] = [
        [key.decode(), value.decode(errors="replace")] for key, value in (footer.metadata or {}).items()
    ]
    for group in range(footer.num_row_groups):
        for n in range(footer.num_columns):
            statistics = footer.row_group(group).column(n).statistics
            if statistics is not None and statistics.has_min_max:
                found += [statistics.min, statistics.max]
    return found


def _texts(value: Any) -> Iterator[str | bytes]:
    """The texts and bytes in a value, however deep."""
    if isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(name)
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
