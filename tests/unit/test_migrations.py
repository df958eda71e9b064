"""Migrations preserve a plane on every backend, however often they are interrupted."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import boto3
import msgspec
import psycopg
import pytest
from click.testing import Result
from moto.server import ThreadedMotoServer

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.backends.postgres import PostgresDatabase
from fastness.backends.rocksdb import RocksDatabase, RocksReader
from fastness.errors import (
    CommitUnknown,
    Conflict,
    DirectoryInUse,
    DiskFull,
    HashMismatch,
    InvalidArgument,
    MigrationUnfinished,
    MissingObject,
    PlaneInUse,
    ReadOnlyTransaction,
    SchemaMismatch,
    TargetNotEmpty,
)
from fastness.kv import Database, fence_floor, formats
from fastness.layers import migrations
from fastness.layers.migrations import BEGIN, END, KEY
from fastness.plane.migrations import without_password
from fastness.runtime.activity.log import ActivityLog
from fastness.runtime.maintenance import migrations as moving
from fastness.runtime.maintenance.migrations import Migrator, PlaneStores
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier
from fastness.wire.backups import BackupFile
from tests.support.populated import LARGE, everything, populate, use

Cli = Callable[..., Result]
_buckets = count()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; the environment has its credentials."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT": s3, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    name = f"migrations-{next(_buckets)}"
    boto3.client("s3", endpoint_url=s3, region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}/plane"


@pytest.fixture
def source(tmp_path: Path, clock: ManualClock) -> str:
    """The URL of a closed plane with data of every kind, and a session log that a crash left."""
    folder = tmp_path / "data"
    with fastness.open(f"dir:{folder}", clock=clock) as plane:
        populate(plane, clock)
    log = ActivityLog(folder / "activity", None, clock=clock)
    log.log("main", "crashed", {"c": 3})
    log.close()
    assert list((folder / "activity").rglob("*.jsonl"))
    return f"dir:{folder}"


def trace(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file of a folder with its bytes and modification time."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "", path.stat().st_mtime_ns)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def pairs(database: Database) -> dict[bytes, bytes]:
    return dict(moving._pairs_of(database, BEGIN, END))


def quietly(_steps: int) -> None:
    """A progress callback that does nothing."""


def run(migrator: Migrator, advance: Callable[[int], None] = quietly) -> migrations.Migration:
    if migrator.begin():
        migrator.copy_objects(advance)
        migrator.copy_keys(advance)
        migrator.compare_keys(advance)
        migrator.finish()
    return migrator.progress


# Backends.


def test_a_migrated_message_gets_a_fence_that_its_source_never_issued(
    cli: Cli, postgres_url: str, tmp_path: Path
) -> None:
    """The last deliveries of the source may have been lost with the power, and with them their fences."""
    source, back = f"dir:{tmp_path / 'data'}", f"dir:{tmp_path / 'back'}"
    with fastness.open(source) as plane:
        plane.queue("jobs").put(1)
    objects = f"dir:{tmp_path / 'objects'}"
    cli("migrate", source, postgres_url, "--objects", objects)
    cli("migrate", postgres_url, back, "--objects", objects)
    fences = []
    planes: list[tuple[str, dict[str, Any]]] = [(source, {}), (postgres_url, {"objects": objects}), (back, {})]
    for url, options in planes:
        with fastness.open(url, **options) as plane:
            message = plane.queue("jobs").receive()
            assert message is not None
            fences.append(message.fence)
    assert fences[0] == 1
    assert fence_floor.COPY_STEP < fences[1] < fences[2]


def test_a_plane_survives_a_migration_to_postgresql_and_s3_and_back(
    cli: Cli, source: str, postgres_url: str, bucket: str, *, tmp_path: Path, clock: ManualClock
) -> None:
    folder = Path(source.removeprefix("dir:"))
    before = trace(folder)
    moved = json.loads(cli("migrate", source, postgres_url, "--objects", bucket, "--json").stdout)
    assert trace(folder) == before
    assert (moved["verified"], moved["again"], moved["logs"]) == (True, 0, 1)
    assert moved["keys"] > 120
    assert moved["object_bytes"] > len(LARGE)
    back = f"dir:{tmp_path / 'back'}"
    again = json.loads(cli("migrate", postgres_url, back, "--objects", bucket, "--json").stdout)
    assert (again["keys"], again["digest"]) == (moved["keys"], moved["digest"])

    with RocksReader(folder / "kv") as one, RocksReader(tmp_path / "back" / "kv") as other:
        assert pairs(one) == pairs(other)
    logs = str(tmp_path / "logs")
    with (
        fastness.open(source, clock=clock) as here,
        fastness.open(postgres_url, objects=bucket, activity=logs, clock=clock) as target_hash,
        fastness.open(back, clock=clock) as restored,
    ):
        seen = everything(here)
        assert everything(target_hash) == seen
        assert everything(restored) == seen
        for plane in (target_hash, restored):
            assert [each.record for each in plane.activity.read(session="crashed").records] == [b'{"c":3}']
    now_ms, came = clock.now_ms(), []
    options: dict[str, Any] = {"objects": bucket, "activity": logs}
    for url, kept in ((source, {}), (postgres_url, options), (back, {})):
        clock.jump_to_ms(now_ms)
        with fastness.open(url, clock=clock, **kept) as plane:
            came.append(use(plane, clock))
    assert came[0] == came[1] == came[2]


@pytest.mark.rotating
def test_counters_of_several_postgresql_writers_are_merged_in_a_directory(
    cli: Cli, source: str, postgres_url: str, bucket: str, *, tmp_path: Path, clock: ManualClock
) -> None:
    cli("migrate", source, postgres_url, "--objects", bucket)
    options: dict[str, Any] = {"objects": bucket, "activity": str(tmp_path / "logs"), "clock": clock}
    for owner in ("one", "two", "three"):  # Each of them has its own counters.
        with fastness.open(postgres_url, **options) as plane:
            jobs = plane.queue("jobs")
            jobs.put_many(range(5))
            jobs.put("soon", delay_seconds=5)
            first, *_ = jobs.receive_many(3, owner=owner, visibility_seconds=60)
            first.ack()
    with fastness.open(postgres_url, **options) as plane:
        seen = everything(plane)
    back = f"dir:{tmp_path / 'back'}"
    cli("migrate", postgres_url, back, "--objects", bucket, "--activity", str(tmp_path / "logs"))
    with fastness.open(back, clock=clock) as plane:
        assert everything(plane) == seen
        assert [each.finding for each in plane.backups.examine(deep=True) if each.finding is not None] == []
        clock.advance_ms(3_600_000)
        ids = []
        while (message := plane.queue("jobs").receive()) is not None:
            ids.append(message.id)
            message.ack()
        assert len(ids) == len(set(ids)) >= 40 + 3 * 5
        stats = plane.queue("jobs").stats()
        assert (stats.ready, stats.leased, stats.delayed, stats.blocked) == (0, 0, 0, 0)
        clock.jump_to_ms(clock.now_ms() - 7_200_000)  # Before the last put.
        assert plane.queue("jobs").put("new").id > max(ids)


def test_directories_and_databases_can_be_migrated_to_their_own_kind(
    cli: Cli, source: str, postgres_server: str, postgres_url: str, tmp_path: Path
) -> None:
    other = f"dir:{tmp_path / 'new' / 'data'}"
    cli("migrate", source.removeprefix("dir:"), other)
    cli("migrate", other, postgres_url, "--objects", f"dir:{tmp_path / 'shared'}")
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE moved_{os.getpid()}")
    moved = postgres_server.replace("/postgres?", f"/moved_{os.getpid()}?")
    try:
        output = cli("migrate", postgres_url, moved, "--objects", f"dir:{tmp_path / 'shared'}").stdout
        assert "key ranges are equal" in output
        with PostgresDatabase(moved) as database, RocksReader(tmp_path / "data" / "kv") as first:
            assert pairs(database) == pairs(first)
    finally:
        with psycopg.connect(postgres_server, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE moved_{os.getpid()} WITH (FORCE)")


def test_objects_in_a_shared_store_are_hashed_and_not_copied(
    cli: Cli, postgres_url: str, tmp_path: Path, clock: ManualClock
) -> None:
    objects = f"dir:{tmp_path / 'objects'}"
    with fastness.open(f"dir:{tmp_path / 'data'}", objects=objects, clock=clock) as plane:
        plane.blobs.put(LARGE)
        plane.activity.log("s", {"a": 1})
    before = trace(tmp_path / "objects" / "cas")
    words = ("--from-objects", objects, "--to-objects", objects, "--json")
    moved = json.loads(cli("migrate", f"dir:{tmp_path / 'data'}", postgres_url, *words).stdout)
    assert moved["objects"] >= 3
    assert trace(tmp_path / "objects" / "cas") == before


# Interruptions.


class Killed(BaseException):
    """A BaseException that no code catches, like a kill."""


def test_an_interruption_at_any_step_loses_and_duplicates_nothing(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An uninterrupted migration counts the steps; then one migration is interrupted at each of them."""
    monkeypatch.setattr(moving, "MIGRATION_BATCH_PAIRS", 16)
    monkeypatch.setattr(moving, "MIGRATION_RANGE_PAIRS", 24)
    folder = Path(source.removeprefix("dir:"))
    with RocksReader(folder / "kv") as database:
        here = PlaneStores(database, open_objects(f"dir:{folder / 'objects'}"), folder / "activity")

        def migrated(
            *, last: int | None
        ) -> tuple[int, dict[bytes, bytes], list[tuple[str, int]], migrations.Migration]:
            steps = 0

            def step(_steps: int) -> None:
                nonlocal steps
                steps += 1
                if steps == last:
                    raise Killed

            with MemoryDatabase() as target:
                target_hash = PlaneStores(target, open_objects("memory:"))
                if last is not None:
                    with pytest.raises(Killed):
                        run(Migrator(here, target_hash, "here"), step)
                    with pytest.raises(MigrationUnfinished, match="from here"):
                        target.read(migrations.check_complete)
                moved = run(Migrator(here, target_hash, "here"), step)
                target.read(migrations.check_complete)
                assert target_hash.objects is not None
                stored = [(meta.path, meta.size) for meta in target_hash.objects.list()]
                times = {"began_ms": 0, "ended_ms": 0}
                return steps, pairs(target), stored, msgspec.structs.replace(moved, **times)

        steps, *wanted = migrated(last=None)
        assert steps > 30
        for last in range(1, steps + 1):
            _, *came = migrated(last=last)
            assert came == wanted, f"interrupted behind step {last}"
        print(f"{steps} steps, and a crash behind each")


