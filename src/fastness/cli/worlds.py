"""`fastness world`: journals with an inbox and snapshots."""

import time
from typing import Any

import cbor2
import click
import msgspec

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.durations import SECONDS
from fastness.cli.field_options import limit_option
from fastness.cli.operations import operation
from fastness.errors import InvalidArgument, InvalidValue
from fastness.handles.sync.plane import Plane
from fastness.limits import BATCH_ENTRIES_MAX, READ_ENTRIES_MAX
from fastness.wire.hosting import HostingInfo, ListAside, ResumeWorld, RetryAside
from fastness.wire.inboxes import Control, DomainEvent, InboxItem
from fastness.wire.worlds import (
    ChangeWorld,
    CompactWorld,
    CreateWorld,
    DeleteWorld,
    Described,
    DrainInbox,
    ForkWorld,
    PromoteSnapshot,
    Record,
    SurveyWorlds,
)


def _fields(found: Described) -> dict[str, Any]:
    return printing.fields(found, without=("hot", "baseline"))


def _hosting_fields(found: HostingInfo) -> dict[str, Any]:
    names = {"world": "name", "owner": "host", "expires_ms": "held_until", "attempts": "failed_attempts"}
    return printing.fields(found, without=("fence",), **names)


world = CommandGroup(completions=dict.fromkeys(("name", "world"), completion.worlds))


operation(world, "create", CreateWorld, help="Create a world.", show=_fields, create=True)
operation(world, "list", SurveyWorlds, columns=("name", "state", "head", "created_at"), show=_fields)


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


@world.group(completions=dict.fromkeys(("name", "world"), completion.worlds))
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
@limit_option("-n", 100, field="count")
def read(name: str, after: int | None, count: int) -> None:
    """List the items of the inbox that are not drained yet."""
    with connect.open_plane() as plane:
        box = plane.world(name).inbox
        found = box.read(after=box.cursor() if after is None else after, limit=count)
    rows = [{"sequence": sequence, "item": msgspec.to_builtins(each)} for sequence, each in found]
    printing.rows(rows, ("sequence", "item"), empty="No items to drain.")


operation(
    world,
    "drain",
    DrainInbox,
    text=lambda fields: f"Moved {len(fields['heights'])} items into the journal of {fields['world']}",
    show=lambda drained: {"heights": drained.heights},
)


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


operation(world, "promote", PromoteSnapshot, help="Make the snapshot at HEIGHT the baseline of restores.")
operation(
    world,
    "compact",
    CompactWorld,
    "Moved {records:,} records of {world} into {segments:,} new segments",
    help="Move old journal records to the object store. Reads still return them.",
)


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
        hosting = found.hosting() if program is None and not remove else found.set_program(program)
    printing.record(_hosting_fields(hosting))


operation(world, "resume-program", ResumeWorld, show=_hosting_fields)


@world.group(completions=dict.fromkeys(("name", "world"), completion.worlds))
def aside() -> None:
    """Manage items that their program kept failing to handle."""


operation(
    aside,
    "list",
    ListAside,
    columns=("sequence", "set_aside_at", "error", "item"),
    show=lambda found: {**printing.fields(found), "item": msgspec.to_builtins(found.item)},
    limit=("-n", 100),
    empty="No items are set aside.",
)
operation(
    aside,
    "retry",
    RetryAside,
    "Put item {sequence} back into the inbox of {world}",
    help="Put an item back at the end of the inbox.",
)
operation(
    aside,
    "delete",
    RetryAside,
    "Deleted item {sequence} of {world}",
    given={"drop": True},
    confirm="Permanently delete item {sequence} of {world}?",
)
operation(world, "fork", ForkWorld, help="Create the world TARGET with the history of WORLD.", show=_fields)
for _name, _state in (("pause", "paused"), ("resume", "active"), ("archive", "archived")):
    operation(world, _name, ChangeWorld, show=_fields, given={"state": _state})
operation(world, "delete", DeleteWorld, show=_fields, confirm="Permanently delete the world {world} and its history?")


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
