"""Administration of queues: peek, leased messages, statistics, names, purge, and deletion."""

from collections.abc import Sequence

from fastness.errors import InvalidArgument, QueueInUse
from fastness.kv import Transaction, pages
from fastness.layers.queues import (
    by_id,
    dead_letter_sources,
    dead_letters,
    history,
    key_flow,
    message_leases,
    policies,
    retention,
)
from fastness.layers.queues.by_id import WaitingMessage
from fastness.layers.queues.counters import QueueTransaction, decode_counters, ready_ranges, total_counters
from fastness.layers.queues.enqueue import remove_schedule, schedules_of
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of, queues
from fastness.layers.queues.message_leases import HeldLease
from fastness.layers.queues.message_search import leases_from
from fastness.layers.queues.policies import check_exists, dead_letter_queue, history_ms, policy_of
from fastness.layers.queues.work import Work
from fastness.layers.worlds import first_elements, matching_elements
from fastness.limits import (
    DUE_BATCH_MAX,
    LEASED_SCAN_MAX,
    MESSAGES_MAX,
    SURVEY_NAMES_MAX,
)
from fastness.plurals import counted
from fastness.wire.permissions import checked_queues
from fastness.wire.queues import LeasedMessage, LeasedMessages, MessageState, QueuePolicy, QueueStats
from fastness.wire.stored_messages import StoredMessage, decode, encode, format_id

_LEASES = b"\x01"  # Where a purge continues that has come to the leases; a due entry follows.


def peek(tx: Transaction, queue: QueueKey, *, limit: int) -> list[StoredMessage]:
    """At most `limit` ready messages in delivery order, without leasing them."""
    keys = keys_of(queue)
    found = _ready(tx, keys, limit)
    for message in found:
        if message.has_body:
            message.payload = tx.get(keys.body_key(message.id))
    return found


def leased(tx: Transaction, queue: QueueKey, *, after: str, limit: int) -> LeasedMessages:
    """At most `limit` leased messages, in the order in which their leases end.

    `after` is the lease id of a message, or the `next` of the page before. One call reads a bounded part of the due
    index, in which only some entries are leases: a page may be short, or empty, and still have a `next`.

    Raises:
        InvalidArgument: `limit` is out of range, or `after` is neither.
    """
    keys = keys_of(queue)
    entry, skipped = _position(tx, keys, after)
    found: list[LeasedMessage] = []
    for scanned, (held, suffix, position) in enumerate(leases_from(tx, keys, entry, skipped)):
        if len(found) == limit or scanned == LEASED_SCAN_MAX:
            return LeasedMessages(found, f"{suffix.hex()}.{position}")
        if held is not None:
            found.append(_leased_message(held.message(position), held.record.owner))
    return LeasedMessages(found, None)


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
    head = _ready(tx, keys_of(queue), 1)
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
    if after.startswith(_LEASES):
        return _purge_leases(queue_tx, after[len(_LEASES) :], limit)
    if after == b"":
        found = _waiting(queue_tx, "blocked", queue_tx.keys.waiting.range(), limit=limit)
        found = found or [WaitingMessage(each, "ready", b"") for each in _ready(tx, queue_tx.keys, limit)]
    else:
        found = _waiting(queue_tx, "delayed", queue_tx.keys.delayed_range(), limit=limit)
    for each in found:
        dead_letters.purge_message(queue_tx, by_id.take(queue_tx, each))
    if found:
        queue_tx.save()
        return len(found), after
    return 0, b"\x00" if after == b"" else _LEASES if leased else None


def _waiting(
    queue_tx: QueueTransaction, state: MessageState, area: tuple[bytes, bytes], *, limit: int
) -> list[WaitingMessage]:
    return [WaitingMessage(decode(value), state, key) for key, value in queue_tx.tx.scan(*area, limit=limit)]


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
    messages = held.take(queue_tx)
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


def purge_step(tx: Transaction, queue: QueueKey, work: Work, *, leased: bool = False) -> None:
    """Purge one batch."""
    if work.after is not None:
        count, work.after = purge(tx, queue, after=work.after, limit=MESSAGES_MAX, leased=leased)
        work.count += count
    work.is_done = work.after is None


def delete_step(tx: Transaction, queue: QueueKey, work: Work, *, force: bool) -> None:
    """Delete one batch of a queue.

    The first step removes the schedules, which would put messages, and the last one whatever is left: policy, counters,
    idempotency keys and ack records. An interrupted deletion leaves a valid queue with fewer messages.

    Raises:
        QueueInUse: messages are leased, and `force` is not set.
    """
    if not force and (held := total_counters(tx, keys_of(queue)).leased) > 0:
        raise QueueInUse(
            f"Queue {queue.name} has {counted(held, 'leased message')}; wait until all are settled, or delete it with "
            f"force. Of the others, {work.count:,} were removed"
        )
    if not work.count and work.after == b"":
        for schedule in schedules_of(tx, queue):
            remove_schedule(tx, queue, schedule.name)
    if work.after is not None:
        count, work.after = purge(tx, queue, after=work.after, limit=MESSAGES_MAX)
        work.count += count
        return
    keys, queue_tx = keys_of(queue), QueueTransaction(tx, queue)
    ranges = (keys.ready_range(), keys.waiting.range(), keys.delayed_range())
    if any(tx.scan(begin, end, limit=1) for begin, end in ranges):
        work.after = b""  # Put, or returned by consumers, since the purge.
        return
    entries = tx.scan(*keys.due_range(0), limit=DUE_BATCH_MAX)
    for key, value in entries:
        held_lease = message_leases.held_at(tx, keys, key, value)
        work.count += 0 if held_lease is None else _purge_lease(queue_tx, held_lease)
        tx.delete(key)
    if entries:
        queue_tx.save()
        return
    dead_letter_sources.forget(tx, queue, policy_of(tx, queue))
    tx.delete_range(*queues(queue.universe).at(queue.name).range())
    work.is_done = True


def _ready(tx: Transaction, keys: QueueKeys, limit: int) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    for begin, end in ready_ranges(tx, keys):
        found += [decode(value) for _, value in tx.scan(begin, end, limit=limit - len(found))]
        if len(found) == limit:
            break
    return found
