"""Handlers of mail requests. A batch is answered mail by mail."""

from functools import lru_cache, partial
from typing import Protocol

from fastness.errors import (
    Busy,
    NotAllowed,
    TransactionTooLarge,
    Validation,
    WorldNotActive,
    WorldNotFound,
)
from fastness.kv import Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.names import checked_agent
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.mail_waiting import read_mail, read_receipts
from fastness.wire.mail import (
    Addresses,
    BlockSender,
    Confirmed,
    ConfirmMail,
    CountMail,
    GetMailPolicy,
    Joined,
    JoinMailbox,
    LeaveMailbox,
    ListBlocks,
    ListMailboxes,
    Mailboxes,
    MailboxSize,
    MailCount,
    MailPolicy,
    MailReceipts,
    Mails,
    NewMail,
    ReadMail,
    ReadReceipts,
    SeeReceipts,
    SendMail,
    SentMail,
    SentMails,
    SetMailPolicy,
)
from fastness.wire.requests import Committed


@transaction
def send(tx: Transaction, request: SendMail) -> SentMails:
    sender = _address_of(request.sender, request.universe)
    return SentMails([_send_one(tx, sender, mail, request) for mail in request.mails])


def _send_one(tx: Transaction, sender: Address, mail: NewMail, request: SendMail) -> SentMail:
    """Store one mail. The layer checks before it writes, so a refused mail has written nothing."""
    try:
        to = _address_of(mail.to, sender.universe)
        id, duplicate = mailboxes.send(tx, sender, to, mail)
    except TransactionTooLarge:  # It may occur after a write, and is caused by the whole batch.
        raise
    except (Validation, Busy, NotAllowed, WorldNotActive, WorldNotFound) as error:
        return SentMail(mail.id or "", request.tier, code=error.code, detail=str(error))
    return SentMail(id, request.tier, duplicate)


@transaction
def join(tx: Transaction, request: JoinMailbox) -> Joined:
    return Joined(*mailboxes.join(tx, _address(request), request.session))


@transaction
def leave(tx: Transaction, request: LeaveMailbox) -> Committed:
    mailboxes.leave(tx, _address(request), request.session)
    return Committed(request.tier)


def _read_without_waiting(tx: Transaction, request: ReadMail) -> Mails:
    return read_mail(tx, _address(request), request)


@partial(service, run_without_waiting=_read_without_waiting)
def read(stores: AnyStores, request: ReadMail) -> Served[Mails]:
    return stores.mail.read(_address(request), request, wait_ms=round(request.wait_seconds * 1_000))


@transaction
def confirm(tx: Transaction, request: ConfirmMail) -> Confirmed:
    return Confirmed(mailboxes.confirm(tx, _address(request), request.ids))


@transaction
def count(tx: Transaction, request: CountMail) -> MailCount:
    address = _address(request)
    box, pending, oldest_ms = mailboxes.summary(tx, address)
    return MailCount(pending, mailboxes.policy_of(tx, address.universe).pending_max, oldest_ms, box.session is not None)


def _receipts_without_waiting(tx: Transaction, request: ReadReceipts) -> MailReceipts:
    return read_receipts(tx, _address(request), request)


@partial(service, run_without_waiting=_receipts_without_waiting)
def receipts(stores: AnyStores, request: ReadReceipts) -> Served[MailReceipts]:
    return stores.mail.receipts(_address(request), request, wait_ms=round(request.wait_seconds * 1_000))


@transaction
def see(tx: Transaction, request: SeeReceipts) -> Committed:
    mailboxes.mark_receipts_seen(tx, _address(request), request.sequence)
    return Committed(request.tier)


@transaction
def block(tx: Transaction, request: BlockSender) -> Committed:
    address = _address(request)
    sender = Address(address.universe, checked_agent(request.sender, address.universe))
    mailboxes.block(tx, address, sender, blocked=request.blocked)
    return Committed(request.tier)


@transaction
def blocks(tx: Transaction, request: ListBlocks) -> Addresses:
    return Addresses(mailboxes.blocks(tx, _address(request), after=request.after, limit=request.limit))


@transaction
def names(tx: Transaction, request: ListMailboxes) -> Mailboxes:
    page = mailboxes.mailboxes(tx, request.universe, after=request.after, limit=request.limit)
    return Mailboxes(
        [MailboxSize(agent, found.pending, found.oldest_ms, found.box.session is not None) for agent, found in page]
    )


@transaction
def get_policy(tx: Transaction, request: GetMailPolicy) -> MailPolicy:
    return mailboxes.policy_of(tx, request.universe)


@transaction
def set_policy(tx: Transaction, request: SetMailPolicy) -> MailPolicy:
    return mailboxes.set_policy(tx, request.universe, request.policy)


class _OfAgent(Protocol):
    @property
    def agent(self) -> str: ...

    @property
    def universe(self) -> str: ...


def _address(request: _OfAgent) -> Address:
    return _address_of(request.agent, request.universe)


@lru_cache(maxsize=4_096)
def _address_of(agent: str, universe: str) -> Address:
    return Address(universe, checked_agent(agent, universe))
