"""The audit log of a server: every audited call leaves who sent it, when, from where, and how it ended."""

import asyncio
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

import fastness
from fastness.errors import FastnessError, NotAllowed
from fastness.wire.audit import AuditEntry, AuditPage
from fastness.wire.catalog import NETWORK_REQUESTS
from fastness.wire.requests import Request, permission_of
from tests.support.request_values import filled
from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually, eventually_async

AUDITED = [kind for kind in NETWORK_REQUESTS if kind.operation.audited]


class Audited:
    """A server with an administrator, and a reader that may only read."""

    def __init__(self, folder: Path) -> None:
        with fastness.open(f"dir:{folder / 'data'}") as plane:
            self.admin = plane.tokens.create("admin", universes=["*"], verbs=["*"])
            self.reader = plane.tokens.create("reader", universes=["main"], verbs=["queue:get", "audit:read"])
        self.process = Server(folder, tokens=True)

    def send(self, request: Request[Any]) -> bytes:
        """Send a request over HTTP."""
        headers = {"Content-Type": "application/msgpack", "Authorization": f"Bearer {self.admin.token}"}
        call = urllib.request.Request(
            f"{self.process.url}/v1/call", headers=headers, data=msgspec.msgpack.encode(request)
        )
        try:
            with urllib.request.urlopen(call, timeout=SECONDS_MAX) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.read()

    def newest(self, universe: str | None, count: int = 1) -> list[AuditEntry]:
        path = "/v1/audit/plane?" if universe is None else f"/v1/audit?universe={universe}&"
        status, _, body = self.process.get(f"{path}limit={count}", token=self.admin.token)
        assert status == 200, body
        return msgspec.json.decode(body, type=AuditPage).entries


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    audited = Audited(tmp_path_factory.mktemp("audited"))
    try:
        yield audited
        assert audited.process.stop() == 0
    finally:
        audited.process.kill()


def server_ms(plane: fastness.Plane) -> int:
    """The time of the server, in a message that it creates now."""
    clock = plane.queue("clock")
    return clock.get(clock.put(b"").id).created_ms


@pytest.mark.parametrize("entry", ["http", "stream"])
def test_every_audited_request_leaves_who_when_and_from_where(audited: Audited, entry: str) -> None:
    with fastness.connect(audited.process.url, token=audited.admin.token) as plane:
        for kind in AUDITED:
            request = filled(kind)
            if "name" in kind.__struct_fields__:
                request = msgspec.structs.replace(request, name="a-name")
            before_ms = server_ms(plane)
            code = "ok"
            if entry == "http":
                audited.send(request)
            else:
                try:
                    plane._transport.call(request)
                except FastnessError as error:
                    code = error.code
            (stored,) = audited.newest(getattr(request, "universe", None))
            assert stored.action == permission_of(kind)
            assert (stored.actor, stored.token_id) == ("admin", audited.admin.info.id)
            assert (stored.client, stored.entry) == ("127.0.0.1", entry)
            assert before_ms <= stored.at_ms <= server_ms(plane)
            assert stored.outcome != "started", kind.__name__
            if entry == "stream":
                assert stored.outcome == code


def test_a_refused_action_is_recorded_with_its_code(audited: Audited) -> None:
    with fastness.connect(audited.process.url, token=audited.reader.token) as plane:
        with pytest.raises(NotAllowed):
            plane.queue("jobs").purge()
        with pytest.raises(NotAllowed):
            plane.audit.read_plane()  # The reader is for one universe.
        assert plane.audit.read(limit=1) is not None
    # It is stored after the answer.
    (stored,) = eventually(lambda: [entry for entry in audited.newest(None) if entry.actor == "reader"])
    assert (stored.action, stored.target, stored.outcome, stored.entry) == (
        *("queue:purge", "main/jobs", "not_allowed", "stream"),
    )


def test_an_action_that_fails_is_recorded_with_its_code(audited: Audited) -> None:
    with fastness.connect(audited.process.url, token=audited.admin.token) as plane:
        with pytest.raises(FastnessError) as raised:
            plane.tokens.revoke("0" * 32)
        (stored,) = plane.audit.read_plane(action="token:revoke", limit=1).entries
        assert (stored.target, stored.outcome) == ("0" * 32, raised.value.code)
        plane.queue("counted").put_many([{"n": n} for n in range(3)])
        plane.queue("counted").purge()
        (stored,) = plane.audit.read(actor=audited.admin.info.id, action="queue:*", limit=1).entries
        assert (stored.target, stored.outcome, stored.count) == ("counted", "ok", 3)


