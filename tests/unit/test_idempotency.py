"""Calls that are sent twice happen once: by whatever door, on every backend, whatever was lost on the way."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from holdfast.errors import (
    HeadAdvanced,
    IdempotencyKeyReused,
    InvalidArgument,
    InvalidName,
    LeaseExpired,
    LeaseHeld,
    Unreachable,
    VersionConflict,
)
from holdfast.kv import Database, Subspace, Transaction
from holdfast.layers import idempotency as once_module
from holdfast.layers import leases, queues
from holdfast.layers.idempotency import KeyedCall, once, sending
from holdfast.layers.leases import LeaseKey
from holdfast.layers.queues import Leased, Purged, QueueKey, Redriven
from holdfast.limits import MESSAGES_MAX, ONCE_KEY_BYTES_MAX, ONCE_PERIOD_SECONDS
from holdfast.plane.batching import call_batch
from holdfast.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from holdfast.plane.idempotency import keyed_call_of
from holdfast.plane.services import Services
from holdfast.runtime.activity.log import RecentKeys
from holdfast.testing.clock import ManualClock
from holdfast.tiers import Tier, TierPolicy
from holdfast.wire.activity import LogRecords, ReadLog
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.entities import EntityWrite, PutEntity, WriteEntities
from holdfast.wire.frames import Call
from holdfast.wire.leases import (
    AcquireLease,
    CheckLease,
    DescribeLease,
    Granted,
    KeepLease,
    LeaseProof,
    ReleaseLease,
)
from holdfast.wire.problems import error_of, problem_of
from holdfast.wire.queues import (
    AckMessages,
    Deliveries,
    ExtendMessages,
    GetQueueStats,
    MessageLease,
    Moved,
    NewMessage,
    PurgeQueue,
    PutMessages,
    ReceiveMessages,
    RedriveMessages,
    RejectMessages,
)
from holdfast.wire.requests import Request
from holdfast.wire.states import UpdateState
from holdfast.wire.worlds import AppendEntries, CreateWorld

PATIENCE_SECONDS = 30.0  # Far more than anything here takes.
PERIOD_MS = ONCE_PERIOD_SECONDS * 1_000
PUT = PutMessages("jobs", [NewMessage(b"a", attributes={"a": "1", "b": "2"})])


@pytest.fixture
def transport(database: Database, clock: ManualClock) -> Iterator[EmbeddedTransport]:
    transport = EmbeddedTransport(Services(database, clock=clock))
    yield transport
    transport.close()


def send(transport: EmbeddedTransport, request: Request[Any], key: str = "k", *, again: bool = True) -> Any:
    return transport.call(request, keyed_call_of(transport, request, key, again=again))


def put_total(transport: EmbeddedTransport) -> int:
    return transport.call(GetQueueStats("jobs")).put_total


# What is remembered.


def test_a_call_that_is_sent_again_is_answered_alike(transport: EmbeddedTransport, clock: ManualClock) -> None:
    first = send(transport, PUT, again=False)
    clock.advance_ms(PERIOD_MS)
    assert send(transport, PUT) == first
    assert put_total(transport) == 1


def test_calls_of_different_keys_are_different_calls(transport: EmbeddedTransport) -> None:
    assert send(transport, PUT, "one") != send(transport, PUT, "two")
    assert put_total(transport) == 2


def test_a_call_that_failed_has_not_happened(transport: EmbeddedTransport) -> None:
    transport.call(CreateWorld("w"))
    append = AppendEntries("w", [b"\x01"], 1)
    with pytest.raises(HeadAdvanced):
        send(transport, append)
    transport.call(AppendEntries("w", [b"\x00"], 0))
    assert send(transport, append).height == send(transport, append).height == 1


def test_a_key_is_forgotten_after_two_periods(transport: EmbeddedTransport, clock: ManualClock) -> None:
    send(transport, PUT)
    clock.advance_ms(2 * PERIOD_MS)
    send(transport, PUT)
    assert put_total(transport) == 2


def remembered(transport: EmbeddedTransport) -> int:
    begin, end = Subspace("once").range()
    return len(transport.services.database.read(Transaction.scan, begin, end, limit=1_000))


def test_what_is_remembered_does_not_pile_up(
    transport: EmbeddedTransport, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once broken: nobody ever forgot a key."""
    monkeypatch.setattr(once_module, "ONCE_FORGET_BATCH", 3)
    for number in range(10):
        send(transport, PUT, f"k{number}")
    transport.services.sendings.stop()
    clock.advance_ms(PERIOD_MS)
    send(transport, PUT, "later")
    transport.services.sendings.stop()
    assert remembered(transport) == 11
    clock.advance_ms(PERIOD_MS)
    send(transport, PUT, "latest")
    transport.services.sendings.stop()
    assert remembered(transport) == 2
    assert send(transport, PUT, "later") != send(transport, PUT, "latest")
    assert put_total(transport) == 12


