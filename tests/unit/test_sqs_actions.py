"""The actions of SQS over a plane in memory, with a clock that the test moves."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from fastness.errors import FastnessError, NotAllowed
from fastness.names import UNIVERSE
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.open import Options, open_plane_async
from fastness.server.authorization import AllowAll
from fastness.server.context import ServerContext
from fastness.server.sqs.actions import SqsActions
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.errors import SqsError, sqs_error
from fastness.server.sqs.settings_cache import SettingsCache
from fastness.server.sqs.shapes import ACTIONS
from fastness.testing.clock import ManualClock
from fastness.wire.queues import GetQueueStats, NewMessage, PutMessages, ReceiveMessages
from fastness.wire.requests import Request
from fastness.wire.sqs import GetSqsSettings, SetSqsAttributes

Output = dict[str, Any]


class Recorded:
    """A plane that keeps the requests which it executes."""

    def __init__(self, transport: AsyncEmbeddedTransport) -> None:
        self._transport = transport
        self.requests: list[Request[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, request: Request[Any], call: Any = None) -> Any:
        self.requests.append(request)
        return await self._transport.call(request, call)

    def taken(self) -> list[str]:
        """The names of the requests since the last call."""
        names = [type(request).__name__ for request in self.requests]
        self.requests.clear()
        return names


class Client:
    """Calls actions, as a client of SQS does over HTTP."""

    def __init__(self, transport: AsyncEmbeddedTransport, universe: str = UNIVERSE) -> None:
        self.plane = Recorded(transport)
        self.authorizer = AllowAll()
        self._actions = SqsActions(ServerContext(self.plane))
        self.caller = SqsCaller(
            authorizer=self.authorizer,
            universe=universe,
            base_url="http://127.0.0.1:9440/sqs",
            region="us-east-1",
            client="127.0.0.1",
        )

    async def __call__(self, action: str, queue: str | None = "orders", **parameters: Any) -> Output:
        if queue is not None:
            parameters["QueueUrl"] = f"http://127.0.0.1:9440/sqs/000000000000/{queue}"
        return await self._actions.call(self.caller, action, parameters)

    async def refused(self, action: str, queue: str | None = "orders", **parameters: Any) -> str:
        """The code of the error that a call is refused with."""
        try:
            await self(action, queue, **parameters)
        except SqsError as error:
            return error.query_code
        except FastnessError as error:
            return sqs_error(error).query_code
        pytest.fail(f"{action} was not refused")

    async def create(self, queue: str = "orders", **attributes: str) -> None:
        if queue.endswith(".fifo"):
            attributes["FifoQueue"] = "true"
        await self("CreateQueue", None, QueueName=queue, Attributes=attributes)

    async def send(self, body: str, queue: str = "orders", **parameters: Any) -> str:
        sent = await self("SendMessage", queue, MessageBody=body, **parameters)
        id: str = sent["MessageId"]
        return id

    async def receive(self, count: int = 10, queue: str = "orders", **parameters: Any) -> list[Output]:
        found = await self("ReceiveMessage", queue, MaxNumberOfMessages=count, **parameters)
        received: list[Output] = found.get("Messages", [])
        return received

    async def bodies(self, queue: str = "orders", **parameters: Any) -> list[str]:
        return [message["Body"] for message in await self.receive(queue=queue, **parameters)]

    async def attribute(self, name: str, queue: str = "orders") -> str | None:
        found = await self("GetQueueAttributes", queue, AttributeNames=[name])
        value: str | None = found.get("Attributes", {}).get(name)
        return value


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def transport(clock: ManualClock) -> AsyncIterator[AsyncEmbeddedTransport]:
    opened = await open_plane_async("memory:", Options(clock=clock))
    yield opened
    await opened.close()


@pytest.fixture
async def sqs(transport: AsyncEmbeddedTransport) -> Client:
    client = Client(transport)
    await client.create()
    return client


def fifo(group: str = "g", deduplication: str | None = None) -> Output:
    found: Output = {"MessageGroupId": group}
    return found if deduplication is None else {**found, "MessageDeduplicationId": deduplication}


async def test_every_action_of_the_model_is_executed(sqs: Client) -> None:
    assert set(sqs._actions._actions) == set(ACTIONS)


# Sending


async def test_a_message_is_sent_and_received_with_its_digests(sqs: Client) -> None:
    sent = await sqs("SendMessage", MessageBody="hello")
    assert sent["MD5OfMessageBody"] == "5d41402abc4b2a76b9719d911017c592"
    assert "SequenceNumber" not in sent
    [message] = await sqs.receive()
    assert message["MessageId"] == sent["MessageId"]
    assert message["Body"] == "hello"
    assert message["MD5OfBody"] == sent["MD5OfMessageBody"]
    assert set(message) == {"MessageId", "ReceiptHandle", "MD5OfBody", "Body"}


async def test_a_send_is_one_request_besides_cached_settings(sqs: Client) -> None:
    await sqs.send("first")
    sqs.plane.taken()
    await sqs.send("second")
    assert sqs.plane.taken() == ["PutMessages"]


async def test_a_batch_is_one_request_for_what_is_valid(sqs: Client) -> None:
    await sqs.send("first")
    sqs.plane.taken()
    entries = [{"Id": str(i), "MessageBody": f"m{i}"} for i in range(9)]
    entries.append({"Id": "bad", "MessageBody": "\x00"})
    found = await sqs("SendMessageBatch", Entries=entries)
    assert sqs.plane.taken() == ["PutMessages"]
    assert [each["Id"] for each in found["Successful"]] == [str(i) for i in range(9)]
    assert [(each["Id"], each["Code"], each["SenderFault"]) for each in found["Failed"]] == [
        ("bad", "InvalidMessageContents", True)
    ]
    assert await sqs.bodies() == ["first", *[f"m{i}" for i in range(9)]]


async def test_a_batch_without_valid_entries_puts_nothing(sqs: Client) -> None:
    sqs.plane.taken()
    found = await sqs("SendMessageBatch", Entries=[{"Id": "a", "MessageBody": ""}])
    assert found["Successful"] == []
    assert "PutMessages" not in sqs.plane.taken()


async def test_a_number_of_many_digits_fails_its_entry_only(sqs: Client) -> None:
    attribute = {"n": {"DataType": "Number", "StringValue": "1" * 5_000}}
    entries: list[Output] = [{"Id": "good", "MessageBody": "m"}, {"Id": "bad", "MessageBody": "m"}]
    entries[1]["MessageAttributes"] = attribute
    found = await sqs("SendMessageBatch", Entries=entries)
    assert [each["Id"] for each in found["Successful"]] == ["good"]
    assert [(each["Id"], each["Code"]) for each in found["Failed"]] == [("bad", "InvalidParameterValue")]


async def test_a_batch_over_one_mebibyte_is_refused_as_a_whole(sqs: Client) -> None:
    entries = [{"Id": str(i), "MessageBody": "x" * 524_288} for i in range(2)]
    assert len((await sqs("SendMessageBatch", Entries=entries))["Successful"]) == 2
    entries[1]["MessageBody"] += "x"
    code = await sqs.refused("SendMessageBatch", Entries=entries)
    assert code == "AWS.SimpleQueueService.BatchRequestTooLong"


@pytest.mark.parametrize("size", [16_384, 16_385, 1_048_576])
async def test_large_bodies_arrive_as_they_were_sent(sqs: Client, size: int) -> None:
    body = "äx" * (size // 3) + "x" * (size % 3)
    await sqs.send(body)
    assert await sqs.bodies() == [body]
    assert await sqs.refused("SendMessage", MessageBody="x" * 1_048_577) == "InvalidParameterValue"


async def test_a_large_envelope_arrives_as_it_was_sent(sqs: Client) -> None:
    attributes = {"sqs-type.x": {"DataType": "Binary", "BinaryValue": b"\x00" * 300_000}}
    body = "\n" * 700_000
    await sqs.send(body, MessageAttributes=attributes)
    [message] = await sqs.receive(MessageAttributeNames=["All"])
    assert message["Body"] == body
    assert message["MessageAttributes"] == attributes


async def test_a_message_may_be_as_large_as_its_queue_allows(sqs: Client) -> None:
    await sqs("SetQueueAttributes", Attributes={"MaximumMessageSize": "1024"})
    assert await sqs.refused("SendMessage", MessageBody="x" * 1_025) == "InvalidParameterValue"
    await sqs.send("x" * 1_024)


async def test_a_delay_is_that_of_the_message_or_of_the_queue(sqs: Client, clock: ManualClock) -> None:
    await sqs("SetQueueAttributes", Attributes={"DelaySeconds": "10"})
    await sqs.send("at once", DelaySeconds=0)
    await sqs.send("in 10")
    await sqs.send("in 20", DelaySeconds=20)
    assert await sqs.bodies() == ["at once"]
    assert await sqs.attribute("ApproximateNumberOfMessagesDelayed") == "2"
    clock.advance_ms(10_000)
    assert await sqs.bodies() == ["in 10"]
    clock.advance_ms(10_000)
    assert await sqs.bodies() == ["in 20"]


# Receiving


async def test_calls_on_a_queue_that_does_not_exist_are_refused(sqs: Client) -> None:
    missing = "AWS.SimpleQueueService.NonExistentQueue"
    entry = {"Id": "1", "MessageBody": "x", "ReceiptHandle": "x"}
    assert await sqs.refused("SendMessage", "none", MessageBody="x") == missing
    assert await sqs.refused("SendMessageBatch", "none", Entries=[entry]) == missing
    assert await sqs.refused("ReceiveMessage", "none") == missing
    assert await sqs.refused("DeleteMessage", "none", ReceiptHandle="x") == missing
    assert await sqs.refused("DeleteMessageBatch", "none", Entries=[entry]) == missing
    assert await sqs.refused("ChangeMessageVisibility", "none", ReceiptHandle="x", VisibilityTimeout=1) == missing
    assert await sqs.refused("GetQueueAttributes", "none", AttributeNames=["All"]) == missing
    assert await sqs.refused("SetQueueAttributes", "none", Attributes={}) == missing
    assert await sqs.refused("PurgeQueue", "none") == missing
    assert await sqs.refused("DeleteQueue", "none") == missing
    assert await sqs.refused("ListQueueTags", "none") == missing
    assert await sqs.refused("GetQueueUrl", None, QueueName="none") == missing
    assert await sqs.refused("GetQueueUrl", None, QueueName="no name!") == missing
    assert await sqs.refused("ListDeadLetterSourceQueues", "none") == missing


async def test_a_queue_that_another_node_deleted_is_gone_although_its_settings_are_cached(sqs: Client) -> None:
    await sqs.send("x")
    other = Client(sqs.plane._transport)
    await other("DeleteQueue")
    assert await sqs.refused("SendMessage", MessageBody="y") == "AWS.SimpleQueueService.NonExistentQueue"
    assert await sqs.refused("ReceiveMessage") == "AWS.SimpleQueueService.NonExistentQueue"


async def test_system_attributes_are_returned_if_they_are_asked_for(sqs: Client, clock: ManualClock) -> None:
    header = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd862e3fe1be46a994272793"}}
    sent_ms = clock.now_ms()
    await sqs.send("x", MessageSystemAttributes=header, MessageGroupId="tenant/1")
    clock.advance_ms(1_000)
    [message] = await sqs.receive(MessageSystemAttributeNames=["All"], VisibilityTimeout=1)
    assert message["Attributes"] == {
        "SenderId": "000000000000",
        "SentTimestamp": str(sent_ms),
        "ApproximateReceiveCount": "1",
        "ApproximateFirstReceiveTimestamp": str(sent_ms + 1_000),
        "AWSTraceHeader": "Root=1-5759e988-bd862e3fe1be46a994272793",
        "MessageGroupId": "tenant/1",
    }
    for count in ("2", "3"):
        clock.advance_ms(1_000)
        [message] = await sqs.receive(
            AttributeNames=["ApproximateReceiveCount", "ApproximateFirstReceiveTimestamp"], VisibilityTimeout=1
        )
        assert message["Attributes"] == {
            "ApproximateReceiveCount": count,
            "ApproximateFirstReceiveTimestamp": str(sent_ms + 1_000),
        }
    assert await sqs.refused("ReceiveMessage", AttributeNames=["Unknown"]) == "InvalidAttributeName"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["All"], {"bar.one", "bar.two", "foo"}),
        ([".*"], {"bar.one", "bar.two", "foo"}),
        (["*"], {"bar.one", "bar.two", "foo"}),
        (["bar.*"], {"bar.one", "bar.two"}),
        (["foo", "absent"], {"foo"}),
        (["absent"], set()),
        ([], set()),
    ],
)
async def test_message_attributes_are_filtered_by_their_names(sqs: Client, names: list[str], found: set[str]) -> None:
    given = {name: {"DataType": "String", "StringValue": name} for name in ("bar.one", "bar.two", "foo")}
    sent = await sqs("SendMessage", MessageBody="x", MessageAttributes=given)
    [message] = await sqs.receive(MessageAttributeNames=names)
    assert set(message.get("MessageAttributes", {})) == found
    assert ("MD5OfMessageAttributes" in message) == bool(found)
    is_same = message.get("MD5OfMessageAttributes") == sent["MD5OfMessageAttributes"]
    assert is_same == (len(found) == 3)  # The digest is that of the attributes which are returned.


@pytest.mark.parametrize(
    "parameters",
    [
        {"MaxNumberOfMessages": 0},
        {"MaxNumberOfMessages": 11},
        {"WaitTimeSeconds": -1},
        {"WaitTimeSeconds": 21},
        {"VisibilityTimeout": -1},
        {"VisibilityTimeout": 43_201},
        {"ReceiveRequestAttemptId": "only for FIFO queues"},
    ],
)
async def test_invalid_parameters_of_a_receive_are_refused(sqs: Client, parameters: Output) -> None:
    assert await sqs.refused("ReceiveMessage", **parameters) == "InvalidParameterValue"


async def test_a_message_is_hidden_for_its_visibility_timeout(sqs: Client, clock: ManualClock) -> None:
    await sqs.send("x")
    assert await sqs.bodies(VisibilityTimeout=10) == ["x"]
    assert await sqs.attribute("ApproximateNumberOfMessagesNotVisible") == "1"
    clock.advance_ms(9_999)
    assert await sqs.bodies() == []
    clock.advance_ms(1)
    assert await sqs.bodies() == ["x"]


async def test_the_visibility_timeout_of_the_queue_applies_to_messages_that_are_stored(
    sqs: Client, clock: ManualClock
) -> None:
    await sqs.send("x")
    await sqs("SetQueueAttributes", Attributes={"VisibilityTimeout": "5"})
    assert await sqs.bodies() == ["x"]
    clock.advance_ms(5_000)
    assert await sqs.bodies() == ["x"]


@pytest.mark.parametrize("by_queue", [True, False])
async def test_a_message_received_with_no_timeout_can_be_received_again_at_once(sqs: Client, by_queue: bool) -> None:
    await sqs.send("x")
    if by_queue:
        await sqs("SetQueueAttributes", Attributes={"VisibilityTimeout": "0"})
    options: dict[str, Any] = {} if by_queue else {"VisibilityTimeout": 0}
    assert await sqs.bodies(**options) == ["x"]
    [again] = await sqs.receive(**options, AttributeNames=["ApproximateReceiveCount"])
    assert again["Attributes"] == {"ApproximateReceiveCount": "2"}
    await sqs("DeleteMessage", ReceiptHandle=again["ReceiptHandle"])
    assert await sqs.bodies() == []


async def test_a_receive_waits_as_long_as_the_call_or_the_queue_says(sqs: Client, clock: ManualClock) -> None:
    waiting = asyncio.create_task(sqs.bodies(WaitTimeSeconds=20))
    await asyncio.sleep(0.05)
    await sqs.send("x")
    assert await waiting == ["x"]
    await sqs("SetQueueAttributes", Attributes={"ReceiveMessageWaitTimeSeconds": "10"})
    waiting = asyncio.create_task(sqs.bodies())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    clock.advance_ms(10_000)
    assert await waiting == []
    assert await sqs.bodies(WaitTimeSeconds=0) == []


async def test_a_waiting_receive_ends_when_its_queue_is_deleted(sqs: Client) -> None:
    waiting = asyncio.create_task(sqs.refused("ReceiveMessage", WaitTimeSeconds=20))
    await asyncio.sleep(0.05)
    await sqs("DeleteQueue")
    async with asyncio.timeout(5):
        assert await waiting == "AWS.SimpleQueueService.NonExistentQueue"


async def test_a_cancelled_receive_leaves_its_messages_to_others(sqs: Client) -> None:
    waiting = asyncio.create_task(sqs.receive(WaitTimeSeconds=20))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await sqs.send("x")
    assert await sqs.bodies() == ["x"]


# Deleting


async def test_a_deleted_message_is_gone_and_deleting_it_again_is_no_error(sqs: Client, clock: ManualClock) -> None:
    await sqs.send("x")
    [message] = await sqs.receive()
    await sqs("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])
    await sqs("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])
    clock.advance_ms(3_600_000)
    await sqs("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])
    assert await sqs.bodies() == []


async def test_a_message_of_a_standard_queue_can_be_deleted_after_its_timeout(
    sqs: Client, clock: ManualClock, transport: AsyncEmbeddedTransport
) -> None:
    await sqs.send("x")
    [message] = await sqs.receive()
    clock.advance_ms(60_000)
    await transport.call(PutMessages("orders", [NewMessage(b"urgent", priority=9)]))
    assert [each["Body"] for each in await sqs.receive(1)] == ["urgent"]  # This has made the other one visible.
    assert await sqs.attribute("ApproximateNumberOfMessages") == "1"
    await sqs("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])
    assert await sqs.bodies() == []


async def test_an_old_handle_deletes_nothing(sqs: Client, clock: ManualClock) -> None:
    await sqs.send("x")
    [old] = await sqs.receive()
    clock.advance_ms(30_000)
    [new] = await sqs.receive()
    await sqs("DeleteMessage", ReceiptHandle=old["ReceiptHandle"])
    assert await sqs.attribute("ApproximateNumberOfMessagesNotVisible") == "1"
    await sqs("DeleteMessage", ReceiptHandle=new["ReceiptHandle"])
    assert await sqs.attribute("ApproximateNumberOfMessagesNotVisible") == "0"


async def test_a_batch_of_deletes_is_one_request(sqs: Client) -> None:
    await sqs("SendMessageBatch", Entries=[{"Id": str(i), "MessageBody": str(i)} for i in range(10)])
    received = await sqs.receive()
    entries = [{"Id": str(i), "ReceiptHandle": each["ReceiptHandle"]} for i, each in enumerate(received)]
    entries[3]["ReceiptHandle"] = "wrong"
    sqs.plane.taken()
    found = await sqs("DeleteMessageBatch", Entries=entries)
    assert sqs.plane.taken() == ["AckMessages"]
    assert [each["Id"] for each in found["Successful"]] == ["0", "1", "2", "4", "5", "6", "7", "8", "9"]
    assert [(each["Id"], each["Code"]) for each in found["Failed"]] == [("3", "ReceiptHandleIsInvalid")]
    assert await sqs.attribute("ApproximateNumberOfMessagesNotVisible") == "1"


async def test_a_handle_of_another_queue_is_refused(sqs: Client) -> None:
    await sqs.create("other")
    await sqs.send("x")
    [message] = await sqs.receive()
    handle = message["ReceiptHandle"]
    assert await sqs.refused("DeleteMessage", "other", ReceiptHandle=handle) == "ReceiptHandleIsInvalid"
    assert (
        await sqs.refused("ChangeMessageVisibility", "other", ReceiptHandle=handle, VisibilityTimeout=1)
        == "ReceiptHandleIsInvalid"
    )


# Visibility


async def test_visibility_can_be_longer_or_shorter_and_end_at_once(sqs: Client, clock: ManualClock) -> None:
    await sqs.send("x")

    async def change(message: Output, seconds: int) -> None:
        await sqs("ChangeMessageVisibility", ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=seconds)

    [message] = await sqs.receive()
    await change(message, 100)
    clock.advance_ms(99_000)
    assert await sqs.bodies() == []
    clock.advance_ms(1_000)
    [message] = await sqs.receive()
    await change(message, 5)
    clock.advance_ms(5_000)
    [message] = await sqs.receive()
    await change(message, 0)
    assert await sqs.bodies() == ["x"]


@pytest.mark.parametrize("queue", ["orders", "o.fifo"])
async def test_a_message_that_is_visible_again_can_be_hidden_by_its_old_handle(
    ordered: Client, clock: ManualClock, queue: str
) -> None:
    await ordered.send("x", queue, **(fifo("a", "1") if queue == "o.fifo" else {}))
    [message] = await ordered.receive(queue=queue, VisibilityTimeout=1)
    clock.advance_ms(1_000)
    handle = message["ReceiptHandle"]
    await ordered("ChangeMessageVisibility", queue, ReceiptHandle=handle, VisibilityTimeout=10)
    assert await ordered.attribute("ApproximateNumberOfMessagesNotVisible", queue) == "1"
    clock.advance_ms(9_999)
    assert await ordered.bodies(queue) == []
    await ordered("DeleteMessage", queue, ReceiptHandle=handle)
    clock.advance_ms(1)
    assert await ordered.bodies(queue) == []


async def test_a_message_that_was_received_again_keeps_its_timeout_from_an_older_handle(
    sqs: Client, clock: ManualClock
) -> None:
    await sqs.send("x")
    [message] = await sqs.receive(VisibilityTimeout=1)
    clock.advance_ms(1_000)
    [again] = await sqs.receive(VisibilityTimeout=10)
    for seconds in (0, 100):
        handle = message["ReceiptHandle"]
        await sqs("ChangeMessageVisibility", ReceiptHandle=handle, VisibilityTimeout=seconds)
        found = await sqs(
            "ChangeMessageVisibilityBatch",
            Entries=[{"Id": "1", "ReceiptHandle": handle, "VisibilityTimeout": seconds}],
        )
        assert found == {"Successful": [{"Id": "1"}], "Failed": []}
    assert await sqs.bodies() == []
    clock.advance_ms(10_000)
    assert await sqs.bodies() == ["x"]
    assert again["MessageId"] == message["MessageId"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_the_visibility_of_a_deleted_message_cannot_change(
    sqs: Client, clock: ManualClock, is_late: bool
) -> None:
    await sqs.send("x")
    [message] = await sqs.receive(VisibilityTimeout=1)
    clock.advance_ms(1_000)
    [again] = await sqs.receive(VisibilityTimeout=1)
    await sqs("DeleteMessage", ReceiptHandle=again["ReceiptHandle"])
    clock.advance_ms(600_000 if is_late else 0)
    for each in (message, again):
        with pytest.raises(SqsError) as caught:
            await sqs("ChangeMessageVisibility", ReceiptHandle=each["ReceiptHandle"], VisibilityTimeout=10)
        assert caught.value.query_code == "InvalidParameterValue"
        assert caught.value.message == (
            f"Value {each['ReceiptHandle']} for parameter ReceiptHandle is invalid. Reason: Message does not exist or "
            "is not available for visibility timeout change."
        )


@pytest.mark.parametrize("seconds", [0, 100], ids=["visible again", "in flight"])
async def test_the_visibility_of_a_message_that_is_too_old_cannot_change(
    sqs: Client, clock: ManualClock, seconds: int
) -> None:
    """Also before the message is removed, and with each of its handles."""
    await sqs("SetQueueAttributes", Attributes={"MessageRetentionPeriod": "60"})
    await sqs.send("x")
    handles = [(await sqs.receive(VisibilityTimeout=0))[0]["ReceiptHandle"] for _ in range(2)]
    clock.advance_ms(59_999)
    for handle in handles:
        await sqs("ChangeMessageVisibility", ReceiptHandle=handle, VisibilityTimeout=seconds)
    clock.advance_ms(1)
    for handle in handles:
        code = await sqs.refused("ChangeMessageVisibility", ReceiptHandle=handle, VisibilityTimeout=seconds)
        assert code == "InvalidParameterValue"


async def test_a_message_is_hidden_for_twelve_hours_in_all(sqs: Client, clock: ManualClock) -> None:
    await sqs.send("x")
    [message] = await sqs.receive(VisibilityTimeout=43_200)
    handle = message["ReceiptHandle"]
    await sqs("ChangeMessageVisibility", ReceiptHandle=handle, VisibilityTimeout=43_200)
    clock.advance_ms(3_600_000)
    code = await sqs.refused("ChangeMessageVisibility", ReceiptHandle=handle, VisibilityTimeout=39_601)
    assert code == "InvalidParameterValue"
    await sqs("ChangeMessageVisibility", ReceiptHandle=handle, VisibilityTimeout=39_600)


async def test_a_batch_of_visibility_changes_is_one_request(sqs: Client) -> None:
    for body in ("a", "b", "c"):
        await sqs.send(body)
    received = await sqs.receive()
    entries = [
        {"Id": str(i), "ReceiptHandle": each["ReceiptHandle"], "VisibilityTimeout": seconds}
        for i, (each, seconds) in enumerate(zip(received, (0, 43_201, 0), strict=True))
    ]
    del entries[2]["VisibilityTimeout"]
    entries.append({"Id": "3", "ReceiptHandle": "wrong", "VisibilityTimeout": 1})
    sqs.plane.taken()
    found = await sqs("ChangeMessageVisibilityBatch", Entries=entries)
    assert sqs.plane.taken() == ["ChangeVisibility"]
    assert [each["Id"] for each in found["Successful"]] == ["0"]
    assert [(each["Id"], each["Code"]) for each in found["Failed"]] == [
        ("1", "InvalidParameterValue"),
        ("2", "MissingParameter"),
        ("3", "ReceiptHandleIsInvalid"),
    ]
    assert await sqs.bodies() == ["a"]


# FIFO queues


@pytest.fixture
async def ordered(sqs: Client) -> Client:
    await sqs.create("o.fifo")
    return sqs


async def test_messages_of_a_group_are_received_together_in_order(ordered: Client) -> None:
    numbers = []
    for i in range(3):
        sent = await ordered("SendMessage", "o.fifo", MessageBody=f"a{i}", **fifo("a", f"a{i}"))
        numbers.append(sent["SequenceNumber"])
    await ordered.send("b0", "o.fifo", **fifo("b", "b0"))
    assert numbers == sorted(numbers)
    found = await ordered.receive(2, "o.fifo", AttributeNames=["All"])
    assert [each["Body"] for each in found] == ["a0", "a1"]
    assert [each["Attributes"]["SequenceNumber"] for each in found] == numbers[:2]
    assert found[0]["Attributes"]["MessageGroupId"] == "a"
    assert found[0]["Attributes"]["MessageDeduplicationId"] == "a0"
    assert await ordered.bodies("o.fifo") == ["b0"]  # The group is locked until both are settled.
    for message in found:
        await ordered("DeleteMessage", "o.fifo", ReceiptHandle=message["ReceiptHandle"])
    assert await ordered.bodies("o.fifo") == ["a2"]


async def test_a_message_made_visible_is_received_while_a_later_one_of_its_group_is_in_flight(ordered: Client) -> None:
    for i in range(3):
        await ordered.send(f"m{i}", "o.fifo", **fifo("a", f"m{i}"))
    first, second = await ordered.receive(2, "o.fifo")
    await ordered("ChangeMessageVisibility", "o.fifo", ReceiptHandle=first["ReceiptHandle"], VisibilityTimeout=0)
    [again] = await ordered.receive(queue="o.fifo")
    assert again["Body"] == "m0"
    await ordered("DeleteMessage", "o.fifo", ReceiptHandle=again["ReceiptHandle"])
    assert await ordered.bodies("o.fifo") == []
    await ordered("DeleteMessage", "o.fifo", ReceiptHandle=second["ReceiptHandle"])
    assert await ordered.bodies("o.fifo") == ["m2"]


NO_DEDUPLICATION = (
    "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided explicitly"
)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"MessageDeduplicationId": "2"}, "The request must contain the parameter MessageGroupId."),
        ({"MessageGroupId": "a"}, NO_DEDUPLICATION),
    ],
)
async def test_a_batch_with_an_entry_that_has_no_order_fails_as_a_whole(
    ordered: Client, entry: Output, message: str
) -> None:
    entries = [
        {"Id": "1", "MessageBody": "one", **fifo("a", "1")},
        {"Id": "2", "MessageBody": "two", **entry},
    ]
    with pytest.raises(SqsError) as caught:
        await ordered("SendMessageBatch", "o.fifo", Entries=entries)
    assert (caught.value.query_code, caught.value.message) == ("InvalidParameterValue", message)
    assert await ordered.bodies("o.fifo") == []


async def test_a_message_that_is_sent_again_after_a_purge_is_delivered(ordered: Client) -> None:
    await ordered.send("before", "o.fifo", **fifo("a", "id"))
    await ordered("PurgeQueue", "o.fifo")
    await ordered.send("after", "o.fifo", **fifo("a", "id"))
    assert await ordered.bodies("o.fifo") == ["after"]


async def test_group_ids_with_any_punctuation_keep_their_order(ordered: Client) -> None:
    group = "tenant/1 and 2".replace(" ", "~")
    for i in range(2):
        await ordered.send(str(i), "o.fifo", **fifo(group, str(i)))
    found = await ordered.receive(1, "o.fifo", AttributeNames=["MessageGroupId"])
    assert found[0]["Attributes"] == {"MessageGroupId": group}
    assert await ordered.bodies("o.fifo") == []


async def test_a_duplicate_is_accepted_and_not_delivered(ordered: Client, clock: ManualClock) -> None:
    first = await ordered("SendMessage", "o.fifo", MessageBody="x", **fifo("a", "id"))
    again = await ordered("SendMessage", "o.fifo", MessageBody="y", **fifo("b", "id"))
    assert (again["MessageId"], again["SequenceNumber"]) == (first["MessageId"], first["SequenceNumber"])
    [message] = await ordered.receive(queue="o.fifo")
    await ordered("DeleteMessage", "o.fifo", ReceiptHandle=message["ReceiptHandle"])
    await ordered.send("z", "o.fifo", **fifo("a", "id"))
    assert await ordered.bodies("o.fifo") == []  # Known for five minutes, also after the message is deleted.
    clock.advance_ms(300_000)
    await ordered.send("z", "o.fifo", **fifo("a", "id"))
    assert await ordered.bodies("o.fifo") == ["z"]


async def test_deduplication_follows_the_attributes_of_the_queue(sqs: Client) -> None:
    attributes = {"ContentBasedDeduplication": "true", "DeduplicationScope": "messageGroup"}
    await sqs.create("c.fifo", **attributes)
    for group in ("a", "a", "b"):
        await sqs.send("same", "c.fifo", **fifo(group))
    assert await sqs.bodies("c.fifo") == ["same", "same"]


async def test_an_expired_handle_of_a_fifo_queue_is_refused(
    ordered: Client, clock: ManualClock, transport: AsyncEmbeddedTransport
) -> None:
    """Also before its message is received again, unlike one of a standard queue."""
    await ordered.send("x", "o.fifo", **fifo("a", "1"))
    [message] = await ordered.receive(queue="o.fifo")
    clock.advance_ms(30_000)
    await transport.call(PutMessages("o.fifo", [NewMessage(b"urgent", group="b", priority=9)]))
    for visible in ("urgent", "x"):
        assert [each["Body"] for each in await ordered.receive(1, "o.fifo")] == [visible]
        code = await ordered.refused("DeleteMessage", "o.fifo", ReceiptHandle=message["ReceiptHandle"])
        assert code == "InvalidParameterValue"


async def test_a_receive_with_the_same_attempt_id_returns_the_same_messages(
    ordered: Client, clock: ManualClock
) -> None:
    for i in range(3):
        await ordered.send(str(i), "o.fifo", **fifo("a", str(i)))
    attempt = {"ReceiveRequestAttemptId": "attempt-1"}
    first = await ordered.receive(2, "o.fifo", **attempt)
    clock.advance_ms(20_000)
    again = await ordered.receive(2, "o.fifo", **attempt)
    assert [each["ReceiptHandle"] for each in again] == [each["ReceiptHandle"] for each in first]
    clock.advance_ms(20_000)  # The second call has hidden them for the whole time again.
    assert await ordered.bodies("o.fifo", ReceiveRequestAttemptId="attempt-2") == []
    for message in first:
        await ordered("DeleteMessage", "o.fifo", ReceiptHandle=message["ReceiptHandle"])
    assert [each["Body"] for each in await ordered.receive(2, "o.fifo", **attempt)] == ["2"]
    assert await ordered.refused("ReceiveMessage", "o.fifo", ReceiveRequestAttemptId="a b") == "InvalidParameterValue"


async def test_an_attempt_id_of_an_empty_queue_returns_what_comes_later(ordered: Client) -> None:
    attempt: dict[str, Any] = {"ReceiveRequestAttemptId": "attempt"}
    assert await ordered.receive(queue="o.fifo", **attempt) == []
    await ordered.send("x", "o.fifo", **fifo("a", "1"))
    assert await ordered.bodies("o.fifo", **attempt) == ["x"]


# Queues


async def test_queues_are_listed_by_prefix_and_in_pages(sqs: Client) -> None:
    for name in ("alpha", "order-a", "order-b"):
        await sqs.create(name)
    found = await sqs("ListQueues", None, QueueNamePrefix="order")
    assert [url.rpartition("/")[2] for url in found["QueueUrls"]] == ["order-a", "order-b", "orders"]
    assert "NextToken" not in found
    names: list[str] = []
    token: Output = {}
    for _ in range(4):
        page = await sqs("ListQueues", None, MaxResults=2, **token)
        names += [url.rpartition("/")[2] for url in page.get("QueueUrls", [])]
        if "NextToken" not in page:
            break
        token = {"NextToken": page["NextToken"]}
    assert names == ["alpha", "order-a", "order-b", "orders"]
    assert await sqs("ListQueues", None, QueueNamePrefix="zzz") == {}
    assert await sqs("ListQueues", None, QueueNamePrefix="no name!") == {}
    assert await sqs.refused("ListQueues", None, MaxResults=1_001) == "InvalidParameterValue"
    assert await sqs.refused("ListQueues", None, NextToken="*") == "InvalidParameterValue"


@pytest.mark.parametrize("name", ["a b", "", "a.b", "x" * 81, "x" * 300, "ä", ".fifo"])
async def test_a_name_that_sqs_does_not_allow_is_refused_in_its_words(sqs: Client, name: str) -> None:
    with pytest.raises(FastnessError) as caught:
        await sqs("CreateQueue", None, QueueName=name)
    error = sqs_error(caught.value)
    assert error.query_code == "InvalidParameterValue"
    assert "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length" in error.message


async def test_a_queue_url_is_found_by_its_name(sqs: Client) -> None:
    found = await sqs("GetQueueUrl", None, QueueName="orders")
    assert found == {"QueueUrl": "http://127.0.0.1:9440/sqs/000000000000/orders"}
    other = {"QueueName": "orders", "QueueOwnerAWSAccountId": "111111111111"}
    assert await sqs.refused("GetQueueUrl", None, **other) == "AWS.SimpleQueueService.NonExistentQueue"


async def test_attributes_are_returned_as_asked(sqs: Client) -> None:
    assert await sqs("GetQueueAttributes") == {}
    found = (await sqs("GetQueueAttributes", AttributeNames=["QueueArn", "VisibilityTimeout"]))["Attributes"]
    assert found == {"QueueArn": "arn:aws:sqs:us-east-1:000000000000:orders", "VisibilityTimeout": "30"}
    everything = (await sqs("GetQueueAttributes", AttributeNames=["All"]))["Attributes"]
    assert found.items() < everything.items()
    assert await sqs.refused("GetQueueAttributes", AttributeNames=["Color"]) == "InvalidAttributeName"


async def test_wrong_attributes_are_refused_by_their_codes(sqs: Client) -> None:
    assert await sqs.refused("SetQueueAttributes", Attributes={"Color": "red"}) == "InvalidAttributeName"
    assert await sqs.refused("SetQueueAttributes", Attributes={"DelaySeconds": "901"}) == "InvalidAttributeValue"
    changed = {"QueueName": "orders", "Attributes": {"DelaySeconds": "1"}}
    assert await sqs.refused("CreateQueue", None, **changed) == "QueueAlreadyExists"


async def test_a_change_of_attributes_applies_to_the_next_call(sqs: Client) -> None:
    await sqs.create("c.fifo")
    code = await sqs.refused("SendMessage", "c.fifo", MessageBody="x", MessageGroupId="g")
    assert code == "InvalidParameterValue"
    await sqs("SetQueueAttributes", "c.fifo", Attributes={"ContentBasedDeduplication": "true"})
    await sqs.send("x", "c.fifo", MessageGroupId="g")


async def test_settings_are_read_again_after_a_second_or_a_change(transport: AsyncEmbeddedTransport) -> None:
    await Client(transport).create()
    plane, now = Recorded(transport), [0.0]
    cache = SettingsCache(plane, lambda: now[0])
    assert (await cache.get(UNIVERSE, "orders")).visibility_seconds == 30
    await transport.call(SetSqsAttributes("orders", {"VisibilityTimeout": "7"}))
    now[0] = 0.999
    assert (await cache.get(UNIVERSE, "orders")).visibility_seconds == 30
    assert len(plane.requests) == 1
    now[0] = 1.0
    assert (await cache.get(UNIVERSE, "orders")).visibility_seconds == 7
    await transport.call(SetSqsAttributes("orders", {"VisibilityTimeout": "8"}))
    cache.forget(UNIVERSE, "orders")
    assert (await cache.get(UNIVERSE, "orders")).visibility_seconds == 8
    assert plane.requests[-1] == GetSqsSettings("orders")


async def test_a_purge_takes_messages_in_flight_too_and_waits_a_minute(sqs: Client, clock: ManualClock) -> None:
    await sqs.send("a")
    await sqs.send("b")
    [message] = await sqs.receive(1)
    await sqs("PurgeQueue")
    clock.advance_ms(30_000)
    assert await sqs.bodies() == []
    await sqs("DeleteMessage", ReceiptHandle=message["ReceiptHandle"])
    assert await sqs.refused("PurgeQueue") == "AWS.SimpleQueueService.PurgeQueueInProgress"
    clock.advance_ms(30_000)
    await sqs("PurgeQueue")


async def test_the_name_of_a_deleted_queue_is_free_after_a_minute(sqs: Client, clock: ManualClock) -> None:
    await sqs.send("x")
    await sqs("DeleteQueue")
    assert await sqs.refused("CreateQueue", None, QueueName="orders") == "AWS.SimpleQueueService.QueueDeletedRecently"
    clock.advance_ms(60_000)
    await sqs.create()
    assert await sqs.bodies() == []


async def test_tags_are_added_listed_and_removed(sqs: Client) -> None:
    assert await sqs("ListQueueTags") == {}
    await sqs("TagQueue", Tags={"team": "a", "cost": "1"})
    await sqs("TagQueue", Tags={"cost": "2"})
    await sqs("UntagQueue", TagKeys=["team", "absent"])
    assert await sqs("ListQueueTags") == {"Tags": {"cost": "2"}}


async def test_permissions_are_statements_of_the_policy(sqs: Client) -> None:
    permission: dict[str, Any] = {"AWSAccountIds": ["123456789012"], "Actions": ["SendMessage"]}
    await sqs("AddPermission", Label="first", **permission)
    await sqs("AddPermission", Label="second", AWSAccountIds=["123456789012"], Actions=["*"])
    policy = json.loads(await sqs.attribute("Policy") or "")
    assert [each["Sid"] for each in policy["Statement"]] == ["first", "second"]
    assert policy["Statement"][0] == {
        "Sid": "first",
        "Effect": "Allow",
        "Principal": {"AWS": ["arn:aws:iam::123456789012:root"]},
        "Action": ["SQS:SendMessage"],
        "Resource": "arn:aws:sqs:us-east-1:000000000000:orders",
    }
    assert await sqs.refused("AddPermission", Label="first", **permission) == "InvalidParameterValue"
    await sqs("RemovePermission", Label="first")
    assert await sqs.refused("RemovePermission", Label="first") == "InvalidParameterValue"
    await sqs("RemovePermission", Label="second")
    assert not await sqs.attribute("Policy")


async def test_permissions_that_change_at_the_same_time_are_all_kept(sqs: Client) -> None:
    labels = list("abcdefghijkl")
    permission: dict[str, Any] = {"AWSAccountIds": ["123456789012"], "Actions": ["SendMessage"]}
    await asyncio.gather(*[sqs("AddPermission", Label=label, **permission) for label in labels])
    assert sorted(await statements(sqs)) == sorted(labels)
    await asyncio.gather(*[sqs("RemovePermission", Label=label) for label in labels[3:]])
    assert sorted(await statements(sqs)) == labels[:3]


async def statements(sqs: Client) -> list[str]:
    policy = json.loads(await sqs.attribute("Policy") or "{}")
    return [each["Sid"] for each in policy["Statement"]]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"Label": "a b"}, "InvalidParameterValue"),
        ({"AWSAccountIds": []}, "InvalidParameterValue"),
        ({"AWSAccountIds": ["me"]}, "InvalidParameterValue"),
        ({"Actions": []}, "MissingParameter"),
        ({"Actions": ["Unknown"]}, "InvalidParameterValue"),
        ({"Actions": ["SendMessage"] * 8}, "OverLimit"),
    ],
)
async def test_wrong_permissions_are_refused(sqs: Client, wrong: Output, code: str) -> None:
    permission: dict[str, Any] = {"Label": "a", "AWSAccountIds": ["123456789012"], "Actions": ["SendMessage"], **wrong}
    assert await sqs.refused("AddPermission", **permission) == code


async def test_a_policy_has_at_most_twenty_statements(sqs: Client) -> None:
    statements = [{"Sid": str(i)} for i in range(20)]
    await sqs("SetQueueAttributes", Attributes={"Policy": json.dumps({"Statement": statements})})
    permission: dict[str, Any] = {"Label": "a", "AWSAccountIds": ["123456789012"], "Actions": ["SendMessage"]}
    assert await sqs.refused("AddPermission", **permission) == "OverLimit"
    await sqs("RemovePermission", Label="7")
    await sqs("AddPermission", **permission)


@pytest.mark.parametrize("name", ["straße", "größe.l", "名前", "a-b_c.d"])
async def test_names_of_message_attributes_have_letters_of_any_language(sqs: Client, name: str) -> None:
    await sqs("SendMessage", MessageBody="x", MessageAttributes={name: {"DataType": "String", "StringValue": "v"}})
    [message] = await sqs.receive(MessageAttributeNames=[name])
    assert message["MessageAttributes"] == {name: {"DataType": "String", "StringValue": "v"}}


async def test_control_characters_in_an_attribute_are_an_invalid_parameter(sqs: Client) -> None:
    given = {"name": {"DataType": "String", "StringValue": "\x08"}}
    assert await sqs.refused("SendMessage", MessageBody="x", MessageAttributes=given) == "InvalidParameterValue"
    assert await sqs.refused("SendMessage", MessageBody="\x08") == "InvalidMessageContents"


async def test_the_trace_header_of_a_request_becomes_that_of_its_messages(sqs: Client) -> None:
    header, own = "Root=1-3152b799-8954dae64eda91bc9a23a7e8;Sampled=1", "Root=1-5759e988-bd862e3fe1be46a994272793"
    sqs.caller = msgspec.structs.replace(sqs.caller, trace=header)
    sent = await sqs("SendMessage", MessageBody="x")
    assert "MD5OfMessageSystemAttributes" not in sent  # The client has sent none.
    system = {"AWSTraceHeader": {"DataType": "String", "StringValue": own}}
    entries = [{"Id": "1", "MessageBody": "y"}, {"Id": "2", "MessageBody": "z", "MessageSystemAttributes": system}]
    await sqs("SendMessageBatch", Entries=entries)
    sqs.caller = msgspec.structs.replace(sqs.caller, trace="a" * 2_000)  # Proxies send it: it is left out.
    await sqs.send("too long")
    found = await sqs.receive(MessageSystemAttributeNames=["AWSTraceHeader"])
    assert [each["Attributes"] for each in found] == [
        {"AWSTraceHeader": header},
        {"AWSTraceHeader": header},
        {"AWSTraceHeader": own},
        {},
    ]


async def test_attributes_may_be_the_texts_of_python_booleans(sqs: Client) -> None:
    attributes = {"FifoQueue": "True", "ContentBasedDeduplication": "True"}
    await sqs("CreateQueue", None, QueueName="c.fifo", Attributes=attributes)
    assert await sqs.attribute("ContentBasedDeduplication", "c.fifo") == "true"
    await sqs("SetQueueAttributes", "c.fifo", Attributes={"ContentBasedDeduplication": "False", "FifoQueue": "True"})
    assert await sqs.attribute("ContentBasedDeduplication", "c.fifo") == "false"


# What AWS answers, word for word, where programs look at it.

_FIFO_NAME = (
    "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end with .fifo "
    "suffix and be 1 to 80 in length"
)
_ENCRYPTION = (
    "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE or SQS SSE."
)
_STANDARD_NAME = "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length"


@pytest.mark.parametrize(
    ("name", "attributes", "code", "message"),
    [
        ("x", {"FifoQueue": "false"}, "InvalidAttributeName", "Unknown Attribute FifoQueue."),
        ("x", {"FifoQueue": "true"}, "InvalidParameterValue", _FIFO_NAME),
        ("x.fifo", {}, "InvalidParameterValue", _STANDARD_NAME),
        ("x y", {}, "InvalidParameterValue", _STANDARD_NAME),
        (
            "x",
            {"ContentBasedDeduplication": "true"},
            "InvalidAttributeName",
            "Unknown Attribute ContentBasedDeduplication.",
        ),
        (
            "x",
            {"DeduplicationScope": "queue"},
            "InvalidAttributeName",
            "You can specify the DeduplicationScope only when FifoQueue is set to true.",
        ),
        ("x", {"KmsMasterKeyId": "key", "SqsManagedSseEnabled": "true"}, "InvalidAttributeName", _ENCRYPTION),
        ("x", {"DelaySeconds": "901"}, "InvalidAttributeValue", "Invalid value for the parameter DelaySeconds."),
        (
            "orders",
            {"DelaySeconds": "1"},
            "QueueAlreadyExists",
            "A queue already exists with the same name and a different value for attribute DelaySeconds",
        ),
    ],
)
async def test_a_queue_that_cannot_be_created_is_refused_as_aws_does(
    sqs: Client, name: str, attributes: dict[str, str], code: str, message: str
) -> None:
    with pytest.raises(FastnessError) as caught:
        await sqs("CreateQueue", None, QueueName=name, Attributes=attributes)
    error = sqs_error(caught.value)
    assert (error.query_code, error.message) == (code, message)


@pytest.mark.parametrize(
    ("queue", "value", "code", "message"),
    [
        ("orders", "true", "InvalidAttributeName", "Unknown Attribute FifoQueue."),
        ("orders", "false", "InvalidAttributeName", "Unknown Attribute FifoQueue."),
        (
            "o.fifo",
            "false",
            "InvalidAttributeValue",
            "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported.",
        ),
    ],
)
async def test_the_type_of_a_queue_cannot_change(
    ordered: Client, queue: str, value: str, code: str, message: str
) -> None:
    with pytest.raises(FastnessError) as caught:
        await ordered("SetQueueAttributes", queue, Attributes={"FifoQueue": value})
    error = sqs_error(caught.value)
    assert (error.query_code, error.message, error.hint) == (code, message, "")


# Dead letters


def redrive_policy(target: str = "dead", count: int = 2) -> str:
    arn = f"arn:aws:sqs:us-east-1:000000000000:{target}"
    return json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": count})


@pytest.fixture
async def failing(sqs: Client, clock: ManualClock) -> Client:
    """`orders` has the dead-letter queue `dead`, which has one message of it."""
    await sqs.create("dead")
    await sqs("SetQueueAttributes", Attributes={"RedrivePolicy": redrive_policy()})
    await sqs.send("poison")
    for _ in range(2):
        assert await sqs.bodies() == ["poison"]
        clock.advance_ms(30_000)
    assert await sqs.bodies() == []
    return sqs


async def test_a_message_that_is_received_too_often_becomes_a_dead_letter(failing: Client) -> None:
    [message] = await failing.receive(queue="dead", AttributeNames=["All"])
    assert message["Body"] == "poison"
    assert message["Attributes"]["DeadLetterQueueSourceArn"] == "arn:aws:sqs:us-east-1:000000000000:orders"
    assert message["Attributes"]["ApproximateReceiveCount"] == "3"


async def test_a_queue_that_is_its_own_dead_letter_queue_keeps_its_messages(sqs: Client) -> None:
    await sqs("SetQueueAttributes", Attributes={"RedrivePolicy": redrive_policy("orders", 1)})
    assert json.loads(await sqs.attribute("RedrivePolicy") or "")["maxReceiveCount"] == 1
    await sqs.send("x")
    for _ in range(3):
        assert await sqs.bodies(VisibilityTimeout=0) == ["x"]
    await sqs("SetQueueAttributes", Attributes={"RedrivePolicy": ""})
    assert await sqs.attribute("RedrivePolicy") is None


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (redrive_policy("none"), "Dead letter target does not exist."),
        (redrive_policy("o.fifo"), "Dead-letter queue must be same type of queue as the source."),
        (
            redrive_policy("orders", 1_001),
            "Invalid value for maxReceiveCount: 1001, valid values are from 1 to 1000 both inclusive.",
        ),
    ],
)
async def test_a_wrong_redrive_policy_is_refused_as_aws_does(ordered: Client, policy: str, reason: str) -> None:
    with pytest.raises(FastnessError) as caught:
        await ordered("SetQueueAttributes", Attributes={"RedrivePolicy": policy})
    error = sqs_error(caught.value)
    assert error.query_code == "InvalidParameterValue"
    shown = policy.replace(": ", ":").replace(", ", ",") if "1001" not in policy else policy
    assert error.message == f"Value {shown} for parameter RedrivePolicy is invalid. Reason: {reason}"


async def test_the_sources_of_a_dead_letter_queue_are_listed_in_pages(failing: Client) -> None:
    await failing.create("more", RedrivePolicy=redrive_policy())
    found = await failing("ListDeadLetterSourceQueues", "dead")
    assert [url.rpartition("/")[2] for url in found["queueUrls"]] == ["more", "orders"]
    page = await failing("ListDeadLetterSourceQueues", "dead", MaxResults=1)
    rest = await failing("ListDeadLetterSourceQueues", "dead", MaxResults=1, NextToken=page["NextToken"])
    assert [url.rpartition("/")[2] for url in page["queueUrls"] + rest["queueUrls"]] == ["more", "orders"]
    assert await failing("ListDeadLetterSourceQueues", "orders") == {"queueUrls": []}


async def test_a_move_task_is_started_listed_and_cancelled(failing: Client) -> None:
    source = {"SourceArn": "arn:aws:sqs:us-east-1:000000000000:dead"}
    started = await failing("StartMessageMoveTask", None, MaxNumberOfMessagesPerSecond=1, **source)
    assert await failing.refused("StartMessageMoveTask", None, **source) == "InvalidParameterValue"
    [task] = (await failing("ListMessageMoveTasks", None, **source))["Results"]
    assert task["TaskHandle"] == started["TaskHandle"]
    assert task["Status"] == "RUNNING"
    assert task["SourceArn"] == source["SourceArn"]
    assert task["MaxNumberOfMessagesPerSecond"] == 1
    assert "DestinationArn" not in task
    cancelled = await failing("CancelMessageMoveTask", None, TaskHandle=started["TaskHandle"])
    assert cancelled["ApproximateNumberOfMessagesMoved"] in {0, 1}
    [task] = (await failing("ListMessageMoveTasks", None, MaxResults=10, **source))["Results"]
    assert task["Status"] in {"CANCELLING", "CANCELLED"}
    assert "TaskHandle" not in task


async def test_move_tasks_of_wrong_queues_are_refused(failing: Client) -> None:
    arn = "arn:aws:sqs:us-east-1:000000000000:"
    start = "StartMessageMoveTask"
    assert await failing.refused(start, None, SourceArn=f"{arn}none") == "ResourceNotFoundException"
    assert await failing.refused(start, None, SourceArn="dead") == "InvalidParameterValue"
    assert await failing.refused(start, None, SourceArn=f"{arn}orders") == "InvalidParameterValue"
    for queues, parameter in ((("none", "orders"), "SourceArn"), (("dead", "none"), "DestinationArn")):
        with pytest.raises(SqsError) as caught:
            await failing(start, None, SourceArn=arn + queues[0], DestinationArn=arn + queues[1])
        assert caught.value.query_code == "ResourceNotFoundException"
        expected = f"The resource that you specified for the {parameter} parameter doesn't exist."
        assert caught.value.message == expected
    rate = {"SourceArn": f"{arn}dead", "MaxNumberOfMessagesPerSecond": 501}
    assert await failing.refused(start, None, **rate) == "InvalidParameterValue"
    missing = "ResourceNotFoundException"
    assert await failing.refused("ListMessageMoveTasks", None, SourceArn=f"{arn}none") == missing
    for handle in ("none", "dead/none", ""):
        assert await failing.refused("CancelMessageMoveTask", None, TaskHandle=handle) == "InvalidParameterValue"
    for queue in ("dead", "none"):
        assert await failing.refused("CancelMessageMoveTask", None, TaskHandle=f"{queue}/{'0' * 32}") == missing
    too_many = {"SourceArn": f"{arn}dead", "MaxResults": 11}
    assert await failing.refused("ListMessageMoveTasks", None, **too_many) == "InvalidParameterValue"


# Native clients


async def test_a_native_queue_is_visible_with_its_messages(sqs: Client, transport: AsyncEmbeddedTransport) -> None:
    await transport.call(PutMessages("native", [NewMessage(b"\xff", attributes={"kind": "image"})]))
    assert "native" in str(await sqs("ListQueues", None))
    [message] = await sqs.receive(queue="native", MessageAttributeNames=["All"])
    assert message["Body"] == "/w=="
    assert message["MessageAttributes"] == {
        "kind": {"DataType": "String", "StringValue": "image"},
        "fastness-encoding": {"DataType": "String", "StringValue": "base64"},
    }
    await sqs("DeleteMessage", "native", ReceiptHandle=message["ReceiptHandle"])
    stats = await transport.call(GetQueueStats("native"))
    assert (stats.ready, stats.leased, stats.acked_total) == (0, 0, 1)


async def test_the_leases_of_receives_name_their_caller(sqs: Client, transport: AsyncEmbeddedTransport) -> None:
    await sqs.send("x")
    await sqs.receive()
    request = next(each for each in sqs.plane.requests if isinstance(each, ReceiveMessages))
    assert request.owner == "127.0.0.1"
    assert request.tier is None


# Authorization


class Nothing(AllowAll):
    """Allows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def authorize(self, request: Request[Any]) -> None:
        self.asked.append(type(request).__name__)
        raise NotAllowed("No")


