"""`holdfast world`: agents with a history."""

import time
from typing import Any, Final

import cbor2
import click
import msgspec

from holdfast.cli import connect, printing, values
from holdfast.cli.commands import Noun
from holdfast.cli.durations import SECONDS
from holdfast.errors import InvalidValue
from holdfast.limits import BATCH_ENTRIES_MAX, READ_ENTRIES_MAX, SEGMENT_ENTRIES, SEGMENT_MARGIN
from holdfast.wire.inboxes import Control, DomainEvent, InboxItem
from holdfast.wire.worlds import Described, Record

_SHOWN: Final = ("name", "state", "head", "created_at")


@click.group(cls=Noun)
def world() -> None:
    """Agents with a history: a journal, an inbox, snapshots."""


@world.command()
@click.argument("name")
@click.option("--manifest", "manifest_hash", metavar="HASH", help="What defines the world.")
def create(name: str, manifest_hash: str | None) -> None:
    """Make a world."""
    with connect.opened() as plane:
        _print(plane.world(name).create(manifest_hash=manifest_hash))


@world.command("list")
@click.option("--after", default="", help="Begin behind this name.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="At most so many.")
def list_(after: str, limit: int) -> None:
    """Worlds, with their state and head."""
    with connect.opened() as plane:
        found = [plane.world(name).describe() for name in plane.worlds(after=after, limit=limit)]
    printing.rows([_fields(each) for each in found], _SHOWN, nothing="There is no world yet.")


@world.command()
@click.argument("name")
def show(name: str) -> None:
    """A world's state, head, baseline, snapshots, segments and inbox."""
    with connect.opened() as plane:
        found = plane.world(name)
        fields = _fields(found.describe())
        if fields["state"] not in ("deleting", "deleted"):
            fields |= {
                "baseline": found.snapshots.baseline().height,
                "snapshots": [each.height for each in found.snapshots.list(limit=1_000)],
                "segments": [[each.start, each.end] for each in found.segments(limit=1_000)],
                "inbox_cursor": found.inbox.cursor(),
            }
    printing.record(fields)


@world.command(
    examples=[
        'holdfast world append ada \'{"said": "hello"}\' --expected-head 0',
        "cat events.jsonl | holdfast world append ada --lines -",
    ]
)
@click.argument("name")
@click.argument("entries", metavar="[JSON]…", nargs=-1)
@click.option("--lines", metavar="PATH", help="Every line of this file is an entry; - is standard input.")
@click.option("--expected-head", type=int, help="The height of the first entry.  [default: whatever the head is]")
def append(name: str, entries: tuple[str, ...], lines: str | None, expected_head: int | None) -> None:
    """Append entries to the journal, as one batch; a file in batches of 256."""
    found = [values.json_value(each) for each in entries]
    if lines is not None:
        with values.source(None, lines) as stream:
            found += [values.json_value(line) for line in stream if line.strip()]
    if not found:
        raise InvalidValue("There is nothing to append; give entries as JSON, or --lines PATH")
    with connect.opened() as plane:
        journal = plane.world(name)
        head = first = journal.head() if expected_head is None else expected_head
        with printing.progress("Entries", len(found)) as advance:
            for start in range(0, len(found), BATCH_ENTRIES_MAX):
                batch = found[start : start + BATCH_ENTRIES_MAX]
                head = journal.append(batch, expected_head=head) + len(batch)
                advance(len(batch))
    printing.done(f"The head of {name} is {head}", {"world": name, "height": first, "head": head})


@world.command(examples=["holdfast world tail ada -n 20", "holdfast world tail ada --follow --json"])
@click.argument("name")
@click.option(
    "-n", "count", type=click.IntRange(0, READ_ENTRIES_MAX), default=10, help="The last so many.  [default: 10]"
)
@click.option("--from", "start", type=click.IntRange(0), help="Begin at this height instead.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until it is interrupted.")
@click.option("--interval", type=SECONDS, default=0.5, help="How often to look for more.  [default: 0.5]")
def tail(name: str, count: int, start: int | None, follow: bool, interval: float) -> None:
    """The records of the journal."""

    with connect.Visits(connect.target()) as visits:
        height = start
        if height is None:
            height = max(visits.call(lambda plane: plane.world(name).head()) - count, 0)
        while True:
            found = visits.call(lambda plane, height=height: plane.world(name).read(height))  # type: ignore[misc]
            for record in found:
                _print_record(record)
            if found:
                height = found[-1].height + 1
            elif follow:
                time.sleep(interval)
            else:
                return


@world.group()
def inbox() -> None:
    """What comes into a world from outside."""


@inbox.command(
    examples=[
        "holdfast world inbox put ada greeting@1 hi",
        'holdfast world inbox put ada --item \'{"type": "timer_fired", "timer_id": "t-1"}\'',
    ]
)
@click.argument("name")
@click.argument("schema", required=False)
@click.argument("payload", required=False)
@click.option("--file", metavar="PATH", help="Take the payload from a file; - is standard input.")
@click.option("--item", metavar="JSON", help="A whole item, with its type; bytes as base64.")
@click.option("--control", metavar="COMMAND", help="Put a control item instead.")
def put(
    *, name: str, schema: str | None, payload: str | None, file: str | None, item: str | None, control: str | None
) -> None:
    """Put an item behind all others: an event with a SCHEMA and a PAYLOAD, unless an option says otherwise."""
    with connect.opened() as plane:
        sequence = plane.world(name).inbox.put(_item(schema, payload, file, item, control))
    printing.done(f"It is item {sequence} of {name}", {"world": name, "sequence": sequence})


@inbox.command()
@click.argument("name")
@click.option("--after", type=int, help="Begin behind this item.  [default: behind the last one that was drained]")
@click.option("-n", "count", type=click.IntRange(1, READ_ENTRIES_MAX), default=100, help="At most so many.")
def read(name: str, after: int | None, count: int) -> None:
    """Items of the inbox."""
    with connect.opened() as plane:
        box = plane.world(name).inbox
        found = box.read(after=box.cursor() if after is None else after, limit=count)
    rows = [{"sequence": sequence, "item": msgspec.to_builtins(each)} for sequence, each in found]
    printing.rows(rows, ("sequence", "item"), nothing="There is nothing to drain.")


@world.command()
@click.argument("name")
@click.option("--limit", type=click.IntRange(1, BATCH_ENTRIES_MAX), default=BATCH_ENTRIES_MAX, help="At most so many.")
def drain(name: str, limit: int) -> None:
    """Move the next items of the inbox into the journal, each exactly once."""
    with connect.opened() as plane:
        heights = plane.world(name).drain(limit=limit)
    printing.done(f"{len(heights)} items are in the journal of {name}", {"world": name, "heights": heights})


@world.command(
    examples=["holdfast world snapshot ada '{\"count\": 2}' --height 2 --promote --receipt-horizon 2 --manifest …"]
)
@click.argument("name")
@click.argument("state", required=False)
@click.option("--file", metavar="PATH", help="Take the state, as JSON, from a file; - is standard input.")
@click.option("--height", type=int, required=True, help="All records below it are applied.")
@click.option("--promote", is_flag=True, help="Make it the baseline that a restore starts from.")
@click.option("--receipt-horizon", "receipt_horizon_height", type=int, help="All receipts below it are in.")
@click.option("--manifest", "manifest_hash", metavar="HASH", help="What defines the world at that height.")
def snapshot(name: str, state: str | None, file: str | None, **options: Any) -> None:
    """Store the state that all records below --height lead to."""
    with values.source(state, file) as stream:
        value = values.json_value(stream.read())
    with connect.opened() as plane:
        found = plane.world(name).snapshots.commit(value, **options)
    printing.record(msgspec.structs.asdict(found))


@world.command()
@click.argument("name")
@click.option("--entries", type=int, default=SEGMENT_ENTRIES, show_default=True, help="Records in a segment.")
@click.option("--margin", type=int, default=SEGMENT_MARGIN, show_default=True, help="Below the baseline that stay hot.")
def compact(name: str, entries: int, margin: int) -> None:
    """Move the cold end of the journal into the object store. Reading does not change."""
    with connect.opened() as plane:
        found = plane.world(name).compact(entries=entries, margin=margin)
    said = f"{found.records:,} records of {name} are in {found.segments:,} new segments"
    printing.done(said, {"world": name, **msgspec.structs.asdict(found)})


@world.command()
@click.argument("name")
@click.argument("target")
@click.option("--height", type=int, required=True, help="What is below it is shared.")
def fork(name: str, target: str, height: int) -> None:
    """Make a world TARGET with the history of NAME below a height."""
    with connect.opened() as plane:
        _print(plane.world(name).fork(target, height=height).describe())


@world.command()
@click.argument("name")
def pause(name: str) -> None:
    """Take no more appends and drains."""
    with connect.opened() as plane:
        _print(plane.world(name).pause())


@world.command()
@click.argument("name")
def resume(name: str) -> None:
    """Go on after a pause, or out of the archive."""
    with connect.opened() as plane:
        _print(plane.world(name).resume())


@world.command()
@click.argument("name")
def archive(name: str) -> None:
    """Take nothing any more; everything stays readable."""
    with connect.opened() as plane:
        _print(plane.world(name).archive())


@world.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(name: str, yes: bool) -> None:
    """Remove an archived world for good. Its name stays taken."""
    values.confirmed(f"Remove the world {name} and all of its history?", yes=yes)
    with connect.opened() as plane:
        _print(plane.world(name).delete())


def _item(
    schema: str | None, payload: str | None, file: str | None, item: str | None, control: str | None
) -> InboxItem:
    if item is not None:
        try:
            found: InboxItem = msgspec.json.decode(item, type=InboxItem)
            return found
        except msgspec.MsgspecError as error:
            raise InvalidValue(f"This is no item ({error}); it is JSON with a type, and bytes as base64") from None
    data = b""
    if payload is not None or file is not None:
        with values.source(payload, file) as stream:
            data = stream.read()
    if control is not None:
        return Control(command=control, payload=data)
    if schema is None:
        raise InvalidValue("An event has a schema; give SCHEMA and PAYLOAD, or --control, or --item")
    return DomainEvent(schema=schema, payload=data)


def _print_record(record: Record) -> None:
    value = printing.jsonable(cbor2.loads(record.value))
    text = f"{record.height:>8}  {record.kind:<8}  {printing.compact(value)}"
    printing.line({"height": record.height, "kind": record.kind, "value": value}, text)


def _print(found: Described) -> None:
    printing.record(_fields(found))


def _fields(found: Described) -> dict[str, Any]:
    return {
        "name": found.name,
        "state": found.state,
        "head": found.head,
        "created_at": printing.moment(found.created_ms),
    }
