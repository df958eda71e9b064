"""Jobs with keys: what a put and a delivery cost beside few messages of few keys, and beside many of many.

    python -m benches jobs                       backlogs from 1,000 messages of 10 keys to 1,000,000 of 100,000
    python -m benches.bench_jobs --most 100000   smaller
    python -m benches.bench_jobs --turn          how soon a new key is delivered beside a backlog of another

Each size has a data directory of its own with a backlog. In the second one, of 250 keys, the messages of a batch have
as many keys as in the largest: a batch reads and writes the state of each of its keys once. Messages are put, received
and acknowledged one by one and in batches, in turns between the sizes. Figures are medians of processor time, which
other processes change least.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import fastness
from benches.comparison import echo
from fastness import NewMessage, Plane, Queue, QueuePolicy, Tier

BATCH = 250
LINES: dict[str, QueuePolicy] = {
    "keys with no limit": QueuePolicy(),
    "fair": QueuePolicy(fair=True),
    "fair, 4 at a time, 1,000/s": QueuePolicy(fair=True, concurrency_per_key=4, rate_per_key=1_000.0),
}


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.bench_jobs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--most", type=int, default=1_000_000, help="messages of the large backlog [1000000]")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", action="store_true", help="deliveries before the message of a new key")
    options = parser.parse_args(list(argv))
    with tempfile.TemporaryDirectory(prefix="fastness-jobs-") as folder, ExitStack() as stack:
        if options.turn:
            plane = stack.enter_context(fastness.open(f"dir:{folder}/turn"))
            echo(f"A new key beside {options.most:,} of another: delivery {turn_of_new_key(plane, options.most)}.")
            return
        for name, policy in LINES.items():
            sizes = [(1_000, 10), (2_500, BATCH), (options.most, options.most // 10)]
            queues = [stack.enter_context(Backlog(Path(folder), name, policy, *size)) for size in sizes]
            echo(f"{name}: " + ", ".join(f"{messages:,} messages of {keys:,} keys" for messages, keys in sizes))
            for title, work in WORK.items():
                figures: list[list[float]] = [[] for _ in queues]
                for _ in range(options.rounds):
                    for index, queue in enumerate(queues):
                        figures[index].append(queue.measure(work))
                medians = [statistics.median(some) for some in figures]
                echo(f"  {title:<28}" + "".join(f" {each:7.1f} µs {each / medians[0]:5.2f}" for each in medians))


class Backlog:
    """A queue with this many messages of this many keys."""

    def __init__(self, folder: Path, name: str, policy: QueuePolicy, messages: int, keys: int) -> None:
        self.plane = fastness.open(f"dir:{folder}/{name.replace(' ', '-')}-{messages}")
        self.queue = self.plane.queue("jobs")
        self.queue.set_policy(policy)
        self.keys = keys
        self.number = 0
        for _ in range(messages // BATCH):
            self.queue.put_many(self.new(BATCH), tier=Tier.IMPORTANT)

    def new(self, count: int) -> list[NewMessage]:
        """Messages of the next keys, in turn."""
        self.number += count
        return [NewMessage(b"x" * 100, key=f"key-{n % self.keys}") for n in range(self.number - count, self.number)]

    def measure(self, work: "Callable[[Backlog], int]") -> float:
        """The processor time of each message, in microseconds."""
        began = time.process_time()
        count = work(self)
        return (time.process_time() - began) / count * 1e6

    def __enter__(self) -> "Backlog":
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.close()


def put_one_by_one(backlog: Backlog) -> int:
    for message in backlog.new(200):
        backlog.queue.put_many([message], tier=Tier.IMPORTANT)
    return 200


def put_in_batches(backlog: Backlog) -> int:
    for _ in range(4):
        backlog.queue.put_many(backlog.new(BATCH), tier=Tier.IMPORTANT)
    return 4 * BATCH


def receive_one_by_one(backlog: Backlog) -> int:
    return sum(_receive(backlog.queue, 1) for _ in range(200))


def receive_in_batches(backlog: Backlog) -> int:
    return sum(_receive(backlog.queue, BATCH) for _ in range(4))


def _receive(queue: Queue, limit: int) -> int:
    messages = queue.receive_many(limit, extend_for_seconds=0, tier=Tier.IMPORTANT)
    if messages:
        queue.ack_many(messages, tier=Tier.IMPORTANT)
    return max(len(messages), 1)


WORK: dict[str, Callable[[Backlog], int]] = {
    "put": put_one_by_one,
    f"put_many({BATCH})": put_in_batches,
    "receive and ack": receive_one_by_one,
    f"receive_many({BATCH}) and ack": receive_in_batches,
}


def turn_of_new_key(plane: Plane, backlog: int) -> int:
    """After how many deliveries a message of a new key comes, beside the backlog of another key."""
    queue = plane.queue("jobs")
    queue.set_policy(QueuePolicy(fair=True))
    for _ in range(backlog // BATCH):
        queue.put_many([NewMessage(b"large", key="large") for _ in range(BATCH)], tier=Tier.IMPORTANT)
    for message in queue.receive_many(BATCH):
        message.ack(tier=Tier.IMPORTANT)
    queue.put(b"small", key="small")
    for number in range(1, backlog):
        message = queue.receive()
        if message is not None and message.payload == b"small":
            return number
    raise AssertionError("the message of the new key was not delivered")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
