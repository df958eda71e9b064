"""The pipeline's report in a real browser: charts, tables, themes, print, accessibility, and its policy."""

from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, FrameLocator, Page, expect

from fastness.pipeline.reports.facts import collect
from fastness.pipeline.reports.page import page as report_page
from tests.support import aggregates
from tests.support.server_process import Server

CHARTS = 5  # Throughput, failures, two latencies, storage.
SLACK_MS = 60_000
expect.set_options(timeout=SLACK_MS)
Scheme = Literal["light", "dark"]
# The number of pixels of the first chart in this colour of the page's styles.
PIXELS = """(name) => {
  const canvas = document.querySelector("canvas");
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  const wanted = probe.fillStyle.match(/\\w\\w/g).map((part) => parseInt(part, 16));
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let n = 0; n < data.length; n += 4)
    if (data[n + 3] === 255 && wanted.every((part, k) => part === data[n + k])) found++;
  return found;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    lake = aggregates.build(folder / "lake")
    (folder / "latest.html").write_text(report_page(collect(lake, made_at=aggregates.NOW)))
    return folder / "latest.html"


class Shown:
    """A page with the report, its requests and its errors."""

    def __init__(self, browser: Browser, report: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1_280, "height": 900}, offline=True, **options)
        self.context.set_default_timeout(SLACK_MS)
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda entry: self.errors.append(entry.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(report.as_uri())


def test_charts_are_drawn_under_the_policy_of_the_page(browser: Browser, report: Path) -> None:
    shown = Shown(browser, report)
    expect(shown.page.locator("figure.chart canvas")).to_have_count(CHARTS)
    assert shown.page.evaluate(PIXELS, "--c1") > 50
    expect(shown.page.locator("details[open]")).to_have_count(0)
    assert shown.errors == []
    assert len(shown.requests) == 1
    shown.page.get_by_text("Messages per hour as a table").click()
    table = shown.page.get_by_role("table", name="Messages per hour")
    expect(table.get_by_role("row")).to_have_count(31)
    expect(table.get_by_role("row").nth(1)).to_have_text("2026-11-14 07:00 UTC202")
    shown.context.close()


def test_pointing_at_a_chart_shows_the_values_of_that_hour(browser: Browser, report: Path) -> None:
    shown = Shown(browser, report)
    readout = shown.page.locator(".readout").first
    expect(readout).to_have_text("15 Nov, 12:00 UTC: enqueued 20, acknowledged 2")
    shown.page.locator(".u-over").first.hover(position={"x": 1, "y": 60})
    expect(readout).to_have_text("14 Nov, 07:00 UTC: enqueued 20, acknowledged 2")
    shown.context.close()


def test_without_scripts_the_tables_are_open(browser: Browser, report: Path) -> None:
    shown = Shown(browser, report, java_script_enabled=False)
    expect(shown.page.locator("details[open]")).to_have_count(CHARTS)
    expect(shown.page.get_by_role("table", name="Messages per hour")).to_be_visible()
    expect(shown.page.locator(".plot").first).to_be_hidden()
    shown.context.close()


def test_charts_follow_the_theme_and_are_light_on_paper(browser: Browser, report: Path) -> None:
    shown = Shown(browser, report, color_scheme="light")
    light = shown.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--c1')")
    shown.page.emulate_media(color_scheme="dark")
    dark = shown.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--c1')")
    assert dark != light
    shown.page.wait_for_function(f"({PIXELS})('--c1') > 50")
    shown.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--c1')") == light
    shown.page.wait_for_function(f"({PIXELS})('--c1') > 50")
    shown.page.evaluate("dispatchEvent(new Event('afterprint'))")
    shown.page.wait_for_function(f"({PIXELS})('--c1') > 50")
    assert shown.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--c1')") == dark
    shown.page.emulate_media(media="print")
    shown.page.set_viewport_size({"width": 700, "height": 900})  # A4 between its margins.
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 700
    shown.page.wait_for_function("document.documentElement.classList.contains('paper')")
    shown.context.close()


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 360),
        pytest.param("light", 1_280, marks=pytest.mark.rotating),
        pytest.param("dark", 360, marks=pytest.mark.rotating),
        pytest.param("dark", 1_280, marks=pytest.mark.rotating),
    ],
)
def test_axe_finds_no_violations(browser: Browser, report: Path, scheme: Scheme, width: int) -> None:
    # axe runs in the page, which its policy forbids.
    shown = Shown(browser, report, color_scheme=scheme, bypass_csp=True)
    shown.page.set_viewport_size({"width": width, "height": 800})
    expect(shown.page.locator("canvas")).to_have_count(CHARTS)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    for is_open in (False, True):
        shown.page.evaluate(f"document.querySelectorAll('details').forEach((each) => {{ each.open = {is_open:d} }})")
        results = Axe().run(shown.page)
        assert results.violations_count == 0, results.generate_report()
    shown.context.close()


def test_the_console_draws_the_charts_and_runs_no_other_script(browser: Browser, report: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    other = "<script>document.querySelector('h1').textContent = 'another script ran'</script>"
    without_policy = report.read_text().replace("Content-Security-Policy", "x", 1)  # Only the server's policy is left.
    (folder / "latest.html").write_text(without_policy.replace("</body>", f"{other}</body>"))
    server = Server(tmp_path, pipeline_reports=str(folder))
    try:
        page = browser.new_page()
        page.goto(f"{server.url}/console#/reports")
        frame: FrameLocator = page.frame_locator("iframe")
        expect(frame.locator("canvas")).to_have_count(CHARTS)
        expect(frame.locator("h1")).to_have_text("Fastness report")
        page.close()
    finally:
        server.kill()
