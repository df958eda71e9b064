"""The ASGI app that answers SQS requests.

    request ──► body within its bound ──► caller by its signature ──► parameters ──► action ──► JSON or XML

    POST /                        X-Amz-Target: AmazonSQS.SendMessage, and a JSON object
    POST /, GET /                 Action=SendMessage, and the other parameters as form fields
    POST /000000000000/orders     the same; the path names the queue of a request without a QueueUrl

It makes its own error responses, in the protocol of the request, so no middleware of the HTTP API is around it.
"""

import asyncio
import logging
import re
import uuid
from collections import Counter
from functools import partial
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from fastness.errors import Corrupt, FastnessError
from fastness.limits import SQS_BODY_BYTES_MAX
from fastness.server import tracing
from fastness.server.context import ServerContext
from fastness.server.http.context import HttpContext
from fastness.server.http.limits import HttpLimits
from fastness.server.http.middleware import is_cross_origin, linger
from fastness.server.logs import RateLimitFilter, correlation_id_of, correlation_scope
from fastness.server.refusals import is_counted, request_scope
from fastness.server.sqs import json_protocol, query_protocol
from fastness.server.sqs.caller import Actions, SqsAuthentication, SqsCaller
from fastness.server.sqs.errors import INTERNAL_FAILURE, UNAVAILABLE, SqsError, sqs_error
from fastness.server.sqs.model import Action

_log = logging.getLogger("fastness.sqs")
_refusals = logging.getLogger("fastness.sqs.refusals")
_refusals.addFilter(RateLimitFilter(per_second=20))  # Malformed requests must not fill the disk with log lines.

OTHER: Final = "other"  # In metrics: an action that does not exist, or a code that is not of the API.
_OK: Final = "ok"
_JSON_MEDIA: Final = "application/x-amz-json"
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}", re.ASCII)
_QUEUE_PATH: Final = re.compile(r"/([0-9]{12})/([^/]{1,256})/?", re.ASCII)
_SHORT_SECONDS: Final = 0.25  # A receive that takes longer waits for messages, so its connection is watched.
_CLOSING: Final = frozenset((408, 413))  # The rest of the body is not read.
_RETRY: Final = "The server is shutting down; retry in a few seconds"


