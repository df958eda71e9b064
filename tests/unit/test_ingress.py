"""The ingress: what is accepted, when it is stored, what is lost when, and who hears of it.

Commits run on a thread, so a test waits for what it waits for; time itself is moved.
"""

import asyncio
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.objects import open_objects
from holdfast.errors import (
    Busy,
    Closed,
    CommitUnknown,
    HoldfastError,
    InvalidArgument,
    MailboxFull,
    PayloadTooLarge,
    RateLimited,
    SenderBlocked,
    Unreachable,
)
from holdfast.kv import Database
from holdfast.layers import agents, dedupe, inboxes, mailboxes, worlds
from holdfast.layers.mailboxes import Address
from holdfast.limits import INGRESS_QUEUE_MAX, PUSH_PEERS_MAX
from holdfast.runtime.blobs import AsyncBlobStore
from holdfast.runtime.ingress.ingress import Ingress
from holdfast.runtime.ingress.validation import DataPush
from holdfast.runtime.locks.table import RESOURCE_LEVELS, LockTable
from holdfast.testing.clock import ManualClock
from holdfast.testing.faults import FaultyDatabase
from holdfast.wire.ingress import PUSH_MEDIA, NewPush, Pushed, PushedData
from holdfast.wire.mail import Envelope, MailPolicy

ADA, BOB, EVE = (Address("main", name) for name in ("ada", "bob", "eve"))
SECONDS_MAX = 60.0
SESSION = "01890a5d-ac96-774b-bcce-b302099a8057"


class Gate:
    """Faults that hold a commit up at a point until they are opened, and count what passes."""

    def __init__(self) -> None:
        self.point = ""
        self.error: BaseException | None = None
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.opened.set()

    def close(self, point: str = "transact: begin") -> None:
        self.point = point
        self.reached.clear()
        self.opened.clear()

    def fail(self, error: BaseException, point: str = "transact: commit") -> None:
        self.point, self.error = point, error

    def at(self, point: str) -> BaseException | None:
        if point != self.point:
            return None
        self.reached.set()
        assert self.opened.wait(SECONDS_MAX)
        error, self.error = self.error, None
        return error


class Bench:
    """An ingress with everything around it."""

    def __init__(self, clock: ManualClock, per_minute: int = 0) -> None:
        self.clock = clock
        self.gate = Gate()
        self.inner = MemoryDatabase(clock=clock)
        self.database = FaultyDatabase(self.inner, self.gate)
        self.locks = LockTable(RESOURCE_LEVELS, nested=False)
        self.told: list[Any] = []
        self.flushes: list[int] = []
        self.objects: Any = open_objects("memory:")
        self.per_minute = per_minute
        self.ingress = self.new_ingress()

    def new_ingress(self) -> Ingress:
        ingress = Ingress(
            self.database,
            AsyncBlobStore(self.database, self.objects),
            self.told.extend,
            clock=self.clock,
            locks=self.locks,
            pushes_per_minute=self.per_minute,
        )
        ingress.on_flush(lambda pushes, _: self.flushes.append(pushes))
        return ingress

    async def push(self, key: str = "k", *, sender: Address = ADA, to: Address = BOB, **fields: Any) -> Pushed:
        async with asyncio.timeout(SECONDS_MAX):  # A push that waits for what does not come fails the test.
            return await self.ingress.push(sender, to, new(key, **fields))

    def begin(self, key: str, **fields: Any) -> "asyncio.Task[Pushed]":
        return asyncio.create_task(self.push(key, **fields))

    async def pass_ms(self, milliseconds: int) -> None:
        await ticks()
        self.clock.advance_ms(milliseconds)
        await ticks()

    async def pass_until(self, reached: Callable[[], Any]) -> None:
        """Let second after second pass until it happens: whoever sleeps may be held up by a thread before that."""
        deadline = time.monotonic() + SECONDS_MAX
        while not reached():
            assert time.monotonic() < deadline, "it did not happen"
            await self.pass_ms(1_000)
            await asyncio.sleep(0.001)

    async def flush(self) -> None:
        """Let the batch be due, and wait until it is done with."""
        before = len(self.flushes)
        await self.pass_ms(200)
        await until(lambda: len(self.flushes) > before)

    def mails(self, to: Address = BOB) -> list[Envelope]:
        return self.inner.read(mailboxes.peek, to, after=-1, limit=256)

    def count(self, to: Address = BOB) -> int:
        return self.inner.read(mailboxes.count, to)[0].count


