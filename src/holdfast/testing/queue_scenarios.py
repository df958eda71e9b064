"""A queue under the simulator: consumers sleep past their leases, come back with old fences and crash."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any, Final

from holdfast.kv import Transaction
from holdfast.layers import queues as layer
from holdfast.layers.queues import NEVER_MS, Ahead, QueueKey, StoredMessage
from holdfast.limits import PAYLOAD_CARRIED_BYTES_MAX, PRIORITY_MAX
from holdfast.testing.histories import Operation, Outcome, Violation
from holdfast.testing.histories.queues import Grant, check_queue, lives_until_ms, was_given_back
from holdfast.testing.simulation import Client, Simulation
from holdfast.wire.queues import MessageLease, NewMessage, QueueStats

_JOBS: Final = QueueKey("main", "jobs")
_DEAD: Final = QueueKey("main", "jobs.dlq")
_GROUPS: Final = ("red", "blue")
_VISIBILITIES_MS: Final = (400, 1_500, 6_000)
_LEASE_TRIES_MAX: Final = 400  # Far more than the messages of a run; a queue that does not drain by then never will.

Proof = tuple[str, int]


def queues(simulation: Simulation) -> Callable[[], None]:
    """No message is lost, doubled, owned twice or settled by an old fence; groups keep their order; all drain."""
    ahead = Ahead()  # Of the one process that all clients call.

    async def produce(client: Client) -> None:
        for step in range(12):
            name = f"{client.name}.{client.crashes}.{step}"
            message = _new_message(client, name)
            for _ in range(3):  # Whoever got no answer may ask again, because the message has a key.
                receipt = await client.operate("put", "jobs", _told(name, message), _put, message)
                if receipt is not None or message.idempotency_key is None:
                    break
            await client.pause(client.random.randrange(300))

    async def consume(client: Client) -> None:
        old: list[Proof] = []
        for _ in range(12):
            limit, visibility_ms = client.random.randrange(1, 4), client.random.choice(_VISIBILITIES_MS)
            batch = await client.operate("lease", "jobs", None, _lease, ahead, client.name, limit, visibility_ms)
            for id, fence, *_ in batch or ():
                await _work_on(client, (id, fence), visibility_ms)
                old.append((id, fence))
            if old and client.random.random() < 0.3:  # It wakes up and believes that a message is still its own.
                await _settle(client, client.random.choice(old))
            await client.pause(client.random.randrange(800))

    async def reap(client: Client) -> None:
        for _ in range(20):
            await client.operate("process_due", "jobs", None, layer.process_due_of, _JOBS)
            await client.pause(client.random.randrange(1_500))

    for number in range(3):
        simulation.add(f"producer-{number}", produce)
        simulation.add(f"consumer-{number}", consume)
    simulation.add("reaper", reap)
    return lambda: _check(simulation, ahead)


def _new_message(client: Client, name: str) -> NewMessage:
    chance = client.random
    long = chance.random() < 0.2  # Too long to be written again with every delivery.
    return NewMessage(
        payload=name.encode().ljust(PAYLOAD_CARRIED_BYTES_MAX + 1 if long else 0),
        priority=chance.choice((5, 5, 5, 9, 0)),
        group=chance.choice((None, None, *_GROUPS)),
        idempotency_key=name if chance.random() < 0.6 else None,
        delay_seconds=chance.choice((0.0, 0.0, 0.0, 0.2, 3.0)),
        max_attempts=chance.choice((2, 5, 20)),
    )


async def _work_on(client: Client, proof: Proof, visibility_ms: int) -> None:
    """Half of all consumers do as they should."""
    choice = client.random.random()
    if choice < 0.1:
        return  # It forgets the message.
    if choice < 0.3:
        await client.pause(visibility_ms + client.random.randrange(3_000))  # It sleeps past the end of its lease.
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
        delay_seconds, counts = client.random.choice((0.0, 0.0, 1.0)), client.random.random() < 0.7
        await client.operate("nack", "jobs", [*proof, counts], _nack, proof, delay_seconds, counts)
    else:
        await client.operate("reject", "jobs", proof, _reject, proof)


# What must hold at the end.


def _check(simulation: Simulation, ahead: Ahead) -> None:
    left, dead = _content(simulation, _JOBS), _content(simulation, _DEAD)
    check_queue(simulation.history, "jobs", left=left, dead=dead)
    _drain(simulation, ahead)
    left, dead = _content(simulation, _JOBS), _content(simulation, _DEAD)
    if left:
        raise Violation(f"The queue does not drain: {len(left)} messages stay, {min(left)} among them", [])
    grants = check_queue(simulation.history, "jobs", dead=dead)
    names = _check_names(simulation)
    _check_delays(simulation)
    _check_urgency(simulation)
    _check_failures(simulation)
    _check_groups(simulation, grants, names)
    _check_redriven(simulation, ahead, grants, dead)


def _content(simulation: Simulation, queue: QueueKey) -> set[str]:
    """The ids of the messages in a queue, each of which is in one place; they are as many as its tally says."""
    found, stats = simulation.database.read(_look_at_all, queue)
    places = {"ready": stats.ready, "parked": stats.delayed + stats.leased, "blocked": stats.blocked}
    ids = [layer.text_of(id) for place in found.values() for id in place]
    for place, count in places.items():
        if len(found[place]) != count:
            raise Violation(f"{queue.name} has {len(found[place])} messages {place}, and its tally says {count}", [])
    if len(set(ids)) != len(ids):
        raise Violation(f"A message of {queue.name} is in two places at once: {sorted(ids)}", [])
    return set(ids)


def _drain(simulation: Simulation, ahead: Ahead) -> None:
    """One consumer without a fault takes everything, and waits for what is not due yet."""
    record, database = simulation.history.record, simulation.database
    for _ in range(_LEASE_TRIES_MAX):
        while database.transact(layer.process_due_of, _JOBS) <= simulation.clock.now_ms():
            pass
        lease = partial(database.transact, _lease, ahead, "drain", 3, 60_000)
        batch = record("drain", "lease", "jobs", None, lease).result
        for id, fence, *_ in batch:
            record("drain", "ack", "jobs", (id, fence), partial(database.transact, _ack, (id, fence)))
        due_ms = database.read(layer.next_due, _JOBS)
        if not batch:
            if due_ms == NEVER_MS:
                return
            simulation.clock.jump_to_ms(max(due_ms, simulation.clock.now_ms() + 1))
    raise Violation(f"The queue does not come to rest within {_LEASE_TRIES_MAX} deliveries", [])


def _check_names(simulation: Simulation) -> dict[str, str]:
    """Which id each name has: a name is put once, or again with its key, and a put that failed is never delivered."""
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
            raise Violation(f"{name} was put once, and there are {len(found)} messages", found.values())
        if all(each.outcome is Outcome.FAILED for each in puts[name]):
            raise Violation(f"{name} was delivered, and its put failed", [*puts[name], *found.values()])
    return {name: next(iter(found)) for name, found in ids.items()}


def _check_delays(simulation: Simulation) -> None:
    """Nothing is delivered before its delay is over."""
    delays = {each.argument["name"]: each.argument["delay_ms"] for each in _of(simulation, "put")}
    for operation in _of(simulation, "lease"):
        for _, _, leased_ms, _, name, created_ms, _ in operation.result if operation.outcome is Outcome.OK else ():
            if leased_ms < created_ms + delays[name]:
                raise Violation(f"{name} was put at {created_ms} and delivered at {leased_ms}, too soon", [operation])


def _check_urgency(simulation: Simulation) -> None:
    """The most urgent come first, then the oldest: within each batch, and while nobody but one consumer is there."""
    puts = {each.argument["name"]: each.argument for each in _of(simulation, "put")}
    rank, before = (0, ""), 0
    for operation in _of(simulation, "lease"):
        alone = operation.client == "drain"
        for id, _, leased_ms, _, name, *_ in operation.result if operation.outcome is Outcome.OK else ():
            if before != (leased_ms if alone else operation.invoked):
                rank, before = (-PRIORITY_MAX, ""), leased_ms if alone else operation.invoked
            if alone and puts[name]["group"] is not None:
                continue  # It became ready when the one before it was gone.
            if (-puts[name]["priority"], id) < rank:
                raise Violation(f"{name} was delivered behind what is less urgent, or was put later", [operation])
            rank = (-puts[name]["priority"], id)


def _check_failures(simulation: Simulation) -> None:
    """Every delivery that was not deferred or acknowledged has failed, the forgotten ones too."""
    deferred: dict[str, list[Operation]] = defaultdict(list)
    for nack in _of(simulation, "nack"):
        if not nack.argument[2] and nack.outcome is not Outcome.FAILED:
            deferred[nack.argument[0]].append(nack)
    for operation in _of(simulation, "lease"):
        for id, fence, *_, failures in operation.result if operation.outcome is Outcome.OK else ():
            before = [nack for nack in deferred[id] if nack.argument[1] < fence]
            certain = sum(nack.outcome is Outcome.OK for nack in before)
            if not fence - 1 - len(before) <= failures <= fence - 1 - certain:
                message = f"Message {id} was delivered {fence - 1} times before and has {failures} failures"
                raise Violation(message, [*before, operation])


def _check_groups(simulation: Simulation, grants: dict[str, list[Grant]], ids: dict[str, str]) -> None:
    """Of a group, one message at a time is in somebody's hands, and none before one that was put earlier is gone."""
    members: dict[str, dict[str, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for put in _of(simulation, "put"):
        name, group = put.argument["name"], put.argument["group"]
        if group is not None and name in ids and put.outcome is not Outcome.FAILED:
            members[group][ids[name]].append(put)
    proven: dict[str, list[Operation]] = defaultdict(list)
    for operation in _of(simulation, "ack", "nack", "reject", "extend"):
        proven[operation.argument[0]].append(operation)
    for group, messages in members.items():
        for first, second in permutations(messages, 2):
            _check_pair(group, grants.get(first, []), grants.get(second, []), proven[first])
            puts = messages[first] + messages[second]
            # With a key the same put may be made again: it was in its place when one of them returned, if not earlier.
            if min(put.returned for put in messages[first]) < messages[second][0].invoked:
                _check_order(group, grants.get(first, []), grants.get(second, []), puts)


def _check_pair(group: str, earlier: list[Grant], later: list[Grant], proven: list[Operation]) -> None:
    for one in earlier:
        until_ms = lives_until_ms(one, proven)
        for other in later:
            if not (one.leased_ms < other.leased_ms < until_ms) or was_given_back(one, proven, before=other.lease):
                continue
            acks = [each for each in proven if each.kind == "ack" and each.argument[1] == one.fence]
            if not any(each.outcome is not Outcome.FAILED and each.invoked < other.lease.returned for each in acks):
                message = f"Two messages of group {group} were in flight at {other.leased_ms}: {one.id} and {other.id}"
                raise Violation(message, [one.lease, *acks, other.lease])


def _check_order(group: str, earlier: list[Grant], later: list[Grant], puts: list[Operation]) -> None:
    for one in earlier:
        for other in later:
            if other.lease.returned < one.lease.invoked or other.leased_ms < one.leased_ms:
                message = f"Group {group} is out of order: {other.id} was delivered before {one.id} was gone"
                raise Violation(message, [*puts, other.lease, one.lease])


def _check_redriven(simulation: Simulation, ahead: Ahead, grants: dict[str, list[Grant]], dead: set[str]) -> None:
    """Dead letters can be put back, are delivered with higher fences, and then nothing is left of anything."""
    database = simulation.database
    if database.transact(layer.redrive, _JOBS) != len(dead):
        raise Violation(f"{len(dead)} dead letters were not put back", [])
    seen: set[str] = set()
    for _ in range(_LEASE_TRIES_MAX):
        batch = database.transact(_lease, ahead, "undertaker", 3, 60_000)
        if not batch:
            break
        for id, fence, *_ in batch:
            if any(grant.fence >= fence for grant in grants.get(id, [])) or id in seen:
                raise Violation(f"Dead letter {id} came back with the old fence {fence}", [])
            seen.add(id)
            database.transact(_ack, (id, fence))
    if seen != dead:
        raise Violation(f"Of {len(dead)} dead letters {len(seen)} came back: {sorted(seen ^ dead)}", [])
    rest = database.read(_leftovers)
    if rest:
        raise Violation(f"The queue is empty and has {len(rest)} keys left, {rest[0]!r} among them", [])


def _of(simulation: Simulation, *kinds: str) -> list[Operation]:
    return [each for each in simulation.history.operations if each.kind in kinds]


# The works that clients run.


def _told(name: str, message: NewMessage) -> dict[str, Any]:
    delay_ms = round(message.delay_seconds * 1_000)
    return {"name": name, "group": message.group, "priority": message.priority, "delay_ms": delay_ms}


def _put(tx: Transaction, message: NewMessage) -> str:
    return layer.put(tx, _JOBS, [message])[0].id


def _lease(tx: Transaction, ahead: Ahead, owner: str, limit: int, visibility_ms: int) -> list[list[Any]]:
    leased = layer.lease_or_wait(tx, _JOBS, owner=owner, limit=limit, visibility_ms=visibility_ms, ahead=ahead)
    return [_delivered(tx, message) for message in leased.messages]


def _delivered(tx: Transaction, message: StoredMessage) -> list[Any]:
    name = (message.payload or b"").decode().rstrip()
    id = layer.text_of(message.id)
    return [id, message.fence, tx.now_ms, message.due_ms, name, message.created_ms, message.failures]


def _ack(tx: Transaction, proof: Proof) -> None:
    layer.ack(tx, _JOBS, _lease_of(proof))


def _nack(tx: Transaction, proof: Proof, delay_seconds: float, counts: bool) -> None:
    layer.nack(tx, _JOBS, _lease_of(proof), delay_seconds=delay_seconds, counts=counts, error="on purpose")


def _reject(tx: Transaction, proof: Proof) -> None:
    layer.reject(tx, _JOBS, _lease_of(proof), error="on purpose")


def _extend(tx: Transaction, proof: Proof, by_ms: int) -> int:
    return layer.extend(tx, _JOBS, _lease_of(proof), by_ms=by_ms).due_ms


def _lease_of(proof: Proof) -> MessageLease:
    id, fence = proof
    return MessageLease(id, f"{id.replace('-', '')}-{fence}", fence)


def _look_at_all(tx: Transaction, queue: QueueKey) -> tuple[dict[str, list[bytes]], QueueStats]:
    room = layer.keys_of(queue)
    ranges = {
        "ready": room.ready_range(),
        "parked": (room.parked, room.parked + b"\xff" * 17),
        "blocked": room.waiting.range(),
    }
    found = {
        place: [key[-16:] for key, _ in tx.scan(begin, end, limit=10_000)] for place, (begin, end) in ranges.items()
    }
    return found, layer.stats(tx, queue)


def _leftovers(tx: Transaction) -> list[bytes]:
    """Keys of an empty queue that stand for a message: none may be left of one that is gone."""
    keys: list[bytes] = []
    for queue in (_JOBS, _DEAD):
        room = layer.keys_of(queue)
        for place in (room.ready, room.parked, room.due, room.body, room.waiting.prefix, room.head.prefix):
            keys += [key for key, _ in tx.scan(place, place + b"\xff" * 17, limit=100)]
    return keys
