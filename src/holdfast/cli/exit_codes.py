"""Exit codes, one for each class of error, and how an error is told: one line for people, a problem for programs."""

import os
import traceback
from typing import Final

import click
import msgspec

from holdfast.errors import (
    Backend,
    Busy,
    Closed,
    CommitUnknown,
    Conflict,
    Corrupt,
    Fenced,
    HoldfastError,
    NotAllowed,
    NotFound,
    Validation,
)
from holdfast.wire.problems import Problem, problem_of

NOTHING: Final = 3  # Nothing came in time.
DAMAGED: Final = 10
INTERRUPTED: Final = 130
_FAULT: Final = 1
_USAGE: Final = 2
_BELOW: Final = 9

# The first class that an error belongs to decides.
_CODES: Final[tuple[tuple[type[HoldfastError], int], ...]] = (
    (Validation, _USAGE),
    (NotFound, 4),
    (Conflict, 5),
    (Fenced, 6),
    (Busy, 7),
    (NotAllowed, 8),
    (CommitUnknown, 11),
    (Backend, _BELOW),
    (Closed, _BELOW),
    (Corrupt, DAMAGED),
)

MEANINGS: Final = {
    0: "done",
    _FAULT: "a fault of Holdfast itself",
    _USAGE: "wrong usage, or a request that was refused as it is: nothing was written",
    NOTHING: "nothing came in time",
    4: "not found",
    5: "conflict: somebody else was first, or holds the lock",
    6: "fenced: the lease is not ours any more",
    7: "busy: try again later",
    8: "not allowed: the token does not allow it",
    _BELOW: "unreachable, or what lies below failed",
    DAMAGED: "corrupt: what is stored is damaged",
    11: "unknown: the answer was lost, so look before you repeat it",
    INTERRUPTED: "interrupted",
}


def code_of(error: BaseException) -> int:
    """The exit code that stands for an error."""
    if isinstance(error, HoldfastError):
        return next((code for family, code in _CODES if isinstance(error, family)), _FAULT)
    if isinstance(error, click.ClickException):
        return _USAGE
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED
    return _BELOW if isinstance(error, OSError) else _FAULT


def tell(error: BaseException, *, as_json: bool) -> None:
    """Say on stderr what went wrong."""
    if as_json:
        click.echo(msgspec.json.encode(_problem(error)).decode(), err=True)
    else:
        click.echo(f"holdfast: {_sentence(error)}", err=True)
    if code_of(error) == _FAULT and os.environ.get("HOLDFAST_DEBUG"):
        traceback.print_exception(error)


def _problem(error: BaseException) -> Problem:
    if isinstance(error, HoldfastError):
        return problem_of(error)
    code, status = {_USAGE: ("usage", 400), INTERRUPTED: ("interrupted", 499)}.get(code_of(error), ("error", 500))
    return Problem(code=code, title=code, status=status, detail=_sentence(error), type=f"urn:holdfast:error:{code}")


def _sentence(error: BaseException) -> str:
    if isinstance(error, click.UsageError):
        place = error.ctx.command_path if error.ctx is not None else "holdfast"
        return f"{_one_line(error.format_message()).rstrip('.')}; see: {place} --help"
    if isinstance(error, click.ClickException):
        return _one_line(error.format_message())
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, HoldfastError):
        return _one_line(str(error))
    if isinstance(error, OSError):
        return _one_line(f"{error.filename or 'the system'}: {error.strerror or error}")
    return _one_line(f"this is a fault of Holdfast ({type(error).__name__}: {error}); HOLDFAST_DEBUG=1 shows where")


def _one_line(text: str) -> str:
    return " ".join(text.split())
