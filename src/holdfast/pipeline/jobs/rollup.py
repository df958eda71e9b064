"""`rollup`: what became of every message and mail, and sums over that: how fast, how often, how much, who with whom.

    activity ──► messages, mail ──► rollup_queues, rollup_queue_hours, rollup_errors, rollup_mailboxes, rollup_talk
        └──────────────────────────► rollup_leases              plane, lake ──► rollup_storage

Every table is made anew from what lies below it, so a run that was killed, or ran twice, leaves nothing wrong. Only
rollup_storage remembers: a run replaces what was measured on its own day.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from holdfast.errors import HoldfastError
from holdfast.pipeline import lifecycles, measures
from holdfast.pipeline.config import Config, Told
from holdfast.pipeline.lake import AddedFile, Lake, LakeTable, Writer
from holdfast.pipeline.lake import files as lake_files
from holdfast.pipeline.lake import frames as lake_frames
from holdfast.pipeline.measures import Measured
from holdfast.pipeline.schemas import (
    ACTIVITY,
    MAIL,
    MESSAGES,
    ROLLUP_ERRORS,
    ROLLUP_LEASES,
    ROLLUP_MAILBOXES,
    ROLLUP_QUEUE_HOURS,
    ROLLUP_QUEUES,
    ROLLUP_STORAGE,
    ROLLUP_TALK,
    Table,
)
from holdfast.pipeline.signatures import signature
from holdfast.pipeline.views import View, open_view
from holdfast.runtime.events import LEASE_KIND, LOG_KIND, MAIL_KIND

_QUEUE_EVENT: Final = (
    "event string, queue string, id string, correlation_id string, at_ms long, attempt int, error string"
)
_MAIL_EVENT: Final = "event string, `to` string, id string, sender string, at_ms long"
_LEASE_EVENT: Final = "event string, key string, owner string, waited_ms long, at_ms long"
_STEPS: Final = 9


def run(
    spark: SparkSession,
    config: Config,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    view: View | None = None,
    now: datetime | None = None,
) -> Told:
    """Make `messages`, `mail` and all sums anew. A plane that cannot be looked at is left out, with a note."""
    begun = time.monotonic()
    work = _Work(spark, config, progress)
    notes: list[str] = []
    measured = _measured(config, view, notes)
    activity = work.lake.table(ACTIVITY).read(spark, universes=work.universes)
    work.fold(MESSAGES, _with_errors(spark, message_groups(activity), measured), lifecycles.message_rows)
    work.fold(MAIL, mail_groups(activity), lifecycles.mail_rows)
    messages, mail = work.read(MESSAGES), work.read(MAIL)
    work.write(ROLLUP_QUEUES, queues(spark, messages, measured))
    work.write(ROLLUP_QUEUE_HOURS, queue_hours(messages))
    work.write(ROLLUP_ERRORS, errors(messages))
    work.write(ROLLUP_MAILBOXES, mailboxes(spark, mail, measured))
    work.write(ROLLUP_TALK, talk(mail))
    work.write(ROLLUP_LEASES, lease_contention(activity))
    work.keep_storage(measured, now or datetime.now(UTC))
    return Told(job="rollup", ok=True, rows=work.rows, seconds=time.monotonic() - begun, notes=notes)


class _Work:
    """Tables that are made anew, one after the other."""

    def __init__(self, spark: SparkSession, config: Config, progress: Callable[[str, int, int], None] | None) -> None:
        self.lake = Lake(config.lake, config.storage)
        self.universes = config.universes or None
        self.rows: dict[str, int] = {}
        self._spark = spark
        self._progress = progress

    def fold(self, table: Table, groups: DataFrame, fold: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
        """Have executors fold groups of events into rows and write them."""
        place = self.lake.table(table).place

        def each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            writer = Writer(table, place, is_sorted=False)
            for batch in batches:
                writer.write(fold(batch))
            yield pa.RecordBatch.from_pydict({"files": [msgspec.msgpack.encode(writer.close())]})

        answers = groups.mapInArrow(each, "files binary").collect()
        decode = msgspec.msgpack.Decoder(list[AddedFile]).decode
        self._commit(
            self.lake.table(table), [file for row in answers for file in decode(bytes(row["files"]))], self.universes
        )

    def write(self, table: Table, frame: DataFrame) -> None:
        """Have executors write the rows of a DataFrame."""
        found = self.lake.table(table)
        self._commit(found, lake_frames.write(frame.coalesce(1), table, found.place), self.universes)

    def read(self, table: Table) -> DataFrame:
        return self.lake.table(table).read(self._spark, universes=self.universes)

    def keep_storage(self, measured: Measured | None, now: datetime) -> None:
        """Put today's sizes beside those of other days."""
        table = self.lake.table(ROLLUP_STORAGE)
        sizes = measures.lake_sizes(self.lake, self.universes)
        if measured is not None:
            sizes += measured.sizes
        is_kept = pc.field("day") != now.date()
        if self.universes is not None:
            is_kept |= ~pc.field("universe").isin(self.universes)
        rows = pa.concat_tables([table.rows().filter(is_kept), measures.storage_rows(sizes, now)])
        self._commit(table, lake_files.write(ROLLUP_STORAGE, table.place, lake_files.in_order(ROLLUP_STORAGE, rows)))

    def _commit(self, table: LakeTable, files: list[AddedFile], universes: Sequence[str] | None = None) -> None:
        table.overwrite(files, universes=universes)
        name = table.table.name
        self.rows[name] = sum(file.rows for file in files)
        if self._progress is not None:
            self._progress(f"rollup {name}", len(self.rows), _STEPS)


