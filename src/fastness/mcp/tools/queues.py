"""Tools over queues. A received message is settled with its lease and fence, from any process."""

from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

import fastness
from fastness.errors import MessageCancelled, MessageFailed, MessageNotFound, ResultNotReady
from fastness.handles.queues import MessageOptions
from fastness.limits import (
    DELAY_SECONDS_MAX,
    LAST_ERROR_BYTES_MAX,
    MCP_LIST_MAX,
    MCP_MESSAGE_LEASE_SECONDS,
    MCP_RECEIVE_MAX,
    NAME_BYTES_MAX,
)
from fastness.mcp.caller import Caller
from fastness.mcp.contents import (
    BYTES,
    OFFSET_MAX,
    Content,
    Rest,
    body_of,
    content_of,
    content_of_stored,
    content_of_value,
    shares,
)
from fastness.mcp.task_marks import is_task_of_another, mark_of_job
from fastness.mcp.tool import Tool, ToolInput, ToolOutput, utc, with_fields_of
from fastness.mcp.tools.fields import (
    AfterName,
    AtExpiry,
    BodyStart,
    ExpiresAt,
    Fence,
    IsBase64,
    LeaseId,
    LeaseSeconds,
    Next,
    ShortText,
    WaitSeconds,
)

DelaySeconds = Annotated[float, Meta(ge=0, le=DELAY_SECONDS_MAX)]
QueueName = Annotated[str, Meta(description="The name of the queue.", min_length=1, max_length=NAME_BYTES_MAX)]
MessageId = Annotated[str, Meta(description="The id of the message.", min_length=1, max_length=NAME_BYTES_MAX)]


class QueueList(ToolInput, frozen=True):
    after: AfterName = ""
    limit: Annotated[int, Meta(description="How many queues at most.", ge=1, le=MCP_LIST_MAX)] = MCP_LIST_MAX


class QueueLine(ToolOutput, frozen=True):
    name: QueueName
    ready: Annotated[int, Meta(description="Messages that queue_receive would deliver now.")]
    delayed: Annotated[int, Meta(description="Messages that are held back for a time.")]
    leased: Annotated[int, Meta(description="Messages that consumers work on.")]
    dead: Annotated[int, Meta(description="Dead letters: messages that failed too often.")]
    is_paused: Annotated[bool, Meta(description="Whether an operator has stopped its deliveries.")]


class QueueLines(ToolOutput, frozen=True):
    queues: Annotated[list[QueueLine], Meta(description="In the order of their names.")]
    next: Next


async def _list(caller: Caller, given: QueueList) -> QueueLines:
    page = await caller.plane.survey_queues(after=given.after, limit=given.limit)
    lines = [QueueLine.of(each, name=each.queue, is_paused=each.paused) for each in page.queues]
    return QueueLines(queues=lines, next=page.next)


@with_fields_of(fastness.NewMessage, MessageOptions.__annotations__)
class QueuePut(ToolInput, frozen=True):
    queue: QueueName
    body: Annotated[Any, Meta(description="The work: text or any other JSON value.")]
    is_base64: IsBase64 = False
    content_type: Annotated[ShortText | None, Meta(description="By default that of JSON, text or bytes.")] = None


class QueuePutDone(ToolOutput, frozen=True):
    id: MessageId
    duplicate: Annotated[bool, Meta(description="It had been put before with this key, and was not put again.")]
    durability: Annotated[str, Meta(description="CRITICAL: it is on disk.")]


async def _put(caller: Caller, given: QueuePut) -> QueuePutDone:
    options = {name: getattr(given, name) for name in MessageOptions.__annotations__}
    body = body_of(given.body, is_base64=given.is_base64)
    receipt = await caller.plane.queue(given.queue).put(body, **options)
    return QueuePutDone.of(receipt, durability=receipt.durability.name)


class QueueReceive(ToolInput, frozen=True):
    queue: QueueName
    max_messages: Annotated[
        int,
        Meta(
            description="How many messages at most. Their leases run at the same time: take as many as you can do.",
            ge=1,
            le=MCP_RECEIVE_MAX,
        ),
    ] = 1
    lease_seconds: LeaseSeconds = MCP_MESSAGE_LEASE_SECONDS
    wait_seconds: WaitSeconds = 0.0


