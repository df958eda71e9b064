"""A turn of a program: what its events have emitted, as the parts of one commit."""

import hashlib

import msgspec

from fastness.handles.queues import stored_messages
from fastness.hosts.hosted_world import HostedWorld
from fastness.hosts.programs import (
    Emitted,
    EmittedEvent,
    EmittedMail,
    EmittedMessage,
    EmittedState,
    address_of,
    intent_hash,
)
from fastness.limits import EMITTED_BYTES_MAX, EMITTED_MAX, INBOX_INLINE_BYTES_MAX
from fastness.wire.atomic import Step
from fastness.wire.blobs import PutBlob
from fastness.wire.inboxes import Effect, Timer
from fastness.wire.mail import NewMail, SendMail
from fastness.wire.queues import NewMessage, PutMessages
from fastness.wire.states import UpdateState
from fastness.wire.worlds import PutItem


class Turn:
    """Collects what the events of a turn emit, in their order."""

    def __init__(self, world: HostedWorld) -> None:
        self.effects: list[tuple[int, Effect]] = []
        self._world = world
        self._prefix = intent_prefix(world)
        self._timers: dict[str, tuple[int, Timer | None]] = {}
        self._operations = 0
        self._bytes = 0
        self._events: list[EmittedEvent] = []
        self._messages: dict[str, list[NewMessage]] = {}
        self._mails: dict[str, list[NewMail]] = {}
        self._states: dict[str, bytes] = {}

    @property
    def is_full(self) -> bool:
        """Whether the next event belongs to another turn: what it may emit would not fit this one."""
        most = max(self._operations, len(self.effects), len(self._timers))
        return most > EMITTED_MAX or self._bytes > EMITTED_BYTES_MAX

    @property
    def timers(self) -> list[tuple[int, Timer]]:
        """The timers that are set, each with its record. Of several with one name, the last one counts."""
        return [(record, timer) for record, timer in self._timers.values() if timer is not None]

    @property
    def cancelled_timers(self) -> list[bytes]:
        """The intent hashes of timers that are cancelled."""
        return [name.encode() for name, (_, timer) in self._timers.items() if timer is None]

    def add(self, record: int, height: int, emitted: Emitted) -> None:
        """Add what the event of a record has emitted; `record` counts from the first one of the turn."""
        for number, call in enumerate(emitted.calls):
            hashed = intent_hash(self._prefix, height, number)
            self.effects.append((record, msgspec.structs.replace(call, intent_hash=hashed)))
            self._bytes += len(call.params)
        for name, timer in emitted.timers.items():
            self._timers[name] = (record, timer)
        for operation in emitted.operations:
            self._operations += 1
            match operation:
                case EmittedEvent():
                    self._events.append(operation)
                    self._bytes += len(operation.event.payload)
                case EmittedMessage():
                    self._messages.setdefault(operation.queue, []).append(operation.message)
                    self._bytes += len(operation.message.payload)
                case EmittedMail():
                    self._mails.setdefault(operation.sender or self._world.name, []).append(operation.mail)
                    self._bytes += len(operation.mail.body)
                case EmittedState():
                    self._states[operation.key or f"worlds/{self._world.name}"] = operation.value
                    self._bytes += len(operation.value)

    async def operations(self) -> list[Step]:
        """The operations within the plane. Large payloads are stored as blobs first."""
        transport, universe = self._world.transport, self._world.universe
        found: list[Step] = []
        for event in self._events:
            (world, home), item = address_of(event.world), event.event
            if home is not None and home != universe:
                found.append(self._world.send_request(world, home, item))
                continue
            if len(item.payload) > INBOX_INLINE_BYTES_MAX:
                blob = (await transport.call(PutBlob(item.payload, universe, pinned=False))).hash
                item = msgspec.structs.replace(item, payload=b"", payload_blob=blob)
            found.append(PutItem(world, item, universe))
        for queue, messages in self._messages.items():
            found.append(PutMessages(queue, await stored_messages(transport, universe, messages), universe))
        found += [SendMail(sender, mails, universe) for sender, mails in self._mails.items()]
        found += [UpdateState(key, value, universe=universe) for key, value in self._states.items()]
        return found


def intent_prefix(world: HostedWorld) -> bytes:
    """The first half of the intent hashes of a world's effects."""
    named = "\x00".join((world.universe, world.name, str(world.incarnation)))
    return hashlib.sha256(named.encode()).digest()[:16]
