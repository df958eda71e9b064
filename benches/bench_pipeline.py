"""The pipeline: rows a second of every job, Spark against one plain process of the same code, and memory.

    make bench-pipeline                                       everything, about a quarter of an hour on two idle cores
    python -m benches.bench_pipeline --scale 0.02 --no-memory a try

The plane has 200 worlds with 200,000 journal records in segments and hot tails, and 100,000 messages. "Fold" reads
every piece, checks its checksum, decodes each record, makes a row of it and folds it into the state of its world.
"Plain" is a loop over the same pieces in one process. Memory is the peak of resident bytes of each process while a run
takes 200,000 and 2,000,000 records; workers share pages with each other, so they are counted by the largest.
"""

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from benches.contest import race, say
from holdfast.pipeline import codec, jobs, replays, sessions, tasks
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.journal_chunks import Piece, Stores
from holdfast.pipeline.schemas import JOURNAL
from holdfast.pipeline.views import open_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT: Final = Path(__file__).parent.parent
WORLDS: Final = 200
ENTRIES: Final = 200_000
MESSAGES: Final = 100_000
MAILS: Final = 20_000
SEGMENT: Final = 512
ROUNDS: Final = 5
LARGE: Final = 10  # How many times as many records the second measurement of memory has.
LOOK_SECONDS: Final = 0.05
MIB: Final = 1_048_576


def main(scale: float = 1.0, *, memory: bool = True) -> None:
    # Workers find this module by it, whatever folder the bench is run from.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        data = build(Path(folder) / "data", round(ENTRIES * scale), messages=round(MESSAGES * scale), scale=scale)
        with started() as spark:
            whole_run(spark, data, Path(folder))
            fold_against_plain(spark, data, Path(folder))
            histories = build(Path(folder) / "histories", round(ENTRIES * scale), messages=0, scale=scale)
            ingest_against_plain(spark, histories, Path(folder))
    if memory:
        memory_of_a_run(scale)


def build(path: Path, entries: int, *, messages: int, scale: float) -> str:
    """A plane of that size; its URL."""
    planes = runpy.run_path(str(ROOT / "tests" / "pipeline" / "planes.py"))
    worlds = max(round(WORLDS * min(scale, 1.0)), 4)
    begun = time.perf_counter()
    built = planes["build"](
        path,
        worlds=worlds,
        entries=entries // worlds,
        segment=SEGMENT,
        messages=messages,
        mails=round(MAILS * scale) if messages else 0,
        activity=round(1_000 * scale) if messages else 0,
    )
    seconds = time.perf_counter() - begun
    say(f"A plane with {worlds:,} worlds, {built.entries:,} records, {messages:,} messages, made in {seconds:.0f} s.")
    return str(built.url)


@contextmanager
def started() -> Iterator["SparkSession"]:
    """A Spark of our own whose workers have been started."""
    spark = sessions.start(app="bench")
    spark.range(100).repartition(4).mapInArrow(_same, "id long").count()
    try:
        yield spark
    finally:
        spark.stop()


def whole_run(spark: "SparkSession", data: str, folder: Path) -> None:
    """What `holdfast pipeline run` takes, once its Spark has started; then again, with nothing new."""
    config = Config(data=data, lake=str(folder / "lake"), reducer=None)
    first = list(jobs.run_whole(spark, config))
    again = list(jobs.run_whole(spark, config))
    table = Table(title="A whole run, and one with nothing new", title_justify="left", min_width=100)
    for column in ("job", "rows", "seconds", "rows/s", "again, seconds"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for told, later in zip(first, again, strict=True):
        counted = told.job != "report"  # What it tells of are sums, not rows.
        table.add_row(
            told.job,
            f"{_rows(told):,}" if counted else "",
            f"{told.seconds:.1f}",
            f"{_rows(told) / told.seconds:,.0f}" if counted else "",
            f"{later.seconds:.1f}",
        )
    seconds = sum(told.seconds for told in first)
    table.add_row("all of them", "", f"{seconds:.1f}", "", f"{sum(told.seconds for told in again):.1f}")
    say(table)
    for told in first:
        if not told.ok:
            say(f"{told.job} is not ok: {told.findings[:3]} {told.notes}")


def fold_against_plain(spark: "SparkSession", data: str, folder: Path) -> None:
    """Decode, verify and fold all journals: one plain process, and Spark on all cores with the same function."""
    with pieces_of(data, folder) as worlds:
        sizes = [sum(piece.rows for piece in pieces) for pieces in worlds]

        def contestant(spark: "SparkSession | None") -> Callable[[], int]:
            parts = tasks.balanced(sizes, tasks.parallelism(spark))
            packed = [msgspec.msgpack.encode([worlds[n] for n in part]) for part in parts]
            return lambda: sum(int(answer) for answer in tasks.answers(spark, fold, packed))

        race(
            "Decode, verify and fold, records (goal: Spark on two cores at 140 %)",
            {"one plain process": contestant(None), f"Spark, {tasks.parallelism(spark)} cores": contestant(spark)},
            rounds=ROUNDS,
        )


def ingest_against_plain(spark: "SparkSession", data: str, folder: Path) -> None:
    """All journals into Parquet: one process with pyarrow and nothing else, against the job with its exactly-once."""
    numbers = iter(range(1_000))

    def plain() -> int:
        place = folder / f"plain-{next(numbers)}"
        place.mkdir()
        with pieces_of(data, place) as worlds:
            rows = 0
            how: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["universe", "world", "kind", "segment"]}
            with pq.ParquetWriter(place / "journal.parquet", JOURNAL.schema, **how) as writer:
                for pieces in worlds:
                    for batch in codec.journal_rows(pieces, Stores()):
                        assert isinstance(batch, pa.RecordBatch), batch
                        writer.write_batch(batch)
                        rows += batch.num_rows
        shutil.rmtree(place)
        return rows

    def ingest() -> int:
        place = folder / f"lake-{next(numbers)}"
        told = jobs.run("ingest", spark, Config(data=data, lake=str(place)))
        shutil.rmtree(place)
        return told.rows["journal"]

    race(
        "Ingest, records of a plane without session logs (goal: the job at 100 %)",
        {"one plain pyarrow process": plain, "ingest on Spark": ingest},
        rounds=ROUNDS,
    )