class ReceivedMessage(ToolOutput, frozen=True):
    id: MessageId
    lease_id: Annotated[str, Meta(description="For queue_ack, queue_nack and queue_extend.")]
    fence: Annotated[int, Meta(description="For queue_ack, queue_nack and queue_extend.")]
    expires_at: ExpiresAt
    attempts: Annotated[int, Meta(description="How often it was delivered, with this time.")]
    max_attempts: Annotated[int, Meta(description="After so many failures it becomes a dead letter.")]
    last_error: Annotated[str | None, Meta(description="Why the attempt before failed.")]
    body: Content


class ReceivedMessages(ToolOutput, frozen=True):
    messages: Annotated[list[ReceivedMessage], Meta(description="Empty: nothing was ready.")]
    at_expiry: AtExpiry


async def _receive(caller: Caller, given: QueueReceive) -> ReceivedMessages:
    found = await caller.plane.queue(given.queue).receive_many(
        given.max_messages,
        wait_seconds=given.wait_seconds,
        visibility_seconds=given.lease_seconds,
        owner=caller.agent,
        extend_for_seconds=0.0,
    )
    limits = shares([message.delivery.size for message in found])
    messages = []
    for message, limit in zip(found, limits, strict=True):
        delivery = message.delivery
        messages.append(
            ReceivedMessage.of(
                delivery,
                lease_id=message.lease.lease_id,
                fence=message.fence,
                expires_at=utc(message.expires_ms),
                attempts=message.attempts,
                body=await content_of_stored(
                    caller.plane, delivery, rest=rest_of_message(given.queue, message.id), limit=limit
                ),
            )
        )
    return ReceivedMessages(messages=messages, at_expiry=_at_expiry(given.queue, given.lease_seconds, len(messages)))


def _at_expiry(queue: str, seconds: float, count: int) -> str:
    if not count:
        return "Nothing was received, so nothing expires. Call queue_receive again later, or with wait_seconds."
    return (
        f"After {seconds:.0f} s, at expires_at, a message that you have not settled is delivered again to any consumer "
        f"of {queue}, with a higher fence; this counts as a failed attempt, and after max_attempts it becomes a dead "
        "letter. Your fence is refused from then on. Call queue_extend before to keep it, and queue_ack when the work "
        "is done."
    )


def rest_of_message(queue: str, id: str) -> Rest:
    """How to read on in the body of a message."""
    return lambda end: f"Call queue_status with queue={queue!r}, id={id!r}, body_start={end}."


class QueueAck(ToolInput, frozen=True):
    queue: QueueName
    id: MessageId
    lease_id: LeaseId
    fence: Fence
    result: Annotated[Any, Meta(description="What came out, for queue_result: any JSON value. Null: no result.")] = None
    is_base64: IsBase64 = False


class Settled(ToolOutput, frozen=True):
    settled: Annotated[
        Literal["done", "returned", "rejected"],
        Meta(description="done: finished. returned: it is delivered again. rejected: it is a dead letter."),
    ]


async def _ack(caller: Caller, given: QueueAck) -> Settled:
    result = body_of(given.result, is_base64=given.is_base64)
    await caller.plane.queue(given.queue).held(given.id, lease_id=given.lease_id, fence=given.fence).ack(result=result)
    return Settled(settled="done")


class QueueNack(ToolInput, frozen=True):
    queue: QueueName
    id: MessageId
    lease_id: LeaseId
    fence: Fence
    error: Annotated[
        str,
        Meta(description="Why it failed; the next consumer sees it.", min_length=1, max_length=LAST_ERROR_BYTES_MAX),
    ]
    delay_seconds: Annotated[
        DelaySeconds | None,
        Meta(description="When to deliver it again; null: after the back-off of the queue. 0: at once."),
    ] = None
    reject: Annotated[bool, Meta(description="Make it a dead letter at once, because no attempt can succeed.")] = False


async def _nack(caller: Caller, given: QueueNack) -> Settled:
    message = caller.plane.queue(given.queue).held(given.id, lease_id=given.lease_id, fence=given.fence)
    if given.reject:
        await message.reject(given.error)
        return Settled(settled="rejected")
    await message.nack(delay_seconds=given.delay_seconds, error=given.error)
    return Settled(settled="returned")


