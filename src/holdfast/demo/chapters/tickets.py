"""A queue of work, and a desk that is killed in the middle of it."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.demo.agents import ANSWERS, LEASE_SECONDS, TICKETS
from holdfast.demo.context import DemoContext
from holdfast.errors import Fenced
from holdfast.tiers import Tier
from holdfast.wire.queues import NewMessage, QueuePolicy

COUNT: Final = 120
ATTEMPTS: Final = 3  # Then a ticket is a dead letter.
_KILLED_AT: Final = 9


def tell(night: DemoContext) -> None:
    stage, queue = night.stage, night.plane.queue(TICKETS)
    stage.chapter("A worker is killed in the middle of its work")
    stage.say(
        f"{COUNT} tickets come in. Desk 1 answers them one by one. To answer a ticket is one commit: the ticket is "
        "done, its answer is stored and its task is up to date, or nothing of it."
    )
    queue.set_policy(QueuePolicy(max_attempts=ATTEMPTS))
    receipts = queue.put_many([ticket(n) for n in range(COUNT)])
    stage.claim(
        "each put was acknowledged as `critical`, synced to disk, and every ticket is ready",
        all(receipt.durability is Tier.CRITICAL for receipt in receipts) and queue.stats().ready == COUNT,
        checked="promise of each receipt; depth of the queue",
        figure=f"{COUNT} tickets",
    )
    held = _killed(night)
    stage.say(
        f"Desks 2 and 3 take over. The ticket of the dead desk is free again when its lease ends, after at most "
        f"{LEASE_SECONDS:.0f} s."
    )
    desks = [night.cast.agent("desk", night.server.url, name) for name in ("desk-2", "desk-3")]
    with stage.bar("desks 2 and 3 answer", COUNT) as done:
        night.cast.until(lambda: is_empty(night, done), "The end of the queue")
    night.cast.dismiss(*desks)
    _check(night, [receipt.id for receipt in receipts], held)


def _killed(night: DemoContext) -> dict[str, Any]:
    """Let a desk work, and kill it with a ticket in hand; which one, and by what lease."""
    desk = night.cast.agent("desk", night.server.url, "desk-1", "--stays-at", str(_KILLED_AT))
    held: dict[str, Any] = {}
    with night.stage.bar("desk 1 answers", _KILLED_AT) as done:
        for n in range(1, _KILLED_AT + 1):
            held = desk.hear_of("took")
            done(n)
    leased = night.plane.queue(TICKETS).stats().leased
    desk.kill()
    night.orphan = held["id"]
    night.stage.claim(
        f"desk 1, process {desk.pid}, died of kill -9 with ticket number {_KILLED_AT} in hand",
        desk.was_killed and leased == 1,
        checked="exit status; leases of the queue",
        figure=f"fence {held['fence']}",
    )
    return held


def _check(night: DemoContext, put: list[str], held: dict[str, Any]) -> None:
    stage, given = night.stage, answers(night)
    again = [each for each in given if each["message"] == held["id"]]
    stage.claim(
        "another desk finished that ticket, with a higher fence",
        [each["desk"] != "desk-1" and each["fence"] > held["fence"] for each in again] == [True],
        checked="the stored answer against what desk 1 had",
        figure=", ".join(f"fence {each['fence']} of {each['desk']}" for each in again) or "no answer",
    )
    late = night.plane.queue(TICKETS).held(held["id"], lease_id=held["lease_id"], fence=held["fence"])
    try:
        late.ack()
    except Fenced as error:
        refused = error.code
    else:
        refused = ""
    stage.claim(
        "were desk 1 to wake up and say that it is done, it would be refused",
        refused == "queue_message_lease_mismatch",
        checked="ack by the lease and fence of desk 1",
        figure=refused or "it was accepted",
    )
    stage.claim(
        "every ticket was answered, and none twice",
        Counter(each["message"] for each in given) == Counter(put),
        checked="ids of the answers against receipts of the puts",
        figure=f"{len(given)} answers",
    )


def name(n: int) -> str:
    return f"ticket-{n:03}"


def ticket(n: int) -> NewMessage:
    body = {"ticket": name(n), "priority": n % 10, "text": f"Where is order {4_200 + n}?"}
    return NewMessage(payload=msgspec.json.encode(body), content_type="application/json", correlation_id=name(n))


def is_empty(night: DemoContext, done: Callable[[int], None]) -> bool:
    """Whether no ticket waits, or is in anybody's hands; `done` is told how many answers there are."""
    stats = night.plane.queue(TICKETS).stats()
    done(night.plane.queue(ANSWERS).stats().ready)
    return not (stats.ready or stats.delayed or stats.leased or stats.blocked)


def answers(night: DemoContext) -> list[dict[str, Any]]:
    """All answers that there are; they are taken."""
    queue = night.plane.queue(ANSWERS)
    found = []
    while batch := queue.receive_many(256, extend_for_seconds=0):
        for message in batch:
            found.append(message.json())
            message.ack()
    return found
