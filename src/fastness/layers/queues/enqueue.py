"""Enqueueing: checks new messages, stores them as ready, delayed or blocked, and enqueues scheduled messages."""

from collections.abc import Sequence
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from fastness.errors import Busy, InvalidArgument, PayloadTooLarge, QuotaExceeded
from fastness.kv import Transaction
from fastness.layers import blobs
from fastness.layers.queues import groups, locations, unique_keys, upkeep
from fastness.layers.queues.counters import NEVER_MS, QueueTransaction
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of
from fastness.layers.queues.policies import check_exists, policy_at, policy_of
from fastness.layers.quotas import quotas_of
from fastness.limits import (
    ATTRIBUTES_BYTES_MAX,
    ATTRIBUTES_MAX,
    IDEMPOTENCY_SECONDS,
    PAYLOAD_CARRIED_BYTES_MAX,
    PAYLOAD_INLINE_BYTES_MAX,
    SCHEDULES_MAX,
)
from fastness.tiers import Tier
from fastness.wire.queues import NewMessage, QueuePolicy, Receipt, Schedule
from fastness.wire.stored_messages import StoredMessage, encode, format_id
from fastness.wire.type_checks import refused

TTL_EXPIRED = b"T"  # The kind of a due entry. The ends of leases and delays have an empty value.
SCHEDULE_DUE = b"S"
SCHEDULE_ATTRIBUTE = "fastness-schedule"  # The name of the schedule that has put a message.
DUE_ATTRIBUTE = "fastness-due"  # When the schedule was due; the message may have been put later.


def put(
    tx: Transaction,
    queue: QueueKey,
    messages: Sequence[NewMessage],
    *,
    tier: Tier = Tier.CRITICAL,
    must_exist: bool = False,
) -> list[Receipt]:
    """Enqueue messages, all or none; returns a receipt for each.

    A message whose idempotency key was used in the last five minutes is not stored again; its receipt names the first
    one. `tier` is the durability of the surrounding commit, which the receipts repeat.

    Raises:
        InvalidArgument, PayloadTooLarge: the options of a message do not go together, or it is too large.
        BlobNotFound: the payload of a message is a blob that is not stored.
        QuotaExceeded: the universe has no room for them.
        QueueNotFound: the queue does not exist, and `must_exist` is set.
    """
    for message in messages:
        check(message)
    policy = policy_at(tx, keys_of(queue))
    if must_exist:
        check_exists(tx, queue, policy)
    for message in messages:
        if message.blob is not None:
            blobs.use(tx, queue.universe, message.blob)
    admitted = 0
    if tx.usage is not None:  # Before anything is written. Those that may be duplicates follow in `put_one`.
        admitted = sum([not _may_be_duplicate(message) for message in messages])
        quotas_of(tx).admit_messages(tx, queue.universe, admitted)
    queue_tx = QueueTransaction(tx, queue)
    queue_tx.admitted = admitted
    receipts = []
    for message, id in zip(messages, queue_tx.new_ids(len(messages)), strict=True):
        receipts.append(put_one(queue_tx, policy, message, id, tier))
    if not tx.writer or not only_adds(messages):  # Where plain puts share the queue, the sweeper deletes them.
        upkeep.delete_expired_once_a_minute(queue_tx)
    if policy.group_batches:
        tx.expose()  # A receive may deliver them, although they are blocked.
    queue_tx.save()
    return receipts


def only_adds(messages: Sequence[NewMessage]) -> bool:
    """Whether a put of these messages can share the queue with other such puts (`Transaction.share`).

    It reads only the policy and the counters of its process, and writes only these counters and keys with new ids. That
    includes delays, TTLs, payloads and the history. Groups and keys have records that several messages use.
    """
    for new in messages:
        if (
            new.idempotency_key is not None
            or new.group is not None
            or new.key is not None
            or new.unique_key is not None
            or new.debounce_key is not None
        ):
            return False
    return True


def insert(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int, newest: bool) -> None:
    """Store a message as blocked behind its group, as delayed, or as ready."""
    message.owner = message.txn_id = None
    message.lease_ref, message.due_ms = b"", queue_tx.tx.now_ms + delay_ms
    if message.group is not None and message.origin is None:
        groups.enter(queue_tx, message, message.group, newest=newest)
    else:
        groups.place(queue_tx, message, newest=newest)