def test_a_half_migrated_plane_cannot_be_opened(
    source: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(
        moving.Migrator, "compare_keys", lambda _self, _advance: (_ for _ in ()).throw(HashMismatch("x"))
    )
    for target in (f"dir:{tmp_path / 'half'}", postgres_url):
        cli("migrate", source, target, "--objects", f"dir:{tmp_path / 'shared'}", code=10)
        with pytest.raises(MigrationUnfinished, match="resumes where it stopped"):
            fastness.open(target)
    monkeypatch.undo()
    cli("migrate", source, f"dir:{tmp_path / 'half'}")
    with fastness.open(f"dir:{tmp_path / 'half'}") as plane:
        assert plane.pairs.get(b"raw") == b"value"


def test_a_completed_migration_is_not_repeated(cli: Cli, source: str, tmp_path: Path) -> None:
    words = ("migrate", source, f"dir:{tmp_path / 'new'}", "--json")
    first = cli(*words).stdout
    assert "and compared at" in cli(*words[:-1]).stdout
    with fastness.open(f"dir:{tmp_path / 'new'}") as plane:
        plane.pairs.put(b"raw", b"since")
    assert cli(*words).stdout == first
    with fastness.open(f"dir:{tmp_path / 'new'}") as plane:
        assert plane.pairs.get(b"raw") == b"since"


def test_changes_in_the_source_between_two_runs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "MIGRATION_BATCH_PAIRS", 10)
    monkeypatch.setattr(moving, "MIGRATION_RANGE_PAIRS", 16)
    with MemoryDatabase() as here, MemoryDatabase() as target_hash:
        here.transact(lambda tx: [tx.put(b"%03d" % number, b"old") for number in range(100)])
        migrator = Migrator(PlaneStores(here), PlaneStores(target_hash), "here")
        migrator.begin()
        migrator.copy_keys(quietly)
        here.transact(lambda tx: (tx.put(b"007", b"new"), tx.delete(b"050"), tx.put(b"zzz", b"last")))
        moved = run(Migrator(PlaneStores(here), PlaneStores(target_hash), "here"))
        assert moved.again == 3
        assert pairs(target_hash) == pairs(here)
        assert moved.keys == 100


