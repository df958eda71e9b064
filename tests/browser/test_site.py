"""The documentation site: it builds without warnings, is complete, works offline, and is searched in a real browser."""

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

import build_docs
from tests.browser.console_pages import SLACK_MS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this version. The tool exits with the warning if there is one."""
    folder = tmp_path_factory.mktemp("site")
    [version, *_] = build_docs.build_all(folder)
    return folder / version


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of the site on a web server, with one more version."""
    build_docs.write_versions(site.parent, [site.name, "0.0.1"])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.rotating
def test_the_site_has_every_page_and_loads_nothing_of_another_host(site: Path) -> None:
    pages = [each.relative_to(ROOT / "docs").with_suffix(".html") for each in (ROOT / "docs").rglob("*.md")]
    pages += [
        Path("repository") / f"{each.relative_to(ROOT)}.html" for each in (ROOT / "examples").rglob("*.py")
    ]  # As code.
    assert [page for page in pages if not (site / page).exists()] == []
    index = (site / "index.html").read_text()
    missing = [page for page in pages if page.parts[0] != "repository" and f'href="{page}"' not in index]
    assert missing in ([], [Path("index.html")])  # The navigation has them all; index.html may be "./".
    loads = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)|<link\b[^>]*\bhref=\"?([^\" >]+)")
    for page in site.rglob("*.html"):
        for found in loads.finditer(page.read_text()):
            target = found[1] or found[2]
            assert not re.match(r"(?:[a-z]+:)?//", target), (page.name, target)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(?:https?:)?//|@import", style.read_text()), style.name


def test_links_out_of_the_documents_lead_to_copies(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert 'href="repository/ARCHITECTURE.html"' in page
    assert "transactions" in (site / "repository" / "examples" / "transactions" / "orders.py.html").read_text()
    # Code blocks with a title are shown as code.
    assert '<span class="filename">worker.py</span>' in (site / "tutorial.html").read_text()


def search(page: Page, words: str) -> None:
    page.get_by_role("textbox", name="Search").fill(words)
    expect(page.locator(".md-search-result__item").first).to_be_visible()


@pytest.mark.parametrize("where", [pytest.param("file", marks=pytest.mark.rotating), "http"])
def test_search_finds_a_page_and_no_other_host_is_contacted(
    site: Path, served: str, browser: Browser, where: str
) -> None:
    context = browser.new_context()
    context.set_default_timeout(SLACK_MS)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    base = site.as_uri() if where == "file" else f"{served}/{site.name}"
    page.goto(f"{base}/index.html")
    search(page, "dead letters")
    page.locator(".md-search-result__link").first.click()
    expect(page.locator(".md-content h1").first).to_be_visible()
    assert page.url.startswith(base)
    assert "index.html" not in page.url
    if where == "http":
        versions = page.locator(".md-version__link")
        expect(versions).to_have_text([site.name, "0.0.1"])
        page.goto(served)
        expect(page).to_have_url(f"{served}/{site.name}/index.html")
    root = site.parent.as_uri() if where == "file" else served
    assert [url for url in asked if not url.startswith((root, "data:", "blob:"))] == []
    context.close()
