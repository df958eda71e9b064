"""Fills a plane with data of every kind, and reads all of it; for tests of migrations and backups."""

from typing import Any

import msgspec

from fastness import Plane, PutRow, Quota
from fastness.errors import LeaseHeld
from fastness.testing.clock import ManualClock
from fastness.wire.inboxes import DomainEvent, Effect, Timer

LARGE = b"large" * 10_000
SESSIONS = ("ended", "open")


def populate(plane: Plane, clock: ManualClock, *, messages: int = 40) -> None:
    """Store data of every kind in a plane, in every state that it can have."""
    jobs = plane.queue("jobs")
    jobs.put_many([{"n": number} for number in range(messages)])
    jobs.put(b"urgent", priority=9)
    jobs.put(b"x" * 5_000, idempotency_key="once", attributes={"a": "b"})
    jobs.put(LARGE, content_type="application/octet-stream")
    jobs.put("later", delay_seconds=600)
    jobs.put("brief", ttl_seconds=3_000)
    for name in ("first", "second", "third"):
        jobs.put(name, group="g", priority=8)
    for message in jobs.receive_many(4, owner="ada", visibility_seconds=300):
        if message.payload == b"urgent":
            message.ack()
        elif message.json() == {"n": 0}:
            message.reject("poison")
    jobs.receive(owner="bob", visibility_seconds=900).nack(delay_seconds=30, error="not yet")
    jobs.schedule("nightly", "0 3 * * *", {"tick": 1})
    plane.queue("paused").put(1)
    plane.queue("paused").pause()

    plane.mailbox("ada").send("bob", {"plan": 1})
    plane.mailbox("ada").send("bob", b"y" * 40_000)
    plane.mailbox("ada").send("eve", "unread")
    [first, *_] = plane.mailbox("bob").read()
    plane.mailbox("bob").confirm(first)
    plane.mailbox("eve").block("mallory")

    world = plane.world("ada")
    world.create()
    world.append([{"i": number} for number in range(100)], expected_head=0)
    whole: dict[str, Any] = {"receipt_horizon_height": 100, "manifest_hash": world.snapshots.baseline().manifest_hash}
    world.snapshots.commit({"n": 1}, height=100, promote=True, **whole)
    assert world.compact(entries=16, margin=10).segments == 5
    later = Timer((clock.now_ms() + 10_000_000) * 1_000_000, b"later")
    world.inbox.put(DomainEvent(schema="a@1", payload=b"in", effects=(Effect("mail", b"\x01"),), timers=(later,)))
    world.drain()
    world.inbox.put(
        DomainEvent(schema="b@1", payload=b"not drained", timers=(Timer(clock.now_ms() * 1_000_000, b"t"),))
    )
    plane.world("gone").create()
    plane.world("gone").archive()

    plane.blobs.put(LARGE)
    plane.blobs.put(b"small")
    plane.pairs.put(b"raw", b"value")
    plane.transact(lambda tx: tx.put(b"\xfe outside all layers", b"\x00"))
    with plane.entities.transaction() as tx:
        tx.write("task", "t-1", "status", "done")
        tx.write("task", "t-1", "priority", 3)
    plane.entities.put_if_version("task", "t-1", {"status": "open"}, expected_version=1)
    plane.lease("deploy").acquire("ada", ttl_seconds=600)
    plane.lease("old").acquire("ada", ttl_seconds=1).release()
    plane.state("free").update({"v": 1})
    plane.collection("notes").commit([PutRow("ada", ("a", n), b"row", ttl_seconds=n or None) for n in (0, 60, 9_000)])
    plane.tokens.create("ci", universes="*", verbs="queue:*")
    plane.agents.register("ada")
    other = Plane(plane._transport, "other")
    other.queue("jobs").put("of another universe")
    plane.quotas.set("other", Quota(messages=1_000))
    plane.activity.log("ended", {"a": 1})
    plane.activity.end("ended")
    plane.activity.log("open", {"b": 2})
    plane.activity.read()  # Flushes buffered records.


def everything(plane: Plane) -> dict[str, Any]:
    """All readable data of a plane, read without changing it."""
    world, other = plane.world("ada"), Plane(plane._transport, "other")
    seen = {
        "queues": [
            (each.stats(), each.peek(1_000), each.dead_letters(), each.schedules(), each.policy())
            for each in (plane.queue("jobs"), plane.queue("paused"), other.queue("jobs"))
        ],
        "mail": [(box.stats(), box.receipts(), box.blocked()) for box in map(plane.mailbox, ("ada", "bob", "eve"))],
        "world": (world.describe(), world.head(), world.read(0), world.check(), world.snapshots.baseline()),
        "inbox": (world.inbox.cursor(), world.inbox.read()),
        "effects": plane.effects.list().effects,
        "timers": plane.timers.list().timers,
        "archived": plane.world("gone").describe(),
        "blobs": [plane.blobs.get(plane.blobs.put(data)) == data for data in (LARGE, b"small")],
        "pairs": plane.pairs.get(b"raw"),
        "entity": (plane.entities.get("task", "t-1"), plane.entities.history("task", "t-1")),
        "leases": [plane.lease(key).describe() for key in ("deploy", "old")],
        "state": plane.state("free").get(),
        "rows": plane.collection("notes").scan("ada"),
        "tokens": plane.tokens.page().tokens,
        "quota": plane.quotas.get("other"),
        "agents": plane.agents.known(),
        "logs": [(session, plane.activity.read(session=session)) for session in SESSIONS],
    }
    return {name: msgspec.to_builtins(value) for name, value in seen.items()}


def use(plane: Plane, clock: ManualClock) -> list[Any]:
    """The results of using a plane: leases, idempotency keys, due messages and deliveries continue after a move."""
    outcomes: list[Any] = [plane.queue("jobs").put(b"x" * 5_000, idempotency_key="once").duplicate]
    try:
        plane.lease("deploy").acquire("bob")
    except LeaseHeld as held:
        outcomes.append(held.owner)
    outcomes.append(plane.lease("old").acquire("bob").fence > 1)  # A migration raises it.
    clock.advance_ms(1_000_000)  # Leases and delays have expired.
    jobs = plane.queue("jobs")
    while (message := jobs.receive(owner="eve")) is not None:
        outcomes.append((message.id, message.attempts, len(message.read())))
        message.ack()
    outcomes.append(jobs.redrive())
    outcomes += [(mail.id, mail.body) for mail in plane.mailbox("bob").read()]
    outcomes.append(plane.world("ada").drain())
    outcomes.append(plane.world("ada").append([{"after": True}], expected_head=plane.world("ada").head()))
    stats = jobs.stats()
    return [*outcomes, stats.ready, stats.leased, stats.delayed, stats.blocked, stats.put_total, stats.acked_total]
