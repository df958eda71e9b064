"""The key space on RocksDB: one directory, one process, group commit."""

from fastness.backends.rocksdb.database import RocksDatabase
from fastness.backends.rocksdb.readers import RocksReader

__all__ = ["RocksDatabase", "RocksReader"]
