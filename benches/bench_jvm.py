"""Flags of Spark's Java: the processor time of a start, of a small roll-up, and of a large one in the same session.

    python -m benches.bench_jvm                                 a million events, three rounds
    python -m benches.bench_jvm --messages 1000 --rounds 1      a smoke test

Each round starts one process for each set of flags. Processor time is that of the Java process, so it can be compared
on a busy machine; elapsed time cannot.
"""

import argparse
import json
import os
import random
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from benches.comparison import echo
from fastness.pipeline import sessions
from fastness.pipeline.config import Config
from fastness.pipeline.jobs import ingest, rollup
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Header

ROOT: Final = Path(__file__).parent.parent
FLAGS: Final = {
    "C1, SerialGC": ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
    "C1 and C2, SerialGC": ("-XX:+UseSerialGC",),
    "C1 and C2, ParallelGC": ("-XX:+UseParallelGC",),
}
MESSAGES: Final = {"small": 300, "large": 333_333}  # Each has three events.
FILES: Final = 10
TICKS: Final = os.sysconf("SC_CLK_TCK")


def main(messages: int, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in FLAGS}
    with tempfile.TemporaryDirectory(prefix="fastness-bench-") as folder:
        for name, count in {**MESSAGES, "large": messages}.items():
            build(Path(folder) / name, count)
        for number in range(rounds):
            for name in list(FLAGS)[number % len(FLAGS) :] + list(FLAGS)[: number % len(FLAGS)]:
                command = [sys.executable, "-m", "benches.bench_jvm", "--measure", name, "--folder", folder]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    columns = list(found[next(iter(FLAGS))][0])
    table = Table("flags", *columns, title=f"Median of {rounds}; load average {os.getloadavg()[0]:.0f}")
    for name, runs in found.items():
        table.add_row(name, *(f"{statistics.median(run[column] for run in runs):.1f}" for column in columns))
    echo(table)


def build(folder: Path, messages: int) -> None:
    """Make a lake with the session logs of these messages."""
    planes = runpy.run_path(str(ROOT / "tests" / "pipeline" / "planes.py"))
    planes["build"](folder / "data", worlds=1, entries=10)
    dice, at_ms = random.Random(1), planes["START_MS"]
    for number in range(FILES):
        header = Header("main", f"node-{number}", "queues", at_ms, str(uuid.uuid4()))
        lines = [log_format.header_line(header)]
        for message in range(messages // FILES):
            at_ms += 2
            id = str(uuid.UUID(int=at_ms << 80 | 7 << 76 | dice.getrandbits(64)))
            for attempt, name in enumerate(("put", "leased", "acked")):
                record = {"event": name, "queue": f"q-{message % 20}", "id": id, "correlation_id": id}
                record |= {"at_ms": at_ms + attempt * dice.randrange(1, 5_000), "attempt": min(attempt, 1)}
                lines.append(log_format.line(len(lines) - 1, at_ms, msgspec.json.encode(record)))
        file = folder / "data" / "activity" / "main" / log_format.file_name(header)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(lines))
    ingest.run(None, _config(folder))


def measure(name: str, folder: Path) -> None:
    """Print the processor time of Java with these flags as JSON."""
    sessions._JVM = FLAGS[name]  # type: ignore[misc]
    started = time.monotonic()
    spark = sessions.start()
    pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    figures = {"start s": _processor_seconds(pid)}
    for size in MESSAGES:
        with tempfile.TemporaryDirectory(dir=folder) as copy:
            shutil.copytree(folder / size, copy, dirs_exist_ok=True)
            before = _processor_seconds(pid)
            rollup.run(spark, _config(Path(copy)))
            figures[f"{size} s"] = _processor_seconds(pid) - before
    memory = Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]
    print(json.dumps({**figures, "memory MiB": int(memory) / 1_024, "elapsed s": time.monotonic() - started}))
    spark.stop()


def _config(folder: Path) -> Config:
    return Config(data=f"dir:{folder / 'data'}", lake=str(folder / "lake"))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=MESSAGES["large"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=FLAGS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        measure(given.measure, given.folder)
    else:
        main(given.messages, given.rounds)
