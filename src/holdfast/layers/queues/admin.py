"""Administration of queues: peek, leased messages, statistics, names, purge, and deletion."""

from typing import Any

import msgspec

from holdfast.errors import InvalidArgument, QueueInUse
from holdfast.kv import Transaction, pages
from holdfast.layers.idempotency import KeyedCall, store_result, stored_result
from holdfast.layers.queues import dead_letters, history, key_flow, locations, message_leases, policies
from holdfast.layers.queues.counters import QueueTransaction, decode_counters, total_counters
from holdfast.layers.queues.enqueue import remove_schedule, schedules_of
from holdfast.layers.queues.keys import QueueKey, QueueKeys, keys_of, queues
from holdfast.layers.queues.policies import dead_letter_queue, history_ms, policy_of
from holdfast.layers.worlds import first_elements
from holdfast.limits import (
    DUE_BATCH_MAX,
    LEASED_LIST_MAX,
    LEASED_SCAN_MAX,
    MESSAGES_MAX,
    READ_ENTRIES_MAX,
    SUMMARY_LIST_MAX,
)
from holdfast.wire.queues import LeasedMessage, LeasedMessages, QueuePolicy, QueueStats
from holdfast.wire.stored_messages import StoredMessage, decode, encode, format_id


def peek(tx: Transaction, queue: QueueKey, *, limit: int) -> list[StoredMessage]:
    """At most `limit` ready messages in delivery order, without leasing them."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"limit is {limit}; peek takes 1 to {READ_ENTRIES_MAX} messages")
    queue_tx = QueueTransaction(tx, queue)
    found = _ready(queue_tx, limit)
    for message in found:
        if message.has_body:
            message.payload = tx.get(queue_tx.keys.body_key(message.id))
    return found


def leased(tx: Transaction, queue: QueueKey, *, after: str, limit: int) -> LeasedMessages:
    """At most `limit` leased messages, in the order in which their leases end.

    `after` is the lease id of a message, or the `next` of the page before. One call reads a bounded part of the due
    index, in which only some entries are leases: a page may be short, or empty, and still have a `next`.

    Raises:
        InvalidArgument: `limit` is out of range, or `after` is neither.
    """
    if not 0 < limit <= LEASED_LIST_MAX:
        raise InvalidArgument(f"limit is {limit}; one page has 1 to {LEASED_LIST_MAX} messages")
    keys = keys_of(queue)
    if not total_counters(tx, keys).leased:
        return LeasedMessages([], None)
    begin, end = keys.due_range(0)
    entry, skipped = _position(tx, keys, after)
    begin = keys.due + entry if entry else begin
    found: list[LeasedMessage] = []
    for _ in range(LEASED_SCAN_MAX // DUE_BATCH_MAX):
        pairs = tx.scan(begin, end, limit=DUE_BATCH_MAX)
        for key, value in pairs:
            held = message_leases.held_at(tx, keys, key, value)
            left = [] if held is None else held.remaining()
            if key[len(keys.due) :] == entry:
                left = [position for position in left if position >= skipped]
            for position in left:
                if held is not None and len(found) < limit:
                    found.append(_leased_message(held.message(position), held.record.owner))
                else:
                    return LeasedMessages(found, f"{key[len(keys.due) :].hex()}.{position}")
        if len(pairs) < DUE_BATCH_MAX:
            return LeasedMessages(found, None)
        begin = pairs[-1][0] + b"\x00"
    return LeasedMessages(found, f"{begin[len(keys.due) :].hex()}.0")


def _position(tx: Transaction, keys: QueueKeys, text: str) -> tuple[bytes, int]:
    """A due entry, and the first position in its lease that is wanted."""
    entry, _, position = text.partition(".")
    try:
        if "-" in text:
            return message_leases.entry_of(tx, keys, bytes.fromhex(text.rpartition("-")[2]))
        return (bytes.fromhex(entry), int(position)) if text else (b"", 0)
    except (ValueError, IndexError):
        raise InvalidArgument(
            f"{text[:80]!r} is not a position among leased messages; use the lease id of the last one"
        ) from None


def _leased_message(message: StoredMessage, owner: str) -> LeasedMessage:
    return LeasedMessage(
        id=format_id(message.id),
        owner=owner,
        attempts=message.attempts,
        failure_attempts=message.failures,
        max_attempts=message.max_attempts,
        expires_ms=message.due_ms,
        created_ms=message.created_ms,
        lease_id=message.lease_id,
        fence=message.fence,
        priority=message.priority,
        group=message.group,
        correlation_id=message.correlation_id,
        txn_id=message.txn_id,
    )


def stats(tx: Transaction, queue: QueueKey) -> QueueStats:
    """How many messages are in which state. The caller adds the number of waiting consumers."""
    policy = policy_of(tx, queue)
    counters = total_counters(tx, keys_of(queue))
    dead = total_counters(tx, keys_of(dead_letter_queue(queue, policy)))
    head = _ready(QueueTransaction(tx, queue), 1)
    return QueueStats(
        queue=queue.name,
        ready=counters.ready_total(),
        delayed=counters.delayed,
        leased=counters.leased,
        blocked=counters.blocked,
        dead=dead.ready_total() + dead.leased + dead.delayed,
        paused=policy.paused,
        waiting_consumers=0,
        head_message_id=format_id(head[0].id) if head else None,
        head_age_seconds=(tx.now_ms - head[0].created_ms) / 1_000 if head else 0.0,
        put_total=counters.put,
        delivered_total=counters.delivered,
        acked_total=counters.acked,
        failed_total=counters.failed,
        expired_total=counters.expired,
        dead_total=counters.dead_lettered,
    )


def survey(tx: Transaction, universe: str, *, after: str, limit: int) -> list[QueueStats]:
    """`stats` of at most `limit` queues after the name `after`, ordered by name."""
    if not 0 < limit <= SUMMARY_LIST_MAX:
        raise InvalidArgument(f"limit is {limit}; one page has 1 to {SUMMARY_LIST_MAX} queues")
    return [stats(tx, QueueKey(universe, name)) for name in first_elements(tx, queues(universe), after, limit)]


def set_policy(tx: Transaction, queue: QueueKey, policy: QueuePolicy) -> QueuePolicy:
    """Replace a queue's policy. It applies to puts, deliveries and the history from now on, and to keys that wait.

    Raises:
        InvalidArgument: a value is out of range.
    """
    earlier = policy_of(tx, queue)
    policy = policies.set_policy(tx, queue, policy)
    kept_ms = history_ms(policy)
    if _key_limits(policy) != _key_limits(earlier):
        queue_tx = QueueTransaction(tx, queue)
        key_flow.limits_changed(queue_tx)
        queue_tx.save()
    if kept_ms != history_ms(earlier):
        keys = keys_of(queue)
        for key, value in [pair for page in pages(tx, *keys.all_counters.range()) for pair in page]:
            counters = decode_counters(value)
            counters.history_ms = kept_ms  # Every transaction reads its writer's counters, and so knows of it.
            tx.put(key, encode(counters))
        if not kept_ms:
            history.delete_all(tx, keys)
    return policy


def _key_limits(policy: QueuePolicy) -> tuple[float | None, ...]:
    return policy.concurrency_per_key, policy.rate_per_key, policy.burst_per_key


def purge(tx: Transaction, queue: QueueKey, *, after: bytes, limit: int) -> tuple[int, bytes | None]:
    """Remove at most `limit` messages that are not leased; returns how many, and where to continue, or None at the end.

    Start with `after=b""`. Blocked messages are removed first, so that none becomes ready during the purge. Ready
    messages follow, then delayed ones.
    """
    queue_tx = QueueTransaction(tx, queue)
    if after == b"":
        blocked = tx.scan(*queue_tx.keys.waiting.range(), limit=limit)
        for key, value in blocked:
            message = decode(value)
            if message.key is None or not key_flow.remove_waiting(queue_tx, message, message.key):
                tx.delete(key)
                queue_tx.counters.blocked -= 1
            locations.clear(queue_tx, message.id)
            dead_letters.purge_message(queue_tx, message)
        if blocked:
            queue_tx.save()
            return len(blocked), after
        found = _ready(queue_tx, limit)
        for message in found:
            key_flow.remove_ready(queue_tx, message)
            dead_letters.purge_message(queue_tx, message)
        queue_tx.save()
        return len(found), after if found else b"\x00"
    delayed = [decode(value) for _, value in tx.scan(*queue_tx.keys.delayed_range(), limit=limit)]
    for message in delayed:
        queue_tx.remove_delayed(message)
        dead_letters.purge_message(queue_tx, message)
    if not delayed:
        return 0, None
    queue_tx.save()
    return len(delayed), after


def names(tx: Transaction, universe: str, *, after: str, limit: int) -> list[str]:
    """At most `limit` queue names after `after`, in order."""
    if not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"limit is {limit}; one page has 1 to {READ_ENTRIES_MAX} names")
    return first_elements(tx, queues(universe), after, limit)


class PurgeProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a purge of several transactions has come."""

    count: int = 0
    after: bytes | None = b""  # Where it continues; None at its end.


