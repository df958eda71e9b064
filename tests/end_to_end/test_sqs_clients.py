"""What programs for SQS do, by four clients: boto3, boto3 with the Query protocol, aiobotocore, and the JavaScript SDK.

Every test runs with boto3 against `fastness serve --sqs`, and some run with all clients. The other clients rotate
otherwise: what a client adds is how it writes and reads calls. The clients sign their calls, except on the server whose
clock is moved. SQS_ENDPOINT_URL runs the tests that need no such clock against another server, to compare with it.
"""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from tests.end_to_end.sqs_clients import (
    ERRORS,
    KINDS,
    SECONDS_MAX,
    Client,
    Clients,
    Credentials,
    MovedClock,
    Refused,
    anonymous_server,
    md5,
    md5_of_attributes,
    signed_server,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # By aiobotocore.
ACCOUNT = re.compile(r"\d{12}")
MEBIBYTE = 1_048_576
INVALID = ("InvalidParameterValue", "InvalidAttributeValue")  # The documentation does not say which of them it is.
_OTHERS_ROTATE = [KINDS[0], *(pytest.param(kind, marks=pytest.mark.rotating) for kind in KINDS[1:])]
_numbers = count(1)


class Sqs:
    """A client, and the names and shapes that the tests need."""

    def __init__(self, client: Client, kind: str) -> None:
        self.kind = kind
        self.start = client.start
        self.call = client.call
        self.prefix = f"{kind}-{uuid.uuid4().hex[:8]}"  # No other test has queues with such names.

    def name(self, suffix: str = "") -> str:
        return f"{self.prefix}-{next(_numbers)}{suffix}"

    def queue(self, name: str | None = None, **attributes: Any) -> "SqsQueue":
        """A new queue; lists and mappings in attributes become JSON."""
        name = name or self.name()
        given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in attributes.items()}
        return SqsQueue(self, self.call("CreateQueue", QueueName=name, Attributes=given)["QueueUrl"])

    def fifo(self, **attributes: Any) -> "SqsQueue":
        return self.queue(self.name(".fifo"), FifoQueue="true", **attributes)

    @contextmanager
    def refused(self, *names: str) -> Iterator[None]:
        """One of these errors is raised in the block, with the code of the Query protocol."""
        with pytest.raises(Refused) as caught:
            yield
        assert caught.value.name in names, caught.value
        code, _ = ERRORS.get(caught.value.name, (caught.value.name, 400))
        assert caught.value.code == code.removeprefix("AWS.SimpleQueueService."), caught.value
        assert 400 <= caught.value.status < 500, caught.value
        assert caught.value.message


class SqsQueue:
    """A queue, and the calls that the tests make most."""

    def __init__(self, sqs: Sqs, url: str) -> None:
        self.sqs = sqs
        self.url = url

    @property
    def arn(self) -> str:
        return self.attributes("QueueArn")["QueueArn"]

    def call(self, action: str, /, **parameters: Any) -> dict[str, Any]:
        return self.sqs.call(action, QueueUrl=self.url, **parameters)

    def send(self, body: str, **parameters: Any) -> dict[str, Any]:
        return self.call("SendMessage", MessageBody=body, **parameters)

    def send_batch(self, *entries: dict[str, Any]) -> dict[str, Any]:
        return self.call("SendMessageBatch", Entries=list(entries))

    def receive(self, limit: int = 10, **parameters: Any) -> list[dict[str, Any]]:
        found = self.call("ReceiveMessage", MaxNumberOfMessages=limit, **parameters)
        assert found.get("Messages") != [], "an empty list of messages is left out"
        messages: list[dict[str, Any]] = found.get("Messages", [])
        assert all(message["MD5OfBody"] == md5(message["Body"]) for message in messages)
        return messages

    def receive_one(self, **parameters: Any) -> dict[str, Any]:
        """A message that is there, or that comes soon."""
        [message] = self.receive(1, **{"WaitTimeSeconds": 20, **parameters})
        return message

    def receive_all(self, number: int, **parameters: Any) -> list[dict[str, Any]]:
        """As many messages, in as many calls as are needed."""
        messages: list[dict[str, Any]] = []
        while len(messages) < number:
            found = self.receive(min(10, number - len(messages)), WaitTimeSeconds=20, **parameters)
            assert found, f"{len(messages)} of {number} messages have arrived"
            messages += found
        return messages

    def delete(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.call("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])

    def change(self, message: dict[str, Any], seconds: int) -> None:
        self.call("ChangeMessageVisibility", ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=seconds)

    def attributes(self, *names: str) -> dict[str, str]:
        found = self.call("GetQueueAttributes", AttributeNames=list(names or ["All"]))
        attributes: dict[str, str] = found.get("Attributes", {})
        return attributes

    def set(self, **attributes: Any) -> None:
        given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in attributes.items()}
        self.call("SetQueueAttributes", Attributes=given)

    def counts(self) -> tuple[int, int, int]:
        """How many messages are visible, not visible, and delayed."""
        prefix = "ApproximateNumberOfMessages"
        found = self.attributes(prefix, f"{prefix}NotVisible", f"{prefix}Delayed")
        return int(found[prefix]), int(found[f"{prefix}NotVisible"]), int(found[f"{prefix}Delayed"])

    def until_counts(self, *counts: int) -> None:
        eventually(lambda: self.counts() == counts, lambda: f"the counts are {counts}, not {self.counts()}")

    def created_seconds(self) -> int:
        return int(self.attributes("CreatedTimestamp")["CreatedTimestamp"])


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["Body"] for message in messages]


def handles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["ReceiptHandle"] for message in messages]


def redrive(dead: SqsQueue, times: int = 1) -> dict[str, Any]:
    return {"deadLetterTargetArn": dead.arn, "maxReceiveCount": times}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with Clients(tmp_path_factory.mktemp("sqs-clients")) as clients:
        yield clients


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Credentials]:
    """A server and an access key."""
    if other := os.environ.get("SQS_ENDPOINT_URL"):
        yield Credentials(other)
        return
    with signed_server(tmp_path_factory.mktemp("sqs-signed")) as credentials:
        yield credentials


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Credentials, MovedClock]]:
    """A server whose clock can be moved, and the clock."""
    if os.environ.get("SQS_ENDPOINT_URL"):
        pytest.skip("the clock of another server cannot be moved")
    folder = tmp_path_factory.mktemp("sqs-moved")
    clock = MovedClock(folder)
    with anonymous_server(folder, before=clock.code) as credentials:
        yield credentials, clock


@pytest.fixture(params=_OTHERS_ROTATE)
def sqs(request: pytest.FixtureRequest, clients: Clients, signed: Credentials) -> Sqs:
    return Sqs(clients.get(request.param, signed), request.param)


@pytest.fixture(params=KINDS)
def every_sqs(request: pytest.FixtureRequest, clients: Clients, signed: Credentials) -> Sqs:
    """Each of the clients, in every run."""
    return Sqs(clients.get(request.param, signed), request.param)


@pytest.fixture(params=_OTHERS_ROTATE)
def timed(
    request: pytest.FixtureRequest, clients: Clients, moved: tuple[Credentials, MovedClock]
) -> tuple[Sqs, MovedClock]:
    """A client of the server whose clock can be moved, and the clock."""
    credentials, clock = moved
    return Sqs(clients.get(request.param, credentials), request.param), clock


# Queues.


def test_a_queue_is_created_found_and_deleted(sqs: Sqs) -> None:
    name = sqs.name("_Case")
    with sqs.refused("QueueDoesNotExist"):
        sqs.call("GetQueueUrl", QueueName=name)
    url = sqs.call("CreateQueue", QueueName=name)["QueueUrl"]
    account, _, found_name = url.rpartition("/")
    assert found_name == name
    assert ACCOUNT.fullmatch(account.rpartition("/")[2])
    assert sqs.call("GetQueueUrl", QueueName=name)["QueueUrl"] == url
    with sqs.refused("QueueDoesNotExist"):
        sqs.call("GetQueueUrl", QueueName=name.lower())
    assert sqs.call("ListQueues", QueueNamePrefix=name)["QueueUrls"] == [url]
    assert sqs.call("DeleteQueue", QueueUrl=url) == {}
    with sqs.refused("QueueDoesNotExist"):
        sqs.call("GetQueueUrl", QueueName=name)
    assert sqs.call("ListQueues", QueueNamePrefix=name).get("QueueUrls", []) == []


