"""The global options that were given on the current command line."""

from typing import Any

import click


class GlobalOptions:
    """The global options that were given on one command line."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


def given_options() -> dict[str, Any]:
    """The global options that were given to the current command."""
    return click.get_current_context().find_root().ensure_object(GlobalOptions).values


def wants_json() -> bool:
    """Whether the current command prints JSON."""
    return bool(given_options().get("json"))
