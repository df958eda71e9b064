"""Client processes beside ours: `python -m benches.peers.putters PEER URL QUEUE BYTES uvloop|asyncio`.

Each reads lines of a count and a number of callers, puts so many messages, and answers with a line of its own.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benches.peers.clients import CALLERS, CLIENTS, Client, shared
from benches.peers.loops import loop_factory


class Putters:
    """Some client processes that put at the same time."""

    def __init__(self, processes: "list[subprocess.Popen[str]]") -> None:
        self._processes = processes
        self._hear()

    def put(self, count: int) -> int:
        """Have `count` messages put by 256 callers, an equal part of them in each process."""
        each, callers = count // len(self._processes), CALLERS // len(self._processes)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{each} {callers}\n")
            process.stdin.flush()
        self._hear()
        return each * len(self._processes)

    def _hear(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("A client process has ended before its work was done; its error is above")


@contextmanager
def putters(count: int, peer: str, url: str, queue: str, *, size_bytes: int, uvloop: bool) -> Iterator[Putters]:
    """`count` client processes that are connected."""
    words = [peer, url, queue, str(size_bytes), "uvloop" if uvloop else "asyncio"]
    command = [sys.executable, "-m", "benches.peers.putters", *words]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        yield Putters(processes)
    finally:
        for process in processes:
            process.communicate()  # Closes its input, which ends it.


def main() -> None:
    peer, url, queue, size, loop = sys.argv[1:]
    body = b"x" * int(size)
    with asyncio.Runner(loop_factory=loop_factory(uvloop=loop == "uvloop")) as runner:
        client: Client = runner.run(CLIENTS[peer].connect(url, queue))
        runner.run(client.put(body))
        print("ready", flush=True)
        for line in sys.stdin:
            count, callers = map(int, line.split())
            runner.run(shared(lambda: client.put(body), count, callers))
            print("done", flush=True)
        runner.run(client.close())


if __name__ == "__main__":
    main()
