"""The numbers of a report, read from the aggregates of the lake. No Spark here."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastness.limits import REPORT_DAYS, REPORT_GRID, REPORT_QUEUES_PLOTTED, REPORT_ROWS
from fastness.pipeline import completeness
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import (
    QUARANTINE,
    ROLLUP_ERRORS,
    ROLLUP_LEASES,
    ROLLUP_MAILBOXES,
    ROLLUP_QUEUE_HOURS,
    ROLLUP_QUEUES,
    ROLLUP_STORAGE,
    ROLLUP_TALK,
    UNREACHABLE,
    WORLD_STATE,
    Table,
)

Row: TypeAlias = dict[str, Any]
HOUR = timedelta(hours=1)


class Timeline(msgspec.Struct, frozen=True):
    """One row for every hour from the first to the last; an empty row where there is no data."""

    name: str
    hours: list[datetime]
    rows: list[Row]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the page. Lists have the most important rows first, and are limited."""

    lake: str
    made_at: datetime
    totals: dict[str, int | None]
    wrong_worlds: list[Row]
    quarantined: list[Row]
    unlogged: list[Row]  # Queues whose events are not all in the session logs.
    queues: list[Row]
    throughput: Timeline
    latencies: list[Timeline]
    errors: list[Row]
    mailboxes: list[Row]
    talk: list[Row]
    leases: list[Row]
    storage: list[Row]  # By day and name.
    unreachable: list[Row]


def collect(lake: Lake, *, made_at: datetime, universes: Sequence[str] = ()) -> Facts:
    """Read the results of `rollup`, `audit` and `reachability`; tables that do not exist are empty."""

    def read(table: Table, columns: Sequence[str] | None = None, where: pc.Expression | None = None) -> pa.Table:
        rows = lake.table(table).rows(columns, where)
        return rows.filter(pc.field("universe").isin(universes)) if universes else rows

    queues = read(ROLLUP_QUEUES)
    hours = _recent_hours(read(ROLLUP_QUEUE_HOURS), made_at)
    states = read(WORLD_STATE, ["universe", "world", "height", "verdict", "reason"])
    quarantined = read(QUARANTINE)
    gaps = completeness.gaps(lake, universes)
    mailboxes, talk, errors = read(ROLLUP_MAILBOXES), read(ROLLUP_TALK), read(ROLLUP_ERRORS)
    leases = _leases(read(ROLLUP_LEASES))
    storage, unreachable = read(ROLLUP_STORAGE), _unreachable(read(UNREACHABLE))
    busiest = _top(queues, "messages")
    return Facts(
        lake=lake.location.url,
        made_at=made_at,
        totals={
            **{name: _sum(queues, name) or 0 for name in ("messages", "acked", "dead", "retries", "redrives")},
            "backlog": _sum(queues, "backlog"),
            "mails": _sum(mailboxes, "mails") or 0,
            "mails_waiting": _sum(mailboxes, "waiting") or 0,
            "mails_rejected": _sum(mailboxes, "rejected") or 0,
            **_verdicts(states),
            "quarantined": quarantined.num_rows,
            "unknown": _sum(queues, "unknown") or 0,
            "unlogged": sum(gap.unlogged for gap in gaps),
            "leases_contended": sum(row["contended"] for row in leases),
            "leases_refused": sum(row["refused"] for row in leases),
            "lake_bytes": _lake_bytes(storage),
            "unreachable_bytes": sum(row["bytes"] for row in unreachable),
            "reclaimable_bytes": sum(row["reclaimable_bytes"] for row in unreachable),
        },
        wrong_worlds=_top(states.filter(pc.field("verdict") != "ok"), "world", is_ascending=True),
        quarantined=_top(quarantined, "seen_at"),
        unlogged=[
            {**msgspec.structs.asdict(gap), "unlogged": gap.unlogged}
            for gap in sorted(gaps, key=lambda gap: -gap.unlogged)[:REPORT_ROWS]
        ],
        queues=busiest,
        throughput=_timeline("all queues", hours.to_pylist()),
        latencies=[
            _queue_timeline(hours, row) for row in busiest[:REPORT_QUEUES_PLOTTED] if row["wait_p50_ms"] is not None
        ],
        errors=_top(errors, "letters"),
        mailboxes=_top(mailboxes, "waiting"),
        talk=_top(talk, "mails", limit=REPORT_GRID * REPORT_GRID),
        leases=leases[:REPORT_ROWS],
        storage=storage.sort_by([("day", "ascending"), ("bytes", "descending")]).to_pylist(),
        unreachable=unreachable,
    )


