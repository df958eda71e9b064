"""What the demo's audience sees, and that nobody whom it starts outlives it."""

import io
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.demo import has_browser
from holdfast.demo.output import Output
from holdfast.demo.processes import Processes


def told(encoding: str = "utf-8", width: str = "60", *, holds: bool = True) -> tuple[Output, str]:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    stage = Output(out)
    stage.console.width = int(width)
    stage.chapter("One")
    stage.claim("a claim that takes more than one line of this narrow stage", holds, checked="by hand", figure="7 of 7")
    stage.table()
    stage.end()
    return stage, raw.getvalue().decode(encoding)


def test_a_claim_is_told_with_its_figure_and_again_in_the_table() -> None:
    stage, said = told()
    assert [claim.figure for claim in stage.claims] == ["7 of 7"]
    assert said.count("✓") == 2
    assert "All 1 claims hold" in said
    assert max(map(len, said.splitlines())) <= 60


def test_a_claim_that_does_not_hold_is_named_at_the_end() -> None:
    stage, said = told(holds=False)
    assert stage.failed == stage.claims
    assert said.count("✗") == 2
    assert "1 of 1 claims do not hold:" in said


def test_a_terminal_without_marks_is_told_in_letters() -> None:
    _, said = told("ascii")
    assert "ok" in said
    _, said = told("ascii", holds=False)
    assert "NO" in said


def test_a_story_for_programs_is_told_in_silence() -> None:
    out = io.StringIO()
    stage = Output(out, quiet=True)
    stage.chapter("One")
    assert stage.claim("a claim", True, checked="by hand")
    with stage.bar("work", 1) as done:
        done(1)
    stage.table()
    stage.end()
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("environment", "platform", "opens"),
    [
        ({}, "linux", False),  # A server without a screen: what would open there is a browser in the terminal.
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"BROWSER": "firefox"}, "linux", True),
        ({}, "darwin", True),
    ],
)
def test_the_report_opens_where_there_is_a_window_for_it(
    environment: dict[str, str], platform: str, opens: bool
) -> None:
    assert has_browser(environment, platform) is opens


def test_whoever_is_interrupted_while_somebody_is_started_leaves_nobody_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a moment at which a process runs, and nobody knows of it yet."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*words, **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as cast:
        cast.agent("reader", "http://127.0.0.1:1", "ada")
    [process] = started
    try:
        assert process.poll() is not None
    finally:
        process.kill()
        process.wait()
