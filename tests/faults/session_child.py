"""Conversations of an agent framework in processes that are killed, or that write to one session at once.

    session_child.py run FRAMEWORK FOLDER SEED KILLS    run conversations, kill their processes; print them as JSON
    session_child.py write URL                          two processes add to one session; print its items as JSON

Importing a framework takes seconds. So this process imports it once, and forks the processes that are killed. It opens
a plane only when they have ended: a process that has threads should not be forked.
"""

import asyncio
import json
import os
import random
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib import import_module
from typing import Any

import fastness
from fastness import Plane

TURNS = 4
POINTS_MAX = 16  # A turn passes about ten.
DELAY_SECONDS_MAX = 0.003  # From a point to the kill, mostly much shorter: many kills hit a write.
SECONDS_MAX = 120.0  # Bounds every wait; far longer than a conversation takes.
WRITERS, CALLS = 2, 20


class Points:
    """What a conversation does, for the process that kills it."""

    pipe: int | None = None


def point(name: str) -> None:
    """Say what happens next: (m)odel, (t)ool, (w)rite, or that a write has (e)nded."""
    if Points.pipe is not None:
        os.write(Points.pipe, name.encode())


# Runs a conversation to its end, and returns its history.
Conversation = Callable[[Plane, str], Coroutine[Any, Any, Any]]


def openai_agents() -> Conversation:
    from agents import Agent, RunConfig, Runner, function_tool
    from agents.testing import ScriptedModel, assistant_message, function_call

    from fastness.openai_agents import FastnessSession

    class Session(FastnessSession):
        async def add_items(self, items: Any) -> None:
            point("w")
            await super().add_items(items)
            point("e")

        async def pop_item(self) -> Any:
            point("w")
            item = await super().pop_item()
            point("e")
            return item

    @function_tool
    def double(number: int) -> str:
        point("t")
        return str(2 * number)

    async def converse(plane: Plane, name: str) -> Any:
        session = Session(plane, name)
        items: list[Any] = await session.get_items()
        while items and items[-1].get("type") != "message":  # A turn without its answer begins again.
            await session.pop_item()
            items.pop()
        for turn in range(sum(item.get("role") == "user" for item in items), TURNS):
            model = ScriptedModel(
                [
                    [function_call("double", {"number": turn}, call_id=f"call {turn}")],
                    [assistant_message(f"It is {2 * turn}.", item_id=f"answer {turn}")],
                ]
            )
            agent = Agent(name="helper", model=model, tools=[double])
            point("m")
            await Runner.run(agent, f"Double {turn}", session=session, run_config=RunConfig(tracing_disabled=True))
        return await session.get_items()

    return converse


def adk() -> Conversation:
    from google.adk.agents import LlmAgent
    from google.adk.apps import App, ResumabilityConfig
    from google.adk.models.base_llm import BaseLlm
    from google.adk.models.llm_response import LlmResponse
    from google.adk.runners import Runner
    from google.adk.tools.tool_context import ToolContext
    from google.genai import types

    from fastness.adk import FastnessSessionService

    class Service(FastnessSessionService):
        async def append_event(self, session: Any, event: Any) -> Any:
            point("w")
            appended = await super().append_event(session, event)
            point("e")
            return appended

    warnings.filterwarnings("ignore", r"\[EXPERIMENTAL\] ResumabilityConfig", UserWarning)

    def text(role: str, words: str) -> Any:
        return types.Content(role=role, parts=[types.Part(text=words)])

    class Model(BaseLlm):
        model: str = "scripted"

        async def generate_content_async(self, llm_request: Any, stream: bool = False) -> Any:
            point("m")
            last = llm_request.contents[-1].parts[-1]
            if last.function_response is not None:
                yield LlmResponse(content=text("model", f"Call {last.function_response.response['calls']}."))
            else:
                call = types.FunctionCall(id=last.text, name="count", args={})
                yield LlmResponse(content=types.Content(role="model", parts=[types.Part(function_call=call)]))

    def count(tool_context: ToolContext) -> dict[str, int]:
        point("t")
        for key in ("calls", "user:calls", "app:calls"):
            tool_context.state[key] = tool_context.state.get(key, 0) + 1
        return {"calls": tool_context.state["calls"]}

    async def converse(plane: Plane, name: str) -> Any:
        service = Service(plane)
        agent = LlmAgent(name="helper", model=Model(), tools=[count])
        app = App(name="app", root_agent=agent, resumability_config=ResumabilityConfig(is_resumable=True))
        runner = Runner(app=app, session_service=service)
        named: dict[str, Any] = {"user_id": f"user of {name}", "session_id": name}
        session = await service.get_session(app_name="app", **named)
        if session is None:
            session = await service.create_session(app_name="app", **named)
        turns = sum(event.author == "user" for event in session.events)
        messages: list[dict[str, Any]] = [
            {"new_message": text("user", f"Question {turn}")} for turn in range(turns, TURNS)
        ]
        if session.events and not (session.events[-1].is_final_response() and session.events[-1].author != "user"):
            messages.insert(0, {"invocation_id": session.events[-1].invocation_id})  # Continues it.
        for message in messages:
            async for _ in runner.run_async(**named, **message):
                pass
        session = await service.get_session(app_name="app", **named)
        assert session is not None
        state = {key: value for key, value in session.state.items() if not key.startswith("app:")}
        said = [(event.author, event.content) for event in session.events if event.content is not None]
        return [state, *((author, content.model_dump(mode="json", exclude_none=True)) for author, content in said)]

    return converse


