"""Keys sort like their values, for every type and every mix of types."""

import random
import uuid
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastness.errors import InvalidKey
from fastness.kv import Subspace, pack, unpack

BOUND = 2**64
RANKS = {type(None): 0, bytes: 1, str: 2, tuple: 3, int: 4, bool: 5, uuid.UUID: 6}
EDGES = sorted({sign * (2**bits + step) for bits in range(0, 65, 8) for step in (-1, 0, 1) for sign in (1, -1)})
INTEGER_EDGES = [edge for edge in EDGES if abs(edge) < BOUND]

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.text("\x00\x01a\x7f\x80\u07ff\uffff\U00010000\U0010ffff")
datas = st.binary(max_size=20) | st.text("\x00\x01\xfe\xff", max_size=4).map(lambda text: text.encode("latin-1"))
integers = st.integers(1 - BOUND, BOUND - 1) | st.sampled_from(INTEGER_EDGES) | st.integers(-300, 300)
leaves = st.none() | st.booleans() | integers | st.uuids() | datas | texts


def tuples_of(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, max_size=4).map(tuple)


deep_1 = leaves | tuples_of(leaves)
deep_2 = leaves | tuples_of(deep_1)
elements = leaves | tuples_of(deep_2)
tuples = tuples_of(elements)


def order(element: Any) -> tuple[int, Any]:
    """A sort key for an element, independent of the encoding; equal only for the same value of the same type."""
    rank = RANKS[type(element)]
    if type(element) is str:
        return rank, [ord(character) for character in element]
    if type(element) is tuple:
        return rank, [order(inner) for inner in element]
    return rank, 0 if element is None else element


@given(tuples)
def test_a_tuple_is_unpacked_with_its_exact_types(elements: tuple[Any, ...]) -> None:
    assert order(unpack(pack(elements))) == order(elements)


@given(tuples, tuples)
def test_keys_sort_as_their_tuples_do(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    assert (pack(left) < pack(right)) == (order(left) < order(right))
    assert (pack(left) == pack(right)) == (order(left) == order(right))


@given(tuples, elements, elements, tuples)
def test_tuples_that_differ_in_one_element_sort_by_it(
    shared: tuple[Any, ...], left: Any, right: Any, rest: tuple[Any, ...]
) -> None:
    first, second = pack((*shared, left, *rest)), pack((*shared, right))
    assert (first < second) == (order((*shared, left, *rest)) < order((*shared, right)))


@given(integers, integers)
def test_integers_sort_across_every_length_and_sign(left: int, right: int) -> None:
    assert (pack((left,)) < pack((right,))) == (left < right)


@given(tuples, st.lists(elements, min_size=1, max_size=3))
def test_a_longer_tuple_is_in_the_range_of_its_prefix(prefix: tuple[Any, ...], more: list[Any]) -> None:
    begin, end = Subspace(*prefix).range()
    assert begin <= pack((*prefix, *more)) < end
    assert Subspace().range(*prefix) == (begin, end)


@given(tuples, st.data())
def test_nothing_else_is_in_the_range_of_a_prefix(prefix: tuple[Any, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(prefix)))
    other = (*prefix[:cut], *data.draw(tuples))
    begin, end = Subspace(*prefix).range()
    extends = len(other) > len(prefix) and order(other[: len(prefix)]) == order(prefix)
    assert (begin <= pack(other) < end) == extends


def similar_element(element: Any) -> Any:
    """Another element, whose encoding shares a prefix as long as possible with this one's."""
    if isinstance(element, bytes):
        return element + b"\x00"
    if isinstance(element, str):
        return element + "\x00"
    return (*element, None) if isinstance(element, tuple) else (element,)


@given(tuples, elements, tuples)
def test_a_longer_element_is_outside_the_range_of_its_prefix(
    shared: tuple[Any, ...], element: Any, more: tuple[Any, ...]
) -> None:
    begin, end = Subspace(*shared, element).range()
    assert not begin <= pack((*shared, similar_element(element), *more)) < end


@given(tuples, tuples, tuples)
def test_a_subspace_unpacks_what_it_packed(
    outer: tuple[Any, ...], inner: tuple[Any, ...], key: tuple[Any, ...]
) -> None:
    subspace = Subspace(*outer).at(*inner)
    assert subspace.key(*key) == pack((*outer, *inner, *key))
    assert subspace.key(*key) in subspace
    assert order(subspace.unpack(subspace.key(*key))) == order(key)


class IntSubclass(int):
    """A subclass of int, which keys do not support."""


garbage = st.recursive(
    elements
    | st.floats()
    | st.complex_numbers()
    | st.decimals()
    | st.text(st.characters())
    | st.integers(min_value=BOUND)
    | st.integers(max_value=-BOUND)
    | st.builds(object)
    | st.builds(bytearray, st.binary())
    | st.builds(memoryview, st.binary())  # type: ignore[arg-type]
    | st.builds(IntSubclass),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner) | inner.map(lambda x: (x,))
    ),
)


@given(garbage)
def test_pack_of_arbitrary_values_raises_only_invalid_key(value: Any) -> None:
    try:
        key = pack(value)
    except InvalidKey:
        return
    assert order(unpack(key)) == order(value)


@st.composite
def damaged_keys(draw: st.DrawFn) -> bytes:
    """A valid key with a few bytes changed, removed or added."""
    key = bytearray(pack(draw(tuples)))
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, len(key)))
        key[position : position + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(key)


@given(st.binary(max_size=30) | damaged_keys())
@example(b"\x16\x00\x01")
@example(b"\x15\x00")
@example(b"\x13\xff")
@example(b"\x0c" + b"\xff" * 8)
def test_unpack_accepts_only_packed_keys(key: bytes) -> None:
    try:
        elements = unpack(key)
    except InvalidKey:
        return
    assert pack(elements) == key


@given(st.binary(max_size=30) | damaged_keys())
def test_unpack_of_arbitrary_bytes_raises_only_invalid_key(key: bytes) -> None:
    try:
        elements = unpack(key)
    except InvalidKey:
        return
    assert order(unpack(pack(elements))) == order(elements)


def random_element(source: random.Random, depth: int) -> Any:
    kind = source.randrange(8 if depth else 7)
    if kind == 0:
        return source.choice((None, True, False))
    if kind == 1:
        return bytes(source.choices((0, 1, 254, 255), k=source.randrange(4)))
    if kind == 2:
        return "".join(source.choices("\x00\x01a\x7f\x80\u07ff\uffff\U00010000", k=source.randrange(4)))
    if kind == 3:
        return source.choice(INTEGER_EDGES)
    if kind == 4:
        return source.randrange(-300, 300)
    if kind == 5:
        return source.randrange(1 - BOUND, BOUND)
    if kind == 6:
        return uuid.UUID(int=source.getrandbits(128) >> source.choice((0, 64, 126)))
    return tuple(random_element(source, depth - 1) for _ in range(source.randrange(3)))


@pytest.mark.nightly
def test_a_million_neighbours_sort_as_their_tuples_do() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # pytest shows it if the test fails.
    source = random.Random(seed)
    for _ in range(100):
        batch = [tuple(random_element(source, 3) for _ in range(source.randrange(4))) for _ in range(10_001)]
        # An encoding is most likely to swap neighbours in value order.
        ordered = sorted((order(elements), pack(elements)) for elements in batch)
        for (left, left_key), (right, right_key) in pairwise(ordered):
            assert (left_key < right_key) == (left < right), (left, right)
