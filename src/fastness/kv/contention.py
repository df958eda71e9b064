"""How often transactions got in each other's way."""

from dataclasses import dataclass


@dataclass(slots=True)
class Contention:
    """Counters since the database was opened. Threads add to them without a lock, so they may miss a few."""

    conflicts: int = 0  # Transactions that PostgreSQL aborted because of another one.
    retries: int = 0  # Transactions that were run again, also after a lost connection or for lack of a resource.
    lock_waits: int = 0  # Functions that had to wait for a lock of another process.
