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
from typing import ClassVar, Final


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
    cause: ClassVar[str] = (
        "The server sent a code that this client does not know, because the server is newer than the client."
    )
    remedy: ClassVar[str] = (
        "Read the message, which is the server's. Upgrade the client to the server's version; `fastness status` shows "
        "it."
    )
    see: ClassVar[tuple[str, ...]] = ("how-to/upgrade.md",)  # Pages of docs/.

    def __init_subclass__(cls, see: tuple[str, ...] = ()) -> None:
        super().__init_subclass__()
        cls.see = see  # Not those of the base.

    @property
    def help(self) -> str:
        """The command that shows the cause of this error and what to do about it."""
        return f"fastness explain {self.code}"


class Validation(FastnessError):
    """The request is wrong; nothing was written."""

    code = "validation"
    cause = "The request is wrong in a way that the message names. Nothing was written."
    remedy = "Change the request as the message says. The same request will fail again."


class InvalidUrl(Validation, see=("how-to/choose-a-deployment.md",)):
    """The URL is not one that can be used here; the message says which can."""

    code = "invalid_url"
    cause = "The URL has a scheme that is not supported, or lacks a part, such as the path of `dir:`."
    remedy = (
        "Give `dir:PATH`, `memory:`, `postgresql://USER@HOST/DATABASE` to open a plane, or `http://HOST:9440` to "
        "connect to a server."
    )


class InvalidName(Validation, see=("reference/limits.md",)):
    """A name contains characters that names cannot contain, or has a length that names cannot have."""

    code = "invalid_name"
    cause = (
        "The name of a queue, world, agent, universe or key is empty, too long, or has a character that names cannot "
        "have."
    )
    remedy = (
        "Use letters, digits and the characters that the message lists. Put free text into the payload, not into a "
        "name."
    )


class InvalidKey(Validation):
    """A key, or a part of one, has a type or form that keys cannot have."""

    code = "invalid_key"
    cause = (
        "A key of the key space has a part that is not text, bytes, a number, a boolean or None, or is nested too "
        "deeply."
    )
    remedy = "Build keys with `Subspace.key(…)` from these types only."


class InvalidValue(Validation):
    """A value has a type, a form or a depth that cannot be stored or read."""

    code = "invalid_value"
    cause = "A value that is written to the key space is not `bytes`."
    remedy = (
        "Encode it first, for example with `json.dumps(value).encode()`. Queues, states and worlds take Python values."
    )


class InvalidArgument(Validation, see=("reference/limits.md",)):
    """An argument is not allowed, alone or together with another; the message names it and what to give."""

    code = "invalid_argument"
    cause = "An argument is outside of the range that the message names."
    remedy = "Use a value in that range. `limits.md` has every bound and its reason."


class IdempotencyKeyReused(Validation, see=("explanation/idempotency.md",)):
    """The idempotency key was recently used for a different call; nothing was done. Give each call its own key."""

    code = "idempotency_key_reused"
    cause = (
        "A different call was made with the same idempotency key within the last 10 to 20 minutes, or a session of "
        "ordered locks has a claim with this id for other locks."
    )
    remedy = (
        "Give each operation its own key, made of what identifies it, such as the order's number. Repeat a call with "
        "the same key only if all its arguments are the same."
    )


class KeyTooLarge(Validation, see=("reference/limits.md",)):
    """A key, or a part of one, is longer than the limit that the message names."""

    code = "key_too_large"
    cause = "A key of the key space, with all its parts, is longer than 2,048 bytes."
    remedy = "Shorten its parts: use a hash of a long name as the key, and store the name in the value."


class ValueTooLarge(Validation, see=("reference/limits.md",)):
    """A value is longer than the limit that the message names; store it as a blob."""

    code = "value_too_large"
    cause = "A value of the key space is longer than 1 MiB."
    remedy = "Store it as a blob (`plane.blobs.put`), and the hash of the blob as the value."


class TransactionTooLarge(Validation, see=("reference/limits.md",)):
    """One transaction writes more bytes or keys than the limit allows."""

    code = "transaction_too_large"
    cause = "One transaction writes more than 16 MiB, counting 128 bytes for each key."
    remedy = "Write in several transactions, or in smaller batches."


class EmptyBatch(Validation):
    """A batch or a list is empty and needs at least one item."""

    code = "empty_batch"
    cause = "A call that takes several items was given none."
    remedy = "Skip the call if there is nothing to do."


class BatchTooLarge(Validation, see=("reference/limits.md",)):
    """A batch or a list has more items or bytes than one call may have; split it."""

    code = "batch_too_large"
    cause = "One append has more than 256 entries or more than 256 KiB."
    remedy = "Append in several batches. Put large values into blobs and their hashes into the entries."


class PayloadTooLarge(Validation, see=("reference/limits.md", "how-to/secure-a-server.md")):
    """The payload is over the limit, or over what the token allows. Send less, or store a blob and send its hash."""

    code = "payload_too_large"
    cause = "A payload is over the limit of its kind, or over the size that the caller's token allows."
    remedy = (
        "Send less, or store the body with `plane.blobs.put` and send its hash. `fastness token self` shows the size "
        "that the token allows."
    )


class AnswerTooLarge(Validation, see=("reference/limits.md",)):
    """The answer is longer than one call carries. Ask for fewer items, or read the blob over HTTP."""

    code = "answer_too_large"
    cause = "The answer is longer than 32 MiB, which is the most that a stream carries in one reply."
    remedy = "Ask for fewer items with `limit`, or read a blob in parts."


class NestedTransaction(Validation):
    """`transact` was called inside a transaction of the same database."""

    code = "nested_transaction"
    cause = "A function that runs in a transaction called `transact`, or a handle of the same plane."
    remedy = "Use the transaction that the function was given. Do other work before or after `transact`."


class TransactionEnded(Validation):
    """The transaction was used after its function returned."""

    code = "transaction_ended"
    cause = "A transaction was kept, in a variable or a closure, and used after its function returned."
    remedy = "Return what you need from the function, and start another transaction for later work."


