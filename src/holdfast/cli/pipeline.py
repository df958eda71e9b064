"""`holdfast pipeline`: Spark jobs that copy history into the tables of a lake, audit it, and summarise it.

Every command starts Spark on this machine, unless --master or --remote selects another one.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypedDict, Unpack
from urllib.parse import urlsplit

import click
import msgspec

from holdfast.cli import connect, context_file, printing
from holdfast.cli.commands import CommandGroup, given_options, wants_json
from holdfast.cli.durations import SECONDS
from holdfast.cli.exit_codes import DAMAGED
from holdfast.cli.pipeline_observers import Observation, health_option, lineage_option, metrics_option
from holdfast.errors import Backend, InvalidArgument, InvalidUrl, Unreachable, Unsupported
from holdfast.names import checked_name, folder_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.pipeline.config import Config, JobResult
    from holdfast.pipeline.jobs import JobOptions
    from holdfast.pipeline.observation.status import LakeStatus
    from holdfast.pipeline.progress import ProgressCallback

_FINDINGS_SHOWN: Final = 20  # --json has them all.
_CAUSE_CHARACTERS: Final = 600
_PAUSE_SECONDS: Final = 0.2
_INSTALL_SPARK: Final = "run: pip install 'holdfast[spark]'"


@click.group(cls=CommandGroup)
def pipeline() -> None:
    """Copy history into lake tables, audit it and summarise it, with Spark."""


class JobArguments(TypedDict):
    """The values of the options that every job has."""

    data: str | None
    lake: str | None
    activity: tuple[str, ...]
    universes: tuple[str, ...]
    storage: tuple[str, ...]
    master: str | None
    remote: str | None
    ui: NotRequired[bool]
    metrics: NotRequired[str | None]
    lineage: NotRequired[str | None]
    reducer: NotRequired[str | None]
    key_file: NotRequired[str | None]
    redact: NotRequired[str | None]


_DATA: Final = click.option(
    "--data", metavar="URL", help="The plane: a data directory, postgresql://… or a server.  [default: --url]"
)
_LAKE: Final = click.option(
    "--lake", metavar="PATH", envvar="HOLDFAST_LAKE", help="The lake: a folder or s3://BUCKET/PATH."
)
_UNIVERSE: Final = click.option(
    "--universe", "universes", metavar="NAME", multiple=True, help="Process only this universe. Repeatable."
)
_STORAGE: Final = click.option(
    "--storage",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option of the object store, such as aws_endpoint=…. Repeatable.",
)


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that every job has."""
    for option in reversed(
        [
            _DATA,
            _LAKE,
            click.option(
                "--activity",
                metavar="DIR",
                multiple=True,
                help="A folder of session logs, if they are not in the data directory (PostgreSQL). Repeatable: each "
                "node has its own.",
            ),
            _UNIVERSE,
            _STORAGE,
            click.option(
                "--key-file",
                metavar="FILE",
                envvar="HOLDFAST_LAKE_KEY_FILE",
                help="A file with the secret key of the digests in the lake.",
            ),
            click.option(
                "--redact",
                metavar="FILE",
                envvar="HOLDFAST_LAKE_REDACT",
                help="A TOML file with the fields that are replaced before they are stored in the lake.",
            ),
            click.option("--master", metavar="URL", help="The Spark master: spark://…, yarn, k8s://… or local[4]."),
            click.option("--remote", metavar="URL", help="The Spark Connect server: sc://HOST:15002."),
            click.option(
                "--ui", is_flag=True, help="Serve Spark's web interface while the job runs, and print its URL."
            ),
            metrics_option,
            lineage_option,
        ]
    ):
        command = option(command)
    return command


class LakeArguments(TypedDict):
    """The values of the options of commands that start no Spark."""

    data: str | None
    lake: str | None
    universes: tuple[str, ...]
    storage: tuple[str, ...]


