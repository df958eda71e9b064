"""Agents, each a process of its own, on the public API alone. What they do they tell as lines of JSON.

python -m holdfast.demo.agents reader URL AGENT MAILS
python -m holdfast.demo.agents desk URL NAME [--encoding utf-8] [--stays-at N]
"""

import argparse
import json
import os
import time
from typing import Any, Final

import holdfast
from holdfast.handles import Plane
from holdfast.handles.sync.messages import Message

TICKETS: Final = "tickets"
ANSWERS: Final = "answers"
LEASE_SECONDS: Final = 3.0  # How long a ticket waits for a desk that died; one that lives extends its lease by itself.
RETRY_SECONDS: Final = 0.2
_READ_SECONDS: Final = 0.02  # To read a mail.
_THINK_SECONDS: Final = 0.02  # To answer a ticket.
_STAY_SECONDS: Final = 3_600.0  # With a ticket in hand, until somebody kills it.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["reader", "desk"])
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("mails", type=int, nargs="?", default=1)
    parser.add_argument("--encoding", default="utf-8")
    parser.add_argument("--stays-at", type=int, default=0, help="never finish the ticket of this number")
    given = parser.parse_args()
    with holdfast.connect(given.url) as plane:
        if given.role == "reader":
            read(plane, given.name, given.mails)
        else:
            answer(plane, given.name, encoding=given.encoding, stays_at=given.stays_at)


def read(plane: Plane, agent: str, mails: int) -> None:
    """Come back after a while, and read so many mails, the oldest first."""
    mailbox = plane.mailbox(agent)
    for count, mail in enumerate(mailbox, 1):
        _tell("read", sequence=mail.sequence, **mail.json())
        time.sleep(_READ_SECONDS)
        if count == mails:
            mailbox.confirm(mail)  # As the loop does by itself when it asks for the next one.
            return


def answer(plane: Plane, name: str, *, encoding: str, stays_at: int) -> None:
    """Work at a desk until SIGTERM: take a ticket, think, and answer it.

    That the ticket is done, its answer and what is known of its task are one commit.
    """
    answers = plane.queue(ANSWERS)
    taken = 0

    def handle(message: Message) -> None:
        nonlocal taken
        taken += 1
        _tell("took", id=message.id, lease_id=message.lease.lease_id, fence=message.fence)
        ticket = json.loads((message.payload or b"").decode(encoding))
        if taken == stays_at:
            time.sleep(_STAY_SECONDS)
        time.sleep(_THINK_SECONDS)
        task = {"status": "answered", "priority": ticket["priority"], "ml_confidence": 0.9}
        said = {**ticket, "message": message.id, "desk": name, "fence": message.fence, "attempts": message.attempts}
        plane.atomic().ack(message).put(answers, said).write("task", ticket["ticket"], task).commit()
        _tell("answered", id=message.id, fence=message.fence)

    worker = holdfast.Worker(
        plane,
        {TICKETS: handle},
        owner=name,
        visibility_seconds=LEASE_SECONDS,
        retry_delay_seconds=lambda _: RETRY_SECONDS,
    )
    _tell("ready")
    worker.run()


def _tell(event: str, **facts: Any) -> None:
    os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


if __name__ == "__main__":
    main()
