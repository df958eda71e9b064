"""Tasks: sending, running, chains, groups and compensations, on a plane whose time is moved."""

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

import fastness
from fastness import Job, Plane, QueuePolicy, Reject, RetryLater, Task, TaskApp, context_file, current_job, group
from fastness.errors import (
    BatchTooLarge,
    CasMismatch,
    Closed,
    CommitUnknown,
    EmptyBatch,
    FastnessError,
    InvalidArgument,
    InvalidUrl,
    MessageFailed,
    QueueBusy,
    ResultNotKept,
)
from fastness.handles import task_runs
from fastness.limits import TASK_GROUP_MEMBERS_MAX, TASK_NESTING_MAX, TASK_STEPS_MAX
from fastness.tasks.chains import Chainable
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.queues import NackMessages
from tests.support.waiting import eventually

PATIENCE_SECONDS = 30.0  # A bound for every wait; far more than any test needs.


@pytest.fixture
def plane(clock: ManualClock) -> Iterator[Plane]:
    with fastness.open("memory:", clock=clock) as plane:
        yield plane


@pytest.fixture
def app(plane: Plane) -> TaskApp:
    return TaskApp(plane)


class Calls(list[Any]):
    """What tasks were called with, in order."""


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def add(app: TaskApp, calls: Calls) -> Task[..., int]:
    @app.task(name="add")
    def add(a: int, b: int = 1) -> int:
        calls.append(("add", a, b))
        return a + b

    return add


@pytest.fixture
def total(app: TaskApp, calls: Calls) -> Task[..., int]:
    @app.task(name="total", queue="totals")
    def total(numbers: list[int]) -> int:
        calls.append(("total", numbers))
        return sum(numbers)

    return total


@pytest.fixture
def undo(app: TaskApp, calls: Calls) -> Task[..., None]:
    @app.task(name="undo")
    def undo(what: str) -> None:
        calls.append(("undo", what))

    return undo


@pytest.fixture
def fail(app: TaskApp, calls: Calls) -> Task[..., None]:
    @app.task(name="fail", max_attempts=2, retry_delay_seconds=1)
    def fail(*args: int) -> None:
        calls.append(("fail", *args))
        raise ValueError("no luck")

    return fail


def named(calls: Calls, name: str) -> list[Any]:
    return [call for call in calls if call[0] == name]


def refuse_commits(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, errors: list[FastnessError], *, after_commit: bool = False
) -> None:
    """Make the next atomic commits fail with these errors, before or after they have happened."""
    transport = plane._transport
    call = transport.call

    def failing(request: Any) -> Any:
        if not isinstance(request, CommitAtomic) or not errors:
            return call(request)
        if after_commit:
            call(request)
        raise errors.pop(0)

    monkeypatch.setattr(transport, "call", failing)


# Sending and arguments.


class Parcel(msgspec.Struct, frozen=True):
    weight: float
    tags: set[str]


@dataclass
class Address:
    street: str
    since: date


VALUES: list[tuple[Any, Any]] = [
    (Parcel, Parcel(1.5, {"a"})),
    (Address, Address("Main Street", date(2024, 2, 29))),
    (datetime, datetime(2024, 1, 1, tzinfo=UTC)),
    (timedelta, timedelta(seconds=90)),
    (UUID, UUID(int=7)),
    (bytes, b"\x00\xff"),
    (dict[int, str], {1: "a"}),
    (tuple[int, str], (1, "a")),
    (int | None, None),
    (Any, {"a": [1, None, True]}),
]


@pytest.mark.parametrize(("annotation", "value"), VALUES, ids=lambda value: getattr(value, "__name__", "")[:20])
def test_a_worker_calls_the_function_with_the_types_of_its_annotations(
    app: TaskApp, annotation: Any, value: Any
) -> None:
    seen = []

    def keep(given: Any, *more: Any, **named: Any) -> Any:
        seen.extend([given, *more, *named.values()])
        return given

    keep.__annotations__ = {"given": annotation, "more": annotation, "named": annotation}
    receipt = app.task(keep).send(value, value, other=value)
    assert app.run_ready() == 1
    assert seen == [value] * 3
    expected = value if isinstance(value, bytes) else msgspec.to_builtins(value, str_keys=True)
    assert receipt.result() == (list(expected) if isinstance(expected, tuple) else expected)


