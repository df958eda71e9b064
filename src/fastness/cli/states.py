"""`fastness state`: documents that are changed under a lease or with compare-and-set."""

from typing import Unpack

import click
import msgspec

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.leases import LeaseOptions, held_lease, lease_options
from fastness.errors import NotFound

state = CommandGroup(completions={"lease_key": completion.leases})


@state.command(examples=["fastness state get orders/17 --json"])
@click.argument("key")
def get(key: str) -> None:
    """Show the document of a key, with its ETag. Exit code 4 means that it does not exist."""
    with connect.open_plane() as plane:
        found = plane.state(key).get()
    if found is None:
        raise NotFound(f"State {key} does not exist; set it first")
    fields = {"key": key, **printing.fields(found), "value": printing.jsonable(found.value)}
    printing.record(fields)


@state.command(
    "set",
    examples=[
        "fastness state set orders/17 '{\"shipped\": true}'",
        "fastness state set orders/17 '{\"shipped\": true}' --if-match 0198f…",
        "fastness lease run deploy -- sh -c 'fastness state set deploy \"{}\" --leased'",
    ],
)
@click.argument("key")
@click.argument("value", required=False)
@click.option("--file", metavar="PATH", help="Read the value from a file; - is standard input.")
@click.option("--text", is_flag=True, help="The value is text, not JSON.")
@click.option("--if-match", metavar="ETAG", help="Write only if the document has this ETag; * is any.")
@click.option("--if-absent", is_flag=True, help="Write only if the document does not exist.")
@click.option("--correlation-id", help="An id that links related messages and requests.")
@lease_options
def set_(
    *,
    key: str,
    value: str | None,
    file: str | None,
    text: bool,
    if_match: str | None,
    if_absent: bool,
    correlation_id: str | None,
    **lease: Unpack[LeaseOptions],
) -> None:
    """Write the document of a key.

    The value is JSON: an argument, a file, or standard input.
    """
    with values.open_input(value, file) as stream:
        data = stream.read()
    document = data.decode() if text else values.parse_json(data)
    with connect.open_plane(create=True) as plane:
        written = plane.state(key).update(
            document,
            lease=held_lease(plane, **lease),
            if_match=if_match,
            if_absent=if_absent,
            correlation_id=correlation_id,
        )
    printing.result(f"{key} has version {written.version}, ETag {written.etag}", msgspec.to_builtins(written))


@state.command()
@click.argument("key")
@click.option("--if-match", metavar="ETAG", help="Delete only if the document has this ETag; * is any.")
@lease_options
def delete(key: str, if_match: str | None, **lease: Unpack[LeaseOptions]) -> None:
    """Delete the document of a key. Exit code 4 means that it does not exist."""
    with connect.open_plane() as plane:
        deleted = plane.state(key).remove(lease=held_lease(plane, **lease), if_match=if_match)
    if not deleted:
        raise NotFound(f"State {key} does not exist")
    printing.result(f"Deleted {key}", {"key": key, "deleted": True})
