"""docs/lake.md matches the tables."""

import re
from pathlib import Path

import pytest

from fastness.pipeline.schemas import TABLES, Table

PAGE = (Path(__file__).parents[2] / "docs" / "lake.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def test_documentation_lists_exactly_the_tables() -> None:
    assert list(SECTIONS) == list(TABLES)


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_table_matches_its_documentation(table: Table) -> None:
    section = SECTIONS[table.name]
    columns = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert columns == [(field.name, str(field.type)) for field in table.schema]
    folders, order = (re.search(rf"{words} (`[^;.]+`)", section) for words in ("folders by", "sorted by"))
    assert f"Version {table.version};" in section
    assert folders is not None
    assert tuple(re.findall(r"`(\w+)`", folders[1])) == table.folders
    assert order is not None
    assert tuple(re.findall(r"`(\w+)`", order[1])) == table.order


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_sort_and_partition_columns_exist(table: Table) -> None:
    assert {*table.folders, *table.order} <= set(table.schema.names)


def test_no_column_is_a_reserved_word_of_sql() -> None:
    reserved = {"at", "end", "table", "group", "order", "user", "from", "to", "select", "where", "when", "then", "all"}
    assert {name for table in TABLES.values() for name in table.schema.names if name in reserved} == set()