class ReadOnlyTransaction(Validation):
    """A write was attempted in a read-only snapshot."""

    code = "read_only_transaction"
    cause = "A function that reads a snapshot of the key space wrote to it."
    remedy = "Use `plane.transact` for functions that write."


class UnsupportedTier(Validation, see=("explanation/tiers.md",)):
    """A transaction cannot be acknowledged at this tier."""

    code = "unsupported_tier"
    cause = "A transaction was asked to return before it is in the log, which is `BEST_EFFORT`."
    remedy = "Use `Tier.CRITICAL` or `Tier.IMPORTANT`. Only session logs are `BEST_EFFORT`."


class NotSynchronous(Validation):
    """The function is a coroutine or a generator: it would run after its transaction has ended."""

    code = "not_synchronous"
    cause = "`transact` was given a coroutine function or a generator, which would run after its transaction has ended."
    remedy = "Give a plain function. Await other things before or after the transaction."


class NotEmbedded(Validation, see=("how-to/choose-a-deployment.md",)):
    """This call needs the database in the same process, and the handle is connected to a server."""

    code = "not_embedded"
    cause = "The call runs your function inside the database, and this handle is connected to a server."
    remedy = (
        "Open the plane in your process with `fastness.open`, or use calls that a server offers: queues, states, "
        "`plane.atomic()`."
    )


class NotTransactional(Validation, see=("how-to/your-own-transaction.md",)):
    """This call cannot be part of a transaction of the caller's own connection."""

    code = "not_transactional"
    cause = "The call waits, or writes to the object store, so it cannot be part of your database transaction."
    remedy = "Call it before or after the transaction. Small payloads and messages without a wait can be inside."


class TransactionRequired(Validation, see=("how-to/your-own-transaction.md",)):
    """The caller's connection has no open transaction, or a failed one."""

    code = "transaction_required"
    cause = "The connection that was given to `within` has no open transaction, or one that has failed."
    remedy = "Begin a transaction first, and roll back a failed one before the next call."


class WrongDatabase(Validation, see=("how-to/your-own-transaction.md",)):
    """The caller's connection is to another database than the plane."""

    code = "wrong_database"
    cause = "The connection that was given to `within` is connected to another database than the plane."
    remedy = "Open the plane with the URL of the database that your connection uses."


class IsolationUnsupported(Validation, see=("how-to/your-own-transaction.md",)):
    """This call cannot be part of a transaction of this isolation level; READ COMMITTED is always possible."""

    code = "isolation_unsupported"
    cause = "The transaction of your connection has an isolation level in which this call could read stale data."
    remedy = "Use READ COMMITTED, PostgreSQL's default, for transactions with this call."


class LockOrderViolation(Validation, see=("how-to/hold-locks.md",)):
    """A lock was requested against the declared order; waiting for it could deadlock."""

    code = "lock_order_violation"
    cause = "A lock was requested while a later one in the declared order is held. Waiting for it could deadlock."
    remedy = (
        "Acquire locks in the order database, entity type, record, and records in the order of their names. Or "
        "acquire all of them in one call."
    )


class WorkflowMisuse(Validation, see=("how-to/write-workflows.md",)):
    """The code of a workflow waits for something that is not recorded, or `run` is used outside of it."""

    code = "workflow_misuse"
    cause = (
        "The code of a workflow awaits something that is not recorded, such as `asyncio.sleep` or a network call, uses "
        "asyncio, ends without a step that it has not awaited, or uses `run` after the workflow has ended."
    )
    remedy = (
        "Use `run.step` for everything that does I/O, its `timeout` to limit it, `run.sleep` to wait, and `run.gather` "
        "for what runs side by side. Await each step."
    )


class UnknownSqsAttribute(Validation):
    """An SQS queue has no attribute of that name, or none that can be set; nothing was written."""

    code = "unknown_sqs_attribute"
    cause = "The call names an attribute that SQS queues do not have, that is computed, or that only FIFO queues have."
    remedy = (
        "Correct the name. Attributes such as `ContentBasedDeduplication` need a queue whose name ends with `.fifo`."
    )


class InvalidSqsAttribute(Validation):
    """The value of an attribute of an SQS queue is invalid; nothing was written."""

    code = "invalid_sqs_attribute"
    cause = "The value of an attribute of an SQS queue is out of range, or not of the form that the attribute has."
    remedy = "Correct the value that the message names. Numbers and booleans are texts, as in `VisibilityTimeout=30`."


class NotDeadLetterQueue(Validation, see=("how-to/retries-and-dead-letters.md",)):
    """The queue receives the dead letters of no other queue, so no task moves messages out of it."""

    code = "not_dead_letter_queue"
    cause = "A message move task takes messages out of a dead-letter queue, and no queue names this one as its own."
    remedy = "Name the dead-letter queue as the source, or set the `RedrivePolicy` of a queue to it first."


class NotAllowed(FastnessError, see=("how-to/secure-a-server.md",)):
    """The caller is not allowed to do this, or is not known; nothing was done."""

    code = "not_allowed"
    cause = "The token is missing, unknown, expired or revoked, or it does not allow this verb or universe."
    remedy = (
        "`fastness token self` shows what the token allows. Ask an administrator for one that allows the verb in the "
        "message: `fastness token create NAME --allow VERB`."
    )


class SenderBlocked(NotAllowed, see=("how-to/send-mail.md",)):
    """The recipient has blocked this sender; nothing was stored."""

    code = "sender_blocked"
    cause = "The recipient has blocked this sender. The mail was not stored."
    remedy = "Do not retry. The recipient can remove the block."


class SenderMismatch(NotAllowed, see=("how-to/send-mail.md",)):
    """The mail or push names a sender other than its caller; nothing was stored."""

    code = "sender_mismatch"
    cause = "The mail names a sender other than the agent that is connected, or that the token belongs to."
    remedy = "Send as the connected agent, or connect as the other one."


