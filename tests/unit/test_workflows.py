"""Workflows on real planes: crashes at every commit, cancellation, children, queues, versions, and bounds."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import fastness
from fastness import AsyncHost, AsyncPlane, HostApp, Retry, TaskApp, WorkflowRun
from fastness.errors import Backend, Fenced, ResultNotReady, RunCancelled, RunFailed, RunNotEnded, StepFailed
from fastness.hosts.hosted_world import HostedWorld, HostPolicy
from fastness.hosts.runners import Runner
from fastness.hosts.workflows import step_records
from fastness.hosts.workflows.records import fold
from fastness.limits import HOST_LEASE_SECONDS, RUN_RESULT_BYTES_MAX, RUN_VALUE_BYTES_MAX
from fastness.tasks.planes import async_plane_of
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.hosting import ClaimWorlds, CommitTurn
from fastness.wire.requests import Request
from fastness.wire.run_records import FAILED, RETRY, STARTED, STEP

PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.


@pytest.fixture
async def plane(
    backend: str, tmp_path: Path, clock: ManualClock, request: pytest.FixtureRequest
) -> AsyncIterator[AsyncPlane]:
    url = {"memory": "memory:", "rocksdb": f"dir:{tmp_path}"}.get(backend) or request.getfixturevalue("postgres_url")
    objects = f"dir:{tmp_path / 'objects'}" if backend == "postgres" else None
    async with await fastness.open_async(url, clock=clock, objects=objects) as plane:
        yield plane


@pytest.fixture
async def memory(clock: ManualClock) -> AsyncIterator[AsyncPlane]:
    async with await fastness.open_async("memory:", clock=clock) as plane:
        yield plane


class Crashed(Backend):
    """The host is dead: it reaches the plane no more."""


class CrashingTransport:
    """Passes requests on, until the host dies just before or just after its n-th commit of a turn."""

    def __init__(self, plane: AsyncPlane, *, dies_at: int | None, is_after: bool) -> None:
        self._transport = plane._transport
        self._dies_at = dies_at
        self._is_after = is_after
        self.commits = 0
        self.is_dead = False

    async def call(self, request: Request[Any]) -> Any:
        if self.is_dead:
            raise Crashed("The host is dead")
        is_turn = isinstance(request, CommitTurn) or (
            isinstance(request, CommitAtomic) and isinstance(request.operations[0], CommitTurn)
        )
        if not is_turn:
            return await self._transport.call(request)
        self.commits += 1
        self.is_dead = self.commits == self._dies_at
        if self.is_dead and not self._is_after:
            raise Crashed("The host is dead")
        answer = await self._transport.call(request)
        if self.is_dead:
            raise Crashed("The host is dead")
        return answer


class MortalHost:
    """Runs what is ready, as a host does, until it dies; then its claims end only with their time."""

    def __init__(self, plane: AsyncPlane, app: HostApp, clock: ManualClock, **death: Any) -> None:
        self.transport = CrashingTransport(plane, **{"dies_at": None, "is_after": False, **death})
        self._app = app
        self._clock = clock
        self._held: dict[str, tuple[HostedWorld, Runner]] = {}
        self._wanted: set[str] = set()
        self._is_wanted = asyncio.Event()

    async def run_ready(self) -> bool:
        """Run until nothing is ready; whether it lives."""
        try:
            while not self.transport.is_dead:
                await self._claim()
                wanted, self._wanted = self._wanted, set()
                for name in sorted(wanted):
                    await self._held[name][1].run_turn()
                if wanted:
                    continue
                if not any(runner.is_active for _, runner in self._held.values()):
                    break
                self._is_wanted.clear()
                await asyncio.wait_for(self._is_wanted.wait(), PATIENCE_SECONDS)
        except Crashed:
            pass
        return not self.transport.is_dead

    async def close(self) -> None:
        for _, runner in self._held.values():
            await runner.close()
        await asyncio.sleep(0)

    async def _claim(self) -> None:
        request = ClaimWorlds(list(self._app.runners), "h", 64, HOST_LEASE_SECONDS)
        for claim in (await self.transport.call(request)).worlds:
            known = self._held.get(claim.world)
            if known is not None and known[0].fence == claim.fence:
                known[0].add(claim.items)
            else:
                if known is not None:
                    await known[1].close()
                world = HostedWorld(
                    self.transport,  # type: ignore[arg-type]
                    "main",
                    "h",
                    claim,
                    policy=HostPolicy(snapshot_every=7),
                    request_turn=lambda name=claim.world: self._want(name),  # type: ignore[misc]
                )
                world.now_ms = self._clock.now_ms
                self._held[claim.world] = (world, self._app.runners[claim.program](world))
            self._want(claim.world)

    def _want(self, name: str) -> None:
        self._wanted.add(name)
        self._is_wanted.set()


class Shop:
    """A workflow with everything, and a list of the steps that were run, by the life of the host."""

    def __init__(self) -> None:
        self.app = HostApp()
        self.lives: list[list[str]] = [[]]
        self._failures: dict[str, int] = {}

        @self.app.workflow
        async def part(run: WorkflowRun, number: int) -> int:
            await run.step(self.note, f"{run.id} part {number}")
            await run.sleep(60)
            return number * 2

        async def branch(run: WorkflowRun, name: str) -> str:
            await run.step(self.note, f"{run.id} {name} 1")
            return await run.step(self.note, f"{run.id} {name} 2")

        @self.app.workflow
        async def order(run: WorkflowRun, item: str) -> list[Any]:
            plan = await run.step(self.note, f"{run.id} plan {item}")
            found = await run.gather(branch(run, "left"), branch(run, "right"), run.step(self.note, f"{run.id} middle"))
            run.put(f"jobs-{run.id}", {"n": 1})
            run.send(f"log-{run.id}", {"found": found})
            await run.signal(f"friend-{run.id}", "hello", run.id)
            tried = await run.step(self.fail_twice, run.id, retry=Retry(3, delay_seconds=5))
            parts = await run.gather(run.child(part, 1), run.child(part, 2, id=f"own-{run.id}"))
            run.state({"parts": parts})
            approved = await run.wait_for("approval", timeout=timedelta(days=30))
            late = await run.wait_for("never", timeout=timedelta(days=30))
            return [plan, found, tried, parts, approved, late, await run.step(self.note, f"{run.id} last")]

        @self.app.workflow
        async def friend(run: WorkflowRun) -> str:
            return str(await run.wait_for("hello"))

    async def note(self, name: str) -> str:
        self.lives[-1].append(name)
        return name

    async def fail_twice(self, run: str) -> str:
        self._failures[run] = self._failures.get(run, 0) + 1
        if self._failures[run] <= 2:
            raise ValueError(f"failure {self._failures[run]}")
        return "tried"


async def entries_of(plane: AsyncPlane, run: str) -> list[list[Any]]:
    """The run's own records in its journal."""
    records = await plane.world(f"run:{run}").read(0, limit=1_000)
    values = [cbor2.loads(record.value) for record in records if record.kind == "entry"]
    return [value for value in values if isinstance(value, list)]


