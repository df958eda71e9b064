"""`holdfast pipeline`: history into tables of a lake, audits and answers, on Spark.

Every command starts a Spark of its own on this machine, unless --master or --remote names another one.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click
import msgspec

from holdfast.cli import connect, contexts, printing
from holdfast.cli.commands import Noun, given, wants_json
from holdfast.cli.exit_codes import DAMAGED
from holdfast.errors import Backend, InvalidArgument, InvalidUrl, Unreachable, Unsupported
from holdfast.names import checked_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.pipeline.config import Config, JobResult
    from holdfast.pipeline.progress import Tell

_FINDINGS_SHOWN: Final = 20  # --json has them all.
_CAUSE_CHARACTERS: Final = 600
_PAUSE_SECONDS: Final = 0.2
_SPARK: Final = "run: pip install 'holdfast[spark]'"


@click.group(cls=Noun)
def pipeline() -> None:
    """History into tables, audits and answers, on Spark."""


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every job."""
    for option in reversed(
        [
            click.option(
                "--data", metavar="URL", help="The plane: a data directory, postgresql://… or a server.  [--url]"
            ),
            click.option(
                "--lake", metavar="PATH", envvar="HOLDFAST_LAKE", help="The lake: a folder, or s3://BUCKET/PATH."
            ),
            click.option("--activity", metavar="URL", help="Where session logs are, if not in the data (PostgreSQL)."),
            click.option(
                "--universe", "universes", metavar="NAME", multiple=True, help="Only this tenant; as often as you like."
            ),
            click.option(
                "--storage", metavar="NAME=VALUE", multiple=True, help="An option of the object stores: aws_endpoint=…"
            ),
            click.option("--master", metavar="URL", help="The Spark to run on: spark://…, yarn, k8s://…, local[4]."),
            click.option("--remote", metavar="URL", help="A Spark Connect server: sc://HOST:15002."),
        ]
    ):
        command = option(command)
    return command


_reducer = click.option(
    "--reducer",
    metavar="MODULE:NAME",
    help="A function (state, record) -> state of worlds.  [default: a chain of hashes]",
)


@pipeline.command(
    examples=[
        "holdfast pipeline run --data ./data --lake ./lake",
        "holdfast pipeline run --data http://127.0.0.1:9440 --lake s3://bucket/lake --master spark://host:7077",
    ]
)
@_common
@_reducer
def run(**options: Any) -> None:
    """Ingest, audit, reachability, rollup and report, in this order.

    Exit code 10 says that the audit found damage; the other jobs have run nevertheless.
    """
    from holdfast.pipeline import jobs

    _run(jobs.WHOLE, options)


@pipeline.command(
    examples=[
        "holdfast pipeline ingest --data ./data --lake ./lake",
        "holdfast pipeline ingest --data http://127.0.0.1:9440 --lake ./lake --follow",
    ]
)
@_common
@click.option("--follow", is_flag=True, help="Go on with what comes, until interrupted.")
def ingest(follow: bool, **options: Any) -> None:
    """Take what is new in the plane into the lake, each row once.

    What cannot be read becomes a row of `quarantine` with the reason, and everything else goes in.
    """
    _run(["ingest"], options, follow=follow)


@pipeline.command(examples=["holdfast pipeline audit --data ./data --lake ./lake --json"])
@_common
@_reducer
def audit(**options: Any) -> None:
    """Check every checksum, the heights, each baseline and each restore of every world.

    Exit code 10 says that something is damaged, and names the world and the height.
    """
    _run(["audit"], options)


@pipeline.command(examples=["holdfast pipeline reachability --data ./data --lake ./lake"])
@_common
def reachability(**options: Any) -> None:
    """Find blobs that nothing refers to, and how many bytes they take. Nothing is deleted."""
    _run(["reachability"], options)


@pipeline.command(examples=["holdfast pipeline rollup --data ./data --lake ./lake"])
@_common
def rollup(**options: Any) -> None:
    """Sum up: latency, throughput, retries, dead letters, mailboxes, locks, storage."""
    _run(["rollup"], options)


@pipeline.command(examples=["holdfast pipeline report --data ./data --lake ./lake"])
@_common
def report(**options: Any) -> None:
    """Write one HTML page with plots over what `rollup` summed up."""
    _run(["report"], options)


