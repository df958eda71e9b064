"""Runs unit tests of the embedded plane through a server: a remote plane behaves like an embedded one.

The tests are those of `tests/unit`, unchanged. Here `fastness.open` opens the plane in a server and returns a client.
One server on a thread serves all planes, each under its own path.

What a client adds is the same for every layer and backend, so every run has the modules of IN_EVERY_RUN in memory, and
the rest rotates. A run of what a change of the client, the wire or the server can reach has all of it.
"""

import asyncio
import importlib.util
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import uvicorn

import fastness
from fastness import AsyncPlane, Plane
from fastness.client.transport import AsyncRemoteTransport, RemoteTransport
from fastness.handles.opening import Opening
from fastness.kv import Subspace, Transaction
from fastness.names import UNIVERSE, checked_name
from fastness.plane import Options, open_plane_async
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.services import Services
from fastness.server.app import make_app
from fastness.server.context import ServerContext

UNIT = Path(__file__).parents[1] / "unit"
MODULES = (
    "test_queue_background",
    "test_queue_handles",
    "test_queue_moves",
    "test_queue_waiting",
    "test_lease_handles",
    "test_effects",
    "test_best_effort_reads",
    "test_collections",
    "test_entities",
    "test_entity_concurrency",
    "test_entity_locks",
    "test_entity_tiers",
    "test_worlds",
    "test_snapshots",
    "test_lifecycle",
    "test_hosting",
    "test_blobs",
    "test_workers",
    "test_tasks",
    "test_handles",
    "test_lock_handles",
    "test_step_context",
    "test_quotas",
)

IN_EVERY_RUN = ("test_queue_handles", "test_lease_handles", "test_worlds")

TRANSACT = "a function cannot run in another process: plane.transact and message.complete are for embedded planes"
LOCKS = "is about the locks that writes take in one process"
INTERNALS = "reads internals of a plane that is in another process"
RAW = "a server does not allow direct writes to the key space"

EMBEDDED_ONLY = {
    **dict.fromkeys(
        (
            "test_complete_commits_the_work_and_the_ack_together",
            "test_complete_works_asynchronously",
            "test_a_failed_commit_publishes_no_events",
            "test_a_transaction_commits_only_while_its_lease_holds",
            "test_an_async_transaction_commits_only_while_its_lease_holds",
            "test_handles_of_universes_have_separate_worlds",
            "test_a_restore_checks_everything_before_it_folds",
            "test_two_worlds_change_atomically",
            "test_two_worlds_change_atomically_on_an_event_loop",
            "test_a_plane_transacts_with_arguments_and_a_result",
            "test_a_plane_transacts_asynchronously",
            "test_an_argument_may_be_called_work",
            "test_a_function_that_raises_has_written_nothing",
            "test_a_handle_inside_a_transaction_of_its_plane_is_refused",
            "test_a_deleted_world_leaves_no_key_and_its_fences_do_not_return",
            "test_a_refused_turn_writes_nothing",
            "test_a_world_that_a_transaction_paused_is_not_claimed",
            "test_a_transaction_of_the_callers_own_has_no_best_effort_values",
            "test_a_write_in_the_callers_own_transaction_does_not_wait",
            "test_a_transaction_checks_its_locks",
            "test_a_transaction_under_a_lost_lock_writes_nothing",
        ),
        TRANSACT,
    ),
    **dict.fromkeys(
        ("test_tasks_write_entities", "test_the_first_lock_waits_for_writes_that_take_none"),
        LOCKS,
    ),
    **dict.fromkeys(
        (
            "test_pairs_are_written_read_scanned_and_deleted",
            "test_pairs_are_written_read_scanned_and_deleted_asynchronously",
            "test_a_handle_raises_the_errors_of_the_plane",
            "test_leaving_the_context_closes_the_plane",
            "test_leaving_the_async_context_closes_the_plane",
            "test_an_opening_is_awaited_or_entered",
        ),
        RAW,
    ),
    "test_a_holder_that_loses_its_lease_while_renewing_waits": INTERNALS,
    "test_a_lock_of_one_process_has_no_fence": "all callers of a server share its locks",
    "test_commands_show_and_change_how_a_world_is_run": "a command opens the directory itself",
    "test_a_worker_that_cannot_receive_raises_why": "the event loop of a worker has a connection of its own",
}


# The server.


class Served:
    """A plane in the server."""

    def __init__(self, plane_server: "PlaneServer", path: str, transport: AsyncEmbeddedTransport) -> None:
        self.url = plane_server.url + path
        self.services: Services = transport.services
        self._server = plane_server
        self._path = path
        self._transport = transport

    def close(self) -> None:
        if self._server.apps.pop(self._path, None) is not None:
            self._server.run(self._transport.close())


