"""Watches of the key space, which say when a resource or list of `/mcp` may have changed."""

import time
from contextlib import suppress

from fastness.errors import Closed
from fastness.kv import Database, Subspace, Watch
from fastness.layers.collections import partition_of
from fastness.layers.queues.policies import SUFFIX
from fastness.limits import MCP_LIST_SECONDS
from fastness.mcp.changes import Target
from fastness.mcp.exposed_tools import COLLECTION, PARTITION
from fastness.names import REPORTS


class WatchHint:
    """Fires after a commit has changed keys of a target."""

    def __init__(self, database: Database, target: Target) -> None:
        prefixes = _prefixes_of(target)
        self._watch: Watch = database.watch(prefixes[0], *prefixes[1:])
        # Every message changes a key below the list of queues, and comparing a list costs more than a counter.
        self._pause_seconds = MCP_LIST_SECONDS if target.kind in ("queues", "worlds", "reports") else 0.0
        self._fired_at = float("-inf")

    def has_fired(self) -> bool:
        now = time.monotonic()
        if now - self._fired_at < self._pause_seconds or not self._watch.wait(0):
            return False
        self._fired_at = now
        return True

    def close(self) -> None:
        with suppress(Closed):
            self._watch.close()


def _prefixes_of(target: Target) -> list[bytes]:
    name, parent = target.name, Subspace("u", target.universe)
    found = {
        "queue": [parent.at("q", name)],
        "dead_letters": [parent.at("q", name), parent.at("q", name + SUFFIX)],
        "world": [parent.at("w", name)],
        "mail": [parent.at("mail", name)],
        "queues": [parent.at("q")],
        "worlds": [parent.at("w")],
    }
    if target.kind == "tools":
        return [partition_of(target.universe, COLLECTION, PARTITION).rows]
    if target.kind in ("report", "reports"):
        return [partition_of(target.universe, REPORTS, REPORTS).rows]
    return [subspace.prefix for subspace in found[target.kind]]
