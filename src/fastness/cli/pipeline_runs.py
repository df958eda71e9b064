"""Runs jobs for `fastness pipeline`: checks what was given, starts Spark, shows progress, and translates errors."""

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final, Unpack
from urllib.parse import urlsplit

import click

from fastness import context_file
from fastness.cli import connect, printing
from fastness.cli.commands import given_options, wants_json
from fastness.cli.exit_codes import DAMAGED
from fastness.cli.pipeline_observers import Observation
from fastness.cli.pipeline_options import JobArguments
from fastness.cli.pipeline_output import print_results
from fastness.errors import Backend, InvalidArgument, InvalidUrl, Unreachable, Unsupported
from fastness.extras import how_to_install
from fastness.names import checked_name, folder_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fastness.pipeline.config import Config, JobResult
    from fastness.pipeline.jobs import JobOptions
    from fastness.pipeline.progress import ProgressCallback

_CAUSE_CHARACTERS: Final = 600
_PAUSE_SECONDS: Final = 0.2


def run_jobs(
    names: Sequence[str],
    options: JobArguments,
    *,
    needs_lake: bool = True,
    follows: bool = False,
    health: str | None = None,
    **extra: "Unpack[JobOptions]",
) -> None:
    """Run jobs in one Spark session, print their results, and exit with 10 if one found damage."""
    config = configure(options, needs_lake=needs_lake)
    with require_spark():
        observation = Observation(config, metrics=options.get("metrics"), lineage=options.get("lineage"))
    from fastness.pipeline import jobs
    from fastness.pipeline.lake import Lake
    from fastness.pipeline.observation.status import check_exists

    if set(names) <= set(jobs.JOBS_OF_A_LAKE):
        check_exists(Lake(config.lake, config.storage))  # A mistyped lake is not created.
    if not set(names) <= set(jobs.JOBS_WITHOUT_PLANE) or extra.get("publish"):
        check_plane(config, creates="load" in names)
    results: list[JobResult] = []
    not_followed: JobOptions = {}
    needs_spark = not set(names) <= set(jobs.JOBS_WITHOUT_SPARK)
    with (
        observation.following(health) if follows else nullcontext(not_followed) as job_options,
        start_spark(options["master"], options["remote"], ui=options.get("ui", False))
        if needs_spark
        else nullcontext() as spark,
        jobs.view_options(names, config) as shared,
    ):
        for name in names:
            with _bar(name) as bar, translate_spark_errors(name):
                progress = observation.progress([bar] if bar is not None else []) if bar or follows else None
                all_options = extra | job_options | shared[name]
                results.append(
                    jobs.run(name, spark, config, progress=progress, observers=observation.observers, **all_options)
                )
    print_results(results, many=len(names) > 1)
    if not all(each.ok for each in results):
        click.get_current_context().exit(DAMAGED)


def configure(options: JobArguments, *, needs_lake: bool) -> "Config":
    with require_spark():
        from fastness.pipeline.config import PATIENCE_SECONDS, Config
        from fastness.pipeline.lake.locations import parse_location

    lake = options["lake"] or ""
    if needs_lake and not lake:
        raise InvalidArgument("A job needs a lake; give --lake (a folder or s3://BUCKET/PATH), or set FASTNESS_LAKE")
    if lake:
        parse_location(lake, {})  # A mistyped lake fails here, before Spark starts.
    flags = given_options() | ({"url": options["data"]} if options["data"] else {})
    found = context_file.resolve(flags, os.environ)
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
        ca=_absolute_path(found["ca"]),
        cert=_absolute_path(found["cert"]),
        cert_key=_absolute_path(found["key"]),
        patience_seconds=given_options().get("patience", PATIENCE_SECONDS),
        storage=_pairs(options["storage"]),
        universes=tuple(checked_name("universe", name) for name in named),
        encryption_key_file=_absolute_path(options.get("encryption_key_file")),
        key_file=_absolute_path(options.get("key_file")),
        redact_file=_absolute_path(options.get("redact")),
        reducer=options.get("reducer"),
    )


