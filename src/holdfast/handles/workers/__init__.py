"""Workers: consumers that run by themselves.

    receive ──► handler(message) ──► returned: ack     raised: nack, later and later     stopped: given back, uncounted
       ▲
       └── the plane failed: again at once three times, then after 250 ms, doubling up to five minutes

Errors of handlers, of hooks and of the plane take one path: they are counted, logged and given to `on_error`. A handler
that settles its message itself is left alone. A shutdown takes no new messages, waits for those at work, and gives back
what it could not finish without counting it as a failure.
"""

from holdfast.handles.workers.consumers import RestartPolicy, WorkerStats
from holdfast.handles.workers.tasks import AsyncWorker
from holdfast.handles.workers.threads import Worker

__all__ = ["AsyncWorker", "RestartPolicy", "Worker", "WorkerStats"]
