"""Input values of commands: JSON, text, files and standard input."""

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, Final

import click
import msgspec

from fastness.errors import InvalidArgument, InvalidValue, PathUnusable
from fastness.limits import BLOB_PART_BYTES

_FIELD_SYNTAX: Final = "use name=text, or name:=JSON as in tries:=3"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        InvalidValue: the text is not JSON.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        shown = text if isinstance(text, str) else text[:60].decode(errors="replace")
        raise InvalidValue(f"{shown[:60]!r} is not JSON ({error}); quote a text as '\"text\"'") from None


def parse_field(argument: str) -> tuple[str, Any]:
    """Split `name=text` or `name:=JSON` into name and value."""
    name, equals, value = argument.partition("=")
    if not equals or not name.rstrip(":"):
        raise InvalidArgument(f"{argument!r} is not a field; {_FIELD_SYNTAX}")
    if name.endswith(":"):
        return name[:-1], parse_json(value)
    return name, value


def parse_attribute(argument: str) -> tuple[str, str]:
    """Split `name=text` into name and value."""
    name, equals, value = argument.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"{argument!r} is not an attribute; use name=text")
    return name, value


@contextmanager
def open_input(argument: str | None, file: str | None) -> Iterator[IO[bytes]]:
    """The bytes of an argument, of a file, or of standard input for `-`.

    Raises:
        InvalidArgument: neither or both of them are given.
    """
    if (argument is None) == (file is None):
        raise InvalidArgument("Give the body once: as an argument, with --file PATH, or - for standard input")
    if argument == "-" or file == "-":
        yield sys.stdin.buffer
    elif argument is not None:
        yield io.BytesIO(argument.encode(errors="surrogateescape"))
    else:
        with ExitStack() as stack:
            try:
                stream = stack.enter_context(open(str(file), "rb"))
            except OSError as error:
                raise PathUnusable(
                    f"Cannot read {file} ({error.strerror}); check the path and its permissions"
                ) from error
            yield stream


def read_chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """The contents of a stream, in chunks."""
    while chunk := stream.read(BLOB_PART_BYTES):
        yield chunk


def confirm(question: str, *, yes: bool) -> None:
    """Ask before an operation that cannot be undone, unless --yes was given.

    Raises:
        Abort: the answer was no.
        InvalidArgument: there is no terminal to ask on.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{question} Give --yes to confirm, because there is no terminal to ask on")
    click.confirm(question, abort=True, err=True)