def _lake_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that start no Spark."""
    for option in (_STORAGE, _UNIVERSE, _LAKE, _DATA):
        command = option(command)
    return command


def _job_arguments(options: LakeArguments) -> JobArguments:
    return {
        "data": options["data"],
        "lake": options["lake"],
        "universes": options["universes"],
        "storage": options["storage"],
        "activity": (),
        "master": None,
        "remote": None,
    }


_reducer_option = click.option(
    "--reducer",
    metavar="MODULE:NAME",
    help="The function (state, record) -> state that replays worlds.  [default: a hash chain]",
)


@pipeline.command(
    examples=[
        "holdfast pipeline run --data ./data --lake ./lake",
        "holdfast pipeline run --data http://127.0.0.1:9440 --lake s3://bucket/lake --master spark://host:7077",
    ]
)
@_job_options
@_reducer_option
def run(**options: Unpack[JobArguments]) -> None:
    """Run ingest, audit, reachability, contents, rollup and report, in this order.

    Exit code 10 means that the audit found damage; the other jobs run anyway.
    """
    from holdfast.pipeline import jobs

    _run(jobs.FULL_RUN, options)


@pipeline.command(
    examples=[
        "holdfast pipeline ingest --data ./data --lake ./lake",
        "holdfast pipeline ingest --data http://127.0.0.1:9440 --lake ./lake --follow --health 0.0.0.0:8080",
    ]
)
@_job_options
@click.option("--follow", is_flag=True, help="Keep ingesting new data until SIGTERM or an interrupt.")
@health_option
def ingest(follow: bool, health: str | None, **options: Unpack[JobArguments]) -> None:
    """Copy new data from the plane into the lake, each row exactly once.

    Data that cannot be read becomes a row of the table `quarantine`, with the reason.
    """
    if health is not None and not follow:
        raise InvalidArgument("--health answers while --follow runs; give both")
    _run(["ingest"], options, follows=follow, health=health)


@pipeline.command(examples=["holdfast pipeline audit --data ./data --lake ./lake --json"])
@_job_options
@_reducer_option
def audit(**options: Unpack[JobArguments]) -> None:
    """Check every checksum of the plane and the lake, and the heights, baselines and restores of every world.

    Exit code 10 means that data is damaged; the output names the world and the height, or the damaged object and what
    it affects.
    """
    _run(["audit"], options)


@pipeline.command(examples=["holdfast pipeline reachability --data ./data --lake ./lake"])
@_job_options
def reachability(**options: Unpack[JobArguments]) -> None:
    """Find blobs that nothing refers to, and their size. Nothing is deleted."""
    _run(["reachability"], options)


@pipeline.command(
    examples=[
        "holdfast pipeline contents --data ./data --lake ./lake",
        "holdfast pipeline contents --data http://127.0.0.1:9440 --lake ./lake --payloads",
    ]
)
@_job_options
@click.option("--payloads", is_flag=True, help="Also copy the content of messages and mail.")
def contents(payloads: bool, **options: Unpack[JobArguments]) -> None:
    """Copy what queues, mailboxes, states, leases, schedules and tokens hold now.

    Each run replaces the rows of the one before, and adds the changes of state documents to `state_changes`.
    """
    _run(["contents"], options, payloads=payloads)


@pipeline.command(examples=["holdfast pipeline rollup --data ./data --lake ./lake"])
@_job_options
def rollup(**options: Unpack[JobArguments]) -> None:
    """Summarise latency, throughput, retries, dead letters, mailboxes, locks and storage."""
    _run(["rollup"], options)


@pipeline.command(examples=["holdfast pipeline report --data ./data --lake ./lake"])
@_job_options
def report(**options: Unpack[JobArguments]) -> None:
    """Write an HTML page with plots of the results of `rollup`."""
    _run(["report"], options)


@pipeline.command(
    examples=[
        "holdfast pipeline live --data http://127.0.0.1:9440 --lake ./lake --health 0.0.0.0:8080",
        "holdfast pipeline live --data ./data --lake ./lake --once",
    ]
)
@_job_options
@click.option("--once", is_flag=True, help="Aggregate the events so far, and end. Without it: until SIGTERM.")
@click.option(
    "--every", type=SECONDS, default="10s", show_default=True, help="How often to look for new events, such as 1m."
)
@click.option(
    "--late",
    type=SECONDS,
    default="10m",
    show_default=True,
    help="A minute is final when the newest event is this much later. Later events are counted anyway.",
)
@click.option(
    "--checkpoint",
    metavar="DIR",
    help="A local folder for Spark's checkpoint.  [default: the folder _live of the lake]",
)
@click.option("--rebuild", is_flag=True, help="Aggregate all session logs again, and replace the rows.")
@health_option
def live(
    *,
    once: bool,
    every: float,
    late: float,
    checkpoint: str | None,
    rebuild: bool,
    health: str | None,
    **options: Unpack[JobArguments],
) -> None:
    """Count the events of queues by minute in the table `live_queue_minutes`, with Spark's Structured Streaming.

    Each event counts once, whenever the process is killed: the next one continues from the checkpoint.
    """
    if options["universes"]:
        raise InvalidArgument("`live` aggregates all universes of the plane; remove --universe, and select later")
    if health is not None and once:
        raise InvalidArgument("--health answers while the query runs; remove --once")
    _run(
        ["live"],
        options,
        follows=not once,
        health=health,
        every_seconds=every,
        late_seconds=late,
        checkpoint=checkpoint,
        rebuild=rebuild,
    )


@pipeline.command(
    examples=[
        "holdfast pipeline load jobs.jsonl --data http://127.0.0.1:9440 --queue jobs --name 2026-11-15 --key id",
        "holdfast pipeline load mails.parquet --data ./data --target mail --name welcome",
    ]
)
@_job_options
@click.argument("source")
@click.option(
    "--target", type=click.Choice(["queues", "mail", "inboxes"]), default="queues", help="What receives the rows."
)
@click.option("--name", required=True, help="The name of the load. Within the same name, no row is written twice.")
@click.option("--key", default="key", show_default=True, help="The column that identifies a row.")
@click.option("--queue", help="The queue of rows that name no queue.")
@click.option("--format", help="The file format, if the file name does not show it: parquet, json, csv or orc.")
@click.option(
    "--staging",
    metavar="URL",
    help="An object store that the Spark executors can reach, for loads into a data directory.",
)
def load(
    *,
    source: str,
    name: str,
    target: str,
    key: str,
    queue: str | None,
    format: str | None,
    staging: str | None,
    **options: Unpack[JobArguments],
) -> None:
    """Put the rows of SOURCE (files or a table) into queues, mailboxes or inboxes, each exactly once.

    Columns are named after the fields they set. Without a payload column, the columns that set no field become the JSON
    payload.
    """
    if len(options["universes"]) > 1:
        raise InvalidArgument("Rows that name no universe go into one universe; give --universe only once")
    _run(
        ["load"],
        options,
        needs_lake=False,
        source=source,
        load=name,
        target=target,
        key=key,
        queue=queue,
        format=format,
        staging=staging,
    )


@pipeline.command(
    examples=[
        "holdfast pipeline accept --data ./restored --lake ./lake",
        "holdfast pipeline accept --data ./data --lake ./lake --world ada",
        "holdfast pipeline accept --data ./data --lake ./lake --kind order --lost",
    ]
)
@_job_options
@click.option("--world", "worlds", metavar="NAME", multiple=True, help="Accept only this world. Repeatable.")
@click.option("--kind", "kinds", metavar="KIND", multiple=True, help="Accept only this kind of entity. Repeatable.")
@click.option(
    "--lost", is_flag=True, help="Also confirm that quarantined rows are lost: they are no findings any more."
)
def accept(worlds: tuple[str, ...], kinds: tuple[str, ...], lost: bool, **options: Unpack[JobArguments]) -> None:
    """Continue the lake with a plane that was restored from a backup.

    Rows of the lake that the plane no longer has move to the table `superseded`; the next ingest adds what the plane
    has instead. Without a restore, the same is done for the sources that are quarantined as `rewound`. Stop other jobs
    of the lake first.
    """
    _run(["accept"], options, worlds=worlds, kinds=kinds, lost=lost)


class SourceArguments(JobArguments):
    """The options of jobs that name sources."""

    worlds: tuple[str, ...]
    kinds: tuple[str, ...]
    queues: tuple[str, ...]
    sessions: tuple[str, ...]
    everything: bool


def _source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name sources."""
    for option in (
        click.option("--all", "everything", is_flag=True, help="All sources of the selected universes."),
        click.option(
            "--session", "sessions", metavar="NAME", multiple=True, help="The session logs of this session. Repeatable."
        ),
        click.option(
            "--queue", "queues", metavar="NAME", multiple=True, help="The durable history of this queue. Repeatable."
        ),
        click.option("--kind", "kinds", metavar="KIND", multiple=True, help="This kind of entity. Repeatable."),
        click.option("--world", "worlds", metavar="NAME", multiple=True, help="This world. Repeatable."),
    ):
        command = option(command)
    return command


