"""Mail and agents over HTTP. The bodies of mails are base64 in JSON."""

from functools import partial
from typing import Final

from holdfast.server.http.endpoints import Endpoint, operation
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


_operation: Final = partial(operation, tag="mail")


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _operation("POST", "/v1/mail/send", SendMail, "Send mails of one sender; each has a result of its own."),
    _operation(
        "GET",
        "/v1/mail/policy",
        GetMailPolicy,
        "Read the mail policy: the capacity of mailboxes, and how long they keep mail.",
    ),
    _operation("PUT", "/v1/mail/policy", SetMailPolicy, "Set the mail policy."),
    _operation("GET", "/v1/mailboxes", ListMailboxes, "List the mailboxes, with the number of waiting mails in each."),
    _operation(
        "GET",
        _BOX,
        CountMail,
        "Describe a mailbox: the number of waiting mails, the age of the oldest, and its reader.",
    ),
    _operation("GET", _BOX + "/mail", ReadMail, "Read the mails after the sequence number `after`, in order."),
    _operation(
        "POST", _BOX + "/confirm", ConfirmMail, "Confirm the delivery of mails: remove them and send delivery receipts."
    ),
    _operation("POST", _BOX + "/join", JoinMailbox, "Become the only reader of the mailbox."),
    _operation("POST", _BOX + "/leave", LeaveMailbox, "Stop being the reader of the mailbox."),
    _operation("GET", _BOX + "/receipts", ReadReceipts, "Read the delivery receipts of mail that the agent has sent."),
    _operation("POST", _BOX + "/receipts", SeeReceipts, "Mark receipts as seen up to a sequence number."),
    _operation("GET", _BOX + "/blocks", ListBlocks, "List the blocked senders."),
    _operation("POST", _BOX + "/blocks", BlockSender, "Block or unblock a sender."),
    operation("GET", "/v1/agents", ListAgents, "List the registered agents.", tag="agents"),
    operation(
        "GET",
        "/v1/agents/{name}",
        GetAgent,
        "Read the key of an agent, and the world that receives its mail.",
        tag="agents",
    ),
    operation("PUT", "/v1/agents/{name}", RegisterAgent, "Register an agent.", tag="agents"),
)
