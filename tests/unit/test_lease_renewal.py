"""The keeper by itself: what it extends, when, and when it stops. Its thread sleeps until the test lets it wake up."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import lease_renewal as keeper_module
from holdfast.errors import Busy, Closed, CommitUnknown, QueueMessageLeaseMismatch, TransactionConflict, Unreachable
from holdfast.lease_renewal import LeaseRenewer
from holdfast.wire.queues import MessageLease

DEADLINE_SECONDS = 30.0  # Nothing here takes long; a thread that does not do what it should must fail the test.


class Bed(threading.Condition):
    """A condition on which a thread sleeps until somebody notifies it; `asleep` has how long it meant to."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep: SimpleQueue[float | None] = SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        self.asleep.put(timeout)
        return super().wait(DEADLINE_SECONDS)


class Message:
    lost = False
    expires_ms = 0


class Night:
    """The keeper, its time, and what it extends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self.bed = Bed()
        self.extended: list[tuple[float, str]] = []
        self.answers: dict[str, Callable[[], int]] = {}
        monkeypatch.setattr(keeper_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        threads = SimpleNamespace(Condition=lambda: self.bed, Thread=threading.Thread)
        monkeypatch.setattr(keeper_module, "threading", threads)
        self.lease_renewer = LeaseRenewer(self.extend)

    def extend(self, universe: str, queue: str, lease: MessageLease, seconds: float) -> int:
        assert (universe, queue) == ("main", "jobs")
        self.extended.append((self.now - 1_000, lease.id))
        return self.answers.get(lease.id, lambda: 7)()

    def keep(self, message: Message, id: str, *, seconds: float = 30.0, cap_seconds: float = 3_600.0) -> Any:
        lease = MessageLease(id, f"{id}-1", 1)
        return self.lease_renewer.keep(message, "main", "jobs", lease, seconds=seconds, cap_seconds=cap_seconds)

    def until_asleep(self) -> float | None:
        """Wait until the keeper has done all that is to be done now; how long it means to sleep."""
        seconds = self.bed.asleep.get(timeout=DEADLINE_SECONDS)
        while not self.bed.asleep.empty():
            seconds = self.bed.asleep.get()
        return seconds

    def move_to(self, seconds: float) -> float | None:
        """Let it be that long after the beginning; how long the keeper means to sleep then."""
        with self.bed:
            self.now = 1_000 + seconds
            self.bed.notify()
        return self.until_asleep()


@pytest.fixture
def night(monkeypatch: pytest.MonkeyPatch) -> Iterator[Night]:
    night = Night(monkeypatch)
    yield night
    night.lease_renewer.close()


def raises(error: Exception) -> Callable[[], int]:
    def answer() -> int:
        raise error

    return answer


def is_running() -> bool:
    return any(thread.name == "holdfast-keeper" for thread in threading.enumerate())


def test_a_lease_is_extended_at_each_third_of_its_visibility(night: Night) -> None:
    """Lesson 31: consumers that forget to extend their lease are the commonest fault."""
    message = Message()
    night.keep(message, "a")
    assert night.until_asleep() == 10
    assert night.move_to(9.9) == pytest.approx(0.1)
    assert night.extended == []
    assert night.move_to(10) == 10
    assert (night.extended, message.expires_ms) == ([(10, "a")], 7)
    night.move_to(20)
    night.move_to(30)
    assert [when for when, _ in night.extended] == [10, 20, 30]


def test_a_keeper_that_woke_up_late_goes_on_from_there(night: Night) -> None:
    message = Message()
    night.keep(message, "a")
    night.until_asleep()
    assert night.move_to(25) == 10
    assert night.extended == [(25, "a")]


def test_each_message_has_its_own_pace(night: Night) -> None:
    messages = [Message(), Message()]
    night.keep(messages[0], "slow", seconds=30)
    assert night.until_asleep() == 10
    night.keep(messages[1], "fast", seconds=6)
    assert night.until_asleep() == 2, "it was woken for the one that is due earlier"
    for seconds in (2, 4, 6, 8):
        night.move_to(seconds)
    assert {id for _, id in night.extended} == {"fast"}
    night.move_to(10)
    assert night.extended.count((10, "slow")) == 1
    assert len(night.extended) == 6


def test_a_message_that_was_settled_is_left_alone(night: Night) -> None:
    message = Message()
    night.keep(message, "a").stop()
    night.until_asleep()
    assert night.move_to(100) is None, "there is nothing to wake up for"
    assert night.extended == []
    assert not message.lost


def test_a_message_whose_handle_is_gone_is_left_alone(night: Night) -> None:
    message = Message()
    night.keep(message, "a")
    night.until_asleep()
    del message
    gc.collect()
    assert night.move_to(10) is None
    assert night.extended == []


def test_the_keeper_does_not_keep_a_handle_alive_that_it_extended(night: Night) -> None:
    message = Message()
    night.keep(message, "a")
    night.until_asleep()
    night.move_to(10)
    del message
    gc.collect()
    assert night.move_to(20) is None
    assert [when for when, _ in night.extended] == [10]


def test_a_message_is_kept_up_to_its_cap(night: Night) -> None:
    message = Message()
    night.keep(message, "a", cap_seconds=25)
    night.until_asleep()
    night.move_to(10)
    night.move_to(20)
    assert night.move_to(30) is None
    assert [when for when, _ in night.extended] == [10, 20]
    assert not message.lost


def test_the_cap_itself_is_too_late(night: Night) -> None:
    message = Message()
    night.keep(message, "a", cap_seconds=10)
    night.until_asleep()
    assert night.move_to(10) is None
    assert night.extended == []


def test_closing_ends_the_thread_and_everything_it_kept(night: Night) -> None:
    messages = [Message(), Message()]
    night.keep(messages[0], "a")
    night.until_asleep()
    assert is_running()
    night.lease_renewer.close()
    assert not is_running()
    night.keep(messages[1], "b")
    assert not is_running(), "a message that comes after the end starts nothing"
    night.lease_renewer.close()
    assert night.extended == []


def test_a_keeper_without_messages_has_no_thread(night: Night) -> None:
    assert not is_running()


@pytest.mark.parametrize("error", [Unreachable("gone"), Busy("full"), TransactionConflict("lost"), MemoryError()])
def test_what_may_work_later_is_tried_again(night: Night, error: Exception) -> None:
    message = Message()
    night.answers["a"] = raises(error)
    night.keep(message, "a")
    night.until_asleep()
    assert night.move_to(10) == 10
    assert not message.lost
    del night.answers["a"]
    night.move_to(20)
    assert [when for when, _ in night.extended] == [10, 20]
    assert message.expires_ms == 7


def test_an_extension_whose_answer_was_lost_is_tried_again(night: Night) -> None:
    """Lesson 32: nobody knows whether it was extended, and extending again does no harm. It is not lost."""
    message = Message()
    night.answers["a"] = raises(CommitUnknown("the answer was lost"))
    night.keep(message, "a")
    night.until_asleep()
    night.move_to(10)
    assert not message.lost
    del night.answers["a"]
    night.move_to(20)
    assert [when for when, _ in night.extended] == [10, 20]


def test_a_message_that_is_somebody_elses_is_lost(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    message = Message()
    night.answers["a"] = raises(QueueMessageLeaseMismatch("whoever has it now will settle it"))
    night.keep(message, "a")
    night.until_asleep()
    with caplog.at_level(logging.WARNING, "holdfast.keeper"):
        assert night.move_to(10) is None
    assert message.lost
    assert "whoever has it now" in caplog.text
    night.move_to(100)
    assert len(night.extended) == 1


def test_a_message_that_was_settled_meanwhile_is_not_lost(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    message = Message()

    def settled_meanwhile() -> int:
        keeping.stop()
        raise QueueMessageLeaseMismatch("it was acknowledged")

    night.answers["a"] = settled_meanwhile
    keeping = night.keep(message, "a")
    night.until_asleep()
    with caplog.at_level(logging.WARNING, "holdfast.keeper"):
        night.move_to(10)
    assert not message.lost
    assert caplog.text == ""


def test_a_plane_that_was_closed_is_no_reason_to_complain(night: Night, caplog: pytest.LogCaptureFixture) -> None:
    message = Message()
    night.answers["a"] = raises(Closed("closed"))
    night.keep(message, "a")
    night.until_asleep()
    with caplog.at_level(logging.WARNING, "holdfast.keeper"):
        assert night.move_to(10) is None
    assert not message.lost
    assert caplog.text == ""


def test_one_message_that_is_lost_does_not_stop_the_others(night: Night) -> None:
    messages = [Message(), Message()]
    night.answers["a"] = raises(QueueMessageLeaseMismatch("gone"))
    night.keep(messages[0], "a")
    night.keep(messages[1], "b")
    night.until_asleep()
    night.move_to(10)
    night.move_to(20)
    assert night.extended == [(10, "a"), (10, "b"), (20, "b")]
    assert [message.lost for message in messages] == [True, False]


def test_closing_waits_for_the_extension_at_hand(night: Night) -> None:
    message, entered, leave = Message(), threading.Event(), threading.Event()

    def slow() -> int:
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)
        return 9

    night.answers["a"] = slow
    night.keep(message, "a")
    night.until_asleep()
    with night.bed:
        night.now += 10
        night.bed.notify()
    assert entered.wait(DEADLINE_SECONDS)
    closing = threading.Thread(target=night.lease_renewer.close)
    closing.start()
    leave.set()
    closing.join(DEADLINE_SECONDS)
    assert not closing.is_alive()
    assert message.expires_ms == 9
    assert not is_running()


def test_a_message_is_received_although_no_thread_can_keep_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    extended: SimpleQueue[str] = SimpleQueue()

    def extend(universe: str, queue: str, lease: MessageLease, seconds: float) -> int:
        extended.put(lease.id)
        return 0

    monkeypatch.setattr(keeper_module, "_NEW_MAX", 4)
    lease_renewer, messages = LeaseRenewer(extend), [Message() for _ in range(10)]
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "holdfast.keeper"):
        patch.setattr(threading.Thread, "start", refuse)
        for number, message in enumerate(messages):
            lease_renewer.keep(
                message, "main", "jobs", MessageLease(f"m{number}", "l", 1), seconds=0.01, cap_seconds=60
            )
    assert len(caplog.records) == 1
    lease_renewer.keep(messages[0], "main", "jobs", MessageLease("m10", "l", 1), seconds=0.01, cap_seconds=60)
    kept = {extended.get(timeout=DEADLINE_SECONDS) for _ in range(5)}
    while len(kept) < 5:
        kept.add(extended.get(timeout=DEADLINE_SECONDS))
    lease_renewer.close()
    assert kept == {"m6", "m7", "m8", "m9", "m10"}, "the last ones that came before, and no more of them"
