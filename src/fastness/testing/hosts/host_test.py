"""Runs programs and workflows in memory, under a clock that a test moves.

    from fastness.testing import HostTest

    with HostTest(app) as test:
        run = test.plane.workflows.start(subscription, "ada", id="sub-1")
        test.run_until_idle()
        test.advance(days=30)
        run.signal("cancel", True)
        assert test.run_to_end(run) == "cancelled"

Nothing sleeps: a workflow of thirty days ends in milliseconds.
"""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from fastness.clock import IdSource
from fastness.errors import InvalidArgument
from fastness.handles.plane import AsyncPlane
from fastness.handles.runs import AsyncRun
from fastness.handles.sync.plane import Plane
from fastness.handles.sync.runs import Run
from fastness.hosts.apps import DEFAULT_HOST_APP, HostApp
from fastness.hosts.programs import Program
from fastness.hosts.threads import HostOptions
from fastness.kv import Transaction
from fastness.kv.events import discard
from fastness.layers import effects, hosting, timer_firing, timers
from fastness.names import UNIVERSE, checked_name
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.open import Options, open_plane
from fastness.testing.clock import ManualClock
from fastness.testing.hosts.processes import COMMITS_MAX, Boundary, CallLog, HostProcess
from fastness.testing.hosts.virtual_loop import VirtualLoop
from fastness.wire.runs import RUN_PREFIX

Result = TypeVar("Result")

LEASE_SECONDS: Final = 1.0  # Of claims and effects. A crash moves the clock by it, and should disturb few timers.
_NS_PER_MS: Final = 1_000_000
_TIMERS_AT_ONCE: Final = 100
_PATIENCE_SECONDS: Final = 0.05  # For the threads of PostgreSQL.
_SKIPS_MAX: Final = 10_000  # A run that needs more does not end.


class StuckRun(AssertionError):
    """A run cannot end: it waits for something that neither a timer nor the host will bring."""


