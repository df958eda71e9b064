"""A server is killed as soon as it has answered a call of SQS: what was answered is stored, exactly once.

The server is `fastness serve --sqs` on RocksDB, and starts again on the same port. The client is boto3.
"""

import os
import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EndpointConnectionError, HTTPClientError

from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually

VISIBILITY_SECONDS = "3600"  # No message comes back while a server starts, however long that takes.
NIGHTLY = pytest.param(200, marks=pytest.mark.nightly)
# Four have every kind of send and queue, and two have every time of a deletion.
FOUR_KILLS = pytest.mark.parametrize("kills", [4, NIGHTLY])
TWO_KILLS = pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.thorough), NIGHTLY])
# Smaller and larger than what is stored with a message, and than its native attributes may be.
BODY_SIZES = (1, 200, 20_000, 300_000)
ATTRIBUTE_SIZES = (0, 10, 12_000)
SEED = int(os.environ.get("FASTNESS_SEED", random.SystemRandom().randrange(1 << 32)))


@pytest.fixture(autouse=True)
def chance() -> random.Random:
    """Random numbers; FASTNESS_SEED repeats a run."""
    print(f"FASTNESS_SEED={SEED}")
    return random.Random(SEED)


class Service:
    """A server that can be killed and started again, and a client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = Server(folder, sqs=True, sqs_anonymous=True)
        self._port = self._server.address[1]
        self._client = botocore.session.Session().create_client(
            "sqs",
            region_name="us-east-1",
            endpoint_url=f"{self._server.url}/sqs",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=Config(retries={"total_max_attempts": 1}, read_timeout=SECONDS_MAX, max_pool_connections=20),
        )

    def __getattr__(self, name: str) -> Any:
        """A call of SQS."""
        return getattr(self._client, name)

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        self._server = Server(self._folder, sqs=True, sqs_anonymous=True, port=self._port)

    def queue(self, name: str, **attributes: str) -> str:
        given = {"VisibilityTimeout": VISIBILITY_SECONDS, **attributes}
        return str(self.create_queue(QueueName=name, Attributes=given)["QueueUrl"])

    def receive(self, url: str, **options: Any) -> list[dict[str, Any]]:
        """The messages of one call; none if the queue has none left."""
        names = {"MessageAttributeNames": ["All"], "MessageSystemAttributeNames": ["All"]}
        found = self.receive_message(QueueUrl=url, MaxNumberOfMessages=10, **names, **options)
        messages: list[dict[str, Any]] = found.get("Messages", [])
        return messages

    def receive_all(self, url: str) -> list[dict[str, Any]]:
        """All messages of a queue; each is deleted, so that those behind it in its group come, too."""
        received = []
        while messages := self.receive(url):
            received += messages
            entries = [{"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(messages)]
            deleted = self.delete_message_batch(QueueUrl=url, Entries=entries)
            assert len(deleted["Successful"]) == len(messages)
        return received

    def counts(self, url: str) -> tuple[int, ...]:
        names = [f"ApproximateNumberOfMessages{kind}" for kind in ("", "NotVisible", "Delayed")]
        found = self.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        return tuple(int(found[name]) for name in names)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    try:
        yield service
    finally:
        service.kill()


def new_message(chance: random.Random) -> dict[str, Any]:
    """The parameters of a message, of any size and with any attributes."""
    size = chance.choice(BODY_SIZES)
    message: dict[str, Any] = {"MessageBody": f"{uuid.uuid4()} {'ä' * (size // 2)}"}
    if attribute_bytes := chance.choice(ATTRIBUTE_SIZES):
        message["MessageAttributes"] = {
            "bytes": {"DataType": "Binary.png", "BinaryValue": chance.randbytes(attribute_bytes)},
            "number": {"DataType": "Number", "StringValue": str(chance.random())},
        }
    return message


def content(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The body and the attributes of a message that is sent, or that was received."""
    body = message["MessageBody"] if "MessageBody" in message else message["Body"]
    return body, message.get("MessageAttributes", {})


