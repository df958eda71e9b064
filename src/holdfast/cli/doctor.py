"""`holdfast doctor`: is what a plane keeps sound, and if not, what is wrong with it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from holdfast.cli import connect, directories, printing
from holdfast.cli.commands import Verb, wants_json
from holdfast.cli.exit_codes import DAMAGED
from holdfast.errors import Corrupt, PathUnusable
from holdfast.plane.formats import check_marker
from holdfast.wire.health_checks import Finding, Seen


class Checkup(msgspec.Struct):
    """One kind of thing that was looked at: how many of them there are, and what was found."""

    name: str
    looked_at: int = 0
    findings: list[Finding] = []


@click.command(
    cls=Verb,
    examples=[
        "holdfast doctor ./data",
        "holdfast --url dir:./data doctor --deep --json",
        "holdfast --url http://127.0.0.1:9440 doctor",
    ],
)
@click.argument("path", required=False)
@click.option("--deep", is_flag=True, help="Hash every blob, not a sample of the large ones.")
def doctor(path: str | None, deep: bool) -> None:
    """Look at a data directory, or have a server look at its own: is everything there, whole, and in agreement?

    Looks at the format, opens the key space, reads all of it, and compares: blobs with their hashes, journals with
    their heads, segments with their checksums, the tallies of queues with a count. A server does this on a copy of its
    key space, as it is at one moment, and goes on meanwhile; its token must allow doctor:run in every universe. A
    directory must not be open elsewhere. Repairs nothing. Exit code 10 says that something is damaged.
    """
    place = connect.target()
    if path is not None:
        place = msgspec.structs.replace(place, url=path if "://" in path or path.startswith("dir:") else f"dir:{path}")
    if place.is_server:
        where, left = place.url, []
        with connect.opened(place) as plane:
            found = _gathered(plane.backups.examine(deep=deep))
    else:
        folder = directories.path_of(place, what_for="doctor")
        where, left = str(folder), sorted(folder.glob(".backup-*"))
        found = _gathered(_examined(folder, place, deep=deep))
    findings = [finding for checkup in found for finding in checkup.findings]
    if wants_json():
        fields: dict[str, Any] = {
            "path": where,
            "sound": not findings,
            "looked_at": {checkup.name: checkup.looked_at for checkup in found},
            "findings": [msgspec.to_builtins(finding) for finding in findings],
        }
        printing.record(fields)
    else:
        _print(where, found, findings, left)
    click.get_current_context().exit(DAMAGED if findings else 0)


def _examined(folder: Path, place: connect.Target, *, deep: bool) -> Iterator[Seen]:
    """Look at one kind of thing after the other; what cannot be opened at all is a finding, and the last one."""
    from holdfast.runtime.maintenance import health_checks
    from holdfast.runtime.maintenance.checkpoints import looked_at

    try:
        check_marker(folder)
        database = directories.open_key_space(folder, place.patience_seconds)
    except (Corrupt, PathUnusable) as error:
        yield Seen("data directory", 1, Finding(str(folder), str(error)))
        return
    yield Seen("data directory", 1)
    with database:
        objects = directories.objects_of(folder, place)
        for name, look in health_checks.every(database, objects, deep=deep).items():
            yield from (line.seen for line in looked_at(name, look()) if line.seen is not None)


def _gathered(seen: Iterable[Seen]) -> list[Checkup]:
    """What was seen, by kind, with a progress bar for each while it comes."""
    found: list[Checkup] = []
    rest = iter(seen)
    each = next(rest, None)
    while each is not None:
        checkup = Checkup(each.name)
        found.append(checkup)
        with printing.progress(f"Looking at {each.name}") as advance:
            while each is not None and each.name == checkup.name:
                advance(each.looked_at - checkup.looked_at)
                checkup.looked_at = each.looked_at
                if each.finding is not None:
                    checkup.findings = [*checkup.findings, each.finding]
                each = next(rest, None)
    return found


def _print(where: str, found: list[Checkup], findings: list[Finding], left: list[Path]) -> None:
    for checkup in found:
        mark = "✗" if checkup.findings else "✓"
        click.echo(f"{mark} {checkup.name}: {checkup.looked_at:,} looked at")
    for folder in left:
        click.echo(f"  {folder} was left by a backup that was not finished; finish it, or remove this folder")
    for finding in findings:
        click.echo(printing.clean(f"✗ {finding.where}: {finding.what}; {finding.advice}"))
    click.echo(f"{where} is sound" if not findings else f"{where} has {len(findings):,} faults")
