"""The bounds of fields in the OpenAPI document: those of wire structs, and of what only the HTTP API has."""

from typing import Any, Final

from fastness import limits
from fastness.server.http.limits import IDEMPOTENCY_KEY_CHARACTERS_MAX, PAGE_SIZE_MAX
from fastness.wire.bounds import COUNT, FIELDS, NAME, STRUCT_FIELDS, between, text_of

_BASE64: Final = {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"}
_FIELDS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("DequeueBody", "page_size"): between(1, PAGE_SIZE_MAX),
    ("SubscribeBody", "credit"): between(1, PAGE_SIZE_MAX),
    ("EnqueueBody", "messages"): {"minItems": 1, "maxItems": limits.MESSAGES_MAX},
    # A batch with an invalid time is accepted, and the outcome of that message is an error.
    **{(kind, "visibility_seconds"): {} for kind in ("VisibilityBody", "VisibilityOfMessage")},
    # Path and header parameters.
    ("path", "kind"): NAME,
    ("path", "id"): NAME,
    ("path", "name"): NAME,
    ("path", "height"): COUNT,
    ("path", "number"): COUNT,
    ("path", "sequence"): COUNT,
    ("path", "hash"): {"pattern": "^[0-9A-Fa-f]{64}$"},
    ("header", "X-Fastness-Universe"): NAME,
    ("header", "Idempotency-Key"): text_of(IDEMPOTENCY_KEY_CHARACTERS_MAX),
    ("header", "X-Fence"): COUNT,
}
# Bodies whose fields are those of a wire struct.
_BODIES: Final = {
    **dict.fromkeys(("EnqueueBody", "EnqueueMeta", "MessageBody"), "NewMessage"),
    "KeepBody": "KeepLease",
    "PatchBody": "EntityWrite",
}
_RANGE: Final = ("minimum", "maximum")
_KEYWORDS: Final = {
    "string": ("pattern", "enum", "minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("propertyNames",),
    "integer": _RANGE,
    "number": _RANGE,
}


def bounds_of(kind: str, name: str, *, of: str = "") -> dict[str, Any]:
    """The bounds of a field; the arguments are those of `with_bounds`."""
    for each in (of, kind):
        place = _BODIES.get(each, each), name
        if (found := _FIELDS.get((each, name), STRUCT_FIELDS.get(place))) is not None:
            return found
    return FIELDS.get(name, {})


def with_bounds(schema: dict[str, Any], kind: str, name: str, *, of: str = "") -> dict[str, Any]:
    """The schema of a field with its bounds.

    `kind` is the name of its struct, or path, query or header; `of` is the request that such a parameter belongs to.
    """
    return _merged(schema, bounds_of(kind, name, of=of))


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
