"""docs/index.md leads to a page for each role, and these lead to every other page."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROLES = sorted(DOCS.glob("for-*.md"))


def linked(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text())}


def test_the_index_has_the_roles_and_the_reference_only() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert headings == ["Jobs", "Agents", "Operation", "Reference"]
    assert len(ROLES) == 3
    assert set(ROLES) <= linked(DOCS / "index.md")


def test_no_page_is_orphaned() -> None:
    found = {DOCS / "index.md"}.union(
        *(linked(page) for page in (DOCS / "index.md", DOCS / "reference/python.md", *ROLES))
    )
    assert sorted(set(DOCS.rglob("*.md")) - found) == []


@pytest.mark.parametrize("page", ROLES, ids=lambda page: page.stem)
def test_a_role_has_a_path_of_five_pages(page: Path) -> None:
    path, _, rest = page.read_text().partition("\n## When you need it\n")
    steps = re.findall(r"^(\d)\. \[[^\]]+\]\(([^)]+)\)(.+(?:\n   .+)*)$", path, re.MULTILINE)
    assert [number for number, _, _ in steps] == ["1", "2", "3", "4", "5"]
    assert all("Afterwards" in text for _, _, text in steps)
    assert 1 <= len(re.findall(r"^- ", rest.partition("\n## ")[0], re.MULTILINE)) <= 7
