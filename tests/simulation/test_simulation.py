"""The simulator finds no violations in Fastness, and finds deliberately broken databases."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Transaction
from fastness.testing import scenarios
from fastness.testing.faults import FaultyDatabase
from fastness.testing.histories import Violation, check_all_fences
from fastness.testing.scenarios import SCENARIOS, Check, Scenario, play
from fastness.testing.simulation import Client, Rates, Simulation
from fastness.testing.world_scenarios import worlds
from fastness.tiers import Tier
from tests.support.depth import Depth

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())


@every_scenario
def test_many_seeds_find_no_violation(scenario: Scenario, depth: Depth, first_seed: int) -> None:
    steps = sum(play(scenario, seed).steps for seed in range(first_seed, first_seed + depth.seeds))
    print(f"{steps} steps")


@every_scenario
def test_rocksdb_passes_the_same_scenarios(scenario: Scenario, tmp_path: Path, depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.rocksdb_seeds):
        play(scenario, seed, partial(RocksDatabase, tmp_path / str(seed)))


@pytest.mark.nightly
@every_scenario
def test_ten_thousand_seeds_find_no_violation(scenario: Scenario) -> None:
    for seed in range(1_000, 11_000):
        play(scenario, seed)


@every_scenario
def test_one_seed_gives_one_history_on_any_backend(scenario: Scenario, tmp_path: Path) -> None:
    first = play(scenario, 7).history.digest()
    assert play(scenario, 7).history.digest() == first
    assert play(scenario, 7, partial(RocksDatabase, tmp_path)).history.digest() == first
    assert play(scenario, 8).history.digest() != first


def test_every_kind_of_fault_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[int] = []
    power_loss = FaultyDatabase.power_loss
    monkeypatch.setattr(FaultyDatabase, "power_loss", lambda self: losses.append(power_loss(self)))
    simulations = [play(SCENARIOS["tiers"], seed) for seed in range(15)]
    outcomes = {each.outcome for simulation in simulations for each in simulation.history.operations}
    crashed = any(".1" in each.client for simulation in simulations for each in simulation.history.operations)
    assert {str(outcome) for outcome in outcomes} == {"ok", "failed", "unknown"}
    assert crashed
    assert any(losses)


# Broken databases, which the simulator must detect.


class ForgetsCommits(MemoryDatabase):
    """Acknowledges every fortieth commit without storing it."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 40 == 39:
            self._commits += 1
        else:
            super()._commit(tx)


class CommitsTwice(MemoryDatabase):
    """Runs every thirtieth transaction twice, like a careless retry after a lost answer."""

    def transact(self, work: Callable[..., Any], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Any:
        if self._commits % 30 == 29:
            super().transact(work, *args, tier=tier, **kwargs)
        return super().transact(work, *args, tier=tier, **kwargs)


class ReadsThePast(MemoryDatabase):
    """Lets every twentieth transaction read the state before the last commit, and commit nonetheless."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._real = self._current

    def _commit(self, tx: Transaction) -> None:
        past = self._real.copy()
        self._current = self._real
        super()._commit(tx)
        self._real = self._current
        if self._commits % 20 == 19:
            self._current = past


class HalfCommits(MemoryDatabase):
    """Stores only the first write of every thirtieth commit."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 30 == 29:
            for key in list(tx.writes)[1:]:
                del tx.writes[key]
        super()._commit(tx)


@pytest.mark.parametrize(
    ("broken", "scenario"),
    [
        (ForgetsCommits, scenarios.counters),
        (ForgetsCommits, scenarios.registers),
        (CommitsTwice, scenarios.counters),
        (ReadsThePast, scenarios.registers),
        (ReadsThePast, scenarios.fences),
        (HalfCommits, scenarios.transfers),
        (HalfCommits, worlds),
        (ForgetsCommits, worlds),
        (ReadsThePast, worlds),
    ],
)
def test_a_broken_database_is_found(broken: type[MemoryDatabase], scenario: Scenario) -> None:
    with pytest.raises(Violation) as caught:
        for seed in range(20):
            play(scenario, seed, broken)
    assert "--seed" in caught.value.__notes__[0]


def test_reads_of_unsynced_writes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer never contains data that a power loss could revert."""

    monkeypatch.setattr(FaultyDatabase, "sync_up_to", lambda self, commit: None)
    with pytest.raises(Violation, match="went back after it was read"):
        for seed in range(50):
            play(scenarios.tiers, seed, rates=Rates(power=0.02))


def test_a_fence_returned_before_it_is_durable_is_found() -> None:
    """A fence is durable before it is returned, so none is issued twice."""

    def hasty_fences(simulation: Simulation) -> Check:
        async def run_client(client: Client) -> None:
            for _ in range(10):
                await client.operate("acquire", "x", None, scenarios._acquire, "x", client.name, tier=Tier.IMPORTANT)
                await client.pause(1_500)

        for number in range(4):
            simulation.add(f"client-{number}", run_client)
        return lambda: check_all_fences(simulation.history)

    with pytest.raises(Violation, match="Fence 'x'"):
        for seed in range(50):
            play(hasty_fences, seed, rates=Rates(power=0.05))


def test_the_command_runs_seeds_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenarios.main(["--seeds", "2", "--scenario", "counters"]) == 0
    assert "2 seeds of counters on memory" in capsys.readouterr().out
