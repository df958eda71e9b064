"""Sends between universes: both universes must allow them, and the receiver sees who sent."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import AsyncHost, DomainEvent, Event, HostApp, Plane, SendPolicy, TurnContext, WorkflowRun
from fastness.errors import (
    FastnessError,
    Fenced,
    InvalidArgument,
    InvalidName,
    PayloadTooLarge,
    SendRefused,
    StepFailed,
    WorldNotActive,
    WorldNotFound,
)
from fastness.limits import INBOX_INLINE_BYTES_MAX, SEND_BYTES_MAX
from fastness.tasks.planes import async_plane_of
from fastness.testing import HostTest, crash_everywhere
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.hosting import CommitTurn, SendToWorld


@pytest.fixture(params=["memory", "dir"])
def shop(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Plane]:
    url = "memory:" if request.param == "memory" else f"dir:{tmp_path}"
    with fastness.open(url, clock=clock, universe="shop") as plane:
        yield plane


def bank_of(plane: Plane) -> Plane:
    return Plane(plane._transport, "bank")


def fence_of(plane: Plane, world: str = "orders") -> int:
    """The fence of a claim of host `h` on a new world."""
    plane.world(world).create(program="p")
    plane.world(world).send("go")
    [claimed] = plane.hosting.claim(["p"], owner="h", limit=1)
    return claimed.fence


def inbox_of(plane: Plane, world: str = "teller") -> list[Any]:
    return [item for _, item in plane.world(world).inbox.read()]


@pytest.mark.parametrize(
    ("sends_to", "accepts_from", "refused"),
    [
        ([], [], "Universe shop does not allow sends to bank; add bank to sends_to in shop"),
        (["other"], ["shop"], "Universe shop does not allow sends to bank; add bank to sends_to in shop"),
        (["bank"], [], "Universe bank does not accept sends from shop; add shop to accepts_from in bank"),
        (["*"], ["other"], "Universe bank does not accept sends from shop; add shop to accepts_from in bank"),
        (["bank"], ["shop"], None),
        (["*"], ["*", "other"], None),
    ],
)
def test_a_send_needs_the_consent_of_both_universes(
    *, shop: Plane, sends_to: list[str], accepts_from: list[str], refused: str | None
) -> None:
    bank = bank_of(shop)
    bank.world("teller").create()
    # The lists of the other direction do not matter.
    shop.hosting.set_policy(sends_to=sends_to, accepts_from=["bank"])
    bank.hosting.set_policy(sends_to=["shop"], accepts_from=accepts_from)
    fence = fence_of(shop)
    turn = CommitTurn("orders", "h", fence, 0, entries=[b"\x01"], universe="shop")
    send = SendToWorld("orders", "h", fence, "teller", "bank", "pay", b"1", b"k", "shop")
    if refused is None:
        shop._transport.call(CommitAtomic([turn, send]))
        assert inbox_of(bank) == [DomainEvent(schema="pay", payload=b"1", key=b"k", sender="orders@shop")]
    else:
        with pytest.raises(SendRefused, match=refused):
            shop._transport.call(CommitAtomic([turn, send]))
        assert inbox_of(bank) == []
        assert shop.world("orders").head() == 0, "the turn is refused with it"


WRONG: list[tuple[dict[str, Any], type[FastnessError]]] = [
    ({"owner": "other"}, Fenced),
    ({"fence": 0}, Fenced),
    ({"world": "idle"}, Fenced),
    ({"world": "nowhere"}, WorldNotFound),
    ({"world": "a@b"}, InvalidName),
    ({"to": "nowhere"}, WorldNotFound),
    ({"to": "archived"}, WorldNotActive),
    ({"to": "run:1"}, SendRefused),
    ({"to_universe": "shop"}, InvalidArgument),
    ({"payload": bytes(SEND_BYTES_MAX + 1)}, PayloadTooLarge),
    ({"schema": "x" * 2_000}, PayloadTooLarge),
]


@pytest.mark.parametrize(("changed", "error"), WRONG)
def test_a_wrong_send_stores_nothing(clock: ManualClock, changed: dict[str, Any], error: type[FastnessError]) -> None:
    with fastness.open("memory:", clock=clock, universe="shop") as shop:
        bank = bank_of(shop)
        for name in ("teller", "archived"):
            bank.world(name).create()
        bank.world("archived").archive()
        bank.workflows.start("w", id="1")
        for name in ("idle", "a@b"):
            shop.world(name).create(program="other")
        shop.hosting.set_policy(sends_to=["*"])
        bank.hosting.set_policy(accepts_from=["*"])
        fields: dict[str, Any] = {
            "world": "orders",
            "owner": "h",
            "fence": fence_of(shop),
            "to": "teller",
            "to_universe": "bank",
        }
        before = [inbox_of(bank, name) for name in ("teller", "archived", "run:1")]
        with pytest.raises(error):
            shop._transport.call(SendToWorld(**{**fields, "schema": "s", "universe": "shop", **changed}))
        assert [inbox_of(bank, name) for name in ("teller", "archived", "run:1")] == before
        fields["payload"] = bytes(SEND_BYTES_MAX)
        shop._transport.call(SendToWorld(**fields, schema="s", universe="shop"))
        assert len(inbox_of(bank)) == 1


def test_a_caller_cannot_name_a_sender(shop: Plane) -> None:
    shop.world("orders").create()
    with pytest.raises(InvalidArgument, match="only the plane sets"):
        shop.world("orders").inbox.put(DomainEvent(schema="pay", sender="teller@bank"))
    assert inbox_of(shop, "orders") == []


def test_a_policy_keeps_the_lists_that_are_not_given(shop: Plane) -> None:
    assert shop.hosting.policy() == SendPolicy()
    shop.hosting.set_policy(sends_to=["b", "a", "b"])
    assert shop.hosting.set_policy(accepts_from=["*"]) == SendPolicy(["a", "b"], ["*"])
    wrong: list[Callable[[], object]] = [
        lambda: shop.hosting.set_policy(sends_to=["a b"]),
        lambda: shop.hosting.set_policy(accepts_from=[""]),
    ]
    for each in wrong:
        with pytest.raises(InvalidName):
            each()
    assert shop.hosting.policy() == SendPolicy(["a", "b"], ["*"])
    assert bank_of(shop).hosting.policy() == SendPolicy()
    shop.hosting.set_policy(sends_to=[], accepts_from=[])
    assert shop.hosting.policy() == SendPolicy()


LARGE = "x" * 2 * INBOX_INLINE_BYTES_MAX


def order(state: Any, event: Event, context: TurnContext) -> Any:
    """Sends to the bank, and keeps what comes back."""
    if event.name == "order":
        context.send("teller@bank", LARGE, schema="pay", key="k")
        return state
    return [*(state or []), [event.name, event.sender]]


def pay(state: Any, event: Event, context: TurnContext) -> Any:
    assert event.sender is not None
    context.send(event.sender, True, schema="paid")
    return [*(state or []), [event.sender, event.key, event.json() == LARGE]]


def broken(state: Any, event: Event, context: TurnContext) -> Any:
    del state, event, context
    raise ValueError("broken on purpose")


def test_a_refused_send_is_set_aside_and_succeeds_when_it_is_allowed() -> None:
    app = HostApp()
    app.program("order")(order)
    with HostTest(app, universe="shop", max_attempts=1) as test:
        shop, bank = test.plane, test.plane_of("bank")
        bank.world("teller").create(program="pay")
        orders = shop.world("orders")
        orders.create(program="order")
        orders.send("order")
        test.run_until_idle()
        [aside] = orders.aside()
        assert "SendRefused: Universe shop does not allow sends to bank" in aside.error
        shop.hosting.set_policy(sends_to=["bank"], accepts_from=["bank"])
        bank.hosting.set_policy(sends_to=["shop"], accepts_from=["shop"])
        orders.retry_aside(aside.sequence)
        test.run_until_idle()
        assert orders.aside() == []

        # The receiver fails first: the item keeps its sender and its long payload when it is retried.
        failing, working = HostApp(), HostApp()
        failing.program("pay")(broken)
        working.program("pay")(pay)
        run_ready(bank, failing)
        [received] = bank.world("teller").aside()
        assert received.item.sender == "orders@shop"
        bank.world("teller").retry_aside(received.sequence)
        run_ready(bank, working)
        assert bank.world("teller").restore(working.programs["pay"]).state == [["orders@shop", b"k", True]]
        test.run_until_idle()
        assert test.state("orders") == [["paid", "teller@bank"]]


def run_ready(plane: Plane, app: HostApp) -> None:
    async def run() -> None:
        await AsyncHost(async_plane_of(plane), app, max_attempts=1).run_ready()

    asyncio.run(run())


def test_a_run_sends_to_another_universe_and_a_refusal_is_an_error_of_its_step() -> None:
    app = HostApp()

    @app.workflow
    async def report(run: WorkflowRun, to: str) -> str:
        try:
            await run.send(to, {"n": 1})
        except StepFailed as error:
            return str(error)
        return "sent"

    with HostTest(app, universe="shop") as test:
        shop, bank = test.plane, test.plane_of("bank")
        bank.world("teller").create()
        first = test.run_to_end(shop.workflows.start(report, "teller@bank", id="1"))
        assert "Universe shop does not allow sends to bank" in first
        shop.hosting.set_policy(sends_to=["bank"])
        bank.hosting.set_policy(accepts_from=["shop"])
        assert test.run_to_end(shop.workflows.start(report, "teller@bank", id="2")) == "sent"
        assert [(item.sender, item.payload) for item in inbox_of(bank)] == [("run:2@shop", b'{"n":1}')]


def test_a_send_to_another_universe_happens_once_wherever_the_host_crashes() -> None:
    app = HostApp()
    app.program("order")(order)

    def scenario(test: HostTest) -> Any:
        bank = test.plane_of("bank")
        bank.world("teller").create()
        test.plane.hosting.set_policy(sends_to=["bank"])
        bank.hosting.set_policy(accepts_from=["*"])
        test.plane.world("orders").create(program="order")
        for _ in range(2):
            test.plane.world("orders").send("order")
            test.run_until_idle()
        return [item.sender for item in inbox_of(bank)]

    report = crash_everywhere(app, scenario)
    assert report.result == ["orders@main"] * 2
