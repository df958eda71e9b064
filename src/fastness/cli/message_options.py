"""The message options of `queue put` and `queue schedule add`."""

import itertools
from collections.abc import Iterator
from typing import IO, Any, Final

import click
import msgspec
from click.shell_completion import CompletionItem

from fastness.cli import values
from fastness.cli.durations import SECONDS, Seconds
from fastness.handles.queues import MessageOptions
from fastness.handles.sync.plane import Plane
from fastness.limits import PAYLOAD_INLINE_BYTES_MAX
from fastness.wire.queues import NewMessage


class UniqueUntil(click.ParamType[Any]):
    """Until when a unique key belongs to its message: done, leased, or a duration."""

    name = "done|leased|seconds"
    _seconds: Final = Seconds()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("done", "leased"):
            return value
        return self._seconds.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        del ctx, param
        return [CompletionItem(word) for word in ("done", "leased") if word.startswith(incomplete)]


def message_options(command: Any) -> Any:
    """Add the message options to a command, which receives those given as keyword arguments of `NewMessage`."""

    def with_given(**arguments: Any) -> Any:
        names = set(NewMessage.__struct_fields__)
        attributes = dict(map(values.parse_attribute, arguments.pop("attributes")))
        if attributes:
            arguments["attributes"] = attributes
        return command(**{name: value for name, value in arguments.items() if value is not None or name not in names})

    with_given.__name__, with_given.__doc__ = command.__name__, command.__doc__
    with_given.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    wrapped: Any = with_given
    for option in (
        click.option(
            "--debounce-max",
            "debounce_max_seconds",
            type=SECONDS,
            help="Hold a debounced message back for at most this time after the first put.",
        ),
        click.option(
            "--debounce",
            "debounce_seconds",
            type=SECONDS,
            help="Hold the message of --debounce-key back for this time after the last put.",
        ),
        click.option(
            "--debounce-key", help="Replace the message with the same key that is still held back. Needs --debounce."
        ),
        click.option(
            "--unique-until",
            type=UniqueUntil(),
            help="How long the message has its --unique-key: until it is done (or dead or cancelled), until it is "
            "leased, or a time.  [default: done]",
        ),
        click.option("--unique-key", help="Put nothing while another message has the same key."),
        click.option(
            "--keep-result",
            is_flag=True,
            default=None,
            help="Keep what became of the message, so that `message show` and `message result` find it.",
        ),
        click.option("--key", help="The key of the message. The policy can limit the deliveries of each key."),
        click.option("--content-type", help="The content type of the body.  [default: detected]"),
        click.option(
            "--retry-delay", "retry_delay_seconds", type=SECONDS, help="The back-off after the first failed attempt."
        ),
        click.option("--visibility", "visibility_seconds", type=SECONDS, help="The lease time of a delivery."),
        click.option(
            "--max-attempts", type=int, help="After this many failed attempts, a message becomes a dead letter."
        ),
        click.option("--correlation-id", help="An id that links related messages and requests."),
        click.option(
            "--attribute",
            "attributes",
            multiple=True,
            metavar="NAME=TEXT",
            help="An attribute of the message. Repeatable.",
        ),
        click.option(
            "--idempotency-key", help="A put with the same key within 5 minutes is a duplicate and stores nothing."
        ),
        click.option("--group", help="The message group. Messages of a group are delivered one at a time, in order."),
        click.option("--priority", type=int, help="The priority, 0 to 9; 9 is delivered first.  [default: 5]"),
        click.option(
            "--ttl", "ttl_seconds", type=SECONDS, help="Remove the message after this time, delivered or not."
        ),
        click.option("--delay", "delay_seconds", type=SECONDS, help="Deliver the message after this time."),
    ):
        wrapped = option(wrapped)
    return wrapped


def read_message(plane: Plane, stream: IO[bytes], options: MessageOptions) -> NewMessage:
    """A message with the stream's contents. A large payload is stored as a blob, in bounded memory."""
    first = stream.read(PAYLOAD_INLINE_BYTES_MAX + 1)
    if len(first) <= PAYLOAD_INLINE_BYTES_MAX:
        return inline_message(first, options)
    size = 0

    def count_bytes() -> Iterator[bytes]:
        nonlocal size
        for chunk in itertools.chain((first,), values.read_chunks(stream)):
            size += len(chunk)
            yield chunk

    hash = plane.blobs.write(count_bytes(), pinned=False)  # The message names it.
    return NewMessage(blob=hash, blob_size=size, **options)


def inline_message(body: bytes, options: MessageOptions) -> NewMessage:
    """A message with this body, whose content type is guessed if it is not given."""
    with_content_type: MessageOptions = {"content_type": guess_content_type(body), **options}
    return NewMessage(payload=body, **with_content_type)


def guess_content_type(body: bytes) -> str:
    """The content type of a body: JSON, text or bytes."""
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
