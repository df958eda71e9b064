"""What a consumer reports about a failed attempt: a text, or an exception with its type and traceback."""

import traceback
from typing import NamedTuple

from holdfast.limits import LAST_ERROR_BYTES_MAX, TRACEBACK_BYTES_MAX


class AttemptError(NamedTuple):
    """The error fields of a nack or reject. Surrogates, as in file names, are replaced: they cannot be encoded."""

    error: str | None
    error_type: str | None
    traceback: str | None


def attempt_error(error: str | BaseException | None) -> AttemptError:
    """The error fields for a text or an exception."""
    if error is None:
        return AttemptError(None, None, None)
    if isinstance(error, str):
        return AttemptError(_encodable(error[:LAST_ERROR_BYTES_MAX]), None, None)
    described = traceback.TracebackException.from_exception(error)
    return AttemptError(
        _encodable(str(described)[:LAST_ERROR_BYTES_MAX]),
        type(error).__name__,
        _encodable("".join(described.format())[-TRACEBACK_BYTES_MAX:]),
    )


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()
