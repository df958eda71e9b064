"""Worker processes of Celery, and the app of tests/end_to_end/celery_tasks.py for the process that sends tasks."""

import json
import os
import runpy
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.forked import start_python
from tests.support.waiting import POLLS_MAX, eventually

TASKS = Path(__file__).with_name("celery_tasks.py")
SECONDS_MAX = 120.0  # Bounds every wait; far longer than any step takes.
FAST = {  # Celery waits for seconds in several places, which tests need not.
    "broker_connection_retry_on_startup": True,
    "worker_enable_remote_control": False,
    "worker_send_task_events": False,
    "task_publish_retry": True,
    "worker_prefetch_multiplier": 1,
    "result_expires": 3_600,
    "timezone": "UTC",
}


CELERY = """
import os, sys, warnings
os.setsid()  # A kill reaches the processes of its pool, too.
warnings.resetwarnings()
sys.path.insert(0, os.getcwd())
from celery.__main__ import main
main()
"""


def start_celery(words: list[str], log: Path, *, cwd: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start the command `celery` as the leader of its own session."""
    with log.open("wb") as file:
        return start_python(["-c", CELERY, *words], cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT)


class Workers:
    """A folder with what workers write, the tasks, and the workers that were started."""

    def __init__(self, folder: Path, conf: dict[str, Any]) -> None:
        self._folder = folder
        self._runs = folder / "runs"
        self._runs.touch()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("FASTNESS_", "AWS_"))},
            "CELERY_TESTS": json.dumps({**FAST, **conf}),
            "CELERY_RUNS": str(self._runs),
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self.tasks = self._load()

    def _load(self) -> SimpleNamespace:
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            return SimpleNamespace(**runpy.run_path(str(TASKS), run_name="celery_tasks"))
        finally:
            os.environ.clear()
            os.environ.update(before)

    def start(self, *, pool: str = "prefork", concurrency: int = 2) -> "subprocess.Popen[bytes]":
        """Start a worker, and wait until it takes tasks."""
        name = f"worker{len(self._started)}"
        log = self._folder / f"{name}.log"
        words = ["-A", "celery_tasks", "worker", "--loglevel=INFO", f"-n{name}@%h", f"--pool={pool}"]
        words += [f"--concurrency={concurrency}", "--without-gossip", "--without-mingle"]
        worker = start_celery(words, log, cwd=TASKS.parent, env=self._environment)
        self._started.append(worker)
        self.wait(lambda: "ready." in log.read_text(), log.read_text)
        return worker

    def kill(self, worker: "subprocess.Popen[bytes]") -> None:
        """End a worker and its pool without any notice, as a power loss does."""
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    def runs(self) -> list[str]:
        """What tasks have written, in order."""
        return self._runs.read_text().splitlines()

    def wait(self, is_done: Callable[[], bool], shown: Callable[[], object] | None = None) -> None:
        eventually(is_done, lambda: f"{(shown or self.runs)()}\n{self.logs()}", polls_max=2 * POLLS_MAX)

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self._folder.glob("worker*.log")))

    def close(self) -> None:
        for worker in self._started:
            if worker.poll() is None:
                self.kill(worker)
        self.tasks.app.backend.close()
        self.tasks.app.close()


@contextmanager
def workers(folder: Path, **conf: Any) -> Iterator[Workers]:
    folder.mkdir(exist_ok=True)
    found = Workers(folder, conf)
    try:
        yield found
    finally:
        found.close()