def test_a_plain_call_runs_here_and_puts_nothing(plane: Plane, add: Task[..., int], calls: Calls) -> None:
    assert add(1, b=2) == 3
    assert plane.queues() == []


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        (("x",), {}, "Expected `int`"),
        ((True,), {}, "Expected `int`"),
        ((), {}, "missing a required argument"),
        ((1, 2, 3), {}, "too many positional"),
        ((1,), {"c": 1}, "unexpected keyword"),
        ((object(),), {}, "cannot be JSON"),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_put(
    plane: Plane, add: Task[..., int], args: Any, kwargs: Any, reason: str
) -> None:
    for send in (add.send, lambda *args, **kwargs: add.s(*args, **kwargs).send()):
        with pytest.raises(InvalidArgument, match=f"ask add.*{reason}"):
            send(*args, **kwargs)
    if not kwargs:
        with pytest.raises(InvalidArgument, match=reason):
            add.send_many([(1,), args])
    assert plane.queues() == []


@pytest.mark.parametrize("value", [b"x", datetime(2024, 1, 1, tzinfo=UTC), {1: 2}, [object()]])
def test_an_argument_without_an_annotation_must_be_json(app: TaskApp, value: Any) -> None:
    @app.task
    def anything(value) -> None:  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(InvalidArgument, match="annotate it"):
        anything.send(value)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"task": "add", "args": ["x"]}', "Expected `int`, got `str`"),
        (b'{"task": "add", "kwargs": {"c": 1}}', "missing a required argument"),
        (b'{"task": "gone", "args": []}', "No task has the name gone.*Known tasks: add, undo"),
        (b'{"args": []}', "not a call of a task"),
        (b"{", "not a call of a task"),
    ],
)
def test_a_message_that_cannot_be_called_becomes_a_dead_letter_with_the_reason(
    *, app: TaskApp, plane: Plane, add: Task[..., int], undo: Task[..., None], calls: Calls, payload: bytes, reason: str
) -> None:
    plane.queue("tasks").put(payload)
    assert app.run_ready() == 1
    assert calls == []
    [letter] = plane.queue("tasks").dead_letters()
    assert letter.last_error is not None
    assert re.search(reason, letter.last_error)


def test_the_options_of_a_task_are_those_of_its_messages(app: TaskApp, plane: Plane) -> None:
    @app.task(queue="emails", max_attempts=7, priority=9, concurrency_key="tenant", unique=lambda tenant, n: f"{n:03}")
    def mail(tenant: str, n: int = 4) -> None:
        pass

    first = mail.send("acme")
    info = plane.queue("emails").get(first.id)
    assert (info.key, info.unique_key, info.max_attempts, info.priority) == ("acme", "004", 7, 9)
    assert info.attributes == {"fastness-task": mail.name}
    assert info.keep_result
    assert mail.send("acme").duplicate
    other = mail.with_options(delay_seconds=60, unique_key="mine", key="other").send("acme", n=4)
    info = plane.queue("emails").get(other.id)
    assert (info.state, info.key, info.unique_key, info.max_attempts) == ("delayed", "other", "mine", 7)
    receipts = mail.send_many([("acme", 5), ("beta", 6)])
    assert [plane.queue("emails").get(each.id).key for each in receipts] == ["acme", "beta"]
    for wrong in ([["acme"]], "acme", ("acme",)):
        with pytest.raises(InvalidArgument):
            mail.send_many(wrong)  # type: ignore[arg-type]


def test_a_schedule_calls_a_task(plane: Plane, clock: ManualClock) -> None:
    app, days = TaskApp(plane, timezone="Europe/Berlin"), []

    @app.task(concurrency_key="tenant")
    def clean(tenant: str, *, days_kept: int) -> None:
        days.append((tenant, days_kept))

    with pytest.raises(InvalidArgument, match="missing a required"):
        clean.schedule("nightly", "0 3 * * *", "acme")  # type: ignore[call-arg]
    schedule = clean.schedule("nightly", "0 3 * * *", "acme", days_kept=30)
    assert schedule.timezone == "Europe/Berlin"
    assert (schedule.message.key, schedule.message.attributes) == ("acme", {"fastness-task": clean.name})
    assert app.run_ready() == 0
    clock.jump_to_ms(schedule.next_ms)
    assert app.run_ready() == 1
    assert days == [("acme", 30)]


def test_a_task_without_a_kept_result_leaves_nothing(app: TaskApp, plane: Plane) -> None:
    received = []

    @app.task(keep_result=False)
    def quiet(value: int) -> int:
        received.append(value)
        return value + 1

    receipts = [quiet.send(1), *quiet.send_many([(5,)]), *quiet.s(10).then(quiet.s()).send()]
    receipts += group(quiet.s(20)).then(quiet.with_options(keep_result=True).s(7), pass_result=False).send()
    app.run_ready()
    assert sorted(received) == [1, 5, 7, 10, 11, 20]
    for receipt in receipts:
        with pytest.raises(ResultNotKept):
            receipt.result()


