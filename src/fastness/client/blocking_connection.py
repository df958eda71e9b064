"""One WebSocket stream to a server, for threads. A caller writes its request and reads its answer by itself.

    call ──► session ──► written by the caller, with the calls of threads that came while another one was writing
                                                    replies ──► the future of each call

**Writing.** One thread writes at a time. Calls of other threads that come meanwhile share its next frame. Puts and acks
also wait while others are in flight, and become one call when those are answered: the answer to one batch is the time
to send the next, so the server always has one to work on.

**Reading.** One thread reads at a time. A caller that waits for its answer and finds no reader becomes the reader; it
delivers the answers of other callers too, and wakes them. When its own answer has arrived, it wakes one of the callers
that still wait, which reads on. So a single caller needs no other thread.

**The background thread** opens connections, sends pings and fails calls that time out. It reads when no caller has done
so for a moment, or when leases of interrupted callers have to be released. A caller takes the reading over at any time.

**Interrupts.** An exception that a signal handler raises may leave a frame half read or half written. The connection is
then opened again, and the calls of other threads are sent again, as after a failure of the network. What the call of
the interrupted thread has leased is released in the background.

**Calls inside a call.** A signal handler, or a finalizer, may call while its own thread is inside a call: it may even
hold the lock. Such a call has a connection of its own, and such a close is done by another thread.

A broken connection is reopened, with pauses that double up to a few seconds; `Session` has the rules for the calls.
"""

import logging
import math
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import websockets

from fastness.client.batching import is_batchable
from fastness.client.blocking_socket import BlockingSocket, Opening
from fastness.client.pending_calls import PendingCall, is_waiting_call
from fastness.client.session import (
    CALL_SLOTS,
    OPEN_SECONDS_MAX,
    RELEASE_SECONDS_MAX,
    WAITING_CALL_SLOTS,
    Session,
)
from fastness.errors import Busy, Closed
from fastness.wire.frames import AnyRequest

_log = logging.getLogger("fastness.client")
_IDLE_SECONDS: Final = 0.1  # The background thread reads when no caller has begun to read for this long.
# How a connection ends by itself. Anything else is raised to the caller: a signal handler may raise any exception.
_CONNECTION_ERRORS: Final = (
    OSError,
    websockets.WebSocketException,
    msgspec.MsgspecError,
    ValueError,
    RecursionError,
    EOFError,
)