@FOUR_KILLS
def test_every_message_that_was_answered_arrives_after_the_server_was_killed(
    service: Service, chance: random.Random, kills: int
) -> None:
    urls = [service.queue("standard"), service.queue("ordered.fifo", FifoQueue="true")]
    sent: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {url: {} for url in urls}
    for number in range(kills):
        url = urls[number % 2]
        order: dict[str, str] = {"MessageGroupId": chance.choice("abc")} if url.endswith(".fifo") else {}
        if number % 4 < 2:
            message = new_message(chance) | order | ({"MessageDeduplicationId": uuid.uuid4().hex} if order else {})
            answered = [service.send_message(QueueUrl=url, **message)["MessageId"]]
            messages = [message]
        else:
            messages = [
                new_message(chance) | order | ({"MessageDeduplicationId": uuid.uuid4().hex} if order else {})
                for _ in range(3)
            ]
            entries = [{"Id": str(index), **message} for index, message in enumerate(messages)]
            answer = service.send_message_batch(QueueUrl=url, Entries=entries)
            answered = [each["MessageId"] for each in answer["Successful"]]
        service.kill()
        service.restart()
        assert len(answered) == len(messages)
        sent[url] |= zip(answered, map(content, messages), strict=True)
    received: list[dict[str, Any]] = []
    for url in urls:
        received = service.receive_all(url)
        assert {each["MessageId"]: content(each) for each in received} == sent[url]
        assert len(received) == len(sent[url])
        assert service.counts(url) == (0, 0, 0)
    # The messages of a group have come in the order in which they were sent.
    groups = defaultdict(list)
    for each in received:
        groups[each["Attributes"]["MessageGroupId"]].append(int(each["Attributes"]["SequenceNumber"]))
    assert all(numbers == sorted(numbers) for numbers in groups.values())


@TWO_KILLS
def test_what_was_received_and_deleted_stays_so_after_the_server_was_killed(
    service: Service, chance: random.Random, kills: int
) -> None:
    url = service.queue("jobs")
    expected = {service.send_message(QueueUrl=url, MessageBody=str(number))["MessageId"] for number in range(kills)}
    deleted = set()
    for number in range(kills):
        [message] = service.receive_message(QueueUrl=url)["Messages"]
        if number % 2:
            service.kill()  # The receipt handle is good afterwards.
            service.restart()
        assert service.counts(url) == (kills - number - 1, 1, 0)
        service.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        if not number % 2:
            service.kill()
            service.restart()
        assert message["MessageId"] not in deleted
        deleted.add(message["MessageId"])
    assert deleted == expected
    assert service.receive(url) == []
    assert service.counts(url) == (0, 0, 0)


@TWO_KILLS
def test_senders_that_repeat_what_was_not_answered_send_every_message_once_and_in_order(
    service: Service, chance: random.Random, kills: int
) -> None:
    url = service.queue("ordered.fifo", FifoQueue="true")
    stopping = threading.Event()
    answered: dict[str, list[str]] = {group: [] for group in "abcd"}

    def send(group: str) -> None:
        while not stopping.is_set():
            number = len(answered[group])
            message = {"MessageBody": str(number), "MessageDeduplicationId": f"{group}-{number}"}
            found = repeat(partial(service.send_message, QueueUrl=url, MessageGroupId=group, **message))
            answered[group].append(found["MessageId"])

    def has_answered(goal: int) -> bool:
        return sum(map(len, answered.values())) >= goal or any(each.done() for each in sending)

    with ThreadPoolExecutor(len(answered)) as threads:
        sending = [threads.submit(send, group) for group in answered]
        try:
            for _ in range(kills):
                goal = sum(map(len, answered.values())) + chance.randrange(1, 20)
                eventually(partial(has_answered, goal), "more messages were sent")
                service.kill()
                service.restart()
        finally:
            stopping.set()
        for each in sending:
            each.result(2 * SECONDS_MAX)
    received: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for message in service.receive_all(url):
        received[message["Attributes"]["MessageGroupId"]].append((message["Body"], message["MessageId"]))
    for group, ids in answered.items():
        assert received[group] == [(str(number), id) for number, id in enumerate(ids)]


def repeat(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer to a send that is repeated while the server cannot be reached, or says that it stops."""

    def answer() -> dict[str, Any] | None:
        try:
            found = call()
        except (EndpointConnectionError, HTTPClientError):
            return None
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                raise
            return None
        # Without the id the connection ended after the head, which botocore takes for an answer.
        return found if "MessageId" in found else None

    found = eventually(answer, "the server is back")
    assert found is not None
    return found
