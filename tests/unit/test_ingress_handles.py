"""`plane.ingress` on planes in this process, for threads and for asyncio: pushes, listeners, watches and limits."""

import asyncio
import os
import subprocess
import sys
import threading
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastness
from fastness import DataPush, NewDataPush, Plane, Pushed, limits
from fastness.errors import (
    BatchTooLarge,
    Busy,
    Closed,
    EmptyBatch,
    FastnessError,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    MailboxFull,
    PayloadTooLarge,
    RateLimited,
    SenderBlocked,
)
from fastness.runtime.ingress.recent import RecentPushes
from fastness.testing.clock import ManualClock
from fastness.wire.ingress import PUSH_MEDIA, WatchPushes
from fastness.wire.mail import MailPolicy

SECONDS_MAX = 60.0  # Bounds every wait; far more than any test needs.
UUID7 = "01890a5d-ac96-774b-bcce-b302099a8057"


class Opened:
    """An open plane whose calls look the same for threads and for asyncio."""

    def __init__(self, url: str, *, is_async: bool, **options: Any) -> None:
        self._runner = asyncio.Runner() if is_async else None
        self.plane: Any = self.run(_open_async(url, options)) if is_async else fastness.open(url, **options)

    def run(self, result: Any) -> Any:
        return result if self._runner is None else self._runner.run(result)

    def push(self, to: str = "bob", topic: str = "t", payload: Any = b"x", **options: Any) -> Pushed:
        return self.run(self.plane.ingress.push(to, topic, payload, **options))  # type: ignore[no-any-return]

    def push_many(self, pushes: Any, **options: Any) -> list[Pushed | FastnessError]:
        return self.run(self.plane.ingress.push_many(pushes, **options))  # type: ignore[no-any-return]

    def listen(self, callback: Any, **options: Any) -> Any:
        return self.run(self.plane.ingress.on_data_push(callback, **options))

    def read(self, watch: Any, wait_seconds: float = 0.0) -> list[DataPush]:
        return self.run(watch.read(wait_seconds))  # type: ignore[no-any-return]

    def bodies(self, agent: str = "bob") -> list[dict[str, Any]]:
        """The pushes in a mailbox."""
        mails = self.run(self.plane.mailbox(agent).read(peek=True, limit=256))
        assert {mail.content_type for mail in mails} <= {PUSH_MEDIA}
        return [mail.json() for mail in mails]

    def stats(self) -> Any:
        return self.run(self.plane.ingress.stats())

    def close(self) -> None:
        self.run(self.plane.close())
        if self._runner is not None:
            self._runner.close()


async def _open_async(url: str, options: dict[str, Any]) -> Any:
    return await fastness.open_async(url, **options)


