"""The server process: start, tokens, TLS, limits and shutdown."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.sync.client import connect as connect_stream
from websockets.typing import Origin

import fastness
from fastness import Plane
from fastness.errors import (
    Busy,
    CommitUnknown,
    FastnessError,
    InvalidArgument,
    NotAllowed,
    PathUnusable,
    PayloadTooLarge,
    QueueBusy,
    Unreachable,
)
from fastness.limits import FRAME_BYTES_MAX
from fastness.server.relay import Relay
from fastness.server.serving import serve
from fastness.server.settings import Settings
from fastness.server.streams import Streams
from fastness.wire.frames import PROTOCOL, Hello, encode
from fastness.wire.websocket_frames import ShortFrameReader
from tests.support.certificates import certificates
from tests.support.forked import start_python
from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with ExitStack() as running:

        def start_one(**flags: Any) -> Server:
            server = Server(tmp_path, **flags)
            running.callback(server.kill)
            return server

        yield start_one


# Start.


def test_server_prints_its_url_and_reports_health_and_metrics(start: Callable[..., Server]) -> None:
    server = start()
    assert server.get("/healthz")[::2] == (200, b'{"status":"alive"}')
    assert server.get("/readyz")[::2] == (200, b'{"status":"ready"}')
    with server.plane() as plane:
        for number in range(3):
            plane.queue("jobs").put({"n": number})
        with plane.queue("jobs").receive() as message:
            assert message.json() == {"n": 0}
        status, headers, body = server.get("/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    text = body.decode()
    for sample in (
        'fastness_queue_messages{queue="jobs",state="ready",universe="main"} 2.0',
        'fastness_requests_total{code="ok",op="queues.put"} 3.0',
        'fastness_requests_total{code="ok",op="queues.receive"} 1.0',
        "fastness_open_streams 1.0",
    ):
        assert sample in text
    assert "fastness_sync_seconds_count 0.0" not in text
    assert server.stop() == 0
    assert server.process.stdout is not None
    assert server.process.stdout.read() == ""
    assert server.logged('"message":"stopped"')


@contextmanager
def command(folder: Path, *options: str, port: int = 0) -> Iterator["subprocess.Popen[str]"]:
    """`fastness serve`."""
    words = ["serve", "--data", f"dir:{folder / 'data'}", "--port", str(port), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    pipe = subprocess.PIPE
    with start_python(["-m", "fastness.cli", *words], stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_command_prints_where_the_server_and_its_console_are(tmp_path: Path) -> None:
    with command(tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("Fastness is ready at ").strip()
        assert process.stdout.readline() == f"The web console is at {url}/console\n"
        with fastness.connect(url) as plane:
            assert plane.queues() == []


def test_with_the_log_format_json_every_line_of_output_is_json(tmp_path: Path) -> None:
    with command(tmp_path, "--log-format", "json", "--log-level", "debug") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["logger"], ready["console"]) == ("fastness.server", f"{ready['url']}/console")
        host, _, port = ready["url"].removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"no HTTP\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=SECONDS_MAX)
    lines = [json.loads(line) for line in (output + errors).splitlines()]
    assert {"at", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    assert {"fastness.server", "uvicorn.error"} <= {line["logger"] for line in lines}


def test_with_the_log_format_json_a_start_that_fails_is_a_line_of_json(tmp_path: Path) -> None:
    (tmp_path / "fastness.toml").write_text('log_format = "json"')
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        command(tmp_path, "--config", str(tmp_path / "fastness.toml"), port=taken.getsockname()[1]) as process,
    ):
        output, errors = process.communicate(timeout=SECONDS_MAX)
    (problem,) = [json.loads(line) for line in (output + errors).splitlines()]
    assert (process.returncode, problem["code"]) == (2, "invalid_argument")
    assert "is already in use" in problem["detail"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_public_address_without_tokens_or_tls_is_refused_before_opening_data(host: str, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [({}, "tokens are on"), ({"tokens": True}, "--insecure")]
    for flags, word in cases:
        with pytest.raises(InvalidArgument, match=word):
            await serve(Settings(data=f"dir:{tmp_path / 'data'}", host=host, port=0, **flags))
    assert not (tmp_path / "data").exists()


async def test_used_port_or_missing_certificate_is_reported_before_opening_data(tmp_path: Path) -> None:
    data = f"dir:{tmp_path / 'data'}"
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InvalidArgument, match=r"Port \d+ of 127.0.0.1 is already in use; choose another --port"),
    ):
        await serve(Settings(data=data, port=taken.getsockname()[1]))
    with pytest.raises(PathUnusable, match="PEM"):
        await serve(Settings(data=data, port=0, tls_cert=str(tmp_path / "no"), tls_key=str(tmp_path / "no")))
    assert not (tmp_path / "data").exists()


# Shutdown.


def until_draining(server: Server) -> None:
    eventually(lambda: server.get("/readyz")[0] != 200)


def connect(plane: Plane) -> None:
    """Connect a client with little patience; its connection then stays open."""

    def is_connected() -> bool:
        with suppress(Unreachable):
            plane.queue("jobs").stats()
            return True
        return False

    eventually(is_connected)


def test_stopping_server_answers_calls_in_flight_and_starts_no_new_ones(start: Callable[..., Server]) -> None:
    server = start(drain_seconds=10 * SECONDS_MAX)
    with server.unfinished_upload() as finish, server.plane(patience_seconds=0.2) as plane:
        connect(plane)
        server.process.send_signal(signal.SIGTERM)
        until_draining(server)
        status, headers, body = server.get("/readyz")
        assert (status, b"shutting down" in body, "retry-after" in headers) == (503, True, True)
        assert server.get("/healthz")[0] == 200
        status, headers, _ = server.get("/v1/queue/enqueue", body=b"{}")
        assert (status, "retry-after" in headers) == (503, True)
        assert server.status_of_stream() == 503
        with pytest.raises(FastnessError, match="shutting down"):
            plane.queue("jobs").put(b"2")
        assert finish() in (200, 201)
        assert server.process.wait(SECONDS_MAX) == 0


def test_second_signal_stops_the_server_at_once(start: Callable[..., Server]) -> None:
    server = start(drain_seconds=10 * SECONDS_MAX)  # Longer than the test waits.
    with server.unfinished_upload():
        assert server.stop(times=2) == 0
    assert server.logged("stopping at once")
    assert "Traceback" not in server.log()


def test_calls_that_exceed_the_drain_time_are_dropped(start: Callable[..., Server]) -> None:
    server = start(drain_seconds=0.5)
    with server.unfinished_upload():
        assert server.stop() == 0
    assert server.logged("still in flight")
    assert "Traceback" not in server.log()


def test_waiting_consumers_do_not_delay_shutdown(start: Callable[..., Server]) -> None:
    server = start(drain_seconds=10 * SECONDS_MAX)
    with server.plane(patience_seconds=0.1) as plane:
        outcomes: list[Any] = []

        def wait() -> None:
            try:
                outcomes.append(plane.queue("jobs").receive(wait_seconds=60))
            except FastnessError as error:
                outcomes.append(error)

        connect(plane)
        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: b"fastness_calls_waiting 1.0" in server.get("/metrics")[2])
        assert server.stop() == 0
        waiting.join(SECONDS_MAX)
        assert isinstance(outcomes[0], FastnessError)


def test_waiting_consumers_are_bounded_over_all_queues_and_measured(start: Callable[..., Server]) -> None:
    server = start(queue_max_consumers=2)
    with server.plane() as plane:
        waiting = [
            threading.Thread(target=lambda name=name: plane.queue(name).receive(wait_seconds=60)) for name in ("a", "b")
        ]
        for each in waiting:
            each.start()
        eventually(lambda: b"fastness_consumers_waiting 2.0" in server.get("/metrics")[2])
        with pytest.raises(QueueBusy, match="queue_max_consumers"):
            plane.queue("c").receive(wait_seconds=60)
        metrics = server.get("/metrics")[2]
        assert b"fastness_consumers_waiting_max 2.0" in metrics
        assert b"fastness_consumers_refused_total 1.0" in metrics
        for name, each in zip(("a", "b"), waiting, strict=True):
            plane.queue(name).put(b"1")
            each.join(SECONDS_MAX)
        assert b"fastness_consumers_waiting 0.0" in server.get("/metrics")[2]


def test_shutdown_under_load_loses_no_acknowledged_message(start: Callable[..., Server]) -> None:
    server = start()
    acknowledged: list[str] = []

    def put_until_refused() -> None:
        with server.plane(patience_seconds=0.1) as plane:
            queue = plane.queue("jobs")
            connect(plane)
            with suppress(FastnessError):
                while True:
                    acknowledged.append(queue.put(b"1").id)

    writers = [threading.Thread(target=put_until_refused) for _ in range(8)]
    for writer in writers:
        writer.start()
    eventually(lambda: len(acknowledged) >= 500)
    assert server.stop() == 0
    for writer in writers:
        writer.join(SECONDS_MAX)
    found: set[str] = set()
    with fastness.open(server.data) as plane:
        assert plane.queue("jobs").stats().put_total >= len(acknowledged)
        while messages := plane.queue("jobs").receive_many(256):
            found |= {message.id for message in messages}
    assert set(acknowledged) <= found


def test_a_wait_for_a_result_ends_when_its_caller_disconnects(start: Callable[..., Server]) -> None:
    server = start(limits={"wait_seconds_max": 600.0})
    with server.plane() as plane:
        id = plane.queue("jobs").put(b"x", keep_result=True).id

    def wait_for(waiting: int) -> None:
        eventually(lambda: f"fastness_calls_waiting {waiting}.0\n".encode() in server.get("/metrics")[2])

    with socket.create_connection(server.address) as caller:
        path = f"/v1/queues/jobs/messages/{id}/result?wait_seconds=600"
        caller.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        wait_for(1)
    wait_for(0)


# Tokens.


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """Tokens, created in the data directory before the server starts."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        make = plane.tokens.create
        return {
            "admin": make("admin", universes="*", verbs="*").token,
            "worker": make("worker", universes="main", verbs="queue:*,blob:*").token,
            "receiver": make("receiver", universes="main", verbs="queue:put,queue:receive,queue:stats").token,
            "brief": make("brief", universes="main", verbs="*", ttl_seconds=1).token,
            "slow": make("slow", universes="main", verbs="*", rate_per_second=1).token,
            "small": make("small", universes="main", verbs="*", body_bytes_max=500).token,
            "scraper": make("scraper", universes="*", verbs="metrics:read").token,
        }