async def recorded_steps(plane: AsyncPlane, run: str) -> set[str]:
    """The results of the recorded steps of a run and its children."""
    entries = await entries_of(plane, run)
    for child in [entry[4] for entry in entries if entry[0] == "child"]:
        entries += await entries_of(plane, child)
    return {str(entry[5]) for entry in entries if entry[0] == STEP}


async def skip_to_next_timer(plane: AsyncPlane, clock: ManualClock) -> None:
    """Move the time to the next timer, if there is one, and wait until what is due has fired."""
    due = [timer.deliver_at_ms for timer in (await plane.timers.list()).timers]
    if due:  # Else one has fired just now.
        clock.jump_to_ms(max(min(due), clock.now_ms()))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(each.deliver_at_ms <= clock.now_ms() for each in (await plane.timers.list()).timers):
            await asyncio.sleep(0.001)


async def run_to_end(
    plane: AsyncPlane, app: HostApp, clock: ManualClock, run: str, lives: list[list[str]], **death: Any
) -> bool:
    """Run everything until the run has ended, with a new host if one dies; whether one died."""
    host, has_died, recorded = MortalHost(plane, app, clock, **death), False, set[str]()
    for _ in range(100):
        if not await host.run_ready():
            await host.close()
            clock.advance_ms(HOST_LEASE_SECONDS * 1_000)
            recorded = await recorded_steps(plane, run)
            lives.append([])
            host, has_died = MortalHost(plane, app, clock), True
        elif (await plane.workflows.describe(run)).state == "running":
            await skip_to_next_timer(plane, clock)
        else:
            break
    await host.close()
    if has_died:
        assert not recorded & set(lives[-1]), "a recorded step was run again"
    return has_died


