"""The console in a real browser: content, actions, authentication and accessibility."""

import os
import random
import re
import resource
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

import fastness
from fastness.errors import MessageCancelled, RateLimited
from fastness.layers import journal_records
from fastness.server.http import json_codec
from fastness.wire import run_timeline
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control, DomainEvent, TimerFired
from fastness.wire.runs import CANCEL, CHILD, SIGNAL, START
from fastness.wire.worlds import Record
from tests.browser.console_pages import (
    COLOUR_RULES,
    MARKUP,
    MARKUP_NAME,
    PAGES,
    PHONE,
    REPORT,
    SLACK_MS,
    UNKNOWN_ID,
    Guarded,
    PageLog,
    add_data,
    check_by_axe,
    check_counts,
    check_in_dark,
    check_width,
    dead_letter,
    messages_to_show,
    open_page,
    sign_in,
    tab_to,
)
from tests.support.server_process import Server

# Loading and live updates.


@pytest.mark.always
def test_the_console_contacts_no_other_host_and_sets_no_cookie(fresh: Page, page_log: PageLog, server: Server) -> None:
    open_page(fresh, server)
    expect(fresh.get_by_role("heading", name="Throughput")).to_be_visible()
    assert page_log.hosts == {server.url.removeprefix("http://")}
    assert fresh.evaluate("document.cookie") == ""


def test_charts_are_updated_every_second(page: Page, server: Server) -> None:
    open_page(page, server)
    rows = page.get_by_role("row", name="queues.put")
    expect(rows).to_be_visible()
    before = rows.get_by_role("cell").nth(1).inner_text()
    assert before[0].isdigit()
    with server.plane() as plane:
        plane.queue("charts").put_many([b"x"] * 10)
    expect(rows.get_by_role("cell").nth(1)).not_to_have_text(before)
    expect(page.get_by_role("img", name=re.compile("^Throughput.*: calls"))).to_be_visible()


def test_the_overview_lists_the_nodes_that_share_the_plane(fresh: Page, postgres_url: str, tmp_path: Path) -> None:
    page = fresh
    running = []
    try:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            running.append(Server(tmp_path / name, data=postgres_url, activity=str(tmp_path / name / "activity")))
        open_page(page, running[0])
        nodes = page.get_by_role("region", name="Nodes")
        for server in running:
            expect(nodes.get_by_role("row").filter(has_text=server.url)).to_contain_text("alive")
        expect(nodes.get_by_text("maintenance")).to_have_count(1)
        assert running[1].stop() == 0
        expect(nodes.get_by_role("row").filter(has_text=running[1].url)).to_have_count(0)
        expect(nodes.get_by_role("row").filter(has_text=running[0].url)).to_contain_text("maintenance")
        check_by_axe(page, "[role=region][aria-label=Nodes]")
    finally:
        for server in running:
            server.kill()


def test_the_overview_shows_the_statistics_of_pushes(page: Page, server: Server) -> None:
    open_page(page, server)
    pushes = page.locator("section.card").filter(has=page.get_by_role("heading", name="Pushes"))
    expect(pushes).to_contain_text("120 a minute and sender")
    duplicates = 0
    with server.plane() as plane, pytest.raises(RateLimited):
        while True:
            pushed = plane.ingress.push("push-target", "t", b"x", idempotency_key="console", sender="console")
            duplicates += pushed.deduped
    facts = pushes.locator(".facts > div")
    expect(facts.filter(has_text="Refused")).to_contain_text("rate_limited 1")
    expect(facts.filter(has_text="Duplicates")).to_contain_text(str(duplicates))
    check_by_axe(page, "section.card:has(.facts)")


def test_a_new_message_is_shown_when_the_server_sends_an_event(untimed: Page, server: Server) -> None:
    open_page(untimed, server, "queues")
    expect(untimed.get_by_role("link", name="invoices")).to_be_visible()
    with server.plane() as plane:
        plane.queue("fresh").put({"n": 1})
        row = untimed.get_by_role("row", name="fresh")
        expect(row.get_by_role("cell").nth(1)).to_have_text("1")
        row.get_by_role("link").click()
        expect(untimed.get_by_role("region", name="Next messages")).to_contain_text('{"n":1}')
        plane.queue("fresh").put({"n": 2})
        expect(untimed.locator(".tile.ready b")).to_have_text("2")
        expect(untimed.get_by_role("region", name="Next messages")).to_contain_text('{"n":2}')


def test_selecting_a_universe_shows_its_data(fresh: Page, server: Server) -> None:
    page = fresh
    with server.plane(universe="staging") as plane:
        plane.queue("only-here").put(b"x")
    open_page(page, server, "queues")
    page.get_by_label("Universe").select_option("staging")
    expect(page.get_by_role("link", name="only-here")).to_be_visible()
    expect(page.get_by_role("link", name="invoices")).to_have_count(0)
    assert "universe=staging" in page.url
    page.reload()
    expect(page.get_by_role("link", name="only-here")).to_be_visible()


# Queues.


def test_a_dead_letter_is_redriven_by_its_button(page: Page, server: Server) -> None:
    with server.plane() as plane:
        first = dead_letter(plane, "redrive", "TimeoutError: ledger did not answer")
        second = dead_letter(plane, "redrive", "ValueError: no such order")
        open_page(page, server, "queues/redrive")
        letters = page.get_by_role("region", name="Dead letters")
        expect(letters).to_contain_text("TimeoutError: ledger did not answer")
        page.get_by_role("button", name=f"Redrive {first}").click()
        expect(page.get_by_role("button", name=f"Redrive {first}")).to_have_count(0)
        expect(page.get_by_role("button", name=f"Redrive {second}")).to_be_visible()
        expect(page.get_by_role("region", name="Next messages")).to_contain_text(first[-12:])
        assert plane.queue("redrive").stats().ready == 1
        page.get_by_role("button", name="Redrive all").click()
        page.get_by_role("dialog", name="Redrive 1 dead letter of redrive?").get_by_role("button", name="Keep").click()
        assert plane.queue("redrive").stats().ready == 1
        page.get_by_role("button", name="Redrive all").click()
        page.get_by_role("button", name="Redrive 1 dead letter").click()
        expect(page.get_by_text("No dead letters.")).to_be_visible()
        assert plane.queue("redrive").stats().ready == 2


