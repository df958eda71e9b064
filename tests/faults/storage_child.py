"""A process whose file operations the storage recorder records, or lets fail.

    storage_child.py write FOLDER MARKS            commits, with a mark for each acknowledgement
    storage_child.py fail FOLDER CALL:ERRNO:TIMES…  one short run for each of them, in a process of its own

A run of `write` opens, fills tables, closes and opens again, so that logs, tables, MANIFEST and CURRENT all change.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastness.backends.rocksdb import RocksDatabase, RocksReader
from fastness.errors import FastnessError
from fastness.kv import Database, Transaction
from fastness.tiers import Tier

PARTS = 3
DEADLINE_SECONDS = 60
RECORDER = ctypes.CDLL(None)


def value_of(number: int, part: int) -> bytes:
    """Mostly short; some values span several sectors, and a few several blocks of the log."""
    size = 40_000 if number % 40 == 17 else 1_500 if number % 3 == 2 else 200
    return (b"%06d %d|" % (number, part)) * (size // 9)


def write(tx: Transaction, number: int) -> None:
    for part in range(PARTS):
        tx.put(b"%06d %d" % (number, part), value_of(number, part))


def stored_numbers(database: Database) -> list[int]:
    """The numbers of all stored commits; asserts that each is whole."""
    pairs = dict(database.read(lambda tx: tx.scan(b"0", b"1", limit=10_000)))
    numbers = sorted({int(key[:6]) for key in pairs})
    expected = {b"%06d %d" % (number, part): value_of(number, part) for number in numbers for part in range(PARTS)}
    assert pairs == expected, "a commit is stored in part, or with another value"
    return numbers


def record(folder: Path, marks_path: Path) -> None:
    marks = os.open(marks_path, os.O_WRONLY | os.O_CREAT, 0o600)
    number = 0
    for commits in (45, 30):
        with RocksDatabase(folder / "data" / "kv") as database:
            for _ in range(commits):
                rarely = 15 if number > 45 else 4  # Long unsynced parts of the log, and many acknowledgements.
                tier = Tier.CRITICAL if number % rarely == 0 else Tier.IMPORTANT
                database.transact(write, number, tier=tier)
                os.write(marks, b"%d %s" % (number, tier.value.encode()))
                number += 1
                if number == 25:
                    database.flush_tables()
        os.write(marks, b"%d closed" % (number - 1))


@contextmanager
def noted(errors: list[str]) -> Iterator[None]:
    """Note an error's code, or that it has none, and continue."""
    try:
        yield
    except FastnessError as error:
        errors.append(error.code)
    except BaseException as error:
        errors.append(f"untyped {type(error).__name__}: {error}")


def run_with_failure(folder: Path, call: int, error: int, times: int) -> dict[str, object]:
    """Write and read a few commits while a call fails, open again without failures, and report what was found.

    A database that failed is reopened, or closed while calls still fail and then opened again.
    """
    acknowledged: list[int] = []
    errors: list[str] = []
    reopens = times == 1 or call % 2 == 0
    failed: RocksDatabase | None = None
    RECORDER.storage_fail(ctypes.c_long(call), error, ctypes.c_long(times))
    for commits in (range(4), range(4, 8)):
        with noted(errors):
            database = RocksDatabase(folder / "data" / "kv")
            with noted(errors):
                for number in commits:
                    database.transact(write, number)
                    acknowledged.append(number)
                if commits.start == 0:
                    database.flush_tables()
            if errors and reopens:
                failed = database
                with noted(errors):
                    database.reopen()
            else:
                database.close()
        if errors:
            break
    else:
        with noted(errors), RocksReader(folder / "data" / "kv") as reader:
            assert set(acknowledged) <= set(stored_numbers(reader)), "a reader misses acknowledged writes"
    made = RECORDER.storage_calls()
    RECORDER.storage_fail(ctypes.c_long(-1), 0, ctypes.c_long(0))
    if failed is not None:
        failed.reopen()
        assert set(acknowledged) <= set(stored_numbers(failed)), "reopening lost acknowledged writes"
        failed.transact(write, 8)
        acknowledged.append(8)
        failed.close()
    with RocksDatabase(folder / "data" / "kv") as database:
        stored = stored_numbers(database)
        database.transact(write, 9)
    outcome = {"acknowledged": acknowledged, "errors": errors, "stored": stored, "calls": made}
    return {**outcome, "reopened": failed is not None}


def fail(folder: Path, choices: list[str]) -> None:
    for index, choice in enumerate(choices):
        call, error, times = map(int, choice.split(":"))
        child = os.fork()  # There are no threads yet.
        if child == 0:
            signal.alarm(DEADLINE_SECONDS)
            with suppress(BaseException):
                own = folder / str(index)
                own.mkdir()
                tempfile.tempdir = str(own)  # Readers have files there.
                try:
                    report: dict[str, object] = run_with_failure(own, call, error, times)
                except BaseException as raised:
                    report = {"broken": f"{type(raised).__name__}: {raised}"}
                os.write(1, json.dumps({"choice": choice, **report}).encode() + b"\n")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        shutil.rmtree(folder / str(index), ignore_errors=True)
        if status:
            report = {"choice": choice, "broken": f"ended with {os.waitstatus_to_exitcode(status)}"}
            os.write(1, json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        record(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        fail(Path(sys.argv[2]), sys.argv[3:])
