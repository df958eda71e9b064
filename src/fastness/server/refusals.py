"""Finds out which HTTP requests were refused before an operation started, so that each is counted once.

refused by a token or a rate limit   ──► counted there, by reason
an operation started                 ──► counted by operation and outcome
refused for another reason           ──► counted by the middleware, by the code of the problem
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final


class _Request:
    """Whether an HTTP request is in the metrics already. Tasks that it starts see the same object."""

    __slots__ = ("is_counted",)

    def __init__(self) -> None:
        self.is_counted = False


_current: Final[ContextVar[_Request | None]] = ContextVar("fastness_request", default=None)


@contextmanager
def request_scope() -> Iterator[None]:
    """Serve one HTTP request inside the block."""
    reset = _current.set(_Request())
    try:
        yield
    finally:
        _current.reset(reset)


def mark_counted() -> None:
    """Record that the current HTTP request, if there is one, is in the metrics."""
    request = _current.get()
    if request is not None:
        request.is_counted = True


def is_counted() -> bool:
    """Whether the current HTTP request is in the metrics."""
    request = _current.get()
    return request is not None and request.is_counted
