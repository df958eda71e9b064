"""Shell completion, through the protocol that the scripts of `fastness completion` use."""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import fastness
from fastness import Plane, context_file
from fastness.backends.rocksdb import RocksDatabase, RocksReader
from fastness.cli import completion
from fastness.cli.main import root

Complete = Callable[..., list[str]]
SECONDS_MAX = 60.0


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """The completions of the last word of a command line. The command must not print anything else."""
    for name in list(os.environ):
        if name.startswith("FASTNESS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FASTNESS_URL", f"dir:{tmp_path / 'data'}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(completion, "_SECONDS_MAX", SECONDS_MAX)
    monkeypatch.setattr(completion, "_exit_without_waiting", lambda: pytest.fail("completion took too long"))

    def run(*words: str) -> list[str]:
        environment = {
            "_FASTNESS_COMPLETE": "bash_complete",
            "COMP_WORDS": shlex.join(["fastness", *words]),
            "COMP_CWORD": str(len(words)),
        }
        result = CliRunner().invoke(root, env=environment)
        assert (result.exit_code, result.stderr) == (0, "")
        return [line.removeprefix("plain,") for line in result.stdout.splitlines() if line]

    return run


def populate(plane: Plane) -> None:
    for queue in ("jobs", "jobs-late", "mail"):
        plane.queue(queue).put(1)
    plane.queue("jobs").schedule("nightly", "0 3 * * *", 1)
    plane.world("ada").create()
    plane.workflows.start("research", "q", id="r-1")
    plane.agents.register("planner")
    plane.mailbox("ada").send("bob", "hi")
    plane.lease("orders/17").acquire("ada", ttl_seconds=3_600)
    plane.tokens.create("worker", universes="*", verbs="*")
    plane.tokens.revoke(plane.tokens.create("old", universes="*", verbs="*").info.id)


EXPECTED = {
    ("queue", "put", "jo"): ["jobs", "jobs-late"],
    ("queue", "stats", ""): ["jobs", "jobs-late", "mail"],
    ("queue", "policy", "jobs", "--dead-letter-queue", "jobs-"): ["jobs-late"],
    ("queue", "schedule", "delete", "jobs", ""): ["nightly"],
    ("queue", "enqueue", "m"): ["mail"],
    ("queue", "pause-key", "m"): ["mail"],
    ("queue", "put", "jobs", "--unique-until", "l"): ["leased"],
    ("message", "show", "jobs-"): ["jobs-late"],
    ("bench", "--queue", "m"): ["mail"],
    ("world", "tail", "a"): ["ada"],
    ("world", "inbox", "read", ""): ["ada", "run:r-1"],
    ("workflow", "show", "r"): ["r-1"],
    ("workflow", "start", ""): ["research"],
    ("workflow", "list", "--workflow", "r"): ["research"],
    ("agent", "show", "p"): ["planner"],
    ("mail", "read", ""): ["ada", "bob", "planner"],
    ("mail", "send", "ada", "b"): ["bob"],
    ("lease", "show", "orders/"): ["orders/17"],
    ("lease", "release", ""): ["orders/17"],
    ("state", "set", "k", "1", "--lease-key", "o"): ["orders/17"],
    ("token", "revoke", ""): ["worker"],
    ("--universe", "m"): ["main"],
    ("--universe", "other", "queue", "stats", ""): [],
    ("queue", "stats", "--universe", "main", "jobs-"): ["jobs-late"],
    ("queue", "stats", "nothing"): [],
    ("queue", "stats", "~"): [],
}


@pytest.fixture(params=["closed", "in use"])
def populated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A data directory, also while a process has it open."""
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(fastness.open(f"dir:{tmp_path / 'data'}"))
        populate(plane)
        if request.param == "closed":
            stack.close()
        yield
        if request.param == "in use":
            plane.queue("jobs").put(2)


def test_names_of_a_data_directory_are_completed(populated: None, complete: Complete) -> None:
    del populated
    assert {words: complete(*words) for words in EXPECTED} == EXPECTED


def test_names_of_a_postgresql_plane_are_completed(
    postgres_url: str, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTNESS_URL", postgres_url)
    assert complete("queue", "stats", "") == []
    with fastness.open(postgres_url) as plane:
        populate(plane)
        assert {words: complete(*words) for words in EXPECTED} == EXPECTED


def test_a_large_plane_offers_some_names_and_finds_those_that_are_typed(complete: Complete, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        for number in range(150):
            plane.queue(f"q{number:03}").put(1)
        plane.queue("q").put(1)
    assert complete("queue", "stats", "") == ["q", *(f"q{number:03}" for number in range(99))]
    assert complete("queue", "stats", "q14") == [f"q{number:03}" for number in range(140, 150)]
    assert complete("queue", "stats", "q")[:2] == ["q", "q000"]


def test_the_selected_context_is_used(complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTNESS_URL")
    with fastness.open(f"dir:{tmp_path / 'other'}", universe="lab") as plane:
        plane.queue("samples").put(1)
    lab = context_file.Context(url=f"dir:{tmp_path / 'other'}", universe="lab")
    context_file.save(context_file.Contexts(None, {"lab": lab}))
    assert complete("--context", "l") == ["lab"]
    assert complete("context", "use", "") == ["lab"]
    assert complete("--context", "lab", "queue", "stats", "") == ["samples"]
    assert complete("--url", lab.url or "", "--universe", "lab", "queue", "stats", "") == ["samples"]


def test_completion_creates_no_plane(complete: Complete, tmp_path: Path) -> None:
    assert complete("queue", "stats", "") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["nonsense", "dir:~no-such-user/x", "http://127.0.0.1:1", "http://", "postgresql://"])
def test_an_unusable_url_is_silent(complete: Complete, url: str) -> None:
    assert complete("--url", url, "queue", "stats", "") == []


def test_an_invalid_contexts_file_is_silent(complete: Complete) -> None:
    context_file.path().parent.mkdir(parents=True)
    context_file.path().write_text("nonsense")
    assert complete("--context", "") == []
    assert complete("--context", "lab", "queue", "stats", "") == []


def test_a_server_that_does_not_answer_is_abandoned(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = subprocess.run(
            [sys.executable, "-m", "fastness.cli"],
            env={
                **os.environ,
                "XDG_CONFIG_HOME": str(tmp_path),
                "FASTNESS_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "_FASTNESS_COMPLETE": "bash_complete",
                "COMP_WORDS": "fastness queue stats ",
                "COMP_CWORD": "3",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_a_reader_without_a_lock_does_not_block_a_writer(tmp_path: Path) -> None:
    with RocksDatabase(tmp_path) as first:
        first.transact(lambda tx: tx.put(b"a", b"1"))
        with RocksReader(tmp_path, lock=False) as reader:
            assert reader.read(lambda tx: tx.get(b"a")) == b"1"
            first.transact(lambda tx: tx.put(b"a", b"2"))
    with RocksReader(tmp_path, lock=False) as reader, RocksDatabase(tmp_path) as second:
        second.transact(lambda tx: tx.put(b"a", b"3"))
        assert reader.read(lambda tx: tx.get(b"a")) == b"2"


def test_every_argument_that_names_a_queue_or_an_agent_is_completed() -> None:
    def parameters(command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
        if isinstance(command, click.Group):
            ctx = click.Context(command)
            for name in command.list_commands(ctx):
                yield from parameters(command.get_command(ctx, name) or root)
        else:
            yield from ((command.name or "", parameter) for parameter in command.params)

    named = [
        (command, parameter)
        for command, parameter in parameters(root)
        if (parameter.metavar or "").strip("[]…") in ("QUEUE", "AGENT", "SENDER", "FROM", "TO")
    ]
    assert len(named) > 20
    for command, parameter in named:
        assert isinstance(parameter.type, completion.Names), (command, parameter.name)


def test_bash_completes_a_command_line(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.queue("jobs").put(1)
    program = tmp_path / "fastness"
    program.write_text(
        f"#!{sys.executable}\n"
        "from fastness.cli import completion\n"
        f"completion._SECONDS_MAX = {SECONDS_MAX}\n"  # The test must not depend on the load of the machine.
        "from fastness.cli.main import main\n"
        "main()\n"
    )
    program.chmod(0o755)
    script = """
        eval "$(fastness completion bash)"
        COMP_WORDS=(fastness queue stats j) COMP_CWORD=3
        _fastness_completion fastness
        echo "${COMPREPLY[*]}"
    """
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FASTNESS_URL": f"dir:{tmp_path / 'data'}",
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    assert (done.stdout, done.stderr) == ("jobs\n", "")
