"""tools/report_coverage.py: what it reports, and that data which killed processes leave does not fail a test run."""

import sys
from collections.abc import Callable
from pathlib import Path

import coverage
import pytest

import report_coverage

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "report_coverage.py"
KEYS = ROOT / "src" / "fastness" / "kv" / "keys.py"


def write_data(path: Path, lines: int) -> None:
    """The data of a process that has run the first lines of fastness/kv/keys.py."""
    data = coverage.CoverageData(basename=str(path))
    data.add_arcs({str(KEYS): [(line, line + 1) for line in range(1, lines)]})
    data.write()


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The tool, on a folder of its own and a configuration that names it."""
    config = tmp_path / "pyproject.toml"
    config.write_text(f'[tool.coverage.run]\nbranch = true\nparallel = true\ndata_file = "{tmp_path}/data"\n')
    for name, value in {"FOLDER": tmp_path, "CONFIG": config}.items():
        monkeypatch.setattr(report_coverage, name, value)
    monkeypatch.chdir(ROOT)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
        return report_coverage.main()

    return run


def test_processes_are_combined_and_a_package_below_its_minimum_fails(
    tool: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data.one", 20)
    write_data(tmp_path / "data.two", 40)
    assert tool() == 1
    reported = capsys.readouterr().out
    assert "% of kv; the minimum is" in reported
    assert "keys.py" not in reported
    assert (tmp_path / "coverage.xml").exists()
    assert tool("--lines") == 1  # The combined data stays.
    assert "src/fastness/kv/keys.py: " in capsys.readouterr().out


def test_no_minimum_is_enforced_if_a_process_left_damaged_data(
    tool: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data.one", 20)
    (tmp_path / "data.killed").write_bytes(b"SQLite format 3\0" + bytes(40))
    assert tool() == 0
    assert "Damaged data files: 1" in capsys.readouterr().out


@pytest.mark.parametrize("left", [None, b"", b"garbage"])
def test_a_run_without_data_does_not_fail(
    tool: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], left: bytes | None
) -> None:
    if left is not None:
        (tmp_path / "data.killed").write_bytes(left)
    assert tool() == 0
    assert "Coverage is not reported" in capsys.readouterr().out
