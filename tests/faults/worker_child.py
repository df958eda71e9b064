"""A process with a worker that handles batches of the queue `jobs`, prints each batch, and may be killed at any time.

    worker_child.py URL KIND BATCH

A message `{"n": 3, "do": WORD}` tells the handler what to do: `kill` ends the process, and `block` acknowledges the
messages of its batch that say `ack`, prints the batch, and waits for ever. A batch is printed before it is handled.
"""

import asyncio
import os
import signal
import sys
import threading
from typing import Any

import msgspec

import fastness

_OPTIONS: dict[str, Any] = {"visibility_seconds": 1.0, "owner": "child"}


def print_batch(messages: list[Any]) -> list[str]:
    """Print the numbers of the messages; what they tell the handler to do."""
    bodies = [message.json() for message in messages]
    os.write(1, msgspec.json.encode([body["n"] for body in bodies]) + b"\n")
    words = [body.get("do", "") for body in bodies]
    if "kill" in words:
        os.kill(os.getpid(), signal.SIGKILL)
    return words


def handle(messages: list[Any]) -> None:
    words = print_batch(messages)
    if "block" in words:
        for message, word in zip(messages, words, strict=True):
            if word == "ack":
                message.ack()
        os.write(1, b'"blocked"\n')
        threading.Event().wait()


async def handle_async(messages: list[Any]) -> None:
    words = print_batch(messages)
    if "block" in words:
        for message, word in zip(messages, words, strict=True):
            if word == "ack":
                await message.ack()
        os.write(1, b'"blocked"\n')
        await asyncio.Event().wait()


async def run_tasks(url: str, batch: int) -> None:
    async with fastness.connect_async(url) as plane:
        await fastness.AsyncWorker(plane, {"jobs": handle_async}, batch=batch, **_OPTIONS).run()


if __name__ == "__main__":
    url, kind, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "tasks":
        asyncio.run(run_tasks(url, batch))
    else:
        with fastness.connect(url) as plane:
            fastness.Worker(plane, {"jobs": handle}, batch=batch, **_OPTIONS).run()
