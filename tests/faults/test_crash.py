"""SIGKILL at random points: acknowledged transactions survive, and no transaction is partial."""

import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Database, Subspace, Transaction, pages
from tests.support.depth import Depth
from tests.support.forked import run_python, start_python

CHILD = Path(__file__).parent / "crash_child.py"
SUBSPACE = Subspace("crash")


def kill_after(path: Path, run: int, delay_seconds: float) -> set[tuple[int, int, int]]:
    """Run the child, and kill it after a delay from its first acknowledgement. Returns what was acknowledged."""
    with start_python([CHILD, path, str(run)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        head = child.stdout.read(1)  # The first acknowledgement: from now on it is writing.
        time.sleep(delay_seconds)  # A random delay, not a wait for a condition.
        child.send_signal(signal.SIGKILL)
        lines = (head + child.stdout.read()).splitlines(keepends=True)
    whole = (line.split() for line in lines if line.endswith(b"\n"))
    return {(run, int(words[0]), int(words[1])) for words in whole}


def stored_parts(tx: Transaction) -> Counter[tuple[int, int, int]]:
    parts: Counter[tuple[int, int, int]] = Counter()
    for page in pages(tx, *SUBSPACE.range()):
        for key, value in page:
            run, thread, number, _ = SUBSPACE.unpack(key)
            assert value == b"%d" % number * (1 + number % 50)
            parts[run, thread, number] += 1
    return parts


def test_no_acknowledged_transaction_is_lost_and_none_is_partial(tmp_path: Path, depth: Depth) -> None:
    kills = depth.kills
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    acknowledged: set[tuple[int, int, int]] = set()
    for run in range(kills):
        acknowledged |= kill_after(tmp_path / "kv", run, rng.uniform(0, 0.06))
        if run % 10 == 9 or run == kills - 1:
            with RocksDatabase(tmp_path / "kv") as database:
                parts = database.read(stored_parts)
            assert acknowledged <= parts.keys(), f"lost {sorted(acknowledged - parts.keys())[:5]}"
            assert set(parts.values()) == {3}
    print(f"{kills} kills, {len(acknowledged)} acknowledged transactions, all stored")
    assert len(acknowledged) >= kills


def test_acknowledged_writes_survive_an_exit_without_close(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from fastness.backends.rocksdb import RocksDatabase;"
        "from fastness.tiers import Tier; database = RocksDatabase(Path(sys.argv[1]));"
        "database.transact(lambda tx: tx.put(b'important', b'1'), tier=Tier.IMPORTANT); os._exit(1)"
    )
    run_python(["-c", script, tmp_path / "kv"])
    with RocksDatabase(tmp_path / "kv") as database:
        assert get(database, b"important") == b"1"


def get(database: Database, key: bytes) -> bytes | None:
    return database.read(Transaction.get, key)
