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

import re
from enum import StrEnum
from typing import ClassVar


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

    def __init_subclass__(cls) -> None:
        """The code of a class is its name in snake case. A subclass of an application has the code of its base."""
        if cls.__module__ == __name__ and "code" not in vars(cls):
            cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def help(self) -> str:
        """The command that shows the cause of this error and what to do about it."""
        return f"fastness explain {self.code}"


# Validation: the request itself.


class Validation(FastnessError):
    """The request is wrong; nothing was written."""


class InvalidUrl(Validation):
    """The URL is not one that can be used here; the message says which can."""


class InvalidName(Validation):
    """A name contains characters that names cannot contain, or has a length that names cannot have."""


class InvalidKey(Validation):
    """A key, or a part of one, has a type or form that keys cannot have."""


class InvalidValue(Validation):
    """A value has a type, a form or a depth that cannot be stored or read."""


class InvalidArgument(Validation):
    """An argument is not allowed, alone or together with another; the message names it and what to give."""


class IdempotencyKeyReused(Validation):
    """The idempotency key was recently used for a different call; nothing was done. Give each call its own key."""


class KeyTooLarge(Validation):
    """A key, or a part of one, is longer than the limit that the message names."""


class ValueTooLarge(Validation):
    """A value is longer than the limit that the message names; store it as a blob."""


class TransactionTooLarge(Validation):
    """One transaction writes more bytes or keys than the limit allows."""


class EmptyBatch(Validation):
    """A batch or a list is empty and needs at least one item."""


class BatchTooLarge(Validation):
    """A batch or a list has more items or bytes than one call may have; split it."""


class PayloadTooLarge(Validation):
    """The payload is over the limit, or over what the token allows. Send less, or store a blob and send its hash."""


class AnswerTooLarge(Validation):
    """The answer is longer than one call carries. Ask for fewer items, or read the blob over HTTP."""


class NestedTransaction(Validation):
    """`transact` was called inside a transaction of the same database."""


class TransactionEnded(Validation):
    """The transaction was used after its function returned."""


class ReadOnlyTransaction(Validation):
    """A write was attempted in a read-only snapshot."""


class UnsupportedTier(Validation):
    """A transaction cannot be acknowledged at this tier."""


class NotSynchronous(Validation):
    """The function is a coroutine or a generator: it would run after its transaction has ended."""


class NotEmbedded(Validation):
    """This call needs the database in the same process, and the handle is connected to a server."""


class NotTransactional(Validation):
    """This call cannot be part of a transaction of the caller's own connection."""


class TransactionRequired(Validation):
    """The caller's connection has no open transaction, or a failed one."""


class WrongDatabase(Validation):
    """The caller's connection is to another database than the plane."""


class IsolationUnsupported(Validation):
    """This call cannot be part of a transaction of this isolation level; READ COMMITTED is always possible."""


class LockOrderViolation(Validation):
    """A lock was requested against the declared order; waiting for it could deadlock."""


class WorkflowMisuse(Validation):
    """The code of a workflow waits for something that is not recorded, or `run` is used outside of it."""


class UnknownSqsAttribute(Validation):
    """An SQS queue has no attribute of that name, or none that can be set; nothing was written."""


class InvalidSqsAttribute(Validation):
    """The value of an attribute of an SQS queue is invalid; nothing was written."""


class NotDeadLetterQueue(Validation):
    """The queue receives the dead letters of no other queue, so no task moves messages out of it."""


# NotAllowed: the caller's token or identity.


class NotAllowed(FastnessError):
    """The caller is not allowed to do this, or is not known; nothing was done."""


class SenderBlocked(NotAllowed):
    """The recipient has blocked this sender; nothing was stored."""


class SenderMismatch(NotAllowed):
    """The mail or push names a sender other than its caller; nothing was stored."""


class SendRefused(NotAllowed):
    """The policy of a universe does not allow this send to another universe; nothing was stored."""


# NotFound.


