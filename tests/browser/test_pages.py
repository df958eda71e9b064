"""The pages of the console: what they show without data, with an error, and what their buttons do."""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

import fastness
from fastness.errors import Fenced, LeaseConflict, NotAllowed, QuotaExceeded
from fastness.pipeline.config import JobResult
from fastness.pipeline.lake import Lake
from fastness.pipeline.observation.runs import RunRecorder
from fastness.wire.quotas import Quota
from tests.browser.console_pages import (
    MARKUP,
    PAGES,
    PHONE,
    SLACK_MS,
    Guarded,
    check_by_axe,
    check_counts,
    dead_letter,
    open_page,
    sign_in,
)
from tests.support.forked import start_python
from tests.support.server_process import Server
from tests.support.waiting import exit_code

LISTS = {  # The pages whose empty state has a command.
    "queues": "queue put",
    "mail": "mail send",
    "worlds": "world create",
    "leases": "lease acquire",
    "entities": "entity set",
    "tokens": "token create",
    "runs": "workflow start",
}


# Runs commands of the shell in one process.
RUN = """
import json, sys
from fastness.cli.main import root
for arguments in json.loads(sys.argv[1]):
    try:
        root.main(arguments)
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
"""


# A page with this script reconnects only by its button: it pauses 600 ms first, and such pauses do not end.
WAITS_FOR_BUTTON = """
Math.random = () => 0.9;
const start = window.setTimeout;
window.setTimeout = (work, ms, ...rest) => (window.waitsForButton && ms >= 500 ? 0 : start(work, ms, ...rest));
"""


# States of pages.


