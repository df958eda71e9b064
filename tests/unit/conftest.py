"""Fixtures that several unit test files share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastness.cli.main import root

Cli = Callable[..., Result]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a CLI command on the test's own data directory."""
    for name in list(os.environ):
        if name.startswith("FASTNESS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FASTNESS_URL", f"dir:{tmp_path / 'data'}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runner = CliRunner()

    def run(*words: str, input: str | bytes | None = None, code: int = 0) -> Result:
        result = runner.invoke(root, words, input=input)
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    return run
