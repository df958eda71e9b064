"""The catalogue: a DuckDB file, Spark tables, and the same numbers from DuckDB, polars and Spark SQL."""

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from fastness.cli.main import root
from fastness.errors import InvalidArgument, PathUnusable, TransactionConflict, Unsupported
from fastness.pipeline import jobs
from fastness.pipeline.catalogue import duckdb_file, spark_schema
from fastness.pipeline.catalogue.views import VIEWS
from fastness.pipeline.config import Config
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import TABLES, Table
from tests.pipeline import planes

PAGE = (Path(__file__).parents[2] / "docs" / "lake.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
QUERIES = {name: re.findall(r"^```sql\n(.*?)^```$", SECTIONS[name], re.DOTALL | re.MULTILINE) for name in TABLES}
NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
UNIVERSES = ["main", "2026", "a@b:c+d"]  # A number, and signs that are special in URLs.
WORDS = {
    "verdict": ["ok", "contradicts", "incomplete"],
    "outcome": ["acked", "dead", "waiting", "delivered", "confirmed"],
    "place": ["keys", "objects"],
    "source": ["lake", "plane"],
}


def random_rows(table: Table, count: int, random: Random) -> pa.Table:
    def value(field: pa.Field) -> Any:
        if field.name == "universe":
            return random.choice(UNIVERSES)
        if pa.types.is_string(field.type):
            return random.choice(WORDS.get(field.name, ["ada", "bob", "it's", "eve"]))
        if pa.types.is_timestamp(field.type):
            return NOW + timedelta(milliseconds=random.randrange(10**9))
        if pa.types.is_date(field.type):
            return date(2026, 11, random.randint(1, 15))
        if pa.types.is_boolean(field.type):
            return random.random() < 0.5
        if pa.types.is_floating(field.type):
            return None if random.random() < 0.1 else random.randrange(10**6) / 8
        return random.randrange(10**6) if pa.types.is_integer(field.type) else None

    rows = [{field.name: value(field) for field in table.schema} for _ in range(count)]
    return pa.Table.from_pylist(rows, table.schema)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake with rows in every table, and with files that its tables no longer use."""
    folder = tmp_path_factory.mktemp("catalogue")
    built = planes.build(folder / "data", worlds=3, entries=150, messages=10, entities=5, activity=10)
    jobs.run("ingest", None, Config(data=built.url, lake=str(folder / "lake")))
    lake, random = Lake(str(folder / "lake")), Random(1)
    for table in TABLES.values():
        found = lake.table(table)
        if not found.count():
            for count in (20, 60):  # The first rows are replaced: their files stay in the folder.
                found.overwrite(random_rows(table, count, random).to_batches())
    return lake


@pytest.fixture(scope="module")
def published(lake: Lake) -> Path:
    path = Path(lake.location.url).with_name("lake.duckdb")
    duckdb_file.publish(lake, str(path))
    return path


def normal(rows: list[Any]) -> list[tuple[Any, ...]]:
    """Rows of any engine as comparable values: Spark's times are local and naive, DuckDB's sums may be decimals."""

    def value(each: Any) -> Any:
        if isinstance(each, datetime):
            return each.astimezone(UTC)
        return float(each) if isinstance(each, float) else int(each) if isinstance(each, bool | int) else each

    return [tuple(value(each) for each in row) for row in rows]


def in_any_order(rows: list[Any]) -> list[tuple[Any, ...]]:
    return sorted(normal(rows), key=repr)


class Engines:
    """The blocks of docs/lake.md that run a query, on the same lake."""

    def __init__(self, folder: Path) -> None:
        blocks = re.findall(r"^```python\n(.*?)^```$", SECTIONS["How to query it"], re.DOTALL | re.MULTILINE)
        assert len(blocks) == 4
        self.query: str = re.sub(r'^query = "(.*)"\n$', r"\1", blocks[0])
        self._duckdb, self._polars, self._spark = (
            block.replace('"lake.duckdb"', repr(str(folder / "lake.duckdb"))).replace(
                '"lake"', repr(str(folder / "lake"))
            )
            for block in blocks[1:]
        )

    def duckdb(self, query: str) -> list[Any]:
        return self._rows(self._duckdb, query)

    def polars(self, query: str) -> list[Any]:
        return self._rows(self._polars, query)

    def spark(self, query: str) -> list[Any]:
        return self._rows(self._spark, query)

    def _rows(self, code: str, query: str) -> list[Any]:
        scope: dict[str, Any] = {"query": query}
        exec(code, scope)
        rows: list[Any] = scope["rows"]
        return rows


@pytest.fixture(scope="module")
def engines(published: Path) -> Engines:
    return Engines(published.parent)


# The same numbers from every engine.


@pytest.mark.rotating
@pytest.mark.parametrize("table", TABLES)
def test_example_of_a_table_gives_the_same_rows_in_duckdb_and_polars(engines: Engines, table: str) -> None:
    [query] = QUERIES[table]
    rows = normal(engines.duckdb(query))
    assert rows
    assert normal(engines.polars(query)) == rows


@pytest.mark.rotating
@pytest.mark.parametrize("view", VIEWS, ids=[view.name for view in VIEWS])
def test_view_gives_the_same_rows_in_duckdb_and_polars(engines: Engines, view: Any) -> None:
    rows = in_any_order(engines.duckdb(f"SELECT * FROM {view.name}"))
    assert rows
    assert in_any_order(engines.polars(view.sql())) == rows


@pytest.fixture(scope="module")
def by_spark(engines: Engines, spark: SparkSession) -> Callable[[str], list[Any]]:
    """Runs a query in Spark, where the block of docs/lake.md has made the tables and views of the lake."""
    assert spark.range(1).count() == 1
    assert normal(engines.spark(engines.query)) == normal(engines.duckdb(engines.query))
    return lambda query: [tuple(row) for row in spark.sql(query).collect()]


# Spark takes a second of processor time for each, so one of each kind runs always.
@pytest.mark.parametrize(
    "table", ["messages", *(pytest.param(each, marks=pytest.mark.rotating) for each in TABLES if each != "messages")]
)
def test_example_of_a_table_gives_the_same_rows_in_spark(
    engines: Engines, by_spark: Callable[[str], list[Any]], table: str
) -> None:
    [query] = QUERIES[table]
    assert normal(by_spark(query)) == normal(engines.duckdb(query))


@pytest.mark.parametrize(
    "view", [VIEWS[0].name, *(pytest.param(view.name, marks=pytest.mark.rotating) for view in VIEWS[1:])]
)
def test_view_gives_the_same_rows_in_spark(engines: Engines, by_spark: Callable[[str], list[Any]], view: str) -> None:
    query = f"SELECT * FROM {view}"
    assert in_any_order(by_spark(query)) == in_any_order(engines.duckdb(query))


def test_days_of_session_logs_are_the_same_in_every_engine(tmp_path: Path, spark: SparkSession) -> None:
    lake, activity = Lake(str(tmp_path / "lake")), TABLES["activity"]
    lake.table(activity).append_rows(random_rows(activity, 40, Random(2)))
    duckdb_file.publish(lake, str(tmp_path / "lake.duckdb"))
    engines = Engines(tmp_path)
    assert spark.range(1).count() == 1
    rows: list[tuple[Any, ...]] = []
    for query in (
        "SELECT universe, day, COUNT(*) AS found FROM activity GROUP BY universe, day ORDER BY universe, day",
        "SELECT universe, n, day FROM activity WHERE day = DATE '2026-11-04' ORDER BY universe, n",
    ):
        rows = normal(engines.duckdb(query))
        assert rows
        assert normal(engines.polars(query)) == rows
        assert normal(engines.spark(query)) == rows
    of_day = lake.table(activity).rows(["day"]).column("day").to_pylist().count(date(2026, 11, 4))
    assert len(rows) == of_day


def test_duckdb_reads_only_the_files_of_a_day(tmp_path: Path) -> None:
    lake, activity = Lake(str(tmp_path / "lake")), TABLES["activity"]
    rows = random_rows(activity, 200, Random(1)).set_column(0, "universe", pa.array(["main"] * 200))
    lake.table(activity).append_rows(rows)
    assert len(lake.table(activity).entries()) == 15
    duckdb_file.publish(lake, str(tmp_path / "lake.duckdb"))
    with duckdb.connect(str(tmp_path / "lake.duckdb"), read_only=True) as connection:
        plan = connection.execute("EXPLAIN SELECT n FROM activity WHERE day = DATE '2026-11-04'").fetchall()
    assert "1/15" in "".join(text for _, text in plan)


def test_views_are_documented() -> None:
    found = re.findall(r"^\| `(\w+)` \| (.*) \|$", SECTIONS["Catalogues and views"], re.MULTILINE)
    assert found == [(view.name, view.about) for view in VIEWS]


# DuckDB.


def test_duckdb_file_has_every_row_and_column(lake: Lake, published: Path) -> None:
    with duckdb.connect(str(published), read_only=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for table in TABLES.values():
            found = connection.sql(f"SELECT * FROM {table.name}").to_arrow_table()
            expected = lake.table(table).rows()
            assert found.column_names == expected.column_names
            assert in_any_order([tuple(row.values()) for row in found.to_pylist()]) == in_any_order(
                [tuple(row.values()) for row in expected.to_pylist()]
            ), table.name
        listed = dict(connection.execute("SELECT table_name, table_rows FROM lake_tables").fetchall())
        assert listed == {name: lake.table(table).count() for name, table in TABLES.items()}
        comments = dict(
            connection.execute("SELECT view_name, comment FROM duckdb_views() WHERE NOT internal").fetchall()
        )
        assert comments["dead_letters"] == "Messages that are dead letters, with their last error."


def test_duckdb_file_reads_a_universe_with_an_equals_sign(tmp_path: Path) -> None:
    """Its folder is `universe=a=b`, which readers of Hive folders misunderstand."""
    lake, talk = Lake(str(tmp_path / "lake")), TABLES["rollup_talk"]
    rows = random_rows(talk, 5, Random(1)).set_column(0, "universe", pa.array(["a=b"] * 5))
    lake.table(talk).overwrite(rows.to_batches())
    duckdb_file.publish(lake, str(tmp_path / "lake.duckdb"))
    with duckdb.connect(str(tmp_path / "lake.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT universe, COUNT(*) FROM rollup_talk GROUP BY ALL").fetchall() == [("a=b", 5)]


def test_duckdb_file_of_a_lake_without_tables_has_empty_views(tmp_path: Path) -> None:
    names = duckdb_file.publish(Lake(str(tmp_path / "lake")), str(tmp_path / "lake.duckdb"))
    assert names == [*TABLES, *(view.name for view in VIEWS)]
    with duckdb.connect(str(tmp_path / "lake.duckdb"), read_only=True) as connection:
        for name in names:
            assert connection.execute(f"SELECT * FROM {name}").fetchall() == []


def test_publishing_again_replaces_the_file(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "lake.duckdb"
    duckdb_file.publish(Lake(str(tmp_path / "nothing")), str(path))
    with duckdb.connect(str(path), read_only=True) as reader:
        words = ["pipeline", "publish", "--lake", lake.location.url, "--duckdb", str(path), "--json"]
        result = CliRunner().invoke(root, words)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["published"][str(path)][0] == "journal"
        assert reader.execute("SELECT COUNT(*) FROM journal").fetchall() == [(0,)]  # A reader keeps its file.
    assert [file.name for file in tmp_path.glob("*lake.duckdb*")] == ["lake.duckdb"]
    with duckdb.connect(str(path), read_only=True) as reader:
        assert reader.execute("SELECT COUNT(*) FROM journal").fetchall() == [(lake.table(TABLES["journal"]).count(),)]


def test_unusable_targets_are_refused(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(PathUnusable, match="cannot be written"):
        duckdb_file.publish(lake, str(tmp_path / "no" / "lake.duckdb"))
    with pytest.raises(InvalidArgument, match="path has"):
        duckdb_file.publish(Lake(str(tmp_path / "a[b")), str(tmp_path / "x.duckdb"))
    for words, code in (
        (["--lake", lake.location.url], 2),
        (["--lake", lake.location.url, "--spark-schema", "x", "--delta-scan"], 2),
        (["--lake", str(tmp_path / "nothing"), "--duckdb", str(tmp_path / "x.duckdb")], 4),
    ):
        assert CliRunner().invoke(root, ["pipeline", "publish", *words]).exit_code == code


def has_extension(name: str) -> bool:
    try:
        duckdb.connect(config={"autoinstall_known_extensions": "false"}).execute(f"LOAD {name}")
    except duckdb.Error:
        return False
    return True


def test_delta_scan_needs_its_extension(lake: Lake, tmp_path: Path) -> None:
    path = tmp_path / "lake.duckdb"
    if has_extension("delta"):
        duckdb_file.publish(lake, str(path), uses_delta_scan=True)
        with duckdb.connect(str(path), read_only=True) as connection:
            rows = connection.execute("SELECT COUNT(*) FROM journal").fetchall()
        assert rows == [(lake.table(TABLES["journal"]).count(),)]
    else:
        with pytest.raises(Unsupported, match="INSTALL delta"):
            duckdb_file.publish(lake, str(path), uses_delta_scan=True)
        assert list(tmp_path.iterdir()) == []


# Spark's catalogue.


@pytest.fixture
def schema(spark: SparkSession) -> Iterator[str]:
    yield "published"
    spark.sql("DROP SCHEMA IF EXISTS published CASCADE")


def test_spark_schema_has_the_tables_and_views(spark: SparkSession, schema: str, tmp_path: Path) -> None:
    """With Parquet as the data source: Delta Lake's jar is not part of the package. The tables have one commit."""
    lake, random = Lake(str(tmp_path / "lake")), Random(2)
    for name in ("messages", "rollup_talk"):
        lake.table(TABLES[name]).overwrite(random_rows(TABLES[name], 30, random).to_batches())
    for _ in range(2):  # Publishing again changes nothing.
        names = spark_schema.publish(spark, lake, schema, provider="parquet")
        assert names == ["messages", "rollup_talk", "dead_letters", "mail_pairs"]
        for name in ("messages", "rollup_talk"):
            spark.sql(f"MSCK REPAIR TABLE {schema}.{name}")  # Delta Lake finds its partitions by itself.
    dead = [row for row in lake.table(TABLES["messages"]).rows().to_pylist() if row["outcome"] == "dead"]
    assert spark.sql(f"SELECT * FROM {schema}.dead_letters").count() == len(dead) > 0
    with pytest.raises(TransactionConflict, match=r"DROP TABLE published\.messages"):
        other = Lake(str(tmp_path / "other"))
        other.table(TABLES["messages"]).overwrite(random_rows(TABLES["messages"], 3, random).to_batches())
        spark_schema.publish(spark, other, schema, provider="parquet")
    spark.sql(f"DROP TABLE {schema}.messages")
    assert lake.table(TABLES["messages"]).rows().num_rows == 30
    with pytest.raises(Unsupported, match=r"spark\.jars\.packages"):
        spark_schema.publish(spark, lake, schema)  # This Spark has no Delta Lake.


def test_location_of_a_table_for_spark() -> None:
    assert spark_schema.table_location(Lake("s3://bucket/some/lake"), "journal") == "s3a://bucket/some/lake/journal"
    assert spark_schema.table_location(Lake("/srv/lake"), "journal") == "file:/srv/lake/journal"
    with pytest.raises(InvalidArgument, match="quotation mark"):
        spark_schema.table_location(Lake("/srv/it's"), "journal")
