"""Finds the relay sessions that a commit affects, from the keys that it wrote.

The key of a mail or of a receipt ends with its sequence number, so a session learns up to which number there is
something to read, and can ignore what it has already read. A new reader of a mailbox writes a key without a sequence
number. Where several servers share a PostgreSQL database, a notification may contain truncated keys, or none: then
every session that it may affect reads its mailbox.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from fastness.kv import Subspace, prefix_range
from fastness.layers.mailboxes import Address, keys_of
from fastness.runtime.relay.session import Session

_SEQUENCE_BYTES: Final = 8
_SAMPLE_KEYS: Final = keys_of(Address("", ""))
_MAIL: Final = _SAMPLE_KEYS.mail.removeprefix(
    _SAMPLE_KEYS.prefix
)  # The bytes between an agent's prefix and a sequence number.
_RECEIPT: Final = _SAMPLE_KEYS.receipt.removeprefix(_SAMPLE_KEYS.prefix)
_READER: Final = _SAMPLE_KEYS.reader.removeprefix(_SAMPLE_KEYS.prefix)  # The end of a reader's key.
_KIND: Final = slice(-_SEQUENCE_BYTES - len(_MAIL), -_SEQUENCE_BYTES)
assert len(_MAIL) == len(_RECEIPT)

Range = tuple[bytes, bytes]
OnSequence = Callable[[Session, int], None]


class CommitListener:
    """Receives every commit of a key space for the sessions of one event loop."""

    def __init__(self, on_mail: OnSequence, on_receipt: OnSequence, on_reader: Callable[[Session], None]) -> None:
        """Callbacks on the event loop: for a stored mail, a stored receipt, and a new reader or unknown change."""
        self._on_mail = on_mail
        self._on_receipt = on_receipt
        self._on_reader = on_reader
        self._mail: dict[bytes, Session] = {}  # By the prefix of their keys.
        self._receipts: dict[bytes, Session] = {}
        self._readers: dict[bytes, Session] = {}
        self._mailboxes: dict[bytes, Session] = {}
        self._universes: Counter[bytes] = Counter()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def add_session(self, session: Session) -> None:
        """Notify this session of its mail from now on, instead of any other session of its address."""
        keys = keys_of(session.address)
        self._mail[keys.mail] = self._receipts[keys.receipt] = session
        self._readers[keys.reader] = self._mailboxes[keys.prefix] = session
        self._universes[_universe(session)] += 1

    def remove_session(self, session: Session) -> None:
        """Stop notifying this session."""
        keys, universe = keys_of(session.address), _universe(session)
        for table, key in (
            (self._mail, keys.mail),
            (self._receipts, keys.receipt),
            (self._readers, keys.reader),
            (self._mailboxes, keys.prefix),
        ):
            del table[key]
        self._universes[universe] -= 1
        if not self._universes[universe]:
            del self._universes[universe]

    def on_commit(self, keys: Collection[bytes], ranges: Collection[Range]) -> None:
        """The callback for `Database.subscribe`, on any thread."""
        if not self._mailboxes:
            return
        if threading.get_ident() == self._thread:
            self._dispatch(keys, ranges)
        else:
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._dispatch, tuple(keys), tuple(ranges))

    def _dispatch(self, keys: Collection[bytes], ranges: Collection[Range]) -> None:
        mail, receipts, readers = self._mail, self._receipts, self._readers
        for key in keys:
            kind = key[_KIND]  # Checked first, because it avoids a lookup for most keys.
            if kind == _MAIL:
                session = mail.get(key[:-_SEQUENCE_BYTES])
                if session is not None:
                    self._on_mail(session, int.from_bytes(key[-_SEQUENCE_BYTES:], "big"))
            elif kind == _RECEIPT:
                session = receipts.get(key[:-_SEQUENCE_BYTES])
                if session is not None:
                    self._on_receipt(session, int.from_bytes(key[-_SEQUENCE_BYTES:], "big"))
            elif key.endswith(_READER) and (session := readers.get(key)) is not None:
                self._on_reader(session)
        for begin, end in ranges:
            if prefix_range(begin)[1] != end or not self._dispatch_notified(begin):
                for prefix, session in list(self._mailboxes.items()):
                    if begin[: len(prefix)] <= prefix < end:
                        self._on_reader(session)

    def _dispatch_notified(self, key: bytes) -> bool:
        """Handle a key that may be truncated; whether that was sufficient."""
        end = -1
        for _ in range(4):  # ("u", universe, "mail", agent): each element ends with a zero byte, and contains no other.
            end = key.find(b"\x00", end + 1)
            if end < 0:
                return not any(each.startswith(key) or key.startswith(each) for each in self._universes)
        session = self._mailboxes.get(key[: end + 1])
        if session is None:
            return True
        if key[:-_SEQUENCE_BYTES] in self._mail or key[:-_SEQUENCE_BYTES] in self._receipts or key in self._readers:
            self._dispatch((key,), ())
            return True
        keys = keys_of(session.address)
        return key in (keys.box, keys.outgoing) or key.startswith((keys.id, keys.early, keys.blocks))


def _universe(session: Session) -> bytes:
    return Subspace("u", session.address.universe, "mail").prefix
