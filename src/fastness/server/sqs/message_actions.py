"""The actions that send, receive, delete and hide messages.

SendMessage is one request to the plane, and so is a batch: one commit, which executes the entries that are valid. A
body over `PAYLOAD_INLINE_BYTES_MAX` is stored as a blob before that. All answers follow the sync of what they report,
as those of native clients do.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from fastness.clock import SystemClock
from fastness.errors import (
    BlobNotFound,
    Corrupt,
    MessageCancelled,
    MessageNotFound,
    QueueMessageLeaseMismatch,
    QueueNotFound,
)
from fastness.limits import (
    PAYLOAD_INLINE_BYTES_MAX,
    SQS_ENVELOPE_BYTES_MAX,
    SQS_MESSAGE_BYTES_MAX,
    SQS_RECEIVE_MAX,
    SQS_TOKEN_CHARACTERS_MAX,
    SQS_VISIBILITY_SECONDS_MAX,
    SQS_WAIT_SECONDS_MAX,
)
from fastness.plane.idempotency import keyed_call_of
from fastness.server.sqs import messages
from fastness.server.sqs.batch import BatchResults, Entry, checked_entries
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.calls import authorize, execute
from fastness.server.sqs.errors import SqsError, missing_parameter
from fastness.server.sqs.handles import Receipt, invalid_handle, parse_handle, receipt_handle
from fastness.server.sqs.messages import Incoming, Outgoing, invalid_value, not_for_this_queue
from fastness.server.sqs.queue_urls import queue_arn, queue_at
from fastness.server.sqs.settings_cache import SettingsCache
from fastness.server.transport import ServerTransport
from fastness.wire.blobs import GetBlob, PutBlob
from fastness.wire.deliveries import message_at
from fastness.wire.queues import (
    AckMessages,
    ChangeVisibility,
    Deliveries,
    GetMessage,
    MessageLease,
    NackMessages,
    NewMessage,
    Outcome,
    PackedLease,
    PutMessages,
    ReceiveMessages,
    VisibilityChange,
)
from fastness.wire.queues import (
    Receipt as PutReceipt,
)
from fastness.wire.sqs import SqsSettings
from fastness.wire.stored_messages import StoredMessage, format_id

Parameters = Mapping[str, Any]
Output = dict[str, Any]

_ALL: Final = "All"
_EVERY_NAME: Final = frozenset((_ALL, "*"))  # In MessageAttributeNames; `.*` is a prefix of all names.
_ENTRY_TOO_LARGE: Final = "One or more parameters cannot be validated."
_IN_QUEUE: Final = frozenset(("ready", "delayed", "blocked", "leased"))
SYSTEM_ATTRIBUTES: Final = frozenset(
    (
        "SenderId",
        "SentTimestamp",
        "ApproximateReceiveCount",
        "ApproximateFirstReceiveTimestamp",
        "SequenceNumber",
        "MessageDeduplicationId",
        "MessageGroupId",
        "AWSTraceHeader",
        "DeadLetterQueueSourceArn",
    )
)
_WITHOUT_VALUE: Final = frozenset(("SqsManagedSseEnabled",))  # The documentation lists it for messages, too.
_LOST: Final = (QueueMessageLeaseMismatch.code, MessageCancelled.code)
_HIDDEN_SECONDS: Final = 1.0  # A message that is received with the timeout 0 is hidden until the next commit.
_OWNER: Final = "sqs"


class MessageActions:
    """Executes actions on messages."""

    def __init__(self, transport: ServerTransport, settings: SettingsCache) -> None:
        self._transport = transport
        self._settings = settings
        self._now_ms = (transport.services.clock or SystemClock()).now_ms

    # Sending

    async def send_message(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, settings = await self._queue_to_send(caller, parameters)
        message = messages.outgoing(parameters, settings, caller.authorizer.token_id, trace=caller.trace)
        receipt = (await self._put(caller, queue, [message]))[0]
        return message.output(receipt.id, fifo=settings.fifo)

    async def send_message_batch(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, settings = await self._queue_to_send(caller, parameters)
        entries = checked_entries("SendMessageBatch", parameters)
        messages.check_batch(entries, settings)
        size = sum([messages.message_size(entry) for entry in entries])
        if size > SQS_MESSAGE_BYTES_MAX:
            raise SqsError(
                "BatchRequestTooLong",
                f"Batch requests cannot be longer than {SQS_MESSAGE_BYTES_MAX} bytes. You have sent {size} bytes.",
            )
        results = BatchResults(entries)
        valid: list[tuple[Entry, Outgoing]] = []
        for entry in entries:
            try:
                sender, trace = caller.authorizer.token_id, caller.trace
                valid.append(
                    (entry, messages.outgoing(entry, settings, sender, trace=trace, too_large=_ENTRY_TOO_LARGE))
                )
            except SqsError as error:
                results.fail(entry, error)
        if valid:
            receipts = await self._put(caller, queue, [message for _, message in valid])
            for (entry, message), receipt in zip(valid, receipts, strict=True):
                results.succeed(entry, **message.output(receipt.id, fifo=settings.fifo))
        return results.output()

    async def _queue_to_send(self, caller: SqsCaller, parameters: Parameters) -> tuple[str, SqsSettings]:
        queue = queue_at(caller, parameters["QueueUrl"])
        authorize(caller, PutMessages(queue, [], caller.universe))
        return queue, await self._settings.get(caller.universe, queue)

    async def _put(self, caller: SqsCaller, queue: str, outgoing: Sequence[Outgoing]) -> list[PutReceipt]:
        caller.authorizer.authorize_body(sum([len(each.message.payload) for each in outgoing]))
        if any(len(each.message.payload) > PAYLOAD_INLINE_BYTES_MAX for each in outgoing):
            new = list(await asyncio.gather(*[self._with_blob(caller, each.message) for each in outgoing]))
        else:
            new = [each.message for each in outgoing]
        try:
            request = PutMessages(queue, new, caller.universe, must_exist=True)
            return (await execute(self._transport, caller, request)).receipts
        except QueueNotFound:
            self._settings.forget(caller.universe, queue)
            raise

    async def _with_blob(self, caller: SqsCaller, message: NewMessage) -> NewMessage:
        """The message, with a payload that is too large for it as a blob."""
        if len(message.payload) <= PAYLOAD_INLINE_BYTES_MAX:
            return message
        stored = await self._transport.call(PutBlob(message.payload, caller.universe, pinned=False))
        return msgspec.structs.replace(message, payload=b"", blob=stored.hash, blob_size=stored.size)

    # Receiving

    async def receive_message(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue = queue_at(caller, parameters["QueueUrl"])
        request = ReceiveMessages(queue, _owner(caller), universe=caller.universe, packed=True, must_exist=True)
        authorize(caller, request)
        wanted = _Wanted(parameters)
        limit = _within(
            parameters, "MaxNumberOfMessages", 1, SQS_RECEIVE_MAX, "Must be between {0} and {1}, if provided."
        )
        hidden_seconds = _visibility_seconds(parameters)
        wait_seconds = _within(
            parameters, "WaitTimeSeconds", 0, SQS_WAIT_SECONDS_MAX, "Must be >= {0} and <= {1}, if provided."
        )
        settings = await self._settings.get(caller.universe, queue)
        attempt = _attempt(parameters, settings)
        if hidden_seconds is None:
            hidden_seconds = settings.visibility_seconds
        request = msgspec.structs.replace(
            request,
            max_messages=1 if limit is None else limit,
            wait_seconds=float(settings.wait_seconds if wait_seconds is None else wait_seconds),
            visibility_seconds=float(hidden_seconds or _HIDDEN_SECONDS),
        )
        try:
            deliveries = await self._receive(caller, request, attempt)
        except QueueNotFound:
            self._settings.forget(caller.universe, queue)
            raise
        if not deliveries.packed:
            return {}
        try:
            if not hidden_seconds:
                changes = [VisibilityChange(lease, 0.0) for lease in deliveries.leases()]
                await self._transport.call(ChangeVisibility(queue, changes, caller.universe))
            call = _Call(caller, queue, settings, wanted)
            return {"Messages": [await self._message(call, *at) for at in _each(deliveries)]}
        except BaseException:  # The client does not get them, so others may have them at once.
            release = NackMessages(queue, deliveries.leases(), intent="defer", universe=caller.universe)
            await asyncio.shield(self._transport.call(release))
            raise

    async def _receive(self, caller: SqsCaller, request: ReceiveMessages, attempt: str | None) -> Deliveries:
        """Receive messages, or those of an earlier call with the same attempt id, hidden for the whole time again."""
        if attempt is None:
            return await execute(self._transport, caller, request)
        key = f"sqs/{sha256(f'{request.universe}/{request.queue}/{attempt}'.encode()).hexdigest()}"
        like = ReceiveMessages(request.queue, _OWNER, universe=request.universe)  # A retry may have other options.
        call = keyed_call_of(self._transport, request, key, again=True, like=like)
        began_ms = self._now_ms()
        deliveries = await execute(self._transport, caller, request, call)
        if not deliveries.packed:  # None is ready; or those of the earlier call are settled, and the id is used again.
            left_seconds = max(request.wait_seconds - (self._now_ms() - began_ms) / 1_000, 0.0)
            request = msgspec.structs.replace(request, wait_seconds=left_seconds)
            return await execute(self._transport, caller, request)
        repeated = [
            VisibilityChange(lease.lease_at(position), request.visibility_seconds or _HIDDEN_SECONDS)
            for lease in deliveries.packed
            if lease.leased_ms < began_ms
            for position in lease.positions
        ]
        if repeated:
            await self._transport.call(ChangeVisibility(request.queue, repeated, request.universe))
        return deliveries

    async def _message(self, call: "_Call", lease: PackedLease, position: int) -> Output:
        stored = message_at(lease, position)
        content = await self._content(call.caller, stored)
        id, fence = format_id(stored.id), stored.fence
        message: Output = {
            "MessageId": id,
            "ReceiptHandle": receipt_handle(
                call.caller.universe,
                call.queue,
                id=stored.id,
                fence=fence,
                ref=stored.lease_ref,
                received_ms=lease.leased_ms,
            ),
            "MD5OfBody": messages.md5_of(content.body.encode()),
            "Body": content.body,
        }
        if call.wanted.system:
            system = _system_attributes(call, stored, content, received_ms=lease.leased_ms)
            message["Attributes"] = {name: value for name, value in system.items() if name in call.wanted.system}
        if call.wanted.is_any_attribute and content.attributes:
            attributes = call.wanted.attributes(content)
            if attributes:
                message["MessageAttributes"] = messages.attribute_values(attributes)
                message["MD5OfMessageAttributes"] = messages.md5_of_attributes(attributes)
        return message

    async def _content(self, caller: SqsCaller, stored: StoredMessage) -> Incoming:
        payload = stored.payload
        if payload is None and stored.blob is not None:
            is_envelope = stored.content_type == messages.ENVELOPE
            if stored.size > (SQS_ENVELOPE_BYTES_MAX if is_envelope else SQS_MESSAGE_BYTES_MAX):
                return messages.incoming_blob(stored.blob, stored.size, stored.attributes)
            try:
                payload = (await self._transport.call(GetBlob(stored.blob, caller.universe))).data
            except (BlobNotFound, Corrupt):  # A message that cannot be read must not block those after it.
                return messages.incoming_blob(stored.blob, stored.size, stored.attributes)
        return messages.incoming(payload or b"", stored.content_type, stored.attributes)

    # Deleting

    async def delete_message(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, settings = await self._queue_to_settle(caller, parameters, AckMessages)
        handle = parameters["ReceiptHandle"]
        receipt = parse_handle(caller.universe, queue, handle)
        error = (await self._delete(caller, queue, settings, [(handle, receipt)]))[0]
        if error is not None:
            raise error
        return {}

    async def delete_message_batch(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, settings = await self._queue_to_settle(caller, parameters, AckMessages)
        entries = checked_entries("DeleteMessageBatch", parameters)
        results = BatchResults(entries)
        valid = _with_receipts(caller, queue, entries, results)
        if valid:
            handles = [(entry["ReceiptHandle"], receipt) for entry, receipt in valid]
            _settle(results, valid, await self._delete(caller, queue, settings, handles))
        return results.output()

    async def _delete(
        self, caller: SqsCaller, queue: str, settings: SqsSettings, handles: Sequence[tuple[str, Receipt]]
    ) -> list[SqsError | None]:
        """Delete messages; why each was refused, if it was."""
        leases = [receipt.lease for _, receipt in handles]
        # A message of a standard queue can be deleted after its visibility timeout, until it is received again.
        request = AckMessages(queue, leases, caller.universe, late=not settings.fifo)
        answer = await execute(self._transport, caller, request)
        return [
            _not_deleted(handle, outcome, settings)
            for (handle, _), outcome in zip(handles, answer.outcomes, strict=True)
        ]

    # Visibility

    async def change_message_visibility(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, _ = await self._queue_to_settle(caller, parameters, ChangeVisibility)
        receipt = parse_handle(caller.universe, queue, parameters["ReceiptHandle"])
        change = self._visibility_change(parameters, receipt)
        error = (await self._change_visibility(caller, queue, [(parameters["ReceiptHandle"], change)]))[0]
        if error is not None:
            raise error
        return {}

    async def change_message_visibility_batch(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, _ = await self._queue_to_settle(caller, parameters, ChangeVisibility)
        entries = checked_entries("ChangeMessageVisibilityBatch", parameters)
        results = BatchResults(entries)
        valid: list[tuple[Entry, VisibilityChange]] = []
        for entry, receipt in _with_receipts(caller, queue, entries, results):
            try:
                valid.append((entry, self._visibility_change(entry, receipt)))
            except SqsError as error:
                results.fail(entry, error)
        if valid:
            changes = [(entry["ReceiptHandle"], change) for entry, change in valid]
            _settle(results, valid, await self._change_visibility(caller, queue, changes))
        return results.output()

    def _visibility_change(self, parameters: Parameters, receipt: Receipt) -> VisibilityChange:
        seconds = _visibility_seconds(parameters)
        if seconds is None:
            raise missing_parameter("VisibilityTimeout")
        so_far_seconds = max(self._now_ms() - receipt.received_ms, 0) // 1_000
        if so_far_seconds + seconds > SQS_VISIBILITY_SECONDS_MAX:
            raise invalid_value(
                "VisibilityTimeout",
                seconds,
                f"Total VisibilityTimeout for the message is beyond the limit [{SQS_VISIBILITY_SECONDS_MAX} seconds]",
                hint=f"The message was received {so_far_seconds} seconds ago.",
            )
        return VisibilityChange(receipt.lease, float(seconds))

    async def _change_visibility(
        self, caller: SqsCaller, queue: str, changes: Sequence[tuple[str, VisibilityChange]]
    ) -> list[SqsError | None]:
        wanted = [change for _, change in changes]
        request = ChangeVisibility(queue, wanted, caller.universe, late_owner=_owner(caller))
        answer = await execute(self._transport, caller, request)
        return [
            await self._not_changed(caller, queue, handle, change.lease, outcome)
            for (handle, change), outcome in zip(changes, answer.outcomes, strict=True)
        ]

    async def _not_changed(
        self, caller: SqsCaller, queue: str, handle: str, lease: MessageLease, outcome: Outcome
    ) -> SqsError | None:
        """Why the visibility timeout of a message cannot change.

        An old handle is no error while its message is in the queue, and has no effect: a later receive has the message.
        """
        if outcome.code is None:
            return None
        if outcome.code not in _LOST:
            return invalid_handle(handle)
        with suppress(MessageNotFound):
            if (await self._transport.call(GetMessage(queue, lease.id, caller.universe))).state in _IN_QUEUE:
                return None
        reason = "Message does not exist or is not available for visibility timeout change."
        return invalid_value("ReceiptHandle", handle, reason)

    async def _queue_to_settle(
        self,
        caller: SqsCaller,
        parameters: Parameters,
        request: Callable[[str, list[Any], str], AckMessages | ChangeVisibility],
    ) -> tuple[str, SqsSettings]:
        queue = queue_at(caller, parameters["QueueUrl"])
        authorize(caller, request(queue, [], caller.universe))
        return queue, await self._settings.get(caller.universe, queue)


class _Wanted:
    """Which attributes of messages a receive returns."""

    def __init__(self, parameters: Parameters) -> None:
        """Raises SqsError if there is no system attribute of a given name."""
        named = [*parameters.get("AttributeNames", ()), *parameters.get("MessageSystemAttributeNames", ())]
        for name in named:
            if name != _ALL and name not in SYSTEM_ATTRIBUTES and name not in _WITHOUT_VALUE:
                raise SqsError("InvalidAttributeName", f"Unknown Attribute {name[:200]}.")
        self.system: Collection[str] = SYSTEM_ATTRIBUTES if _ALL in named else frozenset(named)
        names: Sequence[str] = parameters.get("MessageAttributeNames", ())
        self.is_any_attribute = bool(names)
        self._has_all = not _EVERY_NAME.isdisjoint(names)
        self._names = frozenset(names)
        # `.*` has the empty prefix, which all names have.
        self._prefixes = tuple(name.removesuffix(".*") for name in names if name.endswith(".*"))

    def attributes(self, content: Incoming) -> messages.Attributes:
        if self._has_all:
            return content.attributes
        return {
            name: each
            for name, each in content.attributes.items()
            if name in self._names or name.startswith(self._prefixes)
        }


class _Call(NamedTuple):
    """A ReceiveMessage."""

    caller: SqsCaller
    queue: str
    settings: SqsSettings
    wanted: _Wanted


def _system_attributes(call: _Call, stored: StoredMessage, content: Incoming, *, received_ms: int) -> dict[str, str]:
    system = {
        "SenderId": call.caller.account,
        "SentTimestamp": str(stored.created_ms),
        "ApproximateReceiveCount": str(stored.attempts),
        "ApproximateFirstReceiveTimestamp": str(stored.first_leased_ms or received_ms),
    }
    if call.settings.fifo:
        system["SequenceNumber"] = messages.sequence_number(format_id(stored.id))
        if stored.group is not None:
            system["MessageGroupId"] = stored.group
    if stored.origin is not None:
        system["DeadLetterQueueSourceArn"] = queue_arn(call.caller, stored.origin)
    return system | content.system


def _owner(caller: SqsCaller) -> str:
    return caller.authorizer.holder or caller.client or _OWNER


def _each(deliveries: Deliveries) -> list[tuple[PackedLease, int]]:
    return [(lease, position) for lease in deliveries.packed for position in lease.positions]


def _within(parameters: Parameters, name: str, least: int, most: int, reason: str) -> int | None:
    """A number of the parameters, if it is given."""
    value: int | None = parameters.get(name)
    if value is not None and not least <= value <= most:
        raise invalid_value(name, value, reason.format(least, most))
    return value


def _visibility_seconds(parameters: Parameters) -> int | None:
    reason = "VisibilityTimeout must be an integer between {0} and {1}."
    return _within(parameters, "VisibilityTimeout", 0, SQS_VISIBILITY_SECONDS_MAX, reason)


def _attempt(parameters: Parameters, settings: SqsSettings) -> str | None:
    name = "ReceiveRequestAttemptId"
    attempt: str | None = parameters.get(name)
    if attempt is None:
        return None
    if not settings.fifo:
        raise not_for_this_queue(name, attempt)
    if not messages.is_token(attempt):
        raise invalid_value(
            name,
            attempt,
            f"{name} can only include alphanumeric and punctuation characters. "
            f"1 to {SQS_TOKEN_CHARACTERS_MAX} in length.",
        )
    return attempt


def _with_receipts(
    caller: SqsCaller, queue: str, entries: Sequence[Entry], results: BatchResults
) -> list[tuple[Entry, Receipt]]:
    """The entries with valid receipt handles; the others have failed."""
    valid: list[tuple[Entry, Receipt]] = []
    for entry in entries:
        try:
            valid.append((entry, parse_handle(caller.universe, queue, entry["ReceiptHandle"])))
        except SqsError as error:
            results.fail(entry, error)
    return valid


def _settle(results: BatchResults, valid: Sequence[tuple[Entry, object]], errors: Sequence[SqsError | None]) -> None:
    for (entry, _), error in zip(valid, errors, strict=True):
        if error is None:
            results.succeed(entry)
        else:
            results.fail(entry, error)


def _not_deleted(handle: str, outcome: Outcome, settings: SqsSettings) -> SqsError | None:
    """Why a message cannot be deleted.

    An old handle of a standard queue is no error: the message was deleted, or a later receive has it.
    """
    if outcome.code is None or (outcome.code in _LOST and not settings.fifo):
        return None
    if outcome.code in _LOST:
        return invalid_value("ReceiptHandle", handle, "The receipt handle has expired.")
    return invalid_handle(handle)
