"""Sending mail: checks, deduplication by id, storage, and blocked senders."""

from fastness.errors import InvalidArgument, MailboxFull, PayloadTooLarge, SenderBlocked
from fastness.kv import Transaction
from fastness.layers import agents
from fastness.layers.mailboxes.expiry import expire, remove_expired
from fastness.layers.mailboxes.keys import (
    SEQUENCE_BYTES,
    SLOT_MS,
    Address,
    Box,
    Mail,
    MailboxKeys,
    add_due,
    box_of,
    emit,
    encode,
    keys_of,
    mail_at,
    policy_of,
    save_after_removal,
)
from fastness.layers.mailboxes.receipts import write_receipts
from fastness.limits import BLOCKS_MAX, CONTENT_TYPE_CHARACTERS_MAX, MAIL_BYTES_MAX, MAIL_ID_CHARACTERS_MAX
from fastness.plurals import counted
from fastness.wire.mail import CONFIRMED, STORED, NewMail


def send(tx: Transaction, sender: Address, to: Address, new: NewMail) -> tuple[str, bool]:
    """Store a mail; returns its id, and whether it is a duplicate of pending mail.

    Mail for an agent that is bound to a world goes to the world's inbox instead, and counts as confirmed.

    Raises:
        MailboxFull: the mailbox holds as many mails as its policy allows.
        SenderBlocked: the recipient blocks the sender.
        PayloadTooLarge, InvalidArgument: the mail is invalid, or another sender's pending mail has its id.
    """
    check(new)
    keys, home, policy, now_ms = keys_of(to), keys_of(sender), policy_of(tx, to.universe), tx.now_ms
    author = home.address
    id = new.id or str(tx.new_id())
    box = box_of(tx, keys)
    if box.may_block:
        if tx.get(keys.block_key(sender)) is not None:
            emit(tx, "rejected", to, id, author)
            raise SenderBlocked(f"{to} blocks mail from {sender}; nothing was stored")
        if not box.next:  # The first mail; from here on `block` updates `may_block`.
            box.may_block = bool(tx.scan(*keys.blocked, limit=1))
    if (position := tx.get(keys.id_key(id))) is not None and _is_pending(tx, to, box, position, author):
        return id, True
    correlation_id = new.correlation_id or id
    world = agents.world_of(tx, to.universe, to.agent)
    if world is not None:
        agents.enqueue_mail(tx, world, new, sender=author, id=id, correlation_id=correlation_id)
        write_receipts(tx, home, [(id, False)], to=keys.address, state=CONFIRMED)
        emit(tx, "confirmed", to, id, author)
        return id, False
    if box.count >= policy.pending_max:
        expire(tx, to, keys, box)
    if box.count >= policy.pending_max:
        emit(tx, "rejected", to, id, author)
        raise MailboxFull(
            f"The mailbox of {to} is full with {counted(box.count, 'mail')} (pending_max of its universe's mail "
            "policy); nothing was stored. Send it again when some of them are confirmed"
        )
    expires_ms = now_ms + round(policy.ttl_seconds * 1_000)
    early = expires_ms < box.latest_ms
    _store(tx, keys, box, Mail(id, author, new.body, new.content_type, correlation_id, now_ms, expires_ms, early))
    write_receipts(tx, home, [(id, False)], to=keys.address, state=STORED)
    emit(tx, "stored", to, id, author)
    return id, False


def _is_pending(tx: Transaction, to: Address, box: Box, position: bytes, author: str) -> bool:
    """Whether the mail at this sequence is pending mail of the same author. Removes it if it has expired."""
    keys, sequence = keys_of(to), int.from_bytes(position, "big")
    known = mail_at(tx, keys, sequence)
    if known.expires_ms <= tx.now_ms:
        remove_expired(tx, to, box, sequence, known)
        save_after_removal(tx, keys, box)
        return False
    if known.sender != author:
        emit(tx, "rejected", to, known.id, author)
        raise InvalidArgument(
            f"{known.id!r} is the id of another sender's pending mail to {to}; nothing was stored. "
            "Choose another id, such as a UUIDv7"
        )
    return True


def _store(tx: Transaction, keys: MailboxKeys, box: Box, mail: Mail) -> None:
    box.may_expire_early = mail.early or (box.may_expire_early and box.count > 0)
    tx.put(keys.mail_key(box.next), encode(mail))
    tx.put(keys.id_key(mail.id), box.next.to_bytes(SEQUENCE_BYTES, "big"))
    if mail.early:
        tx.put(keys.early_key(mail.expires_ms, box.next), b"")
    else:
        box.latest_ms = mail.expires_ms
    box.next += 1
    box.count += 1
    if mail.expires_ms // SLOT_MS != box.due_slot:
        box.due_slot = add_due(tx, keys, mail.expires_ms)
    tx.put(keys.box, encode(box))


def block(tx: Transaction, address: Address, sender: Address, *, blocked: bool = True) -> None:
    """Block a sender's mail from now on, or accept it again.

    Raises:
        InvalidArgument: the mailbox blocks as many senders as allowed.
    """
    keys = keys_of(address)
    key = keys.block_key(sender)
    if not blocked:
        tx.delete(key)
        return
    if tx.get(key) is None and len(tx.scan(*keys.blocked, limit=BLOCKS_MAX)) >= BLOCKS_MAX:
        raise InvalidArgument(f"{address} blocks {BLOCKS_MAX} senders, the maximum; unblock some of them first")
    tx.put(key, tx.now_ms.to_bytes(8, "big"))
    box = box_of(tx, keys)
    if not box.may_block:
        box.may_block = True
        tx.put(keys.box, encode(box))


def blocks(tx: Transaction, address: Address, *, after: str, limit: int) -> list[str]:
    """At most `limit` blocked senders after `after`, in order."""
    prefix, end = keys_of(address).blocked
    pairs = tx.scan(prefix + after.encode(errors="replace") + b"\x00", end, limit=limit)
    return [key[len(prefix) :].decode() for key, _ in pairs]


def check(new: NewMail) -> None:
    """Check what the outcome of a mail says, not that of its batch.

    Raises:
        PayloadTooLarge: its body is too long.
        InvalidArgument: another field is invalid.
    """
    if len(new.body) > MAIL_BYTES_MAX:
        raise PayloadTooLarge(
            f"A mail's body has at most {MAIL_BYTES_MAX} bytes, not {len(new.body)}; store a blob and send its hash"
        )
    if new.id is not None:
        check_id(new.id)
    if (
        not new.content_type.isascii()
        or not new.content_type.isprintable()
        or len(new.content_type) > CONTENT_TYPE_CHARACTERS_MAX
    ):
        raise InvalidArgument(f"{new.content_type!r} is not a content type; use one like application/json")


def check_id(id: str) -> None:
    """Check a mail id.

    Raises:
        InvalidArgument: it is empty, too long, or not printable ASCII.
    """
    if not 0 < len(id) <= MAIL_ID_CHARACTERS_MAX or not id.isascii() or not id.isprintable():
        raise InvalidArgument(
            f"{id!r} is not a mail id; use 1 to {MAIL_ID_CHARACTERS_MAX} printable ASCII characters, such as a UUIDv7"
        )