def test_creating_a_queue_again_returns_it_unless_its_attributes_differ(sqs: Sqs) -> None:
    queue = sqs.queue(name := sqs.name(), VisibilityTimeout="60")
    assert sqs.queue(name, VisibilityTimeout="60").url == queue.url
    assert sqs.queue(name).url == queue.url
    with sqs.refused("QueueNameExists"):
        sqs.queue(name, VisibilityTimeout="61")
    with sqs.refused("QueueNameExists"):
        sqs.queue(name, VisibilityTimeout="60", DelaySeconds="1")
    assert queue.attributes("VisibilityTimeout", "DelaySeconds") == {"VisibilityTimeout": "60", "DelaySeconds": "0"}


def test_a_deleted_queue_is_gone_with_its_messages_and_can_be_created_after_a_minute(
    timed: tuple[Sqs, MovedClock],
) -> None:
    sqs, clock = timed
    queue = sqs.queue(name := sqs.name())
    queue.send("lost")
    queue.call("DeleteQueue")
    with sqs.refused("QueueDeletedRecently"):
        sqs.queue(name)
    clock.advance(50)
    with sqs.refused("QueueDeletedRecently"):
        sqs.queue(name)
    clock.advance(11)
    again = sqs.queue(name)
    assert again.url == queue.url
    assert again.receive() == []
    assert again.counts() == (0, 0, 0)


def test_every_action_on_an_absent_queue_is_refused(sqs: Sqs) -> None:
    gone = sqs.queue()
    gone.send("lost")
    handle = gone.receive_one()["ReceiptHandle"]
    gone.call("DeleteQueue")
    entry = {"Id": "1", "ReceiptHandle": handle}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("AddPermission", {"Label": "a", "AWSAccountIds": ["123456789012"], "Actions": ["SendMessage"]}),
        ("ChangeMessageVisibility", {"ReceiptHandle": handle, "VisibilityTimeout": 1}),
        ("ChangeMessageVisibilityBatch", {"Entries": [{**entry, "VisibilityTimeout": 1}]}),
        ("DeleteMessage", {"ReceiptHandle": handle}),
        ("DeleteMessageBatch", {"Entries": [entry]}),
        ("DeleteQueue", {}),
        ("GetQueueAttributes", {"AttributeNames": ["All"]}),
        ("ListDeadLetterSourceQueues", {}),
        ("ListQueueTags", {}),
        ("PurgeQueue", {}),
        ("ReceiveMessage", {}),
        ("ReceiveMessage", {"WaitTimeSeconds": 20}),
        ("RemovePermission", {"Label": "a"}),
        ("SendMessage", {"MessageBody": "lost"}),
        ("SendMessageBatch", {"Entries": [{"Id": "1", "MessageBody": "lost"}]}),
        ("SetQueueAttributes", {"Attributes": {"DelaySeconds": "1"}}),
        ("TagQueue", {"Tags": {"a": "b"}}),
        ("UntagQueue", {"TagKeys": ["a"]}),
    ]
    for action, parameters in calls:
        with sqs.refused("QueueDoesNotExist"):
            gone.call(action, **parameters)
    assert sqs.call("ListQueues", QueueNamePrefix=sqs.prefix).get("QueueUrls", []) == [], "no call has made the queue"


def test_names_of_queues_are_checked(sqs: Sqs) -> None:
    for name in ("a b", "a.b", "ä", "a/b", "", "a" * 81):
        with sqs.refused("InvalidParameterValue", "MissingParameter"):
            sqs.call("CreateQueue", QueueName=name)
    longest = sqs.name().ljust(80, "x")
    assert sqs.queue(longest).url.endswith(longest)
    with sqs.refused(*INVALID):  # The name of a FIFO queue ends so, and no other name does.
        sqs.call("CreateQueue", QueueName=sqs.name(".fifo"))
    with sqs.refused(*INVALID):
        sqs.call("CreateQueue", QueueName=sqs.name(), Attributes={"FifoQueue": "true"})


def test_attributes_have_the_documented_defaults(sqs: Sqs) -> None:
    before = sqs.queue()
    queue = sqs.queue()
    after = sqs.queue()
    found = queue.attributes()
    created, modified = int(found.pop("CreatedTimestamp")), int(found.pop("LastModifiedTimestamp"))
    assert 1_700_000_000 < before.created_seconds() <= created <= modified <= after.created_seconds()
    arn = found.pop("QueueArn")
    service, region, account, name = arn.split(":")[2:]
    assert (service, region, name) == ("sqs", "us-east-1", queue.url.rpartition("/")[2])
    assert ACCOUNT.fullmatch(account)
    assert found == {
        "ApproximateNumberOfMessages": "0",
        "ApproximateNumberOfMessagesDelayed": "0",
        "ApproximateNumberOfMessagesNotVisible": "0",
        "DelaySeconds": "0",
        "MaximumMessageSize": str(MEBIBYTE),
        "MessageRetentionPeriod": "345600",
        "ReceiveMessageWaitTimeSeconds": "0",
        "SqsManagedSseEnabled": "true",
        "VisibilityTimeout": "30",
    }
    fifo = sqs.fifo().attributes()
    assert fifo["FifoQueue"] == "true"
    assert fifo["ContentBasedDeduplication"] == "false"
    assert fifo["DeduplicationScope"] == "queue"
    assert fifo["FifoThroughputLimit"] == "perQueue"


def test_attributes_can_be_changed_and_read_by_name(sqs: Sqs) -> None:
    queue = sqs.queue(DelaySeconds="3")
    changed = {
        "DelaySeconds": "900",
        "KmsDataKeyReusePeriodSeconds": "60",
        "KmsMasterKeyId": "alias/mine",
        "MaximumMessageSize": "1024",
        "MessageRetentionPeriod": "1209600",
        "ReceiveMessageWaitTimeSeconds": "20",
        "VisibilityTimeout": "43200",
    }
    queue.set(**changed)
    assert queue.attributes(*changed) == changed
    assert queue.attributes("DelaySeconds") == {"DelaySeconds": "900"}
    assert queue.call("GetQueueAttributes").get("Attributes", {}) == {}, "without names there are none"
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*", "Action": "sqs:*"}]}
    queue.set(Policy=policy)
    assert json.loads(queue.attributes("Policy")["Policy"]) == policy


def test_wrong_attributes_are_refused_and_change_nothing(sqs: Sqs) -> None:
    queue = sqs.queue()
    before = queue.attributes()
    for name, values in {
        "DelaySeconds": ("-1", "901", "x", "1.5"),
        "MaximumMessageSize": ("1023", "1048577"),
        "MessageRetentionPeriod": ("59", "1209601"),
        "ReceiveMessageWaitTimeSeconds": ("-1", "21"),
        "VisibilityTimeout": ("-1", "43201"),
        "KmsDataKeyReusePeriodSeconds": ("59", "86401"),
        "SqsManagedSseEnabled": ("maybe",),
        "Policy": ("{",),
        "RedrivePolicy": ("{", '{"maxReceiveCount": 1}'),
        "RedriveAllowPolicy": ('{"redrivePermission": "some"}',),
    }.items():
        for value in values:
            with sqs.refused(*INVALID):
                queue.call("SetQueueAttributes", Attributes={name: value})
            with sqs.refused(*INVALID):
                sqs.call("CreateQueue", QueueName=sqs.name(), Attributes={name: value})
    for name in ("Unknown", "QueueArn", "CreatedTimestamp", "ApproximateNumberOfMessages"):
        with sqs.refused("InvalidAttributeName"):
            queue.call("SetQueueAttributes", Attributes={name: "1"})
    for attributes in ({"FifoQueue": "true"}, {"ContentBasedDeduplication": "true"}, {"DeduplicationScope": "queue"}):
        with sqs.refused("InvalidAttributeName", *INVALID):
            queue.call("SetQueueAttributes", Attributes=attributes)
    with sqs.refused(*INVALID):
        queue.call("SetQueueAttributes", Attributes={"DelaySeconds": "1", "VisibilityTimeout": "-1"})
    with sqs.refused("InvalidAttributeName"):
        queue.attributes("Unknown")
    assert queue.attributes() == before


