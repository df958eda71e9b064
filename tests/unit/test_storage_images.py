"""The images that a power loss may leave, from traces written by hand."""

import posixpath
import random

import pytest

from fastness.testing.storage import Disk, Event, Kind, Loss, build_image
from fastness.testing.storage.images import Fate

ROOT = "/root"
SEEDS = range(300)


def create(name: str, inode: int) -> Event:
    return Event(Kind.CREATE, inode, path=f"{ROOT}/{name}")


def write(inode: int, offset: int, data: bytes) -> Event:
    return Event(Kind.WRITE, inode, offset, data=data)


def sync(inode: int) -> Event:
    return Event(Kind.SYNC, inode, path=f"{ROOT}/any")


SYNC_ROOT = Event(Kind.SYNC, 1, path=ROOT)


def contents(events: list[Event], name: str) -> set[bytes | None]:
    """What all seeds leave of a file after the last event; None if it has no name."""
    return {build_image(events, ROOT, seed, first_cut=len(events)).entries.get(name) for seed in SEEDS}


def test_what_is_synced_is_in_every_image() -> None:
    assert contents([create("a", 2), write(2, 0, b"one"), sync(2), SYNC_ROOT], "a") == {b"one"}


def test_a_name_is_durable_only_after_a_sync_of_its_folder() -> None:
    assert contents([create("a", 2), write(2, 0, b"one"), sync(2)], "a") == {b"one", None}


def test_a_sync_of_the_folder_does_not_make_the_data_durable() -> None:
    assert contents([create("a", 2), write(2, 0, b"one"), SYNC_ROOT], "a") == {b"one", b"", bytes(3)}


def test_a_sync_covers_only_the_writes_before_it() -> None:
    found = contents([create("a", 2), write(2, 0, b"one"), sync(2), write(2, 3, b"two"), SYNC_ROOT], "a")
    assert found == {b"one", b"onetwo", b"one" + bytes(3)}


def test_a_later_write_may_reach_the_disk_without_an_earlier_one() -> None:
    blocks = [byte * 512 for byte in (b"1", b"2")]
    found = contents([create("a", 2), SYNC_ROOT, write(2, 0, blocks[0]), write(2, 512, blocks[1])], "a")
    assert bytes(512) + blocks[1] in found
    assert {b"", blocks[0], blocks[0] + blocks[1], blocks[0] + bytes(512), bytes(1_024)} <= found


def test_a_sector_has_its_content_of_one_moment() -> None:
    found = contents([create("a", 2), SYNC_ROOT, write(2, 0, b"one"), write(2, 3, b"two")], "a")
    assert b"onetwo" in found
    assert bytes(3) + b"two" not in found


def test_a_long_write_is_torn_at_sectors() -> None:
    data = bytes(random.Random(1).randbytes(2_048))
    found = contents([create("a", 2), SYNC_ROOT, write(2, 0, data)], "a")
    assert len(found) > 8
    for content in found - {None}:
        assert content is not None
        for begin in range(0, len(content), 512):
            assert content[begin : begin + 512] in (data[begin : begin + 512], bytes(512))


def test_a_synced_part_is_never_zeroed() -> None:
    events = [create("a", 2), SYNC_ROOT, write(2, 0, b"x" * 700), sync(2), write(2, 700, b"y" * 700)]
    assert all(content is not None and content.startswith(b"x" * 700) for content in contents(events, "a"))


def test_a_rename_happens_as_a_whole() -> None:
    events = [create("old", 2), write(2, 0, b"1"), sync(2), SYNC_ROOT]
    events.append(Event(Kind.RENAME, path=f"{ROOT}/old", target=f"{ROOT}/new"))
    images = [build_image(events, ROOT, seed, first_cut=len(events)).entries for seed in SEEDS]
    assert {tuple(entries) for entries in images} == {("old",), ("new",)}


def test_a_synced_rename_leaves_nothing_of_its_old_name() -> None:
    """Also if the folder of the old name was never synced."""
    events = [Event(Kind.MAKE_FOLDER, 3, path=f"{ROOT}/staging"), create("staging/draft", 2), SYNC_ROOT]
    events += [Event(Kind.RENAME, path=f"{ROOT}/staging/draft", target=f"{ROOT}/object"), SYNC_ROOT]
    images = [build_image(events, ROOT, seed, first_cut=len(events)).entries for seed in SEEDS]
    assert {tuple(entries) for entries in images} == {("object", "staging")}


