"""Durable runs of Pydantic AI agents: what is recorded is not done again, on any host and with any result."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_ai import Agent, FunctionToolset, ModelRetry, RunContext
from pydantic_ai.capabilities import ProcessEventStream
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.toolsets import AbstractToolset, DynamicToolset

import fastness
from fastness import AsyncHost, Host, HostApp, Plane, Retry, WorkflowRun
from fastness import pydantic_ai as adapter
from fastness.errors import InvalidArgument, RunFailed
from fastness.limits import AGENT_OUTPUT_BYTES_MAX, AGENT_RECORD_BYTES_MAX, RUN_RESULT_BYTES_MAX
from fastness.pydantic_ai import FastnessDurability, agent_workflow, run_agent
from fastness.testing import HostTest, crash_everywhere

PATIENCE_SECONDS = 60.0  # A bound for every wait; far more than any test needs.
JOURNAL = "agent:r.1.0.0"  # Of the first step of the run r.


def scripted(*answers: ModelResponse, calls: Counter[str] | None = None) -> FunctionModel:
    """A model that answers with these responses in order, by the number of responses in its history."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        number = sum(isinstance(message, ModelResponse) for message in messages)
        if calls is not None:
            calls[f"request {number}"] += 1
        return answers[number]

    return FunctionModel(answer)


def says(text: str) -> ModelResponse:
    return ModelResponse(parts=[TextPart(text)])


def calls_tools(*tools: tuple[str, dict[str, Any]]) -> ModelResponse:
    return ModelResponse(
        parts=[ToolCallPart(name, args, tool_call_id=f"{name}-{number}") for number, (name, args) in enumerate(tools)]
    )


def durable(model: Any, **options: Any) -> Agent[Any, Any]:
    return Agent(model, name="helper", capabilities=[FastnessDurability()], **options)


def ask_on(test: HostTest, workflow: Any, prompt: str = "tides") -> Any:
    return test.run_to_end(test.plane.workflows.start(workflow, prompt, id="r"))


def entries(plane: Plane, journal: str = JOURNAL) -> list[list[Any]]:
    return [cbor2.loads(record.value) for record in plane.world(journal).read()]


def operations(plane: Plane, journal: str = JOURNAL) -> list[str]:
    """The names of the recorded operations, without those of the agent and its toolset."""
    return [entry[1].split(".", 1)[1] for entry in entries(plane, journal) if entry[0] != "open"]


def seaside(calls: Counter[str]) -> Agent[Any, Any]:
    """An agent with two tools that are called in one response, and a third one."""
    model = scripted(
        calls_tools(("tide", {"place": "Dover"}), ("wind", {"place": "Dover"})),
        calls_tools(("book", {"boat": 7})),
        says("Boat 7 is booked."),
        calls=calls,
    )
    agent = durable(model)

    @agent.tool_plain
    async def tide(place: str) -> str:
        calls["tide"] += 1
        return f"high in {place}"

    @agent.tool_plain
    def wind(place: str) -> str:  # On a thread.
        calls["wind"] += 1
        return f"calm in {place}"

    @agent.tool_plain
    async def book(boat: int) -> int:
        calls["book"] += 1
        return boat

    return agent


OPERATIONS = ["request", "call_tool:tide", "call_tool:wind", "request", "call_tool:book", "request"]


def test_hosts_that_are_killed_or_delayed_anywhere_repeat_only_the_running_operation() -> None:
    calls: Counter[str] = Counter()
    app = HostApp()
    ask = agent_workflow(seaside(calls), app=app)

    def scenario(test: HostTest) -> Any:
        calls.clear()
        output = ask_on(test, ask)
        assert operations(test.plane) == OPERATIONS
        assert set(calls.values()) <= {1, 2}
        assert sum(calls.values()) <= len(OPERATIONS) + 1
        return output

    report = crash_everywhere(app, scenario)
    assert report.result == "Boat 7 is booked."
    assert sum("append of agent:" in boundary for boundary in report.boundaries) == 2 * (len(OPERATIONS) + 1)


