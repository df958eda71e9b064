"""The checkpointer of LangGraph: commits, blobs, retention, delta channels, graphs, and errors."""

import asyncio
import operator
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from cryptography.fernet import Fernet
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.base import CipherProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, _DeltaSnapshot
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

import fastness
from fastness import Plane, PutRow, limits
from fastness.errors import InvalidArgument, KeyTooLarge, Unsupported, VersionConflict
from fastness.langgraph import FastnessSaver, Retention
from fastness.langgraph.checkpoint_rows import HISTORY_END
from fastness.testing.clock import ManualClock

DAY_MS = 86_400_000
LARGE = limits.LANGGRAPH_INLINE_BYTES_MAX + 1


@pytest.fixture
def plane(tmp_path: Path, clock: ManualClock) -> Iterator[Plane]:
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        yield plane


def thread(name: str = "1", **more: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name, "checkpoint_ns": "", **more}}


def put(saver: BaseCheckpointSaver[Any], config: RunnableConfig, /, run_id: str | None = None, **values: Any) -> Any:
    """Store a checkpoint after that of `config`, with these channel values; its configuration."""
    versions = dict.fromkeys(values, 1)
    checkpoint = {**empty_checkpoint(), "channel_values": values, "channel_versions": versions}
    metadata: Any = {"source": "loop", "step": 1} | ({"run_id": run_id} if run_id else {})
    return saver.put(config, checkpoint, metadata, versions)  # type: ignore[arg-type]


def values(found: CheckpointTuple | None) -> dict[str, Any]:
    assert found is not None
    return found.checkpoint["channel_values"]


def commits(plane: Plane) -> list[Any]:
    """A list that gets an entry with every commit of the plane."""
    found: list[Any] = []
    database = plane._transport.services.database  # type: ignore[attr-defined]
    database.subscribe(lambda keys, _: found.append(list(keys)))
    return found


# Commits and blobs.


def test_a_checkpoint_is_one_commit(plane: Plane) -> None:
    saver = FastnessSaver(plane, keep=Retention(checkpoints=2, days=1))
    config = thread()
    for number in range(4):
        seen = commits(plane)
        config = put(saver, config, run_id="run", number=number)
        assert len(seen) == 1
    seen = commits(plane)
    saver.put_writes(config, [("a", 1), ("b", 2), (ERROR, "x")], "task")
    assert len(seen) == 1


def test_an_unchanged_large_channel_is_one_blob_that_a_collection_keeps(
    plane: Plane, clock: ManualClock, tmp_path: Path
) -> None:
    def bodies() -> int:
        return len([path for path in (tmp_path / "objects").rglob("*") if path.is_file()])

    saver = FastnessSaver(plane)
    document = "x" * LARGE
    config = thread()
    for number in range(3):
        config = put(saver, config, document=document, number=number)
    saver.put_writes(config, [("document", document)], "task")
    assert bodies() == 1

    clock.advance_ms(3 * DAY_MS)
    plane.gc()
    clock.advance_ms(3 * DAY_MS)
    plane.gc()
    found = list(saver.list(thread()))
    assert [values(each) for each in found] == [{"document": document, "number": number} for number in (2, 1, 0)]
    assert found[0].pending_writes == [("task", "document", document)]

    saver.delete_thread("1")
    for _ in range(3):
        plane.gc()
        clock.advance_ms(3 * DAY_MS)
    assert bodies() == 0


