"""A host as one process of its own: a test can end or delay it at each of its boundaries.

A boundary is what separates what has happened from what has not, for other processes and after a crash:

    before commit: …    the transaction has run, and nothing is written
    after commit: …     it is committed, and the host does not know yet
    before step: …      the function of a step, or an adapter, has not been called
    after step: …       it has returned, and its result is not recorded

A process that is killed stops there. Nothing of it runs any more, and what it has in memory is lost.
"""

import asyncio
import copy
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any, Final, Literal, NamedTuple, Protocol, Unpack

from fastness.errors import FastnessError
from fastness.handles.plane import AsyncPlane
from fastness.hosts.adapters import Adapter, EffectCall
from fastness.hosts.apps import HostApp
from fastness.hosts.host import AsyncHost
from fastness.hosts.hosted_world import HostedWorld
from fastness.hosts.runners import Runner, RunnerFactory
from fastness.hosts.threads import HostOptions
from fastness.kv import Database, Result, Transaction, Work
from fastness.kv.wrapped_database import WrappedDatabase
from fastness.layers import effects, hosting
from fastness.layers.effects import EffectKey
from fastness.layers.worlds import World
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.services import Services
from fastness.threads import run_in_thread
from fastness.tiers import Tier
from fastness.wire.atomic import CommitAtomic
from fastness.wire.effects import CompleteEffect, FailEffect
from fastness.wire.hosting import CommitTurn
from fastness.wire.requests import Request

AnyWork = Callable[[], Coroutine[Any, Any, Any]]
Action = Literal["kill", "stall", "endless"]

COMMITS_MAX: Final = 100_000  # Of what runs without the clock being moved. What needs more never ends.
_WORK: Final = ("hosting.commit", "effects.complete", "effects.fail", "before step", "before adapter")

_process: ContextVar["HostProcess | None"] = ContextVar("fastness_test_process", default=None)


class Boundary(Protocol):
    """Decides what happens at the boundaries of a process."""

    def reach(self, process: "HostProcess", name: str) -> Action | float | FastnessError | None:
        """Note that the process is at the boundary `name`; what to do with it, if anything.

        A number of seconds lets the whole process pause, and an error is raised in place of a commit or its answer.
        """
        ...

    def note_stale(self, process: "HostProcess", name: str) -> None:
        """Note that the process has committed something with a fence that is not the last one."""
        ...


class ObservedCall(NamedTuple):
    """A step, or an effect that an adapter carries out."""

    kind: Literal["step", "adapter"]
    world: str
    name: str
    id: str  # `<generation>.<number>` of a step, the idempotency key of an effect.

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.world}"


class CallLog(Protocol):
    """Is told about each step and each adapter that a process calls."""

    def begin(self, call: ObservedCall) -> None:
        """The function is called now."""
        ...

    def fail(self, call: ObservedCall) -> None:
        """It has raised an error."""
        ...