@pytest.fixture(params=["memory", "dir"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plane]:
    with fastness.open("memory:" if request.param == "memory" else f"dir:{tmp_path}") as plane:
        yield plane


def test_a_retry_repeats_no_operation_that_has_ended(plane: Plane) -> None:
    calls: Counter[str] = Counter()
    runs: list[tuple[Any, ...]] = []
    model = scripted(calls_tools(("tide", {}), ("fail", {})), says("done"), calls=calls)
    agent = durable(model)

    @agent.tool
    async def tide(context: RunContext[Any]) -> str:
        calls["tide"] += 1
        return "high"

    @agent.tool
    async def fail(context: RunContext[Any]) -> None:
        calls["fail"] += 1
        runs.append((context.run_id, context.conversation_id, context.tool_call_id, fastness.current_step().id))
        if calls["fail"] < 3:
            raise ConnectionError("the sea is rough")

    app = HostApp()
    ask = agent_workflow(agent, name="ask", app=app, retry=Retry(3, delay_seconds=0))
    with Host(plane, app):
        assert plane.workflows.start(ask, "tides", id="r").result(wait_seconds=PATIENCE_SECONDS) == "done"
    assert calls == {"request 0": 1, "tide": 1, "fail": 3, "request 1": 1}
    assert len(set(runs)) == 1  # All ids are the same in every attempt.
    assert [entry[:3] for entry in entries(plane) if entry[0] == "open"] == [
        ["open", 1, number] for number in (1, 2, 3)
    ]


async def test_an_async_host_runs_agents() -> None:
    app = HostApp()
    ask = agent_workflow(seaside(Counter()), app=app)
    async with fastness.open_async("memory:") as plane, AsyncHost(plane, app):
        run = await plane.workflows.start(ask, "tides")
        assert await run.result(wait_seconds=PATIENCE_SECONDS) == "Boat 7 is booked."


@dataclass
class Plan:
    """What a model does: calls of tools in rounds, each with the number of times that it fails first."""

    rounds: list[list[tuple[str, int]]]


tool_calls = st.tuples(st.sampled_from(["double", "retry", "big", "crash"]), st.integers(0, 3))
plans = st.builds(Plan, st.lists(st.lists(tool_calls, min_size=1, max_size=3), max_size=3))


@settings(max_examples=settings.default.max_examples // 4)  # Each runs two agents, one of them with a host.
@given(plans)
def test_any_agent_ends_as_without_durability_and_does_each_operation_once(plan: Plan) -> None:
    done: Counter[str] = Counter()
    attempts: Counter[str] = Counter()

    def make(capabilities: list[Any]) -> Agent[Any, Any]:
        async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            number = sum(isinstance(message, ModelResponse) for message in messages)
            done[f"request {number}"] += 1
            if number < len(plan.rounds):
                return ModelResponse(
                    parts=[
                        ToolCallPart(name, {"value": value}, tool_call_id=f"{number}.{index}")
                        for index, (name, value) in enumerate(plan.rounds[number])
                    ]
                )
            parts = [part for message in messages for part in message.parts]
            return says(json.dumps([part.content for part in parts if isinstance(part, ToolReturnPart)]))

        agent = Agent(FunctionModel(answer), name="helper", capabilities=capabilities, retries=10)

        @agent.tool
        async def double(context: RunContext[Any], value: int) -> int:
            done[context.tool_call_id or ""] += 1
            return value * 2

        @agent.tool
        async def retry(context: RunContext[Any], value: int) -> int:
            done[context.tool_call_id or ""] += 1
            if value:
                raise ModelRetry("give another value")
            return value

        @agent.tool
        async def big(context: RunContext[Any], value: int) -> str:
            done[context.tool_call_id or ""] += 1
            return "ü" * (value * AGENT_RECORD_BYTES_MAX // 12 + 1)

        @agent.tool
        async def crash(context: RunContext[Any], value: int) -> int:
            id = context.tool_call_id or ""
            attempts[id] += 1
            if capabilities and attempts[id] <= value:
                raise ConnectionError("not yet")
            done[id] += 1
            return value

        return agent

    expected = asyncio.run(make([]).run("go")).output
    expected_calls, done = done, Counter()
    attempts.clear()
    app = HostApp()
    ask = agent_workflow(make([FastnessDurability()]), app=app, retry=Retry(100, delay_seconds=0))
    with HostTest(app) as test:
        assert ask_on(test, ask) == expected
        assert done == expected_calls
        assert len(operations(test.plane)) == sum(done.values())


def test_large_results_and_outputs_are_blobs_that_a_collection_keeps(tmp_path: Path) -> None:
    text = "tide " * AGENT_RECORD_BYTES_MAX
    agent = durable(scripted(calls_tools(("log", {}), ("fail", {})), says(text)))
    attempts: Counter[str] = Counter()

    @agent.tool_plain
    async def log() -> str:
        attempts["log"] += 1
        return text

    app = HostApp()
    ask = agent_workflow(agent, app=app, retry=Retry(2, delay_seconds=0))
    with fastness.open(f"dir:{tmp_path}") as plane:

        @agent.tool_plain
        async def fail() -> None:
            attempts["fail"] += 1
            if attempts["fail"] == 1:
                plane.gc(grace_seconds=0)
                raise ConnectionError

        with Host(plane, app):
            run = plane.workflows.start(ask, "tides", id="r")
            assert run.result(wait_seconds=PATIENCE_SECONDS) == text
        assert [entry[0] for entry in entries(plane) if entry[0] != "open"] == ["done", "blob", "done", "blob"]
        assert max(len(record.value) for record in plane.world(JOURNAL).read()) < AGENT_RECORD_BYTES_MAX
        assert attempts == {"log": 1, "fail": 2}
        plane.gc(grace_seconds=0)
        assert run.result() == text


@pytest.mark.parametrize("size", [RUN_RESULT_BYTES_MAX - 1_100, RUN_RESULT_BYTES_MAX, AGENT_OUTPUT_BYTES_MAX - 5])
def test_an_output_of_any_size_up_to_the_limit_is_returned_whole(size: int) -> None:
    app = HostApp()
    ask = agent_workflow(durable(scripted(says("x" * size))), app=app)
    with HostTest(app) as test:
        assert ask_on(test, ask) == "x" * size


def test_a_larger_output_fails_and_says_what_to_do() -> None:
    app = HostApp()
    ask = agent_workflow(durable(scripted(says("x" * AGENT_OUTPUT_BYTES_MAX))), app=app)
    with HostTest(app) as test, pytest.raises(RunFailed, match=r"PayloadTooLarge.*store a blob in a tool"):
        ask_on(test, ask)


class Answer(BaseModel):
    place: str
    high: list[float]


def test_a_structured_output_is_what_json_has_and_dependencies_are_made_in_each_attempt() -> None:
    made: list[int] = []
    agent = Agent(
        TestModel(), name="helper", deps_type=list[int], output_type=Answer, capabilities=[FastnessDurability()]
    )

    @agent.tool
    def fail_once(context: RunContext[list[int]]) -> int:
        if len(context.deps) == 1:
            raise ConnectionError
        return len(context.deps)

    def make_deps() -> list[int]:
        made.append(len(made))
        return list(made)

    app = HostApp()
    ask = agent_workflow(agent, app=app, deps=make_deps, retry=Retry(2, delay_seconds=0))
    with HostTest(app) as test:
        assert Answer.model_validate(ask_on(test, ask)).high == [0]
    assert made == [0, 1]


def test_agents_are_steps_of_any_workflow_each_with_its_own_journal() -> None:
    app = HostApp()
    first, second = (
        durable(scripted(says("a draft"))),
        Agent(scripted(says("a review")), name="critic", capabilities=[FastnessDurability()]),
    )

    @app.workflow
    async def write(run: WorkflowRun, topic: str) -> list[str]:
        drafts = await run.gather(run_agent(run, first, topic), run_agent(run, first, topic))
        return [*drafts, await run_agent(run, second, drafts[0])]

    with HostTest(app) as test:
        assert ask_on(test, write) == ["a draft", "a draft", "a review"]
        for number, name in enumerate(["helper", "helper", "critic"]):
            assert [entry[1] for entry in entries(test.plane, f"agent:r.1.0.{number}")[1:]] == [
                f"{name}__model.request"
            ]


def test_an_agent_that_a_tool_runs_is_a_part_of_the_call() -> None:
    inner = Agent(scripted(says("from the inner agent")), name="inner", capabilities=[FastnessDurability()])
    agent = durable(scripted(calls_tools(("delegate", {})), says("done")))

    @agent.tool_plain
    async def delegate() -> str:
        return str((await inner.run("go")).output)

    app = HostApp()
    ask = agent_workflow(agent, app=app)
    with HostTest(app) as test:
        assert ask_on(test, ask) == "done"
        assert len(operations(test.plane)) == 3
        assert "from the inner agent" in entries(test.plane)[2][2]


def test_what_a_dynamic_toolset_lists_is_recorded() -> None:
    calls: Counter[str] = Counter()

    async def tide() -> str:
        calls["tide"] += 1
        if calls["tide"] == 1:
            raise ConnectionError
        return "high"

    def tools(context: RunContext[Any]) -> FunctionToolset[Any]:
        return FunctionToolset([tide], id="sea")

    agent = durable(scripted(calls_tools(("tide", {})), says("done")), toolsets=[DynamicToolset(tools, id="any")])
    app = HostApp()
    ask = agent_workflow(agent, app=app, retry=Retry(2, delay_seconds=0))
    with HostTest(app) as test:
        assert ask_on(test, ask) == "done"
        recorded = operations(test.plane)
    assert recorded == ["get_tools", "request", "call_tool:tide", "get_tools", "request"]
    assert calls == {"tide": 2}


def test_a_host_that_was_replaced_stops_with_head_advanced() -> None:
    agent = durable(scripted(calls_tools(("replace", {})), says("never")))
    app = HostApp()
    ask = agent_workflow(agent, app=app)
    with HostTest(app) as test:

        @agent.tool_plain
        async def replace() -> None:
            journal = test.plane.world(JOURNAL)
            journal.append([["open", 99, 1, 0]], expected_head=journal.head())  # As a host that has taken over.

        with pytest.raises(RunFailed, match="HeadAdvanced"):
            ask_on(test, ask)
        assert [entry[:2] for entry in entries(test.plane)] == [
            ["open", 1],
            ["done", "helper__model.request"],
            ["open", 99],
        ]


def test_a_host_that_was_replaced_cannot_open_the_journal_again() -> None:
    app = HostApp()
    ask = agent_workflow(durable(TestModel()), app=app)
    with HostTest(app) as test:
        journal = test.plane.world(JOURNAL)
        journal.create()
        journal.append([["open", 99, 1, 0]], expected_head=0)
        with pytest.raises(RunFailed, match="HeadAdvanced"):
            ask_on(test, ask)
        assert journal.head() == 1


RESPONSE = json.dumps({"parts": [], "model_name": "test", "kind": "response"})


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (
            [["done", "helper__model.compact_messages", RESPONSE]],
            "has recorded helper__model.compact_messages as operation 0 of agent helper, and the agent does helper",
        ),
        (None, "has recorded helper__model.request as operation 1 of agent helper, and the agent ends there"),
    ],
    ids=["another", "fewer"],
)
def test_changed_code_stops_the_run_until_it_is_resumed(recorded: list[Any] | None, message: str) -> None:
    app = HostApp()
    ask = agent_workflow(durable(scripted(says("done"))), app=app)
    with HostTest(app, max_attempts=2) as test:
        ask_on(test, ask)
        answered = entries(test.plane)[1]
        run = test.plane.workflows.start(ask, "tides", id="changed")
        journal = test.plane.world("agent:changed.1.0.0")
        journal.create()
        journal.append([["open", 0, 1, 0], *(recorded or [answered, answered])], expected_head=0)
        test.run_until_idle()
        test.advance(hours=1)
        hosting = test.plane.world("run:changed").hosting()
        assert run.describe().state == "stopped"
        assert hosting.is_stopped
        assert f"Run changed {message}" in (hosting.error or "")
        assert "resume the run: fastness world resume-program run:changed" in (hosting.error or "")
        journal.archive()
        journal.delete()  # In place of the code that fits: now nothing is recorded.
        test.plane.world("run:changed").resume_program()
        assert test.run_to_end(run) == "done"


def test_an_agent_in_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "AGENT_OPERATIONS_MAX", 5)
    agent = durable(FunctionModel(lambda messages, info: calls_tools(("again", {}))))

    @agent.tool_plain
    async def again() -> None:
        pass

    app = HostApp()
    ask = agent_workflow(agent, app=app)
    with HostTest(app) as test:
        with pytest.raises(RunFailed, match=r"5 operations of agent helper.*usage limits"):
            ask_on(test, ask)
        assert len(operations(test.plane)) == 5


