"""Every error Holdfast raises. `code` and `retry` are API; the message is for people and says what to do next.

HoldfastError
├── Validation            the request is wrong; nothing was written
│   ├── InvalidUrl, InvalidName, InvalidKey, InvalidValue, InvalidArgument, IdempotencyKeyReused
│   ├── KeyTooLarge, ValueTooLarge, TransactionTooLarge, EmptyBatch, BatchTooLarge, PayloadTooLarge, AnswerTooLarge
│   ├── NestedTransaction, TransactionEnded, ReadOnlyTransaction, UnsupportedTier, NotSynchronous, NotEmbedded
│   └── LockOrderViolation
├── NotAllowed            the token does not allow it
│   └── SenderBlocked, SenderMismatch
├── NotFound              what was named is not there
│   └── ObjectNotFound, BlobNotFound, WorldNotFound, SnapshotNotFound, MessageNotFound, MailNotFound
├── Conflict              somebody else was first; read again, then decide
│   ├── TransactionConflict, ObjectExists, ObjectChanged, TargetNotEmpty
│   ├── WorldExists, WorldNotActive, HeadAdvanced, CursorAdvanced
│   ├── SnapshotExists, BaselineRegressed, PromotionRefused, SegmentExists
│   ├── LeaseHeld, CasMismatch, VersionConflict
│   └── MailboxTaken, AgentExists
├── Fenced                the lease that came with a write does not entitle to it
│   ├── LeaseRequired, LeaseConflict, LeaseExpired, FencingMismatch, TxnMismatch
│   └── QueueMessageLeaseMismatch
├── Busy                  a bound was reached; the same request may succeed later
│   └── LockTimeout, QueueBusy, QueueFull, RateLimited, ShutdownDraining
├── Closed                the handle was closed
├── Corrupt               what is stored is damaged; never healed in silence
│   ├── DamagedDatabase, HashMismatch, SizeMismatch, MissingObject
│   └── MissingEntry, ChecksumMismatch, MalformedSegment, SealBroken
└── Backend               what lies below failed
    ├── DirectoryInUse, PlaneInUse, MigrationUnfinished
    ├── PathUnusable, Unreachable, DiskFull, DatabaseFailed, SchemaMismatch, Unsupported
    └── CommitUnknown     the answer was lost: the write may or may not be there
"""

from holdfast.errors.families import (
    Backend,
    Busy,
    Closed,
    Conflict,
    Corrupt,
    HoldfastError,
    NotAllowed,
    NotFound,
    Retry,
    Validation,
)
from holdfast.errors.leases import (
    CasMismatch,
    Fenced,
    FencingMismatch,
    LeaseConflict,
    LeaseExpired,
    LeaseHeld,
    LeaseRequired,
    LockOrderViolation,
    LockTimeout,
    TxnMismatch,
    VersionConflict,
)
from holdfast.errors.mail import (
    AgentExists,
    MailboxTaken,
    MailNotFound,
    QueueFull,
    RateLimited,
    SealBroken,
    SenderBlocked,
    SenderMismatch,
)
from holdfast.errors.queues import MessageNotFound, QueueBusy, QueueMessageLeaseMismatch, ShutdownDraining
from holdfast.errors.requests import (
    AnswerTooLarge,
    BatchTooLarge,
    EmptyBatch,
    IdempotencyKeyReused,
    InvalidArgument,
    InvalidKey,
    InvalidName,
    InvalidUrl,
    InvalidValue,
    KeyTooLarge,
    NestedTransaction,
    NotEmbedded,
    NotSynchronous,
    PayloadTooLarge,
    ReadOnlyTransaction,
    TransactionEnded,
    TransactionTooLarge,
    UnsupportedTier,
    ValueTooLarge,
)
from holdfast.errors.storage import (
    CommitUnknown,
    DamagedDatabase,
    DatabaseFailed,
    DirectoryInUse,
    DiskFull,
    MigrationUnfinished,
    MissingObject,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    PathUnusable,
    PlaneInUse,
    SchemaMismatch,
    TargetNotEmpty,
    TransactionConflict,
    Unreachable,
    Unsupported,
)
from holdfast.errors.worlds import (
    BaselineRegressed,
    BlobNotFound,
    ChecksumMismatch,
    CursorAdvanced,
    HashMismatch,
    HeadAdvanced,
    MalformedSegment,
    MissingEntry,
    PromotionRefused,
    SegmentExists,
    SizeMismatch,
    SnapshotExists,
    SnapshotNotFound,
    WorldExists,
    WorldNotActive,
    WorldNotFound,
)

__all__ = [
    "AgentExists",
    "Backend",
    "BaselineRegressed",
    "AnswerTooLarge",
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
    "DirectoryInUse",
    "DiskFull",
    "EmptyBatch",
    "Fenced",
    "FencingMismatch",
    "HashMismatch",
    "HeadAdvanced",
    "HoldfastError",
    "IdempotencyKeyReused",
    "InvalidArgument",
    "InvalidKey",
    "InvalidName",
    "InvalidUrl",
    "InvalidValue",
    "KeyTooLarge",
    "LeaseConflict",
    "LeaseExpired",
    "LeaseHeld",
    "LeaseRequired",
    "LockOrderViolation",
    "LockTimeout",
    "MailNotFound",
    "MailboxTaken",
    "MalformedSegment",
    "MessageNotFound",
    "MigrationUnfinished",
    "MissingEntry",
    "MissingObject",
    "NestedTransaction",
    "NotAllowed",
    "NotEmbedded",
    "NotFound",
    "NotSynchronous",
    "ObjectChanged",
    "ObjectExists",
    "ObjectNotFound",
    "PathUnusable",
    "PayloadTooLarge",
    "PlaneInUse",
    "PromotionRefused",
    "QueueBusy",
    "QueueFull",
    "QueueMessageLeaseMismatch",
    "RateLimited",
    "ReadOnlyTransaction",
    "Retry",
    "SchemaMismatch",
    "SealBroken",
    "SegmentExists",
    "SenderBlocked",
    "SenderMismatch",
    "ShutdownDraining",
    "SizeMismatch",
    "SnapshotExists",
    "SnapshotNotFound",
    "TargetNotEmpty",
    "TransactionConflict",
    "TransactionEnded",
    "TransactionTooLarge",
    "TxnMismatch",
    "Unreachable",
    "Unsupported",
    "UnsupportedTier",
    "Validation",
    "ValueTooLarge",
    "VersionConflict",
    "WorldExists",
    "WorldNotActive",
    "WorldNotFound",
]

for _name in __all__:  # People know them by the package, not by the file that they are sorted into.
    vars()[_name].__module__ = __name__
