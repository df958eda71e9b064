"""`holdfast activity`: session logs, and what the plane says of itself in them."""

import time
from collections import deque
from typing import Any, Final

import click
import msgspec

from holdfast.cli import connect, printing, values
from holdfast.cli.commands import Noun
from holdfast.cli.durations import SECONDS
from holdfast.errors import InvalidValue
from holdfast.handles import Plane
from holdfast.wire.activity import LoggedRecord

_PAGE: Final = 1_000


@click.group(cls=Noun)
def activity() -> None:
    """Session logs: what was put, leased, acked, and whatever you log."""


@activity.command(examples=['holdfast activity log build-17 \'{"step": "compile", "ms": 812}\''])
@click.argument("session")
@click.argument("record", required=False)
@click.option("--file", metavar="PATH", help="Take records from a file, one a line; - is standard input.")
@click.option("--kind", default="activity", show_default=True, help="Which log of the session.")
def log(session: str, record: str | None, file: str | None, kind: str) -> None:
    """Log a JSON object, or one a line from a file."""
    with values.source(record, file) as stream:
        found = [values.json_value(line) for line in stream if line.strip()]
    if not all(isinstance(each, dict) for each in found):
        raise InvalidValue('A record is a JSON object, as in \'{"step": "compile"}\'')
    with connect.opened() as plane:
        plane.activity.log_many(session, found, kind=kind)
    printing.done(f"{len(found)} records are logged", {"session": session, "count": len(found)})


@activity.command(
    examples=["holdfast activity tail --kind queues -n 50", "holdfast activity tail --session build-17 -f"]
)
@click.option("--session", help="Only this session.")
@click.option("--kind", help="Only this kind; `queues` is what the plane did with messages.")
@click.option("-n", "count", type=click.IntRange(0), default=10, help="The last so many.  [default: 10]")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until it is interrupted.")
@click.option("--interval", type=SECONDS, default=1.0, help="How often to look for more.  [default: 1]")
def tail(session: str | None, kind: str | None, count: int, follow: bool, interval: float) -> None:
    """The last records of the logs."""
    place: str | None = None

    def read(plane: Plane) -> list[LoggedRecord]:
        """What came since; of what was there before, only the last ones are kept."""
        nonlocal place
        is_first = place is None
        kept: deque[LoggedRecord] = deque(maxlen=count if is_first else None)
        while True:
            page = plane.activity.read(session=session, kind=kind, after=place, limit=_PAGE).records
            kept.extend(page)
            if page:
                place = f"{page[-1].file}:{page[-1].n}"
            if len(page) < _PAGE:
                return list(kept)

    with connect.Visits(connect.target()) as visits:
        while True:
            for each in visits.call(read):
                _print(each)
            if not follow:
                return
            time.sleep(interval)


@activity.command()
def files() -> None:
    """The files that hold the logs."""
    with connect.opened() as plane:
        found = plane.activity.files()
    rows: list[dict[str, Any]] = [msgspec.to_builtins(each) for each in found]
    printing.rows(rows, ("name", "rotated", "size", "path"), nothing="There is no log yet.")


def _print(logged: LoggedRecord) -> None:
    at, record = printing.moment(logged.at_ms), msgspec.json.decode(logged.record)
    fields = {"at": at, "session": logged.session, "kind": logged.kind, "n": logged.n, "record": record}
    printing.line(fields, f"{at}  {logged.session}  {logged.kind}  {printing.compact(record)}")
