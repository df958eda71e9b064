"""Mailbox handles: sending, waiting, loops, atomic lists, and events."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import fastness
from fastness import Plane, Tier
from fastness.errors import (
    AgentExists,
    BatchTooLarge,
    EmptyBatch,
    FastnessError,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    MailboxFull,
    MailboxTaken,
    MailNotFound,
    PayloadTooLarge,
    SenderBlocked,
    TransactionTooLarge,
    WorldNotActive,
    WorldNotFound,
)
from fastness.handles.sync.mailboxes import Mailbox
from fastness.testing.clock import START_MS, ManualClock
from fastness.wire.mail import JoinMailbox, MailPolicy, NewMail
from tests.support.failures import Failures
from tests.support.waiting import eventually
from tests.unit.stored_pairs import everything

PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.
WAIT = 20.0  # Seconds that never pass: the test moves the clock, or another event ends the wait.
WEEK_MS = 7 * 86_400_000


class OnPurpose(Exception):
    """An error raised in a loop."""


@pytest.fixture(params=["memory", "dir", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else f"dir:{tmp_path / 'plane'}"


@pytest.fixture
def plane(url: str, clock: ManualClock, tmp_path: Path) -> Iterator[Plane]:
    with fastness.open(url, clock=clock, activity=f"dir:{tmp_path / 'activity'}") as plane:
        yield plane


@pytest.fixture
def ada(plane: Plane) -> Mailbox:
    return plane.mailbox("ada")


@pytest.fixture
def bob(plane: Plane) -> Mailbox:
    return plane.mailbox("bob")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(4)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)  # What still waits is woken when the plane is closed.


def bodies(mailbox: Mailbox, **options: Any) -> list[Any]:
    return [mail.json() for mail in mailbox.read(peek=True, **options)]


def records(plane: Plane) -> list[dict[str, Any]]:
    return [msgspec.json.decode(each.record) for each in plane.activity.read(kind="mail").records]


# Sending and reading.


def test_a_body_is_json_unless_it_is_bytes(ada: Mailbox, bob: Mailbox) -> None:
    ada.send("bob", {"n": 1})
    ada.send("bob@main", b"\x00")
    ada.send("bob", "text", content_type="text/x", id="Own", correlation_id="because")
    one, two, three = bob.read()
    assert (one.json(), one.content_type) == ({"n": 1}, "application/json")
    assert (two.body, two.content_type) == (b"\x00", "application/octet-stream")
    assert (three.id, three.content_type, three.correlation_id) == ("Own", "text/x", "because")
    assert {mail.sender for mail in (one, two, three)} == {"ada@main"}
    assert {mail.to for mail in (one, two, three)} == {bob.address}


def test_an_answer_has_its_durability_and_duplicate_flag(ada: Mailbox) -> None:
    sent = ada.send("bob", 1, id="x", tier=Tier.IMPORTANT)
    assert (sent.id, sent.durability, sent.duplicate, sent.code) == ("x", Tier.IMPORTANT, False, None)
    assert ada.send("bob", 1, id="x").duplicate
    assert ada.send("bob", 1).durability is Tier.CRITICAL


def test_mail_is_confirmed_by_envelope_or_id(ada: Mailbox, bob: Mailbox) -> None:
    for id in "abcdef":
        ada.send("bob", id, id=id)
    mails = bob.read()
    assert bob.confirm(mails[0]) == 1
    assert bob.confirm("b") == 1, "one id is not taken for a list of letters"
    assert bob.confirm([mails[2], "d"]) == 2
    assert bob.confirm(mail for mail in mails[:5]) == 1
    assert (bob.count(), bodies(bob)) == (1, ["f"])
    assert [receipt.id for receipt in ada.receipts() if receipt.state == "confirmed"] == list("abcde")


def test_stats_have_counts_age_and_reader(plane: Plane, ada: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    plane.set_mail_policy(MailPolicy(pending_max=7, ttl_seconds=60))
    assert plane.mail_policy() == MailPolicy(7, 60)
    stats = bob.stats()
    assert (stats.pending, stats.pending_max, stats.oldest_ms, stats.joined) == (0, 7, None, False)
    ada.send("bob", 1)
    clock.advance_ms(5)
    ada.send("bob", 2)
    for _ in bob:
        stats = bob.stats()
        assert (stats.pending, stats.oldest_ms, stats.joined) == (2, START_MS, True)
        break
    gc.collect()
    assert not bob.stats().joined
    assert [(each.agent, each.pending) for each in plane.mailboxes()] == [("ada", 0), ("bob", 2)]
    clock.advance_ms(60_000)
    assert bob.read() == []


def test_a_full_mailbox_refuses_mail(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    plane.set_mail_policy(MailPolicy(pending_max=1))
    ada.send("bob", 1)
    before = everything(plane)
    with pytest.raises(MailboxFull, match="pending_max"):
        ada.send("bob", 2)
    assert everything(plane) == before
    bob.confirm(bob.read())
    ada.send("bob", 3)


def test_an_oversized_mail_is_refused(plane: Plane, ada: Mailbox) -> None:
    ada.send("bob", b"x" * 65_536)
    before = everything(plane)
    with pytest.raises(PayloadTooLarge, match="65537"):
        ada.send("bob", b"x" * 65_537)
    assert everything(plane) == before


def test_a_blocked_sender_is_refused(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    bob.block("ada@main")
    assert bob.blocked() == ["ada@main"]
    before = everything(plane)
    with pytest.raises(SenderBlocked):
        ada.send("bob", 1)
    assert everything(plane) == before
    bob.unblock("ada")
    ada.send("bob", 1)
    assert bob.blocked() == []


def test_invalid_arguments_write_nothing(plane: Plane) -> None:
    failures = Failures()
    cases: list[tuple[Callable[[Any], object], type[FastnessError]]] = [
        (lambda plane: plane.mailbox(""), InvalidName),
        (lambda plane: plane.mailbox("a b"), InvalidName),
        (lambda plane: plane.mailbox("ada@elsewhere"), InvalidName),
        (lambda plane: plane.mailbox(5), InvalidName),
        (lambda plane: plane.mailbox("ada").send("", 1), InvalidName),
        (lambda plane: plane.mailbox("ada").send("bob@", 1), InvalidName),
        (lambda plane: plane.mailbox("ada").send("@main", 1), InvalidName),
        (lambda plane: plane.mailbox("ada").send("bob@main@main", 1), InvalidName),
        (lambda plane: plane.mailbox("ada").send("bob@elsewhere", 1), InvalidName),
        (lambda plane: plane.mailbox("ada").send(None, 1), InvalidArgument),
        (lambda plane: plane.mailbox("ada").send("bob", object()), InvalidValue),
        (lambda plane: plane.mailbox("ada").send("bob", 1, id=""), InvalidArgument),
        (lambda plane: plane.mailbox("ada").send("bob", 1, id=5), InvalidArgument),
        (lambda plane: plane.mailbox("ada").send("bob", 1, content_type="ü"), InvalidArgument),
        (lambda plane: plane.mailbox("ada").send("bob", 1, correlation_id=""), InvalidArgument),
        (lambda plane: plane.mailbox("ada").send_many([]), EmptyBatch),
        (lambda plane: plane.mailbox("ada").send_many([NewMail("bob")] * 257), BatchTooLarge),
        (lambda plane: plane.mailbox("ada").send_many(["bob"]), InvalidArgument),
        (lambda plane: plane.mailbox("ada").confirm([]), EmptyBatch),
        (lambda plane: plane.mailbox("ada").confirm(["x"] * 257), BatchTooLarge),
        (lambda plane: plane.mailbox("ada").confirm([None]), InvalidArgument),
        (lambda plane: plane.mailbox("ada").read(limit=0), InvalidArgument),
        (lambda plane: plane.mailbox("ada").read(limit=257), InvalidArgument),
        (lambda plane: plane.mailbox("ada").read(after=0), InvalidArgument),
        (lambda plane: plane.mailbox("ada").read(peek=True, after="x"), InvalidArgument),
        (lambda plane: plane.mailbox("ada").read(wait_seconds=21), InvalidArgument),
        (lambda plane: plane.mailbox("ada").read(wait_seconds=-1), InvalidArgument),
        (lambda plane: plane.mailbox("ada").read(wait_seconds=float("nan")), InvalidArgument),
        (lambda plane: plane.mailbox("ada").receipts(limit=0), InvalidArgument),
        (lambda plane: plane.mailbox("ada").receipts(after=7), InvalidArgument),
        (lambda plane: plane.mailbox("ada").block("bob@elsewhere"), InvalidName),
        (lambda plane: plane.mailbox("ada").blocked(limit=0), InvalidArgument),
        (lambda plane: plane.mailboxes(limit=257), InvalidArgument),
        (lambda plane: plane.mailboxes(after="a b"), InvalidName),
        (lambda plane: plane.set_mail_policy(MailPolicy(0)), InvalidArgument),
        (lambda plane: plane.agents.register("ada", public_key=b"short"), InvalidArgument),
        (lambda plane: plane.agents.register("ada", world="nowhere"), WorldNotFound),
        (lambda plane: plane.agents.register("ada@elsewhere"), InvalidName),
        (lambda plane: plane.agents.known(limit=0), InvalidArgument),
    ]
    for wrong, error in cases:
        with failures.of((wrong, error)):
            with pytest.raises(error) as caught:
                wrong(plane)
            assert type(caught.value) is error
            assert everything(plane) == []
    failures.check()


# Batches.


def test_a_batch_is_answered_mail_by_mail(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    plane.set_mail_policy(MailPolicy(pending_max=2))
    plane.mailbox("eve").block("ada")
    sent = ada.send_many(
        [
            NewMail("bob", b"1", "x"),
            NewMail("a b", b"2"),
            NewMail("bob", b"x" * 65_537),
            NewMail("bob", b"3", "x"),
            NewMail("eve", b"4"),
            NewMail("bob", b"5", "y"),
            NewMail("bob", b"6", "z"),
            NewMail("bob@elsewhere", b"7"),
            NewMail("carl", b"8"),
        ]
    )
    codes = [
        None,
        "invalid_name",
        "payload_too_large",
        None,
        "sender_blocked",
        None,
        "queue_full",
        "invalid_name",
        None,
    ]
    assert [each.code for each in sent] == codes
    assert [each.duplicate for each in sent] == [False, False, False, True, False, False, False, False, False]
    assert all(bool(each.detail) == (each.code is not None) for each in sent)
    assert [each.id for each in sent][:8] == ["x", "", "", "x", "", "y", "z", ""]
    assert [mail.body for mail in bob.read()] == [b"1", b"5"]
    assert [(receipt.to, receipt.state) for receipt in ada.receipts(limit=3)] == [
        ("bob@main", "stored"),
        ("bob@main", "stored"),
        ("carl@main", "stored"),
    ]
    assert plane.mailbox("eve").count() == 0


def test_a_batch_too_large_for_one_commit_is_refused(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    """The limit is reached while a mail is being stored."""
    ada.send("bob", "before")
    before = everything(plane)
    with pytest.raises(TransactionTooLarge):
        ada.send_many([NewMail("bob", b"x" * 65_536)] * 256)
    assert everything(plane) == before
    ada.send("bob", "after")
    assert bodies(bob) == ["before", "after"]


async def test_concurrent_senders_fill_a_mailbox_exactly(url: str, tmp_path: Path) -> None:
    async with fastness.open_async(url, activity=f"dir:{tmp_path / 'activity'}") as plane:
        await plane.set_mail_policy(MailPolicy(pending_max=20))
        senders = [plane.mailbox(f"agent-{number}") for number in range(50)]
        outcomes = await asyncio.gather(*(each.send("bob", each.agent) for each in senders), return_exceptions=True)
        stored = [
            each.agent for each, outcome in zip(senders, outcomes, strict=True) if not isinstance(outcome, MailboxFull)
        ]
        assert len(stored) == 20
        mails = await plane.mailbox("bob").read()
        assert sorted(mail.json() for mail in mails) == sorted(stored)
        assert await plane.mailbox("bob").count() == 20


# Waiting.


def test_a_waiting_reader_is_woken_by_a_send(
    plane: Plane, ada: Mailbox, bob: Mailbox, threads: ThreadPoolExecutor
) -> None:
    reading = threads.submit(bob.read, wait_seconds=WAIT)
    told = threads.submit(ada.receipts, wait_seconds=WAIT)
    ada.send("bob", 1)
    assert [mail.json() for mail in reading.result(PATIENCE_SECONDS)] == [1]
    assert told.result(PATIENCE_SECONDS)[0].state == "stored"
    later = threads.submit(bob.read, after=0, wait_seconds=WAIT)
    confirmed = threads.submit(ada.receipts, after=1, wait_seconds=WAIT)
    bob.confirm(bob.read(peek=True))
    assert [(each.state, each.was_stored) for each in confirmed.result(PATIENCE_SECONDS)] == [("confirmed", True)]
    ada.send("bob", 2)
    assert [mail.json() for mail in later.result(PATIENCE_SECONDS)] == [2]


def test_a_read_waits_at_most_wait_seconds(bob: Mailbox, clock: ManualClock, threads: ThreadPoolExecutor) -> None:
    reading = threads.submit(bob.read, wait_seconds=WAIT)
    told = threads.submit(bob.receipts, wait_seconds=WAIT)

    def over() -> bool:
        clock.advance_ms(1_000)
        return reading.done() and told.done()

    eventually(over)
    assert (reading.result(), told.result()) == ([], [])


def test_a_waiting_reader_is_replaced_by_another(
    plane: Plane, bob: Mailbox, clock: ManualClock, threads: ThreadPoolExecutor
) -> None:
    first = bob.subscribe(wait_seconds=WAIT)
    waiting = threads.submit(next, first)
    try:
        eventually(lambda: bob.stats().joined)
        second = plane.mailbox("bob").subscribe(wait_seconds=0)
        assert list(second) == []
        with pytest.raises(MailboxTaken):
            waiting.result(PATIENCE_SECONDS)
    finally:
        clock.advance_ms(round(WAIT * 1_000))  # Ends the wait if the test fails.


def test_a_replaced_reader_can_still_confirm(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    ada.send("bob", 1, id="x")
    first = bob.subscribe(wait_seconds=0)
    assert next(first).id == "x"
    second = plane.mailbox("bob").subscribe(wait_seconds=0)
    assert next(second).id == "x", "it was not confirmed"
    with pytest.raises(MailboxTaken):
        next(first)
    assert bob.count() == 0, "a delivered mail is confirmed although another session reads"
    second.close()  # type: ignore[attr-defined]


async def test_a_waiting_task_is_woken(url: str, tmp_path: Path) -> None:
    async with fastness.open_async(url, activity=f"dir:{tmp_path / 'activity'}") as plane:
        ada, bob = plane.mailbox("ada"), plane.mailbox("bob")
        reading = asyncio.create_task(bob.read(wait_seconds=WAIT))
        told = asyncio.create_task(ada.receipts(wait_seconds=WAIT))
        await asyncio.sleep(0)
        await ada.send("bob", 1)
        assert [mail.json() for mail in await asyncio.wait_for(reading, PATIENCE_SECONDS)] == [1]
        assert (await asyncio.wait_for(told, PATIENCE_SECONDS))[0].state == "stored"


def test_nodes_share_mailboxes(postgres_url: str, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """A reader on one node is woken by a send on another, and can be replaced from there."""
    logs = f"dir:{tmp_path / 'activity'}"
    with fastness.open(postgres_url, activity=logs) as one, fastness.open(postgres_url, activity=logs) as two:
        reading = one.mailbox("bob").subscribe(wait_seconds=WAIT)

        def send(node: Plane, sender: str) -> None:
            for number in range(25):
                node.mailbox(sender).send("bob", [sender, number])

        sending = [threads.submit(send, (one, two)[number % 2], f"agent-{number}") for number in range(4)]
        mails = [next(reading) for _ in range(100)]
        for each in sending:
            each.result(PATIENCE_SECONDS)
        sequences = [mail.sequence for mail in mails]
        assert sequences == list(range(100))
        for number in range(4):
            own = [mail.json()[1] for mail in mails if mail.sender == f"agent-{number}@main"]
            assert own == list(range(25))
        assert two.mailbox("bob").count() == 1, "the last one is confirmed when the next one is asked for"
        second = two.mailbox("bob").subscribe(wait_seconds=WAIT)
        assert next(second).sequence == 99
        with pytest.raises(MailboxTaken):
            next(reading)
        assert one.mailbox("bob").count() == 0
        second.close()  # type: ignore[attr-defined]


# Loops.


def test_a_loop_confirms_each_mail(ada: Mailbox, bob: Mailbox) -> None:
    for number in range(120):
        ada.send("bob", number)
    seen: list[int] = []
    for mail in bob.subscribe(wait_seconds=0):
        assert bob.count() == 120 - len(seen), "it is confirmed when the next one is asked for"
        seen.append(mail.json())
    assert seen == list(range(120))
    assert bob.count() == 0
    states = [each.state for each in ada.receipts(limit=1_000)]
    assert (states.count("stored"), states.count("delivered"), states.count("confirmed")) == (120, 120, 120)
    assert not bob.stats().joined


def test_leaving_a_loop_does_not_confirm_its_mail(ada: Mailbox, bob: Mailbox) -> None:
    for number in range(3):
        ada.send("bob", number)
    for mail in bob:
        if mail.json() == 1:
            break
    assert bodies(bob) == [1, 2]
    gc.collect()
    assert not bob.stats().joined
    assert [mail.json() for mail in bob.subscribe(wait_seconds=0)] == [1, 2]


def test_a_loop_that_raises_does_not_confirm_its_mail(ada: Mailbox, bob: Mailbox) -> None:
    for number in range(3):
        ada.send("bob", number)
    with pytest.raises(OnPurpose):
        for mail in bob.subscribe(wait_seconds=0):
            if mail.json() == 1:
                raise OnPurpose
    assert bodies(bob) == [1, 2]


def test_mail_during_a_loop_is_live(ada: Mailbox, bob: Mailbox) -> None:
    """Its receipt has `was_stored` false."""
    ada.send("bob", "waited", id="waited")
    for mail in bob.subscribe(wait_seconds=0):
        if mail.id == "waited":
            ada.send("bob", "came while there was stored mail", id="live")
    confirmed = {each.id: each.was_stored for each in ada.receipts() if each.state == "confirmed"}
    assert confirmed == {"waited": True, "live": False}


def test_a_loop_of_a_closed_plane_ends_quietly(url: str, tmp_path: Path) -> None:
    with fastness.open(url, activity=f"dir:{tmp_path / 'activity'}") as plane:
        plane.mailbox("ada").send("bob", 1)
        mails = iter(plane.mailbox("bob"))
        next(mails)
    mails.close()  # type: ignore[attr-defined]


async def test_an_async_loop_confirms_each_mail(url: str, tmp_path: Path) -> None:
    async with fastness.open_async(url, activity=f"dir:{tmp_path / 'activity'}") as plane:
        ada, bob = plane.mailbox("ada"), plane.mailbox("bob")
        for number in range(6):
            await ada.send("bob", number)

        async def waiting() -> list[Any]:
            return [mail.json() for mail in await bob.read(peek=True)]

        async for mail in bob:
            if mail.json() == 2:
                break
        assert await waiting() == [2, 3, 4, 5]
        with pytest.raises(OnPurpose):
            async for mail in bob:
                if mail.json() == 4:
                    raise OnPurpose
        assert await waiting() == [4, 5]
        assert [mail.json() async for mail in bob.subscribe(wait_seconds=0)] == [4, 5]
        assert await waiting() == []


async def test_a_cancelled_loop_does_not_confirm_its_mail(url: str, tmp_path: Path) -> None:
    async with fastness.open_async(url, activity=f"dir:{tmp_path / 'activity'}") as plane:
        ada, bob = plane.mailbox("ada"), plane.mailbox("bob")
        await ada.send("bob", 1)
        working = asyncio.Event()

        async def work() -> None:
            async for _ in bob:
                working.set()
                await asyncio.sleep(PATIENCE_SECONDS)

        task = asyncio.create_task(work())
        await asyncio.wait_for(working.wait(), PATIENCE_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await bob.count() == 1
        await asyncio.wait_for(anext(aiter(bob.subscribe())), PATIENCE_SECONDS)
        waiting = asyncio.ensure_future(plane.mailbox("carl").subscribe().__anext__())
        while not (await plane.mailbox("carl").stats()).joined:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not (await plane.mailbox("carl").stats()).joined


async def test_a_loop_that_is_cancelled_as_soon_as_it_has_joined_leaves_its_mailbox(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fastness.open_async(url, activity=f"dir:{tmp_path / 'activity'}") as plane:
        bob = plane.mailbox("bob")
        call = bob._transport.call

        async def cancelled_after_the_join(request: Any) -> Any:
            answer = await call(request)
            if isinstance(request, JoinMailbox):
                assert (await bob.stats()).joined
                raise asyncio.CancelledError
            return answer

        monkeypatch.setattr(bob._transport, "call", cancelled_after_the_join)
        with pytest.raises(asyncio.CancelledError):
            await anext(aiter(bob))
        assert not (await bob.stats()).joined


# Atomic lists.


def test_an_atomic_list_sends_mail(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    jobs = plane.queue("jobs")
    plane.atomic().put(jobs, 1).send(ada, "bob", {"n": 1}, id="x").commit()
    assert (bodies(bob), jobs.stats().ready) == ([{"n": 1}], 1)
    plane.mailbox("eve").block("ada")
    before = everything(plane)
    for wrong, error in (("eve", SenderBlocked), ("a b", InvalidName), ("bob@elsewhere", InvalidName)):
        with pytest.raises(error):
            plane.atomic().put(jobs, 2).send(ada, "bob", 2).send(ada, wrong, 3).commit()
        assert everything(plane) == before
    with pytest.raises(PayloadTooLarge):
        plane.atomic().send(ada, "bob", b"x" * 65_537).commit()
    plane.set_mail_policy(MailPolicy(pending_max=2))
    before = everything(plane)
    with pytest.raises(MailboxFull):
        plane.atomic().put(jobs, 2).send(ada, "bob", 2).send(ada, "bob", 3).commit()
    assert everything(plane) == before
    answer = plane.atomic().send(ada, "bob", 2).commit(tier=Tier.IMPORTANT)[0]
    assert answer.mails[0].durability is Tier.IMPORTANT


def test_an_atomic_list_confirms_mail(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    ada.send("bob", 1)
    (mail,) = bob.read()
    world = plane.world("w")
    world.create()
    before = everything(plane)
    with pytest.raises(FastnessError):
        plane.atomic().confirm(bob, mail).append(world, [1], expected_head=5).commit()
    assert everything(plane) == before
    plane.atomic().append(world, [1], expected_head=0).confirm(bob, mail).send(bob, "ada", "done").commit()
    assert (bob.count(), world.head(), bodies(ada)) == (0, 1, ["done"])


def test_an_atomic_confirm_of_a_confirmed_mail_fails(
    plane: Plane, ada: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Another reader has replaced this one and handled the mail."""
    jobs = plane.queue("jobs")
    ada.send("bob", 1)
    (mail,) = bob.read()
    plane.atomic().confirm(plane.mailbox("bob"), mail).put(jobs, "once").commit()
    before = everything(plane)
    with pytest.raises(MailNotFound, match="nothing was committed"):
        plane.atomic().confirm(bob, mail).put(jobs, "twice").commit()
    assert everything(plane) == before
    assert bob.confirm(mail) == 0


