"""Nodes: the processes that have a plane open."""

import msgspec

from fastness.wire.requests import Operation, Request, Route


class NodeLoad(msgspec.Struct, frozen=True):
    """What a node did between its last two heartbeats."""

    calls_per_second: float = 0.0
    connections: int = 0  # Open streams, relay connections and HTTP requests in flight.
    waiting_consumers: int = 0
    processor_share: float = 0.0  # Processor time by elapsed time; 1.0 is one busy core.


class NodeStatus(msgspec.Struct, frozen=True):
    """A process that has the plane open, or had until lately."""

    id: str
    kind: str  # server or embedded
    version: str
    oldest_format: int  # The data formats that it reads and writes,
    newest_format: int  # both included.
    host: str
    pid: int
    address: str  # The URL of a server; empty if it is none.
    started_ms: int
    seen_ms: int  # Its last heartbeat, by the clock of the key space.
    alive: bool  # Whether that was in the last 30 seconds.
    maintenance: bool  # Whether it does the periodic work: sweeps, schedules, compaction and collection.
    load: NodeLoad = NodeLoad()


class Nodes(msgspec.Struct, frozen=True):
    """The nodes of a plane. A plane that is not shared has one: the process that answers."""

    nodes: list[NodeStatus]
    now_ms: int
    data_format: int  # The format of the plane, which all nodes know; see `RaiseFormat`.


class ListNodes(Request[Nodes], frozen=True, tag="nodes.list"):
    """The processes that have the plane open."""

    operation = Operation(reads=True, http=(Route("GET", "/v1/nodes", "List the nodes that share the plane."),))
