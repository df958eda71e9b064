"""Random histories of a lock table match a plain model: holders, waiting order, and refusals.

The owners are asyncio tasks on one event loop with a manual clock, which runs only inside the rules. So every example
is deterministic.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fastness.errors import Busy, LockOrderViolation, LockTimeout
from fastness.runtime.locks.table import Held, LockTable

OWNERS = 6
WAITERS_MAX = 4
LOOP_ITERATIONS = 4  # Iterations of the event loop: enough for every task that can proceed.

Node = tuple[int, str]  # In lock order.
NodeMode = tuple[Node, str]
Path = tuple[str, ...]

COMPATIBLE = {
    ("IS", "IS"), ("IS", "IX"), ("IS", "S"),
    ("IX", "IS"), ("IX", "IX"),
    ("S", "IS"), ("S", "S"),
}  # fmt: skip
COVERS = {"IS": {"IS"}, "IX": {"IX", "IS"}, "S": {"S", "IS"}, "X": {"X", "S", "IX", "IS"}}
INTENTS = {"IS": "IS", "IX": "IX", "S": "IS", "X": "IX"}

# Few names and mostly one at a time, so that owners often conflict and seldom violate the lock order.
paths = st.sampled_from(
    [("database",), ("entity_type", "a"), ("entity_type", "b")]
    + [("record_id", name) for name in ("a/1", "a/2", "b/1")]
)
several = paths.map(lambda path: [path]) | st.lists(paths, min_size=1, max_size=3)
choices = st.integers(0, 99)  # Used modulo the number of choices.
requests = st.tuples(choices, several, st.sampled_from(("S", "X", "IS", "IX")), st.sampled_from((2, 1, 3, 0)))


def nodes_of(requested: Sequence[Path], mode: str) -> list[NodeMode]:
    """The nodes and modes that a request locks, in order."""
    found: dict[Node, str] = {}
    for level, *names in requested:
        name = names[0] if names else ""
        above = {"database": [], "entity_type": [(0, "")], "record_id": [(0, ""), (1, name.split("/")[0])]}[level]
        for node in above:
            found.setdefault(node, INTENTS[mode])
        found[len(above), name] = mode
    return sorted(found.items())


class Claim:
    """One call of acquire_all in the model."""

    def __init__(self, owner: int, wanted: list[NodeMode], deadline: float) -> None:
        self.owner = owner
        self.wanted = wanted
        self.deadline = deadline
        self.taken = 0

    @property
    def is_waiting(self) -> bool:
        return self.taken < len(self.wanted)


class Model:
    """The model: a slow, plain lock table."""

    def __init__(self) -> None:
        self.holds: dict[Node, dict[int, tuple[str, int]]] = {}  # By owner: mode and count.
        self.lines: dict[Node, list[Claim]] = {}
        self.claims: list[Claim] = []  # All claims that are held or waiting.
        self.violations = 0

    def request(self, claim: Claim, timeout_for: float) -> type[Exception] | None:
        """Request `claim`: returns an error, or None if it is granted or waits."""
        mine = {node: held[claim.owner][0] for node, held in self.holds.items() if claim.owner in held}
        for node, mode in claim.wanted:
            against = mode not in COVERS[mine[node]] if node in mine else any(node < other for other in mine)
            if against:
                self.violations += 1
                return LockOrderViolation
        waiting = len(self.waiting)
        self.claims.append(claim)
        self.advance(claim)
        if not claim.is_waiting:
            return None
        if not timeout_for or waiting == WAITERS_MAX:
            self.release_claim(claim)
            return LockTimeout if not timeout_for else Busy
        self.enqueue(claim)
        return None

    def advance(self, claim: Claim, granted_at: Node | None = None) -> None:
        while claim.is_waiting:
            node, mode = claim.wanted[claim.taken]
            held = self.holds.get(node, {})
            if claim.owner in held:
                held[claim.owner] = (held[claim.owner][0], held[claim.owner][1] + 1)
            elif not self.compatible(node, mode) or (self.lines.get(node) and node != granted_at):
                return
            else:
                self.holds.setdefault(node, {})[claim.owner] = (mode, 1)
            claim.taken += 1

    def compatible(self, node: Node, mode: str) -> bool:
        return all((held, mode) in COMPATIBLE for held, _ in self.holds.get(node, {}).values())

    def enqueue(self, claim: Claim) -> None:
        self.lines.setdefault(claim.wanted[claim.taken][0], []).append(claim)

    def release_claim(self, claim: Claim) -> None:
        self.claims.remove(claim)
        for node, line in list(self.lines.items()):
            if claim in line:
                line.remove(claim)
                self.serve(node)
        for node, _ in reversed(claim.wanted[: claim.taken]):
            mode, times = self.holds[node].pop(claim.owner)
            if times > 1:
                self.holds[node][claim.owner] = (mode, times - 1)
            else:
                self.serve(node)

    def serve(self, node: Node) -> None:
        line = self.lines.get(node, [])
        while line and self.compatible(node, line[0].wanted[line[0].taken][1]):
            claim = line.pop(0)
            self.advance(claim, granted_at=node)
            if claim.is_waiting:
                self.enqueue(claim)

    @property
    def waiting(self) -> list[Claim]:
        return [claim for claim in self.claims if claim.is_waiting]

    @property
    def held(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.is_waiting]


class Locks(RuleBasedStateMachine):
    """A lock table, its model, and tasks on an event loop that the rules run."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LockTable(waiters_max=WAITERS_MAX)
        self.model = Model()
        self.now = 0.0
        self.fractions = count(1)  # No two timeouts are equal.
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.jobs: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(OWNERS)]
        self.tasks = [self.loop.create_task(self.run_owner(owner), name=str(owner)) for owner in range(OWNERS)]
        self.outcomes: dict[Claim, Held | BaseException] = {}
        self.run_loop()

    async def run_owner(self, owner: int) -> None:
        while (job := await self.jobs[owner].get()) is not None:
            claim, coroutine = job
            try:
                self.outcomes[claim] = await coroutine
            except (Busy, LockOrderViolation) as error:
                self.outcomes[claim] = error
            except asyncio.CancelledError as error:
                self.outcomes[claim] = error
                self.tasks[owner].uncancel()

    def run_loop(self) -> None:
        for _ in range(LOOP_ITERATIONS):
            self.loop.run_until_complete(asyncio.sleep(0))

    def expect(self, claim: Claim, error: type[BaseException]) -> None:
        assert type(self.outcomes.pop(claim)) is error

    @rule(requests=st.lists(requests, min_size=1, max_size=4))
    def several_owners_request(self, requests: list[tuple[int, list[Path], str, int]]) -> None:
        for request in requests:
            self.request(*request)

    def request(self, choice: int, requested: list[Path], mode: str, timeout_for: int) -> None:
        idle = sorted(set(range(OWNERS)) - {claim.owner for claim in self.model.waiting})
        owner = idle[choice % len(idle)]
        seconds = timeout_for and timeout_for + next(self.fractions) / 1_000_000
        claim = Claim(owner, nodes_of(requested, mode), self.now + seconds)
        if len(requested) == 1:
            job = self.table.acquire_async(requested[0], mode, timeout_seconds=seconds)
        else:
            job = self.table.acquire_all_async(requested, mode, timeout_seconds=seconds)
        self.jobs[owner].put_nowait((claim, job))
        self.run_loop()
        error = self.model.request(claim, seconds)
        if error is not None:
            self.expect(claim, error)

    @precondition(lambda self: self.model.held)
    @rule(choice=choices)
    def an_owner_releases(self, choice: int) -> None:
        self.release(choice)
        self.run_loop()

    @precondition(lambda self: self.model.waiting)
    @rule(choice=choices)
    def a_waiting_owner_is_cancelled(self, choice: int) -> None:
        claim = self.cancel(choice)
        self.run_loop()
        self.model.release_claim(claim)
        self.expect(claim, asyncio.CancelledError)

    @precondition(lambda self: self.model.waiting)
    @rule()
    def the_shortest_timeout_ends(self) -> None:
        claim = self.wait_out()
        self.run_loop()
        self.model.release_claim(claim)
        self.expect(claim, LockTimeout)

    @precondition(lambda self: self.model.held and self.model.waiting)
    @rule(first=choices, second=choices)
    def a_cancellation_coincides_with_a_grant(self, first: int, second: int) -> None:
        claim = self.cancel(second, before=lambda: self.release(first))
        self.run_loop()
        self.model.release_claim(claim)
        self.expect(claim, asyncio.CancelledError)

    @precondition(lambda self: self.model.held and self.model.waiting)
    @rule(choice=choices)
    def a_timeout_coincides_with_a_grant(self, choice: int) -> None:
        claim = self.wait_out()
        self.release(choice)
        self.run_loop()
        if claim.is_waiting:
            self.model.release_claim(claim)
            self.expect(claim, LockTimeout)

    def release(self, choice: int) -> None:
        claim = self.model.held[choice % len(self.model.held)]
        held = self.outcomes.pop(claim)
        assert isinstance(held, Held)
        held.release()
        self.model.release_claim(claim)

    def cancel(self, choice: int, before: Callable[[], None] = lambda: None) -> Claim:
        claim = self.model.waiting[choice % len(self.model.waiting)]
        before()
        self.tasks[claim.owner].cancel()
        return claim

    def wait_out(self) -> Claim:
        claim = min(self.model.waiting, key=lambda each: each.deadline)
        self.now = claim.deadline
        return claim

    @invariant()
    def holders_and_waiters_equal_the_model(self) -> None:
        found = [
            (self.node((each.path[0], each.path[1])), each.owner, str(each.mode), each.waiting_seconds)
            for each in self.table.holders()
        ]
        held = {(node, owner, mode) for node, owner, mode, waiting in found if waiting is None}
        waiting = [(node, owner, mode) for node, owner, mode, waiting in found if waiting is not None]
        assert held == {
            (node, f"task {owner}", mode)
            for node, owners in self.model.holds.items()
            for owner, (mode, _) in owners.items()
        }
        assert waiting == [
            (node, f"task {claim.owner}", claim.wanted[claim.taken][1])
            for node, line in sorted(self.model.lines.items())
            for claim in line
        ]
        assert set(self.outcomes) == set(self.model.held)
        assert all(isinstance(outcome, Held) for outcome in self.outcomes.values())

    @invariant()
    def figures_equal_the_model(self) -> None:
        stats = list(self.table.stats().values())
        assert sum(level.violations for level in stats) == self.model.violations
        assert sum(level.waiting for level in stats) == len(self.model.waiting)
        assert sum(level.holders for level in stats) == sum(map(len, self.model.holds.values()))
        assert all(0 <= level.contention <= 1 for level in stats)

    @invariant()
    def some_holder_is_not_waiting(self) -> None:
        assert not self.model.waiting or any(
            claim.owner not in {each.owner for each in self.model.waiting} for claim in self.model.held
        )

    def node(self, path: tuple[str, str]) -> Node:
        return ("database", "entity_type", "record_id").index(path[0]), path[1]

    def teardown(self) -> None:
        for claim in list(self.model.waiting):
            self.tasks[claim.owner].cancel()
        self.run_loop()
        for outcome in self.outcomes.values():
            if isinstance(outcome, Held):
                outcome.release()
        for jobs in self.jobs:
            jobs.put_nowait(None)
        self.run_loop()
        assert all(task.done() for task in self.tasks)
        self.loop.close()
        registry = self.table._registry
        remaining = (registry.held, registry.lines, registry.owners, registry.completed, registry.unnoticed)
        assert not any((*remaining, registry.waiting))


@pytest.mark.parametrize(
    "examples", [pytest.param(60, id="suite"), pytest.param(5_000, id="nightly", marks=pytest.mark.nightly)]
)
def test_a_lock_table_matches_the_model(examples: int) -> None:
    run_state_machine_as_test(Locks, settings=settings(max_examples=examples, stateful_step_count=30))