# Actions that take long.

HELD = """
import asyncio, pathlib
import msgspec
import fastness.plane.operations
from fastness.plane.handlers import HANDLERS
from fastness.wire.queues import PurgeQueue

FOLDER = pathlib.Path(FOLDER_NAME)
purge = HANDLERS[PurgeQueue].serve

async def held(stores, request, *rest):
    (FOLDER / "begun").touch()
    while not (FOLDER / "released").exists():
        await asyncio.sleep(0.01)
    return await purge(stores, request, *rest)

HANDLERS[PurgeQueue] = msgspec.structs.replace(HANDLERS[PurgeQueue], serve=held)
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Any]:
    """A server whose purges begin, and wait until there is a file `released`."""
    server = Server(tmp_path, before=HELD.replace("FOLDER_NAME", repr(str(tmp_path))))
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize("how", ["cancels", "disconnects"])
async def test_an_action_whose_client_leaves_gets_its_outcome(held: Any, tmp_path: Path, how: str) -> None:
    async with fastness.connect_async(held.url) as other:
        await other.queue("jobs").put_many([{"n": n} for n in range(3)])
        plane = await fastness.connect_async(held.url).__aenter__()
        purging = asyncio.create_task(plane.queue("jobs").purge())
        await eventually_async((tmp_path / "begun").exists)
        purging.cancel()
        if how == "disconnects":
            await plane.close()
        await asyncio.wait([purging])
        assert (await other.audit.read()).entries[0].outcome == "started"
        (tmp_path / "released").touch()

        async def ended() -> AuditEntry | None:
            newest = (await other.audit.read()).entries[0]
            return None if newest.outcome == "started" else newest

        stored = await eventually_async(ended)
        assert stored is not None
        assert (stored.outcome, stored.count) == ("ok", 3)
        assert (await other.queue("jobs").stats()).ready == 0
        await plane.close()


async def test_a_killed_server_leaves_a_started_entry(held: Any, tmp_path: Path) -> None:
    async with httpx2.AsyncClient(timeout=SECONDS_MAX) as carrier:
        put = await carrier.post(f"{held.url}/v1/queue/enqueue", json={"queue": "jobs", "payload": 1})
        assert put.status_code < 300, put.text
        purging = asyncio.create_task(carrier.post(f"{held.url}/v1/queues/jobs/purge"))
        await eventually_async((tmp_path / "begun").exists)
        held.process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx2.TransportError):
            await purging
    assert await asyncio.to_thread(held.process.wait) == -signal.SIGKILL
    with fastness.open(held.data) as plane:
        (stored,) = plane.audit.read().entries
        assert (stored.action, stored.target, stored.outcome, stored.entry) == (
            *("queue:purge", "jobs", "started", "http"),
        )
        assert plane.queue("jobs").stats().ready == 1


async def test_an_action_of_an_mcp_client_is_recorded(audited: Audited) -> None:
    with fastness.connect(audited.process.url, token=audited.admin.token) as plane:
        id = plane.queue("of-mcp").put(b"", max_attempts=1).id
        message = plane.queue("of-mcp").receive()
        assert message is not None
        message.nack(error="broken")
    headers = {"Authorization": f"Bearer {audited.admin.token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=SECONDS_MAX) as carrier:
        transport = streamable_http_client(f"{audited.process.url}/mcp", http_client=carrier)
        async with Client(transport) as client:
            done = await client.call_tool("dead_letters_redrive", {"queue": "of-mcp", "ids": [id]})
            assert done.structured_content == {"redriven": 1}
    (stored,) = await asyncio.to_thread(audited.newest, "main")
    assert (stored.action, stored.target, stored.outcome, stored.count) == ("queue:redrive", "of-mcp", "ok", 1)
    assert stored.entry == "mcp"
    assert (stored.actor, stored.token_id, stored.client) == ("admin", audited.admin.info.id, "127.0.0.1")
