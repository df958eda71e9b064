"""`fastness pipeline`: Spark jobs that copy history into the tables of a lake, audit it, and summarise it.

Every command starts Spark on this machine, unless --master or --remote selects another one.
"""

import os
from typing import Unpack

import click

from fastness.cli import printing
from fastness.cli.commands import CommandGroup, given_options
from fastness.cli.durations import SECONDS
from fastness.cli.exit_codes import DAMAGED
from fastness.cli.pipeline_observers import health_option, metrics_option
from fastness.cli.pipeline_options import (
    LAKE,
    STORAGE,
    JobArguments,
    LakeArguments,
    SourceArguments,
    job_arguments,
    job_options,
    lake_options,
    named_sources,
    reducer_option,
    retention,
    source_options,
)
from fastness.cli.pipeline_output import print_status
from fastness.cli.pipeline_runs import (
    check_plane,
    configure,
    require_spark,
    run_jobs,
    start_spark,
    translate_spark_errors,
)
from fastness.errors import InvalidArgument

pipeline = CommandGroup()


@pipeline.command(
    examples=[
        "fastness pipeline run --data ./data --lake ./lake",
        "fastness pipeline run --data http://127.0.0.1:9440 --lake s3://bucket/lake --master spark://host:7077",
    ]
)
@job_options
@reducer_option
def run(**options: Unpack[JobArguments]) -> None:
    """Run the regular jobs, in their order.

    The order is ingest, audit, reachability, contents, rollup and report.

    Exit code 10 means that the audit found damage; the other jobs run anyway.
    """
    from fastness.pipeline import jobs

    run_jobs(jobs.FULL_RUN, options)


@pipeline.command(
    examples=[
        "fastness pipeline ingest --data ./data --lake ./lake",
        "fastness pipeline ingest --data http://127.0.0.1:9440 --lake ./lake --follow --health 0.0.0.0:8080",
    ]
)
@job_options
@click.option("--follow", is_flag=True, help="Keep ingesting new data until SIGTERM or an interrupt.")
@health_option
def ingest(follow: bool, health: str | None, **options: Unpack[JobArguments]) -> None:
    """Copy new data into the lake, each row exactly once.

    Data that cannot be read becomes a row of the table `quarantine`, with the reason.
    """
    if health is not None and not follow:
        raise InvalidArgument("--health answers while --follow runs; give both")
    run_jobs(["ingest"], options, follows=follow, health=health)


@pipeline.command(examples=["fastness pipeline audit --data ./data --lake ./lake --json"])
@job_options
@reducer_option
def audit(**options: Unpack[JobArguments]) -> None:
    """Check every checksum of the plane and the lake.

    Also checks the heights, baselines and restores of every world.

    Exit code 10 means that data is damaged; the output names the world and the height, or the damaged object and what
    it affects.
    """
    run_jobs(["audit"], options)


@pipeline.command(examples=["fastness pipeline reachability --data ./data --lake ./lake"])
@job_options
def reachability(**options: Unpack[JobArguments]) -> None:
    """Find blobs that nothing refers to, and their size. Nothing is deleted."""
    run_jobs(["reachability"], options)


@pipeline.command(
    examples=[
        "fastness pipeline contents --data ./data --lake ./lake",
        "fastness pipeline contents --data http://127.0.0.1:9440 --lake ./lake --payloads",
    ]
)
@job_options
@click.option("--payloads", is_flag=True, help="Also copy the content of messages and mail.")
def contents(payloads: bool, **options: Unpack[JobArguments]) -> None:
    """Copy what queues, mailboxes and states hold now.

    Also copies leases, schedules and tokens.

    Each run replaces the rows of the one before, and adds the changes of state documents to `state_changes`.
    """
    run_jobs(["contents"], options, payloads=payloads)


@pipeline.command(examples=["fastness pipeline rollup --data ./data --lake ./lake"])
@job_options
def rollup(**options: Unpack[JobArguments]) -> None:
    """Summarise latency, throughput, retries and storage.

    Also summarises dead letters, mailboxes and locks.
    """
    run_jobs(["rollup"], options)


@pipeline.command(
    examples=[
        "fastness pipeline report --data ./data --lake ./lake",
        "fastness pipeline report --data http://127.0.0.1:9440 --lake ./lake --universe main --publish",
    ]
)
@job_options
@click.option(
    "--publish",
    is_flag=True,
    help="Also store the totals in the plane, as the report `pipeline` of the universe, which agents read over MCP.",
)
def report(publish: bool, **options: Unpack[JobArguments]) -> None:
    """Write an HTML page with plots of the results of `rollup`."""
    run_jobs(["report"], options, publish=publish)