async def watch(context: RunContext[Any], stream: Any) -> None:
    async for _ in stream:
        pass


class OwnToolset(AbstractToolset[Any]):
    @property
    def id(self) -> str:
        return "own"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, Any]:
        return {}

    async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: Any) -> Any:
        return None


def test_what_cannot_be_recorded_is_refused_when_the_workflow_is_made() -> None:
    for agent, message in [
        (Agent(TestModel(), name="plain"), "Agent plain has no FastnessDurability"),
        (durable(TestModel(), toolsets=[OwnToolset()]), "toolset OwnToolset of agent helper cannot be recorded"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            agent_workflow(agent, app=HostApp())
    with pytest.raises(UserError, match="needs to have a unique `name` in order to be used with Fastness"):
        Agent(TestModel(), capabilities=[FastnessDurability()])
    app = HostApp()
    agent_workflow(durable(TestModel()), name="ask", app=app)
    with pytest.raises(InvalidArgument, match="Two functions are the workflow ask"):
        agent_workflow(Agent(TestModel(), name="other", capabilities=[FastnessDurability()]), name="ask", app=app)


def test_streams_and_toolsets_that_were_added_later_are_refused_when_the_agent_runs() -> None:
    streaming = Agent(TestModel(), name="helper", capabilities=[FastnessDurability(), ProcessEventStream(watch)])
    late = durable(TestModel())

    @late.toolset(id="late")
    def tools(context: RunContext[Any]) -> FunctionToolset[Any]:
        return FunctionToolset()

    for agent, message in [(streaming, "does not stream"), (late, "cannot be added at runtime with Fastness")]:
        app = HostApp()
        ask = agent_workflow(agent, app=app)
        with HostTest(app) as test, pytest.raises(RunFailed, match=message):
            ask_on(test, ask)


def test_a_result_that_json_does_not_have_fails_and_says_what_to_do() -> None:
    agent = durable(scripted(calls_tools(("handle", {})), says("never")))

    @agent.tool_plain
    async def handle() -> Any:
        return object()

    app = HostApp()
    ask = agent_workflow(agent, app=app)
    with HostTest(app) as test, pytest.raises(RunFailed, match=r"cannot be recorded .*or a Pydantic model"):
        ask_on(test, ask)


async def test_outside_of_a_workflow_the_agent_runs_as_any_other() -> None:
    agent = durable(TestModel(custom_output_text="tide"))
    assert (await agent.run("go")).output == "tide"
    async with agent.run_stream("go") as result:
        assert await result.get_output() == "tide"