def message_groups(activity: DataFrame) -> DataFrame:
    """The events of each message of a queue. Session logs are open to anybody, so what makes no sense is left out."""
    events = _told(activity, LOG_KIND, _QUEUE_EVENT, ("event", "queue", "id", "at_ms"))
    return events.groupBy("universe", "queue", "id").agg(
        sf.max("correlation_id").alias("correlation_id"),
        sf.collect_set(sf.struct("event", "at_ms", "attempt", "error")).alias("events"),
    )


def mail_groups(activity: DataFrame) -> DataFrame:
    """The events of each id under which somebody sent mail to somebody."""
    events = _told(activity, MAIL_KIND, _MAIL_EVENT, ("event", "to", "sender", "id", "at_ms"))
    return (
        events.withColumnRenamed("to", "recipient")
        .groupBy("universe", "recipient", "sender", "id")
        .agg(sf.collect_set(sf.struct("event", "at_ms")).alias("events"))
    )


def queues(spark: SparkSession, messages: DataFrame, measured: Measured | None) -> DataFrame:
    """One row a queue: what became of its messages, and how long that took."""
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
    )
    found = sums.join(_backlogs(spark, measured), ["universe", "queue"], "full")
    return _spread(_spread(found, "wait"), "service").fillna(0, ["messages", *outcomes, "retries", "redrives"])


def queue_hours(messages: DataFrame) -> DataFrame:
    """One row a queue and hour: what was put, begun and ended in it, and how long that took."""

    def at(moment: str, **columns: Column) -> DataFrame:
        hour = sf.date_trunc("hour", moment).alias("hour")
        named = [column.alias(name) for name, column in columns.items()]
        return messages.where(sf.col(moment).isNotNull()).select("universe", "queue", hour, *named)

    def is_(outcome: str) -> Column:
        return (sf.col("outcome") == outcome).cast("long")

    begun = at("put_at", put=sf.lit(1))
    started = at("first_leased_at", started=sf.lit(1), wait_ms=sf.col("wait_ms"))
    ended = at(
        "ended_at",
        acked=is_("acked"),
        dead=is_("dead"),
        outlived=is_("outlived"),
        retries=_retries(),
        service_ms=sf.col("service_ms"),
    )
    parts = begun.unionByName(started, allowMissingColumns=True).unionByName(ended, allowMissingColumns=True)
    counts = ("put", "started", "acked", "dead", "outlived", "retries")
    sums = parts.groupBy("universe", "queue", "hour").agg(
        *(sf.coalesce(sf.sum(name), sf.lit(0)).alias(name) for name in counts),
        sf.percentile("wait_ms", _PERCENTILES).alias("wait"),
        sf.percentile("service_ms", _PERCENTILES).alias("service"),
    )
    return _spread(_spread(sums, "wait"), "service")


def errors(messages: DataFrame) -> DataFrame:
    """One row a queue and kind of error that dead letters died of."""

    def signed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = [signature(error) for error in batch.column("error").to_pylist()]
            yield batch.append_column("signature", pa.array(found, pa.string()))

    dead = messages.where(sf.col("outcome") == "dead").select("universe", "queue", "id", "error", "ended_at")
    latest = sf.max(sf.struct("ended_at", "id", "error"))
    return (
        dead.mapInArrow(signed, f"{_ddl(dead)}, signature string")
        .groupBy("universe", "queue", "signature")
        .agg(
            sf.count("*").alias("letters"),
            sf.min("ended_at").alias("first_at"),
            sf.max("ended_at").alias("last_at"),
            latest["error"].alias("example"),
            latest["id"].alias("example_id"),
        )
    )