class HostProcess:
    """A host of an app on a plane, as if it were a process of its own."""

    def __init__(
        self,
        services: Services,
        universe: str,
        app: HostApp,
        *,
        boundary: Boundary | None = None,
        calls: CallLog | None = None,
        connect: Callable[[Services], AsyncEmbeddedTransport] = AsyncEmbeddedTransport,
        **options: Unpack[HostOptions],
    ) -> None:
        own = copy.copy(services)  # The same services, except that the database knows the process.
        self.database = own.database = ProcessDatabase(services.database, self)
        self.plane = AsyncPlane(connect(own), universe)
        self.boundary = boundary
        self.calls = calls
        self.is_killed = False
        self.pauses_at_work = False  # Delay it when it is about to work on what it has claimed.
        self._is_ending = False
        self._commits_before = 0
        self._paused_until = 0.0
        self._tasks: dict[asyncio.Task[Any], None] = {}  # Ordered, so that a seed gives the same run again.
        self._running: asyncio.Task[Any] | None = None
        self._interrupted: asyncio.Future[Action] | None = None
        self._released = asyncio.Event()
        self.host = AsyncHost(self.plane, _observed(app, self), **options)

    async def run(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Action | None:
        """Let the process execute `function`. Returns None once that has returned, or what interrupted the process.

        After a stall, the next call goes on with what was interrupted, if the process is released.
        """
        loop = asyncio.get_running_loop()
        if self._running is None:
            with self._own_tasks(loop):
                self._running = loop.create_task(function())
            self._commits_before = self.database.commits
        if self._interrupted is None:
            self._interrupted = loop.create_future()
        await asyncio.wait((self._running, self._interrupted), return_when=asyncio.FIRST_COMPLETED)
        if self._interrupted.done():
            interrupted, self._interrupted = self._interrupted, None
            if not self._running.done():
                return interrupted.result()
        running, self._running = self._running, None
        await running  # Raises its error.
        return None

    def release(self) -> None:
        """Let a process go on that was delayed at a boundary."""
        self._released.set()

    async def kill(self) -> None:
        """End the process as a crash does."""
        self.is_killed = self._is_ending = True
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._running = None

    # At its boundaries.

    def reach(self, name: str) -> None:
        """The process is at a boundary, in code that cannot wait.

        Raises:
            Interrupted: it goes no further.
        """
        if self.is_killed:
            return
        action = None if self.boundary is None else self.boundary.reach(self, name)
        if isinstance(action, FastnessError):
            raise action
        if action is None and self.pauses_at_work and any(word in name for word in _WORK):
            self.pauses_at_work, action = False, "stall"
        if self.database.commits - self._commits_before > COMMITS_MAX:
            action = "endless"
        if action is not None:
            raise Interrupted(action)

    async def reach_async(self, name: str) -> None:
        """The process is at a boundary."""
        await self.check_alive()
        try:
            self.reach(name)
        except Interrupted as interrupted:
            await self.stop_here(interrupted.action)

    async def stop_here(self, action: Action | float) -> None:
        """Wait for ever, until the process is released, or for some seconds."""
        if isinstance(action, float):
            self._paused_until = asyncio.get_running_loop().time() + action
            await self.check_alive()
            return
        self.is_killed = action != "stall"
        if self._interrupted is None:
            self._interrupted = asyncio.get_running_loop().create_future()
        if not self._interrupted.done():
            self._interrupted.set_result(action)
        if action == "stall":
            await self._released.wait()
        else:
            await self.check_alive()

    async def check_alive(self) -> None:
        """Wait for ever if the process is killed, and until it goes on if it pauses."""
        while (left := self._paused_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)
        if self._is_ending:
            raise asyncio.CancelledError("The process has ended")
        if self.is_killed:
            await asyncio.get_running_loop().create_future()

    async def observe(self, call: ObservedCall, work: AnyWork) -> Any:
        """Do the work of a step or an adapter between its two boundaries."""
        await self.reach_async(f"before {call}")
        if self.calls is not None:
            self.calls.begin(call)
        try:
            result = await work()
        except Exception:
            if self.calls is not None:
                self.calls.fail(call)
            await self.reach_async(f"after {call}")
            raise
        await self.reach_async(f"after {call}")
        return result

    # Its tasks.

    @contextmanager
    def _own_tasks(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Tasks that are created within belong to this process, and so do those that they create."""
        if not isinstance(factory := loop.get_task_factory(), _TaskFactory):
            loop.set_task_factory(_TaskFactory(factory))  # type: ignore[arg-type]
        token = _process.set(self)
        try:
            yield
        finally:
            _process.reset(token)

    def own(self, task: asyncio.Task[Any]) -> None:
        """Note a task of this process."""
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if self.is_killed and not task.cancelled():
            task.exception()  # It is not reported as never retrieved.


class Interrupted(BaseException):
    """A process was interrupted in code that cannot wait: handlers for ordinary errors do not catch it."""

    def __init__(self, action: Action | float) -> None:
        super().__init__(action)
        self.action: Final = action


class _TaskFactory:
    """Creates tasks that belong to the process of the code that creates them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = (
            asyncio.Task(coroutine, loop=loop, **options)
            if self._inner is None
            else self._inner(loop, coroutine, **options)
        )
        process = _process.get()
        if process is not None:
            process.own(task)
        return task


class ProcessDatabase(WrappedDatabase):
    """A plane's database, as one process uses it."""

    def __init__(self, inner: Database, process: HostProcess) -> None:
        super().__init__(inner)
        self._process = process
        self.data_format = inner.data_format
        self.commits = 0

    def transact(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        name = commit_name(work, args)
        try:
            result, has_written = self._inner.transact(
                self._run, name, work, args, kwargs, tier=tier, may_lose=may_lose
            )
        except Interrupted as interrupted:
            if not isinstance(interrupted.action, float):
                raise
            result, has_written = self._inner.transact(  # Code that cannot wait does not pause.
                self._run_again, work, args, kwargs, tier=tier, may_lose=may_lose
            )
        if has_written:
            self.commits += 1
            self._process.reach(f"after commit: {name}")
        return result  # type: ignore[no-any-return]

    async def transact_async(
        self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False, **kwargs: Any
    ) -> Result:
        await self._process.check_alive()
        name = commit_name(work, args)
        try:
            result, has_written = await self._inner.transact_async(
                self._run, name, work, args, kwargs, tier=tier, may_lose=may_lose
            )
        except Interrupted as interrupted:
            await self._process.stop_here(interrupted.action)
            result, has_written = await self._inner.transact_async(
                self._run_again, work, args, kwargs, tier=tier, may_lose=may_lose
            )
        if has_written:
            self.commits += 1
            await self._process.reach_async(f"after commit: {name}")
        return result  # type: ignore[no-any-return]

    def _run(
        self, tx: Transaction, name: str, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Result, bool]:
        return self._checked(tx, work, args, kwargs, before=f"before commit: {name}")

    def _run_again(
        self, tx: Transaction, work: Work[Result], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Result, bool]:
        return self._checked(tx, work, args, kwargs)

    def _checked(
        self,
        tx: Transaction,
        work: Work[Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: str | None = None,
    ) -> tuple[Result, bool]:
        """The result of a transaction, and whether it writes. One with an old fence must be refused."""
        stale = [each for each in requests_of(args) if _is_stale(tx, each)]
        result = work(tx, *args, **kwargs)
        if tx.has_writes and before is not None:
            self._process.reach(before)
        if stale and tx.has_writes and self._process.boundary is not None:
            refused = _refused(args, result)
            for each in stale:
                if each not in refused:
                    self._process.boundary.note_stale(self._process, _request_name(each))
        return result, tx.has_writes

    async def read_async(self, work: Work[Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        await self._process.check_alive()
        return await super().read_async(work, *args, tier=tier, **kwargs)

    def close(self) -> None:
        """Do nothing: the plane outlives the process."""


def _is_stale(tx: Transaction, request: Request[Any]) -> bool:
    """Whether a host writes with a fence that is not that of the last claim."""
    match request:
        case CommitTurn():
            held = hosting.find(tx, World(request.universe, request.world))
            return held is None or held.fence != request.fence
        case CompleteEffect() | FailEffect():
            key = EffectKey(request.world, request.height, request.number)
            effect = effects.find(tx, request.universe, key)
            return effect is None or effect.fence != request.fence
    return False


def _refused(args: Sequence[Any], result: Any) -> list[Request[Any]]:
    """The requests of a batch that were refused: each one has its own outcome."""
    match result:
        case list() as outcomes if args and isinstance(args[0], list):
            works = zip(args[0], outcomes, strict=False)
            return [each for work, outcome in works if isinstance(outcome, Exception) for each in requests_of(work)]
    return []


def commit_name(work: Work[Any], args: Sequence[Any]) -> str:
    """What a transaction does: the requests that it carries out, or the name of its function."""
    named = [_request_name(each) for each in requests_of(args)]
    if named:
        return ", ".join(named)
    inner = next((each for each in args if callable(each)), work)
    return getattr(inner, "__name__", type(inner).__name__)


def requests_of(args: Sequence[Any]) -> Iterator[Request[Any]]:
    """The requests among the arguments of a transaction, in their order."""
    for each in args:
        if isinstance(each, CommitAtomic):
            yield from each.operations
        elif isinstance(each, Request):
            yield each
        elif isinstance(each, partial):
            yield from requests_of((*each.args, *each.keywords.values()))
        elif isinstance(each, list | tuple):
            yield from requests_of(each)


def _request_name(request: Request[Any]) -> str:
    tag = str(request.__struct_config__.tag)
    for field in ("world", "id", "queue", "key"):
        if isinstance(about := getattr(request, field, None), str):
            return f"{tag} of {about}"
    return tag


def _observed(app: HostApp, process: HostProcess) -> HostApp:
    """The same app, whose steps and adapters tell the process when they are called."""
    observed = copy.copy(app)
    observed._adapters = {kind: _observed_adapter(adapter, process) for kind, adapter in app.adapters.items()}
    observed._runners = {name: _observed_runner(factory, process) for name, factory in app.runners.items()}
    return observed


def _observed_adapter(adapter: Adapter, process: HostProcess) -> Adapter:
    async def carry_out(call: EffectCall) -> Any:
        observed = ObservedCall("adapter", call.world, call.kind, call.idempotency_key)
        return await process.observe(observed, partial(_called, adapter, call))

    return Adapter(adapter.kind, carry_out)


async def _called(adapter: Adapter, call: EffectCall) -> Any:
    return await (adapter.function(call) if adapter.is_async else run_in_thread(adapter.function, call))


def _observed_runner(factory: RunnerFactory, process: HostProcess) -> RunnerFactory:
    def make(world: HostedWorld) -> Runner:
        seeds = count()

        def around_step(id: str, name: str, work: AnyWork) -> Coroutine[Any, Any, Any]:
            return process.observe(ObservedCall("step", world.name, name, id), work)

        world.around_step = around_step
        world.runs_tasks_here = True
        # The same in each run of a test.
        world.new_seed = lambda: hashlib.sha256(f"{world.name} {world.head} {next(seeds)}".encode()).digest()[:16]
        return factory(world)

    return make