@pipeline.command(
    examples=[
        "holdfast pipeline load jobs.jsonl --data http://127.0.0.1:9440 --queue jobs --name 2026-11-15 --key id",
        "holdfast pipeline load mails.parquet --data ./data --target mail --name welcome",
    ]
)
@_common
@click.argument("source")
@click.option(
    "--target", type=click.Choice(["queues", "mail", "inboxes"]), default="queues", help="What gets the rows."
)
@click.option("--name", required=True, help="The name of the load: under the same name, no row is written twice.")
@click.option("--key", default="key", show_default=True, help="The column that tells rows apart.")
@click.option("--queue", help="Where rows go that name no queue.")
@click.option("--format", help="Of the files, if their name does not say: parquet, json, csv, orc.")
@click.option("--staging", metavar="URL", help="A store that executors reach, for the rows of a data directory.")
def load(source: str, name: str, **options: Any) -> None:
    """Put the rows of SOURCE, files or a table, into queues, mailboxes or inboxes, each once.

    Columns are named after what they fill. If none of them is the payload, those that fill nothing become its JSON.
    """
    if len(options["universes"]) > 1:
        raise InvalidArgument("Rows that name no universe go into one universe; give --universe once")
    how = {word: options.pop(word) for word in ("target", "key", "queue", "format", "staging")}
    _run(["load"], options, needs_lake=False, source=source, load=name, **how)


@pipeline.command(examples=["holdfast pipeline vacuum --lake ./lake"])
@_common
def vacuum(**options: Any) -> None:
    """Remove files of the lake that no table has, and join small ones."""
    _run(["vacuum"], options)


@pipeline.command(examples=["holdfast pipeline warm"])
def warm() -> None:
    """Make later starts of Spark on this machine take half of the time.

    Java writes down the classes that Spark loads, about 170 MB in the cache folder of the user.
    """
    with _spark_is_there():
        from holdfast.pipeline import sessions

        with printing.progress("Starting Spark, and writing down its classes"):
            path = sessions.warm()
    printing.done(
        f"Java starts from {path}, {path.stat().st_size:,} bytes", {"path": str(path), "bytes": path.stat().st_size}
    )


def _run(names: Sequence[str], options: dict[str, Any], *, needs_lake: bool = True, **extra: Any) -> None:
    """Run jobs on one Spark, print what they tell, and exit with 10 if one of them found damage."""
    config = _config(options, needs_lake=needs_lake)
    from holdfast.pipeline import jobs

    if config.data.startswith(("http://", "https://")) and not set(names) <= set(jobs.PLANELESS):
        config.tls()  # Whoever has mistyped something need not wait for Spark to start.
        _knock(config.data, given().get("patience", connect.PATIENCE_SECONDS))
    told: list[JobResult] = []
    needs_spark = not set(names) <= set(jobs.SPARKLESS)
    with _spark(options["master"], options["remote"]) if needs_spark else nullcontext() as spark:
        for name in names:
            with _bar(name) as tell, _failures(name):
                told.append(jobs.run(name, spark, config, progress=tell, **extra))
    _print(told, many=len(names) > 1)
    if not all(each.ok for each in told):
        click.get_current_context().exit(DAMAGED)


def _config(options: dict[str, Any], *, needs_lake: bool) -> "Config":
    with _spark_is_there():
        from holdfast.pipeline.config import PATIENCE_SECONDS, Config
        from holdfast.pipeline.lake.locations import place

    lake = options["lake"] or ""
    if needs_lake and not lake:
        raise InvalidArgument("A job needs a lake: give --lake, a folder or s3://BUCKET/PATH, or set HOLDFAST_LAKE")
    if lake:
        place(lake, {})  # Whoever mistyped it need not wait for Spark to start.
    flags = given() | ({"url": options["data"]} if options["data"] else {})
    found = contexts.resolved(flags, os.environ)
    data = (
        found["url"] if "://" in found["url"] or found["url"].startswith(("dir:", "memory:")) else f"dir:{found['url']}"
    )
    named = options["universes"] or ((found["universe"],) if found["universe"] else ())
    return Config(
        data=data,
        lake=lake,
        objects=found["objects"],
        activity=options["activity"],
        token=found["token"],
        ca=_file(found["ca"]),
        cert=_file(found["cert"]),
        cert_key=_file(found["key"]),
        patience_seconds=given().get("patience", PATIENCE_SECONDS),
        storage=_pairs(options["storage"]),
        universes=tuple(checked_name("universe", name) for name in named),
        reducer=options.get("reducer"),
    )


def _file(given: str | None) -> str | None:
    """A file by a name that workers of Spark understand too, wherever they run."""
    return given and os.path.abspath(given)


