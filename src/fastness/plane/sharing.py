"""Which queues a transaction shares: those that it only adds messages to.

Where several processes write, a transaction has each part of the key space that it touches to itself, unless it shares
the part with `tx.share`. A put of plain messages writes only new keys and the counters of its own process, so any
number of such puts can use a queue at the same time. This must hold for all calls of a transaction: one that also
acknowledges a message changes keys that others may change. So queues are shared where all calls of a transaction are
known, before the first of them runs. A transaction that is put together elsewhere shares nothing.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

from fastness.kv import Transaction
from fastness.layers.queues import keys_of, only_adds
from fastness.plane.queues import queue_key
from fastness.wire.atomic import CommitAtomic
from fastness.wire.queues import AckMessages, ExtendMessages, PutMessages
from fastness.wire.requests import Request

# Requests of these kinds never touch a queue. Raw pairs may be anywhere, and other requests are not parts of a batch.
_APART_FROM_QUEUES: Final = frozenset(
    {"agents", "blobs", "entities", "hosting", "leases", "locks", "mail", "runs", "states", "worlds"}
)


def share_queues(tx: Transaction, requests: Iterable[Request[Any]]) -> None:
    """Share the queues that a transaction of exactly these requests only adds messages to.

    Call it before the first of them runs. Does nothing on an embedded store, which has no locks to share.
    """
    if tx.writer:
        for prefix in _shared_prefixes(requests):
            tx.share(prefix)


def _shared_prefixes(requests: Iterable[Request[Any]]) -> list[bytes]:
    shared: set[bytes] = set()
    exclusive: set[bytes] = set()
    for request in _flat(requests):
        if isinstance(request, PutMessages | AckMessages | ExtendMessages):
            prefix = keys_of(queue_key(request)).prefix
            is_shared = isinstance(request, PutMessages) and only_adds(request.messages)
            (shared if is_shared else exclusive).add(prefix)
        elif not _is_apart_from_queues(type(request)):
            return []  # It may touch another queue than its own, such as the one of its dead letters.
    return sorted(shared - exclusive)


def _flat(requests: Iterable[Request[Any]]) -> Iterator[Request[Any]]:
    for request in requests:
        if isinstance(request, CommitAtomic):
            yield from request.operations
        else:
            yield request


@cache
def _is_apart_from_queues(kind: type[Request[Any]]) -> bool:
    return str(kind.__struct_config__.tag).partition(".")[0] in _APART_FROM_QUEUES
