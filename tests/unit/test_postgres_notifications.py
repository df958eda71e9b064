"""What a notification says of a commit, and what is read from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness.backends.memory import Pairs
from fastness.backends.postgres.notifications import is_own, notification, notified_ranges
from fastness.clock import IdSource
from fastness.kv import Transaction
from fastness.limits import NOTIFY_BYTES_MAX
from fastness.testing.clock import ManualClock

keys = st.binary(min_size=1, max_size=100)
bounds = st.tuples(keys, keys).map(sorted).filter(lambda pair: pair[0] != pair[1])


def is_in(key: bytes, ranges: list[tuple[bytes, bytes]]) -> bool:
    return any(begin <= key < end for begin, end in ranges)


@given(
    st.dictionaries(keys, st.none() | st.just(b"value"), max_size=200),
    st.lists(bounds, max_size=3),
)
def test_a_notification_covers_every_change(writes: dict[bytes, bytes | None], cleared: list[list[bytes]]) -> None:
    tx = Transaction(Pairs(), clock=ManualClock(), ids=IdSource(), writer="me")
    tx.writes, tx.cleared = dict(writes), tuple((begin, end) for begin, end in cleared)
    payload = notification(tx, "me").decode()
    assert len(payload) <= NOTIFY_BYTES_MAX + len("me:")
    assert is_own(payload, "me")
    assert not is_own(payload, "m")
    ranges = notified_ranges(payload)
    if ranges is None:
        return
    changed, deleted = ranges
    for key, value in writes.items():
        assert is_in(key, changed) or (value is None and is_in(key, deleted))
    for begin, _ in cleared:
        assert is_in(begin, changed + deleted)
    if not any(value is not None for value in writes.values()):
        assert changed == []


@pytest.mark.parametrize("payload", ["", "me", "me:*", "me:xyz", "me:-xyz", "me:61,*", "*"])
def test_anything_else_means_that_every_key_may_have_changed(payload: str) -> None:
    assert notified_ranges(payload) is None


def test_empty_parts_are_ignored() -> None:
    assert notified_ranges("me:") == notified_ranges("me:-") == notified_ranges("me:,-,") == ([], [])
