"""Move tasks: what they move and where to, their rate, and what is left of them after a crash."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastness.errors import (
    InvalidArgument,
    MoveTaskNotFound,
    MoveTaskNotRunning,
    MoveTaskRunning,
    NotDeadLetterQueue,
    QueueNotFound,
)
from fastness.kv import Database, Transaction
from fastness.layers import move_tasks, queues, sqs
from fastness.layers.queues import QueueKey, WorkKey, work
from fastness.layers.queues.work import SqsWorkAdded
from fastness.plane import open_plane
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.executor import execute
from fastness.plane.open import Options
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage, PutMessages
from fastness.wire.sqs import (
    CancelMoveTask,
    CreateSqsQueue,
    DeleteSqsQueue,
    GetSqsQueue,
    ListMoveTasks,
    MoveTask,
    PurgeSqsQueue,
    StartMoveTask,
)
from tests.support.waiting import eventually
from tests.unit.queue_calls import ack, lease, lease_one, payloads, peek, proof, put, stats

JOBS = QueueKey("main", "jobs")
MAIL = QueueKey("main", "mail")
DEAD = QueueKey("main", "dead")
ELSE = QueueKey("main", "else")
ARN = "arn:aws:sqs:us-east-1:000000000000:"


def redrive_to(queue: str) -> dict[str, str]:
    return {"RedrivePolicy": json.dumps({"deadLetterTargetArn": ARN + queue, "maxReceiveCount": 1})}


def create_all(database: Database) -> None:
    database.transact(sqs.create, DEAD, {"MessageRetentionPeriod": "1209600"}, {})
    database.transact(sqs.create, ELSE, {}, {})
    for queue in (JOBS, MAIL):
        database.transact(sqs.create, queue, redrive_to("dead"), {})


def put_dead(database: Database, *bodies: bytes, queue: QueueKey = JOBS, **options: Any) -> None:
    """Messages that were received once too often."""
    put(database, *bodies, queue=queue, **options)
    for message in lease(database, len(bodies), queue=queue):
        database.transact(queues.reject, queue, proof(message), error="too often")


def start(database: Database, destination: str | None = None, per_second: int | None = None) -> MoveTask:
    started: MoveTask = database.transact(execute, StartMoveTask(DEAD.name, destination, per_second))
    return started


def task(database: Database) -> MoveTask:
    return database.read(move_tasks.newest, DEAD, limit=1).tasks[0]


def step(database: Database, worker: str = "") -> int | None:
    return database.transact(queues.listed_step, WorkKey(*DEAD, "move"), move_tasks.step, worker)


def run(database: Database, worker: str = "") -> int | None:
    """Do steps until the next one has to wait; for how long."""
    for _ in range(1_000):
        in_ms = step(database, worker)
        if in_ms != 0:
            return in_ms
    raise AssertionError("it does not end")


def test_messages_return_to_the_queues_that_they_come_from(database: Database) -> None:
    create_all(database)
    put_dead(database, b"a", b"b")
    put_dead(database, b"c", queue=MAIL)
    started = start(database)
    assert (started.status, started.moved, started.to_move, started.source) == ("RUNNING", 0, 3, "dead")
    assert run(database) is None
    assert (task(database).status, task(database).moved) == ("COMPLETED", 3)
    assert payloads(peek(database, JOBS)) == [b"a", b"b"]
    assert payloads(peek(database, MAIL)) == [b"c"]
    assert stats(database, DEAD).ready == 0
    assert database.read(work.pending, "main") == []


def test_a_moved_message_is_a_new_one(database: Database, clock: ManualClock) -> None:
    create_all(database)
    body = bytes(range(256)) * 40  # Stored beside the message.
    put_dead(database, body, attributes={"a": "1"}, content_type="text/plain")
    (before,) = peek(database, DEAD)
    clock.advance_ms(100_000_000)
    start(database)
    run(database)
    (moved,) = peek(database, JOBS)
    assert (moved.payload, moved.attributes, moved.content_type) == (body, {"a": "1"}, "text/plain")
    assert moved.id > before.id
    assert moved.correlation_id == queues.format_id(moved.id)
    assert (moved.attempts, moved.failures, moved.origin, moved.created_ms) == (0, 0, None, clock.now_ms())
    clock.advance_ms(300_000_000)  # Later than the retention of the queue counted from the first put.
    message = lease_one(database, queue=JOBS)
    assert message.attempts == 1
    assert message.payload == body
    ack(database, message, JOBS)
    assert database.read(_leftovers, before.id) == []


def _leftovers(tx: Transaction, id: bytes) -> list[bytes]:
    return [key for key, _ in tx.scan(b"\x00", b"\xff", limit=1_000) if id in key]


def test_a_destination_takes_messages_of_any_origin(database: Database) -> None:
    create_all(database)
    put_dead(database, b"a")
    put(database, b"direct", queue=DEAD)
    start(database, destination="else")
    assert run(database) is None
    assert payloads(peek(database, ELSE)) == [b"a", b"direct"]
    assert task(database).status == "COMPLETED"


def test_a_message_without_an_origin_fails_a_task_without_a_destination(database: Database) -> None:
    create_all(database)
    put_dead(database, b"a")
    put(database, b"direct", queue=DEAD)
    start(database)
    run(database)
    assert (task(database).status, task(database).moved) == ("FAILED", 1)
    assert task(database).reason == "CouldNotDetermineMessageSource"
    assert payloads(peek(database, DEAD)) == [b"direct"]
    start(database)  # A task that has failed does not block the next one.


def test_a_queue_that_is_gone_fails_the_task(database: Database) -> None:
    create_all(database)
    put_dead(database, b"a")
    start(database, destination="else")
    database.transact(sqs.begin_delete, ELSE)
    run(database)
    assert (task(database).status, task(database).reason) == ("FAILED", "AWS.SimpleQueueService.NonExistentQueue")
    database.transact(sqs.begin_delete, JOBS)
    start(database)
    run(database)
    assert (task(database).status, task(database).reason) == ("FAILED", "AWS.SimpleQueueService.NonExistentQueue")
    assert payloads(peek(database, DEAD)) == [b"a"]


def test_messages_that_arrive_after_the_start_stay(database: Database, clock: ManualClock) -> None:
    create_all(database)
    put_dead(database, b"a")
    start(database)
    clock.advance_ms(1)
    put_dead(database, b"b")
    run(database)
    assert payloads(peek(database, JOBS)) == [b"a"]
    assert payloads(peek(database, DEAD)) == [b"b"]


def test_messages_in_flight_stay(database: Database) -> None:
    create_all(database)
    put_dead(database, b"a", b"b")
    lease_one(database, queue=DEAD)
    assert start(database).to_move == 1
    run(database)
    assert (task(database).status, task(database).moved, stats(database, DEAD).leased) == ("COMPLETED", 1, 1)


def test_a_message_with_a_unique_key_keeps_its_id(database: Database) -> None:
    create_all(database)
    put_dead(database, b"a", unique_key="k")
    put_dead(database, b"b", unique_key="l")
    put(database, b"now", unique_key="l", queue=JOBS)
    (a, b) = peek(database, DEAD)
    start(database)
    assert run(database) is None
    assert [(each.id, each.payload) for each in peek(database, JOBS) if each.payload != b"now"] == [(a.id, b"a")]
    assert [each.id for each in peek(database, DEAD)] == [b.id]  # Another message has its key.
    assert (task(database).status, task(database).moved) == ("COMPLETED", 1)


def test_a_rate_spreads_the_steps(database: Database, clock: ManualClock) -> None:
    create_all(database)
    put_dead(database, *[b"x"] * 25)
    start(database, per_second=50)
    assert run(database) == 100
    assert task(database).moved == 5
    assert run(database) == 100
    assert task(database).moved == 5
    began = clock.now_ms()
    while (wait_ms := run(database)) is not None:
        clock.advance_ms(wait_ms)
    assert (task(database).moved, clock.now_ms() - began) == (25, 500)


def test_a_slow_rate_moves_one_at_a_time(database: Database, clock: ManualClock) -> None:
    create_all(database)
    put_dead(database, b"a", b"b")
    start(database, per_second=1)
    assert run(database) == 1_000
    clock.advance_ms(999)
    assert (run(database), task(database).moved) == (1, 1)
    clock.jump_to_ms(clock.now_ms() - 3_600_000)  # A clock that was set back does not stop it for an hour.
    run(database)
    assert task(database).moved == 2


def test_a_cancelled_task_moves_nothing_more(database: Database) -> None:
    create_all(database)
    put_dead(database, *[b"x"] * 5)
    handle = start(database, per_second=1).handle
    run(database)
    cancelled = database.transact(move_tasks.cancel, "main", handle)
    assert (cancelled.status, cancelled.moved) == ("CANCELLING", 1)
    with pytest.raises(MoveTaskNotRunning, match="CANCELLING"):
        database.transact(move_tasks.cancel, "main", handle)
    with pytest.raises(MoveTaskRunning):
        start(database)
    assert run(database) is None
    assert (task(database).status, task(database).moved, stats(database, DEAD).ready) == ("CANCELLED", 1, 4)
    start(database)


def test_what_cannot_start_is_refused(database: Database) -> None:
    create_all(database)
    database.transact(sqs.create, QueueKey("main", "f.fifo"), {"FifoQueue": "true"}, {})
    for bad in (0, 501, -1):
        with pytest.raises(InvalidArgument, match="per_second"):
            start(database, per_second=bad)
    with pytest.raises(QueueNotFound, match="absent"):
        start(database, destination="absent")
    with pytest.raises(QueueNotFound):
        database.transact(move_tasks.start, QueueKey("main", "absent"), destination=None, per_second=None)
    with pytest.raises(NotDeadLetterQueue, match="must be configured as a Dead Letter Queue"):
        database.transact(move_tasks.start, ELSE, destination=None, per_second=None)
    with pytest.raises(InvalidArgument, match="same queue type"):
        start(database, destination="f.fifo")
    with pytest.raises(InvalidArgument, match="both source and destination"):
        start(database, destination="dead")
    start(database)
    with pytest.raises(MoveTaskRunning, match="already a task running"):
        start(database)
    for handle in ("", "dead", "dead/x", "a b/" + "0" * 32):
        with pytest.raises(InvalidArgument, match="TaskHandle"):
            database.transact(move_tasks.cancel, "main", handle)
    with pytest.raises(MoveTaskNotFound):
        database.transact(move_tasks.cancel, "main", "dead/" + "0" * 32)
    with pytest.raises(QueueNotFound):
        database.transact(move_tasks.cancel, "main", "absent/" + "0" * 32)


def test_the_newest_tasks_are_listed_and_kept(database: Database) -> None:
    create_all(database)
    handles = []
    for _ in range(13):
        handles.append(start(database).handle)
        run(database)
    found = database.read(move_tasks.newest, DEAD, limit=10).tasks
    assert [each.handle for each in found] == handles[:2:-1]
    assert len(database.read(lambda tx: tx.scan(*work.tasks_of(*DEAD).range(), limit=100))) == 10
    with pytest.raises(QueueNotFound):
        database.read(move_tasks.newest, QueueKey("main", "absent"), limit=1)


def test_a_task_continues_after_a_crash_between_any_two_steps(
    open_database: Callable[..., Database], backend: str, clock: ManualClock
) -> None:
    """Each message is moved once, however often the process ends."""
    if backend == "memory":
        pytest.skip("a plane in memory keeps nothing for a second process")
    with open_database(clock=clock) as database:
        create_all(database)
        put_dead(database, *[bytes([number]) for number in range(12)])
        start(database, per_second=20)
    for _ in range(20):
        with open_database(clock=clock) as database:
            wait_ms = step(database)
            moved, left = task(database).moved, stats(database, DEAD).ready
            assert (moved + left, stats(database, JOBS).ready) == (12, moved)
            if wait_ms is None:
                assert task(database).status == "COMPLETED"
                assert payloads(peek(database, JOBS)) == [bytes([number]) for number in range(12)]
                return
            clock.advance_ms(wait_ms)
    raise AssertionError("it does not end")


def test_another_node_continues_when_one_has_stopped(database: Database, clock: ManualClock) -> None:
    create_all(database)
    put_dead(database, *[b"x"] * 6)
    start(database, per_second=20)
    assert run(database, "one") == 100
    clock.advance_ms(100)
    assert step(database, "two") == 9_900
    assert task(database).moved == 2
    clock.advance_ms(9_900)
    run(database, "two")
    assert task(database).moved == 4


# The loop of an open plane.


def put_all(plane: EmbeddedTransport, count: int) -> None:
    for name, attributes in (("dead", {}), ("else", {}), ("jobs", redrive_to("dead"))):
        plane.call(CreateSqsQueue(name=name, attributes=attributes))
    while count > 0:
        plane.call(PutMessages(queue="dead", messages=[NewMessage(payload=b"x")] * min(count, 200)))
        count -= 200


def moved(plane: EmbeddedTransport) -> MoveTask:
    return plane.call(ListMoveTasks(source="dead")).tasks[0]


def count(plane: EmbeddedTransport, queue: str) -> int:
    return int(plane.call(GetSqsQueue(name=queue)).attributes["ApproximateNumberOfMessages"])


def test_a_plane_moves_messages_in_the_background(tmp_path: Path) -> None:
    plane = open_plane(f"dir:{tmp_path}", Options())
    try:
        put_all(plane, 600)
        plane.call(StartMoveTask(source="dead", destination="else"))
        eventually(lambda: moved(plane).status == "COMPLETED")
        assert (moved(plane).moved, count(plane, "dead"), count(plane, "else")) == (600, 0, 600)
        (job,) = (job for job in plane.services.background.jobs if job.name == "the work on SQS queues")
        eventually(lambda: job.is_between_passes and job.due_at == math.inf)
        plane.call(StartMoveTask(source="dead", destination="else"))
        eventually(lambda: moved(plane).status == "COMPLETED")
    finally:
        plane.close()


def test_a_task_continues_when_the_plane_is_opened_again(tmp_path: Path) -> None:
    clock = ManualClock()
    plane = open_plane(f"dir:{tmp_path}", Options(clock=clock))
    put_all(plane, 30)
    plane.call(StartMoveTask(source="dead", destination="else", per_second=100))
    eventually(lambda: moved(plane).moved == 10)
    plane.close()
    clock.advance_ms(100)
    plane = open_plane(f"dir:{tmp_path}", Options(clock=clock))
    try:
        eventually(lambda: moved(plane).moved == 20)
        clock.advance_ms(100)
        eventually(lambda: moved(plane).moved == 30)
        clock.advance_ms(100)
        eventually(lambda: moved(plane).status == "COMPLETED")
        assert count(plane, "else") == 30
    finally:
        plane.close()


def test_a_cancel_wakes_the_loop(tmp_path: Path) -> None:
    clock = ManualClock()
    plane = open_plane(f"dir:{tmp_path}", Options(clock=clock))
    try:
        put_all(plane, 30)
        handle = plane.call(StartMoveTask(source="dead", destination="else", per_second=1)).handle
        eventually(lambda: moved(plane).moved == 1)
        plane.call(CancelMoveTask(handle=handle))
        eventually(lambda: moved(plane).status == "CANCELLED")
        assert moved(plane).moved == 1
    finally:
        plane.close()


def test_large_queues_are_emptied_after_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fastness.runtime.queues", "fastness.runtime.sync.queues"):
        monkeypatch.setattr(f"{module}.SQS_STEPS_MAX", 1)
    plane = open_plane(f"dir:{tmp_path}", Options())
    try:
        put_all(plane, 1_000)
        answer = plane.call(PurgeSqsQueue(name="dead"))
        assert not answer.is_done
        eventually(lambda: count(plane, "dead") == 0)
        plane.call(PutMessages(queue="dead", messages=[NewMessage(payload=b"x")] * 250))
        plane.call(DeleteSqsQueue(name="dead"))
        with pytest.raises(QueueNotFound):
            count(plane, "dead")
        database = plane.services.database
        eventually(lambda: "dead" not in database.read(queues.names, "main", after="", limit=10))
    finally:
        plane.close()


def test_two_nodes_move_each_message_once(postgres_url: str) -> None:
    planes = [open_plane(postgres_url, Options()) for _ in range(2)]
    try:
        put_all(planes[0], 400)
        planes[1].call(StartMoveTask(source="dead", destination="else"))
        for plane in planes:
            plane.services.database.publish([SqsWorkAdded()])  # Both work on it.
        eventually(lambda: moved(planes[0]).status == "COMPLETED")
        assert (moved(planes[0]).moved, count(planes[0], "dead"), count(planes[1], "else")) == (400, 0, 400)
    finally:
        for plane in planes:
            plane.close()


def test_the_node_on_duty_continues_what_another_one_has_left(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "_WORKER_MS", 300)
    first = open_plane(postgres_url, Options())
    put_all(first, 30)
    first.call(StartMoveTask(source="dead", destination="else", per_second=1))
    eventually(lambda: moved(first).moved >= 1)
    first.close()
    second = open_plane(postgres_url, Options())
    try:
        before = moved(second).moved
        eventually(lambda: moved(second).moved > before)
        eventually(lambda: count(second, "else") + count(second, "dead") == 30)  # They are two reads.
    finally:
        second.close()
