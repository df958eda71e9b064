"""A full disk raises a typed error, and the database can be reopened intact once there is space."""

import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.backends.rocksdb import RocksDatabase
from fastness.backends.rocksdb.disk_needs import disk_space
from fastness.errors import Backend, CommitUnknown, DatabaseFailed, DiskFull, InvalidArgument
from fastness.kv import Transaction
from fastness.plane.embedded import EmbeddedTransport
from fastness.runtime.maintenance.disk_space import DiskSpaceMonitor
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier
from tests.support.forked import run_python
from tests.support.server_process import Server
from tests.support.waiting import eventually, exit_code

FILLING = """
import resource, signal, sys
from pathlib import Path
from fastness.backends.rocksdb import RocksDatabase

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
database = RocksDatabase(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
for number in range(1_000):
    database.transact(lambda tx: (tx.put(b"%06d a" % number, bytes(50_000)), tx.put(b"%06d b" % number, b"")))
    print(number, flush=True)
"""


def test_a_file_size_limit_is_reported_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """Simulates a full disk where a small file system cannot be mounted."""
    child = run_python(["-c", FILLING, tmp_path / "kv"])
    acknowledged = len(child.stdout.splitlines())
    assert acknowledged > 10
    assert "fastness.errors.DiskFull" in child.stderr
    check_nothing_acknowledged_is_lost(tmp_path / "kv", acknowledged)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 MiB, or of as many as the test's parameter says."""
    folder = tmp_path / "small"
    folder.mkdir()
    size = f"size={getattr(request, 'param', 64)}m"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount a small file system; run the tests as root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def put(tx: Transaction, number: int) -> None:
    tx.put(b"%06d a" % number, os.urandom(50_000))
    tx.put(b"%06d b" % number, b"")


def test_a_full_disk_is_reported_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    acknowledged = 0
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(44 << 20))
    database = RocksDatabase(small_disk / "kv")
    with pytest.raises((DiskFull, CommitUnknown)) as caught:
        for number in range(1_000):
            database.transact(put, number)
            acknowledged += 1
    assert acknowledged > 10
    assert "space" in str(caught.value) or "full" in str(caught.value)

    with pytest.raises(Backend) as again:
        database.transact(put, 2_000)
    assert isinstance(again.value, DatabaseFailed | DiskFull)
    assert "again" in str(again.value)
    with suppress(Backend):  # It raises because it cannot sync, but releases the directory.
        database.close()

    ballast.unlink()
    check_nothing_acknowledged_is_lost(small_disk / "kv", acknowledged)


def check_nothing_acknowledged_is_lost(path: Path, acknowledged: int) -> None:
    with RocksDatabase(path) as reopened:
        keys = [key for key, _ in reopened.read(lambda tx: tx.scan(b"0", b"1", limit=10_000))]
        whole = {key[:6] for key in keys if key[:6] + b" a" in keys and key[:6] + b" b" in keys}
        assert {b"%06d" % number for number in range(acknowledged)} <= whole
        assert len(keys) == 2 * len(whole)
        reopened.transact(put, 3_000)


REOPENING = """
import resource, sys
import fastness
from fastness.errors import Backend, DatabaseFailed, DiskFull

def limit(bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))

plane = fastness.open(f"dir:{sys.argv[1]}")
queue = plane.queue("jobs")
for number in range(4):
    queue.put({"n": number, "text": "x" * 10_000})
limit(0)
errors = []
for number in range(3):
    try:
        queue.put({"n": "refused"})
    except Backend as error:
        errors.append(error.code)
assert errors[0] in ("disk_full", "commit_unknown") and errors[1:] == ["database_failed"] * 2, errors
try:
    plane.reopen()
    raise AssertionError("reopened without space")
except Backend:
    pass
for call in (lambda: queue.put({"n": "refused"}), queue.stats):
    try:
        call()
        raise AssertionError("worked while closed")
    except DatabaseFailed:
        pass
limit(resource.RLIM_INFINITY)
plane.reopen()
plane.reopen()
queue.put({"n": 4})
print(*sorted(message.json()["n"] for message in queue.receive_many(100) if message.json()["n"] != "refused"))
plane.close()
"""


def test_a_failed_plane_can_be_reopened(tmp_path: Path) -> None:
    child = run_python(["-c", REOPENING, tmp_path / "data"])
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["0", "1", "2", "3", "4"]


def put_http(server: Any, number: int) -> tuple[int, bytes]:
    payload = {"n": number, "text": os.urandom(5_000).hex()}
    body = json.dumps({"queue": "jobs", "messages": [{"payload": payload}]}).encode()
    status, _, answer = server.get("/v1/queue/enqueue", body=body)
    return status, answer


