"""Hosts: turns, failures, fairness, claims that are lost or given back, snapshots, and adapters."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import fastness
from fastness import AsyncHost, EffectCall, Event, Host, HostApp, MailPolicy, Plane, Reject, RetryLater, TurnContext
from fastness.errors import Backend, CommitUnknown, InvalidArgument, Unreachable
from fastness.hosts import host as host_module
from fastness.hosts import program_runner
from fastness.limits import BATCH_ENTRIES_MAX, HOST_LEASE_SECONDS, TURN_DELAY_SECONDS
from fastness.tasks.planes import async_plane_of
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.effects import ExtendEffect
from fastness.wire.hosting import CommitTurn
from fastness.wire.json_values import decode_json
from fastness.wire.requests import Request
from tests.support.waiting import eventually

PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.
LARGE = "x" * 5_000  # More than an inbox item has inline.
Result = TypeVar("Result")


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open("memory:" if request.param == "memory" else f"dir:{tmp_path}", clock=clock) as plane:
        yield plane


@pytest.fixture
def app() -> HostApp:
    return HostApp()


def run_ready(plane: Plane, app: HostApp, **options: Any) -> int:
    """Run everything that is ready, with a host of its own."""

    async def run() -> int:
        return await AsyncHost(async_plane_of(plane), app, **options).run_ready()

    return asyncio.run(run())


def state_of(plane: Plane, app: HostApp, world: str, program: str | None = None) -> Any:
    """The program's state, which a replay of the whole journal must give, too."""
    found = plane.world(world)
    folding = app.programs[program or next(iter(app.programs))]
    assert found.verify(folding).agrees
    return found.restore(folding).state


def bodies(plane: Plane, queue: str) -> list[Any]:
    """What was put into a queue, in order."""
    return [decode_json(message.payload or b"") for message in plane.queue(queue).peek(100)]


def test_everything_that_a_program_emits_is_committed_with_its_turn(plane: Plane, app: HostApp) -> None:
    @app.program
    def sender(state: Any, event: Event, context: TurnContext) -> Any:
        if event.name == "go":
            context.send("receiver", {"text": LARGE}, key="k")
            context.send("sender@main", {"n": 1}, schema="to itself")
            context.put("jobs", {"n": 1}, priority=9)
            context.put("jobs", {"n": 2})
            context.mail("ada", {"n": 1})
            context.mail("ada", {"n": 2}, sender="bob")
            context.publish({"n": 1})
            context.publish({"n": 2})
            context.publish("other", key="reports/1")
        return [*(state or []), event.name]

    @app.program("receiver")
    def receive(state: Any, event: Event, context: TurnContext) -> Any:
        del context
        return [*(state or []), [event.name, event.key, len(event.json()["text"])]]

    for name in ("sender", "receiver"):
        plane.world(name).create(program=name)
    plane.world("sender").send("go")
    run_ready(plane, app)
    assert state_of(plane, app, "sender") == ["go", "to itself"]
    assert state_of(plane, app, "receiver", "receiver") == [["message", b"k", len(LARGE)]]
    assert bodies(plane, "jobs") == [{"n": 1}, {"n": 2}]
    mails = plane.mailbox("ada").read()
    assert [(mail.sender, mail.json()) for mail in mails] == [("sender@main", {"n": 1}), ("bob@main", {"n": 2})]
    documents = [plane.state(key).get() for key in ("worlds/sender", "reports/1")]
    assert [document and document.value for document in documents] == [{"n": 2}, "other"]


def test_the_time_of_a_turn_is_recorded_and_never_goes_back(plane: Plane, app: HostApp, clock: ManualClock) -> None:
    @app.program
    def times(state: Any, event: Event, context: TurnContext) -> Any:
        del event
        return [*(state or []), round(context.now.timestamp() * 1_000)]

    plane.world("ada").create(program=times)
    now_ms = clock.now_ms()
    for moved_ms in (0, 5_000, -60_000):
        clock.jump_to_ms(clock.now_ms() + moved_ms)
        plane.world("ada").send("go")
        run_ready(plane, app)
    assert state_of(plane, app, "ada") == [now_ms, now_ms + 5_000, now_ms + 5_000]


