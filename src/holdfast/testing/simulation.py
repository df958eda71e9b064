"""A seeded, deterministic scheduler: many logical clients against one database, under faults and a simulated clock.

    python -m holdfast.testing.simulation --seeds 1000         every scenario with a thousand seeds
    python -m holdfast.testing.simulation --seed 17 --show     the seed that failed, and its history

A client is a coroutine that awaits operations and pauses. Each operation is invoked, carried out and answered in three
separate moments, and at every moment the seed decides who moves next and what goes wrong:

    refused   nothing happened, the client is told so
    lost      it happened, the client is told that nobody knows
    late      the call, or its answer, travels for a while
    crash     the client is gone in the middle of whatever it did, and starts again
    power     the database loses every commit that no sync has covered

Nothing depends on threads, the wall clock or the hash seed, so one seed gives one history, to the byte.
"""

import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any, Final

import msgspec

from holdfast.backends.memory import MemoryDatabase
from holdfast.clock import IdSource
from holdfast.errors import CommitUnknown, HoldfastError, Unreachable
from holdfast.kv import Database, Work
from holdfast.testing.clock import ManualClock
from holdfast.testing.faults import FaultyDatabase
from holdfast.testing.histories import History
from holdfast.tiers import Tier

MOVES_MAX: Final = 200_000  # A scenario that has not ended by then never will.


class Rates(msgspec.Struct, frozen=True):
    """How often each thing goes wrong, per operation; `crash` and `power` per move of the scheduler."""

    refused: float = 0.05
    lost: float = 0.05
    late: float = 0.2
    crash: float = 0.003
    power: float = 0.002


class Simulation:
    """One run. Add clients, then `run` it to its end; what they saw is in `history`."""

    def __init__(
        self, seed: int, open_database: Callable[..., Database] = MemoryDatabase, *, rates: Rates | None = None
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.history = History()
        self.database = FaultyDatabase(open_database(clock=self.clock, ids=IdSource(seed)))
        self.rates = rates or Rates()
        self.moves = 0
        self._clients: list[Client] = []
        self._sleeping: list[tuple[int, int, Client]] = []

    def add(self, name: str, life: "Life") -> None:
        """A client that lives `life`, and lives it again from the start after each crash."""
        self._clients.append(Client(self, name, life))

    def run(self) -> None:
        """Move until every client has come to its end."""
        while any(not client.ended for client in self._clients):
            self.moves += 1
            if self.moves > MOVES_MAX:
                raise RuntimeError(f"Seed {self.seed} did not end within {MOVES_MAX} moves")
            if self.random.random() < self.rates.power:
                self.database.power_loss()
            ready = [client for client in self._clients if client.ready]
            if not ready:
                self._wake_next()
                continue
            client = self.random.choice(ready)
            if self.random.random() < self.rates.crash:
                client.crash()
            else:
                client.move()

    def close(self) -> None:
        for client in self._clients:
            client.stop()
        self.database.close()

    def sleep(self, client: "Client", milliseconds: int) -> None:
        """Let the client move again only when that much time has passed."""
        client.ready = False
        heappush(self._sleeping, (self.clock.now_ms() + milliseconds, self.moves, client))

    def _wake_next(self) -> None:
        due_ms, _, client = heappop(self._sleeping)
        self.clock.jump_to_ms(max(due_ms, self.clock.now_ms()))
        client.ready = True


class _State(Enum):
    STARTING = auto()
    CALLING = auto()
    ANSWERED = auto()


class _Call:
    """A request on its way; awaiting it hands it to the scheduler."""

    def __init__(self, work: Work[Any] | None, args: tuple[Any, ...], tier: Tier, pause_ms: int = 0) -> None:
        self.work = work
        self.args = args
        self.tier = tier
        self.pause_ms = pause_ms

    def __await__(self) -> Generator["_Call", Any, Any]:
        return (yield self)


class Client:
    """A logical client: one coroutine, one thing at a time."""

    def __init__(self, simulation: Simulation, name: str, life: "Life") -> None:
        self.name = name
        self.random = random.Random(simulation.random.getrandbits(64))
        self.ready = True
        self.ended = False
        self.crashes = 0
        self._simulation = simulation
        self._life = life
        self._coroutine: Coroutine[_Call, Any, None] | None = None
        self._state = _State.STARTING
        self._call: _Call | None = None
        self._answer: Any = None
        self._error: HoldfastError | None = None
        self._delayed = False

    def __lt__(self, other: "Client") -> bool:
        return self.name < other.name

    # What a client's life is made of.

    def transact(self, work: Work[Any], *args: Any, tier: Tier = Tier.CRITICAL) -> Awaitable[Any]:
        """Run `work` as one transaction; raises Unreachable or CommitUnknown when something goes wrong."""
        return _Call(work, args, tier)

    def pause(self, milliseconds: int) -> Awaitable[None]:
        """Do nothing for a while."""
        return _Call(None, (), Tier.CRITICAL, pause_ms=milliseconds)

    async def operate(
        self, kind: str, key: Hashable, argument: Any, work: Work[Any], *args: Any, tier: Tier = Tier.CRITICAL
    ) -> Any:
        """Run `work`, and record it in the history as `kind` on `key`; None when it failed or nobody knows."""
        history = self._simulation.history
        operation = history.invoke(f"{self.name}.{self.crashes}", kind, key, argument)
        try:
            result = await self.transact(work, *args, tier=tier)
        except HoldfastError as error:
            history.raised(operation, error)
            return None
        history.ok(operation, result)
        return result

    # How the scheduler moves it.

    def move(self) -> None:
        if self._state is _State.STARTING:
            self._coroutine = self._life(self)
            self._resume()
        elif self._late():
            return
        elif self._state is _State.CALLING:
            self._carry_out()
        else:
            self._resume()

    def crash(self) -> None:
        """Forget everything; a call that was under way may or may not be carried out still."""
        if self._state is _State.CALLING and self.random.random() < 0.5:
            self._carry_out()
        self.stop()
        self.crashes += 1
        self._state, self._answer, self._error = _State.STARTING, None, None
        self._simulation.sleep(self, self.random.randrange(5_000))

    def stop(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()
            self._coroutine = None

    def _resume(self) -> None:
        assert self._coroutine is not None
        answer, error, self._answer, self._error = self._answer, self._error, None, None
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

    def _carry_out(self) -> None:
        assert self._call is not None
        call, rates = self._call, self._simulation.rates
        self._state, self._delayed = _State.ANSWERED, False
        chance = self.random.random()
        if chance < rates.refused:
            self._error = Unreachable("Refused on purpose")
            return
        assert call.work is not None
        try:
            self._answer = self._simulation.database.transact(call.work, *call.args, tier=call.tier)
        except HoldfastError as error:
            self._error = error
        if chance > 1 - rates.lost:
            self._answer, self._error = None, CommitUnknown("Lost on purpose")

    def _late(self) -> bool:
        """Whether the call or answer at hand is still travelling; each is held up once at most."""
        if self._delayed or self.random.random() >= self._simulation.rates.late:
            return False
        self._delayed = True
        self._simulation.sleep(self, self.random.randrange(1, 2_000))
        return True


Life = Callable[[Client], Coroutine[Any, Any, None]]


if __name__ == "__main__":
    from holdfast.testing.scenarios import main

    raise SystemExit(main())
