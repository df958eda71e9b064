"""A queue in the simulator: consumers sleep past their leases, use old fences and crash."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any, Final

from fastness.errors import FastnessError
from fastness.kv import Transaction
from fastness.layers import queues as layer
from fastness.layers.queues import NEVER_MS, Prefetched, QueueKey, StoredMessage, message_leases
from fastness.limits import PAYLOAD_CARRIED_BYTES_MAX, PRIORITY_MAX
from fastness.testing.histories import Operation, Outcome, Violation
from fastness.testing.histories.queues import Grant, PowerLosses, check_queue, leased_until_ms, was_released
from fastness.testing.simulation import Client, Simulation
from fastness.wire.queues import MessageLease, NewMessage, PackedAck, QueueStats, bits_of, lease_mismatch

_JOBS: Final = QueueKey("main", "jobs")
_DEAD: Final = QueueKey("main", "jobs.dlq")
_GROUPS: Final = ("red", "blue")
_VISIBILITIES_MS: Final = (400, 1_500, 6_000)
_LEASE_TRIES_MAX: Final = 400  # Far more than the messages of a run.

Proof = tuple[str, int, str]  # Message id, fence and lease id.


def queues(simulation: Simulation) -> Callable[[], None]:
    """No message is lost, duplicated, leased twice or settled with an old fence; groups keep order; all drain."""
    prefetched = Prefetched()  # Shared: all clients call the same process.

    async def produce(client: Client) -> None:
        for step in range(12):
            name = f"{client.name}.{client.crashes}.{step}"
            message = _new_message(client, name)
            for _ in range(3):  # Without an answer it may be put again, because the message has an idempotency key.
                receipt = await client.operate("put", "jobs", _put_argument(name, message), _put, message)
                if receipt is not None or message.idempotency_key is None:
                    break
            await client.pause(client.random.randrange(300))

    async def ack_and_lease(client: Client, done: list[Proof], limit: int, visibility_ms: int) -> list[list[Any]]:
        """Acknowledge messages in the commit that leases the next ones. The history has the acks and the lease."""
        history, name = simulation.history, f"{client.name}.{client.crashes}"
        acks = [history.invoke(name, "ack", "jobs", proof) for proof in done]
        lease = history.invoke(name, "lease", "jobs")
        batch: list[list[Any]]
        work = partial(_ack_and_lease, acks=_packed_acks(done))
        try:
            refused, batch = await client.transact(work, prefetched, client.name, limit, visibility_ms, may_lose=True)
        except FastnessError as error:
            for operation in [*acks, lease]:
                history.raised(operation, error)
            return []
        for proof, operation in zip(done, acks, strict=True):
            if _ref_of(proof) in refused:
                history.raised(operation, lease_mismatch(lease_of(proof)))
            else:
                history.ok(operation, None)
        history.ok(lease, batch)
        return batch

    async def consume(client: Client) -> None:
        old: list[Proof] = []
        done: list[Proof] = []
        for _ in range(12):
            limit, visibility_ms = client.random.randrange(1, 4), client.random.choice(_VISIBILITIES_MS)
            batch = await ack_and_lease(client, done, limit, visibility_ms)
            proofs: list[Proof] = [(id, fence, lease_id) for id, fence, *_, lease_id in batch]
            done = proofs if client.random.random() < 0.4 else []
            for proof in proofs if not done else ():
                await _process(client, proof, visibility_ms)
            old += proofs
            if old and client.random.random() < 0.3:  # It uses a lease that may have expired.
                await _settle(client, client.random.choice(old))
            await client.pause(client.random.randrange(800))

    async def reap(client: Client) -> None:
        for _ in range(20):
            await client.operate("process_due", "jobs", None, layer.sweep, _JOBS)
            await client.pause(client.random.randrange(1_500))

    for number in range(3):
        simulation.add(f"producer-{number}", produce)
        simulation.add(f"consumer-{number}", consume)
    simulation.add("reaper", reap)
    return lambda: _check(simulation, prefetched)


def _new_message(client: Client, name: str) -> NewMessage:
    chance = client.random
    long = chance.random() < 0.2  # Too long to be rewritten with every delivery.
    return NewMessage(
        payload=name.encode().ljust(PAYLOAD_CARRIED_BYTES_MAX + 1 if long else 0),
        priority=chance.choice((5, 5, 5, 9, 0)),
        group=chance.choice((None, None, *_GROUPS)),
        idempotency_key=name if chance.random() < 0.6 else None,
        delay_seconds=chance.choice((0.0, 0.0, 0.0, 0.2, 3.0)),
        max_attempts=chance.choice((2, 5, 20)),
    )


async def _process(client: Client, proof: Proof, visibility_ms: int) -> None:
    """Process a message; only half of all consumers behave correctly."""
    choice = client.random.random()
    if choice < 0.1:
        return  # It abandons the message.
    if choice < 0.3:
        await client.pause(visibility_ms + client.random.randrange(3_000))  # It sleeps past the expiry of its lease.
    elif choice < 0.5:
        await client.operate("extend", "jobs", proof, _extend, proof, client.random.choice(_VISIBILITIES_MS))
        await client.pause(visibility_ms)
    else:
        await client.pause(client.random.randrange(1, 300))
    await _settle(client, proof)


async def _settle(client: Client, proof: Proof) -> None:
    choice = client.random.random()
    if choice < 0.6:
        await client.operate("ack", "jobs", proof, _ack, proof)
        if choice < 0.15:
            await client.operate("ack", "jobs", proof, _ack, proof)
    elif choice < 0.9:
        delay_seconds, counts = client.random.choice((0.0, None, 1.0)), client.random.random() < 0.7
        await client.operate("nack", "jobs", [*proof, counts], _nack, proof, delay_seconds, counts)
    else:
        await client.operate("reject", "jobs", proof, reject, proof)


# Checks at the end.


def _check(simulation: Simulation, prefetched: Prefetched) -> None:
    left, dead = _content(simulation, _JOBS), _content(simulation, _DEAD)
    check_queue(simulation.history, "jobs", left=left, dead=dead)
    _drain(simulation, prefetched)
    left, dead = _content(simulation, _JOBS), _content(simulation, _DEAD)
    if left:
        raise Violation(f"The queue does not drain: {len(left)} messages stay, {min(left)} among them", [])
    grants = check_queue(simulation.history, "jobs", dead=dead)
    names = _check_names(simulation)
    _check_delays(simulation)
    _check_urgency(simulation)
    _check_failures(simulation)
    _check_groups(simulation, grants, names)
    _check_redriven(simulation, prefetched, grants, dead)


def _content(simulation: Simulation, queue: QueueKey) -> set[str]:
    """The ids of the messages in a queue. Also checks its counters, and that no message has two states."""
    found, stats = simulation.database.read(_read_queue, queue)
    places = {"ready": stats.ready, "delayed": stats.delayed, "leased": stats.leased, "blocked": stats.blocked}
    ids = [layer.format_id(id) for place in found.values() for id in place]
    for place, count in places.items():
        if len(found[place]) != count:
            raise Violation(f"{queue.name} has {len(found[place])} messages {place}, but its counter is {count}", [])
    if len(set(ids)) != len(ids):
        raise Violation(f"A message of {queue.name} has two states at once: {sorted(ids)}", [])
    return set(ids)


def _drain(simulation: Simulation, prefetched: Prefetched) -> None:
    """Lease and ack everything without faults, and wait for what is not due yet."""
    record, database = simulation.history.record, simulation.database
    for _ in range(_LEASE_TRIES_MAX):
        while database.transact(layer.sweep, _JOBS) <= simulation.clock.now_ms():
            pass
        lease = partial(database.transact, _lease, prefetched, "drain", 3, 60_000)
        batch = record("drain", "lease", "jobs", None, lease).result
        for id, fence, *_, lease_id in batch:
            proof = (id, fence, lease_id)
            record("drain", "ack", "jobs", proof, partial(database.transact, _ack, proof))
        due_ms = database.read(layer.next_due, _JOBS)
        if not batch:
            if due_ms == NEVER_MS:
                return
            simulation.clock.jump_to_ms(max(due_ms, simulation.clock.now_ms() + 1))
    raise Violation(f"The queue does not become empty within {_LEASE_TRIES_MAX} deliveries", [])


def _check_names(simulation: Simulation) -> dict[str, str]:
    """The id of each name. Checks that a name has one message, and that a failed put is never delivered."""
    puts: dict[str, list[Operation]] = defaultdict(list)
    ids: dict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in simulation.history.operations:
        if operation.kind == "put":
            puts[operation.argument["name"]].append(operation)
            if operation.outcome is Outcome.OK:
                ids[operation.argument["name"]].setdefault(operation.result, operation)
        elif operation.kind == "lease" and operation.outcome is Outcome.OK:
            for id, _, _, _, name, *_ in operation.result:
                ids[name].setdefault(id, operation)
    for name, found in ids.items():
        if len(found) > 1:
            raise Violation(f"{name} was put once, but there are {len(found)} messages", found.values())
        if all(each.outcome is Outcome.FAILED for each in puts[name]):
            raise Violation(f"{name} was delivered, but its put failed", [*puts[name], *found.values()])
    return {name: next(iter(found)) for name, found in ids.items()}


def _check_delays(simulation: Simulation) -> None:
    """Check that nothing is delivered before its delay has passed."""
    delays = {each.argument["name"]: each.argument["delay_ms"] for each in _operations(simulation, "put")}
    for operation in _operations(simulation, "lease"):
        for _, _, leased_ms, _, name, created_ms, *_ in operation.result if operation.outcome is Outcome.OK else ():
            if leased_ms < created_ms + delays[name]:
                raise Violation(f"{name} was put at {created_ms} and delivered at {leased_ms}, too soon", [operation])


def _check_urgency(simulation: Simulation) -> None:
    """Check delivery by priority, then by age: within each batch, and overall for the single consumer of the drain."""
    puts = {each.argument["name"]: each.argument for each in _operations(simulation, "put")}
    rank, before = (0, ""), 0
    for operation in _operations(simulation, "lease"):
        single_consumer = operation.client == "drain"
        for id, _, leased_ms, _, name, *_ in operation.result if operation.outcome is Outcome.OK else ():
            if before != (leased_ms if single_consumer else operation.invoked):
                rank, before = (-PRIORITY_MAX, ""), leased_ms if single_consumer else operation.invoked
            if single_consumer and puts[name]["group"] is not None:
                continue  # It became ready when its predecessor was removed.
            if (-puts[name]["priority"], id) < rank:
                raise Violation(f"{name} was delivered after a message of lower priority or later put", [operation])
            rank = (-puts[name]["priority"], id)


def _check_failures(simulation: Simulation) -> None:
    """Check that every delivery without an ack or a deferral counts as a failure, including abandoned ones."""
    deferred: dict[str, list[Operation]] = defaultdict(list)
    for nack in _operations(simulation, "nack"):
        if not nack.argument[3] and nack.outcome is not Outcome.FAILED:
            deferred[nack.argument[0]].append(nack)
    for operation in _operations(simulation, "lease"):
        for id, fence, *_, attempts, failures, _ in operation.result if operation.outcome is Outcome.OK else ():
            before = [nack for nack in deferred[id] if nack.argument[1] < fence]
            certain = sum(nack.outcome is Outcome.OK for nack in before)
            if not attempts - 1 - len(before) <= failures <= attempts - 1 - certain:
                message = f"Message {id} was delivered {attempts - 1} times before and has {failures} failures"
                raise Violation(message, [*before, operation])


def _check_groups(simulation: Simulation, grants: dict[str, list[Grant]], ids: dict[str, str]) -> None:
    """Check that a group has one message in flight at a time, and delivers in the order of puts."""
    members: dict[str, dict[str, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for put in _operations(simulation, "put"):
        name, group = put.argument["name"], put.argument["group"]
        if group is not None and name in ids and put.outcome is not Outcome.FAILED:
            members[group][ids[name]].append(put)
    fenced_calls: dict[str, list[Operation]] = defaultdict(list)
    for operation in _operations(simulation, "ack", "nack", "reject", "extend"):
        fenced_calls[operation.argument[0]].append(operation)
    losses = PowerLosses(simulation.history)
    for group, messages in members.items():
        for first, second in permutations(messages, 2):
            _check_pair(group, grants.get(first, []), grants.get(second, []), fenced_calls[first], losses)
            puts = messages[first] + messages[second]
            # A put with an idempotency key may be repeated: it was stored when the first of them returned.
            if min(put.returned for put in messages[first]) < messages[second][0].invoked:
                _check_order(group, grants.get(first, []), grants.get(second, []), puts)


def _check_pair(
    group: str, earlier: list[Grant], later: list[Grant], fenced_calls: list[Operation], losses: PowerLosses
) -> None:
    for one in earlier:
        until_ms = leased_until_ms(one, fenced_calls)
        for other in later:
            if not (one.leased_ms < other.leased_ms < until_ms) or was_released(one, fenced_calls, before=other.lease):
                continue
            if losses.may_have_undone(one, before=other.lease):
                continue
            acks = [each for each in fenced_calls if each.kind == "ack" and each.argument[1] == one.fence]
            if not any(each.outcome is not Outcome.FAILED and each.invoked < other.lease.returned for each in acks):
                message = f"Two messages of group {group} were in flight at {other.leased_ms}: {one.id} and {other.id}"
                raise Violation(message, [one.lease, *acks, other.lease])


def _check_order(group: str, earlier: list[Grant], later: list[Grant], puts: list[Operation]) -> None:
    for one in earlier:
        for other in later:
            if other.lease.returned < one.lease.invoked or other.leased_ms < one.leased_ms:
                message = f"Group {group} is out of order: {other.id} was delivered before {one.id} was removed"
                raise Violation(message, [*puts, other.lease, one.lease])


def _check_redriven(
    simulation: Simulation, prefetched: Prefetched, grants: dict[str, list[Grant]], dead: set[str]
) -> None:
    """Check that redriven dead letters are delivered with higher fences, and that no keys are left then."""
    database = simulation.database
    if database.transact(layer.redrive, _JOBS) != len(dead):
        raise Violation(f"{len(dead)} dead letters were not redriven", [])
    seen: set[str] = set()
    for _ in range(_LEASE_TRIES_MAX):
        batch = database.transact(_lease, prefetched, "redrive", 3, 60_000)
        if not batch:
            break
        for id, fence, *_, lease_id in batch:
            if any(grant.fence >= fence for grant in grants.get(id, [])) or id in seen:
                raise Violation(f"Dead letter {id} was redriven with the old fence {fence}", [])
            seen.add(id)
            database.transact(_ack, (id, fence, lease_id))
    if seen != dead:
        raise Violation(f"Of {len(dead)} dead letters {len(seen)} were delivered again: {sorted(seen ^ dead)}", [])
    rest = database.read(_leftovers)
    if rest:
        raise Violation(f"The queue is empty and has {len(rest)} keys left, {rest[0]!r} among them", [])


def _operations(simulation: Simulation, *kinds: str) -> list[Operation]:
    return [each for each in simulation.history.operations if each.kind in kinds]


# Transaction functions.


def _put_argument(name: str, message: NewMessage) -> dict[str, Any]:
    delay_ms = round((message.delay_seconds or 0.0) * 1_000)
    return {"name": name, "group": message.group, "priority": message.priority, "delay_ms": delay_ms}


def _put(tx: Transaction, message: NewMessage) -> str:
    return layer.put(tx, _JOBS, [message])[0].id


def _lease(tx: Transaction, prefetched: Prefetched, owner: str, limit: int, visibility_ms: int) -> list[list[Any]]:
    _, delivered = _ack_and_lease(tx, prefetched, owner, limit, visibility_ms, acks=[])
    return delivered


def _ack_and_lease(
    tx: Transaction, prefetched: Prefetched, owner: str, limit: int, visibility_ms: int, *, acks: list[PackedAck]
) -> tuple[set[bytes], list[list[Any]]]:
    """The messages whose acks were refused, by lease and position, and the ones that are leased now."""
    leased = layer.lease_or_wait(
        tx, _JOBS, owner=owner, limit=limit, visibility_ms=visibility_ms, prefetched=prefetched, acks=acks
    )
    refused = {each.lease + bytes((each.position,)) for each in leased.refused}
    return refused, [_delivered(tx, message) for message in leased.messages]


def _packed_acks(delivered: list[Proof]) -> list[PackedAck]:
    """The acks of a whole delivery."""
    fences: dict[bytes, list[int]] = defaultdict(list)
    for proof in delivered:
        fences[_ref_of(proof)[:-1]].append(proof[1])
    return [
        PackedAck(lease, some[0], some if len(set(some)) > 1 else [], bits_of((1 << len(some)) - 1))
        for lease, some in fences.items()
    ]


def _ref_of(proof: Proof) -> bytes:
    """The lease and the position of a message."""
    return bytes.fromhex(proof[2].rpartition("-")[2])


def _delivered(tx: Transaction, message: StoredMessage) -> list[Any]:
    name = (message.payload or b"").decode().rstrip()
    id = layer.format_id(message.id)
    times = tx.now_ms, message.due_ms
    counts = message.attempts, message.failures
    return [id, message.fence, *times, name, message.created_ms, *counts, message.lease_id]


def _ack(tx: Transaction, proof: Proof) -> None:
    layer.ack(tx, _JOBS, lease_of(proof))


def _nack(tx: Transaction, proof: Proof, delay_seconds: float | None, counts: bool) -> None:
    layer.nack(tx, _JOBS, lease_of(proof), delay_seconds=delay_seconds, counts=counts, error="on purpose")


def reject(tx: Transaction, proof: Proof) -> None:
    layer.reject(tx, _JOBS, lease_of(proof), error="on purpose")


def _extend(tx: Transaction, proof: Proof, by_ms: int) -> int:
    return layer.extend(tx, _JOBS, lease_of(proof), by_ms=by_ms).due_ms


def lease_of(proof: Proof) -> MessageLease:
    id, fence, lease_id = proof
    return MessageLease(id, lease_id, fence)


def _read_queue(tx: Transaction, queue: QueueKey) -> tuple[dict[str, list[bytes]], QueueStats]:
    queue_keys = layer.keys_of(queue)
    ranges = {
        "ready": queue_keys.ready_range(),
        "delayed": queue_keys.delayed_range(),
        "blocked": queue_keys.waiting.range(),
    }
    found = {
        place: [key[-16:] for key, _ in tx.scan(begin, end, limit=10_000)] for place, (begin, end) in ranges.items()
    }
    found["leased"] = [message.id for message in message_leases.leased_messages(tx, queue_keys)]
    return found, layer.stats(tx, queue)


def _leftovers(tx: Transaction) -> list[bytes]:
    """The message keys that are left in empty queues."""
    keys: list[bytes] = []
    for queue in (_JOBS, _DEAD):
        queue_keys = layer.keys_of(queue)
        for place in (
            queue_keys.ready,
            queue_keys.delayed,
            queue_keys.due,
            queue_keys.contents,
            queue_keys.settled,
            queue_keys.moved,
            queue_keys.body,
            queue_keys.failures,
            queue_keys.waiting.prefix,
            queue_keys.head.prefix,
        ):
            keys += [key for key, _ in tx.scan(place, place + b"\xff" * 17, limit=100)]
    return keys
