"""Every error Holdfast raises. `code` and `retry` are API; the message is for people and says what to do next.

HoldfastError
├── Validation            the request is wrong; nothing was written
│   ├── InvalidUrl, InvalidName, InvalidKey, InvalidValue, InvalidArgument
│   ├── KeyTooLarge, ValueTooLarge, TransactionTooLarge, EmptyBatch, BatchTooLarge, PayloadTooLarge
│   └── NestedTransaction, TransactionEnded, ReadOnlyTransaction, UnsupportedTier, NotSynchronous, NotEmbedded
├── NotFound              what was named is not there
│   └── ObjectNotFound, BlobNotFound, WorldNotFound, SnapshotNotFound
├── Conflict              somebody else was first; read again, then decide
│   ├── TransactionConflict, ObjectExists, ObjectChanged
│   ├── WorldExists, WorldNotActive, HeadAdvanced, CursorAdvanced
│   └── SnapshotExists, BaselineRegressed, PromotionRefused, SegmentExists
├── Busy                  a bound was reached; the same request may succeed later
├── Closed                the handle was closed
├── Corrupt               what is stored is damaged; never healed in silence
│   ├── DamagedDatabase, HashMismatch, SizeMismatch, MissingObject
│   └── MissingEntry, ChecksumMismatch, MalformedSegment
└── Backend               what lies below failed
    ├── DirectoryInUse, PathUnusable, Unreachable, DiskFull, DatabaseFailed, SchemaMismatch, Unsupported
    └── CommitUnknown     the answer was lost: the write may or may not be there
"""

from enum import StrEnum
from typing import ClassVar


class Retry(StrEnum):
    """What a caller may do after an error."""

    NEVER = "never"  # The same request will fail again; change it.
    REFRESH = "refresh"  # Read the current state, then decide.
    LATER = "later"  # The same request may succeed after a pause.
    IDEMPOTENT = "idempotent"  # It may have happened; repeat it only with an idempotency key or after a look.


class HoldfastError(Exception):
    """The root of everything that Holdfast raises on purpose."""

    code: ClassVar[str] = "error"
    retry: ClassVar[Retry] = Retry.NEVER


class Validation(HoldfastError):
    """The request is wrong; nothing was written."""

    code = "validation"


class InvalidUrl(Validation):
    """The URL names no backend that Holdfast has."""

    code = "invalid_url"


class InvalidName(Validation):
    """A universe, world or queue is named with characters that names do not have."""

    code = "invalid_name"


class InvalidKey(Validation):
    """A key, or a part of one, has a type or form that keys cannot have."""

    code = "invalid_key"


class InvalidValue(Validation):
    """A value is not bytes."""

    code = "invalid_value"


class InvalidArgument(Validation):
    """An argument is outside the range that the message names."""

    code = "invalid_argument"


class KeyTooLarge(Validation):
    """The key is longer than `limits.KEY_BYTES_MAX`."""

    code = "key_too_large"


class ValueTooLarge(Validation):
    """The value is longer than `limits.VALUE_BYTES_MAX`."""

    code = "value_too_large"


class TransactionTooLarge(Validation):
    """One transaction writes more bytes or keys than it may."""

    code = "transaction_too_large"


class EmptyBatch(Validation):
    """A batch has nothing in it."""

    code = "empty_batch"


class BatchTooLarge(Validation):
    """A batch has more entries or bytes than one append may have."""

    code = "batch_too_large"


class PayloadTooLarge(Validation):
    """An inbox item carries more than fits; store the payload as a blob and send its hash."""

    code = "payload_too_large"


class NestedTransaction(Validation):
    """`transact` was called from inside a transaction of the same database."""

    code = "nested_transaction"


class TransactionEnded(Validation):
    """The transaction was used after its function returned."""

    code = "transaction_ended"


class ReadOnlyTransaction(Validation):
    """A read snapshot was asked to write."""

    code = "read_only_transaction"


class UnsupportedTier(Validation):
    """A transaction cannot keep this tier's promise."""

    code = "unsupported_tier"


class NotSynchronous(Validation):
    """The function is a coroutine or a generator: it would run after its transaction has ended."""

    code = "not_synchronous"


class NotEmbedded(Validation):
    """This call needs the database in the same process, and the handle speaks to a server."""

    code = "not_embedded"


class NotFound(HoldfastError):
    """What was named is not there."""

    code = "not_found"


class ObjectNotFound(NotFound):
    """The object store has no object of that name."""

    code = "object_not_found"


class BlobNotFound(NotFound):
    """Nobody has stored a blob of that hash."""

    code = "blob_not_found"


