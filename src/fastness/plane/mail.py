"""Handlers of mail requests. A batch is answered mail by mail."""

from functools import lru_cache, partial
from typing import Protocol

from fastness.errors import (
    BatchTooLarge,
    Busy,
    EmptyBatch,
    InvalidArgument,
    InvalidName,
    NotAllowed,
    TransactionTooLarge,
    Validation,
    WorldNotActive,
    WorldNotFound,
)
from fastness.kv import Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.limits import MAIL_BATCH_MAX, MAIL_WAIT_SECONDS_MAX
from fastness.names import checked_agent, checked_name
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
    if not request.mails:
        raise EmptyBatch("The batch has no mails; send at least one")
    if len(request.mails) > MAIL_BATCH_MAX:
        raise BatchTooLarge(f"One batch sends at most {MAIL_BATCH_MAX} mails, not {len(request.mails)}; split it")
    sender = _checked_address(request.sender, request.universe)
    return SentMails([_send_one(tx, sender, mail, request) for mail in request.mails])


def _send_one(tx: Transaction, sender: Address, mail: NewMail, request: SendMail) -> SentMail:
    """Store one mail. The layer checks before it writes, so a refused mail has written nothing."""
    if not isinstance(mail, NewMail):
        raise InvalidArgument(f"A batch sends mails, not {type(mail).__name__}; make each a NewMail")
    try:
        to = _checked_address(mail.to, sender.universe)
        id, duplicate = mailboxes.send(tx, sender, to, mail)
    except TransactionTooLarge:  # It may occur after a write, and is caused by the whole batch.
        raise
    except (Validation, Busy, NotAllowed, WorldNotActive, WorldNotFound) as error:
        given = mail.id if isinstance(mail.id, str) else ""
        return SentMail(given, request.tier, code=error.code, detail=str(error))
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
    return stores.mail.read(_address(request), request, wait_ms=_wait_ms(request.wait_seconds))


@transaction
def confirm(tx: Transaction, request: ConfirmMail) -> Confirmed:
    if not request.ids:
        raise EmptyBatch("The batch has no mails; confirm at least one")
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
    return stores.mail.receipts(_address(request), request, wait_ms=_wait_ms(request.wait_seconds))


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
    universe = checked_name("universe", request.universe)
    after = checked_name("agent", request.after) if request.after else ""
    page = mailboxes.mailboxes(tx, universe, after=after, limit=request.limit)
    return Mailboxes(
        [MailboxSize(agent, found.pending, found.oldest_ms, found.box.session is not None) for agent, found in page]
    )


@transaction
def get_policy(tx: Transaction, request: GetMailPolicy) -> MailPolicy:
    return mailboxes.policy_of(tx, checked_name("universe", request.universe))


@transaction
def set_policy(tx: Transaction, request: SetMailPolicy) -> MailPolicy:
    return mailboxes.set_policy(tx, checked_name("universe", request.universe), request.policy)


class _OfAgent(Protocol):
    @property
    def agent(self) -> str: ...

    @property
    def universe(self) -> str: ...


def _address(request: _OfAgent) -> Address:
    return _checked_address(request.agent, request.universe)


def _checked_address(agent: str, universe: str) -> Address:
    if agent.__class__ is not str or universe.__class__ is not str:  # The cache would fail on unhashable values.
        raise InvalidName(f"{agent!r} in {universe!r} is not an address; give the names of an agent and a universe")
    return _known_address(agent, universe)


@lru_cache(maxsize=4_096)
def _known_address(agent: str, universe: str) -> Address:
    universe = checked_name("universe", universe)
    return Address(universe, checked_agent(agent, universe))


def _wait_ms(seconds: float) -> int:
    if not 0 <= seconds <= MAIL_WAIT_SECONDS_MAX:
        raise InvalidArgument(f"wait_seconds is {seconds}; give 0 (do not wait) to {MAIL_WAIT_SECONDS_MAX:.0f}")
    return round(seconds * 1_000)
