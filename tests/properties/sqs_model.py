"""A plain model of SQS, written from its documentation: lists of messages, a clock, and the rules of each call.

It has no keys, leases or records. Where the documentation leaves a choice, the model makes the one that Fastness
promises: a receive returns as many messages as it can, the oldest first, and within a FIFO queue the groups with the
oldest first message first, each with as many messages as fit.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Final

DEDUPLICATION_MS: Final = 300_000
HIDDEN_MS: Final = 43_200_000
PURGE_MS: Final = 60_000
RECREATION_MS: Final = 60_000


class Refused(Exception):
    """A call that SQS refuses, with the code of its error."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(eq=False)
class Message:
    """A message of the model."""

    id: str
    body: str
    group: str | None
    sent_ms: int
    order: int
    visible_ms: int  # The end of its delay, or of its visibility timeout.
    receives: int = 0
    first_received_ms: int | None = None
    handles: dict[str, int] = field(default_factory=dict)  # Of its receives, with their times; the last one counts.
    is_dead: bool = False  # A dead letter. Those of Fastness do not wait for others of their group.
    is_in_flight: bool = False  # It was received, and neither deleted nor returned. Its timeout may have ended.


@dataclass
class Queue:
    """A queue of the model. Attributes are numbers of seconds, or what the documentation says."""

    name: str
    created_ms: int
    visibility: int = 30
    delay: int = 0
    retention: int = 345_600
    content_based: bool = False
    by_group: bool = False  # DeduplicationScope=messageGroup.
    receives_max: int | None = None
    dead_letter_queue: str | None = None
    messages: list[Message] = field(default_factory=list)
    sent: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)  # Deduplication id to time and message.
    purged_ms: int = -PURGE_MS
    expired: int = 0  # Messages that reached the end of the retention. Counts may include them for a while.

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(".fifo")

    def in_order(self) -> list[Message]:
        return sorted(self.messages, key=lambda message: message.order)


@dataclass(frozen=True)
class Counts:
    """The three approximate counts of a queue."""

    visible: int
    in_flight: int
    delayed: int


