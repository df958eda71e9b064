"""The console for tests in a browser: the server, data for every page, and what a person does on a page."""

import json
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any, Final

import pytest
from axe_playwright_python.base import AXE_SCRIPT, AxeResults  # type: ignore[import-untyped]
from playwright.sync_api import Locator, Page, ViewportSize, expect

from fastness import Plane
from fastness.wire.inboxes import Effect, Timer
from fastness.wire.quotas import Quota
from tests.support.server_process import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = [
    "overview",
    "queues",
    "queues/invoices",
    "queues/invoices/list",
    "mail",
    "mail/bob",
    "runs",
    "runs/r-1",
    "worlds",
    "worlds/ledger",
    "worlds/agent",
    "leases",
    "entities",
    "entities/order",
    "entities/order/a-1",
    "space",
    "usage",
    "nodes",
    "tokens",
    "audit",
    "pipeline",
    "reports",
]
COLOUR_RULES = ("color-contrast", "link-in-text-block")
NO_MANIFEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
REPORT = "<!doctype html><title>Report</title><style>h1{color:rgb(1, 2, 3)}</style><h1 id=h>All is well</h1>"
UNKNOWN_ID = "01980000-0000-7000-8000-000000000000"
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}
VIEWPORT: Final[ViewportSize] = {"width": 1_280, "height": 900}
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
MARKUP_NAME = "<img src=x onerror=document.title='owned'>#?.html"
SLACK_MS = 60_000  # Upper bound for a busy machine; the tests wait for events.
Guarded = tuple[Server, dict[str, str]]  # A server that requires tokens, and some tokens.
expect.set_options(timeout=SLACK_MS)


def add_data(plane: Plane) -> None:
    plane.queue("invoices").put({"order": 1, "note": MARKUP}, correlation_id=MARKUP, attributes={MARKUP: MARKUP})
    dead_letter(plane, "invoices", f"CardDeclined: insufficient funds {MARKUP}")
    plane.queue("emails").put(b"hello", delay_seconds=600)
    plane.mailbox("ada").send("bob", json.dumps({"subject": MARKUP}).encode(), content_type="application/json")
    world = plane.world("ledger")
    world.create()
    world.append([{"event": MARKUP, "n": number} for number in range(100)], expected_head=0)
    promise: dict[str, Any] = {"promote": True, "receipt_horizon_height": 80, "manifest_hash": NO_MANIFEST}
    world.snapshots.commit({"n": 80}, height=80, **promise)
    world.compact(entries=20, margin=10)
    add_run(plane)
    add_hosted_world(plane)
    plane.lease("orders/1").acquire(f"ada {MARKUP}", ttl_seconds=3_600)
    plane.tokens.create("worker", universes="main", verbs="queue:put,queue:receive,queue:ack", ttl_seconds=3_600)
    plane.quotas.set("main", Quota(messages=100_000, bytes=1 << 30))
    plane.queue("invoices").pause()
    plane.queue("invoices").resume()
    plane.entities.write("order", "a-1", {"total": 5, "metrics": 1, "note": MARKUP})


def add_run(plane: Plane) -> None:
    """A run that waits for a signal, held by a host that does nothing any more."""
    plane.workflows.start("research", MARKUP, id="r-1")
    [claimed] = plane.hosting.claim(["workflow:research"], owner="ada", lease_seconds=3_600)
    now_ms = round(time.time() * 1_000)
    entries = [
        ["begin", now_ms, 7],
        ["retry", now_ms - 400, 0, MARKUP, now_ms - 900, ["ValueError", MARKUP], now_ms - 300],
        ["step", now_ms, 0, MARKUP, now_ms - 300, {"plan": MARKUP}],
        ["wait", now_ms, 1, MARKUP_NAME, now_ms + 3_600_000],
    ]
    timer = Timer(intent_hash=b"0.1", deliver_at_ns=(now_ms + 3_600_000) * 1_000_000)
    plane.hosting.commit(
        claimed,
        owner="ada",
        expected_head=claimed.head,
        take=claimed.items[-1][0],
        opening=[{"turn": now_ms - 1_000}],
        entries=entries,
        timers=[(5, timer)],
    )


