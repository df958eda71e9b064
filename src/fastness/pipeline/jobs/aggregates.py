"""Aggregates over messages and mail, as rows of their tables. No Spark here.

    a file's rows ──► partial sums ──┐
    a file's rows ──► partial sums ──┴──► merged sums and values ──► rows of the aggregate

Partial sums are Arrow tables: one with a row for each group, and one for each measure with a row for each group and
distinct value. So percentiles are exact, and executors can sum the files of a large table. A percentile between two
values is interpolated linearly.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastness.limits import ROLLUP_INLINE_ROWS
from fastness.pipeline import tasks
from fastness.pipeline.lake import LakeFile, LakeTable, reading
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.schemas import (
    MAIL,
    MESSAGES,
    ROLLUP_ERRORS,
    ROLLUP_MAILBOXES,
    ROLLUP_QUEUE_HOURS,
    ROLLUP_QUEUES,
    ROLLUP_TALK,
    TABLES,
    Table,
)
from fastness.pipeline.signatures import signature

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows: TypeAlias = Sequence[tuple[Any, ...]]

PERCENTS: Final = (50, 90, 99)
_OUTCOMES: Final = ("waiting", "leased", "acked", "dead", "outlived", "purged", "unknown")
_LAST: Final = pc.ScalarAggregateOptions(skip_nulls=False)


class _Aggregate(NamedTuple):
    """How the rows of a table are summed by group. The columns of a group do not include the universe."""

    columns: tuple[str, ...]  # What it reads.
    derive: Callable[[pa.Table], pa.Table]
    keys: tuple[str, ...]
    sums: dict[str, str]  # How each column is summed: sum, min, max or last.
    measures: tuple[str, ...] = ()
    order: tuple[str, ...] = ()  # Which row is the last one.


class _Task(msgspec.Struct, frozen=True):
    table: str
    source: str
    location: Location
    universe: str
    paths: list[str]


def rows(
    spark: "SparkSession | None",
    table: Table,
    source: LakeTable,
    files: Sequence[LakeFile],
    *,
    universe: str,
    measurements: Rows | None = None,
) -> pa.Table:
    """The rows of an aggregate for one universe, from the files of its source and measurements of the plane."""
    sums, *values = _merge(_AGGREGATES[table.name], _partials(spark, table, source, files, universe))
    found = _FINISH[table.name](sums, values, measurements)
    return _with_universe(table, found, universe)


def percentiles(values: Sequence[int], counts: Sequence[int]) -> list[float]:
    """The 50th, 90th and 99th percentile of sorted values, each of which occurs so many times."""
    accumulated = list(accumulate(counts))
    return _percentiles(values, accumulated, 0, accumulated[-1])


def _percentiles(values: Sequence[int], accumulated: Sequence[int], begin: int, count: int) -> list[float]:
    """Of the `count` values after the first `begin` ones."""
    found = []
    for percent in PERCENTS:
        position = (count - 1) * (percent / 100)
        below, above = math.floor(position), math.ceil(position)
        low, high = (values[bisect_right(accumulated, begin + n)] for n in (below, above))
        found.append(low + (high - low) * (position - below))
    return found


def _partials(
    spark: "SparkSession | None", table: Table, source: LakeTable, files: Sequence[LakeFile], universe: str
) -> Iterator[list[pa.Table]]:
    is_small = sum(file.rows for file in files) <= ROLLUP_INLINE_ROWS
    parts = tasks.balanced([file.rows for file in files], 1 if is_small else tasks.parallelism(spark))
    work = [
        _Task(table.name, source.table.name, source.location, universe, [files[n].path for n in part]) for part in parts
    ]
    if is_small or spark is None:
        yield from map(_sum, work)
        return
    for answer in tasks.execute(spark, _sum_encoded, [msgspec.msgpack.encode(task) for task in work]):
        yield [_decode_table(each) for each in msgspec.msgpack.decode(answer, type=list[bytes])]


def _sum_encoded(task: bytes) -> bytes:
    """Sum the rows of some files; runs on an executor."""
    partial = _sum(msgspec.msgpack.decode(task, type=_Task))
    return msgspec.msgpack.encode([_encode_table(each) for each in partial])


def _sum(task: _Task) -> list[pa.Table]:
    aggregate, source = _AGGREGATES[task.table], TABLES[task.source]
    read = (reading.rows(source, task.location, path, task.universe, columns=aggregate.columns) for path in task.paths)
    return _merge(aggregate, (_partial(aggregate, aggregate.derive(found)) for found in read))


def _partial(aggregate: _Aggregate, derived: pa.Table) -> list[pa.Table]:
    """The sums by group; and for each measure, how often each value occurs in each group."""
    counted = derived.append_column("occurrences", pa.repeat(pa.scalar(1, pa.int64()), len(derived)))
    values = [counted.filter(pc.is_valid(counted.column(name))) for name in aggregate.measures]
    return [_sum_groups(aggregate, derived), *_sum_values(aggregate, values)]


def _merge(aggregate: _Aggregate, partials: Iterable[list[pa.Table]]) -> list[pa.Table]:
    found = list(partials) or [_partial(aggregate, aggregate.derive(_no_rows(aggregate)))]
    if len(found) == 1:
        return found[0]
    sums, *values = (pa.concat_tables(each) for each in zip(*found, strict=True))
    return [_sum_groups(aggregate, sums), *_sum_values(aggregate, values)]


def _sum_groups(aggregate: _Aggregate, rows: pa.Table) -> pa.Table:
    if aggregate.order:
        rows = _sorted_with_nulls_first(rows, aggregate.order)
    steps = [(name, how, _LAST if how == "last" else None) for name, how in aggregate.sums.items()]
    found = rows.group_by(list(aggregate.keys), use_threads=not aggregate.order).aggregate(steps)
    return found.select([*aggregate.keys, *(f"{name}_{how}" for name, how in aggregate.sums.items())]).rename_columns(
        [*aggregate.keys, *aggregate.sums]
    )


def _sorted_with_nulls_first(rows: pa.Table, order: Sequence[str]) -> pa.Table:
    keys: dict[str, pa.ChunkedArray] = {}
    for name in order:
        keys |= {f"{name} is known": pc.is_valid(rows.column(name)), name: rows.column(name)}
    return rows.take(pc.sort_indices(pa.table(keys), sort_keys=[(name, "ascending") for name in keys]))


def _sum_values(aggregate: _Aggregate, values: Sequence[pa.Table]) -> Iterator[pa.Table]:
    for name, each in zip(aggregate.measures, values, strict=True):
        keys = [*aggregate.keys, name]
        found = each.group_by(keys).aggregate([("occurrences", "sum")])
        yield found.select([*keys, "occurrences_sum"]).rename_columns([*keys, "occurrences"])


def _no_rows(aggregate: _Aggregate) -> pa.Table:
    source = MAIL if "recipient" in aggregate.keys else MESSAGES
    return source.schema.empty_table().select(aggregate.columns)


def _with_percentiles(sums: pa.Table, values: Sequence[pa.Table]) -> pa.Table:
    """Add the percentiles of every measure; groups without a value have none."""
    keys = [name for name in sums.column_names if name in (values[0].column_names if values else ())]
    groups = sums.select(keys).append_column("group", pa.array(range(len(sums)), pa.int64()))
    for each in values:
        measure = each.column_names[-2]
        ordered = each.join(groups, keys).sort_by([("group", "ascending"), (measure, "ascending")])
        found = _group_percentiles(ordered, measure, len(sums))
        for n, percent in enumerate(PERCENTS):
            column = pa.array([None if row is None else row[n] for row in found], pa.float64())
            sums = sums.append_column(f"{measure.removesuffix('_ms')}_p{percent}_ms", column)
    return sums


def _group_percentiles(ordered: pa.Table, measure: str, groups: int) -> list[list[float] | None]:
    values = ordered.column(measure).to_pylist()
    accumulated = pc.cumulative_sum(ordered.column("occurrences")).to_pylist()
    counts = ordered.group_by("group", use_threads=False).aggregate([("occurrences", "sum")])
    found: list[list[float] | None] = [None] * groups
    begin = 0
    for group, count in zip(
        counts.column("group").to_pylist(), counts.column("occurrences_sum").to_pylist(), strict=True
    ):
        found[group] = _percentiles(values, accumulated, begin, count)
        begin += count
    return found


def _with_universe(table: Table, found: pa.Table, universe: str) -> pa.Table:
    columns = {name: found.column(name) for name in found.column_names}
    columns["universe"] = pa.repeat(pa.scalar(universe, pa.string()), len(found))
    return pa.table({name: columns[name] for name in table.schema.names}).cast(table.schema)


# Queues: outcomes and latencies of their messages.


def _derive_queues(messages: pa.Table) -> pa.Table:
    put_at, leased_at, ended_at = (messages.column(name) for name in ("put_at", "first_leased_at", "ended_at"))
    outcome, is_logged = messages.column("outcome"), messages.column("logged")
    columns = {
        "queue": messages.column("queue"),
        "messages": pa.repeat(pa.scalar(1, pa.int64()), len(messages)),
        **{name: _flags(pc.equal(outcome, name)) for name in _OUTCOMES},
        "retries": _retries(messages),
        "redrives": messages.column("redrives").cast(pa.int64()),
        "first_at": pc.coalesce(put_at, leased_at, ended_at),
        "last_at": pc.coalesce(ended_at, leased_at, put_at),
        "logged_put": _flags(pc.and_(is_logged, pc.is_valid(put_at))),
        "logged_acked": _flags(pc.and_(is_logged, pc.equal(outcome, "acked"))),
        "wait_ms": messages.column("wait_ms"),
        "service_ms": messages.column("service_ms"),
    }
    return pa.table(columns)


def _finish_queues(sums: pa.Table, values: Sequence[pa.Table], backlogs: Rows | None) -> pa.Table:
    """The plane's counters are exact, and logs may lack events; after a queue was deleted, the logs have more."""
    counts = ["messages", *_OUTCOMES, "retries", "redrives", "logged_put", "logged_acked"]
    found = {row["queue"]: row for row in _with_percentiles(sums, values).to_pylist()}
    for _, queue, backlog, put_total, acked_total in backlogs or ():
        row = found.setdefault(queue, {"queue": queue, **dict.fromkeys(counts, 0)})
        row["backlog"] = backlog
        row["messages"] = max(row["messages"], put_total)
        row["acked"] = max(row["acked"], acked_total)
    for row in found.values():
        explained = sum(row[outcome] for outcome in _OUTCOMES if outcome != "unknown")
        row["unknown"] = max(row["messages"] - explained, 0)
    return pa.Table.from_pylist(list(found.values()), ROLLUP_QUEUES.schema)


