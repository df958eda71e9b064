"""The simulator finds no violations in collections, and finds deliberately broken ones."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from fastness.kv import Transaction
from fastness.layers import collections as layer
from fastness.testing.collection_scenarios import collections
from fastness.testing.histories import Outcome, Violation
from fastness.testing.scenarios import play
from fastness.testing.simulation import Rates
from fastness.wire.collections import PutRow, RowChange
from tests.support.depth import Depth

real_commit = layer.commit


def test_frequent_power_losses_find_no_violation(depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(collections, seed, rates=Rates(power=0.05, crash=0.01))


def test_the_scenario_covers_every_kind_and_outcome() -> None:
    seen = {(each.kind, each.outcome) for seed in range(20) for each in play(collections, seed).history.operations}
    assert {(kind, outcome) for kind in ("write", "cas") for outcome in Outcome} <= seen


def ignores_versions(tx: Transaction, universe: str, name: str, changes: Sequence[RowChange]) -> list[int | None]:
    return real_commit(
        tx,
        universe,
        name,
        [msgspec.structs.replace(each, if_version=None) if isinstance(each, PutRow) else each for each in changes],
    )


def commits_a_part(tx: Transaction, universe: str, name: str, changes: Sequence[RowChange]) -> list[int | None]:
    """Leaves out the second partition, now and then."""
    torn = tx.now_ms % 3 == 0
    return real_commit(tx, universe, name, [each for each in changes if not torn or each.partition == "a"])


@pytest.mark.parametrize("broken", [ignores_versions, commits_a_part])
def test_a_broken_commit_is_detected(broken: Callable[..., list[int | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "commit", broken)
    with pytest.raises(Violation):
        for seed in range(20):
            play(collections, seed)
