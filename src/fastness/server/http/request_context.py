"""The context of one HTTP request: its headers, its body within the limits, its caller, and calls to the plane."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from fastness.names import UNIVERSE, checked_name
from fastness.plane.idempotency import keyed_call_of
from fastness.server.audit import call_audited
from fastness.server.authorization import Authorizer
from fastness.server.http.context import HttpContext
from fastness.server.http.limits import IDEMPOTENCY_KEY_CHARACTERS_MAX
from fastness.server.http.media import is_json, media_type_of
from fastness.server.problems import HttpError, draining_error
from fastness.wire.requests import Answer, Request

_TARGETS = ("queue", "world", "key", "name", "kind", "id", "universe")


class RequestContext:
    """One HTTP request. `call` authorizes and checks a plane request and applies the idempotency key."""

    def __init__(self, http_context: HttpContext, request: HttpRequest, authorizer: Authorizer, media: str) -> None:
        self.http_context = http_context
        self.request = request
        self.authorizer = authorizer
        self.media = media  # The media type of the response.
        self.correlation_id: str = request.scope["state"]["correlation_id"]
        named = (request.query_params.get("universe"), request.headers.get("x-fastness-universe"))
        # An empty name is an error; it does not mean the default universe.
        checked = [checked_name("universe", each) for each in named if each is not None]
        self.universe = checked[0] if checked else UNIVERSE
        _check_idempotency_key(request.headers.get("idempotency-key"))

    async def call(
        self,
        request: Request[Answer],
        *,
        authorized: bool = False,
        use_key: bool = True,
        as_sent: Request[Any] | None = None,
    ) -> Answer:
        """Authorize, check and execute a plane request; returns the plane's answer.

        `authorized`: the caller was authorized before the body was read. `as_sent` is the request without the fields
        that the server has added; repeated calls are compared by it. `use_key=False` ignores the idempotency key, for
        endpoints that make several calls.
        """
        if not authorized:
            self.authorizer.authorize(request)
        request.check()
        request = self.authorizer.attributed(request)
        transport = self.http_context.transport
        key = self._outcome_key(request) if use_key and request.operation.takes_key else None
        keyed_call = keyed_call_of(transport, request, key, again=True, like=as_sent)
        answer: Answer = await call_audited(
            transport, self.authorizer, request, lambda: transport.call(request, keyed_call)
        )
        self.http_context.flow_control.observe(request, answer)
        return answer

    async def call_while_connected(self, request: Request[Answer]) -> Answer:
        """`call` a request that waits and can be repeated; for `wait_seconds_max` of the server at most.

        The wait ends early if the caller disconnects or the server shuts down. Call this only after the body was read.

        Raises:
            ClientDisconnect: the caller has disconnected.
            HttpError: the server is shutting down.
        """
        asked = getattr(request, "wait_seconds", 0.0)
        if asked <= 0:
            return await self.call(request)
        wait_seconds = min(asked, self.http_context.limits.wait_seconds_max)
        calling = asyncio.create_task(self.call(msgspec.structs.replace(request, wait_seconds=wait_seconds)))
        disconnected = asyncio.create_task(self.wait_for_disconnect())
        draining = asyncio.create_task(self.http_context.wait_for_drain())
        try:
            await asyncio.wait([calling, disconnected, draining], return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise ClientDisconnect if disconnected.done() else draining_error()
        finally:
            for task in (calling, disconnected, draining):
                task.cancel()

    @property
    def given_correlation_id(self) -> str | None:
        """The correlation id that the caller sent; None if the server made one for the request."""
        given = self.request.headers.get("x-correlation-id")
        return given if given == self.correlation_id else None

    @property
    def has_idempotency_key(self) -> bool:
        """Whether the caller can repeat this request safely if the response is lost."""
        return "idempotency-key" in self.request.headers

    async def body(self) -> bytes:
        """The whole body, held in memory.

        Raises:
            HttpError: the body is too large or too slow.
        """
        limits = self.http_context.limits
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(limits.body_seconds_max):
                async for chunk in self._chunks(limits.body_bytes_max):
                    parts.append(chunk)
        except TimeoutError:
            raise _body_too_slow() from None
        return b"".join(parts)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body in chunks.

        Raises:
            HttpError: the body is too large, a pause is too long, or the transfer is slower than the minimum rate.
        """
        limits = self.http_context.limits
        size, waited = 0, 0.0
        async with aclosing(self._chunks(limits.stream_bytes_max)) as chunks:
            while True:
                left = limits.pause_seconds_max + size / limits.stream_bytes_per_second_min - waited
                began = time.monotonic()
                try:
                    async with asyncio.timeout(min(left, limits.pause_seconds_max)):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise _body_too_slow() from None
                waited += time.monotonic() - began
                size += len(chunk)
                yield chunk

    async def json(self, *, allow_empty: bool = False) -> Any:
        """The JSON body; with `allow_empty`, an empty object if there is no body."""
        media = media_type_of(self.request.headers)
        if media and not is_json(media):
            raise unsupported_media_type(media, "application/json")
        data = await self.body()
        if not data and allow_empty:
            return {}
        if not media:
            raise unsupported_media_type("", "application/json")
        return parse_json(data)

    async def wait_for_disconnect(self) -> None:
        """Return when the caller disconnects. Call this only after the body was read."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def _chunks(self, bytes_max: int) -> AsyncGenerator[bytes, None]:
        declared = self.request.headers.get("content-length", "")
        if declared.isdigit():
            self._check_size(int(declared), bytes_max)
        return self._checked_chunks(bytes_max)

    async def _checked_chunks(self, bytes_max: int) -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in self.request.stream():
            size += len(chunk)
            self._check_size(size, bytes_max)
            if chunk:
                yield chunk

    def _check_size(self, size: int, bytes_max: int) -> None:
        self.authorizer.authorize_body(size)  # A token may have a smaller limit than the server.
        if size > bytes_max:
            raise _body_too_large(bytes_max)

    def _outcome_key(self, request: Request[Any]) -> str | None:
        """The key under which the outcome of a write is stored, if the caller sent an idempotency key."""
        given = self.request.headers.get("idempotency-key")
        if given is None:
            return None
        parts = [type(request).__name__, *(str(getattr(request, name, "")) for name in _TARGETS), given]
        return f"{self.authorizer.name}/{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"


def parse_json(data: bytes) -> Any:
    """Decode a JSON body.

    Raises:
        HttpError: the body is not valid JSON.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HttpError(400, "invalid_body", f"The body is not valid JSON: {error}") from None


def _check_idempotency_key(given: str | None) -> None:
    if given is not None and not 0 < len(given) <= IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise HttpError(
            400,
            "invalid_idempotency_key",
            f"An Idempotency-Key has 1 to {IDEMPOTENCY_KEY_CHARACTERS_MAX} characters; for example, use a UUID",
        )


def unsupported_media_type(found: str, wanted: str) -> HttpError:
    """The error for a body whose media type the endpoint does not accept."""
    problem = f"The Content-Type of the body is {found[:80]!r}" if found else "The request has no Content-Type"
    return HttpError(415, "invalid_content_type", f"{problem}; send {wanted}")


def _body_too_large(bytes_max: int) -> HttpError:
    return HttpError(
        413,
        "body_too_large",
        f"The body is larger than {bytes_max} bytes; send smaller batches, or store large payloads at /v1/blobs",
    )


def _body_too_slow() -> HttpError:
    return HttpError(
        408, "body_timeout", "The body did not arrive in time; send it faster", headers={"Connection": "close"}
    )
