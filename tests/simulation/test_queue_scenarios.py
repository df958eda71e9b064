"""The simulator finds no violations in queues, and finds every deliberately broken queue."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.kv import Transaction, fence_floor
from fastness.layers import queues as layer
from fastness.layers.queues import (
    QueueKey,
    StoredMessage,
    dead_letters,
    enqueue,
    expiry,
    failures,
    groups,
    leasing,
    message_leases,
    sidecars,
)
from fastness.layers.queues import keys as queue_keys
from fastness.layers.queues.counters import QueueTransaction
from fastness.testing import queue_scenarios
from fastness.testing.faults import FaultyDatabase
from fastness.testing.histories import Outcome, Violation
from fastness.testing.queue_scenarios import queues
from fastness.testing.scenarios import play
from fastness.testing.simulation import Rates
from fastness.tiers import Tier
from fastness.wire import stored_messages
from fastness.wire.queues import MessageLease, QueuePolicy
from fastness.wire.stored_messages import StoredHead
from tests.support.depth import Depth

SEEDS_TO_FIND = 30  # An ordinary run would miss a fault that needs more seeds.


def test_small_batches_find_no_violation(monkeypatch: pytest.MonkeyPatch, depth: Depth, first_seed: int) -> None:
    """The limits of prefetching, and of due messages per transaction, are reached all the time."""
    monkeypatch.setattr(leasing, "PREFETCH_MAX", 2)
    monkeypatch.setattr(expiry, "DUE_BATCH_MAX", 1)
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(queues, seed)


def test_frequent_faults_find_no_violation(depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(queues, seed, rates=Rates(refused=0.15, lost=0.2, late=0.5, crash=0.02, power=0.02))


@pytest.mark.nightly
def test_ten_thousand_seeds_with_frequent_power_losses_find_no_violation() -> None:
    for seed in range(10_000):
        play(queues, seed, rates=Rates(power=0.02))


def test_the_scenario_covers_every_kind_and_outcome() -> None:
    """A simulation without late consumers proves nothing."""
    simulations = [play(queues, seed) for seed in range(10)]
    operations = [each for simulation in simulations for each in simulation.history.operations]
    met = {(each.kind, each.outcome) for each in operations}
    for kind in ("put", "lease", "ack", "nack", "reject", "extend"):
        for outcome in Outcome:
            assert (kind, outcome) in met
    assert any(".1" in each.client for each in operations)  # A client crashed and restarted.
    delivered = [message for each in operations if each.kind == "lease" for message in each.result or ()]
    assert max(attempts for *_, attempts, _, _ in delivered) > 5
    assert any(fence > fence_floor.STEP for _, fence, *_ in delivered)


# Broken queues, which the checker must detect.


def every_lease_expires_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expiry is ignored: leased messages are delivered to other consumers."""

    def process_due(queue_tx: QueueTransaction) -> bool:
        for key, value in queue_tx.tx.scan(*queue_tx.keys.due_range(0), limit=1_000):
            expiry._process_entry(queue_tx, key, value)
        return True

    monkeypatch.setattr(leasing, "process_due", process_due)


def no_lease_ever_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expiry is ignored: the messages of a crashed consumer are never delivered again."""
    monkeypatch.setattr(expiry, "_end_lease", lambda queue_tx, held: 1)


def acks_need_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    ack = layer.ack

    def careless_ack(tx: Transaction, queue: QueueKey, proof: MessageLease) -> str:
        for message in message_leases.leased_messages(tx, queue_keys.keys_of(queue)):
            if message.id == stored_messages.parse_id(proof.id):
                proof = MessageLease(proof.id, message.lease_id, message.fence)
        return ack(tx, queue, proof)

    monkeypatch.setattr(layer, "ack", careless_ack)


def nothing_needs_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    find = message_leases.HeldLeases.find

    def careless(self: message_leases.HeldLeases, proof: MessageLease) -> tuple[message_leases.HeldLease, int] | None:
        queue_tx = self._queue_tx
        for message in message_leases.leased_messages(queue_tx.tx, queue_tx.keys):
            if message.id == stored_messages.parse_id(proof.id):
                proof = MessageLease(proof.id, message.lease_id, message.fence)
        return find(self, proof)

    monkeypatch.setattr(message_leases.HeldLeases, "find", careless)


def puts_are_acknowledged_before_they_are_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss reverts acknowledged messages."""
    commit = FaultyDatabase.commit

    def hasty(self: FaultyDatabase, work: Callable[..., Any], /, *args: Any, tier: Tier, may_lose: bool) -> Any:
        return commit(
            self, work, *args, tier=Tier.IMPORTANT if work is queue_scenarios._put else tier, may_lose=may_lose
        )

    monkeypatch.setattr(FaultyDatabase, "commit", hasty)


