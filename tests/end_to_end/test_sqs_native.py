"""Messages between clients of SQS and native clients, both ways, over a real server."""

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import boto3
import pytest
from botocore.config import Config

from fastness.handles.sync.plane import Plane
from fastness.wire.queues import QueuePolicy
from tests.support.server_process import Server

MEBIBYTE = 1_048_576
TYPED = {
    "text": {"DataType": "String", "StringValue": "grüße"},
    "json": {"DataType": "String.json", "StringValue": "{}"},
    "count": {"DataType": "Number", "StringValue": "12.50"},
    "rate": {"DataType": "Number.float", "StringValue": "-1e3"},
    "raw": {"DataType": "Binary", "BinaryValue": bytes(range(256))},
    "photo": {"DataType": "Binary.gif", "BinaryValue": b"GIF89a"},
}
_numbers = count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("sqs"), sqs=True, sqs_anonymous=True)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sqs(server: Server) -> Any:
    config = Config(retries={"max_attempts": 1}, read_timeout=60)
    client: Any = boto3.client(
        "sqs",
        endpoint_url=f"{server.url}/sqs",
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=config,
    )
    return client


@pytest.fixture
def plane(server: Server) -> Iterator[Plane]:
    with server.plane() as opened:
        yield opened


class SqsQueue:
    """A queue of its own for a test, by a client of SQS."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self.name = name

    def __call__(self, action: str, **parameters: Any) -> Any:
        url = self._client.get_queue_url(QueueName=self.name)["QueueUrl"]
        return getattr(self._client, action)(QueueUrl=url, **parameters)

    def receive(self, **parameters: Any) -> list[dict[str, Any]]:
        found = self(
            "receive_message",
            MaxNumberOfMessages=10,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
            **parameters,
        )
        messages: list[dict[str, Any]] = found.get("Messages", [])
        for message in messages:
            assert message["MD5OfBody"] == hashlib.md5(message["Body"].encode()).hexdigest()
        return messages

    def delete(self, message: dict[str, Any]) -> None:
        self("delete_message", ReceiptHandle=message["ReceiptHandle"])


@pytest.fixture
def name() -> str:
    return f"q{next(_numbers)}"


@pytest.fixture
def queue(sqs: Any, name: str) -> SqsQueue:
    """A queue that a client of SQS has created."""
    sqs.create_queue(QueueName=name)
    return SqsQueue(sqs, name)


def test_a_native_client_receives_what_sqs_sends(queue: SqsQueue, plane: Plane) -> None:
    sent = queue("send_message", MessageBody="grüße")
    message = plane.queue(queue.name).receive()
    assert message is not None
    assert message.id == sent["MessageId"]
    assert message.payload == "grüße".encode()
    assert message.delivery.content_type == "text/plain; charset=utf-8"
    assert message.attributes == {}
    message.ack()
    assert queue.receive() == []


def test_sqs_receives_what_a_native_client_puts(sqs: Any, plane: Plane, name: str) -> None:
    receipt = plane.queue(name).put({"order": 7}, attributes={"kind": "new"})
    queue = SqsQueue(sqs, name)  # Native clients make queues by use.
    [message] = queue.receive()
    assert message["MessageId"] == receipt.id
    assert json.loads(message["Body"]) == {"order": 7}
    assert message["MessageAttributes"] == {"kind": {"DataType": "String", "StringValue": "new"}}
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"
    queue.delete(message)
    assert plane.queue(name).receive() is None
    assert plane.queue(name).stats().acked_total == 1


def test_attributes_of_all_types_reach_native_clients_and_return(queue: SqsQueue, plane: Plane) -> None:
    queue("send_message", MessageBody="x", MessageAttributes=TYPED)
    native = plane.queue(queue.name)
    message = native.receive()
    assert message is not None
    assert message.attributes == {
        "text": "grüße",
        "json": "{}",
        "sqs-type.json": "String.json",
        "count": "12.50",
        "sqs-type.count": "Number",
        "rate": "-1e3",
        "sqs-type.rate": "Number.float",
        "raw": base64.b64encode(bytes(range(256))).decode(),
        "sqs-type.raw": "Binary",
        "photo": base64.b64encode(b"GIF89a").decode(),
        "sqs-type.photo": "Binary.gif",
    }
    native.put(message.payload, attributes=message.attributes, content_type=message.delivery.content_type)
    message.ack()
    [returned] = queue.receive()
    assert returned["MessageAttributes"] == TYPED


def test_attributes_that_do_not_fit_travel_in_a_documented_envelope(queue: SqsQueue, plane: Plane) -> None:
    attributes = {**TYPED, "long": {"DataType": "String", "StringValue": "x" * 20_000}}
    sent = queue("send_message", MessageBody="hello", MessageAttributes=attributes)
    [message] = queue.receive(VisibilityTimeout=0)
    assert message["Body"] == "hello"
    assert message["MessageAttributes"] == attributes
    assert message["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    native = plane.queue(queue.name).receive()
    assert native is not None
    assert native.delivery.content_type == "application/vnd.fastness.sqs-message+json"
    envelope = json.loads(native.read())
    assert envelope["body"] == "hello"
    assert envelope["attributes"]["photo"] == {"type": "Binary.gif", "value": base64.b64encode(b"GIF89a").decode()}
    native.ack()


def test_a_binary_payload_is_received_as_base64(sqs: Any, plane: Plane, name: str) -> None:
    payload = os.urandom(1_000) + b"\xff\x00"
    plane.queue(name).put(payload)
    [message] = SqsQueue(sqs, name).receive()
    assert base64.b64decode(message["Body"]) == payload
    assert message["MessageAttributes"]["fastness-encoding"]["StringValue"] == "base64"


@pytest.mark.parametrize("size", [16_384, 16_385, MEBIBYTE])
def test_large_bodies_pass_both_ways(queue: SqsQueue, plane: Plane, size: int) -> None:
    body = "ä" * (size // 2) + "x" * (size % 2)
    queue("send_message", MessageBody=body)
    message = plane.queue(queue.name).receive()
    assert message is not None
    assert message.read() == body.encode()
    message.ack()
    plane.queue(queue.name).put(body.encode(), content_type="text/plain")
    [received] = queue.receive()
    assert received["Body"] == body
    assert "MessageAttributes" not in received


def test_a_native_payload_over_one_mebibyte_is_received_as_a_reference(sqs: Any, plane: Plane, name: str) -> None:
    payload = os.urandom(2 * MEBIBYTE)
    plane.queue(name).put(payload, attributes={"kind": "video"})
    [message] = SqsQueue(sqs, name).receive()
    reference = json.loads(message["Body"])
    assert reference["size"] == len(payload)
    assert plane.blobs.get(reference["blob"]) == payload
    assert message["MessageAttributes"]["fastness-encoding"]["StringValue"] == "blob"
    assert message["MessageAttributes"]["kind"]["StringValue"] == "video"


def test_groups_keep_their_order_between_both_kinds_of_clients(sqs: Any, plane: Plane, name: str) -> None:
    fifo = f"{name}.fifo"
    sqs.create_queue(QueueName=fifo, Attributes={"FifoQueue": "true", "ContentBasedDeduplication": "true"})
    queue, native = SqsQueue(sqs, fifo), plane.queue(fifo)
    queue("send_message", MessageBody="1", MessageGroupId="g")
    native.put(b"2", group="g")
    queue("send_message", MessageBody="3", MessageGroupId="g")
    queue("send_message", MessageBody="4", MessageGroupId="other/group")
    first = native.receive()
    assert first is not None
    assert (first.payload, first.delivery.group) == (b"1", "g")
    [other] = queue.receive()
    assert (other["Body"], other["Attributes"]["MessageGroupId"]) == ("4", "other/group")
    first.ack()
    found = queue.receive()
    assert [message["Body"] for message in found] == ["2", "3"]
    numbers = [message["Attributes"]["SequenceNumber"] for message in found]
    assert numbers == sorted(numbers)
    assert {message["Attributes"]["MessageGroupId"] for message in found} == {"g"}


def test_a_deduplication_id_holds_for_sqs_and_is_seen_natively(sqs: Any, plane: Plane, name: str) -> None:
    fifo = f"{name}.fifo"
    sqs.create_queue(QueueName=fifo, Attributes={"FifoQueue": "true"})
    queue = SqsQueue(sqs, fifo)
    parameters = {"MessageBody": "x", "MessageGroupId": "g", "MessageDeduplicationId": "once"}
    first = queue("send_message", **parameters)
    again = queue("send_message", **parameters)
    assert first["MessageId"] == again["MessageId"]
    message = plane.queue(fifo).receive()
    assert message is not None
    assert message.attributes == {"MessageDeduplicationId": "once"}
    message.ack()
    assert plane.queue(fifo).receive() is None


def test_a_message_that_a_native_client_returns_is_received_by_sqs(queue: SqsQueue, plane: Plane) -> None:
    queue("send_message", MessageBody="x")
    message = plane.queue(queue.name).receive()
    assert message is not None
    message.nack(delay_seconds=0)
    [received] = queue.receive(WaitTimeSeconds=20)
    assert received["Attributes"]["ApproximateReceiveCount"] == "2"


def test_the_policy_of_a_native_queue_becomes_attributes(sqs: Any, plane: Plane, name: str) -> None:
    policy = QueuePolicy(visibility_seconds=45.0, delay_seconds=0.0, retention_seconds=3_600.0, max_attempts=4)
    plane.queue(name).set_policy(policy)
    attributes = SqsQueue(sqs, name)("get_queue_attributes", AttributeNames=["All"])["Attributes"]
    assert attributes["VisibilityTimeout"] == "45"
    assert attributes["MessageRetentionPeriod"] == "3600"
    assert json.loads(attributes["RedrivePolicy"])["maxReceiveCount"] == 4
    SqsQueue(sqs, name)("set_queue_attributes", Attributes={"VisibilityTimeout": "50"})
    assert plane.queue(name).policy().visibility_seconds == 50.0


def test_a_waiting_sqs_receive_gets_what_a_native_client_puts(queue: SqsQueue, plane: Plane) -> None:
    received: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: received.extend(queue.receive(WaitTimeSeconds=20)))
    waiting.start()
    native = plane.queue(queue.name)
    native.put(b"late")
    waiting.join(60)
    assert [message["Body"] for message in received] == ["late"]