def test_every_empty_list_says_what_to_do_and_its_command_works(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    running = Server(tmp_path)
    try:
        commands = []
        command = page.locator(".empty .copyable code")
        for name, words in LISTS.items():
            page.goto(f"{running.url}/console#/{name}")
            expect(command).to_contain_text(f"fastness --url {running.url} {words}")
            expect(page.get_by_role("button", name="Copy the command")).to_be_visible()
            expect(page.locator(".page tbody tr")).to_have_count(0)
            commands.append(shlex.split(command.inner_text())[1:])
        assert exit_code(start_python(["-c", RUN, json.dumps(commands)], stdout=subprocess.DEVNULL)) == 0
        for name in LISTS:
            page.goto(f"{running.url}/console#/{name}")
            expect(page.locator(".page tbody tr").first).to_be_visible()
            expect(command).to_be_hidden()
            page.keyboard.press("/")
            page.keyboard.type("no such name")
            expect(page.get_by_text("Nothing matches the filter.").first).to_be_visible()
        assert page.url.endswith(f"#/{name}?filter=no+such+name")
        page.reload()  # The filter is part of the address.
        expect(page.get_by_text("Nothing matches the filter.").first).to_be_visible()
        page.goto(f"{running.url}/console#/pipeline")
        expect(page.locator(".copyable code:visible")).to_have_text("fastness serve --pipeline-lake FOLDER")
        with running.plane(universe="other") as plane:
            plane.world("only").create()
        page.goto(f"{running.url}/console?universe=other#/queues")
        expect(command).to_contain_text("--universe other queue put jobs hello")
    finally:
        running.kill()


def test_every_page_says_why_it_cannot_be_shown(noisy: Page, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        token = plane.tokens.create("nobody", universes="*", verbs="state:get").token
    running = Server(tmp_path, tokens=True)
    try:
        noisy.goto(f"{running.url}/console")
        sign_in(noisy, token)
        links = noisy.get_by_role("navigation", name="Pages").get_by_role("link")
        expect(links).to_have_text(["Overview"])
        names = {name.partition("/")[0] for name in PAGES} - {"overview", "reports"}
        about = noisy.locator(".problem").get_by_role("link", name="About the error not_allowed")
        for name in sorted(names | {"queues/jobs", "mail/bob", "worlds/ledger", "runs/r-1"}):
            noisy.goto(f"{running.url}/console#/{name}")
            expect(noisy.locator(".problem")).to_contain_text("does not allow")
            expect(noisy.locator(".problem")).to_contain_text("Sign in with a token that allows it.")
            expect(about).to_have_attribute("href", "docs/errors/not_allowed")
            expect(noisy.locator(".page table:visible")).to_have_count(0)  # Not an empty list.
        check_by_axe(noisy, "main")
        with noisy.context.expect_page() as opened:
            about.click()
        expect(opened.value.get_by_role("heading", name="not_allowed")).to_be_visible()
    finally:
        running.kill()


def test_a_failed_page_is_loaded_again(noisy: Page, server: Server) -> None:
    problem = json.dumps({"detail": "The key space is being reopened.", "code": "backend", "status": 500})
    noisy.add_init_script("window.setInterval = () => 0")  # Only the button loads the page again.
    noisy.route("**/v1/surveys/queues*", lambda route: route.fulfill(status=500, body=problem))
    noisy.goto(f"{server.url}/console#/queues")
    expect(noisy.locator(".problem")).to_contain_text("The key space is being reopened.")
    expect(noisy.locator(".problem")).to_contain_text("The log of the server has the cause.")
    expect(noisy.locator(".tile").first).to_be_hidden()
    noisy.unroute("**/v1/surveys/queues*")
    noisy.get_by_role("button", name="Try again").click()
    expect(noisy.get_by_role("link", name="invoices")).to_be_visible()
    expect(noisy.locator(".problem")).to_have_count(0)


def test_counts_of_one_are_singular(page: Page, server: Server) -> None:
    """Those of every page are checked with its accessibility, in test_console.py."""
    with server.plane() as plane:
        dead_letter(plane, "single", "ValueError: no")
    open_page(page, server, "queues/single")
    check_counts(page)


def test_the_last_runs_of_jobs_are_shown(page: Page, server: Server, lake: Path) -> None:
    open_page(page, server, "pipeline")
    table = page.get_by_role("region", name="Last runs of jobs")
    expect(table.locator("tbody tr")).to_have_count(4)
    for job, words in {
        "ingest": ["ok", "1 min 15 s", "1,244"],
        "audit": ["findings", "1 min 15 s", "1,244", "2", "Open"],
        "rollup": ["failed", "no Java"],
    }.items():
        for each in words:
            expect(table.get_by_role("row", name=job)).to_contain_text(each)
    table.get_by_role("button", name="rollup").click()
    expect(page.get_by_label("Error of rollup")).to_contain_text(MARKUP)
    table.get_by_role("button", name="ingest").click()
    expect(table.locator(".inside").filter(has_text="Rows of journal")).to_contain_text("1,234")
    # A run after the report is not in it.
    recorder = RunRecorder(Lake(str(lake)).location)
    recorder.started("audit")
    page.keyboard.press("r")
    expect(table.get_by_role("row", name="audit")).to_contain_text("running")
    recorder.completed(JobResult(job="audit", ok=True, rows={}, seconds=1.0))
    page.keyboard.press("r")
    expect(table.get_by_role("row", name="audit")).to_contain_text("not reported yet")
    (lake / "runs" / "vacuum.json").write_text("{")
    page.keyboard.press("r")
    expect(page.get_by_text("1 record cannot be read: vacuum.json.")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("report")
    expect(table.locator("tbody tr")).to_have_count(1)
    assert page.url.endswith("#/pipeline?filter=report")
    page.get_by_role("link", name="Open the report with the run of report").click()
    expect(page.locator("iframe")).to_be_visible()
    (lake / "runs" / "vacuum.json").unlink()


def test_a_lake_without_runs_says_what_to_do_and_a_damaged_one_is_reported(noisy: Page, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    running = Server(tmp_path, pipeline_lake=str(lake))
    try:
        noisy.goto(f"{running.url}/console#/pipeline")
        expect(noisy.locator(".empty .copyable code:visible")).to_contain_text("fastness pipeline ingest")
        check_by_axe(noisy, "main")
        lake.mkdir()
        (lake / "runs").write_text("not a folder")
        noisy.reload()
        expect(noisy.locator(".problem")).to_contain_text("runs cannot be read")
        expect(noisy.locator(".empty:visible")).to_have_count(0)
        with noisy.expect_request(lambda request: "/pipeline" in request.url):
            noisy.get_by_role("button", name="Try again").click()
        # Later than the click: the page also asks by itself, and takes the button away once there is an answer.
        (lake / "runs").unlink()
        RunRecorder(Lake(str(lake)).location).started("ingest")
        noisy.keyboard.press("r")
        expect(noisy.get_by_role("row", name="ingest")).to_contain_text("running")
    finally:
        running.kill()


# Actions.


@pytest.mark.always
def test_a_lease_is_released_after_a_question(noisy: Page, server: Server) -> None:
    page = noisy  # Chromium logs the refusal of the server.
    with server.plane() as plane, server.plane() as other:
        held = plane.lease("release/me").acquire("ada", ttl_seconds=600)
        granted: list[Any] = []
        waiting = threading.Thread(
            target=lambda: granted.append(other.lease("release/me").acquire("bob", wait_seconds=60, ttl_seconds=600))
        )
        waiting.start()
        try:
            open_page(page, server, "leases?filter=release")
            row = page.get_by_role("row", name="release/me")
            expect(row).to_contain_text("ada")
            expect(page.get_by_role("row", name="orders/1")).to_have_count(0)
            page.keyboard.press("r")
            expect(row.locator(".pill")).to_contain_text("bob")
            expect(page.get_by_role("columnheader", name="Waiting at this server")).to_be_visible()
            page.get_by_role("button", name="Release release/me").click()
            dialog = page.get_by_role("dialog", name="Release the lease on release/me?")
            expect(dialog).to_contain_text("ada is fenced off")
            expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
            check_by_axe(page, "dialog[open]")
            page.keyboard.press("Enter")
            expect(dialog).to_have_count(0)
            expect(page.get_by_role("button", name="Release release/me")).to_be_focused()
            page.keyboard.press("Enter")
            dialog.get_by_role("button", name="Release the lease").click()
            expect(page.locator(".toast")).to_contain_text("The lease on release/me is released")
            expect(row).to_contain_text("bob")
        finally:
            waiting.join()
        assert granted[0].fence == held.fence + 1
        with pytest.raises(LeaseConflict):
            held.keepalive()
        # A lease that was granted since the page was loaded is not ended.
        page.get_by_role("button", name="Release release/me").click()
        granted[0].release()
        plane.lease("release/me").acquire("carol", ttl_seconds=600)
        page.get_by_role("button", name="Release the lease").click()
        expect(page.locator(".toast.bad")).to_contain_text("the owner carol")
        about = page.locator(".toast.bad").get_by_role("link", name="About the error lease_conflict")
        expect(about).to_have_attribute("href", "docs/errors/lease_conflict")
        check_by_axe(page, ".toasts")
        page.get_by_role("button", name="Close this notice").click()
        expect(page.locator(".toast")).to_have_count(0)
        assert plane.lease("release/me").describe().held


def test_a_session_of_ordered_locks_is_ended(untimed: Page, server: Server) -> None:
    with server.plane() as plane, pytest.raises(Fenced), plane.locks.acquire(["record_id", "task/ended"]) as held:
        open_page(untimed, server, "leases?filter=ended")
        sessions = untimed.get_by_role("region", name="Sessions of ordered locks")
        sessions.get_by_role("button", name=re.compile("^End session")).click()
        untimed.get_by_role("button", name="End the session").click()
        expect(untimed.locator(".toast")).to_contain_text("has ended")
        expect(sessions.get_by_role("row", name="task/ended")).to_have_count(0)
        held.check()


def test_a_token_is_created_shown_once_and_revoked(noisy: Page, guarded: Guarded) -> None:
    page = noisy  # Chromium logs the refusal of the server.
    server, tokens = guarded
    page.goto(f"{server.url}/console#/tokens")
    sign_in(page, tokens["all"])
    expect(page.get_by_role("row", name="reader")).to_contain_text("usable")
    page.get_by_role("button", name="Create…").click()
    dialog = page.get_by_role("dialog", name="Create a token")
    check_by_axe(page, "dialog[open]")
    dialog.get_by_role("button", name="Create the token").click()
    expect(dialog).to_be_visible()  # A token needs a name and verbs.
    dialog.get_by_label("Name").fill("mailer")
    dialog.get_by_label("Universes").fill("main, shop")
    dialog.get_by_label("Verbs").fill("queue:put, queue:no-such-verb")
    dialog.get_by_label("Expires after").select_option("1 hour")
    dialog.get_by_role("button", name="Create the token").click()
    expect(page.locator(".toast.bad")).to_contain_text("Unknown verb 'queue:no-such-verb'")
    page.get_by_role("button", name="Create…").click()
    dialog.get_by_label("Name").fill("mailer")
    dialog.get_by_label("Universes").fill("main, shop")
    dialog.get_by_label("Verbs").fill("queue:put")
    dialog.get_by_label("Queues").fill("jobs, orders*")
    dialog.get_by_label("Expires after").select_option("1 hour")
    dialog.get_by_role("button", name="Create the token").click()
    once = page.get_by_role("dialog", name="The token mailer")
    token = once.locator("code").inner_text()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    once.get_by_role("button", name="Copy").click()
    expect(once.get_by_role("button", name="Copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == token
    check_by_axe(page, "dialog[open]")
    once.get_by_role("button", name="I have stored it").click()
    expect(once).to_have_count(0)
    assert token not in page.content()
    with server.plane(token=token) as plane:
        plane.queue("jobs").put(b"x")
        with pytest.raises(NotAllowed):
            plane.queue("jobs").stats()
        with pytest.raises(NotAllowed, match="not for the queue invoices"):
            plane.queue("invoices").put(b"x")
    row = page.get_by_role("row", name="mailer")
    for words in ("main", "shop", "jobs", "orders*", "queue:put", "in 59 min", "by operator"):
        expect(row).to_contain_text(words)
    page.get_by_role("button", name="Revoke mailer").click()
    page.get_by_role("button", name="Revoke the token").click()
    expect(row).to_contain_text("revoked")
    expect(page.get_by_role("button", name="Revoke mailer")).to_be_hidden()
    assert server.get("/v1/tokens/self", token=token)[0] == 401


def test_the_queues_and_the_sqs_key_of_a_token_are_shown(page: Page, server: Server) -> None:
    queues = [f"q-{number}" for number in range(6)]
    with server.plane() as plane:
        key = plane.tokens.create(
            "shop-sqs", universes="main", verbs="sqs:*", queues=queues, sqs=True
        ).info.access_key_id
    page.set_viewport_size({"width": 1_440, "height": 900})
    open_page(page, server, f"tokens?filter={key}")
    row = page.get_by_role("row", name="shop-sqs")
    for words in ("q-0", "q-3", "and 2 others", f"SQS key {key}"):
        expect(row).to_contain_text(words)
    expect(page.locator(".page tbody tr")).to_have_count(1)
    page.goto(f"{server.url}/console#/tokens?filter=worker")
    expect(page.get_by_role("row", name="worker").locator("td[data-label=Queues]")).to_have_text("all")
    scroller = page.get_by_role("region", name="Tokens")
    assert scroller.evaluate("element => element.scrollWidth <= element.clientWidth"), "no column is below the buttons"
    check_by_axe(page, "main")


def test_a_filter_that_searches_one_page_says_so(fresh: Page, tmp_path: Path) -> None:
    page = fresh
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        for number in range(101):
            plane.entities.write("order", f"a-{number:03}", {"total": number})
    running = Server(tmp_path)
    try:
        open_page(page, running, "entities/order")
        page.get_by_label("Filter by name").fill("a-100")
        unmatched = page.get_by_text("Nothing on this page matches the filter.")
        expect(unmatched).to_contain_text("open another page to search that one")
        page.get_by_role("button", name="Next page").click()
        expect(page.locator(".page tbody th a")).to_have_text(["a-100"])
        page.get_by_label("Filter by name").fill("a-001")
        expect(unmatched).to_be_visible()
        open_page(page, running, "entities")  # One page.
        page.get_by_label("Filter by name").fill("task")
        expect(page.get_by_text("Nothing matches the filter.")).to_be_visible()
    finally:
        running.kill()


def test_verbs_that_a_token_loses_while_a_page_is_open_are_refused(noisy: Page, guarded: Guarded) -> None:
    page = noisy  # Chromium logs the refusals of the server.
    server, tokens = guarded
    reads = "queue:survey,queue:stats,queue:peek,queue:policy.get,queue:schedules.list,queue:search,queue:leased"
    with server.plane(token=tokens["all"]) as plane:
        weaker = plane.tokens.create("weaker", universes="main", verbs=f"{reads},lease:list,lease:waits,lock:list")
        letter = dead_letter(plane, "jobs", "ValueError: no")
        plane.queue("jobs").put(b"x")
        plane.lease("deploy").acquire("ada", ttl_seconds=600)
        before = plane.queue("jobs").stats()
        page.goto(f"{server.url}/console#/queues/jobs")
        sign_in(page, tokens["all"])
        expect(page.get_by_role("button", name=f"Redrive {letter}")).to_be_visible()
        # The rest is sent with a token that may only read. The page still has the buttons of the first one.
        page.evaluate("token => sessionStorage.setItem('fastness-token', token)", weaker.token)
        refusal = page.locator(".toast.bad")

        page.get_by_role("button", name="Pause…").click()
        page.get_by_role("button", name="Pause the queue").click()
        expect(refusal).to_contain_text("The token weaker does not allow queue:pause")
        page.get_by_role("button", name=f"Redrive {letter}").click()
        expect(refusal).to_contain_text("does not allow queue:redrive")
        page.get_by_role("button", name="Purge…").click()
        page.get_by_label("Type jobs to confirm").fill("jobs")
        page.get_by_role("button", name="Purge the queue").click()
        expect(refusal).to_contain_text("does not allow queue:purge")
        page.get_by_role("button", name="Publish…").click()
        page.get_by_label("Payload").fill('{"n": 1}')
        page.get_by_role("button", name="Publish", exact=True).click()
        dialog = page.get_by_role("dialog", name="Publish a message to jobs")
        expect(dialog.get_by_role("alert")).to_contain_text("does not allow queue:put")
        expect(dialog.get_by_label("Payload")).to_have_value('{"n": 1}')  # It can be copied.
        dialog.get_by_role("button", name="Cancel").click()
        page.goto(f"{server.url}/console#/queues/jobs/list")
        page.get_by_label("Select this page").check()
        page.get_by_role("button", name="Delete…").click()
        page.get_by_role("button", name="Delete 3 messages").click()
        expect(refusal).to_contain_text("does not allow queue:delete_messages")
        page.goto(f"{server.url}/console#/leases")
        page.get_by_role("button", name="Release deploy").click()
        page.get_by_role("button", name="Release the lease").click()
        expect(refusal).to_contain_text("does not allow lease:break")
        check_by_axe(page, ".toasts")

        after = plane.queue("jobs").stats()
        assert (after.ready, after.dead, after.paused) == (before.ready, before.dead, before.paused) == (2, 1, False)
        assert plane.lease("deploy").describe().held
        page.reload()
        expect(page.get_by_role("row", name="deploy")).to_be_visible()
        expect(page.get_by_role("button", name="Release deploy")).to_have_count(0)
        plane.tokens.revoke(weaker.token)
        expect(page.get_by_role("alert")).to_contain_text("Sign-in failed.")


def test_mail_is_grouped_by_thread(untimed: Page, server: Server) -> None:
    page = untimed
    with server.plane() as plane:
        kind: dict[str, Any] = {"content_type": "application/json"}
        for sender, thread, subject in (("ann", "t-1", "budget"), ("ann", "t-2", MARKUP), ("ben", "t-1", "Re: budget")):
            plane.mailbox(sender).send("team", json.dumps({"subject": subject}).encode(), correlation_id=thread, **kind)
        open_page(page, server, "mail/team")
        threads = page.get_by_role("region", name="Threads")
        expect(threads.get_by_role("row")).to_have_count(3)
        budget = threads.get_by_role("row", name="t-1")
        expect(budget.get_by_role("cell").nth(0)).to_have_text("2")
        expect(budget).to_contain_text("ann@main, ben@main")
        expect(threads).to_contain_text("onerror=")
        expect(page.locator("main img, main script, main [onerror]")).to_have_count(0)
        budget.get_by_role("link", name="budget").click()
        mails = page.get_by_role("region", name="Waiting mail")
        expect(mails.get_by_role("row")).to_have_count(3)
        expect(mails).not_to_contain_text("onerror=")
        expect(mails.locator(".pill")).to_have_text(["stored", "stored"])
        assert page.url.endswith("#/mail/team?thread=t-1")
        plane.mailbox("team").read()
        expect(mails.locator(".pill")).to_have_text(["delivered", "delivered"])
        page.reload()
        expect(mails.get_by_role("row")).to_have_count(3)
        page.get_by_role("link", name="All mail").click()
        expect(threads.get_by_role("row")).to_have_count(3)


def test_usage_is_shown_and_a_quota_is_set(fresh: Page, server: Server) -> None:
    page = fresh
    with server.plane(universe="limited") as plane:
        plane.queue("jobs").put_many([b"x"] * 3)
        plane.quotas.set("limited", Quota(messages=4))
        open_page(page, server, "usage?filter=limited")
        row = page.get_by_role("row", name="limited")
        expect(row).to_contain_text("3 of 4 (75 %)")
        page.get_by_role("button", name="Quota of limited").click()
        dialog = page.get_by_role("dialog", name="Quota of limited")
        expect(dialog.get_by_label("Messages")).to_have_value("4")
        check_by_axe(page, "dialog[open]")
        dialog.get_by_label("Messages").fill("3")
        dialog.get_by_label("Bytes").fill("1048576")
        dialog.get_by_role("button", name="Set the quota").click()
        expect(row).to_contain_text("3 of 3 (100 %)")
        expect(row).to_contain_text("of 1.0 MiB")
        assert plane.quotas.usage("limited").quota == Quota(messages=3, bytes=1_048_576)
        with pytest.raises(QuotaExceeded):
            plane.queue("jobs").put(b"x")


def test_the_audit_log_is_filtered_by_its_address(fresh: Page, guarded: Guarded) -> None:
    page = fresh
    server, tokens = guarded
    with server.plane(token=tokens["all"]) as plane:
        plane.queue("jobs").purge()
        plane.queue("jobs").pause()
        plane.tokens.create("audited", universes="main", verbs="queue:put")
    with server.plane(token=tokens["some"]) as plane:
        plane.queue("jobs").resume()
    page.goto(f"{server.url}/console#/audit")
    sign_in(page, tokens["all"])
    rows = page.locator(".page tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("reader")
    expect(rows.last).to_contain_text("queue:purge")
    expect(rows.last).to_contain_text("operator")
    expect(rows.last).to_contain_text("127.0.0.1")
    page.get_by_label("Action").fill("queue:pause")
    page.get_by_label("Action").press("Enter")
    expect(rows).to_have_count(2)
    page.get_by_label("Who").fill("operator")
    page.get_by_label("Who").press("Enter")
    expect(rows).to_have_count(1)
    assert "action=queue%3Apause&actor=operator" in page.url
    page.reload()
    expect(rows).to_have_count(1)
    expect(page.get_by_label("Who")).to_have_value("operator")
    page.goto(f"{server.url}/console#/audit?scope=plane")
    expect(rows.filter(has_text="audited")).to_contain_text("token:create")


# Keyboard, phone and lost connections.


def test_rows_are_selected_by_keyboard(page: Page, server: Server) -> None:
    open_page(page, server, "queues")
    names = page.locator(".page tbody tr th a").all_inner_texts()
    page.keyboard.type("jj")
    expect(page.get_by_role("link", name=names[1], exact=True)).to_be_focused()
    page.keyboard.press("k")
    expect(page.get_by_role("link", name=names[0], exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text(names[0])


def test_the_number_of_dead_letters_is_visible_on_a_phone(browser: Browser, server: Server) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    context.set_default_timeout(SLACK_MS)
    page = context.new_page()
    open_page(page, server, "queues")
    row = page.get_by_role("row", name="invoices")
    dead = row.locator("td[data-label=Dead]")
    expect(dead).to_have_text("1")
    expect(dead).to_be_visible()
    box = dead.bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE["width"]
    assert dead.evaluate("element => getComputedStyle(element, '::before').content") == '"Dead"'
    for name in ("leases", "tokens", "audit"):
        open_page(page, server, name)
        for action in page.locator(".row-actions button").all():
            box = action.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= PHONE["width"]
        check_by_axe(page, "main")
    context.close()


def test_a_server_that_dies_before_it_answers_is_reported(noisy: Page, tmp_path: Path) -> None:
    running = Server(tmp_path)
    try:
        with running.plane() as plane:
            plane.lease("deploy").acquire("ada", ttl_seconds=600)
        noisy.add_init_script(WAITS_FOR_BUTTON)
        open_page(noisy, running, "leases")
        noisy.get_by_role("button", name="Release deploy").click()
        noisy.evaluate("window.waitsForButton = true")
        os.kill(running.process.pid, signal.SIGSTOP)  # It accepts the request, and does not answer.
        with noisy.expect_request("**/v1/lease/break"):
            noisy.get_by_role("button", name="Release the lease").click()
        running.kill()
        expect(noisy.locator(".toast.bad")).to_contain_text("The action may or may not have happened")
        expect(noisy.get_by_role("alert").filter(has_text="connection to the server is lost")).to_be_visible()
        expect(noisy.get_by_role("row", name="deploy")).to_be_visible()  # The last data stay visible.
    finally:
        running.kill()
    again = Server(tmp_path, port=running.address[1])
    try:
        noisy.get_by_role("button", name="Reconnect now").click()
        expect(noisy.locator(".status.live")).to_be_visible()
        noisy.get_by_role("button", name="Close this notice").click()
        noisy.get_by_role("button", name="Release deploy").click()
        noisy.get_by_role("button", name="Release the lease").click()
        expect(noisy.get_by_text("No lease is held.")).to_be_visible()
    finally:
        again.kill()