def the_fence_floor_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that a power loss undid is repeated with the same fence."""
    monkeypatch.setattr(fence_floor, "raise_floor", lambda tx: 0)


def deliveries_do_not_wait_for_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss reverts the put of a message that was delivered."""
    note_commit = FaultyDatabase._note_commit

    def hasty(self: FaultyDatabase, writes: Any, tier: Tier) -> int:
        commit = note_commit(self, writes, tier)
        return 0 if writes.may_lose else commit

    monkeypatch.setattr(FaultyDatabase, "_note_commit", hasty)


def ready_messages_are_not_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery does not know that it has to wait for a put, or for an ack that lets a group continue."""
    monkeypatch.setattr(Transaction, "expose", lambda self: None)


def what_a_delivery_found_due_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss undoes the expiry of a lease, or a dead letter, although later messages were delivered."""
    monkeypatch.setattr(Transaction, "keep", lambda self: None)


def the_front_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requeued message is below the front, where searches begin."""
    make_ready = QueueTransaction.make_ready

    def forgetful(self: QueueTransaction, message: StoredMessage, *, newest: bool) -> None:
        front = self.counters.fronts.get(message.priority)
        make_ready(self, message, newest=newest)
        if front is not None:
            self.counters.fronts[message.priority] = front

    monkeypatch.setattr(QueueTransaction, "make_ready", forgetful)


def prefetched_messages_are_never_invalidated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requeued message is older than the prefetched ones, and is delivered after them."""
    make_ready = QueueTransaction.make_ready

    def orderly(self: QueueTransaction, message: StoredMessage, *, newest: bool) -> None:
        order_version = self.counters.order_version
        make_ready(self, message, newest=newest)
        self.counters.order_version = order_version

    monkeypatch.setattr(QueueTransaction, "make_ready", orderly)


def the_lowest_priority_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def least_urgent(ready: dict[int, int]) -> int:
        return min((priority for priority, count in ready.items() if count > 0), default=-1)

    monkeypatch.setattr(leasing, "_most_urgent", least_urgent)


def fences_do_not_increase(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = message_leases.grant

    def same_fence(
        queue_tx: QueueTransaction, heads: Sequence[StoredHead], stored: Sequence[bytes], **options: Any
    ) -> message_leases.HeldLease:
        for head in heads:
            head.fence = 0
        return grant(queue_tx, heads, stored, **options)

    monkeypatch.setattr(message_leases, "grant", same_fence)


def redriven_fences_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    move = dead_letters.move_parts

    def forgetful(source: QueueTransaction, target: QueueTransaction, message: StoredMessage) -> None:
        move(source, target, message)
        message.fence = 0

    monkeypatch.setattr(dead_letters, "move_parts", forgetful)


def a_crash_does_not_count_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only explicit failures count."""
    record = failures.record

    def forgiving(
        queue_tx: QueueTransaction, policy: QueuePolicy, message: StoredMessage, outcome: str, **options: Any
    ) -> None:
        record(queue_tx, policy, message, outcome, **options)
        message.failures -= outcome == failures.EXPIRED

    monkeypatch.setattr(failures, "record", forgiving)


def every_message_is_a_group_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(queue_tx: QueueTransaction, message: StoredMessage, group: str, *, newest: bool) -> None:
        groups.place(queue_tx, message, newest=newest)

    monkeypatch.setattr(groups, "enter", enter)


def a_nack_advances_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a group is delivered while its first message waits for a retry."""
    requeue = dead_letters.requeue

    def hasty(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int) -> None:
        groups.advance_group(queue_tx, message)
        requeue(queue_tx, message, delay_ms=delay_ms)

    monkeypatch.setattr(dead_letters, "requeue", hasty)


def a_group_never_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "advance_group", lambda queue_tx, message: None)


