"""A process that moves messages is killed at any moment: each message is in one queue, and the task continues."""

import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from random import Random

from fastness.kv import Transaction
from fastness.layers import sqs
from fastness.layers.queues import QueueKey
from fastness.plane import open_plane
from fastness.plane.open import Options
from fastness.wire.queues import NewMessage, PutMessages
from fastness.wire.sqs import CreateSqsQueue, GetSqsQueue, ListMoveTasks, StartMoveTask
from tests.support.forked import start_python
from tests.support.waiting import eventually

MESSAGES = 600
KILLS = 6
CHILD = """
import sys, time
from fastness.plane import open_plane
from fastness.plane.open import Options
plane = open_plane(sys.argv[1], Options())
print("open", flush=True)
time.sleep(60)
"""


def _counts(tx: Transaction) -> list[int]:
    found = [sqs.get(tx, QueueKey("main", name)).attributes for name in ("dead", "else")]
    return [int(each["ApproximateNumberOfMessages"]) for each in found]


def test_every_message_is_moved_once_although_the_process_is_killed(tmp_path: Path) -> None:
    url, random = f"dir:{tmp_path / 'data'}", Random(7)
    plane = open_plane(url, Options())
    redrive = '{"deadLetterTargetArn": "arn:aws:sqs:us-east-1:000000000000:dead", "maxReceiveCount": 1}'
    for name, attributes in (("dead", {}), ("else", {}), ("jobs", {"RedrivePolicy": redrive})):
        plane.call(CreateSqsQueue(name=name, attributes=attributes))
    for first in range(0, MESSAGES, 200):
        bodies = [str(number).encode() for number in range(first, first + 200)]
        plane.call(PutMessages(queue="dead", messages=[NewMessage(payload=body) for body in bodies]))
    plane.call(StartMoveTask(source="dead", destination="else", per_second=200))
    plane.close()
    seen = []
    for _ in range(KILLS):
        child = start_python(["-c", CHILD, url], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        time.sleep(random.uniform(0.05, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        plane = open_plane(url, Options())
        try:
            counts = plane.services.database.read(_counts)  # In one snapshot: the task continues meanwhile.
            assert sum(counts) == MESSAGES
        finally:
            plane.close()
        seen.append(counts[1])
    assert seen[0] < MESSAGES, "it was killed while it moved messages"
    plane = open_plane(url, Options())
    try:
        tasks = partial(plane.call, ListMoveTasks(source="dead"))
        eventually(lambda: tasks().tasks[0].status != "RUNNING", tasks)
        task = tasks().tasks[0]
        assert (task.status, task.moved) == ("COMPLETED", MESSAGES)
        assert plane.call(GetSqsQueue(name="else")).attributes["ApproximateNumberOfMessages"] == str(MESSAGES)
    finally:
        plane.close()