@pytest.mark.parametrize("error", [Unreachable("on purpose"), ZeroDivisionError("on purpose")])
def test_what_cannot_be_forgotten_now_is_forgotten_later(
    transport: EmbeddedTransport,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    database = transport.services.database
    send(transport, PUT)
    transport.services.sendings.stop()
    clock.advance_ms(2 * PERIOD_MS)
    with monkeypatch.context() as patch:

        def refuse(*args: Any, **options: Any) -> Any:
            raise error

        patch.setattr(database, "read", refuse)
        send(transport, PUT)
        transport.services.sendings.stop()
    assert "on purpose" in caplog.text
    assert remembered(transport) == 2
    clock.advance_ms(PERIOD_MS)
    send(transport, PUT, "other")
    transport.services.sendings.stop()
    assert remembered(transport) == 2


def test_a_list_that_is_sent_again_is_answered_with_the_same_types(transport: EmbeddedTransport) -> None:
    """The HTTP door looks at types to say what an answer looks like as JSON."""
    request = CommitAtomic([PUT, UpdateState("s", b"\x01")])
    first = send(transport, request)
    assert send(transport, request) == first
    assert [type(answer) for answer in first.answers] == [type(answer) for answer in send(transport, request).answers]


@pytest.mark.parametrize("key", ["", "x" * (ONCE_KEY_BYTES_MAX + 1)])
def test_a_key_that_is_none_is_refused(transport: EmbeddedTransport, key: str) -> None:
    with pytest.raises(InvalidArgument, match="UUID"):
        send(transport, PUT, key)
    assert put_total(transport) == 0


# Another call under the same key.


def changed(request: Request[Any], **fields: Any) -> Any:
    return msgspec.structs.replace(request, **fields)


@pytest.mark.parametrize(
    "other",
    [
        changed(PUT, messages=[NewMessage(b"b")]),
        changed(PUT, messages=[*PUT.messages, *PUT.messages]),
        changed(PUT, queue="jobs2"),
        changed(PUT, universe="other"),
        UpdateState("s", b"\x01"),
        CommitAtomic([PUT]),
    ],
    ids=["payload", "batch", "queue", "universe", "operation", "list"],
)
def test_a_key_of_another_call_is_refused(transport: EmbeddedTransport, other: Request[Any]) -> None:
    first = send(transport, PUT)
    with pytest.raises(IdempotencyKeyReused, match="its own"):
        send(transport, other)
    assert send(transport, PUT) == first
    assert put_total(transport) == 1


def test_what_says_the_same_is_the_same_call(transport: EmbeddedTransport) -> None:
    """Maps have no order, and what is not said is what it is by default."""
    first = send(transport, PUT)
    other = PutMessages("jobs", [NewMessage(b"a", attributes={"b": "2", "a": "1"}, priority=5)], universe="main")
    assert send(transport, other) == first


def test_a_key_that_was_reused_is_no_server_error() -> None:
    problem = problem_of(IdempotencyKeyReused("x"))
    assert (problem.status, problem.code, problem.retry) == (422, "idempotency_key_reused", "never")
    assert isinstance(error_of(problem), IdempotencyKeyReused)


# Receives: what was leased and not heard of is told again.


def receive(key: str = "r", *, max_messages: int = 10, **options: Any) -> tuple[ReceiveMessages, str]:
    return ReceiveMessages("jobs", "ada", max_messages, **options), key


def put(transport: EmbeddedTransport, *payloads: bytes) -> None:
    transport.call(PutMessages("jobs", [NewMessage(payload) for payload in payloads]))


def leases_of(deliveries: Deliveries) -> list[MessageLease]:
    return [MessageLease(each.id, each.lease_id, each.fence) for each in deliveries.messages]


def counts(transport: EmbeddedTransport) -> tuple[int, int, int]:
    stats = transport.call(GetQueueStats("jobs"))
    return stats.ready, stats.leased, stats.delivered_total


def test_a_receive_that_is_sent_again_gets_the_same_leases(transport: EmbeddedTransport, clock: ManualClock) -> None:
    put(transport, b"a", bytes(2_000), bytes(16_000), b"not for this one")
    first = send(transport, *receive(max_messages=3), again=False)
    clock.advance_ms(1_000)
    assert send(transport, *receive(max_messages=3)) == first
    assert [each.payload for each in first.messages] == [b"a", bytes(2_000), bytes(16_000)]
    assert counts(transport) == (1, 3, 3)
    outcomes = transport.call(AckMessages("jobs", leases_of(first))).outcomes
    assert [outcome.code for outcome in outcomes] == [None] * 3


def test_what_is_not_leased_any_more_is_left_out_and_nothing_takes_its_place(
    transport: EmbeddedTransport, clock: ManualClock
) -> None:
    put(transport, b"a", b"b", b"c")
    first = send(transport, *receive(max_messages=2, visibility_seconds=5.0))
    transport.call(AckMessages("jobs", leases_of(first)[:1]))
    assert send(transport, *receive(max_messages=2, visibility_seconds=5.0)).messages == first.messages[1:]
    clock.advance_ms(5_000)
    assert send(transport, *receive(max_messages=2, visibility_seconds=5.0)).messages == []
    assert counts(transport)[2] == 2
    other = send(transport, *receive("other"))
    assert send(transport, *receive(max_messages=2, visibility_seconds=5.0)).messages == []
    assert [each.payload for each in other.messages] == [b"b", b"c"]


def test_a_lease_that_was_extended_is_told_as_it_is_now(transport: EmbeddedTransport) -> None:
    put(transport, b"a")
    first = send(transport, *receive())
    until_ms = transport.call(ExtendMessages("jobs", leases_of(first), 600.0)).outcomes[0].expires_ms
    assert send(transport, *receive()).messages == [changed(first.messages[0], expires_ms=until_ms)]


def test_a_receive_that_found_nothing_has_not_happened(transport: EmbeddedTransport) -> None:
    assert send(transport, *receive()).messages == []
    put(transport, b"a")
    assert len(send(transport, *receive()).messages) == 1


def test_the_workflow_state_is_told_again_with_its_lease(transport: EmbeddedTransport) -> None:
    put(transport, b"a")
    first = send(transport, *receive(with_state=True))
    assert send(transport, *receive(with_state=True)) == first
    state = first.messages[0].state
    transport.call(UpdateState(state.lease.key, b"\x01", state.lease))
    again = send(transport, *receive(with_state=True)).messages[0].state
    assert (again.value, again.lease) == (b"\x01", state.lease)


def test_a_key_of_another_receive_is_refused(transport: EmbeddedTransport) -> None:
    put(transport, b"a", b"b")
    send(transport, *receive(max_messages=1))
    with pytest.raises(IdempotencyKeyReused):
        send(transport, *receive(max_messages=2))


QUEUE = QueueKey("main", "jobs")


def lease_once(transport: EmbeddedTransport, *, again: bool = True) -> tuple[Leased, KeyedCall]:
    call = keyed_call_of(transport, *receive(max_messages=1), again=again)
    assert call is not None
    return transport.services.database.transact(queues.lease_once, QUEUE, call=call, owner="ada", limit=1), call


@pytest.mark.parametrize("again", [True, False])
def test_what_is_given_back_was_never_leased(transport: EmbeddedTransport, again: bool) -> None:
    """A server gives back what a receive has leased whose connection broke: sent again, it leases anew."""
    put(transport, b"a", b"b")
    leased, call = lease_once(transport, again=again)
    transport.services.database.transact(queues.give_back_once, QUEUE, leased, call)
    assert counts(transport) == (2, 0, 1)
    assert [each.fence for each in send(transport, *receive(max_messages=1)).messages] == [2]


@pytest.mark.parametrize("late", [True, False])
def test_what_somebody_asked_for_again_is_not_given_back(transport: EmbeddedTransport, late: bool) -> None:
    """The caller has come back on another connection before the server was done with the broken one. The receive that
    was on the broken one may even be carried out after the one that was sent again."""
    put(transport, b"a", b"b")
    early = keyed_call_of(transport, *receive(max_messages=1), again=False)
    assert early is not None
    database = transport.services.database
    if late:
        answered = send(transport, *receive(max_messages=1))
        broken = database.transact(queues.lease_once, QUEUE, call=early, owner="ada", limit=1)
    else:
        broken = database.transact(queues.lease_once, QUEUE, call=early, owner="ada", limit=1)
        answered = send(transport, *receive(max_messages=1))
    database.transact(queues.give_back_once, QUEUE, broken, early)
    assert counts(transport) == (1, 1, 1)
    assert transport.call(AckMessages("jobs", leases_of(answered))).outcomes[0].code is None


async def standing(transport: AsyncEmbeddedTransport, line: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await transport.call(GetQueueStats("jobs"))).waiting_consumers != line:
            await asyncio.sleep(0.001)


@pytest.fixture
async def async_transport(database: Database, clock: ManualClock) -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = AsyncEmbeddedTransport(Services(database, clock=clock))
    yield transport
    await transport.close()


def sending_of(transport: AsyncEmbeddedTransport, request: Request[Any], key: str, *, again: bool = True) -> Any:
    return asyncio.create_task(transport.call(request, keyed_call_of(transport, request, key, again=again)))


async def test_a_receive_that_waits_twice_gets_the_same_leases(async_transport: AsyncEmbeddedTransport) -> None:
    """A proxy may keep a connection open whose caller has given up and asks again on another one."""
    transport, asked = async_transport, receive(wait_seconds=600.0)
    tasks = []
    for number in range(2):
        tasks.append(sending_of(transport, *asked, again=bool(number)))
        await standing(transport, number + 1)
    other = sending_of(transport, *receive("other", wait_seconds=600.0))
    await standing(transport, 3)
    await transport.call(PUT)
    first, second = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
    assert first == second
    await standing(transport, 1)
    # Whoever has something already does not stand behind those who wait.
    assert await asyncio.wait_for(sending_of(transport, *asked), PATIENCE_SECONDS) == first
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_a_first_sending_does_not_pass_those_who_wait(async_transport: AsyncEmbeddedTransport) -> None:
    transport, tasks = async_transport, []
    for number in range(3):
        tasks.append(
            sending_of(transport, *receive(f"r{number}", max_messages=1, wait_seconds=600.0), again=number == 1)
        )
        await standing(transport, number + 1)
    for number in range(3):
        await transport.call(PutMessages("jobs", [NewMessage(bytes([number]))]))
        found = await asyncio.wait_for(tasks[number], PATIENCE_SECONDS)
        assert [each.payload for each in found.messages] == [bytes([number])]


@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_a_receive_that_was_cancelled_is_sent_again(async_transport: AsyncEmbeddedTransport, steps: int) -> None:
    """At whatever point its connection broke: the message is delivered by the next sending, and nothing has failed."""
    transport = async_transport
    await transport.call(PUT)
    first = sending_of(transport, *receive(), again=False)
    for _ in range(steps):
        await asyncio.sleep(0)
    first.cancel()
    second = await sending_of(transport, *receive())
    await asyncio.gather(first, return_exceptions=True)
    assert len(second.messages) == 1
    outcomes = (await transport.call(AckMessages("jobs", leases_of(second)))).outcomes
    stats = await transport.call(GetQueueStats("jobs"))
    assert (outcomes[0].code, stats.acked_total, stats.failed_total) == (None, 1, 0)


# Leases: what was granted and not heard of is told again.


def acquire(key: str = "a", owner: str = "ada", **options: Any) -> tuple[AcquireLease, str]:
    return AcquireLease("deploy", owner, 30.0, **options), key


def proof_of(granted: Granted) -> LeaseProof:
    return LeaseProof(granted.key, granted.lease_id, granted.fence)


def test_an_acquire_that_is_sent_again_gets_the_same_fence(transport: EmbeddedTransport, clock: ManualClock) -> None:
    first = send(transport, *acquire(), again=False)
    clock.advance_ms(1_000)
    assert send(transport, *acquire()) == first
    kept = transport.call(KeepLease(proof_of(first), 60.0))
    assert send(transport, *acquire()) == kept
    transport.call(CheckLease(proof_of(first)))
    with pytest.raises(IdempotencyKeyReused):
        send(transport, *acquire(owner="bob"))


def test_an_acquire_that_found_it_held_has_not_happened(transport: EmbeddedTransport) -> None:
    held = transport.call(AcquireLease("deploy", "bob"))
    with pytest.raises(LeaseHeld):
        send(transport, *acquire())
    transport.call(ReleaseLease(proof_of(held)))
    assert send(transport, *acquire()).fence == held.fence + 1


def test_one_call_acquires_once(transport: EmbeddedTransport, clock: ManualClock) -> None:
    """A late copy of a call takes no lease that nobody will use, and nobody believes to have one that has ended."""
    first = send(transport, *acquire())
    transport.call(ReleaseLease(proof_of(first)))
    with pytest.raises(LeaseExpired, match="anew"):
        send(transport, *acquire())
    second = send(transport, *acquire("b"))
    clock.advance_ms(30_000)
    with pytest.raises(LeaseExpired, match="anew"):
        send(transport, *acquire("b"))
    third = send(transport, *acquire("c", "bob"))
    assert (first.fence, second.fence, third.fence) == (1, 2, 3)


LEASE = LeaseKey("main", "deploy")


@pytest.mark.parametrize("asked_again", [False, True])
def test_a_lease_is_given_back_unless_somebody_has_asked_for_it_again(
    transport: EmbeddedTransport, asked_again: bool
) -> None:
    early = keyed_call_of(transport, *acquire(), again=False)
    assert early is not None
    database = transport.services.database
    grant, is_new = database.transact(leases.acquire_once, LEASE, early, owner="ada", ttl_ms=30_000)
    if asked_again:
        send(transport, *acquire())
    proof = LeaseProof("deploy", grant.lease_id, grant.fence)
    assert database.transact(leases.release_once, proof, early) is not asked_again
    assert is_new
    again = send(transport, *acquire())
    assert (again.fence, again.lease_id == grant.lease_id) == ((1, True) if asked_again else (2, False))


async def test_an_acquire_that_waits_twice_gets_the_same_fence(async_transport: AsyncEmbeddedTransport) -> None:
    transport = async_transport
    held = await transport.call(AcquireLease("deploy", "bob", 600.0))
    tasks = []

    async def in_line(line: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await transport.call(DescribeLease("deploy"))).waiting != line:
                await asyncio.sleep(0.001)

    for number, (request, key) in enumerate(
        [acquire(wait_seconds=600.0), acquire(wait_seconds=600.0), acquire("c", "eve", wait_seconds=600.0)]
    ):
        tasks.append(sending_of(transport, request, key, again=number == 1))
        await in_line(number + 1)
    await transport.call(ReleaseLease(proof_of(held)))
    first, second = await asyncio.wait_for(asyncio.gather(*tasks[:2]), PATIENCE_SECONDS)
    assert first == second
    await in_line(1)
    # Whoever has it already does not stand behind those who wait.
    assert await asyncio.wait_for(sending_of(transport, *acquire(wait_seconds=600.0)), PATIENCE_SECONDS) == first
    await transport.call(ReleaseLease(proof_of(first)))
    assert (await asyncio.wait_for(tasks[2], PATIENCE_SECONDS)).owner == "eve"
    # Nor does whoever had it.
    other = sending_of(transport, *acquire("d", "zoe", wait_seconds=600.0))
    await in_line(1)
    with pytest.raises(LeaseExpired):
        await asyncio.wait_for(sending_of(transport, *acquire(wait_seconds=600.0)), PATIENCE_SECONDS)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize("steps", range(0, 24, 2))
@pytest.mark.parametrize("keyed", [True, False])
async def test_an_acquire_that_was_cancelled_holds_nothing(
    async_transport: AsyncEmbeddedTransport, steps: int, keyed: bool
) -> None:
    transport = async_transport
    request, key = acquire()
    first = sending_of(transport, request, key, again=False) if keyed else asyncio.create_task(transport.call(request))
    for _ in range(steps):
        await asyncio.sleep(0)
    first.cancel()
    (outcome,) = await asyncio.gather(first, return_exceptions=True)
    described = await transport.call(DescribeLease("deploy"))
    assert described.held == (not isinstance(outcome, asyncio.CancelledError))
    if keyed:
        again = await sending_of(transport, request, key)
        assert again == outcome or isinstance(outcome, asyncio.CancelledError)
        await transport.call(CheckLease(proof_of(again)))


# What is more than one commit goes on where it was.


def dead_letters(transport: EmbeddedTransport, count: int) -> None:
    for first in range(0, count, 100):
        transport.call(PutMessages("jobs", [NewMessage(b"x") for _ in range(first, min(first + 100, count))]))
        found = transport.call(ReceiveMessages("jobs", "ada", 100))
        transport.call(RejectMessages("jobs", leases_of(found)))


@pytest.mark.parametrize("parts_done", [0, 1, 2])
def test_a_redrive_that_was_interrupted_moves_no_more_than_it_was_asked_to(
    transport: EmbeddedTransport, parts_done: int
) -> None:
    dead_letters(transport, MESSAGES_MAX + 50)
    request = RedriveMessages("jobs", limit=MESSAGES_MAX + 10)
    call = keyed_call_of(transport, request, "r", again=False)
    so_far = Redriven()
    for _ in range(parts_done):  # Then the connection broke.
        options = {"ids": None, "limit": request.limit}
        so_far, _ = transport.services.database.transact(queues.redrive_on, QUEUE, so_far, call, **options)
    assert send(transport, request, "r") == Moved(MESSAGES_MAX + 10)
    assert send(transport, request, "r") == Moved(MESSAGES_MAX + 10)
    stats = transport.call(GetQueueStats("jobs"))
    assert (stats.ready, stats.dead) == (MESSAGES_MAX + 10, 40)


def test_a_purge_that_was_interrupted_goes_on(transport: EmbeddedTransport) -> None:
    for _ in range(3):
        transport.call(PutMessages("jobs", [NewMessage(b"x") for _ in range(100)]))
    call = keyed_call_of(transport, PurgeQueue("jobs"), "p", again=False)
    so_far, _ = transport.services.database.transact(queues.purge_on, QUEUE, Purged(), call)
    assert so_far.count == MESSAGES_MAX
    assert send(transport, PurgeQueue("jobs"), "p") == Moved(300)
    put(transport, b"later")
    assert send(transport, PurgeQueue("jobs"), "p") == Moved(300)
    assert counts(transport)[0] == 1


def test_redriving_nothing_moves_nothing(transport: EmbeddedTransport) -> None:
    assert send(transport, RedriveMessages("jobs", ids=[]), "r") == Moved(0)
    assert transport.call(RedriveMessages("jobs", ids=[])) == Moved(0)


# Entities: a commit, then a log.


def logged(transport: EmbeddedTransport, session: str = "s") -> list[bytes]:
    transport.services.log().flush()
    return [each.record for each in transport.call(ReadLog(session)).records]


def test_best_effort_fields_are_logged_once(transport: EmbeddedTransport) -> None:
    for fields in ({"title": b"\x01", "debug_x": b"\x01"}, {"debug_x": b"\x02"}):
        request = WriteEntities([EntityWrite("task", "one", fields)], session="s")
        key = str(len(fields))
        first = send(transport, request, key)
        assert send(transport, request, key) == first
    assert len(logged(transport)) == 2
    with pytest.raises(IdempotencyKeyReused):
        send(transport, changed(request, session="t"), key)


def test_a_put_that_was_critical_is_answered_as_such(database: Database, clock: ManualClock) -> None:
    policy = TierPolicy({"task.title": Tier.CRITICAL})
    transport = EmbeddedTransport(Services(database, clock=clock, policy=policy))
    transport.call(PutEntity("task", "one", {"title": b"\x01"}, 0))
    request = PutEntity("task", "one", {"note": b"\x01"}, 1)  # Removes a CRITICAL field.
    first = send(transport, request)
    assert (first.versions, first.durability) == ([2], Tier.CRITICAL)
    assert send(transport, request) == first
    transport.close()


def test_a_version_that_has_moved_is_refused_again(transport: EmbeddedTransport) -> None:
    """What failed has not happened, and may succeed later."""
    request = PutEntity("task", "one", {"note": b"\x01"}, 1)
    for _ in range(2):
        with pytest.raises(VersionConflict):
            send(transport, request)
    transport.call(PutEntity("task", "one", {"note": b"\x00"}, 0))
    assert send(transport, request) == send(transport, request)


# What is remembered in memory.


def test_only_the_latest_calls_are_remembered_in_memory() -> None:
    recent = RecentKeys(2)
    calls = [sending(key, PUT, lambda: False) for key in "abc"]
    for call in calls:
        assert not recent.knows(call)
        recent.add(call)
    assert [recent.knows(call) for call in calls] == [False, True, True]


def test_a_record_that_was_refused_may_be_sent_again(transport: EmbeddedTransport) -> None:
    """Lesson 1: what remembers a key before its work is done loses the work."""
    with pytest.raises(InvalidName):
        send(transport, LogRecords("no/session", [b"{}"]), "l")
    send(transport, LogRecords("s", [b"{}"]), "l")
    send(transport, LogRecords("s", [b"{}"]), "l")
    assert logged(transport) == [b"{}"]


# Groups.


async def test_a_group_remembers_each_of_its_calls(async_transport: AsyncEmbeddedTransport) -> None:
    transport = async_transport
    puts = [changed(PUT, queue=f"q{number}") for number in range(3)]
    first = await call_batch(transport, [Call(number, put, f"k{number}") for number, put in enumerate(puts)])
    puts[1] = changed(puts[1], messages=[NewMessage(b"b")])
    second = await call_batch(transport, [Call(number, put, f"k{number}", True) for number, put in enumerate(puts)])
    assert (second[0], type(second[1]), second[2]) == (first[0], IdempotencyKeyReused, first[2])


async def test_a_group_that_is_late_does_not_do_again_what_was_sent_again(
    async_transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sending waited for its turn when its connection broke, and the second one had it before."""
    transport, database, turn = async_transport, async_transport.services.database, asyncio.Event()
    transact = database.transact_async
    late = [True]

    async def transact_async(*args: Any, **options: Any) -> Any:
        if late and late.pop():
            await turn.wait()
        return await transact(*args, **options)

    monkeypatch.setattr(database, "transact_async", transact_async)
    first = asyncio.create_task(call_batch(transport, [Call(0, PUT, "k")]))
    await asyncio.sleep(0)
    second = await call_batch(transport, [Call(0, PUT, "k", True)])
    turn.set()
    assert await first == second
    assert (await transport.call(GetQueueStats("jobs"))).put_total == 1


# The layer.


def test_whoever_is_fresh_does_not_look(database: Database) -> None:
    call = sending("k", PUT, lambda: True)

    def work(answer: int) -> int:
        return database.transact(once, call, msgspec.msgpack.decode, lambda tx: answer)

    assert (work(1), work(2)) == (1, 2)
    call = msgspec.structs.replace(call, fresh=lambda: False)
    assert work(3) == 2
