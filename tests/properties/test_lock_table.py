"""Random lives of a lock table are what a plain model says: who holds, who waits in which order, who is refused.

The owners are asyncio tasks on one event loop that runs only while a rule lets it, and whose time the rules move. So
every example plays the same way each time.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from holdfast.errors import Busy, LockOrderViolation, LockTimeout
from holdfast.runtime.locks.table import Held, LockTable

OWNERS = 6
WAITERS_MAX = 4
TURNS = 4  # Of the event loop: enough for everybody who can go on to do so.

Node = tuple[int, str]  # Sorts in the order of locking.
Wish = tuple[Node, str]
Path = tuple[str, ...]

COMPATIBLE = {
    ("IS", "IS"), ("IS", "IX"), ("IS", "S"),
    ("IX", "IS"), ("IX", "IX"),
    ("S", "IS"), ("S", "S"),
}  # fmt: skip
COVERS = {"IS": {"IS"}, "IX": {"IX", "IS"}, "S": {"S", "IS"}, "X": {"X", "S", "IX", "IS"}}
INTENTS = {"IS": "IS", "IX": "IX", "S": "IS", "X": "IX"}

# Few names and mostly one at a time, so that owners often want the same and seldom ask against the order.
paths = st.sampled_from(
    [("database",), ("entity_type", "a"), ("entity_type", "b")]
    + [("record_id", name) for name in ("a/1", "a/2", "b/1")]
)
several = paths.map(lambda path: [path]) | st.lists(paths, min_size=1, max_size=3)
choices = st.integers(0, 99)  # Taken modulo the number of what there is to choose from.
asks = st.tuples(choices, several, st.sampled_from(("S", "X", "IS", "IX")), st.sampled_from((2, 1, 3, 0)))


def wishes(asked: Sequence[Path], mode: str) -> list[Wish]:
    """The nodes that `asked` takes, and how, in order."""
    found: dict[Node, str] = {}
    for level, *names in asked:
        name = names[0] if names else ""
        above = {"database": [], "entity_type": [(0, "")], "record_id": [(0, ""), (1, name.split("/")[0])]}[level]
        for node in above:
            found.setdefault(node, INTENTS[mode])
        found[len(above), name] = mode
    return sorted(found.items())


class Claim:
    """One call of acquire_all, as the model sees it."""

    def __init__(self, owner: int, wanted: list[Wish], deadline: float) -> None:
        self.owner = owner
        self.wanted = wanted
        self.deadline = deadline
        self.taken = 0

    @property
    def waits(self) -> bool:
        return self.taken < len(self.wanted)


class Model:
    """A lock table that is slow and plain."""

    def __init__(self) -> None:
        self.holds: dict[Node, dict[int, tuple[str, int]]] = {}  # By owner: how, and how often.
        self.lines: dict[Node, list[Claim]] = {}
        self.claims: list[Claim] = []  # All that hold or wait.
        self.violations = 0

    def ask(self, claim: Claim, patience: float) -> type[Exception] | None:
        """What becomes of `claim`: an error at once, or None if it is held or waits."""
        mine = {node: held[claim.owner][0] for node, held in self.holds.items() if claim.owner in held}
        for node, mode in claim.wanted:
            against = mode not in COVERS[mine[node]] if node in mine else any(node < other for other in mine)
            if against:
                self.violations += 1
                return LockOrderViolation
        waiting = len(self.waiting)
        self.claims.append(claim)
        self.go_on(claim)
        if not claim.waits:
            return None
        if not patience or waiting == WAITERS_MAX:
            self.give_back(claim)
            return LockTimeout if not patience else Busy
        self.stand_in_line(claim)
        return None

    def go_on(self, claim: Claim, its_turn_at: Node | None = None) -> None:
        while claim.waits:
            node, mode = claim.wanted[claim.taken]
            held = self.holds.get(node, {})
            if claim.owner in held:
                held[claim.owner] = (held[claim.owner][0], held[claim.owner][1] + 1)
            elif not self.compatible(node, mode) or (self.lines.get(node) and node != its_turn_at):
                return
            else:
                self.holds.setdefault(node, {})[claim.owner] = (mode, 1)
            claim.taken += 1

    def compatible(self, node: Node, mode: str) -> bool:
        return all((held, mode) in COMPATIBLE for held, _ in self.holds.get(node, {}).values())

    def stand_in_line(self, claim: Claim) -> None:
        self.lines.setdefault(claim.wanted[claim.taken][0], []).append(claim)

    def give_back(self, claim: Claim) -> None:
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
            self.go_on(claim, its_turn_at=node)
            if claim.waits:
                self.stand_in_line(claim)

    @property
    def waiting(self) -> list[Claim]:
        return [claim for claim in self.claims if claim.waits]

    @property
    def held(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.waits]


class Locks(RuleBasedStateMachine):
    """A lock table, its model, and some tasks that live on a loop which the rules turn."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LockTable(waiters_max=WAITERS_MAX)
        self.model = Model()
        self.now = 0.0
        self.fractions = count(1)  # No two waits end at the same moment.
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.jobs: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(OWNERS)]
        self.tasks = [self.loop.create_task(self.live(owner), name=str(owner)) for owner in range(OWNERS)]
        self.outcomes: dict[Claim, Held | BaseException] = {}
        self.turn()

    async def live(self, owner: int) -> None:
        while (job := await self.jobs[owner].get()) is not None:
            claim, coroutine = job
            try:
                self.outcomes[claim] = await coroutine
            except (Busy, LockOrderViolation) as error:
                self.outcomes[claim] = error
            except asyncio.CancelledError as error:
                self.outcomes[claim] = error
                self.tasks[owner].uncancel()

    def turn(self) -> None:
        for _ in range(TURNS):
            self.loop.run_until_complete(asyncio.sleep(0))

    def expect(self, claim: Claim, error: type[BaseException]) -> None:
        assert type(self.outcomes.pop(claim)) is error

    @rule(asks=st.lists(asks, min_size=1, max_size=4))
    def some_ask_one_after_the_other(self, asks: list[tuple[int, list[Path], str, int]]) -> None:
        for ask in asks:
            self.ask(*ask)

    def ask(self, choice: int, asked: list[Path], mode: str, patience: int) -> None:
        idle = sorted(set(range(OWNERS)) - {claim.owner for claim in self.model.waiting})
        owner = idle[choice % len(idle)]
        seconds = patience and patience + next(self.fractions) / 1_000_000
        claim = Claim(owner, wishes(asked, mode), self.now + seconds)
        if len(asked) == 1:
            job = self.table.acquire_async(asked[0], mode, timeout_seconds=seconds)
        else:
            job = self.table.acquire_all_async(asked, mode, timeout_seconds=seconds)
        self.jobs[owner].put_nowait((claim, job))
        self.turn()
        error = self.model.ask(claim, seconds)
        if error is not None:
            self.expect(claim, error)

    @precondition(lambda self: self.model.held)
    @rule(choice=choices)
    def somebody_releases(self, choice: int) -> None:
        self.release(choice)
        self.turn()

    @precondition(lambda self: self.model.waiting)
    @rule(choice=choices)
    def somebody_who_waits_is_cancelled(self, choice: int) -> None:
        claim = self.cancel(choice)
        self.turn()
        self.model.give_back(claim)
        self.expect(claim, asyncio.CancelledError)

    @precondition(lambda self: self.model.waiting)
    @rule()
    def the_shortest_patience_ends(self) -> None:
        claim = self.wait_out()
        self.turn()
        self.model.give_back(claim)
        self.expect(claim, LockTimeout)

    @precondition(lambda self: self.model.held and self.model.waiting)
    @rule(first=choices, second=choices)
    def a_cancellation_comes_in_the_moment_of_a_grant(self, first: int, second: int) -> None:
        claim = self.cancel(second, before=lambda: self.release(first))
        self.turn()
        self.model.give_back(claim)
        self.expect(claim, asyncio.CancelledError)

    @precondition(lambda self: self.model.held and self.model.waiting)
    @rule(choice=choices)
    def patience_ends_in_the_moment_of_a_grant(self, choice: int) -> None:
        claim = self.wait_out()
        self.release(choice)
        self.turn()
        if claim.waits:
            self.model.give_back(claim)
            self.expect(claim, LockTimeout)

    def release(self, choice: int) -> None:
        claim = self.model.held[choice % len(self.model.held)]
        held = self.outcomes.pop(claim)
        assert isinstance(held, Held)
        held.release()
        self.model.give_back(claim)

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
    def everybody_holds_and_waits_as_in_the_model(self) -> None:
        found = [
            (self.node(each.path), each.owner, str(each.mode), each.waiting_seconds) for each in self.table.holders()
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
    def figures_agree_with_the_model(self) -> None:
        stats = list(self.table.stats().values())
        assert sum(level.violations for level in stats) == self.model.violations
        assert sum(level.waiting for level in stats) == len(self.model.waiting)
        assert sum(level.holders for level in stats) == sum(map(len, self.model.holds.values()))
        assert all(0 <= level.contention <= 1 for level in stats)

    @invariant()
    def somebody_who_holds_can_always_go_on(self) -> None:
        assert not self.model.waiting or any(
            claim.owner not in {each.owner for each in self.model.waiting} for claim in self.model.held
        )

    def node(self, path: tuple[str, str]) -> Node:
        return ("database", "entity_type", "record_id").index(path[0]), path[1]

    def teardown(self) -> None:
        for claim in list(self.model.waiting):
            self.tasks[claim.owner].cancel()
        self.turn()
        for outcome in self.outcomes.values():
            if isinstance(outcome, Held):
                outcome.release()
        for jobs in self.jobs:
            jobs.put_nowait(None)
        self.turn()
        assert all(task.done() for task in self.tasks)
        self.loop.close()
        book = self.table._book
        assert not any((book.held, book.lines, book.owners, book.served, book.unaware, book.waiting))


@pytest.mark.parametrize(
    "examples", [pytest.param(150, id="suite"), pytest.param(5_000, id="nightly", marks=pytest.mark.nightly)]
)
def test_a_lock_table_does_what_its_model_does(examples: int) -> None:
    run_state_machine_as_test(Locks, settings=settings(max_examples=examples, stateful_step_count=30))
