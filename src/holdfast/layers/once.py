"""Once: a call that may be sent twice happens once.

    ("once", period) key  ->  the answer, MessagePack

The answer is written in the commit that carries the call out, so there is no moment at which one is there without the
other. Whoever sends the call again gets the answer that the first one had. Keys are remembered for ten to twenty
minutes and forgotten a period at a time.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Subspace, Transaction
from holdfast.limits import ONCE_KEY_BYTES_MAX, ONCE_PERIOD_SECONDS

Answer = TypeVar("Answer")

_ROOM: Final = Subspace("once")
_encode = msgspec.msgpack.Encoder().encode


def once(
    tx: Transaction, key: str, work: Callable[[Transaction], Answer], kind: type[Answer] | Any, *, fresh: bool
) -> Answer:
    """The answer of `work`, which is carried out unless it was before under the same key.

    `fresh` says that nobody can have sent it before, which saves the look.

    Raises:
        InvalidArgument: the key is empty or too long.
    """
    name = key.encode(errors="replace")
    if not 0 < len(name) <= ONCE_KEY_BYTES_MAX:
        raise InvalidArgument(f"An idempotency key has 1 to {ONCE_KEY_BYTES_MAX} bytes; use a UUID")
    period = tx.now_ms // (ONCE_PERIOD_SECONDS * 1_000)
    if not fresh:
        for each in (period, period - 1):
            before = tx.get(_place(each) + name)
            if before is not None:
                answer: Answer = msgspec.msgpack.decode(before, type=kind)
                return answer
    result = work(tx)
    tx.put(_place(period) + name, _encode(result))
    return result


@lru_cache(maxsize=16)
def _place(period: int) -> bytes:
    """What the keys of a period start with; the caller's key follows as it is."""
    return _ROOM.key(period)


def forget(tx: Transaction) -> None:
    """Forget the keys of periods that are over."""
    period = tx.now_ms // (ONCE_PERIOD_SECONDS * 1_000)
    tx.delete_range(_ROOM.range()[0], _ROOM.key(period - 1))
