"""Threads on the mailboxes and contacts of several agents, against the same operations under one lock.

    python -m benches mail_contention        two tables: on this disk, and on one whose syncs take 2 ms

An operation is one synced transaction: a send, a read, a confirm, a registration or a block. The baseline holds one
lock for all agents until its transaction is synced, so each operation waits for a sync of its own. Without the lock,
the operations that wait at the same time share a sync.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Final

from benches.comparison import compare
from fastness import Plane
from fastness.backends.rocksdb import RocksDatabase
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.wire.mail import MailPolicy

THREADS: Final = 12
AGENTS: Final = 4
ROUNDS: Final = 5
CYCLES: Final = 20  # Of five operations, in each thread.
BODY: Final = b"x" * 200
SYNC_SECONDS: Final = 0.002  # The duration of an fsync on a common disk.


def main() -> None:
    compare_locking("this disk", slow=False)
    compare_locking(f"syncs of {SYNC_SECONDS * 1e3:g} ms", slow=True)


def compare_locking(disk: str, *, slow: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        database = RocksDatabase(Path(folder) / "kv")
        if slow:
            slow_down(database)
        services = Services(database)
        plane, numbers = Plane(EmbeddedTransport(services)), count()
        plane.set_mail_policy(MailPolicy(pending_max=1_000_000))
        try:
            return compare(
                f"{THREADS} threads on {AGENTS} agents: send, read, confirm, register, block; {disk}",
                {
                    "one lock, held until the sync": lambda: run(plane, numbers, threading.Lock),
                    "a transaction each, no lock": lambda: run(plane, numbers, nullcontext),
                },
                rounds=ROUNDS,
            )
        finally:
            services.stop()


def slow_down(database: RocksDatabase) -> None:
    """Let each sync of the log take SYNC_SECONDS longer. Concurrent commits share it as they share a real one."""
    log = database._log
    sync = log._sync

    def sync_slowly() -> None:
        sync()
        time.sleep(SYNC_SECONDS)

    log._sync = sync_slowly


def run(plane: Plane, numbers: "count[int]", new_lock: Callable[[], AbstractContextManager[object]]) -> int:
    """The number of operations that the threads have done."""
    lock = new_lock()
    workers = [threading.Thread(target=work, args=(plane, each, numbers, lock)) for each in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return THREADS * CYCLES * 5


def work(plane: Plane, thread: int, numbers: "count[int]", lock: AbstractContextManager[object]) -> None:
    agent, peer = f"agent-{thread % AGENTS}", f"agent-{(thread + 1) % AGENTS}"
    mailbox, from_here = plane.mailbox(agent), plane.mailbox(peer)
    for _ in range(CYCLES):
        number = next(numbers)
        with lock:
            sent = mailbox.send(peer, BODY)
        with lock:
            from_here.read(limit=1)
        with lock:
            from_here.confirm(sent.id)
        with lock:
            plane.agents.register(agent)
        with lock:
            mailbox.block(f"stranger-{number % 1_000}")


if __name__ == "__main__":
    main()
