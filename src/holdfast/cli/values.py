"""Values on the command line: JSON, text, files and standard input."""

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, Final

import click
import msgspec

from holdfast.errors import InvalidArgument, InvalidValue, PathUnusable
from holdfast.limits import BLOB_PART_BYTES

_FIELD: Final = "write name=text, or name:=JSON as in tries:=3"


def json_value(text: str | bytes) -> Any:
    """The value that JSON stands for.

    Raises:
        InvalidValue: it is no JSON.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        shown = text if isinstance(text, str) else text[:60].decode(errors="replace")
        raise InvalidValue(f"{shown[:60]!r} is no JSON ({error}); text is written '\"like this\"'") from None


def field(word: str) -> tuple[str, Any]:
    """The name and the value of `name=text` or `name:=JSON`."""
    name, equals, value = word.partition("=")
    if not equals or not name.rstrip(":"):
        raise InvalidArgument(f"{word!r} is no field; {_FIELD}")
    if name.endswith(":"):
        return name[:-1], json_value(value)
    return name, value


def attribute(word: str) -> tuple[str, str]:
    """The name and the value of `name=text`."""
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"{word!r} is no attribute; write name=text")
    return name, value


@contextmanager
def source(argument: str | None, file: str | None) -> Iterator[IO[bytes]]:
    """The bytes that an argument, a file or, for `-`, standard input has.

    Raises:
        InvalidArgument: there is none of them, or more than one.
    """
    if (argument is None) == (file is None):
        raise InvalidArgument("Give one of these: the body as an argument, --file PATH, or - for standard input")
    if argument == "-" or file == "-":
        yield sys.stdin.buffer
    elif argument is not None:
        yield io.BytesIO(argument.encode(errors="surrogateescape"))
    else:
        with ExitStack() as stack:
            try:
                stream = stack.enter_context(open(str(file), "rb"))
            except OSError as error:
                raise PathUnusable(f"{file} cannot be read ({error.strerror}); name one that you can read") from error
            yield stream


def chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """A stream in pieces."""
    while piece := stream.read(BLOB_PART_BYTES):
        yield piece


def confirmed(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be taken back, unless --yes was given.

    Raises:
        Abort: the answer was no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{question} There is nobody to ask here; give --yes")
    click.confirm(question, abort=True, err=True)
