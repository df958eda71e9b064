"""Calls that may be sent twice, as a port carries them out."""

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.kv import Database, Transaction
from holdfast.layers.idempotency import Fresh, KeyedCall, any_forgotten, forget, once, period_of, sending
from holdfast.layers.queues import give_up
from holdfast.plane.queues import nack
from holdfast.tiers import Tier
from holdfast.wire.answers import read_answer
from holdfast.wire.queues import Delivery, MessageLease, NackMessages, ReceiveMessages
from holdfast.wire.repeats import takes_key
from holdfast.wire.requests import Request


def keyed_call_of(
    transport: Any, request: Request[Any], key: str | None, *, again: bool, like: Request[Any] | None = None
) -> KeyedCall | None:
    """What to give a port along with a request that has a key; None if nothing is to be remembered of it.

    `like` is what its caller has sent, where a door has added what differs from one sending to the next.

    Raises:
        InvalidArgument: the key is empty or too long.
    """
    if key is None or not takes_key(type(request)):
        return None
    return sending(key, request if like is None else like, transport.services.sendings.heard(again=again))


def run_only_once(run: Callable[[Transaction, Any], Any], call: KeyedCall) -> Callable[[Transaction, Any], Any]:
    """`run`, carried out unless it was before."""

    def run_once(tx: Transaction, request: Any) -> Any:
        return once(tx, call, partial(read_answer, request), run, request)

    return run_once


def give_back(
    transport: Any, request: ReceiveMessages, messages: Sequence[Delivery], call: KeyedCall | None
) -> Awaitable[None]:
    """Let others have these messages at once; it was not their fault.

    A `call` that gives all of its messages back is forgotten, unless its consumer has asked for them again meanwhile:
    then they are that consumer's.
    """
    leases = [MessageLease(each.id, each.lease_id, each.fence) for each in messages]
    giving = NackMessages(request.queue, leases, intent="defer", universe=request.universe)
    done: Awaitable[None] = transport.transact(_give_back, giving, call, tier=Tier.IMPORTANT)
    return done


def _give_back(tx: Transaction, giving: NackMessages, call: KeyedCall | None) -> None:
    if call is None or give_up(tx, call):
        nack(tx, giving)


_log = logging.getLogger("holdfast.sendings")
_NOT_FORGOTTEN = "the keys of old calls could not be forgotten, and will be in ten minutes: %s"


class RepeatDetector:
    """Tells the first sendings of calls from later ones: what is sent for the first time need not be looked for.

    The first sending of a call may still wait for its turn while the call is sent again, and be carried out after it.
    So nothing that came before a call that is sent again counts as the first from then on.

    When a period of keys is over, the next call that comes has those of the one before the last forgotten, beside it.
    """

    def __init__(self, database: Database, now_ms: Callable[[], int], *, shared: bool) -> None:
        """Where several servers share the key space, another one may have heard the call: there nothing is fresh."""
        self._database = database
        self._now_ms = now_ms
        self._shared = shared
        self._again = 0
        self._period = -1
        self._forgetting: threading.Thread | None = None

    def heard(self, *, again: bool) -> Fresh:
        """A call has come; says later whether it is the first of its kind."""
        period = period_of(self._now_ms())
        if period != self._period and (self._forgetting is None or not self._forgetting.is_alive()):
            self._period = period
            forgetting = threading.Thread(target=self._forget, name="holdfast-forgetting", daemon=True)
            try:
                forgetting.start()
                self._forgetting = forgetting
            except RuntimeError as error:
                _log.warning(_NOT_FORGOTTEN, error)
        self._again += again
        if again or self._shared:
            return _never
        before = self._again
        return lambda: self._again == before

    def stop(self) -> None:
        """Finish what is being forgotten."""
        if self._forgetting is not None:
            self._forgetting.join()

    def _forget(self) -> None:
        """A bounded number a transaction: calls go on meanwhile."""
        try:
            while self._database.read(any_forgotten, tier=Tier.IMPORTANT):
                self._database.transact(forget, tier=Tier.IMPORTANT)
        except HoldfastError as error:  # They are in nobody's way until the next period is over.
            _log.warning(_NOT_FORGOTTEN, error)
        except Exception as error:
            _log.exception(_NOT_FORGOTTEN, error)


def _never() -> bool:
    return False