# Rejections.


def test_a_target_with_other_data_is_not_changed(cli: Cli, source: str, postgres_url: str, tmp_path: Path) -> None:
    with fastness.open(postgres_url, activity=str(tmp_path / "logs")) as plane:
        plane.pairs.put(b"theirs", b"1")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    with fastness.open(f"dir:{tmp_path / 'theirs'}") as plane:
        plane.pairs.put(b"theirs", b"1")
    for target in (postgres_url, f"dir:{foreign}", f"dir:{tmp_path / 'theirs'}"):
        refused = cli("migrate", source, target, "--objects", f"dir:{tmp_path / 'shared'}", "--json", code=5)
        assert json.loads(refused.stderr)["code"] == "target_not_empty"
    assert [path.name for path in foreign.iterdir()] == ["letter.txt"]
    with fastness.open(postgres_url, activity=str(tmp_path / "logs")) as plane:
        assert plane.pairs.get(b"theirs") == b"1"


def test_a_target_of_another_source_is_rejected() -> None:
    with MemoryDatabase() as here, MemoryDatabase() as target_hash:
        migrator = Migrator(PlaneStores(here), PlaneStores(target_hash), "dir:/one")
        migrator.begin()
        with pytest.raises(TargetNotEmpty, match="an unfinished migration from dir:/one"):
            Migrator(PlaneStores(here), PlaneStores(target_hash), "dir:/other").begin()
        run(migrator)
        with pytest.raises(TargetNotEmpty, match="a plane from dir:/one"):
            Migrator(PlaneStores(here), PlaneStores(target_hash), "dir:/other").begin()


