"""Generated from handles/atomic.py by tools/make_twins.py; change that file instead."""

from collections.abc import Iterable, Mapping
from typing import Any, Self, Unpack

import msgspec

from fastness.errors import InvalidArgument
from fastness.handles.arguments import checked_items, checked_map
from fastness.handles.failed_attempts import nack_request, reject_request
from fastness.handles.sync.collections import Collection
from fastness.handles.sync.leases import Lease
from fastness.handles.sync.mailboxes import Mailbox
from fastness.handles.sync.messages import Message
from fastness.handles.sync.queues import MessageOptions, Queue, new_message, payload_of, stored_messages
from fastness.handles.sync.receipts import encoded_result, stored_result
from fastness.handles.sync.runs import with_stored_arguments, with_stored_value
from fastness.handles.sync.states import State
from fastness.handles.sync.worlds import World
from fastness.handles.workflow_types import WorkflowLike, encoded_arguments, name_of
from fastness.tiers import Tier
from fastness.wire import Transport
from fastness.wire.atomic import CommitAtomic, Step
from fastness.wire.canonical import canonical
from fastness.wire.collections import CommitRows, RowChange
from fastness.wire.entities import EntityWrite, WriteEntities
from fastness.wire.inboxes import InboxItem
from fastness.wire.leases import CheckLease
from fastness.wire.locks import CheckLock
from fastness.wire.mail import ConfirmMail, Envelope, NewMail, SendMail
from fastness.wire.queues import AckMessages, CheckMessages, NewMessage, NewResult, PutMessages
from fastness.wire.requests import Committed
from fastness.wire.run_values import encode_value
from fastness.wire.runs import SignalRun, StartRun
from fastness.wire.states import RemoveState, UpdateState
from fastness.wire.transport import ProvenLock
from fastness.wire.worlds import AppendEntries, PutItem


