"""docs/install.md is the one page that says how to install Fastness, and names only what exists."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fastness.extras import how_to_install

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
FOLDERS = ("benches", "deploy", "docs", "examples", "src", "tools")
FROM_AN_INDEX = re.compile(r"pip install(?: -\S+)* +['\"]?fastness(?![\w.-])")


def texts() -> Iterator[tuple[str, str]]:
    """What users read, except the changelog."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    for path in files:
        if path.suffix in (".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".1", "") and "__pycache__" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_text()


def test_nothing_tells_users_to_install_fastness_from_a_package_index() -> None:
    assert [name for name, text in texts() if FROM_AN_INDEX.search(text)] == []


def test_the_check_finds_commands_that_install_from_a_package_index() -> None:
    for command in ("fastness", "'fastness[mcp]'", '"fastness[mcp]" celery', "--upgrade fastness", "-q fastness`"):
        assert FROM_AN_INDEX.search(f"pip install {command}"), command
    for command in (".", "'.[mcp]'", "dist/fastness-*.whl", "fastness-0.2.0-py3-none-any.whl"):
        assert not FROM_AN_INDEX.search(f"pip install {command}"), command


def test_messages_about_missing_packages_name_extras_and_one_way_to_install_them() -> None:
    assert how_to_install("mcp") == "run: pip install '.[mcp]' in a clone of Fastness"
    sources = {name: text for name, text in texts() if name.startswith("src/") and name.endswith(".py")}
    named = {extra for text in sources.values() for extra in re.findall(r"how_to_install\(['\"]([\w-]+)", text)}
    assert named == EXTRAS - {"all", "otel"}  # Without the latter, a server has no OpenTelemetry, and no error.
    elsewhere = {found for text in sources.values() for found in re.findall(r"pip install ([^\s\"]+)", text)}
    assert elsewhere == {"'.[{extra}]'", "'.[mcp]'", "duckdb"}


def test_the_page_lists_every_extra_and_the_versions_of_python() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)) == EXTRAS
    assert set(re.findall(r"'\.\[([\w,-]+)\]'", PAGE)) == {"postgres,mcp", "all"}
    assert "Python 3.11, 3.12 or 3.13" in PAGE
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info < (3, 14)" in (ROOT / "Makefile").read_text()


def test_the_page_names_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake (?:\w+=\S+ )?([a-z]+)", PAGE))
    assert {"setup", "demo", "build", "clean"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
