"""Calls that may be sent twice, as a port carries them out."""

from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.kv import Transaction
from holdfast.layers.once import Once, once, sending
from holdfast.wire.answers import read_answer
from holdfast.wire.repeats import takes_key
from holdfast.wire.requests import Request


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
        return once(tx, call, partial(read_answer, request), run, request)

    return run_once