# Queues by hour: messages enqueued, started and finished, and their latencies.


def _derive_queue_hours(messages: pa.Table) -> pa.Table:
    def rows_at(time_column: str, **columns: pa.ChunkedArray) -> pa.Table:
        hour = pc.floor_temporal(messages.column(time_column), unit="hour")
        all_rows = pa.table({"queue": messages.column("queue"), "hour": hour, **columns})
        return all_rows.filter(pc.is_valid(hour))

    def has_outcome(outcome: str) -> pa.ChunkedArray:
        return _flags(pc.equal(messages.column("outcome"), outcome))

    one = pa.chunked_array([pa.repeat(pa.scalar(1, pa.int64()), len(messages))])
    parts = [
        rows_at("put_at", put=one),
        rows_at("first_leased_at", started=one, wait_ms=messages.column("wait_ms")),
        rows_at(
            "ended_at",
            acked=has_outcome("acked"),
            dead=has_outcome("dead"),
            outlived=has_outcome("outlived"),
            retries=_retries(messages),
            service_ms=messages.column("service_ms"),
        ),
    ]
    return pa.concat_tables(parts, promote_options="default")


def _finish_queue_hours(sums: pa.Table, values: Sequence[pa.Table], measurements: Rows | None) -> pa.Table:
    del measurements
    found = _with_percentiles(sums, values)
    for name in ("put", "started", "acked", "dead", "outlived", "retries"):
        found = found.set_column(found.column_names.index(name), name, found.column(name).fill_null(0))
    return found


