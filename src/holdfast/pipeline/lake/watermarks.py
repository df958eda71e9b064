"""Reads all watermarks of a table: the application transactions in its Delta log.

delta-rs reads one at a time, and scans the log for each (some 10 ms). A plane has thousands of worlds.

    _delta_log/00000000000000000042.json                 {"txn":{"appId":"journal/main/ada","version":512}} …
    _delta_log/00000000000000000040.checkpoint.parquet   all actions up to that version, in one file
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import DamagedDatabase, ObjectNotFound
from holdfast.limits import OBJECT_LIST_MAX
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.lake.locations import Location

_LOG: Final = "_delta_log"
_CHECKPOINT: Final = re.compile(r"_delta_log/(\d{20})\.checkpoint(\.\d{10}\.\d{10})?\.parquet\Z")
_ADVICE: Final = "restore the lake, or delete it and ingest again"
_PREFIX: Final = b'{"txn":'


class _Transaction(msgspec.Struct):
    app: str = msgspec.field(name="appId")
    version: int = 0


class _Line(msgspec.Struct):
    txn: _Transaction


_decode = msgspec.json.Decoder(_Line).decode


class Watermarks:
    """The watermarks of a table at a version; reads the log incrementally."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._values: dict[str, int] = {}
        self._version = -1

    def at(self, version: int) -> dict[str, int]:
        """Every watermark at this version of the table, which must not be lower than in the last call.

        Raises:
            DamagedDatabase: a commit is missing from the log.
        """
        if self._version < 0 <= version:
            self._load_checkpoint(version)
        for number in range(self._version + 1, version + 1):
            for line in self._read_commit(number).splitlines():
                if line.startswith(_PREFIX):
                    watermark = self._decode(line, number)
                    self._values[watermark.app] = watermark.version
            self._version = number
        return self._values

    def _decode(self, line: bytes, number: int) -> _Transaction:
        try:
            return _decode(line).txn
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedDatabase(f"Commit {number} of {self._location.url} is damaged; {_ADVICE}") from error

    def _load_checkpoint(self, version: int) -> None:
        checkpoints: dict[int, list[str]] = {}
        for path in self._list_log():
            name = _CHECKPOINT.match(path)
            if name is not None and int(name[1]) <= version:
                checkpoints.setdefault(int(name[1]), []).append(path)
        if not checkpoints:
            return
        latest = max(checkpoints)
        for path in checkpoints[latest]:
            data = pa.BufferReader(self._location.read(path))
            try:
                file = pq.ParquetFile(data)
                if "txn" in file.schema_arrow.names:
                    for batch in file.iter_batches(columns=["txn"]):
                        self._add(batch.column(0).drop_null())
            except (pa.ArrowException, OSError, KeyError) as error:
                raise DamagedDatabase(f"The checkpoint {path} of {self._location.url} is damaged; {_ADVICE}") from error
        self._version = latest

    def _add(self, watermarks: pa.StructArray) -> None:
        self._values.update(
            zip(watermarks.field("appId").to_pylist(), watermarks.field("version").to_pylist(), strict=True)
        )

    def _list_log(self) -> Iterator[str]:
        store, after = Stores(self._location.storage)(self._location.store_url), None
        while page := store.list(_LOG, after=after, limit=OBJECT_LIST_MAX):
            yield from (meta.path for meta in page)
            after = page[-1].path

    def _read_commit(self, number: int) -> bytes:
        try:
            return bytes(self._location.read(f"{_LOG}/{number:020}.json"))
        except ObjectNotFound as error:
            raise DamagedDatabase(f"{self._location.url} lacks commit {number}; {_ADVICE}") from error
