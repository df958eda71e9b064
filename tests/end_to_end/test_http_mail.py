"""Mail and agents over HTTP, against a real server process; and from two clients of it, the sender and the reader."""

import asyncio
import base64
from collections.abc import Iterator
from itertools import count

import pytest

import fastness
from fastness.errors import MailboxFull, MailboxTaken, SenderBlocked
from fastness.wire.mail import MailPolicy
from tests.support.http_server import Server, serving

_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}") as running:
        yield running


@pytest.fixture
def name() -> str:
    """A unique name."""
    return f"agent-{next(_names)}"


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_mail_goes_from_sender_to_reader_and_back_as_receipts(server: Server, name: str) -> None:
    sent = server.post("/v1/mail/send", {"sender": "ada", "mails": [{"to": name, "body": text(b"hello"), "id": name}]})
    assert sent.status == 200, sent
    assert sent.json()["mails"] == [{"id": name, "durability": "critical", "duplicate": False}]
    assert server.get(f"/v1/mailboxes/{name}").json()["pending"] == 1
    [mail] = server.get(f"/v1/mailboxes/{name}/mail?after=-1").json()["mails"]
    assert (mail["sender"], base64.b64decode(mail["body"])) == ("ada@main", b"hello")
    confirmed = server.post(f"/v1/mailboxes/{name}/confirm", {"ids": [mail["id"]]})
    assert confirmed.json() == {"count": 1}
    receipts = server.get("/v1/mailboxes/ada/receipts").json()["receipts"]
    assert [each["state"] for each in receipts if each["id"] == name] == ["stored", "delivered", "confirmed"]


def test_each_mail_of_a_batch_has_its_own_result(server: Server, name: str) -> None:
    mails = [{"to": name}, {"to": "no such name"}, {"to": name, "body": text(b"x" * 65_537)}, {"to": name}]
    answer = server.post("/v1/mail/send", {"sender": "ada", "mails": mails})
    assert [each.get("code") for each in answer.json()["mails"]] == [None, "invalid_name", "payload_too_large", None]
    assert server.get(f"/v1/mailboxes/{name}").json()["pending"] == 2


def test_a_repeated_send_with_the_same_key_is_stored_once(server: Server, name: str) -> None:
    body = {"sender": "ada", "mails": [{"to": name, "body": text(b"once")}]}
    answers = [server.post("/v1/mail/send", body, idempotency_key=f"key-{name}") for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert server.get(f"/v1/mailboxes/{name}").json()["pending"] == 1


def test_blocks_policies_and_agents_are_managed_over_http(server: Server, name: str) -> None:
    assert server.post(f"/v1/mailboxes/{name}/blocks", {"sender": "eve"}).status == 200
    assert server.get(f"/v1/mailboxes/{name}/blocks").json() == {"addresses": ["eve@main"]}
    refused = server.post("/v1/mail/send", {"sender": "eve", "mails": [{"to": name}]}).json()["mails"][0]
    assert refused["code"] == "sender_blocked"
    assert server.get("/v1/mail/policy").json()["pending_max"] == 1_000
    registered = server.ask("PUT", f"/v1/agents/{name}", {"public_key": text(b"k" * 32)})
    assert registered.status == 200, registered
    assert server.get(f"/v1/agents/{name}").json()["agent"]["name"] == name
    assert name in [each["name"] for each in server.get("/v1/agents?limit=1000").json()["agents"]]
    assert server.ask("PUT", f"/v1/agents/{name}", {"public_key": text(b"x" * 32)}).json()["code"] == "agent_exists"


async def test_a_remote_reader_receives_and_confirms_mail(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as ours, fastness.connect_async(server.url) as theirs:
        seen: list[int] = []

        async def read() -> None:
            async for mail in theirs.mailbox(name):
                seen.append(mail.json())
                if len(seen) == 20:
                    return

        reading = asyncio.ensure_future(read())
        for number in range(20):
            await ours.mailbox("ada").send(name, number)
        await asyncio.wait_for(reading, 30)
        assert seen == list(range(20))
        # The reader left the loop before it confirmed the last mail.
        assert await ours.mailbox(name).count() == 1


async def test_the_last_subscriber_becomes_the_reader(server: Server, name: str) -> None:
    async with fastness.connect_async(server.url) as first, fastness.connect_async(server.url) as second:
        old = aiter(first.mailbox(name).subscribe())
        waiting = asyncio.ensure_future(anext(old))
        while not (await second.mailbox(name).stats()).joined:
            await asyncio.sleep(0.01)
        new = aiter(second.mailbox(name).subscribe())
        getting = asyncio.ensure_future(anext(new))
        with pytest.raises(MailboxTaken):
            await asyncio.wait_for(waiting, 30)
        await first.mailbox("ada").send(name, "x")
        assert (await asyncio.wait_for(getting, 30)).json() == "x"
        await new.aclose()  # type: ignore[attr-defined]


def test_errors_have_the_same_types_over_the_network(server: Server, name: str) -> None:
    with fastness.connect(server.url, universe=name) as plane:
        plane.set_mail_policy(MailPolicy(pending_max=1))
        plane.mailbox("ada").send("bob", 1)
        with pytest.raises(MailboxFull, match="pending_max"):
            plane.mailbox("ada").send("bob", 2)
        plane.mailbox("bob").block("ada")
        with pytest.raises(SenderBlocked):
            plane.mailbox("ada").send("bob", 3)
        assert plane.mailbox("bob").count() == 1