def test_tags_are_added_replaced_and_removed(sqs: Sqs) -> None:
    url = sqs.call("CreateQueue", QueueName=sqs.name(), tags={"team": "shop", "Case": "kept"})["QueueUrl"]
    queue = SqsQueue(sqs, url)
    assert queue.call("ListQueueTags")["Tags"] == {"team": "shop", "Case": "kept"}
    queue.call("TagQueue", Tags={"team": "store", "empty": "", "ä €": "<&> \U0001f600"})
    expected = {"team": "store", "Case": "kept", "empty": "", "ä €": "<&> \U0001f600"}
    assert queue.call("ListQueueTags")["Tags"] == expected
    queue.call("UntagQueue", TagKeys=["team", "ä €", "absent"])
    assert queue.call("ListQueueTags")["Tags"] == {"Case": "kept", "empty": ""}
    queue.call("UntagQueue", TagKeys=["Case", "empty"])
    assert queue.call("ListQueueTags").get("Tags", {}) == {}
    with sqs.refused("InvalidParameterValue", "OverLimit"):
        queue.call("TagQueue", Tags={f"tag-{number}": "x" for number in range(51)})
    assert queue.call("ListQueueTags").get("Tags", {}) == {}


def test_queues_are_listed_in_pages(every_sqs: Sqs) -> None:
    prefix = every_sqs.name("-page")
    urls = sorted(every_sqs.queue(f"{prefix}-{number}").url for number in range(5))
    every_sqs.queue()
    found = every_sqs.call("ListQueues", QueueNamePrefix=prefix)
    assert sorted(found["QueueUrls"]) == urls
    assert "NextToken" not in found
    listed: list[str] = []
    sizes: list[int] = []
    token: dict[str, str] = {}
    while not sizes or token:
        page = every_sqs.call("ListQueues", QueueNamePrefix=prefix, MaxResults=2, **token)
        listed += page.get("QueueUrls", [])
        sizes.append(len(page.get("QueueUrls", [])))
        token = {"NextToken": page["NextToken"]} if "NextToken" in page else {}
        assert len(sizes) < 10
    assert sorted(listed) == urls
    assert sizes[:3] == [2, 2, 1]
    for number in (0, 1_001):
        with every_sqs.refused("InvalidParameterValue"):
            every_sqs.call("ListQueues", MaxResults=number)
    with every_sqs.refused("InvalidParameterValue"):
        every_sqs.call("ListQueues", MaxResults=2, NextToken="nonsense")


def test_a_purge_takes_all_messages_and_is_allowed_once_a_minute(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.queue()
    for body in ("in flight", "visible"):
        queue.send(body)
    queue.send("delayed", DelaySeconds=100)
    taken = queue.receive_one()
    assert queue.counts() == (1, 1, 1)
    assert queue.call("PurgeQueue") == {}
    queue.until_counts(0, 0, 0)
    with sqs.refused("PurgeQueueInProgress"):
        queue.call("PurgeQueue")
    clock.advance(61)  # The message in flight would be visible again.
    assert queue.receive() == []
    queue.send("later")
    queue.call("PurgeQueue")
    queue.until_counts(0, 0, 0)
    assert taken["Body"] == "in flight"


def test_permissions_are_kept_in_the_policy(sqs: Sqs) -> None:
    queue = sqs.queue()
    accounts = ["111111111111", "222222222222"]
    queue.call("AddPermission", Label="first", AWSAccountIds=accounts, Actions=["SendMessage", "ReceiveMessage"])
    queue.call("AddPermission", Label="second", AWSAccountIds=accounts[:1], Actions=["*"])
    statements = {each["Sid"]: each for each in json.loads(queue.attributes("Policy")["Policy"])["Statement"]}
    assert set(statements) == {"first", "second"}
    assert statements["first"]["Effect"] == "Allow"
    assert statements["first"]["Resource"] == queue.arn
    assert {each.lower() for each in statements["first"]["Action"]} == {"sqs:sendmessage", "sqs:receivemessage"}
    with sqs.refused("InvalidParameterValue"):  # The label is taken.
        queue.call("AddPermission", Label="first", AWSAccountIds=accounts, Actions=["SendMessage"])
    with sqs.refused("InvalidParameterValue"):
        queue.call("AddPermission", Label="third", AWSAccountIds=accounts, Actions=["Fly"])
    queue.call("RemovePermission", Label="first")
    with sqs.refused("InvalidParameterValue"):
        queue.call("RemovePermission", Label="first")
    [statement] = json.loads(queue.attributes("Policy")["Policy"])["Statement"]
    assert statement["Sid"] == "second"
    queue.call("RemovePermission", Label="second")
    assert "second" not in queue.attributes("Policy").get("Policy", "")


# Messages.


def test_a_message_is_sent_received_and_deleted(every_sqs: Sqs) -> None:
    queue = every_sqs.queue()
    assert queue.receive() == []
    sent = queue.send("hello")
    assert sent["MD5OfMessageBody"] == md5("hello")
    assert "MD5OfMessageAttributes" not in sent
    assert "SequenceNumber" not in sent
    [message] = queue.receive()
    assert message["Body"] == "hello"
    assert message["MessageId"] == sent["MessageId"]
    assert str(uuid.UUID(message["MessageId"])) == message["MessageId"]
    assert set(message) == {"Body", "MD5OfBody", "MessageId", "ReceiptHandle"}
    assert queue.receive() == []
    queue.delete(message)
    queue.until_counts(0, 0, 0)
    queue.delete(message)  # It may be repeated.


def test_equal_calls_in_the_same_second_are_different_calls(sqs: Sqs) -> None:
    queue = sqs.queue()
    started = [sqs.start("SendMessage", QueueUrl=queue.url, MessageBody="same") for _ in range(20)]
    ids = {each.result(SECONDS_MAX)["MessageId"] for each in started}
    assert len(ids) == 20
    assert {message["MessageId"] for message in queue.receive_all(20)} == ids


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "text": {"DataType": "String", "StringValue": "ä \U0001f600 <&> \"'"},
    "number": {"DataType": "Number", "StringValue": "-12.50e+3"},
    "bytes": {"DataType": "Binary", "BinaryValue": bytes(range(256))},
    "custom.text": {"DataType": "String.json", "StringValue": "{}"},
    "custom.number": {"DataType": "Number.float", "StringValue": "0.5"},
    "custom.bytes": {"DataType": "Binary.png", "BinaryValue": b"\x89PNG\r\n"},
}


def test_message_attributes_of_all_types_arrive_with_their_checksums(every_sqs: Sqs) -> None:
    queue = every_sqs.queue(VisibilityTimeout="0")
    sent = queue.send("body", MessageAttributes=ATTRIBUTES)
    assert sent["MD5OfMessageAttributes"] == md5_of_attributes(ATTRIBUTES)
    for names in (["All"], [".*"], ["text", "number", "bytes", "custom.*"]):
        message = queue.receive_one(MessageAttributeNames=names)
        assert message["MessageAttributes"] == ATTRIBUTES
        assert message["MD5OfMessageAttributes"] == md5_of_attributes(ATTRIBUTES)
    custom = {name: value for name, value in ATTRIBUTES.items() if name.startswith("custom.")}
    for names, expected in ((["custom.*"], custom), (["number", "absent"], {"number": ATTRIBUTES["number"]})):
        message = queue.receive_one(MessageAttributeNames=names)
        assert message["MessageAttributes"] == expected
        assert message["MD5OfMessageAttributes"] == md5_of_attributes(expected)
    for options in ({}, {"MessageAttributeNames": ["absent"]}):
        message = queue.receive_one(**options)
        assert message.get("MessageAttributes", {}) == {}


