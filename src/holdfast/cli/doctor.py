"""`holdfast doctor`: is a data directory sound, and if not, what is wrong with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.cli import checkups, directories, planes, printing
from holdfast.cli.checkups import Finding, Seen
from holdfast.cli.commands import Verb, wants_json
from holdfast.cli.exits import DAMAGED
from holdfast.errors import Corrupt, PathUnusable

_SHOWN_MAX = 1_000  # Where everything is damaged, the first so many say enough.


class Checkup(msgspec.Struct):
    """One kind of thing that was looked at: how many of them there are, and what was found."""

    name: str
    looked_at: int = 0
    findings: list[Finding] = []


@click.command(
    cls=Verb, examples=["holdfast doctor ./data", "holdfast --url dir:./data doctor --deep --json", "holdfast doctor"]
)
@click.argument("path", required=False)
@click.option("--deep", is_flag=True, help="Hash every blob, not a sample of the large ones.")
def doctor(path: str | None, deep: bool) -> None:
    """Look at a data directory that nobody has open: is everything there, whole, and in agreement?

    Looks at the format, opens the key space, reads all of it, and compares: blobs with their hashes, journals with
    their heads, segments with their checksums, the tallies of queues with a count. Repairs nothing. Exit code 10 says
    that something is damaged.
    """
    place = planes.target()
    if path is not None:
        place = msgspec.structs.replace(place, url=path if "://" in path or path.startswith("dir:") else f"dir:{path}")
    folder = directories.path_of(place, what_for="doctor")
    found = list(_examined(folder, place, deep=deep))
    findings = [finding for checkup in found for finding in checkup.findings]
    if wants_json():
        fields: dict[str, Any] = {
            "path": str(folder),
            "sound": not findings,
            "looked_at": {checkup.name: checkup.looked_at for checkup in found},
            "findings": [msgspec.to_builtins(finding) for finding in findings],
        }
        printing.record(fields)
    else:
        _print(folder, found, findings)
    click.get_current_context().exit(DAMAGED if findings else 0)


def _examined(folder: Path, place: planes.Target, *, deep: bool) -> Iterator[Checkup]:
    """Look at one kind of thing after the other; what cannot be opened at all is a finding, and the last one."""
    opening = Checkup("data directory", 1)
    try:
        directories.check_marker(folder)
        database = directories.open_key_space(folder, place.patience_seconds)
    except (Corrupt, PathUnusable) as error:
        opening.findings = [Finding(str(folder), str(error))]
        yield opening
        return
    yield opening
    with database:
        yield from _looked_through(database, folder, place, deep=deep)


def _looked_through(database: RocksDatabase, folder: Path, place: planes.Target, *, deep: bool) -> Iterator[Checkup]:
    objects = directories.objects_of(folder, place)
    yield _look("keys", lambda seen: checkups.key_space(database, seen))
    yield _look("blobs", lambda seen: checkups.all_blobs(database, objects, seen, deep=deep))
    yield _look("worlds", lambda seen: checkups.all_worlds(database, objects, seen))
    yield _look("messages", lambda seen: checkups.all_queues(database, seen))


def _look(name: str, examine: Callable[[Seen], Iterator[Finding]]) -> Checkup:
    checkup = Checkup(name)
    with printing.progress(f"Looking at {name}") as advance:

        def seen(count: int) -> None:
            checkup.looked_at += count
            advance(count)

        try:
            for finding in examine(seen):
                if len(checkup.findings) < _SHOWN_MAX:
                    checkup.findings = [*checkup.findings, finding]
        except Corrupt as error:
            checkup.findings = [*checkup.findings, Finding(name, f"they cannot all be looked at ({error})")]
    return checkup


def _print(folder: Path, found: list[Checkup], findings: list[Finding]) -> None:
    for checkup in found:
        mark = "✗" if checkup.findings else "✓"
        click.echo(f"{mark} {checkup.name}: {checkup.looked_at:,} looked at")
    for left in sorted(folder.glob(".backup-*")):
        click.echo(f"  {left} was left by a backup that was not finished; finish it, or remove this folder")
    for finding in findings:
        click.echo(printing.clean(f"✗ {finding.where}: {finding.what}; {finding.advice}"))
    click.echo(f"{folder} is sound" if not findings else f"{folder} has {len(findings):,} faults")
