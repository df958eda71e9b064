"""Messages as HTTP callers see them: the original's field names, payloads as JSON where they are JSON."""

import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.errors import InvalidArgument
from holdfast.limits import PAYLOAD_INLINE_BYTES_MAX
from holdfast.server.http.values import from_cbor
from holdfast.tiers import Tier
from holdfast.wire.queues import Delivery, MessageLease, NewMessage, ReceiveMessages, SidecarState

_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_CONTENT_TYPE: Final = re.compile(r"[!-~][ -~]{0,254}\Z")  # It travels in headers.
_LEASE_ID: Final = re.compile(r"[0-9a-f]{32}-([0-9]{1,18})\Z")


class MessageForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message to put. Its payload is any JSON, or bytes in base64, or a blob that is stored already."""

    payload: Any = UNSET
    payload_base64: bytes | UnsetType = UNSET
    payload_blob: str | None = None
    payload_bytes: int = 0
    payload_content_type: str | None = None
    attributes: dict[str, str] = {}
    correlation_id: str | None = None
    priority: int = 5
    group: str | None = None
    idempotency_key: str | None = None
    delay_seconds: float = 0.0
    ttl_seconds: float | None = None
    max_attempts: int | None = None
    visibility_timeout_seconds: float | None = None


class LeaseForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a consumer shows to settle a message. The fence is part of the lease id, so it may be left out."""

    message_id: str
    lease_id: str
    fencing_token: int | None = None
    meta_etag: str | None = None


