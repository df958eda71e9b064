"""Hosts that crash, or whose calls fail, at every boundary: what programs ask for is done once all the same.

The calls of a host are counted by a run without faults. Then the host crashes after each of them in turn, and another
one continues when its claims have ended; or one call is refused, or its answer is lost. Each run has a universe of its
own, and must end like the run without faults.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fastness import AsyncHost, EffectCall, Event, HostApp, Plane, TurnContext
from fastness.errors import Backend, CommitUnknown, Unreachable
from fastness.handles.plane import AsyncPlane
from fastness.hosts import host as host_module
from fastness.kv import Database
from fastness.limits import HOST_LEASE_SECONDS
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.testing.faults import Crash
from fastness.wire.json_values import decode_json
from fastness.wire.requests import Request
from tests.support.waiting import eventually

PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.
ROUNDS_MAX = 10  # Of what is ready, each after the time of a claim.
FOLLOW_UP_SECONDS = 3_600


def order(state: Any, event: Event, context: TurnContext) -> Any:
    """Charges a card, and lets the warehouse ship what was paid."""
    found = state or {"orders": 0, "charged": [], "shipped": 0, "fired": []}
    if event.name == "order":
        context.call("charge", event.json())
        context.timer("reminder", seconds=FOLLOW_UP_SECONDS)
        context.timer(f"follow-up-{event.json()}", seconds=FOLLOW_UP_SECONDS)
        return {**found, "orders": found["orders"] + 1}
    if event.is_receipt("charge"):
        number = event.json()["order"]
        context.send("warehouse", number)
        context.put("emails", {"paid": number})
        context.mail("ada", {"paid": number})
        context.publish(sorted([*found["charged"], number]))
        return {**found, "charged": sorted([*found["charged"], number])}
    if event.name == "shipped":
        context.cancel_timer("reminder")
        return {**found, "shipped": found["shipped"] + 1}
    return {**found, "fired": sorted([*found["fired"], event.name])}


def ship(state: Any, event: Event, context: TurnContext) -> Any:
    context.send("orders", event.json(), schema="shipped")
    return (state or 0) + 1


class Calls:
    """A transport whose call with the number `fail_at` is followed by a crash, refused, or whose answer is lost.

    After a crash nothing reaches the plane any more: the process is gone.
    """

    def __init__(self, inner: AsyncEmbeddedTransport, fail_at: int | None = None, fault: str = "crash") -> None:
        self.names: list[str] = []
        self.services = inner.services
        self._inner = inner
        self._fail_at = fail_at
        self._fault = fault
        self._has_crashed = False

    async def call(self, request: Request[Any]) -> Any:
        if self._has_crashed:
            raise Crash
        number = len(self.names)
        self.names.append(type(request).__name__)
        if number == self._fail_at and self._fault == "refused":
            raise Unreachable("refused on purpose")
        answer = await self._inner.call(request)
        if number == self._fail_at:
            if self._fault == "lost":
                raise CommitUnknown("lost on purpose")
            self._has_crashed = True
            raise Crash
        return answer


class Outcome(NamedTuple):
    """What is visible from outside when everything is done."""

    orders: Any
    warehouse: Any
    emails: list[Any]
    mails: list[Any]
    published: Any
    receipts: list[Any]  # In the journal.
    pending: tuple[int, int]  # Effects and timers.


class Scenario:
    """Two orders in a universe of their own."""

    def __init__(self, services: Services, clock: ManualClock, universe: str) -> None:
        self.plane = Plane(EmbeddedTransport(services), universe)
        self.charged: Counter[str] = Counter()
        self._services = services
        self._clock = clock
        self._universe = universe
        self.app = HostApp()
        self.order = self.app.program("order")(order)
        self.ship = self.app.program("ship")(ship)

        @self.app.adapter("charge")
        async def charge(call: EffectCall) -> Any:
            self.charged[call.idempotency_key] += 1
            return {"order": call.json()}

        self.plane.world("orders").create(program=self.order)
        self.plane.world("warehouse").create(program=self.ship)

    def run(self, fail_at: int | None = None, fault: str = "crash") -> Calls:
        """Run to the end, on one host and its successors; the calls of the first one."""
        first = Calls(AsyncEmbeddedTransport(self._services), fail_at, fault)
        for number in (1, 2):
            self.plane.world("orders").send("order", number)
        self._run_until(lambda: self._count("shipped") == 2, first)
        self._clock.advance_ms(FOLLOW_UP_SECONDS * 1_000)
        eventually(lambda: not self.plane.timers.list().timers)
        self._run_until(lambda: self._count("fired") >= 2, first)
        return first

    def outcome(self) -> Outcome:
        receipts = [
            decode_json(entry.value["payload"])["order"]
            for entry in self._entries("orders")
            if entry.kind == "ingress" and entry.value["type"] == "receipt"
        ]
        published = self.plane.state("worlds/orders").get()
        return Outcome(
            self._state("orders"),
            self._state("warehouse"),
            sorted(decode_json(message.payload or b"")["paid"] for message in self.plane.queue("emails").peek(10)),
            sorted(mail.json()["paid"] for mail in self.plane.mailbox("ada").read()),
            published and published.value,
            sorted(receipts),
            (len(self.plane.effects.list().effects), len(self.plane.timers.list().timers)),
        )

    def _run_until(self, is_done: Callable[[], bool], first: Calls) -> None:
        for _ in range(ROUNDS_MAX):
            asyncio.run(self._run_ready(first))
            if is_done():
                return
            self._clock.advance_ms(HOST_LEASE_SECONDS * 1_000)  # What a host lost is claimed again.
        raise AssertionError(f"not done: {self.outcome()}")

    async def _run_ready(self, first: Calls) -> None:
        """Run what is ready: a call that fails is repeated, and a host that crashes has a successor."""
        transport: Any = first
        while True:
            plane = AsyncPlane(transport, self._universe)
            host = AsyncHost(plane, self.app, effect_concurrency=1, concurrency=1, snapshot_every=4)
            try:
                await host.run_ready()
            except Backend:
                continue
            except Crash:
                transport = AsyncEmbeddedTransport(self._services)
                self._clock.advance_ms(HOST_LEASE_SECONDS * 1_000)
                continue
            return

    def _count(self, field: str) -> int:
        found = (self._state("orders") or {}).get(field, 0)
        return found if isinstance(found, int) else len(found)

    def _state(self, world: str) -> Any:
        program = self.order if world == "orders" else self.ship
        found = self.plane.world(world)
        assert found.verify(program.reducer).agrees, "a replay gives another state"
        return found.restore(program).state

    def _entries(self, world: str) -> list[Any]:
        found: list[Any] = []
        self.plane.world(world).replay(lambda _, entry: found.append(entry))
        return found


# A call that is refused does not reach the backend, and one whose answer is lost has been committed by it as any other.
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("memory", "crash"),
        pytest.param("rocksdb", "crash", marks=pytest.mark.rotating),
        pytest.param("postgres", "crash", marks=pytest.mark.rotating),
        pytest.param("memory", "lost", marks=pytest.mark.rotating),
        pytest.param("rocksdb", "lost", marks=pytest.mark.rotating),
        pytest.param("memory", "refused", marks=pytest.mark.rotating),
    ],
    indirect=["backend"],
)
def test_whatever_fails_at_any_boundary_everything_is_done_once(
    *, open_database: Callable[..., Database], backend: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "TURN_DELAY_SECONDS", 0.0)
    clock = ManualClock()
    with open_database(clock=clock) as database:
        services = Services(database, clock=clock)
        try:
            without = Scenario(services, clock, "without-faults")
            names = without.run().names
            wanted = without.outcome()
            assert wanted.orders == {
                "orders": 2,
                "charged": [1, 2],
                "shipped": 2,
                "fired": ["follow-up-1", "follow-up-2"],
            }
            assert (wanted.warehouse, wanted.emails, wanted.mails, wanted.published) == (2, [1, 2], [1, 2], [1, 2])
            assert (wanted.receipts, wanted.pending) == ([1, 2], (0, 0))
            for number, name in enumerate(names):
                scenario = Scenario(services, clock, f"{fault}-{number}")
                scenario.run(number, fault)
                assert scenario.outcome() == wanted, f"{fault} at call {number}, {name}"
                assert len(scenario.charged) == 2, "an effect has one idempotency key"
        finally:
            services.stop()
    print(f"{fault} on {backend}: {len(names)} calls: {dict(Counter(names))}")
    assert {"ClaimWorlds", "CommitAtomic", "CommitTurn", "CommitSnapshot", "ClaimEffects", "CompleteEffect"} <= {*names}


def ask(state: Any, event: Event, context: TurnContext) -> Any:
    """Sends every order to the bank, which is in another universe, and keeps its answers."""
    found = state or []
    if event.name == "order":
        context.send("teller@bank", event.json(), schema="pay")
        context.put("sent", event.json())
        return found
    return [*found, [event.json(), event.sender]]


def answer(state: Any, event: Event, context: TurnContext) -> Any:
    assert event.sender is not None
    context.send(event.sender, event.json(), schema="paid")
    return [*(state or []), event.json()]


def run_pair(services: Services, clock: ManualClock, shop: str, fail_at: int | None, fault: str) -> tuple[Calls, Any]:
    """Two orders of a shop, and their answers: the calls of the first host, and what is visible from outside."""
    app = HostApp()
    programs = {"orders": app.program("ask")(ask), "teller": app.program("answer")(answer)}
    planes = {"orders": Plane(EmbeddedTransport(services), shop), "teller": Plane(EmbeddedTransport(services), "bank")}
    orders = planes["orders"].world("orders")
    orders.create(program="ask")
    planes["orders"].hosting.set_policy(sends_to=["bank"], accepts_from=["bank"])
    for number in (1, 2):
        orders.send("order", number)
    first = Calls(AsyncEmbeddedTransport(services), fail_at, fault)
    transport: Any = first

    async def run_ready() -> None:
        for universe in (shop, "bank"):
            await AsyncHost(AsyncPlane(transport, universe), app, concurrency=1).run_ready()

    def state_of(world: str) -> Any:
        found = planes[world].world(world)
        assert found.verify(programs[world].reducer).agrees, "a replay gives another state"
        return found.restore(programs[world]).state or []

    for _ in range(ROUNDS_MAX):
        try:
            asyncio.run(run_ready())
        except Backend:
            continue
        except Crash:
            transport = AsyncEmbeddedTransport(services)
        if len(state_of("orders")) >= 2:
            break
        clock.advance_ms(HOST_LEASE_SECONDS * 1_000)
    clock.advance_ms(HOST_LEASE_SECONDS * 1_000)
    transport = AsyncEmbeddedTransport(services)
    asyncio.run(run_ready())  # What a crashed host left, if anything.
    sent = [decode_json(message.payload or b"") for message in planes["orders"].queue("sent").peek(10)]
    return first, (state_of("orders"), sent, state_of("teller")[-2:], len(state_of("teller")))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("memory", "crash"),
        ("rocksdb", "lost"),
        ("postgres", "crash"),
        ("memory", "refused"),
    ],
    indirect=["backend"],
)
def test_sends_between_universes_arrive_once_whatever_fails(
    *, open_database: Callable[..., Database], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "TURN_DELAY_SECONDS", 0.0)
    clock = ManualClock()
    with open_database(clock=clock) as database:
        services = Services(database, clock=clock)
        try:
            bank = Plane(EmbeddedTransport(services), "bank")
            bank.world("teller").create(program="answer")
            bank.hosting.set_policy(sends_to=["*"], accepts_from=["*"])
            without, _ = run_pair(services, clock, "shop", None, fault)
            assert "CommitAtomic" in without.names
            for number, name in enumerate(without.names):
                _, outcome = run_pair(services, clock, f"shop-{number}", number, fault)
                answers = [[each, "teller@bank"] for each in (1, 2)]
                assert outcome == (answers, [1, 2], [1, 2], 2 * number + 4), f"{fault} at call {number}, {name}"
        finally:
            services.stop()
