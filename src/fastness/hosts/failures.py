"""What hosts do about errors."""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable

from fastness.errors import FastnessError
from fastness.handles.workers import RestartPolicy
from fastness.handles.workers.consumers import is_final
from fastness.limits import ASIDE_ERROR_BYTES_MAX, HOST_WAIT_SECONDS_MAX

_log = logging.getLogger("fastness.host")


def text_of(error: BaseException) -> str:
    """An error with the end of its traceback, which says most."""
    encoded = "".join(traceback.format_exception(error)).encode(errors="replace")
    return encoded[-ASIDE_ERROR_BYTES_MAX:].decode(errors="ignore")


async def claim_for_ever(what: str, claim: Callable[..., Awaitable[int]]) -> None:
    """Claim again and again, until it is cancelled.

    Raises:
        FastnessError: nothing can be claimed, and a retry cannot succeed.
    """
    failures, restarts = 0, RestartPolicy(longest_seconds=30.0)
    while True:
        try:
            await claim(wait_seconds=HOST_WAIT_SECONDS_MAX)
            failures = 0
        except FastnessError as error:
            if is_final(error):
                raise
            failures += 1
            _log.warning("%s cannot be claimed: %s", what, error)
            await asyncio.sleep(restarts.pause_seconds(failures))
        await asyncio.sleep(0)  # An embedded plane may answer without waiting.