class _Response(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    media_type: str
    headers: dict[str, str] = {}


class _Exchange:
    """One HTTP request while it is answered."""

    def __init__(self, scope: Scope, receive: Receive, prefix: str) -> None:
        self.headers = Headers(scope=scope)
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(prefix)
        self.prefix = prefix
        self.scope = scope
        self.receive = receive
        self.request_id = str(uuid.uuid4())
        self.action: Action | None = None
        self.is_body_unread = True
        media_type = self.headers.get("content-type", "")
        self.is_json = "x-amz-target" in self.headers or media_type.startswith(_JSON_MEDIA)

    @property
    def client(self) -> str:
        client: str = (self.scope.get("client") or ("", 0))[0]
        return client

    @property
    def own_url(self) -> str:
        """The URL that the client has called, without the part that names a queue."""
        host = self.headers.get("host", "")
        if not _HOST.fullmatch(host):
            address, port = self.scope.get("server") or ("localhost", None)
            host = f"{address}:{port}" if port else address
        return f"{self.scope.get('scheme', 'http')}://{host}{self.prefix}"

    @property
    def queue_path(self) -> str | None:
        """The part of the path that names a queue; None if there is none.

        Raises:
            SqsError: it has another form.
        """
        if self.path in ("", "/"):
            return None
        found = _QUEUE_PATH.fullmatch(self.path)
        if found is None:
            raise SqsError("InvalidAddress", f"The address {self.path[:200]} is not valid for this endpoint.")
        return f"/{found[1]}/{found[2]}"

    async def body(self, seconds_max: float) -> bytes:
        """The body of the request.

        Raises:
            SqsError: it is too large or too slow.
            ClientDisconnect: the client has disconnected.
        """
        declared = self.headers.get("content-length", "0")
        if len(declared) > len(str(SQS_BODY_BYTES_MAX)) or (
            declared.isdecimal() and int(declared) > SQS_BODY_BYTES_MAX
        ):
            raise _too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds_max):
                while self.is_body_unread:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message.get("body", b""))
                    self.is_body_unread = bool(message.get("more_body"))
                    size += len(parts[-1])
                    if size > SQS_BODY_BYTES_MAX:
                        raise _too_large()
        except TimeoutError:
            raise SqsError("RequestTimeout", "The body did not arrive in time; send it faster") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def wait_for_disconnect(self) -> None:
        """Return when the client disconnects. Call this only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def response(self, output: dict[str, Any]) -> _Response:
        """The response with the output of the action."""
        if self.is_json:
            return _Response(200, json_protocol.encode(output), json_protocol.MEDIA_TYPE)
        assert self.action is not None, "an action has run"
        return _Response(200, query_protocol.encode(self.action, output, self.request_id), query_protocol.MEDIA_TYPE)

    def error_response(self, error: SqsError) -> _Response:
        """The response with an error."""
        headers = {"connection": "close"} if error.status in _CLOSING and self.is_body_unread else {}
        if self.is_json:
            body, more = json_protocol.encode_error(error)
            return _Response(error.status, body, json_protocol.MEDIA_TYPE, headers | more)
        body = query_protocol.encode_error(error, self.request_id)
        return _Response(error.status, body, query_protocol.MEDIA_TYPE, headers)


class SqsEndpoint:
    """Answers SQS requests: as an app of its own at the root of its port, or `under` a path of another app."""

    def __init__(
        self,
        context: ServerContext,
        actions: Actions,
        authenticator: SqsAuthentication,
        *,
        url: str | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        """`url` is the public URL that queue URLs begin with; by default it is what each client has called."""
        self._context = context
        self._actions = actions
        self._authenticator = authenticator
        self._url = None if url is None else url.rstrip("/")
        self._http = HttpContext(context, limits or HttpLimits())
        self.requests: Counter[tuple[str, str]] = Counter()  # By action and code.

    def under(self, prefix: str) -> ASGIApp:
        """The app for requests whose paths begin with `prefix`."""
        return partial(self._answer, prefix=prefix)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, prefix: str = "") -> None:
        exchange = _Exchange(scope, receive, prefix)
        correlation_id = correlation_id_of(exchange.headers)
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        with correlation_scope(correlation_id), tracing.caused_by(exchange.headers), request_scope():
            try:
                response = exchange.response(await self._output(exchange))
            except ClientDisconnect:
                return
            except SqsError as error:
                response = self._refusal(exchange, error)
            except FastnessError as error:
                if isinstance(error, Corrupt):
                    _log.error("%s: %s: %s", _name(exchange), error.code, error)
                response = self._refusal(exchange, sqs_error(error))
            except Exception as error:
                _log.error("%s failed", _name(exchange), exc_info=error)
                hint = f"Unexpected error; the server's log has the details under correlation id {correlation_id}"
                response = self._refusal(exchange, SqsError("InternalFailure", INTERNAL_FAILURE, hint=hint))
            else:
                self.requests[_name(exchange), _OK] += 1
            if response.status in _CLOSING and exchange.is_body_unread:
                send = linger(receive, send)
            await _send(send, exchange, response, correlation_id)

    async def _output(self, exchange: _Exchange) -> dict[str, Any]:
        """Check and execute a request."""
        if self._context.draining:
            raise SqsError("ServiceUnavailable", UNAVAILABLE, hint=_RETRY)
        if is_cross_origin(exchange.headers):
            raise SqsError(
                "AccessDenied", "Web pages of other origins may not call this server; call it from a program"
            )
        if exchange.method != "POST" and (exchange.method != "GET" or exchange.is_json):
            raise SqsError("MethodNotAllowed", f"The method {exchange.method[:20]} is not supported; use POST")
        queue_path = exchange.queue_path
        body = await exchange.body(self._http.limits.body_seconds_max)
        caller = self._caller(exchange, body)
        parameters = _parameters(exchange, body, None if queue_path is None else caller.base_url + queue_path)
        assert exchange.action is not None, "the parameters are those of an action"
        if exchange.action.name == "ReceiveMessage" and parameters.get("WaitTimeSeconds") != 0:
            return await self._call_while_connected(exchange, caller, exchange.action, parameters)
        return await self._actions.call(caller, exchange.action.name, parameters)

    def _caller(self, exchange: _Exchange, body: bytes) -> SqsCaller:
        scope = exchange.scope
        raw_path = scope.get("raw_path") or scope["path"].encode()
        return self._authenticator.authenticate(
            exchange.method,
            raw_path.decode("latin-1"),
            scope["query_string"].decode("latin-1"),
            exchange.headers,
            body,
            client=exchange.client,
            base_url=self._url or exchange.own_url,
        )

    async def _call_while_connected(
        self, exchange: _Exchange, caller: SqsCaller, action: Action, parameters: dict[str, Any]
    ) -> dict[str, Any]:
        """Execute an action that may wait for messages, until the client disconnects or the server shuts down.

        Raises:
            ClientDisconnect: the client has disconnected.
        """
        calling: asyncio.Future[Any] = asyncio.ensure_future(self._actions.call(caller, action.name, parameters))
        watching: list[asyncio.Future[Any]] = []
        try:
            await asyncio.wait((calling,), timeout=_SHORT_SECONDS)
            if not calling.done():
                disconnected = asyncio.ensure_future(exchange.wait_for_disconnect())
                watching = [disconnected, asyncio.ensure_future(self._http.wait_for_drain())]
                await asyncio.wait((calling, *watching), return_when=asyncio.FIRST_COMPLETED)
                if not calling.done():
                    if disconnected.done():
                        raise ClientDisconnect
                    return {}  # As if the wait were over: the client polls again, perhaps another server.
            output: dict[str, Any] = calling.result()
            return output
        finally:
            for task in (calling, *watching):
                task.cancel()

    def _refusal(self, exchange: _Exchange, error: SqsError) -> _Response:
        """Log and count an error; return its response."""
        self.requests[_name(exchange), error.query_code if error.is_known else OTHER] += 1
        if not is_counted():
            self._context.count_reject("sqs")
        _refusals.debug("refused: %s: %s %s: %s", _name(exchange), error.status, error.query_code, error.message)
        return exchange.error_response(error)


def _parameters(exchange: _Exchange, body: bytes, queue_url: str | None) -> dict[str, Any]:
    """Decode a request by its protocol."""
    if exchange.is_json:
        exchange.action = json_protocol.action_of(exchange.headers.get("x-amz-target", ""))
        return json_protocol.decode(exchange.action, body)
    try:
        sources = [exchange.scope["query_string"].decode(), body.decode()]
    except UnicodeDecodeError:
        raise SqsError("MalformedQueryString", "The request is not UTF-8; encode its fields so") from None
    fields = query_protocol.parse_form(*filter(None, sources))
    exchange.action = query_protocol.action_of(fields)
    if queue_url is not None and exchange.action.takes_queue_url:
        fields.setdefault("QueueUrl", queue_url)
    return query_protocol.decode(exchange.action, fields)


def _name(exchange: _Exchange) -> str:
    return OTHER if exchange.action is None else exchange.action.name


def _too_large() -> SqsError:
    message = f"The body is larger than {SQS_BODY_BYTES_MAX} bytes; send fewer or smaller messages at a time"
    return SqsError("RequestEntityTooLarge", message)


async def _send(send: Send, exchange: _Exchange, response: _Response, correlation_id: str) -> None:
    headers = [
        (b"content-type", response.media_type.encode()),
        (b"content-length", str(len(response.body)).encode()),
        (b"x-amzn-requestid", exchange.request_id.encode()),
        (b"x-correlation-id", correlation_id.encode()),
        *((name.encode(), value.encode()) for name, value in response.headers.items()),
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
