"""A process that uses a whole plane while the storage recorder records its file operations.

    storage_plane_child.py FOLDER MARKS

It writes messages and blobs that are objects, moves a world's records into segments, rotates session logs, makes a
backup of FOLDER/data in FOLDER/backup and restores that to FOLDER/restored. Each acknowledgement is a mark.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import cbor2
import msgspec
from click.testing import CliRunner

import fastness
from fastness.cli.main import root

LARGE_BYTES = 20_000  # Payloads over 16 KiB are objects.
RECORDS = 40


def message_body(number: int) -> dict[str, Any]:
    return {"number": number, "text": f"{number:04}" * ((LARGE_BYTES if number % 2 else 400) // 4)}


def blob_body(number: int) -> bytes:
    return b"%04d" % number * ((LARGE_BYTES + 1_000 * number) // 4)


def entry(number: int) -> dict[str, Any]:
    return {"number": number, "text": f"{number:04}" * 20}


def logged(number: int) -> dict[str, Any]:
    return {"number": number, "text": f"{number:04}" * (number % 200)}


class Refused(Exception):
    """A command ended with an error of Fastness."""


def run_command(*words: str) -> None:
    """Run a command of the CLI; raises Refused for its typed errors."""
    result = CliRunner().invoke(root, words)
    if result.exit_code:
        assert isinstance(result.exception, SystemExit), f"{words}: {result.exception!r}"
        raise Refused(result.output)


class Writer:
    """Uses a plane, and marks what was acknowledged."""

    def __init__(self, plane: fastness.Plane, marks: int) -> None:
        self._plane = plane
        self._marks = marks

    def mark(self, what: str, number: int = 0) -> None:
        os.write(self._marks, f"{what} {number}".encode())

    def put(self, number: int) -> None:
        self._plane.queue("jobs").put(message_body(number))
        self.mark("message", number)
        if number % 3 == 2:
            self._plane.blobs.put(blob_body(number))
            self.mark("blob", number)

    def ack(self) -> None:
        [message] = self._plane.queue("jobs").receive_many(1)
        number = msgspec.json.decode(message.read())["number"]
        self.mark("acking", number)
        message.ack()
        self.mark("acked", number)

    def append(self, first: int) -> None:
        world = self._plane.world("ada")
        world.append([entry(each) for each in range(first, first + RECORDS)], expected_head=world.head())
        self.mark("journal", first + RECORDS)

    def compact(self) -> None:
        world = self._plane.world("ada")
        height, manifest_hash = world.head(), world.snapshots.baseline().manifest_hash
        world.snapshots.commit(
            {"height": height}, height=height, promote=True, receipt_horizon_height=height, manifest_hash=manifest_hash
        )
        assert world.compact(entries=16, margin=10).segments > 0
        self.mark("compacted", height)

    def log(self, first: int) -> None:
        for number in range(first, first + 30):
            self._plane.activity.log("session", logged(number))
            if number % 5 == 4:
                self._plane.activity.read(limit=1)  # It writes the records from memory to the file.
        self._plane.activity.end("session")
        self.mark("logged", first + 30)


def write(folder: Path, marks: int) -> None:
    url = f"dir:{folder / 'data'}"
    with fastness.open(url, gc_every_seconds=None) as plane:
        writer = Writer(plane, marks)
        plane.world("ada").create()
        writer.mark("opened")
        for number in range(4):
            writer.put(number)
        writer.append(0)
        writer.log(0)
        writer.compact()
    with fastness.open(url, gc_every_seconds=None) as plane:
        writer = Writer(plane, marks)
        writer.ack()
        for number in range(4, 7):
            writer.put(number)
        writer.append(RECORDS)
        writer.log(30)
        writer.ack()
    writer.mark("closed")
    run_command("--url", url, "backup", str(folder / "backup"))
    writer.mark("backup")
    run_command("restore", str(folder / "backup"), str(folder / "restored"))
    writer.mark("restored")


def acknowledged(marks: tuple[bytes, ...]) -> dict[str, list[int]]:
    """The numbers of the marks of each kind."""
    found: dict[str, list[int]] = {}
    for mark in marks:
        what, number = mark.decode().split()
        found.setdefault(what, []).append(int(number))
    return found


def check_plane(folder: Path, marks: tuple[bytes, ...]) -> None:
    """Assert that a plane has everything that was acknowledged, and nothing that is damaged."""
    known = acknowledged(marks)
    if "opened" not in known and not (folder / "fastness.json").exists():
        fastness.open(f"dir:{folder}", gc_every_seconds=None).close()
        return
    with fastness.open(f"dir:{folder}", gc_every_seconds=None) as plane:
        _check_messages(plane, known)
        for number in known.get("blob", []):
            body = blob_body(number)
            assert plane.blobs.get(hashlib.sha256(body).hexdigest()) == body, f"blob {number}"
        if "opened" in known:
            _check_journal(plane, max(known.get("journal", [0])))
        _check_log(plane)
        plane.queue("jobs").put(message_body(1))


def check_backup(folder: Path, marks: tuple[bytes, ...], *, resume: bool) -> str:
    """Restore the backup of an image. Asserts that it is complete, or refused; returns which.

    With `resume`, a refused backup and restore are then completed.
    """
    known = acknowledged(marks)
    data, backup, restored = (folder / name for name in ("data", "backup", "restored"))
    if "restored" in known:
        assert restored.exists(), "the restored directory is missing"
    if restored.exists():
        check_plane(restored, marks)
        outcome = "restored"
    else:
        outcome = "complete"
        try:
            run_command("restore", str(backup), str(restored))
        except Refused:
            if "backup" in known:
                raise
            outcome = "refused"
            if not resume:
                return outcome
            run_command("--url", f"dir:{data}", "backup", str(backup))
            run_command("restore", str(backup), str(restored))
        check_plane(restored, marks)
    return outcome


def _check_messages(plane: fastness.Plane, known: dict[str, list[int]]) -> None:
    queue = plane.queue("jobs")
    leased = len(queue.leased())  # By the process that lost its power.
    bodies = [msgspec.json.decode(message.read()) for message in queue.receive_many(100)]
    numbers = [body["number"] for body in bodies]
    assert bodies == [message_body(number) for number in numbers], "a message is damaged"
    assert numbers == sorted(set(numbers)), "messages are out of order, or twice"
    assert not {*numbers} & {*known.get("acked", [])}, "an acknowledged message is back"
    missing = {*known.get("message", [])} - {*known.get("acking", [])} - {*numbers}
    assert len(missing) <= leased, f"messages {missing} are missing"


def _check_journal(plane: fastness.Plane, count: int) -> None:
    world = plane.world("ada")
    checked = world.check()
    assert checked.fault is None, checked.fault
    records = world.read(0, limit=1_000)
    assert [record.height for record in records] == list(range(len(records))), "the journal has a gap"
    values = [cbor2.loads(record.value) for record in records if record.kind == "entry"]
    assert values == [entry(number) for number in range(len(values))], "a record of the journal is damaged"
    assert len(values) >= count, f"the journal has {len(values)} entries of {count}"


def _check_log(plane: fastness.Plane) -> None:
    numbers = []
    for record in plane.activity.read(session="session").records:
        value = msgspec.json.decode(record.record)
        assert value == logged(value["number"]), "a record of a session log is damaged"
        numbers.append(value["number"])
    assert numbers == sorted(set(numbers)), "records of a session log are out of order, or twice"


if __name__ == "__main__":
    write(Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT, 0o600))
