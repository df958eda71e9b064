"""Consuming from a shell: `get` leases a message and exports its lease; `ack`, `nack` and the others read that."""

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack
from uuid import UUID

import click

from fastness.cli import connect, exports, payload_files, printing, values
from fastness.cli.commands import LeafCommand, wants_json
from fastness.cli.durations import SECONDS, WAIT
from fastness.cli.exit_codes import NOTHING_RECEIVED
from fastness.errors import InvalidArgument, InvalidValue, PathUnusable
from fastness.handles.sync.messages import Message
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.queues import Queue
from fastness.wire.queues import Delivery

_LEASE_ID: Final = re.compile(r"([0-9a-f]{32})-([0-9]{1,19})-[0-9a-f]{34}")
_VARIABLES: Final = tuple(
    f"FASTNESS_QUEUE_{name}"
    for name in (
        "NAME",
        "MESSAGE_ID",
        "LEASE_ID",
        "FENCE",
        "ATTEMPTS",
        "CORRELATION_ID",
        "CONTENT_TYPE",
        "EXPIRES_AT",
        "PAYLOAD_PATH",
        "STATE_KEY",
        "STATE_LEASE_ID",
        "STATE_FENCE",
        "STATE_PATH",
    )
)


@click.command(
    "get",
    cls=LeafCommand,
    aliases=["dequeue", "receive"],
    examples=[
        'eval "$(fastness queue get jobs --wait 20)"',
        'work < "$FASTNESS_QUEUE_PAYLOAD_PATH" && fastness queue ack || fastness queue nack --error "it failed"',
        'while eval "$(fastness queue get jobs --wait forever)"; do …; fastness queue ack; done',
    ],
)
@click.argument("name", metavar="QUEUE")
@click.option(
    "--wait", "--block", type=WAIT, default=0.0, help="How long to wait for a message, or `forever`.  [default: 0]"
)
@click.option("--visibility", type=SECONDS, help="How long to lease the message. Use `queue extend` for more time.")
@click.option("--owner", help="The owner of the lease, shown to operators.")
@click.option(
    "--stateful", is_flag=True, help="Also lease the message's workflow state, and write it to a file as JSON."
)
@click.option("--payload-out", metavar="PATH", help="Write the payload to this file.  [default: see above]")
def get(
    *, name: str, wait: float, visibility: float | None, owner: str | None, stateful: bool, payload_out: str | None
) -> None:
    """Lease the next message, and export its lease.

    Writes its payload to a file, and prints shell lines for `eval`. FASTNESS_QUEUE_PAYLOAD_PATH is the file, which only
    you can read, in ~/.local/state/fastness/messages/QUEUE (or below XDG_STATE_HOME). `queue ack` and `queue reject`
    remove it; after `queue nack` it is kept for up to 7 days. A file of --payload-out is yours to remove.

    The lease is not renewed after this command has ended: settle or extend the message before the lease expires. Exit
    code 3 means that no message arrived in time.
    """

    def receive(plane: Plane, seconds: float) -> dict[str, Any] | None:
        message = plane.queue(name).receive(
            wait_seconds=seconds,
            visibility_seconds=visibility,
            owner=owner or f"{os.environ.get('USER', 'cli')}:{os.getppid()}",
            with_state=stateful,
            extend_for_seconds=0,
        )
        return None if message is None else _output_fields(message, payload_out)

    with exports.unset_on_failure(_VARIABLES), connect.PlaneCaller(connect.current_target(), create=True) as caller:
        found = caller.poll(receive, wait)
    if found is not None:
        printing.record(found) if wants_json() else click.echo(exports.export_lines(found))
        return
    if wants_json():
        printing.record({"message": None})
    else:
        click.echo(exports.unset_lines(_VARIABLES, NOTHING_RECEIVED))
    click.get_current_context().exit(NOTHING_RECEIVED)


def _delivery_options(command: Any) -> Any:
    """The options that name a message, which default to what `get` exported; or the lease ids of several messages."""
    command.__doc__ = (
        f"{inspect.cleandoc(command.__doc__ or '')}\n\nWithout LEASE_ID this is the message that `queue get` exported. "
        "Several messages, each named by its LEASE_ID, change in one commit."
    )
    for option in (
        click.option("--fence", type=int, envvar="FASTNESS_QUEUE_FENCE", help="The fence of the delivery's lease."),
        click.option("--lease-id", envvar="FASTNESS_QUEUE_LEASE_ID", help="The id of the delivery's lease."),
        click.option("--id", "id", envvar="FASTNESS_QUEUE_MESSAGE_ID", help="The message id."),
        click.argument("lease_ids", metavar="[LEASE_ID]…", nargs=-1),
        click.argument("name", metavar="[QUEUE]", envvar="FASTNESS_QUEUE_NAME", required=False),
    ):
        command = option(command)
    return command


