"""The number of instructions per mail in the relay, which varies less on a shared machine than time.

    python -m benches.count_relay                 # under valgrind (Debian: apt install valgrind), some two minutes
    python -m benches.count_relay --time 20000    # processor time instead, without valgrind

Agents use the sessions of a hub in the same process, in JSON, without sockets. The result is the difference of two runs
of different length, per mail. It includes the work of the agents.
"""

import argparse
import asyncio
import gc
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

import fastness
from fastness.runtime.relay.hub import RelayHub
from fastness.runtime.relay.session import Session
from fastness.server.metrics import MeasuredTransport, Metrics
from fastness.wire.relay import Frame, decode, encode

AGENTS: Final = 200
OUTSTANDING: Final = 5  # Unconfirmed mails of each agent.
SHORT, LONG = 2_000, 6_000  # Mails.
BODY: Final = "x" * 150

_generator = random.Random(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the instructions per mail in the relay.")
    parser.add_argument("--time", type=int, metavar="MAILS", help="measure processor time, without valgrind")
    mails = parser.parse_args().time
    if mails:
        sys.stdout.write(f"{asyncio.run(exchange_mails(mails)) / mails * 1e6:.0f} µs of processor time a mail\n")
        return
    short, long = count_instructions(SHORT), count_instructions(LONG)
    sys.stdout.write(f"{(long - short) / (LONG - SHORT):,.0f} instructions a mail\n")


def count_instructions(mails: int) -> int:
    """The instructions of a process that exchanges this many mails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={folder}/out"]
        command += [f"--log-file={log}", sys.executable, "-m", __spec__.name, "--time", str(mails)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONHASHSEED": "0"})
        [found] = re.findall(r"I +refs: +([0-9,]+)", log.read_text())
        return int(found.replace(",", ""))


async def exchange_mails(mails: int) -> float:
    """Send, store, deliver, confirm and receipt this many mails, and return the processor time."""
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        async with fastness.open_async(f"dir:{folder}/plane") as plane:
            hub = RelayHub(plane._transport.services.database, MeasuredTransport(plane._transport, Metrics()).call_all)
            exchange = Exchange(mails)
            for number in range(AGENTS):
                exchange.agents.append(Agent(await hub.join("main", f"agent-{number}", None), exchange))
            started = time.process_time()
            for _ in range(OUTSTANDING):
                for agent in exchange.agents:
                    agent.send()
            await exchange.is_done.wait()
            seconds = time.process_time() - started
            await hub.close()
            await asyncio.gather(*(agent.pumping for agent in exchange.agents))
            return seconds


class Exchange:
    """All agents, and the number of outstanding receipts."""

    def __init__(self, mails: int) -> None:
        self.agents: list[Agent] = []
        self.left = mails
        self.sent = 0
        self.is_done = asyncio.Event()


class Agent:
    """Confirms its mail, and sends another one for each receipt."""

    def __init__(self, session: Session, exchange: Exchange) -> None:
        self._session = session
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        session.write = self._write
        self.pumping = self._loop.create_task(self._pump())

    def send(self) -> None:
        self._exchange.sent += 1
        to = _generator.randrange(AGENTS)
        self._send({"type": "send", "message_id": f"mail-{self._exchange.sent}", "to": f"agent-{to}", "body": BODY})

    def _send(self, message: Any) -> None:
        self._session.receive(decode(msgspec.json.encode(message).decode()))

    def _write(self, frames: list[Frame]) -> bool:
        self._loop.call_soon(self._on_message, encode(frames, "json"))
        return True

    async def _pump(self) -> None:
        """Write the frames that could not be written at once."""
        while (batch := await self._session.outgoing()) is not None:
            frames, size = batch
            self._write(frames)
            self._session.on_written(size)

    def _on_message(self, data: bytes) -> None:
        message = msgspec.json.decode(data)
        frames = message if isinstance(message, list) else [message]
        if ids := [frame["message_id"] for frame in frames if frame["type"] == "mail"]:
            self._send({"type": "confirm", "message_ids": ids})
        for frame in frames:
            if frame["type"] == "delivery_confirm":
                self._exchange.left -= 1
                if self._exchange.left > 0:
                    self.send()
                else:
                    self._exchange.is_done.set()


if __name__ == "__main__":
    main()
