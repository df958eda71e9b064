"""`fastness mcp` as a child process of an MCP client."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from mcp import Client, StdioServerParameters

import fastness
from tests.support.forked import python_command, start_python
from tests.support.server_process import Server

SECONDS_MAX: Final = 60.0  # Bounds every wait; far longer than any step takes.
_MODES: Final = {"2025-11-25": "legacy", "2026-07-28": "auto"}
_INITIALIZE: Final = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


# A server with a tool that prints, and starts a program that reads and writes.
_NOISY: Final = """
import asyncio, os, sys, fastness
from fastness.mcp import Caller, Tool, ToolInput, ToolOutput, make_server
from fastness.mcp.stdio import serve_stdio

class Nothing(ToolInput, frozen=True): pass
class Done(ToolOutput, frozen=True): pass

async def noise(caller, asked):
    print("printed")
    os.system("echo echoed; cat")
    return Done()

async def main():
    tool = Tool(name="noise", title="", description="", input=Nothing, output=Done, call=noise, verbs=())
    async with fastness.open_async("memory:") as plane:
        await serve_stdio(make_server(lambda ctx: Caller(plane=plane, agent="ada"), tools=[tool]))
    print("after")

asyncio.run(main())
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A data directory with one message in the queue `jobs`."""
    found = f"dir:{tmp_path / 'data'}"
    with fastness.open(found) as plane:
        plane.queue("jobs").put({"n": 1})
    return found


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}


@contextmanager
def started(*arguments: str, mcp: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[bytes]"]:
    """`fastness mcp` with open pipes."""
    with running("-m", "fastness.cli", *arguments, "mcp", *mcp) as process:
        yield process


@contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A Python program with open pipes."""
    process = start_python(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=SECONDS_MAX)


def ask(process: "subprocess.Popen[bytes]", message: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


async def test_over_a_server_the_token_decides_who_the_agent_is_and_what_it_may_do(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        verbs = ["mail:*", "queue:survey", "queue:stats"]
        token = plane.tokens.create("ada", universes=["lab"], verbs=verbs).token
    server = Server(tmp_path, tokens=True)
    try:
        command, arguments = python_command("-m", "fastness.cli", "--url", server.url, "mcp")
        child = StdioServerParameters(
            command=command,
            args=arguments,
            env={**environment(), "FASTNESS_TOKEN": token},
        )
        for revision, mode in _MODES.items():
            async with asyncio.timeout(SECONDS_MAX), Client(child, mode=mode) as client:
                assert client.protocol_version == revision
                await check_the_agent(client)
        with started("--url", server.url, "--token", token, mcp=("--agent", "bob")) as process:
            out, err = process.communicate(timeout=SECONDS_MAX)
            assert (process.returncode, out) == (2, b"")
            assert b"leave --agent out" in err
    finally:
        server.kill()


async def check_the_agent(client: Client) -> None:
    """The client is ada in the universe lab, and may use mail and look at queues."""
    tools = {tool.name for tool in (await client.list_tools()).tools}
    assert {"mail_send", "mail_read"} <= tools
    assert not {"queue_put", "state_get"} & tools
    await client.call_tool("mail_send", {"to": "ada", "body": "note to myself"})
    (mail,) = (await client.call_tool("mail_read", {})).structured_content["mails"]
    assert mail["sender"] == "ada@lab"
    uris = [resource.uri for resource in (await client.list_resources()).resources]
    assert uris == [f"fastness://lab/mail/{mail['thread']}"]
    refused = await client.call_tool("queue_put", {"queue": "jobs", "body": 1})
    assert refused.structured_content["code"] == "not_allowed"
    await client.call_tool("mail_confirm", {"ids": [mail["id"]]})


def test_a_request_with_an_id_that_cannot_be_one_is_refused(url: str) -> None:
    with started("--url", url) as process:
        ask(process, _INITIALIZE)
        wrong: list[Any] = [[1], {}, 1.5, True, None]
        for id in wrong:
            refused = ask(process, {"jsonrpc": "2.0", "id": id, "method": "tools/list"})
            assert (refused["id"], refused["error"]["code"]) == (None, -32600)
        assert ask(process, {"jsonrpc": "2.0", "id": 2, "method": "ping"})["id"] == 2


def test_it_stops_when_the_client_closes_its_end(url: str) -> None:
    with started("--url", url) as process:
        assert ask(process, _INITIALIZE)["result"]["serverInfo"]["name"] == "fastness"
        out, err = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 0, err
        assert out == b""
        assert b"locked until this process ends" in err


def test_what_a_tool_prints_does_not_disturb_the_protocol() -> None:
    with running("-c", _NOISY) as process:
        ask(process, _INITIALIZE)
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "noise", "arguments": {}}}
        assert ask(process, call)["result"]["structuredContent"] == {}
        out, err = process.communicate(timeout=SECONDS_MAX)
        assert (process.returncode, out) == (0, b"after\n")
        assert b"printed" in err
        assert b"echoed" in err


def test_a_signal_stops_it_while_the_client_waits(url: str) -> None:
    with started("--url", url) as process:
        ask(process, _INITIALIZE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_MAX) == 0
        with fastness.open(url) as plane:  # It was closed.
            assert plane.queue("jobs").stats().ready == 1


def test_a_message_that_is_too_long_ends_it_with_an_error(url: str) -> None:
    with started("--url", url) as process:
        _, err = process.communicate(b'{"jsonrpc": "2.0", "id": 1, "method": "' + b"x" * 9_000_000, SECONDS_MAX)
        assert process.returncode == 2
        assert b"is over 8 MiB" in err
