"""Variables for a shell: what a command found, as lines for `eval`, and a way to tell that it found nothing.

    while eval "$(holdfast queue get jobs --wait 20)"; do
        work < "$HOLDFAST_QUEUE_PAYLOAD_PATH" && holdfast queue ack || holdfast queue nack
    done

`eval` of nothing succeeds, and the variables of the message before would still be set. So a command that found nothing,
or failed, prints lines that forget them and that end with its own exit code.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import click

from holdfast.cli.commands import wants_json
from holdfast.cli.exit_codes import code_of
from holdfast.errors import HoldfastError


def lines(variables: Mapping[str, object]) -> str:
    """Lines that export variables, whatever their values are."""
    return "\n".join(f"export {name}={shlex.quote(str(value))}" for name, value in variables.items())


def forgetting(names: Sequence[str], code: int) -> str:
    """Lines that forget variables, and end with an exit code."""
    return f"unset {' '.join(names)}\n(exit {code})"


@contextmanager
def forgotten_on_failure(names: Sequence[str]) -> Iterator[None]:
    """Have variables forgotten when the command fails."""
    try:
        yield
    except (HoldfastError, OSError, KeyboardInterrupt) as error:
        if not wants_json():
            click.echo(forgetting(names, code_of(error)))
        raise
