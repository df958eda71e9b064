"""Group commit: one sync releases all waiters it covers, and a failed sync is final."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial

import pytest

from fastness.adaptive_batching import SINGLE_CALLER_TICKS_MIN
from fastness.backends.rocksdb.log_sync import LogSync, LoopSync, Syncer
from fastness.errors import CommitUnknown, DatabaseFailed


class Log:
    """A log whose syncs a test releases, one by one or all at once."""

    def __init__(self, *, free: bool = False) -> None:
        self.commits = 0
        self.syncs = 0
        self.error: Exception | None = None
        self.is_interrupted = False  # Whether Ctrl-C arrives during the next sync.
        self.started = threading.Semaphore(0)
        self._gate = threading.Semaphore(1_000_000 if free else 0)
        self.sync_log = LogSync(last_commit=lambda: self.commits, sync=self._sync, on_durable=lambda commit: None)

    def commit(self) -> int:
        self.commits += 1
        return self.commits

    def release_one_sync(self) -> None:
        self._gate.release()

    def _sync(self) -> None:
        self.started.release()
        assert self._gate.acquire(timeout=60)
        self.syncs += 1
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error


class Waiter(threading.Thread):
    """Waits for one commit and keeps the error."""

    def __init__(self, log: Log, commit: int) -> None:
        super().__init__(daemon=True)
        self.log, self.commit_number = log, commit
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.log.sync_log.wait(self.commit_number)
        except BaseException as error:
            self.error = error


def committed(loop_sync: LoopSync, log: Log) -> "asyncio.Future[None]":
    """Done once a new commit is durable."""
    waiting = loop_sync.wait(log.commit())
    assert waiting is not None
    return waiting


def wait_for_followers(log: Log, count: int) -> None:
    while len(log.sync_log._followers) < count:
        pass


def test_a_durable_commit_is_not_waited_for() -> None:
    log = Log(free=True)
    log.sync_log.wait(0)
    assert log.syncs == 0
    log.sync_log.wait(log.commit())
    log.sync_log.wait(1)
    assert log.syncs == 1


def test_one_sync_releases_all_covered_waiters_and_the_rest_share_the_next() -> None:
    log = Log()
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    followers = [Waiter(log, log.commit()) for _ in range(20)]
    wait_for_followers(log, 20)
    log.release_one_sync()
    leader.join(60)
    assert log.started.acquire(timeout=60)
    log.release_one_sync()
    for follower in followers:
        follower.join(60)
        assert not follower.is_alive()
    assert log.syncs == 2
    assert log.sync_log.durable == 21


def test_a_failed_sync_fails_all_waiters_and_every_later_commit() -> None:
    log = Log()
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    follower = Waiter(log, log.commit())
    wait_for_followers(log, 1)
    log.error = OSError("the device is gone")
    log.release_one_sync()
    for waiter in (leader, follower):
        waiter.join(60)
        assert isinstance(waiter.error, CommitUnknown)
        assert "the device is gone" in str(waiter.error)
    with pytest.raises(CommitUnknown):
        log.sync_log.wait(log.commit())
    with pytest.raises(DatabaseFailed, match="open the database again"):
        log.sync_log.check_healthy()
    assert log.syncs == 1  # A second sync could succeed without having written anything.


def test_a_follower_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.limits.SYNC_WAIT_SECONDS_MAX", 0.01)
    log = Log()
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    with pytest.raises(CommitUnknown, match="check the device"):
        log.sync_log.wait(log.commit())
    log.release_one_sync()
    leader.join(60)
    log.release_one_sync()
    log.sync_log.wait(2)  # The follower that timed out did not keep the lead.
    assert log.sync_log.durable == 2


def test_closing_syncs_what_is_left_and_refuses_later_waits() -> None:
    log = Log(free=True)
    log.commit()
    log.sync_log.close()
    assert log.sync_log.durable == 1
    with pytest.raises(CommitUnknown, match="check whether"):
        log.sync_log.wait(log.commit())


def test_a_synced_commit_succeeds_even_if_the_database_is_closed_meanwhile() -> None:
    """The leader continues after close() has finished."""
    log = Log()
    closed = threading.Event()

    def wait_until_closed(seconds: float) -> None:
        closed.wait(60)

    log.sync_log.on_sync = wait_until_closed
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    closing = threading.Thread(target=log.sync_log.close)
    closing.start()
    wait_for_followers(log, 1)
    log.release_one_sync()
    closing.join(60)
    closed.set()
    leader.join(60)
    assert log.sync_log.durable == 1
    assert leader.error is None


@pytest.mark.usefixtures("fast_device")
@pytest.mark.parametrize("slow_device", [False, True])
def test_callers_in_one_loop_tick_share_a_sync(slow_device: bool) -> None:
    log = Log(free=True)
    log.sync_log.sync_seconds = float("inf") if slow_device else 0.0
    syncer = Syncer(log.sync_log, lambda: log.commits)
    submitted = 0

    def submit(job: Callable[[], None]) -> None:
        nonlocal submitted
        submitted += 1
        syncer.submit(job)

    async def callers() -> None:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), submit)

        async def caller() -> None:
            await committed(loop_sync, log)

        await asyncio.gather(*(caller() for _ in range(10)))

    asyncio.run(callers())
    syncer.stop()
    assert log.syncs == 1
    assert submitted == (1 if slow_device else 0)


@pytest.fixture
def fast_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sync counts as slow, however busy the machine is, so the loop never leaves one to the syncer thread."""
    monkeypatch.setattr("fastness.limits.INLINE_SYNC_SECONDS_MAX", float("inf"))