def _sources(options: SourceArguments) -> "JobOptions":
    return {
        "worlds": options["worlds"],
        "kinds": options["kinds"],
        "queues": options["queues"],
        "sessions": options["sessions"],
        "everything": options["everything"],
    }


@pipeline.command(
    examples=[
        "holdfast pipeline reset --data ./data --lake ./lake --world ada",
        "holdfast pipeline reset --data ./data --lake ./lake --universe main --all --allow-loss",
    ]
)
@_job_options
@_source_options
@click.option("--allow-loss", is_flag=True, help="Also remove rows that the plane no longer has: they are lost.")
def reset(allow_loss: bool, **options: Unpack[SourceArguments]) -> None:
    """Drop the rows of sources, so that the next ingest reads them again from the start.

    If the plane no longer has some of the rows, nothing is removed, and the exit code is 5: an ingest would not bring
    them back.
    """
    chosen = _sources(options)
    chosen["allow_loss"] = allow_loss
    _run(["reset"], options, **chosen)


@pipeline.command(
    examples=[
        "holdfast pipeline backfill --data ./data --lake ./lake --world ada",
        "holdfast pipeline backfill --data ./data --lake ./lake --all --activity ./restored-logs",
        "holdfast pipeline backfill --data ./data --lake ./lake --kind order --lost",
    ]
)
@_job_options
@_source_options
@click.option("--lost", is_flag=True, help="Confirm that rows which are still missing are lost.")
def backfill(lost: bool, **options: Unpack[SourceArguments]) -> None:
    """Ingest sources again from the start: add rows that the lake lacks, and report what differs from the plane.

    Exit code 10 means that rows differ, or are missing and not confirmed as lost. No row is changed or removed.
    """
    chosen = _sources(options)
    chosen["lost"] = lost
    _run(["backfill"], options, **chosen)


