"""Malformed and hostile input: each gets an error response or a closed connection, and a log line. The server's memory
stays bounded, no file is written outside the data directory, and other universes are neither read nor changed."""

import hashlib
import http.client
import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.sync.client import connect as connect_stream
from websockets.sync.connection import Connection

import fastness
from fastness.limits import FRAME_BYTES_MAX, WEBSOCKET_FRAMES_MAX
from fastness.wire.blobs import FindBlob, GetBlob
from fastness.wire.entities import GetEntity, PutEntity
from fastness.wire.frames import PROTOCOL, Call, Hello, encode
from fastness.wire.leases import AcquireLease, CheckLease, LeaseProof, ListLeases
from fastness.wire.queues import ListQueues, NewMessage, PeekMessages, PurgeQueue, PutMessages, ReceiveMessages
from fastness.wire.requests import Request
from fastness.wire.states import GetState, UpdateState
from fastness.wire.worlds import AppendEntries, ListWorlds, ReadJournal
from tests.support.failures import Failures
from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually

SEED = 20_261_115
MIB = 1 << 20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with ExitStack() as running:

        def one(**flags: Any) -> Any:
            server = Server(tmp_path, **flags)
            running.callback(server.kill)
            return server

        yield one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    limits = {"stream_bytes_max": 16 * MIB, "pause_seconds_max": 2.0, "stream_bytes_per_second_min": 1_000}
    server = Server(tmp_path_factory.mktemp("shared"), header_seconds=2.0, limits=limits)
    try:
        server.get("/readyz")
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(shared: Any) -> Any:
    """The shared server, with an empty log."""
    shared.forget_log()
    return shared


class Answer:
    """The bytes of a raw connection: at most one response."""

    def __init__(self, data: bytes) -> None:
        self.head, _, self.body = data.partition(b"\r\n\r\n")
        self.status = int(self.head.split(b" ")[1]) if self.head else 0

    @property
    def code(self) -> str:
        """The code of the problem response."""
        packed = b"content-type: application/msgpack" in self.head
        assert packed or b"application/problem+json" in self.head, self.head
        problem = msgspec.msgpack.decode(self.body) if packed else json.loads(self.body)
        assert problem["status"] == self.status
        assert problem["correlation_id"].encode() in self.head
        assert problem["detail"]
        return str(problem["code"])


def answer(connection: socket.socket) -> Answer:
    """The response, read until the connection ends."""
    data = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(65_536):
            data += chunk
    return Answer(data)


def raw(server: Server, data: bytes) -> Answer:
    with socket.create_connection(server.address, timeout=SECONDS_MAX) as connection:
        with suppress(OSError):
            connection.sendall(data)
        return answer(connection)


@contextmanager
def dribbling(server: Server, first: bytes, piece: bytes, seconds: float = 0.02) -> Iterator[socket.socket]:
    """A connection that sends one more piece every `seconds` until it ends."""
    with socket.create_connection(server.address, timeout=SECONDS_MAX) as connection:
        stopping = threading.Event()

        def dribble() -> None:
            with suppress(OSError):
                connection.sendall(first)
                while not stopping.wait(seconds):
                    connection.sendall(piece)

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            yield connection
        finally:
            stopping.set()
            thread.join()


