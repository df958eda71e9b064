"""Queues of the SQS protocol: created with attributes and tags, changed, listed, purged and deleted.

    (u, universe, "q", queue, "policy")  ->  what attributes mean for messages (`sqs_attributes.py`)
    (u, universe, "q", queue, "sqs")     ->  the other attributes, the tags, and when the queue was created and purged

                create                             60 seconds later, and no messages are left
    absent ───────────────► exists ── delete ──► deleted ──────────────────────────────────► absent
       └─ a native put, or a policy ──► exists

A queue that native calls made has no record; its attributes follow from its policy. A deleted queue has a mark in the
place of its policy until its last message is removed, so that every call that reads the policy finds it absent.
"""

from collections.abc import Mapping, Sequence

import msgspec

from fastness.errors import (
    PurgeInProgress,
    QueueNotFound,
    SqsQueueDeletedRecently,
    SqsQueueExists,
)
from fastness.kv import Transaction
from fastness.layers import queues, sqs_attributes
from fastness.layers.queues import QueueKey, Work, WorkKey, dead_letter_sources, keys_of
from fastness.layers.queues import work as work_list
from fastness.layers.queues.counters import total_counters
from fastness.layers.queues.dead_letter_sources import forget as forget_source
from fastness.layers.queues.policies import DELETED
from fastness.layers.sqs_attributes import is_fifo
from fastness.limits import (
    SQS_DELETED_SECONDS,
    SQS_MESSAGE_BYTES_MAX,
    SQS_PURGE_SECONDS,
)
from fastness.wire.sqs import ARN_PREFIX, SqsQueue, SqsQueueNames, SqsSettings


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What the SQS protocol has of a queue beside its policy."""

    attributes: dict[str, str] = {}
    tags: dict[str, str] = {}
    created_ms: int = 0
    modified_ms: int = 0
    purged_ms: int = 0
    arn: str = ""  # Of the dead-letter queue, as it was given.


_NO_RECORD = Record()
_ABSENT = SqsSettings()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def create(tx: Transaction, queue: QueueKey, attributes: Mapping[str, str], tags: Mapping[str, str]) -> SqsQueue:
    """Create a queue. One that exists with these values of the given attributes is returned unchanged.

    Raises:
        UnknownSqsAttribute, InvalidSqsAttribute, InvalidArgument: an attribute is invalid.
        InvalidArgument: the name or a tag is invalid.
        SqsQueueExists: the queue exists, and a given attribute has another value.
        SqsQueueDeletedRecently: a queue of this name was deleted less than 60 seconds ago.
    """
    name = sqs_attributes.checked_new_name(queue.name)
    given = sqs_attributes.checked(name, attributes)
    sqs_attributes.check_fifo(name, given)
    tags = sqs_attributes.checked_tags(tags)
    _check_not_deleted(tx, queue)
    if queues.exists(tx, keys_of(queue)):
        found = get(tx, queue)
        different = sqs_attributes.difference(found.attributes, given)
        if different is not None:
            raise SqsQueueExists(
                f"A queue already exists with the same name and a different value for attribute {different}"
            )
        return found
    _check_redrive(tx, queue, given)
    stored = sqs_attributes.merged({}, given)
    queues.set_policy(tx, queue, sqs_attributes.new_policy(name, given))
    record = Record(stored, tags, tx.now_ms, tx.now_ms, arn=_arn(given))
    _save(tx, queue, record)
    return get(tx, queue)


def get(tx: Transaction, queue: QueueKey, *, arn_prefix: str = ARN_PREFIX) -> SqsQueue:
    """A queue with all of its attributes.

    Raises:
        QueueNotFound: it does not exist.
    """
    require(tx, queue)
    record, policy = _record(tx, queue), queues.policy_of(tx, queue)
    counters = total_counters(tx, keys_of(queue))
    attributes = sqs_attributes.derived(
        queue.name, policy, record.attributes, arn_prefix=arn_prefix, arn=record.arn
    ) | {
        "QueueArn": f"{arn_prefix}:{queue.name}",
        # A message behind another one of its group is visible: receiving and deleting those before it makes it next.
        "ApproximateNumberOfMessages": str(max(counters.ready_total() + counters.blocked, 0)),
        "ApproximateNumberOfMessagesNotVisible": str(max(counters.leased, 0)),
        "ApproximateNumberOfMessagesDelayed": str(max(counters.delayed, 0)),
        "CreatedTimestamp": str(record.created_ms // 1_000),
        "LastModifiedTimestamp": str(record.modified_ms // 1_000),
    }
    return SqsQueue(queue.name, attributes, record.tags, record.created_ms, record.modified_ms)


def settings(tx: Transaction, queue: QueueKey) -> SqsSettings:
    """What calls that send and receive messages need to know of a queue, also of one that does not exist."""
    keys = keys_of(queue)
    tx.prefetch(keys.policy, keys.sqs)
    if not queues.exists(tx, keys):
        return _ABSENT
    policy, attributes = queues.policy_of(tx, queue), _record(tx, queue).attributes
    return SqsSettings(
        exists=True,
        fifo=is_fifo(queue.name),
        content_based=attributes.get("ContentBasedDeduplication") == "true",
        scope="messageGroup" if attributes.get("DeduplicationScope") == "messageGroup" else "queue",
        wait_seconds=int(attributes.get("ReceiveMessageWaitTimeSeconds", 0)),
        delay_seconds=round(policy.delay_seconds),
        max_bytes=int(attributes.get("MaximumMessageSize", SQS_MESSAGE_BYTES_MAX)),
        visibility_seconds=sqs_attributes.visibility_seconds(policy),
    )


def set_attributes(
    tx: Transaction, queue: QueueKey, attributes: Mapping[str, str], *, if_policy: str | None = None
) -> SqsQueue:
    """Change attributes of a queue; with `if_policy`, only if this is its Policy, which is "" if it has none.

    Raises:
        QueueNotFound: it does not exist.
        UnknownSqsAttribute, InvalidSqsAttribute, InvalidArgument: an attribute is invalid.
    """
    require(tx, queue)
    if if_policy is not None and if_policy != _record(tx, queue).attributes.get("Policy", ""):
        return get(tx, queue)
    changes = sqs_attributes.checked(queue.name, attributes)
    sqs_attributes.check_same_type(queue.name, changes)
    _check_redrive(tx, queue, changes)
    record, policy = _record(tx, queue), queues.policy_of(tx, queue)
    stored = sqs_attributes.merged(record.attributes, changes)
    changed = sqs_attributes.policy_with(queue.name, policy, changes)
    if changed != policy:
        queues.set_policy(tx, queue, changed)
    arn = _arn(changes) if "RedrivePolicy" in changes else record.arn
    _save(tx, queue, msgspec.structs.replace(record, attributes=stored, modified_ms=tx.now_ms, arn=arn))
    return get(tx, queue)


def names(
    tx: Transaction, universe: str, *, prefix: str, after: str, limit: int, only: Sequence[str] = ()
) -> SqsQueueNames:
    """The names of the queues that start with `prefix`, after `after`, in order; at most `limit`, of those in `only`.

    A queue that is being deleted is left out, so a page may have fewer, and more follow.
    """
    seen = queues.matching_names(tx, universe, after=after, limit=limit + 1, only=only, prefix=prefix)
    is_last = len(seen) <= limit
    page = seen[:limit]
    found = [name for name in page if queues.exists(tx, keys_of(QueueKey(universe, name)))]
    return SqsQueueNames(found, None if is_last else page[-1])


def sources(tx: Transaction, queue: QueueKey, *, after: str, limit: int, only: Sequence[str] = ()) -> SqsQueueNames:
    """At most `limit` names of queues whose dead letters go to this one, after `after`, in order; of those in `only`.

    Raises:
        QueueNotFound: it does not exist.
    """
    require(tx, queue)
    found, following = dead_letter_sources(tx, queue, after=after, limit=limit, only=only)
    return SqsQueueNames(found, following)


def tag(tx: Transaction, queue: QueueKey, tags: Mapping[str, str]) -> SqsQueue:
    """Add tags to a queue, or replace their values.

    Raises:
        QueueNotFound: it does not exist.
        InvalidArgument: it would have too many tags, or one is invalid.
    """
    require(tx, queue)
    record = _record(tx, queue)
    tags = sqs_attributes.checked_tags({**record.tags, **tags})
    _save(tx, queue, msgspec.structs.replace(record, tags=tags))
    return get(tx, queue)


def untag(tx: Transaction, queue: QueueKey, keys: Sequence[str]) -> SqsQueue:
    """Remove tags of a queue, as far as it has them.

    Raises:
        QueueNotFound: it does not exist.
    """
    require(tx, queue)
    record = _record(tx, queue)
    left = {key: value for key, value in record.tags.items() if key not in keys}
    if left != record.tags:
        _save(tx, queue, msgspec.structs.replace(record, tags=left))
    return get(tx, queue)


def require(tx: Transaction, queue: QueueKey) -> None:
    """Raise QueueNotFound unless a queue exists."""
    if not queues.exists(tx, keys_of(queue)):
        raise QueueNotFound(f"Queue {queue.name} does not exist in {queue.universe}; create it, or correct its name")


# Purges and deletions: the first transaction decides, and `purge_step` and `delete_step` remove the messages.


def begin_purge(tx: Transaction, queue: QueueKey) -> None:
    """Begin to remove all messages of a queue.

    Raises:
        QueueNotFound: it does not exist.
        PurgeInProgress: it was purged less than 60 seconds ago.
    """
    require(tx, queue)
    record = _record(tx, queue)
    left_ms = record.purged_ms + SQS_PURGE_SECONDS * 1_000 - tx.now_ms
    if 0 < left_ms <= SQS_PURGE_SECONDS * 1_000:  # More: the clock was set back.
        raise PurgeInProgress(
            f"Only one PurgeQueue operation on {queue.name} is allowed every {SQS_PURGE_SECONDS} seconds."
        )
    tx.delete_range(*keys_of(queue).ids.range())  # A message that is sent again after the purge is a new one.
    _save(tx, queue, msgspec.structs.replace(record, purged_ms=tx.now_ms))
    work_list.save(tx, WorkKey(*queue, "purge"), Work(tx.now_ms))


def purge_step(tx: Transaction, queue: QueueKey, work: Work) -> int | None:
    """Remove a batch of the messages of a queue that is being purged."""
    queues.purge_step(tx, queue, work, leased=True)
    return None if work.is_done else 0


def begin_delete(tx: Transaction, queue: QueueKey) -> None:
    """Delete a queue: it does not exist from now on, and its messages are removed later.

    Raises:
        QueueNotFound: it does not exist.
    """
    require(tx, queue)
    forget_source(tx, queue, queues.policy_of(tx, queue))
    tx.put(keys_of(queue).policy, DELETED)
    tx.delete(keys_of(queue).sqs)
    work_list.remove(tx, WorkKey(*queue, "purge"))
    work_list.remove(tx, WorkKey(*queue, "move"))
    tx.delete_range(*work_list.tasks_of(*queue).range())
    work_list.save(tx, WorkKey(*queue, "delete"), Work(tx.now_ms))


def delete_step(tx: Transaction, queue: QueueKey, work: Work) -> int | None:
    """Remove a batch of the messages of a deleted queue; in the end, let its name be used again."""
    if not work.is_done and queues.is_deleted(tx, keys_of(queue)):
        queues.delete_step(tx, queue, work, force=True)
        if not work.is_done:
            return 0
    work.is_done = True  # Also if its policy is gone: a native call has deleted it, too.
    return _name_free_in_ms(tx, work) or None


def _check_not_deleted(tx: Transaction, queue: QueueKey) -> None:
    work = work_list.find(tx, WorkKey(*queue, "delete"))
    if work is None:
        return
    if not work.is_done and queues.is_deleted(tx, keys_of(queue)):
        raise SqsQueueDeletedRecently(
            f"The messages of the deleted queue {queue.name} are still being removed; wait, or choose another name"
        )
    left_ms = _name_free_in_ms(tx, work)
    if left_ms > 0 and not queues.exists(tx, keys_of(queue)):
        raise SqsQueueDeletedRecently(
            f"You must wait {SQS_DELETED_SECONDS} seconds after deleting a queue before you can create another with "
            "the same name."
        )
    work_list.remove(tx, WorkKey(*queue, "delete"))


def _name_free_in_ms(tx: Transaction, work: Work) -> int:
    """In how many milliseconds the name of a deleted queue can be used again."""
    left_ms = work.since_ms + SQS_DELETED_SECONDS * 1_000 - tx.now_ms
    return max(left_ms, 0) if left_ms <= SQS_DELETED_SECONDS * 1_000 else 0  # More: the clock was set back.


def _check_redrive(tx: Transaction, queue: QueueKey, attributes: Mapping[str, str]) -> None:
    """Raise InvalidArgument if the dead-letter queue in a RedrivePolicy cannot be that of this queue."""
    redrive = sqs_attributes.parse_redrive(attributes.get("RedrivePolicy", ""))
    if redrive is None:
        return
    target = QueueKey(queue.universe, redrive.target)
    if target == queue:  # As in SQS, where it has no use either.
        return
    if not queues.exists(tx, keys_of(target)):
        reason = "Dead letter target does not exist."
    elif is_fifo(target.name) != is_fifo(queue.name):
        reason = "Dead-letter queue must be same type of queue as the source."
    elif not _redrive_allow(tx, target).allows(queue.name):
        reason = f"The RedriveAllowPolicy of {target.name} does not allow this queue."
    else:
        return
    raise sqs_attributes.invalid_redrive(attributes["RedrivePolicy"], reason)


def _redrive_allow(tx: Transaction, queue: QueueKey) -> sqs_attributes.RedriveAllow:
    return sqs_attributes.parse_redrive_allow(_record(tx, queue).attributes.get("RedriveAllowPolicy", ""))


def _arn(attributes: Mapping[str, str]) -> str:
    redrive = sqs_attributes.parse_redrive(attributes.get("RedrivePolicy", ""))
    return "" if redrive is None else redrive.arn


def _record(tx: Transaction, queue: QueueKey) -> Record:
    stored = tx.get(keys_of(queue).sqs)
    return _NO_RECORD if stored is None else _decode(stored)


def _save(tx: Transaction, queue: QueueKey, record: Record) -> None:
    tx.put(keys_of(queue).sqs, _encode(record))