def test_a_dead_letter_shows_its_failed_attempts(page: Page, server: Server) -> None:
    with server.plane() as plane:
        queue = plane.queue("failing")
        queue.put({"n": 1}, max_attempts=2)
        for error in (ValueError("first"), LookupError(MARKUP)):
            with pytest.raises(type(error)), queue.receive(owner="ada", wait_seconds=30):
                raise error
        open_page(page, server, "queues/failing")
        letters = page.get_by_role("region", name="Dead letters")
        letters.locator(".opener").click()
        newest, oldest = letters.locator("details").all()
        expect(newest.locator("summary")).to_contain_text("Attempt 2 by ada: failed")
        expect(newest.locator("pre")).to_contain_text("raise error")
        expect(newest.locator("pre")).to_contain_text("onerror=")
        expect(oldest.locator("pre")).to_have_count(0)
        oldest.locator("summary").click()
        expect(oldest.locator("pre")).to_contain_text("ValueError: first")
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)


def test_leased_messages_are_shown_with_their_owners(page: Page, server: Server) -> None:
    with server.plane() as plane:
        plane.queue("leases").put(b"x")
        open_page(page, server, "queues/leases")
        expect(page.get_by_text("No messages are leased.")).to_be_visible()
        message = plane.queue("leases").receive(owner="ada-7", visibility_seconds=600)
        leased = page.get_by_role("region", name="Leased messages")
        expect(leased).to_contain_text("ada-7")
        expect(leased).to_contain_text(message.id)
        message.ack()
        expect(page.get_by_text("No messages are leased.")).to_be_visible()


def test_a_queue_is_paused_and_resumed(page: Page, server: Server) -> None:
    with server.plane() as plane:
        plane.queue("pausing").put(b"x")
        open_page(page, server, "queues/pausing")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("dialog")).to_contain_text("1 message is ready")
        page.get_by_role("button", name="Let it run").click()
        assert not plane.queue("pausing").stats().paused
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="Pause the queue").click()
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        assert plane.queue("pausing").stats().paused
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        assert not plane.queue("pausing").stats().paused


# One message.


@pytest.mark.always
def test_a_message_is_found_by_its_id_and_followed_to_its_result(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("jobs")
        id = queue.put({"n": 1}, key="tenant/7", keep_result=True, attributes={MARKUP: MARKUP}).id
        open_page(page, server, "queues/jobs")
        page.keyboard.press("/")
        page.keyboard.type(f" {id} ")
        page.keyboard.press("Enter")
        expect(page).to_have_title(f"{id} · messages · jobs · Queues · Fastness")
        assert page.url.endswith(f"#/queues/jobs/messages/{id}")
        expect(page.get_by_label("Payload")).to_contain_text('"n": 1')
        facts = page.locator("main .facts").first
        for text in ("ready", "tenant/7"):
            expect(facts).to_contain_text(text)
        expect(page.locator("main .facts").nth(1)).to_contain_text("onerror=")
        expect(page.get_by_text("No attempt has failed.")).to_be_visible()
        expect(page.get_by_role("heading", name="Result")).to_be_hidden()
        message = queue.receive(owner="ada-7", visibility_seconds=600)
        expect(facts).to_contain_text("Leased byada-7")
        expect(facts).to_contain_text("Lease endsin 9 min")
        message.ack(result={"total": 3, "note": MARKUP})
        expect(page.get_by_label("Result")).to_contain_text('"total": 3')
        expect(page.get_by_label("Result")).to_contain_text("onerror=")
        expect(page.get_by_role("button", name="Cancel message")).to_be_hidden()
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)


def test_a_leased_message_is_cancelled_after_a_question(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("cancels")
        queue.put(b"x")
        message = queue.receive(visibility_seconds=600)
        open_page(page, server, "queues/cancels")
        page.get_by_role("region", name="Leased messages").get_by_role("link", name=message.id).click()
        page.get_by_role("button", name="Cancel message").click()
        page.get_by_role("button", name="Keep it").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
        assert queue.get(message.id).state == "leased"
        page.get_by_role("button", name="Cancel message").click()
        page.get_by_role("button", name="Cancel the message").click()
        expect(page.locator("h1 .pill")).to_have_text("cancelled")
        expect(page.get_by_role("button", name="Cancel message")).to_be_hidden()
        with pytest.raises(MessageCancelled):
            message.ack()


def test_a_dead_message_shows_every_attempt_and_is_redriven(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("died")
        id = queue.put({"n": 1}, max_attempts=2, retry_delay_seconds=0).id
        for error in (ValueError("first"), LookupError(MARKUP)):
            with pytest.raises(type(error)), queue.receive(owner="ada", wait_seconds=30):
                raise error
        open_page(page, server, f"queues/died/messages/{id}")
        attempts = page.get_by_role("region", name="Attempts")
        expect(attempts.locator("pre")).to_contain_text("raise error")
        expect(attempts.locator("pre")).to_contain_text("onerror=")
        attempts.locator(".opener").nth(1).click()
        expect(attempts.locator("pre").nth(1)).to_contain_text("ValueError: first")
        queue.put(b"x")  # The page is refreshed, and what is expanded stays so.
        page.keyboard.press("r")
        expect(attempts.locator("pre")).to_have_count(2)
        page.get_by_role("button", name="Redrive").click()
        expect(page.locator("h1 .pill")).to_have_text("ready")
        expect(page.get_by_role("button", name="Redrive")).to_be_hidden()
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)


def test_an_unknown_message_is_reported(noisy: Page, server: Server) -> None:
    for id, words in (("nothing", "is not a message id"), (UNKNOWN_ID, "has no message")):
        open_page(noisy, server, "queues/invoices")
        noisy.get_by_label("Find a message").fill(id)
        noisy.get_by_role("button", name="Find").click()
        expect(noisy.locator(".problem")).to_contain_text(words)
        expect(noisy.get_by_role("button", name="Cancel message")).to_be_hidden()


@pytest.mark.always
def test_stored_values_are_rendered_as_text_only(page: Page, server: Server, reports: Path) -> None:
    (reports / MARKUP_NAME).write_text(REPORT)
    try:
        for where, region_name in (
            ("queues/invoices", "Next messages"),
            ("queues/invoices", "Dead letters"),
            ("mail/bob", "Waiting mail"),
            ("worlds/ledger", "Journal records"),
            ("leases", "Held leases"),
            ("entities/order", "Entities of the kind order"),
            ("entities/order/a-1", "Fields"),
            ("entities/order/a-1", "Changes"),
            ("pipeline", "Last runs of jobs"),
            ("reports", "Files of the pipeline"),
        ):
            open_page(page, server, where)
            region = page.get_by_role("region", name=region_name)
            for folded in region.locator("summary, .opener").all()[-1:]:
                if folded.get_attribute("aria-expanded") != "true":
                    folded.click()
                expect(region.locator("pre").first).to_be_visible()
            expect(region).to_contain_text("onerror=")
            expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)
            assert "owned" not in page.title()
        with page.context.expect_page() as opened:
            page.get_by_role("link", name=MARKUP_NAME).click()
        expect(opened.value.locator("h1")).to_have_text("All is well")
    finally:
        (reports / MARKUP_NAME).unlink()