@pytest.fixture(params=["memory", "dir", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else f"dir:{tmp_path / 'plane'}"


@pytest.fixture(params=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture
def opened(is_async: bool) -> Iterator[Opened]:
    opened = Opened("memory:", is_async=is_async, ingress_pushes_per_minute=0)
    yield opened
    opened.close()


# Pushes.


def test_pushes_are_stored_as_mail_on_every_backend(url: str, is_async: bool, tmp_path: Path) -> None:
    options: Any = {"activity": f"dir:{tmp_path / 'activity'}", "is_async": is_async}
    opened = Opened(url, **options)
    accepted = opened.push(payload={"n": 1}, sender="ada", idempotency_key="one", reply_to="r")
    assert (accepted.accepted, accepted.deduped, accepted.durability) == (True, False, "accepted")
    outcomes = opened.push_many([NewDataPush("bob", "t", "text"), NewDataPush("eve", "t", b"\xff")], synced=True)
    assert [each.durability for each in outcomes if isinstance(each, Pushed)] == ["synced", "synced"]
    repeated = opened.push(payload={"n": 1}, sender="ada", idempotency_key="one", synced=True)
    assert (repeated.deduped, repeated.durability, repeated.id) == (True, "synced", accepted.id)
    assert opened.push("carol", session_id=UUID7, topic="chat.message").durability == "accepted"
    (first, second), (third,) = opened.bodies(), opened.bodies("eve")
    assert (first["content_type"], first["idempotency_key"], first["reply_to"]) == ("application/json", "one", "r")
    assert [urlsafe_b64decode(each["payload_base64"] + "==") for each in (first, second, third)] == [
        b'{"n":1}',
        b"text",
        b"\xff",
    ]
    assert [each["content_type"] for each in (second, third)] == ["text/plain", "application/octet-stream"]
    (sender, *_) = [mail.sender for mail in opened.run(opened.plane.mailbox("bob").read(peek=True))]
    assert sender == "ada@main"
    opened.close()
    if url != "memory:":  # Closing has stored what was only accepted, and the key is known to the next process.
        opened = Opened(url, **options)
        assert len(opened.bodies("carol")) == 1
        assert opened.push(payload={"n": 1}, sender="ada", idempotency_key="one", synced=True).deduped
        assert len(opened.bodies()) == 2
        opened.close()


def test_large_payloads_are_stored_as_blobs_with_their_batch(opened: Opened) -> None:
    large = os.urandom(limits.PUSH_PAYLOAD_BYTES_MAX)
    outcomes = opened.push_many([NewDataPush("bob", "t", each) for each in (b"1", large, b"2")], synced=True)
    assert all(isinstance(each, Pushed) for each in outcomes)
    bodies = opened.bodies()
    assert [each["size"] for each in bodies] == [1, len(large), 1], "in the order of the batch"
    assert opened.run(opened.plane.blobs.get(bodies[1]["blob"])) == large


def test_a_batch_has_a_result_or_an_error_for_each_push(opened: Opened) -> None:
    opened.run(opened.plane.mailbox("eve").block("ada"))
    outcomes = opened.push_many(
        [
            NewDataPush("bob", "t", b"1", idempotency_key="k"),
            NewDataPush("bob", "t", b"1", idempotency_key="k"),
            NewDataPush("not an agent", "t", b"1"),
            NewDataPush("eve", "t", b"1"),
            NewDataPush("bob", "t", b""),
            NewDataPush("bob", "t", bytes(limits.PUSH_PAYLOAD_BYTES_MAX + 1)),
            NewDataPush("bob", "chat.message", b"1"),
            NewDataPush("bob@other", "t", b"1"),
            NewDataPush("bob", "u", b"2"),
        ],
        synced=True,
        sender="ada",
    )
    first, second = outcomes[:2]
    assert isinstance(first, Pushed)
    assert isinstance(second, Pushed)
    assert (first.deduped, second.deduped, second.id) == (False, True, first.id)
    assert [type(each) for each in outcomes[2:]] == [
        InvalidName,
        SenderBlocked,
        InvalidArgument,
        PayloadTooLarge,
        InvalidArgument,
        InvalidName,
        Pushed,
    ]
    assert [each["topic"] for each in opened.bodies()] == ["t", "u"]
    stats = opened.stats()
    assert (stats.accepted, stats.duplicates, stats.depth, stats.lost) == (3, 1, 0, {})
    assert stats.refused == {"invalid_name": 2, "invalid_argument": 2, "payload_too_large": 1, "sender_blocked": 1}


def test_a_full_mailbox_refuses_a_push(opened: Opened) -> None:
    opened.run(opened.plane.set_mail_policy(MailPolicy(1)))
    opened.push(synced=True)
    with pytest.raises(MailboxFull):
        opened.push(synced=True, idempotency_key="k")
    opened.run(opened.plane.mailbox("bob").confirm(opened.run(opened.plane.mailbox("bob").read())))
    assert not opened.push(synced=True, idempotency_key="k").deduped, "a refused push has released its key"


def test_each_key_is_stored_once_whatever_the_number_of_threads() -> None:
    with fastness.open("memory:", ingress_pushes_per_minute=0) as plane, ThreadPoolExecutor(8) as threads:
        keys = [str(number % 50) for number in range(400)]
        pushed = list(threads.map(lambda key: plane.ingress.push("bob", "t", key, idempotency_key=key), keys))
        assert Counter(each.deduped for each in pushed) == {False: 50, True: 350}
        plane.ingress.push("bob", "t", "last", synced=True)
        assert len(plane.mailbox("bob").read(limit=256)) == 51


# Wrong input.

BATCH_MAX = [NewDataPush("bob", "t", b"x")] * (limits.PUSH_BATCH_MAX + 1)
WRONG: list[tuple[type[FastnessError], Callable[[Opened], Any]]] = [
    (InvalidName, lambda opened: opened.push("")),
    (InvalidName, lambda opened: opened.push("a b")),
    (InvalidName, lambda opened: opened.push("bob@other")),
    (InvalidArgument, lambda opened: opened.push(None)),  # type: ignore[arg-type]
    (InvalidName, lambda opened: opened.push(sender="")),
    (InvalidArgument, lambda opened: opened.push(sender=3)),
    (InvalidArgument, lambda opened: opened.push(topic="")),
    (InvalidArgument, lambda opened: opened.push(topic="x" * 257)),
    (InvalidArgument, lambda opened: opened.push(topic="a\nb")),
    (InvalidArgument, lambda opened: opened.push(topic=3)),  # type: ignore[arg-type]
    (InvalidArgument, lambda opened: opened.push(payload=b"")),
    (InvalidValue, lambda opened: opened.push(payload=object())),
    (InvalidValue, lambda opened: opened.push(payload=float("nan"))),
    (InvalidValue, lambda opened: opened.push(payload="\ud800")),
    (PayloadTooLarge, lambda opened: opened.push(payload=bytes(limits.PUSH_PAYLOAD_BYTES_MAX + 1))),
    (InvalidArgument, lambda opened: opened.push(content_type="")),
    (InvalidArgument, lambda opened: opened.push(content_type="té")),
    (InvalidArgument, lambda opened: opened.push(content_type=3)),
    (InvalidArgument, lambda opened: opened.push(idempotency_key="")),
    (InvalidArgument, lambda opened: opened.push(idempotency_key="x" * 257)),
    (InvalidArgument, lambda opened: opened.push(idempotency_key=3)),
    (InvalidArgument, lambda opened: opened.push(session_id="x" * 257)),
    (InvalidArgument, lambda opened: opened.push(session_id=3)),
    (InvalidArgument, lambda opened: opened.push(topic="chat.message", session_id="not a UUIDv7")),
    (InvalidArgument, lambda opened: opened.push(reply_to="x" * 257)),
    (InvalidArgument, lambda opened: opened.push(reply_to=3)),
    (EmptyBatch, lambda opened: opened.push_many([])),
    (BatchTooLarge, lambda opened: opened.push_many(BATCH_MAX)),
    (BatchTooLarge, lambda opened: opened.push_many([NewDataPush("bob", "t", bytes(131_072))] * 9)),
    (InvalidArgument, lambda opened: opened.push_many(NewDataPush("bob", "t", b"x"))),
    (InvalidArgument, lambda opened: opened.push_many([b"x"])),
    (InvalidName, lambda opened: opened.push_many([NewDataPush("bob", "t", b"x")], sender="a b")),
    (InvalidArgument, lambda opened: opened.listen("not a function")),
    (InvalidArgument, lambda opened: opened.listen(_open_async)),
    (InvalidName, lambda opened: opened.listen(print, to="a b")),
    (InvalidName, lambda opened: opened.plane.ingress.watch(to="a b")),
    (InvalidArgument, lambda opened: opened.plane.ingress.watch(wait_seconds=-1)),
    (InvalidArgument, lambda opened: opened.plane.ingress.watch(wait_seconds="1")),
    (InvalidArgument, lambda opened: opened.read(opened.plane.ingress.watch(topic=3))),
    (InvalidArgument, lambda opened: opened.read(opened.plane.ingress.watch(topic="x" * 257))),
    (InvalidArgument, lambda opened: opened.read(opened.plane.ingress.watch(after="x"))),
    (InvalidArgument, lambda opened: opened.read(opened.plane.ingress.watch(after=3))),
    (InvalidArgument, lambda opened: opened.read(opened.plane.ingress.watch(), wait_seconds=21.0)),
]


def test_wrong_input_is_a_typed_error_and_changes_nothing(opened: Opened) -> None:
    heard: list[DataPush] = []
    opened.listen(heard.append)
    for error, call in WRONG:
        with pytest.raises(error):
            call(opened)
    assert (opened.stats().accepted, opened.stats().depth, heard) == (0, 0, [])
    assert opened.run(opened.plane.mailboxes()) == []


def test_a_position_beyond_the_last_push_is_refused(opened: Opened) -> None:
    watch = opened.plane.ingress.watch()
    opened.read(watch)
    beyond = f"{watch.position.partition('-')[0]}-9"
    with pytest.raises(InvalidArgument, match="beyond the last push"):
        opened.read(opened.plane.ingress.watch(after=beyond))


@pytest.mark.parametrize("rate", [-1, 100_000_001, "120", None])
def test_a_wrong_rate_is_refused(rate: Any) -> None:
    with pytest.raises(InvalidArgument, match="ingress_pushes_per_minute"):
        fastness.open("memory:", ingress_pushes_per_minute=rate)


# The rate limit.


def test_a_sender_at_its_limit_may_push_again_after_exactly_the_time_in_the_error(
    is_async: bool, clock: ManualClock
) -> None:
    opened = Opened("memory:", is_async=is_async, clock=clock, ingress_pushes_per_minute=7)
    refusals = 0
    for number in range(7):
        opened.push(sender="ada", idempotency_key=str(number))
    for _ in range(3):
        with pytest.raises(RateLimited, match=r"7 pushes per minute \(ingress_pushes_per_minute\)") as refused:
            opened.push(sender="ada")
        seconds = refused.value.retry_after_seconds
        assert seconds is not None
        assert f"in {seconds:g} s" in str(refused.value)
        (outcome,) = opened.push_many([NewDataPush("bob", "t", b"x")], sender="ada")
        assert isinstance(outcome, RateLimited)
        assert outcome.retry_after_seconds == seconds
        clock.advance_ms(round(seconds * 1_000) - 1)
        with pytest.raises(RateLimited) as refused:
            opened.push(sender="ada")
        assert refused.value.retry_after_seconds == 0.001
        clock.advance_ms(1)
        opened.push(sender="ada")
        refusals += 3
    opened.push(sender="eve")
    assert opened.stats().refused == {"rate_limited": refusals}
    assert opened.stats().pushes_per_minute == 7
    opened.close()


# Listeners.


def test_a_listener_is_called_after_the_enqueue_and_before_the_push_is_stored(opened: Opened) -> None:
    heard: list[tuple[str, int]] = []
    with_filter: list[str] = []
    listener = opened.listen(lambda push: heard.append((push.payload.decode(), _depth(opened))))
    for filters in ({"to": "eve"}, {"topic": "u"}, {"to": "bob@main", "topic": "t"}):
        opened.listen(lambda push: with_filter.append(push.payload.decode()), **filters)
    for payload, to, topic in (("1", "bob", "t"), ("2", "eve", "t"), ("3", "bob", "u")):
        opened.push(to, topic, payload)
    assert heard == [("1", 1), ("2", 2), ("3", 3)]
    assert with_filter == ["1", "2", "3"]
    listener.stop()
    listener.stop()
    opened.push()
    assert (len(heard), listener.missed, listener.restarts) == (3, 0, 0)


def test_a_listener_hears_only_its_universe_and_stops_with_its_block(is_async: bool) -> None:
    opened = Opened("memory:", is_async=is_async)
    other = type(opened.plane)(opened.plane._transport, "other")
    heard: list[str] = []
    if is_async:

        async def use() -> None:
            async with await opened.plane.ingress.on_data_push(lambda push: heard.append(push.to)):
                await opened.plane.ingress.push("bob", "t", b"x")
                await other.ingress.push("bob", "t", b"x")
            await opened.plane.ingress.push("bob", "t", b"x")

        opened.run(use())
    else:
        with opened.plane.ingress.on_data_push(lambda push: heard.append(push.to)):
            opened.push()
            other.ingress.push("bob", "t", b"x")
        opened.push()
    assert heard == ["bob@main"]
    opened.close()


def test_an_error_in_a_callback_never_fails_the_push(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[DataPush] = []
    opened.listen(lambda push: 1 / 0)
    opened.listen(heard.append)
    assert opened.push(synced=True).durability == "synced"
    assert len(heard) == len(opened.bodies()) == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_of_a_plane_for_threads_can_neither_push_nor_close_it(caplog: pytest.LogCaptureFixture) -> None:
    """It runs in the thread that would have to do that, so waiting for it would never end."""
    errors: list[FastnessError] = []
    with fastness.open("memory:") as plane:
        plane.ingress.on_data_push(lambda push: plane.ingress.push("eve", "t", push.payload))
        assert plane.ingress.push("bob", "t", b"x", synced=True).durability == "synced"
        assert "push from another thread" in caplog.text
        plane.ingress.on_data_push(lambda push: _append_error(errors, plane.close))
        plane.ingress.push("bob", "t", b"y", synced=True)
        assert [type(each) for each in errors] == [InvalidArgument]
        assert (plane.mailbox("bob").stats().pending, plane.mailbox("eve").stats().pending) == (2, 0)


def _append_error(errors: list[FastnessError], call: Callable[[], object]) -> None:
    try:
        call()
    except FastnessError as error:
        errors.append(error)


# Watches.


def test_a_watch_sees_what_is_pushed_from_its_beginning_on(opened: Opened) -> None:
    opened.push(payload="before")
    everyone, bob, topic = (opened.plane.ingress.watch(**filters) for filters in ({}, {"to": "bob"}, {"topic": "u"}))
    for each in (everyone, bob, topic):
        opened.run(each.start())
    pushed = [opened.push(to, topic, "x") for to, topic in (("bob", "t"), ("eve", "u"), ("bob", "u"), ("eve", "t"))]
    ids = [each.id for each in pushed]
    assert [[push.id for push in opened.read(each)] for each in (everyone, bob, topic)] == [
        ids,
        [ids[0], ids[2]],
        [ids[1], ids[2]],
    ]
    again = opened.plane.ingress.watch(after=topic.position)
    assert opened.read(again) == [], "it continues after the pushes that did not match, too"
    assert (everyone.missed, everyone.restarts) == (0, 0)


def test_a_watch_is_iterated_and_ends_after_its_wait(opened: Opened, is_async: bool) -> None:
    seen: list[str] = []
    watch = opened.plane.ingress.watch(wait_seconds=0)
    if is_async:

        async def iterate() -> None:
            async with watch as pushes:
                for payload in ("1", "2"):
                    await opened.plane.ingress.push("bob", "t", payload)
                async for push in pushes:
                    seen.append(f"{push.payload.decode()} {pushes.position == push.position}")

        opened.run(iterate())
    else:
        with watch as pushes:
            for payload in ("1", "2"):
                opened.push(payload=payload)
            for push in pushes:
                seen.append(f"{push.payload.decode()} {pushes.position == push.position}")
    assert seen == ["1 True", "2 True"]


def test_a_watch_waits_until_a_push_arrives() -> None:
    with fastness.open("memory:") as plane, plane.ingress.watch(to="bob") as pushes:
        waiting = ThreadPoolExecutor(1).submit(next, pushes)
        _until(lambda: plane.ingress.stats().watches == 1)
        plane.ingress.push("eve", "t", b"not this")
        plane.ingress.push("bob", "t", b"this")
        assert waiting.result(SECONDS_MAX).payload == b"this"


def test_closing_the_plane_ends_its_watches_and_its_thread() -> None:
    plane = fastness.open("memory:")
    watch = plane.ingress.watch()
    waiting = ThreadPoolExecutor(1).submit(next, watch)
    _until(lambda: plane.ingress.stats().watches == 1)
    plane.close()
    plane.close()
    with pytest.raises(Closed):
        waiting.result(SECONDS_MAX)
    with pytest.raises(Closed):
        plane.ingress.push("bob", "t", b"x")
    assert not [each for each in threading.enumerate() if each.name.startswith("fastness-ingress-loop")]


def test_a_slow_watch_learns_how_many_pushes_it_has_missed(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PUSH_RECENT_MAX", 3)
    watch = opened.plane.ingress.watch()
    opened.run(watch.start())
    for number in range(5):
        opened.push(payload=str(number))
    assert [push.payload for push in opened.read(watch)] == [b"2", b"3", b"4"]
    assert watch.missed == 2
    monkeypatch.setattr(limits, "PUSH_RECENT_BYTES_MAX", 2_100)
    for number in range(3):
        opened.push(payload=str(number))
    assert [push.payload for push in opened.read(watch)] == [b"1", b"2"]
    assert watch.missed == 3


def test_what_is_remembered_for_watches_is_bounded(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    monkeypatch.setattr(limits, "PUSH_UNIVERSES_MAX", 2)
    with fastness.open("memory:", clock=clock) as plane:
        universes = [Plane(plane._transport, name) for name in ("one", "two", "three")]
        watches = [each.ingress.watch() for each in universes]
        for watch in watches[:2]:
            watch.start()
        with pytest.raises(Busy, match="2 universes"):
            watches[2].start()
        clock.advance_ms(round(limits.PUSH_RECENT_SECONDS * 1_000) + 1)
        watches[2].start()
        assert watches[0].read(0.0) == []
        assert watches[0].restarts == 1, "it was dropped, and begins again"
        monkeypatch.setattr(limits, "PUSH_WATCHES_MAX", 0)
        with pytest.raises(Busy, match="watch again later"):
            watches[0].read(1.0)


@given(st.lists(st.one_of(st.sampled_from(["bob", "eve"]), st.integers(1, 4)), max_size=60), st.booleans())
def test_every_push_is_seen_in_order_or_counted_as_missed(steps: list[str | int], with_filter: bool) -> None:
    """Steps are pushes to an agent, and reads of a number of pushes."""

    async def check() -> None:
        recent = RecentPushes(ManualClock())
        watch = WatchPushes("bob" if with_filter else None)
        position = (await recent.read(watch)).position
        sent: list[tuple[int, str]] = []
        seen: list[int] = []
        missed = 0
        for step in [*steps, 60]:
            if isinstance(step, str):
                sent.append((len(sent), step))
                recent.add("main", _data_push(len(sent) - 1, step))
                continue
            found = await recent.read(msgspec.structs.replace(watch, after=position, limit=step))
            assert len(found.pushes) <= step
            position, missed = found.position, missed + found.missed
            seen += [push.received_ms for push in found.pushes]
        wanted = [number for number, to in sent if to == "bob" or not with_filter]
        assert seen == [number for number in wanted if number in set(seen)], "in order, and each once"
        unseen = len(wanted) - len(seen)
        assert unseen <= missed if with_filter else unseen == missed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PUSH_RECENT_MAX", 4)
        asyncio.run(check())


def _depth(opened: Opened) -> int:
    """How many pushes wait to be stored, asked from inside a callback, where an event loop cannot wait."""
    return int(opened.plane._transport.ingress.stats().depth)


def _data_push(number: int, to: str) -> DataPush:
    return DataPush(
        id=str(number),
        sender="ada",
        to=to,
        topic="t",
        content_type="text/plain",
        payload=b"x",
        idempotency_key=str(number),
        received_ms=number,
    )


# The end of a process.

PROGRAM = """
import sys, fastness
plane = fastness.open(sys.argv[1])
for number in range(20):
    plane.ingress.push("bob", "t", str(number))
"""


def test_a_program_that_does_not_close_its_plane_has_stored_what_was_accepted(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM, url], check=True, timeout=SECONDS_MAX)
    with fastness.open(url) as plane:
        assert len(plane.mailbox("bob").read()) == 20


def test_a_forked_child_cannot_push() -> None:
    with fastness.open("memory:") as plane:
        plane.ingress.push("bob", "t", b"x")
        child = os.fork()
        if child == 0:
            try:
                plane.ingress.push("bob", "t", b"y")
            except Closed:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _until(reached: Callable[[], bool]) -> None:
    """Wait until a condition holds that another thread makes true."""
    woken = threading.Event()
    for _ in range(round(SECONDS_MAX * 100)):
        if reached():
            return
        woken.wait(0.01)
    raise AssertionError("the condition never became true")
