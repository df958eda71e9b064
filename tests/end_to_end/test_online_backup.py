"""Backups and checks of a running server over the network, while clients write to it."""

import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fastness
from fastness.cli import exit_codes
from fastness.cli.main import root
from fastness.errors import NotAllowed
from tests.support.forked import start_python
from tests.support.proxy import Proxy
from tests.support.server_process import Server
from tests.support.waiting import eventually

LARGE = b"large" * 10_000
Cli = Callable[..., Result]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.kill()


@pytest.fixture
def cli(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs CLI commands against the server."""
    for name in list(os.environ):
        if name.startswith("FASTNESS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FASTNESS_URL", server.url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(root, words)
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    return run


def fill(server: Server) -> None:
    """Write data of every kind."""
    with server.plane() as plane:
        world = plane.world("ada")
        world.create()
        world.append(list(range(100)), expected_head=0)
        whole: dict[str, Any] = {
            "receipt_horizon_height": 100,
            "manifest_hash": world.snapshots.baseline().manifest_hash,
        }
        world.snapshots.commit({"n": 1}, height=100, promote=True, **whole)
        assert world.compact(entries=16, margin=10).segments == 5
        plane.blobs.put(LARGE)
        plane.queue("jobs").put_many(range(5))
        plane.activity.log("s", {"a": 1})
        plane.state("k").update({"n": 1})


def checkpoints(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "data").glob(".checkpoint-*"))


def test_server_is_backed_up_while_clients_write(server: Server, cli: Cli, tmp_path: Path) -> None:
    fill(server)
    stop, acknowledged = threading.Event(), [0]

    def write() -> None:
        with server.plane() as plane:
            while not stop.is_set():
                number = acknowledged[0]
                blob = plane.blobs.put(b"%d " % number * 20_000)
                plane.atomic().put(plane.queue("numbers"), number).update(plane.state("last"), blob).commit()
                acknowledged[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        eventually(lambda: acknowledged[0] >= 20)
        before = acknowledged[0]
        made = json.loads(cli("backup", str(tmp_path / "backup"), "--json").stdout)
        after = acknowledged[0]
    finally:
        stop.set()
        writer.join()
    assert made["version"] == fastness.__version__
    assert checkpoints(tmp_path) == []
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    assert json.loads(cli("doctor", str(tmp_path / "again"), "--deep", "--json").stdout)["sound"]
    with fastness.open(f"dir:{tmp_path / 'again'}") as plane:
        numbers = [int(each.payload or b"") for each in plane.queue("numbers").peek(10_000)]
        assert numbers == list(range(len(numbers)))
        assert before <= len(numbers) <= after + 1
        blob = plane.state("last").get().value
        assert blob == hashlib.sha256(b"%d " % numbers[-1] * 20_000).hexdigest()  # Both are written in one commit.
        assert plane.blobs.get(blob) == b"%d " % numbers[-1] * 20_000
        assert plane.world("ada").read(0, limit=200)[-1].height == plane.world("ada").head() - 1
        assert plane.blobs.get(hashlib.sha256(LARGE).hexdigest()) == LARGE
        assert plane.queue("jobs").stats().ready == 5
        assert [json.loads(each.record)["a"] for each in plane.activity.read(session="s").records] == [1]


def test_backup_resumes_after_lost_connections(server: Server, cli: Cli, tmp_path: Path) -> None:
    with server.plane() as plane:
        body = os.urandom(9_000_000)
        hash = plane.blobs.put(body)
    with Proxy(server.address[1], seed=1) as proxy:
        proxy.bytes_max = 4_000_000
        cli("--url", proxy.url, "backup", str(tmp_path / "backup"))
        assert proxy.cuts
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    with fastness.open(f"dir:{tmp_path / 'again'}") as plane:
        assert plane.blobs.get(hash) == body


def test_interrupted_backup_resumes_with_its_checkpoint(server: Server, cli: Cli, tmp_path: Path) -> None:
    fill(server)
    body = next((tmp_path / "data" / "objects" / "cas").rglob(f"{hashlib.sha256(LARGE).hexdigest()}*"))
    body.write_bytes(LARGE[::-1])
    assert "is damaged" in cli("backup", str(tmp_path / "backup"), code=exit_codes.DAMAGED).stderr
    assert len(checkpoints(tmp_path)) == 1
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"), code=4)
    body.write_bytes(LARGE)
    cli("queue", "put", "later", "x")  # After the checkpoint.
    cli("backup", str(tmp_path / "backup"))
    assert checkpoints(tmp_path) == []
    cli("backup", str(tmp_path / "backup"), code=5)
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    with fastness.open(f"dir:{tmp_path / 'again'}") as plane:
        assert plane.queues() == ["jobs"]


def test_backup_restarts_if_its_checkpoint_was_removed(server: Server, cli: Cli, tmp_path: Path) -> None:
    fill(server)
    body = next((tmp_path / "data" / "objects" / "cas").rglob(f"{hashlib.sha256(LARGE).hexdigest()}*"))
    body.write_bytes(LARGE[::-1])
    cli("backup", str(tmp_path / "backup"), code=exit_codes.DAMAGED)
    body.write_bytes(LARGE)
    with server.plane() as plane:
        assert plane.backups.end(checkpoints(tmp_path)[0].name.removeprefix(".checkpoint-"))
    cli("queue", "put", "later", "x")
    cli("backup", str(tmp_path / "backup"))
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    with fastness.open(f"dir:{tmp_path / 'again'}") as plane:
        assert plane.queues() == ["jobs", "later"]


def test_backup_fails_if_an_object_is_missing(server: Server, cli: Cli, tmp_path: Path) -> None:
    fill(server)
    next((tmp_path / "data" / "objects" / "cas").rglob(f"{hashlib.sha256(LARGE).hexdigest()}*")).unlink()
    assert "the backup is incomplete" in cli("backup", str(tmp_path / "backup"), code=exit_codes.DAMAGED).stderr
    assert checkpoints(tmp_path) == []
    assert not (tmp_path / "backup" / "backup.json").exists()


def test_backup_continues_if_a_world_is_deleted_meanwhile(
    server: Server, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(server)
    from fastness.cli import server_backup

    copy_files = server_backup._copy_files

    def delete_world_first(plane: Any, *rest: Any) -> Any:
        monkeypatch.setattr(server_backup, "_copy_files", copy_files)
        plane.world("ada").archive()
        plane.world("ada").delete()
        return copy_files(plane, *rest)

    monkeypatch.setattr(server_backup, "_copy_files", delete_world_first)
    cli("backup", str(tmp_path / "backup"))
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
    assert json.loads(cli("doctor", str(tmp_path / "again"), "--deep", "--json").stdout)["sound"]


def test_checkpoint_survives_the_crash_of_its_server(server: Server, cli: Cli, tmp_path: Path) -> None:
    fill(server)
    with server.plane() as plane:
        checkpoint = plane.backups.begin()
        files = [file.path for file in plane.backups.files(checkpoint.id) if "activity" not in file.path]
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    again = Server(tmp_path)
    try:
        with again.plane() as plane:
            found = [file.path for file in plane.backups.files(checkpoint.id) if "activity" not in file.path]
            assert found == files
    finally:
        again.kill()


def test_backup_target_is_checked(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    cli("backup", str(tmp_path / "full"), code=5)
    (tmp_path / "started").mkdir()
    started = {"source": "http://other:1", "checkpoint": "{}", "at": "", "at_ms": 1}
    (tmp_path / "started" / "started.json").write_text(json.dumps(started))
    assert "http://other:1" in cli("backup", str(tmp_path / "started"), code=5).stderr
    assert checkpoints(tmp_path) == []


def test_backups_need_a_token_for_every_universe(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        make = plane.tokens.create
        saver = make("saver", universes="*", verbs="backup:*").token
        doctor = make("doctor", universes="*", verbs="doctor:run").token
        tenant = make("tenant", universes="main", verbs="*").token
    server = Server(tmp_path, tokens=True)
    refused: Callable[[], object]
    try:
        with server.plane(saver) as plane:
            checkpoint = plane.backups.begin()
            assert list(plane.backups.files(checkpoint.id))
            with pytest.raises(NotAllowed, match="doctor:run"):
                plane.backups.examine()
        with server.plane(doctor) as plane:
            assert list(plane.backups.examine())
            for refused in (plane.backups.begin, lambda: plane.backups.files(checkpoint.id)):
                with pytest.raises(NotAllowed):
                    refused()
        with server.plane(tenant) as plane:
            for refused in (
                plane.backups.begin,
                plane.backups.examine,
                lambda: plane.backups.files(checkpoint.id),
                lambda: plane.backups.open(checkpoint.id, "keyspace/CURRENT"),
                lambda: plane.backups.end(checkpoint.id),
            ):
                with pytest.raises(NotAllowed, match="is not for every universe"):
                    refused()
    finally:
        server.kill()


def test_doctor_runs_the_checks_of_the_server(server: Server, cli: Cli, tmp_path: Path) -> None:
    fill(server)
    report = json.loads(cli("doctor", "--deep", "--json").stdout)
    assert report["sound"]
    assert report["path"] == server.url
    assert report["looked_at"]["messages"] == 5
    assert report["looked_at"]["worlds"] == 1
    assert f"{server.url} is sound" in cli("doctor").stdout
    body = next((tmp_path / "data" / "objects" / "cas").rglob(f"{hashlib.sha256(LARGE).hexdigest()}*"))
    body.write_bytes(LARGE[::-1])
    report = json.loads(cli("doctor", "--json", code=exit_codes.DAMAGED).stdout)
    assert [each["what"] for each in report["findings"]] == ["its content does not match its hash"]
    output = cli("doctor", code=exit_codes.DAMAGED).stdout
    assert "✗ blobs" in output
    assert "✓ messages: 5 checked" in output
    assert checkpoints(tmp_path) == []


def test_backup_and_doctor_refuse_a_server_without_a_directory(tmp_path: Path) -> None:
    server = Server(tmp_path, data="memory:")
    try:
        for words in (["backup", str(tmp_path / "b")], ["doctor"]):
            result = CliRunner().invoke(root, ["--url", server.url, *words])
            assert result.exit_code == 9, result.output
            assert "pg_dump" in result.stderr
    finally:
        server.kill()


def test_interrupted_backup_command_can_be_repeated(server: Server, cli: Cli, tmp_path: Path) -> None:
    with server.plane() as plane:
        plane.blobs.write(os.urandom(1_000_000) for _ in range(60))
    words: list[str | Path] = ["-m", "fastness.cli", "--url", server.url, "backup", tmp_path / "backup"]
    backup = start_python(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: (tmp_path / "backup" / "started.json").exists() or backup.poll() is not None)
    backup.send_signal(signal.SIGINT)
    backup.wait()
    if backup.returncode != 0:  # It may have finished before the signal.
        assert len(checkpoints(tmp_path)) == 1
        cli("backup", str(tmp_path / "backup"))
    assert checkpoints(tmp_path) == []
    cli("restore", str(tmp_path / "backup"), str(tmp_path / "again"))
