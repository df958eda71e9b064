"""Tokens of pages: where the next page of a list starts, for lists whose keys are not shown to callers."""

from fastness.errors import InvalidArgument
from fastness.limits import KEY_BYTES_MAX


def token_of(prefix: bytes, key: bytes) -> str:
    """The token of a page that ends with `key`, which is below `prefix`."""
    return key[len(prefix) :].hex()


def key_after(prefix: bytes, token: str, begin: bytes, end: bytes) -> bytes:
    """Where the page after `token` begins, within begin..end; `begin` without a token.

    Raises:
        InvalidArgument: the token is not one of this list.
    """
    if not token:
        return begin
    try:
        if len(token) > 2 * KEY_BYTES_MAX:
            raise ValueError("it is too long")
        after = prefix + bytes.fromhex(token) + b"\x00"
    except ValueError as error:
        raise InvalidArgument(f"after is {token[:64]!r}, which no page returned as next ({error})") from None
    return min(max(after, begin), end)
