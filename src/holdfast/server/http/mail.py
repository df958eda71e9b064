"""Mail and agents over HTTP. Bodies of mail are base64 in JSON."""

from typing import Any, Final

from holdfast.server.http.endpoints import Endpoint, noun
from holdfast.wire.agents import GetAgent, ListAgents, RegisterAgent
from holdfast.wire.mail import (
    BlockSender,
    ConfirmMail,
    CountMail,
    GetMailPolicy,
    JoinMailbox,
    LeaveMailbox,
    ListBlocks,
    ListMailboxes,
    ReadMail,
    ReadReceipts,
    SeeReceipts,
    SendMail,
    SetMailPolicy,
)

_BOX: Final = "/v1/mailboxes/{agent}"


def _row(method: str, path: str, request: Any, summary: str, **options: Any) -> Endpoint:
    return noun(method, path, request, summary, of="mail", **options)


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _row("POST", "/v1/mail/send", SendMail, "Send mails of one sender; each is answered by itself"),
    _row("GET", "/v1/mail/policy", GetMailPolicy, "How many mails a mailbox holds, and for how long"),
    _row("PUT", "/v1/mail/policy", SetMailPolicy, "Let another policy hold for mail from now on"),
    _row("GET", "/v1/mailboxes", ListMailboxes, "Mailboxes, and how many mails wait in each"),
    _row("GET", _BOX, CountMail, "How many mails wait, since when, and whether anybody reads"),
    _row("GET", _BOX + "/mail", ReadMail, "Mails behind the sequence `after`, in order"),
    _row("POST", _BOX + "/confirm", ConfirmMail, "Mails have arrived: remove them, and tell their senders"),
    _row("POST", _BOX + "/join", JoinMailbox, "Become the mailbox's only reader"),
    _row("POST", _BOX + "/leave", LeaveMailbox, "Stop being the mailbox's reader"),
    _row("GET", _BOX + "/receipts", ReadReceipts, "What became of the mail that the agent has sent"),
    _row("POST", _BOX + "/receipts", SeeReceipts, "Receipts up to a sequence were seen"),
    _row("GET", _BOX + "/blocks", ListBlocks, "Senders whose mail is refused"),
    _row("POST", _BOX + "/blocks", BlockSender, "Refuse a sender's mail, or accept it again"),
    noun("GET", "/v1/agents", ListAgents, "Agents that are registered", of="agents"),
    noun("GET", "/v1/agents/{name}", GetAgent, "An agent's key, and the world that takes its mail", of="agents"),
    noun("PUT", "/v1/agents/{name}", RegisterAgent, "Register an agent", of="agents"),
)
