"""Once: a call that may be sent twice happens once.

    ("once", period) key  ->  the digest of the call, then its answer, MessagePack

The answer is written in the commit that carries the call out, so there is no moment at which one is there without the
other. Whoever sends the call again gets the answer that the first one had. What is more than one commit remembers how
far it came, and goes on from there. Keys are remembered for ten to twenty minutes and forgotten a period at a time.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar
from zlib import crc32

import msgspec

from holdfast.errors import IdempotencyKeyReused, InvalidArgument
from holdfast.kv import Subspace, Transaction
from holdfast.limits import ONCE_FORGET_BATCH, ONCE_KEY_BYTES_MAX, ONCE_PERIOD_SECONDS
from holdfast.wire.requests import Request

Answer = TypeVar("Answer")

_SUBSPACE: Final = Subspace("once")
_PERIOD_MS: Final = ONCE_PERIOD_SECONDS * 1_000
_DIGEST_BYTES: Final = 4
_encode = msgspec.msgpack.Encoder().encode
# The same attributes in another order are the same call.
_encode_request = msgspec.msgpack.Encoder(order="deterministic").encode


Fresh = Callable[[], bool]  # Asked inside of the transaction.


class KeyedCall(msgspec.Struct, frozen=True):
    """The sending of a call that has a key."""

    name: bytes  # The key.
    digest: bytes  # Tells a call that was sent again from another one under its key.
    fresh: Fresh  # Whether nobody can have sent it before, which saves the look.


def sending(key: str, request: Request[Any], fresh: Fresh) -> KeyedCall:
    """A call by its key.

    Raises:
        InvalidArgument: the key is empty or too long.
    """
    name = key.encode(errors="replace")
    if not 0 < len(name) <= ONCE_KEY_BYTES_MAX:
        raise InvalidArgument(f"An idempotency key has 1 to {ONCE_KEY_BYTES_MAX} bytes; use a UUID")
    # A checksum finds mistakes, which is all that it is for, at a quarter of the price of a hash.
    return KeyedCall(name, crc32(_encode_request(request)).to_bytes(_DIGEST_BYTES, "big"), fresh)


def once(
    tx: Transaction, call: KeyedCall, decode: Callable[[bytes], Answer], work: Callable[..., Answer], *args: Any
) -> Answer:
    """The answer of `work`, which is carried out unless it was before under the same key; `decode` reads that answer.

    Raises:
        IdempotencyKeyReused: what was carried out under that key is another call.
    """
    before = recall(tx, call)
    if before is not None:
        return decode(before)
    result = work(tx, *args)
    remember(tx, call, result)
    return result


def recall(tx: Transaction, call: KeyedCall) -> bytes | None:
    """What is remembered of a call; None if it was not carried out before.

    Raises:
        IdempotencyKeyReused: what was carried out under its key is another call.
    """
    return None if call.fresh() else recall_any(tx, call)


def recall_any(tx: Transaction, call: KeyedCall) -> bytes | None:
    """`recall`, also for whoever has remembered it themselves since."""
    period = period_of(tx.now_ms)
    for each in (period, period - 1):
        before = tx.get(_place(each) + call.name)
        if before is not None:
            if before[:_DIGEST_BYTES] != call.digest:
                raise reused()
            return before[_DIGEST_BYTES:]
    return None


def reused() -> IdempotencyKeyReused:
    return IdempotencyKeyReused(
        "Another call was made with this idempotency key; give every call that is not sent again its own"
    )


def remember(tx: Transaction, call: KeyedCall, answer: object) -> None:
    """Keep the answer of a call, or how far it came, for whoever sends it again."""
    tx.put(_place(tx.now_ms // _PERIOD_MS) + call.name, call.digest + _encode(answer))


def forget_one(tx: Transaction, call: KeyedCall) -> None:
    """Forget a call: what it did was undone."""
    period = period_of(tx.now_ms)
    for each in (period, period - 1):
        tx.delete(_place(each) + call.name)


@lru_cache(maxsize=16)
def _place(period: int) -> bytes:
    """What the keys of a period start with; the caller's key follows as it is."""
    return _SUBSPACE.key(period)


def period_of(now_ms: int) -> int:
    """The period in which keys are remembered together."""
    return now_ms // _PERIOD_MS


def any_forgotten(tx: Transaction) -> bool:
    """Whether there are keys of periods that are over."""
    return bool(tx.scan(*_over(tx), limit=1))


def forget(tx: Transaction) -> None:
    """Forget the keys of periods that are over; where several processes write, only as many as hold up nobody."""
    begin, end = _over(tx)
    if tx.writer:
        pairs = tx.scan(begin, end, limit=ONCE_FORGET_BATCH)
        end = pairs[-1][0] + b"\x00" if pairs else begin
    tx.delete_range(begin, end)


def _over(tx: Transaction) -> tuple[bytes, bytes]:
    return _SUBSPACE.range()[0], _SUBSPACE.key(period_of(tx.now_ms) - 1)
