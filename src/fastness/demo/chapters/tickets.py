"""A queue of tickets, and a worker ("desk") that is killed while it holds one."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from fastness.demo.agents import ANSWERS, LEASE_SECONDS, TICKETS
from fastness.demo.context import DemoContext
from fastness.errors import Fenced
from fastness.tiers import Tier
from fastness.wire.queues import NewMessage, QueuePolicy

COUNT: Final = 120
ATTEMPTS: Final = 3  # After this many failures, a ticket becomes a dead letter.
_KILLED_AT: Final = 9


def run(context: DemoContext) -> None:
    output, queue = context.output, context.plane.queue(TICKETS)
    output.chapter("A worker is killed while it works")
    output.say(
        f"{COUNT} tickets are put. Desk 1 answers them one by one. One commit acknowledges a ticket, stores its answer "
        "and updates its task."
    )
    queue.set_policy(QueuePolicy(max_attempts=ATTEMPTS))
    receipts = queue.put_many([ticket(n) for n in range(COUNT)])
    output.claim(
        "each put was acknowledged as `critical` (synced to disk), and every ticket is ready",
        all(receipt.durability is Tier.CRITICAL for receipt in receipts) and queue.stats().ready == COUNT,
        checked="durability of each receipt; depth of the queue",
        figure=f"{COUNT} tickets",
    )
    held = _kill_worker(context)
    output.say(
        f"Desks 2 and 3 take over. The ticket of the killed desk is delivered again when its lease expires, after at "
        f"most {LEASE_SECONDS:.0f} s."
    )
    desks = [context.processes.agent("desk", context.server.url, name) for name in ("desk-2", "desk-3")]
    with output.bar("desks 2 and 3 answer", COUNT) as done:
        context.processes.until(lambda: is_empty(context, done), "The last answer")
    context.processes.stop(*desks)
    _check(context, [receipt.id for receipt in receipts], held)


def _kill_worker(context: DemoContext) -> dict[str, Any]:
    """Run a desk, and kill it while it holds a ticket. Returns that ticket's id and lease."""
    desk = context.processes.agent("desk", context.server.url, "desk-1", "--hangs-at", str(_KILLED_AT))
    held: dict[str, Any] = {}
    with context.output.bar("desk 1 answers", _KILLED_AT) as done:
        for n in range(1, _KILLED_AT + 1):
            held = desk.read_event("took")
            done(n)
    leased = context.plane.queue(TICKETS).stats().leased
    desk.kill()
    context.orphaned_id = held["id"]
    context.output.claim(
        f"desk 1, process {desk.pid}, was killed with kill -9 while it held ticket number {_KILLED_AT}",
        desk.was_killed and leased == 1,
        checked="exit status; leases of the queue",
        figure=f"fence {held['fence']}",
    )
    return held


def _check(context: DemoContext, put: list[str], held: dict[str, Any]) -> None:
    output, received = context.output, answers(context)
    repeated = [each for each in received if each["message"] == held["id"]]
    output.claim(
        "another desk finished that ticket, with a higher fence",
        [each["desk"] != "desk-1" and each["fence"] > held["fence"] for each in repeated] == [True],
        checked="the stored answer against desk 1's lease",
        figure=", ".join(f"fence {each['fence']} of {each['desk']}" for each in repeated) or "no answer",
    )
    late = context.plane.queue(TICKETS).held(held["id"], lease_id=held["lease_id"], fence=held["fence"])
    try:
        late.ack()
    except Fenced as error:
        error_code = error.code
    else:
        error_code = ""
    output.claim(
        "a late ack with desk 1's lease is rejected",
        error_code == "queue_message_lease_mismatch",
        checked="ack with the lease and fence of desk 1",
        figure=error_code or "accepted",
    )
    output.claim(
        "every ticket was answered, and none twice",
        Counter(each["message"] for each in received) == Counter(put),
        checked="ids of the answers against receipts of the puts",
        figure=f"{len(received)} answers",
    )


def name(n: int) -> str:
    return f"ticket-{n:03}"


def ticket(n: int) -> NewMessage:
    body = {"ticket": name(n), "priority": n % 10, "text": f"Where is order {4_200 + n}?"}
    return NewMessage(payload=msgspec.json.encode(body), content_type="application/json", correlation_id=name(n))


def is_empty(context: DemoContext, done: Callable[[int], None]) -> bool:
    """Whether every ticket is done. Reports the number of answers to `done`."""
    stats = context.plane.queue(TICKETS).stats()
    done(context.plane.queue(ANSWERS).stats().ready)
    return not (stats.ready or stats.delayed or stats.leased or stats.blocked)


def answers(context: DemoContext) -> list[dict[str, Any]]:
    """Receive and acknowledge all answers."""
    queue = context.plane.queue(ANSWERS)
    found = []
    while batch := queue.receive_many(256, extend_for_seconds=0):
        for message in batch:
            found.append(message.json())
            message.ack()
    return found
