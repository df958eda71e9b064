"""Handles that write in a transaction of the caller's own database connection."""

from collections.abc import Mapping
from typing import Any

from fastness.encryption import AgentKey
from fastness.errors import rebuild
from fastness.handles.collections import AsyncCollection
from fastness.handles.entities import AsyncEntities
from fastness.handles.mailboxes import AsyncMailbox
from fastness.handles.messages import AsyncMessage
from fastness.handles.queues import AsyncQueue
from fastness.handles.receipts import new_result
from fastness.handles.runs import AsyncWorkflows
from fastness.handles.states import AsyncState
from fastness.handles.worlds import AsyncWorld
from fastness.wire import AsyncTransport
from fastness.wire.queues import AckMessages, NewResult


class AsyncWithin:
    """Writes that become visible with the caller's commit, and vanish with its rollback.

    Handles have the methods that they have on the plane. Those that cannot be part of a transaction, such as `receive`
    and everything that waits, raise NotTransactional. A `tier` has no effect: the durability is that of the caller's
    commit.
    """

    def __init__(self, transport: AsyncTransport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
        self.entities = AsyncEntities(transport, universe)
        self.workflows = AsyncWorkflows(transport, universe)

    def queue(self, name: str) -> AsyncQueue:
        """The queue of that name: put messages into it."""
        return AsyncQueue(self._transport, self._universe, name)

    def mailbox(
        self, agent: str, *, key: AgentKey | None = None, contacts: Mapping[str, bytes] | None = None
    ) -> AsyncMailbox:
        """The mailbox of an agent: send mail from it, or confirm mail."""
        return AsyncMailbox(self._transport, self._universe, agent, key=key, contacts=contacts)

    def world(self, name: str, *, incarnation: int | None = None) -> AsyncWorld:
        """The world of that name: append to it, or put items into its inbox."""
        return AsyncWorld(self._transport, self._universe, name, incarnation=incarnation)

    def state(self, key: str) -> AsyncState:
        """The state document of that key: read, update or remove it."""
        return AsyncState(self._transport, self._universe, key)

    def collection(self, name: str) -> AsyncCollection:
        """The collection of rows of that name: get and scan rows, or commit changes."""
        return AsyncCollection(self._transport, self._universe, name)

    async def ack(self, message: AsyncMessage, *, result: Any = None) -> None:
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
            results.append(await new_result(self._transport, self._universe, result))
        request = AckMessages(message.queue, [message.lease], message.universe, results=results)
        outcome = (await self._transport.call(request)).outcomes[0]
        if outcome.code is not None:
            raise rebuild(outcome.code, outcome.detail or outcome.code)