def request(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status and the JSON of a response."""
    connection = http.client.HTTPConnection(*server.address, timeout=SECONDS_MAX)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        sent.setdefault("content-type", "application/json")
    try:
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        data = response.read()
        kind = response.headers.get("content-type", "")
        return response.status, json.loads(data) if kind in ("application/json", "application/problem+json") else data
    finally:
        connection.close()


def until_logged(server: Server, act: Callable[[], Any], *words: str) -> None:
    """Wait until the log has a line with these words. `act` is repeated, because the log samples refusals."""

    def is_logged() -> bool:
        act()
        return any(all(word in line for word in words) for line in server.log().splitlines())

    eventually(is_logged, words)


# Request heads, and malformed HTTP.


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xff\x01",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
def test_malformed_http_is_a_problem_response(server: Server, data: bytes) -> None:
    found = raw(server, data)
    assert (found.status, found.code) == (400, "malformed_request")
    until_logged(server, lambda: raw(server, data), "refused: malformed_request")
    assert server.get("/readyz")[0] == 200


def test_a_slow_request_head_times_out(server: Server) -> None:
    def dribble() -> None:
        with dribbling(server, b"GET /healthz HTTP/1.1\r\n", b"X-A: a\r\n") as connection:
            found = answer(connection)
        assert (found.status, found.code) == (408, "request_timeout")

    until_logged(server, dribble, "refused: request_timeout")


@pytest.mark.parametrize("head", [b"GET /healthz", b"POST /v1/call", b"POST /v1/blobs", b"PUT /nowhere"])
@pytest.mark.parametrize("piece", [b"X-A: aaaaaaaa\r\n" * 500, b"X-A: " + b"a" * 8_000], ids=["many", "one"])
def test_the_size_of_trailers_is_bounded(server: Server, head: bytes, piece: bytes) -> None:
    before = server.resident_bytes
    begin = head + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"

    def dribble() -> None:
        with dribbling(server, begin, piece, 0.0) as connection:
            assert answer(connection).status in (0, 200, 404, 415, 431)  # Some get a response before their end.

    until_logged(server, dribble, "refused: request_head_too_large")
    assert server.resident_bytes - before < 16 * MIB


def test_trailers_are_ignored(server: Server) -> None:
    """A header after the body bypasses the checks of proxies."""
    request(server, "PUT", "/v1/state/k", "main")
    request(server, "PUT", "/v1/state/k", "other", X_Fastness_Universe="other")
    body = b'{"key":"k"}'
    found = raw(
        server,
        b"POST /v1/state/get HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-Fastness-Universe: other\r\n\r\n" % (len(body), body),
    )
    assert json.loads(found.body.split(b"\r\n")[-1])["state"]["value"] == "main"


def test_the_number_of_connections_is_bounded(start: Callable[..., Server]) -> None:
    server = start(connections_max=8)
    stream = server.url.replace("http", "ws", 1) + "/v1/stream"
    with ExitStack() as held:
        for number in range(8):
            if number % 2:
                held.enter_context(socket.create_connection(server.address))
            else:
                held.enter_context(connect_stream(stream, compression=None))
        found = raw(server, b"GET /v1/queues HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (found.status, found.code) == (503, "too_many_connections")
        assert b"retry-after: 1" in found.head
        with pytest.raises(InvalidStatus, match="503"), connect_stream(stream, compression=None):
            pass
        assert server.logged("refused: too_many_connections")
    eventually(lambda: server.get("/v1/queues")[0] == 200)


def test_watches_of_queues_and_pushes_share_one_limit(start: Callable[..., Server]) -> None:
    server = start(limits={"watches_max": 1})
    close = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(server.address, timeout=SECONDS_MAX) as connection:
        connection.sendall(b"GET /v1/pushes/watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        for path in (b"/v1/pushes/watch", b"/v1/queue/watch?queue=jobs"):
            found = raw(server, b"GET " + path + close)
            assert (found.status, found.code) == (503, "queue_busy")
            assert b"retry-after:" in found.head.lower()


def test_a_server_recovers_from_running_out_of_file_descriptors(start: Callable[..., Server]) -> None:
    server = start(connections_max=20_000, process={"files_max": 200})
    assert server.logged("open files are too few", "ulimit -n")
    with server.plane() as plane:
        plane.queue("jobs").put(b"before")
        with ExitStack() as held:
            for _ in range(400):
                held.enter_context(socket.create_connection(server.address, timeout=SECONDS_MAX))
            plane.queue("jobs").put(b"meanwhile")  # It uses an existing connection.

        def is_ready() -> bool:
            with suppress(OSError):
                return bool(server.get("/readyz")[0] == 200)
            return False

        eventually(is_ready)
        plane.queue("jobs").put(b"after")
    with server.plane() as plane:
        assert plane.queue("jobs").stats().ready == 3
    assert len(server.log()) < MIB


UPGRADE = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
KEY = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + KEY + b"A: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + KEY + b"A: a\r\n" * 200 + b"\r\n",
        b"GET /v1/stream?" + b"a" * 20_000 + b" HTTP/1.1\r\n" + UPGRADE + KEY + b"\r\n",
        b"POST /v1/stream HTTP/1.1\r\n" + UPGRADE + KEY + b"\r\n",
        b"GET /v1/stream HTTP/1.1\r\nContent-Length: 5\r\n" + UPGRADE + KEY + b"\r\nhello",
        b"GET /v1/stream HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + UPGRADE + KEY + b"\r\n0\r\n\r\n",
        b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + b"\r\n",
        b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + KEY.replace(b"13", b"8") + b"\r\n",
        b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE + KEY.replace(b"==", b"") + b"\r\n",
        b"GET /v1/stream HTTP/1.1\r\n" + UPGRADE.replace(b"websocket", b"h2c") + KEY + b"\r\n",
        b"GET /v1/nowhere HTTP/1.1\r\n" + UPGRADE + KEY + b"\r\n",
        b"GET /v1/queues HTTP/1.1\r\n" + UPGRADE + KEY + b"\r\n",
    ],
    ids=range(12),
)
def test_an_invalid_websocket_handshake_gets_an_error_response(server: Server, data: bytes) -> None:
    with socket.create_connection(server.address, timeout=SECONDS_MAX) as connection:
        connection.sendall(data)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 4")
    assert server.get("/readyz")[0] == 200
    # The stream of an earlier test may still be closing.
    eventually(lambda: b"fastness_open_streams 0.0" in server.get("/metrics")[2])


def responses(connection: socket.socket) -> list[bytes]:
    """The status lines of all responses, until the server closes the connection."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    return re.findall(rb"HTTP/1\.1 (\d+)", received)


@pytest.mark.parametrize(
    ("behind", "status"),
    [(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 290, b"429"), (b"nonsense\r\n\r\n", b"400")],
    ids=["too many", "malformed"],
)
def test_pipelined_requests_before_a_refused_one_are_answered(server: Server, behind: bytes, status: bytes) -> None:
    with socket.create_connection(server.address, timeout=SECONDS_MAX) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10 + behind)
        *answered, last = responses(connection)
    assert len(answered) >= 10
    assert set(answered) == {b"200"}
    assert last == status


