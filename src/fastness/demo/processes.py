"""The processes of the demo. Each has its own session, so Ctrl-C reaches only the demo itself."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

INTERRUPTIONS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_SECONDS: Final = 60.0  # How long any step may take before it counts as failed.
_STOP_SECONDS: Final = 15.0
_LOG_CHARACTERS_MAX: Final = 500  # How much of a log is quoted in an error.
_CHECK_SECONDS: Final = 0.02

Found = TypeVar("Found")


class Child:
    """A process that reports what it does as lines on stdout."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        # FASTNESS_* variables of the user's shell must not affect the demo's processes.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
        with log.open("ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=environment,
                start_new_session=True,
            )
        self.log = log
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_lines, name="fastness-demo-listener", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def was_killed(self) -> bool:
        """Whether it was ended by SIGKILL."""
        return self.process.returncode == -signal.SIGKILL

    def read_line(self, seconds: float = PATIENCE_SECONDS) -> str | None:
        """The next line of the process; None if it has ended.

        Raises:
            TimeoutError: no line arrived within `seconds`.
        """
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"A process printed nothing for {seconds:.0f} s; {self.log_tail()}") from None
        return None if line is None else line.decode().strip()

    def read_event(self, event: str) -> dict[str, Any]:
        """The fields of the next event of that name.

        Raises:
            RuntimeError: the process has ended.
            TimeoutError: the event did not arrive in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (line := self.read_line(max(deadline - time.monotonic(), 0.0))) is not None:
            fields: dict[str, Any] = msgspec.json.decode(line)
            if fields["event"] == event:
                return fields
        raise RuntimeError(f"A process ended before it reported {event!r}; {self.log_tail()}")

    def log_tail(self) -> str:
        """The end of the process's log."""
        return self.log.read_text(errors="replace").strip()[-_LOG_CHARACTERS_MAX:] or "its log is empty"

    def kill(self) -> None:
        """Send SIGKILL, which no process can catch."""
        self.process.kill()  # Has no effect on a process that has ended.
        self.process.wait()

    def stop(self) -> None:
        """Send SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait_for_end(self) -> None:
        """Wait for the process to end, and kill it if it takes too long."""
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Processes:
    """All processes of the demo. On exit, every one has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._server: Child | None = None

    def serve(self, port: int = 0) -> "Server":
        """Start a server on the demo's data directory."""
        arguments = ["serve", "--data", f"dir:{self.folder / 'data'}", "--port", str(port)]
        arguments += ["--pipeline-reports", str(self.folder / "lake" / "reports"), "--log-format", "json"]
        self._server = self._start(["fastness.cli", *arguments], "server.log")
        return Server(self._server)

    def agent(self, role: str, *arguments: str) -> Child:
        """Start an agent; `fastness.demo.agents` has the roles."""
        return self._start(["fastness.demo.agents", role, *arguments], "agents.log")

    def stop(self, *children: Child) -> None:
        """Stop the processes, all at the same time."""
        for child in children:
            child.stop()
        for child in children:
            child.wait_for_end()

    def wait_for(self, *children: Child) -> None:
        """Wait for the processes to end."""
        for child in children:
            child.wait_for_end()

    def until(self, check: Callable[[], Found | None], description: str) -> Found:
        """The first truthy result of `check`.

        Raises:
            RuntimeError: a process has failed.
            TimeoutError: `check` returned nothing within PATIENCE_SECONDS.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if found := check():
                return found
            for child in self._children:
                if (child.process.poll() or 0) > 0:  # A killed process has a negative code.
                    raise RuntimeError(f"A process failed: {child.log_tail()}")
            time.sleep(_CHECK_SECONDS)
        raise TimeoutError(f"{description} did not happen within {PATIENCE_SECONDS:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Agents that still run after a failure would wait for a server that ends too.
        for child in self._children:
            if child is not self._server:
                child.kill()
        if self._server is not None:
            self._server.stop()
        self.wait_for(*self._children)

    def _start(self, arguments: list[str], log: str) -> Child:
        with _interruptions_deferred():
            child = Child(arguments, self.folder / log)
            self._children.append(child)
        return child


@contextmanager
def _interruptions_deferred() -> Iterator[None]:
    """Defer interruptions, so a started process is always registered and cannot outlive the demo."""
    received: list[int] = []
    previous = {each: signal.signal(each, lambda number, _: received.append(number)) for each in INTERRUPTIONS}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
        for number in received:
            signal.raise_signal(number)


class Server:
    """A server that is ready to accept calls."""

    def __init__(self, child: Child) -> None:
        self.child = child
        first: dict[str, Any] = msgspec.json.decode(child.read_line() or "{}")
        if "url" not in first:
            child.wait_for_end()
            raise RuntimeError(f"The server did not start: {child.log_tail()}")
        self.url: str = first["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])
