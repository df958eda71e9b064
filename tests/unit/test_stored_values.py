"""A stored value never decides which code runs: hostile values in every place that decodes what another has written.

Each of them would create a file if what it names were imported or called. None does. A reader gets the value as plain
data, or an error with a code.
"""

import ast
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cbor2
import ormsgpack
import pytest
from celery import Celery
from celery.backends.base import Backend
from celery.exceptions import ImproperlyConfigured
from celery.result import AsyncResult
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.base import CipherProtocol, SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel

import fastness
from fastness import DeleteRow, HostApp, Plane, PutRow, TaskApp, pydantic_ai
from fastness.adk import FastnessSessionService
from fastness.errors import InvalidArgument, RunFailed, UnreadableValue
from fastness.langgraph import FastnessSaver, FastnessStore
from fastness.langgraph.checkpoint_rows import Serialized, StoredCheckpoint, StoredWrite, StoredWrites, encode
from fastness.mcp.task_rows import read_rows
from fastness.openai_agents import FastnessSession
from fastness.pipeline import replays
from fastness.session_rows import SessionRows
from fastness.testing import HostTest, StuckRun

PLANTED = "fastness_planted_module"  # Importing it creates the file.
THREAD: RunnableConfig = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}


@dataclass
class Order:
    """A type of an application."""

    number: int


class Reversing(CipherProtocol):
    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "reversed", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "reversed"
        return ciphertext[::-1]