# Agents and worlds.


def test_registering_again_keeps_omitted_values(plane: Plane, clock: ManualClock) -> None:
    key, other = bytes(range(32)), bytes(range(1, 33))
    assert plane.agents.get("ada") is None
    known = plane.agents.register("ada", public_key=key)
    assert (known.name, known.public_key, known.world, known.registered_ms) == ("ada", key, None, START_MS)
    plane.world("w").create()
    clock.advance_ms(5)
    bound = plane.agents.register("ada@main", world="w")
    assert (bound.public_key, bound.world, bound.registered_ms) == (key, "w", START_MS)
    assert plane.agents.register("ada", public_key=key) == bound
    with pytest.raises(AgentExists, match="replace"):
        plane.agents.register("ada", public_key=other)
    assert plane.agents.get("ada") == bound
    assert plane.agents.register("ada", public_key=other, replace=True).public_key == other
    plane.agents.register("bob")
    assert [agent.name for agent in plane.agents.known()] == ["ada", "bob"]
    assert [agent.name for agent in plane.agents.known(after="ada")] == ["bob"]
    assert [agent.name for agent in plane.agents.known(limit=1)] == ["ada"]


def test_mail_for_a_world_is_in_its_journal_after_a_drain(plane: Plane, ada: Mailbox, bob: Mailbox) -> None:
    world = plane.world("w")
    world.create()
    plane.agents.register("bob", world="w")
    sent = ada.send("bob", {"n": 1}, correlation_id="because")
    assert bob.count() == 0
    assert world.drain() == [0]
    (record,) = world.read()
    assert record.kind == "ingress"
    said = repr(cbor2.loads(record.value))
    for part in ("ada@main", sent.id, "because", "application/json", '{"n":1}'):
        assert part in said
    (receipt,) = ada.receipts()
    assert (receipt.id, receipt.state, receipt.was_stored) == (sent.id, "confirmed", False)
    world.pause()
    ada.send("bob", "while it rests")
    world.archive()
    with pytest.raises(WorldNotActive):
        ada.send("bob", "too late")
    assert [each["event"] for each in records(plane)] == ["confirmed"] * 2
    world.delete()
    refused, stored = ada.send_many([NewMail("bob", b"too late"), NewMail("carl", b"on time")])
    assert (refused.code, stored.code) == ("world_not_found", None)  # One refused mail does not affect the others.


