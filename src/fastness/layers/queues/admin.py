"""Administration of queues: peek, leased messages, statistics, names, purge, and deletion."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fastness.errors import InvalidArgument, QueueInUse
from fastness.kv import Transaction, pages
from fastness.layers.idempotency import KeyedCall, store_result, stored_result
from fastness.layers.queues import (
    dead_letter_sources,
    dead_letters,
    history,
    key_flow,
    locations,
    message_leases,
    policies,
    retention,
)
from fastness.layers.queues.counters import QueueTransaction, decode_counters, total_counters
from fastness.layers.queues.enqueue import remove_schedule, schedules_of
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of, queues
from fastness.layers.queues.message_leases import HeldLease
from fastness.layers.queues.policies import check_exists, dead_letter_queue, history_ms, policy_of
from fastness.layers.worlds import first_elements, matching_elements
from fastness.limits import (
    DUE_BATCH_MAX,
    LEASED_SCAN_MAX,
    MESSAGES_MAX,
    SURVEY_NAMES_MAX,
)
from fastness.plurals import counted
from fastness.wire.permissions import checked_queues
from fastness.wire.queues import LeasedMessage, LeasedMessages, QueuePolicy, QueueStats
from fastness.wire.stored_messages import StoredMessage, decode, encode, format_id

_LEASES = b"\x01"  # Where a purge continues that has come to the leases; a due entry follows.


def peek(tx: Transaction, queue: QueueKey, *, limit: int) -> list[StoredMessage]:
    """At most `limit` ready messages in delivery order, without leasing them."""
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


def stats(tx: Transaction, queue: QueueKey, *, must_exist: bool = False) -> QueueStats:
    """How many messages are in which state. The caller adds the number of waiting consumers.

    Raises:
        QueueNotFound: the queue does not exist, and `must_exist` is set.
    """
    policy = policy_of(tx, queue)
    if must_exist:
        check_exists(tx, queue, policy)
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


def survey(tx: Transaction, universe: str, *, after: str, limit: int, only: Sequence[str] = ()) -> list[QueueStats]:
    """`stats` of at most `limit` queues after the name `after`, ordered by name."""
    found = matching_names(tx, universe, after=after, limit=limit, only=only)
    return [stats(tx, QueueKey(universe, name)) for name in found]


def find(
    tx: Transaction, universe: str, *, after: str, limit: int, text: str, only: Sequence[str] = ()
) -> tuple[list[QueueStats], str | None]:
    """`survey` of the queues whose names contain `text`, in any case; and where to continue, or None at the end.

    `only` limits it to these names and patterns. Looks at no more than SURVEY_NAMES_MAX names, so a page may have fewer
    than `limit` queues, or none.
    """
    if not text:
        found = survey(tx, universe, after=after, limit=limit, only=only)
        return found, found[-1].queue if len(found) == limit else None
    seen = matching_names(tx, universe, after=after, limit=SURVEY_NAMES_MAX + 1, only=only)
    at_end = len(seen) <= SURVEY_NAMES_MAX
    seen = seen[:SURVEY_NAMES_MAX]
    matching = [name for name in seen if text.casefold() in name.casefold()]
    if len(matching) > limit:
        matching, at_end, seen = matching[:limit], False, matching[:limit]
    return [stats(tx, QueueKey(universe, name)) for name in matching], None if at_end else seen[-1]


def set_policy(tx: Transaction, queue: QueueKey, policy: QueuePolicy) -> QueuePolicy:
    """Replace a queue's policy. It applies to puts, deliveries and the history from now on, and to keys that wait.

    Raises:
        InvalidArgument: a value is out of range.
    """
    earlier = policy_of(tx, queue)
    policy = policies.set_policy(tx, queue, policy)
    dead_letter_sources.change(tx, queue, earlier, policy)
    kept_ms = history_ms(policy)
    if policies.kept_ms(policy) != policies.kept_ms(earlier):
        queue_tx = QueueTransaction(tx, queue)
        retention.restart(queue_tx, policy)
        queue_tx.save()
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


def purge(
    tx: Transaction, queue: QueueKey, *, after: bytes, limit: int, leased: bool = False
) -> tuple[int, bytes | None]:
    """Remove about `limit` messages; returns how many, and where to continue, or None at the end.

    Start with `after=b""`. Blocked messages are removed first, so that none becomes ready during the purge. Ready
    messages follow, then delayed ones, and leased ones at the end, if those are to be removed too.
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
        if found:
            queue_tx.save()
        return len(found), after if found else b"\x00"
    if after.startswith(_LEASES):
        return _purge_leases(queue_tx, after[len(_LEASES) :], limit)
    delayed = [decode(value) for _, value in tx.scan(*queue_tx.keys.delayed_range(), limit=limit)]
    for message in delayed:
        queue_tx.remove_delayed(message)
        dead_letters.purge_message(queue_tx, message)
    if not delayed:
        return 0, _LEASES if leased else None
    queue_tx.save()
    return len(delayed), after


