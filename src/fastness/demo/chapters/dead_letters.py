"""A message that no worker can decode becomes a dead letter with its error, and is redriven to a fixed worker."""

from typing import Final

import msgspec

from fastness.demo.agents import TICKETS
from fastness.demo.chapters import tickets
from fastness.demo.context import DemoContext
from fastness.wire.queues import Delivery

_LATER: Final = 24  # Tickets that are put after it.
_NAME: Final = "ticket-in-latin"
_TEXT: Final = "The caf\u00e9 next door has the same order number as I do"


def names() -> set[str]:
    """The names of all tickets so far."""
    return {_NAME, *(tickets.name(n) for n in range(tickets.COUNT + _LATER))}


def run(context: DemoContext) -> None:
    output, queue = context.output, context.plane.queue(TICKETS)
    output.chapter("A message that no worker can decode")
    output.say(
        "A ticket arrives in Latin-1, but the desks decode UTF-8. It has the highest priority, so desks receive it "
        f"first, and every desk fails. {_LATER} other tickets are queued after it."
    )
    ticket = msgspec.json.encode({"ticket": _NAME, "priority": 9, "text": _TEXT})
    body = ticket.decode().encode("latin-1")
    context.unreadable_id = queue.put(body, priority=9).id
    later = queue.put_many([tickets.ticket(n) for n in range(tickets.COUNT, tickets.COUNT + _LATER)])
    desks = [context.processes.agent("desk", context.server.url, name) for name in ("desk-4", "desk-5")]
    with output.bar("desks 4 and 5 answer", _LATER) as done:
        context.processes.until(lambda: tickets.is_empty(context, done) and queue.stats().dead, "The dead letter")
    context.processes.stop(*desks)
    letters = queue.dead_letters()
    output.claim(
        f"after {tickets.ATTEMPTS} attempts it is a dead letter, with its last error",
        [letter.id for letter in letters] == [context.unreadable_id] and all(map(_has_decode_error, letters)),
        checked="dead letters of the queue",
        figure=", ".join((letter.last_error or "").partition(":")[0] for letter in letters),
    )
    output.claim(
        "the dead letter has its complete payload",
        [letter.payload for letter in letters] == [body],
        checked="payload of the dead letter",
        figure=f"{len(body)} bytes",
    )
    answered = {each["message"] for each in tickets.answers(context)}
    output.claim(
        "it did not delay other tickets",
        answered == {receipt.id for receipt in later},
        checked="answers to the tickets after it",
        figure=f"{len(answered)} answers",
    )
    _redrive(context, max((letter.fence for letter in letters), default=0))


def _has_decode_error(letter: Delivery) -> bool:
    error = letter.last_error or ""
    return letter.failure_attempts == tickets.ATTEMPTS and error.startswith("UnicodeDecodeError: 'utf-8' codec")


def _redrive(context: DemoContext, fence: int) -> None:
    output, queue = context.output, context.plane.queue(TICKETS)
    output.say("Desk 6 decodes Latin-1. The dead letter is redriven: `fastness queue redrive tickets`.")
    desk = context.processes.agent("desk", context.server.url, "desk-6", "--encoding", "latin-1")
    count = queue.redrive()
    with output.bar("desk 6 answers", 1) as done:
        context.processes.until(lambda: tickets.is_empty(context, done), "The answer to the redriven message")
    context.processes.stop(desk)
    received = tickets.answers(context)
    output.claim(
        "the same message is done, with a higher fence",
        count == 1
        and [(each["message"], each["text"]) for each in received] == [(context.unreadable_id, _TEXT)]
        and all(each["fence"] > fence for each in received),
        checked="its answer, its text and its fence",
        figure=", ".join(f"attempt {each['attempts']}, fence {each['fence']}" for each in received) or "no answer",
    )
    stats = queue.stats()
    output.claim(
        "the queue is empty and has no dead letters",
        not any((stats.ready, stats.delayed, stats.leased, stats.blocked, stats.dead)),
        checked="states of the queue",
        figure=f"{stats.acked_total} done",
    )
