"""What sections of the page are made of: tables, figures, and a word where there is nothing. Cells are escaped here."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from holdfast.pipeline.reports.facts import Row


class Column(NamedTuple):
    """A column of a table: its heading, and what stands in it for a row."""

    heading: str
    say: Callable[[Row], str]
    kind: str = "number"  # number, text, or code


def table(caption: str, rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """Rows under a caption, which scroll by themselves where they are too wide."""
    body = []
    for row in rows:
        cells = [_cell(column, escape(column.say(row)), is_first=not n) for n, column in enumerate(columns)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    if not body:
        return f'<p class="nothing">{escape(caption)}: none.</p>'
    kinds = {"number": "number", "text": "text", "code": "text"}
    head = "".join(f'<th scope="col" class="{kinds[each.kind]}">{escape(each.heading)}</th>' for each in columns)
    # Whoever has no mouse scrolls with the keyboard, which needs a focus.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def figure(plot: str, caption: str = "") -> str:
    """A plot, and what else is to be said of it."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{plot}{below}</figure>"


def beside(heading: str, plot: str, table: str) -> str:
    """A plot, and a table with its numbers: next to each other, or below each other on a phone."""
    return f'<h3>{escape(heading)}</h3><div class="beside">{figure(plot)}{table}</div>'


def about(text: str) -> str:
    """What a section is about."""
    return f'<p class="about">{escape(text)}</p>'


def nothing(text: str) -> str:
    """In the place of what is not there."""
    return f'<p class="nothing">{escape(text)}</p>'


def _cell(column: Column, said: str, *, is_first: bool) -> str:
    if is_first:
        return f'<th scope="row" class="text">{said}</th>'
    if column.kind == "code":
        return f'<td class="text code"><code>{said}</code></td>'
    return f'<td class="{column.kind}">{said}</td>'