class Hostile:
    """Values that create a file where what they name is called."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.command = f"touch {file}"

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(self)

    def check_nothing_ran(self) -> None:
        assert not self.file.exists()
        assert PLANTED not in sys.modules


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """Checks at the end that nothing ran."""
    file = tmp_path / "it ran"
    (tmp_path / f"{PLANTED}.py").write_text(f"open({str(file)!r}, 'w').close()\ndef function(*given): return given\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Hostile(tmp_path / "called")
    yield found
    found.check_nothing_ran()
    assert not file.exists()


@pytest.fixture
def plane() -> Iterator[Plane]:
    with fastness.open("memory:") as plane:
        yield plane


# LangGraph.


def extension(code: int, *parts: Any) -> bytes:
    """What LangGraph stores for an object: the names of its module and class, and what the class is called with."""
    return ormsgpack.packb(object(), default=lambda _: ormsgpack.Ext(code, ormsgpack.packb(parts)))


def named_code(hostile: Hostile) -> dict[str, tuple[str, bytes]]:
    """Stored values that name code, by how they name it."""
    command = hostile.command
    shell = {"args": command, "shell": True}
    lc2 = {"lc": 2, "type": "constructor", "id": ["os", "system"], "args": [command]}
    found = {
        "one argument": extension(0, "os", "system", command),
        "an import": extension(0, PLANTED, "function", command),
        "several arguments": extension(1, "os", "system", (command,)),
        "named arguments": extension(2, "subprocess", "run", shell),
        "a method": extension(3, "shutil", "os", command, "system"),
        "a model": extension(4, "subprocess", "run", shell),
        "a validated model": extension(5, "subprocess", "run", shell, "model_validate_json"),
        "below others": _nested(command),
        "a damaged name": extension(0, "os"),
        "no value": b"\xc1",
    }
    return {name: ("msgpack", data) for name, data in found.items()} | {
        "JSON": ("json", json.dumps(lc2).encode()),
        "JSON of LangChain": ("json", json.dumps({**lc2, "lc": 1}).encode()),
        "a pickle": ("pickle", hostile.pickled),
        "another kind": ("dill", hostile.pickled),
    }


def _nested(command: str) -> bytes:
    inner = extension(0, "os", "system", command)
    return ormsgpack.packb(
        {"a": [object()]}, default=lambda _: ormsgpack.Ext(1, b"\x93\xa8builtins\xa3set\x91\x91" + inner)
    )


def plant_checkpoint(plane: Plane, place: str, value: tuple[str, bytes]) -> None:
    """Store a checkpoint with a value in one place, as a token that may write rows can."""
    plain = Serialized(*JsonPlusSerializer().dumps_typed({**empty_checkpoint(), "step": 1}))
    planted = Serialized(*value)
    stored = StoredCheckpoint(
        None,
        None,
        planted if place == "checkpoint" else plain,
        planted if place == "metadata" else plain,
        {"messages": planted} if place == "channel" else {},
    )
    rows = [PutRow("thread:1", ("", "1f0"), encode(stored))]
    if place == "write":
        rows.append(
            PutRow("thread:1", ("", "1f0", "task", 0), encode(StoredWrites("", [StoredWrite(0, "c", planted)])))
        )
    plane.collection("langgraph").commit(rows)


@pytest.mark.parametrize(
    "serde",
    [
        None,
        JsonPlusSerializer(),
        JsonPlusSerializer(allowed_msgpack_modules=True, allowed_json_modules=True, pickle_fallback=True),
        EncryptedSerializer(Reversing()),
    ],
    ids=["default", "LangGraph's", "permissive", "encrypted"],
)
def test_a_checkpoint_of_langgraph_runs_nothing(
    plane: Plane, hostile: Hostile, serde: SerializerProtocol | None
) -> None:
    saver = FastnessSaver(plane, serde=serde)
    graph = StateGraph(MessagesState).add_node("a", lambda state: state).add_edge(START, "a").add_edge("a", END)
    compiled = graph.compile(checkpointer=saver)
    for name, value in named_code(hostile).items():
        for place in ("checkpoint", "metadata", "channel", "write"):
            plant_checkpoint(plane, place, value)
            reads: list[Callable[[], object]] = [
                lambda: saver.get_tuple(THREAD),
                lambda: list(saver.list(None)),
                lambda: compiled.get_state(THREAD),
                lambda: compiled.invoke(None, THREAD),
            ]
            for read in reads:
                with pytest.raises(UnreadableValue):
                    read()
                hostile.check_nothing_ran()
            saver.delete_thread("1")
        assert saver.get_tuple(THREAD) is None, name


def test_the_error_names_what_a_checkpoint_names(plane: Plane, hostile: Hostile) -> None:
    plant_checkpoint(plane, "channel", named_code(hostile)["one argument"])
    with pytest.raises(
        UnreadableValue, match=r"types that are not allowed: os\.system; nothing of it was run"
    ) as error:
        FastnessSaver(plane).get_tuple(THREAD)
    assert error.value.code == "unreadable_value"


@pytest.mark.parametrize("allowed", [Order, (Order.__module__, "Order")])
@pytest.mark.parametrize("serde", [None, EncryptedSerializer(Reversing())], ids=["plain", "encrypted"])
def test_types_of_an_application_are_allowed_by_name(
    plane: Plane, allowed: Any, serde: SerializerProtocol | None
) -> None:
    values = {
        "order": Order(7),
        "messages": [HumanMessage("hello")],
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "sent": [Send("node", {"n": 1})],
        "names": {"a", "b"},
        "order in a list": [Order(8)],
    }
    versions: Any = dict.fromkeys(values, 1)
    checkpoint: Any = {**empty_checkpoint(), "channel_values": values, "channel_versions": versions}
    own = FastnessSaver(plane, serde=serde, allowed_types=[allowed])
    own.put(THREAD, checkpoint, {"source": "loop", "step": 1}, versions)
    found = own.get_tuple(THREAD)
    assert found is not None
    assert found.checkpoint["channel_values"] == values

    other = FastnessSaver(plane, serde=serde)
    with pytest.raises(UnreadableValue, match=r"allow them with FastnessSaver\(…, allowed_types="):
        other.get_tuple(THREAD)
    with pytest.raises(InvalidArgument, match=r"not allowed: .*Order.*allowed_types"):
        other.put(THREAD, checkpoint, {"source": "loop", "step": 1}, versions)
    as_langgraph_does = other.with_allowlist({(Order.__module__, "Order")})  # In its strict mode, at `compile`.
    found = as_langgraph_does.get_tuple(THREAD)
    assert found is not None
    assert found.checkpoint["channel_values"] == values


def test_a_serializer_that_cannot_be_restricted_is_refused(plane: Plane) -> None:
    class Own(JsonPlusSerializer):
        pass

    for options in ({"serde": Own()}, {"serde": EncryptedSerializer(Reversing(), Own())}, {"allowed_types": ["Order"]}):
        with pytest.raises(InvalidArgument, match="allowed_types"):
            FastnessSaver(plane, **options)


def test_rows_of_other_programs_are_refused(plane: Plane, hostile: Hostile) -> None:
    """Pickles and other bytes, where a store expects its own."""
    saver, store = FastnessSaver(plane), FastnessStore(plane)
    for data in (hostile.pickled, b"", b"\xff", b"[]", b"null"):
        plane.collection("langgraph").commit([PutRow("thread:1", ("", "1f0"), data)])
        plane.collection("langgraph-store").commit([PutRow("users", ("ada",), data)])
        for read in (lambda: saver.get_tuple(THREAD), lambda: store.get(("users",), "ada")):
            with pytest.raises(UnreadableValue):
                read()


# Celery.


@pytest.fixture
def celery() -> Iterator[Celery]:
    app = Celery("tests", backend="fastness+memory://", broker="memory://", set_as_current=False)
    yield app
    app.backend.close()
    app.close()


def test_a_result_of_celery_runs_nothing(celery: Celery, hostile: Hostile) -> None:
    def failed(module: str | None, name: str, *message: Any) -> bytes:
        exception = {"exc_module": module, "exc_type": name, "exc_message": message}
        return json.dumps({"status": "FAILURE", "result": exception, "traceback": None, "children": []}).encode()

    for stored in (
        hostile.pickled,
        b"",
        b"[]",
        failed("os", "system", hostile.command),
        failed("subprocess", "run", hostile.command),
        failed("builtins", "SystemExit", 1),
        failed("builtins", "KeyboardInterrupt"),
    ):
        celery.backend.set(celery.backend.get_key_for_task("one"), stored)
        with pytest.raises(UnreadableValue):
            AsyncResult("one", app=celery).get(timeout=10)
        hostile.check_nothing_ran()
    celery.backend.set(celery.backend.get_key_for_task("one"), failed(PLANTED, "function", "x"))
    with pytest.raises(Exception, match="x") as error:  # Of a class that is made for it: nothing is imported.
        AsyncResult("one", app=celery).get(timeout=10)
    assert type(error.value).__name__ == "function"
    celery.backend.set(celery.backend.get_key_for_task("one"), failed("builtins", "KeyError", "gone"))
    with pytest.raises(KeyError, match="gone"):
        AsyncResult("one", app=celery).get(timeout=10)


def test_pickled_results_of_celery_are_refused_when_the_app_is_set_up() -> None:
    app = Celery("tests", backend="fastness+memory://", broker="memory://", set_as_current=False)
    app.conf.update(result_serializer="pickle", accept_content=["pickle", "json"])
    with pytest.raises(ImproperlyConfigured, match="result_serializer='json'"):
        assert isinstance(app.backend, Backend)


# Sessions of agent frameworks.


@pytest.mark.parametrize("row", ["s", "d", "e"])  # Its head, its state, and an event.
async def test_a_session_of_adk_runs_nothing(hostile: Hostile, row: str) -> None:
    async with fastness.open_async("memory:") as plane:
        service, rows = FastnessSessionService(plane), SessionRows(plane, "adk")
        for number, data in enumerate((hostile.pickled, b"", b"{", b"[1]", b'"text"')):
            id = str(number)
            await service.create_session(app_name="shop", user_id="ada", session_id=id, state={"a": 1})
            [value] = await rows.store([data])
            partition = '["shop","ada"]'
            changes = [PutRow(partition, ("s", id), b'{"created_id": "x", "updated": 1.0, "events": 1}')]
            changes.append(PutRow(partition, (row, id, 1) if row == "e" else (row, id), data if row == "s" else value))
            await rows.commit(changes)
            with pytest.raises(UnreadableValue):
                await service.get_session(app_name="shop", user_id="ada", session_id=id)


async def test_a_state_that_names_code_is_plain_data(hostile: Hostile) -> None:
    state = {"py/reduce": [{"py/function": "os.system"}, [hostile.command]], "$type": f"{PLANTED}.function"}
    async with fastness.open_async("memory:") as plane:
        service, session = FastnessSessionService(plane), FastnessSession(plane, "7")
        await service.create_session(app_name="shop", user_id="ada", session_id="1", state=state)
        found = await service.get_session(app_name="shop", user_id="ada", session_id="1")
        assert found is not None
        assert found.state == state
        await session.add_items([state])  # type: ignore[list-item]
        assert await session.get_items() == [state]


async def test_a_session_of_openai_agents_runs_nothing(hostile: Hostile) -> None:
    async with fastness.open_async("memory:") as plane:
        session, rows = FastnessSession(plane, "7"), SessionRows(plane, "openai-agents")
        for data in (hostile.pickled, b"", b"{", b'"text"', b"[1]"):
            [value] = await rows.store([data])
            await rows.commit([PutRow("7", ("i", 0), value)])
            with pytest.raises(UnreadableValue):
                await session.get_items()
        await rows.commit([PutRow("7", ("n",), hostile.pickled)])
        with pytest.raises(UnreadableValue):
            await session.add_items([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("stored", ["the name of a function", "a pickle"])
def test_the_journal_of_an_agent_of_pydantic_ai_runs_nothing(hostile: Hostile, stored: str) -> None:
    app = HostApp()
    agent = Agent(TestModel(), name="helper", capabilities=[pydantic_ai.FastnessDurability()])
    ask = pydantic_ai.agent_workflow(agent, retry=fastness.Retry(attempts=1), app=app)
    entry = hostile.pickled if stored == "a pickle" else ["done", "os.system", json.dumps(hostile.command)]
    with HostTest(app) as test:
        journal = test.plane.world(f"{pydantic_ai.JOURNAL_PREFIX}r.1.0.0")
        journal.create()
        journal.append([entry], expected_head=0)
        with pytest.raises((StuckRun, RunFailed), match=r"has recorded os\.system|UnreadableValue"):
            test.run_to_end(test.plane.workflows.start(ask, "hello", id="r"))


# MCP.


def test_the_rows_of_an_mcp_task_run_nothing(plane: Plane, hostile: Hostile) -> None:
    rows = plane.collection("mcp-tasks")
    for key in (("progress",), ("question", "a"), ("answer", "a")):
        for data in (hostile.pickled, b"", b"[]"):
            rows.commit([PutRow("jobs.1", key, data)])
            with pytest.raises(UnreadableValue):
                read_rows(rows.scan("jobs.1").rows)
        rows.commit([DeleteRow("jobs.1", key)])


# Tasks and schedules.


def test_a_task_is_a_function_of_the_app_and_its_arguments_are_data(plane: Plane, hostile: Hostile) -> None:
    app, calls = TaskApp(plane), list[Any]()

    @app.task(name="add")
    def add(a: int) -> None:
        calls.append(a)

    queue = plane.queue("tasks")
    command = [hostile.command]
    payloads = [
        hostile.pickled,
        *[json.dumps({"task": name, "args": command}).encode() for name in ("os.system", f"{PLANTED}.function")],
        json.dumps({"task": "add", "args": [{"__reduce__": ["os.system", command]}]}).encode(),
        json.dumps({"task": "add", "args": [1], "app": f"{PLANTED}:app"}).encode(),
    ]
    for payload in payloads:
        queue.put(payload)
    queue.schedule("nightly", "* * * * *", json.loads(payloads[1]))
    assert app.run_ready() == len(payloads)
    hostile.check_nothing_ran()
    assert calls in ([], [1])
    assert len(queue.dead_letters()) == len(payloads) - len(calls)


# Worlds, programs and workflows.


def test_values_of_worlds_are_data(plane: Plane, hostile: Hostile) -> None:
    """CBOR has tags for types. None of them imports or calls anything."""
    command = hostile.command
    values = [hostile.pickled, ["os.system", command], {"py/reduce": ["os.system", command]}]
    world = plane.world("ada")
    world.create()
    world.append(values, expected_head=0)
    assert [cbor2.loads(record.value) for record in world.read() if record.kind == "entry"] == values
    world.snapshots.commit({"values": values}, height=3, promote=True)
    assert world.restore(lambda state, entry: state).state == {"values": values}
    plane.state("a").update({"values": values})
    assert plane.state("a").get().value == {"values": values}
    plane.entities.write("order", "1", {"values": values})
    assert plane.entities.get("order", "1").fields == {"values": values}
    for tag in range(300):
        for content in (command, ["os.system", command], hostile.pickled):
            with suppress(cbor2.CBORDecodeError, cbor2.CBOREncodeError, ValueError, TypeError):
                cbor2.loads(cbor2.dumps(cbor2.CBORTag(tag, content)))
            hostile.check_nothing_ran()


def test_the_name_of_a_program_or_a_workflow_is_looked_up_in_the_app(hostile: Hostile) -> None:
    app = HostApp()

    @app.workflow(name="known")
    async def known(run: fastness.WorkflowRun, number: int) -> int:
        return number

    with HostTest(app) as test:
        for name in ("os.system", f"{PLANTED}:function", f"{PLANTED}.function"):
            test.plane.workflows.start(name, hostile.command)
            test.plane.world(name.replace(":", "-")).create(program=name)
        test.run_until_idle()
        hostile.check_nothing_ran()
        assert test.run_to_end(test.plane.workflows.start(known, 7)) == 7


# The pipeline.


def test_the_name_of_a_worlds_program_chooses_no_reducer_of_another_module(hostile: Hostile) -> None:
    """Only the option `--reducer` names a function; what a world stores is looked up in an app of that module."""
    for stored in ("os.system", f"{PLANTED}:function"):
        assert replays.reducer_of(None, stored, stored) is replays.chain
        assert replays.reducer_of(f"{__name__}:APP", "ada", stored) is None
    hostile.check_nothing_ran()


APP = HostApp()


# Where the code imports or calls by name.

_CALLS = {"eval", "exec", "__import__", "import_module", "run_path", "run_module", "spec_from_file_location"}
_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "yaml"}
_KNOWN = {
    "cli/main.py: import_module",  # Commands of the package.
    "cli/modules.py: import_module",  # An argument of a command.
    "demo/chapters/pipeline.py: import_module",  # Jobs of the package.
    "lazy_exports.py: import_module",  # Names that a package exports.
    "pipeline/jobs/__init__.py: import_module",
    "pipeline/replays.py: import_module",  # The option --reducer.
    "pipeline/sessions.py: import_module",  # A part of pyspark.
    "server/mcp/mounting.py: import_module",  # A part of the package.
    "wire/type_checks.py: eval",  # Of the types of requests.
}


def test_code_is_called_by_name_only_where_no_stored_value_has_the_name() -> None:
    """A new place belongs into `_KNOWN` after a look at where its name comes from, and with a test above."""
    folder = Path(fastness.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str | None] = []
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                names = [name] if name in _CALLS else []
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name in _MODULES]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module] if node.module in _MODULES else []
            found |= {f"{path.relative_to(folder)}: {name}" for name in names}
    assert found == _KNOWN
