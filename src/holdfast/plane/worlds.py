"""Worlds: what a request asks of the journal and the inbox."""

from typing import Protocol

from holdfast.kv import Transaction
from holdfast.layers import inboxes, journals, records, worlds
from holdfast.layers.worlds import World
from holdfast.names import checked_name
from holdfast.wire.worlds import (
    AppendEntries,
    CreateWorld,
    Described,
    DescribeWorld,
    Drained,
    DrainInbox,
    GetCursor,
    Height,
    Items,
    ListWorlds,
    Names,
    PutItem,
    ReadInbox,
    ReadJournal,
    Record,
    Records,
    Sequence,
)


class _OfWorld(Protocol):
    @property
    def world(self) -> str: ...

    @property
    def universe(self) -> str: ...


def create(tx: Transaction, request: CreateWorld) -> Described:
    world = _world(request)
    meta = worlds.create(tx, world)
    return Described(world.name, meta.state, meta.created_ms, 0)


def describe(tx: Transaction, request: DescribeWorld) -> Described:
    world = _world(request)
    meta = worlds.describe(tx, world)
    return Described(world.name, meta.state, meta.created_ms, journals.head(tx, world))


def names(tx: Transaction, request: ListWorlds) -> Names:
    universe = checked_name("universe", request.universe)
    after = checked_name("world", request.after) if request.after else ""
    return Names(worlds.names(tx, universe, after=after, limit=request.limit))


def append(tx: Transaction, request: AppendEntries) -> Height:
    batch = [records.entry(value) for value in request.entries]
    return Height(journals.append(tx, _world(request), batch, expected_head=request.expected_head))


def read(tx: Transaction, request: ReadJournal) -> Records:
    found = []
    for height, record in journals.read_hot(tx, _world(request), request.start, request.limit):
        kind, value = records.split(record)
        found.append(Record(height, kind.name.lower(), value))
    return Records(found)


def drain(tx: Transaction, request: DrainInbox) -> Drained:
    return Drained(inboxes.drain(tx, _world(request), limit=request.limit))


def put_item(tx: Transaction, request: PutItem) -> Sequence:
    return Sequence(inboxes.enqueue(tx, _world(request), request.item))


def read_inbox(tx: Transaction, request: ReadInbox) -> Items:
    return Items(inboxes.read(tx, _world(request), after=request.after, limit=request.limit))


def cursor(tx: Transaction, request: GetCursor) -> Sequence:
    return Sequence(inboxes.cursor(tx, _world(request)))


def _world(request: _OfWorld) -> World:
    return World(checked_name("universe", request.universe), checked_name("world", request.world))
