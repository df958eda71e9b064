"""Sending: what is checked before a mail is stored, and who is refused."""

from holdfast.errors import InvalidArgument, MailboxFull, PayloadTooLarge, SenderBlocked
from holdfast.kv import Transaction
from holdfast.layers import agents
from holdfast.layers.mailboxes import receipts
from holdfast.layers.mailboxes.expiry import expire, forget
from holdfast.layers.mailboxes.keys import (
    SEQUENCE_BYTES,
    SLOT_MS,
    Address,
    Box,
    Mail,
    MailboxKeys,
    box_of,
    emit,
    encode,
    keys_of,
    mail_at,
    note_due,
    policy_of,
    save_behind_the_first,
)
from holdfast.layers.states import check_correlation_id
from holdfast.limits import BLOCKS_MAX, CONTENT_TYPE_CHARACTERS_MAX, MAIL_BYTES_MAX, MAIL_ID_CHARACTERS_MAX
from holdfast.wire.mail import CONFIRMED, STORED, NewMail


def send(tx: Transaction, sender: Address, to: Address, new: NewMail) -> tuple[str, bool]:
    """Store a mail; its id, and whether it had been stored under that id before.

    Mail for an agent that is bound to a world enters the world's inbox instead, and has arrived there.

    Raises:
        MailboxFull: the mailbox holds as many mails as it may.
        SenderBlocked: the recipient does not want it.
        PayloadTooLarge, InvalidArgument: it is no mail, or another sender's has its id.
    """
    check(new)
    keys, home, policy, now_ms = keys_of(to), keys_of(sender), policy_of(tx, to.universe), tx.now_ms
    author = home.address
    id = new.id or str(tx.new_id())
    box = box_of(tx, keys)
    if box.may_refuse:
        if tx.get(keys.block_key(sender)) is not None:
            emit(tx, "mail.rejected", to, id, author)
            raise SenderBlocked(f"{to} does not want mail of {sender}; nothing was stored")
        if not box.next:  # Its first mail: from here on `block` says so.
            box.may_refuse = bool(tx.scan(*keys.blocked, limit=1))
    if (place := tx.get(keys.id_key(id))) is not None and _waits(tx, to, box, place, author):
        return id, True
    correlation_id = new.correlation_id or id
    world = agents.world_of(tx, to.universe, to.agent)
    if world is not None:
        agents.enter(tx, world, new, sender=author, id=id, correlation_id=correlation_id)
        receipts.write(tx, home, [(id, False)], to=keys.address, state=CONFIRMED)
        emit(tx, "mail.confirmed", to, id, author)
        return id, False
    if box.count >= policy.pending_max:
        expire(tx, to, keys, box)
    if box.count >= policy.pending_max:
        emit(tx, "mail.rejected", to, id, author)
        raise MailboxFull(
            f"The mailbox of {to} holds {box.count} mails, as many as it may (pending_max of its universe's mail "
            "policy); nothing was stored. Send it again when some of them are confirmed"
        )
    expires_ms = now_ms + round(policy.ttl_seconds * 1_000)
    early = expires_ms < box.latest_ms
    _store(tx, keys, box, Mail(id, author, new.body, new.content_type, correlation_id, now_ms, expires_ms, early))
    receipts.write(tx, home, [(id, False)], to=keys.address, state=STORED)
    emit(tx, "mail.stored", to, id, author)
    return id, False


def _waits(tx: Transaction, to: Address, box: Box, place: bytes, author: str) -> bool:
    """Whether the mail at that place is its author's and still waits; if its time is over it makes room."""
    keys, sequence = keys_of(to), int.from_bytes(place, "big")
    known = mail_at(tx, keys, sequence)
    if known.expires_ms <= tx.now_ms:
        forget(tx, to, box, sequence, known)
        save_behind_the_first(tx, keys, box)
        return False
    if known.sender != author:
        emit(tx, "mail.rejected", to, known.id, author)
        raise InvalidArgument(
            f"{known.id!r} is the id of somebody else's mail that waits for {to}; nothing was stored. "
            "Choose another one, best a UUIDv7"
        )
    return True


def _store(tx: Transaction, keys: MailboxKeys, box: Box, mail: Mail) -> None:
    tx.put(keys.mail_key(box.next), encode(mail))
    tx.put(keys.id_key(mail.id), box.next.to_bytes(SEQUENCE_BYTES, "big"))
    if mail.early:
        tx.put(keys.early_key(mail.expires_ms, box.next), b"")
    else:
        box.latest_ms = mail.expires_ms
    box.next += 1
    box.count += 1
    if mail.expires_ms // SLOT_MS != box.due_slot:
        box.due_slot = note_due(tx, keys, mail.expires_ms)
    tx.put(keys.box, encode(box))


def block(tx: Transaction, address: Address, sender: Address, *, blocked: bool = True) -> None:
    """Refuse what `sender` sends from now on, or accept it again.

    Raises:
        InvalidArgument: the mailbox blocks as many senders as it may.
    """
    keys = keys_of(address)
    key = keys.block_key(sender)
    if not blocked:
        tx.delete(key)
        return
    if tx.get(key) is None and len(tx.scan(*keys.blocked, limit=BLOCKS_MAX)) >= BLOCKS_MAX:
        raise InvalidArgument(f"{address} blocks {BLOCKS_MAX} senders, as many as it may; accept some of them again")
    tx.put(key, tx.now_ms.to_bytes(8, "big"))
    box = box_of(tx, keys)
    if not box.may_refuse:
        box.may_refuse = True
        tx.put(keys.box, encode(box))


def blocks(tx: Transaction, address: Address, *, after: str, limit: int) -> list[str]:
    """At most `limit` senders whose mail is refused, in order, the first one behind `after`."""
    if not 0 < limit <= BLOCKS_MAX:
        raise InvalidArgument(f"A page has 1 to {BLOCKS_MAX} senders, not {limit}")
    prefix, end = keys_of(address).blocked
    pairs = tx.scan(prefix + after.encode(errors="replace") + b"\x00", end, limit=limit)
    return [key[len(prefix) :].decode() for key, _ in pairs]


def check(new: NewMail) -> None:
    """Refuse what is no mail, or could not be read again.

    Raises:
        PayloadTooLarge: its body is longer than one may be.
        InvalidArgument: another part of it is not what it should be.
    """
    if new.body.__class__ is not bytes:
        raise InvalidArgument(f"A mail's body is bytes, not {type(new.body).__name__}; encode it")
    if len(new.body) > MAIL_BYTES_MAX:
        raise PayloadTooLarge(
            f"A mail's body has at most {MAIL_BYTES_MAX} bytes, not {len(new.body)}; store a blob and send its hash"
        )
    if new.id is not None:
        check_id(new.id)
    if (
        new.content_type.__class__ is not str
        or not new.content_type.isascii()
        or not new.content_type.isprintable()
        or len(new.content_type) > CONTENT_TYPE_CHARACTERS_MAX
    ):
        raise InvalidArgument(f"{new.content_type!r} is no content type; use one like application/json")
    check_correlation_id(new.correlation_id)


def check_id(id: object) -> None:
    """Refuse what cannot be the id of a mail.

    Raises:
        InvalidArgument: it is empty, too long, or not printable ASCII.
    """
    if not isinstance(id, str) or not 0 < len(id) <= MAIL_ID_CHARACTERS_MAX or not id.isascii() or not id.isprintable():
        raise InvalidArgument(
            f"{id!r} is no id of a mail; use 1 to {MAIL_ID_CHARACTERS_MAX} printable ASCII characters, best a UUIDv7"
        )
