"""The dispatcher: consumers wait in line for each queue, and are served in the order in which they came.

    receive ──► something is ready? ──► leased
                      │ no
                      ▼
               in line ──► first in line ──► waits for a put, a nack, or the moment when something is due ──► leased

Only the first in line looks; whoever is served leaves, and the next one looks at once. Where more is ready, on an
embedded store, it does so as soon as the delivery is committed: deliveries in a row share a sync, and do not wait for
each other's. A queue that nobody waits for costs nothing, an embedded store is never polled, and queues do not wait for
each other. Where several nodes share a PostgreSQL, commits of the others wake the first in line by notification, and a
look every few minutes catches what a notification that was lost would have told.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Final

from holdfast.clock import Clock, SystemClock, when_moved
from holdfast.errors import Busy, LockTimeout, QueueBusy
from holdfast.kv import Database, Transaction
from holdfast.kv.serial_database import SerialDatabase
from holdfast.layers import queues
from holdfast.layers.idempotency import KeyedCall
from holdfast.layers.queues import Ahead, Leased, QueueKey
from holdfast.runtime.cancellation import finish_or_undo_async
from holdfast.runtime.consumer_options import ConsumerOptions
from holdfast.runtime.locks.table import LockTable
from holdfast.tiers import Tier

Publish = Callable[[Sequence[tuple[Any, ...]]], None]  # Of what happened, once it is committed.


def _untold(events: Sequence[tuple[Any, ...]]) -> None:
    """Nobody wants to hear of it."""
    del events


_AHEAD_QUEUES: Final = 1_024  # Queues whose next messages are remembered; others pay a search for each delivery.


class AsyncDispatcher:
    """Leases messages to consumers, now or after a wait."""

    def __init__(
        self, database: Database, clock: Clock | None, waits: ConsumerOptions, publish: Publish | None = None
    ) -> None:
        self._database = database
        self._publish = publish or _untold
        self._clock = clock or SystemClock()
        self._waits = waits
        self._jitter = Random()
        self._is_serial = isinstance(database, SerialDatabase)  # No transaction is run twice, or beside another.
        self._lines = LockTable(("queue",), nested=False, waiters_max=waits.consumers_max)
        self._ahead: OrderedDict[QueueKey, Ahead] = OrderedDict()

    async def receive(
        self, queue: QueueKey, *, wait_ms: int, tier: Tier, call: KeyedCall | None = None, **options: Any
    ) -> Leased:
        """At least one message, unless `wait_ms` pass without any, or what `call` has leased before.

        Raises:
            QueueBusy: as many consumers wait as may.
        """
        if call is not None:
            options["call"] = call
        if not wait_ms:
            return await self._lease(queue, tier, options)
        line = ["queue", "/".join(queue)]
        if not self._lines.line(line):
            leased = await self._lease(queue, tier, options)
            if leased.messages or leased.repeated:
                return leased
        elif call is not None and not call.fresh():  # What it has already, it need not stand in line for.
            before = await self._database.transact_async(
                queues.leased_before, queue, call=call, with_state=options.get("with_state", False), tier=tier
            )
            if before is not None:
                return before
        until_ms = self._clock.now_ms() + wait_ms
        try:
            place = await self._lines.acquire_async(line, timeout_seconds=wait_ms / 1_000)
        except LockTimeout:
            return Leased([], queues.NEVER_MS, [], [])
        except Busy as busy:
            raise QueueBusy(
                f"{self._waits.consumers_max} consumers wait already; raise queue_max_consumers, or come back later"
            ) from busy
        with place:
            return await self._first_in_line(queue, until_ms, tier, options, place.release)

    def waiting(self, queue: QueueKey) -> int:
        """How many consumers wait here for messages of a queue."""
        return self._lines.line(["queue", "/".join(queue)])

    async def _first_in_line(
        self, queue: QueueKey, until_ms: int, tier: Tier, options: dict[str, Any], leave: Callable[[], None]
    ) -> Leased:
        with self._database.watch(queues.keys_of(queue).prefix) as watch:
            stop_listening = when_moved(self._clock, watch.fire)
            try:
                while True:
                    leased = await self._lease(queue, tier, options, leave if self._is_serial else None)
                    left_ms = until_ms - self._clock.now_ms()
                    if leased.messages or leased.repeated or left_ms <= 0:
                        return leased
                    pause_ms = min(left_ms, max(leased.again_in_ms, 1), self._waits.look_again_ms(self._jitter))
                    await watch.wait_async(pause_ms / 1_000)
            finally:
                stop_listening()

    async def _lease(
        self, queue: QueueKey, tier: Tier, options: dict[str, Any], leave: Callable[[], None] | None = None
    ) -> Leased:
        ahead = self._ahead.get(queue)
        if ahead is None:
            ahead = self._ahead[queue] = Ahead()
            if len(self._ahead) > _AHEAD_QUEUES:
                self._ahead.popitem(last=False)
        call = options.get("call")
        lease: Callable[..., Leased] = queues.lease_or_wait if call is None else queues.lease_once
        if leave is not None:
            lease = partial(_lease_and_leave, lease, leave)
        leased = await finish_or_undo_async(
            self._database.transact_async(lease, queue, ahead=ahead, tier=tier, **options),
            partial(self._give_back, queue, call),
        )
        if leased.events:
            self._publish(leased.events)
        return leased

    async def give_back(self, queue: QueueKey, leased: Leased, call: KeyedCall | None) -> None:
        """Give back what was leased and could not be delivered, uncounted."""
        if leased.messages:
            self._publish(await self._database.transact_async(*_undoing(queue, leased, call)))

    def _give_back(self, queue: QueueKey, call: KeyedCall | None, leased: Leased) -> None:
        """Nobody waits for these any more: they were not delivered, and nothing has failed."""
        if leased.messages:
            self._publish(self._database.transact(*_undoing(queue, leased, call)))


def _lease_and_leave(
    lease: Callable[..., Leased], leave: Callable[[], None], tx: Transaction, queue: QueueKey, **options: Any
) -> Leased:
    """Lease, and let the next one in line look. It has its turn when this transaction is committed, or has failed."""
    leased = lease(tx, queue, **options)
    if leased.messages and leased.more:  # Otherwise it would look in vain, and hold up what is synced with it.
        leave()
    return leased


def _undoing(queue: QueueKey, leased: Leased, call: KeyedCall | None) -> tuple[Any, ...]:
    """What takes a delivery back: a function over a transaction, and its arguments."""
    if call is None:
        return queues.defer_all, queue, leased.messages
    return queues.give_back_once, queue, leased, call
