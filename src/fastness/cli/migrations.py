"""`fastness migrate`: copies a plane between a directory and PostgreSQL with S3, or upgrades its tables in place."""

import os
from contextlib import ExitStack
from typing import Any

import click

from fastness.cli import connect, printing
from fastness.cli.commands import LeafCommand, given_options
from fastness.cli.encryption_options import key_file_option
from fastness.encryption_keys import provider_of
from fastness.errors import InvalidArgument, PlaneInUse
from fastness.kv.formats import OLDEST_FORMAT
from fastness.layers.migrations import Migration, State
from fastness.names import folder_at
from fastness.plane.formats import check_marker
from fastness.plane.migrations import (
    check_unused,
    folder_of,
    opened_source,
    opened_target,
    upgrade_sql,
    upgrade_tables,
    without_password,
)
from fastness.runtime.maintenance.migrations import Migrator


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness migrate dir:./data postgresql://me@db/plane --objects s3://bucket/plane",
        "fastness migrate postgresql://me@db/plane dir:./data --objects s3://bucket/plane",
        "fastness migrate dir:./data dir:/mnt/new/data",
        "fastness migrate postgresql://owner@db/plane",
        "fastness migrate --sql postgresql://owner@db/plane > upgrade.sql",
    ],
)
@click.argument("source")
@click.argument("target", required=False)
@click.option("--from-objects", metavar="URL", help="The object store of SOURCE, if not the default.")
@click.option("--to-objects", metavar="URL", help="The object store of TARGET, if not the default.")
@click.option(
    "--activity", metavar="DIR", help="The folder of SOURCE's session logs that are not in its object store yet."
)
@click.option("--leave-activity", is_flag=True, help="Do not copy session logs.")
@key_file_option
@click.option("--sql", "as_sql", is_flag=True, help="Without TARGET: print the SQL of the upgrade, and change nothing.")
def migrate(
    *,
    source: str,
    target: str | None,
    from_objects: str | None,
    to_objects: str | None,
    activity: str | None,
    leave_activity: bool,
    encryption_key_file: str | None,
    as_sql: bool,
) -> None:
    """SOURCE and TARGET are dir:PATH or postgresql://…; --objects is the object store of the PostgreSQL side. No other
    process may use SOURCE during the migration, and nothing is written to it. TARGET must be empty, and cannot be
    opened before the migration is complete. Run the command again to resume an interrupted migration. At the end, every
    key range has been compared by its digest, and every object has been read back and hashed. Universes that are
    encrypted in SOURCE are encrypted in TARGET, with the same keys.

    Without TARGET, the command creates the tables of the PostgreSQL plane SOURCE, or upgrades those of an older version
    in place, as their owner. Stop all servers and workers first: some upgrades are refused while one is connected.
    """
    if target is None:
        if from_objects or to_objects or activity or leave_activity:
            raise InvalidArgument("TARGET is missing; an upgrade in place copies no objects and no session logs")
        _upgrade(source, as_sql=as_sql)
        return
    if as_sql:
        raise InvalidArgument("--sql prints the SQL that upgrades the tables of SOURCE; leave TARGET out")
    source, target = (url if ":" in url else f"dir:{url}" for url in (source, target))
    _check_paths(source, target)
    from_objects = from_objects or _shared_objects(source)
    to_objects = to_objects or _shared_objects(target)
    logs = None if activity is None else folder_at(activity)
    keys = provider_of(encryption_key_file, None)
    with ExitStack() as stack:
        source_side = connect.retry_while_in_use(
            lambda: stack.enter_context(opened_source(source, objects=from_objects, logs=logs, encryption=keys)),
            connect.current_target().patience_seconds,
        )
        target_side = stack.enter_context(opened_target(target, objects=to_objects, encryption=keys))
        migrator = Migrator(source_side, target_side, without_password(source), with_logs=not leave_activity)
        is_new = _migrate(migrator, target, source_side.keys)
    migration = migrator.progress
    from_text, to_text = without_password(source), without_password(target)
    fields = {"source": from_text, "target": to_text, **_fields(migration)}
    if is_new:
        text = (
            f"Copied {migration.keys:,} keys, {migration.objects:,} objects ({migration.object_bytes:,} bytes) and "
            f"{migration.logs:,} session logs to {to_text}. All {migration.ranges:,} key ranges are equal to those of "
            f"{from_text}, and all checksums match. The digest of the keys is {migration.digest.hex()}"
        )
    else:
        text = f"{from_text} was already migrated to {to_text}, and compared at {fields['ended_at']}; nothing to do"
    printing.result(text, fields)


def _upgrade(url: str, *, as_sql: bool) -> None:
    if ":" not in url or url.startswith("dir:"):
        raise InvalidArgument("TARGET is missing; only the tables of a postgresql:// plane are upgraded in place")
    name = without_password(url)
    if as_sql:
        statements = upgrade_sql(url)
        advice = "Run this as their owner, with all servers stopped." if statements else "They are up to date."
        text = f"-- The tables of {name}. {advice}\n{statements}"
        printing.result(text.rstrip(), {"target": name, "sql": statements})
        return
    before, after = upgrade_tables(url)
    if before == after:
        text = f"The tables of {name} have schema version {after}; nothing to do"
    elif before:
        text = f"Upgraded the tables of {name} from schema version {before} to {after}"
    else:
        text = f"Created the tables of {name} with schema version {after}"
    printing.result(text, {"target": name, "schema_before": before, "schema": after})


def _migrate(migrator: Migrator, target: str, keys: int) -> bool:
    """Migrate what is not migrated yet. Returns False if the migration was already complete."""
    check_unused(target)
    if is_begun := migrator.begin():
        try:
            check_unused(
                target
            )  # Checked again after the record that locks others out, so no process can open it in between.
        except PlaneInUse:
            migrator.withdraw()
            raise
        with printing.progress("Objects") as advance:
            migrator.copy_objects(advance)
        with printing.progress("Keys", max(keys - migrator.progress.keys, 0) or None) as advance:
            migrator.copy_keys(advance)
        with printing.progress(
            "Comparing keys", migrator.copied or max(keys - migrator.progress.keys, 0) or None
        ) as advance:
            migrator.compare_keys(advance)
        migrator.finish()
    return is_begun


def _shared_objects(url: str) -> str | None:
    """The value of --objects, for PostgreSQL. A data directory has its own object store."""
    if url.startswith("dir:"):
        return None
    return given_options().get("objects") or os.environ.get("FASTNESS_OBJECTS")


def _check_paths(source: str, target: str) -> None:
    if without_password(source) == without_password(target):
        raise InvalidArgument("SOURCE and TARGET are the same plane; name another target")
    if source.startswith("dir:"):
        folder = folder_of(source)
        check_marker(folder, oldest=OLDEST_FORMAT)
        if target.startswith("dir:") and folder.resolve() in folder_of(target).resolve().parents:
            raise InvalidArgument(f"{target} is inside {source}; choose a target outside the migrated directory")


def _fields(migration: Migration) -> dict[str, Any]:
    counts = ("keys", "ranges", "again", "objects", "object_bytes", "logs")
    return {
        "verified": migration.state is State.DONE,
        **{name: getattr(migration, name) for name in counts},
        "digest": migration.digest.hex(),
        "began_at": printing.timestamp(migration.began_ms),
        "ended_at": printing.timestamp(migration.ended_ms),
    }
