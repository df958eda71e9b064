"""Reads damaged files, and says what it found: `python flip_child.py WHAT DIRECTORY`.

Everything is read once before anything is damaged, then "ready" is printed. Each line on standard input is the path of
a damaged directory, and is answered with one line:

harmless    Everything reads as before, and nothing is reported.
detected    A typed error, a finding of doctor, or a count of skipped lines. What is read is as before.

Any other answer describes a failure.
"""

import hashlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

import fastness
from fastness.backends.objects import open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.cli import exit_codes
from fastness.cli.main import root
from fastness.errors import FastnessError
from fastness.kv import Pair, fence_floor, pages
from fastness.layers import lineages
from fastness.layers.worlds import World
from fastness.plane.formats import check_marker
from fastness.runtime.activity.format import LoggedRecord
from fastness.runtime.activity.log import ActivityLog
from fastness.runtime.maintenance import health_checks
from fastness.runtime.sync.blobs import BlobStore
from fastness.runtime.sync.worlds import WorldStore
from fastness.wire.health_checks import Finding

Examine = Callable[[Path], str]
TYPED = set(exit_codes.MEANINGS) - {0, 1, 2}


def all_pairs(path: Path) -> list[Pair]:
    with RocksDatabase(path) as database:
        return database.read(
            lambda tx: [pair for page in pages(tx, b"", b"\xff") for pair in page if pair[0] != fence_floor.KEY]
        )


def key_space(directory: Path) -> Examine:
    copy = Path(shutil.copytree(directory, directory.with_name("first")))
    expected = all_pairs(copy)
    shutil.rmtree(copy)

    def examine(path: Path) -> str:
        try:
            pairs = all_pairs(path)
        except FastnessError as error:
            return f"detected {error.code}"
        return "harmless" if pairs == expected else f"silent: {len(pairs)} of {len(expected)} pairs"

    return examine


def read_and_check(
    read: Callable[[], Any], checks: Callable[[], Iterator[int | Finding]], expected: Any = None
) -> Examine:
    """Both reading and doctor must report damage."""
    expected = expected or read()

    def examine(_: Path) -> str:
        has_finding = any(isinstance(found, Finding) for found in checks())
        try:
            is_same = read() == expected
        except FastnessError as error:
            return f"detected {error.code}" if has_finding else f"silent in doctor: {error!r}"
        if not is_same:
            return f"silent: another value was read (doctor has a finding: {has_finding})"
        return "detected" if has_finding else "harmless"

    return examine


def blob(directory: Path) -> Examine:
    database, objects = RocksDatabase(directory / "kv"), open_objects(f"dir:{directory / 'objects'}")
    [path] = (directory / "objects" / "cas").rglob("*.*")
    store, hash = BlobStore(database, objects), path.name.partition(".")[0]
    return read_and_check(
        lambda: store.get("main", hash).data, lambda: health_checks.all_blobs(database, objects, deep=True)
    )


def segment(directory: Path) -> Examine:
    database, objects = RocksDatabase(directory / "kv"), open_objects(f"dir:{directory / 'objects'}")
    store = WorldStore(database, objects, BlobStore(database, objects))
    return read_and_check(
        lambda: store.read(World("main", "ada"), 0, 10_000).records,
        lambda: health_checks.all_worlds(database, objects),
    )


class LogReader:
    """Reads session logs, and says whether what is missing is counted."""

    def __init__(self, directory: Path) -> None:
        self.expected, _, findings = self.read(directory)
        assert self.expected
        assert not findings

    def read(self, directory: Path) -> tuple[list[Any], int, list[str]]:
        """The records and the files of an open plane, how many lines it skipped, and doctor's findings."""
        folder = directory / "activity"
        objects = open_objects(f"dir:{directory / 'objects'}")
        findings = list(health_checks.all_session_logs(objects, folder, deep=True))
        log = ActivityLog(folder, None if any(folder.rglob("*.jsonl")) else objects, start_flusher=False)
        records: list[LoggedRecord] = log.read("main")
        stats = log.stats()
        read = [(each.session, each.kind, each.at_ms, each.record, each.position.n) for each in records]
        return read, stats.skipped + stats.damaged, [each.what for each in findings if isinstance(each, Finding)]

    def judge(self, directory: Path) -> str:
        records, skipped, findings = self.read(directory)
        if any(record not in self.expected for record in records):
            return f"silent: a changed record was read (findings: {findings})"
        is_same = records == self.expected
        if not is_same and not skipped:
            return f"silent when read: {len(records)} of {len(self.expected)} records"
        if not is_same and not findings:
            return f"silent in doctor: {len(records)} of {len(self.expected)} records"
        return "detected" if findings or skipped else "harmless"


