"""The JSON schemas of messages, and their conversion to and from wire structs. JSON payloads are embedded as JSON."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from fastness.errors import InvalidArgument
from fastness.limits import PAYLOAD_INLINE_BYTES_MAX, RESULT_BYTES_MAX
from fastness.server.http.values import from_cbor
from fastness.wire.fields import Count, Hash
from fastness.wire.queues import (
    Delivery,
    Failure,
    FoundMessage,
    LeasedMessage,
    MessageInfo,
    MessageLease,
    MessageResult,
    NewMessage,
    NewResult,
    Receipt,
    ReceiveMessages,
    SidecarState,
)

_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_CONTENT_TYPE: Final = re.compile(r"[!-~][ -~]{0,254}\Z")  # It is sent in headers.
_LEASE_ID: Final = re.compile(r"[0-9a-f]{32}-([0-9]{1,19})-[0-9a-f]{34}\Z")


class MessageBody(
    NewMessage,
    frozen=True,
    rename={"content_type": "payload_content_type", "blob": "payload_blob", "blob_size": "payload_bytes"},
):
    """A message to enqueue. Its payload is any JSON, bytes in base64, or the hash of a stored blob."""

    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET
    content_type: str | None = None  # type: ignore[assignment]  # By default that of the payload.
    blob: Hash | None = None  # Inherited fields are not renamed.
    blob_size: Count = 0


_options = attrgetter(*NewMessage.__struct_fields__)


class MessageLeaseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The lease that settles a message. The fence is also part of the lease id, so it is optional."""

    message_id: str
    lease_id: str
    fence: int | None = None
    meta_etag: str | None = None


class ResultBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of a message. It is any JSON, bytes in base64, or the hash of a stored blob."""

    result: Any = UNSET
    result_base64: bytes | UnsetType = UNSET
    result_blob: Hash | None = None
    result_bytes: Count = 0
    result_content_type: str | None = None


_VIEW_NAMES: Final = {
    "id": "message_id",
    "content_type": "payload_content_type",
    "size": "payload_bytes",
    "expires_ms": "lease_expires_at_unix",
    "visibility_ms": "visibility_seconds",
}


def _view_name(name: str) -> str:
    return _VIEW_NAMES.get(name) or re.sub("(_at)?_ms$", "_at_unix", name)


View = TypeVar("View", bound=msgspec.Struct)
_SHOWN: Final[dict[type, list[tuple[str, str, bool, bool]]]] = {}


def view_of(struct: type[msgspec.Struct], *without: str) -> Callable[[type[View]], type[View]]:
    """Add the fields of an answer to a struct, as JSON has them, except `without`.

    Times are seconds since 1970; those that the answer may lack are left out then.
    """

    def add(kind: type[View]) -> type[View]:
        fields: list[Any] = []
        shown: list[tuple[str, str, bool, bool]] = []  # The names there and here; is it a time, and may it be left out?
        own = msgspec.structs.fields(kind)
        for field in msgspec.structs.fields(struct):
            if field.name in without:
                continue
            name, is_time = _view_name(field.name), field.name.endswith("_ms")
            shown.append((field.name, name, is_time, not field.required))
            if name in {each.name for each in own}:
                continue
            if not is_time:
                fields.append((name, list[FailureView] if field.type == list[Failure] else field.type))
            else:
                fields.append((name, float) if field.required else (name, float | UnsetType, UNSET))
        for field in own:
            fields.append((field.name, field.type) if field.required else (field.name, field.type, field.default))
        namespace = {"__doc__": kind.__doc__}
        made: Any = msgspec.defstruct(
            kind.__name__, fields, module=kind.__module__, namespace=namespace, frozen=True, kw_only=True
        )
        _SHOWN[made] = shown
        return cast("type[View]", made)

    return add


def view(kind: type[View], found: msgspec.Struct, **given: Any) -> View:
    """An answer as JSON has it; `given` are the fields that it has not."""
    for name, shown, is_time, is_optional in _SHOWN[kind]:
        value = getattr(found, name)
        if is_time:
            if value or not is_optional:
                given[shown] = value / 1_000
        elif value.__class__ is list and value and isinstance(value[0], Failure):
            given[shown] = [view(FailureView, each) for each in value]
        else:
            given[shown] = value
    return kind(**given)


@view_of(Failure)
class FailureView(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt. `outcome`: "failed" (it was nacked), "expired" (its lease ended) or "rejected".

    Deliveries have no tracebacks; peeked messages and dead letters do.
    """


