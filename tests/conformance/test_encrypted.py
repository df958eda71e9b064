"""A key space on RocksDB and a folder of objects, in which every value is encrypted, pass the checks of plain ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastness import FileKeys
from fastness.backends.objects import open_objects
from fastness.backends.objects.encrypted import encrypted
from fastness.backends.rocksdb import RocksDatabase
from fastness.encryption_keys import new_master_key
from fastness.kv import Pair, Transaction, prefix_range, value_cipher
from fastness.kv.value_cipher import SUBSPACE, RawValues, ValueCipher
from fastness.runtime.maintenance.encryption import Encryption
from fastness.testing.conformance import CHECKS, Check
from fastness.testing.conformance.stores import STORE_CHECKS, StoreCheck

_universe_of = value_cipher.universe_of


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RocksDatabase]:
    """A key space whose checks work outside of universes, so that the plane's key encrypts all other keys."""
    monkeypatch.setattr(value_cipher, "universe_of", _universe_or_plane)
    keys = tmp_path / "keys"
    keys.write_text(new_master_key("first"))
    keys.chmod(0o600)
    with RocksDatabase(tmp_path / "kv", cipher=ValueCipher(FileKeys(keys))) as database:
        for universe in ("main", "u"):
            Encryption(database, None, None).enable(universe)
        yield database
    with RocksDatabase(tmp_path / "kv", cipher=RawValues()) as database:
        stored = [(key, value) for key, value in database.read(_all) if not key.startswith(SUBSPACE.prefix)]
    assert all(value.startswith(b"\xc1\x01") for key, value in stored if not key.startswith(b"\x02fastness\x00"))


def _universe_or_plane(key: bytes) -> bytes | None:
    if key.startswith((SUBSPACE.prefix, b"\x02fastness\x00")):
        return None
    found = _universe_of(key)
    return found if found in (b"main", b"u") else b""


def _all(tx: Transaction) -> list[Pair]:
    return tx.scan(*prefix_range(b""), limit=10_000)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_key_space(check: Check, opened: RocksDatabase) -> None:
    check(opened)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_stores(check: StoreCheck, opened: RocksDatabase, tmp_path: Path) -> None:
    check(opened, encrypted(open_objects(f"dir:{tmp_path / 'objects'}"), opened))
