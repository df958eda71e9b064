"""Further client processes: `python -m benches.peers.put_clients PEER URL QUEUE BYTES uvloop|asyncio`.

Each reads lines with a count and a number of callers, puts that many messages, and then prints a line.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benches.peers.clients import CALLERS, CLIENTS, Client, call_concurrently, loop_factory


class PutClients:
    """Client processes that put at the same time."""

    def __init__(self, processes: "list[subprocess.Popen[str]]") -> None:
        self._processes = processes
        self._wait_for_lines()

    def put(self, count: int) -> int:
        """Put `count` messages by 256 callers, divided equally among the processes."""
        each, callers = count // len(self._processes), CALLERS // len(self._processes)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{each} {callers}\n")
            process.stdin.flush()
        self._wait_for_lines()
        return each * len(self._processes)

    def _wait_for_lines(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("A client process ended early; its error is above")


@contextmanager
def put_clients(count: int, peer: str, url: str, queue: str, *, size_bytes: int, uvloop: bool) -> Iterator[PutClients]:
    """`count` connected client processes."""
    arguments = [peer, url, queue, str(size_bytes), "uvloop" if uvloop else "asyncio"]
    command = [sys.executable, "-m", "benches.peers.put_clients", *arguments]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        yield PutClients(processes)
    finally:
        for process in processes:
            process.communicate()  # Closes its standard input, upon which it exits.


def main() -> None:
    peer, url, queue, size, loop = sys.argv[1:]
    body = b"x" * int(size)
    with asyncio.Runner(loop_factory=loop_factory(use_uvloop=loop == "uvloop")) as runner:
        client: Client = runner.run(CLIENTS[peer].connect(url, queue))
        runner.run(client.put(body))
        print("ready", flush=True)
        for line in sys.stdin:
            count, callers = map(int, line.split())
            runner.run(call_concurrently(lambda: client.put(body), count, callers))
            print("done", flush=True)
        runner.run(client.close())


if __name__ == "__main__":
    main()
