"""Group commit by itself: one sync releases everybody it covers, and a failed sync is final."""

import asyncio
import logging
import threading

import pytest

from holdfast.adaptive_batching import LONE_TURNS_MIN
from holdfast.backends.rocksdb.syncs import LogSync, LoopSync, Syncer
from holdfast.errors import CommitUnknown, DatabaseFailed


class Log:
    """A log whose syncs a test lets through, one by one or all at once."""

    def __init__(self, *, free: bool = False) -> None:
        self.commits = 0
        self.syncs = 0
        self.error: Exception | None = None
        self.is_interrupted = False  # Whether Ctrl-C comes during the next sync.
        self.started = threading.Semaphore(0)
        self._gate = threading.Semaphore(1_000_000 if free else 0)
        self.sync_log = LogSync(last_commit=lambda: self.commits, sync=self._sync)

    def commit(self) -> int:
        self.commits += 1
        return self.commits

    def let_one_through(self) -> None:
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
    """Waits for one commit and keeps what it was told."""

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


def test_one_sync_releases_everybody_it_covers_and_the_rest_share_the_next() -> None:
    log = Log()
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    followers = [Waiter(log, log.commit()) for _ in range(20)]
    wait_for_followers(log, 20)
    log.let_one_through()
    leader.join(60)
    assert log.started.acquire(timeout=60)
    log.let_one_through()
    for follower in followers:
        follower.join(60)
        assert not follower.is_alive()
    assert log.syncs == 2
    assert log.sync_log.durable == 21


def test_a_failed_sync_fails_everybody_and_every_later_commit() -> None:
    log = Log()
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    follower = Waiter(log, log.commit())
    wait_for_followers(log, 1)
    log.error = OSError("the device is gone")
    log.let_one_through()
    for waiter in (leader, follower):
        waiter.join(60)
        assert isinstance(waiter.error, CommitUnknown)
        assert "the device is gone" in str(waiter.error)
    with pytest.raises(CommitUnknown):
        log.sync_log.wait(log.commit())
    with pytest.raises(DatabaseFailed, match="open the database again"):
        log.sync_log.check_healthy()
    assert log.syncs == 1  # A second sync could succeed without having written anything.


def test_a_follower_gives_up_after_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.limits.SYNC_WAIT_SECONDS_MAX", 0.01)
    log = Log()
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    with pytest.raises(CommitUnknown, match="check the device"):
        log.sync_log.wait(log.commit())
    log.let_one_through()
    leader.join(60)
    log.let_one_through()
    log.sync_log.wait(2)  # The follower that left did not take the lead with it.
    assert log.sync_log.durable == 2


def test_closing_syncs_what_is_left_and_refuses_later_waits() -> None:
    log = Log(free=True)
    log.commit()
    log.sync_log.close()
    assert log.sync_log.durable == 1
    with pytest.raises(CommitUnknown, match="look whether"):
        log.sync_log.wait(log.commit())


def test_what_is_synced_is_no_failure_because_the_database_was_closed_meanwhile() -> None:
    """The one that led the sync goes on after whoever closes has."""
    log = Log()
    closed = threading.Event()
    log.sync_log.on_sync = lambda seconds: closed.wait(60)
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    closing = threading.Thread(target=log.sync_log.close)
    closing.start()
    wait_for_followers(log, 1)
    log.let_one_through()
    closing.join(60)
    closed.set()
    leader.join(60)
    assert log.sync_log.durable == 1
    assert leader.error is None


@pytest.mark.parametrize("slow_device", [False, True])
def test_the_callers_of_one_turn_of_a_loop_share_a_sync(slow_device: bool) -> None:
    log = Log(free=True)
    log.sync_log.sync_seconds = 1.0 if slow_device else 0.0
    syncer = Syncer(log.sync_log, lambda: log.commits)
    handed_over = 0

    def hand_over(job: object) -> None:
        nonlocal handed_over
        handed_over += 1
        syncer.hand_over(job)

    async def callers() -> None:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), hand_over)

        async def caller() -> None:
            await loop_sync.wait(log.commit())

        await asyncio.gather(*(caller() for _ in range(10)))

    asyncio.run(callers())
    syncer.stop()
    assert log.syncs == 1
    assert handed_over == (1 if slow_device else 0)


async def lone(log: Log) -> LoopSync:
    """A loop that had one caller in each of the last turns."""
    loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), lambda job: None)
    for _ in range(LONE_TURNS_MIN):
        waiting = loop_sync.wait(log.commit())
        assert waiting is not None
        await waiting
    return loop_sync


def test_a_caller_that_is_alone_syncs_at_once_and_shares_again_with_those_who_come() -> None:
    log = Log(free=True)

    async def callers() -> None:
        loop_sync = await lone(log)
        assert loop_sync.wait(log.commit()) is None
        assert log.sync_log.durable == log.commits
        syncs = log.syncs
        others = [loop_sync.wait(log.commit()) for _ in range(5)]
        await asyncio.gather(*filter(None, others))
        assert others.count(None) == 0, "the turn was taken, so there are others"
        assert log.syncs == syncs + 1

    asyncio.run(callers())


def test_a_caller_that_is_alone_learns_of_a_failed_sync() -> None:
    log = Log(free=True)

    async def callers() -> None:
        loop_sync = await lone(log)
        log.error = OSError("gone")
        with pytest.raises(CommitUnknown):
            loop_sync.wait(log.commit())

    asyncio.run(callers())