def test_wrong_message_attributes_are_refused(sqs: Sqs) -> None:
    queue = sqs.queue()
    text = {"DataType": "String", "StringValue": "x"}
    for attributes in (
        {"a": {"DataType": "Text", "StringValue": "x"}},
        {"a": {"DataType": "", "StringValue": "x"}},
        {"a": {"DataType": "Number", "StringValue": "x"}},
        {"a": {"DataType": "String", "StringValue": ""}},
        {"a": {"DataType": "String", "BinaryValue": b"x"}},
        {"a": {"DataType": "Binary", "StringValue": "x"}},
        {"a": {"DataType": "String", "StringValue": "\x01"}},
        {"a": {"DataType": "String." + "x" * 257, "StringValue": "x"}},
        {".a": text},
        {"a.": text},
        {"a..b": text},
        {"a b": text},
        {"AWS.a": text},
        {"amazon.a": text},
        {"a" * 257: text},
        {f"a{number}": text for number in range(11)},
    ):
        with sqs.refused("InvalidParameterValue", "InvalidMessageContents"):
            queue.send("x", MessageAttributes=attributes)
    assert queue.counts() == (0, 0, 0)
    ten = {f"a{number}": text for number in range(10)}
    assert queue.send("x", MessageAttributes=ten)["MD5OfMessageAttributes"] == md5_of_attributes(ten)


def test_system_attributes_describe_a_message(sqs: Sqs) -> None:
    queue = sqs.queue()
    trace = {"DataType": "String", "StringValue": "Root=1-5e3d83c1-e6a0db584850d61342823d4c;Sampled=1"}
    sent = queue.send("x", MessageSystemAttributes={"AWSTraceHeader": trace})
    assert sent["MD5OfMessageSystemAttributes"] == md5_of_attributes({"AWSTraceHeader": trace})
    message = queue.receive_one(MessageSystemAttributeNames=["All"], VisibilityTimeout=0)
    found = message["Attributes"]
    assert found["AWSTraceHeader"] == trace["StringValue"]
    assert found["ApproximateReceiveCount"] == "1"
    assert found["SenderId"]
    sent_ms, first_ms = int(found["SentTimestamp"]), int(found["ApproximateFirstReceiveTimestamp"])
    after = sqs.queue()
    assert queue.created_seconds() * 1_000 <= sent_ms <= first_ms <= (after.created_seconds() + 1) * 1_000
    message = queue.receive_one(MessageSystemAttributeNames=["ApproximateReceiveCount"], VisibilityTimeout=0)
    assert message["Attributes"] == {"ApproximateReceiveCount": "2"}
    message = queue.receive_one(AttributeNames=["All"], VisibilityTimeout=0)  # The older name of the parameter.
    assert int(message["Attributes"]["ApproximateFirstReceiveTimestamp"]) == first_ms
    assert int(message["Attributes"]["SentTimestamp"]) == sent_ms
    assert message["Attributes"]["ApproximateReceiveCount"] == "3"
    message = queue.receive_one()
    assert message.get("Attributes", {}) == {}
    with sqs.refused("InvalidParameterValue"):
        queue.send("x", MessageSystemAttributes={"Other": trace})


def test_bodies_arrive_character_by_character(sqs: Sqs) -> None:
    queue = sqs.queue()
    texts = [
        " leading and trailing ",
        "tab\tline\nreturn\r\nreturn alone\rend",
        '<a href="x">&amp;</a> ]]> <!-- -->',
        "ä € 漢字 \U0001f600 \U0010ffff \ue000 \ufffd \ud7ff",
        "%41+%2B&x=1#",
        '{"json": "\\u0041"}',
        " ",
        "\n",
        "e\u0301 \u200b\u202e\u2028\x7f\x85",
    ]
    for text in texts:
        assert queue.send(text)["MD5OfMessageBody"] == md5(text)
    assert sorted(bodies(queue.receive_all(len(texts)))) == sorted(texts)


def test_characters_outside_the_allowed_set_are_refused(sqs: Sqs) -> None:
    queue = sqs.queue()
    for character in ("\x00", "\x01", "\x08", "\x0b", "\x0c", "\x1f", "\ufffe", "\uffff"):
        with sqs.refused("InvalidMessageContents"):
            queue.send(f"before{character}after")
    assert queue.counts() == (0, 0, 0)