@pipeline.command(
    examples=[
        "holdfast pipeline forget --data ./data --lake ./lake --deleted --vacuum",
        "holdfast pipeline forget --data ./data --lake ./lake --match mail.sender=ada --vacuum --key-file key",
    ]
)
@_job_options
@click.option("--world", "worlds", metavar="NAME", multiple=True, help="Forget this world. Repeatable.")
@click.option("--kind", "kinds", metavar="KIND", multiple=True, help="Forget this kind of entity. Repeatable.")
@click.option("--queue", "queues", metavar="NAME", multiple=True, help="Forget the messages of this queue. Repeatable.")
@click.option(
    "--session", "sessions", metavar="NAME", multiple=True, help="Forget the logs of this session. Repeatable."
)
@click.option(
    "--match",
    "matches",
    metavar="COLUMN=VALUE",
    multiple=True,
    help="Forget rows with this value of mail.sender, mail.recipient, leases.owner, entity_changes.id or states.key. "
    "Repeatable.",
)
@click.option("--deleted", is_flag=True, help="Forget all worlds that the plane has deleted.")
@click.option("--reason", metavar="TEXT", help="Why; stored with the tombstone. Do not name a person here.")
@click.option("--vacuum", is_flag=True, help="Also delete old files and commits, and search all files for the names.")
def forget(
    *,
    worlds: tuple[str, ...],
    kinds: tuple[str, ...],
    queues: tuple[str, ...],
    sessions: tuple[str, ...],
    matches: tuple[str, ...],
    deleted: bool,
    reason: str | None,
    vacuum: bool,
    **options: Unpack[JobArguments],
) -> None:
    """Remove worlds, queues or a person's rows from every table of the lake. Later jobs do not bring them back.

    With --vacuum, exit code 10 means that a file of the lake still has one of the names. Stop other jobs of the lake
    first. The plane itself is not changed.
    """
    _run(
        ["forget"],
        options,
        worlds=worlds,
        kinds=kinds,
        queues=queues,
        sessions=sessions,
        matches=matches,
        deleted=deleted,
        reason=reason,
        vacuum=vacuum,
    )


