"""Inboxes: five kinds of items, checked before they are stored, drained once and in order."""

import base64
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import fastness
from fastness import Plane, limits
from fastness.errors import CursorAdvanced, HeadAdvanced, InvalidArgument, PayloadTooLarge, Validation
from fastness.kv import Database, Transaction
from fastness.layers import blobs, effects, inboxes, journal_records, journals, timers, worlds
from fastness.layers.blobs import Blob
from fastness.layers.worlds import World
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase
from fastness.wire.effects import EffectInfo
from fastness.wire.inboxes import (
    Control,
    DomainEvent,
    Effect,
    EffectReceipt,
    InboundMessage,
    InboxItem,
    Timer,
    TimerFired,
)
from fastness.wire.timers import TimerInfo
from fastness.wire.worlds import PutItem
from tests.support.failures import Failures

ADA = World("main", "ada")
HASH = hashlib.sha256(b"").hexdigest()
LARGE = bytes(limits.INBOX_INLINE_BYTES_MAX + 1)
KINDS: list[InboxItem] = [
    DomainEvent(schema="order.placed", payload=b"p", key=b"k"),
    DomainEvent(schema="order.placed"),
    EffectReceipt(intent_hash=b"h", effect_kind="mail", adapter_id="smtp", signature=b"s", payload=b"p"),
    InboundMessage(inbox_name="main", payload=b"p", headers={"from": "bob", "b": "a"}),
    InboundMessage(inbox_name="main", payload_blob=HASH),
    TimerFired(timer_id="t-1", payload=b"p"),
    Control(command="stop", effects=(Effect("mail", b"h", b"x"),), timers=(Timer(1 << 62, b"h", b"x"),)),
]
every_kind = pytest.mark.parametrize("item", KINDS, ids=lambda item: item.__struct_config__.tag)


@pytest.fixture
def world(database: Database) -> World:
    database.transact(worlds.create, ADA)
    database.transact(blobs.record, "main", bytes.fromhex(HASH), Blob(0, b""))
    return ADA


def put(database: Database, *items: InboxItem) -> list[int]:
    return database.transact(lambda tx: [inboxes.enqueue(tx, ADA, item) for item in items])


def inbox(database: Database) -> list[tuple[int, InboxItem]]:
    return database.read(inboxes.read, ADA, after=None, limit=1_000)


def ingressed(database: Database) -> list[dict[str, Any]]:
    """The inbox items in the journal."""
    found = [cbor2.loads(record) for _, record in database.read(journals.read_hot, ADA, 0, 1_000)]
    return [value for kind, value in found if kind == journal_records.Kind.INGRESS]


@every_kind
def test_an_item_is_stored_and_drained_unchanged(database: Database, world: World, item: InboxItem) -> None:
    assert put(database, item) == [0]
    assert inbox(database) == [(0, item)]
    assert database.transact(inboxes.drain, world) == [0]
    (fields,) = ingressed(database)
    assert fields.pop("seq") == 0
    assert fields["type"] == item.__struct_config__.tag
    assert msgspec.convert(fields, InboxItem) == item
    assert inbox(database) == [(0, item)]


def test_items_are_read_after_a_sequence(database: Database, world: World) -> None:
    assert put(database, *KINDS) == list(range(len(KINDS)))
    assert database.read(inboxes.arrivals, world) == len(KINDS)
    assert database.read(inboxes.read, world, after=0, limit=2) == [(1, KINDS[1]), (2, KINDS[2])]
    for after in (len(KINDS) - 1, len(KINDS), 2**40):
        assert database.read(inboxes.read, world, after=after, limit=2) == []


def test_an_invalid_sequence_is_refused(database: Database, world: World) -> None:
    for after in (-2, 2**64 - 1, 2**64):
        with suppress(InvalidArgument):  # Instead of an empty list.
            assert database.read(inboxes.read, world, after=after, limit=1) == [], after


