"""The command line, in this process: every command, its JSON output, exit codes, and quoted exports."""

import base64
import hashlib
import io
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

import fastness
from fastness import PutRow, context_file, errors
from fastness.backends.rocksdb.disk_needs import disk_space
from fastness.cli import exit_codes, exports, lease_run, printing
from fastness.cli.durations import SECONDS, WAIT
from fastness.cli.main import root
from fastness.cli.sizes import SIZE
from fastness.encryption_keys import new_master_key
from fastness.errors import FastnessError, LeaseExpired, Unreachable
from fastness.layers.queues.counters import load_counters
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.layers.worlds import World, subspace
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity.format import Header
from fastness.wire.locks import AcquireLocks, LockSession
from tests.support.failures import Failures

Cli = Callable[..., Result]
UNKNOWN: Final = "01980000-0000-7000-8000-000000000000"


def parsed(result: Result) -> Any:
    return json.loads(result.stdout)


def queues_of(result: Result) -> list[str]:
    """The names that `queue list --json` shows."""
    return [each["queue"] for each in parsed(result)]


def exported(result: Result) -> dict[str, str]:
    """The variables that a shell has after `eval` of the output."""
    shell = subprocess.run(
        ["sh", "-c", f"{result.stdout}\nexec env -0"], check=True, capture_output=True, env={"PATH": os.environ["PATH"]}
    )
    pairs = (entry.split("=", 1) for entry in shell.stdout.decode().split("\0") if "=" in entry)
    return {name: value for name, value in pairs if name.startswith("FASTNESS_")}


# The root command.


def test_the_version_is_the_package_version(cli: Cli) -> None:
    assert cli("--version").stdout.strip() == f"fastness {fastness.__version__}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(cli: Cli, shell: str) -> None:
    assert "_FASTNESS_COMPLETE" in cli("completion", shell).stdout


def test_an_unknown_command_is_one_line_and_exit_code_2(cli: Cli) -> None:
    result = cli("queue", "pat", code=2)
    assert result.stderr.startswith("fastness: ")
    assert result.stderr.count("\n") == 1
    assert "queue --help" in result.stderr


def test_a_usage_error_with_json_is_a_problem_object(cli: Cli) -> None:
    problem = json.loads(cli("queue", "put", "--json", code=2).stderr)
    assert (problem["code"], problem["status"]) == ("usage", 400)


def test_an_error_with_json_is_a_problem_object_with_its_code(cli: Cli) -> None:
    cli("world", "create", "ada")
    result = cli("world", "show", "missing", "--json", code=4)
    problem = json.loads(result.stderr)
    assert (problem["code"], problem["status"]) == ("world_not_found", 404)
    assert result.stdout == ""


def test_every_error_class_has_an_exit_code() -> None:
    failures = Failures()
    for known in errors.CLASSES.keys() - {FastnessError.code}:
        with failures.of(known):
            code = exit_codes.code_of(errors.rebuild(known, ""))
            assert code in exit_codes.MEANINGS
            assert code != 1
    failures.check()


def test_exit_codes_are_stable() -> None:
    wanted = {
        "Validation": 2,
        "NotFound": 4,
        "Conflict": 5,
        "LeaseHeld": 5,
        "Fenced": 6,
        "QueueMessageLeaseMismatch": 6,
        "Busy": 7,
        "NotAllowed": 8,
        "Unreachable": 9,
        "DirectoryInUse": 9,
        "Closed": 9,
        "Corrupt": 10,
        "CommitUnknown": 11,
    }
    assert {name: exit_codes.code_of(FastnessError.__new__(vars(errors)[name])) for name in wanted} == wanted


def test_an_unexpected_error_is_reported_as_internal(capsys: pytest.CaptureFixture[str]) -> None:
    exit_codes.report(KeyError("x\ny"), as_json=False)
    assert "internal error" in capsys.readouterr().err
    assert exit_codes.code_of(KeyError("x")) == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("1.5", 1.5), ("500ms", 0.5), ("5m", 300), ("2h", 7_200), ("7d", 604_800)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert SECONDS.convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "x", "-1", "1 s", "1w", "forever", "nan", "1_0"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(click.BadParameter):
        SECONDS.convert(text, None, None)


def test_a_wait_can_be_forever() -> None:
    assert WAIT.convert("forever", None, None) == float("inf")


# Targets and contexts.


def test_a_plain_path_as_url_suggests_dir(cli: Cli) -> None:
    assert "write dir:./data" in cli("--url", "./data", "queue", "list", code=2).stderr


def test_global_options_are_accepted_before_and_after_the_subcommand(cli: Cli, tmp_path: Path) -> None:
    cli("queue", "put", "jobs", "1", "--universe", "other")
    assert queues_of(cli("--universe", "other", "--json", "queue", "list")) == ["jobs"]
    assert queues_of(cli("queue", "--json", "list", "--universe", "other")) == ["jobs"]
    assert parsed(cli("queue", "list", "--json")) == []


def test_an_unreachable_server_is_exit_code_9(cli: Cli) -> None:
    result = cli("--url", "http://127.0.0.1:1", "--patience", "0.1", "queue", "list", code=9)
    assert "fastness serve" in result.stderr


def test_a_directory_in_use_is_exit_code_9(cli: Cli, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}"):
        assert "is already open" in cli("--patience", "0.1", "queue", "list", code=9).stderr
    cli("queue", "list")


_NEEDS_PLANE: Final = {
    "host": ("some.module:app",),
    "worker": ("some.module:app",),
    "mcp": (),
    "mcp list": (),
    "mcp conceal": ("resize",),
    "queue list": (),
    "queue stats": ("jobs",),
    "push watch": (),
    "push stats": (),
    "queue peek": ("jobs",),
    "queue dead": ("jobs",),
    "queue leased": ("jobs",),
    "queue delete": ("jobs", "--yes"),
    "queue policy": ("jobs",),
    "queue watch": ("jobs", "-n", "1"),
    "queue ack": ("jobs", "--id", "x", "--lease-id", "x", "--fence", "1"),
    "queue nack": ("jobs", "--id", "x", "--lease-id", "x", "--fence", "1"),
    "queue extend": ("jobs", "--id", "x", "--lease-id", "x", "--fence", "1"),
    "queue reject": ("jobs", "--id", "x", "--lease-id", "x", "--fence", "1"),
    "queue redrive": ("jobs",),
    "queue key": ("jobs", "k"),
    "queue resume-key": ("jobs", "k"),
    "message show": ("jobs", "x"),
    "message search": ("jobs",),
    "message cancel": ("jobs", "x"),
    "message move": ("jobs", "x", "--to", "slow"),
    "message delete": ("jobs", "x", "--yes"),
    "message update": ("jobs", "x", "--priority", "1"),
    "message result": ("jobs", "x"),
    "queue purge": ("jobs", "--yes"),
    "queue pause": ("jobs",),
    "queue pause-key": ("jobs", "k", "1m"),
    "queue resume": ("jobs",),
    "queue schedule list": ("jobs",),
    "queue schedule delete": ("jobs", "nightly"),
    "mail list": (),
    "mail read": ("ada",),
    "mail watch": ("ada", "-n", "1"),
    "mail count": ("ada",),
    "mail receipts": ("ada",),
    "mail confirm": ("ada", "x"),
    "mail block": ("ada",),
    "mail policy": (),
    "agent list": (),
    "agent show": ("ada",),
    "collection list": (),
    "collection partitions": ("notes",),
    "collection scan": ("notes", "ada"),
    "lease list": (),
    "lease show": ("deploy",),
    "lease break": ("deploy", "--fence", "1"),
    "lease keepalive": ("deploy", "--lease-id", "x", "--fence", "1"),
    "lease release": ("deploy", "--lease-id", "x", "--fence", "1"),
    "state get": ("k",),
    "state delete": ("k",),
    "world list": (),
    "world show": ("ada",),
    "world tail": ("ada",),
    "world append": ("ada", "1"),
    "world inbox put": ("ada", "greeting@1", "hi"),
    "world inbox read": ("ada",),
    "world drain": ("ada",),
    "world snapshot": ("ada", "1", "--height", "1"),
    "world promote": ("ada", "1"),
    "world compact": ("ada",),
    "world fork": ("ada", "eve", "--height", "0"),
    "world policy": (),
    "world program": ("ada",),
    "world resume-program": ("ada",),
    "world aside list": ("ada",),
    "world aside retry": ("ada", "0"),
    "world aside delete": ("ada", "0", "--yes"),
    "world pause": ("ada",),
    "world resume": ("ada",),
    "world archive": ("ada",),
    "world delete": ("ada", "--yes"),
    "workflow list": (),
    "workflow show": ("r-1",),
    "workflow result": ("r-1",),
    "workflow query": ("r-1",),
    "workflow signal": ("r-1", "approval"),
    "workflow cancel": ("r-1",),
    "workflow delete": ("r-1", "--yes"),
    "effect list": (),
    "effect claim": ("mail",),
    "effect complete": ("ada", "0", "0", "--fence", "1"),
    "effect fail": ("ada", "0", "0", "--fence", "1", "why"),
    "timer list": (),
    "lock list": (),
    "lock end": ("5ac52464988b344a86662cdc",),
    "entity get": ("task", "t-1"),
    "entity scan": ("task",),
    "entity history": ("task", "t-1"),
    "entity delete": ("task", "t-1"),
    "blob get": ("0" * 64,),
    "blob has": ("0" * 64,),
    "blob pin": ("0" * 64,),
    "blob unpin": ("0" * 64,),
    "activity tail": (),
    "activity files": (),
    "token list": (),
    "token self": (),
    "token revoke": ("x",),
    "backup": ("copy",),
    "doctor": (),
    "gc": (),
    "status": (),
    "node list": (),
    "audit": (),
    "upgrade": (),
    "top": ("--once",),
    "quota show": ("shop",),
    "quota clear": ("shop",),
    "mark-restored": (),
    "space": (),
    "encryption show": (),
    "encryption rotate": ("shop",),
    "encryption rewrite": ("shop",),
    "pipeline ingest": ("--lake", "lake"),
    "pipeline live": ("--lake", "lake", "--once"),
    "migrate": ("dir:typo", "dir:there"),
}
_CREATES_PLANE: Final = {
    "queue put": ("jobs", "1"),
    "queue get": ("jobs",),
    "queue schedule add": ("jobs", "nightly", "0 3 * * *", "1"),
    "mail send": ("ada", "bob", "hi"),
    "push send": ("bob", "t", "hi"),
    "agent register": ("ada",),
    "lease acquire": ("deploy",),
    "lease run": ("deploy", "--", "true"),
    "state set": ("k", "1"),
    "world create": ("ada",),
    "workflow start": ("research", "q"),
    "entity set": ("task", "t-1", "a=b"),
    "blob put": ("-",),
    "mcp expose": ("jobs", "--schema", '{"type": "object"}'),
    "activity log": ("s", "{}"),
    "token create": ("--allow", "*"),
    "quota set": ("shop", "--messages", "10"),
    "bench": ("--messages", "1"),
    "encryption enable": ("shop",),
}
_NEEDS_NO_PLANE: Final = {"demo", "serve", "restore", "completion", "explain", "encryption new-key"} | {
    "context add", "context list", "context use", "context delete",
}  # fmt: skip


def test_a_command_that_needs_a_plane_does_not_create_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = Failures()
    for command in _NEEDS_PLANE:
        with failures.of(command):
            monkeypatch.chdir(tmp_path)
            error = cli("--url", "dir:typo", *command.split(), *_NEEDS_PLANE[command], code=4).stderr
            assert "There is no plane in" in error
            assert "create one with `fastness serve --data" in error
            assert list(tmp_path.iterdir()) == []
    failures.check()