def test_focus_is_kept_when_an_earlier_row_is_removed(page: Page, server: Server) -> None:
    with server.plane() as plane:
        for error in ("one", "two", "three"):
            dead_letter(plane, "focus", error)
        open_page(page, server, "queues/focus")
        buttons = page.get_by_role("region", name="Dead letters").get_by_role("button", name="Redrive 0")
        expect(buttons).to_have_count(3)
        first, last = (buttons.nth(n).get_attribute("aria-label") or "" for n in (0, 2))
        page.get_by_role("button", name=last).focus()
        assert plane.queue("focus").redrive(ids=[first.removeprefix("Redrive ")]) == 1
        expect(buttons).to_have_count(2)
        expect(page.get_by_role("button", name=last)).to_be_focused()


def test_an_unknown_page_shows_the_overview(page: Page, server: Server) -> None:
    for where in ("constructor", "__proto__", "nothing/%E0%A4%A"):
        page.goto(f"{server.url}/console#/{where}")
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


# Runs and worlds with programs.


@pytest.mark.always
def test_a_run_is_followed_and_approved(untimed: Page, server: Server) -> None:
    page = untimed
    app = fastness.HostApp()
    attempts = iter(range(9))

    async def make_plan(question: str) -> dict[str, Any]:
        if next(attempts) == 0:
            raise ValueError(f"no answer {MARKUP}")
        return {"question": question, "sources": 3}

    @app.workflow
    async def follow(run: fastness.WorkflowRun, question: str) -> dict[str, Any]:
        plan = await run.step(make_plan, question, retry=fastness.Retry(3, delay_seconds=0.01))
        await run.state({"plan": plan})
        approved = await run.wait_for("approval", timeout=timedelta(days=30))
        return {"approved": approved, "note": MARKUP}

    with server.plane() as plane, fastness.Host(plane, app):
        open_page(page, server, "runs")
        plane.workflows.start(follow, MARKUP, id="r-17")
        expect(page.get_by_role("row", name="r-17")).to_contain_text("running")
        page.get_by_role("link", name="r-17").click()
        expect(page.get_by_label("Published state")).to_contain_text('"sources": 3')
        timeline = page.get_by_role("region", name="Timeline")
        retry = timeline.get_by_role("row").filter(has_text="retry")
        expect(retry).to_contain_text("ValueError: no answer <img")
        step = timeline.get_by_role("row").filter(has=page.locator(".pill.good"))
        expect(step).to_contain_text("make_plan")
        expect(step.get_by_role("cell").nth(4)).to_have_text("2")
        step.locator("summary").click()
        expect(step.locator("pre")).to_contain_text('"question": "<img')
        expect(timeline).to_contain_text("so far")
        expect(page.get_by_role("region", name="Timers")).to_contain_text("29 d 23 h")
        expect(page.get_by_role("heading", name="Result")).to_be_hidden()
        page.get_by_role("button", name="Approve approval").click()
        expect(page.get_by_label("Result")).to_contain_text('"approved": true')
        expect(page.get_by_label("Result")).to_contain_text("onerror=")
        expect(timeline).to_contain_text("completed")
        expect(timeline).not_to_contain_text("so far")
        for name in ("Approve approval", "Cancel run", "Send"):
            expect(page.get_by_role("button", name=name, exact=True)).to_be_hidden()
        assert plane.workflows.result("r-17") == {"approved": True, "note": MARKUP}
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)


def test_a_run_is_sent_a_signal_and_cancelled_with_a_reason(untimed: Page, server: Server) -> None:
    page = untimed
    app = fastness.HostApp()

    @app.workflow
    async def listen(run: fastness.WorkflowRun) -> None:
        while True:
            await run.state(await run.wait_for("news"))

    with server.plane() as plane, fastness.Host(plane, app):
        plane.workflows.start(listen, id="r-18")
        open_page(page, server, "runs/r-18")
        page.get_by_label("Name").fill("news")
        page.get_by_label("Value (JSON)").fill("{no json")
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.get_by_role("alert").filter(has_text="not JSON")).to_be_visible()
        page.get_by_label("Value (JSON)").fill('{"note": "<b>new</b>"}')
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.get_by_label("Published state")).to_contain_text('"note": "<b>new</b>"')
        page.get_by_role("button", name="Reject news").click()
        expect(page.get_by_label("Published state")).to_have_text("false")
        page.get_by_role("button", name="Cancel run").click()
        check_by_axe(page, "dialog[open]")
        page.get_by_role("button", name="Keep it").click()
        assert not plane.workflows.describe("r-18").is_cancelling
        page.get_by_role("button", name="Cancel run").click()
        page.get_by_label("Reason").fill(MARKUP)
        page.get_by_role("button", name="Cancel the run").click()
        expect(page.get_by_label("Result")).to_contain_text(MARKUP)
        assert plane.workflows.describe("r-18").state == "cancelled"
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)
        page.get_by_role("link", name="Runs", exact=True).last.click()
        page.get_by_label("State").select_option("cancelled")
        expect(page.get_by_role("row", name="r-18")).to_be_visible()
        expect(page.get_by_role("link", name="r-1", exact=True)).to_have_count(0)
        page.get_by_label("Workflow").fill("another")
        page.get_by_label("Workflow").press("Enter")
        expect(page.get_by_text("Nothing matches the filter.")).to_be_visible()