class NotFound(FastnessError):
    """The named thing does not exist."""


class ObjectNotFound(NotFound):
    """The object store has no object of that name."""


class BlobNotFound(NotFound):
    """No blob with that hash is stored."""


class WorldNotFound(NotFound):
    """No world of that name exists: it was never created, or deleted, or it has another incarnation."""


class SnapshotNotFound(NotFound):
    """The world has no snapshot at that height."""


class MessageNotFound(NotFound):
    """The queue has no message with that id: it was acknowledged, or its time to live has passed."""


class QueueNotFound(NotFound):
    """The queue does not exist: it was never used and has no policy, or it was deleted."""


class MailNotFound(NotFound):
    """A mail that the commit confirms does not exist: it was confirmed before, or its time to live has passed."""


class EffectNotFound(NotFound):
    """The effect is complete or dead, or its world was deleted."""


class ItemNotFound(NotFound):
    """No item with this sequence was set aside, or it was handled again or removed since."""


class ResultNotKept(NotFound):
    """The message is no longer in its queue, and no result was kept."""


class RunNotFound(NotFound):
    """No run with that id exists: it was never started, or it was deleted."""


class MoveTaskNotFound(NotFound):
    """No task with that handle moves messages, or it is too old and was forgotten."""


# Conflict: another writer was first.


class Conflict(FastnessError):
    """Another writer was first; read the current state, then decide."""

    retry = RetryAdvice.REFRESH


class TransactionConflict(Conflict):
    """The transaction conflicted with others at every retry; nothing was written."""

    retry = RetryAdvice.LATER


class ObjectExists(Conflict):
    """A create-only put found an existing object; the object is unchanged."""


class ObjectChanged(Conflict):
    """Another version of the object was found than the expected one; this call has not changed it."""


class TargetNotEmpty(Conflict):
    """The target of the migration holds other data, which is unchanged. Choose an empty target."""


class AnotherHistory(Conflict):
    """What was read before belongs to another plane, or to another lineage of this one. Nothing was read or written."""

    retry = RetryAdvice.NEVER


class WouldLoseData(Conflict):
    """The lake has rows that the plane no longer has, and that would be removed. Nothing was removed."""

    retry = RetryAdvice.NEVER


class WorldExists(Conflict):
    """A world of that name already exists, or its deletion is not finished."""


class WorldNotActive(Conflict):
    """The world is paused, archived or being deleted, and does not accept this call."""


class WorldHeld(Conflict):
    """A host holds the world, and only that host writes its journal."""

    retry = RetryAdvice.LATER


class HeadAdvanced(Conflict):
    """Another writer appended first: the journal's head is not where the caller expected it."""

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"The journal's head is {actual}, not {expected}; read from {expected} on, then append again")
        self.expected = expected
        self.actual = actual


class CursorAdvanced(Conflict):
    """Another reader drained first: the inbox's cursor is not where the caller expected it."""

    def __init__(self, expected: int | None, actual: int | None) -> None:
        super().__init__(f"The inbox's cursor is {actual}, not {expected}; read from there on, then commit it again")
        self.expected = expected
        self.actual = actual


class SnapshotExists(Conflict):
    """A different snapshot exists at that height, and snapshots are immutable."""


class BaselineRegressed(Conflict):
    """The baseline only moves forward."""


class PromotionRefused(Conflict):
    """The snapshot does not qualify as the baseline; the message names the condition it fails."""


class SegmentExists(Conflict):
    """The segment does not follow the last one: it covers the same heights, or leaves a gap."""


class LeaseHeld(Conflict):
    """Another owner's lease has not expired."""

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

    def __init__(self, key: str, *, current_etag: str | None) -> None:
        found = "no longer exists" if current_etag is None else f"now has ETag {current_etag}"
        super().__init__(f"State {key} {found}; get it again, then decide")
        self.current_etag = current_etag


