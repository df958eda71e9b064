"""The processes of the story. Each has a session of its own, so that Ctrl-C reaches nobody but the one who tells it."""

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
PATIENCE_SECONDS: Final = 60.0  # How long any step of the story may take before it counts as broken.
_STOP_SECONDS: Final = 15.0
_WORDS_MAX: Final = 500  # Characters of a log that are quoted.
_LOOK_SECONDS: Final = 0.02

Found = TypeVar("Found")


class Child:
    """A process that tells what it does as lines."""

    def __init__(self, words: list[str], log: Path) -> None:
        # What a shell says to commands is not meant for the processes of a story.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        with log.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                start_new_session=True,
            )
        self.log = log
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="holdfast-demo-listener", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def was_killed(self) -> bool:
        """Whether it died of SIGKILL."""
        return self.process.returncode == -signal.SIGKILL

    def hear(self, seconds: float = PATIENCE_SECONDS) -> str | None:
        """The next line that it says; None if it has ended.

        Raises:
            TimeoutError: it said nothing for so long.
        """
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"A process said nothing for {seconds:.0f} s; {self.last_words()}") from None
        return None if line is None else line.decode().strip()

    def hear_of(self, event: str) -> dict[str, Any]:
        """What it tells of the next event of that name.

        Raises:
            RuntimeError: it ended.
            TimeoutError: it said nothing of it in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (line := self.hear(max(deadline - time.monotonic(), 0.0))) is not None:
            told: dict[str, Any] = msgspec.json.decode(line)
            if told["event"] == event:
                return told
        raise RuntimeError(f"A process ended before it told of {event!r}; {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, which may say what went wrong."""
        return self.log.read_text(errors="replace").strip()[-_WORDS_MAX:] or "it said nothing"

    def kill(self) -> None:
        """SIGKILL, which no process can catch, delay or clean up after."""
        self.process.kill()  # Of no effect on one that has ended.
        self.process.wait()

    def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        if self.process.poll() is None:
            self.process.terminate()

    def bury(self) -> None:
        """Wait for its end, and hasten it if need be."""
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._listener.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Processes:
    """All processes of the story; at its end there is none of them any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._server: Child | None = None

    def serve(self, port: int = 0) -> "Server":
        """A server over the story's data directory."""
        words = ["serve", "--data", f"dir:{self.folder / 'data'}", "--port", str(port)]
        words += ["--pipeline-reports", str(self.folder / "lake" / "reports"), "--log-format", "json"]
        self._server = self._started(["holdfast.cli", *words], "server.log")
        return Server(self._server)

    def agent(self, role: str, *words: str) -> Child:
        """An agent: what `holdfast.demo.agents` says it does."""
        return self._started(["holdfast.demo.agents", role, *words], "agents.log")

    def dismiss(self, *children: Child) -> None:
        """Have them end at the same time."""
        for child in children:
            child.stop()
        for child in children:
            child.bury()

    def wait_for(self, *children: Child) -> None:
        """Let them come to their end."""
        for child in children:
            child.bury()

    def until(self, look: Callable[[], Found | None], what: str) -> Found:
        """What `look` finds, as soon as it is something.

        Raises:
            RuntimeError: a process has ended that nobody has killed.
            TimeoutError: it was nothing for as long as a step may take.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if found := look():
                return found
            for child in self._children:
                if (child.process.poll() or 0) > 0:  # Whoever was killed has the number of a signal.
                    raise RuntimeError(f"A process ended by itself: {child.last_words()}")
            time.sleep(_LOOK_SECONDS)
        raise TimeoutError(f"{what} did not happen within {PATIENCE_SECONDS:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Agents that are still here when the story breaks off would wait for a server that ends with them.
        for child in self._children:
            if child is not self._server:
                child.kill()
        if self._server is not None:
            self._server.stop()
        self.wait_for(*self._children)

    def _started(self, words: list[str], log: str) -> Child:
        with _undisturbed():
            child = Child(words, self.folder / log)
            self._children.append(child)
        return child


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put interruptions off: whoever is started must be known before anything else happens, or outlives the story."""
    heard: list[int] = []
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in INTERRUPTIONS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in heard:
            signal.raise_signal(number)


class Server:
    """A server that is ready."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.url = (child.hear() or "").rpartition(" ")[2]
        if not self.url.startswith("http"):
            child.bury()
            raise RuntimeError(f"The server did not start: {child.last_words()}")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])
