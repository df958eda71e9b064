"""Threads that share a connection: which of them reads and writes, and what happens when one of them is interrupted."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_sync

import fastness
from fastness import Plane
from fastness.client import blocking_connection, blocking_socket, session
from fastness.client.blocking_connection import BlockingConnection
from fastness.client.session import Session
from fastness.errors import Busy, Closed, CommitUnknown, Unsupported
from fastness.wire.frames import PROTOCOL, REVISION, Hello, Reply, decode_calls, encode
from fastness.wire.states import FoundState
from tests.support.http_server import Server, serving
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

PATIENCE_SECONDS = 30.0  # Far more than any step needs.
TRACED_FILES = {module.__file__ for module in (blocking_connection, blocking_socket, session)}
_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(f"dir:{tmp_path_factory.mktemp('data')}") as running:
        yield running


@pytest.fixture
def plane(server: Server) -> Iterator[Plane]:
    with fastness.connect(server.url, patience_seconds=PATIENCE_SECONDS) as plane:
        yield plane


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"thing-{next(_names)}"


@pytest.fixture
def delivering_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread that delivered each answer."""
    threads: list[int] = []
    deliver = Session.deliver

    def record(self: Session[Any], reply: Any) -> None:
        threads.append(threading.get_ident())
        deliver(self, reply)

    monkeypatch.setattr(Session, "deliver", record)
    return threads


def connection_of(plane: Plane) -> BlockingConnection:
    connection = plane._transport._connection  # type: ignore[attr-defined]
    assert isinstance(connection, BlockingConnection)
    return connection


def background_reads(plane: Plane) -> bool:
    return connection_of(plane)._reader is blocking_connection._BACKGROUND


@contextmanager
def interrupted_when(condition: Callable[[], Any]) -> Iterator[None]:
    """Raises KeyboardInterrupt in the main thread once the condition is true."""

    def interrupt() -> None:
        eventually(condition)
        os.kill(os.getpid(), signal.SIGALRM)

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)


@contextmanager
def stream_server(serve: Callable[[ServerConnection], None], **options: Any) -> Iterator[str]:
    """Runs a server whose streams `serve` handles after the hellos. Yields its URL."""

    def greet_and_serve(stream: ServerConnection) -> None:
        stream.recv()
        stream.send(encode(Hello(PROTOCOL, "", 16, REVISION)))
        with suppress(ConnectionClosed):
            serve(stream)

    options = {"ping_interval": None, "max_size": None} | options
    with serve_sync(greet_and_serve, "127.0.0.1", 0, **options) as running, ThreadPoolExecutor(1) as threads:
        threads.submit(running.serve_forever)
        try:
            yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        finally:
            running.shutdown()


def answer(stream: ServerConnection) -> None:
    """Answer the calls of the next frame: each found no state."""
    calls = decode_calls(stream.recv(decode=False))
    stream.send(encode([Reply(call.number, FoundState(None)) for call in calls if not isinstance(call, int)]))


# Who reads.


