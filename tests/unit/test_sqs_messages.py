"""Messages of SQS as native ones and back: attributes of all types, digests, sizes, and what is refused."""

import base64
import hashlib
from typing import Any

import pytest
from msgspec.structs import replace

from fastness.server.sqs import messages
from fastness.server.sqs.errors import SqsError
from fastness.server.sqs.messages import Attribute, incoming, outgoing
from fastness.wire.sqs import SqsSettings
from tests.support.failures import Failures

STANDARD = SqsSettings(exists=True)
FIFO = SqsSettings(exists=True, fifo=True)


def sent(queue: SqsSettings = STANDARD, **parameters: Any) -> messages.Outgoing:
    return outgoing({"MessageBody": "hello", **parameters}, queue)


def back(message: messages.Outgoing) -> messages.Incoming:
    stored = message.message
    return incoming(stored.payload, stored.content_type, stored.attributes)


def refused(queue: SqsSettings = STANDARD, **parameters: Any) -> SqsError:
    with pytest.raises(SqsError) as caught:
        sent(queue, **parameters)
    return caught.value


def text(value: str) -> dict[str, Any]:
    return {"DataType": "String", "StringValue": value}


ALL_TYPES = {
    "text": {"DataType": "String", "StringValue": "grüße"},
    "json": {"DataType": "String.json", "StringValue": "{}"},
    "count": {"DataType": "Number", "StringValue": "-1.50e3"},
    "rate": {"DataType": "Number.float", "StringValue": "0.5"},
    "raw": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
    "photo": {"DataType": "Binary.gif", "BinaryValue": b"GIF89a"},
}


def test_a_body_is_kept_as_a_text_payload() -> None:
    stored = sent(MessageBody="grüße").message
    assert stored.payload == "grüße".encode()
    assert stored.content_type == "text/plain; charset=utf-8"
    assert stored.attributes == {}
    assert stored.delay_seconds is None


def test_attributes_of_all_types_come_back_as_they_were_sent() -> None:
    message = sent(MessageAttributes=ALL_TYPES)
    assert message.message.attributes["text"] == "grüße"
    assert message.message.attributes["raw"] == "AP8="
    assert message.message.attributes["sqs-type.photo"] == "Binary.gif"
    assert "sqs-type.text" not in message.message.attributes
    assert messages.attribute_values(back(message).attributes) == ALL_TYPES


def test_attributes_that_are_too_long_for_native_ones_travel_in_an_envelope() -> None:
    given = {**ALL_TYPES, "long": {"DataType": "String", "StringValue": "x" * 9_000}}
    message = sent(MessageBody='a "quoted"\nbody', MessageAttributes=given)
    assert message.message.content_type == messages.ENVELOPE
    assert message.message.attributes == {}
    assert back(message).body == 'a "quoted"\nbody'
    assert messages.attribute_values(back(message).attributes) == given
    assert message.md5_of_body == hashlib.md5(b'a "quoted"\nbody').hexdigest()


def test_attributes_with_a_name_that_has_a_meaning_travel_in_an_envelope() -> None:
    for name in ("sqs-type.text", "AWSTraceHeader", "MessageGroupId", "SenderId"):
        message = sent(MessageAttributes={name: text("mine")}, MessageGroupId="tenant")
        assert message.message.content_type == messages.ENVELOPE, name
        found = back(message)
        assert messages.attribute_values(found.attributes) == {name: text("mine")}
        assert found.system == {"MessageGroupId": "tenant"}, name


def test_the_envelope_content_type_of_another_payload_is_delivered_as_text() -> None:
    assert incoming(b"not json", messages.ENVELOPE, {}).body == "not json"
    assert incoming(b'{"body": "\\u0000", "attributes": {}}', messages.ENVELOPE, {}).body.startswith('{"body"')


def test_a_native_payload_that_is_not_text_is_delivered_as_base64() -> None:
    for payload in (b"\xff\xfe", b"with a zero \x00 byte", "\ufffe".encode()):
        found = incoming(payload, "application/octet-stream", {"kind": "image"})
        assert base64.b64decode(found.body) == payload
        assert found.attributes == {
            "kind": Attribute("String", "image"),
            "fastness-encoding": Attribute("String", "base64"),
        }, payload


def test_a_native_payload_that_is_too_large_is_delivered_as_a_reference() -> None:
    found = messages.incoming_blob("ab" * 32, 2_000_000, {"kind": "video"})
    assert found.body == '{"blob":"' + "ab" * 32 + '","size":2000000}'
    assert found.attributes["fastness-encoding"] == Attribute("String", "blob")
    assert found.attributes["kind"] == Attribute("String", "video")


def test_native_attributes_that_sqs_does_not_allow_are_delivered_without_loss() -> None:
    native = {
        "bell": "\x07",
        "sqs-type.wrong": "Date",
        "wrong": "today",
        "sqs-type.alone": "Number",
        "sqs-type.bad": "Binary",
        "bad": "not base64!",
    }
    found = incoming(b"x", messages.TEXT, native).attributes
    assert found["bell"] == Attribute("Binary", b"\x07")
    assert found["wrong"] == Attribute("String", "today")
    assert found["sqs-type.alone"] == Attribute("String", "Number")
    assert found["bad"] == Attribute("String", "not base64!")


