"""Bounds of fields for the OpenAPI document: patterns, lengths and ranges.

The layers of the plane enforce these bounds; this module only documents them, so that callers and generated clients can
check values before they send them. A documented bound is never stricter than the enforced one.
"""

from typing import Any, Final

from fastness import limits
from fastness.lock_rules import Mode
from fastness.server.http.limits import IDEMPOTENCY_KEY_CHARACTERS_MAX, PAGE_SIZE_MAX


def _between(least: float, most: float) -> dict[str, Any]:
    return {"minimum": least, "maximum": most}


def _text(most: int) -> dict[str, Any]:
    return {"minLength": 1, "maxLength": most}


_NAME: Final = {"pattern": "^(?!\\.{1,2}$)[A-Za-z0-9._@:+=-]{1,255}$"}
_KEY: Final = {
    "pattern": "^(?!\\.{1,2}(/|$))[A-Za-z0-9._@:+=-]+(/(?!\\.{1,2}(/|$))[A-Za-z0-9._@:+=-]+)*$",
    "maxLength": limits.NAME_BYTES_MAX,
}
_MESSAGE_KEY: Final = _text(limits.KEY_CHARACTERS_MAX)
_SEARCHED: Final = _text(limits.SEARCH_TEXT_CHARACTERS_MAX)
_CONTENT_TYPE: Final = {"pattern": "^[!-~][ -~]{0,254}$"}
_HASH: Final = {"pattern": "^[0-9a-f]{64}$"}
_COUNT: Final = {"minimum": 0}
_VISIBILITY: Final = _between(0.001, limits.VISIBILITY_SECONDS_MAX)
_RETENTION: Final = _between(0.001, limits.TTL_SECONDS_MAX)
_BATCH: Final = {"minItems": 1, "maxItems": limits.MESSAGES_MAX}
_BASE64: Final = {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"}
_LOCK_CLAIM: Final = {"pattern": f"^[A-Za-z0-9_-]{{1,{limits.LOCK_SESSION_ID_CHARACTERS_MAX}}}$"}

_ROW_KEY: Final = {"minItems": 1, "maxItems": limits.COLLECTION_KEY_ELEMENTS_MAX}

_CLAIMS: Final = ("RenewWorlds", "ReleaseWorlds")

# Bounds by field name, in any request.
_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "universe": _NAME,
    "world": _NAME,
    "target": _NAME,
    "queue": _NAME,
    "collection": _NAME,
    "dead_letter_queue": _NAME,
    "group": _NAME,
    "session": _NAME,
    "key": _KEY,
    "unique_key": _text(limits.IDEMPOTENCY_KEY_BYTES_MAX),
    "debounce_key": _text(limits.IDEMPOTENCY_KEY_BYTES_MAX),
    "hash": _HASH,
    "secret_sha256": _HASH,
    "payload_blob": _HASH,
    "result_blob": _HASH,
    "arguments_blob": _HASH,
    "value_blob": _HASH,
    "owner": _text(limits.OWNER_BYTES_MAX),
    "txn_id": _text(limits.OWNER_BYTES_MAX),
    "correlation_id": {"pattern": f"^[ -~]{{1,{limits.CORRELATION_ID_CHARACTERS_MAX}}}$"},
    "idempotency_key": _text(limits.IDEMPOTENCY_KEY_BYTES_MAX),
    "payload_content_type": _CONTENT_TYPE,
    "result_content_type": _CONTENT_TYPE,
    "intent": {"enum": ["failure", "defer"]},
    "priority": _between(0, limits.PRIORITY_MAX),
    "max_attempts": _between(1, limits.MAX_ATTEMPTS_MAX),
    "delay_seconds": _between(0, limits.DELAY_SECONDS_MAX),
    "retry_delay_seconds": _between(0, limits.DELAY_SECONDS_MAX),
    "retry_delay_max_seconds": _between(0, limits.DELAY_SECONDS_MAX),
    "retry_factor": _between(1, limits.RETRY_FACTOR_MAX),
    "retry_jitter": _between(0, 1),
    "history_seconds": _between(0.001, limits.TTL_SECONDS_MAX),
    "failures_kept": _between(0, limits.FAILURES_KEPT_MAX),
    "visibility_seconds": _VISIBILITY,
    "extend_by_seconds": _VISIBILITY,
    "retention_seconds": _RETENTION,
    "dead_letter_retention_seconds": _RETENTION,
    "credit": _between(1, PAGE_SIZE_MAX),
    "page_size": _between(1, PAGE_SIZE_MAX),
    "max_messages": _between(1, limits.MESSAGES_MAX),
    "limit": _between(1, limits.READ_ENTRIES_MAX),
    "leases": _BATCH,
}
# Bounds of fields that have another meaning in one struct.
_STRUCT_FIELDS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    **{(kind, "kind"): _NAME for kind in ("DeleteEntity", "EntityWrite", "GetEntity", "PutEntity", "ReadChanges")},
    **{(kind, "id"): _NAME for kind in ("DeleteEntity", "EntityWrite", "GetEntity", "PutEntity", "ReadChanges")},
    **{(kind, "kind"): _NAME for kind in ("LogRecords", "EndSession", "ScanEntities", "SeenEntity")},
    **{(kind, "ttl_seconds"): _RETENTION for kind in ("EnqueueBody", "EnqueueMeta", "MessageBody")},
    **{
        (kind, "ttl_seconds"): _between(0.001, limits.LEASE_TTL_SECONDS_MAX)
        for kind in ("AcquireLease", "KeepBody", "KeepLease")
    },
    **{
        (kind, "lease_seconds"): _between(limits.LOCK_LEASE_SECONDS_MIN, limits.LOCK_LEASE_SECONDS_MAX)
        for kind in ("AcquireLocks", "RenewLocks")
    },
    ("AcquireLocks", "wait_seconds"): _between(0, limits.LEASE_WAIT_SECONDS_MAX),
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
    ("EndLockSession", "number"): _NAME,
    ("AcquireLease", "wait_seconds"): _between(0, limits.LEASE_WAIT_SECONDS_MAX),
    ("ReceiveMessages", "wait_seconds"): _between(0, limits.RECEIVE_WAIT_SECONDS_MAX),
    ("WaitForCancel", "wait_seconds"): _between(0, limits.RECEIVE_WAIT_SECONDS_MAX),
    ("GetRun", "wait_seconds"): _COUNT,
    ("ClaimEffects", "wait_seconds"): _between(0, limits.HOST_WAIT_SECONDS_MAX),
    ("ReleaseEffects", "effects"): {"minItems": 1, "maxItems": limits.EFFECT_CLAIMS_MAX},
    ("ClaimEffects", "limit"): _between(1, limits.EFFECT_CLAIMS_MAX),
    ("ClaimEffects", "kinds"): {"minItems": 1, "maxItems": limits.EFFECT_KINDS_MAX},
    **{
        (kind, "lease_seconds"): _between(0.001, limits.EFFECT_LEASE_SECONDS_MAX)
        for kind in ("ClaimEffects", "ExtendEffect")
    },
    ("FailEffect", "delay_seconds"): _between(0, limits.EFFECT_DELAY_SECONDS_LONGEST),
    ("Effect", "max_attempts"): _between(1, limits.EFFECT_ATTEMPTS_MAX),
    ("ClaimWorlds", "programs"): {"maxItems": limits.HOST_PROGRAMS_MAX},
    ("ClaimWorlds", "limit"): _between(1, limits.HOSTED_WORLDS_MAX),
    ("ClaimWorlds", "wait_seconds"): _between(0, limits.HOST_WAIT_SECONDS_MAX),
    **{
        (kind, "lease_seconds"): _between(0.001, limits.HOST_LEASE_SECONDS_MAX)
        for kind in ("ClaimWorlds", "CommitTurn", "RenewWorlds")
    },
    **{(kind, "worlds"): {"minItems": 1, "maxItems": limits.HOSTED_WORLDS_MAX} for kind in _CLAIMS},
    **{("CommitTurn", name): {"maxItems": limits.TURN_REQUESTS_MAX} for name in ("effects", "timers")},
    ("CommitTurn", "cancelled_timers"): {"maxItems": limits.TURN_REQUESTS_MAX},
    ("CommitTurn", "expected_head"): _COUNT,
    ("CommitTurn", "take"): _COUNT,
    ("SetProgram", "program"): _NAME,
    **{("SendToWorld", name): _NAME for name in ("to", "to_universe")},
    **{("SetSendPolicy", name): {"maxItems": limits.SEND_UNIVERSES_MAX} for name in ("sends_to", "accepts_from")},
    ("CreateWorld", "program"): _NAME,
    ("GetResult", "wait_seconds"): _COUNT,  # An HTTP response waits for `wait_seconds_max` of the server at most.
    **{(kind, "key"): _MESSAGE_KEY for kind in ("EnqueueBody", "EnqueueMeta", "MessageBody", "GetKey", "PauseKey")},
    ("PauseKey", "seconds"): _between(0, limits.DELAY_SECONDS_MAX),
    **{("QueuePolicy", name): {"minimum": 1} for name in ("concurrency_per_key", "burst_per_key")},
    ("QueuePolicy", "rate_per_key"): {"minimum": 0.001},
    ("QueuePolicy", "result_ttl_seconds"): _RETENTION,
    ("ExtendMessages", "seconds"): _VISIBILITY,
    # A batch with an invalid time is accepted, and the outcome of that message is an error.
    **{(kind, "visibility_seconds"): {} for kind in ("VisibilityBody", "VisibilityOfMessage")},
    ("ChangeVisibility", "changes"): _BATCH,
    ("QueuePolicy", "rate_per_second"): _between(0.001, 1_000_000),
    ("AppendEntries", "entries"): {"minItems": 1, "maxItems": limits.BATCH_ENTRIES_MAX},
    ("AppendEntries", "expected_head"): _COUNT,
    ("PutMessages", "messages"): _BATCH,
    **{(kind, "ids"): _BATCH for kind in ("CancelMessages", "DeleteMessages", "MoveMessages")},
    ("MoveMessages", "to"): _NAME,
    **{("SearchMessages", name): _SEARCHED for name in ("key", "group", "owner", "error")},
    **{("SearchMessages", f"{age}_than_seconds"): _between(0, limits.TTL_SECONDS_MAX) for age in ("older", "newer")},
    ("SearchMessages", "limit"): _between(1, limits.SEARCH_LIST_MAX),
    ("PushMany", "pushes"): {"minItems": 1, "maxItems": limits.PUSH_BATCH_MAX},
    # A batch with an invalid push is accepted, and the outcome of that push is an error.
    **{("PushItem", name): {} for name in ("to", "topic", "content_type", "idempotency_key", "session_id", "reply_to")},
    **{("Push", name): _text(limits.PUSH_TEXT_CHARACTERS_MAX) for name in ("topic", "content_type", "idempotency_key")},
    **{("Push", name): {"maxLength": limits.PUSH_TEXT_CHARACTERS_MAX} for name in ("session_id", "reply_to")},
    ("WatchPushes", "topic"): {"maxLength": limits.PUSH_TEXT_CHARACTERS_MAX},
    ("WatchPushes", "after"): {"pattern": "^[0-9a-f]{16}-[0-9]{1,15}$"},
    ("WatchPushes", "limit"): _between(1, limits.PUSH_WATCH_MAX),
    ("WatchPushes", "wait_seconds"): _between(0, limits.PUSH_WATCH_SECONDS_MAX),
    ("EnqueueBody", "messages"): _BATCH,
    ("WriteEntities", "writes"): {"minItems": 1, "maxItems": limits.ENTITY_WRITES_MAX},
    ("CommitRows", "changes"): {"minItems": 1, "maxItems": limits.COLLECTION_CHANGES_MAX},
    ("GetRows", "keys"): {"maxItems": limits.COLLECTION_ROWS_MAX},
    **{
        (kind, "partition"): _text(limits.COLLECTION_PARTITION_BYTES_MAX)
        for kind in ("PutRow", "DeleteRow", "DeleteRows", "GetRows", "ScanRows")
    },
    **{("ListPartitions", name): {"maxLength": limits.COLLECTION_PARTITION_BYTES_MAX} for name in ("prefix", "after")},
    **{(kind, "key"): _ROW_KEY for kind in ("PutRow", "DeleteRow", "Row")},
    **{(kind, "if_version"): _COUNT for kind in ("PutRow", "DeleteRow")},
    ("PutRow", "ttl_seconds"): _between(0.001, limits.COLLECTION_TTL_SECONDS_MAX),
    **{("ScanRows", name): _ROW_KEY for name in ("after", "before")},
    **{(kind, "prefix"): {"maxItems": limits.COLLECTION_KEY_ELEMENTS_MAX} for kind in ("ScanRows", "DeleteRows")},
    **{
        (kind, "limit"): _between(1, limits.COLLECTION_ROWS_MAX)
        for kind in ("ScanRows", "ListPartitions", "ListCollections")
    },
    ("CommitAtomic", "operations"): {"minItems": 1, "maxItems": limits.ATOMIC_OPERATIONS_MAX},
    **{
        (kind, "limit"): _between(1, limits.SUMMARY_LIST_MAX)
        for kind in ("ListKinds", "ListWaits", "SurveyQueues", "SurveyWorlds")
    },
    ("ListRuns", "limit"): _between(1, limits.RUNS_LISTED_MAX),
    ("ReadAudit", "limit"): _between(1, limits.AUDIT_LISTED_MAX),
    ("ListRuns", "state"): {"enum": ["running", "completed", "failed", "cancelled"]},
    ("StartRun", "workflow"): _NAME,
    ("StartRun", "id"): _NAME,
    ("StartRun", "parent"): _NAME,
    ("CancelRun", "reason"): {"maxLength": limits.RUN_REASON_BYTES_MAX},
    ("CheckWorld", "start"): _COUNT,
    ("RedriveMessages", "limit"): {"minimum": 1},
    ("DrainInbox", "limit"): _between(1, limits.BATCH_ENTRIES_MAX),
    **{(kind, "fields"): {"propertyNames": _NAME} for kind in ("EntityWrite", "PutEntity", "PatchBody")},
    ("ReadJournal", "start"): _COUNT,
    ("CompactWorld", "entries"): {"minimum": 1},
    ("CompactWorld", "margin"): _COUNT,
    ("CommitSnapshot", "height"): _COUNT,
    ("ForkWorld", "height"): _COUNT,
    ("SetSchedule", "name"): _NAME,
    ("RemoveSchedule", "name"): _NAME,
    ("CreateToken", "name"): _NAME,
    **{("Quota", name): _between(0, limits.QUOTA_COUNT_MAX) for name in ("messages", "bytes", "connections")},
    ("Quota", "rate_per_second"): _between(limits.QUOTA_RATE_MIN, limits.QUOTA_RATE_MAX),
    ("SurveyQueues", "text"): {"maxLength": limits.NAME_BYTES_MAX},
    ("ChangeWorld", "state"): {"enum": ["active", "paused", "archived"]},
    # Byte strings.
    ("DomainEvent", "key"): {},
    ("SendToWorld", "key"): {},
    ("GetPair", "key"): {},
    # Path and header parameters.
    ("path", "kind"): _NAME,
    ("path", "id"): _NAME,
    ("path", "name"): _NAME,
    ("path", "height"): _COUNT,
    ("path", "number"): _COUNT,
    ("path", "sequence"): _COUNT,
    ("path", "hash"): {"pattern": "^[0-9A-Fa-f]{64}$"},
    ("header", "X-Fastness-Universe"): _NAME,
    ("header", "Idempotency-Key"): _text(IDEMPOTENCY_KEY_CHARACTERS_MAX),
    ("header", "X-Fence"): {"minimum": 0},
}
_RANGE: Final = ("minimum", "maximum")
_KEYWORDS: Final = {
    "string": ("pattern", "enum", "minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("propertyNames",),
    "integer": _RANGE,
    "number": _RANGE,
}


def with_bounds(schema: dict[str, Any], kind: str, name: str, *, of: str = "") -> dict[str, Any]:
    """The schema of a field with its bounds.

    `kind` is the name of its struct, or path, query or header; `of` is the request that such a parameter belongs to.
    """
    for each in (of, kind):
        if (each, name) in _STRUCT_FIELDS:
            return _merged(schema, _STRUCT_FIELDS[each, name])
    return _merged(schema, _FIELDS.get(name, {}))


def _merged(schema: dict[str, Any], bounds: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [_merged(each, bounds) for each in schema["anyOf"]]}
    kind = schema.get("type")
    if kind == "string" and "contentEncoding" in schema:
        return {**schema, **_BASE64}
    if kind == "integer":
        schema = {**schema, "format": "int64"}
    return {
        **schema,
        **{keyword: value for keyword, value in bounds.items() if keyword in _KEYWORDS.get(str(kind), ())},
    }
