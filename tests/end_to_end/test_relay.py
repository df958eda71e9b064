"""The relay of a real server, with a client that follows only its documentation."""

import asyncio
import base64
import json
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import websockets
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import connect
from websockets.typing import Origin

import fastness
from fastness import Plane
from fastness.limits import FRAME_BYTES_MAX, MAIL_BYTES_MAX, RELAY_FRAMES_MAX
from fastness.wire.mail import MailPolicy, NewMail, SetMailPolicy
from tests.support.http_server import serving
from tests.support.relay_client import Agent, Refused, base64url, to_sign
from tests.support.server_process import Server

SECONDS_MAX = 60.0  # Bounds every wait.

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as running:

        def start_one(**flags: Any) -> Any:
            server = Server(tmp_path, **flags)
            running.callback(server.kill)
            return server

        yield start_one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that tests share; each test has its own universe."""
    server = Server(tmp_path_factory.mktemp("relay"))
    yield server
    server.kill()


@pytest.fixture
async def join(shared: Any, request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """Connects agents of the test's universe."""
    universe = f"u{abs(hash(request.node.name))}"
    async with AsyncExitStack() as connected:

        async def join_one(name: str, **options: Any) -> Any:
            return await connected.enter_async_context(Agent(shared.url, f"{name}@{universe}", **options))

        join_one.universe = universe  # type: ignore[attr-defined]
        yield join_one


@pytest.fixture
def plane(shared: Any, join: Any) -> Iterator[Plane]:
    """The same universe, over the stream."""
    with fastness.connect(shared.url, universe=join.universe) as plane:
        yield plane


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


def store(plane: Plane, count: int, *, to: str = "bob", sender: str = "ada", size: int = 0) -> None:
    for first in range(0, count, 250):
        numbers = range(first, min(first + 250, count))
        mails = [NewMail(to, b"%d" % number + bytes(size), f"{sender}-{number}") for number in numbers]
        assert not [sent for sent in plane.mailbox(sender).send_many(mails) if sent.code]


# Authentication.


async def test_agent_authenticates_with_its_key(start: Start) -> None:
    server = start()
    key = Ed25519PrivateKey.generate()
    async with Agent(server.url, "ada", key=key) as ada:
        assert ada.challenge["host"] == server.url.removeprefix("http://")
        assert ada.welcome == {**ada.welcome, "address": "ada@main", "receipts_seen": -1}
        assert ada.pending == 0
    with server.plane() as plane:
        known = plane.agents.get("ada")
        assert known is not None
        assert known.public_key == key.public_key().public_bytes_raw()
    async with Agent(server.url, "ada@main", key=key, format="msgpack") as ada:
        assert ada.pending == 0
    with pytest.raises(Refused) as refused:
        async with Agent(server.url, "ada"):
            pass
    assert (refused.value.error, refused.value.close) == ("not_allowed", 4003)
    assert server.logged('"reason":"relay"', '"asked":"ada@main"')
    assert b'fastness_rejects_total{reason="relay"} 1.0' in server.get("/metrics")[2]


@pytest.mark.parametrize(
    "wrong",
    [
        "another host",
        "another protocol",
        "another nonce",
        "another key",
        "no signature",
        "a short key",
        "a weak key",
        "no proof",
    ],
)
async def test_invalid_proof_is_refused(shared: Any, join: Any, wrong: str) -> None:
    agent = Agent(shared.url, f"ada@{join.universe}")
    challenge = await agent.open()
    host, nonce = challenge["host"], agent._nonce()
    changes: dict[str, dict[str, Any]] = {
        "another host": {"signature": base64url(agent.key.sign(to_sign("evil.example:443", nonce)))},
        "another protocol": {"signature": base64url(agent.key.sign(to_sign(host, nonce, "fastness-relay-0")))},
        "another nonce": {"signature": base64url(agent.key.sign(to_sign(host, bytes(32))))},
        "another key": {"public_key": base64url(Ed25519PrivateKey.generate().public_key().public_bytes_raw())},
        "no signature": {"signature": base64url(b"")},
        "a short key": {"public_key": base64url(bytes(31))},
        # This signature is valid for any data with the key that is the neutral point.
        "a weak key": {"public_key": base64url(b"\1" + bytes(31)), "signature": base64url(b"\1" + bytes(63))},
        "no proof": {"signature": None, "public_key": None},
    }
    with pytest.raises(Refused) as refused:
        await agent.authenticate(**changes[wrong])
    expected = ("invalid_argument", 1002) if wrong == "no proof" else ("not_allowed", 4003)
    assert (refused.value.error, refused.value.close) == expected
    assert "sign" in refused.value.detail.lower()


