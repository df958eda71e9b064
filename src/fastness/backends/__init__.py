"""Key space backends (memory, RocksDB, PostgreSQL) and the object store. They never import each other."""
