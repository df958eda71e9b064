"""The simulator finds no violations in the life of jobs, and finds every deliberately broken part."""

from collections.abc import Callable
from typing import Any

import pytest

from fastness.layers.queues import by_id, expiry, key_flow, leasing, outcomes, unique_keys
from fastness.layers.queues.counters import QueueTransaction
from fastness.layers.queues.message_leases import HeldLease
from fastness.testing.histories import Outcome, Violation
from fastness.testing.job_scenarios import jobs
from fastness.testing.scenarios import play
from fastness.testing.simulation import Rates
from fastness.wire.queues import NewResult
from fastness.wire.stored_messages import StoredMessage
from tests.support.depth import Depth

SEEDS_TO_FIND = 40  # An ordinary run would miss a fault that needs more seeds.


def test_small_batches_find_no_violation(monkeypatch: pytest.MonkeyPatch, depth: Depth, first_seed: int) -> None:
    monkeypatch.setattr(leasing, "PREFETCH_MAX", 2)
    monkeypatch.setattr(expiry, "DUE_BATCH_MAX", 1)
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(jobs, seed)


def test_frequent_faults_find_no_violation(depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(jobs, seed, rates=Rates(refused=0.15, lost=0.2, late=0.5, crash=0.02, power=0.02))


@pytest.mark.nightly
def test_five_thousand_seeds_with_frequent_power_losses_find_no_violation() -> None:
    for seed in range(5_000):
        play(jobs, seed, rates=Rates(power=0.02))


def test_the_scenario_covers_every_kind_and_outcome() -> None:
    operations = [each for seed in range(10) for each in play(jobs, seed).history.operations]
    found = {(each.kind, each.outcome) for each in operations}
    kinds = ("put", "lease", "ack", "nack", "reject", "cancel", "update", "pause", "result")
    assert {(kind, Outcome.OK) for kind in kinds} <= found
    results = {each.result for each in operations if each.kind == "result" and each.outcome is Outcome.OK}
    assert {"dead", "cancelled", None} < results
    assert any(each.result[1] for each in operations if each.kind == "put" and each.outcome is Outcome.OK)


def keys_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_flow, "_wait_ms", lambda policy, state, now_ms: 0)


def a_settled_message_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_flow, "release", lambda queue_tx, message: None)


def a_key_that_waits_for_its_rate_has_no_due_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_flow, "_set_due", lambda queue_tx, key, state, due_ms: None)


def a_unique_key_is_free_once_its_message_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(queue_tx: QueueTransaction, message: StoredMessage, job: Any) -> None:
        if job.unique_key is not None:
            unique_keys._free(queue_tx, job.unique_key, message.id)

    monkeypatch.setattr(unique_keys, "release_leased", free)


def a_unique_key_is_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_keys, "release", lambda queue_tx, message: None)


def a_cancelled_job_stays_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(queue_tx: QueueTransaction, held: HeldLease, position: int) -> StoredMessage:
        return held.message(position)

    monkeypatch.setattr(by_id, "_revoke", keep)


def a_result_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    record = outcomes.record

    def forgetful(queue_tx: QueueTransaction, message: StoredMessage, state: Any, **options: Any) -> None:
        if state != "done" or message.attempts % 2:
            record(queue_tx, message, state, **options)

    monkeypatch.setattr(outcomes, "record", forgetful)


def a_result_is_that_of_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    record = outcomes.record

    def wrong(queue_tx: QueueTransaction, message: StoredMessage, state: Any, **options: Any) -> None:
        if options.get("result") is not None:
            options["result"] = NewResult(b"another")
        record(queue_tx, message, state, **options)

    monkeypatch.setattr(outcomes, "record", wrong)


@pytest.mark.parametrize(
    "break_it",
    [
        keys_have_no_limit,
        a_settled_message_keeps_its_slot,
        a_key_that_waits_for_its_rate_has_no_due_entry,
        a_unique_key_is_free_once_its_message_is_leased,
        a_unique_key_is_never_free,
        a_cancelled_job_stays_leased,
        a_result_is_not_kept,
        a_result_is_that_of_another_attempt,
    ],
)
def test_a_broken_job_is_found(break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(SEEDS_TO_FIND):
            play(jobs, seed)
