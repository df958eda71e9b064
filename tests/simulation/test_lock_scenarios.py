"""The simulator finds no violations of ordered locks, and finds deliberately broken ones."""

from collections.abc import Callable
from typing import Any

import pytest

from fastness.kv import Transaction
from fastness.layers import lock_records
from fastness.layers import locks as lock_layer
from fastness.layers.lock_transaction import LockTransaction
from fastness.lock_rules import Mode
from fastness.testing.histories import Outcome, Violation
from fastness.testing.lock_scenarios import locks
from fastness.testing.scenarios import play
from fastness.testing.simulation import Rates
from fastness.wire.locks import LockProof
from tests.support.depth import Depth

SEEDS_TO_FIND = 60


def test_frequent_power_losses_find_no_violation(depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(locks, seed, rates=Rates(power=0.05, crash=0.01))


@pytest.mark.nightly
def test_many_seeds_find_no_violation() -> None:
    for seed in range(5_000):
        play(locks, seed)


def test_the_scenario_covers_waits_losses_and_refusals() -> None:
    """A scenario without them proves nothing."""
    operations = [each for seed in range(20) for each in play(locks, seed).history.operations]
    seen = {(each.kind, each.outcome) for each in operations}
    assert {(kind, outcome) for kind in ("acquire", "guarded", "renew") for outcome in Outcome} <= seen
    assert {each.result for each in operations if each.kind == "release"} >= {True, False}


# Broken layers, which the simulator must detect.


def any_fence_passes(patch: pytest.MonkeyPatch) -> None:
    def check(tx: Transaction, proof: LockProof) -> int:
        return proof.fence

    patch.setattr(lock_layer, "check", check)


def rows_ignore_tables(patch: pytest.MonkeyPatch) -> None:
    conflicts = lock_records.LockKeys.conflicts
    intents = (Mode.INTENT_SHARED, Mode.INTENT_EXCLUSIVE)
    patch.setattr(
        lock_records.LockKeys, "conflicts", lambda self, mode: [] if mode in intents else conflicts(self, mode)
    )


def nothing_is_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockTransaction, "serve", lambda self: self._freed.clear())


def fences_start_over(patch: pytest.MonkeyPatch) -> None:
    free = LockTransaction._free

    def forget(self: Any, number: str, taken: lock_records.Taken) -> None:
        free(self, number, taken)
        self.tx.delete(lock_records.LockKeys(self._universe, taken.key).fence)

    patch.setattr(LockTransaction, "_free", forget)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (any_fence_passes, r"two holders|two sessions held it|accepted after|Rows changed"),
        (rows_ignore_tables, r"two holders|Rows changed"),
        (nothing_is_served, r"waits for .* behind nothing"),
        (fences_start_over, r"was granted to two sessions|had returned before"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_broken_layer_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Violation, match=expected) as caught:
        for seed in range(SEEDS_TO_FIND):
            play(locks, seed)
    assert "seed" in caught.value.__notes__[0]
