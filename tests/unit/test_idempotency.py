"""Calls with an idempotency key take effect once: on every transport and backend, with any lost response."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from fastness.errors import (
    HeadAdvanced,
    IdempotencyKeyReused,
    InvalidArgument,
    InvalidName,
    LeaseExpired,
    LeaseHeld,
    Unreachable,
    VersionConflict,
)
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import idempotency, leases, queues
from fastness.layers.idempotency import KeyedCall, keyed_call, run_idempotent
from fastness.layers.leases import LeaseKey
from fastness.layers.queues import Leased, QueueKey, Work
from fastness.limits import CALL_KEY_BYTES_MAX, CALL_KEY_PERIOD_SECONDS, MESSAGES_MAX
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.idempotency import keyed_call_of, release_undelivered
from fastness.plane.services import Services
from fastness.runtime.activity.log import RecentKeys
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier, TierPolicy
from fastness.wire.activity import LogRecords, ReadLog
from fastness.wire.atomic import CommitAtomic
from fastness.wire.entities import EntityWrite, PutEntity, WriteEntities
from fastness.wire.frames import Call
from fastness.wire.leases import (
    AcquireLease,
    CheckLease,
    DescribeLease,
    Granted,
    KeepLease,
    LeaseProof,
    ReleaseLease,
)
from fastness.wire.locks import AcquireLocks, LockSession
from fastness.wire.problems import error_of, problem_of
from fastness.wire.queues import (
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
from fastness.wire.requests import Request
from fastness.wire.states import UpdateState
from fastness.wire.worlds import AppendEntries, CreateWorld
from tests.support.waiting import eventually

PATIENCE_SECONDS = 30.0  # A generous deadline.
PERIOD_MS = CALL_KEY_PERIOD_SECONDS * 1_000
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


# Stored results.


def test_a_repeated_call_gets_the_same_result(transport: EmbeddedTransport, clock: ManualClock) -> None:
    first = send(transport, PUT, again=False)
    clock.advance_ms(PERIOD_MS)
    assert send(transport, PUT) == first
    assert put_total(transport) == 1


def test_calls_with_different_keys_are_separate(transport: EmbeddedTransport) -> None:
    assert send(transport, PUT, "one") != send(transport, PUT, "two")
    assert put_total(transport) == 2


def test_a_failed_call_is_not_stored(transport: EmbeddedTransport) -> None:
    transport.call(CreateWorld("w"))
    append = AppendEntries("w", [b"\x01"], 1)
    with pytest.raises(HeadAdvanced):
        send(transport, append)
    transport.call(AppendEntries("w", [b"\x00"], 0))
    assert send(transport, append).height == send(transport, append).height == 1


def test_a_key_expires_after_two_periods(transport: EmbeddedTransport, clock: ManualClock) -> None:
    send(transport, PUT)
    clock.advance_ms(2 * PERIOD_MS)
    send(transport, PUT)
    assert put_total(transport) == 2


def settle(transport: EmbeddedTransport) -> None:
    """Wait until keys that have expired are deleted, or could not be."""
    (job,) = (job for job in transport.services.background.jobs if "old calls" in job.name)
    eventually(lambda: job.is_at_rest)


def stored_key_count(transport: EmbeddedTransport) -> int:
    begin, end = Subspace("once").range()
    return len(transport.services.database.read(Transaction.scan, begin, end, limit=1_000))


def test_expired_keys_are_deleted(
    transport: EmbeddedTransport, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "CALL_KEY_EXPIRY_BATCH", 3)
    for number in range(10):
        send(transport, PUT, f"k{number}")
    settle(transport)
    clock.advance_ms(PERIOD_MS)
    send(transport, PUT, "later")
    settle(transport)
    assert stored_key_count(transport) == 11
    clock.advance_ms(PERIOD_MS)
    send(transport, PUT, "latest")
    settle(transport)
    assert stored_key_count(transport) == 2
    assert send(transport, PUT, "later") != send(transport, PUT, "latest")
    assert put_total(transport) == 12


@pytest.mark.parametrize("error", [Unreachable("on purpose"), ZeroDivisionError("on purpose")])
def test_keys_that_could_not_be_deleted_are_deleted_later(
    transport: EmbeddedTransport,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    database = transport.services.database
    send(transport, PUT)
    settle(transport)
    clock.advance_ms(2 * PERIOD_MS)
    with monkeypatch.context() as patch:

        def refuse(*args: Any, **options: Any) -> Any:
            raise error

        patch.setattr(database, "read", refuse)
        send(transport, PUT)
        eventually(lambda: "on purpose" in caplog.text)
    eventually(lambda: stored_key_count(transport) == 1)


def test_a_repeated_call_gets_a_result_of_the_same_types(transport: EmbeddedTransport) -> None:
    """The HTTP API chooses the JSON form of a result by its type."""
    request = CommitAtomic([PUT, UpdateState("s", b"\x01")])
    first = send(transport, request)
    assert send(transport, request) == first
    assert [type(answer) for answer in first.answers] == [type(answer) for answer in send(transport, request).answers]


@pytest.mark.parametrize("key", ["", "x" * (CALL_KEY_BYTES_MAX + 1)])
def test_an_invalid_key_is_refused(transport: EmbeddedTransport, key: str) -> None:
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
def test_a_key_used_by_another_call_is_refused(transport: EmbeddedTransport, other: Request[Any]) -> None:
    first = send(transport, PUT)
    with pytest.raises(IdempotencyKeyReused, match="used this idempotency key"):
        send(transport, other)
    assert send(transport, PUT) == first
    assert put_total(transport) == 1


def test_a_repeated_write_gets_its_answer_after_the_session_of_its_locks_has_ended(
    transport: EmbeddedTransport, clock: ManualClock
) -> None:
    transport.services.shared_locks = True
    holder = LockSession("session-of-ada-0123456789")
    transport.call(AcquireLocks(holder, "claim", [["record_id", "task/1"]], lease_seconds=10))
    write = WriteEntities([EntityWrite("task", "1", {"note": b"1"})], lock_session=holder.id)
    first = send(transport, write)
    clock.advance_ms(10_000)
    assert send(transport, write) == first
    with pytest.raises(LeaseExpired):
        send(transport, write, key="another")


def test_equal_requests_are_the_same_call(transport: EmbeddedTransport) -> None:
    """The order of maps does not matter, and omitted fields equal their defaults."""
    first = send(transport, PUT)
    other = PutMessages("jobs", [NewMessage(b"a", attributes={"b": "2", "a": "1"}, priority=5)], universe="main")
    assert send(transport, other) == first


def test_a_reused_key_is_a_client_error() -> None:
    problem = problem_of(IdempotencyKeyReused("x"))
    assert (problem.status, problem.code, problem.retry) == (422, "idempotency_key_reused", "never")
    assert isinstance(error_of(problem), IdempotencyKeyReused)


# Receives: a repeated call returns the messages it leased.


def receive(key: str = "r", *, max_messages: int = 10, **options: Any) -> tuple[ReceiveMessages, str]:
    return ReceiveMessages("jobs", "ada", max_messages, **options), key


def put(transport: EmbeddedTransport, *payloads: bytes) -> None:
    transport.call(PutMessages("jobs", [NewMessage(payload) for payload in payloads]))


def leases_of(deliveries: Deliveries) -> list[MessageLease]:
    return [MessageLease(each.id, each.lease_id, each.fence) for each in deliveries.messages]


def counts(transport: EmbeddedTransport) -> tuple[int, int, int]:
    stats = transport.call(GetQueueStats("jobs"))
    return stats.ready, stats.leased, stats.delivered_total


def test_a_repeated_receive_gets_the_same_leases(transport: EmbeddedTransport, clock: ManualClock) -> None:
    put(transport, b"a", bytes(2_000), bytes(16_000), b"not for this one")
    first = send(transport, *receive(max_messages=3), again=False)
    clock.advance_ms(1_000)
    assert send(transport, *receive(max_messages=3)) == first
    assert [each.payload for each in first.messages] == [b"a", bytes(2_000), bytes(16_000)]
    assert counts(transport) == (1, 3, 3)
    outcomes = transport.call(AckMessages("jobs", leases_of(first))).outcomes
    assert [outcome.code for outcome in outcomes] == [None] * 3


def test_a_repeated_receive_omits_messages_it_no_longer_leases(
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


def test_a_repeated_receive_returns_the_extended_lease(transport: EmbeddedTransport) -> None:
    put(transport, b"a")
    first = send(transport, *receive())
    until_ms = transport.call(ExtendMessages("jobs", leases_of(first), 600.0)).outcomes[0].expires_ms
    assert send(transport, *receive()).messages == [changed(first.messages[0], expires_ms=until_ms)]


def test_an_empty_receive_is_not_stored(transport: EmbeddedTransport) -> None:
    assert send(transport, *receive()).messages == []
    put(transport, b"a")
    assert len(send(transport, *receive()).messages) == 1


def test_a_repeated_receive_returns_the_workflow_state_and_its_lease(transport: EmbeddedTransport) -> None:
    put(transport, b"a")
    first = send(transport, *receive(with_state=True))
    assert send(transport, *receive(with_state=True)) == first
    state = first.messages[0].state
    transport.call(UpdateState(state.lease.key, b"\x01", state.lease))
    again = send(transport, *receive(with_state=True)).messages[0].state
    assert (again.value, again.lease) == (b"\x01", state.lease)


def test_a_key_used_by_another_receive_is_refused(transport: EmbeddedTransport) -> None:
    put(transport, b"a", b"b")
    send(transport, *receive(max_messages=1))
    with pytest.raises(IdempotencyKeyReused):
        send(transport, *receive(max_messages=2))


QUEUE = QueueKey("main", "jobs")


def lease_keyed(transport: EmbeddedTransport, *, again: bool = True) -> tuple[Leased, KeyedCall]:
    call = keyed_call_of(transport, *receive(max_messages=1), again=again)
    assert call is not None
    return transport.services.database.transact(queues.lease_keyed, QUEUE, call=call, owner="ada", limit=1), call


@pytest.mark.parametrize("again", [True, False])
def test_releasing_undelivered_messages_forgets_the_call(transport: EmbeddedTransport, again: bool) -> None:
    """After a broken connection the server releases the messages; a repeated call leases them again."""
    put(transport, b"a", b"b")
    leased, call = lease_keyed(transport, again=again)
    transport.services.database.transact(queues.release_undelivered, QUEUE, leased.proofs(), call)
    assert counts(transport) == (2, 0, 1)
    assert [each.fence for each in send(transport, *receive(max_messages=1)).messages] == [2]


@pytest.mark.parametrize("late", [True, False])
def test_messages_of_a_repeated_call_are_not_released(transport: EmbeddedTransport, late: bool) -> None:
    """The caller repeats the call on another connection before the server has released the messages of the broken one.
    The first attempt may even be executed after the second."""
    put(transport, b"a", b"b")
    early = keyed_call_of(transport, *receive(max_messages=1), again=False)
    assert early is not None
    database = transport.services.database
    if late:
        answered = send(transport, *receive(max_messages=1))
        broken = database.transact(queues.lease_keyed, QUEUE, call=early, owner="ada", limit=1)
    else:
        broken = database.transact(queues.lease_keyed, QUEUE, call=early, owner="ada", limit=1)
        answered = send(transport, *receive(max_messages=1))
    database.transact(queues.release_undelivered, QUEUE, broken.proofs(), early)
    assert counts(transport) == (1, 1, 1)
    assert transport.call(AckMessages("jobs", leases_of(answered))).outcomes[0].code is None


async def wait_for_waiters(transport: AsyncEmbeddedTransport, line: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await transport.call(GetQueueStats("jobs"))).waiting_consumers != line:
            await asyncio.sleep(0.001)


@pytest.fixture
async def async_transport(database: Database, clock: ManualClock) -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = AsyncEmbeddedTransport(Services(database, clock=clock))
    yield transport
    await transport.close()


def repeated_call(transport: AsyncEmbeddedTransport, request: Request[Any], key: str, *, again: bool = True) -> Any:
    return asyncio.create_task(transport.call(request, keyed_call_of(transport, request, key, again=again)))


@pytest.mark.parametrize("is_repeated", [True, False])
async def test_messages_of_a_lost_answer_are_released_unless_the_call_was_repeated(
    async_transport: AsyncEmbeddedTransport, is_repeated: bool
) -> None:
    transport, (request, key) = async_transport, receive(max_messages=1)
    await transport.call(PUT)
    call = keyed_call_of(transport, request, key, again=False)
    lost = leases_of(await transport.call(request, call))
    if is_repeated:
        assert leases_of(await repeated_call(transport, request, key)) == lost
    await release_undelivered(transport, request, lost, call)
    stats = await transport.call(GetQueueStats("jobs"))
    assert (stats.ready, stats.leased, stats.failed_total) == ((0, 1, 0) if is_repeated else (1, 0, 0))
    acked = (await transport.call(AckMessages("jobs", lost))).outcomes[0]
    assert (acked.code is None) == is_repeated


async def test_a_receive_that_waits_on_two_connections_gets_the_same_leases(
    async_transport: AsyncEmbeddedTransport,
) -> None:
    """A proxy may keep a connection open whose caller has timed out and repeats the call on another one."""
    transport, call_arguments = async_transport, receive(wait_seconds=600.0)
    tasks = []
    for number in range(2):
        tasks.append(repeated_call(transport, *call_arguments, again=bool(number)))
        await wait_for_waiters(transport, number + 1)
    other = repeated_call(transport, *receive("other", wait_seconds=600.0))
    await wait_for_waiters(transport, 3)
    await transport.call(PUT)
    first, second = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
    assert first == second
    await wait_for_waiters(transport, 1)
    # A repeated call with a stored result does not queue behind waiting ones.
    assert await asyncio.wait_for(repeated_call(transport, *call_arguments), PATIENCE_SECONDS) == first
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_a_new_call_does_not_overtake_waiting_ones(async_transport: AsyncEmbeddedTransport) -> None:
    transport, tasks = async_transport, []
    for number in range(3):
        tasks.append(
            repeated_call(transport, *receive(f"r{number}", max_messages=1, wait_seconds=600.0), again=number == 1)
        )
        await wait_for_waiters(transport, number + 1)
    for number in range(3):
        await transport.call(PutMessages("jobs", [NewMessage(bytes([number]))]))
        found = await asyncio.wait_for(tasks[number], PATIENCE_SECONDS)
        assert [each.payload for each in found.messages] == [bytes([number])]


@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_a_cancelled_receive_can_be_repeated(async_transport: AsyncEmbeddedTransport, steps: int) -> None:
    """At any point of the cancellation: the next attempt gets the message, and no failure is counted."""
    transport = async_transport
    await transport.call(PUT)
    first = repeated_call(transport, *receive(), again=False)
    for _ in range(steps):
        await asyncio.sleep(0)
    first.cancel()
    second = await repeated_call(transport, *receive())
    await asyncio.gather(first, return_exceptions=True)
    assert len(second.messages) == 1
    outcomes = (await transport.call(AckMessages("jobs", leases_of(second)))).outcomes
    stats = await transport.call(GetQueueStats("jobs"))
    assert (outcomes[0].code, stats.acked_total, stats.failed_total) == (None, 1, 0)


# Leases: a repeated acquire returns its grant.


def acquire(key: str = "a", owner: str = "ada", **options: Any) -> tuple[AcquireLease, str]:
    return AcquireLease("deploy", owner, 30.0, **options), key


def proof_of(granted: Granted) -> LeaseProof:
    return LeaseProof(granted.key, granted.lease_id, granted.fence)


def test_a_repeated_acquire_gets_the_same_fence(transport: EmbeddedTransport, clock: ManualClock) -> None:
    first = send(transport, *acquire(), again=False)
    clock.advance_ms(1_000)
    assert send(transport, *acquire()) == first
    kept = transport.call(KeepLease(proof_of(first), 60.0))
    assert send(transport, *acquire()) == kept
    transport.call(CheckLease(proof_of(first)))
    with pytest.raises(IdempotencyKeyReused):
        send(transport, *acquire(owner="bob"))


def test_a_refused_acquire_is_not_stored(transport: EmbeddedTransport) -> None:
    held = transport.call(AcquireLease("deploy", "bob"))
    with pytest.raises(LeaseHeld):
        send(transport, *acquire())
    transport.call(ReleaseLease(proof_of(held)))
    assert send(transport, *acquire()).fence == held.fence + 1


def test_a_call_acquires_at_most_once(transport: EmbeddedTransport, clock: ManualClock) -> None:
    """A late copy of a call acquires nothing, and a grant that has ended is not returned again."""
    first = send(transport, *acquire())
    transport.call(ReleaseLease(proof_of(first)))
    with pytest.raises(LeaseExpired, match="acquire it again"):
        send(transport, *acquire())
    second = send(transport, *acquire("b"))
    clock.advance_ms(30_000)
    with pytest.raises(LeaseExpired, match="acquire it again"):
        send(transport, *acquire("b"))
    third = send(transport, *acquire("c", "bob"))
    assert (first.fence, second.fence, third.fence) == (1, 2, 3)


LEASE = LeaseKey("main", "deploy")


@pytest.mark.parametrize("retried", [False, True])
def test_an_undelivered_lease_is_released_unless_the_call_was_repeated(
    transport: EmbeddedTransport, retried: bool
) -> None:
    early = keyed_call_of(transport, *acquire(), again=False)
    assert early is not None
    database = transport.services.database
    grant, is_new = database.transact(leases.acquire_keyed, LEASE, early, owner="ada", ttl_ms=30_000)
    if retried:
        send(transport, *acquire())
    proof = LeaseProof("deploy", grant.lease_id, grant.fence)
    assert database.transact(leases.release_undelivered, proof, early) is not retried
    assert is_new
    again = send(transport, *acquire())
    assert (again.fence, again.lease_id == grant.lease_id) == ((1, True) if retried else (2, False))


async def test_an_acquire_that_waits_on_two_connections_gets_the_same_fence(
    async_transport: AsyncEmbeddedTransport,
) -> None:
    transport = async_transport
    held = await transport.call(AcquireLease("deploy", "bob", 600.0))
    tasks = []

    async def wait_for_position(line: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await transport.call(DescribeLease("deploy"))).waiting != line:
                await asyncio.sleep(0.001)

    for number, (request, key) in enumerate(
        [acquire(wait_seconds=600.0), acquire(wait_seconds=600.0), acquire("c", "eve", wait_seconds=600.0)]
    ):
        tasks.append(repeated_call(transport, request, key, again=number == 1))
        await wait_for_position(number + 1)
    await transport.call(ReleaseLease(proof_of(held)))
    first, second = await asyncio.wait_for(asyncio.gather(*tasks[:2]), PATIENCE_SECONDS)
    assert first == second
    await wait_for_position(1)
    # A repeated call with a grant does not queue behind waiting ones.
    assert await asyncio.wait_for(repeated_call(transport, *acquire(wait_seconds=600.0)), PATIENCE_SECONDS) == first
    await transport.call(ReleaseLease(proof_of(first)))
    assert (await asyncio.wait_for(tasks[2], PATIENCE_SECONDS)).owner == "eve"
    # Nor does a repeated call whose grant has ended.
    other = repeated_call(transport, *acquire("d", "zoe", wait_seconds=600.0))
    await wait_for_position(1)
    with pytest.raises(LeaseExpired):
        await asyncio.wait_for(repeated_call(transport, *acquire(wait_seconds=600.0)), PATIENCE_SECONDS)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize("steps", range(0, 24, 2))
@pytest.mark.parametrize("keyed", [True, False])
async def test_a_cancelled_acquire_holds_no_lease(
    async_transport: AsyncEmbeddedTransport, steps: int, keyed: bool
) -> None:
    transport = async_transport
    request, key = acquire()
    first = (
        repeated_call(transport, request, key, again=False) if keyed else asyncio.create_task(transport.call(request))
    )
    for _ in range(steps):
        await asyncio.sleep(0)
    first.cancel()
    outcome: Any
    (outcome,) = await asyncio.gather(first, return_exceptions=True)
    described = await transport.call(DescribeLease("deploy"))
    assert described.held == (not isinstance(outcome, asyncio.CancelledError))
    if keyed:
        again = await repeated_call(transport, request, key)
        assert again == outcome or isinstance(outcome, asyncio.CancelledError)
        await transport.call(CheckLease(proof_of(again)))


# Calls of several commits resume.


def dead_letters(transport: EmbeddedTransport, count: int) -> None:
    for first in range(0, count, 100):
        transport.call(PutMessages("jobs", [NewMessage(b"x") for _ in range(first, min(first + 100, count))]))
        found = transport.call(ReceiveMessages("jobs", "ada", 100))
        transport.call(RejectMessages("jobs", leases_of(found)))


@pytest.mark.parametrize("parts_done", [0, 1, 2])
def test_an_interrupted_redrive_resumes_and_respects_its_limit(transport: EmbeddedTransport, parts_done: int) -> None:
    dead_letters(transport, MESSAGES_MAX + 50)
    request = RedriveMessages("jobs", limit=MESSAGES_MAX + 10)
    call = keyed_call_of(transport, request, "r", again=False)
    work, step = Work(), partial(queues.redrive_step, ids=None, limit=request.limit)
    for _ in range(parts_done):  # The connection breaks here.
        work = transport.services.database.transact(queues.step, QUEUE, step, work, call)
    assert send(transport, request, "r") == Moved(MESSAGES_MAX + 10)
    assert send(transport, request, "r") == Moved(MESSAGES_MAX + 10)
    stats = transport.call(GetQueueStats("jobs"))
    assert (stats.ready, stats.dead) == (MESSAGES_MAX + 10, 40)


def test_an_interrupted_purge_resumes(transport: EmbeddedTransport) -> None:
    for _ in range(3):
        transport.call(PutMessages("jobs", [NewMessage(b"x") for _ in range(100)]))
    call = keyed_call_of(transport, PurgeQueue("jobs"), "p", again=False)
    work = transport.services.database.transact(queues.step, QUEUE, queues.purge_step, Work(), call)
    assert work.count == MESSAGES_MAX
    assert send(transport, PurgeQueue("jobs"), "p") == Moved(300)
    put(transport, b"later")
    assert send(transport, PurgeQueue("jobs"), "p") == Moved(300)
    assert counts(transport)[0] == 1


def test_redriving_nothing_moves_nothing(transport: EmbeddedTransport) -> None:
    assert send(transport, RedriveMessages("jobs", ids=[]), "r") == Moved(0)
    assert transport.call(RedriveMessages("jobs", ids=[])) == Moved(0)


# Entities: a commit, then a log record.


def logged(transport: EmbeddedTransport, session: str = "s") -> list[bytes]:
    transport.services.log().flush()
    return [each.record for each in transport.call(ReadLog(session)).records]


def test_best_effort_fields_are_logged_once(transport: EmbeddedTransport) -> None:
    requests = {
        "both": WriteEntities([EntityWrite("task", "one", {"title": b"\x01", "debug_x": b"\x01"})], session="s"),
        "logged": WriteEntities([EntityWrite("task", "one", {"debug_x": b"\x02"})], session="s"),
    }
    for key, request in requests.items():
        first = send(transport, request, key)
        assert send(transport, request, key) == first
    assert len(logged(transport)) == 2
    with pytest.raises(IdempotencyKeyReused):
        send(transport, changed(requests["logged"], session="t"), "logged")


def test_a_repeated_critical_put_returns_the_same_tier(database: Database, clock: ManualClock) -> None:
    policy = TierPolicy({"task.title": Tier.CRITICAL})
    transport = EmbeddedTransport(Services(database, clock=clock, policy=policy))
    transport.call(PutEntity("task", "one", {"title": b"\x01"}, 0))
    request = PutEntity("task", "one", {"note": b"\x01"}, 1)  # Removes a CRITICAL field.
    first = send(transport, request)
    assert (first.versions, first.durability) == ([2], Tier.CRITICAL)
    assert send(transport, request) == first
    transport.close()


def test_a_version_conflict_is_not_stored(transport: EmbeddedTransport) -> None:
    """A failed call is not stored, and may succeed later."""
    request = PutEntity("task", "one", {"note": b"\x01"}, 1)
    for _ in range(2):
        with pytest.raises(VersionConflict):
            send(transport, request)
    transport.call(PutEntity("task", "one", {"note": b"\x00"}, 0))
    assert send(transport, request) == send(transport, request)


# Results kept in memory.


def test_only_the_latest_calls_are_kept_in_memory() -> None:
    recent_keys = RecentKeys(2)
    calls = [keyed_call(key, PUT, lambda: False) for key in "abc"]
    for call in calls:
        assert not recent_keys.contains(call)
        recent_keys.add(call)
    assert [recent_keys.contains(call) for call in calls] == [False, True, True]


def test_a_refused_record_can_be_repeated(transport: EmbeddedTransport) -> None:
    """A key is stored only with the completed work; otherwise a failure would lose the work."""
    with pytest.raises(InvalidName):
        send(transport, LogRecords("no/session", [b"{}"]), "l")
    send(transport, LogRecords("s", [b"{}"]), "l")
    send(transport, LogRecords("s", [b"{}"]), "l")
    assert logged(transport) == [b"{}"]


# Batches.


async def test_a_batch_stores_the_result_of_each_call(async_transport: AsyncEmbeddedTransport) -> None:
    transport = async_transport
    puts = [changed(PUT, queue=f"q{number}") for number in range(3)]
    first = await transport.call_all([Call(number, put, f"k{number}") for number, put in enumerate(puts)])
    puts[1] = changed(puts[1], messages=[NewMessage(b"b")])
    second = await transport.call_all([Call(number, put, f"k{number}", True) for number, put in enumerate(puts)])
    assert (second[0], type(second[1]), second[2]) == (first[0], IdempotencyKeyReused, first[2])


async def test_a_late_batch_does_not_repeat_a_call_that_was_retried(
    async_transport: AsyncEmbeddedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt was still queued when its connection broke, and the retry ran before it."""
    transport, database, turn = async_transport, async_transport.services.database, asyncio.Event()
    transact = database.transact_async
    late = [True]

    async def transact_async(*args: Any, **options: Any) -> Any:
        if late and late.pop():
            await turn.wait()
        return await transact(*args, **options)

    monkeypatch.setattr(database, "transact_async", transact_async)
    first = asyncio.create_task(transport.call_all([Call(0, PUT, "k")]))
    await asyncio.sleep(0)
    second = await transport.call_all([Call(0, PUT, "k", True)])
    turn.set()
    assert await first == second
    assert (await transport.call(GetQueueStats("jobs"))).put_total == 1


# The layer.


def test_a_new_call_reads_no_stored_result(database: Database) -> None:
    call = keyed_call("k", PUT, lambda: True)

    def work(answer: int) -> Any:
        return database.transact(run_idempotent, call, msgspec.msgpack.decode, lambda tx: answer)

    assert (work(1), work(2)) == (1, 2)
    call = msgspec.structs.replace(call, is_new_call=lambda: False)
    assert work(3) == 2
