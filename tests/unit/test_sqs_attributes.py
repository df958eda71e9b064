"""Attributes of SQS queues: their ranges, their forms, and what they mean for the policy of a queue."""

import json
from typing import Any

import pytest

from fastness.errors import InvalidArgument, InvalidSqsAttribute, UnknownSqsAttribute
from fastness.layers import sqs_attributes
from fastness.layers.sqs_attributes import checked, merged, new_policy, parse_redrive, parse_redrive_allow, policy_with
from fastness.wire.queues import QueuePolicy
from tests.support.failures import Failures

ARN = "arn:aws:sqs:us-east-1:000000000000:"


RANGES = {
    "DelaySeconds": (0, 900),
    "MaximumMessageSize": (1_024, 1_048_576),
    "MessageRetentionPeriod": (60, 1_209_600),
    "ReceiveMessageWaitTimeSeconds": (0, 20),
    "VisibilityTimeout": (0, 43_200),
    "KmsDataKeyReusePeriodSeconds": (60, 86_400),
}
BOOLEANS = ["FifoQueue", "ContentBasedDeduplication", "SqsManagedSseEnabled"]
INVALID_COUNTS: list[Any] = [0, 1_001, -1, "x", "", 1.5, True, None, []]
INVALID_REDRIVES = [
    "x",
    "[]",
    "{}",
    "[" * 10_000,
    json.dumps({"maxReceiveCount": 3}),
    *(
        json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 3})
        for arn in ("dead", "arn:aws:sns:us-east-1:000000000000:dead", ARN, ARN + "a/b", ARN + "a:b", 7, None)
    ),
    *(json.dumps({"deadLetterTargetArn": ARN + "dead", "maxReceiveCount": count}) for count in INVALID_COUNTS),
    json.dumps({"deadLetterTargetArn": ARN + "dead", "maxReceiveCount": 3, "other": 1}),
]
INVALID_ALLOWS = [
    "x",
    "[]",
    '{"redrivePermission": "some"}',
    '{"redrivePermission": "byQueue"}',
    '{"redrivePermission": "byQueue", "sourceQueueArns": []}',
    '{"redrivePermission": "byQueue", "sourceQueueArns": "a"}',
    '{"redrivePermission": "byQueue", "sourceQueueArns": ["a"]}',
    '{"redrivePermission": "byQueue", "sourceQueueArns": [1]}',
    json.dumps({"redrivePermission": "byQueue", "sourceQueueArns": [f"{ARN}q{n}" for n in range(11)]}),
    json.dumps({"redrivePermission": "allowAll", "sourceQueueArns": [ARN + "a"]}),
    '{"redrivePermission": "allowAll", "other": 1}',
]


def test_numbers_have_the_ranges_of_the_documentation_and_booleans_are_true_or_false() -> None:
    failures = Failures()
    for name, (least, most) in RANGES.items():
        with failures.of(name):
            for value in (least, most):
                assert checked("jobs", {name: str(value)}) == {name: str(value)}
            assert checked("jobs", {name: f"0{most}"}) == {name: str(most)}  # As a number, not as a text.
    for name in BOOLEANS:
        with failures.of(name):
            assert checked("jobs.fifo", {name: "true"}) == {name: "true"}
            assert checked("jobs.fifo", {name: "false"}) == {name: "false"}
            assert checked("jobs.fifo", {name: str(True)}) == {name: "true"}
    failures.check()


