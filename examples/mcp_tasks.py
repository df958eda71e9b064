"""A queue as a tool of MCP: an agent calls it as a task, goes away, and finds the task again by its id.

Needs the extra `mcp` (docs/install.md) and a server: `fastness serve --data dir:./data`.
"""

import asyncio
import os

import mcp_types
from mcp import Client

import fastness
from fastness.mcp.exposing import conceal, expose
from fastness.mcp.tasks import task_of

URL = os.environ.get("FASTNESS_URL", "http://127.0.0.1:9440")
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 1_000}},
    "required": ["text"],
    "additionalProperties": False,
}


def count_words(message: fastness.Message) -> None:
    """A worker's function. The result that it acknowledges the message with is the result of the tool."""
    with task_of(message) as task:
        words = message.json()["text"].split()
        task.progress(1, 2, "split the text")
        message.ack(result={"words": len(words)})


async def start() -> str:
    """An agent calls the tool as a task. The answer comes at once, and has the task's id."""
    async with Client(f"{URL}/mcp", mode="legacy") as client:
        params = mcp_types.CallToolRequestParams(
            name="count_words", arguments={"text": "a rolling stone"}, task=mcp_types.TaskMetadata()
        )
        request = mcp_types.CallToolRequest(params=params)
        created = await client.session.send_request(request, mcp_types.CreateTaskResult)
        return created.task.task_id


async def show_status(task_id: str) -> None:
    """Every client finds the task, also one without tasks of its own: there is a tool for it."""
    async with Client(f"{URL}/mcp") as client:
        found = await client.call_tool("task_status", {"task_id": task_id})
        print("status:", found.structured_content["status"])


async def show_result(task_id: str) -> None:
    async with Client(f"{URL}/mcp", mode="legacy") as client:
        params = mcp_types.GetTaskPayloadRequestParams(task_id=task_id)
        request = mcp_types.GetTaskPayloadRequest(params=params)
        result = await client.session.send_request(request, mcp_types.CallToolResult)
        print("result:", result.structured_content)


def main() -> None:
    with fastness.connect(URL) as plane:
        expose(plane, "word-counts", SCHEMA, name="count_words", description="Counts the words of a text.")
        task_id = asyncio.run(start())  # The agent is gone. No worker runs yet.
        asyncio.run(show_status(task_id))
        worker = fastness.Worker(plane, {"word-counts": count_words})
        worker.start()
        try:
            asyncio.run(show_result(task_id))  # It waits for the end of the task.
        finally:
            worker.stop()
        conceal(plane, "count_words")


if __name__ == "__main__":
    main()
