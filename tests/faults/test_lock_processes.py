"""Processes that lock in random order, over a server and over two nodes on PostgreSQL, some of them killed or stopped.

`lock_child.py` writes what the processes saw, and `fastness.testing.histories.locks` checks it as one history: no
deadlock, no two holders in conflicting modes, all are served, and the locks of a killed or stopped process end with its
lease.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import pytest

import fastness
from fastness import Plane
from fastness.testing.histories import NEVER, Operation, Outcome, Violation
from fastness.testing.histories.locks import check_locks
from tests.faults import lock_child
from tests.support.forked import start_python
from tests.support.waiting import eventually

HERE = Path(__file__).parent
SECONDS_MAX = 60.0  # Bounds every wait; far longer than any step takes.
LOST = ("lease_expired", "fencing_mismatch")
GRANTS_TO_JUDGE = 30  # Of each process. With fewer, on a busy machine, chance alone gives some much less than others.
ATTEMPTS_MAX = 5  # A process that is stopped may be about to release its locks.
DRIVER = "driver"


class Size(NamedTuple):
    """How many processes lock, for how long, and what happens to some of them."""

    processes: int
    seconds: float
    rows: int  # Of each kind.
    bulk: float  # The share of requests for whole tables.
    kills: int
    stops: int
    lease_seconds: float


QUICK = Size(processes=8, seconds=6.0, rows=4, bulk=0.1, kills=2, stops=1, lease_seconds=1.5)
FULL = Size(processes=100, seconds=60.0, rows=32, bulk=0.03, kills=8, stops=3, lease_seconds=5.0)
every_size = pytest.mark.parametrize(
    "size",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(FULL, id="full", marks=pytest.mark.nightly),
    ],
)


# Servers.


@contextmanager
def serving(folder: Path, data: str, *, command: list[str] | None = None) -> Iterator[str]:
    """The URL of a `fastness serve` process; `command` runs the CLI."""
    folder.mkdir()
    run = [*(command or ["-m", "fastness.cli"]), "serve", "--data", data, "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    environment["XDG_STATE_HOME"] = str(folder / "state")
    with (folder / "server.log").open("wb") as log:
        process = start_python(run, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rpartition(" ")[2]
        assert url.startswith("http"), (folder / "server.log").read_text()
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_MAX)
        process.kill()
        process.communicate()


@pytest.fixture(params=["server", pytest.param("postgres", marks=pytest.mark.rotating)])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """One server on RocksDB, or two servers on one PostgreSQL."""
    with ExitStack() as stack:
        if request.param == "server":
            yield [stack.enter_context(serving(tmp_path / "server", f"dir:{tmp_path / 'data'}"))]
        else:
            shared = request.getfixturevalue("postgres_url")
            fastness.open(shared).close()  # Creates the tables.
            yield [stack.enter_context(serving(tmp_path / f"node-{number}", shared)) for number in range(2)]


# Processes.


class Seen(NamedTuple):
    """What a process had written at some moment."""

    operations: list[Operation]
    errors: dict[tuple[str, int], str]  # As in `Observed`.
    notes: list[Any]

    @property
    def claims(self) -> dict[str, Operation]:
        """The claims that it holds, as it knows."""
        held = {each.key: each for each in self.operations if each.kind == "acquire" and each.outcome is Outcome.OK}
        for each in self.operations:
            if each.kind == "release":
                held.pop(each.key, None)
        return {str(key): each for key, each in held.items()}

    @property
    def is_calling(self) -> bool:
        return bool(self.operations) and self.operations[-1].returned == NEVER


def read(path: Path) -> Seen:
    operations: dict[int, Operation] = {}
    errors, notes = {}, []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            break  # A process was killed while it wrote.
        what, *words = json.loads(line)
        if what == "began":
            number, kind, claim, argument, at = words
            operations[number] = Operation(f"p{path.stem}", kind, claim, argument, at)
        elif what == "ended":
            number, outcome, result, at, *message = words
            begun = operations[number]
            if message:
                errors[begun.client, begun.invoked], result = f"{result}: {message[0]}", None
            returned = NEVER if outcome == "unknown" else at
            operations[number] = Operation(
                begun.client, begun.kind, begun.key, begun.argument, begun.invoked, returned, Outcome(outcome), result
            )
        else:
            notes.append(words)
    return Seen(list(operations.values()), errors, notes)


class Lockers:
    """The processes. Use it in a `with` block."""

    def __init__(self, urls: list[str], folder: Path, size: Size, seed: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._task = lock_child.Task(
            urls=urls,
            processes=size.processes,
            folder=str(folder),
            seconds=size.seconds,
            seed=seed,
            rows=size.rows,
            bulk=size.bulk,
            lease_seconds=size.lease_seconds,
            hold_seconds=0.005,
            stuck_seconds=SECONDS_MAX,
        )
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        self._program = subprocess.Popen(
            [sys.executable, str(HERE / "lock_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # All of them are one group, which can be killed.
        )
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(self._task._asdict()) + "\n")
        self._program.stdin.flush()
        self.pids = json.loads(self._line())
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._program.pid, signal.SIGKILL)
        self._program.communicate()

    def seen(self, number: int) -> Seen:
        return read(self._folder / f"{number}.jsonl")

    def has_just_acquired(self, number: int) -> bool:
        """Whether the last call of a process has acquired a lock; quicker than `seen`."""
        path = self._folder / f"{number}.jsonl"
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4_096, 0))
            last = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return last.startswith(b'["ended"') and b'"ok", [[' in last

    def stop(self, number: int) -> int:
        """Stop a process, and return when."""
        pid = self.pids[number]
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        return time.monotonic_ns()

    def signal(self, number: int, which: signal.Signals) -> None:
        os.kill(self.pids[number], which)

    def wait(self) -> list[int]:
        """The exit codes."""
        codes = dict(json.loads(self._line()) for _ in self.pids)
        return [codes[pid] for pid in self.pids]

    def _line(self) -> str:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        assert line, f"the processes ended with {self._program.wait(SECONDS_MAX)}"
        return line


class Observed(NamedTuple):
    """All that a run showed."""

    operations: list[Operation]
    errors: dict[tuple[str, int], str]  # Code and message of an operation, by process and when it was invoked.
    notes: list[Any]
    exits: dict[str, int]  # By process.
    killed: dict[str, int]  # When, by process.
    stopped: set[str]
    documents: dict[str, Any]


class Run:
    """A run of all processes, with its faults."""

    def __init__(self, urls: list[str], folder: Path, size: Size) -> None:
        self._urls, self._folder, self._size = urls, folder, size
        self._seed = random.SystemRandom().randrange(1 << 32)
        self._chance = random.Random(self._seed)
        self._record = lock_child.Record(folder / f"{DRIVER}.jsonl")
        self._killed: dict[int, int] = {}
        self._stopped: set[int] = set()
        print(f"seed {self._seed}")

    def observe(self) -> Observed:
        size = self._size
        with (
            fastness.connect(self._urls[0]) as plane,
            Lockers(self._urls, self._folder / "lockers", size, self._seed) as lockers,
        ):
            for _ in range(size.kills):
                number, at = self._stop_a_holder(lockers)
                lockers.signal(number, signal.SIGKILL)
                self._killed[number] = at
            for number in self._killed:  # Their locks end before a stopped process delays others in the same way.
                for claim in lockers.seen(number).claims.values():
                    level, name, _ = claim.result[0]
                    self._acquire(plane, [level, name] if name else [level], f"after {claim.key}")
            for _ in range(size.stops):
                assert any(self._outlive_a_holder(plane, lockers) for _ in range(ATTEMPTS_MAX))
            exits = {f"p{number}": code for number, code in enumerate(lockers.wait())}
            seen = [lockers.seen(number) for number in range(size.processes)]
            self._acquire(plane, ["database"], "last")  # Conflicts with all: so each lock has a next holder.
            states = {
                lock_child.state_of(*each.argument[:2])
                for some in seen
                for each in some.operations
                if each.kind == "guarded"
            }
            documents = {state: plane.state(state).get() for state in states}
        seen.append(read(self._folder / f"{DRIVER}.jsonl"))
        return Observed(
            [each for some in seen for each in some.operations],
            {error: text for some in seen for error, text in some.errors.items()},
            [note for some in seen for note in some.notes],
            exits,
            {f"p{number}": at for number, at in self._killed.items()},
            {f"p{number}" for number in self._stopped},
            {state: each.value for state, each in documents.items() if each is not None},
        )

    def _stop_a_holder(
        self, lockers: Lockers, *, accept: Callable[[Seen], object] = lambda seen: seen.claims
    ) -> tuple[int, int]:
        """Stop a process while it holds locks; which one, and when."""
        deadline = time.monotonic() + self._size.seconds
        others = [each for each in range(self._size.processes) if each not in self._killed]
        while time.monotonic() < deadline:
            for number in self._chance.sample(others, len(others)):
                if lockers.has_just_acquired(number):
                    at = lockers.stop(number)
                    if accept(lockers.seen(number)):
                        return number, at
                    lockers.signal(number, signal.SIGCONT)
        raise AssertionError("no process held a lock")

    def _outlive_a_holder(self, plane: Plane, lockers: Lockers) -> bool:
        """Stop a process for longer than its lease: another holder follows, and it is refused when it continues.

        False: it continued with the release, without another write.
        """

        def exclusive(seen: Seen) -> list[Operation]:
            if seen.is_calling or not seen.operations or seen.operations[-1].kind != "acquire":
                return []
            return [each for each in seen.claims.values() if each.argument["mode"] == "X"]

        number, _ = self._stop_a_holder(lockers, accept=exclusive)
        self._stopped.add(number)
        claim = exclusive(lockers.seen(number))[0]
        level, name, fence = claim.result[0]
        heir = self._acquire(plane, [level, name] if name else [level], f"after {claim.key}")
        assert heir > fence
        lockers.signal(number, signal.SIGCONT)

        def own(kind: str) -> list[Operation]:
            return [each for each in lockers.seen(number).operations if (each.key, each.kind) == (claim.key, kind)]

        eventually(lambda: any(each.outcome is not Outcome.UNKNOWN for each in own("release")))
        assert own("release")[0].result is not True
        writes = own("guarded")
        assert all(each.outcome is Outcome.FAILED for each in writes), writes
        return bool(writes)

    def _acquire(self, plane: Plane, path: list[str], claim: str) -> int:
        """Acquire and release a lock in this process; its fence."""
        lease_seconds = self._size.lease_seconds
        found: list[Any] = []

        def acquire() -> list[Any]:
            found.append(plane.locks.acquire(path, timeout_seconds=SECONDS_MAX, lease_seconds=lease_seconds))
            return [[level, name, fence] for (level, name), fence in found[0].fences.items()]

        argument = {"paths": [path], "mode": "X", "lease": round(lease_seconds * 1e9)}
        outcome, answer = self._record.call("acquire", claim, argument, acquire)
        assert outcome == "ok", answer
        self._record.call("release", claim, None, lambda: lock_child.release(found[0]))
        return int(found[0].fence)


# Checks.


def conflict(one: Operation, other: Operation) -> bool:
    """Whether two claims exclude each other, by a plain reading of the rules."""
    first, second = (lock_child.steps_of(each.argument["paths"], each.argument["mode"]) for each in (one, other))
    allowed = {("IS", "IS"), ("IS", "IX"), ("IX", "IS"), ("IX", "IX"), ("IS", "S"), ("S", "IS"), ("S", "S")}
    return any((first[key], second[key]) not in allowed for key in first.keys() & second.keys())


def grants(operations: list[Operation]) -> list[Operation]:
    return [each for each in operations if each.kind == "acquire" and each.outcome is Outcome.OK]


def least_share(counts: dict[str, int]) -> float:
    """What the least served process got, in shares of an equal distribution."""
    return min(counts.values()) / fmean(counts.values())


class Followed(NamedTuple):
    """A claim of a killed process, and the first claim that was granted afterwards and excludes it."""

    seconds: float  # Since the process was killed.
    late_seconds: float  # Since the lease had ended and the other one had asked.
    was_awaited: bool  # The other one waited when the lease ended.


def followers(observed: Observed, lease_seconds: float) -> list[Followed]:
    granted = grants(observed.operations)
    released = {each.key for each in observed.operations if each.kind == "release" and each.outcome is Outcome.OK}
    found = []
    for client, at in observed.killed.items():
        for claim in granted:
            if claim.client != client or claim.key in released:
                continue
            after = [each for each in granted if each.client != client and each.returned > at and conflict(claim, each)]
            first = min(after, key=lambda each: each.returned)
            ended = round(at + lease_seconds * 1e9)
            late = first.returned - max(first.invoked, ended)
            found.append(Followed((first.returned - at) / 1e9, late / 1e9, first.invoked < ended))
    return found


def check(observed: Observed, size: Size) -> None:
    """Print what was observed, and check it."""
    granted = grants(observed.operations)
    disturbed = {DRIVER, *observed.killed, *observed.stopped}
    shares = {each: 0 for each in observed.exits if each not in disturbed}
    shares.update(Counter(each.client for each in granted if each.client in shares))
    followed = followers(observed, size.lease_seconds)
    codes = Counter(text.partition(":")[0] for text in observed.errors.values())
    print(f"{len(granted):,} grants; refused: {dict(codes)}")
    print(f"least served {least_share(shares):.2f} of an equal share; {min(shares.values())} to {max(shares.values())}")
    times = sorted(each.seconds for each in followed if each.was_awaited)
    late = max((each.late_seconds for each in followed), default=0.0)
    print(
        f"killed holders were followed after {', '.join(f'{each:.2f}' for each in times)} s, {late:.2f} s late at most"
    )

    assert observed.exits == {each: -signal.SIGKILL if each in observed.killed else 0 for each in observed.exits}
    assert not observed.notes, "the lock order was not enforced as declared"
    check_locks(observed.operations)
    check_errors(observed, size.lease_seconds)
    assert codes["lock_order_violation"], "no lock was requested against the order"
    if fmean(shares.values()) >= GRANTS_TO_JUDGE:
        assert least_share(shares) >= 0.5
    assert len(followed) >= size.kills
    check_documents(observed)


def check_errors(observed: Observed, lease_seconds: float) -> None:
    """What does not violate the order is granted; only a session that has lasted for its lease can be lost."""
    calls: dict[str, list[Operation]] = {}
    for each in observed.operations:
        calls.setdefault(each.client, []).append(each)
    for client, own in calls.items():
        held: dict[Any, Operation] = {}
        for each in own:
            code = observed.errors.get((client, each.invoked), "").partition(":")[0]
            if code in LOST:
                began = min((claim.invoked for claim in held.values()), default=each.invoked)
                assert each.returned - began >= lease_seconds * 1e9, each
            else:
                assert code in ("", "lock_order_violation"), (each, observed.errors[client, each.invoked])
            if each.kind == "release":
                held.pop(each.key, None)
            elif each.kind == "acquire" and each.outcome is Outcome.OK:
                held[each.key] = each


def check_documents(observed: Observed) -> None:
    """Each document has what was written last under its lock: the write with the highest fence."""
    writes: dict[str, dict[int, Operation]] = {}
    for each in observed.operations:
        if each.kind == "guarded" and each.outcome is not Outcome.FAILED:
            level, name, fence = each.argument
            writes.setdefault(lock_child.state_of(level, name), {})[fence] = each
    assert writes, "nothing was written under a lock"
    for state, found in writes.items():
        certain = [fence for fence, each in found.items() if each.outcome is Outcome.OK]
        claim, fence = observed.documents.get(state, (None, 0))
        assert fence >= max(certain, default=0), (state, claim, fence)
        assert not fence or found[fence].key == claim, (state, claim, fence)


# Tests.


@every_size
def test_processes_that_lock_in_random_order(urls: list[str], tmp_path: Path, size: Size) -> None:
    check(Run(urls, tmp_path, size).observe(), size)


FLAWS = {
    "ignore_exclusive_holders": "two holders: .* mode (S|X)",
    "forget_intents": "(entity_type|database).* had two holders",
    "end_sessions_early": "had two holders",
}
FLAW_RUNS_MAX = 20  # One is enough, unless others use the machine: then a run has few grants.


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_of_the_locks_is_found(flaw: str, tmp_path: Path) -> None:
    command = [str(HERE / "flawed_server_child.py"), flaw]
    size = QUICK._replace(seconds=1.0, kills=0, stops=0)
    with pytest.raises(Violation, match=FLAWS[flaw]):
        for number in range(FLAW_RUNS_MAX):
            folder = tmp_path / str(number)
            folder.mkdir()
            with serving(folder / "server", f"dir:{folder / 'data'}", command=command) as url:
                observed = Run([url], folder, size).observe()
            check_locks(observed.operations)
