"""The bodies of messages: an argument, a file or standard input, with its content type."""

import itertools
from collections.abc import Iterator
from typing import IO

import msgspec

from fastness.cli import values
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.queues import MessageOptions
from fastness.limits import PAYLOAD_INLINE_BYTES_MAX
from fastness.wire.queues import NewMessage


def read_message(plane: Plane, stream: IO[bytes], options: MessageOptions) -> NewMessage:
    """A message with the stream's contents. A large payload is stored as a blob, in bounded memory."""
    first = stream.read(PAYLOAD_INLINE_BYTES_MAX + 1)
    if len(first) <= PAYLOAD_INLINE_BYTES_MAX:
        return inline_message(first, options)
    size = 0

    def count_bytes() -> Iterator[bytes]:
        nonlocal size
        for chunk in itertools.chain((first,), values.read_chunks(stream)):
            size += len(chunk)
            yield chunk

    hash = plane.blobs.write(count_bytes(), pinned=False)  # The message names it.
    return NewMessage(blob=hash, blob_size=size, **options)


def inline_message(body: bytes, options: MessageOptions) -> NewMessage:
    """A message with this body, whose content type is guessed if it is not given."""
    with_content_type: MessageOptions = {"content_type": guess_content_type(body), **options}
    return NewMessage(payload=body, **with_content_type)


def guess_content_type(body: bytes) -> str:
    """The content type of a body: JSON, text or bytes."""
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    else:
        return "application/json"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain; charset=utf-8" if body else "application/octet-stream"
