"""Relay sessions without sockets: the order of mail, confirmations, limits, takeovers, errors and receipts."""

import asyncio
from typing import Any

import pytest

from fastness.errors import NotAllowed, ShutdownDraining, Unreachable
from fastness.layers.mailboxes import Address
from fastness.limits import (
    MAIL_BATCH_MAX,
    RELAY_CONFIRMS_MAX,
    RELAY_FLUSH_BYTES,
    RELAY_IN_FLIGHT_MAX,
    RELAY_PING_SECONDS,
    RELAY_PONG_SECONDS,
    RELAY_RETRY_SECONDS,
    RELAY_SENDS_MAX,
    RELAY_UNSENT_BYTES_MAX,
)
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.runtime.relay.hub import RelayHub
from fastness.runtime.relay.session import REPLACED, STOPPING, TOO_SLOW
from fastness.testing.clock import ManualClock
from fastness.wire.mail import (
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
from fastness.wire.relay import (
    Authenticate,
    Body,
    Confirm,
    DeliveryConfirm,
    Draining,
    Error,
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
from fastness.wire.requests import Request
from tests.support.waiting import eventually_async
from tests.unit import relay_fixtures
from tests.unit.relay_fixtures import DEADLINE_SECONDS, Agent, Commits, id_of, pending, quiet, store

transport = relay_fixtures.transport
commits = relay_fixtures.commits
hub = relay_fixtures.hub


# Order.


async def test_stored_mail_is_delivered_in_order_before_live_mail(
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


async def test_a_read_returns_fifty_mails(transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits) -> None:
    await store(transport, 120)
    async with Agent(hub, "bob") as bob:
        await bob.get(120)
    reads = [request for batch in commits.batches for request in batch if isinstance(request, ReadMail)]
    assert [(read.after, read.limit) for read in reads[:3]] == [(-1, 50), (49, 50), (99, 50)]


async def test_mail_sent_during_the_switch_to_live_delivery_keeps_its_order(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    """No mail is lost between the last stored read and live delivery, and live mail never comes before stored mail."""
    for attempt in range(10):
        name = f"bob-{attempt}"
        await store(transport, 60, to=name)

        async def race(sender: str, name: str = name) -> None:
            for number in range(40):
                await transport.call(SendMail(sender, [NewMail(name, f"{sender}/{number}".encode(), id_of())]))
                await asyncio.sleep(0)

        async with Agent(hub, name) as bob:
            racing = [asyncio.create_task(race(f"racer-{number}")) for number in range(3)]
            taken = 0
            while taken < 180:
                await eventually_async(lambda: len(bob.mails) > taken)  # noqa: B023
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
        commits.batches.clear()
        ada.send("bob")
        await bob.get(1)
        assert [type(request) for request in commits.batches[0]] == [SendMail, ReadMail]  # Receipts are read later.


async def test_a_session_without_new_mail_does_not_read(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob:
        ada.send("bob")
        bob.confirm(*await bob.get(1))
        await eventually_async(lambda: ada.all(DeliveryConfirm))
        await quiet()
        commits.batches.clear()
        await quiet()
        assert commits.batches == []


async def test_more_sends_than_one_batch_are_all_answered(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada:
        ids = [id_of() for _ in range(MAIL_BATCH_MAX + 50)]
        ada.session.receive([Send(id, "bob", Body(b"x")) for id in ids])
        await eventually_async(lambda: len(ada.all(Sent)) == len(ids))
        assert [sent.message_id for sent in ada.all(Sent)] == ids
        assert await pending(transport) == len(ids)


async def test_a_batch_takes_a_bounded_number_of_confirms_per_agent(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "bob") as bob:
        ids = [f"x{number}" for number in range(MAIL_BATCH_MAX)]
        bob.session.receive([Confirm(ids)] * 20)
        await eventually_async(lambda: commits.count(ConfirmMail) == RELAY_CONFIRMS_MAX // MAIL_BATCH_MAX)
        assert max(sum(isinstance(each, ConfirmMail) for each in batch) for batch in commits.batches) == 1
        assert {error.code for error in bob.all(Error)} == {"busy"}


async def test_a_delayed_batch_does_not_reorder_the_mail_of_a_sender(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob, Agent(hub, "eve") as eve:
        await quiet()
        first = asyncio.Event()
        commits.held.append(first)
        ada.send("bob", b"1")
        await eventually_async(lambda: not commits.held)
        ada.send("bob", b"2")
        await store(transport, 1, to="ada", sender="carol")  # Wakes ada's session.
        eve.send("bob", b"other")
        await eventually_async(lambda: eve.all(Sent))  # Other senders are not delayed.
        await quiet()
        assert not ada.all(Sent)
        first.set()
        await bob.get(3)
        assert bob.bodies.index(b"1") < bob.bodies.index(b"2")
        assert [mail.sequence for mail in bob.mails] == [0, 1, 2]


async def test_a_mailbox_has_one_read_at_a_time(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        gate = asyncio.Event()
        commits.held.append(gate)
        await store(transport, 1)
        await eventually_async(lambda: not commits.held)
        await store(transport, 1)  # Reported while a read is in progress.
        await quiet()
        gate.set()
        await bob.get(2)
        await quiet()
        assert [mail.sequence for mail in bob.mails] == [0, 1]


async def test_mail_removed_before_it_was_read_causes_no_further_reads(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        gate = asyncio.Event()
        commits.held.append(gate)
        [sent] = (await transport.call(SendMail("ada", [NewMail("bob", b"x", id_of())]))).mails
        await eventually_async(lambda: not commits.held)
        await transport.call(ConfirmMail("bob", [sent.id]))
        gate.set()
        await quiet()
        commits.batches.clear()
        await quiet()
        assert (bob.mails, commits.batches) == ([], [])
        await store(transport, 1)
        await bob.get(1)


# Confirmations.


async def test_mail_is_removed_only_when_confirmed(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    """Mail in flight is neither removed nor sent again."""
    await store(transport, 10)
    async with Agent(hub, "bob") as bob:
        await bob.get(10)
        await quiet()
        assert (len(bob.mails), await pending(transport)) == (10, 10)
        bob.confirm(*bob.mails[:4])
        await eventually_async(lambda: len(bob.session.in_flight) == 6)
        assert await pending(transport) == 6
    async with Agent(hub, "bob") as again:
        assert again.frames[1] == QueueStatus(6)
        await again.get(6)
        assert [mail.sequence for mail in again.mails] == [4, 5, 6, 7, 8, 9]
        assert all(mail.stored for mail in again.mails)


async def test_mail_in_flight_is_bounded_per_session(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
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


async def test_late_repeated_and_unknown_confirms_are_harmless(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 3)
    async with Agent(hub, "bob") as bob:
        first = await bob.get(3)
    async with Agent(hub, "bob") as bob, Agent(hub, "ada") as ada:
        bob.confirm(*first)
        await eventually_async(lambda: len(ada.all(DeliveryConfirm)) == 3)
        bob.session.receive([Confirm([first[0].message_id, "never-was"])])
        bob.confirm(*first)
        assert await pending(transport) == 0
        await quiet()
        assert len(ada.all(DeliveryConfirm)) == 3
        assert not bob.all(Error)


async def test_a_failed_confirmation_is_retried(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits, clock: ManualClock
) -> None:
    await store(transport, 2)
    async with Agent(hub, "bob") as bob:
        await bob.get(2)
        commits.failing = Unreachable("gone")
        bob.confirm(*bob.mails)
        await eventually_async(lambda: bob.session.retry_at_ms)
        commits.failing = None
        await quiet()
        assert await pending(transport) == 2
        clock.advance_ms(round(RELAY_RETRY_SECONDS * 1_000))
        hub.tick()
        await eventually_async(lambda: not bob.session.in_flight)
        assert await pending(transport) == 0


# Slow readers.


async def test_mail_for_a_slow_reader_stays_stored_and_others_are_not_affected(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    """A full send buffer loses no mail."""
    await store(transport, 200, body=b"x" * 10_000)
    async with Agent(hub, "bob", reads=False) as bob, Agent(hub, "ada") as ada, Agent(hub, "eve") as eve:
        await quiet()
        held = len(bob.session.in_flight)
        assert held * 10_000 < RELAY_UNSENT_BYTES_MAX + 2 * RELAY_FLUSH_BYTES
        for _ in range(50):
            ada.send("eve")
            ada.send("bob", b"y")
        await eve.get(50)
        await eventually_async(lambda: len(ada.all(Sent)) == 100)
        await quiet()
        assert len(bob.session.in_flight) == held
        bob.reading.set()
        taken = 0
        while taken < 250:
            await eventually_async(lambda: len(bob.mails) > taken)  # noqa: B023
            new = bob.mails[taken:]
            bob.confirm(*new)
            taken += len(new)
        assert [mail.sequence for mail in bob.mails] == list(range(250))


async def test_frames_of_an_agent_that_does_not_read_its_answers_are_not_received(hub: RelayHub) -> None:
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


async def test_an_agent_waits_while_its_sends_are_not_stored(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "ada") as ada:
        await quiet()
        gate = asyncio.Event()
        commits.held.append(gate)
        ada.send("bob")
        await eventually_async(lambda: not commits.held)
        ada.session.receive([Send(id_of(), "bob") for _ in range(RELAY_SENDS_MAX)])
        waiting = asyncio.create_task(ada.session.wait_for_capacity())
        await quiet()
        assert not waiting.done()
        gate.set()
        await asyncio.wait_for(waiting, DEADLINE_SECONDS)
        await eventually_async(lambda: len(ada.all(Sent)) == RELAY_SENDS_MAX + 1)


# Takeovers and leaving.


async def test_a_new_session_replaces_the_old_one(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await store(transport, 5)
    async with Agent(hub, "bob") as old:
        await old.get(5)
        old.confirm(old.mails[0])
        await eventually_async(lambda: len(old.session.in_flight) == 4)
        async with Agent(hub, "bob") as new:
            await eventually_async(lambda: old.session.ended)
            assert old.session.ended == (REPLACED, "replaced")
            await eventually_async(lambda: isinstance(old.frames[-1], Replaced))
            await new.get(4)
            await store(transport, 3)
            await new.get(7)
            assert [mail.sequence for mail in new.mails] == [1, 2, 3, 4, 5, 6, 7]
            assert len(old.mails) == 5
            old.confirm(*old.mails)  # A late confirmation still counts.
            await eventually_async(lambda: hub.sessions[Address("main", "bob")] is new.session)
        assert new.session.ended is not None


async def test_a_reader_on_another_server_takes_over_immediately(
    transport: AsyncEmbeddedTransport, hub: RelayHub, clock: ManualClock
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        await transport.call(JoinMailbox("bob", "another-session"))
        await eventually_async(lambda: bob.session.ended)
        assert bob.session.ended == (REPLACED, "replaced")
    assert (await transport.call(CountMail("bob"))).joined, "a replaced session does not leave the mailbox"


async def test_a_slow_session_is_replaced(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await store(transport, 200, body=b"x" * 10_000)
    async with Agent(hub, "bob", reads=False) as bob:
        await quiet()
        assert not bob.session.accepts_mail
        await transport.call(JoinMailbox("bob", "another-session"))
        await eventually_async(lambda: bob.session.ended)


async def test_a_cancelled_join_leaves_no_reader(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits
) -> None:
    gate = asyncio.Event()
    commits.held.append(gate)
    joining = asyncio.create_task(hub.join("main", "bob", lambda request: None))
    await eventually_async(lambda: not commits.held)
    joining.cancel()
    await asyncio.wait({joining})
    gate.set()
    await eventually_async(lambda: len(commits.batches) == 2)
    await quiet()
    assert not hub.sessions
    assert not (await transport.call(CountMail("bob"))).joined


async def test_requests_before_the_end_of_a_connection_are_committed(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 1)
    async with Agent(hub, "bob") as bob:
        await bob.get(1)
        bob.confirm(*bob.mails)
        bob.send("ada", b"last mail")
    async with Agent(hub, "ada") as ada:
        await ada.get(1)
        assert ada.bodies == [b"last mail"]
        await eventually_async(lambda: ada.all(DeliveryConfirm))
    assert await pending(transport) == 0


async def test_close_commits_pending_requests_and_leaves_mailboxes(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    async with Agent(hub, "bob") as bob:
        bob.send("ada", b"last mail")
        await hub.close()
        assert bob.session.ended == (STOPPING, "gone")
    assert await pending(transport, "ada") == 1
    assert not (await transport.call(CountMail("bob"))).joined


# Heartbeats.


async def test_a_silent_agent_is_pinged_and_then_disconnected(hub: RelayHub, clock: ManualClock) -> None:
    async with Agent(hub, "bob") as bob:
        clock.advance_ms(round(RELAY_PING_SECONDS * 1_000) - 1)
        hub.tick()
        await quiet()
        assert not bob.all(Ping)
        clock.advance_ms(1)
        hub.tick()
        await eventually_async(lambda: bob.all(Ping))
        clock.advance_ms(round(RELAY_PONG_SECONDS * 1_000) - 1)
        hub.tick()
        assert bob.session.ended is None
        clock.advance_ms(1)
        hub.tick()
        assert bob.session.ended == (TOO_SLOW, "no pong")


@pytest.mark.parametrize("sign", [Pong(), Ping(), Confirm([])], ids=lambda frame: type(frame).__name__)
async def test_any_frame_resets_the_ping_timer(hub: RelayHub, clock: ManualClock, sign: Any) -> None:
    async with Agent(hub, "bob") as bob:
        for _ in range(3):
            clock.advance_ms(round(RELAY_PING_SECONDS * 1_000))
            hub.tick()
            clock.advance_ms(round(RELAY_PONG_SECONDS * 1_000) - 1)
            bob.session.receive([sign])
            hub.tick()
        await eventually_async(lambda: len(bob.all(Ping)) == 3)
        assert bob.session.ended is None
        assert bool(bob.all(Pong)) == isinstance(sign, Ping)


# Errors.


async def test_rejected_sends_are_answered_and_do_not_affect_others(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await transport.call(BlockSender("eve", "ada"))
    async with Agent(hub, "ada") as ada:
        frames = [
            Send("good-1", "bob", Body(b"x")),
            Send("blocked", "eve", Body(b"x")),
            Send("large", "bob", Body(bytes(65_537))),
            Send("invalid", "no such name!", Body(b"x")),
            Send("elsewhere", "bob@other", Body(b"x")),
            Send("forged", "bob", Body(b"x"), sender="eve"),
            Send("own", "bob", Body(b"x"), sender="ada@main"),
            Send("short", "bob", Body(b"x"), sender="ada"),
            Send("", "bob", Body(b"x")),
            Send("good-2", "bob", Body(b"x")),
        ]
        ada.session.receive(frames)
        await eventually_async(lambda: len(ada.all(Sent | Error)) == len(frames))
        errors = {error.message_id: (error.code, error.retry) for error in ada.all(Error)}
        assert errors == {
            "blocked": ("sender_blocked", "never"),
            "large": ("payload_too_large", "never"),
            "invalid": ("invalid_name", "never"),
            "elsewhere": ("invalid_name", "never"),
            "forged": ("sender_mismatch", "never"),
            "": ("invalid_argument", "never"),
        }
        assert {sent.message_id for sent in ada.all(Sent)} == {"good-1", "good-2", "own", "short"}


async def test_a_full_mailbox_is_reported_to_the_sender(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    await transport.call(SetMailPolicy(MailPolicy(pending_max=2)))
    async with Agent(hub, "ada") as ada:
        answers = [await ada.answer(ada.send("bob")) for _ in range(3)]
        assert [type(answer) for answer in answers] == [Sent, Sent, Error]
        assert (answers[2].code, answers[2].retry) == ("queue_full", "later")


async def test_a_repeated_mail_is_stored_once(transport: AsyncEmbeddedTransport, hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada:
        ada.send("bob", id="same")
        ada.send("bob", id="same")
        await eventually_async(lambda: len(ada.all(Sent)) == 2)
        assert [(sent.duplicate, sent.durability) for sent in ada.all(Sent)] == [
            (False, "critical"),
            (True, "critical"),
        ]
        assert await pending(transport) == 1


async def test_a_failed_commit_is_reported_for_every_mail(hub: RelayHub, commits: Commits) -> None:
    async with Agent(hub, "ada") as ada:
        await quiet()
        commits.failing = Unreachable("gone")
        ids = [id_of() for _ in range(3)]
        ada.session.receive([Send(id, "bob") for id in ids])
        await eventually_async(lambda: len(ada.all(Error)) == 3)
        assert [(error.message_id, error.code) for error in ada.all(Error)] == [(id, "unreachable") for id in ids]


async def test_a_failed_read_of_a_mailbox_is_retried(
    transport: AsyncEmbeddedTransport, hub: RelayHub, commits: Commits, clock: ManualClock
) -> None:
    async with Agent(hub, "bob") as bob:
        await quiet()
        commits.failing = Unreachable("gone")
        await store(transport, 1)
        await eventually_async(lambda: bob.session.retry_at_ms)
        commits.failing = None
        await quiet()
        assert not bob.mails
        clock.advance_ms(round(RELAY_RETRY_SECONDS * 1_000))
        hub.tick()
        await bob.get(1)
        assert bob.session.ended is None


async def test_unauthorized_requests_are_rejected(hub: RelayHub) -> None:
    def authorize(request: Request[Any]) -> None:
        if isinstance(request, SendMail | ConfirmMail):
            raise NotAllowed("you may only read")

    async with Agent(hub, "ada", authorize=authorize) as ada:
        answer = await ada.answer(ada.send("bob"))
        assert answer.code == "not_allowed"
        ada.session.receive([Confirm(["x"])])
        await eventually_async(lambda: len(ada.all(Error)) == 2)


async def test_a_second_authentication_is_rejected(hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada:
        ada.session.receive([Authenticate("eve")])
        await eventually_async(lambda: ada.all(Error))
        assert ada.all(Error)[0].code == "invalid_argument"


async def test_invalid_confirms_are_rejected_and_valid_ones_accepted(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 1)
    async with Agent(hub, "bob") as bob:
        await bob.get(1)
        many = [f"x{number}" for number in range(MAIL_BATCH_MAX + 1)]
        bob.session.receive([Confirm(["bad\n"]), Confirm(many), Confirm([bob.mails[0].message_id])])
        await eventually_async(lambda: len(bob.all(Error)) == 2)
        await eventually_async(lambda: not bob.session.in_flight)
        assert await pending(transport) == 0


async def test_a_draining_server_accepts_confirmations_and_rejects_mail(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    await store(transport, 1)
    async with Agent(hub, "bob") as bob:
        await bob.get(1)
        hub.drain()
        await eventually_async(lambda: bob.all(Draining))
        answer = await bob.answer(bob.send("ada"))
        assert (answer.code, answer.retry) == ("shutdown_draining", "later")
        bob.confirm(*bob.mails)
        await eventually_async(lambda: not bob.session.in_flight)
        with pytest.raises(ShutdownDraining):
            await hub.join("main", "eve", lambda request: None)
    assert await pending(transport) == 0


# Receipts.


async def test_a_sender_gets_the_receipts_of_its_absence_when_it_reconnects(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    async with Agent(hub, "ada") as ada:
        ids = [ada.send("bob") for _ in range(3)]
        await ada.answer(ids[-1])
    async with Agent(hub, "bob") as bob:
        bob.confirm(*await bob.get(3))
        await eventually_async(lambda: not bob.session.in_flight)
    async with Agent(hub, "ada") as ada:
        await eventually_async(lambda: len(ada.all(DeliveryConfirm)) == 3)
        receipts = ada.all(DeliveryConfirm)
        assert [(each.message_id, each.to, each.was_stored) for each in receipts] == [
            (id, "bob@main", True) for id in ids
        ]
        ada.session.receive([ReceiptsSeen(receipts[1].sequence)])
        await eventually_async(lambda: ada.session.unsaved_receipts_seen is None)
        await quiet()
    async with Agent(hub, "ada") as ada:
        assert ada.all(Welcome)[0].receipts_seen == receipts[1].sequence
        await eventually_async(lambda: ada.all(DeliveryConfirm))
        await quiet()
        assert ada.all(DeliveryConfirm) == receipts[2:]
    async with Agent(hub, "ada", receipts_after=receipts[0].sequence) as ada:
        await eventually_async(lambda: len(ada.all(DeliveryConfirm)) == 2)
        assert ada.all(DeliveryConfirm) == receipts[1:]


async def test_an_invalid_receipt_position_is_an_error_and_does_not_end_the_session(hub: RelayHub) -> None:
    async with Agent(hub, "ada", receipts_after=1_000) as ada:
        await eventually_async(lambda: ada.all(Error))
        assert ada.all(Error)[0].code == "invalid_argument"
        ada.send("ada")
        ada.confirm(*await ada.get(1))
        await eventually_async(lambda: ada.all(DeliveryConfirm))
        ada.session.receive([ReceiptsSeen(1_000)])
        await eventually_async(lambda: len(ada.all(Error)) == 2)


async def test_confirmations_outside_the_relay_reach_the_sender(
    transport: AsyncEmbeddedTransport, hub: RelayHub
) -> None:
    async with Agent(hub, "ada") as ada:
        id = ada.send("bob")
        await ada.answer(id)
        await transport.call(ConfirmMail("bob", [id]))
        await eventually_async(lambda: ada.all(DeliveryConfirm))
        assert ada.all(DeliveryConfirm)[0].message_id == id


async def test_live_mail_is_not_marked_as_stored(hub: RelayHub) -> None:
    async with Agent(hub, "ada") as ada, Agent(hub, "bob") as bob:
        await quiet()
        ada.send("bob")
        bob.confirm(*await bob.get(1))
        await eventually_async(lambda: ada.all(DeliveryConfirm))
        assert [bob.mails[0].stored, ada.all(DeliveryConfirm)[0].was_stored] == [False, False]


async def test_more_receipts_than_one_read_are_all_sent(hub: RelayHub) -> None:
    async with Agent(hub, "bob") as bob:
        async with Agent(hub, "ada") as ada:
            for first in range(0, 200, 20):
                ada.session.receive([Send(id_of(), "bob") for _ in range(20)])
                await bob.get(first + 20)
                bob.confirm(*bob.mails[first:])
            await eventually_async(lambda: not bob.session.in_flight)
        async with Agent(hub, "ada", receipts_after=-1) as ada:
            await eventually_async(lambda: len(ada.all(DeliveryConfirm)) == 200)


# Rate limits.


async def test_a_rate_limited_sender_gets_its_retry_time(
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
