"""Batch and stream writers of the data source: rows into queues, mailboxes and inboxes, each exactly once.

Executors write to a server or to PostgreSQL directly. A data directory belongs to one process, so executors stage their
rows, and the driver writes all of them.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from fastness.errors import InvalidArgument, ObjectNotFound
from fastness.limits import SOURCE_FILE_BYTES
from fastness.names import UNIVERSE
from fastness.pipeline import loading
from fastness.pipeline.journal_chunks import Stores, staged_object_missing
from fastness.pipeline.loading import Load, LoadResult
from fastness.pipeline.source.options import WRITABLE_TABLES, Options, check_table
from fastness.pipeline.source.plans import delete_stale, pack_by_weight
from fastness.pipeline.source.selections import OPTIONS, Selection


@dataclass
class WriteResult(WriterCommitMessage):
    """The result of one task: the rows it wrote, or the files it staged."""

    loaded: LoadResult
    staged: tuple[str, ...] = ()


def parse_load(options: Options, columns: list[str]) -> Load:
    """The parameters of a write.

    Raises:
        InvalidArgument: the load has no name, or the columns do not fit.
    """
    check_table(options, WRITABLE_TABLES, operation="written to")
    if options.selection != Selection(options.table):
        raise InvalidArgument(f"The options {', '.join(OPTIONS)} are for reads only; select the rows before the write")
    if options.load is None:
        raise InvalidArgument('Name the load with option("load", …): within one load, every key is written once')
    load = Load(options.load, options.table, options.key, options.queue, options.universe or UNIVERSE)
    loading.check_columns(load, columns)
    return load


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, options: Options, load: Load) -> None:
        self._options = options
        self._load = load

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteResult:
        return _write(self._options, self._load, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._options, self._load, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _discard(self._options, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream, batch by batch. A repeated batch writes nothing new."""

    def __init__(self, options: Options, load: Load) -> None:
        self._options = options
        self._load = load

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteResult:
        return _write(self._options, self._load, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        _commit(self._options, self._load, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        _discard(self._options, messages)


def _write(options: Options, load: Load, batches: Iterator[pa.RecordBatch]) -> WriteResult:
    if options.config.data.startswith("dir:"):
        return WriteResult(LoadResult(), tuple(_stage(options, batches)))
    with loading.open_transport(options.config) as transport:
        return WriteResult(loading.run(transport, load, _rows(batches)))


def _commit(options: Options, load: Load, messages: list[WriterCommitMessage | None]) -> None:
    store = Stores(options.config.storage)(options.staging)
    loaded = [each.loaded for each in messages if isinstance(each, WriteResult)]
    with loading.open_transport(options.config) as transport:
        for path in _staged(messages):
            try:
                data = store.get(path)
            except ObjectNotFound as error:
                raise staged_object_missing(path, options.staging) from error
            with pa.ipc.open_file(data) as file:
                batches = (file.get_batch(n) for n in range(file.num_record_batches))
                loaded.append(loading.run(transport, load, _rows(batches)))
        loading.store_summary(transport, load, loaded)
    _discard(options, messages)
    delete_stale(options.staging)  # Failed tasks may have left staged rows.


def _discard(options: Options, messages: list[WriterCommitMessage | None]) -> None:
    store = Stores(options.config.storage)(options.staging)
    for path in _staged(messages):
        with suppress(ObjectNotFound):
            store.delete(path)


def _stage(options: Options, batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
    store = Stores(options.config.storage).staging(options.staging)
    for group in pack_by_weight(batches, lambda batch: batch.nbytes, SOURCE_FILE_BYTES):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, group[0].schema) as file:
            for batch in group:
                file.write_batch(batch)
        path = f"load/{uuid4().hex}.arrow"
        store.put(path, sink.getvalue().to_pybytes())
        yield path


def _staged(messages: list[WriterCommitMessage | None]) -> list[str]:
    return [path for each in messages if isinstance(each, WriteResult) for path in each.staged]


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[loading.Row]:
    for batch in batches:
        yield from batch.to_pylist(maps_as_pydicts="strict")
