"""What docs/lake.md says of the tables is what they are."""

import re
from pathlib import Path

import pytest

from holdfast.pipeline.schemas import TABLES, Table

PAGE = (Path(__file__).parents[2] / "docs" / "lake.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def test_every_table_is_described_and_no_other() -> None:
    assert list(SECTIONS) == list(TABLES)


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_a_table_is_as_described(table: Table) -> None:
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
def test_a_table_is_sorted_and_put_into_folders_by_columns_that_it_has(table: Table) -> None:
    assert {*table.folders, *table.order} <= set(table.schema.names)
