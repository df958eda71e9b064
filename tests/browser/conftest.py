"""Fixtures of the tests in a browser: Chromium, a server with data for every page, and pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import fastness
from fastness.pipeline.config import JobResult
from fastness.pipeline.lake import Lake
from fastness.pipeline.observation.runs import RunRecorder
from fastness.pipeline.schemas import LIVE_QUEUE_MINUTES
from tests.browser.console_pages import CHROMIUM, MARKUP, REPORT, PageLog, add_data
from tests.support.server_process import Server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path; apt-get install chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    (folder / "latest.html").write_text(REPORT)
    (folder / "latest.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
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
        rows = {"journal": 1_234, "activity": 10}
        runs.completed(JobResult(job=job, ok=not findings, rows=rows, seconds=75.0, findings=findings))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, reports: Path, lake: Path) -> Iterator[Any]:
    """A server with data for every page."""
    flags = {"pipeline_reports": str(reports), "pipeline_lake": str(lake)}
    running = Server(tmp_path_factory.mktemp("console"), **flags)
    with running.plane() as plane:
        add_data(plane)
    yield running
    running.kill()


@pytest.fixture
def noisy(browser: Browser) -> Iterator[Page]:
    """A new page for each test. It may log errors: Chromium logs every 401 response and every refused connection."""
    context = browser.new_context(viewport={"width": 1_280, "height": 900}, color_scheme="light")
    yield context.new_page()
    context.close()


@pytest.fixture
def page_log(noisy: Page) -> PageLog:
    return PageLog(noisy)


@pytest.fixture
def page(noisy: Page, page_log: PageLog) -> Iterator[Page]:
    """A page that must not log errors."""
    yield noisy
    assert page_log.errors == []


@pytest.fixture
def untimed(page: Page) -> Page:
    """A page without timers: it refreshes only when the server sends an event."""
    page.add_init_script("window.setInterval = () => 0")
    return page


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
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
