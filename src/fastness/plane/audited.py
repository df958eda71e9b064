"""Audited requests: an entry in the audit log before the request is executed, and its outcome after it.

Servers record what their callers send. Commands that open a data directory or PostgreSQL themselves record what they
do, with the name of the user. A program that opens a plane is not recorded: it can write anything to the key space.
"""

import asyncio
import getpass
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from fastness.errors import Busy, FastnessError
from fastness.layers.blobs import Verify
from fastness.layers.idempotency import KeyedCall
from fastness.limits import AUDITED_CALLS_MAX
from fastness.plane import audit
from fastness.plane.audit import Caller
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.services import HasServices, Services
from fastness.tiers import Tier
from fastness.wire.audit import FAILED, OK, audited_parts, may_be_audited
from fastness.wire.requests import Answer, Request

_log = logging.getLogger("fastness.audit")
_TIER: Final = Tier.IMPORTANT  # The sync of the action makes the entry before it durable, too.


async def call_recorded(
    stores: HasServices, parts: Sequence[Request[Any]], caller: Caller, call: Callable[[], Awaitable[Answer]]
) -> Answer:
    """The answer of `call`, which executes `parts`. If the entries cannot be stored, it is not executed.

    It runs to its end even if its caller is cancelled, because the client has disconnected: what was done is recorded.

    Raises:
        Busy: as many audited calls run as allowed.
    """
    running = stores.services.recorded_calls
    if len(running) >= AUDITED_CALLS_MAX:
        raise Busy(f"{AUDITED_CALLS_MAX} audited calls are running, the maximum; repeat the call in a moment")
    task = asyncio.get_running_loop().create_task(_call_recorded(stores, parts, caller, call))
    running.add(task)
    task.add_done_callback(running.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_unexpected)  # No caller gets its error.
        raise


def _log_unexpected(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, FastnessError):
        _log.error("unexpected error in a call whose caller has left", exc_info=error)


async def _call_recorded(
    stores: HasServices, parts: Sequence[Request[Any]], caller: Caller, call: Callable[[], Awaitable[Answer]]
) -> Answer:
    transact = stores.services.database.transact_async
    entries = await transact(audit.begin, parts, caller, tier=_TIER)
    try:
        answer = await call()
    except Exception as error:
        code = error.code if isinstance(error, FastnessError) else FAILED
        await _finish_async(stores, audit.finish, entries, parts, code)
        raise
    await _finish_async(stores, audit.finish, entries, parts, OK, answer)
    return answer


async def _finish_async(stores: HasServices, work: Callable[..., None], *args: Any) -> None:
    try:
        await stores.services.database.transact_async(work, *args, tier=_TIER)
    except FastnessError as error:
        _warn_of_missing_outcome(error)


def _warn_of_missing_outcome(error: FastnessError) -> None:
    _log.warning("the outcome of an action is missing in the audit log: %s", error)


def command_caller() -> Caller:
    """The user who runs a command."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container may run under a number without a name.
        user = "unknown"
    return Caller(actor=f"{user}@{socket.gethostname()}"[:256], entry="cli")


class AuditedTransport(EmbeddedTransport):
    """Records the audited requests of one caller."""

    def __init__(self, services: Services, caller: Caller, *, verify: Verify = Verify.ALWAYS) -> None:
        super().__init__(services, verify=verify)
        self._caller = caller

    def call(self, request: Request[Answer], call: KeyedCall | None = None) -> Answer:
        parts = audited_parts(request) if may_be_audited(type(request)) else []
        if not parts:
            return super().call(request, call)
        entries = self.services.database.transact(audit.begin, parts, self._caller, tier=_TIER)
        try:
            answer = super().call(request, call)
        except Exception as error:
            self._finish(audit.finish, entries, parts, error.code if isinstance(error, FastnessError) else FAILED)
            raise
        self._finish(audit.finish, entries, parts, OK, answer)
        return answer

    def _finish(self, work: Callable[..., None], *args: Any) -> None:
        try:
            self.services.database.transact(work, *args, tier=_TIER)
        except FastnessError as error:
            _warn_of_missing_outcome(error)


class AsyncAuditedTransport(AsyncEmbeddedTransport):
    """`AuditedTransport` for an event loop."""

    def __init__(self, services: Services, caller: Caller, *, verify: Verify = Verify.ALWAYS) -> None:
        super().__init__(services, verify=verify)
        self._caller = caller

    def call(self, request: Request[Answer], call: KeyedCall | None = None) -> Coroutine[Any, Any, Answer]:
        parts = audited_parts(request) if may_be_audited(type(request)) else []
        if not parts:
            return super().call(request, call)
        execute = super().call
        return call_recorded(self, parts, self._caller, lambda: execute(request, call))
