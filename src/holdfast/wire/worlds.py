"""Worlds: their journals and inboxes."""

import msgspec

from holdfast.names import UNIVERSE
from holdfast.wire.inboxes import InboxItem
from holdfast.wire.requests import Request


class Described(msgspec.Struct, frozen=True):
    """What is known of a world."""

    name: str
    state: str
    created_ms: int
    head: int


class Names(msgspec.Struct, frozen=True):
    """Names of worlds, in order."""

    names: list[str]


class Height(msgspec.Struct, frozen=True):
    """A place in a journal."""

    height: int


class Record(msgspec.Struct, frozen=True):
    """A journal record: its height, its kind (entry, ingress, snapshot, baseline), and its value as canonical CBOR."""

    height: int
    kind: str
    value: bytes


class Records(msgspec.Struct, frozen=True):
    """Journal records in order, without a hole."""

    records: list[Record]


class Drained(msgspec.Struct, frozen=True):
    """The heights at which drained items are now."""

    heights: list[int]


class Sequence(msgspec.Struct, frozen=True):
    """A place in an inbox, or None for its beginning."""

    sequence: int | None


class Items(msgspec.Struct, frozen=True):
    """Inbox items with their sequences, in order."""

    items: list[tuple[int, InboxItem]]


class CreateWorld(Request[Described], frozen=True, tag="worlds.create"):
    world: str
    universe: str = UNIVERSE


class DescribeWorld(Request[Described], frozen=True, tag="worlds.describe"):
    world: str
    universe: str = UNIVERSE


class ListWorlds(Request[Names], frozen=True, tag="worlds.list"):
    after: str = ""
    limit: int = 100
    universe: str = UNIVERSE


class AppendEntries(Request[Height], frozen=True, tag="worlds.append"):
    """Append values, each canonical CBOR; answered with the height of the first."""

    world: str
    entries: list[bytes]
    expected_head: int
    universe: str = UNIVERSE


class ReadJournal(Request[Records], frozen=True, tag="worlds.read"):
    world: str
    start: int
    limit: int = 1_000
    universe: str = UNIVERSE


class DrainInbox(Request[Drained], frozen=True, tag="worlds.drain"):
    world: str
    limit: int = 256
    universe: str = UNIVERSE


class PutItem(Request[Sequence], frozen=True, tag="worlds.inbox.put"):
    world: str
    item: InboxItem
    universe: str = UNIVERSE


class ReadInbox(Request[Items], frozen=True, tag="worlds.inbox.read"):
    world: str
    after: int | None = None
    limit: int = 1_000
    universe: str = UNIVERSE


class GetCursor(Request[Sequence], frozen=True, tag="worlds.inbox.cursor"):
    world: str
    universe: str = UNIVERSE
