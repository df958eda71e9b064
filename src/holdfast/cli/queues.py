"""`holdfast queue`: put, look, empty, pause and bring back. `deliveries` has what leases and settles messages."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, Final, TypeVar

import click
import msgspec

from holdfast.cli import connect, consume, printing, schedules, values
from holdfast.cli.commands import Noun, wants_json
from holdfast.cli.consume import delivery_fields
from holdfast.cli.durations import SECONDS
from holdfast.cli.messages import kind_of, message_of, message_options
from holdfast.handles import Plane
from holdfast.limits import MESSAGES_MAX, READ_ENTRIES_MAX
from holdfast.tiers import Tier
from holdfast.wire.queues import Delivery, NewMessage, QueuePolicy, QueueStats

_DEPTHS: Final = ("queue", "ready", "delayed", "leased", "blocked", "dead", "paused", "head_age_seconds", "acked_total")
_LOOKED_AT: Final = ("id", "priority", "group", "attempts", "created_at", "payload")
_BURIED: Final = ("id", "attempts", "died_at", "last_error", "payload")
Item = TypeVar("Item")


@click.group(cls=Noun)
def queue() -> None:
    """Work that is done at least once."""


for command in (consume.get, consume.ack, consume.nack, consume.extend, consume.reject):
    queue.add_command(command)
queue.add_command(schedules.schedule)


@queue.command(
    examples=[
        "holdfast queue put jobs '{\"n\": 1}' --priority 7 --idempotency-key order-17",
        "holdfast queue put jobs --file report.pdf --delay 5m",
        "generate | holdfast queue put jobs -",
        "cat jobs.jsonl | holdfast queue put jobs - --lines",
    ]
)
@click.argument("name", metavar="QUEUE")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Take the body from a file; - is standard input.")
@click.option("--lines", is_flag=True, help="Every line of the body is a message of its own.")
@message_options
@click.option("--tier", type=click.Choice(["critical", "important"]), default="critical", help="What is promised.")
def put(name: str, body: str | None, file: str | None, lines: bool, tier: str, **options: Any) -> None:
    """Put a message: BODY, a file, or standard input. Prints its id."""
    with values.source(body, file) as stream, connect.opened() as plane:
        if lines:
            _put_lines(plane, name, stream, Tier(tier), options)
            return
        message = message_of(plane, stream, options)
        receipt = plane.queue(name).put_many([message], tier=Tier(tier))[0]
    if receipt.duplicate:
        click.echo("It was put before, and is not put again.", err=True)
    printing.done(receipt.id, msgspec.to_builtins(receipt))


def _put_lines(plane: Plane, name: str, stream: IO[bytes], tier: Tier, options: dict[str, Any]) -> None:
    count = duplicates = 0
    bodies = (line.rstrip(b"\r\n") for line in stream)
    with printing.progress("Messages") as advance:
        for batch in _batches((each for each in bodies if each), MESSAGES_MAX):
            messages = [NewMessage(payload=each, **{"content_type": kind_of(each), **options}) for each in batch]
            receipts = plane.queue(name).put_many(messages, tier=tier)
            count += len(receipts)
            duplicates += sum(receipt.duplicate for receipt in receipts)
            advance(len(receipts))
    printing.done(f"{count - duplicates:,} messages are put", {"count": count, "duplicates": duplicates})


@queue.command("list")
@click.option("--after", default="", help="Begin behind this name.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="At most so many.")
def list_(after: str, limit: int) -> None:
    """The names of queues."""
    with connect.opened() as plane:
        names = plane.queues(after=after, limit=limit)
    printing.rows([{"queue": name} for name in names], ["queue"], nothing="There is no queue yet.")


@queue.command(examples=["holdfast queue stats jobs --json"])
@click.argument("names", metavar="[QUEUE]…", nargs=-1)
def stats(names: tuple[str, ...]) -> None:
    """How many messages are in which state; of all queues if none is named."""
    with connect.opened() as plane:
        found = [plane.queue(name).stats() for name in names or _all_queues(plane)]
    printing.rows([_stats_fields(each) for each in found], _DEPTHS, nothing="There is no queue yet.")


@queue.command()
@click.argument("name", metavar="QUEUE")
@click.option("-n", "count", type=click.IntRange(1, READ_ENTRIES_MAX), default=10, help="At most so many.")
def peek(name: str, count: int) -> None:
    """The messages that are ready, in order. Nothing is consumed."""
    with connect.opened() as plane:
        found = plane.queue(name).peek(count)
    _print_messages(found, _LOOKED_AT, "Nothing is ready.")


@queue.command()
@click.argument("name", metavar="QUEUE")
@click.option("-n", "count", type=click.IntRange(1, READ_ENTRIES_MAX), default=100, help="At most so many.")
def dead(name: str, count: int) -> None:
    """The dead letters of a queue, with what they died of."""
    with connect.opened() as plane:
        found = plane.queue(name).dead_letters(count)
    _print_messages(found, _BURIED, "There is no dead letter.")


@queue.command(examples=["holdfast queue redrive jobs", "holdfast queue redrive jobs 0198f… 0198f…"])
@click.argument("name", metavar="QUEUE")
@click.argument("ids", metavar="[ID]…", nargs=-1)
@click.option("--limit", type=click.IntRange(1), default=1_000, help="At most so many, if none is named.")
def redrive(name: str, ids: tuple[str, ...], limit: int) -> None:
    """Put dead letters back into the queue that they died in."""
    with connect.opened() as plane:
        count = plane.queue(name).redrive(list(ids) or None, limit=limit)
    printing.done(f"{count:,} dead letters are in {name} again", {"queue": name, "count": count})


@queue.command()
@click.argument("name", metavar="QUEUE")
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(name: str, yes: bool) -> None:
    """Remove every message that nobody holds, for good."""
    values.confirmed(f"Remove every message of {name} that nobody holds?", yes=yes)
    with connect.opened() as plane:
        count = plane.queue(name).purge()
    printing.done(f"{count:,} messages of {name} are removed", {"queue": name, "count": count})


@queue.command()
@click.argument("name", metavar="QUEUE")
def pause(name: str) -> None:
    """Deliver nothing until `resume`; puts are still taken."""
    with connect.opened() as plane:
        plane.queue(name).pause()
    printing.done(f"{name} is paused", {"queue": name, "paused": True})


@queue.command()
@click.argument("name", metavar="QUEUE")
def resume(name: str) -> None:
    """Deliver again."""
    with connect.opened() as plane:
        plane.queue(name).resume()
    printing.done(f"{name} is not paused", {"queue": name, "paused": False})


@queue.command(examples=["holdfast queue policy jobs", "holdfast queue policy jobs --max-attempts 3 --visibility 5m"])
@click.argument("name", metavar="QUEUE")
@click.option("--visibility", "visibility_seconds", type=SECONDS, help="How long a delivery is leased.")
@click.option("--max-attempts", type=int, help="How many failures make a dead letter.")
@click.option("--dead-letter-queue", metavar="QUEUE", help="Where dead letters go.")
@click.option("--retention", "retention_seconds", type=SECONDS, help="How long a message without a TTL is kept.")
@click.option("--dead-letter-retention", "dead_letter_retention_seconds", type=SECONDS, help="And a dead letter.")
@click.option("--rate", "rate_per_second", type=float, help="Deliveries a second.")
def policy(name: str, **changes: Any) -> None:
    """What holds for messages that do not say otherwise; options change it."""
    wanted = {field: value for field, value in changes.items() if value is not None}
    with connect.opened() as plane:
        found: QueuePolicy = plane.queue(name).policy()
        if wanted:
            found = plane.queue(name).set_policy(msgspec.structs.replace(found, **wanted))
    printing.record({"queue": name, **msgspec.structs.asdict(found)})


@queue.command(examples=["holdfast queue watch jobs --json | while read -r line; do …; done"])
@click.argument("name", metavar="QUEUE")
@click.option("--interval", type=SECONDS, default=1.0, help="How often to look.  [default: 1]")
@click.option("-n", "count", type=click.IntRange(1), help="End after so many changes.")
def watch(name: str, interval: float, count: int | None) -> None:
    """Tell how many messages are in which state whenever that changes, until it is interrupted."""
    with connect.Visits(connect.target()) as visits:
        for fields in itertools.islice(
            _changes(lambda: visits.call(lambda plane: plane.queue(name).stats()), interval), count
        ):
            depths = " ".join(
                f"{state}={fields[state]:,}" for state in ("ready", "delayed", "leased", "blocked", "dead")
            )
            printing.line(fields, f"{time.strftime('%H:%M:%S')} {name} {depths}")


def _changes(look: Callable[[], QueueStats], interval: float) -> Iterator[dict[str, Any]]:
    before: dict[str, Any] | None = None
    while True:
        fields = _stats_fields(look())
        seen = {name: value for name, value in fields.items() if name != "head_age_seconds"}
        if seen != before:
            before = seen
            yield fields
        time.sleep(interval)


def _print_messages(found: list[Delivery], columns: tuple[str, ...], nothing: str) -> None:
    fields = [delivery_fields(each) for each in found]
    if not wants_json():
        for each, delivery in zip(fields, found, strict=True):
            each["payload"] = printing.excerpt(delivery.payload, delivery.size)
    printing.rows(fields, columns, nothing=nothing)


def _stats_fields(found: QueueStats) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(found)
    return fields


def _all_queues(plane: Plane) -> Iterator[str]:
    after = ""
    while names := plane.queues(after=after, limit=1_000):
        yield from names
        after = names[-1]


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
