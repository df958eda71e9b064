"""The key space in a PostgreSQL database, shared by any number of processes."""

from holdfast.backends.postgres.database import PostgresDatabase

__all__ = ["PostgresDatabase"]
