"""Notifications tell other processes which keys a commit may have changed."""

from collections.abc import Collection
from typing import Final

from fastness import limits
from fastness.kv import Transaction
from fastness.kv.keys import prefix_range

CHANNEL: Final = "fastness_kv"
Ranges = list[tuple[bytes, bytes]]


def notification(tx: Transaction, writer: str) -> bytes:
    """The payload for the watches of other processes: who wrote, and the keys, truncated to fit.

    Those that were deleted have a minus sign. A deleted range is represented by the common prefix of its bounds.
    """
    added = [key for key, value in tx.writes.items() if value is not None]
    deleted = [key for key, value in tx.writes.items() if value is None]
    deleted += [_common_prefix(*bounds) for bounds in tx.cleared]
    for length in (limits.KEY_BYTES_MAX, 64, 48, 32, 24, 16):
        added_prefixes = {key[:length] for key in added}
        deleted_prefixes = {key[:length] for key in deleted} - added_prefixes
        if b"" in added_prefixes or b"" in deleted_prefixes:
            break
        parts = [prefix.hex() for prefix in added_prefixes]
        parts += [f"-{prefix.hex()}" for prefix in deleted_prefixes]
        if sum(map(len, parts)) + len(parts) <= limits.NOTIFY_BYTES_MAX:
            return f"{writer}:{','.join(parts)}".encode()
    return f"{writer}:*".encode()


def is_own(payload: str, writer: str) -> bool:
    """Whether this process has sent a notification, and its watches know already."""
    return payload.startswith(f"{writer}:")


def notified_ranges(payload: str) -> tuple[Ranges, Ranges] | None:
    """The key ranges that a notification names, and those in which keys were only deleted; None for all keys."""
    _, colon, keys = payload.partition(":")
    if not colon or keys == "*":
        return None
    try:
        parts = keys.split(",")
        changed = [part for part in parts if not part.startswith("-")]
        return _ranges(changed), _ranges([part[1:] for part in parts if part.startswith("-")])
    except ValueError:  # Any client can send notifications, with any payload.
        return None


def _ranges(parts: Collection[str]) -> Ranges:
    return [prefix_range(bytes.fromhex(part)) for part in parts if part]


def _common_prefix(begin: bytes, end: bytes) -> bytes:
    length = 0
    while length < min(len(begin), len(end)) and begin[length] == end[length]:
        length += 1
    return begin[:length]
