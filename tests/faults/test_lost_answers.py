"""The answer to a call is lost with its connection: the client sends it again, and it has happened once."""

import asyncio
import runpy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_sync

import holdfast
from holdfast import Plane
from holdfast.client import connection, streaming
from holdfast.errors import Busy, CommitUnknown, HoldfastError, InvalidArgument, NotAllowed, Unreachable, Unsupported
from holdfast.wire.frames import PROTOCOL, Hello, Reply, decode_calls, encode
from holdfast.wire.problems import problem_of
from holdfast.wire.queues import NewMessage, PutMessages

serving = runpy.run_path(str(Path(__file__).parents[1] / "end_to_end" / "serving.py"))["serving"]
Proxy = runpy.run_path(str(Path(__file__).with_name("proxy.py")))["Proxy"]
DEADLINE_SECONDS = 60.0


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


class Line:
    """A client whose answers can get lost, and one beside it that looks."""

    def __init__(self, proxy: Any, client: Plane, beside: Plane, threads: ThreadPoolExecutor) -> None:
        self.client = client
        self.beside = beside
        self._proxy = proxy
        self._threads = threads

    def lose(self, work: Callable[[], Any], happened: Callable[[], Any], *, for_good: bool = False) -> Any:
        """What `work` returns, whose first answer is lost after it has happened; and all others, if `for_good`."""
        until(self._is_connected)
        self._proxy.mutes = True
        waiting: Future[Any] = self._threads.submit(work)
        until(lambda: waiting.done() or happened())
        assert not waiting.done()
        self._proxy.refuses = for_good
        self._proxy.cut_all()
        return waiting.result(DEADLINE_SECONDS)

    def _is_connected(self) -> bool:
        with suppress(Unreachable):  # An impatient client does not wait for a server that is slow to let it in.
            self.client.queues()
            return True
        return False


@contextmanager
def line_to(url: str, patience_seconds: float = DEADLINE_SECONDS) -> Iterator[Line]:
    with (
        serving(url) as server,
        Proxy(server.port) as proxy,
        holdfast.connect(proxy.url, patience_seconds=patience_seconds) as client,
        holdfast.connect(server.url) as beside,
        ThreadPoolExecutor(2) as threads,
    ):
        yield Line(proxy, client, beside, threads)


@pytest.fixture
def line(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Line]:
    """On every backend."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # Where session logs are beside a PostgreSQL.
    if backend == "postgres":
        url = request.getfixturevalue("postgres_url")
    else:
        url = "memory:" if backend == "memory" else f"dir:{tmp_path}"
    with line_to(url) as line:
        yield line


def test_messages_whose_delivery_was_lost_are_delivered_again(line: Line) -> None:
    """They would be nobody's until their leases end, and count as failed then."""
    jobs, beside = line.client.queue("jobs"), line.beside.queue("jobs")
    beside.put_many(range(5))
    found = line.lose(lambda: jobs.receive_many(3, extend_for_seconds=0), lambda: beside.stats().leased)
    assert [message.json() for message in found] == [0, 1, 2]
    for message in found:
        message.ack()
    stats = beside.stats()
    assert (stats.acked_total, stats.ready, stats.leased, stats.failed_total) == (3, 2, 0, 0)


def test_a_message_that_was_waited_for_is_delivered_again(line: Line) -> None:
    jobs, beside = line.client.queue("jobs"), line.beside.queue("jobs")

    def wait() -> Any:
        return jobs.receive(wait_seconds=DEADLINE_SECONDS, extend_for_seconds=0)

    def put_and_see() -> bool:
        if beside.stats().waiting_consumers and not beside.stats().put_total:
            beside.put("late")
        return beside.stats().leased == 1

    message = line.lose(wait, put_and_see)
    assert message.json() == "late"
    message.ack()
    stats = beside.stats()
    assert (stats.acked_total, stats.ready, stats.leased, stats.failed_total) == (1, 0, 0, 0)