@pytest.mark.parametrize("is_after", [False, True], ids=["before the commit", "after the commit"])
async def test_a_run_survives_a_crash_at_every_commit(plane: AsyncPlane, clock: ManualClock, is_after: bool) -> None:
    shop = Shop()
    order, friend = shop.app.workflows["order"], shop.app.workflows["friend"]
    crashes, has_died = 0, True
    while has_died:
        crashes += 1
        id = f"r{crashes}"
        await plane.world(f"log-{id}").create()
        await plane.workflows.start(friend, id=f"friend-{id}")
        await plane.workflows.start(order, "shoe", id=id)
        await plane.workflows.signal(id, "approval", "yes")
        shop.lives = [[]]
        has_died = await run_to_end(plane, shop.app, clock, id, shop.lives, dies_at=crashes, is_after=is_after)

        found = [f"{id} left 2", f"{id} right 2", f"{id} middle"]
        assert await plane.workflows.result(id) == [
            f"{id} plan shoe",
            found,
            "tried",
            [2, 4],
            "yes",
            None,
            f"{id} last",
        ]
        assert await plane.workflows.query(id) == {"parts": [2, 4]}
        assert await plane.workflows.result(f"friend-{id}") == id
        assert [message.json() for message in await plane.queue(f"jobs-{id}").receive_many(10)] == [{"n": 1}]
        [(_, sent)] = await plane.world(f"log-{id}").inbox.read()
        assert sent.payload == json.dumps({"found": found}, separators=(",", ":")).encode()
        words = [entry[0] for entry in await entries_of(plane, id)]
        assert (words.count("child"), words.count("put"), words.count("end")) == (2, 1, 1)
        assert words.count("retry") <= 2
        fired = [record for record in await plane.world(f"run:{id}").read() if b"timer_fired" in record.value]
        assert len(fired) == words.count("retry") + 1  # And the wait that ended without a signal.
        assert (await plane.world(f"run:{id}").verify(fold)).agrees
    assert crashes > 20


async def settle(plane: AsyncPlane, app: HostApp, clock: ManualClock, *, hosts: int = 1) -> None:
    """Run what is ready, on one host after the other."""
    for _ in range(hosts):
        host = MortalHost(plane, app, clock)
        assert await host.run_ready()
        await host.close()
        clock.advance_ms(HOST_LEASE_SECONDS * 1_000)


async def test_a_cancelled_run_cleans_up_and_cancels_its_steps_and_children(
    memory: AsyncPlane, clock: ManualClock
) -> None:
    app, seen, is_running = HostApp(), [], asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            is_running.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("step cancelled")
            raise

    async def undo(what: str) -> None:
        seen.append(f"undo {what}")

    @app.workflow
    async def child(run: WorkflowRun) -> None:
        try:
            await run.sleep(1_000)
        finally:
            await run.step(undo, "child")

    @app.workflow
    async def parent(run: WorkflowRun) -> None:
        try:
            await run.gather(run.child(child, id="c"), run.step(wait_for_ever), run.wait_for("go"))
        except RunCancelled as error:
            await run.step(undo, str(error))

    await memory.workflows.start(parent, id="p")
    async with AsyncHost(memory, app):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await is_running.wait()
        await memory.workflows.cancel("p", "enough")
        with pytest.raises(RunCancelled, match="enough"):
            await memory.workflows.result("p", wait_seconds=20)
        with pytest.raises(RunCancelled, match="parent p was cancelled"):
            await memory.workflows.result("c", wait_seconds=20)
    assert sorted(seen) == ["step cancelled", "undo Run p was cancelled: enough", "undo child"]
    assert (await memory.timers.list()).timers == []
    assert (await entries_of(memory, "p"))[-1][2:] == ["cancelled", None, ["RunCancelled", "enough"]]


async def test_a_child_is_started_even_if_its_parent_does_not_wait_for_it(
    memory: AsyncPlane, clock: ManualClock
) -> None:
    app = HostApp()

    @app.workflow
    async def child(run: WorkflowRun, name: str) -> str:
        return name

    @app.workflow
    async def parent(run: WorkflowRun) -> None:
        run.child(child, "ada", id=f"{run.id}-child")

    @app.workflow
    async def failing(run: WorkflowRun) -> None:
        run.child(child, "ada", id=f"{run.id}-child")
        raise KeyError("no")

    await memory.workflows.start(parent, id="returns")
    await memory.workflows.start(failing, id="fails")
    await settle(memory, app, clock)
    assert (await memory.workflows.describe("returns")).state == "completed"
    assert (await memory.workflows.describe("fails")).state == "failed"
    assert await memory.workflows.result("returns-child") == "ada"
    assert await memory.workflows.result("fails-child") == "ada"


