"""Exit codes by class of error, and error output.

An error is a line with what to do next, and one with the command that explains it; with --json a problem object.
"""

import os
import traceback
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from fastness.wire.problems import Problem

NOTHING_RECEIVED: Final = 3
DAMAGED: Final = 10
SERVER_FAILED: Final = 12
INTERRUPTED: Final = 130
_INTERNAL: Final = 1
_USAGE: Final = 2
_BACKEND: Final = 9

# By the name of a class of errors. The nearest class of an error determines its code.
_CODES: Final = {
    "Validation": _USAGE,
    "NotFound": 4,
    "Conflict": 5,
    "Fenced": 6,
    "Busy": 7,
    "NotAllowed": 8,
    "CommitUnknown": 11,
    "Backend": _BACKEND,
    "Closed": _BACKEND,
    "Corrupt": DAMAGED,
}
MEANINGS: Final = {
    0: "success",
    _INTERNAL: "internal error: a bug in Fastness",
    _USAGE: "wrong usage or invalid request; nothing was written",
    NOTHING_RECEIVED: "nothing arrived in time",
    4: "not found",
    5: "conflict: another writer was first, another owner holds the lease, or the lake has another history",
    6: "fenced: the lease is no longer held",
    7: "busy: retry later",
    8: "not allowed: the token lacks the permission",
    _BACKEND: "unreachable, or the storage backend failed",
    DAMAGED: "corrupt: stored data is damaged",
    11: "unknown: the answer was lost; check the outcome before repeating the command",
    SERVER_FAILED: "`serve`: the key space failed, and on_database_failure is exit",
    INTERRUPTED: "interrupted",
}


def code_of(error: BaseException) -> int:
    """The exit code for an error."""
    from fastness.errors import FastnessError

    if isinstance(error, FastnessError):
        return next((_CODES[each.__name__] for each in type(error).__mro__ if each.__name__ in _CODES), _INTERNAL)
    if isinstance(error, click.ClickException):
        return _USAGE
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED
    return _BACKEND if isinstance(error, OSError) else _INTERNAL


def report(error: BaseException, *, as_json: bool) -> None:
    """Print an error to stderr."""
    from fastness.errors import FastnessError

    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(_problem(error)).decode(), err=True)
    else:
        click.echo(f"fastness: {_message(error)}", err=True)
        if isinstance(error, FastnessError):
            click.echo(f"help: {error.help}", err=True)
    if code_of(error) == _INTERNAL and os.environ.get("FASTNESS_DEBUG"):
        traceback.print_exception(error)


def _problem(error: BaseException) -> "Problem":
    from fastness.errors import FastnessError
    from fastness.wire.problems import Problem, problem_of

    if isinstance(error, FastnessError):
        return problem_of(error)
    code, status = {_USAGE: ("usage", 400), INTERRUPTED: ("interrupted", 499)}.get(code_of(error), ("error", 500))
    return Problem(code=code, title=code, status=status, detail=_message(error), type=f"urn:fastness:error:{code}")


def _message(error: BaseException) -> str:
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "fastness"
        text = _one_line(error.format_message()).rstrip(".")
        return f"{text}{' See' if text.endswith('?') else '; see'}: {command} --help"
    if isinstance(error, click.ClickException):
        return _one_line(error.format_message())
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return "interrupted"
    if code_of(error) == _INTERNAL:
        text = f"internal error ({type(error).__name__}: {error}); set FASTNESS_DEBUG=1 to see the traceback"
        return _one_line(text)
    if isinstance(error, OSError):
        return _one_line(f"{error.filename or 'the system'}: {error.strerror or error}")
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return " ".join(text.split())
