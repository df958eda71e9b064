"""Where mail is kept: its keys, and the records behind them.

    (u, universe, "mail", agent, …)
      "box"            how many mails wait, where they begin and end, and who reads them
      "by"             who reads them, again: whoever watches it hears of a new reader, and of nothing else
      "m" | sequence   a mail
      "i" | id         its sequence, so that a mail which is sent again under the same id is stored once
      "e" | expiry | sequence   a mail that is over before one which came earlier
      "out"            where the agent's receipts begin and end, and up to where it has seen them
      "r" | sequence   what became of a mail that the agent has sent
      "x" | sender     somebody whose mail is refused
    (u, universe, "mail-policy")               how much, and for how long
    (u, universe, "mail-due") | slot | agent   whose room has something that is over by the end of the slot

Behind `|` stand plain bytes. Nothing is below `first` of a box, so a scan does not walk over what was removed. What
is over stands at the beginning of a box, because later mail is over later; where it is not, since a policy was changed
or a clock was set back, "e" has it.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from holdfast.errors import DamagedDatabase, InvalidArgument
from holdfast.kv import Subspace, Transaction
from holdfast.limits import MAIL_SWEEP_SECONDS, MAIL_TTL_SECONDS_MAX, MAILBOX_MAX_MAX
from holdfast.wire.mail import MailPolicy

SLOT_MS: Final = int(MAIL_SWEEP_SECONDS * 1_000)
SEQUENCE_BYTES: Final = 8
MAIL_EVENTS: Final = "mail."  # What the names of events of mail begin with, among those of queues.

_DEFAULT: Final = MailPolicy()
_FEW: Final = 16
_FEW_SHARED: Final = 1  # Where several processes write, there is a network: each get is a round trip, and so is a scan.


class Address(NamedTuple):
    """Whose mailbox."""

    universe: str
    agent: str

    def __str__(self) -> str:
        return f"{self.agent}@{self.universe}"


class Box(msgspec.Struct, array_like=True):
    """What is known of a mailbox without looking into it. Not frozen: a transaction changes it and writes it once."""

    count: int = 0
    first: int = 0  # No mail has a lower sequence.
    next: int = 0
    delivered: int = 0  # Mail below was delivered, and its senders were told.
    session: str | None = None  # Of its reader.
    live_from: int | None = None
    live_to: int = 0  # Mail from `live_from` up to here was delivered to its reader while it was there.
    latest_ms: int = 0  # When the last of its mail will be over.
    due_slot: int = -1  # Under which slot that was noted last.
    may_refuse: bool = True  # Whether there may be somebody whose mail is refused; most have nobody to look for.


class Outgoing(msgspec.Struct, array_like=True):
    """Where the receipts of a sender are."""

    first: int = 0
    next: int = 0
    seen: int = -1
    due_slot: int = -1  # Under which slot it was noted last when they are over.


class Mail(msgspec.Struct, frozen=True, array_like=True):
    """A mail as it is stored."""

    id: str
    sender: str
    body: bytes
    content_type: str
    correlation_id: str
    sent_ms: int
    expires_ms: int
    early: bool = False  # It is over before one which came earlier.


class MailboxKeys:
    """The keys of one agent."""

    __slots__ = (
        "address",
        "blocks",
        "box",
        "due",
        "early",
        "id",
        "mail",
        "name",
        "outgoing",
        "prefix",
        "reader",
        "receipt",
        "universe",
    )

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
        """Where those are whose mail is refused."""
        return self.blocks, self.blocks + b"\xff"

    def mails_from(self, sequence: int) -> tuple[bytes, bytes]:
        """Where mail is, from a sequence on."""
        return self.mail_key(sequence), self.mail + b"\xff" * (SEQUENCE_BYTES + 1)

    def receipts_from(self, sequence: int) -> tuple[bytes, bytes]:
        """Where receipts are, from a sequence on."""
        return self.receipt_key(sequence), self.receipt + b"\xff" * (SEQUENCE_BYTES + 1)


encode = msgspec.msgpack.Encoder().encode
decode_mail = msgspec.msgpack.Decoder(Mail).decode
_decode_box = msgspec.msgpack.Decoder(Box).decode
_decode_outgoing = msgspec.msgpack.Decoder(Outgoing).decode
_decode_policy = msgspec.msgpack.Decoder(MailPolicy).decode


@lru_cache(maxsize=4_096)
def keys_of(address: Address) -> MailboxKeys:
    """The keys of an agent."""
    return MailboxKeys(address)


@lru_cache(maxsize=4_096)
def room_at(address: str) -> MailboxKeys:
    """The keys of the agent that has this address, as `str` wrote it down."""
    return keys_of(address_of(address))


def due_prefix(universe: str) -> bytes:
    """Where the moments are at which something is over."""
    return Subspace("u", universe, "mail-due").prefix


def box_of(tx: Transaction, keys: MailboxKeys) -> Box:
    """The mailbox as it stands; the caller writes what it changed."""
    stored = tx.get(keys.box)
    return Box() if stored is None else _decode_box(stored)


def outgoing_of(tx: Transaction, keys: MailboxKeys) -> Outgoing:
    """Where the agent's receipts are."""
    stored = tx.get(keys.outgoing)
    return Outgoing() if stored is None else _decode_outgoing(stored)