@pipeline.command(
    examples=[
        "fastness pipeline live --data http://127.0.0.1:9440 --lake ./lake --health 0.0.0.0:8080",
        "fastness pipeline live --data ./data --lake ./lake --once",
    ]
)
@job_options
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
    """Count the events of queues by minute, as they come.

    Writes the table `live_queue_minutes`, with Spark's Structured Streaming.

    Each event counts once, whenever the process is killed: the next one continues from the checkpoint.
    """
    if options["universes"]:
        raise InvalidArgument("`live` aggregates all universes of the plane; remove --universe, and select later")
    if health is not None and once:
        raise InvalidArgument("--health answers while the query runs; remove --once")
    run_jobs(
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
        "fastness pipeline load jobs.jsonl --data http://127.0.0.1:9440 --queue jobs --name 2026-11-15 --key id",
        "fastness pipeline load mails.parquet --data ./data --target mail --name welcome",
    ]
)
@job_options
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
    """Put rows into queues, mailboxes or inboxes, once each.

    The rows are of SOURCE, files or a table.

    Columns are named after the fields they set. Without a payload column, the columns that set no field become the JSON
    payload.
    """
    if len(options["universes"]) > 1:
        raise InvalidArgument("Rows that name no universe go into one universe; give --universe only once")
    run_jobs(
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
        "fastness pipeline accept --data ./restored --lake ./lake",
        "fastness pipeline accept --data ./data --lake ./lake --world ada",
        "fastness pipeline accept --data ./data --lake ./lake --kind order --lost",
    ]
)
@job_options
@click.option("--world", "worlds", metavar="NAME", multiple=True, help="Accept only this world. Repeatable.")
@click.option("--kind", "kinds", metavar="KIND", multiple=True, help="Accept only this kind of entity. Repeatable.")
@click.option(
    "--lost", is_flag=True, help="Also confirm that quarantined rows are lost: they are no findings any more."
)
def accept(worlds: tuple[str, ...], kinds: tuple[str, ...], lost: bool, **options: Unpack[JobArguments]) -> None:
    """Continue the lake with a plane that was restored.

    Rows of the lake that the plane no longer has move to the table `superseded`; the next ingest adds what the plane
    has instead. Without a restore, the same is done for the sources that are quarantined as `rewound`. Stop other jobs
    of the lake first.
    """
    run_jobs(["accept"], options, worlds=worlds, kinds=kinds, lost=lost)


@pipeline.command(
    examples=[
        "fastness pipeline reset --data ./data --lake ./lake --world ada",
        "fastness pipeline reset --data ./data --lake ./lake --universe main --all --allow-loss",
    ]
)
@job_options
@source_options
@click.option("--allow-loss", is_flag=True, help="Also remove rows that the plane no longer has: they are lost.")
def reset(allow_loss: bool, **options: Unpack[SourceArguments]) -> None:
    """Drop the rows of sources, so that they are read again.

    The next ingest reads them from the start.

    If the plane no longer has some of the rows, nothing is removed, and the exit code is 5: an ingest would not bring
    them back.
    """
    chosen = named_sources(options)
    chosen["allow_loss"] = allow_loss
    run_jobs(["reset"], options, **chosen)


@pipeline.command(
    examples=[
        "fastness pipeline backfill --data ./data --lake ./lake --world ada",
        "fastness pipeline backfill --data ./data --lake ./lake --all --activity ./restored-logs",
        "fastness pipeline backfill --data ./data --lake ./lake --kind order --lost",
    ]
)
@job_options
@source_options
@click.option("--lost", is_flag=True, help="Confirm that rows which are still missing are lost.")
def backfill(lost: bool, **options: Unpack[SourceArguments]) -> None:
    """Ingest sources again, and report what differs.

    Reads them from the start, and adds rows that the lake lacks.

    Exit code 10 means that rows differ, or are missing and not confirmed as lost. No row is changed or removed.
    """
    chosen = named_sources(options)
    chosen["lost"] = lost
    run_jobs(["backfill"], options, **chosen)


