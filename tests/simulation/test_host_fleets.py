"""Several hosts with faults do everything once, and broken ones are found."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from fastness.hosts.host import AsyncHost
from fastness.hosts.hosted_world import HostedWorld
from fastness.hosts.workflows.records import Record
from fastness.hosts.workflows.runner import WorkflowRunner
from fastness.kv import Transaction
from fastness.layers import effect_leases, effects, hosting, journals, turns
from fastness.layers.hosting import Hosting
from fastness.layers.worlds import World
from fastness.testing.histories import Violation
from fastness.testing.hosts.fleets import FleetRates, main, play_fleet
from fastness.wire import run_records
from fastness.wire.atomic import CommitAtomic
from fastness.wire.hosting import ClaimedWorld, GivenBack, TurnCommitted
from tests.support.depth import Depth

SEEDS_TO_FIND = 40  # An ordinary run would miss a fault that needs more seeds.


def test_hosts_that_pause_crash_and_lose_claims_do_everything_once(depth: Depth, first_seed: int) -> None:
    faults: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + depth.fleet_seeds):
        faults.update(play_fleet(seed).faults)
    assert set(faults) == {"kill", "pause", "refused", "lost", "deploy", "late", "repeated"}


@pytest.mark.nightly
def test_ten_thousand_seeds_find_no_violation() -> None:
    for seed in range(1_000, 11_000):
        play_fleet(seed, FleetRates(kill=0.02, pause=0.06) if seed % 2 else None)


def test_a_seed_gives_the_same_run_again() -> None:
    assert play_fleet(17).events == play_fleet(17).events


def test_the_command_runs_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "before commit: hosting.commit of account-0" in shown
    assert shown.endswith("no violation\n")


def fences_of_turns_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    def trusting(tx: Transaction, world: World, *, owner: str, fence: int) -> Hosting:
        found = hosting.find(tx, world)
        assert found is not None
        return found

    patch.setattr(hosting, "require_claim", trusting)


def fences_of_effects_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(effect_leases, "_held", lambda tx, universe, key, fence: effects.find(tx, universe, key))


def starts_of_steps_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def history(runner: WorkflowRunner) -> list[Record]:
        known = [] if runner._state is None else runner._state["history"]
        return [record for record in known if record[0] != run_records.STARTED]

    patch.setattr(WorkflowRunner, "_history", property(history))


def sends_are_committed_by_themselves(patch: pytest.MonkeyPatch) -> None:
    commit = HostedWorld.commit

    async def twice(world: HostedWorld, *, operations: Sequence[Any] = (), **turn: Any) -> TurnCommitted:
        committed = await commit(world, **turn)
        if operations:
            await world.transport.call(CommitAtomic(list(operations)))
        return committed

    patch.setattr(HostedWorld, "commit", twice)


def worlds_that_are_being_given_back_are_taken_again(patch: pytest.MonkeyPatch) -> None:
    accept = AsyncHost._accept

    def take_again(host: AsyncHost, claim: ClaimedWorld) -> None:
        accept(host, claim if claim.world in host._held else msgspec.structs.replace(claim, is_new=True))

    patch.setattr(AsyncHost, "_accept", take_again)


def releases_are_compared_with_the_fence_only(patch: pytest.MonkeyPatch) -> None:
    release = turns.release

    def trusting(tx: Transaction, world: World, given: GivenBack, *, owner: str) -> bool:
        return release(tx, world, msgspec.structs.replace(given, head=journals.head(tx, world)), owner=owner)

    worlds_that_are_being_given_back_are_taken_again(patch)
    patch.setattr(turns, "release", trusting)


def test_the_plane_alone_keeps_late_releases_from_ending_work(monkeypatch: pytest.MonkeyPatch, depth: Depth) -> None:
    worlds_that_are_being_given_back_are_taken_again(monkeypatch)
    for seed in range(depth.fleet_seeds):
        play_fleet(seed)


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (fences_of_turns_are_not_checked, "has committed hosting.commit of .* with an old fence"),
        (fences_of_effects_are_not_checked, "has committed effects.* with an old fence|EffectNotFound"),
        (sends_are_committed_by_themselves, "should have|have not done everything"),
        (starts_of_steps_are_forgotten, "'look up' and 'look up again' were given the id"),
        (releases_are_compared_with_the_fence_only, "runs had to be revived"),
    ],
)
def test_a_broken_host_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation, match=found):
        for seed in range(SEEDS_TO_FIND):
            play_fleet(seed)
