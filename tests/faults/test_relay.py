"""The relay with killed servers, broken connections and takeovers: acknowledged mail arrives, in order."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import websockets
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fastness.wire.mail import NewMail
from tests.support.depth import Depth
from tests.support.proxy import Proxy
from tests.support.relay_client import Agent, Refused
from tests.support.server_process import Server
from tests.support.waiting import PAUSE_SECONDS, POLLS_MAX

DEADLINE_SECONDS = 60.0  # Far longer than any test takes.
HOST = "relay.test"  # The same name for every server, so that one can replace another.
SEED = int(os.environ.get("FASTNESS_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.fixture(autouse=True)
def seed() -> int:
    """The random seed; FASTNESS_SEED repeats a run."""
    print(f"FASTNESS_SEED={SEED}")
    return SEED


@pytest.fixture(autouse=True)
def logs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with ExitStack() as running:

        def one(name: str = "one", **flags: Any) -> Any:
            (tmp_path / name).mkdir(exist_ok=True)
            server = Server(tmp_path / name, relay_host=HOST, **flags)
            running.callback(server.kill)
            return server

        yield one


async def until(condition: Callable[[], Any], what: str = "it") -> None:
    for _ in range(POLLS_MAX):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(PAUSE_SECONDS)
    raise AssertionError(f"it never came true: {what}")


class Lasting:
    """An agent that reconnects, sends unanswered mail again, and records what it receives."""

    def __init__(self, url: Callable[[], str], name: str, *, confirms: bool = True) -> None:
        self.url = url
        self.name = name
        self.key = Ed25519PrivateKey.generate()
        self.acknowledged: list[str] = []
        self.mails: list[dict[str, Any]] = []  # All received mail, over all connections, including duplicates.
        self.by_connection: list[list[int]] = []
        self.delivered: dict[str, bool] = {}  # The delivered mails of this agent: whether each was stored first.
        self.receipts_after: int | None = None
        self.connections = 0
        self._confirms = confirms
        self._unsent: dict[str, tuple[str, bytes]] = {}
        self._stopping = False
        self._agent: Any = None
        self._batch_loop = asyncio.create_task(self._run())

    async def send(self, to: str, body: bytes, id: str) -> None:
        """Return once the server has acknowledged it."""
        self._unsent[id] = (to, body)
        if self._agent is not None:
            with suppress(websockets.ConnectionClosed):
                await self._agent.post(to, body, message_id=id)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while id in self._unsent:
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self._stopping = True
        if self._agent is not None:
            await self._agent.close()
        await asyncio.wait_for(self._batch_loop, DEADLINE_SECONDS)

    @property
    def ids(self) -> list[str]:
        """The received ids without duplicates, in the order of their first delivery."""
        return list(dict.fromkeys(mail["message_id"] for mail in self.mails))

    async def _run(self) -> None:
        while not self._stopping:
            agent = Agent(
                self.url(), self.name, key=self.key, host=HOST, receipts_after=self.receipts_after, open_timeout=5
            )
            try:
                async with agent:
                    self.connections += 1
                    self.by_connection.append([])
                    self._agent = agent
                    for id, (to, body) in list(self._unsent.items()):
                        await agent.post(to, body, message_id=id)
                    await self._serve(agent)
            except (OSError, websockets.WebSocketException, Refused, TimeoutError):
                await asyncio.sleep(0.05)
            finally:
                self._agent = None

    async def _serve(self, agent: Any) -> None:
        done = 0
        while agent.closed is None and not self._stopping:
            async with agent._changed:
                await agent._changed.wait_for(lambda: len(agent.frames) > done or agent.closed is not None)  # noqa: B023
            frames, done = agent.frames[done:], len(agent.frames)
            mails = [frame for frame in frames if frame["type"] == "mail"]
            self.mails += mails
            self.by_connection[-1] += [mail["sequence"] for mail in mails]
            for frame in frames:
                if frame["type"] == "sent" and self._unsent.pop(frame["message_id"], None) is not None:
                    self.acknowledged.append(frame["message_id"])
                elif frame["type"] == "delivery_confirm":
                    self.delivered[frame["message_id"]] = frame["was_stored"]
                    self.receipts_after = frame["sequence"]
            if mails and self._confirms:
                with suppress(websockets.ConnectionClosed):
                    await agent.confirm(*mails)


@asynccontextmanager
async def lasting(url: Callable[[], str], *names: str) -> AsyncIterator[list[Lasting]]:
    agents = [Lasting(url, name) for name in names]
    try:
        yield agents
    finally:
        await asyncio.gather(*(agent.stop() for agent in agents))


def pending(server: Any, agent: str = "bob") -> int:
    with server.plane() as plane:
        return int(plane.mailbox(agent).count())


# Killed servers.


async def test_a_server_killed_while_storing_and_delivering_loses_nothing(
    start: Callable[..., Any], tmp_path: Path, seed: int, depth: Depth
) -> None:
    """Every acknowledged mail arrives, and its sender gets the delivery confirmation."""
    chance = random.Random(seed)
    server = start()
    with Proxy(server.address[1], seed) as proxy:  # So that the next server has the same address.
        async with lasting(lambda: proxy.url, "bob", "ada", "eve") as [bob, ada, eve]:
            killed = asyncio.Event()  # Senders continue until the last server was killed.

            async def send_all(sender: Lasting) -> None:
                while not killed.is_set():
                    first = len(sender.acknowledged)
                    ids = [f"{sender.name}-{first + number}" for number in range(20)]
                    await asyncio.gather(*(sender.send("bob", id.encode(), id) for id in ids))

            sending = [asyncio.create_task(send_all(sender)) for sender in (ada, eve)]
            for kill in range(depth.server_kills):
                await until(lambda: len(bob.by_connection) > kill, "bob to be connected to this server")  # noqa: B023
                goal = len(bob.by_connection[-1]) + chance.randrange(20, 100)
                await until(lambda: len(bob.by_connection[-1]) >= goal, "progress")  # noqa: B023
                server.process.kill()
                server.process.wait()
                server = start()
                proxy.target = server.address[1]
            killed.set()
            await asyncio.gather(*sending)
            sent = {*ada.acknowledged, *eve.acknowledged}
            await until(lambda: len(bob.ids) >= len(sent), "every mail to arrive")
            assert set(bob.ids) == sent
            await until(lambda: pending(server) == 0, "every mail to be confirmed")
            await until(lambda: len(ada.delivered) + len(eve.delivered) == len(sent), "every delivery confirmation")
            for sequences in bob.by_connection:
                assert sequences == sorted(set(sequences)), "in order, without duplicates, on each connection"
            print(f"{len(sent)} mails, {bob.connections} connections, {len(bob.mails) - len(sent)} mails twice")


async def test_a_server_killed_during_a_delivery_continues_it(
    start: Callable[..., Any], seed: int, depth: Depth
) -> None:
    chance = random.Random(seed)
    server = start()
    with server.plane() as plane:
        for first in range(0, 1_000, 250):
            mails = [NewMail("bob", b"x", f"m-{number}") for number in range(first, first + 250)]
            plane.mailbox("ada").send_many(mails)
    with Proxy(server.address[1], seed) as proxy:
        async with lasting(lambda: proxy.url, "bob") as [bob]:
            for kill in range(depth.server_kills):
                await until(lambda: len(bob.ids) >= 200 * kill + chance.randrange(1, 200), "some of the flush")  # noqa: B023
                server.process.kill()
                server.process.wait()
                server = start()
                proxy.target = server.address[1]
            await until(lambda: len(bob.ids) == 1_000, "the rest")
            assert bob.ids == [f"m-{number}" for number in range(1_000)]
            assert all(mail["stored"] for mail in bob.mails)
            await until(lambda: pending(server) == 0, "every mail to be confirmed")
            for sequences in bob.by_connection:
                assert sequences == list(range(sequences[0], sequences[0] + len(sequences))) if sequences else True


async def test_broken_connections_lose_nothing(start: Callable[..., Any], seed: int, depth: Depth) -> None:
    server = start()
    with Proxy(server.address[1], seed) as proxy:
        proxy.bytes_max = 20_000
        proxy.delay_seconds = 0.002
        async with lasting(lambda: proxy.url, "bob", "ada") as [bob, ada]:
            count = 0
            while count < 300 * depth.load or bob.connections + ada.connections <= 4:
                ids = [f"m-{count + number}" for number in range(10)]
                await asyncio.gather(*(ada.send("bob", id.encode(), id) for id in ids))
                count += len(ids)
            await until(lambda: len(bob.ids) == count, "every mail to arrive")
            await until(lambda: pending(server) == 0, "every mail to be confirmed")
            proxy.bytes_max = 0
            await until(lambda: len(ada.delivered) == count, "every delivery confirmation")
            print(f"{bob.connections} and {ada.connections} connections, {len(bob.mails) - count} mails twice")


# Several servers.


@pytest.fixture
def two_servers(start: Callable[..., Any], postgres_url: str) -> tuple[Any, Any]:
    return start("one", data=postgres_url), start("two", data=postgres_url)


async def test_sender_and_recipient_are_on_different_servers(two_servers: tuple[Any, Any]) -> None:
    one, two = two_servers
    async with (
        Agent(one.url, "ada", host=HOST) as ada,
        Agent(two.url, "bob", host=HOST, auto=True) as bob,
    ):
        for sent in count(1):
            assert (await ada.send("bob", b"%d" % sent))["type"] == "sent"
            if sent >= 100 and bob.mails and not bob.mails[-1]["stored"]:
                break
        await bob.get(sent)
        assert bob.bodies() == [b"%d" % number for number in range(1, sent + 1)]
        stored = [mail["stored"] for mail in bob.mails]
        assert stored == sorted(stored, reverse=True), "only the first mails may be stored before bob is connected"
        await ada.until(lambda: len(ada.confirms) == sent)
        assert [each["message_id"] for each in ada.confirms] == list(ada.sent)
        ids = [await bob.post("ada", b"back") for _ in range(20)]
        await ada.get(20)
        assert [mail["message_id"] for mail in ada.mails] == ids


async def test_a_mailbox_is_taken_over_from_another_server(two_servers: tuple[Any, Any]) -> None:
    """No mail is lost, and confirmed mail is not delivered again."""
    one, two = two_servers
    key = Ed25519PrivateKey.generate()
    confirmed: list[str] = []
    sent: list[str] = []
    async with AsyncExitStack() as connected:
        ada = await connected.enter_async_context(Agent(one.url, "ada", host=HOST))
        before: Any = None
        for turn in range(6):
            bob = await connected.enter_async_context(Agent((one, two)[turn % 2].url, "bob", key=key, host=HOST))
            if before is not None:
                assert await before.until_closed() == (4001, "replaced")
                assert before.frames[-1]["type"] == "replaced"
            assert bob.pending == len(sent) - len(confirmed)
            sent += [await ada.post("bob", b"x") for _ in range(20)]
            await ada.answer(sent[-1])
            new = await bob.get(len(sent) - len(confirmed))
            assert [mail["message_id"] for mail in new] == [id for id in sent if id not in confirmed]
            await bob.confirm(*new[:10])
            confirmed += [mail["message_id"] for mail in new[:10]]
            left = len(sent) - len(confirmed)
            await until(lambda: pending(one) == left, "the confirmations")  # noqa: B023
            before = bob
        await ada.until(lambda: len(ada.confirms) == len(confirmed))
        assert [each["message_id"] for each in ada.confirms] == confirmed


async def test_takeovers_under_load_lose_and_duplicate_nothing(
    two_servers: tuple[Any, Any], seed: int, depth: Depth
) -> None:
    chance = random.Random(seed)
    urls = [server.url for server in two_servers]
    async with lasting(lambda: chance.choice(urls), "bob", "ada") as [bob, ada]:
        count = round(20 * depth.load) * 10
        sending = asyncio.create_task(send_in_tens(ada, count))
        for _ in range(round(6 * depth.load)):
            goal = len(bob.ids) + 15
            await until(lambda: len(bob.ids) >= min(goal, count), "progress")  # noqa: B023
            usurper = Agent(chance.choice(urls), "bob", key=bob.key, host=HOST)
            with suppress(Refused, OSError, websockets.WebSocketException):
                async with usurper:
                    pass
        await sending
        await until(lambda: len(bob.ids) == count, "every mail to arrive")
        assert set(bob.ids) == set(ada.acknowledged)
        await until(lambda: pending(two_servers[0]) == 0, "every mail to be confirmed")
        await until(lambda: len(ada.delivered) == count, "every delivery confirmation")
        for sequences in bob.by_connection:
            assert sequences == sorted(set(sequences))


async def test_agents_of_a_killed_server_continue_at_the_other(two_servers: tuple[Any, Any]) -> None:
    one, two = two_servers
    alive = [one.url, two.url]
    async with lasting(lambda: alive[0], "bob", "ada") as [bob, ada]:
        await send_in_tens(ada, 50)
        await until(lambda: len(bob.ids) >= 20, "some mail")
        alive.reverse()
        one.process.kill()
        await send_in_tens(ada, 50, first=50)
        await until(lambda: len(bob.ids) == 100, "every mail to arrive")
        assert set(bob.ids) == set(ada.acknowledged)
        await until(lambda: pending(two) == 0, "every mail to be confirmed")


async def send_in_tens(sender: Lasting, count: int, *, first: int = 0) -> None:
    for begin in range(first, first + count, 10):
        ids = [f"{sender.name}-{begin + number}" for number in range(10)]
        await asyncio.gather(*(sender.send("bob", id.encode(), id) for id in ids))