def _recent_hours(hours: pa.Table, now: datetime) -> pa.Table:
    """The last days with data, as many as a page can show.

    Hours in the future are dropped: any client can log an event of the year 9999.
    """
    timestamp = hours.schema.field("hour").type
    hours = hours.filter(pc.field("hour") <= pa.scalar(now.replace(microsecond=0), timestamp))
    latest = pc.max(hours.column("hour")).as_py()
    if latest is None:
        return hours
    return hours.filter(pc.field("hour") >= pa.scalar(latest - timedelta(days=REPORT_DAYS) + HOUR, timestamp))


def _top(rows: pa.Table, column: str, *, limit: int = REPORT_ROWS, is_ascending: bool = False) -> list[Row]:
    order = "ascending" if is_ascending else "descending"
    ties = [(name, "ascending") for name in rows.column_names if name != column and pa.types.is_string(rows[name].type)]
    found: list[Row] = rows.sort_by([(column, order), *ties]).slice(0, limit).to_pylist()
    return found


def _queue_timeline(hours: pa.Table, queue: Row) -> Timeline:
    chosen = hours.filter((pc.field("universe") == queue["universe"]) & (pc.field("queue") == queue["queue"]))
    return _timeline(f"{queue['queue']} of {queue['universe']}", chosen.to_pylist())


def _timeline(name: str, rows: Iterable[Row]) -> Timeline:
    by_hour: dict[datetime, Row] = {}
    for row in rows:
        sums = by_hour.setdefault(row["hour"], dict.fromkeys(("put", "acked", "dead", "retries"), 0))
        for count in ("put", "acked", "dead", "retries"):
            sums[count] += row[count]
        # Percentiles cannot be added: only the timeline of a single queue has them.
        sums.update({column: value for column, value in row.items() if column.endswith("_ms")})
    if not by_hour:
        return Timeline(name, [], [])
    first, last = min(by_hour), max(by_hour)
    all_hours = [first + n * HOUR for n in range(round((last - first) / HOUR) + 1)]
    return Timeline(name, all_hours, [by_hour.get(hour, {}) for hour in all_hours])


def _leases(rows: pa.Table) -> list[Row]:
    """Leases summed over all hours, the most contended first."""
    sums: dict[tuple[str, str], Row] = {}
    for row in rows.to_pylist():
        key = (row["universe"], row["key"])
        counts = ("contended", "granted", "refused", "gone")
        known = sums.setdefault(
            key, {"universe": key[0], "key": key[1], "waited_max_ms": 0, **dict.fromkeys(counts, 0)}
        )
        for count in counts:
            known[count] += row[count]
        known["waited_max_ms"] = max(known["waited_max_ms"], row["waited_max_ms"])
    return sorted(sums.values(), key=lambda row: (-row["contended"], row["universe"], row["key"]))


def _unreachable(rows: pa.Table) -> list[Row]:
    """Unreferenced blobs by universe, the most bytes first."""
    sums: dict[str, Row] = {}
    for row in rows.select(["universe", "size", "reclaimable"]).to_pylist():
        known = sums.setdefault(
            row["universe"], {"universe": row["universe"], "blobs": 0, "bytes": 0, "reclaimable_bytes": 0}
        )
        known["blobs"] += 1
        known["bytes"] += row["size"]
        known["reclaimable_bytes"] += row["size"] if row["reclaimable"] else 0
    return sorted(sums.values(), key=lambda row: (-row["bytes"], row["universe"]))


def _verdicts(states: pa.Table) -> dict[str, int | None]:
    verdicts = states.column("verdict").to_pylist()
    return {
        "worlds": len(verdicts),
        "worlds_ok": verdicts.count("ok"),
        "worlds_contradicting": verdicts.count("contradicts"),
        "worlds_incomplete": verdicts.count("incomplete"),
    }


def _lake_bytes(storage: pa.Table) -> int:
    last = pc.max(storage.column("day")).as_py()
    return _sum(storage.filter((pc.field("day") == last) & (pc.field("source") == "lake")), "bytes") or 0


def _sum(rows: pa.Table, column: str) -> int | None:
    """The sum of a column; None if it has no values."""
    found: int | None = pc.sum(rows.column(column)).as_py()
    return found