_decode_progress = msgspec.msgpack.Decoder(PurgeProgress).decode


def purge_step(
    tx: Transaction, queue: QueueKey, progress: PurgeProgress, call: KeyedCall | None
) -> tuple[PurgeProgress, list[tuple[Any, ...]]]:
    """Purge one batch; returns the new progress, and the events to publish.

    A repeated `call` resumes at the progress that is stored under its key.
    """
    before = None if call is None else stored_result(tx, call)
    progress = progress if before is None else _decode_progress(before)
    if progress.after is None:
        return progress, []
    count, after = purge(tx, queue, after=progress.after, limit=MESSAGES_MAX)
    progress = PurgeProgress(progress.count + count, after)
    if call is not None:
        store_result(tx, call, progress)
    return progress, tx.events


class DeleteProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a deletion of several transactions has come."""

    count: int = 0  # Messages removed.
    after: bytes | None = b""  # Where `purge` continues; None when it has removed everything that is not leased.
    is_done: bool = False


_decode_deletion = msgspec.msgpack.Decoder(DeleteProgress).decode


def delete_step(
    tx: Transaction, queue: QueueKey, progress: DeleteProgress, call: KeyedCall | None, *, force: bool
) -> tuple[DeleteProgress, list[tuple[Any, ...]]]:
    """Delete one batch of a queue; returns the new progress, and the events to publish.

    The first step removes the schedules, which would put messages, and the last one whatever is left: policy, counters,
    idempotency keys and ack records. An interrupted deletion leaves a valid queue with fewer messages. A repeated
    `call` resumes at the progress that is stored under its key.

    Raises:
        QueueInUse: messages are leased, and `force` is not set.
    """
    before = None if call is None else stored_result(tx, call)
    progress = progress if before is None else _decode_deletion(before)
    if progress.is_done:
        return progress, []
    if not force and (held := total_counters(tx, keys_of(queue)).leased) > 0:
        raise QueueInUse(
            f"{held} messages of {queue.name} are leased; wait until they are settled, or delete it with force. "
            f"{progress.count} others were removed"
        )
    if progress == DeleteProgress():
        for schedule in schedules_of(tx, queue):
            remove_schedule(tx, queue, schedule.name)
    progress = _delete_batch(tx, queue, progress)
    if call is not None:
        store_result(tx, call, progress)
    return progress, tx.events


def _delete_batch(tx: Transaction, queue: QueueKey, progress: DeleteProgress) -> DeleteProgress:
    if progress.after is not None:
        count, after = purge(tx, queue, after=progress.after, limit=MESSAGES_MAX)
        return DeleteProgress(progress.count + count, after)
    keys, queue_tx = keys_of(queue), QueueTransaction(tx, queue)
    ranges = (keys.ready_range(), keys.waiting.range(), keys.delayed_range())
    if any(tx.scan(begin, end, limit=1) for begin, end in ranges):
        return DeleteProgress(progress.count)  # Put, or returned by consumers, since the purge.
    entries = tx.scan(*keys.due_range(0), limit=DUE_BATCH_MAX)
    count = 0
    for key, value in entries:
        held = message_leases.held_at(tx, keys, key, value)
        for message in [] if held is None else held.take_all(queue_tx):
            key_flow.release(queue_tx, message)
            dead_letters.purge_message(queue_tx, message)
            count += 1
        tx.delete(key)
    if entries:
        queue_tx.save()
        return DeleteProgress(progress.count + count, None)
    tx.delete_range(*queues(queue.universe).at(queue.name).range())
    return DeleteProgress(progress.count, None, is_done=True)


def _ready(queue_tx: QueueTransaction, limit: int) -> list[StoredMessage]:
    tx, keys, counters = queue_tx.tx, queue_tx.keys, queue_tx.counters
    if tx.writer:
        return [decode(value) for _, value in tx.scan(*keys.ready_range(), limit=limit)]
    found: list[StoredMessage] = []
    for priority in sorted((each for each, count in counters.ready.items() if count > 0), reverse=True):
        begin, end = keys.priority_range(priority, counters.fronts.get(priority, b""))
        found += [decode(value) for _, value in tx.scan(begin, end, limit=limit - len(found))]
        if len(found) == limit:
            break
    return found
