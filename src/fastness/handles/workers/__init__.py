"""Workers: run a handler for every message of a queue, or for batches of them.

    receive ──► handler(message) ──► returns: ack     raises: nack with back-off     is stopped: nack, not counted
       ▲                             its message is cancelled: nothing
       └── the plane fails: retry at once three times, then after 250 ms, doubling up to five minutes

Handled messages are acknowledged in the commit that leases the next ones. If no receive will do that soon, because one
waits for messages or a handler is running, they are acknowledged by themselves, all that are handled in one call.

While handlers are quick, a worker holds more messages than it has slots (`Window`): one call then brings a window of
messages and acknowledges the last one. What is buffered when handlers become slow is returned, not counted.

A worker asks for cancels of the messages that it holds for longer than a moment, with one call for each queue.

Errors of handlers and the plane are counted, logged and passed to `on_error`. A handler may settle its message itself.
A shutdown receives no new messages, waits for running handlers, and returns unfinished messages without counting a
failure.

Hooks see the life of a worker: `on_start`, `on_message` before a handler, `on_settled` once for each message that the
worker is done with, `on_error`, `on_stop`. Their errors are logged only.
"""

from fastness.handles.workers.consumers import RestartPolicy, WorkerOutcome, WorkerStats
from fastness.handles.workers.tasks import AsyncWorker
from fastness.handles.workers.threads import Worker

__all__ = ["AsyncWorker", "RestartPolicy", "Worker", "WorkerOutcome", "WorkerStats"]
