"""The calls of one client across its connections: what to send, which call an answer belongs to, what to send again.

    call ──► pending ──► outbox ──► frames ──► the connection of the moment
                └─────── the connection ended: back to the outbox of the next one, marked as repeated
             pending ◄── replies

Unanswered calls are sent again on the next connection. A call that writes carries an idempotency key, so it is carried
out once even if only its answer was lost. A call fails when no server was reachable for `patience_seconds`, or for
longer than servers remember idempotency keys.

A session does no I/O and waits for nothing. A connection of an event loop and one of threads drive it: they carry its
frames, pass on what they receive, and report when a connection begins and ends.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from secrets import token_hex
from typing import Any, Final, Generic

import websockets

from fastness.client.batching import BatchableCall, BatchableRequest, RequestBatcher, is_batchable
from fastness.client.connection_errors import CHECKED_BEFORE_KEYS, connection_error, refused, unknown
from fastness.client.pending_calls import AnyFuture, PendingCall, encode_frames, fail_bad_calls, is_waiting_call
from fastness.client.undo import undo_of
from fastness.errors import FastnessError, NotAllowed, ShutdownDraining, Unreachable, Unsupported
from fastness.limits import CALL_KEY_PERIOD_SECONDS, CALLS_MAX, CONNECT_PAUSE_MS_MAX
from fastness.wire.frames import PROTOCOL, REVISION, AnyRequest, Hello, RawReply, decode_hello, decode_replies, encode
from fastness.wire.problems import error_of

# The sum is below the server's limit. Calls that wait there have their own slots, so they never block the rest.
CALL_SLOTS: Final = CALLS_MAX // 2 - 1
WAITING_CALL_SLOTS: Final = CALLS_MAX // 2
OPEN_SECONDS_MAX: Final = 5.0  # How long opening a connection may take, the server's hello included.
RELEASE_SECONDS_MAX: Final = 5.0  # How long a cancelled caller, and close(), wait for leases to be released.

_REFUSED: Final = (401, 403)
_TOKEN_REVOKED_CODE: Final = 4_003  # The close code for streams of a revoked token.
_BAD_FRAME_CODES: Final = (1002, 1007, 1009)  # The close codes of a server that could not decode a frame.
_PING_SECONDS_MAX: Final = 20.0
_SHORT_LIVED_SECONDS: Final = 2.0  # A connection that ended sooner, without an answer, counts as a failed attempt.
_TIMEOUT_CHECK_SECONDS_MAX: Final = 0.25  # How often calls that wait for a server are checked for a timeout.
# How long servers remember keys, less the time that a client needs to notice a lost connection.
_KEYS_SECONDS: Final = CALL_KEY_PERIOD_SECONDS - 60.0


class Session(Generic[AnyFuture]):
    """The calls of one client. Belongs to one event loop, or is guarded by a lock."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        patience_seconds: float,
        new_future: Callable[[], AnyFuture],
        on_output: Callable[[], object],
        call_soon: Callable[..., object] | None = None,
    ) -> None:
        """`on_output` is called when the session itself has added a call. `call_soon` is that of the event loop."""
        self.url = url.replace("http", "ws", 1) + "/v1/stream"
        self.error: FastnessError | None = None  # Why no more calls are accepted.
        self.is_connected = False
        self.pending: dict[int, PendingCall[AnyFuture]] = {}
        self.releases: set[AnyFuture] = set()  # Calls that release what cancelled callers have leased.
        self._batchable: set[int] = set()  # Pending calls that are puts and acks.
        self._abandoned: set[int] = set()  # Calls of cancelled callers whose answers are needed to release leases.
        self.batcher = RequestBatcher(self._add_batch, call_soon)
        self._token = token
        self._patience_seconds = patience_seconds
        self._new_future = new_future
        self._on_output = on_output
        self._id = token_hex(16)
        self._numbers = count()
        self._outbox: list[PendingCall[AnyFuture]] = []
        self._cancellations: list[int] = []
        self._refused: list[tuple[float, PendingCall[AnyFuture], FastnessError]] = []  # By a draining server, and when.
        self._jitter = random.Random()
        self._failures = 0
        self._disconnected_since = time.monotonic()
        self._reason: BaseException | None = None
        self._connected_since: float | None = None
        self._has_received = False

    @property
    def headers(self) -> dict[str, str]:
        """The headers with which a connection is opened."""
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    @property
    def ping_seconds(self) -> float:
        """After how much time a connection is checked by a ping, and how long the server may take to send anything."""
        return min(_PING_SECONDS_MAX, max(self._patience_seconds / 2, 1.0))

    @property
    def check_seconds(self) -> float:
        """How often `fail_timed_out` has to be called."""
        return min(_TIMEOUT_CHECK_SECONDS_MAX, max(self._patience_seconds / 4, 0.01))

    # Calls.

    def add(self, request: AnyRequest, future: AnyFuture) -> PendingCall[AnyFuture]:
        """Add a call to the outbox.

        Raises:
            InvalidArgument: the call cannot be encoded.
            TooLong: the call does not fit a frame.
        """
        number = next(self._numbers)
        key = f"{self._id}/{number}" if request.operation.takes_key else None
        pending = PendingCall(number, request, key, future, now=time.monotonic())
        self.pending[number] = pending
        if is_batchable(request):
            self._batchable.add(number)
        self._outbox.append(pending)
        return pending

    def add_batchable(self, request: BatchableRequest, future: AnyFuture) -> None:
        """Add a put or an ack to those that become one call of the next frame."""
        self.batcher.add(BatchableCall(request, future))

    def forget(self, pending: PendingCall[AnyFuture]) -> None:
        """Remove a call that is answered or failed, or whose answer is no longer needed."""
        self.pending.pop(pending.number, None)
        self._batchable.discard(pending.number)

    @property
    def has_batch_in_flight(self) -> bool:
        """Whether a put or an ack, or a batch of them, is pending."""
        return bool(self._batchable)

    @property
    def has_output(self) -> bool:
        """Whether there is something to send, other than puts and acks that wait for the answer to a batch."""
        return bool(self._outbox or self._cancellations or (self.batcher.has_calls and not self._batchable))

    @property
    def is_outbox_empty(self) -> bool:
        """Whether no call shares the next frame; those that wait to be batched do not count."""
        return not self._outbox

    def make_batches(self) -> int:
        """Add the waiting puts and acks to the outbox in batches. Returns how many callers the next frame has."""
        return self.batcher.send() + len(self._outbox)

    def take_frames(self) -> list[bytes]:
        """The frames to send now, and only once: after a failure to send them, the connection has to end."""
        frames: list[bytes] = []
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            frames = list(encode_frames(outbox))
        if self._cancellations:
            frames.append(encode(self._cancellations))
            self._cancellations = []
        return frames

    def _add_batch(self, request: BatchableRequest) -> AnyFuture:
        if self.error is not None:
            raise self.error
        pending = self.add(request, self._new_future())
        pending.future.add_done_callback(lambda _: self.forget(pending))
        self._on_output()
        return pending.future

    # The connection.

    def hello(self) -> bytes:
        """The first frame of a connection."""
        return encode(Hello(PROTOCOL, self._id))

    def connect(self, server_hello: bytes) -> None:
        """Begin a connection: its outbox has the new calls, and those whose answers were lost with the last one.

        Raises:
            Unsupported: the server speaks another protocol, or is older than this client.
        """
        hello = decode_hello(server_hello)
        if hello.protocol != PROTOCOL:
            raise Unsupported(f"The server speaks protocol {hello.protocol} and this client {PROTOCOL}; upgrade")
        if hello.revision < REVISION:
            raise Unsupported(
                f"The server has revision {hello.revision} and this client needs {REVISION}; upgrade the server"
            )
        self.is_connected = True
        self._connected_since = time.monotonic()
        self._outbox, self._cancellations, self._refused = [], [], []
        for _, pending in sorted(self.pending.items()):
            if pending.abandoned and is_waiting_call(pending.request):
                pending.fail(Unreachable("The connection broke; the server cancels what waited on it"))
            elif (
                pending.lost_at is not None and self._connected_since - pending.lost_at > _KEYS_SECONDS and pending.key
            ):
                pending.fail(unknown(pending.request, "the server no longer remembers its idempotency key"))
            else:
                if pending.sent:
                    pending.mark_repeated()
                self._outbox.append(pending)

    def receive(self, frame: bytes) -> None:
        """Deliver the replies of a frame. After an error the connection has to end: the frame cannot be decoded."""
        replies = decode_replies(frame)
        self._has_received = True
        for reply in replies:
            self.deliver(reply)

    def deliver(self, reply: RawReply) -> None:
        """Give the caller its answer, or the error of its call."""
        pending = self.pending.get(reply.number)
        if pending is not None and pending.future.cancelled():
            # The caller was cancelled but has not run since. abandon() then finds the answer here and releases it.
            pending.future = self._new_future()
            pending.future.add_done_callback(lambda future: future.exception())
        if pending is None or pending.future.done():
            return  # The caller was cancelled.
        self._batchable.discard(reply.number)
        if reply.problem is None:
            try:
                pending.future.set_result(pending.decode(reply.answer))
            except Exception as error:
                pending.lose(Unsupported(f"The client cannot decode the answer ({error}); upgrade the client"))
            return
        refusal = error_of(reply.problem)
        if isinstance(refusal, ShutdownDraining) and not pending.abandoned:
            # The call was not started. The server closes the connection soon, and the next connection carries the call.
            pending.sent = False
            self._refused.append((time.monotonic(), pending, refusal))
        elif pending.lost_at is not None and isinstance(refusal, CHECKED_BEFORE_KEYS):
            pending.lose(refusal)
        else:
            pending.fail(refusal)

    def disconnect(self, reason: BaseException) -> bool:
        """Record the end of a connection, or a failed attempt. Returns whether to connect again."""
        now = time.monotonic()
        self.is_connected = False
        self._reason = reason
        self.make_batches()  # Only pending calls time out.
        for pending in self.pending.values():
            if pending.sent and pending.lost_at is None:
                pending.lost_at = now  # It may have been carried out.
        if self._has_received or (
            self._connected_since is not None and now - self._connected_since > _SHORT_LIVED_SECONDS
        ):
            self._failures, self._disconnected_since = 0, now
        self._failures += 1
        self._has_received, self._connected_since = False, None
        return self._fail_by(reason)

    def pause_seconds(self) -> float:
        """How long to wait before the next attempt to connect."""
        pause_ms: int = min(50 * 2 ** min(self._failures, 8), CONNECT_PAUSE_MS_MAX)
        return self._jitter.random() * pause_ms / 1_000

    # Failures.

    def _fail_by(self, reason: BaseException) -> bool:
        """Fail calls as the end of a connection requires. Returns whether to connect again."""
        if isinstance(reason, websockets.InvalidStatus) and reason.response.status_code in _REFUSED:
            self.fail_all(refused(self.url, self._token))
            return False
        if isinstance(reason, websockets.ConnectionClosed) and reason.rcvd is not None:
            if reason.rcvd.code == _TOKEN_REVOKED_CODE:
                self.fail_all(
                    NotAllowed("The token was revoked; create another with `fastness token create NAME --allow VERBS`")
                )
                return False
            if reason.rcvd.code in _BAD_FRAME_CODES:
                fail_bad_calls(list(self.pending.values()), reason.rcvd.reason)
        return True

    @property
    def has_timeouts(self) -> bool:
        """Whether `fail_timed_out` may have something to do."""
        return not self.is_connected or bool(self._refused)

    def fail_timed_out(self) -> None:
        """Fail the calls that have waited too long for a server."""
        deadline = time.monotonic() - self._patience_seconds
        while self._refused and self._refused[0][0] <= deadline:
            _, pending, refusal = self._refused.pop(0)
            pending.fail(refusal)
        if not self.is_connected:
            for pending in list(self.pending.values()):
                if max(pending.since, self._disconnected_since) <= deadline:
                    error = connection_error(self.url, self._reason)
                    pending.fail(unknown(pending.request, error) if pending.sent and pending.key else error)

    def fail_all(self, error: FastnessError) -> None:
        """Fail every pending call, and every later one."""
        self.error = error
        for pending in list(self.pending.values()):
            pending.lose(error)
        self._outbox.clear()
        self.batcher.send()  # Fails the calls that wait to be batched.

    # Calls of cancelled callers.

    @property
    def is_releasing(self) -> bool:
        """Whether answers are needed to release what cancelled callers have leased."""
        return bool(self._abandoned or self.releases)

    def abandon(self, pending: PendingCall[AnyFuture]) -> AnyFuture | None:
        """Cancel the call of a cancelled caller, and release what it has leased.

        Returns a future that is done when it is released; None if there is nothing to release.
        """
        undo = undo_of(pending.request)
        if undo is None or not pending.sent or self.error is not None:
            self.forget(pending)
            return None
        if pending.future.cancelled() or not pending.future.done():
            pending.abandoned = True
            self._abandoned.add(pending.number)
            pending.future = self._new_future()
            if self.is_connected:
                self._cancellations.append(pending.number)
        released = self._new_future()
        pending.future.add_done_callback(partial(self._release, pending, undo, released))
        self._on_output()
        return released

    def _release(
        self,
        pending: PendingCall[AnyFuture],
        undo: Callable[[Any], AnyRequest | None],
        released: AnyFuture,
        future: AnyFuture,
    ) -> None:
        self.forget(pending)
        self._abandoned.discard(pending.number)
        is_leased = future.exception() is None and self.error is None  # Otherwise there is nothing to release.
        request = undo(future.result()) if is_leased else None
        if request is None:
            released.set_result(None)
            return
        release = self.add(request, self._new_future())
        self.releases.add(release.future)
        release.future.add_done_callback(partial(self._on_released, release, released))
        self._on_output()

    def _on_released(self, release: PendingCall[AnyFuture], released: AnyFuture, future: AnyFuture) -> None:
        future.exception()  # After an error the lease expires by itself.
        self.releases.discard(future)
        self.forget(release)
        released.set_result(None)
