"""The life of jobs in the simulator: keys with limits, unique keys, cancelled jobs and results, under crashes."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final

from fastness.errors import MessageCancelled, MessageFailed
from fastness.kv import Transaction
from fastness.layers import queues as layer
from fastness.layers.queues import NEVER_MS, Prefetched, QueueKey, SearchOn, message_leases
from fastness.testing.histories import Operation, Outcome, Violation
from fastness.testing.simulation import Client, Simulation
from fastness.wire.queues import MessageLease, NewMessage, NewResult, QueuePolicy

_JOBS: Final = QueueKey("main", "jobs")
_KEYS: Final = ("a", "b", "c")
_UNIQUE: Final = ("u", "v")
_CONCURRENCY: Final = 2
_ATTEMPTS_MAX: Final = 3
_DELIVERIES_MAX: Final = 400  # Far more than the messages of a run.

Proof = tuple[str, int, str]  # Message id, fence and lease id.


def jobs(simulation: Simulation) -> Callable[[], None]:
    """A key never has too many leases, a unique key never two messages; cancelled is final; results are those acked."""
    prefetched = Prefetched()  # Shared: all clients call the same process.
    policy = QueuePolicy(
        concurrency_per_key=_CONCURRENCY,
        rate_per_key=4.0,
        burst_per_key=3,
        fair=simulation.random.random() < 0.5,
        max_attempts=_ATTEMPTS_MAX,
        retry_delay_seconds=0.2,
    )
    simulation.database.transact(layer.set_policy, _JOBS, policy)

    async def produce(client: Client) -> None:
        for step in range(10):
            chance = client.random
            message = NewMessage(
                f"{client.name}.{client.crashes}.{step}".encode(),
                key=chance.choice((None, *_KEYS)),
                priority=chance.choice((5, 5, 9)),
                unique_key=chance.choice((None, *_UNIQUE)),
                delay_seconds=chance.choice((0.0, 0.0, 0.5)),
                keep_result=True,
                visibility_seconds=chance.choice((0.4, 2.0)),
            )
            await client.operate("put", message.unique_key, None, _put, message)
            await client.pause(chance.randrange(300))

    async def consume(client: Client) -> None:
        for _ in range(14):
            limit = client.random.randrange(1, 4)
            batch = await client.operate("lease", "jobs", None, _lease, prefetched, client.name, limit, may_lose=True)
            for id, fence, lease_id in batch or []:
                await client.pause(client.random.choice((5, 50, 600)))
                await _settle(client, (id, fence, lease_id))
            await client.pause(client.random.randrange(400))

    async def operate(client: Client) -> None:
        for _ in range(10):
            ids = _known_ids(simulation)
            if ids and client.random.random() < 0.6:
                id = client.random.choice(ids)
                await client.operate("cancel", id, None, _cancel, id)
            elif ids and client.random.random() < 0.5:
                id = client.random.choice(ids)
                await client.operate("update", id, None, _update, id, client.random.choice((1, 9)))
            else:
                until = client.random.randrange(0, 1_500)
                await client.operate("pause", "key", None, _pause, client.random.choice(_KEYS), until)
            await client.pause(client.random.randrange(500))

    async def ask(client: Client) -> None:
        for _ in range(20):
            ids = _known_ids(simulation)
            if ids:
                id = client.random.choice(ids)
                await client.operate("result", id, None, _result, id)
            await client.pause(client.random.randrange(300))

    for number in range(2):
        simulation.add(f"producer-{number}", produce)
        simulation.add(f"consumer-{number}", consume)
        simulation.add(f"asker-{number}", ask)
    simulation.add("operator", operate)
    return lambda: _check(simulation, prefetched)


async def _settle(client: Client, proof: Proof) -> None:
    choice, id = client.random.random(), proof[0]
    if choice < 0.6:
        value = f"{client.name}.{proof[1]}"
        await client.operate("ack", id, value, _ack, proof, value)
    elif choice < 0.8:
        await client.operate("nack", id, None, _nack, proof)
    elif choice < 0.9:
        await client.operate("reject", id, None, _reject, proof)


def _known_ids(simulation: Simulation) -> list[str]:
    puts = [each for each in simulation.history.operations if each.kind == "put" and each.outcome is Outcome.OK]
    return sorted({each.result[0] for each in puts})


# Checks at the end.


def _check(simulation: Simulation, prefetched: Prefetched) -> None:
    by_id: dict[Any, list[Operation]] = defaultdict(list)
    for operation in simulation.history.operations:
        by_id[operation.key].append(operation)
    calls = [each for each in by_id["jobs"] if each.kind == "lease"]
    leases = [each for each in calls if each.outcome is Outcome.OK]
    unknown = [each for each in calls if each.outcome is Outcome.UNKNOWN]
    for id in _known_ids(simulation):
        _check_cancelled(id, by_id[id], leases)
        _check_results(id, by_id[id])
    for key in _UNIQUE:
        _check_unique([each for each in by_id[key] if each.outcome is Outcome.OK], by_id, leases, len(unknown))
    _drain(simulation, prefetched)
    for key in _UNIQUE:
        receipt = simulation.database.transact(_put, NewMessage(b"last", unique_key=key))
        if receipt[1]:
            raise Violation(f"The queue is empty, and the unique key {key} is not free", by_id[key])


def _check_cancelled(id: str, operations: list[Operation], leases: list[Operation]) -> None:
    """Check that a job which was cancelled is neither delivered nor acknowledged afterwards."""
    cancels = [each for each in operations if each.kind == "cancel" and each.outcome is Outcome.OK]
    for cancel in [each for each in cancels if each.result == "cancelled"]:
        for lease in leases:
            if cancel.returned < lease.invoked and any(delivered[0] == id for delivered in lease.result):
                raise Violation(f"Job {id} was delivered after it was cancelled", [cancel, lease])
        for ack in operations:
            if ack.kind == "ack" and ack.outcome is Outcome.OK and cancel.returned < ack.invoked:
                raise Violation(f"Job {id} was acknowledged after it was cancelled", [cancel, ack])


def _check_results(id: str, operations: list[Operation]) -> None:
    """Check that a result is that of an ack which may have been committed, and that an acknowledged one is found."""
    acks = [each for each in operations if each.kind == "ack" and each.outcome is not Outcome.FAILED]
    for result in operations:
        if result.kind != "result" or result.outcome is not Outcome.OK:
            continue
        before = [ack for ack in acks if ack.invoked < result.returned]
        if result.result is not None and result.result not in ("dead", "cancelled"):
            if result.result not in [ack.argument for ack in before]:
                raise Violation(f"Job {id} has the result {result.result}, which no ack had", [*acks, result])
            continue
        for ack in acks:
            if ack.outcome is Outcome.OK and ack.returned < result.invoked:
                raise Violation(f"Job {id} was acknowledged, and its result is {result.result}", [ack, result])


def _check_unique(
    puts: list[Operation], by_id: dict[Any, list[Operation]], leases: list[Operation], unknown_leases: int
) -> None:
    """Check that a second message of a unique key was put only after the first one may have left the queue."""
    firsts: dict[str, Operation] = {}
    for put in puts:
        firsts.setdefault(put.result[0], put)
    ids = list(firsts)
    for earlier in ids:
        for later in ids:
            if earlier == later or not firsts[earlier].returned < firsts[later].invoked:
                continue
            ends = [each for each in by_id[earlier] if each.kind in ("ack", "cancel", "nack", "reject")]
            may_have_ended = any(
                each.outcome is not Outcome.FAILED and each.invoked < firsts[later].returned for each in ends
            )
            deliveries = sum(any(found[0] == earlier for found in lease.result) for lease in leases)
            # Leases that expire make it a dead letter at last, also those whose answers were lost.
            if not may_have_ended and deliveries + unknown_leases < _ATTEMPTS_MAX:
                raise Violation("A unique key has two messages", [firsts[earlier], *ends, firsts[later]])


def _drain(simulation: Simulation, prefetched: Prefetched) -> None:
    """Lease and ack everything without faults, and wait for what is not due yet."""
    database = simulation.database
    for _ in range(_DELIVERIES_MAX):
        batch = database.transact(_lease, prefetched, "drain", 3)
        for proof in batch:
            database.transact(_ack, proof, "drained")
        stats = database.read(layer.stats, _JOBS)
        if not stats.ready + stats.delayed + stats.leased + stats.blocked:
            return
        due_ms = database.read(layer.next_due, _JOBS)
        if not batch:
            if due_ms == NEVER_MS:
                raise Violation(f"Nothing is due, and the queue does not become empty: {stats}", [])
            simulation.clock.jump_to_ms(max(due_ms, simulation.clock.now_ms() + 1))
    raise Violation(f"The queue does not become empty within {_DELIVERIES_MAX} deliveries", [])


# Transaction functions.


def _put(tx: Transaction, message: NewMessage) -> tuple[str, bool]:
    (receipt,) = layer.put(tx, _JOBS, [message])
    return receipt.id, receipt.duplicate


def _lease(tx: Transaction, prefetched: Prefetched, owner: str, limit: int) -> list[Proof]:
    leased = layer.lease_or_wait(tx, _JOBS, owner=owner, limit=limit, prefetched=prefetched)
    held = Counter(message.key for message in message_leases.leased_messages(tx, layer.keys_of(_JOBS)))
    for key in _KEYS:
        if held[key] > _CONCURRENCY:
            raise Violation(f"Key {key} has {held[key]} leases, and {_CONCURRENCY} are allowed", [])
    return [(layer.format_id(each.id), each.fence, each.lease_id) for each in leased.messages]


def _ack(tx: Transaction, proof: Proof, value: str) -> None:
    layer.ack(tx, _JOBS, _lease_of(proof), NewResult(value.encode()))


def _nack(tx: Transaction, proof: Proof) -> None:
    layer.nack(tx, _JOBS, _lease_of(proof), error="on purpose")


def _reject(tx: Transaction, proof: Proof) -> None:
    layer.reject(tx, _JOBS, _lease_of(proof), error="on purpose")


def _cancel(tx: Transaction, id: str) -> str:
    found = layer.cancel(tx, _JOBS, id)
    assert not isinstance(found, SearchOn)
    return found.state


def _update(tx: Transaction, id: str, priority: int) -> None:
    layer.update(tx, _JOBS, id, priority=priority, delay_seconds=None)


def _pause(tx: Transaction, key: str, for_ms: int) -> None:
    layer.pause_key(tx, _JOBS, key, until_ms=tx.now_ms + for_ms)


def _result(tx: Transaction, id: str) -> str | None:
    try:
        found = layer.result(tx, _JOBS, id)
    except MessageFailed:
        return "dead"
    except MessageCancelled:
        return "cancelled"
    return None if found is None else (found.value or b"").decode()


def _lease_of(proof: Proof) -> MessageLease:
    id, fence, lease_id = proof
    return MessageLease(id, lease_id, fence)