class Delivered(TypedDict):
    """The arguments that name messages."""

    name: str | None
    id: str | None
    lease_id: str | None
    fence: int | None
    lease_ids: tuple[str, ...]


@click.command(
    "ack",
    cls=LeafCommand,
    examples=[
        "fastness queue ack",
        "fastness queue ack jobs --id … --lease-id … --fence 1",
        "fastness queue ack jobs 0198f…-1 0198f…-3",
        "fastness queue ack --result '{\"total\": 3}'",
    ],
)
@_delivery_options
@click.option("--result", metavar="JSON", help="The result of the message, which `message result` prints.")
@click.option("--result-file", metavar="PATH", help="Read the result from a file, JSON or bytes; - is standard input.")
def ack(*, result: str | None, result_file: str | None, **delivered: Unpack[Delivered]) -> None:
    """Acknowledge messages as done. Repeating this is safe.

    Results are kept for the --result-ttl of the queue's policy.
    """
    has_result = result is not None or result_file is not None
    value = _read_result(result, result_file) if has_result else None
    with connect.open_plane() as plane:
        queue, messages = _held_messages(plane, delivered)
        with _files_removed(messages):
            if not has_result:
                queue.ack_many(messages)
            elif len(messages) > 1:
                raise InvalidArgument("A result belongs to one message; acknowledge the messages one by one")
            else:
                messages[0].ack(result=value)
    _print_outcome("Acknowledged {}", messages, "acked")


def _read_result(text: str | None, file: str | None) -> Any:
    """The result of `queue ack`: JSON, or the bytes of a file that is not JSON."""
    with values.open_input(text, file) as stream:
        data = stream.read()
    value = values.parse_json(data) if file is None else _json_or_bytes(data)
    if value is None:
        raise InvalidArgument("null is the same as no result; leave the result out")
    return value


def _json_or_bytes(data: bytes) -> Any:
    try:
        return values.parse_json(data)
    except InvalidValue:
        return data


@click.command(
    "nack",
    cls=LeafCommand,
    examples=[
        "fastness queue nack --delay 30s --error 'the API was down'",
        "fastness queue nack jobs 0198f…-1 --defer",
    ],
)
@_delivery_options
@click.option(
    "--delay",
    type=SECONDS,
    help="How long to wait before the next delivery.  [default: the back-off of the queue's policy; 0 with --defer]",
)
@click.option("--defer", is_flag=True, help="Do not count this as a failed attempt.")
@click.option("--error", help="The error to record with the message.")
def nack(*, delay: float | None, defer: bool, error: str | None, **delivered: Unpack[Delivered]) -> None:
    """Release messages, so that they are delivered again."""
    with connect.open_plane() as plane:
        queue, messages = _held_messages(plane, delivered)
        queue.nack_many(messages, delay_seconds=delay, intent="defer" if defer else "failure", error=error)
    _print_outcome("Released {}", messages, "nacked")


@click.command("reject", cls=LeafCommand, examples=["fastness queue reject --error 'no such customer'"])
@_delivery_options
@click.option("--error", help="The error to record with the dead letter.")
def reject(*, error: str | None, **delivered: Unpack[Delivered]) -> None:
    """Move messages to the dead letters at once."""
    with connect.open_plane() as plane:
        queue, messages = _held_messages(plane, delivered)
        with _files_removed(messages):
            queue.reject_many(messages, error)
    _print_outcome("Moved {} to the dead letters", messages, "rejected")


@click.command("extend", cls=LeafCommand, examples=["fastness queue extend --by 5m"])
@_delivery_options
@click.option("--by", "seconds", type=SECONDS, default=30.0, help="The minimum lease time from now.  [default: 30]")
def extend(*, seconds: float, **delivered: Unpack[Delivered]) -> None:
    """Extend the leases of messages. Extending never shortens a lease."""
    with connect.open_plane() as plane:
        queue, messages = _held_messages(plane, delivered)
        queue.extend_many(messages, seconds)
    until = printing.timestamp(min(message.expires_ms for message in messages))
    _print_outcome("Extended {} until " + str(until), messages, "extended", expires_at=until)


def delivery_fields(delivery: Delivery) -> dict[str, Any]:
    """The fields of a message, as the command line prints them."""
    return printing.fields(delivery, without=("lease_id", "fence", "expires_ms", "visibility_ms", "state"))