def test_calls_without_a_valid_token_are_refused(start: Callable[..., Server], tokens: dict[str, str]) -> None:
    server = start(tokens=True)
    wrong = tokens["worker"][:-1] + ("0" if tokens["worker"][-1] != "0" else "1")
    for token in (None, wrong, "nonsense"):
        assert server.status_of_stream(token) == 403
        assert server.get("/v1/queue/stats", token=token, body=b'{"queue":"jobs"}')[0] in (401, 403)
        with server.plane(token) as plane, pytest.raises(NotAllowed):
            plane.queue("jobs").put(b"1")
    assert server.logged("refused", '"reason":"token"', "127.0.0.1")
    with server.plane(tokens["worker"]) as plane:
        plane.queue("jobs").put(b"1")
        with plane.queue("jobs").receive() as message:
            assert message.payload == b"1"
    assert server.get("/healthz")[0] == server.get("/readyz")[0] == 200
    assert server.get("/metrics")[0] == server.get("/metrics", token=tokens["worker"])[0] == 403
    assert b'fastness_rejects_total{reason="token"}' in server.get("/metrics", token=tokens["scraper"])[2]
    assert not [token for token in tokens.values() if token.rpartition("_")[2] in server.log()]


def test_token_is_limited_in_verbs_universes_rate_and_size(
    start: Callable[..., Server], tokens: dict[str, str]
) -> None:
    server = start(tokens=True)
    with server.plane(tokens["worker"]) as plane:
        for refused in (lambda: plane.lease("k").acquire(), plane.tokens.page, lambda: plane.pairs.get(b"a")):
            with pytest.raises(NotAllowed):
                refused()
        own = plane.tokens.self()
        assert own is not None
        shown = json.loads(server.get("/v1/tokens/self", token=tokens["worker"])[2])["token"]
        assert (own.name, own.universes, shown["id"]) == ("worker", ["main"], own.id)
        with pytest.raises(NotAllowed, match="does not allow world:append"):
            plane.atomic().put(plane.queue("jobs"), b"1").append(plane.world("w"), [1], expected_head=0).commit()
    with server.plane(tokens["receiver"]) as plane:
        plane.queue("jobs").put(b"1")
        (message,) = plane.queue("jobs").receive_many()
        with pytest.raises(NotAllowed, match="does not allow queue:ack"):
            plane.queue("jobs").receive_many(ack=[message])
        assert plane.queue("jobs").stats().acked_total == 0
    with server.plane(tokens["worker"], "beta") as plane, pytest.raises(NotAllowed, match="is not for beta"):
        plane.queue("jobs").put(b"1")
    assert server.logged('"code":"not_allowed"', "beta", '"asked":"queue:put"')
    other_universe = server.get("/v1/queue/stats?universe=beta", token=tokens["worker"], body=b'{"queue":"jobs"}')
    assert other_universe[0] == 403
    with server.plane(tokens["slow"]) as plane, pytest.raises(Busy, match="calls per second"):
        for _ in range(100):  # A hundred calls take less than a hundred seconds on any machine.
            plane.queue("jobs").put(b"1")
    with server.plane(tokens["small"]) as plane:
        plane.queue("jobs").put(b"1")
        with pytest.raises(PayloadTooLarge, match="allows 500"):
            plane.queue("jobs").put(b"1" * 500)
    with server.plane(tokens["admin"], "beta") as plane:
        assert plane.queue("jobs").stats().put_total == 0