def test_wrong_declarations_are_refused(app: TaskApp, add: Task[..., int]) -> None:
    with pytest.raises(InvalidArgument, match=r"concurrency_key.*'tenant'.*\(to: str\)"):

        @app.task(concurrency_key="tenant")
        def mail(to: str) -> None:
            pass

    with pytest.raises(InvalidArgument, match="Two tasks have the name add"):
        app.task(name="add")(mail_nobody)
    with pytest.raises(FastnessError, match="queue"):
        app.task(queue="no/such")(mail_nobody)
    with pytest.raises(InvalidArgument, match="no tasks"):
        TaskApp("memory:").worker()
    with pytest.raises(InvalidArgument, match="No task has the queue other; the queues are tasks"):
        app.worker(queues=["other"])
    with pytest.raises(InvalidUrl, match="not int"):
        TaskApp(5)  # type: ignore[arg-type]


def mail_nobody() -> None:
    pass


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment that names no plane, of a user without saved contexts."""
    for name in [name for name in os.environ if name.startswith("FASTNESS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return monkeypatch


def test_tasks_of_no_app_use_the_plane_of_the_environment(settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = TaskApp()
    ping = app.task(mail_nobody)
    settings.setenv("FASTNESS_URL", f"dir:{tmp_path / 'data'}")
    settings.setenv("FASTNESS_UNIVERSE", "acme")
    with app:
        ping.send()
        assert app.plane.universe == "acme"
        assert app.run_ready() == 1
    assert os.path.isdir(tmp_path / "data")


def test_an_app_without_a_url_uses_the_plane_of_the_command_line(settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with TaskApp() as app:
        assert (app.plane._transport.url, app.plane.universe) == ("http://127.0.0.1:9440", "main")  # type: ignore[attr-defined]
    context = context_file.Context(url=f"dir:{tmp_path / 'data'}", universe="acme")
    context_file.save(context_file.Contexts("work", {"work": context}))
    with TaskApp() as app:
        app.task(mail_nobody).send()
        assert (app.plane.universe, app.run_ready()) == ("acme", 1)
    settings.setenv("FASTNESS_URL", f"dir:{tmp_path / 'other'}")
    with TaskApp(universe="lab") as app:
        assert app.plane.universe == "lab"
    assert os.path.isdir(tmp_path / "other")


def test_connect_without_a_url_uses_the_server_of_the_command_line(settings: pytest.MonkeyPatch) -> None:
    with fastness.connect() as plane:
        assert plane._transport.url == "http://127.0.0.1:9440"  # type: ignore[attr-defined]
    context = context_file.Context(url="http://plane.example:9440", universe="acme", token="secret")
    context_file.save(context_file.Contexts("work", {"work": context}))
    with fastness.connect() as plane:
        transport: Any = plane._transport
        assert (transport.url, transport.token, plane.universe) == ("http://plane.example:9440", "secret", "acme")
    with fastness.connect("http://other.example:9440") as plane:
        assert (plane._transport.token, plane.universe) == (None, "main")  # type: ignore[attr-defined]
    settings.setenv("FASTNESS_URL", "dir:data")
    with pytest.raises(InvalidUrl, match=r'fastness.open\("dir:data"\)'):
        fastness.connect()


@pytest.mark.parametrize("given", ["an open plane", "a URL"])
def test_a_closed_app_sends_nothing_and_says_so(plane: Plane, given: str) -> None:
    app = TaskApp(plane if given == "an open plane" else "memory:")
    ping = app.task(mail_nobody)
    ping.send()
    app.close()
    threads = set(threading.enumerate())

    async def send() -> None:
        await ping.send_async()

    for again in (
        ping.send,
        lambda: ping.send_many([()]),
        lambda: asyncio.run(send()),
        app.run_ready,
        app.worker().start,
    ):
        with pytest.raises(Closed, match="The task app was closed; make another TaskApp"):
            again()
    assert set(threading.enumerate()) == threads
    app.close()  # Closing twice is fine.
    with fastness.open("memory:") as another:
        app.use(another)
        ping.send()
        assert app.run_ready() == 1


async def test_an_app_that_is_closed_on_an_event_loop_sends_nothing() -> None:
    async with TaskApp("memory:") as app:
        ping = app.task(mail_nobody)
        await ping.send_async()
    with pytest.raises(Closed, match="The task app was closed"):
        await ping.send_async()


def test_the_default_app_collects_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastness.tasks.app import DEFAULT_APP

    monkeypatch.setattr(DEFAULT_APP, "_tasks", {})
    monkeypatch.setattr(DEFAULT_APP._registry, "functions", {})
    plain, options = fastness.task(mail_nobody), fastness.task(name="other", queue="q")(mail_nobody)
    assert list(DEFAULT_APP.tasks) == [plain.name, "other"]
    assert (plain.name, plain.queue, options.queue) == (f"{__name__}.mail_nobody", "tasks", "q")


# Running, retrying and rejecting.


def test_a_failed_call_is_retried_and_then_a_dead_letter(
    app: TaskApp, plane: Plane, clock: ManualClock, fail: Task[..., None], calls: Calls
) -> None:
    receipt = fail.send(1)
    assert app.run_ready() == 1
    assert plane.queue("tasks").get(receipt.id).state == "delayed"
    clock.advance_ms(2_000)
    assert app.run_ready() == 1
    with pytest.raises(MessageFailed, match="ValueError: no luck"):
        receipt.result()
    assert calls == [("fail", 1)] * 2


def test_a_task_decides_when_it_is_retried(app: TaskApp, plane: Plane, clock: ManualClock) -> None:
    attempts = []

    @app.task(max_attempts=3)
    def poll() -> str:
        attempts.append(current_job().attempt)
        if len(attempts) < 3:
            raise RetryLater(100, "the peer is not ready")
        return "ready"

    receipt = poll.send()
    for _ in range(2):
        assert app.run_ready() == 1
        clock.advance_ms(99_999)
        assert app.run_ready() == 0
        clock.advance_ms(1)
    info = plane.queue("tasks").get(receipt.id)
    assert (info.failure_attempts, info.last_error) == (2, "RetryLater: the peer is not ready")
    app.run_ready()
    assert receipt.result() == "ready"
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_a_call_that_cannot_succeed_is_rejected_at_once(app: TaskApp, plane: Plane, how: str) -> None:
    @app.task
    def work() -> Any:
        if how == "raises":
            raise Reject("no such customer")
        return object()

    receipt = work.send()
    assert app.run_ready() == 1
    with pytest.raises(MessageFailed, match=r"no such customer|cannot be JSON"):
        receipt.result()
    assert plane.queue("tasks").dead_letters()[0].failures[0].outcome == "rejected"


def test_the_current_job(app: TaskApp, plane: Plane) -> None:
    seen: list[Job] = []

    @app.task(queue="jobs")
    def work() -> None:
        job = current_job()
        job.extend(100)
        seen.append(job)
        assert (job.id, job.queue, job.task, job.attempt, job.cancelled) == (receipt.id, "jobs", work.name, 1, False)
        assert plane.queue("jobs").cancel(job.id).state == "cancelled"

    receipt = work.s().then(work.s(), pass_result=False).send()[0]
    assert app.run_ready() == 1
    assert seen[0].cancelled
    assert plane.queue("jobs").stats().put_total == 1, "what follows a cancelled step is not started"
    outside = current_job()
    outside.extend()
    assert (outside.id, outside.queue, outside.task, outside.attempt, outside.cancelled) == ("", "", "", 1, False)


async def test_the_current_job_of_a_coroutine(plane: Plane) -> None:
    app, seen = TaskApp(plane), []

    @app.task
    async def work() -> str:
        await current_job().extend_async(100)
        seen.append(current_job().id)
        return "done"

    receipt = await work.send_async()
    running = await app._registry.planes.get_async()
    message = await running.queue("tasks").receive()
    assert message is not None
    await task_runs.run_message(running, message, app._registry.find)
    assert await receipt.result() == "done"
    assert seen == [receipt.id]
    assert current_job().id == ""


# Event loops and workers.


async def test_a_call_that_would_block_an_event_loop_is_refused(app: TaskApp, add: Task[..., int]) -> None:
    for call in (
        lambda: add.send(1),
        lambda: add.send_many([(1,)]),
        lambda: add.s(1).send(),
        lambda: add.schedule("x", "* * * * *", 1),
        app.run_ready,
    ):
        with pytest.raises(InvalidArgument, match="would block the running event loop"):
            call()
    receipt = await add.send_async(1)
    await add.send_many_async([(2,), (3,)])
    [first] = await add.s(4).then(add.s()).send_async()
    await add.s(5).send_async()
    await group(add.s(6), add.s(7)).send_async()
    await add.schedule_async("x", "* * * * *", 1)
    assert await asyncio.to_thread(app.run_ready) == 8
    assert (await receipt.result(), await first.result()) == (2, 5)


def test_functions_and_coroutines_run_in_one_worker() -> None:
    with fastness.open("memory:") as plane:
        app = TaskApp(plane)

        @app.task(queue="threads")
        def on_thread() -> str:
            return threading.current_thread().name

        @app.task(queue="loop")
        async def on_loop(n: int) -> list[str]:
            receipts = [await beside.send_async() for _ in range(n)]
            return [await receipt.result(wait_seconds=PATIENCE_SECONDS) for receipt in receipts]

        @app.task(queue="loop")
        def beside() -> str:
            assert current_job().queue == "loop"
            return threading.current_thread().name

        worker = app.worker(concurrency=4)
        assert worker.queues == ["loop", "threads"]
        worker.start()
        receipts = [on_thread.send(), on_loop.send(2)]
        found = [receipt.result(wait_seconds=PATIENCE_SECONDS) for receipt in receipts]
        worker.stop()
        assert found[0].startswith("fastness-worker-threads")
        assert found[1] == ["fastness-task"] * 2
        assert (worker.stats.handled, worker.stats.failed) == (4, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_worker_that_cannot_receive_raises_why(is_async: bool) -> None:
    plane = fastness.open("memory:")
    app = TaskApp(plane)

    async def on_loop() -> None:
        pass

    app.task(on_loop if is_async else mail_nobody)
    plane.close()
    with pytest.raises(Closed):
        app.worker().run()


@pytest.mark.rotating
@pytest.mark.parametrize("is_async", [False, True])
def test_a_task_that_rejects_or_retries_is_logged_in_one_line(
    app: TaskApp, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It decides so: it has not failed unexpectedly, and there is no traceback to look at."""

    def work(ends: str) -> None:
        raise Reject("no such customer") if ends == "reject" else RetryLater(600, "too early")

    async def work_async(ends: str) -> None:
        work(ends)

    task = app.task(name="bill")(work_async if is_async else work)
    rejected, retried = task.send("reject").id, task.send("retry").id
    worker = app.worker()
    worker.start()
    eventually(lambda: worker.stats.failed == 2)
    worker.stop()
    logged = [record for record in caplog.records if hasattr(record, "message_id")]  # Not of a test before.
    assert not [record for record in logged if record.exc_info]
    assert sorted(record.getMessage() for record in logged) == [
        f"tasks: task bill rejected message {rejected} on attempt 1: no such customer",
        f"tasks: task bill returned message {retried} on attempt 1, to try again in 600 s: too early",
    ]
    with pytest.raises(MessageFailed, match=r"is dead after 1 failed attempt: Reject: no such customer\."):
        app.plane.queue("tasks").result(rejected)


