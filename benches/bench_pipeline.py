"""The pipeline: the rate of every job, Spark against one plain process with the same code, and memory.

    make bench-pipeline                                       everything, about a quarter of an hour on two idle cores
    python -m benches.bench_pipeline --scale 0.02 --no-memory   a smoke test
    python -m benches.bench_pipeline --only rollup              one part
    python -m benches.bench_pipeline --only idle                another, which takes some minutes

The plane has 200 worlds with 200,000 journal records in segments and hot tails, and 100,000 messages. "Fold" reads
every chunk, verifies its checksum, decodes each record, converts it to a row and folds it into the state of its world.
"Plain" is a loop over the same chunks in one process. Memory is the peak resident size of each process during a run
with 200,000 and 2,000,000 records; workers share pages, so only the largest one is reported. "Roll-up" brings the
tables of 100,000 messages up to date with one percent of new events: once from all events, once from the new ones.
"Idle" is an ingest without Spark, in a process of its own, of a plane with 10,000 worlds and 100,000 rotated session
logs of which nothing is new.
"""

import argparse
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from obstore.store import LocalStore
from rich.table import Table

import fastness
from benches.comparison import compare, echo
from fastness.backends.objects import ObjectStore
from fastness.pipeline import codec, jobs, replays, sessions, tasks
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import ingest, rollup
from fastness.pipeline.journal_chunks import JournalChunk, Stores
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import ACTIVITY, JOURNAL, decoded
from fastness.pipeline.views import open_view
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import rotation
from fastness.runtime.activity.format import Header

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT: Final = Path(__file__).parent.parent
WORLDS: Final = 200
ENTRIES: Final = 200_000
MESSAGES: Final = 100_000
MAILS: Final = 20_000
SEGMENT: Final = 512
ROUNDS: Final = 5
LARGE: Final = 10  # The second memory measurement has this many times the records.
POLL_SECONDS: Final = 0.05
MIB: Final = 1_048_576
IDLE_WORLDS: Final = 10_000
IDLE_LOGS: Final = 100_000


def main(scale: float = 1.0, *, memory: bool = True, only: str | None = None) -> None:
    # Lets Spark's workers import this module from any working directory.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if only == "rollup":
        with tempfile.TemporaryDirectory(prefix="fastness-bench-") as folder, started() as spark:
            new_events_against_all(spark, Path(folder), round(MESSAGES * scale))
        return
    if only == "idle":
        with tempfile.TemporaryDirectory(prefix="fastness-bench-") as folder:
            nothing_new(Path(folder), round(IDLE_WORLDS * scale), round(IDLE_LOGS * scale))
        return
    with tempfile.TemporaryDirectory(prefix="fastness-bench-") as folder:
        data = build(Path(folder) / "data", round(ENTRIES * scale), messages=round(MESSAGES * scale), scale=scale)
        with started() as spark:
            whole_run(spark, data, Path(folder))
            fold_against_plain(spark, data, Path(folder))
            histories = build(Path(folder) / "histories", round(ENTRIES * scale), messages=0, scale=scale)
            ingest_against_plain(spark, histories, Path(folder))
            new_events_against_all(spark, Path(folder), round(MESSAGES * scale))
    if memory:
        memory_of_a_run(scale)


def build(path: Path, entries: int, *, messages: int, scale: float) -> str:
    """Create a plane of the given size and return its URL."""
    planes = runpy.run_path(str(ROOT / "tests" / "pipeline" / "planes.py"))
    worlds = max(round(WORLDS * min(scale, 1.0)), 4)
    began = time.perf_counter()
    built = planes["build"](
        path,
        worlds=worlds,
        entries=entries // worlds,
        segment=SEGMENT,
        messages=messages,
        mails=round(MAILS * scale) if messages else 0,
        activity=round(1_000 * scale) if messages else 0,
    )
    seconds = time.perf_counter() - began
    echo(
        f"A plane with {worlds:,} worlds, {built.entries:,} records, {messages:,} messages, created in {seconds:.0f} s."
    )
    return str(built.url)


