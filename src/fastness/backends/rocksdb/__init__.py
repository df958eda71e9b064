"""The key space on RocksDB: one directory, one process, group commit."""

from holdfast.backends.rocksdb.database import RocksDatabase
from holdfast.backends.rocksdb.readers import RocksReader

__all__ = ["RocksDatabase", "RocksReader"]