class VersionConflict(Conflict):
    """The entity, or the row of a collection, changed after its version was read."""

    def __init__(self, kind: str, id: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{kind} {id} has version {actual}, not {expected}; get it again, then decide")
        self.expected = expected
        self.actual = actual


class MailboxTaken(Conflict):
    """Another session reads this mailbox now: the last one to join replaces the others."""

    retry = RetryAdvice.NEVER


class AgentExists(Conflict):
    """The agent is registered with another key."""

    retry = RetryAdvice.NEVER


class QueueInUse(Conflict):
    """Messages of the queue are leased, so it was not deleted. Wait until they are settled, or delete it with force."""

    retry = RetryAdvice.LATER


class SqsQueueExists(Conflict):
    """The queue exists with another value of an attribute, so it was neither created nor changed."""

    retry = RetryAdvice.NEVER


class MoveTaskRunning(Conflict):
    """Another task moves messages out of the queue. Wait until it ends, or cancel it."""

    retry = RetryAdvice.LATER


class MoveTaskNotRunning(Conflict):
    """The task that moves messages has ended, or is being cancelled, so it cannot be cancelled."""

    retry = RetryAdvice.NEVER


class MessageLeased(Conflict):
    """The message is leased, so it cannot be changed."""


class MessageFinished(Conflict):
    """The message is done, dead or cancelled, so it cannot be changed."""

    retry = RetryAdvice.NEVER


class MessageKeyTaken(Conflict):
    """Another message of the target queue has the unique key or the debounce key, so the message was not moved."""

    retry = RetryAdvice.LATER


class MessageFailed(Conflict):
    """The message failed too often, or was rejected, and is a dead letter; there is no result."""

    retry = RetryAdvice.NEVER


class RunExists(Conflict):
    """A run with that id exists, of another workflow or with other arguments. Choose another id."""

    retry = RetryAdvice.NEVER


class RunEnded(Conflict):
    """The run has ended, so it takes no signals and cannot be changed."""

    retry = RetryAdvice.NEVER


class RunNotEnded(Conflict):
    """The run has not ended, so it cannot be deleted. Cancel it first."""


class RunFailed(Conflict):
    """The run failed, so it has no result; the message has its error."""

    retry = RetryAdvice.NEVER


class RunCancelled(Conflict):
    """The run was cancelled, so it has no result."""

    retry = RetryAdvice.NEVER


class WorkflowChanged(Conflict):
    """The code of the workflow no longer does what the history of the run says; the message names the step."""

    retry = RetryAdvice.NEVER


class StepFailed(Conflict):
    """A step of a run failed in its last attempt. `error_type` and `message` are those of its exception."""

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


class LeaseRequired(Fenced):
    """A lease is held on this key, so a write must name it."""


class LeaseConflict(Fenced):
    """A newer lease has replaced this one."""


class LeaseExpired(Fenced):
    """The lease has ended, before the write or the work that it was for."""


class FencingMismatch(Fenced):
    """The lease was acquired again since: this copy has an old fence."""


class TxnMismatch(Fenced):
    """The lease belongs to another transaction of the same owner."""


class QueueMessageLeaseMismatch(Fenced):
    """The lease given to ack, nack or extend is not the message's current one: it expired or was replaced."""


class MessageCancelled(QueueMessageLeaseMismatch):
    """The message was cancelled: it is not delivered again, and its consumer must stop working on it."""

    retry = RetryAdvice.NEVER


# Busy: a limit was reached.


class Busy(FastnessError):
    """A limit was reached and nothing was written; the same request may succeed later."""

    retry = RetryAdvice.LATER
    retry_after_seconds: float | None = None  # How long to wait, if that is known.


class LockTimeout(Busy):
    """The lock was not released within the time that the caller was willing to wait."""


class QueueBusy(Busy):
    """The maximum number of waiting consumers is reached."""


class MailboxFull(Busy):
    """The mailbox holds as many messages as its policy allows; nothing was stored."""

    code = "queue_full"


class RateLimited(Busy):
    """The sender has reached its rate limit; nothing was stored. It may send again after `retry_after_seconds`."""

    def __init__(self, message: str = "", *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceeded(Busy):
    """The universe holds or does as much as its quota allows; nothing was written.

    Reads, acks and deletions still work. `kind` is messages, bytes, connections or rate; `used` is what the universe
    has of it, or has used in the last second, and `limit` what it may have.
    """

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


class SqsQueueDeletedRecently(Busy):
    """A queue of that name was deleted less than 60 seconds ago, or its messages are still being deleted."""


class PurgeInProgress(Busy):
    """The queue was purged less than 60 seconds ago."""


class ResultNotReady(Busy):
    """The message or the run is not done yet; ask for its result again."""


class Closed(FastnessError):
    """The handle was closed; open it again."""


# Corrupt: stored data is damaged.


class Corrupt(FastnessError):
    """Stored data is damaged. Restore it from a backup; Fastness never repairs damage silently."""


class DamagedDatabase(Corrupt):
    """The key space or the lake is damaged: a checksum does not match, or a part is missing."""


class HashMismatch(Corrupt):
    """Bytes do not match the hash that was recorded for them."""


class SizeMismatch(Corrupt):
    """A blob's body does not have its recorded size."""


class MissingObject(Corrupt):
    """What is recorded as stored is missing, or a part of it."""


class MissingEntry(Corrupt):
    """The journal has a gap below its head."""


class ChecksumMismatch(Corrupt):
    """A segment's bytes do not match its recorded checksum."""


class MalformedSegment(Corrupt):
    """A segment's bytes do not contain the recorded entries."""


class SealBroken(Corrupt):
    """A sealed mail was not encrypted by its sender for this key, or was changed in transit."""


# Backend: the storage or network below Fastness.


class DecryptionFailed(Corrupt):
    """An encrypted value was changed, moved or encrypted with another key."""

    key: bytes | None = None  # Whose value it is, in the process that read it; None if it is not a value.


class UnreadableValue(Corrupt):
    """A stored value is not what its reader stores, or names code that may not run. Nothing of it was run."""


class Backend(FastnessError):
    """The storage or network below Fastness failed."""

    retry = RetryAdvice.LATER


class DirectoryInUse(Backend):
    """The data directory is open already, in another process or in this one."""


class PlaneInUse(Backend):
    """Other processes use the plane, and this operation needs it idle. Stop them first."""


class MigrationUnfinished(Backend):
    """The plane is the target of an incomplete migration. Run the migration again; it resumes where it stopped."""


class EncryptionKeyMissing(Backend):
    """A key was not given, or another one: of encrypted universes, or of SQS access keys."""

    retry = RetryAdvice.NEVER


class PathUnusable(Backend):
    """A file or folder cannot be created, read or written, or not be used for this."""

    retry = RetryAdvice.NEVER


class Unreachable(Backend):
    """The server, or a program that is needed, does not answer; nothing was written."""


class DiskFull(Backend):
    """The device has no space left, or only its reserve. Free some; acknowledged writes are intact.

    While the reserve is left, reads, acks and deletes still work. A server reopens a key space that failed by itself;
    an embedded plane has `reopen`.
    """


class DatabaseFailed(Backend):
    """The database refused this, or an earlier failure stopped it; acknowledged writes are intact."""


class SchemaMismatch(Backend):
    """The stored data has a format that this version does not support."""

    retry = RetryAdvice.NEVER


class Unsupported(Backend):
    """The operation is not offered by this backend, version or installation."""

    retry = RetryAdvice.NEVER


class CommitUnknown(Backend):
    """The answer to a commit was lost: it may or may not have been committed. Read, or repeat it idempotently."""

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
        if "code" in vars(each):
            found[each.code] = each
        pending += each.__subclasses__()
    return found


__all__ = ["RetryAdvice"]
__all__ += [each.__name__ for each in sorted(_classes().values(), key=lambda each: each.__name__)]
