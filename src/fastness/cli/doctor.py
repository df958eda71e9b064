"""`fastness doctor`: checks the stored data of a plane, and lists what is damaged."""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from fastness.cli import connect, directories, printing
from fastness.cli.commands import LeafCommand, wants_json
from fastness.cli.exit_codes import DAMAGED
from fastness.cli.space import storage_warnings
from fastness.errors import Corrupt, InvalidArgument, NotAllowed, PathUnusable
from fastness.handles.sync.plane import Plane
from fastness.names import folder_at
from fastness.plane.formats import check_exists, check_marker
from fastness.private_files import make_private, readable_by_others
from fastness.wire.health_checks import Finding, Seen
from fastness.wire.space import StorageStatus

if TYPE_CHECKING:
    from fastness.backends.rocksdb import RocksDatabase

_PATHS_SHOWN: Final = 5


class HealthCheck(msgspec.Struct):
    """The result of one health check: how many items were checked, and the findings."""

    name: str
    count: int = 0
    findings: list[Finding] = []


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness doctor ./data",
        "fastness --url dir:./data doctor --deep --json",
        "fastness --url http://127.0.0.1:9440 doctor",
        "fastness doctor ./data --salvage ./salvaged",
    ],
)
@click.argument("path", required=False)
@click.option("--deep", is_flag=True, help="Hash every blob and session log, instead of a sample of the large ones.")
@click.option("--fix", is_flag=True, help="Make a data directory and its files accessible to their owner only.")
@click.option("--salvage", metavar="TARGET", help="Copy what can be read to the new data directory TARGET.")
def doctor(path: str | None, deep: bool, fix: bool, salvage: str | None) -> None:
    """Checks the format, reads the whole key space, and compares blobs with their hashes, journals with their heads,
    segments and session logs with their checksums, and the counters of queues with their messages. Finds runs that no
    host would continue. A server checks a snapshot of its key space and keeps serving; the token must allow doctor:run
    in every universe. A data directory must not be open in another process. Damage is not repaired. Exit code 10 means
    that something was found.

    Lists what other users can access in a data directory; --fix changes the modes to 0700 and 0600.

    With --salvage, what can be read of a damaged data directory is copied to a new one, and what is lost is listed. The
    damaged directory is not changed. Run doctor on the copy afterwards. Exit code 10 means that something is lost.
    """
    target = connect.current_target()
    if path is not None:
        target = msgspec.structs.replace(
            target, url=path if "://" in path or path.startswith("dir:") else f"dir:{path}"
        )
    if salvage is not None:
        _salvage(directories.data_directory(target, purpose="salvage"), folder_at(salvage).absolute())
        return
    others: list[Path] = []
    warnings: list[str] = []
    identity: dict[str, str] = {}
    fixed = 0
    if target.is_server:
        if fix:
            raise InvalidArgument("--fix changes the modes of a data directory; run it where the server's data is")
        location, leftovers = target.url, []
        with connect.open_plane(target) as plane:
            warnings = _storage_warnings(plane)
            checks = _collect(plane.backups.examine(deep=deep))
            with suppress(NotAllowed):  # The token may allow checks only.
                status = plane.status()
                identity = {"plane": status.plane, "lineage": status.lineage}
    else:
        folder = directories.data_directory(target, purpose="doctor")
        location, leftovers = str(folder), sorted(folder.glob(".backup-*"))
        fixed = _make_private(folder) if fix else 0
        warnings = _shown(storage_warnings(_storage_status(folder)))
        checks = _collect(_check_directory(folder, target, identity, deep=deep))
        others = list(readable_by_others(folder)) if folder.is_dir() else []
    findings = [finding for check in checks for finding in check.findings]
    if wants_json():
        fields: dict[str, Any] = {
            "path": location,
            **identity,
            "sound": not findings,
            "looked_at": {check.name: check.count for check in checks},
            "findings": [msgspec.to_builtins(finding) for finding in findings],
            "readable_by_others": [str(path) for path in others],
            "fixed": fixed,
            "warnings": warnings,
        }
        printing.record(fields)
    else:
        _print(location, checks, findings, leftovers)
        if identity:
            click.echo(f"The plane is {identity['plane']}, its lineage {identity['lineage']}")
        _print_modes(location, others, fixed)
    click.get_current_context().exit(DAMAGED if findings else 0)


def _storage_warnings(plane: Plane) -> list[str]:
    """What is wrong with the key space and the disk of a server, printed before the checks, which may then fail."""
    try:
        warnings = storage_warnings(plane.storage_status())
    except NotAllowed:  # Of the token.
        return []
    return _shown(warnings)