class SendRefused(NotAllowed, see=("how-to/write-programs.md",)):
    """The policy of a universe does not allow this send to another universe; nothing was stored."""

    code = "send_refused"
    cause = "The policy of one of the two universes does not allow events between them, or the recipient is a run."
    remedy = "Allow it in both universes; `fastness world policy` shows and changes the policy of one."


class NotFound(FastnessError):
    """The named thing does not exist."""

    code = "not_found"
    cause = "The named thing does not exist, in this universe, at this address. Names are case-sensitive."
    remedy = (
        "Check the spelling and the universe (`--universe`, default `main`). A path of the HTTP API that does not "
        "exist has the same code: `/docs` lists all paths."
    )


class ObjectNotFound(NotFound, see=("how-to/move-to-postgresql.md",)):
    """The object store has no object of that name."""

    code = "object_not_found"
    cause = "The object store has no object of that name."
    remedy = "Check that the plane is opened with the object store that it was written with (`objects=…`, `--objects`)."


class BlobNotFound(NotFound, see=("how-to/free-space.md",)):
    """No blob with that hash is stored."""

    code = "blob_not_found"
    cause = (
        "No blob with that hash is stored. It was never put, or it was deleted because nothing named it for the grace "
        "period of one day."
    )
    remedy = "Put it again. Name it in a message, state, world or snapshot, or pin it, so that it is kept."


class WorldNotFound(NotFound):
    """No world of that name exists: it was never created, or deleted, or it has another incarnation."""

    code = "world_not_found"
    cause = (
        "The world was never created, was deleted, or was created again, and this handle is of its former incarnation."
    )
    remedy = (
        "List worlds with `fastness world list`. Get a new handle with `plane.world(name)`, and create the world if "
        "needed."
    )


class SnapshotNotFound(NotFound):
    """The world has no snapshot at that height."""

    code = "snapshot_not_found"
    cause = "The world has no snapshot at that height."
    remedy = "`fastness world show NAME` lists the snapshots. Use one of their heights."


class MessageNotFound(NotFound, see=("how-to/find-a-job.md",)):
    """The queue has no message with that id: it was acknowledged, or its time to live has passed."""

    code = "message_not_found"
    cause = (
        "The queue has no message with that id: it was acknowledged, its time to live has passed, it was purged, or "
        "it is in another queue."
    )
    remedy = (
        "Nothing, if another worker was meant to finish it. Results are kept for an hour after the ack: `fastness "
        "message result QUEUE ID`."
    )


class QueueNotFound(NotFound):
    """The queue does not exist: it was never used and has no policy, or it was deleted."""

    code = "queue_not_found"
    cause = (
        "The call has `must_exist`, and the queue does not exist: it was never used and has no policy, or it was "
        "deleted."
    )
    remedy = (
        "Check the name with `fastness queue list`. To create the queue, set a policy or put a message without "
        "`must_exist`."
    )


class MailNotFound(NotFound, see=("how-to/send-mail.md",)):
    """A mail that the commit confirms does not exist: it was confirmed before, or its time to live has passed."""

    code = "mail_not_found"
    cause = "The commit confirms a mail that was confirmed before, or whose time to live has passed."
    remedy = "Read the mailbox again, and confirm only mail that was read now."


class EffectNotFound(NotFound, see=("how-to/effects-and-timers.md",)):
    """The effect is complete or dead, or its world was deleted."""

    code = "effect_not_found"
    cause = "The effect is complete or dead, or its world was deleted."
    remedy = "Nothing: another worker has completed it. `fastness effect list` shows those that are open."


class ItemNotFound(NotFound, see=("how-to/write-programs.md",)):
    """No item with this sequence was set aside, or it was handled again or removed since."""

    code = "item_not_found"
    cause = "No item of that sequence was set aside, or it was retried or dropped since."
    remedy = "List the items that are set aside with `fastness world aside list NAME`."


class ResultNotKept(NotFound, see=("how-to/find-a-job.md",)):
    """The message is no longer in its queue, and no result was kept."""

    code = "result_not_kept"
    cause = (
        "The message is done or gone, and it has no result: it was acknowledged without one, or the result has expired."
    )
    remedy = (
        "Acknowledge with a result (`message.ack(result=…)`), ask for it sooner, or raise `result_ttl_seconds` of the "
        "queue's policy."
    )


class RunNotFound(NotFound, see=("how-to/write-workflows.md",)):
    """No run with that id exists: it was never started, or it was deleted."""

    code = "run_not_found"
    cause = "No run with that id exists: it was never started, or it was deleted."
    remedy = "`fastness workflow list` shows the runs of the universe."


class MoveTaskNotFound(NotFound, see=("how-to/retries-and-dead-letters.md",)):
    """No task with that handle moves messages, or it is too old and was forgotten."""

    code = "move_task_not_found"
    cause = (
        "No task that moves messages has this handle, or it has ended long ago: the newest 10 of each queue are kept."
    )
    remedy = "List the tasks of the dead-letter queue, and use the handle of one that runs."


class Conflict(FastnessError, see=("explanation/idempotency.md",)):
    """Another writer was first; read the current state, then decide."""

    code = "conflict"
    retry = RetryAdvice.REFRESH
    cause = "Another writer was first. Nothing of this call was written."
    remedy = "Read the current state, decide again, and repeat the call."


class TransactionConflict(Conflict):
    """The transaction conflicted with others at every retry; nothing was written."""

    code = "transaction_conflict"
    retry = RetryAdvice.LATER
    cause = "The transaction was retried 32 times, and other transactions changed what it reads every time."
    remedy = (
        "Try again later. If it lasts, make the transaction shorter, or let one worker write the key that all of them "
        "read."
    )


class ObjectExists(Conflict):
    """A create-only put found an existing object; the object is unchanged."""

    code = "object_exists"
    cause = "A create-only put found an object of that name."
    remedy = "Read the object that exists, or choose another name."


class ObjectChanged(Conflict):
    """Another version of the object was found than the expected one; this call has not changed it."""

    code = "object_changed"
    cause = "The object was replaced after its ETag was read."
    remedy = "Read it again with its ETag, decide, and put again."