async def test_a_run_whose_arguments_do_not_fit_its_code_any_more_says_so(
    memory: AsyncPlane, clock: ManualClock
) -> None:
    first, second = HostApp(), HostApp()

    @first.workflow(name="pay")
    async def pay(run: WorkflowRun, order: int) -> None:
        await run.wait_for("go")

    @second.workflow(name="pay")
    async def pay_in(run: WorkflowRun, order: int, currency: str) -> None:
        await run.wait_for("go")

    await memory.workflows.start("pay", 17, id="p")
    await AsyncHost(memory, first).run_ready()
    await memory.workflows.signal("p", "go")
    await AsyncHost(memory, second, max_attempts=1).run_ready()
    reported = (await memory.workflows.describe("p")).error or ""
    assert reported.startswith("WorkflowChanged: Run p has recorded wait go as call 0, and the code fails before")
    assert "cannot be called like this: missing a required argument: 'currency'" in reported


async def test_continue_as_new_keeps_the_history_short_and_the_signals(memory: AsyncPlane, clock: ManualClock) -> None:
    app = HostApp()

    async def add(total: int, value: int) -> int:
        return total + value

    @app.workflow
    async def sums(run: WorkflowRun, total: int, count: int) -> int:
        total = await run.step(add, total, await run.wait_for("value", timeout=60))
        return total if count == 1 else run.continue_as_new(total, count - 1)

    await memory.workflows.start(sums, 0, 30, id="s")
    for value in range(30):
        await memory.workflows.signal("s", "value", value)
        if value % 10 == 0:
            await settle(memory, app, clock)
    await settle(memory, app, clock)
    assert await memory.workflows.result("s") == sum(range(30))
    state = (await memory.world("run:s").restore(fold)).state
    assert (state["generation"], len(state["history"])) == (29, 5)
    assert (await memory.world("run:s").verify(fold)).agrees


async def test_changed_code_stops_a_run_until_it_is_resumed_with_code_that_fits(
    memory: AsyncPlane, clock: ManualClock
) -> None:
    def app_of(name: str) -> HostApp:
        app = HostApp()

        async def work() -> str:
            return name

        @app.workflow(name="job")
        async def job(run: WorkflowRun) -> str:
            result = await run.step(work, name=name)
            await run.wait_for("go")
            return result

        return app

    await memory.workflows.start("job", id="j")
    await AsyncHost(memory, app_of("old")).run_ready()
    await memory.workflows.signal("j", "go")
    for attempt in range(1, 4):
        assert (await memory.world("run:j").hosting()).attempts == attempt - 1
        await AsyncHost(memory, app_of("new"), max_attempts=3).run_ready()
        clock.advance_ms(1_000_000)
    stopped = await memory.world("run:j").hosting()
    assert (stopped.is_stopped, stopped.attempts) == (True, 3)
    assert "has recorded step old as call 0, and the code makes the call step new there" in (stopped.error or "")
    await AsyncHost(memory, app_of("old")).run_ready()
    await memory.workflows.signal("j", "more")  # It is kept.
    found = await memory.workflows.describe("j")
    assert (found.state, found.ended_ms) == ("stopped", None)
    assert (found.error or "").startswith("WorkflowChanged: Run j has recorded step old as call 0, and the code makes")
    assert [each.id for each in (await memory.workflows.list(state="stopped")).runs] == ["j"]
    assert (await memory.workflows.list(state="running")).runs == []
    with pytest.raises(ResultNotReady, match=r"is stopped by an error.*resume_program"):
        await memory.workflows.result("j")
    with pytest.raises(RunNotEnded, match="j is stopped"):
        await memory.workflows.delete("j")
    await memory.world("run:j").resume_program()
    found = await memory.workflows.describe("j")
    assert (found.state, found.error) == ("running", None)
    assert [each.id for each in (await memory.workflows.list(state="running")).runs] == ["j"]
    await AsyncHost(memory, app_of("old")).run_ready()
    assert await memory.workflows.result("j") == "old"
    assert (await memory.workflows.list(state="stopped")).runs == []


