"""`holdfast nodes`: the processes that share a plane."""

from typing import Any, Final

import click
import msgspec

from holdfast.cli import connect, printing
from holdfast.cli.commands import LeafCommand, wants_json
from holdfast.wire.nodes import NodeStatus

_COLUMNS: Final = (
    *("id", "kind", "state", "maintenance", "version", "formats", "address", "host", "pid", "seen"),
    *("calls/s", "connections", "consumers", "processor"),
)


@click.command(
    cls=LeafCommand,
    examples=["holdfast nodes", "holdfast nodes --json", "holdfast --url postgresql://me@db/plane nodes"],
)
def nodes() -> None:
    """List the nodes that share a plane on PostgreSQL: servers, and programs that have it open.

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
    click.echo(f"Data format: {found.data_format}", err=True)


def _row(node: NodeStatus, now_ms: int) -> dict[str, Any]:
    seen_seconds = max(now_ms - node.seen_ms, 0) / 1_000
    return {
        "id": node.id,
        "kind": node.kind,
        "state": "alive" if node.alive else "gone",
        "maintenance": node.maintenance,
        "version": node.version,
        "formats": f"{node.oldest_format}-{node.newest_format}",
        "address": node.address or None,
        "host": node.host,
        "pid": node.pid,
        "seen": f"{seen_seconds:.0f} s ago",
        "calls/s": node.load.calls_per_second,
        "connections": node.load.connections,
        "consumers": node.load.waiting_consumers,
        "processor": f"{node.load.processor_share:.0%}",
    }
