"""Move tasks between FIFO queues."""

import json

from fastness.kv import Database
from fastness.layers import move_tasks, queues, sqs
from fastness.layers.queues import QueueKey, WorkKey
from tests.unit.queue_calls import ack, lease, proof, put, stats

JOBS = QueueKey("main", "jobs.fifo")
DEAD = QueueKey("main", "dead.fifo")
ARN = "arn:aws:sqs:us-east-1:000000000000:"


def test_messages_of_groups_are_moved_in_their_order(database: Database) -> None:
    redrive = json.dumps({"deadLetterTargetArn": ARN + "dead.fifo", "maxReceiveCount": 1})
    database.transact(sqs.create, DEAD, {"FifoQueue": "true"}, {})
    database.transact(sqs.create, JOBS, {"FifoQueue": "true", "RedrivePolicy": redrive}, {})
    for number in range(6):
        put(database, b"%d" % number, queue=JOBS, group=f"g{number % 2}")
    while messages := lease(database, 10, queue=JOBS):
        for message in messages:
            database.transact(queues.reject, JOBS, proof(message), error="no")
    for number in (6, 7):
        put(database, b"%d" % number, queue=DEAD, group="g0")  # Sent to the dead-letter queue itself.
    found = database.read(sqs.get, DEAD).attributes
    assert found["ApproximateNumberOfMessages"] == "8"
    database.transact(move_tasks.start, DEAD, destination="jobs.fifo", per_second=None)
    for _ in range(20):
        if database.transact(queues.listed_step, WorkKey(*DEAD, "move"), move_tasks.step, "") is None:
            break
    task = database.read(move_tasks.newest, DEAD, limit=1).tasks[0]
    assert (task.status, task.moved, stats(database, DEAD).ready) == ("COMPLETED", 8, 0)
    got: dict[str, list[bytes]] = {"g0": [], "g1": []}
    while messages := lease(database, 10, queue=JOBS):
        for message in messages:
            got[message.group or ""].append(message.payload or b"")
            ack(database, message, JOBS)
    assert got == {"g0": [b"0", b"2", b"4", b"6", b"7"], "g1": [b"1", b"3", b"5"]}