@pipeline.command(
    examples=[
        "fastness pipeline forget --data ./data --lake ./lake --deleted --vacuum",
        "fastness pipeline forget --data ./data --lake ./lake --match mail.sender=ada --vacuum --key-file key",
    ]
)
@job_options
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
    """Remove worlds, queues or a person's rows from the lake.

    Later jobs do not bring them back.

    With --vacuum, exit code 10 means that a file of the lake still has one of the names. Stop other jobs of the lake
    first. The plane itself is not changed.
    """
    run_jobs(
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


@pipeline.command(
    examples=[
        "fastness pipeline vacuum --lake ./lake",
        "fastness pipeline vacuum --lake ./lake --retain activity=90d --retain queue_events=30d",
    ]
)
@job_options
@click.option(
    "--retain",
    metavar="TABLE=AGE",
    multiple=True,
    envvar="FASTNESS_LAKE_RETAIN",
    help="Remove rows of this table that are older, such as activity=90d, by whole days in UTC. Repeatable.",
)
def vacuum(retain: tuple[str, ...], **options: Unpack[JobArguments]) -> None:
    """Remove unused files of the lake, and merge small files.

    With --retain, first remove old rows. They are not ingested again, and roll-ups keep what they have counted.
    """
    run_jobs(["vacuum"], options, retain=retention(retain))


@pipeline.command(
    examples=[
        "fastness pipeline status --lake ./lake",
        "fastness pipeline status --lake s3://bucket/lake --data http://127.0.0.1:9440 --json",
    ]
)
@lake_options
@metrics_option
def status(metrics: str | None, **options: Unpack[LakeArguments]) -> None:
    """Show the last run of each job, and the tables of the lake.

    Also shows how far they are behind the plane.

    The lag is measured if --data or --url is given. Exit code 10 means that data is quarantined, or that the last
    run of a job found damage.
    """
    config = configure(job_arguments(options), needs_lake=True)
    with require_spark():
        from fastness.pipeline.observation import metrics as prometheus
        from fastness.pipeline.observation.status import lake_status
        from fastness.pipeline.views import open_view

    if options["data"] or given_options().get("url") or os.environ.get("FASTNESS_URL"):
        check_plane(config, creates=False)
        with open_view(config) as view:
            found = lake_status(config, view)
    else:
        found = lake_status(config)
    if metrics is not None:
        prometheus.write_file(metrics, prometheus.registry(found.runs, found.tables))
    print_status(found)
    if found.is_damaged:
        click.get_current_context().exit(DAMAGED)


@pipeline.command(
    examples=[
        "fastness pipeline publish --lake ./lake --duckdb lake.duckdb",
        "fastness pipeline publish --lake s3://bucket/lake --spark-schema lake --remote sc://spark.example:15002",
    ]
)
@LAKE
@STORAGE
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
    """Register the tables of the lake in DuckDB or Spark.

    Also registers views over them.

    The DuckDB file shows the lake as it is now: publish it again after a run.
    """
    if duckdb is None and spark_schema is None:
        raise InvalidArgument("Nothing to publish to; give --duckdb FILE or --spark-schema NAME")
    if delta_scan and duckdb is None:
        raise InvalidArgument("--delta-scan is for a DuckDB file; give --duckdb FILE")
    options: LakeArguments = {
        "data": None,
        "lake": lake,
        "universes": (),
        "storage": storage,
        "encryption_key_file": None,
    }
    config = configure(job_arguments(options), needs_lake=True)
    with require_spark():
        from fastness.pipeline.catalogue import duckdb_file
        from fastness.pipeline.catalogue import spark_schema as spark_catalogue
        from fastness.pipeline.lake import Lake
        from fastness.pipeline.observation.status import check_exists

    tables, published = Lake(config.lake, config.storage), dict[str, list[str]]()
    check_exists(tables)
    if duckdb is not None:
        published[duckdb] = duckdb_file.publish(tables, duckdb, uses_delta_scan=delta_scan)
    if spark_schema is not None:
        with start_spark(master, remote) as spark, translate_spark_errors("publish"):
            published[spark_schema] = spark_catalogue.publish(spark, tables, spark_schema)
    text = "\n".join(f"Published {len(names)} tables and views in {place}" for place, names in published.items())
    printing.result(text, {"published": published})


@pipeline.command(examples=["fastness pipeline warm"])
def warm() -> None:
    """Halve the start time of Spark on this machine.

    Java stores an archive of the classes that Spark loads, about 170 MB, in the user's cache folder.
    """
    with require_spark():
        from fastness.pipeline import sessions

        with printing.progress("Starting Spark and archiving its classes"):
            path = sessions.warm()
    printing.result(
        f"Created the class archive {path} ({path.stat().st_size:,} bytes)",
        {"path": str(path), "bytes": path.stat().st_size},
    )
