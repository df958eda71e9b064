"""Worlds: they are made once, found by name, listed in order, and take what their state allows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Plane
from holdfast.errors import InvalidArgument, InvalidName, WorldExists, WorldNotActive, WorldNotFound
from holdfast.kv import Database, Transaction
from holdfast.layers import inboxes, journal_records, journals, worlds
from holdfast.layers.worlds import World, WorldMeta, WorldState
from holdfast.testing.clock import ManualClock
from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import Control

ADA = World("main", "ada")
BOB = World("main", "bob")
ENTRY = journal_records.entry(canonical("entry"))
ITEM = Control(command="go")


def put_in_state(database: Database, world: World, state: WorldState) -> None:
    database.transact(worlds._write, world, WorldMeta(state, 0))


def everything(database: Database) -> list[tuple[bytes, bytes]]:
    return database.read(Transaction.scan, b"", b"\xff", limit=10_000)


# The layer.


def test_a_world_is_made_once_active_and_empty(database: Database, clock: ManualClock) -> None:
    made = database.transact(worlds.create, ADA)
    assert made == WorldMeta(WorldState.ACTIVE, clock.now_ms())
    clock.advance_ms(1_000)
    with pytest.raises(WorldExists, match="ada exists already"):
        database.transact(worlds.create, ADA)
    assert database.read(worlds.describe, ADA) == made
    assert database.read(journals.head, ADA) == 0
    assert database.read(inboxes.cursor, ADA) is None
    assert database.read(inboxes.arrivals, ADA) == 0


def test_nothing_can_be_done_with_a_world_that_nobody_made(database: Database) -> None:
    database.transact(worlds.create, World("other", "ada"))
    before = everything(database)
    for work, arguments, options in (
        (worlds.describe, (), {}),
        (journals.append, ([ENTRY],), {"expected_head": 0}),
        (inboxes.enqueue, (ITEM,), {}),
        (inboxes.drain, (), {}),
    ):
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
    assert database.read(worlds.names, "nobody", limit=5) == []


def test_a_world_without_its_first_records_is_listed_too(database: Database) -> None:
    """Heights are plain bytes and no tuples: a listing must not read them as such."""
    database.transact(worlds.create, ADA)
    database.transact(journals.append, ADA, [ENTRY] * 5, expected_head=0)
    database.transact(journals.trim, ADA, 4, 100)
    assert database.read(worlds.names, "main", limit=5) == ["ada"]


def test_worlds_of_two_universes_do_not_see_each_other(database: Database) -> None:
    other = World("other", "ada")
    for world in (ADA, other):
        database.transact(worlds.create, world)
    database.transact(journals.append, ADA, [ENTRY], expected_head=0)
    database.transact(inboxes.enqueue, ADA, ITEM)
    assert database.read(journals.head, other) == 0
    assert database.read(inboxes.read, other, after=None, limit=10) == []
    assert database.read(worlds.names, "other", limit=10) == ["ada"]


@pytest.mark.parametrize("state", [WorldState.PAUSING, WorldState.PAUSED])
def test_a_paused_world_takes_items_and_nothing_else(database: Database, state: WorldState) -> None:
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


@pytest.mark.parametrize("state", [WorldState.ARCHIVING, WorldState.ARCHIVED, WorldState.DELETING, WorldState.DELETED])
def test_an_archived_world_takes_nothing(database: Database, state: WorldState) -> None:
    database.transact(worlds.create, ADA)
    database.transact(inboxes.enqueue, ADA, ITEM)
    put_in_state(database, ADA, state)
    before = everything(database)
    with pytest.raises(WorldNotActive, match=f"ada is {state}, and takes no items any more"):
        database.transact(inboxes.enqueue, ADA, ITEM)
    with pytest.raises(WorldNotActive):
        database.transact(journals.append, ADA, [ENTRY], expected_head=0)
    with pytest.raises(WorldNotActive):
        database.transact(inboxes.drain, ADA)
    with pytest.raises(WorldExists):
        database.transact(worlds.create, ADA)
    assert everything(database) == before


def test_a_deleted_world_leaves_its_name_and_nothing_else(database: Database) -> None:
    """Keys lie before and behind the one that stays; whatever a step leaves over, it must not say that it is done."""
    database.transact(worlds.create, ADA)
    database.transact(journals.append, ADA, [ENTRY] * 2, expected_head=0)
    behind = worlds.subspace(ADA).at("snapshot", "by_height")
    for height in range(5):
        database.transact(Transaction.put, behind.key(height), b"")
    for _ in range(20):
        if database.transact(worlds.clear, ADA, 2):
            break
    left = [key for key, _ in database.read(Transaction.scan, *worlds.subspace(ADA).range(), limit=100)]
    assert left == [worlds.subspace(ADA).key("meta")]


# The handles.


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str) -> Iterator[Plane]:
    with holdfast.open(url) as plane:
        yield plane


def test_a_handle_makes_describes_and_lists_worlds(plane: Plane) -> None:
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
    async with holdfast.open_async(url) as plane:
        ada = plane.world("ada")
        with pytest.raises(WorldNotFound):
            await ada.describe()
        made = await ada.create()
        assert await ada.describe() == made
        with pytest.raises(WorldExists):
            await plane.world("ADA").create()
        await plane.world("bob").create()
        assert await plane.worlds(after="ada") == ["bob"]
        assert await ada.append(["x"], expected_head=made.head) == made.head
        assert await ada.inbox.put(ITEM) == 0
        assert await ada.drain() == [made.head + 1]
        assert [record.kind for record in await ada.read(made.head)] == ["entry", "ingress"]
        assert await ada.inbox.cursor() == 0
        assert await ada.inbox.read() == [(0, ITEM)]


def test_names_have_no_case(plane: Plane) -> None:
    assert plane.world("Ada").create().name == "ada"
    assert plane.world("ADA").name == "ada"
    assert plane.worlds(after="AD") == ["ada"]
    with pytest.raises(WorldExists):
        plane.world("aDA").create()


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", "ü", "a\x00", "a\n", "a" * 129, None, 7, b"ada"])
def test_a_world_has_a_proper_name(plane: Plane, name: str) -> None:
    with pytest.raises(InvalidName, match="is no name for a world"):
        plane.world(name)


def test_a_listing_starts_behind_a_proper_name(plane: Plane) -> None:
    with pytest.raises(InvalidName):
        plane.worlds(after="a b")


@pytest.mark.parametrize("limit", [0, -1, 10_001])
def test_a_page_of_worlds_has_bounds(plane: Plane, limit: int) -> None:
    with pytest.raises(InvalidArgument):
        plane.worlds(limit=limit)


def test_a_world_that_nobody_made_is_not_read_as_empty(plane: Plane) -> None:
    ada = plane.world("ada")
    for call in (ada.read, ada.inbox.read, ada.inbox.cursor):
        with pytest.raises(WorldNotFound):
            call()


def test_universes_have_worlds_of_their_own() -> None:
    with holdfast.open("memory:", universe="Tenant") as plane:
        plane.world("ada").create()
        assert plane.transact(worlds.names, "tenant", limit=5) == ["ada"]
        assert plane.transact(worlds.names, "main", limit=5) == []


def test_two_worlds_change_in_one_commit_or_not_at_all(plane: Plane) -> None:
    heads = {name: plane.world(name).create().head for name in ("ada", "bob")}

    def send(tx: Transaction, expected_head: int) -> tuple[int, int]:
        """Tell bob, and note in ada's journal that he was told."""
        sequence = inboxes.enqueue(tx, BOB, ITEM)
        return journals.append(tx, ADA, [ENTRY], expected_head=expected_head), sequence

    with pytest.raises(holdfast.errors.HeadAdvanced):
        plane.transact(send, heads["ada"] + 1)
    assert (plane.world("ada").head(), plane.world("bob").inbox.read()) == (heads["ada"], [])
    assert plane.transact(send, heads["ada"]) == (heads["ada"], 0)
    assert (plane.world("ada").head(), plane.world("bob").inbox.read()) == (heads["ada"] + 1, [(0, ITEM)])
    assert plane.world("bob").drain() == [heads["bob"]]