def memory_of_a_run(scale: float) -> None:
    """Peaks of a whole run in a process of its own, at a size and at ten times that size."""
    table = Table(title="Peak of resident memory, MiB (goal: flat)", title_justify="left", min_width=100)
    for column in ("records", "driver", "Java", "largest worker"):
        table.add_column(column, justify="right")
    for times in (1, LARGE):
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            entries = round(ENTRIES * scale) * times
            data = build(Path(folder) / "data", entries, messages=round(MESSAGES * scale), scale=scale)
            command = [sys.executable, "-m", "holdfast.cli", "pipeline", "run", "--data", data]
            with subprocess.Popen([*command, "--lake", f"{folder}/lake", "--json"], stdout=subprocess.DEVNULL) as run:
                peaks = Peaks(run.pid)
                peaks.watch(run)
            if run.returncode != 0:
                say(f"The run ended with {run.returncode}.")
            table.add_row(f"{entries:,}", *(f"{peaks.of[role] / MIB:,.0f}" for role in ("driver", "java", "worker")))
    say(table)


class Peaks:
    """The peaks of a process and of all below it, by what they are."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.of = {"driver": 0, "java": 0, "worker": 0}

    def watch(self, run: "subprocess.Popen[bytes]") -> None:
        """Look again and again, until it has ended."""
        over = threading.Event()
        looker = threading.Thread(target=self._look, args=(over,))
        looker.start()
        run.wait()
        over.set()
        looker.join()

    def _look(self, over: threading.Event) -> None:
        while not over.wait(LOOK_SECONDS):
            parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
            family = {self._root}
            while grown := {pid for pid, parent in parents.items() if parent in family} - family:
                family |= grown
            for pid in family:
                name, peak = _name_and_peak(pid)
                role = "driver" if pid == self._root else "java" if name == "java" else "worker"
                self.of[role] = max(self.of[role], peak)


def fold(task: bytes) -> bytes:
    """Read, check, decode and fold the pieces of some worlds; how many records that were."""
    open_store, gathered, count = Stores(), codec.Rows(), 0
    for pieces in msgspec.msgpack.decode(task, type=list[list[Piece]]):
        state: Any = None
        for piece in pieces:
            records = codec.read_piece(piece, open_store(piece.store))
            for batch in gathered.add(piece, records, piece.start):
                assert isinstance(batch, pa.RecordBatch), batch
                count += batch.num_rows
            state = replays.replay(records, replays.chain, state, height=piece.start)
        replays.digest(state)
    count += sum(batch.num_rows for batch in gathered.rest())
    return b"%d" % count


@contextmanager
def pieces_of(data: str, folder: Path) -> Iterator[list[list[Piece]]]:
    """The pieces of every world of a plane, as long as its view is open."""
    staging = f"dir:{folder / 'staging'}"
    with open_view(Config(data=data, lake=str(folder))) as view:
        found = [view.pieces(world, 0, staging) for universe in view.universes() for world in view.worlds(universe)]
        yield [pieces for pieces in found if pieces]


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def _rows(told: JobResult) -> int:
    return sum(told.rows.values())


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _name_and_peak(pid: int) -> tuple[str, int]:
    """A process' name, and the most resident bytes that it ever had."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "", 0
    fields = dict(line.split(":", 1) for line in lines)
    return fields["Name"].strip(), int(fields.get("VmHWM", "0 kB").split()[0]) * 1_024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="how large the plane is, against the real one")
    parser.add_argument("--no-memory", action="store_true", help="leave the measurement of memory out")
    options = parser.parse_args()
    main(options.scale, memory=not options.no_memory)
