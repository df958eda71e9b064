"""Planes for the stores of agent frameworks: each backend and a server, with handles of both kinds."""

import asyncio
from collections.abc import Coroutine, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import fastness
from fastness import AsyncPlane, Plane
from tests.support.server_process import Server


class FrameworkPlane:
    """A plane, as a Plane or an AsyncPlane, and the event loop that a framework runs on."""

    def __init__(self, kind: str, url: str, *, is_async: bool, **options: Any) -> None:
        self.kind = kind
        self._url = url
        self._options = options
        self._universe = f"u{uuid4().hex}"
        self._is_async = is_async
        self._runner = asyncio.Runner()
        self._opened: list[Plane | AsyncPlane] = []
        self.plane = self._open()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def another(self) -> Plane | AsyncPlane:
        """Another handle of the same data, with its own connections if several processes can open it."""
        return self._open() if self.kind in {"postgres", "remote"} else self.plane

    def close(self) -> None:
        for plane in self._opened:
            if isinstance(plane, AsyncPlane):
                self.run(plane.close())
            else:
                plane.close()
        self._runner.close()

    def _open(self) -> Plane | AsyncPlane:
        plane: Plane | AsyncPlane
        if self._is_async:
            begin = fastness.connect_async if self.kind == "remote" else fastness.open_async
            plane = self.run(begin(self._url, universe=self._universe, **self._options).__aenter__())
        else:
            begin_sync = fastness.connect if self.kind == "remote" else fastness.open
            plane = begin_sync(self._url, universe=self._universe, **self._options)
        self._opened.append(plane)
        return plane


@pytest.fixture(scope="session")
def framework_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server. Each test has a universe of its own."""
    server = Server(tmp_path_factory.mktemp("framework-server"))
    try:
        yield server.url
    finally:
        server.kill()


# Every kind and both modes, and each pair of them in some runs.
IN_EVERY_RUN = {("memory", "sync"), ("rocksdb", "async"), ("postgres", "sync"), ("remote", "async")}
KINDS_AND_MODES = [
    pytest.param(pair, id="-".join(pair), marks=() if pair in IN_EVERY_RUN else pytest.mark.rotating)
    for pair in product(("memory", "rocksdb", "postgres", "remote"), ("sync", "async"))
]


@pytest.fixture(params=KINDS_AND_MODES)
def framework_plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FrameworkPlane]:
    """A plane of each kind, for an adapter of an agent framework."""
    kind, mode = request.param
    if kind == "remote":
        url = request.getfixturevalue("framework_server")
    elif kind == "postgres":
        url = request.getfixturevalue("postgres_url")
    else:
        url = "memory:" if kind == "memory" else f"dir:{tmp_path / 'data'}"
    options = {"objects": f"dir:{tmp_path / 'objects'}"} if kind == "postgres" else {}
    opened = FrameworkPlane(kind, url, is_async=mode == "async", **options)
    try:
        yield opened
    finally:
        opened.close()
