"""Examples in the OpenAPI document: recorded calls of every endpoint, and a problem for every error code.

Calls are recorded by tools/make_api_examples.py into openapi_examples.json, so that they are what a server answers.
"""

from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec

from fastness.errors import RetryAdvice, rebuild
from fastness.remedies import REMEDIES, Remedy
from fastness.server.problems import MSGPACK, PROBLEM
from fastness.wire.problems import RETRY_AFTER_SECONDS, Problem, problem_of

_REFERENCE: Final = "#/components/examples/{code}"
# Errors of one kind of resource. Those of no kind are listed for every operation.
_LEASES: Final = ("lease_required", "lease_conflict", "lease_expired", "fencing_mismatch", "txn_mismatch")
_QUEUES: Final = (
    "queue_not_found",
    "message_not_found",
    "message_key_taken",
    "message_leased",
    "message_finished",
    "message_failed",
    "message_cancelled",
    "queue_message_lease_mismatch",
    "queue_full",
    "queue_busy",
    "queue_in_use",
    "result_not_kept",
    "result_not_ready",
    "missing_queue",
    "missing_owner",
    "invalid_nack_intent",
)
_WORLDS: Final = (
    "world_not_found",
    "world_exists",
    "world_not_active",
    "world_held",
    "head_advanced",
    "cursor_advanced",
    "snapshot_not_found",
    "snapshot_exists",
    "baseline_regressed",
    "promotion_refused",
    "segment_exists",
    "missing_entry",
    "missing_object",
    "malformed_segment",
    "checksum_mismatch",
)
_CODES: Final[dict[str, tuple[str, ...]]] = {
    "messages": (*_QUEUES, *_LEASES),
    "queues": _QUEUES,
    "leases": ("lease_held", "lock_timeout", *_LEASES),
    "locks": ("lock_timeout", "lock_order_violation", "lease_expired", "fencing_mismatch"),
    "states": ("cas_mismatch", "invalid_etag", *_LEASES),
    "entities": ("version_conflict", "precondition_required", "invalid_etag", "lease_expired"),
    "collections": ("version_conflict",),
    "worlds": _WORLDS,
    "hosting": ("item_not_found", "send_refused", *_WORLDS, *_LEASES),
    "runs": ("run_not_found", "run_exists", "run_ended", "run_not_ended", "run_failed", "run_cancelled"),
    "effects": ("effect_not_found", "world_not_found", *_LEASES),
    "timers": ("world_not_found",),
    "mail": ("mail_not_found", "queue_full", "mailbox_taken", "sender_blocked", "sender_mismatch", "seal_broken"),
    "ingress": ("queue_full", "sender_blocked", "sender_mismatch"),
    "agents": ("agent_exists",),
    "blobs": (
        "blob_not_found",
        "object_not_found",
        "object_exists",
        "object_changed",
        "hash_mismatch",
        "size_mismatch",
        "range_not_satisfiable",
        "invalid_etag",
    ),
}
# Errors of programs that open a plane themselves, and of the command line. No endpoint answers them.
NOT_OVER_HTTP: Final = frozenset(
    {
        "closed",
        "directory_in_use",
        "interrupted",
        "invalid_url",
        "isolation_unsupported",
        "migration_unfinished",
        "nested_transaction",
        "not_embedded",
        "not_synchronous",
        "not_transactional",
        "path_unusable",
        "plane_in_use",
        "read_only_transaction",
        "step_failed",
        "target_not_empty",
        "transaction_ended",
        "transaction_required",
        "usage",
        "workflow_changed",
        "workflow_misuse",
        "would_lose_data",
        "wrong_database",
    }
)


def problems() -> dict[str, Any]:
    """An example of every error code, for `components.examples`."""
    return {code: {"summary": _problem(code).title, "value": _as_json(_problem(code))} for code in sorted(REMEDIES)}


def problem_responses() -> dict[str, Any]:
    """The error response of each tag, and that of the others, for `components.responses`."""
    special = {code for codes in _CODES.values() for code in codes}
    general = sorted(REMEDIES.keys() - special - NOT_OVER_HTTP)
    return {
        "Problem": _response(general),
        **{response_name(tag): _response([*codes, *general]) for tag, codes in _CODES.items()},
    }


def response_name(tag: str) -> str:
    """The component with the error response of a tag's operations."""
    return f"{tag.capitalize()}Problem" if tag in _CODES else "Problem"


def _response(codes: list[str]) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    examples = {code: {"$ref": _REFERENCE.format(code=code)} for code in codes}
    return {
        "description": "The error, and whether to retry.",
        "content": {PROBLEM: {"schema": schema, "examples": examples}, MSGPACK: {"schema": schema}},
    }


def _problem(code: str) -> Problem:
    found = REMEDIES[code]
    if not isinstance(found, Remedy):
        return problem_of(rebuild(code, found.cause))
    later = found.status in (429, 503)
    return Problem(
        code=code,
        title=code.replace("_", " ").capitalize(),
        status=found.status or 500,
        detail=found.cause,
        retry=RetryAdvice.LATER if later else RetryAdvice.NEVER,
        type=f"urn:fastness:error:{code}",
        retry_after_seconds=RETRY_AFTER_SECONDS if later else None,
    )


def _as_json(problem: Problem) -> Any:
    return {"retry": problem.retry, **msgspec.to_builtins(problem)}


def add_examples(name: str, operation: dict[str, Any]) -> None:
    """Add the recorded calls of an endpoint to its operation."""
    recorded = _recorded().get(name, [])
    for number, each in enumerate(recorded):
        key = "example" if number == 0 else f"example_{number + 1}"
        if "body" in each:
            _add(operation["requestBody"]["content"], each["media"], key, each["summary"], each["body"])
        response = operation["responses"].get(str(each["status"]), {})
        if "answer" in each and "content" in response:
            _add(response["content"], each["answer_media"], key, each["summary"], each["answer"])
    if recorded:
        for parameter in operation["parameters"]:
            if parameter.get("name") in recorded[0]["parameters"]:
                parameter["example"] = recorded[0]["parameters"][parameter["name"]]


def _add(content: dict[str, Any], media: str, key: str, summary: str, value: Any) -> None:
    if media in content:
        content[media].setdefault("examples", {})[key] = {"summary": summary, "value": value}


@cache
def _recorded() -> dict[str, list[dict[str, Any]]]:
    text = (files(__package__) / "openapi_examples.json").read_bytes()
    recorded: dict[str, list[dict[str, Any]]] = msgspec.json.decode(text)
    return recorded
