"""The result backend of Celery over an embedded plane: values, expiry, waiting, groups and chords."""

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, signals, states
from celery.app.task import Context
from celery.backends.base import Backend
from celery.exceptions import ImproperlyConfigured
from celery.exceptions import TimeoutError as ResultTimeout
from celery.result import AsyncResult, GroupResult

import fastness
from fastness import celery_results
from fastness.celery_results import FastnessBackend
from fastness.errors import Busy, CommitUnknown, InvalidArgument, Unreachable, VersionConflict
from fastness.limits import CELERY_CHORD_DONE_SECONDS, COLLECTION_ROWS_MAX, SESSION_INLINE_BYTES_MAX
from fastness.testing.clock import ManualClock

MakeApp = Callable[..., Celery]


@pytest.fixture
def make_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeApp]:
    """Apps whose planes are in memory. With a clock, results expire by it; waits need the real one."""
    apps: list[Celery] = []

    def make(url: str = "fastness+memory://", clock: ManualClock | None = None, **conf: Any) -> Celery:
        if clock is not None:
            monkeypatch.setattr(fastness, "open", partial(fastness.open, clock=clock))
        app = Celery("tests", backend=url, broker="memory://", set_as_current=False)
        app.conf.update(conf)
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.backend.close()
        app.close()


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app(result_expires=3_600)


@pytest.fixture
def backend(app: Celery) -> FastnessBackend:  # Not the fixture of the same name: these tests need one key space.
    found: FastnessBackend = app.backend
    return found


def test_celery_finds_the_backend_by_its_name() -> None:
    found = {each.name: each.value for each in entry_points(group="celery.result_backends")}
    assert found.get("fastness") == "fastness.celery_results:FastnessBackend", "install this version: make setup"


def test_a_result_has_its_state_value_traceback_and_children(app: Celery, backend: FastnessBackend) -> None:
    assert AsyncResult("none", app=app).state == states.PENDING
    backend.mark_as_started("one", pid=7)
    assert AsyncResult("one", app=app).state == states.STARTED
    backend.mark_as_done("one", {"n": [1, "é", None]})
    assert AsyncResult("one", app=app).get(timeout=10) == {"n": [1, "é", None]}

    backend.mark_as_failure("two", KeyError("gone"), traceback="Traceback: gone")
    failed = AsyncResult("two", app=app)
    assert failed.traceback == "Traceback: gone"
    with pytest.raises(KeyError, match="gone"):
        failed.get(timeout=10)

    backend.mark_as_retry("three", RuntimeError("busy"))
    assert AsyncResult("three", app=app).state == states.RETRY
    backend.mark_as_revoked("four", "expired", store_result=True)
    assert AsyncResult("four", app=app).state == states.REVOKED
    assert backend.task_result_exists("four")
    assert not backend.task_result_exists("none")


def test_a_success_is_final_and_other_states_are_not(app: Celery, backend: FastnessBackend) -> None:
    backend.mark_as_failure("one", ValueError("no"))
    backend.mark_as_done("one", 1)
    backend.mark_as_done("one", 2)
    backend.mark_as_failure("one", ValueError("late"))
    backend.mark_as_started("one")
    backend._cache.clear()
    assert AsyncResult("one", app=app).get(timeout=10) == 1


def test_of_two_workers_that_end_a_task_at_once_the_first_success_stays(backend: FastnessBackend) -> None:
    for _ in range(20):
        task = uuid4().hex
        start = threading.Barrier(2)

        def store(value: int, task: str = task, start: threading.Barrier = start) -> None:
            start.wait()
            backend.mark_as_done(task, value)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(store, [1, 2]))
        stored = backend.get_task_meta(task, cache=False)["result"]
        backend.mark_as_done(task, 3)
        assert backend.get_task_meta(task, cache=False)["result"] == stored


def test_results_expire(make_app: MakeApp, clock: ManualClock) -> None:
    backend = make_app(clock=clock, result_expires=60, result_failure_expires=120, result_cache_max=-1).backend
    backend.mark_as_done("one", 1)
    backend.mark_as_failure("two", ValueError("no"))
    clock.advance_ms(59_999)
    assert backend.get_state("one") == states.SUCCESS
    clock.advance_ms(1)
    assert backend.get_state("one") == states.PENDING
    assert backend.get_state("two") == states.FAILURE
    clock.advance_ms(60_000)
    assert backend.get_state("two") == states.PENDING