def put_one(queue_tx: QueueTransaction, policy: QueuePolicy, new: NewMessage, id: bytes, tier: Tier) -> Receipt:
    """Enqueue one checked message under a new id. The caller saves `queue_tx`."""
    tx, keys = queue_tx.tx, queue_tx.keys
    if new.idempotency_key is not None:
        first = _duplicate_of(tx, keys, new.idempotency_key)
        if first is not None:
            return Receipt(format_id(first[:16]), tier, True, first[24:].decode())
    has_job = new.key is not None or new.unique_key is not None or new.debounce_key is not None or new.keep_result
    job = unique_keys.job_of(new) if has_job else None
    first_ms, replaces = tx.now_ms, False
    if job is not None:
        if job.unique_key is not None:
            holder = unique_keys.holder_of(tx, keys, job.unique_key)
            if holder is not None:
                return Receipt(format_id(holder[0]), tier, True, holder[1])
        if job.debounce_key is not None and (held := unique_keys.debounced(tx, keys, job.debounce_key)) is not None:
            before, first_ms = held
            id, replaces = before.id, True
            queue_tx.remove_delayed(before)
            queue_tx.emit("replaced", before)
            remove_parts(queue_tx, before)
    if tx.usage is not None and not replaces and _may_be_duplicate(new):
        _admit_one(queue_tx)
    text = format_id(id)
    correlation_id = new.correlation_id or text
    if new.idempotency_key is not None:
        record = id + tx.now_ms.to_bytes(8, "big") + correlation_id.encode()
        tx.put(keys.ids.key(upkeep.idempotency_period(tx.now_ms), new.idempotency_key), record)
    payload, blob, now_ms = new.payload, new.blob, tx.now_ms
    inline = len(payload) <= PAYLOAD_CARRIED_BYTES_MAX
    ttl_seconds = (
        new.ttl_seconds if new.ttl_seconds is not None or policy.retention_by_age else policy.retention_seconds
    )
    visibility = policy.visibility_seconds if new.visibility_seconds is None else new.visibility_seconds
    is_special = (
        not inline
        or blob is not None
        or ttl_seconds is not None
        or new.group is not None
        or correlation_id != text
        or job is not None
    )
    message = StoredMessage(  # By position: a struct of this size takes several times as long by keyword.
        id,
        0,  # fence
        0,  # attempts
        0,  # ttl_at_ms
        round(visibility * 1_000),
        new.group,
        blob,
        len(payload) if blob is None else new.blob_size,
        False,  # has_failures
        False,  # stateful
        is_special,
        correlation_id,
        job,
        payload if inline and blob is None else None,
        new.content_type,
        new.attributes,
        new.priority,
        now_ms,
        policy.max_attempts if new.max_attempts is None else new.max_attempts,
    )
    message.tags = new.tags
    if new.retry_delay_seconds is not None:
        message.retry_delay_ms = round(new.retry_delay_seconds * 1_000)
    if not inline:
        tx.put(keys.body_key(id), new.payload)
    if ttl_seconds is not None:
        set_ttl(queue_tx, message, ttl_seconds)
    delay_seconds = policy.delay_seconds if new.delay_seconds is None else new.delay_seconds
    if job is not None:
        unique_keys.claim(queue_tx, message, job)
        if job.debounce_key is not None:
            delay_seconds = _debounce_seconds(new, tx.now_ms - first_ms)
            unique_keys.debounce(queue_tx, job.debounce_key, id, first_ms)
    if message.group is None and not delay_seconds and job is None:
        queue_tx.add_ready(message.priority, id, encode(message), newest=True)  # The common case of `insert`.
    else:
        insert(queue_tx, message, delay_ms=round(delay_seconds * 1_000), newest=not replaces)
    queue_tx.counters.put += 1
    queue_tx.emit("put", message)
    return Receipt(text, tier, replaces, correlation_id)


def _admit_one(queue_tx: QueueTransaction) -> None:
    """Raise QuotaExceeded if the universe has no room for another message."""
    tx = queue_tx.tx
    quotas_of(tx).admit_messages(tx, queue_tx.queue.universe, 1, unsaved=queue_tx.admitted)
    queue_tx.admitted += 1


def _may_be_duplicate(new: NewMessage) -> bool:
    """Whether a put of this message may find that it is enqueued already, or replace another one."""
    return new.idempotency_key is not None or new.unique_key is not None or new.debounce_key is not None


def _debounce_seconds(new: NewMessage, since_first_ms: int) -> float:
    """How long to hold back a debounced message from now on; at least a millisecond."""
    seconds = new.debounce_seconds
    if new.debounce_max_seconds is not None:
        seconds = min(seconds, new.debounce_max_seconds - since_first_ms / 1_000)
    return max(seconds, 0.001)


