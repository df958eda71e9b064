"""`holdfast gc` and `holdfast space`: delete what nothing needs any more, and show what is kept and why."""

import click
import msgspec

from holdfast.cli import connect, printing
from holdfast.cli.commands import LeafCommand, wants_json
from holdfast.cli.durations import SECONDS


@click.command(
    cls=LeafCommand,
    examples=["holdfast gc --dry-run", "holdfast gc", "holdfast --url dir:./data gc --grace 1h"],
)
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted now.")
@click.option(
    "--grace", "grace_seconds", type=SECONDS, help="How long an unreferenced blob is kept.  [default: of the plane]"
)
@click.option(
    "--with-old",
    is_flag=True,
    help="Also delete blobs of versions that did not record pins. Blobs whose hash is kept only elsewhere are lost.",
)
def gc(dry_run: bool, grace_seconds: float | None, with_old: bool) -> None:
    """Delete blobs that no message, world, snapshot, state or other data names, and that are not pinned.

    A blob goes in two steps, each after the grace period: first its record, then its body in the object store, which a
    reader or a backup may still need. A server does this by itself every hour. Covers all universes.
    """
    with connect.open_plane() as plane:
        done = plane.gc(dry_run=dry_run, grace_seconds=grace_seconds, with_old=with_old)
    verb = "Would delete" if dry_run else "Deleted"
    lines = [
        f"{verb} {done.deleted:,} unreferenced blobs ({done.deleted_bytes:,} bytes)",
        f"{verb} {done.freed:,} bodies of blobs that were deleted before",
        f"In their grace period: {done.waiting:,} unreferenced blobs ({done.waiting_bytes:,} bytes)",
        f"Kept: {done.kept:,} blobs ({done.kept_bytes:,} bytes)",
    ]
    if done.unsearched:
        lines.append("Nothing could be deleted, because these could not be searched; run `holdfast doctor`:")
        lines += [f"  {printing.escape_control(text)}" for text in done.unsearched]
    printing.result("\n".join(lines), msgspec.to_builtins(done))


@click.command(cls=LeafCommand, examples=["holdfast space", "holdfast space --json"])
def space() -> None:
    """Show what is kept in all universes, how much it takes, and why. Reads the whole key space."""
    with connect.open_plane() as plane:
        report = plane.space()
    if wants_json():
        printing.record(msgspec.to_builtins(report))
        return
    rows = [msgspec.to_builtins(use) for use in report.uses]
    printing.rows(rows, ["universe", "kind", "reason", "count", "bytes"], empty="Nothing is stored.")
    for text in report.unsearched:
        click.echo(printing.escape_control(f"Not searched: {text}"), err=True)
