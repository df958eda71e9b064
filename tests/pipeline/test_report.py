"""The report matches the lake, and escapes all user text."""

import base64
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client

import fastness
from fastness.errors import InvalidArgument
from fastness.limits import REPORT_DAYS, REPORT_ROWS
from fastness.mcp import Caller, make_server
from fastness.pipeline.config import Config
from fastness.pipeline.jobs import report
from fastness.pipeline.lake import Lake
from fastness.pipeline.reports import charts, formatting
from fastness.pipeline.reports.components import Column, grid, table
from fastness.pipeline.reports.facts import Facts, collect
from fastness.pipeline.reports.page import page
from fastness.pipeline.schemas import TABLES
from fastness.server.console.report_scripts import scripts
from tests.support import aggregates

NOW, EVIL, rows_of = aggregates.NOW, aggregates.EVIL, aggregates.rows_of


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    found: Lake = aggregates.build(tmp_path / "lake")
    return found


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
    assert "1 of 2 worlds has findings" in read.text
    assert "1 range could not be read" in read.text
    assert "1 MiB" in read.text  # Reclaimable.
    assert read.tags.count("h1") == 1
    assert read.tags.count("h2") == 6
    assert read.tags.count("table") >= 8
    assert len(html) < 500_000


def test_user_text_is_escaped(lake: Lake) -> None:
    html = page(collect(lake, made_at=NOW))
    read = Page(html)
    assert all(f"<script>{text}</script>" in html for text in scripts())
    charts = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html)]
    assert read.tags.count("script") == len(charts) + len(scripts())
    assert {line["name"] for line in charts[-1]["series"]} == {"lake: journal", f"lake: {EVIL}"}
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


def test_policy_allows_exactly_the_scripts_and_the_style_of_the_page(lake: Lake) -> None:
    html = page(collect(lake, made_at=NOW))
    found = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert found is not None
    policy = dict(part.split(" ", 1) for part in found.group(1).split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].split() == [sha256(text) for text in re.findall(r"<script>(.*?)</script>", html, re.S)]
    assert policy["style-src"].split() == [sha256(text) for text in re.findall(r"<style>(.*?)</style>", html, re.S)]
    assert " style=" not in html


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_every_chart_has_a_description_and_a_table_of_its_numbers(lake: Lake) -> None:
    html = page(collect(lake, made_at=NOW))
    figures = re.findall(r'<figure class="chart">.*?</figure>', html, re.S)
    assert len(figures) == 5  # Throughput, failures, two latencies, storage.
    for figure in figures:
        label = re.search(r'role="img" aria-label="([^"]+)"', figure)
        assert label is not None
        assert len(label.group(1)) > 40
        data = re.search(r'<script type="application/json">(.*?)</script>', figure)
        assert data is not None
        chart = json.loads(data.group(1))
        rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", figure)
        assert len(rows) == len(chart["times"])
        assert all(row.count("<td") == len(chart["series"]) for row in rows)
        assert {len(line["values"]) for line in chart["series"]} == {len(chart["times"])}
    bytes_by_day = figures[-1]
    assert ">14.3 MiB</td>" in bytes_by_day  # 15 million bytes on the last day,
    assert "15000000" in bytes_by_day  # in the table and in the data.


def test_empty_lake_has_a_page(tmp_path: Path) -> None:
    html = page(collect(Lake(str(tmp_path / "lake")), made_at=NOW))
    assert "No world has been audited yet" in Page(html).text


def test_counts_of_one_are_singular(lake: Lake) -> None:
    facts = collect(lake, made_at=NOW)
    facts.totals.update(redrives=1, worlds=1, worlds_ok=1, quarantined=1)
    text = page(facts)
    assert "1 dead letter redriven" in text
    assert "1 range could not be read" in text
    facts.totals.update(redrives=2, quarantined=0)
    text = page(facts)
    assert "2 dead letters redriven" in text
    assert "The only world passed the audit" in text
    facts.totals.update(worlds_ok=0)
    assert "1 of 1 world has findings" in page(facts)


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


async def test_agents_of_the_universe_read_a_published_report(lake: Lake, tmp_path: Path) -> None:
    data = f"dir:{tmp_path / 'data'}"
    config = Config(data=data, lake=lake.location.url, universes=("main",))
    results = [report.run(None, config, now=NOW + timedelta(hours=hours), publish=True) for hours in (0, 1)]
    uri = "fastness://main/reports/pipeline"
    assert results[-1].notes[-1] == uri
    async with fastness.open_async(data) as plane:
        server = make_server(lambda _: Caller(plane=plane, agent="ada"))
        async with Client(server) as client:
            assert [each.uri for each in (await client.list_resources()).resources] == [uri]
            (contents,) = (await client.read_resource(uri)).contents
    published = json.loads(contents.text)
    assert published["version"] == 2
    assert published["body"]["value"] == json.loads((tmp_path / "lake" / "reports" / "latest.json").read_text())
    assert published["body"]["value"]["totals"]["messages"] == 199


@pytest.mark.parametrize("universes", [(), ("main", "other")])
def test_a_published_report_is_of_one_universe(lake: Lake, tmp_path: Path, universes: tuple[str, ...]) -> None:
    config = Config(data=f"dir:{tmp_path / 'data'}", lake=lake.location.url, universes=universes)
    with pytest.raises(InvalidArgument, match="give --universe once"):
        report.run(None, config, now=NOW, publish=True)
    assert not (tmp_path / "lake" / "reports").exists()
    assert not (tmp_path / "data").exists()


def test_failed_report_leaves_no_partial_file(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.run(None, Config(data="unused", lake=lake.location.url), now=NOW)
    before = (tmp_path / "lake" / "reports" / "latest.html").read_bytes()
    monkeypatch.setattr(
        "fastness.pipeline.lake.atomic_files.os.fchmod", lambda *_: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        report.run(None, Config(data="unused", lake=lake.location.url), now=NOW + timedelta(hours=1))
    assert (tmp_path / "lake" / "reports" / "latest.html").read_bytes() == before
    assert not list((tmp_path / "lake" / "reports").glob(".*"))


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e15)), min_size=1, max_size=20),
    st.sampled_from(["count", "bytes", "ms"]),
    st.text(),
)
def test_charts_accept_any_value_and_text(values: list[float | None], unit: Any, name: str) -> None:
    times = [NOW + timedelta(hours=n) for n in range(len(values))]
    html = charts.lines(name, name, times, [charts.Series(name, values)], unit=unit)
    read = Page(html)
    if all(value is None for value in values):
        assert read.tags == ["p"]
        return
    data = json.loads(html.split('<script type="application/json">')[1].split("</script>")[0])
    assert data["series"][0]["values"] == values
    assert data["series"][0]["name"] == name
    assert read.tags.count("td") == len(values)


@given(st.lists(st.tuples(st.text(), st.floats(0, 1e12)), max_size=5), st.text())
def test_bars_and_grids_accept_any_text(rows: list[tuple[str, float]], title: str) -> None:
    columns = [
        Column(title, lambda row: row["name"], "text"),
        Column(title, lambda row: str(row["value"]), bar=lambda row: row["value"]),
    ]
    Page(table(title, [{"name": name, "value": value} for name, value in rows], columns))
    names = [label for label, _ in rows]
    cells = {(n, n): value for n, (_, value) in enumerate(rows) if value}
    html = grid(title, names, names, cells)
    Page(html)
    assert {int(shade) for shade in re.findall(r'class="s(\d+)"', html)} <= set(range(1, 10))


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
