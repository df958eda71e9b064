"""Every error that Fastness raises. `code` and `retry` are API; the message is for people and says what to do next.

FastnessError
├── Validation            the request is wrong; nothing was written
│   ├── InvalidUrl, InvalidName, InvalidKey, InvalidValue, InvalidArgument, IdempotencyKeyReused
│   ├── KeyTooLarge, ValueTooLarge, TransactionTooLarge, EmptyBatch, BatchTooLarge, PayloadTooLarge, AnswerTooLarge
│   ├── NestedTransaction, TransactionEnded, ReadOnlyTransaction, UnsupportedTier, NotSynchronous, NotEmbedded
│   ├── NotTransactional, TransactionRequired, WrongDatabase, IsolationUnsupported
│   ├── LockOrderViolation, WorkflowMisuse
│   └── UnknownSqsAttribute, InvalidSqsAttribute, NotDeadLetterQueue
├── NotAllowed            the token does not allow it
│   └── SenderBlocked, SenderMismatch, SendRefused
├── NotFound              the named thing does not exist
│   ├── ObjectNotFound, BlobNotFound, WorldNotFound, SnapshotNotFound, MessageNotFound, MailNotFound
│   └── QueueNotFound, EffectNotFound, ItemNotFound, ResultNotKept, RunNotFound, MoveTaskNotFound
├── Conflict              another writer was first; read the current state, then decide
│   ├── TransactionConflict, ObjectExists, ObjectChanged, TargetNotEmpty, AnotherHistory, WouldLoseData
│   ├── WorldExists, WorldNotActive, WorldHeld, HeadAdvanced, CursorAdvanced
│   ├── SnapshotExists, BaselineRegressed, PromotionRefused, SegmentExists
│   ├── LeaseHeld, CasMismatch, VersionConflict
│   ├── MailboxTaken, AgentExists, QueueInUse
│   ├── MessageLeased, MessageKeyTaken, MessageFailed, MessageFinished
│   ├── SqsQueueExists, MoveTaskRunning, MoveTaskNotRunning
│   └── RunExists, RunEnded, RunNotEnded, RunFailed, RunCancelled, WorkflowChanged, StepFailed
├── Fenced                the lease given with a write does not permit it
│   ├── LeaseRequired, LeaseConflict, LeaseExpired, FencingMismatch, TxnMismatch
│   └── QueueMessageLeaseMismatch
│       └── MessageCancelled
├── Busy                  a limit was reached; the same request may succeed later
│   ├── LockTimeout, QueueBusy, MailboxFull, RateLimited, QuotaExceeded, ShutdownDraining, ResultNotReady
│   └── SqsQueueDeletedRecently, PurgeInProgress
├── Closed                the handle was closed
├── Corrupt               stored data is damaged; damage is reported, never repaired silently
│   ├── DamagedDatabase, HashMismatch, SizeMismatch, MissingObject
│   └── MissingEntry, ChecksumMismatch, MalformedSegment, SealBroken, DecryptionFailed, UnreadableValue
└── Backend               the storage or network below Fastness failed
    ├── DirectoryInUse, PlaneInUse, MigrationUnfinished, EncryptionKeyMissing
    ├── PathUnusable, Unreachable, DiskFull, DatabaseFailed, SchemaMismatch, Unsupported
    └── CommitUnknown     the answer was lost: the write may or may not have been committed
"""

from enum import StrEnum
from typing import ClassVar