class TargetNotEmpty(Conflict, see=("how-to/move-to-postgresql.md",)):
    """The target of the migration holds other data, which is unchanged. Choose an empty target."""

    code = "target_not_empty"
    cause = "The target of a migration or a restore holds other data, which is unchanged."
    remedy = "Choose an empty database or a new folder."


class AnotherHistory(Conflict, see=("pipeline.md",)):
    """What was read before belongs to another plane, or to another lineage of this one. Nothing was read or written."""

    code = "another_history"
    retry = RetryAdvice.NEVER
    cause = "The lake or the stream was read from another plane, or the plane was restored from a backup since."
    remedy = (
        "Use a lake of its own for each plane. After a restore, follow the message: accept the new lineage, or reset "
        "the lake."
    )


class WouldLoseData(Conflict, see=("pipeline.md",)):
    """The lake has rows that the plane no longer has, and that would be removed. Nothing was removed."""

    code = "would_lose_data"
    retry = RetryAdvice.NEVER
    cause = "The lake has rows that the plane no longer has, and this command would remove them."
    remedy = "Keep a copy of the lake. Repeat the command with the option that the message names if the rows may go."


class WorldExists(Conflict):
    """A world of that name already exists, or its deletion is not finished."""

    code = "world_exists"
    cause = "A world of that name exists, or its deletion has not finished."
    remedy = "Use the existing world, choose another name, or wait until the deletion has finished."


class WorldNotActive(Conflict):
    """The world is paused, archived or being deleted, and does not accept this call."""

    code = "world_not_active"
    cause = "The world is paused, archived or being deleted, and does not accept this call."
    remedy = (
        "`fastness world show NAME` shows its state; `fastness world resume NAME` makes a paused or archived one "
        "active."
    )


class WorldHeld(Conflict, see=("how-to/write-programs.md",)):
    """A host holds the world, and only that host writes its journal."""

    code = "world_held"
    retry = RetryAdvice.LATER
    cause = "A host runs the world, and only that host writes its journal."
    remedy = "Send the world an item (`world.inbox.put`) instead of appending to its journal."


class HeadAdvanced(Conflict):
    """Another writer appended first: the journal's head is not where the caller expected it."""

    code = "head_advanced"
    cause = "Another writer appended to the journal after this one read its head."
    remedy = "Read the new entries, decide again, and append with the head that the error has in `actual`."

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"The journal's head is {actual}, not {expected}; read from {expected} on, then append again")
        self.expected = expected
        self.actual = actual


class CursorAdvanced(Conflict):
    """Another reader drained first: the inbox's cursor is not where the caller expected it."""

    code = "cursor_advanced"
    cause = "Another reader drained the inbox after this one read its cursor."
    remedy = "Read from the cursor that the error has in `actual`. Let one reader drain an inbox."

    def __init__(self, expected: int | None, actual: int | None) -> None:
        super().__init__(f"The inbox's cursor is {actual}, not {expected}; read from there on, then commit it again")
        self.expected = expected
        self.actual = actual


class SnapshotExists(Conflict):
    """A different snapshot exists at that height, and snapshots are immutable."""

    code = "snapshot_exists"
    cause = "A snapshot with other content exists at that height, and snapshots are immutable."
    remedy = "Find out why the reducer gave another state for the same records: it may not be a pure function."


class BaselineRegressed(Conflict):
    """The baseline only moves forward."""

    code = "baseline_regressed"
    cause = "The snapshot is older than the baseline, and the baseline only moves forward."
    remedy = "Promote a newer snapshot. Nothing is needed if another process promoted a newer one."


class PromotionRefused(Conflict):
    """The snapshot does not qualify as the baseline; the message names the condition it fails."""

    code = "promotion_refused"
    cause = (
        "The snapshot does not fulfil a condition of a baseline; the message names it, such as a pending effect below "
        "it."
    )
    remedy = "Fulfil the condition, then promote it: `fastness world promote NAME 500` for height 500."


class SegmentExists(Conflict):
    """The segment does not follow the last one: it covers the same heights, or leaves a gap."""

    code = "segment_exists"
    cause = "Another compaction has exported these heights, or the segment would leave a gap."
    remedy = "Continue from the height in the message. Let one process compact a world."


class LeaseHeld(Conflict, see=("how-to/hold-a-lease.md",)):
    """Another owner's lease has not expired."""

    code = "lease_held"
    retry = RetryAdvice.LATER
    cause = "Another owner holds the lease, and it has not expired. The error has `owner` and `expires_ms`."
    remedy = "Wait for it with `acquire(wait_seconds=…)`. `fastness lease show NAME` shows the holder."

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
    cause = "The document changed after its ETag was read. The error has `current_etag`."
    remedy = "Get the document again, apply the change to it, and write it with the new ETag."

    def __init__(self, key: str, *, current_etag: str | None) -> None:
        found = "no longer exists" if current_etag is None else f"now has ETag {current_etag}"
        super().__init__(f"State {key} {found}; get it again, then decide")
        self.current_etag = current_etag


