"""Two PostgreSQL servers, one of which fails: nothing acknowledged is lost, and clients continue by themselves."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.backends.postgres import PostgresDatabase
from fastness.backends.postgres.connections import connection_parameters
from fastness.errors import CommitUnknown, FastnessError, InvalidArgument, Unreachable
from fastness.kv import Transaction
from fastness.layers import lineages
from fastness.tiers import Tier
from tests.faults.postgres_pair import postgres_pair, until
from tests.support.fences import Issued
from tests.support.forked import run_python
from tests.support.server_process import Server

DEADLINE_SECONDS = 120.0  # A generous deadline for what the tests wait for.
WRITERS = 4


@pytest.fixture(scope="module")
def running_pair() -> Iterator[Any]:
    with postgres_pair() as pair:
        yield pair


@pytest.fixture
def pair(running_pair: Any) -> Any:
    """A primary and its synchronous standby, with an empty database."""
    running_pair.renew()
    return running_pair


@pytest.fixture(autouse=True)
def logs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def put(tx: Transaction, key: bytes, value: bytes = b"1") -> None:
    tx.put(key, value)


def increment(tx: Transaction, key: bytes = b"n") -> int:
    number = int(tx.get(key) or b"0") + 1
    tx.put(key, b"%d" % number)
    return number


class Writer:
    """Puts numbered messages and states through a server until it is stopped; knows which were acknowledged."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.acknowledged: list[int] = []
        self.unknown: list[int] = []  # Neither acknowledged nor refused.
        self.errors: list[FastnessError] = []
        self.acknowledged_at: list[float] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with fastness.connect(self._url, patience_seconds=60.0) as plane:
            number = 0
            while not self._stop.is_set():
                try:
                    plane.queue("jobs").put({"writer": self.name, "number": number})
                    plane.state(self.name).update({"number": number})
                except FastnessError as error:
                    self.errors.append(error)
                    self.unknown.append(number)
                else:
                    self.acknowledged.append(number)
                    self.acknowledged_at.append(time.monotonic())
                number += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def has_acknowledged(writer: Writer, count: int) -> bool:
    return len(writer.acknowledged) >= count


def first_after(moment: float, writers: list[Writer]) -> float:
    """Wait until every writer was acknowledged after `moment`; returns the seconds that the last of them needed."""

    def seconds() -> list[float]:
        found = [next((at for at in list(each.acknowledged_at) if at > moment), None) for each in writers]
        return [at - moment for at in found if at is not None] if None not in found else []

    found: list[float] = until(seconds, "every writer to be back")
    return max(found)


def check_nothing_lost(url: str, writers: list[Writer]) -> int:
    """Every acknowledged message is stored exactly once; a message that was refused or unknown at most once."""
    with fastness.open(url) as plane:
        stored: dict[str, list[int]] = {writer.name: [] for writer in writers}
        while messages := plane.queue("jobs").receive_many(256, visibility_seconds=3_600):
            for message in messages:
                body = message.json()
                stored[body["writer"]].append(body["number"])
        for writer in writers:
            found = stored[writer.name]
            assert len(found) == len(set(found)), f"{writer.name}: a message was stored twice"
            assert set(writer.acknowledged) <= set(found), f"{writer.name}: an acknowledged message is lost"
            assert set(found) <= {*writer.acknowledged, *writer.unknown}
            last = plane.state(writer.name).get()
            assert last is not None
            assert last.value["number"] >= writer.acknowledged[-1], f"{writer.name}: an acknowledged state is lost"
    return sum(map(len, stored.values()))


