"""The exact bytes of keys, which are stored on disk and must never change."""

import enum
import uuid
from typing import Any

import pytest

from fastness import limits
from fastness.errors import InvalidKey
from fastness.kv import Subspace, pack, prefix_range, unpack
from tests.support.failures import Failures

NAMED = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def test_a_tuple_has_exactly_these_bytes() -> None:
    failures = Failures()
    for elements, key in [
        ((), ""),
        ((None,), "00"),
        ((b"a\x00b",), "01 61 00 ff 62 00"),
        (("q", "jobs", 7), "02 71 00 02 6a 6f 62 73 00 15 07"),
        (("\U0001f41d",), "02 f0 9f 90 9d 00"),
        (((1, None, ()),), "05 15 01 00 ff 05 00 00"),
        ((0,), "14"),
        ((255,), "15 ff"),
        ((256,), "16 01 00"),
        ((-1,), "13 fe"),
        ((-255,), "13 00"),
        ((-256,), "12 fe ff"),
        ((2**64 - 1,), "1c ff ff ff ff ff ff ff ff"),
        ((1 - 2**64,), "0c 00 00 00 00 00 00 00 00"),
        ((False, True), "26 27"),
        ((NAMED,), "30 01890a5dac96774bbcceb302099a8057"),
    ]:
        with failures.of((elements, key)):
            assert pack(elements) == bytes.fromhex(key)
            assert unpack(bytes.fromhex(key)) == elements
    failures.check()


class Colour(enum.IntEnum):
    RED = 1


def test_an_element_of_an_unsupported_type_is_refused() -> None:
    failures = Failures()
    for element in [1.0, [1], {1}, {}, bytearray(b"a"), Colour.RED, "\ud800", 2**64, -(2**64), object, ([],)]:
        with failures.of(element), pytest.raises(InvalidKey):
            pack((element,))
    failures.check()


@pytest.mark.parametrize("number", [10**5_000, -(10**5_000)], ids=["huge", "huge and negative"])
def test_a_number_too_large_to_print_is_refused(number: int) -> None:
    with pytest.raises(InvalidKey):
        pack((number,))


@pytest.mark.parametrize("elements", ["text", b"bytes", [1], 7, None], ids=repr)
def test_only_a_tuple_makes_a_key(elements: Any) -> None:
    with pytest.raises(InvalidKey, match="write \\(value,\\)"):
        pack(elements)


def test_tuples_nest_as_deep_as_the_limit_and_no_deeper() -> None:
    nested: tuple[Any, ...] = ()
    for _ in range(limits.TUPLE_DEPTH_MAX):
        nested = (nested,)
    assert unpack(pack(nested)) == nested
    with pytest.raises(InvalidKey, match="flatten"):
        pack((nested,))
    with pytest.raises(InvalidKey, match="was not made by pack"):
        unpack(b"\x05" * 10_000 + b"\x00" * 10_000)


def test_an_invalid_or_truncated_key_is_refused() -> None:
    failures = Failures()
    for key in [
        "01 61",
        "02 61",
        "02 61 00 ff",
        "02 ff 00",
        "05 15 01",
        "15",
        "1c 01",
        "0b 00",
        "1d 00",
        "30 00",
        "03",
        "ff",
    ]:
        with failures.of(key), pytest.raises(InvalidKey, match="was not made by pack"):
            unpack(bytes.fromhex(key))
    failures.check()


def test_a_subspace_unpacks_its_keys_and_refuses_others() -> None:
    jobs = Subspace("q").at("jobs")
    assert jobs.unpack(jobs.key(7, True)) == (7, True)
    assert jobs.key(7) in jobs
    assert Subspace("q").key("jobless") not in jobs
    with pytest.raises(InvalidKey, match="outside"):
        jobs.unpack(Subspace("q").key("jobless"))


def test_a_subspace_range_excludes_the_prefix_itself() -> None:
    subspace = Subspace("a")
    begin, end = subspace.range(1)
    assert not begin <= subspace.key(1) < end
    assert begin <= subspace.key(1, None) < end
    assert not begin <= subspace.key(2) < end


def test_a_subspace_shows_its_prefix() -> None:
    assert repr(Subspace("a")) == "Subspace(b'\\x02a\\x00')"


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"a", b"b"), (b"a\xff", b"b"), (b"a\xfe\xff\xff", b"a\xff"), (b"\x00", b"\x01")]
)
def test_a_prefix_range_ends_before_the_next_prefix(prefix: bytes, end: bytes) -> None:
    assert prefix_range(prefix) == (prefix, end)


@pytest.mark.parametrize("prefix", [b"", b"\xff", b"\xff\xff"], ids=repr)
def test_a_prefix_without_a_successor_ends_after_the_longest_key(prefix: bytes) -> None:
    begin, end = prefix_range(prefix)
    assert begin == prefix
    assert end > b"\xff" * limits.KEY_BYTES_MAX


@pytest.mark.parametrize("key", ["text", None, 5, bytearray(b"\x14")])
def test_only_bytes_are_unpacked(key: Any) -> None:
    with pytest.raises(InvalidKey, match="bytes"):
        unpack(key)