def idempotency_keys_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "_duplicate_of", lambda tx, keys, key: None)


def delays_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = enqueue.insert

    def at_once(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int, newest: bool) -> None:
        insert(queue_tx, message, delay_ms=0, newest=newest)

    monkeypatch.setattr(enqueue, "insert", at_once)


def extensions_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extend returns a new expiry, but the lease expires as before."""
    extend = layer.extend

    def no_extend(tx: Transaction, queue: QueueKey, proof: MessageLease, *, by_ms: int) -> StoredMessage:
        message = extend(tx, queue, proof, by_ms=1)
        message.due_ms = max(message.due_ms, tx.now_ms + by_ms)
        return message

    monkeypatch.setattr(layer, "extend", no_extend)


def bodies_are_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(queue_tx: QueueTransaction, message: StoredMessage, *, keep_failures: bool = False) -> None:
        del keep_failures
        enqueue.clear_ttl(queue_tx.tx, queue_tx.keys, message)
        sidecars.remove(queue_tx.tx, queue_tx.queue, message)
        groups.advance_group(queue_tx, message)

    monkeypatch.setattr(dead_letters, "remove", remove)


def the_counters_ignore_expired_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    end_lease = expiry._end_lease

    def careless(queue_tx: QueueTransaction, held: message_leases.HeldLease) -> int:
        leased = queue_tx.counters.leased
        count = end_lease(queue_tx, held)
        queue_tx.counters.leased = leased
        return count

    monkeypatch.setattr(expiry, "_end_lease", careless)


def settled_messages_stay_in_their_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged message expires with the rest of its lease."""
    monkeypatch.setattr(message_leases.HeldLease, "remaining", lambda self: list(range(self.record.count)))


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (every_lease_expires_at_once, "had two owners|too soon"),
    (no_lease_ever_expires, "does not drain"),
    (acks_need_no_fence, "ack with fence|delivered again after its ack|acknowledged and is lost"),
    (nothing_needs_a_fence, "was accepted after|delivered again|two owners|fence .* was accepted for"),
    (puts_are_acknowledged_before_they_are_durable, "acknowledged and is lost"),
    (the_fence_floor_is_not_raised, "granted twice|had returned before the call"),
    (deliveries_do_not_wait_for_puts, "delivered and is lost|messages have no put|was accepted after|out of order"),
    (ready_messages_are_not_exposed, "delivered and is lost|messages have no put|was accepted after|out of order"),
    (what_a_delivery_found_due_may_be_lost, "was accepted after|out of order|in flight|delivered again after its ack"),
    (the_front_is_not_lowered, "does not drain"),
    (prefetched_messages_are_never_invalidated, "of lower priority|does not drain"),
    (the_lowest_priority_comes_first, "of lower priority"),
    (fences_do_not_increase, "granted twice"),
    (redriven_fences_restart, "redriven with the old fence"),
    (a_crash_does_not_count_as_a_failure, "times before and has"),
    (every_message_is_a_group_head, "in flight|out of order"),
    (a_nack_advances_the_group, "in flight|out of order|counter is"),
    (a_group_never_advances, "does not drain"),
    (idempotency_keys_are_ignored, "was put once"),
    (delays_are_ignored, "too soon"),
    (extensions_have_no_effect, "had two owners"),
    (bodies_are_not_removed, "keys left"),
    (the_counters_ignore_expired_leases, "its counter is"),
    (settled_messages_stay_in_their_lease, "delivered again after its ack|counter is|two states"),
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
    """Acknowledges every fortieth commit without storing it."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 40 == 39:
            self._commits += 1
        else:
            super()._commit(tx)


class HalfCommits(MemoryDatabase):
    """Stores only the first write of every thirtieth commit."""

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