@contextmanager
def started() -> Iterator["SparkSession"]:
    """A Spark session whose workers are already running."""
    spark = sessions.start(app="bench")
    spark.range(100).repartition(4).mapInArrow(_same, "id long").count()
    try:
        yield spark
    finally:
        spark.stop()


def whole_run(spark: "SparkSession", data: str, folder: Path) -> None:
    """Measure the jobs of `fastness pipeline run` without Spark's start; then again, without new data."""
    config = Config(data=data, lake=str(folder / "lake"), reducer=None)
    first = list(jobs.run_all(spark, config))
    again = list(jobs.run_all(spark, config))
    table = Table(title="A complete run, and one without new data", title_justify="left", min_width=100)
    for column in ("job", "rows", "seconds", "rows/s", "again, seconds"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for result, repeated in zip(first, again, strict=True):
        counted = result.job != "report"  # Its counts are aggregates, not rows.
        table.add_row(
            result.job,
            f"{_rows(result):,}" if counted else "",
            f"{result.seconds:.1f}",
            f"{_rows(result) / result.seconds:,.0f}" if counted else "",
            f"{repeated.seconds:.1f}",
        )
    seconds = sum(result.seconds for result in first)
    table.add_row("all of them", "", f"{seconds:.1f}", "", f"{sum(result.seconds for result in again):.1f}")
    echo(table)
    for result in first:
        if not result.ok:
            echo(f"{result.job} is not ok: {result.findings[:3]} {result.notes}")


def fold_against_plain(spark: "SparkSession", data: str, folder: Path) -> None:
    """Decode, verify and fold all journals, in one plain process and on Spark with the same function."""
    with chunks_by_world(data, folder) as worlds:
        sizes = [sum(chunk.rows for chunk in chunks) for chunks in worlds]

        def candidate(spark: "SparkSession | None") -> Callable[[], int]:
            parts = tasks.balanced(sizes, tasks.parallelism(spark))
            packed = [msgspec.msgpack.encode([worlds[n] for n in part]) for part in parts]
            return lambda: sum(int(answer) for answer in tasks.execute(spark, fold, packed))

        compare(
            "Decode, verify and fold, records",
            {"one plain process": candidate(None), f"Spark, {tasks.parallelism(spark)} cores": candidate(spark)},
            rounds=ROUNDS,
        )


def ingest_against_plain(spark: "SparkSession", data: str, folder: Path) -> None:
    """Write all journals to Parquet: one plain pyarrow process, against the ingest job with its exactly-once commit."""
    numbers = iter(range(1_000))

    def plain() -> int:
        target = folder / f"plain-{next(numbers)}"
        target.mkdir()
        with chunks_by_world(data, target) as worlds:
            rows = 0
            options: dict[str, Any] = {
                "compression": "zstd",
                "use_dictionary": ["universe", "world", "kind", "segment"],
            }
            with pq.ParquetWriter(target / "journal.parquet", decoded(JOURNAL), **options) as writer:
                for chunks in worlds:
                    for batch in codec.journal_rows(chunks, Stores()):
                        assert isinstance(batch, pa.RecordBatch), batch
                        writer.write_batch(batch)
                        rows += batch.num_rows
        shutil.rmtree(target)
        return rows

    def ingest() -> int:
        target = folder / f"lake-{next(numbers)}"
        result = jobs.run("ingest", spark, Config(data=data, lake=str(target)))
        shutil.rmtree(target)
        return result.rows["journal"]

    compare(
        "Ingest, records of a plane without session logs",
        {"one plain pyarrow process": plain, "ingest on Spark": ingest},
        rounds=ROUNDS,
    )


def new_events_against_all(spark: "SparkSession", folder: Path, messages: int) -> None:
    """Roll up one percent of new events: from all events on Spark, and from the new ones only."""
    few = max(messages * 3 // 400, 1)  # So many new messages, and as many acknowledgements of open ones.
    names = ("put", "leased", "acked")
    old = [(n, event) for n in range(messages) for event in names if event != "acked" or n >= few]
    new = [(n, "acked") for n in range(few)] + [(n, event) for n in range(messages, messages + few) for event in names]
    at = datetime.now(UTC)
    kept, numbers = folder / "rolled-up", iter(range(1_000))
    _append_events(kept, old)
    sources = folder / "sources"
    shutil.copytree(kept, sources)
    rollup.Rollup(spark, Lake(str(kept))).build(at)
    for path in (kept, sources):
        _append_events(path, new)

    def candidate(path: Path) -> Callable[[], int]:
        def roll_up() -> int:
            target = folder / f"rollup-{next(numbers)}"
            shutil.copytree(path, target, copy_function=os.link)  # No file of a lake is written in place.
            rollup.Rollup(spark, Lake(str(target))).build(at)
            shutil.rmtree(target)
            return len(new)

        return roll_up

    compare(
        f"Roll-up of {len(new):,} new events after {len(old):,}",
        {"from all events": candidate(sources), "from the new events": candidate(kept)},
        rounds=ROUNDS,
    )


def _append_events(path: Path, events: Iterable[tuple[int, str]]) -> None:
    """Append a file with events of messages, each in the second of its number, to `activity`."""
    order = ("put", "leased", "acked")
    records = [
        {
            "event": event,
            "queue": f"queue-{n % 10}",
            "id": f"{n:032x}",
            "correlation_id": f"{n:032x}",
            "at_ms": n * 1_000 + 7 * order.index(event) * (n % 101),
            "attempt": 0 if event == "put" else 1,
        }
        for n, event in events
    ]
    rows = [
        {"universe": "main", "kind": "queues", "file": "log", "n": n, "record": msgspec.json.encode(record).decode()}
        for n, record in enumerate(records)
    ]
    Lake(str(path)).table(ACTIVITY).append_rows(pa.Table.from_pylist(rows, ACTIVITY.schema))


def nothing_new(folder: Path, worlds: int, logs: int) -> None:
    """Ingest a plane with many worlds and session logs; then again, with nothing new, in a new process each time."""
    with fastness.open(f"dir:{folder / 'data'}") as plane:
        for n in range(worlds):
            plane.world(f"world-{n:06}").create()
            plane.world(f"world-{n:06}").append([{"n": n}], expected_head=0, tier=fastness.Tier.IMPORTANT)
    _rotate_logs(folder, logs)
    table = Table(title=f"Ingest of {worlds:,} worlds and {logs:,} session logs", title_justify="left", min_width=100)
    for column in ("", "rows", "processor seconds", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("everything", "nothing new", "nothing new"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            rows, processor, wall = process.submit(_measured_ingest, folder).result()
        table.add_row(name, f"{rows:,}", f"{processor:.2f}", f"{wall:.2f}")
    echo(table)
    sizes = Table(title="Bytes", title_justify="left", min_width=100)
    for column in ("table", "rows", "_delta_log", "_watermarks"):
        sizes.add_column(column, justify="right" if column != "table" else "left")
    for lake_table in sorted((folder / "lake").glob("*/_delta_log")):
        parts = [lake_table.parent.glob("universe=*/*"), lake_table.glob("*"), lake_table.parent.glob("_watermarks/*")]
        sizes.add_row(lake_table.parent.name, *(f"{sum(path.stat().st_size for path in part):,}" for part in parts))
    echo(sizes)


def _rotate_logs(folder: Path, logs: int) -> None:
    """Store session logs of one line each in the object store of a plane."""
    store = ObjectStore(LocalStore(folder / "data" / "objects", mkdir=True))
    (folder / "main").mkdir()
    for n in range(logs):
        header = Header("main", f"session-{n % 1_000}", "metrics", 1_700_000_000_000 + n * 1_000, str(uuid.UUID(int=n)))
        file = folder / "main" / log_format.file_name(header)
        file.write_bytes(log_format.header_line(header) + log_format.line(0, header.opened_ms, b'{"step":%d}' % n))
        rotation.copy(file, store)
        file.unlink()


def _measured_ingest(folder: Path) -> tuple[int, float, float]:
    """The rows of an ingest without Spark, and its processor and wall seconds."""
    config = Config(data=f"dir:{folder / 'data'}", lake=str(folder / "lake"))
    pa.array([])  # Imports pandas, once in a process.
    processor, wall = time.process_time(), time.perf_counter()
    result = ingest.run(None, config)
    return _rows(result), time.process_time() - processor, time.perf_counter() - wall


def memory_of_a_run(scale: float) -> None:
    """The peak memory of a complete run in a separate process, at one size and at ten times that size."""
    table = Table(title="Peak resident memory, MiB", title_justify="left", min_width=100)
    for column in ("records", "driver", "Java", "largest worker"):
        table.add_column(column, justify="right")
    for times in (1, LARGE):
        with tempfile.TemporaryDirectory(prefix="fastness-bench-") as folder:
            entries = round(ENTRIES * scale) * times
            data = build(Path(folder) / "data", entries, messages=round(MESSAGES * scale), scale=scale)
            command = [sys.executable, "-m", "fastness.cli", "pipeline", "run", "--data", data]
            with subprocess.Popen([*command, "--lake", f"{folder}/lake", "--json"], stdout=subprocess.DEVNULL) as run:
                peaks = Peaks(run.pid)
                peaks.watch(run)
            if run.returncode != 0:
                echo(f"The run ended with {run.returncode}.")
            table.add_row(f"{entries:,}", *(f"{peaks.of[role] / MIB:,.0f}" for role in ("driver", "java", "worker")))
    echo(table)


class Peaks:
    """Peak resident bytes of a process and its descendants, by role."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.of = {"driver": 0, "java": 0, "worker": 0}

    def watch(self, run: "subprocess.Popen[bytes]") -> None:
        """Poll until the process has ended."""
        ended = threading.Event()
        poller = threading.Thread(target=self._poll, args=(ended,))
        poller.start()
        run.wait()
        ended.set()
        poller.join()

    def _poll(self, ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
            family = {self._root}
            while grown := {pid for pid, parent in parents.items() if parent in family} - family:
                family |= grown
            for pid in family:
                name, peak = _name_and_peak(pid)
                role = "driver" if pid == self._root else "java" if name == "java" else "worker"
                self.of[role] = max(self.of[role], peak)


def fold(task: bytes) -> bytes:
    """Read, verify, decode and fold the chunks of some worlds, and return the number of records."""
    open_store, rows, count = Stores(), codec.Rows(), 0
    for chunks in msgspec.msgpack.decode(task, type=list[list[JournalChunk]]):
        state: Any = None
        for chunk in chunks:
            records = codec.read_chunk(chunk, open_store(chunk.store))
            for batch in rows.add(chunk, records, chunk.start):
                assert isinstance(batch, pa.RecordBatch), batch
                count += batch.num_rows
            state = replays.replay(records, replays.chain, state, height=chunk.start)
        replays.digest(state)
    count += sum(batch.num_rows for batch in rows.flush())
    return b"%d" % count


@contextmanager
def chunks_by_world(data: str, folder: Path) -> Iterator[list[list[JournalChunk]]]:
    """The chunks of every world of a plane, while its view is open."""
    staging = f"dir:{folder / 'staging'}"
    with open_view(Config(data=data, lake=str(folder))) as view:
        worlds = [view.chunks(world, 0, staging) for universe in view.universes() for world in view.worlds(universe)]
        yield [chunks for chunks in worlds if chunks]


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def _rows(result: JobResult) -> int:
    return sum(result.rows.values())


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _name_and_peak(pid: int) -> tuple[str, int]:
    """A process's name and peak resident bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "", 0
    fields = dict(line.split(":", 1) for line in lines)
    return fields["Name"].strip(), int(fields.get("VmHWM", "0 kB").split()[0]) * 1_024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="the size of the plane, relative to the full one")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    parser.add_argument("--only", choices=("idle", "rollup"), help="run one part")
    options = parser.parse_args()
    main(options.scale, memory=not options.no_memory, only=options.only)
