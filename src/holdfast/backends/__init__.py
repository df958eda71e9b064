"""The key space on memory, RocksDB and PostgreSQL, and the object store. Siblings never import each other."""