def test_an_unchanged_large_channel_is_put_once_in_a_while(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = FastnessSaver(plane)
    puts: list[bytes] = []
    put_blob, now = plane.blobs.put, [0.0]

    def count_and_put(data: bytes, **options: Any) -> Any:
        puts.append(data)
        return put_blob(data, **options)

    monkeypatch.setattr(plane.blobs, "put", count_and_put)
    monkeypatch.setattr("fastness.langgraph.checkpoints.time.monotonic", lambda: now[0])

    def put_version(parent: RunnableConfig, version: int, is_new: bool) -> RunnableConfig:
        document = f"{version}" * LARGE
        versions = {"document": version}
        checkpoint = {**empty_checkpoint(), "channel_values": {"document": document}, "channel_versions": versions}
        stored = saver.put(parent, checkpoint, {"source": "loop"}, versions if is_new else {})  # type: ignore[arg-type]
        assert values(saver.get_tuple(stored)) == {"document": document}
        return stored

    first = put_version(thread(), 1, is_new=True)
    second = put_version(first, 1, is_new=False)
    assert len(puts) == 1
    third = put_version(second, 2, is_new=True)
    assert len(puts) == 2
    put_version(first, 2, is_new=False)  # A fork: its parent is not the checkpoint that was stored last.
    assert len(puts) == 3
    now[0] += limits.LANGGRAPH_BLOB_REUSE_SECONDS
    put_version(third, 2, is_new=False)
    assert len(puts) == 4
    assert limits.LANGGRAPH_BLOB_REUSE_SECONDS < limits.BLOB_TOUCH_SECONDS


class _Fernet(CipherProtocol):
    def __init__(self) -> None:
        self._fernet = Fernet(Fernet.generate_key())

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "fernet", self._fernet.encrypt(plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "fernet"
        return self._fernet.decrypt(ciphertext)


def test_an_encrypted_checkpoint_is_stored_without_its_text(plane: Plane, clock: ManualClock) -> None:
    saver = FastnessSaver(plane, serde=EncryptedSerializer(_Fernet()))
    secrets = {"short": "the secret", "long": "the secret" * LARGE}
    config = put(saver, thread(), **secrets)
    saver.put_writes(config, [("short", "the secret")], "task")
    clock.advance_ms(3 * DAY_MS)
    plane.gc()
    clock.advance_ms(3 * DAY_MS)
    plane.gc()

    found = saver.get_tuple(thread())
    assert values(found) == secrets
    assert found is not None
    assert found.pending_writes == [("task", "short", "the secret")]
    rows = plane.collection("langgraph").scan("thread:1").rows
    assert len(rows) == 2
    assert not any(b"the secret" in row.value for row in rows)


def test_a_plane_without_an_object_store_keeps_values_that_fit_a_row(postgres_url: str) -> None:
    with fastness.open(postgres_url) as plane:
        saver = FastnessSaver(plane)
        put(saver, thread(), document="x" * LARGE)
        assert values(saver.get_tuple(thread())) == {"document": "x" * LARGE}
        for large in ({"one": "x" * 2_000_000}, {str(number): "x" * 300_000 for number in range(5)}):
            with pytest.raises(Unsupported, match="object store"):
                put(saver, thread(), **large)
        assert len(list(saver.list(thread()))) == 1


@pytest.mark.parametrize(("count", "size"), [(3, 10), (3, LARGE), (1_000, 10), (300, 10_000)])
def test_all_writes_of_a_task_are_one_commit(plane: Plane, count: int, size: int) -> None:
    saver = FastnessSaver(plane)
    config = put(saver, thread())
    writes = [(f"channel-{number}", f"{number}" + "x" * size) for number in range(count)]
    seen = commits(plane)
    saver.put_writes(config, [*writes, (INTERRUPT, "first")], "task", "path")
    in_langgraph = [keys for keys in seen if any(b"langgraph" in key for key in keys)]
    assert len(in_langgraph) == 1
    saver.put_writes(config, [*((channel, "again") for channel, _ in writes), (INTERRUPT, "second")], "task", "path")

    found = saver.get_tuple(thread())
    assert found is not None
    assert found.pending_writes == [("task", INTERRUPT, "second"), *(("task", *write) for write in writes)]


def test_writes_that_arrive_before_their_checkpoint_are_found_with_it(plane: Plane) -> None:
    saver = FastnessSaver(plane)
    first = put(saver, thread(), number=1)
    late = empty_checkpoint()
    coming = thread(checkpoint_id=late["id"])
    saver.put_writes(coming, [("number", 2)], "task")
    found = saver.get_tuple(thread())
    assert found is not None
    assert (found.config, found.pending_writes) == (first, [])
    assert [each.config for each in saver.list(thread())] == [first]

    saver.put(first, late, {"source": "loop"}, {})
    found = saver.get_tuple(thread())
    assert found is not None
    assert (found.config, found.pending_writes, found.parent_config) == (coming, [("task", "number", 2)], first)


# Retention, pruning and runs.


def test_the_newest_checkpoints_are_kept_with_their_writes(plane: Plane) -> None:
    config = thread()
    savers = [FastnessSaver(plane, keep=Retention(checkpoints=3)) for _ in range(3)]
    for number in range(12):
        saver = savers[number // 4]  # One that has just been created does not know the history, and reads it.
        config = put(saver, config, number=number)
        saver.put_writes(config, [("number", number)], "task")
    found = list(savers[-1].list(thread()))
    assert [values(each)["number"] for each in found] == [11, 10, 9]
    assert [each.pending_writes for each in found] == [[("task", "number", number)] for number in (11, 10, 9)]
    assert len(plane.collection("langgraph").scan("thread:1", before=HISTORY_END).rows) == 6


def test_a_thread_expires_after_the_last_day_of_its_checkpoints(plane: Plane, clock: ManualClock) -> None:
    saver = FastnessSaver(plane, keep=Retention(days=2))
    first = put(saver, thread(), run_id="run", number=1)
    saver.put_writes(first, [("number", 2)], "task")
    clock.advance_ms(DAY_MS)
    put(saver, first, run_id="run", number=2)
    clock.advance_ms(DAY_MS)
    assert [values(each) for each in saver.list(thread())] == [{"number": 2}]
    clock.advance_ms(DAY_MS)
    assert saver.get_tuple(thread()) is None
    assert [plane.collection("langgraph").scan(partition).rows for partition in ("thread:1", "run:run")] == [[], []]


def joined(state: list[str], writes: list[list[str]]) -> list[str]:
    return [*state, *(word for words in writes for word in words)]


class Deltas(TypedDict):
    total: Annotated[int, operator.add]
    words: Annotated[list[str], DeltaChannel(joined, snapshot_frequency=5)]


def delta_graph(saver: BaseCheckpointSaver[Any]) -> Any:
    builder = StateGraph(Deltas)
    builder.add_node("say", lambda state: {"total": 1, "words": [f"word {len(state['words'])}"]})
    builder.add_edge(START, "say")
    builder.add_edge("say", END)
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 5])
@pytest.mark.filterwarnings("ignore:.*beta.*")
def test_delta_channels_survive_pruning_and_retention(plane: Plane, clock: ManualClock, turns: int) -> None:
    pruned, kept = FastnessSaver(plane), FastnessSaver(plane, keep=Retention(checkpoints=1, days=1))
    model = delta_graph(InMemorySaver())
    for _ in range(turns):
        for name, saver in (("pruned", pruned), ("kept", kept)):
            delta_graph(saver).invoke({"total": 0, "words": ["input"]}, {"configurable": {"thread_id": name}})
            clock.advance_ms(DAY_MS)
        model.invoke({"total": 0, "words": ["input"]}, thread())
    before = len(list(pruned.list(thread("pruned"))))
    pruned.prune(["pruned"])

    expected = model.get_state(thread()).values
    assert len(expected["words"]) == 2 * turns
    for name, saver in (("pruned", pruned), ("kept", kept)):
        assert delta_graph(saver).get_state(thread(name)).values == expected
        left = len(list(saver.list(thread(name))))
        assert left < before if turns >= 3 else left == before  # The first snapshot is in the third turn.


def put_delta(saver: BaseCheckpointSaver[Any], parent: RunnableConfig, *, is_snapshot: bool = False) -> RunnableConfig:
    """Store a checkpoint with a delta channel: its value, or what is rebuilt from the checkpoints before."""
    values: dict[str, Any] = {"words": _DeltaSnapshot([])} if is_snapshot else {}
    checkpoint = {**empty_checkpoint(), "channel_values": values, "channel_versions": {"words": 1}}
    metadata: Any = {"source": "loop", "counters_since_delta_snapshot": {"words": (1, 1)}}
    return saver.put(parent, checkpoint, metadata, {"words": 1})  # type: ignore[arg-type]


def ids(saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> list[str]:
    return [each.config["configurable"]["checkpoint_id"] for each in saver.list(config)][::-1]


def test_a_retention_keeps_what_checkpoints_of_another_process_are_rebuilt_from(plane: Plane) -> None:
    one, other = (FastnessSaver(plane, keep=Retention(checkpoints=2)) for _ in range(2))
    stored = [put_delta(one, thread(), is_snapshot=True)]
    for saver in (one, other, other, other, one, one):
        stored.append(put_delta(saver, stored[-1]))
    assert ids(one, thread()) == [each["configurable"]["checkpoint_id"] for each in stored]
    put_delta(one, put_delta(one, stored[-1], is_snapshot=True))
    assert len(ids(one, thread())) == 2


def test_a_branch_of_another_process_is_kept_whole(plane: Plane) -> None:
    one, other = (FastnessSaver(plane, keep=Retention(checkpoints=2)) for _ in range(2))
    root = put_delta(one, thread(), is_snapshot=True)
    put_delta(one, root)
    branch = put_delta(other, root)
    last = put_delta(one, root, is_snapshot=True)
    assert ids(one, thread()) == [each["configurable"]["checkpoint_id"] for each in (root, branch, last)]


@pytest.mark.parametrize("has_retention", [False, True])
@pytest.mark.parametrize("deletes", ["retention", "prune"])
def test_what_is_stored_while_a_history_is_read_is_kept(
    plane: Plane, deletes: str, has_retention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = FastnessSaver(plane, keep=Retention(checkpoints=2))
    other = FastnessSaver(plane, keep=Retention(checkpoints=5) if has_retention else None)
    root = put_delta(other, thread(), is_snapshot=True)
    last = put_delta(other, root, is_snapshot=True)
    expected = [root]
    commit = one._checkpoints._access.commit

    async def commit_later(changes: Any, **options: Any) -> None:
        if len(expected) == 1:
            expected.append(put_delta(other, root))
        await commit(changes, **options)

    monkeypatch.setattr(one._checkpoints._access, "commit", commit_later)
    if deletes == "prune":
        one.prune(["1"])
    else:
        expected.append(put_delta(one, last, is_snapshot=True))
    assert sorted(ids(one, thread())) == sorted(each["configurable"]["checkpoint_id"] for each in expected)


def test_a_checkpoint_is_stored_while_others_change_the_history_all_the_time(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = FastnessSaver(plane, keep=Retention(checkpoints=1))
    first = put_delta(saver, thread(), is_snapshot=True)
    commit = saver._checkpoints._access.commit

    async def conflict(changes: Any, **options: Any) -> None:
        if any(isinstance(each, PutRow) and each.if_version is not None for each in changes):
            raise VersionConflict("Row", "1", expected=1, actual=2)
        await commit(changes, **options)

    with monkeypatch.context() as patched:
        patched.setattr(saver._checkpoints._access, "commit", conflict)
        second = put_delta(saver, first, is_snapshot=True)
    assert len(ids(saver, thread())) == 2
    last = put_delta(saver, second, is_snapshot=True)
    assert ids(saver, thread()) == [last["configurable"]["checkpoint_id"]]


def test_runs_are_deleted_in_all_their_threads_and_copies(plane: Plane) -> None:
    saver = FastnessSaver(plane)
    for name in ("1", "2"):
        saver.put_writes(put(saver, thread(name), run_id="a", number=1), [("number", 2)], "task")
        put(saver, thread(name), run_id="b", number=2)
    saver.copy_thread("1", "copy")
    saver.delete_thread("2")
    saver.delete_for_runs(["a", "unknown"])
    assert {each.config["configurable"]["thread_id"]: values(each)["number"] for each in saver.list(None)} == {
        "1": 2,
        "copy": 2,
    }
    for name in ("1", "copy"):
        saver.delete_thread(name)
    assert plane.collection("langgraph").partitions().partitions == []


def test_a_long_thread_is_copied_whole(plane: Plane) -> None:
    saver = FastnessSaver(plane)
    config = thread()
    for number in range(150):
        config = put(saver, config, number=number, text="x" * 20_000)
        saver.put_writes(config, [("number", number)], "task")
    saver.copy_thread("1", "2")
    one, two = (list(saver.list(thread(name))) for name in "12")
    assert len(one) == 150
    assert [found[1:3] + found[4:] for found in one] == [found[1:3] + found[4:] for found in two]


# Graphs.


class State(TypedDict):
    steps: Annotated[list[str], operator.add]
    approved: bool


def ask(state: State) -> dict[str, Any]:
    answer = interrupt({"steps": len(state["steps"])})
    return {"steps": [f"asked: {answer}"], "approved": answer == "yes"}


def approval_graph(saver: BaseCheckpointSaver[Any]) -> Any:
    builder = StateGraph(State)
    builder.add_node("draft", lambda state: {"steps": ["draft"], "approved": False})
    builder.add_node("ask", ask)
    builder.add_node("check", lambda state: {"steps": [f"check {state['steps'][-1]}"]})
    builder.add_node("publish", lambda state: {"steps": [f"publish {state['approved']}"]})
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "ask")
    builder.add_conditional_edges("ask", lambda state: [Send("check", state), Send("check", state)])
    builder.add_edge("check", "publish")
    builder.add_edge("publish", END)
    return builder.compile(checkpointer=saver)


def history(graph: Any) -> list[Any]:
    """What a graph remembers, without its ids and times."""
    return [
        (found.values, found.next, found.metadata, [task.name for task in found.tasks], len(found.interrupts))
        for found in graph.get_state_history(thread())
    ]


def work_through(graph: Any, invoke: Callable[..., Any]) -> list[Any]:
    """Interrupt, resume, travel back, fork; all that is seen on the way."""
    seen = [invoke({"steps": ["start"]}, thread()), graph.get_state(thread()).next]
    seen.append(invoke(Command(resume="yes"), thread()))
    seen.append(history(graph))
    past = [found for found in graph.get_state_history(thread()) if found.next == ("ask",)][-1]
    seen.append(invoke(None, past.config))
    fork = graph.update_state(past.config, {"steps": ["changed"]})
    seen.append(invoke(None, fork))
    seen.append(invoke(Command(resume="no"), thread()))
    seen.append(history(graph))
    return [str(part).partition("id=")[0] if "Interrupt(" in str(part) else part for part in seen]


def test_a_graph_is_interrupted_resumed_and_forked_as_with_the_saver_in_memory(plane: Plane) -> None:
    ours, theirs = approval_graph(FastnessSaver(plane)), approval_graph(InMemorySaver())
    expected = work_through(theirs, theirs.invoke)
    assert expected[2]["approved"] is True
    assert expected[-2]["approved"] is False
    assert work_through(ours, ours.invoke) == expected


async def test_a_graph_runs_on_an_event_loop(tmp_path: Path) -> None:
    theirs = approval_graph(InMemorySaver())
    expected = work_through(theirs, theirs.invoke)
    async with fastness.open_async(f"dir:{tmp_path}") as plane:
        graph = approval_graph(FastnessSaver(plane))
        loop = asyncio.get_running_loop()

        def invoke(*args: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(graph.ainvoke(*args), loop).result(60)

        assert await asyncio.to_thread(work_through, graph, invoke) == expected


async def test_a_graph_on_an_event_loop_may_use_a_plane_of_threads(plane: Plane) -> None:
    graph = approval_graph(FastnessSaver(plane))
    await graph.ainvoke({"steps": ["start"]}, thread())
    found = await graph.ainvoke(Command(resume="yes"), thread())
    assert found["steps"][-1] == "publish True"
    assert len([each async for each in graph.aget_state_history(thread())]) == 6


# Errors.


async def test_a_synchronous_method_on_the_loop_of_an_async_plane_is_refused(tmp_path: Path) -> None:
    async with fastness.open_async("memory:") as plane:
        saver = FastnessSaver(plane)
        put_later = asyncio.to_thread(put, saver, thread(), number=1)
        with pytest.raises(asyncio.InvalidStateError, match="aget_tuple"):
            saver.get_tuple(thread())
        with pytest.raises(asyncio.InvalidStateError, match="ainvoke"):
            list(saver.list(thread()))
        await put_later
        assert values(await saver.aget_tuple(thread())) == {"number": 1}


def test_a_saver_that_does_not_know_the_loop_of_its_plane_says_so() -> None:
    found: list[BaseException] = []

    async def main() -> None:
        async with fastness.open_async("memory:") as plane:

            def use() -> None:
                try:
                    FastnessSaver(plane).get_tuple(thread())
                except asyncio.InvalidStateError as error:
                    found.append(error)

            user = threading.Thread(target=use)
            user.start()
            await asyncio.to_thread(user.join)

    asyncio.run(main())
    assert "inside the loop" in str(found[0])


def test_bad_arguments_are_refused(plane: Plane) -> None:
    saver = FastnessSaver(plane)
    with pytest.raises(InvalidArgument, match="AsyncPlane"):
        FastnessSaver("dir:data")  # type: ignore[arg-type]
    for bad in ({"checkpoints": 0}, {"checkpoints": True}, {"days": 0}, {"days": "1"}):
        with pytest.raises(InvalidArgument):
            Retention(**bad)
    with pytest.raises(ValueError, match="keep_latest"):
        saver.prune(["1"], strategy="newest")
    for refused in (saver.prune, saver.delete_for_runs):
        with pytest.raises(InvalidArgument, match="list"):
            refused("1")
    with pytest.raises(KeyTooLarge):
        put(saver, thread("x" * 2_000))
    assert list(saver.list(None)) == []


def test_versions_grow_as_numbers_or_as_the_texts_of_other_savers(plane: Plane) -> None:
    saver = FastnessSaver(plane)
    assert [saver.get_next_version(current, None) for current in (None, 1, 7)] == [1, 2, 8]
    text: Any = InMemorySaver().get_next_version(None, None)
    for _ in range(20):
        following: Any = saver.get_next_version(text, None)
        assert following > text
        text = following


def test_threads_and_namespaces_are_listed_newest_first(plane: Plane) -> None:
    saver = FastnessSaver(plane)
    expected: dict[tuple[str, str], list[str]] = {}
    numbers = random.Random(1)
    for _ in range(60):
        place = numbers.choice("12"), numbers.choice(["", "a", "a|b"])
        stored = put(saver, {"configurable": {"thread_id": place[0], "checkpoint_ns": place[1]}})
        expected.setdefault(place, []).insert(0, stored["configurable"]["checkpoint_id"])

    def listed(config: Any, **options: Any) -> list[str]:
        return [found.config["configurable"]["checkpoint_id"] for found in saver.list(config, **options)]

    of_one, of_two = (
        sorted((each for place, ids in expected.items() if place[0] == name for each in ids), reverse=True)
        for name in "12"
    )
    assert listed(None) == of_one + of_two
    assert listed(None, limit=7) == of_one[:7]
    assert listed({"configurable": {"thread_id": "1"}}) == of_one
    middle = expected["1", "a"][3]
    before = {"configurable": {"checkpoint_id": middle}}
    assert listed(thread("1", checkpoint_ns="a"), before=before) == expected["1", "a"][4:]
    assert listed({"configurable": {"thread_id": "1"}}, before=before) == [each for each in of_one if each < middle]
    assert listed(thread("1", checkpoint_ns="a", checkpoint_id=middle)) == [middle]
    assert listed({"configurable": {"thread_id": "1", "checkpoint_id": middle}}) == [middle]
    assert listed(None, limit=0) == []
