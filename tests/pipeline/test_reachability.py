"""Referenced blobs are never reported as unreachable; unreferenced ones always are."""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import fastness
from fastness import Plane
from fastness.backends.objects import open_objects
from fastness.errors import Unreachable
from fastness.layers.blobs import hashes_in
from fastness.layers.snapshots import NO_MANIFEST
from fastness.pipeline import blob_references
from fastness.pipeline.blob_references import HashIndex, Search, SearchResult, Source
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.jobs import reachability
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import UNREACHABLE
from fastness.runtime.maintenance import garbage_collection
from fastness.wire.inboxes import DomainEvent
from fastness.wire.mail import NewMail
from tests.pipeline import planes

NOW = datetime.now(UTC)
PART = 1 << 16
LARGE = 20_000  # Too large to be stored inline.


def config_of(tmp_path: Path) -> Config:
    return Config(data=f"dir:{tmp_path / 'data'}", lake=str(tmp_path / "lake"))


def rows(config: Config) -> dict[str, dict[str, Any]]:
    return {row["hash"]: row for row in Lake(config.lake).table(UNREACHABLE).rows().to_pylist()}


def by_entry(plane: Plane, small: str, large: str) -> None:
    world = plane.world("hot")
    world.create()
    world.append([{"attachment": small}, large], expected_head=0)


def by_segment(plane: Plane, small: str, large: str) -> None:
    world = plane.world("cold")
    world.create()
    world.append([{"deep": [{"er": small.upper()}]}, large, *range(18)], expected_head=0)
    world.snapshots.commit(None, height=20, promote=True, receipt_horizon_height=20, manifest_hash=NO_MANIFEST)
    assert world.compact(entries=10, margin=1).segments == 1


def by_inbox(plane: Plane, small: str, large: str) -> None:
    plane.world("inbox").create()
    for hash in (small, large):
        plane.world("inbox").inbox.put(DomainEvent(schema="s", payload_blob=hash))
    plane.world("inbox").drain(limit=1)


def by_message(plane: Plane, *hashes: str) -> None:
    for hash in hashes:
        plane.queue("jobs").put({"see": hash})


def by_mail(plane: Plane, small: str, large: str) -> None:
    plane.mailbox("ada").send_many([NewMail("bob", f"look at {hash}!".encode()) for hash in (small, large)])


def by_state(plane: Plane, small: str, large: str) -> None:
    plane.state("deploy").update({"image": small, "large": [large]})


def by_entity(plane: Plane, small: str, large: str) -> None:
    plane.entities.write("order", "o-1", {"invoice": small, "scan": large})
    plane.entities.write("order", "o-1", {"invoice": None, "scan": None})  # The history still refers to them.


def by_pair(plane: Plane, small: str, large: str) -> None:
    plane.pairs.put(b"mine", f"{small}{large}".encode())


def by_log(plane: Plane, small: str, large: str) -> None:
    plane.activity.log("session", {"wrote": [small, large]})


def by_large_blob(plane: Plane, small: str, large: str) -> None:
    """A message refers to this blob; the hashes in it cross its parts."""
    body = bytearray(b"x" * (1 << 20))
    for n, hash in enumerate((small, large), 1):
        place = n * (1 << 16) - 30
        body[place : place + 64] = hash.encode()
    by_message(plane, plane.blobs.put(bytes(body)))


def by_chain_of_blobs(plane: Plane, small: str, large: str) -> None:
    hash = plane.blobs.put(f"see {small}, {large}".encode())
    for _ in range(3):
        hash = plane.blobs.put(f"see {hash}".encode())
    by_message(plane, hash)


