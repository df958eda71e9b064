"""The simulator finds nothing wrong with queues, and finds every queue that was broken on purpose."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.backends.memory import MemoryDatabase
from holdfast.kv import Transaction
from holdfast.layers import queues as layer
from holdfast.layers.queues import QueueKey, StoredMessage, counters, dead_letters, enqueue, expiry, leasing, sidecars
from holdfast.layers.queues import keys as queue_keys
from holdfast.layers.queues.counters import QueueTransaction
from holdfast.testing import queue_scenarios
from holdfast.testing.faults import FaultyDatabase
from holdfast.testing.histories import Outcome, Violation
from holdfast.testing.queue_scenarios import queues
from holdfast.testing.scenarios import play
from holdfast.testing.simulation import Rates
from holdfast.tiers import Tier
from holdfast.wire.queues import MessageLease

SEEDS_TO_FIND = 30  # A fault that takes more seeds than that would slip through an ordinary run.


def test_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of what was read ahead, and of what one transaction attends to, are met all the time."""
    monkeypatch.setattr(leasing, "READ_AHEAD", 2)
    monkeypatch.setattr(expiry, "DUE_BATCH", 1)
    for seed in range(60):
        play(queues, seed)


def test_faults_at_every_turn_change_nothing() -> None:
    for seed in range(60):
        play(queues, seed, rates=Rates(refused=0.15, lost=0.2, late=0.5, crash=0.02, power=0.02))


def test_the_scenario_meets_everything_that_it_is_about() -> None:
    """A simulation whose consumers are never late proves nothing."""
    simulations = [play(queues, seed) for seed in range(20)]
    operations = [each for simulation in simulations for each in simulation.history.operations]
    met = {(each.kind, each.outcome) for each in operations}
    for kind in ("put", "lease", "ack", "nack", "reject", "extend"):
        for outcome in Outcome:
            assert (kind, outcome) in met
    assert any(".1" in each.client for each in operations)  # Somebody crashed and started again.
    fences = [fence for each in operations if each.kind == "lease" for _, fence, *_ in each.result or ()]
    assert max(fences) > 5


# Queues with a fault. A checker that does not find these proves nothing.


def parked(queue_tx: QueueTransaction) -> list[StoredMessage]:
    begin = queue_tx.keys.parked
    return [queue_keys.decode(value) for _, value in queue_tx.tx.scan(begin, begin + b"\xff" * 17, limit=1_000)]


def every_lease_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expiry is ignored: whoever looks takes what others have."""

    def process_due(queue_tx: QueueTransaction) -> bool:
        for message in parked(queue_tx):
            expiry._end_a_wait(queue_tx, message.id, message.due_ms)
        return True

    monkeypatch.setattr(leasing, "process_due", process_due)


def no_lease_ever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expiry is ignored: what a crashed consumer had is never delivered again."""
    end_a_wait = expiry._end_a_wait

    def only_delays(queue_tx: QueueTransaction, id: bytes, at_ms: int) -> None:
        if any(message.id == id and message.owner is None for message in parked(queue_tx)):
            end_a_wait(queue_tx, id, at_ms)

    monkeypatch.setattr(expiry, "_end_a_wait", only_delays)


def acks_need_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    ack = layer.ack

    def careless_ack(tx: Transaction, queue: QueueKey, proof: MessageLease) -> str | None:
        stored = tx.get(queue_keys.keys_of(queue).parked_key(queue_keys.id_of(proof.id)))
        if stored is not None:
            message = queue_keys.decode(stored)
            proof = MessageLease(proof.id, message.lease_id, message.fence)
        return ack(tx, queue, proof)

    monkeypatch.setattr(layer, "ack", careless_ack)


def nothing_needs_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(tx: Transaction, room: queue_keys.QueueKeys, proof: MessageLease) -> StoredMessage | None:
        stored = tx.get(room.parked_key(queue_keys.id_of(proof.id)))
        return None if stored is None else queue_keys.decode(stored)

    monkeypatch.setattr(leasing, "_held", held)


def puts_are_acknowledged_before_they_are_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 29: acknowledged messages that a power failure takes back."""
    transact = FaultyDatabase.transact

    def hasty(self: FaultyDatabase, work: Callable[..., Any], /, *args: Any, tier: Tier = Tier.CRITICAL) -> Any:
        return transact(self, work, *args, tier=Tier.IMPORTANT if work is queue_scenarios._put else tier)

    monkeypatch.setattr(FaultyDatabase, "transact", hasty)


def the_front_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that was given back is below the front from which searches begin."""
    make_ready = QueueTransaction.make_ready

    def forgetful(self: QueueTransaction, message: StoredMessage, *, fresh: bool) -> None:
        front = self.counters.fronts.get(message.priority)
        make_ready(self, message, fresh=fresh)
        if front is not None:
            self.counters.fronts[message.priority] = front

    monkeypatch.setattr(QueueTransaction, "make_ready", forgetful)


