"""A coding agent over MCP: it takes work from a queue, reserves a file, asks for a review, and acknowledges the work.

A script decides here what a model would decide from the tools' descriptions and answers. Start a server
(`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python mcp_agent.py

With tokens, the name of the agent is that of FASTNESS_TOKEN; without tokens, every caller is the agent `local`.
"""

import asyncio
import os
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client


class Refused(Exception):
    """A tool refused a call: the code of the error, and the text that a model would read."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The structured answer of a tool."""
    result = await client.call_tool(tool, arguments)
    answer = result.structured_content or {}
    if result.is_error:
        raise Refused(answer["code"], f"{answer['detail']} {answer['advice']}")
    return answer


async def work(client: Client, message: dict[str, Any]) -> None:
    """Do the work of one message while its lease lasts."""
    proof = {"queue": "edits", **{name: message[name] for name in ("id", "lease_id", "fence")}}
    file = message["body"]["value"]["file"]
    try:
        reserved = (await call(client, "lease_acquire", keys=[file], lease_seconds=120))["leases"][0]
    except Refused as error:
        if error.code != "lease_held":
            raise
        await call(client, "queue_nack", **proof, error=str(error), delay_seconds=60)  # Another agent has the file.
        return
    print(f"reserved {file}")
    text = f"I have edited {file}: {message['body']['value']['task']}. Please review."
    await call(client, "mail_send", to="reviewer", body=text, thread=message["id"], idempotency_key=message["id"])
    print("asked reviewer")
    leases = [{name: reserved[name] for name in ("key", "lease_id", "fence")}]
    await call(client, "lease_release", leases=leases)
    await call(client, "queue_ack", **proof, result={"edited": [file]})
    print("acknowledged")


async def main() -> None:
    token = os.environ.get("FASTNESS_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(
            os.environ.get("FASTNESS_URL", "http://127.0.0.1:9440") + "/mcp", http_client=http
        )
        async with Client(transport) as client:
            edit = {"file": "src/app.py", "task": "rename main to run"}
            put = await call(client, "queue_put", queue="edits", body=edit, keep_result=True)
            received = await call(client, "queue_receive", queue="edits", lease_seconds=300, wait_seconds=10)
            for message in received["messages"]:
                await work(client, message)
            outcome = await call(client, "queue_result", queue="edits", id=put["id"], wait_seconds=10)
            print(f"result: {outcome['result']['value']}")


if __name__ == "__main__":
    asyncio.run(main())
