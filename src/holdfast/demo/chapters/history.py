"""The pipeline: Spark reads the whole night from the live server into a lake, judges it, and writes a report."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.demo.chapters import memories
from holdfast.demo.context import DemoContext
from holdfast.errors import Unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.pipeline.config import Config, JobResult

_REDUCER: Final = "holdfast.demo.chapters.memories:fold"
_DOES: Final = {
    "ingest": "takes what is new into tables, each row once",
    "audit": "replays every journal, and checks every checksum",
    "reachability": "looks for blobs that nothing refers to",
    "rollup": "sums up queues, mail and storage",
    "report": "draws one page",
}


def check() -> None:
    """See whether Spark can be started here, before anybody has waited for it.

    Raises:
        Unsupported: Spark or Java is not installed.
    """
    try:
        from holdfast.pipeline import java_runtime, sessions

        sessions.running()
        java_runtime.find(os.environ)
        for job in _DOES:
            import_module(f"holdfast.pipeline.jobs.{job}")
    except (Unsupported, ModuleNotFoundError) as error:
        raise Unsupported(
            f"{str(error).rstrip('.')}; the morning of the demo needs pip install 'holdfast[spark]', or leave it out: "
            "holdfast demo --without-spark"
        ) from error


def tell(night: DemoContext) -> Path:
    """Tell it; where the report is."""
    from holdfast.pipeline.config import Config

    stage, lake = night.stage, night.cast.folder / "lake"
    stage.chapter("Morning: what happened?")
    stage.say(
        "Spark reads the night from the server, which goes on serving, into open tables (Delta, Parquet) that any tool "
        "reads. It comes from the extras of the package, Java too."
    )
    config = Config(data=night.server.url, lake=str(lake), reducer=_REDUCER)
    expected = memories.digests(night)
    heads = sum(night.plane.world(name).head() for name in expected)
    with _spark(night) as spark:
        told = {name: _job(night, spark, config, name, does) for name, does in _DOES.items()}
        again = _job(night, spark, config, "ingest", "looks again")
    stage.claim(
        "every job of the pipeline ran, and found nothing wrong",
        all(each.ok and not each.findings for each in told.values()),
        checked="verdict and findings of each",
        figure=f"{sum(each.seconds for each in told.values()):.0f} s of jobs",
    )
    _claim_rows(night, config, heads, told["ingest"], again)
    _claim_states(night, config, expected)
    _claim_lives(night, config)
    _say_what_is_missing(night, config)
    report = lake / "reports" / "latest.html"
    page = report.read_text() if report.exists() else ""
    stage.claim(
        "the report is one page that needs nothing else",
        "</html>" in page and 'src="http' not in page and "<script src" not in page,
        checked="the file, and that it asks nobody for anything",
        figure=f"{len(page) // 1024:,} KiB",
    )
    return report


@contextmanager
def _spark(night: DemoContext) -> "Iterator[SparkSession]":
    from holdfast.pipeline import sessions

    scratch = night.cast.folder / "spark"
    with night.stage.bar("Spark starts"):
        spark = _started(scratch)
    try:
        yield spark
    finally:
        sessions.end(spark)
        shutil.rmtree(scratch, ignore_errors=True)


def _started(scratch: Path) -> "SparkSession":
    """A Spark that works in `scratch`.

    It starts beside the main thread, where it would take the signals that end a story for itself.
    """
    from holdfast.pipeline import sessions

    with ThreadPoolExecutor(1, "holdfast-demo-spark") as run_in_thread:
        starting = run_in_thread.submit(sessions.start, app="holdfast-demo", conf={"spark.local.dir": str(scratch)})
        try:
            return starting.result()
        except KeyboardInterrupt:  # Its Java is on its way, and would be left behind.
            sessions.end(starting.result())
            raise


def _job(night: DemoContext, spark: "SparkSession", config: "Config", name: str, does: str) -> "JobResult":
    from holdfast.pipeline import jobs

    with night.stage.bars(name) as progress:
        told = jobs.run(name, spark, config, progress=progress)
    night.stage.note(f"{name:13} {does}, {told.seconds:.0f} s")
    return told


def _claim_rows(night: DemoContext, config: "Config", heads: int, told: "JobResult", again: "JobResult") -> None:
    from holdfast.pipeline.schemas import JOURNAL

    rows = [(row["world"], row["height"]) for row in _rows(config, JOURNAL, ["world", "height"])]
    night.stage.claim(
        "the lake has every record of every journal, once",
        len(rows) == len(set(rows)) == heads,
        checked="rows of the lake against heads of the journals",
        figure=f"{len(rows):,} rows",
    )
    night.stage.claim(
        "taken in again, nothing is there twice",
        again.rows["journal"] == 0 and again.ok,
        checked="second ingest",
        figure=f"{told.rows['journal']:,} rows, then {again.rows['journal']}",
    )


def _claim_states(night: DemoContext, config: "Config", expected: dict[str, str]) -> None:
    from holdfast.pipeline.schemas import WORLD_STATE

    states = list(_rows(config, WORLD_STATE, ["world", "digest", "verdict"]))
    night.stage.claim(
        "replayed by Spark, every agent remembers what it remembers on the server",
        {row["world"]: row["digest"] for row in states} == expected and {row["verdict"] for row in states} == {"ok"},
        checked="hashes of states, by two ways, and the audit's verdicts",
        figure=f"{len(states)} worlds",
    )


def _say_what_is_missing(night: DemoContext, config: "Config") -> None:
    """The report counts events, and the kill of the server took some with it that nobody had promised to keep."""
    from holdfast.pipeline.schemas import MESSAGES

    missing = sum(row["put_at"] is None for row in _rows(config, MESSAGES, ["put_at"]))
    if missing:
        night.stage.say(
            f"In the report {missing} messages were never put. Their events were in the server's memory when it was "
            "killed: session logs are best effort, and the messages themselves are not."
        )


def _claim_lives(night: DemoContext, config: "Config") -> None:
    from holdfast.pipeline.schemas import MESSAGES

    columns = ["id", "attempts", "expiries", "redrives", "outcome"]
    lives = {row["id"]: row for row in _rows(config, MESSAGES, columns) if row["id"] in (night.orphan, night.poison)}
    orphan, poison = lives.get(night.orphan, {}), lives.get(night.poison, {})
    night.stage.claim(
        "the lake knows of the ticket whose desk was killed",
        (orphan.get("expiries"), orphan.get("outcome")) == (1, "acked"),
        checked="its row of `messages`",
        figure=f"{orphan.get('attempts')} deliveries, {orphan.get('expiries')} lease ended by itself",
    )
    night.stage.claim(
        "and of the one that nobody could read",
        (poison.get("attempts"), poison.get("redrives"), poison.get("outcome")) == (4, 1, "acked"),
        checked="its row of `messages`",
        figure=f"{poison.get('attempts')} deliveries, {poison.get('redrives')} redrive, {poison.get('outcome')}",
    )


def _rows(config: "Config", table: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    from holdfast.pipeline.lake import Lake

    yield from Lake(config.lake, config.storage).table(table).rows(columns).to_pylist()
