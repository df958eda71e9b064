"""RocksDatabase's cache of recently read and written pairs: bounded, and never stale."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastness.backends.rocksdb import RocksDatabase, views
from fastness.kv import Transaction
from fastness.limits import PAIR_CACHE_VALUE_BYTES_MAX, WRITE_COST_BYTES

LIMIT = 20_000


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RocksDatabase]:
    monkeypatch.setattr(views, "PAIR_CACHE_BYTES", LIMIT)
    with RocksDatabase(tmp_path / "kv") as database:
        yield database


def cached_bytes(database: RocksDatabase) -> list[int]:
    """The size of each of the two generations."""
    cache = database._current
    return [
        sum(len(key) + len(value or b"") + WRITE_COST_BYTES for key, value in pairs.items())
        for pairs in (cache._young, cache._old)
    ]


def test_the_cache_is_bounded_and_reads_are_correct(database: RocksDatabase) -> None:
    rng, expected = random.Random(5), dict[bytes, bytes | None]()

    def read_and_write(tx: Transaction) -> None:
        for _ in range(10):
            key = b"%d" % rng.randrange(400)
            if rng.random() < 0.3:
                assert tx.get(key) == expected.get(key)
                continue
            value = None if rng.random() < 0.2 else bytes(rng.randrange(300))
            expected[key] = value
            if value is None:
                tx.delete(key)
            else:
                tx.put(key, value)

    for _ in range(300):
        database.transact(read_and_write)
        assert max(cached_bytes(database)) < LIMIT + 10 * (300 + WRITE_COST_BYTES + 3)
    assert all(database.transact(lambda tx, key=key: tx.get(key)) == value for key, value in expected.items())
    assert max(cached_bytes(database)) < LIMIT + 300 + WRITE_COST_BYTES + 3, "reading is bounded too"


def test_a_long_value_is_not_cached_and_evicts_the_short_one_it_replaces(database: RocksDatabase) -> None:
    long = bytes(PAIR_CACHE_VALUE_BYTES_MAX + 1)
    database.transact(lambda tx: tx.put(b"key", b"short"))
    database.transact(lambda tx: tx.put(b"key", long))
    assert b"key" not in database._current._young
    assert database.transact(lambda tx: tx.get(b"key")) == long
    assert b"key" not in database._current._young
