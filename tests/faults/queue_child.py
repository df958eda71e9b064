"""A process that puts, receives and settles messages, prints each call and its result, and may be killed at any time.

    queue_child.py URL NAME PRODUCERS PUTS CONSUMERS VISIBILITY_SECONDS

Each line is one write: time (of a clock shared by all processes), client, call or result, and its content. A line that
is lost when the process is killed belongs to a call without a known result. Lines on standard input request single
operations, each on a thread of its own; at the end of the input the process finishes.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from fastness import Plane
from fastness.errors import FastnessError, RetryAdvice
from fastness.kv import Transaction, pages
from fastness.layers import queues
from fastness.layers.queues import QueueKey, message_leases
from fastness.plane import Options, open_plane
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.testing.histories import History, Operation

QUEUE = "jobs"
POLL_SECONDS = 300.0  # Waiting consumers are woken by notifications.


_pipe = threading.Lock()


def write_line(client: str, *words: Any) -> None:
    line = msgspec.json.encode([time.monotonic_ns(), client, *words]) + b"\n"
    with _pipe:  # A full pipe splits long lines, and could mix them with others.
        os.write(1, line)


def record(client: str, kind: str, argument: Any, call: Callable[[], Any]) -> Any:
    """Make a call, and print it and its result; None if it failed."""
    write_line(client, "call", kind, argument)
    try:
        result = call()
    except FastnessError as error:
        write_line(client, "unknown" if error.retry is RetryAdvice.IDEMPOTENT else "failed", error.code)
        return None
    write_line(client, "result", result)
    return result


def receive(jobs: Any, client: str, visibility_seconds: float, limit: int = 1, **options: Any) -> list[Any]:
    """Messages in the form that `check_queue` needs."""
    messages: list[Any] = []

    def call() -> list[list[Any]]:
        messages.extend(jobs.receive_many(limit, visibility_seconds=visibility_seconds, owner=client, **options))
        return [delivered(message, visibility_seconds) for message in messages]

    done = options.get("ack", [])
    for number, message in enumerate(done):
        write_line(f"{client}-{number}", "call", "ack", [message.id, message.fence])
    is_answered = record(client, "lease", None, call) is not None
    for number, message in enumerate(done if is_answered else ()):  # Without an answer, it is not known.
        words = ("result", None) if message.settled else ("failed", "queue_message_lease_mismatch")
        write_line(f"{client}-{number}", *words)
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
        record(client, "put", [client, number], lambda: jobs.put(body, **options).id)  # noqa: B023


def consume(jobs: Any, client: str, visibility_seconds: float, stopping: threading.Event) -> None:
    chance = random.Random(client)
    done: list[Any] = []
    while done or not stopping.is_set():
        limit = chance.choice((1, 1, 5))
        messages = receive(jobs, client, visibility_seconds, limit, wait_seconds=0.2, ack=done)
        done = messages if chance.random() < 0.5 and not stopping.is_set() else []
        for message in messages if not done else ():
            proof, choice = [message.id, message.fence], chance.random()
            if choice < 0.05:
                record(client, "extend", proof, message.extend)
            if choice < 0.1:
                record(client, "nack", proof, lambda: message.nack(intent="defer"))  # noqa: B023
            else:
                record(client, "ack", proof, message.ack)


def execute_request(plane: Any, client: str, command: list[Any]) -> None:
    """Execute the requests on standard input."""
    jobs, (kind, options) = plane.queue(QUEUE), command
    if kind == "put":
        record(client, "put", options, lambda: jobs.put(client, **options).id)
    elif kind == "receive":
        kept.extend(receive(jobs, client, **options))
    else:
        record(client, kind, None, lambda: msgspec.to_builtins(getattr(jobs, kind)(**options)))


kept: list[Any] = []  # Messages received on request stay leased, and their leases are renewed.


def main() -> None:
    url, name, producers, puts, consumers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    visibility_seconds = float(sys.argv[6])
    stopping, rarely = threading.Event(), ConsumerOptions(poll_seconds=POLL_SECONDS)
    plane = Plane(open_plane(url, Options(consumers=rarely)))
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
    write_line(name, "ready")
    for number, line in enumerate(sys.stdin):
        command = (plane, f"{name}-{number}", msgspec.json.decode(line))
        threading.Thread(target=execute_request, args=command, daemon=True).start()
    stopping.set()
    for thread in threads:
        thread.join()
    plane.close()


# For the tests that read the output of such processes.


def history_of(lines: Iterable[bytes]) -> History:
    """The calls and results of any number of processes, in order of time."""
    events = [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]
    events.sort(key=lambda each: (each[0], each[2] != "call"))  # Equal times mean overlapping calls.
    history, open_calls = History(), dict[str, Operation]()
    for _, client, word, *details in events:
        if word == "call":
            open_calls[client] = history.invoke(client, details[0], QUEUE, details[1])
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


def content(tx: Transaction, name: str = QUEUE) -> dict[str, list[str]]:
    """The ids of all messages of a queue by state, from a full scan."""
    keys = queues.keys_of(QueueKey("main", name))
    ranges = {
        "ready": keys.ready_range(),
        "delayed": keys.delayed_range(),
        "blocked": keys.waiting.range(),
    }
    found = {
        state: [queues.format_id(key[-16:]) for page in pages(tx, begin, end) for key, _ in page]
        for state, (begin, end) in ranges.items()
    }
    found["leased"] = [queues.format_id(message.id) for message in message_leases.leased_messages(tx, keys)]
    return found


if __name__ == "__main__":
    main()
