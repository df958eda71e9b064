"""Reads the watermarks of a table, and writes those that a commit moves.

_delta_log/00000000000000000042.json                 {"txn":{"appId":"watermarks","version":…}}, a fingerprint
_delta_log/00000000000000000040.checkpoint.parquet   all actions up to that version, in one file
_watermarks/<fingerprint>.parquet                    the watermarks: see `watermark_files`
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from fastness.errors import DamagedDatabase, ObjectNotFound
from fastness.limits import LAKE_WATERMARK_FILES, OBJECT_LIST_MAX
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import watermark_files
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.lake.watermark_files import ADVICE

# delta-rs lets two commits remove the same file, so every commit that removes files moves this watermark. It is an
# application transaction of its own.
REWRITES: Final = "rewrites"
FILES: Final = "watermarks"  # The application transaction that names a file.

_LOG: Final = "_delta_log"
_CHECKPOINT: Final = re.compile(r"_delta_log/(\d{20})\.checkpoint(\.\d{10}\.\d{10})?\.parquet\Z")
_PREFIX: Final = b'{"txn":'


class _Transaction(msgspec.Struct):
    app: str = msgspec.field(name="appId")
    version: int = 0


class _Line(msgspec.Struct):
    txn: _Transaction


_decode = msgspec.json.Decoder(_Line).decode


class Watermarks:
    """The watermarks of a table at a version; reads the log and the files incrementally."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._logged: dict[str, int] = {}  # The application transactions: REWRITES and FILES.
        self._version = -1  # Of the log,
        self._read_version = -1  # and of the files.
        self._values: dict[str, int] = {}  # REWRITES, and those of the files.
        self._sizes: dict[int, int] = {}  # The files that were read, by fingerprint, the base first.
        self.moved: set[str] = set()  # The watermarks that moved between the last two versions that were read.

    def at(self, version: int) -> dict[str, int]:
        """Every watermark at this version of the table, which must not be lower than in the last call.

        Raises:
            DamagedDatabase: a commit is missing from the log, or a file of watermarks is missing or damaged.
        """
        newest = self.newest_file(version)
        if version != self._read_version:
            self.moved = set()
            if newest and newest not in self._sizes:
                self._read_files(newest)
            if REWRITES in self._logged:
                self._values[REWRITES] = self._logged[REWRITES]
            self._read_version = version
        return self._values

    def newest_file(self, version: int) -> int:
        """The fingerprint of the newest file at this version; 0 if there is none.

        Raises:
            DamagedDatabase: a commit is missing from the log.
        """
        if self._version < 0 <= version:
            self._load_checkpoint(version)
        for number in range(self._version + 1, version + 1):
            for line in self._read_commit(number).splitlines():
                if line.startswith(_PREFIX):
                    watermark = self._decode(line, number)
                    self._logged[watermark.app] = watermark.version
            self._version = number
        return self._logged.get(FILES, 0)

    def write(self, moved: Mapping[str, int]) -> int:
        """Write a file with the new values of some watermarks; returns the fingerprint that a commit must name.

        The file has all watermarks if there are many files before it, or if they are larger than the last such file.
        """
        sizes = list(self._sizes.values())
        if sizes:
            data = watermark_files.encode(moved, predecessor=next(reversed(self._sizes)), is_base=False)
            if len(sizes) < LAKE_WATERMARK_FILES and sum(sizes[1:]) + len(data) <= sizes[0]:
                return watermark_files.write(self._location, data)
        return self._write_base({**self._values, **moved})

    def write_all_except(self, is_dropped: Callable[[str], bool]) -> int:
        """Write a file with all watermarks that are kept; returns its fingerprint, or 0 if the table has none."""
        if not self._sizes:
            return 0
        return self._write_base({name: value for name, value in self._values.items() if not is_dropped(name)})

    def _write_base(self, values: Mapping[str, int]) -> int:
        predecessor = next(reversed(self._sizes), 0)
        kept = {name: value for name, value in values.items() if value and name != REWRITES}
        data = watermark_files.encode(kept, predecessor=predecessor, is_base=True)
        return watermark_files.write(self._location, data)

    def _read_files(self, newest: int) -> None:
        """Read the files that were added. If there is a new base among them, compare the values."""
        known = next(reversed(self._sizes), 0)
        before = self._values
        files = [*watermark_files.chain(self._location, newest, until=known)][::-1]
        if files[0].is_base:
            self._values, self._sizes = {}, {}
        for file in files:
            self._values.update(file.values)
            self._sizes[file.fingerprint] = file.size
        if not files[0].is_base:
            self.moved = {name for file in files for name in file.values}
        elif before.keys() - {REWRITES}:
            names = (before.keys() | self._values.keys()) - {REWRITES}
            self.moved = {name for name in names if before.get(name, 0) != self._values.get(name, 0)}

    def _decode(self, line: bytes, number: int) -> _Transaction:
        try:
            return _decode(line).txn
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedDatabase(f"Commit {number} of {self._location.url} is damaged; {ADVICE}") from error

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
                raise DamagedDatabase(f"The checkpoint {path} of {self._location.url} is damaged; {ADVICE}") from error
        self._version = latest

    def _add(self, watermarks: pa.StructArray) -> None:
        self._logged.update(
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
            raise DamagedDatabase(f"{self._location.url} lacks commit {number}; {ADVICE}") from error
