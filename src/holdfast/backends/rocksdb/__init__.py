"""The key space on RocksDB: one directory, one process, group commit."""

from holdfast.backends.rocksdb.database import RocksDatabase

__all__ = ["RocksDatabase"]
