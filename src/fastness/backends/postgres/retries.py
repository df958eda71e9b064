"""Why a transaction on PostgreSQL is run again, and how often."""

import time
from collections.abc import Callable

from fastness import limits
from fastness.errors import Busy, FastnessError, TransactionConflict, Unreachable
from fastness.kv import Result
from fastness.kv.contention import Contention
from fastness.kv.execution import Jitter, retry_pauses_seconds


class Conflicted(Exception):
    """PostgreSQL aborted this transaction because of a conflict; run it again."""


class Overloaded(Conflicted):
    """PostgreSQL aborted this transaction because it lacks a resource; run it again after a pause."""


class Disconnected(Exception):
    """The connection broke and nothing was committed; run the transaction again on a new one."""


class Idled(Disconnected):
    """PostgreSQL ended the session because its transaction paused for too long; nothing was committed."""


def retry_transaction(jitter: Jitter, attempt: Callable[[], Result], contention: Contention) -> Result:
    """The result of `attempt`, which is retried after conflicts, overload and lost connections, within bounds.

    Raises:
        TransactionConflict, Unreachable, Busy: every attempt failed; nothing was written.
    """
    pauses = retry_pauses_seconds(jitter)
    deadline = time.monotonic() + limits.OVERLOAD_SECONDS_MAX
    idled, is_lost = 0, False
    while True:
        try:
            return attempt()
        except Overloaded as error:
            contention.retries += 1
            if time.monotonic() >= deadline:
                raise Busy(f"PostgreSQL is overloaded ({error}); nothing was written, try again later") from None
            time.sleep(jitter.random() * limits.OVERLOAD_PAUSE_SECONDS_MAX)
        except Idled:
            contention.retries += 1
            idled += 1
            if idled >= limits.IDLE_TRANSACTIONS_MAX:
                raise Busy(
                    f"The transaction paused for {limits.IDLE_TRANSACTION_SECONDS_MAX} s between statements, {idled} "
                    "times; nothing was written. Do slow work before the transaction, then try again"
                ) from None
        except (Conflicted, Disconnected) as error:
            contention.retries += 1
            pause = next(pauses, None)
            if pause is None:
                raise _exhausted(error) from None
            if isinstance(error, Conflicted):
                contention.conflicts += 1
                time.sleep(pause)
            elif is_lost:  # Not for the first time: a proxy, or a server that shuts down, may accept connections.
                time.sleep(jitter.random() * limits.FAILOVER_PAUSE_MS_MAX / 1_000)
            is_lost = is_lost or isinstance(error, Disconnected)


def _exhausted(reason: Conflicted | Disconnected) -> FastnessError:
    """The error after the last retry."""
    if isinstance(reason, Disconnected):
        return Unreachable(f"PostgreSQL keeps breaking the connection ({reason}); nothing was written, try again later")
    return TransactionConflict(
        f"Conflicted with other processes {limits.CONFLICT_RETRIES_MAX} times; nothing was written, try again later"
    )