def mailboxes(spark: SparkSession, mail: DataFrame, measured: Measured | None) -> DataFrame:
    """One row a mailbox. What waits in it now is what the plane says, if it could be looked at."""
    waits = sf.col("outcome").isin("waiting", "delivered")
    sums = mail.groupBy("universe", "recipient").agg(
        sf.count("*").alias("mails"),
        sf.count_if(waits).alias("told_waiting"),
        *(sf.count_if(sf.col("outcome") == what).alias(what) for what in ("confirmed", "expired", "rejected")),
        sf.min(sf.when(waits, sf.col("stored_at"))).alias("told_oldest_at"),
        sf.percentile("wait_ms", _PERCENTILES).alias("wait"),
    )
    counts = ("mails", "confirmed", "expired", "rejected")
    if measured is None:
        found = sums.withColumnsRenamed({"told_waiting": "waiting", "told_oldest_at": "oldest_at"})
    else:
        found = sums.join(_boxes(spark, measured), ["universe", "recipient"], "full").fillna(0, [*counts, "waiting"])
    return _spread(found, "wait")


def talk(mail: DataFrame) -> DataFrame:
    """One row for each pair of agents of which one has sent mail to the other."""
    at = sf.coalesce("stored_at", "delivered_at", "ended_at")
    return mail.groupBy("universe", "sender", "recipient").agg(
        sf.count_if(sf.col("outcome") != "rejected").alias("mails"),
        sf.count_if(sf.col("outcome") == "rejected").alias("rejected"),
        sf.min(at).alias("first_at"),
        sf.max(at).alias("last_at"),
    )


def lease_contention(activity: DataFrame) -> DataFrame:
    """One row a lease and hour in which somebody did not get it at once."""
    events = _told(activity, LEASE_KIND, _LEASE_EVENT, ("event", "key", "owner", "waited_ms", "at_ms"))
    hour = sf.date_trunc("hour", sf.timestamp_millis("at_ms")).alias("hour")
    sums = events.groupBy("universe", "key", hour).agg(
        sf.count("*").alias("contended"),
        *(sf.count_if(sf.col("event") == what).alias(what) for what in ("granted", "refused", "gone")),
        sf.count_distinct("owner").alias("owners"),
        sf.percentile("waited_ms", _PERCENTILES).alias("waited"),
        sf.max("waited_ms").alias("waited_max_ms"),
    )
    return _spread(sums, "waited")


def _told(activity: DataFrame, kind: str, fields: str, needed: Iterable[str]) -> DataFrame:
    """The records of one kind, those that have what they need."""
    told = activity.where(sf.col("kind") == kind).select("universe", sf.from_json("record", fields).alias("told"))
    found = told.select("universe", "told.*").dropna("any", subset=list(needed))
    return found.where(sf.col("at_ms").between(0, lifecycles.AT_MS_MAX - 1))


def _retries() -> Column:
    return sf.greatest(sf.col("attempts") - 1, sf.lit(0)).cast("long")


def _spread(frame: DataFrame, what: str) -> DataFrame:
    """An array of percentiles as columns."""
    names = {f"{what}_p{percent}_ms": sf.get(what, n) for n, percent in enumerate((50, 90, 99))}
    return frame.withColumns(names).drop(what)


def _with_errors(spark: SparkSession, groups: DataFrame, measured: Measured | None) -> DataFrame:
    """Beside the events of a dead letter, the error that the plane still knows, for logs that do not tell it."""
    errors = [] if measured is None else measured.errors
    known = spark.createDataFrame(errors, "universe string, queue string, id string, known string")
    return groups.join(known, ["universe", "queue", "id"], "left")


def _backlogs(spark: SparkSession, measured: Measured | None) -> DataFrame:
    rows = [] if measured is None else measured.backlogs
    return spark.createDataFrame(rows, "universe string, queue string, backlog long")


def _boxes(spark: SparkSession, measured: Measured) -> DataFrame:
    boxes = spark.createDataFrame(measured.mailboxes, "universe string, recipient string, waiting long, oldest_ms long")
    return boxes.withColumn("oldest_at", sf.timestamp_millis("oldest_ms")).drop("oldest_ms")


def _ddl(frame: DataFrame) -> str:
    return ", ".join(f"{name} {type}" for name, type in frame.dtypes)


def _measured(config: Config, view: View | None, notes: list[str]) -> Measured | None:
    try:
        if view is not None:
            return measures.measure(view)
        with open_view(config) as opened:
            return measures.measure(opened)
    except HoldfastError as error:
        notes.append(f"The plane could not be looked at, so backlogs and its sizes are missing: {error}")
        return None


_PERCENTILES: Final = [0.5, 0.9, 0.99]
