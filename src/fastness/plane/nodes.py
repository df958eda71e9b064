"""Handlers of requests for the nodes of a plane."""

import msgspec

from fastness.kv import Transaction, formats
from fastness.layers import maintenance, nodes
from fastness.plane.handlers import service
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.wire.nodes import ListNodes, Nodes


@service
def list_nodes(stores: AnyStores, request: ListNodes) -> Served[Nodes]:
    return stores.run_in_thread(_list, stores.services, request)


def _list(services: Services, request: ListNodes) -> Nodes:
    found = services.database.read(_read, tier=request.tier)
    if services.heartbeat is not None:
        return found
    # The only process that has the plane open.
    own = msgspec.structs.replace(services.node.status(), seen_ms=found.now_ms, alive=True, maintenance=True)
    return msgspec.structs.replace(found, nodes=[own])


def _read(tx: Transaction) -> Nodes:
    lease, now_ms = maintenance.load(tx), tx.now_ms
    holder = lease.holder if now_ms < lease.expires_ms else ""
    found = [msgspec.structs.replace(node, maintenance=node.id == holder) for node in nodes.list_nodes(tx)]
    found.sort(key=lambda node: (not node.alive, node.started_ms, node.id))
    return Nodes(found, now_ms, formats.format_of(tx))
