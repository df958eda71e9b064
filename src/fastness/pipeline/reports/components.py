"""HTML building blocks of the page: tables, grids and placeholders. Cells are escaped here."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

from fastness.pipeline.reports import formatting
from fastness.pipeline.reports.facts import Row

_SHADES: Final = 9  # Of a grid's cells; the styles have one class for each.
_NAME_CHARACTERS: Final = 24  # Of an agent in a heading of a grid.


class Column(NamedTuple):
    """A column of a table: its heading, and the text of its cells."""

    heading: str
    format: Callable[[Row], str]
    kind: str = "number"  # number, text, or code
    bar: Callable[[Row], float] | None = None  # The length of a bar beside the text, compared with the other rows.


def table(caption: str, rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """A table with a caption; a wide one scrolls horizontally."""
    rows = list(rows)
    if not rows:
        return f'<p class="nothing">{escape(caption)}: none.</p>'
    longest = [max(map(column.bar, rows)) if column.bar is not None else 0.0 for column in columns]
    body = []
    for row in rows:
        cells = [_cell(column, row, longest[n], is_first=not n) for n, column in enumerate(columns)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    kinds = {"number": "number", "text": "text", "code": "text"}
    head = "".join(f'<th scope="col" class="{kinds[each.kind]}">{escape(each.heading)}</th>' for each in columns)
    return _scrollable(caption, "", head, body)


def grid(caption: str, rows: Sequence[str], columns: Sequence[str], cells: dict[tuple[int, int], float]) -> str:
    """Numbers by row and column, with a shade for each that shows its size."""
    if not cells:
        return placeholder(f"{caption}: nothing to show yet.")
    maximum = max(cells.values())

    def heading(name: str, scope: str) -> str:
        return f'<th scope="{scope}" title="{escape(name)}">{escape(formatting.shorten(name, _NAME_CHARACTERS))}</th>'

    def cell(value: float | None) -> str:
        if not value:
            return "<td></td>"
        return f'<td class="s{max(math.ceil(_SHADES * math.sqrt(value / maximum)), 1)}">{formatting.short(value)}</td>'

    head = f"<td></td>{''.join(heading(name, 'col') for name in columns)}"
    body = [
        f"<tr>{heading(name, 'row')}{''.join(cell(cells.get((m, n))) for n in range(len(columns)))}</tr>"
        for m, name in enumerate(rows)
    ]
    return _scrollable(caption, "grid", head, body)


def beside(*parts: str) -> str:
    """Parts side by side; one below the other on a phone."""
    return f'<div class="beside">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def introduction(text: str) -> str:
    """The introduction of a section."""
    return f'<p class="about">{escape(text)}</p>'


def placeholder(text: str) -> str:
    """A placeholder for missing data."""
    return f'<p class="nothing">{escape(text)}</p>'


def _scrollable(caption: str, css_class: str, head: str, body: Sequence[str]) -> str:
    # Keyboard scrolling needs a focusable element.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{css_class}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(column: Column, row: Row, longest: float, *, is_first: bool) -> str:
    message = escape(column.format(row))
    if is_first:
        return f'<th scope="row" class="text">{message}</th>'
    if column.kind == "code":
        return f'<td class="text code"><code>{message}</code></td>'
    if column.bar is not None and longest > 0:
        message = f'<meter max="{longest:g}" value="{column.bar(row):g}" aria-hidden="true"></meter>{message}'
    return f'<td class="{column.kind}">{message}</td>'
