"""Clocks, and ids that increase whatever the clock does."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness import clock as fastness_clock
from fastness.backends.memory import MemoryDatabase
from fastness.clock import IdSource, SystemClock
from fastness.errors import InvalidArgument, LeaseHeld
from fastness.layers import leases
from fastness.layers.leases import LeaseKey
from fastness.limits import CLOCK_SLEW_PPM_MAX
from fastness.testing.clock import START_MS, ManualClock

MILLISECOND = 1_000_000
SECOND = 1_000_000_000


def is_increasing(ids: list[uuid.UUID]) -> bool:
    return all(left < right and left.bytes < right.bytes for left, right in pairwise(ids))


class MachineClocks:
    """The two clocks of an operating system."""

    def __init__(self) -> None:
        self.wall_ns = START_MS * MILLISECOND
        self.elapsed_ns = 12_345 * SECOND

    def clock(self) -> SystemClock:
        return SystemClock(wall_ns=lambda: self.wall_ns, elapsed_ns=lambda: self.elapsed_ns)

    def pass_ns(self, ns: int) -> None:
        self.wall_ns += ns
        self.elapsed_ns += ns

    def set_wall(self, by_ns: int) -> None:
        self.wall_ns += by_ns


def test_the_system_clock_returns_the_machine_time() -> None:
    clock, other = SystemClock(), SystemClock()
    before_ms = time.time_ns() // 1_000_000
    now_ms = clock.now_ms()
    assert before_ms - 100 <= now_ms <= time.time_ns() // 1_000_000 + 100
    assert clock.now_ms() <= other.now_ms() <= clock.now_ms() + 100  # All of a process agree.


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 10 * SECOND) | st.integers(0, 30 * 86_400 * SECOND),
            st.just(0) | st.integers(-10 * SECOND, 10 * SECOND) | st.integers(-(10**18), 10**18),
        ),
        max_size=40,
    )
)
def test_the_system_clock_never_goes_back_and_counts_the_time_that_passes(steps: list[tuple[int, int]]) -> None:
    machine = MachineClocks()
    clock = machine.clock()
    before_ms = clock.now_ms()
    assert before_ms == START_MS
    for passed_ns, set_by_ns in steps:
        machine.pass_ns(passed_ns)
        machine.set_wall(set_by_ns)
        now_ms = clock.now_ms()
        off_ms = abs(now_ms - before_ms - passed_ns // MILLISECOND)
        assert now_ms >= before_ms
        assert off_ms <= min(passed_ns, SECOND) * CLOCK_SLEW_PPM_MAX // 1_000_000 // MILLISECOND + 2
        before_ms = now_ms


@pytest.mark.parametrize("set_by_ms", [-3_000, -5, 5, 3_000])
def test_the_system_clock_approaches_a_wall_clock_that_was_set(
    set_by_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine = MachineClocks()
    clock = machine.clock()
    machine.set_wall(set_by_ms * MILLISECOND)
    differences = []
    for _ in range(abs(set_by_ms) + 5):
        machine.pass_ns(SECOND)
        differences.append(machine.wall_ns // MILLISECOND - clock.now_ms())
    assert abs(differences[0]) >= abs(set_by_ms) - 2
    assert abs(differences[-1]) <= 1
    assert all(abs(after) <= abs(before) + 1 for before, after in pairwise(differences))
    logged = [record.getMessage() for record in caplog.records if record.name == "fastness.clock"]
    assert len(logged) == (1 if abs(set_by_ms) > 1_000 else 0)
    assert all(f"{set_by_ms / 1_000:+.1f} s" in line and "restart the process" in line for line in logged)


@pytest.mark.parametrize("set_by_seconds", [-86_400, -60, 60, 86_400])
def test_leases_last_their_ttl_when_the_machine_clock_is_set(set_by_seconds: int) -> None:
    machine = MachineClocks()
    with MemoryDatabase(clock=machine.clock()) as database:
        job = LeaseKey("main", "deploy")
        database.transact(leases.acquire, job, owner="ada", ttl_ms=30_000)
        machine.set_wall(set_by_seconds * SECOND)
        for _ in range(29):
            machine.pass_ns(SECOND)
            with pytest.raises(LeaseHeld):
                database.transact(leases.acquire, job, owner="bob", ttl_ms=30_000)
        machine.pass_ns(2 * SECOND)
        database.transact(leases.acquire, job, owner="bob", ttl_ms=30_000)


def test_time_passes_while_the_machine_is_suspended() -> None:
    machine = MachineClocks()
    clock = machine.clock()
    machine.pass_ns(3_600 * SECOND)  # CLOCK_BOOTTIME goes on, unlike CLOCK_MONOTONIC.
    assert clock.now_ms() == START_MS + 3_600_000
    assert fastness_clock._elapsed_ns.args == (time.CLOCK_BOOTTIME,)


def test_a_manual_clock_changes_only_when_moved(clock: ManualClock) -> None:
    assert clock.now_ms() == clock.now_ms() == START_MS
    clock.advance_ms(7)
    assert clock.now_ms() == START_MS + 7
    clock.jump_to_ms(5)
    assert clock.now_ms() == 5


def test_a_manual_clock_advances_forward_only(clock: ManualClock) -> None:
    with pytest.raises(InvalidArgument, match="jump_to_ms"):
        clock.advance_ms(-1)
    assert clock.now_ms() == START_MS


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_ids_increase_while_the_clock_stops(seed: int | None) -> None:
    source = IdSource(seed)
    assert is_increasing([source.new_id(START_MS) for _ in range(10_000)])


def test_ids_increase_while_the_clock_goes_forward_and_back() -> None:
    source = IdSource()
    times_ms = [START_MS, START_MS + 5, START_MS - 60_000, START_MS + 4, START_MS + 5, START_MS + 6, 0, START_MS + 7]
    assert is_increasing([source.new_id(time_ms) for time_ms in times_ms for _ in range(100)])


def test_an_id_carries_its_time_in_its_first_48_bits() -> None:
    source = IdSource()
    assert source.new_id(START_MS).int >> 80 == START_MS
    assert source.new_id(START_MS - 1).int >> 80 == START_MS  # Time goes back, ids do not.
    assert source.new_id(2**48 - 1).int >> 80 == 2**48 - 1


def test_ids_of_a_full_millisecond_use_the_next_timestamp() -> None:
    source = IdSource()
    ids = [source.new_id(START_MS)]
    source._left = 0  # As after about 2**30 ids.
    ids += [source.new_id(START_MS) for _ in range(3)]
    assert is_increasing(ids)
    assert [made.int >> 80 for made in ids] == [START_MS, *[START_MS + 1] * 3]


def test_every_id_is_a_uuid_of_version_7() -> None:
    source = IdSource()
    ids = [source.new_id(START_MS + number // 10) for number in range(1_000)]
    assert {made.version for made in ids} == {7}
    assert {made.variant for made in ids} == {uuid.RFC_4122}


def test_every_bit_but_the_fixed_ones_is_random() -> None:
    source = IdSource()
    seen = 0
    for number in range(200):
        seen |= source.new_id(START_MS + number).int
    assert seen & (1 << 62) - 1 == (1 << 61) - 1  # The top bit starts clear, which leaves space to increase.
    assert seen >> 64 & 0xFFF == 0xFFF


def test_a_seed_determines_the_ids() -> None:
    first, again, other = IdSource(seed=1), IdSource(seed=1), IdSource(seed=2)
    ids = [first.new_id(START_MS + number // 3) for number in range(100)]
    assert ids == [again.new_id(START_MS + number // 3) for number in range(100)]
    assert not set(ids) & {other.new_id(START_MS + number // 3) for number in range(100)}


def test_two_sources_without_a_seed_do_not_collide() -> None:
    left, right = IdSource(), IdSource()
    assert not {left.new_id(START_MS) for _ in range(1_000)} & {right.new_id(START_MS) for _ in range(1_000)}


def test_ids_of_many_threads_increase_and_never_repeat() -> None:
    source = IdSource()
    with ThreadPoolExecutor(8) as threads:
        series = list(threads.map(lambda _: [source.new_id(START_MS) for _ in range(2_000)], range(8)))
    assert all(is_increasing(ids) for ids in series)
    assert len({made for ids in series for made in ids}) == 16_000