def test_the_page_derives_the_same_timeline_as_the_history_of_a_run(page: Page, server: Server) -> None:
    journals = [random_journal(random.Random(seed)) for seed in range(300)]
    open_page(page, server, "runs")
    found = page.evaluate(
        """async (journals) => {
            const { Timeline } = await import(new URL("console/timeline.js", location.href).href);
            return journals.map((records) => {
                const timeline = new Timeline();
                timeline.add(records);
                return timeline.events.map((each) => [each.at, each.kind, each.name, each.duration, each.pending]);
            });
        }""",
        [[json_codec.to_json(record) for record in journal] for journal in journals],
    )
    expected = [
        [[each.at_ms, each.kind.replace("_", " "), each.name, each.duration_ms, each.is_pending] for each in events]
        for events in map(run_timeline.timeline, journals)
    ]
    assert found == expected
    assert {kind for events in expected for _, kind, *_ in events} >= {"wait", "sleep", "child", "signal", "cancel"}
    assert {pending for events in expected for *_, pending in events} == {False, True}


def random_journal(generator: random.Random) -> list[Record]:
    """Records that a run could have, in an order that it could have, and some in another order."""
    names = ["approval", "news"]
    now_ms = 1_000
    found: list[Any] = []

    def item(item: Any) -> None:
        found.append(Record(len(found), *journal_records.split(journal_records.ingress(len(found), item))))

    def entry(value: Any) -> None:
        found.append(Record(len(found), "entry", canonical(value)))

    item(DomainEvent(schema=START, payload=canonical([["q"], {}])))
    for number in range(generator.randrange(1, 40)):
        now_ms += generator.randrange(50)
        name = generator.choice(names)
        any_number = generator.randrange(number + 1)
        started_ms = now_ms - generator.randrange(30)
        match generator.randrange(17):
            case 0 | 1:
                entry({"turn": now_ms})
            case 2 | 3:
                item(DomainEvent(schema=SIGNAL, key=name.encode(), payload=canonical({"by": [1, None]})))
            case 4:
                item(TimerFired(timer_id=f"0.{any_number}"))
            case 5:
                item(DomainEvent(schema=CHILD, key=f"c-{any_number}".encode(), payload=canonical({"state": "failed"})))
            case 6 | 7:
                entry(["wait", now_ms, number, name, generator.choice([None, now_ms + 9])])
            case 8:
                entry(["sleep", now_ms, number, None, now_ms + 9])
            case 9:
                entry(["child", now_ms, number, "audit", f"c-{number}"])
            case 10:
                entry(["step", now_ms, any_number, "plan", started_ms, {"n": 1}])
            case 11:
                entry(["retry", now_ms, any_number, "plan", started_ms, ["ValueError", "no"], now_ms + 9])
            case 12:
                entry(["failed", now_ms, any_number, "plan", generator.choice([None, started_ms]), ["E", "no"], 3])
            case 13:
                entry(["queued", now_ms, number, "plan", "pages", "m-1"])
            case 14:
                entry(["started", now_ms, any_number, "plan"])
            case 15:
                entry([generator.choice(["put", "send", "mail", "signal", "state"]), now_ms, number, "emails"])
            case _:
                rare = generator.randrange(5)
                if rare == 0:
                    item(Control(command=CANCEL, payload=b"enough"))
                elif rare == 1:
                    entry(["continue", now_ms, b"seed", [[], {}], []])
                elif rare == 2:
                    entry(["patch", now_ms, "second"])
                elif rare == 3:
                    entry({"aside": number})
                else:
                    entry(["end", now_ms, "completed", {"n": 1}, None])
    return found


def test_items_that_were_set_aside_are_retried_and_dropped(untimed: Page, server: Server) -> None:
    page = untimed
    app = fastness.HostApp()
    is_fixed = threading.Event()
    is_charged = threading.Event()

    @app.program("shop")
    def shop(state: Any, event: fastness.Event, context: fastness.TurnContext) -> Any:
        if event.name == "order" and event.json()["id"] > 1 and not is_fixed.is_set():
            raise ValueError(f"unknown order {MARKUP}")
        if event.name == "order":
            context.call("charge", {"note": MARKUP})
            context.timer("reminder", seconds=3_600)
        return (state or 0) + 1

    @app.adapter("charge")
    def charge(call: fastness.EffectCall) -> None:
        is_charged.wait(SLACK_MS / 1_000)

    with server.plane() as plane, fastness.Host(plane, app, owner="host-7", max_attempts=1):
        world = plane.world("shop")
        world.create(program="shop")
        for number in (1, 2, 3):
            world.send("order", {"id": number})
        open_page(page, server, "worlds/shop")
        program = page.locator("section").filter(has=page.get_by_role("heading", name="Program"))
        expect(program).to_contain_text("held by a host")
        expect(program).to_contain_text("host-7")
        expect(page.get_by_role("region", name="Effects")).to_contain_text("in flight")
        expect(page.get_by_role("region", name="Timers")).to_contain_text("reminder")
        aside = page.get_by_role("region", name="Set aside")
        expect(aside.locator("tbody tr")).to_have_count(2)
        expect(aside).to_contain_text("ValueError: unknown order <img")
        aside.locator(".opener").first.click()
        expect(aside.locator("pre").first).to_contain_text("Traceback")
        expect(aside.locator("pre").last).to_contain_text('"id": 2')
        check_by_axe(page, "main")
        first, second = world.aside()
        is_fixed.set()
        page.get_by_role("button", name=f"Retry item {first.sequence}").click()
        expect(page.get_by_role("button", name=f"Retry item {first.sequence}")).to_have_count(0)
        page.get_by_role("button", name=f"Drop item {second.sequence}").click()
        page.get_by_role("button", name="Drop the item").click()
        expect(page.get_by_role("heading", name="Set aside")).to_be_hidden()
        is_charged.set()
        expect(page.get_by_text("No effect is pending or in flight.")).to_be_visible()
        assert world.aside() == []
        assert world.restore(shop.reducer).state["state"] == 4  # Two orders and their receipts.
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)


