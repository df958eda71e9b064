"""Aggregates over messages, mail and lease events, as DataFrames with the columns of their tables."""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import from_arrow_schema

from holdfast.pipeline import events
from holdfast.pipeline.signatures import signature
from holdfast.runtime.activity.events import LEASE_KIND

Rows: TypeAlias = Sequence[tuple[Any, ...]]

_PERCENTILES: Final = [0.5, 0.9, 0.99]
_BACKLOG: Final = pa.schema(
    [
        ("universe", pa.string()),
        ("queue", pa.string()),
        ("backlog", pa.int64()),
        ("put_total", pa.int64()),
        ("acked_total", pa.int64()),
    ]
)
_BOX: Final = pa.schema(
    [
        ("universe", pa.string()),
        ("recipient", pa.string()),
        ("waiting", pa.int64()),
        ("oldest_at", pa.timestamp("ms", tz="UTC")),
    ]
)


def queues(messages: DataFrame, backlogs: Rows | None) -> DataFrame:
    """One row per queue: outcomes and latencies of its messages.

    The plane's counters are exact, and logs may lack events; after a queue was deleted, the logs have more.
    """
    outcomes = ("waiting", "leased", "acked", "dead", "outlived", "purged", "unknown")
    sums = messages.groupBy("universe", "queue").agg(
        sf.count("*").alias("messages"),
        *(sf.count_if(sf.col("outcome") == outcome).alias(outcome) for outcome in outcomes),
        sf.sum(_retries()).alias("retries"),
        sf.sum("redrives").alias("redrives"),
        sf.percentile("wait_ms", _PERCENTILES).alias("wait"),
        sf.percentile("service_ms", _PERCENTILES).alias("service"),
        sf.min(sf.coalesce("put_at", "first_leased_at", "ended_at")).alias("first_at"),
        sf.max(sf.coalesce("ended_at", "first_leased_at", "put_at")).alias("last_at"),
        sf.count_if(sf.col("logged") & sf.col("put_at").isNotNull()).alias("logged_put"),
        sf.count_if(sf.col("logged") & (sf.col("outcome") == "acked")).alias("logged_acked"),
    )
    known = _frame(messages.sparkSession, _BACKLOG, backlogs or [])
    found = sums.join(known, ["universe", "queue"], "full")
    counts = ["messages", *outcomes, "retries", "redrives", "logged_put", "logged_acked"]
    filled = _expand_percentiles(_expand_percentiles(found, "wait"), "service").fillna(0, counts)
    counted = filled.withColumns(
        {"messages": sf.greatest("messages", "put_total"), "acked": sf.greatest("acked", "acked_total")}
    )
    explained = reduce(add, (sf.col(outcome) for outcome in outcomes if outcome != "unknown"))
    unknown = sf.greatest(sf.col("messages") - explained, sf.lit(0))
    return counted.withColumn("unknown", unknown).drop("put_total", "acked_total")


def queue_hours(messages: DataFrame) -> DataFrame:
    """One row per queue and hour: messages enqueued, started and finished, and their latencies."""

    def select_at(time_column: str, **columns: Column) -> DataFrame:
        hour = sf.date_trunc("hour", time_column).alias("hour")
        named = [column.alias(name) for name, column in columns.items()]
        return messages.where(sf.col(time_column).isNotNull()).select("universe", "queue", hour, *named)

    def has_outcome(outcome: str) -> Column:
        return (sf.col("outcome") == outcome).cast("long")

    enqueued = select_at("put_at", put=sf.lit(1))
    started = select_at("first_leased_at", started=sf.lit(1), wait_ms=sf.col("wait_ms"))
    ended = select_at(
        "ended_at",
        acked=has_outcome("acked"),
        dead=has_outcome("dead"),
        outlived=has_outcome("outlived"),
        retries=_retries(),
        service_ms=sf.col("service_ms"),
    )
    parts = enqueued.unionByName(started, allowMissingColumns=True).unionByName(ended, allowMissingColumns=True)
    counts = ("put", "started", "acked", "dead", "outlived", "retries")
    sums = parts.groupBy("universe", "queue", "hour").agg(
        *(sf.coalesce(sf.sum(name), sf.lit(0)).alias(name) for name in counts),
        sf.percentile("wait_ms", _PERCENTILES).alias("wait"),
        sf.percentile("service_ms", _PERCENTILES).alias("service"),
    )
    return _expand_percentiles(_expand_percentiles(sums, "wait"), "service")


