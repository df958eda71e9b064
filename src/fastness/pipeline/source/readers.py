"""Batch and stream readers of the data source. Plans are made on the driver, rows are read on executors."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from fastness.pipeline.source import offsets, plans
from fastness.pipeline.source.offsets import Offset, Position, Positions
from fastness.pipeline.source.options import STREAMABLE_TABLES, Options, check_table
from fastness.pipeline.source.tables import SCHEMAS
from fastness.pipeline.views import View, open_view


class BatchReader(DataSourceReader):
    """Reads a table as of the first query of the DataFrame; Spark keeps its plan for the later ones."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        with open_view(self._options.config) as view:
            return [InputPartition(partition) for partition in plans.plan_partitions(view, self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # An empty plan still has one partition, with no value.
        return iter(()) if partition.value is None else _read(partition.value, self._options)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads journals or session logs incrementally.

    The offset of journals is {universe/world: height}, that of session logs {universe/file: bytes}, with the lineage of
    the plane. Data below an offset never changes within a lineage, so a query that restarts from its checkpoint gets
    the same rows again. A query whose offset is of another history fails.

    Spark's checkpoint has the end of each batch, but not the start of the first one: Spark asks for that again after a
    crash. So a query that starts at the latest offset has an empty first batch, which puts its start into the
    checkpoint.
    """

    def __init__(self, options: Options) -> None:
        check_table(options, STREAMABLE_TABLES, operation="read as a stream")
        self._options = options
        self._available_end: Positions | None = None  # The end of an available-now query.
        self._initial: Offset | None = None  # The start of this query, if it has no checkpoint.
        self._is_start_saved = not options.is_latest  # The start is in the checkpoint, or can be computed again.

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with open_view(self._options.config) as view:
            self._available_end = self._latest(view)

    def initialOffset(self) -> Offset:  # noqa: N802
        if self._initial is None:
            self._initial = {}
            if self._options.is_latest:
                with open_view(self._options.config) as view:
                    self._initial = self._position(view, self._latest(view), Position({})).offset
        return self._initial

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        known = offsets.check_offset(self._options.table, start)
        if not self._is_start_saved:
            self._is_start_saved = True
            if start == self._initial:
                return start
        with open_view(self._options.config) as view:
            end = self._latest(view) if self._available_end is None else self._available_end
            now = plans.advance_offset(self._options, known.positions, end)
            self._check_follows(view, known)
            if isinstance(limit, ReadMaxRows):
                now = plans.limit_offset(known.positions, now, limit.max_rows)
            return self._position(view, now, known).offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.batch_rows
        # Offsets of session logs count bytes, so they cannot be limited to rows without reading the files.
        return ReadMaxRows(rows) if rows is not None and self._options.table == "journal" else ReadAllAvailable()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        begin, until = (offsets.check_offset(self._options.table, each) for each in (start, end))
        if begin.positions == until.positions:
            return []
        if start != self._initial:  # After a crash, the first batch may restart at a later "latest".
            offsets.check_order(begin.positions, until.positions)
        with open_view(self._options.config) as view:
            for known in (begin, until):
                self._check_follows(view, known)
            planned = plans.partitions_between(view, self._options, begin.positions, until.positions)
            return [InputPartition(partition) for partition in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition.value, self._options)

    def _latest(self, view: View) -> Positions:
        return plans.heads(view) if self._options.table == "journal" else plans.log_ends(view)

    def _position(self, view: View, positions: Positions, known: Position) -> Position:
        return Position(positions, offsets.history_at(view, self._options.table, positions, known))

    def _check_follows(self, view: View, known: Position) -> None:
        if not self._options.skips_damage:
            offsets.check_follows(view, self._options.table, known)


def _read(partition: plans.Partition, options: Options) -> Iterator[pa.RecordBatch]:
    """The rows of a partition in Spark's types, whose timestamps are microseconds."""
    spark_types = to_arrow_schema(from_arrow_schema(SCHEMAS[options.table]), timezone="UTC")
    return (batch.cast(spark_types) for batch in plans.read(partition, options))
