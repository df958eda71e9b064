"""The dispatcher: the consumers of a queue wait in a FIFO line, and receive messages in that order.

    receive ──► a message is ready? ──► leased
                      │ no
                      ▼
               in line ──► front of the line ──► waits for a put, a nack, or the next due time ──► leased

Only the consumer at the front reads the queue; when it has received messages it leaves, and the next one reads
immediately. On an embedded store with more ready messages, the next consumer reads as soon as the delivery is
committed: consecutive deliveries share a sync, and do not wait for each other's. A queue without waiting consumers
costs nothing, an embedded store is never polled, and queues do not wait for each other. The consumers of all queues
together are bounded.

Where several nodes share a PostgreSQL database, notifications of the other nodes' commits wake the front consumer, and
a poll every few seconds covers lost notifications. There the consumers of a line share what the last one has read: one
that reaches the front of the line of an empty queue does not read it again until something was added (`SharedLine`).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, Required, TypedDict, Unpack

from fastness.clock import Clock, SystemClock
from fastness.errors import LockTimeout
from fastness.kv import Database, Transaction
from fastness.kv.serial_database import SerialDatabase
from fastness.layers import queues
from fastness.layers.idempotency import KeyedCall
from fastness.layers.queues import Leased, LeaseOptions, Prefetched, QueueKey
from fastness.runtime.cancellation import finish_or_undo_async
from fastness.runtime.commit_waits import AsyncCommitWaits
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.locks.table import LockTable
from fastness.runtime.waiting_consumers import SharedLine, SharedLines, WaitingConsumers
from fastness.tiers import Tier
from fastness.wire.queues import PackedAck, RefusedAck

_PREFETCHED_QUEUES_MAX: Final = 1_024  # Queues with prefetched messages; others pay a scan for each delivery.


class Durability(TypedDict, total=False):
    """What a delivery waits for, as options of a transaction."""

    tier: Required[Tier]
    may_lose: bool


_DEFAULT: Final = Durability(tier=Tier.CRITICAL, may_lose=True)


class AsyncDispatcher:
    """Leases messages to consumers, immediately or after a wait."""

    def __init__(
        self,
        database: Database,
        clock: Clock | None,
        options: ConsumerOptions,
        waiting: WaitingConsumers | None = None,
    ) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._waits = AsyncCommitWaits(database, clock, options)
        self._is_serial = isinstance(database, SerialDatabase)  # Transactions run once, one at a time.
        self._waiting = waiting or WaitingConsumers(options.consumers_max)
        self._lines = LockTable(("queue",), nested=False, waiters_max=self._waiting.limit)
        self._shared_lines = SharedLines(database)
        self._prefetched: OrderedDict[QueueKey, Prefetched] = OrderedDict()

    async def receive(
        self,
        queue: QueueKey,
        *,
        wait_ms: int,
        tier: Tier | None,
        call: KeyedCall | None = None,
        acks: Sequence[PackedAck] = (),
        **options: Unpack[LeaseOptions],
    ) -> Leased:
        """At least one message, unless `wait_ms` pass without any; or what `call` has already leased.

        `acks` are committed with the lease. If the caller has to wait, they are committed first, and as durable.

        With the tier None, the messages are as durable as their puts, and a power failure may undo the delivery: they
        are delivered again then, with higher fences, and `call` is not known. `acks` are never undone.

        Raises:
            QueueBusy: `consumers_max` consumers are already waiting, for this queue or others.
            QueueNotFound: `must_exist` is set, and the queue does not exist, or is deleted while the caller waits.
        """
        durability = _DEFAULT if tier is None else Durability(tier=tier)
        if not wait_ms:
            return await self._lease(queue, durability, call, options, acks=acks)
        with nullcontext() if self._is_serial else self._shared_lines.join(queue) as shared:
            return await self._receive_or_wait(
                queue, durability, call, options, wait_ms=wait_ms, acks=acks, shared=shared
            )

    def waiting(self, queue: QueueKey) -> int:
        """The number of consumers of this process that wait for messages of a queue."""
        return self._lines.line_length(["queue", "/".join(queue)])

    async def _receive_or_wait(
        self,
        queue: QueueKey,
        durability: Durability,
        call: KeyedCall | None,
        options: LeaseOptions,
        *,
        wait_ms: int,
        acks: Sequence[PackedAck],
        shared: SharedLine | None,
    ) -> Leased:
        refused: list[RefusedAck] | None = None
        line = ["queue", "/".join(queue)]
        if not self._lines.line_length(line):
            version = 0 if shared is None else shared.version
            leased = await self._lease(queue, durability, call, options, acks=acks)
            if shared is not None:
                shared.note_read(leased, self._clock.now_ms(), version)
            if leased.leases or leased.repeated:
                return leased
            refused = leased.refused if acks else None
        elif call is not None and not call.is_new_call():
            # A repeated call need not wait for messages that it already has.
            before = await self._database.transact_async(
                queues.stored_lease, queue, call=call, with_state=options.get("with_state", False), **durability
            )
            if before is not None:
                return before
        if acks and refused is None:
            refused = await self._database.transact_async(
                queues.ack_keyed, queue, call=call, acks=acks, tier=durability["tier"]
            )
        until_ms = self._clock.now_ms() + wait_ms
        with self._waiting.one_more():
            try:
                front = await self._lines.acquire_async(line, timeout_seconds=wait_ms / 1_000)
            except LockTimeout:
                leased = Leased([])
                leased.refused = refused or []
                return leased
            with front:
                if shared is not None:
                    return await self._wait_at_shared_front(
                        queue, until_ms, durability, call, options, line=shared, refused=refused
                    )
                return await self._wait_at_front(
                    queue, until_ms, durability, call, options, leave_line=front.release, refused=refused
                )

    async def _wait_at_front(
        self,
        queue: QueueKey,
        until_ms: int,
        durability: Durability,
        call: KeyedCall | None,
        options: LeaseOptions,
        *,
        leave_line: Callable[[], None],
        refused: list[RefusedAck] | None,
    ) -> Leased:
        with self._waits.open(queues.keys_of(queue).prefix, until_ms=until_ms) as wait:
            while True:
                leased = await self._lease(queue, durability, call, options, leave_line, refused=refused)
                if leased.leases or leased.repeated or wait.is_over:
                    return leased
                await wait.pause(leased.retry_in_ms)

    async def _wait_at_shared_front(
        self,
        queue: QueueKey,
        until_ms: int,
        durability: Durability,
        call: KeyedCall | None,
        options: LeaseOptions,
        *,
        line: SharedLine,
        refused: list[RefusedAck] | None,
    ) -> Leased:
        with self._waits.join(line.watch, until_ms=until_ms) as wait:
            while True:
                wait_ms = line.wait_ms(self._clock.now_ms())
                if wait_ms > 0 and not wait.is_over:
                    await wait.pause(wait_ms)
                    line.note_change()
                version = line.version
                leased = await self._lease(queue, durability, call, options, refused=refused)
                now_ms = self._clock.now_ms()
                line.note_read(leased, now_ms, version)
                if leased.leases or leased.repeated or now_ms >= until_ms:
                    return leased

    async def _lease(
        self,
        queue: QueueKey,
        durability: Durability,
        call: KeyedCall | None,
        options: LeaseOptions,
        leave_line: Callable[[], None] | None = None,
        *,
        acks: Sequence[PackedAck] = (),
        refused: list[RefusedAck] | None = None,
    ) -> Leased:
        """Lease what is ready. `refused` is what was refused of the acks that came with the call, once committed."""
        prefetched = self._prefetched.get(queue)
        if prefetched is None:
            prefetched = self._prefetched[queue] = Prefetched()
            if len(self._prefetched) > _PREFETCHED_QUEUES_MAX:
                self._prefetched.popitem(last=False)
        lease: Callable[..., Leased] = queues.lease_or_wait if call is None else queues.lease_keyed
        if call is not None:
            lease = partial(lease, call=call, refused=refused)
        if leave_line is not None:
            lease = partial(_lease_and_leave_line, lease, leave_line)
        leased = await finish_or_undo_async(
            self._database.transact_async(lease, queue, prefetched=prefetched, acks=acks, **durability, **options),
            partial(self._release_cancelled, queue, call),
        )
        if refused is not None:
            leased.refused = refused
        return leased

    async def release_undelivered(self, queue: QueueKey, leased: Leased, call: KeyedCall | None) -> None:
        """Release messages that were leased and could not be delivered, without counting an attempt."""
        if leased.leases:
            await self._database.transact_async(queues.release_undelivered, queue, leased.proofs(), call)

    def _release_cancelled(self, queue: QueueKey, call: KeyedCall | None, leased: Leased) -> None:
        """Release messages whose consumer was cancelled before it received them, without counting an attempt."""
        if leased.leases:
            self._database.transact(queues.release_undelivered, queue, leased.proofs(), call)


def _lease_and_leave_line(
    lease: Callable[..., Leased], leave_line: Callable[[], None], tx: Transaction, queue: QueueKey, **options: Any
) -> Leased:
    """Lease, and let the next consumer in line read. Its transaction runs once this one has committed or failed."""
    leased = lease(tx, queue, **options)
    if leased.leases and leased.more:  # Otherwise it would find nothing, and delay the sync of this delivery.
        leave_line()
    return leased
