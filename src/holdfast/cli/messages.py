"""`holdfast message`: find, cancel and change a message by its id, and read its result."""

import base64
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from holdfast.cli import completion, connect, printing
from holdfast.cli.commands import CommandGroup, wants_json
from holdfast.cli.consume import failure_fields
from holdfast.cli.durations import SECONDS, WAIT
from holdfast.errors import MessageNotFound, ResultNotReady
from holdfast.handles.sync.plane import Plane
from holdfast.wire.queues import Failure, MessageInfo

_CANCEL_COLUMNS: Final = ("id", "state", "attempts", "finished_at")


@click.group(cls=CommandGroup, completions={"name": completion.queues})
def message() -> None:
    """Find, cancel and change a message by its id, and read its result."""


@message.command(examples=["holdfast message show jobs 0198f…", "holdfast message show jobs 0198f… --json | jq .state"])
@click.argument("name", metavar="QUEUE")
@click.argument("id")
def show(name: str, id: str) -> None:
    """Show the state of a message, its times, its payload, and every failed attempt with its traceback.

    A message that is done is found only if it was put with --keep-result or acknowledged with a result.
    """
    with connect.open_plane() as plane:
        found = plane.queue(name).get(id)
    fields = {"queue": name, **message_fields(found)}
    if wants_json():
        printing.record(fields)
        return
    if found.payload is not None:
        fields["payload"] = printing.excerpt(found.payload, found.size, characters=1_000)
    del fields["failures"]
    printing.record({field: value for field, value in fields.items() if value not in (None, "", {}, False)})
    print_failures(found.id, found.failures)


@message.command(examples=["holdfast message cancel jobs 0198f… 0198f…"])
@click.argument("name", metavar="QUEUE")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
def cancel(name: str, ids: tuple[str, ...]) -> None:
    """Cancel messages, so that they are not delivered any more. Repeating this is safe.

    If a message is leased, its consumer is told to stop and cannot acknowledge it. A message that is done or dead stays
    as it is; the output shows its state. Exit code 4 means that one of them was not found; the others are cancelled.
    """
    found: list[MessageInfo] = []
    missing: list[MessageNotFound] = []
    with connect.open_plane() as plane:
        for id in ids:
            try:
                found.append(plane.queue(name).cancel(id))
            except MessageNotFound as error:
                missing.append(error)
    if found:
        printing.rows([{"queue": name, **message_fields(each)} for each in found], _CANCEL_COLUMNS)
    if missing:
        raise missing[0]


@message.command(
    examples=["holdfast message update jobs 0198f… --priority 9", "holdfast message update jobs 0198f… --delay 0"]
)
@click.argument("name", metavar="QUEUE")
@click.argument("id")
@click.option("--priority", type=int, help="The new priority, 0 to 9; 9 is delivered first.")
@click.option("--delay", type=SECONDS, help="Deliver the message after this time from now; 0 is at once.")
def update(name: str, id: str, priority: int | None, delay: float | None) -> None:
    """Change the priority or the delay of a message that is not leased."""
    with connect.open_plane() as plane:
        found = plane.queue(name).update(id, priority=priority, delay_seconds=delay)
    due_at = printing.timestamp(found.due_ms)
    state = f"{found.state} until {due_at}" if due_at else found.state
    printing.result(f"Changed {found.id}: {state}, priority {found.priority}", {"queue": name, **message_fields(found)})


@message.command(
    examples=[
        "holdfast message result jobs 0198f… --wait 30",
        'id=$(holdfast queue put jobs --keep-result 1) && holdfast message result jobs "$id" --wait forever',
    ]
)
@click.argument("name", metavar="QUEUE")
@click.argument("id")
@click.option("--wait", type=WAIT, default=0.0, help="How long to wait for the result, or `forever`.  [default: 0]")
def result(name: str, id: str, wait: float) -> None:
    """Print the result that a message was acknowledged with: JSON, or bytes as they are.

    Exit code 7 means that the message is not done yet, 5 that it is a dead letter, 6 that it was cancelled, and 4 that
    no result was kept.
    """
    pending: ResultNotReady | None = None

    def read(plane: Plane, seconds: float) -> tuple[Any] | None:
        nonlocal pending
        try:
            return (plane.queue(name).result(id, wait_seconds=seconds),)
        except ResultNotReady as error:
            pending = error
            return None

    with connect.PlaneCaller(connect.current_target()) as caller:
        found = caller.poll(read, wait)
    if found is None:
        assert pending is not None
        raise pending
    _print_result(name, id, found[0])


def _print_result(name: str, id: str, value: Any) -> None:
    is_bytes = isinstance(value, bytes)
    if wants_json():
        shown = {"result_base64": base64.b64encode(value).decode()} if is_bytes else {"result": value}
        printing.record({"queue": name, "id": id, **shown})
    elif is_bytes:
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    else:
        click.echo(printing.escape_control(printing.compact(value)))


def message_fields(found: MessageInfo) -> dict[str, Any]:
    """The fields of what is known about a message, as the command line prints them."""
    return {
        "id": found.id,
        "state": found.state,
        "priority": found.priority,
        "group": found.group,
        "key": found.key,
        "unique_key": found.unique_key,
        "correlation_id": found.correlation_id,
        "attempts": found.attempts,
        "failure_attempts": found.failure_attempts,
        "max_attempts": found.max_attempts,
        "created_at": printing.timestamp(found.created_ms),
        "due_at": printing.timestamp(found.due_ms),
        "ttl_at": printing.timestamp(found.ttl_at_ms),
        "owner": found.owner,
        "leased_at": printing.timestamp(found.leased_ms),
        "expires_at": printing.timestamp(found.expires_ms),
        "lease_id": found.lease_id,
        "died_at": printing.timestamp(found.died_ms),
        "finished_at": printing.timestamp(found.finished_ms),
        "keep_result": found.keep_result,
        "has_result": found.has_result,
        "last_error": found.last_error,
        "failures": [failure_fields(failure) for failure in found.failures],
        "attributes": found.attributes,
        "content_type": found.content_type,
        "size": found.size,
        "blob": found.blob,
        **printing.payload(found.payload, found.content_type),
    }


def print_failures(id: str, failures: Sequence[Failure]) -> None:
    """Print the failed attempts of a message, each with its traceback."""
    for failure in failures:
        leased_at = printing.timestamp(failure.leased_ms) or "an unknown time"
        click.echo(
            f"\n{id}, attempt {failure.attempt}: leased by {printing.escape_control(failure.owner)} "
            f"at {leased_at}, {failure.outcome} at {printing.timestamp(failure.failed_ms)}"
        )
        error = ": ".join(part for part in (failure.error_type, failure.message) if part)
        click.echo(printing.escape_control((failure.traceback or error or "no error was given").rstrip()))