def test_the_documented_verbs_of_a_program_are_sufficient_and_no_more(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "secure-a-server.md").read_text()
    producer, worker, viewer, operator = re.findall(r"^\| .* \| `((?:queue:[a-z._]+,?)+)` \|$", page, re.MULTILINE)
    verbs = {"producer": producer, "worker": worker, "viewer": viewer, "operator": f"{viewer},{operator}"}
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        tokens = {name: plane.tokens.create(name, universes="main", verbs=each).token for name, each in verbs.items()}
    server = start(tokens=True)

    def ask(program: str, path: str, body: Any = None) -> Any:
        status, _, answer = server.get(path, token=tokens[program], body=body and json.dumps(body).encode())
        return json.loads(answer) if status == 200 else (status, json.loads(answer)["code"])

    def put() -> str:
        sent = {"queue": "jobs", "payload": 1, "key": "k", "keep_result": True}
        return str(ask("producer", "/v1/queue/enqueue", sent)["message_id"])

    done, cancelled = put(), put()
    receive = {"queue": "jobs", "owner": "ada", "wait_seconds": -1}
    (message,) = ask("worker", "/v1/queue/dequeue", receive)["messages"]
    lease = {"message_id": message["message_id"], "lease_id": message["lease_id"]}
    waits = {"op": "queues.wait_for_cancel", "queue": "jobs", "leases": [lease], "wait_seconds": 0}
    assert ask("worker", "/v1/call", waits)["outcomes"][0]["code"] is None
    assert ask("worker", "/v1/queue/ack", {"queue": "jobs", **lease, "result": 2})["settled"] is True
    assert ask("operator", f"/v1/queues/jobs/messages/{cancelled}/cancel", {})["state"] == "cancelled"
    for program in ("producer", "viewer", "operator"):
        assert ask(program, f"/v1/queues/jobs/messages/{done}")["state"] == "done"
        assert ask(program, f"/v1/queues/jobs/messages/{done}/result")["result"] == 2
    assert ask("viewer", "/v1/queues/jobs/keys/k")["leased"] == 0
    assert ask("operator", "/v1/queues/jobs/keys/k/pause", {"seconds": 1})["key"] == "k"
    waiting, refused = put(), (403, "not_allowed")
    update = {"op": "queues.update", "queue": "jobs", "id": waiting, "priority": 9}
    for program in ("producer", "worker", "viewer"):
        assert ask(program, f"/v1/queues/jobs/messages/{waiting}/cancel", {}) == refused
        assert ask(program, "/v1/queues/jobs/keys/k/pause", {"seconds": 1}) == refused
        assert ask(program, "/v1/call", update) == refused
    assert ask("operator", "/v1/call", update)["priority"] == 9
    assert ask("worker", f"/v1/queues/jobs/messages/{waiting}") == refused
    assert ask("viewer", "/v1/call", waits) == refused


