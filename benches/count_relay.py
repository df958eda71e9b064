"""How many instructions a mail costs a relay: a figure that a shared machine does not blur.

    python -m benches.count_relay                 # under valgrind (Debian: apt install valgrind), some two minutes
    python -m benches.count_relay --time 20000    # processor time instead, without valgrind

Agents talk to the sessions of a hub in the same process, in JSON, without sockets between them. Two runs of different
length are counted, and the difference is what the mails of the longer one cost. What agents do is part of it.
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

import holdfast
from holdfast.runtime.relay.hub import RelayHub
from holdfast.runtime.relay.session import Session
from holdfast.server.metrics import MeasuredTransport, Metrics
from holdfast.wire.relay import Frame, decode, encode

AGENTS: Final = 200
OUTSTANDING: Final = 5  # Mails of each agent whose confirmation has not come back.
SHORT, LONG = 2_000, 6_000  # Mails.
BODY: Final = "x" * 150

_chance = random.Random(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="How many instructions a mail costs a relay.")
    parser.add_argument("--time", type=int, metavar="MAILS", help="measure processor time, without valgrind")
    mails = parser.parse_args().time
    if mails:
        sys.stdout.write(f"{asyncio.run(exchange(mails)) / mails * 1e6:.0f} µs of processor time a mail\n")
        return
    short, long = counted(SHORT), counted(LONG)
    sys.stdout.write(f"{(long - short) / (LONG - SHORT):,.0f} instructions a mail\n")


def counted(mails: int) -> int:
    """The instructions of a process that exchanges so many mails."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={folder}/out"]
        command += [f"--log-file={said}", sys.executable, "-m", __spec__.name, "--time", str(mails)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONHASHSEED": "0"})
        [found] = re.findall(r"I +refs: +([0-9,]+)", said.read_text())
        return int(found.replace(",", ""))


async def exchange(mails: int) -> float:
    """Have so many mails sent, stored, delivered, confirmed and told of; the processor time that it took."""
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        async with holdfast.open_async(f"dir:{folder}/plane") as plane:
            hub = RelayHub(
                plane._transport.services.database, MeasuredTransport(plane._transport, Metrics()).call_batch
            )
            office = Office(mails)
            for number in range(AGENTS):
                office.agents.append(Agent(await hub.join("main", f"agent-{number}", None), office))
            started = time.process_time()
            for _ in range(OUTSTANDING):
                for agent in office.agents:
                    agent.send()
            await office.is_done.wait()
            seconds = time.process_time() - started
            await hub.close()
            await asyncio.gather(*(agent.pumping for agent in office.agents))
            return seconds


class Office:
    """All agents, and how many mails are still to be told of."""

    def __init__(self, mails: int) -> None:
        self.agents: list[Agent] = []
        self.left = mails
        self.sent = 0
        self.is_done = asyncio.Event()


class Agent:
    """Confirms what comes, and sends another mail when it hears of one of its own."""

    def __init__(self, session: Session, office: Office) -> None:
        self._session = session
        self._office = office
        self._loop = asyncio.get_running_loop()
        session.write = self._write
        self.pumping = self._loop.create_task(self._pump())

    def send(self) -> None:
        self._office.sent += 1
        to = _chance.randrange(AGENTS)
        self._say({"type": "send", "message_id": f"mail-{self._office.sent}", "to": f"agent-{to}", "body": BODY})

    def _say(self, message: Any) -> None:
        self._session.take(decode(msgspec.json.encode(message).decode()))

    def _write(self, frames: list[Frame]) -> bool:
        self._loop.call_soon(self._hear, encode(frames, "json"))
        return True

    async def _pump(self) -> None:
        """Take what cannot be written at once."""
        while (batch := await self._session.outgoing()) is not None:
            frames, size = batch
            self._write(frames)
            self._session.written(size)

    def _hear(self, data: bytes) -> None:
        said = msgspec.json.decode(data)
        frames = said if isinstance(said, list) else [said]
        if ids := [frame["message_id"] for frame in frames if frame["type"] == "mail"]:
            self._say({"type": "confirm", "message_ids": ids})
        for frame in frames:
            if frame["type"] == "delivery_confirm":
                self._office.left -= 1
                if self._office.left > 0:
                    self.send()
                else:
                    self._office.is_done.set()


if __name__ == "__main__":
    main()