@pipeline.command(examples=["holdfast pipeline vacuum --lake ./lake"])
@_job_options
def vacuum(**options: Unpack[JobArguments]) -> None:
    """Remove files of the lake that no table uses, and merge small files."""
    _run(["vacuum"], options)


@pipeline.command(
    examples=[
        "holdfast pipeline status --lake ./lake",
        "holdfast pipeline status --lake s3://bucket/lake --data http://127.0.0.1:9440 --json",
    ]
)
@_lake_options
@metrics_option
def status(metrics: str | None, **options: Unpack[LakeArguments]) -> None:
    """Show the last run of each job, the tables of the lake, and how far they are behind the plane.

    The lag is measured if --data or --url is given. Exit code 10 means that data is quarantined, or that the last
    run of a job found damage.
    """
    config = _config(_job_arguments(options), needs_lake=True)
    with _require_spark():
        from holdfast.pipeline.observation import metrics as prometheus
        from holdfast.pipeline.observation.status import lake_status
        from holdfast.pipeline.views import open_view

    if options["data"] or given_options().get("url") or os.environ.get("HOLDFAST_URL"):
        _check_plane(config, creates=False)
        with open_view(config) as view:
            found = lake_status(config, view)
    else:
        found = lake_status(config)
    if metrics is not None:
        prometheus.write_file(metrics, prometheus.registry(found.runs, found.tables))
    _print_status(found)
    if found.is_damaged:
        click.get_current_context().exit(DAMAGED)


@pipeline.command(
    examples=[
        "holdfast pipeline publish --lake ./lake --duckdb lake.duckdb",
        "holdfast pipeline publish --lake s3://bucket/lake --spark-schema lake --remote sc://spark.example:15002",
    ]
)
@_LAKE
@_STORAGE
@click.option("--duckdb", metavar="FILE", help="Write a DuckDB file with a view for each table.")
@click.option(
    "--delta-scan", is_flag=True, help="Let the DuckDB views read the Delta log; needs DuckDB's extension delta."
)
@click.option("--spark-schema", metavar="NAME", help="Register the tables in this schema of Spark's catalogue.")
@click.option("--master", metavar="URL", help="The Spark master: spark://…, yarn, k8s://… or local[4].")
@click.option("--remote", metavar="URL", help="The Spark Connect server: sc://HOST:15002.")
def publish(
    *,
    lake: str | None,
    storage: tuple[str, ...],
    duckdb: str | None,
    delta_scan: bool,
    spark_schema: str | None,
    master: str | None,
    remote: str | None,
) -> None:
    """Register the tables of the lake, and views over them, in a DuckDB file or in Spark's catalogue.

    The DuckDB file shows the lake as it is now: publish it again after a run.
    """
    if duckdb is None and spark_schema is None:
        raise InvalidArgument("Nothing to publish to; give --duckdb FILE or --spark-schema NAME")
    if delta_scan and duckdb is None:
        raise InvalidArgument("--delta-scan is for a DuckDB file; give --duckdb FILE")
    options: LakeArguments = {"data": None, "lake": lake, "universes": (), "storage": storage}
    config = _config(_job_arguments(options), needs_lake=True)
    with _require_spark():
        from holdfast.pipeline.catalogue import duckdb_file
        from holdfast.pipeline.catalogue import spark_schema as spark_catalogue
        from holdfast.pipeline.lake import Lake
        from holdfast.pipeline.observation.status import lake_status

    lake_status(config)  # A mistyped lake fails here.
    tables, published = Lake(config.lake, config.storage), dict[str, list[str]]()
    if duckdb is not None:
        published[duckdb] = duckdb_file.publish(tables, duckdb, uses_delta_scan=delta_scan)
    if spark_schema is not None:
        with _spark(master, remote) as spark, _spark_errors("publish"):
            published[spark_schema] = spark_catalogue.publish(spark, tables, spark_schema)
    text = "\n".join(f"Published {len(names)} tables and views in {place}" for place, names in published.items())
    printing.result(text, {"published": published})