# Errors: kinds of errors of dead letters.


def _derive_errors(messages: pa.Table) -> pa.Table:
    dead = messages.filter(pc.equal(messages.column("outcome"), "dead"))
    errors = pc.dictionary_encode(dead.column("error"), null_encoding="encode").combine_chunks()
    signatures = pa.array([signature(error) for error in errors.dictionary.to_pylist()], pa.string())
    return pa.table(
        {
            "queue": dead.column("queue"),
            "signature": signatures.take(errors.indices),
            "letters": pa.repeat(pa.scalar(1, pa.int64()), len(dead)),
            "first_at": dead.column("ended_at"),
            "last_at": dead.column("ended_at"),
            "example": dead.column("error"),
            "example_id": dead.column("id"),
        }
    )


# Mailboxes. The number of waiting mails comes from the plane if it was measured, else from the logs.


def _derive_mailboxes(mail: pa.Table) -> pa.Table:
    outcome, stored_at = mail.column("outcome"), mail.column("stored_at")
    is_waiting = pc.is_in(outcome, value_set=pa.array(["waiting", "delivered"]))
    return pa.table(
        {
            "recipient": mail.column("recipient"),
            "mails": pa.repeat(pa.scalar(1, pa.int64()), len(mail)),
            "waiting": _flags(is_waiting),
            **{name: _flags(pc.equal(outcome, name)) for name in ("confirmed", "expired", "rejected")},
            "oldest_at": pc.if_else(is_waiting, stored_at, pa.scalar(None, stored_at.type)),
            "wait_ms": mail.column("wait_ms"),
        }
    )