class Atomic:
    """A list of operations. Each call adds one; `commit` executes them in one transaction.

    await plane.atomic().ack(message).put(done, {"n": 1}).check(lease).commit()
    """

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
        self._steps: list[Step] = []
        self._messages: list[Message] = []
        self._locks: list[ProvenLock] = []
        self._checked_here: list[int] = []  # The positions of locks of this process, which the plane does not know.

    def put(self, queue: Queue, body: Any, **options: Unpack[MessageOptions]) -> Self:
        """Put a message, with the options of `queue.put`. `commit` stores a large payload as a blob first."""
        return self.put_many(queue, [new_message(body, **options)])

    def put_many(self, queue: Queue, messages: Iterable[NewMessage]) -> Self:
        """Put up to 256 messages into a queue, each with its own options."""
        found = checked_items(messages, "wrap it in a list: put_many(queue, [message])")
        return self._add(PutMessages(queue.name, list(found), self._universe))

    def ack(self, message: Message, *, result: Any = None) -> Self:
        """Acknowledge a message, with a result that is kept as `message.ack` does.

        An ack that is repeated succeeds. Call `check(message)` as well if the rest of the list must not be repeated.
        """
        self._messages.append(message)
        results: list[NewResult | None] = [] if result is None else [encoded_result(result)]
        return self._add(AckMessages(message.queue, [message.lease], self._universe, results=results))

    def nack(
        self,
        message: Message,
        *,
        delay_seconds: float | None = None,
        error: str | BaseException | None = None,
    ) -> Self:
        """Nack a message: it is delivered again after the delay, by default the back-off of the queue's policy."""
        self._messages.append(message)
        return self._add(
            nack_request(message.queue, [message.lease], self._universe, error, delay_seconds=delay_seconds)
        )

    def reject(self, message: Message, error: str | BaseException | None = None) -> Self:
        """Send a message to the dead letters."""
        self._messages.append(message)
        return self._add(reject_request(message.queue, [message.lease], self._universe, error))

    def send(
        self,
        mailbox: Mailbox,
        to: str,
        body: Any,
        *,
        id: str | None = None,
        content_type: str | None = None,
        correlation_id: str | None = None,
    ) -> Self:
        """Send a mail from a mailbox."""
        payload, kind = payload_of(body)
        mail = NewMail(to, payload, id, content_type or kind, correlation_id)
        return self._add(SendMail(mailbox.agent, [mail], self._universe))

    def confirm(self, mailbox: Mailbox, mail: Envelope) -> Self:
        """Confirm a mail. The commit fails if the mail was confirmed before, so its work is done once."""
        return self._add(ConfirmMail(mailbox.agent, [mail.id], self._universe))

    def append(self, world: World, entries: Iterable[Any], *, expected_head: int) -> Self:
        """Append entries to a world's journal."""
        found = checked_items(entries, "wrap it in a list: append(world, [entry], …)")
        encoded = [canonical(entry) for entry in found]
        return self._add(AppendEntries(world.name, encoded, expected_head, self._universe, world.incarnation))

    def deliver(self, world: World, item: InboxItem) -> Self:
        """Put an item into a world's inbox. Store a payload over 4 KiB as a blob first."""
        return self._add(PutItem(world.name, item, self._universe, world.incarnation))

    def update(
        self,
        state: State,
        value: Any,
        *,
        lease: Lease | None = None,
        if_match: str | None = None,
        if_absent: bool = False,
    ) -> Self:
        """Write a state document, with the conditions of `state.update`."""
        proof = None if lease is None else lease.proof
        encoded = canonical(value)
        return self._add(UpdateState(state.key, encoded, proof, if_match, if_absent, universe=self._universe))

    def remove(self, state: State, *, lease: Lease | None = None, if_match: str | None = None) -> Self:
        """Remove a state document."""
        proof = None if lease is None else lease.proof
        return self._add(RemoveState(state.key, proof, if_match, self._universe))

    def write(self, kind: str, id: str, fields: Mapping[str, Any]) -> Self:
        """Set fields of an entity."""
        encoded = {field: canonical(value) for field, value in checked_map("fields", fields).items()}
        return self._add(WriteEntities([EntityWrite(kind, id, encoded)], universe=self._universe))

    def rows(self, collection: Collection, changes: Iterable[RowChange]) -> Self:
        """Write and delete rows of a collection, as `collection.commit` does."""
        found = checked_items(changes, "wrap it in a list: rows(collection, [change])")
        return self._add(CommitRows(collection.name, list(found), self._universe))

    def start_run(self, workflow: WorkflowLike | str, /, *args: Any, id: str | None = None, **kwargs: Any) -> Self:
        """Start a run of a workflow, as `workflows.start` does."""
        arguments = encoded_arguments(workflow, args, kwargs)
        return self._add(StartRun(name_of(workflow), id, arguments, universe=self._universe))

    def signal_run(self, id: str, name: str, value: Any = None) -> Self:
        """Send a signal to a run."""
        return self._add(SignalRun(id, name, encode_value(value, f"The value of signal {name}"), self._universe))

    def check(self, held: Lease | Message | ProvenLock) -> Self:
        """Commit only if the lease or the locks are still held; of a message, only if it is leased and not settled."""
        if isinstance(held, Message):
            return self._add(CheckMessages(held.queue, [held.lease], self._universe))
        if isinstance(held, Lease):
            return self._add(CheckLease(held.proof))
        self._locks.append(held)
        if held.proof is not None:
            return self._add(CheckLock(held.proof))
        self._checked_here.append(len(self._steps) + len(self._checked_here))
        return self

    def commit(self, *, tier: Tier = Tier.CRITICAL) -> list[Any]:
        """Execute everything; the answers, in order.

        Raises:
            FastnessError: the error of the first operation that fails; nothing was written.
        """
        if not self._steps and not self._checked_here:
            raise InvalidArgument("The commit has no operations; add at least one")
        steps = [msgspec.structs.replace(self._with_blobs(step), tier=tier) for step in self._steps]
        if any(isinstance(step, WriteEntities) for step in steps):
            lock_session = self._transport.lock_sessions.find_id(self._universe)
            steps = [
                msgspec.structs.replace(step, lock_session=lock_session) if isinstance(step, WriteEntities) else step
                for step in steps
            ]
        for held in self._locks:
            held.check()
        answers: list[Any] = []
        if steps:
            answers = (self._transport.call(CommitAtomic(steps, tier=tier))).answers
        for position in self._checked_here:
            answers.insert(position, Committed(tier))
        for message in self._messages:
            message.mark_settled()
        return answers

    def _with_blobs(self, step: Step) -> Step:
        """The operation, with large payloads and results stored as blobs."""
        transport, universe = self._transport, self._universe
        if isinstance(step, PutMessages):
            messages = stored_messages(transport, universe, step.messages)
            return msgspec.structs.replace(step, messages=messages)
        if isinstance(step, AckMessages) and step.results:
            results = [each and stored_result(transport, universe, each) for each in step.results]
            return msgspec.structs.replace(step, results=results)
        if isinstance(step, StartRun):
            return with_stored_arguments(transport, universe, step)
        if isinstance(step, SignalRun):
            return with_stored_value(transport, universe, step)
        return step

    def _add(self, step: Step) -> Self:
        self._steps.append(step)
        return self
