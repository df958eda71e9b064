"""A seeded, deterministic scheduler: many logical clients use one database, with faults and a simulated clock.

`fastness.testing.scenarios` has the scenarios and the command that runs them.

A client is a coroutine that awaits operations and pauses. Each operation is invoked, executed and answered in three
separate steps. What it has to wait for is synced in the last one, so others read commits that are not durable yet. At
every step the seed decides which client runs next and which fault occurs:

    refused   nothing happened, and the client gets an error
    lost      it happened, and the client gets CommitUnknown
    late      the call, or its answer, is delayed
    crash     the client loses its state, at any point, and starts again
    power     the database loses every unsynced commit

Nothing depends on threads, the wall clock or the hash seed, so a seed always gives the same history, byte for byte.
"""

import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any, Final

import msgspec

from fastness.backends.memory import MemoryDatabase
from fastness.clock import IdSource
from fastness.errors import CommitUnknown, FastnessError, Unreachable
from fastness.kv import Database, Work
from fastness.testing.clock import ManualClock
from fastness.testing.faults import Committed, FaultyDatabase
from fastness.testing.histories import History
from fastness.tiers import Tier

STEPS_MAX: Final = 200_000  # A scenario that needs more does not terminate.


class Rates(msgspec.Struct, frozen=True):
    """The probability of each fault per operation; of `crash` and `power` per step of the scheduler."""

    refused: float = 0.05
    lost: float = 0.05
    late: float = 0.2
    crash: float = 0.003
    power: float = 0.002