def test_a_lease_whose_grant_was_lost_is_the_same_lease(line: Line) -> None:
    granted = line.lose(
        lambda: line.client.lease("deploy").acquire("ada", ttl_seconds=600),
        lambda: line.beside.lease("deploy").describe().held,
    )
    assert granted.fence == 1
    assert line.beside.lease("deploy").describe().lease.fence == 1
    assert granted.release()


def test_writes_of_more_than_a_commit_happen_once(line: Line) -> None:
    """Each of them would count twice, or be refused by what it has done itself."""
    client, beside = line.client, line.beside
    entities = beside.entities
    written = line.lose(
        lambda: client.entities.put_if_version("task", "one", {"n": 1}, expected_version=0),
        lambda: entities.get("task", "one"),
    )
    assert written.versions == [1]
    assert line.lose(lambda: client.entities.delete("task", "one"), lambda: not entities.get("task", "one"))
    assert [change.deleted for change in entities.history("task", "one")] == [False, True]

    def died() -> int:
        return beside.queue("jobs").stats().dead

    beside.queue("jobs").put_many(range(4))
    for message in beside.queue("jobs").receive_many(4, extend_for_seconds=0):
        message.reject()
    assert line.lose(lambda: client.queue("jobs").redrive(limit=2), lambda: died() == 2) == 2
    assert died() == 2
    beside.world("w").create()
    beside.world("w").append(["a", "b"], expected_head=0)
    copy = line.lose(lambda: client.world("w").fork("copy", height=2), lambda: "copy" in beside.worlds())
    assert (copy.name, beside.world("copy").head()) == ("copy", 2)
    line.lose(lambda: client.activity.log("s", {"n": 1}), lambda: beside.activity.read(session="s").records)
    assert len(beside.activity.read(session="s").records) == 1


def test_nobody_is_told_that_a_write_has_not_happened_that_may_have() -> None:
    with line_to("memory:", patience_seconds=0.3) as line:
        jobs = line.client.queue("jobs")
        with pytest.raises(CommitUnknown, match="PutMessages"):
            line.lose(lambda: jobs.put("a"), lambda: line.beside.queue("jobs").stats().ready, for_good=True)
        with pytest.raises(Unreachable):
            jobs.put("b")  # It was never sent.
        with pytest.raises(Unreachable):
            jobs.stats()
        assert line.beside.queue("jobs").stats().put_total == 1


@pytest.mark.parametrize("messages", [[b"x"], [bytes(16_384)] * 256], ids=["in a frame", "too long for one"])
def test_a_key_that_nobody_remembers_is_not_relied_on(monkeypatch: pytest.MonkeyPatch, messages: list[bytes]) -> None:
    """Servers remember keys for ten minutes. A client that is more patient than that does not send a write again."""
    for module in (connection, streaming):
        monkeypatch.setattr(module, "_KEYS_SECONDS", -1.0)
    with line_to("memory:") as line:
        jobs = line.client.queue("jobs")
        with pytest.raises(CommitUnknown, match="PutMessages"):
            line.lose(lambda: jobs.put_many(messages), lambda: line.beside.queue("jobs").stats().ready)
        assert line.beside.queue("jobs").stats().put_total == len(messages)