def _knock(url: str, patience_seconds: float) -> None:
    """Raise Unreachable unless somebody listens: whoever mistyped a server need not wait for Spark to start."""
    try:
        place = urlsplit(url)
        where = (place.hostname or "", place.port or (443 if place.scheme == "https" else 80))
    except ValueError as error:
        raise InvalidUrl(f"{url!r} is no server ({error}); write http://HOST:PORT") from error
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            socket.create_connection(where, max(patience_seconds, 1.0)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise Unreachable(f"{url} does not answer ({error}); check that `holdfast serve` runs there") from error
            time.sleep(_PAUSE_SECONDS)


def _pairs(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise InvalidArgument(f"--storage {each!r} is not understood; it is NAME=VALUE")
        found[name] = value
    return found


@contextmanager
def _spark_is_there() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("holdfast"):
            raise
        raise Unsupported(f"The pipeline needs {error.name}; {_SPARK}") from error


@contextmanager
def _spark(master: str | None, remote: str | None) -> "Iterator[SparkSession]":
    with _spark_is_there():
        from holdfast.pipeline import sessions

        if not os.environ.get("HOLDFAST_DEBUG"):
            logging.getLogger().addFilter(_is_not_of_py4j)
        before = sessions.running()
        with printing.progress("Starting Spark"):
            spark = sessions.start(master=master, remote=remote)
        try:
            yield spark
        finally:
            if before is None:
                with suppress(Exception):  # A Spark that is gone cannot be stopped, and what was done is done.
                    spark.stop()


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Whether it is not what py4j says, with a trace, of an interrupt that met it while it waited for Java."""
    return "while sending command" not in str(record.msg)


@contextmanager
def _failures(job: str) -> Iterator[None]:
    """What Spark says of a job that it gave up, as an error of ours: the last line of the trace is the cause."""
    with _spark_is_there():
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise Backend(f"Spark could not finish {job}: {_cause(str(error))}") from error


def _cause(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Python's trace of a worker ends with its error; a trace of Java begins with it.
    ends = [index for index, line in enumerate(lines) if line.startswith(("at ", "JVM stacktrace"))]
    shown = lines[: ends[0]] if ends else lines
    cause = shown[-1] if any("Traceback" in line for line in shown) else " ".join(shown)
    return cause[:_CAUSE_CHARACTERS]


@contextmanager
def _bar(job: str) -> "Iterator[Tell | None]":
    """Bars on a terminal, one for each thing that is told of; None anywhere else."""
    if wants_json() or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(job, total=None)
        rows: dict[str, TaskID] = {}
        bounded: set[str] = set()  # What ends; jobs also tell of things that they only count.

        def tell(what: str, done: int, total: int) -> None:
            if what not in rows:
                rows[what] = bar.add_task(f"  {what}", total=None)
            if done < total:
                bounded.add(what)
            end = total if what in bounded else None
            bar.update(rows[what], completed=done, total=end, visible=end is None or done < end)

        yield tell


def _print(told: "Sequence[JobResult]", *, many: bool) -> None:
    if wants_json():
        found = [msgspec.to_builtins(each) for each in told]
        if many:
            printing.rows(found, ())
        else:
            printing.record(found[0])
        return
    printing.rows([_summary(each) for each in told], ("job", "verdict", "rows", "seconds"))
    for each in told:
        for note in each.notes:
            click.echo(printing.clean(f"{each.job}: {note}"))
        for finding in each.findings[:_FINDINGS_SHOWN]:
            click.echo(printing.clean(f"✗ {each.job}: {_said(finding)}"))
        if (more := len(each.findings) - _FINDINGS_SHOWN) > 0:
            click.echo(f"  and {more:,} more; --json has them all")


def _summary(told: "JobResult") -> dict[str, Any]:
    rows = ", ".join(f"{table} {count:,}" for table, count in told.rows.items() if count)
    verdict = "ok" if told.ok else f"{len(told.findings):,} findings"
    return {"job": told.job, "verdict": verdict, "rows": rows or "nothing new", "seconds": round(told.seconds, 1)}


def _said(finding: dict[str, Any]) -> str:
    """A finding as a sentence: where, then why, then whatever else is known."""
    rest = {key: value for key, value in finding.items() if value is not None}
    where = "/".join(str(rest.pop(key)) for key in ("universe", "world") if key in rest)
    height = f" at {rest.pop('height')}" if "height" in rest else ""
    reason = f": {rest.pop('reason')}" if "reason" in rest else ""
    more = f" ({', '.join(f'{key} {value}' for key, value in rest.items())})" if rest else ""
    return f"{where}{height}{reason}{more}"
