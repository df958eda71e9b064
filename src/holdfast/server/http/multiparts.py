"""Multipart bodies, a piece at a time: read in bounded memory, written without copying."""

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from holdfast.server.http.limits import PART_HEADER_BYTES_MAX, PART_HEADERS_MAX
from holdfast.server.http.problems import Refusal

_BOUNDARY: Final = re.compile(rb"[0-9a-zA-Z'()+_,./:=? -]{1,70}\Z")  # RFC 2046


class Parts:
    """The parts of a multipart body, in order, each a name, headers, and pieces."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        """
        Raises:
            Refusal: the content type names no boundary.
        """
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not _BOUNDARY.match(boundary):
            raise Refusal(400, "invalid_content_type", "The multipart body has no boundary; name it in Content-Type")
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

    async def next(self) -> tuple[str, Mapping[str, str]] | None:
        """The name and the headers of the next part; None at the end. What is left of the part before is skipped.

        Raises:
            Refusal: it is malformed, or its closing boundary is missing, so that some of it may be too.
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

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The pieces of this part's body."""
        while (event := await self._event()) is not None:
            kind, data = event
            if kind == "end":
                return
            if kind == "data":
                yield data

    async def whole(self, bytes_max: int) -> bytes:
        """This part's body, held in memory.

        Raises:
            Refusal: it is longer than it may be.
        """
        held = bytearray()
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                held += piece
                if len(held) > bytes_max:
                    raise Refusal(413, "body_too_large", f"This part has at most {bytes_max} bytes; shorten it")
        return bytes(held)

    async def _event(self) -> tuple[str, bytes] | None:
        while not self._events:
            piece = await anext(self._body, None)
            if piece is None:
                if not self._ended:
                    raise _malformed("it ends before its closing boundary")
                return None
            if self._ended:
                continue  # Whatever stands behind the closing boundary means nothing.
            try:
                self._parser.write(piece)
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


class Writer:
    """Makes a multipart/related body."""

    def __init__(self) -> None:
        self.boundary = secrets.token_hex(16)

    @property
    def content_type(self) -> str:
        """What the body is."""
        return f'multipart/related; boundary={self.boundary}; type="application/json"'

    def head(self, name: str, content_type: str, size: int) -> bytes:
        """What stands before the body of a part."""
        return (
            f'\r\n--{self.boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n'
            f"Content-Type: {content_type}\r\nContent-Length: {size}\r\n\r\n"
        ).encode("latin-1")

    def end(self) -> bytes:
        """What stands at the very end."""
        return f"\r\n--{self.boundary}--\r\n".encode()


def _malformed(reason: str) -> Refusal:
    return Refusal(400, "invalid_body", f"The multipart body is malformed: {reason}")
