"""Reading: who reads a mailbox, what it is given, and how mail leaves it."""

from collections.abc import Sequence
from typing import Final

from holdfast.errors import BatchTooLarge, InvalidArgument, MailboxTaken
from holdfast.kv import Subspace, Transaction
from holdfast.layers.mailboxes import receipts
from holdfast.layers.mailboxes.keys import (
    Address,
    Box,
    Mail,
    MailboxKeys,
    box_of,
    decode_mail,
    emit,
    encode,
    keys_of,
    outgoing_of,
    remove,
    room_at,
    save_behind_the_first,
    stored_from,
)
from holdfast.layers.mailboxes.sending import check_id
from holdfast.layers.worlds import first_elements
from holdfast.limits import MAIL_BATCH_MAX
from holdfast.wire.mail import CONFIRMED, DELIVERED, Envelope

_NO_BOUND: Final = 1 << 62
_BySender = dict[str, list[tuple[str, bool]]]  # The ids of mails, and whether each was stored.


def join(tx: Transaction, address: Address, session: str) -> tuple[int, int]:
    """Make `session` the mailbox's only reader: how many mails wait for it, and up to where it has seen receipts."""
    check_id(session)
    keys = keys_of(address)
    box = box_of(tx, keys)
    box.session, box.live_from = session, None
    tx.put(keys.box, encode(box))
    tx.put(keys.reader, session.encode())
    return box.count, outgoing_of(tx, keys).seen


def leave(tx: Transaction, address: Address, session: str) -> None:
    """Stop being the reader; of no effect if somebody else is."""
    keys = keys_of(address)
    box = box_of(tx, keys)
    if box.session == session:
        box.session = box.live_from = None
        tx.put(keys.box, encode(box))
        tx.delete(keys.reader)


def deliver(
    tx: Transaction,
    address: Address,
    *,
    after: int,
    limit: int,
    session: str | None = None,
    bytes_max: int | None = None,
) -> tuple[list[Envelope], int | None]:
    """At most `limit` mails behind the sequence `after`, and from which sequence on they are live, if they are.

    With `bytes_max` there are no more of them once their bodies have so many bytes. Senders are told when their mail is
    delivered for the first time.

    Raises:
        MailboxTaken: `session` does not read this mailbox any more.
        InvalidArgument: no mail ever had the sequence `after`.
    """
    keys = keys_of(address)
    box = box_of(tx, keys)
    if session is not None and box.session != session:
        raise MailboxTaken(f"Somebody else reads the mailbox of {address} now; stop, or join it again")
    found, is_all = _read(tx, keys, box, after=after, limit=limit, bytes_max=bytes_max)
    behind = found[-1].sequence + 1 if found else 0
    changed = False
    if behind > box.delivered:
        news: _BySender = {}
        for envelope in found:
            if envelope.sequence >= box.delivered:
                news.setdefault(envelope.sender, []).append((envelope.id, False))
                emit(tx, "mail.delivered", address, envelope.id, envelope.sender)
        for sender, mails in news.items():
            receipts.write(tx, room_at(sender), mails, to=keys.address, state=DELIVERED)
        box.delivered, changed = behind, True
    if session is not None and box.live_from is None and is_all:
        box.live_from, changed = box.next, True
    elif session is not None and box.live_from is not None and behind > box.live_to:
        box.live_to, changed = behind, True
    if changed:
        tx.put(keys.box, encode(box))
    return found, None if session is None else box.live_from


def peek(tx: Transaction, address: Address, *, after: int, limit: int) -> list[Envelope]:
    """At most `limit` mails behind the sequence `after`; nobody is told."""
    keys = keys_of(address)
    return _read(tx, keys, box_of(tx, keys), after=after, limit=limit)[0]


def confirm(tx: Transaction, address: Address, ids: Sequence[str]) -> int:
    """Remove mails that have arrived, and tell their senders; how many of them were still there.

    Raises:
        BatchTooLarge, InvalidArgument: there are too many, or one is no id.
    """
    if len(ids) > MAIL_BATCH_MAX:
        raise BatchTooLarge(f"One confirmation names at most {MAIL_BATCH_MAX} mails, not {len(ids)}; split it")
    for id in ids:
        check_id(id)
    keys = keys_of(address)
    box, removed, news = box_of(tx, keys), 0, _BySender()
    for id in ids:
        place = tx.get(keys.id_key(id))
        stored = None if place is None else tx.get(keys.mail + place)
        if place is None or stored is None:
            continue
        mail, sequence = decode_mail(stored), int.from_bytes(place, "big")
        remove(tx, keys, box, sequence, mail)
        was_stored = box.live_from is None or not box.live_from <= sequence < box.live_to
        news.setdefault(mail.sender, []).append((id, was_stored))
        emit(tx, "mail.confirmed", address, id, mail.sender)
        removed += 1
    for sender, mails in news.items():
        receipts.write(tx, room_at(sender), mails, to=keys.address, state=CONFIRMED)
    if removed:
        save_behind_the_first(tx, keys, box)
    return removed


def count(tx: Transaction, address: Address) -> tuple[Box, int | None]:
    """What is known of a mailbox, and when its oldest mail came."""
    keys = keys_of(address)
    box = box_of(tx, keys)
    first = tx.scan(*keys.mails_from(box.first), limit=1) if box.count else []
    return box, decode_mail(first[0][1]).sent_ms if first else None


def mailboxes(tx: Transaction, universe: str, *, after: str, limit: int) -> list[tuple[str, Box, int | None]]:
    """At most `limit` agents that ever sent or got mail, in the order of their names, each with its `count`."""
    if not 0 < limit <= MAIL_BATCH_MAX:
        raise InvalidArgument(f"A page has 1 to {MAIL_BATCH_MAX} mailboxes, not {limit}")
    names = first_elements(tx, Subspace("u", universe, "mail"), after, limit)
    return [(agent, *count(tx, Address(universe, agent))) for agent in names]


def _read(
    tx: Transaction, keys: MailboxKeys, box: Box, *, after: int, limit: int, bytes_max: int | None = None
) -> tuple[list[Envelope], bool]:
    """Mails behind a sequence, and whether that is certain to be all of them."""
    if limit.__class__ is not int or not 0 < limit <= MAIL_BATCH_MAX:
        raise InvalidArgument(f"A read takes 1 to {MAIL_BATCH_MAX} mails, not {limit!r}")
    if after.__class__ is not int or not -1 <= after < box.next:
        raise InvalidArgument(f"{after!r} is no mail's sequence; read behind one that was returned, or behind -1")
    now_ms, found = tx.now_ms, list[Envelope]()
    begin, batch, left = max(after + 1, box.first), limit, _NO_BOUND if bytes_max is None else bytes_max
    # What is over and not swept yet is passed over, so one look may leave less than was asked for and more behind it.
    while begin < box.next and (stored := stored_from(tx, keys.mail, begin, box.next, limit=batch)):
        for sequence, value in stored:
            mail = decode_mail(value)
            if mail.expires_ms > now_ms:
                found.append(_envelope(sequence, keys.address, mail))
                left -= len(mail.body)
                if len(found) == limit or left <= 0:
                    return found, False
        if len(stored) < batch:
            break
        begin, batch = stored[-1][0] + 1, MAIL_BATCH_MAX
    return found, True


def _envelope(sequence: int, to: str, mail: Mail) -> Envelope:
    return Envelope(
        sequence,
        mail.id,
        mail.sender,
        to,
        mail.body,
        mail.content_type,
        mail.correlation_id,
        mail.sent_ms,
        mail.expires_ms,
    )
