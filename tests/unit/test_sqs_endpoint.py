"""The SQS endpoint over HTTP, with actions that return what the test says."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from xml.etree import ElementTree

import pytest
import uvicorn

from fastness.errors import InvalidArgument, InvalidSqsAttribute, NotAllowed, RateLimited
from fastness.limits import SQS_BODY_BYTES_MAX
from fastness.plane.open import Options, open_plane_async
from fastness.server.authorization import AllowAll
from fastness.server.context import ServerContext
from fastness.server.http.limits import HttpLimits
from fastness.server.metrics import Metrics
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.endpoint import SqsEndpoint
from fastness.server.sqs.errors import SqsError
from fastness.server.sqs.metrics import SqsMetrics
from fastness.server.sqs.mounting import check_sqs, is_sqs_path
from fastness.server.sqs.options import SqsOptions

URL: Final = "http://127.0.0.1:9440/sqs/000000000000/orders"
Call = Callable[[SqsCaller, str, dict[str, Any]], Awaitable[dict[str, Any]]]


class Answering:
    """Actions that return what `answer` returns, and keep what they were called with."""

    def __init__(self, answer: Call) -> None:
        self._answer = answer
        self.calls: list[tuple[SqsCaller, str, dict[str, Any]]] = []

    async def call(self, caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((caller, action, parameters))
        return await self._answer(caller, action, parameters)


class Everybody:
    """Admits every caller but those with the header `authorization: wrong`; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def authenticate(
        self, method: str, path: str, query_string: str, headers: Any, body: bytes, *, client: str, base_url: str
    ) -> SqsCaller:
        self.asked.append((method, path, query_string, body))
        if headers.get("Authorization") == "wrong":
            raise SqsError("SignatureDoesNotMatch", "The signature is wrong")
        return SqsCaller(authorizer=AllowAll(), universe="main", client=client, base_url=base_url, region="us-east-1")


