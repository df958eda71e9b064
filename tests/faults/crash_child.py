"""A process that writes, prints its acknowledged transactions, and waits to be killed.

Each transaction writes three keys that belong together. Once it is acknowledged, its number and tier are printed as one
line in a single write, so every complete line is an acknowledgement.
"""

import os
import sys
import threading
from pathlib import Path

from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Subspace, Transaction
from fastness.tiers import Tier

SUBSPACE = Subspace("crash")


def write(tx: Transaction, run: int, thread: int, number: int) -> None:
    for part in range(3):
        tx.put(SUBSPACE.key(run, thread, number, part), b"%d" % number * (1 + number % 50))


def main() -> None:
    path, run = Path(sys.argv[1]), int(sys.argv[2])
    database = RocksDatabase(path)

    def work(thread: int) -> None:
        for number in range(1_000_000):
            tier = Tier.IMPORTANT if (number + thread) % 3 == 0 else Tier.CRITICAL
            database.transact(write, run, thread, number, tier=tier)
            os.write(1, b"%d %d %s\n" % (thread, number, tier.value.encode()))

    for thread in range(4):
        threading.Thread(target=work, args=(thread,), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
