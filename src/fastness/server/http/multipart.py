"""Multipart bodies in chunks: read in bounded memory, written without copying."""

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fastness.server.http.limits import PART_HEADER_BYTES_MAX, PART_HEADERS_MAX
from fastness.server.problems import HttpError

_BOUNDARY: Final = re.compile(rb"[0-9a-zA-Z'()+_,./:=? -]{1,70}\Z")  # RFC 2046


class MultipartReader:
    """Reads the parts of a multipart body in order; each has a name, headers, and a body in chunks."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        """
        Raises:
            HttpError: the content type names no boundary.
        """
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not _BOUNDARY.match(boundary):
            raise HttpError(
                400, "invalid_content_type", "The Content-Type of the multipart body has no valid boundary; add one"
            )
        self._body = body
        self._events: list[tuple[str, bytes]] = []
        self._field = self._value = b""
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": lambda: self._events.append(("part", b"")),
                "on_part_data": lambda data, start, end: self._events.append(("data", data[start:end])),
                "on_part_end": lambda: self._events.append(("end", b"")),
                "on_header_field": self._on_field,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": lambda: self._events.append(("body", b"")),
                "on_end": self._on_end,
            },
            max_header_count=PART_HEADERS_MAX,
            max_header_size=PART_HEADER_BYTES_MAX,
        )

    async def next_part(self) -> tuple[str, Mapping[str, str]] | None:
        """The name and the headers of the next part; None at the end. The rest of the current part is skipped.

        Raises:
            HttpError: the body is malformed, or truncated (the closing boundary is missing).
        """
        headers: dict[str, str] = {}
        while (event := await self._event()) is not None:
            kind, data = event
            if kind == "part":
                headers = {}
            elif kind == "header":
                field, _, value = data.partition(b":")
                headers[field.decode("latin-1").lower()] = value.decode("latin-1")
            elif kind == "body":
                options = parse_options_header(headers.get("content-disposition"))[1]
                return options.get(b"name", b"").decode("latin-1"), headers
        return None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body of the current part in chunks."""
        while (event := await self._event()) is not None:
            kind, data = event
            if kind == "end":
                return
            if kind == "data":
                yield data

    async def read_all(self, bytes_max: int) -> bytes:
        """The body of the current part, held in memory.

        Raises:
            HttpError: it is larger than `bytes_max`.
        """
        held = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                held += chunk
                if len(held) > bytes_max:
                    raise HttpError(413, "body_too_large", f"The part is larger than {bytes_max} bytes; shorten it")
        return bytes(held)

    async def _event(self) -> tuple[str, bytes] | None:
        while not self._events:
            chunk = await anext(self._body, None)
            if chunk is None:
                if not self._ended:
                    raise _malformed("it ends before its closing boundary")
                return None
            if self._ended:
                continue  # Data after the closing boundary is ignored (RFC 2046).
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _malformed(str(error)) from None
            self._events.reverse()
        return self._events.pop()

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        self._events.append(("header", self._field.strip() + b":" + self._value.strip()))
        self._field = self._value = b""

    def _on_end(self) -> None:
        self._ended = True


class MultipartWriter:
    """Writes a multipart/related body."""

    def __init__(self) -> None:
        self.boundary = secrets.token_hex(16)

    @property
    def content_type(self) -> str:
        """The Content-Type of the body."""
        return f'multipart/related; boundary={self.boundary}; type="application/json"'

    def part_head(self, name: str, content_type: str, size: int) -> bytes:
        """The boundary and the headers before the body of a part."""
        return (
            f'\r\n--{self.boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n'
            f"Content-Type: {content_type}\r\nContent-Length: {size}\r\n\r\n"
        ).encode("latin-1")

    def end(self) -> bytes:
        """The closing boundary."""
        return f"\r\n--{self.boundary}--\r\n".encode()


def _malformed(reason: str) -> HttpError:
    return HttpError(400, "invalid_body", f"The multipart body is malformed: {reason}")