class AsyncHostTest:
    """A plane in memory under a manual clock, and a host for an app: `async with AsyncHostTest(app) as test`.

    It runs on the event loop of the test, so that a step that sleeps takes real time. `HostTest` has a loop of its own,
    where it does not.
    """

    def __init__(
        self,
        app: HostApp | None = None,
        *,
        url: str = "memory:",
        universe: str = UNIVERSE,
        start: datetime | None = None,
        boundary: Boundary | None = None,
        calls: CallLog | None = None,
        **options: Unpack[HostOptions],
    ) -> None:
        """An environment for one test.

        Args:
            app: the programs, workflows and adapters; those of the default app if it is left out.
            url: the plane, which no other process uses meanwhile; in memory by default.
            universe: where they run.
            start: the time at which the clock starts, with a time zone.
            boundary: is told about each boundary of the host, and may interrupt it there.
            calls: is told about each step and adapter that is called.
            options: those of the host, as `AsyncHost` describes them. A claim lasts one second by default.
        """
        self.clock = ManualClock() if start is None else ManualClock(_milliseconds(start))
        self.app = app or DEFAULT_HOST_APP
        self.universe = checked_name("universe", universe)
        self._boundary = boundary
        self._calls = calls
        self._options: HostOptions = {"lease_seconds": LEASE_SECONDS, **options}
        ids = IdSource(0) if url == "memory:" else None
        self.services = open_plane(url, Options(clock=self.clock, ids=ids, gc_every_seconds=None)).services
        for job in self.services.background.jobs:  # A test fires timers itself.
            job.pause()
        # Events start jobs that fire timers and write session logs.
        self.services.database.publish = discard
        self.sync_transport = EmbeddedTransport(self.services)
        self.plane = AsyncPlane(AsyncEmbeddedTransport(self.services), self.universe)
        self._processes: list[HostProcess] = []
        self._started = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the host, and drop the plane."""
        for process in self._processes:
            await process.kill()
        self._processes.clear()
        self.sync_transport.close()

    @property
    def now(self) -> datetime:
        """The time of the clock."""
        return datetime.fromtimestamp(self.clock.now_ms() / 1_000, UTC)

    def plane_of(self, universe: str) -> AsyncPlane:
        """The same plane, in another universe; the host does not run what is there."""
        return AsyncPlane(AsyncEmbeddedTransport(self.services), universe)

    async def run_until_idle(self) -> None:
        """Run everything that is ready now, and what follows from it: turns, steps, adapters, timers that are due."""
        while True:
            for process in self._processes or [self._start_process()]:
                if await self._run(process):
                    break
            else:
                return

    async def skip(self) -> bool:
        """Run everything that is ready, then move the clock to the next time at which something is due, and run that.

        These are timers, and further attempts of steps, effects and turns. Returns False if there is none.
        """
        await self.run_until_idle()
        due_ms = self.next_due_ms()
        if due_ms is None:
            return False
        self.clock.jump_to_ms(max(due_ms, self.clock.now_ms()))
        await self.run_until_idle()
        return True

    async def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, milliseconds: float = 0
    ) -> None:
        """Move the clock forward. Everything that becomes due on the way runs at its own time."""
        delta = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
        until_ms = self.clock.now_ms() + round(delta.total_seconds() * 1_000)
        await self.run_until_idle()
        while (due_ms := self.next_due_ms()) is not None and due_ms <= until_ms:
            self.clock.jump_to_ms(max(due_ms, self.clock.now_ms()))
            await self.run_until_idle()
        self.clock.advance_ms(until_ms - self.clock.now_ms())
        await self.run_until_idle()

    async def run_to_end(self, run: AsyncRun | Run | str) -> Any:
        """Run everything, moving the clock from one timer to the next, until the run has ended; its result.

        Raises:
            StuckRun: it waits for something that does not come, such as a signal.
            RunFailed, RunCancelled: it ended so.
        """
        handle = self.plane.workflows.get(run) if isinstance(run, str) else run
        id = handle.id
        await self.run_until_idle()
        for _ in range(_SKIPS_MAX):
            if (await self.plane.workflows.describe(id)).ended_ms is not None:
                return await self.plane.workflows.result(id, workflow=handle._workflow)
            if await self._keeps_failing(id) or not await self.skip():
                raise StuckRun(await self._why_stuck(id))
        raise StuckRun(f"Run {id} has not ended after {_SKIPS_MAX} timers; it may never end")

    async def state(self, world: str) -> Any:
        """The state that the program of a world has returned last; None before its first event."""
        found = await self.plane.world(world).hosting()
        program = self.app.programs.get(found.program or "")
        if not isinstance(program, Program):
            raise InvalidArgument(f"World {world} has no program of the app; its program is {found.program}")
        return (await self.plane.world(world).restore(program)).state

    async def restart(self) -> None:
        """Let the host crash, and start another one: what is committed stays, and the claims of the first one end."""
        for process in self._processes:
            await process.kill()
        self._processes.clear()
        self.clock.advance_ms(round(self._options["lease_seconds"] * 1_000))

    def next_due_ms(self) -> int | None:
        """The next time at which something is due; None if there is none."""
        found = self.services.database.read(
            _next_due_ms, self.universe, list(self.app.runners), list(self.app.adapters)
        )
        return found if found is None else int(found)

    # The processes of hosts.

    def _start_process(self) -> HostProcess:
        self._started += 1
        options: HostOptions = {"owner": f"host-{self._started}", **self._options}
        process = HostProcess(
            self.services, self.universe, self.app, boundary=self._boundary, calls=self._calls, **options
        )
        self._processes.append(process)
        return process

    async def _run(self, process: HostProcess) -> bool:
        """Fire timers that are due, and run what is ready; whether anything has happened since the call before."""
        commits = process.database.commits
        action = await process.run(lambda: _run_ready(process, self.universe))
        if action == "kill":
            await self.restart()
            return True
        if action == "stall":
            await self._overtake(process)
            return True
        if action == "endless":
            raise AssertionError(
                f"The host is not idle after {COMMITS_MAX} commits at the same time; do programs send each other "
                "events for ever?"
            )
        return process.database.commits != commits

    async def _overtake(self, stalled: HostProcess) -> None:
        """Let another host take over from one that is delayed, and let that one go on when the other one is at work."""
        self.clock.advance_ms(round(self._options["lease_seconds"] * 1_000))
        other = self._start_process()
        other.pauses_at_work = True
        await other.run(lambda: _run_ready(other, self.universe))
        stalled.release()
        await stalled.run(lambda: _run_ready(stalled, self.universe))
        other.release()

    async def _keeps_failing(self, id: str) -> bool:
        """Whether the code of a run fails to go on, as often as a host tries to handle an item."""
        return (await self.plane.world(RUN_PREFIX + id).hosting()).attempts >= self._options.get("max_attempts", 5)

    async def _why_stuck(self, id: str) -> str:
        hosted = await self.plane.world(RUN_PREFIX + id).hosting()
        if hosted.is_stopped or hosted.error:
            return f"Run {id} does not go on because of an error: {hosted.error}"
        waits = [_described(each.kind, each.name) for each in await self.plane.workflows.history(id) if each.is_pending]
        what = " and ".join(waits) or "nothing that is recorded"
        return f"Run {id} waits for {what}, and no timer is set that could end this"


class HostTest:
    """A plane in memory under a manual clock, and a host for an app: `with HostTest(app) as test`.

    Steps and adapters run on the thread of the test, on an event loop whose time moves by itself: `asyncio.sleep` in a
    step takes no time. Steps on queues run there, too, without workers.
    """

    def __init__(
        self,
        app: HostApp | None = None,
        *,
        url: str = "memory:",
        universe: str = UNIVERSE,
        start: datetime | None = None,
        boundary: Boundary | None = None,
        calls: CallLog | None = None,
        **options: Unpack[HostOptions],
    ) -> None:
        """An environment for one test, with the arguments of `AsyncHostTest`."""
        self._loop = VirtualLoop(patience_seconds=_PATIENCE_SECONDS if "//" in url else 0.0)
        self._test = AsyncHostTest(
            app, url=url, universe=universe, start=start, boundary=boundary, calls=calls, **options
        )
        self.clock = self._test.clock
        self.app = self._test.app
        self.plane = Plane(self._test.sync_transport, universe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the host, and drop the plane."""
        if not self._loop.is_closed():
            try:
                self._call(self._test.close)
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            finally:
                self._loop.close()

    @property
    def now(self) -> datetime:
        """The time of the clock."""
        return self._test.now

    def plane_of(self, universe: str) -> Plane:
        """The same plane, in another universe; the host does not run what is there."""
        return Plane(self._test.sync_transport, universe)

    def run_until_idle(self) -> None:
        """Run everything that is ready now, and what follows from it: turns, steps, adapters, timers that are due."""
        self._call(self._test.run_until_idle)

    def skip(self) -> bool:
        """Run everything that is ready, then move the clock to the next time at which something is due, and run that.

        These are timers, and further attempts of steps, effects and turns. Returns False if there is none.
        """
        return self._call(self._test.skip)

    def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, milliseconds: float = 0
    ) -> None:
        """Move the clock forward. Everything that becomes due on the way runs at its own time."""
        self._call(
            lambda: self._test.advance(
                days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds
            )
        )

    def run_to_end(self, run: Run | str) -> Any:
        """Run everything, moving the clock from one timer to the next, until the run has ended; its result.

        Raises:
            StuckRun: it waits for something that does not come, such as a signal.
            RunFailed, RunCancelled: it ended so.
        """
        return self._call(lambda: self._test.run_to_end(run))

    def state(self, world: str) -> Any:
        """The state that the program of a world has returned last; None before its first event."""
        return self._call(lambda: self._test.state(world))

    def restart(self) -> None:
        """Let the host crash, and start another one: what is committed stays, and the claims of the first one end."""
        self._call(self._test.restart)

    def call_async(self, scenario: Callable[[AsyncHostTest], Coroutine[Any, Any, Result]]) -> Result:
        """The result of a coroutine function that is called with the asynchronous form of this test, on its loop."""
        return self._call(lambda: scenario(self._test))

    def _call(self, function: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        if asyncio._get_running_loop() is not None:
            raise InvalidArgument("HostTest has an event loop of its own; use AsyncHostTest in coroutines")
        return self._loop.run_until_complete(function())


async def _run_ready(process: HostProcess, universe: str) -> None:
    """Fire the timers that are due, and run everything that is ready."""
    while await process.database.transact_async(fire_due_timers, universe):
        pass
    await process.host.run_ready()


def fire_due_timers(tx: Transaction, universe: str) -> int:
    """Fire timers that are due, as the nodes of a plane do; how many."""
    due = timers.due(tx, universe, until_ns=tx.now_ms * _NS_PER_MS, limit=_TIMERS_AT_ONCE)
    return timer_firing.fire(tx, universe, due)


def _next_due_ms(tx: Transaction, universe: str, programs: list[str], kinds: list[str]) -> int | None:
    timer_ns = timers.next_due_ns(tx, universe)
    turn_ms = hosting.candidates(tx, universe, programs=programs, owner=None, limit=1)
    found = [
        None if timer_ns is None else -(-timer_ns // _NS_PER_MS),
        effects.next_due_ms(tx, universe, kinds),
        turn_ms.next_ms,
    ]
    return min((each for each in found if each is not None), default=None)


def _described(kind: str, name: str) -> str:
    if kind == "wait":
        return f"the signal {name}"
    if kind == "queued":
        return f"the step {name}, which a worker of its queue runs"
    return f"{kind} {name}".strip()


def _milliseconds(start: datetime) -> int:
    if start.tzinfo is None:
        raise InvalidArgument(f"start is {start!r}; pass a datetime with a time zone")
    return round(start.timestamp() * 1_000)
