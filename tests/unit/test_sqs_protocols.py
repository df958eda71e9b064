"""Both protocols of SQS against botocore: what it sends is decoded, and what is sent to it is understood."""

import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, Final
from urllib.parse import unquote_plus, urlencode
from xml.etree import ElementTree

import pytest
from botocore.model import ListShape, MapShape, OperationModel, Shape, StructureShape
from botocore.parsers import create_parser
from botocore.serialize import create_serializer
from botocore.validate import ParamValidator
from hypothesis import given, settings
from hypothesis import strategies as st

from fastness.limits import SQS_FORM_FIELDS_MAX, SQS_MALFORMED_ESCAPES_MAX
from fastness.server.sqs import json_protocol, query_protocol
from fastness.server.sqs.batch import checked_entries
from fastness.server.sqs.errors import COMMON_ERRORS, SqsError
from fastness.server.sqs.model import Action
from fastness.server.sqs.shapes import ACTIONS, ERRORS
from tests.support.failures import Failures
from tests.unit.sqs_models import Protocol, service_model

REQUEST_ID: Final = "66916324-67ca-54bb-a410-3f567a7a0571"
NAMES: Final = sorted(ACTIONS)
EXAMPLES: Final = 10  # Of each action in each protocol, four times: more would take longer than they find.
PROTOCOLS: Final[tuple[Protocol, ...]] = ("json", "query")
# What XML can carry, as SQS allows it.
TEXT: Final = st.text(
    st.one_of(
        st.sampled_from("\t\n\r&<>\"'%+=. é€😀"),
        st.characters(min_codepoint=0x20, max_codepoint=0xFFFD, exclude_categories=["Cs"]),
        st.characters(min_codepoint=0x10000),
    ),
    max_size=12,
)
BOUNDS: Final = {"integer": (1 << 31) - 1, "long": (1 << 63) - 1}


def values(shape: Shape) -> st.SearchStrategy[Any]:
    """Any value of a shape of botocore's model."""
    if isinstance(shape, StructureShape):
        members = {name: values(member) for name, member in shape.members.items()}
        required = {name: members.pop(name) for name in shape.required_members}
        return st.fixed_dictionaries(required, optional=members)
    if isinstance(shape, ListShape):
        return st.lists(values(shape.member), max_size=3)
    if isinstance(shape, MapShape):
        return st.dictionaries(TEXT, values(shape.value), min_size=1, max_size=3)  # Query has no empty maps.
    if shape.type_name in BOUNDS:
        bound = BOUNDS[shape.type_name]
        return st.integers(-bound - 1, bound)
    return {"string": TEXT, "boolean": st.booleans(), "blob": st.binary(max_size=8)}[shape.type_name]