def run_in_child(work: Callable[[], None], kill_after: int, delay_seconds: float) -> tuple[bool, str]:
    """Run `work` in a process that is killed after that many points; whether it was killed, and its points."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        Points.pipe = writing
        try:
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.close(writing)
    passed, deadline, is_killed = "", time.monotonic() + SECONDS_MAX, False
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (read := os.read(reading, 1)):
            break
        passed += read.decode()
        if len(passed) == kill_after:
            time.sleep(delay_seconds)
            os.kill(child, signal.SIGKILL)
            is_killed = True
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) not in {0, -signal.SIGKILL} or (status and not is_killed):
        raise SystemExit(f"a conversation ended with status {status}")
    return status != 0, passed


def import_what_a_conversation_needs(converse: Conversation, folder: str) -> None:
    """Import what the plane and the framework import when they are used, so that each fork does not do it again."""
    before = set(sys.modules)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with fastness.open(f"dir:{folder}/rehearsal") as plane:
            asyncio.run(converse(plane, "rehearsal"))
        with os.fdopen(writing, "w") as output:
            json.dump(sorted(set(sys.modules) - before), output)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as found:
        names = json.load(found)
    os.waitpid(child, 0)
    for name in names:
        with suppress(ImportError):
            import_module(name)
    assert threading.active_count() == 1


def run(framework: str, folder: str, seed: int, kills: int) -> None:
    converse = {"openai-agents": openai_agents, "adk": adk}[framework]()
    import_what_a_conversation_needs(converse, folder)
    url = f"dir:{folder}/data"
    chance = random.Random(seed)
    names: list[str] = []
    moments: dict[str, int] = {}
    killed = 0
    while killed < kills:
        names.append(name := f"conversation {len(names)}")

        def work(name: str = name) -> None:
            with fastness.open(url) as plane:
                asyncio.run(converse(plane, name))

        is_killed = True
        while is_killed:
            kill_after = chance.randrange(1, POINTS_MAX) if killed < kills else 0
            is_killed, passed = run_in_child(work, kill_after, DELAY_SECONDS_MAX * chance.random() ** 3)
            if is_killed:
                killed += 1
                moments[passed[-1]] = moments.get(passed[-1], 0) + 1

    with fastness.open(url) as plane, fastness.open("memory:") as undisturbed:
        for name in names:
            found, expected = (asyncio.run(converse(each, name)) for each in (plane, undisturbed))
            print(json.dumps([found, expected]))
    print(json.dumps({"killed": killed, "moments": moments}))


def write(url: str) -> None:
    from fastness.openai_agents import FastnessSession

    async def add(plane: Plane, writer: int) -> None:
        session = FastnessSession(plane, "7")
        for call in range(CALLS):
            await session.add_items([{"role": "user", "content": f"{writer} {call} {part}"} for part in range(3)])

    children = []
    ready, go = os.pipe()
    for writer in range(WRITERS):
        child = os.fork()
        if child == 0:
            os.close(go)
            with fastness.open(url) as plane:
                os.read(ready, 1)  # Until the other one can begin too.
                asyncio.run(add(plane, writer))
            os._exit(0)
        children.append(child)
    os.close(go)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit("a writer failed")
    with fastness.open(url) as plane:
        print(json.dumps(asyncio.run(FastnessSession(plane, "7").get_items())))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "write":
        write(*arguments)
    else:
        run(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]))
