"""The demo's output, and that no process outlives it."""

import io
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fastness.cli.demo import has_browser
from fastness.demo.output import Output
from fastness.demo.processes import Processes


def print_claim(encoding: str = "utf-8", width: str = "60", *, holds: bool = True) -> tuple[Output, str]:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    output = Output(out)
    output.console.width = int(width)
    output.chapter("One")
    output.claim(
        "a claim that takes more than one line of this narrow terminal", holds, checked="by hand", figure="7 of 7"
    )
    output.table()
    output.end()
    return output, raw.getvalue().decode(encoding)


def test_a_claim_is_printed_with_its_figure_and_again_in_the_table() -> None:
    output, text = print_claim()
    assert [claim.figure for claim in output.claims] == ["7 of 7"]
    assert text.count("✓") == 2
    assert "All 1 claims hold" in text
    assert max(map(len, text.splitlines())) <= 60


def test_a_failed_claim_is_listed_at_the_end() -> None:
    output, text = print_claim(holds=False)
    assert output.failed == output.claims
    assert text.count("✗") == 2
    assert "1 of 1 claims do not hold:" in text


def test_a_terminal_without_unicode_shows_letters() -> None:
    _, text = print_claim("ascii")
    assert "ok" in text
    _, text = print_claim("ascii", holds=False)
    assert "NO" in text


def test_a_quiet_run_prints_nothing() -> None:
    out = io.StringIO()
    output = Output(out, quiet=True)
    output.chapter("One")
    assert output.claim("a claim", True, checked="by hand")
    with output.bar("work", 1) as done:
        done(1)
    output.table()
    output.end()
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("environment", "platform", "opens"),
    [
        ({}, "linux", False),  # Without a display, a browser would open in the terminal.
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"BROWSER": "firefox"}, "linux", True),
        ({}, "darwin", True),
    ],
)
def test_the_report_opens_only_with_a_graphical_browser(
    environment: dict[str, str], platform: str, opens: bool
) -> None:
    assert has_browser(environment, platform) is opens


def test_an_interrupt_during_a_process_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may arrive between the start of a process and its registration."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*words, **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as processes:
        processes.agent("reader", "http://127.0.0.1:1", "ada")
    [process] = started
    try:
        assert process.poll() is not None
    finally:
        process.kill()
        process.wait()
