"""When an answer is lost with its connection, the client sends the call again, and it is carried out once."""

import asyncio
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

import fastness
from fastness import Plane
from fastness.client import session, streaming
from fastness.errors import Busy, CommitUnknown, FastnessError, InvalidArgument, NotAllowed, Unreachable, Unsupported
from fastness.wire.frames import PROTOCOL, REVISION, Hello, Reply, decode_calls, encode
from fastness.wire.problems import problem_of
from fastness.wire.queues import NewMessage, PutMessages
from tests.support.backends import rotating_backends
from tests.support.http_server import serving
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

DEADLINE_SECONDS = 60.0


class LossyClient:
    """A client whose answers can be dropped, and a second client that observes the server."""

    def __init__(self, proxy: Any, client: Plane, observer: Plane, threads: ThreadPoolExecutor) -> None:
        self.client = client
        self.observer = observer
        self._proxy = proxy
        self._threads = threads

    def run_with_lost_answer(
        self, work: Callable[[], Any], happened: Callable[[], Any], *, for_good: bool = False
    ) -> Any:
        """The result of `work`, whose first answer is dropped after it happened; with `for_good`, every answer is."""
        eventually(self._is_connected)
        self._proxy.mutes = True
        waiting: Future[Any] = self._threads.submit(work)
        eventually(lambda: waiting.done() or happened())
        assert not waiting.done()
        self._proxy.refuses = for_good
        self._proxy.cut_all()
        return waiting.result(DEADLINE_SECONDS)

    def _is_connected(self) -> bool:
        with suppress(Unreachable):  # A client with little patience may time out before it is connected.
            self.client.queues()
            return True
        return False


@contextmanager
def lossy_client(url: str, patience_seconds: float = DEADLINE_SECONDS) -> Iterator[LossyClient]:
    with (
        serving(url) as server,
        Proxy(server.port) as proxy,
        fastness.connect(proxy.url, patience_seconds=patience_seconds) as client,
        fastness.connect(server.url) as observer,
        ThreadPoolExecutor(2) as threads,
    ):
        yield LossyClient(proxy, client, observer, threads)


