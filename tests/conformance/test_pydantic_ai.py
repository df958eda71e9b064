"""Durable agents of Pydantic AI on every kind of plane, with both kinds of hosts."""

from collections import Counter
from typing import Any

import cbor2
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from fastness import AsyncHost, AsyncPlane, Host, HostApp, Retry
from fastness.limits import AGENT_RECORD_BYTES_MAX
from fastness.pydantic_ai import FastnessDurability, agent_workflow

PATIENCE_SECONDS = 60.0  # A bound for every wait; far more than any test needs.
LARGE = "tide " * AGENT_RECORD_BYTES_MAX


def make_app(calls: Counter[str]) -> tuple[HostApp, Any]:
    """An agent with a large result of a tool, a tool that fails once, and a large output."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        calls["model"] += 1
        if len(messages) > 1:
            return ModelResponse(parts=[TextPart(LARGE)])
        return ModelResponse(parts=[ToolCallPart("read", {}), ToolCallPart("fail_once", {})])

    agent = Agent(FunctionModel(answer), name="helper", capabilities=[FastnessDurability()])

    @agent.tool_plain
    async def read() -> str:
        calls["read"] += 1
        return LARGE

    @agent.tool_plain
    def fail_once() -> None:
        calls["fail_once"] += 1
        if calls["fail_once"] == 1:
            raise ConnectionError

    app = HostApp()
    return app, agent_workflow(agent, app=app, retry=Retry(2, delay_seconds=0))


def test_an_agent_repeats_no_operation_that_has_ended(framework_plane: Any) -> None:
    calls: Counter[str] = Counter()
    app, ask = make_app(calls)
    plane, journal = framework_plane.plane, "agent:r.1.0.0"
    if isinstance(plane, AsyncPlane):

        async def run() -> tuple[str, list[Any]]:
            async with AsyncHost(plane, app):
                started = await plane.workflows.start(ask, "tides", id="r")
                output = await started.result(wait_seconds=PATIENCE_SECONDS)
            return output, await plane.world(journal).read()

        output, records = framework_plane.run(run())
    else:
        with Host(plane, app):
            output = plane.workflows.start(ask, "tides", id="r").result(wait_seconds=PATIENCE_SECONDS)
        records = plane.world(journal).read()
    assert output == LARGE
    assert calls == {"model": 2, "read": 1, "fail_once": 2}
    kinds = [cbor2.loads(record.value)[0] for record in records]
    assert kinds == ["open", "done", "blob", "open", "done", "blob"]
