"""Celery over SQS, results included: worker processes that are killed, times of execution, retries and expiry.

SQS_ENDPOINT, as in http://127.0.0.1:5000, names another server that the same tests then use as their broker.
"""

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import boto3
import pytest
from celery import chord, states

from tests.end_to_end import celery_workers
from tests.end_to_end.celery_workers import SECONDS_MAX
from tests.support.forked import run_python
from tests.support.server_process import Server, free_port

VISIBILITY_SECONDS = (
    6  # A message of a killed worker is delivered again after this; slow machines need seconds for less.
)
REGION = "us-east-1"
EXAMPLE = Path(__file__).parents[2] / "examples" / "celery_orders.py"


class Broker:
    """A server for SQS, and another one for the results if it is not Fastness's."""

    def __init__(self, folder: Path, *, signed: bool = False) -> None:
        """If `signed`, requests need an access key, and results a token."""
        flags: dict[str, Any] = {}
        self.endpoint = os.environ.get("SQS_ENDPOINT", "")
        self.access_key, self.secret, token = "key", "secret", ""
        if not self.endpoint:
            port = free_port()
            flags = {"sqs_port": port, "sqs_anonymous": True}
            self.endpoint = f"http://127.0.0.1:{port}"
            if signed:
                key_file = str(folder / "sqs.key")
                flags = {"sqs_port": port, "sqs_key_file": key_file, "tokens": True}
                created = _create_token(folder, key_file, "--sqs")
                key = dict(line.split("=", 1) for line in created.split())
                self.access_key, self.secret = key["AWS_ACCESS_KEY_ID"], key["AWS_SECRET_ACCESS_KEY"]
                token = f":{_create_token(folder, key_file, '--allow', 'collection:*,blob:*').strip()}@"
        self.server = Server(folder, **flags)
        self.prefix = f"celery-{uuid4().hex[:8]}-"
        self.conf = {
            "broker_url": f"sqs://{self.access_key}:{quote(self.secret, safe='')}@{self.endpoint.partition('//')[2]}",
            "broker_transport_options": {
                "region": REGION,
                "is_secure": False,
                "queue_name_prefix": self.prefix,
                "visibility_timeout": VISIBILITY_SECONDS,
                "wait_time_seconds": 1,
                "polling_interval": 0.1,
            },
            "result_backend": f"fastness://{token}{self.server.url.partition('//')[2]}/main",
        }

    def counts(self) -> tuple[int, int]:
        """How many messages of the queue are visible, and how many are in flight."""
        client = boto3.client(
            "sqs",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret,
        )
        try:
            url = client.get_queue_url(QueueName=f"{self.prefix}celery")["QueueUrl"]
            names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
            found = client.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
            return int(found[names[0]]), int(found[names[1]])
        finally:
            client.close()


