"""Generated from handles/ingress.py by tools/make_twins.py; change that file instead."""

import inspect
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from fastness.errors import Busy, FastnessError, InvalidArgument, InvalidValue, rebuild
from fastness.handles.arguments import checked_items
from fastness.handles.push_listening import PushPoller
from fastness.handles.sync.handle import Handle
from fastness.limits import PUSH_WATCH_MAX, PUSH_WATCH_SECONDS_MAX
from fastness.names import checked_agent
from fastness.wire import Transport
from fastness.wire.ingress import (
    ACCEPTED,
    SYNCED,
    DataPush,
    IngressStats,
    NewDataPush,
    Push,
    Pushed,
    PushItem,
    PushMany,
    PushOutcome,
    ShowIngress,
    WatchPushes,
)
from fastness.wire.json_values import encode_json
from fastness.wire.transport import OnDataPush


class Ingress(Handle):
    """Pushes data to agents with little delay.

    A push is accepted in memory, and stored in the recipient's mailbox up to 200 ms later; `synced` pushes are stored
    before they are answered. Each sender may push 120 times a minute, unless the setting `ingress_pushes_per_minute`
    says otherwise; then `push` raises RateLimited, whose `retry_after_seconds` says how long to wait.
    """

    def push(
        self,
        to: str,
        topic: str,
        payload: Any,
        *,
        content_type: str | None = None,
        idempotency_key: str | None = None,
        synced: bool = False,
        sender: str | None = None,
        session_id: str | None = None,
        reply_to: str | None = None,
    ) -> Pushed:
        """Push data to an agent. Each sender may push 120 times a minute (`ingress_pushes_per_minute`).

        Args:
            payload: bytes as they are, text as UTF-8, anything else as JSON.
            content_type: by default application/octet-stream, text/plain or application/json.
            idempotency_key: a push with the same recipient, sender, topic and key is not stored again. Give one if you
                repeat pushes yourself; a fresh one by default.
            synced: return when the push is stored in the mailbox, instead of when it is accepted in memory.
            sender: the agent that pushes. With a token, its name; another one is refused. Otherwise `anybody`.
            session_id: for the topic `chat.message`, a UUIDv7.

        Raises:
            RateLimited: the sender exceeds its rate; wait for `retry_after_seconds`.
            Busy: the ingress is full, or the push could not be stored; push it again with the same key.
            MailboxFull, SenderBlocked: the recipient's mailbox refuses it. Without `synced` that may go unnoticed.
            PayloadTooLarge: the payload has more than 131,072 bytes.
            SenderMismatch: the sender is not the name of the token.
        """
        data, kind = _encoded(payload)
        return self._transport.call(
            Push(
                to,
                topic,
                kind if content_type is None else content_type,
                data,
                uuid.uuid4().hex if idempotency_key is None else idempotency_key,
                SYNCED if synced else ACCEPTED,
                sender,
                session_id,
                reply_to,
                self._universe,
            )
        )

    def push_many(
        self, pushes: Iterable[NewDataPush], *, synced: bool = False, sender: str | None = None
    ) -> list[Pushed | FastnessError]:
        """Push up to 256 times, with 1 MiB of payloads, in one request; the result or the error of each, in order.

        With `synced` they are stored in one commit. A refused push does not affect the others, except that no later one
        is accepted after one for which the ingress had no space.

        Raises:
            EmptyBatch, BatchTooLarge: there is none, or too many; nothing was accepted.
        """
        items = [_item(each) for each in checked_items(pushes, "wrap it in a list: push_many([NewDataPush(…)])")]
        request = PushMany(items, SYNCED if synced else ACCEPTED, sender, self._universe)
        return [_result(each) for each in (self._transport.call(request)).outcomes]

    def watch(
        self,
        *,
        to: str | None = None,
        topic: str | None = None,
        after: str | None = None,
        wait_seconds: float | None = None,
    ) -> "PushWatch":
        """The pushes to this universe, as they are accepted; iterate over it.

        A watch confirms nothing, and any number of them may run. It sees what its server, or this process, accepts.

        Args:
            to: only pushes to this agent.
            topic: only pushes with exactly this topic.
            after: continue at the `position` of an earlier watch; by default it begins with the `with` block, or with
                the first iteration.
            wait_seconds: end when no push arrives for this long; never by default.
        """
        return PushWatch(self._transport, self._universe, to=to, topic=topic, after=after, wait_seconds=wait_seconds)

    def on_data_push(self, callback: OnDataPush, *, to: str | None = None, topic: str | None = None) -> "PushListener":
        """Call `callback` with each push to this universe once it is accepted, until the returned listener is stopped.

        On a plane in this process it is called before the push is stored, and the push waits for it: it must be quick,
        and cannot push itself. With a server it is called in the background, as soon as this client gets to know of the
        push. An error in it is logged, and the push stays accepted.
        """
        _check_callback(callback)
        watch = self.watch(to=to, topic=topic)
        register = self._transport.on_data_push
        if register is not None:
            return PushListener(watch, register(watch.filtered(callback)))
        watch.start()
        return PushListener(watch, PushPoller(watch.read, callback).stop)

    def stats(self) -> IngressStats:
        """What the ingress of the plane's process holds now, and has counted since its start."""
        return self._transport.call(ShowIngress())