def fail(state: Any, event: Event, context: TurnContext) -> Any:
    """Fails on some events, each in another way, after it has changed its state in place."""
    seen = state or []
    seen.append(event.name)
    context.put("done", event.name)
    match event.name:
        case "raise":
            raise ValueError("broken on purpose")
        case "encode":
            return [*seen, object()]
        case "no world":
            context.send("nowhere", 1)
        case "other universe":
            context.send("ada@elsewhere", 1)
        case "leased":
            context.publish(1, key="deploy")
        case "bad option":
            context.put("jobs", 1, priority=77)
    return seen


@pytest.mark.parametrize(
    ("poison", "error"),
    [
        ("raise", "ValueError: broken on purpose"),
        ("encode", "InvalidValue"),
        ("no world", "WorldNotFound"),
        ("other universe", "SendRefused: Universe main does not allow sends to elsewhere; add elsewhere"),
        ("leased", "LeaseRequired"),
        ("bad option", "priority"),
    ],
)
def test_an_item_that_keeps_failing_is_set_aside_and_the_others_are_handled_once(
    *, plane: Plane, app: HostApp, clock: ManualClock, poison: str, error: str
) -> None:
    app.program("fail")(fail)
    plane.lease("deploy").acquire(ttl_seconds=3_600)
    world = plane.world("ada")
    world.create(program="fail")
    for name in ("a", "b", poison, "c"):
        world.send(name)
    run_ready(plane, app, max_attempts=3)
    assert state_of(plane, app, "ada") == ["a", "b"]
    for attempts in (1, 2):
        info = world.hosting()
        assert (info.attempts, info.owner) == (attempts, None)
        assert error in (info.error or "")
        assert run_ready(plane, app, max_attempts=3) == 0, "it is tried again after a back-off"
        clock.advance_ms(round(TURN_DELAY_SECONDS * 1_000 * 2 ** (attempts - 1)))
        run_ready(plane, app, max_attempts=3)
    assert state_of(plane, app, "ada") == ["a", "b", "c"]
    assert bodies(plane, "done") == ["a", "b", "c"]
    [aside] = world.aside()
    assert (aside.sequence, aside.item.schema) == (2, poison)
    assert error in aside.error
    assert ("test_hosts.py" in aside.error) == (poison == "raise")
    info = world.hosting()
    assert (info.attempts, info.error, info.set_aside) == (0, None, 1)


def test_an_item_that_was_set_aside_is_handled_when_the_program_is_repaired(plane: Plane, app: HostApp) -> None:
    app.program("fail")(fail)
    world = plane.world("ada")
    world.create(program="fail")
    world.send("raise")
    world.send("a")
    run_ready(plane, app, max_attempts=1)
    world.retry_aside(world.aside()[0].sequence)
    repaired = HostApp()
    repaired.program("fail")(lambda state, event, context: [*(state or []), event.name])
    run_ready(plane, repaired)
    assert state_of(plane, repaired, "ada") == ["a", "raise"]
    assert world.aside() == []


def test_a_world_is_stopped_by_policy_until_it_is_resumed(plane: Plane, app: HostApp, clock: ManualClock) -> None:
    app.program("fail")(fail)
    world = plane.world("ada")
    world.create(program="fail")
    for name in ("a", "raise", "b"):
        world.send(name)
    for _ in range(3):
        run_ready(plane, app, max_attempts=2, on_error="stop")
        clock.advance_ms(60_000)
    info = world.hosting()
    assert (info.is_stopped, info.attempts, info.ready_ms) == (True, 2, None)
    assert "broken on purpose" in (info.error or "")
    assert state_of(plane, app, "ada") == ["a"]
    repaired = HostApp()
    repaired.program("fail")(lambda state, event, context: [*(state or []), event.name])
    world.resume_program()
    run_ready(plane, repaired)
    assert state_of(plane, repaired, "ada") == ["a", "raise", "b"]


def test_a_program_that_fails_on_old_records_sets_nothing_aside(plane: Plane, app: HostApp) -> None:
    """New code that cannot replay the journal is not the fault of the items that wait."""
    app.program("fail")(lambda state, event, context: event.name)
    world = plane.world("ada")
    world.create(program="fail")
    world.send("raise")
    run_ready(plane, app)
    changed = HostApp()
    changed.program("fail")(fail)
    world.send("a")
    run_ready(plane, changed, max_attempts=1)
    info = world.hosting()
    assert (info.attempts, info.set_aside) == (1, 0)
    assert "broken on purpose" in (info.error or "")


