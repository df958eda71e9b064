"""Generated from handles/atomic.py by tools/make_twins.py; change that file instead."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.handles.sync.leases import Lease
from holdfast.handles.sync.mailboxes import Mailbox
from holdfast.handles.sync.messages import Message
from holdfast.handles.sync.queues import Queue, payload_of
from holdfast.handles.sync.states import State
from holdfast.handles.sync.worlds import World
from holdfast.tiers import Tier
from holdfast.wire import Transport
from holdfast.wire.atomic import CommitAtomic, Step
from holdfast.wire.canonical import canonical
from holdfast.wire.entities import EntityWrite, WriteEntities
from holdfast.wire.inboxes import InboxItem
from holdfast.wire.leases import CheckLease
from holdfast.wire.mail import ConfirmMail, Envelope, NewMail, SendMail
from holdfast.wire.queues import AckMessages, NackMessages, NewMessage, PutMessages, RejectMessages
from holdfast.wire.states import RemoveState, UpdateState
from holdfast.wire.worlds import AppendEntries, PutItem


class Atomic:
    """A list of operations. Each call adds one; `commit` carries all of them out as one transaction.

    await plane.atomic().ack(message).put(done, {"n": 1}).check(lease).commit()
    """

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
        self._steps: list[Step] = []
        self._messages: list[Message] = []

    def put(self, queue: Queue, body: Any, **options: Any) -> Self:
        """Put a message; `options` are those of a `NewMessage`."""
        payload, kind = payload_of(body)
        message = NewMessage(payload=payload, **{"content_type": kind, **options})
        return self._add(PutMessages(queue.name, [message], self._universe))

    def ack(self, message: Message) -> Self:
        """Acknowledge a message."""
        self._messages.append(message)
        return self._add(AckMessages(message.queue, [message.lease], self._universe))

    def nack(self, message: Message, *, delay_seconds: float = 0.0, error: str | None = None) -> Self:
        """Give a message back."""
        self._messages.append(message)
        request = NackMessages(message.queue, [message.lease], delay_seconds, "failure", error, self._universe)
        return self._add(request)

    def reject(self, message: Message, error: str | None = None) -> Self:
        """Send a message to the dead letters."""
        self._messages.append(message)
        return self._add(RejectMessages(message.queue, [message.lease], error, self._universe))

    def send(self, mailbox: Mailbox, to: str, body: Any, **options: Any) -> Self:
        """Send a mail from a mailbox; `options` are those of a `NewMail`."""
        payload, kind = payload_of(body)
        mail = NewMail(to, payload, **{"content_type": kind, **options})
        return self._add(SendMail(mailbox.agent, [mail], self._universe))

    def confirm(self, mailbox: Mailbox, mail: Envelope) -> Self:
        """Confirm a mail: what it asked for is part of this commit, which fails if the mail is gone already."""
        return self._add(ConfirmMail(mailbox.agent, [mail.id], self._universe))

    def append(self, world: World, entries: Sequence[Any], *, expected_head: int) -> Self:
        """Append entries to a world's journal."""
        encoded = [canonical(entry) for entry in entries]
        return self._add(AppendEntries(world.name, encoded, expected_head, self._universe))

    def deliver(self, world: World, item: InboxItem) -> Self:
        """Put an item into a world's inbox. A payload that does not fit must be stored as a blob before."""
        return self._add(PutItem(world.name, item, self._universe))

    def update(self, state: State, value: Any, *, lease: Lease | None = None, if_match: str | None = None) -> Self:
        """Write a state document."""
        proof = None if lease is None else lease.proof
        encoded = canonical(value)
        return self._add(UpdateState(state.key, encoded, proof, if_match, universe=self._universe))

    def remove(self, state: State, *, lease: Lease | None = None, if_match: str | None = None) -> Self:
        """Remove a state document."""
        proof = None if lease is None else lease.proof
        return self._add(RemoveState(state.key, proof, if_match, self._universe))

    def write(self, kind: str, id: str, fields: Mapping[str, Any]) -> Self:
        """Set fields of an entity."""
        encoded = {field: canonical(value) for field, value in fields.items()}
        return self._add(WriteEntities([EntityWrite(kind, id, encoded)], universe=self._universe))

    def check(self, lease: Lease) -> Self:
        """Let all of it happen only while the lease holds."""
        return self._add(CheckLease(lease.proof))

    def commit(self, *, tier: Tier = Tier.CRITICAL) -> list[Any]:
        """Carry everything out; the answers, in order.

        Raises:
            HoldfastError: whatever the first operation that fails raises; nothing was written then.
        """
        if not self._steps:
            raise InvalidArgument("There is nothing to commit; add operations first")
        steps = [msgspec.structs.replace(step, tier=tier) for step in self._steps]
        answers = (self._transport.call(CommitAtomic(steps, tier=tier))).answers
        for message in self._messages:
            message.settle_elsewhere()
        return answers

    def _add(self, step: Step) -> Self:
        self._steps.append(step)
        return self
