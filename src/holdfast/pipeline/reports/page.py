"""The page: facts as HTML that loads nothing from anywhere. Whatever comes from the lake is escaped."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final

from holdfast.limits import REPORT_GRID, REPORT_ROWS
from holdfast.pipeline.reports import formatting, plots
from holdfast.pipeline.reports.facts import Facts, Row, Timeline
from holdfast.pipeline.reports.plots import Bar, Series
from holdfast.pipeline.reports.sheets import Column, about, beside, figure, nothing, table

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


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
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Holdfast report, {formatting.moment(facts.made_at)}</title><style>{_style()}</style></head><body>"
        '<a class="skip" href="#content">Skip to the content</a>'
        f'<header><h1>Holdfast report</h1><p class="meta">Made {_time(facts.made_at)} from the lake '
        f"<code>{escape(facts.lake)}</code></p>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f'<main id="content">{_cards(facts)}{sections}</main>'
        f"<footer><p>Times are UTC. Tables show the first {REPORT_ROWS} rows; the lake has all of them.</p></footer>"
        "</body></html>\n"
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
            f"{formatting.share(totals['dead'] or 0, ended)} of what ended",
        ),
        (
            "Retries",
            formatting.number(totals["retries"]),
            f"{formatting.number(totals['redrives'])} put back from dead letters",
        ),
        ("Mails", formatting.number(totals["mails"]), f"{formatting.number(totals['mails_waiting'])} wait"),
        ("Worlds", formatting.number(totals["worlds"]), "all are well" if not wrong else f"{wrong:,} are not well"),
        ("The lake", formatting.size(totals["lake_bytes"]), f"{formatting.number(totals['quarantined'])} quarantined"),
        ("Reclaimable", formatting.size(totals["reclaimable_bytes"]), "in blobs that nothing refers to"),
    ]
    if not totals["worlds"]:
        cards[5] = ("Worlds", formatting.number(0), "none was audited")
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
        return nothing("No world has been audited yet; run: holdfast pipeline audit")
    if not wrong and not totals["quarantined"]:
        verdict = f'<p class="verdict good">All {formatting.number(totals["worlds"])} worlds are well</p>'
    else:
        said = [f"{wrong:,} of {totals['worlds']:,} worlds are not well"] if wrong else []
        said += [f"{totals['quarantined']:,} stretches could not be read"] if totals["quarantined"] else []
        verdict = f'<p class="verdict bad">{" · ".join(said)}</p>'
    intro = about(
        "Checksums, heights, snapshots and restores of every world, and what could not be read on the way in."
    )
    worlds = table(
        "Worlds that are not what their journal says",
        facts.wrong_worlds,
        [
            Column("World", lambda row: row["world"], "text"),
            Column("Universe", lambda row: row["universe"], "text"),
            Column("Verdict", lambda row: row["verdict"], "text"),
            Column("Readable up to", lambda row: formatting.number(row["height"])),
            Column("What is wrong", lambda row: row["reason"] or "", "code"),
        ],
    )
    quarantined = table(
        "What could not be read",
        facts.quarantined,
        [
            Column("Source", lambda row: row["source"], "text"),
            Column("Table", lambda row: row["table"], "text"),
            Column("From", lambda row: formatting.number(row["start"])),
            Column("To", lambda row: formatting.number(row["end"])),
            Column("Reason", lambda row: f"{row['reason']}: {row['detail']}", "code"),
        ],
    )
    return intro + verdict + (worlds if facts.wrong_worlds else "") + (quarantined if facts.quarantined else "")


def _queues(facts: Facts) -> str:
    timeline = facts.throughput
    counts = {name: [float(row.get(name, 0)) for row in timeline.rows] for name in ("put", "acked", "dead", "retries")}
    totals = {name: formatting.number(sum(values)) for name, values in counts.items()}
    done = plots.lines(
        "Messages an hour",
        f"All queues, {_span(timeline)}: {totals['put']} were put, {totals['acked']} acknowledged.",
        timeline.hours,
        [Series("put", counts["put"], 1), Series("acknowledged", counts["acked"], 3)],
    )
    failed = plots.lines(
        "Failures an hour",
        f"All queues, {_span(timeline)}: {totals['dead']} died, {totals['retries']} were delivered again.",
        timeline.hours,
        [Series("died", counts["dead"], 4), Series("delivered again", counts["retries"], 2)],
    )
    flow = (
        f'<div class="beside pair"><div><h3>Messages an hour</h3>{figure(done)}</div>'
        f"<div><h3>Failures an hour</h3>{figure(failed)}</div></div>"
    )
    rows = table(
        "Queues with the most messages",
        facts.queues,
        [
            Column("Queue", lambda row: _named(facts, row, "queue"), "text"),
            Column("Messages", lambda row: formatting.number(row["messages"])),
            Column("Now in it", lambda row: formatting.number(row["backlog"])),
            Column("Died", lambda row: formatting.number(row["dead"])),
            Column("Retries", lambda row: formatting.number(row["retries"])),
            Column("Wait p50", lambda row: formatting.duration(row["wait_p50_ms"])),
            Column("p99", lambda row: formatting.duration(row["wait_p99_ms"])),
            Column("Service p50", lambda row: formatting.duration(row["service_p50_ms"])),
            Column("p99", lambda row: formatting.duration(row["service_p99_ms"])),
        ],
    )
    intro = about(
        "Wait is from put to the first delivery, service from the last delivery to the end. "
        "Half of the messages took no longer than p50, all but one in a hundred no longer than p99."
    )
    latencies = "".join(_latency(timeline) for timeline in facts.latencies)
    return intro + flow + rows + (f'<div class="beside pair">{latencies}</div>' if latencies else "")


def _latency(timeline: Timeline) -> str:
    def values(column: str) -> list[float | None]:
        return [row.get(column) for row in timeline.rows]

    worst = max((value for value in values("wait_p99_ms") if value is not None), default=None)
    plot = plots.lines(
        f"How long messages of {timeline.name} take",
        f"Wait and service by hour, {_span(timeline)}. The highest p99 of the wait is {formatting.duration(worst)}.",
        timeline.hours,
        [
            Series("wait p50", values("wait_p50_ms"), 1),
            Series("wait p90", values("wait_p90_ms"), 1),
            Series("wait p99", values("wait_p99_ms"), 1),
            Series("service p50", values("service_p50_ms"), 2),
            Series("service p99", values("service_p99_ms"), 2),
        ],
        unit="ms",
    )
    return f"<div><h3>{escape(timeline.name)}</h3>{figure(plot, 'By hour, on a logarithmic scale.')}</div>"


def _dead_letters(facts: Facts) -> str:
    if not facts.errors:
        return nothing("There are no dead letters.")
    total = sum(row["letters"] for row in facts.errors)
    plot = plots.bars(
        "Dead letters by error",
        f"{formatting.number(total)} dead letters of the most frequent {len(facts.errors)} kinds of errors.",
        [
            Bar(f"{_named(facts, row, 'queue')}: {row['signature']}", row["letters"], row["example"] or "")
            for row in facts.errors
        ],
    )
    rows = table(
        "The same, with the last one of each",
        facts.errors,
        [
            Column("Queue", lambda row: _named(facts, row, "queue"), "text"),
            Column("Letters", lambda row: formatting.number(row["letters"])),
            Column("Last", lambda row: formatting.lately(row["last_at"])),
            Column("Last error", lambda row: formatting.cut(row["example"] or "", 160), "code"),
        ],
    )
    intro = about("Errors that differ only in numbers, ids, addresses and paths are counted as one.")
    return intro + beside("What they died of", plot, rows)


def _mail(facts: Facts) -> str:
    if not facts.mailboxes and not facts.talk:
        return nothing("There was no mail.")
    intro = about("Who writes to whom, and how long mail waits for its reader. What expired or was refused is lost.")
    boxes = sorted(facts.mailboxes, key=lambda row: row["oldest_at"] or facts.made_at)
    ages = plots.bars(
        "How old the oldest mail is that waits",
        f"The {len([row for row in boxes if row['oldest_at']])} mailboxes in which the most mail waits.",
        [Bar(row["recipient"], _age_ms(row, facts.made_at)) for row in boxes if row["oldest_at"]],
        say=formatting.duration,
    )
    rows = table(
        "Mailboxes in which the most mail waits",
        facts.mailboxes,
        [
            Column("Mailbox", lambda row: row["recipient"], "text"),
            Column("Waits", lambda row: formatting.number(row["waiting"])),
            Column(
                "Oldest", lambda row: formatting.duration(_age_ms(row, facts.made_at) if row["oldest_at"] else None)
            ),
            Column("Lost", lambda row: formatting.number(row["expired"] + row["rejected"])),
            Column("Wait p50", lambda row: formatting.duration(row["wait_p50_ms"])),
            Column("p99", lambda row: formatting.duration(row["wait_p99_ms"])),
        ],
    )
    pairs = table(
        "Pairs that exchange the most mail",
        facts.talk[:REPORT_ROWS],
        [
            Column("From", lambda row: row["sender"], "text"),
            Column("To", lambda row: row["recipient"], "text"),
            Column("Mails", lambda row: formatting.number(row["mails"])),
            Column("Refused", lambda row: formatting.number(row["rejected"])),
        ],
    )
    return intro + beside("Who talks to whom", _talk(facts.talk), pairs) + beside("What waits", ages, rows)


def _talk(talk: Sequence[Row]) -> str:
    senders = _busiest(talk, "sender")
    recipients = _busiest(talk, "recipient")
    cells = {
        (senders.index(row["sender"]), recipients.index(row["recipient"])): float(row["mails"])
        for row in talk
        if row["mails"] and row["sender"] in senders and row["recipient"] in recipients
    }
    most = max(talk, key=lambda row: row["mails"], default=None)
    said = f" The most go from {most['sender']} to {most['recipient']}: {most['mails']:,}." if most else ""
    return plots.grid(
        "Who talks to whom",
        f"Mails from {len(senders)} senders, one a row, to {len(recipients)} recipients, one a column.{said}",
        senders,
        recipients,
        cells,
    )


def _leases(facts: Facts) -> str:
    if not facts.leases:
        return nothing("Nobody had to wait for a lease, or was refused one.")
    intro = about("Who had to wait for a lease, or was refused. Leases that nobody had to wait for are not here.")
    plot = plots.bars(
        "Leases that were not free",
        f"The {len(facts.leases)} leases that were most often held by somebody else.",
        [Bar(_named(facts, row, "key"), row["contended"]) for row in facts.leases],
    )
    rows = table(
        "The same, and how it ended",
        facts.leases,
        [
            Column("Lease", lambda row: _named(facts, row, "key"), "text"),
            Column("Not free", lambda row: formatting.number(row["contended"])),
            Column("Granted", lambda row: formatting.number(row["granted"])),
            Column("Refused", lambda row: formatting.number(row["refused"])),
            Column("Gave up", lambda row: formatting.number(row["gone"])),
            Column("Longest", lambda row: formatting.duration(row["waited_max_ms"])),
        ],
    )
    return intro + beside("Leases that were not free", plot, rows)


def _storage(facts: Facts) -> str:
    intro = about("How much the lake and the plane hold, measured by every rollup.")
    days = sorted({row["day"] for row in facts.storage})
    moments = [datetime(day.year, day.month, day.day, tzinfo=facts.made_at.tzinfo) for day in days]
    sizes: dict[str, dict[Any, int]] = {}
    for row in facts.storage:
        if row["bytes"] is not None:
            name = f"{row['source']}: {row['name']}"
            by_day = sizes.setdefault(name, {})
            by_day[row["day"]] = by_day.get(row["day"], 0) + row["bytes"]
    largest = sorted(sizes, key=lambda name: -sizes[name].get(days[-1], 0))[:5]
    plot = plots.lines(
        "Bytes by day",
        f"The {len(largest)} largest parts, on {len(days)} days.",
        moments,
        [Series(name, [sizes[name].get(day) for day in days]) for name in largest],
        unit="bytes",
    )
    latest = [row for row in facts.storage if row["day"] == days[-1]] if days else []
    rows = table(
        f"On {days[-1]}" if days else "Sizes",
        sorted(latest, key=lambda row: -(row["bytes"] or 0))[:REPORT_ROWS],
        [
            Column("What", lambda row: f"{row['source']}: {row['name']}", "text"),
            Column("Universe", lambda row: row["universe"], "text"),
            Column("Rows", lambda row: formatting.number(row["rows"])),
            Column("Bytes", lambda row: formatting.size(row["bytes"])),
        ],
    )
    blobs = table(
        "Blobs that nothing refers to",
        facts.unreachable,
        [
            Column("Universe", lambda row: row["universe"], "text"),
            Column("Blobs", lambda row: formatting.number(row["blobs"])),
            Column("Bytes", lambda row: formatting.size(row["bytes"])),
            Column("Reclaimable", lambda row: formatting.size(row["reclaimable_bytes"])),
        ],
    )
    return intro + beside("Bytes by day", plot, rows) + (blobs if facts.unreachable else "")


def _named(facts: Facts, row: Row, column: str) -> str:
    """A name, with its universe where there are several."""
    has_several = len({each["universe"] for each in (*facts.queues, *facts.storage, *facts.leases)}) > 1
    return f"{row[column]} of {row['universe']}" if has_several else str(row[column])


def _busiest(talk: Sequence[Row], side: str) -> list[str]:
    sums: dict[str, int] = {}
    for row in talk:
        sums[row[side]] = sums.get(row[side], 0) + row["mails"]
    return sorted(sums, key=lambda name: (-sums[name], name))[:REPORT_GRID]


def _age_ms(row: Row, now: datetime) -> float:
    age: timedelta = now - row["oldest_at"]
    return max(age / timedelta(milliseconds=1), 0.0)


def _span(timeline: Timeline) -> str:
    if not timeline.hours:
        return "at no time"
    return f"from {formatting.moment(timeline.hours[0])} to {formatting.moment(timeline.hours[-1])}"


def _time(at: datetime) -> str:
    return f'<time datetime="{at.isoformat(timespec="seconds")}">{formatting.moment(at)}</time>'


def _id(name: str) -> str:
    return name.lower().replace(" ", "-")


@cache
def _style() -> str:
    return files(__package__).joinpath("page.css").read_text("utf-8")