def test_a_message_of_one_mebibyte_arrives_and_a_longer_one_is_refused(sqs: Sqs) -> None:
    queue = sqs.queue()
    half = "ä" * (MEBIBYTE // 2)
    sent = queue.send(half)
    assert sent["MD5OfMessageBody"] == md5(half)
    attribute = {"DataType": "Binary", "BinaryValue": b"x" * (MEBIBYTE // 2)}
    rest = MEBIBYTE - len("name") - len("Binary") - MEBIBYTE // 2
    queue.send("y" * rest, MessageAttributes={"name": attribute})
    with sqs.refused("InvalidParameterValue"):
        queue.send(half + "x")
    with sqs.refused("InvalidParameterValue"):
        queue.send("y" * (rest + 1), MessageAttributes={"name": attribute})
    actions: list[Callable[[], object]] = [lambda: queue.send(""), lambda: queue.send("x" * (2 * MEBIBYTE))]
    for action in actions:
        with sqs.refused("InvalidParameterValue", "MissingParameter"):
            action()
    found = {message["Body"][0]: message for message in queue.receive_all(2, MessageAttributeNames=["All"])}
    assert found["ä"]["Body"] == half
    assert found["y"]["Body"] == "y" * rest
    assert found["y"]["MessageAttributes"] == {"name": attribute}
    small = sqs.queue(MaximumMessageSize="1024")
    small.send("x" * 1_024)
    with sqs.refused("InvalidParameterValue"):
        small.send("x" * 1_025)


def test_batches_of_ten_are_sent_changed_and_deleted(sqs: Sqs) -> None:
    queue = sqs.queue()
    ids = [f"Entry_{number}-x" for number in range(10)]
    attributes = {"number": {"DataType": "Number", "StringValue": "1"}}
    sent = queue.send_batch(
        *({"Id": id, "MessageBody": f"body of {id}", "MessageAttributes": attributes} for id in ids)
    )
    assert sent.get("Failed", []) == []
    results = {each["Id"]: each for each in sent["Successful"]}
    assert list(results) == ids
    for id in ids:
        assert results[id]["MD5OfMessageBody"] == md5(f"body of {id}")
        assert results[id]["MD5OfMessageAttributes"] == md5_of_attributes(attributes)
    messages = queue.receive_all(10)
    sent_ids = {each["MessageId"]: f"body of {id}" for id, each in results.items()}
    assert {message["MessageId"]: message["Body"] for message in messages} == sent_ids
    entries = [{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(handles(messages))]
    changed = queue.call("ChangeMessageVisibilityBatch", Entries=[{**each, "VisibilityTimeout": 0} for each in entries])
    assert [each["Id"] for each in changed["Successful"]] == [each["Id"] for each in entries]
    assert changed.get("Failed", []) == []
    messages = queue.receive_all(10)
    entries = [{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(handles(messages))]
    deleted = queue.call("DeleteMessageBatch", Entries=entries)
    assert [each["Id"] for each in deleted["Successful"]] == [each["Id"] for each in entries]
    assert deleted.get("Failed", []) == []
    queue.until_counts(0, 0, 0)


def test_an_entry_that_fails_does_not_stop_the_others_of_its_batch(every_sqs: Sqs) -> None:
    queue = every_sqs.queue()
    sent = queue.send_batch(
        {"Id": "good", "MessageBody": "good"},
        {"Id": "characters", "MessageBody": "\x01"},
        {"Id": "delay", "MessageBody": "x", "DelaySeconds": 901},
        {
            "Id": "attribute",
            "MessageBody": "x",
            "MessageAttributes": {"a": {"DataType": "Number", "StringValue": "x"}},
        },
        {"Id": "too", "MessageBody": "good, too"},
    )
    assert [each["Id"] for each in sent["Successful"]] == ["good", "too"]
    failed = {each["Id"]: each for each in sent["Failed"]}
    assert failed["characters"]["Code"] == "InvalidMessageContents"
    assert failed["delay"]["Code"] == "InvalidParameterValue"
    assert failed["attribute"]["Code"] == "InvalidParameterValue"
    assert all(each["SenderFault"] is True and each["Message"] for each in failed.values())
    messages = queue.receive_all(2)
    assert sorted(bodies(messages)) == ["good", "good, too"]
    first, second = handles(messages)
    changed = queue.call(
        "ChangeMessageVisibilityBatch",
        Entries=[
            {"Id": "good", "ReceiptHandle": first, "VisibilityTimeout": 100},
            {"Id": "time", "ReceiptHandle": second, "VisibilityTimeout": 43_201},
            {"Id": "handle", "ReceiptHandle": "nonsense", "VisibilityTimeout": 1},
        ],
    )
    assert [each["Id"] for each in changed["Successful"]] == ["good"]
    codes = {each["Id"]: each["Code"] for each in changed["Failed"]}
    assert codes == {"time": "InvalidParameterValue", "handle": "ReceiptHandleIsInvalid"}
    deleted = queue.call(
        "DeleteMessageBatch",
        Entries=[{"Id": "handle", "ReceiptHandle": "nonsense"}, {"Id": "good", "ReceiptHandle": second}],
    )
    assert [each["Id"] for each in deleted["Successful"]] == ["good"]
    assert [(each["Id"], each["Code"]) for each in deleted["Failed"]] == [("handle", "ReceiptHandleIsInvalid")]
    queue.until_counts(0, 1, 0)


def test_wrong_batches_are_refused_as_a_whole(sqs: Sqs) -> None:
    queue = sqs.queue()
    entries: dict[str, dict[str, Any]] = {
        "SendMessageBatch": {"MessageBody": "x"},
        "DeleteMessageBatch": {"ReceiptHandle": "x"},
        "ChangeMessageVisibilityBatch": {"ReceiptHandle": "x", "VisibilityTimeout": 1},
    }
    for action, entry in entries.items():
        with sqs.refused("EmptyBatchRequest"):
            queue.call(action, Entries=[])
        with sqs.refused("TooManyEntriesInBatchRequest"):
            queue.call(action, Entries=[{"Id": str(number), **entry} for number in range(11)])
        with sqs.refused("BatchEntryIdsNotDistinct"):
            queue.call(action, Entries=[{"Id": id, **entry} for id in ("a", "b", "a")])
        for id in ("a b", "a.b", "ä", "a" * 81):
            with sqs.refused("InvalidBatchEntryId"):
                queue.call(action, Entries=[{"Id": "good", **entry}, {"Id": id, **entry}])
    half = "x" * (MEBIBYTE // 2)
    with sqs.refused("BatchRequestTooLong"):
        queue.send_batch(*({"Id": id, "MessageBody": half} for id in "abc"))
    assert queue.counts() == (0, 0, 0)
    queue.send_batch(*({"Id": id, "MessageBody": half} for id in "ab"))
    assert bodies(queue.receive_all(2)) == [half, half]


def test_wrong_receipt_handles_are_refused(sqs: Sqs) -> None:
    queue, other = sqs.queue(), sqs.queue()
    queue.send("x")
    message = queue.receive_one()
    handle = message["ReceiptHandle"]
    for wrong in ("nonsense", handle[:-4], f"{handle}AAAA", message["MessageId"], "ä"):
        with sqs.refused("ReceiptHandleIsInvalid"):
            queue.call("DeleteMessage", ReceiptHandle=wrong)
        with sqs.refused("ReceiptHandleIsInvalid"):
            queue.call("ChangeMessageVisibility", ReceiptHandle=wrong, VisibilityTimeout=1)
    with sqs.refused("ReceiptHandleIsInvalid"):
        other.delete(message)
    assert queue.counts() == (0, 1, 0)


def test_a_receipt_handle_of_an_earlier_receive_deletes_nothing(sqs: Sqs) -> None:
    queue = sqs.queue()
    queue.send("x")
    first = queue.receive_one(VisibilityTimeout=0)
    second = queue.receive_one()
    assert first["MessageId"] == second["MessageId"]
    assert first["ReceiptHandle"] != second["ReceiptHandle"]
    queue.delete(first)  # It succeeds, and the message may stay.
    queue.change(second, 0)
    third = queue.receive_one()
    queue.delete(third)
    queue.until_counts(0, 0, 0)


def test_the_limits_of_a_receive_are_checked(sqs: Sqs) -> None:
    queue = sqs.queue()
    for parameters in (
        {"MaxNumberOfMessages": 0},
        {"MaxNumberOfMessages": 11},
        {"WaitTimeSeconds": -1},
        {"WaitTimeSeconds": 21},
        {"VisibilityTimeout": -1},
        {"VisibilityTimeout": 43_201},
    ):
        with sqs.refused("InvalidParameterValue"):
            queue.call("ReceiveMessage", **parameters)
    queue.send("one")
    queue.send("two")
    assert len(queue.call("ReceiveMessage")["Messages"]) == 1, "one message is the default"


# Visibility.


def test_a_message_is_visible_again_when_its_timeout_ends(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.queue(VisibilityTimeout="30")
    queue.send("x")
    first = queue.receive_one()
    assert queue.receive() == []
    clock.advance(31)
    again = queue.receive_one(MessageSystemAttributeNames=["ApproximateReceiveCount"], VisibilityTimeout=100)
    assert again["MessageId"] == first["MessageId"]
    assert again["ReceiptHandle"] != first["ReceiptHandle"]
    assert again["Attributes"] == {"ApproximateReceiveCount": "2"}
    queue.delete(again)
    queue.until_counts(0, 0, 0)


def test_the_visibility_timeout_of_a_message_can_be_lengthened_and_shortened(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.queue()
    queue.send("x")
    message = queue.receive_one(VisibilityTimeout=10)
    queue.change(message, 100)
    clock.advance(50)
    assert queue.receive() == []
    queue.change(message, 5)  # From now on.
    assert queue.receive() == []
    clock.advance(6)
    again = queue.receive_one(MessageSystemAttributeNames=["ApproximateReceiveCount"])
    assert again["Attributes"] == {"ApproximateReceiveCount": "2"}
    clock.advance(29)
    assert queue.receive() == [], "the timeout of the queue counts again"
    clock.advance(2)
    assert queue.receive_one()["MessageId"] == message["MessageId"]


def test_a_visibility_timeout_of_zero_returns_a_message_at_once(sqs: Sqs) -> None:
    queue = sqs.queue()
    queue.send("x")
    for number in range(1, 4):
        [message] = queue.receive(MessageSystemAttributeNames=["ApproximateReceiveCount"])
        assert message["Attributes"] == {"ApproximateReceiveCount": str(number)}
        queue.change(message, 0)
    queue.until_counts(1, 0, 0)


def test_visibility_timeouts_out_of_range_are_refused(sqs: Sqs) -> None:
    queue = sqs.queue()
    queue.send("x")
    message = queue.receive_one()
    for seconds in (-1, 43_201):
        with sqs.refused("InvalidParameterValue"):
            queue.change(message, seconds)
    queue.change(message, 43_199)
    queue.delete(message)
    with sqs.refused("InvalidParameterValue", "MessageNotInflight"):
        queue.change(message, 10)


# Waiting.


def test_a_waiting_receive_gets_a_message_when_it_is_sent(sqs: Sqs) -> None:
    queue = sqs.queue()
    waiting = [sqs.start("ReceiveMessage", QueueUrl=queue.url, WaitTimeSeconds=20) for _ in range(3)]
    sent = {queue.send(str(number))["MessageId"] for number in range(3)}
    received = [each.result(SECONDS_MAX)["Messages"] for each in waiting]
    assert {message["MessageId"] for [message] in received} == sent


def test_a_queue_can_wait_by_default_and_a_call_decides_otherwise(sqs: Sqs) -> None:
    queue = sqs.queue(ReceiveMessageWaitTimeSeconds="1")
    assert queue.receive() == [], "the wait has ended"
    queue.set(ReceiveMessageWaitTimeSeconds="20")
    queue.send("soon", DelaySeconds=1)
    assert bodies(queue.receive()) == ["soon"]
    queue.send("later", DelaySeconds=15)
    assert queue.receive(WaitTimeSeconds=0) == [], "a call that waits receives it"


# Delays.


def test_messages_can_be_delayed_by_the_queue_and_one_by_one(sqs: Sqs) -> None:
    queue = sqs.queue(DelaySeconds="900")
    queue.send("by the queue")
    queue.send("at once", DelaySeconds=0)
    sent = queue.send_batch(
        {"Id": "later", "MessageBody": "in a second", "DelaySeconds": 1}, {"Id": "queue", "MessageBody": "by the queue"}
    )
    assert len(sent["Successful"]) == 2
    assert queue.counts()[2] in (2, 3), "the third is delayed by a second only"
    assert bodies(queue.receive_all(2)) == ["at once", "in a second"]
    assert queue.counts() == (0, 2, 2)
    for seconds in (-1, 901):
        with sqs.refused("InvalidParameterValue"):
            queue.send("x", DelaySeconds=seconds)


def test_a_changed_delay_applies_to_new_messages(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.queue(DelaySeconds="100")
    queue.send("old")
    queue.set(DelaySeconds="0")
    queue.send("new")
    assert bodies(queue.receive()) == ["new"], "on a standard queue a message keeps its delay"
    clock.advance(101)
    assert bodies(queue.receive(VisibilityTimeout=1_000)) in (["old"], ["old", "new"], ["new", "old"])


# FIFO queues.


def send_in_order(queue: SqsQueue, group: str, *texts: str) -> list[dict[str, Any]]:
    return [queue.send(text, MessageGroupId=group, MessageDeduplicationId=uuid.uuid4().hex) for text in texts]


def test_messages_of_a_group_come_in_order_and_lock_it_until_they_are_deleted(sqs: Sqs) -> None:
    queue = sqs.fifo()
    sent = send_in_order(queue, "a", "a1", "a2", "a3", "a4")
    numbers = [int(each["SequenceNumber"]) for each in sent]
    assert numbers == sorted(set(numbers))
    first = queue.receive(2, MessageSystemAttributeNames=["All"])
    assert bodies(first) == ["a1", "a2"]
    assert [each["Attributes"]["MessageGroupId"] for each in first] == ["a", "a"]
    assert [int(each["Attributes"]["SequenceNumber"]) for each in first] == numbers[:2]
    assert all(each["Attributes"]["MessageDeduplicationId"] for each in first)
    assert queue.receive() == []
    send_in_order(queue, "b", "b1")
    others = queue.receive()
    assert bodies(others) == ["b1"]
    queue.delete(first[0])
    assert queue.receive() == [], "a2 is still in flight"
    queue.delete(first[1], *others)
    rest = queue.receive()
    assert bodies(rest) == ["a3", "a4"]
    queue.delete(*rest)
    queue.until_counts(0, 0, 0)


def test_returned_messages_come_before_later_ones_of_their_group(sqs: Sqs) -> None:
    queue = sqs.fifo()
    send_in_order(queue, "a", "a1", "a2", "a3", "a4")
    one, two, three = queue.receive(3)
    queue.delete(one)
    queue.change(three, 0)
    assert queue.receive() == [], "a2 is still in flight"
    queue.change(two, 0)
    assert bodies(queue.receive()) == ["a2", "a3", "a4"]


def test_groups_are_independent(sqs: Sqs) -> None:
    queue = sqs.fifo()
    for number in range(3):
        for group in "abcd":
            send_in_order(queue, group, f"{group}{number}")
    received: dict[str, list[str]] = {group: [] for group in "abcd"}
    while sum(map(len, received.values())) < 12:
        for message in queue.receive(5, WaitTimeSeconds=20):
            received[message["Body"][0]].append(message["Body"])
            queue.delete(message)
    assert received == {group: [f"{group}{number}" for number in range(3)] for group in "abcd"}


def test_a_batch_keeps_its_order(sqs: Sqs) -> None:
    queue = sqs.fifo(ContentBasedDeduplication="true")
    sent = queue.send_batch(
        *({"Id": str(number), "MessageBody": f"body {number}", "MessageGroupId": "a"} for number in range(10))
    )
    numbers = [int(each["SequenceNumber"]) for each in sent["Successful"]]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 10
    assert bodies(queue.receive_all(10)) == [f"body {number}" for number in range(10)]


def test_a_deduplication_id_is_delivered_once_in_five_minutes(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.fifo()
    first = queue.send("one", MessageGroupId="a", MessageDeduplicationId="same")
    again = queue.send("two", MessageGroupId="a", MessageDeduplicationId="same")
    assert again["MD5OfMessageBody"] == md5("two")
    assert again["MessageId"] == first["MessageId"]
    assert again["SequenceNumber"] == first["SequenceNumber"]
    queue.send("three", MessageGroupId="b", MessageDeduplicationId="same")  # The scope is the queue.
    messages = queue.receive()
    assert bodies(messages) == ["one"]
    queue.delete(*messages)
    clock.advance(290)
    queue.send("four", MessageGroupId="a", MessageDeduplicationId="same")
    assert queue.receive() == [], "also after it was deleted"
    clock.advance(11)
    queue.send("five", MessageGroupId="a", MessageDeduplicationId="same")
    assert bodies(queue.receive()) == ["five"]


def test_the_body_can_be_the_deduplication_id(sqs: Sqs) -> None:
    queue = sqs.fifo(ContentBasedDeduplication="true")
    attributes = {"a": {"DataType": "String", "StringValue": "x"}}
    queue.send("same", MessageGroupId="a")
    queue.send("same", MessageGroupId="a", MessageAttributes=attributes)  # Attributes do not count.
    queue.send("same", MessageGroupId="a", MessageDeduplicationId="another")
    queue.send("other", MessageGroupId="a", MessageDeduplicationId=hashlib.sha256(b"same").hexdigest())
    messages = queue.receive(MessageSystemAttributeNames=["MessageDeduplicationId"])
    assert bodies(messages) == ["same", "same"]
    ids = [message["Attributes"]["MessageDeduplicationId"] for message in messages]
    assert ids == [hashlib.sha256(b"same").hexdigest(), "another"]


def test_deduplication_can_be_limited_to_groups(sqs: Sqs) -> None:
    queue = sqs.fifo(DeduplicationScope="messageGroup", FifoThroughputLimit="perMessageGroupId")
    for group in "ab":
        for text in ("one", "two"):
            queue.send(group + text, MessageGroupId=group, MessageDeduplicationId="same")
    assert sorted(bodies(queue.receive())) == ["aone", "bone"]
    with sqs.refused(*INVALID):  # This throughput needs that scope.
        sqs.fifo(FifoThroughputLimit="perMessageGroupId", DeduplicationScope="queue")


def test_wrong_calls_of_fifo_queues_are_refused(sqs: Sqs) -> None:
    queue = sqs.fifo()
    with sqs.refused("MissingParameter"):
        queue.send("x", MessageDeduplicationId="a")
    with sqs.refused("InvalidParameterValue"):
        queue.send("x", MessageGroupId="a")
    for wrong in ("a b", "ä", "", "a" * 129):
        with sqs.refused("InvalidParameterValue", "MissingParameter"):
            queue.send("x", MessageGroupId="a", MessageDeduplicationId=wrong)
        with sqs.refused("InvalidParameterValue", "MissingParameter"):
            queue.send("x", MessageGroupId=wrong, MessageDeduplicationId="a")
    with sqs.refused("InvalidParameterValue"):
        queue.send("x", MessageGroupId="a", MessageDeduplicationId="a", DelaySeconds=1)
    assert queue.counts() == (0, 0, 0)
    with sqs.refused("InvalidParameterValue"):
        sqs.queue().send("x", MessageDeduplicationId="a")
    longest = "".join(map(chr, range(0x21, 0x7F))).ljust(128, "a")
    queue.send("x", MessageGroupId=longest, MessageDeduplicationId=longest)
    found = queue.receive_one(MessageSystemAttributeNames=["All"])["Attributes"]
    assert (found["MessageGroupId"], found["MessageDeduplicationId"]) == (longest, longest)


def test_a_standard_queue_keeps_the_group_of_a_message_without_an_order(sqs: Sqs) -> None:
    queue = sqs.queue()
    for number in range(3):
        queue.send(str(number), MessageGroupId="tenant")
    messages = [queue.receive_one(MessageSystemAttributeNames=["MessageGroupId"]) for _ in range(3)]
    assert sorted(bodies(messages)) == ["0", "1", "2"], "the group is not locked"
    assert [each["Attributes"] for each in messages] == [{"MessageGroupId": "tenant"}] * 3


def test_a_receive_can_be_repeated_by_its_attempt_id(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.fifo()
    send_in_order(queue, "a", "a1", "a2", "a3")
    first = queue.receive(2, ReceiveRequestAttemptId="attempt", VisibilityTimeout=100)
    assert bodies(first) == ["a1", "a2"]
    again = queue.receive(2, ReceiveRequestAttemptId="attempt", VisibilityTimeout=100)
    assert bodies(again) == ["a1", "a2"]
    assert handles(again) == handles(first)
    assert queue.receive(2, ReceiveRequestAttemptId="another") == []
    clock.advance(60)
    assert bodies(queue.receive(2, ReceiveRequestAttemptId="attempt", VisibilityTimeout=100)) == ["a1", "a2"]
    clock.advance(60)
    assert queue.receive() == [], "the repetition has begun the timeout again"
    queue.delete(again[0])
    assert bodies(queue.receive(2, ReceiveRequestAttemptId="attempt")) in ([], ["a2"]), "a1 was deleted"
    queue.delete(again[1])
    assert bodies(queue.receive()) == ["a3"]
    with sqs.refused("InvalidParameterValue"):
        queue.receive(ReceiveRequestAttemptId="a b")


# Dead letters.


def test_a_message_that_was_received_too_often_becomes_a_dead_letter(every_sqs: Sqs) -> None:
    dead = every_sqs.queue()
    queue = every_sqs.queue(VisibilityTimeout="0", RedrivePolicy=redrive(dead, 2))
    assert json.loads(queue.attributes("RedrivePolicy")["RedrivePolicy"]) == redrive(dead, 2)
    attributes = {"a": {"DataType": "Binary", "BinaryValue": b"\x00"}}
    sent = queue.send("x", MessageAttributes=attributes)
    before = queue.receive_one(MessageSystemAttributeNames=["All"])["Attributes"]
    queue.receive_one()
    assert queue.receive() == []
    letter = dead.receive_one(MessageSystemAttributeNames=["All"], MessageAttributeNames=["All"])
    assert letter["MessageId"] == sent["MessageId"]
    assert letter["Body"] == "x"
    assert letter["MessageAttributes"] == attributes
    assert letter["Attributes"]["DeadLetterQueueSourceArn"] == queue.arn
    assert letter["Attributes"]["SentTimestamp"] == before["SentTimestamp"]
    queue.until_counts(0, 0, 0)
    dead.until_counts(0, 1, 0)


def test_dead_letters_of_a_fifo_queue_keep_their_group(sqs: Sqs) -> None:
    dead = sqs.fifo()
    queue = sqs.fifo(RedrivePolicy=redrive(dead))
    send_in_order(queue, "a", "a1", "a2")
    for message in queue.receive():
        queue.change(message, 0)
    assert queue.receive() == []
    letters = dead.receive_all(2, MessageSystemAttributeNames=["MessageGroupId"])
    assert bodies(letters) == ["a1", "a2"]
    assert [each["Attributes"]["MessageGroupId"] for each in letters] == ["a", "a"]


def test_without_a_redrive_policy_a_message_never_becomes_a_dead_letter(sqs: Sqs) -> None:
    dead = sqs.queue()
    queue = sqs.queue(VisibilityTimeout="0")
    queue.send("x")
    for _ in range(25):
        queue.receive_one()
    last = queue.receive_one(MessageSystemAttributeNames=["ApproximateReceiveCount"])
    assert last["Attributes"] == {"ApproximateReceiveCount": "26"}
    queue.set(RedrivePolicy=redrive(dead, 3))  # It applies to messages that are there.
    assert queue.receive() == []
    assert dead.receive_one()["MessageId"] == last["MessageId"]
    queue.set(RedrivePolicy="")
    assert "RedrivePolicy" not in queue.attributes()
    queue.send("y")
    for _ in range(5):
        assert queue.receive_one()["Body"] == "y"


def test_wrong_redrive_policies_are_refused(sqs: Sqs) -> None:
    queue, dead, fifo = sqs.queue(), sqs.queue(), sqs.fifo()
    for policy in (
        {"deadLetterTargetArn": f"{dead.arn}-absent", "maxReceiveCount": 1},
        {"deadLetterTargetArn": "nonsense", "maxReceiveCount": 1},
        redrive(dead, 0),
        redrive(dead, 1_001),
        redrive(fifo),
    ):
        with sqs.refused("QueueDoesNotExist", *INVALID):
            queue.set(RedrivePolicy=policy)
    with sqs.refused(*INVALID):
        fifo.set(RedrivePolicy=redrive(dead))
    assert "RedrivePolicy" not in queue.attributes()
    queue.set(RedrivePolicy={"deadLetterTargetArn": dead.arn, "maxReceiveCount": "1000"})  # Some tools send a string.


def test_a_queue_decides_whose_dead_letters_it_takes(sqs: Sqs) -> None:
    dead, queue, other = sqs.queue(), sqs.queue(), sqs.queue()
    dead.set(RedriveAllowPolicy={"redrivePermission": "denyAll"})
    with sqs.refused(*INVALID):
        queue.set(RedrivePolicy=redrive(dead))
    dead.set(RedriveAllowPolicy={"redrivePermission": "byQueue", "sourceQueueArns": [queue.arn]})
    queue.set(RedrivePolicy=redrive(dead))
    with sqs.refused(*INVALID):
        other.set(RedrivePolicy=redrive(dead))
    dead.set(RedriveAllowPolicy={"redrivePermission": "allowAll"})
    other.set(RedrivePolicy=redrive(dead))
    for wrong in (
        {"redrivePermission": "byQueue"},
        {"redrivePermission": "allowAll", "sourceQueueArns": [queue.arn]},
        {"redrivePermission": "byQueue", "sourceQueueArns": [f"{queue.arn}{number}" for number in range(11)]},
    ):
        with sqs.refused(*INVALID):
            dead.set(RedriveAllowPolicy=wrong)


def test_the_sources_of_a_dead_letter_queue_are_listed_in_pages(sqs: Sqs) -> None:
    dead = sqs.queue()
    assert dead.call("ListDeadLetterSourceQueues").get("queueUrls", []) == []
    sources = [sqs.queue(RedrivePolicy=redrive(dead)) for _ in range(3)]
    sqs.queue()
    found = dead.call("ListDeadLetterSourceQueues")
    assert sorted(found["queueUrls"]) == sorted(source.url for source in sources)
    assert "NextToken" not in found
    first = dead.call("ListDeadLetterSourceQueues", MaxResults=2)
    rest = dead.call("ListDeadLetterSourceQueues", MaxResults=2, NextToken=first["NextToken"])
    assert len(first["queueUrls"]) == 2
    assert sorted(first["queueUrls"] + rest["queueUrls"]) == sorted(found["queueUrls"])
    assert "NextToken" not in rest
    sources[0].set(RedrivePolicy="")
    sources[1].call("DeleteQueue")
    assert dead.call("ListDeadLetterSourceQueues")["queueUrls"] == [sources[2].url]


# Moving dead letters.


def dead_letters(sqs: Sqs, number: int) -> tuple[SqsQueue, SqsQueue, list[str]]:
    """A queue, the queue of its dead letters, and the ids of those."""
    dead = sqs.queue()
    queue = sqs.queue(VisibilityTimeout="0", RedrivePolicy=redrive(dead))
    sent = queue.send_batch(*({"Id": str(each), "MessageBody": str(each)} for each in range(number)))
    queue.receive_all(number)
    assert queue.receive() == []
    dead.until_counts(number, 0, 0)
    return queue, dead, [each["MessageId"] for each in sent["Successful"]]


def moved_by(sqs: Sqs, dead: SqsQueue, *statuses: str) -> dict[str, Any]:
    """The newest task of a queue, when it has one of these statuses."""

    def newest() -> dict[str, Any] | None:
        found: dict[str, Any] = sqs.call("ListMessageMoveTasks", SourceArn=dead.arn)["Results"][0]
        return found if found["Status"] in statuses else None

    task = eventually(newest, f"the task is {statuses}")
    assert task is not None
    return task


def test_dead_letters_are_moved_back_to_their_queue(sqs: Sqs) -> None:
    queue, dead, ids = dead_letters(sqs, 5)
    assert sqs.call("ListMessageMoveTasks", SourceArn=dead.arn).get("Results", []) == []
    assert sqs.call("StartMessageMoveTask", SourceArn=dead.arn)["TaskHandle"]
    task = moved_by(sqs, dead, "COMPLETED")
    assert task["SourceArn"] == dead.arn
    assert "DestinationArn" not in task
    assert "TaskHandle" not in task, "only a running task has a handle"
    assert task["ApproximateNumberOfMessagesMoved"] == 5
    assert task["ApproximateNumberOfMessagesToMove"] == 5
    after = sqs.queue()
    assert dead.created_seconds() * 1_000 <= task["StartedTimestamp"] <= (after.created_seconds() + 1) * 1_000
    queue.set(VisibilityTimeout="30", RedrivePolicy="")
    assert sorted(bodies(queue.receive_all(5))) == ["0", "1", "2", "3", "4"]
    dead.until_counts(0, 0, 0)
    assert len(ids) == 5


def test_dead_letters_are_moved_to_another_queue(sqs: Sqs) -> None:
    _, dead, _ = dead_letters(sqs, 3)
    destination = sqs.queue()
    sqs.call(
        "StartMessageMoveTask", SourceArn=dead.arn, DestinationArn=destination.arn, MaxNumberOfMessagesPerSecond=500
    )
    task = moved_by(sqs, dead, "COMPLETED")
    assert task["DestinationArn"] == destination.arn
    assert task["MaxNumberOfMessagesPerSecond"] == 500
    assert sorted(bodies(destination.receive_all(3))) == ["0", "1", "2"]


def test_a_move_has_a_rate_and_can_be_cancelled(sqs: Sqs) -> None:
    queue, dead, _ = dead_letters(sqs, 8)
    handle = sqs.call("StartMessageMoveTask", SourceArn=dead.arn, MaxNumberOfMessagesPerSecond=1)["TaskHandle"]
    task = moved_by(sqs, dead, "RUNNING")
    assert task["TaskHandle"] == handle
    with sqs.refused("UnsupportedOperation", "InvalidParameterValue"):  # One task at a time.
        sqs.call("StartMessageMoveTask", SourceArn=dead.arn)
    cancelled = sqs.call("CancelMessageMoveTask", TaskHandle=handle)
    assert 0 <= cancelled["ApproximateNumberOfMessagesMoved"] < 8
    task = moved_by(sqs, dead, "CANCELLED")
    visible, _, _ = dead.counts()
    assert visible == 8 - task["ApproximateNumberOfMessagesMoved"] > 0
    with sqs.refused("ResourceNotFoundException", "UnsupportedOperation", "InvalidParameterValue"):
        sqs.call("CancelMessageMoveTask", TaskHandle=handle)
    sqs.call("StartMessageMoveTask", SourceArn=dead.arn)
    moved_by(sqs, dead, "COMPLETED")
    dead.until_counts(0, 0, 0)
    assert len(sqs.call("ListMessageMoveTasks", SourceArn=dead.arn, MaxResults=10)["Results"]) == 2
    assert len(sqs.call("ListMessageMoveTasks", SourceArn=dead.arn)["Results"]) == 1, "one is the default"
    assert queue.url


def test_wrong_moves_are_refused(sqs: Sqs) -> None:
    queue, dead, _ = dead_letters(sqs, 1)
    with sqs.refused("ResourceNotFoundException"):
        sqs.call("StartMessageMoveTask", SourceArn=f"{dead.arn}-absent")
    with sqs.refused("ResourceNotFoundException"):
        sqs.call("StartMessageMoveTask", SourceArn=dead.arn, DestinationArn=f"{queue.arn}-absent")
    with sqs.refused("InvalidParameterValue", "UnsupportedOperation"):
        sqs.call("StartMessageMoveTask", SourceArn=queue.arn)  # It takes no dead letters.
    for rate in (0, 501):
        with sqs.refused("InvalidParameterValue"):
            sqs.call("StartMessageMoveTask", SourceArn=dead.arn, MaxNumberOfMessagesPerSecond=rate)
    with sqs.refused("ResourceNotFoundException"):
        sqs.call("ListMessageMoveTasks", SourceArn=f"{dead.arn}-absent")
    with sqs.refused("ResourceNotFoundException", "InvalidParameterValue"):
        sqs.call("CancelMessageMoveTask", TaskHandle="nonsense")
    dead.until_counts(1, 0, 0)


# Retention and counts.


def test_messages_older_than_the_retention_period_are_deleted(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.queue(MessageRetentionPeriod="60")
    queue.send("old")
    queue.send("in flight")
    queue.receive(1, VisibilityTimeout=100)
    clock.advance(50)
    queue.send("young")
    clock.advance(11)
    assert bodies(queue.receive(VisibilityTimeout=0)) == ["young"]
    queue.until_counts(1, 0, 0)


def test_a_changed_retention_period_applies_to_stored_messages(timed: tuple[Sqs, MovedClock]) -> None:
    sqs, clock = timed
    queue = sqs.queue()
    queue.send("old")
    clock.advance(70)
    queue.send("young")
    queue.set(MessageRetentionPeriod="60")
    assert bodies(queue.receive(VisibilityTimeout=0)) == ["young"]
    queue.until_counts(1, 0, 0)
    queue.set(MessageRetentionPeriod="1000")
    clock.advance(70)
    assert bodies(queue.receive()) == ["young"]


def test_messages_are_counted(sqs: Sqs) -> None:
    queue = sqs.queue()
    for number in range(3):
        queue.send(str(number))
    queue.send("later", DelaySeconds=900)
    queue.until_counts(3, 0, 1)
    messages = queue.receive_all(2)
    queue.until_counts(1, 2, 1)
    queue.delete(messages[0])
    queue.until_counts(1, 1, 1)
    queue.change(messages[1], 0)
    queue.until_counts(2, 0, 1)
