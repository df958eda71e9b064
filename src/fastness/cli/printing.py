"""The output of commands: tables, JSON with --json, and progress bars on a terminal.

A list is one JSON array. Streams, such as `tail`, print one JSON object per line. Control characters in data are
escaped, so no payload can move the terminal's cursor.

A table fits the terminal, except for ids, names and fences: they stay in one piece, so that they can be copied, and the
line is longer if need be. Where the output is not a terminal, every item is one line and nothing is shortened.
"""

import base64
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Final

import click
import msgspec

from fastness.cli.given_options import wants_json
from fastness.wire.json_values import non_finite_text

_GAP: Final = 2  # Spaces between two columns.
_FOLDED_WIDTH_MIN: Final = 10
# The fields that are copied into other commands.
_UNFOLDED: Final = frozenset(
    (
        *("agent", "blob", "correlation_id", "cron", "dead_letter_queue", "etag", "fence", "from"),
        *("group", "hash", "id", "key", "kind", "lease_id", "manifest_hash", "name", "origin", "owner", "path"),
        *("payload_path", "public_key", "queue", "sender", "sequence", "session", "to", "txn_id", "universe", "url"),
        *("version", "world"),
    )
)
_encode = msgspec.json.Encoder().encode

Advance = Callable[[int], None]


def record(fields: Mapping[str, Any]) -> None:
    """Print one item, with one field per line."""
    if wants_json():
        _echo_json(fields)
    else:
        names, cells = list(fields), [_cell(value) for value in fields.values()]
        unfolded = [cell for name, cell in zip(names, cells, strict=True) if name in _UNFOLDED]
        labels = [name.replace("_", " ") for name in names]
        _table([labels, cells], [labels, unfolded], has_header=False)


def rows(items: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str = "No results.") -> None:
    """Print items as a table of `columns`, or as JSON with all fields. Prints `empty` if there are none."""
    if wants_json():
        _echo_json(items)
    elif items:
        cells = [[column.replace("_", " "), *(_cell(each.get(column)) for each in items)] for column in columns]
        unfolded = [each if name in _UNFOLDED else each[0].split() for name, each in zip(columns, cells, strict=True)]
        _table(cells, unfolded, has_header=True)
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


def fields(found: msgspec.Struct, *, without: Collection[str] = (), **renamed: str) -> dict[str, Any]:
    """An answer as JSON fields: a time such as `due_ms` is `due_at`, and bytes are as in `payload`."""
    shown: dict[str, Any] = {}
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if name in without or (name == "payload" and value is None):
            continue
        label = renamed.get(name, name)
        if name.endswith("_ms"):
            shown[renamed.get(name, "at" if name == "at_ms" else f"{name[:-3]}_at")] = timestamp(value)
        elif isinstance(value, bytes):
            parts = payload(value, getattr(found, "content_type", ""))
            shown |= {part.replace("payload", label): each for part, each in parts.items()}
        elif isinstance(value, msgspec.Struct):
            shown[label] = fields(value)
        elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
            shown[label] = [fields(each) for each in value]
        else:
            shown[label] = value
    return shown


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
        except (msgspec.MsgspecError, RecursionError):
            pass
    try:
        return {"payload": data.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}


def excerpt(data: bytes | None, size: int, characters: int = 60) -> str:
    """The start of a payload, for a table cell; all of it if the output is not a terminal."""
    if data is None:
        return f"<{size:,} bytes>"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"<{size:,} bytes>"
    return text if len(text) <= characters or not sys.stdout.isatty() else text[: characters - 1] + "…"


def jsonable(value: Any) -> Any:
    """A CBOR value with JSON types. Bytes become base64, numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(part) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not isfinite(value):
        return non_finite_text(value)
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


def _table(columns: list[list[str]], unfolded: list[list[str]], *, has_header: bool) -> None:
    """Print columns of cells. The cells in `unfolded`, by column, are not broken into several lines."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def width(cells: Sequence[str]) -> int:
        return max((cell_len(line) for cell in cells for line in cell.split("\n")), default=0)

    widths = [width(cells) for cells in columns]
    if sys.stdout.isatty():
        available = shutil.get_terminal_size().columns - _GAP * (len(columns) - 1)
        widths = _fitted(widths, [width(cells) for cells in unfolded], available)
    table = Table(box=None, show_header=has_header, pad_edge=False, header_style="bold")
    for cells, column_width in zip(columns, widths, strict=True):
        table.add_column(Text(cells[0]) if has_header else "", width=column_width, overflow="fold")
    for row in zip(*(cells[has_header:] for cells in columns), strict=True):
        table.add_row(*map(Text, row))
    console = Console(file=sys.stdout, width=sum(widths) + _GAP * len(widths))
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(each.rstrip() for each in captured.get().splitlines()))


def _fitted(widths: list[int], widths_min: list[int], available: int) -> list[int]:
    """The widths, with the widest ones reduced until all fit; none below its minimum."""
    widths_min = [max(least, min(width, _FOLDED_WIDTH_MIN)) for width, least in zip(widths, widths_min, strict=True)]
    for most in range(available, 0, -1):
        fitted = [max(min(width, most), least) for width, least in zip(widths, widths_min, strict=True)]
        if sum(fitted) <= available:
            return fitted
    return widths_min


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return _cell(", ".join(value) or None)
    text = escape_control(compact(value) if isinstance(value, dict | list) else str(value))
    return text if sys.stdout.isatty() else text.replace("\n", "\\n")