def test_the_number_of_pipelined_requests_is_bounded(server: Server) -> None:
    before = server.resident_bytes
    with ExitStack() as held:
        for _ in range(50):
            connection = held.enter_context(socket.create_connection(server.address, timeout=SECONDS_MAX))
            connection.sendall(b"GET /v1/queue/watch?queue=q HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            with suppress(OSError):
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10_000)
                while connection.recv(65_536):
                    pass
    assert server.logged("refused: too_many_pipelined")
    assert server.resident_bytes - before < 32 * MIB
    assert '"level":"error"' not in server.log()


# Bodies.


def test_an_unread_body_does_not_hold_its_connection(server: Server) -> None:
    begin = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    with dribbling(server, begin, b"a") as connection:
        assert answer(connection).status == 200


def test_a_slow_blob_upload_times_out(server: Server) -> None:
    begin = b"POST /v1/blobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n"
    with dribbling(server, begin, b"a") as connection:  # 50 bytes a second.
        found = answer(connection)
    assert (found.status, found.code) == (408, "body_timeout")
    assert server.logged("refused: POST '/v1/blobs': 408")
    assert request(server, "POST", "/v1/blobs", bytes(2 * MIB))[0] == 201


@pytest.mark.parametrize(
    ("path", "kind", "piece"),
    [
        ("/v1/call", "application/json", b'{"op":' + b" " * 65_536),
        ("/v1/call", "application/msgpack", b"\x91" * 65_536),
        ("/v1/queue/enqueue", "application/json", b"[" * 65_536),
        ("/v1/queue/enqueue", "multipart/form-data; boundary=b", b"--b\r\nA: " + b"a" * 65_536),
        ("/v1/state/get", "application/json", b"1" * 65_536),
        ("/v1/blobs", "application/octet-stream", bytes(65_536)),
    ],
)
def test_an_endless_body_is_refused(server: Server, path: str, kind: str, piece: bytes) -> None:
    server.forget_peak()
    before = server.resident_bytes
    begin = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
    with dribbling(server, begin.encode(), chunk, 0.0) as connection:
        found = answer(connection)
    if found.status:  # Otherwise the connection was reset while data was still being sent.
        assert (found.status, found.code) in ((413, "body_too_large"), (400, "invalid_body"))
    assert server.logged(f"refused: POST '{path}': 4")
    assert server.peak_bytes - before < 64 * MIB


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"key":"k","value":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"key":"k","value":' + b"9" * 5_000 + b"}",
        b'{"key":"k","value":1e999}',
        b'{"key":"k","value":NaN}',
        b'{"key":"k","value":"\xff\xfe"}',
        b'{"key":"k","value":"\xc0\xaf"}',
        b'{"key":"k","value":"\\ud800"}',
        b'{"key":"\\u0000","value":1}',
        b'{"key":"k","value":1}{"key":"k","value":1}',
        b"\xef\xbb\xbf{}",
        b"\x1f\x8b\x08\x00",
        b"null",
        b"",
    ],
    ids=range(15),
)
def test_invalid_or_excessive_json_is_refused(server: Server, body: bytes) -> None:

    def update() -> None:
        status, problem = request(server, "POST", "/v1/state/update", body, content_type="application/json")
        assert (status, problem["status"]) == (400, 400)
        assert problem["code"] in ("invalid_body", "invalid_value", "invalid_name", "missing_fields")

    until_logged(server, update, "refused: POST '/v1/state/update': 400")