class SqsModel:
    """The queues of one universe."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.queues: dict[str, Queue] = {}
        self.deleted_ms: dict[str, int] = {}
        self._order = 0

    # Queues.

    def create(self, queue: Queue) -> None:
        """Create a queue whose attributes are all given."""
        if self.now_ms < self.deleted_ms.get(queue.name, -RECREATION_MS) + RECREATION_MS:
            raise Refused("QueueDeletedRecently")
        existing = self.queues.get(queue.name)
        if existing is None:
            self.queues[queue.name] = queue
        elif _attributes(existing) != _attributes(queue):
            raise Refused("QueueNameExists")

    def delete_queue(self, name: str) -> None:
        self._queue(name)
        del self.queues[name]
        self.deleted_ms[name] = self.now_ms

    def purge(self, name: str) -> None:
        queue = self._queue(name)
        if self.now_ms < queue.purged_ms + PURGE_MS:
            raise Refused("PurgeQueueInProgress")
        queue.purged_ms = self.now_ms
        queue.messages.clear()
        queue.sent.clear()
        queue.expired = 0

    def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.queues if name.startswith(prefix))

    def counts(self, name: str) -> Counts:
        queue = self._queue(name)
        in_flight = sum(self._is_invisible(message) for message in queue.messages)
        delayed = sum(not message.is_in_flight and message.visible_ms > self.now_ms for message in queue.messages)
        return Counts(len(queue.messages) - in_flight - delayed, in_flight, delayed)

    # Messages.

    def is_duplicate(self, name: str, body: str, group: str | None, deduplication: str | None) -> str | None:
        """The id of the message that a send repeats; None if it is a new one."""
        queue = self._queue(name)
        if not queue.is_fifo:
            return None
        key = self._deduplication_key(queue, body, group, deduplication)
        sent = queue.sent.get(key)
        return sent[1] if sent is not None and self.now_ms < sent[0] + DEDUPLICATION_MS else None

    def send(
        self, name: str, id: str, body: str, *, delay: int | None, group: str | None, deduplication: str | None
    ) -> None:
        """Send a new message, which got this id."""
        queue = self._queue(name)
        self._order += 1
        seconds = queue.delay if delay is None else delay
        queue.messages.append(
            Message(id, body, group, self.now_ms, self._order, visible_ms=self.now_ms + seconds * 1_000)
        )
        if queue.is_fifo:
            queue.sent[self._deduplication_key(queue, body, group, deduplication)] = (self.now_ms, id)

    def receive(self, name: str, count: int, visibility: int | None) -> list[Message]:
        """The messages that a receive returns. The caller sets their handles."""
        queue = self._queue(name)
        received: list[Message] = []
        available = self._available(queue)
        target = self.queues.get(queue.dead_letter_queue or "")
        while available and len(received) < count:
            messages = min(available, key=lambda messages: messages[0].order)
            is_last = queue.receives_max is not None and messages[0].receives >= queue.receives_max
            if is_last and target is not None:  # It stays while its dead-letter queue does not exist.
                self._dead_letter(queue, messages.pop(0), target)
            else:
                received += messages[: count - len(received)]
                messages.clear()
            available = [messages for messages in available if messages]
        seconds = queue.visibility if visibility is None else visibility
        for message in received:
            message.receives += 1
            if message.first_received_ms is None:
                message.first_received_ms = self.now_ms
            message.visible_ms, message.is_in_flight = self.now_ms + seconds * 1_000, True
        return received

    def delete(self, name: str, handle: str) -> None:
        """Delete a message. An older handle, or that of a deleted message, is accepted without an effect."""
        queue = self._queue(name)
        message = self._by_handle(queue, handle)
        if message is None:
            return
        if queue.is_fifo and not self._is_invisible(message):
            raise Refused("InvalidParameterValue")
        queue.messages.remove(message)

    def has_handle(self, name: str, handle: str) -> bool:
        """Whether a handle is the last one of a message."""
        return self._by_handle(self._queue(name), handle) is not None

    def change_visibility(self, name: str, handle: str, seconds: int) -> None:
        """Hide a message, also one that is visible again. An older handle is accepted without an effect.

        The time from the receive of the handle to the end of the new timeout is at most 12 hours.
        """
        queue = self._queue(name)
        received_ms = next((each.handles[handle] for each in queue.messages if handle in each.handles), None)
        if received_ms is None or self.now_ms + seconds * 1_000 > received_ms + HIDDEN_MS:
            raise Refused("InvalidParameterValue")
        message = self._by_handle(queue, handle)
        if message is not None:
            message.visible_ms = self.now_ms + seconds * 1_000

    def advance(self, ms: int) -> None:
        """Move the clock, and forget the messages that are older than the retention of their queues."""
        self.now_ms += ms
        for queue in self.queues.values():
            self.expire(queue)

    def expire(self, queue: Queue) -> None:
        kept = [message for message in queue.messages if self.now_ms < message.sent_ms + queue.retention * 1_000]
        queue.expired += len(queue.messages) - len(kept)
        queue.messages = kept

    # Rules.

    def _available(self, queue: Queue) -> list[list[Message]]:
        """The messages that may be delivered: of a FIFO queue by group, else each by itself."""
        alone = [message for message in queue.in_order() if message.is_dead or not queue.is_fifo]
        available = [[message] for message in alone if message.visible_ms <= self.now_ms]
        groups: dict[str, list[Message]] = {}
        for message in queue.in_order():
            if message not in alone:
                assert message.group is not None
                groups.setdefault(message.group, []).append(message)
        for messages in groups.values():
            ready = []
            for message in messages:  # One that is delayed or in flight blocks the later ones of its group.
                if message.visible_ms > self.now_ms:
                    break
                ready.append(message)
            if ready:
                available.append(ready)
        return available

    def _is_invisible(self, message: Message) -> bool:
        return message.is_in_flight and message.visible_ms > self.now_ms

    def _dead_letter(self, queue: Queue, message: Message, target: Queue) -> None:
        queue.messages.remove(message)
        message.is_in_flight, message.receives, message.is_dead = False, 0, True
        message.handles.clear()
        message.visible_ms = self.now_ms
        if target.is_fifo:
            message.sent_ms = self.now_ms
        target.messages.append(message)
        self.expire(target)

    def _by_handle(self, queue: Queue, handle: str) -> Message | None:
        return next((message for message in queue.messages if [*message.handles][-1:] == [handle]), None)

    def _queue(self, name: str) -> Queue:
        if name not in self.queues:
            raise Refused("QueueDoesNotExist")
        return self.queues[name]

    @staticmethod
    def _deduplication_key(queue: Queue, body: str, group: str | None, deduplication: str | None) -> tuple[str, str]:
        if deduplication is None:
            if not queue.content_based:
                raise Refused("InvalidParameterValue")
            deduplication = hashlib.sha256(body.encode()).hexdigest()
        return (group or "" if queue.by_group else "", deduplication)


def _attributes(queue: Queue) -> tuple[object, ...]:
    return (
        queue.visibility,
        queue.delay,
        queue.retention,
        queue.content_based,
        queue.by_group,
        queue.receives_max,
        queue.dead_letter_queue,
    )
