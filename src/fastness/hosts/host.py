"""The host: claims worlds that have work, runs their turns, and carries out effects.

    claim ──► held: one task a world, a turn at a time ──► idle for half a lease ──► given back
                 │                  └─► the turn fails ──► given back, with work after a back-off
                 └─► the claim is lost ──► dropped, without a commit

Worlds take turns: a world with more items than one batch goes to the end of the line. A host that holds as many worlds
as it may gives each back after its turn, so that every world with work is served.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import msgspec

from fastness.errors import (
    Backend,
    Busy,
    Closed,
    FastnessError,
    HeadAdvanced,
    InvalidArgument,
    Unsupported,
    WorkflowChanged,
)
from fastness.handles.plane import AsyncPlane
from fastness.hosts.adapters import AdapterPool
from fastness.hosts.apps import DEFAULT_HOST_APP, HostApp
from fastness.hosts.failures import claim_for_ever, text_of
from fastness.hosts.hosted_world import HostedWorld, HostPolicy
from fastness.hosts.programs import Program
from fastness.hosts.runners import Runner
from fastness.hosts.step_context import StepPlanes
from fastness.limits import (
    HOST_LEASE_SECONDS,
    HOST_WORLDS_MAX,
    HOSTED_WORLDS_MAX,
    TURN_DELAY_SECONDS,
    TURN_DELAY_SECONDS_MAX,
)
from fastness.wire import AsyncTransport
from fastness.wire.hosting import ClaimedWorld, ClaimWorlds, FailTurn, GivenBack, ReleaseWorlds, RenewWorlds
from fastness.wire.worlds import CompactWorld

Item = TypeVar("Item")

_log = logging.getLogger("fastness.host")
_CLAIMED_AT_ONCE: Final = 64  # So that hosts that start together share the worlds.
_CHECKS_PER_LEASE: Final = 4  # How often claims are renewed, and idle worlds looked for.


class HostStats(msgspec.Struct):
    """Counts of a host since it was created, and the worlds that it holds now."""

    turns: int = 0
    failed_turns: int = 0
    lost_worlds: int = 0  # Claims that ended before they were given back.
    effects_completed: int = 0
    effects_failed: int = 0  # Failed attempts.
    worlds: int = 0


class AsyncHost:
    """Runs the programs of an app until it is stopped: `await host.run()`, or `async with AsyncHost(plane): …`."""

    def __init__(
        self,
        plane: AsyncPlane,
        app: HostApp | None = None,
        *,
        programs: Iterable[str | Program] | None = None,
        owner: str | None = None,
        concurrency: int = 64,
        lease_seconds: float = HOST_LEASE_SECONDS,
        effect_concurrency: int = 16,
        snapshot_every: int = 256,
        on_error: Literal["set_aside", "stop"] = "set_aside",
        max_attempts: int = 5,
        drain_seconds: float = 10.0,
    ) -> None:
        """A host for the worlds of one universe.

        Args:
            plane: where the worlds are.
            app: the programs and adapters; those of `fastness.program` and `fastness.adapter` by default.
            programs: run only these programs of the app.
            owner: the name of this host, which no other one has.
            concurrency: how many turns run at a time.
            lease_seconds: after how long the worlds of a host that died continue on another one.
            effect_concurrency: how many adapters run at a time.
            snapshot_every: after how many records of its journal a snapshot of a world is taken.
            on_error: what becomes of an item that a program fails to handle: it is set aside, or its world is stopped.
            max_attempts: after how many attempts.
            drain_seconds: how long a host that stops waits for running turns, steps and adapters.

        Raises:
            InvalidArgument: the app has nothing to run, or an argument is out of range.
        """
        if not isinstance(plane, AsyncPlane):
            raise InvalidArgument(f"AsyncHost needs an AsyncPlane, not {type(plane).__name__}; use Host for a Plane")
        if min(concurrency, effect_concurrency, snapshot_every, max_attempts) < 1 or lease_seconds <= 0:
            raise InvalidArgument("concurrency, snapshot_every, max_attempts and lease_seconds are positive numbers")
        if on_error not in ("set_aside", "stop"):
            raise InvalidArgument(f'on_error is {on_error!r}; it is "set_aside" or "stop"')
        self.owner = owner or f"{socket.gethostname()[:100]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._app = app or DEFAULT_HOST_APP
        self._programs = _chosen(self._app, programs)
        self._transport = plane._transport
        self._universe = plane.universe
        self._policy = HostPolicy(max_attempts, on_error, snapshot_every, lease_seconds)
        self._lease_seconds = lease_seconds
        self._drain_seconds = drain_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._held: dict[str, _Held] = {}
        self._stopping = asyncio.Event()
        self._stats = HostStats()
        self._failures = 0  # Turns in a row that failed because of the plane.
        self._closing: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # A turn is wanted.
        self._compactor = _Compactor(self._transport, self._universe)
        self._planes = StepPlanes(self._transport, self._universe)
        self._effects = AdapterPool(
            self._transport,
            self._universe,
            self.owner,
            self._app.adapters,
            concurrency=effect_concurrency,
            lease_seconds=lease_seconds,
        )

    @property
    def programs(self) -> list[str]:
        """The names of the programs that it runs."""
        return list(self._programs)

    @property
    def stats(self) -> HostStats:
        """Counts until now."""
        return msgspec.structs.replace(
            self._stats,
            effects_completed=self._effects.completed,
            effects_failed=self._effects.failed,
            worlds=len(self._held),
        )

    async def run(self) -> None:
        """Run worlds until `stop`. Then running turns and adapters are finished, and all worlds given back.

        Raises:
            FastnessError: worlds cannot be claimed, and a retry cannot succeed (its `retry` is `never`).
        """
        claiming = [asyncio.create_task(claim_for_ever("worlds", self._claim))]
        if self._app.adapters:
            claiming.append(asyncio.create_task(self._effects.run()))
        keeping = [asyncio.create_task(self._renew_for_ever()), asyncio.create_task(self._compactor.run())]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([*claiming, *keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            await _end(*claiming, stopping)
            await self._drain()
            await _end(*keeping)
            self._planes.close()
        for loop in (*claiming, *keeping):
            if not loop.cancelled() and (error := loop.exception()) is not None:
                raise error

    def stop(self) -> None:
        """Make `run` drain and return. Call it on the event loop of the host."""
        self._stopping.set()

    async def run_ready(self) -> int:
        """Run the turns and effects that are ready now, and those that follow from them; how many there were.

        For tests and scripts: nothing runs when it returns, and all worlds are given back.
        """
        try:
            return await self._run_ready()
        finally:
            if turns := self._turns():
                await asyncio.wait(turns)
            await self._effects.finish()
            await self._close(list(self._held.values()))
            self._planes.close()

    async def _run_ready(self) -> int:
        count = 0
        while True:
            self._changed.clear()
            claimed = await self._claim(wait_seconds=0.0)
            effects = await self._effects.claim()
            count += claimed + effects
            if turns := self._turns():
                await asyncio.wait(turns)
            await self._effects.finish()
            if claimed or effects or turns:
                continue
            if not any(held.runner.is_active for held in self._held.values()):
                return count
            await self._changed.wait()

    def _turns(self) -> list[asyncio.Task[None]]:
        """The tasks that run turns now."""
        return [held.task for held in self._held.values() if held.task is not None]

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._running is not None:
            await self._running

    async def _claim(self, *, wait_seconds: float) -> int:
        """Claim worlds that have work, and start their turns; how many."""
        if len(self._held) >= HOST_WORLDS_MAX:
            idle = sorted((held for held in self._held.values() if held.is_idle), key=lambda held: held.idle_since)
            await self._close(idle[:_CLAIMED_AT_ONCE])
        room = HOST_WORLDS_MAX - len(self._held)
        request = ClaimWorlds(
            self._programs if room > 0 else [],  # A full host is still told about items for the worlds that it holds.
            self.owner,
            min(max(room, 1), _CLAIMED_AT_ONCE),
            self._lease_seconds,
            wait_seconds,
            self._universe,
        )
        claimed = (await self._transport.call(request)).worlds
        for claim in claimed:
            self._accept(claim)
        return len(claimed)

    def _accept(self, claim: ClaimedWorld) -> None:
        """Take a claimed world, or the items that arrived for one that is held."""
        held = self._held.get(claim.world)
        if not claim.is_new:
            # One that is being given back stays so: with items left, it is ready, and the next claim has another fence.
            if held is not None and held.world.fence == claim.fence:
                held.world.add(claim.items)
                self._want_turn(held)
            return
        if held is not None:  # Its claim had ended, and this is another one.
            self._lose(held)
        factory = self._app.runners[claim.program]
        world = HostedWorld(
            self._transport,
            self._universe,
            self.owner,
            claim,
            policy=self._policy,
            request_turn=lambda: self._want_turn(new),
            request_compaction=self._compactor.want,
            planes=self._planes,
        )
        new = _Held(world, factory(world))
        self._held[world.name] = new
        self._want_turn(new)

    def _want_turn(self, held: "_Held") -> None:
        if self._held.get(held.world.name) is not held:
            return
        self._changed.set()
        if held.world.is_lost:  # A commit between turns has found that out.
            if held.task is None:
                self._lose(held)
            return
        held.wants_turn = True
        if held.task is None and not self._stopping.is_set():
            held.task = asyncio.create_task(self._run_turns(held))
            held.task.add_done_callback(_log_unexpected)

    async def _run_turns(self, held: "_Held") -> None:
        """Run the turns of a world while it has work."""
        world = held.world
        failure: Exception | None
        try:
            while held.wants_turn and not self._stopping.is_set() and not world.is_lost:
                async with self._slots:
                    held.wants_turn = False
                    try:
                        await held.runner.run_turn()
                    except asyncio.CancelledError:
                        held.wants_turn = True  # What follows from its commit may not have been begun.
                        raise
                    except Exception as error:
                        failure = error
                    else:
                        failure = None
                if failure is not None:
                    held.wants_turn = True
                    await self._handle_failure(held, failure)
                    return
                self._stats.turns += 1
                self._failures = 0
                held.wants_turn = held.wants_turn or bool(world.items)
                if len(self._held) >= HOST_WORLDS_MAX and not held.runner.is_active:
                    held.task = None
                    await self._close([held])  # Other worlds may wait.
                    return
                await asyncio.sleep(0)
            if world.is_lost:
                await self._drop(held)
        finally:
            held.task = None
            held.idle_since = asyncio.get_running_loop().time()

    async def _handle_failure(self, held: "_Held", error: Exception) -> None:
        """Give a world back whose turn has failed."""
        world = held.world
        if world.is_lost:
            self._stats.lost_worlds += 1
            _log.warning("world %s is lost: %s", world.name, error)
            await self._drop(held)
            return
        if isinstance(error, HeadAdvanced):
            _log.info("world %s has records that this host does not know; it is restored", world.name)
            await self._close([held])
            return
        self._stats.failed_turns += 1
        if isinstance(error, Backend | Closed):
            self._failures += 1
            _log.warning("a turn of world %s failed because of the plane: %s", world.name, error)
            await self._pause(_back_off(self._failures))  # The claim keeps other hosts from trying it meanwhile.
            await self._close([held])
            return
        # What a full mailbox or queue refuses is tried again until it is accepted.
        is_last = world.attempts + 1 >= self._policy.max_attempts and not isinstance(error, Busy)
        is_stopped = is_last and (isinstance(error, WorkflowChanged) or self._policy.on_error == "stop")
        _log.error(
            "attempt %d of a turn of world %s failed%s",
            world.attempts + 1,
            world.name,
            "; it is stopped" if is_stopped else "",
            exc_info=error,
        )
        await self._drop(held)
        request = FailTurn(
            world.name,
            self.owner,
            world.fence,
            text_of(error),
            _back_off(world.attempts + 1),
            is_stopped,
            self._universe,
        )
        try:
            await self._transport.call(request)
        except FastnessError as refused:  # It is lost, paused or deleted, or its claim ends.
            _log.warning("the failure of world %s is not recorded: %s", world.name, refused)

    async def _renew_for_ever(self) -> None:
        """Renew the claims on worlds that are in use, and give idle ones back."""
        while True:
            await asyncio.sleep(self._lease_seconds / _CHECKS_PER_LEASE)
            try:
                idle_before = asyncio.get_running_loop().time() - self._lease_seconds / 2
                await self._close(
                    [each for each in self._held.values() if each.is_idle and each.idle_since < idle_before]
                )
                for some in _chunks(list(self._held.values())):
                    await self._renew(some)
            except FastnessError as error:
                _log.warning("claims are not renewed: %s", error)

    async def _renew(self, some: "Sequence[_Held]") -> None:
        worlds = [held.proof for held in some]
        request = RenewWorlds(worlds, self.owner, self._lease_seconds, self._universe)
        renewed = {(each.world, each.fence) for each in (await self._transport.call(request)).worlds}
        for held in some:
            if held.proof not in renewed and self._held.get(held.world.name) is held:
                self._stats.lost_worlds += 1
                _log.warning("world %s is lost: its claim has ended", held.world.name)
                self._lose(held)

    def _lose(self, held: "_Held") -> None:
        """Drop a world whose claim is lost. Its running turn cannot commit."""
        held.world.is_lost = True
        if self._held.get(held.world.name) is held:
            del self._held[held.world.name]
        if held.task is None:
            closing = asyncio.create_task(self._drop(held))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _drop(self, held: "_Held") -> None:
        """Close the runner of a world that is not used any more."""
        if self._held.get(held.world.name) is held:
            del self._held[held.world.name]
        try:
            await held.runner.close()
        except Exception:
            _log.exception("unexpected error while world %s was closed", held.world.name)

    async def _close(self, some: "Sequence[_Held]") -> None:
        """Give worlds back. Those that do something between turns have work for another host at once."""
        given: list[GivenBack] = []
        for held in some:
            seen = held.seen  # Closing it forgets that.
            await self._drop(held)
            if not held.world.is_lost:
                given.append(seen)
        for chunk in _chunks(given):
            try:
                await self._transport.call(ReleaseWorlds(list(chunk), self.owner, self._universe))
            except FastnessError as error:
                _log.warning("worlds are not given back; their claims end by themselves: %s", error)

    async def _drain(self) -> None:
        """Finish running turns, steps and adapters, and give all worlds back."""
        ending = time.monotonic() + self._drain_seconds
        if turns := self._turns():
            _, late = await asyncio.wait(turns, timeout=self._drain_seconds)
            await _end(*late)
        draining = [asyncio.create_task(held.runner.drain()) for held in self._held.values() if held.runner.is_active]
        if draining:
            _, unfinished = await asyncio.wait(draining, timeout=max(ending - time.monotonic(), 0.0))
            await _end(*unfinished)
        await self._close(list(self._held.values()))
        await self._effects.finish(max(ending - time.monotonic(), 0.0))
        self._effects.close()
        if self._closing:
            await asyncio.wait(list(self._closing))

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the host is stopped."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


class _Compactor:
    """Compacts the worlds that are asked for. What it cannot do is logged: the next baseline asks again."""

    def __init__(self, transport: AsyncTransport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
        self._wanted: asyncio.Queue[tuple[str, int]] = asyncio.Queue(HOST_WORLDS_MAX)
        self._is_possible = True

    def want(self, world: str, incarnation: int) -> None:
        """Compact a world soon. Nothing happens if many others wait already, or the plane has no object store."""
        if self._is_possible and not self._wanted.full():
            self._wanted.put_nowait((world, incarnation))

    async def run(self) -> None:
        """Compact worlds until it is cancelled."""
        while True:
            world, incarnation = await self._wanted.get()
            try:
                await self._transport.call(CompactWorld(world, universe=self._universe, incarnation=incarnation))
            except Unsupported:
                self._is_possible = False
            except FastnessError as error:
                _log.warning("world %s is not compacted: %s", world, error)


class _Held:
    """A world that this host holds."""

    def __init__(self, world: HostedWorld, runner: Runner) -> None:
        self.world = world
        self.runner = runner
        self.task: asyncio.Task[None] | None = None  # Runs its turns.
        self.wants_turn = False
        self.idle_since = asyncio.get_running_loop().time()

    @property
    def is_idle(self) -> bool:
        return self.task is None and not self.runner.is_active

    @property
    def proof(self) -> tuple[str, int]:
        return self.world.name, self.world.fence

    @property
    def seen(self) -> GivenBack:
        """What it is given back with."""
        has_work = self.runner.is_active or self.wants_turn
        return GivenBack(self.world.name, self.world.fence, self.world.head, has_work, self.runner.waits)


def _chosen(app: HostApp, programs: Iterable[str | Program] | None) -> list[str]:
    """The names of the programs to run.

    Raises:
        InvalidArgument: the app has nothing to run, or not one of them.
    """
    if programs is None:
        if not app.runners and not app.adapters:
            raise InvalidArgument("The app has no programs, workflows or adapters; import the modules that define them")
        return list(app.runners)
    chosen = [each if isinstance(each, str) else each.name for each in programs]
    unknown = [name for name in chosen if name not in app.runners]
    if unknown:
        known = ", ".join(app.runners) or "none"
        raise InvalidArgument(f"The app has no program {', '.join(unknown)}; it has {known}")
    return chosen


def _back_off(failures: int) -> float:
    return float(min(TURN_DELAY_SECONDS * 2.0 ** min(failures - 1, 30), TURN_DELAY_SECONDS_MAX))


def _chunks(items: Sequence[Item]) -> list[Sequence[Item]]:
    return [items[start : start + HOSTED_WORLDS_MAX] for start in range(0, len(items), HOSTED_WORLDS_MAX)]


def _log_unexpected(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("unexpected error while a turn was run", exc_info=error)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