def remove_parts(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Delete what is stored beside a message: its payload, its TTL, and the keys that it has."""
    tx, keys = queue_tx.tx, queue_tx.keys
    if message.has_body:
        tx.delete(keys.body_key(message.id))
    if message.blob is not None:
        blobs.release(tx, queue_tx.queue.universe, message.blob)
    clear_ttl(tx, keys, message)
    if message.job is not None:
        locations.clear(queue_tx, message.id)
        unique_keys.release(queue_tx, message)
        unique_keys.end_debounce(queue_tx, message)


def clear_ttl(tx: Transaction, keys: QueueKeys, message: StoredMessage) -> None:
    """Remove the TTL of a message, and its due entry."""
    if message.ttl_at_ms:
        tx.delete(keys.due_key(message.ttl_at_ms, message.id + TTL_EXPIRED))
        message.ttl_at_ms = 0


def set_ttl(queue_tx: QueueTransaction, message: StoredMessage, seconds: float) -> None:
    """Set a message's TTL, and add its due entry."""
    message.ttl_at_ms = queue_tx.tx.now_ms + round(seconds * 1_000)
    message.is_special = True
    move_ttl(queue_tx, message)


def keep_from_now(queue_tx: QueueTransaction, policy: QueuePolicy, message: StoredMessage) -> None:
    """Keep a message that came back, or from another queue, as long as one that is put now."""
    if policy.retention_by_age:
        message.kept_from_ms = queue_tx.tx.now_ms
    elif policy.retention_seconds is not None:
        set_ttl(queue_tx, message, policy.retention_seconds)


def move_ttl(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """Write the due entry of a message's TTL."""
    at_ms = message.ttl_at_ms
    if not at_ms:
        return
    # The priority locates a message that is ready by then; others that are not delayed have a location.
    entry = TTL_EXPIRED + bytes((message.priority,))
    queue_tx.tx.put(queue_tx.keys.due_key(at_ms, message.id + TTL_EXPIRED), entry)
    queue_tx.counters.add_due(at_ms)


def _duplicate_of(tx: Transaction, keys: QueueKeys, key: str) -> bytes | None:
    """The record of an idempotency key that has not expired: id, time and correlation id of its message."""
    period = upkeep.idempotency_period(tx.now_ms)
    for each in (period, period - 1):
        found = tx.get(keys.ids.key(each, key))
        if found is not None and tx.now_ms < int.from_bytes(found[16:24], "big") + IDEMPOTENCY_SECONDS * 1_000:
            return found
    return None


def check(new: NewMessage) -> None:
    """Check which options of a new message go together. Each by itself was checked with its request.

    Raises:
        InvalidArgument, PayloadTooLarge: they do not, or they are too large.
    """
    if not new.content_type.isascii() or new.attributes:
        _check_text(new)
    if len(new.payload) > PAYLOAD_INLINE_BYTES_MAX:
        raise PayloadTooLarge(
            f"The payload has {len(new.payload)} bytes, and a message takes {PAYLOAD_INLINE_BYTES_MAX}; "
            "store it as a blob and pass its hash"
        )
    if new.blob is not None and new.payload:
        raise InvalidArgument("The message has both a payload and a blob; leave one of them out")
    if new.blob is None and new.blob_size:
        raise InvalidArgument("blob_size is given without a blob; give both, or leave it out")
    if new.unique_key is None and new.unique_until != "done":
        raise InvalidArgument("unique_until is given without a unique_key; give both, or leave it out")
    if new.debounce_key is None:
        if new.debounce_seconds or new.debounce_max_seconds is not None:
            name = "debounce_seconds" if new.debounce_seconds else "debounce_max_seconds"
            raise InvalidArgument(f"{name} is given without a debounce_key; give both, or leave it out")
        return
    if not new.debounce_seconds:
        raise refused("debounce_seconds", new.debounce_seconds, "how long to hold the message back: at least 0.001")
    if new.group is not None or new.unique_key is not None or new.delay_seconds:
        raise InvalidArgument(
            "A debounced message has no group, unique_key or delay_seconds; leave them out, or the debounce_key"
        )


def _check_text(new: NewMessage) -> None:
    if (
        len(new.attributes) > ATTRIBUTES_MAX
        or sum(len(name) + len(value) for name, value in new.attributes.items()) > ATTRIBUTES_BYTES_MAX
    ):
        raise refused(
            "attributes",
            new.attributes,
            f"at most {ATTRIBUTES_MAX}, of {ATTRIBUTES_BYTES_MAX:,} characters in all; put the rest into the payload",
        )
    texts = {"content_type": new.content_type, "attributes": "".join([*new.attributes, *new.attributes.values()])}
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise refused(name, getattr(new, name), "valid Unicode text, without halves of surrogate pairs") from None


# Schedules: messages that a queue enqueues by itself, at the times of a cron expression.
#
# A schedule has an entry in the due index. When it is due, one commit enqueues the message and adds the next entry, so
# it fires once per time, with any number of processes. Times missed while no process was running count as one, whose
# due time is the first of them.


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Schedule).decode


def set_schedule(
    tx: Transaction, queue: QueueKey, name: str, *, cron: str, timezone: str, message: NewMessage
) -> Schedule:
    """Enqueue `message` at the times of `cron` in `timezone`. Replaces a schedule of the same name.

    Raises:
        InvalidArgument: the expression or time zone is invalid, or the expression never matches.
        InvalidName: the group of the message is invalid.
        Busy: the queue has as many schedules as allowed.
    """
    check(message)
    keys = keys_of(queue)
    next_ms = _next_run_ms(cron, timezone, tx.now_ms)
    if next_ms == NEVER_MS:  # pragma: no cover - Every expression that CronSim accepts matches within 50 years.
        raise InvalidArgument(f"The cron expression {cron!r} never matches; check its day and month")
    if tx.get(keys.schedules.key(name)) is None and len(schedules_of(tx, queue)) >= SCHEDULES_MAX:
        raise Busy(f"Queue {queue.name} has {SCHEDULES_MAX} schedules, the maximum; remove some first")
    if message.blob is not None:
        blobs.use(tx, queue.universe, message.blob)
    queue_tx = QueueTransaction(tx, queue)
    remove_schedule(tx, queue, name)
    schedule = Schedule(name, cron, timezone, message, next_ms)
    _store_schedule(queue_tx, schedule)
    queue_tx.save()
    return schedule


def remove_schedule(tx: Transaction, queue: QueueKey, name: str) -> bool:
    """Remove a schedule; whether it existed."""
    keys = keys_of(queue)
    stored = tx.get(keys.schedules.key(name))
    if stored is None:
        return False
    tx.delete(keys.schedules.key(name))
    tx.delete(keys.due_key(_decode(stored).next_ms, SCHEDULE_DUE + name.encode()))
    return True


def schedules_of(tx: Transaction, queue: QueueKey) -> list[Schedule]:
    """The schedules of a queue, in the order of their names."""
    return [_decode(value) for _, value in tx.scan(*keys_of(queue).schedules.range(), limit=SCHEDULES_MAX)]


def fire_schedule(queue_tx: QueueTransaction, name: str) -> None:
    """Enqueue a schedule's message, unless its universe is full, and add the due entry of its next run."""
    stored = queue_tx.tx.get(queue_tx.keys.schedules.key(name))
    if stored is None:
        return
    schedule = _decode(stored)
    message = msgspec.structs.replace(
        schedule.message,
        attributes={
            **schedule.message.attributes,
            SCHEDULE_ATTRIBUTE: schedule.name,
            DUE_ATTRIBUTE: _rfc3339(schedule.next_ms),
        },
    )
    try:
        if queue_tx.tx.usage is not None and not _may_be_duplicate(message):
            _admit_one(queue_tx)
        put_one(queue_tx, policy_of(queue_tx.tx, queue_tx.queue), message, queue_tx.new_id(), Tier.CRITICAL)
        queue_tx.tx.expose()  # A receive may deliver it, although it is blocked.
    except QuotaExceeded:
        pass  # This run is left out; the quota's metrics count it as refused.
    next_ms = _next_run_ms(schedule.cron, schedule.timezone, queue_tx.tx.now_ms)
    _store_schedule(queue_tx, msgspec.structs.replace(schedule, next_ms=next_ms))


def _rfc3339(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _next_run_ms(cron: str, timezone: str, now_ms: int) -> int:
    try:
        zone = UTC if timezone == "UTC" else ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise InvalidArgument(f"{timezone!r} is not a time zone; use a name like Europe/Berlin") from None
    try:
        next_run = next(CronSim(cron, datetime.fromtimestamp(now_ms / 1_000, zone)))
    except (CronSimError, TypeError) as error:
        raise InvalidArgument(
            f"{cron!r} is not a cron expression ({error}); write minute, hour, day, month and weekday"
        ) from None
    except StopIteration:  # pragma: no cover - As in `set_schedule`.
        return NEVER_MS
    return round(next_run.timestamp() * 1_000)


def _store_schedule(queue_tx: QueueTransaction, schedule: Schedule) -> None:
    tx, keys = queue_tx.tx, queue_tx.keys
    tx.put(keys.schedules.key(schedule.name), _encode(schedule))
    if schedule.next_ms != NEVER_MS:  # pragma: no branch - As in `set_schedule`.
        tx.put(keys.due_key(schedule.next_ms, SCHEDULE_DUE + schedule.name.encode()), SCHEDULE_DUE)
        queue_tx.counters.add_due(schedule.next_ms)