def _absolute_path(path: str | None) -> str | None:
    """An absolute path, which Spark workers resolve too."""
    return path and os.path.abspath(path)


def check_plane(config: "Config", *, creates: bool) -> None:
    """Raise if the plane of a mistyped URL cannot be opened, before Spark starts."""
    if config.data.startswith(("http://", "https://")):
        config.tls()
        _check_reachable(config.data, given_options().get("patience", connect.PATIENCE_SECONDS))
    elif config.data.startswith("dir:") and not creates:
        from fastness.plane.formats import check_exists

        check_exists(folder_at(config.data))


def _check_reachable(url: str, patience_seconds: float) -> None:
    """Raise Unreachable unless the server accepts connections, so a mistyped URL fails before Spark starts."""
    try:
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    except ValueError as error:
        raise InvalidUrl(f"{url!r} is not the URL of a server ({error}); use http://HOST:PORT") from error
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            socket.create_connection(address, max(patience_seconds, 1.0)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise Unreachable(f"{url} does not answer ({error}); check that `fastness serve` runs there") from error
            time.sleep(_PAUSE_SECONDS)


def _pairs(assignments: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise InvalidArgument(f"--storage {each!r} is invalid; use NAME=VALUE")
        found[name] = value
    return found


@contextmanager
def require_spark() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fastness"):
            raise
        raise Unsupported(f"The pipeline needs {error.name}; {how_to_install('spark')}") from error


@contextmanager
def start_spark(master: str | None, remote: str | None, *, ui: bool = False) -> "Iterator[SparkSession]":
    if ui and remote is not None:
        raise InvalidArgument("--ui is for a Spark that this command starts; a Spark Connect server has its own")
    with require_spark():
        from fastness.pipeline import sessions

        if not os.environ.get("FASTNESS_DEBUG"):
            logging.getLogger().addFilter(_is_not_py4j_interrupt)
        before = sessions.running()
        with printing.progress("Starting Spark"):
            spark = sessions.start(master=master, remote=remote, conf={"spark.ui.enabled": "true"} if ui else None)
        if ui:
            click.echo(f"Spark's web interface: {sessions.ui_url(spark)}", err=True)
        try:
            yield spark
        finally:
            if before is None:
                with suppress(Exception):  # A Spark session that has ended cannot be stopped; the results stay valid.
                    spark.stop()


def _is_not_py4j_interrupt(record: logging.LogRecord) -> bool:
    """Filters out the traceback that py4j logs when an interrupt arrives while it waits for Java."""
    return "while sending command" not in str(record.msg)


@contextmanager
def translate_spark_errors(job: str) -> Iterator[None]:
    """Convert an error of Spark to Backend, with the cause from its trace."""
    with require_spark():
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise Backend(f"Spark could not finish {job}: {_cause(str(error))}") from error


def _cause(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A Python traceback ends with its error; a Java trace starts with it.
    ends = [index for index, line in enumerate(lines) if line.startswith(("at ", "JVM stacktrace"))]
    shown = lines[: ends[0]] if ends else lines
    cause = shown[-1] if any("Traceback" in line for line in shown) else " ".join(shown)
    return cause[:_CAUSE_CHARACTERS]


@contextmanager
def _bar(job: str) -> "Iterator[ProgressCallback | None]":
    """A function that shows progress bars, one per reported item; None if there is no terminal."""
    if wants_json() or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(job, total=None)
        rows: dict[str, TaskID] = {}
        bounded: set[str] = set()  # The items with a known total; jobs report mere counts too.

        def report(item: str, done: int, total: int) -> None:
            if item not in rows:
                rows[item] = bar.add_task(f"  {item}", total=None)
            if done < total:
                bounded.add(item)
            end = total if item in bounded else None
            bar.update(rows[item], completed=done, total=end, visible=end is None or done < end)

        yield report
