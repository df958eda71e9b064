"""Generated from handles/within.py by tools/make_twins.py; change that file instead."""

from collections.abc import Mapping
from typing import Any

from fastness.encryption import AgentKey
from fastness.errors import rebuild
from fastness.handles.sync.collections import Collection
from fastness.handles.sync.entities import Entities
from fastness.handles.sync.mailboxes import Mailbox
from fastness.handles.sync.messages import Message
from fastness.handles.sync.queues import Queue
from fastness.handles.sync.receipts import new_result
from fastness.handles.sync.runs import Workflows
from fastness.handles.sync.states import State
from fastness.handles.sync.worlds import World
from fastness.wire import Transport
from fastness.wire.queues import AckMessages, NewResult


class Within:
    """Writes that become visible with the caller's commit, and vanish with its rollback.

    Handles have the methods that they have on the plane. Those that cannot be part of a transaction, such as `receive`
    and everything that waits, raise NotTransactional. A `tier` has no effect: the durability is that of the caller's
    commit.
    """

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
        self.entities = Entities(transport, universe)
        self.workflows = Workflows(transport, universe)

    def queue(self, name: str) -> Queue:
        """The queue of that name: put messages into it."""
        return Queue(self._transport, self._universe, name)

    def mailbox(
        self, agent: str, *, key: AgentKey | None = None, contacts: Mapping[str, bytes] | None = None
    ) -> Mailbox:
        """The mailbox of an agent: send mail from it, or confirm mail."""
        return Mailbox(self._transport, self._universe, agent, key=key, contacts=contacts)

    def world(self, name: str, *, incarnation: int | None = None) -> World:
        """The world of that name: append to it, or put items into its inbox."""
        return World(self._transport, self._universe, name, incarnation=incarnation)

    def state(self, key: str) -> State:
        """The state document of that key: read, update or remove it."""
        return State(self._transport, self._universe, key)

    def collection(self, name: str) -> Collection:
        """The collection of rows of that name: get and scan rows, or commit changes."""
        return Collection(self._transport, self._universe, name)

    def ack(self, message: Message, *, result: Any = None) -> None:
        """Acknowledge a message that was received before, with a result that is kept as `message.ack` does.

        The message is not marked as settled, because the transaction may still be rolled back. In a `with message`
        block around the transaction, a rollback with an exception returns the message, and a commit is followed by a
        second ack, which does no harm.

        Raises:
            QueueMessageLeaseMismatch: its lease has ended, and another consumer may have it. Roll back.
            MessageCancelled: it was cancelled. Roll back.
        """
        results: list[NewResult | None] = []
        if result is not None:
            results.append(new_result(self._transport, self._universe, result))
        request = AckMessages(message.queue, [message.lease], message.universe, results=results)
        outcome = (self._transport.call(request)).outcomes[0]
        if outcome.code is not None:
            raise rebuild(outcome.code, outcome.detail or outcome.code)
