"""LeaseRenewer: what it renews, when, and when it stops. Its thread sleeps until the test wakes it."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from fastness import lease_renewal as renewal_module
from fastness.errors import (
    Busy,
    Closed,
    CommitUnknown,
    FastnessError,
    LeaseConflict,
    LeaseExpired,
    QueueMessageLeaseMismatch,
    TransactionConflict,
    Unreachable,
)
from fastness.lease_renewal import LeaseRenewer
from fastness.wire.leases import LeaseProof
from fastness.wire.locks import LockSession
from fastness.wire.queues import MessageLease

DEADLINE_SECONDS = 30.0  # Bounds every wait, so that a stuck thread fails the test.


class RecordingCondition(threading.Condition):
    """A condition that ignores timeouts: a wait lasts until a notify. `timeouts` records the requested ones."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: SimpleQueue[float | None] = SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.put(timeout)
        return super().wait(DEADLINE_SECONDS)


class Message:
    settled = False
    lost = False
    expires_ms = 0
    lease = MessageLease("m", "m-1", 1)

    def mark_refused(self, code: str) -> None:
        self.lost = True


class HeldLease:
    expires_ms = 0


class RenewerHarness:
    """A LeaseRenewer with a manual clock and recorded extensions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self.condition = RecordingCondition()
        self.extended: list[tuple[float, str]] = []
        self.calls = 0
        self.answers: dict[str, Callable[[], int]] = {}
        monkeypatch.setattr(renewal_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        threads = SimpleNamespace(Condition=lambda: self.condition, Thread=threading.Thread)
        monkeypatch.setattr(renewal_module, "threading", threads)
        self.lease_renewer = LeaseRenewer(self.extend, self.keep)

    def extend(
        self, universe: str, queue: str, leases: list[MessageLease], seconds: float
    ) -> list[int | FastnessError]:
        assert (universe, queue) == ("main", "jobs")
        self.calls += 1
        return [self.extend_one(lease.id) for lease in leases]

    def extend_one(self, id: str) -> int | FastnessError:
        self.extended.append((self.now - 1_000, id))
        try:
            return self.answers.get(id, lambda: 7)()
        except QueueMessageLeaseMismatch as error:
            return error

    def keep(self, proof: LeaseProof | LockSession, seconds: float) -> int:
        assert isinstance(proof, LeaseProof)
        self.extended.append((self.now - 1_000, proof.key))
        return self.answers.get(proof.key, lambda: round(seconds))()

    def hold(self, lease: HeldLease, key: str, *, seconds: float = 30.0) -> Any:
        return self.lease_renewer.hold(lease, LeaseProof(key, "l", 1), seconds=seconds, renewed_at=self.now)

    def start(self, message: Message, id: str, *, seconds: float = 30.0, cap_seconds: float = 3_600.0) -> None:
        self.start_all([message], id, seconds=seconds, cap_seconds=cap_seconds)

    def start_all(
        self, messages: list[Message], ids: str, *, seconds: float = 30.0, cap_seconds: float = 3_600.0
    ) -> None:
        """Renew messages of one delivery; each has an id of one letter, unless there is one message."""
        for message, id in zip(messages, [ids] if len(messages) == 1 else ids, strict=True):
            message.lease = MessageLease(id, f"{id}-1", 1)
        self.lease_renewer.start(messages, "main", "jobs", seconds=seconds, cap_seconds=cap_seconds)

    def wait_until_idle(self) -> float | None:
        """Wait until the renewer has done everything that is due. Returns the timeout of its next wait."""
        seconds = self.condition.timeouts.get(timeout=DEADLINE_SECONDS)
        while not self.condition.timeouts.empty():
            seconds = self.condition.timeouts.get()
        return seconds

    def advance_to(self, seconds: float) -> float | None:
        """Set the time since the start, and wake the renewer. Returns the timeout of its next wait."""
        with self.condition:
            self.now = 1_000 + seconds
            self.condition.notify()
        return self.wait_until_idle()


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[RenewerHarness]:
    harness = RenewerHarness(monkeypatch)
    yield harness
    harness.lease_renewer.close()


def raises(error: Exception) -> Callable[[], int]:
    def answer() -> int:
        raise error

    return answer


def is_running() -> bool:
    return any(thread.name == "fastness-lease-renewal" for thread in threading.enumerate())


def test_a_lease_is_extended_at_each_third_of_its_visibility(harness: RenewerHarness) -> None:
    """Consumers need not extend leases themselves."""
    message = Message()
    harness.start(message, "a")
    assert harness.wait_until_idle() == 10
    assert harness.advance_to(9.9) == pytest.approx(0.1)
    assert harness.extended == []
    assert harness.advance_to(10) == 10
    assert (harness.extended, message.expires_ms) == ([(10, "a")], 7)
    harness.advance_to(20)
    harness.advance_to(30)
    assert [when for when, _ in harness.extended] == [10, 20, 30]


def test_a_late_renewal_schedules_the_next_from_its_own_time(harness: RenewerHarness) -> None:
    message = Message()
    harness.start(message, "a")
    harness.wait_until_idle()
    assert harness.advance_to(25) == 10
    assert harness.extended == [(25, "a")]


def test_each_message_has_its_own_interval(harness: RenewerHarness) -> None:
    messages = [Message(), Message()]
    harness.start(messages[0], "slow", seconds=30)
    assert harness.wait_until_idle() == 10
    harness.start(messages[1], "fast", seconds=6)
    assert harness.wait_until_idle() == 2, "it was woken for the message that is due earlier"
    for seconds in (2, 4, 6, 8):
        harness.advance_to(seconds)
    assert {id for _, id in harness.extended} == {"fast"}
    harness.advance_to(10)
    assert harness.extended.count((10, "slow")) == 1
    assert len(harness.extended) == 6


def test_a_settled_message_is_not_renewed(harness: RenewerHarness) -> None:
    message = Message()
    harness.start(message, "a")
    message.settled = True
    harness.wait_until_idle()
    assert harness.advance_to(100) is None, "nothing is scheduled"
    assert harness.extended == []
    assert not message.lost


def test_a_message_without_a_handle_is_not_renewed(harness: RenewerHarness) -> None:
    message = Message()
    harness.start(message, "a")
    harness.wait_until_idle()
    del message
    gc.collect()
    assert harness.advance_to(10) is None
    assert harness.extended == []


def test_the_renewer_does_not_keep_a_handle_alive(harness: RenewerHarness) -> None:
    message = Message()
    harness.start(message, "a")
    harness.wait_until_idle()
    harness.advance_to(10)
    del message
    gc.collect()
    assert harness.advance_to(20) is None
    assert [when for when, _ in harness.extended] == [10]


def test_a_message_is_renewed_up_to_its_cap(harness: RenewerHarness) -> None:
    message = Message()
    harness.start(message, "a", cap_seconds=25)
    harness.wait_until_idle()
    harness.advance_to(10)
    harness.advance_to(20)
    assert harness.advance_to(30) is None
    assert [when for when, _ in harness.extended] == [10, 20]
    assert not message.lost


def test_a_message_is_not_renewed_at_its_cap(harness: RenewerHarness) -> None:
    message = Message()
    harness.start(message, "a", cap_seconds=10)
    harness.wait_until_idle()
    assert harness.advance_to(10) is None
    assert harness.extended == []


def test_closing_stops_the_thread_and_all_renewals(harness: RenewerHarness) -> None:
    messages = [Message(), Message()]
    harness.start(messages[0], "a")
    harness.wait_until_idle()
    assert is_running()
    harness.lease_renewer.close()
    assert not is_running()
    harness.start(messages[1], "b")
    assert not is_running(), "a message after close() starts no thread"
    harness.lease_renewer.close()
    assert harness.extended == []


def test_a_renewer_without_messages_has_no_thread(harness: RenewerHarness) -> None:
    assert not is_running()


@pytest.mark.parametrize("error", [Unreachable("gone"), Busy("full"), TransactionConflict("lost"), MemoryError()])
def test_a_temporary_error_is_retried(harness: RenewerHarness, error: Exception) -> None:
    message = Message()
    harness.answers["a"] = raises(error)
    harness.start(message, "a")
    harness.wait_until_idle()
    assert harness.advance_to(10) == 10
    assert not message.lost
    del harness.answers["a"]
    harness.advance_to(20)
    assert [when for when, _ in harness.extended] == [10, 20]
    assert message.expires_ms == 7


def test_an_extension_with_a_lost_answer_is_retried(harness: RenewerHarness) -> None:
    """It may have been extended, and extending again is harmless. The message is not lost."""
    message = Message()
    harness.answers["a"] = raises(CommitUnknown("the answer was lost"))
    harness.start(message, "a")
    harness.wait_until_idle()
    harness.advance_to(10)
    assert not message.lost
    del harness.answers["a"]
    harness.advance_to(20)
    assert [when for when, _ in harness.extended] == [10, 20]


def test_a_message_leased_to_another_owner_is_lost(harness: RenewerHarness, caplog: pytest.LogCaptureFixture) -> None:
    message = Message()
    harness.answers["a"] = raises(QueueMessageLeaseMismatch("another consumer has it"))
    harness.start(message, "a")
    harness.wait_until_idle()
    with caplog.at_level(logging.WARNING, "fastness.lease_renewal"):
        assert harness.advance_to(10) is None
    assert message.lost
    assert "another consumer has it" in caplog.text
    harness.advance_to(100)
    assert len(harness.extended) == 1


def test_a_message_settled_during_its_renewal_is_not_lost(
    harness: RenewerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    message = Message()

    def settled_meanwhile() -> int:
        message.settled = True
        raise QueueMessageLeaseMismatch("it was acknowledged")

    harness.answers["a"] = settled_meanwhile
    harness.start(message, "a")
    harness.wait_until_idle()
    with caplog.at_level(logging.WARNING, "fastness.lease_renewal"):
        harness.advance_to(10)
    assert not message.lost
    assert caplog.text == ""


def test_a_closed_plane_logs_nothing(harness: RenewerHarness, caplog: pytest.LogCaptureFixture) -> None:
    message = Message()
    harness.answers["a"] = raises(Closed("closed"))
    harness.start(message, "a")
    harness.wait_until_idle()
    with caplog.at_level(logging.WARNING, "fastness.lease_renewal"):
        assert harness.advance_to(10) is None
    assert not message.lost
    assert caplog.text == ""


def test_a_lost_message_does_not_stop_the_renewal_of_others(harness: RenewerHarness) -> None:
    messages = [Message(), Message()]
    harness.answers["a"] = raises(QueueMessageLeaseMismatch("gone"))
    harness.start(messages[0], "a")
    harness.start(messages[1], "b")
    harness.wait_until_idle()
    harness.advance_to(10)
    harness.advance_to(20)
    assert harness.extended == [(10, "a"), (10, "b"), (20, "b")]
    assert [message.lost for message in messages] == [True, False]


def test_the_messages_of_a_delivery_are_renewed_in_one_call_while_they_are_held(harness: RenewerHarness) -> None:
    messages = [Message() for _ in "abcd"]
    harness.start_all(messages, "abcd")
    harness.wait_until_idle()
    harness.advance_to(10)
    assert (harness.calls, [id for _, id in harness.extended]) == (1, list("abcd"))
    messages[0].settled = True
    harness.answers["b"] = raises(QueueMessageLeaseMismatch("gone"))
    messages.pop()
    gc.collect()
    harness.advance_to(20)
    assert (harness.calls, [id for when, id in harness.extended if when == 20]) == (2, ["b", "c"])
    assert [message.lost for message in messages] == [False, True, False]
    harness.advance_to(30)
    assert (harness.calls, [id for when, id in harness.extended if when == 30]) == (3, ["c"])
    messages[2].settled = True
    assert harness.advance_to(40) is None, "nothing is left to renew"


def test_closing_waits_for_the_current_extension(harness: RenewerHarness) -> None:
    message, entered, leave = Message(), threading.Event(), threading.Event()

    def slow() -> int:
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)
        return 9

    harness.answers["a"] = slow
    harness.start(message, "a")
    harness.wait_until_idle()
    with harness.condition:
        harness.now += 10
        harness.condition.notify()
    assert entered.wait(DEADLINE_SECONDS)
    closing = threading.Thread(target=harness.lease_renewer.close)
    closing.start()
    leave.set()
    closing.join(DEADLINE_SECONDS)
    assert not closing.is_alive()
    assert message.expires_ms == 9
    assert not is_running()


def test_messages_are_received_when_the_renewal_thread_cannot_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    extended: SimpleQueue[str] = SimpleQueue()

    def extend(universe: str, queue: str, leases: list[MessageLease], seconds: float) -> list[int]:
        extended.put(leases[0].id)
        return [0]

    def keep(proof: LeaseProof | LockSession, seconds: float) -> int:
        raise AssertionError("no lease is held")

    monkeypatch.setattr(renewal_module, "_NEW_MAX", 4)
    lease_renewer, messages = LeaseRenewer(extend, keep), [Message() for _ in range(10)]
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fastness.lease_renewal"):
        patch.setattr(threading.Thread, "start", refuse)
        for number, message in enumerate(messages):
            message.lease = MessageLease(f"m{number}", "l", 1)
            lease_renewer.start([message], "main", "jobs", seconds=0.01, cap_seconds=60)
    assert len(caplog.records) == 1
    last = Message()
    last.lease = MessageLease("m10", "l", 1)
    lease_renewer.start([last], "main", "jobs", seconds=0.01, cap_seconds=60)
    extended_ids = {extended.get(timeout=DEADLINE_SECONDS) for _ in range(5)}
    while len(extended_ids) < 5:
        extended_ids.add(extended.get(timeout=DEADLINE_SECONDS))
    lease_renewer.close()
    assert extended_ids == {"m6", "m7", "m8", "m9", "m10"}, "only the newest waiting messages are kept"


# Leases in `with` blocks.


def test_a_held_lease_is_renewed_by_the_thread_of_the_messages(harness: RenewerHarness) -> None:
    message, lease = Message(), HeldLease()
    harness.start(message, "a", seconds=30)
    harness.wait_until_idle()
    renewal = harness.hold(lease, "deploy", seconds=12)
    assert harness.wait_until_idle() == 4, "it was woken for the lease that is due earlier"
    assert sum(thread.name == "fastness-lease-renewal" for thread in threading.enumerate()) == 1
    for seconds in (4, 8, 10, 12):
        harness.advance_to(seconds)
    assert harness.extended == [(4, "deploy"), (8, "deploy"), (10, "a"), (12, "deploy")]
    assert (lease.expires_ms, message.expires_ms, renewal.loss) == (12, 7, None)
    renewal.stop()
    harness.advance_to(100)
    assert harness.extended[4:] == [(100, "a")]
    assert renewal.loss is None, "its holder has stopped the renewal"


def test_an_unanswered_renewal_is_retried_until_the_lease_expires(
    harness: RenewerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    lease = HeldLease()
    harness.answers["deploy"] = raises(Unreachable("the server is gone"))
    renewal = harness.hold(lease, "deploy", seconds=6)
    harness.wait_until_idle()
    assert harness.advance_to(2) == pytest.approx(0.6)
    harness.advance_to(5.8)
    assert renewal.loss is None
    with caplog.at_level(logging.WARNING, "fastness.lease_renewal"):
        assert harness.advance_to(6) is None, "a lost lease is not renewed"
    assert [when for when, _ in harness.extended] == pytest.approx([2, 5.8])
    assert "deploy was lost" in caplog.text
    assert isinstance(renewal.loss, LeaseExpired)
    assert "the server is gone" in str(renewal.loss)


def test_a_lease_without_an_answer_is_lost_when_it_expires(harness: RenewerHarness) -> None:
    """Also while a renewal waits for its answer, and even if that answer arrives later."""
    lease, entered, leave = HeldLease(), threading.Event(), threading.Event()

    def slow() -> int:
        entered.set()
        assert leave.wait(DEADLINE_SECONDS)
        return 9

    harness.answers["deploy"] = slow
    renewal = harness.hold(lease, "deploy", seconds=6)
    harness.wait_until_idle()
    with harness.condition:
        harness.now += 5
        harness.condition.notify()
    assert entered.wait(DEADLINE_SECONDS)
    assert renewal.loss is None
    harness.now += 1
    assert isinstance(renewal.loss, LeaseExpired)
    leave.set()
    harness.wait_until_idle()
    assert isinstance(renewal.loss, LeaseExpired)


def test_the_time_of_a_renewal_is_counted_from_its_request(harness: RenewerHarness) -> None:
    lease = HeldLease()

    def slow() -> int:
        harness.now += 2
        return 9

    harness.answers["deploy"] = slow
    renewal = harness.hold(lease, "deploy", seconds=6)
    harness.wait_until_idle()
    harness.advance_to(3)
    harness.now = 1_008.9
    assert renewal.loss is None
    harness.now = 1_009.0
    assert renewal.loss is not None


def test_a_refused_renewal_is_a_loss(harness: RenewerHarness, caplog: pytest.LogCaptureFixture) -> None:
    lease = HeldLease()
    harness.answers["deploy"] = raises(LeaseConflict("bob has it"))
    renewal = harness.hold(lease, "deploy")
    harness.wait_until_idle()
    with caplog.at_level(logging.WARNING, "fastness.lease_renewal"):
        assert harness.advance_to(10) is None
    assert isinstance(renewal.loss, LeaseConflict)
    assert "bob has it" in caplog.text


def test_a_held_lease_without_a_handle_is_not_renewed(harness: RenewerHarness) -> None:
    lease = HeldLease()
    harness.hold(lease, "deploy")
    harness.wait_until_idle()
    del lease
    gc.collect()
    assert harness.advance_to(10) is None
    assert harness.extended == []