async def test_two_worlds_change_in_one_commit_on_a_loop(url: str) -> None:
    async with holdfast.open_async(url) as plane:
        head = (await plane.world("ada").create()).head
        await plane.world("bob").create()

        def send(tx: Transaction) -> None:
            inboxes.enqueue(tx, BOB, ITEM)
            journals.append(tx, ADA, [ENTRY], expected_head=head)

        await plane.transact(send)
        with pytest.raises(holdfast.errors.HeadAdvanced):
            await plane.transact(send)
        assert await plane.world("ada").head() == head + 1
        assert await plane.world("bob").inbox.read() == [(0, ITEM)]


def test_a_world_outlives_its_process(tmp_path: Path) -> None:
    with holdfast.open(f"dir:{tmp_path}") as plane:
        ada = plane.world("ada")
        head = ada.create().head
        ada.append(["x"], expected_head=head)
        ada.inbox.put(ITEM)
        ada.inbox.put(ITEM)
        ada.drain(limit=1)
        before = (ada.describe(), ada.read(), ada.inbox.read(), ada.inbox.cursor())
    with holdfast.open(f"dir:{tmp_path}") as plane:
        ada = plane.world("ada")
        assert (ada.describe(), ada.read(), ada.inbox.read(), ada.inbox.cursor()) == before
        assert ada.drain() == [head + 2]
