"""Every answer and every error of SQS is what botocore's service model says, in the JSON and in the Query protocol.

botocore writes the requests and reads the answers. Then the bodies are checked strictly, as botocore ignores what it
does not know.
"""

import base64
import http.client
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.model import ListShape, MapShape, OperationModel, ServiceModel, Shape, StructureShape
from botocore.parsers import create_parser
from botocore.serialize import create_serializer

from tests.end_to_end.sqs_clients import (
    ERRORS,
    NAMESPACE,
    SECONDS_MAX,
    anonymous_server,
    query_model,
    service_model,
    signed_server,
)
from tests.support.failures import Failures

MODEL = ServiceModel(service_model(), "sqs")
ACTIONS = sorted(MODEL.operation_names)
MODELLED = {shape.name for shape in MODEL.error_shapes}
TEXTS = ("plain", " spaces ", "\ttab\nline\r\nreturn\rend", "<a>&amp;</a> ]]>", "ä € \U0001f600 \ufffd")
TRACE = {"DataType": "String", "StringValue": "Root=1-5e3d83c1-e6a0db584850d61342823d4c"}


class Answer:
    """An HTTP response."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def request_id(self) -> str:
        return self.headers["x-amzn-requestid"]

    def __repr__(self) -> str:
        return f"<{self.status} {self.headers} {self.body[:500]!r}>"


class Protocol:
    """Calls by one protocol, whose answers are checked."""

    name: str

    def __init__(self, endpoint: str, model: ServiceModel) -> None:
        self.model = model
        self.seen: set[str] = set()  # The actions that were answered.
        self.endpoint = urlsplit(endpoint)
        self._parser = create_parser(self.name)
        self._serializer = create_serializer(self.name, include_validation=False)  # Wrong calls are sent, too.

    def ask(self, action: str, **parameters: Any) -> Answer:
        """The answer to an action, unchecked."""
        body, headers = self.request(action, **parameters)
        return self.send(body, headers=headers)

    def request(self, action: str, **parameters: Any) -> tuple[bytes | str, dict[str, str]]:
        """The body and the headers of a call."""
        request = self._serializer.serialize_to_request(parameters, self.model.operation_model(action))
        body = request["body"]
        return urlencode(body) if isinstance(body, dict) else body, dict(request["headers"])

    def send(self, body: bytes | str, *, headers: dict[str, str], path: str = "/", method: str = "POST") -> Answer:
        connection = http.client.HTTPConnection(str(self.endpoint.netloc), timeout=SECONDS_MAX)
        try:
            connection.request(method, self.endpoint.path + path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
        finally:
            connection.close()

    def call(self, action: str, /, **parameters: Any) -> dict[str, Any]:
        """What botocore reads of the answer to an action, which is a success."""
        answer = self.ask(action, **parameters)
        assert answer.status == 200, answer
        uuid.UUID(answer.request_id)
        operation = self.model.operation_model(action)
        self.check_success(answer, operation)
        self.seen.add(action)
        found = self._parse(answer, operation.output_shape)
        assert found.pop("ResponseMetadata")["RequestId"] == answer.request_id
        return found

    def error(self, answer: Answer) -> tuple[str, str]:
        """The name of an error in the model, or its code, and the code of the Query protocol."""
        assert 400 <= answer.status < 600, answer
        uuid.UUID(answer.request_id)
        found = self._parse(answer, None)
        assert found["Error"]["Message"]
        name, code = self.check_error(answer)
        assert found["Error"]["Code"] == code
        if name in MODELLED:
            expected, status = ERRORS.get(name, (name, 400))
            assert code == expected
            assert answer.status in ((400, status) if self.name == "json" else (status,))
        return name, code

    def _parse(self, answer: Answer, shape: Any) -> dict[str, Any]:
        response = {"headers": answer.headers, "body": answer.body, "status_code": answer.status}
        found: dict[str, Any] = self._parser.parse(response, shape)
        return found

    def check_success(self, answer: Answer, operation: OperationModel) -> None:
        raise NotImplementedError

    def check_error(self, answer: Answer) -> tuple[str, str]:
        raise NotImplementedError


class Json(Protocol):
    name = "json"

    def check_success(self, answer: Answer, operation: OperationModel) -> None:
        assert answer.headers["content-type"] == "application/x-amz-json-1.0"
        if operation.output_shape is None:
            assert answer.body in (b"", b"{}"), answer
        else:
            check_json(json.loads(answer.body), operation.output_shape, operation.name)

    def check_error(self, answer: Answer) -> tuple[str, str]:
        assert answer.headers["content-type"] == "application/x-amz-json-1.0"
        body = json.loads(answer.body)
        assert {"__type", "message"} <= set(body) <= {"__type", "message", "hint"}, answer
        namespace, _, name = body["__type"].rpartition("#")
        assert namespace == "com.amazonaws.sqs" if name in MODELLED else namespace.startswith("com.amazon"), answer
        code, _, fault = answer.headers["x-amzn-query-error"].partition(";")
        assert fault == ("Sender" if answer.status < 500 else "Receiver")
        return name if name in MODELLED else code, code


class Query(Protocol):
    name = "query"

    def check_success(self, answer: Answer, operation: OperationModel) -> None:
        root = self._root(answer, f"{operation.name}Response")
        *results, metadata = root
        assert metadata.tag == f"{{{NAMESPACE}}}ResponseMetadata"
        [request_id] = metadata
        assert (request_id.tag, request_id.text) == (f"{{{NAMESPACE}}}RequestId", answer.request_id)
        if operation.output_shape is None:
            assert results == []
        else:
            [result] = results
            assert result.tag == f"{{{NAMESPACE}}}{operation.name}Result"
            check_xml(result, operation.output_shape, operation.name)

    def check_error(self, answer: Answer) -> tuple[str, str]:
        root = self._root(answer, "ErrorResponse")
        tags = [each.tag.removeprefix(f"{{{NAMESPACE}}}") for each in root]
        assert tags == ["Error", "RequestId"], answer
        assert root[1].text == answer.request_id
        error = {each.tag.removeprefix(f"{{{NAMESPACE}}}"): each.text for each in root[0]}
        assert set(error) - {"Detail"} == {"Type", "Code", "Message"}, answer
        assert error["Type"] == ("Sender" if answer.status < 500 else "Receiver")
        code = str(error["Code"])
        names = {expected: name for name, (expected, _) in ERRORS.items()}
        return names.get(code, code), code

    def _root(self, answer: Answer, name: str) -> ElementTree.Element:
        assert answer.headers["content-type"].partition(";")[0] == "text/xml"
        assert b"\r" not in answer.body, "a reader of XML would replace it"
        root = ElementTree.fromstring(answer.body)
        assert root.tag == f"{{{NAMESPACE}}}{name}", answer
        return root


def check_json(value: Any, shape: Shape, path: str) -> None:
    """Raise unless a JSON value has the shape, without members that the model does not have."""
    match shape:
        case StructureShape():
            assert isinstance(value, dict), path
            assert set(value) <= set(shape.members), path
            assert set(value) >= set(shape.required_members), path
            for name, member in value.items():
                check_json(member, shape.members[name], f"{path}.{name}")
        case ListShape():
            assert isinstance(value, list), path
            for number, item in enumerate(value):
                check_json(item, shape.member, f"{path}.{number}")
        case MapShape():
            assert isinstance(value, dict), path
            for name, item in value.items():
                check_json(name, shape.key, f"{path}.{name}")
                check_json(item, shape.value, f"{path}.{name}")
        case _ if shape.type_name == "string":
            assert isinstance(value, str), path
            assert not getattr(shape, "enum", None) or value in shape.enum, path
        case _ if shape.type_name == "blob":
            assert isinstance(value, str), path
            base64.b64decode(value, validate=True)
        case _ if shape.type_name in ("integer", "long"):
            assert type(value) is int, path
        case _:
            assert shape.type_name == "boolean", path
            assert isinstance(value, bool), path


def check_xml(element: ElementTree.Element, shape: Shape, path: str) -> None:
    """Raise unless an XML element has the shape, without elements that the model does not have."""
    text = element.text or ""
    assert not element.attrib, path
    match shape:
        case StructureShape():
            _check_xml_structure(element, shape, path)
        case _ if shape.type_name == "string":
            assert len(element) == 0, path
            assert not getattr(shape, "enum", None) or text in shape.enum, path
        case _ if shape.type_name == "blob":
            base64.b64decode(text, validate=True)
        case _ if shape.type_name in ("integer", "long"):
            assert re.fullmatch(r"-?\d+", text), path
        case _:
            assert shape.type_name == "boolean", path
            assert text in ("true", "false"), path


def _check_xml_structure(element: ElementTree.Element, shape: StructureShape, path: str) -> None:
    members = {}
    for name, member in shape.members.items():
        item = member.member if isinstance(member, ListShape) else member  # Lists repeat the element of an item.
        members[item.serialization.get("name", name)] = name
    seen = set()
    for child in element:
        tag = child.tag.removeprefix(f"{{{NAMESPACE}}}")
        assert tag in members, f"{path} has {tag}"
        name = members[tag]
        member = shape.members[name]
        inner = f"{path}.{name}"
        if isinstance(member, MapShape):
            names = (member.key.serialization["name"], member.value.serialization["name"])
            assert tuple(each.tag.removeprefix(f"{{{NAMESPACE}}}") for each in child) == names, inner
            check_xml(child[0], member.key, inner)
            check_xml(child[1], member.value, inner)
        elif isinstance(member, ListShape):
            check_xml(child, member.member, inner)
        else:
            assert name not in seen, f"{inner} is there twice"
            check_xml(child, member, inner)
        seen.add(name)
    lists = {name for name, member in shape.members.items() if isinstance(member, ListShape)}
    assert set(shape.required_members) <= seen | lists, f"{path} has only {seen}"  # An empty list has no element.


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if other := os.environ.get("SQS_ENDPOINT_URL"):  # To compare with it.
        yield other
        return
    with anonymous_server(tmp_path_factory.mktemp("sqs-protocols")) as credentials:
        yield credentials.endpoint


@pytest.fixture(params=("json", "query"))
def protocol(request: pytest.FixtureRequest, endpoint: str) -> Protocol:
    if request.param == "json":
        return Json(endpoint, MODEL)
    return Query(endpoint, ServiceModel(query_model(), "sqs"))


def new_queue(protocol: Protocol, suffix: str = "", **attributes: Any) -> str:
    """The URL of a new queue; mappings in attributes become JSON."""
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in attributes.items()}
    name = f"{protocol.name}-{uuid.uuid4().hex}{suffix}"
    return str(protocol.call("CreateQueue", QueueName=name, Attributes=given)["QueueUrl"])


def arn_of(protocol: Protocol, url: str) -> str:
    found = protocol.call("GetQueueAttributes", QueueUrl=url, AttributeNames=["QueueArn"])
    return str(found["Attributes"]["QueueArn"])


def receive(protocol: Protocol, url: str, **parameters: Any) -> list[dict[str, Any]]:
    """Messages with everything that can be asked for."""
    names = {"MessageSystemAttributeNames": ["All"], "MessageAttributeNames": ["All"]}
    found = protocol.call("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=10, **names, **parameters)
    messages: list[dict[str, Any]] = found.get("Messages", [])
    return messages


def test_the_answers_of_all_actions_have_the_form_of_the_model(protocol: Protocol) -> None:
    call = protocol.call
    dead = new_queue(protocol)
    policy = {"deadLetterTargetArn": arn_of(protocol, dead), "maxReceiveCount": 1}
    queue = new_queue(protocol, VisibilityTimeout="100", RedrivePolicy=policy)
    _, _, name = queue.rpartition("/")
    assert call("GetQueueUrl", QueueName=name)["QueueUrl"] == queue
    for number in range(3):
        new_queue(protocol, f"_{number}")
    page = call("ListQueues", MaxResults=2, QueueNamePrefix=protocol.name)
    assert len(page["QueueUrls"]) == 2
    assert call("ListQueues", MaxResults=1_000, NextToken=page["NextToken"], QueueNamePrefix=protocol.name)["QueueUrls"]
    assert "QueueUrls" not in call("ListQueues", QueueNamePrefix=uuid.uuid4().hex)
    call("TagQueue", QueueUrl=queue, Tags={"a": "<&>", "b": ""})
    assert call("ListQueueTags", QueueUrl=queue)["Tags"] == {"a": "<&>", "b": ""}
    call("UntagQueue", QueueUrl=queue, TagKeys=["a", "b"])
    call("ListQueueTags", QueueUrl=queue)
    call("AddPermission", QueueUrl=queue, Label="a", AWSAccountIds=["1" * 12, "2" * 12], Actions=["SendMessage", "*"])
    call("RemovePermission", QueueUrl=queue, Label="a")
    call("SetQueueAttributes", QueueUrl=queue, Attributes={"DelaySeconds": "0", "ReceiveMessageWaitTimeSeconds": "0"})
    assert len(call("GetQueueAttributes", QueueUrl=queue, AttributeNames=["All"])["Attributes"]) > 10
    assert call("ListDeadLetterSourceQueues", QueueUrl=dead)["queueUrls"] == [queue]
    call("ListDeadLetterSourceQueues", QueueUrl=queue)

    assert receive(protocol, queue) == []
    attributes = {
        "text": {"DataType": "String", "StringValue": TEXTS[2]},
        "bytes": {"DataType": "Binary.png", "BinaryValue": bytes(range(256))},
    }
    options = {"MessageAttributes": attributes, "MessageSystemAttributes": {"AWSTraceHeader": TRACE}}
    sent = call("SendMessage", QueueUrl=queue, MessageBody="x", **options)
    assert set(sent) == {"MessageId", "MD5OfMessageBody", "MD5OfMessageAttributes", "MD5OfMessageSystemAttributes"}
    entries = [{"Id": str(number), "MessageBody": text, **options} for number, text in enumerate(TEXTS)]
    batch = call("SendMessageBatch", QueueUrl=queue, Entries=[*entries, {"Id": "wrong", "MessageBody": "\x01"}])
    assert (len(batch["Successful"]), len(batch["Failed"])) == (len(TEXTS), 1)
    messages = receive(protocol, queue)
    assert sorted(message["Body"] for message in messages) == sorted([*TEXTS, "x"])
    assert all(message["MessageAttributes"] == attributes for message in messages)
    handles = [message["ReceiptHandle"] for message in messages]
    call("ChangeMessageVisibility", QueueUrl=queue, ReceiptHandle=handles[0], VisibilityTimeout=100)
    call("DeleteMessage", QueueUrl=queue, ReceiptHandle=handles[0])
    entries = [{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(handles[1:3])]
    wrong = {"Id": "wrong", "ReceiptHandle": "nonsense"}
    deleted = call("DeleteMessageBatch", QueueUrl=queue, Entries=[*entries, wrong])
    assert (len(deleted["Successful"]), len(deleted["Failed"])) == (2, 1)
    changes = [{"Id": str(number), "ReceiptHandle": each} for number, each in enumerate([*handles[3:], "nonsense"])]
    changed = call(
        "ChangeMessageVisibilityBatch",
        QueueUrl=queue,
        Entries=[{**each, "VisibilityTimeout": 0} for each in changes],
    )
    assert (len(changed["Successful"]), len(changed["Failed"])) == (3, 1)

    assert receive(protocol, queue) == []  # Now they are dead letters.
    source = policy["deadLetterTargetArn"]
    started = call("StartMessageMoveTask", SourceArn=source, MaxNumberOfMessagesPerSecond=1)
    [task] = call("ListMessageMoveTasks", SourceArn=source, MaxResults=10)["Results"]
    assert task["Status"] == "RUNNING"
    call("CancelMessageMoveTask", TaskHandle=started["TaskHandle"])
    assert call("ListMessageMoveTasks", SourceArn=source)["Results"][0]["Status"] in ("CANCELLING", "CANCELLED")
    fifo = new_queue(protocol, ".fifo", FifoQueue="true")
    order = {"MessageGroupId": "a", "MessageDeduplicationId": "b"}
    assert call("SendMessage", QueueUrl=fifo, MessageBody="x", **order)["SequenceNumber"]
    [message] = receive(protocol, fifo)
    assert message["Attributes"]["MessageDeduplicationId"] == "b"
    call("PurgeQueue", QueueUrl=fifo)
    call("DeleteQueue", QueueUrl=fifo)
    assert sorted(protocol.seen) == ACTIONS


# Errors. Each function makes one ready, and returns the call that is refused.

Call = tuple[str, dict[str, Any]]


def _batch(url: str, *ids: str, body: str = "x") -> Call:
    return "SendMessageBatch", {"QueueUrl": url, "Entries": [{"Id": id, "MessageBody": body} for id in ids]}


def _name_exists(protocol: Protocol) -> Call:
    _, _, name = new_queue(protocol).rpartition("/")
    return "CreateQueue", {"QueueName": name, "Attributes": {"DelaySeconds": "7"}}


def _deleted_recently(protocol: Protocol) -> Call:
    url = new_queue(protocol)
    protocol.call("DeleteQueue", QueueUrl=url)
    return "CreateQueue", {"QueueName": url.rpartition("/")[2]}


def _purged_recently(protocol: Protocol) -> Call:
    url = new_queue(protocol)
    protocol.call("PurgeQueue", QueueUrl=url)
    return "PurgeQueue", {"QueueUrl": url}


def _too_many_permissions(protocol: Protocol) -> Call:
    url = new_queue(protocol)
    for number in range(20):
        label = {"QueueUrl": url, "Label": str(number)}
        protocol.call("AddPermission", **label, AWSAccountIds=["1" * 12], Actions=["SendMessage"])
    return "AddPermission", {"QueueUrl": url, "Label": "x", "AWSAccountIds": ["1" * 12], "Actions": ["SendMessage"]}


def _list_value(protocol: Protocol) -> Call:
    attributes = {"list": {"DataType": "String", "StringValue": "a", "StringListValues": ["a"]}}
    return "SendMessage", {"QueueUrl": new_queue(protocol), "MessageBody": "x", "MessageAttributes": attributes}


PROVOKED: dict[str, Callable[[Protocol], Call]] = {
    "BatchEntryIdsNotDistinct": lambda protocol: _batch(new_queue(protocol), "a", "a"),
    "BatchRequestTooLong": lambda protocol: _batch(new_queue(protocol), *"abc", body="x" * 400_000),
    "EmptyBatchRequest": lambda protocol: _batch(new_queue(protocol)),
    "InvalidAddress": lambda _: ("GetQueueAttributes", {"QueueUrl": ""}),
    "InvalidAttributeName": lambda protocol: (
        "SetQueueAttributes",
        {"QueueUrl": new_queue(protocol), "Attributes": {"Unknown": "1"}},
    ),
    "InvalidAttributeValue": lambda protocol: (
        "SetQueueAttributes",
        {"QueueUrl": new_queue(protocol), "Attributes": {"DelaySeconds": "-1"}},
    ),
    "InvalidBatchEntryId": lambda protocol: _batch(new_queue(protocol), "a b"),
    "InvalidMessageContents": lambda protocol: (
        "SendMessage",
        {"QueueUrl": new_queue(protocol), "MessageBody": "\x01"},
    ),
    "OverLimit": _too_many_permissions,
    "PurgeQueueInProgress": _purged_recently,
    "QueueDeletedRecently": _deleted_recently,
    "QueueDoesNotExist": lambda protocol: ("GetQueueUrl", {"QueueName": "absent"}),
    "QueueNameExists": _name_exists,
    "ReceiptHandleIsInvalid": lambda protocol: (
        "DeleteMessage",
        {"QueueUrl": new_queue(protocol), "ReceiptHandle": "nonsense"},
    ),
    "ResourceNotFoundException": lambda protocol: (
        "StartMessageMoveTask",
        {"SourceArn": "arn:aws:sqs:us-east-1:000000000000:absent"},
    ),
    "TooManyEntriesInBatchRequest": lambda protocol: _batch(new_queue(protocol), *"abcdefghijk"),
    "UnsupportedOperation": _list_value,
}
SIGNED = {"RequestThrottled"}  # By a request that is sent again, which needs signatures.
# Of accounts and encryption keys that there are not, one that is deprecated, and one that AWS does not answer either.
NEVER = {
    "MessageNotInflight",
    "InvalidIdFormat",
    "InvalidSecurity",
    "KmsAccessDenied",
    "KmsDisabled",
    "KmsInvalidKeyUsage",
    "KmsInvalidState",
    "KmsNotFound",
    "KmsOptInRequired",
    "KmsThrottled",
}


def test_every_error_of_the_model_is_provoked_or_cannot_happen() -> None:
    assert set(PROVOKED) | SIGNED | NEVER == MODELLED
    assert len(PROVOKED) + len(SIGNED) + len(NEVER) == len(MODELLED)


def test_an_error_has_the_form_of_the_model(protocol: Protocol) -> None:
    failures = Failures()
    for name, provoke in PROVOKED.items():
        with failures.of(name):
            action, parameters = provoke(protocol)
            answer = protocol.ask(action, **parameters)
            assert protocol.error(answer)[0] == name, answer
            assert name in {shape.name for shape in MODEL.operation_model(action).error_shapes}
    failures.check()


def test_a_request_that_is_sent_again_is_throttled(tmp_path: Path) -> None:
    with signed_server(tmp_path) as credentials:
        for protocol in (
            Json(credentials.endpoint, MODEL),
            Query(credentials.endpoint, ServiceModel(query_model(), "sqs")),
        ):
            body, headers = protocol.request("CreateQueue", QueueName=protocol.name)
            headers["amz-sdk-invocation-id"] = str(uuid.uuid4())
            request = AWSRequest("POST", f"{credentials.endpoint}/", headers, body)
            keys = Credentials(credentials.access_key_id, credentials.secret_access_key)
            SigV4Auth(keys, "sqs", "us-east-1").add_auth(request)
            assert protocol.send(body, headers=dict(request.headers)).status == 200
            again = protocol.send(body, headers=dict(request.headers))
            assert protocol.error(again)[0] == "RequestThrottled"
            assert "RequestThrottled" in {shape.name for shape in MODEL.operation_model("CreateQueue").error_shapes}


COMMON: dict[str, tuple[str, dict[str, Any]]] = {
    "missing queue": ("SendMessage", {"MessageBody": "x"}),
    "missing body": ("SendMessage", {"QueueUrl": "QUEUE"}),
    "missing entries": ("SendMessageBatch", {"QueueUrl": "QUEUE"}),
    "missing id": ("DeleteMessageBatch", {"QueueUrl": "QUEUE", "Entries": [{"ReceiptHandle": "x"}]}),
    "limit": ("ReceiveMessage", {"QueueUrl": "QUEUE", "MaxNumberOfMessages": 11}),
    "name": ("CreateQueue", {"QueueName": "a b"}),
}


def test_common_errors_have_the_same_form(protocol: Protocol) -> None:
    failures = Failures()
    missing = {"MissingParameter", ERRORS["EmptyBatchRequest"][0], "EmptyBatchRequest"}
    for case, (action, parameters) in COMMON.items():
        with failures.of(case):
            queue = {"QueueUrl": new_queue(protocol)} if "QueueUrl" in parameters else {}
            name, code = protocol.error(protocol.ask(action, **parameters | queue))
            assert code in (missing if "missing" in case else {"InvalidParameterValue"}), (name, code)
    failures.check()


# What the SDKs do not send.


@pytest.fixture
def json_protocol(endpoint: str) -> Json:
    return Json(endpoint, MODEL)


@pytest.fixture
def query_protocol(endpoint: str) -> Query:
    return Query(endpoint, ServiceModel(query_model(), "sqs"))


def _target(action: str) -> dict[str, str]:
    return {"content-type": "application/x-amz-json-1.0", "x-amz-target": f"AmazonSQS.{action}"}


def test_json_of_the_wrong_form_is_refused(json_protocol: Json) -> None:
    queue = new_queue(json_protocol)
    for body in (
        b"",
        b"nonsense",
        b"[]",
        b"\xff",
        b'{"QueueUrl": 1, "MessageBody": "x"}',
        json.dumps({"QueueUrl": queue, "MessageBody": 1}),
        json.dumps({"QueueUrl": queue, "MessageBody": ["x"]}),
        json.dumps({"QueueUrl": queue, "MessageBody": "x", "DelaySeconds": "many"}),
        json.dumps({"QueueUrl": queue, "MessageBody": "x", "MessageAttributes": []}),
        json.dumps({"QueueUrl": queue, "MessageBody": "\ud800"}),
    ):
        answer = json_protocol.send(body, headers=_target("SendMessage"))
        assert answer.status == 400, (body, answer)
        json_protocol.error(answer)
    wrong_bytes = {"a": {"DataType": "Binary", "BinaryValue": "no base64!"}}
    body = json.dumps({"QueueUrl": queue, "MessageBody": "x", "MessageAttributes": wrong_bytes})
    assert json_protocol.send(body, headers=_target("SendMessage")).status == 400
    assert receive(json_protocol, queue) == []


def test_unknown_members_are_ignored_and_nulls_are_absent(json_protocol: Json) -> None:
    queue = new_queue(json_protocol)
    body = {"QueueUrl": queue, "MessageBody": "x", "Newer": {"a": [1]}, "DelaySeconds": None, "MessageAttributes": None}
    headers = _target("SendMessage") | {"content-type": "application/x-amz-json-1.0; charset=utf-8"}
    assert json_protocol.send(json.dumps(body), headers=headers).status == 200
    assert len(receive(json_protocol, queue)) == 1


def test_unknown_actions_are_refused(json_protocol: Json, query_protocol: Query) -> None:
    for action in ("Fly", "sendmessage", ""):
        answer = json_protocol.send("{}", headers=_target(action))
        assert 400 <= answer.status < 500
        json_protocol.error(answer)
        answer = query_protocol.send(urlencode({"Action": action}), headers=_form())
        assert query_protocol.error(answer)[1] in ("InvalidAction", "MissingAction")
    answer = query_protocol.send("Version=2012-11-05", headers=_form())
    assert query_protocol.error(answer)[1] in ("MissingAction", "InvalidAction")


def _form() -> dict[str, str]:
    return {"content-type": "application/x-www-form-urlencoded; charset=utf-8"}


def test_query_calls_can_be_sent_to_the_url_of_a_queue(query_protocol: Query) -> None:
    queue = new_queue(query_protocol)
    path = urlsplit(queue).path.removeprefix(query_protocol.endpoint.path)
    body = urlencode({"Action": "SendMessage", "MessageBody": "posted", "Version": "2012-11-05"})
    assert query_protocol.send(body, headers=_form(), path=path).status == 200
    question = f"{path}?Action=SendMessage&Version=2012-11-05&MessageBody={quote('got + ä')}"
    assert query_protocol.send(b"", headers={}, path=question, method="GET").status == 200
    assert sorted(message["Body"] for message in receive(query_protocol, queue)) == ["got + ä", "posted"]


def test_query_lists_may_have_gaps_and_wrong_numbers_are_refused(query_protocol: Query) -> None:
    queue = new_queue(query_protocol)
    parameters = {
        "Action": "SendMessageBatch",
        "QueueUrl": queue,
        "SendMessageBatchRequestEntry.2.Id": "b",
        "SendMessageBatchRequestEntry.2.MessageBody": "second",
        "SendMessageBatchRequestEntry.7.Id": "a",
        "SendMessageBatchRequestEntry.7.MessageBody": "third",
        "SendMessageBatchRequestEntry.7.MessageAttribute.1.Name": "n",
        "SendMessageBatchRequestEntry.7.MessageAttribute.1.Value.DataType": "Number",
        "SendMessageBatchRequestEntry.7.MessageAttribute.1.Value.StringValue": "1",
    }
    answer = query_protocol.send(urlencode(parameters), headers=_form())
    assert answer.status == 200, answer
    assert sorted(message["Body"] for message in receive(query_protocol, queue)) == ["second", "third"]
    for wrong in ({"DelaySeconds": "many"}, {"DelaySeconds": ""}, {"MessageAttribute.x.Name": "n"}):
        body = urlencode({"Action": "SendMessage", "QueueUrl": queue, "MessageBody": "x", **wrong})
        assert query_protocol.send(body, headers=_form()).status in (200, 400)
    body = urlencode({"Action": "SendMessage", "QueueUrl": queue, "MessageBody": "x", "DelaySeconds": "many"})
    answer = query_protocol.send(body, headers=_form())
    assert query_protocol.error(answer)[1] in ("InvalidParameterValue", "MalformedInput"), answer


def test_the_host_of_a_queue_url_does_not_count(protocol: Protocol) -> None:
    queue = new_queue(protocol)
    _, account, name = queue.rsplit("/", 2)
    for url in (f"https://sqs.us-east-1.amazonaws.com/{account}/{name}", f"http://localhost:9324/{account}/{name}"):
        protocol.call("SendMessage", QueueUrl=url, MessageBody="x")
    assert len(receive(protocol, queue)) == 2
