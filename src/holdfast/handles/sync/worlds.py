"""Generated from handles/worlds.py by tools/make_twins.py; change that file instead."""

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.limits import INBOX_INLINE_BYTES_MAX
from holdfast.names import checked_name
from holdfast.tiers import Tier
from holdfast.wire import Port
from holdfast.wire.blobs import PutBlob
from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import InboxItem
from holdfast.wire.worlds import (
    AppendEntries,
    CreateWorld,
    Described,
    DescribeWorld,
    DrainInbox,
    GetCursor,
    PutItem,
    ReadInbox,
    ReadJournal,
    Record,
)


class World:
    """One world. Its journal is the truth about it; everything from outside comes through its inbox."""

    def __init__(self, port: Port, universe: str, name: str) -> None:
        self.name = checked_name("world", name)
        self.inbox = Inbox(port, universe, self.name)
        self._port = port
        self._universe = universe

    def create(self) -> Described:
        """Make the world.

        Raises:
            WorldExists: somebody made it before.
        """
        return self._port.call(CreateWorld(self.name, self._universe))

    def describe(self) -> Described:
        """Its state, its age and its head.

        Raises:
            WorldNotFound: nobody made it.
        """
        return self._port.call(DescribeWorld(self.name, self._universe))

    def head(self) -> int:
        """The next height of the journal."""
        return (self.describe()).head

    def append(self, entries: Sequence[Any], *, expected_head: int, tier: Tier = Tier.CRITICAL) -> int:
        """Append values (text, numbers, bytes, lists, maps) as one batch; the height of the first.

        Raises:
            HeadAdvanced: somebody appended first; read what is new, then decide.
            EmptyBatch, BatchTooLarge: a batch has 1 to 256 entries and at most 256 KiB.
        """
        encoded = [canonical(entry) for entry in entries]
        request = AppendEntries(self.name, encoded, expected_head, self._universe, tier=tier)
        return (self._port.call(request)).height

    def read(self, start: int = 0, *, limit: int = 1_000) -> list[Record]:
        """At most `limit` records from the height `start` on; `cbor2.loads(record.value)` is what was appended."""
        return (self._port.call(ReadJournal(self.name, start, limit, self._universe))).records

    def drain(self, *, limit: int = 256) -> list[int]:
        """Move the next inbox items into the journal, each exactly once; the heights at which they are now."""
        return (self._port.call(DrainInbox(self.name, limit, self._universe))).heights


class Inbox:
    """What came into a world from outside, in the order of arrival."""

    def __init__(self, port: Port, universe: str, world: str) -> None:
        self._port = port
        self._universe = universe
        self._world = world

    def put(self, item: InboxItem) -> int:
        """Put an item behind all others; its sequence. A payload of over 4 KiB is stored as a blob."""
        if len(item.payload) > INBOX_INLINE_BYTES_MAX:
            stored = self._port.call(PutBlob(item.payload, self._universe))
            item = msgspec.structs.replace(item, payload=b"", payload_blob=stored.hash)
        sequence = (self._port.call(PutItem(self._world, item, self._universe))).sequence
        assert sequence is not None
        return sequence

    def read(self, *, after: int | None = None, limit: int = 1_000) -> list[tuple[int, InboxItem]]:
        """At most `limit` items behind the sequence `after`, drained ones too."""
        return (self._port.call(ReadInbox(self._world, after, limit, self._universe))).items

    def cursor(self) -> int | None:
        """The sequence of the last item that was drained, or None."""
        return (self._port.call(GetCursor(self._world, self._universe))).sequence
