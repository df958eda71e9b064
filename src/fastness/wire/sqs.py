"""Queues as the SQS protocol sees them: created with attributes and tags, deleted, and emptied by move tasks.

An SQS queue is the queue of the same name. What SQS calls VisibilityTimeout, DelaySeconds, MessageRetentionPeriod and
RedrivePolicy is the queue's policy; the rest is stored beside it. Messages are put and received by the requests of
`wire/queues.py`.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.limits import SQS_LIST_MAX, SQS_MESSAGE_BYTES_MAX
from fastness.names import UNIVERSE
from fastness.wire.fields import Name, NameAfter, QueueName
from fastness.wire.requests import Operation, Request

ARN_PREFIX: Final = "arn:aws:sqs:us-east-1:000000000000"  # Of queue names, unless the server has another one.
FIFO_SUFFIX: Final = ".fifo"

# The attributes that a caller can set.
ATTRIBUTES: Final = frozenset(
    (
        "ContentBasedDeduplication",
        "DeduplicationScope",
        "DelaySeconds",
        "FifoQueue",
        "FifoThroughputLimit",
        "KmsDataKeyReusePeriodSeconds",
        "KmsMasterKeyId",
        "MaximumMessageSize",
        "MessageRetentionPeriod",
        "Policy",
        "ReceiveMessageWaitTimeSeconds",
        "RedriveAllowPolicy",
        "RedrivePolicy",
        "SqsManagedSseEnabled",
        "VisibilityTimeout",
    )
)
# Those that are computed.
COMPUTED_ATTRIBUTES: Final = frozenset(
    (
        "ApproximateNumberOfMessages",
        "ApproximateNumberOfMessagesDelayed",
        "ApproximateNumberOfMessagesNotVisible",
        "CreatedTimestamp",
        "LastModifiedTimestamp",
        "QueueArn",
    )
)

DeduplicationScope = Literal["queue", "messageGroup"]
MoveStatus = Literal["RUNNING", "COMPLETED", "CANCELLING", "CANCELLED", "FAILED"]


class SqsQueue(msgspec.Struct, frozen=True):
    """A queue with all of its attributes, also those that have their default or are computed."""

    name: str
    attributes: dict[str, str]
    tags: dict[str, str]
    created_ms: int  # 0: it was made by use, and that is not recorded.
    modified_ms: int  # The same, of its attributes.


class SqsSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What calls that send and receive messages need to know of a queue."""

    exists: bool = False
    fifo: bool = False
    content_based: bool = False  # The deduplication id of a message that has none is the hash of its body.
    scope: DeduplicationScope = "queue"
    wait_seconds: int = 0
    delay_seconds: int = 0
    max_bytes: int = SQS_MESSAGE_BYTES_MAX
    visibility_seconds: int = 30  # 0: a message that is received can be received again at once.


class SqsQueueNames(msgspec.Struct, frozen=True):
    """Names of queues in order; `next` is where the next page starts, if there may be one. A page may be short."""

    names: list[str]
    next: str | None


class MoveTask(msgspec.Struct, frozen=True):
    """A task that moves the messages of a dead-letter queue."""

    handle: str
    status: MoveStatus
    source: str
    destination: str | None  # None: each message returns to the queue that it comes from.
    per_second: int | None  # None: as fast as possible.
    moved: int
    to_move: int  # How many messages were ready when the task started.
    started_ms: int
    reason: str | None = None  # Why it failed.


class MoveTasks(msgspec.Struct, frozen=True):
    """Move tasks, the newest first."""

    tasks: list[MoveTask]


class Purged(msgspec.Struct, frozen=True):
    """Whether all messages are removed; a large queue is emptied after the answer."""

    is_done: bool


class CreateSqsQueue(Request[SqsQueue], frozen=True, tag="sqs.create"):
    """Create a queue. If it exists and the given attributes have the same values, nothing changes."""

    operation = Operation(
        permission="sqs:create",
        stores=True,
        audited=True,
    )

    name: str
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    universe: Name = UNIVERSE

    def queue_names(self) -> tuple[str, ...]:
        return (self.name, *_dead_letter_queue(self.attributes))


class GetSqsQueue(Request[SqsQueue], frozen=True, tag="sqs.get"):
    """A queue with its attributes and tags. `arn_prefix` is what ARNs of queues start with, without the last colon."""

    operation = Operation(queue_field="name", permission="sqs:get", reads=True)

    name: QueueName
    arn_prefix: str = ARN_PREFIX
    universe: Name = UNIVERSE


class GetSqsSettings(Request[SqsSettings], frozen=True, tag="sqs.settings"):
    """What calls that send and receive messages need to know of a queue; `exists` is false if there is none."""

    operation = Operation(queue_field="name", permission="sqs:settings", reads=True)

    name: QueueName
    universe: Name = UNIVERSE


