"""Random histories of hosts match a plain Python model: claims, turns, wake-ups, and everything that ends a claim."""

from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.clock import IdSource
from fastness.errors import (
    FastnessError,
    HeadAdvanced,
    ItemNotFound,
    LeaseConflict,
    LeaseExpired,
    WorldHeld,
    WorldNotActive,
    WorldNotFound,
)
from fastness.kv import Database, Pair, Subspace, Transaction
from fastness.layers import effects, journal_records, journals, timers, turns
from fastness.layers.worlds import World
from fastness.plane.operations import handler_of
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.hosting import HostingStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.testing.clock import ManualClock
from fastness.wire.canonical import canonical
from fastness.wire.hosting import (
    ClaimedWorld,
    ClaimWorlds,
    CommitTurn,
    FailTurn,
    GivenBack,
    HostingInfo,
    RenewedWorld,
    ResumeWorld,
    RetryAside,
    SetProgram,
)
from fastness.wire.inboxes import Control, Effect, Timer
from fastness.wire.requests import Request
from fastness.wire.worlds import ChangeWorld, CreateWorld, DrainInbox, PutItem
from tests.support.restores import START_MS, back_up, restore

NAMES = ("a", "b", "c")
OWNERS = ("h1", "h2")
LEASES_MS = (1_000, 10_000)

names = st.sampled_from(NAMES)
seldom = st.integers(0, 4)
programs = st.sampled_from(("p", "p", "p", "q", None))
picks = st.sampled_from((1, 2, 5, 9, 0, 4, 8))  # A claim, counted from the newest.


@dataclass
class Hosted:
    """A world in the model."""

    state: str = "active"
    program: str | None = None
    items: int = 0  # That ever arrived.
    taken: int = 0
    journal: list[Any] = field(default_factory=list)
    owner: str | None = None
    fence: int = 0
    expires_ms: int = 0
    ready_ms: int | None = None
    attempts: int = 0
    error: str | None = None
    is_stopped: bool = False
    is_woken: bool = False
    aside: dict[int, int] = field(default_factory=dict)  # The number that was in the item, by sequence.
    contents: list[int] = field(default_factory=list)  # The number in each item.
    effects: set[tuple[int, int]] = field(default_factory=set)  # Height and number.
    timers: dict[bytes, int] = field(default_factory=dict)  # When each is due.

    def end_claim(self, ready_ms: int | None) -> None:
        self.owner, self.expires_ms, self.ready_ms, self.is_woken = None, 0, ready_ms, False

    def put(self, content: int, now_ms: int) -> None:
        self.items += 1
        self.contents.append(content)
        if self.program is None or self.is_stopped:
            return
        if self.owner is not None:
            self.is_woken = self.is_woken or now_ms < self.expires_ms
        elif self.ready_ms is None and self.state == "active":
            self.ready_ms = now_ms

    def item_record(self, sequence: int) -> Any:
        return [sequence, self.contents[sequence]]


