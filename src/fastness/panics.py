"""Panics of the Rust bindings, as errors.

A panic reaches Python as a PanicException, which is no Exception: it would pass every handler and end the program.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Panic(RuntimeError):
    """A panic of a binding, for the backend to translate."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic as a Panic with its text."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Its class cannot be imported.
            raise
        raise Panic(f"panic: {error}") from error