def test_a_single_caller_writes_and_reads_by_itself(
    plane: Plane, name: str, delivering_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: set[int] = set()
    send = blocking_socket.BlockingSocket.send

    def record(self: Any, output: Any) -> None:
        writers.add(threading.get_ident())
        send(self, output)

    jobs = plane.queue(name)
    jobs.put("first")  # The background thread opens the connection, and sends what waits for it.
    monkeypatch.setattr(blocking_socket.BlockingSocket, "send", record)
    delivering_threads.clear()
    for number in range(10):
        jobs.put(number)
        jobs.receive(extend_for_seconds=0).ack()
    eventually(lambda: background_reads(plane))  # The client is idle for a moment.
    jobs.put("last")
    assert set(delivering_threads) == writers == {threading.get_ident()}
    assert len(delivering_threads) == 31


def test_a_caller_reads_the_answers_of_other_threads(plane: Plane, name: str, delivering_threads: list[int]) -> None:
    jobs = plane.queue(name)
    jobs.put("first")
    jobs.receive(extend_for_seconds=0)
    waiters: list[int] = []

    def wait() -> Any:
        waiters.append(threading.get_ident())
        return jobs.receive(wait_seconds=600, extend_for_seconds=0)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        eventually(lambda: jobs.stats().waiting_consumers == 1)
        eventually(lambda: connection_of(plane)._reader is not None and not background_reads(plane))
        delivering_threads.clear()
        jobs.stats()
        jobs.put("second")
        assert waiting.result(PATIENCE_SECONDS).json() == "second"
    assert delivering_threads[0] == waiters[0]


def test_an_interrupted_reader_hands_the_reading_over(server: Server, plane: Plane, name: str) -> None:
    """The calls of other threads are answered, on the same connection."""
    jobs, others = plane.queue(name), plane.queue(f"{name}-others")
    jobs.put("first")
    jobs.receive(extend_for_seconds=0).ack()
    connection = connection_of(plane)
    stream = connection._socket
    with fastness.connect(server.url) as observer, ThreadPoolExecutor(2) as threads:
        waiting: list[Any] = []

        def start_waiting_behind_the_reader() -> bool:
            if observer.queue(name).stats().waiting_consumers and not waiting:
                waiting.extend(threads.submit(others.receive, wait_seconds=600) for _ in range(2))
            return len(connection._sleeping) == 2

        with interrupted_when(start_waiting_behind_the_reader):
            jobs.receive(wait_seconds=600)
        observer.queue(f"{name}-others").put_many(["a", "b"])
        assert sorted(each.result(PATIENCE_SECONDS).json() for each in waiting) == ["a", "b"]
        eventually(lambda: jobs.stats().waiting_consumers == 0)
    assert connection._socket is stream


def at_line(line: int, action: Callable[[], object]) -> Callable[[FrameType, str, object], Any]:
    """A trace function that runs `action` before a line of the client, counted from 0 in the order they run."""
    lines = count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in TRACED_FILES:
            return None
        # Python runs no signal handler between the body of a `with` and its end.
        text = getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith("with ") and next(lines) == line:
            action()
        return trace

    return trace


@contextmanager
def traced(trace: Callable[[FrameType, str, object], Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_interrupt_at_any_line_leaves_the_connection_usable(plane: Plane, name: str, step: int) -> None:
    jobs = plane.queue(name)
    jobs.put("first")
    interrupts = 0

    def interrupt() -> None:
        raise KeyboardInterrupt

    def receive_interrupted_at(line: int) -> bool:
        """Receive a message and release it. Returns whether the call was interrupted: it has at least so many lines."""
        try:
            with traced(at_line(line, interrupt)):
                message = jobs.receive(extend_for_seconds=0)
        except KeyboardInterrupt:
            return True
        assert message is not None
        message.nack(intent="defer")
        return False

    with ThreadPoolExecutor(1) as threads:
        while receive_interrupted_at(interrupts * step):
            interrupts += 1
            # Calls of this thread and of others are answered, and no call is left behind.
            assert jobs.stats().put_total == 1
            assert threads.submit(jobs.stats).result(PATIENCE_SECONDS).put_total == 1
            connection = connection_of(plane)
            eventually(lambda: not connection._session.pending)  # noqa: B023
            assert not connection._sleeping
            assert not any(connection._in_flight.values())
            eventually(lambda: jobs.stats().ready == 1)  # What the interrupted call has leased is released.
    assert interrupts > 100 / step
    assert jobs.stats().expired_total == 0


@pytest.mark.parametrize(
    "step",
    [(Session, "abandon"), (BlockingConnection, "_leave"), (BlockingConnection, "_notify")],
    ids=lambda step: step[1],
)
def test_an_interrupt_during_the_cleanup_of_another_one_leaves_the_connection_usable(
    server: Server, plane: Plane, name: str, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str]
) -> None:
    jobs, others = plane.queue(name), plane.queue(f"{name}-others")
    connection = connection_of(plane)
    original, interrupts = getattr(*step), count(1)

    def interrupted(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and next(interrupts) == 1:
            raise KeyboardInterrupt
        return original(*arguments)

    with fastness.connect(server.url) as observer, ThreadPoolExecutor(1) as threads:
        waiting: list[Any] = []

        def start_waiting_behind_the_reader() -> bool:
            if observer.queue(name).stats().waiting_consumers and not waiting:
                waiting.append(threads.submit(others.receive, wait_seconds=PATIENCE_SECONDS))
            if waiting and len(connection._sleeping) == 1:
                monkeypatch.setattr(*step, interrupted)
                return True
            return False

        with interrupted_when(start_waiting_behind_the_reader):
            jobs.receive(wait_seconds=600)
        assert next(interrupts) > 1
        observer.queue(f"{name}-others").put("a")
        assert waiting[0].result(PATIENCE_SECONDS).json() == "a"
        eventually(lambda: observer.queue(name).stats().waiting_consumers == 0)
    eventually(lambda: not connection._session.pending)


# Signal handlers and finalizers that call, while their own thread is inside a call.


@contextmanager
def handled_when(condition: Callable[[], Any], handle: Callable[[], object]) -> Iterator[None]:
    """Runs `handle` as a signal handler in the main thread, once the condition is true."""

    def notify() -> None:
        eventually(condition)
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda *_: handle())
    thread = threading.Thread(target=notify)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_can_call_while_its_thread_waits(server: Server, plane: Plane, name: str) -> None:
    jobs = plane.queue(name)
    with fastness.connect(server.url) as observer:
        is_waiting = lambda: observer.queue(name).stats().waiting_consumers == 1  # noqa: E731
        with handled_when(is_waiting, lambda: jobs.put("from the handler")):
            message = jobs.receive(wait_seconds=PATIENCE_SECONDS, extend_for_seconds=0)
    assert message is not None
    assert message.json() == "from the handler"
    message.ack()


def test_a_signal_handler_can_close_while_its_thread_waits(server: Server, name: str) -> None:
    plane = fastness.connect(server.url)
    with fastness.connect(server.url) as observer:
        is_waiting = lambda: observer.queue(name).stats().waiting_consumers == 1  # noqa: E731
        with handled_when(is_waiting, plane.close), pytest.raises(Closed):
            plane.queue(name).receive(wait_seconds=600)
        eventually(lambda: observer.queue(name).stats().waiting_consumers == 0)
    eventually(lambda: not any(thread.name == "fastness-close" for thread in threading.enumerate()))


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_call_at_any_line_of_another_call_is_answered(plane: Plane, name: str, step: int) -> None:
    """Also while the thread holds the lock of its connection."""
    jobs, inner = plane.queue(name), plane.queue(f"{name}-inner")
    jobs.put("first")
    calls = 0
    while True:
        answers: list[int] = []
        with traced(at_line(calls * step, lambda: answers.append(inner.put("x").duplicate))):  # noqa: B023
            jobs.put("again")
        if not answers:
            break
        calls += 1
    assert calls > 60 / step
    assert inner.stats().put_total == calls
    assert jobs.stats().put_total == calls + 2


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_client_can_be_closed_at_any_line_of_a_call(server: Server, name: str, step: int) -> None:
    closes = 0
    while True:
        plane = fastness.connect(server.url, patience_seconds=PATIENCE_SECONDS)
        plane.queue(name).stats()
        with traced(at_line(closes * step, plane.close)), suppress(Closed):
            plane.queue(name).stats()
        if not plane._transport._closed:  # type: ignore[attr-defined]
            plane.close()
            break
        closes += 1
        thread = connection_of(plane)._thread
        assert thread is not None
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert closes > 60 / step


# Faults.


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 20))])
def test_every_call_of_many_threads_happens_once_while_connections_are_cut(
    server: Server, name: str, seed: int
) -> None:
    threads_count, rounds = 32, 6
    started = threading.Barrier(threads_count)

    def work(plane: Plane, thread: int) -> list[str]:
        started.wait(PATIENCE_SECONDS)
        jobs, state, acked = plane.queue(name), plane.state(f"{name}/{thread}"), []
        for number in range(rounds):
            jobs.put(f"{thread}/{number}", attributes={"padding": "x" * 200})
            etag = state.update([thread, number]).etag
            found = state.get()
            assert found is not None
            assert (found.value, found.etag) == ([thread, number], etag)
            assert plane.entities.write("task", f"{name}-{thread}", {"n": number}).versions == [number + 1]
            message = jobs.receive(wait_seconds=PATIENCE_SECONDS, extend_for_seconds=0)
            assert message is not None
            message.ack()
            acked.append(message.json())
        return acked

    with (
        Proxy(server.port, seed) as proxy,
        fastness.connect(proxy.url, patience_seconds=PATIENCE_SECONDS) as plane,
        ThreadPoolExecutor(threads_count) as threads,
    ):
        proxy.bytes_max = 30_000
        working = [threads.submit(work, plane, thread) for thread in range(threads_count)]
        acked = [text for each in working for text in each.result(2 * PATIENCE_SECONDS)]
        assert proxy.cuts >= 3
    with fastness.connect(server.url) as observer:
        stats = observer.queue(name).stats()
    expected = {f"{thread}/{number}": 1 for thread in range(threads_count) for number in range(rounds)}
    assert Counter(acked) == expected
    assert (stats.put_total, stats.acked_total, stats.ready, stats.leased) == (len(expected), len(expected), 0, 0)