class Endpoint:
    """An endpoint under `/sqs`, and requests to it."""

    def __init__(self, context: ServerContext, answer: Call, **options: Any) -> None:
        self.context = context
        self.actions = Answering(answer)
        self.authentication = Everybody()
        self.endpoint = SqsEndpoint(context, self.actions, self.authentication, **options)
        self.is_connected = asyncio.Event()

    async def request(
        self,
        method: str = "POST",
        path: str = "/sqs/",
        *,
        query: str = "",
        headers: dict[str, str] | None = None,
        body: bytes | list[bytes] = b"",
    ) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and body of a response."""
        chunks = body if isinstance(body, list) else [body]
        left = [
            {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
            for number, chunk in enumerate(chunks)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            if left:
                return left.pop(0)
            await self.is_connected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        given = {"host": "127.0.0.1:9440", **(headers or {})}
        scope = {
            "type": "http",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "client": ("127.0.0.1", 4711),
            "server": ("127.0.0.1", 9440),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        }
        await self.endpoint.under("/sqs")(scope, receive, send)
        if not sent:
            return 0, {}, b""
        response_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], response_headers, b"".join(message.get("body", b"") for message in sent[1:])

    async def json(self, action: str, parameters: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], Any]:
        all_headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0", **headers}
        status, found, body = await self.request(headers=all_headers, body=json.dumps(parameters).encode())
        return status, found, json.loads(body) if body else None

    async def form(self, form: str, **options: Any) -> tuple[int, dict[str, str], ElementTree.Element]:
        headers = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8", **options.pop("headers", {})}
        status, found, body = await self.request(headers=headers, body=form.encode(), **options)
        return status, found, ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", body))


async def send_message(caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"MessageId": f"{action} {parameters['MessageBody']}", "MD5OfMessageBody": caller.universe}


@pytest.fixture
async def context() -> AsyncIterator[ServerContext]:
    transport = await open_plane_async("memory:", Options())
    yield ServerContext(transport)
    await transport.close()


async def test_a_json_request_is_answered_in_json(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message)
    status, headers, body = await endpoint.json("SendMessage", {"QueueUrl": URL, "MessageBody": "hello"})
    assert (status, body) == (200, {"MessageId": "SendMessage hello", "MD5OfMessageBody": "main"})
    assert headers["content-type"] == "application/x-amz-json-1.0"
    assert re.fullmatch(r"[0-9a-f-]{36}", headers["x-amzn-requestid"])
    caller = endpoint.actions.calls[0][0]
    assert (caller.client, caller.base_url, caller.account) == (
        "127.0.0.1",
        "http://127.0.0.1:9440/sqs",
        "000000000000",
    )


async def test_a_form_is_answered_in_xml(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message)
    status, headers, body = await endpoint.form(f"Action=SendMessage&QueueUrl={URL}&MessageBody=a%26b")
    assert (status, headers["content-type"], body.tag) == (200, "text/xml", "SendMessageResponse")
    assert body.findtext("SendMessageResult/MessageId") == "SendMessage a&b"
    assert body.findtext("ResponseMetadata/RequestId") == headers["x-amzn-requestid"]


async def test_the_path_names_the_queue_of_a_form_without_a_queue_url(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message, url="https://sqs.example/")
    await endpoint.form("MessageBody=x", path="/sqs/000000000000/orders.fifo", query="Action=SendMessage")
    await endpoint.form("", method="GET", path="/sqs/000000000000/a/", query="Action=SendMessage&MessageBody=y")
    given = [parameters["QueueUrl"] for _, _, parameters in endpoint.actions.calls]
    assert given == ["https://sqs.example/000000000000/orders.fifo", "https://sqs.example/000000000000/a"]


async def test_the_authentication_sees_the_request_as_it_was_sent(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message)
    await endpoint.form("MessageBody=x%2By", path="/sqs/000000000000/orders", query="Action=SendMessage&X=%20")
    assert endpoint.authentication.asked == [
        ("POST", "/sqs/000000000000/orders", "Action=SendMessage&X=%20", b"MessageBody=x%2By")
    ]


async def test_a_wrong_signature_is_refused_before_the_body_is_decoded(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message)
    status, headers, body = await endpoint.json("SendMessage", {}, Authorization="wrong")
    assert (status, body["__type"]) == (403, "com.amazon.coral.service#InvalidSignatureException")
    assert headers["x-amzn-query-error"] == "SignatureDoesNotMatch;Sender"
    status, _, xml = await endpoint.form("Action=x", headers={"Authorization": "wrong"})
    assert (status, xml.findtext("Error/Code")) == (403, "SignatureDoesNotMatch")
    assert not endpoint.actions.calls


@pytest.mark.parametrize(
    ("error", "status", "code", "shown"),
    [
        (
            SqsError("QueueDoesNotExist", "There is no queue orders"),
            400,
            "AWS.SimpleQueueService.NonExistentQueue",
            ("There is no queue orders", ""),
        ),
        (NotAllowed("The token may not"), 403, "AccessDenied", ("The token may not", "")),
        (
            RateLimited("Too many calls"),
            403,
            "RequestThrottled",
            ("The request was denied due to request throttling.", "Too many calls"),
        ),
        (InvalidArgument("delay_seconds is -1"), 400, "InvalidParameterValue", ("delay_seconds is -1", "")),
        (
            InvalidSqsAttribute("Invalid value for the parameter DelaySeconds. Reason: The value is x."),
            400,
            "InvalidAttributeValue",
            ("Invalid value for the parameter DelaySeconds.", "The value is x."),
        ),
    ],
)
async def test_an_error_of_an_action_is_answered_in_both_protocols(
    context: ServerContext, error: Exception, status: int, code: str, shown: tuple[str, str]
) -> None:
    """The message is AWS's own, and what Fastness adds is beside it."""

    async def fail(caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        raise error

    endpoint = Endpoint(context, fail)
    found, headers, body = await endpoint.json("SendMessage", {"QueueUrl": URL, "MessageBody": "hello"})
    assert (found, headers["x-amzn-query-error"]) == (status, f"{code};Sender")
    assert (body["message"], body.get("hint", "")) == shown
    found, headers, xml = await endpoint.form(f"Action=SendMessage&QueueUrl={URL}&MessageBody=x")
    assert (found, xml.findtext("Error/Code"), xml.findtext("Error/Type")) == (status, code, "Sender")
    assert (xml.findtext("Error/Message"), xml.findtext("Error/Detail")) == shown
    assert xml.findtext("RequestId") == headers["x-amzn-requestid"]
    assert endpoint.endpoint.requests == {("SendMessage", code): 2}


async def test_an_unexpected_error_shows_nothing_of_itself(
    context: ServerContext, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("the password is hunter2")

    endpoint = Endpoint(context, fail)
    with caplog.at_level(logging.ERROR, "fastness.sqs"):
        status, headers, body = await endpoint.json("ListQueues", {}, **{"X-Correlation-Id": "abc"})
    assert (status, headers["x-amzn-query-error"]) == (500, "InternalFailure;Receiver")
    assert "hunter2" not in str(body)
    assert "abc" in body["hint"]
    assert headers["x-correlation-id"] == "abc"
    assert "hunter2" in caplog.text


@pytest.mark.parametrize(
    ("request_line", "headers", "status", "code"),
    [
        ("PUT /sqs/", {}, 405, "MethodNotAllowed"),
        ("GET /sqs/", {"X-Amz-Target": "AmazonSQS.ListQueues"}, 405, "MethodNotAllowed"),
        ("POST /sqs/1/2/3", {}, 404, "InvalidAddress"),
        ("POST /sqs/orders", {}, 404, "InvalidAddress"),
        ("POST /sqs/", {}, 400, "MissingAction"),
        ("POST /sqs", {"X-Amz-Target": "AmazonSQS.Fly"}, 404, "UnknownOperationException"),
        ("POST /sqs", {"Content-Type": "application/x-amz-json-1.0"}, 404, "UnknownOperationException"),
        ("POST /sqs/", {"Origin": "https://evil.example"}, 403, "AccessDenied"),
        ("POST /sqs/", {"Content-Length": str(SQS_BODY_BYTES_MAX + 1)}, 413, "RequestEntityTooLarge"),
        ("POST /sqs/", {"Content-Length": "9" * 5_000}, 413, "RequestEntityTooLarge"),
    ],
)
async def test_a_wrong_request_is_refused(
    context: ServerContext, request_line: str, headers: dict[str, str], status: int, code: str
) -> None:
    endpoint = Endpoint(context, send_message)
    found, _, body = await endpoint.request(*request_line.split(), headers=headers)
    assert (found, code in body.decode()) == (status, True)
    assert sum(endpoint.endpoint.requests.values()) == endpoint.endpoint.requests["other", code] == 1


async def test_a_long_body_is_refused_in_either_form(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message)
    chunk = b"x" * 1_048_576
    status, headers, _ = await endpoint.request(body=[chunk] * 5 + [b""])
    assert (status, headers["connection"]) == (413, "close")
    status, _, body = await endpoint.request(body=[b"Action=SendMessage&QueueUrl=q&", b"MessageBody=", b"x"])
    assert (status, b"SendMessage x" in body) == (200, True)


async def test_a_slow_body_is_refused(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message, limits=HttpLimits(body_seconds_max=0.01))

    async def never() -> Any:
        await asyncio.Event().wait()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    await asyncio.wait_for(endpoint.endpoint(scope, never, send), 10)
    assert sent[0]["status"] == 408


async def test_requests_are_refused_while_the_server_drains(context: ServerContext) -> None:
    endpoint = Endpoint(context, send_message)
    context.streams.drain()
    status, headers, body = await endpoint.json("SendMessage", {"QueueUrl": URL, "MessageBody": "hello"})
    assert (status, headers["x-amzn-query-error"]) == (503, "ServiceUnavailable;Receiver")
    assert "shutting down" in body["hint"]
    assert not endpoint.actions.calls


async def wait_for_ever(caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def test_a_waiting_receive_ends_empty_when_the_server_drains(context: ServerContext) -> None:
    endpoint = Endpoint(context, wait_for_ever)
    receiving = asyncio.create_task(endpoint.json("ReceiveMessage", {"QueueUrl": URL, "WaitTimeSeconds": 20}))
    while not endpoint.actions.calls:
        await asyncio.sleep(0)
    context.streams.drain()
    assert (await asyncio.wait_for(receiving, 10))[::2] == (200, {})


async def test_a_waiting_receive_ends_when_its_client_disconnects(context: ServerContext) -> None:
    ended = asyncio.Event()

    async def wait(caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            return await wait_for_ever(caller, action, parameters)
        finally:
            ended.set()

    endpoint = Endpoint(context, wait)
    endpoint.is_connected.set()  # Its next message is that the client is gone.
    status, _, _ = await asyncio.wait_for(endpoint.json("ReceiveMessage", {"QueueUrl": URL}), 10)
    assert status == 0
    await asyncio.wait_for(ended.wait(), 10)


async def test_metrics_have_a_bounded_number_of_labels(context: ServerContext) -> None:
    async def fail(caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        raise SqsError(parameters["QueueNamePrefix"], "An error of its own")

    endpoint = Endpoint(context, fail)
    metrics = Metrics()
    metrics.registry.register(SqsMetrics(endpoint.endpoint))
    for number in range(3):
        await endpoint.json("ListQueues", {"QueueNamePrefix": f"Error{number}"})
        await endpoint.json(f"Fly{number}", {})
    assert endpoint.endpoint.requests == {("ListQueues", "other"): 3, ("other", "UnknownOperationException"): 3}
    sample = metrics.registry.get_sample_value("fastness_sqs_requests_total", {"action": "ListQueues", "code": "other"})
    assert sample == 3


def test_anonymous_requests_are_for_loopback_addresses_only() -> None:
    check_sqs("127.0.0.1", SqsOptions(enabled=True, anonymous=True))
    check_sqs("0.0.0.0", SqsOptions(enabled=True))
    with pytest.raises(InvalidArgument, match="token create NAME --sqs"):
        check_sqs("0.0.0.0", SqsOptions(enabled=True, anonymous=True))


def test_paths_of_other_endpoints_are_not_taken() -> None:
    assert [
        path for path in ("/sqs", "/sqs/", "/sqs/000000000000/a", "/sqsx", "/v1/sqs", "/") if is_sqs_path(path)
    ] == [
        "/sqs",
        "/sqs/",
        "/sqs/000000000000/a",
    ]


@asynccontextmanager
async def listening(endpoint: SqsEndpoint) -> AsyncIterator[str]:
    """The URL of a server at a port of its own."""
    server = uvicorn.Server(uvicorn.Config(endpoint, port=0, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def test_boto3_calls_it_at_a_port_of_its_own(context: ServerContext) -> None:
    import boto3
    from botocore.config import Config

    async def answer(caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if action == "GetQueueUrl":
            return {"QueueUrl": f"{caller.base_url}/{caller.account}/{parameters['QueueName']}"}
        raise SqsError("QueueDoesNotExist", f"There is no queue {parameters['QueueUrl']}")

    endpoint = Endpoint(context, answer)
    async with listening(endpoint.endpoint) as url:

        def call() -> tuple[str, str]:
            client = boto3.client(
                "sqs",
                endpoint_url=url,
                region_name="us-east-1",
                aws_access_key_id="key",
                aws_secret_access_key="secret",
                config=Config(retries={"total_max_attempts": 1}),
            )
            queue = client.get_queue_url(QueueName="orders.fifo")["QueueUrl"]
            with pytest.raises(client.exceptions.QueueDoesNotExist) as caught:
                client.purge_queue(QueueUrl=queue)
            return queue, caught.value.response["Error"]["Code"]

        queue, code = await asyncio.to_thread(call)
    assert queue == f"{url}/000000000000/orders.fifo"
    assert code == "AWS.SimpleQueueService.NonExistentQueue"
