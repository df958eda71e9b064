"""A process that sends, reads and confirms mail, says line by line what it is about to do and what it was told, and may
be killed at any moment.

    mail_child.py URL NAME MAILS

Each line is one write: when (a clock that all processes of the machine share), who, whether it is asked or told, what.
A line that is on its way to the pipe when the process is killed was written by a call that nobody heard the answer of.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

import holdfast
from holdfast.errors import HoldfastError, Retry
from holdfast.testing.histories import History, Operation
from holdfast.wire.mail import JoinMailbox, LeaveMailbox, ReadMail

SENDERS = ("ada", "carl", "dora")
READERS = ("bob", "eve")


_pipe = threading.Lock()


def say(client: str, *words: Any) -> None:
    line = msgspec.json.encode([time.monotonic_ns(), client, *words]) + b"\n"
    with _pipe:  # A pipe that is full takes a long line in pieces, and those of others in between.
        os.write(1, line)


def record(client: str, kind: str, key: str, argument: Any, call: Callable[[], Any]) -> Any:
    """Make a call, and say so before and after; None when it failed."""
    say(client, "asks", kind, key, argument)
    try:
        result = call()
    except HoldfastError as error:
        say(client, "unknown" if error.retry is Retry.IDEMPOTENT else "failed", error.code)
        return None
    say(client, "told", result)
    return result


def send(plane: Any, name: str, agent: str, mails: int) -> None:
    client, mailbox = f"{name}-{agent}", plane.mailbox(agent)
    chance = random.Random(client)
    for number in range(mails):
        to, id = chance.choice(READERS), f"{client}-{number}"
        body = [id, "x" * chance.choice((1, 1, 1, 20_000))]

        def call(to: str = to, id: str = id, body: Any = body) -> list[Any]:
            return [id, mailbox.send(to, body, id=id).duplicate, None]

        record(client, "send", to, {"id": id, "from": agent}, call)


def read(plane: Any, name: str, agent: str, stopping: threading.Event) -> None:
    client, mailbox, transport = f"{name}-{agent}", plane.mailbox(agent), plane._transport
    chance = random.Random(client)
    for number in range(1_000_000):
        if stopping.is_set():
            return
        session, after = f"{client}-{number}", -1
        record(client, "join", agent, session, lambda s=session: transport.call(JoinMailbox(agent, s)).pending)
        for _ in range(chance.randrange(1, 30)):
            limit = chance.choice((1, 3, 50))

            def call(session: str = session, after: int = after, limit: int = limit) -> list[Any]:
                answer = transport.call(ReadMail(agent, after, limit, 0.05, session))
                found = [[mail.sequence, mail.id, mail.sent_ms, mail.expires_ms] for mail in answer.mails]
                return [found, answer.live_from, time.time_ns() // 1_000_000]

            found = record(client, "read", agent, [session, after, limit], call)[0]
            ids = [id for after, id, *_ in found]
            after = found[-1][0] if found else after
            some = ids if chance.random() < 0.8 else ids[::2]
            if some:
                record(client, "confirm", agent, some, lambda some=some: mailbox.confirm(some))
        if chance.random() < 0.5:
            record(client, "leave", agent, session, lambda s=session: bool(transport.call(LeaveMailbox(agent, s))))


def main() -> None:
    url, name, mails = sys.argv[1], sys.argv[2], int(sys.argv[3])
    plane, stopping = holdfast.open(url), threading.Event()
    sending = [threading.Thread(target=send, args=(plane, name, agent, mails), daemon=True) for agent in SENDERS]
    reading = [threading.Thread(target=read, args=(plane, name, agent, stopping), daemon=True) for agent in READERS]
    for thread in (*sending, *reading):
        thread.start()
    say(name, "ready")
    for thread in sending:
        thread.join()
    sys.stdin.read()  # Readers go on until somebody closes it, or this process is killed.
    stopping.set()
    for thread in reading:
        thread.join()
    plane.close()


# For the tests that read what such processes said.


def history_of(lines: Iterable[bytes]) -> History:
    """What was asked and told, by any number of processes, in the order in which it happened."""
    said = [msgspec.json.decode(line) for line in lines]
    said.sort(key=lambda each: (each[0], each[2] != "asks"))  # What happened at once overlapped.
    history, open_calls = History(), dict[str, Operation]()
    for _, client, word, *about in said:
        if word == "asks":
            kind, key, argument = about
            open_calls[client] = history.invoke(client, kind, key, argument)
        elif word == "told":
            history.ok(open_calls.pop(client), about[0])
        elif word == "failed":
            history.failed(open_calls.pop(client))
        elif word == "unknown":
            history.unknown(open_calls.pop(client))
    return history


def errors_of(lines: Iterable[bytes]) -> dict[str, int]:
    """The codes of the errors that callers saw, and how often."""
    counts: dict[str, int] = {}
    for line in lines:
        _, _, word, *about = msgspec.json.decode(line)
        if word in ("failed", "unknown"):
            counts[about[0]] = counts.get(about[0], 0) + 1
    return counts


if __name__ == "__main__":
    main()
