"""One process of `bench_workflows`: a host of durable workflows, of Fastness or of dbos.

python benches/workflow_process.py fastness postgresql://... dir:/tmp/objects   {"work": "rows", "runs": 64, "steps": 9}
python benches/workflow_process.py dbos sqlite:////tmp/x.sqlite

It reads a task from each line, and prints what it has measured:

    rows       `runs` runs at the same time, each with `steps` steps in a row, until all results are known
    first      `runs` runs, one after the other: the seconds from the call that starts a run to its first step
    record     a run of `steps` steps, which then waits for a signal
    restore    the signal, then a new host: the seconds from opening it to the first step after the recorded ones
    sleep      `runs` runs that sleep after their first step: the resident memory before and after
    append     `runs` events appended to a world of Fastness one by one, each of them synced

A step adds one to a number. Every step is an async function, and its result is stored and synced before the next one.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Protocol

GO: Final = "go"
LONG_RUN: Final = "long"
ASLEEP_SECONDS: Final = 3_600
WAIT_SECONDS: Final = 120
PAUSE_SECONDS: Final = 0.005

# The workflows call these: how often a step ran, and when the last one of each kind began.
began: dict[str, float] = {}
steps_done = 0


def _note(name: str) -> None:
    global steps_done  # noqa: PLW0603
    steps_done += 1
    began[name] = time.perf_counter()


async def add(number: int) -> int:
    _note("add")
    return number + 1


async def resume() -> None:
    _note("resume")


class Contestant(Protocol):
    """What runs workflows."""

    async def open(self) -> None:
        """Open the storage and start the host."""
        ...

    async def close(self) -> None: ...

    async def row(self, steps: int) -> int:
        """Run a workflow of `steps` steps, and return its result."""
        ...

    async def start_long(self, steps: int) -> None: ...

    async def signal(self) -> None:
        """Send the signal to the long run. The host is not open."""
        ...

    async def start_sleeper(self) -> None: ...

    async def count_sleepers(self) -> int: ...

    async def append(self, count: int) -> None: ...

    def versions(self) -> dict[str, str]: ...


class Fastness:
    """A host in the process of its plane."""

    def __init__(self, url: str, objects: str | None = None) -> None:
        import fastness

        self._url, self._objects = url, objects
        self._fastness = fastness
        self._app = fastness.HostApp()
        self._open = AsyncExitStack()
        self._plane: Any = None

        @self._app.workflow
        async def row(run: Any, steps: int) -> int:
            number = 0
            for _ in range(steps):
                number = await run.step(add, number)
            return number

        @self._app.workflow
        async def long(run: Any, steps: int) -> None:
            for number in range(steps):
                await run.step(add, number)
            await run.wait_for(GO)
            await run.step(resume)

        @self._app.workflow
        async def sleeper(run: Any) -> None:
            await run.step(add, 0)
            await run.sleep(ASLEEP_SECONDS)

        self._row, self._long, self._sleeper = row, long, sleeper

    async def open(self) -> None:
        self._plane = await self._open.enter_async_context(await self._open_plane())
        await self._open.enter_async_context(self._fastness.AsyncHost(self._plane, self._app))

    async def close(self) -> None:
        await self._open.aclose()

    async def row(self, steps: int) -> int:
        run = await self._plane.workflows.start(self._row, steps)
        result: int = await run.result(wait_seconds=WAIT_SECONDS)
        return result

    async def start_long(self, steps: int) -> None:
        await self._plane.workflows.start(self._long, steps, id=LONG_RUN)

    async def signal(self) -> None:
        async with await self._open_plane() as plane:
            await plane.workflows.signal(LONG_RUN, GO, True)

    async def start_sleeper(self) -> None:
        await self._plane.workflows.start(self._sleeper)

    async def count_sleepers(self) -> int:
        found, after = 0, ""
        while True:
            page = await self._plane.timers.list(after=after)
            found += len(page.timers)
            if page.next is None:
                return found
            after = page.next

    async def append(self, count: int) -> None:
        world = self._plane.world("bare")
        await world.create()
        for height in range(count):
            await world.append([{"result": height}], expected_head=height)

    def _open_plane(self) -> Any:
        return self._fastness.open_async(self._url, objects=self._objects, gc_every_seconds=None)

    def versions(self) -> dict[str, str]:
        return {"fastness": self._fastness.__version__}


class Dbos:
    """dbos with its default settings, on its async functions: its plain ones are not faster."""

    def __init__(self, url: str) -> None:
        from dbos import DBOS

        self._url = url.replace("postgresql://", "postgresql+psycopg://")
        self._dbos = DBOS
        self._sleepers = 0
        self._handles: list[Any] = []
        DBOS(config={"name": "bench", "system_database_url": self._url, "log_level": "ERROR"})
        add_step, resume_step = DBOS.step()(add), DBOS.step()(resume)

        @DBOS.workflow()
        async def row(steps: int) -> int:
            number = 0
            for _ in range(steps):
                number = await add_step(number)
            return number

        @DBOS.workflow()
        async def long(steps: int) -> None:
            for number in range(steps):
                await add_step(number)
            await DBOS.recv_async(GO, timeout_seconds=ASLEEP_SECONDS)
            await resume_step()

        @DBOS.workflow()
        async def sleeper() -> None:
            await add_step(0)
            self._sleepers += 1
            await DBOS.sleep_async(ASLEEP_SECONDS)

        self._row, self._long, self._sleeper = row, long, sleeper

    async def open(self) -> None:
        self._dbos.launch()

    async def close(self) -> None:
        """Nothing is closed: the process exits at once, as after a crash, and the next one recovers its runs."""

    async def row(self, steps: int) -> int:
        handle = await self._dbos.start_workflow_async(self._row, steps)
        return await handle.get_result()

    async def start_long(self, steps: int) -> None:
        from dbos import SetWorkflowID

        with SetWorkflowID(LONG_RUN):
            self._handles.append(await self._dbos.start_workflow_async(self._long, steps))

    async def signal(self) -> None:
        from dbos import DBOSClient

        client = DBOSClient(system_database_url=self._url)
        await client.send_async(LONG_RUN, True, GO)
        client.destroy()

    async def start_sleeper(self) -> None:
        self._handles.append(await self._dbos.start_workflow_async(self._sleeper))

    async def count_sleepers(self) -> int:
        return self._sleepers

    async def append(self, count: int) -> None:
        raise NotImplementedError(f"dbos has no worlds to append {count} events to")

    def versions(self) -> dict[str, str]:
        from importlib.metadata import version

        found = {"dbos": version("dbos")}
        if self._url.startswith("sqlite"):
            found |= _sqlite_settings()
        return found


def _sqlite_settings() -> dict[str, str]:
    """The settings of a connection of dbos that decide what a commit waits for."""
    import sqlalchemy
    from dbos._dbos import _get_dbos_instance

    with _get_dbos_instance()._sys_db.engine.connect() as connection:
        return {
            name: str(connection.execute(sqlalchemy.text(f"PRAGMA {name}")).scalar_one())
            for name in ("journal_mode", "synchronous")
        }


async def rows(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    before, cpu, start = steps_done, time.process_time(), time.perf_counter()
    results = await asyncio.gather(*(contestant.row(task["steps"]) for _ in range(task["runs"])))
    elapsed = time.perf_counter() - start
    if results != [task["steps"]] * task["runs"] or steps_done - before != task["steps"] * task["runs"]:
        raise RuntimeError(f"{steps_done - before} steps ran, with the results {results}")
    return {"seconds": elapsed, "cpu_seconds": time.process_time() - cpu, "steps": steps_done - before}


async def first(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    seconds = []
    for _ in range(task["runs"]):
        start = time.perf_counter()
        await contestant.row(1)
        seconds.append(began["add"] - start)
    return {"seconds": seconds}


async def record(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    before = steps_done
    await contestant.start_long(task["steps"])
    await _until(lambda: steps_done - before == task["steps"])
    await asyncio.sleep(0.5)  # The last result is stored after the step; dbos does not say when.
    return {}


async def restore(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    del task
    await contestant.signal()
    start = time.perf_counter()
    await contestant.open()
    await _until(lambda: "resume" in began)
    if steps_done != 1:
        raise RuntimeError(f"{steps_done} steps ran, and 1 was new")
    return {"seconds": began["resume"] - start}


async def sleep(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    before = _resident_bytes()
    count = await contestant.count_sleepers() + task["runs"]
    for _ in range(task["runs"]):
        await contestant.start_sleeper()
    deadline = time.monotonic() + WAIT_SECONDS
    while await contestant.count_sleepers() < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"Not all runs are asleep after {WAIT_SECONDS} s")
        await asyncio.sleep(0.1)
    return {"before": before, "after": _resident_bytes()}


async def append(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    await contestant.append(task["runs"])
    return {"seconds": time.perf_counter() - start}


async def _until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"A run has not got as far as expected after {WAIT_SECONDS} s and {steps_done} steps")
        await asyncio.sleep(PAUSE_SECONDS)


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


WORK: Final[dict[str, Callable[[Contestant, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]]] = {
    "rows": rows,
    "first": first,
    "record": record,
    "restore": restore,
    "sleep": sleep,
    "append": append,
}


async def main() -> None:
    kind, *place = sys.argv[1:]
    contestant: Contestant = Fastness(*place) if kind == "fastness" else Dbos(*place)
    is_open = False
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        task = json.loads(line)
        if not is_open and task["work"] != "restore":
            await contestant.open()
        is_open = True
        measured = await WORK[task["work"]](contestant, task)
        print(json.dumps(measured | {"versions": contestant.versions()}), flush=True)
    await contestant.close()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