def _storage_status(folder: Path) -> StorageStatus:
    """How full the disk of a data directory is, with the default reserve."""
    from fastness.backends.rocksdb.disk_needs import disk_space

    if not folder.is_dir():
        return StorageStatus()
    space = disk_space(folder)
    reserve_bytes = space.reserve_bytes_default
    return StorageStatus(
        disk_low=space.free_bytes < reserve_bytes, disk_free_bytes=space.free_bytes, disk_reserve_bytes=reserve_bytes
    )


def _shown(warnings: list[str]) -> list[str]:
    if not wants_json():
        for warning in warnings:
            click.echo(printing.escape_control(f"✗ {warning}"), err=True)
    return warnings


def _salvage(source: Path, target: Path) -> None:
    """Copy what can be read of a data directory, and list what is lost."""
    from fastness.cli.salvage import salvage_directory

    salvaged = salvage_directory(source, target)
    if wants_json():
        printing.record({"path": str(source), "target": str(target), **salvaged._asdict()})
    else:
        for what in salvaged.lost:
            click.echo(printing.escape_control(f"✗ lost: {what}"))
        click.echo(
            f"Copied {salvaged.pairs:,} pairs and {salvaged.files:,} files to {target}; {len(salvaged.lost):,} losses. "
            f"Check the copy with: fastness doctor --deep {target}"
        )
    click.get_current_context().exit(DAMAGED if salvaged.lost else 0)


def _check_directory(folder: Path, target: connect.Target, identity: dict[str, str], *, deep: bool) -> Iterator[Seen]:
    """Run one health check after the other. A key space that cannot be opened is the only finding.

    The plane's identity is added to `identity`.
    """
    from fastness.backends.objects.encrypted import encrypted
    from fastness.layers import lineages
    from fastness.runtime.maintenance import health_checks
    from fastness.runtime.maintenance.checkpoints import check_lines

    try:
        check_marker(folder)
        database = directories.open_key_space(folder, target.patience_seconds)
    except (Corrupt, PathUnusable) as error:
        yield Seen("data directory", 1, Finding(str(folder), str(error), advice=""))  # The error has its own.
        return
    yield Seen("data directory", 1, _watermark_finding(database))
    with database:
        if (found := database.read(lineages.load)) is not None:
            identity |= {"plane": found.plane, "lineage": found.lineage}
        stored = directories.open_object_store(folder, target)
        objects = None if stored is None else encrypted(stored, database)
        for name, run in health_checks.all_checks(database, objects, folder / "activity", deep=deep).items():
            yield from (line.seen for line in check_lines(name, run()) if line.seen is not None)


def _watermark_finding(database: "RocksDatabase") -> Finding | None:
    """What was wrong with the record of what was synced. Opening the directory has replaced it."""
    from fastness.backends.rocksdb.watermark import NAME

    if database.watermark_fault is None:
        return None
    advice = "if acknowledged data is missing, restore a backup; the file itself is replaced"
    return Finding(str(database.path / NAME), database.watermark_fault, advice)


def _make_private(folder: Path) -> int:
    check_exists(folder)  # Otherwise a mistyped path would change the modes of other files.
    try:
        return make_private(folder)
    except OSError as error:
        raise PathUnusable(
            f"The mode of {error.filename} cannot be changed ({error.strerror}); run doctor --fix as its owner"
        ) from error


def _print_modes(location: str, others: list[Path], fixed: int) -> None:
    if fixed:
        click.echo(f"Made {fixed:,} files and folders accessible to their owner only")
    for path in others[:_PATHS_SHOWN]:
        click.echo(printing.escape_control(f"  other users can access {path}"))
    if others:
        click.echo(
            f"{len(others):,} files and folders are accessible to other users; if that is not intended, run: "
            f"fastness doctor --fix {shlex.quote(location)}"
        )


def _collect(seen: Iterable[Seen]) -> list[HealthCheck]:
    """The results by health check, with a progress bar for each."""
    checks: list[HealthCheck] = []
    remaining = iter(seen)
    each = next(remaining, None)
    while each is not None:
        check = HealthCheck(each.name)
        checks.append(check)
        with printing.progress(f"Checking {each.name}") as advance:
            while each is not None and each.name == check.name:
                advance(each.looked_at - check.count)
                check.count = each.looked_at
                if each.finding is not None:
                    check.findings = [*check.findings, each.finding]
                each = next(remaining, None)
    return checks


def _print(location: str, checks: list[HealthCheck], findings: list[Finding], leftovers: list[Path]) -> None:
    for check in checks:
        mark = "✗" if check.findings else "✓"
        click.echo(f"{mark} {check.name}: {check.count:,} checked")
    for folder in leftovers:
        click.echo(f"  {folder} was left by an incomplete backup; run the backup again, or remove this folder")
    for finding in findings:
        advice = f"; {finding.advice}" if finding.advice else ""
        click.echo(printing.escape_control(f"✗ {finding.where}: {finding.what}{advice}"))
    click.echo(
        f"{location} is sound: all checksums match" if not findings else f"{location}: {len(findings):,} findings"
    )