class BlockingFuture:
    """The answer to a call of a thread. All methods are called under the connection's lock."""

    __slots__ = ("_callbacks", "_error", "_is_cancelled", "_result", "is_done", "pending", "waiter")

    def __init__(self) -> None:
        self.is_done = False
        self.waiter: threading.Lock | None = None  # Released to wake the caller's thread.
        self.pending: PendingCall[BlockingFuture] | None = None
        self._is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[BlockingFuture], object]] | None = None

    def done(self) -> bool:
        return self.is_done

    def cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> bool:
        if self.is_done:
            return False
        self._is_cancelled = True
        self._finish()
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self) -> BaseException | None:
        return self._error

    def set_result(self, result: Any, /) -> None:
        self._result = result
        self._finish()

    def set_exception(self, exception: BaseException, /) -> None:
        self._error = exception
        self._finish()

    def add_done_callback(self, callback: "Callable[[BlockingFuture], object]", /) -> None:
        if self.is_done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def wake(self) -> None:
        """Wake the caller's thread, if it sleeps."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.release()

    def _finish(self) -> None:
        self.is_done = True
        self.wake()
        for callback in self._callbacks or ():
            callback(self)


_BACKGROUND: Final = BlockingFuture()  # The reader, while the background thread reads.


class BlockingConnection:
    """A stream that reconnects when it breaks. Any number of threads may call."""

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | None, patience_seconds: float) -> None:
        self._new = partial(BlockingConnection, url, token=token, tls=tls, patience_seconds=patience_seconds)
        self._session: Session[BlockingFuture] = Session(
            url,
            token=token,
            patience_seconds=patience_seconds,
            new_future=BlockingFuture,
            on_output=lambda: None,  # Each thread that adds calls or delivers answers sends what there is to send.
        )
        self._tls = tls
        self._lock = threading.Lock()  # Guards everything below, and the session.
        self._changed = threading.Condition(self._lock)  # The background thread waits for it, and so does close().
        self._slot_freed = threading.Condition(self._lock)
        self._slots = {False: CALL_SLOTS, True: WAITING_CALL_SLOTS}  # How many calls may be in flight, by kind.
        # The calls that have a slot. Sets, because an interrupt between two steps would falsify a number.
        self._in_flight: dict[bool, set[BlockingFuture]] = {False: set(), True: set()}
        self._slot_waiters = 0
        self._socket: BlockingSocket | None = None
        self._is_writing = False
        self._reader: BlockingFuture | None = None  # Whose thread reads, or is about to.
        self._reads = 0  # How often a caller has become the reader.
        self._sleeping: dict[BlockingFuture, None] = {}  # Callers whose threads sleep.
        self._thread: threading.Thread | None = None
        self._is_thread_asleep = False  # Whether the background thread sleeps until a caller stops reading.
        self._is_closing = False
        self._reconnects = True
        self._inside: set[int] = set()  # The threads that may hold the lock, or are needed to read or write.

    def call(self, request: AnyRequest) -> Any:
        """The answer to `request`.

        Raises:
            Unreachable: no server was reachable for `patience_seconds`.
            CommitUnknown: a write was sent, and no answer arrived within `patience_seconds`.
            TooLong: the call does not fit a frame; nothing was sent.
        """
        thread = threading.get_ident()
        if thread in self._inside:
            return self._call_apart(request)
        future = BlockingFuture()  # It exists before the call is submitted, so that an interrupt finds the call by it.
        try:
            self._inside.add(thread)
            self._submit(request, future)
            self._flush()
            while not future.is_done:
                self._wait(future)
            with self._lock:
                self._leave(future)
            self._inside.discard(thread)
            return future.result()
        except BaseException as error:
            self._inside.add(thread)
            try:
                if error is not future.exception():  # The thread was interrupted, or the call could not be submitted.
                    self._abandon(future)
            except BaseException:  # Interrupted once more. Other threads could wait for this reader without end.
                self._abandon(future)
                raise
            finally:
                self._inside.discard(thread)
            raise

    def close(self) -> None:
        """Close the connection, after pending releases. Calls in progress fail.

        A signal handler inside a call does not wait for that: the call has to fail first.
        """
        if threading.get_ident() in self._inside:
            threading.Thread(target=self._close, name="fastness-close").start()
        else:
            self._close()

    def _close(self) -> None:
        session = self._session
        with self._lock:
            error = session.error = session.error or Closed("The plane was closed; connect again")
            self._slot_freed.notify_all()
            self._notify()
            deadline = time.monotonic() + RELEASE_SECONDS_MAX
            while session.releases and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._is_closing = True
            session.fail_all(error)
            self._notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    # Calls.

    def _call_apart(self, request: AnyRequest) -> Any:
        """The answer to a call of a thread that is inside another one, over a connection of its own."""
        connection = self._new()
        try:
            return connection.call(request)
        finally:
            connection.close()

    def _submit(self, request: AnyRequest, future: BlockingFuture) -> None:
        kind = is_waiting_call(request)
        with self._lock:
            if self._session.error is None and len(self._in_flight[kind]) >= self._slots[kind]:
                self._wait_for_slot(kind)
            if self._session.error is not None:
                raise self._session.error
            if self._thread is None:
                self._start_thread()
            self._in_flight[kind].add(future)
            if is_batchable(request) and (self._is_writing or self._session.has_batch_in_flight):
                self._session.add_batchable(request, future)
            else:
                future.pending = self._session.add(request, future)

    def _wait_for_slot(self, kind: bool) -> None:
        self._slot_waiters += 1
        try:
            while self._session.error is None and len(self._in_flight[kind]) >= self._slots[kind]:
                self._slot_freed.wait()
        finally:
            self._slot_waiters -= 1

    def _leave(self, future: BlockingFuture) -> None:
        """Remove a call that is done."""
        self._in_flight[False].discard(future)
        self._in_flight[True].discard(future)
        if self._slot_waiters:
            self._slot_freed.notify_all()
        if future.pending is not None:
            self._session.forget(future.pending)
        self._sleeping.pop(future, None)
        self._stop_reading(future)

    def _abandon(self, future: BlockingFuture) -> None:
        """Cancel the call of a thread that no longer waits for it. It may be repeated after an interrupt."""
        with self._lock:
            pending = future.pending or next(
                (each for each in self._session.pending.values() if each.future is future), None
            )
            future.cancel()
            if pending is not None:
                self._session.abandon(pending)
            future.pending = None
            self._leave(future)
            self._notify()
        self._flush()

    def _wait(self, future: BlockingFuture) -> None:
        """Wait for the answer: read if no other caller does, otherwise sleep until the reader wakes this thread."""
        with self._lock:
            if future.is_done:
                return
            socket, waiter = self._socket, None
            if socket is not None and self._reader in (None, _BACKGROUND, future):
                self._reader = future
                self._reads += 1
            else:
                self._stop_reading(future)  # The connection may have ended before this thread began to read.
                waiter = future.waiter = threading.Lock()
                waiter.acquire()
                self._sleeping[future] = None
        if waiter is not None or socket is None:
            if waiter is not None:
                waiter.acquire()
            return
        while self._read(socket, future):
            if future.done():
                return
        with self._lock:
            self._stop_reading(future)  # The connection has ended.

    # Reading and writing.

    def _stop_reading(self, future: BlockingFuture) -> None:
        if self._reader is future:
            self._choose_reader()

    def _choose_reader(self) -> None:
        """Make a sleeping caller the reader. If there is none, the background thread finds that out by itself."""
        self._reader = None
        if self._socket is not None:
            for sleeper in self._sleeping:
                if not sleeper.is_done:
                    self._reader = sleeper
                    del self._sleeping[sleeper]
                    sleeper.wake()
                    return
        if self._is_thread_asleep or self._socket is None or self._session.is_releasing:
            self._notify()

    def _notify(self) -> None:
        """Wake the threads that wait for a change, and those that wait for the connection."""
        self._changed.notify_all()
        if self._socket is not None:
            self._socket.wake()

    def _read(self, socket: BlockingSocket, reader: BlockingFuture) -> bool:
        """Wait for data, and deliver what arrives. Returns whether `reader` can read on."""
        socket.wait()
        can_read = self._receive(socket, reader)
        self._flush()
        return can_read

    def _receive(self, socket: BlockingSocket, reader: BlockingFuture) -> bool:
        with self._lock:
            return self._socket is socket and self._reader is reader and self._receive_now(socket)

    def _receive_now(self, socket: BlockingSocket) -> bool:
        """Deliver what has arrived. Returns whether the connection is still open."""
        try:
            socket.receive()
        except BaseException as error:
            self._end(socket, error)
            if not isinstance(error, _CONNECTION_ERRORS):
                raise
            return False
        if self._session.error is not None:
            self._changed.notify_all()  # close() waits for releases.
        return True

    def _flush(self) -> None:
        """Write what there is to send, unless another thread is writing: it writes that too."""
        socket = self._socket
        if socket is None or not (self._session.has_output or socket.has_output):
            return
        is_writer = False
        try:
            with self._lock:
                if self._is_writing:
                    return
                self._is_writing = is_writer = True
                output = self._next_output(socket)
            while output:
                had_unsent = socket.unsent is not None
                socket.send(output)
                if socket.unsent is not None:
                    if not had_unsent:
                        socket.wake()  # The thread that reads waits until the kernel accepts more, and calls this.
                    break
                with self._lock:
                    output = self._next_output(socket)
                    if not output:
                        self._is_writing = is_writer = False
        except BaseException as error:
            with self._lock:
                if is_writer:
                    self._end(socket, error)
            if not isinstance(error, _CONNECTION_ERRORS):
                raise
        finally:
            if is_writer or self._socket is not socket:
                self._stop_writing(socket, is_writer=is_writer)

    def _stop_writing(self, socket: BlockingSocket, *, is_writer: bool) -> None:
        with self._lock:
            if is_writer:
                self._is_writing = False
            if self._socket is not socket:
                self._changed.notify_all()  # The background thread closes the connection when no thread uses it.

    def _next_output(self, socket: BlockingSocket) -> "bytes | memoryview":
        if self._socket is not socket:
            return b""
        if socket.unsent is not None:
            return socket.unsent
        if not self._session.has_output and not socket.has_output:
            return b""
        if not self._session.has_batch_in_flight:
            self._session.make_batches()
        return socket.output(self._session.take_frames())

    def _end(self, socket: BlockingSocket, error: BaseException) -> None:
        """Record the end of the connection. The background thread then opens another one."""
        if self._socket is not socket:
            return
        self._notify()
        self._socket = None
        socket.shut_down()
        if not isinstance(error, _CONNECTION_ERRORS):
            error = ConnectionAbortedError("a thread was interrupted while it used the connection")
        self._disconnect(error)

    def _disconnect(self, error: BaseException) -> None:
        try:
            self._reconnects = self._session.disconnect(error)
        except Exception:
            _log.exception("unexpected error at the end of a connection; reconnecting")

    # The background thread.

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="fastness-client", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise Busy(f"No thread is available ({error}); nothing was done. Try again later") from error
        self._thread = thread

    def _run(self) -> None:
        """Keep a connection open until the client is closed, or the server has refused it."""
        self._inside.add(threading.get_ident())
        try:
            while self._reconnects and not self._is_closing:
                self._connect_once()
        finally:
            self._inside.discard(threading.get_ident())

    def _connect_once(self) -> None:
        """Run one connection until it ends, and wait for the time of the next attempt."""
        try:
            socket = self._open()
            if socket is not None:
                self._attend(socket)
        except Exception:
            _log.exception("unexpected error in the background thread of a client; reconnecting")
        with self._lock:
            self._wait_for_change(time.monotonic() + self._session.pause_seconds(), lambda: not self._reconnects)

    def _wait_for_change(self, until: float, is_changed: Callable[[], bool]) -> None:
        """Wait until `is_changed`, the client is closed, or it is `until`; fail the calls that time out meanwhile."""
        while not self._is_closing and not is_changed() and (left := until - time.monotonic()) > 0:
            self._changed.wait(min(left, self._session.check_seconds))
            self._fail_timed_out()

    def _fail_timed_out(self) -> None:
        try:
            self._session.fail_timed_out()
        except Exception:
            _log.exception("unexpected error while failing calls that timed out; retrying")

    def _open(self) -> BlockingSocket | None:
        """Open a connection, and send the calls that wait for it. None if that failed."""
        opening = Opening(
            self._session.url,
            headers=self._session.headers,
            hello=self._session.hello(),
            tls=self._tls,
            timeout_seconds=OPEN_SECONDS_MAX,
            on_done=self._notify_opened,
        )
        try:
            opening.start()
        except RuntimeError as error:  # No thread is available.
            opening.error = error
        with self._lock:
            self._wait_for_change(math.inf, lambda: opening.is_done)
            if not opening.is_done:
                opening.cancel()
                return None
            try:
                socket = opening.result()
                self._resume(socket, opening.server_hello)
            except Exception as error:
                self._disconnect(error)
                return None
        self._flush()
        return socket

    def _notify_opened(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _resume(self, socket: BlockingSocket, server_hello: bytes) -> None:
        try:
            self._session.connect(server_hello)
        except Exception:
            socket.close()
            raise
        socket.on_message = self._session.receive
        self._socket = socket
        self._choose_reader()

    def _attend(self, socket: BlockingSocket) -> None:
        """Send pings and check timeouts, and read while no caller does, until the connection ends."""
        pings = _Pings(socket, self._session.ping_seconds)
        reads = -1  # How often callers had become the reader when this was last checked.
        try:
            while True:
                with self._lock:
                    if self._is_closing or self._socket is not socket:
                        return
                    until = self._check(pings, socket)
                    if self._reader is None and (self._reads == reads or self._session.is_releasing):
                        self._reader = _BACKGROUND
                    is_reader = self._reader is _BACKGROUND
                    if not is_reader and not socket.has_output:
                        reads = self._sleep(until, reads)
                self._flush()
                if is_reader:
                    socket.wait_in_background(until - time.monotonic())
                    self._receive(socket, _BACKGROUND)
                    self._flush()
        finally:
            self._close_socket(socket)

    def _check(self, pings: "_Pings", socket: BlockingSocket) -> float:
        """Do what is due, and return when to check again."""
        # What has arrived may not have been read yet.
        if pings.is_silent and self._receive_now(socket) and pings.is_silent:
            self._end(socket, TimeoutError("the server did not answer a ping"))
        until = pings.send_if_due()
        if not self._session.has_timeouts:
            return until
        self._fail_timed_out()
        if self._reader is not None and self._reader.is_done:
            socket.wake()
        return min(until, time.monotonic() + self._session.check_seconds)

    def _sleep(self, until: float, reads: int) -> int:
        """Sleep while callers read: for a moment, or while the same caller reads, until it stops.

        Returns how often callers had become the reader before; -1 if they may have read in between.
        """
        reads_before, self._is_thread_asleep = self._reads, self._reads == reads
        seconds = max(until - time.monotonic(), 0.0)
        if self._is_thread_asleep:
            self._changed.wait(seconds)
            self._is_thread_asleep = False
            return -1
        self._changed.wait(min(seconds, _IDLE_SECONDS))
        return reads_before

    def _close_socket(self, socket: BlockingSocket) -> None:
        """Close the connection when no other thread uses it any more."""
        with self._lock:
            is_open, self._socket = self._socket is socket, None
            while self._is_writing or self._reader not in (None, _BACKGROUND):
                self._changed.wait()
            self._reader = None
        if is_open:
            socket.close_politely()
        socket.close()


class _Pings:
    """Checks a connection: after a ping, anything at all has to arrive.

    Waiting for the pong itself would end connections that are merely slow: the pong queues behind answers, and a server
    with many answers to send does not read the ping.
    """

    def __init__(self, socket: BlockingSocket, seconds: float) -> None:
        self._socket = socket
        self._seconds = seconds
        self._due_at = time.monotonic() + seconds
        self._pinged_at: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether nothing has arrived in time after a ping."""
        return (
            self._pinged_at is not None
            and time.monotonic() >= self._due_at
            and self._socket.received_at < self._pinged_at
        )

    def send_if_due(self) -> float:
        """Add a ping to the connection's output if it is time. Returns when to check again."""
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + self._seconds
            if self._pinged_at is None:
                self._pinged_at = now
                self._socket.ping()
            else:
                self._pinged_at = None
        return self._due_at