def test_results_without_an_expiry_stay(make_app: MakeApp, clock: ManualClock) -> None:
    backend = make_app(clock=clock, result_expires=None, result_cache_max=-1).backend
    backend.mark_as_done("one", 1)
    clock.advance_ms(10 * 365 * 86_400_000)
    assert backend.get_state("one") == states.SUCCESS


def test_forgotten_results_are_gone(app: Celery, backend: FastnessBackend) -> None:
    backend.mark_as_done("one", 1)
    AsyncResult("one", app=app).forget()
    assert AsyncResult("one", app=app).state == states.PENDING
    assert backend.get(backend.get_key_for_task("one")) is None


def test_groups_are_saved_restored_and_deleted(make_app: MakeApp, clock: ManualClock) -> None:
    app = make_app(clock=clock, result_expires=3_600)
    backend = app.backend
    group = GroupResult("all", [AsyncResult(f"{number}", app=app) for number in range(3)], app=app)
    group.save()
    for number in range(3):
        backend.mark_as_done(f"{number}", number)
    restored = GroupResult.restore("all", app=app)
    assert restored.get(timeout=10) == [0, 1, 2]
    restored.delete()
    assert GroupResult.restore("all", app=app) is None

    group.save()
    clock.advance_ms(3_600_000)
    assert GroupResult.restore("all", app=app) is None


def test_the_expiry_of_a_group_is_moved(make_app: MakeApp, clock: ManualClock) -> None:
    backend = make_app(clock=clock, result_expires=3_600).backend
    key = backend.get_key_for_group("all")
    backend.set(key, b"value")
    backend.expire(key, 7_200)
    clock.advance_ms(7_199_999)
    assert backend.get(key) == b"value"
    clock.advance_ms(1)
    assert backend.get(key) is None
    backend.expire(key, 60)  # What is gone stays gone.
    backend.set(key, b"value")
    backend.expire(key, 0)
    clock.advance_ms(86_400_000)
    assert backend.get(key) == b"value"


def test_a_waiting_caller_is_woken_by_the_result(app: Celery, backend: FastnessBackend) -> None:
    begins = threading.Timer(0.05, backend.mark_as_started, ["one"])
    ends = threading.Timer(0.1, backend.mark_as_done, ["one", 1])
    begins.start()
    ends.start()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(AsyncResult("one", app=app).get, timeout=600, interval=600)
        assert result.result(300) == 1  # A poll, which would also find it, comes later.
    begins.join()
    ends.join()


def test_a_wait_ends_after_its_timeout_and_calls_back_meanwhile(app: Celery, backend: FastnessBackend) -> None:
    assert backend.plane.collections() == []  # It is open now, which takes longer than the wait.
    called: list[int] = []
    with pytest.raises(ResultTimeout):
        backend.wait_for("none", timeout=0.5, interval=0.01, on_interval=lambda: called.append(1))
    assert called
    with pytest.raises(ResultTimeout):
        AsyncResult("none", app=app).get(timeout=0)
    assert list(backend.get_many(["none"], max_iterations=1, timeout=0.01)) == []


def test_many_results_are_each_returned_once(backend: FastnessBackend) -> None:
    tasks = [f"{number}" for number in range(COLLECTION_ROWS_MAX + 200)]
    ready, pending = tasks[::2], tasks[1::2]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda task: backend.mark_as_done(task, int(task)), ready))
        backend.mark_as_started(pending[0])
        seen: list[str] = []
        messages: list[Any] = []
        ended: list[Future[Any]] = []
        for task, meta in backend.get_many(tasks, timeout=600, on_message=messages.append):
            assert meta["result"] == int(task)
            seen.append(task)
            if len(seen) == len(ready):
                ended = [pool.submit(backend.mark_as_done, each, int(each)) for each in pending]
        for each in ended:
            each.result()
    assert sorted(seen) == sorted(tasks)
    assert len(messages) == len(tasks)
    keys = [backend.get_key_for_task(task) for task in ["1", "none", "0"]]
    assert [None if each is None else json.loads(each)["result"] for each in backend.mget(keys)] == [1, None, 0]


