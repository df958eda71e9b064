"""An agent of the OpenAI Agents SDK whose conversation is stored in a plane, and continues in the next process.

    python openai_agents_session.py                 in memory
    python openai_agents_session.py dir:./data      asks the next question each time

It needs no network: the model is a script. With a real one, write Agent(name="guide", model="gpt-5", tools=[forecast]).
"""

import asyncio
import sys

from agents import Agent, RunConfig, Runner, function_tool
from agents.testing import ScriptedModel, assistant_message, function_call

import fastness
from fastness.openai_agents import FastnessSession

CITIES = ("Kiel", "Lisbon", "Oslo")


@function_tool
def forecast(city: str) -> str:
    print(f"tool: forecast of {city}")
    return "sunny"


async def remove_unfinished_turn(session: FastnessSession) -> None:
    """Remove what a killed process has stored of a question that has no answer; it is asked again."""
    while (last := await session.get_items(1)) and last[0].get("type") != "message":
        await session.pop_item()


async def main(url: str) -> None:
    async with fastness.open_async(url) as plane:
        session = FastnessSession(plane, "ada")
        await remove_unfinished_turn(session)
        questions = [item for item in await session.get_items() if item.get("role") == "user"]
        city = CITIES[len(questions) % len(CITIES)]
        model = ScriptedModel(
            [
                [function_call("forecast", {"city": city}, call_id=f"call-{len(questions)}")],
                [assistant_message(f"Take sunglasses to {city}.")],
            ]
        )
        agent = Agent(name="guide", model=model, tools=[forecast])
        question = f"What do I need in {city}?"
        result = await Runner.run(agent, question, session=session, run_config=RunConfig(tracing_disabled=True))
        print(f"ada: {question}")
        print(f"guide: {result.final_output}")
        print(f"the model has read {len(model.calls[-1].input)} items, and {len(await session.get_items())} are stored")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory:"))
