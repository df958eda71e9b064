"""`fastness gc` and `fastness space`: delete what nothing needs any more, and show what is kept and why."""

from datetime import UTC, datetime

import click
import msgspec

from fastness.cli import connect, printing
from fastness.cli.commands import LeafCommand, wants_json
from fastness.cli.durations import SECONDS
from fastness.cli.exit_codes import DAMAGED
from fastness.cli.sizes import size_text
from fastness.plurals import counted
from fastness.wire.space import Collected, LastCollection, SpaceReport, SpaceUse, StandbyStatus, StorageStatus


@click.command(
    cls=LeafCommand,
    examples=["fastness gc --dry-run", "fastness gc", "fastness --url dir:./data gc --grace 1h"],
)
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted now.")
@click.option(
    "--grace",
    "grace_seconds",
    type=SECONDS,
    help="How long an unreferenced blob is kept.  [default: gc_grace_seconds of the server; 1 day]",
)
def gc(dry_run: bool, grace_seconds: float | None) -> None:
    """Deletes blobs that no message, world, snapshot, state or other data names, and that are not pinned.

    A blob goes in two steps, each after the grace period: first its record, then its body in the object store, which a
    reader or a backup may still need. A server does this by itself every hour. Covers all universes.

    If anything cannot be read, nothing is deleted, because it might name any blob. Exit code 10 says so.
    """
    with connect.open_plane() as plane:
        done = plane.gc(dry_run=dry_run, grace_seconds=grace_seconds)
    printing.result("\n".join(_collected_lines(done)), msgspec.to_builtins(done))
    click.get_current_context().exit(DAMAGED if done.unsearched else 0)


@click.command(cls=LeafCommand, examples=["fastness space", "fastness space --status", "fastness space --json"])
@click.option(
    "--status", is_flag=True, help="Only show the key space, the disk and the last collection. Reads no data."
)
def space(status: bool) -> None:
    """Shows how much it takes, why it is kept, and until when. Reads the whole key space."""
    target = connect.current_target()
    with connect.open_plane() as plane:
        if status:
            found = plane.storage_status()
            if wants_json():
                printing.record(msgspec.to_builtins(found))
            else:
                click.echo(printing.escape_control("\n".join(_status_lines(found, is_server=target.is_server))))
            return
        report = plane.space()
    if wants_json():
        printing.record(msgspec.to_builtins(report))
    else:
        _print_report(report, is_server=target.is_server)


def storage_warnings(status: StorageStatus) -> list[str]:
    """What an operator must know of a failed key space and of a disk that is nearly full."""
    warnings = []
    if status.failure is not None:
        warnings.append(
            f"The key space has failed and refuses writes ({status.failure}). A server reopens it by itself once the "
            "cause is gone, for example once a full disk has space; its log has the cause."
        )
    if status.disk_low:
        refused = "all writes are refused" if status.refuses_writes else "new data is refused"
        works = "Reads" if status.refuses_writes else "Reads, acks and deletes"
        warnings.append(
            f"The disk is nearly full: {_size(status.disk_free_bytes)} are free and the reserve is "
            f"{_size(status.disk_reserve_bytes)}, so {refused}. {works} still work. Free disk space; `fastness space` "
            "shows what is stored."
        )
    return warnings


def _print_report(report: SpaceReport, *, is_server: bool) -> None:
    printing.rows(
        [_row(use) for use in report.uses],
        ["universe", "kind", "count", "size", "reason", "kept"],
        empty="Nothing is stored.",
    )
    lines = [f"Total: {size_text(sum(use.bytes for use in report.uses))}", *_status_lines(report.status, is_server)]
    if report.unsearched:
        lines.append("No blob can be deleted, because these could not be searched; run `fastness doctor`:")
        lines += [f"  {text}" for text in report.unsearched]
    else:
        lines.append("See what can be deleted now: fastness gc --dry-run")
    click.echo(printing.escape_control("\n".join(lines)), err=True)


def _row(use: SpaceUse) -> dict[str, object]:
    kept = use.until if use.next_ms is None else f"{use.until}; the first one goes at {_time_text(use.next_ms)}"
    return {
        "universe": use.universe or "-",
        "kind": use.kind,
        "count": f"{use.count:,}",
        "size": size_text(use.bytes),
        "reason": use.reason,
        "kept": kept,
    }


def _status_lines(status: StorageStatus, is_server: bool) -> list[str]:
    lines = storage_warnings(status)
    if status.failure is None:
        refused = "all writes" if status.refuses_writes else "new data"
        lines.append(f"Key space: refuses {refused}" if status.disk_low else "Key space: works")
    if status.disk_free_bytes is not None:
        free, reserve = _size(status.disk_free_bytes), _size(status.disk_reserve_bytes)
        lines.append(f"Disk: {free} free; new data is refused while less than {reserve} are free (disk_reserve_bytes)")
    if status.standby is not None:
        lines.append(_standby_line(status.standby))
    if is_server:
        lines.append(_collection_line(status.collection))
    return lines


def _standby_line(standby: StandbyStatus) -> str:
    if not standby.answers:
        return "Stale reads: from the primary; no standby has answered (read_from)"
    lag = "unknown" if standby.lag_ms is None else f"{standby.lag_ms:,} ms"
    return f"Stale reads: from a standby that has replayed the log up to {standby.position}; lag {lag}"


def _collection_line(last: LastCollection) -> str:
    if last.succeeded_ms is None:
        line = "Last collection: none since the server started; the first one is after gc_every_seconds"
    elif last.result is None:
        line = f"Last collection: {_time_text(last.succeeded_ms)}; nothing was due"
    else:
        deleted, freed = counted(last.result.deleted, "blob"), counted(last.result.freed, "body", "bodies")
        size = size_text(last.result.deleted_bytes)
        line = f"Last collection: {_time_text(last.succeeded_ms)}; deleted {deleted} ({size}) and {freed}"
    if last.error is not None:
        line += f"\nThe last attempt failed: {last.error}. It is repeated; try it now: fastness gc"
    return line


def _collected_lines(done: Collected) -> list[str]:
    verb = "Would delete" if done.dry_run else "Deleted"
    deleted, waiting = counted(done.deleted, "unreferenced blob"), counted(done.waiting, "unreferenced blob")
    later = "large bodies stay for another grace period, for readers and backups"
    next_one = "`fastness space` shows when the next one goes"
    lines = [
        f"{verb} {deleted} ({size_text(done.deleted_bytes)})" + (f"; {later}" if done.deleted else ""),
        f"{verb} {counted(done.freed, 'body', 'bodies')} of blobs that were deleted earlier",
        f"In the grace period: {waiting} ({size_text(done.waiting_bytes)})" + (f"; {next_one}" if done.waiting else ""),
        f"Kept: {counted(done.kept, 'blob')} ({size_text(done.kept_bytes)}), pinned or named by other data",
    ]
    if done.unsearched:
        lines.append("No blob can be deleted, because these could not be searched; run `fastness doctor`:")
        lines += [f"  {text}" for text in done.unsearched]
    elif done.dry_run and done.deleted + done.freed:
        lines.append("Dry run: nothing was deleted. Delete this with: fastness gc")
    elif done.dry_run:
        lines.append("Dry run: nothing can be deleted now")
    return lines


def _size(size: int | None) -> str:
    return size_text(size or 0)


def _time_text(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
