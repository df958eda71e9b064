"""What a server adds to the audit log: the audited requests of its callers, and those that it refuses.

All ways into the server execute the requests of their callers by `call_audited`, after they were authorized.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from fastness.errors import FastnessError, NotAllowed
from fastness.limits import AUDIT_REFUSALS_PER_MINUTE
from fastness.plane import audit
from fastness.plane.audit import Caller
from fastness.plane.audited import call_recorded
from fastness.plane.services import HasServices
from fastness.server.authorization import Authorizer
from fastness.tiers import Tier
from fastness.wire.audit import audited_parts, may_be_audited
from fastness.wire.requests import Answer, Request

_log = logging.getLogger("fastness.audit")


def is_audited(request: Request[Any]) -> bool:
    """Whether a request is recorded."""
    return may_be_audited(request.__class__) and bool(audited_parts(request))


def call_audited(
    stores: HasServices, authorizer: Authorizer, request: Request[Any], call: Callable[[], Awaitable[Answer]]
) -> Awaitable[Answer]:
    """The answer of `call`, which executes `request`; recorded if the request is audited.

    Raises:
        NotAllowed: the caller's token was revoked or has expired meanwhile.
    """
    if not may_be_audited(request.__class__) or not (parts := audited_parts(request)):
        return call()
    return call_recorded(stores, parts, _caller_of(authorizer), call)


class RefusalRecorder:
    """Records audited requests that callers may not send: a bounded number a minute, all others are only logged."""

    def __init__(self, stores: HasServices) -> None:
        self._stores = stores
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = float(AUDIT_REFUSALS_PER_MINUTE)
        self._counted = monotonic()

    def record(self, authorizer: Authorizer, request: Request[Any], error: FastnessError) -> None:
        """Record a refused request in a background task, if it is audited. Call it on the event loop."""
        if not isinstance(error, NotAllowed) or not is_audited(request):
            return
        now = monotonic()
        self._left = min(
            float(AUDIT_REFUSALS_PER_MINUTE), self._left + (now - self._counted) * AUDIT_REFUSALS_PER_MINUTE / 60
        )
        self._counted = now
        parts = audited_parts(request)
        if self._left < len(parts):
            return
        self._left -= len(parts)
        work = self._store(parts, _caller_of(authorizer), error.code)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Wait for the entries that are being stored."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _store(self, parts: list[Request[Any]], caller: Caller, code: str) -> None:
        try:
            database = self._stores.services.database
            await database.transact_async(audit.refuse, parts, caller, code, tier=Tier.IMPORTANT)
        except FastnessError as error:
            _log.warning("a refused call is missing in the audit log: %s", error)


def _caller_of(authorizer: Authorizer) -> Caller:
    return Caller(
        actor=authorizer.holder or "",
        token_id=authorizer.token_id,
        client=authorizer.client,
        entry=authorizer.entry,
    )
