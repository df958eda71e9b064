"""The results of messages and runs: wait for one, and print it."""

import sys
from collections.abc import Callable
from typing import Any

import click

from fastness.cli import connect, printing
from fastness.errors import ResultNotReady
from fastness.handles.sync.plane import Plane


def wait_for_result(read: Callable[[Plane, float], Any], wait_seconds: float) -> Any:
    """The result that `read(plane, seconds)` returns once it is there.

    Raises:
        ResultNotReady: it is not there in time.
    """
    pending: list[ResultNotReady] = []

    def attempt(plane: Plane, seconds: float) -> tuple[Any] | None:
        try:
            return (read(plane, seconds),)
        except ResultNotReady as error:
            pending[:] = [error]
            return None

    with connect.PlaneCaller(connect.current_target()) as caller:
        found = caller.poll(attempt, wait_seconds)
    if found is None:
        raise pending[0]
    return found[0]


def print_value(value: Any) -> None:
    """Print JSON, or bytes as they are."""
    if isinstance(value, bytes):
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    else:
        click.echo(printing.escape_control(printing.compact(value)))
