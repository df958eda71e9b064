"""What a RocksDB keeps at hand of what was read and written lately: bounded, and never stale."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.backends.rocksdb import RocksDatabase, views
from holdfast.kv import Transaction
from holdfast.limits import WRITE_COST_BYTES

LIMIT = 20_000


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RocksDatabase]:
    monkeypatch.setattr(views, "REMEMBERED_BYTES", LIMIT)
    with RocksDatabase(tmp_path / "kv") as database:
        yield database


def kept(database: RocksDatabase) -> list[int]:
    """How many bytes each of the two generations has."""
    remembered = database._current
    return [
        sum(len(key) + len(value or b"") + WRITE_COST_BYTES for key, value in pairs.items())
        for pairs in (remembered._lately, remembered._before)
    ]


def test_what_is_kept_is_bounded_and_what_is_read_is_right(database: RocksDatabase) -> None:
    dice, right = random.Random(5), dict[bytes, bytes | None]()

    def some(tx: Transaction) -> None:
        for _ in range(10):
            key = b"%d" % dice.randrange(400)
            if dice.random() < 0.3:
                assert tx.get(key) == right.get(key)
                continue
            value = None if dice.random() < 0.2 else bytes(dice.randrange(300))
            right[key] = value
            if value is None:
                tx.delete(key)
            else:
                tx.put(key, value)

    for _ in range(300):
        database.transact(some)
        assert max(kept(database)) < LIMIT + 10 * (300 + WRITE_COST_BYTES + 3)
    assert all(database.transact(lambda tx, key=key: tx.get(key)) == value for key, value in right.items())
    assert max(kept(database)) < LIMIT + 300 + WRITE_COST_BYTES + 3, "reading is bounded too"


def test_a_long_value_is_not_kept_and_forgotten_where_a_short_one_was(database: RocksDatabase) -> None:
    long = bytes(views.REMEMBERED_VALUE_BYTES_MAX + 1)
    database.transact(lambda tx: tx.put(b"key", b"short"))
    database.transact(lambda tx: tx.put(b"key", long))
    assert b"key" not in database._current._lately
    assert database.transact(lambda tx: tx.get(b"key")) == long
    assert b"key" not in database._current._lately