@pytest.mark.parametrize("on_error", ["set_aside", "stop"])
def test_a_turn_that_a_full_mailbox_refuses_is_tried_until_it_is_accepted(
    plane: Plane, app: HostApp, clock: ManualClock, on_error: str
) -> None:
    @app.program
    def sender(state: Any, event: Event, context: TurnContext) -> Any:
        context.mail("ada", event.name)
        return (state or 0) + 1

    plane.set_mail_policy(MailPolicy(pending_max=1))
    world = plane.world("sender")
    world.create(program=sender)
    for name in ("first", "second"):
        world.send(name)
    for _ in range(4):
        run_ready(plane, app, max_attempts=2, on_error=on_error)
        clock.advance_ms(60_000)
    assert state_of(plane, app, "sender") == 1
    assert "MailboxFull" in (world.hosting().error or "")
    mailbox = plane.mailbox("ada")
    mailbox.confirm(mailbox.read())
    run_ready(plane, app, max_attempts=2, on_error=on_error)
    assert [mail.json() for mail in mailbox.read()] == ["second"]
    assert state_of(plane, app, "sender") == 2
    assert world.aside() == []


class Interrupted:
    """A transport that does something before or after the first turn is committed."""

    def __init__(self, inner: Any, *, before: Callable[[], Any] | None = None, error: Exception | None = None) -> None:
        self.inner = inner
        self.before = before
        self.error = error
        self.calls: list[Request[Any]] = []

    async def call(self, request: Request[Any]) -> Any:
        self.calls.append(request)
        is_turn = isinstance(request, CommitTurn | CommitAtomic)
        if is_turn and self.before is not None:
            before, self.before = self.before, None
            await asyncio.to_thread(before)
        answer = await self.inner.call(request)
        if is_turn and self.error is not None:
            error, self.error = self.error, None
            raise error
        return answer


def run_interrupted(plane: Plane, app: HostApp, transport: Any, **options: Any) -> AsyncHost:
    async def run() -> AsyncHost:
        handle = async_plane_of(plane)
        handle._transport = transport
        host = AsyncHost(handle, app, **options)
        await host.run_ready()
        return host

    return asyncio.run(run())


def count(state: Any, event: Event, context: TurnContext) -> Any:
    context.put("done", event.name)
    return [*(state or []), event.name]


def test_a_host_whose_claim_ended_before_its_commit_is_fenced(plane: Plane, app: HostApp, clock: ManualClock) -> None:
    app.program("count")(count)
    plane.world("ada").create(program="count")
    plane.world("ada").send("a")

    def take_over() -> None:
        clock.advance_ms(HOST_LEASE_SECONDS * 1_000)
        plane.world("ada").send("b")
        run_ready(plane, app, owner="other")

    transport = Interrupted(async_plane_of(plane)._transport, before=take_over)
    stale = run_interrupted(plane, app, transport, owner="stale")
    assert (stale.stats.turns, stale.stats.lost_worlds) == (0, 1)
    assert state_of(plane, app, "ada") == ["a", "b"]
    assert bodies(plane, "done") == ["a", "b"]
    assert plane.world("ada").hosting().owner is None


@pytest.mark.parametrize("error", [CommitUnknown("lost on purpose"), Unreachable("lost on purpose")])
def test_a_turn_whose_answer_is_lost_is_not_repeated(plane: Plane, app: HostApp, error: Backend) -> None:
    app.program("count")(count)
    plane.world("ada").create(program="count")
    plane.world("ada").send("a")
    transport = Interrupted(async_plane_of(plane)._transport, error=error)
    run_interrupted(plane, app, transport)
    plane.world("ada").send("b")
    run_ready(plane, app)
    assert state_of(plane, app, "ada") == ["a", "b"]
    assert bodies(plane, "done") == ["a", "b"]


