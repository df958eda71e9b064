"""A process that sends, reads and confirms mail, prints each call and its result, and may be killed at any time.

    mail_child.py URL NAME MAILS

Each line is one write: time (of a clock shared by all processes), client, call or result, and its content. A line that
is lost when the process is killed belongs to a call without a known result.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

import fastness
from fastness.errors import FastnessError, RetryAdvice
from fastness.testing.histories import History, Operation
from fastness.wire.mail import JoinMailbox, LeaveMailbox, ReadMail

SENDERS = ("ada", "carl", "dora")
READERS = ("bob", "eve")


_pipe = threading.Lock()


def write_line(client: str, *words: Any) -> None:
    line = msgspec.json.encode([time.monotonic_ns(), client, *words]) + b"\n"
    with _pipe:  # A full pipe splits long lines, and could mix them with others.
        os.write(1, line)


def record(client: str, kind: str, key: str, argument: Any, call: Callable[[], Any]) -> Any:
    """Make a call, and print it and its result; None if it failed."""
    write_line(client, "call", kind, key, argument)
    try:
        result = call()
    except FastnessError as error:
        write_line(client, "unknown" if error.retry is RetryAdvice.IDEMPOTENT else "failed", error.code)
        return None
    write_line(client, "result", result)
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
        record(client, "join", agent, session, lambda: transport.call(JoinMailbox(agent, session)).pending)  # noqa: B023
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
                record(client, "confirm", agent, some, lambda: mailbox.confirm(some))  # noqa: B023
        if chance.random() < 0.5:
            record(client, "leave", agent, session, lambda: bool(transport.call(LeaveMailbox(agent, session))))  # noqa: B023


def main() -> None:
    url, name, mails = sys.argv[1], sys.argv[2], int(sys.argv[3])
    plane, stopping = fastness.open(url), threading.Event()
    sending = [threading.Thread(target=send, args=(plane, name, agent, mails), daemon=True) for agent in SENDERS]
    reading = [threading.Thread(target=read, args=(plane, name, agent, stopping), daemon=True) for agent in READERS]
    for thread in (*sending, *reading):
        thread.start()
    write_line(name, "ready")
    for thread in sending:
        thread.join()
    sys.stdin.read()  # Readers run until it is closed, or this process is killed.
    stopping.set()
    for thread in reading:
        thread.join()
    plane.close()


# For the tests that read the output of such processes.


def history_of(lines: Iterable[bytes]) -> History:
    """The calls and results of any number of processes, in order of time."""
    events = [msgspec.json.decode(line) for line in lines]
    events.sort(key=lambda each: (each[0], each[2] != "call"))  # Equal times mean overlapping calls.
    history, open_calls = History(), dict[str, Operation]()
    for _, client, word, *details in events:
        if word == "call":
            kind, key, argument = details
            open_calls[client] = history.invoke(client, kind, key, argument)
        elif word == "result":
            history.ok(open_calls.pop(client), details[0])
        elif word == "failed":
            history.failed(open_calls.pop(client))
        elif word == "unknown":
            history.unknown(open_calls.pop(client))
    return history


def errors_of(lines: Iterable[bytes]) -> dict[str, int]:
    """How often callers got which error code."""
    counts: dict[str, int] = {}
    for line in lines:
        _, _, word, *details = msgspec.json.decode(line)
        if word in ("failed", "unknown"):
            counts[details[0]] = counts.get(details[0], 0) + 1
    return counts


if __name__ == "__main__":
    main()
