"""`holdfast state`: documents that only a holder, or whoever saw the latest version, may change."""

from typing import Any

import click
import msgspec

from holdfast.cli import connect, printing, values
from holdfast.cli.commands import Noun
from holdfast.cli.leases import lease_of, lease_options
from holdfast.errors import NotFound


@click.group(cls=Noun)
def state() -> None:
    """Documents with versions."""


@state.command(examples=["holdfast state get orders/17 --json"])
@click.argument("key")
def get(key: str) -> None:
    """The document of a key, with its ETag; exit code 4 says that there is none."""
    with connect.opened() as plane:
        found = plane.state(key).get()
    if found is None:
        raise NotFound(f"There is no state {key}; set it first")
    fields = {
        "key": key,
        "value": printing.jsonable(found.value),
        "etag": found.etag,
        "version": found.version,
        "updated_at": printing.moment(found.updated_ms),
        "correlation_id": found.correlation_id,
    }
    printing.record(fields)


@state.command(
    "set",
    examples=[
        "holdfast state set orders/17 '{\"shipped\": true}'",
        "holdfast state set orders/17 '{\"shipped\": true}' --if-match 0198f…",
        "holdfast lock run deploy -- sh -c 'holdfast state set deploy \"{}\" --locked'",
    ],
)
@click.argument("key")
@click.argument("value", required=False)
@click.option("--file", metavar="PATH", help="Take the value from a file; - is standard input.")
@click.option("--text", is_flag=True, help="The value is text, not JSON.")
@click.option("--if-match", metavar="ETAG", help="Only in place of this version; * is any.")
@click.option("--if-absent", is_flag=True, help="Only if there is none.")
@click.option("--correlation-id", help="What ties it to whatever led to it.")
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
    **lease: Any,
) -> None:
    """Write the document of a key: JSON as an argument, from a file, or from standard input."""
    with values.source(value, file) as stream:
        data = stream.read()
    document = data.decode() if text else values.json_value(data)
    with connect.opened() as plane:
        written = plane.state(key).update(
            document,
            lease=lease_of(plane, **lease),
            if_match=if_match,
            if_absent=if_absent,
            correlation_id=correlation_id,
        )
    printing.done(f"{key} has version {written.version}, ETag {written.etag}", msgspec.to_builtins(written))


@state.command()
@click.argument("key")
@click.option("--if-match", metavar="ETAG", help="Only this version; * is any.")
@lease_options
def rm(key: str, if_match: str | None, **lease: Any) -> None:
    """Remove the document of a key; exit code 4 says that there was none."""
    with connect.opened() as plane:
        removed = plane.state(key).remove(lease=lease_of(plane, **lease), if_match=if_match)
    if not removed:
        raise NotFound(f"There is no state {key}")
    printing.done(f"{key} is removed", {"key": key, "removed": True})