def test_token_that_is_created_over_the_network_is_limited_by_its_maker(
    start: Callable[..., Server], tokens: dict[str, str]
) -> None:
    server = start(tokens=True)
    with server.plane(tokens["admin"]) as admin:
        limits: dict[str, Any] = {"ttl_seconds": 3_600.0, "rate_per_second": 500.0}
        maker = admin.tokens.create("maker", universes="*", verbs="*", **limits)
    with server.plane(maker.token) as plane:
        made = plane.tokens.create("child", universes="*", verbs="*")
        child = made.info
        assert (child.expires_ms, child.rate_per_second) == (maker.info.expires_ms, 500)
        assert child.maker == maker.info.id
        with pytest.raises(NotAllowed, match="rate_per_second is 501"):
            plane.tokens.create("child", universes="*", verbs="*", rate_per_second=501)
    wanted = {"op": "tokens.create", "name": "x", "universes": ["*"], "verbs": ["*"], "secret_sha256": "0" * 64}
    over_http = server.get("/v1/call", token=maker.token, body=json.dumps({**wanted, "maker": ""}).encode())
    assert (over_http[0], json.loads(over_http[2])["expires_ms"]) == (200, maker.info.expires_ms)
    refused = server.get("/v1/call", token=maker.token, body=json.dumps({**wanted, "ttl_seconds": 7_200}).encode())
    assert (refused[0], "ttl_seconds is 7200" in json.loads(refused[2])["detail"]) == (403, True)
    assert server.get("/v1/queues", token=made.token)[0] == 200
    with server.plane(tokens["admin"]) as admin:
        assert admin.tokens.revoke(maker.info.id) is True
    assert server.get("/v1/queues", token=made.token)[0] == 401