async def test_signature_is_valid_for_one_challenge_only(shared: Any, join: Any) -> None:
    first = Agent(shared.url, f"ada@{join.universe}")
    await first.open()
    signature = base64url(first.key.sign(to_sign(first.challenge["host"], first._nonce())))
    await first.authenticate()
    await first.close()
    second = Agent(shared.url, f"ada@{join.universe}", key=first.key)
    await second.open()
    assert second.challenge["nonce"] != first.challenge["nonce"]
    with pytest.raises(Refused):
        await second.authenticate(signature=signature)


async def test_late_authentication_closes_the_connection(start: Start) -> None:
    server = start(relay_authenticate_seconds=0.3)
    agent = Agent(server.url, "ada")
    await agent.open()
    [error] = await agent._receive()
    assert (error["code"], "within" in error["detail"]) == ("not_allowed", True)
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await agent._receive()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4008
    await agent.close()


@pytest.mark.parametrize(
    "first",
    [
        '{"type":"send","message_id":"x","to":"bob"}',
        '{"type":"ping"}',
        "[]",
        '[{"type":"ping"},{"type":"ping"}]',
        "no json",
        "",
        "[" * 100_000,
        '{"type":"authenticate","address":"no such name!","token":"x"}',
        b"\xc0",
    ],
    ids=lambda data: repr(data[:30]),
)
async def test_first_frame_must_authenticate(shared: Any, first: Any) -> None:
    agent = Agent(shared.url, "ada")
    await agent.open()
    await agent._socket.send(first)
    [error] = await agent._receive()
    assert error["type"] == "error"
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await agent._receive()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code in (1002, 4003)
    await agent.close()


async def test_host_header_of_the_caller_is_not_trusted(start: Start, tmp_path: Path) -> None:
    """Otherwise a machine in the middle could pass on the signature that the agent made for it."""
    server = start()
    host, port = server.address
    for host_header in ("127.0.0.1:1", "evil.example", f"10.0.0.1:{port}"):
        try:
            async with connect(
                f"ws://{host}:{port}/v1/relay", additional_headers={"Host": host_header}, proxy=None
            ) as socket:
                assert json.loads(await socket.recv())["host"] == f"{host}:{port}"
        except (websockets.InvalidStatus, websockets.InvalidMessage):
            pass  # A server without tokens refuses host names.
    async with connect(f"ws://localhost:{port}/v1/relay", proxy=None) as socket:
        assert json.loads(await socket.recv())["host"] == f"localhost:{port}"
    server.stop()
    named = start(relay_host="relay.example")
    async with Agent(named.url, "ada", host="relay.example") as ada:
        assert ada.challenge["host"] == "relay.example"
    with pytest.raises(Refused):
        async with Agent(named.url, "eve", host=f"{host}:{port}"):
            pass


async def test_web_page_of_another_site_is_refused(shared: Any) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        await connect(shared.url.replace("http", "ws") + "/v1/relay", origin=Origin("https://evil.example"), proxy=None)
    assert refused.value.response.status_code == 403


async def test_unknown_agent_is_refused_if_registration_is_closed(start: Start) -> None:
    server = start(relay_registration="closed")
    key = Ed25519PrivateKey.generate()
    with pytest.raises(Refused) as refused:
        async with Agent(server.url, "ada", key=key):
            pass
    assert refused.value.close == 4003
    with server.plane() as plane:
        plane.agents.register("ada", public_key=key.public_key().public_bytes_raw())
    async with Agent(server.url, "ada", key=key):
        pass


