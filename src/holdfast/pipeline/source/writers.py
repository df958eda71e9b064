"""Writes of the data source: rows of a DataFrame into queues, mailboxes and inboxes, each once.

Executors write to a server or a PostgreSQL themselves. A data directory belongs to one process: there they stage their
rows, and the driver writes what all of them have staged.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from holdfast.errors import InvalidArgument, ObjectNotFound
from holdfast.limits import SOURCE_FILE_BYTES
from holdfast.names import UNIVERSE
from holdfast.pipeline import loading
from holdfast.pipeline.journal_chunks import Stores, not_staged
from holdfast.pipeline.loading import Load, Loaded
from holdfast.pipeline.source.options import WRITTEN, Options, check_table
from holdfast.pipeline.source.plans import packed, sweep


@dataclass
class Wrote(WriterCommitMessage):
    """What one task did: the rows that it wrote, or where it has staged them."""

    loaded: Loaded
    staged: tuple[str, ...] = ()


def load_of(options: Options, columns: list[str]) -> Load:
    """What a write is to do.

    Raises:
        InvalidArgument: it has no name, or its columns do not fit.
    """
    check_table(options, WRITTEN, what_for="written to")
    if options.load is None:
        raise InvalidArgument('Name the load with option("load", …): under one name every key is written once')
    load = Load(options.load, options.table, options.key, options.queue, options.universe or UNIVERSE)
    loading.check_columns(load, columns)
    return load


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, options: Options, load: Load) -> None:
        self._options = options
        self._load = load

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Wrote:
        return _write(self._options, self._load, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._options, self._load, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _discard(self._options, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a stream, batch by batch. A batch that is run again writes nothing again."""

    def __init__(self, options: Options, load: Load) -> None:
        self._options = options
        self._load = load

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Wrote:
        return _write(self._options, self._load, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        _commit(self._options, self._load, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        _discard(self._options, messages)


def _write(options: Options, load: Load, batches: Iterator[pa.RecordBatch]) -> Wrote:
    if options.config.data.startswith("dir:"):
        return Wrote(Loaded(), tuple(_stage(options, batches)))
    with loading.opened(options.config) as transport:
        return Wrote(loading.run(transport, load, _rows(batches)))


def _commit(options: Options, load: Load, messages: list[WriterCommitMessage | None]) -> None:
    store = Stores(options.config.storage)(options.staging)
    loaded = [each.loaded for each in messages if isinstance(each, Wrote)]
    with loading.opened(options.config) as transport:
        for path in _staged(messages):
            try:
                data = store.get(path)
            except ObjectNotFound as error:
                raise not_staged(path, options.staging) from error
            with pa.ipc.open_file(data) as file:
                batches = (file.get_batch(n) for n in range(file.num_record_batches))
                loaded.append(loading.run(transport, load, _rows(batches)))
        loading.summarise(transport, load, loaded)
    _discard(options, messages)
    sweep(options.staging)  # Tasks that failed have left rows that nobody knows of.


def _discard(options: Options, messages: list[WriterCommitMessage | None]) -> None:
    store = Stores(options.config.storage)(options.staging)
    for path in _staged(messages):
        with suppress(ObjectNotFound):
            store.delete(path)


def _stage(options: Options, batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
    store = Stores(options.config.storage).staging(options.staging)
    for some in packed(batches, lambda batch: batch.nbytes, SOURCE_FILE_BYTES):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, some[0].schema) as file:
            for batch in some:
                file.write_batch(batch)
        path = f"load/{uuid4().hex}.arrow"
        store.put(path, sink.getvalue().to_pybytes())
        yield path


def _staged(messages: list[WriterCommitMessage | None]) -> list[str]:
    return [path for each in messages if isinstance(each, Wrote) for path in each.staged]


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[loading.Row]:
    for batch in batches:
        yield from batch.to_pylist(maps_as_pydicts="strict")