async def test_a_stopped_run_can_be_cancelled_with_force_and_tells_its_parent(
    memory: AsyncPlane, clock: ManualClock
) -> None:
    def app_of(name: str) -> HostApp:
        app = HostApp()

        @app.workflow(name="child")
        async def child(run: WorkflowRun) -> None:
            await run.wait_for(name)

        @app.workflow
        async def parent(run: WorkflowRun) -> str:
            try:
                await run.child(child, id="c")
            except RunFailed as error:
                return str(error)
            return ""

        return app

    await memory.workflows.start("parent", id="p")
    await AsyncHost(memory, app_of("old")).run_ready()
    await memory.workflows.signal("c", "old")
    await AsyncHost(memory, app_of("new"), max_attempts=1).run_ready()
    assert (await memory.workflows.describe("c")).state == "stopped"
    assert (await memory.workflows.cancel("c", "given up", force=True)).state == "cancelled"
    assert (await memory.workflows.list(state="stopped")).runs == []
    await AsyncHost(memory, app_of("new")).run_ready()
    assert await memory.workflows.result("p") == "Child c cancelled: given up"


async def test_a_step_that_may_have_run_keeps_its_id_when_the_code_changes(
    memory: AsyncPlane, clock: ManualClock
) -> None:
    is_charging, ids = asyncio.Event(), list[tuple[str, str]]()

    async def charge() -> str:
        step = fastness.current_step()
        ids.append((step.name, step.id))
        if len(ids) == 1:
            is_charging.set()
            await asyncio.Event().wait()
        return step.name

    first, second = HostApp(), HostApp()

    @first.workflow(name="pay")
    async def pay(run: WorkflowRun) -> str:
        return await run.step(charge, name="charge_v1")

    @second.workflow(name="pay")
    async def pay_later(run: WorkflowRun) -> str:
        return await run.step(charge, name="charge_v2" if run.patched("second") else "charge_v1")

    await memory.workflows.start("pay", id="p")
    cut_off = MortalHost(memory, first, clock)
    running = asyncio.create_task(cut_off.run_ready())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await is_charging.wait()
    running.cancel()
    await cut_off.close()
    clock.advance_ms(HOST_LEASE_SECONDS * 1_000)
    await settle(memory, second, clock)
    assert await memory.workflows.result("p") == "charge_v1"
    assert ids == [("charge_v1", "p.1.0.0"), ("charge_v1", "p.1.0.0")]


@pytest.mark.parametrize(
    ("code", "commits"),
    [("steps in a row", 11), ("steps side by side", 2), ("after a published state", 11), ("after a message", 21)],
)
async def test_the_start_of_a_step_shares_the_commit_before_it(
    memory: AsyncPlane, clock: ManualClock, code: str, commits: int
) -> None:
    app = HostApp()

    async def work() -> None:
        pass

    @app.workflow
    async def job(run: WorkflowRun) -> None:
        if code == "steps side by side":
            await run.gather(*(run.step(work) for _ in range(10)))
        for _ in range(0 if code == "steps side by side" else 10):
            if code == "after a published state":
                await run.state(1)
            if code == "after a message":
                await run.put("jobs", 1)  # It may be refused, so the code goes on after its commit.
            await run.step(work)

    await memory.workflows.start(job, id="j")
    host = MortalHost(memory, app, clock)
    assert await host.run_ready()
    await host.close()
    assert (await memory.workflows.describe("j")).state == "completed"
    assert host.transport.commits == commits


async def test_a_refused_call_fails_alone(plane: AsyncPlane, clock: ManualClock) -> None:
    app = HostApp()

    @app.workflow
    async def other(run: WorkflowRun, value: int) -> int:
        return value

    @app.workflow
    async def sender(run: WorkflowRun) -> list[str]:
        calls: list[Awaitable[Any]] = [
            run.put("jobs", 1),
            run.signal("missing", "hello"),
            run.put("jobs", 2),
            run.send("missing", {}),
            run.child(other, 1, id="taken"),
            run.put("jobs", 3),
        ]
        found = []
        for call in calls:
            try:
                await call
            except StepFailed as error:
                found.append(error.error_type)
        return found

    await plane.workflows.start(other, 2, id="taken")
    await plane.workflows.start(sender, id="s")
    await settle(plane, app, clock)
    assert await plane.workflows.result("s") == ["RunNotFound", "WorldNotFound", "RunExists"]
    assert [message.json() for message in await plane.queue("jobs").receive_many(10)] == [1, 2, 3]
    words = [entry[0] for entry in await entries_of(plane, "s")]
    assert (words.count(FAILED), words.count("put")) == (3, 3)


