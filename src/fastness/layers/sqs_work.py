"""Unfinished work on SQS queues: purges and deletions of large queues, and tasks that move messages.

    (u, universe, "sqs-work", queue, kind)  ->  how far it has come, and which process does it

    a request adds it ──► steps of one transaction each, by any process ──► removed
                               │  ▲
                               └──┘ the process stops: another one continues after SQS_WORKER_SECONDS

Each step reads the entry and writes how far it has come in the commit of what it does. So a step that is repeated by
another process, or after a crash, does nothing twice. A process leaves work alone that another one did a part of a
moment ago: that only saves effort.
"""

from typing import Final, Literal, NamedTuple

import msgspec

from fastness.kv import Event, Subspace, Transaction
from fastness.limits import SQS_WORK_LISTED_MAX, SQS_WORKER_SECONDS

Kind = Literal["delete", "move", "purge"]
_WORKER_MS: Final = round(SQS_WORKER_SECONDS * 1_000)


class SqsWorkAdded(Event, frozen=True, gc=False):
    """There is work, or it has become due."""


class Work(msgspec.Struct, array_like=True):
    """An entry. Not frozen: a step changes it and writes it once."""

    since_ms: int
    worker: str = ""  # The process that did the last step, until
    until_ms: int = 0
    count: int = 0  # Messages that a purge or a deletion has removed.
    after: bytes | None = b""  # Where it continues.
    is_done: bool = False  # The messages of a deleted queue are gone. The entry stays while its name is not free.
    task: bytes = b""  # The id of the move task.


class Step(NamedTuple):
    """The result of a step."""

    in_ms: int | None  # In how many milliseconds the next one can follow; None: there is nothing left to do.
    total: int  # Messages that were removed or moved so far.


class WorkKey(NamedTuple):
    """Identifies work."""

    universe: str
    queue: str
    kind: Kind


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Work).decode


def find(tx: Transaction, key: WorkKey) -> Work | None:
    """The entry of some work, if there is any."""
    stored = tx.get(_key(key))
    return None if stored is None else _decode(stored)


def save(tx: Transaction, key: WorkKey, work: Work) -> None:
    """Add or change an entry."""
    tx.put(_key(key), _encode(work))


def remove(tx: Transaction, key: WorkKey) -> None:
    """Remove the entry of work that is finished."""
    tx.delete(_key(key))


def other_worker_ms(tx: Transaction, work: Work, worker: str) -> int:
    """For how many milliseconds another process has the work; 0: this one may do it."""
    return max(work.until_ms - tx.now_ms, 0) if work.worker != worker else 0


def claim(tx: Transaction, work: Work, worker: str) -> None:
    """Have other processes leave the work alone for a while. The caller saves it."""
    # Processes that do not share the key space have no name, and nothing to wait for after a restart.
    work.worker, work.until_ms = worker, tx.now_ms + _WORKER_MS if worker else 0


def pending(tx: Transaction, universe: str) -> list[WorkKey]:
    """The work on the queues of a universe, as much as one pass does."""
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