def test_one_of_two_migrations_to_the_same_target_stops() -> None:
    with MemoryDatabase() as here, MemoryDatabase() as target_hash:
        here.transact(lambda tx: tx.put(b"key", b"value"))
        first, second = (Migrator(PlaneStores(here), PlaneStores(target_hash), "here") for _ in range(2))
        first.begin()
        second.begin()
        first.copy_keys(quietly)
        with pytest.raises(Conflict, match="Another process migrates"):
            second.copy_keys(quietly)


def test_a_different_object_in_the_target_is_not_overwritten(
    cli: Cli, source: str, tmp_path: Path, postgres_url: str
) -> None:
    stored = open_objects(f"dir:{Path(source.removeprefix('dir:')) / 'objects'}").list("cas/main/sha256")
    (path,) = (meta.path for meta in stored if hashlib.sha256(LARGE).hexdigest() in meta.path)
    open_objects(f"dir:{tmp_path / 'shared'}").put(path, b"theirs")
    refused = cli("migrate", source, postgres_url, "--objects", f"dir:{tmp_path / 'shared'}", code=5)
    assert "different bytes at cas/main" in refused.stderr
    assert open_objects(f"dir:{tmp_path / 'shared'}").get(path) == b"theirs"


def test_objects_need_an_object_store_in_the_target(cli: Cli, source: str, postgres_url: str) -> None:
    assert "give --objects" in cli("migrate", source, postgres_url, code=2).stderr
    with fastness.open(postgres_url) as plane:  # Nothing was started.
        assert plane.pairs.get(b"raw") is None


