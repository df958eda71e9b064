"""Generated from runtime/queues.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Unpack

import msgspec

from fastness.clock import Clock
from fastness.errors import (
    FastnessError,
    MessageCancelled,
    MessageNotFound,
    ResultNotKept,
    ResultNotReady,
)
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.idempotency import KeyedCall, run_idempotent
from fastness.layers.queues import LeaseOptions, QueueKey, SearchOn, Work, WorkKey
from fastness.layers.queues.work import SqsWorkAdded
from fastness.limits import PAYLOAD_FETCH_BYTES_MAX, RESULT_CHECK_SECONDS, SQS_STEPS_MAX
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.commit_waits import CommitWaits
from fastness.runtime.sync.dispatcher import Dispatcher
from fastness.tiers import Tier
from fastness.wire.queues import (
    Deliveries,
    MessageInfo,
    MessageLease,
    MessageResult,
    Moved,
    Outcomes,
    PackedAck,
    QueueStats,
    QueueSurvey,
    outcome_of,
)
from fastness.wire.sqs import Purged
from fastness.wire.stored_messages import parse_id

_SEARCHES_MAX: Final = 8  # How often a message that moves while it is searched for is looked up.


class QueueStore:
    """Receives from queues, and counts, purges, deletes and redrives them."""

    def __init__(
        self,
        database: Database,
        dispatcher: Dispatcher,
        blobs: BlobStore,
        *,
        clock: Clock | None = None,
        options: ConsumerOptions | None = None,
        worker: str = "",
    ) -> None:
        self._database = database
        self._waits = CommitWaits(database, clock, options or ConsumerOptions())
        self._dispatcher = dispatcher
        self._blobs = blobs
        self._worker = worker

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
        return self._of_one(partial(self._database.read, queues.by_ids, queues.get, tier=tier), queue, id)

    def cancel(self, queue: QueueKey, id: str, tier: Tier) -> MessageInfo:
        """Cancel a message; what it is then."""
        return self._of_one(self._cancel(tier), queue, id)

    def cancel_many(self, queue: QueueKey, ids: Sequence[str], tier: Tier) -> Outcomes:
        """Cancel messages; an outcome for each."""
        found = self._by_ids(self._cancel(tier), queue, ids)
        errors = [each if isinstance(each, FastnessError) else _not_cancelled(each) for each in found]
        return Outcomes([outcome_of(error) for error in errors])

    def _cancel(self, tier: Tier) -> Callable[..., Any]:
        return partial(self._database.transact, queues.by_ids, queues.cancel, tier=tier)

    def _of_one(self, work: Callable[..., Any], queue: QueueKey, id: str) -> MessageInfo:
        (found,) = self._by_ids(work, queue, [id])
        if isinstance(found, FastnessError):
            raise found
        return found

    def _by_ids(
        self, work: Callable[..., Any], queue: QueueKey, ids: Sequence[str]
    ) -> list[MessageInfo | FastnessError]:
        """Do `work` on messages, on those that leases are searched for after the others."""
        answers: dict[int, MessageInfo | FastnessError] = {}
        left, leases = dict(enumerate(ids)), None
        for _ in range(_SEARCHES_MAX):
            found = work(queue, list(left.values()), leases=leases)
            after: list[bytes] = []
            for index, each in zip(list(left), found, strict=True):
                answers[index] = _not_found(queue, ids[index]) if isinstance(each, SearchOn) else each
                if isinstance(each, SearchOn):
                    after.append(each.after)
                elif leases is not None and isinstance(each, MessageNotFound):
                    after.append(b"")  # It may have been leased again since the leases were searched.
                else:
                    del left[index]
            if not left:
                break
            is_searched = leases is not None
            leases = self._search(queue, list(left.values()), min(after))
            if is_searched and not leases:
                break
        return [answers[index] for index in range(len(ids))]

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
                    return Outcomes([outcome_of(each) for each in ended])
                wait.pause()

    def _search(self, queue: QueueKey, ids: Sequence[str], after: bytes | None) -> dict[bytes, bytes]:
        """Search the leases of a queue for messages, a bounded number per transaction."""
        leases: dict[bytes, bytes] = {}
        while after is not None and len(leases) < len(ids):
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

    def run_work(
        self, queue: QueueKey, do: Callable[[Transaction, QueueKey, Work], None], call: KeyedCall | None = None
    ) -> Moved:
        """Purge, delete or redrive, a bounded number of messages per transaction; once per `call`."""
        work = Work()
        while not work.is_done:
            work = self._database.transact(queues.step, queue, do, work, call)
        return Moved(work.count)

    def begin_work(
        self,
        key: WorkKey,
        begin: Callable[[Transaction, QueueKey], None],
        do: Callable[[Transaction, QueueKey, Work], int | None],
        tier: Tier,
        call: KeyedCall | None,
    ) -> Purged:
        """Begin listed work, once per `call`, and do some of its steps; the rest follows in the background."""
        queue = QueueKey(key.universe, key.queue)
        if call is None:
            self._database.transact(begin, queue, tier=tier)
        else:
            self._database.transact(run_idempotent, call, bool, begin, queue, tier=tier)
        in_ms: int | None = 0
        for _ in range(SQS_STEPS_MAX):
            in_ms = self._database.transact(queues.listed_step, key, do, self._worker)
            if in_ms != 0:
                break
        if in_ms is not None:
            self._database.publish([SqsWorkAdded()])
        return Purged(is_done=in_ms != 0)


def _not_found(queue: QueueKey, id: str) -> MessageNotFound:
    return MessageNotFound(f"Message {id} of {queue.name} was not found: it moves too often; try again")


def _not_cancelled(known: MessageInfo) -> FastnessError | None:
    return None if known.state == "cancelled" else queues.finished(known)
