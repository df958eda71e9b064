"""The pipeline: Spark copies all data from the running server into a lake, audits it, and writes a report."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastness.demo.chapters import worlds
from fastness.demo.context import DemoContext
from fastness.errors import Unsupported
from fastness.extras import how_to_install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fastness.pipeline.config import Config, JobResult

_REDUCER: Final = "fastness.demo.chapters.worlds:fold"
_JOBS: Final = {
    "ingest": "copies new data into tables, each row once",
    "audit": "replays every journal and checks every checksum",
    "reachability": "finds blobs that nothing refers to",
    "contents": "copies what queues, mailboxes and states hold now",
    "rollup": "summarises queues, mail and storage",
    "report": "writes one HTML page",
}


def check() -> None:
    """Check that Spark can be started, before the demo runs.

    Raises:
        Unsupported: Spark or Java is not installed.
    """
    try:
        from fastness.pipeline import java_runtime, sessions

        sessions.running()
        java_runtime.find(os.environ)
        for job in _JOBS:
            import_module(f"fastness.pipeline.jobs.{job}")
    except (Unsupported, ModuleNotFoundError) as error:
        reason = str(error) if isinstance(error, Unsupported) else f"{error}; {how_to_install('spark')}"
        raise Unsupported(f"{reason}, or run the demo without Spark: fastness demo --without-spark") from error


def run(context: DemoContext) -> Path:
    """Run the chapter. Returns the path of the report."""
    from fastness.pipeline.config import Config

    output, lake = context.output, context.processes.folder / "lake"
    output.chapter("The pipeline: tables, audit and report")
    output.say(
        "Spark copies all data from the running server into open tables (Delta, Parquet) that any tool can read. Spark "
        "and Java are installed with the package's extras."
    )
    config = Config(data=context.server.url, lake=str(lake), reducer=_REDUCER)
    expected = worlds.digests(context)
    heads = sum(context.plane.world(name).head() for name in expected)
    with _spark(context) as spark:
        results = {name: _job(context, spark, config, name, action) for name, action in _JOBS.items()}
        again = _job(context, spark, config, "ingest", "runs again")
    unlogged = [finding for finding in results["rollup"].findings if finding["reason"] == "incomplete logs"]
    output.claim(
        "every job of the pipeline ran, and found nothing but log records that the kill lost",
        sum(len(each.findings) for each in results.values()) == len(unlogged)
        and all(each.ok or each.findings for each in results.values()),
        checked="verdict and findings of each",
        figure=f"{sum(each.seconds for each in results.values()):.0f} s of jobs",
    )
    _check_rows(context, config, heads, results["ingest"], again)
    _check_states(context, config, expected)
    _check_messages(context, config)
    _explain_missing_events(context, sum(finding["unlogged"] for finding in unlogged))
    report = lake / "reports" / "latest.html"
    page = report.read_text() if report.exists() else ""
    output.claim(
        "the report is one self-contained page",
        "</html>" in page and 'src="http' not in page and "<script src" not in page,
        checked="the file, and that it loads nothing else",
        figure=f"{len(page) // 1024:,} KiB",
    )
    return report


@contextmanager
def _spark(context: DemoContext) -> "Iterator[SparkSession]":
    from fastness.pipeline import sessions

    scratch = context.processes.folder / "spark"
    with context.output.bar("Spark starts"):
        spark = _start_spark(scratch)
    try:
        yield spark
    finally:
        sessions.end(spark)
        shutil.rmtree(scratch, ignore_errors=True)


def _start_spark(scratch: Path) -> "SparkSession":
    """Start Spark with its scratch folder `scratch`.

    It is started outside the main thread, where it would replace the demo's signal handlers.
    """
    from fastness.pipeline import sessions

    with ThreadPoolExecutor(1, "fastness-demo-spark") as threads:
        starting = threads.submit(sessions.start, app="fastness-demo", conf={"spark.local.dir": str(scratch)})
        try:
            return starting.result()
        except KeyboardInterrupt:  # Java is starting, and would keep running.
            sessions.end(starting.result())
            raise


def _job(context: DemoContext, spark: "SparkSession", config: "Config", name: str, action: str) -> "JobResult":
    from fastness.pipeline import jobs

    with context.output.bars(name) as progress:
        result = jobs.run(name, spark, config, progress=progress)
    context.output.note(f"{name:13} {action}, {result.seconds:.0f} s")
    return result


def _check_rows(context: DemoContext, config: "Config", heads: int, first: "JobResult", again: "JobResult") -> None:
    from fastness.pipeline.schemas import JOURNAL

    rows = [(row["world"], row["height"]) for row in _rows(config, JOURNAL, ["world", "height"])]
    context.output.claim(
        "the lake has every record of every journal exactly once",
        len(rows) == len(set(rows)) == heads,
        checked="rows of the lake against heads of the journals",
        figure=f"{len(rows):,} rows",
    )
    context.output.claim(
        "a second ingest adds no duplicates",
        again.rows["journal"] == 0 and again.ok,
        checked="second ingest",
        figure=f"{first.rows['journal']:,} rows, then {again.rows['journal']}",
    )


def _check_states(context: DemoContext, config: "Config", expected: dict[str, str]) -> None:
    from fastness.pipeline.schemas import WORLD_STATE

    states = list(_rows(config, WORLD_STATE, ["world", "digest", "verdict"]))
    context.output.claim(
        "the states that Spark replays equal the server's states",
        {row["world"]: row["digest"] for row in states} == expected and {row["verdict"] for row in states} == {"ok"},
        checked="state hashes of both, and the audit's verdicts",
        figure=f"{len(states)} worlds",
    )


def _explain_missing_events(context: DemoContext, messages: int) -> None:
    """Explain the findings of `rollup`: the killed server lost best-effort log records."""
    if messages:
        context.output.say(
            f"`rollup` reports that {messages} messages lack events, so their latencies are not known. These events "
            "were in memory when the server was killed: session logs are best effort. The messages are durable."
        )


def _check_messages(context: DemoContext, config: "Config") -> None:
    from fastness.pipeline.schemas import MESSAGES

    columns = ["id", "attempts", "expiries", "redrives", "outcome"]
    lives = {
        row["id"]: row
        for row in _rows(config, MESSAGES, columns)
        if row["id"] in (context.orphaned_id, context.unreadable_id)
    }
    orphaned, unreadable = lives.get(context.orphaned_id, {}), lives.get(context.unreadable_id, {})
    context.output.claim(
        "the lake shows the ticket whose worker was killed",
        (orphaned.get("expiries"), orphaned.get("outcome")) == (1, "acked"),
        checked="its row of `messages`",
        figure=f"{orphaned.get('attempts')} deliveries, {orphaned.get('expiries')} expired lease",
    )
    context.output.claim(
        "the lake shows the ticket that became a dead letter",
        (unreadable.get("attempts"), unreadable.get("redrives"), unreadable.get("outcome")) == (4, 1, "acked"),
        checked="its row of `messages`",
        figure=f"{unreadable.get('attempts')} deliveries, {unreadable.get('redrives')} redrive",
    )


def _rows(config: "Config", table: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    from fastness.pipeline.lake import Lake

    yield from Lake(config.lake, config.storage).table(table).rows(columns).to_pylist()