def _output_fields(message: Message, payload_out: str | None) -> dict[str, Any]:
    """The output for a leased message. Releases the message if its payload cannot be written."""
    try:
        is_inline = wants_json() and message.payload is not None and payload_out is None
        path = None if is_inline else _write_payload(message, payload_out)
        return _fields(message, path) if wants_json() else _variables(message, path)
    except BaseException:
        payload_files.remove(message.queue, message.id)
        message.nack(intent="defer", error="The consumer could not write the payload to a file")
        raise


def _fields(message: Message, path: Path | None) -> dict[str, Any]:
    found = delivery_fields(message.delivery)
    found |= {
        "queue": message.queue,
        "lease_id": message.lease.lease_id,
        "fence": message.fence,
        "expires_at": printing.timestamp(message.expires_ms),
    }
    if path is not None:
        found["payload_path"] = str(path)
    if message.delivery.state is not None:
        state_lease = message.delivery.state.lease
        found["state"] = {
            "value": printing.jsonable(message.state),
            "etag": message.delivery.state.etag,
            "key": state_lease.key,
            "lease_id": state_lease.lease_id,
            "fence": state_lease.fence,
        }
    return found


def _variables(message: Message, path: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "NAME": message.queue,
        "MESSAGE_ID": message.id,
        "LEASE_ID": message.lease.lease_id,
        "FENCE": message.fence,
        "ATTEMPTS": message.attempts,
        "CORRELATION_ID": message.correlation_id,
        "CONTENT_TYPE": message.delivery.content_type,
        "EXPIRES_AT": printing.timestamp(message.expires_ms),
        "PAYLOAD_PATH": path,
    }
    if message.delivery.state is not None:
        state_lease = message.delivery.state.lease
        found |= {
            "STATE_KEY": state_lease.key,
            "STATE_LEASE_ID": state_lease.lease_id,
            "STATE_FENCE": state_lease.fence,
        }
        found["STATE_PATH"] = _write_state(message)
    return {f"FASTNESS_QUEUE_{name}": value for name, value in found.items()}


def _write_payload(message: Message, payload_out: str | None) -> Path:
    """Stream the payload to a file. Returns its path."""
    with _checked_writing():
        if payload_out is None:
            file, path = payload_files.create(message.queue, message.id, message.fence, "payload")
        else:
            path = Path(payload_out).absolute()
            file = path.open("wb")
        with file:
            for chunk in message.open():
                file.write(chunk)
    return path


def _write_state(message: Message) -> Path:
    """Write the workflow state to a file, as JSON. Returns its path."""
    with _checked_writing():
        file, path = payload_files.create(message.queue, message.id, message.fence, "state.json")
        with file:
            file.write(printing.compact(message.state).encode())
    return path


@contextmanager
def _checked_writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PathUnusable(
            f"Cannot write {error.filename or 'the file'} ({error.strerror or error}); the message was released. "
            "Choose another file with --payload-out, or another folder with XDG_STATE_HOME"
        ) from error


def _held_messages(plane: Plane, delivered: Delivered) -> tuple[Queue, list[Message]]:
    """Handles for messages that another process has leased, and their queue."""
    name, id, lease_id, fence = delivered["name"], delivered["id"], delivered["lease_id"], delivered["fence"]
    if name is not None and delivered["lease_ids"]:
        queue = plane.queue(name)
        return queue, [_held_message(queue, each) for each in delivered["lease_ids"]]
    if name is None or id is None or lease_id is None or fence is None:
        raise InvalidArgument(
            'No message given; run eval "$(fastness queue get QUEUE)" first, '
            "or give QUEUE and lease ids, or QUEUE, --id, --lease-id and --fence"
        )
    queue = plane.queue(name)
    return queue, [queue.held(id, lease_id=lease_id, fence=fence)]


def _held_message(queue: Queue, lease_id: str) -> Message:
    """A message by its lease id, which has the message id and the fence."""
    match = _LEASE_ID.fullmatch(lease_id)
    if match is None:
        raise InvalidArgument(f"{lease_id[:80]!r} is not a lease id; `fastness queue leased {queue.name}` shows them")
    return queue.held(str(UUID(match[1])), lease_id=lease_id, fence=int(match[2]))


@contextmanager
def _files_removed(messages: list[Message]) -> Iterator[None]:
    """Remove the files of the messages that the block settles; if it fails, it may have settled some."""
    try:
        yield
    finally:
        for message in messages:
            if message.settled:
                payload_files.remove(message.queue, message.id)


def _print_outcome(text: str, messages: list[Message], outcome: str, **more: Any) -> None:
    fields: dict[str, Any] = {"queue": messages[0].queue}
    if len(messages) == 1:
        fields["id"] = subject = messages[0].id
    else:
        fields["ids"], subject = [message.id for message in messages], f"{len(messages):,} messages"
    printing.result(text.format(subject), {**fields, "outcome": outcome, **more})