@pytest.mark.parametrize("words", [("--activity", "{}/none"), ("--from-objects", "dir:{}/none")])
def test_a_missing_object_fails_the_migration(cli: Cli, source: str, tmp_path: Path, words: tuple[str, str]) -> None:
    """No key references session logs, so their loss would not be detected."""
    option, place = words
    refused = cli("migrate", source, f"dir:{tmp_path / 'new'}", option, place.format(tmp_path), code=4)
    assert f"{tmp_path / 'none'} is not a folder" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_session_logs_can_be_excluded(cli: Cli, postgres_url: str, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.queue("jobs").put(1)
    words = ("migrate", f"dir:{tmp_path / 'data'}", postgres_url)
    cli(*words, code=2)
    assert json.loads(cli(*words, "--leave-activity", "--json").stdout)["objects"] == 0


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_damage_is_not_migrated(cli: Cli, source: str, tmp_path: Path, what: str) -> None:
    body = next((tmp_path / "data" / "objects" / "cas").rglob(f"{hashlib.sha256(LARGE).hexdigest()}*"))
    if what == "missing":
        body.unlink()
    else:
        body.write_bytes(LARGE[::-1])
    output = cli("migrate", source, f"dir:{tmp_path / 'new'}", "--json", code=10)
    assert json.loads(output.stderr)["code"] == ("missing_object" if what == "missing" else "hash_mismatch")
    with pytest.raises(MigrationUnfinished):
        fastness.open(f"dir:{tmp_path / 'new'}")


def test_a_target_that_loses_writes_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryDatabase() as here, MemoryDatabase() as target_hash:
        here.transact(lambda tx: tx.put(b"key", b"value"))
        moved = migrations.save_progress

        def forgetful(tx: Any, before: Any, after: Any, pairs: Any = (), **options: Any) -> Any:
            return moved(tx, before, after, [], **options)

        monkeypatch.setattr(migrations, "save_progress", forgetful)
        migrator = Migrator(PlaneStores(here), PlaneStores(target_hash), "here")
        migrator.begin()
        migrator.copy_keys(quietly)
        with pytest.raises(HashMismatch, match="after they were copied twice"):
            migrator.compare_keys(quietly)


@pytest.mark.parametrize("others", [b"large", b"theirs"])
def test_an_object_created_concurrently_is_compared(others: bytes) -> None:
    source, target = open_objects("memory:"), open_objects("memory:")
    source.put("a/b", b"large")
    opened = source.open

    def meanwhile(path: str) -> Iterator[bytes]:
        target.put(path, others)
        return opened(path)

    source.open = meanwhile  # type: ignore[method-assign, assignment]
    file = BackupFile("a/b", 5, hashlib.sha256(b"large").hexdigest())
    if others == b"large":
        assert moving._copy_verified(file, source, target) == 5
    else:
        with pytest.raises(TargetNotEmpty, match="different bytes at a/b"):
            moving._copy_verified(file, source, target)
    assert target.get("a/b") == others


def test_the_first_of_two_consecutive_errors_is_reported() -> None:
    class Full(MemoryDatabase):
        def close(self) -> None:
            super().close()
            raise CommitUnknown("what is left could not be synced")

    with pytest.raises(DiskFull), Full():
        raise DiskFull("the device is full")
    with pytest.raises(CommitUnknown), Full():
        """No other error occurred."""


@pytest.mark.parametrize("missing", [True, False])
def test_a_store_that_loses_an_object_is_detected(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = open_objects("memory:"), open_objects("memory:")
    file = BackupFile("a/b", 5, hashlib.sha256(b"large").hexdigest())
    if missing:
        with pytest.raises(MissingObject, match="a/b is missing in the source"):
            moving._copy_verified(file, source, target)
        return
    source.put("a/b", b"large")
    monkeypatch.setattr(target, "write", lambda *_args, **_options: None)
    with pytest.raises(HashMismatch, match="differs in the target after it was written"):
        moving._copy_verified(file, source, target)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("data", "data"), 2, "the same plane"),
        (("data", "data/inside"), 2, "is inside"),
        (("none", "new"), 4, "There is no plane in"),
        (("http://127.0.0.1:1", "new"), 9, "stop it and give its data"),
        (("data", "http://127.0.0.1:1"), 9, "stop it and give its data"),
        (("memory:", "new"), 2, "cannot be migrated"),
        (("postgresql:///none?host=/nowhere", "new"), 9, "does not answer"),
        (("postgresql://[bad/db", "new"), 2, "URL is not understood"),
        (("postgresql://host/db?no=such", "new"), 2, "URL is invalid"),
        (("data", "postgresql://host/db?no=such"), 2, "URL is invalid"),
        (("data", "postgresql://me:50%off@host/db"), 2, "a % in it is written %25"),
        (("dir:~no-such-user/data", "new"), 9, "cannot be expanded"),
        (("data", "dir:~no-such-user/data"), 9, "cannot be expanded"),
        (("dir:", "new"), 2, "has no path"),
    ],
)
def test_invalid_sources_and_targets_are_rejected_with_a_message(
    cli: Cli, tmp_path: Path, words: tuple[str, str], code: int, says: str
) -> None:
    fastness.open(f"dir:{tmp_path / 'data'}").close()
    places = [word if ":" in word else str(tmp_path / word) for word in words]
    output = cli("migrate", *places, code=code).stderr
    assert says in output
    assert "50%off" not in output
    assert not (tmp_path / "new" / "kv").exists()


