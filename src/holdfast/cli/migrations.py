"""`holdfast migrate`: a plane from a data directory to PostgreSQL and S3, or back, whole and compared."""

import os
from contextlib import ExitStack
from typing import Any

import click

from holdfast.cli import connect, printing
from holdfast.cli.commands import Verb, given
from holdfast.errors import InvalidArgument, PlaneInUse
from holdfast.layers.migrations import Migration, State
from holdfast.names import folder_at
from holdfast.plane.formats import check_marker
from holdfast.plane.migrations import check_unused, folder_of, opened_source, opened_target, said
from holdfast.runtime.maintenance.migrations import Migrator


@click.command(
    cls=Verb,
    examples=[
        "holdfast migrate dir:./data postgresql://me@db/plane --objects s3://bucket/plane",
        "holdfast migrate postgresql://me@db/plane dir:./data --objects s3://bucket/plane",
        "holdfast migrate dir:./data dir:/mnt/new/data",
    ],
)
@click.argument("source")
@click.argument("target")
@click.option("--from-objects", metavar="URL", help="Where the objects of SOURCE are, if elsewhere.")
@click.option("--to-objects", metavar="URL", help="Where the objects of TARGET go, if elsewhere.")
@click.option("--activity", metavar="DIR", help="Session logs of SOURCE that are not in its object store yet.")
@click.option("--leave-activity", is_flag=True, help="Leave session logs where they are.")
def migrate(source: str, target: str, *, activity: str | None, leave_activity: bool, **stores: str | None) -> None:
    """Copy everything of the plane SOURCE to TARGET, and compare the two.

    SOURCE and TARGET are dir:PATH or postgresql://…; --objects is the object store of whichever is a PostgreSQL. Nobody
    may use SOURCE meanwhile, and nothing is written to it. TARGET must be empty, and cannot be opened before the
    migration is complete. One that was interrupted goes on where it was when it is run again. In the end every range of
    keys was compared by its digest, and every object was read back and hashed.
    """
    source, target = (url if ":" in url else f"dir:{url}" for url in (source, target))
    _check_places(source, target)
    from_objects = stores["from_objects"] or _shared_objects(source)
    to_objects = stores["to_objects"] or _shared_objects(target)
    logs = None if activity is None else folder_at(activity)
    with ExitStack() as stack:
        here = connect.patiently(
            lambda: stack.enter_context(opened_source(source, objects=from_objects, logs=logs)),
            connect.target().patience_seconds,
        )
        there = stack.enter_context(opened_target(target, objects=to_objects))
        mover = Migrator(here, there, said(source), with_logs=not leave_activity)
        is_new = _moved(mover, target, here.keys)
    moved = mover.now
    fields = {"source": said(source), "target": said(target), **_fields(moved)}
    if is_new:
        text = (
            f"{moved.keys:,} keys, {moved.objects:,} objects ({moved.object_bytes:,} bytes) and {moved.logs:,} session "
            f"logs that were not among them are in {said(target)}; all {moved.ranges:,} ranges of keys are equal to "
            f"those of {said(source)}, and every object has its hash. The digest of the keys is {moved.digest.hex()}"
        )
    else:
        text = (
            f"{said(source)} was migrated to {said(target)} before, and compared at {fields['ended_at']}; nothing was "
            "done now"
        )
    printing.done(text, fields)


def _moved(mover: Migrator, target: str, keys: int) -> bool:
    """Migrate what is not migrated yet; whether there was anything."""
    check_unused(target)
    if is_begun := mover.begin():
        try:
            check_unused(target)  # Once more, behind the record that keeps others out: nobody slips in between.
        except PlaneInUse:
            mover.withdraw()
            raise
        with printing.progress("Objects") as advance:
            mover.move_objects(advance)
        with printing.progress("Keys", max(keys - mover.now.keys, 0) or None) as advance:
            mover.copy_keys(advance)
        with printing.progress("Comparing keys", mover.copied or max(keys - mover.now.keys, 0) or None) as advance:
            mover.compare_keys(advance)
        mover.finish()
    return is_begun


def _shared_objects(url: str) -> str | None:
    """What --objects says; a directory has its own."""
    if url.startswith("dir:"):
        return None
    return given().get("objects") or os.environ.get("HOLDFAST_OBJECTS")


def _check_places(source: str, target: str) -> None:
    if said(source) == said(target):
        raise InvalidArgument("SOURCE and TARGET are the same plane; name another target")
    if source.startswith("dir:"):
        folder = folder_of(source)
        check_marker(folder)
        if target.startswith("dir:") and folder.resolve() in folder_of(target).resolve().parents:
            raise InvalidArgument(f"{target} lies inside {source}; choose a place outside of what is migrated")


def _fields(moved: Migration) -> dict[str, Any]:
    counts = ("keys", "ranges", "again", "objects", "object_bytes", "logs")
    return {
        "verified": moved.state is State.DONE,
        **{name: getattr(moved, name) for name in counts},
        "digest": moved.digest.hex(),
        "began_at": printing.moment(moved.began_ms),
        "ended_at": printing.moment(moved.ended_ms),
    }
