"""`fastness world`: journals with an inbox and snapshots."""

import time
from typing import Any, Final

import cbor2
import click
import msgspec

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.durations import SECONDS
from fastness.errors import InvalidArgument, InvalidValue
from fastness.handles.sync.plane import Plane
from fastness.limits import BATCH_ENTRIES_MAX, READ_ENTRIES_MAX, SEGMENT_ENTRIES, SEGMENT_MARGIN
from fastness.wire.hosting import HostingInfo
from fastness.wire.inboxes import Control, DomainEvent, InboxItem
from fastness.wire.worlds import Described, Record

_COLUMNS: Final = ("name", "state", "head", "created_at")


world = CommandGroup(completions={"name": completion.worlds})


@world.command()
@click.argument("name")
@click.option("--manifest", "manifest_hash", metavar="HASH", help="The hash of the world's manifest.")
@click.option("--program", help="The program that hosts run the world with.")
def create(name: str, manifest_hash: str | None, program: str | None) -> None:
    """Create a world."""
    with connect.open_plane(create=True) as plane:
        _print(plane.world(name).create(manifest_hash=manifest_hash, program=program))


@world.command("list")
@click.option("--after", default="", help="Start after this name.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="The maximum number of results.")
def list_(after: str, limit: int) -> None:
    """List the worlds, with their state and head."""
    with connect.open_plane() as plane:
        found = [plane.world(name).describe() for name in plane.worlds(after=after, limit=limit)]
    printing.rows([_fields(each) for each in found], _COLUMNS, empty="No worlds.")


@world.command()
@click.argument("name")
def show(name: str) -> None:
    """Show a world: its state, head, snapshots and inbox."""
    with connect.open_plane() as plane:
        found = plane.world(name)
        fields = _fields(found.describe())
        if fields["state"] != "deleting":
            fields |= {
                "baseline": found.snapshots.baseline().height,
                "snapshots": [each.height for each in found.snapshots.list(limit=1_000)],
                "segments": [[each.start, each.end] for each in found.segments(limit=1_000)],
                "inbox_cursor": found.inbox.cursor(),
            }
    printing.record(fields)


@world.command(
    examples=[
        'fastness world append ada \'{"said": "hello"}\' --expected-head 0',
        "cat events.jsonl | fastness world append ada --lines -",
    ]
)
@click.argument("name")
@click.argument("entries", metavar="[JSON]…", nargs=-1)
@click.option("--lines", metavar="PATH", help="Append every line of this file as an entry; - is standard input.")
@click.option("--expected-head", type=int, help="The expected height of the first entry.  [default: the current head]")
def append(name: str, entries: tuple[str, ...], lines: str | None, expected_head: int | None) -> None:
    """Append entries to the journal.

    Arguments are one batch; a file is appended in batches of 256.
    """
    found = [values.parse_json(each) for each in entries]
    if lines is not None:
        with values.open_input(None, lines) as stream:
            found += [values.parse_json(line) for line in stream if line.strip()]
    if not found:
        raise InvalidArgument("Nothing to append; give entries as JSON, or --lines PATH")
    with connect.open_plane() as plane:
        journal = plane.world(name)
        head = first = journal.head() if expected_head is None else expected_head
        with printing.progress("Entries", len(found)) as advance:
            for start in range(0, len(found), BATCH_ENTRIES_MAX):
                batch = found[start : start + BATCH_ENTRIES_MAX]
                head = journal.append(batch, expected_head=head) + len(batch)
                advance(len(batch))
    printing.result(f"The head of {name} is {head}", {"world": name, "height": first, "head": head})


@world.command(examples=["fastness world tail ada -n 20", "fastness world tail ada --follow --json"])
@click.argument("name")
@click.option(
    "-n", "count", type=click.IntRange(0, READ_ENTRIES_MAX), default=10, help="How many records to show.  [default: 10]"
)
@click.option("--from", "start", type=click.IntRange(0), help="Start at this height instead.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new records until interrupted.")
@click.option("--interval", type=SECONDS, default=0.5, help="How often to check for new records.  [default: 0.5]")
def tail(name: str, count: int, start: int | None, follow: bool, interval: float) -> None:
    """Show the last records of the journal."""

    with connect.PlaneCaller(connect.current_target()) as caller:
        described = caller.call(lambda plane: plane.world(name).describe())
        height = max(described.head - count, 0) if start is None else start

        def read_on(plane: Plane) -> list[Record]:
            return plane.world(name, incarnation=described.incarnation).read(height)

        while True:
            found = caller.call(read_on)
            for record in found:
                _print_record(record)
            if found:
                height = found[-1].height + 1
            elif follow:
                time.sleep(interval)
            else:
                return


@world.group(completions={"name": completion.worlds})
def inbox() -> None:
    """Manage the inbox of a world, which receives its events."""


@inbox.command(
    examples=[
        "fastness world inbox put ada greeting@1 hi",
        'fastness world inbox put ada --item \'{"type": "timer_fired", "timer_id": "t-1"}\'',
    ]
)
@click.argument("name")
@click.argument("schema", required=False)
@click.argument("payload", required=False)
@click.option("--file", metavar="PATH", help="Read the payload from a file; - is standard input.")
@click.option("--item", metavar="JSON", help="A complete item as JSON, with its type and bytes as base64.")
@click.option("--control", metavar="COMMAND", help="Put a control item with this command.")
def put(
    *, name: str, schema: str | None, payload: str | None, file: str | None, item: str | None, control: str | None
) -> None:
    """Append an item to the inbox.

    It is an event with SCHEMA and PAYLOAD, or the item of an option.
    """
    with connect.open_plane() as plane:
        sequence = plane.world(name).inbox.put(_item(schema, payload, file, item, control))
    printing.result(f"Put item {sequence} into the inbox of {name}", {"world": name, "sequence": sequence})


@inbox.command()
@click.argument("name")
@click.option("--after", type=int, help="Start after this item.  [default: the last drained item]")
@click.option(
    "-n", "count", type=click.IntRange(1, READ_ENTRIES_MAX), default=100, help="The maximum number of results."
)
def read(name: str, after: int | None, count: int) -> None:
    """List the items of the inbox that are not drained yet."""
    with connect.open_plane() as plane:
        box = plane.world(name).inbox
        found = box.read(after=box.cursor() if after is None else after, limit=count)
    rows = [{"sequence": sequence, "item": msgspec.to_builtins(each)} for sequence, each in found]
    printing.rows(rows, ("sequence", "item"), empty="No items to drain.")


@world.command()
@click.argument("name")
@click.option(
    "--limit",
    type=click.IntRange(1, BATCH_ENTRIES_MAX),
    default=BATCH_ENTRIES_MAX,
    help="The maximum number of items.",
)
def drain(name: str, limit: int) -> None:
    """Move the next inbox items into the journal, each once."""
    with connect.open_plane() as plane:
        heights = plane.world(name).drain(limit=limit)
    printing.result(f"Moved {len(heights)} items into the journal of {name}", {"world": name, "heights": heights})


@world.command(
    examples=[
        "fastness world snapshot ada '{\"count\": 2}' --height 2",
        "fastness world snapshot ada --file state.json --height 2 --no-promote",
    ]
)
@click.argument("name")
@click.argument("state", required=False)
@click.option("--file", metavar="PATH", help="Read the state as JSON from a file; - is standard input.")
@click.option("--height", type=int, required=True, help="The height below which all records are applied.")
@click.option(
    "--promote/--no-promote",
    default=None,
    help="Fail unless it becomes the baseline that restores start from, or only store it.  [default: make it the "
    "baseline if it qualifies]",
)
@click.option(
    "--receipt-horizon",
    "receipt_horizon_height",
    type=int,
    help="The height below which all receipts are included.  [default: from the pending effects]",
)
@click.option(
    "--manifest",
    "manifest_hash",
    metavar="HASH",
    help="The hash of the world's manifest at that height.  [default: from the journal]",
)
def snapshot(
    *,
    name: str,
    state: str | None,
    file: str | None,
    height: int,
    promote: bool | None,
    receipt_horizon_height: int | None,
    manifest_hash: str | None,
) -> None:
    """Store a snapshot for restores to start from.

    It is the state after applying all records below --height. Restores start from the newest one.
    """
    with values.open_input(state, file) as stream:
        value = values.parse_json(stream.read())
    with connect.open_plane() as plane:
        found = plane.world(name).snapshots.commit(
            value,
            height=height,
            promote=promote,
            receipt_horizon_height=receipt_horizon_height,
            manifest_hash=manifest_hash,
        )
    printing.record(msgspec.structs.asdict(found))


@world.command()
@click.argument("name")
@click.argument("height", type=int)
def promote(name: str, height: int) -> None:
    """Make the snapshot at HEIGHT the baseline of restores."""
    with connect.open_plane() as plane:
        printing.record(msgspec.structs.asdict(plane.world(name).snapshots.promote(height)))


@world.command()
@click.argument("name")
@click.option(
    "--entries", type=int, default=SEGMENT_ENTRIES, show_default=True, help="The number of records per segment."
)
@click.option(
    "--margin",
    type=int,
    default=SEGMENT_MARGIN,
    show_default=True,
    help="How many records below the baseline stay in the key space.",
)
def compact(name: str, entries: int, margin: int) -> None:
    """Move old journal records to the object store. Reads still return them."""
    with connect.open_plane() as plane:
        found = plane.world(name).compact(entries=entries, margin=margin)
    text = f"Moved {found.records:,} records of {name} into {found.segments:,} new segments"
    printing.result(text, {"world": name, **msgspec.structs.asdict(found)})


@world.command(
    examples=["fastness world program order-17", "fastness world program order-17 counter"],
)
@click.argument("name")
@click.argument("program", required=False)
@click.option("--remove", is_flag=True, help="Remove the program: no host runs the world any more.")
def program(name: str, program: str | None, remove: bool) -> None:
    """Show how hosts run a world, or set its PROGRAM. Another program takes the world from its host."""
    if program is not None and remove:
        raise InvalidArgument("Give a program, or --remove, but not both")
    with connect.open_plane() as plane:
        found = plane.world(name)
        _print_hosting(found.hosting() if program is None and not remove else found.set_program(program))


@world.command("resume-program")
@click.argument("name")
def resume_program(name: str) -> None:
    """Let hosts run a world again that an error has stopped."""
    with connect.open_plane() as plane:
        _print_hosting(plane.world(name).resume_program())


@world.group(completions={"name": completion.worlds})
def aside() -> None:
    """Manage items that their program kept failing to handle."""


@aside.command("list")
@click.argument("name")
@click.option("--after", type=int, help="Start after this item.")
@click.option(
    "-n", "count", type=click.IntRange(1, READ_ENTRIES_MAX), default=100, help="The maximum number of results."
)
def list_aside(name: str, after: int | None, count: int) -> None:
    """List the items that were set aside, with their errors."""
    with connect.open_plane() as plane:
        found = plane.world(name).aside(after=after, limit=count)
    rows = [printing.fields(each, item=msgspec.to_builtins(each.item)) for each in found]
    printing.rows(rows, ("sequence", "set_aside_at", "error", "item"), empty="No items are set aside.")


@aside.command()
@click.argument("name")
@click.argument("sequence", type=click.IntRange(0))
def retry(name: str, sequence: int) -> None:
    """Put an item back at the end of the inbox."""
    with connect.open_plane() as plane:
        plane.world(name).retry_aside(sequence)
    printing.result(f"Put item {sequence} back into the inbox of {name}", {"world": name, "sequence": sequence})


@aside.command("delete")
@click.argument("name")
@click.argument("sequence", type=click.IntRange(0))
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete_aside(name: str, sequence: int, yes: bool) -> None:
    """Permanently delete an item that was set aside."""
    values.confirm(f"Permanently delete item {sequence} of {name}?", yes=yes)
    with connect.open_plane() as plane:
        plane.world(name).drop_aside(sequence)
    printing.result(f"Deleted item {sequence} of {name}", {"world": name, "sequence": sequence})


@world.command()
@click.argument("name")
@click.argument("target")
@click.option("--height", type=int, required=True, help="The height below which the history is shared.")
def fork(name: str, target: str, height: int) -> None:
    """Create the world TARGET with the history of NAME.

    TARGET shares the history below --height.
    """
    with connect.open_plane() as plane:
        _print(plane.world(name).fork(target, height=height).describe())


@world.command()
@click.argument("name")
def pause(name: str) -> None:
    """Stop accepting appends and drains."""
    with connect.open_plane() as plane:
        _print(plane.world(name).pause())


@world.command()
@click.argument("name")
def resume(name: str) -> None:
    """Resume a paused or archived world."""
    with connect.open_plane() as plane:
        _print(plane.world(name).resume())


@world.command()
@click.argument("name")
def archive(name: str) -> None:
    """Make a world read-only."""
    with connect.open_plane() as plane:
        _print(plane.world(name).archive())


@world.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(name: str, yes: bool) -> None:
    """Permanently delete an archived world. A world created under its name later is its next incarnation."""
    values.confirm(f"Permanently delete the world {name} and its history?", yes=yes)
    with connect.open_plane() as plane:
        _print(plane.world(name).delete())


@world.command(
    examples=["fastness world policy --sends-to bank,shop", "fastness --universe bank world policy --accepts-from main"]
)
@click.option("--sends-to", metavar="UNIVERSES", help="Universes to send to: a,b or *, or none.")
@click.option("--accepts-from", metavar="UNIVERSES", help="Universes whose sends are accepted: a,b or *, or none.")
def policy(sends_to: str | None, accepts_from: str | None) -> None:
    """Show between which universes worlds may send events.

    Options replace the lists.
    """
    is_changed = sends_to is not None or accepts_from is not None
    with connect.open_plane(create=is_changed) as plane:
        if is_changed:
            found = plane.hosting.set_policy(sends_to=_universes(sends_to), accepts_from=_universes(accepts_from))
        else:
            found = plane.hosting.policy()
    printing.record({"sends_to": found.sends_to, "accepts_from": found.accepts_from})


def _universes(given: str | None) -> list[str] | None:
    if given is None:
        return None
    return [] if given == "none" else [each.strip() for each in given.split(",")]


def _item(
    schema: str | None, payload: str | None, file: str | None, item: str | None, control: str | None
) -> InboxItem:
    if item is not None:
        try:
            found: InboxItem = msgspec.json.decode(item, type=InboxItem)
            return found
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidValue(f"Invalid item ({error}); it must be JSON with a type, and bytes as base64") from None
    data = b""
    if payload is not None or file is not None:
        with values.open_input(payload, file) as stream:
            data = stream.read()
    if control is not None:
        return Control(command=control, payload=data)
    if schema is None:
        raise InvalidArgument("An event needs a schema; give SCHEMA and PAYLOAD, or --control, or --item")
    return DomainEvent(schema=schema, payload=data)


def _print_record(record: Record) -> None:
    value = printing.jsonable(cbor2.loads(record.value))
    text = f"{record.height:>8}  {record.kind:<8}  {printing.compact(value)}"
    printing.line({"height": record.height, "kind": record.kind, "value": value}, text)


def _print(found: Described) -> None:
    printing.record(_fields(found))


def _print_hosting(found: HostingInfo) -> None:
    printing.record(
        {
            "name": found.world,
            "program": found.program,
            "host": found.owner,
            "held_until": printing.timestamp(found.expires_ms),
            "ready_at": printing.timestamp(found.ready_ms),
            "failed_attempts": found.attempts,
            "is_stopped": found.is_stopped,
            "set_aside": found.set_aside,
            "error": found.error,
        }
    )


def _fields(found: Described) -> dict[str, Any]:
    return printing.fields(found, "hot", "baseline")
