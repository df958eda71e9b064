"""Calls that may be sent twice, as a port carries them out."""

from collections.abc import Callable
from typing import Any

from holdfast.kv import Transaction
from holdfast.layers.once import Fresh, Once, once, sending
from holdfast.wire.answers import decoder_of
from holdfast.wire.repeats import takes_key
from holdfast.wire.requests import Request


class Sendings:
    """Tells the first sendings of calls from later ones: what is sent for the first time need not be looked for.

    The first sending of a call may still wait for its turn while the call is sent again, and be carried out after it.
    So nothing that came before a call that is sent again counts as the first from then on.
    """

    def __init__(self, *, shared: bool) -> None:
        """Where several servers share the key space, another one may have heard the call: there nothing is fresh."""
        self._shared = shared
        self._again = 0

    def heard(self, *, again: bool) -> Fresh:
        """A call has come; says later whether it is the first of its kind."""
        self._again += again
        if again or self._shared:
            return _never
        before = self._again
        return lambda: self._again == before


def _never() -> bool:
    return False


def once_of(
    port: Any, request: Request[Any], key: str | None, *, again: bool, like: Request[Any] | None = None
) -> Once | None:
    """What to give a port along with a request that has a key; None if nothing is to be remembered of it.

    `like` is what its caller has sent, where a door has added what differs from one sending to the next.

    Raises:
        InvalidArgument: the key is empty or too long.
    """
    if key is None or not takes_key(type(request)):
        return None
    return sending(key, request if like is None else like, port.parts.sendings.heard(again=again))


def only_once(run: Callable[[Transaction, Any], Any], call: Once) -> Callable[[Transaction, Any], Any]:
    """`run`, carried out unless it was before."""

    def run_once(tx: Transaction, request: Any) -> Any:
        return once(tx, call, lambda tx: run(tx, request), decoder_of(request))

    return run_once
