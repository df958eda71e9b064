"""The key space in a PostgreSQL database, shared by any number of processes."""

from fastness.backends.postgres.database import PostgresDatabase
from fastness.backends.postgres.readers import PostgresReader, check_unused, exclusive_url
from fastness.backends.postgres.schema import upgrade_schema, upgrade_script

__all__ = ["PostgresDatabase", "PostgresReader", "exclusive_url", "check_unused", "upgrade_schema", "upgrade_script"]
