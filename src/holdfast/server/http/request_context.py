"""Visits: one request that came in, who sent it, and the one way for it to ask something of the plane."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from holdfast.names import UNIVERSE, checked_name
from holdfast.plane.idempotency import keyed_call_of
from holdfast.server.authorization import Guard
from holdfast.server.http.halls import Hall
from holdfast.server.http.limits import IDEMPOTENCY_KEY_CHARACTERS_MAX
from holdfast.server.http.media import is_json, media_type_of
from holdfast.server.http.problems import Refusal
from holdfast.wire.repeats import takes_key
from holdfast.wire.requests import Answer, Request

_TARGETS = ("queue", "world", "key", "name", "kind", "id", "universe")


class Visit:
    """One HTTP request. Its body is read within the limits; `ask` is guarded, checked, and done once."""

    def __init__(self, hall: Hall, request: HttpRequest, guard: Guard, media: str) -> None:
        self.hall = hall
        self.http = request
        self.guard = guard
        self.media = media  # What the caller wants to hear.
        self.correlation_id: str = request.scope["state"]["correlation_id"]
        named = (request.query_params.get("universe"), request.headers.get("x-holdfast-universe"))
        # One that is empty is a mistake, and no way to say main.
        checked = [checked_name("universe", each) for each in named if each is not None]
        self.universe = checked[0] if checked else UNIVERSE
        _check_key(request.headers.get("idempotency-key"))

    async def ask(
        self, request: Request[Answer], *, allowed: bool = False, keyed: bool = True, like: Request[Any] | None = None
    ) -> Answer:
        """The answer of the plane, if nothing is wrong with the request and the caller may make it, or was `allowed`
        to before its body was read.

        `like` is what the caller has sent, where the request has more than that. What is not `keyed` is asked more than
        once for one visit, and pays no heed to its key.
        """
        if not allowed:
            self.guard.allow(request)
        request.check()
        transport = self.hall.transport
        key = self._key(request) if keyed and takes_key(type(request)) else None
        answer: Answer = await transport.call(request, keyed_call_of(transport, request, key, again=True, like=like))
        self.hall.credits.saw(request, answer)
        return answer

    @property
    def has_key(self) -> bool:
        """Whether the caller will come again, with the same key, if it does not hear the answer."""
        return "idempotency-key" in self.http.headers

    async def body(self) -> bytes:
        """The whole body, held in memory.

        Raises:
            Refusal: it is too long, or takes too long.
        """
        limits = self.hall.limits
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(limits.body_seconds_max):
                async for piece in self._pieces(limits.body_bytes_max):
                    parts.append(piece)
        except TimeoutError:
            raise _too_slow() from None
        return b"".join(parts)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body a piece at a time.

        Raises:
            Refusal: it is too long, the next piece does not come, or so little at a time that it never ends.
        """
        limits = self.hall.limits
        size, waited = 0, 0.0
        async with aclosing(self._pieces(limits.stream_bytes_max)) as pieces:
            while True:
                left = limits.pause_seconds_max + size / limits.stream_bytes_per_second_min - waited
                began = time.monotonic()
                try:
                    async with asyncio.timeout(min(left, limits.pause_seconds_max)):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise _too_slow() from None
                waited += time.monotonic() - began
                size += len(piece)
                yield piece

    async def json(self, *, or_nothing: bool = False) -> Any:
        """The body, which is JSON; an empty object if there is none and none is needed."""
        media = media_type_of(self.http.headers)
        if media and not is_json(media):
            raise wrong_media(media, "application/json")
        data = await self.body()
        if not data and or_nothing:
            return {}
        if not media:
            raise wrong_media("nothing", "application/json")
        return parsed(data)

    async def gone(self) -> None:
        """Return when the caller has hung up. Only for when the body was read."""
        while (await self.http.receive())["type"] != "http.disconnect":
            pass

    def _pieces(self, bytes_max: int) -> AsyncGenerator[bytes, None]:
        declared = self.http.headers.get("content-length", "")
        if declared.isdigit():
            self._check_size(int(declared), bytes_max)
        return self._counted(bytes_max)

    async def _counted(self, bytes_max: int) -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in self.http.stream():
            size += len(piece)
            self._check_size(size, bytes_max)
            if piece:
                yield piece

    def _check_size(self, size: int, bytes_max: int) -> None:
        allow_body = getattr(self.guard, "allow_body", None)  # Tokens may have a smaller limit of their own.
        if allow_body is not None:
            allow_body(size)
        if size > bytes_max:
            raise _too_large(bytes_max)

    def _key(self, request: Request[Any]) -> str | None:
        """The name under which the outcome of a write is remembered, if the caller wants that."""
        given = self.http.headers.get("idempotency-key")
        if given is None:
            return None
        about = [type(request).__name__, *(str(getattr(request, name, "")) for name in _TARGETS), given]
        return f"{self.guard.name}/{hashlib.sha256(chr(0).join(about).encode()).hexdigest()}"


def parsed(data: bytes) -> Any:
    """What JSON says.

    Raises:
        Refusal: it is none.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_body", f"The body is not JSON ({error}); encode it again") from None


def _check_key(given: str | None) -> None:
    if given is not None and not 0 < len(given) <= IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise Refusal(
            400,
            "invalid_idempotency_key",
            f"An Idempotency-Key has 1 to {IDEMPOTENCY_KEY_CHARACTERS_MAX} characters; use a UUID",
        )


def wrong_media(found: str, wanted: str) -> Refusal:
    """The refusal of a body of another media type."""
    return Refusal(
        415, "invalid_content_type", f"The body is {found[:80]!r} and should be {wanted}; name it in Content-Type"
    )


def _too_large(bytes_max: int) -> Refusal:
    return Refusal(
        413,
        "body_too_large",
        f"The body has more than {bytes_max} bytes; send less at a time, or large payloads to /v1/blobs",
    )


def _too_slow() -> Refusal:
    return Refusal(
        408, "body_timeout", "The body did not come in time; send it faster", headers={"Connection": "close"}
    )