def test_a_stopped_world_is_resumed(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        plane.world("stopped").create(program="stopping")
        plane.world("stopped").send("order", {"id": 1})
        [claimed] = plane.hosting.claim(["stopping"], owner="ada")
        plane.hosting.fail(claimed, owner="ada", error=f"WorkflowChanged: {MARKUP}", is_stopped=True)
        open_page(page, server, "worlds/stopped")
        expect(page.get_by_label("Error of the last failed turn")).to_contain_text("WorkflowChanged: <img")
        expect(page.locator("h1 .pill.bad")).to_have_text("stopped")
        page.get_by_role("button", name="Resume program").click()
        expect(page.get_by_text("has work", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Resume program")).to_be_hidden()
        assert not plane.world("stopped").hosting().is_stopped
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)


# Mail, worlds, leases, entities, reports.


def test_waiting_mail_and_receipts_are_shown(untimed: Page, server: Server) -> None:
    with server.plane() as plane:
        open_page(untimed, server, "mail")
        plane.mailbox("carol").send("dave", b"one")
        expect(untimed.get_by_role("row", name="dave").get_by_role("cell").nth(2)).to_have_text("1")
        open_page(untimed, server, "mail/carol")
        receipts = untimed.get_by_role("region", name="Receipts of sent mail")
        expect(receipts.get_by_text("stored")).to_be_visible()
        plane.mailbox("dave").confirm(plane.mailbox("dave").read())
        expect(receipts.get_by_text("confirmed")).to_be_visible()


def test_a_journal_is_drawn_to_scale(page: Page, server: Server) -> None:
    open_page(page, server, "worlds/ledger")
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


def test_a_height_being_typed_is_kept_when_records_arrive(untimed: Page, server: Server) -> None:
    with server.plane() as plane:
        world = plane.world("typed")
        world.create()
        world.append(list(range(60)), expected_head=0)
        open_page(untimed, server, "worlds/typed")
        rows = untimed.get_by_role("region", name="Journal records").get_by_role("row")
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("59")
        untimed.get_by_label("From height").fill("7")
        world.append(["more"], expected_head=60)
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("60")
        expect(untimed.get_by_label("From height")).to_have_value("7")
        untimed.get_by_role("button", name="Read").click()
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("7")
        untimed.get_by_role("button", name="Older").click()
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("0")
        untimed.get_by_role("button", name="Newer", exact=True).click()
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("50")
        untimed.get_by_role("button", name="Newest").click()
        expect(rows.nth(1).get_by_role("rowheader")).to_have_text("60")
        expect(untimed.get_by_label("From height")).to_have_value("11")


def test_verifying_a_world_reports_damage(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    running = Server(tmp_path)
    try:
        with running.plane() as plane:
            add_data(plane)
        open_page(page, running, "worlds/ledger")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator(".verdict")).to_contain_text("No damage found: 102 records without gaps, 3 segments")
        (body,) = (tmp_path / "data").rglob("20-39.log")
        body.write_bytes(body.read_bytes()[:-1] + b"\x00")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator(".verdict")).to_contain_text("Damaged.")
        expect(page.locator(".verdict")).to_contain_text("20-39.log")
    finally:
        running.kill()


def test_waiters_for_a_lease_are_shown(page: Page, server: Server) -> None:
    with server.plane() as plane, server.plane() as other:
        held = plane.lease("deploy").acquire("ada", ttl_seconds=600)
        waiting = threading.Thread(target=lambda: other.lease("deploy").acquire("bob", wait_seconds=60).release())
        waiting.start()
        try:
            open_page(page, server, "leases")
            row = page.get_by_role("row", name="deploy")
            expect(row).to_contain_text("ada")
            expect(row).to_contain_text("bob")
        finally:
            held.release()
            waiting.join()
        expect(page.get_by_role("row", name="deploy")).to_have_count(0)


def test_sessions_of_ordered_locks_are_shown_with_what_they_wait_for(page: Page, server: Server) -> None:
    with server.plane() as plane, server.plane() as other:
        waiting = threading.Thread(
            target=lambda: other.locks.acquire(["entity_type", "task"], "S", timeout_seconds=60).release(), name="bob"
        )
        with plane.locks.acquire(["record_id", "task/1"]):
            waiting.start()
            open_page(page, server, "leases")
            sessions = page.get_by_role("region", name="Sessions of ordered locks")
            expect(sessions.get_by_role("row", name="thread MainThread")).to_contain_text("record_id task/1 X")
            expect(sessions.get_by_role("row", name="thread bob")).to_contain_text("entity_type task S")
        waiting.join()
    expect(page.get_by_text("No ordered lock is held.")).to_be_visible()


def test_entity_fields_are_shown_by_tier(page: Page, server: Server) -> None:
    with server.plane() as plane:
        plane.entities.write("task", "t-1", {"status": "open", "title": "x"})
    open_page(page, server, "entities")
    cells = page.get_by_role("row", name="task").get_by_role("cell")
    expect(cells.nth(0)).to_contain_text("status")
    expect(cells.nth(1)).to_contain_text("title")
    page.get_by_role("link", name="task").click()
    page.get_by_role("link", name="t-1").click()
    expect(page.get_by_role("region", name="Changes")).to_contain_text("critical")


def test_tiers_are_correct_with_many_kinds_and_unusual_field_names(fresh: Page, server: Server) -> None:
    page = fresh
    with server.plane(universe="kinds") as plane:
        for number in range(100):
            plane.entities.write(f"kind-{number:03}", "1", {"n": number})
        plane.entities.write("task", "t-1", {"status": "open", "constructor": "x"})
    page.goto(f"{server.url}/console?universe=kinds#/entities")
    expect(page.get_by_role("heading", name="100 of more kinds")).to_be_visible()
    page.get_by_role("button", name="Next page").click()
    expect(page.get_by_role("link", name="task")).to_be_visible()
    page.get_by_role("button", name="First page").click()
    expect(page.get_by_role("link", name="kind-000")).to_be_visible()
    page.get_by_role("button", name="Next page").click()
    page.get_by_role("link", name="task").click()
    cells = page.get_by_role("row", name="t-1").get_by_role("cell")
    expect(cells.nth(2)).to_have_text("status: open")
    expect(cells.nth(3)).to_have_text("constructor: x")
    page.get_by_role("link", name="t-1").click()
    fields = page.get_by_role("region", name="Fields")
    expect(fields.get_by_role("row", name="constructor").get_by_role("cell").first).to_have_text("important")
    expect(fields.get_by_role("row", name="status").get_by_role("cell").first).to_have_text("critical")


def test_a_report_is_shown_without_running_scripts(
    noisy: Page, page_log: PageLog, server: Server, reports: Path
) -> None:
    script = "<script>document.getElementById('h').textContent = 'a script ran'</script>"
    (reports / "latest.html").write_text(REPORT + script)
    try:
        open_page(noisy, server, "reports")
        heading = noisy.frame_locator("iframe").locator("h1")
        expect(heading).to_have_text("All is well")
        expect(heading).to_have_css("color", "rgb(1, 2, 3)")
        expect(noisy.get_by_role("link", name="latest.json")).to_be_visible()
        assert [error for error in page_log.errors if "script" not in error] == []
    finally:
        (reports / "latest.html").write_text(REPORT)


def test_live_aggregates_are_shown_by_queue(page: Page, server: Server) -> None:
    open_page(page, server, "reports")
    table = page.get_by_role("table", name="Live aggregates by queue")
    expect(table.get_by_role("row")).to_have_count(2)
    expect(table.get_by_role("row").nth(1)).to_have_text(f"{MARKUP}1400000" + "1.5 s2.0 s")
    expect(page.get_by_text("60 minutes up to")).to_be_visible()


# Space.


def test_what_is_kept_is_shown_and_collected(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    running = Server(tmp_path, gc_grace_seconds=7_200)
    try:
        with running.plane() as plane:
            plane.blobs.put(bytes(range(256)) * 200)
            plane.queue("jobs").put(b"x" * 40_960)
            message = plane.queue("jobs").receive()
            assert message is not None
            message.ack()
        open_page(page, running, "space")
        kept = page.get_by_role("region", name="What is kept")
        row = kept.get_by_role("row").filter(has_text="unreferenced")
        expect(row).to_contain_text("40 KiB")
        expect(row).to_contain_text("for the grace period of 2 h (gc_grace_seconds)")
        expect(row).to_contain_text("starts with the next collection")
        expect(kept.get_by_role("row").filter(has_text="pinned")).to_contain_text("50 KiB")
        expect(page.locator(".tile.waiting b")).to_have_text("40 KiB")
        expect(page.locator(".tile.free b")).to_contain_text("iB")
        expect(page.get_by_text("none since the server started")).to_be_visible()
        page.get_by_role("button", name="Dry run").click()
        expect(page.locator(".verdict")).to_have_text(
            "Would delete 0 blobs (0 B) and 0 bodies of blobs deleted earlier. In the grace period: 1 blob (40 KiB)."
        )
        page.get_by_role("button", name="Collect now").click()
        expect(page.locator(".verdict")).to_contain_text("Deleted 0 blobs")
        expect(page.get_by_text("none since the server started")).to_have_count(0)
        expect(page.get_by_text("0 blobs (0 B), 0 bodies")).to_be_visible()
        with running.plane() as plane:
            plane.blobs.put(b"y" * 30_720)
        page.get_by_role("button", name="Measure again").click()
        expect(kept.get_by_role("row").filter(has_text="pinned")).to_contain_text("80 KiB")
        expect(row.get_by_role("cell").last).to_contain_text(":")
        page.get_by_label("Filter by name").fill("unref")
        expect(kept.get_by_role("row")).to_have_count(2)
    finally:
        running.kill()


def test_the_key_space_is_not_measured_again_by_a_timer(fresh: Page, server: Server) -> None:
    page = fresh
    page.clock.install()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url.removeprefix(server.url)))
    open_page(page, server, "space")
    page.clock.run_for(40_000)
    expect(page.locator(".status.live")).to_be_visible()
    assert requested.count("/v1/space/status") > 1
    assert requested.count("/v1/space") == 1


