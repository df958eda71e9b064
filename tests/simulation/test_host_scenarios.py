"""The simulator finds no violations of hosts, and finds every deliberately broken part."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from fastness.kv import Transaction
from fastness.layers import hosting, inboxes, journals, turns
from fastness.layers.hosting import Hosting
from fastness.layers.worlds import World
from fastness.testing.histories import Outcome, Violation
from fastness.testing.host_scenarios import hosts, releases
from fastness.testing.scenarios import play
from fastness.testing.simulation import Rates
from fastness.wire.hosting import GivenBack
from tests.support.depth import Depth

SEEDS_TO_FIND = 40  # An ordinary run would miss a fault that needs more seeds.


def test_frequent_faults_find_no_violation(depth: Depth, first_seed: int) -> None:
    """`test_simulation` plays the usual faults, also with 10,000 seeds."""
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(hosts, seed, rates=Rates(refused=0.15, lost=0.2, late=0.5, crash=0.02, power=0.02))


def test_the_scenario_covers_every_kind_and_outcome() -> None:
    operations = [each for seed in range(10) for each in play(hosts, seed).history.operations]
    found = {(each.kind, each.outcome) for each in operations}
    kinds = ("put", "claim", "restore", "turn", "fail", "renew", "release", "pause", "resume", "program")
    assert {(kind, Outcome.OK) for kind in kinds} <= found
    assert {("turn", Outcome.FAILED), ("turn", Outcome.UNKNOWN), ("fail", Outcome.FAILED)} <= found
    assert any(each.result is False for each in operations if each.kind == "renew")


def test_what_gives_a_world_back_arrives_late_and_twice() -> None:
    operations = [each for seed in range(10) for each in play(releases, seed).history.operations]
    late = [each for each in operations if each.kind == "late release"]
    assert {True, False} <= {each.result for each in late}  # Of claims that have not ended, and of others.
    assert max(Counter((each.key, each.argument) for each in late).values()) > 1
    claims = [each.result for each in operations if each.kind == "claim" and each.outcome is Outcome.OK]
    fences = Counter((claim.world, claim.fence) for found in claims for claim in found)
    assert max(fences.values()) > 1, "no host has taken a world again that it was giving back"


def turns_do_not_need_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(tx: Transaction, world: World, *, owner: str, fence: int) -> Hosting:
        return hosting.find(tx, world) or Hosting("p")

    monkeypatch.setattr(hosting, "require_claim", accept)


def a_claim_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hosting, "is_held_at", lambda self, now_ms: self.owner is not None)


def a_claimed_world_stays_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    write = hosting.write

    def unmoved(tx: Transaction, world: World, before: Hosting | None, after: Hosting) -> None:
        if before is not None and before.owner is None and after.owner is not None:
            after = msgspec.structs.replace(after, ready_ms=before.ready_ms)
        write(tx, world, before, after)

    monkeypatch.setattr(hosting, "write", unmoved)


def a_held_world_is_not_in_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    write = hosting.write

    def forgetful(tx: Transaction, world: World, before: Hosting | None, after: Hosting) -> None:
        write(tx, world, before, after if after.owner is None else msgspec.structs.replace(after, ready_ms=None))

    monkeypatch.setattr(hosting, "write", forgetful)


def a_wake_up_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    note_work = hosting.note_work

    def silent(tx: Transaction, world: World) -> None:
        record = hosting.find(tx, world)
        if record is not None and record.owner is None:
            note_work(tx, world)

    monkeypatch.setattr(hosting, "note_work", silent)


def an_item_does_not_make_its_world_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    note_work = hosting.note_work

    def silent(tx: Transaction, world: World) -> None:
        if inboxes.next_sequence(tx, world) % 2:
            note_work(tx, world)

    monkeypatch.setattr(hosting, "note_work", silent)


def a_world_is_given_back_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "has_undrained", lambda tx, world: False)


def the_cursor_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "set_cursor", lambda tx, world, last: None)


def a_resumed_world_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    note_state = turns.note_state

    def only_ends(tx: Transaction, world: World) -> None:
        if not turns._is_active(tx, world):
            note_state(tx, world)

    monkeypatch.setattr(turns, "note_state", only_ends)


def a_release_is_compared_with_the_fence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    release = turns.release

    def trusting(tx: Transaction, world: World, given: GivenBack, *, owner: str) -> bool:
        return release(tx, world, msgspec.structs.replace(given, head=journals.head(tx, world)), owner=owner)

    monkeypatch.setattr(turns, "release", trusting)


@pytest.mark.parametrize(
    "break_it",
    [
        turns_do_not_need_a_claim,
        a_claim_does_not_end,
        a_claimed_world_stays_ready,
        a_held_world_is_not_in_the_index,
        a_wake_up_is_lost,
        an_item_does_not_make_its_world_ready,
        a_world_is_given_back_as_idle,
        the_cursor_does_not_move,
        a_resumed_world_is_forgotten,
    ],
)
def test_a_broken_host_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(SEEDS_TO_FIND):
            play(hosts, seed)


def test_a_release_that_is_compared_with_the_fence_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    a_release_is_compared_with_the_fence_only(monkeypatch)
    with pytest.raises(Violation, match="a has work, and is neither held nor ready"):
        for seed in range(SEEDS_TO_FIND):
            play(releases, seed)
