"""Receipts: the delivery state of the mail that an agent has sent, in order, kept as long as mail.

A receipt is written in the commit that changes the mail's state, whether its sender is connected or not. A sender that
comes back reads on after the last receipt it has seen, and misses none. If a sender never reads its receipts, the
oldest are deleted.
"""

from collections.abc import Iterable

import msgspec

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers.mailboxes.keys import (
    SLOT_MS,
    Address,
    MailboxKeys,
    add_due,
    encode,
    keys_of,
    outgoing_of,
    policy_of,
    read_sequences,
)
from fastness.limits import RECEIPTS_MAX
from fastness.wire.mail import MailReceipt

decode = msgspec.msgpack.Decoder(MailReceipt).decode


def write_receipts(
    tx: Transaction, keys: MailboxKeys, mails: Iterable[tuple[str, bool]], *, to: str, state: str
) -> None:
    """Write receipts to a sender for mails to one recipient, each given by its id and whether it had been stored."""
    now_ms, outgoing = tx.now_ms, outgoing_of(tx, keys)
    sequence = outgoing.next
    for id, was_stored in mails:
        receipt = MailReceipt(sequence, id, to, state, now_ms, was_stored)
        tx.put(keys.receipt_key(sequence), encode(receipt))
        sequence += 1
    outgoing.next = sequence
    while sequence - outgoing.first > RECEIPTS_MAX:
        tx.delete(keys.receipt_key(outgoing.first))
        outgoing.first += 1
    expires_ms = now_ms + round(policy_of(tx, keys.universe).ttl_seconds * 1_000)
    if expires_ms // SLOT_MS != outgoing.due_slot:
        outgoing.due_slot = add_due(tx, keys, expires_ms)
    tx.put(keys.outgoing, encode(outgoing))


def receipts(tx: Transaction, address: Address, *, after: int, limit: int) -> list[MailReceipt]:
    """At most `limit` receipts for the agent's sent mail, after the sequence `after`.

    Raises:
        InvalidArgument: no receipt ever had the sequence `after`.
    """
    keys = keys_of(address)
    outgoing = outgoing_of(tx, keys)
    if not -1 <= after < outgoing.next:
        raise InvalidArgument(f"{after!r} is not a receipt's sequence; pass one that was returned, or -1")
    begin = max(after + 1, outgoing.first)
    return [decode(value) for _, value in read_sequences(tx, keys.receipt, begin, outgoing.next, limit=limit)]


def mark_receipts_seen(tx: Transaction, address: Address, sequence: int) -> None:
    """Record that the agent has seen its receipts up to `sequence`. A lower sequence than before changes nothing.

    Raises:
        InvalidArgument: no receipt ever had that sequence.
    """
    keys = keys_of(address)
    outgoing = outgoing_of(tx, keys)
    if not -1 <= sequence < outgoing.next:
        raise InvalidArgument(f"{sequence!r} is not a receipt's sequence; pass the last one that was seen")
    if sequence > outgoing.seen:
        outgoing.seen = sequence
        tx.put(keys.outgoing, encode(outgoing))
