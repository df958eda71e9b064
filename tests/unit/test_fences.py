"""No fence is issued twice, of any kind: also after a restore, a salvage, a migration, a kill, and in a copy."""

import ast
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import Result

import fastness
from fastness import limits
from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres import PostgresDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy
from fastness.kv import Database, Transaction, fence_floor
from fastness.layers import lineages
from fastness.testing.clock import ManualClock
from tests.support.fences import Issued, lease
from tests.support.restores import START_MS, back_up, restore

Cli = Callable[..., Result]
SOURCE = Path(fastness.__file__).parent
ISSUER = "next_fence"


@pytest.fixture
def issued() -> Issued:
    return Issued()


@pytest.fixture
def data(cli: Cli, tmp_path: Path, issued: Issued) -> Path:
    """A closed plane that has issued fences of every kind."""
    cli("queue", "put", "others", "1")
    issue(tmp_path / "data", issued)
    return tmp_path / "data"


def issue(folder: Path, issued: Issued) -> None:
    with RocksDatabase(folder / "kv") as database:
        issued.more(database)


def issue_after_a_kill(folder: Path, issued: Issued) -> None:
    """The floor is raised by the open that follows a killed process."""
    if (child := os.fork()) == 0:
        database = RocksDatabase(folder / "kv")
        database.transact(Transaction.put, b"b", b"2")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    issue(folder, issued)


# The source.