def test_a_client_that_does_not_read_its_response_is_disconnected(start: Callable[..., Server]) -> None:
    server = start(process={"unread_seconds": 2.0})
    hash = request(server, "POST", "/v1/blobs", bytes(32 * MIB))[1]["hash"]
    before = server.resident_bytes
    with ExitStack() as held:
        stalled = [held.enter_context(socket.create_connection(server.address, timeout=SECONDS_MAX)) for _ in range(8)]
        for connection in stalled:
            connection.sendall(f"GET /v1/blobs/{hash} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert server.logged("disconnected: the client")  # By the server's timer, or by the kernel's.
        assert request(server, "GET", f"/v1/blobs/{hash}")[0] == 200
        assert server.resident_bytes - before < 64 * MIB
        assert [len(answer(connection).body) < 32 * MIB for connection in stalled] == [True] * 8


# Names.

TRICKS = [
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%2f..%2fetc%2fpasswd",
    "..%5c..%5cetc",
    "%252e%252e%252f",
    "%00",
    "a%00b",
    "a%0d%0aSet-Cookie:%20a=b",
    "a%0ab",
    "%c0%ae%c0%ae%c0%af",  # Overlong UTF-8 of ../
    "%e0%80%ae",
    "%ff%fe",
    "%ed%a0%80",  # Half of a surrogate pair.
    "%f4%90%80%80",  # Beyond Unicode.
    "%e2%80%ae",  # Right to left.
    "%ef%bc%8e%ef%bc%8e%ef%bc%8f",  # Full-width ../
    "%e2%84%aa",  # The kelvin sign, which is a k in lower case.
    "a%20b",
    "~root",
    "%24%7bjndi:ldap:%2f%2fx%7d",
    "'%20or%201=1--",
    "%3cscript%3e",
    "a" * 256,
    "a" * 20_000,
    "%25" * 3_000,
]
NAME_PATHS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/worlds/{}", None),
    ("PUT", "/v1/worlds/{}", {}),
    ("GET", "/v1/queues/{}", None),
    ("PUT", "/v1/queues/{}/policy", {}),
    ("PUT", "/v1/queues/q/schedules/{}", {"cron": "0 3 * * *", "message": {}}),
    ("GET", "/v1/entities/{}/a", None),
    ("PATCH", "/v1/entities/a/{}", {"fields": {"a": 1}}),
    ("GET", "/v1/blobs/{}", None),
    ("GET", "/v1/worlds?universe={}", None),
    ("POST", "/v1/blobs?universe={}", b"x" * 20_000),
    ("GET", "/v1/activity?session={}", None),
    ("GET", "/v1/activity?universe={}", None),
    ("GET", "/v1/activity/files?universe={}", None),
    ("GET", "/v1/activity?after={}:%c2%b2", None),
    ("GET", "/v1/queue/watch?queue={}", None),
]


