"""Receipts of puts, and the results of messages."""

from typing import Any

import msgspec

from fastness.limits import PAYLOAD_INLINE_BYTES_MAX
from fastness.wire import AsyncTransport
from fastness.wire.blobs import GetBlob, PutBlob
from fastness.wire.json_values import decode_json, encode_json
from fastness.wire.queues import GetResult, NewResult, Receipt

_JSON = "application/json"


class AsyncPutReceipt(Receipt, frozen=True, dict=True):
    """The receipt of a put. `result` waits until its message is done.

    Where its queue is, is not a field: it is neither compared nor encoded.
    """

    async def result(self, *, wait_seconds: float = 0.0) -> Any:
        """The result that the message was acknowledged with, as soon as it is done: from JSON, or bytes; None if none.

        Raises:
            ResultNotReady: it is not done within `wait_seconds`.
            MessageFailed: it is a dead letter; the error has its last failure.
            MessageCancelled: it was cancelled.
            ResultNotKept: it is not in the queue any more, and no result was kept.
        """
        source: AsyncMessageSource = self.__dict__["source"]
        return await read_result(source.transport, source.universe, source.queue, self.id, wait_seconds=wait_seconds)


class AsyncMessageSource:
    """The queue of a receipt."""

    __slots__ = ("queue", "transport", "universe")

    def __init__(self, transport: AsyncTransport, universe: str, queue: str) -> None:
        self.transport = transport
        self.universe = universe
        self.queue = queue


def bound_receipt(source: AsyncMessageSource, receipt: Receipt) -> AsyncPutReceipt:
    """A receipt that can wait for the result of its message."""
    bound = AsyncPutReceipt(receipt.id, receipt.durability, receipt.duplicate, receipt.correlation_id)
    bound.__dict__["source"] = source
    return bound


async def read_result(transport: AsyncTransport, universe: str, queue: str, id: str, *, wait_seconds: float) -> Any:
    """The result of a message, as soon as it is done."""
    found = await transport.call(GetResult(queue, id, wait_seconds, universe))
    value = found.value
    if value is None:
        value = b"" if found.blob is None else (await transport.call(GetBlob(found.blob, universe))).data
    if not found.content_type:
        return None
    return decode_json(value) if found.content_type == _JSON else value


async def new_result(transport: AsyncTransport, universe: str, value: Any) -> NewResult:
    """A result as it is stored: bytes as they are, anything else as JSON; a large one as a blob."""
    return await stored_result(transport, universe, encoded_result(value))


def encoded_result(value: Any) -> NewResult:
    """A result inline, whatever its size: bytes as they are, anything else as JSON."""
    is_bytes = isinstance(value, bytes | bytearray | memoryview)
    return NewResult(bytes(value)) if is_bytes else NewResult(encode_json(value), _JSON)


async def stored_result(transport: AsyncTransport, universe: str, result: NewResult) -> NewResult:
    """The result, with a large value stored as a blob."""
    if len(result.value) <= PAYLOAD_INLINE_BYTES_MAX:
        return result
    stored = await transport.call(PutBlob(result.value, universe, pinned=False))
    return msgspec.structs.replace(result, value=b"", blob=stored.hash, blob_size=len(result.value))