def issuing_functions() -> set[tuple[str, str]]:
    """The file and the name of every function of the source that issues fences."""
    return {
        (str(path.relative_to(SOURCE)), function.name)
        for path in sorted(SOURCE.rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == ISSUER
    }


def is_fence(node: ast.AST) -> bool:
    """Whether an expression is a fence: a name, the highest of several, or one that is calculated from another."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "fence_floor" or name.rpartition("_")[2] in ("fence", "fences")
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() | ast.LShift() | ast.BitOr(), right=right):
            is_key = isinstance(right, ast.Constant) and isinstance(right.value, bytes)
            return not is_key and (is_fence(left) or is_fence(right))
        case ast.IfExp(body=one, orelse=other):
            return is_fence(one) or is_fence(other)
        case ast.Call(func=ast.Name(id="max" | "min"), args=args):
            return any(map(is_fence, args))
    return False


def calculated_fences(path: Path) -> Iterator[str]:
    """The expressions of a file that calculate with a fence."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_calculated = isinstance(node, ast.BinOp) and is_fence(node)
        if is_calculated or (isinstance(node, ast.AugAssign) and is_fence(node.target)):
            yield f"{path.relative_to(SOURCE)}: {ast.unparse(node)}"


def test_every_place_that_issues_fences_has_a_kind(monkeypatch: pytest.MonkeyPatch, issued: Issued) -> None:
    """A new one is covered by the tests below once it has a function in `KINDS`."""
    called: set[tuple[str, str]] = set()
    next_fence = fence_floor.next_fence

    def recorded(tx: Transaction, *last: int) -> int:
        caller = sys._getframe(1).f_code
        called.add((str(Path(caller.co_filename).relative_to(SOURCE)), caller.co_name))
        return next_fence(tx, *last)

    monkeypatch.setattr(fence_floor, ISSUER, recorded)
    with MemoryDatabase() as database:
        issued.more(database)
    assert called == issuing_functions()


def test_fences_are_calculated_in_one_place() -> None:
    """The simulator's scenarios have models of their own."""
    others = {SOURCE / "kv" / "fence_floor.py", *(SOURCE / "testing").rglob("*.py")}
    found = [line for path in sorted(SOURCE.rglob("*.py")) if path not in others for line in calculated_fences(path)]
    assert found == []


# What the data forgets.


def test_fences_grow_on_every_backend(database: Database, issued: Issued) -> None:
    issued.more(database)


def test_a_restore_issues_no_fence_again(cli: Cli, data: Path, tmp_path: Path, issued: Issued) -> None:
    """The original went on after the backup, was killed several times, and is restored from the same backup twice."""
    cli("backup", str(tmp_path / "backup"))
    for _ in range(3):
        issue_after_a_kill(data, issued)
    for name in ("first", "second"):
        cli("restore", str(tmp_path / "backup"), str(tmp_path / name))
        issue(tmp_path / name, issued)


def test_a_copy_that_is_marked_issues_no_fence_again(cli: Cli, data: Path, tmp_path: Path, issued: Issued) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    for _ in range(3):
        issue_after_a_kill(data, issued)
    cli("--url", f"dir:{copy}", "mark-restored")
    issue(copy, issued)


def test_a_salvage_of_an_older_copy_issues_no_fence_again(cli: Cli, data: Path, tmp_path: Path, issued: Issued) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    for _ in range(3):
        issue_after_a_kill(data, issued)
    cli("--url", f"dir:{copy}", "doctor", "--salvage", str(tmp_path / "salvaged"))
    issue(tmp_path / "salvaged", issued)


@pytest.mark.parametrize("change", ["copied", "checkpoint"])
def test_a_copy_of_a_closed_directory_issues_no_fence_again(
    data: Path, tmp_path: Path, issued: Issued, change: str
) -> None:
    """Opening it shows that it is a copy."""
    copy = tmp_path / "copy" / "kv"
    if change == "copied":
        shutil.copytree(data / "kv", copy)
    else:
        with RocksDatabase(data / "kv") as database:
            database.checkpoint(copy)
    for _ in range(3):
        issue_after_a_kill(data, issued)
    issue(tmp_path / "copy", issued)


def test_a_migration_issues_no_fence_again(
    cli: Cli, data: Path, postgres_url: str, tmp_path: Path, issued: Issued
) -> None:
    """To PostgreSQL and back, from a copy of the source and while its original goes on."""
    copy, objects = shutil.copytree(data, tmp_path / "copy"), f"dir:{tmp_path / 'objects'}"
    for _ in range(3):
        issue_after_a_kill(data, issued)
    cli("migrate", f"dir:{copy}", postgres_url, "--objects", objects)
    with PostgresDatabase(postgres_url) as database:
        issued.more(database)
    cli("migrate", postgres_url, f"dir:{tmp_path / 'back'}", "--objects", objects)
    issue(tmp_path / "back", issued)


def test_older_data_in_memory_issues_no_fence_again(issued: Issued) -> None:
    clock = ManualClock(START_MS)
    with MemoryDatabase(clock=clock) as database:
        backup = back_up(database, "main")
        for _ in range(3):
            issued.more(database)
            restore(database, "main", backup, clock)


def test_postgresql_that_is_restored_while_processes_use_it_issues_no_fence_again(
    postgres_url: str, issued: Issued
) -> None:
    """They need not be restarted: the next transaction of each knows the raised floor."""
    with (
        PostgresDatabase(postgres_url) as one,
        PostgresDatabase(postgres_url) as other,
        psycopg.connect(postgres_url, autocommit=True) as connection,
    ):
        one.transact(lineages.ensure)
        issued.more(one)
        connection.execute("CREATE TABLE dump AS SELECT * FROM fastness_kv")
        issued.more(other)
        for marking in (one, other):
            with connection.transaction():
                connection.execute("DELETE FROM fastness_kv")
                connection.execute("INSERT INTO fastness_kv SELECT * FROM dump")
            marking.transact(lineages.begin, "copied")
            issued.more(one)
            issued.more(other)


def test_a_transaction_of_a_caller_knows_the_raised_floor(postgres_url: str, issued: Issued) -> None:
    with PostgresDatabase(postgres_url) as database, psycopg.connect(postgres_url) as connection:
        issued.more(database)
        database.transact(lineages.begin, "copied")
        fence = database.within(connection).run(lease)
        assert fence > database.transact(fence_floor.load) > issued.last["lease"]


def test_the_floor_is_not_raised_beside_a_fence_that_is_not_committed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOCK_WAIT_SECONDS_MAX", 0.05)
    monkeypatch.setattr(limits, "OVERLOAD_SECONDS_MAX", 0.0)
    with PostgresDatabase(postgres_url) as database, psycopg.connect(postgres_url) as connection:
        fence = database.within(connection).run(lease)
        with pytest.raises(Busy):
            database.transact(lineages.begin, "copied")
        connection.commit()
        database.transact(lineages.begin, "copied")
        assert database.transact(lease) > database.transact(fence_floor.load) > fence
