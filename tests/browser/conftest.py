"""Fixtures of the tests in a browser: Chromium, a server with data for every page, and pages.

To load the console costs eight times as much as to go to another of its pages, so most tests use one `page`, which
stays loaded. `fresh` and `noisy` are loaded by their test alone.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import fastness
from fastness.pipeline.config import JobResult
from fastness.pipeline.lake import Lake
from fastness.pipeline.observation.runs import RunRecorder
from fastness.pipeline.schemas import LIVE_QUEUE_MINUTES
from tests.browser.console_pages import CHROMIUM, MARKUP, REPORT, SLACK_MS, VIEWPORT, Guarded, PageLog, add_data
from tests.support.server_process import Server

CHROMIUM_ARGUMENTS: Final = ["--no-sandbox", "--disable-gpu"]
FAILED: Final = pytest.StashKey[bool]()
# The timers of the console run only while a test says so: a page that no test uses does not ask for anything.
TIMERS: Final = """
const start = window.setInterval;
window.setInterval = (work, ...rest) => start(() => { if (sessionStorage.getItem("timers")) work(); }, ...rest);
"""
RUN_TIMERS: Final = "sessionStorage.setItem('timers', 'run')"
CLEAN: Final = """() => {
    for (const each of document.querySelectorAll("dialog[open]")) each.close();
    for (const each of document.querySelectorAll(".toast")) each.remove();
    localStorage.clear();
    sessionStorage.clear();
    document.documentElement.dataset.theme = "light";
    location.hash = "#/usage";
}"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = report.failed or item.stash.get(FAILED, False)
    return report


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path; apt-get install chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    (folder / "latest.html").write_text(REPORT)
    (folder / "latest.json").write_text("{}")
    return folder


@pytest.fixture(scope="package")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with live aggregates of two minutes, and the records of four jobs."""
    folder = tmp_path_factory.mktemp("lake")
    rows = [
        dict.fromkeys(LIVE_QUEUE_MINUTES.schema.names, 0)
        | {"universe": "main", "queue": MARKUP, "minute": minute_ms, "put": 7, "waits": 2, "wait_sum_ms": 3_000}
        | {"wait_max_ms": 2_000 + minute_ms // 60_000, "final": False}
        for minute_ms in (0, 60_000)
    ]
    Lake(str(folder)).table(LIVE_QUEUE_MINUTES).append_rows(pa.Table.from_pylist(rows, LIVE_QUEUE_MINUTES.schema))
    runs = RunRecorder(Lake(str(folder)).location)
    runs.started("rollup")
    runs.failed("rollup", ValueError(f"no Java {MARKUP}"))
    finding = {"universe": "main", "world": "ledger", "height": 7, "reason": MARKUP}
    for job, findings in (("ingest", []), ("audit", [finding] * 2), ("report", [])):
        runs.started(job)
        written = {"journal": 1_234, "activity": 10}
        runs.completed(JobResult(job=job, ok=not findings, rows=written, seconds=75.0, findings=findings))
    return folder


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, reports: Path, lake: Path) -> Iterator[Server]:
    """A server with data for every page."""
    flags: dict[str, Any] = {"pipeline_reports": str(reports), "pipeline_lake": str(lake)}
    running = Server(tmp_path_factory.mktemp("console"), **flags)
    with running.plane() as plane:
        add_data(plane)
    yield running
    running.kill()


class Loaded:
    """A page that is loaded once, for many tests of the same server. It is cleaned between them."""

    def __init__(self, browser: Browser, server: Server) -> None:
        self._browser = browser
        self._server = server
        self._page: Page | None = None
        self._log: PageLog | None = None

    @property
    def host(self) -> str:
        return self._server.url.removeprefix("http://")

    def use(self, *, timers: bool) -> tuple[Page, PageLog]:
        if self._page is None or self._log is None:
            context = self._browser.new_context(viewport=VIEWPORT, color_scheme="light")
            context.set_default_timeout(SLACK_MS)
            self._page = context.new_page()
            self._page.add_init_script(TIMERS)
            self._log = PageLog(self._page)
            self._page.goto(f"{self._server.url}/console#/usage")
        if timers:
            self._page.evaluate(RUN_TIMERS)
        self._log.errors.clear()
        return self._page, self._log

    def clean(self, *, drop: bool) -> None:
        """Make the page ready for the next test, or drop it: after a failure, and where a test has left the console."""
        assert self._page is not None
        if drop or not self._page.url.startswith(f"{self._server.url}/console#"):
            self._page.context.close()
            self._page = None
            return
        self._page.evaluate(CLEAN)
        if self._page.viewport_size != VIEWPORT:
            self._page.set_viewport_size(VIEWPORT)

    def close(self) -> None:
        if self._page is not None:
            self._page.context.close()


@pytest.fixture(scope="package")
def loaded(browser: Browser, server: Server) -> Iterator[Loaded]:
    pages = Loaded(browser, server)
    yield pages
    pages.close()


@pytest.fixture
def page(loaded: Loaded, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The loaded page of the console. It must not log errors."""
    yield from _used(loaded, request, timers=True)


@pytest.fixture
def untimed(loaded: Loaded, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The loaded page without timers: it refreshes only when the server sends an event."""
    yield from _used(loaded, request, timers=False)


def _used(loaded: Loaded, request: pytest.FixtureRequest, *, timers: bool) -> Iterator[Page]:
    page, log = loaded.use(timers=timers)
    yield page
    errors = list(log.errors)
    loaded.clean(drop=bool(errors) or request.node.stash.get(FAILED, False))
    assert errors == []
    assert log.hosts == {loaded.host}


@pytest.fixture
def noisy(browser: Browser) -> Iterator[Page]:
    """A new page for each test. It may log errors: Chromium logs every 401 response and every refused connection."""
    context = browser.new_context(viewport=VIEWPORT, color_scheme="light")
    context.set_default_timeout(SLACK_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def page_log(noisy: Page) -> PageLog:
    return PageLog(noisy)


@pytest.fixture
def fresh(noisy: Page, page_log: PageLog) -> Iterator[Page]:
    """A new page for each test that must not log errors."""
    yield noisy
    assert page_log.errors == []


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A server that requires tokens, and some tokens."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        tokens = {
            "all": plane.tokens.create("operator", universes="*", verbs="*").token,
            "some": plane.tokens.create("reader", universes="main", verbs="queue:*").token,
        }
        plane.queue("jobs").put(b"x")
    running = Server(tmp_path, tokens=True)
    yield running, tokens
    running.kill()