class PushWatch:
    """Pushes as they are accepted. As a context manager, it begins with the block.

    If an iteration raises, because the server does not answer for example, the next one continues where it was.
    """

    def __init__(
        self,
        transport: Transport,
        universe: str,
        *,
        to: str | None,
        topic: str | None,
        after: str | None,
        wait_seconds: float | None,
    ) -> None:
        _check_wait(wait_seconds)
        self.missed = 0  # Pushes to the universe that were forgotten before this watch has read them.
        self.restarts = 0  # How often the server was restarted; pushes in between may be missing, and are not counted.
        self._transport = transport
        self._universe = universe
        self._to = None if to is None else f"{checked_agent(to, universe)}@{universe}"
        self._topic = topic
        self._wait_seconds = wait_seconds
        self._position = after  # Up to where the iteration has got.
        self._read_to = after  # Up to where the pushes were read.
        self._unread: deque[DataPush] = deque()

    @property
    def position(self) -> str | None:
        """Where another watch continues after this one; None before it begins."""
        return self._position

    def start(self) -> None:
        """Begin now, unless it has begun."""
        if self._read_to is None:
            self._poll(0.0)
            self._position = self._read_to

    def read(self, wait_seconds: float = PUSH_WATCH_SECONDS_MAX) -> list[DataPush]:
        """The next pushes; none if there are none within `wait_seconds`, at most 20."""
        self.start()
        if not self._unread:
            self._poll(wait_seconds)
        found = list(self._unread)
        self._unread.clear()
        self._position = self._read_to
        return found

    def filtered(self, callback: OnDataPush) -> OnDataPush:
        """A callback for the pushes of all universes that calls `callback` with those that this watch would see."""

        def call_if_watched(push: DataPush) -> None:
            is_here = push.to.partition("@")[2] == self._universe
            if is_here and push.to == (self._to or push.to) and push.topic == (self._topic or push.topic):
                callback(push)

        return call_if_watched

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DataPush:
        self.start()
        left = self._wait_seconds
        while not self._unread:
            seconds = PUSH_WATCH_SECONDS_MAX if left is None else min(left, PUSH_WATCH_SECONDS_MAX)
            has_news = self._poll(seconds)
            if left is not None and not self._unread and not has_news:
                left -= seconds
                if left <= 0:
                    raise StopIteration
        push = self._unread.popleft()
        self._position = push.position if self._unread else self._read_to
        return push

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace

    def _poll(self, wait_seconds: float) -> bool:
        """Read once. Returns whether it has learned that pushes are missing."""
        request = WatchPushes(self._to, self._topic, self._read_to, PUSH_WATCH_MAX, wait_seconds, self._universe)
        seen = self._transport.call(request)
        self._read_to = seen.position
        self._unread.extend(seen.pushes)
        self.missed += seen.missed
        self.restarts += seen.restarted
        return seen.restarted or seen.missed > 0


class PushListener:
    """A registered callback. `stop` it, or use it as a context manager."""

    def __init__(self, watch: PushWatch, stop: Callable[[], None]) -> None:
        self._watch = watch
        self._stop = stop

    @property
    def missed(self) -> int:
        """How many pushes it has missed because it was slower than the pushes; 0 for a plane in this process."""
        return self._watch.missed

    @property
    def restarts(self) -> int:
        """How often the server was restarted; pushes in between may be missing, and are not counted."""
        return self._watch.restarts

    def stop(self) -> None:
        """Call the callback no more. Stopping twice is fine."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _check_callback(callback: object) -> None:
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise InvalidArgument("callback must be a plain function that takes one push; start a task from it")


def _check_wait(wait_seconds: object) -> None:
    if wait_seconds is not None and not (isinstance(wait_seconds, int | float) and wait_seconds >= 0):
        raise InvalidArgument(f"wait_seconds is {wait_seconds!r}; give 0 or more, or None to wait for ever")


def _encoded(payload: Any) -> tuple[bytes, str]:
    """A payload as bytes, and their content type."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), "application/octet-stream"
    if isinstance(payload, str):
        try:
            return payload.encode(), "text/plain"
        except UnicodeEncodeError as error:
            raise InvalidValue(f"The text of the payload is not valid Unicode ({error.reason}); push bytes") from None
    return encode_json(payload), "application/json"


def _item(new: NewDataPush) -> PushItem:
    if not isinstance(new, NewDataPush):
        raise InvalidArgument(f"A batch has pushes, not {type(new).__name__}; make each a NewDataPush")
    data, kind = _encoded(new.payload)
    return PushItem(
        new.to,
        new.topic,
        kind if new.content_type is None else new.content_type,
        data,
        uuid.uuid4().hex if new.idempotency_key is None else new.idempotency_key,
        new.session_id,
        new.reply_to,
    )


def _result(outcome: PushOutcome) -> Pushed | FastnessError:
    if outcome.pushed is not None:
        return outcome.pushed
    error = rebuild(outcome.code or "error", outcome.detail or "")
    if isinstance(error, Busy):
        error.retry_after_seconds = outcome.retry_after_seconds
    return error
