"""The nodes of a plane: the processes that have a shared key space open, each with a record that it renews.

    ("nodes", "records", id)  ->  its `NodeStatus`, as of its last heartbeat

    running ── renewed every 5 s ──► running ── clean stop ──► no record
       └── killed, paused, cut off ──► gone after 30 s ──► no record after 10 minutes

The records are for people and for the decision to raise the data format; no data depends on them. Fields are only
added, with defaults: nodes of other versions read them.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from fastness.kv import Subspace, Transaction
from fastness.limits import NODE_FORGOTTEN_SECONDS, NODE_GONE_SECONDS, NODES_MAX
from fastness.wire.nodes import NodeStatus

ALL: Final = Subspace("nodes").prefix  # The records of nodes, and the maintenance lease.
SUBSPACE: Final = Subspace("nodes", "records")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(NodeStatus).decode


def renew(tx: Transaction, node: NodeStatus) -> None:
    """Store the record of a running node, seen now."""
    tx.put(SUBSPACE.key(node.id), _encode(msgspec.structs.replace(node, seen_ms=tx.now_ms)))


def leave(tx: Transaction, id: str) -> None:
    """Delete the record of a node that stops."""
    tx.delete(SUBSPACE.key(id))


def list_nodes(tx: Transaction) -> list[NodeStatus]:
    """The nodes in the order of their ids, those that are gone included; at most `NODES_MAX`."""
    found = [_decode(value) for _, value in tx.scan(*SUBSPACE.range(), limit=NODES_MAX)]
    gone_ms = tx.now_ms - round(NODE_GONE_SECONDS * 1_000)
    return [msgspec.structs.replace(node, alive=node.seen_ms > gone_ms) for node in found]


def forgettable(found: Iterable[NodeStatus], now_ms: int) -> list[str]:
    """The ids of nodes that are gone for so long that their records are no longer shown."""
    return [node.id for node in found if now_ms - node.seen_ms >= NODE_FORGOTTEN_SECONDS * 1_000]


def forget(tx: Transaction, ids: Iterable[str]) -> None:
    """Delete the records of these nodes, unless one has been renewed since."""
    for id in ids:
        stored = tx.get(SUBSPACE.key(id))
        if stored is not None and forgettable([_decode(stored)], tx.now_ms):
            tx.delete(SUBSPACE.key(id))
