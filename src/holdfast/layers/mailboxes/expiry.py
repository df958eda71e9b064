"""Sweeps: mail and receipts whose time is over are forgotten, in bounded steps, without looking at anything else."""

from holdfast.kv import Transaction
from holdfast.layers.mailboxes import receipts
from holdfast.layers.mailboxes.keys import (
    SEQUENCE_BYTES,
    SLOT_MS,
    Address,
    Box,
    Mail,
    MailboxKeys,
    box_of,
    decode_mail,
    due_prefix,
    emit,
    encode,
    keys_of,
    mail_at,
    note_due,
    outgoing_of,
    policy_of,
    remove,
    save_behind_the_first,
    stored_from,
)
from holdfast.limits import MAIL_SWEEP_BATCH, MAIL_SWEEP_ROOMS


def sweep(tx: Transaction, universe: str) -> tuple[dict[str, int], bool]:
    """Forget what is over in a few rooms; how much mail of which agent, and whether there may be more to do.

    Mail expires in silence: its sender was told that it is stored, and is never told that it arrived.
    """
    due, counts, left = due_prefix(universe), dict[str, int](), MAIL_SWEEP_BATCH
    found = tx.scan(due, due + (tx.now_ms // SLOT_MS).to_bytes(8, "big"), limit=MAIL_SWEEP_ROOMS)
    for key, _ in found:
        address = Address(universe, key[len(due) + 8 :].decode())
        keys = keys_of(address)
        expired = expire(tx, address, keys, box_of(tx, keys), limit=left)
        forgotten = _forget_receipts(tx, address, keys, limit=left)
        if expired:
            counts[address.agent] = counts.get(address.agent, 0) + expired
        left -= max(expired, forgotten)
        if not left:  # There may be more in this room.
            break
        tx.delete(key)
        _forget_note(tx, keys, int.from_bytes(key[len(due) : len(due) + 8], "big"))
    return counts, bool(found)


def _forget_note(tx: Transaction, keys: MailboxKeys, slot: int) -> None:
    """What comes under a slot whose note is gone, because a clock was set back, is to be noted again."""
    box, outgoing = box_of(tx, keys), outgoing_of(tx, keys)
    if box.due_slot == slot:
        box.due_slot = -1
        tx.put(keys.box, encode(box))
    if outgoing.due_slot == slot:
        outgoing.due_slot = -1
        tx.put(keys.outgoing, encode(outgoing))


def expire(tx: Transaction, address: Address, keys: MailboxKeys, box: Box, *, limit: int = MAIL_SWEEP_BATCH) -> int:
    """Remove at most `limit` mails of a box whose time is over; how many there were."""
    over = _first_over(tx, keys, box, limit)
    for sequence, mail in over:
        forget(tx, address, box, sequence, mail)
    expired = len(over)
    if box.count and expired < limit:
        early = tx.scan(keys.early, keys.early + (tx.now_ms + 1).to_bytes(8, "big"), limit=limit - expired)
        for key, _ in early:
            sequence = int.from_bytes(key[-SEQUENCE_BYTES:], "big")
            forget(tx, address, box, sequence, mail_at(tx, keys, sequence))
            expired += 1
    if expired:
        save_behind_the_first(tx, keys, box)
    return expired


def _first_over(tx: Transaction, keys: MailboxKeys, box: Box, limit: int) -> list[tuple[int, Mail]]:
    """At most `limit` mails whose time is over, as far as they stand first."""
    found: list[tuple[int, Mail]] = []
    begin, batch = box.first, 1  # Mails are long: many are read only if the first one is over.
    while box.count and len(found) < limit:
        stored = stored_from(tx, keys.mail, begin, box.next, limit=min(batch, limit - len(found)))
        for sequence, value in stored:
            mail = decode_mail(value)
            if mail.expires_ms > tx.now_ms:
                return found
            found.append((sequence, mail))
        if not stored:
            break
        begin, batch = stored[-1][0] + 1, limit
    return found


def forget(tx: Transaction, address: Address, box: Box, sequence: int, mail: Mail) -> None:
    """Remove a mail whose time is over; the caller saves its box with `save_behind_the_first`."""
    remove(tx, keys_of(address), box, sequence, mail)
    emit(tx, "mail.expired", address, mail.id, mail.sender)


def _forget_receipts(tx: Transaction, address: Address, keys: MailboxKeys, *, limit: int) -> int:
    outgoing = outgoing_of(tx, keys)
    ttl_ms = round(policy_of(tx, address.universe).ttl_seconds * 1_000)
    forgotten = 0
    for key, value in tx.scan(*keys.receipts_from(outgoing.first), limit=limit):
        at_ms = receipts.decode(value).at_ms
        if at_ms + ttl_ms > tx.now_ms:
            note_due(tx, keys, at_ms + ttl_ms)  # The policy may have been another one when it was noted before.
            break
        tx.delete(key)
        forgotten += 1
    if forgotten:
        outgoing.first += forgotten
        tx.put(keys.outgoing, encode(outgoing))
    return forgotten
