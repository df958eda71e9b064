"""The console in a real browser: what it shows, what it does, and who can use it."""

import importlib.util
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

import holdfast
from holdfast import Plane

_spec = importlib.util.spec_from_file_location(
    "holdfast_processes", Path(__file__).parents[1] / "end_to_end" / "processes.py"
)
assert _spec is not None
assert _spec.loader is not None
_processes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_processes)
Server = _processes.Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path; apt-get install chromium")

PAGES = [
    "overview",
    "queues",
    "queues/invoices",
    "mail",
    "mail/bob",
    "worlds",
    "worlds/ledger",
    "leases",
    "entities",
    "entities/order",
    "entities/order/a-1",
    "reports",
]
NO_MANIFEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
REPORT = "<!doctype html><title>Report</title><style>h1{color:rgb(1, 2, 3)}</style><h1 id=h>All is well</h1>"
PHONE = {"width": 390, "height": 844}
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
EVIL_NAME = "<img src=x onerror=document.title='owned'>#?.html"
SLACK_MS = 60_000  # A busy machine may take that long; what is waited for is an event, not a time.
expect.set_options(timeout=SLACK_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
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
def server(tmp_path_factory: pytest.TempPathFactory, reports: Path) -> Iterator[Any]:
    """A server with something of everything."""
    running = Server(tmp_path_factory.mktemp("console"), pipeline_reports=str(reports))
    with running.plane() as plane:
        fill(plane)
    yield running
    running.kill()


def fill(plane: Plane) -> None:
    plane.queue("invoices").put({"order": 1, "note": EVIL}, correlation_id=EVIL, attributes={EVIL: EVIL})
    kill(plane, "invoices", f"CardDeclined: insufficient funds {EVIL}")
    plane.queue("emails").put(b"hello", delay_seconds=600)
    plane.mailbox("ada").send("bob", json.dumps({"subject": EVIL}).encode(), content_type="application/json")
    world = plane.world("ledger")
    world.create()
    world.append([{"event": EVIL, "n": number} for number in range(100)], expected_head=0)
    promise = {"promote": True, "receipt_horizon_height": 80, "manifest_hash": NO_MANIFEST}
    world.snapshots.commit({"n": 80}, height=80, **promise)
    world.compact(entries=20, margin=10)
    plane.lease("orders/1").acquire(f"ada {EVIL}", ttl_seconds=3_600)
    plane.entities.write("order", "a-1", {"total": 5, "metrics": 1, "note": EVIL})


def kill(plane: Plane, queue: str, error: str) -> str:
    """Put a message and let it die; its id."""
    receipt = plane.queue(queue).put({"dies": True}, max_attempts=1, priority=9)
    message = plane.queue(queue).receive()
    assert message is not None
    assert message.id == receipt.id
    message.nack(error=error)
    return str(receipt.id)


class Seen:
    """What a page said and asked for."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))


@pytest.fixture
def noisy(browser: Browser) -> Iterator[Page]:
    """A page of its own for each test. Chromium logs every answer of 401, and every connection that is refused."""
    context = browser.new_context(viewport={"width": 1_280, "height": 900}, color_scheme="light")
    yield context.new_page()
    context.close()


@pytest.fixture
def seen(noisy: Page) -> Seen:
    return Seen(noisy)


@pytest.fixture
def page(noisy: Page, seen: Seen) -> Iterator[Page]:
    """A page that must not complain."""
    yield noisy
    assert seen.errors == []


def visit(page: Page, server: Any, where: str = "overview") -> None:
    page.goto(f"{server.url}/console#/{where}")
    arrived(page, where)


def arrived(page: Page, where: str) -> None:
    """Wait until the page is that one, is live, and shows what it has asked for."""
    name, *parts = where.split("/")
    expect(page).to_have_title(" · ".join([*reversed(parts), name.capitalize(), "Holdfast"]))
    expect(page.locator(".status.live")).to_be_visible()
    shown = {"overview": ".chart canvas", "reports": "iframe"}.get(name, ".page tbody tr")
    expect(page.locator(shown).first).to_be_visible()


# It loads, and moves.


def test_it_loads_without_an_error_and_asks_no_other_host(page: Page, seen: Seen, server: Any) -> None:
    visit(page, server)
    expect(page.get_by_role("heading", name="Throughput")).to_be_visible()
    for name in PAGES:
        visit(page, server, name)
    assert seen.hosts == {server.url.removeprefix("http://")}
    assert seen.errors == []
    assert page.evaluate("document.cookie") == ""


def test_charts_get_another_point_every_second(page: Page, server: Any) -> None:
    visit(page, server)
    rows = page.get_by_role("row", name="queues.put")
    expect(rows).to_be_visible()
    before = rows.get_by_role("cell").nth(1).inner_text()
    assert before[0].isdigit()
    with server.plane() as plane:
        plane.queue("charts").put_many([b"x"] * 10)
    expect(rows.get_by_role("cell").nth(1)).not_to_have_text(before)
    expect(page.get_by_role("img", name="Throughput: calls")).to_be_visible()


@pytest.fixture
def hurried(page: Page) -> Page:
    """A page that looks only when it is told to: whatever it shows came by an event, not because it looked again."""
    page.add_init_script("window.setInterval = () => 0")
    return page


def test_a_message_that_is_put_shows_because_the_server_says_so(hurried: Page, server: Any) -> None:
    visit(hurried, server, "queues")
    expect(hurried.get_by_role("link", name="invoices")).to_be_visible()
    with server.plane() as plane:
        plane.queue("fresh").put({"n": 1})
        row = hurried.get_by_role("row", name="fresh")
        expect(row.get_by_role("cell").nth(1)).to_have_text("1")
        row.get_by_role("link").click()
        expect(hurried.get_by_role("region", name="Messages that are next")).to_contain_text('{"n":1}')
        plane.queue("fresh").put({"n": 2})
        expect(hurried.locator(".tile.ready b")).to_have_text("2")
        expect(hurried.get_by_role("region", name="Messages that are next")).to_contain_text('{"n":2}')


def test_what_is_in_other_universes_is_there_to_choose(page: Page, server: Any) -> None:
    with server.plane(universe="staging") as plane:
        plane.queue("only-here").put(b"x")
    visit(page, server, "queues")
    page.get_by_label("Universe").select_option("staging")
    expect(page.get_by_role("link", name="only-here")).to_be_visible()
    expect(page.get_by_role("link", name="invoices")).to_have_count(0)
    assert "universe=staging" in page.url
    page.reload()
    expect(page.get_by_role("link", name="only-here")).to_be_visible()


# Queues.


def test_a_dead_letter_is_redriven_by_its_button(page: Page, server: Any) -> None:
    with server.plane() as plane:
        first = kill(plane, "redrive", "TimeoutError: ledger did not answer")
        second = kill(plane, "redrive", "ValueError: no such order")
        visit(page, server, "queues/redrive")
        letters = page.get_by_role("region", name="Dead letters")
        expect(letters).to_contain_text("TimeoutError: ledger did not answer")
        page.get_by_role("button", name=f"Redrive {first}").click()
        expect(page.get_by_role("button", name=f"Redrive {first}")).to_have_count(0)
        expect(page.get_by_role("button", name=f"Redrive {second}")).to_be_visible()
        expect(page.get_by_role("region", name="Messages that are next")).to_contain_text(first[-12:])
        assert plane.queue("redrive").stats().ready == 1
        page.get_by_role("button", name="Redrive all").click()
        expect(page.get_by_text("No dead letters.")).to_be_visible()
        assert plane.queue("redrive").stats().ready == 2


def test_a_queue_is_paused_and_resumed(page: Page, server: Any) -> None:
    with server.plane() as plane:
        plane.queue("pausing").put(b"x")
        visit(page, server, "queues/pausing")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        assert plane.queue("pausing").stats().paused
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        assert not plane.queue("pausing").stats().paused


def test_what_others_wrote_is_text_and_nothing_else(page: Page, server: Any, reports: Path) -> None:
    (reports / EVIL_NAME).write_text(REPORT)
    try:
        for where, place in (
            ("queues/invoices", "Messages that are next"),
            ("queues/invoices", "Dead letters"),
            ("mail/bob", "Mail that waits"),
            ("worlds/ledger", "Journal records"),
            ("leases", "Leases that are held"),
            ("entities/order", "Entities of the kind order"),
            ("entities/order/a-1", "Fields"),
            ("entities/order/a-1", "Changes"),
            ("reports", "Files of the pipeline"),
        ):
            visit(page, server, where)
            region = page.get_by_role("region", name=place)
            for folded in region.locator("summary, .opener").all()[-1:]:
                if folded.get_attribute("aria-expanded") != "true":
                    folded.click()
                expect(region.locator("pre").first).to_be_visible()
            expect(region).to_contain_text("onerror=")
            expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)
            assert "owned" not in page.title()
        with page.context.expect_page() as opened:
            page.get_by_role("link", name=EVIL_NAME).click()
        expect(opened.value.locator("h1")).to_have_text("All is well")
    finally:
        (reports / EVIL_NAME).unlink()


def test_what_has_the_focus_keeps_it_when_a_row_before_it_goes(page: Page, server: Any) -> None:
    with server.plane() as plane:
        for error in ("one", "two", "three"):
            kill(plane, "focus", error)
        visit(page, server, "queues/focus")
        buttons = page.get_by_role("region", name="Dead letters").get_by_role("button", name="Redrive 0")
        expect(buttons).to_have_count(3)
        first, last = (buttons.nth(n).get_attribute("aria-label") or "" for n in (0, 2))
        page.get_by_role("button", name=last).focus()
        assert plane.queue("focus").redrive(ids=[first.removeprefix("Redrive ")]) == 1
        expect(buttons).to_have_count(2)
        expect(page.get_by_role("button", name=last)).to_be_focused()


def test_a_page_that_is_none_is_the_overview(page: Page, server: Any) -> None:
    for where in ("constructor", "__proto__", "nothing/%E0%A4%A"):
        page.goto(f"{server.url}/console#/{where}")
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


# Mail, worlds, leases, entities, reports.


def test_mail_that_waits_and_receipts_are_shown(hurried: Page, server: Any) -> None:
    with server.plane() as plane:
        visit(hurried, server, "mail")
        plane.mailbox("carol").send("dave", b"one")
        expect(hurried.get_by_role("row", name="dave").get_by_role("cell").nth(2)).to_have_text("1")
        visit(hurried, server, "mail/carol")
        receipts = hurried.get_by_role("region", name="Receipts for what was sent")
        expect(receipts.get_by_text("stored")).to_be_visible()
        plane.mailbox("dave").confirm(plane.mailbox("dave").read())
        expect(receipts.get_by_text("confirmed")).to_be_visible()


def test_a_world_is_drawn_to_scale(page: Page, server: Any) -> None:
    visit(page, server, "worlds/ledger")
    picture = page.get_by_role("img", name="Journal of ledger: 3 segments up to 60, hot from there to 102")
    expect(picture).to_be_visible()
    blocks = picture.locator(".cold").all()
    cold = [[float(each.get_attribute(name) or 0) for name in ("x", "width")] for each in blocks]
    for (x, width), start in zip(cold, (0, 20, 40), strict=True):
        assert (x, width) == pytest.approx((1_000 * start / 102, 1_000 * 20 / 102 - 1))
    (hot,) = picture.locator(".hot").all()
    assert float(hot.get_attribute("x") or 0) == pytest.approx(1_000 * 60 / 102)
    assert float(hot.get_attribute("width") or 0) == pytest.approx(1_000 * 42 / 102)
    (mark,) = picture.locator(".mark").all()
    assert float(mark.get_attribute("x") or 0) + 1.5 == pytest.approx(1_000 * 80 / 102)
    page.get_by_label("From height").fill("7")
    page.get_by_role("button", name="Read").click()
    records = page.get_by_role("region", name="Journal records").get_by_role("row")
    expect(records.nth(1).get_by_role("rowheader")).to_have_text("7")


def test_a_height_that_is_being_typed_stays_when_records_come(hurried: Page, server: Any) -> None:
    with server.plane() as plane:
        world = plane.world("typed")
        world.create()
        world.append(list(range(60)), expected_head=0)
        visit(hurried, server, "worlds/typed")
        rows = hurried.get_by_role("region", name="Journal records").get_by_role("row")
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("59")
        hurried.get_by_label("From height").fill("7")
        world.append(["more"], expected_head=60)
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("60")
        expect(hurried.get_by_label("From height")).to_have_value("7")
        hurried.get_by_role("button", name="Read").click()
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("7")
        hurried.get_by_role("button", name="Newest").click()
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("60")
        expect(hurried.get_by_label("From height")).to_have_value("11")


def test_a_world_is_verified_and_damage_is_told(page: Page, tmp_path: Path) -> None:
    running = Server(tmp_path)
    try:
        with running.plane() as plane:
            fill(plane)
        visit(page, running, "worlds/ledger")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator(".verdict")).to_contain_text("Sound: 102 records without a hole, 3 segments")
        (body,) = (tmp_path / "data").rglob("20-39.log")
        body.write_bytes(body.read_bytes()[:-1] + b"\x00")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator(".verdict")).to_contain_text("Damaged.")
        expect(page.locator(".verdict")).to_contain_text("20-39.log")
    finally:
        running.kill()


def test_whoever_waits_for_a_lease_is_shown(page: Page, server: Any) -> None:
    with server.plane() as plane, server.plane() as other:
        held = plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiting = threading.Thread(target=lambda: other.lease("deploy").acquire("bob", wait_seconds=60).release())
        waiting.start()
        try:
            visit(page, server, "leases")
            row = page.get_by_role("row", name="deploy")
            expect(row).to_contain_text("ada")
            expect(row).to_contain_text("1 for")
        finally:
            held.release()
            waiting.join()
        expect(page.get_by_role("row", name="deploy")).to_have_count(0)


def test_entities_have_their_fields_by_tier(page: Page, server: Any) -> None:
    with server.plane() as plane:
        plane.entities.write("task", "t-1", {"status": "open", "title": "x"})
    visit(page, server, "entities")
    cells = page.get_by_role("row", name="task").get_by_role("cell")
    expect(cells.nth(0)).to_contain_text("status")
    expect(cells.nth(1)).to_contain_text("title")
    page.get_by_role("link", name="task").click()
    page.get_by_role("link", name="t-1").click()
    expect(page.get_by_role("region", name="Changes")).to_contain_text("critical")


def test_tiers_are_right_however_many_kinds_there_are_and_whatever_fields_are_called(page: Page, server: Any) -> None:
    with server.plane(universe="kinds") as plane:
        for number in range(100):
            plane.entities.write(f"kind-{number:03}", "1", {"n": number})
        plane.entities.write("task", "t-1", {"status": "open", "constructor": "x"})
    page.goto(f"{server.url}/console?universe=kinds#/entities")
    expect(page.get_by_role("heading", name="100 of more kinds")).to_be_visible()
    page.get_by_role("button", name="Next page").click()
    page.get_by_role("link", name="task").click()
    cells = page.get_by_role("row", name="t-1").get_by_role("cell")
    expect(cells.nth(2)).to_have_text("status: open")
    expect(cells.nth(3)).to_have_text("constructor: x")
    page.get_by_role("link", name="t-1").click()
    fields = page.get_by_role("region", name="Fields")
    expect(fields.get_by_role("row", name="constructor").get_by_role("cell").first).to_have_text("important")
    expect(fields.get_by_role("row", name="status").get_by_role("cell").first).to_have_text("critical")


def test_a_report_is_shown_and_runs_nothing(noisy: Page, seen: Seen, server: Any, reports: Path) -> None:
    script = "<script>document.getElementById('h').textContent = 'a script ran'</script>"
    (reports / "latest.html").write_text(REPORT + script)
    try:
        visit(noisy, server, "reports")
        heading = noisy.frame_locator("iframe").locator("h1")
        expect(heading).to_have_text("All is well")
        expect(heading).to_have_css("color", "rgb(1, 2, 3)")
        expect(noisy.get_by_role("link", name="latest.json")).to_be_visible()
        assert [error for error in seen.errors if "script" not in error] == []
    finally:
        (reports / "latest.html").write_text(REPORT)


# Tokens.


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """A server that asks for tokens, and some of them."""
    with holdfast.open(f"dir:{tmp_path / 'data'}") as plane:
        made = {
            "all": plane.tokens.create("operator", universes="*", verbs="*").token,
            "some": plane.tokens.create("reader", universes="main", verbs="queue:*").token,
        }
        plane.queue("jobs").put(b"x")
    running = Server(tmp_path, tokens=True)
    yield running, made
    running.kill()


def sign_in(page: Page, shown: str) -> None:
    page.get_by_label("Token").fill(shown)
    page.get_by_role("button", name="Sign in").click()


def test_a_wrong_token_is_refused_and_a_right_one_comes_in(noisy: Page, seen: Seen, guarded: Any) -> None:
    server, made = guarded
    noisy.goto(f"{server.url}/console#/queues")
    expect(noisy.get_by_label("Token")).to_be_focused()
    assert seen.errors == []
    sign_in(noisy, "hft_" + "0" * 32 + "_" + "x" * 48)
    expect(noisy.get_by_role("alert")).to_contain_text("Refused.")
    expect(noisy.get_by_role("link", name="jobs")).to_have_count(0)
    sign_in(noisy, "no token at all")
    expect(noisy.get_by_role("alert")).to_contain_text("Refused.")
    sign_in(noisy, made["all"])
    expect(noisy.get_by_role("link", name="jobs")).to_be_visible()
    expect(noisy.locator(".who")).to_have_text("operator")
    noisy.reload()
    expect(noisy.get_by_role("link", name="jobs")).to_be_visible()
    kept = noisy.evaluate("[document.cookie, JSON.stringify(localStorage), location.href].join()")
    assert made["all"] not in kept
    noisy.get_by_role("button", name="Sign out operator").click()
    expect(noisy.get_by_label("Token")).to_be_visible()
    assert noisy.evaluate("sessionStorage.length") == 0


def test_what_no_header_can_carry_is_refused_like_any_other_wrong_token(noisy: Page, guarded: Any) -> None:
    server, made = guarded
    noisy.goto(f"{server.url}/console#/queues")
    sign_in(noisy, "hft_…")
    expect(noisy.get_by_role("alert")).to_contain_text("Refused.")
    noisy.reload()
    sign_in(noisy, made["all"])
    expect(noisy.get_by_role("link", name="jobs")).to_be_visible()


def test_whoever_has_signed_out_is_not_looked_after_any_more(page: Page, guarded: Any) -> None:
    server, made = guarded
    page.clock.install()
    page.goto(f"{server.url}/console#/queues")
    sign_in(page, made["all"])
    expect(page.get_by_role("link", name="jobs")).to_be_visible()
    page.get_by_role("button", name="Sign out operator").click()
    expect(page.get_by_label("Token")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(server.url)))
    page.clock.fast_forward(60_000)
    page.evaluate("fetch('console').then((answer) => answer.text())")  # Whoever was asked before is in the list now.
    assert "/console" in asked
    assert [path for path in asked if path.startswith(("/v1/", "/console/session", "/console/events"))] == []
    expect(page).to_have_title("Sign in · Holdfast")


def test_whose_token_is_revoked_is_out(noisy: Page, guarded: Any) -> None:
    server, made = guarded
    noisy.goto(f"{server.url}/console")
    sign_in(noisy, made["some"])
    expect(noisy.locator(".status.live")).to_be_visible()
    with server.plane(token=made["all"]) as plane:
        plane.tokens.revoke(made["some"])
    expect(noisy.get_by_role("alert")).to_contain_text("Refused.")


def test_a_token_for_one_universe_sees_what_it_may(page: Page, guarded: Any) -> None:
    server, made = guarded
    page.goto(f"{server.url}/console")
    sign_in(page, made["some"])
    expect(page.get_by_text("does not allow metrics:read")).to_be_visible()
    expect(page.get_by_label("Universe").locator("option")).to_have_text(["main"])
    page.get_by_role("link", name="Queues").click()
    expect(page.get_by_role("link", name="jobs")).to_be_visible()


def test_what_a_token_does_not_allow_is_said(noisy: Page, guarded: Any) -> None:
    server, made = guarded
    noisy.goto(f"{server.url}/console")
    sign_in(noisy, made["some"])
    noisy.get_by_role("link", name="Worlds").click()
    expect(noisy.get_by_role("alert").filter(has_text="does not allow world:survey")).to_be_visible()


def test_the_verbs_that_the_document_names_are_enough_to_see_everything(page: Page, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "console.md").read_text()
    verbs = "".join(re.findall(r"^    ((?:[a-z]+:[a-z._]+,?)+)$", text, re.MULTILINE))
    assert verbs.count(":") > 20
    with holdfast.open(f"dir:{tmp_path / 'data'}") as plane:
        shown = plane.tokens.create("viewer", universes="*", verbs=verbs).token
        fill(plane)
    running = Server(tmp_path, tokens=True)
    try:
        page.goto(f"{running.url}/console")
        sign_in(page, shown)
        expect(page.get_by_role("img", name="Throughput: calls")).to_be_visible()
        for name in PAGES[1:-1]:
            visit(page, running, name)
            expect(page.locator(".problem")).to_be_hidden()
        visit(page, running, "worlds/ledger")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator(".verdict")).to_contain_text("Sound")
    finally:
        running.kill()


# Restarts.


def test_it_survives_a_restart_and_says_so(noisy: Page, tmp_path: Path) -> None:
    first = Server(tmp_path)
    try:
        with first.plane() as plane:
            plane.queue("jobs").put(b"x")
        visit(noisy, first, "queues")
        expect(noisy.get_by_role("row", name="jobs").get_by_role("cell").nth(1)).to_have_text("1")
        first.stop()
        expect(noisy.locator(".status.lost")).to_be_visible()
        expect(noisy.get_by_role("alert").filter(has_text="connection to the server is lost")).to_be_visible()
    finally:
        first.kill()
    second = Server(tmp_path, port=first.address[1])
    try:
        expect(noisy.locator(".status.live")).to_be_visible()
        expect(noisy.get_by_text("connection to the server is lost")).to_have_count(0)
        with second.plane() as plane:
            plane.queue("jobs").put(b"y")
        expect(noisy.get_by_role("row", name="jobs").get_by_role("cell").nth(1)).to_have_text("2")
    finally:
        second.kill()


# For everybody.


def test_everything_is_reached_by_keyboard(page: Page, server: Any) -> None:
    with server.plane() as plane:
        letter = kill(plane, "keys", "ValueError: no")
    visit(page, server)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    page.keyboard.type("gq")
    expect(page.get_by_role("heading", level=1)).to_have_text("Queues")
    expect(page.get_by_role("link", name="keys")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("key")
    expect(page.get_by_role("row")).to_have_count(2)
    tab_to(page, page.get_by_role("link", name="keys"))
    page.keyboard.press("Enter")
    redrive = page.get_by_role("button", name=f"Redrive {letter}")
    expect(redrive).to_be_visible()
    tab_to(page, redrive)
    page.keyboard.press("Enter")
    expect(page.get_by_text("No dead letters.")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def tab_to(page: Page, target: Any) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if target.evaluate("element => element === document.activeElement"):
            return
    pytest.fail("the Tab key does not lead there")


def test_it_fits_a_phone(browser: Browser, server: Any) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    for name in PAGES:
        visit(page, server, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
    page.get_by_role("link", name="Queues", exact=True).first.tap()
    expect(page.get_by_role("link", name="invoices")).to_be_visible()
    context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(page: Page, server: Any, name: str, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    visit(page, server, name)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    for each in page.locator("summary, .opener").all()[:2]:
        each.click()
    if name == "overview":  # The list of keys is the same on every page.
        page.keyboard.press("?")
        check_by_axe(page)
        page.keyboard.press("Escape")
    check_by_axe(page)


def check_by_axe(page: Page) -> None:
    found = Axe().run(page, options={"iframes": False})
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_at_the_door(page: Page, guarded: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    page.goto(f"{guarded[0].url}/console")
    expect(page.get_by_label("Token")).to_be_visible()
    check_by_axe(page)


def test_dark_or_light_is_remembered(page: Page, server: Any) -> None:
    visit(page, server)
    page.get_by_role("button", name="Dark or light").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
