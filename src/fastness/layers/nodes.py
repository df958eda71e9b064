"""The nodes of a plane: the processes that have a shared key space open, each with a record that it renews.

    ("nodes", "records", id)  ->  what the node is, when it was last seen, and its load

    running ── renewed every 5 s ──► running ── clean stop ──► no record
       └── killed, paused, cut off ──► gone after 30 s ──► no record after 10 minutes

The records are for people and for the decision to raise the data format; no data depends on them.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from fastness.kv import Subspace, Transaction
from fastness.limits import NODE_FORGOTTEN_SECONDS, NODE_GONE_SECONDS, NODES_MAX

ALL: Final = Subspace("nodes").prefix  # The records of nodes, and the maintenance lease.
SUBSPACE: Final = Subspace("nodes", "records")


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What a node did between its last two heartbeats."""

    calls_per_second: float = 0.0
    connections: int = 0  # Open streams, relay connections and HTTP requests in flight.
    waiting_consumers: int = 0
    processor_share: float = 0.0  # Processor time by elapsed time; 1.0 is one busy core.


class Node(msgspec.Struct, frozen=True, array_like=True):
    """The record of a node. Fields are only added at the end: nodes of other versions read it."""

    kind: str  # server or embedded
    version: str
    oldest_format: int  # The data formats that it reads and writes,
    newest_format: int  # both included.
    host: str
    pid: int
    address: str  # The URL of a server; empty if it is none.
    started_ms: int
    seen_ms: int
    load: Load = Load()

    def is_alive(self, now_ms: int) -> bool:
        """Whether it has renewed its record lately."""
        return now_ms - self.seen_ms < NODE_GONE_SECONDS * 1_000


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Node).decode


def renew(tx: Transaction, id: str, node: Node) -> None:
    """Store the record of a running node, seen now."""
    tx.put(SUBSPACE.key(id), _encode(msgspec.structs.replace(node, seen_ms=tx.now_ms)))


def leave(tx: Transaction, id: str) -> None:
    """Delete the record of a node that stops."""
    tx.delete(SUBSPACE.key(id))


def list_nodes(tx: Transaction) -> dict[str, Node]:
    """The nodes by id, those that are gone included; at most `NODES_MAX`."""
    return {SUBSPACE.unpack(key)[0]: _decode(value) for key, value in tx.scan(*SUBSPACE.range(), limit=NODES_MAX)}


def forgettable(found: dict[str, Node], now_ms: int) -> list[str]:
    """The nodes that are gone for so long that their records are no longer shown."""
    return [id for id, node in found.items() if now_ms - node.seen_ms >= NODE_FORGOTTEN_SECONDS * 1_000]


def forget(tx: Transaction, ids: Iterable[str]) -> None:
    """Delete the records of these nodes, unless one has been renewed since."""
    for id in ids:
        stored = tx.get(SUBSPACE.key(id))
        if stored is not None and forgettable({id: _decode(stored)}, tx.now_ms):
            tx.delete(SUBSPACE.key(id))