def test_worlds_take_turns(plane: Plane, app: HostApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """No world is more than one turn ahead of those that have begun theirs."""
    monkeypatch.setattr(program_runner, "BATCH_ENTRIES_MAX", 4)
    turns: list[str] = []

    @app.program
    def busy(state: Any, event: Event, context: TurnContext) -> Any:
        del context
        if state is None or event.height != state + 1:  # The first item of a turn.
            turns.append(event.json())
        return event.height

    names = [f"world-{number}" for number in range(10)]
    for name in names:
        plane.world(name).create(program=busy)
        for _ in range(9):
            plane.world(name).send("go", name)
    run_ready(plane, app, concurrency=3)
    for seen in range(len(turns) + 1):
        counts = [turns[:seen].count(name) for name in names]
        assert max(counts) - min(counts) <= 2, turns  # The first turn takes longer: the state is restored before it.
    assert {turns.count(name) for name in names} == {3}


def test_a_full_host_serves_all_worlds(plane: Plane, app: HostApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "HOST_WORLDS_MAX", 4)
    monkeypatch.setattr(program_runner, "BATCH_ENTRIES_MAX", 4)
    app.program("count")(count)
    names = [f"world-{number}" for number in range(12)]
    for name in names:
        plane.world(name).create(program="count")
        for _ in range(5):
            plane.world(name).send("go")
    run_ready(plane, app)
    assert {len(state_of(plane, app, name)) for name in names} == {5}


def test_a_host_that_stops_gives_its_worlds_back(app: HostApp) -> None:
    app.program("count")(count)
    with fastness.open("memory:") as plane:
        for name in ("a", "b"):
            plane.world(name).create(program="count")
        with Host(plane, app, lease_seconds=3_600) as host:
            plane.world("a").send("first")
            eventually(lambda: plane.queue("done").stats().ready == 1)
            assert plane.world("a").hosting().owner is not None, "it is kept for the next item"
            plane.world("a").send("second")
            eventually(lambda: plane.queue("done").stats().ready == 2)
        assert [plane.world(name).hosting().owner for name in ("a", "b")] == [None, None]
        plane.world("a").send("third")
        run_ready(plane, app)
        assert state_of(plane, app, "a") == ["first", "second", "third"]
        assert (host.stats.turns, host.stats.worlds) == (2, 0)


def test_idle_worlds_are_given_back_and_held_ones_renewed(app: HostApp) -> None:
    app.program("count")(count)
    with fastness.open("memory:") as plane:
        plane.world("a").create(program="count")
        with Host(plane, app, lease_seconds=0.4):
            plane.world("a").send("first")
            eventually(lambda: plane.queue("done").stats().ready == 1)
            eventually(lambda: plane.world("a").hosting().owner is None)
        assert plane.world("a").hosting().fence == 1, "its claim was kept until then"


def test_snapshots_and_compaction_keep_restores_short(app: HostApp) -> None:
    @app.program
    def number(state: Any, event: Event, context: TurnContext) -> Any:
        del event, context
        return (state or 0) + 1

    with fastness.open("memory:") as plane:
        world = plane.world("ada")
        world.create(program=number)
        with Host(plane, app, snapshot_every=100):
            for _ in range(1_500):
                world.send("go")
            eventually(world.segments)
            eventually(lambda: world.inbox.cursor() == 1_499)
        restored = world.restore(number.reducer)
        assert restored.state["state"] == 1_500
        assert restored.folded <= 100 + BATCH_ENTRIES_MAX + 2
        assert world.verify(number.reducer).snapshots_checked >= 5


def ask_again(state: Any, event: Event, context: TurnContext) -> Any:
    """Asks for the next effect with every receipt, so some effect is pending whenever a snapshot is taken."""
    number = (state or 0) + 1
    if event.is_receipt() or number == 1:
        context.call("next", number)
    return number


def test_a_world_that_always_waits_for_an_effect_has_short_restores(plane: Plane, app: HostApp) -> None:
    program = app.program("ask")(ask_again)

    @app.adapter("next")
    async def following(call: EffectCall) -> None:
        if call.json() == 40:
            raise RetryLater(3_600)

    world = plane.world("ada")
    world.create(program=program)
    world.send("go")
    run_ready(plane, app, snapshot_every=10)
    assert state_of(plane, app, "ada") == 40
    restored = world.restore(program.reducer)
    assert restored.height > 80
    assert restored.folded <= 30


def test_snapshots_that_do_not_qualify_are_not_repeated_with_every_claim(plane: Plane, app: HostApp) -> None:
    program = app.program("ask")(ask_again)
    world = plane.world("ada")
    world.create(program=program)
    for _ in range(20):
        world.send("go")  # No host carries out the effect of the first one.
        run_ready(plane, app, snapshot_every=10)
    assert state_of(plane, app, "ada") == 20
    assert world.snapshots.baseline().height == 0
    assert len(world.snapshots.list()) <= 1 + world.head() // 10


def calls(state: Any, event: Event, context: TurnContext) -> Any:
    """Makes the call that an event names, and keeps its receipt."""
    found = state or {}
    if event.kind == "domain_event":
        return {**found, context.call(event.name, event.json(), max_attempts=3): None}
    return {**found, event.call_id: [event.error is None, event.json() if event.error is None else event.error]}


def test_adapters_carry_out_effects_and_their_results_are_receipts(
    plane: Plane, app: HostApp, clock: ManualClock
) -> None:
    keys: list[tuple[str, int]] = []
    app.program("calls")(calls)

    @app.adapter("plain")
    def plain(call: EffectCall) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert (call.world, call.universe, call.max_attempts) == ("ada", "main", 3)
        return {"large": LARGE, "of": call.json()}

    @app.adapter("coroutine")
    async def coroutine(call: EffectCall) -> None:
        del call

    @app.adapter("flaky")
    async def flaky(call: EffectCall) -> int:
        keys.append((call.idempotency_key, call.attempt))
        if call.attempt < 3:
            raise RetryLater(60) if call.attempt == 1 else OSError("broken on purpose")
        return call.attempt

    @app.adapter("wrong")
    def wrong(call: EffectCall) -> object:
        if call.json() == "reject":
            raise Reject("never")
        return object()

    world = plane.world("ada")
    world.create(program="calls")
    for name in ("plain", "coroutine", "flaky", "wrong"):
        world.send(name, 7)
    world.send("wrong", "reject")
    run_ready(plane, app)
    assert len([effect for effect in plane.effects.list("ada").effects if effect.kind == "flaky"]) == 1
    for _ in range(4):
        clock.advance_ms(60_000)
        run_ready(plane, app)
    found = state_of(plane, app, "ada")
    assert found["1.0"] == [True, {"large": LARGE, "of": 7}]
    assert (found["2.0"], found["3.0"], found["5.0"]) == ([True, None], [True, 3], [False, "never"])
    assert "cannot be JSON" in found["4.0"][1]
    assert plane.effects.list().effects == []
    assert len({key for key, _ in keys}) == 1
    assert [attempt for _, attempt in keys] == [1, 2, 3]


def test_the_lease_of_a_running_adapter_is_renewed(app: HostApp) -> None:
    app.program("calls")(calls)
    renewals = 0
    attempts: list[int] = []
    is_renewed = threading.Event()

    @app.adapter("slow")
    def slow(call: EffectCall) -> int:
        attempts.append(call.attempt)
        assert is_renewed.wait(PATIENCE_SECONDS)
        return 1

    with fastness.open("memory:") as plane:
        execute = plane._transport.services.database.transact_async  # type: ignore[attr-defined]

        def counted(work: Any, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Any]:
            nonlocal renewals
            renewals += any(isinstance(getattr(argument, "request", None), ExtendEffect) for argument in arguments)
            if renewals == 8:  # At three in each lease, its lease would have ended twice.
                is_renewed.set()
            found: Coroutine[Any, Any, Any] = execute(work, *arguments, **options)
            return found

        plane._transport.services.database.transact_async = counted  # type: ignore[attr-defined]
        plane.world("ada").create(program="calls")
        plane.world("ada").send("slow", 1)
        with Host(plane, app, lease_seconds=0.3):
            eventually(lambda: state_of(plane, app, "ada") == {"1.0": [True, 1]})
    assert attempts == [1]


def test_bad_options_of_a_host_are_refused(plane: Plane, app: HostApp) -> None:
    handle = async_plane_of(plane)
    with pytest.raises(InvalidArgument, match="no programs, workflows or adapters"):
        AsyncHost(handle, app)
    app.program("count")(count)
    for options, error in (
        ({"concurrency": 0}, "positive"),
        ({"lease_seconds": 0}, "positive"),
        ({"on_error": "ignore"}, "set_aside"),
        ({"programs": ["other"]}, "has no program other; it has count"),
    ):
        with pytest.raises(InvalidArgument, match=error):
            AsyncHost(handle, app, **options)
        with pytest.raises(InvalidArgument, match=error):
            Host(plane, app, **options).start()
    with pytest.raises(InvalidArgument, match="use Host"):
        AsyncHost(plane, app)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="use AsyncHost"):
        Host(handle, app)  # type: ignore[arg-type]
