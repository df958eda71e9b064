"""The heartbeat of a node: renews its record and, on one node, the maintenance lease.

    every 5 s, in one transaction:  renew the record ──► take or renew the lease, if it is free or ours

A node that is killed leaves its lease, which another node takes once it has expired. A node that stops deletes its
record and releases the lease, and a watch wakes the others. The process of an embedded key space has no heartbeat.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from fastness.clock import Clock, SystemClock
from fastness.errors import FastnessError
from fastness.kv import Database, Transaction, formats
from fastness.kv.formats import FORMAT, OLDEST_FORMAT
from fastness.layers import maintenance, nodes
from fastness.layers.maintenance import MaintenanceLease
from fastness.limits import MAINTENANCE_LEASE_SECONDS, NODE_HEARTBEAT_SECONDS, NODE_RETRY_SECONDS
from fastness.runtime.background import Job, Steps
from fastness.runtime.duty import LeasedDuty
from fastness.tiers import Tier
from fastness.version import __version__
from fastness.wire.nodes import NodeLoad, NodeStatus

_log = logging.getLogger("fastness.nodes")
_TTL_MS: Final = round(MAINTENANCE_LEASE_SECONDS * 1_000)
_MEASURED_SECONDS_MIN: Final = 1.0  # Rates over a shorter time say little.


def _none() -> int:
    return 0


class NodeDescription:
    """What this process says of itself: its record, with the load since the last one."""

    def __init__(self, id: str, *, waiting_consumers: Callable[[], int] = _none) -> None:
        self.id = id
        self._waiting_consumers = waiting_consumers
        self._calls = self._connections = _none
        self._kind, self._address = "embedded", ""
        self._started_ms = SystemClock().now_ms()
        self._measured = (time.monotonic(), time.process_time(), 0)
        self._load = NodeLoad()

    def describe_server(self, address: str, *, calls: Callable[[], int], connections: Callable[[], int]) -> None:
        """This process is a server. `calls` returns how many it has answered, `connections` how many are open."""
        self._calls, self._connections = calls, connections
        self._kind, self._address = "server", address

    def status(self) -> NodeStatus:
        """The record of this node, before it is stored."""
        return NodeStatus(
            self.id,
            self._kind,
            __version__,
            OLDEST_FORMAT,
            FORMAT,
            socket.gethostname(),
            os.getpid(),
            self._address,
            self._started_ms,
            seen_ms=0,
            alive=False,
            maintenance=False,
            load=self._measure(),
        )

    def _measure(self) -> NodeLoad:
        """The load since it was measured last; the same as then if that was just now."""
        before, now = self._measured, (time.monotonic(), time.process_time(), self._calls())
        seconds, processor, calls = (new - old for new, old in zip(now, before, strict=True))
        if seconds >= _MEASURED_SECONDS_MIN:
            self._measured = now
            rates = round(calls / seconds, 1), round(processor / seconds, 3)
        else:
            rates = self._load.calls_per_second, self._load.processor_share
        self._load = NodeLoad(rates[0], self._connections(), self._waiting_consumers(), rates[1])
        return self._load


class Beat(NamedTuple):
    """What the transaction of a heartbeat returns."""

    lease: MaintenanceLease
    now_ms: int


class Heartbeat:
    """A job that renews the record of this node, and its duty."""

    def __init__(
        self,
        database: Database,
        node: NodeDescription,
        duty: LeasedDuty,
        *,
        clock: Clock | None = None,
        first_seconds: float = 0.0,
    ) -> None:
        """The first heartbeat is after `first_seconds`: a process that ends before leaves no trace."""
        self._database = database
        self._node = node
        self._duty = duty
        self._now_ms = (clock or SystemClock()).now_ms
        self.alive = 1  # Nodes that are alive, as of the last heartbeat.
        self._has_record = False
        self.job = Job(
            "the heartbeat of this node",
            self._run,
            thread="heartbeat",
            first_seconds=first_seconds,
            retry_seconds_max=NODE_RETRY_SECONDS,
        )

    def beat(self) -> float:
        """Renew the record and the duty; the seconds until it must be done again."""
        asked_ms = self._now_ms()
        lease, now_ms = self._database.transact(_renew, self._node.status(), tier=Tier.IMPORTANT)
        self._has_record = True
        is_ours = lease.holder == self._node.id
        self._duty.hold_until(asked_ms + _TTL_MS if is_ours else 0)
        found, self._database.data_format = self._database.read(_look, tier=Tier.IMPORTANT)
        self.alive = sum(each.alive for each in found)
        if is_ours and (old := nodes.forgettable(found, now_ms)):
            self._database.transact(nodes.forget, old, tier=Tier.IMPORTANT)
        # Another node's lease is taken as soon as it has expired.
        left_seconds = NODE_HEARTBEAT_SECONDS if is_ours else (lease.expires_ms - now_ms) / 1_000
        return min(NODE_HEARTBEAT_SECONDS, max(left_seconds, 0.0))

    def leave(self) -> None:
        """Delete the record and release the lease, if the key space answered the last heartbeat. Call it once."""
        self._duty.hold_until(0)
        if not self._has_record or self.job.failing:
            return
        try:
            self._database.transact(_leave, self._node.id, tier=Tier.IMPORTANT)
        except FastnessError as error:
            _log.warning("the record of this node could not be deleted; it is shown as gone soon: %s", error)

    def _run(self) -> Steps:
        # Opened here: it needs a connection, which a process that ends at once should not open.
        with self._database.watch(maintenance.RELEASED) as watch:
            watch.on_fire = self.job.wake
            while True:
                watch.wait(0)
                yield self.beat()


def _renew(tx: Transaction, node: NodeStatus) -> Beat:
    nodes.renew(tx, node)
    return Beat(maintenance.take(tx, node.id, ttl_ms=_TTL_MS), tx.now_ms)


def _look(tx: Transaction) -> tuple[list[NodeStatus], int]:
    """All nodes, and the format of the plane."""
    return nodes.list_nodes(tx), formats.format_of(tx)


def _leave(tx: Transaction, id: str) -> None:
    nodes.leave(tx, id)
    maintenance.release(tx, id)