# Events.


def test_mail_events_are_in_the_session_log(plane: Plane, ada: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    plane.set_mail_policy(MailPolicy(pending_max=2))
    ada.send("bob", 1, id="x")
    ada.send("bob", 1, id="x")
    bob.read()
    bob.read()
    bob.confirm(["x", "y"])
    bob.block("eve")
    with pytest.raises(SenderBlocked):
        plane.mailbox("eve").send("bob", 1, id="from-eve")
    ada.send("bob", 1, id="y")
    ada.send("bob", 1, id="z")
    with pytest.raises(MailboxFull):
        ada.send("bob", 1, id="too-many")
    clock.advance_ms(WEEK_MS)
    ada.send("bob", 1, id="new")
    told = records(plane)
    assert [(each["event"], each["id"], each["sender"]) for each in told] == [
        ("stored", "x", "ada@main"),
        ("delivered", "x", "ada@main"),
        ("confirmed", "x", "ada@main"),
        ("rejected", "from-eve", "eve@main"),
        ("stored", "y", "ada@main"),
        ("stored", "z", "ada@main"),
        ("rejected", "too-many", "ada@main"),
        ("expired", "y", "ada@main"),
        ("expired", "z", "ada@main"),
        ("stored", "new", "ada@main"),
    ]
    assert {each["to"] for each in told} == {"bob@main"}
    assert [each["at_ms"] for each in told[-4:]] == [START_MS] + [START_MS + WEEK_MS] * 3
    assert plane.activity.read(kind="queues").records == []


async def test_async_mail_events_are_in_the_session_log(url: str, tmp_path: Path) -> None:
    async with fastness.open_async(url, activity=f"dir:{tmp_path / 'activity'}") as plane:
        ada, bob = plane.mailbox("ada"), plane.mailbox("bob")
        await asyncio.gather(*(ada.send("bob", number) for number in range(5)))
        async for _ in bob.subscribe(wait_seconds=0):
            pass
        found = (await plane.activity.read(kind="mail")).records
        events = [msgspec.json.decode(each.record)["event"] for each in found]
        assert [events.count(event) for event in ("stored", "delivered", "confirmed")] == [5, 5, 5]
