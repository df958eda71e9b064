"""The result backend of Celery with real worker processes and a real server, which is killed meanwhile."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group, states
from celery.exceptions import TimeoutError as ResultTimeout
from celery.result import GroupResult

from tests.end_to_end import celery_workers
from tests.end_to_end.celery_workers import SECONDS_MAX
from tests.support.server_process import Server, free_port


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sqs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker that is not the server under test, so that only the results depend on that."""
    port = free_port()
    server = Server(tmp_path_factory.mktemp("broker"), sqs_port=port, sqs_anonymous=True)
    yield f"127.0.0.1:{port}"
    server.kill()


@pytest.fixture
def broker(sqs: str) -> dict[str, Any]:
    return {
        "broker_url": f"sqs://key:secret@{sqs}",
        "broker_transport_options": {
            "region": "us-east-1",
            "is_secure": False,
            "queue_name_prefix": f"celery-{uuid4().hex[:8]}-",
            "wait_time_seconds": 1,
            "polling_interval": 0.1,
        },
    }


def address(server: Server) -> str:
    return "fastness://" + server.url.partition("//")[2] + "/main"


@pytest.fixture
def workers(tmp_path: Path, server: Server, broker: dict[str, Any]) -> Iterator[celery_workers.Workers]:
    with celery_workers.workers(tmp_path / "celery", result_backend=address(server), **broker) as found:
        yield found


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_results_states_groups_and_chords_of_worker_processes(workers: celery_workers.Workers, pool: str) -> None:
    tasks = workers.tasks
    workers.start(pool=pool)

    assert tasks.add.delay(2, 3).get(timeout=SECONDS_MAX) == 5

    failed = tasks.fail.delay("no stock")
    with pytest.raises(ValueError, match="no stock"):
        failed.get(timeout=SECONDS_MAX)
    assert failed.state == states.FAILURE
    assert "raise ValueError(text)" in failed.traceback

    assert chain(tasks.add.s(1, 2), tasks.add.s(3)).delay().get(timeout=SECONDS_MAX) == 6

    sums = group(tasks.add.s(number, number) for number in range(20)).delay()
    assert sums.get(timeout=SECONDS_MAX) == [2 * number for number in range(20)]
    sums.save()
    restored = GroupResult.restore(sums.id, app=tasks.app)
    assert [each.id for each in restored] == [each.id for each in sums]
    assert restored.get(timeout=SECONDS_MAX) == sums.get(timeout=SECONDS_MAX)

    body = chord(tasks.add.s(number, 1) for number in range(20))(tasks.total.s())
    assert body.get(timeout=SECONDS_MAX) == sum(range(20)) + 20
    assert workers.runs().count("total") == 1

    with pytest.raises(Exception, match="no stock"):
        chord([tasks.add.s(1, 1), tasks.fail.s("no stock")])(tasks.total.s()).get(timeout=SECONDS_MAX)


def test_a_waiting_caller_gets_its_result_from_a_server_that_was_killed_and_started_again(
    workers: celery_workers.Workers, server: Server, tmp_path: Path
) -> None:
    workers.start()
    release = tmp_path / "release"
    held = workers.tasks.hold.delay("held", str(release))
    workers.wait(lambda: held.state == states.STARTED)
    with pytest.raises(ResultTimeout):
        held.get(timeout=0.2)

    port = server.address[1]
    server.kill()
    release.touch()
    time.sleep(0.5)  # The worker stores the result while no server answers.
    again = Server(tmp_path, port=port)
    try:
        assert held.get(timeout=SECONDS_MAX) == "held"
    finally:
        again.kill()


def test_results_are_kept_without_a_server_where_one_process_has_the_worker(
    tmp_path: Path, broker: dict[str, Any]
) -> None:
    backend = f"fastness+dir://{tmp_path / 'data'}"
    with celery_workers.workers(tmp_path / "celery", result_backend=backend, **broker) as found:
        worker = found.start(pool="threads")
        noted = found.tasks.note.delay("ran")
        found.wait(lambda: found.runs() == ["ran"])
        worker.terminate()
        worker.wait(SECONDS_MAX)
        assert noted.get(timeout=SECONDS_MAX) > 0  # The next process opens the directory.


def test_processes_of_a_pool_open_a_plane_on_postgresql_each(
    tmp_path: Path, postgres_url: str, broker: dict[str, Any]
) -> None:
    backend = f"fastness+{postgres_url}"
    with celery_workers.workers(tmp_path / "celery", result_backend=backend, **broker) as found:
        found.start()
        body = chord(found.tasks.add.s(number, 1) for number in range(8))(found.tasks.total.s())
        assert body.get(timeout=SECONDS_MAX) == sum(range(8)) + 8


def test_a_token_is_needed_where_the_server_asks_for_one(tmp_path: Path, broker: dict[str, Any]) -> None:
    server = Server(tmp_path)
    try:
        with server.plane() as plane:
            token = plane.tokens.create("celery", universes="main", verbs="collection:*,blob:*").token
        backend = f"fastness://:{token}@" + server.url.partition("//")[2] + "/main"
        with celery_workers.workers(tmp_path / "celery", result_backend=backend, **broker) as found:
            found.start()
            assert found.tasks.add.delay(1, 1).get(timeout=SECONDS_MAX) == 2
            assert token not in found.logs()
    finally:
        server.kill()
