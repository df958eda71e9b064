"""The relay without a socket: what a session holds, when it reads, and what becomes of what an agent asks for."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from holdfast.errors import HoldfastError, NotAllowed, ShutdownDraining, Unreachable
from holdfast.layers import mailboxes
from holdfast.layers.mailboxes import Address, keys_of
from holdfast.limits import (
    MAIL_BATCH_MAX,
    RELAY_CONFIRMS_MAX,
    RELAY_FLUSH_BYTES,
    RELAY_FLUSH_MAILS,
    RELAY_IN_FLIGHT_MAX,
    RELAY_PING_SECONDS,
    RELAY_PONG_SECONDS,
    RELAY_RECEIPTS_SECONDS,
    RELAY_RETRY_SECONDS,
    RELAY_SENDS_MAX,
    RELAY_UNSENT_BYTES_MAX,
)
from holdfast.plane import Options, open_plane_async
from holdfast.plane.batching import call_batch
from holdfast.plane.embedded import AsyncEmbeddedTransport
from holdfast.runtime.rate_limits import RateLimiter
from holdfast.runtime.relay import hub as relay_hub
from holdfast.runtime.relay.commit_listener import CommitListener
from holdfast.runtime.relay.hub import RelayHub
from holdfast.runtime.relay.session import REPLACED, STOPPING, TOO_SLOW, Session
from holdfast.testing.clock import ManualClock
from holdfast.wire import relay
from holdfast.wire.frames import Call
from holdfast.wire.mail import (
    BlockSender,
    ConfirmMail,
    CountMail,
    JoinMailbox,
    MailPolicy,
    NewMail,
    ReadMail,
    SendMail,
    SetMailPolicy,
)
from holdfast.wire.relay import (
    Authenticate,
    Body,
    Confirm,
    DeliveryConfirm,
    Draining,
    Error,
    Frame,
    Mail,
    Ping,
    Pong,
    QueueStatus,
    RateLimited,
    ReceiptsSeen,
    Replaced,
    Send,
    Sent,
    Welcome,
)
from holdfast.wire.requests import Request

DEADLINE_SECONDS = 30.0


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def quiet() -> None:
    """Long enough for everything that could happen by itself to happen, were it to: the hub waits for receipts, too."""
    for _ in range(20):
        await asyncio.sleep(RELAY_RECEIPTS_SECONDS / 10)


class Commits:
    """Carries out calls, and fails or waits if it is told to."""

    def __init__(self, transport: AsyncEmbeddedTransport) -> None:
        self.rounds: list[list[Request[Any]]] = []
        self.failing: HoldfastError | None = None
        self.held: list[asyncio.Event] = []  # The next rounds wait for these before they are carried out.
        self._transport = transport

    async def __call__(self, calls: list[Call]) -> list[Any]:
        self.rounds.append([call.request for call in calls])
        if self.held:
            await self.held.pop(0).wait()
        if self.failing is not None:
            return [self.failing] * len(calls)
        return await call_batch(self._transport, calls)

    def count(self, kind: type[Request[Any]]) -> int:
        return sum(isinstance(request, kind) for round in self.rounds for request in round)


@pytest.fixture
async def transport() -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = await open_plane_async("memory:", Options())
    yield transport
    await transport.close()


@pytest.fixture
def commits(transport: AsyncEmbeddedTransport) -> Commits:
    return Commits(transport)


@pytest.fixture
async def hub(transport: AsyncEmbeddedTransport, commits: Commits, clock: ManualClock) -> AsyncIterator[RelayHub]:
    hub = RelayHub(transport.services.database, commits, clock=clock)
    yield hub
    commits.failing = None
    for event in commits.held:
        event.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await hub.close()


class Agent:
    """The other end of a session: takes its frames while it `reads`."""

    def __init__(self, hub: RelayHub, name: str, *, reads: bool = True, **options: Any) -> None:
        self.name = name
        self.frames: list[Frame] = []
        self.batches: list[list[Frame]] = []
        self.reading = asyncio.Event()
        if reads:
            self.reading.set()
        self._hub = hub
        self._options = {"authorize": lambda request: None, **options}

    async def __aenter__(self) -> "Agent":
        self.session = await self._hub.join("main", self.name, **self._options)
        self._pumping = asyncio.create_task(self._pump())
        await until(lambda: len(self.frames) >= 2 or not self.reading.is_set())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hub.leave(self.session)
        self.reading.set()
        await asyncio.wait({self._pumping}, timeout=DEADLINE_SECONDS)
        self._pumping.result()

    async def _pump(self) -> None:
        await self.reading.wait()
        while (batch := await self.session.outgoing()) is not None:
            frames, size = batch
            await self.reading.wait()
            self.frames += frames
            self.batches.append(frames)
            self.session.on_written(size)

    def all(self, kind: type[Any]) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    @property
    def mails(self) -> list[Mail]:
        return self.all(Mail)

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(mail.body) for mail in self.mails]

    async def get(self, count: int) -> list[Mail]:
        await until(lambda: len(self.mails) >= count)
        return self.mails

    def send(self, to: str, body: bytes = b"x", id: str | None = None, **options: Any) -> str:
        id = id or f"{self.name}-{len(self.frames)}-{id_of()}"
        self.session.receive([Send(id, to, Body(body), **options)])
        return id

    def confirm(self, *mails: Mail) -> None:
        self.session.receive([Confirm([mail.message_id for mail in mails])])

    async def answer(self, id: str) -> Any:
        def found() -> list[Any]:
            return [frame for frame in self.all(Sent | Error | RateLimited) if frame.message_id == id]  # type: ignore[arg-type]

        await until(found)
        return found()[0]


_ids = iter(range(1 << 30))


def id_of() -> str:
    return f"m-{next(_ids)}"


async def store(
    transport: AsyncEmbeddedTransport, count: int, *, to: str = "bob", sender: str = "ada", body: bytes = b""
) -> None:
    for first in range(0, count, MAIL_BATCH_MAX):
        numbers = range(first, min(first + MAIL_BATCH_MAX, count))
        mails = [NewMail(to, body or b"%d" % number, id_of()) for number in numbers]
        sent = (await transport.call(SendMail(sender, mails))).mails
        assert [each.code for each in sent] == [None] * len(mails)


async def pending(transport: AsyncEmbeddedTransport, agent: str = "bob") -> int:
    return (await transport.call(CountMail(agent))).pending


# Order.


async def test_stored_mail_comes_first_and_in_order_then_live_mail(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 120)
    async with Agent(hub, "bob") as bob, Agent(hub, "ada") as ada:
        assert isinstance(bob.frames[0], Welcome)
        assert bob.frames[1] == QueueStatus(120)
        await bob.get(120)
        for number in range(120, 140):
            ada.send("bob", b"%d" % number)
        await bob.get(140)
        assert bob.bodies == [b"%d" % number for number in range(140)]
        assert [mail.sequence for mail in bob.mails] == list(range(140))
        assert [mail.stored for mail in bob.mails] == [True] * 120 + [False] * 20
        assert max(len([each for each in batch if isinstance(each, Mail)]) for batch in bob.batches) <= 140


async def test_a_batch_has_fifty(transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits) -> None:
    await store(transport, 120)
    async with Agent(hub, "bob") as bob:
        await bob.get(120)
    reads = [request for round in commits.rounds for request in round if isinstance(request, ReadMail)]
    assert [(read.after, read.limit) for read in reads[:3]] == [(-1, 50), (49, 50), (99, 50)]


async def test_senders_that_race_the_switch_strand_and_overtake_nothing(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    """Lessons 21 and 22: mail that came between the last look and the first live one; live ones before stored ones."""
    for turn in range(10):
        name = f"bob-{turn}"
        await store(transport, 60, to=name)

        async def race(sender: str, name: str = name) -> None:
            for number in range(40):
                await transport.call(SendMail(sender, [NewMail(name, f"{sender}/{number}".encode(), id_of())]))
                await asyncio.sleep(0)

        async with Agent(hub, name) as bob:
            racing = [asyncio.create_task(race(f"racer-{number}")) for number in range(3)]
            taken = 0
            while taken < 180:
                await until(lambda: len(bob.mails) > taken)  # noqa: B023
                new = bob.mails[taken:]
                bob.confirm(*new)
                taken += len(new)
            await asyncio.gather(*racing)
            assert [mail.sequence for mail in bob.mails] == list(range(180))
            for sender in ("racer-0", "racer-1", "racer-2"):
                numbers = [int(body.split(b"/")[1]) for body in bob.bodies if body.startswith(sender.encode())]
                assert numbers == list(range(40))


async def test_a_mail_is_stored_and_delivered_by_one_commit(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob:
        await quiet()
        commits.rounds.clear()
        ada.send("bob")
        await bob.get(1)
        assert [type(request) for request in commits.rounds[0]] == [SendMail, ReadMail]  # Receipts are read later.


async def test_a_session_that_has_everything_does_not_look_again(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob:
        ada.send("bob")
        bob.confirm(*await bob.get(1))
        await until(lambda: ada.all(DeliveryConfirm))
        await quiet()
        commits.rounds.clear()
        await quiet()
        assert commits.rounds == []


async def test_more_sends_than_one_batch_takes_are_all_answered(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    async with Agent(hub, "ada") as ada:
        ids = [id_of() for _ in range(MAIL_BATCH_MAX + 50)]
        ada.session.receive([Send(id, "bob", Body(b"x")) for id in ids])
        await until(lambda: len(ada.all(Sent)) == len(ids))
        assert [sent.message_id for sent in ada.all(Sent)] == ids
        assert await pending(transport) == len(ids)


async def test_a_round_takes_a_bounded_number_of_one_agents_confirms(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "bob") as bob:
        ids = [f"x{number}" for number in range(MAIL_BATCH_MAX)]
        bob.session.receive([Confirm(ids)] * 20)
        await until(lambda: commits.count(ConfirmMail) == RELAY_CONFIRMS_MAX // MAIL_BATCH_MAX)
        assert max(sum(isinstance(each, ConfirmMail) for each in round) for round in commits.rounds) == 1
        assert {error.code for error in bob.all(Error)} == {"busy"}


async def test_a_sender_whose_round_is_held_up_is_not_overtaken_by_itself(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob, Agent(hub, "eve") as eve:
        await quiet()
        first = asyncio.Event()
        commits.held.append(first)
        ada.send("bob", b"1")
        await until(lambda: not commits.held)
        ada.send("bob", b"2")
        await store(transport, 1, to="ada", sender="carol")  # Which wakes her session.
        eve.send("bob", b"other")
        await until(lambda: eve.all(Sent))  # Others are not held up.
        await quiet()
        assert not ada.all(Sent)
        first.set()
        await bob.get(3)
        assert bob.bodies.index(b"1") < bob.bodies.index(b"2")
        assert [mail.sequence for mail in bob.mails] == [0, 1, 2]


async def test_a_mailbox_is_not_read_twice_at_a_time(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        gate = asyncio.Event()
        commits.held.append(gate)
        await store(transport, 1)
        await until(lambda: not commits.held)
        await store(transport, 1)  # It hears of this one while it reads.
        await quiet()
        gate.set()
        await bob.get(2)
        await quiet()
        assert [mail.sequence for mail in bob.mails] == [0, 1]


async def test_mail_that_is_gone_before_it_was_read_is_not_looked_for_again(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        gate = asyncio.Event()
        commits.held.append(gate)
        [sent] = (await transport.call(SendMail("ada", [NewMail("bob", b"x", id_of())]))).mails
        await until(lambda: not commits.held)
        await transport.call(ConfirmMail("bob", [sent.id]))
        gate.set()
        await quiet()
        commits.rounds.clear()
        await quiet()
        assert (bob.mails, commits.rounds) == ([], [])
        await store(transport, 1)
        await bob.get(1)


# What is not confirmed.


async def test_nothing_is_removed_before_it_is_confirmed(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    """Lesson 20: what is in flight is neither deleted nor sent again."""
    await store(transport, 10)
    async with Agent(hub, "bob") as bob:
        await bob.get(10)
        await quiet()
        assert (len(bob.mails), await pending(transport)) == (10, 10)
        bob.confirm(*bob.mails[:4])
        await until(lambda: len(bob.session.in_flight) == 6)
        assert await pending(transport) == 6
    async with Agent(hub, "bob") as again:
        assert again.frames[1] == QueueStatus(6)
        await again.get(6)
        assert [mail.sequence for mail in again.mails] == [4, 5, 6, 7, 8, 9]
        assert all(mail.stored for mail in again.mails)


async def test_a_session_has_a_bounded_number_in_flight(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await store(transport, 2 * RELAY_IN_FLIGHT_MAX)
    async with Agent(hub, "bob") as bob:
        await bob.get(RELAY_IN_FLIGHT_MAX)
        await quiet()
        assert len(bob.mails) == RELAY_IN_FLIGHT_MAX
        bob.confirm(bob.mails[7])
        await bob.get(RELAY_IN_FLIGHT_MAX + 1)
        await quiet()
        assert len(bob.mails) == RELAY_IN_FLIGHT_MAX + 1
        for first in range(0, 250, 50):
            bob.confirm(*bob.mails[first : first + 50])
        await bob.get(2 * RELAY_IN_FLIGHT_MAX - 10)
        assert [mail.sequence for mail in bob.mails] == list(range(len(bob.mails)))


async def test_confirms_that_come_late_or_twice_or_for_nothing_do_no_harm(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 3)
    async with Agent(hub, "bob") as bob:
        first = await bob.get(3)
    async with Agent(hub, "bob") as bob, Agent(hub, "ada") as ada:
        bob.confirm(*first)
        await until(lambda: len(ada.all(DeliveryConfirm)) == 3)
        bob.session.receive([Confirm([first[0].message_id, "never-was"])])
        bob.confirm(*first)
        assert await pending(transport) == 0
        await quiet()
        assert len(ada.all(DeliveryConfirm)) == 3
        assert not bob.all(Error)


async def test_a_confirmation_that_fails_is_made_good(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits, clock: ManualClock
) -> None:
    await store(transport, 2)
    async with Agent(hub, "bob") as bob:
        await bob.get(2)
        commits.failing = Unreachable("gone")
        bob.confirm(*bob.mails)
        await until(lambda: bob.session.retry_at_ms)
        commits.failing = None
        await quiet()
        assert await pending(transport) == 2
        clock.advance_ms(round(RELAY_RETRY_SECONDS * 1_000))
        hub.tick()
        await until(lambda: not bob.session.in_flight)
        assert await pending(transport) == 0


# Readers that do not read.


async def test_mail_for_a_slow_reader_stays_stored_and_nobody_else_notices(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    """Lesson 20: mail was lost when the send buffer filled."""
    await store(transport, 200, body=b"x" * 10_000)
    async with Agent(hub, "bob", reads=False) as bob, Agent(hub, "ada") as ada, Agent(hub, "eve") as eve:
        await quiet()
        held = len(bob.session.in_flight)
        assert held * 10_000 < RELAY_UNSENT_BYTES_MAX + 2 * RELAY_FLUSH_BYTES
        for _ in range(50):
            ada.send("eve")
            ada.send("bob", b"y")
        await eve.get(50)
        await until(lambda: len(ada.all(Sent)) == 100)
        await quiet()
        assert len(bob.session.in_flight) == held
        bob.reading.set()
        taken = 0
        while taken < 250:
            await until(lambda: len(bob.mails) > taken)  # noqa: B023
            new = bob.mails[taken:]
            bob.confirm(*new)
            taken += len(new)
        assert [mail.sequence for mail in bob.mails] == list(range(250))


async def test_an_agent_that_does_not_hear_its_answers_is_not_heard(hub: RelayHub) -> None:
    async with Agent(hub, "ada", reads=False) as ada:
        for _ in range(100):
            ada.session.receive([Send("no id\n", "bob") for _ in range(20)])
            if ada.session.is_full:
                break
        assert ada.session.is_full
        waiting = asyncio.create_task(ada.session.wait_for_capacity())
        await quiet()
        assert not waiting.done()
        ada.reading.set()
        await asyncio.wait_for(waiting, DEADLINE_SECONDS)


async def test_an_agent_waits_while_what_it_sends_is_not_stored(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "ada") as ada:
        await quiet()
        gate = asyncio.Event()
        commits.held.append(gate)
        ada.send("bob")
        await until(lambda: not commits.held)
        ada.session.receive([Send(id_of(), "bob") for _ in range(RELAY_SENDS_MAX)])
        waiting = asyncio.create_task(ada.session.wait_for_capacity())
        await quiet()
        assert not waiting.done()
        gate.set()
        await asyncio.wait_for(waiting, DEADLINE_SECONDS)
        await until(lambda: len(ada.all(Sent)) == RELAY_SENDS_MAX + 1)


# Who reads.


async def test_a_new_session_takes_over(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await store(transport, 5)
    async with Agent(hub, "bob") as old:
        await old.get(5)
        old.confirm(old.mails[0])
        await until(lambda: len(old.session.in_flight) == 4)
        async with Agent(hub, "bob") as new:
            await until(lambda: old.session.ended)
            assert old.session.ended == (REPLACED, "replaced")
            await until(lambda: isinstance(old.frames[-1], Replaced))
            await new.get(4)
            await store(transport, 3)
            await new.get(7)
            assert [mail.sequence for mail in new.mails] == [1, 2, 3, 4, 5, 6, 7]
            assert len(old.mails) == 5
            old.confirm(*old.mails)  # Late, and good all the same.
            await until(lambda: hub.sessions[Address("main", "bob")] is new.session)
        assert new.session.ended is not None


async def test_a_reader_elsewhere_takes_over_at_once(
    transport: AsyncEmbeddedTransport, hub: RelayHub, clock: ManualClock
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        await transport.call(JoinMailbox("bob", "somebody-else"))
        await until(lambda: bob.session.ended)
        assert bob.session.ended == (REPLACED, "replaced")
    assert (await transport.call(CountMail("bob"))).joined, "whoever was replaced does not leave for its successor"


async def test_a_slow_session_is_replaced_too(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await store(transport, 200, body=b"x" * 10_000)
    async with Agent(hub, "bob", reads=False) as bob:
        await quiet()
        assert not bob.session.accepts_mail
        await transport.call(JoinMailbox("bob", "somebody-else"))
        await until(lambda: bob.session.ended)


async def test_whoever_joins_and_is_gone_leaves_no_reader_behind(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    gate = asyncio.Event()
    commits.held.append(gate)
    joining = asyncio.create_task(hub.join("main", "bob", lambda request: None))
    await until(lambda: not commits.held)
    joining.cancel()
    await asyncio.wait({joining})
    gate.set()
    await until(lambda: len(commits.rounds) == 2)
    await quiet()
    assert not hub.sessions
    assert not (await transport.call(CountMail("bob"))).joined


async def test_what_was_asked_for_before_a_connection_ended_is_done(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 1)
    async with Agent(hub, "bob") as bob:
        await bob.get(1)
        bob.confirm(*bob.mails)
        bob.send("ada", b"last words")
    async with Agent(hub, "ada") as ada:
        await ada.get(1)
        assert ada.bodies == [b"last words"]
        await until(lambda: ada.all(DeliveryConfirm))
    assert await pending(transport) == 0


async def test_closing_commits_what_was_asked_for_and_leaves(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    async with Agent(hub, "bob") as bob:
        bob.send("ada", b"last words")
        await hub.close()
        assert bob.session.ended == (STOPPING, "gone")
    assert await pending(transport, "ada") == 1
    assert not (await transport.call(CountMail("bob"))).joined


# Heartbeats.


async def test_whoever_is_silent_is_asked_and_then_given_up(hub: RelayHub, clock: ManualClock) -> None:
    async with Agent(hub, "bob") as bob:
        clock.advance_ms(round(RELAY_PING_SECONDS * 1_000) - 1)
        hub.tick()
        await quiet()
        assert not bob.all(Ping)
        clock.advance_ms(1)
        hub.tick()
        await until(lambda: bob.all(Ping))
        clock.advance_ms(round(RELAY_PONG_SECONDS * 1_000) - 1)
        hub.tick()
        assert bob.session.ended is None
        clock.advance_ms(1)
        hub.tick()
        assert bob.session.ended == (TOO_SLOW, "no pong")


@pytest.mark.parametrize("sign", [Pong(), Ping(), Confirm([])], ids=lambda frame: type(frame).__name__)
async def test_any_frame_is_a_sign_of_life(hub: RelayHub, clock: ManualClock, sign: Any) -> None:
    async with Agent(hub, "bob") as bob:
        for _ in range(3):
            clock.advance_ms(round(RELAY_PING_SECONDS * 1_000))
            hub.tick()
            clock.advance_ms(round(RELAY_PONG_SECONDS * 1_000) - 1)
            bob.session.receive([sign])
            hub.tick()
        await until(lambda: len(bob.all(Ping)) == 3)
        assert bob.session.ended is None
        assert bool(bob.all(Pong)) == isinstance(sign, Ping)


# Refusals.


async def test_refusals_reach_the_sender_and_disturb_nobody(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await transport.call(BlockSender("eve", "ada"))
    async with Agent(hub, "ada") as ada:
        frames = [
            Send("good-1", "bob", Body(b"x")),
            Send("blocked", "eve", Body(b"x")),
            Send("large", "bob", Body(bytes(65_537))),
            Send("nobody", "no such name!", Body(b"x")),
            Send("elsewhere", "bob@other", Body(b"x")),
            Send("forged", "bob", Body(b"x"), sender="eve"),
            Send("own", "bob", Body(b"x"), sender="ada@main"),
            Send("short", "bob", Body(b"x"), sender="ada"),
            Send("", "bob", Body(b"x")),
            Send("good-2", "bob", Body(b"x")),
        ]
        ada.session.receive(frames)
        await until(lambda: len(ada.all(Sent | Error)) == len(frames))  # type: ignore[arg-type]
        errors = {error.message_id: (error.code, error.retry) for error in ada.all(Error)}
        assert errors == {
            "blocked": ("sender_blocked", "never"),
            "large": ("payload_too_large", "never"),
            "nobody": ("invalid_name", "never"),
            "elsewhere": ("invalid_name", "never"),
            "forged": ("sender_mismatch", "never"),
            "": ("invalid_argument", "never"),
        }
        assert {sent.message_id for sent in ada.all(Sent)} == {"good-1", "good-2", "own", "short"}


async def test_a_full_mailbox_is_an_error_to_the_sender(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await transport.call(SetMailPolicy(MailPolicy(pending_max=2)))
    async with Agent(hub, "ada") as ada:
        answers = [await ada.answer(ada.send("bob")) for _ in range(3)]
        assert [type(answer) for answer in answers] == [Sent, Sent, Error]
        assert (answers[2].code, answers[2].retry) == ("queue_full", "later")


async def test_a_mail_that_is_sent_again_is_stored_once(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada:
        ada.send("bob", id="same")
        ada.send("bob", id="same")
        await until(lambda: len(ada.all(Sent)) == 2)
        assert [(sent.duplicate, sent.durability) for sent in ada.all(Sent)] == [
            (False, "critical"),
            (True, "critical"),
        ]
        assert await pending(transport) == 1


async def test_what_cannot_be_stored_is_said_of_every_mail(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "ada") as ada:
        await quiet()
        commits.failing = Unreachable("gone")
        ids = [id_of() for _ in range(3)]
        ada.session.receive([Send(id, "bob") for id in ids])
        await until(lambda: len(ada.all(Error)) == 3)
        assert [(error.message_id, error.code) for error in ada.all(Error)] == [(id, "unreachable") for id in ids]


async def test_a_mailbox_that_cannot_be_read_is_read_later(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits, clock: ManualClock
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        commits.failing = Unreachable("gone")
        await store(transport, 1)
        await until(lambda: bob.session.retry_at_ms)
        commits.failing = None
        await quiet()
        assert not bob.mails
        clock.advance_ms(round(RELAY_RETRY_SECONDS * 1_000))
        hub.tick()
        await bob.get(1)
        assert bob.session.ended is None


async def test_a_round_that_fails_in_a_way_that_nobody_thought_of_is_answered(
    hub: RelayHub, commits: Commits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Agent(hub, "ada") as ada:
        await quiet()

        async def broken(calls: list[Call]) -> list[Any]:
            raise RuntimeError("secret")

        monkeypatch.setattr(hub, "_commit", broken)
        answer = await ada.answer(ada.send("bob"))
        assert isinstance(answer, Error)
        assert "secret" not in answer.detail
        assert "secret" in caplog.text
        monkeypatch.setattr(hub, "_commit", commits)
        assert isinstance(await ada.answer(ada.send("bob")), Sent)


async def test_whoever_may_not_is_told_so(hub: RelayHub) -> None:
    def authorize(request: Request[Any]) -> None:
        if isinstance(request, SendMail | ConfirmMail):
            raise NotAllowed("you may only read")

    async with Agent(hub, "ada", authorize=authorize) as ada:
        answer = await ada.answer(ada.send("bob"))
        assert answer.code == "not_allowed"
        ada.session.receive([Confirm(["x"])])
        await until(lambda: len(ada.all(Error)) == 2)


async def test_a_session_does_not_become_another(hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada:
        ada.session.receive([Authenticate("eve")])
        await until(lambda: ada.all(Error))
        assert ada.all(Error)[0].code == "invalid_argument"


async def test_confirms_of_no_ids_are_refused_by_themselves(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await store(transport, 1)
    async with Agent(hub, "bob") as bob:
        await bob.get(1)
        many = [f"x{number}" for number in range(MAIL_BATCH_MAX + 1)]
        bob.session.receive([Confirm(["bad\n"]), Confirm(many), Confirm([bob.mails[0].message_id])])
        await until(lambda: len(bob.all(Error)) == 2)
        await until(lambda: not bob.session.in_flight)
        assert await pending(transport) == 0


async def test_a_server_that_stops_takes_confirmations_and_no_mail(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 1)
    async with Agent(hub, "bob") as bob:
        await bob.get(1)
        hub.drain()
        await until(lambda: bob.all(Draining))
        answer = await bob.answer(bob.send("ada"))
        assert (answer.code, answer.retry) == ("shutdown_draining", "later")
        bob.confirm(*bob.mails)
        await until(lambda: not bob.session.in_flight)
        with pytest.raises(ShutdownDraining):
            await hub.join("main", "eve", lambda request: None)
    assert await pending(transport) == 0


# Receipts.


async def test_a_sender_that_was_away_hears_what_became_of_its_mail(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    async with Agent(hub, "ada") as ada:
        ids = [ada.send("bob") for _ in range(3)]
        await ada.answer(ids[-1])
    async with Agent(hub, "bob") as bob:
        bob.confirm(*await bob.get(3))
        await until(lambda: not bob.session.in_flight)
    async with Agent(hub, "ada") as ada:
        await until(lambda: len(ada.all(DeliveryConfirm)) == 3)
        told = ada.all(DeliveryConfirm)
        assert [(each.message_id, each.to, each.was_stored) for each in told] == [(id, "bob@main", True) for id in ids]
        ada.session.receive([ReceiptsSeen(told[1].sequence)])
        await until(lambda: ada.session.unsaved_receipts_seen is None)
        await quiet()
    async with Agent(hub, "ada") as ada:
        assert ada.all(Welcome)[0].receipts_seen == told[1].sequence
        await until(lambda: ada.all(DeliveryConfirm))
        await quiet()
        assert ada.all(DeliveryConfirm) == told[2:]
    async with Agent(hub, "ada", receipts_after=told[0].sequence) as ada:
        await until(lambda: len(ada.all(DeliveryConfirm)) == 2)
        assert ada.all(DeliveryConfirm) == told[1:]


async def test_a_place_in_the_receipts_that_never_was_is_an_error_and_no_end(hub: RelayHub) -> None:
    async with Agent(hub, "ada", receipts_after=1_000) as ada:
        await until(lambda: ada.all(Error))
        assert ada.all(Error)[0].code == "invalid_argument"
        ada.send("ada")
        ada.confirm(*await ada.get(1))
        await until(lambda: ada.all(DeliveryConfirm))
        ada.session.receive([ReceiptsSeen(1_000)])
        await until(lambda: len(ada.all(Error)) == 2)


async def test_what_others_confirm_is_heard_of(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada:
        id = ada.send("bob")
        await ada.answer(id)
        await transport.call(ConfirmMail("bob", [id]))
        await until(lambda: ada.all(DeliveryConfirm))
        assert ada.all(DeliveryConfirm)[0].message_id == id


async def test_mail_that_came_live_was_not_stored(hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob:
        await quiet()
        ada.send("bob")
        bob.confirm(*await bob.get(1))
        await until(lambda: ada.all(DeliveryConfirm))
        assert [bob.mails[0].stored, ada.all(DeliveryConfirm)[0].was_stored] == [False, False]


async def test_more_receipts_than_one_read_takes(hub: RelayHub) -> None:
    async with Agent(hub, "bob") as bob:
        async with Agent(hub, "ada") as ada:
            for first in range(0, 200, 20):
                ada.session.receive([Send(id_of(), "bob") for _ in range(20)])
                await bob.get(first + 20)
                bob.confirm(*bob.mails[first:])
            await until(lambda: not bob.session.in_flight)
        async with Agent(hub, "ada", receipts_after=-1) as ada:
            await until(lambda: len(ada.all(DeliveryConfirm)) == 200)


# Rates.


async def test_a_sender_that_is_too_fast_is_told_when_to_come_again(
    transport: AsyncEmbeddedTransport, commits: Commits, clock: ManualClock
) -> None:
    hub = RelayHub(transport.services.database, commits, rate_per_second=2.0, burst=3, clock=clock)
    async with Agent(hub, "ada") as ada, Agent(hub, "eve") as eve:
        answers = [await ada.answer(ada.send("bob")) for _ in range(4)]
        assert [type(answer) for answer in answers] == [Sent, Sent, Sent, RateLimited]
        assert answers[3].retry_after_ms == 500
        assert isinstance(await eve.answer(eve.send("bob")), Sent)
        clock.advance_ms(500)
        assert isinstance(await ada.answer(ada.send("bob")), Sent)
        assert isinstance(await ada.answer(ada.send("bob")), RateLimited)
    await hub.close()


def test_a_bucket_fills_up_to_its_burst(clock: ManualClock) -> None:
    rate_limiter = RateLimiter(10.0, 5, callers_max=100, clock=clock)
    assert [rate_limiter.wait_ms("a") for _ in range(6)] == [0] * 5 + [100]
    clock.advance_ms(100)
    assert [rate_limiter.wait_ms("a") for _ in range(2)] == [0, 100]
    clock.advance_ms(60_000)
    assert [rate_limiter.wait_ms("a") for _ in range(6)] == [0] * 5 + [100]
    assert [RateLimiter(0.0, 1, callers_max=1, clock=clock).wait_ms("a") for _ in range(100)] == [0] * 100


def test_the_table_of_senders_is_pruned_and_bounded(clock: ManualClock) -> None:
    """Lesson 4: memory grew with every peer ever seen."""
    rate_limiter = RateLimiter(10.0, 5, callers_max=1_000, clock=clock)
    for number in range(5_000):
        assert rate_limiter.wait_ms(number) == 0
    assert len(rate_limiter) <= 1_000
    clock.advance_ms(1_000)
    for _ in range(600):
        rate_limiter.wait_ms("a")
    assert len(rate_limiter) == 1, "whoever is quiet is forgotten"


# Ears.


@pytest.fixture(params=[0, 6], ids=["one universe", "many universes"])
async def ears(hub: RelayHub, request: pytest.FixtureRequest) -> tuple[CommitListener, list[Any]]:
    told: list[Any] = []

    def tell(session: Session, *what: Any) -> None:
        if session.address.universe == "main":
            told.append((session.address.agent, *what))

    ears = CommitListener(
        lambda session, sequence: tell(session, "mail", sequence),
        lambda session, sequence: tell(session, "receipt", sequence),
        lambda session: tell(session, "look"),
    )
    for agent in ("bob", "bobby"):
        ears.add_session(Session(hub, Address("main", agent), "s", lambda request: None))
    for number in range(request.param):
        ears.add_session(Session(hub, Address(f"main-{number}", "bob"), "s", lambda request: None))
    return ears, told


def notified(key: bytes) -> tuple[bytes, bytes]:
    return key, key[:-1] + bytes((key[-1] + 1,))


async def test_keys_say_whom_they_concern_and_how_far(ears: tuple[CommitListener, list[Any]]) -> None:
    subscribing, told = ears
    bob, bobby, eve = (keys_of(Address("main", agent)) for agent in ("bob", "bobby", "eve"))
    elsewhere = keys_of(Address("other", "bob"))
    subscribing.on_commit([bob.mail_key(7), bobby.receipt_key(3), eve.mail_key(1), bob.box, bob.id_key("12345678m")], ())
    subscribing.on_commit([bob.reader, elsewhere.mail_key(9), elsewhere.reader, b"m", b""], ())
    assert told == [("bob", "mail", 7), ("bobby", "receipt", 3), ("bob", "look")]
    told.clear()
    keys = [bob.mail_key(7), bobby.receipt_key(3), eve.mail_key(1), bob.box, bob.outgoing, bob.id_key("x"), bob.reader]
    subscribing.on_commit((), [notified(key) for key in keys])
    assert told == [("bob", "mail", 7), ("bobby", "receipt", 3), ("bob", "look")]


async def test_keys_that_were_cut_short_concern_everybody_whom_they_may(ears: tuple[CommitListener, list[Any]]) -> None:
    subscribing, told = ears
    bob = keys_of(Address("main", "bob"))
    key = bob.mail_key(7)
    for length in range(1, len(key) + 1):
        told.clear()
        subscribing.on_commit((), [notified(key[:length])])
        assert ("bob", "mail", 7) in told or ("bob", "look") in told, length
        assert length < len(bob.prefix) or not [each for each in told if each[0] == "bobby"]
    told.clear()
    subscribing.on_commit((), [(b"", b"\xff" * 100)])
    assert sorted(told) == [("bob", "look"), ("bobby", "look")]
    told.clear()
    subscribing.on_commit((), [(b"\x02u\x00\x02other", b"\x02u\x00\x02other\xff"), notified(b"\x02q\x00")])
    assert told == []


async def test_those_who_left_are_not_told(hub: RelayHub, ears: tuple[CommitListener, list[Any]]) -> None:
    subscribing, told = ears
    room = keys_of(Address("main", "bob"))
    subscribing.remove_session(Session(hub, Address("main", "bob"), "s", lambda request: None))
    subscribing.on_commit([room.mail_key(1), room.receipt_key(1), room.reader], [notified(room.prefix)])
    assert told == []


async def test_commits_of_other_threads_are_heard_on_the_loop(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        work = (mailboxes.send, Address("main", "ada"), Address("main", "bob"), NewMail("bob", b"x", "id"))
        await asyncio.to_thread(transport.services.database.transact, *work)
        await bob.get(1)


# Frames.


def test_frames_cross_the_wire() -> None:
    send = Send("id", "bob", Body(bytes(range(256))), correlation_id="c")
    for frames in ([send], [send, Ping()]):
        assert relay.decode(relay.encode(frames, "msgpack")) == frames
        assert relay.decode(relay.encode(frames, "json").decode()) == frames
    assert b'"body":"-__-"' in relay.encode([Send("id", "bob", Body(b"\xfb\xff\xfe"))], "json")
    assert relay.decode('{"type":"send","message_id":"a","to":"b","body":"aGk="}') == [Send("a", "b", Body(b"hi"))]


@pytest.mark.parametrize("body", ["a+b/", "a", "not base64!", "ä", 7, None, ["a"]], ids=repr)
def test_what_is_no_base64url_is_refused_by_its_id(body: Any) -> None:
    data = msgspec.json.encode(
        [{"type": "ping"}, {"type": "send", "message_id": "x", "to": "b", "body": body}]
    ).decode()
    ping, error = relay.decode(data)
    assert ping == Ping()
    assert isinstance(error, Error)
    assert (error.code, error.message_id) == ("invalid_frame", "x")


@pytest.mark.parametrize("frame", [{"type": "fly"}, {}, 7, {"type": "ping", "more": 1}, {"type": "mail"}], ids=repr)
def test_frames_that_nobody_knows_are_errors(frame: Any) -> None:
    [error] = relay.decode(msgspec.msgpack.encode(frame))
    assert isinstance(error, Error)
    assert error.code == "invalid_frame"


def test_batches_are_of_fifty() -> None:
    assert RELAY_FLUSH_MAILS == 50


class Failing:
    """Raises the first time that it is called, in a way that nobody thought of, and does its work from then on."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.struck = False
        self._work = work

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.struck:
            self.struck = True
            raise ZeroDivisionError
        return self._work(*args, **kwargs)


