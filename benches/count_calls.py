"""How many Python functions and files an operation passes: `python -m benches.count_calls`.

A profile hook counts the calls of functions of fastness, in all threads, while an operation runs the second time. With
`--list` it prints each function with the number of its calls. A server runs in this process, so its functions count.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import fastness
from fastness import Plane
from fastness.server.serving import serve
from fastness.server.settings import Settings

SOURCE: Final = str(Path(fastness.__file__).parent)


class CallCounter:
    """Counts the functions that are called while `counting`, in this thread and in those that start from now on."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self._counts = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if self._counts and event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            self.calls[frame.f_code] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.calls.clear()
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.calls})


def operations(plane: Plane) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operation by its name."""
    jobs, many, state = plane.queue("jobs"), plane.queue("many"), plane.state("orders/1")

    def receive_and_ack() -> None:
        message = jobs.receive()
        assert message is not None
        message.ack()

    for _ in range(4):
        jobs.put({"n": 1})
    for _ in range(64):
        many.put({"n": 1})
    yield "put", lambda: jobs.put({"n": 1})
    yield "receive and ack", receive_and_ack
    yield "receive_many and ack_many", lambda: many.ack_many(many.receive_many(16))
    yield "acquire a lease", lambda: plane.lease("deploy").acquire(owner="ada", ttl_seconds=30)
    yield "update a state", lambda: state.update({"n": 1})


def report(counter: CallCounter, place: str, plane: Plane, *, lists: bool) -> None:
    """Print what each operation of a plane passes."""
    for name, work in operations(plane):
        work()
        with counter.counting():
            work()
        calls = dict(counter.calls)
        print(f"{name}, {place}: {counter.files} files, {len(calls)} functions, {sum(calls.values())} calls")
        for code, count in calls.items() if lists else ():
            print(f"    {count:3} {Path(code.co_filename).relative_to(SOURCE)} {code.co_name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each function with the number of its calls")
    lists = parser.parse_args().list
    counter = CallCounter()

    def use(url: str) -> None:
        try:
            with fastness.connect(url) as plane:
                report(counter, "through a server", plane, lists=lists)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with tempfile.TemporaryDirectory() as folder:
        with fastness.open(f"dir:{folder}/embedded") as plane:
            report(counter, "embedded", plane, lists=lists)
        settings = Settings(data=f"dir:{folder}/served", port=0, log_level="warning")
        asyncio.run(serve(settings, ready=lambda url: threading.Thread(target=use, args=(url,)).start()))


if __name__ == "__main__":
    main()
