"""Queues that lost a part of their commits count right and deliver again after a repair."""

from pathlib import Path

import fastness
from fastness.backends.rocksdb import RocksDatabase
from fastness.kv import Database, Transaction, prefix_range
from fastness.layers.queues import keys as queue_keys
from fastness.layers.queues.keys import QueueKey
from fastness.runtime.maintenance import health_checks
from fastness.runtime.maintenance.queue_repair import repair_queues
from fastness.runtime.maintenance.scan import scan_range
from fastness.testing.clock import ManualClock
from fastness.wire.health_checks import Finding

JOBS = QueueKey("main", "jobs")
KEYS = queue_keys.keys_of(JOBS)


def findings(database: Database) -> list[str]:
    return [found.what for found in health_checks.all_queues(database) if isinstance(found, Finding)]


def lose(database: Database, *ranges: tuple[bytes, bytes]) -> None:
    """Delete the first pair of each range, as a lost commit would."""

    def delete(tx: Transaction) -> None:
        for begin, end in ranges:
            [(key, _)] = tx.scan(begin, end, limit=1)
            tx.delete(key)

    database.transact(delete)


def test_repaired_queues_are_sound_and_deliver_everything(tmp_path: Path) -> None:
    clock = ManualClock()
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        jobs = plane.queue("jobs")
        jobs.put_many(range(10))
        jobs.put("urgent", priority=9)
        jobs.put("later", delay_seconds=60)
        for n in range(3):
            jobs.put(n, group="g")
        assert jobs.receive() is not None
        plane.queue("sound").put(1)
    with RocksDatabase(tmp_path / "kv", clock=clock) as database:
        assert findings(database) == []
        assert repair_queues(database) == []
        lose(
            database,
            KEYS.ready_range(),
            prefix_range(KEYS.due),
            prefix_range(KEYS.due),
            prefix_range(KEYS.own_counters),
        )
        assert len(findings(database)) > 3
        assert repair_queues(database) == [JOBS]
        assert findings(database) == []
        assert repair_queues(database) == []
        left = sum(1 for _ in scan_range(database, *prefix_range(KEYS.ready)))
    assert left == 10
    with fastness.open(f"dir:{tmp_path}", clock=clock) as plane:
        jobs = plane.queue("jobs")
        clock.advance_ms(3_600_000)
        received = 0
        while message := jobs.receive():
            message.ack()
            received += 1
        assert received == 13, "of 15, the lost pairs had a ready and a leased one"
        stats = jobs.stats()
        assert (stats.ready, stats.delayed, stats.leased, stats.blocked) == (0, 0, 0, 0)
