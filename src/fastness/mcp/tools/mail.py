"""Tools over mail. The mailbox is always the caller's own."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from fastness import Envelope
from fastness.limits import MAIL_ID_CHARACTERS_MAX, MCP_LIST_MAX, MCP_MAILS_MAX, NAME_BYTES_MAX
from fastness.mcp.caller import Caller
from fastness.mcp.contents import Content, Rest, body_of, content_of, shares
from fastness.mcp.tool import Tool, ToolInput, ToolOutput
from fastness.mcp.tools.fields import AfterName, BodyStart, IsBase64, Next, ShortText, WaitSeconds

_SEALED: Final = "application/vnd.fastness.sealed"  # The content type of encrypted mail.
_MAIL_ID: Final = Meta(description="The id of a mail, from mail_read.", min_length=1, max_length=MAIL_ID_CHARACTERS_MAX)


class MailSend(ToolInput, frozen=True):
    to: Annotated[
        str, Meta(description="The agent that gets the mail, as in mail_contacts.", max_length=NAME_BYTES_MAX)
    ]
    body: Annotated[Any, Meta(description="What to send: text or any other JSON value, at most 64 KiB.")]
    is_base64: IsBase64 = False
    thread: Annotated[
        ShortText | None,
        Meta(description="The thread that the mail belongs to. To answer a mail, give its thread."),
    ] = None
    idempotency_key: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAIL_ID_CHARACTERS_MAX)] | None,
        Meta(
            description="A name of your choice for this mail, unique for you. A repeated call with the same key sends "
            "no second mail until the first is confirmed.",
        ),
    ] = None


class MailSent(ToolOutput, frozen=True):
    id: Annotated[str, Meta(description="The id of the mail.")]
    duplicate: Annotated[bool, Meta(description="The mail had been sent before, and was not sent again.")]
    durability: Annotated[str, Meta(description="CRITICAL: it is on disk.")]


async def _send(caller: Caller, given: MailSend) -> MailSent:
    body = body_of(given.body, is_base64=given.is_base64)
    mailbox = caller.plane.mailbox(caller.agent)
    sent = await mailbox.send(given.to, body, id=given.idempotency_key, correlation_id=given.thread)
    return MailSent.of(sent, durability=sent.durability.name)


class MailRead(ToolInput, frozen=True):
    limit: Annotated[int, Meta(description="How many mails at most.", ge=1, le=MCP_MAILS_MAX)] = 10
    after: Annotated[int, Meta(description="Only mails after this `sequence`; -1 for all.", ge=-1, le=2**53)] = -1
    wait_seconds: WaitSeconds = 0.0
    body_start: BodyStart = 0


class Mail(ToolOutput, frozen=True):
    id: Annotated[str, Meta(description="For mail_confirm.")]
    sequence: Annotated[int, Meta(description="Its position in your mailbox; give the last one as `after` to go on.")]
    sender: Annotated[str, Meta(description="The agent that sent it, with its universe.")]
    thread: Annotated[str, Meta(description="Its thread; give it to mail_send to answer.")]
    sent_at: Annotated[str, Meta(description="When it was sent, in UTC.")]
    expires_at: Annotated[str, Meta(description="When it is removed if you do not confirm it.")]
    body: Content
    is_sealed: Annotated[bool, Meta(description="The body is encrypted, and this server cannot read it.")]


class Mails(ToolOutput, frozen=True):
    mails: Annotated[list[Mail], Meta(description="The oldest first. The same ones come again until confirmed.")]
    waiting: Annotated[int, Meta(description="How many mails your mailbox has, with these.")]


async def _read(caller: Caller, given: MailRead) -> Mails:
    mailbox = caller.plane.mailbox(caller.agent)
    found = await mailbox.read(after=given.after, limit=given.limit, wait_seconds=given.wait_seconds)
    return Mails(mails=shown_mails(found, given.body_start), waiting=await mailbox.count())


def shown_mails(mails: Sequence[Envelope], body_start: int = 0) -> list[Mail]:
    """Mails of one answer, with as much of each body as the answer can have."""
    found = []
    for mail, limit in zip(mails, shares([len(mail.body) for mail in mails], body_start), strict=True):
        rest = _rest_of_mail(mail.sequence)
        found.append(
            Mail.of(
                mail,
                thread=mail.correlation_id,
                body=content_of(mail.body, mail.content_type, rest=rest, start=body_start, limit=limit),
                is_sealed=mail.content_type == _SEALED,
            )
        )
    return found


def _rest_of_mail(sequence: int) -> Rest:
    return lambda end: f"Call mail_read with after={sequence - 1}, limit=1, body_start={end}."


class MailConfirm(ToolInput, frozen=True):
    ids: Annotated[
        list[Annotated[str, _MAIL_ID]],
        Meta(description="The mails that you have handled.", min_length=1, max_length=MCP_MAILS_MAX),
    ]


class MailConfirmed(ToolOutput, frozen=True):
    confirmed: Annotated[int, Meta(description="How many were removed; the others had been confirmed before.")]


async def _confirm(caller: Caller, given: MailConfirm) -> MailConfirmed:
    return MailConfirmed(confirmed=await caller.plane.mailbox(caller.agent).confirm(given.ids))


class MailContacts(ToolInput, frozen=True):
    after: AfterName = ""
    limit: Annotated[int, Meta(description="How many agents at most.", ge=1, le=MCP_LIST_MAX)] = MCP_LIST_MAX


class Contact(ToolOutput, frozen=True):
    name: Annotated[str, Meta(description="Give it to mail_send as `to`.")]
    is_registered: Annotated[bool, Meta(description="Whether the agent is registered, or only has a mailbox.")]
    has_key: Annotated[bool, Meta(description="Whether it has a public key, so that mail to it can be sealed.")]


class Contacts(ToolOutput, frozen=True):
    agents: Annotated[list[Contact], Meta(description="In the order of their names.")]
    next: Next


async def _contacts(caller: Caller, given: MailContacts) -> Contacts:
    agents = await caller.plane.agents.known(after=given.after, limit=given.limit)
    found = {
        agent.name: Contact(name=agent.name, is_registered=True, has_key=agent.public_key is not None)
        for agent in agents
    }
    boxes = await caller.plane.mailboxes(after=given.after, limit=given.limit)
    for box in boxes:
        found.setdefault(box.agent, Contact(name=box.agent, is_registered=False, has_key=False))
    names = sorted(found)[: given.limit]
    is_last = len(agents) < given.limit and len(boxes) < given.limit and len(names) == len(found)
    return Contacts(agents=[found[name] for name in names], next=None if is_last or not names else names[-1])


TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    Tool(
        name="mail_send",
        title="Send mail",
        description=(
            "Send a mail to another agent. It is stored until the agent confirms it, also while the agent is away. "
            "Use it to ask, answer or hand something over; use queue_put for work that any agent may take. "
            "mail_contacts lists the agents: mail to a name that no agent has is kept, and not read."
        ),
        input=MailSend,
        output=MailSent,
        call=_send,
        verbs=("mail:send",),
    ),
    Tool(
        name="mail_read",
        title="Read mail",
        description=(
            "Read the oldest mails of your own mailbox. They stay there until you call mail_confirm with their ids: "
            "do that when you have handled them. With wait_seconds the call waits for the first mail."
        ),
        input=MailRead,
        output=Mails,
        call=_read,
        verbs=("mail:read", "mail:count"),
        read_only=True,
    ),
    Tool(
        name="mail_confirm",
        title="Confirm mail",
        description=(
            "Confirm mails that you have handled. They are removed from your mailbox, and their senders can see it. "
            "Confirming a mail twice is fine."
        ),
        input=MailConfirm,
        output=MailConfirmed,
        call=_confirm,
        verbs=("mail:confirm",),
        destructive=True,
        idempotent=True,
    ),
    Tool(
        name="mail_contacts",
        title="List agents",
        description="List the agents that can get mail. Use it to find the exact name for mail_send.",
        input=MailContacts,
        output=Contacts,
        call=_contacts,
        verbs=("agent:list", "mail:list"),
        read_only=True,
    ),
)
