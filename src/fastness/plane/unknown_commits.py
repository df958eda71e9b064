"""Repeats calls whose commit is unknown, where that is safe.

PostgreSQL may become unreachable between a commit and its answer. A call with an idempotency key, and one that does no
harm if it is executed twice, is executed again: if it was committed, its stored answer is found. Every other caller
gets CommitUnknown.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from fastness import limits
from fastness.errors import Busy, CommitUnknown, TransactionConflict, Unreachable
from fastness.kv import Result
from fastness.layers.idempotency import KeyedCall
from fastness.wire.requests import Answer, Request

# What a repeated call may raise without having found out whether it was committed before.
_UNANSWERED: Final = (CommitUnknown, Unreachable, Busy, TransactionConflict)


def may_repeat(request: Request[Answer], call: KeyedCall | None) -> bool:
    """Whether a request can be executed again after its commit is unknown."""
    return call is not None or bool(request.operation.repeatable)


def repeat(attempt: Callable[[], Result], unknown: CommitUnknown) -> Result:
    """The answer of `attempt`, which is called again until it has one; `unknown` is raised if that takes too long."""
    deadline = time.monotonic() + limits.FAILOVER_SECONDS_MAX
    while True:
        try:
            return attempt()
        except _UNANSWERED:
            if time.monotonic() >= deadline:
                raise unknown from None
        time.sleep(limits.REPEAT_PAUSE_SECONDS)


async def repeat_async(attempt: Callable[[], Awaitable[Result]], unknown: CommitUnknown) -> Result:
    """`repeat` for an event loop."""
    deadline = time.monotonic() + limits.FAILOVER_SECONDS_MAX
    while True:
        try:
            return await attempt()
        except _UNANSWERED:
            if time.monotonic() >= deadline:
                raise unknown from None
        await asyncio.sleep(limits.REPEAT_PAUSE_SECONDS)