class QueueExtend(ToolInput, frozen=True):
    queue: QueueName
    id: MessageId
    lease_id: LeaseId
    fence: Fence
    lease_seconds: LeaseSeconds = MCP_MESSAGE_LEASE_SECONDS


class Extended(ToolOutput, frozen=True):
    lease_id: Annotated[str, Meta(description="The same as before.")]
    fence: Annotated[int, Meta(description="The same as before.")]
    expires_at: ExpiresAt
    at_expiry: AtExpiry


async def _extend(caller: Caller, given: QueueExtend) -> Extended:
    message = caller.plane.queue(given.queue).held(given.id, lease_id=given.lease_id, fence=given.fence)
    expires_ms = await message.extend(given.lease_seconds)
    return Extended(
        lease_id=given.lease_id,
        fence=given.fence,
        expires_at=utc(expires_ms),
        at_expiry=_at_expiry(given.queue, given.lease_seconds, 1),
    )


class QueueStatus(ToolInput, frozen=True):
    queue: QueueName
    id: MessageId
    body_start: Annotated[
        Annotated[int, Meta(ge=0, le=OFFSET_MAX)] | None,
        Meta(description="Also return the body, from this byte on; null: without the body."),
    ] = None


class MessageStatus(ToolOutput, frozen=True, omit_defaults=True):
    state: Annotated[
        str,
        Meta(
            description="ready; delayed: held back; blocked: behind others of its group or key; leased: a consumer has "
            "it; done; dead: a dead letter; cancelled."
        ),
    ]
    attempts: Annotated[int, Meta(description="How often it was delivered.")]
    max_attempts: Annotated[int, Meta(description="After so many failures it becomes a dead letter.")]
    last_error: Annotated[str | None, Meta(description="Why the last attempt failed.")]
    has_result: Annotated[bool, Meta(description="Whether queue_result has a result.")]
    owner: Annotated[str | None, Meta(description="The consumer that has it.")] = None
    lease_id: Annotated[str | None, Meta(description="Of your lease, if you have the message.")] = None
    fence: Annotated[int | None, Meta(description="Of your lease, if you have the message.")] = None
    expires_at: Annotated[str | None, Meta(description="When the lease of its consumer ends.")] = None
    body: Annotated[Content | None, Meta(description="If body_start was given and the body is still kept.")] = None


async def _status(caller: Caller, given: QueueStatus) -> MessageStatus:
    info = await caller.plane.queue(given.queue).get(given.id)
    is_leased = info.state == "leased"
    is_mine = is_leased and info.owner == caller.agent
    is_triage = info.state == "dead" and caller.is_allowed("queue:peek")
    if not is_mine and not is_triage and _is_task_of_another(caller, given.queue, info):
        raise _hidden(given.queue, given.id)
    body = None
    if given.body_start is not None and (info.payload is not None or info.blob is not None):
        rest = rest_of_message(given.queue, given.id)
        body = await content_of_stored(caller.plane, info, rest=rest, start=given.body_start)
    return MessageStatus.of(
        info,
        owner=info.owner if is_leased else None,
        lease_id=info.lease_id if is_mine else None,
        fence=info.fence if is_mine else None,
        expires_at=utc(info.expires_ms) if is_leased else None,
        body=body,
    )


def _is_task_of_another(caller: Caller, queue: str, info: fastness.MessageInfo) -> bool:
    return is_task_of_another(mark_of_job(info.correlation_id), caller.universe, caller.agent, queue)


def _hidden(queue: str, id: str) -> MessageNotFound:
    """The error of a task of another agent, as if there were none."""
    return MessageNotFound(f"Queue {queue} has no message {id} that you may read, and nothing is kept about it")


class QueueResult(ToolInput, frozen=True):
    queue: QueueName
    id: MessageId
    wait_seconds: WaitSeconds = 0.0
    body_start: BodyStart = 0


class MessageOutcome(ToolOutput, frozen=True, omit_defaults=True):
    state: Annotated[
        Literal["pending", "done", "dead", "cancelled"],
        Meta(description="pending: not done yet, call again with wait_seconds. dead: it failed. done, cancelled."),
    ]
    result: Annotated[Content | None, Meta(description="If it is done; its value is null if it has no result.")] = None
    error: Annotated[str | None, Meta(description="Why there is no result.")] = None


