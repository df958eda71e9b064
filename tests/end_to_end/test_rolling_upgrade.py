"""Nodes of two versions on one PostgreSQL: this one, and a next one whose data format is newer."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import fastness
from fastness.backends.postgres import PostgresDatabase
from fastness.backends.postgres.format_lock import raise_format
from fastness.client.transport import RemoteTransport
from fastness.errors import PlaneInUse, SchemaMismatch
from fastness.handles.sync.plane import Plane
from fastness.kv import formats
from tests.support.forked import start_python
from tests.support.waiting import eventually, exit_code

CHILD = Path(__file__).with_name("next_format_child.py")
OLD, NEW = formats.FORMAT, formats.FORMAT + 1


def next_version(*words: str, url: str, code: int = 0) -> str:
    """The output of a command of the next version."""
    command = [sys.executable, str(CHILD), "--url", url, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@contextmanager
def serving(data: str, folder: Path, *, is_next: bool) -> Iterator[Plane]:
    """A client of a server of this version or the next one."""
    words = ["serve", "--data", data, "--port", "0", "--activity", str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with (
        subprocess.Popen([sys.executable, str(CHILD), *words], env=environment, stdout=pipe, stderr=nothing, text=True)
        if is_next
        else start_python(["-m", "fastness.cli", *words], env=environment, stdout=pipe, stderr=nothing, text=True)
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().rpartition(" ")[2]
            assert url.startswith("http"), "the server did not start"
            with Plane(RemoteTransport(url)) as plane:
                yield plane
        finally:
            process.terminate()
            process.wait()


def put_and_ack(putting: Plane, receiving: Plane, body: object) -> None:
    """One plane puts, the other one receives and acknowledges."""
    putting.queue("jobs").put(body)
    message = receiving.queue("jobs").receive(wait_seconds=3_600)
    assert message is not None
    assert message.json() == body
    message.ack()


def test_servers_of_two_versions_serve_until_the_format_is_raised(postgres_url: str, tmp_path: Path) -> None:
    with fastness.open(postgres_url):
        pass  # This version creates the plane.
    with serving(postgres_url, tmp_path / "new", is_next=True) as new:
        with serving(postgres_url, tmp_path / "old", is_next=False) as old:
            put_and_ack(old, new, {"from": "old"})
            put_and_ack(new, old, {"from": "new"})
            eventually(lambda: len([node for node in old.nodes().nodes if node.kind == "server"]) == 2)
            found = {node.newest_format: node for node in new.nodes().nodes if node.kind == "server"}
            assert {*found} == {OLD, NEW}
            assert (new.nodes().data_format, new.status().data_format) == (OLD, OLD)
            assert f"1 of 2 nodes know format {NEW}" in next_version("node", "list", url=url_of(old))
            refused = next_version("upgrade", url=postgres_url, code=9)
            assert found[OLD].id in refused
            put_and_ack(new, old, {"after": "a refused upgrade"})
        assert f"All nodes know format {NEW}" in next_version("node", "list", url=url_of(new))
        assert f"data format {NEW}" in next_version("upgrade", url=postgres_url)
        assert f"data format {NEW}" in next_version("upgrade", url=postgres_url)  # Nothing is left to do.
        put_and_ack(new, new, {"in": "the new format"})
        assert new.status().data_format == NEW
        with pytest.raises(SchemaMismatch, match=f"has format {NEW}, and this version supports {OLD}; upgrade"):
            fastness.open(postgres_url)


def url_of(plane: Plane) -> str:
    """The URL of the server of a client."""
    return next(node.address for node in plane.nodes().nodes if node.kind == "server")


@pytest.mark.rotating
def test_a_node_writes_the_new_format_only_after_it_was_raised(postgres_url: str) -> None:
    with fastness.open(postgres_url):
        pass  # This version creates the plane.
    command = [sys.executable, str(CHILD), "notes", postgres_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def write(name: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert write("a") == f"{OLD}:a"
        next_version("upgrade", url=postgres_url)
        eventually(lambda: write("b") == f"{NEW}:b")
        process.stdin.close()
        assert exit_code(process) == 0


def wait_until_closed(url: str) -> None:
    """Wait until the server has ended the sessions of closed connections, which release their locks then."""
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(url, autocommit=True) as connection:
        eventually(lambda: connection.execute(others).fetchone() == (0,))


def test_a_process_without_a_record_blocks_the_new_format(postgres_url: str) -> None:
    with fastness.open(postgres_url):
        pass
    with PostgresDatabase(postgres_url) as unseen:
        assert unseen.read(formats.format_of) == OLD
        with pytest.raises(PlaneInUse, match=f"does not know format {NEW}"):
            raise_format(postgres_url, NEW)
        assert unseen.read(formats.format_of) == OLD
    wait_until_closed(postgres_url)
    raise_format(postgres_url, NEW)
    with pytest.raises(SchemaMismatch):
        PostgresDatabase(postgres_url)


def test_a_process_that_lost_its_connections_cannot_write_after_the_format_was_raised(postgres_url: str) -> None:
    with fastness.open(postgres_url) as plane:
        plane.queue("jobs").put({"n": 1})

        def is_raised() -> bool:
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            try:
                raise_format(postgres_url, NEW)
            except PlaneInUse:  # A thread of the plane has connected again.
                return False
            return True

        eventually(is_raised)
        with pytest.raises(SchemaMismatch, match="upgrade Fastness"):
            plane.queue("jobs").put({"n": 2})
        with pytest.raises(SchemaMismatch, match="upgrade Fastness"):
            plane.queue("jobs").stats()


def test_a_format_is_raised_in_steps(postgres_url: str) -> None:
    with fastness.open(postgres_url):
        pass
    wait_until_closed(postgres_url)
    with pytest.raises(SchemaMismatch, match=f"raised to {NEW + 1} from {NEW} only"):
        raise_format(postgres_url, NEW + 1)


@pytest.mark.rotating
def test_a_data_directory_is_copied_to_the_newer_format(tmp_path: Path) -> None:
    old, new = f"dir:{tmp_path / 'old'}", f"dir:{tmp_path / 'new'}"
    with fastness.open(old) as plane:
        plane.queue("jobs").put({"n": 1})
    assert "fastness migrate" in next_version("queue", "list", url=old, code=9)
    next_version("migrate", old, new, url=old)
    assert f"data format {NEW}" in next_version("status", url=new)
    assert '{"n":1}' in next_version("queue", "peek", "jobs", url=new)
    with pytest.raises(SchemaMismatch, match="upgrade Fastness"):
        fastness.open(new)


def test_an_upgrade_without_a_newer_format_changes_nothing(postgres_url: str, tmp_path: Path) -> None:
    for url in (postgres_url, f"dir:{tmp_path / 'data'}"):
        with fastness.open(url) as plane:
            assert plane.raise_format().data_format == OLD
