"""The pages of queues and messages in a real browser: filters in the address, actions with questions, forms."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, ViewportSize, expect

import fastness
from fastness import QueuePolicy
from tests.browser.console_pages import PHONE, check_by_axe, dead_letter, sign_in
from tests.support.server_process import Server


def open_queue(page: Page, server: Server, where: str) -> None:
    page.goto(f"{server.url}/console#/queues/{where}")
    expect(page.locator(".status.live")).to_be_visible()


def shown_ids(page: Page) -> list[str]:
    return [str(row.get_attribute("aria-label")).removeprefix("Select ") for row in page.locator("tbody input").all()]


def expect_rows(page: Page, count: int) -> None:
    expect(page.get_by_role("region", name="Messages").locator("tbody tr")).to_have_count(count)


def toast(page: Page) -> Locator:
    return page.locator(".toast")


def test_a_filtered_list_has_an_address(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("filtered")
        timeout = dead_letter(plane, "filtered", "TimeoutError: the ledger did not answer")
        other = dead_letter(plane, "filtered", "ValueError: no such order")
        leased = queue.put(1).id
        queue.receive(owner="worker-7", visibility_seconds=3_600)
        keyed = queue.put(2, key="tenant/7").id
    open_queue(page, server, "filtered")
    page.get_by_role("link", name="Search messages").click()
    expect_rows(page, 4)
    assert set(shown_ids(page)) == {timeout, other, leased, keyed}
    page.get_by_label("State").select_option("dead")
    expect_rows(page, 2)
    page.get_by_label("Error contains").fill("timeout")
    page.keyboard.press("Enter")
    expect_rows(page, 1)
    assert shown_ids(page) == [timeout]
    assert page.url.endswith("#/queues/filtered/list?state=dead&error=timeout")
    page.reload()
    expect_rows(page, 1)
    expect(page.get_by_label("Error contains")).to_have_value("timeout")
    for filters, id in (("owner=worker-7", leased), ("key=tenant%2F7", keyed)):
        page.goto(f"{server.url}/console#/queues/filtered/list?{filters}")
        expect_rows(page, 1)
        assert shown_ids(page) == [id]
    page.goto(f"{server.url}/console#/queues/filtered/list?older=3600")
    expect(page.get_by_text("Nothing matches the filter.")).to_be_visible()
    check_by_axe(page, "main")


def test_a_bulk_redrive_asks_with_the_count(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        for number in range(3):
            dead_letter(plane, "bulk", f"ValueError: {number}")
        open_queue(page, server, "bulk/list?state=dead")
        expect_rows(page, 3)
        expect(page.get_by_role("button", name="Redrive")).to_be_disabled()
        page.get_by_label("Select this page").check()
        page.get_by_label(re.compile("^Select 0")).first.uncheck()
        expect(page.get_by_text("2 selected")).to_be_visible()
        page.get_by_role("button", name="Redrive").click()
        dialog = page.get_by_role("dialog", name="Redrive 2 messages of bulk?")
        dialog.get_by_role("button", name="Keep them").click()
        assert plane.queue("bulk").stats().dead == 3
        page.get_by_role("button", name="Redrive").click()
        dialog.get_by_role("button", name="Redrive 2 messages").click()
        expect(toast(page)).to_have_text("2 messages redriven")
        expect_rows(page, 1)
        assert plane.queue("bulk").stats().ready == 2


@pytest.mark.always
def test_messages_are_cancelled_moved_and_deleted_in_bulk(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("actions")
        queue.put_many(range(3))
        held = queue.receive(visibility_seconds=3_600)
        dead_letter(plane, "actions", "ValueError: no")
        for action, question, done in (
            ("Cancel…", "Cancel 1 message of actions?", "1 message cancelled"),
            ("Move…", "Move 1 message of actions?", "1 message moved"),
            ("Delete…", "Delete 1 message of actions?", "1 message deleted"),
        ):
            state = "leased" if action == "Cancel…" else "ready"
            open_queue(page, server, f"actions/list?state={state}")
            box = page.get_by_label(re.compile("^Select 0")).first
            chosen = box.get_attribute("aria-label")
            box.check()
            page.get_by_role("button", name=action).click()
            dialog = page.get_by_role("dialog", name=question)
            if action == "Move…":
                dialog.get_by_label("To the queue").fill("actions-slow")
            dialog.get_by_role("button", name=question.split(" 1")[0]).click()
            expect(toast(page)).to_have_text(done)
            expect(page.get_by_label(str(chosen))).to_have_count(0)  # The list is refreshed.
        stats = queue.stats()
        assert (stats.ready, stats.leased, stats.dead) == (0, 0, 1)
        assert plane.queue("actions-slow").stats().ready == 1
        assert queue.get(held.id).state == "cancelled"


def test_an_action_applies_to_all_that_match(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("many")
        for _ in range(3):
            queue.put_many([1] * 50)
        queue.put(1, key="other")
        open_queue(page, server, "many/list?state=ready")
        expect(page.get_by_role("heading", name="100 messages of more")).to_be_visible()
        # It is stopped after the first of two calls.
        held: list[Route] = []
        page.route("**/messages/delete", lambda route: held.append(route))  # noqa: PLW0108 - Playwright needs a function.
        page.get_by_label("All that match, on all pages").check()
        page.get_by_role("button", name="Delete…").click()
        dialog = page.get_by_role("dialog", name="Delete 151 messages of many?")
        with page.expect_request("**/messages/delete"):
            dialog.get_by_role("button", name="Delete 151 messages").click()
        page.get_by_role("button", name="Stop").click()
        held[0].continue_()
        expect(toast(page)).to_have_text("Stopped: 100 messages deleted")
        page.unroute("**/messages/delete")
        assert queue.stats().ready == 51
        expect_rows(page, 51)
        for _ in range(2):
            queue.put_many([1] * 50)
        page.reload()
        expect(page.get_by_role("heading", name="100 messages of more")).to_be_visible()
        page.get_by_label("All that match, on all pages").check()
        page.get_by_role("button", name="Delete…").click()
        dialog = page.get_by_role("dialog", name="Delete 151 messages of many?")
        dialog.get_by_role("button", name="Delete 151 messages").click()
        expect(toast(page)).to_have_text("151 messages deleted")
        expect(page.get_by_text("Nothing matches the filter.")).to_be_visible()
        assert queue.stats().ready == 0


def test_a_purge_needs_the_name_of_the_queue(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        plane.queue("purged").put_many([1, 2])
        open_queue(page, server, "purged")
        page.get_by_role("button", name="Purge…").click()
        dialog = page.get_by_role("dialog", name="Purge purged?")
        expect(dialog).to_contain_text("2 messages that are not leased will be removed")
        confirm = dialog.get_by_role("button", name="Purge the queue")
        expect(confirm).to_be_disabled()
        dialog.get_by_label("Type purged to confirm").fill("other")
        expect(confirm).to_be_disabled()
        dialog.get_by_label("Type purged to confirm").fill("purged")
        confirm.click()
        expect(toast(page)).to_have_text("2 messages removed")
        assert plane.queue("purged").stats().ready == 0


def test_a_message_is_published(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        open_queue(page, server, "published")
        page.get_by_role("button", name="Publish…").click()
        dialog = page.get_by_role("dialog", name="Publish a message to published")
        body, publish = dialog.get_by_label("Payload"), dialog.get_by_role("button", name="Publish")
        for invalid in ("{", '"' + "x" * 16_384 + '"'):
            body.fill(invalid)
            publish.click()
            assert not body.evaluate("element => element.checkValidity()")
        body.fill('{"order": 7, "note": "é"}')
        dialog.get_by_label("Key").fill("tenant/7")
        dialog.get_by_label("Priority").fill("8")
        dialog.get_by_label("Attributes").fill("source=console\nteam=a=b")
        check_by_axe(page, "dialog[open]")
        publish.click()
        expect(toast(page)).to_contain_text("Published ")
        (put,) = plane.queue("published").peek()
        assert (put.payload, put.content_type) == ('{"order": 7, "note": "é"}'.encode(), "application/json")
        assert (put.priority, put.attributes) == (8, {"source": "console", "team": "a=b"})
        assert plane.queue("published").get(put.id).key == "tenant/7"


def test_a_policy_is_edited_and_an_invalid_one_is_refused(noisy: Page, server: Server) -> None:
    page = noisy
    with server.plane() as plane:
        plane.queue("governed").set_policy(QueuePolicy(max_attempts=3, burst_per_key=4))
        open_queue(page, server, "governed")
        page.get_by_role("button", name="Edit the policy").click()
        dialog = page.get_by_role("dialog", name="Policy of governed")
        expect(dialog.get_by_label("Maximum attempts")).to_have_value("3")
        dialog.get_by_label("Maximum attempts").fill("7")
        dialog.get_by_label("Dead-letter queue").fill("governed")
        dialog.get_by_role("button", name="Set the policy").click()
        expect(dialog.get_by_role("alert")).to_contain_text("cannot be its own dead letter queue")
        assert plane.queue("governed").policy().max_attempts == 3
        dialog.get_by_label("Dead-letter queue").fill("failed")
        dialog.get_by_label("Deliveries per second", exact=True).fill("2.5")
        dialog.get_by_role("button", name="Set the policy").click()
        expect(toast(page)).to_have_text("The policy of governed is set")
        policy = plane.queue("governed").policy()
        assert (policy.max_attempts, policy.dead_letter_queue, policy.rate_per_second) == (7, "failed", 2.5)
        assert policy.burst_per_key == 4, "what was not changed stays"


def test_a_schedule_is_created_and_removed(noisy: Page, server: Server) -> None:
    page = noisy
    with server.plane() as plane:
        plane.queue("planned").put(1)
        open_queue(page, server, "planned")
        page.get_by_role("button", name="Add a schedule").click()
        dialog = page.get_by_role("dialog", name="Add a schedule to planned")
        dialog.get_by_label("Name").fill("nightly")
        dialog.get_by_label("Cron expression").fill("0 99 * * *")
        dialog.get_by_label("Payload").fill('{"job": "report"}')
        dialog.get_by_role("button", name="Save the schedule").click()
        expect(dialog.get_by_role("alert")).to_be_visible()
        assert plane.queue("planned").schedules() == []
        dialog.get_by_label("Cron expression").fill("0 3 * * *")
        dialog.get_by_role("button", name="Save the schedule").click()
        table = page.get_by_role("region", name="Schedules")
        expect(table).to_contain_text("0 3 * * *")
        (schedule,) = plane.queue("planned").schedules()
        assert (schedule.name, schedule.message.payload) == ("nightly", b'{"job": "report"}')
        page.get_by_role("button", name="Remove the schedule nightly").click()
        page.get_by_role("dialog").get_by_role("button", name="Remove the schedule").click()
        expect(table).to_be_hidden()
        assert plane.queue("planned").schedules() == []


def test_a_message_shows_its_state_raw_payload_and_every_attempt(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("stateful")
        queue.set_policy(QueuePolicy(retry_delay_seconds=0.0))
        id = queue.put({"n": 1}, attributes={"team": "a"}).id
        first = queue.receive(owner="ada", with_state=True)
        assert first is not None
        first.save_state({"step": "second"})
        first.nack(error=TimeoutError("slow"))
        open_queue(page, server, f"stateful/messages/{id}")
        expect(page.get_by_label("Workflow state", exact=True)).to_contain_text('"step": "second"')
        expect(page.get_by_label("Payload", exact=True)).to_have_text('{\n  "n": 1\n}')
        page.get_by_role("button", name="Raw").click()
        expect(page.get_by_label("Payload", exact=True)).to_have_text('{"n":1}')
        again = queue.receive(owner="bob", with_state=True, visibility_seconds=3_600)
        assert again is not None
        attempts = page.get_by_role("region", name="Attempts")
        expect(attempts.locator("tbody tr:not(.inside)")).to_have_count(2)
        running, failed = attempts.locator("tbody tr:not(.inside)").all()
        expect(running).to_contain_text("bob")
        expect(running).to_contain_text("running")
        expect(failed).to_contain_text("TimeoutError: slow")
        check_by_axe(page, "main")
        again.nack(delay_seconds=3_600)
        page.get_by_role("button", name="Deliver now").click()
        expect(page.locator("h1 .pill")).to_have_text("ready")


def test_a_finished_message_shows_every_attempt(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("recovered")
        queue.set_policy(QueuePolicy(retry_delay_seconds=0.0))
        id = queue.put(b"x", keep_result=True).id
        for owner, reason in (("ada", "slow"), ("bob", "slower")):
            message = queue.receive(owner=owner)
            assert message is not None
            with pytest.raises(TimeoutError), message:
                raise TimeoutError(reason)
        message = queue.receive(owner="eve")
        assert message is not None
        message.ack()
        open_queue(page, server, f"recovered/messages/{id}")
        attempts = page.get_by_role("region", name="Attempts")
        expect(attempts.locator("tbody tr:not(.inside)")).to_have_count(3)
        done, second, first = attempts.locator("tbody tr:not(.inside)").all()
        for words in ("3", "eve", "done", "20"):  # It ended in this century.
            expect(done).to_contain_text(words)
        expect(second).to_contain_text("TimeoutError: slower")
        expect(first).to_contain_text("ada")
        expect(first).to_contain_text("TimeoutError: slow")
        expect(attempts.locator("pre")).to_contain_text("raise TimeoutError(reason)")  # The newest failure is expanded.
        done.locator(".opener").click()
        expect(attempts).to_contain_text("The message was acknowledged.")
        expect(page.get_by_text("not kept.")).to_have_count(0)
        check_by_axe(page, "main")


def test_a_message_says_how_many_attempts_are_not_kept(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("forgetful")
        queue.set_policy(QueuePolicy(retry_delay_seconds=0.0, failures_kept=2))
        id = queue.put(b"x").id
        for _ in range(3):
            message = queue.receive(owner="ada")
            assert message is not None
            message.nack(error="slow")
        open_queue(page, server, f"forgetful/messages/{id}")
        attempts = page.get_by_role("region", name="Attempts")
        expect(attempts.locator("tbody tr:not(.inside)")).to_have_count(2)
        expect(page.get_by_text("1 older failed attempt is not kept.")).to_be_visible()
        message = queue.receive(owner="bob")
        assert message is not None
        queue.cancel(id)
        page.keyboard.press("r")
        expect(page.get_by_text("1 older failed attempt is not kept.")).to_be_visible()
        cancelled = attempts.locator("tbody tr:not(.inside)").first
        expect(cancelled).to_contain_text("bob")
        expect(cancelled).to_contain_text("cancelled")


def test_a_message_is_moved_and_deleted_from_its_page(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        id = dead_letter(plane, "leaving", "ValueError: no")
        open_queue(page, server, f"leaving/messages/{id}")
        page.get_by_role("button", name="Move…").click()
        page.get_by_label("To the queue").fill("arriving")
        page.get_by_role("button", name="Move the message").click()
        expect(page.locator("h1 .pill")).to_have_text("ready")
        assert page.url.endswith(f"#/queues/arriving/messages/{id}")
        page.get_by_role("button", name="Delete…").click()
        page.get_by_role("button", name="Delete the message").click()
        expect(page).to_have_title("arriving · Queues · Fastness")
        assert plane.queue("arriving").stats().ready == 0


@pytest.mark.parametrize(
    "viewport",
    [
        pytest.param({"width": 1_440, "height": 900}, id="1440", marks=pytest.mark.rotating),
        pytest.param(PHONE, id="390"),
    ],
)
def test_the_redrive_button_is_on_the_screen(untimed: Page, server: Server, viewport: ViewportSize) -> None:
    page = untimed
    with server.plane() as plane:
        queue = f"wide-{viewport['width']}"
        id = plane.queue(queue).put({"note": "x" * 300}, max_attempts=1).id
        message = plane.queue(queue).receive()
        assert message is not None
        message.nack(error="SomeError: " + "words " * 60)
    page.set_viewport_size(viewport)
    open_queue(page, server, queue)
    button = page.get_by_role("button", name=f"Redrive {id}")
    expect(button).to_be_visible()
    box = button.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= viewport["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    letters = page.get_by_role("region", name="Dead letters")
    letters.locator(".opener").click()
    expect(letters.locator(".inside pre").first).to_be_visible()
    assert letters.evaluate("element => element.scrollWidth <= element.clientWidth"), "nothing is cut at the right"
    page.goto(f"{server.url}/console#/queues/{queue}/list")
    expect_rows(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    check_by_axe(page, "main")


def test_the_filters_of_a_phone_are_collapsed(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        for error in ("TimeoutError: slow", "ValueError: no"):
            dead_letter(plane, "collapsed", error)
    page.set_viewport_size(PHONE)
    open_queue(page, server, "collapsed/list?state=dead&older=60")
    filters = page.locator("summary", has_text="Filters")
    expect(filters).to_have_text("Filters: dead, older than 1 minute")
    expect(page.get_by_label("State")).to_be_hidden()
    open_queue(page, server, "collapsed/list?state=dead")
    expect_rows(page, 2)
    expect(filters).to_have_text("Filters: dead")
    box = page.get_by_label("Select this page").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= PHONE["height"], "the list begins on the first screen"
    filters.click()
    page.get_by_label("Error contains").fill("Timeout")
    page.keyboard.press("Enter")
    expect_rows(page, 1)
    expect(filters).to_have_text("Filters: dead, error Timeout")
    check_by_axe(page, "main")


ACTIONS = {
    "queue:put": "Publish…",
    "queue:pause": "Pause…",
    "queue:purge": "Purge…",
    "queue:redrive": "Redrive all…",
    "queue:policy.set": "Edit the policy",
    "queue:schedules.set": "Add a schedule",
}
BULK = {"queue:cancel": "Cancel…", "queue:move": "Move…", "queue:delete_messages": "Delete…"}


def test_what_a_token_does_not_allow_is_not_offered(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    reads = ["queue:survey", "queue:stats", "queue:peek", "queue:policy.get", "queue:schedules.list", "queue:search"]
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.queue("jobs").put(1)
        dead_letter(plane, "jobs", "ValueError: no")
        tokens = [
            plane.tokens.create("person", universes="main", verbs=verbs).token
            for verbs in (reads, [*reads, *list(ACTIONS)[::2], *list(BULK)[::2]], [*reads, *ACTIONS, *BULK])
        ]
    running = Server(tmp_path, tokens=True)
    try:
        for number, token in enumerate(tokens):
            page.goto(f"{running.url}/console#/queues/jobs")
            sign_in(page, token)
            expect(page.get_by_role("region", name="Dead letters")).to_be_visible()
            for index, name in enumerate(ACTIONS.values()):
                is_allowed = number == 2 or (number == 1 and index % 2 == 0)
                expect(page.get_by_role("button", name=name, exact=True)).to_have_count(int(is_allowed))
            page.get_by_role("link", name="Search messages").click()
            expect_rows(page, 2)
            for index, name in enumerate(BULK.values()):
                is_allowed = number == 2 or (number == 1 and index % 2 == 0)
                expect(page.get_by_role("button", name=name, exact=True)).to_have_count(int(is_allowed))
            page.get_by_role("button", name="Sign out person").click()
    finally:
        running.kill()


def test_parts_of_a_queue_that_a_token_does_not_allow_are_left_out(fresh: Page, tmp_path: Path) -> None:
    """The page has the parts and the actions that the token allows, and the actions work without the other parts."""
    page = fresh
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.queue("jobs").put(1)
        dead_letter(plane, "jobs", "ValueError: no")
        counting, blind = (
            plane.tokens.create("person", universes="main", verbs=["queue:survey", *verbs]).token
            for verbs in (["queue:stats", "queue:purge"], ["queue:policy.get", *ACTIONS])
        )
    running = Server(tmp_path, tokens=True)
    purge = page.get_by_role("button", name="Purge…")
    try:
        page.goto(f"{running.url}/console#/queues/jobs")
        sign_in(page, counting)
        expect(page.locator(".tile.ready b")).to_have_text("1")
        for name in ("Next messages", "Dead letters", "Policy", "Leased messages", "Schedules"):
            expect(page.get_by_role("heading", name=name)).to_be_hidden()
        expect(page.locator(".problem")).to_have_count(0)
        purge.click()
        expect(page.get_by_role("dialog")).to_contain_text("1 message that is not leased will be removed")
        page.get_by_role("button", name="Keep the messages").click()
        page.get_by_role("button", name="Sign out person").click()

        sign_in(page, blind)
        expect(page.get_by_role("heading", name="Policy")).to_be_visible()
        expect(page.locator(".tile:visible")).to_have_count(0)
        expect(page.get_by_role("button", name="Pause…")).to_be_hidden()  # Whether it is paused is not known.
        page.get_by_role("button", name="Redrive all…").click()
        page.get_by_role("button", name="Redrive all dead letters").click()
        expect(page.locator(".toast")).to_have_text("1 message redriven")
        purge.click()
        expect(page.get_by_role("dialog")).to_contain_text("All messages that are not leased will be removed")
        page.get_by_label("Type jobs to confirm").fill("jobs")
        page.get_by_role("button", name="Purge the queue").click()
        expect(page.locator(".toast")).to_have_text("2 messages removed")
        check_by_axe(page, "main")
    finally:
        running.kill()


def test_a_token_of_some_queues_is_offered_what_it_allows(noisy: Page, tmp_path: Path, lake: Path) -> None:
    page = noisy  # Chromium logs the refusals of the server.
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.queue("orders-eu").put(1)
        plane.queue("invoices").put(1)
        token = plane.tokens.create("orders", universes="*", verbs="*", queues="orders*").token
    running = Server(tmp_path, tokens=True, pipeline_lake=str(lake))
    try:
        page.goto(f"{running.url}/console#/queues")
        sign_in(page, token)
        expect(page.locator(".page tbody th a")).to_have_text(["orders-eu"])
        links = page.get_by_role("navigation", name="Pages").get_by_role("link")
        names = links.all_inner_texts()
        assert {"Queues", "Nodes", "Space", "Tokens"} <= set(names)
        assert not {"Pipeline", "Reports"} & set(names)
        for name in names:
            links.get_by_text(name, exact=True).click()
            expect(page.get_by_role("navigation").locator("[aria-current=page]")).to_have_text(name)
            shown = page.locator(".page tbody tr:visible, .page .empty:visible, .page .problem:visible")
            expect(shown.first).to_be_visible()
            expect(page.locator(".problem")).to_have_count(0)
        page.goto(f"{running.url}/console#/queues/orders-eu")
        expect(page.locator(".tile.ready b")).to_have_text("1")
        expect(page.get_by_role("button", name="Purge…")).to_be_visible()
        page.goto(f"{running.url}/console#/queues/invoices")
        expect(page.locator(".problem")).to_contain_text("is not for the queue invoices")
        expect(page.get_by_role("button", name="Purge…")).to_be_hidden()
    finally:
        running.kill()


def test_an_action_that_the_server_refuses_is_reported(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        queue = plane.queue("refusing")
        queue.put(1)
        open_queue(page, server, "refusing/list")
        page.get_by_label(re.compile("^Select 0")).check()
        page.get_by_role("button", name="Delete…").click()
        queue.receive(visibility_seconds=3_600)
        page.get_by_role("button", name="Delete the message").click()
        expect(page.locator(".toast.bad")).to_contain_text("is leased")
        assert queue.stats().leased == 1
