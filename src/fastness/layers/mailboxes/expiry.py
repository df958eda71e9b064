"""Expiry: removes expired mail and receipts in bounded steps, driven by the due index."""

from collections.abc import Sequence

from fastness.kv import Transaction
from fastness.layers.mailboxes.keys import (
    SEQUENCE_BYTES,
    SLOT_MS,
    Address,
    Box,
    Mail,
    MailboxKeys,
    add_due,
    box_of,
    decode_mail,
    due_prefix,
    emit,
    encode,
    keys_of,
    mail_at,
    outgoing_of,
    policy_of,
    read_sequences,
    remove,
    save_after_removal,
)
from fastness.layers.mailboxes.receipts import decode as decode_receipt
from fastness.limits import MAIL_EXPIRED_UNCOUNTED_MAX, MAIL_SWEEP_BATCH, MAIL_SWEEP_MAILBOXES


def due_entries(tx: Transaction, universe: str) -> list[bytes]:
    """The keys of a few due entries whose mailboxes `sweep` should check."""
    due = due_prefix(universe)
    found = tx.scan(due, due + (tx.now_ms // SLOT_MS).to_bytes(8, "big"), limit=MAIL_SWEEP_MAILBOXES)
    return [key for key, _ in found]


def sweep(tx: Transaction, universe: str, entries: Sequence[bytes]) -> dict[str, int]:
    """Remove expired mail and receipts of the mailboxes of due entries; returns the number of mails per agent.

    A sender gets no receipt for mail that expires. The entries may be out of date: they are read before, because the
    index has the mailboxes of all agents, and a transaction should touch only those that it sweeps.
    """
    due, counts, left = due_prefix(universe), dict[str, int](), MAIL_SWEEP_BATCH
    for key in entries:
        if tx.get(key) is None:
            continue
        address = Address(universe, key[len(due) + 8 :].decode())
        keys = keys_of(address)
        expired = expire(tx, address, keys, box_of(tx, keys), limit=left)
        removed = _remove_expired_receipts(tx, address, keys, limit=left)
        if expired:
            counts[address.agent] = counts.get(address.agent, 0) + expired
        left -= max(expired, removed)
        if not left:  # This mailbox may have more.
            break
        tx.delete(key)
        _reset_due_slot(tx, keys, int.from_bytes(key[len(due) : len(due) + 8], "big"))
    return counts


def _reset_due_slot(tx: Transaction, keys: MailboxKeys, slot: int) -> None:
    """Forget that a slot has a due entry. After a clock is set back, the slot may be used again."""
    box, outgoing = box_of(tx, keys), outgoing_of(tx, keys)
    if box.due_slot == slot:
        box.due_slot = -1
        tx.put(keys.box, encode(box))
    if outgoing.due_slot == slot:
        outgoing.due_slot = -1
        tx.put(keys.outgoing, encode(outgoing))


def expire(tx: Transaction, address: Address, keys: MailboxKeys, box: Box, *, limit: int = MAIL_SWEEP_BATCH) -> int:
    """Remove at most `limit` expired mails of a box; returns how many."""
    first = _first_expired(tx, keys, box, limit)
    for sequence, mail in first:
        remove_expired(tx, address, box, sequence, mail)
    expired = len(first)
    if box.count and expired < limit:
        early = tx.scan(keys.early, keys.early + (tx.now_ms + 1).to_bytes(8, "big"), limit=limit - expired)
        for key, _ in early:
            sequence = int.from_bytes(key[-SEQUENCE_BYTES:], "big")
            remove_expired(tx, address, box, sequence, mail_at(tx, keys, sequence))
            expired += 1
    if expired:
        save_after_removal(tx, keys, box)
    return expired


def count_pending(tx: Transaction, keys: MailboxKeys, box: Box) -> tuple[int, int | None]:
    """How many mails of a box have not expired, and when the oldest of them was sent.

    Expired mail is at the start of a box, so a box without any costs one get. The work is bounded: of very much expired
    mail, the rest counts until it is swept.
    """
    if not box.count or box.latest_ms <= tx.now_ms:
        return 0, None
    expired, begin, batch = 0, box.first, 1
    while stored := read_sequences(tx, keys.mail, begin, box.next, limit=batch):
        for sequence, value in stored:
            mail = decode_mail(value)
            if mail.expires_ms > tx.now_ms or expired == MAIL_EXPIRED_UNCOUNTED_MAX:
                return box.count - expired - _expired_early(tx, keys, box, after=sequence), mail.sent_ms
            expired += 1
        begin, batch = stored[-1][0] + 1, MAIL_SWEEP_BATCH
    return 0, None


def _expired_early(tx: Transaction, keys: MailboxKeys, box: Box, *, after: int) -> int:
    """How many mails after a sequence have expired before an earlier one."""
    if not box.may_expire_early:
        return 0
    end = keys.early + (tx.now_ms + 1).to_bytes(8, "big")
    found = tx.scan(keys.early, end, limit=MAIL_EXPIRED_UNCOUNTED_MAX)
    return sum(int.from_bytes(key[-SEQUENCE_BYTES:], "big") > after for key, _ in found)


def _first_expired(tx: Transaction, keys: MailboxKeys, box: Box, limit: int) -> list[tuple[int, Mail]]:
    """At most `limit` expired mails at the start of a box."""
    found: list[tuple[int, Mail]] = []
    begin, batch = box.first, 1  # Mails are large: reads a batch only if the first mail has expired.
    while box.count and len(found) < limit:
        stored = read_sequences(tx, keys.mail, begin, box.next, limit=min(batch, limit - len(found)))
        for sequence, value in stored:
            mail = decode_mail(value)
            if mail.expires_ms > tx.now_ms:
                return found
            found.append((sequence, mail))
        if not stored:
            break
        begin, batch = stored[-1][0] + 1, limit
    return found


def remove_expired(tx: Transaction, address: Address, box: Box, sequence: int, mail: Mail) -> None:
    """Remove an expired mail, and emit the event. The caller saves the box with `save_after_removal`."""
    remove(tx, keys_of(address), box, sequence, mail)
    emit(tx, "expired", address, mail.id, mail.sender)


def _remove_expired_receipts(tx: Transaction, address: Address, keys: MailboxKeys, *, limit: int) -> int:
    outgoing = outgoing_of(tx, keys)
    ttl_ms = round(policy_of(tx, address.universe).ttl_seconds * 1_000)
    removed = 0
    for key, value in tx.scan(*keys.receipts_from(outgoing.first), limit=limit):
        at_ms = decode_receipt(value).at_ms
        if at_ms + ttl_ms > tx.now_ms:
            add_due(tx, keys, at_ms + ttl_ms)  # The due entry may come from another policy.
            break
        tx.delete(key)
        removed += 1
    if removed:
        outgoing.first += removed
        tx.put(keys.outgoing, encode(outgoing))
    return removed