# What the client and the server do is the same on every backend.
@pytest.fixture(params=rotating_backends("rocksdb"))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lossy(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LossyClient]:
    """A client on every backend."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # Session logs are stored here with PostgreSQL.
    if backend == "postgres":
        url = request.getfixturevalue("postgres_url")
    else:
        url = "memory:" if backend == "memory" else f"dir:{tmp_path}"
    with lossy_client(url) as lossy:
        yield lossy


def test_messages_whose_delivery_was_lost_are_delivered_again(lossy: LossyClient) -> None:
    """Otherwise they would stay leased until their leases expire, and count as failed then."""
    jobs, observer = lossy.client.queue("jobs"), lossy.observer.queue("jobs")
    observer.put_many(range(5))
    found = lossy.run_with_lost_answer(
        lambda: jobs.receive_many(3, extend_for_seconds=0), lambda: observer.stats().leased
    )
    assert [message.json() for message in found] == [0, 1, 2]
    for message in found:
        message.ack()
    stats = observer.stats()
    assert (stats.acked_total, stats.ready, stats.leased, stats.failed_total) == (3, 2, 0, 0)


def test_a_lost_delivery_to_a_waiting_receive_is_repeated(lossy: LossyClient) -> None:
    jobs, observer = lossy.client.queue("jobs"), lossy.observer.queue("jobs")

    def wait() -> Any:
        return jobs.receive(wait_seconds=DEADLINE_SECONDS, extend_for_seconds=0)

    def put_once_waiting() -> bool:
        if observer.stats().waiting_consumers and not observer.stats().put_total:
            observer.put("late")
        return observer.stats().leased == 1

    message = lossy.run_with_lost_answer(wait, put_once_waiting)
    assert message.json() == "late"
    message.ack()
    stats = observer.stats()
    assert (stats.acked_total, stats.ready, stats.leased, stats.failed_total) == (1, 0, 0, 0)


def test_acks_that_came_with_a_lost_receive_are_made_once(lossy: LossyClient) -> None:
    jobs, observer = lossy.client.queue("jobs"), lossy.observer.queue("jobs")
    observer.put_many(range(4))
    first = jobs.receive_many(2, extend_for_seconds=0)
    second = lossy.run_with_lost_answer(
        lambda: jobs.receive_many(2, ack=first, extend_for_seconds=0), lambda: observer.stats().acked_total
    )
    assert [message.json() for message in second] == [2, 3]
    assert [(message.settled, message.lost) for message in first] == [(True, False)] * 2
    stats = observer.stats()
    assert (stats.acked_total, stats.ready, stats.leased, stats.failed_total) == (2, 0, 2, 0)


def test_acks_are_made_before_a_receive_that_is_lost_while_it_waits(lossy: LossyClient) -> None:
    jobs, observer = lossy.client.queue("jobs"), lossy.observer.queue("jobs")
    observer.put("first")
    first = jobs.receive_many(1, extend_for_seconds=0)

    def wait() -> Any:
        return jobs.receive_many(1, ack=first, wait_seconds=DEADLINE_SECONDS, extend_for_seconds=0)

    def put_once_acked() -> bool:
        stats = observer.stats()
        if stats.acked_total and stats.put_total == 1:
            observer.put("second")
        return stats.leased == 1 and stats.put_total == 2

    [second] = lossy.run_with_lost_answer(wait, put_once_acked)
    assert (second.json(), second.attempts, first[0].settled) == ("second", 1, True)
    stats = observer.stats()
    assert (stats.acked_total, stats.ready, stats.leased, stats.failed_total) == (1, 0, 1, 0)


def test_a_repeated_acquire_returns_the_same_lease(lossy: LossyClient) -> None:
    granted = lossy.run_with_lost_answer(
        lambda: lossy.client.lease("deploy").acquire("ada", ttl_seconds=600),
        lambda: lossy.observer.lease("deploy").describe().held,
    )
    assert granted.fence == 1
    assert lossy.observer.lease("deploy").describe().lease.fence == 1
    assert granted.release()


def test_repeated_writes_are_carried_out_once(lossy: LossyClient) -> None:
    """Otherwise each would be counted twice, or rejected because of its own first attempt."""
    client, observer = lossy.client, lossy.observer
    entities = observer.entities
    written = lossy.run_with_lost_answer(
        lambda: client.entities.put_if_version("task", "one", {"n": 1}, expected_version=0),
        lambda: entities.get("task", "one"),
    )
    assert written.versions == [1]
    assert lossy.run_with_lost_answer(
        lambda: client.entities.delete("task", "one"), lambda: not entities.get("task", "one")
    )
    assert [change.deleted for change in entities.history("task", "one")] == [False, True]

    def dead_count() -> int:
        return observer.queue("jobs").stats().dead

    observer.queue("jobs").put_many(range(4))
    for message in observer.queue("jobs").receive_many(4, extend_for_seconds=0):
        message.reject()
    assert lossy.run_with_lost_answer(lambda: client.queue("jobs").redrive(limit=2), lambda: dead_count() == 2) == 2
    assert dead_count() == 2
    observer.world("w").create()
    observer.world("w").append(["a", "b"], expected_head=0)
    copy = lossy.run_with_lost_answer(
        lambda: client.world("w").fork("copy", height=2), lambda: "copy" in observer.worlds()
    )
    assert (copy.name, observer.world("copy").head()) == ("copy", 2)
    lossy.run_with_lost_answer(
        lambda: client.activity.log("s", {"n": 1}), lambda: observer.activity.read(session="s").records
    )
    assert len(observer.activity.read(session="s").records) == 1


def test_a_write_that_may_have_happened_raises_commit_unknown() -> None:
    with lossy_client("memory:", patience_seconds=0.3) as lossy:
        jobs = lossy.client.queue("jobs")
        with pytest.raises(CommitUnknown, match="PutMessages"):
            lossy.run_with_lost_answer(
                lambda: jobs.put("a"), lambda: lossy.observer.queue("jobs").stats().ready, for_good=True
            )
        with pytest.raises(Unreachable):
            jobs.put("b")  # It was never sent.
        with pytest.raises(Unreachable):
            jobs.stats()
        assert lossy.observer.queue("jobs").stats().put_total == 1


@pytest.mark.parametrize("messages", [[b"x"], [bytes(16_384)] * 256], ids=["in a frame", "too long for one"])
def test_a_write_is_not_repeated_after_its_key_has_expired(
    monkeypatch: pytest.MonkeyPatch, messages: list[bytes]
) -> None:
    """Servers remember keys for ten minutes. After that, a client does not send a write again."""
    for module in (session, streaming):
        monkeypatch.setattr(module, "_KEYS_SECONDS", -1.0)
    with lossy_client("memory:") as lossy:
        jobs = lossy.client.queue("jobs")
        with pytest.raises(CommitUnknown, match="PutMessages"):
            lossy.run_with_lost_answer(
                lambda: jobs.put_many(messages), lambda: lossy.observer.queue("jobs").stats().ready
            )
        assert lossy.observer.queue("jobs").stats().put_total == len(messages)


@contextmanager
def failing_server(*, with_code: int | None = None, answer: object = None) -> Iterator[str]:
    """Runs a server that reads one frame, then closes with a code or sends an invalid answer. Yields its URL."""

    def serve(socket: ServerConnection) -> None:
        socket.recv()
        socket.send(encode(Hello(PROTOCOL, "", 16, REVISION)))
        calls = decode_calls(socket.recv(decode=False))
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
    ("failure", "error_of_reads"),
    [
        ({"with_code": 4_003}, NotAllowed),  # The token was revoked.
        ({"with_code": 1_002}, Unsupported),  # One of the calls could not be decoded; the client cannot know which.
        ({"answer": 42}, Unsupported),
    ],
)
async def test_unanswered_writes_are_unknown_and_reads_fail_plainly(
    failure: dict[str, Any], error_of_reads: type[FastnessError]
) -> None:
    with failing_server(**failure) as url:
        async with fastness.connect_async(url, patience_seconds=DEADLINE_SECONDS) as plane:
            jobs = plane.queue("jobs")
            outcomes = await asyncio.gather(
                jobs.put(b"1"), plane.state("a").update(1), jobs.stats(), jobs.receive(), return_exceptions=True
            )
    assert [type(outcome) for outcome in outcomes] == [CommitUnknown, CommitUnknown, error_of_reads, error_of_reads]
    assert "check whether it happened" in str(outcomes[0])


def test_a_put_whose_client_was_closed_raises_commit_unknown(tmp_path: Path) -> None:
    """Closed would mean that the put can be repeated safely."""
    with lossy_client(f"dir:{tmp_path}") as lossy:
        eventually(lossy._is_connected)
        lossy._proxy.mutes = True
        putting = lossy._threads.submit(lossy.client.queue("jobs").put, b"1")
        eventually(lambda: putting.done() or lossy.observer.queue("jobs").stats().ready)
        lossy.client.close()
        with pytest.raises(CommitUnknown, match="closed"):
            putting.result(DEADLINE_SECONDS)


@pytest.mark.parametrize("refusal", [Busy("too often"), NotAllowed("no more"), InvalidArgument("no such queue")])
async def test_a_refused_repetition_leaves_the_outcome_unknown(refusal: FastnessError) -> None:
    """A server applies its rate limit before it checks whether a call was carried out."""
    connections: list[int] = []

    def serve(socket: ServerConnection) -> None:
        socket.recv()
        socket.send(encode(Hello(PROTOCOL, "", 16, REVISION)))
        connections.append(1)
        for frame in socket:
            if len(connections) == 1:
                return  # The call was carried out, and the connection ends.
            assert isinstance(frame, bytes)
            problem = problem_of(refusal, "")
            socket.send(encode([Reply(call.number, None, problem) for call in decode_calls(frame)]))

    with serve_sync(serve, "127.0.0.1", 0) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        try:
            async with fastness.connect_async(url, patience_seconds=DEADLINE_SECONDS) as plane:
                with pytest.raises(InvalidArgument if isinstance(refusal, InvalidArgument) else CommitUnknown):
                    await plane.queue("jobs").put(b"1")
                with pytest.raises(type(refusal)):  # A call that is sent for the first time was not carried out.
                    await plane.queue("jobs").put(b"2")
        finally:
            server.shutdown()


def test_a_refused_repetition_of_a_long_call_leaves_the_outcome_unknown() -> None:
    class Refusing(BaseHTTPRequestHandler):
        requests = 0

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            Refusing.requests += 1
            if Refusing.requests > 1:  # The first request is carried out, and the connection ends.
                problem = msgspec.json.encode(problem_of(Busy("too often"), ""))
                self.send_response(429)
                self.send_header("Content-Length", str(len(problem)))
                self.end_headers()
                self.wfile.write(problem)

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        url = f"http://127.0.0.1:{server.server_port}"
        server_address = SimpleNamespace(url=url, token=None, tls=None, patience_seconds=DEADLINE_SECONDS)
        try:
            with pytest.raises(CommitUnknown, match="too often"):
                streaming.post(server_address, PutMessages("jobs", [NewMessage(b"1")]), "key")
            with pytest.raises(Busy):
                streaming.post(server_address, PutMessages("jobs", [NewMessage(b"2")]), "another")
        finally:
            server.shutdown()


# Ordered locks.

ROW = ["record_id", "task/1"]


def locks_of(plane: Plane) -> list[tuple[str, bool]]:
    sessions = plane.locks.sessions().sessions
    return [(lock.name, lock.is_waiting) for each in sessions for lock in each.locks if lock.level == "record_id"]


def test_locks_whose_grant_was_lost_are_held_once(lossy: LossyClient) -> None:
    locks, observer = lossy.client.locks, lossy.observer
    held = lossy.run_with_lost_answer(lambda: locks.acquire(ROW, lease_seconds=600), lambda: locks_of(observer))
    assert held.fence == 1
    held.check()
    assert locks_of(observer) == [("task/1", False)]
    held.release()
    assert locks_of(observer) == []


def test_a_lost_grant_to_a_waiting_caller_is_repeated(lossy: LossyClient) -> None:
    """The call that the server gave up with its connection must not take the locks away from its repetition."""
    locks, observer = lossy.client.locks, lossy.observer
    before = observer.locks.acquire(ROW)
    session = before._session  # type: ignore[attr-defined]

    def release_once_waiting() -> bool:
        if ("task/1", True) in locks_of(observer):
            before.release()
        return locks_of(observer) == [("task/1", False)] and not session.has_claims

    held = lossy.run_with_lost_answer(
        lambda: locks.acquire(ROW, timeout_seconds=DEADLINE_SECONDS, lease_seconds=600), release_once_waiting
    )
    assert held.fence in (2, 3)  # It was granted again if the server had given up the first call before it knew.
    assert len(lossy.client.atomic().check(held).commit()) == 1
    held.release()
    assert locks_of(observer) == []


def test_a_lost_answer_to_a_release_does_not_count_as_a_lost_lock(lossy: LossyClient) -> None:
    held = lossy.client.locks.acquire(ROW, lease_seconds=600)

    def block() -> None:
        with held:
            pass

    lossy.run_with_lost_answer(block, lambda: not locks_of(lossy.observer))
    assert not held.is_lost
