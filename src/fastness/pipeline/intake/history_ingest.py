"""Ingests the durable histories of queues into `queue_events`. The driver writes them: only it reads the key space.

    watermark history/<universe>/<queue>   the time of the latest ingested event
    watermark events/<universe>/<queue>    how often events were committed

Nodes of a PostgreSQL may commit an event after one with a later time. So the last minute is read again, and compared
with the table.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastness.layers import queues
from fastness.layers.queues import QueueKey
from fastness.layers.queues.history import position_at
from fastness.layers.queues.policies import history_ms
from fastness.limits import HISTORY_OVERLAP_MS, INGEST_CHANGES
from fastness.pipeline.intake.ingest_run import Run
from fastness.pipeline.lake import LakeTable, Move, retention
from fastness.pipeline.schemas import QUEUE_EVENTS
from fastness.pipeline.views import View
from fastness.wire.queues import MessageEvent


def ingest_history(run: Run) -> None:
    """Ingest all events that the histories of queues have and the lake does not."""
    run.retry_until_done("the histories of queues", lambda: _ingest_new(run))


def time_watermark(universe: str, queue: str) -> str:
    return f"history/{universe}/{queue}"


def _ingest_new(run: Run) -> None:
    table = run.table(QUEUE_EVENTS)
    for universe in run.view.universes():
        for name in run.view.queue_names(universe):
            queue = QueueKey(universe, name)
            if history_ms(run.view.database.read(queues.policy_of, queue)):
                ingest_queue(run, table, queue, max(table.watermark(time_watermark(*queue)) - HISTORY_OVERLAP_MS, 0))


def ingest_queue(run: Run, table: LakeTable, queue: QueueKey, since_ms: int) -> None:
    """Ingest the events from this time on that the table does not have, except for those it has removed by age."""
    since_ms = max(since_ms, retention.retained_ms(table, queue.universe))
    known = set(_known(table, queue, since_ms))
    rows: list[dict[str, Any]] = []
    for event in events(run.view, queue, since_ms):
        if (event.id, event.event, event.attempt, event.at_ms) not in known:
            rows.append(_row(queue, event))
            if len(rows) >= INGEST_CHANGES:
                _commit(run, table, queue, rows)
                rows = []
    if rows:
        _commit(run, table, queue, rows)


def _commit(run: Run, table: LakeTable, queue: QueueKey, rows: list[dict[str, Any]]) -> None:
    watermark, commits = time_watermark(*queue), f"events/{queue.universe}/{queue.name}"
    before = table.watermark(watermark)
    moves = {
        watermark: Move(before, max(before, *(row["changed_at"] for row in rows), 0)),
        commits: Move(table.watermark(commits), table.watermark(commits) + 1),
    }
    table.append_rows(pa.Table.from_pylist(rows, QUEUE_EVENTS.schema), moves)
    run.record_commit(QUEUE_EVENTS, len(rows))


def events(view: View, queue: QueueKey, since_ms: int) -> Iterator[MessageEvent]:
    """The events that the history of a queue has from this time on."""
    after: str | None = position_at(since_ms)
    while after is not None:
        page = view.database.read(queues.read_history, queue, after=after)
        yield from page.events
        after = page.next


def _known(table: LakeTable, queue: QueueKey, since_ms: int) -> Iterator[tuple[str, str, int, int]]:
    where = (pc.field("queue") == queue.name) & (
        pc.field("changed_at") >= pa.scalar(since_ms, pa.timestamp("ms", tz="UTC"))
    )
    columns = ["id", "event", "attempt", "changed_at"]
    for rows in table.scan(columns, where, universe=queue.universe, queue=queue.name):
        for row in rows.to_pylist():
            yield row["id"], row["event"], row["attempt"], round(row["changed_at"].timestamp() * 1_000)


def _row(queue: QueueKey, event: MessageEvent) -> dict[str, Any]:
    return {
        "universe": queue.universe,
        "queue": queue.name,
        "id": event.id,
        "event": event.event,
        "changed_at": event.at_ms,
        "attempt": event.attempt,
        "correlation_id": event.correlation_id,
        "error": event.error,
    }