def readiness(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            json.load(error)
            return error.code


def test_a_failover_under_load_loses_nothing_that_was_acknowledged(pair: Any, tmp_path: Path) -> None:
    with ExitStack() as running:
        server = Server(tmp_path, data=pair.url)
        running.callback(server.kill)
        assert readiness(server.url) == 200
        writers = [Writer(server.url, f"writer-{number}") for number in range(WRITERS)]
        for writer in writers:
            running.callback(writer.stop)
        for writer in writers:
            until(partial(has_acknowledged, writer, 20), "every writer to write")
        pair.primary.kill()
        until(lambda: readiness(server.url) == 503, "the server to be not ready")
        pair.standby.promote()
        promoted = time.monotonic()
        pair.primary, pair.standby = pair.standby, pair.primary
        back_seconds = first_after(promoted, writers)
        until(lambda: readiness(server.url) == 200, "the server to be ready")
        for writer in writers:
            writer.stop()
        assert "unexpected" not in server.log()
        print(f"all writers were back {back_seconds:.2f} s after the promotion")
        assert not any(writer.errors for writer in writers), [writer.errors for writer in writers]
    assert check_nothing_lost(pair.url, writers) >= sum(len(writer.acknowledged) for writer in writers)


@pytest.mark.rotating
def test_a_consumer_that_waits_is_woken_after_a_failover(pair: Any, tmp_path: Path) -> None:
    with ExitStack() as running:
        server = Server(tmp_path, data=pair.url)
        running.callback(server.kill)
        plane = running.enter_context(fastness.connect(server.url))
        pool = running.enter_context(ThreadPoolExecutor(1))
        receiving = pool.submit(plane.queue("jobs").receive, wait_seconds=DEADLINE_SECONDS)
        until(lambda: plane.queue("jobs").stats().waiting_consumers == 1, "the consumer to wait")
        pair.fail_over()
        plane.queue("jobs").put("first")
        message = receiving.result(DEADLINE_SECONDS)
        assert message is not None
        assert message.json() == "first"
        message.ack()
        assert "unexpected" not in server.log()


def cancel_waiting_commit(pair: Any) -> None:
    """End the wait of a commit for the standby, as `statement_timeout` and administrators do."""
    waiting = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    until(lambda: pair.primary.query(waiting), "a commit to wait for the standby")


def test_a_commit_that_stops_waiting_for_its_standby_is_unknown(pair: Any) -> None:
    """PostgreSQL answers such a commit with success and a warning."""
    with PostgresDatabase(pair.url) as database, ThreadPoolExecutor(1) as pool:
        database.transact(increment)
        pair.standby.pause()
        for work in (increment, put):  # Of several statements, and of one.
            committing = pool.submit(database.transact, work, b"n")
            cancel_waiting_commit(pair)
            with pytest.raises(CommitUnknown, match="synchronous standby"):
                committing.result(DEADLINE_SECONDS)
        pair.standby.resume()
        assert database.transact(increment) == 2  # The last unknown commit wrote 1.


def test_a_commit_without_a_standby_gets_an_answer_in_bounded_time(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.ANSWER_SECONDS_MAX", 1.0)
    with PostgresDatabase(pair.url) as database:
        database.transact(put, b"k", b"1")
        pair.standby.pause()
        with pytest.raises(CommitUnknown, match="synchronous standby"):
            database.transact(put, b"k", b"2")
        # Others that wait meanwhile do not wait for so long.
        monkeypatch.setattr("fastness.limits.ANSWER_SECONDS_MAX", 2 * DEADLINE_SECONDS)
        monkeypatch.setattr("fastness.limits.UNREPLICATED_SECONDS_MAX", 0.1)
        with pytest.raises(CommitUnknown, match="synchronous standby"):
            database.transact(put, b"k", b"2")
        monkeypatch.setattr("fastness.limits.ANSWER_SECONDS_MAX", 1.0)
        # The commit is visible on the primary only, so a durable read must not answer with it.
        with pytest.raises(Unreachable, match="may be lost"):
            database.read(lambda tx: tx.get(b"k"))
        assert database.read(lambda tx: tx.get(b"k"), tier=Tier.IMPORTANT) == b"2"
        pair.standby.resume()
        assert database.read(lambda tx: tx.get(b"k")) == b"2"


def test_a_keyed_call_is_repeated_until_its_commit_is_known(pair: Any, tmp_path: Path) -> None:
    with ExitStack() as running:
        server = Server(tmp_path, data=pair.url)
        running.callback(server.kill)
        plane = running.enter_context(fastness.connect(server.url))
        plane.queue("jobs").put("first")
        pool = running.enter_context(ThreadPoolExecutor(1))
        pair.standby.pause()
        putting = pool.submit(plane.queue("jobs").put, "second")
        cancel_waiting_commit(pair)
        # The repeated call finds its stored answer. It has to wait for the standby too, since that is all that tells
        # whether the first commit would survive a failover.
        until(
            lambda: pair.primary.query("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"),
            "the repeated call to wait",
        )
        assert not putting.done()
        pair.standby.resume()
        putting.result(DEADLINE_SECONDS)
        assert plane.queue("jobs").stats().ready == 2


def test_a_former_primary_that_still_runs_acknowledges_nothing(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.ANSWER_SECONDS_MAX", 1.0)
    with PostgresDatabase(pair.primary_url) as former:
        former.transact(put, b"k", b"1")
        pair.standby.promote()
        with PostgresDatabase(pair.standby_url) as current:
            assert current.read(lambda tx: tx.get(b"k")) == b"1"
            current.transact(put, b"k", b"2")
            with pytest.raises(Unreachable, match="may be lost"):  # It would be 1.
                former.read(lambda tx: tx.get(b"k"))
            with pytest.raises(CommitUnknown):
                former.transact(put, b"k", b"3")
            assert current.read(lambda tx: tx.get(b"k")) == b"2"


def test_a_server_that_became_read_only_is_left_for_the_next_primary(pair: Any) -> None:
    with PostgresDatabase(pair.url) as database, ThreadPoolExecutor(1) as pool:
        assert database.transact(increment) == 1
        pair.primary.set("default_transaction_read_only", "on")
        incrementing = pool.submit(database.transact, increment)
        with pytest.raises(Unreachable):
            database.check_reachable()
        pair.primary.set("default_transaction_read_only", "off")
        assert incrementing.result(DEADLINE_SECONDS) == 2
        database.check_reachable()


def test_a_failover_issues_no_fence_again(pair: Any) -> None:
    issued = Issued()
    with PostgresDatabase(pair.url) as database:
        issued.more(database)
        pair.fail_over()
        issued.more(database)
    with PostgresDatabase(pair.url) as restarted:
        issued.more(restarted)


def test_a_failover_to_a_standby_that_lost_commits_issues_no_fence_again_once_it_is_marked(pair: Any) -> None:
    """The standby was not synchronous. A process that has issued what was lost need not be restarted."""
    issued = Issued()
    with PostgresDatabase(pair.url) as database:
        issued.more(database)
        until(lambda: is_standby_current(pair), "the standby to replay")
        pair.primary.set("synchronous_standby_names", "")
        pair.standby.set("primary_conninfo", "")
        until(lambda: not pair.primary.query("SELECT count(*) FROM pg_stat_replication"), "the end of the replication")
        issued.more(database)
        pair.fail_over()
        database.transact(lineages.begin, "copied")
        issued.more(database)


def test_watches_fire_after_a_failover(pair: Any) -> None:
    with PostgresDatabase(pair.url) as database, database.watch(b"prefix/") as watch:
        while watch.wait(0):
            pass
        pair.fail_over()
        assert watch.wait(DEADLINE_SECONDS)  # It may have missed commits.
        while watch.wait(0):
            pass
        with PostgresDatabase(pair.url) as other:
            other.transact(put, b"prefix/a")
        assert watch.wait(DEADLINE_SECONDS)


def test_an_outage_that_lasts_is_an_error_and_its_end_is_noticed(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.FAILOVER_SECONDS_MAX", 1.0)
    with PostgresDatabase(pair.url) as database:
        assert database.transact(increment) == 1
        pair.primary.kill()
        for _ in range(3):
            with pytest.raises(Unreachable, match="as a primary"):
                database.transact(increment)
        with pytest.raises(Unreachable):
            database.check_reachable()
        pair.standby.promote()
        assert database.transact(increment) == 2
        assert database.read(lambda tx: tx.get(b"n")) == b"2"


def is_reachable(database: PostgresDatabase) -> bool:
    with suppress(Unreachable):
        database.check_reachable()
        return True
    return False


@pytest.mark.rotating
def test_a_hung_server_is_not_ready(pair: Any) -> None:
    with PostgresDatabase(pair.url) as database:
        database.check_reachable()
        pair.primary.pause()
        with pytest.raises(Unreachable, match="does not answer"):
            database.check_reachable()
        pair.primary.resume()
        until(lambda: is_reachable(database), "the check to succeed")


# Reads from a standby.


def is_standby_current(pair: Any) -> bool:
    """Whether the standby has replayed everything that the primary has written."""
    position = pair.primary.query("SELECT pg_current_wal_lsn()")
    return bool(pair.standby.query(f"SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"))


def test_reads_that_may_be_stale_come_from_the_standby(pair: Any) -> None:
    with fastness.open(pair.url, read_from="standby") as plane, fastness.open(pair.url) as current:
        plane.queue("jobs").put("first")
        plane.state("counter").update({"number": 1})
        until(lambda: is_standby_current(pair), "the standby to replay")
        assert plane.queue("jobs").stats().ready == 1
        pair.standby.query("SELECT pg_wal_replay_pause()")
        until(lambda: pair.standby.query("SELECT pg_get_wal_replay_pause_state()") == "paused", "the pause")
        plane.queue("jobs").put("second")
        plane.state("counter").update({"number": 2})

        assert (plane.queue("jobs").stats().ready, current.queue("jobs").stats().ready) == (1, 2)
        assert [each.payload for each in plane.queue("jobs").peek()] == [b'"first"']
        assert plane.state("counter").get().value == {"number": 1}
        # What is no stale read is current: here a delivery, and its lease.
        messages = plane.queue("jobs").receive_many(10)
        assert [message.json() for message in messages] == ["first", "second"]
        for message in messages:
            message.ack()

        status = until(lambda: standby_of(plane).lag_ms and standby_of(plane), "the lag")
        assert status.answers
        assert status.position == pair.standby.query("SELECT pg_last_wal_replay_lsn()::text")
        assert status.lag_ms > 0
        pair.standby.query("SELECT pg_wal_replay_resume()")
        until(lambda: plane.queue("jobs").stats().ready == 0, "the standby to replay")
        until(lambda: standby_of(plane).lag_ms == 0, "the lag to end")
        assert current.storage_status().standby is None


def standby_of(plane: fastness.Plane) -> fastness.StandbyStatus:
    """Where a stale read came from."""
    plane.queue("jobs").stats()
    found = plane.storage_status().standby
    assert found is not None
    return found


def test_stale_reads_fall_back_to_the_primary(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.STANDBY_PAUSE_SECONDS", 0.1)
    with fastness.open(pair.url, read_from="standby") as plane:
        plane.queue("jobs").put("first")
        until(lambda: plane.queue("jobs").stats().ready == 1, "the standby to replay")
        until(lambda: standby_of(plane).answers, "the position")
        pair.fail_over()
        # The former standby is the primary, and there is no other server.
        assert plane.queue("jobs").stats().ready == 1
        plane.queue("jobs").put("second")
        until(lambda: not standby_of(plane).answers, "the primary to serve stale reads")
        assert plane.queue("jobs").stats().ready == 2
        pair.add_standby()
        until(lambda: standby_of(plane).answers, "the new standby")


@pytest.mark.rotating
async def test_a_server_reads_from_the_standby(pair: Any, tmp_path: Path) -> None:
    with ExitStack() as running:
        server = Server(tmp_path, data=pair.url, read_from="standby")
        running.callback(server.kill)
        async with fastness.connect_async(server.url) as plane:
            await plane.queue("jobs").put("first")
            until(lambda: is_standby_current(pair), "the standby to replay")
            pair.standby.query("SELECT pg_wal_replay_pause()")
            until(lambda: pair.standby.query("SELECT pg_get_wal_replay_pause_state()") == "paused", "the pause")
            await plane.queue("jobs").put("second")
            assert (await plane.queue("jobs").stats()).ready == 1
            assert len(await plane.queue("jobs").peek()) == 1
            assert await plane.queues() == ["jobs"]
            assert b"fastness_standby_answers 1.0" in server.get("/metrics")[2]
            pair.standby.query("SELECT pg_wal_replay_resume()")


@pytest.mark.parametrize(("url", "read_from"), [("memory:", "standby"), ("postgresql://localhost/x", "both")])
def test_a_wrong_source_of_reads_is_refused(url: str, read_from: str) -> None:
    with pytest.raises(InvalidArgument, match="read_from"):
        fastness.open(url, read_from=read_from)


# URLs with several hosts.


def run_cli(*arguments: str) -> str:
    done = run_python(["-m", "fastness.cli", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rotating
def test_every_command_takes_a_url_with_several_hosts(pair: Any, tmp_path: Path) -> None:
    objects = f"dir:{tmp_path / 'objects'}"
    run_cli("--url", f"dir:{tmp_path / 'plane'}", "queue", "put", "jobs", '"first"')
    run_cli("migrate", f"dir:{tmp_path / 'plane'}", pair.url, "--objects", objects)
    pair.fail_over()  # The second host is the primary now.
    assert "first" in run_cli("--url", pair.url, "queue", "peek", "jobs")
    run_cli("migrate", pair.url, f"dir:{tmp_path / 'back'}", "--objects", objects)
    assert "first" in run_cli("--url", f"dir:{tmp_path / 'back'}", "queue", "peek", "jobs")


def test_options_of_the_url_replace_the_defaults() -> None:
    defaults = connection_parameters("postgresql://user@a,b/plane")
    assert (defaults["target_session_attrs"], defaults["connect_timeout"]) == ("read-write", "5")
    assert connection_parameters("postgresql://user@a/plane")["target_session_attrs"] == "primary"
    given = connection_parameters("postgresql://user@a,b/plane?target_session_attrs=any&connect_timeout=9")
    assert (given["target_session_attrs"], given["connect_timeout"]) == ("any", "9")


# Nightly.


@pytest.mark.nightly
def test_twenty_failovers_under_load_lose_nothing(pair: Any, tmp_path: Path) -> None:
    """Each time the former primary becomes the standby, and the next failover returns to it."""
    with ExitStack() as running:
        server = Server(tmp_path, data=pair.url)
        running.callback(server.kill)
        writers = [Writer(server.url, f"writer-{number}") for number in range(WRITERS)]
        for writer in writers:
            running.callback(writer.stop)
        seconds: list[float] = []
        for _ in range(20):
            goals = {writer: len(writer.acknowledged) + 20 for writer in writers}
            for writer, goal in goals.items():
                until(partial(has_acknowledged, writer, goal), "every writer to write")
            seconds.append(first_after(pair.fail_over(), writers))
            pair.add_standby()
        for writer in writers:
            writer.stop()
        print(f"all writers were back {max(seconds):.2f} s after a promotion, at most")
        assert not any(writer.errors for writer in writers), [writer.errors for writer in writers]
    assert check_nothing_lost(pair.url, writers) >= sum(len(writer.acknowledged) for writer in writers)