def test_every_put_of_threads_happens_once_while_the_server_is_killed(tmp_path: Path) -> None:
    threads_count, puts = 8, 30
    done: list[str] = []

    def put_all(plane: Plane, thread: int) -> None:
        for number in range(puts):
            plane.queue("a").put(f"{thread}/{number}")
            done.append(f"{thread}/{number}")

    with ExitStack() as servers, ThreadPoolExecutor(threads_count) as threads:
        server = servers.enter_context(serving(f"dir:{tmp_path}"))
        proxy = servers.enter_context(Proxy(server.port))
        plane = servers.enter_context(fastness.connect(proxy.url, patience_seconds=PATIENCE_SECONDS))
        putting = [threads.submit(put_all, plane, thread) for thread in range(threads_count)]
        eventually(lambda: len(done) > threads_count * puts // 4)
        server.process.kill()
        server.process.wait()
        assert len(done) < threads_count * puts
        proxy.target = servers.enter_context(serving(f"dir:{tmp_path}")).port
        for each in putting:
            each.result(PATIENCE_SECONDS)
        found = Counter(message.json() for message in plane.queue("a").receive_many(256, extend_for_seconds=0))
    assert found == Counter(done)
    assert len(done) == threads_count * puts


def test_a_silent_connection_is_replaced(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "ping_seconds", 0.05)
    with (
        Proxy(server.port) as proxy,
        fastness.connect(proxy.url, patience_seconds=PATIENCE_SECONDS) as plane,
        ThreadPoolExecutor(1) as threads,
    ):
        plane.queue(name).put("a")
        first = proxy.accepted
        proxy.mutes = True
        putting = threads.submit(plane.queue(name).put, "b")
        eventually(lambda: proxy.accepted > first)
        proxy.cut_all()  # The next connection is not muted.
        putting.result(PATIENCE_SECONDS)
        assert plane.queue(name).stats().put_total == 2


@pytest.mark.parametrize("is_waiting", [False, True], ids=["idle", "waiting"])
def test_pings_are_answered(is_waiting: bool) -> None:
    pongs: list[bool] = []
    done = threading.Event()

    def serve(stream: ServerConnection) -> None:
        if not is_waiting:
            answer(stream)
        for _ in range(3):
            pongs.append(stream.ping().wait(PATIENCE_SECONDS))
        done.set()
        answer(stream)

    with stream_server(serve) as url, fastness.connect(url) as plane:
        plane.state("a").get()
        assert done.wait(PATIENCE_SECONDS)
        if not is_waiting:
            plane.state("a").get()
    assert pongs == [True] * 3


def test_an_idle_client_checks_its_connection_and_keeps_it(
    plane: Plane, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread sends pings and reads the pongs, while no call is in flight."""
    monkeypatch.setattr(Session, "ping_seconds", 0.5)
    pings: list[float] = []
    ping = blocking_socket.BlockingSocket.ping

    def record(self: Any) -> None:
        pings.append(self.received_at)
        ping(self)

    monkeypatch.setattr(blocking_socket.BlockingSocket, "ping", record)
    jobs = plane.queue(name)
    jobs.put("a")
    stream = connection_of(plane)._socket
    eventually(lambda: len(pings) == 2)
    assert pings[0] < pings[1]  # Something arrived in between.
    jobs.put("b")
    assert connection_of(plane)._socket is stream


def test_a_message_of_an_idle_client_stays_leased(plane: Plane, name: str) -> None:
    jobs = plane.queue(name)
    jobs.put("a")
    message = jobs.receive(visibility_seconds=1)
    assert message is not None
    eventually(lambda: background_reads(plane))
    leased_until = message.expires_ms
    eventually(lambda: message.expires_ms > leased_until + 1_000)  # No call is made meanwhile.
    assert background_reads(plane)
    message.ack()
    assert jobs.stats().expired_total == 0


def test_an_idle_client_reconnects_without_a_call() -> None:
    connections = threading.Semaphore(0)

    def serve(stream: ServerConnection) -> None:
        connections.release()
        answer(stream)

    with stream_server(serve) as url, fastness.connect(url) as plane:
        plane.state("a").get()
        assert connections.acquire(timeout=PATIENCE_SECONDS)
        assert connections.acquire(timeout=PATIENCE_SECONDS)


def test_calls_wait_for_a_server_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not accept is sent later, whole and in order, by the thread that reads."""
    reads = threading.Event()
    sizes: list[int] = []
    waits: list[int] = []
    wait = blocking_socket.BlockingSocket.wait

    def count_wait(self: Any) -> None:
        waits.append(1)
        wait(self)

    monkeypatch.setattr(blocking_socket.BlockingSocket, "wait", count_wait)

    def serve(stream: ServerConnection) -> None:
        reads.wait(PATIENCE_SECONDS)
        while True:
            calls = [call for call in decode_calls(stream.recv(decode=False)) if not isinstance(call, int)]
            sizes.extend(len(call.request.value) for call in calls)  # type: ignore[attr-defined]
            stream.send(encode([Reply(call.number, 42) for call in calls]))

    with (
        stream_server(serve, max_queue=1) as url,
        fastness.connect(url) as plane,
        ThreadPoolExecutor(8) as threads,
    ):
        updating = [threads.submit(plane.state("a").update, "x" * (3_000_000 + number)) for number in range(8)]
        try:
            eventually(lambda: (stream := connection_of(plane)._socket) is not None and stream.unsent is not None)
            eventually(lambda: len(connection_of(plane)._sleeping) == 7)

            def is_quiet() -> bool:
                before = len(waits)
                time.sleep(0.05)
                return len(waits) == before

            eventually(is_quiet)  # The thread that reads does not poll in a loop.
            assert not any(each.done() for each in updating)
        finally:
            reads.set()
        for each in updating:
            with pytest.raises(CommitUnknown, match="cannot decode"):  # 42 is not an answer.
                each.result(PATIENCE_SECONDS)
    assert [size - min(sizes) for size in sorted(sizes)] == [*range(8)]


def test_an_answer_may_arrive_in_fragments() -> None:
    def serve(stream: ServerConnection) -> None:
        for _ in range(2):
            (call,) = decode_calls(stream.recv(decode=False))
            assert not isinstance(call, int)
            data = encode([Reply(call.number, FoundState(None))])
            stream.send([data[:3], data[3:5], data[5:]])

    with stream_server(serve) as url, fastness.connect(url) as plane:
        assert [plane.state("a").get() for _ in range(2)] == [None, None]


@pytest.mark.parametrize(
    "hello",
    [Hello(PROTOCOL + 1, "", 16, REVISION), Hello(PROTOCOL, "", 16, REVISION - 1)],
    ids=["another protocol", "older"],
)
def test_a_server_that_does_not_know_all_that_a_client_sends_is_reported(hello: Hello) -> None:
    def serve(stream: ServerConnection) -> None:
        stream.recv()
        stream.send(encode(hello))

    with serve_sync(serve, "127.0.0.1", 0) as running, ThreadPoolExecutor(1) as threads:
        threads.submit(running.serve_forever)
        url = f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        with fastness.connect(url, patience_seconds=0.2) as plane, pytest.raises(Unsupported, match="upgrade"):
            plane.worlds()
        running.shutdown()


# Limits and closing.


def test_calls_above_the_limit_wait_for_a_slot(plane: Plane, name: str) -> None:
    connection = connection_of(plane)
    connection._slots = {False: 2, True: 1}
    jobs = plane.queue(name)
    with ThreadPoolExecutor(16) as threads:
        waiting = [threads.submit(jobs.receive, wait_seconds=600, extend_for_seconds=0) for _ in range(3)]
        list(threads.map(jobs.put, range(3)))
        assert sorted(each.result(PATIENCE_SECONDS).json() for each in waiting) == [0, 1, 2]
        list(threads.map(lambda number: plane.state(f"{name}/{number}").update(number), range(64)))
        waiting = [threads.submit(jobs.receive, wait_seconds=600) for _ in range(8)]
        eventually(lambda: connection._slot_waiters == 7)
        plane.close()
        for each in waiting:
            with pytest.raises(Closed):
                each.result(PATIENCE_SECONDS)
    assert not any(connection._in_flight.values())


def test_closing_fails_the_calls_that_wait_for_a_server(server: Server, name: str) -> None:
    with Proxy(server.port) as proxy, ThreadPoolExecutor(4) as threads:
        plane = fastness.connect(proxy.url, patience_seconds=PATIENCE_SECONDS)
        plane.queue(name).stats()
        proxy.refuses = True
        proxy.cut_all()
        eventually(lambda: connection_of(plane)._socket is None)
        calls = [threads.submit(call) for call in (plane.queue(name).stats, plane.worlds) for _ in range(2)]
        eventually(lambda: len(connection_of(plane)._sleeping) == 4)
        plane.close()
        for call in calls:
            with pytest.raises(Closed):
                call.result(PATIENCE_SECONDS)


def test_a_child_that_is_forked_during_calls_can_connect_again(server: Server, plane: Plane, name: str) -> None:
    """In the child no thread reads, and the lock may be taken."""
    jobs, connection = plane.queue(name), connection_of(plane)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(jobs.receive, wait_seconds=600, extend_for_seconds=0)
        eventually(lambda: jobs.stats().waiting_consumers == 1)
        stream = connection._socket
        assert connection._lock.acquire(timeout=PATIENCE_SECONDS)
        child = os.fork()
        if not child:  # None of pytest's code may run here.
            with suppress(BaseException):
                try:
                    jobs.put("over the connection of the parent")
                except Closed:
                    plane.close()
                    with fastness.connect(server.url) as own:
                        own.queue(name).put("from the child")
                    os._exit(0)
            os._exit(1)
        connection._lock.release()
        assert os.waitpid(child, 0)[1] == 0
        assert waiting.result(PATIENCE_SECONDS).json() == "from the child"
    assert connection._socket is stream


def test_a_process_ends_without_closing_its_client(server: Server, name: str) -> None:
    """Also while one of its threads waits for an answer, and reads."""
    script = f"""
import threading, time
import fastness

plane = fastness.connect({server.url!r})
jobs = plane.queue({name!r})
jobs.put("a")
threading.Thread(target=plane.queue({f"{name}-other"!r}).receive, kwargs={{"wait_seconds": 600}}, daemon=True).start()
while plane.queue({f"{name}-other"!r}).stats().waiting_consumers < 1:
    time.sleep(0.01)
print(jobs.stats().put_total)
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("1\n", "", 0)


def test_a_call_is_refused_while_no_thread_can_start(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {"fastness-client", "fastness-connect"}
    start = threading.Thread.start

    def fail_once(thread: threading.Thread) -> None:
        if thread.name in failing:
            failing.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with fastness.connect(server.url, patience_seconds=PATIENCE_SECONDS) as plane:
        with pytest.raises(Busy, match="No thread is available"):
            plane.queue(name).put("a")
        plane.queue(name).put("b")  # The connection is opened in the second attempt.
        assert not failing
        assert plane.queue(name).stats().put_total == 1