@view_of(Delivery, "payload", "blob", "lease_id", "fence", "expires_ms", "died_ms", "state")
class MessageView(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered or peeked message. Times are seconds since 1970; some are also given in RFC 3339."""

    universe: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    died_at_unix: float | UnsetType = UNSET
    lease_id: str | UnsetType = UNSET
    lease_expires_at_unix: float | UnsetType = UNSET
    lease_expires_at: str | UnsetType = UNSET
    not_visible_until_unix: float | UnsetType = UNSET
    fence: int | UnsetType = UNSET
    meta_etag: str | UnsetType = UNSET
    txn_id: str | UnsetType = UNSET
    payload: Any = UNSET  # Set if the payload is JSON.
    payload_base64: bytes | UnsetType = UNSET  # Set if the payload is not JSON.
    payload_blob: str | UnsetType = UNSET  # Set if the payload is too large to embed; get it from /v1/blobs.
    state: Any = UNSET
    state_key: str | UnsetType = UNSET
    state_etag: str | UnsetType = UNSET
    state_lease_id: str | UnsetType = UNSET
    state_lease_expires_at_unix: float | UnsetType = UNSET
    state_fence: int | UnsetType = UNSET
    state_txn_id: str | UnsetType | None = UNSET


@view_of(FoundMessage)
class FoundMessageView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a search has found, without its payload. Times are seconds since 1970."""


@view_of(MessageInfo, "payload", "blob", "lease_id", "fence", "stateful", "state_value", "state_etag")
class MessageInfoView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a message. Times are seconds since 1970; those that do not apply are left out.

    A message that is done or cancelled has no payload and no attributes any more, and of its failures only the last.
    """

    lease_id: str | UnsetType = UNSET
    fence: int | UnsetType = UNSET
    payload: Any = UNSET  # Set if the payload is JSON.
    payload_base64: bytes | UnsetType = UNSET  # Set if the payload is not JSON.
    payload_blob: str | UnsetType = UNSET  # Set if the payload is too large to embed; get it from /v1/blobs.
    workflow_state: Any = UNSET  # Set if the message was delivered with its workflow state.
    workflow_state_etag: str | UnsetType = UNSET


class MessageResultView(msgspec.Struct, frozen=True, kw_only=True):
    """The result that a message was acknowledged with; null, without a content type, if it was acknowledged without."""

    message_id: str
    attempts: int
    finished_at_unix: float
    result_content_type: str
    result_bytes: int
    result: Any = UNSET  # Set if the result is JSON.
    result_base64: bytes | UnsetType = UNSET  # Set if the result is not JSON.
    result_blob: str | UnsetType = UNSET  # Set if the result is too large to embed; get it from /v1/blobs.


@view_of(LeasedMessage)
class LeasedMessageView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a consumer holds, without its payload. Times are seconds since 1970."""


@view_of(Receipt)
class ReceiptView(msgspec.Struct, frozen=True, kw_only=True):
    """The acknowledgement of an enqueued message, with its durability."""

    universe: str
    queue: str
    payload_bytes: int
    correlation_id: str


def new_message(body: MessageBody, *, inline: bool = True) -> NewMessage:
    """The wire message for a body.

    Raises:
        InvalidArgument: the body has two payloads, a content type that is not valid in a header, or, if `inline`, a
            payload that is too large to embed.
    """
    given = [body.payload is not UNSET, body.payload_base64 is not UNSET, body.blob is not None]
    if sum(given) > 1:
        raise InvalidArgument("A message has only one of payload, payload_base64 and payload_blob; remove the others")
    payload, kind = b"", _BYTES
    if isinstance(body.payload_base64, bytes):
        payload = body.payload_base64
    elif body.payload is not UNSET:
        payload, kind = msgspec.json.encode(body.payload), _JSON
    if inline and len(payload) > PAYLOAD_INLINE_BYTES_MAX:
        raise InvalidArgument(
            f"The payload of {len(payload)} bytes is too large to embed; post it to /v1/blobs and send payload_blob"
        )
    return msgspec.structs.replace(
        NewMessage(*_options(body)),
        payload=payload,
        content_type=checked_content_type(body.content_type or kind),
        blob_size=body.blob_size if body.blob is not None else 0,
    )


def new_result(body: ResultBody, *, inline: bool = True) -> NewResult | None:
    """The wire result for a body; None if it has none.

    Raises:
        InvalidArgument: the body has two results, a content type that is not valid in a header or has no result, or, if
            `inline`, a result that is too large to embed.
    """
    given = [body.result is not UNSET, body.result_base64 is not UNSET, body.result_blob is not None]
    if sum(given) > 1:
        raise InvalidArgument("A message has only one of result, result_base64 and result_blob; remove the others")
    if not any(given):
        if body.result_content_type is not None:
            raise InvalidArgument("result_content_type has no result; send one, or remove it")
        return None
    value, kind = b"", _BYTES
    if isinstance(body.result_base64, bytes):
        value = body.result_base64
    elif body.result is not UNSET:
        value, kind = msgspec.json.encode(body.result), _JSON
    if inline and len(value) > RESULT_BYTES_MAX:
        raise InvalidArgument(
            f"The result of {len(value)} bytes is too large to embed; post it to /v1/blobs and send result_blob"
        )
    return NewResult(
        value=value,
        content_type=checked_content_type(body.result_content_type or kind),
        blob=body.result_blob,
        blob_size=body.result_bytes if body.result_blob is not None else 0,
    )


def message_body(message: NewMessage) -> MessageBody:
    """The body for a wire message, such as that of a schedule."""
    payload = payload_fields(message.payload, message.content_type) if message.blob is None else {}
    return msgspec.structs.replace(MessageBody(*_options(message)), **{"payload": UNSET, **payload})


def message_view(delivery: Delivery, request: ReceiveMessages | None = None, *, payload: bool = True) -> MessageView:
    """The JSON view of a delivery in answer to `request`; without its payload if that is sent as a separate part."""
    fields: dict[str, Any] = {}
    if request is not None:
        fields.update(universe=request.universe, queue=request.queue)
        if request.txn_id is not None:
            fields["txn_id"] = request.txn_id
    if delivery.lease_id:
        expires_unix = delivery.expires_ms / 1_000
        fields.update(
            lease_id=delivery.lease_id,
            lease_expires_at_unix=expires_unix,
            lease_expires_at=datetime.fromtimestamp(expires_unix, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            not_visible_until_unix=expires_unix,
            fence=delivery.fence,
            meta_etag=delivery.lease_id,
        )
    if delivery.died_ms:
        fields["died_at_unix"] = delivery.died_ms / 1_000
    if delivery.state is not None:
        fields.update(_state_fields(delivery.state))
    if delivery.payload is None and delivery.blob is not None:
        fields["payload_blob"] = delivery.blob
    elif payload:
        fields.update(payload_fields(delivery.payload or b"", delivery.content_type))
    return view(MessageView, delivery, **fields)


def message_info_view(info: MessageInfo) -> MessageInfoView:
    """The JSON view of what is known about a message."""
    fields: dict[str, Any] = {}
    if info.lease_id is not None:
        fields.update(lease_id=info.lease_id, fence=info.fence)
    if info.blob is not None:
        fields["payload_blob"] = info.blob
    elif info.payload is not None:
        fields.update(payload_fields(info.payload, info.content_type))
    if info.state_value is not None:
        fields.update(workflow_state=from_cbor(info.state_value), workflow_state_etag=info.state_etag)
    return view(MessageInfoView, info, **fields)


def message_result_view(result: MessageResult) -> MessageResultView:
    """The JSON view of a result."""
    fields: dict[str, Any] = {"result": None}
    if result.blob is not None:
        fields = {"result_blob": result.blob}
    elif result.content_type:
        found = payload_fields(result.value or b"", result.content_type)
        fields = {name.replace("payload", "result"): value for name, value in found.items()}
    return MessageResultView(
        message_id=result.id,
        attempts=result.attempts,
        finished_at_unix=result.finished_ms / 1_000,
        result_content_type=result.content_type,
        result_bytes=result.size,
        **fields,
    )


VIEWS: Final[
    dict[type, tuple[type, Callable[[Any], msgspec.Struct]]]
] = {  # Of answers that have another schema in HTTP.
    Delivery: (MessageView, message_view),
    FoundMessage: (FoundMessageView, partial(view, FoundMessageView)),
    LeasedMessage: (LeasedMessageView, partial(view, LeasedMessageView)),
    MessageInfo: (MessageInfoView, message_info_view),
    MessageResult: (MessageResultView, message_result_view),
}


def lease_of(body: MessageLeaseBody) -> MessageLease:
    """The wire lease for a body.

    Raises:
        InvalidArgument: the lease id or the fence is malformed.
    """
    if body.fence is not None:
        if not 0 <= body.fence < 1 << 63:
            raise InvalidArgument(f"fence is {body.fence}; send the one of the delivered message")
        return MessageLease(body.message_id, body.lease_id, body.fence)
    match = _LEASE_ID.match(body.lease_id)
    if match is None:
        raise InvalidArgument(f"{body.lease_id[:80]!r} is not a lease id; send the one of the delivered message")
    return MessageLease(body.message_id, body.lease_id, int(match[1]))


def payload_fields(payload: bytes, content_type: str) -> dict[str, Any]:
    """The payload field for JSON: `payload` if it is JSON, otherwise `payload_base64`."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _JSON or kind.endswith("+json"):
        try:
            msgspec.json.decode(payload)
            return {"payload": msgspec.Raw(msgspec.json.format(payload, indent=-1))}
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # The content type says JSON, but the payload is not: send it in base64.
    return {"payload_base64": payload}


def checked_content_type(text: str) -> str:
    """The content type, if it is valid in a header.

    Raises:
        InvalidArgument: it is not.
    """
    if not _CONTENT_TYPE.match(text):
        raise InvalidArgument(f"{text[:80]!r} is not a content type; use at most 255 printable ASCII characters")
    return text


def safe_content_type(text: str) -> str:
    """The content type if it is valid in a header; messages put through other APIs may have any text."""
    return text if _CONTENT_TYPE.match(text) else _BYTES


def _state_fields(state: SidecarState) -> dict[str, Any]:
    return {
        "state": from_cbor(state.value),
        "state_key": state.lease.key,
        "state_etag": state.etag,
        "state_lease_id": state.lease.lease_id,
        "state_lease_expires_at_unix": state.expires_ms / 1_000,
        "state_fence": state.lease.fence,
        "state_txn_id": state.lease.txn_id,
    }