def what_was_read_ahead_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that was given back is older than what was read ahead meanwhile, and has to wait for it."""
    make_ready = QueueTransaction.make_ready

    def orderly(self: QueueTransaction, message: StoredMessage, *, fresh: bool) -> None:
        disorder = self.counters.disorder
        make_ready(self, message, fresh=fresh)
        self.counters.disorder = disorder

    monkeypatch.setattr(QueueTransaction, "make_ready", orderly)


def the_least_urgent_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def least_urgent(ready: dict[int, int]) -> int:
        return min((priority for priority, count in ready.items() if count > 0), default=-1)

    monkeypatch.setattr(leasing, "_most_urgent", least_urgent)


def fences_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = leasing._hand_over

    def same_fence(queue_tx: QueueTransaction, message: StoredMessage) -> None:
        message.fence = 0
        hand_over(queue_tx, message)

    monkeypatch.setattr(leasing, "_hand_over", same_fence)


def redriven_fences_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    move = dead_letters._move

    def forgetful(source: QueueTransaction, target: QueueTransaction, message: StoredMessage) -> None:
        move(source, target, message)
        message.fence = 0

    monkeypatch.setattr(dead_letters, "_move", forgetful)


def a_crash_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 7: only explicit failures count."""
    end_a_wait = expiry._end_a_wait

    def forgiving(queue_tx: QueueTransaction, id: bytes, at_ms: int) -> None:
        for message in parked(queue_tx):
            if message.id == id and message.owner is not None:
                message.failures -= 1
                queue_tx.tx.put(queue_tx.keys.parked_key(id), queue_keys.encode(message))
        end_a_wait(queue_tx, id, at_ms)

    monkeypatch.setattr(expiry, "_end_a_wait", forgiving)


def everybody_leads_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "_lead", lambda queue_tx, message, group: True)


def a_nack_passes_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a group goes on while its first message waits to be tried again."""
    give_back = dead_letters.give_back

    def hasty(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int) -> None:
        enqueue.pass_the_lead(queue_tx, message)
        give_back(queue_tx, message, delay_ms=delay_ms)

    monkeypatch.setattr(dead_letters, "give_back", hasty)


def nobody_inherits_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "pass_the_lead", lambda queue_tx, message: None)


def idempotency_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "_used", lambda tx, room, key: None)


def delays_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    settle_into = enqueue.settle_into

    def at_once(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int, fresh: bool) -> None:
        settle_into(queue_tx, message, delay_ms=0, fresh=fresh)

    monkeypatch.setattr(enqueue, "settle_into", at_once)


def extensions_are_empty_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to an extend says how long the lease lasts; it lasts as long as before."""
    extend = layer.extend

    def no_extend(tx: Transaction, queue: QueueKey, proof: MessageLease, *, by_ms: int) -> StoredMessage:
        message = extend(tx, queue, proof, by_ms=1)
        message.due_ms = max(message.due_ms, tx.now_ms + by_ms)
        return message

    monkeypatch.setattr(layer, "extend", no_extend)


def bodies_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(queue_tx: QueueTransaction, message: StoredMessage) -> None:
        dead_letters._forget_ttl(queue_tx.tx, queue_tx.keys, message)
        sidecars.remove(queue_tx.tx, queue_tx.queue, message)
        enqueue.pass_the_lead(queue_tx, message)

    monkeypatch.setattr(dead_letters, "remove", remove)


def the_tally_forgets_what_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    unpark = counters.QueueTransaction.unpark

    def careless(self: QueueTransaction, message: StoredMessage) -> None:
        leased = self.counters.leased
        unpark(self, message)
        if message.due_ms <= self.tx.now_ms:
            self.counters.leased = leased

    monkeypatch.setattr(counters.QueueTransaction, "unpark", careless)


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (every_lease_ends_at_once, "had two owners|too soon"),
    (no_lease_ever_ends, "does not drain"),
    (acks_need_no_fence, "ack with fence|delivered again after its ack|acknowledged and is lost"),
    (nothing_needs_a_fence, "was accepted after|delivered again|two owners|fence .* was good for"),
    (puts_are_acknowledged_before_they_are_durable, "acknowledged and is lost"),
    (the_front_stays_where_it_is, "does not drain"),
    (what_was_read_ahead_is_always_right, "delivered behind|does not drain"),
    (the_least_urgent_come_first, "delivered behind"),
    (fences_stand_still, "given out twice"),
    (redriven_fences_begin_anew, "came back with the old fence"),
    (a_crash_is_no_failure, "times before and has"),
    (everybody_leads_the_group, "in flight|out of order"),
    (a_nack_passes_the_lead, "in flight|out of order|tally says"),
    (nobody_inherits_the_lead, "does not drain"),
    (idempotency_keys_are_forgotten, "was put once"),
    (delays_are_ignored, "too soon"),
    (extensions_are_empty_promises, "had two owners"),
    (bodies_are_left_behind, "keys left"),
    (the_tally_forgets_what_expired, "its tally says"),
]


@pytest.mark.parametrize(("break_it", "expected"), BROKEN, ids=[break_it.__name__ for break_it, _ in BROKEN])
def test_a_broken_queue_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation, match=expected) as caught:
        for seed in range(SEEDS_TO_FIND):
            play(queues, seed, rates=Rates(power=0.02))
    print(caught.value.__notes__[0])
    assert "--seed" in caught.value.__notes__[0]


class ForgetsCommits(MemoryDatabase):
    """Acknowledges every fortieth commit without keeping it."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 40 == 39:
            self._commits += 1
        else:
            super()._commit(tx)


class HalfCommits(MemoryDatabase):
    """Keeps only the first write of every thirtieth commit."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 30 == 29:
            for key in list(tx.writes)[1:]:
                del tx.writes[key]
        super()._commit(tx)


@pytest.mark.parametrize("broken", [ForgetsCommits, HalfCommits])
def test_a_broken_database_is_found(broken: type[MemoryDatabase]) -> None:
    with pytest.raises(Violation):
        for seed in range(SEEDS_TO_FIND):
            play(queues, seed, broken)
