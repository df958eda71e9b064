"""Messages in a shell's hands: `get` leases one and exports what settles it; `ack` and the others read that again."""

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from holdfast.cli import connect, exports, printing
from holdfast.cli.commands import Verb, wants_json
from holdfast.cli.durations import SECONDS, WAIT
from holdfast.cli.exit_codes import NOTHING
from holdfast.errors import InvalidArgument, PathUnusable
from holdfast.handles import Plane
from holdfast.handles.sync.messages import Message
from holdfast.wire.queues import Delivery

_VARIABLES: Final = tuple(
    f"HOLDFAST_QUEUE_{name}"
    for name in (
        "NAME",
        "MESSAGE_ID",
        "LEASE_ID",
        "FENCING_TOKEN",
        "ATTEMPTS",
        "CORRELATION_ID",
        "CONTENT_TYPE",
        "EXPIRES_AT",
        "PAYLOAD_PATH",
        "STATE_KEY",
        "STATE_LEASE_ID",
        "STATE_FENCING_TOKEN",
        "STATE_PATH",
    )
)


@click.command(
    "get",
    cls=Verb,
    examples=[
        'eval "$(holdfast queue get jobs --wait 20)"',
        'work < "$HOLDFAST_QUEUE_PAYLOAD_PATH" && holdfast queue ack || holdfast queue nack --error "it failed"',
        'while eval "$(holdfast queue get jobs --wait forever)"; do …; holdfast queue ack; done',
    ],
)
@click.argument("name", metavar="QUEUE")
@click.option("--wait", type=WAIT, default=0.0, help="How long to wait for a message, or `forever`.  [default: 0]")
@click.option("--visibility", type=SECONDS, help="How long it is leased; extend it if that is not enough.")
@click.option("--owner", help="Who leases it, for those who look.")
@click.option("--stateful", is_flag=True, help="Lease its workflow state too, and write it to a file as JSON.")
@click.option("--payload-out", metavar="PATH", help="Where the payload is written.  [default: a temporary file]")
def get(
    *, name: str, wait: float, visibility: float | None, owner: str | None, stateful: bool, payload_out: str | None
) -> None:
    """Lease the next message, write its payload to a file, and export what `queue ack` needs.

    Prints lines for `eval`. The lease ends by itself unless the message is settled or extended: nothing extends it
    once this command has ended. Exit code 3 says that no message came in time.
    """

    def look(plane: Plane, seconds: float) -> dict[str, Any] | None:
        message = plane.queue(name).receive(
            wait_seconds=seconds,
            visibility_seconds=visibility,
            owner=owner or f"{os.environ.get('USER', 'cli')}:{os.getppid()}",
            with_state=stateful,
            extend_for_seconds=0,
        )
        return None if message is None else _handed_over(message, payload_out)

    with exports.forgotten_on_failure(_VARIABLES), connect.Visits(connect.target()) as visits:
        found = visits.find(look, wait)
    if found is not None:
        printing.record(found) if wants_json() else click.echo(exports.lines(found))
        return
    if wants_json():
        printing.record({"message": None})
    else:
        click.echo(exports.forgetting(_VARIABLES, NOTHING))
    click.get_current_context().exit(NOTHING)


def _settles(command: Any) -> Any:
    """The options that name a message, which default to what `get` exported."""
    for option in (
        click.option("--fence", type=int, envvar="HOLDFAST_QUEUE_FENCING_TOKEN", help="The fence of the delivery."),
        click.option("--lease-id", envvar="HOLDFAST_QUEUE_LEASE_ID", help="The lease of the delivery."),
        click.option("--id", "id", envvar="HOLDFAST_QUEUE_MESSAGE_ID", help="The message."),
        click.argument("name", metavar="[QUEUE]", envvar="HOLDFAST_QUEUE_NAME", required=False),
    ):
        command = option(command)
    return command


@click.command(
    "ack", cls=Verb, examples=["holdfast queue ack", "holdfast queue ack jobs --id … --lease-id … --fence 1"]
)
@_settles
def ack(name: str | None, id: str | None, lease_id: str | None, fence: int | None) -> None:
    """The message is done. Doing this twice is fine."""
    with connect.opened() as plane:
        message = _held(plane, name, id, lease_id, fence)
        message.ack()
    printing.done(f"{message.id} is acknowledged", _settled(message, "acked"))


@click.command("nack", cls=Verb, examples=["holdfast queue nack --delay 30s --error 'the API was down'"])
@_settles
@click.option("--delay", type=SECONDS, default=0.0, help="How long until it is delivered again.  [default: 0]")
@click.option("--defer", is_flag=True, help="Do not count it as a failure.")
@click.option("--error", help="What went wrong, for whoever looks.")
def nack(
    *,
    name: str | None,
    id: str | None,
    lease_id: str | None,
    fence: int | None,
    delay: float,
    defer: bool,
    error: str | None,
) -> None:
    """Give the message back."""
    with connect.opened() as plane:
        message = _held(plane, name, id, lease_id, fence)
        message.nack(delay_seconds=delay, intent="defer" if defer else "failure", error=error)
    printing.done(f"{message.id} was given back", _settled(message, "nacked"))