class Simulation:
    """One run. Add clients, then call `run`. The clients' operations are in `history`."""

    def __init__(
        self, seed: int, open_database: Callable[..., Database] = MemoryDatabase, *, rates: Rates | None = None
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.history = History()
        self.database = FaultyDatabase(open_database(clock=self.clock, ids=IdSource(seed)))
        self.rates = rates or Rates()
        self.steps = 0
        self._clients: list[Client] = []
        self._sleeping: list[tuple[int, int, Client]] = []

    def add(self, name: str, program: "ClientProgram") -> None:
        """Add a client that runs `program`, and restarts it after each crash."""
        self._clients.append(Client(self, name, program))

    def run(self) -> None:
        """Run until every client has finished."""
        while any(not client.ended for client in self._clients):
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise RuntimeError(f"Seed {self.seed} did not end within {STEPS_MAX} steps")
            if self.random.random() < self.rates.power:
                self.database.power_loss()
                self.history.power_lost()
            ready = [client for client in self._clients if client.ready]
            if not ready:
                self._wake_next()
                continue
            client = self.random.choice(ready)
            if self.random.random() < self.rates.crash:
                client.crash()
            else:
                client.step()

    def close(self) -> None:
        for client in self._clients:
            client.stop()
        self.database.close()

    def sleep(self, client: "Client", milliseconds: int) -> None:
        """Suspend the client for this much simulated time."""
        client.ready = False
        heappush(self._sleeping, (self.clock.now_ms() + milliseconds, self.steps, client))

    def _wake_next(self) -> None:
        due_ms, _, client = heappop(self._sleeping)
        self.clock.jump_to_ms(max(due_ms, self.clock.now_ms()))
        client.ready = True


class _State(Enum):
    STARTING = auto()
    CALLING = auto()
    ANSWERED = auto()


class _Call:
    """A pending request; awaiting it yields to the scheduler."""

    def __init__(
        self, work: Work[Any] | None, args: tuple[Any, ...], tier: Tier, *, may_lose: bool = False, pause_ms: int = 0
    ) -> None:
        self.work = work
        self.args = args
        self.tier = tier
        self.may_lose = may_lose
        self.pause_ms = pause_ms

    def __await__(self) -> Generator["_Call", Any, Any]:
        return (yield self)


class Client:
    """A logical client: one coroutine, with one operation at a time."""

    def __init__(self, simulation: Simulation, name: str, program: "ClientProgram") -> None:
        self.name = name
        self.random = random.Random(simulation.random.getrandbits(64))
        self.ready = True
        self.ended = False
        self.crashes = 0
        self._simulation = simulation
        self._program = program
        self._coroutine: Coroutine[_Call, Any, None] | None = None
        self._state = _State.STARTING
        self._call: _Call | None = None
        self._committed: Committed[Any] | None = None
        self._error: FastnessError | None = None
        self._delayed = False

    def __lt__(self, other: "Client") -> bool:
        return self.name < other.name

    # For a client's program.

    def transact(
        self, work: Work[Any], *args: Any, tier: Tier = Tier.CRITICAL, may_lose: bool = False
    ) -> Awaitable[Any]:
        """Run `work` as one transaction. Raises Unreachable or CommitUnknown on an injected fault."""
        return _Call(work, args, tier, may_lose=may_lose)

    def pause(self, milliseconds: int) -> Awaitable[None]:
        """Sleep in simulated time."""
        return _Call(None, (), Tier.CRITICAL, pause_ms=milliseconds)

    async def operate(
        self,
        kind: str,
        key: Hashable,
        argument: Any,
        work: Work[Any],
        *args: Any,
        tier: Tier = Tier.CRITICAL,
        may_lose: bool = False,
    ) -> Any:
        """Run `work` and record it in the history as `kind` on `key`. Returns None if it failed, or may have."""
        history = self._simulation.history
        operation = history.invoke(f"{self.name}.{self.crashes}", kind, key, argument)
        try:
            result = await self.transact(work, *args, tier=tier, may_lose=may_lose)
        except FastnessError as error:
            history.raised(operation, error)
            return None
        history.ok(operation, result)
        return result

    # For the scheduler.

    def step(self) -> None:
        if self._state is _State.STARTING:
            self._coroutine = self._program(self)
            self._resume()
        elif self._delay_call():
            return
        elif self._state is _State.CALLING:
            self._execute()
        else:
            self._resume()

    def crash(self) -> None:
        """Lose all state. A call in progress may or may not still be executed."""
        if self._state is _State.CALLING and self.random.random() < 0.5:
            self._execute()
        self.stop()
        self.crashes += 1
        self._state, self._committed, self._error = _State.STARTING, None, None
        self._simulation.sleep(self, self.random.randrange(5_000))

    def stop(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()
            self._coroutine = None

    def _resume(self) -> None:
        assert self._coroutine is not None
        committed, error, answer = self._committed, self._error, None
        self._committed = self._error = None
        if committed is not None and error is None:
            try:
                answer = committed.wait()
            except FastnessError as refusal:
                error = refusal
        try:
            call = self._coroutine.send(answer) if error is None else self._coroutine.throw(error)
        except StopIteration:
            self.ended, self.ready, self._coroutine = True, False, None
            return
        self._call, self._state, self._delayed = call, _State.CALLING, False
        if call.work is None:
            self._state = _State.ANSWERED
            self._delayed = True
            self._simulation.sleep(self, call.pause_ms)

    def _execute(self) -> None:
        assert self._call is not None
        call, rates = self._call, self._simulation.rates
        self._state, self._delayed = _State.ANSWERED, False
        chance = self.random.random()
        if chance < rates.refused:
            self._error = Unreachable("Refused on purpose")
            return
        assert call.work is not None
        self._committed = self._simulation.database.commit(
            call.work, *call.args, tier=call.tier, may_lose=call.may_lose
        )
        if chance > 1 - rates.lost:
            self._error = CommitUnknown("Lost on purpose")

    def _delay_call(self) -> bool:
        """Maybe delay the current call or answer, at most once each. Returns whether it is delayed."""
        if self._delayed or self.random.random() >= self._simulation.rates.late:
            return False
        self._delayed = True
        self._simulation.sleep(self, self.random.randrange(1, 2_000))
        return True


ClientProgram = Callable[[Client], Coroutine[Any, Any, None]]
