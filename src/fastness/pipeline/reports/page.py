"""The report page as self-contained HTML. All values from the lake are escaped."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final

from fastness.limits import REPORT_GRID, REPORT_ROWS
from fastness.pipeline.reports import charts, formatting
from fastness.pipeline.reports.charts import Series
from fastness.pipeline.reports.components import Column, beside, grid, introduction, placeholder, table
from fastness.pipeline.reports.facts import Facts, Row, Timeline
from fastness.server.console.report_scripts import chart_style, script_sources, scripts, source_hash

_STORAGE_LINES: Final = 5  # The largest parts; a line for each of the page's colours.


def page(facts: Facts) -> str:
    """The whole report."""
    parts = {
        "Health": _health(facts),
        "Queues": _queues(facts),
        "Dead letters": _dead_letters(facts),
        "Mail": _mail(facts),
        "Leases": _leases(facts),
        "Storage": _storage(facts),
    }
    links = "".join(f'<li><a href="#{_id(name)}">{name}</a></li>' for name in parts)
    sections = "".join(
        f'<section id="{_id(name)}" aria-labelledby="{_id(name)}-h"><h2 id="{_id(name)}-h">{name}</h2>{body}</section>'
        for name, body in parts.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Fastness report, {formatting.timestamp(facts.made_at)}</title><style>{_style()}</style></head><body>"
        '<a class="skip" href="#content">Skip to the content</a>'
        f'<header><h1>Fastness report</h1><p class="meta">Made {_time(facts.made_at)} from the lake '
        f"<code>{escape(facts.lake)}</code></p>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="content">{_cards(facts)}{sections}</main>'
        f"<footer><p>Times are UTC. Tables show the first {REPORT_ROWS} rows; the lake has all of them.</p></footer>"
        f"{''.join(f'<script>{text}</script>' for text in scripts())}</body></html>\n"
    )


def _cards(facts: Facts) -> str:
    totals = facts.totals
    ended = (totals["acked"] or 0) + (totals["dead"] or 0)
    wrong = (totals["worlds"] or 0) - (totals["worlds_ok"] or 0)
    cards = [
        ("Messages", formatting.number(totals["messages"]), f"{formatting.number(totals['acked'])} acknowledged"),
        ("In queues now", formatting.number(totals["backlog"]), "dead letters included"),
        (
            "Dead letters",
            formatting.number(totals["dead"]),
            f"{formatting.share(totals['dead'] or 0, ended)} of finished messages",
        ),
        (
            "Retries",
            formatting.number(totals["retries"]),
            f"{formatting.counted(totals['redrives'], 'dead letter', 'dead letters')} redriven",
        ),
        ("Mails", formatting.number(totals["mails"]), f"{formatting.number(totals['mails_waiting'])} waiting"),
        ("Worlds", formatting.number(totals["worlds"]), "no findings" if not wrong else f"{wrong:,} with findings"),
        ("Lake", formatting.size(totals["lake_bytes"]), f"{formatting.number(totals['quarantined'])} quarantined"),
        ("Reclaimable", formatting.size(totals["reclaimable_bytes"]), "in unreferenced blobs"),
    ]
    if not totals["worlds"]:
        cards[5] = ("Worlds", formatting.number(0), "not audited yet")
    return '<dl class="cards">{}</dl>'.format(
        "".join(
            f'<div class="card"><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>'
            for name, value, note in cards
        )
    )


def _health(facts: Facts) -> str:
    totals = facts.totals
    wrong = (totals["worlds"] or 0) - (totals["worlds_ok"] or 0)
    if not totals["worlds"] and not totals["quarantined"]:
        return placeholder("No world has been audited yet; run: fastness pipeline audit --lake LAKE")
    if not wrong and not totals["quarantined"]:
        passed = "The only world" if totals["worlds"] == 1 else f"All {formatting.number(totals['worlds'])} worlds"
        verdict = f'<p class="verdict good">{passed} passed the audit</p>'
    else:
        audited = formatting.counted(totals["worlds"], "world", "worlds")
        message = [f"{wrong:,} of {audited} {'has' if wrong == 1 else 'have'} findings"] if wrong else []
        ranges = formatting.counted(totals["quarantined"], "range", "ranges")
        message += [f"{ranges} could not be read"] if totals["quarantined"] else []
        verdict = f'<p class="verdict bad">{" · ".join(message)}</p>'
    intro = introduction(
        "Audit results of every world (checksums, heights, snapshots, restores), and data that ingest could not read."
    )
    worlds = table(
        "Worlds with findings",
        facts.wrong_worlds,
        [
            Column("World", lambda row: row["world"], "text"),
            Column("Universe", lambda row: row["universe"], "text"),
            Column("Verdict", lambda row: row["verdict"], "text"),
            Column("Readable up to", lambda row: formatting.number(row["height"])),
            Column("Finding", lambda row: row["reason"] or "", "code"),
        ],
    )
    quarantined = table(
        "Quarantined ranges",
        facts.quarantined,
        [
            Column("Source", lambda row: row["source"], "text"),
            Column("Table", lambda row: row["table_name"], "text"),
            Column("From", lambda row: formatting.number(row["start"])),
            Column("To", lambda row: formatting.number(row["last"])),
            Column("Reason", lambda row: f"{row['reason']}: {row['detail']}", "code"),
        ],
    )
    return intro + verdict + (worlds if facts.wrong_worlds else "") + (quarantined if facts.quarantined else "")


def _queues(facts: Facts) -> str:
    timeline = facts.throughput
    counts = {name: [float(row.get(name, 0)) for row in timeline.rows] for name in ("put", "acked", "dead", "retries")}
    totals = {name: formatting.number(sum(values)) for name, values in counts.items()}
    done = charts.lines(
        "Messages per hour",
        f"All queues, {_span(timeline)}: {totals['put']} enqueued, {totals['acked']} acknowledged.",
        timeline.hours,
        [Series("enqueued", counts["put"], 1), Series("acknowledged", counts["acked"], 3)],
    )
    failed = charts.lines(
        "Failures per hour",
        f"All queues, {_span(timeline)}: {totals['dead']} dead-lettered, {totals['retries']} redelivered.",
        timeline.hours,
        [Series("dead-lettered", counts["dead"], 4), Series("redelivered", counts["retries"], 2)],
    )
    flow = beside(f"<h3>Messages per hour</h3>{done}", f"<h3>Failures per hour</h3>{failed}")
    rows = table(
        "Queues with the most messages",
        facts.queues,
        [
            Column("Queue", lambda row: _named(facts, row, "queue"), "text"),
            Column("Messages", lambda row: formatting.number(row["messages"])),
            Column("Acknowledged", lambda row: formatting.number(row["acked"])),
            Column("Backlog", lambda row: formatting.number(row["backlog"])),
            Column("Unknown", lambda row: formatting.number(row["unknown"])),
            Column("Dead letters", lambda row: formatting.number(row["dead"])),
            Column("Retries", lambda row: formatting.number(row["retries"])),
            Column("Wait p50", lambda row: formatting.duration(row["wait_p50_ms"])),
            Column("p99", lambda row: formatting.duration(row["wait_p99_ms"])),
            Column("Service p50", lambda row: formatting.duration(row["service_p50_ms"])),
            Column("p99", lambda row: formatting.duration(row["service_p99_ms"])),
        ],
    )
    intro = introduction(
        "Wait is the time from enqueue to the first delivery, service from the last delivery to the end. "
        "Half of the messages took no longer than p50, all but one in a hundred no longer than p99."
    )
    latencies = [_latency(timeline) for timeline in facts.latencies]
    return intro + _unlogged(facts) + flow + rows + (beside(*latencies) if latencies else "")


def _unlogged(facts: Facts) -> str:
    """A warning if the session logs lack events."""
    if not facts.unlogged:
        return ""
    count = formatting.counted(facts.totals["unlogged"], "message has", "messages have")
    text = f"The session logs are incomplete: {count} missing events"
    rows = table(
        "Queues with incomplete session logs: counts come from the plane, times lack these messages",
        facts.unlogged,
        [
            Column("Queue", lambda row: _named(facts, row, "queue"), "text"),
            Column("Put", lambda row: formatting.number(row["put"])),
            Column("in the logs", lambda row: formatting.number(row["logged_put"])),
            Column("Acknowledged", lambda row: formatting.number(row["acked"])),
            Column("in the logs", lambda row: formatting.number(row["logged_acked"])),
        ],
    )
    return f'<p class="verdict bad">{text}</p>{rows}'


def _latency(timeline: Timeline) -> str:
    def values(column: str) -> list[float | None]:
        return [row.get(column) for row in timeline.rows]

    worst = max((value for value in values("wait_p99_ms") if value is not None), default=None)
    plot = charts.lines(
        f"Latency of {timeline.name}",
        f"Wait and service by hour, {_span(timeline)}. The highest p99 of the wait is {formatting.duration(worst)}.",
        timeline.hours,
        [
            Series("wait p50", values("wait_p50_ms"), 1, "solid"),
            Series("wait p90", values("wait_p90_ms"), 1, "dashed"),
            Series("wait p99", values("wait_p99_ms"), 1, "dotted"),
            Series("service p50", values("service_p50_ms"), 2, "solid"),
            Series("service p99", values("service_p99_ms"), 2, "dotted"),
        ],
        unit="ms",
    )
    return f'<h3>{escape(timeline.name)}</h3>{plot}<p class="about">By hour, on a logarithmic scale.</p>'


def _dead_letters(facts: Facts) -> str:
    if not facts.errors:
        return placeholder("There are no dead letters.")
    rows = table(
        "Dead letters by error",
        facts.errors,
        [
            Column("Queue", lambda row: _named(facts, row, "queue"), "text"),
            Column("Letters", lambda row: formatting.number(row["letters"]), bar=lambda row: row["letters"]),
            Column("Last", lambda row: formatting.short_timestamp(row["last_at"])),
            Column("Error", lambda row: formatting.shorten(row["signature"], 160), "code"),
            Column("Last error", lambda row: formatting.shorten(row["example"] or "", 160), "code"),
        ],
    )
    intro = introduction("Errors that differ only in numbers, ids, addresses and paths are grouped.")
    return intro + rows


def _mail(facts: Facts) -> str:
    if not facts.mailboxes and not facts.talk:
        return placeholder("There was no mail.")
    intro = introduction(
        "Mail traffic between agents, and how long mail waits to be read. Expired and rejected mail is lost."
    )

    def age_ms(row: Row) -> float:
        age: timedelta = facts.made_at - (row["oldest_at"] or facts.made_at)
        return max(age / timedelta(milliseconds=1), 0.0)

    rows = table(
        "Mailboxes with the most waiting mail",
        facts.mailboxes,
        [
            Column("Mailbox", lambda row: row["recipient"], "text"),
            Column("Waiting", lambda row: formatting.number(row["waiting"])),
            Column("Oldest", lambda row: formatting.duration(age_ms(row) if row["oldest_at"] else None), bar=age_ms),
            Column("Lost", lambda row: formatting.number(row["expired"] + row["rejected"])),
            Column("Wait p50", lambda row: formatting.duration(row["wait_p50_ms"])),
            Column("p99", lambda row: formatting.duration(row["wait_p99_ms"])),
        ],
    )
    pairs = table(
        "Pairs with the most mail",
        facts.talk[:REPORT_ROWS],
        [
            Column("From", lambda row: row["sender"], "text"),
            Column("To", lambda row: row["recipient"], "text"),
            Column("Mails", lambda row: formatting.number(row["mails"])),
            Column("Rejected", lambda row: formatting.number(row["rejected"])),
        ],
    )
    return intro + _talk(facts.talk) + pairs + rows


def _talk(talk: Sequence[Row]) -> str:
    senders = _busiest(talk, "sender")
    recipients = _busiest(talk, "recipient")
    cells = {
        (senders.index(row["sender"]), recipients.index(row["recipient"])): float(row["mails"])
        for row in talk
        if row["mails"] and row["sender"] in senders and row["recipient"] in recipients
    }
    return grid("Mails by sender (rows) and recipient (columns)", senders, recipients, cells)


def _leases(facts: Facts) -> str:
    if not facts.leases:
        return placeholder("No lease was contended.")
    intro = introduction("Leases that an acquire had to wait for, or was refused. Uncontended leases are not listed.")
    rows = table(
        "Outcomes of contended acquires",
        facts.leases,
        [
            Column("Lease", lambda row: _named(facts, row, "key"), "text"),
            Column("Contended", lambda row: formatting.number(row["contended"]), bar=lambda row: row["contended"]),
            Column("Granted", lambda row: formatting.number(row["granted"])),
            Column("Refused", lambda row: formatting.number(row["refused"])),
            Column("Abandoned", lambda row: formatting.number(row["gone"])),
            Column("Longest wait", lambda row: formatting.duration(row["waited_max_ms"])),
        ],
    )
    return intro + rows


def _storage(facts: Facts) -> str:
    intro = introduction("Sizes of the lake and the plane, measured by every rollup.")
    days = sorted({row["day"] for row in facts.storage})
    times = [datetime(day.year, day.month, day.day, tzinfo=facts.made_at.tzinfo) for day in days]
    sizes: dict[str, dict[Any, int]] = {}
    for row in facts.storage:
        if row["bytes"] is not None:
            name = f"{row['source']}: {row['name']}"
            by_day = sizes.setdefault(name, {})
            by_day[row["day"]] = by_day.get(row["day"], 0) + row["bytes"]
    largest = sorted(sizes, key=lambda name: -sizes[name].get(days[-1], 0))[:_STORAGE_LINES]
    plot = charts.lines(
        "Bytes by day",
        f"The {len(largest)} largest parts, on {len(days)} days.",
        times,
        [Series(name, [sizes[name].get(day) for day in days]) for name in largest],
        unit="bytes",
    )
    latest = [row for row in facts.storage if row["day"] == days[-1]] if days else []
    rows = table(
        f"On {days[-1]}" if days else "Sizes",
        sorted(latest, key=lambda row: -(row["bytes"] or 0))[:REPORT_ROWS],
        [
            Column("Data", lambda row: f"{row['source']}: {row['name']}", "text"),
            Column("Universe", lambda row: row["universe"], "text"),
            Column("Rows", lambda row: formatting.number(row["rows"])),
            Column("Bytes", lambda row: formatting.size(row["bytes"]), bar=lambda row: row["bytes"] or 0),
        ],
    )
    blobs = table(
        "Unreferenced blobs",
        facts.unreachable,
        [
            Column("Universe", lambda row: row["universe"], "text"),
            Column("Blobs", lambda row: formatting.number(row["blobs"])),
            Column("Bytes", lambda row: formatting.size(row["bytes"])),
            Column("Reclaimable", lambda row: formatting.size(row["reclaimable_bytes"])),
        ],
    )
    return intro + beside(f"<h3>Bytes by day</h3>{plot}", rows) + (blobs if facts.unreachable else "")


def _named(facts: Facts, row: Row, column: str) -> str:
    """A name, with its universe if there are several."""
    has_several = len({each["universe"] for each in (*facts.queues, *facts.storage, *facts.leases)}) > 1
    return f"{row[column]} of {row['universe']}" if has_several else str(row[column])


def _busiest(talk: Sequence[Row], side: str) -> list[str]:
    sums: dict[str, int] = {}
    for row in talk:
        sums[row[side]] = sums.get(row[side], 0) + row["mails"]
    return sorted(sums, key=lambda name: (-sums[name], name))[:REPORT_GRID]


def _span(timeline: Timeline) -> str:
    if not timeline.hours:
        return "at no time"
    return f"from {formatting.timestamp(timeline.hours[0])} to {formatting.timestamp(timeline.hours[-1])}"


def _time(at: datetime) -> str:
    return f'<time datetime="{at.isoformat(timespec="seconds")}">{formatting.timestamp(at)}</time>'


def _id(name: str) -> str:
    return name.lower().replace(" ", "-")


def _policy() -> str:
    """The page runs its own scripts only, and loads nothing."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {script_sources()}",
            f"style-src {source_hash(_style())}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


@cache
def _style() -> str:
    return chart_style() + files(__package__).joinpath("page.css").read_text("utf-8")