def test_every_page_shows_a_failed_key_space(noisy: Page, tmp_path: Path) -> None:
    running = Server(tmp_path)
    try:
        with running.plane() as plane:
            plane.queue("jobs").put_many([os.urandom(10_000) for _ in range(4)])  # More than may be written below.
        open_page(noisy, running, "queues")
        banner = noisy.get_by_role("alert").filter(has_text="The key space has failed")
        expect(banner).to_have_count(0)
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
        running.get("/v1/queue/enqueue", body=b'{"queue": "jobs", "messages": [{"payload": 1}]}')
        expect(banner).to_contain_text("writes are refused until the server has reopened it")
        check_by_axe(noisy, ".banner:not([hidden])")
        banner.get_by_role("link", name="Show space").click()
        expect(noisy.get_by_role("heading", level=1)).to_have_text("Space")
        expect(banner).to_be_visible()
        expect(noisy.locator(".pill.bad")).to_have_text("failed")
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        expect(banner).to_have_count(0)
        expect(noisy.get_by_role("region", name="What is kept").get_by_role("row").first).to_be_visible()
    finally:
        running.kill()


def test_every_page_shows_a_disk_that_is_nearly_full(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    reserve = 1 << 40
    if shutil.disk_usage(tmp_path).free >= reserve:
        pytest.skip("more of this disk is free than the largest reserve")
    running = Server(tmp_path, disk_reserve_bytes=reserve, process={"disk_reserve_share_max": 9.0})
    try:
        open_page(page, running)
        expect(
            page.get_by_role("alert").filter(has_text="The disk is nearly full: new data is refused.")
        ).to_be_visible()
        check_by_axe(page, ".banner:not([hidden])")
        page.get_by_role("link", name="Show space").click()
        expect(page.locator(".pill.bad")).to_have_text("nearly full")
        expect(page.get_by_role("alert").filter(has_text="The disk is nearly full")).to_be_visible()
    finally:
        running.kill()


# Tokens.


@pytest.mark.always
def test_a_wrong_token_is_refused_and_a_valid_one_signs_in(noisy: Page, page_log: PageLog, guarded: Guarded) -> None:
    server, tokens = guarded
    noisy.goto(f"{server.url}/console#/queues")
    expect(noisy.get_by_label("Token")).to_be_focused()
    assert page_log.errors == []
    sign_in(noisy, "fnt_" + "0" * 32 + "_" + "x" * 48)
    expect(noisy.get_by_role("alert")).to_contain_text("Sign-in failed.")
    expect(noisy.get_by_role("link", name="jobs")).to_have_count(0)
    sign_in(noisy, "no token at all")
    expect(noisy.get_by_role("alert")).to_contain_text("Sign-in failed.")
    sign_in(noisy, tokens["all"])
    expect(noisy.get_by_role("link", name="jobs")).to_be_visible()
    expect(noisy.locator(".who")).to_have_text("operator")
    noisy.reload()
    expect(noisy.get_by_role("link", name="jobs")).to_be_visible()
    kept = noisy.evaluate("[document.cookie, JSON.stringify(localStorage), location.href].join()")
    assert tokens["all"] not in kept
    noisy.get_by_role("button", name="Sign out operator").click()
    expect(noisy.get_by_label("Token")).to_be_visible()
    assert noisy.evaluate("sessionStorage.length") == 0


def test_a_token_that_is_not_valid_in_a_header_is_refused(noisy: Page, guarded: Guarded) -> None:
    server, tokens = guarded
    noisy.goto(f"{server.url}/console#/queues")
    sign_in(noisy, "fnt_…")
    expect(noisy.get_by_role("alert")).to_contain_text("Sign-in failed.")
    noisy.reload()
    sign_in(noisy, tokens["all"])
    expect(noisy.get_by_role("link", name="jobs")).to_be_visible()


def test_no_data_is_requested_after_signing_out(fresh: Page, guarded: Guarded) -> None:
    page = fresh
    server, tokens = guarded
    page.clock.install()
    page.goto(f"{server.url}/console#/queues")
    sign_in(page, tokens["all"])
    expect(page.get_by_role("link", name="jobs")).to_be_visible()
    page.get_by_role("button", name="Sign out operator").click()
    expect(page.get_by_label("Token")).to_be_visible()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url.removeprefix(server.url)))
    page.clock.fast_forward(60_000)
    page.evaluate("fetch('console').then((answer) => answer.text())")  # Any earlier request is in the list by now.
    assert "/console" in requested
    assert [path for path in requested if path.startswith(("/v1/", "/console/session", "/console/events"))] == []
    expect(page).to_have_title("Sign in · Fastness")


