"""Ears: which sessions of a relay a commit concerns, told from the keys that it wrote.

The key of a mail or of a receipt ends with its sequence, so a session learns how far there is something to read, and
can tell news from what it has had. A new reader of a mailbox writes a key that says nothing else. Where several servers
share a PostgreSQL, a notification may have keys cut short, or none: then everybody whom it can concern looks.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from holdfast.kv import Subspace, prefix_range
from holdfast.layers.mailboxes import Address, keys_of
from holdfast.runtime.relay.session import Session

_SEQUENCE_BYTES: Final = 8
_SOMEBODY: Final = keys_of(Address("", ""))
_MAIL: Final = _SOMEBODY.mail.removeprefix(_SOMEBODY.prefix)  # What stands between an agent and a sequence.
_RECEIPT: Final = _SOMEBODY.receipt.removeprefix(_SOMEBODY.prefix)
_READER: Final = _SOMEBODY.reader.removeprefix(_SOMEBODY.prefix)  # What a reader's key ends with.
_KIND: Final = slice(-_SEQUENCE_BYTES - len(_MAIL), -_SEQUENCE_BYTES)
assert len(_MAIL) == len(_RECEIPT)

Range = tuple[bytes, bytes]
OfSequence = Callable[[Session, int], None]


class CommitListener:
    """Hears every commit of a key space on behalf of the sessions of one event loop."""

    def __init__(self, of_mail: OfSequence, of_receipt: OfSequence, of_reader: Callable[[Session], None]) -> None:
        """Called on the event loop: with the sequence of a mail or a receipt; when nobody knows what has changed."""
        self._of_mail = of_mail
        self._of_receipt = of_receipt
        self._of_reader = of_reader
        self._mail: dict[bytes, Session] = {}  # By what their keys begin with.
        self._receipts: dict[bytes, Session] = {}
        self._readers: dict[bytes, Session] = {}
        self._rooms: dict[bytes, Session] = {}
        self._universes: Counter[bytes] = Counter()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def listen_for(self, session: Session) -> None:
        """Tell this session of its mail from now on, and no other one of its address."""
        room = keys_of(session.address)
        self._mail[room.mail] = self._receipts[room.receipt] = session
        self._readers[room.reader] = self._rooms[room.prefix] = session
        self._universes[_universe(session)] += 1

    def ignore(self, session: Session) -> None:
        """Tell this session nothing more."""
        room, universe = keys_of(session.address), _universe(session)
        for table, key in (
            (self._mail, room.mail),
            (self._receipts, room.receipt),
            (self._readers, room.reader),
            (self._rooms, room.prefix),
        ):
            del table[key]
        self._universes[universe] -= 1
        if not self._universes[universe]:
            del self._universes[universe]

    def hear(self, keys: Collection[bytes], ranges: Collection[Range]) -> None:
        """What `Database.subscribe` calls, on any thread."""
        if not self._rooms:
            return
        if threading.get_ident() == self._thread:
            self._hear(keys, ranges)
        else:
            with suppress(RuntimeError):  # The loop was closed, and nobody listens any more.
                self._loop.call_soon_threadsafe(self._hear, tuple(keys), tuple(ranges))

    def _hear(self, keys: Collection[bytes], ranges: Collection[Range]) -> None:
        mail, receipts, readers = self._mail, self._receipts, self._readers
        for key in keys:
            kind = key[_KIND]  # To look at this first spares a search for most keys.
            if kind == _MAIL:
                session = mail.get(key[:-_SEQUENCE_BYTES])
                if session is not None:
                    self._of_mail(session, int.from_bytes(key[-_SEQUENCE_BYTES:], "big"))
            elif kind == _RECEIPT:
                session = receipts.get(key[:-_SEQUENCE_BYTES])
                if session is not None:
                    self._of_receipt(session, int.from_bytes(key[-_SEQUENCE_BYTES:], "big"))
            elif key.endswith(_READER) and (session := readers.get(key)) is not None:
                self._of_reader(session)
        for begin, end in ranges:
            if prefix_range(begin)[1] != end or not self._hear_notified(begin):
                for prefix, session in list(self._rooms.items()):
                    if begin[: len(prefix)] <= prefix < end:
                        self._of_reader(session)

    def _hear_notified(self, key: bytes) -> bool:
        """Whether no more need be done about a key that may have been cut short."""
        end = -1
        for _ in range(4):  # ("u", universe, "mail", agent): each ends with a zero, and has no other.
            end = key.find(b"\x00", end + 1)
            if end < 0:
                return not any(each.startswith(key) or key.startswith(each) for each in self._universes)
        session = self._rooms.get(key[: end + 1])
        if session is None:
            return True
        if key[:-_SEQUENCE_BYTES] in self._mail or key[:-_SEQUENCE_BYTES] in self._receipts or key in self._readers:
            self._hear((key,), ())
            return True
        room = keys_of(session.address)
        return key in (room.box, room.outgoing) or key.startswith((room.id, room.early, room.blocks))


def _universe(session: Session) -> bytes:
    return Subspace("u", session.address.universe, "mail").prefix
