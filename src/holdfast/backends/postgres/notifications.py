"""Notifications tell other processes which keys a commit may have changed."""

from typing import Final

from holdfast import limits
from holdfast.kv import Transaction
from holdfast.kv.keys import prefix_range

CHANNEL: Final = "holdfast_kv"


def notification(tx: Transaction, writer: str) -> bytes:
    """The payload for the watches of other processes: who wrote, and the written keys, truncated to fit."""
    for length in (limits.KEY_BYTES_MAX, 64, 48, 32, 24, 16):
        # A deleted range is represented by the common prefix of its bounds.
        prefixes = {key[:length] for key in tx.writes} | {_common_prefix(*bounds)[:length] for bounds in tx.cleared}
        if b"" in prefixes:
            break
        if sum(2 * len(prefix) + 1 for prefix in prefixes) <= limits.NOTIFY_BYTES_MAX:
            return f"{writer}:{','.join(prefix.hex() for prefix in prefixes)}".encode()
    return f"{writer}:*".encode()


def is_own(payload: str, writer: str) -> bool:
    """Whether this process has sent a notification, and its watches know already."""
    return payload.startswith(f"{writer}:")


def notified_ranges(payload: str) -> list[tuple[bytes, bytes]] | None:
    """The key ranges that a notification names, or None for all of them."""
    _, colon, keys = payload.partition(":")
    if not colon or keys == "*":
        return None
    try:
        return [prefix_range(bytes.fromhex(part)) for part in keys.split(",") if part]
    except ValueError:  # Any client can send notifications, with any payload.
        return None


def _common_prefix(begin: bytes, end: bytes) -> bytes:
    length = 0
    while length < min(len(begin), len(end)) and begin[length] == end[length]:
        length += 1
    return begin[:length]