__all__ = [
    "ResultNotReady",
    "ResultNotKept",
    "MessageLeased",
    "MessageFailed",
    "MessageFinished",
    "MessageKeyTaken",
    "MessageCancelled",
    "AgentExists",
    "AnotherHistory",
    "AnswerTooLarge",
    "Backend",
    "BaselineRegressed",
    "BatchTooLarge",
    "BlobNotFound",
    "Busy",
    "CasMismatch",
    "ChecksumMismatch",
    "Closed",
    "CommitUnknown",
    "Conflict",
    "Corrupt",
    "CursorAdvanced",
    "DamagedDatabase",
    "DatabaseFailed",
    "DecryptionFailed",
    "DirectoryInUse",
    "DiskFull",
    "EffectNotFound",
    "EmptyBatch",
    "EncryptionKeyMissing",
    "Fenced",
    "FencingMismatch",
    "HashMismatch",
    "HeadAdvanced",
    "FastnessError",
    "IdempotencyKeyReused",
    "InvalidArgument",
    "InvalidKey",
    "InvalidName",
    "InvalidSqsAttribute",
    "InvalidUrl",
    "InvalidValue",
    "IsolationUnsupported",
    "ItemNotFound",
    "KeyTooLarge",
    "LeaseConflict",
    "LeaseExpired",
    "LeaseHeld",
    "LeaseRequired",
    "LockOrderViolation",
    "LockTimeout",
    "MailNotFound",
    "MailboxFull",
    "MailboxTaken",
    "MalformedSegment",
    "MessageNotFound",
    "MigrationUnfinished",
    "MissingEntry",
    "MissingObject",
    "MoveTaskNotFound",
    "MoveTaskNotRunning",
    "MoveTaskRunning",
    "NestedTransaction",
    "NotAllowed",
    "NotDeadLetterQueue",
    "NotEmbedded",
    "NotFound",
    "NotSynchronous",
    "NotTransactional",
    "ObjectChanged",
    "ObjectExists",
    "ObjectNotFound",
    "PathUnusable",
    "PayloadTooLarge",
    "PlaneInUse",
    "PromotionRefused",
    "PurgeInProgress",
    "QueueBusy",
    "QueueInUse",
    "QueueMessageLeaseMismatch",
    "QueueNotFound",
    "QuotaExceeded",
    "RateLimited",
    "ReadOnlyTransaction",
    "RetryAdvice",
    "RunCancelled",
    "RunEnded",
    "RunExists",
    "RunFailed",
    "RunNotEnded",
    "RunNotFound",
    "SchemaMismatch",
    "SealBroken",
    "SegmentExists",
    "SendRefused",
    "SenderBlocked",
    "SenderMismatch",
    "ShutdownDraining",
    "SizeMismatch",
    "SnapshotExists",
    "SnapshotNotFound",
    "SqsQueueDeletedRecently",
    "SqsQueueExists",
    "StepFailed",
    "TargetNotEmpty",
    "TransactionConflict",
    "TransactionEnded",
    "TransactionRequired",
    "TransactionTooLarge",
    "TxnMismatch",
    "UnknownSqsAttribute",
    "Unreachable",
    "UnreadableValue",
    "Unsupported",
    "UnsupportedTier",
    "Validation",
    "ValueTooLarge",
    "VersionConflict",
    "WorkflowChanged",
    "WorkflowMisuse",
    "WorldExists",
    "WorldHeld",
    "WorldNotActive",
    "WorldNotFound",
    "WouldLoseData",
    "WrongDatabase",
]


class RetryAdvice(StrEnum):
    """What a caller may do after an error."""

    NEVER = "never"  # The same request will fail again; change it.
    REFRESH = "refresh"  # Read the current state, then decide.
    LATER = "later"  # The same request may succeed after a pause.
    IDEMPOTENT = "idempotent"  # It may have been committed; repeat it only with an idempotency key or after a read.


class FastnessError(Exception):
    """The base class of every error that Fastness raises on purpose."""

    code: ClassVar[str] = "error"
    retry: ClassVar[RetryAdvice] = RetryAdvice.NEVER

    @property
    def help(self) -> str:
        """The command that shows the cause of this error and what to do about it."""
        return f"fastness explain {self.code}"


# Validation: the request itself.


class Validation(FastnessError):
    """The request is wrong; nothing was written."""

    code = "validation"


class InvalidUrl(Validation):
    """The URL is not one that can be used here; the message says which can."""

    code = "invalid_url"


class InvalidName(Validation):
    """A name contains characters that names cannot contain, or has a length that names cannot have."""

    code = "invalid_name"


class InvalidKey(Validation):
    """A key, or a part of one, has a type or form that keys cannot have."""

    code = "invalid_key"


