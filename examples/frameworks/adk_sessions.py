"""An agent of the Google ADK whose sessions and states are stored in a plane: each run is a visit of the same user.

    python adk_sessions.py                 in memory
    python adk_sessions.py dir:./data      knows the earlier visits; a visit that was killed continues first

It needs no network: the model is a script. With a real one, write LlmAgent(model="gemini-flash-latest", …).
"""

import asyncio
import sys
import warnings
from collections.abc import AsyncGenerator

from google.adk.agents import LlmAgent
from google.adk.apps import App, ResumabilityConfig
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.tools.tool_context import ToolContext
from google.genai import types

import fastness
from fastness.adk import FastnessSessionService

warnings.filterwarnings("ignore", r"\[EXPERIMENTAL\] ResumabilityConfig", UserWarning)


class Script(BaseLlm):
    """Counts the visit, then greets."""

    model: str = "script"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        del stream
        [*_, last] = llm_request.contents[-1].parts or []
        if last.function_response is None:
            part = types.Part(function_call=types.FunctionCall(name="count_visit", args={}))
        else:
            part = types.Part(text=f"Welcome, visit {(last.function_response.response or {})['visit']}!")
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def count_visit(tool_context: ToolContext) -> dict[str, int]:
    """Its state commits together with its event: a visit is counted once, also if this process is killed."""
    visit = tool_context.state.get("user:visits", 0) + 1
    tool_context.state["user:visits"] = visit
    tool_context.state["app:last_visitor"] = "ada"
    print(f"tool: visit {visit}")
    return {"visit": visit}


async def main(url: str) -> None:
    async with fastness.open_async(url) as plane:
        service = FastnessSessionService(plane)
        agent = LlmAgent(name="clerk", model=Script(), tools=[count_visit])
        app = App(name="shop", root_agent=agent, resumability_config=ResumabilityConfig(is_resumable=True))
        runner = Runner(app=app, session_service=service)

        for listed in (await service.list_sessions(app_name="shop", user_id="ada")).sessions:
            session = await service.get_session(app_name="shop", user_id="ada", session_id=listed.id)
            last = session.events[-1] if session and session.events else None
            if last is not None and (last.author == "user" or not last.is_final_response()):
                print(f"continues {listed.id}")
                async for _ in runner.run_async(user_id="ada", session_id=listed.id, invocation_id=last.invocation_id):
                    pass

        visits = (await service.get_user_state(app_name="shop", user_id="ada")).get("visits", 0)
        id = f"visit-{visits + 1}"
        if await service.get_session(app_name="shop", user_id="ada", session_id=id) is None:
            await service.create_session(app_name="shop", user_id="ada", session_id=id)
        hello = types.Content(role="user", parts=[types.Part(text="Hello!")])
        async for event in runner.run_async(user_id="ada", session_id=id, new_message=hello):
            if event.content and event.content.parts and event.content.parts[0].text:
                print(f"{event.author}: {event.content.parts[0].text}")
        sessions = (await service.list_sessions(app_name="shop")).sessions
        print(f"sessions: {', '.join(session.id for session in sessions)}; state: {sessions[-1].state}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory:"))
