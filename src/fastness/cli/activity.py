"""`fastness activity`: session logs, including the events that the plane itself logs."""

import time
from collections import deque
from typing import Final

import click
import msgspec

from fastness.cli import connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.durations import SECONDS
from fastness.cli.operations import operation
from fastness.errors import InvalidValue
from fastness.handles.sync.plane import Plane
from fastness.wire.activity import ListLogs, LoggedRecord

_PAGE: Final = 1_000


activity = CommandGroup()


@activity.command(examples=['fastness activity log build-17 \'{"step": "compile", "ms": 812}\''])
@click.argument("session")
@click.argument("record", required=False)
@click.option("--file", metavar="PATH", help="Read records from a file, one per line; - is standard input.")
@click.option("--kind", default="activity", show_default=True, help="The kind of log within the session.")
def log(session: str, record: str | None, file: str | None, kind: str) -> None:
    """Log a JSON object, or one object per line of a file."""
    with values.open_input(record, file) as stream:
        found = [values.parse_json(line) for line in stream if line.strip()]
    if not all(isinstance(each, dict) for each in found):
        raise InvalidValue('A record must be a JSON object, as in \'{"step": "compile"}\'')
    with connect.open_plane(create=True) as plane:
        plane.activity.log_many(session, found, kind=kind)
    printing.result(f"Logged {len(found)} records", {"session": session, "count": len(found)})


@activity.command(
    examples=["fastness activity tail --kind queues -n 50", "fastness activity tail --session build-17 -f"]
)
@click.option("--session", help="Show only this session.")
@click.option("--kind", help="Show only this kind; `queues` has the events of messages.")
@click.option("-n", "count", type=click.IntRange(0), default=10, help="How many records to show.  [default: 10]")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new records until interrupted.")
@click.option("--interval", type=SECONDS, default=1.0, help="How often to check for new records.  [default: 1]")
def tail(session: str | None, kind: str | None, count: int, follow: bool, interval: float) -> None:
    """Show the last records of the logs."""
    position: str | None = None

    def read(plane: Plane) -> list[LoggedRecord]:
        """The records since the last read; the first read returns only the last `count`."""
        nonlocal position
        is_first = position is None
        records: deque[LoggedRecord] = deque(maxlen=count if is_first else None)
        while True:
            page = plane.activity.read(session=session, kind=kind, after=position, limit=_PAGE).records
            records.extend(page)
            if page:
                position = f"{page[-1].file}:{page[-1].n}"
            if len(page) < _PAGE:
                return list(records)

    with connect.PlaneCaller(connect.current_target()) as caller:
        while True:
            for each in caller.call(read):
                _print(each)
            if not follow:
                return
            time.sleep(interval)


operation(activity, "files", ListLogs, columns=("name", "rotated", "size", "path"), empty="No logs.")


def _print(logged: LoggedRecord) -> None:
    at, record = printing.timestamp(logged.at_ms), msgspec.json.decode(logged.record)
    fields = {"at": at, "session": logged.session, "kind": logged.kind, "n": logged.n, "record": record}
    printing.line(fields, f"{at}  {logged.session}  {logged.kind}  {printing.compact(record)}")