def test_revoking_a_token_signs_out(noisy: Page, guarded: Guarded) -> None:
    server, tokens = guarded
    noisy.goto(f"{server.url}/console")
    sign_in(noisy, tokens["some"])
    expect(noisy.locator(".status.live")).to_be_visible()
    with server.plane(token=tokens["all"]) as plane:
        plane.tokens.revoke(tokens["some"])
    expect(noisy.get_by_role("alert")).to_contain_text("Sign-in failed.")


def test_a_token_of_one_universe_sees_only_that_universe(fresh: Page, guarded: Guarded) -> None:
    page = fresh
    server, tokens = guarded
    page.goto(f"{server.url}/console")
    sign_in(page, tokens["some"])
    expect(page.get_by_text("does not allow metrics:read")).to_be_visible()
    expect(page.get_by_label("Universe").locator("option")).to_have_text(["main"])
    page.get_by_role("link", name="Queues").click()
    expect(page.get_by_role("link", name="jobs")).to_be_visible()


def test_a_missing_verb_is_reported(noisy: Page, guarded: Guarded) -> None:
    server, tokens = guarded
    noisy.goto(f"{server.url}/console#/worlds")
    sign_in(noisy, tokens["some"])
    expect(noisy.get_by_role("alert").filter(has_text="does not allow world:survey")).to_be_visible()
    expect(noisy.get_by_role("table")).to_have_count(0)  # Not an empty list.
    links = noisy.get_by_role("navigation", name="Pages").get_by_role("link")
    expect(links).to_have_text(["Overview", "Queues"])  # Pages that the token does not allow are not offered.


def test_the_documented_verbs_are_sufficient_for_all_pages(fresh: Page, tmp_path: Path, lake: Path) -> None:
    page = fresh
    text = (Path(__file__).parents[2] / "docs" / "console.md").read_text()
    verbs = "".join(re.findall(r"^    ((?:[a-z]+:[a-z._]+,?)+)$", text, re.MULTILINE))
    assert verbs.count(":") > 20
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        token = plane.tokens.create("viewer", universes="*", verbs=verbs).token
        operator = plane.tokens.create("operator", universes="main", verbs="queue:pause").token
        add_data(plane)
    running = Server(tmp_path, tokens=True, pipeline_lake=str(lake))
    try:
        with running.plane(token=operator) as plane:
            plane.queue("invoices").resume()  # Recorded in the audit log.
        page.goto(f"{running.url}/console")
        sign_in(page, token)
        expect(page.get_by_role("img", name=re.compile("^Throughput.*: calls"))).to_be_visible()
        for name in PAGES[1:-1]:
            open_page(page, running, name)
            expect(page.locator(".problem")).to_be_hidden()
        for name, action in (("runs/r-1", r"Approve|Reject|Send|Cancel run"), ("worlds/agent", r"Retry|Drop|Resume")):
            open_page(page, running, name)  # The token allows to read only.
            expect(page.get_by_role("button", name=re.compile(f"^({action})"))).to_have_count(0)
        page.get_by_role("link", name="Queues", exact=True).first.click()
        page.get_by_role("link", name="invoices").click()
        page.get_by_role("region", name="Dead letters").locator(".opener").click()
        page.get_by_role("region", name="Dead letters").get_by_role("link").click()
        expect(page.get_by_label("Payload")).to_contain_text('"dies": true')
        expect(page.locator(".problem")).to_be_hidden()
        open_page(page, running, "worlds/ledger")
        page.get_by_role("button", name="Verify").click()
        expect(page.locator(".verdict")).to_contain_text("No damage found")
    finally:
        running.kill()