@pytest.mark.parametrize("command", _CREATES_PLANE)
def test_a_command_that_writes_creates_the_plane(
    cli: Cli, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(new_master_key("first"))
    keys.chmod(0o600)
    monkeypatch.setenv("FASTNESS_ENCRYPTION_KEY_FILE", str(keys))
    url = f"dir:{tmp_path / 'new'}"
    result = CliRunner().invoke(root, ["--url", url, *command.split(), *_CREATES_PLANE[command]], input=b"")
    assert result.exit_code in (0, exit_codes.NOTHING_RECEIVED), result.output
    cli("--url", url, "queue", "list")


def test_every_command_is_known_to_create_a_plane_or_to_need_one() -> None:
    def leaves(command: click.Command, words: str) -> Iterator[str]:
        if not isinstance(command, click.Group):
            yield words
            return
        if command.invoke_without_command:
            yield words
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from leaves(command.get_command(ctx, name) or root, f"{words} {name}".strip())

    pipeline = {words for words in leaves(root, "") if words.startswith("pipeline ")} - {
        "pipeline ingest",
        "pipeline live",
    }
    assert {*leaves(root, "")} == {*_NEEDS_PLANE, *_CREATES_PLANE, *_NEEDS_NO_PLANE, *pipeline}


def test_a_missing_certificate_file_is_reported(cli: Cli) -> None:
    assert "--ca" in cli("--url", "https://127.0.0.1:1", "--ca", "/no/such", "queue", "list", code=9).stderr


def test_contexts_are_added_used_and_removed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTNESS_URL")
    cli("context", "add", "here", "--url", f"dir:{tmp_path / 'data'}", "--universe", "lab")
    cli("context", "add", "prod.eu", "--url", "https://plane.example:9440", "--token", 'hf_"secret"\\\x7f')
    found = parsed(cli("context", "list", "--json"))
    assert [(each["name"], each["current"], each["has_token"]) for each in found] == [
        ("here", True, False),
        ("prod.eu", False, True),
    ]
    assert "secret" not in cli("context", "list").stdout
    assert context_file.load().contexts["prod.eu"].token == 'hf_"secret"\\\x7f'
    assert stat.S_IMODE(context_file.path().stat().st_mode) == 0o600

    cli("queue", "put", "jobs", "1")
    assert queues_of(cli("queue", "list", "--json", "--universe", "lab")) == ["jobs"]
    cli("context", "use", "prod.eu")
    assert queues_of(cli("--context", "here", "queue", "list", "--json")) == ["jobs"]
    cli("context", "delete", "prod.eu")
    assert context_file.load().current is None
    assert "here" in cli("context", "use", "prod.eu", code=4).stderr


def test_a_context_without_a_url_is_rejected(cli: Cli) -> None:
    assert "--url" in cli("context", "add", "x", code=2).stderr


def test_input_that_nests_too_deep_is_refused_or_shown_as_text(cli: Cli) -> None:
    nested = "[" * 8_000 + "]" * 8_000
    context_file.path().parent.mkdir(parents=True, exist_ok=True)
    context_file.path().write_text(f"contexts = {nested}")
    assert "contexts.toml is invalid" in cli("context", "list", code=2).stderr
    context_file.path().unlink()
    cli("queue", "put", "jobs", nested, "--content-type", "application/json")
    assert nested in "".join(cli("queue", "peek", "jobs", "--json").stdout.split())  # Python 3.12 and newer read it.
    assert "is not JSON" in cli("state", "set", "job", "[" * 100_000 + "]" * 100_000, code=2).stderr
    cli("state", "get", "job", code=4)


def test_an_unknown_key_in_the_contexts_file_is_named_in_the_error(cli: Cli) -> None:
    context_file.path().parent.mkdir(parents=True)
    context_file.path().write_text('[contexts.x]\nurl = "http://x"\ntokn = "y"\n')
    assert "tokn" in cli("context", "list", code=2).stderr


def test_flags_override_contexts_and_variables(cli: Cli) -> None:
    context_file.save(
        context_file.Contexts(
            "a",
            {
                "a": context_file.Context(url="http://a", token="of-a", universe="ua"),
                "b": context_file.Context(url="http://b", token="of-b"),
            },
        )
    )

    def resolve(flags: dict[str, str], environ: dict[str, str]) -> tuple[str, str | None]:
        found = context_file.resolve(flags, environ)
        return found["url"], found["token"]

    assert resolve({}, {}) == ("http://a", "of-a")
    assert resolve({}, {"FASTNESS_CONTEXT": "b"}) == ("http://b", "of-b")
    assert resolve({}, {"FASTNESS_URL": "http://e", "FASTNESS_TOKEN": "of-e"}) == ("http://e", "of-e")
    assert resolve({"context": "b"}, {"FASTNESS_URL": "http://e", "FASTNESS_TOKEN": "of-e"}) == ("http://b", "of-b")
    assert resolve({"url": "http://f", "token": "of-f", "context": "b"}, {}) == ("http://f", "of-f")


def test_the_token_of_a_context_is_sent_only_to_its_url(cli: Cli) -> None:
    context_file.save(
        context_file.Contexts("a", {"a": context_file.Context(url="http://a", token="secret", key="private")})
    )
    for flags, environ in (
        ({"url": "http://evil"}, {}),
        ({}, {"FASTNESS_URL": "http://evil"}),
        ({"url": "http://evil", "context": "a"}, {}),
    ):
        found = context_file.resolve(flags, environ)
        assert (found["url"], found["token"], found["key"]) == ("http://evil", None, None)


# Queues.


def test_a_shell_receives_extends_and_acks_a_message(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = parsed(
        cli(
            "queue", "put", "jobs", '{"n": 1}', "--priority", "7", "--correlation-id", "c-1", "--attribute", "a=b=c",
            "--max-attempts", "3", "--ttl", "1h", "--visibility", "1m", "--json",
        )
    )  # fmt: skip
    assert receipt["durability"] == "critical"
    found = exported(cli("queue", "get", "jobs"))
    assert found["FASTNESS_QUEUE_MESSAGE_ID"] == receipt["id"]
    assert found["FASTNESS_QUEUE_CORRELATION_ID"] == "c-1"
    assert (found["FASTNESS_QUEUE_ATTEMPTS"], found["FASTNESS_QUEUE_FENCE"]) == ("1", "1")
    assert Path(found["FASTNESS_QUEUE_PAYLOAD_PATH"]).read_bytes() == b'{"n": 1}'
    Path(found["FASTNESS_QUEUE_PAYLOAD_PATH"]).unlink()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert parsed(cli("queue", "extend", "--by", "2m", "--json"))["expires_at"] > found["FASTNESS_QUEUE_EXPIRES_AT"]
    assert parsed(cli("queue", "ack", "--json")) == {"queue": "jobs", "id": receipt["id"], "outcome": "acked"}
    cli("queue", "ack")  # Repeating an ack is safe.
    stats = parsed(cli("queue", "stats", "jobs", "--json"))
    assert (stats["ready"], stats["leased"], stats["acked_total"]) == (0, 0, 1)


def test_a_released_message_is_delivered_again_with_a_higher_fence(cli: Cli) -> None:
    cli("queue", "put", "jobs", "work")
    first = parsed(cli("queue", "get", "jobs", "--json"))
    named = ("jobs", "--id", first["id"], "--lease-id", first["lease_id"], "--fence", str(first["fence"]))
    cli("queue", "nack", *named, "--defer", "--error", "not now")
    again = parsed(cli("queue", "get", "jobs", "--json"))
    assert (again["payload"], again["fence"], again["failure_attempts"]) == ("work", 2, 0)
    assert "queue_message_lease_mismatch" in cli("queue", "ack", *named, "--json", code=6).stderr


def test_rejected_messages_are_dead_letters_and_can_be_redriven(cli: Cli) -> None:
    cli("queue", "put", "jobs", "work")
    first = parsed(cli("queue", "get", "jobs", "--json"))
    cli(
        "queue", "reject", "jobs", "--id", first["id"], "--lease-id", first["lease_id"], "--fence", "1",
        "--error", "never",
    )  # fmt: skip
    (letter,) = parsed(cli("queue", "dead", "jobs", "--json"))
    assert (letter["last_error"], letter["origin"]) == ("never", "jobs")
    assert "never" in cli("queue", "dead", "jobs").stdout
    assert parsed(cli("queue", "redrive", "jobs", first["id"], "--json"))["count"] == 1
    assert [each["id"] for each in parsed(cli("queue", "peek", "jobs", "--json"))] == [first["id"]]


def test_failed_attempts_are_shown(cli: Cli, tmp_path: Path) -> None:
    cli("queue", "policy", "jobs", "--retry-delay", "0", "--failures-kept", "2")
    cli("queue", "put", "jobs", "work", "--max-attempts", "4")
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        for number in range(3):
            with pytest.raises(ValueError, match="boom"), plane.queue("jobs").receive(owner="ada"):
                raise ValueError(f"boom {number} \x1b[2J")
    assert "failed by ada: ValueError: boom 2" in cli("queue", "peek", "jobs").stdout
    shown = cli("queue", "peek", "jobs", "--failures").stdout
    assert "attempt 3: leased by ada at 20" in shown
    assert "raise ValueError(f" in shown
    assert "\x1b" not in shown
    first = parsed(cli("queue", "get", "jobs", "--json"))
    cli("queue", "reject", "jobs", "--id", first["id"], "--lease-id", first["lease_id"], "--fence", "4")
    assert "rejected by" in cli("queue", "dead", "jobs").stdout
    (letter,) = parsed(cli("queue", "dead", "jobs", "--json"))
    assert [(each["attempt"], each["outcome"], each["error_type"]) for each in letter["failures"]] == [
        (3, "failed", "ValueError"),
        (4, "rejected", None),
    ]
    assert letter["failures"][0]["traceback"].startswith("Traceback")
    assert "no error was given" in cli("queue", "dead", "jobs", "--failures").stdout


def lease_ids(cli: Cli, queue: str) -> list[str]:
    return [each["lease_id"] for each in parsed(cli("queue", "leased", queue, "--json"))]


def test_a_message_is_shown_in_every_state(cli: Cli, tmp_path: Path) -> None:
    put = ("queue", "put", "jobs", '{"n": 1}', "--key", "tenant 7", "--unique-key", "n-1", "--keep-result")
    id = cli(*put, "--max-attempts", "1", "--attribute", "a=b").stdout.strip()
    assert cli(*put).stdout.strip() == id
    shown = cli("message", "show", "jobs", id).stdout
    for text in ("ready", "tenant 7", "n-1", '{"n": 1}', '{"a":"b"}'):
        assert text in shown
    assert "lease id" not in shown
    assert "delayed until 20" in cli("message", "update", "jobs", id, "--priority", "9", "--delay", "1h").stdout
    assert parsed(cli("message", "update", "jobs", id, "--delay", "0", "--json"))["state"] == "ready"
    with (
        fastness.open(f"dir:{tmp_path / 'data'}") as plane,
        pytest.raises(ValueError, match="boom"),
        plane.queue("jobs").receive(owner="ada"),
    ):
        raise ValueError("boom \x1b[2J")
    shown = cli("message", "show", "jobs", id).stdout
    assert "attempt 1: leased by ada at 20" in shown
    assert "raise ValueError(" in shown
    assert "\x1b" not in shown
    found = parsed(cli("message", "show", "jobs", id, "--json"))
    assert (found["state"], found["priority"], found["payload"]) == ("dead", 9, {"n": 1})
    assert found["failures"][0]["traceback"].startswith("Traceback")
    assert "ValueError: boom" in cli("message", "result", "jobs", id, code=5).stderr
    cli("queue", "redrive", "jobs", id)
    cli("queue", "get", "jobs")
    assert "leased by" in cli("message", "update", "jobs", id, "--priority", "1", code=5).stderr
    cli("queue", "ack", "jobs", *lease_ids(cli, "jobs"), "--result", '{"total": 3}')
    done = parsed(cli("message", "show", "jobs", id, "--json"))
    assert (done["has_result"], done["failures"]) == (True, found["failures"])
    shown = cli("message", "show", "jobs", id).stdout
    assert "attempt 1: leased by ada at 20" in shown
    assert "raise ValueError(" in shown
    assert cli("message", "result", "jobs", id).stdout == '{"total":3}\n'
    assert "is not a message id" in cli("message", "show", "jobs", "x", code=2).stderr
    assert "nothing is kept" in cli("message", "show", "jobs", UNKNOWN, code=4).stderr


def test_messages_are_searched_moved_and_deleted(cli: Cli) -> None:
    first, second = (
        cli("queue", "put", "jobs", text, "--key", key).stdout.strip() for text, key in (("1", "a"), ("2", "b"))
    )
    cli("queue", "get", "jobs", "--owner", "worker-7")
    found = parsed(cli("message", "search", "jobs", "--state", "leased", "--owner", "worker-7", "--json"))
    assert [(each["id"], each["state"], each["key"]) for each in found] == [(first, "leased", "a")]
    shown = cli("message", "search", "jobs", "-n", "1")
    assert second in shown.stdout
    assert "Searched 1 record; there may be more" in shown.stderr
    assert "No messages match." in cli("message", "search", "jobs", "--older-than", "1h").stderr
    cli("message", "search", "jobs", "--state", "gone", code=2)
    refused = cli("message", "move", "jobs", first, second, "--to", "slow", code=5)
    assert "message_leased" in refused.stdout
    assert "moved to slow" in refused.stdout
    assert parsed(cli("message", "search", "slow", "--json"))[0]["id"] == second
    assert "deleted" in cli("message", "delete", "slow", second, "--yes").stdout
    assert cli("message", "delete", "slow", second, "--yes", code=4).stdout.split()[-1] == "message_not_found"


def test_a_result_is_awaited_and_printed(cli: Cli, tmp_path: Path) -> None:
    id = cli("queue", "put", "jobs", "1").stdout.strip()
    assert "is not done yet" in cli("message", "result", "jobs", id, "--wait", "10ms", code=7).stderr
    cli("queue", "get", "jobs")
    (lease_id,) = lease_ids(cli, "jobs")
    assert "quote a text" in cli("queue", "ack", "jobs", lease_id, "--result", "text", code=2).stderr
    assert "leave the result out" in cli("queue", "ack", "jobs", lease_id, "--result", "null", code=2).stderr
    (tmp_path / "result").write_bytes(b"\x00\xff" * 10_000)
    both = ("--result", "1", "--result-file", str(tmp_path / "result"))
    cli("queue", "ack", "jobs", lease_id, *both, code=2)
    cli("queue", "ack", "jobs", lease_id, *both[2:])
    assert cli("message", "result", "jobs", id, "--wait", "1m").stdout_bytes == b"\x00\xff" * 10_000
    found = parsed(cli("message", "result", "jobs", id, "--json"))
    assert base64.b64decode(found["result_base64"]) == b"\x00\xff" * 10_000
    cli("queue", "put", "jobs", "--lines", "--file", "-", input="1\n2\n")
    for _ in range(2):
        cli("queue", "get", "jobs")
    assert "one by one" in cli("queue", "ack", "jobs", *lease_ids(cli, "jobs"), "--result", "1", code=2).stderr


def test_messages_are_cancelled_by_their_ids(cli: Cli) -> None:
    ids = [cli("queue", "put", "jobs", str(n)).stdout.strip() for n in range(3)]
    cli("queue", "get", "jobs")
    lease_id = lease_ids(cli, "jobs")[0]
    result = cli("message", "cancel", "jobs", ids[0], UNKNOWN, ids[1], "--json", code=4)
    assert [(each["id"], each["state"]) for each in parsed(result)] == [(id, "cancelled") for id in ids[:2]]
    assert UNKNOWN in result.stderr
    assert "cancelled" in cli("message", "cancel", "jobs", ids[0]).stdout
    assert "was cancelled" in cli("queue", "ack", "jobs", lease_id, code=6).stderr
    assert "was cancelled" in cli("message", "result", "jobs", ids[1], code=6).stderr
    assert [each["id"] for each in parsed(cli("queue", "peek", "jobs", "--json"))] == ids[2:]


def test_a_policy_has_a_delay_and_rules_for_dead_letters_retention_and_groups(cli: Cli) -> None:
    changes = ("--delay", "2s", "--dead-letter-rule", "deliveries", "--retention-by-age", "--group-batches")
    names = ("delay_seconds", "dead_letter_rule", "retention_by_age", "group_batches")
    policy = parsed(cli("queue", "policy", "jobs", *changes, "--json"))
    assert [policy[name] for name in names] == [2.0, "deliveries", True, True]
    policy = parsed(cli("queue", "policy", "jobs", "--no-retention-by-age", "--no-group-batches", "--json"))
    assert [policy[name] for name in names] == [2.0, "deliveries", False, False]


def test_a_purge_takes_leased_messages_if_it_is_asked_to(cli: Cli) -> None:
    cli("queue", "put", "jobs", "x")
    cli("queue", "get", "jobs")
    assert "Removed 0 messages" in cli("queue", "purge", "jobs", "--yes").stdout
    assert "Removed 1 messages" in cli("queue", "purge", "jobs", "--leased", "--yes").stdout


def test_keys_are_shown_paused_and_limited(cli: Cli) -> None:
    changes = ("--concurrency-per-key", "1", "--rate-per-key", "10", "--burst-per-key", "2", "--result-ttl", "1d")
    policy = parsed(cli("queue", "policy", "jobs", *changes, "--fair", "--json"))
    assert (policy["concurrency_per_key"], policy["rate_per_key"], policy["burst_per_key"]) == (1, 10.0, 2)
    assert (policy["result_ttl_seconds"], policy["fair"]) == (86_400, True)
    policy = parsed(cli("queue", "policy", "jobs", "--rate-per-key", "none", "--no-fair", "--json"))
    assert (policy["concurrency_per_key"], policy["rate_per_key"], policy["fair"]) == (1, None, False)
    for n in range(3):
        cli("queue", "put", "jobs", str(n), "--key", "a/b")
    cli("queue", "get", "jobs")
    cli("queue", "get", "jobs", code=3)
    found = parsed(cli("queue", "key", "jobs", "a/b", "--json"))
    assert found == {"queue": "jobs", "key": "a/b", "ready": 0, "blocked": 2, "leased": 1, "paused_until": None}
    assert "a/b of jobs is paused until 20" in cli("queue", "pause-key", "jobs", "a/b", "1h").stdout
    cli("queue", "ack", "jobs", *lease_ids(cli, "jobs"))
    cli("queue", "get", "jobs", code=3)
    assert parsed(cli("queue", "resume-key", "jobs", "a/b", "--json"))["paused_until"] is None
    cli("queue", "get", "jobs")


def test_a_debounced_message_is_put_once(cli: Cli) -> None:
    put = ("--debounce-key", "doc", "--debounce", "1h", "--debounce-max", "2h", "--json")
    first, second = (parsed(cli("queue", "put", "jobs", str(n), *put)) for n in range(2))
    assert first["id"] == second["id"]
    found = parsed(cli("message", "show", "jobs", first["id"], "--json"))
    assert (found["state"], found["payload"]) == ("delayed", 1)
    leased = parsed(cli("queue", "put", "jobs", "1", "--unique-key", "u", "--unique-until", "leased", "--json"))
    cli("queue", "get", "jobs")
    again = parsed(cli("queue", "put", "jobs", "1", "--unique-key", "u", "--unique-until", "10m", "--json"))
    assert (leased["id"] == again["id"], again["duplicate"]) == (False, False)
    assert "not a duration" in cli("queue", "put", "jobs", "1", "--unique-until", "never", code=2).stderr


def test_the_back_off_of_a_policy_is_changed(cli: Cli) -> None:
    options = ("--retry-delay", "5s", "--retry-factor", "3", "--retry-delay-max", "2m", "--retry-jitter", "0.5")
    changed = parsed(cli("queue", "policy", "jobs", *options, "--failures-kept", "7", "--json"))
    names = ("retry_delay_seconds", "retry_factor", "retry_delay_max_seconds", "retry_jitter", "failures_kept")
    assert [changed[name] for name in names] == [5, 3, 120, 0.5, 7]
    cli("queue", "put", "jobs", "work", "--retry-delay", "0")
    first = parsed(cli("queue", "get", "jobs", "--json"))
    cli("queue", "nack", "jobs", "--id", first["id"], "--lease-id", first["lease_id"], "--fence", "1")
    again = parsed(cli("queue", "get", "jobs", "--json"))
    cli("queue", "nack", "jobs", "--id", again["id"], "--lease-id", again["lease_id"], "--fence", "2", "--delay", "1h")
    assert parsed(cli("queue", "stats", "jobs", "--json"))["delayed"] == 1


def test_get_without_a_message_unsets_the_variables_and_exits_with_3(cli: Cli) -> None:
    result = cli("queue", "get", "empty", code=exit_codes.NOTHING_RECEIVED)
    shell = f'FASTNESS_QUEUE_MESSAGE_ID=old\neval {shlex.quote(result.stdout)}\necho "$?:$FASTNESS_QUEUE_MESSAGE_ID"'
    assert subprocess.run(["sh", "-c", shell], check=True, capture_output=True, text=True).stdout == "3:\n"
    assert parsed(cli("queue", "get", "empty", "--json", code=exit_codes.NOTHING_RECEIVED)) == {"message": None}


def test_a_failed_get_unsets_the_variables(cli: Cli) -> None:
    result = cli("--url", "http://127.0.0.1:1", "--patience", "0.1", "queue", "get", "jobs", code=9)
    assert result.stdout.startswith("unset FASTNESS_QUEUE_NAME")
    assert result.stdout.endswith("(exit 9)\n")


def test_exported_values_are_quoted(cli: Cli) -> None:
    unsafe = "$(touch pwned); `x` 'a' \"b\" \\ & |"
    cli("queue", "put", "jobs", "x", "--content-type", unsafe, "--correlation-id", unsafe)
    found = exported(cli("queue", "get", "jobs"))
    assert found["FASTNESS_QUEUE_CONTENT_TYPE"] == unsafe
    assert found["FASTNESS_QUEUE_CORRELATION_ID"] == unsafe
    Path(found["FASTNESS_QUEUE_PAYLOAD_PATH"]).unlink()
    assert not Path("pwned").exists()


def test_a_value_with_newlines_survives_eval() -> None:
    value = "a\n'b'\n$c"
    shell = f'{exports.export_lines({"X": value})}\nprintf %s "$X"'
    assert subprocess.run(["sh", "-c", shell], check=True, capture_output=True, text=True).stdout == value


def test_a_payload_that_cannot_be_written_releases_the_message(cli: Cli, tmp_path: Path) -> None:
    cli("queue", "put", "jobs", "work")
    result = cli("queue", "get", "jobs", "--payload-out", str(tmp_path / "no" / "such"), code=9)
    assert "was released" in result.stderr
    (tmp_path / "state").touch()
    for words in ((), ("--stateful", "--payload-out", str(tmp_path / "out"))):
        assert "XDG_STATE_HOME" in cli("queue", "get", "jobs", *words, code=9).stderr
    again = parsed(cli("queue", "get", "jobs", "--json"))
    assert again["failure_attempts"] == 0


def test_bodies_are_read_from_files_and_standard_input(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\xff\x00 bytes")
    cli("queue", "put", "jobs", "--file", str(tmp_path / "body"))
    cli("queue", "put", "jobs", "-", input=b"from stdin")
    first, second = parsed(cli("queue", "peek", "jobs", "--json"))
    assert base64.b64decode(first["payload_base64"]) == b"\xff\x00 bytes"
    assert (second["payload"], second["content_type"]) == ("from stdin", "text/plain; charset=utf-8")
    cli("queue", "put", "jobs", code=2)
    cli("queue", "put", "jobs", "x", "--file", "y", code=2)
    assert "/no/such" in cli("queue", "put", "jobs", "--file", "/no/such", code=9).stderr


def test_a_large_body_is_streamed_to_a_blob(cli: Cli, tmp_path: Path) -> None:
    body = bytes(range(256)) * 8_192
    (tmp_path / "body").write_bytes(body)
    cli("queue", "put", "jobs", "--file", str(tmp_path / "body"))
    found = parsed(cli("queue", "get", "jobs", "--json", "--payload-out", str(tmp_path / "out")))
    assert (found["size"], found["blob"]) == (len(body), hashlib.sha256(body).hexdigest())
    assert (tmp_path / "out").read_bytes() == body


def test_each_line_can_be_a_message(cli: Cli) -> None:
    lines = "".join(f'{{"n": {number}}}\n' for number in range(300)) + "\n"
    assert parsed(cli("queue", "put", "jobs", "-", "--lines", "--json", input=lines))["count"] == 300
    found = parsed(cli("queue", "peek", "jobs", "-n", "300", "--json"))
    assert [each["payload"]["n"] for each in found] == list(range(300))
    assert found[0]["content_type"] == "application/json"


def test_an_idempotency_key_puts_once(cli: Cli) -> None:
    cli("queue", "put", "jobs", "x", "--idempotency-key", "k")
    result = cli("queue", "put", "jobs", "x", "--idempotency-key", "k")
    assert "Duplicate" in result.stderr
    assert parsed(cli("queue", "stats", "jobs", "--json"))["ready"] == 1


def test_leased_messages_are_listed_and_settled_by_their_lease_ids(cli: Cli) -> None:
    cli("queue", "put", "jobs", "-", "--lines", input="1\n2\n3\n4\n5\n")
    assert "No leased messages" in cli("queue", "leased", "jobs").stderr
    for _ in range(5):
        cli("queue", "get", "jobs", "--owner", "ada", "--json")
    found = parsed(cli("queue", "leased", "jobs", "--json"))
    assert [(each["owner"], each["attempts"], each["fence"]) for each in found] == [("ada", 1, 1)] * 5
    assert found[0]["expires_at"] > found[0]["created_at"]
    assert parsed(cli("queue", "leased", "jobs", "-n", "2", "--after", found[1]["lease_id"], "--json")) == found[2:4]
    ids, leases = [each["id"] for each in found], [each["lease_id"] for each in found]
    assert leases[0] in cli("queue", "leased", "jobs").stdout
    extended = parsed(cli("queue", "extend", "jobs", *leases, "--by", "5m", "--json"))
    assert (extended["ids"], extended["expires_at"] > found[4]["expires_at"]) == (ids, True)
    acked = parsed(cli("queue", "ack", "jobs", *leases[:2], "--json"))
    assert acked == {"queue": "jobs", "ids": ids[:2], "outcome": "acked"}
    assert "Released 2 messages" in cli("queue", "nack", "jobs", *leases[2:4], "--defer").stdout
    assert ids[4] in cli("queue", "reject", "jobs", leases[4], "--error", "bad").stdout
    assert ids[2] in cli("queue", "nack", "jobs", leases[0], leases[2], code=6).stderr
    assert "queue leased jobs" in cli("queue", "ack", "jobs", "nonsense", code=2).stderr
    stats = parsed(cli("queue", "stats", "jobs", "--json"))
    assert (stats["acked_total"], stats["ready"], stats["dead"]) == (2, 2, 1)


def test_a_queue_is_deleted(cli: Cli) -> None:
    cli("queue", "put", "jobs", "-", "--lines", input="1\n2\n3\n")
    cli("queue", "get", "jobs", "--json")
    assert "--yes" in cli("queue", "delete", "jobs", code=2).stderr
    assert "queue_in_use" in cli("queue", "delete", "jobs", "--yes", "--json", code=5).stderr
    assert "with 3 messages" in cli("queue", "delete", "jobs", "--yes", "--force").stdout
    assert parsed(cli("queue", "list", "--json")) == []
    cli("queue", "delete", "jobs", "--yes", code=4)


def test_queues_are_listed_with_their_depths_and_the_age_of_the_oldest_message(cli: Cli) -> None:
    cli("queue", "put", "jobs", "-", "--lines", input="1\n2\n3\n")
    cli("queue", "put", "later", "1", "--delay", "1h")
    cli("queue", "get", "jobs", "--json")
    header, jobs, later = (line.split() for line in cli("queue", "list").stdout.splitlines())
    assert header[:6] == ["queue", "ready", "delayed", "leased", "blocked", "dead"]
    assert (jobs[:4], later[:4]) == (["jobs", "2", "0", "1"], ["later", "0", "1", "0"])
    assert [each["head_age_seconds"] > 0 for each in parsed(cli("queue", "list", "--json"))] == [True, False]
    assert queues_of(cli("queue", "list", "--after", "jobs", "--json")) == ["later"]
    assert queues_of(cli("queue", "list", "--limit", "1", "--json")) == ["jobs"]


def test_numbers_that_json_lacks_are_shown_as_text(cli: Cli, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        plane.state("s").update([float("nan"), float("inf"), {"low": float("-inf")}])
    assert parsed(cli("state", "get", "s", "--json"))["value"] == ["NaN", "Infinity", {"low": "-Infinity"}]


def test_a_universe_is_given_a_policy_for_sends(cli: Cli) -> None:
    def policy(*options: str) -> Any:
        return parsed(cli("--universe", "bank", "world", "policy", *options, "--json"))

    assert policy("--sends-to", "shop, main") == {"sends_to": ["main", "shop"], "accepts_from": []}
    assert policy("--accepts-from", "*") == {"sends_to": ["main", "shop"], "accepts_from": ["*"]}
    assert policy("--sends-to", "none") == policy() == {"sends_to": [], "accepts_from": ["*"]}
    assert "Invalid sends_to[1] name" in cli("world", "policy", "--sends-to", "a,,b", code=2).stderr


def test_queues_are_paused_purged_and_given_a_policy(cli: Cli) -> None:
    cli("queue", "put", "jobs", "x", "--delay", "1h")
    cli("queue", "put", "jobs", "y")
    cli("queue", "pause", "jobs")
    cli("queue", "get", "jobs", code=exit_codes.NOTHING_RECEIVED)
    cli("queue", "resume", "jobs")
    policy = parsed(cli("queue", "policy", "jobs", "--visibility", "2m", "--max-attempts", "2", "--json"))
    assert (policy["visibility_seconds"], policy["max_attempts"], policy["paused"]) == (120.0, 2, False)
    policy = parsed(
        cli("queue", "policy", "jobs", "--rate", "2", "--retention", "1h", "--dead-letter-queue", "x", "--json")
    )
    assert (policy["rate_per_second"], policy["retention_seconds"], policy["dead_letter_queue"]) == (2.0, 3_600.0, "x")
    policy = parsed(cli("queue", "policy", "jobs", "--rate", "none", "--json"))
    assert (policy["rate_per_second"], policy["retention_seconds"], policy["dead_letter_queue"]) == (None, 3_600.0, "x")
    policy = parsed(cli("queue", "policy", "jobs", "--retention", "none", "--dead-letter-queue", "none", "--json"))
    assert (policy["retention_seconds"], policy["dead_letter_queue"], policy["max_attempts"]) == (None, None, 2)
    assert "none" not in cli("queue", "policy", "jobs", "--visibility", "none", code=2).stdout
    assert "--yes" in cli("queue", "purge", "jobs", code=2).stderr
    assert parsed(cli("queue", "purge", "jobs", "--yes", "--json"))["count"] == 2


def test_watch_prints_changes(cli: Cli) -> None:
    cli("queue", "put", "jobs", "x")
    assert parsed(cli("queue", "watch", "jobs", "-n", "1", "--json"))["ready"] == 1
    assert "ready=1" in cli("queue", "watch", "jobs", "-n", "1").stdout


def test_schedules_are_added_listed_and_removed(cli: Cli) -> None:
    cli("queue", "schedule", "add", "jobs", "nightly", "0 3 * * *", '{"report": 1}', "--timezone", "Europe/Berlin")
    (found,) = parsed(cli("queue", "schedule", "list", "jobs", "--json"))
    assert (found["name"], found["payload"], found["next_at"][-1]) == ("nightly", {"report": 1}, "Z")
    cli("queue", "schedule", "delete", "jobs", "nightly")
    cli("queue", "schedule", "delete", "jobs", "nightly", code=4)
    cli("queue", "schedule", "add", "jobs", "x", "not cron", "1", code=2)


def test_a_stateful_get_leases_the_state_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("queue", "put", "jobs", "x")
    found = exported(cli("queue", "get", "jobs", "--stateful"))
    assert json.loads(Path(found["FASTNESS_QUEUE_STATE_PATH"]).read_text()) is None
    for name in ("FASTNESS_QUEUE_STATE_PATH", "FASTNESS_QUEUE_PAYLOAD_PATH"):
        Path(found[name]).unlink()
    key, lease = found["FASTNESS_QUEUE_STATE_KEY"], found["FASTNESS_QUEUE_STATE_LEASE_ID"]
    cli("state", "set", key, '{"step": 1}', code=6)
    cli("state", "set", key, '{"step": 1}', "--lease-key", key, "--lease-id", lease, "--fence", "1")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    cli("queue", "nack", "--delay", "0")
    assert parsed(cli("queue", "get", "jobs", "--stateful", "--json"))["state"]["value"] == {"step": 1}


@pytest.fixture
def lease(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Leases the next message of a queue for the commands that follow. Returns the path of its payload."""

    def get(*words: str) -> Path:
        found = exported(cli("queue", "get", "jobs", *words))
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        return Path(found["FASTNESS_QUEUE_PAYLOAD_PATH"])

    return get


def test_files_of_a_message_are_private_and_removed_when_it_is_settled(
    cli: Cli, lease: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "state" / "fastness" / "messages"
    cli("queue", "put", "jobs", "work")
    first = lease("--stateful")
    assert first.parent == folder / "jobs"
    assert first.read_bytes() == b"work"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, first)] == [0o700, 0o600]
    assert len(list(first.parent.iterdir())) == 2
    cli("queue", "nack", "--delay", "0")
    second = lease()
    assert first.exists()
    assert second != first
    other = first.parent / "another-message-1.payload"
    other.touch()
    cli("queue", "ack")
    assert list(first.parent.iterdir()) == [other]
    cli("queue", "put", "jobs", "work")
    rejected = lease()
    cli("queue", "reject")
    assert not rejected.exists()
    assert other.exists()


def test_files_that_no_ack_removed_are_removed_later(cli: Cli, lease: Callable[..., Path]) -> None:
    cli("queue", "put", "jobs", "1")
    cli("queue", "put", "jobs", "2")
    old = lease()
    os.utime(old, (0, 0))
    new = lease()
    assert (old.exists(), new.exists()) == (False, True)


def test_an_ack_leaves_the_file_that_the_user_chose(cli: Cli, lease: Callable[..., Path], tmp_path: Path) -> None:
    cli("queue", "put", "jobs", "work")
    chosen = lease("--payload-out", str(tmp_path / "mine"))
    cli("queue", "ack")
    assert chosen.read_bytes() == b"work"


def test_an_ack_without_a_message_says_what_to_do(cli: Cli) -> None:
    cli("queue", "put", "jobs", "x")
    assert "queue get" in cli("queue", "ack", code=2).stderr


# Locks.


def test_a_lock_is_acquired_renewed_and_released(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = exported(cli("lease", "acquire", "deploy", "--owner", "ada", "--ttl", "1m"))
    assert (found["FASTNESS_LEASE_KEY"], found["FASTNESS_FENCE"]) == ("deploy", "1")
    refused = cli("lease", "acquire", "deploy", "--owner", "bob", code=5)
    assert "ada holds deploy" in refused.stderr
    assert refused.stdout.endswith("(exit 5)\n")
    held = parsed(cli("lease", "list", "--json"))
    assert [(each["key"], each["owner"]) for each in held] == [("deploy", "ada")]
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert parsed(cli("lease", "keepalive", "--ttl", "2m", "--json"))["expires_at"] > held[0]["expires_at"]
    cli("state", "set", "deploy", "7", code=6)
    cli("state", "set", "deploy", "7", "--leased")
    assert parsed(cli("lease", "release", "--json")) == {"key": "deploy", "released": True}
    assert parsed(cli("lease", "release", "--json"))["released"] is False
    described = parsed(cli("lease", "show", "deploy", "--json"))
    assert (described["held"], described["fence"]) == (False, 1)
    cli("lease", "keepalive", code=6)
    cli("lease", "show", "other", code=4)
    assert parsed(cli("lease", "acquire", "deploy", "--json"))["fence"] == 2
    cli("lease", "break", "deploy", "--fence", "1", code=6)
    assert parsed(cli("lease", "break", "deploy", "--fence", "2", "--json")) == {"key": "deploy", "released": True}
    assert "was not held any more" in cli("lease", "break", "deploy", "--fence", "2").stdout


def test_sessions_of_ordered_locks_are_listed_and_ended(cli: Cli, tmp_path: Path) -> None:
    ada = LockSession("the-secret-id-of-ada")
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        call = plane._transport.call  # As a server does: the locks of an embedded plane are within its process.
        call(AcquireLocks(ada, "1", [["record_id", "task/1"], ["database"]], owner="ada", lease_seconds=3_600))
        call(AcquireLocks(ada, "2", [["record_id", "task/2"]], "S", owner="ada", continues=True))
    (session,) = parsed(cli("lock", "list", "--json"))
    assert (session["owner"], session["waits_for"]) == ("ada", None)
    assert session["holds"] == ["database X", "record_id task/1 X", "record_id task/2 S"]
    assert "record_id task/1 X" in cli("lock", "list").stdout
    assert cli("lock", "end", session["number"]).stdout == f"Session {session['number']} has ended\n"
    assert "fastness lock list" in cli("lock", "end", session["number"], code=4).stderr
    assert parsed(cli("lock", "list", "--json")) == []


def test_a_command_runs_under_a_lock_and_its_exit_code_is_returned(cli: Cli, tmp_path: Path) -> None:
    script = 'printf "%s" "$FASTNESS_LEASE_KEY:$FASTNESS_FENCE:${FASTNESS_LEASE_ID:+id}" > "$0"; exit 7'
    cli("lease", "run", "deploy", "--", "sh", "-c", script, str(tmp_path / "out"), code=7)
    assert (tmp_path / "out").read_text() == "deploy:1:id"
    assert parsed(cli("lease", "list", "--json")) == []


def test_a_missing_command_exits_with_127_and_releases_the_lock(cli: Cli, tmp_path: Path) -> None:
    cli("lease", "run", "deploy", "--", "/no/such/command", code=127)
    (tmp_path / "file").write_text("")
    cli("lease", "run", "deploy", "--", str(tmp_path / "file"), code=126)
    assert parsed(cli("lease", "list", "--json")) == []


def test_a_command_killed_by_a_signal_exits_with_128_plus_the_signal(cli: Cli) -> None:
    cli("lease", "run", "deploy", "--", "sh", "-c", "kill -KILL $$", code=128 + signal.SIGKILL)


def test_a_signal_while_the_command_starts_is_forwarded_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def interrupted(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = popen(*words, **options)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    renewer = lease_run.LeaseRenewer(lambda: None, 600)
    assert lease_run.run(["sleep", "60"], os.environ, renewer, grace_seconds=5) == 128 + signal.SIGINT


def test_a_held_lock_runs_no_command(cli: Cli, tmp_path: Path) -> None:
    cli("lease", "acquire", "deploy", "--owner", "ada")
    cli("lease", "run", "deploy", "--wait", "0.2", "--", "touch", str(tmp_path / "ran"), code=5)
    assert not (tmp_path / "ran").exists()


def test_a_fenced_lease_stops_its_command(tmp_path: Path) -> None:
    calls = []

    def renew() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise LeaseExpired("gone")

    renewer = lease_run.LeaseRenewer(renew, 6)  # Leaves the command two seconds to set its trap.
    script = f"trap 'touch {tmp_path}/terminated; exit' TERM; sleep 30 & wait"
    with pytest.raises(LeaseExpired, match="was stopped"):
        lease_run.run(["sh", "-c", script], os.environ, renewer, grace_seconds=5)
    assert (tmp_path / "terminated").exists()


def test_a_command_that_ignores_sigterm_is_killed_before_its_lease_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, deadlines = [], []
    stop = lease_run._stop

    def record_deadline(process: Any, ended: Any, deadline: float, has_terminal: bool) -> None:
        deadlines.append(deadline)
        stop(process, ended, deadline, has_terminal)

    monkeypatch.setattr(lease_run, "_stop", record_deadline)

    def renew() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise Unreachable("no answer")

    renewer = lease_run.LeaseRenewer(renew, 4.5)
    script = f"echo $$ > {tmp_path}/pid; trap '' TERM; while :; do sleep 0.05; done"
    with pytest.raises(LeaseExpired, match="no answer"):
        lease_run.run(["sh", "-c", script], os.environ, renewer, grace_seconds=5)
    assert renewer.held_until - 1 < deadlines[0] < renewer.held_until
    assert len(calls) > 2
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# Worlds, blobs, states, entities, activity.


def test_effects_are_claimed_failed_and_completed_from_a_shell(cli: Cli) -> None:
    ask = {
        "type": "control",
        "command": "pay",
        "effects": [{"kind": "charge", "intent_hash": "YQ==", "params": "e30="}],
        "timers": [{"deliver_at_ns": 1 << 62, "intent_hash": "cmVtaW5k"}],
    }
    cli("world", "create", "ada")
    cli("world", "inbox", "put", "ada", "--item", json.dumps(ask))
    cli("world", "drain", "ada")
    assert [(each["timer_id"], each["due_at"][:4]) for each in parsed(cli("timer", "list", "--json"))] == [
        ("remind", "2116")
    ]
    assert [(each["kind"], each["params"]) for each in parsed(cli("effect", "list", "ada", "--json"))] == [
        ("charge", "{}")
    ]
    cli("effect", "claim", "other", code=3)
    (claimed,) = parsed(cli("effect", "claim", "charge", "--owner", "sh", "--json"))
    assert (claimed["fence"], claimed["attempts"], claimed["idempotency_key"]) == (1, 1, "61")
    effect = ("ada", "0", "0", "--fence")
    cli("effect", "complete", *effect, "7", "{}", code=6)
    assert parsed(cli("effect", "fail", *effect, "1", "no answer", "--delay", "0", "--json"))["is_dead"] is False
    cli("effect", "claim", "charge", "--wait", "1")
    assert "complete" in cli("effect", "complete", *effect, "2", '{"paid": true}').stdout
    cli("effect", "complete", *effect, "2", code=4)
    assert parsed(cli("effect", "list", "--json")) == []
    (receipt,) = parsed(cli("world", "inbox", "read", "ada", "--json"))
    assert receipt["item"]["effect_kind"] == "charge"


def test_a_world_is_created_written_read_and_deleted(cli: Cli) -> None:
    assert parsed(cli("world", "create", "ada", "--json"))["state"] == "active"
    cli("world", "create", "ada", code=5)
    assert (
        parsed(cli("world", "append", "ada", '{"resolve": "hello"}', "2", "--expected-head", "0", "--json"))["head"]
        == 2
    )
    cli("world", "append", "ada", "3", "--expected-head", "0", code=5)
    cli("world", "append", "ada", "--lines", "-", input="3\n4\n")
    cli("world", "append", "ada", "not json", code=2)
    cli("world", "append", "ada", code=2)
    tail = [json.loads(line) for line in cli("world", "tail", "ada", "--json").stdout.splitlines()]
    assert [(each["height"], each["value"]) for each in tail] == [(0, {"resolve": "hello"}), (1, 2), (2, 3), (3, 4)]
    assert cli("world", "tail", "ada", "-n", "1").stdout.split() == ["3", "entry", "4"]
    assert len(cli("world", "tail", "ada", "--from", "2").stdout.splitlines()) == 2

    cli("world", "inbox", "put", "ada", "greeting@1", "hi")
    cli("world", "inbox", "put", "ada", "--item", '{"type": "timer_fired", "timer_id": "t-1"}')
    cli("world", "inbox", "put", "ada", "--control", "stop")
    cli("world", "inbox", "put", "ada", code=2)
    cli("world", "inbox", "put", "ada", "--item", f'{{"type": "timer_fired", "x": {"[" * 10_000}', code=2)
    assert len(parsed(cli("world", "inbox", "read", "ada", "--json"))) == 3
    assert parsed(cli("world", "drain", "ada", "--json"))["heights"] == [4, 5, 6]
    assert parsed(cli("world", "inbox", "read", "ada", "--json")) == []

    snapshot = parsed(cli("world", "snapshot", "ada", '{"count": 7}', "--height", "7", "--json"))
    assert snapshot["height"] == 7
    assert parsed(cli("world", "compact", "ada", "--json"))["segments"] == 0
    assert parsed(cli("world", "fork", "ada", "eve", "--height", "2", "--json"))["head"] == 2
    shown = parsed(cli("world", "show", "ada", "--json"))
    assert (shown["head"], shown["snapshots"], shown["baseline"]) == (9, [0, 7], 7)
    stored = parsed(cli("world", "snapshot", "ada", "8", "--height", "8", "--no-promote", "--json"))
    assert (stored["is_baseline"], snapshot["is_baseline"]) == (False, True)
    assert parsed(cli("world", "promote", "ada", "8", "--json"))["is_baseline"]
    cli("world", "promote", "ada", "7", code=5)
    cli("world", "snapshot", "ada", "5", "--height", "5", "--promote", code=5)
    for verb, state in (("pause", "paused"), ("resume", "active"), ("archive", "archived")):
        assert parsed(cli("world", verb, "ada", "--json"))["state"] == state
    cli("world", "delete", "ada", code=2)
    cli("world", "delete", "ada", "--yes")
    listed = parsed(cli("world", "list", "--json"))
    assert [(each["name"], each["state"]) for each in listed] == [("eve", "active")]
    for command in (("show", "ada"), ("tail", "ada"), ("inbox", "read", "ada")):
        assert "ada was deleted" in cli("world", *command, code=4).stderr
    assert parsed(cli("world", "create", "ada", "--json"))["incarnation"] == 2
    assert cli("world", "tail", "ada").stdout == ""


def test_blobs_are_stored_and_read(cli: Cli, tmp_path: Path) -> None:
    body = bytes(range(256)) * 4_096
    (tmp_path / "body").write_bytes(body)
    hash = cli("blob", "put", str(tmp_path / "body")).stdout.strip()
    assert hash == hashlib.sha256(body).hexdigest()
    assert parsed(cli("blob", "put", "-", "--json", input=b"small"))["hash"] == hashlib.sha256(b"small").hexdigest()
    cli("blob", "get", hash, "--out", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == body
    assert cli("blob", "get", hash).stdout_bytes == body
    assert cli("blob", "get", hash, "--start", "3", "--length", "9").stdout_bytes == body[3:12]
    cli("blob", "has", hash)
    cli("blob", "has", "0" * 64, code=4)
    cli("blob", "get", "0" * 64, "--out", str(tmp_path / "none"), code=4)
    assert not (tmp_path / "none").exists()


def test_blobs_are_pinned_and_unpinned(cli: Cli) -> None:
    hash = cli("blob", "put", "--unpinned", "-", input=b"body").stdout.strip()
    other = cli("blob", "put", "-", input=b"other").stdout.strip()
    reasons = {use["reason"]: use["count"] for use in parsed(cli("space", "--json"))["uses"] if use["kind"] == "blobs"}
    assert reasons == {"unreferenced": 1, "pinned": 1}
    assert "until it is unpinned" in cli("blob", "pin", hash).stdout
    assert "gc_grace_seconds" in cli("blob", "unpin", other).stdout
    assert parsed(cli("blob", "unpin", other, "--json")) == {"hash": other, "pinned": False}
    cli("gc")
    assert parsed(cli("gc", "--grace", "0", "--json"))["waiting"] == 1, "it was put less than an hour ago"
    cli("blob", "has", hash)
    assert "put it first" in cli("blob", "pin", "0" * 64, code=4).stderr
    assert "64 hex digits" in cli("blob", "unpin", "x", code=2).stderr


def test_gc_fails_if_something_could_not_be_searched(cli: Cli, tmp_path: Path) -> None:
    """It might name any blob, so nothing is deleted."""
    digits = "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(256)) * 2
    hash = cli("blob", "put", "-", input=digits.encode()).stdout.strip()
    cli("blob", "put", "--unpinned", "-", input=b"unnamed")
    [body] = tmp_path.rglob(f"{hash}.*")
    body.unlink()
    failed = cli("gc", code=exit_codes.DAMAGED)
    assert "could not be searched; run `fastness doctor`" in failed.stdout
    assert len(parsed(cli("gc", "--json", code=exit_codes.DAMAGED))["unsearched"]) == 1


def test_space_and_gc_print_sizes_with_units_and_the_next_step(cli: Cli, tmp_path: Path) -> None:
    cli("queue", "put", "jobs", "x" * 20_480)
    cli("queue", "purge", "jobs", "--yes")
    assert "starts with the next collection" in cli("space").stdout
    cli("gc")
    shown = cli("space")
    line = next(line for line in shown.stdout.splitlines() if "unreferenced" in line)
    assert "20.0 KiB" in line
    assert "UTC" in line
    assert "fastness gc --dry-run" in shown.stderr
    reserve_mib = disk_space(tmp_path).reserve_bytes_default / 2**20
    assert f"new data is refused while less than {reserve_mib:.1f} MiB are free" in shown.stderr
    dry = cli("gc", "--dry-run").stdout
    assert "In the grace period: 1 unreferenced blob (20.0 KiB)" in dry
    assert "nothing can be deleted now" in dry
    status = cli("space", "--status").stdout
    assert "Key space: works" in status
    assert parsed(cli("space", "--status", "--json"))["disk_low"] is False


@pytest.mark.parametrize(("text", "size"), [("5", 5), ("64MiB", 64 << 20), ("1.5 gib", 3 << 29), ("10GB", 10**10)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert SIZE.convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "5 pounds", "1e3"])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        SIZE.convert(text, None, None)


def test_states_are_compared_and_swapped(cli: Cli) -> None:
    cli("state", "get", "orders/17", code=4)
    etag = parsed(cli("state", "set", "orders/17", '{"shipped": false}', "--if-absent", "--json"))["etag"]
    cli("state", "set", "orders/17", "1", "--if-absent", code=5)
    cli("state", "set", "orders/17", "hello", code=2)
    cli("state", "set", "orders/17", "hello", "--text", "--if-match", etag)
    found = parsed(cli("state", "get", "orders/17", "--json"))
    assert (found["value"], found["version"]) == ("hello", 2)
    problem = json.loads(cli("state", "set", "orders/17", "1", "--if-match", etag, "--json", code=5).stderr)
    assert problem["current_etag"] == found["etag"]
    cli("state", "delete", "orders/17", "--if-match", found["etag"])
    cli("state", "delete", "orders/17", code=4)
    cli("state", "set", "orders/17", "1", "--fence", "1", code=2)


def test_entities_are_set_scanned_and_deleted(cli: Cli) -> None:
    cli("entity", "set", "task", "t-1", "status=done", "tries:=3")
    found = parsed(cli("entity", "get", "task", "t-1", "--json"))
    assert (found["version"], found["fields"]) == (1, {"status": "done", "tries": 3})
    cli("entity", "set", "task", "t-1", "status=open", "--if-version", "4", code=5)
    cli("entity", "set", "task", "t-1", "status=open", "--if-version", "1")
    cli("entity", "set", "task", "t-1", "a=b", "--remove", "status")
    assert parsed(cli("entity", "scan", "task", "--json"))[0]["fields"] == {"a": "b"}
    assert [each["version"] for each in parsed(cli("entity", "history", "task", "t-1", "--json"))] == [1, 2, 3]
    cli("entity", "set", "task", "t-2", "ml_score:=0.5")
    cli("entity", "get", "task", "t-2", code=4)
    logged = parsed(cli("entity", "get", "task", "t-2", "--best-effort", "--json"))
    assert (logged["version"], logged["fields"], list(logged["best_effort"])) == (0, {"ml_score": 0.5}, ["ml_score"])
    assert len(parsed(cli("entity", "scan", "task", "--best-effort", "--json"))) == 2
    cli("entity", "set", "task", "t-1", "nonsense", code=2)
    cli("entity", "set", "task", "t-1", code=2)
    cli("entity", "delete", "task", "t-1", "--if-version", "1", code=5)
    cli("entity", "delete", "task", "t-1")
    cli("entity", "delete", "task", "t-1", code=4)
    cli("entity", "get", "task", "t-1", code=4)


def test_collections_are_listed_and_scanned(cli: Cli, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        rows = plane.collection("notes")
        rows.commit(
            [PutRow("ada", ("a", n), b"text" if n else b"\xff", ttl_seconds=600 if n else None) for n in range(4)]
        )
        rows.commit([PutRow("bob", ("a",), b"")])
    assert parsed(cli("collection", "list", "--json")) == [{"name": "notes"}]
    assert "ada" in cli("collection", "partitions", "notes").stdout
    assert parsed(cli("collection", "partitions", "notes", "--prefix", "b", "--json")) == [{"partition": "bob"}]

    def scan(*options: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in cli("collection", "scan", "notes", "ada", *options).stdout.splitlines()]

    first, *others = scan()
    assert first == {"key": ["a", 0], "version": 1, "expires_at": None, "value_base64": "/w=="}
    assert [(each["key"], each["value"], each["expires_at"] > "2026") for each in others] == [
        (["a", n], "text", True) for n in (1, 2, 3)
    ]
    assert scan("--json") == scan()
    options = ("--prefix", '["a"]', "--after", '["a", 0]', "--before", '["a", 3]', "--reverse", "--limit", "1")
    assert [each["key"] for each in scan(*options)] == [["a", 2]]
    assert scan("--prefix", '["b"]') == []
    assert "give a list" in cli("collection", "scan", "notes", "ada", "--after", "[1.5]", code=2).stderr


def test_activity_is_logged_and_read(cli: Cli) -> None:
    cli("activity", "log", "build-17", '{"step": "compile"}')
    cli("activity", "log", "build-17", "--file", "-", input='{"n": 1}\n{"n": 2}\n')
    cli("activity", "log", "build-17", "[1]", code=2)
    lines = cli("activity", "tail", "--session", "build-17", "-n", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["record"] for line in lines] == [{"n": 1}, {"n": 2}]
    assert '{"n":2}' in cli("activity", "tail").stdout
    assert all(each["rotated"] for each in parsed(cli("activity", "files", "--json")))


def test_bench_measures_and_leaves_no_messages(cli: Cli) -> None:
    found = parsed(cli("bench", "--messages", "50", "--callers", "4", "--json"))
    assert [each["step"] for each in found] == ["put", "receive", "ack"]
    assert all(each["rate_per_second"] > 0 and each["p50_ms"] <= each["p99_ms"] for each in found)
    assert "fastness-bench" not in cli("queue", "list").stdout
    cli("queue", "put", "mine", "x")
    cli("bench", "--queue", "mine", code=5)
    assert "rate per second" in cli("--url", "memory:", "bench", "--messages", "5").stdout


# Serving and tokens.


def test_serve_passes_its_flags_to_the_server(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(settings: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("os.umask", lambda mask: mask)  # It would apply to later tests of this process.
    monkeypatch.setattr("fastness.server.serving.run", run)
    monkeypatch.setenv("FASTNESS_DEBUG", "1")
    cli("serve", "--data", "memory:", "--port", "0", "--drain-seconds", "3", "--log-format", "json")
    assert (seen[0].data, seen[0].port, seen[0].drain_seconds, seen[0].tokens) == ("memory:", 0, 3.0, False)
    assert cli("serve", "--tls-cert", "x.pem", "--data", "memory:", code=2).stderr
    cli("serve", "--data", "memory:", "--gc-every", "0", "--gc-grace", "2h", "--activity-keep", "7d")
    cli("serve", "--data", "memory:", "--activity-max", "1GiB")
    assert seen.pop().options.space.log_bytes_max == 1 << 30
    space = seen[1].options.space
    assert (seen[1].options.gc_every_seconds, space.grace_seconds) == (None, 7_200)
    assert (space.log_keep_seconds, space.log_bytes_max) == (7 * 86_400, None)
    cli("serve", "--data", "memory:", "--disk-reserve", "1GiB", "--on-database-failure", "exit", "--gc-every", "5m")
    assert (seen[2].disk_reserve_bytes, seen[2].on_database_failure) == (1 << 30, "exit")
    assert seen[2].options.gc_every_seconds == 300


def test_tokens_are_created_for_the_current_universe_and_shown_once(cli: Cli) -> None:
    made = parsed(cli("--universe", "u", "token", "create", "w", "--allow", "queue:put", "--ttl", "30d", "--json"))
    assert (made["name"], made["universes"], made["verbs"]) == ("w", ["u"], ["queue:put"])
    assert made["expires_at"] > made["created_at"]
    other = cli("token", "create", "--universe", "a", "--universe", "b", "--allow", "queue:*,lease:acquire")
    assert "cannot be shown again" in other.stderr
    assert made["token"] not in cli("token", "list").stdout
    listed = parsed(cli("token", "list", "--json"))
    assert [each["universes"] for each in listed] == [["u"], ["a", "b"]]
    assert parsed(cli("token", "revoke", made["id"], "--json")) == {"revoked": True}
    assert parsed(cli("token", "revoke", other.stdout.strip(), "--json")) == {"revoked": True}
    assert parsed(cli("token", "revoke", made["id"], "--json")) == {"revoked": False}
    cli("token", "create", "--allow", "queue:pat", code=2)


def test_access_keys_are_printed_once_and_stored_encrypted(cli: Cli, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    made = cli("--url", url, "token", "create", "shop", "--sqs", "--queue", "orders*", "--queue", "orders-eu")
    variables = dict(line.split("=", 1) for line in made.stdout.splitlines())
    assert list(variables) == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    listed = parsed(cli("--url", url, "token", "list", "--json"))
    assert listed[0]["access_key_id"] == variables["AWS_ACCESS_KEY_ID"]
    assert (listed[0]["universes"], listed[0]["queues"]) == (["main"], ["orders*"])
    assert {"queue:*", "blob:put"} <= set(listed[0]["verbs"])
    secret = variables["AWS_SECRET_ACCESS_KEY"]
    assert secret not in cli("--url", url, "token", "list").stdout
    assert secret not in cli("--url", url, "audit", "--plane", "--json").stdout
    key_file = tmp_path / "data" / "sqs.key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    stored = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert secret.encode() not in stored
    assert "fnt_" not in made.stdout
    given = parsed(cli("--url", url, "token", "create", "more", "--sqs", "--allow", "queue:put", "--json"))
    assert given["AWS_ACCESS_KEY_ID"] == given["access_key_id"]
    assert given["verbs"] == ["queue:put"]
    key_file.rename(tmp_path / "away")
    lost = cli(
        "--url", url, "token", "create", "third", "--sqs", code=exit_codes.code_of(errors.EncryptionKeyMissing(""))
    )
    assert "restore the file" in lost.stderr
    assert not key_file.exists()


def test_permissions_are_needed_unless_the_token_has_an_access_key(cli: Cli) -> None:
    refused = cli("token", "create", "w", code=2)
    assert "--allow" in refused.stderr
    refused = cli("token", "create", "w", "--sqs", "--universe", "*", code=2)
    assert "for one universe" in refused.stderr


def test_a_token_is_revoked_by_its_name(cli: Cli) -> None:
    cli("token", "create", "worker", "--allow", "queue:put")
    old, new = [parsed(cli("token", "create", "admin", "--allow", "*", "--json"))["id"] for _ in range(2)]
    assert parsed(cli("token", "revoke", "worker", "--json")) == {"revoked": True}
    assert "Already revoked" in cli("token", "revoke", "worker").stdout
    ambiguous = cli("token", "revoke", "admin", code=2).stderr
    assert "2 tokens are named admin" in ambiguous
    assert old in ambiguous
    assert new in ambiguous
    cli("token", "revoke", old)
    assert parsed(cli("token", "revoke", "admin", "--json")) == {"revoked": True}
    revoked = {each["id"] for each in parsed(cli("token", "list", "--json")) if each["revoked_at"]}
    assert {old, new} < revoked
    assert "fastness token list" in cli("token", "revoke", "nobody", code=4).stderr
    assert "without a token" in cli("token", "self", code=4).stderr


# Doctor, backup, restore.


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with data of every kind."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        world = plane.world("ada")
        world.create()
        for start in range(0, 100, 50):
            world.append(list(range(50)), expected_head=start)
        snapshot = world.snapshots.commit({"n": 1}, height=100, promote=False)
        world.snapshots.commit({"n": 2}, height=101)
        assert snapshot.height == 100
        assert world.compact(entries=16, margin=10).segments > 0
        plane.blobs.put(b"large" * 10_000)
        jobs = plane.queue("jobs")
        jobs.put("x" * 5_000)
        jobs.put(b"y" * 50_000, delay_seconds=3_600)
        jobs.put("a", group="g")
        jobs.put("b", group="g", ttl_seconds=3_600)
        jobs.receive(extend_for_seconds=0).nack(error="boom", delay_seconds=0)
        jobs.receive(visibility_seconds=3_600, extend_for_seconds=0)
        plane.activity.log("s", {"a": 1})
    return tmp_path / "data"


def large_blob(data: Path) -> Path:
    return next((data / "objects" / "cas").rglob(f"{hashlib.sha256(b'large' * 10_000).hexdigest()}*"))


def findings(cli: Cli, *words: str) -> list[str]:
    report = parsed(cli("doctor", *words, "--json", code=exit_codes.DAMAGED))
    assert not report["sound"]
    return [f"{each['where']}: {each['what']}" for each in report["findings"]]


def test_doctor_reports_a_sound_directory(cli: Cli, data: Path) -> None:
    report = parsed(cli("doctor", "--deep", "--json"))
    assert report["sound"]
    assert report["looked_at"]["messages"] == 4
    assert report["looked_at"]["blobs"] >= 4
    assert f"{data} is sound: all checksums match" in cli("doctor", str(data)).stdout


def test_doctor_reports_and_fixes_what_other_users_can_access(cli: Cli, data: Path, tmp_path: Path) -> None:
    assert parsed(cli("doctor", "--json"))["readable_by_others"] == []
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (data / "link").symlink_to(outside)
    body = large_blob(data)
    for path in (data, data / "kv", *list(body.parents)[:5], body):
        path.chmod(0o644 if path is body else 0o755)
    report = parsed(cli("doctor", "--json"))
    assert report["sound"]
    assert {str(data), str(data / "kv"), str(body)} <= set(report["readable_by_others"])
    assert f"run: fastness doctor --fix {data}" in cli("doctor", str(data)).stdout
    assert "accessible to their owner only" in cli("doctor", str(data), "--fix").stdout
    assert parsed(cli("doctor", "--json"))["readable_by_others"] == []
    left = [path for path in (data, *data.rglob("*")) if not path.is_symlink() and path.stat().st_mode & 0o077]
    assert [path for path in left if path.parent != data / "kv"] == []  # RocksDB has created files since.
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755
    cli("doctor", str(outside), "--fix", code=4)
    cli("--url", "http://127.0.0.1:1", "doctor", "--fix", code=2)


def test_doctor_does_not_create_a_missing_directory(cli: Cli, tmp_path: Path) -> None:
    cli("doctor", str(tmp_path / "none"), code=4)
    assert not (tmp_path / "none").exists()
    cli("--url", "http://127.0.0.1:1", "--patience", "0.1", "doctor", code=9)
    cli("--url", "memory:", "doctor", code=2)


def test_a_newer_format_is_rejected(cli: Cli, data: Path) -> None:
    (data / "fastness.json").write_text('{"format": 99}')
    assert "upgrade" in cli("doctor", code=9).stderr


@pytest.mark.parametrize("marker", ["[" * 100_000, '{"format":' * 100_000, "\udcff"], ids=["list", "map", "bytes"])
def test_doctor_reports_a_damaged_marker(cli: Cli, data: Path, marker: str) -> None:
    (data / "fastness.json").write_bytes(marker.encode(errors="surrogateescape"))
    [found] = parsed(cli("doctor", "--json", code=exit_codes.DAMAGED))["findings"]
    assert "fastness.json cannot be read" in found["what"]


def test_doctor_salvages_a_damaged_directory(cli: Cli, data: Path, tmp_path: Path) -> None:
    (data / "kv" / "CURRENT").write_bytes(b"damaged")
    assert any("does not name a manifest" in each for each in findings(cli))
    report = parsed(cli("doctor", "--salvage", str(tmp_path / "new"), "--json", code=exit_codes.DAMAGED))
    assert report["pairs"] > 0
    assert report["files"] > 0
    assert any("list of tables" in each for each in report["lost"])
    assert parsed(cli("doctor", str(tmp_path / "new"), "--deep", "--json"))["sound"]
    assert "already exists" in cli("doctor", "--salvage", str(tmp_path / "new"), code=5).stderr
    cli("doctor", str(tmp_path / "none"), "--salvage", str(tmp_path / "other"), code=4)


def test_doctor_reports_a_missing_key_space(cli: Cli, data: Path) -> None:
    shutil.rmtree(data / "kv")
    assert any("key space" in each for each in findings(cli))
    assert not (data / "kv").exists()


def test_doctor_finds_damaged_truncated_and_missing_blobs(cli: Cli, data: Path) -> None:
    body = large_blob(data)
    body.write_bytes(body.read_bytes()[:-1] + b"X")
    assert any("its content does not match its hash" in each for each in findings(cli))
    body.write_bytes(body.read_bytes()[:-1])
    assert any("49,999 bytes" in each for each in findings(cli))
    body.unlink()
    assert any("is not in the object store" in each for each in findings(cli))
    assert "✗ blobs" in cli("doctor", code=exit_codes.DAMAGED).stdout


def test_doctor_finds_damaged_and_missing_segments(cli: Cli, data: Path) -> None:
    first, second, *_ = sorted((data / "objects" / "segments" / "main" / "ada").iterdir())
    first.write_bytes(first.read_bytes()[:-3])
    second.unlink()
    found = findings(cli)
    assert any(first.name in each and "damaged" in each for each in found)
    assert any(second.name in each and "not in the object store" in each for each in found)


def test_doctor_finds_journals_with_gaps_and_truncated_journals(cli: Cli, data: Path) -> None:
    entries = subspace(World("main", "ada")).key("journal", "e")
    with fastness.open(f"dir:{data}") as plane:
        for height in (95, 102):
            plane.pairs.delete(entries + height.to_bytes(8, "big"))
    found = findings(cli)
    assert any("gap: record 95 is missing, below its head 103" in each for each in found)
    assert any("truncated: record 102" in each for each in found)


def test_doctor_finds_damaged_and_missing_session_logs(cli: Cli, data: Path) -> None:
    [body] = (data / "objects" / "activity").rglob("*_activity_*.jsonl")
    [entry] = (data / "objects" / "activity-manifest").rglob("*_activity_*.json")
    whole, manifest = body.read_bytes(), entry.read_bytes()
    body.write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
    assert any(f"{body.name}: its content does not match the SHA-256" in finding for finding in findings(cli))
    body.write_bytes(whole)
    entry.write_bytes(manifest[:-1])
    assert any("is damaged" in finding and entry.name in finding for finding in findings(cli))
    entry.unlink()
    assert any(f"{body.name}: it has no manifest entry" in finding for finding in findings(cli))
    entry.write_bytes(manifest)
    body.unlink()
    assert any(f"{body.name}: it is not in the object store" in finding for finding in findings(cli, "--deep"))


def test_doctor_finds_damaged_lines_of_session_logs_before_and_after_rotation(cli: Cli, data: Path) -> None:
    """A changed digit leaves valid JSON; what a crash leaves incomplete is no damage."""
    name = "2026-11-15_04-42-15_ada_metrics.jsonl"
    header = log_format.header_line(Header("main", "ada", "metrics", 1_794_717_735_123, "0198"))
    whole = header + log_format.line(0, 1_794_717_735_124, b'{"cpu":100}')
    file = data / "activity" / "main" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(whole + b'{"n":1,"at')
    assert parsed(cli("doctor", "--json"))["sound"]
    file.write_bytes(whole.replace(b'"cpu":100', b'"cpu":900'))
    assert any(f"{name}: 1 of its lines are damaged" in finding for finding in findings(cli))
    fastness.open(f"dir:{data}").close()
    assert not file.exists()
    assert any("ada_metrics" in finding and "1 of its lines are damaged" in finding for finding in findings(cli))


def test_doctor_finds_wrong_counters_and_missing_payloads(cli: Cli, data: Path) -> None:
    jobs = keys_of(QueueKey("main", "jobs"))

    def damage(tx: Any) -> None:
        counters = load_counters(tx, jobs)
        counters.leased += 5
        counters.blocked = 0
        tx.put(jobs.all_counters.key(tx.writer), msgspec.msgpack.encode(counters))
        tx.delete_range(jobs.body, jobs.body + b"\xff" * 17)
        tx.delete_range(jobs.failures, jobs.failures + b"\xff" * 17)

    with fastness.open(f"dir:{data}") as plane:
        plane.transact(damage)
    found = findings(cli)
    assert any("says that 6 messages are leased, but there are 1" in each for each in found)
    assert any("says that 0 messages are blocked, but there are 1" in each for each in found)
    assert any("payload of message" in each for each in found)
    assert any("the failed attempts of message" in each for each in found)


def test_doctor_finds_a_damaged_key_space(cli: Cli, data: Path) -> None:
    for log in (data / "kv").glob("*.log"):
        raw = bytearray(log.read_bytes())
        if len(raw) > 100:
            raw[len(raw) // 2] ^= 0xFF
            log.write_bytes(raw)
    for table in (data / "kv").glob("*.sst"):
        raw = bytearray(table.read_bytes())
        raw[10] ^= 0xFF
        table.write_bytes(raw)
    assert findings(cli)


def test_a_backup_is_restored_byte_for_byte(cli: Cli, data: Path, tmp_path: Path) -> None:
    made = parsed(cli("backup", str(tmp_path / "backup"), "--json"))
    assert made["files"] > 5
    assert list(data.glob(".backup-*")) == []
    cli("backup", str(tmp_path / "backup"), code=5)
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    assert parsed(cli("doctor", str(tmp_path / "again"), "--deep", "--json"))["sound"]
    with fastness.open(f"dir:{tmp_path / 'again'}") as plane:
        assert plane.world("ada").head() == 103
        assert [each.height for each in plane.world("ada").read(0, limit=103)] == list(range(103))
        assert plane.queue("jobs").stats().leased == 1
        assert len(plane.activity.read(session="s").records) == 1
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"), code=5)
    cli("restore", str(tmp_path / "none"), str(tmp_path / "other"), code=4)
    assert not (tmp_path / "none").exists()


def test_a_backup_of_damaged_data_fails_and_resumes_after_the_repair(cli: Cli, data: Path, tmp_path: Path) -> None:
    body = large_blob(data).read_bytes()
    large_blob(data).write_bytes(body[:-1] + b"X")
    cli("backup", str(tmp_path / "backup"), code=exit_codes.DAMAGED)
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"), code=4)
    assert len(list(data.glob(".backup-*"))) == 1
    assert "was left by an incomplete backup" in cli("doctor", code=exit_codes.DAMAGED).stdout
    large_blob(data).write_bytes(body)
    cli("queue", "put", "later", "x")  # After the point in time of the backup.
    cli("backup", str(tmp_path / "backup"))
    assert list(data.glob(".backup-*")) == []
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    assert queues_of(cli("--url", f"dir:{tmp_path / 'again'}", "queue", "list", "--json")) == ["jobs"]
    assert parsed(cli("doctor", str(tmp_path / "again"), "--deep", "--json"))["sound"]


def test_a_backup_whose_checkpoint_is_missing_starts_over(cli: Cli, data: Path, tmp_path: Path) -> None:
    body = large_blob(data)
    content = body.read_bytes()
    body.unlink()
    cli("backup", str(tmp_path / "backup"), code=exit_codes.DAMAGED)
    body.write_bytes(content)
    [left] = data.glob(".backup-*")
    left.rename(f"{left}.making")  # As if the power had been lost before it was complete.
    cli("queue", "put", "later", "x")
    cli("backup", str(tmp_path / "backup"))
    assert list(data.glob(".backup-*")) == []
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    assert len(parsed(cli("--url", f"dir:{tmp_path / 'again'}", "queue", "list", "--json"))) == 2


def test_a_damaged_backup_is_not_restored(cli: Cli, data: Path, tmp_path: Path) -> None:
    cli("backup", str(tmp_path / "backup"))
    table = next((tmp_path / "backup" / "keyspace").glob("MANIFEST-*"))
    table.write_bytes(table.read_bytes() + b"X")
    assert (
        "damaged" in cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"), code=exit_codes.DAMAGED).stderr
    )
    table.unlink()
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"), code=exit_codes.DAMAGED)
    manifest = tmp_path / "backup" / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"), code=exit_codes.DAMAGED)
    assert not (tmp_path / "again").exists()


def test_an_interrupted_restore_resumes(cli: Cli, data: Path, tmp_path: Path) -> None:
    cli("backup", str(tmp_path / "backup"))
    part = tmp_path / "again.restoring" / "kv" / "CURRENT"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    assert not (tmp_path / "again.restoring").exists()
    assert parsed(cli("doctor", str(tmp_path / "again"), "--json"))["sound"]


@pytest.mark.parametrize(
    "words",
    [
        ("--url", "dir:~no-such-user/x", "doctor"),
        ("--url", "dir:~no-such-user/x", "backup", "b"),
        ("--url", "dir:~no-such-user/x", "world", "list"),
        ("restore", "~no-such-user/x", "there"),
        ("migrate", "dir:~no-such-user/x", "dir:there"),
        ("pipeline", "ingest", "--data", "dir:x", "--lake", "~no-such-user/x"),
    ],
    ids=" ".join,
)
def test_the_home_of_an_unknown_user_is_rejected(
    cli: Cli, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "~no-such-user/x cannot be expanded" in cli(*words, code=9).stderr
    assert list(tmp_path.iterdir()) == []


def test_the_target_of_a_backup_is_checked(cli: Cli, data: Path, tmp_path: Path) -> None:
    cli("backup", str(data / "inside"), code=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    cli("backup", str(tmp_path / "full"), code=5)
    unreachable = ("--url", "http://127.0.0.1:1", "--patience", "0.1")
    assert "does not answer" in cli(*unreachable, "backup", str(tmp_path / "b"), code=9).stderr
    assert "pg_dump" in cli("--url", "postgresql://x@y/z", "backup", str(tmp_path / "b"), code=9).stderr
    with fastness.open(f"dir:{data}"):
        cli("--patience", "0.1", "backup", str(tmp_path / "b"), code=9)


# Output.


def test_control_characters_in_payloads_are_escaped(cli: Cli) -> None:
    cli("queue", "put", "jobs", "\x1b[2Jgone \x07 \u202e [red]x[/red]")
    shown = cli("queue", "peek", "jobs").stdout
    assert "\x1b" not in shown
    assert "\\x1b[2Jgone" in shown
    assert "[red]x[/red]" in shown


class Terminal(io.StringIO):
    """An output that is a terminal."""

    def isatty(self) -> bool:
        return True


def shown_lines(
    monkeypatch: pytest.MonkeyPatch, output: io.StringIO, columns: int, work: Callable[[], None]
) -> list[str]:
    """The lines that `work` prints to an output of this width, without colours."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(printing, "wants_json", lambda: False)
    work()
    return click.unstyle(output.getvalue()).splitlines()


MESSAGE: Final = {
    "id": "0198f2a7-c3d9-7e5f-8a1b-2c3d4e5f6a7b",
    "group": "customers.of-the-north",
    "fence": 1_234_567,
    "created_at": "2026-11-16T14:00:00.000Z",
    "last_error": "the third party answered with an error\nthat goes on for a while",
}


@pytest.mark.parametrize("columns", [20, 60, 100])
def test_ids_names_and_fences_stay_in_one_piece_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    whole = [str(MESSAGE[name]) for name in ("id", "group", "fence")]
    table = shown_lines(monkeypatch, Terminal(), columns, lambda: printing.rows([MESSAGE], list(MESSAGE)))
    assert sum(all(text in line for text in whole) for line in table) == 1
    assert len(table) > 4  # The error is folded.
    record = shown_lines(monkeypatch, Terminal(), columns, lambda: printing.record(MESSAGE))
    assert all(any(text in line for line in record) for text in whole)
    assert max(map(len, record)) <= max(columns, len("fencing token  ") + len(whole[0]))


def test_a_table_fits_the_terminal_if_its_other_columns_can_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"id": "0198f2a7-c3d9", "created_at": MESSAGE["created_at"], "payload": "word " * 40} for _ in range(2)]
    lines = shown_lines(monkeypatch, Terminal(), 60, lambda: printing.rows(items, ["id", "created_at", "payload"]))
    assert max(map(len, lines)) <= 60
    assert " ".join("\n".join(line[38:] for line in lines).split()).count("word") == 80


def test_a_table_that_is_not_on_a_terminal_has_one_whole_line_for_each_item(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "x" * 6_000
    cli("queue", "put", "jobs", f"{body}\n{body}")
    monkeypatch.setenv("COLUMNS", "20")
    header, row = cli("queue", "peek", "jobs").stdout.splitlines()
    assert header.split()[0] == "id"
    assert row.endswith(f"{body}\\n{body}")


def test_values_without_a_json_type_are_converted() -> None:
    assert printing.jsonable({1: b"\x00\x01", "x": (None, {3})}) == {"1": "AAE=", "x": [None, [3]]}
    assert printing.timestamp(0) is None
    assert printing.timestamp(1_500) == "1970-01-01T00:00:01.500Z"


def test_the_module_runs_as_a_program() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fastness.cli", "--version"], check=True, capture_output=True, text=True
    )
    assert shown.stdout.startswith("fastness ")


@pytest.mark.parametrize(
    ("module", "code", "error"),
    [
        ("no_such_module", "", "There is no module no_such_module; run the command in its folder"),
        ("shop:app", "import no_such_module", "Module shop cannot be imported: ModuleNotFoundError"),
        ("shop:app", "1 / 0", "Module shop cannot be imported: ZeroDivisionError"),
        (
            "shop:other",
            "import fastness; app = fastness.TaskApp()",
            "other of module shop is not a TaskApp; it has app",
        ),
        ("shop:app", "app = 1", "app of module shop is not a TaskApp; leave it out"),
        ("shop", "import fastness; app = fastness.TaskApp()", "belong to an app; write shop:app"),
        ("shop", "", "The app has no tasks; import the modules that define them"),
    ],
)
def test_a_worker_says_why_a_module_has_no_tasks(
    *, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, code: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (tmp_path / "shop.py").write_text(code)
    cli("state", "set", "k", "1")
    assert error in cli("worker", module, code=2).stderr


@pytest.mark.parametrize(
    ("module", "code", "error"),
    [
        ("no_such_module", "", "There is no module no_such_module; run the command in its folder"),
        (
            "shop:other",
            "import fastness; app = fastness.HostApp()",
            "other of module shop is not a HostApp; it has app",
        ),
        ("shop:app", "app = 1", "app of module shop is not a HostApp; leave it out"),
        ("shop", "import fastness; app = fastness.HostApp()", "belong to an app; write shop:app"),
        ("shop:app", "import fastness; app = fastness.HostApp()", "The app has no programs, workflows or adapters"),
    ],
)
def test_a_host_says_why_a_module_has_nothing_to_run(
    *, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, code: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (tmp_path / "shop.py").write_text(code)
    cli("state", "set", "k", "1")
    assert error in cli("host", module, code=2).stderr
