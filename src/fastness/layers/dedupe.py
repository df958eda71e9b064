"""Deduplication keys of pushes, saved from time to time so that they survive a restart.

    ("ingress") "dedupe"  ->  each key (16 bytes) and when it was accepted (8 bytes, milliseconds), the oldest first

Only keys of stored pushes are saved: a key whose push was lost must not suppress the sender's next attempt. The keys of
several processes can therefore be merged.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Final

from fastness.kv import Subspace, Transaction

KEY_BYTES: Final = 16
_ENTRY_BYTES: Final = KEY_BYTES + 8
_KEY: Final = Subspace("ingress").key("dedupe")

Entry = tuple[bytes, int]  # A key, and when it was accepted.


def load(tx: Transaction) -> list[Entry]:
    """The saved keys, the oldest first."""
    stored = tx.get(_KEY) or b""
    return [
        (stored[at : at + KEY_BYTES], int.from_bytes(stored[at + KEY_BYTES : at + _ENTRY_BYTES], "big"))
        for at in range(0, len(stored), _ENTRY_BYTES)
    ]


def save(tx: Transaction, entries: Iterable[Entry], *, since_ms: int, most: int) -> None:
    """Merge keys into the saved ones: the latest `most`, and none from before `since_ms`."""
    latest: dict[bytes, int] = {}
    for key, at_ms in chain(load(tx), entries):
        if at_ms >= since_ms:
            latest[key] = max(at_ms, latest.get(key, 0))
    kept = sorted(latest.items(), key=lambda entry: entry[1])[-most:]
    tx.put(_KEY, b"".join(key + at_ms.to_bytes(8, "big") for key, at_ms in kept))
