"""The ingress: when pushes are accepted, stored, rejected or lost, and who is notified.

Commits run in a thread, so the tests wait for conditions; the clock is moved.
"""

import asyncio
import threading
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.errors import (
    Busy,
    Closed,
    CommitUnknown,
    FastnessError,
    InvalidArgument,
    MailboxFull,
    PayloadTooLarge,
    RateLimited,
    SenderBlocked,
    Unreachable,
)
from fastness.kv import Database, Event
from fastness.layers import agents, dedupe, inboxes, mailboxes, worlds
from fastness.layers.mailboxes import Address
from fastness.layers.mailboxes.keys import MailEvent
from fastness.limits import INGRESS_QUEUE_MAX, PUSH_PEERS_MAX
from fastness.runtime.blobs import AsyncBlobStore
from fastness.runtime.ingress.ingress import Ingress
from fastness.testing.clock import ManualClock
from fastness.testing.faults import FaultyDatabase
from fastness.wire.ingress import PUSH_MEDIA, DataPush, NewPush, Pushed, PushedData
from fastness.wire.mail import Envelope, MailPolicy
from tests.support.waiting import eventually_async

ADA, BOB, EVE = (Address("main", name) for name in ("ada", "bob", "eve"))
SECONDS_MAX = 60.0
SESSION = "01890a5d-ac96-774b-bcce-b302099a8057"


class Gate:
    """Faults that block a commit at a point until they are opened, and count operations."""

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
    """An ingress with its dependencies."""

    def __init__(self, clock: ManualClock, per_minute: int = 0) -> None:
        self.clock = clock
        self.gate = Gate()
        self.inner = MemoryDatabase(clock=clock)
        self.database = FaultyDatabase(self.inner, self.gate)
        self.events: list[Event] = []
        self.flushes: list[int] = []
        self.objects: Any = open_objects("memory:")
        self.per_minute = per_minute
        self.ingress = self.new_ingress()

    def new_ingress(self) -> Ingress:
        self.inner.publish = self.events.extend
        ingress = Ingress(
            self.database,
            AsyncBlobStore(self.database, self.objects),
            clock=self.clock,
            pushes_per_minute=self.per_minute,
        )
        ingress.on_flush(lambda pushes, _: self.flushes.append(pushes))
        return ingress

    @property
    def mail(self) -> list[MailEvent]:
        return [event for event in self.events if isinstance(event, MailEvent)]

    async def push(self, key: str = "k", *, sender: Address = ADA, to: Address = BOB, **fields: Any) -> Pushed:
        async with asyncio.timeout(SECONDS_MAX):  # A push that waits forever fails the test.
            return await self.ingress.push(sender, to, new(key, **fields))

    def begin(self, key: str, **fields: Any) -> "asyncio.Task[Pushed]":
        return asyncio.create_task(self.push(key, **fields))

    async def pass_ms(self, milliseconds: int) -> None:
        await ticks()
        self.clock.advance_ms(milliseconds)
        await ticks()

    async def pass_until(self, reached: Callable[[], Any]) -> None:
        """Advance the clock second by second until the condition holds; a thread may delay a sleeper."""

        async def reached_a_second_later() -> bool:
            await self.pass_ms(1_000)
            return bool(reached())

        if not reached():
            await eventually_async(reached_a_second_later)

    async def flush(self) -> None:
        """Make the batch due, and wait until it is processed."""
        before = len(self.flushes)
        await self.pass_ms(200)
        await eventually_async(lambda: len(self.flushes) > before)

    def mails(self, to: Address = BOB) -> list[Envelope]:
        return self.inner.read(mailboxes.peek, to, after=-1, limit=256)

    def count(self, to: Address = BOB) -> int:
        return self.inner.read(mailboxes.summary, to).box.count


def new(key: str = "k", **fields: Any) -> NewPush:
    payload = fields.pop("payload", b"hello")
    given = {"topic": "t", "content_type": "text/plain", "payload_base64": base64url(payload), "idempotency_key": key}
    return NewPush(**(given | fields))