def test_the_digest_of_attributes_is_that_of_the_documentation() -> None:
    # Length and text of `timestamp` and `Number`, a 1 for text, length and text of the value.
    attributes = {"timestamp": Attribute("Number", "1493147359900")}
    assert messages.md5_of_attributes(attributes) == "235c5c510d26fb653d073faed50ae77c"


def test_the_digest_of_attributes_does_not_depend_on_their_order() -> None:
    forward = sent(MessageAttributes=ALL_TYPES)
    backward = sent(MessageAttributes=dict(reversed(ALL_TYPES.items())))
    assert forward.md5_of_attributes == backward.md5_of_attributes
    assert forward.md5_of_attributes != sent(MessageAttributes={"text": ALL_TYPES["text"]}).md5_of_attributes


def test_the_digest_distinguishes_text_from_bytes() -> None:
    text, data = {"a": Attribute("Binary", "x")}, {"a": Attribute("Binary", b"x")}
    assert messages.md5_of_attributes(text) != messages.md5_of_attributes(data)


def test_a_trace_header_is_kept_and_has_its_own_digest() -> None:
    header = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd862e3fe1be46a994272793"}}
    message = sent(MessageSystemAttributes=header)
    assert back(message).system == {"AWSTraceHeader": "Root=1-5759e988-bd862e3fe1be46a994272793"}
    assert back(message).attributes == {}
    assert message.md5_of_system_attributes is not None
    assert "MD5OfMessageAttributes" not in message.output("0" * 32, fifo=False)


def test_body_and_attributes_together_have_at_most_the_size_of_the_queue() -> None:
    queue = replace(STANDARD, max_bytes=1_024)
    attributes = {"abcd": {"DataType": "String", "StringValue": "é" * 5}}  # 4 + 6 + 10 bytes.
    assert sent(queue, MessageBody="x" * 1_004, MessageAttributes=attributes)
    error = refused(queue, MessageBody="x" * 1_005, MessageAttributes=attributes)
    assert error.query_code == "InvalidParameterValue"
    assert "1024" in error.message
    assert messages.message_size({"MessageBody": "x" * 1_004, "MessageAttributes": attributes}) == 1_024


INVALID_VALUES: list[dict[str, Any]] = [
    {"DataType": ""},
    {"DataType": "Date", "StringValue": "x"},
    {"DataType": "string", "StringValue": "x"},
    {"DataType": "String", "StringValue": ""},
    {"DataType": "String"},
    {"DataType": "String", "BinaryValue": b"x"},
    {"DataType": "String", "StringValue": "x", "BinaryValue": b"x"},
    {"DataType": "Binary", "StringValue": "x"},
    {"DataType": "Binary", "BinaryValue": b""},
    {"DataType": "Number", "StringValue": "ten"},
    {"DataType": "Number", "StringValue": "1" * 39},
    {"DataType": "Number", "StringValue": "1" * 5_000},
    {"DataType": "Number", "StringValue": "0." + "0" * 5_000 + "1"},
    {"DataType": "Number", "StringValue": "1e127"},
    {"DataType": "Number", "StringValue": "1e-129"},
    {"DataType": "Number", "StringValue": "NaN"},
    {"DataType": "String." + "x" * 250, "StringValue": "x"},
]
INVALID_SYSTEM_ATTRIBUTES: list[dict[str, Any]] = [
    {"Other": text("x")},
    {"AWSTraceHeader": {"DataType": "Number", "StringValue": "1"}},
    {"AWSTraceHeader": text("")},
    {"AWSTraceHeader": text("x" * 1_025)},
]


def test_invalid_messages_are_refused() -> None:
    texts = ("\x00", "tab\x0b", "\ud800", "\ufffe", "\uffff")
    names = ("", ".a", "a.", "a..b", "AWS.x", "aMaZoN.x", "a b", "a€", "x" * 257, "a/b")
    invalid = "InvalidParameterValue"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"MessageBody": ""}, "MissingParameter"),
        *(({"MessageBody": body}, "InvalidMessageContents") for body in texts),
        *(({"MessageAttributes": {"a": text(value)}}, invalid) for value in texts),
        *(({"MessageAttributes": {name: text("x")}}, invalid) for name in names),
        *(({"MessageAttributes": {"a": value}}, invalid) for value in INVALID_VALUES),
        *(({"MessageSystemAttributes": each}, invalid) for each in INVALID_SYSTEM_ATTRIBUTES),
        (
            {"MessageAttributes": {"a": {"DataType": "String", "StringListValues": ["x"]}}},
            "AWS.SimpleQueueService.UnsupportedOperation",
        ),
    ]
    failures = Failures()
    for parameters, code in cases:
        with failures.of(parameters):
            assert refused(**parameters).query_code == code
    for id in ("", "x" * 129, "a b", "ü", "a\n"):
        with failures.of(f"group or deduplication id {id!r}"):
            assert refused(FIFO, MessageGroupId=id, MessageDeduplicationId="d").query_code == invalid
            assert refused(FIFO, MessageGroupId="g", MessageDeduplicationId=id).query_code == invalid
    failures.check()