def set_file_limit(server: Any, bytes: int) -> None:
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))


def test_a_server_reopens_its_key_space_when_there_is_space_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        for number in range(4):
            assert put_http(server, number)[0] < 300
        set_file_limit(server, 16_384)  # Less than the log has, and more than the server logs.
        assert put_http(server, 4)[0] == 503
        assert server.get("/readyz")[0] == 503
        eventually(lambda: b"fastness_database_failed 1.0" in server.get("/metrics")[2])
        assert server.logged('"level":"error"', "the key space has failed", "full")
        set_file_limit(server, resource.RLIM_INFINITY)
        eventually(lambda: server.get("/readyz")[0] == 200)
        assert put_http(server, 5)[0] < 300
        assert b"fastness_database_failed 0.0" in server.get("/metrics")[2]
        assert server.log().count("the key space has failed") == 1
        with server.plane() as plane:
            found = {message.json()["n"] for message in plane.queue("jobs").receive_many(100)}
        assert {0, 1, 2, 3, 5} <= found
    finally:
        code = server.stop()
        server.kill()
    assert code == 0


def test_a_server_exits_with_its_own_code_if_told_so(tmp_path: Path) -> None:
    server = Server(tmp_path, on_database_failure="exit", drain_seconds=0.1)
    for number in range(4):
        assert put_http(server, number)[0] < 300
    set_file_limit(server, 16_384)
    assert put_http(server, 4)[0] == 503
    try:
        assert exit_code(server.process) == 12
    finally:
        server.kill()


@pytest.mark.parametrize("small_disk", [256], indirect=True)
def test_a_nearly_full_disk_can_be_drained(small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, 144 << 20)
    with fastness.open(f"dir:{small_disk / 'data'}") as plane:
        queue = plane.queue("jobs")
        put = 0
        with pytest.raises(DiskFull, match="nearly full"):
            while True:
                queue.put({"n": put, "text": os.urandom(6_000).hex()})
                put += 1
        while messages := queue.receive_many(100):
            for message in messages:
                message.ack()
                put -= 1
        assert put == 0
        assert queue.stats().ready == 0


def metric(server: Any, name: str) -> float:
    lines = server.get("/metrics")[2].decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def fill(path: Path, *, leave_bytes: int) -> None:
    """Write a file that leaves this much of its file system free."""
    status = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(status.f_bavail * status.f_frsize - leave_bytes, 1))


def post(server: Any, path: str, **body: Any) -> Any:
    status, _, answer = server.get(path, body=json.dumps(body).encode())
    assert status < 300, answer
    return json.loads(answer)


def stored_numbers(server: Any) -> set[int]:
    with server.plane() as plane:
        numbers: set[int] = set()
        while messages := plane.queue("jobs").receive_many(100):
            numbers |= {message.json()["n"] for message in messages}
        return numbers


@pytest.mark.parametrize("small_disk", [128], indirect=True)
def test_a_server_in_its_reserve_can_be_drained_and_accepts_data_again(small_disk: Path, tmp_path: Path) -> None:
    server = Server(tmp_path, data=f"dir:{small_disk / 'data'}")
    ballast, more = small_disk / "ballast", small_disk / "more"
    try:
        reserve = metric(server, "fastness_disk_reserve_bytes")
        assert reserve == 32 << 20, "a quarter of the disk"
        fill(ballast, leave_bytes=(32 << 20) + 1_000_000)
        accepted = 0
        while (answer := put_http(server, accepted))[0] < 300:
            accepted += 1
        assert accepted > 0
        assert (answer[0], json.loads(answer[1])["code"]) == (503, "disk_full")
        fill(more, leave_bytes=(32 << 20) - 8_000_000)  # Else merges may free enough before the next line.
        eventually(lambda: metric(server, "fastness_disk_low") == 1)
        assert 0 < metric(server, "fastness_disk_free_bytes") < reserve
        assert server.logged('"level":"error"', "is nearly full", "new data is refused")
        assert server.get("/readyz")[0] == 200, "it can serve everything but new data"
        assert metric(server, "fastness_database_failed") == 0

        with server.plane() as plane:
            assert plane.queue("jobs").stats().ready == accepted
            assert len(plane.queue("jobs").peek(10)) == min(accepted, 10)
        taken = post(server, "/v1/queue/dequeue", queue="jobs", owner="ada")["messages"][0]
        lease = {"message_id": taken["message_id"], "lease_id": taken["lease_id"]}
        assert post(server, "/v1/queue/ack", queue="jobs", messages=[lease])["messages"][0]["settled"] is True
        with server.plane() as plane:
            assert plane.queue("jobs").purge() == accepted - 1

        ballast.unlink()
        more.unlink()
        eventually(lambda: metric(server, "fastness_disk_low") == 0)
        assert server.logged("has space again")
        assert put_http(server, 1)[0] < 300
        assert metric(server, "fastness_database_failures_total") == 0
    finally:
        code = server.stop()
        server.kill()
    assert code == 0


