"""HTML building blocks of the page: tables, figures and placeholders. Cells are escaped here."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from holdfast.pipeline.reports.facts import Row


class Column(NamedTuple):
    """A column of a table: its heading, and the text of its cells."""

    heading: str
    format: Callable[[Row], str]
    kind: str = "number"  # number, text, or code


def table(caption: str, rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """A table with a caption; a wide one scrolls horizontally."""
    body = []
    for row in rows:
        cells = [_cell(column, escape(column.format(row)), is_first=not n) for n, column in enumerate(columns)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    if not body:
        return f'<p class="nothing">{escape(caption)}: none.</p>'
    kinds = {"number": "number", "text": "text", "code": "text"}
    head = "".join(f'<th scope="col" class="{kinds[each.kind]}">{escape(each.heading)}</th>' for each in columns)
    # Keyboard scrolling needs a focusable element.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def figure(plot: str, caption: str = "") -> str:
    """A plot with an optional caption."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{plot}{below}</figure>"


def plot_with_table(heading: str, plot: str, table: str) -> str:
    """A plot and a table side by side; one below the other on a phone."""
    return f'<h3>{escape(heading)}</h3><div class="beside">{figure(plot)}{table}</div>'


def introduction(text: str) -> str:
    """The introduction of a section."""
    return f'<p class="about">{escape(text)}</p>'


def placeholder(text: str) -> str:
    """A placeholder for missing data."""
    return f'<p class="nothing">{escape(text)}</p>'


def _cell(column: Column, message: str, *, is_first: bool) -> str:
    if is_first:
        return f'<th scope="row" class="text">{message}</th>'
    if column.kind == "code":
        return f'<td class="text code"><code>{message}</code></td>'
    return f'<td class="{column.kind}">{message}</td>'
