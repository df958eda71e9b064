"""Closed session log files move into the object store once, completely, and are listed there."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import InvalidArgument, Unreachable
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import retention, rotation
from fastness.runtime.activity.format import Header
from fastness.runtime.activity.log import ActivityLog
from fastness.runtime.activity.rotation import Manifest, Rotation
from fastness.runtime.activity.writer import Appender
from fastness.runtime.maintenance import health_checks
from fastness.testing.faults import ChosenFault, faulty_objects
from fastness.wire.health_checks import Finding

OPENED_MS = 1_794_717_735_123


@pytest.fixture(params=["memory", "dir"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_objects("memory:" if request.param == "memory" else f"dir:{tmp_path / 'objects'}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "activity"


def closed_file(
    folder: Path, records: int, *, session: str = "abc123", at_ms: int = OPENED_MS, tail: bytes = b"", writer: str = "w"
) -> Path:
    """A file that a dead writer left."""
    file = Appender(folder / "main", Header("main", session, "metrics", at_ms, writer))
    file.append([log_format.line(n, at_ms + n, b'{"number":%d}' % n) for n in range(records)])
    file.close()
    with file.path.open("ab") as end:
        end.write(tail)
    return file.path


def interrupt_rotation(path: Path, objects: ObjectStore, stored: float) -> None:
    """Store this part of the body of a local file, and no manifest entry."""
    kept = rotation.copy(path, objects)
    assert kept is not None
    objects.put(kept.path, objects.get(kept.path)[: round(stored * kept.bytes)])
    objects.delete(f"activity-manifest/main/{path.stem}_{kept.sha256[:16]}.json")


def manifests(objects: ObjectStore) -> list[Manifest]:
    listed = objects.list("activity-manifest/main")
    return [msgspec.json.decode(objects.get(meta.path), type=Manifest) for meta in listed]


def everything(objects: ObjectStore) -> dict[str, bytes]:
    return {meta.path: objects.get(meta.path) for meta in objects.list()}


def ids(folder: Path, objects: ObjectStore | None) -> list[tuple[str, bool]]:
    return [(file.id, file.is_rotated) for file in rotation.files_in_order(folder, objects, "main")]


def test_a_file_is_stored_under_its_hash_listed_in_the_manifest_and_removed(folder: Path, objects: ObjectStore) -> None:
    path = closed_file(folder, 3)
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()
    assert rotation.rotate(path, objects)
    assert not path.exists()
    stored = f"activity/main/2026-11-15/abc123_metrics_{digest}.jsonl"
    entry = f"activity-manifest/main/2026-11-15_04-42-15_abc123_metrics_{digest[:16]}.json"
    assert sorted(everything(objects)) == [entry, stored]
    assert objects.get(stored) == body
    assert manifests(objects) == [
        Manifest(
            path=stored,
            sha256=digest,
            bytes=len(body),
            records=3,
            universe="main",
            session="abc123",
            kind="metrics",
            writer="w",
            opened_ms=OPENED_MS,
            closed_ms=OPENED_MS + 2,
            first_at_ms=OPENED_MS,
            last_at_ms=OPENED_MS + 2,
        )
    ]


def test_a_truncated_end_is_cut_off_before_storing(folder: Path, objects: ObjectStore) -> None:
    """A truncated last line does not hide the other lines."""
    path = closed_file(folder, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n":3,"at_ms":17')
    rotation.rotate(path, objects)
    assert [objects.get(each.path) for each in manifests(objects)] == [whole]


def test_a_bad_line_in_the_middle_is_stored_unchanged(folder: Path, objects: ObjectStore) -> None:
    path = closed_file(folder, 2, tail=b"bad\n" + log_format.line(2, OPENED_MS, b"{}"))
    damaged = path.read_bytes()
    rotation.rotate(path, objects)
    assert [(objects.get(each.path), each.records) for each in manifests(objects)] == [(damaged, 3)]


def test_a_file_of_damaged_lines_is_kept(folder: Path, objects: ObjectStore) -> None:
    """Its lines may be the only trace of what was logged."""
    path = closed_file(folder, 0, tail=b"bad\n")
    damaged = path.read_bytes()
    assert rotation.rotate(path, objects)
    assert [(objects.get(each.path), each.records) for each in manifests(objects)] == [(damaged, 0)]


@pytest.mark.parametrize("tail", [b"", b'{"n":0,"at_m', bytes(4_096)])
def test_a_file_without_records_is_only_removed(folder: Path, objects: ObjectStore, tail: bytes) -> None:
    path = closed_file(folder, 0, tail=tail)
    assert not rotation.rotate(path, objects)
    assert not path.exists()
    assert everything(objects) == {}


def test_rotating_the_same_bytes_again_changes_nothing(folder: Path, objects: ObjectStore) -> None:
    path = closed_file(folder, 3)
    body = path.read_bytes()
    rotation.rotate(path, objects)
    before = everything(objects)
    path.write_bytes(body)
    rotation.rotate(path, objects)
    assert not path.exists()
    assert everything(objects) == before


def test_a_file_with_an_open_writer_is_not_rotated(folder: Path, objects: ObjectStore) -> None:
    """A locked file is not rotated."""
    file = Appender(folder / "main", Header("main", "abc123", "metrics", OPENED_MS, "w"))
    file.append([log_format.line(0, OPENED_MS, b"{}")])
    assert not rotation.rotate(file.path, objects)
    assert file.path.exists()
    assert everything(objects) == {}
    file.close()
    assert rotation.rotate(file.path, objects)


def test_missing_files_and_other_files_are_skipped(folder: Path, objects: ObjectStore) -> None:
    assert not rotation.rotate(folder / "main" / "2026-11-15_04-42-15_abc123_metrics.jsonl", objects)
    events = folder / "notes.jsonl"
    folder.mkdir()
    events.write_text("mine")
    assert not rotation.rotate(events, objects)
    assert events.read_text() == "mine"


def test_a_lock_is_valid_only_if_the_path_still_refers_to_the_file(tmp_path: Path) -> None:
    """Another process may remove a file between open and lock; records written to it would be lost."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb") as old:
        path.unlink()
        assert not rotation.lock(old.fileno(), path)
        path.write_bytes(b"new")
        assert not rotation.lock(old.fileno(), path)
    with path.open("rb") as new, path.open("rb") as late:
        assert rotation.lock(new.fileno(), path)
        assert not rotation.lock(late.fileno(), path)