@pytest.mark.parametrize("on_failure", ["reopen", "exit"])
def test_a_server_on_a_full_disk_keeps_what_it_has_acknowledged(
    small_disk: Path, tmp_path: Path, on_failure: str
) -> None:
    flags: dict[str, Any] = {
        "data": f"dir:{small_disk / 'data'}",
        "disk_reserve_bytes": 0,
        "on_database_failure": on_failure,
    }
    server = Server(tmp_path, drain_seconds=0.1, **flags)
    ballast = small_disk / "ballast"
    acknowledged = set()
    try:
        for number in range(5):
            assert put_http(server, number)[0] < 300
            acknowledged.add(number)
        fill(ballast, leave_bytes=100_000)
        number = 5
        while (answer := put_http(server, number))[0] < 300:
            acknowledged.add(number)
            number += 1
        assert json.loads(answer[1])["code"] in ("disk_full", "commit_unknown")
        assert server.logged('"level":"error"', "the key space has failed")
        if on_failure == "exit":
            assert exit_code(server.process) == 12
            server.kill()
            ballast.unlink()
            server = Server(tmp_path, **flags)
        else:
            assert server.get("/readyz")[0] == 503
            eventually(lambda: metric(server, "fastness_database_failed") == 1)
            ballast.unlink()
            eventually(lambda: server.get("/readyz")[0] == 200)
            assert metric(server, "fastness_database_failures_total") == 1
        assert put_http(server, number + 1)[0] < 300
        # The put that got an error may have been stored.
        assert acknowledged | {number + 1} <= stored_numbers(server) <= acknowledged | {number, number + 1}
    finally:
        code = server.stop()
        server.kill()
    assert code == 0


FULL_DISKS_MIB = (64, 120, 700)
MESSAGE_BYTES = 16_000  # They are in the key space; larger ones are blobs.
SWEEPS_MAX = 5  # One is a second while the disk is nearly full (COMPACT_TIGHT_SECONDS).


def fill_queue(queue: fastness.Queue, disk: Path) -> int:
    """Put messages until new data is refused; returns how many were accepted. Other files take most of a large disk."""
    accepted = 0
    if not (disk / "others").exists():
        fill(disk / "others", leave_bytes=256 << 20)
    with pytest.raises(DiskFull, match="nearly full"):
        while True:
            accepted += len(queue.put_many([os.urandom(MESSAGE_BYTES) for _ in range(16)], tier=Tier.IMPORTANT))
    return accepted


def has_space_or_drains(queue: fastness.Queue, database: RocksDatabase) -> bool:
    """Whether puts are accepted again; if not, acknowledges a few messages more."""
    if database.low_space and (messages := queue.receive_many(64)):
        queue.ack_many(messages)
    return not database.low_space


def is_purged(queue: fastness.Queue) -> bool:
    """Whether the disk let a purge through."""
    try:
        queue.purge()
    except DiskFull:
        return False
    return True


def key_space(plane: fastness.Plane) -> tuple[RocksDatabase, DiskSpaceMonitor]:
    """The database of an embedded plane, and what watches its disk."""
    transport = plane._transport
    assert isinstance(transport, EmbeddedTransport)
    database, monitor = transport.services.database, transport.services.disk_space
    assert isinstance(database, RocksDatabase)
    assert monitor is not None
    return database, monitor


def sweep_until(is_done: Callable[[], bool], database: RocksDatabase, monitor: DiskSpaceMonitor) -> int:
    """Do what the maintenance thread does while the disk is nearly full; returns how many sweeps that took."""
    for sweeps in range(1, SWEEPS_MAX + 1):
        while database.compact_deleted():
            pass
        monitor.check()
        if is_done():
            return sweeps
    raise AssertionError(f"it is not done after {SWEEPS_MAX} sweeps; {monitor.free_bytes} bytes are free")


def sweep_until_puts_are_accepted(database: RocksDatabase, monitor: DiskSpaceMonitor) -> int:
    return sweep_until(lambda: not database.low_space, database, monitor)


def table_bytes(database: RocksDatabase) -> int:
    return sum(file.stat().st_size for file in database.path.glob("*.sst"))


