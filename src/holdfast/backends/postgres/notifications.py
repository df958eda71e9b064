"""Notifications tell other processes which keys a commit may have changed."""

from typing import Final

from holdfast import limits
from holdfast.kv import Transaction
from holdfast.kv.keys import prefix_range

CHANNEL: Final = "holdfast_kv"


def notified_ranges(payload: str) -> list[tuple[bytes, bytes]] | None:
    """The key ranges that a notification names, or None for all of them."""
    if payload == "*":
        return None
    try:
        return [prefix_range(bytes.fromhex(part)) for part in payload.split(",") if part]
    except ValueError:  # Any client can send notifications, with any payload.
        return None


def notification(tx: Transaction) -> bytes:
    """The notification payload for other processes' watches: the written keys, truncated to fit."""
    for length in (limits.KEY_BYTES_MAX, 64, 48, 32, 24, 16):
        # A deleted range is represented by the common prefix of its bounds.
        prefixes = {key[:length] for key in tx.writes} | {_common_prefix(*bounds)[:length] for bounds in tx.cleared}
        if b"" in prefixes:
            break
        if sum(2 * len(prefix) + 1 for prefix in prefixes) <= limits.NOTIFY_BYTES_MAX:
            return ",".join(prefix.hex() for prefix in prefixes).encode()
    return b"*"


def _common_prefix(begin: bytes, end: bytes) -> bytes:
    length = 0
    while length < min(len(begin), len(end)) and begin[length] == end[length]:
        length += 1
    return begin[:length]