# Chains.


def test_each_step_gets_the_result_of_the_one_before(
    app: TaskApp, plane: Plane, add: Task[..., int], calls: Calls
) -> None:
    chain = add.s(1).then(add.s(10)).then(add.s(5, b=5), pass_result=False).then(add.s(100))
    [receipt] = chain.send()
    assert plane.queue("tasks").stats().ready == 1
    assert app.run_ready() == 4
    assert calls == [("add", 1, 1), ("add", 2, 10), ("add", 5, 5), ("add", 10, 100)]
    assert receipt.result() == 2
    with pytest.raises(InvalidArgument, match="not a step"):
        add.s(1).then(add)  # type: ignore[arg-type]


def test_the_keys_of_a_step_can_follow_from_the_result(app: TaskApp, plane: Plane, add: Task[..., int]) -> None:
    seen = []

    @app.task(queue="keyed", concurrency_key="n", unique=lambda n, by: f"{n}-{by}")
    def keyed(n: int, by: str) -> None:
        info = plane.queue("keyed").get(current_job().id)
        seen.append((info.key, info.unique_key))

    add.s(1).then(keyed.s("x")).send()
    app.run_ready()
    assert seen == [("2", "2-x")]


def test_steps_of_a_chain_have_one_correlation_id(app: TaskApp, plane: Plane, add: Task[..., int]) -> None:
    found = []

    @app.task
    def last(value: Any) -> None:
        found.append(plane.queue("tasks").get(current_job().id).correlation_id)

    [first] = add.with_options(correlation_id="order-7").s(1).then(group(add.s(), add.s())).then(last.s()).send()
    app.run_ready()
    assert (first.correlation_id, found) == ("order-7", ["order-7"])