def test_revoked_and_expired_tokens_are_refused_at_once(start: Callable[..., Server], tokens: dict[str, str]) -> None:
    server = start(tokens=True)
    with server.plane(tokens["admin"]) as admin, server.plane(tokens["worker"]) as worker:
        worker.queue("jobs").put(b"1")
        assert admin.tokens.revoke(tokens["worker"]) is True
        with pytest.raises((NotAllowed, CommitUnknown)):  # Unknown if the call was in flight.
            worker.queue("jobs").put(b"2")
        with pytest.raises(NotAllowed):
            worker.queue("jobs").put(b"3")
        assert server.status_of_stream(tokens["worker"]) == 403
        assert admin.queue("jobs").stats().put_total == 1
        made = admin.tokens.create("next", universes="main", verbs="queue:put")
        assert server.status_of_stream(made.token) == 101  # A new token works at once.
    eventually(lambda: server.status_of_stream(tokens["brief"]) != 101)
    assert server.status_of_stream(tokens["brief"]) == 403
    assert server.logged("was revoked", '"token"')
    assert server.logged("has expired", '"token"')


def test_waiting_consumer_with_a_revoked_token_gets_no_message(
    start: Callable[..., Server], tokens: dict[str, str]
) -> None:
    server = start(tokens=True)
    with server.plane(tokens["admin"]) as admin, server.plane(tokens["worker"], patience_seconds=0.1) as worker:
        outcomes: list[Any] = []

        def wait() -> None:
            try:
                outcomes.append(worker.queue("jobs").receive(wait_seconds=60))
            except FastnessError as error:
                outcomes.append(error)

        connect(worker)
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        eventually(lambda: admin.queue("jobs").stats().waiting_consumers)
        admin.tokens.revoke(tokens["worker"])
        admin.queue("jobs").put(b"1")
        waiting.join(SECONDS_MAX)
        assert isinstance(outcomes[0], NotAllowed)
        assert admin.queue("jobs").stats().ready == 1


