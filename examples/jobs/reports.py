"""Reports: tenants take turns, so that a tenant with 1,000 reports does not delay another one.

Start a server (`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python reports.py
"""

import threading
import time

import fastness

app = fastness.TaskApp()
finished: list[str] = []  # The tenants of the reports, in the order in which they were finished.
finished_lock = threading.Lock()


@app.task(queue="reports", concurrency_key="tenant")
def report(tenant: str, number: int) -> str:
    """Render a report; its name."""
    time.sleep(0.005)
    with finished_lock:
        finished.append(tenant)
    return f"{tenant}-{number}.html"


def main() -> None:
    queue = app.plane.queue("reports")
    queue.set_policy(fastness.QueuePolicy(fair=True))
    for start in range(0, 1_000, 250):
        report.send_many([("large", number) for number in range(start, start + 250)])
    receipts = report.send_many([("small", number) for number in range(5)])
    worker = app.worker(concurrency=2)
    worker.start()
    names = [receipt.result(wait_seconds=60) for receipt in receipts]
    ahead = finished[: [index for index, tenant in enumerate(finished) if tenant == "small"][-1]].count("large")
    worker.stop()
    queue.purge()
    print(f"finished {names[0]} to {names[-1]}; fewer than 50 reports of the large tenant came first: {ahead < 50}")


if __name__ == "__main__":
    main()