@pytest.mark.parametrize(
    ("small_disk", "reserve"),
    [*((mib, "default") for mib in FULL_DISKS_MIB), (64, "smallest")],
    indirect=["small_disk"],
)
def test_puts_are_accepted_seconds_after_a_full_disk_was_drained(small_disk: Path, reserve: str) -> None:
    reserve_bytes = None if reserve == "default" else disk_space(small_disk).reserve_bytes_min
    url = f"dir:{small_disk / 'data'}"
    with fastness.open(url, clock=ManualClock(), disk_reserve_bytes=reserve_bytes) as plane:
        queue, (database, monitor) = plane.queue("jobs"), key_space(plane)
        accepted = fill_queue(queue, small_disk)
        queue.ack_many(queue.receive_many(200))
        if reserve == "default":
            assert queue.purge() == accepted - 200
        else:  # It is just what a flush needs, so the purge may have to wait until a merge has freed more.
            eventually(lambda: is_purged(queue))
        database.flush_tables()
        # Other files take what the log had, so that only the tables of deleted messages can be freed.
        fill(small_disk / "ballast", leave_bytes=monitor.reserve_bytes - 1_000_000)
        monitor.check()
        sweep_until_puts_are_accepted(database, monitor)
        queue.put(b"accepted")
        assert database.failure is None
        # With the smallest reserve, little is enough for the put. The rest follows.
        sweep_until(lambda: table_bytes(database) < accepted * MESSAGE_BYTES // 4, database, monitor)


@pytest.mark.parametrize("small_disk", FULL_DISKS_MIB, indirect=True)
@pytest.mark.parametrize("goes_on", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_reads_acks_and_deletes_work_on_a_full_disk_whatever_is_merged(small_disk: Path, goes_on: bool) -> None:
    """Every delivery is acknowledged, and RocksDB's own merges leave what a flush needs.

    Consumers that do not go on find that on the smallest disk level 0 may be too large for any merge.
    """
    with fastness.open(f"dir:{small_disk / 'data'}") as plane:
        queue, (database, _) = plane.queue("jobs"), key_space(plane)
        lowest_free = os.statvfs(small_disk).f_bavail
        for _ in range(3):
            fill_queue(queue, small_disk)
            for _ in range(10):
                assert len(queue.peek(1)) == 1
                messages = queue.receive_many(64)
                queue.ack_many(messages)
                assert len(messages) == 64
                lowest_free = min(lowest_free, os.statvfs(small_disk).f_bavail)
            eventually(lambda: has_space_or_drains(queue, database) if goes_on else not database.low_space)
        assert database.failure is None
        assert lowest_free * os.statvfs(small_disk).f_frsize > disk_space(small_disk).flush_bytes // 2
        assert queue.purge() > 0


@pytest.mark.parametrize("small_disk", FULL_DISKS_MIB, indirect=True)
def test_a_reserve_that_a_flush_does_not_fit_in_is_refused_with_the_smallest_that_works(small_disk: Path) -> None:
    url, smallest = f"dir:{small_disk / 'data'}", disk_space(small_disk).reserve_bytes_min
    with pytest.raises(InvalidArgument, match=rf"disk_reserve_bytes is 1048576; .* at least {smallest}\b"):
        fastness.open(url, disk_reserve_bytes=1 << 20)
    with pytest.raises(InvalidArgument, match=f"disk_reserve_bytes is {smallest - 1}"):
        fastness.open(url, disk_reserve_bytes=smallest - 1)
    for works in (smallest, 0):
        fastness.open(url, disk_reserve_bytes=works).close()


def test_doctor_says_that_the_disk_of_a_data_directory_is_nearly_full(small_disk: Path) -> None:
    data = small_disk / "data"
    fastness.open(f"dir:{data}").close()
    assert "nearly full" not in run_python(["-m", "fastness.cli", "doctor", data]).stderr
    fill(small_disk / "ballast", leave_bytes=8 << 20)
    assert "The disk is nearly full" in run_python(["-m", "fastness.cli", "doctor", data]).stderr


def test_a_commit_from_before_a_failure_is_not_reported_as_durable_after_it(tmp_path: Path) -> None:
    """A caller may commit, lose the processor, and wait for its sync only after another thread has reopened."""

    def fail() -> None:
        raise OSError("the device is gone")

    with RocksDatabase(tmp_path / "kv") as database:
        database.transact(put, 1)
        kept = database._last_commit()
        database._log._sync = fail
        with pytest.raises(CommitUnknown, match="the device is gone"):
            database.transact(put, 2)
        lost = database._last_commit()
        assert isinstance(database.failure, DatabaseFailed)
        with database.watch(b"0") as watch:
            database.reopen()
            assert watch.wait(10)
        assert database.failure is None
        database.transact(put, 3)
        assert database._last_commit() > lost > kept
        database._wait_durable(kept, Tier.CRITICAL)
        with pytest.raises(CommitUnknown, match="was reopened"):
            database._wait_durable(lost, Tier.CRITICAL)
