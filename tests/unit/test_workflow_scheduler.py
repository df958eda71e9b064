"""The scheduler of workflows: the code is executed from its records, in the same order as it was executed first."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastness.errors import RunCancelled, RunFailed, StepFailed, WorkflowChanged, WorkflowMisuse
from fastness.hosts.workflows.operations import Call, ChildCall, SentCall, SleepCall, StepCall, WaitCall
from fastness.hosts.workflows.records import CANCEL, ENDED, FIRED, RECEIVED, START, Record, fold
from fastness.hosts.workflows.run import WorkflowRun
from fastness.hosts.workflows.scheduler import Scheduler
from fastness.hosts.workflows.workflow import Workflow
from fastness.wire import run_records as words
from fastness.wire import runs
from fastness.wire.canonical import canonical
from fastness.wire.restores import Entry


def begin(workflow: Workflow[..., Any], history: list[Record], generation: int = 0) -> Scheduler:
    """The code, executed as far as the history goes."""
    made: list[WorkflowRun] = []
    patches = frozenset(record[2] for record in history if record[0] == words.PATCH)
    scheduler = Scheduler(
        "r-1",
        lambda args, kwargs: workflow.function(made[0], *args, **kwargs),
        generation=generation,
        patches=patches,
    )
    made.append(WorkflowRun("r-1", workflow, "main", scheduler))
    for index, record in enumerate(history):
        scheduler.is_replaying = index < len(history) - 1
        scheduler.feed(record)
    return scheduler


class RecordedRun:
    """Executes one run, and can crash and restore it at any record."""

    def __init__(self, workflow: Workflow[..., Any], *args: Any) -> None:
        self.workflow = workflow
        self.history: list[Record] = []
        self.executed: list[str] = []  # The steps that were run.
        self.calls: dict[int, Call[Any]] = {}  # That were begun, and not recorded.
        self.scheduler = begin(workflow, [])
        self.now_ms = 1_000
        self.feed([START, self.now_ms, [list(args), {}], None])
        self.feed([words.BEGIN, self.now_ms, b"seed"])

    @property
    def outcome(self) -> Any:
        """The result of the code."""
        main = self.scheduler.main
        assert main is not None
        assert main.is_done
        if main.error is not None:
            raise main.error
        return main.value

    def feed(self, record: Record) -> None:
        """Record something, as the commit of a host does."""
        record = cbor2.loads(canonical(record))
        self.history.append(record)
        self.scheduler.feed(record)
        self._take()

    def restore(self, records: int | None = None, workflow: Workflow[..., Any] | None = None) -> None:
        """Crash, and execute the code again from the first `records` of the history."""
        self.scheduler.close()
        self.workflow = workflow or self.workflow
        self.history = self.history[:records]
        self.calls.clear()
        self.scheduler = begin(self.workflow, self.history)
        self._take()

    def signal(self, name: str, value: Any = None) -> None:
        self.feed([RECEIVED, self.now_ms, name, value, None])

    def cancel(self, reason: str = "") -> None:
        self.feed([CANCEL, self.now_ms, reason])

    def fire(self, number: int) -> None:
        """The timer of a call is due."""
        self.feed([FIRED, self.now_ms, f"0.{number}"])

    def end_child(self, id: str, state: str, result: Any = None, error: str | None = None) -> None:
        self.feed([ENDED, self.now_ms, id, {"state": state, "result": result, "error": error}])

    def record(self, call: Call[Any]) -> None:
        """Carry out a call, and record it."""
        self.calls.pop(call.number, None)
        self.now_ms += 1
        number, name, at = call.number, call.name, self.now_ms
        if isinstance(call, StepCall):
            self.executed.append(name)
            try:
                result = call.function(*call.args, **call.kwargs)
            except Exception as error:
                self.feed([words.FAILED, at, number, name, at, [type(error).__name__, str(error)], 1])
            else:
                self.feed([words.STEP, at, number, name, at, result])
        elif isinstance(call, SleepCall):
            self.feed([words.SLEEP, at, number, name, at + int(call.seconds * 1_000)])
        elif isinstance(call, WaitCall):
            due = None if call.seconds is None else at + int(call.seconds * 1_000)
            self.feed([words.WAIT, at, number, name, due])
        elif isinstance(call, ChildCall):
            self.feed([words.CHILD, at, number, name, call.id])
        else:
            assert isinstance(call, SentCall)
            self.executed.append(call.kind)
            self.feed([call.kind, at, number, name])

    def run(self) -> Any:
        """Carry out all calls, the oldest first, until the code ends or waits for something from outside."""
        while self.calls and not self.scheduler.is_ended:
            self.record(self.calls[min(self.calls)])
        return self.outcome if self.scheduler.is_ended else None

    def _take(self) -> None:
        for name in self.scheduler.new_patches:
            record = [words.PATCH, self.now_ms, name]
            self.history.append(record)
        self.scheduler.new_patches.clear()
        self.calls.update(self.scheduler.requested)
        self.scheduler.requested.clear()
        for call in self.scheduler.dropped:
            self.calls.pop(call.number, None)
        self.scheduler.dropped.clear()


def double(value: int) -> int:
    return value * 2


def add(*values: int) -> int:
    return sum(values)


def fail(reason: str) -> None:
    raise ValueError(reason)


def test_recorded_steps_are_not_run_again_after_a_restore_at_any_record() -> None:
    async def code(run: WorkflowRun, value: int) -> int:
        value = await run.step(double, value)
        first, second = await run.gather(run.step(double, value), run.step(double, value + 1))
        return await run.step(add, first, second)

    whole = RecordedRun(Workflow(code), 5)
    assert whole.run() == 42
    for records in range(2, len(whole.history) + 1):
        run = RecordedRun(Workflow(code), 5)
        run.run()
        run.executed.clear()
        run.restore(records)
        assert run.run() == 42
        assert len(run.executed) == 4 - (records - 2)


def test_branches_continue_in_the_order_of_their_records() -> None:
    seen: list[str] = []

    async def branch(run: WorkflowRun, name: str) -> str:
        for count in range(2):
            await run.step(double, count, name=f"{name}{count}")
            seen.append(f"{name}{count}")
        return name

    async def code(run: WorkflowRun) -> list[str]:
        return await run.gather(*(branch(run, name) for name in "abc"))

    run = RecordedRun(Workflow(code))
    order = ["c0", "a0", "c1", "b0", "b1", "a1"]
    for name in order:
        run.record(next(call for call in run.calls.values() if call.name == name))
    assert run.outcome == ["a", "b", "c"]
    assert seen == order
    seen.clear()
    run.restore()
    assert run.outcome == ["a", "b", "c"]
    assert seen == order


def test_the_first_failure_of_a_group_is_raised_at_once() -> None:
    async def code(run: WorkflowRun) -> Any:
        try:
            await run.gather(run.sleep(timedelta(days=30)), run.step(fail, "no"), run.step(double, 1))
        except StepFailed as error:
            return [error.step, error.error_type, error.message, str(error)]

    run = RecordedRun(Workflow(code))
    assert run.run() == ["fail", "ValueError", "no", "Step fail failed: ValueError: no"]
    run.restore()
    assert run.run() == ["fail", "ValueError", "no", "Step fail failed: ValueError: no"]


def test_a_signal_is_kept_until_it_is_waited_for_and_consumed_once() -> None:
    async def code(run: WorkflowRun) -> list[Any]:
        await run.step(double, 1)
        first = await run.wait_for("go", timeout=60)
        return [first, await run.wait_for("go", timeout=60), await run.wait_for("go", timeout=timedelta(hours=1))]

    run = RecordedRun(Workflow(code))
    run.signal("go", 1)
    run.signal("other", 0)
    run.run()
    run.signal("go", 2)
    run.run()
    run.fire(2)  # The timer of the second wait, which has ended: it means nothing.
    run.fire(3)
    assert run.outcome == [1, 2, None]
    assert run.scheduler.signals == [("other", 0)]
    run.restore()
    assert run.outcome == [1, 2, None]


def test_the_oldest_wait_gets_the_next_signal() -> None:
    async def code(run: WorkflowRun) -> list[Any]:
        return list(await run.gather(run.wait_for("go"), run.wait_for("go"), run.wait_for("go")))

    run = RecordedRun(Workflow(code))
    for value in (1, 2, 3):
        run.signal("go", value)
    assert run.outcome == [1, 2, 3]


def test_a_signal_cancels_the_timer_of_its_wait() -> None:
    async def code(run: WorkflowRun) -> Any:
        return await run.wait_for("go", timeout=60)

    run = RecordedRun(Workflow(code))
    run.run()
    assert run.scheduler.timers == {"0.0": 0}
    run.signal("go", True)
    assert run.outcome is True
    assert (run.scheduler.timers, run.scheduler.stale_timers) == ({}, ["0.0"])


def test_a_changed_call_is_named_with_what_was_recorded() -> None:
    async def old(run: WorkflowRun) -> None:
        await run.step(double, 1)
        await run.step(add, 1, 2)
        await run.wait_for("go")

    async def renamed(run: WorkflowRun) -> None:
        await run.step(double, 1)
        await run.step(fail, "no")

    async def shorter(run: WorkflowRun) -> None:
        await run.step(double, 1)

    async def other_kind(run: WorkflowRun) -> None:
        await run.step(double, 1)
        await run.sleep(1)

    run = RecordedRun(Workflow(old))
    run.run()
    with pytest.raises(WorkflowChanged, match=r"recorded step add as call 1, and the code makes the call step fail"):
        run.restore(workflow=Workflow(renamed))
    with pytest.raises(WorkflowChanged, match=r"recorded step add as call 1, and the code makes no such call"):
        run.restore(workflow=Workflow(shorter))
    with pytest.raises(WorkflowChanged, match=r"recorded step add as call 1, and the code makes the call sleep"):
        run.restore(workflow=Workflow(other_kind))
    run.restore(workflow=Workflow(old))  # The code is as before: the run continues.
    run.signal("go")
    assert run.outcome is None


def test_code_that_fails_before_a_recorded_call_is_reported_with_its_error() -> None:
    async def old(run: WorkflowRun) -> None:
        await run.step(double, 1)

    async def failing(run: WorkflowRun) -> None:
        raise KeyError("currency")

    run = RecordedRun(Workflow(old))
    run.run()
    with pytest.raises(
        WorkflowChanged, match=r"step double as call 0, and the code fails before .*KeyError: 'currency'"
    ):
        run.restore(workflow=Workflow(failing))


async def not_awaited(run: WorkflowRun) -> None:
    run.step(double, 1)


async def not_awaited_after_it_began(run: WorkflowRun) -> None:
    run.step(double, 1)
    await run.step(double, 2)


async def not_awaited_in_a_branch(run: WorkflowRun) -> None:
    async def branch() -> None:
        run.step(double, 1)

    await run.gather(branch())


async def not_awaited_in_a_group(run: WorkflowRun) -> None:
    run.gather(run.step(double, 1))


async def not_awaited_when_it_continues(run: WorkflowRun) -> None:
    run.step(double, 1)
    run.continue_as_new()


@pytest.mark.parametrize(
    "code",
    [
        not_awaited,
        not_awaited_after_it_began,
        not_awaited_in_a_branch,
        not_awaited_in_a_group,
        not_awaited_when_it_continues,
    ],
)
def test_code_that_ends_without_a_step_that_it_does_not_await_is_refused(
    code: Callable[..., Coroutine[Any, Any, None]],
) -> None:
    run = RecordedRun(Workflow(code))
    if code is not_awaited_after_it_began:
        run.record(run.calls[1])
    for _ in range(2):
        with pytest.raises(
            WorkflowMisuse, match=r"without step double \(call 0\), which the code does not await.*Await it"
        ):
            run.run()
        run.restore()


def test_code_that_ends_without_awaiting_its_branches_is_refused() -> None:
    async def branch(run: WorkflowRun) -> None:
        await run.step(double, 1)

    async def code(run: WorkflowRun) -> None:
        run.gather(branch(run))
        await run.wait_for("go")

    run = RecordedRun(Workflow(code))
    run.signal("go")
    with pytest.raises(WorkflowMisuse, match=r"without a coroutine that was given to run\.gather"):
        run.run()


def test_code_may_end_while_steps_run_whose_group_has_failed() -> None:
    async def branch(run: WorkflowRun) -> None:
        slow = run.step(double, 1, name="slow")
        await run.sleep(60)
        await slow

    async def code(run: WorkflowRun) -> str:
        try:
            await run.gather(run.step(double, 2, name="slow too"), branch(run), run.step(fail, "no"))
        except StepFailed:
            return "handled"
        return "done"

    run = RecordedRun(Workflow(code))
    run.record(run.calls[1])
    assert run.outcome == "handled"


def test_timers_and_waits_that_the_code_does_not_need_any_more_end_with_it() -> None:
    async def code(run: WorkflowRun) -> str:
        run.sleep(60)
        run.wait_for("stop")
        return "done"

    assert RecordedRun(Workflow(code)).outcome == "done"


async def with_a_timeout(run: WorkflowRun) -> None:
    async with asyncio.timeout(5):
        await run.sleep(60)


async def with_a_timeout_without_an_end(run: WorkflowRun) -> None:
    async with asyncio.timeout(None):
        await run.sleep(60)


async def with_wait_for(run: WorkflowRun) -> None:
    sleeping = branch_of(run)
    try:
        await asyncio.wait_for(sleeping, 5)
    finally:
        sleeping.close()


async def with_sleep(run: WorkflowRun) -> None:
    await asyncio.sleep(5)


async def with_a_task_group(run: WorkflowRun) -> None:
    async with asyncio.TaskGroup():
        await run.sleep(60)


async def with_the_loop(run: WorkflowRun) -> None:
    asyncio.get_running_loop().call_soon(print)


async def branch_of(run: WorkflowRun) -> None:
    await run.sleep(60)


@pytest.mark.parametrize(
    "code",
    [with_a_timeout, with_a_timeout_without_an_end, with_wait_for, with_sleep, with_a_task_group, with_the_loop],
)
async def test_code_that_uses_the_event_loop_is_refused_and_told_what_works(
    code: Callable[..., Coroutine[Any, Any, None]],
) -> None:
    loop = asyncio.get_running_loop()
    run = RecordedRun(Workflow(code))
    with pytest.raises(WorkflowMisuse, match=r"run\.step\(function, …, timeout=5\); wait with run\.sleep"):
        run.run()
    assert asyncio.get_running_loop() is loop


def test_a_result_that_does_not_fit_the_annotation_any_more_is_a_change() -> None:
    def text(value: int) -> Any:
        return str(value)

    def number(value: int) -> int:
        return value

    async def old(run: WorkflowRun) -> Any:
        await run.step(text, 1, name="read")
        await run.wait_for("go")

    async def new(run: WorkflowRun) -> Any:
        return await run.step(number, 1, name="read")

    run = RecordedRun(Workflow(old))
    run.run()
    with pytest.raises(WorkflowChanged, match="recorded step read as call 0"):
        run.restore(workflow=Workflow(new))


def test_a_patch_applies_to_runs_that_come_to_it_with_the_new_code() -> None:
    async def old(run: WorkflowRun) -> int:
        value = await run.step(double, 1)
        value = await run.step(double, value)
        await run.wait_for("go")
        return value

    async def new(run: WorkflowRun) -> int:
        value = await run.step(double, 1)
        if run.patched("add instead"):
            value = await run.step(add, value, 10)
        else:
            value = await run.step(double, value)
        await run.wait_for("go")
        return value

    for records, result in ((2, 12), (3, 12), (4, 4), (5, 4)):  # The patched line is after the third record.
        run = RecordedRun(Workflow(old))
        run.run()
        run.restore(records, Workflow(new))
        run.run()
        for _ in range(2):  # The answer is the same after every further restore.
            run.restore()
            run.run()
        run.signal("go")
        assert run.outcome == result


def test_cancel_raises_at_the_current_await_and_the_code_may_clean_up() -> None:
    async def part(run: WorkflowRun) -> None:
        try:
            await run.sleep(60)
        finally:
            await run.step(double, 2, name="undo part")

    async def code(run: WorkflowRun) -> None:
        try:
            await run.gather(part(run), run.step(double, 1))
        except RunCancelled as error:
            await run.step(double, 1, name=f"undo after {error}")
            raise

    run = RecordedRun(Workflow(code))
    run.record(run.calls[1])  # The sleep; the step is running.
    run.cancel("too late")
    assert [call.name for call in run.calls.values()] == ["undo part"]
    for _ in range(2):
        with pytest.raises(RunCancelled, match="too late"):
            run.run()
        assert run.executed == ["undo part", "undo after Run r-1 was cancelled: too late"]
        run.restore()


def test_cancel_ends_every_kind_of_call() -> None:
    async def awaited(run: WorkflowRun, kind: str) -> str:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "step": lambda: run.step(double, 1),
            "sleep": lambda: run.sleep(1),
            "wait": lambda: run.wait_for("go"),
            "child": lambda: run.child(_CHILD, 1),
            "put": lambda: run.put("jobs", 1),
        }
        try:
            await calls[kind]()
        except RunCancelled:
            return kind
        return ""

    async def code(run: WorkflowRun) -> list[str]:
        return await run.gather(*(awaited(run, kind) for kind in ("step", "sleep", "wait", "child", "put")))

    run = RecordedRun(Workflow(code))
    run.cancel()
    assert run.outcome == ["step", "sleep", "wait", "child", "put"]


def test_a_run_that_is_cancelled_before_it_begins_executes_nothing() -> None:
    async def code(run: WorkflowRun) -> None:
        await run.step(double, 1)

    history: list[Record] = [[START, 1, [[], {}], None], [CANCEL, 1, "no"], [words.BEGIN, 1, b"seed"]]
    scheduler = begin(Workflow(code), history)
    assert scheduler.is_ended
    assert not scheduler.requested
    assert isinstance(scheduler.main and scheduler.main.error, RunCancelled)


def test_a_cancelled_error_of_the_code_is_an_error_of_the_run() -> None:
    async def code(run: WorkflowRun) -> None:
        await run.step(double, 1)
        raise asyncio.CancelledError

    run = RecordedRun(Workflow(code))
    with pytest.raises(asyncio.CancelledError):
        run.run()
    assert run.scheduler.is_ended


def test_what_was_sent_before_a_cancellation_is_still_sent() -> None:
    async def code(run: WorkflowRun) -> None:
        await run.put("jobs", {"n": 1})

    run = RecordedRun(Workflow(code))
    run.cancel()
    assert [call.kind for call in run.calls.values()] == ["put"]
    run.restore()
    assert [call.kind for call in run.calls.values()] == ["put"]
    with pytest.raises(RunCancelled):
        _ = run.outcome


def test_children_give_their_results_and_errors() -> None:
    async def child(run: WorkflowRun, value: int) -> int:
        return value

    flow: Workflow[..., int] = Workflow(child)

    async def code(run: WorkflowRun) -> list[Any]:
        first, second = run.child(flow, 1), run.child(flow, 2, id="other")
        try:
            await second
        except RunFailed as error:
            return [await first, str(error)]
        return []

    run = RecordedRun(Workflow(code))
    run.run()
    assert run.scheduler.children == {"r-1.0.0": 0, "other": 1}
    run.end_child("other", "failed", error="ValueError: no")
    run.restore()
    run.end_child("r-1.0.0", "completed", 7)
    assert run.outcome == [7, "Child other failed: ValueError: no"]


def test_time_and_random_numbers_are_the_same_in_every_execution() -> None:
    async def code(run: WorkflowRun) -> list[Any]:
        found = [run.now().timestamp(), run.random(), run.uuid().hex]
        await run.step(double, 1)
        return [*found, run.now().timestamp(), run.random(), run.uuid().hex]

    run = RecordedRun(Workflow(code))
    first = run.run()
    assert len({str(each) for each in first}) == 6
    run.restore()
    assert run.run() == first


def test_only_calls_of_run_can_be_awaited() -> None:
    async def code(run: WorkflowRun) -> str:
        await run.step(double, 1)
        try:
            await asyncio.sleep(0)
        except WorkflowMisuse as error:
            return str(error)
        return "slept"

    run = RecordedRun(Workflow(code))
    assert "put everything else that waits into a step" in run.run()


def test_run_cannot_be_used_in_a_step() -> None:
    async def code(run: WorkflowRun) -> str:
        def step() -> None:
            run.sleep(1)

        try:
            await run.step(step)
        except StepFailed as error:
            return error.error_type
        return ""

    assert RecordedRun(Workflow(code)).run() == "WorkflowMisuse"


def test_a_dropped_run_executes_nothing_of_its_clean_up() -> None:
    cleaned: list[str] = []

    async def code(run: WorkflowRun) -> None:
        try:
            await run.sleep(60)
        finally:
            await run.step(cleaned.append, "step")
            cleaned.append("code")

    run = RecordedRun(Workflow(code))
    run.run()
    run.scheduler.close()
    assert cleaned == []


def test_continue_as_new_starts_with_an_empty_history_and_the_signals_that_are_left() -> None:
    async def code(run: WorkflowRun, month: int) -> None:
        await run.wait_for("paid")
        run.continue_as_new(month + 1)

    run = RecordedRun(Workflow(code), 1)
    for _ in range(3):
        run.signal("paid", True)
    run.signal("other")
    assert run.scheduler.continued == [[2], {}]
    signals = [list(each) for each in run.scheduler.signals]
    entry: Record = [words.CONTINUE, 5_000, b"new", run.scheduler.continued, signals]
    state = fold({"generation": 0, "now": 0, "history": run.history}, Entry(9, "entry", entry))
    assert state["generation"] == 1
    assert state["history"] == [
        [START, 5_000, [[2], {}], None],
        [RECEIVED, 5_000, "paid", True, None],
        [RECEIVED, 5_000, "paid", True, None],
        [RECEIVED, 5_000, "other", None, None],
        [words.BEGIN, 5_000, b"new"],
    ]
    following = begin(Workflow(code), state["history"], generation=1)
    assert following.continued == [[3], {}]
    assert following.timer_of(0) == "1.0"


def test_the_journal_is_folded_into_the_history() -> None:
    journal: list[tuple[str, Any]] = [
        ("snapshot", {"height": 0}),
        ("entry", {"turn": 1_000}),
        ("ingress", {"seq": 0, "type": "domain_event", "schema": runs.START, "payload": canonical([[1], {}])}),
        ("entry", ["begin", 1_001, b"seed"]),
        ("entry", {"turn": 2_000}),
        ("ingress", {"seq": 1, "type": "domain_event", "schema": runs.SIGNAL, "key": b"go", "payload_blob": "ab"}),
        ("ingress", {"seq": 2, "type": "domain_event", "schema": "order", "payload": b"\xff"}),
        ("ingress", {"seq": 3, "type": "domain_event", "schema": runs.SIGNAL, "key": b"go", "payload": b"\xff"}),
        ("ingress", {"seq": 4, "type": "timer_fired", "timer_id": "0.3"}),
        ("entry", {"aside": 5}),
        ("ingress", {"seq": 6, "type": "control", "command": runs.CANCEL, "payload": b"why"}),
    ]
    state = None
    for height, (kind, value) in enumerate(journal):
        state = fold(state, Entry(height, kind, value))
    assert state == {
        "generation": 0,
        "now": 2_000,
        "history": [
            [START, 1_000, [[1], {}], None],
            ["begin", 1_001, b"seed"],
            [RECEIVED, 2_000, "go", None, "ab"],
            [FIRED, 2_000, "0.3"],
            [CANCEL, 2_000, "why"],
        ],
    }


# Random programs: every prefix of the history gives the state that the run had at that record.

Program = list[Any]

_LEAVES = st.sampled_from(
    [
        ["step"],
        ["fail"],
        ["sleep"],
        ["wait", "a", None],
        ["wait", "a", 5],
        ["wait", "b", 5],
        ["child"],
        ["put"],
        ["later"],
    ]
)
_PROGRAMS = st.recursive(
    _LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=4).map(lambda each: ["sequence", *each]),
        st.lists(parts, min_size=1, max_size=4).map(lambda each: ["gather", *each]),
        parts.map(lambda each: ["cleanup", each]),
    ),
    max_leaves=12,
)


async def _child(run: WorkflowRun, value: int) -> int:
    return value


_CHILD: Workflow[..., int] = Workflow(_child)


async def execute(run: WorkflowRun, program: Program, trace: list[Any]) -> Any:
    """Run a random program; `trace` has the results in the order in which the code saw them."""
    word, *parts = program
    result: Any = None
    try:
        match word:
            case "step":
                result = await run.step(double, 1)
            case "fail":
                result = await run.step(fail, "no")
            case "sleep":
                await run.sleep(1)
            case "wait":
                result = await run.wait_for(parts[0], parts[1])
            case "child":
                result = await run.child(_CHILD, 1)
            case "put":
                await run.put("jobs", run.random())
            case "later":
                run.step(double, 2)  # Never awaited.
            case "sequence":
                result = [await execute(run, part, trace) for part in parts]
            case "gather":
                result = await run.gather(*(execute(run, part, trace) for part in parts))
            case "cleanup":
                try:
                    result = await execute(run, parts[0], trace)
                finally:
                    await run.step(add, 1, 2)
    except StepFailed as error:
        result = str(error)
    except RunFailed as error:
        result = str(error)
    except RunCancelled:
        trace.append([word, "cancelled"])
        raise
    trace.append([word, result, run.now().timestamp()])
    return result


def workflow_of(program: Program, trace: list[Any]) -> Workflow[..., Any]:
    async def code(run: WorkflowRun) -> Any:
        return await execute(run, program, trace)

    return Workflow(code)


def described(scheduler: Scheduler, trace: list[Any]) -> Any:
    """Everything that decides how a run goes on."""
    main = scheduler.main
    pending = [(call.number, call.kind, call.name) for call in scheduler._pending.values()]
    outcome = (main.value, str(main.error)) if main is not None and main.is_done else None
    return pending, dict(scheduler.timers), dict(scheduler.children), list(scheduler.signals), outcome, list(trace)


@settings(max_examples=150, deadline=None)
@given(_PROGRAMS, st.data())
def test_every_prefix_of_a_history_restores_the_run_as_it_was(program: Program, data: st.DataObject) -> None:
    trace: list[Any] = []
    run = RecordedRun(workflow_of(program, trace))
    states = [described(run.scheduler, trace)]
    try:
        for _ in range(60):
            if run.scheduler.is_ended:
                break
            if not act_at_random(run, data):
                trace.clear()
                run.restore()
                assert described(run.scheduler, trace) == states[-1]
            else:
                states.append(described(run.scheduler, trace))
    finally:
        run.scheduler.close()
    numbers = [record[2] for record in run.history if record[0] in (words.STEP, words.FAILED, words.PUT)]
    assert len(numbers) == len(set(numbers)) == len(run.executed)  # What is recorded is not carried out again.
    for records, expected in enumerate(states, start=2):
        again: list[Any] = []
        restored = begin(workflow_of(program, again), run.history[:records])
        assert described(restored, again) == expected
        restored.close()


def act_at_random(run: RecordedRun, data: st.DataObject) -> bool:
    """Carry out one thing that can happen now; False if that is a crash."""
    actions: list[tuple[str, Any]] = [("record", each) for each in sorted(run.calls)]
    actions += [("signal", each) for each in "ab"]
    actions += [("fire", each) for each in run.scheduler.timers.values()]
    actions += [("child", each) for each in run.scheduler.children]
    actions += [("cancel", "stop"), ("crash", None)]
    action, target = data.draw(st.sampled_from(actions))
    match action:
        case "record":
            run.record(run.calls[target])
        case "signal":
            run.signal(target, len(run.history))
        case "fire":
            run.fire(target)
        case "child":
            run.end_child(target, data.draw(st.sampled_from(["completed", "failed"])), 1, "no")
        case "cancel":
            run.cancel(target)
    return bool(action != "crash")
