"""The server is killed during writes, and restarts with everything it acknowledged."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import fastness
from fastness.demo.chapters import tiers, worlds
from fastness.demo.context import DemoContext
from fastness.demo.processes import PATIENCE_SECONDS

_QUEUE: Final = "morning"
_WRITERS: Final = 8
_BEFORE: Final = 400  # Acknowledgements before the kill.
_AFTER: Final = 200  # Acknowledgements after the restart.
_DOWN_SECONDS: Final = 0.5  # How long the server is down, in addition to its start time.


class _Writers:
    """Threads that put messages, wait for each acknowledgement, and record them."""

    def __init__(self, url: str) -> None:
        self.acknowledged: list[tuple[float, str]] = []  # The time and the payload.
        self.errors: list[str] = []
        self._stopping = threading.Event()
        self._url = url
        self._threads = [
            threading.Thread(target=self._write, args=(n,), name=f"fastness-demo-writer-{n}", daemon=True)
            for n in range(_WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop all threads after their current call."""
        self.request_stop()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def request_stop(self) -> None:
        """Signal the threads to stop, without waiting: without a server, their calls wait for it."""
        self._stopping.set()

    def _write(self, writer: int) -> None:
        try:
            with fastness.connect(self._url, patience_seconds=PATIENCE_SECONDS) as plane:
                queue, n = plane.queue(_QUEUE), 0
                while not self._stopping.is_set():
                    queue.put(f"{writer}/{n}".encode())
                    self.acknowledged.append((time.monotonic(), f"{writer}/{n}"))
                    n += 1
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")


def run(context: DemoContext) -> None:
    output = context.output
    output.chapter("The server is killed")
    output.say(
        f"{_WRITERS} agents put messages as fast as they can, each waiting for its acknowledgement. Meanwhile the "
        "server is killed with kill -9 and restarted. The agents do nothing about it: their clients wait, reconnect, "
        "and send unanswered calls again."
    )
    before = _snapshot(context)
    writers = _Writers(context.server.url)
    try:
        with output.bar("agents write", _BEFORE + _AFTER) as done:
            _wait_for(context, writers, _BEFORE, done)
            killed = context.server.child
            killed_at = time.monotonic()
            killed.kill()
            acknowledged = len(writers.acknowledged)
            time.sleep(_DOWN_SECONDS)
            context.server = context.processes.serve(context.server.port)
            _wait_for(context, writers, acknowledged + _AFTER, done)
        writers.stop()
    finally:
        writers.request_stop()
    first = min((at for at, _ in writers.acknowledged[acknowledged:]), default=killed_at)
    output.claim(
        f"the server, process {killed.pid}, was killed with SIGKILL during writes",
        killed.was_killed,
        checked="exit status",
        figure=f"{acknowledged:,} acks so far",
    )
    output.claim(
        f"a new server, process {context.server.child.pid}, serves the same data at the same address",
        context.server.child.process.poll() is None and len(writers.acknowledged) >= acknowledged + _AFTER,
        checked="acknowledgements; first one after the kill",
        figure=f"after {first - killed_at:.1f} s",
    )
    output.claim(
        "no client raised an error", not writers.errors, checked="errors of all clients", figure=_first_error(writers)
    )
    found = Counter(_receive_all(context))
    acked = Counter(payload for _, payload in writers.acknowledged)
    lost, duplicated = acked - found, found - acked
    output.claim(
        "nothing that was acknowledged is lost, and nothing is duplicated",
        not lost and not duplicated,
        checked="payloads in the queue against acknowledgements",
        figure=f"{(acked - lost).total():,} of {acked.total():,}, {duplicated.total()} duplicated",
    )
    output.claim(
        "all earlier data is unchanged: tasks, worlds, mail, queues",
        _snapshot(context) == before,
        checked="hashes of states, all fields, all counts",
        figure=f"{sum(map(len, before.values()))} items",
    )


def _wait_for(context: DemoContext, writers: _Writers, count: int, done: Callable[[int], None]) -> None:
    def enough() -> bool:
        done(len(writers.acknowledged))
        return len(writers.acknowledged) >= count or bool(writers.errors)

    context.processes.until(enough, f"Acknowledgement number {count}")


def _snapshot(context: DemoContext) -> dict[str, dict[str, Any]]:
    """The data of the plane, except the queue that is being written."""
    plane = context.plane
    queues = {queue: plane.queue(queue).stats() for queue in plane.queues() if queue != _QUEUE}
    return {
        "tasks": tiers.all_tasks(context),
        "worlds": worlds.digests(context),
        "mail": {box.agent: box.pending for box in plane.mailboxes()},
        "queues": {name: (stats.ready, stats.acked_total, stats.dead) for name, stats in queues.items()},
    }


def _receive_all(context: DemoContext) -> list[str]:
    queue = context.plane.queue(_QUEUE)
    found = []
    with context.output.bar("counting", queue.stats().ready) as done:
        while batch := queue.receive_many(256, extend_for_seconds=0):
            found += [(message.payload or b"").decode() for message in batch]
            atomic = context.plane.atomic()
            for message in batch:
                atomic.ack(message)
            atomic.commit()
            done(len(found))
    return found


def _first_error(writers: _Writers) -> str:
    return writers.errors[0] if writers.errors else "0 errors"
