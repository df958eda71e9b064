"""Runs of workflows behave like a plain dictionary of runs, whatever is done to them in whatever order."""

from collections.abc import Callable
from typing import Any

import cbor2
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastness.backends.memory import MemoryDatabase
from fastness.errors import Fenced, NotFound, RunEnded, RunExists, RunNotEnded, RunNotFound, WorldNotActive
from fastness.handles.sync.plane import Plane
from fastness.kv import Database, Subspace
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.wire.canonical import canonical
from fastness.wire.hosting import ClaimWorlds, FailTurn
from fastness.wire.inboxes import Control, DomainEvent
from fastness.wire.runs import CHILD, SIGNAL, START, STATES, StartRun, UpdateRun

IDS = ["a", "a:1", "b", "c-1"]
ANY = st.sampled_from(IDS)
PICKS = st.integers(0, 11)  # Most of them pick a run that exists: see `picked`.
WORKFLOWS = st.sampled_from(["one", "two"])
NOT_ENDED = ("running", "stopped")


class Run:
    """What is expected of a run."""

    def __init__(self, workflow: str, argument: int, parent: "Run | None", parent_id: str | None) -> None:
        self.call = (workflow, argument, parent_id)
        self.workflow = workflow
        self.parent = parent
        self.parent_id = parent_id
        self.state = "running"
        self.result: Any = None
        self.error: str | None = None
        self.published: Any = None
        self.is_cancelling = False
        self.fence = 0
        self.items: list[tuple[Any, ...]] = [(START, None, [[argument], {}])]


