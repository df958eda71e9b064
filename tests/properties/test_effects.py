"""Random histories of effects and timers match a plain Python model, on every backend."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import CommitUnknown, EffectNotFound, FastnessError, FencingMismatch
from fastness.kv import Database, Pair, Subspace, Transaction, fence_floor
from fastness.layers import effect_leases, effects, inboxes, snapshots, timer_firing, timers, worlds
from fastness.layers.effects import EffectKey
from fastness.layers.worlds import World, WorldState
from fastness.limits import EFFECT_ARCHIVED_SECONDS
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, FaultyDatabase
from fastness.wire.inboxes import DomainEvent, Effect, EffectReceipt, InboxItem, Timer, TimerFired
from tests.support.restores import START_MS, back_up, restore

NAMES = ("a", "b")
KINDS = ("mail", "call")
ANSWER = 2  # transact: begin, transact: commit, transact: answer
MS = 1_000_000

names = st.sampled_from(NAMES)
kinds = st.sampled_from(KINDS)
owners = st.sampled_from(("ada", "bob"))
picks = st.integers(0, 9)  # A claim, counted from the newest.
hashes = st.sampled_from((b"t", b"u", b"\xff"))
delays = st.sampled_from((0, 1, 500, 60_000))


class Asked(NamedTuple):
    """An effect in the model."""

    kind: str
    intent_hash: bytes
    max_attempts: int
    due_ms: int
    attempts: int = 0
    fence: int = 0
    owner: str | None = None
    error: str | None = None


class Claim(NamedTuple):
    key: EffectKey
    fence: int


class Model:
    """What a restore brings back."""

    def __init__(self) -> None:
        self.asked: dict[EffectKey, Asked] = {}
        self.timers: dict[tuple[str, bytes], int] = {}  # The time of each.
        self.received: dict[str, list[InboxItem]] = {name: [] for name in NAMES}
        self.incarnations = dict.fromkeys(NAMES, 1)
        self.fences_from = dict.fromkeys(NAMES, 0)  # The highest fence of earlier incarnations,
        self.last_fences = dict.fromkeys(NAMES, 0)  # and of all.


class Effects(RuleBasedStateMachine):
    """Two worlds that ask for effects and timers, are paused, archived, deleted, created again and restored."""

    openers: Iterator[Callable[..., Database]]
    universes: Iterator[int]

    @initialize()
    def start(self) -> None:
        self.clock = ManualClock(START_MS)
        self.database = next(self.openers)(clock=self.clock)
        self.universe = str(next(self.universes))
        self.model = Model()
        self.claims: list[Claim] = []
        self.issued: dict[EffectKey, int] = {}  # The last fence of each, also of deleted worlds and before a restore.
        for name in NAMES:
            self.database.transact(snapshots.create_world, self.world(name))
        self.floor = self.database.transact(fence_floor.load)
        self.backup: tuple[list[Pair], Model] = back_up(self.database, self.universe), deepcopy(self.model)

    # What worlds ask for.

    @rule(name=names, kind=kinds, max_attempts=st.integers(1, 3), number=st.integers(1, 3))
    def a_world_asks_for_effects(self, name: str, kind: str, max_attempts: int, number: int) -> None:
        asked = tuple(Effect(kind, b"%d" % each, b"{}", max_attempts) for each in range(number))
        height = self.ask(name, DomainEvent(schema="s", effects=asked))
        if height is not None:
            for place, effect in enumerate(asked):
                key = EffectKey(name, height, place)
                self.model.asked[key] = Asked(kind, effect.intent_hash, max_attempts, self.clock.now_ms())

    @rule(name=names, intent_hash=hashes, delay_ms=delays)
    def a_world_sets_a_timer(self, name: str, intent_hash: bytes, delay_ms: int) -> None:
        at_ms = self.clock.now_ms() + delay_ms
        if self.ask(name, DomainEvent(schema="s", timers=(Timer(at_ms * MS, intent_hash, b"p"),))) is not None:
            self.model.timers[name, intent_hash] = at_ms

    @rule(name=names, intent_hash=hashes)
    def a_timer_is_cancelled(self, name: str, intent_hash: bytes) -> None:
        found = self.database.transact(timers.cancel, self.world(name), intent_hash)
        assert found == (self.model.timers.pop((name, intent_hash), None) is not None)

    # Carrying effects out.

    @rule(chosen=st.lists(kinds, min_size=1, unique=True), owner=owners, limit=st.integers(1, 4), lease_ms=delays)
    def effects_are_claimed(self, chosen: list[str], owner: str, limit: int, lease_ms: int) -> None:
        now_ms = self.clock.now_ms()
        due = self.database.read(effects.due, self.universe, chosen, until_ms=now_ms, limit=limit)
        wanted = sorted(
            (asked.due_ms, asked.kind, key)
            for key, asked in self.model.asked.items()
            if asked.due_ms <= now_ms and asked.kind in chosen
        )
        assert [tuple(each) for each in due] == wanted[:limit]
        claimed = self.database.transact(effect_leases.claim, self.universe, due, owner=owner, lease_ms=lease_ms + 1)
        for info in claimed:
            key = EffectKey(info.world, info.height, info.number)
            self.claims.append(Claim(key, info.fence))
            assert info.fence > self.issued.get(key, 0)
            self.issued[key] = info.fence
        expected = [entry.effect for entry in due if self.claim_in_model(entry.effect, owner, lease_ms + 1)]
        assert [EffectKey(each.world, each.height, each.number) for each in claimed] == expected

    @precondition(lambda self: self.claims)
    @rule(pick=picks, is_lost=st.booleans())
    def an_effect_is_completed(self, pick: int, is_lost: bool) -> None:
        claim = self.pick(pick)
        database = self.database
        if is_lost:
            database = FaultyDatabase(database, ChosenFault(ANSWER, partial(CommitUnknown, "on purpose")))
        call = partial(database.transact, effect_leases.complete, self.universe, *claim, payload=b"done")
        if self.is_refused(claim, call):
            return
        try:
            call()
            assert not is_lost
        except CommitUnknown:
            with pytest.raises(EffectNotFound):  # A caller that repeats it learns that it is complete.
                self.database.transact(effect_leases.complete, self.universe, *claim, payload=b"done")
        self.receipt(claim.key, payload=b"done")

    @precondition(lambda self: self.claims)
    @rule(pick=picks, delay_ms=st.one_of(st.none(), delays), is_final=st.booleans())
    def an_attempt_fails(self, pick: int, delay_ms: int | None, is_final: bool) -> None:
        claim = self.pick(pick)
        call = partial(
            self.database.transact,
            effect_leases.fail,
            self.universe,
            *claim,
            error="no",
            delay_ms=delay_ms,
            is_final=is_final,
        )
        if self.is_refused(claim, call):
            return
        asked, found = self.model.asked[claim.key], call()
        assert found.is_dead == (is_final or asked.attempts == asked.max_attempts)
        if found.is_dead:
            self.receipt(claim.key, error="no")
        else:
            delay_ms = 1_000 * 2 ** (asked.attempts - 1) if delay_ms is None else delay_ms
            assert found.due_ms == self.clock.now_ms() + delay_ms
            self.model.asked[claim.key] = asked._replace(owner=None, error="no", due_ms=found.due_ms)

    @precondition(lambda self: self.claims)
    @rule(pick=picks, lease_ms=delays)
    def a_lease_is_extended(self, pick: int, lease_ms: int) -> None:
        claim = self.pick(pick)
        call = partial(self.database.transact, effect_leases.extend, self.universe, *claim, lease_ms=lease_ms)
        if not self.is_refused(claim, call):
            call()
            asked = self.model.asked[claim.key]
            due_ms = max(asked.due_ms, self.clock.now_ms() + lease_ms)
            self.model.asked[claim.key] = asked._replace(due_ms=due_ms)

    # Time.

    @rule(by_ms=st.sampled_from((1, 500, 2_000, 60_000, EFFECT_ARCHIVED_SECONDS * 1_000)))
    def time_passes(self, by_ms: int) -> None:
        self.clock.advance_ms(by_ms)

    @rule(limit=st.integers(1, 3), is_repeated=st.booleans())
    def timers_fire(self, limit: int, is_repeated: bool) -> None:
        now_ms = self.clock.now_ms()
        due = self.database.read(timers.due, self.universe, until_ns=now_ms * MS, limit=limit)
        wanted = sorted((at_ms, *key[::-1]) for key, at_ms in self.model.timers.items() if at_ms <= now_ms)
        assert [(each.deliver_at_ns // MS, each.intent_hash, each.world) for each in due] == wanted[:limit]
        assert self.database.transact(timer_firing.fire, self.universe, due) == len(due)
        if is_repeated:  # Another node found the same ones due.
            assert self.database.transact(timer_firing.fire, self.universe, due) == 0
        for _, intent_hash, name in wanted[:limit]:
            del self.model.timers[name, intent_hash]
            timer_id = "ff" if intent_hash == b"\xff" else intent_hash.decode()
            self.model.received[name].append(TimerFired(timer_id=timer_id, payload=b"p"))

    # The life of worlds.

    @rule(name=names, state=st.sampled_from((WorldState.ACTIVE, WorldState.PAUSED, WorldState.ARCHIVED)))
    def a_world_changes_its_state(self, name: str, state: WorldState) -> None:
        try:
            self.database.transact(worlds.change_state, self.world(name), state)
        except FastnessError:
            assert self.state(name) is WorldState.ARCHIVED

    @rule(name=names, batch=st.integers(1, 3))
    def a_world_is_deleted_and_created_again(self, name: str, batch: int) -> None:
        world, incarnation = self.world(name), self.model.incarnations[name]
        self.database.transact(worlds.change_state, world, WorldState.ARCHIVED)
        self.database.transact(worlds.begin_delete, world)
        for clear in (effects.clear, timers.clear, worlds.clear):
            while not self.database.transact(clear, world, incarnation, batch):
                pass
        self.database.transact(worlds.end_delete, world, incarnation)
        self.database.transact(snapshots.create_world, world)
        self.model.incarnations[name] += 1
        self.model.fences_from[name] = self.model.last_fences[name]
        self.model.received[name].clear()
        self.model.asked = {key: asked for key, asked in self.model.asked.items() if key.world != name}
        self.model.timers = {key: at_ms for key, at_ms in self.model.timers.items() if key[0] != name}

    # Restores.

    @rule()
    def a_backup_is_made(self) -> None:
        self.backup = back_up(self.database, self.universe), deepcopy(self.model)

    @rule(seldom=st.integers(0, 2))
    def the_backup_is_restored(self, seldom: int) -> None:
        """Adapters keep the claims that they got since."""
        if not seldom:
            pairs, model = self.backup
            restore(self.database, self.universe, pairs, self.clock)
            self.model = deepcopy(model)
            self.floor = self.database.transact(fence_floor.load)

    # What must hold.

    @invariant()
    def the_lists_are_those_of_the_model(self) -> None:
        found = self.database.read(effects.page, self.universe, None, after="", limit=1_000).effects
        shown = {
            EffectKey(each.world, each.height, each.number): (each.state, each.due_ms, each.attempts, each.fence)
            for each in found
        }
        assert shown == {
            key: ("pending" if each.owner is None else "inflight", each.due_ms, each.attempts, each.fence)
            for key, each in self.model.asked.items()
        }
        listed = self.database.read(timers.page, self.universe, None, after="", limit=1_000).timers
        wanted = [
            (name, "ff" if intent_hash == b"\xff" else intent_hash.decode(), at_ms)
            for (name, intent_hash), at_ms in self.model.timers.items()
        ]
        assert sorted((each.world, each.timer_id, each.deliver_at_ms) for each in listed) == sorted(wanted)

    @invariant()
    def the_indexes_have_nothing_else(self) -> None:
        def count_keys(tx: Transaction) -> tuple[int, int]:
            due = len(tx.scan(*Subspace("u", self.universe, "effects", "due").range(), limit=1_000))
            own = [len(tx.scan(*worlds.subspace(self.world(name)).range("timer"), limit=1_000)) for name in NAMES]
            return due, sum(own)

        assert self.database.read(count_keys) == (len(self.model.asked), len(self.model.timers))

    @invariant()
    def each_effect_and_timer_has_reached_its_inbox_once(self) -> None:
        for name in NAMES:
            items = self.database.read(inboxes.read, self.world(name), after=None, limit=1_000)
            got = [item for _, item in items if isinstance(item, EffectReceipt | TimerFired)]
            assert got == self.model.received[name]

    @invariant()
    def a_snapshot_waits_for_unfinished_effects(self) -> None:
        for name in NAMES:
            lowest = min((key.height for key in self.model.asked if key.world == name), default=None)
            for below in (0, 1, 2, 5, 100):
                found = self.database.read(effects.has_unfinished, self.world(name), below)
                assert found == (lowest is not None and lowest < below)

    # The model.

    def world(self, name: str) -> World:
        return World(self.universe, name)

    def state(self, name: str) -> WorldState:
        return self.database.read(worlds.describe, self.world(name)).state

    def ask(self, name: str, item: DomainEvent) -> int | None:
        """Drain an item into the journal of an active world; its height."""
        if self.state(name) is not WorldState.ACTIVE:
            return None

        def work(tx: Transaction) -> int:
            inboxes.enqueue(tx, self.world(name), item)
            return inboxes.drain(tx, self.world(name))[-1]

        return self.database.transact(work)

    def claim_in_model(self, key: EffectKey, owner: str, lease_ms: int) -> bool:
        asked, now_ms = self.model.asked[key], self.clock.now_ms()
        if self.state(key.world) is WorldState.ARCHIVED:
            self.model.asked[key] = asked._replace(due_ms=now_ms + EFFECT_ARCHIVED_SECONDS * 1_000)
            return False
        if asked.attempts == asked.max_attempts:
            self.receipt(key, error=f"Attempt {asked.attempts} of {asked.owner} did not end in time")
            return False
        fence = max(asked.fence, self.model.fences_from[key.world], self.floor) + 1
        self.model.last_fences[key.world] = max(self.model.last_fences[key.world], fence)
        self.model.asked[key] = asked._replace(
            attempts=asked.attempts + 1, fence=fence, owner=owner, due_ms=now_ms + lease_ms
        )
        return True

    def pick(self, pick: int) -> Claim:
        return self.claims[-1 - min(pick // 2, len(self.claims) - 1)]

    def is_refused(self, claim: Claim, call: Callable[[], object]) -> bool:
        """Whether a claim has been lost. If so, checks that the call is refused."""
        asked = self.model.asked.get(claim.key)
        if asked is not None and asked.owner is not None and asked.fence == claim.fence:
            return False
        with pytest.raises(EffectNotFound if asked is None else FencingMismatch):
            call()
        return True

    def receipt(self, key: EffectKey, *, payload: bytes = b"", error: str | None = None) -> None:
        asked = self.model.asked.pop(key)
        item = EffectReceipt(
            intent_hash=asked.intent_hash,
            effect_kind=asked.kind,
            adapter_id="",
            signature=b"",
            payload=payload,
            error=error,
        )
        self.model.received[key.world].append(item)

    def teardown(self) -> None:
        self.database.close()


@pytest.mark.examples(60)
def test_effects_in_memory_match_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Effects, steps=40, openers=repeat(MemoryDatabase), universes=count())


@pytest.mark.examples(8)
def test_effects_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Effects, steps=40, openers=fresh, universes=count())


@pytest.mark.examples(5)
def test_effects_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Effects, steps=40, openers=repeat(open_postgres), universes=count())
