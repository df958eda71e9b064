"""A DuckDB file with a view for each table of a lake, the views of `views.py`, and a list of the tables.

By default a view names the Parquet files of the table's current version: it needs no extension, and shows the lake as
it was when it was published. With `uses_delta_scan`, a view reads the Delta log each time; that needs DuckDB's
extension `delta`, here and for every reader.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from fastness.errors import InvalidArgument, PathUnusable, Unsupported
from fastness.pipeline.catalogue.views import VIEWS
from fastness.pipeline.lake import Lake, LakeTable
from fastness.pipeline.schemas import TABLES, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

LISTING: Final = "lake_tables"
_TYPES: Final = {
    pa.string(): "VARCHAR",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.binary(): "BLOB",
    pa.date32(): "DATE",
    pa.timestamp("ms", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
    pa.list_(pa.string()): "VARCHAR[]",
}


def publish(lake: Lake, path: str, *, uses_delta_scan: bool = False) -> list[str]:
    """Write the file, or replace it atomically; returns the names of its views.

    Readers that have the old file open keep it.

    Raises:
        Unsupported: DuckDB, or an extension that it needs for this lake, is not installed.
        InvalidArgument: the lake's path has characters that DuckDB takes for a pattern.
        PathUnusable: the file cannot be written.
    """
    duckdb = _duckdb()
    if set(lake.location.url) & set("*?["):
        raise InvalidArgument(f"DuckDB cannot read a lake whose path has *, ? or [: {lake.location.url}")
    target = Path(path).absolute()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.unlink(missing_ok=True)
        with duckdb.connect(str(draft), config={"autoinstall_known_extensions": "false"}) as connection:
            _load_extensions(connection, lake, uses_delta_scan=uses_delta_scan)
            names = _create(connection, lake, uses_delta_scan=uses_delta_scan)
        draft.replace(target)
    except (OSError, duckdb.IOException) as error:
        raise PathUnusable(f"{target} cannot be written ({error}); give a file in a writable folder") from error
    finally:
        draft.unlink(missing_ok=True)
    return names


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise Unsupported("A DuckDB file needs DuckDB; run: pip install duckdb") from error
    return duckdb


def _load_extensions(connection: "DuckDBPyConnection", lake: Lake, *, uses_delta_scan: bool) -> None:
    needed = (["delta"] if uses_delta_scan else []) + ([] if lake.location.is_local else ["httpfs"])
    for name in needed:
        try:
            connection.execute(f"LOAD {name}")
        except _duckdb().Error as error:
            raise Unsupported(
                f"DuckDB needs its extension {name} for this; install it where there is a network, "
                f'run: duckdb -c "INSTALL {name}"'
            ) from error


def _create(connection: "DuckDBPyConnection", lake: Lake, *, uses_delta_scan: bool) -> list[str]:
    now = datetime.now(UTC)
    connection.execute(
        f"CREATE TABLE {LISTING} (table_name VARCHAR, table_rows BIGINT, files BIGINT, published_at TIMESTAMPTZ)"
    )
    for table in TABLES.values():
        found = lake.table(table)
        query = _delta_scan(found) if uses_delta_scan and found.exists else _file_scan(found)
        connection.execute(f"CREATE VIEW {table.name} AS {query}")
        listed = [table.name, found.count(), len(found.entries()), now]
        connection.execute(f"INSERT INTO {LISTING} VALUES (?, ?, ?, ?)", listed)
    for view in VIEWS:
        connection.execute(f"CREATE VIEW {view.name} AS {view.sql()}")
        connection.execute(f"COMMENT ON VIEW {view.name} IS {_text(view.about)}")
    return [*TABLES, *(view.name for view in VIEWS)]


def _delta_scan(table: LakeTable) -> str:
    columns = ", ".join(map(_name, table.table.schema.names))
    return f"SELECT {columns} FROM delta_scan({_text(table.location.url)})"


def _file_scan(table: LakeTable) -> str:
    by_universe: dict[str, list[str]] = {}
    for file in table.entries():
        by_universe.setdefault(file.universe, []).append(f"{table.location.url}/{file.path}")
    if not by_universe:
        nulls = (f"CAST(NULL AS {_TYPES[field.type]}) AS {_name(field.name)}" for field in table.table.schema)
        return f"SELECT {', '.join(nulls)} WHERE false"
    # The name of a folder may be encoded, so the universe comes from the Delta log. A day is in the path as it is.
    return " UNION ALL ".join(
        f"SELECT {_columns(table.table, universe)} FROM {_scan(files)}"
        for universe, files in sorted(by_universe.items())
    )


def _columns(table: Table, universe: str) -> str:
    """The columns of the files, and those that are only in their paths."""
    values = {field.name: _name(field.name) for field in table.schema}
    for name in table.folders:
        values[name] = f"nullif(regexp_extract(filename, '/{name}=([0-9-]+)/[^/]+$', 1), '')"
    values["universe"] = _text(universe)
    return ", ".join(
        f"CAST({values[field.name]} AS {_TYPES[field.type]}) AS {_name(field.name)}" for field in table.schema
    )


def _scan(files: Sequence[str]) -> str:
    return f"read_parquet([{', '.join(map(_text, files))}], hive_partitioning = false, filename = true)"


def _name(name: str) -> str:
    return f'"{name}"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