@pytest.mark.parametrize("step", ["_fill_batch", "_on_write_done", "_on_mail_read"])
async def test_mail_goes_on_when_a_step_of_a_round_fails(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "cyd") as cyd, Agent(hub, "bob") as bob:
        await quiet()
        failing = Failing(getattr(hub, step))
        monkeypatch.setattr(hub, step, failing)
        ada.send("bob", b"lost, perhaps")
        await until(lambda: failing.struck)
        await quiet()
        last = bob
        if bob.session.ended is not None:  # It was its read that failed, and its agent connects again.
            last = Agent(hub, "bob")
            await last.__aenter__()
        cyd.send("bob", b"after it")
        await until(lambda: b"after it" in last.bodies)
        if last is not bob:
            await last.__aexit__()


@pytest.mark.parametrize("method", ["next_writes", "flush", "on_sent"])
async def test_a_session_that_fails_is_ended_and_the_others_of_its_round_go_on(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "cyd") as cyd, Agent(hub, "bob") as bob:
        await quiet()
        monkeypatch.setattr(ada.session, method, Failing(getattr(ada.session, method)))
        ada.send("bob", b"of ada")
        cyd.send("bob", b"of cyd")
        await until(lambda: b"of cyd" in bob.bodies)
        await until(lambda: ada.session.ended == (STOPPING, "failed"))
        assert not ada.session.is_busy
        assert cyd.session.ended is None
    async with Agent(hub, "ada") as again:
        assert isinstance(await again.answer(again.send("bob")), Sent)


