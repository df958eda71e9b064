"""Putting messages: what is checked before one is taken, and where it then waits."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from holdfast.errors import BatchTooLarge, Busy, EmptyBatch, InvalidArgument, PayloadTooLarge
from holdfast.kv import Transaction
from holdfast.layers.queues.counters import NEVER_MS, QueueTransaction
from holdfast.layers.queues.keys import QueueKey, QueueKeys, StoredMessage, decode, encode, keys_of, text_of
from holdfast.layers.queues.policies import max_attempts, policy_of, visibility_ms
from holdfast.layers.states import check_correlation_id
from holdfast.limits import (
    ATTRIBUTES_BYTES_MAX,
    ATTRIBUTES_MAX,
    DELAY_SECONDS_MAX,
    IDEMPOTENCY_KEY_BYTES_MAX,
    IDEMPOTENCY_SECONDS,
    MESSAGES_MAX,
    PAYLOAD_CARRIED_BYTES_MAX,
    PAYLOAD_INLINE_BYTES_MAX,
    PRIORITY_MAX,
    SCHEDULES_MAX,
    TTL_SECONDS_MAX,
)
from holdfast.names import checked_name
from holdfast.tiers import Tier
from holdfast.wire.queues import NewMessage, QueuePolicy, Receipt, Schedule

_NUMBERS = (float, int)
_HASH = re.compile(r"[0-9a-f]{64}\Z")
TTL_IS_OVER = b"T"  # What a note of something due says, where it is not the end of a lease or a delay.
SCHEDULE_IS_DUE = b"S"


def put(
    tx: Transaction, queue: QueueKey, messages: Sequence[NewMessage], *, tier: Tier = Tier.CRITICAL
) -> list[Receipt]:
    """Take messages, all or none; a receipt for each.

    A message whose idempotency key was used in the last five minutes is not taken again; its receipt is that of the
    first. `tier` is the promise of the commit that this is part of, which the receipts repeat.

    Raises:
        EmptyBatch, BatchTooLarge, PayloadTooLarge: there is nothing to take, or too much.
        InvalidArgument: a message asks for what no message can have.
    """
    if not messages:
        raise EmptyBatch("There is nothing to put; an empty batch is a mistake of its caller")
    if len(messages) > MESSAGES_MAX:
        raise BatchTooLarge(f"One batch puts at most {MESSAGES_MAX} messages, not {len(messages)}; split it")
    for message in messages:
        check(message)
    queue_tx = QueueTransaction(tx, queue)
    policy = policy_of(tx, queue)
    receipts = [
        put_one(queue_tx, policy, message, id, tier)
        for message, id in zip(messages, queue_tx.new_ids(len(messages)), strict=True)
    ]
    _sweep(queue_tx)
    queue_tx.save()
    return receipts


def settle_into(queue_tx: QueueTransaction, message: StoredMessage, *, delay_ms: int, fresh: bool) -> None:
    """Let a message wait where it belongs: behind its group, for its delay, or to be delivered."""
    message.owner, message.due_ms = None, queue_tx.tx.now_ms + delay_ms
    if message.group is not None and message.origin is None and not _lead(queue_tx, message, message.group):
        queue_tx.tx.put(queue_tx.keys.waiting_key(message), encode(message))
        queue_tx.counters.blocked += 1
    elif delay_ms > 0:
        queue_tx.park(message)
    else:
        queue_tx.make_ready(message, fresh=fresh)


def pass_the_lead(queue_tx: QueueTransaction, message: StoredMessage) -> None:
    """A message leaves its queue: the next one of its group, if there is one, can be delivered."""
    if message.group is None or message.origin is not None:
        return
    tx, keys = queue_tx.tx, queue_tx.keys
    head_key = keys.head.key(message.group)
    head = tx.get(head_key)
    if head is None or head[:16] != message.id:
        return
    following = tx.scan(*keys.group_range(message.group, head[16:]), limit=1)
    if not following:
        tx.delete(head_key)
        return
    key, value = following[0]
    tx.delete(key)
    queue_tx.counters.blocked -= 1
    successor = decode(value)
    tx.put(head_key, successor.id + successor.id + b"\x00")  # The next one to follow sorts behind this one.
    if successor.due_ms > tx.now_ms:
        queue_tx.park(successor)
    else:
        queue_tx.make_ready(successor, fresh=False)


def _sweep(queue_tx: QueueTransaction) -> None:
    """Once a minute, forget the idempotency keys and the acks that nobody will ask for any more."""
    tx, keys = queue_tx.tx, queue_tx.keys
    minute = tx.now_ms // 60_000
    if minute <= queue_tx.counters.swept_minute:
        return
    queue_tx.counters.swept_minute = minute
    tx.delete_range(keys.ids.range()[0], keys.ids.key(_period(tx.now_ms) - 1))
    tx.delete_range(keys.acks.range()[0], keys.acks.key(minute - IDEMPOTENCY_SECONDS // 60 - 1))


def put_one(queue_tx: QueueTransaction, policy: QueuePolicy, new: NewMessage, id: bytes, tier: Tier) -> Receipt:
    """Take a message that was checked, under a new id of the book, which the caller saves."""
    tx, keys = queue_tx.tx, queue_tx.keys
    if new.idempotency_key is not None:
        first = _used(tx, keys, new.idempotency_key)
        if first is not None:
            return Receipt(text_of(first[:16]), tier, True, first[24:].decode())
    text = text_of(id)
    correlation_id = new.correlation_id or text
    if new.idempotency_key is not None:
        remembered = id + tx.now_ms.to_bytes(8, "big") + correlation_id.encode()
        tx.put(keys.ids.key(_period(tx.now_ms), new.idempotency_key), remembered)
    payload, blob, now_ms = new.payload, new.blob, tx.now_ms
    inline = len(payload) <= PAYLOAD_CARRIED_BYTES_MAX
    ttl_seconds = policy.retention_seconds if new.ttl_seconds is None else new.ttl_seconds
    visibility = policy.visibility_seconds if new.visibility_seconds is None else new.visibility_seconds
    # By position, which is twice as fast; the fields are in the order in which Stored declares them.
    message = StoredMessage(
        id,
        payload if inline and blob is None else None,
        blob,
        len(payload) if blob is None else new.blob_size,
        new.content_type,
        new.attributes,
        correlation_id,
        new.priority,
        None if new.group is None else checked_name("group", new.group),
        now_ms,
        policy.max_attempts if new.max_attempts is None else new.max_attempts,
        round(visibility * 1_000),
    )
    if not inline:
        tx.put(keys.body_key(id), new.payload)
    if ttl_seconds is not None:
        note_ttl(queue_tx, message, ttl_seconds)
    if message.group is None and not new.delay_seconds:
        queue_tx.make_ready(message, fresh=True)  # What `settle_into` comes to for most messages.
    else:
        settle_into(queue_tx, message, delay_ms=round(new.delay_seconds * 1_000), fresh=True)
    queue_tx.counters.put += 1
    queue_tx.emit("put", message)
    return Receipt(text, tier, False, correlation_id)


def note_ttl(queue_tx: QueueTransaction, message: StoredMessage, seconds: float) -> None:
    """Give a message an end."""
    at_ms = message.ttl_at_ms = queue_tx.tx.now_ms + round(seconds * 1_000)
    # The note says where to look: a message that nobody has is ready, or waits behind its group.
    where = TTL_IS_OVER + bytes((message.priority,)) + (message.group or "").encode()
    queue_tx.tx.put(queue_tx.keys.due_key(at_ms, message.id + TTL_IS_OVER), where)
    queue_tx.counters.note_due(at_ms)


def _lead(queue_tx: QueueTransaction, message: StoredMessage, group: str) -> bool:
    """Whether the message leads its group from now on; otherwise another one does."""
    tx, key = queue_tx.tx, queue_tx.keys.head.key(group)
    head = tx.get(key)
    if head is None:
        tx.put(key, message.id + message.id + b"\x00")
        return True
    if message.id < head[16:]:  # A dead letter that was put back sorts before what has passed.
        tx.put(key, head[:16] + message.id)
    return head[:16] == message.id


def _used(tx: Transaction, keys: QueueKeys, key: str) -> bytes | None:
    """What is remembered of an idempotency key that was used not too long ago."""
    period = _period(tx.now_ms)
    for each in (period, period - 1):
        found = tx.get(keys.ids.key(each, key))
        if found is not None and tx.now_ms < int.from_bytes(found[16:24], "big") + IDEMPOTENCY_SECONDS * 1_000:
            return found
    return None


def _check_text(new: NewMessage) -> None:
    try:
        new.content_type.encode()
        (new.idempotency_key or "").encode()
        (new.blob or "").encode()
        if new.attributes:
            "".join([*new.attributes, *new.attributes.values()]).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{error.object[:32]!r} is no valid text ({error.reason}); correct it") from None


def _period(now_ms: int) -> int:
    return now_ms // (IDEMPOTENCY_SECONDS * 1_000)


def check(new: NewMessage) -> None:
    """Refuse a message that asks for what no message can have, or could not be read again.

    What comes in over the network has the right types already; what a caller in this process makes may not.
    """
    if (
        new.payload.__class__ is not bytes
        or new.priority.__class__ is not int
        or new.blob_size.__class__ is not int
        or new.attributes.__class__ is not dict
        or new.content_type.__class__ is not str
        or not (new.blob is None or new.blob.__class__ is str)
        or not (new.group is None or new.group.__class__ is str)
        or not (new.max_attempts is None or new.max_attempts.__class__ is int)
        or not (new.idempotency_key is None or new.idempotency_key.__class__ is str)
        or new.delay_seconds.__class__ not in _NUMBERS
        or (new.ttl_seconds is not None and new.ttl_seconds.__class__ not in _NUMBERS)
        or (new.visibility_seconds is not None and new.visibility_seconds.__class__ not in _NUMBERS)
        or (new.attributes and not all(part.__class__ is str for pair in new.attributes.items() for part in pair))
    ):
        raise InvalidArgument(f"A part of the message has the wrong type; it must look like {NewMessage()}")
    if not new.content_type.isascii() or new.attributes or new.idempotency_key is not None or new.blob is not None:
        _check_text(new)
    if len(new.payload) > PAYLOAD_INLINE_BYTES_MAX:
        raise PayloadTooLarge(
            f"A payload of {len(new.payload)} bytes does not fit a message; store it as a blob and give its hash"
        )
    if new.blob is not None and (not _HASH.match(new.blob) or new.blob_size < 0):
        raise InvalidArgument(f"{new.blob!r} of {new.blob_size} bytes names no blob; give what storing it answered")
    if new.blob is not None and new.payload:
        raise InvalidArgument("A message has a payload or a blob, not both; leave one of them out")
    if not 0 <= new.priority <= PRIORITY_MAX:
        raise InvalidArgument(f"A priority is 0 to {PRIORITY_MAX}, {PRIORITY_MAX} the most urgent, not {new.priority}")
    if not 0 <= new.delay_seconds <= DELAY_SECONDS_MAX:
        raise InvalidArgument(f"delay_seconds is {new.delay_seconds}; choose 0 to {DELAY_SECONDS_MAX:.0f}")
    if new.ttl_seconds is not None and not 0.001 <= new.ttl_seconds <= TTL_SECONDS_MAX:
        raise InvalidArgument(f"ttl_seconds is {new.ttl_seconds}; choose 0.001 to {TTL_SECONDS_MAX:.0f}, or none")
    if new.max_attempts is not None:
        max_attempts(new.max_attempts)
    if new.visibility_seconds is not None:
        visibility_ms(new.visibility_seconds)
    if new.attributes and (
        len(new.attributes) > ATTRIBUTES_MAX
        or sum(len(name) + len(value) for name, value in new.attributes.items()) > ATTRIBUTES_BYTES_MAX
    ):
        raise InvalidArgument(
            f"A message has at most {ATTRIBUTES_MAX} attributes of {ATTRIBUTES_BYTES_MAX} characters in all; "
            "put the rest into its payload"
        )
    if new.idempotency_key is not None and not 0 < len(new.idempotency_key.encode()) <= IDEMPOTENCY_KEY_BYTES_MAX:
        raise InvalidArgument(f"An idempotency key has 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes; hash a longer one")
    if new.correlation_id is not None:
        check_correlation_id(new.correlation_id)


# Schedules: messages that a queue puts itself, at the times of a cron expression.
#
# A schedule has an entry in the due index. When it is due, one commit puts the message and enters the next time, so
# each time counts once, however many processes look. Times that passed while no process was running count as one.


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Schedule).decode


def set_schedule(
    tx: Transaction, queue: QueueKey, name: str, *, cron: Any, timezone: Any, message: NewMessage
) -> Schedule:
    """Put `message` whenever the clock of `timezone` says what `cron` names; in place of a schedule of the same name.

    Raises:
        InvalidArgument: one of them is not understood, or the time never comes.
        Busy: the queue has as many schedules as it may.
    """
    check(message)
    if not isinstance(cron, str) or not isinstance(timezone, str):
        raise InvalidArgument(f"A cron expression and a time zone are text, not {cron!r} and {timezone!r}")
    keys = keys_of(queue)
    next_ms = _after(cron, timezone, tx.now_ms)
    if next_ms == NEVER_MS:
        raise InvalidArgument(f"{cron!r} never comes; check its day and month")
    if tx.get(keys.schedules.key(name)) is None and len(_all(tx, keys)) >= SCHEDULES_MAX:
        raise Busy(f"{queue.name} has {SCHEDULES_MAX} schedules; remove some first")
    queue_tx = QueueTransaction(tx, queue)
    _forget(tx, keys, name)
    schedule = Schedule(name, cron, timezone, message, next_ms)
    _note(queue_tx, schedule)
    queue_tx.save()
    return schedule


def remove_schedule(tx: Transaction, queue: QueueKey, name: str) -> bool:
    """Remove a schedule; whether there was one."""
    return _forget(tx, keys_of(queue), name)


def schedules_of(tx: Transaction, queue: QueueKey) -> list[Schedule]:
    """The schedules of a queue, in the order of their names."""
    return _all(tx, keys_of(queue))


def strike(queue_tx: QueueTransaction, name: str) -> None:
    """The moment of a schedule has come: put its message, and note when it strikes next."""
    stored = queue_tx.tx.get(queue_tx.keys.schedules.key(name))
    if stored is None:
        return
    schedule = _decode(stored)
    put_one(queue_tx, policy_of(queue_tx.tx, queue_tx.queue), schedule.message, queue_tx.new_id(), Tier.CRITICAL)
    next_ms = _after(schedule.cron, schedule.timezone, queue_tx.tx.now_ms)
    _note(queue_tx, msgspec.structs.replace(schedule, next_ms=next_ms))


def _after(cron: str, timezone: str, now_ms: int) -> int:
    try:
        zone = UTC if timezone == "UTC" else ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise InvalidArgument(f"{timezone!r} is no time zone; write one like Europe/Berlin") from None
    try:
        moment = next(CronSim(cron, datetime.fromtimestamp(now_ms / 1_000, zone)))
    except (CronSimError, TypeError) as error:
        raise InvalidArgument(
            f"{cron!r} is no cron expression ({error}); write minute, hour, day, month and weekday"
        ) from None
    except StopIteration:
        return NEVER_MS
    return round(moment.timestamp() * 1_000)


def _note(queue_tx: QueueTransaction, schedule: Schedule) -> None:
    tx, keys = queue_tx.tx, queue_tx.keys
    tx.put(keys.schedules.key(schedule.name), _encode(schedule))
    if schedule.next_ms != NEVER_MS:
        tx.put(keys.due_key(schedule.next_ms, SCHEDULE_IS_DUE + schedule.name.encode()), SCHEDULE_IS_DUE)
        queue_tx.counters.note_due(schedule.next_ms)


def _forget(tx: Transaction, keys: QueueKeys, name: str) -> bool:
    stored = tx.get(keys.schedules.key(name))
    if stored is None:
        return False
    schedule = _decode(stored)
    tx.delete(keys.schedules.key(name))
    tx.delete(keys.due_key(schedule.next_ms, SCHEDULE_IS_DUE + name.encode()))
    return True


def _all(tx: Transaction, keys: QueueKeys) -> list[Schedule]:
    return [_decode(value) for _, value in tx.scan(*keys.schedules.range(), limit=SCHEDULES_MAX)]
