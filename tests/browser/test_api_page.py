"""The API page at /docs in a real browser: its policy, try-it-out, tokens and schemas."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import fastness
from tests.support.server_process import Server

ENQUEUE = "messages/post_queue_enqueue"


class ApiPage:
    """The API page, what it logged, and the addresses that it asked for."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.logged: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda entry: self.logged.append(entry.text))
        page.on("pageerror", lambda error: self.logged.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self) -> None:
        self.page.goto(f"{self.url}/docs")
        expect(self.page.locator(".opblock-tag").first).to_be_visible()

    def operation(self, name: str) -> Locator:
        """Open an operation, as in `messages/post_queue_enqueue`."""
        tag, _, operation = name.partition("/")
        block = self.page.locator(f"#operations-{tag}-{operation}")
        if not block.is_visible():
            self.page.locator(f'.opblock-tag[data-tag="{tag}"]').click()
        block.locator(".opblock-summary-control").click()
        expect(block.locator(".opblock-body")).to_be_visible()
        return block

    def authorize(self, token: str) -> None:
        self.page.locator(".auth-wrapper .authorize").click()
        self.page.locator(".auth-container input").fill(token)
        self.page.locator(".auth-container .authorize").click()
        self.page.locator(".auth-btn-wrapper .btn-done").click()

    def execute(self, block: Locator, body: Any = None) -> tuple[int, Any]:
        """Press Execute; returns the status and the JSON of the response that is shown."""
        if block.get_by_role("button", name="Try it out").is_visible():
            block.get_by_role("button", name="Try it out").click()
        if body is not None:
            block.locator("textarea.body-param__text").fill(json.dumps(body))
        with self.page.expect_response(lambda each: "/v1/" in each.url) as answer:
            block.get_by_role("button", name="Execute").click()
        shown = block.locator(".live-responses-table tbody .response-col_status").first
        expect(shown).to_contain_text(str(answer.value.status))
        return answer.value.status, answer.value.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """A server that requires tokens, and some tokens."""
    folder = tmp_path_factory.mktemp("api")
    with fastness.open(f"dir:{folder / 'data'}") as plane:
        tokens = {
            "all": plane.tokens.create("operator", universes="*", verbs="*").token,
            "reader": plane.tokens.create("reader", universes="main", verbs="queue:stats").token,
        }
    running = Server(folder, tokens=True)
    yield running, tokens
    running.kill()


@pytest.fixture
def api(served: Any, browser: Browser) -> Iterator[ApiPage]:
    context = browser.new_context(viewport={"width": 1_280, "height": 900}, color_scheme="dark")
    opened = ApiPage(context.new_page(), served[0].url)
    opened.open()
    yield opened
    context.close()


def test_the_api_page_loads_under_its_policy_and_contacts_no_other_host(api: ApiPage, served: Any) -> None:
    document = api.page.request.get(f"{api.url}/openapi.json").json()
    tags = {tag for methods in document["paths"].values() for each in methods.values() for tag in each["tags"]}
    shown = api.page.locator(".opblock-tag").evaluate_all("all => all.map((each) => each.dataset.tag)")
    assert set(shown) == tags
    block = api.operation(ENQUEUE)
    expect(block.locator(".highlight-code").first).to_be_visible()
    api.page.locator("section.models .models-control").click()
    expect(api.page.locator("section.models article").first).to_be_visible()
    expect(api.page.locator("html")).to_have_class("dark-mode")
    assert api.logged == []  # Chromium logs each violation of the policy.
    others = [url for url in api.asked if not url.startswith((f"{api.url}/", "data:"))]
    assert others == []
    api.page.set_viewport_size({"width": 390, "height": 844})
    assert api.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_try_it_out_puts_a_message(api: ApiPage, served: Any) -> None:
    server, tokens = served
    api.authorize(tokens["all"])
    status, answer = api.execute(api.operation(ENQUEUE), {"queue": "tried", "payload": {"n": 1}})
    assert status == 200
    with server.plane(token=tokens["all"]) as plane:
        message = plane.queue("tried").receive()
        assert (message.id, message.json()) == (answer["message_id"], {"n": 1})
        message.ack()


def test_a_token_is_used_and_a_refusal_is_shown(api: ApiPage, served: Any) -> None:
    _, tokens = served
    put = api.operation(ENQUEUE)
    status, problem = api.execute(put, {"queue": "refused", "payload": 1})
    assert (status, problem["code"]) == (401, "not_allowed")
    expect(put.locator(".live-responses-table tbody .response-col_description").first).to_contain_text(
        problem["detail"]
    )
    api.authorize(tokens["reader"])
    status, problem = api.execute(put, {"queue": "refused", "payload": 1})
    assert (status, problem["code"]) == (403, "not_allowed")
    status, answer = api.execute(api.operation("messages/post_queue_stats"), {"queue": "refused"})
    assert (status, answer["queue"]) == (200, "refused")


def test_schemas_are_linked(api: ApiPage) -> None:
    """A schema has the name of each schema in it, and opens it at a click."""
    block = api.operation("messages/post_queue_dequeue")
    block.locator(".responses-wrapper .tabitem", has_text="Schema").first.click()
    schema = block.locator(".responses-wrapper article").first
    messages = schema.locator("li article").first
    expect(messages.locator(".schema-name").first).to_have_text("array<MessageView>")
    messages.locator("button.json-schema-2020-12-accordion").first.click()
    items = messages.locator("article").first
    expect(items.locator(".schema-name").first).to_have_text("MessageView")
    items.locator("button.json-schema-2020-12-accordion").first.click()
    expect(items.get_by_text("lease_id", exact=True)).to_be_visible()
