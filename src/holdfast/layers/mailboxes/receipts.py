"""Receipts: what became of the mail that an agent has sent, in order, for as long as mail is kept.

A receipt is written in the commit that it tells of, whether its sender is there or not. So a sender that comes back
asks for what follows the last receipt that it has seen, and misses none. Of those that a sender never asks for, the
oldest are forgotten.
"""

from collections.abc import Iterable

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers.mailboxes.keys import (
    SLOT_MS,
    Address,
    MailboxKeys,
    encode,
    keys_of,
    note_due,
    outgoing_of,
    policy_of,
    stored_from,
)
from holdfast.limits import READ_ENTRIES_MAX, RECEIPTS_MAX
from holdfast.wire.mail import MailReceipt

decode = msgspec.msgpack.Decoder(MailReceipt).decode


def write(tx: Transaction, keys: MailboxKeys, mails: Iterable[tuple[str, bool]], *, to: str, state: str) -> None:
    """Tell a sender what became of mails to one recipient: of each its id, and whether it was stored."""
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
    over_ms = now_ms + round(policy_of(tx, keys.universe).ttl_seconds * 1_000)
    if over_ms // SLOT_MS != outgoing.due_slot:
        outgoing.due_slot = note_due(tx, keys, over_ms)
    tx.put(keys.outgoing, encode(outgoing))


def receipts(tx: Transaction, address: Address, *, after: int, limit: int) -> list[MailReceipt]:
    """At most `limit` receipts for what the agent has sent, behind the sequence `after`.

    Raises:
        InvalidArgument: no receipt ever had the sequence `after`.
    """
    if limit.__class__ is not int or not 0 < limit <= READ_ENTRIES_MAX:
        raise InvalidArgument(f"A read takes 1 to {READ_ENTRIES_MAX} receipts, not {limit!r}")
    keys = keys_of(address)
    outgoing = outgoing_of(tx, keys)
    if after.__class__ is not int or not -1 <= after < outgoing.next:
        raise InvalidArgument(f"{after!r} is no receipt's sequence; read behind one that was returned, or behind -1")
    begin = max(after + 1, outgoing.first)
    return [decode(value) for _, value in stored_from(tx, keys.receipt, begin, outgoing.next, limit=limit)]


def see_receipts(tx: Transaction, address: Address, sequence: int) -> None:
    """Remember that the agent has seen its receipts up to `sequence`; that it has seen fewer changes nothing.

    Raises:
        InvalidArgument: no receipt ever had that sequence.
    """
    keys = keys_of(address)
    outgoing = outgoing_of(tx, keys)
    if sequence.__class__ is not int or not -1 <= sequence < outgoing.next:
        raise InvalidArgument(f"{sequence!r} is no receipt's sequence; name the last one that was seen")
    if sequence > outgoing.seen:
        outgoing.seen = sequence
        tx.put(keys.outgoing, encode(outgoing))
