"""Worlds: creation, listing, and what each lifecycle state allows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import Plane
from fastness.errors import InvalidArgument, InvalidName, WorldExists, WorldNotActive, WorldNotFound
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import inboxes, journal_records, journals, worlds
from fastness.layers.worlds import World, WorldMeta, WorldState
from fastness.testing.clock import ManualClock
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import Control
from tests.support.failures import Failures

ADA = World("main", "ada")
BOB = World("main", "bob")
ENTRY = journal_records.entry(canonical("entry"))
ITEM = Control(command="go")


def put_in_state(database: Database, world: World, state: WorldState) -> None:
    database.transact(worlds._write, world, WorldMeta(state, 0, 1))


def everything(database: Database) -> list[tuple[bytes, bytes]]:
    return database.read(Transaction.scan, b"", b"\xff", limit=10_000)


# The layer.


def test_a_world_is_created_once_active_and_empty(database: Database, clock: ManualClock) -> None:
    made = database.transact(worlds.create, ADA)
    assert made == WorldMeta(WorldState.ACTIVE, clock.now_ms(), 1)
    clock.advance_ms(1_000)
    with pytest.raises(WorldExists, match="ada exists already"):
        database.transact(worlds.create, ADA)
    assert database.read(worlds.describe, ADA) == made
    assert database.read(journals.head, ADA) == 0
    assert database.read(inboxes.cursor, ADA) is None
    assert database.read(inboxes.arrivals, ADA) == 0


def test_operations_on_a_missing_world_are_refused(database: Database) -> None:
    database.transact(worlds.create, World("other", "ada"))
    before = everything(database)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (worlds.describe, (), {}),
        (journals.append, ([ENTRY],), {"expected_head": 0}),
        (inboxes.enqueue, (ITEM,), {}),
        (inboxes.drain, (), {}),
    ]
    for work, arguments, options in calls:
        with pytest.raises(WorldNotFound, match="no world ada in main; create it first"):
            database.transact(work, ADA, *arguments, **options)
    assert everything(database) == before


def test_worlds_are_listed_in_pages_however_many_keys_they_have(database: Database) -> None:
    names = [*(f"world-{number:02}" for number in range(12)), "a", "a.b", "a-b", "a_b", "a0", "zz"]

    def fill(tx: Transaction, world: World) -> None:
        worlds.create(tx, world)
        journals.append(tx, world, [ENTRY] * 40, expected_head=0)
        for _ in range(40):
            inboxes.enqueue(tx, world, ITEM)

    for name in names:
        database.transact(fill, World("main", name))
    database.transact(fill, World("main.other", "elsewhere"))
    listed: list[str] = []
    while page := database.read(worlds.names, "main", after=listed[-1] if listed else "", limit=5):
        assert len(page) <= 5
        listed += page
    assert listed == sorted(names)
    assert database.read(worlds.names, "main", after="world-05", limit=2) == ["world-06", "world-07"]
    assert database.read(worlds.names, "main", after="world-055", limit=1) == ["world-06"]
    assert database.read(worlds.names, "main", after="zz", limit=5) == []
    assert database.read(worlds.names, "unused", limit=5) == []


def test_a_world_without_its_first_records_is_listed_too(database: Database) -> None:
    """Heights are plain bytes, which a listing must not parse as tuples."""
    database.transact(worlds.create, ADA)
    database.transact(journals.append, ADA, [ENTRY] * 5, expected_head=0)
    database.transact(journals.trim, ADA, 4, 100)
    assert database.read(worlds.names, "main", limit=5) == ["ada"]


def test_a_damaged_key_does_not_repeat_a_name_without_end(database: Database) -> None:
    parent = Subspace("u")
    database.transact(Transaction.put, parent.key("main") + b"\xff\xff", b"damaged")
    database.transact(Transaction.put, parent.key("other") + b"\xff", b"damaged")
    found = [database.read(worlds.universes, after=after, limit=10) for after in ("", "main", "other")]
    assert found == [["main", "other"], ["other"], []]


def test_keys_of_a_caller_among_those_of_universes_are_no_names(database: Database) -> None:
    database.transact(worlds.create, World("main", "ada"))
    for element in (b"bytes", 7, None, True):
        database.transact(lambda tx, element=element: tx.put(Subspace("u").key(element, "w", "x"), b""))
    assert database.read(worlds.universes, after="", limit=1) == ["main"]
    assert database.read(worlds.universes, after="main", limit=1) == []


def test_universes_have_separate_worlds(database: Database) -> None:
    other = World("other", "ada")
    for world in (ADA, other):
        database.transact(worlds.create, world)
    database.transact(journals.append, ADA, [ENTRY], expected_head=0)
    database.transact(inboxes.enqueue, ADA, ITEM)
    assert database.read(journals.head, other) == 0
    assert database.read(inboxes.read, other, after=None, limit=10) == []
    assert database.read(worlds.names, "other", limit=10) == ["ada"]


@pytest.mark.parametrize("state", [WorldState.PAUSING, WorldState.PAUSED])
def test_a_paused_world_accepts_inbox_items_only(database: Database, state: WorldState) -> None:
    database.transact(worlds.create, ADA)
    put_in_state(database, ADA, state)
    assert database.transact(inboxes.enqueue, ADA, ITEM) == 0
    with pytest.raises(WorldNotActive, match=f"ada is {state}; resume it"):
        database.transact(journals.append, ADA, [ENTRY], expected_head=0)
    with pytest.raises(WorldNotActive, match=f"ada is {state}; resume it"):
        database.transact(inboxes.drain, ADA)
    assert (database.read(journals.head, ADA), database.read(inboxes.cursor, ADA)) == (0, None)
    put_in_state(database, ADA, WorldState.ACTIVE)
    assert database.transact(inboxes.drain, ADA) == [0]


@pytest.mark.parametrize("state", [WorldState.ARCHIVING, WorldState.ARCHIVED, WorldState.DELETING])
def test_an_archived_world_accepts_nothing(database: Database, state: WorldState) -> None:
    database.transact(worlds.create, ADA)
    database.transact(inboxes.enqueue, ADA, ITEM)
    put_in_state(database, ADA, state)
    before = everything(database)
    with pytest.raises(WorldNotActive, match=f"ada is {state}; its inbox accepts no items"):
        database.transact(inboxes.enqueue, ADA, ITEM)
    with pytest.raises(WorldNotActive):
        database.transact(journals.append, ADA, [ENTRY], expected_head=0)
    with pytest.raises(WorldNotActive):
        database.transact(inboxes.drain, ADA)
    with pytest.raises(WorldExists):
        database.transact(worlds.create, ADA)
    assert everything(database) == before


def test_a_deleted_world_keeps_only_its_lifecycle_record(database: Database) -> None:
    """Keys exist before and after the record that stays; a step is done only when no other key is left."""
    database.transact(worlds.create, ADA)
    database.transact(journals.append, ADA, [ENTRY] * 2, expected_head=0)
    behind = worlds.subspace(ADA).at("snapshot", "by_height")
    for height in range(5):
        database.transact(Transaction.put, behind.key(height), b"")
    before = everything(database)
    assert database.transact(worlds.clear, ADA, 1, 2)  # It is not being deleted.
    assert everything(database) == before
    put_in_state(database, ADA, WorldState.DELETING)
    for _ in range(20):
        if database.transact(worlds.clear, ADA, 1, 2):
            break
    left = [key for key, _ in database.read(Transaction.scan, *worlds.subspace(ADA).range(), limit=100)]
    assert left == [worlds.subspace(ADA).key("meta")]


def test_a_deleted_world_is_created_again_as_its_next_incarnation(database: Database, clock: ManualClock) -> None:
    database.transact(worlds.create, ADA)
    put_in_state(database, ADA, WorldState.DELETING)
    before = everything(database)
    with pytest.raises(WorldExists, match="ada is being deleted; finish that by deleting it again"):
        database.transact(worlds.create, ADA)
    assert everything(database) == before
    database.transact(worlds.end_delete, ADA, 1)
    with pytest.raises(WorldNotFound, match="ada was deleted; create it"):
        database.read(worlds.describe, ADA)
    assert database.read(worlds.names, "main", limit=5) == []
    database.transact(worlds.create, BOB)
    assert database.read(worlds.names, "main", limit=1) == ["bob"]
    assert database.transact(worlds.create, ADA) == WorldMeta(WorldState.ACTIVE, clock.now_ms(), 2)
    assert database.read(worlds.describe, ADA, 2).incarnation == 2
    with pytest.raises(WorldNotFound, match="Incarnation 1 of world ada does not exist: the current one is 2"):
        database.read(worlds.describe, ADA, 1)
    assert database.transact(worlds.end_delete, ADA, 1) is None  # A late step of the earlier deletion.
    assert database.read(worlds.names, "main", limit=5) == ["ada", "bob"]


# The handles.


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str) -> Iterator[Plane]:
    with fastness.open(url) as plane:
        yield plane


def test_a_handle_creates_describes_and_lists_worlds(plane: Plane) -> None:
    ada = plane.world("ada")
    with pytest.raises(WorldNotFound):
        ada.describe()
    with pytest.raises(WorldNotFound):
        ada.head()
    made = ada.create()
    assert (made.name, made.state) == ("ada", "active")
    assert ada.describe() == made
    with pytest.raises(WorldExists):
        plane.world("ada").create()
    ada.append(["x", "y"], expected_head=made.head)
    assert ada.describe().head == ada.head() == made.head + 2
    for name in ("dora", "bob", "carl"):
        plane.world(name).create()
    assert plane.worlds() == ["ada", "bob", "carl", "dora"]
    assert plane.worlds(after="ada", limit=2) == ["bob", "carl"]


async def test_an_async_handle_does_the_same(url: str) -> None:
    async with fastness.open_async(url) as plane:
        ada = plane.world("ada")
        with pytest.raises(WorldNotFound):
            await ada.describe()
        made = await ada.create()
        assert await ada.describe() == made
        with pytest.raises(WorldExists):
            await plane.world("ada").create()
        await plane.world("bob").create()
        assert await plane.worlds(after="ada") == ["bob"]
        assert await ada.append(["x"], expected_head=made.head) == made.head
        assert await ada.inbox.put(ITEM) == 0
        assert await ada.drain() == [made.head + 1]
        assert [record.kind for record in await ada.read(made.head)] == ["entry", "ingress"]
        assert await ada.inbox.cursor() == 0
        assert await ada.inbox.read() == [(0, ITEM)]


def test_names_keep_their_case(plane: Plane) -> None:
    assert plane.world("Ada").create().name == "Ada"
    assert plane.world("ada").create().name == "ada"
    assert plane.worlds(after="AD") == ["Ada", "ada"]
    with pytest.raises(WorldExists):
        plane.world("Ada").create()


def test_an_invalid_world_name_is_refused_before_a_request_has_it() -> None:
    names: list[Any] = ["a b", None, b"ada"]
    with fastness.open("memory:") as plane:
        for name in names:
            with pytest.raises(InvalidName, match="Invalid world name"):
                plane.world(name)


def test_a_listing_after_an_invalid_name_is_refused(plane: Plane) -> None:
    with pytest.raises(InvalidName):
        plane.worlds(after="a b")


def test_one_entry_instead_of_a_list_is_refused(plane: Plane) -> None:
    ada = plane.world("ada")
    ada.create()
    failures = Failures()
    one: list[Any] = [{"by": 1}, "text", b"bytes", bytearray(b"bytes"), 5, None]
    for entries in one:
        with failures.of(entries):
            with pytest.raises(InvalidArgument, match=r"wrap it in a list: append\(\[entry\]"):
                ada.append(entries, expected_head=0)
            with pytest.raises(InvalidArgument, match=r"wrap it in a list: append\(world, \[entry\]"):
                plane.atomic().append(ada, entries, expected_head=0)
    failures.check()
    assert ada.head() == 0
    assert ada.append((each for each in ({"by": 1}, "text")), expected_head=0) == 0
    assert ada.head() == 2


def test_reading_a_missing_world_is_refused(plane: Plane) -> None:
    ada = plane.world("ada")
    for call in (ada.read, ada.inbox.read, ada.inbox.cursor):
        with pytest.raises(WorldNotFound):
            call()


def test_handles_of_universes_have_separate_worlds() -> None:
    with fastness.open("memory:", universe="Tenant") as plane:
        plane.world("ada").create()
        assert plane.transact(worlds.names, "Tenant", limit=5) == ["ada"]
        assert plane.transact(worlds.names, "main", limit=5) == []


def test_two_worlds_change_atomically(plane: Plane) -> None:
    heads = {name: plane.world(name).create().head for name in ("ada", "bob")}

    def send(tx: Transaction, expected_head: int) -> tuple[int, int]:
        """Enqueue an item for bob, and record it in ada's journal."""
        sequence = inboxes.enqueue(tx, BOB, ITEM)
        return journals.append(tx, ADA, [ENTRY], expected_head=expected_head), sequence

    with pytest.raises(fastness.errors.HeadAdvanced):
        plane.transact(send, heads["ada"] + 1)
    assert (plane.world("ada").head(), plane.world("bob").inbox.read()) == (heads["ada"], [])
    assert plane.transact(send, heads["ada"]) == (heads["ada"], 0)
    assert (plane.world("ada").head(), plane.world("bob").inbox.read()) == (heads["ada"] + 1, [(0, ITEM)])
    assert plane.world("bob").drain() == [heads["bob"]]


async def test_two_worlds_change_atomically_on_an_event_loop(url: str) -> None:
    async with fastness.open_async(url) as plane:
        head = (await plane.world("ada").create()).head
        await plane.world("bob").create()

        def send(tx: Transaction) -> None:
            inboxes.enqueue(tx, BOB, ITEM)
            journals.append(tx, ADA, [ENTRY], expected_head=head)

        await plane.transact(send)
        with pytest.raises(fastness.errors.HeadAdvanced):
            await plane.transact(send)
        assert await plane.world("ada").head() == head + 1
        assert await plane.world("bob").inbox.read() == [(0, ITEM)]


def test_a_world_is_durable(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        ada = plane.world("ada")
        head = ada.create().head
        ada.append(["x"], expected_head=head)
        ada.inbox.put(ITEM)
        ada.inbox.put(ITEM)
        ada.drain(limit=1)
        before = (ada.describe(), ada.read(), ada.inbox.read(), ada.inbox.cursor())
    with fastness.open(f"dir:{tmp_path}") as plane:
        ada = plane.world("ada")
        assert (ada.describe(), ada.read(), ada.inbox.read(), ada.inbox.cursor()) == before
        assert ada.drain() == [head + 2]
