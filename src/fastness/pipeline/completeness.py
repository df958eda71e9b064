"""Whether the session logs in the lake have the events of all messages that the plane has counted.

    watermark unlogged/<universe>/<queue>   the number of messages whose events are lost, as it was confirmed

Session logs are BEST_EFFORT, and each node has its own: events of a killed server, or of a node whose logs are not
given, are missing. The counters of a queue are part of every commit. Ingest records them before it reads the logs, so
logs that are complete have at least what was counted.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from fastness.layers import queues
from fastness.limits import SUMMARY_LIST_MAX
from fastness.pipeline.lake import Lake, LakeFile, Move, files, retries
from fastness.pipeline.schemas import QUEUE_COUNTERS, ROLLUP_QUEUES
from fastness.pipeline.views import View


class Counted(NamedTuple):
    """What the counters of a queue have counted since it was created."""

    universe: str
    queue: str
    put: int
    delivered: int
    acked: int
    dead_lettered: int


class Gap(msgspec.Struct, frozen=True):
    """A queue whose events are not all in the lake."""

    universe: str
    queue: str
    put: int  # Counted by the plane,
    logged_put: int  # and found in the logs.
    acked: int
    logged_acked: int
    accepted: int = 0  # How many lost ones were confirmed.

    @property
    def unlogged(self) -> int:
        """The number of messages of which a put or an acknowledgement is missing."""
        return max(self.put - self.logged_put, self.acked - self.logged_acked, 0)


def count(view: View) -> list[Counted]:
    """The counters of every queue."""
    found = []
    for universe in view.universes():
        after = ""
        while page := view.database.read(queues.survey, universe, after=after, limit=SUMMARY_LIST_MAX):
            for stats in page:
                if not view.hidden.hides("queue", universe, stats.queue):
                    totals = (stats.put_total, stats.delivered_total, stats.acked_total, stats.dead_total)
                    found.append(Counted(universe, stats.queue, *totals))
            after = page[-1].queue
    return found


def record(lake: Lake, counted: Sequence[Counted], universes: Sequence[str]) -> None:
    """Store the counters of universes whose session logs were ingested after they were read."""
    now_ms = time.time_ns() // 1_000_000

    def replace() -> None:
        table = lake.table(QUEUE_COUNTERS)
        known = {Counted(*(row[name] for name in Counted._fields)): row for row in table.rows().to_pylist()}
        wanted = set(counted)
        changed = {row.universe for row in wanted ^ set(known) if row.universe in universes}
        old: list[LakeFile] = [file for file in table.entries() if file.universe in changed]
        rows = [{**row._asdict(), "measured_at": now_ms} for row in counted if row.universe in changed]
        added = pa.Table.from_pylist(rows, QUEUE_COUNTERS.schema)
        table.replace(old, files.write(QUEUE_COUNTERS, table.location, files.sorted_batches(QUEUE_COUNTERS, added)))

    retries.retry_until_committed(f"the table {QUEUE_COUNTERS.name}", replace)


def gaps(lake: Lake, universes: Sequence[str] = ()) -> list[Gap]:
    """Queues whose events are not all in the lake, except for losses that were confirmed."""
    return [gap for gap in _all_gaps(lake, universes) if gap.unlogged > gap.accepted]


def accept(lake: Lake, universes: Sequence[str] = ()) -> int:
    """Confirm that the missing events are lost; returns the number of queues."""

    def move() -> int:
        table = lake.table(QUEUE_COUNTERS)
        found = [gap for gap in _all_gaps(lake, universes) if gap.unlogged > gap.accepted]
        table.append([], {_watermark(gap.universe, gap.queue): Move(gap.accepted, gap.unlogged) for gap in found})
        return len(found)

    return retries.retry_until_committed(f"the table {QUEUE_COUNTERS.name}", move)


def _all_gaps(lake: Lake, universes: Sequence[str]) -> list[Gap]:
    table = lake.table(QUEUE_COUNTERS)
    columns = ["universe", "queue", "logged_put", "logged_acked"]
    logged = {
        (row["universe"], row["queue"]): (row["logged_put"] or 0, row["logged_acked"] or 0)
        for row in lake.table(ROLLUP_QUEUES).rows(columns).to_pylist()
    }
    found = []
    for row in table.rows().to_pylist():
        universe, queue = row["universe"], row["queue"]
        if not universes or universe in universes:
            put, acked = logged.get((universe, queue), (0, 0))
            accepted = table.watermark(_watermark(universe, queue))
            found.append(Gap(universe, queue, row["put"], put, row["acked"], acked, accepted))
    return found


def _watermark(universe: str, queue: str) -> str:
    return f"unlogged/{universe}/{queue}"
