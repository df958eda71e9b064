"""`live`: aggregates of queue events by minute, a few seconds after they were logged.

    session logs ──► stream of the data source `fastness` ──► micro-batches ──► live_queue_minutes

Spark's checkpoint is in `_live/<lineage>/<number>` of the lake. It says which lines each batch has, and the commit to
the table says which batches are in it; so each line counts once, whenever the process is killed. A plane of another
lineage starts at its first line, and replaces the rows, once the lake follows it.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql.pandas.types import from_arrow_schema

from fastness import errors
from fastness.errors import (
    AnotherHistory,
    Corrupt,
    FastnessError,
    InvalidArgument,
    RetryAdvice,
    Unreachable,
    Unsupported,
)
from fastness.limits import (
    LIVE_EVERY_SECONDS,
    LIVE_LATE_SECONDS,
    LIVE_LATE_SECONDS_MAX,
    LIVE_RESTART_SECONDS_MAX,
    LIVE_RESTARTS_MAX,
    LIVE_STATUS_SECONDS,
)
from fastness.names import folder_at
from fastness.pipeline import live_minutes, ownership, tombstones
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.lake import Lake, fingerprints
from fastness.pipeline.live_minutes import Added, LiveMinutes
from fastness.pipeline.progress import ProgressCallback
from fastness.pipeline.schemas import LIVE_QUEUE_MINUTES
from fastness.pipeline.source import offsets
from fastness.pipeline.tombstones import Hidden
from fastness.pipeline.views import open_view
from fastness.runtime.activity.events import LOG_KIND

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger("fastness.pipeline")

FOLDER: Final = "_live"
_TABLE: Final = "activity"
_ERROR: Final = re.compile(r"fastness\.errors\.(\w+): ([^\n]+)")
_WORKER_FAILURES: Final = ("Python worker failed to connect back", "Python worker exited unexpectedly")


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: ProgressCallback | None = None,
    follow: bool = False,
    every_seconds: float = LIVE_EVERY_SECONDS,
    late_seconds: float = LIVE_LATE_SECONDS,
    checkpoint: str | None = None,
    rebuild: bool = False,
    stop: threading.Event | None = None,
    round_ended: Callable[[JobResult | FastnessError], None] = lambda _outcome: None,
) -> JobResult:
    """Aggregate the new queue events of all universes; with `follow`, until `stop` is set or there is an interrupt.

    `checkpoint` is a local folder; by default it is in the lake, which then must be one. `rebuild` aggregates all
    session logs again. `round_ended` is called with the result so far after every poll, or with the error after which
    the query is started again.

    Raises:
        AnotherHistory: the lake follows another plane, or another lineage of this one.
        Corrupt: the checkpoint does not fit the table.
        Unsupported: Spark is a Spark Connect server.
        FastnessError: the plane or the lake cannot be reached.
    """
    if spark is None or ".connect." in type(spark).__module__:
        raise Unsupported("`live` needs a Spark driver in this process; give --master instead of --remote")
    if not 0 <= late_seconds <= LIVE_LATE_SECONDS_MAX:
        raise InvalidArgument(f"--late is {late_seconds:g} s; use 0 to {LIVE_LATE_SECONDS_MAX:g} s")
    started = time.monotonic()
    query = _LiveQuery(spark, msgspec.structs.replace(config, universes=()), late_seconds, checkpoint, rebuild=rebuild)

    def result() -> JobResult:
        return JobResult(
            job="live",
            ok=True,
            rows={LIVE_QUEUE_MINUTES.name: query.added.rows},
            seconds=time.monotonic() - started,
            notes=list(_notes(query.added)),
        )

    def polled() -> None:
        if progress is not None:
            progress("events", query.added.events, query.added.events)
        round_ended(result())

    with suppress(KeyboardInterrupt) if follow else nullcontext():
        _run_until_stopped(query, every_seconds if follow else None, stop or threading.Event(), polled, round_ended)
    return result()


def _run_until_stopped(
    query: "_LiveQuery",
    every_seconds: float | None,
    stop: threading.Event,
    polled: Callable[[], None],
    failed: Callable[[FastnessError], None],
) -> None:
    """Run the query; start it again after an error that may pass. Without a pause it ends with the available data."""
    failures, batches = 0, -1
    while not stop.is_set():
        try:
            query.run(every_seconds, stop, polled)
            return
        except FastnessError as error:
            failures = failures + 1 if query.batches == batches else 1
            batches = query.batches
            if error.retry is RetryAdvice.NEVER or failures > LIVE_RESTARTS_MAX:
                raise
            # Spark's Python processes start slowly on a busy machine; or the plane is restarting.
            _log.warning("The live query failed and will be started again: %s", error)
            failed(error)
            stop.wait(min(2.0 ** (failures - 1), LIVE_RESTART_SECONDS_MAX))


class _LiveQuery:
    """A streaming query and the table that it writes."""

    def __init__(
        self, spark: "SparkSession", config: Config, late_seconds: float, checkpoint: str | None, *, rebuild: bool
    ) -> None:
        self.added = Added()
        self.batches = 0  # Batches that this process has handled.
        self._spark = spark
        self._config = config
        self._lake = Lake(config.lake, config.storage)
        with open_view(config) as view:
            ownership.claim(self._lake, view)
            self._lineage, self._universes = view.identity().lineage, frozenset(view.universes())
        number = _number(self._lake, self._lineage, rebuild=rebuild)
        self._minutes = LiveMinutes(self._lake, f"live/{self._lineage}/{number}", late_ms=round(late_seconds * 1_000))
        self._checkpoint = _checkpoint_root(self._lake, checkpoint) / self._lineage / str(number)
        self._failure: Exception | None = None
        if self._minutes.committed() and not (self._checkpoint / "offsets").is_dir():
            raise Corrupt(
                f"The checkpoint {self._checkpoint} of the live query is gone. Restore it, or aggregate all session "
                "logs again with: fastness pipeline live --rebuild"
            )

    def run(self, every_seconds: float | None, stop: threading.Event, polled: Callable[[], None]) -> None:
        """Run until all available data was read, or with a pause between polls, until `stop` is set.

        Raises:
            FastnessError: the query failed.
        """
        self._failure = None
        writer = (
            self._stream().writeStream.foreachBatch(self._write).option("checkpointLocation", str(self._checkpoint))
        )
        if every_seconds is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{max(round(every_seconds * 1_000), 1)} milliseconds")
        query = writer.queryName("fastness-live").start()
        try:
            self._watch(query, stop, polled)
        except StreamingQueryException as error:
            raise self._translate(error) from error
        finally:
            query.stop()
        polled()

    def _watch(self, query: "StreamingQuery", stop: threading.Event, polled: Callable[[], None]) -> None:
        seen = None
        while not stop.is_set():
            if query.awaitTermination(LIVE_STATUS_SECONDS):
                return
            last = query.lastProgress
            if last is not None and last.timestamp != seen:
                seen = last.timestamp
                polled()

    def _stream(self) -> "DataFrame":
        config = self._config
        folders = config.activity_folders
        if len(folders) > 1:
            raise InvalidArgument("`live` reads one folder of session logs; give --activity once")
        options = {
            "url": config.data,
            "table": _TABLE,
            "kinds": LOG_KIND,
            "damage": "skip",  # `ingest` reports damaged lines. The lineage is checked in every batch.
            "staging": self._lake.location.child(FOLDER).store_url,
            "token": config.token,
            "ca": config.ca,
            "cert": config.cert,
            "certKey": config.cert_key,
            "objects": config.objects,
            "activity": folders[0] if folders else None,
            **{f"storage.{name}": value for name, value in config.storage.items()},
        }
        given = {name: value for name, value in options.items() if value is not None}
        return self._spark.readStream.format("fastness").options(**given).load()

    def _write(self, frame: "DataFrame", batch: int) -> None:
        """Aggregate a batch on executors, and add it to the table; called by Spark."""
        try:
            offset = self._offset(batch)
            before = None if batch == 0 else fingerprints.of_bytes(self._offset(batch - 1))
            hidden = tombstones.load(self._lake, self._config.key_file)
            rows = frame.select("universe", "session", "record", "logged_at").mapInArrow(
                partial(_aggregate, hidden=hidden), from_arrow_schema(live_minutes.AGGREGATES)
            )
            found = rows.toArrow().cast(live_minutes.AGGREGATES)
            added = self._minutes.add(batch, (before, fingerprints.of_bytes(offset)), found, self._universes)
        except Exception as error:
            self._failure = error
            raise
        self.batches += 1
        if added is not None:
            self.added += added

    def _offset(self, batch: int) -> bytes:
        """Where a batch ends, from the checkpoint.

        Raises:
            AnotherHistory: it is of another lineage.
            Corrupt: the checkpoint has no such batch, or it is damaged.
        """
        path = self._checkpoint / "offsets" / str(batch)
        try:
            line = path.read_bytes().splitlines()[-1]
            position = offsets.check_offset(_TABLE, msgspec.json.decode(line))
        except (OSError, IndexError, msgspec.MsgspecError) as error:
            raise Corrupt(
                f"{path} of the live query's checkpoint is missing or damaged ({error}). Restore it, or aggregate all "
                "session logs again with: fastness pipeline live --rebuild"
            ) from error
        if position.history is not None and position.history.lineage != self._lineage:
            raise AnotherHistory(
                f"The live query follows lineage {self._lineage}, and the plane is {position.history.lineage}: it was "
                "restored while the query ran. Replace the rows of the lake that the plane no longer has with: "
                "fastness pipeline accept"
            )
        return line

    def _translate(self, error: StreamingQueryException) -> Exception:
        """The Fastness error behind an error of a query, if there is one."""
        if isinstance(self._failure, FastnessError):
            return self._failure
        text = str(error)
        if (found := _ERROR.search(text)) is not None:
            kind = getattr(errors, found[1], None)
            if isinstance(kind, type) and issubclass(kind, FastnessError):
                return kind(found[2])
        if any(words in text for words in _WORKER_FAILURES):
            return Unreachable("A Python process of Spark did not start in time or ended; the query can be repeated")
        return error


def _aggregate(batches: Iterable[pa.RecordBatch], hidden: Hidden) -> Iterator[pa.RecordBatch]:
    yield live_minutes.aggregate(batches, hidden)


def _number(lake: Lake, lineage: str, *, rebuild: bool) -> int:
    """The number of the lineage's current query; a rebuild starts the next one."""
    prefix = f"live/{lineage}/"
    names = [
        name.removeprefix(prefix) for name in lake.table(LIVE_QUEUE_MINUTES).watermarks() if name.startswith(prefix)
    ]
    return max((int(name) for name in names if name.isdecimal()), default=0) + rebuild


def _checkpoint_root(lake: Lake, given: str | None) -> Path:
    if given is not None:
        return folder_at(given).absolute()
    if not lake.location.is_local:
        raise InvalidArgument("The lake is an object store; give --checkpoint, a local folder that is kept")
    return Path(lake.location.url, FOLDER)


def _notes(added: Added) -> Iterator[str]:
    if added.late:
        yield (
            f"{added.late:,} of {added.events:,} events were read after their minute was final. They are counted, and "
            "in the column late"
        )
