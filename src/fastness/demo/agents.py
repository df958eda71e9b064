"""The agent processes, which use only the public API and report what they do as lines of JSON.

python -m fastness.demo.agents reader URL AGENT MAILS
python -m fastness.demo.agents desk URL NAME [--encoding utf-8] [--hangs-at N]
"""

import argparse
import json
import os
import time
from typing import Any, Final

import fastness
from fastness.handles.sync.messages import Message
from fastness.handles.sync.plane import Plane

TICKETS: Final = "tickets"
ANSWERS: Final = "answers"
LEASE_SECONDS: Final = 3.0  # How long the ticket of a killed desk stays leased. A live desk renews its lease.
RETRY_SECONDS: Final = 0.2
_READ_SECONDS: Final = 0.02  # Simulated time to read a mail.
_ANSWER_SECONDS: Final = 0.02  # Simulated time to answer a ticket.
_HANG_SECONDS: Final = 3_600.0  # A desk that hangs holds its ticket until it is killed.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["reader", "desk"])
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("mails", type=int, nargs="?", default=1)
    parser.add_argument("--encoding", default="utf-8")
    parser.add_argument("--hangs-at", type=int, default=0, help="never finish the ticket of this number")
    arguments = parser.parse_args()
    with fastness.connect(arguments.url) as plane:
        if arguments.role == "reader":
            read(plane, arguments.name, arguments.mails)
        else:
            answer(plane, arguments.name, encoding=arguments.encoding, hangs_at=arguments.hangs_at)


def read(plane: Plane, agent: str, mails: int) -> None:
    """Read and confirm `mails` mails, oldest first."""
    mailbox = plane.mailbox(agent)
    for count, mail in enumerate(mailbox, 1):
        _report("read", sequence=mail.sequence, **mail.json())
        time.sleep(_READ_SECONDS)
        if count == mails:
            mailbox.confirm(mail)  # The loop confirms a mail when it requests the next one.
            return


def answer(plane: Plane, name: str, *, encoding: str, hangs_at: int) -> None:
    """Answer tickets until SIGTERM.

    One commit acknowledges the ticket, stores its answer and updates its task.
    """
    answers = plane.queue(ANSWERS)
    received = 0

    def handle(message: Message) -> None:
        nonlocal received
        received += 1
        _report("took", id=message.id, lease_id=message.lease.lease_id, fence=message.fence)
        ticket = json.loads((message.payload or b"").decode(encoding))
        if received == hangs_at:
            time.sleep(_HANG_SECONDS)
        time.sleep(_ANSWER_SECONDS)
        task = {"status": "answered", "priority": ticket["priority"], "ml_confidence": 0.9}
        reply = {**ticket, "message": message.id, "desk": name, "fence": message.fence, "attempts": message.attempts}
        plane.atomic().ack(message).put(answers, reply).write("task", ticket["ticket"], task).commit()
        _report("answered", id=message.id, fence=message.fence)

    worker = fastness.Worker(
        plane,
        {TICKETS: handle},
        owner=name,
        visibility_seconds=LEASE_SECONDS,
        retry_delay_seconds=lambda _: RETRY_SECONDS,
    )
    _report("ready")
    worker.run()


def _report(event: str, **facts: Any) -> None:
    os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


if __name__ == "__main__":
    main()