def test_a_result_that_is_forgotten_while_it_is_waited_for_can_come_again(backend: FastnessBackend) -> None:
    backend.mark_as_started("one")
    found = backend.get_many(["one"], timeout=600, interval=0.01, on_interval=lambda: steps and steps.pop(0)())
    steps: list[Callable[[], Any]] = [
        partial(backend.forget, "one"),
        partial(backend.mark_as_started, "one"),
        partial(backend.mark_as_done, "one", 1),
    ]
    assert [meta["result"] for _, meta in found] == [1]


def test_a_large_result_is_a_blob(make_app: MakeApp, tmp_path: Path) -> None:
    backend = make_app(f"fastness+dir://{tmp_path}", result_cache_max=-1).backend
    large = "x" * (4 * SESSION_INLINE_BYTES_MAX)
    backend.mark_as_done("one", large)
    assert backend.get_result("one") == large
    (row,) = backend.plane.collection("celery").scan(_partition_of(backend)).rows
    assert row.value.startswith(b"#")
    assert len(row.value) < 200


def test_each_part_of_a_chord_counts_once_and_the_body_is_sent_once(app: Celery, backend: FastnessBackend) -> None:
    chord = Chord(app, parts=40)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(chord.returned, [part for part in chord.parts for _ in range(2)]))
    assert len(chord.sent) == 1
    assert sorted(chord.sent[0]) == list(range(40))
    for part in chord.parts:  # Their workers were killed before they acknowledged.
        chord.returned(part)
    assert len(chord.sent) == 1