class InvalidValue(Validation):
    """A value has a type, a form or a depth that cannot be stored or read."""

    code = "invalid_value"


class InvalidArgument(Validation):
    """An argument is not allowed, alone or together with another; the message names it and what to give."""

    code = "invalid_argument"


class IdempotencyKeyReused(Validation):
    """The idempotency key was recently used for a different call; nothing was done. Give each call its own key."""

    code = "idempotency_key_reused"


class KeyTooLarge(Validation):
    """A key, or a part of one, is longer than the limit that the message names."""

    code = "key_too_large"


class ValueTooLarge(Validation):
    """A value is longer than the limit that the message names; store it as a blob."""

    code = "value_too_large"


class TransactionTooLarge(Validation):
    """One transaction writes more bytes or keys than the limit allows."""

    code = "transaction_too_large"


class EmptyBatch(Validation):
    """A batch or a list is empty and needs at least one item."""

    code = "empty_batch"


class BatchTooLarge(Validation):
    """A batch or a list has more items or bytes than one call may have; split it."""

    code = "batch_too_large"


class PayloadTooLarge(Validation):
    """The payload is over the limit, or over what the token allows. Send less, or store a blob and send its hash."""

    code = "payload_too_large"


class AnswerTooLarge(Validation):
    """The answer is longer than one call carries. Ask for fewer items, or read the blob over HTTP."""

    code = "answer_too_large"


class NestedTransaction(Validation):
    """`transact` was called inside a transaction of the same database."""

    code = "nested_transaction"


class TransactionEnded(Validation):
    """The transaction was used after its function returned."""

    code = "transaction_ended"


class ReadOnlyTransaction(Validation):
    """A write was attempted in a read-only snapshot."""

    code = "read_only_transaction"


class UnsupportedTier(Validation):
    """A transaction cannot be acknowledged at this tier."""

    code = "unsupported_tier"


class NotSynchronous(Validation):
    """The function is a coroutine or a generator: it would run after its transaction has ended."""

    code = "not_synchronous"


class NotEmbedded(Validation):
    """This call needs the database in the same process, and the handle is connected to a server."""

    code = "not_embedded"


class NotTransactional(Validation):
    """This call cannot be part of a transaction of the caller's own connection."""

    code = "not_transactional"


class TransactionRequired(Validation):
    """The caller's connection has no open transaction, or a failed one."""

    code = "transaction_required"


class WrongDatabase(Validation):
    """The caller's connection is to another database than the plane."""

    code = "wrong_database"


class IsolationUnsupported(Validation):
    """This call cannot be part of a transaction of this isolation level; READ COMMITTED is always possible."""

    code = "isolation_unsupported"


class LockOrderViolation(Validation):
    """A lock was requested against the declared order; waiting for it could deadlock."""

    code = "lock_order_violation"


class WorkflowMisuse(Validation):
    """The code of a workflow waits for something that is not recorded, or `run` is used outside of it."""

    code = "workflow_misuse"


class UnknownSqsAttribute(Validation):
    """An SQS queue has no attribute of that name, or none that can be set; nothing was written."""

    code = "unknown_sqs_attribute"


class InvalidSqsAttribute(Validation):
    """The value of an attribute of an SQS queue is invalid; nothing was written."""

    code = "invalid_sqs_attribute"


class NotDeadLetterQueue(Validation):
    """The queue receives the dead letters of no other queue, so no task moves messages out of it."""

    code = "not_dead_letter_queue"


# NotAllowed: the caller's token or identity.


class NotAllowed(FastnessError):
    """The caller is not allowed to do this, or is not known; nothing was done."""

    code = "not_allowed"


class SenderBlocked(NotAllowed):
    """The recipient has blocked this sender; nothing was stored."""

    code = "sender_blocked"


class SenderMismatch(NotAllowed):
    """The mail or push names a sender other than its caller; nothing was stored."""

    code = "sender_mismatch"


class SendRefused(NotAllowed):
    """The policy of a universe does not allow this send to another universe; nothing was stored."""

    code = "send_refused"


# NotFound.


