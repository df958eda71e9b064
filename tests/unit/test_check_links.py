"""The link check finds what leads nowhere, and the documents pass it."""

from pathlib import Path

import pytest

import check_links

ROOT = Path(__file__).parents[2]
PAGE = """# One page

[here](#one-page) [there](sub/other.md#a-queue-jobs) [`code`](sub/other.md) ![picture](a.png) [far](https://a.test/x)
`[not](a-link.md)` [twice](sub/other.md#twice-1)

```md
[nor](this.md)
```
"""
OTHER = "# Other\n\n## A queue: `jobs`\n\n## Twice\n\n## Twice\n\n[back](../page.md#one-page)\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "sub").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    (tmp_path / "docs" / "sub" / "other.md").write_text(OTHER)
    (tmp_path / "docs" / "a.png").write_bytes(b"x")
    return tmp_path


def problems(root: Path) -> list[str]:
    check_links.anchors.cache_clear()
    return [problem for page in check_links.documents(root) for problem in check_links.problems_of(page, root)]


def test_links_to_files_headings_images_and_addresses_pass(root: Path) -> None:
    assert problems(root) == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("[a](gone.md)", "no such file"),
        ("[a](sub/other.md#gone)", "no such heading"),
        ("[a](#gone)", "no such heading"),
        ("![a](gone.png)", "no such file"),
        ('<img src="gone.png">', "no such file"),
        ("[a](/docs/page.md)", "is absolute"),
        ("[a](../../../etc/passwd)", "outside of the repository"),
        ("[a](https:///x)", "not an address"),
        ("[a](javascript:alert)", "not an address"),
    ],
)
def test_a_broken_link_is_named_with_its_line(root: Path, link: str, reason: str) -> None:
    (root / "docs" / "page.md").write_text(f"{PAGE}\n{link}\n")
    [problem] = problems(root)
    assert problem.startswith("docs/page.md:10: ")
    assert reason in problem


def test_a_large_image_is_refused(root: Path) -> None:
    (root / "docs" / "a.png").write_bytes(b"x" * (check_links.IMAGE_BYTES_MAX + 1))
    assert "bytes; at most" in problems(root)[0]


def test_links_are_changed_outside_of_code_only() -> None:
    changed = check_links.map_links(PAGE, lambda target: f"new/{target}")
    assert check_links.map_links(PAGE, lambda target: target) == PAGE
    assert "[here](new/#one-page)" in changed
    assert "[not](a-link.md)" in changed
    assert "[nor](this.md)" in changed


def test_the_documents_have_no_broken_link() -> None:
    assert problems(ROOT) == []