def test_an_invalid_cursor_is_refused(database: Database, world: World) -> None:
    for new in (7, -1, 2**64):
        with pytest.raises(InvalidArgument):
            database.transact(inboxes.commit_cursor, world, expected=None, new=new)


def test_the_cursor_is_the_last_drained_item(database: Database, world: World) -> None:
    assert database.read(inboxes.cursor, world) is None
    assert database.transact(inboxes.drain, world) == []
    assert database.read(inboxes.cursor, world) is None
    put(database, *KINDS[:3])
    assert database.transact(inboxes.drain, world, limit=2) == [0, 1]
    assert database.read(inboxes.cursor, world) == 1
    assert database.transact(inboxes.drain, world, limit=2) == [2]
    assert database.transact(inboxes.drain, world, limit=2) == []
    assert database.read(inboxes.cursor, world) == 2
    with pytest.raises(CursorAdvanced, match="cursor is 2, not None"):
        database.transact(inboxes.commit_cursor, world, expected=None, new=2)


def test_a_conflict_while_draining_loses_no_item(database: Database, world: World) -> None:
    """The cursor and the journal change in one transaction."""
    put(database, *KINDS)

    def drain_at_an_old_head(tx: Transaction) -> None:
        inboxes.drain(tx, world, limit=3)
        journals.append(tx, world, [journal_records.entry(b"\x00")], expected_head=0)

    with pytest.raises(HeadAdvanced):
        database.transact(drain_at_an_old_head)
    assert (database.read(inboxes.cursor, world), database.read(journals.head, world)) == (None, 0)
    with pytest.raises(Crash):
        FaultyDatabase(database, ChosenFault(1)).transact(inboxes.drain, world)
    assert (database.read(inboxes.cursor, world), database.read(journals.head, world)) == (None, 0)
    database.transact(inboxes.drain, world)
    assert [fields["seq"] for fields in ingressed(database)] == list(range(len(KINDS)))


def test_effects_and_timers_of_an_item_are_indexed_when_it_is_drained(database: Database, world: World) -> None:
    asked = (Effect("mail", b"h1", b"x"), Effect("call", b"h2", max_attempts=2))
    put(database, Control(command="ask", effects=asked, timers=(Timer(9_000_000, b"late"), Timer(7, b"soon", b"x"))))

    def listed() -> tuple[list[EffectInfo], list[TimerInfo]]:
        found = database.read(effects.page, "main", None, after="", limit=10).effects
        return found, database.read(timers.page, "main", None, after="", limit=10).timers

    assert listed() == ([], [])
    database.transact(journals.append, world, [journal_records.entry(b"\x00")] * 3, expected_head=0)
    database.transact(inboxes.drain, world)
    mail, call = listed()[0]
    assert (mail.world, mail.height, mail.number, mail.kind, mail.params) == ("ada", 3, 0, "mail", b"x")
    assert (call.height, call.number, call.intent_hash, call.max_attempts) == (3, 1, b"h2", 2)
    assert listed()[1] == [TimerInfo("ada", "soon", 1, 3, b"x"), TimerInfo("ada", "late", 9, 3)]
    due = database.read(effects.due, "main", ["call", "mail"], until_ms=call.due_ms, limit=10)
    assert {entry.kind for entry in due} == {"call", "mail"}


# Invalid items.


def test_an_item_that_is_too_large_is_refused(database: Database, world: World) -> None:
    failures = Failures()
    cases: list[tuple[InboxItem, str]] = [
        (DomainEvent(schema="s", payload=LARGE), "payload has 4097 bytes and may have 4096; store it as a blob"),
        (DomainEvent(schema="s" * 1_025), "its schema has 1025 bytes"),
        (DomainEvent(schema="s", key=bytes(1_025)), "its key has 1025 bytes"),
        (
            EffectReceipt(intent_hash=bytes(1_025), effect_kind="", adapter_id="", signature=b""),
            "its intent_hash has 1025 bytes",
        ),
        (Control(command="c" * 1_025), "its command has 1025 bytes"),
        (TimerFired(timer_id="t" * 1_025), "its timer_id has 1025 bytes"),
        (
            InboundMessage(inbox_name="a", headers={str(number): "" for number in range(33)}),
            "33 headers and may have 32",
        ),
    ]
    for item, why in cases:
        with failures.of((item, why)):
            with pytest.raises(PayloadTooLarge, match=why):
                put(database, Control(command="fine"), item)
            assert inbox(database) == []
    failures.check()


