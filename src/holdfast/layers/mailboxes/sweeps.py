"""Sweeps: mail and receipts whose time is over are forgotten, in bounded steps, without looking at anything else."""

from holdfast.kv import Transaction
from holdfast.layers.mailboxes import receipts
from holdfast.layers.mailboxes.rooms import (
    SEQUENCE_BYTES,
    SLOT_MS,
    Address,
    Box,
    Room,
    box_of,
    decode_mail,
    due_prefix,
    encode,
    outgoing_of,
    policy_of,
    remove,
    room_of,
    save_behind_the_first,
    tell,
)
from holdfast.limits import MAIL_SWEEP_BATCH


def sweep(tx: Transaction, universe: str) -> tuple[dict[str, int], bool]:
    """Forget what is over in one room; how much mail of which agent, and whether there may be more to do.

    Mail expires in silence: its sender was told that it is stored, and is never told that it arrived.
    """
    due = due_prefix(universe)
    found = tx.scan(due, due + (tx.now_ms // SLOT_MS).to_bytes(8, "big"), limit=1)
    if not found:
        return {}, False
    address = Address(universe, found[0][0][len(due) + 8 :].decode())
    room = room_of(address)
    expired = expire(tx, address, room, box_of(tx, room))
    forgotten = _forget_receipts(tx, address, room)
    if max(expired, forgotten) < MAIL_SWEEP_BATCH:
        tx.delete(found[0][0])
    return {address.agent: expired} if expired else {}, True


def expire(tx: Transaction, address: Address, room: Room, box: Box) -> int:
    """Remove the first mails of a box if their time is over, a bounded number; how many there were."""
    expired = 0
    for key, value in tx.scan(*room.mails_from(box.first), limit=MAIL_SWEEP_BATCH):
        mail = decode_mail(value)
        if mail.expires_ms > tx.now_ms:
            break
        remove(tx, room, box, int.from_bytes(key[-SEQUENCE_BYTES:], "big"), mail)
        tell(tx, "expired", address, mail.id, mail.sender)
        expired += 1
    if expired:
        save_behind_the_first(tx, room, box)
    return expired


def _forget_receipts(tx: Transaction, address: Address, room: Room) -> int:
    outgoing = outgoing_of(tx, room)
    over_ms = tx.now_ms - round(policy_of(tx, address.universe).ttl_seconds * 1_000)
    forgotten = 0
    for key, value in tx.scan(*room.receipts_from(outgoing.first), limit=MAIL_SWEEP_BATCH):
        if receipts.decode(value).at_ms > over_ms:
            break
        tx.delete(key)
        forgotten += 1
    if forgotten:
        outgoing.first += forgotten
        tx.put(room.outgoing, encode(outgoing))
    return forgotten
