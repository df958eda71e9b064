"""The options of a message, for whatever puts one: `queue put` and `queue schedule add`."""

import itertools
from typing import IO, Any

import click
import msgspec

from holdfast.cli import values
from holdfast.cli.durations import SECONDS
from holdfast.handles import Plane
from holdfast.limits import PAYLOAD_INLINE_BYTES_MAX
from holdfast.wire.queues import NewMessage


def message_options(command: Any) -> Any:
    """The options of a message, as keyword arguments of a `NewMessage`; only what was given."""

    def given(**arguments: Any) -> Any:
        names = set(NewMessage.__struct_fields__)
        attributes = dict(map(values.attribute, arguments.pop("attributes")))
        if attributes:
            arguments["attributes"] = attributes
        return command(**{name: value for name, value in arguments.items() if value is not None or name not in names})

    given.__name__, given.__doc__ = command.__name__, command.__doc__
    given.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    wrapped: Any = given
    for option in (
        click.option("--content-type", help="What the body is.  [default: JSON if it is, or else bytes]"),
        click.option("--visibility", "visibility_seconds", type=SECONDS, help="How long a delivery is leased."),
        click.option("--max-attempts", type=int, help="How many failures make a dead letter."),
        click.option("--correlation-id", help="What ties it to whatever led to it."),
        click.option(
            "--attribute", "attributes", multiple=True, metavar="NAME=TEXT", help="Beside the body; repeatable."
        ),
        click.option("--idempotency-key", help="A second put with the same key within 5 minutes puts nothing."),
        click.option("--group", help="One message of a group at a time, in order."),
        click.option("--priority", type=int, help="0 to 9; 9 is delivered first.  [default: 5]"),
        click.option("--ttl", "ttl_seconds", type=SECONDS, help="When it is removed, delivered or not."),
        click.option("--delay", "delay_seconds", type=SECONDS, help="How long it is not delivered."),
    ):
        wrapped = option(wrapped)
    return wrapped


def message_of(plane: Plane, stream: IO[bytes], options: dict[str, Any]) -> NewMessage:
    """The message that a stream is; a large one is stored as a blob on the way, in bounded memory."""
    first = stream.read(PAYLOAD_INLINE_BYTES_MAX + 1)
    if len(first) <= PAYLOAD_INLINE_BYTES_MAX:
        return NewMessage(payload=first, **{"content_type": kind_of(first), **options})
    size = 0

    def counted() -> Any:
        nonlocal size
        for piece in itertools.chain((first,), values.chunks(stream)):
            size += len(piece)
            yield piece

    hash = plane.blobs.write(counted())
    return NewMessage(blob=hash, blob_size=size, **options)


def kind_of(body: bytes) -> str:
    """What a body is: JSON, text or bytes."""
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    else:
        return "application/json"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain; charset=utf-8" if body else "application/octet-stream"
