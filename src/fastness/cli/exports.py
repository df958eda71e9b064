"""Shell variables: the result of a command as lines for `eval`, and its exit code if there is none.

    while eval "$(fastness queue get jobs --wait 20)"; do
        work < "$FASTNESS_QUEUE_PAYLOAD_PATH" && fastness queue ack || fastness queue nack
    done

`eval` of empty output succeeds, and the variables of the previous message would still be set. So a command that failed,
or received nothing, prints lines that unset them and end with its own exit code.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import click

from fastness.cli.exit_codes import code_of
from fastness.cli.given_options import wants_json
from fastness.errors import FastnessError


def export_lines(variables: Mapping[str, object]) -> str:
    """Shell lines that export variables, with their values quoted."""
    return "\n".join(f"export {name}={shlex.quote(str(value))}" for name, value in variables.items())


def unset_lines(names: Sequence[str], code: int) -> str:
    """Shell lines that unset variables and end with an exit code."""
    return f"unset {' '.join(names)}\n(exit {code})"


@contextmanager
def unset_on_failure(names: Sequence[str]) -> Iterator[None]:
    """Print lines that unset the variables if the command fails."""
    try:
        yield
    except (FastnessError, OSError, KeyboardInterrupt) as error:
        if not wants_json():
            click.echo(unset_lines(names, code_of(error)))
        raise
