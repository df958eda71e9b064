"""Several hosts at once, under a seed: they pause, crash, lose answers and lose their claims.

The hosts are real ones, with programs, adapters and workflows. They share one plane in memory and one event loop whose
time moves by itself (`virtual_loop`); the clock of the plane follows it. The seed decides what happens at each boundary
of a host:

    kill      the process ends there, and another one starts a little later
    pause     everything in the process stands still, often for longer than its claims last
    refused   a commit is refused, and nothing is written
    lost      it is committed, and the host gets an error instead of the answer
    deploy    from some time on, every host that still has the first version of the code ends; with odd seeds

What gives worlds back is sent over a network that may deliver it late, or once more:

    late      the request arrives later, and what the host does next may be faster
    repeated  it arrives a second time, later

    python -m fastness.testing.hosts.fleets --seeds 1000       a thousand seeds
    python -m fastness.testing.hosts.fleets --seed 17 --show   one seed, with everything that its hosts did

In the end, everything that was asked for is done once: at most one host has written a world at a time, and the replay
of every journal gives the state that its host had, byte for byte. The second version has another step behind a patch:
an id is given to one step, whichever version runs it.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from fastness.clock import IdSource
from fastness.errors import CommitUnknown, FastnessError, Unreachable
from fastness.handles.plane import AsyncPlane
from fastness.handles.sync.plane import Plane
from fastness.hosts.adapters import EffectCall
from fastness.hosts.apps import HostApp
from fastness.hosts.programs import Event, TurnContext
from fastness.hosts.step_context import current_step
from fastness.hosts.workflows.retry import Retry
from fastness.hosts.workflows.run import WorkflowRun
from fastness.kv.events import discard
from fastness.layers.idempotency import KeyedCall
from fastness.names import UNIVERSE
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.open import Options, open_plane
from fastness.plane.services import Services
from fastness.runtime.background import BackgroundRunner
from fastness.runtime.maintenance.timer_loop import TimerFiring
from fastness.testing.clock import START_MS
from fastness.testing.histories import Violation
from fastness.testing.hosts.contents import read_contents, unchanged
from fastness.testing.hosts.processes import Action, HostProcess
from fastness.testing.hosts.virtual_loop import VirtualLoop
from fastness.wire.hosting import ReleaseWorlds
from fastness.wire.requests import Answer, Request
from fastness.wire.runs import COMPLETED

Fault = TypeVar("Fault", Action, float, FastnessError)

HOSTS: Final = 3
ACCOUNTS: Final = ("account-0", "account-1")
ORDERS: Final = 4
ERRANDS: Final = 3
_LEASE_SECONDS: Final = 4.0
_ERRAND_SLEEP_SECONDS: Final = _LEASE_SECONDS * 0.7  # Until about when an idle world is given back.
_TIMER_SECONDS: Final = 0.5  # How often due timers are fired.
_END_SECONDS_MAX: Final = 3_600.0  # Far longer than the hosts need for everything.


class FleetRates(msgspec.Struct, frozen=True):
    """The probability of each fault at a boundary."""

    kill: float = 0.015
    pause: float = 0.04
    refused: float = 0.02
    lost: float = 0.02
    late: float = 0.5  # This and the next one are probabilities per request that gives worlds back.
    repeated: float = 0.2


def make_app(choices: random.Random, *, version: int, steps: dict[str, str], shared_ids: list[str]) -> HostApp:
    """Accounts that take orders, a ledger that is told about them, and errands with flaky steps.

    `steps` gets the name of the step that each id was given to first, and `shared_ids` those that another one got, too.
    """
    app = HostApp()

    @app.program
    def account(state: Any, event: Event, context: TurnContext) -> Any:
        state = state or {"ordered": [], "paid": [], "reminded": []}
        if event.name == "order":
            order = event.json()["order"]
            context.call("pay", {"order": order}, max_attempts=1_000)
            context.timer(order, seconds=2)
            return {**state, "ordered": [*state["ordered"], order]}
        if event.is_receipt("pay"):
            order = event.json()
            context.send("ledger", {"entry": order})
            context.put("paid", {"order": order})
            return {**state, "paid": [*state["paid"], order]}
        return {**state, "reminded": [*state["reminded"], event.name]}

    @app.program
    def ledger(state: Any, event: Event, context: TurnContext) -> Any:
        del context
        return [*(state or []), event.json()["entry"]]

    @app.adapter("pay")
    async def pay(call: EffectCall) -> Any:
        await asyncio.sleep(choices.random())
        return call.json()["order"]

    async def look_up(errand: str) -> str:
        step = current_step()
        if (first := steps.setdefault(step.id, step.name)) != step.name:
            shared_ids.append(f"{first!r} and {step.name!r} were given the id {step.id}")
        await asyncio.sleep(choices.random())
        if choices.random() < 0.3:
            raise OSError("try again")
        return errand.upper()

    @app.workflow
    async def deliver(run: WorkflowRun, what: str) -> str:
        await run.sleep(1)
        return what

    @app.workflow
    async def errand(run: WorkflowRun, name: str) -> list[Any]:
        again = Retry(1_000, delay_seconds=0.5, factor=1.5, delay_seconds_max=3.0)
        await run.sleep(_ERRAND_SLEEP_SECONDS)
        how = "look up again" if version > 1 and run.patched("look up again") else "look up"
        first, second = await run.gather(
            run.step(look_up, name, retry=again, name=how), run.step(look_up, f"{name}-2", retry=again, name=how)
        )
        await run.put("found", {"errand": first})
        approval = await run.wait_for("approval", timeout=8)
        await run.send("ledger", {"entry": second})
        return [first, second, approval, await run.child(deliver, name)]

    return app


class Fleet:
    """One run of a seed."""

    def __init__(self, seed: int, rates: FleetRates | None = None) -> None:
        self.seed = seed
        self.events: list[str] = []  # What the hosts did, in order.
        self.faults: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._rates = rates or FleetRates()
        self._stale: list[str] = []
        self._shared_ids: list[str] = []
        self._version = 1  # Of the code of hosts that start.
        self._outdated: set[HostProcess] = set()  # Have the first version.
        self._is_calm = False  # The hosts are left alone, so that everything ends.
        self._loop = VirtualLoop()
        services = open_plane("memory:", Options(clock=_LoopClock(self._loop), ids=IdSource(seed))).services
        services.database.publish = discard
        self._services = services
        choices, steps = random.Random(seed + 1), dict[str, str]()
        self._apps = {
            version: make_app(choices, version=version, steps=steps, shared_ids=self._shared_ids) for version in (1, 2)
        }
        self._plane = AsyncPlane(AsyncEmbeddedTransport(services))
        self._processes: dict[int, HostProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def run(self) -> None:
        """Run it, and check the outcome.

        Raises:
            Violation: something was done twice or lost, or an old fence was accepted.
        """
        try:
            self._loop.run_until_complete(self._run())
            self._check()
        except Violation as violation:
            violation.add_note(f"to repeat it: python -m fastness.testing.hosts.fleets --seed {self.seed} --show")
            raise
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()
            self._services.stop()

    # What the hosts meet at their boundaries.

    def reach(self, process: HostProcess, name: str) -> Action | float | FastnessError | None:
        """Note a boundary, and decide what happens there."""
        self.events.append(f"{self._loop.time():9.3f} {process.host.owner} {name}")
        if self._version > 1 and process in self._outdated:
            return self._fault("deploy", "kill")
        if self._is_calm:
            return None
        chance, rates = self._random.random(), self._rates
        if chance < rates.kill:
            return self._fault("kill", "kill")
        chance -= rates.kill
        if chance < rates.pause:
            return self._fault("pause", self._random.uniform(0.1, 2 * _LEASE_SECONDS))
        chance -= rates.pause
        if name.startswith("before commit") and chance < rates.refused:
            return self._fault("refused", Unreachable("Refused on purpose"))
        if name.startswith("after commit") and chance < rates.lost:
            return self._fault("lost", CommitUnknown("Answer lost on purpose"))
        return None

    def note_stale(self, process: HostProcess, name: str) -> None:
        """An old fence was accepted."""
        self._stale.append(f"{process.host.owner} has committed {name} with an old fence")

    def delays(self) -> tuple[float, float]:
        """How late a request arrives, and how long after that it arrives once more, if it does."""
        late = repeated = 0.0
        if not self._is_calm and self._random.random() < self._rates.late:
            late = self._fault("late", self._random.uniform(0.0, _LEASE_SECONDS / 2))
        if not self._is_calm and self._random.random() < self._rates.repeated:
            repeated = self._fault("repeated", self._random.uniform(0.0, _LEASE_SECONDS))
        return late, repeated

    def _fault(self, name: str, what: Fault) -> Fault:
        self.faults[name] += 1
        self.events.append(f"{self._loop.time():9.3f} {name}")
        return what

    def repeat(self, request: Request[Any], seconds: float) -> None:
        """Deliver a request once more after some seconds, also if the process that has sent it has ended by then."""

        async def deliver() -> None:
            await asyncio.sleep(seconds)
            await self._plane._transport.call(request)

        self._tasks.append(asyncio.create_task(deliver(), context=Context()))

    # Its tasks.

    async def _run(self) -> None:
        for name in ACCOUNTS:
            await self._plane.world(name).create(program="account")
        await self._plane.world("ledger").create(program="ledger")
        self._tasks = [asyncio.create_task(self._keep_running(number)) for number in range(HOSTS)]
        self._tasks.append(asyncio.create_task(self._fire_timers()))
        if self.seed % 2:  # A host that ends gives nothing back late.
            after_seconds = _ERRAND_SLEEP_SECONDS + 4 * self._random.random()
            self._tasks.append(asyncio.create_task(self._deploy(after_seconds=after_seconds)))
        for number in range(ORDERS):
            await asyncio.sleep(self._random.random())
            await self._plane.world(ACCOUNTS[number % len(ACCOUNTS)]).send("order", {"order": f"o-{number}"})
            if number < ERRANDS:
                await self._plane.workflows.start("errand", f"e-{number}", id=f"e-{number}")
        await asyncio.sleep(3 * self._random.random())
        for number in range(0, ERRANDS, 2):  # The others wait for the timeout.
            await self._plane.workflows.signal(f"e-{number}", "approval", number)
        await asyncio.sleep(8 * self._random.random())
        self._is_calm = True
        until = self._loop.time() + _END_SECONDS_MAX
        while not await self._is_done():
            if self._loop.time() > until:
                raise Violation(f"Seed {self.seed}: the hosts have not done everything", [])
            await asyncio.sleep(1)

    async def _deploy(self, *, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        self._version = 2

    async def _keep_running(self, number: int) -> None:
        """Run a host, and start another one when it is killed."""
        for life in range(1, sys.maxsize):
            process = HostProcess(
                self._services,
                UNIVERSE,
                self._apps[self._version],
                boundary=self,
                connect=partial(_Network, self),
                owner=f"host-{number}.{life}",
                lease_seconds=_LEASE_SECONDS,
                snapshot_every=8,
                drain_seconds=60.0,
            )
            self._processes[number] = process
            if self._version == 1:
                self._outdated.add(process)
            if await process.run(process.host.run) != "kill":
                return
            await process.kill()
            await asyncio.sleep(2 * self._random.random())

    async def _fire_timers(self) -> None:
        runner = BackgroundRunner(timer=self._loop.time, starts_threads=False)
        firing = TimerFiring(self._services.database, self._services.consumers, shared=False)
        runner.add(firing.job)
        while True:
            firing.note_set(UNIVERSE)  # As a commit does that sets a timer.
            runner.run_due()
            await asyncio.sleep(_TIMER_SECONDS)

    async def _is_done(self) -> bool:
        if (await self._plane.workflows.list(state="running")).runs:
            return False
        if (await self._plane.effects.list()).effects or (await self._plane.timers.list()).timers:
            return False
        for name in (*ACCOUNTS, "ledger"):
            inbox = self._plane.world(name).inbox
            if await inbox.read(after=await inbox.cursor(), limit=1):
                return False
        return True

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for process in self._processes.values():
            await process.kill()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    # The outcome.

    def _check(self) -> None:
        plane = Plane(EmbeddedTransport(self._services))
        found = read_contents(plane, self._apps[self._version], unchanged)
        revived = [f"{number} runs had to be revived" for number in self._services.revived_runs.values()]
        wrong = [*self._stale, *self._shared_ids, *revived, *found.faults]
        orders = [f"o-{number}" for number in range(ORDERS)]
        errands = [f"e-{number}" for number in range(ERRANDS)]
        for index, name in enumerate(ACCOUNTS):
            state = found.values[f"the state of world {name}"]
            mine = orders[index :: len(ACCOUNTS)]
            if state["ordered"] != mine or sorted(state["paid"]) != mine or sorted(state["reminded"]) != mine:
                wrong.append(f"the state of {name} is {state}; its orders are {mine}")
        entries = sorted([*orders, *(f"{each}-2".upper() for each in errands)])
        ledger = found.values["the state of world ledger"]
        if sorted(ledger or []) != entries:
            wrong.append(f"the ledger has {sorted(ledger or [])}, and should have {entries}")
        for queue, expected in (("paid", orders), ("found", [each.upper() for each in errands])):
            found_messages = [msgspec.json.decode(each.payload or b"") for each in plane.queue(queue).peek(100)]
            messages = sorted(value for message in found_messages for value in message.values())
            if messages != expected:
                wrong.append(f"queue {queue} has {messages}, and should have {expected}")
        for number, each in enumerate(errands):
            outcome = [each.upper(), f"{each}-2".upper(), None if number % 2 else number, each]
            state, result = (found.values[f"the {what} of run {each}"] for what in ("state", "result"))
            if state != COMPLETED or result != outcome:
                wrong.append(f"run {each} is {state} with {result}, and should have {outcome}")
        if wrong:
            raise Violation(f"Seed {self.seed}:\n    " + "\n    ".join(wrong), [])


class _Network(AsyncEmbeddedTransport):
    """The way of a host to the plane."""

    def __init__(self, fleet: Fleet, services: Services) -> None:
        super().__init__(services)
        self._fleet = fleet

    def call(self, request: Request[Answer], call: KeyedCall | None = None) -> Coroutine[Any, Any, Answer]:
        gives_back = isinstance(request, ReleaseWorlds)
        return self._give_back(request) if gives_back else super().call(request, call)

    async def _give_back(self, request: Request[Answer]) -> Answer:
        late, repeated = self._fleet.delays()
        await asyncio.sleep(late)
        if repeated:
            self._fleet.repeat(request, repeated)
        return await super().call(request)


class _LoopClock:
    """The clock of a plane that follows the time of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_ms(self) -> int:
        return START_MS + int(self._loop.time() * 1_000)


def play_fleet(seed: int, rates: FleetRates | None = None) -> Fleet:
    """Run one seed, check it, and return what happened.

    Raises:
        Violation: something was done twice or lost, or an old fence was accepted. A note names the seed.
    """
    fleet = Fleet(seed, rates)
    fleet.run()
    return fleet


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fastness.testing.hosts.fleets", description="Run several hosts with random seeds."
    )
    parser.add_argument("--seeds", type=int, default=100, help="the number of seeds (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--show", action="store_true", help="print what the hosts did")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    faults: Counter[str] = Counter()
    for seed in seeds:
        fleet = Fleet(seed)
        try:
            fleet.run()
        except Violation as violation:
            sys.stdout.write(
                "\n".join([*(fleet.events if options.show else ()), str(violation), *violation.__notes__, ""])
            )
            return 1
        if options.show:
            sys.stdout.write("\n".join([*fleet.events, ""]))
        faults.update(fleet.faults)
    sys.stdout.write(f"{len(seeds)} seeds, {dict(faults)}: no violation\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
