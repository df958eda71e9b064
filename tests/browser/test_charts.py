"""Charts in a browser: hours of history when they are opened, ranges, and labels that are not cut off."""

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

import fastness
from fastness.kv import Transaction
from fastness.layers import samples
from fastness.layers.samples import StoredSample
from tests.browser.console_pages import PHONE, check_by_axe
from tests.support.server_process import Server

HOURS = 23
_OLDEST_SECONDS = 86_399  # Written as "23 h 59 min", the longest label of an axis.


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose data has samples of the last 23 hours, and one queue."""
    folder = tmp_path_factory.mktemp("used")
    with fastness.open(f"dir:{folder / 'data'}") as plane:
        plane.queue("invoices").put({"order": 1})
        plane.transact(_store_samples, round(time.time() * 1_000))
    running = Server(folder)
    yield running
    running.kill()


def _store_samples(tx: Transaction, now_ms: int) -> None:
    for number, minutes in enumerate(range(HOURS * 60, 0, -1)):
        at_ms = now_ms - minutes * 60_000
        numbers: dict[str, float] = {"ready": 1_000 + number, "put": number * 60, "acked": number * 30}
        numbers["oldest"] = _OLDEST_SECONDS
        server = {"calls": number * 600, "errors": 0, "fenced": 0, "rejected": 0}
        sample = StoredSample(at_ms, 1, server, {"main": numbers}, {"main": {"invoices": numbers}})
        samples.store(tx, "local", sample, [0, 1] if minutes < 60 else [1])


def test_a_chart_has_hours_behind_it_when_it_is_opened(fresh: Page, used: Server) -> None:
    page = fresh
    page.goto(f"{used.url}/console#/overview?range=24%20h")
    depth = page.get_by_role("img", name="Depth in main, 22 h")
    expect(depth).to_be_visible()
    expect(page.get_by_role("img", name="Throughput, 22 h")).to_be_visible()
    expect(page.get_by_role("button", name="24 h")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="6 h").click()
    expect(page).to_have_url(f"{used.url}/console#/overview?range=6+h")
    expect(page.get_by_role("img", name="Depth in main, 5 h")).to_be_visible()
    page.reload()
    expect(page.get_by_role("img", name="Depth in main, 5 h")).to_be_visible()
    page.get_by_role("button", name="24 h").click()
    expect(depth).to_be_visible()
    page.get_by_role("button", name="1 h", exact=True).click()
    expect(page.get_by_role("img", name=re.compile("Depth in main, 5. min"))).to_be_visible()
    page.get_by_role("button", name="5 min").click()
    expect(page).to_have_url(f"{used.url}/console#/overview")
    expect(page.get_by_role("img", name=re.compile("Depth in main, [45] min"))).to_be_visible()
    check_by_axe(page)


@pytest.mark.parametrize("width", [pytest.param(1_440, marks=pytest.mark.rotating), PHONE["width"]])
def test_no_label_of_an_axis_is_cut_off(fresh: Page, used: Server, width: int) -> None:
    page = fresh
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{used.url}/console#/overview?range=24%20h")
    expect(page.get_by_role("img", name="Oldest in main, 22 h")).to_be_visible()
    cut = page.locator(".plot canvas").evaluate_all(
        """all => all.filter((canvas) => {
             const { width, height } = canvas;
             const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
             return Array.from({ length: height }, (_, y) => data[4 * y * width + 3]).some((ink) => ink);
           }).length"""
    )
    assert cut == 0, "a label begins outside of its chart"


def test_a_queue_has_charts_of_its_own(fresh: Page, used: Server) -> None:
    page = fresh
    page.goto(f"{used.url}/console#/queues/invoices?range=24%20h")
    expect(page.get_by_role("img", name="Depth, 22 h")).to_be_visible()
    expect(page.get_by_role("img", name="Rates, 22 h")).to_be_visible()
    page.get_by_role("button", name="1 h", exact=True).click()
    expect(page.get_by_role("img", name=re.compile("Oldest, 5. min"))).to_be_visible()
    note = page.get_by_text("The server stores samples of the 100 measured queues with the most messages")
    expect(note).to_be_hidden()
    with used.plane() as plane:
        plane.queue("unmeasured").put(1)
    page.goto(f"{used.url}/console#/queues/unmeasured?range=24%20h")
    expect(note).to_be_visible()
    check_by_axe(page)