async def _result(caller: Caller, given: QueueResult) -> MessageOutcome:
    queue = caller.plane.queue(given.queue)
    info = None
    with suppress(MessageNotFound):  # Nothing is kept about it; `result` says so.
        info = await queue.get(given.id)
    if info is not None and _is_task_of_another(caller, given.queue, info):
        raise _hidden(given.queue, given.id)
    try:
        found = await queue.result(given.id, wait_seconds=given.wait_seconds)
    except ResultNotReady as error:
        return MessageOutcome(state="pending", error=str(error))
    except MessageFailed as error:
        return MessageOutcome(state="dead", error=str(error))
    except MessageCancelled as error:
        return MessageOutcome(state="cancelled", error=str(error))
    return MessageOutcome(state="done", result=_content_of_result(found, given))


def _content_of_result(found: Any, given: QueueResult) -> Content:
    def rest(end: int) -> str:
        return f"Call queue_result with queue={given.queue!r}, id={given.id!r}, body_start={end}."

    if not isinstance(found, bytes):
        return content_of_value(found, rest=rest, start=given.body_start)
    return content_of(found, BYTES, rest=rest, start=given.body_start)


_SETTLE: Final = "Give id, lease_id and fence exactly as queue_receive returned them."

TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    Tool(
        name="queue_list",
        title="List queues",
        description="List the queues with the number of messages in each state. Use it to find work or a queue's name.",
        input=QueueList,
        output=QueueLines,
        call=_list,
        verbs=("queue:survey",),
        read_only=True,
    ),
    Tool(
        name="queue_put",
        title="Put work into a queue",
        description=(
            "Put a message into a queue; the queue is created if it is new. One consumer at a time gets it, and again "
            "if it fails. Set keep_result if you want to ask for its result later, with queue_result. Give an "
            "idempotency_key if you may repeat the call."
        ),
        input=QueuePut,
        output=QueuePutDone,
        call=_put,
        verbs=("queue:put",),
    ),
    Tool(
        name="queue_receive",
        title="Take work from a queue",
        description=(
            "Take the next messages of a queue. Each is leased to you until expires_at. Do the work, then call "
            "queue_ack, or queue_nack if it failed, with its lease_id and fence. Call queue_extend if you need longer."
        ),
        input=QueueReceive,
        output=ReceivedMessages,
        call=_receive,
        verbs=("queue:receive",),
    ),
    Tool(
        name="queue_ack",
        title="Acknowledge a message",
        description=(
            f"Acknowledge a message whose work is done; it is not delivered again. {_SETTLE} A refused fence means "
            "that the lease has ended: stop, another consumer may do the work."
        ),
        input=QueueAck,
        output=Settled,
        call=_ack,
        verbs=("queue:ack",),
        idempotent=True,
    ),
    Tool(
        name="queue_nack",
        title="Return or reject a message",
        description=(
            "Return a message whose work failed: it is delivered again later, and after too many failures it becomes a "
            f"dead letter. With reject it becomes one at once. {_SETTLE}"
        ),
        input=QueueNack,
        output=Settled,
        call=_nack,
        verbs=("queue:nack", "queue:reject"),
        destructive=True,
    ),
    Tool(
        name="queue_extend",
        title="Keep a message longer",
        description=(
            "Extend the lease of a message that you work on, to lease_seconds from now; it is never shortened. Call it "
            f"before expires_at. {_SETTLE}"
        ),
        input=QueueExtend,
        output=Extended,
        call=_extend,
        verbs=("queue:extend",),
        idempotent=True,
    ),
    Tool(
        name="queue_status",
        title="Status of a message",
        description=(
            "What became of a message: whether it waits, is worked on, is done or has failed. If you have it leased, "
            "the answer has your lease_id and fence. With body_start it also returns the body, or the rest of it."
        ),
        input=QueueStatus,
        output=MessageStatus,
        call=_status,
        verbs=("queue:get",),
        read_only=True,
    ),
    Tool(
        name="queue_result",
        title="Result of a message",
        description=(
            "The result that a message was acknowledged with, or why there is none. With wait_seconds the call waits "
            "until the message is done. Results are kept for a time only, an hour by default."
        ),
        input=QueueResult,
        output=MessageOutcome,
        call=_result,
        verbs=("queue:result", "queue:get"),
        read_only=True,
    ),
)
