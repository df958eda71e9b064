"""Webhooks: at most 20 requests per second and host, and a pause for a host that answers 429.

Start a server (`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python webhooks.py
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import fastness

app = fastness.TaskApp()


def host_of(url: str, event: dict[str, Any]) -> str:
    """The key of a call: calls of one host share the limits of the queue's policy."""
    del event
    return urlsplit(url).netloc


@app.task(queue="webhooks", concurrency_key=host_of, max_attempts=8)
def deliver(url: str, event: dict[str, Any]) -> int:
    """Post an event; the status of the answer."""
    request = Request(url, data=json.dumps(event).encode(), headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            if error.code == 429:
                seconds = float(error.headers["Retry-After"])
                app.plane.queue("webhooks").pause_key(host_of(url, event), seconds)
                raise fastness.RetryLater(seconds) from error
            if 400 <= error.code < 500:
                raise fastness.Reject(f"{url} answered {error.code}") from error
            raise


class Peer(BaseHTTPRequestHandler):
    """The receiver of the events. It refuses the third request."""

    lock = threading.Lock()
    statuses: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            status = 429 if len(self.statuses) == 2 else 200
            self.statuses.append(status)
        self.send_response(status)
        self.send_header("Retry-After", "1")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    app.plane.queue("webhooks").set_policy(fastness.QueuePolicy(rate_per_key=20, concurrency_per_key=2))
    peer = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    threading.Thread(target=peer.serve_forever, daemon=True).start()
    worker = app.worker(concurrency=4)
    worker.start()
    url = f"http://127.0.0.1:{peer.server_port}/events"
    receipts = deliver.send_many([(url, {"order": number}) for number in range(10)])
    delivered = [receipt.result(wait_seconds=30) for receipt in receipts]
    worker.stop()
    peer.shutdown()
    print(f"{delivered.count(200)} events delivered; refused requests: {Peer.statuses.count(429)}")


if __name__ == "__main__":
    main()