def new(key: str = "k", **fields: Any) -> NewPush:
    payload = fields.pop("payload", b"hello")
    given = {"topic": "t", "content_type": "text/plain", "payload_base64": base64url(payload), "idempotency_key": key}
    return NewPush(**(given | fields))


def base64url(payload: bytes) -> str:
    return urlsafe_b64encode(payload).decode().rstrip("=")


async def ticks() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def until(reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not reached():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.001)


@pytest.fixture
async def bench(clock: ManualClock) -> AsyncIterator[Bench]:
    bench = Bench(clock)
    await bench.ingress.start()
    yield bench
    bench.gate.opened.set()
    await bench.ingress.close()
    bench.inner.close()


# What is accepted, and when it is stored.


async def test_a_push_is_accepted_at_once_and_stored_200_ms_later(bench: Bench) -> None:
    pushed = await bench.push()
    assert (pushed.accepted, pushed.deduped, pushed.durability) == (True, False, "accepted")
    assert bench.ingress.depth == 1
    await bench.pass_ms(199)
    assert bench.count() == 0
    await bench.pass_ms(1)
    await until(lambda: bench.flushes == [1])
    assert (bench.ingress.depth, bench.count()) == (0, 1)


async def test_the_recipient_finds_the_push_in_a_mail_of_its_sender(bench: Bench) -> None:
    pushed = await bench.push("k-1", reply_to="k-0", session_id="s", durability="synced")
    (mail,) = bench.mails()
    assert (mail.id, mail.sender, mail.to, mail.content_type) == (pushed.id, "ada@main", "bob@main", PUSH_MEDIA)
    assert msgspec.json.decode(mail.body, type=PushedData) == PushedData(
        topic="t",
        content_type="text/plain",
        idempotency_key="k-1",
        payload_base64=base64url(b"hello"),
        size=5,
        session_id="s",
        reply_to="k-0",
    )
    assert ("mail.stored", BOB, pushed.id, "ada@main") in [note[:4] for note in bench.told]


async def test_256_pushes_are_stored_as_one_batch_before_their_time(bench: Bench) -> None:
    for number in range(255):
        await bench.push(str(number))
    await ticks()
    assert bench.flushes == []
    await bench.push("255")
    await until(lambda: bench.flushes == [256])
    assert [msgspec.json.decode(mail.body)["idempotency_key"] for mail in bench.mails()] == [*map(str, range(256))]


async def test_a_synced_push_is_stored_when_it_is_answered(bench: Bench) -> None:
    pushed = await bench.push(durability="synced")
    assert pushed.durability == "synced"
    assert bench.count() == 1


async def test_synced_pushes_share_their_commits(bench: Bench) -> None:
    bench.gate.close()
    tasks = [bench.begin(str(number), durability="synced") for number in range(100)]
    await until(bench.gate.reached.is_set)
    bench.gate.opened.set()
    assert {(await task).durability for task in tasks} == {"synced"}
    assert len(bench.flushes) <= 2
    assert bench.count() == 100


async def test_what_is_accepted_while_a_commit_runs_is_in_the_next_one(bench: Bench) -> None:
    bench.gate.close()
    first = bench.begin("1", durability="synced")
    await until(bench.gate.reached.is_set)
    await bench.push("2")
    assert bench.ingress.depth == 1
    bench.gate.opened.set()
    await first
    await bench.flush()
    assert bench.count() == 2
    assert bench.flushes == [1, 1]


# Keys.


async def test_a_push_that_is_made_again_is_accepted_and_not_stored_again(bench: Bench) -> None:
    first = await bench.push()
    again = await bench.push()
    assert (again.accepted, again.deduped, again.durability, again.id) == (True, True, "accepted", first.id)
    await bench.flush()
    stored = await bench.push()
    assert (stored.deduped, stored.durability) == (True, "synced")
    assert bench.count() == 1
    assert bench.ingress.counters.deduped == 2


async def test_the_same_key_to_somebody_else_or_on_another_topic_is_another_push(bench: Bench) -> None:
    for each in ({}, {"to": EVE}, {"topic": "u"}, {"sender": EVE}):
        assert not (await bench.push("k", **each)).deduped


