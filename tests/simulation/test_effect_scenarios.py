"""The simulator finds no violations in the life of effects and timers, and finds every deliberately broken part."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fastness.kv import Transaction
from fastness.layers import effect_leases, effects, timer_firing, timers, worlds
from fastness.layers.effects import EffectKey
from fastness.layers.worlds import World, WorldState
from fastness.testing.effect_scenarios import effects as scenario
from fastness.testing.histories import Outcome, Violation
from fastness.testing.scenarios import play
from fastness.testing.simulation import Rates
from fastness.wire.effects import EffectInfo
from tests.support.depth import Depth

SEEDS_TO_FIND = 40  # An ordinary run would miss a fault that needs more seeds.


def test_frequent_faults_find_no_violation(depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(scenario, seed, rates=Rates(refused=0.15, lost=0.2, late=0.5, crash=0.02, power=0.02))


@pytest.mark.nightly
def test_ten_thousand_seeds_find_no_violation() -> None:
    for seed in range(10_000):
        play(scenario, seed)


def test_the_scenario_covers_every_kind_and_outcome() -> None:
    operations = [each for seed in range(10) for each in play(scenario, seed).history.operations]
    found = {(each.kind, each.outcome) for each in operations}
    kinds = ("ask", "look", "claim", "complete", "fail", "extend", "look for timers", "fire", "change")
    assert {(kind, Outcome.OK) for kind in kinds} <= found
    assert {("complete", Outcome.FAILED), ("fail", Outcome.FAILED), ("complete", Outcome.UNKNOWN)} <= found
    assert any(each.result for each in operations if each.kind == "fail" and each.outcome is Outcome.OK)  # Dead.


def a_stale_fence_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = effect_leases._held

    def careless(tx: Transaction, universe: str, key: EffectKey, fence: int) -> EffectInfo:
        record = effects.find(tx, universe, key)
        return held(tx, universe, key, fence if record is None or record.owner is None else record.fence)

    monkeypatch.setattr(effect_leases, "_held", careless)


def fences_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    write = effects.write

    def fixed(tx: Transaction, universe: str, effect: EffectInfo, **options: Any) -> EffectInfo:
        return write(tx, universe, msgspec.structs.replace(effect, fence=min(effect.fence, 1)), **options)

    monkeypatch.setattr(effects, "write", fixed)


def a_completed_effect_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "remove", lambda tx, universe, effect: None)


def a_dead_effect_has_no_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        effect_leases, "_dead", lambda tx, universe, effect, error: effects.remove(tx, universe, effect)
    )


def a_leased_effect_can_be_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = effect_leases.claim

    def greedy(tx: Transaction, universe: str, entries: Any, **options: Any) -> Any:
        now = [
            entry._replace(at_ms=record.due_ms)
            for entry in entries
            if (record := effects.find(tx, universe, entry.effect)) is not None
        ]
        for entry in now:
            record = effects.find(tx, universe, entry.effect)
            assert record is not None
            effects.write(tx, universe, record, due_ms=tx.now_ms)
        return claim(tx, universe, [entry._replace(at_ms=tx.now_ms) for entry in now], **options)

    monkeypatch.setattr(effect_leases, "claim", greedy)


def an_effect_that_failed_is_not_due_again(monkeypatch: pytest.MonkeyPatch) -> None:
    write = effects.write

    def forgetful(tx: Transaction, universe: str, effect: EffectInfo, **options: Any) -> EffectInfo:
        found = write(tx, universe, effect, **options)
        if found.error is not None and found.owner is None:
            tx.delete(effects._due_key(universe, found))
        return found

    monkeypatch.setattr(effects, "write", forgetful)


def a_timer_that_fired_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    take = timers.take

    def keep(tx: Transaction, universe: str, due: timers.DueTimer) -> timers.StoredTimer | None:
        stored = take(tx, universe, due)
        if stored is not None and due.deliver_at_ns // 1_000_000 > tx.now_ms - 500:
            tx.put(timers._due_key(universe, due), timers._encode(stored))
        return stored

    monkeypatch.setattr(timers, "take", keep)


def a_replaced_timer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "cancel", lambda tx, world, intent_hash: False)


def a_timer_of_a_paused_world_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    fire = timer_firing._fire

    def careless(tx: Transaction, universe: str, due: timers.DueTimer) -> bool:
        meta = worlds.find(tx, World(universe, due.world))
        if meta is not None and meta.state is WorldState.PAUSED:
            timers.take(tx, universe, due)
            return False
        return fire(tx, universe, due)

    monkeypatch.setattr(timer_firing, "_fire", careless)


@pytest.mark.parametrize(
    "break_it",
    [
        a_stale_fence_is_accepted,
        fences_do_not_grow,
        a_completed_effect_stays,
        a_dead_effect_has_no_receipt,
        a_leased_effect_can_be_claimed,
        an_effect_that_failed_is_not_due_again,
        a_timer_that_fired_stays,
        a_replaced_timer_stays,
        a_timer_of_a_paused_world_is_lost,
    ],
)
def test_a_broken_part_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(SEEDS_TO_FIND):
            play(scenario, seed)