def base64url(payload: bytes) -> str:
    return urlsafe_b64encode(payload).decode().rstrip("=")


async def ticks() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def bench(clock: ManualClock) -> AsyncIterator[Bench]:
    bench = Bench(clock)
    await bench.ingress.start()
    yield bench
    bench.gate.opened.set()
    await bench.ingress.close()
    bench.inner.close()


# Accepting and storing.


async def test_a_push_is_accepted_immediately_and_stored_200_ms_later(bench: Bench) -> None:
    pushed = await bench.push()
    assert (pushed.accepted, pushed.deduped, pushed.durability) == (True, False, "accepted")
    assert bench.ingress.depth == 1
    await bench.pass_ms(199)
    assert bench.count() == 0
    await bench.pass_ms(1)
    await eventually_async(lambda: bench.flushes == [1])
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
    [event] = bench.mail
    assert (event.event, event.to, event.id, event.sender) == ("stored", BOB, pushed.id, "ada@main")


async def test_256_pushes_are_stored_as_one_batch_without_waiting_200_ms(bench: Bench) -> None:
    for number in range(255):
        await bench.push(str(number))
    await ticks()
    assert bench.flushes == []
    await bench.push("255")
    await eventually_async(lambda: bench.flushes == [256])
    assert [msgspec.json.decode(mail.body)["idempotency_key"] for mail in bench.mails()] == [*map(str, range(256))]


async def test_a_synced_push_is_stored_before_it_returns(bench: Bench) -> None:
    pushed = await bench.push(durability="synced")
    assert pushed.durability == "synced"
    assert bench.count() == 1


async def test_synced_pushes_share_their_commits(bench: Bench) -> None:
    bench.gate.close()
    tasks = [bench.begin(str(number), durability="synced") for number in range(100)]
    await eventually_async(bench.gate.reached.is_set)
    bench.gate.opened.set()
    assert {(await task).durability for task in tasks} == {"synced"}
    assert len(bench.flushes) <= 2
    assert bench.count() == 100


async def test_pushes_accepted_during_a_commit_are_in_the_next_one(bench: Bench) -> None:
    bench.gate.close()
    first = bench.begin("1", durability="synced")
    await eventually_async(bench.gate.reached.is_set)
    await bench.push("2")
    assert bench.ingress.depth == 1
    bench.gate.opened.set()
    await first
    await bench.flush()
    assert bench.count() == 2
    assert bench.flushes == [1, 1]


# Keys.


async def test_a_repeated_push_is_accepted_and_stored_once(bench: Bench) -> None:
    first = await bench.push()
    again = await bench.push()
    assert (again.accepted, again.deduped, again.durability, again.id) == (True, True, "accepted", first.id)
    await bench.flush()
    stored = await bench.push()
    assert (stored.deduped, stored.durability) == (True, "synced")
    assert bench.count() == 1
    assert bench.ingress.counters.deduped == 2


async def test_a_key_applies_to_one_recipient_and_one_topic(bench: Bench) -> None:
    for each in ({}, {"to": EVE}, {"topic": "u"}, {"sender": EVE}):
        assert not (await bench.push("k", **each)).deduped


async def test_a_synced_duplicate_waits_for_the_first_push_and_flushes_it(bench: Bench) -> None:
    await bench.push()
    again = await bench.push(durability="synced")
    assert (again.deduped, again.durability) == (True, "synced")
    assert bench.count() == 1


async def test_a_key_expires_after_seven_days_and_is_pruned_in_the_background(bench: Bench) -> None:
    await bench.push(durability="synced")
    await bench.pass_ms(7 * 86_400_000 - 1)
    assert len(bench.ingress.dedupe) == 1
    await bench.pass_until(lambda: len(bench.ingress.dedupe) == 0)
    assert not (await bench.push()).deduped


