"""Workers: run a handler for every message of a queue.

    receive ──► handler(message) ──► returns: ack     raises: nack with back-off     is stopped: nack, not counted
       ▲
       └── the plane fails: retry at once three times, then after 250 ms, doubling up to five minutes

A thread of `Worker` that goes on acknowledges its message in the commit that leases its next one.

Errors of handlers, hooks and the plane are counted, logged and passed to `on_error`. A handler may settle its message
itself. A shutdown receives no new messages, waits for running handlers, and returns unfinished messages without
counting a failure.
"""

from holdfast.handles.workers.consumers import RestartPolicy, WorkerStats
from holdfast.handles.workers.tasks import AsyncWorker
from holdfast.handles.workers.threads import Worker

__all__ = ["AsyncWorker", "RestartPolicy", "Worker", "WorkerStats"]
