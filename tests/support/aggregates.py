"""A lake with every aggregate that a report shows, and with names that contain markup."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import TABLES

NOW = datetime(2026, 11, 15, 12, 5, tzinfo=UTC)
EVIL = "<script>alert(1)</script>\"'&\x00"


def rows_of(name: str, *rows: dict[str, Any]) -> pa.Table:
    """Rows of a table; columns that are not given get a default value."""
    schema = TABLES[name].schema
    defaults: dict[Any, Any] = {pa.string(): "main", pa.int64(): 1, pa.float64(): 1.0, pa.date32(): date(2026, 11, 15)}
    filled = []
    for row in rows:
        given = {
            field.name: defaults.get(field.type, NOW if pa.types.is_timestamp(field.type) else None) for field in schema
        }
        filled.append({**given, **row})
    return pa.Table.from_pylist(filled, schema)


def build(path: Path) -> Lake:
    """Create the lake."""
    lake = Lake(str(path))
    hours = [NOW.replace(minute=0) - timedelta(hours=n) for n in range(30)]
    queues = ["orders", EVIL]
    content: dict[str, list[dict[str, Any]]] = {
        "rollup_queues": [{"queue": queue, "messages": 100 - n, "dead": 3} for n, queue in enumerate(queues)],
        "rollup_queue_hours": [
            {"queue": queue, "hour": hour, "put": 10, "wait_p50_ms": 5.0, "wait_p99_ms": 5_000.0}
            for queue in queues
            for hour in hours
            if hour.hour != 3
        ],
        "rollup_errors": [{"signature": EVIL, "letters": 7, "example": EVIL}, {"signature": "timeout after <n> s"}],
        "rollup_mailboxes": [{"recipient": EVIL, "waiting": 5, "oldest_at": NOW - timedelta(days=2)}],
        "rollup_talk": [{"sender": EVIL, "recipient": "bob@main", "mails": 12}],
        "rollup_leases": [
            {"key": EVIL, "hour": hours[0], "contended": 4},
            {"key": EVIL, "hour": hours[1], "contended": 5},
        ],
        "rollup_storage": [
            {"name": name, "source": "lake", "day": date(2026, 11, day), "bytes": day * 1_000_000}
            for day in (13, 14, 15)
            for name in ("journal", EVIL)
        ],
        "world_state": [
            {"world": "ada", "verdict": "ok", "reason": None},
            {"world": EVIL, "height": 64, "verdict": "contradicts", "reason": EVIL},
        ],
        "quarantine": [{"table_name": "journal", "source": EVIL, "detail": EVIL}],
        "unreachable": [{"hash": "ab", "size": 1 << 20, "reclaimable": True}, {"hash": "cd", "size": 5}],
    }
    for name, rows in content.items():
        lake.table(TABLES[name]).overwrite(rows_of(name, *rows).to_batches())
    return lake