async def test_a_duplicate_that_asks_for_synced_waits_for_the_first_and_makes_it_hurry(bench: Bench) -> None:
    await bench.push()
    again = await bench.push(durability="synced")
    assert (again.deduped, again.durability) == (True, "synced")
    assert bench.count() == 1


async def test_a_key_is_remembered_for_seven_days_and_pruned_in_the_background(bench: Bench) -> None:
    await bench.push(durability="synced")
    await bench.pass_ms(7 * 86_400_000 - 1)
    assert len(bench.ingress.dedupe) == 1
    await bench.pass_until(lambda: len(bench.ingress.dedupe) == 0)
    assert not (await bench.push()).deduped


@pytest.mark.parametrize("error", [Unreachable("gone"), CommitUnknown("lost"), RuntimeError("a fault of ours")])
@pytest.mark.parametrize("point", ["transact: begin", "transact: commit"])
async def test_a_failed_flush_forgets_its_keys(
    bench: Bench, error: Exception, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Lesson 1: a failed flush kept its key, so the retry was answered "duplicate" for a message that was lost."""
    bench.gate.fail(error, point)
    await bench.push("1")
    await bench.push("2")
    await bench.flush()
    assert bench.count() == 0
    assert bench.ingress.counters.lost == {"busy": 2}
    assert "a batch of pushes was dropped" in caplog.text
    again = await bench.push("1", durability="synced")
    assert (again.deduped, bench.count()) == (False, 1)


async def test_whoever_waits_for_a_flush_that_fails_hears_of_it_and_may_push_again(bench: Bench) -> None:
    """Lesson 1, for whoever asked for more than `accepted`."""
    bench.gate.fail(Unreachable("gone"))
    with pytest.raises(Busy, match=r"gone.*same idempotency key"):
        await bench.push(durability="synced")
    assert not bench.ingress.counters.lost
    assert not (await bench.push(durability="synced")).deduped


async def test_a_push_whose_answer_was_lost_is_not_stored_twice(bench: Bench) -> None:
    """Lesson 1, the other way round: the commit happened, and the sender pushes again."""
    bench.gate.fail(CommitUnknown("lost"), "transact: answer")
    with pytest.raises(Busy):
        await bench.push(durability="synced")
    again = await bench.push(durability="synced")
    assert (again.deduped, bench.count()) == (True, 1)


async def test_no_room_gives_the_reservation_back(bench: Bench) -> None:
    """Lesson 1: ERR_BUSY must not leave a key behind that swallows the retry."""
    await fill(bench)
    late = bench.begin("late")
    await bench.pass_ms(20)
    with pytest.raises(Busy, match="same idempotency key"):
        await late
    bench.gate.opened.set()
    await until(lambda: not bench.ingress.depth)
    again = await bench.push("late", to=EVE, durability="synced")
    assert (again.deduped, bench.count(EVE)) == (False, 1)


async def test_a_duplicate_of_a_push_that_waits_for_room_shares_its_fate(bench: Bench) -> None:
    """Lesson 1: "accepted, duplicate" of something that was never accepted would be a lie."""
    await fill(bench)
    first = bench.begin("late")
    await ticks()
    second = bench.begin("late")
    await ticks()
    assert not second.done()
    await bench.pass_ms(20)
    for each in (first, second):
        with pytest.raises(Busy):
            await each


async def test_a_push_that_is_cancelled_while_it_waits_for_room_gives_its_key_back(bench: Bench) -> None:
    await fill(bench)
    first = bench.begin("late")
    await ticks()
    second = bench.begin("late")
    await ticks()
    first.cancel()
    with pytest.raises(Busy, match="push it again"):
        await second
    bench.gate.opened.set()
    await until(lambda: not bench.ingress.depth)
    assert not (await bench.push("late")).deduped


# No room.


async def fill(bench: Bench) -> None:
    """Hold the writer up in its first batch, and fill the backlog behind it."""
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=100_000))
    bench.gate.close()
    first = bench.begin("first", durability="synced")
    await until(bench.gate.reached.is_set)
    for number in range(INGRESS_QUEUE_MAX):
        await bench.push(f"full-{number}")
    assert bench.ingress.depth == INGRESS_QUEUE_MAX
    assert not first.done()


async def test_a_full_backlog_is_busy_and_the_event_loop_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(bench)
    late = [bench.begin(f"late-{number}") for number in range(10)]
    await bench.pass_ms(19)
    assert not any(each.done() for each in late)
    await bench.pass_ms(1)
    assert {type(each) for each in await asyncio.gather(*late, return_exceptions=True)} == {Busy}
    assert bench.ingress.counters.rejects == {"busy": 10}
    lines = [record for record in caplog.records if "the ingress buffer is full" in record.message]
    assert [(each.refused, each.waiting) for each in lines] == [(1, INGRESS_QUEUE_MAX)]  # type: ignore[attr-defined]
    await bench.pass_ms(1_000)
    later = bench.begin("later")
    await bench.pass_ms(20)
    with pytest.raises(Busy):
        await later
    said = [record for record in caplog.records if "the ingress buffer is full" in record.message]
    assert said[-1].refused == 10  # type: ignore[attr-defined]


async def test_whoever_waits_gets_the_room_that_a_batch_leaves(bench: Bench) -> None:
    await fill(bench)
    late = bench.begin("late")
    await ticks()
    bench.gate.opened.set()
    assert (await late).accepted
    await bench.ingress.close()
    assert bench.count() == INGRESS_QUEUE_MAX + 2


async def test_a_writer_that_is_behind_says_so(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.gate.close()
    first = bench.begin("1", durability="synced")
    await until(bench.gate.reached.is_set)
    await bench.push("2")
    for _ in range(2):
        await bench.pass_ms(999)
    assert bench.ingress.lag_seconds > 1
    await until(lambda: "the writer of pushes is lagging" in caplog.text)
    bench.gate.opened.set()
    await first


# What a mailbox refuses.


async def test_a_full_mailbox_does_not_fail_the_batch(bench: Bench) -> None:
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1))
    for number in range(3):
        await bench.push(str(number))
    await bench.push("k", to=EVE)
    await bench.flush()
    assert (bench.count(), bench.count(EVE)) == (1, 1)
    assert bench.ingress.counters.lost == {"queue_full": 2}
    assert ("mail.rejected", BOB) in [note[:2] for note in bench.told]


async def test_a_mailbox_that_was_full_refuses_the_next_pushes_for_a_moment(bench: Bench) -> None:
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1))
    for number in range(2):
        await bench.push(str(number))
    await bench.flush()
    with pytest.raises(MailboxFull, match="is full; nothing was accepted"):
        await bench.push("3")
    assert (await bench.push("3", to=EVE)).accepted
    bench.inner.transact(mailboxes.confirm, BOB, [mail.id for mail in bench.mails()])
    assert (await bench.push("4", durability="synced")).durability == "synced"  # Whoever waits learns how it is.
    await bench.pass_ms(1_000)
    assert (await bench.push("3")).accepted


async def test_whoever_asks_for_synced_learns_what_the_mailbox_says(bench: Bench) -> None:
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1))
    await bench.push("1", durability="synced")
    with pytest.raises(MailboxFull, match="is full with 1 mails"):
        await bench.push("2", durability="synced")
    bench.inner.transact(mailboxes.confirm, BOB, [mail.id for mail in bench.mails()])
    assert not (await bench.push("2", durability="synced")).deduped
    bench.inner.transact(mailboxes.block, EVE, ADA)
    with pytest.raises(SenderBlocked):
        await bench.push("3", to=EVE, durability="synced")
    assert not bench.ingress.counters.lost


async def test_a_push_that_cannot_be_stored_for_a_reason_that_nobody_foresaw_is_alone_with_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.inner.transact(lambda tx: tx.put(mailboxes.keys_of(BOB).box, b"\xc1 damaged"))
    tasks = [bench.begin("1", durability="synced"), bench.begin("2", to=EVE, durability="synced")]
    with pytest.raises(HoldfastError, match="see its log"):
        await tasks[0]
    assert (await tasks[1]).durability == "synced"
    assert bench.count(EVE) == 1
    assert "unexpected error while storing a push" in caplog.text


# A store that takes too long.


async def test_a_store_that_takes_two_seconds_loses_its_batch_and_nothing_is_written_later(bench: Bench) -> None:
    """Lesson 1: the keys of a batch that is given up are forgotten too."""
    bench.gate.close()
    synced = bench.begin("1", durability="synced")
    await bench.push("2")
    await until(bench.gate.reached.is_set)
    await bench.pass_ms(1_999)
    assert not synced.done()
    await bench.pass_ms(1)
    with pytest.raises(Busy, match="more than 2 s"):
        await synced
    again = bench.begin("1", durability="synced")
    await ticks()
    bench.gate.opened.set()  # It goes on now, and finds that it was given up.
    assert not (await again).deduped
    await bench.ingress.close()
    assert [msgspec.json.decode(mail.body)["idempotency_key"] for mail in bench.mails()] == ["1"]
    assert bench.ingress.counters.lost == {"busy": 1}


async def test_a_commit_that_comes_after_its_time_is_not_repeated_by_the_retry(bench: Bench) -> None:
    bench.gate.close("transact: answer")
    synced = bench.begin("1", durability="synced")
    await until(bench.gate.reached.is_set)
    await bench.pass_ms(2_000)
    with pytest.raises(Busy):
        await synced
    bench.gate.opened.set()
    again = await bench.push("1", durability="synced")
    assert (again.deduped, bench.count()) == (True, 1)


async def test_batches_behind_one_that_hangs_are_given_up_without_being_begun(bench: Bench) -> None:
    bench.gate.close()
    first = bench.begin("1", durability="synced")
    await until(bench.gate.reached.is_set)
    await bench.pass_ms(2_000)
    second = bench.begin("2", durability="synced")
    await bench.pass_ms(2_000)
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(each) for each in outcomes] == [Busy, Busy]
    bench.gate.opened.set()
    assert (await bench.push("3", durability="synced")).durability == "synced"
    assert bench.count() == 1


# Listeners.


async def test_listeners_hear_of_a_push_after_it_is_queued_and_before_it_is_stored(
    bench: Bench, clock: ManualClock
) -> None:
    heard: list[tuple[DataPush, int, int]] = []
    stop = bench.ingress.on_data_push(lambda push: heard.append((push, bench.ingress.depth, bench.count())))
    pushed = await bench.push("k", session_id="s", reply_to="r")
    await bench.push("k")
    ((push, depth, stored),) = heard
    assert push == DataPush(
        id=pushed.id,
        sender="ada@main",
        to="bob@main",
        topic="t",
        content_type="text/plain",
        payload=b"hello",
        idempotency_key="k",
        session_id="s",
        reply_to="r",
        received_ms=clock.now_ms(),
    )
    assert (depth, stored) == (1, 0)
    stop()
    await bench.push("l")
    assert len(heard) == 1


async def test_an_error_of_a_listener_does_not_fail_the_push(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Lesson 5: an error in a side effect was returned after the message had already been queued."""
    heard: list[DataPush] = []

    def fail(push: DataPush) -> None:
        raise RuntimeError("a listener's own fault")

    bench.ingress.on_data_push(fail)
    bench.ingress.on_data_push(heard.append)
    pushed = await bench.push(durability="synced")
    assert (pushed.accepted, pushed.deduped, bench.count(), len(heard)) == (True, False, 1, 1)
    assert "a listener's own fault" in caplog.text
    assert not bench.ingress.counters.rejects


# Rates.


async def test_a_peer_pushes_120_times_a_minute(clock: ManualClock) -> None:
    bench = Bench(clock, per_minute=120)
    for number in range(120):
        await bench.push(str(number))
    with pytest.raises(RateLimited, match=r"120 pushes per minute.*in 0\.5 s"):
        await bench.push("120")
    assert (await bench.push("k", sender=EVE)).accepted
    await bench.pass_ms(500)
    await bench.push("120")
    with pytest.raises(RateLimited):
        await bench.push("121")
    assert bench.ingress.counters.rejects == {"rate_limited": 2}
    await bench.ingress.close()


async def test_the_table_of_rates_is_pruned_and_bounded(clock: ManualClock) -> None:
    """Lesson 4: the per-peer rate table was never pruned: memory grew with every peer ever seen."""
    bench = Bench(clock, per_minute=120)
    rate_limiter = bench.ingress.rate_limiter
    for number in range(PUSH_PEERS_MAX + 500):
        assert rate_limiter.wait_ms(f"peer-{number}") == 0
    assert len(rate_limiter) == PUSH_PEERS_MAX
    clock.advance_ms(60_000)
    for number in range(PUSH_PEERS_MAX):
        rate_limiter.wait_ms(f"active-{number % 10}")
    assert len(rate_limiter) == 10
    await bench.ingress.close()


# What is checked, and in which order.


async def test_checks_are_made_in_the_order_of_the_contract(clock: ManualClock) -> None:
    bench = Bench(clock, per_minute=1)
    large = base64url(b"x" * 131_073)
    await bench.push("known", sender=EVE, topic="chat.message", session_id=SESSION)
    bad = new("", topic="chat.message", payload_base64="!" + large)
    with pytest.raises(InvalidArgument, match="idempotency_key is required"):
        await bench.ingress.push(EVE, BOB, bad)
    bad = msgspec.structs.replace(bad, idempotency_key="known")
    with pytest.raises(RateLimited):
        await bench.ingress.push(EVE, BOB, bad)
    clock.advance_ms(60_000)
    with pytest.raises(InvalidArgument, match="base64url without padding"):
        await bench.ingress.push(EVE, BOB, bad)
    clock.advance_ms(60_000)
    bad = msgspec.structs.replace(bad, payload_base64=large)
    with pytest.raises(PayloadTooLarge, match="131072"):
        await bench.ingress.push(EVE, BOB, bad)
    clock.advance_ms(60_000)
    bad = msgspec.structs.replace(bad, payload_base64="aGk")
    with pytest.raises(InvalidArgument, match="session_id"):
        await bench.ingress.push(EVE, BOB, bad)
    clock.advance_ms(60_000)
    good = msgspec.structs.replace(bad, session_id=SESSION)
    assert (await bench.ingress.push(EVE, BOB, good)).deduped
    await bench.ingress.close()


@pytest.mark.parametrize("text", ["a", "aGk=", "a+k", "a/k", "aG k", "aGé"])
async def test_a_payload_is_base64url_without_padding(bench: Bench, text: str) -> None:
    with pytest.raises(InvalidArgument, match="base64url without padding"):
        await bench.push(payload_base64=text)


@pytest.mark.parametrize("name", ["topic", "content_type", "payload_base64", "idempotency_key"])
async def test_what_is_required_is_not_blank(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is required"):
        await bench.push(**{"key": "k", name: " "} if name != "idempotency_key" else {"key": " "})


@pytest.mark.parametrize(
    "fields", [{"topic": "t" * 257}, {"topic": "a\nb"}, {"reply_to": "r" * 257}, {"content_type": "tëxt/plain"}]
)
async def test_texts_are_short_and_plain(bench: Bench, fields: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        await bench.push(**fields)


@pytest.mark.parametrize("session", [None, "s", "8f14e45f-ceea-467f-9e0a-5d6b6a3f8f10"])
async def test_a_chat_message_has_a_session_that_is_a_uuid7(bench: Bench, session: str | None) -> None:
    with pytest.raises(InvalidArgument, match="UUIDv7"):
        await bench.push(topic="chat.message", session_id=session)
    assert (await bench.push(topic="chat.message", session_id=SESSION)).accepted


# Payloads that are too large for a mail.


@pytest.mark.parametrize(("size", "is_blob"), [(40_000, False), (60_000, True), (131_072, True)])
async def test_a_payload_that_does_not_fit_a_mail_is_a_blob(bench: Bench, size: int, is_blob: bool) -> None:
    payload = bytes(range(256)) * 512
    await bench.push(payload=payload[:size], durability="synced")
    pushed = msgspec.json.decode(bench.mails()[0].body, type=PushedData)
    assert pushed.size == size
    assert (pushed.blob is not None, pushed.payload_base64 is None) == (is_blob, is_blob)
    if pushed.blob is not None:
        body = await AsyncBlobStore(bench.database, bench.objects).get("main", pushed.blob)
        assert body.data == payload[:size]


async def test_a_world_takes_less_than_a_mailbox_and_gets_blobs_sooner(bench: Bench) -> None:
    bench.inner.transact(worlds.create, worlds.World("main", "w"))
    bench.inner.transact(agents.register, "main", "bob", world="w")
    await bench.push("small", durability="synced")
    await bench.push("large", payload=b"x" * 5_000, durability="synced")
    items = bench.inner.read(inboxes.read, worlds.World("main", "w"), after=None, limit=10)
    bodies = [msgspec.json.decode(item.payload or b"", type=PushedData) for _, item in items]
    assert [body.blob is not None for body in bodies] == [False, True]


async def test_without_an_object_store_such_a_payload_is_refused(bench: Bench) -> None:
    bench.objects = None
    await bench.ingress.close()
    bench.ingress = bench.new_ingress()
    with pytest.raises(PayloadTooLarge, match="object store"):
        await bench.push(payload=b"x" * 60_000)
    assert bench.ingress._buffer._reserved == bench.ingress._buffer._bytes == 0  # Its room was given back,
    assert (await bench.push(payload=b"x")).accepted  # and its key.


async def test_an_object_store_that_fails_is_busy_and_gives_the_key_back(bench: Bench) -> None:
    bench.gate.fail(Unreachable("gone"))
    with pytest.raises(Busy, match="gone"):
        await bench.push(payload=b"x" * 60_000)
    assert not (await bench.push(payload=b"x" * 60_000)).deduped


# The end, and the next beginning.


async def test_closing_stores_what_was_accepted_and_refuses_the_rest(bench: Bench) -> None:
    for number in range(300):
        await bench.push(str(number))
    await bench.ingress.close()
    assert bench.count() == 300
    with pytest.raises(Closed):
        await bench.push("301")
    await bench.ingress.close()


async def test_an_ingress_that_nobody_used_closes_too(clock: ManualClock) -> None:
    bench = Bench(clock)
    await bench.ingress.close()
    with pytest.raises(Closed):
        await bench.push()


async def test_keys_outlive_the_process(bench: Bench) -> None:
    await bench.push("1")
    await bench.ingress.close()
    bench.inner.transact(mailboxes.confirm, BOB, [mail.id for mail in bench.mails()])  # So no mail tells of it either.
    bench.ingress = bench.new_ingress()
    again = await bench.push("1")
    assert (again.deduped, again.durability) == (True, "synced")


async def test_keys_are_written_down_every_five_seconds_if_there_are_new_ones(bench: Bench) -> None:
    await bench.push("1", durability="synced")
    await bench.pass_ms(1_000)
    assert bench.inner.read(dedupe.load) == []
    await bench.pass_until(lambda: len(bench.inner.read(dedupe.load)) == 1)


async def test_a_key_of_something_lost_is_never_written_down(bench: Bench) -> None:
    """Lesson 1, over a restart: what was lost with the process may be pushed again."""
    await bench.push("stored", durability="synced")
    bench.gate.fail(Unreachable("gone"))
    await bench.push("lost")
    await bench.flush()
    await bench.push("waiting")
    await bench.pass_until(lambda: bench.inner.read(dedupe.load))
    crashed, bench.ingress = bench.ingress, bench.new_ingress()
    assert (await bench.push("stored")).deduped
    assert not (await bench.push("lost")).deduped
    await crashed.close()


async def test_keys_that_cannot_be_written_down_are_later(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.push("1", durability="synced")
    bench.gate.fail(Unreachable("gone"))
    await bench.pass_until(lambda: "could not be saved" in caplog.text)
    await bench.ingress.close()
    assert len(bench.inner.read(dedupe.load)) == 1


async def test_keys_that_cannot_be_read_do_not_stop_the_ingress(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.ingress.close()
    bench.ingress = bench.new_ingress()
    bench.gate.fail(Unreachable("gone"), "read: begin")
    assert (await bench.push()).accepted
    assert "are not deduplicated: gone" in caplog.text


# Locks.


async def test_a_commit_holds_what_it_touches_in_the_declared_order_and_nothing_else(bench: Bench) -> None:
    """Lesson 6: the lock split was planned and never built."""
    bench.gate.close()
    task = bench.begin("k", durability="synced")
    await until(bench.gate.reached.is_set)
    held = [holder.path for holder in bench.locks.holders()]
    assert held == [("dedupe", ""), ("inbox", "bob@main"), ("outbox", "ada@main")]
    bench.gate.opened.set()
    await task
    assert bench.locks.holders() == []


async def test_a_commit_waits_for_what_somebody_holds_and_for_nothing_else(bench: Bench) -> None:
    """Lesson 6: unrelated resources do not hold each other up."""
    others = [("identity", "ada@main"), ("contacts", "bob@main"), ("inbox", "eve@main"), ("readstate", "bob@main")]
    async with await bench.locks.acquire_all_async(others):
        await bench.push("1", durability="synced")
    async with await bench.locks.acquire_async(("inbox", "bob@main")):
        waiting = bench.begin("2", durability="synced")
        await until(lambda: bench.locks.line_length(("inbox", "bob@main")) == 2)
        assert not waiting.done()
    await waiting
    assert bench.count() == 2


# Threads and loops.


async def test_an_ingress_belongs_to_one_event_loop(bench: Bench) -> None:
    await bench.push("1")

    def elsewhere() -> None:
        with pytest.raises(InvalidArgument, match="Another event loop"):
            asyncio.run(bench.push("2"))

    await asyncio.to_thread(elsewhere)


async def test_pushes_that_begin_at_once_begin_the_ingress_once(bench: Bench) -> None:
    pushed = await asyncio.gather(*(bench.push(str(number)) for number in range(10)))
    assert all(each.accepted for each in pushed)
    await bench.flush()
    assert bench.flushes == [10]


async def test_every_backend_stores_pushes_and_remembers_their_keys(database: Database) -> None:
    def ingress_on_it() -> Ingress:
        locks = LockTable(RESOURCE_LEVELS, nested=False)
        blobs = AsyncBlobStore(database, open_objects("memory:"))
        return Ingress(database, blobs, lambda _: None, locks=locks, pushes_per_minute=0)

    first = ingress_on_it()
    async with asyncio.timeout(SECONDS_MAX):
        pushed = await asyncio.gather(
            *(first.push(ADA, BOB, new(str(number), durability="synced")) for number in range(300))
        )
        assert {each.durability for each in pushed} == {"synced"}
        await first.close()
        second = ingress_on_it()
        assert (await second.push(ADA, BOB, new("7"))).deduped
        await second.push(ADA, BOB, new("300"))
        await second.close()
    mails = database.read(mailboxes.peek, BOB, after=-1, limit=256)
    mails += database.read(mailboxes.peek, BOB, after=mails[-1].sequence, limit=256)
    assert [msgspec.json.decode(mail.body)["idempotency_key"] for mail in mails] == [*map(str, range(301))]


# What a fault that nobody thought of leaves running.


async def test_the_writer_goes_on_when_nobody_can_be_told_of_a_flush(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(pushes: int, seconds: float) -> None:
        bench.ingress.on_flush(lambda *_: None)
        raise ZeroDivisionError

    bench.ingress.on_flush(fail)
    assert (await bench.push("first", durability="synced")).durability == "synced"
    assert (await bench.push("second", durability="synced")).durability == "synced"
    assert bench.count() == 2
    assert "ZeroDivisionError" in caplog.text


async def test_a_batch_whose_outcome_cannot_be_noted_is_told_to_whoever_waits_and_the_next_is_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, settled = bench.ingress.dedupe.settle, list[Any]()

    def fail_at_the_second(reservation: Any) -> None:
        settled.append(reservation)
        if len(settled) == 2:
            raise ZeroDivisionError
        settle(reservation)

    monkeypatch.setattr(bench.ingress.dedupe, "settle", fail_at_the_second)
    bench.gate.close()
    before = bench.begin("before", durability="synced", to=EVE)
    await until(bench.gate.reached.is_set)
    first, second = (bench.begin(key, durability="synced") for key in ("first", "second"))
    await ticks()
    settled.clear()
    bench.gate.opened.set()
    await before
    settled.clear()
    assert (await first).durability == "synced", "what is stored is not called lost"
    with pytest.raises(Busy, match="push it again"):
        await second
    again = await bench.push("second", durability="synced")
    assert (again.deduped, bench.count()) == (True, 2)


async def test_the_writer_goes_on_when_the_backlog_fails_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, failed = bench.ingress._buffer.next_batch, asyncio.Event()

    async def fail_once() -> list[Any]:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return await batch()

    monkeypatch.setattr(bench.ingress._buffer, "next_batch", fail_once)
    await bench.push("first", durability="synced")  # The writer waits in what was there before.
    await until(failed.is_set)
    await bench.push("second", durability="synced")
    assert bench.count() == 2


async def test_keys_are_tended_again_after_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prune, pruned = bench.ingress.dedupe.prune, list[int]()

    def fail_once() -> int:
        pruned.append(1)
        if len(pruned) == 1:
            raise ZeroDivisionError
        return prune()

    monkeypatch.setattr(bench.ingress.dedupe, "prune", fail_once)
    await bench.pass_until(lambda: len(pruned) >= 3)
    assert "unexpected error in the maintenance" in caplog.text