@lru_cache(maxsize=4_096)
def address_of(text: str) -> Address:
    """An address that was written down by `str`."""
    agent, _, universe = text.partition("@")
    return Address(universe, agent)


def mail_at(tx: Transaction, keys: MailboxKeys, sequence: int) -> Mail:
    """The mail that stands there."""
    stored = tx.get(keys.mail_key(sequence))
    if stored is None:
        raise _damaged(keys)
    return decode_mail(stored)


def remove(tx: Transaction, keys: MailboxKeys, box: Box, sequence: int, mail: Mail) -> None:
    """Take a mail out of its box, which the caller saves with `save_behind_the_first`."""
    tx.delete(keys.mail_key(sequence))
    tx.delete(keys.id_key(mail.id))
    if mail.early:
        tx.delete(keys.early_key(mail.expires_ms, sequence))
    box.count -= 1


def save_behind_the_first(tx: Transaction, keys: MailboxKeys, box: Box) -> None:
    """Write a box from which mail was removed, with its beginning moved up to what is left."""
    if box.count:
        found = stored_from(tx, keys.mail, box.first, box.next, limit=1)
        if not found:
            raise _damaged(keys)
        box.first = found[0][0]
    else:
        box.first, box.latest_ms = box.next, 0
    tx.put(keys.box, encode(box))


def stored_from(tx: Transaction, place: bytes, begin: int, end: int, *, limit: int) -> list[tuple[int, bytes]]:
    """At most `limit` of what is stored in a place, from one sequence on and before another, in order.

    A scan costs the more the more its transaction has written, and many share one: so what can be one of a few is
    asked for by its key.
    """
    found: list[tuple[int, bytes]] = []
    few, get = _FEW_SHARED if tx.writer else _FEW, tx.get
    near = min(begin + few, end) if limit == 1 or end - begin <= few else begin
    for sequence in range(begin, near):
        value = get(place + sequence.to_bytes(SEQUENCE_BYTES, "big"))
        if value is not None:
            found.append((sequence, value))
            if len(found) == limit:
                return found
    if near < end:
        bounds = (place + sequence.to_bytes(SEQUENCE_BYTES, "big") for sequence in (near, end))
        pairs = tx.scan(*bounds, limit=limit - len(found))
        found += [(int.from_bytes(key[-SEQUENCE_BYTES:], "big"), value) for key, value in pairs]
    return found


def note_due(tx: Transaction, keys: MailboxKeys, at_ms: int) -> int:
    """Something in the room will be over at that moment; the slot that it is noted under."""
    slot = at_ms // SLOT_MS
    tx.put(keys.due + slot.to_bytes(8, "big") + keys.name, b"")
    return slot


def emit(tx: Transaction, what: str, address: Address, id: str, sender: str) -> None:
    """Have it told that something happened to a mail: one of the names that begin with `MAIL_EVENTS`."""
    tx.events.append((what, address, id, sender, tx.now_ms))


def policy_of(tx: Transaction, universe: str) -> MailPolicy:
    """What holds for the mailboxes of a universe."""
    stored = tx.get(_policy_key(universe))
    return _DEFAULT if stored is None else _decode_policy(stored)


def set_policy(tx: Transaction, universe: str, policy: MailPolicy) -> MailPolicy:
    """Give a universe another policy; it holds for mail that is sent from now on.

    Raises:
        InvalidArgument: a value is out of its range.
    """
    if policy.pending_max.__class__ is not int or not 1 <= policy.pending_max <= MAILBOX_MAX_MAX:
        raise InvalidArgument(f"pending_max is {policy.pending_max}; choose 1 to {MAILBOX_MAX_MAX}")
    if policy.ttl_seconds.__class__ not in (int, float) or not 1 <= policy.ttl_seconds <= MAIL_TTL_SECONDS_MAX:
        raise InvalidArgument(f"ttl_seconds is {policy.ttl_seconds}; choose 1 to {MAIL_TTL_SECONDS_MAX:.0f}")
    tx.put(_policy_key(universe), encode(policy))
    return policy


def _damaged(keys: MailboxKeys) -> DamagedDatabase:
    return DamagedDatabase(f"The mailbox of {keys.name.decode()} lacks a mail that it counts; restore it from a backup")


@lru_cache(maxsize=256)
def _policy_key(universe: str) -> bytes:
    return Subspace("u", universe).key("mail-policy")