def _purge_leases(queue_tx: QueueTransaction, after: bytes, limit: int) -> tuple[int, bytes | None]:
    """Purge the messages of leases, of the due entries after `after`. At most the last lease exceeds the limit."""
    tx, keys, count = queue_tx.tx, queue_tx.keys, 0
    begin, end = keys.due_range(0 if tx.writer else queue_tx.counters.due_front_ms)
    entries = tx.scan(keys.due + after + b"\x00" if after else begin, end, limit=DUE_BATCH_MAX)
    last = None
    for key, value in entries:
        if count >= limit:
            break
        last = key
        held = message_leases.held_at(tx, keys, key, value)
        count += 0 if held is None else _purge_lease(queue_tx, held)
    if count:
        queue_tx.save()
    is_end = last is None or (last == entries[-1][0] and len(entries) < DUE_BATCH_MAX)
    return count, None if is_end or last is None else _LEASES + last[len(keys.due) :]


def _purge_lease(queue_tx: QueueTransaction, held: HeldLease) -> int:
    """End a lease, and purge the messages that are left in it; returns how many. They cannot be settled then."""
    messages = held.take_all(queue_tx)
    for message in messages:
        key_flow.release(queue_tx, message)
        dead_letters.purge_message(queue_tx, message)
    return len(messages)


def names(tx: Transaction, universe: str, *, after: str, limit: int, only: Sequence[str] = ()) -> list[str]:
    """At most `limit` queue names after `after`, in order; of those in `only`, names and patterns as in `orders-*`."""
    return matching_names(tx, universe, after=after, limit=limit, only=only)


def matching_names(
    tx: Transaction, universe: str, *, after: str, limit: int, only: Sequence[str] = (), prefix: str = ""
) -> list[str]:
    """`names` of the queues that begin with `prefix`, without a check of the limit."""
    if not only:
        return first_elements(tx, queues(universe), after, limit, prefix=prefix)
    return matching_elements(tx, queues(universe), checked_queues(only), after, limit, prefix=prefix)


class PurgeProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a purge of several transactions has come."""

    count: int = 0
    after: bytes | None = b""  # Where it continues; None at its end.


_decode_progress = msgspec.msgpack.Decoder(PurgeProgress).decode


def purge_step(
    tx: Transaction, queue: QueueKey, progress: PurgeProgress, call: KeyedCall | None, *, leased: bool = False
) -> tuple[PurgeProgress, list[tuple[Any, ...]]]:
    """Purge one batch; returns the new progress, and the events to publish.

    A repeated `call` resumes at the progress that is stored under its key.
    """
    before = None if call is None else stored_result(tx, call)
    progress = progress if before is None else _decode_progress(before)
    if progress.after is None:
        return progress, []
    count, after = purge(tx, queue, after=progress.after, limit=MESSAGES_MAX, leased=leased)
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
            f"Queue {queue.name} has {counted(held, 'leased message')}; wait until all are settled, or delete it with "
            f"force. Of the others, {progress.count:,} were removed"
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
        count += 0 if held is None else _purge_lease(queue_tx, held)
        tx.delete(key)
    if entries:
        queue_tx.save()
        return DeleteProgress(progress.count + count, None)
    dead_letter_sources.forget(tx, queue, policy_of(tx, queue))
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
