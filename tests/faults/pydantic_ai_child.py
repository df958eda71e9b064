"""Runs agents in a child process that is killed again and again: `pydantic_ai_child.py FOLDER KILLS SEED`.

This process imports everything once, and forks: a child that opens the plane and hosts the agents, until it is killed.
What the agents do is appended to FOLDER/log, a line at a time:

    start RUN COUNT      a child starts; COUNT operations of RUN were recorded before
    begin RUN NUMBER     an operation begins
"""

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import cbor2
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import fastness
import fastness.backends.rocksdb  # Imported once, and not by every child.
import fastness.plane
from fastness.clock import SystemClock
from fastness.errors import RunNotFound, WorldNotFound
from fastness.pydantic_ai import FastnessDurability, agent_workflow

ROUNDS = 5  # Of a request with two calls of tools; one more request ends the run.
OPERATIONS = ROUNDS * 3 + 1
LEASE_SECONDS = 600  # Longer than the test: no host loses a run while it works.
OPERATION_SECONDS = 0.002
KILLED_AFTER_MAX = 9  # Operations that a child begins before it is killed.
DELAY_SECONDS_MAX = 0.012  # Between the beginning of the last one and the kill: it may end, and be recorded.
PATIENCE_SECONDS = 60.0
WRITTEN_AT = datetime(2026, 1, 1, tzinfo=UTC)  # The same in every response, so that journals can be compared.

app = fastness.HostApp()


class LaterClock(SystemClock):
    """The time of a child: later than the leases of the children before it, which were killed."""

    def __init__(self, child: int) -> None:
        super().__init__()
        self._ahead_ms = child * 2 * LEASE_SECONDS * 1_000

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


files: dict[str, int] = {}  # The log; and events, a pipe that gets a byte for each line.


def note(*words: object) -> None:
    os.write(files["log"], (" ".join(map(str, words)) + "\n").encode())
    os.write(files["events"], b".")


async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    prompt = str(messages[0].parts[0].content)
    number = sum(isinstance(message, ModelResponse) for message in messages)
    note("begin", prompt, number * 3)
    await asyncio.sleep(OPERATION_SECONDS)
    if number == ROUNDS:
        return ModelResponse(parts=[TextPart(f"{prompt} has ended")], timestamp=WRITTEN_AT)
    calls = [
        ToolCallPart(name, {"run": prompt, "number": number * 3 + offset}, tool_call_id=f"{number}.{offset}")
        for offset, name in ((1, "in_coroutine"), (2, "on_thread"))
    ]
    return ModelResponse(parts=calls, timestamp=WRITTEN_AT)


agent = Agent(FunctionModel(answer), name="helper", capabilities=[FastnessDurability()])
ask = agent_workflow(agent, name="ask", app=app)


@agent.tool_plain
async def in_coroutine(run: str, number: int) -> int:
    note("begin", run, number)
    await asyncio.sleep(OPERATION_SECONDS)
    return number


@agent.tool_plain
def on_thread(run: str, number: int) -> list[int]:
    note("begin", run, number)
    time.sleep(OPERATION_SECONDS)
    return [number]


def recorded(plane: fastness.Plane, run: str) -> list[list[str]]:
    """The operations in the journal of a run, with their results."""
    try:
        entries = [cbor2.loads(record.value) for record in plane.world(f"agent:{run}.1.0.0").read()]
    except WorldNotFound:
        return []
    return [entry for entry in entries if entry[0] != "open"]


def work(folder: Path, child: int, *, until: int | None) -> None:
    """Run one agent after the other, from the first one that has not ended."""
    with fastness.open(f"dir:{folder / 'data'}", clock=LaterClock(child)) as plane:
        first = next(number for number in itertools.count() if not has_ended(plane, f"r-{number}"))
        note("start", f"r-{first}", len(recorded(plane, f"r-{first}")))
        with fastness.Host(plane, app, lease_seconds=LEASE_SECONDS):
            for number in itertools.count(first):
                run = plane.workflows.start(ask, f"r-{number}", id=f"r-{number}")
                run.result(wait_seconds=PATIENCE_SECONDS)
                if number == until:
                    return


def has_ended(plane: fastness.Plane, run: str) -> bool:
    try:
        return plane.workflows.describe(run).state == "completed"
    except RunNotFound:
        return False


def fork(folder: Path, number: int, *, until: int | None = None) -> tuple[int, int]:
    """Start a child; its process, and the pipe of its events."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    files["events"] = writing
    try:
        work(folder, number, until=until)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def main(folder: Path, kills: int, seed: int) -> None:
    """Kill `kills` children, then let the last one finish the run that it finds, and one more."""
    rng = random.Random(seed)
    files["log"] = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(kills):
        child, events = fork(folder, number)
        for _ in range(1 + rng.randint(0, KILLED_AFTER_MAX)):
            if not os.read(events, 1):
                sys.exit("A child has ended by itself")
        time.sleep(rng.uniform(0, DELAY_SECONDS_MAX))  # A random moment, not a wait for a condition.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(events)
    lines = (folder / "log").read_text().split()
    last = max((int(word.removeprefix("r-")) for word in lines if word.startswith("r-")), default=0)
    child, events = fork(folder, kills, until=last + 1)
    while os.read(events, 1_024):
        pass
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
