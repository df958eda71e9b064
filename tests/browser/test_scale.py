"""The console with many queues: lists are read page by page, and searched by the server."""

from pathlib import Path

from playwright.sync_api import Page, Response, expect

import fastness
from fastness import Tier
from tests.browser.console_pages import check_by_axe, open_page
from tests.support.server_process import Server

QUEUES = 10_000
ANSWER_BYTES_MAX = 1 << 20


def test_ten_thousand_queues_are_listed_filtered_and_paged(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        for first in range(0, QUEUES, 250):
            batch = plane.atomic()
            for number in range(first, first + 250):
                batch.put(plane.queue(f"q-{number:05}"), b"x")
            batch.commit(tier=Tier.IMPORTANT)
    running = Server(tmp_path)
    sizes: dict[str, int] = {}

    def measure(response: Response) -> None:
        if "/v1/" in response.url:
            sizes[response.url] = int(response.headers.get("content-length", 0))

    page.on("response", measure)
    try:
        open_page(page, running, "queues")
        names = page.locator(".page tbody th a")
        expect(page.get_by_role("heading", name="100 of more queues")).to_be_visible()
        expect(names).to_have_count(100)
        expect(page.locator(".tile.ready b")).to_have_text("100")
        part = page.get_by_text("The numbers above are of the 100 queues listed below, not of all queues.")
        expect(part).to_be_visible()
        page.get_by_role("button", name="Next page").click()
        expect(names.first).to_have_text("q-00100")
        assert page.url.endswith("#/queues?after=q-00099")
        page.reload()  # The address has the page.
        expect(names.first).to_have_text("q-00100")
        page.keyboard.press("/")
        page.keyboard.type("Q-09999")
        expect(names).to_have_text(["q-09999"])
        expect(page.get_by_role("heading", name="1 queue")).to_be_visible()
        assert page.url.endswith("#/queues?filter=Q-09999")
        page.reload()
        expect(names).to_have_text(["q-09999"])
        page.get_by_label("Filter by name").fill("99")
        expect(names.first).to_have_text("q-00099")
        assert names.count() <= 100
        page.get_by_label("Filter by name").fill("nothing")
        expect(page.get_by_text("Nothing matches the filter.")).to_be_visible()
        page.get_by_label("Filter by name").fill("q-05000")
        names.first.click()
        expect(page.locator(".tile.ready b")).to_have_text("1")
        open_page(page, running)
        expect(page.get_by_role("heading", name="Throughput")).to_be_visible()
        check_by_axe(page)
        assert sizes
        assert max(sizes.values()) <= ANSWER_BYTES_MAX, sizes
    finally:
        running.kill()
