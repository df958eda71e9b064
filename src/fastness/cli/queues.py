"""`fastness queue`: put, inspect, purge, delete, pause, redrive. `consume` has the commands that lease and settle."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, Final, TypeVar

import click
import msgspec

from fastness.cli import completion, connect, consume, printing, schedules, values
from fastness.cli.commands import CommandGroup, wants_json
from fastness.cli.consume import delivery_fields
from fastness.cli.durations import SECONDS
from fastness.cli.existing import open_queue
from fastness.cli.field_options import field_options, given, limit_option
from fastness.cli.message_bodies import inline_message, read_message
from fastness.cli.messages import print_failures
from fastness.cli.operations import operation
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.queues import MessageOptions
from fastness.limits import MESSAGES_MAX
from fastness.tiers import Tier
from fastness.wire.queues import (
    DeleteQueue,
    Delivery,
    GetQueueStats,
    KeyInfo,
    ListLeasedMessages,
    NewMessage,
    PauseKey,
    PauseQueue,
    PurgeQueue,
    QueuePolicy,
    QueueStats,
    Receipt,
    RedriveMessages,
    SurveyQueues,
)

_LIST_COLUMNS: Final = ("queue", "ready", "delayed", "leased", "blocked", "dead", "paused", "head_age_seconds")
_MESSAGE_COLUMNS: Final = ("id", "priority", "group", "attempts", "created_at", "last_failure", "payload")
_LEASED_COLUMNS: Final = ("id", "owner", "attempts", "max_attempts", "expires_at", "lease_id")
_DEAD_LETTER_COLUMNS: Final = ("id", "attempts", "died_at", "last_failure", "payload")
_FAILURES: Final = click.option(
    "--failures", is_flag=True, help="Also show every failed attempt that is kept, with its traceback."
)
Item = TypeVar("Item")


def _key_fields(found: KeyInfo) -> dict[str, Any]:
    return printing.fields(found, paused_until_ms="paused_until")


queue = CommandGroup(completions=dict.fromkeys(("name", "queue"), completion.queues))


for command in (consume.get, consume.ack, consume.nack, consume.extend, consume.reject):
    queue.add_command(command)
queue.add_command(schedules.schedule)


@queue.command(
    aliases=["enqueue", "send"],
    examples=[
        "fastness queue put jobs '{\"n\": 1}' --priority 7 --idempotency-key order-17",
        "fastness queue put jobs --file report.pdf --delay 5m",
        'fastness queue put jobs \'{"url": "…"}\' --key example.org --unique-key page-7 --keep-result',
        "generate | fastness queue put jobs -",
        "cat jobs.jsonl | fastness queue put jobs - --lines",
    ],
)
@click.argument("name", metavar="QUEUE")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Read the body from a file; - is standard input.")
@click.option("--lines", is_flag=True, help="Put every line of the body as a separate message.")
@field_options(NewMessage)
@click.option("--tier", type=click.Choice(["critical", "important"]), default="critical", help="The durability tier.")
def put(name: str, body: str | None, file: str | None, lines: bool, tier: str, **options: Any) -> None:
    """Put a message: BODY, a file, or standard input. Prints its id."""
    with values.open_input(body, file) as stream, connect.open_plane(create=True) as plane:
        if lines:
            _put_lines(plane, name, stream, Tier(tier), given(options))
            return
        message = read_message(plane, stream, given(options))
        receipt = plane.queue(name).put_many([message], tier=Tier(tier))[0]
    if receipt.duplicate:
        click.echo("Duplicate: already enqueued.", err=True)
    printing.result(receipt.id, {field: getattr(receipt, field) for field in Receipt.__struct_fields__})


def _put_lines(plane: Plane, name: str, stream: IO[bytes], tier: Tier, options: MessageOptions) -> None:
    count = duplicates = 0
    bodies = (line.rstrip(b"\r\n") for line in stream)
    with printing.progress("Messages") as advance:
        for batch in _batches((each for each in bodies if each), MESSAGES_MAX):
            messages = [inline_message(each, options) for each in batch]
            receipts = plane.queue(name).put_many(messages, tier=tier)
            count += len(receipts)
            duplicates += sum(receipt.duplicate for receipt in receipts)
            advance(len(receipts))
    printing.result(f"Put {count - duplicates:,} messages", {"count": count, "duplicates": duplicates})


operation(
    queue,
    "list",
    SurveyQueues,
    columns=("queue", "ready", "delayed", "leased", "blocked", "dead", "paused", "head_age_seconds"),
)
operation(
    queue,
    "stats",
    GetQueueStats,
    examples=["fastness queue stats jobs", "fastness queue stats jobs --json | jq .ready"],
)


@queue.command()
@click.argument("name", metavar="QUEUE")
@limit_option("-n", 10, field="count")
@_FAILURES
def peek(name: str, count: int, failures: bool) -> None:
    """Show the next ready messages without consuming them."""
    with open_queue(name) as opened:
        found = opened.peek(count)
    _print_messages(found, _MESSAGE_COLUMNS, "No ready messages.", failures=failures)


@queue.command()
@click.argument("name", metavar="QUEUE")
@limit_option("-n", 100, field="count")
@_FAILURES
def dead(name: str, count: int, failures: bool) -> None:
    """Show the dead letters of a queue, with their failures."""
    with open_queue(name) as opened:
        found = opened.dead_letters(count)
    _print_messages(found, _DEAD_LETTER_COLUMNS, "No dead letters.", failures=failures)


operation(
    queue,
    "redrive",
    RedriveMessages,
    "Moved {count:,} dead letters back to {queue}",
    arguments={"ids": "[ID]…"},
    examples=["fastness queue redrive jobs", "fastness queue redrive jobs 0198f… 0198f…"],
)
operation(
    queue,
    "leased",
    ListLeasedMessages,
    columns=("id", "owner", "attempts", "max_attempts", "expires_at", "lease_id"),
    empty="No leased messages.",
    limit=("-n", 100),
    examples=["fastness queue leased jobs", "fastness queue leased jobs --json | jq -r '.[].lease_id'"],
)
operation(
    queue,
    "delete",
    DeleteQueue,
    "Deleted {queue} with {count:,} messages",
    confirm="Permanently remove queue {queue} and all of its messages?",
)
operation(
    queue,
    "purge",
    PurgeQueue,
    "Removed {count:,} messages from {queue}",
    confirm=lambda typed: (
        f"Permanently remove every message of {typed['queue']}"
        f"{', leased or not' if typed['leased'] else ' that is not leased'}?"
    ),
)
operation(
    queue,
    "pause",
    PauseQueue,
    "{queue} is paused",
    show=lambda policy: {"paused": policy.paused},
    given={"paused": True},
)
operation(
    queue,
    "resume",
    PauseQueue,
    "{queue} is resumed",
    show=lambda policy: {"paused": policy.paused},
    given={"paused": False},
)
operation(
    queue,
    "pause-key",
    PauseKey,
    "{key} of {queue} is paused until {paused_until}",
    help="Stop deliveries of KEY for a time. Other keys are not affected.",
    show=_key_fields,
    arguments={"seconds": "SECONDS"},
    examples=["fastness queue pause-key jobs example.org 5m"],
)
operation(queue, "resume-key", PauseKey, "{key} of {queue} is resumed", show=_key_fields, given={"seconds": 0.0})


@queue.command(examples=["fastness queue key jobs example.org"])
@click.argument("name", metavar="QUEUE")
@click.argument("key")
def key(name: str, key: str) -> None:
    """Show how many messages of KEY are in each state.

    Also shows until when KEY is paused.
    """
    with open_queue(name) as opened:
        printing.record({"queue": name, **_key_fields(opened.key(key))})


@queue.command(
    examples=[
        "fastness queue policy jobs",
        "fastness queue policy jobs --max-attempts 3 --visibility 5m",
        "fastness queue policy jobs --rate none",
        "fastness queue policy jobs --concurrency-per-key 2 --rate-per-key 10 --fair",
    ]
)
@click.argument("name", metavar="QUEUE")
@field_options(
    QueuePolicy,
    changes=True,
    names={"history_seconds": "--history-keep"},
    types={"dead_letter_queue": completion.Names(completion.queues)},
    without=("paused",),  # `queue pause` changes it.
)
def policy(name: str, **changes: Any) -> None:
    """Show the policy of a queue, or change it by options.

    A policy has the limits of a queue, and the defaults of its messages.
    """
    if changed := given(changes):
        with connect.open_plane(create=True) as plane:
            of_queue = plane.queue(name)
            found: QueuePolicy = of_queue.set_policy(msgspec.structs.replace(of_queue.policy(), **changed))
    else:
        with open_queue(name) as opened:
            found = opened.policy()
    printing.record({"queue": name, **printing.fields(found)})


@queue.command(examples=["fastness queue watch jobs --json | while read -r line; do …; done"])
@click.argument("name", metavar="QUEUE")
@click.option("--interval", type=SECONDS, default=1.0, help="How often to read the counts.  [default: 1]")
@click.option("-n", "count", type=click.IntRange(1), help="Exit after this many changes.")
def watch(name: str, interval: float, count: int | None) -> None:
    """Print the counts of a queue whenever they change.

    Runs until interrupted. The queue may be created later.
    """
    with connect.PlaneCaller(connect.current_target()) as caller:
        for fields in itertools.islice(
            _changes(lambda: caller.call(lambda plane: plane.queue(name).stats()), interval), count
        ):
            counts = " ".join(
                f"{state}={fields[state]:,}" for state in ("ready", "delayed", "leased", "blocked", "dead")
            )
            printing.line(fields, f"{time.strftime('%H:%M:%S')} {name} {counts}")


def _changes(read_stats: Callable[[], QueueStats], interval: float) -> Iterator[dict[str, Any]]:
    before: dict[str, Any] | None = None
    while True:
        fields = printing.fields(read_stats())
        counts = {name: value for name, value in fields.items() if name != "head_age_seconds"}
        if counts != before:
            before = counts
            yield fields
        time.sleep(interval)


def _print_messages(found: list[Delivery], columns: tuple[str, ...], empty: str, *, failures: bool) -> None:
    fields = [delivery_fields(each) for each in found]
    if not wants_json():
        for each, delivery in zip(fields, found, strict=True):
            each["payload"] = printing.excerpt(delivery.payload, delivery.size)
            each["last_failure"] = _last_failure(delivery)
    printing.rows(fields, columns, empty=empty)
    if failures and not wants_json():
        for delivery in found:
            print_failures(delivery.id, delivery.failures)


def _last_failure(delivery: Delivery) -> str | None:
    """The newest failure in one line. The last error may be older, where an attempt failed without one."""
    if not delivery.failures:
        return delivery.last_error
    newest = delivery.failures[-1]
    error = ": ".join(part for part in (newest.error_type, newest.message) if part)
    return f"{newest.outcome} by {newest.owner}" + (f": {error}" if error else "")


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
