"""`fastness collection`: the rows that are stored in collections."""

from typing import Any

import click
import msgspec

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.operations import operation
from fastness.errors import InvalidKey
from fastness.limits import COLLECTION_ROWS_MAX
from fastness.wire.collections import ListCollections, ListPartitions, Row, RowKey

collection = CommandGroup(completions={"collection": completion.collections})


operation(collection, "list", ListCollections, columns=("name",), limit=("--limit", 100), empty="No collections.")
operation(collection, "partitions", ListPartitions, columns=("partition",), limit=("--limit", 100))


@collection.command(
    examples=[
        "fastness collection scan langgraph thread:7",
        "fastness collection scan langgraph thread:7 --prefix '[\"\"]' --reverse --limit 1",
    ]
)
@click.argument("collection")
@click.argument("partition")
@click.option("--prefix", metavar="JSON", help="Only keys that start with these elements, as in '[\"a\", 7]'.")
@click.option("--after", metavar="JSON", help="Only keys after this one.")
@click.option("--before", metavar="JSON", help="Only keys before this one.")
@click.option("--reverse", is_flag=True, help="The last rows, backwards.")
@click.option("--limit", type=click.IntRange(1), help="The maximum number of rows; all of them by default.")
def scan(
    *,
    collection: str,
    partition: str,
    prefix: str | None,
    after: str | None,
    before: str | None,
    reverse: bool,
    limit: int | None,
) -> None:
    """Print the rows of a partition in the order of their keys.

    Prints one JSON object per line.
    """
    start, lower, upper = _key(prefix) or (), _key(after), _key(before)
    left = limit
    with connect.open_plane() as plane:
        rows = plane.collection(collection)
        while True:
            count = COLLECTION_ROWS_MAX if left is None else min(left, COLLECTION_ROWS_MAX)
            page = rows.scan(partition, start, after=lower, before=upper, limit=count, reverse=reverse)
            for row in page.rows:
                fields = _fields(row)
                printing.line(fields, printing.compact(fields))
            left = None if left is None else left - len(page.rows)
            if page.next is None or left == 0:
                return
            lower, upper = (lower, page.next) if reverse else (page.next, upper)


def _fields(row: Row) -> dict[str, Any]:
    return {**printing.fields(row), "key": list(row.key)}


def _key(text: str | None) -> RowKey | None:
    if text is None:
        return None
    try:
        return msgspec.convert(values.parse_json(text), RowKey)
    except msgspec.ValidationError as error:
        raise InvalidKey(f"{text[:60]!r} is not a key ({error}); give a list as in '[\"a\", 7]'") from None