@pipeline.command(examples=["holdfast pipeline warm"])
def warm() -> None:
    """Halve the start time of Spark on this machine.

    Java stores an archive of the classes that Spark loads, about 170 MB, in the user's cache folder.
    """
    with _require_spark():
        from holdfast.pipeline import sessions

        with printing.progress("Starting Spark and archiving its classes"):
            path = sessions.warm()
    printing.result(
        f"Created the class archive {path} ({path.stat().st_size:,} bytes)",
        {"path": str(path), "bytes": path.stat().st_size},
    )


def _run(
    names: Sequence[str],
    options: JobArguments,
    *,
    needs_lake: bool = True,
    follows: bool = False,
    health: str | None = None,
    **extra: "Unpack[JobOptions]",
) -> None:
    """Run jobs in one Spark session, print their results, and exit with 10 if one found damage."""
    config = _config(options, needs_lake=needs_lake)
    with _require_spark():
        observation = Observation(config, metrics=options.get("metrics"), lineage=options.get("lineage"))
    from holdfast.pipeline import jobs

    if not set(names) <= set(jobs.JOBS_WITHOUT_PLANE):
        _check_plane(config, creates="load" in names)
    results: list[JobResult] = []
    not_followed: JobOptions = {}
    needs_spark = not set(names) <= set(jobs.JOBS_WITHOUT_SPARK)
    with (
        observation.following(health) if follows else nullcontext(not_followed) as job_options,
        _spark(options["master"], options["remote"], ui=options.get("ui", False))
        if needs_spark
        else nullcontext() as spark,
        jobs.view_options(names, config) as shared,
    ):
        for name in names:
            with _bar(name) as bar, _spark_errors(name):
                progress = observation.progress([bar] if bar is not None else []) if bar or follows else None
                all_options = extra | job_options | shared[name]
                results.append(
                    jobs.run(name, spark, config, progress=progress, observers=observation.observers, **all_options)
                )
    _print(results, many=len(names) > 1)
    if not all(each.ok for each in results):
        click.get_current_context().exit(DAMAGED)


def _config(options: JobArguments, *, needs_lake: bool) -> "Config":
    with _require_spark():
        from holdfast.pipeline.config import PATIENCE_SECONDS, Config
        from holdfast.pipeline.lake.locations import parse_location

    lake = options["lake"] or ""
    if needs_lake and not lake:
        raise InvalidArgument("A job needs a lake; give --lake (a folder or s3://BUCKET/PATH), or set HOLDFAST_LAKE")
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
        key_file=_absolute_path(options.get("key_file")),
        redact_file=_absolute_path(options.get("redact")),
        reducer=options.get("reducer"),
    )


def _absolute_path(path: str | None) -> str | None:
    """An absolute path, which Spark workers resolve too."""
    return path and os.path.abspath(path)


