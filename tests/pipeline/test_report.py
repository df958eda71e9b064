"""The report matches the lake, and escapes all user text."""

import itertools
import json
import re
import shutil
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.limits import REPORT_DAYS, REPORT_ROWS
from holdfast.pipeline.config import Config
from holdfast.pipeline.jobs import report
from holdfast.pipeline.lake import Lake
from holdfast.pipeline.reports import formatting, plots
from holdfast.pipeline.reports.facts import Facts, collect
from holdfast.pipeline.reports.page import page
from holdfast.pipeline.reports.plots import Bar, Series
from holdfast.pipeline.schemas import TABLES

NOW = datetime(2026, 11, 15, 12, 5, tzinfo=UTC)
EVIL = "<script>alert(1)</script>\"'&\x00"
CHROMIUM = shutil.which("chromium")


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


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with all aggregates, and with names that contain markup."""
    lake = Lake(str(tmp_path / "lake"))
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


class Page(HTMLParser):
    """Parses a page and records its content."""

    void = frozenset(("meta",))

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.void:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_has_its_sections_and_numbers(lake: Lake) -> None:
    html = page(collect(lake, made_at=NOW))
    read = Page(html)
    for heading in ("Health", "Queues", "Dead letters", "Mail", "Leases", "Storage"):
        assert heading in read.text
    assert "1 of 2 worlds have findings" in read.text
    assert "1 ranges could not be read" in read.text
    assert "1 MiB" in read.text  # Reclaimable.
    assert read.tags.count("h1") == 1
    assert read.tags.count("h2") == 6
    assert read.tags.count("table") >= 8
    assert len(html) < 500_000


def test_user_text_is_escaped(lake: Lake) -> None:
    read = Page(page(collect(lake, made_at=NOW)))
    assert "script" not in read.tags
    assert "<script>alert(1)</script>" in read.text
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]


def test_page_loads_no_resources(lake: Lake) -> None:
    html = page(collect(lake, made_at=NOW))
    read = Page(html)
    loading = {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "background"}
    assert {value[0] for _, name, value in read.attributes if name in loading and value} == {"#"}
    assert "url(" not in html
    assert "@import" not in html
    assert ("meta", "http-equiv", "Content-Security-Policy") in read.attributes


def test_every_plot_has_a_title_and_a_description(lake: Lake) -> None:
    html = page(collect(lake, made_at=NOW))
    found = re.findall(r'<svg class="plot"[^>]* role="img" aria-labelledby="(\S+) (\S+)">', html)
    assert len(found) == html.count('<svg class="plot"') >= 7
    ids = list(itertools.chain.from_iterable(found))
    assert len(set(ids)) == len(ids)
    for id in ids:
        message = re.search(rf'id="{id}">([^<]+)<', html)
        assert message is not None
        assert message.group(1).strip()


def test_empty_lake_has_a_page(tmp_path: Path) -> None:
    html = page(collect(Lake(str(tmp_path / "lake")), made_at=NOW))
    assert "No world has been audited yet" in Page(html).text


def test_facts_match_the_lake(lake: Lake) -> None:
    facts = collect(lake, made_at=NOW)
    assert facts.totals["messages"] == 199
    assert (facts.totals["worlds"], facts.totals["worlds_ok"], facts.totals["worlds_contradicting"]) == (2, 1, 1)
    assert facts.totals["lake_bytes"] == 30_000_000
    assert (facts.totals["unreachable_bytes"], facts.totals["reclaimable_bytes"]) == ((1 << 20) + 5, 1 << 20)
    assert (facts.leases[0]["contended"], facts.totals["leases_contended"]) == (9, 9)
    assert len(facts.throughput.hours) == 30
    assert [row.get("put", 0) for row in facts.throughput.rows].count(0) == 1  # Three o'clock.
    assert [timeline.name for timeline in facts.latencies] == ["orders of main", f"{EVIL} of main"]


def test_page_is_limited_to_recent_days_and_top_rows(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    hours = [NOW.replace(minute=0) - timedelta(hours=n) for n in range(0, 24 * 40, 6)]
    hours.append(datetime(9999, 12, 31, tzinfo=UTC))  # Any client may log any time.
    rows = rows_of("rollup_queue_hours", *({"queue": "q", "hour": hour} for hour in hours))
    lake.table(TABLES["rollup_queue_hours"]).overwrite(rows.to_batches())
    many = rows_of("rollup_queues", *({"queue": f"q{n:03}", "messages": n} for n in range(200)))
    lake.table(TABLES["rollup_queues"]).overwrite(many.to_batches())
    facts = collect(lake, made_at=NOW + timedelta(microseconds=7))
    assert facts.throughput.hours[-1] == NOW.replace(minute=0)
    assert facts.throughput.hours[-1] - facts.throughput.hours[0] < timedelta(days=REPORT_DAYS)
    assert [row["queue"] for row in facts.queues] == [f"q{n:03}" for n in range(199, 199 - REPORT_ROWS, -1)]


def test_facts_cover_only_the_selected_universes(lake: Lake) -> None:
    assert collect(lake, made_at=NOW, universes=("main",)).totals["messages"] == 199
    assert collect(lake, made_at=NOW, universes=("other",)).totals["messages"] == 0


def test_report_is_written_with_its_totals(lake: Lake, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    result = report.run(
        None, Config(data="unused", lake=lake.location.url), now=NOW, progress=lambda *at: steps.append(at)
    )
    folder = tmp_path / "lake" / "reports"
    assert {file.name for file in folder.iterdir()} == {"20261115T120500Z.html", "latest.html", "latest.json"}
    assert (folder / "latest.html").read_bytes() == (folder / "20261115T120500Z.html").read_bytes()
    totals = json.loads((folder / "latest.json").read_text())
    assert totals["report"] == "20261115T120500Z.html"
    assert totals["made_at"] == "2026-11-15T12:05:00Z"
    assert totals["totals"]["messages"] == result.rows["messages"] == 199
    assert result.ok
    assert result.notes == [f"{folder}/20261115T120500Z.html"]
    assert steps[-1] == ("files", 3, 3)
    report.run(None, Config(data="unused", lake=lake.location.url), now=NOW + timedelta(hours=1))
    assert len(list(folder.iterdir())) == 4
    assert json.loads((folder / "latest.json").read_text())["report"] == "20261115T130500Z.html"


def test_failed_report_leaves_no_partial_file(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.run(None, Config(data="unused", lake=lake.location.url), now=NOW)
    before = (tmp_path / "lake" / "reports" / "latest.html").read_bytes()
    monkeypatch.setattr("holdfast.pipeline.jobs.report.os.fchmod", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        report.run(None, Config(data="unused", lake=lake.location.url), now=NOW + timedelta(hours=1))
    assert (tmp_path / "lake" / "reports" / "latest.html").read_bytes() == before
    assert not list((tmp_path / "lake" / "reports").glob(".*"))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to show the page to")
def test_page_is_accessible_in_a_browser(lake: Lake, tmp_path: Path) -> None:
    """In light and dark mode, on a phone and on a desktop."""
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    (tmp_path / "report.html").write_text(page(collect(lake, made_at=NOW)))
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, width in itertools.product(schemes, (360, 1280)):
            context = browser.new_context(
                color_scheme=scheme,
                viewport={"width": width, "height": 800},
                bypass_csp=True,  # For the accessibility checks, which run in the page.
                offline=True,
            )
            shown = context.new_page()
            asked: list[str] = []
            shown.on("request", lambda request, asked=asked: asked.append(request.url))
            shown.goto(f"file://{tmp_path / 'report.html'}")
            assert len(asked) == 1
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            results = Axe().run(shown)
            assert results.violations_count == 0, results.generate_report()
            context.close()
        browser.close()


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e15)), min_size=1, max_size=20),
    st.sampled_from(["count", "bytes", "ms"]),
    st.text(),
)
def test_lines_stay_inside_the_plot(values: list[float | None], unit: str, name: str) -> None:
    times = [NOW + timedelta(hours=n) for n in range(len(values))]
    svg = plots.lines("t", "d", times, [Series(name, values)], unit=unit)
    Page(svg)
    for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', svg):
        assert 0 <= float(x) <= 480
        assert 0 <= float(y) <= 210
    if any(value is not None for value in values):
        ticks = [float(y) for y in re.findall(r'class="grid" [^>]*y1="([-\d.]+)"', svg)]
        assert 2 <= len(ticks) <= 12
        assert ticks == sorted(ticks, reverse=True)


@given(st.lists(st.tuples(st.text(), st.floats(0, 1e12)), max_size=5), st.text())
def test_bars_and_grids_accept_any_text(rows: list[tuple[str, float]], title: str) -> None:
    Page(plots.bars(title, title, [Bar(label, value) for label, value in rows]))
    names = [label for label, _ in rows]
    cells = {(n, n): value for n, (_, value) in enumerate(rows) if value}
    Page(plots.grid(title, title, names, names, cells))


def test_number_formatting() -> None:
    numbers = [formatting.number(value) for value in (0, 1_234_567, 0.25, 1_234.5)]
    assert numbers == ["0", "1,234,567", "0.2", "1,234"]
    assert [formatting.size(value) for value in (0, 1_023, 1_048_576, 1 << 40)] == ["0 B", "1023 B", "1 MiB", "1 TiB"]
    result = [formatting.duration(value) for value in (0, 412.4, 3_200, 300_000, 9_000_000, 259_200_000)]
    assert result == ["0 ms", "412 ms", "3.2 s", "5 min", "2.5 h", "3 d"]
    assert [formatting.share(*pair) for pair in ((1, 8), (1, 2))] == ["12.5 %", "50 %"]
    assert [formatting.short(value) for value in (0, 999, 1_500, 2e6)] == ["0", "999", "1.5 k", "2 M"]
    placeholder = {
        formatting.number(None),
        formatting.size(None),
        formatting.duration(None),
        formatting.share(0, 0),
        formatting.timestamp(None),
    }
    assert placeholder == {"\N{EN DASH}"}


def test_facts_can_be_encoded_as_json(lake: Lake) -> None:
    assert msgspec.json.encode(collect(lake, made_at=NOW).totals)
    assert isinstance(collect(lake, made_at=NOW), Facts)
