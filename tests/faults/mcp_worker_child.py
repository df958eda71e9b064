"""A worker of a tool in its own process: `mcp_worker_child.py URL TOKEN FOLDER`.

It works on two jobs at a time. It reports progress when it begins one, and ends it once the file `go` is in the folder.
"""

import sys
import time
from pathlib import Path

import fastness
from fastness.mcp.tasks import task_of

SECONDS_MAX = 60.0


def main(url: str, token: str, folder: Path) -> None:
    def resize(message: fastness.Message) -> None:
        with task_of(message) as task:
            task.progress(1, 2, "started")
            deadline = time.monotonic() + SECONDS_MAX
            while not (folder / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            task.progress(2, 2, "finished")
            message.ack(result={"width": message.json()["width"], "attempts": message.attempts})

    with fastness.connect(url, token=token, patience_seconds=SECONDS_MAX) as plane:
        fastness.Worker(
            plane, {"resize": resize}, concurrency=2, prefetch=0, on_start=lambda: print("ready", flush=True)
        ).run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
