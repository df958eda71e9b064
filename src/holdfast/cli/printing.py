"""What commands print: tables for people, JSON for programs, and progress bars on a terminal.

A list is one JSON array; what comes in time, as with `tail`, is one JSON object a line. Text from outside goes to a
terminal with its control characters spelled out, so that no payload can move the cursor.
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

_WIDE: Final = 10_000  # What is not a terminal has no edge to wrap at.
_encode = msgspec.json.Encoder().encode

Advance = Callable[[int], None]


def record(fields: Mapping[str, Any]) -> None:
    """One thing, with its fields below each other."""
    if wants_json():
        _echo_json(fields)
    else:
        _table(None, [[name.replace("_", " "), _cell(value)] for name, value in fields.items()])


def rows(found: Sequence[Mapping[str, Any]], columns: Sequence[str], *, nothing: str = "There is none.") -> None:
    """Many things: those columns of each as a table, or all their fields as JSON."""
    if wants_json():
        _echo_json(found)
    elif found:
        _table(list(columns), [[_cell(each.get(column)) for column in columns] for each in found])
    else:
        click.echo(nothing, err=True)


def line(fields: Mapping[str, Any], text: str) -> None:
    """One of the things that come in time."""
    if wants_json():
        _echo_json(fields)
    else:
        click.echo(clean(text))
    sys.stdout.flush()  # Whoever follows through a pipe must not wait for a full buffer.


def done(text: str, fields: Mapping[str, Any]) -> None:
    """What was done."""
    if wants_json():
        _echo_json(fields)
    else:
        click.echo(clean(text))


def moment(ms: int | None) -> str | None:
    """Milliseconds since 1970 as RFC 3339; None for a moment that there is not."""
    if not ms:
        return None
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def payload(data: bytes | None, content_type: str = "") -> dict[str, Any]:
    """Bytes in JSON: a value if they are JSON, text if they are text, and base64 otherwise."""
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
    """The beginning of a payload, for a cell of a table."""
    if data is None:
        return f"<{size:,} bytes>"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"<{size:,} bytes>"
    return text if len(text) <= characters else text[: characters - 1] + "…"


def jsonable(value: Any) -> Any:
    """A value from CBOR in JSON's types; bytes become base64."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(part) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def compact(value: Any) -> str:
    """A value as one line of JSON."""
    return _encode(jsonable(value)).decode()


def clean(text: str) -> str:
    """Text that cannot do anything to a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


@contextmanager
def progress(what: str, total: float | None = None) -> Iterator[Advance]:
    """A progress bar on a terminal, and nothing anywhere else; call what it gives with how far the work came."""
    if wants_json() or not sys.stderr.isatty():
        yield lambda _steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
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
    console = Console(file=sys.stdout, width=None if is_terminal else _WIDE)
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
        return clean(compact(value))
    return clean(str(value))