class NotFound(FastnessError):
    """The named thing does not exist."""

    code = "not_found"


class ObjectNotFound(NotFound):
    """The object store has no object of that name."""

    code = "object_not_found"


class BlobNotFound(NotFound):
    """No blob with that hash is stored."""

    code = "blob_not_found"


class WorldNotFound(NotFound):
    """No world of that name exists: it was never created, or deleted, or it has another incarnation."""

    code = "world_not_found"


class SnapshotNotFound(NotFound):
    """The world has no snapshot at that height."""

    code = "snapshot_not_found"


class MessageNotFound(NotFound):
    """The queue has no message with that id: it was acknowledged, or its time to live has passed."""

    code = "message_not_found"


class QueueNotFound(NotFound):
    """The queue does not exist: it was never used and has no policy, or it was deleted."""

    code = "queue_not_found"


class MailNotFound(NotFound):
    """A mail that the commit confirms does not exist: it was confirmed before, or its time to live has passed."""

    code = "mail_not_found"


class EffectNotFound(NotFound):
    """The effect is complete or dead, or its world was deleted."""

    code = "effect_not_found"


class ItemNotFound(NotFound):
    """No item with this sequence was set aside, or it was handled again or removed since."""

    code = "item_not_found"


class ResultNotKept(NotFound):
    """The message is no longer in its queue, and no result was kept."""

    code = "result_not_kept"


class RunNotFound(NotFound):
    """No run with that id exists: it was never started, or it was deleted."""

    code = "run_not_found"


class MoveTaskNotFound(NotFound):
    """No task with that handle moves messages, or it is too old and was forgotten."""

    code = "move_task_not_found"


# Conflict: another writer was first.


class Conflict(FastnessError):
    """Another writer was first; read the current state, then decide."""

    code = "conflict"
    retry = RetryAdvice.REFRESH


class TransactionConflict(Conflict):
    """The transaction conflicted with others at every retry; nothing was written."""

    code = "transaction_conflict"
    retry = RetryAdvice.LATER


class ObjectExists(Conflict):
    """A create-only put found an existing object; the object is unchanged."""

    code = "object_exists"


class ObjectChanged(Conflict):
    """Another version of the object was found than the expected one; this call has not changed it."""

    code = "object_changed"


class TargetNotEmpty(Conflict):
    """The target of the migration holds other data, which is unchanged. Choose an empty target."""

    code = "target_not_empty"


class AnotherHistory(Conflict):
    """What was read before belongs to another plane, or to another lineage of this one. Nothing was read or written."""

    code = "another_history"
    retry = RetryAdvice.NEVER


class WouldLoseData(Conflict):
    """The lake has rows that the plane no longer has, and that would be removed. Nothing was removed."""

    code = "would_lose_data"
    retry = RetryAdvice.NEVER


class WorldExists(Conflict):
    """A world of that name already exists, or its deletion is not finished."""

    code = "world_exists"


class WorldNotActive(Conflict):
    """The world is paused, archived or being deleted, and does not accept this call."""

    code = "world_not_active"


class WorldHeld(Conflict):
    """A host holds the world, and only that host writes its journal."""

    code = "world_held"
    retry = RetryAdvice.LATER


class HeadAdvanced(Conflict):
    """Another writer appended first: the journal's head is not where the caller expected it."""

    code = "head_advanced"

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"The journal's head is {actual}, not {expected}; read from {expected} on, then append again")
        self.expected = expected
        self.actual = actual


class CursorAdvanced(Conflict):
    """Another reader drained first: the inbox's cursor is not where the caller expected it."""

    code = "cursor_advanced"

    def __init__(self, expected: int | None, actual: int | None) -> None:
        super().__init__(f"The inbox's cursor is {actual}, not {expected}; read from there on, then commit it again")
        self.expected = expected
        self.actual = actual


class SnapshotExists(Conflict):
    """A different snapshot exists at that height, and snapshots are immutable."""

    code = "snapshot_exists"


class BaselineRegressed(Conflict):
    """The baseline only moves forward."""

    code = "baseline_regressed"


