"""How a host treats errors."""

import traceback

from fastness.errors import FastnessError, RetryAdvice
from fastness.limits import ASIDE_ERROR_BYTES_MAX


def is_final(error: Exception) -> bool:
    """Whether a retry of a call to the plane cannot succeed.

    The base class does not tell: unexpected errors of a server arrive as that, and may pass.
    """
    return isinstance(error, FastnessError) and type(error) is not FastnessError and error.retry is RetryAdvice.NEVER


def text_of(error: BaseException) -> str:
    """An error with the end of its traceback, which says most."""
    encoded = "".join(traceback.format_exception(error)).encode(errors="replace")
    return encoded[-ASIDE_ERROR_BYTES_MAX:].decode(errors="ignore")
