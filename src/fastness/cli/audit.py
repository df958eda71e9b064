"""`fastness audit`: who did what, when and from where."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import click

from fastness.cli import connect, printing
from fastness.cli.commands import LeafCommand
from fastness.cli.durations import SECONDS
from fastness.cli.field_options import limit_option
from fastness.errors import NotAllowed
from fastness.limits import AUDIT_LISTED_MAX
from fastness.wire.audit import AuditEntry, AuditPage

_COLUMNS: Final = ("at", "actor", "from", "action", "target", "outcome", "count", "detail")


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness audit --since 1d",
        "fastness audit --action 'queue:*' --actor worker",
        "fastness audit --plane --action token:revoke --json",
    ],
)
@click.option("--plane", "of_plane", is_flag=True, help="Show the log of the plane itself: tokens, backups, refusals.")
@click.option("--since", type=SECONDS, help="Show entries of the last seconds, as in 1d.  [default: all]")
@click.option("--actor", default="", help="Show entries of this token (name or id) or user@host.")
@click.option("--action", default="", help="Show entries with this verb, such as queue:purge or queue:*.")
@limit_option("--limit", 100, 10_000)
def audit(of_plane: bool, since: float | None, actor: str, action: str, limit: int) -> None:
    """The newest entries are first. A server records the calls that change how a plane works or delete data, such as
    purges, policies, pauses, tokens and cancels. Commands on a data directory or PostgreSQL record them as user@host.
    An outcome of "started" means that the server ended before the action did.
    """
    since_ms = None if since is None else max(round((time.time() - since) * 1_000), 0)
    with connect.open_plane() as plane:
        logs = {f"the universe {plane.universe}": plane.audit.read, "the plane": plane.audit.read_plane}
        (shown, read), (other, read_other) = reversed(logs.items()) if of_plane else logs.items()
        given = {"since_ms": since_ms, "actor": actor, "action": action}
        found = _entries(read, given, limit)
        empty = "No entries."
        if not found:
            with suppress(NotAllowed):
                if others := _entries(read_other, given, limit):
                    count = f"{len(others):,}{' or more' if len(others) == limit else ''}"
                    command = "fastness audit" if of_plane else "fastness audit --plane"
                    empty = f"No entries of {shown}; the log of {other} has {count}: {command}"
    printing.rows([_fields(entry) for entry in found], _COLUMNS, empty=empty)


def _entries(read: Callable[..., AuditPage], given: dict[str, Any], limit: int) -> list[AuditEntry]:
    """At most `limit` entries, the newest first."""
    found: list[AuditEntry] = []
    after: str | None = ""
    while after is not None and len(found) < limit:
        page = read(**given, after=after, limit=min(limit - len(found), AUDIT_LISTED_MAX))
        found += page.entries
        after = page.next
    return found


def _fields(entry: AuditEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "at": printing.timestamp(entry.at_ms),
        "actor": entry.actor or None,
        "token_id": entry.token_id or None,
        "from": " ".join(filter(None, (entry.entry, entry.client))),
        "action": entry.action,
        "universe": entry.universe,
        "target": entry.target,
        "outcome": entry.outcome,
        "count": entry.count,
        "detail": entry.detail,
    }
