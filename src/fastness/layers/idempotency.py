"""Idempotency: a call with a key takes effect once, however often it is sent.

    ("once", period) key  ->  the digest of the call, then its result as MessagePack

The result is written in the commit that executes the call, so neither exists without the other. A repeated call gets
the result of the first. A call that takes several commits stores its progress, and a repeated one resumes there. Keys
are kept for ten to twenty minutes and deleted a period at a time.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar
from zlib import crc32

import msgspec

from fastness.errors import IdempotencyKeyReused, InvalidArgument
from fastness.kv import Subspace, Transaction
from fastness.limits import CALL_KEY_BYTES_MAX, CALL_KEY_EXPIRY_BATCH, CALL_KEY_PERIOD_SECONDS
from fastness.wire.requests import Request

Answer = TypeVar("Answer")

_SUBSPACE: Final = Subspace("once")
PREFIX: Final = _SUBSPACE.prefix  # Of all keys of this layer.
_PERIOD_MS: Final = CALL_KEY_PERIOD_SECONDS * 1_000
_DIGEST_BYTES: Final = 4
_encode = msgspec.msgpack.Encoder().encode
# Deterministic: the same attributes in another order are the same call.
_encode_request = msgspec.msgpack.Encoder(order="deterministic").encode


IsNewCall = Callable[[], bool]  # Called inside the transaction.


class KeyedCall(msgspec.Struct, frozen=True):
    """A call with an idempotency key."""

    name: bytes  # The key.
    digest: bytes  # Distinguishes a repeated call from another call with the same key.
    is_new_call: IsNewCall  # Whether this is certainly the first attempt, which saves reading the stored result.


def keyed_call(key: str, request: Request[Any], is_new_call: IsNewCall) -> KeyedCall:
    """The keyed call of a request.

    Raises:
        InvalidArgument: the key is empty or too long.
    """
    name = key.encode(errors="replace")
    if not 0 < len(name) <= CALL_KEY_BYTES_MAX:
        raise InvalidArgument(f"An idempotency key has 1 to {CALL_KEY_BYTES_MAX} bytes; use a UUID")
    # The digest only detects mistakes, so a checksum is enough; it costs a quarter of a hash.
    return KeyedCall(name, crc32(_encode_request(request)).to_bytes(_DIGEST_BYTES, "big"), is_new_call)


def run_idempotent(
    tx: Transaction, call: KeyedCall, decode: Callable[[bytes], Answer], work: Callable[..., Answer], *args: Any
) -> Answer:
    """The result of `work`, or the result of an earlier attempt, read by `decode`.

    Raises:
        IdempotencyKeyReused: another call used the key.
    """
    before = stored_result(tx, call)
    if before is not None:
        return decode(before)
    result = work(tx, *args)
    store_result(tx, call, result)
    return result


def stored_result(tx: Transaction, call: KeyedCall) -> bytes | None:
    """The stored result of an earlier attempt; None if there was none.

    Raises:
        IdempotencyKeyReused: another call used the key.
    """
    return None if call.is_new_call() else read_result(tx, call)


def read_result(tx: Transaction, call: KeyedCall) -> bytes | None:
    """`stored_result` for a call that may have stored it itself: reads it even if `is_new_call`."""
    period = period_of(tx.now_ms)
    for each in (period, period - 1):
        before = tx.get(_period_prefix(each) + call.name)
        if before is not None:
            if before[:_DIGEST_BYTES] != call.digest:
                raise key_reused()
            return before[_DIGEST_BYTES:]
    return None


def key_reused() -> IdempotencyKeyReused:
    return IdempotencyKeyReused(
        "Another call used this idempotency key; use a new key for every call, and the same key only to repeat a call"
    )


def store_result(tx: Transaction, call: KeyedCall, answer: object) -> None:
    """Store the result of a call, or its progress, for repeated attempts."""
    tx.put(_period_prefix(tx.now_ms // _PERIOD_MS) + call.name, call.digest + _encode(answer))


def delete_result(tx: Transaction, call: KeyedCall) -> None:
    """Delete the stored result of a call whose effect was undone."""
    period = period_of(tx.now_ms)
    for each in (period, period - 1):
        tx.delete(_period_prefix(each) + call.name)


@lru_cache(maxsize=16)
def _period_prefix(period: int) -> bytes:
    """The key prefix of a period; the caller's key follows unencoded."""
    return _SUBSPACE.key(period)


def period_of(now_ms: int) -> int:
    """The period that keys stored at `now_ms` belong to."""
    return now_ms // _PERIOD_MS


def has_expired_keys(tx: Transaction) -> bool:
    """Whether any key belongs to an expired period."""
    return bool(tx.scan(*_expired_range(tx), limit=1))


def forget(tx: Transaction) -> None:
    """Delete the keys of expired periods. Where several processes write, a bounded number, to avoid conflicts."""
    begin, end = _expired_range(tx)
    if tx.writer:
        pairs = tx.scan(begin, end, limit=CALL_KEY_EXPIRY_BATCH)
        end = pairs[-1][0] + b"\x00" if pairs else begin
    tx.delete_range(begin, end)


def _expired_range(tx: Transaction) -> tuple[bytes, bytes]:
    return _SUBSPACE.range()[0], _SUBSPACE.key(period_of(tx.now_ms) - 1)