class WorldNotFound(NotFound):
    """Nobody has created a world of that name."""

    code = "world_not_found"


class SnapshotNotFound(NotFound):
    """The world has no snapshot at that height."""

    code = "snapshot_not_found"


class Conflict(HoldfastError):
    """Somebody else was first; read the current state, then decide."""

    code = "conflict"
    retry = Retry.REFRESH


class TransactionConflict(Conflict):
    """The transaction lost to others as often as it may; nothing was written."""

    code = "transaction_conflict"
    retry = Retry.LATER


class ObjectExists(Conflict):
    """A create-only put found an object of that name; it was left as it is."""

    code = "object_exists"


class ObjectChanged(Conflict):
    """An if-match put found another version of the object; it was left as it is."""

    code = "object_changed"


class WorldExists(Conflict):
    """A world of that name was created before."""

    code = "world_exists"


class WorldNotActive(Conflict):
    """The world is paused, archived or deleted, and takes nothing."""

    code = "world_not_active"


class HeadAdvanced(Conflict):
    """Somebody appended first: the journal's head is not where the caller expected it."""

    code = "head_advanced"

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"The journal's head is {actual}, not {expected}; read from {expected} on, then append again")
        self.expected = expected
        self.actual = actual


class CursorAdvanced(Conflict):
    """Somebody drained first: the inbox's cursor is not where the caller expected it."""

    code = "cursor_advanced"

    def __init__(self, expected: int | None, actual: int | None) -> None:
        super().__init__(f"The inbox's cursor is {actual}, not {expected}; read from there on, then commit it again")
        self.expected = expected
        self.actual = actual


class SnapshotExists(Conflict):
    """Another snapshot is indexed at that height, and snapshots never change."""

    code = "snapshot_exists"


class BaselineRegressed(Conflict):
    """The baseline only moves forward."""

    code = "baseline_regressed"


class PromotionRefused(Conflict):
    """A snapshot does not qualify as a baseline; the message says which condition it fails."""

    code = "promotion_refused"


class SegmentExists(Conflict):
    """Another segment covers these heights, and segments never change."""

    code = "segment_exists"


class Busy(HoldfastError):
    """A bound was reached and nothing was written; the same request may succeed later."""

    code = "busy"
    retry = Retry.LATER


class Closed(HoldfastError):
    """The handle was closed; open it again."""

    code = "closed"


class Corrupt(HoldfastError):
    """What is stored is damaged. Restore it from a backup; Holdfast never heals damage in silence."""

    code = "corrupt"


class DamagedDatabase(Corrupt):
    """A checksum inside the database does not match, or its log is damaged before its end."""

    code = "damaged_database"


class HashMismatch(Corrupt):
    """A blob's bytes do not have the hash that names it."""

    code = "hash_mismatch"


class SizeMismatch(Corrupt):
    """A blob's body has another size than was recorded."""

    code = "size_mismatch"


class MissingObject(Corrupt):
    """A body that was recorded as stored is not in the object store."""

    code = "missing_object"


class MissingEntry(Corrupt):
    """The journal has a hole below its head."""

    code = "missing_entry"


class ChecksumMismatch(Corrupt):
    """A segment's bytes do not have the checksum that was recorded."""

    code = "checksum_mismatch"


class MalformedSegment(Corrupt):
    """A segment's bytes do not hold the records that were recorded."""

    code = "malformed_segment"


class Backend(HoldfastError):
    """What lies below Holdfast failed."""

    code = "backend"
    retry = Retry.LATER


class DirectoryInUse(Backend):
    """Another process has the data directory open."""

    code = "directory_in_use"


class PathUnusable(Backend):
    """The data directory cannot be created, read or written."""

    code = "path_unusable"
    retry = Retry.NEVER


class Unreachable(Backend):
    """The server behind a backend does not answer; nothing was written."""

    code = "unreachable"


class DiskFull(Backend):
    """The device has no space left. Free some and open the database again; what was acknowledged is there."""

    code = "disk_full"


class DatabaseFailed(Backend):
    """An earlier failure stopped this database. Open it again; what was acknowledged is there."""

    code = "database_failed"


class SchemaMismatch(Backend):
    """The stored data was laid out by a version that this one does not know."""

    code = "schema_mismatch"
    retry = Retry.NEVER


class Unsupported(Backend):
    """This backend does not offer the operation."""

    code = "unsupported"
    retry = Retry.NEVER


class CommitUnknown(Backend):
    """The answer to a commit was lost: the write may or may not be there. Look, or repeat it idempotently."""

    code = "commit_unknown"
    retry = Retry.IDEMPOTENT
