"""A message that nobody can read: it dies with its error, and is redriven when somebody can."""

from typing import Final

import msgspec

from holdfast.demo.agents import TICKETS
from holdfast.demo.chapters import tickets
from holdfast.demo.context import DemoContext
from holdfast.wire.queues import Delivery

_BEHIND: Final = 24  # Tickets that come behind it.
_NAME: Final = "ticket-in-latin"
_TEXT: Final = "The caf\u00e9 next door has the same order number as I do"


def names() -> set[str]:
    """Every ticket that came in this night."""
    return {_NAME, *(tickets.name(n) for n in range(tickets.COUNT + _BEHIND))}


def tell(night: DemoContext) -> None:
    stage, queue = night.stage, night.plane.queue(TICKETS)
    stage.chapter("A message that nobody can read")
    stage.say(
        "A customer writes in Latin-1, and our desks read UTF-8. The ticket is urgent, so it is the first that a desk "
        f"takes, and every desk fails at it. {_BEHIND} others wait behind it."
    )
    ticket = msgspec.json.encode({"ticket": _NAME, "priority": 9, "text": _TEXT})
    body = ticket.decode().encode("latin-1")
    night.poison = queue.put(body, priority=9).id
    behind = queue.put_many([tickets.ticket(n) for n in range(tickets.COUNT, tickets.COUNT + _BEHIND)])
    desks = [night.cast.agent("desk", night.server.url, name) for name in ("desk-4", "desk-5")]
    with stage.bar("desks 4 and 5 answer", _BEHIND) as done:
        night.cast.until(lambda: tickets.is_empty(night, done) and queue.stats().dead, "The death of the message")
    night.cast.dismiss(*desks)
    letters = queue.dead_letters()
    stage.claim(
        f"after {tickets.ATTEMPTS} attempts it is a dead letter, and says of what it died",
        [letter.id for letter in letters] == [night.poison] and all(map(_died_as_told, letters)),
        checked="dead letters of the queue",
        figure=", ".join((letter.last_error or "").partition(":")[0] for letter in letters),
    )
    stage.claim(
        "not a byte of it is lost",
        [letter.payload for letter in letters] == [body],
        checked="payload of the dead letter",
        figure=f"{len(body)} bytes",
    )
    answered = {each["message"] for each in tickets.answers(night)}
    stage.claim(
        "it held nobody up",
        answered == {receipt.id for receipt in behind},
        checked="answers to the tickets behind it",
        figure=f"{len(answered)} answers",
    )
    _redrive(night, max((letter.fence for letter in letters), default=0))


def _died_as_told(letter: Delivery) -> bool:
    error = letter.last_error or ""
    return letter.failure_attempts == tickets.ATTEMPTS and error.startswith("UnicodeDecodeError: 'utf-8' codec")


def _redrive(night: DemoContext, fence: int) -> None:
    stage, queue = night.stage, night.plane.queue(TICKETS)
    stage.say("Somebody teaches desk 6 Latin-1, and redrives the dead letter: `holdfast queue redrive tickets`.")
    desk = night.cast.agent("desk", night.server.url, "desk-6", "--encoding", "latin-1")
    count = queue.redrive()
    with stage.bar("desk 6 answers", 1) as done:
        night.cast.until(lambda: tickets.is_empty(night, done), "The end of the redriven message")
    night.cast.dismiss(desk)
    given = tickets.answers(night)
    stage.claim(
        "the same message is done, by a fence that is higher still",
        count == 1
        and [(each["message"], each["text"]) for each in given] == [(night.poison, _TEXT)]
        and all(each["fence"] > fence for each in given),
        checked="its answer, its text and its fence",
        figure=", ".join(f"attempt {each['attempts']}, fence {each['fence']}" for each in given) or "no answer",
    )
    stats = queue.stats()
    stage.claim(
        "no work and no dead letter is left",
        not any((stats.ready, stats.delayed, stats.leased, stats.blocked, stats.dead)),
        checked="states of the queue",
        figure=f"{stats.acked_total} done",
    )
