"""SIGKILL during tiered writes: CRITICAL and IMPORTANT writes are kept, and session logs lose at most their last line.

Run as a program, this file is the child: it writes, prints the acknowledged versions, and waits to be killed.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec

import fastness
from fastness import Plane
from fastness.runtime.activity import format as log_format
from tests.support.depth import Depth
from tests.support.forked import start_python

THREADS = 3
RENEWED_EVERY = 400  # Well below the versions that a history keeps.
TURNS = ("status", "note", "both")


class Promise(NamedTuple):
    """An acknowledged write of the child: the version of an entity, its fields and their value."""

    tier: str
    id: str
    version: int
    turn: str
    number: int


def child(folder: str, run: int) -> None:
    """Write from several threads, each to its own entity and all to a shared one, until killed."""
    plane = fastness.open(f"dir:{folder}")

    def work(thread: int) -> None:
        for number in range(1_000_000):
            own = f"{run}-{thread}-{number // RENEWED_EVERY}"
            id = own if number % 4 else f"{run}-common-{number // RENEWED_EVERY}"
            turn = TURNS[(number + thread) % 3]
            fields = {field: number for field in ("status", "note") if turn in (field, "both")}
            written = plane.entities.write("task", id, {**fields, "debug_n": number}, session=f"s{run}-{thread}")
            plane.activity.log(f"s{run}-{thread}", {"n": number})
            line = f"{written.durability} {id} {written.versions[0]} {turn} {number}\n"
            os.write(1, line.encode())

    for thread in range(THREADS):
        threading.Thread(target=work, args=(thread,), daemon=True).start()
    threading.Event().wait()


def kill_after(folder: Path, run: int, delay_seconds: float) -> list[Promise]:
    """Run the child, kill it that long after its first acknowledgement, and return its acknowledged writes."""
    with start_python([__file__, folder, str(run)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        head = process.stdout.read(1)  # The first acknowledgement: the child is writing from now on.
        time.sleep(delay_seconds)  # A random time to kill a real process; this does not wait for a condition.
        process.send_signal(signal.SIGKILL)
        lines = (head + process.stdout.read()).splitlines(keepends=True)
    promises = []
    for line in lines:
        if line.endswith(b"\n"):
            tier, id, version, turn, number = line.decode().split()
            promises.append(Promise(tier, id, int(version), turn, int(number)))
    return promises


def check_logs_left_behind(folder: Path) -> dict[tuple[str, str], int]:
    """Check that all lines but the last of each file are complete; returns the records per session and kind."""
    records: dict[tuple[str, str], int] = defaultdict(int)
    for path in (folder / "activity").glob("*/*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        if not lines:
            continue  # Killed between the creation and the header.
        name = log_format.parse_name(path.stem)
        assert name is not None
        header = log_format.header_of(lines[0], "main", name)
        whole = [log_format.parse_line(line) for line in lines[1:]]
        assert None not in whole[:-1], f"{path} is damaged before its end"
        records[header.session, header.kind] += sum(line is not None for line in whole)
    return records


def check_acknowledged_writes(plane: Plane, promises: list[Promise]) -> None:
    histories = {id: plane.entities.history("task", id, limit=10_000) for id in {each.id for each in promises}}
    for promise in promises:
        change = histories[promise.id][promise.version - 1 : promise.version]
        assert change, f"{promise} was acknowledged and is lost"
        expected = {field: promise.number for field in ("status", "note") if promise.turn in (field, "both")}
        assert change[0].fields == expected, f"{promise} is {change[0]}"
        assert change[0].durability == promise.tier
    for id, history in histories.items():
        fields: dict[str, int] = {}
        for each in history:
            fields |= each.fields
        entity = plane.entities.get("task", id)
        assert entity is not None
        assert (entity.version, entity.fields) == (len(history), fields)


def read_numbers(plane: Plane, session: str, kind: str) -> list[int]:
    numbers, after = list[int](), None
    while True:
        page = plane.activity.read(session=session, kind=kind, after=after)
        for each in page.records:
            record = msgspec.json.decode(each.record)
            numbers.append(record["fields"]["debug_n"] if kind == "entities" else record["n"])
        after = page.next
        if after is None:
            return numbers


def test_a_killed_process_loses_no_critical_or_important_write(tmp_path: Path, depth: Depth) -> None:
    """IMPORTANT survives a process crash, and a new process does not damage earlier log records."""
    kills = max(1, depth.kills // 6)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    promised = logged = 0
    tiers: set[str] = set()
    for run in range(kills):
        promises = kill_after(tmp_path, run, chance.uniform(0, 0.5))
        left = check_logs_left_behind(tmp_path)
        with fastness.open(f"dir:{tmp_path}") as plane:
            check_acknowledged_writes(plane, promises)
            for (session, kind), whole in left.items():
                if session.startswith(f"s{run}-"):
                    # Only the end may be lost: there are no gaps and no duplicates.
                    assert read_numbers(plane, session, kind) == list(range(whole))
                    logged += whole
        promised += len(promises)
        tiers |= {each.tier for each in promises}
    print(f"{kills} kills, {promised} acknowledged writes, all there, and {logged} records")
    assert promised >= kills
    assert tiers == {"critical", "important"}


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