def test_characters_and_numbers_that_are_allowed_come_back_unchanged() -> None:
    failures = Failures()
    for body in ("\t\n\r", "\x20\ud7ff\ue000\ufffd", "\U00010000\U0010ffff", "\x7f\x85"):
        with failures.of(repr(body)):
            assert back(sent(MessageBody=body)).body == body
    for number in ("0", "-0.0", "1" * 38, "1" + "0" * 60, "1e126", "1E-128", ".5", "5.", "0" * 5_000 + "1"):
        with failures.of(number):
            message = sent(MessageAttributes={"n": {"DataType": "Number", "StringValue": number}})
            assert back(message).attributes["n"] == Attribute("Number", number)
    failures.check()


def test_more_than_ten_attributes_are_refused() -> None:
    given = {f"a{i}": {"DataType": "String", "StringValue": "x"} for i in range(11)}
    assert "[11]" in refused(MessageAttributes=given).message
    given.pop("a0")
    assert len(back(sent(MessageAttributes=given)).attributes) == 10


def test_a_delay_is_that_of_the_message_on_standard_queues_only() -> None:
    assert sent(DelaySeconds=0).message.delay_seconds == 0.0
    assert sent(DelaySeconds=900).message.delay_seconds == 900.0
    assert refused(DelaySeconds=901).query_code == "InvalidParameterValue"
    assert refused(DelaySeconds=-1).query_code == "InvalidParameterValue"
    fifo = {"MessageGroupId": "g", "MessageDeduplicationId": "d"}
    assert refused(FIFO, DelaySeconds=1, **fifo).query_code == "InvalidParameterValue"
    assert sent(FIFO, DelaySeconds=0, **fifo).message.delay_seconds is None


def test_a_group_of_a_standard_queue_is_only_an_attribute() -> None:
    message = sent(MessageGroupId="tenant 7".replace(" ", "/"))
    assert message.message.group is None
    assert message.message.idempotency_key is None
    assert back(message).system == {"MessageGroupId": "tenant/7"}
    assert refused(MessageDeduplicationId="d").query_code == "InvalidParameterValue"


def test_a_fifo_message_has_its_group_and_its_idempotency_key() -> None:
    message = sent(FIFO, MessageGroupId="g", MessageDeduplicationId="d").message
    assert message.group == "g"
    assert message.idempotency_key == "queue:d"
    assert message.attributes == {"MessageDeduplicationId": "d"}


def test_a_group_id_that_is_no_native_name_is_hashed_and_kept() -> None:
    first = sent(FIFO, MessageGroupId="tenant/7", MessageDeduplicationId="d")
    other = sent(FIFO, MessageGroupId="tenant/8", MessageDeduplicationId="d").message
    assert first.message.group is not None
    assert first.message.group.startswith("sqs=")
    assert first.message.group != other.group
    assert back(first).system["MessageGroupId"] == "tenant/7"


def test_deduplication_by_group_separates_groups() -> None:
    queue = replace(FIFO, scope="messageGroup")
    keys = [
        sent(queue, MessageGroupId=group, MessageDeduplicationId="d").message.idempotency_key
        for group in ("a", "b", "a")
    ]
    assert keys[0] == keys[2] != keys[1]


def test_content_based_deduplication_hashes_the_body_but_not_the_attributes() -> None:
    queue = replace(FIFO, content_based=True)
    plain = sent(queue, MessageGroupId="g").message
    attributed = sent(queue, MessageGroupId="g", MessageAttributes=ALL_TYPES).message
    digest = hashlib.sha256(b"hello").hexdigest()
    assert plain.idempotency_key == attributed.idempotency_key == f"queue:{digest}"
    assert plain.attributes["MessageDeduplicationId"] == digest
    assert sent(queue, MessageGroupId="g", MessageDeduplicationId="x").message.idempotency_key == "queue:x"


def test_a_fifo_message_needs_a_group_and_a_deduplication_id() -> None:
    assert refused(FIFO, MessageDeduplicationId="d").query_code == "MissingParameter"
    assert refused(FIFO, MessageGroupId="g").query_code == "InvalidParameterValue"


def test_sequence_numbers_grow_as_numbers_and_as_texts() -> None:
    ids = ["00000000-0000-7000-8000-000000000001", "019a0000-0000-7000-8000-000000000000", "f" * 32]
    numbers = [messages.sequence_number(id) for id in ids]
    assert numbers == sorted(numbers)
    assert list(map(int, numbers)) == sorted(map(int, numbers))
    assert {len(number) for number in numbers} == {39}


def test_the_sender_is_kept_if_it_is_known() -> None:
    message = outgoing({"MessageBody": "x"}, STANDARD, "token-1")
    assert back(message).system == {"SenderId": "token-1"}
    assert back(message).attributes == {}
