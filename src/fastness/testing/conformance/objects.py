"""Conformance checks for object stores, as plain functions.

    @pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        check(open_objects("s3://my-empty-bucket/some-prefix"))

Each check takes an open, empty store, and raises AssertionError if the store does not conform.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from fastness.backends.objects import ObjectMeta, ObjectStore
from fastness.errors import InvalidArgument, InvalidValue, ObjectChanged, ObjectExists, ObjectNotFound
from fastness.limits import OBJECT_LIST_MAX, OBJECT_PART_BYTES, OBJECT_PATH_BYTES_MAX
from fastness.testing.conformance.workloads import in_threads

RACERS: Final = 8
EVERY_BYTE: Final = bytes(range(256))
BAD_PATHS: Final = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a\0b",
    "a\nb",
    "a\x7fb",
    "a\x85b",
)
ODD_PATHS: Final = (
    "a b",
    "ü/😀",
    "%2e%2e/x",
    "a+b&c=d?e#f",
    "...",
    ".a",
    "a~",
    "back\\slash",
    "quote'\"<>",
    "*",
    "x#1y",
)


def check_a_put_object_is_read_back(store: ObjectStore) -> None:
    meta = store.put("a/b", EVERY_BYTE)
    assert (meta.path, meta.size) == ("a/b", 256)
    assert store.get("a/b") == EVERY_BYTE
    assert store.head("a/b") == meta


def check_a_put_replaces_the_previous_object(store: ObjectStore) -> None:
    first = store.put("a", b"first")
    second = store.put("a", b"second")
    assert first.etag != second.etag
    assert store.get("a") == b"second"
    assert store.head("a") == second


def check_empty_objects_are_stored(store: ObjectStore) -> None:
    assert store.put("put", b"").size == 0
    assert store.create("created", b"").size == 0
    assert store.write("written", iter(())).size == 0
    for path in ("put", "created", "written"):
        assert store.get(path) == b""
        assert store.get_range(path, 0, 10) == b""
        assert list(store.open(path)) == []
    assert _paths(store.list()) == ["created", "put", "written"]


def check_a_missing_object_is_not_found(store: ObjectStore) -> None:
    store.put("a/b", b"")
    for path in ("missing", "a", "a/c", "a/b/c"):
        assert _raises(ObjectNotFound, store.get, path)
        assert _raises(ObjectNotFound, store.head, path)
        assert _raises(ObjectNotFound, store.open, path)
        assert _raises(ObjectNotFound, store.get_range, path, 0, 1)
        assert _raises(ObjectNotFound, store.get_range, path, 0, 0)


def check_a_created_object_is_never_overwritten(store: ObjectStore) -> None:
    meta = store.create("a", b"first")
    assert _raises(ObjectExists, store.create, "a", b"second")
    assert _raises(ObjectExists, store.write, "a", [b"second"], create_only=True)
    assert _raises(ObjectExists, store.write, "a", _parts(2), create_only=True)
    assert store.get("a") == b"first"
    assert store.head("a") == meta


def check_a_replace_needs_the_current_etag(store: ObjectStore) -> None:
    first = store.put("a", b"first")
    second = store.replace("a", b"second", etag=first.etag)
    assert store.head("a") == second
    assert _raises(ObjectChanged, store.replace, "a", b"third", etag=first.etag)
    assert store.get("a") == b"second"


def check_a_replace_never_creates(store: ObjectStore) -> None:
    etag = store.put("a", b"first").etag
    store.delete("a")
    assert _raises(ObjectChanged, store.replace, "a", b"second", etag=etag)
    assert _raises(InvalidArgument, store.replace, "a", b"second", etag="*")
    assert _raises(InvalidArgument, store.replace, "a", b"second", etag="")
    assert store.list() == []


def check_exactly_one_of_many_creates_succeeds(store: ObjectStore) -> None:
    won = _race(ObjectExists, lambda racer: store.create("a", b"%d" % racer))
    assert len(won) == 1
    assert store.get("a") == b"%d" % won[0]


def check_exactly_one_of_many_replaces_succeeds(store: ObjectStore) -> None:
    etag = store.put("a", b"first").etag
    won = _race(ObjectChanged, lambda racer: store.replace("a", b"%d" % racer, etag=etag))
    assert len(won) == 1
    assert store.get("a") == b"%d" % won[0]


def check_a_range_reads_like_a_slice(store: ObjectStore) -> None:
    store.put("a", EVERY_BYTE)
    for start, length in ((0, 1), (0, 256), (1, 254), (255, 1), (0, 0), (7, 0), (250, 100), (256, 1), (300, 5)):
        assert store.get_range("a", start, length) == EVERY_BYTE[start : start + length], (start, length)
    assert store.get_range("a", 2**62, 2**62) == b""
    for start, length in ((-1, 1), (0, -1), (2**63, 1), (0, 2**63)):
        assert _raises(InvalidArgument, store.get_range, "a", start, length)


def check_a_deleted_object_is_gone_and_deleting_it_again_is_fine(store: ObjectStore) -> None:
    store.put("a/b", b"")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("a")
    store.delete("never/was")
    assert _raises(ObjectNotFound, store.head, "a/b")
    assert store.list() == []


def check_a_listing_is_in_path_order_below_whole_segments(store: ObjectStore) -> None:
    # In tree order a/x comes before a-b and a.b; in string order it comes after them.
    paths = ["a-b", "a.b", "a/x", "a/y/z", "a0", "b", "ü", "😀"]
    metas = {path: store.put(path, path.encode()) for path in reversed(paths)}
    assert store.list() == [metas[path] for path in paths]
    assert _paths(store.list("a")) == _paths(store.list("a/")) == ["a/x", "a/y/z"]
    assert _paths(store.list("a/y")) == ["a/y/z"]
    assert store.list("b") == store.list("c") == store.list("a/x/y") == []


def check_a_listing_continues_after_the_last_path(store: ObjectStore) -> None:
    paths = [f"many/{number:03d}/{number % 7}" for number in range(30)]
    for path in reversed(paths):
        store.put(path, b"")
    for limit in (1_000, 30, 16, 10, 7):
        assert _paths(_list_pages(store, "many", limit)) == paths
    assert _paths(store.list("many", after="many/028", limit=1)) == ["many/028/0"]
    assert store.list("many", after="many/029/1") == store.list("many", after="z") == []
    assert _paths(store.list(after="a", limit=1)) == paths[:1]


def check_a_listing_has_bounds(store: ObjectStore) -> None:
    for limit in (0, -1, OBJECT_LIST_MAX + 1):
        assert _raises(InvalidArgument, store.list, limit=limit)
    assert _raises(InvalidArgument, store.list, "../a")
    assert _raises(InvalidArgument, store.list, after="../a")


def check_a_stream_of_several_parts_comes_back(store: ObjectStore) -> None:
    body = b"".join(_parts(3)) + b"the rest"
    chunks = (body[start : start + 1_000_003] for start in range(0, len(body), 1_000_003))
    meta = store.write("a", chunks)
    assert meta.size == len(body)
    assert store.head("a") == meta
    read = list(store.open("a"))
    assert b"".join(read) == body
    assert max(map(len, read)) <= OBJECT_PART_BYTES
    assert store.get_range("a", OBJECT_PART_BYTES - 2, 4) == body[OBJECT_PART_BYTES - 2 :][:4]
    for start, length in ((OBJECT_PART_BYTES - 2, 4), (1, None), (7, OBJECT_PART_BYTES + 9), (len(body), 1), (5, 0)):
        end = len(body) if length is None else start + length
        assert b"".join(store.open("a", start, length)) == body[start:end], (start, length)


def check_a_stream_creates_and_replaces(store: ObjectStore) -> None:
    assert store.write("small", [b"a", b"", b"b"], create_only=True).size == 2
    large = store.write("large", _parts(2), create_only=True)
    assert large.size == 2 * OBJECT_PART_BYTES
    assert store.head("large") == large
    assert store.write("large", [b"over"]).size == 4
    assert store.get("large") == b"over"


def check_a_failing_stream_leaves_the_previous_object(store: ObjectStore) -> None:
    store.put("kept", b"as it was")
    for parts in (0, 1, 3):
        # Stores raise this type too: it must not be mistaken for the store's error.
        assert _raises(FileNotFoundError, store.write, "new", _failing(parts))
        assert _raises(FileNotFoundError, store.write, "new", _failing(parts), create_only=True)
        assert _raises(FileNotFoundError, store.write, "kept", _failing(parts))
    assert store.get("kept") == b"as it was"
    assert _paths(store.list()) == ["kept"]


def check_a_reader_never_gets_a_mix_of_versions(store: ObjectStore) -> None:
    store.write("a", _parts(2))
    reader = store.open("a")
    next(reader)
    store.put("a", b"x" * (2 * OBJECT_PART_BYTES))
    assert _raises(ObjectChanged, next, reader)


def check_only_bytes_are_stored(store: ObjectStore) -> None:
    # A string must not be mistaken for the path of a file to upload.
    for data in (__file__, None, 7, ["a"]):
        assert _raises(InvalidValue, store.put, "a", data)
        assert _raises(InvalidValue, store.write, "a", [data])
        assert _raises(InvalidValue, store.write, "a", [*_parts(1), data])
    assert store.list() == []


def check_invalid_paths_are_refused(store: ObjectStore) -> None:
    too_long = "/".join(["a" * 200] * 6)
    for path in (*BAD_PATHS, too_long, "\ud800", "a#1", "a#1/b"):
        assert _raises(InvalidArgument, store.put, path, b"")
        assert _raises(InvalidArgument, store.create, path, b"")
        assert _raises(InvalidArgument, store.replace, path, b"", etag="e")
        assert _raises(InvalidArgument, store.write, path, [b""])
        assert _raises(InvalidArgument, store.get, path)
        assert _raises(InvalidArgument, store.get_range, path, 0, 1)
        assert _raises(InvalidArgument, store.head, path)
        assert _raises(InvalidArgument, store.open, path)
        assert _raises(InvalidArgument, store.delete, path)
    assert store.list() == []


def check_unusual_paths_are_preserved(store: ObjectStore) -> None:
    longest = ("s" * 127 + "/") * (OBJECT_PATH_BYTES_MAX // 128)
    paths = sorted((*ODD_PATHS, longest[: OBJECT_PATH_BYTES_MAX - 64].rstrip("/")))
    for path in paths:
        store.put(path, path.encode())
    assert all(store.get(path) == path.encode() for path in paths)
    assert _paths(store.list()) == paths


def _paths(metas: list[ObjectMeta]) -> list[str]:
    return [meta.path for meta in metas]


def _list_pages(store: ObjectStore, prefix: str, limit: int) -> list[ObjectMeta]:
    found: list[ObjectMeta] = []
    while page := store.list(prefix, after=found[-1].path if found else None, limit=limit):
        assert len(page) <= limit
        found += page
    return found


def _parts(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield bytes([number]) * OBJECT_PART_BYTES


def _failing(parts: int) -> Iterator[bytes]:
    yield from _parts(parts)
    yield b"a little more"
    raise FileNotFoundError("the body's own failure")


def _raises(kind: type[Exception], act: Callable[..., object], *args: Any, **kwargs: Any) -> bool:
    try:
        act(*args, **kwargs)
    except kind:
        return True
    return False


def _race(lost: type[Exception], act: Callable[[int], object]) -> list[int]:
    """The numbers of the threads that succeeded; the others must raise `lost`."""
    start, won = threading.Barrier(RACERS), list[int]()

    def run(racer: int) -> None:
        start.wait()
        with suppress(lost):
            act(racer)
            won.append(racer)

    in_threads(RACERS, run)
    return won


OBJECT_CHECKS: Final[tuple[Callable[[ObjectStore], None], ...]] = tuple(
    check for name, check in sorted(globals().items()) if name.startswith("check_")
)
