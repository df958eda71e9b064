"""The checkpointer passes LangGraph's published conformance suite on every key space and through a server.

The suite calls asynchronous methods. `ThroughSync` passes each of them to its synchronous twin. There is no such suite
for stores: ours is compared with LangGraph's store in memory.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import ProgressCallbacks
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore

import fastness
from fastness.langgraph import FastnessSaver, FastnessStore
from tests.conformance.conftest import KINDS_AND_MODES
from tests.support.server_process import Server

CAPABILITIES = {
    "put",
    "put_writes",
    "get_tuple",
    "list",
    "delete_thread",
    "delete_for_runs",
    "copy_thread",
    "prune",
}
TESTS = 81  # Of version 0.0.2 of the suite.


class ThroughSync(BaseCheckpointSaver[int]):
    """Runs the synchronous methods of a saver, in a thread."""

    def __init__(self, saver: FastnessSaver) -> None:
        super().__init__(serde=saver.serde)
        self.saver = saver

    async def aget_tuple(self, config: Any) -> Any:
        return await asyncio.to_thread(self.saver.get_tuple, config)

    async def alist(self, config: Any, **options: Any) -> AsyncIterator[Any]:
        for found in await asyncio.to_thread(lambda: list(self.saver.list(config, **options))):
            yield found

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        return await asyncio.to_thread(self.saver.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        await asyncio.to_thread(self.saver.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        await asyncio.to_thread(self.saver.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await asyncio.to_thread(self.saver.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await asyncio.to_thread(self.saver.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await asyncio.to_thread(self.saver.prune, thread_ids, strategy=strategy)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(params=KINDS_AND_MODES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The URL of a plane, and the kind of methods to use."""
    kind, methods = request.param
    if kind == "postgres":
        found: str = request.getfixturevalue("postgres_url")
    elif kind == "remote":
        found = request.getfixturevalue("server").url
    else:
        found = "memory:" if kind == "memory" else f"dir:{tmp_path}"
    return found, methods


async def test_every_capability_passes(place: tuple[str, str]) -> None:
    url, methods = place
    collection = f"langgraph-{uuid.uuid4().hex}"

    @checkpointer_test(name=f"{methods} methods at {url}")
    async def savers() -> AsyncIterator[BaseCheckpointSaver[int]]:
        if methods == "async":
            opened = fastness.connect_async(url) if url.startswith("http") else fastness.open_async(url)
            async with opened as plane:
                yield FastnessSaver(plane, collection=collection)
        else:
            with fastness.connect(url) if url.startswith("http") else fastness.open(url) as plane:
                yield ThroughSync(FastnessSaver(plane, collection=collection))

    report = await validate(savers, progress=ProgressCallbacks.quiet())

    failures = {name: result.failures for name, result in report.results.items() if result.failures}
    assert not failures
    assert set(report.results) == CAPABILITIES
    assert all(result.detected and result.passed for result in report.results.values())
    assert sum(result.tests_passed for result in report.results.values()) == TESTS


def embed(texts: list[str]) -> list[list[float]]:
    return [[float(text.count(letter)) for letter in "0123456789"] for text in texts]


def used(store: BaseStore) -> list[Any]:
    """What a store returns in a few steps."""
    for number in range(40):
        store.put(("items", f"kind {number % 3}"), f"{number:02}", {"n": number, "text": f"{number}" * 3})
    for number in range(0, 40, 7):
        store.delete(("items", f"kind {number % 3}"), f"{number:02}")
    store.put(("items", "kind 1"), "01", {"n": -1, "text": ""}, ttl=None)
    found: list[Any] = [
        store.get(("items", "kind 1"), "01"),
        store.get(("items", "kind 1"), "07"),
        *store.search(("items",), filter={"n": {"$gte": 20, "$lt": 30}}, limit=100),
        *store.search(("items", "kind 2"), limit=3, offset=2),
        *store.search(("items",), query="33", limit=1),
    ]
    shown = [item and (item.namespace, item.key, item.value) for item in found]
    return [*shown[:2], sorted(shown[2:], key=str), store.list_namespaces(suffix=("*",)), store.search(("other",))]


async def test_a_store_behaves_like_the_one_in_memory(place: tuple[str, str]) -> None:
    url, methods = place
    index: Any = {"dims": 10, "embed": embed, "fields": ["text"]}
    options: Any = {"collection": f"store-{uuid.uuid4().hex}", "index": index}
    expected = await asyncio.to_thread(used, InMemoryStore(index=index))
    if methods == "async":
        async with fastness.connect_async(url) if url.startswith("http") else fastness.open_async(url) as plane:
            store = FastnessStore(plane, **options)
            assert await asyncio.to_thread(used, store) == expected
            assert (await store.aget(("items", "kind 1"), "01")).value["n"] == -1
            assert len(await store.asearch((), limit=100)) == 34
    else:
        with fastness.connect(url) if url.startswith("http") else fastness.open(url) as plane:
            assert used(FastnessStore(plane, **options)) == expected
