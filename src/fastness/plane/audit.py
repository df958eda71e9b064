"""The handler of audit requests, and the entries of audited requests.

request ──► begin: its entries, committed ──► the request is executed ──► finish: the outcome of each entry
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from fastness.errors import FastnessError
from fastness.kv import Transaction
from fastness.layers import audit
from fastness.names import checked_name
from fastness.plane.handlers import HANDLERS, transaction
from fastness.wire.atomic import Answers
from fastness.wire.audit import OK, AuditEntry, AuditPage, ReadAudit, count_of, detail_of, target_of
from fastness.wire.mail import GetMailPolicy, SetMailPolicy
from fastness.wire.queues import GetQueuePolicy, SetQueuePolicy
from fastness.wire.requests import Request, permission_of
from fastness.wire.type_checks import check_types

# The reads of what a request replaces, so that its entry says which fields change.
_BEFORE: Final[dict[type[Request[Any]], Callable[[Any], Request[Any]]]] = {
    SetQueuePolicy: lambda request: GetQueuePolicy(request.queue, request.universe),
    SetMailPolicy: lambda request: GetMailPolicy(request.universe),
}


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request, and from where."""

    actor: str = ""  # The name of a token, or `user@host`; empty: no token.
    token_id: str = ""
    client: str = ""  # A network address.
    entry: str = ""  # http, stream, mcp, sqs or cli


@transaction
def read(tx: Transaction, request: ReadAudit) -> AuditPage:
    if request.universe is not None:
        checked_name("universe", request.universe)
    return audit.page(tx, request)


def begin(tx: Transaction, requests: Sequence[Request[Any]], caller: Caller) -> list[AuditEntry]:
    """Store an entry for each request, which is about to be executed."""
    return [
        audit.begin(tx, _entry(request, caller, _universe_of(request), _before(tx, request))) for request in requests
    ]


def refuse(tx: Transaction, requests: Sequence[Request[Any]], caller: Caller, code: str) -> None:
    """Store an entry for each request that the caller may not send.

    They are in the log of the plane: a caller must not write to universes that it may not use.
    """
    for request in requests:
        entry = _entry(request, caller, None, None)
        universe = _universe_of(request)
        target = entry.target if universe in (None, entry.target) else f"{universe}/{entry.target}"
        audit.begin(tx, msgspec.structs.replace(entry, target=target, outcome=code))


def finish(
    tx: Transaction,
    entries: Sequence[AuditEntry],
    requests: Sequence[Request[Any]],
    outcome: str,
    answer: object = None,
) -> None:
    """Store the outcome of requests that were recorded by `begin`; `answer` is that of the only one."""
    for entry, request in zip(entries, requests, strict=True):
        count = count_of(request, answer) if outcome == OK and not isinstance(answer, Answers) else None
        audit.finish(tx, entry, outcome, count)


def _entry(request: Request[Any], caller: Caller, universe: str | None, before: msgspec.Struct | None) -> AuditEntry:
    return AuditEntry(
        id="",
        at_ms=0,
        action=permission_of(type(request)),
        target=target_of(request),
        universe=universe,
        actor=caller.actor,
        token_id=caller.token_id,
        client=caller.client,
        entry=caller.entry,
        detail=detail_of(request, before),
    )


def _universe_of(request: Request[Any]) -> str | None:
    """The universe whose log has a request's entry; None: the plane's own."""
    universe: str | None = getattr(request, "universe", None)
    if universe is not None:
        with suppress(FastnessError):
            return checked_name("universe", universe)
    return None


def _before(tx: Transaction, request: Request[Any]) -> msgspec.Struct | None:
    make = _BEFORE.get(type(request))
    if make is None:
        return None
    with suppress(FastnessError):  # The request itself is refused for the same reason.
        current = make(request)
        check_types(current)
        run = HANDLERS[type(current)].run
        assert run is not None
        found: msgspec.Struct = run(tx, current)
        return found
    return None