def rotated_log(directory: Path) -> Examine:
    shutil.rmtree(directory / "activity")
    return LogReader(directory).judge


def open_log(directory: Path) -> Examine:
    """Also after the damaged file was rotated into the object store, as the next process does."""
    shutil.rmtree(directory / "objects")
    reader = LogReader(directory)

    def examine(path: Path) -> str:
        before = reader.judge(path)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            copy = Path(folder)
            shutil.copytree(path / "activity", copy / "activity")
            log = ActivityLog(copy / "activity", open_objects(f"dir:{copy / 'objects'}"), start_flusher=False)
            log.flush()
            log.close()
            after = reader.judge(copy)
        return before if before.partition(" ")[0] == after.partition(" ")[0] else f"{before}, but rotated {after}"

    return examine


def marker(directory: Path) -> Examine:
    def examine(path: Path) -> str:
        codes = []
        checks: list[Callable[[], object]] = [lambda: check_marker(path), lambda: fastness.open(f"dir:{path}").close()]
        for check in checks:
            try:
                check()
            except FastnessError as error:
                codes.append(error.code)
        return f"detected {codes}" if len(codes) == 2 else f"silent: {codes}"

    return examine


def backup(directory: Path) -> Examine:
    """Restores it."""
    expected = restored(directory)
    assert isinstance(expected, dict)

    def examine(path: Path) -> str:
        found = restored(path)
        if isinstance(found, str):
            return found
        return "harmless" if found == expected else "silent: another directory was restored"

    return examine


def restored(directory: Path) -> dict[str, str] | str:
    """The hashes of all restored files and pairs, and the printed summary; or how it was refused."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        target = Path(folder) / "target"
        done = CliRunner().invoke(root, ["restore", str(directory), str(target), "--json"])
        if done.exit_code:
            return f"detected {done.exit_code}" if done.exit_code in TYPED else f"untyped: {done.output}"
        files = {
            str(file.relative_to(target)): hashlib.sha256(file.read_bytes()).hexdigest()
            for part in ("objects", "activity")
            for file in (target / part).rglob("*")
            if file.is_file()
        }
        summary = msgspec.json.decode(done.output)
        del summary["path"], summary["lineage"]  # Each restore has a new lineage.
        pairs = [pair for pair in all_pairs(target / "kv") if pair[0] not in (lineages.KEY, fence_floor.KEY)]
        return {**files, "pairs": repr(pairs), "summary": repr(summary)}


def doctor(directory: Path) -> Examine:
    """Any content at all: `open`, `doctor` and `doctor --salvage` end, with a typed error or an undamaged plane."""
    expected = stored(directory)

    def run(path: Path, *words: str) -> int:
        done = CliRunner().invoke(root, ["--url", f"dir:{path}", *words])
        if (done.exit_code and done.exit_code not in TYPED) or "Traceback" in done.output:
            raise AssertionError(f"{words} ended with {done.exit_code}: {done.output[-500:]}")
        return done.exit_code

    def examine(path: Path) -> str:
        salvaged = path.with_name("salvaged")
        shutil.rmtree(salvaged, ignore_errors=True)
        # Salvage comes first: it does not change the directory.
        codes = [run(path, "doctor", "--salvage", str(salvaged)), run(path, "doctor", "--deep")]
        if codes[1] == 0 and stored(path) != expected:
            return "silent: doctor did not find what is missing"
        if salvaged.exists():
            codes.append(run(salvaged, "doctor", "--deep"))
        try:
            with fastness.open(f"dir:{path}") as plane:
                plane.activity.read(limit=10)
                plane.world("ada").read()
        except FastnessError as error:
            return f"detected {error.code} {codes}"
        return f"{'detected' if codes[1] else 'harmless'} {codes}"

    return examine


def stored(directory: Path) -> dict[str, bytes | list[Pair]]:
    """All pairs and objects of a data directory. An open session log may lose what a crash leaves incomplete."""
    copy = Path(shutil.copytree(directory, directory.with_name("stored")))
    try:
        files = {
            str(file.relative_to(copy)): file.read_bytes() for file in (copy / "objects").rglob("*") if file.is_file()
        }
        return {**files, "pairs": all_pairs(copy / "kv")}
    finally:
        shutil.rmtree(copy)


def main() -> None:
    logging.disable()
    kinds: dict[str, Callable[[Path], Examine]] = {
        each.__name__: each for each in (key_space, blob, segment, rotated_log, open_log, marker, backup, doctor)
    }
    examine = kinds[sys.argv[1]](Path(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            answer = examine(Path(line.strip()))
        except Exception as error:
            answer = f"untyped {error!r}"
        print(" ".join(answer.split()), flush=True)


main()
