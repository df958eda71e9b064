"""The key space in a PostgreSQL database, shared by any number of processes."""

from holdfast.backends.postgres.database import PostgresDatabase
from holdfast.backends.postgres.readers import PostgresReader, alone, check_unused

__all__ = ["PostgresDatabase", "PostgresReader", "alone", "check_unused"]
