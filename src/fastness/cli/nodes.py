"""`fastness node` and `fastness upgrade`: the processes that share a plane, and the format that all of them know."""

from typing import Any, Final

import click
import msgspec

from fastness.cli import connect, printing
from fastness.cli.commands import CommandGroup, LeafCommand, wants_json
from fastness.cli.status import identity_fields
from fastness.wire.nodes import Nodes, NodeStatus

_COLUMNS: Final = (
    *("id", "kind", "state", "maintenance", "version", "formats", "address", "host", "pid", "seen"),
    *("calls/s", "connections", "consumers", "processor"),
)


node = CommandGroup()


@node.command(
    "list",
    examples=["fastness node list", "fastness node list --json", "fastness --url postgresql://me@db/plane node list"],
)
def list_() -> None:
    """List the nodes that share a plane on PostgreSQL.

    They are servers, and programs that have the plane open.

    A node renews its record every 5 seconds. One that stops is not listed any more; one that was killed or cannot reach
    PostgreSQL is gone after 30 seconds, and listed for 10 minutes. The node with maintenance does the periodic work:
    sweeps, schedules, compaction and the collection of unreferenced blobs.
    """
    with connect.open_plane() as plane:
        found = plane.nodes()
    if wants_json():
        printing.record(msgspec.to_builtins(found))
        return
    printing.rows([_row(node, found.now_ms) for node in found.nodes], _COLUMNS, empty="No nodes.")
    click.echo(_format_line(found), err=True)


@click.command(cls=LeafCommand, examples=["fastness --url postgresql://me@db/plane upgrade"])
def upgrade() -> None:
    """Run this once every node has this version; `fastness node list` shows them. It is refused while a process that
    does not know the format has the plane open. Afterwards older versions cannot open the plane, and it cannot be
    undone. Data is not converted: this version reads both formats. If the plane has the format already, nothing
    changes.
    """
    with connect.open_plane() as plane:
        found = plane.raise_format()
    printing.result(f"The plane has data format {found.data_format}", identity_fields(found))


def _format_line(found: Nodes) -> str:
    """The data format, and whether all nodes that are alive know a newer one."""
    known = [node.newest_format for node in found.nodes if node.alive]
    newest = max(known, default=found.data_format)
    line = f"Data format: {found.data_format}"
    if newest <= found.data_format:
        return line
    if min(known) == newest:
        return f"{line}. All nodes know format {newest}; raise it with: fastness upgrade"
    return f"{line}. {known.count(newest)} of {len(known)} nodes know format {newest}; upgrade the others"


def _row(node: NodeStatus, now_ms: int) -> dict[str, Any]:
    seen_seconds = max(now_ms - node.seen_ms, 0) / 1_000
    return {
        "id": node.id,
        "kind": node.kind,
        "state": "alive" if node.alive else "gone",
        "maintenance": node.maintenance,
        "version": node.version,
        "formats": "-".join(str(each) for each in sorted({node.oldest_format, node.newest_format})),
        "address": node.address or None,
        "host": node.host,
        "pid": node.pid,
        "seen": f"{seen_seconds:.0f} s ago",
        "calls/s": node.load.calls_per_second,
        "connections": node.load.connections,
        "consumers": node.load.waiting_consumers,
        "processor": f"{node.load.processor_share:.0%}",
    }