class MessageView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was delivered, or looked at. Instants are seconds since 1970, and RFC 3339 beside them."""

    message_id: str
    attempts: int
    max_attempts: int
    failure_attempts: int
    visibility_timeout_seconds: float
    attributes: dict[str, str]
    payload_content_type: str
    payload_bytes: int
    correlation_id: str
    priority: int
    created_at_unix: float
    namespace: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    group: str | None = None
    last_error: str | None = None
    origin: str | None = None  # The queue that a dead letter died in.
    died_at_unix: float | UnsetType = UNSET
    lease_id: str | UnsetType = UNSET
    lease_expires_at_unix: float | UnsetType = UNSET
    lease_expires_at: str | UnsetType = UNSET
    not_visible_until_unix: float | UnsetType = UNSET
    fencing_token: int | UnsetType = UNSET
    meta_etag: str | UnsetType = UNSET
    txn_id: str | UnsetType = UNSET
    payload: Any = UNSET  # If it is JSON.
    payload_base64: bytes | UnsetType = UNSET  # If it is not.
    payload_blob: str | UnsetType = UNSET  # If it is too large for this; get it from /v1/blobs.
    state: Any = UNSET
    state_key: str | UnsetType = UNSET
    state_etag: str | UnsetType = UNSET
    state_lease_id: str | UnsetType = UNSET
    state_lease_expires_at_unix: float | UnsetType = UNSET
    state_fencing_token: int | UnsetType = UNSET
    state_txn_id: str | UnsetType | None = UNSET


class ReceiptView(msgspec.Struct, frozen=True, kw_only=True):
    """The acknowledgement of a put, with the promise that it carries."""

    namespace: str
    queue: str
    message_id: str
    payload_bytes: int
    correlation_id: str
    duplicate: bool
    durability: Tier


def new_message(form: MessageForm, *, inline: bool = True) -> NewMessage:
    """The message that a form describes.

    Raises:
        InvalidArgument: it has two payloads, or a content type that cannot travel in a header.
    """
    given = [form.payload is not UNSET, form.payload_base64 is not UNSET, form.payload_blob is not None]
    if sum(given) > 1:
        raise InvalidArgument("A message has one of payload, payload_base64 and payload_blob; leave the others out")
    payload, kind = b"", _BYTES
    if isinstance(form.payload_base64, bytes):
        payload = form.payload_base64
    elif form.payload is not UNSET:
        payload, kind = msgspec.json.encode(form.payload), _JSON
    if inline and len(payload) > PAYLOAD_INLINE_BYTES_MAX:
        raise InvalidArgument(
            f"A payload of {len(payload)} bytes does not fit a message here; post it to /v1/blobs and give payload_blob"
        )
    return NewMessage(
        payload=payload,
        blob=form.payload_blob,
        blob_size=form.payload_bytes if form.payload_blob is not None else 0,
        content_type=checked_content_type(form.payload_content_type or kind),
        attributes=form.attributes,
        correlation_id=form.correlation_id,
        priority=form.priority,
        group=form.group,
        idempotency_key=form.idempotency_key,
        delay_seconds=form.delay_seconds,
        ttl_seconds=form.ttl_seconds,
        max_attempts=form.max_attempts,
        visibility_seconds=form.visibility_timeout_seconds,
    )


def message_form(message: NewMessage) -> MessageForm:
    """A message that was given before (a schedule's), as a form."""
    shown = shown_payload(message.payload, message.content_type) if message.blob is None else {}
    return MessageForm(
        payload_blob=message.blob,
        payload_bytes=message.blob_size,
        payload_content_type=message.content_type,
        attributes=message.attributes,
        correlation_id=message.correlation_id,
        priority=message.priority,
        group=message.group,
        idempotency_key=message.idempotency_key,
        delay_seconds=message.delay_seconds,
        ttl_seconds=message.ttl_seconds,
        max_attempts=message.max_attempts,
        visibility_timeout_seconds=message.visibility_seconds,
        **shown,
    )


def message_view(delivery: Delivery, request: ReceiveMessages | None = None, *, payload: bool = True) -> MessageView:
    """A delivery in the words of HTTP, to whoever made `request`; without its payload if that travels beside it."""
    shown: dict[str, Any] = {}
    if request is not None:
        shown.update(namespace=request.universe, queue=request.queue.lower())
        if request.txn_id is not None:
            shown["txn_id"] = request.txn_id
    if delivery.lease_id:
        expires_unix = delivery.expires_ms / 1_000
        shown.update(
            lease_id=delivery.lease_id,
            lease_expires_at_unix=expires_unix,
            lease_expires_at=datetime.fromtimestamp(expires_unix, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            not_visible_until_unix=expires_unix,
            fencing_token=delivery.fence,
            meta_etag=delivery.lease_id,
        )
    if delivery.died_ms:
        shown["died_at_unix"] = delivery.died_ms / 1_000
    if delivery.state is not None:
        shown.update(_state(delivery.state))
    if delivery.payload is None and delivery.blob is not None:
        shown["payload_blob"] = delivery.blob
    elif payload:
        shown.update(shown_payload(delivery.payload or b"", delivery.content_type))
    return MessageView(
        message_id=delivery.id,
        attempts=delivery.attempts,
        max_attempts=delivery.max_attempts,
        failure_attempts=delivery.failure_attempts,
        visibility_timeout_seconds=delivery.visibility_ms / 1_000,
        attributes=delivery.attributes,
        payload_content_type=delivery.content_type,
        payload_bytes=delivery.size,
        correlation_id=delivery.correlation_id,
        priority=delivery.priority,
        created_at_unix=delivery.created_ms / 1_000,
        group=delivery.group,
        last_error=delivery.last_error,
        origin=delivery.origin,
        **shown,
    )


def lease_of(form: LeaseForm) -> MessageLease:
    """The lease that a form shows.

    Raises:
        InvalidArgument: its lease id or its fence is none that a dequeue gave out.
    """
    if form.fencing_token is not None:
        if not 0 <= form.fencing_token < 1 << 63:
            raise InvalidArgument(f"fencing_token is {form.fencing_token}; give the one that the message came with")
        return MessageLease(form.message_id, form.lease_id, form.fencing_token)
    match = _LEASE_ID.match(form.lease_id)
    if match is None:
        raise InvalidArgument(f"{form.lease_id[:80]!r} is no lease id; give the one that the message came with")
    return MessageLease(form.message_id, form.lease_id, int(match[1]))


def shown_payload(payload: bytes, content_type: str) -> dict[str, Any]:
    """A payload as a part of JSON: as it is if it is JSON, in base64 otherwise."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _JSON or kind.endswith("+json"):
        try:
            msgspec.json.decode(payload)
            return {"payload": msgspec.Raw(msgspec.json.format(payload, indent=-1))}
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # It says that it is JSON and is not; whoever put it knows.
    return {"payload_base64": payload}


def checked_content_type(text: str) -> str:
    """A content type that can travel in a header.

    Raises:
        InvalidArgument: it cannot.
    """
    if not _CONTENT_TYPE.match(text):
        raise InvalidArgument(f"{text[:80]!r} is no content type; use printable ASCII of at most 255 characters")
    return text


def safe_content_type(text: str) -> str:
    """The content type, if it can travel in a header; messages from other doors may have any."""
    return text if _CONTENT_TYPE.match(text) else _BYTES


def _state(state: SidecarState) -> dict[str, Any]:
    return {
        "state": from_cbor(state.value),
        "state_key": state.lease.key,
        "state_etag": state.etag,
        "state_lease_id": state.lease.lease_id,
        "state_lease_expires_at_unix": state.expires_ms / 1_000,
        "state_fencing_token": state.lease.fence,
        "state_txn_id": state.lease.txn_id,
    }