def test_actions_are_shown_where_the_token_allows_them(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    reads = "queue:survey,queue:stats,queue:peek,queue:policy.get,queue:leased"
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        letter = dead_letter(plane, "jobs", "ValueError: no")
        ready = plane.queue("jobs").put({"n": 1}).id
        tokens = [
            plane.tokens.create("viewer", universes="main", verbs=verbs).token
            for verbs in (reads, f"{reads},queue:get", f"{reads},queue:get,queue:cancel,queue:redrive")
        ]
    running = Server(tmp_path, tokens=True)
    try:
        for number, token in enumerate(tokens):
            page.goto(f"{running.url}/console#/queues/jobs")
            sign_in(page, token)
            expect(page.get_by_role("region", name="Next messages")).to_contain_text('{"n":1}')
            expect(page.get_by_role("button", name="Pause")).to_be_hidden()
            expect(page.get_by_label("Find a message")).to_have_count(min(number, 1))
            expect(page.get_by_role("button", name=f"Redrive {letter}")).to_have_count(number // 2)
            for id, name in ((ready, "Cancel message…"), (letter, "Redrive")) if number else ():
                page.goto(f"{running.url}/console#/queues/jobs/messages/{id}")
                expect(page.get_by_label("Payload")).to_be_visible()
                expect(page.get_by_role("button", name=name, exact=True)).to_have_count(number // 2)
            page.get_by_role("button", name="Sign out viewer").click()
    finally:
        running.kill()


# Restarts.


def test_a_page_reconnects_after_a_server_restart(noisy: Page, tmp_path: Path) -> None:
    first = Server(tmp_path)
    try:
        with first.plane() as plane:
            plane.queue("jobs").put(b"x")
        open_page(noisy, first, "queues")
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


# Accessibility.


def test_all_actions_are_reachable_by_keyboard(fresh: Page, server: Server) -> None:
    page = fresh
    with server.plane() as plane:
        letter = dead_letter(plane, "keys", "ValueError: no")
    open_page(page, server)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
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


def test_messages_fit_a_phone_screen(browser: Browser, server: Server) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    context.set_default_timeout(SLACK_MS)
    page = context.new_page()
    open_page(page, server)
    check_width(page, PHONE["width"])
    page.get_by_role("link", name="Queues", exact=True).first.tap()
    expect(page.get_by_role("link", name="invoices")).to_be_visible()
    with server.plane() as plane:
        for id in messages_to_show(plane):
            page.goto(f"{server.url}/console#/queues/shown/messages/{id}")
            expect(page.get_by_label("Payload")).to_be_visible()
            check_width(page, PHONE["width"])
    context.close()


@pytest.mark.rotating
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_the_screen_of_a_touch_device(browser: Browser, server: Server, name: str) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    context.set_default_timeout(SLACK_MS)
    page = context.new_page()
    open_page(page, server, name)
    check_width(page, PHONE["width"])
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_fits_a_phone_and_counts_in_the_singular(page: Page, server: Server, name: str) -> None:
    open_page(page, server, name)
    check_counts(page)
    open_details(page)
    check_by_axe(page)
    page.set_viewport_size(PHONE)
    check_width(page, PHONE["width"])


@pytest.mark.rotating
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_in_dark(page: Page, server: Server, name: str) -> None:
    open_page(page, server, name)
    open_details(page)
    check_in_dark(page)


def open_details(page: Page) -> None:
    for each in page.locator("summary, .opener").all()[:2]:
        each.click()


@pytest.mark.always
def test_the_help_and_the_pages_of_messages_are_accessible(page: Page, server: Server) -> None:
    open_page(page, server)
    check_in_dark(page)
    page.keyboard.press("?")
    check_by_axe(page, "dialog[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    with server.plane() as plane:
        leased, *others = messages_to_show(plane)
    for id in (*others, leased):
        page.goto(f"{server.url}/console#/queues/shown/messages/{id}")
        expect(page.get_by_label("Payload")).to_be_visible()
        check_by_axe(page, "main")
    page.get_by_role("button", name="Cancel message").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    check_by_axe(page, "dialog[open]")


@pytest.mark.rotating
def test_the_pages_of_messages_are_accessible_in_dark(page: Page, server: Server) -> None:
    open_page(page, server)
    page.keyboard.press("t")
    with server.plane() as plane:
        for id in messages_to_show(plane):
            page.goto(f"{server.url}/console#/queues/shown/messages/{id}")
            expect(page.get_by_label("Payload")).to_be_visible()
            check_by_axe(page, rules=COLOUR_RULES)


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.rotating)])
def test_axe_finds_no_violations_on_the_sign_in_page(
    fresh: Page, guarded: Guarded, theme: Literal["light", "dark"]
) -> None:
    fresh.emulate_media(color_scheme=theme)
    fresh.goto(f"{guarded[0].url}/console")
    expect(fresh.get_by_label("Token")).to_be_visible()
    check_by_axe(fresh)


def test_keys_are_listed_and_the_colour_theme_is_remembered(page: Page, server: Server) -> None:
    open_page(page, server)
    page.get_by_role("button", name="Keyboard shortcuts").click()
    keys = page.get_by_role("dialog", name="Keyboard")
    expect(keys).to_contain_text("Toggle dark mode")
    keys.get_by_role("button", name="Close").click()
    expect(keys).to_be_hidden()
    page.get_by_role("button", name="Toggle dark mode").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
