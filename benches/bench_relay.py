"""The relay: one server process, and agents that speak to it over raw sockets from this one.

    python -m benches relay

Mails have 150 bytes, frames are JSON. A client library would cost more than the server does, so the WebSocket here is a
hundred lines that do no more than they must. Both processes share the machine. Stored mail is flushed in turns with
NATS JetStream (`sync_interval: always`, a durable consumer that fetches 50 at a time and has every ack confirmed), if
that is there.
"""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benches.contest import say
from benches.peers.clients import NatsClient
from benches.peers.servers import Absent, nats_server
from benches.ycsb import quantile

AGENTS: Final = 1_000
OUTSTANDING: Final = 5  # Mails of each agent whose confirmation has not come back.
SECONDS: Final = 30.0
DRAIN_SECONDS_MAX: Final = 60.0
HOPS: Final = 1_000
STORED: Final = 1_000
FLUSHES: Final = 7
BODY: Final = urlsafe_b64encode(os.urandom(150)).decode().rstrip("=")

Frames = list[dict[str, Any]]
_ids = itertools.count()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        command = [sys.executable, "-m", "holdfast.cli", "serve", "--data", f"dir:{folder}/data", "--port", "0"]
        server = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        stack.callback(server.terminate)
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        try:
            nats: str | None = stack.enter_context(nats_server(Path(folder))).url
        except Absent as absent:
            say(f"NATS is left out: {absent}.")
            nats = None
        say(uvloop.run(hop(port)))
        say(uvloop.run(flush(port, nats)))
        say(uvloop.run(throughput(port, server.pid)))


async def hop(port: int) -> str:
    """One mail at a time between two agents: from the send to its arrival, stored and synced in between."""
    times: list[float] = []
    arrived = asyncio.Event()

    def take(agent: "Agent", frames: Frames) -> None:
        if agent.confirm(frames):
            times.append(time.perf_counter() - started)
            arrived.set()

    ada, _ = await Agent.join(port, "hop-ada"), await Agent.join(port, "hop-bob", take)
    for _ in range(HOPS):
        arrived.clear()
        started = time.perf_counter()
        ada.send("hop-bob")
        await arrived.wait()
        await asyncio.sleep(0.002)
    p50, p99 = (quantile(sorted(times), q) * 1e3 for q in (0.5, 0.99))
    return f"A live mail arrives {p50:.2f} ms after it was sent in the median, {p99:.1f} ms at p99 (goal: 2 ms)."


async def flush(port: int, nats: str | None) -> str:
    """An agent comes back to a thousand stored mails: until its sender has heard that the last one is confirmed."""
    taken: list[float] = []
    theirs: list[float] = []
    for turn in range(FLUSHES):
        if nats is not None:
            theirs.append(await _flush_of_nats(nats, f"flush-{turn}"))
        counts = {"sent": 0, "delivery_confirm": 0}
        done = asyncio.Event()

        def take(agent: "Agent", frames: Frames, counts: dict[str, int] = counts, done: asyncio.Event = done) -> None:
            del agent
            for frame in frames:
                if frame["type"] in counts:
                    counts[frame["type"]] += 1
                    if counts[frame["type"]] == STORED:
                        done.set()

        ada, bob = await Agent.join(port, f"flush-ada-{turn}", take), f"flush-bob-{turn}"
        for _ in range(0, STORED, 50):
            ada.say([ada.mail(bob) for _ in range(50)])
        await done.wait()
        done.clear()
        waiting = await Agent.connect(port, bob, Agent.confirm)
        started = time.perf_counter()
        await waiting.authenticate()
        await done.wait()
        taken.append(time.perf_counter() - started)
    beside = ""
    if theirs:
        beside = (
            f" NATS takes {median(theirs) * 1e3:.0f} ms ({min(theirs) * 1e3:.0f} to {max(theirs) * 1e3:.0f}) for as "
            f"many messages: {median(theirs) / median(taken):.1f} times as long (goal: longer)."
        )
    return (
        f"{STORED:,} stored mails are flushed, confirmed, synced and their sender told in {median(taken) * 1e3:.0f} ms "
        f"(median of {FLUSHES}; {min(taken) * 1e3:.0f} to {max(taken) * 1e3:.0f}).{beside}"
    )


async def _flush_of_nats(url: str, subject: str) -> float:
    filling = await NatsClient.connect(url, subject)
    await filling.fill(STORED, BODY.encode())
    await filling.close()
    client = await NatsClient.connect(url, subject)
    started = time.perf_counter()
    [receive] = await client.consumers(1)
    taken = 0
    while taken < STORED:
        messages = await receive(50)
        await client.ack_each(messages)
        taken += len(messages)
    seconds = time.perf_counter() - started
    await client.close()
    return seconds


