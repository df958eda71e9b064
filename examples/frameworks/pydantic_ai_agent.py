"""A Pydantic AI agent that survives: kill it at any moment and start it again, and it repeats no finished call.

    python pydantic_ai_agent.py                 in memory
    python pydantic_ai_agent.py dir:./data      continues where it was; a finished run only prints its answer

It needs no network: the model is a function. With a real one, write Agent("openai:gpt-5", …).
"""

import sys

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import fastness
from fastness.pydantic_ai import FastnessDurability, agent_workflow


async def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Looks for a flight, books it, and says so."""
    del info
    found = [str(part.content) for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    print(f"model: request {len(found) + 1}")
    if not found:
        return ModelResponse(parts=[ToolCallPart("find_flight", {"city": "Lisbon"})])
    if len(found) == 1:
        return ModelResponse(parts=[ToolCallPart("book", {"flight": found[0]})])
    return ModelResponse(parts=[TextPart(f"You fly to Lisbon with {found[1]}.")])


agent = Agent(FunctionModel(model), name="travel", capabilities=[FastnessDurability()])
book_trip = agent_workflow(agent, name="book_trip")


@agent.tool_plain
async def find_flight(city: str) -> str:
    print(f"tool: find a flight to {city}")
    return "TP 571"


@agent.tool_plain
async def book(flight: str) -> str:
    # A call that was interrupted is made again: the key makes it the same booking.
    print(f"tool: book {flight} for {fastness.current_step().id}")
    return flight


def main(url: str) -> None:
    with fastness.open(url) as plane, fastness.Host(plane):
        run = plane.workflows.start(book_trip, "Book me a flight to Lisbon.", id="trip-1")
        print("answer:", run.result(wait_seconds=60))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory:")