async def test_steps_may_be_functions_coroutines_and_what_returns_one(
    memory: AsyncPlane, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_records, "RUN_BLOB_BYTES_MAX", RUN_RESULT_BYTES_MAX)
    app = HostApp()

    class Found(msgspec.Struct):
        name: str
        when: datetime

    def on_thread(name: str) -> Found:
        assert threading.current_thread().name.startswith("fastness-step")
        return Found(name, datetime(2026, 1, 1, tzinfo=UTC))

    async def on_loop() -> tuple[int, ...]:
        await asyncio.sleep(0)
        return (1, 2)

    async def too_long() -> None:
        await asyncio.Event().wait()

    async def too_large() -> bytes:
        return bytes(RUN_RESULT_BYTES_MAX)

    async def not_recordable() -> object:
        return object()

    async def wrong() -> int:
        return "text"  # type: ignore[return-value]

    @app.workflow
    async def job(run: WorkflowRun) -> list[Any]:
        found = await run.step(on_thread, "ada")
        assert isinstance(found, Found)
        results: list[Any] = [found.name, found.when.year]
        results += [list(await run.step(on_loop)), await run.step(lambda: on_loop())]  # noqa: PLW0108
        for function in (too_long, too_large, not_recordable, wrong):
            try:
                timeout = 0.01 if function is too_long else None
                await run.step(function, timeout=timeout, retry=Retry(2, 0.0, on=(KeyError,)))
            except StepFailed as error:
                results.append([error.error_type, error.attempts])
        return results

    await memory.workflows.start(job, id="j")
    await settle(memory, app, clock)
    assert await memory.workflows.result("j") == [
        "ada",
        2026,
        [1, 2],
        [1, 2],
        ["TimeoutError", 1],
        ["PayloadTooLarge", 1],
        ["InvalidArgument", 1],
        ["InvalidArgument", 1],
    ]


async def test_failed_attempts_are_counted_across_crashes(memory: AsyncPlane, clock: ManualClock) -> None:
    app, calls = HostApp(), []

    async def fail() -> None:
        calls.append(clock.now_ms())
        raise KeyError("no")

    @app.workflow
    async def job(run: WorkflowRun) -> None:
        await run.step(fail, retry=Retry(4, delay_seconds=20, factor=3))

    await memory.workflows.start(job, id="j")
    for _ in range(4):
        await settle(memory, app, clock)  # Each attempt on another host.
        if (await memory.workflows.describe("j")).state == "running":
            await skip_to_next_timer(memory, clock)
    with pytest.raises(RunFailed, match=r"StepFailed: Step fail failed after 4 attempts: KeyError: 'no'"):
        await memory.workflows.result("j")
    assert [later - earlier for earlier, later in itertools.pairwise(calls)] == [20_000, 60_000, 180_000]
    assert [entry[0] for entry in await entries_of(memory, "j")] == [
        "begin",
        STARTED,
        *[RETRY] * 3,
        FAILED,
        "end",
    ]
    *_, error = (await entries_of(memory, "j"))[-1]
    assert error[0] == "StepFailed"
    assert "await run.step(fail" in error[2]  # The traceback names the line of the code.


async def test_results_that_are_ready_together_share_a_commit(memory: AsyncPlane, clock: ManualClock) -> None:
    app = HostApp()

    async def double(value: int) -> int:
        return value * 2

    @app.workflow
    async def job(run: WorkflowRun) -> int:
        for value in range(50):
            run.put("jobs", value)
        return sum(await run.gather(*(run.step(double, value) for value in range(100))))

    await memory.workflows.start(job, id="j")
    host = MortalHost(memory, app, clock)
    assert await host.run_ready()
    await host.close()
    assert await memory.workflows.result("j") == 9_900
    assert host.transport.commits <= 5
    assert len(await memory.queue("jobs").receive_many(100)) == 50