class VersionConflict(Conflict, see=("how-to/store-rows.md",)):
    """The entity, or the row of a collection, changed after its version was read."""

    code = "version_conflict"
    cause = "The entity or the row changed after its version was read. The error has `expected` and `actual`."
    remedy = "Get it again, apply the change to it, and write it with the new version."

    def __init__(self, kind: str, id: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{kind} {id} has version {actual}, not {expected}; get it again, then decide")
        self.expected = expected
        self.actual = actual


class MailboxTaken(Conflict, see=("how-to/send-mail.md",)):
    """Another session reads this mailbox now: the last one to join replaces the others."""

    code = "mailbox_taken"
    retry = RetryAdvice.NEVER
    cause = "Another session joined this mailbox, and the last one to join reads it."
    remedy = (
        "Stop reading in one of the two processes. Do not reconnect automatically, or they replace each other for ever."
    )


class AgentExists(Conflict, see=("relay.md",)):
    """The agent is registered with another key."""

    code = "agent_exists"
    retry = RetryAdvice.NEVER
    cause = "The agent is registered with another public key."
    remedy = "Use the key that it was registered with. If the key was lost, register the new one with `replace`."


class QueueInUse(Conflict):
    """Messages of the queue are leased, so it was not deleted. Wait until they are settled, or delete it with force."""

    code = "queue_in_use"
    retry = RetryAdvice.LATER
    cause = "Consumers hold messages of the queue, so it was not deleted."
    remedy = (
        "Stop the workers and wait until their messages are settled, or delete it with `force`. `fastness queue "
        "leased QUEUE` shows the owners."
    )


class SqsQueueExists(Conflict):
    """The queue exists with another value of an attribute, so it was neither created nor changed."""

    code = "sqs_queue_exists"
    retry = RetryAdvice.NEVER
    cause = "`CreateQueue` names a queue that exists, with another value of an attribute than it has."
    remedy = "Set the attributes of the existing queue instead, or leave out those that differ."


class MoveTaskRunning(Conflict, see=("how-to/retries-and-dead-letters.md",)):
    """Another task moves messages out of the queue. Wait until it ends, or cancel it."""

    code = "move_task_running"
    retry = RetryAdvice.LATER
    cause = "One task at a time moves messages out of a dead-letter queue, and one is running."
    remedy = "Wait until it has ended, or cancel it, then start the next one."


class MoveTaskNotRunning(Conflict, see=("how-to/retries-and-dead-letters.md",)):
    """The task that moves messages has ended, or is being cancelled, so it cannot be cancelled."""

    code = "move_task_not_running"
    retry = RetryAdvice.NEVER
    cause = "The task has completed or failed, or it was cancelled before."
    remedy = "Nothing. Messages that it has moved stay where they are."


class MessageLeased(Conflict, see=("how-to/find-a-job.md",)):
    """The message is leased, so it cannot be changed."""

    code = "message_leased"
    cause = "A consumer holds the message, so its priority and delay cannot be changed."
    remedy = "Wait until it is settled, or cancel it, which tells the consumer to stop."


class MessageFinished(Conflict, see=("how-to/find-a-job.md", "how-to/retries-and-dead-letters.md")):
    """The message is done, dead or cancelled, so it cannot be changed."""

    code = "message_finished"
    retry = RetryAdvice.NEVER
    cause = "The message is done, dead or cancelled, so it cannot be changed."
    remedy = "Redrive a dead letter first: `fastness queue redrive QUEUE`. Put a new message otherwise."


class MessageKeyTaken(Conflict, see=("how-to/find-a-job.md",)):
    """Another message of the target queue has the unique key or the debounce key, so the message was not moved."""

    code = "message_key_taken"
    retry = RetryAdvice.LATER
    cause = (
        "Another message of the target queue has the unique key or the debounce key of this one, so it was not moved."
    )
    remedy = (
        "Let the other message finish, or cancel it, then move this one. Delete it if the other does the same work."
    )


class MessageFailed(Conflict, see=("how-to/retries-and-dead-letters.md",)):
    """The message failed too often, or was rejected, and is a dead letter; there is no result."""

    code = "message_failed"
    retry = RetryAdvice.NEVER
    cause = "The message failed in all its attempts, or was rejected, so there is no result."
    remedy = "`fastness message show QUEUE ID` has the traceback of each attempt. Fix the cause, then redrive it."


class RunExists(Conflict, see=("how-to/write-workflows.md",)):
    """A run with that id exists, of another workflow or with other arguments. Choose another id."""

    code = "run_exists"
    retry = RetryAdvice.NEVER
    cause = "A run with that id exists, of another workflow or with other arguments."
    remedy = "Choose another id. The same id with the same arguments returns the existing run."


class RunEnded(Conflict, see=("how-to/write-workflows.md",)):
    """The run has ended, so it takes no signals and cannot be changed."""

    code = "run_ended"
    retry = RetryAdvice.NEVER
    cause = "The run has ended, so it takes no signals and cannot be changed."
    remedy = "`fastness workflow show ID` shows how it ended. Start another run."


class RunNotEnded(Conflict, see=("how-to/write-workflows.md",)):
    """The run has not ended, so it cannot be deleted. Cancel it first."""

    code = "run_not_ended"
    cause = "The run has not ended, so it cannot be deleted."
    remedy = "Cancel it with `fastness workflow cancel ID`, and delete it when it has ended."


class RunFailed(Conflict, see=("how-to/write-workflows.md",)):
    """The run failed, so it has no result; the message has its error."""

    code = "run_failed"
    retry = RetryAdvice.NEVER
    cause = "The workflow raised an exception, so the run has no result."
    remedy = "`fastness workflow show ID` has the error and the steps. Fix the cause and start a run with another id."


class RunCancelled(Conflict, see=("how-to/write-workflows.md",)):
    """The run was cancelled, so it has no result."""

    code = "run_cancelled"
    retry = RetryAdvice.NEVER
    cause = "The run was cancelled, so it has no result."
    remedy = "Start a run with another id if the work is still needed."


class WorkflowChanged(Conflict, see=("how-to/versions-of-workflows.md",)):
    """The code of the workflow no longer does what the history of the run says; the message names the step."""

    code = "workflow_changed"
    retry = RetryAdvice.NEVER
    cause = "The code of the workflow was changed, and it no longer does what the history of the run says."
    remedy = (
        "Deploy the former code, or make the change with `run.patched`, so that running instances keep their steps. "
        "Then resume what `fastness workflow list --state stopped` shows: `fastness world resume-program run:ID`."
    )


class StepFailed(Conflict, see=("how-to/write-workflows.md",)):
    """A step of a run failed in its last attempt. `error_type` and `message` are those of its exception."""

    code = "step_failed"
    retry = RetryAdvice.NEVER
    cause = "A step raised an exception in its last attempt. `error_type` and `message` are those of the exception."
    remedy = "Catch it in the workflow to continue or compensate. Give the step more attempts with `retry=Retry(…)`."

    def __init__(self, step: str, error_type: str, message: str, attempts: int = 1) -> None:
        self.step = step
        self.error_type = error_type
        self.message = message
        self.attempts = attempts
        after = f" after {attempts} attempts" if attempts > 1 else ""
        super().__init__(f"Step {step} failed{after}: {error_type}: {message}")


class Fenced(FastnessError, see=("how-to/hold-a-lease.md", "explanation/idempotency.md")):
    """The lease given with a write does not permit it; nothing was written. Acquire it again, then read."""

    code = "fenced"
    cause = "The lease that was given with a write does not permit it. Nothing was written."
    remedy = "Stop the work that depends on the lease. Acquire it again, and read the current state before you write."


class LeaseRequired(Fenced, see=("how-to/hold-a-lease.md",)):
    """A lease is held on this key, so a write must name it."""

    code = "lease_required"
    cause = "A lease is held on the key of this document, so a write must name it."
    remedy = "Acquire the lease and pass it: `state.update(value, lease=lease)`."


class LeaseConflict(Fenced, see=("how-to/hold-a-lease.md",)):
    """A newer lease has replaced this one."""

    code = "lease_conflict"
    cause = (
        "A newer lease has replaced this one: it expired, or an operator released it, and another owner acquired it."
    )
    remedy = "Stop the work that depends on it, and acquire the lease again."


class LeaseExpired(Fenced, see=("how-to/hold-a-lease.md",)):
    """The lease has ended, before the write or the work that it was for."""

    code = "lease_expired"
    cause = (
        "The lease expired before the write, because it was not renewed in time: the process was paused or too slow."
    )
    remedy = "Acquire it again. Use a longer `ttl_seconds`, or a `with` block, which renews it in the background."


class FencingMismatch(Fenced, see=("how-to/hold-a-lease.md",)):
    """The lease was acquired again since: this copy has an old fence."""

    code = "fencing_mismatch"
    cause = "The same owner acquired the lease again since, so this copy has an old fence."
    remedy = "Use the lease that the last `acquire` returned. Give each process an owner of its own."


class TxnMismatch(Fenced, see=("how-to/hold-a-lease.md",)):
    """The lease belongs to another transaction of the same owner."""

    code = "txn_mismatch"
    cause = "The lease belongs to another transaction of the same owner."
    remedy = "Pass the `txn_id` that the lease was acquired with."


class QueueMessageLeaseMismatch(Fenced, see=("how-to/retries-and-dead-letters.md", "explanation/idempotency.md")):
    """The lease given to ack, nack or extend is not the message's current one: it expired or was replaced."""

    code = "queue_message_lease_mismatch"
    cause = "The message was delivered again, because its lease had expired. Its current consumer has a higher fence."
    remedy = (
        "Drop the work: the other delivery counts. If it happens often, use a longer `visibility_seconds`, or let a "
        "`Worker` renew the lease."
    )


class MessageCancelled(QueueMessageLeaseMismatch, see=("how-to/find-a-job.md",)):
    """The message was cancelled: it is not delivered again, and its consumer must stop working on it."""

    code = "message_cancelled"
    retry = RetryAdvice.NEVER
    cause = "The message was cancelled while a consumer worked on it."
    remedy = "Stop the work. The message is not delivered again, and needs no ack."


class Busy(FastnessError, see=("how-to/size-a-server.md", "metrics.md")):
    """A limit was reached and nothing was written; the same request may succeed later."""

    code = "busy"
    retry = RetryAdvice.LATER
    cause = (
        "A bound of the server or the database was reached: too many waiting calls, a lock that was not free in time, "
        "or the rate of the token."
    )
    remedy = (
        "Try again after `Retry-After`, with back-off. If it lasts, the message names the bound. `fastness token self` "
        "shows the rate of the token."
    )
    retry_after_seconds: float | None = None  # How long to wait, if that is known.


class LockTimeout(Busy, see=("how-to/hold-locks.md",)):
    """The lock was not released within the time that the caller was willing to wait."""

    code = "lock_timeout"
    cause = "The lock was not released within the time that the caller was willing to wait."
    remedy = "Wait longer, or hold locks for a shorter time. `fastness lock list` shows who holds what."


class QueueBusy(Busy, see=("how-to/size-a-server.md", "reference/settings.md")):
    """The maximum number of waiting consumers is reached."""

    code = "queue_busy"
    cause = (
        "As many consumers wait at this server as `queue_max_consumers` allows, over all queues, or as many watches."
    )
    remedy = "Run fewer consumers, let each receive for several queues, raise the setting, or add a server."


class MailboxFull(Busy, see=("how-to/send-mail.md",)):
    """The mailbox holds as many messages as its policy allows; nothing was stored."""

    code = "queue_full"
    cause = "The mailbox holds as many unconfirmed mails as its policy allows, 1,000 by default."
    remedy = (
        "Let the recipient read and confirm its mail. `fastness mail count AGENT` shows how much waits and since "
        "when. The bound is in `fastness mail policy`."
    )


class RateLimited(Busy, see=("ingress.md", "relay.md")):
    """The sender has reached its rate limit; nothing was stored. It may send again after `retry_after_seconds`."""

    code = "rate_limited"
    cause = (
        "The sender has reached its rate of pushes (`ingress_pushes_per_minute`) or of mail over the relay "
        "(`relay_rate_per_second`)."
    )
    remedy = "Send again after `retry_after_seconds`. Raise the setting if it is too low."

    def __init__(self, message: str = "", *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceeded(Busy, see=("how-to/limit-a-universe.md",)):
    """The universe holds or does as much as its quota allows; nothing was written.

    Reads, acks and deletions still work. `kind` is messages, bytes, connections or rate; `used` is what the universe
    has of it, or has used in the last second, and `limit` what it may have.
    """

    code = "quota_exceeded"
    cause = "The universe holds or does as much as its quota allows. The error has `kind`, `limit` and `used`."
    remedy = "Acks, deletes and reads still work: consume or delete data, or ask an administrator for a higher quota."
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


class ShutdownDraining(Busy, see=("how-to/production.md",)):
    """The server is shutting down and accepts no new work. Retry elsewhere, or here after its restart."""

    code = "shutdown_draining"
    cause = "The server is shutting down: it finishes the calls in progress and accepts no new ones."
    remedy = "Clients retry by themselves, here after the restart, or at another server. Wait for the restart."


class SqsQueueDeletedRecently(Busy):
    """A queue of that name was deleted less than 60 seconds ago, or its messages are still being deleted."""

    code = "sqs_queue_deleted_recently"
    cause = (
        "As in SQS, the name of a deleted queue is free again after 60 seconds, or when its last message is deleted."
    )
    remedy = "Wait and create the queue again, or choose another name."


class PurgeInProgress(Busy):
    """The queue was purged less than 60 seconds ago."""

    code = "purge_in_progress"
    cause = "As in SQS, a queue is purged through SQS once in 60 seconds at most."
    remedy = "Wait a minute and purge it again, or use `fastness queue purge QUEUE`, which has no such limit."


class ResultNotReady(Busy, see=("how-to/find-a-job.md",)):
    """The message or the run is not done yet; ask for its result again."""

    code = "result_not_ready"
    cause = "The message or the run is not done yet."
    remedy = (
        "Ask again, or wait for it with `wait_seconds`. A run that is `stopped` by an error waits until it is resumed."
    )


class Closed(FastnessError):
    """The handle was closed; open it again."""

    code = "closed"
    cause = "The plane, or the handle, was closed before this call, or while it was in progress."
    remedy = "Make calls inside the `with` block of the plane, and close it last."


class Corrupt(FastnessError, see=("how-to/back-up-and-restore.md",)):
    """Stored data is damaged. Restore it from a backup; Fastness never repairs damage silently."""

    code = "corrupt"
    cause = "Stored data is damaged. Fastness reports damage and never repairs it silently."
    remedy = (
        "Run `fastness doctor` to list all damage. Restore a backup, or salvage what is readable: `fastness doctor "
        "./data --salvage ./salvaged`."
    )


class DamagedDatabase(Corrupt, see=("how-to/back-up-and-restore.md",)):
    """The key space or the lake is damaged: a checksum does not match, or a part is missing."""

    code = "damaged_database"
    cause = (
        "A checksum inside the database does not match, or its log is damaged before its end: a disk fault, or files "
        "that were changed or deleted by other programs."
    )
    remedy = (
        "Check the disk. Restore a backup, or salvage what is readable: `fastness doctor ./data --salvage ./salvaged`."
    )


class HashMismatch(Corrupt, see=("how-to/back-up-and-restore.md",)):
    """Bytes do not match the hash that was recorded for them."""

    code = "hash_mismatch"
    cause = "The bytes of a blob do not match the hash that names it: its object was changed or damaged."
    remedy = "Put the original body again, or restore it from a backup. `fastness doctor` lists all damaged blobs."


class SizeMismatch(Corrupt, see=("how-to/back-up-and-restore.md",)):
    """A blob's body does not have its recorded size."""

    code = "size_mismatch"
    cause = "The body of a blob does not have its recorded size: its object was truncated or replaced."
    remedy = "Put the original body again, or restore it from a backup. `fastness doctor` lists all damaged blobs."


class MissingObject(Corrupt, see=("how-to/back-up-and-restore.md", "how-to/move-to-postgresql.md")):
    """What is recorded as stored is missing, or a part of it."""

    code = "missing_object"
    cause = (
        "A body that is recorded as stored is not in the object store: it was deleted by another program, or the "
        "plane was opened with another object store."
    )
    remedy = "Check `objects=…` or `--objects` first. Otherwise restore the object from a backup."


class MissingEntry(Corrupt, see=("how-to/back-up-and-restore.md",)):
    """The journal has a gap below its head."""

    code = "missing_entry"
    cause = "The journal of a world has a gap below its head."
    remedy = "Restore a backup. `fastness doctor` lists all worlds with gaps."


class ChecksumMismatch(Corrupt, see=("how-to/back-up-and-restore.md",)):
    """A segment's bytes do not match its recorded checksum."""

    code = "checksum_mismatch"
    cause = "The bytes of a segment of a journal do not match its recorded checksum."
    remedy = "Restore the segment's object from a backup. `fastness doctor` lists all damaged segments."


class MalformedSegment(Corrupt, see=("how-to/back-up-and-restore.md",)):
    """A segment's bytes do not contain the recorded entries."""

    code = "malformed_segment"
    cause = "A segment of a journal does not contain the entries that are recorded for it."
    remedy = "Restore the segment's object from a backup. `fastness doctor` lists all damaged segments."


class SealBroken(Corrupt, see=("how-to/send-mail.md",)):
    """A sealed mail was not encrypted by its sender for this key, or was changed in transit."""

    code = "seal_broken"
    cause = "A sealed mail was encrypted for another key, by another sender than it names, or was changed in transit."
    remedy = (
        "Open the mailbox with the agent's current key. Ask the sender to send it again, after comparing the public "
        "keys."
    )


class DecryptionFailed(Corrupt, see=("how-to/encrypt-data.md", "how-to/back-up-and-restore.md")):
    """An encrypted value was changed, moved or encrypted with another key."""

    code = "decryption_failed"
    cause = (
        "An encrypted value was changed or moved, or was encrypted with another key than the plane has for its "
        "universe."
    )
    remedy = (
        "Give the key file that the data was written with, with all former keys. If the keys are right, the data is "
        "damaged: restore a backup."
    )
    key: bytes | None = None  # Whose value it is, in the process that read it; None if it is not a value.


class UnreadableValue(Corrupt, see=("how-to/secure-a-server.md", "how-to/langgraph.md")):
    """A stored value is not what its reader stores, or names code that may not run. Nothing of it was run."""

    code = "unreadable_value"
    cause = (
        "A row is not in the form in which its reader stores rows, or it names code that the reader may not run. "
        "Another program has written it, or it was stored before the reader was restricted."
    )
    remedy = (
        "Find out which token may write such rows. If the row is your own, name its types in the `allowed_types` of "
        "`FastnessSaver`; otherwise delete the row."
    )


class Backend(FastnessError):
    """The storage or network below Fastness failed."""

    code = "backend"
    retry = RetryAdvice.LATER
    cause = "The storage or the network below Fastness failed; the message has its error."
    remedy = "Follow the message. Try again later: acknowledged writes are intact."


class DirectoryInUse(Backend, see=("how-to/choose-a-deployment.md",)):
    """The data directory is open already, in another process or in this one."""

    code = "directory_in_use"
    cause = "Another process has the data directory open, and only one can."
    remedy = (
        "Use the server that has it open (`--url http://127.0.0.1:9440`), or stop the other process, whose id the "
        "message names. Processes on several machines need PostgreSQL."
    )


class PlaneInUse(Backend, see=("how-to/operate-postgresql.md",)):
    """Other processes use the plane, and this operation needs it idle. Stop them first."""

    code = "plane_in_use"
    cause = "Other processes use the plane, and this operation needs it idle."
    remedy = (
        "Stop the servers and programs that the message names, or that `fastness node list` lists, and run it again."
    )


class MigrationUnfinished(Backend, see=("how-to/move-to-postgresql.md",)):
    """The plane is the target of an incomplete migration. Run the migration again; it resumes where it stopped."""

    code = "migration_unfinished"
    cause = "The plane is the target of a migration that was interrupted."
    remedy = "Run the same `fastness migrate SOURCE TARGET` again; it resumes where it stopped."


class EncryptionKeyMissing(Backend, see=("how-to/encrypt-data.md",)):
    """A key was not given, or another one: of encrypted universes, or of SQS access keys."""

    code = "encryption_key_missing"
    retry = RetryAdvice.NEVER
    cause = "The plane has encrypted universes, and no key was given, or not the one that wraps their keys."
    remedy = (
        "Give the key file: `encryption_key_file` in the settings of a server, `encryption=` when you open the plane. "
        "Without the key the data cannot be read."
    )


class PathUnusable(Backend, see=("how-to/production.md",)):
    """A file or folder cannot be created, read or written, or not be used for this."""

    code = "path_unusable"
    retry = RetryAdvice.NEVER
    cause = "A file or folder cannot be created, read or written; the message names it and the reason."
    remedy = (
        "Choose another path, or give this user access to it. Do not put a data directory on a network file system."
    )


class Unreachable(Backend, see=("how-to/high-availability.md",)):
    """The server, or a program that is needed, does not answer; nothing was written."""

    code = "unreachable"
    cause = (
        "No server answers at that address, or no PostgreSQL server answered as a primary for 30 s. Nothing was "
        "written."
    )
    remedy = (
        "Check the address, that the server runs (`fastness serve`), and the firewall. Clients reconnect by "
        "themselves; `--patience SECONDS` lets a command wait."
    )


class DiskFull(Backend, see=("how-to/free-space.md", "how-to/production.md")):
    """The device has no space left, or only its reserve. Free some; acknowledged writes are intact.

    While the reserve is left, reads, acks and deletes still work. A server reopens a key space that failed by itself;
    an embedded plane has `reopen`.
    """

    code = "disk_full"
    cause = "The disk has no space left, or only the reserve (`disk_reserve_bytes`). Acknowledged writes are intact."
    remedy = (
        "`fastness space` shows what is stored. Consume or purge queues, delete archived worlds, or make the disk "
        "larger. Do not delete files in the data directory."
    )


class DatabaseFailed(Backend, see=("how-to/production.md",)):
    """The database refused this, or an earlier failure stopped it; acknowledged writes are intact."""

    code = "database_failed"
    cause = "An earlier write failed, so the key space is closed for writes. Acknowledged writes are intact."
    remedy = "A server reopens it by itself; its log has the cause. An embedded program calls `plane.reopen()`."


class SchemaMismatch(Backend, see=("how-to/upgrade.md",)):
    """The stored data has a format that this version does not support."""

    code = "schema_mismatch"
    retry = RetryAdvice.NEVER
    cause = (
        "The data or PostgreSQL's tables have a format that this version does not support. The message says whether it "
        "is older or newer."
    )
    remedy = (
        "For newer data, install the version that wrote it. Copy older data to a new plane with `fastness migrate "
        "SOURCE TARGET`. For older tables run `fastness migrate URL`."
    )


class Unsupported(Backend, see=("how-to/choose-a-deployment.md", "how-to/upgrade.md")):
    """The operation is not offered by this backend, version or installation."""

    code = "unsupported"
    retry = RetryAdvice.NEVER
    cause = "The backend, the server or this installation does not offer the operation; the message says why."
    remedy = "Follow the message: install the extra it names, configure an object store, or upgrade the older side."


class CommitUnknown(Backend, see=("explanation/idempotency.md",)):
    """The answer to a commit was lost: it may or may not have been committed. Read, or repeat it idempotently."""

    code = "commit_unknown"
    retry = RetryAdvice.IDEMPOTENT
    cause = "The connection was lost while the commit was in progress: it may or may not have happened."
    remedy = (
        "Read whether it happened, or repeat the call with the same idempotency key. Puts of the client have such a "
        "key and are repeated automatically."
    )


# By their codes. An application's own subclass has the code of its base.
CLASSES: Final[dict[str, type[FastnessError]]] = {
    each.code: each for each in vars().values() if isinstance(each, type) and issubclass(each, FastnessError)
}


def rebuild(code: str, message: str) -> FastnessError:
    """The error of class `code` with `message`: for errors that arrive in an answer. Unknown codes: `FastnessError`."""
    error = FastnessError.__new__(CLASSES.get(code, FastnessError), message)
    Exception.__init__(error, message)
    return error