def test_invalid_values_are_refused() -> None:
    failures = Failures()
    wrong: list[tuple[str, str]] = [
        *((name, str(bad)) for name, (least, most) in RANGES.items() for bad in (least - 1, most + 1)),
        *((name, bad) for name in RANGES for bad in ("", "x", "1.5", " 60", "60 ", "+60", "1e3", "٦٠", "9" * 30)),
        *((name, bad) for name in BOOLEANS for bad in ("", "1", "yes", "true ")),
        *(("RedriveAllowPolicy", bad) for bad in INVALID_ALLOWS),
    ]
    for name, bad in wrong:
        with failures.of((name, bad)), pytest.raises(InvalidSqsAttribute, match=name):
            checked("jobs.fifo" if name in BOOLEANS else "jobs", {name: bad})
    for bad in INVALID_REDRIVES:
        with failures.of(bad), pytest.raises(InvalidArgument, match="for parameter RedrivePolicy is invalid"):
            checked("jobs", {"RedrivePolicy": bad})
    failures.check()


def test_unknown_computed_and_foreign_attributes_are_refused() -> None:
    for bad in ("Foo", "QueueArn", "CreatedTimestamp", "ApproximateNumberOfMessages", "All", "", "x" * 500):
        with pytest.raises(UnknownSqsAttribute, match="Unknown Attribute"):
            checked("jobs", {bad: "1"})
    for name, value in {"ContentBasedDeduplication": "true", "DeduplicationScope": "queue"}.items():
        assert checked("jobs.fifo", {name: value})
        with pytest.raises(UnknownSqsAttribute, match=name):
            checked("jobs", {name: value})


def test_names_of_new_queues() -> None:
    for name in ("a", "A-b_9", "x" * 80, "a.fifo", "x" * 75 + ".fifo"):
        assert sqs_attributes.checked_new_name(name) == name
    for bad in ("", "a.b", "a b", ".fifo", "a.fifo.fifo", "x" * 81, "x" * 76 + ".fifo", "ä"):
        with pytest.raises(InvalidArgument, match="alphanumeric"):
            sqs_attributes.checked_new_name(bad)


def test_a_fifo_name_needs_the_attribute_and_the_other_way_round() -> None:
    sqs_attributes.check_fifo("a.fifo", {"FifoQueue": "true"})
    sqs_attributes.check_fifo("a", {})
    for name, given in (("a.fifo", {}), ("a.fifo", {"FifoQueue": "false"}), ("a", {"FifoQueue": "true"})):
        with pytest.raises(InvalidArgument, match="alphanumeric"):
            sqs_attributes.check_fifo(name, given)
    with pytest.raises(UnknownSqsAttribute, match="FifoQueue"):
        sqs_attributes.check_fifo("a", {"FifoQueue": "false"})


def test_the_type_of_a_queue_does_not_change() -> None:
    sqs_attributes.check_same_type("a", {})
    sqs_attributes.check_same_type("a.fifo", {"FifoQueue": "true"})
    with pytest.raises(InvalidSqsAttribute, match="not supported"):
        sqs_attributes.check_same_type("a.fifo", {"FifoQueue": "false"})
    for given in ("true", "false"):
        with pytest.raises(UnknownSqsAttribute, match="FifoQueue"):
            sqs_attributes.check_same_type("a", {"FifoQueue": given})


def test_a_redrive_policy_takes_its_count_as_a_number_or_a_text() -> None:
    for count in (3, "3"):
        found = parse_redrive(json.dumps({"deadLetterTargetArn": ARN + "dead", "maxReceiveCount": count}))
        assert found == (ARN + "dead", "dead", 3)
    text = json.dumps({"deadLetterTargetArn": ARN + "dead", "maxReceiveCount": "3"})
    assert json.loads(checked("jobs", {"RedrivePolicy": text})["RedrivePolicy"])["maxReceiveCount"] == 3
    assert parse_redrive(json.dumps({"deadLetterTargetArn": ARN + "dead"})) == (ARN + "dead", "dead", 10)
    assert parse_redrive("") is None