def test_an_item_at_the_limits_is_accepted(database: Database, world: World) -> None:
    headers = {str(number): "" for number in range(32)}
    put(database, DomainEvent(schema="s" * 1_024, key=bytes(1_024), payload=bytes(4_096)))
    put(database, InboundMessage(inbox_name="a", headers=headers))
    assert database.transact(inboxes.drain, world) == [0, 1]


POISON: dict[str, InboxItem] = {
    "huge_params": Control(command="c", effects=(Effect("k", b"h", bytes(300_000)),)),
    "many_timers": Control(command="c", timers=tuple(Timer(number, bytes(32)) for number in range(5_000))),
    "huge_header": InboundMessage(inbox_name="a", headers={"a": "x" * 300_000}),
    "long_timer_hash": Control(command="c", timers=(Timer(1, bytes(3_000)),)),
    "long_kind": Control(command="c", effects=(Effect("k" * 257, b"h"),)),
    "no_attempts": Control(command="c", effects=(Effect("k", b"h", max_attempts=0),)),
    "large_timer": Control(command="c", timers=(Timer(1, b"h", LARGE),)),
    "far_timer": Control(command="c", timers=(Timer(2**65, b"h"),)),
    "text_as_payload": DomainEvent(schema="s", payload="text"),  # type: ignore[arg-type]
    "number_as_schema": DomainEvent(schema=5),  # type: ignore[arg-type]
    "number_in_headers": InboundMessage(inbox_name="a", headers={"a": 1}),  # type: ignore[dict-item]
    "lone_surrogate": Control(command="\ud800"),
}


def test_an_item_that_could_not_be_drained_is_refused(plane: Plane) -> None:
    """An item that cannot be drained would block all items after it."""
    failures = Failures()
    for name, item in POISON.items():
        with failures.of(name):
            world = plane.world(name)
            world.create()
            with pytest.raises(Validation):
                world.inbox.put(item)
            world.inbox.put(Control(command="next"))
            assert len(world.drain()) == 1
    failures.check()


def test_the_length_of_text_is_counted_in_bytes(database: Database, world: World) -> None:
    with pytest.raises(PayloadTooLarge):
        put(database, Control(command="ü" * 1_024))


# The wire.


def encoded(text: bytes) -> str:
    return base64.b64encode(text).decode()


@every_kind
def test_a_request_crosses_the_wire_unchanged(item: InboxItem) -> None:
    request = PutItem("ada", item)
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(request), type=PutItem) == request


def test_an_invalid_item_is_refused_by_the_wire_codec() -> None:
    failures = Failures()
    for item, why in [
        ({"type": "control", "command": "c", "more": 1}, "unknown field `more`"),
        ({"type": "control"}, "missing required field `command`"),
        ({"type": "unknown", "command": "c"}, "Invalid value 'unknown'"),
        ({"command": "c"}, "missing required field `type`"),
        ({"type": "control", "command": 7}, "Expected `str`, got `int`"),
        ({"type": "control", "command": "c", "payload": 7}, "Expected `bytes`, got `int`"),
        ({"type": "control", "command": "c", "payload_blob": 7}, "Expected `str | null`"),
        ({"type": "inbox", "inbox_name": "a", "headers": {"a": 1}}, "Expected `str`, got `int`"),
        ({"type": "inbox", "inbox_name": "a", "headers": []}, "Expected `object`"),
        ({"type": "control", "command": "c", "effects": [{"kind": "k"}]}, "missing required field `intent_hash`"),
        ({"type": "control", "command": "c", "timers": [{"deliver_at_ns": "7"}]}, "Expected `int`"),
        ({"type": "domain_event", "schema": None}, "Expected `str`, got `(null|None)`"),
        ("control", "Expected `object`"),
    ]:
        with failures.of((item, why)):
            for codec in (msgspec.json, msgspec.msgpack):
                with pytest.raises(msgspec.ValidationError, match=why):
                    codec.decode(codec.encode({"op": "worlds.inbox.put", "world": "ada", "item": item}), type=PutItem)
    failures.check()


