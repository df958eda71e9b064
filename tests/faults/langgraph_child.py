"""Runs a graph with a checkpointer in processes that kill themselves.

Each line of input is an attempt: it is run in a fork of this process, which has imported everything. The fork continues
the graph from its last checkpoint and kills itself during one of its writes, or writes the final state to a file. The
output has the signal that ended each fork, or 0.
"""

import json
import operator
import os
import random
import signal
import sys
import threading
import time
from itertools import count
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

import fastness
import fastness.backends.rocksdb
import fastness.client.transport
import fastness.plane  # Imported once, for all forks.
from fastness import limits
from fastness.langgraph import FastnessSaver

TURNS = 4
ATTEMPT_SECONDS_MAX = 120
INPUT = {"turn": 0, "log": ["start"], "document": ""}


class State(TypedDict):
    turn: int
    log: Annotated[list[str], operator.add]
    document: str  # So large that it is a blob.


def plan(state: State) -> dict[str, Any]:
    document = state["document"]
    if state["turn"] % 3 == 0:
        document = f"{state['turn']}" * limits.LANGGRAPH_INLINE_BYTES_MAX * 2
    return {"turn": state["turn"] + 1, "document": document}


def work(part: dict[str, int]) -> dict[str, Any]:
    return {"log": [f"turn {part['turn']} part {part['part']}"]}


def review(state: State) -> dict[str, Any]:
    return {"log": [f"turn {state['turn']}: {len(state['log'])} lines, {len(state['document'])} letters"]}


def make_graph(saver: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_node("work", work)  # type: ignore[arg-type]
    builder.add_node("review", review)
    builder.add_edge(START, "plan")
    builder.add_conditional_edges(
        "plan", lambda state: [Send("work", {"turn": state["turn"], "part": part}) for part in range(3)], ["work"]
    )
    builder.add_edge("work", "review")
    builder.add_conditional_edges("review", lambda state: "plan" if state["turn"] < TURNS else END, ["plan", END])
    return builder.compile(checkpointer=saver)


class KilledSaver(FastnessSaver):
    """Kills its process at one of its writes: before it, after it, or at a moment in between."""

    def __init__(self, plane: Any, seed: int | None) -> None:
        super().__init__(plane)
        numbers = random.Random(seed)
        self._fatal = 0 if seed is None else numbers.randint(1, 9)
        self._moment = numbers.choice(["before", "during", "during", "after"])
        self._delay_seconds = numbers.uniform(0, 0.003)
        self._calls = count(1)

    def put(self, *args: Any) -> Any:
        return self._risk(super().put, *args)

    def put_writes(self, *args: Any) -> None:
        self._risk(super().put_writes, *args)

    def _risk(self, write: Any, *args: Any) -> Any:
        is_fatal = next(self._calls) == self._fatal
        if is_fatal and self._moment == "before":
            kill()
        if is_fatal and self._moment == "during":
            threading.Thread(target=kill, args=(self._delay_seconds,), daemon=True).start()
        result = write(*args)
        if is_fatal and self._moment == "after":
            kill()
        return result


def kill(delay_seconds: float = 0.0) -> None:
    time.sleep(delay_seconds)  # A random delay, not a wait for a condition.
    os.kill(os.getpid(), signal.SIGKILL)


def outcome(graph: Any, thread: str) -> dict[str, Any]:
    """The final state of a graph, and the steps that led to it."""
    config = {"configurable": {"thread_id": thread}}
    history = list(graph.get_state_history(config))
    return {"values": history[0].values, "steps": [[found.metadata["step"], found.next] for found in history]}


def attempt(url: str, thread: str, seed: int | None) -> dict[str, Any]:
    """Run a graph to its end; with a seed, if the process lives so long."""
    with fastness.connect(url) if url.startswith("http") else fastness.open(url) as plane:
        graph = make_graph(KilledSaver(plane, seed))
        config: Any = {"configurable": {"thread_id": thread}}
        state = graph.get_state(config)
        if state.created_at is None or state.tasks:  # `next` is empty too if all tasks of a step are done.
            durability: Any = "async" if seed is None or seed % 2 else "sync"
            graph.invoke(None if state.created_at else INPUT, config, durability=durability)
        return outcome(graph, thread)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(ATTEMPT_SECONDS_MAX)
            result = attempt(asked["url"], asked["thread"], asked["seed"])
            with open(asked["result"], "w") as file:
                json.dump(result, file)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


if __name__ == "__main__":
    main()