def test_a_step_whose_lease_has_expired_starts_nothing(
    app: TaskApp, plane: Plane, clock: ManualClock, add: Task[..., int], calls: Calls
) -> None:
    """The first attempt returns after its lease has ended. Only the second one starts the next step."""
    attempts = []

    @app.task(visibility_seconds=1)
    def slow() -> int:
        attempts.append(current_job().attempt)
        if len(attempts) == 1:
            clock.advance_ms(1_000)
        return len(attempts)

    slow.s().then(add.s()).send()
    app.run_ready()
    clock.advance_ms(60_000)
    app.run_ready()
    assert attempts == [1, 2]
    assert calls == [("add", 2, 1)]
    assert plane.queue("tasks").stats().put_total == 2


@pytest.mark.parametrize("after_commit", [False, True])
def test_a_commit_that_fails_starts_the_next_step_once(
    *,
    app: TaskApp,
    plane: Plane,
    clock: ManualClock,
    add: Task[..., int],
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    after_commit: bool,
) -> None:
    add.s(1).then(add.s()).send()
    error = CommitUnknown("the answer was lost") if after_commit else QueueBusy("try again")
    refuse_commits(plane, monkeypatch, [error], after_commit=after_commit)
    app.run_ready()
    clock.advance_ms(60_000)
    app.run_ready()
    assert calls == [("add", 1, 1)] * (1 if after_commit else 2) + [("add", 2, 1)]
    stats = plane.queue("tasks").stats()
    assert (stats.put_total, stats.acked_total, stats.failed_total) == (2, 2, 0)


