"""Tools over dead letters: messages that failed too often, or were rejected."""

from typing import Annotated, Any, Final

from msgspec import Meta

import fastness
from fastness.errors import InvalidArgument
from fastness.limits import MCP_DEAD_LETTERS_SCANNED_MAX, MCP_ERROR_CHARACTERS_MAX, MCP_LIST_MAX, NAME_BYTES_MAX
from fastness.mcp.caller import Caller
from fastness.mcp.contents import Content, content_of_stored, shares
from fastness.mcp.tool import Tool, ToolInput, ToolOutput
from fastness.mcp.tools.fields import Next, ShortText
from fastness.mcp.tools.queues import MessageId, QueueName, rest_of_message


class DeadLettersSearch(ToolInput, frozen=True):
    queue: Annotated[
        str,
        Meta(
            description="The queue that the messages failed in, without `.dlq`.",
            min_length=1,
            max_length=NAME_BYTES_MAX,
        ),
    ]
    text: Annotated[ShortText | None, Meta(description="Only letters whose body contains this text, in any case.")] = (
        None
    )
    error: Annotated[ShortText | None, Meta(description="Only letters whose last error contains this text.")] = None
    after: Annotated[
        str, Meta(description="The `next` of the page before; empty: the first.", max_length=NAME_BYTES_MAX)
    ] = ""
    limit: Annotated[int, Meta(description="How many letters at most.", ge=1, le=MCP_LIST_MAX)] = 20


class DeadLetter(ToolOutput, frozen=True):
    id: MessageId
    attempts: Annotated[int, Meta(description="How often it was delivered.")]
    last_error: Annotated[str | None, Meta(description="Why the last attempt failed; queue_status has all of it.")]
    died_at: Annotated[str, Meta(description="When it became a dead letter, in UTC.")]
    body: Content


class DeadLetters(ToolOutput, frozen=True):
    letters: Annotated[list[DeadLetter], Meta(description="In delivery order.")]
    next: Next
    scanned: Annotated[int, Meta(description="How many letters were searched.")]
    is_complete: Annotated[bool, Meta(description="Whether all letters of the queue were searched.")]


async def _search(caller: Caller, given: DeadLettersSearch) -> DeadLetters:
    queue = caller.plane.queue(given.queue)
    scanned = await queue.dead_letters(MCP_DEAD_LETTERS_SCANNED_MAX)
    is_complete = (await queue.stats()).dead <= MCP_DEAD_LETTERS_SCANNED_MAX  # Several queues may have one for theirs.
    found = [letter for letter in scanned if _matches(letter, given)]
    if given.after:
        ids = [letter.id for letter in found]
        if given.after not in ids:
            raise InvalidArgument(
                f"No such dead letter of {given.queue} is left after which the page could start: {given.after!r}; "
                "search without `after`"
            )
        found = found[ids.index(given.after) + 1 :]
    page = found[: given.limit]
    letters = []
    for letter, limit in zip(page, shares([letter.size for letter in page]), strict=True):
        body = await content_of_stored(caller.plane, letter, rest=rest_of_message(given.queue, letter.id), limit=limit)
        letters.append(
            DeadLetter.of(
                letter,
                last_error=None if letter.last_error is None else letter.last_error[:MCP_ERROR_CHARACTERS_MAX],
                body=body,
            )
        )
    is_last = len(page) == len(found)
    return DeadLetters(
        letters=letters,
        next=None if is_last else page[-1].id,
        scanned=len(scanned),
        is_complete=is_complete,
    )


def _matches(letter: fastness.Delivery, given: DeadLettersSearch) -> bool:
    if given.error is not None and given.error.lower() not in (letter.last_error or "").lower():
        return False
    return given.text is None or given.text.lower() in (letter.payload or b"").decode(errors="replace").lower()


class DeadLettersRedrive(ToolInput, frozen=True):
    queue: QueueName
    ids: Annotated[
        list[MessageId],
        Meta(description="The dead letters to try again.", min_length=1, max_length=MCP_LIST_MAX),
    ]


class Redriven(ToolOutput, frozen=True):
    redriven: Annotated[int, Meta(description="How many were put back; the others are no dead letters any more.")]


async def _redrive(caller: Caller, given: DeadLettersRedrive) -> Redriven:
    return Redriven(redriven=await caller.plane.queue(given.queue).redrive(given.ids))


TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    Tool(
        name="dead_letters_search",
        title="Search dead letters",
        description=(
            "Search the messages of a queue that failed too often or were rejected, by text of the body or of the last "
            f"error. One call searches the first {MCP_DEAD_LETTERS_SCANNED_MAX:,}; bodies over 16 KiB are not searched "
            "for text. Find the cause first, then call dead_letters_redrive with the ids that can succeed now."
        ),
        input=DeadLettersSearch,
        output=DeadLetters,
        call=_search,
        verbs=("queue:peek", "queue:policy.get", "queue:stats"),
        read_only=True,
    ),
    Tool(
        name="dead_letters_redrive",
        title="Retry dead letters",
        description=(
            "Put dead letters back into their queue, to be delivered again with no failures counted. Do it when the "
            "cause of the failures is gone; dead_letters_search has the ids."
        ),
        input=DeadLettersRedrive,
        output=Redriven,
        call=_redrive,
        verbs=("queue:redrive",),
        destructive=True,
    ),
)