class ListSqsQueues(Request[SqsQueueNames], frozen=True, tag="sqs.list"):
    """The names of queues that start with `prefix`, after the name `after`."""

    operation = Operation(permission="sqs:list", reads=True, lists_queues=True)

    prefix: NameAfter = ""
    after: NameAfter = ""
    limit: Annotated[int, Meta(ge=1, le=limits.SQS_LIST_MAX)] = SQS_LIST_MAX
    universe: Name = UNIVERSE
    only: list[str] = msgspec.field(default_factory=list)  # Empty: all. A server sets the caller's.


class SetSqsAttributes(Request[SqsQueue], frozen=True, tag="sqs.set"):
    """Change attributes of a queue. An empty text removes a policy or the id of a key.

    With `if_policy`, nothing changes unless the attribute Policy has this value; an empty text means none. The answer
    shows which it is: a caller that has computed the policy from that value tries again with the one that is there.
    """

    operation = Operation(
        permission="sqs:set",
        stores=True,
        audited=True,
    )

    name: QueueName
    attributes: dict[str, str]
    universe: Name = UNIVERSE
    if_policy: str | None = None

    def queue_names(self) -> tuple[str, ...]:
        return (self.name, *_dead_letter_queue(self.attributes))


class DeleteSqsQueue(Request[Purged], frozen=True, tag="sqs.delete"):
    """Delete a queue and its messages, also leased ones.

    It does not exist any more for other calls of the SQS protocol when this returns. The messages of a large queue are
    removed after that.
    """

    operation = Operation(queue_field="name", permission="sqs:delete", audited=True)

    name: QueueName
    universe: Name = UNIVERSE


class PurgeSqsQueue(Request[Purged], frozen=True, tag="sqs.purge"):
    """Remove all messages of a queue, also leased ones; once in 60 seconds."""

    operation = Operation(queue_field="name", permission="sqs:purge", audited=True)

    name: QueueName
    universe: Name = UNIVERSE


class TagSqsQueue(Request[SqsQueue], frozen=True, tag="sqs.tag"):
    """Add tags to a queue, or replace their values."""

    operation = Operation(
        queue_field="name",
        permission="sqs:tag",
        stores=True,
        audited=True,
    )

    name: QueueName
    tags: dict[str, str]
    universe: Name = UNIVERSE


class UntagSqsQueue(Request[SqsQueue], frozen=True, tag="sqs.untag"):
    """Remove tags of a queue. A tag that it does not have is ignored."""

    operation = Operation(queue_field="name", permission="sqs:untag", audited=True)

    name: QueueName
    keys: list[str]
    universe: Name = UNIVERSE


class ListSqsSources(Request[SqsQueueNames], frozen=True, tag="sqs.sources"):
    """The names of the queues whose dead letters go to this queue, after the name `after`."""

    operation = Operation(queue_field="name", permission="sqs:sources", reads=True, lists_queues=True)

    name: QueueName
    after: NameAfter = ""
    limit: Annotated[int, Meta(ge=1, le=limits.SQS_LIST_MAX)] = SQS_LIST_MAX
    universe: Name = UNIVERSE
    only: list[str] = msgspec.field(default_factory=list)  # Empty: all. A server sets the caller's.


class StartMoveTask(Request[MoveTask], frozen=True, tag="sqs.moves.start"):
    """Start to move the messages of a dead-letter queue to `destination`, or back to the queues they come from."""

    operation = Operation(permission="sqs:moves.start", stores=True, audited=True)

    source: QueueName
    destination: QueueName | None = None
    per_second: Annotated[int, Meta(ge=1, le=limits.MOVE_TASK_RATE_MAX)] | None = None
    universe: Name = UNIVERSE

    def queue_names(self) -> tuple[str, ...]:
        # Without a destination, the messages return to queues that only they name.
        return (self.source, "*" if self.destination is None else self.destination)


class ListMoveTasks(Request[MoveTasks], frozen=True, tag="sqs.moves.list"):
    """The newest tasks that move messages of a queue."""

    operation = Operation(queue_field="source", permission="sqs:moves.list", reads=True)

    source: QueueName
    limit: Annotated[int, Meta(ge=1, le=limits.MOVE_TASKS_LISTED_MAX)] = 1
    universe: Name = UNIVERSE


class CancelMoveTask(Request[MoveTask], frozen=True, tag="sqs.moves.cancel"):
    """Stop a task that is running. Messages that it has moved stay where they are."""

    operation = Operation(permission="sqs:moves.cancel", audited=True)

    handle: str
    universe: Name = UNIVERSE

    def queue_names(self) -> tuple[str, ...]:
        return (source_of_handle(self.handle),)


def source_of_handle(handle: str) -> str:
    """The name of the queue that the task with this handle moves messages from."""
    return handle.partition("/")[0]


def _dead_letter_queue(attributes: dict[str, str]) -> tuple[str, ...]:
    """The queue that a RedrivePolicy names; all queues if that is not clear."""
    policy = attributes.get("RedrivePolicy")
    if not policy:  # An empty text removes it.
        return ()
    try:
        arn = msgspec.json.decode(policy, type=_RedrivePolicy).deadLetterTargetArn
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return ("*",)
    return (arn.rpartition(":")[2],)


class _RedrivePolicy(msgspec.Struct):
    deadLetterTargetArn: str  # noqa: N815 - the name that SQS has
