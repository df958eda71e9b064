"""The body limit of a token applies to every kind of body; a refused body leaves nothing stored."""

import hashlib
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.errors import PayloadTooLarge
from tests.support.server_process import Server

MOST = 1_000_000  # More than a server reads at once, so that it must add up chunks.
JSON = "application/json"
PARTS = "multipart/form-data; boundary=b0"
OCTETS = "application/octet-stream"


class BoundedServer:
    """A server with two tokens: one for everything, one for bodies of up to MOST bytes."""

    def __init__(self, folder: Path) -> None:
        with fastness.open(f"dir:{folder / 'data'}") as plane:
            self.admin = plane.tokens.create("admin", universes="*", verbs="*").token
            self.small = plane.tokens.create("small", universes="*", verbs="*", body_bytes_max=MOST).token
        self.server: Any = Server(folder, tokens=True)
        self.objects = folder / "data" / "objects"

    def send(self, where: str, body: bytes, kind: str, *, chunked: bool) -> tuple[int, Any]:
        host, port = self.server.address
        connection = http.client.HTTPConnection(host, port, timeout=60)
        method, path = where.split()
        chunks: Any = (body[at : at + 30_000] for at in range(0, len(body), 30_000)) if chunked else body
        headers = {"Authorization": f"Bearer {self.small}", "Content-Type": kind}
        try:
            connection.request(method, path, chunks, headers, encode_chunked=chunked)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def stored(self) -> list[str]:
        """The hashes of the stored blobs."""
        return [
            path.name.partition(".")[0] for path in self.objects.rglob("*") if path.is_file() and "cas" in path.parts
        ]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundedServer]:
    found = BoundedServer(tmp_path_factory.mktemp("bounded"))
    yield found
    found.server.kill()


def multipart(payload: bytes, epilogue: bytes = b"") -> bytes:
    return (
        b'--b0\r\nContent-Disposition: form-data; name="meta"\r\n\r\n{"queue": "jobs"}\r\n'
        b'--b0\r\nContent-Disposition: form-data; name="payload"\r\n\r\n' + payload + b"\r\n--b0--\r\n" + epilogue
    )


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("where", "kind", "body"),
    [
        ("PUT /v1/blobs", OCTETS, os.urandom(MOST + 1)),
        ("POST /v1/blobs", OCTETS, os.urandom(3_000_000)),
        ("POST /v1/queue/enqueue", PARTS, multipart(os.urandom(MOST))),
        ("POST /v1/queue/enqueue", PARTS, multipart(os.urandom(4_000_000))),
        ("POST /v1/queue/enqueue", PARTS, multipart(os.urandom(50_000), b" " * MOST)),
        ("POST /v1/queue/enqueue", PARTS, multipart(b"small", b" " * MOST)),
        ("POST /v1/queue/enqueue", JSON, json.dumps({"queue": "jobs", "payload": "x" * MOST}).encode()),
        ("PUT /v1/state/k", JSON, json.dumps("x" * MOST).encode()),
        ("POST /v1/call", JSON, json.dumps({"op": "queues.list", "after": "x" * MOST}).encode()),
    ],
    ids=["blob-one-too-many", "blob", "parts-too-many", "parts", "epilogue", "small-epilogue", "json", "state", "call"],
)
def test_a_body_over_the_limit_of_the_token_is_refused_and_not_stored(
    bounded: BoundedServer, where: str, kind: str, body: bytes, chunked: bool
) -> None:
    before = bounded.stored()
    status, problem = bounded.send(where, body, kind, chunked=chunked)
    assert (status, problem["code"]) == (413, "payload_too_large"), problem
    assert f"allows {MOST}" in problem["detail"]
    assert bounded.stored() == before
    with bounded.server.plane(bounded.admin) as plane:
        assert plane.queue("jobs").stats().put_total == 0
        assert not plane.blobs.has(hashlib.sha256(body).hexdigest())
        assert plane.state("k").get() is None
    assert bounded.server.logged("refused", '"code":"payload_too_large"', problem["correlation_id"])


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_within_the_limit_is_accepted(bounded: BoundedServer, chunked: bool) -> None:
    body = os.urandom(MOST)
    status, stored = bounded.send("POST /v1/blobs", body, OCTETS, chunked=chunked)
    assert (status, stored["size"]) == (201, MOST)
    payload = os.urandom(MOST - 1_000)
    part = multipart(payload).replace(b'"jobs"', b'"fits"')
    assert bounded.send("POST /v1/queue/enqueue", part, PARTS, chunked=chunked)[0] == 200
    assert hashlib.sha256(payload).hexdigest() in bounded.stored()


@pytest.mark.parametrize("size", [MOST + 1, 20_000_000])
def test_a_client_raises_payload_too_large(bounded: BoundedServer, size: int) -> None:
    data = os.urandom(size)
    with bounded.server.plane(bounded.small, patience_seconds=2) as plane:
        sendings: list[Callable[[], object]] = [
            lambda: plane.blobs.put(data),
            lambda: plane.blobs.write(data[at : at + 50_000] for at in range(0, size, 50_000)),
            lambda: plane.queue("jobs").put(data),
            lambda: plane.activity.log("s", {"text": "x" * MOST}),
        ]
        for sending in sendings:
            with pytest.raises(PayloadTooLarge, match=f"allows {MOST}"):
                sending()
        assert not plane.blobs.has(hashlib.sha256(data).hexdigest())


def test_a_sender_that_reads_late_still_gets_the_error_response(bounded: BoundedServer) -> None:
    """Closing a connection in the middle of a body would reset it and lose the response."""
    size = 12_000_000
    with socket.create_connection(bounded.server.address, 20) as connection:
        head = f"POST /v1/blobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bounded.small}\r\nContent-Length: {size}"
        connection.sendall(f"{head}\r\n\r\n".encode())
        connection.sendall(bytes(size))
        held = b""
        while chunk := connection.recv(65_536):
            held += chunk
    assert held.startswith(b"HTTP/1.1 413")
    assert b"payload_too_large" in held
    assert b"connection: close" in held.lower()


def test_rejected_bodies_are_counted_in_the_metrics(bounded: BoundedServer) -> None:
    bounded.send("POST /v1/blobs", bytes(MOST + 1), OCTETS, chunked=True)
    text = bounded.server.get("/metrics", token=bounded.admin)[2]
    assert b'fastness_rejects_total{reason="payload_too_large"}' in text
