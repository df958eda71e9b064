"""The store of LangGraph: time to live, batches, vectors, large items, and use in graphs."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.store.base import BaseStore, GetOp, InvalidNamespaceError, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

import fastness
from fastness import Plane, limits
from fastness.errors import InvalidArgument, InvalidValue, KeyTooLarge
from fastness.langgraph import FastnessSaver, FastnessStore, vectors
from fastness.testing.clock import ManualClock

MINUTE_MS = 60_000
USERS = ("users", "ada")


@pytest.fixture
def plane(tmp_path: Path, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        yield plane


def keys(found: list[Any]) -> list[str]:
    return [item.key for item in found]


def test_an_item_keeps_when_it_was_created(plane: Plane) -> None:
    store = FastnessStore(plane)
    begin = datetime.now(UTC)
    store.put(USERS, "a", {"n": 1})
    first = store.get(USERS, "a")
    store.put(USERS, "a", {"n": 2})
    second = store.get(USERS, "a")
    assert first is not None
    assert second is not None
    assert second.value == {"n": 2}
    assert begin.timestamp() - 0.001 <= first.created_at.timestamp() <= second.updated_at.timestamp()
    assert second.created_at == first.created_at


def test_items_expire_unless_they_are_read(plane: Plane, clock: ManualClock) -> None:
    store = FastnessStore(plane, ttl={"default_ttl": 10, "refresh_on_read": True})
    for key in ("got", "found", "looked at", "left"):
        store.put(USERS, key, {"key": key})
    store.put(USERS, "kept", {"key": "kept"}, ttl=None)
    clock.advance_ms(9 * MINUTE_MS)
    store.get(USERS, "got")
    store.search(("users",), filter={"key": "found"})
    store.get(USERS, "looked at", refresh_ttl=False)
    clock.advance_ms(9 * MINUTE_MS)
    assert keys(store.search((), refresh_ttl=False)) == ["found", "got", "kept"]
    assert store.get(USERS, "left") is None
    clock.advance_ms(9 * MINUTE_MS)
    assert keys(store.search((), refresh_ttl=False)) == ["kept"]


def test_reading_an_item_does_not_undo_a_write(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = FastnessStore(plane), FastnessStore(plane)
    store.put(USERS, "a", {"n": 1}, ttl=1)
    read = store._access.get_many

    async def read_and_write(*args: Any) -> Any:
        rows = await read(*args)
        other.put(USERS, "a", {"n": 2}, ttl=1)
        return rows

    monkeypatch.setattr(store._access, "get_many", read_and_write)
    store.get(USERS, "a")
    found = other.get(USERS, "a")
    assert found is not None
    assert found.value == {"n": 2}


def test_the_writes_of_a_batch_are_one_commit_and_its_reads_come_first(plane: Plane) -> None:
    store = FastnessStore(plane)
    store.put(USERS, "a", {"n": 0})
    seen: list[Any] = []
    plane._transport.services.database.subscribe(lambda *_: seen.append(1))  # type: ignore[attr-defined]
    results = store.batch(
        [
            PutOp(USERS, "b", {"n": 1}),
            GetOp(USERS, "b"),
            PutOp(USERS, "b", {"n": 2}),
            PutOp(USERS, "a", None),
            SearchOp(("users",)),
            *(PutOp(("many", str(number)), "c", {"n": number}) for number in range(100)),
        ]
    )
    assert len(seen) == 1
    assert results[:4] == [None] * 4
    assert keys(results[4]) == ["a"]  # type: ignore[arg-type]
    assert [item.value for item in store.search(("users",))] == [{"n": 2}]
    assert len(store.list_namespaces(prefix=("many",))) == 100


def test_more_writes_than_a_commit_has_are_stored(plane: Plane) -> None:
    store = FastnessStore(plane)
    store.batch([PutOp(USERS, f"{number:04}", {"text": "x" * 20_000}) for number in range(300)])
    assert keys(store.search((), limit=1_000)) == [f"{number:04}" for number in range(300)]
    assert keys(store.search((), limit=3, offset=290)) == ["0290", "0291", "0292"]


def test_a_large_item_is_a_blob_that_a_collection_keeps(plane: Plane, clock: ManualClock) -> None:
    store = FastnessStore(plane)
    large = {"text": "x" * 3_000_000}
    store.put(USERS, "a", large)
    for _ in range(3):
        plane.gc()
        clock.advance_ms(3 * 86_400_000)
    assert [item.value for item in store.search(USERS)] == [large]


def embed(texts: Sequence[str]) -> list[list[float]]:
    """A vector has the frequencies of some letters."""
    return [[float(text.count(letter)) for letter in "abcde"] for text in texts]


@pytest.mark.parametrize("has_numpy", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_items_are_found_by_similarity_as_in_the_store_in_memory(
    plane: Plane, has_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_numpy:
        monkeypatch.setattr(vectors, "numpy", None)
    index: Any = {"dims": 5, "embed": embed, "fields": ["text", "notes[*].text"]}
    ours, theirs = FastnessStore(plane, index=index), InMemoryStore(index=index)
    items: list[tuple[str, dict[str, Any], Any]] = [
        ("1", {"text": "aaab"}, None),
        ("2", {"text": "ccc", "notes": [{"text": "abbbb"}, {"text": "eeeed"}]}, None),
        ("3", {"text": "ddda"}, None),
        ("4", {"text": "aaaac"}, False),
        ("5", {"other": "bbbba"}, ["other"]),
        ("6", {"text": "none of these: xyz"}, None),
    ]
    for key, value, fields in items:
        for store in (ours, theirs):
            store.put(USERS, key, value, index=fields)
    for query in ("a", "abbb", "dde", "c"):
        for options in ({"limit": 10}, {"limit": 2}, {"limit": 2, "offset": 1}, {"filter": {"text": "ddda"}}):
            expected = theirs.search(("users",), query=query, **options)
            found = ours.search(("users",), query=query, **options)
            assert keys(found) == keys(expected)
            assert [item.score for item in found] == pytest.approx([item.score for item in expected], abs=1e-5)


def test_pages_of_a_search_by_similarity_repeat_nothing(plane: Plane) -> None:
    store = FastnessStore(plane, index={"dims": 5, "embed": embed, "fields": ["text"]})
    for number in range(7):
        store.put(USERS, str(number), {"text": "a" * number} if number % 2 else {"other": "a"})
    whole = keys(store.search(USERS, query="a", limit=10))
    assert len(whole) == 7
    for size in (1, 2, 3):
        pages = [store.search(USERS, query="a", limit=size, offset=start) for start in range(0, 8, size)]
        assert [key for page in pages for key in keys(page)] == whole


def test_a_search_compares_a_bounded_number_of_vectors(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.langgraph.store.LANGGRAPH_VECTORS_MAX", 3)
    store = FastnessStore(plane, index={"dims": 5, "embed": embed})
    store.batch([PutOp(USERS, str(number), {"text": "a"}) for number in range(4)])
    with pytest.raises(InvalidArgument, match="longer namespace"):
        store.search((), query="a")
    assert len(store.search((), query="a", filter={"text": "b"})) == 0
    assert len(FastnessStore(plane).search((), query="a")) == 4  # Without an index a query is ignored.


class State(TypedDict):
    name: str
    visits: int


def visit(state: State, *, store: BaseStore) -> dict[str, Any]:
    found = store.get(("visits",), state["name"])
    visits = 1 + (found.value["visits"] if found else 0)
    store.put(("visits",), state["name"], {"visits": visits})
    return {"visits": visits}


async def visit_async(state: State, *, store: BaseStore) -> dict[str, Any]:
    found = await store.aget(("visits",), state["name"])
    visits = 1 + (found.value["visits"] if found else 0)
    await store.aput(("visits",), state["name"], {"visits": visits})
    return {"visits": visits}


def graph_with(plane: Any, node: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("visit", node)
    builder.add_edge(START, "visit")
    builder.add_edge("visit", END)
    return builder.compile(checkpointer=FastnessSaver(plane), store=FastnessStore(plane))


async def test_a_graph_remembers_across_threads(plane: Plane) -> None:
    for number in range(2):
        config: Any = {"configurable": {"thread_id": str(number)}}
        assert graph_with(plane, visit).invoke({"name": "ada"}, config)["visits"] == number + 1
    async with fastness.open_async("memory:") as async_plane:
        for number in range(2):
            config = {"configurable": {"thread_id": str(number)}}
            found = await graph_with(async_plane, visit_async).ainvoke({"name": "ada"}, config)
            assert found["visits"] == number + 1
        with pytest.raises(asyncio.InvalidStateError, match="another thread"):
            FastnessStore(async_plane).get(("visits",), "ada")


def test_bad_arguments_are_refused_and_nothing_is_written(plane: Plane) -> None:
    store = FastnessStore(plane)
    good = PutOp(USERS, "good", {})
    for bad, error in (
        (PutOp(("a.b",), "key", {}), InvalidNamespaceError),
        (PutOp(("a", ""), "key", {}), InvalidNamespaceError),
        (PutOp((), "key", {}), InvalidNamespaceError),
        (PutOp(USERS, "key", {"value": {1, 2}}), InvalidValue),
        (PutOp(USERS, "key", {"value": float("nan")}), InvalidValue),
        (PutOp(USERS, "x" * limits.COLLECTION_KEY_BYTES_MAX, {}), KeyTooLarge),
        (SearchOp((), limit=-1), InvalidArgument),
        ("get", InvalidArgument),
    ):
        with pytest.raises(error):
            store.batch([good, bad])  # type: ignore[list-item]
    assert store.get((), "key") is None
    store.delete((), "key")
    store.put(USERS, "a", {"n": 1})
    with pytest.raises(ValueError, match=r"\$near"):
        store.search((), filter={"n": {"$near": 1}})
    assert keys(store.search(())) == ["a"]
