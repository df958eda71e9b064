"""The server itself is killed while everybody writes, and comes back with everything it acknowledged."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import holdfast
from holdfast.demo.chapters import memories, tiers
from holdfast.demo.context import DemoContext
from holdfast.demo.processes import PATIENCE_SECONDS

_QUEUE: Final = "morning"
_WRITERS: Final = 8
_BEFORE: Final = 400  # Acknowledgements before the kill.
_AFTER: Final = 200  # And after it.
_AWAY_SECONDS: Final = 0.5  # How long the server is gone, beside the time that it needs to start.


class _Writers:
    """Threads that put messages, each waiting for its acknowledgement, and know what they were told."""

    def __init__(self, url: str) -> None:
        self.acknowledged: list[tuple[float, str]] = []  # When, and what.
        self.errors: list[str] = []
        self._over = threading.Event()
        self._url = url
        self._threads = [
            threading.Thread(target=self._write, args=(n,), name=f"holdfast-demo-writer-{n}", daemon=True)
            for n in range(_WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each finish what it does."""
        self.give_up()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def give_up(self) -> None:
        """Have them end, whenever that is: where there is no server, they wait for it."""
        self._over.set()

    def _write(self, writer: int) -> None:
        try:
            with holdfast.connect(self._url, patience_seconds=PATIENCE_SECONDS) as plane:
                queue, n = plane.queue(_QUEUE), 0
                while not self._over.is_set():
                    queue.put(f"{writer}/{n}".encode())
                    self.acknowledged.append((time.monotonic(), f"{writer}/{n}"))
                    n += 1
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")


def tell(night: DemoContext) -> None:
    stage = night.stage
    stage.chapter("kill -9 for the server itself")
    stage.say(
        f"{_WRITERS} agents put work for the morning as fast as they can, each waiting for its acknowledgement. In the "
        "middle of it the server is killed with kill -9, and started again. Nobody tells the agents: their clients "
        "wait, connect again, and send once more what was under way."
    )
    before = _everything(night)
    writers = _Writers(night.server.url)
    try:
        with stage.bar("agents write", _BEFORE + _AFTER) as done:
            _wait_for(night, writers, _BEFORE, done)
            killed = night.server.child
            killed_at = time.monotonic()
            killed.kill()
            known = len(writers.acknowledged)
            time.sleep(_AWAY_SECONDS)
            night.server = night.cast.serve(night.server.port)
            _wait_for(night, writers, known + _AFTER, done)
        writers.stop()
    finally:
        writers.give_up()
    first = min((at for at, _ in writers.acknowledged[known:]), default=killed_at)
    stage.claim(
        f"the server, process {killed.pid}, died of SIGKILL in the middle of writes",
        killed.was_killed,
        checked="exit status",
        figure=f"{known:,} acks so far",
    )
    stage.claim(
        f"a new one, process {night.server.child.pid}, serves the same data at the same address",
        night.server.child.process.poll() is None and len(writers.acknowledged) >= known + _AFTER,
        checked="acknowledgements; first one after the kill",
        figure=f"after {first - killed_at:.1f} s",
    )
    stage.claim("no agent saw an error", not writers.errors, checked="errors of all clients", figure=_first(writers))
    found = Counter(_take_all(night))
    told = Counter(what for _, what in writers.acknowledged)
    lost, twice = told - found, found - told
    stage.claim(
        "nothing that was acknowledged is lost, and nothing is there twice",
        not lost and not twice,
        checked="payloads in the queue against acknowledgements",
        figure=f"{(told - lost).total():,} of {told.total():,}, {twice.total()} twice",
    )
    stage.claim(
        "everything from before is as it was: tasks, memories, mail, queues",
        _everything(night) == before,
        checked="hashes of states, all fields, all counts",
        figure=f"{sum(map(len, before.values()))} things",
    )


def _wait_for(night: DemoContext, writers: _Writers, count: int, done: Callable[[int], None]) -> None:
    def enough() -> bool:
        done(len(writers.acknowledged))
        return len(writers.acknowledged) >= count or bool(writers.errors)

    night.cast.until(enough, f"Acknowledgement number {count}")


def _everything(night: DemoContext) -> dict[str, dict[str, Any]]:
    """What is in the plane, but for the queue that is being written."""
    plane = night.plane
    queues = {queue: plane.queue(queue).stats() for queue in plane.queues() if queue != _QUEUE}
    return {
        "tasks": tiers.all_tasks(night),
        "memories": memories.digests(night),
        "mail": {box.agent: box.pending for box in plane.mailboxes()},
        "queues": {name: (stats.ready, stats.acked_total, stats.dead) for name, stats in queues.items()},
    }


def _take_all(night: DemoContext) -> list[str]:
    queue = night.plane.queue(_QUEUE)
    found = []
    with night.stage.bar("counting", queue.stats().ready) as done:
        while batch := queue.receive_many(256, extend_for_seconds=0):
            found += [(message.payload or b"").decode() for message in batch]
            atomic = night.plane.atomic()
            for message in batch:
                atomic.ack(message)
            atomic.commit()
            done(len(found))
    return found


def _first(writers: _Writers) -> str:
    return writers.errors[0] if writers.errors else "0 errors"