def files_of(folder: Path) -> set[str]:
    """All files and folders except those of the key space, which change."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {path for path in found if not path.startswith("data/kv/")}


def test_hostile_names_in_paths_and_queries_are_refused(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(header_bytes_max=65_536)
    request(server, "POST", "/v1/activity", {"session": "s", "records": [{"a": 1}]})
    request(server, "POST", "/v1/activity/end", {"session": "s"})
    request(server, "POST", "/v1/blobs", b"x" * 20_000)
    before = files_of(tmp_path)
    for trick in TRICKS:
        for method, path, body in NAME_PATHS:
            status, problem = request(server, method, path.format(trick), body)
            if status == 200 and "session=" in path:
                assert problem == {"records": [], "next": None}  # Such a session has no records.
                continue
            assert 400 <= status < 500, (method, path, trick, status)
            assert problem["code"] in ("invalid_name", "invalid_argument", "not_found", "method_not_allowed"), problem
    assert files_of(tmp_path) == before
    assert '"level":"error"' not in server.log()
    assert server.logged("refused:", "400")
    assert request(server, "GET", "/v1/worlds") == (200, {"names": []})


BODIES: list[tuple[str, Callable[[str], Any]]] = [
    ("/v1/queue/enqueue", lambda name: {"queue": name, "payload": 1}),
    ("/v1/queue/enqueue", lambda name: {"queue": "q", "payload": 1, "universe": name}),
    ("/v1/queue/enqueue", lambda name: {"queue": "q", "payload": 1, "namespace": name}),
    ("/v1/queue/enqueue", lambda name: {"queue": "q", "payload": 1, "group": name}),
    ("/v1/queue/enqueue", lambda name: {"queue": "q", "payload_blob": name}),
    ("/v1/queue/dequeue", lambda name: {"queue": name, "owner": "a", "wait_seconds": -1}),
    ("/v1/queue/subscribe", lambda name: {"queue": name, "owner": "a", "wait_seconds": -1}),
    ("/v1/lease/acquire", lambda name: {"key": name, "owner": "a"}),
    ("/v1/lease/release", lambda name: {"key": name, "lease_id": "a", "fence": 1}),
    ("/v1/lease/release", lambda name: {"key": "a", "lease_id": "a", "fence": 1, "universe": name}),
    ("/v1/state/update", lambda name: {"key": name, "value": 1}),
    ("/v1/activity", lambda name: {"session": name, "records": [{}]}),
    ("/v1/activity", lambda name: {"session": "s", "kind": name, "records": [{}]}),
    ("/v1/activity", lambda name: {"session": "s", "records": [{}], "universe": name}),
    ("/v1/worlds", lambda name: {"world": name}),
    ("/v1/worlds", lambda name: {"world": "w", "universe": name}),
    ("/v1/call", lambda name: {"op": "blobs.put", "data": "YQ==", "universe": name}),
    ("/v1/call", lambda name: {"op": "blobs.get", "hash": name}),
    ("/v1/atomic", lambda name: [{"op": "states.update", "key": name, "value": 1}]),
]
NAMES = [
    "",
    "../x",
    "..\\x",
    "/etc/passwd",
    "a\x00b",
    "a\nb",
    "a b",
    "\u202e",
    "\uff0e\uff0e\uff0fx",
    "x" * 256,
    "x/" * 9,
]


def test_hostile_names_in_bodies_are_refused(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start()
    request(server, "POST", "/v1/activity", {"session": "s", "records": [{"a": 1}]})
    request(server, "POST", "/v1/activity/end", {"session": "s"})
    before = files_of(tmp_path)
    keys = ("/v1/lease/", "/v1/state/", "/v1/atomic")  # Their names may have slashes and dots.
    for name in NAMES:
        for path, body in BODIES:
            if name in ("../x",) and path.startswith(keys):
                continue
            status, problem = request(server, "POST", path, body(name))
            assert 400 <= status < 500, (path, body(name), status, problem)
            assert problem["code"], problem
    assert files_of(tmp_path) == before
    assert '"level":"error"' not in server.log()


def test_dots_as_a_universe_write_no_files_outside_the_data_directory(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    for universe in (".", "..", "..."):
        request(server, "POST", f"/v1/blobs?universe={universe}", b"x" * 20_000)
        request(server, "POST", f"/v1/activity?universe={universe}", {"session": universe, "records": [{"a": 1}]})
        request(server, "POST", f"/v1/activity/end?universe={universe}", {"session": universe})
    assert {path.name for path in tmp_path.iterdir()} == {"data", "server.log"}
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {
        "kv",
        "objects",
        "activity",
        "fastness.json",
        "LOCK",
    }


# Contradictory requests.


def test_an_ambiguous_or_empty_universe_is_refused(server: Server) -> None:
    request(server, "PUT", "/v1/state/k", "main")
    for path, body, headers in (
        ("/v1/state/get?universe=", {"key": "k"}, {}),
        ("/v1/state/get?universe=a&universe=main", {"key": "k"}, {}),
        ("/v1/state/get", {"key": "k", "universe": ""}, {}),
        ("/v1/state/get", {"key": "k"}, {"X-Fastness-Universe": ""}),
        ("/v1/state/get?universe=main", {"key": "k"}, {"X-Fastness-Universe": "../x"}),
        ("/v1/queue/stats", {"queue": "q", "namespace": ""}, {}),
        ("/v1/queue/stats", {"queue": "q", "namespace": "a", "universe": "b"}, {}),
        ("/v1/queue/enqueue?unknown=1", {"queue": "q", "payload": 1}, {}),
    ):
        status, problem = request(server, "POST", path, body, **headers)
        assert (status, problem["code"] in ("invalid_name", "invalid_query", "invalid_body")) == (400, True), path


def test_contradicting_headers_and_bodies_are_refused(server: Server) -> None:
    written = request(server, "PUT", "/v1/entities/task/t", {"fields": {"status": 1}, "expected_version": 0})
    assert written[0] == 200
    for body, headers in (
        ({"expected_version": 5}, {"If-Match": '"1"'}),
        ({"expected_version": 1}, {"If-None-Match": "*"}),
    ):
        status, problem = request(server, "PUT", "/v1/entities/task/t", {"fields": {"status": 2}, **body}, **headers)
        assert (status, problem["code"]) == (400, "invalid_etag")
    for name in ("X-Fence", "X-Txn-Id"):
        status, problem = request(server, "PUT", "/v1/state/k", 1, **{name: "1"})
        assert (status, problem["code"]) == (400, "invalid_argument")


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_an_invalid_subscription_gets_an_error_status_instead_of_an_event(server: Server, key: str) -> None:
    right = {"queue": "q", "owner": "ada", "wait_seconds": -1}
    for path in ("/v1/queue/subscribe", "/v1/queue/subscribeWithState"):
        assert request(server, "POST", path, right | {"queue": "no such name"})[0] == 400
        assert request(server, "POST", path, right | {"tier": "best_effort"})[0] == 400
        assert request(server, "POST", path, right, Idempotency_Key=key)[1]["code"] == "invalid_idempotency_key"
        assert request(server, "POST", path, right)[0] == 200


def test_integers_over_64_bits_are_refused_outside_values(server: Server) -> None:
    request(server, "POST", "/v1/worlds", {"world": "w"})
    status, problem = request(
        server, "POST", "/v1/worlds/w/fork", {"target": "v", "height": 1 << 70}, Idempotency_Key="k"
    )
    assert (status, problem["code"]) == (400, "invalid_body")
    entries = {"entries": [1.0, 1 << 70], "expected_head": 0.0}
    assert request(server, "POST", "/v1/worlds/w/entries", entries)[0] == 201
    records = request(server, "GET", "/v1/worlds/w/entries")[1]["records"]
    assert [record["value"] for record in records] == [1.0, 1 << 70]  # Values are any JSON.
    assert request(server, "POST", "/v1/worlds/w/entries", entries | {"expected_head": 2.5})[0] == 400


# Tokens and other universes.


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """A server with tokens of two tenants, and data of every kind in the universe of the second."""
    folder = tmp_path_factory.mktemp("guarded")
    with fastness.open(f"dir:{folder / 'data'}", universe="beta") as plane:
        plane.queue("jobs").put({"secret": "beta"})
        plane.state("doc").update({"secret": "beta"})
        plane.world("w").create()
        plane.world("w").append([{"secret": "beta"}], expected_head=0)
        plane.entities.update("task", "t", lambda _: {"status": "secret of beta"})
        plane.blobs.put(b"secret of beta" * 10_000)
        make = plane.tokens.create
        tokens = {name: make(name, universes=name, verbs="*").token for name in ("alpha", "beta")}
    server = Server(folder, tokens=True)
    try:
        yield server, tokens
    finally:
        server.kill()


@pytest.fixture
def tenants(guarded: tuple[Any, dict[str, str]]) -> tuple[Any, dict[str, str]]:
    guarded[0].forget_log()
    return guarded


def beta_state(server: Server, token: str) -> Any:
    with server.plane(token, "beta") as plane:
        return (
            plane.queue("jobs").stats().ready,
            plane.state("doc").get().value,
            plane.world("w").head(),
            plane.entities.get("task", "t").fields,
            plane.queues(),
        )


WRONG_TOKENS = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Basic YTpi",
    "Bearer fnt_",
    "Bearer fnt_00000000000000000000000000000000_x",
    "Bearer {}x",
    "Bearer {} {}",
    "Bearer x{}",
    "Bearer " + "a" * 20_000,
    "Bearer \xff\xfe",
]


def test_a_wrong_token_is_refused_everywhere(tenants: tuple[Any, dict[str, str]]) -> None:
    server, tokens = tenants
    secret = tokens["beta"]
    stream = server.url.replace("http", "ws", 1) + "/v1/stream"
    for header in WRONG_TOKENS:
        headers = {} if header is None else {"Authorization": header.replace("{}", secret)}
        for method, path, body in (
            ("GET", "/v1/queues", None),
            ("POST", "/v1/call", {"op": "queues.list"}),
            ("POST", "/v1/queue/enqueue", {"queue": "jobs", "payload": 1}),
            ("POST", "/v1/blobs", b"x"),
            ("GET", "/v1/queue/watch?queue=jobs", None),
        ):
            status, problem = request(server, method, path, body, **headers)
            assert (status, problem["code"]) == (401, "not_allowed"), (path, header, problem)
        with pytest.raises(InvalidStatus, match=r"40[03]"), connect_stream(stream, additional_headers=headers):
            pass
    until_logged(server, lambda: server.get("/v1/queues", token="x"), "refused", '"reason":"token"')
    assert secret.rpartition("_")[2] not in server.log()


def test_a_token_cannot_read_or_change_another_universe(tenants: tuple[Any, dict[str, str]]) -> None:
    server, tokens = tenants
    before = beta_state(server, tokens["beta"])
    mine = {"Authorization": f"Bearer {tokens['alpha']}"}
    lease = {"key": "doc", "lease_id": "a", "fence": 1, "universe": "beta"}
    blob = hashlib.sha256(b"secret of beta" * 10_000).hexdigest()
    forbidden: list[tuple[str, str, Any, dict[str, str]]] = [
        ("GET", "/v1/queues?universe=beta", None, {}),
        ("GET", "/v1/queues?universe=BETA", None, {}),
        ("GET", "/v1/queues?universe=%62eta", None, {}),
        ("GET", "/v1/queues", None, {"X-Fastness-Universe": "beta"}),
        ("GET", "/v1/queues", None, {}),  # Of main, which alpha may not read either.
        ("GET", "/v1/queues/jobs/peek?universe=beta", None, {}),
        ("POST", "/v1/queue/enqueue", {"queue": "jobs", "payload": 1, "universe": "beta"}, {}),
        ("POST", "/v1/queue/enqueue", {"queue": "jobs", "payload": 1, "namespace": "beta"}, {}),
        ("POST", "/v1/queue/enqueue?universe=alpha", {"queue": "jobs", "payload": 1, "namespace": "beta"}, {}),
        ("POST", "/v1/queue/dequeue", {"queue": "jobs", "owner": "x", "namespace": "beta"}, {}),
        ("POST", "/v1/queue/subscribe", {"queue": "jobs", "owner": "x", "namespace": "beta"}, {}),
        ("GET", "/v1/queue/watch?queue=jobs&namespace=beta", None, {}),
        ("POST", "/v1/queues/jobs/purge?universe=beta", None, {}),
        ("POST", "/v1/queues/jobs/purge?universe=alpha", {"universe": "beta"}, {}),
        ("PUT", "/v1/state/doc?universe=beta", 1, {}),
        ("PUT", "/v1/state/doc", 1, {"X-Fastness-Universe": "beta"}),
        ("DELETE", "/v1/state/doc?universe=beta", None, {}),
        ("POST", "/v1/state/update?universe=alpha", {"key": "doc", "value": 1, "universe": "beta"}, {}),
        ("POST", "/v1/state/update?universe=alpha", {"key": "doc", "value": 1, "lease": lease}, {}),
        ("POST", "/v1/lease/check?universe=alpha", lease, {}),
        ("POST", "/v1/lease/release", {"lease": lease}, {}),
        ("POST", "/v1/worlds/w/entries?universe=beta", {"entries": [1], "expected_head": 1}, {}),
        ("POST", "/v1/worlds/w/fork?universe=beta", {"target": "v", "height": 1}, {}),
        ("DELETE", "/v1/entities/task/t?universe=beta", None, {}),
        ("GET", f"/v1/blobs/{blob}?universe=beta", None, {}),
        ("POST", "/v1/blobs?universe=beta", b"x", {}),
        ("GET", "/v1/activity?universe=beta", None, {}),
        ("POST", "/v1/call?universe=alpha", {"op": "queues.list", "universe": "beta"}, {}),
        ("POST", "/v1/call?universe=alpha", {"op": "pairs.scan", "begin": "", "end": "/w=="}, {}),
        ("POST", "/v1/call?universe=alpha", {"op": "tokens.list"}, {}),
        (
            "POST",
            "/v1/atomic?universe=alpha",
            [
                {"op": "states.update", "key": "a", "value": 1},
                {"op": "states.update", "key": "doc", "value": 1, "universe": "beta"},
            ],
            {},
        ),
    ]
    for method, path, body, headers in forbidden:
        status, problem = request(server, method, path, body, **mine, **headers)
        assert (status, problem["code"]) == (403, "not_allowed"), (method, path, body, status, problem)
        assert "secret" not in json.dumps(problem)
    # In its own universe these names do not exist.
    for method, path, body in (
        ("GET", f"/v1/blobs/{blob}?universe=alpha", None),
        ("POST", "/v1/queue/enqueue?universe=alpha", {"queue": "jobs", "payload_blob": blob}),
        ("GET", "/v1/worlds/w?universe=alpha", None),
        ("GET", "/v1/state/doc?universe=alpha", None),
        ("GET", "/v1/entities/task/t?universe=alpha", None),
    ):
        assert request(server, method, path, body, **mine)[0] == 404, path
    assert request(server, "GET", "/v1/queues?universe=alpha", **mine) == (200, {"names": []})
    assert beta_state(server, tokens["beta"]) == before

    def read_beta() -> None:
        request(server, "GET", "/v1/queues?universe=beta", **mine)

    until_logged(server, read_beta, "refused", '"code":"not_allowed"', "beta")


@contextmanager
def stream_of(server: Server, token: str | None = None, session: str = "s") -> Iterator[Connection]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = server.url.replace("http", "ws", 1) + "/v1/stream"
    with connect_stream(url, compression=None, additional_headers=headers, max_size=None) as stream:
        stream.send(encode(Hello(PROTOCOL, session)))
        stream.recv(SECONDS_MAX)
        yield stream


def replies(stream: Connection, count: int) -> dict[int, Any]:
    found: dict[int, Any] = {}
    while len(found) < count:
        for number, *rest in msgspec.msgpack.decode(stream.recv(SECONDS_MAX, decode=False)):
            found[number] = rest
    return found


def test_a_stream_cannot_read_or_change_another_universe(tenants: tuple[Any, dict[str, str]]) -> None:
    server, tokens = tenants
    before = beta_state(server, tokens["beta"])
    proof = LeaseProof("doc", "a", 1, universe="beta")
    requests: list[Request[Any]] = [
        ListQueues(universe="beta"),
        ListQueues(universe="Beta"),
        ListQueues(),
        PeekMessages("jobs", universe="beta"),
        ReceiveMessages("jobs", "x", universe="beta"),
        PutMessages("jobs", [NewMessage(b"1")], universe="beta"),
        PurgeQueue("jobs", universe="beta"),
        GetState("doc", universe="beta"),
        UpdateState("doc", b"\x01", universe="beta"),
        UpdateState("doc", b"\x01", lease=proof, universe="alpha"),
        CheckLease(proof),
        AcquireLease("doc", "x", universe="beta"),
        ListLeases(universe="beta"),
        ListWorlds(universe="beta"),
        ReadJournal("w", 0, universe="beta"),
        AppendEntries("w", [b"\x01"], 1, universe="beta"),
        GetEntity("task", "t", universe="beta"),
        PutEntity("task", "t", {"status": b"\x01"}, 1, universe="beta"),
        FindBlob("0" * 64, universe="beta"),
        GetBlob("0" * 64, universe="beta"),
    ]
    with stream_of(server, tokens["alpha"]) as stream:
        stream.send(encode([Call(number, request) for number, request in enumerate(requests)]))
        for number, rest in replies(stream, len(requests)).items():
            assert rest[0] is None, requests[number]
            assert rest[1]["code"] == "not_allowed", requests[number]
    assert beta_state(server, tokens["beta"]) == before


def test_tenants_with_the_same_session_and_keys_are_isolated(tenants: tuple[Any, dict[str, str]]) -> None:
    server, tokens = tenants
    with stream_of(server, tokens["alpha"], "same") as alpha, stream_of(server, tokens["beta"], "same") as beta:
        for stream, universe in ((alpha, "alpha"), (beta, "beta")):
            put = PutMessages("jobs", [NewMessage(universe.encode())], universe=universe)
            stream.send(encode([Call(0, put, "the same key", True)]))
            assert replies(stream, 1)[0][1] is None
        alpha.send(encode([Call(1, PeekMessages("jobs", universe="alpha"))]))
        assert [each["payload"] for each in replies(alpha, 1)[1][0]["messages"]] == [b"alpha"]


# Frames.


def frames(chance: random.Random) -> Iterator[bytes]:
    good = encode([Call(number, PutMessages("q", [NewMessage(b"x" * 100)]), f"k{number}") for number in range(5)])
    for _ in range(150):
        yield chance.randbytes(chance.randrange(1, 2_000))
        yield good[: chance.randrange(1, len(good))]
        position = chance.randrange(len(good))
        yield good[:position] + chance.randbytes(3) + good[position + 1 :]
    for opening in (b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\x91\x94\x00\x81\xa2op"):
        yield opening * (FRAME_BYTES_MAX // len(opening) - 1)
    for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"):
        yield head + b"\xff" * 4
        yield b"\x91\x94\x00" + head + b"\xff" * 4
        yield head + b"\xff" * 4 + bytes(FRAME_BYTES_MAX - 8)
    yield b"\xdc\xff\xff" + b"\xc0" * 65_535
    yield b"\xdd\x00\x3f\xff\xf0" + b"\x00" * 0x3FFFF0  # Four million cancellations.
    yield bytes(FRAME_BYTES_MAX)


@pytest.mark.rotating
def test_fuzzed_frames_are_logged_and_leak_no_memory(server: Server) -> None:
    print(f"seed {SEED}")
    with stream_of(server) as stream:  # Allocates what any stream needs.
        stream.send(encode([Call(0, PutMessages("q", [NewMessage(b"x")]))]))
        replies(stream, 1)
    before = server.resident_bytes
    for frame in frames(random.Random(SEED)):
        with stream_of(server) as stream, suppress(ConnectionClosed, TimeoutError):
            stream.send(frame)
            stream.recv(0.05)
    grown = server.resident_bytes - before
    print(f"grown by {grown / MIB:.1f} MiB")
    assert grown < 64 * MIB
    assert server.logged("could not be decoded")
    assert '"level":"error"' not in server.log()
    assert server.get("/readyz")[0] == 200


@pytest.mark.parametrize("frames", [[[7, 7]], [[7], [7]], [[7], [8, 9, 7]]], ids=str)
def test_two_calls_with_one_number_close_the_connection(server: Server, frames: list[list[int]]) -> None:
    """Otherwise only one of them could be cancelled, and the other would wait for a disconnected caller."""
    with stream_of(server) as stream, pytest.raises(ConnectionClosed) as closed:
        for frame in frames:
            stream.send(encode([Call(number, ReceiveMessages("numbers", "ada", wait_seconds=600)) for number in frame]))
        stream.recv(SECONDS_MAX)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1002
    assert server.logged("reuses the number of a call in flight")
    with server.plane() as plane:
        eventually(
            lambda: plane.queue("numbers").stats().waiting_consumers == 0,
            "a call still waits for a disconnected caller",
        )
        plane.queue("numbers").put(b"1")
        with plane.queue("numbers").receive() as message:
            assert message.payload == b"1"


def masked(opcode: Opcode, *, last: bool = True) -> bytes:
    return Frame(opcode, b"", fin=last).serialize(mask=True)


FLOODS = {  # The first frame, those that follow, and the one that ends a message.
    "fragments": (masked(Opcode.TEXT, last=False), masked(Opcode.CONT, last=False), masked(Opcode.CONT)),
    "pings": (masked(Opcode.PING), masked(Opcode.PING), masked(Opcode.TEXT)),
    "pongs": (masked(Opcode.PONG), masked(Opcode.PONG), masked(Opcode.TEXT)),
}


def close_reason(server: Server, path: str, frames: bytes) -> str:
    """Why the server closes a connection that sends these frames, and nothing else."""
    url = server.url.replace("http", "ws", 1) + path
    with connect_stream(url, compression=None, proxy=None, ping_interval=None) as connection:
        connection.socket.sendall(frames)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                connection.recv(SECONDS_MAX)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == CloseCode.PROTOCOL_ERROR
        return closed.value.rcvd.reason


def test_frames_without_a_message_are_bounded_before_anyone_is_authenticated(server: Server) -> None:
    """Up to the bound, the endpoint gets the message, which is empty, and refuses it itself."""
    failures = Failures()
    for path in ("/v1/relay", "/v1/stream"):
        for kind, (first, middle, last) in FLOODS.items():
            with failures.of((path, kind)):
                most = first + middle * (WEBSOCKET_FRAMES_MAX - 2)
                reasons = [close_reason(server, path, frames) for frames in (most + last, most + middle + last)]
                assert ["without a message" in reason for reason in reasons] == [False, True], reasons
    failures.check()