async def loop_with_single_callers(log: Log) -> LoopSync:
    """A LoopSync that had one caller in each of its last ticks."""
    loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), unexpected_job)
    for _ in range(SINGLE_CALLER_TICKS_MIN):
        await committed(loop_sync, log)
    return loop_sync


def unexpected_job(job: object) -> None:
    raise AssertionError("the loop syncs inline")


@pytest.mark.usefixtures("fast_device")
def test_a_single_caller_syncs_at_once_and_later_callers_share_a_sync() -> None:
    log = Log(free=True)

    async def callers() -> None:
        loop_sync = await loop_with_single_callers(log)
        assert loop_sync.wait(log.commit()) is None
        assert log.sync_log.durable == log.commits
        syncs = log.syncs
        others = [loop_sync.wait(log.commit()) for _ in range(5)]
        await asyncio.gather(*filter(None, others))
        assert others.count(None) == 0, "a second caller in one tick turns batching on"
        assert log.syncs == syncs + 1

    asyncio.run(callers())


@pytest.mark.usefixtures("fast_device")
def test_a_failed_sync_is_raised_to_a_single_caller() -> None:
    log = Log(free=True)

    async def callers() -> None:
        loop_sync = await loop_with_single_callers(log)
        log.error = OSError("gone")
        with pytest.raises(CommitUnknown):
            loop_sync.wait(log.commit())

    asyncio.run(callers())


@pytest.mark.usefixtures("fast_device")
def test_a_failed_sync_is_raised_to_all_callers_of_a_loop() -> None:
    log = Log(free=True)
    log.error = OSError("gone")

    async def callers() -> list[object]:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), unexpected_job)
        return await asyncio.gather(*(committed(loop_sync, log) for _ in range(3)), return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(callers())] == [CommitUnknown] * 3


def test_stopping_finishes_submitted_jobs() -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)
    done: list[int] = []
    for number in range(100):
        syncer.submit(partial(done.append, number))
    syncer.stop()
    assert done == list(range(100))