def test_a_loop_learns_of_a_failed_sync() -> None:
    log = Log(free=True)
    log.error = OSError("gone")

    async def callers() -> list[object]:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), lambda job: None)
        return await asyncio.gather(*(loop_sync.wait(log.commit()) for _ in range(3)), return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(callers())] == [CommitUnknown] * 3


def test_stopping_finishes_what_was_handed_over() -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)
    done: list[int] = []
    for number in range(100):
        syncer.hand_over(lambda number=number: done.append(number))
    syncer.stop()
    assert done == list(range(100))


def test_whoever_is_interrupted_in_a_sync_leaves_the_lead_to_others() -> None:
    log = Log()
    log.is_interrupted = True
    leader = Waiter(log, log.commit())
    assert log.started.acquire(timeout=60)
    follower = Waiter(log, log.commit())
    wait_for_followers(log, 1)
    log.let_one_through()
    leader.join(60)
    assert isinstance(leader.error, KeyboardInterrupt)
    assert log.sync_log.durable == 0, "nobody knows how far the sync came"
    log.let_one_through()
    follower.join(60)
    assert not follower.is_alive()
    assert follower.error is None
    log.let_one_through()
    log.sync_log.wait(log.commit())
    log.sync_log.close()
    assert log.sync_log.durable == 3


def test_whoever_is_interrupted_while_others_sync_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lead in hand or without it: nobody waits for somebody who has gone."""
    log = Log(free=True)
    log.sync_log._led = True
    gates: list[threading.Lock] = []

    class Gate:
        """What a follower waits at; the signal comes before it is woken, or just after."""

        def __init__(self) -> None:
            gates.append(self)

        def acquire(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return True
            if len(gates) == 2:
                log.sync_log._hand_on(0)  # Whoever led gives it the lead.
            raise KeyboardInterrupt

        def release(self) -> None:
            """It is woken."""

    monkeypatch.setattr("holdfast.backends.rocksdb.syncs.threading.Lock", Gate)
    with pytest.raises(KeyboardInterrupt):
        log.sync_log.wait(log.commit())
    assert not log.sync_log._followers
    assert log.syncs == 0
    with pytest.raises(KeyboardInterrupt):
        log.sync_log.wait(log.commit())
    assert log.sync_log.durable == 2
    assert not log.sync_log._led


def test_whoever_cannot_hear_of_a_sync_fails_nobody_and_is_told_of_none_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log(free=True)
    told: list[float] = []

    def hear(seconds: float) -> None:
        told.append(seconds)
        raise ValueError("no ear")

    log.sync_log.on_sync = hear
    with caplog.at_level(logging.ERROR, "holdfast.syncs"):
        log.sync_log.wait(log.commit())
        log.sync_log.wait(log.commit())
    assert log.sync_log.durable == 2
    assert len(told) == 1
    assert "no ear" in caplog.text


def test_callers_of_a_loop_are_answered_although_the_database_was_closed_meanwhile() -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)

    async def callers() -> None:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), syncer.hand_over)
        loop_sync._aside = 2  # The device is slow, so a thread syncs.
        await asyncio.wait_for(loop_sync.wait(log.commit()), 60)
        waiting = loop_sync.wait(log.commit())
        log.sync_log.close()
        syncer.stop()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(callers())
    assert log.sync_log.durable == 2


def test_where_no_thread_can_be_had_whoever_commits_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)

    async def callers() -> None:
        loop_sync = LoopSync(log.sync_log, asyncio.get_running_loop(), syncer.hand_over)
        loop_sync._aside = 1
        await asyncio.wait_for(loop_sync.wait(log.commit()), 60)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        log.commit()
        syncer.sync_soon()
        assert log.sync_log.durable == 1
        asyncio.run(callers())
        assert log.sync_log.durable == 2
    done = threading.Event()
    syncer.hand_over(done.set)
    assert done.wait(60), "as soon as a thread can be had, it does"
    syncer.stop()


def test_the_syncer_goes_on_after_a_job_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)
    done = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    syncer.hand_over(fail)
    syncer.hand_over(done.set)
    assert done.wait(60)
    syncer.stop()
    assert "ZeroDivisionError" in caplog.text


def test_callers_of_a_loop_hear_of_a_wait_that_failed_in_a_way_that_nobody_thought_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(free=True)
    syncer = Syncer(log.sync_log, lambda: log.commits)

    def fail(commit: int) -> None:
        raise ZeroDivisionError

    async def callers() -> list[object]:
        sync = LoopSync(log.sync_log, asyncio.get_running_loop(), syncer.hand_over)
        sync._aside = 100  # The thread syncs, not the loop.
        waits = [sync.wait(log.commit(), alone=False) for _ in range(3)]
        async with asyncio.timeout(60):
            failed = await asyncio.gather(*filter(None, waits), return_exceptions=True)
            monkeypatch.undo()
            later = sync.wait(log.commit(), alone=False)
            assert later is not None
            await later
        return failed

    monkeypatch.setattr(log.sync_log, "wait", fail)
    failed = asyncio.run(callers())
    assert [type(each) for each in failed] == [ZeroDivisionError] * 3
    syncer.stop()
