"""Blobs: content-addressed bytes, verified reads, and faults at every step."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

import fastness
from fastness import limits
from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import (
    BlobNotFound,
    Corrupt,
    HashMismatch,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    MissingObject,
    SizeMismatch,
    Unsupported,
)
from fastness.kv import Database, Transaction
from fastness.layers import blobs
from fastness.layers.blobs import Blob, Verify
from fastness.runtime.blobs import AsyncBlobStore
from fastness.runtime.sync.blobs import BlobStore
from fastness.testing.faults import ChosenFault, Crash, FaultyDatabase, faulty_objects
from tests.support.failures import Failures

SIZES = (0, 1, limits.BLOB_INLINE_BYTES_MAX, limits.BLOB_INLINE_BYTES_MAX + 1, 3_000_000)
LARGE = bytes(range(256)) * 200


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def path_of(objects: ObjectStore, data: bytes) -> str:
    """The path of the only body with this content."""
    (path,) = (meta.path for meta in objects.list("cas/main/sha256") if name_of(data) in meta.path)
    return path


@pytest.fixture(params=["memory", "dir"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_objects("memory:" if request.param == "memory" else f"dir:{tmp_path / 'objects'}")


@pytest.fixture
def store(database: Database, objects: ObjectStore) -> BlobStore:
    return BlobStore(database, objects)


@pytest.mark.parametrize("size", SIZES)
def test_a_blob_is_read_by_its_hash(store: BlobStore, size: int) -> None:
    data = bytes(size)
    stored = store.put("main", data)
    assert (stored.hash, stored.size) == (name_of(data), size)
    assert store.put("main", data) == stored
    assert store.get("main", stored.hash).data == data
    assert b"".join(store.open("main", stored.hash)) == data


def test_small_blobs_are_inline_and_large_ones_are_objects(store: BlobStore, objects: ObjectStore) -> None:
    store.put("main", bytes(limits.BLOB_INLINE_BYTES_MAX))
    assert objects.list() == []
    store.put("main", LARGE)
    assert [meta.path for meta in objects.list()] == [path_of(objects, LARGE)]


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_has_the_hash_of_its_bytes(store: BlobStore, size: int) -> None:
    data = bytes(size)
    chunks = (data[start : start + 100_000] for start in range(0, size, 100_000))
    assert store.write("main", chunks).hash == name_of(data)
    assert store.get("main", name_of(data)).data == data


async def test_the_async_store_does_the_same(database: Database, objects: ObjectStore) -> None:
    store = AsyncBlobStore(database, objects)

    async def chunks() -> AsyncIterator[bytes]:
        yield LARGE
        yield LARGE

    for data in (b"small", LARGE):
        assert (await store.get("main", (await store.put("main", data)).hash)).data == data
    stored = await store.write("main", chunks())
    assert stored.hash == name_of(LARGE * 2)
    assert b"".join([part async for part in await store.open("main", stored.hash)]) == LARGE * 2


def test_a_stream_that_fails_stores_nothing(store: BlobStore, database: Database, objects: ObjectStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield LARGE
        raise LookupError("on purpose")

    with pytest.raises(LookupError):
        store.write("main", chunks())
    assert objects.list() == []
    assert database.read(lambda tx: tx.scan(b"\x00", b"\xff", limit=10)) == []


def test_universes_have_separate_blobs(store: BlobStore) -> None:
    stored = store.put("main", LARGE)
    with pytest.raises(BlobNotFound, match="put it first"):
        store.get("other", stored.hash)


def test_an_invalid_hash_is_refused(store: BlobStore) -> None:
    failures = Failures()
    hash: Any
    for hash in ["", "xyz", "ab", "0" * 63, "0" * 66, None, 7]:
        with failures.of(hash):
            for call in (store.get, store.open):
                with pytest.raises(InvalidArgument, match="64 hex digits"):
                    call("main", hash)
    failures.check()


def test_a_body_that_is_not_bytes_is_refused(store: BlobStore) -> None:
    with pytest.raises(InvalidValue):
        store.put("main", "text")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue):
        store.write("main", ["text"])  # type: ignore[list-item]


def test_a_large_blob_needs_an_object_store(database: Database) -> None:
    store = BlobStore(database, None)
    store.put("main", b"small")
    with pytest.raises(Unsupported, match="objects="):
        store.put("main", LARGE)


RANGES = [(0, 1), (5, 100), (0, None), (7, None), (len(LARGE) - 3, 10), (len(LARGE), 1), (len(LARGE) + 9, None), (3, 0)]


def test_a_part_reads_like_a_slice(store: BlobStore) -> None:
    failures = Failures()
    for data in [LARGE, LARGE[:200], b""]:
        for start, length in [*RANGES, (2**70, 2**70), (0, 2**70)]:
            with failures.of((data, start, length)):
                hash = store.put("main", data).hash
                end = None if length is None else start + length
                assert b"".join(store.open("main", hash, start, length)) == data[start:end]
    failures.check()


async def test_the_async_store_reads_a_part(database: Database, objects: ObjectStore) -> None:
    store = AsyncBlobStore(database, objects)
    hash = (await store.put("main", LARGE)).hash
    assert b"".join([part async for part in await store.open("main", hash, 9, 20_000)]) == LARGE[9:20_009]


def test_only_the_requested_part_of_a_large_blob_is_read(
    store: BlobStore, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash = store.put("main", LARGE).hash
    read: list[tuple[int, int]] = []
    get = obstore.get

    def watched(store: Any, path: str, *, options: Any) -> Any:
        read.append(options["range"])
        return get(store, path, options=options)

    monkeypatch.setattr(obstore, "get", watched)
    objects._read_bytes = 1_000
    assert b"".join(store.open("main", hash, 30_000, 1_500)) == LARGE[30_000:31_500]
    assert read == [(30_000, 31_000), (31_000, 31_500)]


def test_a_part_of_a_truncated_or_missing_body_is_reported(store: BlobStore, objects: ObjectStore) -> None:
    hash = store.put("main", LARGE).hash
    objects.put(path_of(objects, LARGE), LARGE[:-10])
    assert b"".join(store.open("main", hash, 5, 5)) == LARGE[5:10]
    with pytest.raises(SizeMismatch):
        list(store.open("main", hash, len(LARGE) - 20, 15))
    objects.delete(path_of(objects, LARGE))
    with pytest.raises(MissingObject):
        store.open("main", hash, 5, 5)


def test_a_part_of_a_damaged_inline_body_is_reported(store: BlobStore, database: Database) -> None:
    hash = store.put("main", b"small").hash
    key = blobs._key("main", bytes.fromhex(hash))
    database.transact(lambda tx: tx.put(key, blobs._encode(Blob(5, b"smalL"))))
    for part in ((0, 2), (0, None)):
        with pytest.raises(HashMismatch):
            list(store.open("main", hash, *part))


# Interrupted writes, and damage.


def test_a_body_without_a_record_converges_on_retry(database: Database, objects: ObjectStore) -> None:
    """The body is in the object store and the commit of its record failed."""
    faulty = FaultyDatabase(database, ChosenFault())
    store = BlobStore(faulty, objects)
    faulty.faults = ChosenFault(4)  # read: begin, read: answer, transact: begin, transact: commit
    with pytest.raises(Crash):
        store.put("main", LARGE)
    assert len(objects.list()) == 1
    faulty.faults = ChosenFault()
    assert store.get("main", store.put("main", LARGE).hash).data == LARGE


def test_a_record_without_its_body_is_an_error(store: BlobStore, objects: ObjectStore) -> None:
    """The record was committed and the body is missing: this is reported, never repaired silently."""
    stored = store.put("main", LARGE)
    objects.delete(path_of(objects, LARGE))
    for _ in range(2):
        with pytest.raises(MissingObject, match="restore it"):
            store.get("main", stored.hash)
        with pytest.raises(MissingObject):
            store.open("main", stored.hash)


def test_a_corrupt_body_is_reported(store: BlobStore, objects: ObjectStore) -> None:
    stored = store.put("main", LARGE)
    objects.put(path_of(objects, LARGE), LARGE[::-1])
    with pytest.raises(HashMismatch):
        store.get("main", stored.hash)
    with pytest.raises(HashMismatch):
        list(store.open("main", stored.hash))
    objects.put(path_of(objects, LARGE), LARGE[:-1])
    with pytest.raises(SizeMismatch):
        store.get("main", stored.hash)
    with pytest.raises(SizeMismatch):
        list(store.open("main", stored.hash))


def test_a_damaged_inline_body_is_reported(store: BlobStore, database: Database) -> None:
    stored = store.put("main", b"small")

    def damage(tx: Transaction) -> None:
        key = blobs._key("main", bytes.fromhex(stored.hash))
        tx.put(key, blobs._encode(Blob(5, b"SMALL")))

    database.transact(damage)
    with pytest.raises(HashMismatch):
        store.get("main", stored.hash)


def test_verification_can_be_sampled_or_turned_off(database: Database, objects: ObjectStore) -> None:
    stored = BlobStore(database, objects).put("main", LARGE)
    objects.put(path_of(objects, LARGE), LARGE[::-1])
    assert BlobStore(database, objects, verify=Verify.NEVER).get("main", stored.hash).data == LARGE[::-1]
    sampled = BlobStore(database, objects, verify=Verify.SAMPLED)
    outcomes: set[object] = set()
    while len(outcomes) < 2:  # Ends when reads were both verified and not verified.
        try:
            outcomes.add(len(sampled.get("main", stored.hash).data))
        except Corrupt as error:
            outcomes.add(type(error))
    assert outcomes == {len(LARGE), HashMismatch}


def test_one_hash_with_two_sizes_is_reported(database: Database) -> None:
    digest = hashlib.sha256(b"").digest()
    database.transact(blobs.record, "main", digest, Blob(1, b"a"))
    with pytest.raises(SizeMismatch, match="1 bytes"):
        database.transact(blobs.record, "main", digest, Blob(2, b"ab"))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_crash_at_any_point_of_a_put_converges_on_retry(
    open_database: Callable[..., Database], tmp_path: Path, streamed: bool
) -> None:
    """A fault after every step: the end state equals the fault-free run."""

    def put(database: Database, objects: ObjectStore, faults: ChosenFault) -> None:
        store = BlobStore(FaultyDatabase(database, faults), faulty_objects(objects, faults))
        store.write("main", [LARGE]) if streamed else store.put("main", LARGE)

    with open_database() as database:
        counting = ChosenFault()
        put(database, open_objects("memory:"), counting)
        points = len(counting.points)
        assert points >= 6
        for fail_at in range(points):
            database.transact(lambda tx: tx.delete_range(b"\x00", b"\xff"))
            objects = open_objects(f"dir:{tmp_path / str(fail_at)}")
            with pytest.raises(Crash):
                put(database, objects, ChosenFault(fail_at))
            put(database, objects, ChosenFault())
            assert BlobStore(database, objects).get("main", name_of(LARGE)).data == LARGE
            blob = database.read(blobs.find, "main", hashlib.sha256(LARGE).digest())
            assert blob is not None
            abandoned = {meta.path for meta in objects.list()} - {
                blobs.object_path("main", hashlib.sha256(LARGE).digest(), blob.upload)
            }
            assert len(abandoned) <= 1, "at most the body of the interrupted put, which is deleted later"
    print(f"{points} points covered")


# The handle.


def test_the_handle_puts_gets_and_streams(tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}") as plane:
        hash = plane.blobs.put(LARGE)
        assert hash == name_of(LARGE)
        assert plane.blobs.has(hash)
        assert not plane.blobs.has(name_of(b"other"))
        assert plane.blobs.get(hash) == LARGE
        assert b"".join(plane.blobs.open(plane.blobs.write(iter([LARGE, LARGE])))) == LARGE * 2
        assert b"".join(plane.blobs.open(hash, start=7, length=30_000)) == LARGE[7:30_007]


def test_the_async_handle_does_the_same(tmp_path: Path) -> None:
    async def use() -> None:
        async with fastness.open_async(f"dir:{tmp_path}") as plane:
            hash = await plane.blobs.put(LARGE)
            assert await plane.blobs.has(hash)
            assert await plane.blobs.get(hash) == LARGE
            assert b"".join([part async for part in await plane.blobs.open(hash)]) == LARGE
            assert b"".join([part async for part in await plane.blobs.open(hash, start=40_000)]) == LARGE[40_000:]

    asyncio.run(use())


@pytest.mark.parametrize("universe", ["", "a b", "../x", "ü", "a" * 256, None])
def test_an_invalid_universe_name_is_refused(universe: str) -> None:
    with pytest.raises(InvalidName, match="Invalid universe name"):
        fastness.open("memory:", universe=universe)


@pytest.mark.parametrize("word", ["always", "sampled", "never"])
def test_a_plane_has_a_verification_setting(word: str, tmp_path: Path) -> None:
    with fastness.open(f"dir:{tmp_path}", verify_blobs=word) as plane:
        assert plane.blobs.get(plane.blobs.put(LARGE)) == LARGE
    with pytest.raises(InvalidArgument, match="always, sampled or never"):
        fastness.open(f"dir:{tmp_path}", verify_blobs=word.upper())