class PromotionRefused(Conflict):
    """The snapshot does not qualify as the baseline; the message names the condition it fails."""

    code = "promotion_refused"


class SegmentExists(Conflict):
    """The segment does not follow the last one: it covers the same heights, or leaves a gap."""

    code = "segment_exists"


class LeaseHeld(Conflict):
    """Another owner's lease has not expired."""

    code = "lease_held"
    retry = RetryAdvice.LATER

    def __init__(self, key: str, *, owner: str, expires_ms: int, now_ms: int) -> None:
        super().__init__(
            f"{owner} holds {key} for another {max(expires_ms - now_ms, 0) / 1_000:.3f} s; give wait_seconds to wait"
        )
        self.key = key
        self.owner = owner
        self.expires_ms = expires_ms
        self.now_ms = now_ms


class CasMismatch(Conflict):
    """The document changed after its ETag was read."""

    code = "cas_mismatch"

    def __init__(self, key: str, *, current_etag: str | None) -> None:
        found = "no longer exists" if current_etag is None else f"now has ETag {current_etag}"
        super().__init__(f"State {key} {found}; get it again, then decide")
        self.current_etag = current_etag


class VersionConflict(Conflict):
    """The entity, or the row of a collection, changed after its version was read."""

    code = "version_conflict"

    def __init__(self, kind: str, id: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{kind} {id} has version {actual}, not {expected}; get it again, then decide")
        self.expected = expected
        self.actual = actual


class MailboxTaken(Conflict):
    """Another session reads this mailbox now: the last one to join replaces the others."""

    code = "mailbox_taken"
    retry = RetryAdvice.NEVER


class AgentExists(Conflict):
    """The agent is registered with another key."""

    code = "agent_exists"
    retry = RetryAdvice.NEVER


class QueueInUse(Conflict):
    """Messages of the queue are leased, so it was not deleted. Wait until they are settled, or delete it with force."""

    code = "queue_in_use"
    retry = RetryAdvice.LATER


class SqsQueueExists(Conflict):
    """The queue exists with another value of an attribute, so it was neither created nor changed."""

    code = "sqs_queue_exists"
    retry = RetryAdvice.NEVER


class MoveTaskRunning(Conflict):
    """Another task moves messages out of the queue. Wait until it ends, or cancel it."""

    code = "move_task_running"
    retry = RetryAdvice.LATER


class MoveTaskNotRunning(Conflict):
    """The task that moves messages has ended, or is being cancelled, so it cannot be cancelled."""

    code = "move_task_not_running"
    retry = RetryAdvice.NEVER


class MessageLeased(Conflict):
    """The message is leased, so it cannot be changed."""

    code = "message_leased"


class MessageFinished(Conflict):
    """The message is done, dead or cancelled, so it cannot be changed."""

    code = "message_finished"
    retry = RetryAdvice.NEVER


class MessageKeyTaken(Conflict):
    """Another message of the target queue has the unique key or the debounce key, so the message was not moved."""

    code = "message_key_taken"
    retry = RetryAdvice.LATER


class MessageFailed(Conflict):
    """The message failed too often, or was rejected, and is a dead letter; there is no result."""

    code = "message_failed"
    retry = RetryAdvice.NEVER


class RunExists(Conflict):
    """A run with that id exists, of another workflow or with other arguments. Choose another id."""

    code = "run_exists"
    retry = RetryAdvice.NEVER


class RunEnded(Conflict):
    """The run has ended, so it takes no signals and cannot be changed."""

    code = "run_ended"
    retry = RetryAdvice.NEVER


class RunNotEnded(Conflict):
    """The run has not ended, so it cannot be deleted. Cancel it first."""

    code = "run_not_ended"


class RunFailed(Conflict):
    """The run failed, so it has no result; the message has its error."""

    code = "run_failed"
    retry = RetryAdvice.NEVER


class RunCancelled(Conflict):
    """The run was cancelled, so it has no result."""

    code = "run_cancelled"
    retry = RetryAdvice.NEVER


class WorkflowChanged(Conflict):
    """The code of the workflow no longer does what the history of the run says; the message names the step."""

    code = "workflow_changed"
    retry = RetryAdvice.NEVER


class StepFailed(Conflict):
    """A step of a run failed in its last attempt. `error_type` and `message` are those of its exception."""

    code = "step_failed"
    retry = RetryAdvice.NEVER

    def __init__(self, step: str, error_type: str, message: str, attempts: int = 1) -> None:
        self.step = step
        self.error_type = error_type
        self.message = message
        self.attempts = attempts
        after = f" after {attempts} attempts" if attempts > 1 else ""
        super().__init__(f"Step {step} failed{after}: {error_type}: {message}")


# Fenced: the lease that came with a write.


class Fenced(FastnessError):
    """The lease given with a write does not permit it; nothing was written. Acquire it again, then read."""

    code = "fenced"


class LeaseRequired(Fenced):
    """A lease is held on this key, so a write must name it."""

    code = "lease_required"


class LeaseConflict(Fenced):
    """A newer lease has replaced this one."""

    code = "lease_conflict"


class LeaseExpired(Fenced):
    """The lease has ended, before the write or the work that it was for."""

    code = "lease_expired"


class FencingMismatch(Fenced):
    """The lease was acquired again since: this copy has an old fence."""

    code = "fencing_mismatch"


class TxnMismatch(Fenced):
    """The lease belongs to another transaction of the same owner."""

    code = "txn_mismatch"


class QueueMessageLeaseMismatch(Fenced):
    """The lease given to ack, nack or extend is not the message's current one: it expired or was replaced."""

    code = "queue_message_lease_mismatch"


class MessageCancelled(QueueMessageLeaseMismatch):
    """The message was cancelled: it is not delivered again, and its consumer must stop working on it."""

    code = "message_cancelled"
    retry = RetryAdvice.NEVER


# Busy: a limit was reached.


class Busy(FastnessError):
    """A limit was reached and nothing was written; the same request may succeed later."""

    code = "busy"
    retry = RetryAdvice.LATER
    retry_after_seconds: float | None = None  # How long to wait, if that is known.


class LockTimeout(Busy):
    """The lock was not released within the time that the caller was willing to wait."""

    code = "lock_timeout"


class QueueBusy(Busy):
    """The maximum number of waiting consumers is reached."""

    code = "queue_busy"


class MailboxFull(Busy):
    """The mailbox holds as many messages as its policy allows; nothing was stored."""

    code = "queue_full"


class RateLimited(Busy):
    """The sender has reached its rate limit; nothing was stored. It may send again after `retry_after_seconds`."""

    code = "rate_limited"

    def __init__(self, message: str = "", *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceeded(Busy):
    """The universe holds or does as much as its quota allows; nothing was written.

    Reads, acks and deletions still work. `kind` is messages, bytes, connections or rate; `used` is what the universe
    has of it, or has used in the last second, and `limit` what it may have.
    """

    code = "quota_exceeded"
    universe: str = ""
    kind: str = ""
    limit: float = 0
    used: float = 0

    def __init__(self, message: str, *, universe: str = "", kind: str = "", limit: float = 0, used: float = 0) -> None:
        super().__init__(message)
        self.universe = universe
        self.kind = kind
        self.limit = limit
        self.used = used


class ShutdownDraining(Busy):
    """The server is shutting down and accepts no new work. Retry elsewhere, or here after its restart."""

    code = "shutdown_draining"


class SqsQueueDeletedRecently(Busy):
    """A queue of that name was deleted less than 60 seconds ago, or its messages are still being deleted."""

    code = "sqs_queue_deleted_recently"


class PurgeInProgress(Busy):
    """The queue was purged less than 60 seconds ago."""

    code = "purge_in_progress"


class ResultNotReady(Busy):
    """The message or the run is not done yet; ask for its result again."""

    code = "result_not_ready"


class Closed(FastnessError):
    """The handle was closed; open it again."""

    code = "closed"


# Corrupt: stored data is damaged.


class Corrupt(FastnessError):
    """Stored data is damaged. Restore it from a backup; Fastness never repairs damage silently."""

    code = "corrupt"


class DamagedDatabase(Corrupt):
    """The key space or the lake is damaged: a checksum does not match, or a part is missing."""

    code = "damaged_database"


class HashMismatch(Corrupt):
    """Bytes do not match the hash that was recorded for them."""

    code = "hash_mismatch"


class SizeMismatch(Corrupt):
    """A blob's body does not have its recorded size."""

    code = "size_mismatch"


class MissingObject(Corrupt):
    """What is recorded as stored is missing, or a part of it."""

    code = "missing_object"


class MissingEntry(Corrupt):
    """The journal has a gap below its head."""

    code = "missing_entry"


class ChecksumMismatch(Corrupt):
    """A segment's bytes do not match its recorded checksum."""

    code = "checksum_mismatch"


class MalformedSegment(Corrupt):
    """A segment's bytes do not contain the recorded entries."""

    code = "malformed_segment"


class SealBroken(Corrupt):
    """A sealed mail was not encrypted by its sender for this key, or was changed in transit."""

    code = "seal_broken"


# Backend: the storage or network below Fastness.


class DecryptionFailed(Corrupt):
    """An encrypted value was changed, moved or encrypted with another key."""

    code = "decryption_failed"
    key: bytes | None = None  # Whose value it is, in the process that read it; None if it is not a value.


class UnreadableValue(Corrupt):
    """A stored value is not what its reader stores, or names code that may not run. Nothing of it was run."""

    code = "unreadable_value"


class Backend(FastnessError):
    """The storage or network below Fastness failed."""

    code = "backend"
    retry = RetryAdvice.LATER


class DirectoryInUse(Backend):
    """The data directory is open already, in another process or in this one."""

    code = "directory_in_use"


class PlaneInUse(Backend):
    """Other processes use the plane, and this operation needs it idle. Stop them first."""

    code = "plane_in_use"


class MigrationUnfinished(Backend):
    """The plane is the target of an incomplete migration. Run the migration again; it resumes where it stopped."""

    code = "migration_unfinished"


class EncryptionKeyMissing(Backend):
    """A key was not given, or another one: of encrypted universes, or of SQS access keys."""

    code = "encryption_key_missing"
    retry = RetryAdvice.NEVER


class PathUnusable(Backend):
    """A file or folder cannot be created, read or written, or not be used for this."""

    code = "path_unusable"
    retry = RetryAdvice.NEVER


class Unreachable(Backend):
    """The server, or a program that is needed, does not answer; nothing was written."""

    code = "unreachable"


class DiskFull(Backend):
    """The device has no space left, or only its reserve. Free some; acknowledged writes are intact.

    While the reserve is left, reads, acks and deletes still work. A server reopens a key space that failed by itself;
    an embedded plane has `reopen`.
    """

    code = "disk_full"


class DatabaseFailed(Backend):
    """The database refused this, or an earlier failure stopped it; acknowledged writes are intact."""

    code = "database_failed"


class SchemaMismatch(Backend):
    """The stored data has a format that this version does not support."""

    code = "schema_mismatch"
    retry = RetryAdvice.NEVER


class Unsupported(Backend):
    """The operation is not offered by this backend, version or installation."""

    code = "unsupported"
    retry = RetryAdvice.NEVER


class CommitUnknown(Backend):
    """The answer to a commit was lost: it may or may not have been committed. Read, or repeat it idempotently."""

    code = "commit_unknown"
    retry = RetryAdvice.IDEMPOTENT


def rebuild(code: str, message: str) -> FastnessError:
    """The error of class `code` with `message`: for errors that arrive in an answer. Unknown codes: `FastnessError`."""
    error = FastnessError.__new__(_classes().get(code, FastnessError), message)
    Exception.__init__(error, message)
    return error


def _classes() -> dict[str, type[FastnessError]]:
    found: dict[str, type[FastnessError]] = {}
    pending = [FastnessError]
    while pending:
        each = pending.pop()
        if "code" in vars(each):  # A subclass of an application has the code of its base.
            found[each.code] = each
        pending += each.__subclasses__()
    return found
