"""Threads that send, read, confirm, push and change contacts at once lose nothing and never wait for ever.

Agents have no locks: each operation is one transaction. So what an operation read is still true when it commits, and
operations on different agents share their syncs.
"""

import asyncio
import random
import sys
import threading
import time
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from fastness import Plane, limits
from fastness.errors import AgentExists, MailboxFull
from fastness.kv import Database
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.services import Services
from fastness.wire.ingress import NewPush
from fastness.wire.mail import CONFIRMED, DELIVERED, STORED, Envelope, MailPolicy, MailReceipt

SECONDS_MAX = 60.0
THREADS = 8
AGENTS = ["ada", "bob", "eve"]
OPERATIONS = 80  # Of each thread.
PUSHES = 90


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the two-second limit of a commit: in these tests a slow commit means a busy machine."""
    monkeypatch.setattr(limits, "INGRESS_STORE_SECONDS", SECONDS_MAX)


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def services(open_database: Callable[..., Database]) -> Iterator[Services]:
    services = Services(open_database())
    yield services
    services.stop()


def on_threads(works: list[Callable[[], None]]) -> None:
    """Run every function in its own thread; raise the first error, or that a thread did not end."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS_MAX
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    if errors:
        raise errors[0]


class User:
    """A thread that uses the mailboxes of all agents at random, and remembers what it was told."""

    def __init__(self, services: Services, number: int) -> None:
        self.plane = Plane(EmbeddedTransport(services))
        self.number = number
        self.chance = random.Random(number)
        self.sent: dict[str, tuple[str, str]] = {}  # The sender and the recipient of each mail, by its id.
        self.confirmed: Counter[str] = Counter()  # By recipient: how many mails this thread has removed.
        self.strangers: set[tuple[str, str]] = set()  # Who has blocked whom.

    def run(self) -> None:
        operations = [self.send, self.send, self.read_and_confirm, self.block, self.block_and_unblock]
        for count in range(OPERATIONS):
            self.chance.choice(operations)(self.chance.choice(AGENTS), f"{self.number}-{count}")

    def send(self, agent: str, id: str) -> None:
        to = self.chance.choice(AGENTS)
        assert not self.plane.mailbox(agent).send(to, b"mail", id=id).duplicate
        self.sent[id] = agent, to

    def read_and_confirm(self, agent: str, id: str) -> None:
        """Other threads read the same mails at the same time: the counts say which of them removed a mail."""
        del id
        mailbox = self.plane.mailbox(agent)
        if mails := mailbox.read(limit=3):
            self.confirmed[agent] += mailbox.confirm(mails)

    def block(self, agent: str, id: str) -> None:
        self.plane.mailbox(agent).block(f"stranger-{id}")
        self.strangers.add((agent, f"stranger-{id}@main"))

    def block_and_unblock(self, agent: str, id: str) -> None:
        mailbox = self.plane.mailbox(agent)
        mailbox.block(f"friend-{id}")
        mailbox.unblock(f"friend-{id}")


def push_everything(services: Services) -> None:
    """Push on an event loop; every third push is repeated."""

    async def run() -> None:
        ingress = AsyncEmbeddedTransport(services).ingress
        payload = urlsafe_b64encode(b"pushed").decode().rstrip("=")
        async with asyncio.timeout(SECONDS_MAX):
            for number in range(PUSHES):
                new = NewPush(
                    topic="t",
                    content_type="text/plain",
                    payload_base64=payload,
                    idempotency_key=str(number),
                    durability="synced" if number % 10 == 9 else "accepted",
                )
                to = Address("main", AGENTS[number % 3])
                for _ in range(2 if number % 3 == 0 else 1):
                    await ingress.push(Address("main", "zoe"), to, new)
            await ingress.close()
        assert not ingress.counters.lost

    asyncio.run(run())


def all_receipts(plane: Plane, agent: str) -> list[MailReceipt]:
    found: list[MailReceipt] = []
    while page := plane.mailbox(agent).receipts(after=found[-1].sequence if found else -1):
        found += page
    return found


def all_mails(plane: Plane, agent: str) -> list[Envelope]:
    found: list[Envelope] = []
    while page := plane.mailbox(agent).read(after=found[-1].sequence if found else -1, peek=True):
        found += page
    return found


def test_concurrent_operations_on_agents_lose_no_mail_receipt_or_contact(services: Services) -> None:
    services.pushes_per_minute = 0
    services.database.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=100_000))
    users = [User(services, number) for number in range(THREADS)]
    on_threads([*(user.run for user in users), lambda: push_everything(services)])

    plane = users[0].plane
    sent = {id: ends for user in users for id, ends in user.sent.items()}
    confirmed = sum((user.confirmed for user in users), Counter[str]())
    strangers = {pair for user in users for pair in user.strangers}
    left = {agent: all_mails(plane, agent) for agent in AGENTS}
    states = Counter[tuple[str, str]]()  # By the id of a mail and the state of its receipt.
    for sender in [*AGENTS, "zoe"]:
        receipts = all_receipts(plane, sender)
        assert [receipt.sequence for receipt in receipts] == [*range(len(receipts))]
        states.update((receipt.id, receipt.state) for receipt in receipts)

    for agent in AGENTS:
        arrived = sum(to == agent for _, to in sent.values()) + PUSHES // 3
        assert plane.mailbox(agent).count() == len(left[agent]) == arrived - confirmed[agent]
        blocked = plane.mailbox(agent).blocked(limit=1_000)
        assert set(blocked) == {stranger for blocker, stranger in strangers if blocker == agent}
    ids_left = {mail.id for mails in left.values() for mail in mails}
    ids_gone = {id for id, state in states if state == CONFIRMED}
    assert not ids_left & ids_gone
    assert len(ids_gone) == confirmed.total()
    assert {id for id, state in states if state == STORED} == ids_left | ids_gone >= set(sent)
    assert {id for id, state in states if state == DELIVERED} >= ids_gone
    assert set(states.values()) <= {1}  # Each change of a mail is reported once.


def test_a_full_mailbox_takes_exactly_as_many_mails_as_its_policy_allows(services: Services) -> None:
    services.database.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=20))
    stored, refused = Counter[int](), Counter[int]()

    def send(number: int) -> None:
        mailbox = Plane(EmbeddedTransport(services)).mailbox(f"sender-{number}")
        for _ in range(10):
            try:
                mailbox.send("bob", b"mail")
                stored[number] += 1
            except MailboxFull:
                refused[number] += 1

    on_threads([lambda number=number: send(number) for number in range(THREADS)])  # type: ignore[misc]
    assert (stored.total(), refused.total()) == (20, 10 * THREADS - 20)
    assert Plane(EmbeddedTransport(services)).mailbox("bob").count() == 20


def test_concurrent_registrations_keep_one_key_and_every_other_value(services: Services) -> None:
    """A registration changes one value and leaves the others: the world of one thread and the key of another stay."""
    plane = Plane(EmbeddedTransport(services))
    keys = [bytes([number + 1]) * 32 for number in range(THREADS)]
    plane.world("home").create()
    winners: list[bytes] = []

    def register(number: int) -> None:
        agents = Plane(EmbeddedTransport(services)).agents
        with suppress(AgentExists):
            winners.append(agents.register("bob", public_key=keys[number]).public_key or b"")

    def bind() -> None:
        Plane(EmbeddedTransport(services)).agents.register("bob", world="home")

    on_threads([bind, *(lambda number=number: register(number) for number in range(THREADS))])
    bob = plane.agents.get("bob")
    assert bob is not None
    assert (winners, bob.world) == ([bob.public_key], "home")