@contextmanager
def ending(*, with_code: int | None = None, answer: object = None) -> Iterator[str]:
    """A server that takes a frame of calls and ends the connection with a code, or answers what nobody understands."""

    def serve(socket: ServerConnection) -> None:
        socket.recv()
        socket.send(encode(Hello(PROTOCOL, "", 16)))
        calls = decode_calls(socket.recv())
        if with_code is None:
            socket.send(encode([Reply(call.number, answer) for call in calls]))
            with suppress(ConnectionClosed):
                socket.recv()
        else:
            socket.close(with_code, "for a reason")

    with serve_sync(serve, "127.0.0.1", 0) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("ends", "plain"),
    [
        ({"with_code": 4_003}, NotAllowed),  # The token was revoked.
        ({"with_code": 1_002}, Unsupported),  # One of the calls was not understood, nobody knows which.
        ({"answer": 42}, Unsupported),
    ],
)
async def test_what_was_sent_and_is_not_answered_any_more_is_unknown_and_what_only_reads_is_not(
    ends: dict[str, Any], plain: type[HoldfastError]
) -> None:
    with ending(**ends) as url:
        async with holdfast.connect_async(url, patience_seconds=DEADLINE_SECONDS) as plane:
            jobs = plane.queue("jobs")
            outcomes = await asyncio.gather(
                jobs.put(b"1"), plane.state("a").update(1), jobs.stats(), jobs.receive(), return_exceptions=True
            )
    assert [type(outcome) for outcome in outcomes] == [CommitUnknown, CommitUnknown, plain, plain]
    assert "look whether it happened" in str(outcomes[0])


def test_a_put_that_happened_while_its_client_was_closed_is_no_refusal(tmp_path: Path) -> None:
    """Closed would say that it may be done again."""
    with line_to(f"dir:{tmp_path}") as line:
        until(line._is_connected)
        line._proxy.mutes = True
        putting = line._threads.submit(line.client.queue("jobs").put, b"1")
        until(lambda: putting.done() or line.beside.queue("jobs").stats().ready)
        line.client.close()
        with pytest.raises(CommitUnknown, match="closed"):
            putting.result(DEADLINE_SECONDS)


@pytest.mark.parametrize("refusal", [Busy("too often"), NotAllowed("no more"), InvalidArgument("no such queue")])
async def test_a_refusal_of_the_second_sending_tells_nothing_of_the_first(refusal: HoldfastError) -> None:
    """A server that counts how often somebody calls does so before it looks whether the call was carried out."""
    connections: list[int] = []

    def serve(socket: ServerConnection) -> None:
        socket.recv()
        socket.send(encode(Hello(PROTOCOL, "", 16)))
        connections.append(1)
        for frame in socket:
            if len(connections) == 1:
                return  # It was carried out, and the connection ends.
            problem = problem_of(refusal, "")
            socket.send(encode([Reply(call.number, None, problem) for call in decode_calls(frame)]))

    with serve_sync(serve, "127.0.0.1", 0) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        try:
            async with holdfast.connect_async(url, patience_seconds=DEADLINE_SECONDS) as plane:
                with pytest.raises(InvalidArgument if isinstance(refusal, InvalidArgument) else CommitUnknown):
                    await plane.queue("jobs").put(b"1")
                with pytest.raises(type(refusal)):  # What is sent for the first time was not carried out.
                    await plane.queue("jobs").put(b"2")
        finally:
            server.shutdown()


def test_a_refusal_of_the_second_sending_of_a_long_call_tells_nothing_of_the_first() -> None:
    class Refusing(BaseHTTPRequestHandler):
        sendings = 0

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            Refusing.sendings += 1
            if Refusing.sendings > 1:  # The first time it is carried out, and the connection ends.
                problem = msgspec.json.encode(problem_of(Busy("too often"), ""))
                self.send_response(429)
                self.send_header("Content-Length", str(len(problem)))
                self.end_headers()
                self.wfile.write(problem)

        def log_message(self, *_: object) -> None:
            """Nobody wants to read it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        url = f"http://127.0.0.1:{server.server_port}"
        to = SimpleNamespace(url=url, token=None, tls=None, patience_seconds=DEADLINE_SECONDS)
        try:
            with pytest.raises(CommitUnknown, match="too often"):
                streaming.post(to, PutMessages("jobs", [NewMessage(b"1")]), "key")
            with pytest.raises(Busy):
                streaming.post(to, PutMessages("jobs", [NewMessage(b"2")]), "another")
        finally:
            server.shutdown()