@cache
def inputs(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return values(operation(name, "json").input_shape)


@cache
def outputs(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return values(operation(name, "json").output_shape)


@cache
def operation(name: str, protocol: Protocol) -> OperationModel:
    return service_model(protocol).operation_model(name)


def decoded(protocol: Protocol, request: dict[str, Any]) -> tuple[Action, dict[str, Any]]:
    """What the server makes of a request that botocore has serialized."""
    if protocol == "json":
        action = json_protocol.action_of(request["headers"]["X-Amz-Target"])
        return action, json_protocol.decode(action, request["body"])
    fields = query_protocol.parse_form(urlencode(request["body"]))
    action = query_protocol.action_of(fields)
    return action, query_protocol.decode(action, fields)


def encoded(protocol: Protocol, action: Action, output: dict[str, Any]) -> bytes:
    return json_protocol.encode(output) if protocol == "json" else query_protocol.encode(action, output, REQUEST_ID)


def parsed(protocol: Protocol, name: str, status: int, headers: dict[str, str], body: bytes) -> dict[str, Any]:
    """What botocore makes of a response."""
    response = {"status_code": status, "headers": {"x-amzn-requestid": REQUEST_ID, **headers}, "body": body}
    result: dict[str, Any] = create_parser(protocol).parse(response, operation(name, protocol).output_shape)
    return result


def without_empty(value: Any) -> Any:
    """The value without empty lists and maps, which XML does not tell from absent ones."""
    if isinstance(value, dict):
        return {key: without_empty(each) for key, each in value.items() if each not in ([], {})}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


def test_the_shapes_have_all_actions_and_errors_of_the_service_model() -> None:
    model = service_model("json")
    assert len(NAMES) == 23
    assert sorted(model.operation_names) == NAMES
    assert {shape.name for shape in model.error_shapes} == set(ERRORS)
    for name, action in ACTIONS.items():
        assert sorted(shape.name for shape in model.operation_model(name).error_shapes) == sorted(action.errors)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def check_input(name: str, protocol: Protocol, data: st.DataObject) -> None:
    model = operation(name, protocol)
    parameters = data.draw(inputs(name))
    request = create_serializer(protocol, include_validation=False).serialize_to_request(parameters, model)

    action, found = decoded(protocol, request)

    assert action.name == name
    assert found == parameters


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def check_output(name: str, protocol: Protocol, data: st.DataObject) -> None:
    shape = operation(name, protocol).output_shape
    output = {} if shape is None else data.draw(outputs(name))

    result = parsed(protocol, name, 200, {}, encoded(protocol, ACTIONS[name], output))

    assert result.pop("ResponseMetadata")["RequestId"] == REQUEST_ID
    if shape is not None:
        required = {member: result.get(member, []) for member in shape.required_members}  # XML has no empty lists.
        assert not ParamValidator().validate({**result, **required}, shape).has_errors()
    expected = output if protocol == "json" else without_empty(output)
    assert (result if protocol == "json" else without_empty(result)) == expected


def check_error(name: str, protocol: Protocol) -> None:
    [shape] = [each for each in (*ERRORS.values(), *COMMON_ERRORS) if each.name == name]
    for code in (shape.name, shape.query_code):
        error = SqsError(code, "The queue <orders> & its friend")
        if protocol == "json":
            body, headers = json_protocol.encode_error(error)
            assert json.loads(body)["__type"] == f"{shape.namespace}#{shape.name}"
        else:
            body, headers = query_protocol.encode_error(error, REQUEST_ID), {}
        result = parsed(protocol, "SendMessage", error.status, headers, body)

        assert result["Error"]["Code"] == shape.query_code
        assert result["Error"]["Message"] == error.message
        assert result["Error"]["Type"] == ("Sender" if shape.status < 500 else "Receiver")
        assert result["ResponseMetadata"]["HTTPStatusCode"] == shape.status
        assert result["ResponseMetadata"]["RequestId"] == REQUEST_ID


@pytest.mark.parametrize(
    ("check", "names"),
    [(check_input, NAMES), (check_output, NAMES), (check_error, [*ERRORS, *(each.name for each in COMMON_ERRORS)])],
)
def test_botocore_and_the_server_understand_each_other(check: Callable[..., None], names: list[str]) -> None:
    failures = Failures()
    for name, protocol in product(names, PROTOCOLS):
        with failures.of((name, protocol)):
            check(name=name, protocol=protocol)
    failures.check()


def test_the_form_of_the_documentation_is_decoded() -> None:
    form = (
        "Action=SendMessageBatch&SendMessageBatchRequestEntry.1.Id=test_msg_001"
        "&SendMessageBatchRequestEntry.1.MessageBody=test%20message%20body%201"
        "&SendMessageBatchRequestEntry.2.Id=test_msg_002"
        "&SendMessageBatchRequestEntry.2.MessageBody=test+message+body+2"
        "&SendMessageBatchRequestEntry.2.DelaySeconds=60"
        "&SendMessageBatchRequestEntry.2.MessageAttribute.1.Name=test_attribute_name_1"
        "&SendMessageBatchRequestEntry.2.MessageAttribute.1.Value.StringValue=test_attribute_value_1"
        "&SendMessageBatchRequestEntry.2.MessageAttribute.1.Value.DataType=String"
        "&QueueUrl=http%3A%2F%2Flocalhost%2F000000000000%2FMyQueue&Version=2012-11-05&X-Amz-Date=20261118T000000Z"
    )
    fields = query_protocol.parse_form(form)
    assert query_protocol.decode(query_protocol.action_of(fields), fields) == {
        "QueueUrl": "http://localhost/000000000000/MyQueue",
        "Entries": [
            {"Id": "test_msg_001", "MessageBody": "test message body 1"},
            {
                "Id": "test_msg_002",
                "MessageBody": "test message body 2",
                "DelaySeconds": 60,
                "MessageAttributes": {
                    "test_attribute_name_1": {"StringValue": "test_attribute_value_1", "DataType": "String"}
                },
            },
        ],
    }


def refused_json(name: str, body: bytes) -> SqsError:
    with pytest.raises(SqsError) as caught:
        json_protocol.decode(ACTIONS[name], body)
    return caught.value


def test_a_json_request_that_is_wrong_is_refused_by_a_code_and_the_parameter() -> None:
    failures = Failures()
    for body, code, text in (
        (b"{}", "MissingParameter", "must contain the parameter QueueUrl"),
        (b"", "MissingParameter", "QueueUrl"),
        (b'{"QueueUrl":null,"MessageBody":"x"}', "MissingParameter", "QueueUrl"),
        (b'{"QueueUrl":"q"}', "MissingParameter", "MessageBody"),
        (b'{"QueueUrl":1,"MessageBody":"x"}', "SerializationException", "QueueUrl"),
        (b'{"QueueUrl":"q","MessageBody":"x","DelaySeconds":"5"}', "SerializationException", "DelaySeconds"),
        (b'{"QueueUrl":"q","MessageBody":"x","DelaySeconds":2147483648}', "SerializationException", "DelaySeconds"),
        (b'{"QueueUrl":"q","MessageBody":"x","DelaySeconds":1e400}', "SerializationException", ""),
        (b'{"QueueUrl":"q","MessageBody":"x","MessageAttributes":[]}', "SerializationException", "MessageAttributes"),
        (
            b'{"QueueUrl":"q","MessageBody":"x","MessageAttributes":{"a":{"StringValue":"v"}}}',
            "MissingParameter",
            "MessageAttributes.a.DataType",
        ),
        (
            b'{"QueueUrl":"q","MessageBody":"x","MessageAttributes":{"a":{"DataType":"Binary","BinaryValue":"*"}}}',
            "SerializationException",
            "MessageAttributes.a.BinaryValue",
        ),
        (b"[]", "SerializationException", "body"),
        (b"null", "SerializationException", "body"),
        (b'{"QueueUrl":', "SerializationException", "not valid JSON"),
        (b"\xff\xfe", "SerializationException", "not valid JSON"),
        (b'{"x":' + b"[" * 200_000, "SerializationException", "not valid JSON"),
        (b'{"QueueUrl":null,"x":' + b"[" * 200_000, "SerializationException", "not valid JSON"),
    ):
        with failures.of(body):
            error = refused_json("SendMessage", body)
            assert (error.query_code, error.status) == (code, 400)
            assert text in error.message
    failures.check()


def test_members_that_are_null_or_unknown_are_absent() -> None:
    body = b'{"QueueUrl":"q","MessageBody":"x","DelaySeconds":null,"MessageAttributes":{"a":{"DataType":"String",'
    body += b'"StringValue":"v","BinaryValue":null}},"Unknown":{"deep":[1]}}'
    assert json_protocol.decode(ACTIONS["SendMessage"], body) == {
        "QueueUrl": "q",
        "MessageBody": "x",
        "MessageAttributes": {"a": {"DataType": "String", "StringValue": "v"}},
    }


ONE_ATTRIBUTE: Final = "QueueUrl=q&MessageBody=x&MessageAttribute.1.Name=a&MessageAttribute.1.Value.DataType=Binary"


def form_of(name: str, form: str) -> dict[str, Any]:
    return query_protocol.decode(ACTIONS[name], query_protocol.parse_form(form))


def refused_form(name: str, form: str) -> SqsError:
    with pytest.raises(SqsError) as caught:
        form_of(name, form)
    return caught.value


def test_a_form_that_is_wrong_is_refused_by_a_code_and_the_parameter() -> None:
    failures = Failures()
    for form, code, text in (
        ("", "MissingParameter", "QueueUrl"),
        ("QueueUrl=q", "MissingParameter", "MessageBody"),
        ("QueueUrl=q&MessageBody=x&DelaySeconds=1.5", "InvalidParameterValue", "Value 1.5 for parameter DelaySeconds"),
        ("QueueUrl=q&MessageBody=x&DelaySeconds=%D9%A3", "InvalidParameterValue", "DelaySeconds"),
        ("QueueUrl=q&MessageBody=x&DelaySeconds=" + "9" * 5_000, "InvalidParameterValue", "DelaySeconds"),
        ("QueueUrl=q&MessageBody=x&DelaySeconds.1=3", "InvalidQueryParameter", "DelaySeconds"),
        ("QueueUrl=q&MessageBody=x&MessageBody.1=y", "ConflictingQueryParameter", "MessageBody.1"),
        ("QueueUrl=q&MessageBody.1=x&MessageBody=y", "ConflictingQueryParameter", "MessageBody"),
        ("QueueUrl=q&MessageBody=x&MessageBody=y", "ConflictingQueryParameter", "MessageBody"),
        ("QueueUrl=q&MessageBody=x&MessageAttribute=1", "InvalidQueryParameter", "MessageAttribute"),
        ("QueueUrl=q&MessageBody=x&MessageAttribute.1=1", "InvalidQueryParameter", "MessageAttribute.1"),
        ("QueueUrl=q&MessageBody=x&MessageAttribute.x.Name=1", "InvalidQueryParameter", "MessageAttribute.x"),
        ("QueueUrl=q&MessageBody=x&MessageAttribute.0.Name=1", "InvalidQueryParameter", "MessageAttribute.0"),
        ("QueueUrl=q&MessageBody=x&MessageAttribute.-1.Name=1", "InvalidQueryParameter", "MessageAttribute.-1"),
        ("QueueUrl=q&MessageBody=x&MessageAttribute.1.Name=a", "MissingParameter", "MessageAttribute.1.Value"),
        (
            "QueueUrl=q&MessageBody=x&MessageAttribute.1.Value.DataType=String",
            "MissingParameter",
            "MessageAttribute.1.Name",
        ),
        (
            "QueueUrl=q&MessageBody=x&MessageAttribute.1.Name=a&MessageAttribute.1.Value.StringValue=v",
            "MissingParameter",
            "MessageAttribute.1.Value.DataType",
        ),
        (f"{ONE_ATTRIBUTE}&MessageAttribute.1.Value.BinaryValue=A", "InvalidParameterValue", "BinaryValue"),
        (
            f"{ONE_ATTRIBUTE}&MessageAttribute.2.Name=a&MessageAttribute.2.Value.DataType=S",
            "InvalidParameterValue",
            "twice",
        ),
        ("QueueUrl=q&MessageBody=x&MessageAttribute" + ".1" * 50 + "=1", "InvalidQueryParameter", "MessageAttribute.1"),
        (
            "QueueUrl=q&MessageBody=x&MessageAttribute.1.Name=a&MessageAttribute.1.Name.x=b",
            "ConflictingQueryParameter",
            "MessageAttribute.1.Name.x",
        ),
        ("QueueUrl=%ff&MessageBody=x", "MalformedQueryString", "UTF-8"),
        ("&" * SQS_FORM_FIELDS_MAX, "MalformedQueryString", f"{SQS_FORM_FIELDS_MAX} fields"),
    ):
        with failures.of(form):
            error = refused_form("SendMessage", form)
            assert (error.query_code, error.status // 100) == (code, 4)
            assert text in error.message
            assert len(error.message) < 500
    failures.check()


def test_indexes_may_have_gaps_and_any_order_and_cost_no_memory() -> None:
    fields = "&".join(f"AttributeName.{2_000_000_000 - number}=name{number}" for number in range(1_000))
    tracemalloc.start()
    found = form_of("GetQueueAttributes", f"QueueUrl=q&{fields}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["AttributeNames"] == [f"name{number}" for number in reversed(range(1_000))]
    assert peak < 2_000_000


def test_an_empty_list_and_the_two_names_of_system_attributes_are_understood() -> None:
    assert form_of("ReceiveMessage", "QueueUrl=q&AttributeName=") == {"QueueUrl": "q", "AttributeNames": []}
    found = form_of("ReceiveMessage", "QueueUrl=q&AttributeName.1=All&MessageSystemAttributeName.1=SenderId")
    assert found == {"QueueUrl": "q", "AttributeNames": ["All"], "MessageSystemAttributeNames": ["SenderId"]}


def test_an_unknown_action_is_refused() -> None:
    for target in ("", "AmazonSQS.", "AmazonSQS.Nothing", "SendMessage", "AmazonSNS.SendMessage"):
        with pytest.raises(SqsError) as caught:
            json_protocol.action_of(target)
        assert caught.value.name == "UnknownOperationException", target
        fields = query_protocol.parse_form(urlencode({"Action": target})) if target != "SendMessage" else {}
        with pytest.raises(SqsError) as caught:
            query_protocol.action_of(fields)
        assert caught.value.query_code == ("InvalidAction" if fields.get("Action") else "MissingAction"), target


def test_characters_that_xml_does_not_allow_are_replaced() -> None:
    body = query_protocol.encode(ACTIONS["GetQueueUrl"], {"QueueUrl": "a\x00b\ud800c\uffff"}, REQUEST_ID)
    assert ElementTree.fromstring(body)[0][0].text == "a\ufffdb\ufffdc\ufffd"


# Fuzzing: whatever is sent, decoding succeeds or ends in an error of the request.

JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["AA=="]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["Id", "DataType", "a"]), inner),
    max_leaves=10,
)
MEMBERS: Final = sorted({member.name for action in ACTIONS.values() for member in action.input.members})
PARTS: Final = [
    *sorted({member.query_name for action in ACTIONS.values() for member in action.input.members}),
    *("1", "2", "0", "99999999999", "x", "", "Name", "Value", "Key", "Id", "MessageBody", "DataType", "BinaryValue"),
    *("StringListValue", "BinaryListValue", "DelaySeconds"),
]


@given(name=st.sampled_from(NAMES), given_members=st.dictionaries(st.sampled_from(MEMBERS), JSON))
def test_any_json_object_is_decoded_or_refused(name: str, given_members: dict[str, Any]) -> None:
    expect_decoded_or_refused(name, json.dumps(given_members).encode())


@given(name=st.sampled_from(NAMES), body=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(name: str, body: bytes) -> None:
    expect_decoded_or_refused(name, body)


def expect_error_of_the_request(error: SqsError) -> None:
    assert 400 <= error.status < 500
    assert json.loads(json_protocol.encode_error(error)[0])["message"]
    ElementTree.fromstring(query_protocol.encode_error(error, REQUEST_ID))


def expect_decoded_or_refused(name: str, body: bytes) -> None:
    action = ACTIONS[name]
    try:
        found = json_protocol.decode(action, body)
    except SqsError as error:
        expect_error_of_the_request(error)
    else:
        assert all(member.name in found for member in action.input.members if member.required)
        assert None not in found.values()


@given(
    name=st.sampled_from(NAMES),
    fields=st.lists(
        st.tuples(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6), st.sampled_from(["", "1", "AA==", "x"]))
    ),
)
def test_any_form_is_decoded_or_refused(name: str, fields: list[tuple[list[str], str]]) -> None:
    try:
        found = form_of(name, urlencode([(".".join(parts), value) for parts, value in fields]))
    except SqsError as error:
        expect_error_of_the_request(error)
    else:
        assert all(member.name in found for member in ACTIONS[name].input.members if member.required)


ESCAPES: Final = ("%41", "%C3%A9", "%0A", "%20", "%3D", "=0A", "=\n", "é")
ESCAPED: Final = st.lists(st.sampled_from([*"%+=&_ \t\r\n.3DdaA", *ESCAPES]))


@given(parts=ESCAPED)
def test_values_are_unquoted_as_the_standard_library_does(parts: list[str]) -> None:
    value = "".join(parts).replace("&", "")
    try:
        expected = unquote_plus(value, errors="strict")
    except UnicodeDecodeError:
        with pytest.raises(SqsError, match="not UTF-8"):
            query_protocol.parse_form(f"a={value}")
    else:
        assert query_protocol.parse_form(f"a={value}") == {"a": expected}


def test_a_percent_sign_without_an_escape_costs_little() -> None:
    form = "a=%z" + "%41" * 350_000
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, function: calls.update([event]))
    try:
        parsed = query_protocol.parse_form(form)
    finally:
        sys.setprofile(None)
    assert parsed == {"a": "%z" + "A" * 350_000}
    assert calls["c_call"] < 1_000, "the decoder of the standard library makes two calls for each escape"
    assert query_protocol.parse_form("a=" + "%" * SQS_MALFORMED_ESCAPES_MAX)["a"] == "%" * SQS_MALFORMED_ESCAPES_MAX
    with pytest.raises(SqsError, match="encode each of them as %25") as refused:
        query_protocol.parse_form("a=" + "%z" * 2_000_000)
    assert refused.value.query_code == "MalformedQueryString"


def test_a_form_without_entries_is_an_empty_batch() -> None:
    for action in ("SendMessageBatch", "DeleteMessageBatch", "ChangeMessageVisibilityBatch"):
        parameters = form_of(action, "QueueUrl=http%3A%2F%2Flocalhost%2Fsqs%2F000000000000%2Fjobs")
        with pytest.raises(SqsError) as refused:
            checked_entries(action, parameters)
        assert refused.value.query_code == "AWS.SimpleQueueService.EmptyBatchRequest", action
        assert refused.value.message == f"There should be at least one {action}RequestEntry in the request."


@given(text=st.text(max_size=100))
def test_any_text_as_form_is_decoded_or_refused(text: str) -> None:
    try:
        query_protocol.action_of(query_protocol.parse_form(text))
    except SqsError as error:
        expect_error_of_the_request(error)
