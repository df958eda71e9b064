"""Fingerprints: numbers that stand for content in watermarks, which are 63-bit numbers. They are never 0."""

import hashlib
from typing import Final

DIGITS: Final = 15  # Hexadecimal: 60 bits.


def of_bytes(content: bytes) -> int:
    """The fingerprint of some content."""
    return of_hash(hashlib.sha256(content).hexdigest())


def of_hash(sha256: str) -> int:
    """The fingerprint of the content that has this SHA-256, in hexadecimal digits."""
    return int(sha256[:DIGITS], 16) or 1
