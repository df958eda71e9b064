"""An app of Celery whose worker processes tests start and kill. The environment says which broker and backend it has.

A task appends a line to a file for every run, so that tests can count them and wait for them.
"""
# mypy: disallow-untyped-decorators=False

import json
import os
import time
from pathlib import Path

from celery import Celery
from celery.exceptions import Reject

app = Celery("tests")
app.conf.update(json.loads(os.environ["CELERY_TESTS"]))
RUNS = Path(os.environ["CELERY_RUNS"])


def ran(line: str) -> None:
    with RUNS.open("a") as file:
        file.write(f"{line}\n")


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def fail(text: str) -> None:
    raise ValueError(text)


@app.task
def total(numbers: list[int]) -> int:
    ran("total")
    return sum(numbers)


@app.task(acks_late=True)
def note(line: str) -> float:
    """When it ran."""
    ran(line)
    return time.time()


@app.task(acks_late=True, track_started=True)
def hold(line: str, release: str) -> str:
    """Runs until the file `release` exists."""
    ran(f"{line} in {os.getpid()}")
    while not Path(release).exists():
        time.sleep(0.05)
    return line


@app.task(acks_late=True)
def give_back(line: str, release: str) -> str:
    """Runs until the file `release` exists. The first run gives the task back then."""
    ran(line)
    while not Path(release).exists():
        time.sleep(0.05)
    given_back = Path(f"{release}.given-back")
    if not given_back.exists():
        given_back.touch()
        raise Reject("another worker may run it", requeue=True)
    return line


@app.task(bind=True, max_retries=3)
def flaky(self: object, needed: int) -> int:
    """Succeeds at the run with this number."""
    ran("flaky")
    retries: int = self.request.retries  # type: ignore[attr-defined]
    if retries + 1 < needed:
        raise self.retry(countdown=0.1, exc=RuntimeError("not yet"))  # type: ignore[attr-defined]
    return retries + 1