def test_a_handwritten_item_is_decoded() -> None:
    item = {"type": "receipt", "intent_hash": encoded(b"h"), "effect_kind": "mail", "adapter_id": "a"}
    item |= {"signature": encoded(b"s"), "payload": encoded(b"p")}
    raw = msgspec.json.encode({"op": "worlds.inbox.put", "world": "ada", "item": item})
    assert msgspec.json.decode(raw, type=PutItem).item == EffectReceipt(
        intent_hash=b"h", effect_kind="mail", adapter_id="a", signature=b"s", payload=b"p"
    )


# The handles.


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str) -> Iterator[Plane]:
    with fastness.open(url) as plane:
        yield plane


def test_the_handle_puts_reads_and_drains(plane: Plane) -> None:
    ada = plane.world("ada")
    head = ada.create().head
    plane.blobs.put(b"")
    assert [ada.inbox.put(item) for item in KINDS] == list(range(len(KINDS)))
    assert ada.inbox.read() == list(enumerate(KINDS))
    assert ada.inbox.read(after=1, limit=2) == [(2, KINDS[2]), (3, KINDS[3])]
    assert ada.inbox.cursor() is None
    assert ada.drain(limit=3) == [head, head + 1, head + 2]
    assert ada.inbox.cursor() == 2
    assert ada.drain() == list(range(head + 3, head + len(KINDS)))
    assert ada.drain() == []
    fields = [cbor2.loads(record.value) for record in ada.read(head)]
    assert [one["seq"] for one in fields] == list(range(len(KINDS)))


@pytest.mark.parametrize("size", [4_097, 100_000])
def test_a_large_payload_becomes_a_blob(plane: Plane, size: int) -> None:
    ada = plane.world("ada")
    ada.create()
    ada.inbox.put(InboundMessage(inbox_name="main", payload=bytes(size), headers={"a": "b"}))
    ada.inbox.put(InboundMessage(inbox_name="main", payload=bytes(4_096)))
    (_, large), (_, small) = ada.inbox.read()
    expected = hashlib.sha256(bytes(size)).hexdigest()
    assert large == InboundMessage(inbox_name="main", payload_blob=expected, headers={"a": "b"})
    assert plane.blobs.get(expected) == bytes(size)
    assert small.payload == bytes(4_096)
    assert small.payload_blob is None


async def test_a_large_payload_becomes_a_blob_on_a_loop(url: str) -> None:
    async with fastness.open_async(url) as plane:
        ada = plane.world("ada")
        await ada.create()
        await ada.inbox.put(TimerFired(timer_id="t", payload=LARGE))
        ((_, item),) = await ada.inbox.read()
        digest = hashlib.sha256(LARGE).hexdigest()
        assert (item.payload, item.payload_blob) == (b"", digest)
        assert await plane.blobs.get(digest) == LARGE


@pytest.mark.parametrize("payload", [b"p", LARGE], ids=["small", "large"])
def test_a_payload_and_a_blob_at_once_are_refused(plane: Plane, payload: bytes) -> None:
    ada = plane.world("ada")
    ada.create()
    with pytest.raises(InvalidArgument, match="a payload and a blob"):
        ada.inbox.put(Control(command="c", payload=payload, payload_blob=HASH))
    assert ada.inbox.read() == []
