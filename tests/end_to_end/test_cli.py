"""The command line in separate processes, on a data directory: shells, locks, signals, backups, damage."""

import hashlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness.errors import DirectoryInUse, MailboxFull
from fastness.handles.sync.plane import Plane
from fastness.layers.worlds import World, subspace
from fastness.wire.mail import MailPolicy
from tests.support.forked import program_environment, run_python, start_python
from tests.support.server_process import Server
from tests.support.waiting import eventually

FASTNESS = ["-m", "fastness.cli"]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    return {
        **kept,
        "FASTNESS_URL": f"dir:{tmp_path / 'data'}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TMPDIR": str(tmp_path),
    }


@pytest.fixture
def cli(environment: dict[str, str]) -> Cli:
    """Runs a command to its end."""

    def run(*words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        done = run_python([*FASTNESS, *words], env=environment)
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    return run


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a command. Commands that still run at the end of the test are killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str) -> "subprocess.Popen[str]":
        process = start_python(
            [*FASTNESS, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def open_when_free(url: str) -> Plane:
    """Open the plane as soon as no other process has it open."""

    def opened() -> Plane | None:
        with suppress(DirectoryInUse):
            return fastness.open(url)
        return None

    return eventually(opened)


@contextmanager
def running_server(folder: Path, *, tokens: bool, **options: Any) -> Iterator[Server]:
    server = Server(folder, tokens=tokens, **options)
    try:
        yield server
        server.stop()
    finally:
        server.kill()


def shell(script: str, environment: dict[str, str], *, is_forked: bool = True, **also: str) -> str:
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-euc", script],
        env={**environment, **(program_environment() if is_forked else path), **also},
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def test_a_shell_consumes_a_queue(environment: dict[str, str]) -> None:
    unsafe = 'it\'s "$(touch pwned)"; `x`'
    script = """
        printf '%s\\n' one "$UNSAFE" | fastness queue put jobs - --lines > /dev/null
        while eval "$(fastness queue get jobs)"; do
            echo "$FASTNESS_QUEUE_ATTEMPTS:$FASTNESS_QUEUE_FENCE:$(cat "$FASTNESS_QUEUE_PAYLOAD_PATH")"
            fastness queue ack > /dev/null
        done
        echo "then ${FASTNESS_QUEUE_MESSAGE_ID:-nothing}"
        fastness queue stats jobs --json
    """
    one, two, nothing, stats = shell(script, environment, UNSAFE=unsafe).splitlines()
    assert (one, two, nothing) == ("1:1:one", f"1:1:{unsafe}", "then nothing")
    assert json.loads(stats)["acked_total"] == 2
    assert not Path("pwned").exists()


def test_get_waits_for_a_put_of_another_process(
    cli: Cli, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    waiting = start("queue", "get", "jobs", "--wait", "forever", "--json")
    # The command has created the directory, and polls for a message.
    eventually((tmp_path / "data" / "kv" / "CURRENT").exists)
    id = cli("queue", "put", "jobs", "hello").stdout.strip()
    output, _ = waiting.communicate()
    found = json.loads(output)
    assert (found["id"], found["payload"]) == (id, "hello")
    # The lease of a process that has ended is not renewed.
    cli("queue", "nack", "jobs", "--id", id, "--lease-id", found["lease_id"], "--fence", "1")


@pytest.mark.parametrize("is_served", [False, True], ids=["directory", "server"])
def test_a_command_waits_for_a_result_of_another_process(
    cli: Cli,
    start: Callable[..., "subprocess.Popen[str]"],
    environment: dict[str, str],
    tmp_path: Path,
    is_served: bool,
) -> None:
    with running_server(tmp_path, tokens=False) if is_served else nullcontext() as server:
        environment["FASTNESS_URL"] = server.url if server is not None else environment["FASTNESS_URL"]
        id = cli("queue", "put", "jobs", "1", "--keep-result").stdout.strip()
        waiting = start("message", "result", "jobs", id, "--wait", "forever")
        found = json.loads(cli("queue", "get", "jobs", "--json").stdout)
        cli("queue", "ack", "jobs", found["lease_id"], "--result", "[1, 2]")
        output, errors = waiting.communicate()
        assert (waiting.returncode, output) == (0, "[1,2]\n"), errors


def test_commands_under_one_lock_never_overlap(start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f'echo "start $FASTNESS_FENCE" >> {log}; sleep 0.3; echo "end $FASTNESS_FENCE" >> {log}; exit 5'
    runs = [start("lease", "run", "deploy", "--wait", "60", "--ttl", "60", "--", "sh", "-c", script) for _ in range(3)]
    for run in runs:
        output, errors = run.communicate()
        assert run.returncode == 5, (output, errors)
    assert log.read_text().split("\n")[:-1] == [f"{word} {fence}" for fence in (1, 2, 3) for word in ("start", "end")]


def test_a_command_is_stopped_when_another_owner_acquires_its_lock(
    cli: Cli, start: Callable[..., "subprocess.Popen[str]"], environment: dict[str, str], tmp_path: Path
) -> None:
    script = (
        f'trap "touch {tmp_path}/terminated; exit 0" TERM; echo "$FASTNESS_LEASE_ID" > {tmp_path}/id; sleep 60 & wait'
    )
    running = start("lease", "run", "deploy", "--ttl", "9", "--", "sh", "-c", script)
    eventually(lambda: (tmp_path / "id").exists() and (tmp_path / "id").read_text().endswith("\n"))
    cli("lease", "release", "deploy", "--lease-id", (tmp_path / "id").read_text().strip(), "--fence", "1")
    cli("lease", "acquire", "deploy", "--owner", "eve", "--ttl", "60")
    _, errors = running.communicate()
    assert running.returncode == 6, errors
    assert "the command was stopped" in errors
    assert (tmp_path / "terminated").exists()


@pytest.mark.rotating
def test_a_command_is_killed_before_a_lock_that_cannot_be_renewed_expires(
    start: Callable[..., "subprocess.Popen[str]"], environment: dict[str, str], tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    script = f"trap '' TERM; while :; do date +%s%3N > {alive}; sleep 0.05; done"
    running = start("lease", "run", "deploy", "--ttl", "15", "--patience", "0.2", "--", "sh", "-c", script)
    eventually(alive.exists)
    with open_when_free(environment["FASTNESS_URL"]) as plane:  # The running command cannot renew its lock meanwhile.
        granted = plane.lease("deploy").describe().lease
        assert granted is not None
        _, errors = running.communicate()
    assert running.returncode == 6, errors
    last_alive_ms = int(alive.read_text() or 0)
    assert last_alive_ms <= granted.expires_ms


def test_signals_are_forwarded_to_the_command(
    start: Callable[..., "subprocess.Popen[str]"], cli: Cli, tmp_path: Path
) -> None:
    script = f'trap "exit 9" TERM; touch {tmp_path}/ready; sleep 60 & wait'
    running = start("lease", "run", "deploy", "--", "sh", "-c", script)
    eventually((tmp_path / "ready").exists)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate()
    assert running.returncode == 9, errors
    assert json.loads(cli("lease", "list", "--json").stdout) == []


def test_an_interrupt_ends_a_wait_with_exit_code_130(cli: Cli, environment: dict[str, str]) -> None:
    cli("queue", "put", "other", "x")
    command = [sys.executable, "-W", "error", *FASTNESS, "queue", "watch", "jobs", "--json"]  # As a shell starts it.
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as waiting:
        assert waiting.stdout is not None
        assert json.loads(waiting.stdout.readline())["ready"] == 0
        waiting.send_signal(signal.SIGINT)
        _, errors = waiting.communicate()
    assert (waiting.returncode, json.loads(errors.strip())["code"]) == (130, "interrupted")


def test_a_closed_pipe_is_not_an_error(environment: dict[str, str]) -> None:
    script = """
        seq 1 3000 | fastness queue put jobs - --lines > /dev/null
        fastness queue peek jobs -n 3000 2> errors | head -n 1 > /dev/null
        cat errors
    """
    folder = environment["TMPDIR"]
    # Its own process: Python closes the output when the interpreter ends.
    assert shell(f"cd {folder}\n{script}", environment, is_forked=False) == ""


def test_the_first_token_is_created_and_given_as_the_messages_say(
    cli: Cli, environment: dict[str, str], tmp_path: Path
) -> None:
    def suggestion(text: str) -> list[str]:
        return shlex.split(text.partition("run: fastness ")[2].partition('"')[0])

    with running_server(tmp_path, tokens=True) as server:
        eventually(lambda: "none exists" in server.log())
        words = [{"DATA": server.data}.get(word, word) for word in suggestion(server.log())]
    token = cli(*words).stdout.strip()
    with running_server(tmp_path, tokens=True) as server:
        refused = cli("--url", server.url, "queue", "list", code=8).stderr
        assert "needs a token and none was given" in refused
        assert "FASTNESS_TOKEN or --token" in refused
        cli("--url", server.url, "--token", token, "queue", "list")
        assert json.loads(cli("--url", server.url, "--token", token, "token", "self", "--json").stdout)["verbs"] == [
            "*"
        ]
        environment["FASTNESS_TOKEN"] = token
        cli("--url", server.url, "queue", "put", "jobs", "x")
        environment["FASTNESS_TOKEN"] = "fnt_nonsense"
        assert "refused the token" in cli("--url", server.url, "queue", "list", code=8).stderr


def test_a_server_refuses_a_mistyped_queue_and_names_the_nearest(tmp_path: Path, cli: Cli) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.queue("images").put(1)
        admin = plane.tokens.create("admin", universes="*", verbs="*").token
        peeker = plane.tokens.create("peeker", universes="*", verbs=["queue:peek"]).token
    with running_server(tmp_path, tokens=True) as server:
        command = ("--url", server.url, "--token", admin, "--json", "queue")
        for words in (("stats", "imagse"), ("dead", "imagse"), ("purge", "imagse", "--yes")):
            problem = json.loads(cli(*command, *words, code=4).stderr)
            assert (problem["code"], problem["status"]) == ("queue_not_found", 404)
            assert "did you mean images?" in problem["detail"]
        assert [each["queue"] for each in json.loads(cli(*command, "list").stdout)] == ["images"]
        # This token may peek, but not ask whether a queue exists.
        as_peeker = ("--url", server.url, "--token", peeker, "--json", "queue", "peek")
        assert len(json.loads(cli(*as_peeker, "images").stdout)) == 1
        assert json.loads(cli(*as_peeker, "imagse").stdout) == []


def test_names_of_a_server_are_completed(environment: dict[str, str], tmp_path: Path) -> None:
    program = """
from fastness.cli import completion
completion._SECONDS_MAX = completion._CONNECT_SECONDS_MAX = 60.0  # Whatever the load of the machine.
from fastness.cli.main import main
main()"""

    def complete(words: str, **variables: str) -> str:
        protocol = {"_FASTNESS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "3"}
        done = run_python(["-c", program], env={**environment, **protocol, **variables}, check=True)
        assert done.stderr == ""
        return done.stdout.strip()

    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.queue("jobs").put(1)
        token = plane.tokens.create("admin", universes="*", verbs="*").token
    with running_server(tmp_path, tokens=True) as server:
        found = complete("fastness queue stats j", FASTNESS_URL=server.url, FASTNESS_TOKEN=token)
        assert found == "plain,jobs"
        assert complete("fastness queue stats j", FASTNESS_URL=server.url) == ""
        assert complete("fastness queue stats j") == "plain,jobs"  # Read from the directory that the server has open.


@pytest.mark.parametrize("state", [pytest.param("ready", marks=pytest.mark.rotating), "leased"])
def test_an_interrupted_benchmark_leaves_no_messages(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, state: str
) -> None:
    with running_server(tmp_path, tokens=False) as server, server.plane() as plane:
        stats = plane.queue("fastness-bench").stats
        running = start("--url", server.url, "bench", "--messages", "3000", "--callers", "4")
        eventually(lambda: getattr(stats(), state) > 20)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate()
        assert (running.returncode, errors.strip()) == (130, "fastness: interrupted")
        found = stats()
        assert (found.ready, found.delayed, found.leased, found.blocked, found.dead) == (0, 0, 0, 0, 0)


WRITER = """
import sys, fastness
with fastness.open(sys.argv[1]) as plane:
    number = 0
    while True:
        plane.queue("jobs").put(number)
        plane.blobs.put(b"%d" % number * 20_000)
        print(number, flush=True)
        number += 1
"""


def test_a_backup_after_a_writer_was_killed_has_all_acknowledged_writes(
    cli: Cli, environment: dict[str, str], tmp_path: Path
) -> None:
    writer = start_python(["-c", WRITER, environment["FASTNESS_URL"]], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    refused = cli("--patience", "0.3", "backup", str(tmp_path / "backup"), code=9)
    assert "is already open" in refused.stderr
    for _ in range(20):
        last = int(writer.stdout.readline())
    writer.kill()
    rest, _ = writer.communicate()
    last = max([last, *map(int, rest.split())])

    cli("backup", str(tmp_path / "backup"))
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    cli("doctor", str(tmp_path / "again"), "--deep")
    with fastness.open(f"dir:{tmp_path / 'again'}") as plane:
        found = [int(each.payload or b"") for each in plane.queue("jobs").peek(10_000)]
        assert found[: last + 1] == list(range(last + 1))
        assert plane.blobs.has(hashlib.sha256(b"%d" % last * 20_000).hexdigest())


def test_doctor_finds_a_damaged_blob_and_a_truncated_journal(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with fastness.open(f"dir:{data}") as plane:
        hash = plane.blobs.put(b"precious" * 10_000)
        plane.world("ada").create()
        plane.world("ada").append(list(range(10)), expected_head=0)
    cli("doctor")
    body = next((data / "objects" / "cas" / "main" / "sha256").glob(hash + "*"))
    body.write_bytes(body.read_bytes().replace(b"precious", b"previous", 1))
    with fastness.open(f"dir:{data}") as plane:
        entries = subspace(World("main", "ada")).key("journal", "e")
        for height in (8, 9):
            plane.pairs.delete(entries + height.to_bytes(8, "big"))
    report = cli("doctor", code=10).stdout
    assert f"blob {hash} of main: its content does not match its hash; restore it from a backup" in report
    assert "its journal is truncated: record 8 to 9 is missing, below its head 10" in report


# Space.


def test_commands_report_a_disk_that_is_nearly_full(cli: Cli, tmp_path: Path) -> None:
    reserve = 1 << 40
    if shutil.disk_usage(tmp_path).free >= reserve:
        pytest.skip("more of this disk is free than the largest reserve")
    low = {"disk_reserve_share_max": 9.0}
    with running_server(tmp_path, tokens=False, disk_reserve_bytes=reserve, process=low) as server:
        warning = "The disk is nearly full"
        shown = cli("--url", server.url, "space", "--status").stdout
        assert warning in shown
        assert "Key space: refuses new data" in shown
        assert "Last collection: none since the server started" in shown
        assert warning in cli("--url", server.url, "space").stderr
        assert warning in cli("--url", server.url, "doctor").stderr
        assert warning in json.loads(cli("--url", server.url, "doctor", "--json").stdout)["warnings"][0]
        refused = cli("--url", server.url, "queue", "put", "jobs", "1", code=9).stderr
        assert "`fastness space` shows what is stored" in refused


def test_commands_report_a_failed_key_space(cli: Cli, tmp_path: Path) -> None:
    with running_server(tmp_path, tokens=False) as server:
        with server.plane() as plane:
            plane.queue("jobs").put_many([os.urandom(10_000) for _ in range(4)])  # More than may be written below.
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
        cli("--url", server.url, "queue", "put", "jobs", "1", code=9)
        shown = cli("--url", server.url, "space", "--status").stdout
        assert "The key space has failed and refuses writes (disk_full: " in shown
        assert "Key space: works" not in shown
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        eventually(lambda: "Key space: works" in cli("--url", server.url, "space", "--status").stdout)


def test_a_server_has_a_mail_policy_for_universes_without_one(environment: dict[str, str], cli: Cli) -> None:
    """Given by a flag, by a variable, or not at all; a stored policy wins over all of them."""
    data = environment["FASTNESS_URL"]

    @contextmanager
    def served(*flags: str, **variables: str) -> Iterator[Plane]:
        command = [*FASTNESS, "serve", "--data", data, "--port", "0", *flags]
        server = start_python(command, env=environment | variables, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            environment["FASTNESS_URL"] = server.stdout.readline().strip().rpartition(" ")[2]
            with fastness.connect(environment["FASTNESS_URL"]) as plane:
                yield plane
        finally:
            server.terminate()
            assert server.wait() == 0
            server.stdout.close()

    with served("--mail-max", "2", FASTNESS_MAIL_TTL_SECONDS="3600") as plane:
        for _ in range(2):
            plane.mailbox("ada").send("bob", b"mail")
        with pytest.raises(MailboxFull, match="2"):
            plane.mailbox("ada").send("bob", b"mail")
        assert {mail.expires_ms - mail.sent_ms for mail in plane.mailbox("bob").read()} == {3_600_000}
        changed = json.loads(cli("--json", "--universe", "team", "mail", "policy", "--max", "5").stdout)
        assert changed == {"pending_max": 5, "ttl_seconds": 3600}
    with served("--mail-ttl", "2d"):
        assert json.loads(cli("--json", "mail", "policy").stdout) == {"pending_max": 1_000, "ttl_seconds": 172_800}
        with fastness.connect(environment["FASTNESS_URL"], universe="team") as team:
            assert team.mail_policy() == MailPolicy(5, 3_600)