class Workflows(RuleBasedStateMachine):
    """Runs that are started, signalled, cancelled, updated by a host, and deleted."""

    open_database: Callable[[], Database] = MemoryDatabase

    @initialize()
    def open(self) -> None:
        self.clock = ManualClock()
        self.database = type(self).open_database()
        self.transport = EmbeddedTransport(Services(self.database, clock=self.clock))
        self.plane = Plane(self.transport)
        self.runs: dict[str, Run] = {}
        self.deleted: set[str] = set()
        self.start("a", "one", 0, None)
        self.start("a:1", "two", 0, "a")

    def teardown(self) -> None:
        if hasattr(self, "plane"):
            self.plane.close()

    def picked(self, pick: int) -> str:
        """The id of a run that runs, or exists, or may not exist."""
        running = [id for id, run in sorted(self.runs.items()) if run.state in NOT_ENDED]
        known = running if pick < 8 and running else sorted(self.runs) if pick < 10 else []
        return (known or IDS)[pick % len(known or IDS)]

    def expect(self, id: str, *, running: bool = True) -> type[Exception] | None:
        """The error of an operation on a run that must exist, or must run."""
        if id not in self.runs:
            return RunNotFound
        return RunEnded if running and self.runs[id].state not in NOT_ENDED else None

    @rule(id=ANY, workflow=WORKFLOWS, argument=st.integers(0, 1), parent=st.sampled_from([None, None, *IDS]))
    def start(self, id: str, workflow: str, argument: int, parent: str | None) -> None:
        request = StartRun(workflow, id, canonical([[argument], {}]), parent)
        known = self.runs.get(id)
        refusal = None if parent is None else self.expect(parent)
        if known is not None:
            if known.call == (workflow, argument, parent):
                assert self.transport.call(request).is_duplicate
            else:
                with pytest.raises(RunExists):
                    self.transport.call(request)
        elif refusal is not None:
            with pytest.raises(refusal):
                self.transport.call(request)
        else:
            assert not self.transport.call(request).is_duplicate
            self.runs[id] = Run(workflow, argument, self.runs[parent] if parent else None, parent)
            self.deleted.discard(id)

    @rule(pick=PICKS, name=st.sampled_from(["approval", "stop"]), value=st.integers(0, 3))
    def signal(self, pick: int, name: str, value: int) -> None:
        id = self.picked(pick)
        refusal = self.expect(id)
        if refusal is not None:
            with pytest.raises(refusal):
                self.plane.workflows.signal(id, name, value)
            return
        self.plane.workflows.signal(id, name, value)
        self.runs[id].items.append((SIGNAL, name, value))

    @rule(pick=PICKS, reason=st.sampled_from(["", "late"]), force=st.sampled_from([False, False, True]))
    def cancel(self, pick: int, reason: str, force: bool) -> None:
        id = self.picked(pick)
        if id not in self.runs:
            with pytest.raises(RunNotFound):
                self.plane.workflows.cancel(id, reason, force=force)
            return
        self.plane.workflows.cancel(id, reason, force=force)
        run = self.runs[id]
        if run.state not in NOT_ENDED:
            return
        if force:
            self.end(id, "cancelled", None, reason or None)
        elif not run.is_cancelling:
            run.items.append(("cancel", None, reason))
        run.is_cancelling = True

    @rule()
    def claim(self) -> None:
        request = ClaimWorlds(["workflow:one", "workflow:two"], "host", 100, lease_seconds=3_600)
        for claimed in self.transport.call(request).worlds:
            self.runs[claimed.world.removeprefix("run:")].fence = claimed.fence

    @rule(
        pick=PICKS,
        state=st.sampled_from(["running", "running", "completed", "failed", "cancelled"]),
        value=st.integers(0, 3) | st.none(),
        published=st.integers(0, 3) | st.none(),
        is_stale=st.sampled_from([False, False, True]),
    )
    def update(self, pick: int, state: str, value: int | None, published: int | None, is_stale: bool) -> None:
        if pick % 2:
            self.claim()
        id = self.picked(pick)
        run = self.runs.get(id)
        fence = 1 if run is None else run.fence - is_stale
        result = canonical(value) if state == "completed" and value is not None else None
        error = str(value) if state in ("failed", "cancelled") and value is not None else None
        shown = None if published is None else canonical(published)
        request = UpdateRun(id, fence, state, result, error, published=shown)
        refusal = self.expect(id) or (Fenced if is_stale or run is None or not run.fence else None)
        if refusal is not None:
            with pytest.raises(refusal):
                self.transport.call(request)
            return
        assert run is not None
        self.transport.call(request)
        run.published = run.published if published is None else published
        if state != "running":
            self.end(id, state, None if result is None else value, error)

    @rule(pick=PICKS, is_stopped=st.booleans())
    def fail(self, pick: int, is_stopped: bool) -> None:
        """A turn of its host fails; the last attempt stops it."""
        if pick % 2:
            self.claim()
        id = self.picked(pick)
        run = self.runs.get(id)
        error = "Traceback (most recent call last):\n  …\nfastness.errors.WorkflowChanged: another call"
        request = FailTurn(f"run:{id}", "host", 1 if run is None else run.fence, error, is_stopped=is_stopped)
        if run is None or not run.fence:
            with pytest.raises((Fenced, NotFound, WorldNotActive)):
                self.transport.call(request)
            return
        self.transport.call(request)
        run.fence = 0
        if is_stopped:
            run.state, run.error = "stopped", "WorkflowChanged: another call"

    @rule(pick=PICKS)
    def resume(self, pick: int) -> None:
        id = self.picked(pick)
        if id in self.runs:
            self.plane.world(f"run:{id}").resume_program()
            if self.runs[id].state == "stopped":
                self.runs[id].state, self.runs[id].error = "running", None

    def end(self, id: str, state: str, result: Any, error: str | None) -> None:
        run = self.runs[id]
        run.state, run.result, run.error, run.fence = state, result, error, 0
        if (
            run.parent is not None
            and run.parent.state in NOT_ENDED
            and self.runs.get(run.parent_id or "") is run.parent
        ):
            run.parent.items.append((CHILD, id, {"state": state, "result": result, "error": error}))

    @rule(pick=PICKS)
    def delete(self, pick: int) -> None:
        id = self.picked(pick)
        run = self.runs.get(id)
        if run is None and id not in self.deleted:
            with pytest.raises(RunNotFound):
                self.plane.workflows.delete(id)
        elif run is not None and run.state in NOT_ENDED:
            with pytest.raises(RunNotEnded):
                self.plane.workflows.delete(id)
        else:
            self.plane.workflows.delete(id)
            self.runs.pop(id, None)
            self.deleted.add(id)

    @rule(state=st.none() | st.sampled_from(STATES), workflow=st.none() | WORKFLOWS, limit=st.integers(1, 3))
    def list(self, state: str | None, workflow: str | None, limit: int) -> None:
        listed: Any = []
        following: str | None = ""
        while following is not None:
            page = self.plane.workflows.list(state=state, workflow=workflow, after=following, limit=limit)
            assert len(page.runs) <= limit
            listed += [(each.id, each.workflow, each.state, each.result) for each in page.runs]
            following = page.next
        assert listed == [
            (id, run.workflow, run.state, None)
            for id, run in sorted(self.runs.items())
            if state in (None, run.state) and workflow in (None, run.workflow)
        ]

    @invariant()
    def every_run_is_as_expected(self) -> None:
        if not hasattr(self, "plane"):
            return
        for id, run in self.runs.items():
            found = self.plane.workflows.describe(id)
            assert (found.id, found.workflow, found.parent) == (id, run.workflow, run.parent_id)
            assert (found.state, found.error, found.is_cancelling) == (run.state, run.error, run.is_cancelling)
            assert (found.ended_ms is None) == (run.state in NOT_ENDED)
            assert self.plane.workflows.query(id) == run.published
            assert (None if found.result is None else cbor2.loads(found.result)) == run.result
            items = self.plane.world(f"run:{id}").inbox.read()
            assert [_shown(item) for _, item in items] == run.items

    @invariant()
    def the_index_has_every_run_once(self) -> None:
        if hasattr(self, "plane"):
            index = Subspace("u", "main", "runs")
            keys = self.database.read(lambda tx: tx.scan(*index.range(), limit=100))
            expected = sorted((run.state, f"run:{id}") for id, run in self.runs.items())
            assert [index.unpack(key) for key, _ in keys] == expected


def _shown(item: Any) -> tuple[Any, ...]:
    if isinstance(item, Control):
        return ("cancel", None, item.payload.decode())
    assert isinstance(item, DomainEvent)
    value = cbor2.loads(item.payload)
    if item.schema == CHILD:
        value = {name: value[name] for name in ("state", "result", "error")}
    return (item.schema, None if item.key is None else item.key.decode(), value)


@pytest.mark.examples(60)
def test_runs_in_memory(run_machine: Callable[..., None]) -> None:
    run_machine(Workflows, steps=30)


@pytest.mark.examples(8)
def test_runs_on_every_backend(run_machine: Callable[..., None], open_database: Callable[..., Database]) -> None:
    def open_empty() -> Database:
        database = open_database()
        database.transact(lambda tx: tx.delete_range(*Subspace("u").range()))
        return database

    run_machine(Workflows, steps=20, open_database=staticmethod(open_empty))
