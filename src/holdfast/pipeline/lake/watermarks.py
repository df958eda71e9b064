"""How far everybody came: the application transactions in the log of a Delta table, all of them at once.

delta-rs reads one of them at a time, and looks through the log for each (some 10 ms). A plane has thousands of worlds.

    _delta_log/00000000000000000042.json                 {"txn":{"appId":"journal/main/ada","version":512}} …
    _delta_log/00000000000000000040.checkpoint.parquet   everything up to there, in one file
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
from holdfast.pipeline.lake.locations import Place

_LOG: Final = "_delta_log"
_CHECKPOINT: Final = re.compile(r"_delta_log/(\d{20})\.checkpoint(\.\d{10}\.\d{10})?\.parquet\Z")
_PREFIX: Final = b'{"txn":'


class _Mark(msgspec.Struct):
    app: str = msgspec.field(name="appId")
    version: int = 0


class _Line(msgspec.Struct):
    txn: _Mark


_decode = msgspec.json.Decoder(_Line).decode


class Marks:
    """What the log of a table says up to a version; it reads on from where it came to."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._found: dict[str, int] = {}
        self._version = -1

    def at(self, version: int) -> dict[str, int]:
        """Every mark, as it is at this version of the table, which is not before the last one asked for.

        Raises:
            DamagedDatabase: a commit is not in the log.
        """
        if self._version < 0 <= version:
            self._begin(version)
        for number in range(self._version + 1, version + 1):
            for line in self._commit(number).splitlines():
                if line.startswith(_PREFIX):
                    mark = _decode(line).txn
                    self._found[mark.app] = mark.version
            self._version = number
        return self._found

    def _begin(self, version: int) -> None:
        checkpoints: dict[int, list[str]] = {}
        for path in self._listed():
            name = _CHECKPOINT.match(path)
            if name is not None and int(name[1]) <= version:
                checkpoints.setdefault(int(name[1]), []).append(path)
        if not checkpoints:
            return
        latest = max(checkpoints)
        for path in checkpoints[latest]:
            file = pq.ParquetFile(pa.BufferReader(self._place.read(path)))
            if "txn" in file.schema_arrow.names:
                for batch in file.iter_batches(columns=["txn"]):
                    self._take(batch.column(0).drop_null())
        self._version = latest

    def _take(self, marks: pa.StructArray) -> None:
        self._found.update(zip(marks.field("appId").to_pylist(), marks.field("version").to_pylist(), strict=True))

    def _listed(self) -> Iterator[str]:
        store, after = Stores(self._place.storage)(self._place.store_url), None
        while page := store.list(_LOG, after=after, limit=OBJECT_LIST_MAX):
            yield from (meta.path for meta in page)
            after = page[-1].path

    def _commit(self, number: int) -> bytes:
        try:
            return bytes(self._place.read(f"{_LOG}/{number:020}.json"))
        except ObjectNotFound as error:
            raise DamagedDatabase(
                f"{self._place.url} has no commit {number} in its log; restore the lake, or delete it and ingest again"
            ) from error