# TLS.


def test_server_uses_tls(start: Callable[..., Server], tmp_path: Path) -> None:
    pem = certificates(tmp_path)
    server = start(tls_cert=pem["server_cert"], tls_key=pem["server_key"])
    assert server.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=pem["ca_cert"])
    assert server.get("/readyz", tls=trusting)[0] == 200
    with server.plane(tls=trusting) as plane:
        jobs, payloads = plane.queue("jobs"), [bytes([number]) * 200_000 for number in range(3)]
        jobs.put_many(payloads)  # Longer in total than one read of a client.
        assert [message.payload for message in jobs.receive_many(3, extend_for_seconds=0)] == payloads
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        server.get("/healthz", tls=ssl.create_default_context())
    plain = http.client.HTTPConnection(*server.address, timeout=SECONDS_MAX)
    with pytest.raises((OSError, http.client.HTTPException)):
        plain.request("GET", "/healthz")
        plain.getresponse()
    plain.close()


async def test_a_client_that_uses_http_for_a_server_with_tls_is_told_to_use_https(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    pem = certificates(tmp_path)
    server = start(tls_cert=pem["server_cert"], tls_key=pem["server_key"])
    plain = server.url.replace("https://", "http://")
    advice = "A server with TLS needs https:// in place of http://"
    with fastness.connect(plain, patience_seconds=0.2) as plane:
        for call in (plane.queues, lambda: plane.blobs.put(b"x" * 1_000_000)):
            with pytest.raises(Unreachable, match=advice):
                call()
    async with fastness.connect_async(plain, patience_seconds=0.2) as plane:
        with pytest.raises(Unreachable, match=advice):
            await plane.queues()


def test_threads_share_a_tls_connection(start: Callable[..., Server], tmp_path: Path) -> None:
    pem = certificates(tmp_path)
    server = start(tls_cert=pem["server_cert"], tls_key=pem["server_key"])
    payloads = [bytes([number]) * (1_000 if number % 2 else 150_000) for number in range(32)]
    with (
        server.plane(tls=ssl.create_default_context(cafile=pem["ca_cert"])) as plane,
        ThreadPoolExecutor(16) as threads,
    ):
        jobs = plane.queue("jobs")
        receiving = [threads.submit(jobs.receive, wait_seconds=SECONDS_MAX, extend_for_seconds=0) for _ in range(8)]
        list(threads.map(jobs.put, payloads))
        received = [each.result(SECONDS_MAX) for each in receiving]
        received += threads.map(lambda _: jobs.receive(extend_for_seconds=0), range(24))
        list(threads.map(lambda message: message.ack(), received))
        assert sorted(message.read() for message in received) == sorted(payloads)
        assert jobs.stats().acked_total == len(payloads)


def test_server_can_require_client_certificates(start: Callable[..., Server], tmp_path: Path) -> None:
    pem = certificates(tmp_path)
    server = start(tls_cert=pem["server_cert"], tls_key=pem["server_key"], tls_client_ca=pem["ca_cert"])
    without_certificate, with_certificate = (ssl.create_default_context(cafile=pem["ca_cert"]) for _ in range(2))
    with_certificate.load_cert_chain(pem["client_cert"], pem["client_key"])
    assert server.get("/healthz", tls=with_certificate)[0] == 200
    with server.plane(tls=with_certificate) as plane:
        plane.queue("jobs").put(b"1")
    with pytest.raises((urllib.error.URLError, OSError, http.client.HTTPException)):
        server.get("/healthz", tls=without_certificate)


# Invalid input.


def raw(server: Server, data: bytes) -> bytes:
    with socket.create_connection(server.address, timeout=SECONDS_MAX) as connection:
        with suppress(OSError):
            connection.sendall(data)
        answer = b""
        with suppress(OSError):
            while piece := connection.recv(65_536):
                answer += piece
        return answer


def test_request_heads_are_bounded_in_size_and_time(start: Callable[..., Server]) -> None:
    server = start(header_bytes_max=4_096, header_seconds=2.0)
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert raw(server, get + b"\r\n").startswith(b"HTTP/1.1 200")
    for large in (
        get + b"X-A: " + b"a" * 5_000 + b"\r\n\r\n",
        get + b"".join(b"X-%d: a\r\n" % n for n in range(1_000)) + b"\r\n",
        get + b"X-A: " + b"a" * 100_000,
        b"GET /" + b"a" * 5_000 + b" HTTP/1.1\r\n\r\n",
        get.replace(b"Connection: close", b"Upgrade: websocket\r\nConnection: upgrade")
        + b"X: "
        + b"a" * 5_000
        + b"\r\n\r\n",
    ):
        assert raw(server, large).startswith(b"HTTP/1.1 431")
    for slow in (b"", get, b"GET /"):
        assert raw(server, slow).startswith(b"HTTP/1.1 408")
    for bad in (b"\x16\x03\x01\x00\xff\x01", b"NONSENSE\r\n\r\n"):
        assert raw(server, bad).startswith(b"HTTP/1.1 400")
    head, _, body = raw(server, get + b"X-A: " + b"a" * 5_000 + b"\r\n\r\n").partition(b"\r\n\r\n")
    id = json.loads(body)["correlation_id"]
    assert f"x-correlation-id: {id}".encode() in head
    assert server.logged("refused: request_head_too_large", f'"correlation_id":"{id}"')
    assert server.get("/readyz")[0] == 200


def test_every_refused_request_is_counted_once(start: Callable[..., Server], tokens: dict[str, str]) -> None:
    """By its reason, if no operation started; by operation and outcome otherwise."""
    server = start(tokens=True, body_bytes_max=65_536, header_bytes_max=4_096)
    admin = f"Authorization: Bearer {tokens['admin']}\r\n"

    def rejects() -> dict[str, int]:
        text = server.get("/metrics", token=tokens["scraper"])[2].decode()
        return {
            reason: round(float(value))
            for reason, value in re.findall(r'^fastness_rejects_total{reason="(.+)"} (.+)$', text, re.MULTILINE)
        }

    def send(head: str, body: str = "", *headers: str) -> int:
        lines = "".join(f"{each}\r\n" for each in (head, "Host: localhost", "Connection: close", *headers))
        return int(raw(server, f"{lines}{admin}Content-Length: {len(body)}\r\n\r\n{body}".encode()).split()[1])

    json_type = "Content-Type: application/json"
    for reason, status, request in (
        ("invalid_body", 400, ("POST /v1/state/get HTTP/1.1", "{", json_type)),
        ("invalid_body", 400, ("POST /v1/state/get HTTP/1.1", '{"kay": 1}', json_type)),
        ("invalid_query", 400, ("GET /v1/queues?limt=3 HTTP/1.1",)),
        ("invalid_name", 400, ("GET /v1/queues?universe=%20 HTTP/1.1",)),
        ("invalid_content_type", 415, ("POST /v1/state/get HTTP/1.1", "x", "Content-Type: text/plain")),
        ("not_acceptable", 406, ("GET /v1/queues HTTP/1.1", "", "Accept: image/png")),
        ("not_found", 404, ("GET /v1/nowhere HTTP/1.1",)),
        ("method_not_allowed", 405, ("DELETE /v1/queues HTTP/1.1",)),
        ("body_too_large", 413, ("POST /v1/state/get HTTP/1.1", "x" * 70_000, json_type)),
        ("foreign_origin", 403, ("GET /v1/queues HTTP/1.1", "", "Origin: http://elsewhere.example")),
        ("token", 401, ("GET /v1/queues HTTP/1.1", "", "Authorization: Bearer nonsense")),
        ("request_head_too_large", 431, ("GET /v1/queues HTTP/1.1", "", "X-A: " + "a" * 5_000)),
        ("malformed_request", 400, ("NONSENSE",)),
        (None, 404, ("GET /v1/state/missing HTTP/1.1",)),
        (None, 404, ("GET /v1/worlds/missing HTTP/1.1",)),
        ("invalid_argument", 400, ("GET /v1/queues?limit=0 HTTP/1.1",)),
        (None, 200, ("GET /v1/queues HTTP/1.1",)),
    ):
        before = rejects()
        assert send(*request) == status, request
        added = {name: count - before.get(name, 0) for name, count in rejects().items() if count != before.get(name, 0)}
        assert added == ({} if reason is None else {reason: 1}), request


def test_the_number_of_connections_follows_the_limit_of_open_files(start: Callable[..., Server]) -> None:
    """The default adapts to the limit. A configured number that the limit does not allow is reported."""
    server = start(process={"files_max": 4_096})
    assert server.get("/readyz")[0] == 200
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    assert re.search(r"^Max open files +4096 +4096 ", limits, re.MULTILINE), "the soft limit is raised to the hard one"
    assert "open files" not in server.log()
    server.stop()
    server = start(connections_max=4_096, process={"files_max": 4_096})
    assert server.logged("4096 open files are too few for connections_max=4096", "ulimit -n")


def test_frame_size_is_bounded(start: Callable[..., Server]) -> None:
    server = start()
    url = server.url.replace("http", "ws", 1) + "/v1/stream"
    for size in (FRAME_BYTES_MAX + 1, FRAME_BYTES_MAX * 2):
        with connect_stream(url, compression=None) as stream:
            stream.send(encode(Hello(PROTOCOL, "s")))
            stream.recv()
            with pytest.raises(websockets.ConnectionClosed):
                stream.send(b"\x90" * size)
                stream.recv()
            # The rest of a much larger frame is not read, and the close frame may be lost.
            assert stream.close_code in ((1009,) if size == FRAME_BYTES_MAX + 1 else (1009, 1006))
    assert server.get("/readyz")[0] == 200


def test_web_page_cannot_call_a_server_without_tokens(start: Callable[..., Server]) -> None:
    server = start()
    url = server.url.replace("http", "ws", 1) + "/v1/stream"
    with (
        pytest.raises(websockets.InvalidStatus, match="403"),
        connect_stream(url, origin=Origin("https://evil.example")),
    ):
        pass
    # DNS rebinding: the page's own host name points to this server.
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + key
    names = b"Host: evil.example\r\nOrigin: http://evil.example\r\n"
    assert raw(server, b"GET /v1/stream HTTP/1.1\r\n" + names + upgrade + b"\r\n").startswith(b"HTTP/1.1 403")
    assert server.logged("refused", "evil.example")


def test_server_runs_in_an_existing_event_loop(tmp_path: Path) -> None:
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(serve(Settings(data="memory:", port=0, drain_seconds=1), ready=ready))
    assert urls[0].startswith("http://127.0.0.1:")


@pytest.mark.parametrize("is_enabled", [True, False], ids=["fast path", "websockets only"])
def test_stream_works_with_and_without_the_fast_path_for_short_frames(
    is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShortFrameReader, "is_enabled", is_enabled)
    payloads = [*range(20), "x" * 100_000]
    received: list[Any] = []

    async def put_and_receive() -> None:
        urls: asyncio.Queue[str] = asyncio.Queue()
        settings = Settings(data="memory:", port=0, drain_seconds=1)
        serving = asyncio.create_task(serve(settings, ready=urls.put_nowait))
        async with fastness.connect_async(await urls.get()) as plane:
            for payload in payloads:
                await plane.queue("jobs").put(payload)
            messages = await plane.queue("jobs").receive_many(len(payloads), extend_for_seconds=0)
            received.extend(message.json() for message in messages)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    asyncio.run(asyncio.wait_for(put_and_receive(), SECONDS_MAX))
    assert received == payloads


@pytest.mark.parametrize("part", ["streams", "relay"])
def test_one_signal_stops_the_server_although_draining_fails(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr({"streams": Streams, "relay": Relay}[part], "drain", fail)
    serving = serve(
        Settings(data="memory:", port=0, drain_seconds=1), ready=lambda url: os.kill(os.getpid(), signal.SIGTERM)
    )
    asyncio.run(asyncio.wait_for(serving, SECONDS_MAX))
    assert "unexpected error while draining" in caplog.text
