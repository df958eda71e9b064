"""Bodies that are streamed: blobs in both directions, over HTTP, in bounded memory."""

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from holdfast.wire.requests import Answer, Request


async def send_body(port: Any, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
    raise NotImplementedError


async def receive_body(port: Any, request: Request[Answer]) -> AsyncIterator[bytes]:
    raise NotImplementedError