def test_a_new_file_removed_as_a_leftover_is_created_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan for leftovers runs between the creation of a file and its lock."""
    real, removed = fcntl.flock, list[Path]()

    def remove_then_lock(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend((folder / "main").iterdir())
            removed[0].unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    path = closed_file(folder, 2)
    assert len(removed) == 1
    assert path.read_bytes().count(b"\n") == 3


def test_files_of_the_same_second_have_different_names(folder: Path) -> None:
    names = [closed_file(folder, 1).name for _ in range(3)]
    assert names == [
        "2026-11-15_04-42-15_abc123_metrics.jsonl",
        "2026-11-15_04-42-15-2_abc123_metrics.jsonl",
        "2026-11-15_04-42-15-3_abc123_metrics.jsonl",
    ]


def test_the_first_run_rotates_files_of_dead_processes(folder: Path, objects: ObjectStore) -> None:
    for number in range(3):
        closed_file(folder, 2, session=f"s{number}")
    (folder / "main" / "notes.jsonl").write_text("mine")
    mover = Rotation(folder, objects)
    mover.run()
    assert mover.rotated == 3
    assert {each.session for each in manifests(objects)} == {"s0", "s1", "s2"}
    assert [path.name for path in (folder / "main").iterdir()] == ["notes.jsonl"]


def test_without_an_object_store_files_stay(folder: Path) -> None:
    path = closed_file(folder, 2)
    mover = Rotation(folder, None)
    mover.add(path)
    mover.run()
    assert path.exists()
    assert not mover.is_waiting


def test_a_failing_store_keeps_the_files_and_logs_one_warning(
    folder: Path, objects: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [closed_file(folder, 2, session=f"s{number}") for number in range(3)]
    faults = ChosenFault(0, lambda: Unreachable("down"))
    mover = Rotation(folder, faulty_objects(objects, faults))
    with caplog.at_level(logging.INFO, "fastness.activity"):
        mover.run()
        assert all(path.exists() for path in paths)
        assert faults.points == ["create: begin"]  # The other files are not tried.
        assert len(caplog.messages) == 1
        assert "down" in caplog.messages[0]
        mover.run()
        mover.run()
    assert mover.rotated == 3
    assert len(manifests(objects)) == 3
    assert mover.failures.count == 1
    assert ["works again" in message for message in caplog.messages] == [False, True]


def test_a_failing_file_does_not_block_the_others(folder: Path, objects: ObjectStore) -> None:
    for number in range(3):
        closed_file(folder, 2, session=f"s{number}")
    mover = Rotation(folder, faulty_objects(objects, ChosenFault(0, lambda: InvalidArgument("this one"))))
    mover.run()
    assert (mover.rotated, mover.is_waiting) == (2, True)
    mover.run()
    assert (mover.rotated, mover.is_waiting) == (3, False)


def test_files_are_listed_in_the_order_in_which_they_were_opened(folder: Path, objects: ObjectStore) -> None:
    """Local or rotated. Files of the same second are ordered by their writer ids, because `-10` sorts before `-2`."""
    paths = [closed_file(folder, 1, writer=f"{number:02}") for number in range(12)]
    later = closed_file(folder, 1, at_ms=OPENED_MS + 1_000, writer="00")
    for path in (later, *paths[::2]):
        rotation.rotate(path, objects)
    wanted = [(f"2026-11-15_04-42-15_{number:02}", number % 2 == 0) for number in range(12)]
    assert ids(folder, objects) == [*wanted, ("2026-11-15_04-42-16_00", True)]


def test_a_file_that_is_both_local_and_rotated_is_listed_once(folder: Path, objects: ObjectStore) -> None:
    """This happens after a crash between the manifest entry and the removal."""
    path = closed_file(folder, 3)
    body = path.read_bytes()
    rotation.rotate(path, objects)
    path.write_bytes(body)
    assert ids(folder, objects) == [("2026-11-15_04-42-15_w", True)]


def test_a_file_without_a_header_keeps_its_id_when_rotated(folder: Path, objects: ObjectStore) -> None:
    path = closed_file(folder, 3)
    path.write_bytes(b"\xff" + path.read_bytes())
    before = list(rotation.files_in_order(folder, objects, "main"))
    rotation.rotate(path, objects)
    after = list(rotation.files_in_order(folder, objects, "main"))
    assert [file.id for file in before] == [file.id for file in after]
    assert [(file.session, file.kind) for file in after] == [("abc123", "metrics")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry[:20],
        lambda _: b"",
        lambda _: b"[" * 100_000,
        lambda entry: entry.replace(b"activity/main", b"activity/other"),
        lambda entry: entry.replace(b'"sha256":"', b'"sha256":"0'),
        lambda entry: entry.replace(b'"metrics"', b'"metricz"'),
    ],
)
def test_a_damaged_manifest_entry_hides_no_records(
    folder: Path, objects: ObjectStore, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    for second in range(3):
        rotation.rotate(closed_file(folder, 1, at_ms=OPENED_MS + second * 1_000), objects)
    before = list(rotation.files_in_order(folder, objects, "main"))
    entry = objects.list("activity-manifest/main")[1].path
    assert damage(objects.get(entry)) != objects.get(entry)
    objects.put(entry, damage(objects.get(entry)))
    assert list(rotation.files_in_order(folder, objects, "main")) == before
    assert entry in caplog.text
    assert "read all the same" in caplog.text
    objects.delete(before[1].path)
    assert list(rotation.files_in_order(folder, objects, "main")) == [before[0], before[2]]
    assert "cannot be found" in caplog.text


@pytest.mark.parametrize("removed", [range(6), [4], [0, 5]], ids=["all", "one", "the first and the last"])
def test_removed_manifest_entries_hide_no_records(
    folder: Path, objects: ObjectStore, caplog: pytest.LogCaptureFixture, removed: Iterable[int]
) -> None:
    """Files of several days, and several of one second."""
    day_ms = 86_400_000
    for number, at_ms in enumerate((0, 0, 1_000, day_ms, day_ms + 1_000, 3 * day_ms)):
        session = "ada" if number % 2 else "bob"
        rotation.rotate(closed_file(folder, 2, session=session, at_ms=OPENED_MS + at_ms, writer=str(number)), objects)
    before = list(rotation.files_in_order(folder, objects, "main"))
    entries, log = rotation.manifest_entries(objects, "main"), ActivityLog(folder, objects, start_flusher=False)
    records = log.read("main")
    assert (len(before), len(entries), len(records)) == (6, 6, 12)
    for number in removed:
        objects.delete(entries[number])

    assert list(rotation.files_in_order(folder, objects, "main")) == before
    for session in ("ada", "bob"):
        found = list(rotation.files_in_order(folder, objects, "main", session=session, kind="metrics"))
        assert [file for file in found if file.session == session] == [
            each for each in before if each.session == session
        ]
    late = list(rotation.files_in_order(folder, objects, "main", second=before[2].second))
    assert late == before[2:]
    assert rotation.manifest_entries(objects, "main") == list(rotation.entries_since(objects, "main")) == entries
    assert [path for path in entries if path > f"activity-manifest/main/{before[3].second[:10]}"] == list(
        rotation.entries_since(objects, "main", before[3].second[:10])
    )
    assert log.read("main") == records
    assert log.read("main", after=records[6].position) == records[7:]
    assert "read all the same" in caplog.text
    log.close()


@pytest.mark.parametrize("header", [b"", b"\xff"], ids=["valid header", "damaged header"])
@pytest.mark.parametrize("stored", [1.0, 0.7, 0.1, 0.0])
def test_the_local_file_is_listed_instead_of_its_body_without_an_entry(
    folder: Path, objects: ObjectStore, header: bytes, stored: float
) -> None:
    """As after a crash while the body was stored, or just after. The same second had an earlier file."""
    closed_file(folder, 1, writer="a")
    path = closed_file(folder, 3)
    path.write_bytes(header + path.read_bytes())
    before = list(rotation.files_in_order(folder, objects, "main"))
    interrupt_rotation(path, objects, stored)
    assert list(rotation.files_in_order(folder, objects, "main")) == before
    assert list(rotation.files_in_order(folder, objects, "main", second=before[1].second, session="abc123")) == before
    log = ActivityLog(folder, objects, start_flusher=False)
    assert sorted(each.position.n for each in log.read("main")) == [0, 0, 1, 2]
    log.close()


def test_other_local_files_of_a_day_do_not_hide_a_body_without_an_entry(folder: Path, objects: ObjectStore) -> None:
    path = closed_file(folder, 3)
    interrupt_rotation(path, objects, 1.0)
    path.unlink()
    closed_file(folder, 2, at_ms=OPENED_MS + 1_000)
    assert ids(folder, objects) == [("2026-11-15_04-42-15_w", True), ("2026-11-15_04-42-16_w", False)]


def test_doctor_accepts_a_body_without_an_entry_while_its_local_file_exists(folder: Path, objects: ObjectStore) -> None:
    path = closed_file(folder, 3)
    interrupt_rotation(path, objects, 1.0)
    assert not [
        each for each in health_checks.all_session_logs(objects, folder, deep=True) if isinstance(each, Finding)
    ]
    path.unlink()
    (finding,) = (
        each for each in health_checks.all_session_logs(objects, folder, deep=True) if isinstance(each, Finding)
    )
    assert "has no manifest entry" in finding.what


def test_a_body_without_an_entry_is_kept_whatever_its_age(folder: Path, objects: ObjectStore) -> None:
    for second in range(3):
        rotation.rotate(closed_file(folder, 1, at_ms=OPENED_MS + second * 1_000), objects)
    _, kept, _ = (file.path for file in rotation.files_in_order(folder, objects, "main"))
    objects.delete(objects.list("activity-manifest/main")[1].path)
    trimmed = retention.trim(objects, "main", now_ms=OPENED_MS + 9_000, keep_seconds=1, bytes_max=None)
    assert trimmed[0] == 2
    assert list(everything(objects)) == [kept]
    assert retention.universes(objects) == {"main"}


def test_a_rotated_file_is_compared_with_the_hash_in_its_name(
    folder: Path, objects: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(2):
        rotation.rotate(closed_file(folder, 3, at_ms=OPENED_MS + second * 1_000), objects)
    _, damaged = (file.path for file in rotation.files_in_order(folder, objects, "main"))
    body = bytearray(objects.get(damaged))
    body[-20] ^= 1
    objects.put(damaged, bytes(body))
    log = ActivityLog(folder, objects, start_flusher=False)
    for _ in range(2):
        assert len(log.read("main")) in (5, 6)  # The changed line may still be valid JSON.
    assert log.stats().damaged == 1
    assert [record.levelname for record in caplog.records if damaged in record.getMessage()] == ["ERROR"]
    log.close()


def test_manifests_are_listed_in_pages_from_the_start_position(
    folder: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second in range(7):
        rotation.rotate(closed_file(folder, 1, at_ms=OPENED_MS + second * 1_000), objects)
    real = objects.list
    monkeypatch.setattr(objects, "list", lambda *args, **options: real(*args, **options, limit=2))
    assert len(ids(folder, objects)) == 7
    rest = rotation.files_in_order(folder, objects, "main", second="2026-11-15_04-42-19")
    assert [file.second[-2:] for file in rest] == ["19", "20", "21"]


def test_manifest_entries_that_cannot_match_are_not_loaded(folder: Path, objects: ObjectStore) -> None:
    for session in ("ada", "bob", "cy"):
        rotation.rotate(closed_file(folder, 1, session=session), objects)
    counting = ChosenFault()
    found = rotation.files_in_order(folder, faulty_objects(objects, counting), "main", session="bob", kind="metrics")
    assert [file.session for file in found] == ["bob"]
    assert counting.points.count("get: begin") == 1


def test_a_folder_that_cannot_be_listed_is_scanned_again(
    folder: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_file(folder, 1)
    moving = Rotation(folder, objects)

    def fail(*_: object) -> list[Path]:
        raise OSError("Input/output error")

    monkeypatch.setattr(Path, "glob", fail)
    moving.run()
    assert (moving.rotated, moving.failures.count, moving.is_waiting) == (0, 1, True)
    monkeypatch.undo()
    moving.run()
    assert (moving.rotated, moving.is_waiting) == (1, False)


def test_without_an_object_store_nothing_waits(folder: Path) -> None:
    moving = Rotation(folder, None)
    moving.run()
    assert not moving.is_waiting


def test_an_error_on_close_does_not_prevent_rotation(
    folder: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Appender(folder / "main", Header("main", "abc123", "metrics", OPENED_MS, "w"))
    file.append([log_format.line(0, OPENED_MS, b"{}")])
    close = os.close

    def fail(descriptor: int) -> None:
        close(descriptor)
        raise OSError("Input/output error")

    monkeypatch.setattr(os, "close", fail)
    file.close()
    monkeypatch.undo()
    moving = Rotation(folder, objects)
    moving.run()
    assert moving.rotated == 1