def test_a_leader_interrupted_during_a_sync_passes_the_lead_on() -> None:
    log = Log()
    log.is_interrupted = True
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    follower = Waiter(log, log.commit())
    wait_for_followers(log, 1)
    log.release_one_sync()
    leader.join(60)
    assert isinstance(leader.error, KeyboardInterrupt)
    assert log.sync_log.durable == 0, "it is unknown how far the sync came"
    log.release_one_sync()
    follower.join(60)
    assert not follower.is_alive()
    assert follower.error is None
    log.release_one_sync()
    log.sync_log.wait(log.commit())
    log.sync_log.close()
    assert log.sync_log.durable == 3


def test_an_interrupted_follower_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lead or without it: no follower waits for one that has left."""
    log = Log(free=True)
    log.sync_log._has_leader = True
    gates: list[object] = []

    class Gate:
        """A follower's lock. The signal arrives before it is woken, or just after."""

        def __init__(self) -> None:
            gates.append(self)

        def acquire(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return True
            if len(gates) == 2:
                log.sync_log._finish_sync(0)  # The leader passes the lead to it.
            raise KeyboardInterrupt

        def release(self) -> None:
            """Wake the follower."""

    monkeypatch.setattr("fastness.backends.rocksdb.log_sync.threading.Lock", Gate)
    with pytest.raises(KeyboardInterrupt):
        log.sync_log.wait(log.commit())
    assert not log.sync_log._followers
    assert log.syncs == 0
    with pytest.raises(KeyboardInterrupt):
        log.sync_log.wait(log.commit())
    assert log.sync_log.durable == 2
    assert not log.sync_log._has_leader


def test_a_failing_sync_callback_fails_no_commit_and_is_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log(free=True)
    durations: list[float] = []

    def on_sync(seconds: float) -> None:
        durations.append(seconds)
        raise ValueError("on purpose")

    log.sync_log.on_sync = on_sync
    with caplog.at_level(logging.ERROR, "fastness.log_sync"):
        log.sync_log.wait(log.commit())
        log.sync_log.wait(log.commit())
    assert log.sync_log.durable == 2
    assert len(durations) == 1
    assert "on purpose" in caplog.text


def test_waiting_loop_callers_are_answered_when_the_database_is_closed() -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)

    async def callers() -> None:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), syncer.submit)
        loop_sync._thread_batches = 2  # The device is slow, so a thread syncs.
        await asyncio.wait_for(committed(loop_sync, log), 60)
        waiting = committed(loop_sync, log)
        log.sync_log.close()
        syncer.stop()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(callers())
    assert log.sync_log.durable == 2


def test_callers_sync_themselves_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)

    async def callers() -> None:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), syncer.submit)
        loop_sync._thread_batches = 1
        await asyncio.wait_for(committed(loop_sync, log), 60)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        log.commit()
        syncer.sync_soon()
        assert log.sync_log.durable == 1
        asyncio.run(callers())
        assert log.sync_log.durable == 2
    done = threading.Event()
    syncer.submit(done.set)
    assert done.wait(60), "jobs run on a thread again once one can start"
    syncer.stop()


def test_the_syncer_continues_after_a_failed_job(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)
    done = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    syncer.submit(fail)
    syncer.submit(done.set)
    assert done.wait(60)
    syncer.stop()
    assert "ZeroDivisionError" in caplog.text


def test_an_unexpected_error_is_raised_to_the_callers_of_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)

    def fail(commit: int) -> None:
        raise ZeroDivisionError

    async def callers() -> list[BaseException | None]:
        sync = LoopSync(log.sync_log, asyncio.get_running_loop(), syncer.submit)
        sync._thread_batches = 100  # The thread syncs, not the loop.
        waits = [sync.wait(log.commit(), single=False) for _ in range(3)]
        async with asyncio.timeout(60):
            failed = await asyncio.gather(*filter(None, waits), return_exceptions=True)
            monkeypatch.undo()
            later = sync.wait(log.commit(), single=False)
            assert later is not None
            await later
        return failed

    monkeypatch.setattr(log.sync_log, "wait", fail)
    failed = asyncio.run(callers())
    assert [type(each) for each in failed] == [ZeroDivisionError] * 3
    syncer.stop()
