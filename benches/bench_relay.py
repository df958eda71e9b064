"""The relay: one server process, and agents in this process that use it over raw sockets.

    python -m benches relay

Mails have 150 bytes, frames are JSON. A client library would use more processor time than the server, so this module
has a minimal WebSocket client. Both processes share the machine. The flush of stored mail alternates with NATS
JetStream (`sync_interval: always`, a durable consumer that fetches 50 at a time, every ack confirmed), if NATS is
installed.
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

from benches.comparison import echo
from benches.peers.clients import NatsClient
from benches.peers.servers import Absent, nats_server
from benches.ycsb import quantile

AGENTS: Final = 1_000
OUTSTANDING: Final = 5  # Unconfirmed mails of each agent.
SECONDS: Final = 30.0
DRAIN_SECONDS_MAX: Final = 60.0
LIVE_MAILS: Final = 1_000
STORED: Final = 1_000
FLUSHES: Final = 7
BODY: Final = urlsafe_b64encode(os.urandom(150)).decode().rstrip("=")

Frames = list[dict[str, Any]]
_ids = itertools.count()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        command = [sys.executable, "-m", "fastness.cli", "serve", "--data", f"dir:{folder}/data", "--port", "0"]
        server = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        stack.callback(server.terminate)
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        try:
            nats: str | None = stack.enter_context(nats_server(Path(folder))).url
        except Absent as absent:
            echo(f"NATS is skipped: {absent}.")
            nats = None
        echo(uvloop.run(live_mail(port)))
        echo(uvloop.run(flush(port, nats)))
        echo(uvloop.run(throughput(port, server.pid)))


async def live_mail(port: int) -> str:
    """The latency of one mail at a time between two agents, including its synced commit."""
    times: list[float] = []
    arrived = asyncio.Event()

    def on_frames(agent: "Agent", frames: Frames) -> None:
        if agent.confirm(frames):
            times.append(time.perf_counter() - started)
            arrived.set()

    ada, _ = await Agent.join(port, "live-ada"), await Agent.join(port, "live-bob", on_frames)
    for _ in range(LIVE_MAILS):
        arrived.clear()
        started = time.perf_counter()
        ada.send("live-bob")
        await arrived.wait()
        await asyncio.sleep(0.002)
    p50, p99 = (quantile(sorted(times), q) * 1e3 for q in (0.5, 0.99))
    return f"Latency of a live mail: p50 {p50:.2f} ms, p99 {p99:.1f} ms."


async def flush(port: int, nats: str | None) -> str:
    """The time from the connection of an agent with 1,000 stored mails to the last receipt at their sender."""
    seconds: list[float] = []
    nats_seconds: list[float] = []
    for number in range(FLUSHES):
        if nats is not None:
            nats_seconds.append(await _flush_of_nats(nats, f"flush-{number}"))
        counts = {"sent": 0, "delivery_confirm": 0}
        done = asyncio.Event()

        def on_frames(
            agent: "Agent", frames: Frames, counts: dict[str, int] = counts, done: asyncio.Event = done
        ) -> None:
            del agent
            for frame in frames:
                if frame["type"] in counts:
                    counts[frame["type"]] += 1
                    if counts[frame["type"]] == STORED:
                        done.set()

        ada, bob = await Agent.join(port, f"flush-ada-{number}", on_frames), f"flush-bob-{number}"
        for _ in range(0, STORED, 50):
            ada.send_message([ada.mail(bob) for _ in range(50)])
        await done.wait()
        done.clear()
        waiting = await Agent.connect(port, bob, Agent.confirm)
        started = time.perf_counter()
        await waiting.authenticate()
        await done.wait()
        seconds.append(time.perf_counter() - started)
    comparison = ""
    if nats_seconds:
        comparison = (
            f" NATS takes {median(nats_seconds) * 1e3:.0f} ms ({min(nats_seconds) * 1e3:.0f} to "
            f"{max(nats_seconds) * 1e3:.0f}) for as many messages: {median(nats_seconds) / median(seconds):.1f} times "
            "as long."
        )
    return (
        f"{STORED:,} stored mails delivered, confirmed, synced and receipted: {median(seconds) * 1e3:.0f} ms "
        f"(median of {FLUSHES}; {min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}).{comparison}"
    )


async def _flush_of_nats(url: str, subject: str) -> float:
    filling = await NatsClient.connect(url, subject)
    await filling.fill(STORED, BODY.encode())
    await filling.close()
    client = await NatsClient.connect(url, subject)
    started = time.perf_counter()
    [receive] = await client.consumers(1)
    received = 0
    while received < STORED:
        messages = await receive(50)
        await client.ack_each(messages)
        received += len(messages)
    seconds = time.perf_counter() - started
    await client.close()
    return seconds


async def throughput(port: int, pid: int) -> str:
    """Every agent sends to random others, confirms its mail, and sends again for each receipt that it gets."""
    names = [f"agent-{number}" for number in range(AGENTS)]
    generator = random.Random(1)
    done, sent, is_draining = 0, AGENTS * OUTSTANDING, False

    def on_frames(agent: "Agent", frames: Frames) -> None:
        nonlocal done, sent
        agent.confirm(frames)
        for frame in frames:
            if frame["type"] == "delivery_confirm":
                done += 1
                if not is_draining:
                    sent += 1
                    agent.send(generator.choice(names))

    agents: list[Agent] = []
    for first in range(0, AGENTS, 50):
        agents += await asyncio.gather(*(Agent.join(port, name, on_frames) for name in names[first : first + 50]))
    for agent in agents:
        for _ in range(OUTSTANDING):
            agent.send(generator.choice(names))
    await asyncio.sleep(1)
    before, cpu, started = done, _cpu_seconds(pid), time.perf_counter()
    await asyncio.sleep(SECONDS)
    mails, seconds, cpu = done - before, time.perf_counter() - started, _cpu_seconds(pid) - cpu
    is_draining, deadline = True, time.perf_counter() + DRAIN_SECONDS_MAX
    while done < sent and time.perf_counter() < deadline:
        await asyncio.sleep(0.01)
    return (
        f"{AGENTS:,} agents for {SECONDS:.0f} s: {mails / seconds:,.0f} mails/s sent, stored, delivered, confirmed, "
        f"receipted (the server used {cpu / seconds:.2f} of a processor, {cpu / mails * 1e6:.0f} µs a mail); "
        f"{sent - done} of {sent:,} lost."
    )


class Agent(asyncio.Protocol):
    """An agent with a minimal WebSocket client."""

    def __init__(self, port: int, name: str, on_frames: Callable[["Agent", Frames], Any]) -> None:
        self.name = name
        self._host = f"127.0.0.1:{port}"
        self._on_frames = on_frames
        self._data = b""
        self._is_open = False
        self._inbox: asyncio.Queue[Frames] | None = asyncio.Queue()

    @classmethod
    async def connect(cls, port: int, name: str, on_frames: Callable[["Agent", Frames], Any] | None = None) -> "Agent":
        """Connect and wait for the challenge."""
        loop = asyncio.get_running_loop()
        _, agent = await loop.create_connection(
            lambda: cls(port, name, on_frames or (lambda *_: None)), "127.0.0.1", port
        )
        assert agent._inbox is not None
        [agent.challenge] = await agent._inbox.get()
        return agent

    @classmethod
    async def join(cls, port: int, name: str, on_frames: Callable[["Agent", Frames], Any] | None = None) -> "Agent":
        agent = await cls.connect(port, name, on_frames)
        await agent.authenticate()
        return agent

    async def authenticate(self) -> None:
        key = Ed25519PrivateKey.from_private_bytes(self.name.encode().ljust(32))
        nonce = urlsafe_b64decode(self.challenge["nonce"] + "=")
        parts = (self.challenge["protocol"].encode(), self.challenge["host"].encode(), nonce)
        signature = key.sign(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
        shown = {"public_key": key.public_key().public_bytes_raw(), "signature": signature}
        proof = {name: urlsafe_b64encode(data).decode().rstrip("=") for name, data in shown.items()}
        self.send_message({"type": "authenticate", "address": self.name, **proof})
        inbox, self._inbox = self._inbox, None
        assert inbox is not None

    def mail(self, to: str) -> dict[str, Any]:
        return {"type": "send", "message_id": f"{self.name}-{next(_ids)}", "to": to, "body": BODY}

    def send(self, to: str) -> None:
        self.send_message(self.mail(to))

    def confirm(self, frames: Frames) -> int:
        """Confirm the mails among these frames, and return their number."""
        ids = [frame["message_id"] for frame in frames if frame["type"] == "mail"]
        if ids:
            self.send_message({"type": "confirm", "message_ids": ids})
        return len(ids)

    def send_message(self, message: Any) -> None:
        data = json.dumps(message).encode()
        size = len(data)
        length = bytes((0x80 | size,)) if size < 126 else bytes((0xFE,)) + size.to_bytes(2, "big")
        if size > 0xFFFF:
            length = bytes((0xFF,)) + size.to_bytes(8, "big")
        self._transport.write(b"\x81" + length + bytes(4) + data)  # A zero mask leaves the data unchanged.

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
            assert end, "the answer to the upgrade must arrive in one read"
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
                self._dispatch(message if isinstance(message, list) else [message])
            data = data[begin + size :]
        self._data = data

    def _dispatch(self, frames: Frames) -> None:
        wrong = [frame for frame in frames if frame["type"] in ("error", "rate_limited")]
        assert not wrong, wrong[0]
        if self._inbox is not None:
            self._inbox.put_nowait(frames)
        else:
            self._on_frames(self, frames)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