@pytest.mark.parametrize(
    ("store", "says"), [("memory:", "is lost with this process"), ("ftp://x", "is not an object store")]
)
def test_a_memory_store_is_rejected_before_anything_is_created(
    cli: Cli, source: str, postgres_url: str, tmp_path: Path, *, store: str, says: str
) -> None:
    assert says in cli("migrate", source, f"dir:{tmp_path / 'new'}", "--to-objects", store, code=2).stderr
    assert not (tmp_path / "new").exists()
    assert says in cli("migrate", source, postgres_url, "--objects", store, code=2).stderr
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT to_regclass('fastness_kv')").fetchone() == (None,)


# Planes in use.


def test_a_directory_open_in_another_process_is_not_migrated(cli: Cli, source: str, tmp_path: Path) -> None:
    child = "import sys, fastness; fastness.open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", child, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"open\n"
        output = cli("migrate", source, f"dir:{tmp_path / 'new'}", "--patience", "0", code=9).stderr
        assert f"open in process {process.pid}; stop it" in output
        process.stdin.close()
    cli("migrate", source, f"dir:{tmp_path / 'new'}")


def test_a_directory_cannot_be_opened_during_its_migration(source: str, tmp_path: Path) -> None:
    kv = Path(source.removeprefix("dir:")) / "kv"
    with fastness.open(source), pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"):
        RocksReader(kv)
    with RocksReader(kv):
        with pytest.raises(DirectoryInUse):
            fastness.open(source)
        RocksReader(kv).close()  # Other readers are allowed.
        with pytest.raises(DirectoryInUse):
            fastness.open(source)
    fastness.open(source).close()


