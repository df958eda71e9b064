"""`fastness top` in a terminal and for programs, beside real servers."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

import fastness
from fastness import Quota
from fastness.cli.main import root
from fastness.wire.queues import NewMessage
from tests.support.forked import start_python
from tests.support.server_process import Server
from tests.support.waiting import eventually, exit_code

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>()][0-9A-B]?)")


class Terminal:
    """A command in a terminal of 140 columns. `text` is what it wrote since `forget`, without escape sequences."""

    def __init__(self, *words: str) -> None:
        self._terminal, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
        self._output: list[bytes] = []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        self.process = start_python(
            ["-m", "fastness.cli", *words],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**environment, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"},
        )
        os.close(follower)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while part := os.read(self._terminal, 65_536):
                self._output.append(part)

    @property
    def text(self) -> str:
        return ESCAPES.sub("", b"".join(self._output).decode(errors="replace"))

    def forget(self) -> None:
        self._output.clear()

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def shows(self, pattern: str) -> None:
        """Wait until the command has written something that matches."""

        def is_shown() -> bool:
            assert self.process.poll() is None, self.text
            return re.search(pattern, self.text) is not None

        eventually(is_shown, lambda: f"{pattern!r} is not in {self.text[-2_000:]}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._terminal)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        opened.close()


def test_top_shows_rates_depths_oldest_waits_and_nodes_and_survives_a_restart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    port = server.address[1]
    try:
        with server.plane() as plane:
            plane.quotas.set("main", Quota(messages=1_000))
            plane.queue("empty-jobs").put(b"")
            plane.queue("many-jobs").put_many([NewMessage(b"")] * 7)
            plane.queue("many-jobs").receive_many(2)
            holder = plane.lease("deploy").acquire(ttl_seconds=300)
            waiter = threading.Thread(target=wait_for_lease, args=(server.url,))
            waiter.start()
            with terminal("--url", server.url, "top", "--interval", "0.2") as top:
                top.shows(r"main: ready 6  leased 2  dead 0")
                top.shows(r"messages 8 of 1,000 \(1%\)")
                top.shows(r"waits: 1 for leases, 0 for locks, the longest")
                top.shows(rf"{re.escape(server.url)} +maintenance")
                top.shows(r"many-jobs +5 +2 +0 +0 +0 +(<1|\d+) [sm]")
                top.forget()
                top.press("n")
                top.shows(r"queue ▾[\s\S]*empty-jobs[\s\S]*many-jobs")
                putting = threading.Event()
                putter = threading.Thread(target=put_until, args=(server.url, putting))
                putter.start()
                try:
                    top.shows(r"put [1-9][\d.,]*/s")
                finally:
                    putting.set()
                    putter.join()
                holder.release()
                waiter.join()
                server.kill()
                top.shows("No answer, trying again")
                top.forget()
                server = Server(tmp_path, port=port)
                top.shows(r"main: ready [1-9]")
                until_answered(top)
                top.press("q")
                assert exit_code(top.process) == 0
                assert "Traceback" not in top.text
    finally:
        server.kill()


def until_answered(top: Terminal) -> None:
    """Wait until the screen is drawn without the line that says that nothing answers."""

    def is_answered() -> bool:
        top.forget()
        top.shows(r"main: ready [\s\S]*q quit")
        return "No answer" not in top.text

    eventually(is_answered, lambda: top.text)


def wait_for_lease(url: str) -> None:
    with fastness.connect(url) as plane:
        plane.lease("deploy").acquire(ttl_seconds=1, wait_seconds=3_600).release()


def put_until(url: str, stop: threading.Event) -> None:
    with fastness.connect(url) as plane:
        queue = plane.queue("many-jobs")
        while not stop.wait(0.02):
            queue.put(b"")


@pytest.mark.parametrize("target", ["dir", "server"])
def test_top_prints_one_view_for_programs(target: str, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    with fastness.open(url, universe="shop") as plane:
        plane.queue("jobs").put_many([NewMessage(b"")] * 3)
    server = Server(tmp_path) if target == "server" else None
    try:
        words = ["--url", server.url if server else url, "--universe", "shop", "top", "--interval", "0.1"]
        done = CliRunner().invoke(root, [*words, "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["universe"], [row["queue"] for row in found["queues"]]) == ("shop", ["jobs"])
        assert (found["queues"][0]["ready"], found["queues"][0]["put_per_second"]) == (3, 0.0)
        assert len(found["nodes"]["nodes"]) == 1
        plain = CliRunner().invoke(root, words)
        assert "shop: ready 3  leased 0  dead 0" in plain.stdout
        assert plain.stderr == "This is not a terminal: one view is printed. Say so with --once.\n"
    finally:
        if server is not None:
            server.kill()
