"""Generated from runtime/queues.py by tools/make_twins.py; change that file instead."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Unpack

import msgspec

from fastness.clock import Clock
from fastness.errors import (
    FastnessError,
    MessageCancelled,
    MessageNotFound,
    ResultNotKept,
    ResultNotReady,
)
from fastness.kv import Database
from fastness.layers import queues
from fastness.layers.idempotency import KeyedCall
from fastness.layers.queues import DeleteProgress, FoundLease, PurgeProgress, QueueKey, RedriveProgress, SearchOn
from fastness.limits import PAYLOAD_FETCH_BYTES_MAX, RESULT_CHECK_SECONDS
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.publishing import Publish
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.commit_waits import CommitWaits
from fastness.runtime.sync.dispatcher import Dispatcher, LeaseOptions
from fastness.tiers import Tier
from fastness.wire.queues import (
    Deliveries,
    MessageInfo,
    MessageLease,
    MessageResult,
    Moved,
    Outcome,
    Outcomes,
    PackedAck,
    QueueStats,
    QueueSurvey,
)
from fastness.wire.stored_messages import parse_id

_SEARCHES_MAX: Final = 8  # How often a message that moves while it is searched for is looked up.


class QueueStore:
    """Receives from queues, and counts, purges, deletes and redrives them."""

    def __init__(
        self,
        database: Database,
        dispatcher: Dispatcher,
        blobs: BlobStore,
        publish: Publish,
        *,
        clock: Clock | None = None,
        options: ConsumerOptions | None = None,
    ) -> None:
        self._database = database
        self._waits = CommitWaits(database, clock, options or ConsumerOptions())
        self._dispatcher = dispatcher
        self._blobs = blobs
        self._publish = publish

    def receive(
        self,
        queue: QueueKey,
        *,
        wait_ms: int,
        tier: Tier | None,
        call: KeyedCall | None = None,
        packed: bool = False,
        acks: Sequence[PackedAck] = (),
        **options: Unpack[LeaseOptions],
    ) -> Deliveries:
        """At least one message, unless `wait_ms` pass without any; with its payload, unless that is a large blob.

        `tier` is that of the dispatcher. A repeated `call` gets the messages that it still leases. `packed` messages
        are passed on as they are stored. `acks` are committed with the lease, or at once if nothing can be leased.
        """
        leased = self._dispatcher.receive(queue, wait_ms=wait_ms, tier=tier, call=call, acks=acks, **options)
        try:
            for message in leased.blobs:
                if message.blob is not None and message.size <= PAYLOAD_FETCH_BYTES_MAX:
                    with suppress(FastnessError):  # The consumer gets the error when it reads the payload.
                        leased.bodies[message.id] = (self._blobs.get(queue.universe, message.blob)).data
        except BaseException:  # The consumer is gone: the messages were not delivered, and no attempt failed.
            self._dispatcher.release_undelivered(queue, leased, call)
            raise
        if packed:
            return Deliveries([], queues.packed_of(leased), leased.refused)
        return Deliveries(queues.deliveries_of(leased), refused=leased.refused)

    def get(self, queue: QueueKey, id: str, tier: Tier) -> MessageInfo:
        """What is known about a message."""
        lease: FoundLease | None = None
        for _ in range(_SEARCHES_MAX):
            found = self._database.read(queues.get, queue, id, lease=lease, tier=tier)
            if not isinstance(found, SearchOn):
                return found
            lease = self._search(queue, id, found)
        raise _not_found(queue, id)

    def cancel(self, queue: QueueKey, id: str, tier: Tier) -> MessageInfo:
        """Cancel a message; what it is then."""
        lease: FoundLease | None = None
        for _ in range(_SEARCHES_MAX):
            found, events = self._database.transact(queues.cancel, queue, id, lease=lease, tier=tier)
            self._publish(events)
            if not isinstance(found, SearchOn):
                return found
            lease = self._search(queue, id, found)
        raise _not_found(queue, id)

    def cancel_many(self, queue: QueueKey, ids: Sequence[str], tier: Tier) -> Outcomes:
        """Cancel messages, those that leases are searched for after the others; an outcome for each."""
        outcomes = [Outcome()] * len(ids)
        left, leases = dict(enumerate(ids)), None
        for _ in range(_SEARCHES_MAX):
            found, events = self._database.transact(
                queues.cancel_many, queue, list(left.values()), leases=leases, tier=tier
            )
            self._publish(events)
            results = dict(zip(left, found, strict=True))
            for index, each in results.items():
                outcomes[index] = Outcome(each.code, str(each)) if isinstance(each, FastnessError) else Outcome()
            # A message that was not found may have been leased again since the leases were searched.
            is_searched = leases is not None
            left = {
                index: ids[index]
                for index, each in results.items()
                if isinstance(each, SearchOn) or (is_searched and isinstance(each, MessageNotFound))
            }
            if not left:
                break
            leases = self._search_many(queue, list(left.values()))
            if is_searched and not leases:
                break
        return Outcomes(outcomes)

    def result(self, queue: QueueKey, id: str, *, wait_ms: int, tier: Tier) -> MessageResult:
        """The result of a message, as soon as it is done.

        Raises:
            ResultNotReady: it is not done within `wait_ms`.
            ResultNotKept: it is not in the queue any more, and no result was kept.
            MessageFailed, MessageCancelled: there is no result, and will be none.
        """
        outcome = queues.keys_of(queue).outcomes + parse_id(id)
        with self._waits.open(outcome, until_ms=self._waits.now_ms() + wait_ms) as wait:
            while True:
                found = self._database.read(queues.result, queue, id, tier=tier)
                if found is not None:
                    return found
                is_kept = self._check_pending(queue, id, tier)
                if wait.is_over:
                    raise ResultNotReady(f"Message {id} is not done yet; wait longer, or ask again")
                # What becomes of other messages is not recorded, so they are looked up now and then.
                wait.pause(None if is_kept else round(RESULT_CHECK_SECONDS * 1_000))

    def _check_pending(self, queue: QueueKey, id: str, tier: Tier) -> bool:
        """Whether a message that is not done will leave an outcome.

        Raises:
            MessageFailed: it is a dead letter.
            ResultNotKept: it is not in the queue any more.
        """
        try:
            known = self.get(queue, id, tier)
        except MessageNotFound:
            raise ResultNotKept(
                f"Message {id} is not in queue {queue.name}, and no result was kept; it may have been acknowledged "
                "without one. Put it with keep_result=True, or acknowledge it with a result"
            ) from None
        if known.state == "dead":
            raise queues.failed(parse_id(id), known.failures[-1] if known.failures else None, known.failure_attempts)
        return known.keep_result

    def wait_for_cancel(self, queue: QueueKey, leases: Sequence[MessageLease], *, wait_ms: int, tier: Tier) -> Outcomes:
        """Which of these leases hold, as soon as one of the messages is cancelled."""
        cancelled = queues.keys_of(queue).cancelled
        with self._waits.open(cancelled, until_ms=self._waits.now_ms() + wait_ms) as wait:
            while True:
                ended = self._database.read(queues.ended, queue, leases, tier=tier)
                if wait.is_over or any(isinstance(each, MessageCancelled) for each in ended):
                    return Outcomes([Outcome() if each is None else Outcome(each.code, str(each)) for each in ended])
                wait.pause()

    def _search(self, queue: QueueKey, id: str, start: SearchOn) -> FoundLease | None:
        """Search the leases of a queue for a message, a bounded number per transaction."""
        at: FoundLease | SearchOn | None = start
        while isinstance(at, SearchOn):
            at = self._database.read(queues.search, queue, id, after=at.after)
        return at

    def _search_many(self, queue: QueueKey, ids: Sequence[str]) -> dict[bytes, FoundLease]:
        """Search the leases of a queue for messages, a bounded number per transaction."""
        leases: dict[bytes, FoundLease] = {}
        after: bytes | None = b""
        while after is not None:
            found, after = self._database.read(queues.search_leases, queue, ids, after=after)
            leases |= found
        return leases

    def stats(self, queue: QueueKey, tier: Tier, *, must_exist: bool = False) -> QueueStats:
        """The number of messages in each state, and of consumers that wait in this process."""
        found = self._database.read(queues.stats, queue, must_exist=must_exist, tier=tier)
        return msgspec.structs.replace(found, waiting_consumers=self._dispatcher.waiting(queue))

    def survey(
        self, universe: str, *, after: str, limit: int, tier: Tier, text: str = "", only: Sequence[str] = ()
    ) -> QueueSurvey:
        """`stats` of a page of queues, of those in `only` whose names contain `text`."""
        found, following = self._database.read(
            queues.find, universe, after=after, limit=limit, text=text, only=only, tier=tier
        )
        counted = [
            msgspec.structs.replace(each, waiting_consumers=self._dispatcher.waiting(QueueKey(universe, each.queue)))
            for each in found
        ]
        return QueueSurvey(counted, following)

    def purge(self, queue: QueueKey, call: KeyedCall | None = None, *, leased: bool = False) -> Moved:
        """Remove every message that is not leased, or all, a bounded number per transaction; once per `call`."""
        so_far = PurgeProgress()
        while so_far.after is not None:
            so_far, events = self._database.transact(queues.purge_step, queue, so_far, call, leased=leased)
            self._publish(events)
        return Moved(so_far.count)

    def delete(self, queue: QueueKey, *, force: bool, call: KeyedCall | None = None) -> Moved:
        """Remove a queue and its messages, a bounded number per transaction; once per `call`."""
        so_far = DeleteProgress()
        while not so_far.is_done:
            so_far, events = self._database.transact(queues.delete_step, queue, so_far, call, force=force)
            self._publish(events)
        return Moved(so_far.count)

    def redrive(self, queue: QueueKey, ids: Sequence[str] | None, limit: int, call: KeyedCall | None = None) -> Moved:
        """Return dead letters to the queue, a bounded number per transaction; once per `call`."""
        so_far = RedriveProgress()
        while not so_far.is_done:
            so_far, events = self._database.transact(queues.redrive_step, queue, so_far, call, ids=ids, limit=limit)
            self._publish(events)
        return Moved(so_far.count)


def _not_found(queue: QueueKey, id: str) -> MessageNotFound:
    return MessageNotFound(f"Message {id} of {queue.name} was not found: it moves too often; try again")
