"""PostgreSQL failures and sharing: typed errors, bounded retries, nothing lost or duplicated."""

import asyncio
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from fastness.backends.postgres import PostgresDatabase, committer
from fastness.backends.postgres.jobs import Job, finish
from fastness.backends.postgres.notifications import CHANNEL
from fastness.backends.postgres.sessions import Session, value_of
from fastness.errors import (
    Busy,
    CommitUnknown,
    DatabaseFailed,
    InvalidUrl,
    TransactionConflict,
    Unreachable,
)
from fastness.kv import Subspace, Transaction
from fastness.tiers import Tier
from tests.support.forked import start_python


def put(tx: Transaction, key: bytes, value: bytes = b"1") -> None:
    tx.put(key, value)


def increment(tx: Transaction, key: bytes = b"n") -> int:
    number = int(tx.get(key) or b"0") + 1
    tx.put(key, b"%d" % number)
    return number


@pytest.fixture
def database(postgres_url: str) -> Iterator[PostgresDatabase]:
    with PostgresDatabase(postgres_url) as database:
        yield database


def end_every_session(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def session_of(database: PostgresDatabase) -> Session:
    session = database._committer._runner._session
    assert session is not None
    return session


def test_the_clock_is_that_of_the_database(database: PostgresDatabase, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    assert 0 <= database.transact(lambda tx: tx.now_ms) - row[0] < 60_000


def test_ended_sessions_are_replaced_transparently(database: PostgresDatabase, postgres_url: str) -> None:
    assert database.transact(increment) == 1
    assert database.read(lambda tx: tx.get(b"n")) == b"1"
    end_every_session(postgres_url)
    assert database.transact(increment) == 2
    assert database.read(lambda tx: tx.get(b"n")) == b"2"


def test_a_transaction_whose_session_ends_is_run_again(database: PostgresDatabase, postgres_url: str) -> None:
    runs = 0

    def work(tx: Transaction) -> int:
        nonlocal runs
        runs += 1
        number = increment(tx)
        if runs == 1:
            end_every_session(postgres_url)
            tx.get(b"other")
        return number

    assert database.transact(work) == 1
    assert runs == 2


def test_a_lost_answer_to_a_commit_is_unknown_not_a_success(
    database: PostgresDatabase, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit whose answer is lost must not be retried blindly, nor reported as done."""
    database.transact(increment)
    session = session_of(database)
    receive, commit = session._receive, session.commit

    def receive_and_cut() -> Any:
        receive()
        raise psycopg.OperationalError("cut")

    def commit_and_cut(tx: Transaction, log_position: bytes) -> None:
        monkeypatch.setattr(session, "_receive", receive_and_cut)
        commit(tx, log_position)

    monkeypatch.setattr(session, "commit", commit_and_cut)
    with pytest.raises(CommitUnknown, match="check whether"):
        database.transact(increment)
    monkeypatch.undo()
    assert database.transact(increment) == 3


def test_a_watch_receives_commits_of_others_and_survives_a_broken_connection(
    database: PostgresDatabase, postgres_url: str
) -> None:
    with PostgresDatabase(postgres_url) as other, database.watch(b"prefix/") as watch:
        while watch.wait(0):
            pass
        other.transact(put, b"prefix/a")
        assert watch.wait(60)
        end_every_session(postgres_url)
        assert watch.wait(60)  # It listens again, and fires because it may have missed commits.
        other.transact(put, b"prefix/b")
        assert watch.wait(60)


def test_a_commit_of_many_long_keys_still_wakes_the_right_watches(
    database: PostgresDatabase, postgres_url: str
) -> None:
    def put_many(tx: Transaction) -> None:
        for number in range(500):
            tx.put(b"prefix/" + b"%d" % number * 300, b"")

    with PostgresDatabase(postgres_url) as other, database.watch(b"prefix/") as watch:
        while watch.wait(0):
            pass
        other.transact(put_many)
        assert watch.wait(60)


def test_a_missing_server_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.CONNECT_ATTEMPTS_MAX", 2)
    with pytest.raises(Unreachable, match="start it, or correct the URL"):
        PostgresDatabase("postgresql://user@127.0.0.1:1/nothing")


def test_a_missing_database_is_reported_without_retries(postgres_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waiting cannot help"))
    with pytest.raises(Unreachable, match="does not exist"):
        PostgresDatabase(postgres_server.replace("/postgres?", "/no_such_database?"))


def test_a_malformed_url_is_refused() -> None:
    with pytest.raises(InvalidUrl, match="is invalid"):
        PostgresDatabase("postgresql://host/database?no_such_option=1")


def test_tables_may_be_created_concurrently(postgres_url: str) -> None:
    failures: list[BaseException] = []

    def open_and_write(number: int) -> None:
        try:
            with PostgresDatabase(postgres_url) as database:
                database.transact(put, b"%d" % number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_and_write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_missing_table_is_reported_and_use_recovers(database: PostgresDatabase, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE fastness_kv RENAME TO hidden")
        with pytest.raises(DatabaseFailed, match="fastness_kv"):
            database.transact(increment)
        with pytest.raises(DatabaseFailed, match="fastness_kv"):
            database.transact(put, b"k")
        connection.execute("ALTER TABLE hidden RENAME TO fastness_kv")
    assert database.transact(increment) == 1


def test_a_function_that_catches_a_conflict_is_run_again(postgres_url: str) -> None:
    """Even if a function catches errors, only what PostgreSQL committed is reported as done."""
    with PostgresDatabase(postgres_url) as one, PostgresDatabase(postgres_url) as other:
        one.transact(put, b"n", b"0")
        runs = 0

        def work(tx: Transaction) -> str:
            nonlocal runs
            runs += 1
            try:
                number = int(tx.get(b"n") or b"0")
                if runs == 1:
                    other.transact(increment)
                tx.get(b"anything")
                tx.put(b"n", b"%d" % (number + 1))
            except Exception:
                return "swallowed"
            return "done"

        assert one.transact(work) == "done"
        assert one.read(lambda tx: tx.get(b"n")) == b"2"
        assert runs == 2


def test_a_transaction_that_always_conflicts_fails(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.CONFLICT_RETRIES_MAX", 3)
    with (
        PostgresDatabase(postgres_url, isolation="serializable") as one,
        PostgresDatabase(postgres_url, isolation="serializable") as other,
    ):

        def work(tx: Transaction) -> None:
            increment(tx)
            other.transact(increment)

        with pytest.raises(TransactionConflict, match="3 times"):
            one.transact(work)
        assert other.read(lambda tx: tx.get(b"n")) == b"4"


@pytest.mark.thorough  # test_a_paused_node_blocks_only_what_it_holds_and_not_for_long has one other transaction.
def test_a_paused_transaction_elsewhere_does_not_refuse_callers(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for its locks until PostgreSQL ends it."""
    monkeypatch.setattr("fastness.limits.IDLE_TRANSACTION_SECONDS_MAX", 1.0)
    inside, resume, runs = threading.Event(), threading.Event(), []

    def pause(tx: Transaction) -> int:
        number = increment(tx, b"paused")
        runs.append(number)
        if len(runs) == 1:
            inside.set()
            assert resume.wait(60)
        return number

    def read_widely(tx: Transaction, number: int) -> None:
        for row in range(0, 112, 4):  # Each in a page of its own, so that each takes a lock.
            tx.get(b"row %03d" % row)
        tx.put(b"result %d" % number, b"")

    with PostgresDatabase(postgres_url) as paused, PostgresDatabase(postgres_url) as healthy:
        for row in range(112):
            healthy.transact(put, b"row %03d" % row, os.urandom(1_900))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(paused.transact, pause)
            assert inside.wait(60)
            try:
                for number in range(900):
                    healthy.transact(read_widely, number)
            finally:
                resume.set()
            assert answer.result(60) == 1
        assert len(runs) == 2, "the healthy process never needed the locks of the paused one"
        assert healthy.read(lambda tx: tx.get(b"paused")) == b"1"
        assert len(healthy.read(lambda tx: tx.scan(b"result", b"resulu", limit=1_000))) == 900


def test_a_row_that_another_process_holds_is_busy_not_failed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.limits.LOCK_WAIT_SECONDS_MAX", 0.05)
    monkeypatch.setattr("fastness.limits.OVERLOAD_SECONDS_MAX", 0.2)
    with PostgresDatabase(postgres_url) as database:
        database.transact(put, b"n", b"7")
        with psycopg.connect(postgres_url) as connection:
            connection.execute("SELECT value FROM fastness_kv FOR UPDATE")
            with pytest.raises(Busy, match="nothing was written"):
                database.transact(put, b"n", b"8")
            with pytest.raises(Busy, match="try again later"):
                database.transact(increment)
            connection.rollback()
        assert database.transact(increment) == 8


def test_a_statement_that_takes_too_long_is_busy_not_failed(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.STATEMENT_SECONDS_MAX", 0.05)
    monkeypatch.setattr("fastness.limits.OVERLOAD_SECONDS_MAX", 0.0)
    with PostgresDatabase(postgres_url) as database:
        with psycopg.connect(postgres_url) as connection:
            connection.execute("LOCK TABLE fastness_kv IN SHARE MODE")
            with pytest.raises(Busy, match="57014"):
                database.transact(put, b"n", b"1")
        assert database.transact(increment) == 1


def test_a_function_that_pauses_in_every_attempt_is_told_so(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.IDLE_TRANSACTION_SECONDS_MAX", 0.25)
    with PostgresDatabase(postgres_url) as database:
        attempts = 0

        def pause(tx: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            increment(tx)
            session = session_of(database)
            while session.is_usable:  # Ends when PostgreSQL has ended the session.
                pass

        with pytest.raises(Busy, match="Do slow work before the transaction"):
            database.transact(pause)
        assert attempts == 3
        assert database.transact(increment) == 1


def test_a_commit_of_a_session_that_was_ended_as_idle_is_run_again(
    database: PostgresDatabase, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ended it before the COMMIT arrived, so nothing is uncertain."""
    monkeypatch.setattr("fastness.limits.IDLE_TRANSACTION_SECONDS_MAX", 0.05)
    database.transact(increment)
    end_every_session(postgres_url)
    database.transact(increment)  # On a session with the short timeout.
    session = session_of(database)
    commit = session.commit

    def wait_and_commit(tx: Transaction, log_position: bytes) -> None:
        while session.is_usable:
            pass
        commit(tx, log_position)

    monkeypatch.setattr(session, "commit", wait_and_commit)
    assert database.transact(increment) == 3
    assert database.read(lambda tx: tx.get(b"n")) == b"3"


def test_callers_beyond_the_queue_limit_are_refused(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.limits.COMMIT_QUEUE_MAX", 5)
    entered, leave = threading.Event(), threading.Event()

    def slow(tx: Transaction) -> None:
        entered.set()
        leave.wait(60)

    blocker = threading.Thread(target=database.transact, args=(slow,))
    blocker.start()
    entered.wait(60)
    waiting = [Job(increment, (), {}, durable=True) for _ in range(5)]
    database._committer.submit(waiting)
    with pytest.raises(Busy, match="nothing was written"):
        database.transact(increment)
    with pytest.raises(Busy):
        asyncio.run(_await(database, increment))
    leave.set()
    blocker.join()
    assert sorted(database._committer.wait(job) for job in waiting) == [1, 2, 3, 4, 5]


async def _await(database: PostgresDatabase, work: Callable[..., object]) -> None:
    await database.transact_async(work)


def test_jobs_that_do_not_fit_run_in_the_next_group(database: PostgresDatabase) -> None:
    """Each of these fits in a transaction; all together do not."""

    def big(tx: Transaction, number: int) -> None:
        for part in range(3):
            tx.put(b"%d %d" % (number, part), bytes(1_000_000))

    async def run_all() -> None:
        await asyncio.gather(*(database.transact_async(big, number) for number in range(10)))

    asyncio.run(run_all())
    assert len(database.read(lambda tx: tx.scan(b"0", b"a", limit=100))) == 30


def test_important_commits_do_not_wait_for_the_disk_and_critical_ones_do(
    database: PostgresDatabase, postgres_url: str
) -> None:
    def setting(tx: Transaction) -> bytes | None:
        increment(tx)
        return value_of(session._send([(b"setting", [])])[0])

    database.transact(increment)
    session = session_of(database)
    session._pq.send_prepare(b"setting", b"SHOW synchronous_commit")
    session._pq.pipeline_sync()
    session._unread += 1
    assert database.transact(setting, tier=Tier.CRITICAL) == b"on"
    assert database.transact(setting, tier=Tier.IMPORTANT) == b"off"
    assert database.transact(setting, tier=Tier.CRITICAL) == b"on"


def test_a_critical_read_makes_what_it_read_durable(database: PostgresDatabase, postgres_url: str) -> None:
    """An answer never contains data that a power loss could revert."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def inserted() -> str:
            row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            assert row is not None
            return str(row[0])

        for _ in range(5):
            database.transact(increment, tier=Tier.IMPORTANT)
            position = inserted()
            database.read(lambda tx: tx.get(b"n"))
            row = connection.execute("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", (position,)).fetchone()
            assert row == (True,)


COUNTING = """
import sys
from fastness.backends.postgres import PostgresDatabase

def increment(tx, key):
    number = int(tx.get(key) or b"0") + 1
    tx.put(key, b"%d" % number)

with PostgresDatabase(sys.argv[1]) as database:
    for step in range(int(sys.argv[2])):
        database.transact(increment, b"counter %d" % (step % 3))
"""


def test_two_processes_lose_no_increment(postgres_url: str, database: PostgresDatabase) -> None:
    processes = [start_python(["-c", COUNTING, postgres_url, "150"]) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    counters = database.read(lambda tx: [int(value) for _, value in tx.scan(b"counter", b"countes", limit=10)])
    assert counters == [100, 100, 100]


def test_the_committer_continues_when_a_loop_is_closed(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "is_closed", lambda: False)  # As if it was closed right after the check.
    closed_loop_job = Job(put, (b"of the loop",), {}, durable=True, loop=loop)
    loop.close()
    database._committer._connection_lock.acquire()
    database._committer.submit([closed_loop_job])
    database._committer._connection_lock.release()
    database.transact(put, b"of a thread")
    assert database.transact(lambda tx: [tx.get(b"of the loop"), tx.get(b"of a thread")]) == [b"1", b"1"]
    assert database._committer._thread.is_alive()
    monkeypatch.undo()


def test_a_signal_in_the_committing_thread_is_not_raised_to_other_callers(database: PostgresDatabase) -> None:
    """They get CommitUnknown; only the interrupted caller gets KeyboardInterrupt."""
    committer = database._committer

    def interrupt(tx: Transaction) -> None:
        raise KeyboardInterrupt

    other = Job(put, (b"other",), {}, durable=True)
    own = Job(interrupt, (), {}, durable=True)
    committer._connection_lock.acquire()
    with committer._wake:  # Without a notify, so that the committer's own thread does not run it.
        committer._jobs.append(other)
    committer._commit_queued(own)
    with pytest.raises(KeyboardInterrupt):
        own.outcome()
    with pytest.raises(CommitUnknown, match="check whether the write was stored"):
        committer.wait(other)
    assert database.transact(increment) == 1


def test_answers_that_a_signal_left_unread_are_not_those_of_the_next_caller(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.transact(put, b"u", b"other")
    database.transact(increment)

    def interrupt() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(session_of(database), "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        database.transact(lambda tx: tx.get(b"u"))
    monkeypatch.undo()
    assert database.transact(increment) == 2


def test_a_repeated_scan_reads_only_what_was_not_read(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Subspace("u", "main", "q", "jobs")
    database.transact(lambda tx: [tx.put(queue.key(number), b"") for number in range(20)])
    session = session_of(database)
    limits_sent: list[int] = []
    send = session._send

    def noting(wanted: Any, **options: Any) -> Any:
        limits_sent.extend(int.from_bytes(values[2], "big") for name, values in wanted if name in (b"scan", b"back"))
        return send(wanted, **options)

    def take(tx: Transaction, count: int, *, reverse: bool) -> list[int]:
        found = tx.scan(*queue.range(), limit=count, reverse=reverse)
        for key, _ in found:
            tx.delete(key)
        return [queue.unpack(key)[0] for key, _ in found]

    def work(tx: Transaction) -> list[list[int]]:
        return [take(tx, count, reverse=reverse) for count, reverse in ((5, False), (3, False), (2, True), (4, True))]

    monkeypatch.setattr(session, "_send", noting)
    assert database.transact(work) == [[0, 1, 2, 3, 4], [5, 6, 7], [19, 18], [17, 16, 15, 14]]
    assert limits_sent == [5, 3, 10, 4]  # Each own deletion may hide a stored pair, so it is read too.
    monkeypatch.undo()
    assert len(database.read(lambda tx: tx.scan(*queue.range(), limit=20))) == 6


@pytest.mark.parametrize("payload", ["", "x", "é", "ff", "00,zz"])
def test_an_invalid_notification_does_not_stop_watches(
    database: PostgresDatabase, postgres_url: str, payload: str
) -> None:
    """Any client can send notifications."""
    with PostgresDatabase(postgres_url) as other, database.watch(b"prefix/") as watch:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))
        other.transact(put, b"prefix/a")
        assert watch.wait(60)
        while watch.wait(0):
            pass
        assert database._listener._listening.is_set()
        other.transact(put, b"prefix/b")
        assert watch.wait(60)


def test_listening_continues_after_an_unexpected_error(
    database: PostgresDatabase, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notify, failed = database._watches.notify, threading.Event()

    def fail_once(*args: Any) -> bool:
        if threading.current_thread().name == "fastness-listener" and not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return notify(*args)

    with PostgresDatabase(postgres_url) as other, database.watch(b"prefix/") as watch:
        while watch.wait(0):
            pass
        monkeypatch.setattr(database._watches, "notify", fail_once)
        other.transact(put, b"prefix/a")
        assert watch.wait(60)  # It listens again, and fires because it may have missed commits.
        assert failed.is_set()
        assert "reconnecting" in caplog.text
        other.transact(put, b"prefix/b")
        assert watch.wait(60)


def test_more_than_a_thousand_open_files_are_supported(postgres_url: str) -> None:
    """Like a server with many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_096, hard), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    held = [os.dup(null) for _ in range(1_100)]
    try:
        with PostgresDatabase(postgres_url) as database, PostgresDatabase(postgres_url) as other:
            assert [database.transact(increment) for _ in range(3)] == [1, 2, 3]
            assert [database.read(lambda tx: tx.get(b"n")) for _ in range(3)] == [b"3"] * 3
            with database.watch(b"prefix/") as watch:
                while watch.wait(0):
                    pass
                other.transact(put, b"prefix/a")
                assert watch.wait(60)
    finally:
        for descriptor in (null, *held):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_committer_continues_after_an_unexpected_error(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail_once(jobs: list[Job]) -> None:
        finish(jobs)
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError

    monkeypatch.setattr(committer, "finish", fail_once)

    async def callers() -> list[int]:
        async with asyncio.timeout(60):
            return [await database.transact_async(increment) for _ in range(3)]

    assert asyncio.run(callers()) == [1, 2, 3]
    assert failed.is_set()
    assert "ZeroDivisionError" in caplog.text
