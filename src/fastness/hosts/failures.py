"""An error, as a host records it."""

import traceback

from fastness.limits import ASIDE_ERROR_BYTES_MAX


def text_of(error: BaseException) -> str:
    """An error with the end of its traceback, which says most."""
    encoded = "".join(traceback.format_exception(error)).encode(errors="replace")
    return encoded[-ASIDE_ERROR_BYTES_MAX:].decode(errors="ignore")
