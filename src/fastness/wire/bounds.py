"""Bounds of the fields of requests: ranges, lengths and patterns, as JSON Schema has them.

The layers of a plane enforce them. Here they are for what describes a field: the OpenAPI document, and the errors of
refused values. A described bound is never stricter than the enforced one.
"""

from typing import Any, Final

from fastness import limits
from fastness.lock_rules import Mode


def between(least: float, most: float) -> dict[str, Any]:
    return {"minimum": least, "maximum": most}


def text_of(most: int) -> dict[str, Any]:
    return {"minLength": 1, "maxLength": most}


NAME: Final = {"pattern": "^(?!\\.{1,2}$)[A-Za-z0-9._@:+=-]{1,255}$"}
_KEY: Final = {
    "pattern": "^(?!\\.{1,2}(/|$))[A-Za-z0-9._@:+=-]+(/(?!\\.{1,2}(/|$))[A-Za-z0-9._@:+=-]+)*$",
    "maxLength": limits.NAME_BYTES_MAX,
}
_MESSAGE_KEY: Final = text_of(limits.KEY_CHARACTERS_MAX)
_SEARCHED: Final = text_of(limits.SEARCH_TEXT_CHARACTERS_MAX)
_CONTENT_TYPE: Final = {"pattern": "^[!-~][ -~]{0,254}$"}
_HASH: Final = {"pattern": "^[0-9a-f]{64}$"}
COUNT: Final = {"minimum": 0}
_VISIBILITY: Final = between(0.001, limits.VISIBILITY_SECONDS_MAX)
_RETENTION: Final = between(0.001, limits.TTL_SECONDS_MAX)
_BATCH: Final = {"minItems": 1, "maxItems": limits.MESSAGES_MAX}
_MAIL_ID: Final = {"pattern": f"^[ -~]{{1,{limits.MAIL_ID_CHARACTERS_MAX}}}$"}
_LOCK_CLAIM: Final = {"pattern": f"^[A-Za-z0-9_-]{{1,{limits.LOCK_SESSION_ID_CHARACTERS_MAX}}}$"}

_ROW_KEY: Final = {"minItems": 1, "maxItems": limits.COLLECTION_KEY_ELEMENTS_MAX}

_CLAIMS: Final = ("RenewWorlds", "ReleaseWorlds")

