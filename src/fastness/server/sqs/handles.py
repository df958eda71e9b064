"""Receipt handles: what a client of SQS sends to delete a message, or to change its visibility.

    version 1 │ queue 9 │ received 6 │ id 16 │ fence 8 │ lease and position 17      bytes, as base64 without padding

`queue` is a digest of the universe and the name: a handle is refused at another queue. `received` is the time of the
delivery in milliseconds, from which the 12 hours of a message's visibility count. Handles are not signed: they are
worth no more than the lease that they name, which is looked up in the caller's own queue.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import Final, NamedTuple

from fastness.server.sqs.errors import SqsError
from fastness.wire.queues import LEASE_BYTES, MessageLease
from fastness.wire.stored_messages import format_id, format_lease_id

_VERSION: Final = 1
_QUEUE_BYTES: Final = 9
_FORM: Final = Struct(f">B{_QUEUE_BYTES}s6s16sQ{LEASE_BYTES + 1}s")
_CHARACTERS: Final = _FORM.size // 3 * 4


class Receipt(NamedTuple):
    """What a receipt handle names: a delivery, and its time."""

    lease: MessageLease
    received_ms: int


def receipt_handle(universe: str, queue: str, *, id: bytes, fence: int, ref: bytes, received_ms: int) -> str:
    """The handle of a delivery."""
    received = received_ms.to_bytes(6, "big")
    return urlsafe_b64encode(_FORM.pack(_VERSION, _digest(universe, queue), received, id, fence, ref)).decode()


def parse_handle(universe: str, queue: str, handle: str) -> Receipt:
    """The delivery that a handle names.

    Raises:
        SqsError: it is not a handle, or one of another queue (ReceiptHandleIsInvalid).
    """
    try:
        data = urlsafe_b64decode(handle.encode("ascii")) if len(handle) == _CHARACTERS else b""
    except ValueError:  # Of characters that are not ASCII, too.
        data = b""
    if len(data) != _FORM.size or urlsafe_b64encode(data).decode() != handle:
        raise invalid_handle(handle)
    version, digest, received, id, fence, ref = _FORM.unpack(data)
    if version != _VERSION or digest != _digest(universe, queue):
        raise invalid_handle(handle)
    lease = MessageLease(format_id(id), format_lease_id(id, fence, ref), fence)
    return Receipt(lease, int.from_bytes(received, "big"))


def invalid_handle(handle: str) -> SqsError:
    """The error of a text that is not a handle of the queue."""
    return SqsError(
        "ReceiptHandleIsInvalid", f'The input receipt handle "{handle[:200]}" is not a valid receipt handle.'
    )


@lru_cache(maxsize=4_096)
def _digest(universe: str, queue: str) -> bytes:
    return blake2b(f"{universe}/{queue}".encode(), digest_size=_QUEUE_BYTES).digest()