def test_a_message_that_cannot_be_returned_either_is_delivered_again(
    *,
    app: TaskApp,
    plane: Plane,
    clock: ManualClock,
    add: Task[..., int],
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add.s(1).then(add.s()).send()
    transport, down = plane._transport, [True]
    call = transport.call

    def failing(request: Any) -> Any:
        if down[0] and isinstance(request, CommitAtomic | NackMessages):
            raise QueueBusy("try again")
        return call(request)

    monkeypatch.setattr(transport, "call", failing)
    assert app.run_ready() == 1
    down[0] = False
    clock.advance_ms(60_000)
    app.run_ready()
    clock.advance_ms(60_000)
    app.run_ready()
    assert calls == [("add", 1, 1), ("add", 1, 1), ("add", 2, 1)]


# Groups.


def groups_left(plane: Plane) -> int:
    """The documents of groups that have not finished."""
    return sum(b"tasks/groups/" in key for key, _ in plane.pairs.scan(b"", b"\xff"))


def test_the_last_member_of_a_group_starts_what_follows(
    app: TaskApp, plane: Plane, add: Task[..., int], total: Task[..., int], calls: Calls
) -> None:
    receipts = group(add.s(1), add.s(2).then(add.s(100)), add.s(3)).then(total.s()).then(add.s()).send()
    assert len(receipts) == 3
    assert groups_left(plane) == 1
    assert app.run_ready(["tasks"]) == 4
    assert named(calls, "total") == []
    assert groups_left(plane) == 0
    app.run_ready()
    assert named(calls, "total") == [("total", [2, 103, 4])]
    assert calls[-1] == ("add", 109, 1)
    assert [receipt.result() for receipt in receipts] == [2, 3, 4]


def test_groups_are_steps_and_members(
    app: TaskApp, plane: Plane, add: Task[..., int], total: Task[..., int], calls: Calls
) -> None:
    inner = group(add.s(), add.s(10)).then(total.s())
    add.s(1).then(group(inner, add.s(20), group(add.s(30)).then(total.s()))).then(total.s()).send()
    app.run_ready()
    assert calls[-1] == ("total", [3 + 12, 22, 32])
    group(group(add.s(1), add.s(2)), group(add.s(3))).then(plain(app).s()).send()
    app.run_ready()
    assert PLAIN == [[[2, 3], [4]]]
    assert groups_left(plane) == 0


PLAIN: list[Any] = []


def plain(app: TaskApp) -> Task[..., None]:
    PLAIN.clear()

    @app.task(name="plain")
    def plain(value: list[list[int]]) -> None:
        PLAIN.append(value)

    return plain


def test_a_group_without_a_next_step_has_no_document(
    app: TaskApp, plane: Plane, add: Task[..., int], total: Task[..., int]
) -> None:
    receipts = group(add.s(1), total.s([1, 2])).send()
    assert groups_left(plane) == 0
    app.run_ready()
    assert [receipt.result() for receipt in receipts] == [2, 3]


def test_members_that_finish_at_the_same_time_are_all_counted(
    *,
    app: TaskApp,
    plane: Plane,
    add: Task[..., int],
    total: Task[..., int],
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group(*[add.s(n) for n in range(3)]).then(total.s()).send()
    errors: list[FastnessError] = [CasMismatch("group", current_etag="other") for _ in range(5)]
    refuse_commits(plane, monkeypatch, errors)
    app.run_ready()
    assert errors == []
    assert named(calls, "total") == [("total", [1, 2, 3])]
    assert len(named(calls, "add")) == 3, "a conflict does not run a task again"


@pytest.mark.parametrize("nodes", [1, 2], ids=["memory", "two nodes of postgres"])
def test_many_threads_finish_a_group_once(request: pytest.FixtureRequest, nodes: int) -> None:
    url = "memory:" if nodes == 1 else request.getfixturevalue("postgres_url")
    members, totals = TASK_GROUP_MEMBERS_MAX // nodes, list[list[int]]()
    with ExitStack() as opened:
        apps = [TaskApp(opened.enter_context(fastness.open(url))) for _ in range(nodes)]
        member = [app.task(name="member", queue="members")(abs) for app in apps][-1]
        last = [app.task(name="last", queue="last")(totals.append) for app in apps][-1]
        group(*[member.s(n) for n in range(members)]).then(last.s()).send()
        workers = [app.worker(concurrency=4, queues=["members"]) for app in apps]
        for worker in workers:
            worker.start()
        plane = apps[0].plane
        eventually(lambda: plane.queue("last").stats().put_total > 0)
        for worker in workers:
            worker.stop()
        assert plane.queue("members").stats().acked_total == members
        assert apps[-1].run_ready() == 1
        assert totals == [list(range(members))]
        assert groups_left(plane) == 0


def test_a_redriven_member_completes_its_group(
    *, app: TaskApp, plane: Plane, clock: ManualClock, add: Task[..., int], total: Task[..., int], calls: Calls
) -> None:
    healthy: list[bool] = []

    @app.task(max_attempts=1)
    def fragile() -> int:
        if not healthy:
            raise ValueError("not yet")
        return 5

    group(add.s(1), fragile.s()).then(total.s()).send()
    app.run_ready()
    assert named(calls, "total") == []
    healthy.append(True)
    assert plane.queue("tasks").redrive() == 1
    app.run_ready()
    assert named(calls, "total") == [("total", [2, 5])]


def test_a_group_whose_document_was_removed_starts_nothing(
    app: TaskApp, plane: Plane, add: Task[..., int], total: Task[..., int], calls: Calls
) -> None:
    group(add.s(1)).then(total.s()).send()
    [key] = [key for key, _ in plane.pairs.scan(b"", b"\xff") if b"tasks/groups/" in key]
    name = key[key.index(b"tasks/groups/") :].rstrip(b"\x00").decode()
    plane.state(name).remove()
    app.run_ready()
    assert plane.queue("tasks").stats().acked_total == 1
    assert named(calls, "total") == []


def test_a_result_that_does_not_fit_its_group_is_rejected(app: TaskApp, plane: Plane, total: Task[..., int]) -> None:
    @app.task
    def large(size: int) -> str:
        return "x" * size

    receipts = group(large.s(1_000), large.s(200_000)).then(total.s()).send()
    app.run_ready()
    assert receipts[0].result() == "x" * 1_000
    with pytest.raises(MessageFailed, match="store it as a blob"):
        receipts[1].result()


def test_a_large_result_is_passed_to_the_next_step(app: TaskApp) -> None:
    sizes = []

    @app.task
    def large() -> bytes:
        return b"x" * 200_000

    @app.task
    def measure(data: bytes) -> None:
        sizes.append(len(data))

    [receipt] = large.s().then(measure.s()).send()
    app.run_ready()
    assert sizes == [200_000]
    assert len(receipt.result()) == 200_000


# Compensations.


def test_a_compensation_starts_when_the_last_attempt_has_failed(
    *, app: TaskApp, plane: Plane, clock: ManualClock, fail: Task[..., None], undo: Task[..., None], calls: Calls
) -> None:
    receipt = fail.s(1).on_failure(undo.s("a").then(undo.s("b"), pass_result=False)).on_failure(undo.s("c")).send()
    app.run_ready()
    assert named(calls, "undo") == []
    clock.advance_ms(2_000)
    app.run_ready()
    assert calls[:2] == [("fail", 1)] * 2
    assert sorted(named(calls, "undo")) == [("undo", "a"), ("undo", "b"), ("undo", "c")]
    with pytest.raises(MessageFailed, match="no luck"):
        receipt.result()


def test_a_compensation_of_a_chain_starts_for_any_step(
    *, app: TaskApp, clock: ManualClock, add: Task[..., int], fail: Task[..., None], undo: Task[..., None], calls: Calls
) -> None:
    add.s(1).then(fail.s()).then(add.s()).on_failure(undo.s("trip")).send()
    app.run_ready()
    clock.advance_ms(2_000)
    app.run_ready()
    assert calls == [("add", 1, 1), ("fail", 2), ("fail", 2), ("undo", "trip")]
    calls.clear()
    add.s(1).on_failure(undo.s("x")).then(add.s()).on_failure(undo.s("y")).send()
    app.run_ready()
    assert calls == [("add", 1, 1), ("add", 2, 1)]
    with pytest.raises(InvalidArgument, match="call on_failure on its members"):
        add.s(1).then(group(add.s())).on_failure(undo.s("x"))
    with pytest.raises(InvalidArgument, match="call on_failure on its members"):
        group(add.s(1)).then(add.s()).on_failure(undo.s("x"))


def test_a_rejected_call_is_compensated(
    app: TaskApp, plane: Plane, undo: Task[..., None], add: Task[..., int], calls: Calls
) -> None:
    @app.task
    def work(number: str) -> None:
        raise Reject("never")

    work.s("a").on_failure(undo.s("rejected")).send()
    add.s(1).then(work.s().on_failure(undo.s("wrong type"))).send()
    app.run_ready()
    assert named(calls, "undo") == [("undo", "rejected"), ("undo", "wrong type")]
    assert plane.queue("tasks").stats().dead == 2


def test_the_dead_letter_and_its_compensation_are_one_commit(
    *,
    app: TaskApp,
    plane: Plane,
    clock: ManualClock,
    fail: Task[..., None],
    undo: Task[..., None],
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail.s(1).on_failure(undo.s("a")).send()
    app.run_ready()
    clock.advance_ms(2_000)
    refuse_commits(plane, monkeypatch, [QueueBusy("try again")])
    app.run_ready()
    stats = plane.queue("tasks").stats()
    assert (stats.dead, stats.delayed, named(calls, "undo")) == (0, 1, []), "neither has happened"
    clock.advance_ms(2_000)
    app.run_ready()
    assert calls == [("fail", 1)] * 3 + [("undo", "a")]
    assert plane.queue("tasks").stats().dead == 1


def test_a_lost_message_is_not_compensated(
    app: TaskApp, plane: Plane, clock: ManualClock, undo: Task[..., None], calls: Calls
) -> None:
    """Its lease ends while it fails for the last time, and the next attempt succeeds."""
    attempts = []

    @app.task(max_attempts=2, visibility_seconds=1)
    def work() -> None:
        attempts.append(current_job().attempt)
        if len(attempts) == 1:
            plane.queue("tasks").set_policy(QueuePolicy(retry_delay_seconds=0.001))
            clock.advance_ms(1_000)
            raise Reject("too late")

    work.s().on_failure(undo.s("a")).send()
    for _ in range(3):
        app.run_ready()
        clock.advance_ms(60_000)
    assert attempts == [1, 2]
    assert calls == []


# Bounds.


def test_chains_and_groups_are_bounded(app: TaskApp, plane: Plane, add: Task[..., int], undo: Task[..., None]) -> None:
    with pytest.raises(EmptyBatch, match="at least one member"):
        group()
    with pytest.raises(BatchTooLarge, match=f"at most {TASK_GROUP_MEMBERS_MAX}"):
        group(*[add.s(1)] * (TASK_GROUP_MEMBERS_MAX + 1))
    chain: Any = add.s(1)
    for _ in range(TASK_STEPS_MAX - 1):
        chain = chain.then(add.s())
    chain.send()
    too_long: list[Callable[[], Any]] = [
        lambda: chain.then(add.s()).send(),
        lambda: chain.on_failure(undo.s("x")).send(),
        lambda: group(*[add.s(1).then(add.s()).then(add.s())] * TASK_GROUP_MEMBERS_MAX).send(),
    ]
    for send in too_long:
        with pytest.raises(BatchTooLarge, match=f"at most {TASK_STEPS_MAX} calls and groups"):
            send()
    nested: Chainable = add.s(1)
    for _ in range(TASK_NESTING_MAX - 1):
        nested = group(nested)
    assert isinstance(nested, fastness.Group)
    nested.send()
    with pytest.raises(InvalidArgument, match=f"at most {TASK_NESTING_MAX} deep"):
        group(nested).send()
    with pytest.raises(InvalidArgument, match="leave no space for its results"):
        group(*[add.s(1)] * 100).then(undo.s("x" * 200_000), pass_result=False).send()
    assert plane.queue("tasks").stats().put_total == 2


def test_the_largest_group_is_one_commit(app: TaskApp, plane: Plane, add: Task[..., int]) -> None:
    members = [group(add.s(n)) for n in range(TASK_STEPS_MAX // 2 - 1)]
    receipts = group(*members).then(plain(app).s()).send()
    assert len(receipts) == len(members)
    assert app.run_ready() == len(members) + 1
    assert [[[n + 1] for n in range(len(members))]] == PLAIN