@pytest.mark.parametrize("queue", ["orders", "none"])
async def test_every_action_is_authorized_before_anything_is_read(sqs: Client, queue: str) -> None:
    authorizer = Nothing()
    forbidden = SqsCaller(
        authorizer=authorizer, universe=UNIVERSE, base_url="http://127.0.0.1:9440/sqs", region="us-east-1"
    )
    arn = f"arn:aws:sqs:us-east-1:000000000000:{queue}"
    parameters = {
        "QueueUrl": f"http://127.0.0.1:9440/sqs/000000000000/{queue}",
        "QueueName": queue,
        "MessageBody": "x",
        "ReceiptHandle": "x",
        "VisibilityTimeout": 1,
        "Entries": [{"Id": "1", "MessageBody": "x", "ReceiptHandle": "x"}],
        "Attributes": {},
        "Tags": {},
        "TagKeys": [],
        "SourceArn": arn,
        "TaskHandle": f"{queue}/x",
        "Label": "label",
        "AWSAccountIds": ["123456789012"],
        "Actions": ["SendMessage"],
    }
    sqs.plane.taken()
    for action in ACTIONS:
        with pytest.raises(NotAllowed):
            await sqs._actions.call(forbidden, action, dict(parameters))
    assert len(authorizer.asked) == len(ACTIONS)
    assert sqs.plane.taken() == []
