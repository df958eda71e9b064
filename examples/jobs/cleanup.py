"""A clean-up every night: one schedule, which survives restarts and runs once although there are several workers.

Start a server (`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python cleanup.py
"""

import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import fastness

app = fastness.TaskApp(timezone="Europe/Berlin")
DAY_SECONDS = 86_400


@app.task(queue="maintenance", unique="folder", max_attempts=3)
def clean(folder: str, days: int) -> int:
    """Remove files that were not changed for some days; how many there were."""
    oldest = time.time() - days * DAY_SECONDS
    old = [path for path in Path(folder).iterdir() if path.is_file() and path.stat().st_mtime < oldest]
    for path in old:
        if fastness.current_job().cancelled:
            break
        path.unlink(missing_ok=True)
    return len(old)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for age in range(10):
            path = Path(folder, f"upload-{age}.tmp")
            path.touch()
            os.utime(path, (time.time() - age * DAY_SECONDS - 60,) * 2)
        schedule = clean.schedule("clean-uploads", "0 3 * * *", folder, days=7)
        following = datetime.fromtimestamp(schedule.next_ms / 1_000, UTC)
        print(f"the next clean-up is in less than a day: {following.timestamp() - time.time() < DAY_SECONDS + 3_600}")
        worker = app.worker(concurrency=1)
        worker.start()
        receipts = [clean.send(folder, days=7) for _ in range(2)]  # The second one is a duplicate, unless one is done.
        print(f"removed {receipts[0].result(wait_seconds=30)} files, {len(os.listdir(folder))} are left")
        worker.stop()
        app.plane.queue("maintenance").unschedule("clean-uploads")


if __name__ == "__main__":
    main()