def _finish_mailboxes(sums: pa.Table, values: Sequence[pa.Table], boxes: Rows | None) -> pa.Table:
    found = {row["recipient"]: row for row in _with_percentiles(sums, values).to_pylist()}
    if boxes is not None:
        for row in found.values():
            row |= {"waiting": 0, "oldest_at": None}
        for _, recipient, waiting, oldest_ms in boxes:
            counts = dict.fromkeys(("mails", "confirmed", "expired", "rejected"), 0)
            row = found.setdefault(recipient, {"recipient": recipient, **counts})
            oldest_at = pa.scalar(oldest_ms, pa.int64()).cast(ROLLUP_MAILBOXES.schema.field("oldest_at").type)
            row |= {"waiting": waiting, "oldest_at": oldest_at.as_py()}
    return pa.Table.from_pylist(list(found.values()), ROLLUP_MAILBOXES.schema)


# Pairs of sender and recipient.


def _derive_talk(mail: pa.Table) -> pa.Table:
    outcome = mail.column("outcome")
    at = pc.coalesce(mail.column("stored_at"), mail.column("delivered_at"), mail.column("ended_at"))
    return pa.table(
        {
            "sender": mail.column("sender"),
            "recipient": mail.column("recipient"),
            "mails": _flags(pc.not_equal(outcome, "rejected")),
            "rejected": _flags(pc.equal(outcome, "rejected")),
            "first_at": at,
            "last_at": at,
        }
    )


def _finish_as_summed(sums: pa.Table, values: Sequence[pa.Table], measurements: Rows | None) -> pa.Table:
    del values, measurements
    return sums


def _flags(conditions: pa.ChunkedArray) -> pa.ChunkedArray:
    return conditions.cast(pa.int64()).fill_null(0)


def _retries(messages: pa.Table) -> pa.ChunkedArray:
    return pc.max_element_wise(pc.subtract(messages.column("attempts").cast(pa.int64()), 1), 0)


def _encode_table(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _decode_table(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


_TIMES: Final = ("put_at", "first_leased_at", "ended_at")
_MEASURED: Final = ("wait_ms", "service_ms")
_AGGREGATES: Final = {
    ROLLUP_QUEUES.name: _Aggregate(
        columns=("queue", *_TIMES, "attempts", "redrives", "outcome", *_MEASURED, "logged"),
        derive=_derive_queues,
        keys=("queue",),
        sums={
            **dict.fromkeys(("messages", *_OUTCOMES, "retries", "redrives"), "sum"),
            "first_at": "min",
            "last_at": "max",
            **dict.fromkeys(("logged_put", "logged_acked"), "sum"),
        },
        measures=_MEASURED,
    ),
    ROLLUP_QUEUE_HOURS.name: _Aggregate(
        columns=("queue", *_TIMES, "attempts", "outcome", *_MEASURED),
        derive=_derive_queue_hours,
        keys=("queue", "hour"),
        sums=dict.fromkeys(("put", "started", "acked", "dead", "outlived", "retries"), "sum"),
        measures=_MEASURED,
    ),
    ROLLUP_ERRORS.name: _Aggregate(
        columns=("queue", "id", "ended_at", "outcome", "error"),
        derive=_derive_errors,
        keys=("queue", "signature"),
        sums={"letters": "sum", "first_at": "min", "last_at": "max", "example": "last", "example_id": "last"},
        order=("last_at", "example_id", "example"),
    ),
    ROLLUP_MAILBOXES.name: _Aggregate(
        columns=("recipient", "stored_at", "outcome", "wait_ms"),
        derive=_derive_mailboxes,
        keys=("recipient",),
        sums={**dict.fromkeys(("mails", "waiting", "confirmed", "expired", "rejected"), "sum"), "oldest_at": "min"},
        measures=("wait_ms",),
    ),
    ROLLUP_TALK.name: _Aggregate(
        columns=("sender", "recipient", "stored_at", "delivered_at", "ended_at", "outcome"),
        derive=_derive_talk,
        keys=("sender", "recipient"),
        sums={"mails": "sum", "rejected": "sum", "first_at": "min", "last_at": "max"},
    ),
}
_FINISH: Final[dict[str, Callable[[pa.Table, Sequence[pa.Table], Rows | None], pa.Table]]] = {
    ROLLUP_QUEUES.name: _finish_queues,
    ROLLUP_QUEUE_HOURS.name: _finish_queue_hours,
    ROLLUP_ERRORS.name: _finish_as_summed,
    ROLLUP_MAILBOXES.name: _finish_mailboxes,
    ROLLUP_TALK.name: _finish_as_summed,
}