async def throughput(port: int, pid: int) -> str:
    """Every agent sends to others at random, confirms what comes, and sends again when it hears of one of its own."""
    names = [f"agent-{number}" for number in range(AGENTS)]
    chance = random.Random(1)
    done, sent, is_over = 0, AGENTS * OUTSTANDING, False

    def take(agent: "Agent", frames: Frames) -> None:
        nonlocal done, sent
        agent.confirm(frames)
        for frame in frames:
            if frame["type"] == "delivery_confirm":
                done += 1
                if not is_over:
                    sent += 1
                    agent.send(chance.choice(names))

    agents: list[Agent] = []
    for first in range(0, AGENTS, 50):
        agents += await asyncio.gather(*(Agent.join(port, name, take) for name in names[first : first + 50]))
    for agent in agents:
        for _ in range(OUTSTANDING):
            agent.send(chance.choice(names))
    await asyncio.sleep(1)
    before, cpu, started = done, _cpu_seconds(pid), time.perf_counter()
    await asyncio.sleep(SECONDS)
    mails, seconds, cpu = done - before, time.perf_counter() - started, _cpu_seconds(pid) - cpu
    is_over, deadline = True, time.perf_counter() + DRAIN_SECONDS_MAX
    while done < sent and time.perf_counter() < deadline:
        await asyncio.sleep(0.01)
    return (
        f"{AGENTS:,} agents for {SECONDS:.0f} s: {mails / seconds:,.0f} mails/s sent, stored, delivered, confirmed, "
        f"told of (goal: 5,000; the server had {cpu / seconds:.2f} of a processor, {cpu / mails * 1e6:.0f} µs a mail); "
        f"{sent - done} of {sent:,} lost."
    )


class Agent(asyncio.Protocol):
    """An agent, with as much of a WebSocket as it needs."""

    def __init__(self, port: int, name: str, take: Callable[["Agent", Frames], Any]) -> None:
        self.name = name
        self._host = f"127.0.0.1:{port}"
        self._take = take
        self._data = b""
        self._is_open = False
        self._inbox: asyncio.Queue[Frames] | None = asyncio.Queue()

    @classmethod
    async def connect(cls, port: int, name: str, take: Callable[["Agent", Frames], Any] | None = None) -> "Agent":
        """An agent that was challenged."""
        loop = asyncio.get_running_loop()
        _, agent = await loop.create_connection(lambda: cls(port, name, take or (lambda *_: None)), "127.0.0.1", port)
        assert agent._inbox is not None
        [agent.challenge] = await agent._inbox.get()
        return agent

    @classmethod
    async def join(cls, port: int, name: str, take: Callable[["Agent", Frames], Any] | None = None) -> "Agent":
        agent = await cls.connect(port, name, take)
        await agent.authenticate()
        return agent

    async def authenticate(self) -> None:
        key = Ed25519PrivateKey.from_private_bytes(self.name.encode().ljust(32))
        nonce = urlsafe_b64decode(self.challenge["nonce"] + "=")
        parts = (self.challenge["protocol"].encode(), self.challenge["host"].encode(), nonce)
        signature = key.sign(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
        shown = {"public_key": key.public_key().public_bytes_raw(), "signature": signature}
        proof = {name: urlsafe_b64encode(data).decode().rstrip("=") for name, data in shown.items()}
        self.say({"type": "authenticate", "address": self.name, **proof})
        inbox, self._inbox = self._inbox, None
        assert inbox is not None

    def mail(self, to: str) -> dict[str, Any]:
        return {"type": "send", "message_id": f"{self.name}-{next(_ids)}", "to": to, "body": BODY}

    def send(self, to: str) -> None:
        self.say(self.mail(to))

    def confirm(self, frames: Frames) -> int:
        """Confirm the mails among these; how many there were."""
        ids = [frame["message_id"] for frame in frames if frame["type"] == "mail"]
        if ids:
            self.say({"type": "confirm", "message_ids": ids})
        return len(ids)

    def say(self, message: Any) -> None:
        data = json.dumps(message).encode()
        size = len(data)
        length = bytes((0x80 | size,)) if size < 126 else bytes((0xFE,)) + size.to_bytes(2, "big")
        if size > 0xFFFF:
            length = bytes((0xFF,)) + size.to_bytes(8, "big")
        self._transport.write(b"\x81" + length + bytes(4) + data)  # A mask of zeros changes nothing.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(
            f"GET /v1/relay HTTP/1.1\r\nHost: {self._host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        data = self._data + data
        if not self._is_open:
            head, end, data = data.partition(b"\r\n\r\n")
            assert end, "the answer to the upgrade comes in one piece"
            assert head.startswith(b"HTTP/1.1 101"), head
            self._is_open = True
        while len(data) >= 2:
            size, begin = data[1], 2
            if size >= 126:
                begin = 4 if size == 126 else 10
                size = int.from_bytes(data[2:begin], "big")
            if len(data) < begin + size or (begin > 2 and len(data) < begin):
                break
            if data[0] & 0x0F == 1:
                message = json.loads(data[begin : begin + size])
                self._took(message if isinstance(message, list) else [message])
            data = data[begin + size :]
        self._data = data

    def _took(self, frames: Frames) -> None:
        wrong = [frame for frame in frames if frame["type"] in ("error", "rate_limited")]
        assert not wrong, wrong[0]
        if self._inbox is not None:
            self._inbox.put_nowait(frames)
        else:
            self._take(self, frames)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
