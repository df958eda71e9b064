"""The keys of mailboxes, and their records.

    (u, universe, "mail", agent, …)
      "box"            the mailbox header: number of mails, first and next sequence, and the reader
      "by"             the reader again: a watch of this key reports changes of the reader, and nothing else
      "m" | sequence   a mail
      "i" | id         the sequence of a mail, which deduplicates mail that is sent again with the same id
      "e" | expiry | sequence   a mail that expires before an earlier one
      "out"            the sequences of the agent's receipts: first, next, and last seen
      "r" | sequence   a receipt for a mail that the agent has sent
      "x" | sender     a blocked sender
    (u, universe, "mail-policy")               the number of mails per mailbox, and their TTL
    (u, universe, "mail-due") | slot | agent   the due index: mailboxes with something that expires in the slot

The parts after `|` are plain bytes. No mail is below a box's `first`, so scans skip removed mail. Expired mail is at
the start of a box, because later mail expires later. Where a policy change or a clock set back breaks this order, "e"
lists the mail that expires early.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from fastness.errors import DamagedDatabase
from fastness.kv import Event, Subspace, Transaction
from fastness.limits import MAIL_SWEEP_SECONDS
from fastness.wire.mail import MailPolicy

SLOT_MS: Final = int(MAIL_SWEEP_SECONDS * 1_000)
SEQUENCE_BYTES: Final = 8

_DEFAULT: Final = MailPolicy()
_GETS_MAX: Final = 16  # Up to so many gets are cheaper than a scan.
_GETS_SHARED_MAX: Final = 1  # Shared key spaces are remote: each get is a round trip, and so is a scan.


class Address(NamedTuple):
    """Identifies a mailbox."""

    universe: str
    agent: str

    def __str__(self) -> str:
        return f"{self.agent}@{self.universe}"


class MailEvent(Event, frozen=True, gc=False):
    """A change of a mail."""

    event: str
    to: Address
    id: str
    sender: str
    at_ms: int


class Box(msgspec.Struct, array_like=True):
    """The header of a mailbox. Not frozen: a transaction changes it and writes it once."""

    count: int = 0
    first: int = 0  # No mail has a lower sequence.
    next: int = 0
    delivered: int = 0  # Mail below was delivered, and its senders have receipts.
    session: str | None = None  # The reader's session.
    live_from: int | None = None
    live_to: int = 0  # Mail from `live_from` up to here was delivered while the reader was connected.
    latest_ms: int = 0  # When the last mail expires.
    due_slot: int = -1  # The slot of its latest due entry.
    may_block: bool = True  # Whether any sender may be blocked; False saves the lookup.
    may_expire_early: bool = False  # Whether any mail may expire before an earlier one; False saves the lookup.


class Outgoing(msgspec.Struct, array_like=True):
    """The sequences of a sender's receipts."""

    first: int = 0
    next: int = 0
    seen: int = -1
    due_slot: int = -1  # The slot of its latest due entry.


class Mail(msgspec.Struct, frozen=True, array_like=True):
    """A mail as it is stored."""

    id: str
    sender: str
    body: bytes
    content_type: str
    correlation_id: str
    sent_ms: int
    expires_ms: int
    early: bool = False  # It expires before an earlier mail.


class MailboxKeys:
    """The keys of one agent."""

    def __init__(self, address: Address) -> None:
        keys = Subspace("u", address.universe, "mail", address.agent)
        self.prefix = keys.prefix
        self.box = keys.key("box")
        self.reader = keys.key("by")
        self.outgoing = keys.key("out")
        self.mail = keys.key("m")
        self.id = keys.key("i")
        self.early = keys.key("e")
        self.receipt = keys.key("r")
        self.blocks = keys.key("x")
        self.due = due_prefix(address.universe)
        self.name = address.agent.encode()
        self.address = str(address)
        self.universe = address.universe

    def mail_key(self, sequence: int) -> bytes:
        return self.mail + sequence.to_bytes(SEQUENCE_BYTES, "big")

    def id_key(self, id: str) -> bytes:
        return self.id + id.encode()

    def early_key(self, expires_ms: int, sequence: int) -> bytes:
        return self.early + expires_ms.to_bytes(8, "big") + sequence.to_bytes(SEQUENCE_BYTES, "big")

    def receipt_key(self, sequence: int) -> bytes:
        return self.receipt + sequence.to_bytes(SEQUENCE_BYTES, "big")

    def block_key(self, sender: Address) -> bytes:
        return self.blocks + str(sender).encode()

    @property
    def blocked(self) -> tuple[bytes, bytes]:
        """The key range of blocked senders."""
        return self.blocks, self.blocks + b"\xff"

    def mails_from(self, sequence: int) -> tuple[bytes, bytes]:
        """The key range of mail from `sequence` on."""
        return self.mail_key(sequence), self.mail + b"\xff" * (SEQUENCE_BYTES + 1)

    def receipts_from(self, sequence: int) -> tuple[bytes, bytes]:
        """The key range of receipts from `sequence` on."""
        return self.receipt_key(sequence), self.receipt + b"\xff" * (SEQUENCE_BYTES + 1)


