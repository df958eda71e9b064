"""The files around the code: changelog, manual page, templates, workflow, container, units."""

import ctypes
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from fastness.backends.postgres.schema import SCHEMA_VERSION
from fastness.cli.backup_format import BACKUP_FORMAT
from fastness.kv.formats import FORMAT, OLDEST_FORMAT
from fastness.version import __version__
from fastness.wire.frames import PROTOCOL, REVISION
from tests.support.forked import run_python

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
UNITS = ("fastness.service", "fastness-worker@.service")


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_changelog_has_its_form() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert lines[0] == "# Changelog"
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]"
    found = [re.fullmatch(r"## \[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", line) for line in versions[1:]]
    assert all(found), versions
    order = [(*map(int, match.groups()[:3]), date.fromisoformat(match[4])) for match in found if match]
    assert order == sorted(order, reverse=True)
    assert ".".join(map(str, order[0][:3])) == __version__
    kinds: list[str] = []
    for line in lines:
        if line.startswith("## "):
            kinds = []
        elif line.startswith("### "):
            kinds.append(line[4:])
            assert line[4:] in KINDS
            assert kinds == sorted(set(kinds), key=KINDS.index)  # Each at most once, in the usual order.


def test_the_manual_has_every_command_and_no_error() -> None:
    page = ROOT / "deploy" / "man" / "fastness.1"
    assert run_python(["tools/make_manual.py", "--check"], cwd=ROOT).returncode == 0
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text()
    commands = re.findall(r"^#+ (fastness .+)$", reference, re.MULTILINE)
    titles = [title.replace(r"\-", "-") for title in re.findall(r'^\.SS "(.+)"$', page.read_text(), re.MULTILINE)]
    assert len(titles) == len(commands) > 100
    assert all(title.startswith(command) for title, command in zip(titles, commands, strict=True))
    if shutil.which("man") is None:
        pytest.skip("no man on the path; apt-get install man-db")
    shown = run("man", "--warnings", "-l", "-Tutf8", page)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "interrupted" in shown.stdout  # The last exit status.


def test_the_workflow_the_templates_and_compose_are_valid() -> None:
    for schema, *files in (
        ("github-workflows", ".github/workflows/test.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("compose-spec", "deploy/compose.yaml"),
    ):
        checked = run(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert 'python: ["3.11", "3.12", "3.13"]' in workflow
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make (\w+)", workflow):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_container_file_is_valid() -> None:
    checked = run(BIN / "hadolint", "deploy/Containerfile")
    assert checked.returncode == 0, checked.stdout
    # The context has every file that the wheel is built from.
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert {"pyproject.toml", "requirements.lock", "README.md", "LICENSE", "src", "deploy/man"} <= set(allowed)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze; apt-get install systemd")
def test_the_units_are_valid_and_hardened(tmp_path: Path) -> None:
    for name in UNITS:
        unit = (ROOT / "deploy" / "systemd" / name).read_text()
        (tmp_path / name).write_text(unit.replace("/opt/fastness/bin/fastness", "/bin/true"))  # It must exist.
    checked = run("systemd-analyze", "verify", "--man=no", *(tmp_path / name.replace("@", "@shop") for name in UNITS))
    assert (checked.returncode, checked.stderr) == (0, "")
    for name in UNITS:
        rated = run("systemd-analyze", "security", "--offline=yes", "--threshold=20", tmp_path / name)
        assert rated.returncode == 0, rated.stdout


_WITHOUT_EXECUTABLE_DATA = """
import ctypes, sys
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
import fastness, nacl.public, psycopg, uvloop
from fastness.server.settings import Settings
from fastness.server.serving import serve
import asyncio, os, signal

async def main():
    def ready(url):
        asyncio.get_running_loop().create_task(use(url))

    async def use(url):
        async with fastness.connect_async(url) as plane:
            await plane.queue("jobs").put({"n": 1})
            async with await plane.queue("jobs").receive(wait_seconds=60) as message:
                print(message.json())
        os.kill(os.getpid(), signal.SIGTERM)

    return await serve(Settings(data=f"dir:{sys.argv[1]}", port=0), ready=ready)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    sys.exit(runner.run(main()))
"""


@pytest.mark.skipif(
    ctypes.CDLL(None).prctl(66, 0, 0, 0, 0) < 0, reason="no Linux 6.3, which can refuse such memory; use a newer kernel"
)
def test_a_server_needs_no_memory_that_is_writable_and_executable(tmp_path: Path) -> None:
    """MemoryDenyWriteExecute= of the units forbids it, as the kernel does here."""
    done = run(sys.executable, "-c", _WITHOUT_EXECUTABLE_DATA, tmp_path)
    assert (done.returncode, done.stdout) == (0, "{'n': 1}\n"), done.stderr


def test_the_page_about_versions_is_right() -> None:
    page = (ROOT / "docs" / "explanation" / "versions.md").read_text()
    assert f"| data format of a plane | {FORMAT} | {_span(OLDEST_FORMAT, FORMAT)} |" in page
    assert f"| tables in PostgreSQL | {SCHEMA_VERSION} | {SCHEMA_VERSION} |" in page
    stream = f"protocol {PROTOCOL}, revision {REVISION} | revision {REVISION} | |"
    assert f"| stream between client and server | {stream}" in page
    assert f"| backups | {BACKUP_FORMAT} | {BACKUP_FORMAT} |" in page


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"