def errors(messages: DataFrame) -> DataFrame:
    """One row per queue and kind of error of its dead letters."""

    def add_signatures(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = [signature(error) for error in batch.column("error").to_pylist()]
            yield batch.append_column("signature", pa.array(found, pa.string()))

    dead = messages.where(sf.col("outcome") == "dead").select("universe", "queue", "id", "error", "ended_at")
    latest = sf.max(sf.struct("ended_at", "id", "error"))
    return (
        dead.mapInArrow(add_signatures, f"{_schema_ddl(dead)}, signature string")
        .groupBy("universe", "queue", "signature")
        .agg(
            sf.count("*").alias("letters"),
            sf.min("ended_at").alias("first_at"),
            sf.max("ended_at").alias("last_at"),
            latest["error"].alias("example"),
            latest["id"].alias("example_id"),
        )
    )


def mailboxes(mail: DataFrame, boxes: Rows | None) -> DataFrame:
    """One row per mailbox. The number of waiting mails comes from the plane if it was measured, else from the logs."""
    is_waiting = sf.col("outcome").isin("waiting", "delivered")
    sums = mail.groupBy("universe", "recipient").agg(
        sf.count("*").alias("mails"),
        sf.count_if(is_waiting).alias("told_waiting"),
        *(sf.count_if(sf.col("outcome") == what).alias(what) for what in ("confirmed", "expired", "rejected")),
        sf.min(sf.when(is_waiting, sf.col("stored_at"))).alias("told_oldest_at"),
        sf.percentile("wait_ms", _PERCENTILES).alias("wait"),
    )
    counts = ("mails", "confirmed", "expired", "rejected")
    if boxes is None:
        found = sums.withColumnsRenamed({"told_waiting": "waiting", "told_oldest_at": "oldest_at"})
    else:
        known = _frame(mail.sparkSession, _BOX, boxes)
        found = sums.join(known, ["universe", "recipient"], "full").fillna(0, [*counts, "waiting"])
    return _expand_percentiles(found, "wait")


def talk(mail: DataFrame) -> DataFrame:
    """One row per pair of sender and recipient."""
    select_at = sf.coalesce("stored_at", "delivered_at", "ended_at")
    return mail.groupBy("universe", "sender", "recipient").agg(
        sf.count_if(sf.col("outcome") != "rejected").alias("mails"),
        sf.count_if(sf.col("outcome") == "rejected").alias("rejected"),
        sf.min(select_at).alias("first_at"),
        sf.max(select_at).alias("last_at"),
    )


def lease_contention(activity: DataFrame) -> DataFrame:
    """One row per lease and hour in which an acquire had to wait or was refused."""

    def parse_leases(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(events.lease_events, batches)

    records = activity.where(sf.col("kind") == LEASE_KIND).select("universe", "record")
    found = records.mapInArrow(parse_leases, from_arrow_schema(events.LEASES))
    hour = sf.date_trunc("hour", sf.timestamp_millis("at_ms")).alias("hour")
    sums = found.groupBy("universe", "key", hour).agg(
        sf.count("*").alias("contended"),
        *(sf.count_if(sf.col("event") == what).alias(what) for what in ("granted", "refused", "gone")),
        sf.count_distinct("owner").alias("owners"),
        sf.percentile("waited_ms", _PERCENTILES).alias("waited"),
        sf.max("waited_ms").alias("waited_max_ms"),
    )
    return _expand_percentiles(sums, "waited")


def _retries() -> Column:
    return sf.greatest(sf.col("attempts") - 1, sf.lit(0)).cast("long")


def _expand_percentiles(frame: DataFrame, column: str) -> DataFrame:
    """Expand an array of percentiles into columns."""
    names = {f"{column}_p{percent}_ms": sf.get(column, n) for n, percent in enumerate((50, 90, 99))}
    return frame.withColumns(names).drop(column)


def _frame(spark: SparkSession, schema: pa.Schema, rows: Rows) -> DataFrame:
    """A DataFrame of a few rows, from Arrow: plain tuples need another Python worker, which is slow to start."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, schema=schema))


def _schema_ddl(frame: DataFrame) -> str:
    return ", ".join(f"{name} {type}" for name, type in frame.dtypes)
