"""Queues of the SQS protocol on every backend: created, changed, listed, tagged, purged and deleted."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from fastness.errors import (
    InvalidArgument,
    InvalidSqsAttribute,
    PurgeInProgress,
    QueueMessageLeaseMismatch,
    QueueNotFound,
    SqsQueueDeletedRecently,
    SqsQueueExists,
    UnknownSqsAttribute,
    Validation,
)
from fastness.kv import Database, Transaction
from fastness.layers import queues, sqs
from fastness.layers.queues import QueueKey, WorkKey, work
from fastness.layers.queues.work import Kind
from fastness.testing.clock import ManualClock
from fastness.wire.queues import NewMessage, QueuePolicy
from fastness.wire.sqs import SqsQueue, SqsSettings
from tests.unit.queue_calls import ack, lease, lease_one, nack, payloads, peek, put, reject, set_policy, stats

JOBS = QueueKey("main", "jobs")
DEAD = QueueKey("main", "dead")
FIFO = QueueKey("main", "jobs.fifo")
DEAD_FIFO = QueueKey("main", "dead.fifo")
ARN = "arn:aws:sqs:us-east-1:000000000000:"


def create(database: Database, queue: QueueKey = JOBS, /, **attributes: str) -> SqsQueue:
    return database.transact(sqs.create, queue, attributes, {})


def change(database: Database, queue: QueueKey = JOBS, /, **attributes: str) -> SqsQueue:
    return database.transact(sqs.set_attributes, queue, attributes)


def get(database: Database, queue: QueueKey = JOBS) -> dict[str, str]:
    return database.read(sqs.get, queue).attributes


def redrive_to(queue: str, count: int | str = 3) -> str:
    return json.dumps({"deadLetterTargetArn": ARN + queue, "maxReceiveCount": count})


def step(database: Database, kind: Kind, queue: QueueKey = JOBS, worker: str = "") -> int | None:
    """Do the next step of a purge or a deletion."""
    do = sqs.delete_step if kind == "delete" else sqs.purge_step
    return database.transact(queues.listed_step, WorkKey(*queue, kind), do, worker)


def run(database: Database, kind: Kind, queue: QueueKey = JOBS) -> int | None:
    """Do steps until the next one has to wait; for how long."""
    for _ in range(1_000):
        in_ms = step(database, kind, queue)
        if in_ms != 0:
            return in_ms
    raise AssertionError("it does not end")


def removed(database: Database, kind: Kind) -> int:
    """How many messages a purge or a deletion has removed so far."""
    found = database.read(work.find, WorkKey(*JOBS, kind))
    assert found is not None
    return found.count


def delete(database: Database, queue: QueueKey = JOBS) -> int | None:
    database.transact(sqs.begin_delete, queue)
    return run(database, "delete", queue)


def test_a_new_queue_has_the_defaults_of_the_documentation(database: Database, clock: ManualClock) -> None:
    clock.jump_to_ms(1_700_000_123_456)
    assert create(database) == SqsQueue(
        "jobs",
        {
            "ApproximateNumberOfMessages": "0",
            "ApproximateNumberOfMessagesDelayed": "0",
            "ApproximateNumberOfMessagesNotVisible": "0",
            "CreatedTimestamp": "1700000123",
            "DelaySeconds": "0",
            "LastModifiedTimestamp": "1700000123",
            "MaximumMessageSize": "1048576",
            "MessageRetentionPeriod": "345600",
            "QueueArn": ARN + "jobs",
            "ReceiveMessageWaitTimeSeconds": "0",
            "SqsManagedSseEnabled": "true",
            "VisibilityTimeout": "30",
        },
        {},
        1_700_000_123_456,
        1_700_000_123_456,
    )
    fifo = create(database, FIFO, FifoQueue="true").attributes
    assert {name: fifo[name] for name in fifo.keys() - get(database)} == {
        "FifoQueue": "true",
        "ContentBasedDeduplication": "false",
        "DeduplicationScope": "queue",
        "FifoThroughputLimit": "perQueue",
    }


def test_given_attributes_are_returned_and_set_the_policy(database: Database) -> None:
    create(database, DEAD)
    given = {
        "VisibilityTimeout": "0",
        "DelaySeconds": "5",
        "MessageRetentionPeriod": "60",
        "MaximumMessageSize": "2048",
        "ReceiveMessageWaitTimeSeconds": "20",
        "KmsMasterKeyId": "alias/a",
        "Policy": '{"Version": "2012-10-17"}',
        "RedrivePolicy": redrive_to("dead", "4"),
        "RedriveAllowPolicy": '{"redrivePermission":"denyAll"}',
    }
    found = create(database, **given).attributes
    assert json.loads(found.pop("RedrivePolicy")) == {"deadLetterTargetArn": ARN + "dead", "maxReceiveCount": 4}
    del given["RedrivePolicy"]
    assert given.items() <= found.items()
    assert (found["SqsManagedSseEnabled"], found["KmsDataKeyReusePeriodSeconds"]) == ("false", "300")
    policy = database.read(queues.policy_of, JOBS)
    assert (policy.visibility_seconds, policy.delay_seconds, policy.retention_seconds) == (0.001, 5, 60)
    assert (policy.dead_letter_rule, policy.dead_letter_queue, policy.max_attempts) == ("deliveries", "dead", 4)
    assert policy.retention_by_age


def test_creating_a_queue_again_compares_only_what_is_given(database: Database) -> None:
    create(database, DEAD)
    first = create(database, VisibilityTimeout="40", RedrivePolicy=redrive_to("dead"))
    assert create(database) == first
    assert create(database, VisibilityTimeout="40") == first
    assert create(database, DelaySeconds="0") == first
    elsewhere = redrive_to("dead", "3").replace("us-east-1", "eu-west-1")
    assert create(database, RedrivePolicy=elsewhere) == first
    for name, value in {"VisibilityTimeout": "41", "DelaySeconds": "1", "RedrivePolicy": redrive_to("dead", 4)}.items():
        with pytest.raises(SqsQueueExists, match=f"different value for attribute {name}"):
            create(database, **{name: value})
    assert database.read(sqs.get, JOBS) == first


def test_a_queue_that_native_calls_made_is_a_queue(database: Database) -> None:
    put(database, b"a", queue=JOBS)
    found = get(database)
    assert (found["ApproximateNumberOfMessages"], found["VisibilityTimeout"]) == ("1", "30")
    assert (found["CreatedTimestamp"], found["MessageRetentionPeriod"]) == ("0", "1209600")
    assert json.loads(found["RedrivePolicy"]) == {"deadLetterTargetArn": ARN + "jobs.dlq", "maxReceiveCount": 5}
    assert create(database).attributes == found
    set_policy(database, JOBS, visibility_seconds=7.5, dead_letter_rule="never")
    assert get(database)["VisibilityTimeout"] == "8"
    assert "RedrivePolicy" not in get(database)
    change(database, DelaySeconds="9")
    policy = database.read(queues.policy_of, JOBS)
    assert (policy.visibility_seconds, policy.delay_seconds) == (7.5, 9.0)  # What is not named does not change.


def test_counts_are_those_of_the_queue(database: Database) -> None:
    create(database)
    put(database, *[b"x"] * 4, queue=JOBS)
    put(database, b"x", queue=JOBS, delay_seconds=5)
    lease(database, 1, queue=JOBS)
    found = get(database)
    states = ("", "NotVisible", "Delayed")
    assert [found[f"ApproximateNumberOfMessages{state}"] for state in states] == ["3", "1", "1"]


def test_invalid_queues_leave_nothing_behind(database: Database) -> None:
    create(database, DEAD)
    bad: list[tuple[type[Exception], QueueKey, dict[str, str], dict[str, str]]] = [
        (InvalidArgument, QueueKey("main", "a.b"), {}, {}),
        (InvalidArgument, FIFO, {}, {}),
        (InvalidArgument, JOBS, {"FifoQueue": "true"}, {}),
        (UnknownSqsAttribute, JOBS, {"FifoQueue": "false"}, {}),
        (InvalidSqsAttribute, JOBS, {"DelaySeconds": "901"}, {}),
        (UnknownSqsAttribute, JOBS, {"Foo": "1"}, {}),
        (UnknownSqsAttribute, JOBS, {"DeduplicationScope": "queue"}, {}),
        (InvalidArgument, JOBS, {"RedrivePolicy": redrive_to("absent")}, {}),
        (InvalidArgument, FIFO, {"FifoQueue": "true", "RedrivePolicy": redrive_to("dead")}, {}),
        (InvalidSqsAttribute, FIFO, {"FifoQueue": "true", "FifoThroughputLimit": "perMessageGroupId"}, {}),
        (InvalidArgument, JOBS, {}, {"": "x"}),
    ]
    for error, queue, attributes, tags in bad:
        with pytest.raises(error):
            database.transact(sqs.create, queue, attributes, tags)
    assert database.read(queues.names, "main", after="", limit=10) == ["dead"]


def test_changes_keep_what_they_do_not_name(database: Database, clock: ManualClock) -> None:
    create(database, DEAD)
    create(database, VisibilityTimeout="40", MaximumMessageSize="2048", Policy='{"a": 1}')
    clock.advance_ms(5_000)
    changed = change(database, RedrivePolicy=redrive_to("dead"), Policy="")
    assert changed.modified_ms == changed.created_ms + 5_000
    assert changed.attributes["VisibilityTimeout"] == "40"
    assert changed.attributes["MaximumMessageSize"] == "2048"
    assert "Policy" not in changed.attributes
    assert "RedrivePolicy" not in change(database, RedrivePolicy="").attributes
    assert database.read(queues.policy_of, JOBS).dead_letter_rule == "never"
    for bad in ({"FifoQueue": "true"}, {"DelaySeconds": "x"}, {"RedrivePolicy": redrive_to("absent")}):
        with pytest.raises(Validation):
            change(database, VisibilityTimeout="7", **bad)
    assert get(database)["VisibilityTimeout"] == "40"


def test_a_redrive_policy_needs_the_permission_of_its_target(database: Database) -> None:
    by_queue = {"redrivePermission": "byQueue", "sourceQueueArns": [ARN + "jobs"]}
    create(database, DEAD, RedriveAllowPolicy=json.dumps(by_queue))
    create(database, RedrivePolicy=redrive_to("dead"))
    create(database, QueueKey("main", "other"))
    with pytest.raises(InvalidArgument, match="does not allow"):
        change(database, QueueKey("main", "other"), RedrivePolicy=redrive_to("dead"))
    change(database, DEAD, RedriveAllowPolicy='{"redrivePermission": "denyAll"}')
    with pytest.raises(InvalidArgument, match="does not allow"):
        change(database, RedrivePolicy=redrive_to("dead"))
    change(database, DEAD, RedriveAllowPolicy="")
    change(database, QueueKey("main", "other"), RedrivePolicy=redrive_to("dead"))


def test_settings_say_what_messages_need(database: Database) -> None:
    assert database.read(sqs.settings, JOBS) == SqsSettings(exists=False)
    create(database, VisibilityTimeout="0", DelaySeconds="5", ReceiveMessageWaitTimeSeconds="7")
    assert database.read(sqs.settings, JOBS) == SqsSettings(
        exists=True, wait_seconds=7, delay_seconds=5, visibility_seconds=0
    )
    create(
        database,
        FIFO,
        FifoQueue="true",
        ContentBasedDeduplication="true",
        DeduplicationScope="messageGroup",
        MaximumMessageSize="1024",
    )
    assert database.read(sqs.settings, FIFO) == SqsSettings(
        exists=True, fifo=True, content_based=True, scope="messageGroup", max_bytes=1_024
    )
    set_policy(database, JOBS, visibility_seconds=3)
    assert database.read(sqs.settings, JOBS).visibility_seconds == 3


def test_names_are_listed_by_prefix_and_page(database: Database) -> None:
    for name in ("a", "ab", "abc", "b"):
        create(database, QueueKey("main", name))
    put(database, b"x", queue=QueueKey("main", "abd.native"))
    create(database, QueueKey("other", "abz"))

    def names(prefix: str, after: str, limit: int) -> tuple[list[str], str | None]:
        found = database.read(sqs.names, "main", prefix=prefix, after=after, limit=limit)
        return found.names, found.next

    assert names("", "", 10) == (["a", "ab", "abc", "abd.native", "b"], None)
    assert names("ab", "", 2) == (["ab", "abc"], "abc")
    assert names("ab", "abc", 2) == (["abd.native"], None)
    assert names("ab", "zz", 2) == ([], None)
    assert names("ab", "a", 1) == (["ab"], "ab")
    assert names("x", "", 10) == ([], None)


def test_sources_are_found_by_their_dead_letter_queue(database: Database) -> None:
    create(database, DEAD)
    other = create(database, QueueKey("main", "dead2"))
    for name in ("a", "b", "c"):
        create(database, QueueKey("main", name), RedrivePolicy=redrive_to("dead"))

    def sources(name: str, after: str = "", limit: int = 10) -> tuple[list[str], str | None]:
        found = database.read(sqs.sources, QueueKey("main", name), after=after, limit=limit)
        return found.names, found.next

    assert sources("dead") == (["a", "b", "c"], None)
    assert sources("dead", limit=2) == (["a", "b"], "b")
    assert sources("dead", after="b", limit=2) == (["c"], None)
    change(database, QueueKey("main", "a"), RedrivePolicy="")
    change(database, QueueKey("main", "b"), RedrivePolicy=redrive_to(other.name))
    assert (sources("dead"), sources("dead2")) == ((["c"], None), (["b"], None))
    delete(database, QueueKey("main", "c"))
    assert sources("dead") == ([], None)
    with pytest.raises(QueueNotFound):
        sources("absent")


def test_native_policies_are_sources_too(database: Database) -> None:
    put(database, b"x", queue=JOBS)
    put(database, b"x", queue=QueueKey("main", "jobs.dlq"))
    set_policy(database, QueueKey("main", "mail"), dead_letter_queue="jobs.dlq")
    found = database.read(sqs.sources, QueueKey("main", "jobs.dlq"), after="", limit=10)
    assert found.names == ["jobs", "mail"]
    set_policy(database, QueueKey("main", "mail"))
    database.transact(queues.delete_step, JOBS, queues.Work(after=None), force=True)
    put(database, b"x", queue=QueueKey("main", "mail"))
    found = database.read(sqs.sources, QueueKey("main", "jobs.dlq"), after="", limit=10)
    assert "mail" not in found.names


def test_tags_are_added_replaced_and_removed(database: Database) -> None:
    assert database.transact(sqs.create, JOBS, {}, {"a": "1"}).tags == {"a": "1"}
    assert database.transact(sqs.tag, JOBS, {"a": "2", "b": ""}).tags == {"a": "2", "b": ""}
    assert database.transact(sqs.untag, JOBS, ["a", "zz"]).tags == {"b": ""}
    with pytest.raises(InvalidArgument, match="50 tags"):
        database.transact(sqs.tag, JOBS, {str(number): "" for number in range(50)})
    assert database.read(sqs.get, JOBS).tags == {"b": ""}


@pytest.mark.parametrize(
    "call",
    [
        lambda tx: sqs.get(tx, JOBS),
        lambda tx: sqs.set_attributes(tx, JOBS, {}),
        lambda tx: sqs.tag(tx, JOBS, {}),
        lambda tx: sqs.untag(tx, JOBS, []),
        lambda tx: sqs.begin_purge(tx, JOBS),
        lambda tx: sqs.begin_delete(tx, JOBS),
        lambda tx: sqs.sources(tx, JOBS, after="", limit=1),
    ],
)
def test_a_queue_must_exist(database: Database, call: Callable[[Transaction], Any]) -> None:
    with pytest.raises(QueueNotFound, match="jobs does not exist"):
        database.transact(call)
    assert database.read(queues.names, "main", after="", limit=10) == []


def test_a_purge_takes_messages_in_flight_too(database: Database) -> None:
    create(database)
    put(database, *[b"x"] * 3, queue=JOBS)
    put(database, b"x", queue=JOBS, delay_seconds=5)
    message = lease_one(database, queue=JOBS)
    database.transact(sqs.begin_purge, JOBS)
    assert run(database, "purge") is None
    found = stats(database)
    assert (found.ready, found.leased, found.delayed) == (0, 0, 0)
    with pytest.raises(QueueMessageLeaseMismatch):
        ack(database, message)
    assert database.read(work.pending, "main") == []
    put(database, b"new", queue=JOBS)
    assert payloads(peek(database, JOBS)) == [b"new"]


def test_a_queue_is_purged_once_a_minute(database: Database, clock: ManualClock) -> None:
    create(database)
    database.transact(sqs.begin_purge, JOBS)
    clock.advance_ms(59_999)
    with pytest.raises(PurgeInProgress, match="60 seconds"):
        database.transact(sqs.begin_purge, JOBS)
    clock.advance_ms(1)
    database.transact(sqs.begin_purge, JOBS)
    clock.jump_to_ms(clock.now_ms() - 3_600_000)  # A clock that was set back does not block it for an hour.
    database.transact(sqs.begin_purge, JOBS)


def test_a_deleted_queue_is_gone_at_once_and_its_messages_later(database: Database) -> None:
    create(database, MaximumMessageSize="2048")
    for _ in range(3):
        put(database, *[b"x"] * 250, queue=JOBS)
    lease(database, 10, queue=JOBS)
    database.transact(sqs.begin_delete, JOBS)
    with pytest.raises(QueueNotFound):
        get(database)
    assert database.read(sqs.names, "main", prefix="", after="", limit=10).names == []
    assert not database.read(sqs.settings, JOBS).exists
    for refused in (
        lambda tx: queues.put(tx, JOBS, [NewMessage(payload=b"x")], must_exist=True),
        lambda tx: queues.lease_or_wait(tx, JOBS, owner="ada", must_exist=True),
        lambda tx: queues.stats(tx, JOBS, must_exist=True),
    ):
        with pytest.raises(QueueNotFound):
            database.transact(refused)
    assert lease(database, 1, queue=JOBS) == []  # Native consumers get nothing of it either.
    with pytest.raises(SqsQueueDeletedRecently):
        set_policy(database, JOBS)
    assert (step(database, "delete"), 0 < removed(database, "delete") < 750) == (0, True)
    assert run(database, "delete") == 60_000
    assert database.read(queues.names, "main", after="", limit=10) == []


def test_the_name_of_a_deleted_queue_is_free_after_a_minute(database: Database, clock: ManualClock) -> None:
    create(database)
    delete(database)
    clock.advance_ms(59_999)
    with pytest.raises(SqsQueueDeletedRecently, match="60 seconds"):
        create(database)
    clock.advance_ms(1)
    assert create(database, VisibilityTimeout="7").attributes["VisibilityTimeout"] == "7"
    assert database.read(work.pending, "main") == []


def test_a_queue_is_not_created_while_messages_of_a_deleted_one_are_left(
    database: Database, clock: ManualClock
) -> None:
    create(database)
    put(database, *[b"x"] * 100, queue=JOBS)
    database.transact(sqs.begin_delete, JOBS)
    clock.advance_ms(120_000)
    with pytest.raises(SqsQueueDeletedRecently, match="still being removed"):
        create(database)
    run(database, "delete")
    assert create(database).attributes["ApproximateNumberOfMessages"] == "0"
    assert run(database, "delete") is None  # It does not touch the new queue.
    assert get(database)["VisibilityTimeout"] == "30"


def test_the_entry_of_a_deletion_is_removed_when_the_name_is_free(database: Database, clock: ManualClock) -> None:
    create(database)
    delete(database)
    assert [key.kind for key in database.read(work.pending, "main")] == ["delete"]
    clock.advance_ms(60_000)
    assert run(database, "delete") is None
    assert database.read(work.pending, "main") == []


def test_a_queue_that_is_used_natively_after_its_deletion_is_left_alone(database: Database, clock: ManualClock) -> None:
    create(database)
    delete(database)
    put(database, b"new", queue=JOBS)
    clock.advance_ms(60_000)
    assert run(database, "delete") is None
    assert payloads(peek(database, JOBS)) == [b"new"]
    assert database.read(queues.policy_of, JOBS) == QueuePolicy()


def test_two_workers_do_not_repeat_each_other(database: Database, clock: ManualClock) -> None:
    create(database)
    for _ in range(2):
        put(database, *[b"x"] * 250, queue=JOBS)
    database.transact(sqs.begin_purge, JOBS)
    assert step(database, "purge", worker="one") == 0
    first = removed(database, "purge")
    assert step(database, "purge", worker="two") == 10_000
    assert removed(database, "purge") == first
    clock.advance_ms(10_000)  # The first one has stopped.
    step(database, "purge", worker="two")
    assert removed(database, "purge") > first


def test_work_of_a_stopped_worker_goes_on_after_the_clock_was_set_back(database: Database, clock: ManualClock) -> None:
    create(database)
    for _ in range(2):
        put(database, *[b"x"] * 250, queue=JOBS)
    database.transact(sqs.begin_purge, JOBS)
    step(database, "purge", worker="one")
    first = removed(database, "purge")
    clock.jump_to_ms(clock.now_ms() - 3_600_000)
    assert step(database, "purge", worker="two") == 0
    assert removed(database, "purge") > first


def exhausted(database: Database, queue: QueueKey, dead: QueueKey, **attributes: str) -> None:
    """Create a queue, and its dead-letter queue, with a message that was received as often as it may be."""
    fifo = {"FifoQueue": "true", "ContentBasedDeduplication": "true"} if queue.name.endswith(".fifo") else {}
    create(database, dead, **fifo, **attributes)
    create(database, queue, VisibilityTimeout="0", RedrivePolicy=redrive_to(dead.name, 1), **fifo, **attributes)
    put(database, b"x", queue=queue, group="g" if fifo else None)
    assert len(lease(database, queue=queue)) == 1


@pytest.mark.parametrize(("queue", "dead"), [(JOBS, DEAD), (FIFO, DEAD_FIFO)], ids=["standard", "fifo"])
def test_a_message_stays_while_its_dead_letter_queue_is_gone(
    database: Database, clock: ManualClock, queue: QueueKey, dead: QueueKey
) -> None:
    exhausted(database, queue, dead)
    put(database, *[b"old"] * 250, queue=dead)
    database.transact(sqs.begin_delete, dead)
    for attempts in range(2, 6):
        if attempts in (3, 4):
            run(database, "delete", dead)
        clock.advance_ms(2)
        (message,) = lease(database, queue=queue)
        assert (message.payload, message.attempts) == (b"x", attempts)
        assert message.origin is None
    assert database.read(queues.names, "main", after="", limit=10) == [queue.name]  # It was not made again.
    clock.advance_ms(60_000)
    create(database, dead, **({"FifoQueue": "true"} if dead is DEAD_FIFO else {}))
    assert lease(database, queue=queue) == []
    assert payloads(peek(database, dead)) == [b"x"]


def test_other_rules_move_nothing_to_a_queue_that_is_being_deleted(database: Database, clock: ManualClock) -> None:
    set_policy(database, JOBS, max_attempts=1, dead_letter_queue=DEAD.name, retry_delay_seconds=0.0)
    put(database, b"nacked", b"expired", b"rejected", queue=JOBS)
    put(database, b"old", queue=DEAD)
    nacked, expired, rejected = lease(database, 3, queue=JOBS)
    assert expired.payload == b"expired"
    database.transact(sqs.begin_delete, DEAD)
    nack(database, nacked)
    reject(database, rejected)
    clock.advance_ms(30_000)
    database.transact(queues.sweep, JOBS)
    run(database, "delete", DEAD)
    left = lease(database, 10, queue=JOBS)
    assert payloads(left) == [b"nacked", b"expired", b"rejected"]
    nack(database, left[0])  # The dead letter queue is made again, as for every native queue.
    reject(database, left[2])
    assert payloads(peek(database, DEAD)) == [b"nacked", b"rejected"]
    failed = database.read(queues.failures_of, DEAD, [left[0]])[left[0].id]
    assert [failure.attempt for failure in failed] == [1, 2]


def test_nothing_is_moved_to_a_queue_that_is_being_deleted(database: Database, clock: ManualClock) -> None:
    set_policy(database, JOBS, max_attempts=1)
    put(database, b"dead", queue=JOBS)
    nack(database, lease_one(database, queue=JOBS))
    (receipt,) = put(database, b"other", queue=DEAD)
    database.transact(sqs.begin_delete, JOBS)
    with pytest.raises(QueueNotFound, match="being deleted"):
        database.transact(queues.redrive, JOBS)
    with pytest.raises(QueueNotFound, match="being deleted"):
        database.transact(queues.move_messages, DEAD, [receipt.id], to=JOBS)
    run(database, "delete", JOBS)
    assert payloads(peek(database, DEAD)) == [b"other"]
    assert payloads(peek(database, QueueKey("main", "jobs.dlq"))) == [b"dead"]
    assert database.transact(queues.redrive, JOBS) == 1


def test_a_lease_that_ends_in_a_deleted_queue_makes_no_dead_letter(database: Database, clock: ManualClock) -> None:
    exhausted(database, JOBS, DEAD)
    lease(database, queue=JOBS)
    database.transact(sqs.begin_delete, JOBS)
    clock.advance_ms(60_000)
    database.transact(queues.sweep, JOBS)
    run(database, "delete", JOBS)
    assert database.read(queues.names, "main", after="", limit=10) == [DEAD.name]


@pytest.mark.parametrize(
    ("queue", "dead", "last_ms"), [(JOBS, DEAD, 300_000), (FIFO, DEAD_FIFO, 481_000)], ids=["standard", "fifo"]
)
def test_the_age_of_a_dead_letter_counts_from_the_send_or_from_the_move_in_fifo_queues(
    database: Database, clock: ManualClock, queue: QueueKey, dead: QueueKey, last_ms: int
) -> None:
    exhausted(database, queue, dead, MessageRetentionPeriod="300")
    clock.advance_ms(181_000)
    assert lease(database, queue=queue) == []
    clock.advance_ms(last_ms - 181_000 - 1_000)
    database.transact(queues.sweep, dead)
    assert payloads(peek(database, dead)) == [b"x"]
    clock.advance_ms(1_000)
    assert lease(database, queue=dead) == []
