"""Handlers of requests for the nodes of a plane."""

import msgspec

from fastness.kv import Transaction, formats
from fastness.layers import maintenance, nodes
from fastness.layers.nodes import Node
from fastness.plane.handlers import service
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.wire.nodes import ListNodes, NodeLoad, Nodes, NodeStatus


@service
def list_nodes(stores: AnyStores, request: ListNodes) -> Served[Nodes]:
    return stores.run_in_thread(_list, stores.services, request)


def _list(services: Services, request: ListNodes) -> Nodes:
    found = services.database.read(_read, tier=request.tier)
    if services.heartbeat is not None:
        return found
    # The only process that has the plane open.
    record = services.node.record(seen_ms=found.now_ms)
    return msgspec.structs.replace(
        found, nodes=[_status(services.node.id, record, now_ms=found.now_ms, holder=services.node.id)]
    )


def _read(tx: Transaction) -> Nodes:
    lease, now_ms = maintenance.load(tx), tx.now_ms
    holder = lease.holder if now_ms < lease.expires_ms else ""
    found = [_status(id, node, now_ms=now_ms, holder=holder) for id, node in nodes.list_nodes(tx).items()]
    found.sort(key=lambda node: (not node.alive, node.started_ms, node.id))
    return Nodes(found, now_ms, formats.format_of(tx))


def _status(id: str, node: Node, *, now_ms: int, holder: str) -> NodeStatus:
    load = node.load
    return NodeStatus(
        id,
        node.kind,
        node.version,
        node.oldest_format,
        node.newest_format,
        node.host,
        node.pid,
        node.address,
        node.started_ms,
        node.seen_ms,
        node.is_alive(now_ms),
        id == holder,
        NodeLoad(load.calls_per_second, load.connections, load.waiting_consumers, load.processor_share),
    )