class PlaneServer:
    """A server on a thread that serves a plane under each path."""

    def __init__(self) -> None:
        self.apps: dict[str, Any] = {}
        self.url = ""
        self._numbers = count()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def open(self, url: str, options: Options) -> Served:
        served: Served = self.run(self.open_async(url, options))
        return served

    async def open_async(self, url: str, options: Options) -> Served:
        transport = await open_plane_async(url, options)
        path = f"/{next(self._numbers)}"
        self.apps[path] = make_app(ServerContext(transport))
        return Served(self, path, transport)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def open_from_other_loop(self, url: str, options: Options) -> Served:
        opening = asyncio.run_coroutine_threadsafe(self.open_async(url, options), self._loop)
        return await asyncio.wrap_future(opening)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        config = uvicorn.Config(
            self._app,
            port=0,
            ws="websockets-sansio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self._ready.set()
        await serving

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        _, number, rest = scope["path"].split("/", 2)
        app = self.apps[f"/{number}"]
        await app({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)


@pytest.fixture(scope="module")
def plane_server() -> Iterator[PlaneServer]:
    plane_server = PlaneServer()
    yield plane_server
    plane_server.stop()


# The client, in place of an embedded plane.


class Transport(RemoteTransport):
    """A client that closes its server's plane when it is closed. Tests read the key space through `services`."""

    def __init__(self, served: Served) -> None:
        super().__init__(served.url)
        self.services = served.services
        self._served = served

    def close(self) -> None:
        super().close()
        self._served.close()


class AsyncTransport(AsyncRemoteTransport):
    def __init__(self, served: Served) -> None:
        super().__init__(served.url)
        self.services = served.services
        self._served = served

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._served.close)


@pytest.fixture(autouse=True)
def planes_are_remote(
    plane_server: PlaneServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    module = inspect.getmodule(request.function) or FOUND[request.function.__module__]

    def open_remote(url: str, *, universe: str = UNIVERSE, **options: Any) -> Plane:
        universe = checked_name("universe", universe)
        served = plane_server.open(url, Options(**options))
        return Plane(Transport(served), universe)

    def open_remote_async(url: str, *, universe: str = UNIVERSE, **options: Any) -> Opening:
        async def opening() -> AsyncPlane:
            served = await plane_server.open_from_other_loop(url, Options(**options))
            return AsyncPlane(AsyncTransport(served), universe)

        return Opening(opening())

    monkeypatch.setattr(fastness, "open", open_remote)
    monkeypatch.setattr(fastness, "open_async", open_remote_async)
    if hasattr(module, "open_plane"):
        monkeypatch.setattr(
            module,
            "open_plane",
            lambda url, options: Transport(plane_server.open(url, options)),
        )
    if hasattr(module, "everything"):
        monkeypatch.setattr(module, "everything", everything)


def everything(plane: Any) -> list[tuple[bytes, bytes]]:
    """As for an embedded plane, but without records of calls, which it does not have."""
    pairs = plane._transport.services.database.read(Transaction.scan, b"", b"\xff" * 8, limit=10_000)
    left_out = [Subspace(name).range() for name in ("fastness", "once")]
    return [pair for pair in pairs if not any(begin <= pair[0] < end for begin, end in left_out)]


def test_embedded_only_features_raise_not_embedded(plane_server: PlaneServer) -> None:
    served = plane_server.open("memory:", Options())
    with fastness.connect(served.url) as plane:
        plane.queue("jobs").put("a")
        message = plane.queue("jobs").receive()
        assert message is not None
        for refused in (
            lambda: plane.transact(lambda tx: None),
            lambda: message.complete(lambda tx: None),
            lambda: plane.pairs.put(b"a", b"b"),
        ):
            with pytest.raises(fastness.errors.NotEmbedded):
                refused()
        message.ack()
    served.close()


# The tests.


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"through_client_{name}", UNIT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_in(code: CodeType) -> set[str]:
    inner = [names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


def opens(function: Callable[..., Any], fixtures: dict[str, Any]) -> bool:
    """Whether a test, or a fixture that it uses, opens a plane."""
    if {"open_async", "open_plane"} & names_in(function.__code__):
        return True
    if {"fastness", "open"} <= names_in(function.__code__):
        return True
    needs = inspect.signature(function).parameters
    return any(opens(fixtures[name]._get_wrapped_function(), fixtures) for name in needs if name in fixtures)


def class_of(module: ModuleType) -> type:
    """The tests of a module that open a plane, except EMBEDDED_ONLY, with the fixtures they need, as a class."""
    fixtures = {name: part for name, part in vars(module).items() if type(part).__name__ == "FixtureFunctionDefinition"}
    tests = {
        name: part
        for name, part in vars(module).items()
        if name.startswith("test_") and name not in EMBEDDED_ONLY and inspect.isfunction(part) and opens(part, fixtures)
    }
    members: dict[str, Any] = {name: staticmethod(part) for name, part in tests.items()}
    for name, fixture in fixtures.items():
        marker = fixture._fixture_function_marker
        params = marker.params and [on_disk_rotates(param) for param in marker.params]
        copy = pytest.fixture(scope=marker.scope, params=params, ids=marker.ids, name=name)
        members[name] = copy(staticmethod(fixture._get_wrapped_function()))
    test_name = "test_" + module.__name__.split("_test_")[1]
    if test_name not in IN_EVERY_RUN:
        members["pytestmark"] = [pytest.mark.rotating]
    return type(test_name.title().replace("_", ""), (), members)


def on_disk_rotates(param: object) -> object:
    """The parameter of a fixture that opens a plane; what is on disk is the same for a client as what is in memory."""
    return pytest.param(param, marks=pytest.mark.rotating) if param == "dir" else param


FOUND = {f"through_client_{name}": load(name) for name in MODULES}
globals().update({tests.__name__: tests for tests in map(class_of, FOUND.values())})
