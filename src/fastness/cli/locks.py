"""`fastness lock`: the sessions that hold ordered locks of the database, entity types and records."""

from typing import Any

import click

from fastness.cli import completion, printing
from fastness.cli.commands import CommandGroup
from fastness.cli.operations import operation
from fastness.wire.locks import EndLockSession, ListLockSessions, LockHolding, LockSessionInfo


@click.group(cls=CommandGroup, completions={"number": completion.lock_sessions})
def lock() -> None:
    """A session is one caller of `plane.locks`, such as a thread of a program.

    `fastness lease` is for exclusive ownership of any key.
    """


def _fields(session: LockSessionInfo) -> dict[str, Any]:
    return {
        **printing.fields(session, without=("locks",), since_ms="since"),
        "holds": [_text(each) for each in session.locks if not each.is_waiting and not each.is_intent],
        "waits_for": next((_text(each) for each in session.locks if each.is_waiting), None),
    }


def _text(lock: LockHolding) -> str:
    return " ".join(part for part in (lock.level, lock.name, lock.mode) if part)


operation(
    lock,
    "list",
    ListLockSessions,
    columns=("number", "owner", "since", "expires_at", "holds", "waits_for"),
    show=_fields,
    empty="No ordered locks are held.",
    examples=["fastness lock list", "fastness lock list --json"],
)
operation(
    lock,
    "end",
    EndLockSession,
    "Session {number} has ended",
    help="End the session NUMBER, and release its locks at once. Its holder is fenced off.",
    show=lambda _: {"ended": True},
    missing="There is no session {number} of locks; `fastness lock list` shows them",
    examples=["fastness lock end 5ac52464988b344a86662cdc"],
)