def add_hosted_world(plane: Plane) -> None:
    """A world with a program, an effect, a timer and an item that was set aside."""
    plane.world("agent").create(program="agent")
    for number in range(2):
        plane.world("agent").send("order", {"id": number, "note": MARKUP})
    [claimed] = plane.hosting.claim(["agent"], owner=f"ada {MARKUP}", lease_seconds=3_600)
    [(first, _), (second, _)] = claimed.items
    plane.hosting.commit(
        claimed,
        owner=f"ada {MARKUP}",
        expected_head=claimed.head,
        take=second,
        effects=[(1, Effect(kind="charge", intent_hash=b"e" * 32, params=json.dumps({"note": MARKUP}).encode()))],
        timers=[(1, Timer(intent_hash=b"reminder", deliver_at_ns=(1 << 62)))],
        aside=[(first, f"Traceback (most recent call last):\n  ...\nValueError: {MARKUP}")],
    )


def dead_letter(plane: Plane, queue: str, error: str) -> str:
    """Put a message and dead-letter it; returns its id."""
    receipt = plane.queue(queue).put({"dies": True}, max_attempts=1, priority=9)
    message = plane.queue(queue).receive()
    assert message is not None
    assert message.id == receipt.id
    message.nack(error=error, delay_seconds=0)
    return str(receipt.id)


class PageLog:
    """The console errors of a page, and the hosts that it contacted."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda entry: self.errors.append(entry.text) if entry.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))


def open_page(page: Page, server: Server, where: str = "overview") -> None:
    page.goto(f"{server.url}/console#/{where}")
    wait_until_loaded(page, where)


def wait_until_loaded(page: Page, where: str) -> None:
    """Wait until the page is open, live, and shows its data."""
    name, *parts = where.partition("?")[0].split("/")
    expect(page).to_have_title(" · ".join([*reversed(parts), name.capitalize(), "Fastness"]))
    expect(page.locator(".status.live")).to_be_visible()
    shown = {"overview": ".chart canvas", "reports": "iframe"}.get(name, ".page tbody tr")
    expect(page.locator(shown).first).to_be_visible()


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def tab_to(page: Page, target: Locator) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if target.evaluate("element => element === document.activeElement"):
            return
    pytest.fail("the Tab key does not reach the element")


def messages_to_show(plane: Plane) -> list[str]:
    """A leased message, one that is done, and one that is dead, with long words."""
    queue = plane.queue("shown")
    letter = dead_letter(plane, "shown", "x" * 500)
    done = queue.put({"n": 1}, keep_result=True)
    queue.receive().ack(result="y" * 500)
    queue.put({"n": "z" * 500}, key="k" * 200, attributes={"a" * 100: "b" * 100})
    return [queue.receive(owner="o" * 100, extend_for_seconds=0).id, done.id, letter]


def check_by_axe(page: Page, part: str | None = None, *, rules: Sequence[str] = ()) -> None:
    """Check a page by axe, or only a part of it that was not there when the page was checked, or by some rules."""
    options: dict[str, object] = {"iframes": False, "resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = list(rules)
    if page.evaluate("window.axe === undefined"):
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate("([part, options]) => axe.run(part ?? document, options)", [part, options])
    assert found["violations"] == [], AxeResults(found).generate_report()


def check_in_dark(page: Page) -> None:
    """Check a page that is checked in light by the rules that depend on colours."""
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    check_by_axe(page, rules=COLOUR_RULES)


def check_counts(page: Page) -> None:
    """Check that one of something is counted in the singular."""
    found = re.findall(r"(?<![\d,.:/-])1 (?:dead )?(\w*[a-z]s)\b", page.locator("main").inner_text())
    assert set(found) <= {"s", "ms", "is", "was"}


def check_width(page: Page, width: int) -> None:
    """Check that the page does not scroll sideways."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width, page.url