def test_unsynced_names_reach_the_disk_in_any_order() -> None:
    events = [create("MANIFEST", 2), create("tmp", 3)]
    events.append(Event(Kind.RENAME, path=f"{ROOT}/tmp", target=f"{ROOT}/CURRENT"))
    images = [build_image(events, ROOT, seed, first_cut=len(events)).entries for seed in SEEDS]
    assert {("CURRENT",), ("MANIFEST",), ("CURRENT", "MANIFEST"), ("MANIFEST", "tmp"), ()} <= set(map(tuple, images))
    removed = [create("a", 2), create("b", 3), SYNC_ROOT, *(Event(Kind.REMOVE, path=f"{ROOT}/{each}") for each in "ab")]
    images = [build_image(removed, ROOT, seed, first_cut=len(removed)).entries for seed in SEEDS]
    assert set(map(tuple, images)) == {("a", "b"), ("a",), ("b",), ()}


def test_an_unsynced_removal_and_truncation_may_be_undone() -> None:
    events = [create("a", 2), write(2, 0, b"one"), sync(2), SYNC_ROOT]
    assert contents([*events, Event(Kind.REMOVE, path=f"{ROOT}/a")], "a") == {b"one", None}
    assert contents([*events, Event(Kind.TRUNCATE, 2, 0)], "a") == {b"one", b""}


def test_a_link_names_the_same_file() -> None:
    events = [create("a", 2), SYNC_ROOT, Event(Kind.LINK, path=f"{ROOT}/a", target=f"{ROOT}/b"), SYNC_ROOT]
    events.append(write(2, 0, b"one"))
    for seed in SEEDS:
        entries = build_image(events, ROOT, seed, first_cut=len(events)).entries
        assert entries["a"] == entries["b"]


def test_an_unsynced_folder_is_lost_with_its_synced_content() -> None:
    events = [Event(Kind.MAKE_FOLDER, 3, path=f"{ROOT}/kv"), create("kv/a", 2), write(2, 0, b"one"), sync(2)]
    events.append(Event(Kind.SYNC, 3, path=f"{ROOT}/kv"))
    images = [build_image(events, ROOT, seed, first_cut=len(events)).entries for seed in SEEDS]
    assert {tuple(entries.items()) for entries in images} == {(), (("kv", None), ("kv/a", b"one"))}


def test_an_inode_may_be_used_again() -> None:
    events = [create("a", 2), write(2, 0, b"one"), sync(2), SYNC_ROOT, Event(Kind.REMOVE, path=f"{ROOT}/a")]
    events += [create("b", 2), write(2, 0, b"two"), sync(2)]
    assert contents(events, "a") == {b"one", None}
    assert contents(events, "b") == {b"two", None}


def test_a_seed_repeats_its_image_and_marks_end_at_the_cut() -> None:
    events = [create("a", 2), SYNC_ROOT]
    for number in range(20):
        events += [write(2, number * 100, b"%d" % number * 50), Event(Kind.MARK, data=b"%d" % number)]
    images = [build_image(events, ROOT, seed) for seed in SEEDS]
    assert images == [build_image(events, ROOT, seed) for seed in SEEDS]
    assert {image.loss for image in images} == set(Loss) - {Loss.NOTHING}
    for image in images:
        assert image.marks == tuple(event.data for event in events[: image.cut] if event.kind is Kind.MARK)


def test_files_that_the_recorder_did_not_see_are_ignored() -> None:
    disk = Disk(ROOT)
    disk.apply(Event(Kind.RENAME, path=f"{ROOT}/LOG", target=f"{ROOT}/LOG.old"))
    disk.apply(Event(Kind.REMOVE, path=f"{ROOT}/LOG.old"))
    assert disk.entries(keeps_name=lambda _: True, fate_of=lambda _number, _sectors: (Fate.KEPT, ())) == {}
    with pytest.raises(KeyError):
        disk.apply(write(9, 0, b"lost"))


def test_folders_come_before_what_they_contain() -> None:
    events = [Event(Kind.MAKE_FOLDER, 3, path=f"{ROOT}/b"), Event(Kind.MAKE_FOLDER, 4, path=f"{ROOT}/b/a")]
    events += [create("b/a/file", 2), create("a", 5)]
    for seed in SEEDS:
        seen = {""}
        for path, content in build_image(events, ROOT, seed).entries.items():
            assert posixpath.dirname(path) in seen
            if content is None:
                seen.add(path)
