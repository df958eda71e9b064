"""What a newcomer meets first is true: the README's code runs, and the demo checks what it claims."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_has_code() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_readmes_code_runs(block: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=tmp_path, check=True)


def test_the_demo_holds_what_it_claims() -> None:
    demo = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")], capture_output=True, text=True, check=True
    )
    assert demo.stdout.count("✓") == 8
    assert "Every claim was checked" in demo.stdout


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/benchmarks.md"])
def test_files_that_the_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:src|tests|benches|tools|docs|examples)/[\w./]+)`", text)
    missing = [name for name in [*links, *paths] if not (ROOT / document).parent.joinpath(name).exists()]
    assert [name for name in missing if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_the_documents_name_exist(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+)\b", (ROOT / document).read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