@pytest.mark.parametrize("name", ["read_mail", "read_receipts"])
async def test_a_session_that_cannot_read_keeps_nobody_behind_it_from_reading(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob, Agent(hub, "cyd") as cyd:
        await quiet()
        work = getattr(relay_hub, name)

        def reads(session: Session, *args: Any) -> Any:
            if session is bob.session:
                raise ZeroDivisionError
            return work(session, *args)

        monkeypatch.setattr(relay_hub, name, reads)
        bob.session.must_recheck = bob.session.may_have_receipts = True
        ada.send("cyd", b"x")
        hub.wake(bob.session)
        await cyd.get(1)
        await until(lambda: bob.session.ended == (STOPPING, "failed"))
        assert not bob.session.is_busy


async def test_a_join_that_fails_in_a_way_that_nobody_thought_of_is_told_and_the_next_one_succeeds(
    hub: RelayHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Agent(hub, "ada") as ada:
        assert hub._commit_listener is not None
        monkeypatch.setattr(hub._commit_listener, "add_session", Failing(hub._commit_listener.add_session))
        with pytest.raises(HoldfastError, match="see its log"):
            async with asyncio.timeout(DEADLINE_SECONDS):
                await hub.join("main", "bob", None)
        assert Address("main", "bob") not in hub.sessions
        async with Agent(hub, "bob") as bob:
            ada.send("bob", b"x")
            await bob.get(1)


async def test_a_hub_that_could_not_hear_tries_again(hub: RelayHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub._database, "subscribe", Failing(hub._database.subscribe))
    with pytest.raises(ZeroDivisionError):
        await hub.join("main", "bob", None)
    async with Agent(hub, "bob") as bob, Agent(hub, "ada") as ada:
        ada.send("bob", b"x")
        await bob.get(1)


async def test_ticks_go_on_when_one_fails_and_a_session_that_fails_does_not_hold_up_the_others(
    hub: RelayHub, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_hub, "_TICK_SECONDS", 0.001)
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob:
        failing = Failing(hub.tick)
        monkeypatch.setattr(hub, "tick", failing)
        await until(lambda: failing.struck)
        monkeypatch.setattr(ada.session, "push", Failing(ada.session.push))
        clock.advance_ms(round(RELAY_PING_SECONDS * 1_000))
        await until(lambda: bob.all(Ping))
        assert ada.session.ended == (STOPPING, "failed")


async def test_a_commit_that_answers_nothing_is_answered(hub: RelayHub, commits: Commits, monkeypatch: Any) -> None:
    async def nothing(calls: list[Call]) -> list[Any]:
        return []

    async with Agent(hub, "ada") as ada:
        await quiet()
        monkeypatch.setattr(hub, "_commit", nothing)
        id = ada.send("bob")
        assert isinstance(await ada.answer(id), Error)
        monkeypatch.setattr(hub, "_commit", commits)
        assert isinstance(await ada.answer(ada.send("bob")), Sent)