def test_the_last_part_sends_the_body_when_it_runs_again_after_a_crash(
    app: Celery, backend: FastnessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(celery_results, "CELERY_CHORD_SEND_SECONDS", 0.05)
    chord = Chord(app, parts=3)
    chord.returned(chord.parts[0])
    chord.returned(chord.parts[0])  # It is the last one so far, and has nothing to send.
    chord.returned(chord.parts[1])
    with monkeypatch.context() as patched:
        patched.setattr(Backend, "chord_error_from_stack", _crash)
        patched.setattr(GroupResult, "restore", _crash)
        with pytest.raises(SystemExit):
            chord.returned(chord.parts[2])
    chord.returned(chord.parts[0])
    assert chord.sent == []
    chord.returned(chord.parts[2])
    assert len(chord.sent) == 1


def test_a_chord_that_is_done_leaves_one_row_for_a_day(make_app: MakeApp, clock: ManualClock) -> None:
    app = make_app(clock=clock, result_expires=3_600)
    backend = app.backend
    chord = Chord(app, parts=5)
    for part in chord.parts:
        chord.returned(part)
    rows = backend.plane.collection("celery")
    left = [row for name in rows.partitions().partitions for row in rows.scan(name).rows if len(row.key) > 1]
    assert [row.key[1] for row in left] == ["count"]
    clock.advance_ms(CELERY_CHORD_DONE_SECONDS * 1_000)
    assert not [row for name in rows.partitions().partitions for row in rows.scan(name).rows]


def test_a_part_that_failed_fails_the_body(app: Celery, backend: FastnessBackend) -> None:
    chord = Chord(app, parts=2)
    chord.returned(chord.parts[0])
    chord.returned(chord.parts[1], error=ValueError("no stock"))
    assert chord.sent == []
    assert backend.get_state("body") == states.FAILURE
    assert "no stock" in str(backend.get_result("body"))


class Chord:
    """A chord whose parts return when the test says so, and the arguments of each body that was sent."""

    def __init__(self, app: Celery, *, parts: int) -> None:
        self._app = app
        self.parts = [f"part-{number}" for number in range(parts)]
        self.sent: list[Any] = []
        self._group = uuid4().hex

        @app.task(name="body")  # type: ignore[untyped-decorator]
        def body(numbers: list[int]) -> None: ...

        results = [AsyncResult(part, app=app) for part in self.parts]
        app.backend.apply_chord((self._group, results), body.s())
        self._body = body.s().set(task_id="body")
        self._body["chord_size"] = parts
        signals.before_task_publish.connect(self._publish, weak=False)

    def _publish(self, sender: str | None = None, body: Any = None, **_: Any) -> None:
        if sender == "body":
            self.sent.append(body[0][0])

    def returned(self, part: str, error: Exception | None = None) -> None:
        request = Context(id=part, group=self._group, chord=self._body, errbacks=None)
        if error is not None:
            self._app.backend.mark_as_failure(part, error, request=request)
        else:
            self._app.backend.mark_as_done(part, int(part.partition("-")[2]), request=request)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = list(signals.before_task_publish.receivers)
    yield
    signals.before_task_publish.receivers = before
    signals.before_task_publish.sender_receivers_cache.clear()


def test_urls_name_the_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FASTNESS_URL", "FASTNESS_TOKEN", "FASTNESS_UNIVERSE"):
        monkeypatch.delenv(name, raising=False)

    def target(url: str | None, **options: Any) -> tuple[str, str, str | None]:
        app = Celery("tests", set_as_current=False)
        app.conf.result_backend_transport_options = options
        found = FastnessBackend(app, url=url)._target
        return found.url, found.universe, found.token

    assert target("fastness://127.0.0.1:9440/shop") == ("http://127.0.0.1:9440", "shop", None)
    assert target("fastness://:s%2Fecret@[::1]:9440") == ("http://[::1]:9440", "main", "s/ecret")
    assert target("https://plane.example?token=secret&universe=shop") == ("https://plane.example", "shop", "secret")
    assert target("http://plane.example", token="t", universe="u") == ("http://plane.example", "u", "t")
    assert target("dir:///var/lib/data?universe=shop") == ("dir:/var/lib/data", "shop", None)
    assert target("dir://./data") == ("dir:./data", "main", None)
    assert target("postgresql://user:pw@host/db?sslmode=require") == (
        "postgresql://user:pw@host/db?sslmode=require",
        "main",
        None,
    )
    monkeypatch.setenv("FASTNESS_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("FASTNESS_TOKEN", "secret")
    monkeypatch.setenv("FASTNESS_UNIVERSE", "shop")
    assert target(None) == ("http://127.0.0.1:1", "shop", "secret")


def test_wrong_urls_and_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTNESS_URL", raising=False)
    for url, words in [
        (None, "FASTNESS_URL"),
        ("fastness:///main", "no host"),
        ("ftp://host", "'ftp'"),
        ("fastness://host?tokn=secret", "'tokn'"),
        ("fastness://host?patience_seconds=long", "patience_seconds"),
    ]:
        with pytest.raises(ImproperlyConfigured, match=words):
            FastnessBackend(Celery("tests", set_as_current=False), url=url)


def test_logs_do_not_show_tokens_and_passwords() -> None:
    for url in [
        "fastness://:secret@host:1/main",
        "fastness://host:1/main?token=secret&universe=u",
        "postgresql://u:secret@h/d",
    ]:
        backend = FastnessBackend(Celery("tests", set_as_current=False), url=url)
        assert "secret" not in backend.as_uri()
        assert backend.as_uri(include_password=True) == url


def test_a_copy_of_a_backend_has_its_url_and_expiry(app: Celery, backend: FastnessBackend) -> None:
    _, (kind, arguments, options) = backend.__reduce__((app,))
    copy = kind(*arguments, **options)
    assert (copy.url, copy.expires) == (backend.url, backend.expires)
    assert pickle.dumps(options)


def test_celery_repeats_calls_that_may_succeed_later(backend: FastnessBackend) -> None:
    for error in (Unreachable("down"), Busy("full"), CommitUnknown("lost")):
        assert backend.exception_safe_to_retry(error)
    assert backend.exception_safe_to_retry(VersionConflict("Row", "1", expected=1, actual=2))
    for other in (InvalidArgument("wrong"), ValueError("wrong")):
        assert not backend.exception_safe_to_retry(other)


def _partition_of(backend: FastnessBackend) -> str:
    (found,) = backend.plane.collection("celery").partitions().partitions
    return found


def _crash(*_: object, **__: object) -> None:
    raise SystemExit(1)
