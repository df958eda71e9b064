"""Checksums of JSON objects: the last field, `crc`, is the CRC-32 of all bytes before it.

{"n":17,"at_ms":1763181735123,"record":{"a":1},"crc":3632233996}
"""

import zlib
from typing import Final

import msgspec

_FIELD: Final = b',"crc":'


class _Checksum(msgspec.Struct):
    crc: int | None = None


def add_checksum(encoded: bytes) -> bytes:
    """A JSON object, which must not be empty, with its checksum."""
    body = encoded[:-1]
    return b"%b%b%d}" % (body, _FIELD, zlib.crc32(body))


def checksum_matches(encoded: bytes, crc: int | None) -> bool:
    """Whether the bytes of an object have the checksum that was decoded from them; False if it has none."""
    return crc is not None and zlib.crc32(encoded[: encoded.rfind(_FIELD)]) == crc


def has_valid_checksum(encoded: bytes) -> bool:
    """Whether a JSON object has its checksum.

    Raises:
        ValueError: it is not a JSON object.
    """
    return checksum_matches(encoded, msgspec.json.decode(encoded, type=_Checksum).crc)