encode = msgspec.msgpack.Encoder().encode
decode_mail = msgspec.msgpack.Decoder(Mail).decode
_decode_box = msgspec.msgpack.Decoder(Box).decode
_decode_outgoing = msgspec.msgpack.Decoder(Outgoing).decode
_decode_policy = msgspec.msgpack.Decoder(MailPolicy).decode


@lru_cache(maxsize=4_096)
def keys_of(address: Address) -> MailboxKeys:
    """The keys of an agent, cached."""
    return MailboxKeys(address)


@lru_cache(maxsize=4_096)
def keys_at(address: str) -> MailboxKeys:
    """The keys of an agent, from its address as text."""
    return keys_of(address_of(address))


def due_prefix(universe: str) -> bytes:
    """The key prefix of a universe's due index."""
    return Subspace("u", universe, "mail-due").prefix


def box_of(tx: Transaction, keys: MailboxKeys) -> Box:
    """The header of a mailbox. The caller writes its changes."""
    stored = tx.get(keys.box)
    return Box() if stored is None else _decode_box(stored)


def outgoing_of(tx: Transaction, keys: MailboxKeys) -> Outgoing:
    """The sequences of the agent's receipts."""
    stored = tx.get(keys.outgoing)
    return Outgoing() if stored is None else _decode_outgoing(stored)


@lru_cache(maxsize=4_096)
def address_of(text: str) -> Address:
    """The address with this text, as `str(address)` formats it."""
    agent, _, universe = text.partition("@")
    return Address(universe, agent)


def mail_at(tx: Transaction, keys: MailboxKeys, sequence: int) -> Mail:
    """The mail with this sequence.

    Raises:
        DamagedDatabase: it is missing.
    """
    stored = tx.get(keys.mail_key(sequence))
    if stored is None:
        raise _damaged(keys)
    return decode_mail(stored)


def remove(tx: Transaction, keys: MailboxKeys, box: Box, sequence: int, mail: Mail) -> None:
    """Remove a mail. The caller saves the box with `save_after_removal`."""
    tx.delete(keys.mail_key(sequence))
    tx.delete(keys.id_key(mail.id))
    if mail.early:
        tx.delete(keys.early_key(mail.expires_ms, sequence))
    box.count -= 1


def save_after_removal(tx: Transaction, keys: MailboxKeys, box: Box) -> None:
    """Write a box after mail was removed, with `first` moved to the first remaining mail."""
    if box.count:
        found = read_sequences(tx, keys.mail, box.first, box.next, limit=1)
        if not found:
            raise _damaged(keys)
        box.first = found[0][0]
    else:
        box.first, box.latest_ms = box.next, 0
    tx.put(keys.box, encode(box))


def read_sequences(tx: Transaction, prefix: bytes, begin: int, end: int, *, limit: int) -> list[tuple[int, bytes]]:
    """At most `limit` values with begin <= sequence < end under a key prefix, in order.

    The cost of a scan grows with the writes of its transaction, which many calls may share. So a short range is read
    with gets.
    """
    found: list[tuple[int, bytes]] = []
    gets_max, get = _GETS_SHARED_MAX if tx.writer else _GETS_MAX, tx.get
    gets_end = min(begin + gets_max, end) if limit == 1 or end - begin <= gets_max else begin
    for sequence in range(begin, gets_end):
        value = get(prefix + sequence.to_bytes(SEQUENCE_BYTES, "big"))
        if value is not None:
            found.append((sequence, value))
            if len(found) == limit:
                return found
    if gets_end < end:
        bounds = (prefix + sequence.to_bytes(SEQUENCE_BYTES, "big") for sequence in (gets_end, end))
        pairs = tx.scan(*bounds, limit=limit - len(found))
        found += [(int.from_bytes(key[-SEQUENCE_BYTES:], "big"), value) for key, value in pairs]
    return found


def add_due(tx: Transaction, keys: MailboxKeys, at_ms: int) -> int:
    """Add a due entry for a mailbox; returns its slot."""
    slot = at_ms // SLOT_MS
    tx.put(keys.due + slot.to_bytes(8, "big") + keys.name, b"")
    return slot


def emit(tx: Transaction, event: str, address: Address, id: str, sender: str) -> None:
    """Add an event about a mail, which is published after the commit."""
    tx.emit(MailEvent(event, address, id, sender, tx.now_ms))


def policy_of(tx: Transaction, universe: str) -> MailPolicy:
    """The mail policy of a universe; the default one if none was set."""
    stored = tx.get(_policy_key(universe))
    if stored is not None:
        return _decode_policy(stored)
    default = tx.defaults.get(MailPolicy, _DEFAULT)
    assert isinstance(default, MailPolicy)
    return default


def set_policy(tx: Transaction, universe: str, policy: MailPolicy) -> MailPolicy:
    """Replace a universe's mail policy. It applies to mail that is sent from now on."""
    tx.put(_policy_key(universe), encode(policy))
    return policy


def _damaged(keys: MailboxKeys) -> DamagedDatabase:
    return DamagedDatabase(f"A mail is missing from the mailbox of {keys.name.decode()}; restore it from a backup")


@lru_cache(maxsize=256)
def _policy_key(universe: str) -> bytes:
    return Subspace("u", universe).key("mail-policy")