def _check_plane(config: "Config", *, creates: bool) -> None:
    """Raise if the plane of a mistyped URL cannot be opened, before Spark starts."""
    if config.data.startswith(("http://", "https://")):
        config.tls()
        _check_reachable(config.data, given_options().get("patience", connect.PATIENCE_SECONDS))
    elif config.data.startswith("dir:") and not creates:
        from holdfast.plane.formats import check_exists

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
                raise Unreachable(f"{url} does not answer ({error}); check that `holdfast serve` runs there") from error
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
def _require_spark() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("holdfast"):
            raise
        raise Unsupported(f"The pipeline needs {error.name}; {_INSTALL_SPARK}") from error


@contextmanager
def _spark(master: str | None, remote: str | None, *, ui: bool = False) -> "Iterator[SparkSession]":
    if ui and remote is not None:
        raise InvalidArgument("--ui is for a Spark that this command starts; a Spark Connect server has its own")
    with _require_spark():
        from holdfast.pipeline import sessions

        if not os.environ.get("HOLDFAST_DEBUG"):
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
def _spark_errors(job: str) -> Iterator[None]:
    """Convert an error of Spark to Backend, with the cause from its trace."""
    with _require_spark():
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


def _print(results: "Sequence[JobResult]", *, many: bool) -> None:
    if wants_json():
        found = [msgspec.to_builtins(each) for each in results]
        if many:
            printing.rows(found, ())
        else:
            printing.record(found[0])
        return
    printing.rows([_summary(each) for each in results], ("job", "verdict", "rows", "seconds"))
    for each in results:
        for note in each.notes:
            click.echo(printing.escape_control(f"{each.job}: {note}"))
        for finding in each.findings[:_FINDINGS_SHOWN]:
            click.echo(printing.escape_control(f"✗ {each.job}: {_finding_text(finding)}"))
        if (more := len(each.findings) - _FINDINGS_SHOWN) > 0:
            click.echo(f"  and {more:,} more; --json has them all")


def _print_status(found: "LakeStatus") -> None:
    if wants_json():
        printing.record(msgspec.to_builtins(found))
        return
    runs = [
        {**msgspec.structs.asdict(run), "started": _time(run.started_at), "completed": _time(run.completed_at)}
        for run in found.runs
    ]
    printing.rows(runs, ("job", "state", "started", "completed", "seconds", "findings"), empty="No job has run yet.")
    for run in found.runs:
        if run.error is not None:
            click.echo(printing.escape_control(f"✗ {run.job}: {' '.join(run.error.split())}"))
    click.echo()
    tables = [
        {
            **msgspec.structs.asdict(table),
            "committed": _time(table.committed_at),
            "lag": table.lag and f"{table.lag.amount:,} {table.lag.unit}",
        }
        for table in found.tables
    ]
    printing.rows(
        tables, ("table", "rows", "files", "bytes", "committed", "marks", "quarantined", "lag"), empty="No tables yet."
    )


def _time(at: datetime | None) -> str | None:
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S}Z"


def _summary(result: "JobResult") -> dict[str, Any]:
    rows = ", ".join(f"{table} {count:,}" for table, count in result.rows.items() if count)
    verdict = "ok" if result.ok else f"{len(result.findings):,} findings"
    return {"job": result.job, "verdict": verdict, "rows": rows or "nothing new", "seconds": round(result.seconds, 1)}


def _finding_text(finding: dict[str, Any]) -> str:
    """A finding as text: the location, the reason, then its other fields."""
    rest = {key: value for key, value in finding.items() if value is not None}
    location = "/".join(str(rest.pop(key)) for key in ("universe", "world") if key in rest)
    height = f" at {rest.pop('height')}" if "height" in rest else ""
    reason = f": {rest.pop('reason')}" if "reason" in rest else ""
    more = f" ({', '.join(f'{key} {value}' for key, value in rest.items())})" if rest else ""
    return f"{location}{height}{reason}{more}"