@click.command("reject", cls=Verb, examples=["holdfast queue reject --error 'no such customer'"])
@_settles
@click.option("--error", help="What is wrong with it, for whoever looks after dead letters.")
def reject(name: str | None, id: str | None, lease_id: str | None, fence: int | None, error: str | None) -> None:
    """Send the message to the dead letters at once."""
    with connect.opened() as plane:
        message = _held(plane, name, id, lease_id, fence)
        message.reject(error)
    printing.done(f"{message.id} is a dead letter", _settled(message, "rejected"))


@click.command("extend", cls=Verb, examples=["holdfast queue extend --by 5m"])
@_settles
@click.option("--by", "seconds", type=SECONDS, default=30.0, help="At least how long from now.  [default: 30]")
def extend(name: str | None, id: str | None, lease_id: str | None, fence: int | None, seconds: float) -> None:
    """Let the lease of the message last longer. It never gets shorter."""
    with connect.opened() as plane:
        message = _held(plane, name, id, lease_id, fence)
        until = printing.moment(message.extend(seconds))
    printing.done(f"{message.id} is leased until {until}", {**_settled(message, "extended"), "expires_at": until})


def delivery_fields(delivery: Delivery) -> dict[str, Any]:
    """A message in the words of the command line."""
    return {
        "id": delivery.id,
        **printing.payload(delivery.payload, delivery.content_type),
        "size": delivery.size,
        "content_type": delivery.content_type,
        "blob": delivery.blob,
        "attributes": delivery.attributes,
        "correlation_id": delivery.correlation_id,
        "priority": delivery.priority,
        "group": delivery.group,
        "created_at": printing.moment(delivery.created_ms),
        "attempts": delivery.attempts,
        "failure_attempts": delivery.failure_attempts,
        "max_attempts": delivery.max_attempts,
        "last_error": delivery.last_error,
        "origin": delivery.origin,
        "died_at": printing.moment(delivery.died_ms),
    }


def _handed_over(message: Message, payload_out: str | None) -> dict[str, Any]:
    """What a shell or a program gets of a message that was leased; given back if it cannot get it."""
    try:
        is_carried = wants_json() and message.payload is not None and payload_out is None
        path = None if is_carried else _written(message, payload_out)
        return _fields(message, path) if wants_json() else _variables(message, path)
    except BaseException:
        message.nack(intent="defer", error="Its payload could not be written where it was wanted")
        raise


def _fields(message: Message, path: Path | None) -> dict[str, Any]:
    found = delivery_fields(message.delivery)
    found |= {
        "queue": message.queue,
        "lease_id": message.lease.lease_id,
        "fencing_token": message.fence,
        "expires_at": printing.moment(message.expires_ms),
    }
    if path is not None:
        found["payload_path"] = str(path)
    if message.delivery.state is not None:
        proof = message.delivery.state.lease
        found["state"] = {
            "value": printing.jsonable(message.state),
            "etag": message.delivery.state.etag,
            "key": proof.key,
            "lease_id": proof.lease_id,
            "fencing_token": proof.fence,
        }
    return found


def _variables(message: Message, path: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "NAME": message.queue,
        "MESSAGE_ID": message.id,
        "LEASE_ID": message.lease.lease_id,
        "FENCING_TOKEN": message.fence,
        "ATTEMPTS": message.attempts,
        "CORRELATION_ID": message.correlation_id,
        "CONTENT_TYPE": message.delivery.content_type,
        "EXPIRES_AT": printing.moment(message.expires_ms),
        "PAYLOAD_PATH": path,
    }
    if message.delivery.state is not None:
        proof = message.delivery.state.lease
        found |= {"STATE_KEY": proof.key, "STATE_LEASE_ID": proof.lease_id, "STATE_FENCING_TOKEN": proof.fence}
        descriptor, state_path = tempfile.mkstemp(prefix="holdfast-state-", suffix=".json")
        with os.fdopen(descriptor, "w") as file:
            file.write(printing.compact(message.state))
        found["STATE_PATH"] = state_path
    return {f"HOLDFAST_QUEUE_{name}": value for name, value in found.items()}


def _written(message: Message, payload_out: str | None) -> Path:
    """The file that the payload was streamed to."""
    try:
        if payload_out is None:
            descriptor, name = tempfile.mkstemp(prefix=f"holdfast-{message.queue}-")
            file, path = os.fdopen(descriptor, "wb"), Path(name)
        else:
            path = Path(payload_out).absolute()
            file = path.open("wb")
        with file:
            for piece in message.open():
                file.write(piece)
    except OSError as error:
        raise PathUnusable(
            f"The payload cannot be written ({error.strerror or error}), so the message was given back; "
            "name another place with --payload-out"
        ) from error
    return path


def _held(plane: Plane, name: str | None, id: str | None, lease_id: str | None, fence: int | None) -> Message:
    """The message that was leased elsewhere, as a handle that settles it."""
    if name is None or id is None or lease_id is None or fence is None:
        raise InvalidArgument(
            'No message is named; run eval "$(holdfast queue get QUEUE)" first, '
            "or give QUEUE, --id, --lease-id and --fence"
        )
    return plane.queue(name).held(id, lease_id=lease_id, fence=fence)


def _settled(message: Message, outcome: str) -> dict[str, Any]:
    return {"queue": message.queue, "id": message.id, "outcome": outcome}