# Bounds by field name, in any request.
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "universe": NAME,
    "world": NAME,
    "target": NAME,
    "queue": NAME,
    "collection": NAME,
    "dead_letter_queue": NAME,
    "group": NAME,
    "session": NAME,
    "key": _KEY,
    "unique_key": text_of(limits.IDEMPOTENCY_KEY_BYTES_MAX),
    "debounce_key": text_of(limits.IDEMPOTENCY_KEY_BYTES_MAX),
    "hash": _HASH,
    "secret_sha256": _HASH,
    "payload_blob": _HASH,
    "result_blob": _HASH,
    "arguments_blob": _HASH,
    "value_blob": _HASH,
    "owner": text_of(limits.OWNER_BYTES_MAX),
    "txn_id": text_of(limits.OWNER_BYTES_MAX),
    "correlation_id": {"pattern": f"^[ -~]{{1,{limits.CORRELATION_ID_CHARACTERS_MAX}}}$"},
    "idempotency_key": text_of(limits.IDEMPOTENCY_KEY_BYTES_MAX),
    "payload_content_type": _CONTENT_TYPE,
    "result_content_type": _CONTENT_TYPE,
    "intent": {"enum": ["failure", "defer"]},
    "priority": between(0, limits.PRIORITY_MAX),
    "max_attempts": between(1, limits.MAX_ATTEMPTS_MAX),
    "delay_seconds": between(0, limits.DELAY_SECONDS_MAX),
    "retry_delay_seconds": between(0, limits.DELAY_SECONDS_MAX),
    "retry_delay_max_seconds": between(0, limits.DELAY_SECONDS_MAX),
    "retry_factor": between(1, limits.RETRY_FACTOR_MAX),
    "retry_jitter": between(0, 1),
    "history_seconds": between(0.001, limits.TTL_SECONDS_MAX),
    "failures_kept": between(0, limits.FAILURES_KEPT_MAX),
    "visibility_seconds": _VISIBILITY,
    "extend_by_seconds": _VISIBILITY,
    "retention_seconds": _RETENTION,
    "dead_letter_retention_seconds": _RETENTION,
    "max_messages": between(1, limits.MESSAGES_MAX),
    "limit": between(1, limits.READ_ENTRIES_MAX),
    "leases": _BATCH,
}
# Bounds of fields that have another meaning in one struct.
STRUCT_FIELDS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    **{(kind, "kind"): NAME for kind in ("DeleteEntity", "EntityWrite", "GetEntity", "PutEntity", "ReadChanges")},
    **{(kind, "id"): NAME for kind in ("DeleteEntity", "EntityWrite", "GetEntity", "PutEntity", "ReadChanges")},
    **{(kind, "kind"): NAME for kind in ("LogRecords", "EndSession", "ScanEntities", "SeenEntity")},
    ("NewMessage", "ttl_seconds"): _RETENTION,
    **{(kind, "ttl_seconds"): between(0.001, limits.LEASE_TTL_SECONDS_MAX) for kind in ("AcquireLease", "KeepLease")},
    **{
        (kind, "lease_seconds"): between(limits.LOCK_LEASE_SECONDS_MIN, limits.LOCK_LEASE_SECONDS_MAX)
        for kind in ("AcquireLocks", "RenewLocks")
    },
    ("AcquireLocks", "wait_seconds"): between(0, limits.LEASE_WAIT_SECONDS_MAX),
    ("AcquireLocks", "paths"): {
        "minItems": 1,
        "maxItems": limits.LOCK_CLAIM_PATHS_MAX,
        "items": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    },
    ("AcquireLocks", "mode"): {"enum": [mode.value for mode in Mode]},
    **{(kind, "claim"): _LOCK_CLAIM for kind in ("AcquireLocks", "ReleaseLocks")},
    ("AcquireLocks", "owner"): {"maxLength": limits.OWNER_BYTES_MAX},
    **{(kind, "session"): {} for kind in ("AcquireLocks", "LockProof", "ReleaseLocks", "RenewLocks")},
    ("LockSession", "id"): {"pattern": f"^[A-Za-z0-9_-]{{16,{limits.LOCK_SESSION_ID_CHARACTERS_MAX}}}$"},
    ("EndLockSession", "number"): NAME,
    ("AcquireLease", "wait_seconds"): between(0, limits.LEASE_WAIT_SECONDS_MAX),
    ("ReceiveMessages", "wait_seconds"): between(0, limits.RECEIVE_WAIT_SECONDS_MAX),
    ("WaitForCancel", "wait_seconds"): between(0, limits.RECEIVE_WAIT_SECONDS_MAX),
    ("GetRun", "wait_seconds"): COUNT,
    ("ClaimEffects", "wait_seconds"): between(0, limits.HOST_WAIT_SECONDS_MAX),
    ("ReleaseEffects", "effects"): {"minItems": 1, "maxItems": limits.EFFECT_CLAIMS_MAX},
    ("ClaimEffects", "limit"): between(1, limits.EFFECT_CLAIMS_MAX),
    ("ClaimEffects", "kinds"): {"minItems": 1, "maxItems": limits.EFFECT_KINDS_MAX},
    **{
        (kind, "lease_seconds"): between(0.001, limits.EFFECT_LEASE_SECONDS_MAX)
        for kind in ("ClaimEffects", "ExtendEffect")
    },
    ("FailEffect", "delay_seconds"): between(0, limits.EFFECT_DELAY_SECONDS_LONGEST),
    ("Effect", "max_attempts"): between(1, limits.EFFECT_ATTEMPTS_MAX),
    ("ClaimWorlds", "programs"): {"maxItems": limits.HOST_PROGRAMS_MAX},
    ("ClaimWorlds", "limit"): between(1, limits.HOSTED_WORLDS_MAX),
    ("ClaimWorlds", "wait_seconds"): between(0, limits.HOST_WAIT_SECONDS_MAX),
    **{
        (kind, "lease_seconds"): between(0.001, limits.HOST_LEASE_SECONDS_MAX)
        for kind in ("ClaimWorlds", "CommitTurn", "RenewWorlds")
    },
    **{(kind, "worlds"): {"minItems": 1, "maxItems": limits.HOSTED_WORLDS_MAX} for kind in _CLAIMS},
    **{("CommitTurn", name): {"maxItems": limits.TURN_REQUESTS_MAX} for name in ("effects", "timers")},
    ("CommitTurn", "cancelled_timers"): {"maxItems": limits.TURN_REQUESTS_MAX},
    ("CommitTurn", "blobs"): {"maxItems": limits.TURN_REQUESTS_MAX, "items": {"type": "string", **_HASH}},
    ("CommitTurn", "expected_head"): COUNT,
    ("CommitTurn", "take"): COUNT,
    ("SetProgram", "program"): NAME,
    **{("SendToWorld", name): NAME for name in ("to", "to_universe")},
    **{("SetSendPolicy", name): {"maxItems": limits.SEND_UNIVERSES_MAX} for name in ("sends_to", "accepts_from")},
    ("CreateWorld", "program"): NAME,
    ("GetResult", "wait_seconds"): COUNT,  # An HTTP response waits for `wait_seconds_max` of the server at most.
    **{(kind, "key"): _MESSAGE_KEY for kind in ("NewMessage", "GetKey", "PauseKey")},
    ("PauseKey", "seconds"): between(0, limits.DELAY_SECONDS_MAX),
    **{("QueuePolicy", name): {"minimum": 1} for name in ("concurrency_per_key", "burst_per_key")},
    ("QueuePolicy", "rate_per_key"): {"minimum": 0.001},
    ("QueuePolicy", "result_ttl_seconds"): _RETENTION,
    ("ExtendMessages", "seconds"): _VISIBILITY,
    ("ChangeVisibility", "changes"): _BATCH,
    ("ChangeVisibility", "late_owner"): {"maxLength": limits.OWNER_BYTES_MAX},
    ("QueuePolicy", "rate_per_second"): between(0.001, 1_000_000),
    ("AppendEntries", "entries"): {"minItems": 1, "maxItems": limits.BATCH_ENTRIES_MAX},
    ("AppendEntries", "expected_head"): COUNT,
    ("PutMessages", "messages"): _BATCH,
    **{(kind, "ids"): _BATCH for kind in ("CancelMessages", "DeleteMessages", "MoveMessages")},
    ("MoveMessages", "to"): NAME,
    **{("SearchMessages", name): _SEARCHED for name in ("key", "group", "owner", "error")},
    **{("SearchMessages", f"{age}_than_seconds"): between(0, limits.TTL_SECONDS_MAX) for age in ("older", "newer")},
    ("SearchMessages", "limit"): between(1, limits.SEARCH_LIST_MAX),
    ("PushMany", "pushes"): {"minItems": 1, "maxItems": limits.PUSH_BATCH_MAX},
    # A batch with an invalid push is accepted, and the outcome of that push is an error.
    **{("PushItem", name): {} for name in ("to", "topic", "content_type", "idempotency_key", "session_id", "reply_to")},
    **{
        ("Push", name): text_of(limits.PUSH_TEXT_CHARACTERS_MAX)
        for name in ("topic", "content_type", "idempotency_key")
    },
    **{("Push", name): {"maxLength": limits.PUSH_TEXT_CHARACTERS_MAX} for name in ("session_id", "reply_to")},
    ("WatchPushes", "topic"): {"maxLength": limits.PUSH_TEXT_CHARACTERS_MAX},
    ("WatchPushes", "after"): {"pattern": "^[0-9a-f]{16}-[0-9]{1,15}$"},
    ("WatchPushes", "limit"): between(1, limits.PUSH_WATCH_MAX),
    ("WatchPushes", "wait_seconds"): between(0, limits.PUSH_WATCH_SECONDS_MAX),
    ("WriteEntities", "writes"): {"minItems": 1, "maxItems": limits.ENTITY_WRITES_MAX},
    ("CommitRows", "changes"): {"minItems": 1, "maxItems": limits.COLLECTION_CHANGES_MAX},
    ("GetRows", "keys"): {"maxItems": limits.COLLECTION_ROWS_MAX},
    **{
        (kind, "partition"): text_of(limits.COLLECTION_PARTITION_BYTES_MAX)
        for kind in ("PutRow", "DeleteRow", "DeleteRows", "GetRows", "ScanRows")
    },
    **{("ListPartitions", name): {"maxLength": limits.COLLECTION_PARTITION_BYTES_MAX} for name in ("prefix", "after")},
    **{(kind, "key"): _ROW_KEY for kind in ("PutRow", "DeleteRow", "Row")},
    **{(kind, "if_version"): COUNT for kind in ("PutRow", "DeleteRow")},
    ("PutRow", "ttl_seconds"): between(0.001, limits.COLLECTION_TTL_SECONDS_MAX),
    **{("ScanRows", name): _ROW_KEY for name in ("after", "before")},
    **{(kind, "prefix"): {"maxItems": limits.COLLECTION_KEY_ELEMENTS_MAX} for kind in ("ScanRows", "DeleteRows")},
    **{
        (kind, "limit"): between(1, limits.COLLECTION_ROWS_MAX)
        for kind in ("ScanRows", "ListPartitions", "ListCollections")
    },
    ("CommitAtomic", "operations"): {"minItems": 1, "maxItems": limits.ATOMIC_OPERATIONS_MAX},
    **{
        (kind, "limit"): between(1, limits.SUMMARY_LIST_MAX)
        for kind in ("ListKinds", "ListWaits", "SurveyQueues", "SurveyWorlds")
    },
    ("ListRuns", "limit"): between(1, limits.RUNS_LISTED_MAX),
    ("ReadAudit", "limit"): between(1, limits.AUDIT_LISTED_MAX),
    ("ListRuns", "state"): {"enum": ["running", "stopped", "completed", "failed", "cancelled"]},
    ("StartRun", "workflow"): NAME,
    **{("StartRun", name): {**NAME, "maxLength": limits.RUN_ID_BYTES_MAX} for name in ("id", "parent")},
    ("CancelRun", "reason"): {"maxLength": limits.RUN_REASON_BYTES_MAX},
    ("CheckWorld", "start"): COUNT,
    ("RedriveMessages", "limit"): {"minimum": 1},
    **{(kind, "limit"): between(1, limits.MAIL_BATCH_MAX) for kind in ("ReadMail", "ListMailboxes")},
    **{(kind, "wait_seconds"): between(0, limits.MAIL_WAIT_SECONDS_MAX) for kind in ("ReadMail", "ReadReceipts")},
    ("WaitForRows", "wait_seconds"): between(0, limits.COLLECTION_WAIT_SECONDS_MAX),
    ("CollectGarbage", "grace_seconds"): between(0, limits.GC_GRACE_SECONDS_MAX),
    ("CreateToken", "ttl_seconds"): between(1, limits.TTL_SECONDS_MAX),
    ("ListBlocks", "limit"): between(1, limits.BLOCKS_MAX),
    ("ListLeasedMessages", "limit"): between(1, limits.LEASED_LIST_MAX),
    ("ReadQueueHistory", "limit"): between(1, limits.HISTORY_PAGE_MAX),
    **{(kind, "limit"): between(1, limits.SQS_LIST_MAX) for kind in ("ListSqsQueues", "ListSqsSources")},
    ("ListMoveTasks", "limit"): between(1, limits.MOVE_TASKS_LISTED_MAX),
    ("RewriteValues", "limit"): between(1, limits.ENCRYPTION_REWRITE_CALL),
    **{(kind, "session"): _MAIL_ID for kind in ("JoinMailbox", "LeaveMailbox", "ReadMail")},
    ("DrainInbox", "limit"): between(1, limits.BATCH_ENTRIES_MAX),
    **{(kind, "fields"): {"propertyNames": NAME} for kind in ("EntityWrite", "PutEntity")},
    ("ReadJournal", "start"): COUNT,
    ("CompactWorld", "entries"): {"minimum": 1},
    ("CompactWorld", "margin"): COUNT,
    ("CommitSnapshot", "height"): COUNT,
    ("ForkWorld", "height"): COUNT,
    ("SetSchedule", "name"): NAME,
    ("RemoveSchedule", "name"): NAME,
    ("CreateToken", "name"): NAME,
    **{("Quota", name): between(0, limits.QUOTA_COUNT_MAX) for name in ("messages", "bytes", "connections")},
    ("Quota", "rate_per_second"): between(limits.QUOTA_RATE_MIN, limits.QUOTA_RATE_MAX),
    ("SurveyQueues", "text"): {"maxLength": limits.NAME_BYTES_MAX},
    ("ChangeWorld", "state"): {"enum": ["active", "paused", "archived"]},
    # Byte strings.
    ("DomainEvent", "key"): {},
    ("SendToWorld", "key"): {},
    ("GetPair", "key"): {},
}


def bounds_of(struct: str, field: str) -> dict[str, Any]:
    """The bounds of a field, by the name of its struct and its own."""
    return STRUCT_FIELDS.get((struct, field), FIELDS.get(field, {}))