REFERENCES: list[Callable[..., None]] = [
    by_entry,
    by_segment,
    by_inbox,
    by_message,
    by_mail,
    by_state,
    by_entity,
    by_pair,
    by_log,
    by_large_blob,
    by_chain_of_blobs,
]


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A plane with blobs that are referenced in every way, and with some that are not."""
    path = tmp_path_factory.mktemp("reachability")
    referred: dict[str, list[str]] = {}
    with fastness.open(f"dir:{path / 'data'}") as plane:
        for reference in REFERENCES:
            small = plane.blobs.put(f"small {reference.__name__}".encode())
            large = plane.blobs.put(reference.__name__.encode().ljust(LARGE))
            reference(plane, small, large)
            referred[reference.__name__] = [small, large]
        plane.queue("jobs").put(b"z" * LARGE)  # The payload becomes a blob.
        plane.world("kept").create()
        plane.world("kept").append([1], expected_head=0)
        plane.world("kept").snapshots.commit("s" * LARGE, height=1)
        lost = {
            "keys": plane.blobs.put(b"not referred to"),
            "objects": plane.blobs.put(b"not referred to".ljust(LARGE)),
        }
        chained = plane.blobs.put(f"only the lost refer to {lost['keys']}".encode())
    stray = "ab" * 32
    open_objects(f"dir:{path / 'data' / 'objects'}").put(f"cas/main/sha256/{stray}", b"half a put")
    config = config_of(path)
    result = reachability.run(spark, config, now=NOW)
    return SimpleNamespace(
        config=config, result=result, referred=referred, lost={**lost, "chained": chained, "unrecorded": stray}
    )


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.__name__)
def test_referenced_blob_is_reachable(found: SimpleNamespace, reference: Callable[..., None]) -> None:
    assert not set(found.referred[reference.__name__]) & set(rows(found.config))


def test_unreferenced_blob_is_reported_with_its_size_and_place(found: SimpleNamespace) -> None:
    result = rows(found.config)
    assert set(result) == set(found.lost.values())
    assert {name: (result[hash]["size"], result[hash]["place"]) for name, hash in found.lost.items()} == {
        "keys": (15, "keys"),
        "objects": (LARGE, "objects"),
        "chained": (23 + 64, "keys"),
        "unrecorded": (10, "unrecorded"),
    }
    assert found.result.ok
    assert found.result.rows["unreachable"] == 4
    assert found.result.rows["unreachable_bytes"] == 15 + LARGE + 87 + 10
    assert found.result.notes[0].startswith("main: 4 of ")


def test_only_old_blobs_are_reclaimable(found: SimpleNamespace) -> None:
    assert {row["reclaimable"] for row in rows(found.config).values()} == {False}
    result = reachability.run(None, found.config, now=NOW + timedelta(days=2))
    after = rows(found.config)
    assert {row["reclaimable"] for row in after.values()} == {True}
    assert {row["since"] for row in after.values()} == {NOW.replace(microsecond=NOW.microsecond // 1_000 * 1_000)}
    assert result.rows["reclaimable_bytes"] == result.rows["unreachable_bytes"]
    assert after[found.lost["keys"]]["modified_at"] is None
    modified = after[found.lost["objects"]]["modified_at"]
    assert abs((modified - datetime.now(UTC)).total_seconds()) < 3_600


@pytest.mark.always
def test_nothing_is_deleted(found: SimpleNamespace) -> None:
    with fastness.open(found.config.data) as plane:
        for name in ("keys", "objects", "chained"):
            assert plane.blobs.get(found.lost[name])


def test_blob_that_was_referenced_again_starts_a_new_period(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with fastness.open(config.data) as plane:
        hash = plane.blobs.put(b"mine")
    reachability.run(None, config, now=NOW)
    with fastness.open(config.data) as plane:
        plane.pairs.put(b"mine", hash.encode())
    reachability.run(None, config, now=NOW + timedelta(days=1))
    assert rows(config) == {}
    with fastness.open(config.data) as plane:
        plane.pairs.delete(b"mine")
    reachability.run(None, config, now=NOW + timedelta(days=2))
    assert (rows(config)[hash]["since"] - NOW).days in (1, 2)
    assert not rows(config)[hash]["reclaimable"]


def test_nothing_is_reclaimable_if_damage_hides_references(tmp_path: Path) -> None:
    planes.build(tmp_path / "data", worlds=2, entries=200)
    config = config_of(tmp_path)
    with fastness.open(config.data) as plane:
        plane.blobs.put(b"not referred to")
    planes.remove_segment(tmp_path / "data", "world-0001")
    result = reachability.run(None, config, now=NOW + timedelta(days=9), grace_seconds=0)
    assert not result.ok
    assert "segments/main/world-0001/0-" in result.findings[0]["detail"]
    assert result.rows["unreachable"] == 1
    assert result.rows["reclaimable"] == 0


def test_universes_have_separate_blobs(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with fastness.open(config.data) as plane:
        hash = plane.blobs.put(b"mine")
        by_message(plane, hash)
    with fastness.open(config.data, universe="other") as plane:
        plane.blobs.put(b"mine")
    reachability.run(None, config, now=NOW)
    (row,) = rows(config).values()
    assert (row["universe"], row["hash"]) == ("other", hash)


def test_a_dry_run_of_a_collection_finds_the_same_blobs(tmp_path: Path) -> None:
    """Two independent searches of one plane agree, except that a session log keeps no blob."""
    config = config_of(tmp_path)
    with fastness.open(config.data, universe="other") as plane:
        plane.blobs.put(b"small by_state", pinned=False)  # Named in another universe only.
    with fastness.open(config.data) as plane:
        logged: set[tuple[str, str]] = set()
        for reference in REFERENCES:
            small = plane.blobs.put(f"small {reference.__name__}".encode(), pinned=False)
            large = plane.blobs.put(reference.__name__.encode().ljust(LARGE), pinned=False)
            reference(plane, small, large)
            logged |= {("main", small), ("main", large)} if reference is by_log else set()
        plane.queue("jobs").put(b"z" * LARGE)
        scheduled = plane.blobs.put(b"s" * LARGE, pinned=False)
        plane.queue("jobs").schedule("nightly", "0 3 * * *", {"see": scheduled})
        plane.queue("failing").put(b"d" * LARGE)
        message = plane.queue("failing").receive()
        assert message is not None
        message.reject("no")
        lost = plane.blobs.put(b"named by a lost blob", pinned=False)
        plane.blobs.put(f"only the lost refer to {lost}".encode().ljust(LARGE), pinned=False)
        services = plane._transport.services  # type: ignore[attr-defined]
        search = garbage_collection.Search(services.database, services.objects)
        planned = plane.gc(dry_run=True)
    assert reachability.run(None, config, now=NOW).ok
    table = Lake(config.lake).table(UNREACHABLE).rows()
    unreachable = {(row["universe"], row["hash"]) for row in table.to_pylist()}
    unreferenced = {(found.universe, found.hash) for found in search.unreferenced}
    assert len(unreachable) == 3
    assert unreferenced == unreachable | logged
    assert (planned.waiting, planned.unsearched) == (len(unreferenced), [])


@given(st.data())
def test_search_finds_exactly_the_indexed_hashes(data: st.DataObject) -> None:
    hashes = data.draw(st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), max_size=8, unique=True))
    index = set(data.draw(st.lists(st.sampled_from(hashes)))) if hashes else set()
    between = st.text("0123456789abcdefABCDEF -", max_size=70)
    text = "".join(f"{data.draw(between)}{data.draw(st.sampled_from([hash, hash.upper()]))}" for hash in hashes)
    prefixes = {hash[:16] for hash in index}
    expected = {hash for hash in hashes_in(text.encode()) if hash[:16] in prefixes}
    assert HashIndex.of(index).find_in(text.encode()) == expected
    assert index <= expected


def test_search_in_long_runs_of_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_references, "_POSITIONS", 1_000)
    digits = "".join(hashlib.sha256(b"%d" % n).hexdigest() for n in range(500))
    index = {digits[n : n + 64] for n in range(0, len(digits) - 64, 997)}
    assert HashIndex.of(index).find_in(digits.encode()) == index
    assert HashIndex.of(()).find_in(digits.encode()) == set()


def test_missing_staged_object_is_not_damage(tmp_path: Path) -> None:
    HashIndex.of(()).save(Stores().staging(f"dir:{tmp_path}"), "wanted")
    lost = Source("the blob", f"dir:{tmp_path}", "nowhere", 5)
    search = Search({}, f"dir:{tmp_path}", "wanted", [lost])
    assert blob_references.search(search) == SearchResult([], ["the blob"])
    with pytest.raises(Unreachable, match="was staged"):
        blob_references.search(msgspec.structs.replace(search, sources=[msgspec.structs.replace(lost, staged=True)]))


def test_hash_across_two_parts_of_an_object_is_found(tmp_path: Path) -> None:
    hash = hashlib.sha256(b"x").hexdigest()
    source = Source("it", "anywhere", "large", 0)
    for place in range(PART - 66, PART + 3):
        body = b"-" * place + hash.encode() + b"-" * 100
        store: Any = SimpleNamespace(open=lambda path, body=body: [body[:PART], body[PART:]])
        found = [
            HashIndex.of([hash]).find_in(part)
            for part in blob_references._overlapping_parts(lambda url: store, source)  # noqa: B023
        ]
        assert set().union(*found) == {hash}


def test_concurrent_runs_leave_one_row_per_blob(spark: SparkSession, tmp_path: Path) -> None:
    with planes.opened(f"dir:{tmp_path / 'data'}") as plane:
        hashes = {plane.blobs.put(bytes([n]) * 100) for n in range(3)}
    config = config_of(tmp_path)
    for _ in range(2):  # First without the table, then with its rows.
        others: list[JobResult] = []

        def overtake(description: str, done: int, total: int, others: list[JobResult] = others) -> None:
            if not others:
                others.append(reachability.run(spark, config))

        assert reachability.run(spark, config, progress=overtake).rows["unreachable"] == 3
        assert others[0].rows["unreachable"] == 3
        assert sorted(Lake(config.lake).table(UNREACHABLE).rows().column("hash").to_pylist()) == sorted(hashes)
