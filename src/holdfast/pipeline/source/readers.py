"""Reads of the data source, in one go and as a stream. Plans are made on the driver, rows on executors."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from holdfast.pipeline.source import filters, offsets, plans
from holdfast.pipeline.source.filters import Conditions
from holdfast.pipeline.source.offsets import Offset
from holdfast.pipeline.source.options import STREAMED, Options, check_table
from holdfast.pipeline.source.tables import SCHEMAS
from holdfast.pipeline.views import open_view


class BatchReader(DataSourceReader):
    """Reads a table as it is at one moment: the one in which the query is planned."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._conditions = Conditions()

    def pushFilters(self, filters_: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        self._conditions, left = filters.split(self._options.table, filters_)
        return iter(left)

    def partitions(self) -> Sequence[InputPartition]:
        with open_view(self._options.config) as view:
            return [InputPartition(share) for share in plans.shares(view, self._options, self._conditions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without a plan there is still one partition, which holds nothing.
        return iter(()) if partition.value is None else _read(partition.value, self._options, self._conditions)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a journal, or session logs, as they grow.

    The offset of journals is {universe/world: height}, that of session logs {universe/file: bytes}. Nothing below an
    offset ever changes, so a query that starts again from its checkpoint gets the same rows again, and no others.

    Spark writes down where a batch ends, and not where the first one begins: it asks again for that, also after a
    crash. A query that begins with what is new has nothing in its first batch, so that where it began is written down.
    """

    def __init__(self, options: Options) -> None:
        check_table(options, STREAMED, what_for="read as a stream")
        self._options = options
        self._until: Offset | None = None  # Where a query ends that takes what is there and no more.
        self._first: Offset | None = None  # Where this query begins, if it has no checkpoint.
        self._is_begun = not options.is_latest  # Whether where it begins is written down, or can be said again.

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._until = self._now()

    def initialOffset(self) -> Offset:  # noqa: N802
        if self._first is None:
            self._first = self._now() if self._options.is_latest else {}
        return self._first

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        start = offsets.checked(self._options.table, start)
        if not self._is_begun:
            self._is_begun = True
            if start == self._first:
                return start
        now = plans.onward(self._options, start, self._now() if self._until is None else self._until)
        return plans.limited(start, now, limit.max_rows) if isinstance(limit, ReadMaxRows) else now

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.batch_rows
        # Offsets of session logs count bytes, and cannot be cut between lines without reading them.
        return ReadMaxRows(rows) if rows is not None and self._options.table == "journal" else ReadAllAvailable()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        start, end = (offsets.checked(self._options.table, each) for each in (start, end))
        if start == end:
            return []
        if start != self._first:  # What is new has moved on if the first batch is run again after a crash.
            offsets.check_order(start, end)
        with open_view(self._options.config) as view:
            return [InputPartition(share) for share in plans.between(view, self._options, start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition.value, self._options, Conditions())

    def _now(self) -> Offset:
        with open_view(self._options.config) as view:
            return plans.heads(view) if self._options.table == "journal" else plans.ends(view)


def _read(share: plans.Share, options: Options, conditions: Conditions) -> Iterator[pa.RecordBatch]:
    """The rows of a share in Spark's own types, which know no milliseconds."""
    shown = to_arrow_schema(from_arrow_schema(SCHEMAS[options.table]), timezone="UTC")
    return (batch.cast(shown) for batch in plans.read(share, options, conditions))