async def test_large_values_travel_as_blobs(plane: AsyncPlane, clock: ManualClock) -> None:
    app, large = HostApp(), "x" * (RUN_VALUE_BYTES_MAX + 1)

    @app.workflow
    async def echo(run: WorkflowRun, value: str) -> str:
        return value

    @app.workflow
    async def job(run: WorkflowRun, value: str) -> list[str]:
        signal = await run.wait_for("value")
        run.put("jobs", value)
        await run.send("log", value)
        return [value[:1], signal[:2], value + signal]

    await plane.world("log").create()
    await plane.workflows.start(job, large, id="j")
    await plane.workflows.start(echo, large, id="e")
    await plane.workflows.signal("j", "value", "y" + large)
    await settle(plane, app, clock)
    assert await plane.workflows.result("j") == ["x", "yx", large + "y" + large]
    assert await plane.workflows.result("e") == large
    [message] = await plane.queue("jobs").receive_many(1)
    assert await message.read() == json.dumps(large).encode()
    [(_, item)] = await plane.world("log").inbox.read()
    assert item.payload_blob is not None


def test_a_step_on_a_queue_is_put_once_and_its_result_survives_the_host(clock: ManualClock) -> None:
    app, tasks, calls = HostApp(), TaskApp(), []

    @tasks.task(queue="gpu")
    def render(scene: str) -> int:
        calls.append(scene)
        if scene == "broken":
            raise ValueError("no scene")
        return len(scene)

    @app.workflow
    async def film(run: WorkflowRun, scene: str) -> list[Any]:
        length = await run.step(render, scene, queue="gpu", key=scene)
        try:
            await run.step(render, "broken", queue="gpu", retry=Retry(1))
        except StepFailed as error:
            return [length, error.error_type]
        return []

    with fastness.open("memory:", clock=clock) as plane:
        tasks.use(plane)
        plane.workflows.start(film, "dawn", id="f")

        async def run(*, until_queued: bool) -> None:
            on_loop = async_plane_of(plane)
            async with AsyncHost(on_loop, app), asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    words = [entry[0] for entry in await entries_of(on_loop, "f")]
                    if "queued" in words and (until_queued or words[-1] == "end"):
                        return
                    if not until_queued:
                        await asyncio.to_thread(tasks.run_ready)
                    await asyncio.sleep(0.001)

        asyncio.run(run(until_queued=True))
        asyncio.run(run(until_queued=True))  # Another host waits for the same message.
        assert plane.queue("gpu").stats().ready == 1
        asyncio.run(run(until_queued=False))
        assert plane.workflows.result("f") == [4, "MessageFailed"]
        assert calls == ["dawn", "broken"]


async def test_a_host_that_stops_finishes_running_steps_and_starts_no_others(
    memory: AsyncPlane, clock: ManualClock
) -> None:
    app, release, begun = HostApp(), asyncio.Event(), list[str]()

    async def work(name: str) -> str:
        begun.append(name)
        await release.wait()
        return name

    @app.workflow
    async def job(run: WorkflowRun) -> list[str]:
        first = await run.gather(run.step(work, "a"), run.step(work, "b"))
        return [*first, await run.step(work, "c")]

    await memory.workflows.start(job, id="j")
    async with AsyncHost(memory, app) as host:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(begun) < 2:
                await asyncio.sleep(0.001)
            host.stop()
            [held] = host._held.values()
            while not held.runner._is_draining:  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
        release.set()
    assert begun == ["a", "b"]
    assert [entry[0] for entry in await entries_of(memory, "j")] == ["begin", STARTED, STARTED, STEP, STEP]
    await AsyncHost(memory, app).run_ready()  # At once: the world was given back with work.
    assert begun == ["a", "b", "c"]
    assert await memory.workflows.result("j") == ["a", "b", "c"]


async def test_a_host_that_has_lost_its_claim_records_nothing(memory: AsyncPlane, clock: ManualClock) -> None:
    app, release, runs = HostApp(), asyncio.Event(), []

    async def slow() -> str:
        runs.append("slow")
        if len(runs) == 1:
            await release.wait()
        return f"life {len(runs)}"

    @app.workflow
    async def job(run: WorkflowRun) -> str:
        return await run.step(slow)

    await memory.workflows.start(job, id="j")
    stale = MortalHost(memory, app, clock)
    running = asyncio.create_task(stale.run_ready())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not runs:
            await asyncio.sleep(0.001)
    clock.advance_ms(HOST_LEASE_SECONDS * 1_000)
    await settle(memory, app, clock)
    release.set()
    with pytest.raises(Fenced):
        await running
    await stale.close()
    assert await memory.workflows.result("j") == "life 2"
    assert [entry[0] for entry in await entries_of(memory, "j")] == ["begin", STARTED, STEP, "end"]
