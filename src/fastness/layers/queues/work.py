"""Work on a queue that takes more than one transaction: purges, deletions, redrives, and tasks that move messages.

    Work() ──► steps of one transaction each, a bounded number of messages in each ──► done
                  │  ▲
                  └──┘ the caller repeats its call, or another process goes on

A step reads how far the work has come, and writes that in the commit of what it does. So a step that is repeated, by
another process or after a crash, does nothing twice. How far it has come is kept in one of two places:

    (once, period) key                          ->  native calls, if they have an idempotency key (`step`)
    (u, universe, "sqs-work", queue, kind)      ->  SQS calls, which answer before the work is done (`listed_step`)

Only the caller goes on with a native call. If the background did so after a crash, it would also remove the messages
that were put since, while an unfinished native purge or deletion leaves a valid queue with fewer messages. Listed work
is done by any process. One leaves work alone that another one did a part of a moment ago: that only saves effort.
"""

from collections.abc import Callable
from copy import copy
from typing import Final, Literal, NamedTuple

import msgspec

from fastness.kv import Event, Subspace, Transaction
from fastness.layers.idempotency import KeyedCall, store_result, stored_result
from fastness.layers.queues.keys import QueueKey
from fastness.limits import SQS_WORK_LISTED_MAX, SQS_WORKER_SECONDS

Kind = Literal["delete", "move", "purge"]
_WORKER_MS: Final = round(SQS_WORKER_SECONDS * 1_000)


class SqsWorkAdded(Event, frozen=True, gc=False):
    """There is listed work, or it has become due."""


class Work(msgspec.Struct, array_like=True):
    """How far some work has come. Not frozen: a step changes it and writes it once."""

    since_ms: int = 0
    worker: str = ""  # The process that did the last step, until
    until_ms: int = 0
    count: int = 0  # Messages that it has removed or put back.
    after: bytes | None = b""  # Where it continues. None: a purge is at its end, of all but the leases in a deletion.
    is_done: bool = False  # Listed work may stay after that: a deletion, while the name of its queue is not free.
    tried: int = 0  # Dead letters that a redrive has looked at.
    task: bytes = b""  # The id of the move task.
    due_ms: int = 0  # The rate of the move task allows the next step then.


class WorkKey(NamedTuple):
    """Identifies listed work."""

    universe: str
    queue: str
    kind: Kind


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Work).decode


def step(
    tx: Transaction,
    queue: QueueKey,
    do: Callable[[Transaction, QueueKey, Work], None],
    work: Work,
    call: KeyedCall | None,
) -> Work:
    """Do one step of a native call; returns how far it has come then.

    A repeated `call` goes on where the stored work under its key is.
    """
    before = None if call is None else stored_result(tx, call)
    work = copy(work) if before is None else _decode(before)  # The transaction may run again.
    if work.is_done:
        return work
    do(tx, queue, work)
    if call is not None:
        store_result(tx, call, work)
    return work


def listed_step(
    tx: Transaction, key: WorkKey, do: Callable[[Transaction, QueueKey, Work], int | None], worker: str
) -> int | None:
    """Do one step of listed work, unless another worker has it.

    Returns in how many milliseconds the next one can follow, as `do` does; None: there is nothing left to do.
    """
    stored = tx.get(_key(key))
    if stored is None:
        return None
    work = _decode(stored)
    if work.worker != worker and 0 < (wait_ms := work.until_ms - tx.now_ms) <= _WORKER_MS:  # More: a clock set back.
        return wait_ms
    in_ms = do(tx, QueueKey(key.universe, key.queue), work)
    if in_ms is None:
        remove(tx, key)
    elif _encode(work) != stored:
        # Processes that do not share the key space have no name, and nothing to wait for after a restart.
        work.worker, work.until_ms = worker, tx.now_ms + _WORKER_MS if worker else 0
        save(tx, key, work)
    return in_ms


def find(tx: Transaction, key: WorkKey) -> Work | None:
    """Listed work, if there is any."""
    stored = tx.get(_key(key))
    return None if stored is None else _decode(stored)


def save(tx: Transaction, key: WorkKey, work: Work) -> None:
    """List work, or change it."""
    tx.put(_key(key), _encode(work))


def remove(tx: Transaction, key: WorkKey) -> None:
    """Take work off the list."""
    tx.delete(_key(key))


def pending(tx: Transaction, universe: str) -> list[WorkKey]:
    """The listed work on the queues of a universe, as much as one pass does."""
    area = _area(universe)
    found = [area.unpack(key) for key, _ in tx.scan(*area.range(), limit=SQS_WORK_LISTED_MAX)]
    return [WorkKey(universe, queue, kind) for queue, kind in found]


def tasks_of(universe: str, source: str) -> Subspace:
    """The subspace of the move tasks of a queue (`move_tasks.py`)."""
    return Subspace("u", universe, "sqs-tasks", source)


def _key(key: WorkKey) -> bytes:
    return _area(key.universe).key(key.queue, key.kind)


def _area(universe: str) -> Subspace:
    return Subspace("u", universe, "sqs-work")
