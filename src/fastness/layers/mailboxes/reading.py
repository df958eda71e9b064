"""Reading a mailbox: its single reader, delivery, and confirmation."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from fastness.errors import InvalidArgument, MailboxTaken
from fastness.kv import Subspace, Transaction
from fastness.layers.mailboxes.expiry import count_pending
from fastness.layers.mailboxes.keys import (
    Address,
    Box,
    Mail,
    MailboxKeys,
    box_of,
    decode_mail,
    emit,
    encode,
    keys_at,
    keys_of,
    outgoing_of,
    read_sequences,
    remove,
    save_after_removal,
)
from fastness.layers.mailboxes.receipts import write_receipts
from fastness.layers.worlds import first_elements
from fastness.limits import MAIL_BATCH_MAX
from fastness.wire.mail import CONFIRMED, DELIVERED, Envelope

_NO_BOUND: Final = 1 << 62
_BySender = dict[str, list[tuple[str, bool]]]  # Mail ids, and whether each had been stored.


def join(tx: Transaction, address: Address, session: str) -> tuple[int, int]:
    """Make `session` the mailbox's only reader; returns the number of deliverable mails, and its last seen receipt."""
    keys = keys_of(address)
    box = box_of(tx, keys)
    box.session, box.live_from = session, None
    tx.put(keys.box, encode(box))
    tx.put(keys.reader, session.encode())
    return count_pending(tx, keys, box)[0], outgoing_of(tx, keys).seen


def leave(tx: Transaction, address: Address, session: str) -> None:
    """Stop being the reader. Does nothing if another session is."""
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
    """At most `limit` mails after the sequence `after`, and from which sequence on the reader is live, if it is.

    With `bytes_max`, delivery stops once the bodies reach that many bytes. Senders get a receipt for the first delivery
    of their mail.

    Raises:
        MailboxTaken: another session reads this mailbox now.
        InvalidArgument: no mail ever had the sequence `after`.
    """
    keys = keys_of(address)
    box = box_of(tx, keys)
    if session is not None and box.session != session:
        raise MailboxTaken(f"Another session reads the mailbox of {address} now; stop, or join it again")
    found, is_all = _read(tx, keys, box, after=after, limit=limit, bytes_max=bytes_max)
    end = found[-1].sequence + 1 if found else 0
    changed = False
    if end > box.delivered:
        by_sender: _BySender = {}
        for envelope in found:
            if envelope.sequence >= box.delivered:
                by_sender.setdefault(envelope.sender, []).append((envelope.id, False))
                emit(tx, "delivered", address, envelope.id, envelope.sender)
        for sender, mails in by_sender.items():
            write_receipts(tx, keys_at(sender), mails, to=keys.address, state=DELIVERED)
        box.delivered, changed = end, True
    if session is not None and box.live_from is None and is_all:
        box.live_from, changed = box.next, True
    elif session is not None and box.live_from is not None and end > box.live_to:
        box.live_to, changed = end, True
    if changed:
        tx.put(keys.box, encode(box))
    return found, None if session is None else box.live_from


def peek(tx: Transaction, address: Address, *, after: int, limit: int) -> list[Envelope]:
    """At most `limit` mails after the sequence `after`, without receipts to their senders."""
    keys = keys_of(address)
    return _read(tx, keys, box_of(tx, keys), after=after, limit=limit)[0]


def confirm(tx: Transaction, address: Address, ids: Sequence[str]) -> int:
    """Remove confirmed mails, and write receipts to their senders; returns how many were still stored."""
    keys = keys_of(address)
    box, removed, by_sender = box_of(tx, keys), 0, _BySender()
    for id in ids:
        position = tx.get(keys.id_key(id))
        stored = None if position is None else tx.get(keys.mail + position)
        if position is None or stored is None:
            continue
        mail, sequence = decode_mail(stored), int.from_bytes(position, "big")
        remove(tx, keys, box, sequence, mail)
        was_stored = box.live_from is None or not box.live_from <= sequence < box.live_to
        by_sender.setdefault(mail.sender, []).append((id, was_stored))
        emit(tx, "confirmed", address, id, mail.sender)
        removed += 1
    for sender, mails in by_sender.items():
        write_receipts(tx, keys_at(sender), mails, to=keys.address, state=CONFIRMED)
    if removed:
        save_after_removal(tx, keys, box)
    return removed


class MailboxSummary(NamedTuple):
    """A mailbox: its header, its mails that can be delivered, and when the oldest of them was sent."""

    box: Box
    pending: int
    oldest_ms: int | None


def summary(tx: Transaction, address: Address) -> MailboxSummary:
    """A mailbox with the number of its mails that can be delivered. Expired mail does not count."""
    keys = keys_of(address)
    box = box_of(tx, keys)
    return MailboxSummary(box, *count_pending(tx, keys, box))


def mailboxes(tx: Transaction, universe: str, *, after: str, limit: int) -> list[tuple[str, MailboxSummary]]:
    """At most `limit` agents after `after` that ever sent or received mail, ordered by name, with a summary of each."""
    names = first_elements(tx, Subspace("u", universe, "mail"), after, limit)
    return [(agent, summary(tx, Address(universe, agent))) for agent in names]


def _read(
    tx: Transaction, keys: MailboxKeys, box: Box, *, after: int, limit: int, bytes_max: int | None = None
) -> tuple[list[Envelope], bool]:
    """Mails after a sequence, and whether these are certainly all of them."""
    if not -1 <= after < box.next:
        raise InvalidArgument(f"{after!r} is not a mail's sequence; pass one that was returned, or -1")
    now_ms, found = tx.now_ms, list[Envelope]()
    begin, batch, left = max(after + 1, box.first), limit, _NO_BOUND if bytes_max is None else bytes_max
    # Expired mail that was not swept yet is skipped, so one batch may yield fewer mails than `limit`.
    while begin < box.next and (stored := read_sequences(tx, keys.mail, begin, box.next, limit=batch)):
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
        sequence=sequence,
        id=mail.id,
        sender=mail.sender,
        to=to,
        body=mail.body,
        content_type=mail.content_type,
        correlation_id=mail.correlation_id,
        sent_ms=mail.sent_ms,
        expires_ms=mail.expires_ms,
    )