class Hosts(RuleBasedStateMachine):
    """Three worlds, two hosts with several threads each, and an operator, who also restores older backups."""

    openers: Iterator[Callable[..., Database]]  # Opens the database of one example.
    universes: Iterator[int]  # Examples may share a database, so each has its own universe.
    nodes = 1

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(START_MS)
        opener = next(self.openers)
        self.databases = [opener(clock=self.clock, ids=IdSource(node)) for node in range(self.nodes)]
        self.steps = count()
        self.universe = str(next(self.universes))
        self.worlds: dict[str, Hosted] = {}
        self.claims: list[tuple[str, ClaimedWorld]] = []  # All that were ever returned, with their owners.
        self.fences: dict[str, list[int]] = {name: [] for name in NAMES}  # Also before a restore.
        for name, program in (("a", "p"), ("b", "p"), ("c", "q")):
            self.a_world_is_created(name, program)
        self.backup: tuple[list[Pair], dict[str, Hosted]] = back_up(self.node(), self.universe), deepcopy(self.worlds)

    # Worlds and their items.

    @rule(name=names, program=programs)
    def a_world_is_created(self, name: str, program: str | None) -> None:
        if name not in self.worlds:
            self.run(CreateWorld(name, self.universe, program=program))
            self.worlds[name] = Hosted(program=program)

    @rule(name=names, content=st.integers(0, 5), number=st.integers(1, 3))
    def items_arrive(self, name: str, content: int, number: int) -> None:
        """An item with an odd content asks for an effect."""
        for _ in range(number):
            asked = (Effect("k", b"item"),) if content % 2 else ()
            error = self.unreachable(name)
            request = PutItem(name, Control(command=str(content), effects=asked), self.universe)
            if not self.is_refused(error, request):
                assert self.run(request).sequence == self.worlds[name].items
                self.worlds[name].put(content, self.now_ms)

    @rule(name=names, limit=st.integers(1, 4), rarely=seldom)
    def a_caller_drains(self, name: str, limit: int, rarely: int) -> None:
        if rarely:
            return
        world = self.worlds.get(name)
        error = self.unreachable(name, inactive=("paused", "archived"))
        if world is not None and world.owner is not None and self.now_ms < world.expires_ms:
            error = WorldHeld
        if not self.is_refused(error, DrainInbox(name, limit, self.universe)):
            assert world is not None
            heights = self.run(DrainInbox(name, limit, self.universe)).heights
            last = min(world.taken + limit, world.items)
            assert heights == list(range(len(world.journal), len(world.journal) + last - world.taken))
            self.take(world, last, {})

    @rule(name=names, state=st.sampled_from(("active", "active", "paused", "archived")), rarely=seldom)
    def the_state_changes(self, name: str, state: str, rarely: int) -> None:
        if rarely and state != "active":
            return
        request, world = ChangeWorld(name, state, self.universe), self.worlds.get(name)
        refused = world is not None and (world.state, state) == ("archived", "paused")
        if self.is_refused(WorldNotFound if world is None else WorldNotActive if refused else None, request):
            return
        assert world is not None
        self.run(request)
        world.state = state
        if world.program is not None:
            if state != "active":
                world.end_claim(None)
            elif world.ready_ms is None and not world.is_stopped:
                world.end_claim(self.now_ms)

    @rule(name=names)
    def an_archived_world_is_deleted(self, name: str) -> None:
        world = self.worlds.get(name)
        if world is not None and world.state == "archived":
            database = self.node()
            WorldStore(database, None, BlobStore(database, None)).delete(self.key(name))
            del self.worlds[name]

    @rule(name=names, program=programs, rarely=seldom)
    def the_program_is_set(self, name: str, program: str | None, rarely: int) -> None:
        if rarely:
            return
        request, world = SetProgram(name, program, self.universe), self.worlds.get(name)
        if self.is_refused(WorldNotFound if world is None else None, request):
            return
        assert world is not None
        if world.program != program:
            has_work = world.taken < world.items or bool(world.journal)
            is_run = program is not None and world.state == "active"
            world.end_claim(self.now_ms if is_run and has_work else None)
            world.program, world.attempts, world.error, world.is_stopped = program, 0, None, False
        self.check_info(name, self.run(request))

    @rule(name=names)
    def a_stopped_world_is_resumed(self, name: str) -> None:
        request, world = ResumeWorld(name, self.universe), self.worlds.get(name)
        if self.is_refused(WorldNotFound if world is None else None, request):
            return
        assert world is not None
        if world.is_stopped:
            world.is_stopped, world.attempts, world.error = False, 0, None
            world.ready_ms = self.now_ms if world.state == "active" else None
        self.check_info(name, self.run(request))

    @rule(name=names, sequence=st.integers(0, 6), drop=st.booleans())
    def an_item_is_retried(self, name: str, sequence: int, drop: bool) -> None:
        request, world = RetryAside(name, sequence, drop, self.universe), self.worlds.get(name)
        error: type[FastnessError] | None = WorldNotFound if world is None else None
        if world is not None and sequence not in world.aside:
            error = ItemNotFound
        elif world is not None and world.state == "archived" and not drop:
            error = WorldNotActive
        if not self.is_refused(error, request):
            assert world is not None
            self.run(request)
            content = world.aside.pop(sequence)
            if not drop:
                world.put(content, self.now_ms)

    # Hosts.

    @rule(
        owner=st.sampled_from(OWNERS),
        wanted=st.sampled_from((("p",), ("p", "q"))),
        limit=st.integers(1, 4),
        lease_ms=st.sampled_from(LEASES_MS),
    )
    def a_host_claims(self, owner: str, wanted: tuple[str, ...], limit: int, lease_ms: int) -> None:
        now_ms = self.now_ms
        woken = sorted(name for name, world in self.worlds.items() if world.is_woken and world.owner == owner)[:limit]
        ready = sorted(
            (world.ready_ms, name)
            for name, world in self.worlds.items()
            if world.ready_ms is not None and world.ready_ms <= now_ms and world.program in wanted
        )[: limit - len(woken)]
        found = self.store().claim(ClaimWorlds(list(wanted), owner, limit, lease_ms / 1_000, universe=self.universe))
        expected: list[tuple[str, bool]] = []
        for name in woken:
            world = self.worlds[name]
            world.is_woken = False
            if now_ms < world.expires_ms and world.taken < world.items:
                expected.append((name, False))
        for _, name in ready:
            world = self.worlds[name]
            world.end_claim(now_ms + lease_ms)
            world.owner, world.expires_ms = owner, now_ms + lease_ms
            expected.append((name, True))
        assert [(each.world, each.is_new) for each in found.worlds] == expected
        for each in found.worlds:
            world = self.worlds[each.world]
            if each.is_new:
                world.fence = each.fence
                self.fences[each.world].append(each.fence)
            assert (each.program, each.fence, each.expires_ms) == (world.program, world.fence, world.expires_ms)
            assert (each.head, each.attempts) == (len(world.journal), world.attempts)
            assert each.cursor == (world.taken - 1 if world.taken else None)
            assert [sequence for sequence, _ in each.items] == list(range(world.taken, world.items))
            self.claims.append((owner, each))

    @precondition(lambda self: self.claims)
    @rule(
        pick=picks,
        number=st.sampled_from((1, 2, 3, 0)),
        opening=st.booleans(),
        entries=st.integers(0, 2),
        aside=st.sets(st.integers(0, 2), max_size=1),
        asks=st.booleans(),
        timer=st.sampled_from((None, b"t1", b"t2")),
        cancelled=st.sampled_from((None, b"t1", b"t2")),
        wrong_head=st.sampled_from((False, False, False, True)),
        lease_ms=st.sampled_from(LEASES_MS),
    )
    def a_host_commits_a_turn(
        self,
        *,
        pick: int,
        number: int,
        opening: bool,
        entries: int,
        aside: set[int],
        asks: bool,
        timer: bytes | None,
        cancelled: bytes | None,
        wrong_head: bool,
        lease_ms: int,
    ) -> None:
        owner, claimed = self.claim(pick)
        world, name = self.worlds.get(claimed.world), claimed.world
        found = world or Hosted()
        last = min(found.taken + number, found.items)
        skipped = {found.taken + offset for offset in aside if found.taken + offset < last}
        records = opening + last - found.taken + entries
        due_ns = (self.now_ms + 1_000) * 1_000_000
        request = CommitTurn(
            name,
            owner,
            claimed.fence,
            len(found.journal) + wrong_head,
            last - 1 if last > found.taken else None,
            [canonical({"turn": pick})] * opening,
            [canonical("entry")] * entries,
            [(records - 1, Effect("k", b"turn"))] if asks and records else [],
            [(0, Timer(due_ns, timer))] if timer is not None and records else [],
            [] if cancelled is None else [cancelled],
            [(sequence, f"error {sequence}") for sequence in skipped],
            lease_ms / 1_000,
            self.universe,
        )
        error = self.lost(owner, claimed) or (HeadAdvanced if wrong_head else None)
        if self.is_refused(error, request):
            return
        assert world is not None
        done = self.run(request)
        start = len(world.journal)
        world.journal += [{"turn": pick}] * opening
        counts = self.take(world, last, dict.fromkeys(skipped))
        world.journal += ["entry"] * entries
        if request.effects:
            height = start + records - 1
            world.effects.add((height, counts.get(height, 0)))
        if cancelled is not None:
            world.timers.pop(cancelled, None)
        if request.timers:
            world.timers[request.timers[0][1].intent_hash] = due_ns
        world.attempts, world.error = 0, None
        if world.expires_ms - self.now_ms <= lease_ms // 2:
            world.expires_ms = world.ready_ms = self.now_ms + lease_ms
        has_more = request.take is not None and world.taken < world.items
        assert (done.head, done.expires_ms, done.has_more) == (len(world.journal), world.expires_ms, has_more)

    @precondition(lambda self: self.claims)
    @rule(pick=picks, delay_ms=st.sampled_from((0, 500)), stops=st.booleans(), rarely=seldom)
    def a_turn_fails(self, pick: int, delay_ms: int, stops: bool, rarely: int) -> None:
        if rarely > 2:
            return
        owner, claimed = self.claim(pick)
        request = FailTurn(
            claimed.world, owner, claimed.fence, "failed", delay_ms / 1_000, stops, universe=self.universe
        )
        if not self.is_refused(self.lost(owner, claimed), request):
            self.run(request)
            world = self.worlds[claimed.world]
            world.end_claim(None if stops else self.now_ms + delay_ms)
            world.attempts, world.error, world.is_stopped = world.attempts + 1, "failed", stops

    @precondition(lambda self: self.claims)
    @rule(chosen=st.lists(picks, min_size=1, max_size=3), lease_ms=st.sampled_from(LEASES_MS))
    def a_host_renews(self, chosen: list[int], lease_ms: int) -> None:
        owner = self.claim(chosen[0])[0]
        claims = [self.claim(pick)[1] for pick in chosen]
        expected = []
        for each in claims:
            if self.lost(owner, each) is None:
                world = self.worlds[each.world]
                world.expires_ms = world.ready_ms = max(world.expires_ms, self.now_ms + lease_ms)
                expected.append(RenewedWorld(each.world, each.fence, world.expires_ms))
        pairs = [(self.key(each.world), each.fence) for each in claims]
        assert self.store().renew(pairs, owner=owner, lease_ms=lease_ms).worlds == expected

    @precondition(lambda self: self.claims)
    @rule(pick=picks, has_work=st.booleans(), is_late=st.booleans(), rarely=seldom)
    def a_host_gives_a_world_back(self, pick: int, has_work: bool, is_late: bool, rarely: int) -> None:
        """A request that is late has the head that the claim had."""
        if rarely > 2:
            return
        owner, claimed = self.claim(pick)
        world = self.worlds.get(claimed.world)
        head = len(world.journal) if world is not None and not is_late else claimed.head
        self.store().release(self.universe, [GivenBack(claimed.world, claimed.fence, head, has_work)], owner=owner)
        if world is not None and (world.owner, world.fence) == (owner, claimed.fence):
            is_ready = has_work or world.taken < world.items or head != len(world.journal)
            world.end_claim(self.now_ms if is_ready else None)

    @rule(milliseconds=st.sampled_from((0, 1, 1, 499, 500, 1_000, 5_000, 10_000)))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance_ms(milliseconds)

    # Restores.

    @rule()
    def a_backup_is_made(self) -> None:
        self.backup = back_up(self.node(), self.universe), deepcopy(self.worlds)

    @rule(rarely=seldom)
    def the_backup_is_restored(self, rarely: int) -> None:
        """Hosts keep the claims that they got since."""
        if not rarely:
            pairs, worlds = self.backup
            restore(self.node(), self.universe, pairs, self.clock)
            self.worlds = deepcopy(worlds)

    # Invariants.

    @invariant()
    def stored_data_equals_the_model(self) -> None:
        self.node().read(self.check_stored)

    @invariant()
    def fences_grow(self) -> None:
        for fences in self.fences.values():
            assert all(one < other for one, other in pairwise(fences))

    def check_stored(self, tx: Transaction) -> None:
        hosting = Subspace("u", self.universe, "hosting")
        ready, wakes = [], []
        for name, world in self.worlds.items():
            key = self.key(name)
            self.check_info(name, turns.describe(tx, key))
            decoded = [journal_records.split(record) for _, record in journals.read_hot(tx, key, 0, 1_000)]
            values = [(kind, cbor2.loads(value)) for kind, value in decoded]
            found = [[each["seq"], int(each["command"])] if kind == "ingress" else each for kind, each in values]
            assert found == world.journal
            asides = {each.sequence: int(each.item.command) for each in turns.aside(tx, key, after=None, limit=100)}
            assert asides == world.aside
            pending = effects.page(tx, self.universe, name, after="", limit=1_000).effects
            assert {(each.height, each.number) for each in pending} == world.effects
            due = timers.page(tx, self.universe, name, after="", limit=1_000).timers
            assert {each.timer_id.encode(): each.deliver_at_ms * 1_000_000 for each in due} == world.timers
            if world.ready_ms is not None:
                ready.append((world.program, world.ready_ms, name))
            if world.is_woken:
                wakes.append((world.owner, name))
        for kind, expected in (("ready", ready), ("wake", wakes)):
            index = Subspace("u", self.universe, "hosting", kind)
            assert [index.unpack(key) for key, _ in tx.scan(*index.range(), limit=1_000)] == sorted(expected)
        assert len(tx.scan(*hosting.range(), limit=1_000)) == len(ready) + len(wakes)

    # The model.

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def node(self) -> Database:
        """The nodes take turns."""
        return self.databases[next(self.steps) % self.nodes]

    def store(self) -> HostingStore:
        return HostingStore(self.node(), self.clock, ConsumerOptions(), Counter())

    def run(self, request: Request[Any]) -> Any:
        return self.node().transact(handler_of(request).run, request)  # type: ignore[arg-type]

    def key(self, name: str) -> World:
        return World(self.universe, name)

    def claim(self, pick: int) -> tuple[str, ClaimedWorld]:
        """A claim that was returned at some time; mostly one that is still held."""
        held = [each for each in self.claims if self.lost(*each) is None]
        among = held if held and pick % 4 else self.claims
        return among[-1 - min(pick // 4, len(among) - 1)]

    def is_refused(self, error: type[FastnessError] | None, request: Request[Any]) -> bool:
        """Whether a request must fail; then it does."""
        if error is None:
            return False
        with pytest.raises(error) as refused:
            self.run(request)
        assert type(refused.value) is error
        return True

    def unreachable(self, name: str, inactive: tuple[str, ...] = ("archived",)) -> type[FastnessError] | None:
        world = self.worlds.get(name)
        if world is None:
            return WorldNotFound
        return WorldNotActive if world.state in inactive else None

    def lost(self, owner: str, claimed: ClaimedWorld) -> type[FastnessError] | None:
        """The error of a host that does not hold a world any more."""
        world = self.worlds.get(claimed.world)
        if world is None:
            return WorldNotFound
        if (world.owner, world.fence) != (owner, claimed.fence):
            return WorldNotActive if world.state != "active" else LeaseConflict
        return LeaseExpired if self.now_ms >= world.expires_ms else None

    def take(self, world: Hosted, last: int, skipped: dict[int, None]) -> dict[int, int]:
        """Move items to the journal; how many effects the record at each height asks for by itself."""
        counts: dict[int, int] = {}
        for sequence in range(world.taken, last):
            if sequence in skipped:
                world.journal.append({"aside": sequence})
                world.aside[sequence] = world.contents[sequence]
                continue
            if world.contents[sequence] % 2:
                counts[len(world.journal)] = 1
                world.effects.add((len(world.journal), 0))
            world.journal.append(world.item_record(sequence))
        world.taken = last
        return counts

    def check_info(self, name: str, found: HostingInfo) -> None:
        world = self.worlds[name]
        is_held = world.owner is not None and self.now_ms < world.expires_ms
        assert found == HostingInfo(
            name,
            world.program,
            world.owner if is_held else None,
            world.fence,
            world.expires_ms if is_held else None,
            None if is_held else world.ready_ms,
            world.attempts,
            world.error,
            world.is_stopped,
            len(world.aside),
        )

    def teardown(self) -> None:
        for database in self.databases:
            database.close()


@pytest.mark.examples(120)
def test_hosts_in_memory_match_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Hosts, steps=50, openers=repeat(MemoryDatabase), universes=count())


@pytest.mark.examples(10)
def test_hosts_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (lambda number=number, **options: RocksDatabase(tmp_path / str(number), **options) for number in count())
    run_machine(Hosts, steps=40, openers=fresh, universes=count())


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.examples(6)
def test_hosts_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database], nodes: int
) -> None:
    run_machine(Hosts, steps=30, openers=repeat(open_postgres), universes=count(), nodes=nodes)