async def test_token_authenticates_agents_of_its_universe(start: Start, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        make = plane.tokens.create
        admin = make("admin", universes="*", verbs="*").token
        mail = make("mail", universes="main", verbs="mail:*").token
        reader = make(
            "reader", universes="main", verbs="mail:join,mail:leave,mail:read,mail:confirm,mail:receipts"
        ).token
        other = make("other", universes="main", verbs="queue:*").token
        slow = make("slow", universes="main", verbs="mail:*", rate_per_second=1).token
    server = start(tokens=True)
    async with Agent(server.url, "ada", token=mail) as ada, Agent(server.url, "bob", token=reader) as bob:
        assert (await ada.send("bob", b"x"))["type"] == "sent"
        await bob.confirm(*await bob.get(1))
        await ada.until(lambda: ada.confirms)
        refused = await bob.send("ada", b"x")
        assert (refused["code"], "mail:send" in refused["detail"]) == ("not_allowed", True)
        with server.plane(admin) as plane:
            plane.tokens.revoke(mail)
        assert (await ada.until_closed())[0] == 4003
        assert bob.closed is None
    async with Agent(server.url, "carol", token=slow) as carol:
        assert "busy" in [answer.get("code") for answer in await send_hundred(carol)]  # One call per second.
    for address, token in (("ada", other), ("ada@other", reader), ("ada", mail), ("ada", "nonsense")):
        with pytest.raises(Refused) as closed:
            async with Agent(server.url, address, token=token):
                pass
        assert (closed.value.error, closed.value.close) == ("not_allowed", 4003)
    with pytest.raises(Refused):  # With tokens on, registration is closed,
        async with Agent(server.url, "eve"):
            pass
    key = Ed25519PrivateKey.generate()
    with server.plane(admin) as plane:
        plane.agents.register("eve", public_key=key.public_key().public_bytes_raw())
    async with Agent(server.url, "eve", key=key) as eve:  # and a key that is known needs no token.
        assert (await eve.send("bob", b"x"))["type"] == "sent"
    assert not [token for token in (mail, reader, other) if token.rpartition("_")[2] in server.log()]


async def test_server_without_tokens_refuses_a_token(shared: Any) -> None:
    with pytest.raises(Refused) as refused:
        async with Agent(shared.url, "ada", token="fnt_x"):
            pass
    assert "no tokens" in refused.value.detail


# Mail.


async def test_mail_is_delivered_and_confirmed(join: Any, shared: Any) -> None:
    ada, bob = await join("ada"), await join("bob", format="msgpack")
    body = bytes(range(256))
    await ada.send("bob", b"first")
    await bob.confirm(*await bob.get(1))  # So that bob counts as connected.
    await ada.until(lambda: ada.confirms)
    sent = await ada.send("bob", body, message_id="m-1", content_type="text/plain", correlation_id="c-1")
    assert sent == {"type": "sent", "message_id": "m-1", "durability": "critical", "duplicate": False}
    [_, mail] = await bob.get(2)
    assert mail == {
        "type": "mail",
        "sequence": 1,
        "message_id": "m-1",
        "from": f"ada@{join.universe}",
        "to": f"bob@{join.universe}",
        "body": body,
        "content_type": "text/plain",
        "correlation_id": "c-1",
        "sent_ms": mail["sent_ms"],
        "expires_ms": mail["sent_ms"] + 7 * 86_400_000,
        "stored": False,
    }
    await bob.confirm(mail)
    await ada.until(lambda: len(ada.confirms) == 2)
    assert ada.confirms[1] == {
        "type": "delivery_confirm",
        "sequence": ada.confirms[1]["sequence"],
        "message_id": "m-1",
        "to": f"bob@{join.universe}",
        "was_stored": False,
        "confirmed_ms": ada.confirms[1]["confirmed_ms"],
    }
    reply = await bob.send(f"ada@{join.universe}", body, **{"from": "bob"})
    assert reply["type"] == "sent"
    [mail] = await ada.get(1)
    assert (ada.body(mail), mail["from"]) == (body, f"bob@{join.universe}")


async def test_stored_mail_is_announced_and_delivered_first(join: Any, plane: Plane) -> None:
    store(plane, 130)
    bob = await join("bob")
    assert bob.pending == 130
    await bob.get(130)
    plane.mailbox("ada").send("bob", b"live")
    await bob.get(131)
    assert bob.bodies() == [b"%d" % number for number in range(130)] + [b"live"]
    assert [mail["stored"] for mail in bob.mails] == [True] * 130 + [False]
    assert plane.mailbox("bob").count() == 131
    for first in range(0, 131, 40):
        await bob.confirm(*bob.mails[first : first + 40])
    await until(lambda: plane.mailbox("bob").count() == 0)


async def test_mail_keeps_its_order_while_delivery_switches_from_stored_to_live(join: Any, plane: Plane) -> None:
    """Mails of relay and stream senders are delivered once and in order."""
    store(plane, 300)
    senders = [await join(f"racer-{number}") for number in range(3)]

    is_live = threading.Event()  # Senders continue until then.

    async def race(sender: Any) -> int:
        for number in count():
            if number >= 100 and is_live.is_set():
                return number
            assert (await sender.send("bob", f"{sender.address}/{number}".encode()))["type"] == "sent"
        raise AssertionError

    def race_by_stream() -> int:
        for number in count():
            if number >= 100 and is_live.is_set():
                return number
            plane.mailbox("streamer").send("bob", f"streamer/{number}".encode())
        raise AssertionError

    racing = [asyncio.create_task(race(sender)) for sender in senders]
    racing.append(asyncio.create_task(asyncio.to_thread(race_by_stream)))
    bob = await join("bob", auto=True)
    await bob.until(lambda: not bob.mails[-1]["stored"] if bob.mails else False)
    is_live.set()
    sent = await asyncio.gather(*racing)
    await bob.get(300 + sum(sent))
    assert [mail["sequence"] for mail in bob.mails] == list(range(300 + sum(sent)))
    stored = [mail["stored"] for mail in bob.mails]
    assert stored == sorted(stored, reverse=True), "stored mail first, then live mail"
    for name, number in zip([*(each.address for each in senders), "streamer"], sent, strict=True):
        numbers = [int(body.rpartition(b"/")[2]) for body in bob.bodies() if body.startswith(f"{name}/".encode())]
        assert numbers == list(range(number))
    await until(lambda: plane.mailbox("bob").count() == 0)
    for sender, number in zip(senders, sent, strict=False):
        await sender.until(lambda sender=sender, number=number: len(sender.confirms) == number)
        assert [each["message_id"] for each in sender.confirms] == list(sender.sent)


async def test_delivery_resumes_after_a_lost_connection(join: Any, plane: Plane) -> None:
    store(plane, 500)
    seen: list[str] = []
    for _ in range(4):
        bob = await join("bob", reads=False, key=Ed25519PrivateKey.from_private_bytes(bytes(32)))
        assert bob.pending == 500 - len(seen)
        batch = (bob.mails + [frame for frame in await bob._receive() if frame["type"] == "mail"])[:60]
        await bob.confirm(*batch)
        seen += [mail["message_id"] for mail in batch]
        left = 500 - len(seen)
        await until(lambda: plane.mailbox("bob").count() == left)  # noqa: B023
        bob.abort()
    bob = await join("bob", auto=True, key=Ed25519PrivateKey.from_private_bytes(bytes(32)))
    await bob.get(500 - len(seen))
    assert seen + [mail["message_id"] for mail in bob.mails] == [f"ada-{number}" for number in range(500)]
    await until(lambda: plane.mailbox("bob").count() == 0)


async def test_mail_may_be_confirmed_over_the_next_connection(join: Any, plane: Plane) -> None:
    store(plane, 3)
    first = await join("bob")
    mails = await first.get(3)
    first.abort()
    second = await join("bob", key=first.key)
    await second.confirm(*mails)
    await until(lambda: plane.mailbox("bob").count() == 0)
    assert plane.mailbox("ada").receipts()[-1].was_stored


async def test_new_connection_replaces_the_old_one(join: Any, plane: Plane) -> None:
    store(plane, 3)
    old = await join("bob")
    await old.get(3)
    new = await join("bob", key=old.key)
    assert (await old.until_closed()) == (4001, "replaced")
    assert old.frames[-1] == {"type": "replaced"}
    await new.get(3)
    await new.confirm(*new.mails)
    await until(lambda: plane.mailbox("bob").count() == 0)
    plane.mailbox("ada").send("bob", b"next")
    await new.get(4)
    assert len(old.mails) == 3


async def test_python_reader_and_relay_agent_replace_each_other(join: Any, plane: Plane) -> None:
    bob = await join("bob")
    store(plane, 2)
    await bob.get(2)
    reading = asyncio.create_task(
        asyncio.to_thread(lambda: [m.id for m in plane.mailbox("bob").subscribe(wait_seconds=0)])
    )
    assert (await bob.until_closed())[0] == 4001
    assert await reading == ["ada-0", "ada-1"]
    again = await join("bob", key=bob.key)
    assert again.pending == 0


async def test_disconnected_sender_gets_its_confirmations_later(join: Any, plane: Plane) -> None:
    ada = await join("ada")
    sent = [await ada.send("bob", b"x", message_id=f"m-{number}") for number in range(3)]
    await ada.close()
    bob = await join("bob", auto=True)
    await bob.get(3)
    await until(lambda: plane.mailbox("bob").count() == 0)
    ada = await join("ada", key=ada.key)
    await ada.until(lambda: len(ada.confirms) == 3)
    assert [(each["message_id"], each["was_stored"]) for each in ada.confirms] == [
        (s["message_id"], True) for s in sent
    ]
    await ada.send_frames({"type": "receipts_seen", "sequence": ada.confirms[1]["sequence"]})
    await ada.close()
    again = await join("ada", key=ada.key)
    assert again.welcome["receipts_seen"] == ada.confirms[1]["sequence"]
    await again.until(lambda: again.confirms)
    assert again.confirms == ada.confirms[2:]
    await again.close()
    third = await join("ada", key=ada.key, receipts_after=-1)
    await third.until(lambda: len(third.confirms) == 3)


# Refusals.


async def test_refusals_name_their_mail(join: Any, plane: Plane) -> None:
    plane._transport.call(SetMailPolicy(MailPolicy(pending_max=2), join.universe))
    plane.mailbox("eve").block("ada")
    ada = await join("ada")
    answers = [await ada.send("bob", b"x") for _ in range(3)]
    assert [answer.get("code") for answer in answers] == [None, None, "queue_full"]
    assert answers[2]["retry"] == "later"
    assert (await ada.send("eve", b"x"))["code"] == "sender_blocked"
    assert (await ada.send("eve", b"x", **{"from": "carol"}))["code"] == "sender_mismatch"
    assert (await ada.send("bob@other", b"x"))["code"] == "invalid_name"
    wrong = await ada.send("bob", b"x", surprise=True)
    assert (wrong["code"], "surprise" in wrong["detail"]) == ("invalid_frame", True)
    await ada.send_frames({"type": "fly"})
    await ada.until(lambda: [frame.get("code") for frame in ada.frames].count("invalid_frame") == 2)
    assert ada.closed is None


async def test_too_large_mail_is_refused(join: Any, plane: Plane) -> None:
    ada = await join("ada")
    assert (await ada.send("bob", bytes(MAIL_BYTES_MAX)))["type"] == "sent"
    refused = await ada.send("bob", bytes(MAIL_BYTES_MAX + 1))
    assert (refused["code"], refused["retry"]) == ("payload_too_large", "never")
    assert (await ada.send("bob", bytes(2 * 1_048_576)))["code"] == "payload_too_large"
    assert ada.closed is None
    await ada._socket.send(" " * (FRAME_BYTES_MAX + 1))
    assert (await ada.until_closed())[0] == 1009
    assert ada.frames[-1]["code"] == "payload_too_large"
    assert plane.mailbox("bob").count() == 1


async def test_invalid_messages_close_the_connection(join: Any) -> None:
    for wrong in (
        "no json",
        "[" * 100_000,
        b"\x91\xc0",
        "[" + ",".join(['{"type":"pong"}'] * (RELAY_FRAMES_MAX + 1)) + "]",
    ):
        ada = await join("ada", key=Ed25519PrivateKey.from_private_bytes(bytes(32)))
        await ada._socket.send(wrong)
        assert (await ada.until_closed())[0] in (1002, 1007, 1009)
        assert ada.frames[-1]["type"] == "error"


async def test_invalid_utf_8_closes_the_connection(join: Any) -> None:
    ada = await join("ada")
    await ada._socket.send(b"\xff\xfe", text=True)
    assert (await ada.until_closed())[0] == 1007


async def test_relay_works_with_any_asgi_server() -> None:
    """Without BoundedSocket, the relay uses ASGI messages only."""
    with serving("memory:") as server:
        keys = {name: Ed25519PrivateKey.generate() for name in ("ada", "bob")}
        for name, key in keys.items():
            public_key = base64.b64encode(key.public_key().public_bytes_raw()).decode()
            assert server.ask("PUT", f"/v1/agents/{name}", {"public_key": public_key}).status == 200
        async with (
            Agent(server.url, "ada", key=keys["ada"]) as ada,
            Agent(server.url, "bob", key=keys["bob"], auto=True) as bob,
        ):
            frames = [ada.mail("bob", b"%d" % number) for number in range(300)]
            await ada.send_frames(*frames)
            await bob.get(300)
            assert bob.bodies() == [b"%d" % number for number in range(300)]
            await ada.until(lambda: len(ada.confirms) == 300)
            await ada._socket.send("no json")
            assert (await ada.until_closed())[0] == 1002


async def test_one_message_may_have_many_frames(join: Any, plane: Plane) -> None:
    ada = await join("ada")
    frames = [ada.mail("bob", b"%d" % number) for number in range(600)]
    await ada.send_frames(*frames, {"type": "ping"})
    await ada.until(lambda: len(ada.sent) == 600 and {"type": "pong"} in ada.frames)
    assert {answer["type"] for answer in ada.sent.values()} == {"sent"}
    assert [mail.id for mail in plane.mailbox("bob").read(limit=256)] == [f["message_id"] for f in frames[:256]]


async def test_sender_above_its_rate_is_limited(start: Start) -> None:
    server = start(relay_rate_per_second=5, relay_burst=10)
    async with Agent(server.url, "ada") as ada, Agent(server.url, "eve") as eve:
        types = [answer["type"] for answer in await send_hundred(ada)]
        assert types[:10] == ["sent"] * 10
        assert "rate_limited" in types
        assert all(0 < answer["retry_after_ms"] <= 200 for answer in ada.frames if answer["type"] == "rate_limited")
        assert (await eve.send("bob", b"x"))["type"] == "sent"
        await ada.close()
        async with Agent(server.url, "ada", key=ada.key) as again:  # The rate is per sender.
            answers = await send_hundred(again)
            assert "rate_limited" in [answer["type"] for answer in answers]
            await asyncio.sleep(answers[-1].get("retry_after_ms", 0) / 1_000)
            while (await again.send("bob", b"x"))["type"] != "sent":
                await asyncio.sleep(0.05)


async def send_hundred(agent: Any) -> list[Any]:
    """The answers to a hundred mails in one message, which exceed the rate on any machine."""
    frames = [agent.mail("bob", b"x") for _ in range(100)]
    await agent.send_frames(*frames)
    return [await agent.answer(frame["message_id"]) for frame in frames]


# Slow readers.


async def test_agent_that_does_not_read_does_not_delay_others(start: Start) -> None:
    server = start()
    with server.plane() as plane:
        store(plane, 1_000, size=20_000)
        before = server.resident_bytes
        async with (
            Agent(server.url, "bob", reads=False, max_queue=1) as bob,
            Agent(server.url, "ada") as ada,
            Agent(server.url, "eve", auto=True) as eve,
        ):
            for number in range(200):
                assert (await ada.send("eve", b"%d" % number))["type"] == "sent"
            await eve.get(200)
            assert (await ada.send("bob", b"x"))["code"] == "queue_full"
            assert server.resident_bytes - before < 64 * 1_048_576
            assert plane.mailbox("bob").count() == 1_000
            bob.auto = True
            bob.start_reading()
            await bob.confirm(*bob.mails)
            await bob.get(1_000)
            assert [mail["sequence"] for mail in bob.mails] == list(range(1_000))
            await until(lambda: plane.mailbox("bob").count() == 0)


async def test_agents_need_no_thread_each(start: Start) -> None:
    server = start()
    threads = Path(f"/proc/{server.process.pid}/task")
    async with AsyncExitStack() as connected:
        agents = []
        before = len(list(threads.iterdir()))
        for first in range(0, 200, 50):
            made = [Agent(server.url, f"agent-{first + number}", auto=True) for number in range(50)]
            agents += await asyncio.gather(*(connected.enter_async_context(agent) for agent in made))
        ids = await asyncio.gather(*(agent.post(f"agent-{(n * 7) % 200}") for n, agent in enumerate(agents)))
        for agent, id in zip(agents, ids, strict=True):
            assert (await agent.answer(id))["type"] == "sent"
        for agent in agents:
            await agent.until(lambda: agent.confirms)  # noqa: B023
        assert len(list(threads.iterdir())) < before + 100


# Stopping.


async def test_stopping_server_announces_draining_and_keeps_acknowledged_mail(start: Start, tmp_path: Path) -> None:
    server = start(drain_seconds=SECONDS_MAX)
    async with Agent(server.url, "ada") as ada, Agent(server.url, "bob") as bob:
        await ada.send("bob", b"1")
        [mail] = await bob.get(1)
        with server.unfinished_upload() as finish:  # Keeps the server draining.
            server.process.send_signal(signal.SIGTERM)
            await bob.until(lambda: {"type": "draining"} in bob.frames)
            refused = await ada.send("bob", b"2")
            assert (refused["code"], refused["retry"]) == ("shutdown_draining", "later")
            await bob.confirm(mail)
            await ada.until(lambda: ada.confirms)
            await asyncio.to_thread(finish)
        assert (await ada.until_closed())[0] == 1012
        assert (await bob.until_closed())[0] == 1012
        assert await asyncio.to_thread(server.process.wait, SECONDS_MAX) == 0
    assert "Traceback" not in server.log()
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        stats = plane.mailbox("bob").stats()
        assert (stats.pending, stats.joined) == (0, False)
        assert plane.mailbox("ada").receipts()[-1].state == "confirmed"


# JSON-RPC.


async def test_agent_pushes_by_json_rpc(join: Any) -> None:
    ada, bob = await join("ada"), await join("bob", auto=True)
    push = {"topic": "t", "content_type": "text/plain", "payload_base64": base64url(b"pushed"), "to": "bob"}
    for number in range(2):
        params = {**push, "idempotency_key": "same"}
        await ada.send_frames(
            {"type": "rpc", "body": {"jsonrpc": "2.0", "id": number, "method": "agent.data.push", "params": params}}
        )
    await ada.until(lambda: sum(frame["type"] == "rpc" for frame in ada.frames) == 2)
    answers = [frame["body"]["result"] for frame in ada.frames if frame["type"] == "rpc"]
    assert [(answer["accepted"], answer["deduped"]) for answer in answers] == [(True, False), (True, True)]
    [mail] = await bob.get(1)
    assert mail["from"] == f"ada@{join.universe}"


@pytest.mark.parametrize("value", [float("nan"), b"bytes \xff"], ids=["NaN", "a map key"])
async def test_a_json_rpc_call_with_a_value_that_json_lacks_is_refused(join: Any, value: Any) -> None:
    """MessagePack has such values."""
    ada = await join("ada", format="msgpack")
    params = {"n": value} if isinstance(value, float) else {(1, 2): value}
    await ada.send_frames(
        {"type": "rpc", "body": {"jsonrpc": "2.0", "id": 1, "method": "agent.ping", "params": {"deep": [params]}}}
    )
    await ada.until(lambda: any(frame["type"] == "error" for frame in ada.frames))
    [error] = [frame for frame in ada.frames if frame["type"] == "error"]
    assert (error["code"], "cannot be JSON" in error["detail"]) == ("invalid_argument", True)


async def test_json_rpc_of_a_token_without_send_permission_is_answered(start: Start, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        reader = plane.tokens.create(
            "reader", universes="main", verbs="mail:join,mail:leave,mail:read,mail:confirm,mail:receipts"
        ).token
    server = start(tokens=True)
    push = {"topic": "t", "content_type": "text/plain", "payload_base64": "", "idempotency_key": "k", "to": "ada"}
    async with Agent(server.url, "bob", token=reader) as bob:
        for id, method, params in (("p", "agent.ping", {}), ("d", "agent.data.push", push)):
            await bob.send_frames(
                {"type": "rpc", "body": {"jsonrpc": "2.0", "id": id, "method": method, "params": params}}
            )
        await bob.until(lambda: sum(frame["type"] == "rpc" for frame in bob.frames) == 2)
        ping, refused = (frame["body"] for frame in bob.frames if frame["type"] == "rpc")
    assert "result" in ping
    assert refused["error"]["code"] == -32004


async def test_metrics_include_the_relay(shared: Any, join: Any) -> None:
    await join("ada")
    text = shared.get("/metrics")[2].decode()
    assert 'fastness_requests_total{code="ok",op="mail.join"}' in text
    sessions = next(line for line in text.splitlines() if line.startswith("fastness_relay_sessions "))
    assert float(sessions.split()[1]) >= 1
