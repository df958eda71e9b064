"""`fastness lock`: the sessions that hold ordered locks of the database, entity types and records."""

from typing import Any, Final

import click

from fastness.cli import completion, connect, printing
from fastness.cli.commands import CommandGroup
from fastness.errors import NotFound
from fastness.limits import READ_ENTRIES_MAX
from fastness.wire.locks import LockHolding, LockSessionInfo

_COLUMNS: Final = ("number", "owner", "since", "expires_at", "holds", "waits_for")


@click.group(cls=CommandGroup, completions={"number": completion.lock_sessions})
def lock() -> None:
    """A session is one caller of `plane.locks`, such as a thread of a program.

    `fastness lease` is for exclusive ownership of any key.
    """


@lock.command("list", examples=["fastness lock list", "fastness lock list --json"])
@click.option("--after", default="", help="Start after the session with this number.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="The maximum number of results.")
def list_(after: str, limit: int) -> None:
    """List the sessions, and the locks they hold and wait for.

    A session ends at its expiry unless it is renewed. Locks of a program that has a directory open by itself are within
    its process, and not listed.
    """
    with connect.open_plane() as plane:
        found = plane.locks.sessions(after=after, limit=limit).sessions
    printing.rows([_fields(each) for each in found], _COLUMNS, empty="No ordered locks are held.")


@lock.command(examples=["fastness lock end 5ac52464988b344a86662cdc"])
@click.argument("number")
def end(number: str) -> None:
    """End the session NUMBER, and release its locks at once.

    Its holder is fenced off. Do this if a holder hangs and is renewed nonetheless. The locks of a process that was
    killed end by themselves.
    """
    with connect.open_plane() as plane:
        ended = plane.locks.end_session(number)
    if not ended:
        raise NotFound(f"There is no session {number} of locks; `fastness lock list` shows them")
    printing.result(f"Session {number} has ended", {"number": number, "ended": True})


def _fields(session: LockSessionInfo) -> dict[str, Any]:
    return printing.fields(
        session,
        *("since_ms", "locks"),
        since=printing.timestamp(session.since_ms),
        holds=[_text(each) for each in session.locks if not each.is_waiting and not each.is_intent],
        waits_for=next((_text(each) for each in session.locks if each.is_waiting), None),
    )


def _text(lock: LockHolding) -> str:
    return " ".join(part for part in (lock.level, lock.name, lock.mode) if part)