@pytest.mark.parametrize("error", [Unreachable("gone"), CommitUnknown("lost"), RuntimeError("a fault of ours")])
@pytest.mark.parametrize("point", ["transact: begin", "transact: commit"])
async def test_a_failed_flush_releases_its_keys(
    bench: Bench, error: Exception, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed flush releases its dedupe keys, so a retry is stored."""
    bench.gate.fail(error, point)
    await bench.push("1")
    await bench.push("2")
    await bench.flush()
    assert bench.count() == 0
    assert bench.ingress.counters.lost == {"busy": 2}
    assert "a batch of pushes was dropped" in caplog.text
    again = await bench.push("1", durability="synced")
    assert (again.deduped, bench.count()) == (False, 1)


async def test_a_synced_push_gets_the_error_of_a_failed_flush_and_may_be_retried(bench: Bench) -> None:
    """Synced pushes wait for the flush."""
    bench.gate.fail(Unreachable("gone"))
    with pytest.raises(Busy, match=r"gone.*same idempotency key"):
        await bench.push(durability="synced")
    assert not bench.ingress.counters.lost
    assert not (await bench.push(durability="synced")).deduped


async def test_a_retry_after_a_lost_answer_is_not_stored_twice(bench: Bench) -> None:
    """The commit succeeded, but the sender did not get the answer."""
    bench.gate.fail(CommitUnknown("lost"), "transact: answer")
    with pytest.raises(Busy):
        await bench.push(durability="synced")
    again = await bench.push(durability="synced")
    assert (again.deduped, bench.count()) == (True, 1)


async def test_a_busy_push_releases_its_key(bench: Bench) -> None:
    """A key that stays reserved after Busy would discard the retry."""
    await fill(bench)
    late = bench.begin("late")
    await bench.pass_ms(20)
    with pytest.raises(Busy, match="same idempotency key"):
        await late
    bench.gate.opened.set()
    await eventually_async(lambda: not bench.ingress.depth)
    again = await bench.push("late", to=EVE, durability="synced")
    assert (again.deduped, bench.count(EVE)) == (False, 1)


async def test_a_duplicate_of_a_waiting_push_gets_the_same_outcome(bench: Bench) -> None:
    """A duplicate must not be reported as accepted if the first push was not."""
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


async def test_a_push_cancelled_while_waiting_for_space_releases_its_key(bench: Bench) -> None:
    await fill(bench)
    first = bench.begin("late")
    await ticks()
    second = bench.begin("late")
    await ticks()
    first.cancel()
    with pytest.raises(Busy, match="push it again"):
        await second
    bench.gate.opened.set()
    await eventually_async(lambda: not bench.ingress.depth)
    assert not (await bench.push("late")).deduped


# A full buffer.


async def fill(bench: Bench) -> None:
    """Block the writer in its first batch, and fill the buffer."""
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=100_000))
    bench.gate.close()
    first = bench.begin("first", durability="synced")
    await eventually_async(bench.gate.reached.is_set)
    for number in range(INGRESS_QUEUE_MAX):
        await bench.push(f"full-{number}")
    assert bench.ingress.depth == INGRESS_QUEUE_MAX
    assert not first.done()


async def test_a_full_buffer_raises_busy_and_does_not_block_the_event_loop(
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


async def test_a_waiting_push_gets_the_space_that_a_batch_frees(bench: Bench) -> None:
    await fill(bench)
    late = bench.begin("late")
    await ticks()
    bench.gate.opened.set()
    assert (await late).accepted
    await bench.ingress.close()
    assert bench.count() == INGRESS_QUEUE_MAX + 2


async def test_a_lagging_writer_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.gate.close()
    first = bench.begin("1", durability="synced")
    await eventually_async(bench.gate.reached.is_set)
    await bench.push("2")
    for _ in range(2):
        await bench.pass_ms(999)
    assert bench.ingress.lag_seconds > 1
    await eventually_async(lambda: "the writer of pushes is lagging" in caplog.text)
    bench.gate.opened.set()
    await first


# Rejections by mailboxes.


async def test_a_full_mailbox_does_not_fail_the_batch(bench: Bench) -> None:
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1))
    for number in range(3):
        await bench.push(str(number))
    await bench.push("k", to=EVE)
    await bench.flush()
    assert (bench.count(), bench.count(EVE)) == (1, 1)
    assert bench.ingress.counters.lost == {"queue_full": 2}
    assert ("rejected", BOB) in [(each.event, each.to) for each in bench.mail]


async def test_a_recently_full_mailbox_rejects_pushes_immediately(bench: Bench) -> None:
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1))
    for number in range(2):
        await bench.push(str(number))
    await bench.flush()
    with pytest.raises(MailboxFull, match="is full; nothing was accepted"):
        await bench.push("3")
    assert (await bench.push("3", to=EVE)).accepted
    bench.inner.transact(mailboxes.confirm, BOB, [mail.id for mail in bench.mails()])
    assert (await bench.push("4", durability="synced")).durability == "synced"  # A synced push is tried anyway.
    await bench.pass_ms(1_000)
    assert (await bench.push("3")).accepted


async def test_a_synced_push_gets_the_error_of_the_mailbox(bench: Bench) -> None:
    bench.inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1))
    await bench.push("1", durability="synced")
    with pytest.raises(MailboxFull, match="is full with 1 mail "):
        await bench.push("2", durability="synced")
    bench.inner.transact(mailboxes.confirm, BOB, [mail.id for mail in bench.mails()])
    assert not (await bench.push("2", durability="synced")).deduped
    bench.inner.transact(mailboxes.block, EVE, ADA)
    with pytest.raises(SenderBlocked):
        await bench.push("3", to=EVE, durability="synced")
    assert not bench.ingress.counters.lost


async def test_an_unexpected_error_of_one_push_does_not_affect_its_batch(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.inner.transact(lambda tx: tx.put(mailboxes.keys_of(BOB).box, b"\xc1 damaged"))
    tasks = [bench.begin("1", durability="synced"), bench.begin("2", to=EVE, durability="synced")]
    with pytest.raises(FastnessError, match="see its log"):
        await tasks[0]
    assert (await tasks[1]).durability == "synced"
    assert bench.count(EVE) == 1
    assert "unexpected error while storing a push" in caplog.text


# Slow stores.


async def test_a_commit_over_two_seconds_loses_its_batch_and_writes_nothing_later(bench: Bench) -> None:
    """The keys of an abandoned batch are released."""
    bench.gate.close()
    synced = bench.begin("1", durability="synced")
    await bench.push("2")
    await eventually_async(bench.gate.reached.is_set)
    await bench.pass_ms(1_999)
    assert not synced.done()
    await bench.pass_ms(1)
    with pytest.raises(Busy, match="more than 2 s"):
        await synced
    again = bench.begin("1", durability="synced")
    await ticks()
    bench.gate.opened.set()  # It continues now, and finds that it was abandoned.
    assert not (await again).deduped
    await bench.ingress.close()
    assert [msgspec.json.decode(mail.body)["idempotency_key"] for mail in bench.mails()] == ["1"]
    assert bench.ingress.counters.lost == {"busy": 1}


async def test_a_late_commit_is_not_repeated_by_a_retry(bench: Bench) -> None:
    bench.gate.close("transact: answer")
    synced = bench.begin("1", durability="synced")
    await eventually_async(bench.gate.reached.is_set)
    await bench.pass_ms(2_000)
    with pytest.raises(Busy):
        await synced
    bench.gate.opened.set()
    again = await bench.push("1", durability="synced")
    assert (again.deduped, bench.count()) == (True, 1)


async def test_batches_behind_a_hanging_commit_are_abandoned_before_they_start(bench: Bench) -> None:
    bench.gate.close()
    first = bench.begin("1", durability="synced")
    await eventually_async(bench.gate.reached.is_set)
    await bench.pass_ms(2_000)
    second = bench.begin("2", durability="synced")
    await bench.pass_ms(2_000)
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(each) for each in outcomes] == [Busy, Busy]
    bench.gate.opened.set()
    assert (await bench.push("3", durability="synced")).durability == "synced"
    assert bench.count() == 1


# Batches.


def batch(*keys: str, **fields: Any) -> list[tuple[Address, NewPush]]:
    return [(BOB, new(key, durability="synced", **fields)) for key in keys]


@pytest.mark.parametrize("size", [1, 60_000])
async def test_one_commit_stores_a_synced_batch(bench: Bench, size: int) -> None:
    """Large payloads wait for the object store in between, and still share the commit."""
    keys = [str(number) for number in range(20)]
    outcomes = (await bench.ingress.push_many(ADA, batch(*keys, payload=b"x" * size))).outcomes
    assert {each.pushed.durability for each in outcomes if each.pushed is not None} == {"synced"}
    assert (bench.flushes, bench.count()) == ([20], 20)


async def test_a_failed_commit_fails_a_batch_and_releases_its_keys(bench: Bench) -> None:
    bench.gate.fail(Unreachable("gone"))
    outcomes = (await bench.ingress.push_many(ADA, batch("1", "2"))).outcomes
    assert [each.code for each in outcomes] == ["busy", "busy"]
    assert not bench.ingress.counters.lost, "their caller got the error"
    outcomes = (await bench.ingress.push_many(ADA, batch("1", "2"))).outcomes
    assert [each.pushed is not None and not each.pushed.deduped for each in outcomes] == [True, True]
    assert bench.count() == 2


async def test_a_batch_ends_at_the_first_push_without_space(bench: Bench) -> None:
    """Otherwise each of its pushes would wait for space in turn."""
    bench.gate.close()
    await bench.push("first", durability="accepted")
    await bench.pass_ms(200)
    await eventually_async(bench.gate.reached.is_set)
    for number in range(INGRESS_QUEUE_MAX - 1):
        await bench.push(f"filler-{number}", to=Address("main", f"agent-{number % 8}"))
    pushing = asyncio.create_task(bench.ingress.push_many(ADA, batch("fits", *map(str, range(255)))))
    await bench.pass_ms(20)
    bench.gate.opened.set()
    outcomes = (await pushing).outcomes
    assert [each.code for each in outcomes] == [None] + ["busy"] * 255
    assert bench.ingress.counters.rejects == {"busy": 255}


# Listeners.


async def test_listeners_get_a_push_after_it_is_queued_and_before_it_is_stored(
    bench: Bench, clock: ManualClock
) -> None:
    received: list[tuple[DataPush, int, int]] = []
    stop = bench.ingress.on_data_push(lambda push: received.append((push, bench.ingress.depth, bench.count())))
    pushed = await bench.push("k", session_id="s", reply_to="r")
    await bench.push("k")
    ((push, depth, stored),) = received
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
    assert len(received) == 1


async def test_an_error_of_a_listener_does_not_fail_the_push(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The push is already queued, so it must be reported as accepted."""
    received: list[DataPush] = []

    def fail(push: DataPush) -> None:
        raise RuntimeError("a listener's own fault")

    bench.ingress.on_data_push(fail)
    bench.ingress.on_data_push(received.append)
    pushed = await bench.push(durability="synced")
    assert (pushed.accepted, pushed.deduped, bench.count(), len(received)) == (True, False, 1, 1)
    assert "a listener's own fault" in caplog.text
    assert not bench.ingress.counters.rejects


# Rate limits.


async def test_a_sender_may_push_120_times_per_minute(clock: ManualClock) -> None:
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


async def test_the_rate_limiter_is_pruned_and_bounded(clock: ManualClock) -> None:
    """Memory does not grow with the number of senders ever seen."""
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


# Validation.


async def test_checks_run_in_the_documented_order(clock: ManualClock) -> None:
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
async def test_required_fields_must_not_be_blank(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is required"):
        wrong: dict[str, Any] = {"key": "k", name: " "} if name != "idempotency_key" else {"key": " "}
        await bench.push(**wrong)


@pytest.mark.parametrize(
    "fields", [{"topic": "t" * 257}, {"topic": "a\nb"}, {"reply_to": "r" * 257}, {"content_type": "tëxt/plain"}]
)
async def test_text_fields_are_short_and_have_no_control_characters(bench: Bench, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        await bench.push(**fields)


@pytest.mark.parametrize("session", [None, "s", "8f14e45f-ceea-467f-9e0a-5d6b6a3f8f10"])
async def test_a_chat_message_needs_a_uuid7_session(bench: Bench, session: str | None) -> None:
    with pytest.raises(InvalidArgument, match="UUIDv7"):
        await bench.push(topic="chat.message", session_id=session)
    assert (await bench.push(topic="chat.message", session_id=SESSION)).accepted


# Payloads that are too large for a mail.


@pytest.mark.parametrize(("size", "is_blob"), [(40_000, False), (60_000, True), (131_072, True)])
async def test_a_payload_too_large_for_a_mail_becomes_a_blob(bench: Bench, size: int, is_blob: bool) -> None:
    payload = bytes(range(256)) * 512
    await bench.push(payload=payload[:size], durability="synced")
    pushed = msgspec.json.decode(bench.mails()[0].body, type=PushedData)
    assert pushed.size == size
    assert (pushed.blob is not None, pushed.payload_base64 is None) == (is_blob, is_blob)
    if pushed.blob is not None:
        body = await AsyncBlobStore(bench.database, bench.objects).get("main", pushed.blob)
        assert body.data == payload[:size]


async def test_pushes_to_a_world_become_blobs_at_its_lower_limit(bench: Bench) -> None:
    bench.inner.transact(worlds.create, worlds.World("main", "w"))
    bench.inner.transact(agents.register, "main", "bob", world="w")
    await bench.push("small", durability="synced")
    await bench.push("large", payload=b"x" * 5_000, durability="synced")
    items = bench.inner.read(inboxes.read, worlds.World("main", "w"), after=None, limit=10)
    bodies = [msgspec.json.decode(item.payload or b"", type=PushedData) for _, item in items]
    assert [body.blob is not None for body in bodies] == [False, True]


async def test_a_large_payload_without_an_object_store_is_rejected(bench: Bench) -> None:
    bench.objects = None
    await bench.ingress.close()
    bench.ingress = bench.new_ingress()
    with pytest.raises(PayloadTooLarge, match="object store"):
        await bench.push(payload=b"x" * 60_000)
    assert bench.ingress._buffer._reserved == bench.ingress._buffer._bytes == 0  # Its space is released,
    assert (await bench.push(payload=b"x")).accepted  # and so is its key.


async def test_a_failing_object_store_raises_busy_and_releases_the_key(bench: Bench) -> None:
    bench.gate.fail(Unreachable("gone"))
    with pytest.raises(Busy, match="gone"):
        await bench.push(payload=b"x" * 60_000)
    assert not (await bench.push(payload=b"x" * 60_000)).deduped


# Closing and restarting.


async def test_close_stores_accepted_pushes_and_rejects_new_ones(bench: Bench) -> None:
    for number in range(300):
        await bench.push(str(number))
    await bench.ingress.close()
    assert bench.count() == 300
    with pytest.raises(Closed):
        await bench.push("301")
    await bench.ingress.close()


async def test_an_unused_ingress_can_be_closed(clock: ManualClock) -> None:
    bench = Bench(clock)
    await bench.ingress.close()
    with pytest.raises(Closed):
        await bench.push()


async def test_keys_survive_a_restart(bench: Bench) -> None:
    await bench.push("1")
    await bench.ingress.close()
    bench.inner.transact(mailboxes.confirm, BOB, [mail.id for mail in bench.mails()])  # It no longer deduplicates.
    bench.ingress = bench.new_ingress()
    again = await bench.push("1")
    assert (again.deduped, again.durability) == (True, "synced")


async def test_new_keys_are_saved_every_five_seconds(bench: Bench) -> None:
    await bench.push("1", durability="synced")
    await bench.pass_ms(1_000)
    assert bench.inner.read(dedupe.load) == []
    await bench.pass_until(lambda: len(bench.inner.read(dedupe.load)) == 1)


async def test_the_key_of_a_lost_push_is_never_saved(bench: Bench) -> None:
    """A push that was lost in a crash may be pushed again after the restart."""
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


async def test_a_failed_save_of_keys_is_retried(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.push("1", durability="synced")
    bench.gate.fail(Unreachable("gone"))
    # On a slow machine a save may also time out, before the failure or instead of it.
    await bench.pass_until(lambda: bench.gate.error is None and "could not be saved" in caplog.text)
    await bench.ingress.close()
    assert len(bench.inner.read(dedupe.load)) == 1


async def test_keys_are_saved_again_if_a_close_interrupts_their_save(bench: Bench) -> None:
    await bench.push("1", durability="synced")
    bench.gate.close("transact: commit")
    bench.gate.fail(Unreachable("gone"))
    await bench.pass_until(bench.gate.reached.is_set)
    closing = asyncio.create_task(bench.ingress.close())
    await ticks()
    bench.gate.opened.set()
    await closing
    assert len(bench.inner.read(dedupe.load)) == 1


async def test_unreadable_keys_do_not_stop_the_ingress(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.ingress.close()
    bench.ingress = bench.new_ingress()
    bench.gate.fail(Unreachable("gone"), "read: begin")
    assert (await bench.push()).accepted
    assert "are not deduplicated: gone" in caplog.text


# Threads and loops.


async def test_an_ingress_runs_on_one_event_loop(bench: Bench) -> None:
    await bench.push("1")

    def elsewhere() -> None:
        with pytest.raises(InvalidArgument, match="Another event loop"):
            asyncio.run(bench.push("2"))

    await asyncio.to_thread(elsewhere)


async def test_concurrent_first_pushes_start_the_ingress_once(bench: Bench) -> None:
    pushed = await asyncio.gather(*(bench.push(str(number)) for number in range(10)))
    assert all(each.accepted for each in pushed)
    await bench.flush()
    assert bench.flushes == [10]


async def test_every_backend_stores_pushes_and_remembers_their_keys(database: Database) -> None:
    def ingress_on_it() -> Ingress:
        blobs = AsyncBlobStore(database, open_objects("memory:"))
        return Ingress(database, blobs, pushes_per_minute=0)

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


# Unexpected errors.


async def test_the_writer_continues_when_the_flush_listener_fails(
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


async def test_an_error_after_the_commit_reaches_the_waiters_and_the_next_batch_is_stored(
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
    await eventually_async(bench.gate.reached.is_set)
    first, second = (bench.begin(key, durability="synced") for key in ("first", "second"))
    await ticks()
    settled.clear()
    bench.gate.opened.set()
    await before
    settled.clear()
    assert (await first).durability == "synced", "a stored push is not reported as lost"
    with pytest.raises(Busy, match="push it again"):
        await second
    again = await bench.push("second", durability="synced")
    assert (again.deduped, bench.count()) == (True, 2)


async def test_the_writer_continues_when_the_buffer_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, failed = bench.ingress._buffer.next_batch, asyncio.Event()

    async def fail_once() -> list[Any]:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return await batch()

    monkeypatch.setattr(bench.ingress._buffer, "next_batch", fail_once)
    await bench.push("first", durability="synced")  # The writer waits in the unpatched method.
    await eventually_async(failed.is_set)
    await bench.push("second", durability="synced")
    assert bench.count() == 2


async def test_key_maintenance_continues_after_a_failure(
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