def _create_token(folder: Path, key_file: str, *options: str) -> str:
    """What `fastness token create` prints."""
    command = ["-m", "fastness.cli", "--url", f"dir:{folder / 'data'}", "token", "create", "celery"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    return run_python([*command, *options], env=environment | {"FASTNESS_SQS_KEY_FILE": key_file}, check=True).stdout


@pytest.fixture
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    found = Broker(tmp_path, signed=hasattr(request, "param"))
    yield found
    found.server.kill()


@pytest.fixture
def workers(tmp_path: Path, broker: Broker) -> Iterator[celery_workers.Workers]:
    with celery_workers.workers(tmp_path / "celery", **broker.conf) as found:
        yield found


@pytest.mark.parametrize("broker", ["with an access key"], indirect=True)
def test_tasks_are_sent_run_and_acknowledged(workers: celery_workers.Workers, broker: Broker) -> None:
    workers.start()
    results = [workers.tasks.add.delay(number, 1) for number in range(20)]
    assert [each.get(timeout=SECONDS_MAX) for each in results] == list(range(1, 21))
    workers.wait(lambda: broker.counts() == (0, 0), broker.counts)


def test_a_task_of_a_killed_worker_runs_again(workers: celery_workers.Workers, broker: Broker, tmp_path: Path) -> None:
    killed = workers.start(concurrency=1)
    release = tmp_path / "release"
    held = workers.tasks.hold.delay("held", str(release))
    workers.wait(lambda: len(workers.runs()) == 1)
    workers.kill(killed)
    assert held.state == states.STARTED
    assert broker.counts() == (0, 1)

    workers.start(concurrency=1)
    workers.wait(lambda: len(workers.runs()) == 2)
    release.touch()
    assert held.get(timeout=SECONDS_MAX) == "held"
    first, second = workers.runs()
    assert first != second  # Another process ran it.
    workers.wait(lambda: broker.counts() == (0, 0), broker.counts)


def test_a_task_that_is_rejected_after_its_visibility_timeout_runs_again(
    workers: celery_workers.Workers, broker: Broker, tmp_path: Path
) -> None:
    worker = workers.start(concurrency=1)
    release = tmp_path / "release"
    given_back = workers.tasks.give_back.delay("given back", str(release))
    workers.wait(lambda: len(workers.runs()) == 1)
    workers.wait(lambda: broker.counts() == (1, 0), broker.counts)  # While it has one, the worker takes no other.
    release.touch()
    workers.wait(lambda: len(workers.runs()) == 2 or worker.poll() is not None)
    assert worker.poll() is None, workers.logs()
    assert given_back.get(timeout=SECONDS_MAX) == "given back"
    assert workers.runs() == ["given back"] * 2
    workers.wait(lambda: broker.counts() == (0, 0), broker.counts)


@pytest.mark.rotating
def test_a_chord_whose_last_part_is_killed_sends_its_body_once(workers: celery_workers.Workers, tmp_path: Path) -> None:
    killed = workers.start(concurrency=2)
    release = tmp_path / "release"
    tasks = workers.tasks
    body = chord([tasks.note.s("part"), tasks.note.s("part"), tasks.hold.s("held", str(release))])(
        tasks.note.si("body")
    )
    workers.wait(lambda: _count(workers, "part") == 2 and _count(workers, "held") == 1)
    workers.kill(killed)

    workers.start(concurrency=2)
    workers.wait(lambda: _count(workers, "held") == 2)
    release.touch()
    assert body.get(timeout=SECONDS_MAX) > 0
    assert _count(workers, "body") == 1


@pytest.mark.rotating
def test_a_task_does_not_run_before_its_time(workers: celery_workers.Workers) -> None:
    """Each task returns when it ran, and the next one is sent after that."""
    workers.start()

    def run(name: str, **options: Any) -> float:
        return float(workers.tasks.note.apply_async([name], **options).get(timeout=SECONDS_MAX))

    first = run("at once")
    at_its_time = run("at its time", eta=datetime.fromtimestamp(first, UTC) + timedelta(seconds=3))
    assert at_its_time >= first + 3
    after_a_while = run("after a while", countdown=1)
    assert after_a_while >= at_its_time + 1
    assert run("delayed by the queue", delay_seconds=2) >= after_a_while + 2
    assert workers.runs() == ["at once", "at its time", "after a while", "delayed by the queue"]


def test_a_task_that_asks_for_it_is_tried_again(workers: celery_workers.Workers, broker: Broker) -> None:
    workers.start()
    result = workers.tasks.flaky.delay(3)
    assert result.get(timeout=SECONDS_MAX) == 3
    assert workers.runs() == ["flaky"] * 3
    failed = workers.tasks.flaky.delay(9)
    with pytest.raises(RuntimeError, match="not yet"):
        failed.get(timeout=SECONDS_MAX)
    workers.wait(lambda: broker.counts() == (0, 0), broker.counts)


def test_a_task_that_has_expired_does_not_run(workers: celery_workers.Workers, broker: Broker) -> None:
    late = workers.tasks.note.apply_async(["late"], expires=datetime.now(UTC) - timedelta(seconds=1))
    workers.start()
    workers.wait(lambda: late.state == states.REVOKED)
    assert workers.tasks.note.apply_async(["in time"], expires=3_600).get(timeout=SECONDS_MAX) > 0
    assert workers.runs() == ["in time"]
    workers.wait(lambda: broker.counts() == (0, 0), broker.counts)


def test_the_example_runs(broker: Broker, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FASTNESS_", "AWS_"))}
    environment |= {"FASTNESS_URL": broker.server.url, "SQS_URL": broker.endpoint}
    log = tmp_path / "worker.log"
    words = ["-A", EXAMPLE.stem, "worker", "--concurrency=2"]
    worker = celery_workers.start_celery(words, log, cwd=EXAMPLE.parent, env=environment)
    try:
        done = run_python([EXAMPLE], env=environment)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    expected = ["to pay: 36900", "to pay: 50000", "no price: 'sofa'"]
    assert done.stdout.splitlines() == expected, done.stderr + log.read_text()


def _count(workers: celery_workers.Workers, word: str) -> int:
    return sum(line.startswith(word) for line in workers.runs())
