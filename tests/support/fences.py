"""Every kind of fence, and a check that none is issued twice.

`KINDS` has a function for each place in the source that issues fences. Each call issues the next fence of the same
thing, and leaves the thing free.
"""

from collections.abc import Callable
from typing import Final

from fastness.kv import Database, Transaction
from fastness.layers import (
    effect_leases,
    effects,
    hosting,
    inboxes,
    leases,
    locks,
    maintenance,
    queues,
    snapshots,
    timers,
    turns,
    worlds,
)
from fastness.layers.effects import DueEffect, EffectKey
from fastness.layers.hosting import Ready
from fastness.layers.leases import LeaseKey
from fastness.layers.queues import QueueKey, StoredMessage
from fastness.layers.worlds import World, WorldState
from fastness.wire.inboxes import Control, DomainEvent, Effect
from fastness.wire.locks import GrantedLocks, LockSession
from fastness.wire.queues import MessageLease, NewMessage

JOBS, STATEFUL, ASIDE = (QueueKey("main", name) for name in ("jobs", "stateful", "aside"))
ADA, BOB = World("main", "ada"), World("main", "bob")
SESSION: Final = LockSession("session-of-ada-0123456789")


def delivery(tx: Transaction) -> int:
    message = _lease(tx, JOBS)
    _return(tx, JOBS, message)
    return message.fence


def _return(tx: Transaction, queue: QueueKey, message: StoredMessage) -> None:
    proof = MessageLease(queues.format_id(message.id), message.lease_id, message.fence)
    queues.nack(tx, queue, proof, counts=False)


def lease_of_a_workflow_state(tx: Transaction) -> int:
    """Its record is deleted when the message moves to another queue, and the message comes back."""
    message = _lease(tx, STATEFUL, with_state=True)
    state = LeaseKey("main", f"q/{STATEFUL.name}/state/{queues.format_id(message.id)}")
    grant = leases.last_grant(tx, state)
    assert grant is not None
    _return(tx, STATEFUL, message)
    for source, target in ((STATEFUL, ASIDE), (ASIDE, STATEFUL)):
        assert queues.move_messages(tx, source, [queues.format_id(message.id)], to=target) == [None]
    return grant.fence


def lease(tx: Transaction) -> int:
    return leases.acquire(tx, LeaseKey("main", "deploy"), owner="ada", ttl_ms=1_000).fence


def lock(tx: Transaction) -> int:
    steps = locks.steps_of([("record_id", "task/1")], "X")
    granted = locks.acquire(tx, locks.AcquireCall(SESSION, "claim", steps, "ada", 1_000), may_wait=False)
    assert isinstance(granted, GrantedLocks)
    assert locks.release(tx, SESSION, "claim")
    return granted.locks[0].fence


def claim_of_a_world(tx: Transaction) -> int:
    """The world is deleted after it, and created again."""
    snapshots.create_world(tx, ADA)
    turns.set_program(tx, ADA, "program")
    inboxes.enqueue(tx, ADA, Control(command="go"))
    claimed = turns.claim(tx, ADA, Ready(tx.now_ms, ADA.name, "program"), owner="ada", lease_ms=1_000)
    assert claimed is not None
    _delete(tx, ADA)
    return claimed.fence


def claim_of_an_effect(tx: Transaction) -> int:
    """The effect is carried out, and the world that asked for it is deleted. The next one asks at the same height."""
    snapshots.create_world(tx, BOB)
    inboxes.enqueue(tx, BOB, DomainEvent(schema="s", effects=(Effect("mail", b"hash"),)))
    key = EffectKey(BOB.name, inboxes.drain(tx, BOB)[-1], 0)
    (claimed,) = effect_leases.claim(tx, "main", [DueEffect(tx.now_ms, "mail", key)], owner="ada", lease_ms=1_000)
    effect_leases.complete(tx, "main", key, claimed.fence)
    _delete(tx, BOB)
    return claimed.fence


def maintenance_lease(tx: Transaction) -> int:
    fence = maintenance.take(tx, "node", ttl_ms=1_000).fence
    maintenance.release(tx, "node")
    return fence


KINDS: Final[tuple[Callable[[Transaction], int], ...]] = (
    delivery,
    lease_of_a_workflow_state,
    lease,
    lock,
    claim_of_a_world,
    claim_of_an_effect,
    maintenance_lease,
)


class Issued:
    """The last fence of each kind. It outlives what the data forgets."""

    def __init__(self) -> None:
        self.last = {kind.__name__: 0 for kind in KINDS}

    def more(self, database: Database) -> None:
        """Issue fences of every kind; each is higher than all before it."""
        repeated = set()
        for kind in KINDS * 3:
            fence = database.transact(kind)
            if fence <= self.last[kind.__name__]:
                repeated.add(kind.__name__)
            self.last[kind.__name__] = fence
        assert not repeated, f"fences of these kinds were issued before: {sorted(repeated)}"


def _lease(tx: Transaction, queue: QueueKey, *, with_state: bool = False) -> StoredMessage:
    """The only message of a queue, leased. It is put if it was not."""
    if not queues.stats(tx, queue).ready:
        queues.put(tx, queue, [NewMessage(payload=b"x", max_attempts=1_000)])
    (message,) = queues.lease(tx, queue, owner="ada", with_state=with_state)
    return message


def _delete(tx: Transaction, world: World) -> None:
    incarnation = worlds.describe(tx, world).incarnation
    worlds.change_state(tx, world, WorldState.ARCHIVED)
    worlds.begin_delete(tx, world)
    for clear in (hosting.clear, effects.clear, timers.clear, worlds.clear):
        assert clear(tx, world, incarnation, 1_000)
    worlds.end_delete(tx, world, incarnation)
