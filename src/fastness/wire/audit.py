"""The audit log: who did what, when and from where.

A request whose class is `audited` is recorded before it is executed, and its outcome after it. Entries have the names
of what was changed and which fields changed, never payloads, secrets or texts of callers.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.limits import AUDIT_TEXT_BYTES_MAX
from fastness.wire.atomic import CommitAtomic
from fastness.wire.fields import Name, TimeMs
from fastness.wire.queues import Outcomes
from fastness.wire.requests import Operation, Request, Route
from fastness.wire.sqs import ATTRIBUTES

STARTED: Final = "started"  # The outcome of an action that is not finished, or whose server ended before it was.
OK: Final = "ok"
FAILED: Final = "internal"  # The outcome of an unexpected error.

_TARGET_FIELDS: Final = (
    "queue",
    "world",
    "agent",
    "workflow",
    "name",
    "key",
    "id",
    "number",
    "sequence",
    "source",
    "handle",
)
_LEFT_OUT: Final = frozenset(("universe", "tier", "maker", "secret_sha256", "lock_session"))
_TEXTS: Final = frozenset(("state", "to", "cron", "timezone", "program", "destination"))  # Names: no texts of callers.
_LISTS: Final = frozenset(("ids", "universes", "verbs", "queues", "sends_to", "accepts_from"))
_COUNTS: Final = ("count", "deleted")


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One action."""

    id: str
    at_ms: int
    action: str  # The verb of its permission, such as `queue:purge`.
    target: str = ""  # What it was done to, such as the name of a queue.
    universe: str | None = None  # None: the plane itself.
    actor: str = ""  # The name of the token, or `user@host` of a command on a data directory; empty: no token.
    token_id: str = ""
    client: str = ""  # The network address that the call came from.
    entry: str = ""  # How it came: http, stream, mcp, sqs or cli.
    detail: str = ""  # What was asked for, such as the fields that changed.
    outcome: str = STARTED  # `started`, `ok`, or the code of the error.
    count: int | None = None  # How many things it was done to, if it can be more than one.


class AuditPage(msgspec.Struct, frozen=True):
    """Entries, the newest first; `next` is where the next page starts, if there may be one.

    A page of a filtered log may be empty and still have a `next`: each page reads a bounded number of entries.
    """

    entries: list[AuditEntry]
    next: str | None


class ReadAudit(Request[AuditPage], frozen=True, tag="audit.read"):
    """Entries of the audit log of a universe, the newest first; without a universe those of the plane itself.

    The plane's own log has what concerns no single universe, such as tokens and backups, and the calls that tokens were
    refused.
    """

    operation = Operation(
        reads=True,
        http=(
            Route("GET", "/v1/audit", "Return the newest entries of a universe's audit log."),
            Route(
                "GET",
                "/v1/audit/plane",
                "Return the newest entries of the plane's own audit log.",
                fixed={"universe": None},
            ),
        ),
    )

    universe: Name | None = None
    since_ms: TimeMs | None = None  # Entries from this time on,
    until_ms: TimeMs | None = None  # and before this one.
    actor: str = ""  # Of this token or user; empty: of all.
    action: str = ""  # A verb such as `queue:purge`, or a beginning with a star, such as `queue:*`; empty: all.
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=limits.AUDIT_LISTED_MAX)] = 100


def audited_parts(request: Request[Any]) -> list[Request[Any]]:
    """The requests in `request` to record: itself, or the operations of a commit."""
    if request.operation.audited:
        return [request]
    if request.__class__ is CommitAtomic:
        return [step for step in request.operations if step.operation.audited]
    return []


@cache
def may_be_audited(kind: type[Request[Any]]) -> bool:
    """Whether requests of a class can have `audited_parts`."""
    return kind.operation.audited or kind is CommitAtomic


def target_of(request: Request[Any]) -> str:
    """What a request acts on: by default, its universe."""
    named = [str(value) for name in _TARGET_FIELDS if (value := getattr(request, name, None)) is not None]
    return _cut("/".join(named) or getattr(request, "universe", None) or "")


def detail_of(request: Request[Any], before: msgspec.Struct | None = None) -> str:
    """What a request asks for. `before` is the policy that it replaces, if it does."""
    return _cut(", ".join(_details(request, before)))


def count_of(request: Request[Any], answer: object) -> int | None:
    """How many things a request was done to; None if that is not a number of things."""
    if isinstance(answer, Outcomes):
        ids = getattr(request, "ids", answer.outcomes)
        return len(ids) - sum(outcome.code is not None for outcome in answer.outcomes)
    found = [getattr(answer, name, None) for name in _COUNTS]
    return next((number for number in found if number.__class__ is int), None)


def _details(request: Request[Any], before: msgspec.Struct | None) -> Iterator[str]:
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if name in _LEFT_OUT or name in _TARGET_FIELDS or value is None:
            continue
        if isinstance(value, bool | int | float) or (name in _TEXTS and isinstance(value, str)):
            yield f"{name}={_text(value)}"
        elif name == "attributes" and isinstance(value, dict):  # Of an SQS queue. Unknown names may be any text.
            yield f"attributes={' '.join(sorted(ATTRIBUTES & value.keys()))}"
        elif name in _LISTS and isinstance(value, list):
            yield f"{name}={' '.join(map(str, value))}"
        elif before is not None and value.__class__ is before.__class__:
            yield from _changes(before, value)
        elif value not in ("", [], {}):
            yield name


def _changes(before: msgspec.Struct, after: msgspec.Struct) -> Iterator[str]:
    """The fields of a policy that change, with their values where they are numbers."""
    for name in after.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        plain = isinstance(old, bool | int | float | None) and isinstance(new, bool | int | float | None)
        yield f"{name} {_text(old)} → {_text(new)}" if plain else name


def _text(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= AUDIT_TEXT_BYTES_MAX:
        return text
    return data[: AUDIT_TEXT_BYTES_MAX - 3].decode(errors="ignore") + "…"
