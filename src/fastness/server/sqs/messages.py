"""How a message of SQS is kept as a message of Fastness, and the other way round.

    SQS                             Fastness
    MessageBody                     payload, as UTF-8; content type text/plain; charset=utf-8
    MessageAttributes  String       the attribute of that name
                       others       the same, Binary as base64; its data type in the attribute sqs-type.NAME
    AWSTraceHeader                  the attribute AWSTraceHeader; without it, the header X-Amzn-Trace-Id of the request
    MessageGroupId     FIFO         group; one that is no valid name is hashed, and kept as the attribute MessageGroupId
                       standard     the attribute MessageGroupId
    MessageDeduplicationId          idempotency key, and the attribute MessageDeduplicationId
    SenderId                        the attribute SenderId: the id of the sender's token

Attributes that Fastness cannot keep, because they are too long or have one of these names, become an envelope together
with the body: a JSON document of the content type `application/vnd.fastness.sqs-message+json`.

A payload of a native client that is not text is delivered as base64, with the message attribute
`fastness-encoding` = `base64`. One that is larger than a message of SQS may be is delivered as a JSON document with
its blob and size, with `fastness-encoding` = `blob`.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from hashlib import md5, sha256
from typing import Any, Final, NamedTuple

import msgspec

from fastness.errors import InvalidName
from fastness.limits import (
    ATTRIBUTES_BYTES_MAX,
    SQS_ATTRIBUTE_NAME_CHARACTERS_MAX,
    SQS_ATTRIBUTES_MAX,
    SQS_DELAY_SECONDS_MAX,
    SQS_NUMBER_DIGITS_MAX,
    SQS_TOKEN_CHARACTERS_MAX,
    SQS_TRACE_HEADER_CHARACTERS_MAX,
)
from fastness.names import checked_name
from fastness.server.sqs.errors import SqsError, missing_parameter
from fastness.wire.queues import NewMessage
from fastness.wire.sqs import SqsSettings

TEXT: Final = "text/plain; charset=utf-8"
ENVELOPE: Final = "application/vnd.fastness.sqs-message+json"
TYPE_PREFIX: Final = "sqs-type."  # The attribute with the data type of another one.
ENCODING: Final = "fastness-encoding"
TRACE_HEADER: Final = "AWSTraceHeader"
GROUP: Final = "MessageGroupId"
DEDUPLICATION: Final = "MessageDeduplicationId"
TAGS: Final = "fastness-tags"  # A message attribute: the tags of the message, separated by commas.
SENDER: Final = "SenderId"
_SYSTEM: Final = frozenset((TRACE_HEADER, GROUP, DEDUPLICATION, SENDER))
_TYPES: Final = ("String", "Number", "Binary")

_INVALID: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TOKEN: Final = re.compile(rf"[!-~]{{1,{SQS_TOKEN_CHARACTERS_MAX}}}\Z")  # Letters, digits and punctuation.
_NAME: Final = re.compile(r"[\w.-]+\Z")  # Of letters of any language.
_RESERVED_NAME: Final = re.compile(r"(aws\.|amazon\.|\.)|.*(\.\.|\.\Z)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?\Z", re.ASCII)
_EXPONENT: Final = re.compile(r"[eE].*")
_EXPONENT_MIN, _EXPONENT_MAX = -128, 126
_INVALID_CHARACTERS: Final = (
    "Invalid characters found. Valid unicode characters are #x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to #xFFFD | "
    "#x10000 to #x10FFFF"
)


class Attribute(NamedTuple):
    """The data type and the value of a message attribute."""

    type: str
    value: str | bytes


Attributes = Mapping[str, Attribute]


class Outgoing(NamedTuple):
    """A message to put, and the digests that the answer has. Its payload may need a blob."""

    message: NewMessage
    md5_of_body: str
    md5_of_attributes: str | None
    md5_of_system_attributes: str | None

    def output(self, id: str, *, fifo: bool) -> dict[str, Any]:
        """What SendMessage answers for it."""
        output: dict[str, Any] = {"MessageId": id, "MD5OfMessageBody": self.md5_of_body}
        if self.md5_of_attributes is not None:
            output["MD5OfMessageAttributes"] = self.md5_of_attributes
        if self.md5_of_system_attributes is not None:
            output["MD5OfMessageSystemAttributes"] = self.md5_of_system_attributes
        if fifo:
            output["SequenceNumber"] = sequence_number(id)
        return output


def check_batch(entries: Sequence[Mapping[str, Any]], queue: SqsSettings) -> None:
    """Raise SqsError if a SendMessageBatch fails as a whole: an entry for a FIFO queue does not say its order."""
    for entry in entries if queue.fifo else ():
        if not entry.get(GROUP):
            raise SqsError("InvalidParameterValue", missing_parameter(GROUP).message)
        if not queue.content_based and not entry.get(DEDUPLICATION):
            raise _no_deduplication()


def outgoing(
    parameters: Mapping[str, Any],
    queue: SqsSettings,
    sender: str = "",
    *,
    trace: str = "",
    too_large: str = "One or more parameters are invalid.",
) -> Outgoing:
    """The message of a SendMessage, or of one entry of a SendMessageBatch; `sender` is the id of the caller's token.

    `trace` is the trace header of the request, which a system attribute overrides.

    Raises:
        SqsError: a parameter is invalid, or not for this kind of queue, or the message is too large.
    """
    body: str = parameters["MessageBody"]
    if not body:
        raise missing_parameter("MessageBody")
    if not is_text(body):
        raise SqsError("InvalidMessageContents", _INVALID_CHARACTERS)
    payload = body.encode()
    given = parameters.get("MessageAttributes")
    attributes = checked_attributes(given) if given else {}
    size = len(payload) + (_attributes_size(attributes) if attributes else 0)
    if size > queue.max_bytes:
        raise SqsError(
            "InvalidParameterValue",
            f"{too_large} Reason: Message must be shorter than {queue.max_bytes} bytes.",
            hint=f"It has {size} bytes with its attributes.",
        )
    native: dict[str, str] = {SENDER: sender} if sender else {}
    system = parameters.get("MessageSystemAttributes")
    own_trace = _checked_trace_header(system) if system else None
    if own_trace is not None:
        native[TRACE_HEADER] = own_trace
    elif trace and _is_trace_header(trace):  # Proxies add it, so a wrong one is no fault of the caller.
        native[TRACE_HEADER] = trace
    group, key = _order(parameters, queue, payload, native)
    delay_seconds = _delay_seconds(parameters, queue)
    content_type = TEXT
    if attributes:
        mapped = _native_attributes(attributes)
        if any(_is_reserved(name) for name in attributes) or _characters(native) + _characters(mapped) > (
            ATTRIBUTES_BYTES_MAX
        ):
            payload, content_type = _encode_envelope(body, attributes), ENVELOPE
        else:
            native |= mapped
    message = NewMessage(
        payload,
        content_type=content_type,
        attributes=native,
        group=group,
        idempotency_key=key,
        delay_seconds=delay_seconds,
        tags=_tags(attributes),
    )
    return Outgoing(
        message,
        md5_of(body.encode() if content_type is ENVELOPE else payload),
        md5_of_attributes(attributes) if attributes else None,
        None if own_trace is None else md5_of_attributes({TRACE_HEADER: Attribute("String", own_trace)}),
    )


def _tags(attributes: Attributes) -> list[str]:
    """The tags of a message: those in its attribute `fastness-tags`, separated by commas."""
    value = attributes[TAGS].value if TAGS in attributes else ""
    return [tag.strip() for tag in value.split(",") if tag.strip()] if isinstance(value, str) else []


def message_size(parameters: Mapping[str, Any]) -> int:
    """How many bytes the body and the attributes of a message have; nothing of it needs to be valid."""
    size = _byte_count(parameters["MessageBody"])
    for name, value in (parameters.get("MessageAttributes") or {}).items():
        size += _byte_count(name) + _byte_count(value.get("DataType", ""))
        size += len(value.get("BinaryValue", b"")) + _byte_count(value.get("StringValue", ""))
    return size


class Incoming(NamedTuple):
    """What a native message is for a client of SQS."""

    body: str
    attributes: dict[str, Attribute]
    system: dict[str, str]  # Of the system attributes, those that are kept as native attributes.


def incoming(payload: bytes, content_type: str, native: Mapping[str, str]) -> Incoming:
    """The body and the attributes of a stored message."""
    system = {name: native[name] for name in _SYSTEM if name in native} if native else {}
    if content_type == ENVELOPE and (opened := _decode_envelope(payload)) is not None:
        enveloped = {name: _attribute_of(each.type, each.value) for name, each in opened.attributes.items()}
        return Incoming(opened.body, enveloped, system)
    attributes = _sqs_attributes(native) if native else {}
    try:
        body = payload.decode()
    except UnicodeDecodeError:
        body = None
    if body is None or not is_text(body):
        attributes[ENCODING] = Attribute("String", "base64")
        return Incoming(b64encode(payload).decode(), attributes, system)
    return Incoming(body, attributes, system)


def incoming_blob(blob: str, size: int, native: Mapping[str, str]) -> Incoming:
    """What stands for a message whose payload is too large for SQS: the blob to fetch from `/v1/blobs`."""
    found = incoming(msgspec.json.encode({"blob": blob, "size": size}), TEXT, native)
    found.attributes[ENCODING] = Attribute("String", "blob")
    return found


def sequence_number(id: str) -> str:
    """The sequence number of a message: its id as a number. In one queue it grows, and so does the text."""
    return f"{int(id.replace('-', ''), 16):039d}"


def md5_of(data: bytes) -> str:
    """The digest of a body."""
    return md5(data, usedforsecurity=False).hexdigest()


def md5_of_attributes(attributes: Attributes) -> str:
    """The digest of attributes, as the documentation of SQS describes it.

    In the order of the names: name, data type and value, each after its length, and the value after a byte for its
    transport: 1 for text, 2 for bytes.
    """
    digest = md5(usedforsecurity=False)
    for name in sorted(attributes):
        type, value = attributes[name]
        transport, data = (b"\x02", value) if isinstance(value, bytes) else (b"\x01", value.encode())
        for text in (name.encode(), type.encode()):
            digest.update(len(text).to_bytes(4, "big") + text)
        digest.update(transport + len(data).to_bytes(4, "big") + data)
    return digest.hexdigest()


def attribute_values(attributes: Attributes) -> dict[str, dict[str, Any]]:
    """Attributes as the service model has them."""
    return {
        name: {"DataType": each.type, "BinaryValue" if isinstance(each.value, bytes) else "StringValue": each.value}
        for name, each in attributes.items()
    }


def is_text(text: str) -> bool:
    """Whether SQS allows these characters in a body: those that XML 1.0 has."""
    return (text.isascii() and text.isprintable()) or _INVALID.search(text) is None


def is_token(text: str) -> bool:
    """Whether a text is valid as a group id, a deduplication id or a receive attempt id."""
    return _TOKEN.match(text) is not None


def invalid_value(parameter: str, value: object, reason: str, *, hint: str = "") -> SqsError:
    """The error of a parameter whose value is not allowed."""
    message = f"Value {str(value)[:200]} for parameter {parameter} is invalid. Reason: {reason}"
    return SqsError("InvalidParameterValue", message, hint=hint)


def not_for_this_queue(parameter: str, value: object) -> SqsError:
    """The error of a parameter that only the other kind of queue has."""
    return invalid_value(parameter, value, "The request include parameter that is not valid for this queue type.")


def _order(
    parameters: Mapping[str, Any], queue: SqsSettings, payload: bytes, native: dict[str, str]
) -> tuple[str | None, str | None]:
    """The group and the idempotency key of a message; adds to `native` what they do not keep."""
    group: str | None = parameters.get(GROUP)
    deduplication: str | None = parameters.get(DEDUPLICATION)
    for name, value in ((GROUP, group), (DEDUPLICATION, deduplication)):
        if value is not None and not is_token(value):
            raise invalid_value(
                name,
                value,
                f"{name} can only include alphanumeric and punctuation characters. "
                f"1 to {SQS_TOKEN_CHARACTERS_MAX} in length.",
            )
    if not queue.fifo:
        if deduplication is not None:
            raise not_for_this_queue(DEDUPLICATION, deduplication)
        if group is not None:
            native[GROUP] = group
        return None, None
    if group is None:
        raise missing_parameter(GROUP)
    if deduplication is None:
        if not queue.content_based:
            raise _no_deduplication()
        deduplication = sha256(payload).hexdigest()
    native[DEDUPLICATION] = deduplication
    key = f"queue:{deduplication}"
    if queue.scope == "messageGroup":  # No id has a space. Hashed, because both together may be longer than a key.
        key = f"group:{sha256(f'{group} {deduplication}'.encode()).hexdigest()}"
    try:
        return checked_name("group", group), key
    except InvalidName:  # It may have punctuation that names do not have.
        native[GROUP] = group
        return f"sqs={sha256(group.encode()).hexdigest()}", key


def _delay_seconds(parameters: Mapping[str, Any], queue: SqsSettings) -> float | None:
    delay: int | None = parameters.get("DelaySeconds")
    if delay is None:
        return None
    if not 0 <= delay <= SQS_DELAY_SECONDS_MAX:
        raise invalid_value("DelaySeconds", delay, f"DelaySeconds must be >= 0 and <= {SQS_DELAY_SECONDS_MAX}.")
    if queue.fifo:
        if delay:
            raise not_for_this_queue("DelaySeconds", delay)
        return None  # A FIFO queue has one delay for all of its messages.
    return float(delay)


def checked_attributes(given: Mapping[str, Mapping[str, Any]]) -> dict[str, Attribute]:
    """The message attributes of a SendMessage.

    Raises:
        SqsError: a name, data type or value is invalid, or there are too many.
    """
    if len(given) > SQS_ATTRIBUTES_MAX:
        raise SqsError(
            "InvalidParameterValue",
            f"Number of message attributes [{len(given)}] exceeds the allowed maximum [{SQS_ATTRIBUTES_MAX}].",
        )
    return {name: _checked_attribute(name, value) for name, value in given.items()}


def _checked_attribute(name: str, given: Mapping[str, Any]) -> Attribute:
    if len(name) > SQS_ATTRIBUTE_NAME_CHARACTERS_MAX:
        raise _invalid_attribute(name, "Message (user) attribute names must be shorter than 256 Bytes")
    if not _NAME.match(name):
        raise _invalid_attribute(
            name,
            "Message (user) attributes name can only contain upper and lower score characters, digits, periods, "
            "hyphens and underscores. ",
        )
    if _RESERVED_NAME.match(name):
        raise _invalid_attribute(
            name,
            "You can't use message attribute names beginning with 'AWS.' or 'Amazon.'. These strings are reserved for "
            "internal use. Additionally, they cannot start or end with '.'.",
        )
    type = given.get("DataType") or ""
    base = type.partition(".")[0]
    if not type:
        raise SqsError(
            "InvalidParameterValue", f"The message attribute '{name}' must contain non-empty message attribute type."
        )
    if base not in _TYPES or len(type) > SQS_ATTRIBUTE_NAME_CHARACTERS_MAX or not is_text(type):
        raise SqsError(
            "InvalidParameterValue",
            f"The message attribute '{name}' has an invalid message attribute type, the set of supported type prefixes "
            "is Binary, Number, and String.",
            hint=f"A type has at most {SQS_ATTRIBUTE_NAME_CHARACTERS_MAX} characters, as in String.uuid.",
        )
    if given.get("StringListValues") or given.get("BinaryListValues"):
        raise SqsError(
            "UnsupportedOperation", "Message attribute list values in SendMessage operation are not supported."
        )
    wanted, other = ("BinaryValue", "StringValue") if base == "Binary" else ("StringValue", "BinaryValue")
    value: str | bytes | None = given.get(wanted)
    if not value or given.get(other):
        raise SqsError(
            "InvalidParameterValue",
            f"Message (user) attribute '{name}' must contain a non-empty value of type '{base}'.",
            hint=f"A value of the type {type} is in {wanted}, and nowhere else.",
        )
    if isinstance(value, str):
        if not is_text(value):  # AWS has another code for bodies.
            raise _invalid_attribute(name, _INVALID_CHARACTERS)
        if base == "Number":
            _check_number(name, value)
    return Attribute(type, value)


def _check_number(name: str, text: str) -> None:
    try:
        number = Decimal(text) if _NUMBER.match(text) else None
    except InvalidOperation:  # pragma: no cover - The pattern allows only what Decimal reads.
        number = None
    if number is None:
        raise SqsError("InvalidParameterValue", f"Could not cast message attribute '{name}' value to number.")
    digits = _EXPONENT.sub("", text).replace(".", "").lstrip("+-").strip("0")  # Those that are significant.
    if len(digits) > SQS_NUMBER_DIGITS_MAX or (number and not _EXPONENT_MIN <= number.adjusted() <= _EXPONENT_MAX):
        raise SqsError(
            "InvalidParameterValue",
            f"Could not cast message attribute '{name}' value to number.",
            hint=f"It has more than {SQS_NUMBER_DIGITS_MAX} digits, or is not between 10^{_EXPONENT_MIN} and "
            f"10^{_EXPONENT_MAX}.",
        )


def _checked_trace_header(system: Mapping[str, Mapping[str, Any]]) -> str:
    for name in system:
        if name != TRACE_HEADER:
            raise SqsError(
                "InvalidParameterValue",
                f"Message system attribute name '{name[:200]}' is invalid; the only one is {TRACE_HEADER}.",
            )
    given = system[TRACE_HEADER]
    value = given.get("StringValue")
    if given.get("DataType") != "String" or not value:
        raise SqsError(
            "InvalidParameterValue", f"The message system attribute '{TRACE_HEADER}' must contain a non-empty String."
        )
    if not _is_trace_header(value):
        raise SqsError(
            "InvalidParameterValue",
            f"The message system attribute '{TRACE_HEADER}' must have at most {SQS_TRACE_HEADER_CHARACTERS_MAX} "
            "characters, and only those that a message body may have.",
        )
    return str(value)


def _is_trace_header(value: str) -> bool:
    return len(value) <= SQS_TRACE_HEADER_CHARACTERS_MAX and is_text(value)


def _native_attributes(attributes: Attributes) -> dict[str, str]:
    native: dict[str, str] = {}
    for name, (type, value) in attributes.items():
        native[name] = b64encode(value).decode() if isinstance(value, bytes) else value
        if type != "String":
            native[TYPE_PREFIX + name] = type
    return native


def _sqs_attributes(native: Mapping[str, str]) -> dict[str, Attribute]:
    """The message attributes that native ones stand for. Those of native clients are Strings."""
    return {
        name: _attribute_of(native.get(TYPE_PREFIX + name, "String"), value)
        for name, value in native.items()
        if name not in _SYSTEM
        and not (name.startswith(TYPE_PREFIX) and name.removeprefix(TYPE_PREFIX) in native)
        and is_text(name)  # XML cannot carry others, and no attribute of SQS has such a name.
    }


def _attribute_of(type: str, value: str) -> Attribute:
    """An attribute as it was stored. Native clients may have stored other data types and values than SQS allows."""
    base = type.partition(".")[0]
    if base not in _TYPES or not is_text(type):
        type = base = "String"
    if base == "Binary":
        try:
            return Attribute(type, b64decode(value, validate=True))
        except ValueError:
            type = "String"
    return Attribute(type, value) if is_text(value) else Attribute("Binary", value.encode())


def _is_reserved(name: str) -> bool:
    """Whether a native attribute of this name has a meaning of its own."""
    return name in _SYSTEM or name.startswith(TYPE_PREFIX)


class _Enveloped(msgspec.Struct, frozen=True):
    """An attribute in an envelope. The value is base64 if the data type is Binary."""

    type: str
    value: str


class _Envelope(msgspec.Struct, frozen=True):
    """A body with the attributes that do not fit into native ones."""

    body: str
    attributes: dict[str, _Enveloped]


_encode_json: Final = msgspec.json.Encoder().encode
_decode_json: Final = msgspec.json.Decoder(_Envelope).decode


def _encode_envelope(body: str, attributes: Attributes) -> bytes:
    enveloped = {
        name: _Enveloped(each.type, b64encode(each.value).decode() if isinstance(each.value, bytes) else each.value)
        for name, each in attributes.items()
    }
    return _encode_json(_Envelope(body, enveloped))


def _decode_envelope(payload: bytes) -> _Envelope | None:
    """What is in an envelope; None if a native client gave another payload its content type."""
    try:
        found = _decode_json(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if is_text(found.body) else None


def _characters(attributes: Mapping[str, str]) -> int:
    return sum([len(name) + len(value) for name, value in attributes.items()])


def _attributes_size(attributes: Attributes) -> int:
    return sum(
        [
            _byte_count(name) + _byte_count(type) + (len(value) if isinstance(value, bytes) else _byte_count(value))
            for name, (type, value) in attributes.items()
        ]
    )


def _byte_count(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _no_deduplication() -> SqsError:
    return SqsError(
        "InvalidParameterValue",
        "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided explicitly",
    )


def _invalid_attribute(name: str, message: str) -> SqsError:
    return SqsError("InvalidParameterValue", message, hint=f"The attribute is {name[:100]!r}.")