def test_a_redrive_allow_policy_names_who_may() -> None:
    assert parse_redrive_allow("").allows("any")
    assert parse_redrive_allow('{"redrivePermission": "allowAll"}').allows("any")
    assert not parse_redrive_allow('{"redrivePermission": "denyAll"}').allows("any")
    text = json.dumps({"redrivePermission": "byQueue", "sourceQueueArns": [ARN + "a", ARN + "b"]})
    assert [parse_redrive_allow(text).allows(name) for name in ("a", "b", "c")] == [True, True, False]
    assert json.loads(checked("jobs", {"RedriveAllowPolicy": text})["RedriveAllowPolicy"]) == json.loads(text)


def test_a_policy_is_a_json_object_of_bounded_size() -> None:
    assert checked("jobs", {"Policy": '{"a": 1}'}) == {"Policy": '{"a": 1}'}
    assert checked("jobs", {"Policy": ""}) == {"Policy": ""}
    for bad in ("x", "[]", json.dumps({"a": "x" * 8_192}), '{"a": "\ud800"}'):
        with pytest.raises(InvalidSqsAttribute, match="Policy"):
            checked("jobs", {"Policy": bad})


def test_throughput_per_group_needs_deduplication_per_group() -> None:
    limit, scope = {"FifoThroughputLimit": "perMessageGroupId"}, {"DeduplicationScope": "messageGroup"}
    assert merged(scope, limit) == merged({}, scope | limit) == scope | limit
    for stored, changes in (({}, limit), (scope | limit, {"DeduplicationScope": "queue"})):
        with pytest.raises(InvalidSqsAttribute, match="messageGroup"):
            merged(stored, changes)


def test_one_kind_of_encryption_replaces_the_other() -> None:
    key, managed = {"KmsMasterKeyId": "alias/a"}, {"SqsManagedSseEnabled": "true"}
    assert merged(managed, key) == key
    assert merged(key, managed) == managed
    assert merged(key, {"KmsMasterKeyId": ""}) == {}
    with pytest.raises(UnknownSqsAttribute, match="server-side encryption"):
        merged({}, key | managed)


def test_attributes_set_the_policy() -> None:
    policy = new_policy("jobs", {})
    assert (policy.dead_letter_rule, policy.retention_seconds, policy.retention_by_age) == ("never", 345_600, True)
    assert (policy.visibility_seconds, policy.delay_seconds, policy.group_batches) == (30, 0, False)
    assert new_policy("jobs.fifo", {"FifoQueue": "true"}).group_batches
    changed = policy_with(
        "jobs",
        policy,
        {
            "VisibilityTimeout": "7",
            "DelaySeconds": "8",
            "MessageRetentionPeriod": "90",
            "RedrivePolicy": json.dumps({"deadLetterTargetArn": ARN + "dead", "maxReceiveCount": 4}),
        },
    )
    assert (changed.visibility_seconds, changed.delay_seconds, changed.retention_seconds) == (7, 8, 90)
    assert (changed.dead_letter_rule, changed.dead_letter_queue, changed.max_attempts) == ("deliveries", "dead", 4)
    removed = policy_with("jobs", changed, {"RedrivePolicy": ""})
    assert (removed.dead_letter_rule, removed.dead_letter_queue) == ("never", None)


def test_no_visibility_is_the_shortest_lease_and_shown_as_zero() -> None:
    policy = new_policy("jobs", {"VisibilityTimeout": "0"})
    assert policy.visibility_seconds == 0.001
    assert sqs_attributes.visibility_seconds(policy) == 0
    assert sqs_attributes.visibility_seconds(QueuePolicy(visibility_seconds=0.5)) == 1


def test_tags_are_bounded() -> None:
    assert len(sqs_attributes.checked_tags({str(n): "" for n in range(50)})) == 50
    for bad in (
        {str(n): "" for n in range(51)},
        {"": "x"},
        {"k" * 129: ""},
        {"k": "v" * 257},
        {"aws:x": ""},
        {"AWS:x": ""},
        {"\ud800": ""},
    ):
        with pytest.raises(InvalidArgument, match=r"[Tt]ag"):
            sqs_attributes.checked_tags(bad)
