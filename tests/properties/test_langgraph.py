"""The saver and the store of LangGraph behave like LangGraph's own ones in memory."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import ERROR, RESUME, _DeltaSnapshot
from langgraph.store.base import Item
from langgraph.store.memory import InMemoryStore

import fastness
from fastness import Plane
from fastness.langgraph import FastnessSaver, FastnessStore, Retention

LABELS = st.sampled_from(["a", "a-", "b", "*", "é"])
NAMESPACES = st.lists(LABELS, min_size=1, max_size=3).map(tuple)
PATHS = st.lists(LABELS, max_size=3).map(tuple)
KEYS = st.sampled_from(["1", "2", "x/y"])
SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "1", "x"])
VALUES = st.dictionaries(
    st.sampled_from(["n", "m"]),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("k"), inner), max_leaves=3
    ),
)
NUMBERS = st.dictionaries(st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"]), st.integers(-2, 2), min_size=1)
FILTERS = st.none() | st.dictionaries(st.sampled_from(["n", "m"]), NUMBERS | VALUES | SCALARS, max_size=2)
STORE_STEPS = st.one_of(
    st.tuples(st.just("put"), NAMESPACES, KEYS, VALUES),
    st.tuples(st.just("put"), NAMESPACES, KEYS, VALUES),
    st.tuples(st.just("delete"), NAMESPACES, KEYS),
    st.tuples(st.just("get"), NAMESPACES, KEYS),
    st.tuples(st.just("search"), PATHS, FILTERS),
    st.tuples(st.just("page"), PATHS, st.integers(0, 4), st.integers(0, 4)),
    st.tuples(
        st.just("namespaces"),
        st.none() | PATHS,
        st.none() | PATHS,
        st.none() | st.integers(1, 3),
        st.integers(0, 6),
        st.integers(0, 3),
    ),
)


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


numbers = count()


def shown(item: Item | None) -> Any:
    return item and (item.namespace, item.key, item.value)


def searched(store: InMemoryStore, prefix: tuple[str, ...], wanted: Any) -> list[Any]:
    """What the store in memory finds, in our order; it raises if a value has no order, which finds nothing here."""
    found = []
    for item in store.search(prefix, limit=1_000):
        try:
            alone = InMemoryStore()
            alone.put(item.namespace, item.key, item.value)
            found += [shown(each) for each in alone.search((), filter=wanted)]
        except (TypeError, ValueError):
            continue
    return sorted(found, key=lambda each: each[:2])


@given(st.lists(STORE_STEPS, max_size=25))
def test_the_store_behaves_like_the_one_in_memory(plane: Plane, steps: list[Any]) -> None:
    ours, theirs = FastnessStore(plane, collection=f"store-{next(numbers)}"), InMemoryStore()
    for kind, *arguments in steps:
        if kind in ("put", "delete"):
            for store in (ours, theirs):
                getattr(store, kind)(*arguments)
        elif kind == "get":
            assert shown(ours.get(*arguments)) == shown(theirs.get(*arguments))
        elif kind == "search":
            prefix, wanted = arguments
            found = [shown(item) for item in ours.search(prefix, filter=wanted, limit=1_000)]
            assert found == searched(theirs, prefix, wanted)
        elif kind == "page":
            prefix, limit, offset = arguments
            found = [shown(item) for item in ours.search(prefix, limit=limit, offset=offset)]
            assert found == searched(theirs, prefix, None)[offset : offset + limit]
        else:
            prefix, suffix, depth, limit, offset = arguments
            # The store in memory also lists namespaces without items: those that were deleted, or only read.
            model = InMemoryStore()
            for item in theirs.search((), limit=1_000):
                model.put(item.namespace, item.key, item.value)
            options: Any = {"prefix": prefix, "suffix": suffix, "max_depth": depth, "limit": limit, "offset": offset}
            assert ours.list_namespaces(**options) == model.list_namespaces(**options)


THREADS = st.sampled_from(["1", "2"])
SPACES = st.sampled_from(["", "child:1"])
PLACES = st.tuples(THREADS, SPACES)
WRITES = st.lists(st.tuples(st.sampled_from(["a", "b", ERROR, RESUME]), st.integers(0, 9)), max_size=3)
SAVER_STEPS = st.one_of(
    st.tuples(st.just("put"), PLACES, st.dictionaries(st.sampled_from(["a", "b"]), st.text(max_size=3)), st.booleans()),
    st.tuples(st.just("writes"), PLACES, WRITES, st.sampled_from(["t1", "t2"]), st.sampled_from(["", "p1", "p0"])),
    st.tuples(st.just("get"), PLACES, st.none() | st.integers(0, 9)),
    st.tuples(
        st.just("list"),
        PLACES,
        st.sampled_from([None, {}, {"source": "input"}, {"source": "loop", "step": 1}, {"none": 1}]),
        st.none() | st.integers(0, 9),
        st.none() | st.integers(0, 4),
    ),
    st.tuples(st.just("delete"), THREADS),
)


@given(st.lists(SAVER_STEPS, max_size=25))
def test_the_saver_behaves_like_the_one_in_memory(plane: Plane, steps: list[Any]) -> None:
    savers = FastnessSaver(plane, collection=f"saver-{next(numbers)}"), InMemorySaver()
    ids: dict[tuple[str, str], list[str]] = {}
    versions = count(1)

    def config(place: tuple[str, str], number: int | None = None) -> Any:
        at = {"thread_id": place[0], "checkpoint_ns": place[1]}
        if number is not None and ids.get(place):
            at["checkpoint_id"] = ids[place][number % len(ids[place])]
        return {"configurable": at}

    def compared(found: Any) -> Any:
        return found and (found.config["configurable"], *found[1:])

    for kind, *arguments in steps:
        if kind == "put":
            place, values, is_input = arguments
            new: dict[str, str | int | float] = {name: next(versions) for name in values}
            checkpoint: Any = {**empty_checkpoint(), "channel_values": values, "channel_versions": new}
            metadata: Any = {"source": "input" if is_input else "loop", "step": len(ids.get(place, ()))}
            one, other = (saver.put(config(place, -1), checkpoint, metadata, new) for saver in savers)
            assert one == other
            ids.setdefault(place, []).append(checkpoint["id"])
        elif kind == "writes":
            place, writes, task, path = arguments
            if ids.get(place):
                for saver in savers:
                    saver.put_writes(config(place, -1), writes, task, path)
        elif kind == "get":
            one, other = (compared(saver.get_tuple(config(*arguments))) for saver in savers)
            assert one == other
        elif kind == "list":
            place, wanted, before, limit = arguments
            options: Any = {"filter": wanted, "before": config(place, before), "limit": limit}
            listed = [[compared(found) for found in saver.list(config(place), **options)] for saver in savers]
            assert listed[0] == listed[1]
        else:
            for place in [place for place in ids if place[0] == arguments[0]]:
                del ids[place]
            for saver in savers:
                saver.delete_thread(arguments[0])


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["one", "other", "without"]),  # The saver; the last one has no retention.
        st.integers(0, 3),  # How far from the newest one the parent is.
        st.booleans(),  # Whether the checkpoint has a snapshot of its delta channel.
        st.sampled_from(["put"] * 8 + ["prune", "delete"]),
    ),
    max_size=20,
)


@given(TURNS, st.integers(1, 3))
def test_savers_that_take_turns_keep_what_one_alone_keeps(plane: Plane, turns: list[Any], keep: int) -> None:
    collections = f"turns-{next(numbers)}", f"alone-{next(numbers)}"
    at: Any = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}

    def opened(who: str, collection: str) -> FastnessSaver:
        return FastnessSaver(
            plane, collection=collection, keep=None if who == "without" else Retention(checkpoints=keep)
        )

    def ids(collection: str) -> list[str]:
        found = FastnessSaver(plane, collection=collection).list(at)
        return [each.config["configurable"]["checkpoint_id"] for each in found]

    savers = {who: opened(who, collections[0]) for who in ("one", "other", "without")}
    for who, back, is_snapshot, kind in turns:
        alone = opened(who, collections[1])  # A new one, which reads everything that it needs.
        kept = ids(collections[1])
        if kind == "put":
            parent = {"checkpoint_id": kept[min(back, len(kept) - 1)]} if kept else {}
            values = {"words": _DeltaSnapshot([])} if is_snapshot or not kept else {}
            checkpoint: Any = {**empty_checkpoint(), "channel_values": values, "channel_versions": {"words": 1}}
            metadata: Any = {"counters_since_delta_snapshot": {"words": (1, 1)}, "run_id": str(back)}
            for saver in (savers[who], alone):
                saver.put({"configurable": at["configurable"] | parent}, checkpoint, metadata, {"words": 1})
        for saver in (savers[who], alone):
            if kind == "prune":
                saver.prune(["1"])
            elif kind == "delete":
                saver.delete_for_runs([str(back)])
        assert ids(collections[0]) == ids(collections[1])
