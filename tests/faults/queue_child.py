"""A process that puts, receives and settles, says line by line what it is about to do and what it was told, and may be
killed at any moment.

    queue_child.py URL NAME PRODUCERS PUTS CONSUMERS VISIBILITY_SECONDS

Each line is one write: when (a clock that all processes of the machine share), who, whether it is asked or told, what.
A line that is on its way to the pipe when the process is killed was written by a call that nobody heard the answer of.
Lines on standard input ask for single operations, each on a thread of its own; at its end everything is finished.
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
from holdfast.kv import Transaction, pages
from holdfast.layers import queues
from holdfast.layers.queues import QueueKey
from holdfast.testing.histories import History, Operation

QUEUE = "jobs"


_pipe = threading.Lock()


def say(client: str, *words: Any) -> None:
    line = msgspec.json.encode([time.monotonic_ns(), client, *words]) + b"\n"
    with _pipe:  # A pipe that is full takes a long line in pieces, and those of others in between.
        os.write(1, line)


def record(client: str, kind: str, argument: Any, call: Callable[[], Any]) -> Any:
    """Make a call, and say so before and after; None when it failed."""
    say(client, "asks", kind, argument)
    try:
        result = call()
    except HoldfastError as error:
        say(client, "unknown" if error.retry is Retry.IDEMPOTENT else "failed", error.code)
        return None
    say(client, "told", result)
    return result


def receive(jobs: Any, client: str, visibility_seconds: float, limit: int = 1, **options: Any) -> list[Any]:
    """Messages, as `check_queue` wants to know of them."""
    messages: list[Any] = []

    def call() -> list[list[Any]]:
        messages.extend(jobs.receive_many(limit, visibility_seconds=visibility_seconds, owner=client, **options))
        return [delivered(message, visibility_seconds) for message in messages]

    record(client, "lease", None, call)
    return messages


def delivered(message: Any, visibility_seconds: float) -> list[Any]:
    delivery = message.delivery
    leased_ms = delivery.expires_ms - round(visibility_seconds * 1_000)
    more = {"created_ms": delivery.created_ms, "failures": delivery.failure_attempts, "body": message.json()}
    return [delivery.id, delivery.fence, leased_ms, delivery.expires_ms, more]


def produce(jobs: Any, client: str, puts: int) -> None:
    chance = random.Random(client)
    for number in range(puts):
        body = [client, number, "x" * chance.choice((1, 1, 1, 2_000))]
        options = {
            "priority": chance.choice((5, 5, 9)),
            "group": chance.choice((None, None, None, client)),
            "delay_seconds": chance.choice((0.0, 0.0, 0.0, 0.05)),
            "idempotency_key": f"{client}/{number}",
        }
        record(client, "put", [client, number], lambda body=body, options=options: jobs.put(body, **options).id)


def consume(jobs: Any, client: str, visibility_seconds: float, stopping: threading.Event) -> None:
    chance = random.Random(client)
    while not stopping.is_set():
        limit = chance.choice((1, 1, 5))
        for message in receive(jobs, client, visibility_seconds, limit, wait_seconds=0.2):
            proof, choice = [message.id, message.fence], chance.random()
            if choice < 0.05:
                record(client, "extend", proof, message.extend)
            if choice < 0.1:
                record(client, "nack", proof, lambda message=message: message.nack(intent="defer"))
            else:
                record(client, "ack", proof, message.ack)


def obey(plane: Any, client: str, command: list[Any]) -> None:
    """Carry out what standard input asked for."""
    jobs, (kind, options) = plane.queue(QUEUE), command
    if kind == "put":
        record(client, "put", options, lambda: jobs.put(client, **options).id)
    elif kind == "receive":
        kept.extend(receive(jobs, client, **options))
    else:
        record(client, kind, None, lambda: msgspec.to_builtins(getattr(jobs, kind)(**options)))


kept: list[Any] = []  # What was received on demand stays in somebody's hands, and its leases are extended.


def main() -> None:
    url, name, producers, puts, consumers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    visibility_seconds = float(sys.argv[6])
    plane, stopping = holdfast.open(url), threading.Event()
    threads = [
        threading.Thread(target=produce, args=(plane.queue(QUEUE), f"{name}-producer-{number}", puts), daemon=True)
        for number in range(producers)
    ] + [
        threading.Thread(
            target=consume,
            args=(plane.queue(QUEUE), f"{name}-consumer-{number}", visibility_seconds, stopping),
            daemon=True,
        )
        for number in range(consumers)
    ]
    for thread in threads:
        thread.start()
    say(name, "ready")
    for number, line in enumerate(sys.stdin):
        command = (plane, f"{name}-{number}", msgspec.json.decode(line))
        threading.Thread(target=obey, args=command, daemon=True).start()
    stopping.set()
    for thread in threads:
        thread.join()
    plane.close()


# For the tests that read what such processes said.


def history_of(lines: Iterable[bytes]) -> History:
    """What was asked and told, by any number of processes, in the order in which it happened."""
    said = [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]
    said.sort(key=lambda each: (each[0], each[2] != "asks"))  # What happened at once overlapped.
    history, open_calls = History(), dict[str, Operation]()
    for _, client, word, *about in said:
        if word == "asks":
            open_calls[client] = history.invoke(client, about[0], QUEUE, about[1])
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


def content(tx: Transaction, name: str = QUEUE) -> dict[str, list[str]]:
    """The ids of all messages of a queue, by where they are: what a scan of everything says."""
    room = queues.keys_of(QueueKey("main", name))
    ranges = {
        "ready": room.ready_range(),
        "parked": (room.parked, room.parked + b"\xff" * 17),
        "blocked": room.waiting.range(),
    }
    return {
        place: [queues.text_of(key[-16:]) for page in pages(tx, begin, end) for key, _ in page]
        for place, (begin, end) in ranges.items()
    }


if __name__ == "__main__":
    main()
