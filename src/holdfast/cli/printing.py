"""The output of commands: tables, JSON with --json, and progress bars on a terminal.

A list is one JSON array. Streams, such as `tail`, print one JSON object per line. Control characters in data are
escaped, so no payload can move the terminal's cursor.
"""

import base64
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from holdfast.cli.commands import wants_json

_WIDTH_UNLIMITED: Final = 10_000  # Output that is not a terminal is not wrapped.
_encode = msgspec.json.Encoder().encode

Advance = Callable[[int], None]


def record(fields: Mapping[str, Any]) -> None:
    """Print one item, with one field per line."""
    if wants_json():
        _echo_json(fields)
    else:
        _table(None, [[name.replace("_", " "), _cell(value)] for name, value in fields.items()])


def rows(items: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str = "No results.") -> None:
    """Print items as a table of `columns`, or as JSON with all fields. Prints `empty` if there are none."""
    if wants_json():
        _echo_json(items)
    elif items:
        _table(list(columns), [[_cell(each.get(column)) for column in columns] for each in items])
    else:
        click.echo(empty, err=True)


def line(fields: Mapping[str, Any], text: str) -> None:
    """Print one item of a stream."""
    if wants_json():
        _echo_json(fields)
    else:
        click.echo(escape_control(text))
    sys.stdout.flush()  # A reader at the other end of a pipe must not wait for a full buffer.


def result(text: str, fields: Mapping[str, Any]) -> None:
    """Print the result of a command: `text`, or `fields` with --json."""
    if wants_json():
        _echo_json(fields)
    else:
        click.echo(escape_control(text))


def timestamp(ms: int | None) -> str | None:
    """Milliseconds since 1970 as RFC 3339; None for None or 0."""
    if not ms:
        return None
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def payload(data: bytes | None, content_type: str = "") -> dict[str, Any]:
    """A payload as JSON fields: a value for JSON, text for text, base64 otherwise."""
    if data is None:
        return {}
    if content_type.startswith("application/json"):
        try:
            return {"payload": msgspec.json.decode(data)}
        except msgspec.MsgspecError:
            pass
    try:
        return {"payload": data.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}


def excerpt(data: bytes | None, size: int, characters: int = 60) -> str:
    """The start of a payload, for a table cell."""
    if data is None:
        return f"<{size:,} bytes>"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"<{size:,} bytes>"
    return text if len(text) <= characters else text[: characters - 1] + "…"


def jsonable(value: Any) -> Any:
    """A CBOR value with JSON types. Bytes become base64."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(part) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def compact(value: Any) -> str:
    """A value as JSON on one line."""
    return _encode(jsonable(value)).decode()


def escape_control(text: str) -> str:
    """Text with its control characters escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Advance]:
    """A progress bar, shown on a terminal only. Call the yielded function with the number of completed steps."""
    if wants_json() or not sys.stderr.isatty():
        yield lambda _steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda steps: bar.advance(task, steps)


def _echo_json(value: Any) -> None:
    click.echo(_encode(value).decode())


def _table(columns: list[str] | None, cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    table = Table(box=None, show_header=columns is not None, pad_edge=False, header_style="bold")
    for column in columns or ("", ""):
        table.add_column(column.replace("_", " "), overflow="fold")
    for each in cells:
        table.add_row(*map(Text, each))
    console = Console(file=sys.stdout, width=None if is_terminal else _WIDTH_UNLIMITED)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(each.rstrip() for each in captured.get().splitlines()))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, dict | list):
        return escape_control(compact(value))
    return escape_control(str(value))