def test_links_of_a_killed_reader_are_removed_and_those_of_a_live_one_kept(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, new = tmp_path / "fastness-reader-left", tmp_path / "fastness-reader-new"
    for folder in (left, new):
        folder.mkdir()
        (folder / "000009.sst").symlink_to(tmp_path / "data" / "kv" / "CURRENT")
    kv = Path(source.removeprefix("dir:")) / "kv"
    with RocksReader(kv) as living:
        [links] = [path for path in tmp_path.glob("fastness-reader-*") if path not in (left, new)]
        for folder in (left, links):
            os.utime(folder, (0, 0))
        RocksReader(kv).close()
        assert sorted(tmp_path.glob("fastness-reader-*")) == sorted([links, new])
        assert pairs(living)
    assert (kv / "CURRENT").exists()
    assert list(tmp_path.glob("fastness-reader-*")) == [new]


def test_a_source_directory_is_read_only(source: str) -> None:
    with RocksReader(Path(source.removeprefix("dir:")) / "kv") as database, pytest.raises(ReadOnlyTransaction):
        database.transact(lambda tx: tx.put(b"a", b"b"))


def test_a_postgresql_database_in_use_is_neither_source_nor_target(
    cli: Cli, source: str, postgres_url: str, tmp_path: Path
) -> None:
    shared = ("--objects", f"dir:{tmp_path / 'shared'}", "--json")
    plane = fastness.open(postgres_url, activity=str(tmp_path / "logs"))
    with plane:
        for words in ((source, postgres_url), (postgres_url, f"dir:{tmp_path / 'new'}")):
            output = json.loads(cli("migrate", *words, *shared, code=9).stderr)
            assert output["code"] == "plane_in_use"
            assert "stop the servers and workers" in output["detail"]
    with fastness.open(postgres_url, activity=str(tmp_path / "logs")):
        """Nothing was started, so the target can be opened."""
    cli("migrate", source, postgres_url, *shared)


def test_a_process_that_opens_the_target_first_keeps_it(
    cli: Cli, source: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastness.cli import migrations as command

    results = iter([None, PlaneInUse("in use now")])

    def check(_url: str) -> None:
        if (found := next(results)) is not None:
            raise found

    monkeypatch.setattr(command, "check_unused", check)
    words = ("migrate", source, postgres_url, "--objects", f"dir:{tmp_path / 'shared'}")
    assert "in use now" in cli(*words, code=9).stderr
    with fastness.open(postgres_url, activity=str(tmp_path / "logs")) as plane:
        assert plane.pairs.get(b"raw") is None


def test_a_half_migrated_plane_is_neither_migrated_nor_backed_up(
    cli: Cli, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = f"dir:{tmp_path / 'half'}"
    with monkeypatch.context() as broken:
        broken.setattr(moving.Migrator, "finish", lambda _self: (_ for _ in ()).throw(HashMismatch("x")))
        cli("migrate", source, half, code=10)
    for words in (("migrate", half, f"dir:{tmp_path / 'new'}"), ("--url", half, "backup", str(tmp_path / "backup"))):
        assert "unfinished migration" in cli(*words, code=9).stderr
    assert "unfinished migration" in cli("doctor", str(tmp_path / "half"), code=9).stderr
    cli("migrate", source, half)
    cli("doctor", str(tmp_path / "half"), "--deep")


def test_a_postgresql_source_cannot_be_written_during_a_migration(postgres_url: str) -> None:
    from fastness.backends.postgres import PostgresReader

    PostgresDatabase(postgres_url).close()
    with PostgresReader(postgres_url) as reader, psycopg.connect(postgres_url) as other:
        assert pairs(reader) == {}
        other.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("INSERT INTO fastness_kv VALUES ('a', 'b')")
        other.rollback()
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            reader._holder.execute("INSERT INTO fastness_kv VALUES ('a', 'b')")
    with psycopg.connect(postgres_url) as other:
        other.execute("INSERT INTO fastness_kv VALUES ('a', 'b')")
        with pytest.raises(PlaneInUse, match="writes to the table"):
            PostgresReader(f"{postgres_url}&options=-c%20application_name%3Dx")


def test_a_database_without_a_plane_is_rejected_as_source(cli: Cli, postgres_url: str, tmp_path: Path) -> None:
    assert "no Fastness tables" in cli("migrate", postgres_url, str(tmp_path / "new"), code=4).stderr
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT to_regclass('fastness_kv')").fetchone() == (None,)


# Details.


def test_a_url_is_stored_without_its_password() -> None:
    assert without_password("postgresql://me:secret@host:5/db?password=secret&sslmode=require") == (
        "postgresql://me@host:5/db?sslmode=require"
    )
    assert without_password("postgres://host/db?sslpassword=secret") == "postgresql://host/db"
    assert without_password("dir:.") == f"dir:{Path.cwd()}"


@pytest.mark.parametrize(("found", "remedy"), [(formats.FORMAT + 1, "upgrade"), (0, "the version .* that wrote it")])
def test_a_plane_in_an_unknown_format_is_neither_opened_nor_migrated(
    cli: Cli, tmp_path: Path, found: int, remedy: str
) -> None:
    url = f"dir:{tmp_path / 'data'}"
    with fastness.open(url) as plane:
        plane.transact(lambda tx: tx.put(formats.KEY, formats.encode(found)))
    with pytest.raises(SchemaMismatch, match=f"format {found}.*{remedy}"):
        fastness.open(url)
    assert re.search(remedy, cli("migrate", url, f"dir:{tmp_path / 'new'}", code=9).output)


def test_keys_that_resemble_counters_are_copied_unchanged(database: Database) -> None:
    from fastness.kv import Subspace

    subspace = Subspace("u", "main", "q", "tally")
    similar_keys = [
        subspace.key("tally", "", "more"),
        subspace.key("r") + b"\x02tally\x00",
        b"\x02tally\x00\xff",
        Subspace("u", "main", "w", "x").key("tally", ""),
    ]
    assert [migrations.queue_of_counters_key(key) for key in similar_keys] == [None] * 4
    assert migrations.queue_of_counters_key(subspace.key("tally", "abc")) is not None
    database.transact(formats.record)
    database.transact(lambda tx: [tx.put(key, b"x") for key in similar_keys])
    with MemoryDatabase() as target_hash:
        run(Migrator(PlaneStores(database), PlaneStores(target_hash), "here"))
        assert pairs(target_hash) == pairs(database)
        assert target_hash.read(lambda tx: tx.get(KEY)) is not None


def test_transactions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    moved = migrations.save_progress

    def counted(tx: Any, *args: Any, **options: Any) -> Any:
        after = moved(tx, *args, **options)
        sizes.append(tx.size_bytes)
        return after

    monkeypatch.setattr(migrations, "save_progress", counted)
    with MemoryDatabase() as here, MemoryDatabase() as target_hash:
        for number in range(40):
            here.transact(lambda tx, number=number: tx.put(b"%03d" % number, bytes(1 << 20)))
        run(Migrator(PlaneStores(here), PlaneStores(target_hash), "here"))
    assert max(sizes) < 4 << 20


def test_memory_does_not_grow_with_the_plane(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        for number in range(64):
            values = [(b"%02d %02d" % (number, part), os.urandom(65_536)) for part in range(16)]
            plane.transact(lambda tx, values=values: [tx.put(*pair) for pair in values], tier=Tier.IMPORTANT)
        plane.blobs.write(os.urandom(1 << 20) for _ in range(64))
    kv, objects = tmp_path / "data" / "kv", open_objects(f"dir:{tmp_path / 'data' / 'objects'}")
    target_hash = open_objects(f"dir:{tmp_path / 'objects'}")
    with RocksReader(kv) as database, RocksDatabase(tmp_path / "kv") as target:
        tracemalloc.start()
        try:
            moved = run(Migrator(PlaneStores(database, objects), PlaneStores(target, target_hash), "here"))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert moved.object_bytes >= 64 << 20
    assert most < 40 << 20  # Of 128 MiB of data: one page of pairs, one batch, and one part of an object.


def test_objects_of_a_plane_are_not_taken_from_the_environment(
    cli: Cli, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FASTNESS_OBJECTS applies to PostgreSQL; a directory uses its own folder by default."""
    monkeypatch.setenv("FASTNESS_OBJECTS", f"dir:{tmp_path / 'elsewhere'}")
    cli("migrate", source, f"dir:{tmp_path / 'new'}")
    assert not (tmp_path / "elsewhere").exists()
    objects = open_objects(f"dir:{tmp_path / 'new' / 'objects'}")
    with MemoryDatabase() as here, MemoryDatabase() as target_hash, pytest.raises(InvalidArgument):
        Migrator(PlaneStores(here, objects), PlaneStores(target_hash), "x").begin()
