"""The history of charts: rings that overwrite themselves, what a sample has, and the points of a chart."""

import asyncio
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastness.backends.memory import MemoryDatabase
from fastness.backends.postgres.parts import part_of, part_of_range
from fastness.kv import Database, Transaction
from fastness.layers import nodes, samples
from fastness.layers.samples import STEPS, SUBSPACE, StoredSample
from fastness.layers.worlds import first_elements
from fastness.limits import HISTORY_POINTS_MAX, HISTORY_QUEUES_MAX, HISTORY_RECORD_BYTES_MAX, KEY_BYTES_MAX
from fastness.server.console.history import History, NodeTotal, merged
from fastness.server.serving import history_node
from fastness.testing.clock import ManualClock

DAY_MS = 86_400_000


class Numbers:
    """The samples of a server whose counters grow by one with each sample."""

    def __init__(self, *, queues: int = 2, name: str = "jobs") -> None:
        self.calls = 0
        self.started_ms = 1
        self.queues = {("main", f"{name}-{number}"): {"ready": number, "put": 7.0} for number in range(queues)}

    async def full(self) -> tuple[dict[str, Any], Any]:
        self.calls += 1
        sample = {
            "started_ms": self.started_ms,
            "calls": float(self.calls),
            "rejects": {"token": 2.0, "busy": 1.0},
            "sync": [1.0, 2.0],
            "memory": 17,
            "queues": {"main": {"ready": self.calls % 5, "put": float(self.calls)}, "other": {"ready": 1}},
        }
        return sample, self.queues


def record(database: Database, numbers: Any, clock: ManualClock, *, node: str = "local", **options: Any) -> History:
    history = History(numbers, database, now_ms=clock.now_ms, **options)
    history.node = node
    return history


def run(history: History, clock: ManualClock, seconds: int, step_seconds: int = 10) -> None:
    async def store() -> None:
        for _ in range(seconds // step_seconds):
            await history.store()
            clock.advance_ms(step_seconds * 1_000)

    asyncio.run(store())


def points(history: History, seconds: float, queue: str | None = None, *, own: bool = False) -> list[dict[str, Any]]:
    return asyncio.run(history.points(seconds, "main", queue, own=own))[0]


def stored(database: Database) -> int:
    return len(database.read(Transaction.scan, *SUBSPACE.range(), limit=10_000))


def test_a_ring_keeps_a_day_and_no_more(clock: ManualClock) -> None:
    with MemoryDatabase(clock=clock) as database:
        history = record(database, Numbers(), clock)
        run(history, clock, 2 * 86_400, step_seconds=60)
        run(history, clock, 2 * 3_600)
        assert stored(database) == sum(count for _, count in STEPS) + 1
        hour, day = points(history, 3_600), points(history, 86_400)
        assert len(hour) == 360
        assert clock.now_ms() - hour[0]["at_ms"] == 3_600_000
        assert len(day) == HISTORY_POINTS_MAX
        assert DAY_MS - 180_000 <= clock.now_ms() - day[0]["at_ms"] <= DAY_MS
        assert [point["at_ms"] for point in day] == sorted(point["at_ms"] for point in day)


def test_a_sample_has_the_server_its_universes_and_its_queues(clock: ManualClock) -> None:
    with MemoryDatabase(clock=clock) as database:
        history = record(database, Numbers(), clock)
        run(history, clock, 20)
        newest = points(history, 300)[-1]
        assert newest == {
            "at_ms": clock.now_ms() - 10_000,
            "started_ms": 1,
            "calls": 2,
            "sync": [1, 2],
            "rejects": {"all": 3},
            "queues": {"main": {"ready": 2, "put": 2}},
        }
        assert points(history, 300, "jobs-1")[-1]["queues"] == {"main": {"ready": 1, "put": 7}}
        assert points(history, 300, "unknown")[-1]["queues"] == {}


def test_a_restart_continues_the_chart(database: Database, clock: ManualClock) -> None:
    run(record(database, Numbers(), clock), clock, 60)
    again = Numbers()
    again.started_ms = clock.now_ms()
    history = record(database, again, clock)
    run(history, clock, 60)
    found = points(history, 3_600)
    assert len(found) == 12
    assert {point["started_ms"] for point in found} == {1, again.started_ms}


def test_two_nodes_have_a_ring_each(database: Database, clock: ManualClock) -> None:
    one = record(database, Numbers(), clock, node="http://one:9440")
    other = record(database, Numbers(), clock, node="http://other:9440")
    run(one, clock, 30)
    run(other, clock, 20)
    assert (len(points(one, 3_600, own=True)), len(points(other, 3_600, own=True))) == (3, 2)
    clock.advance_ms(3 * DAY_MS)
    again = record(database, Numbers(), clock, node="http://other:9440")
    run(again, clock, 10)
    assert points(one, 86_400, own=True) == []
    assert database.read(first_elements, SUBSPACE, "", 10) == ["http://other:9440"]
    assert len(points(again, 86_400)) == 1
    assert database.read(nodes.list_nodes) == []


def test_servers_that_all_listen_at_one_address_have_a_ring_for_each_host(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for host in ("one", "other", "one", "h" * 10_000):  # The first one has started again.
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        names.append(history_node("http://0.0.0.0:9440"))
    assert names[0] == names[2]
    assert len(set(names)) == 3
    assert max(len(SUBSPACE.key(name, 1, 1_439)) for name in names) < KEY_BYTES_MAX
    histories = [record(database, Numbers(), clock, node=name) for name in names[:2]]
    for _ in range(3):
        for history in histories:
            asyncio.run(history.store())
        clock.advance_ms(10_000)
    found, servers = asyncio.run(histories[0].points(3_600, "main", None))
    assert servers == 2
    assert found[-1]["calls"] - found[0]["calls"] == 4, "each had two more calls"


def test_a_chart_has_the_servers_that_have_stored_a_sample_last(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastness.server.console.history.HISTORY_NODES_MAX", 2)
    histories = []
    for name in ("a", "c", "b"):
        histories.append(record(database, Numbers(), clock, node=name))
        run(histories[-1], clock, 10)
    assert database.read(samples.nodes) == ["b", "c", "a"]
    assert histories[-1]._nodes() == ["b", "c"]


class Depths(Numbers):
    """The samples of a server whose queues have these depths, one after the other."""

    def __init__(self, *depths: int) -> None:
        super().__init__()
        self._depths = list(depths)

    async def full(self) -> tuple[dict[str, Any], Any]:
        sample, _ = await super().full()
        depth, number = self._depths.pop(0), self.calls
        queue = {"ready": depth, "oldest": depth / 2, "put": float(number)}
        return sample | {"queues": {"main": dict(queue)}}, {("main", "jobs" if depth else "quiet"): queue}


def test_a_slot_has_the_peaks_of_its_minute(clock: ManualClock) -> None:
    with MemoryDatabase(clock=clock) as database:
        clock.advance_ms(60_000 - clock.now_ms() % 60_000)
        history = record(database, Depths(0, 0, 900, 3, 0, 1, 2, 0, 0, 0, 0, 0, 5), clock)
        run(history, clock, 120)
        first, second = (point["queues"]["main"] for point in points(history, 86_400))
        assert first == {"ready": 900, "oldest": 450, "put": 6}
        assert second == {"ready": 2, "oldest": 1, "put": 12}
        of_queue = [point["queues"]["main"] for point in points(history, 86_400, "jobs")]
        assert of_queue == [{"ready": 900, "oldest": 450, "put": 6}, {"ready": 2, "oldest": 1, "put": 7}]
        assert [point["queues"]["main"].get("ready", 0) for point in points(history, 3_600)][:4] == [0, 0, 900, 3]

        run(history, clock, 10)  # A server that starts again in the middle of a minute keeps the peak,
        again = Depths(1)
        again.started_ms = clock.now_ms()
        run(record(database, again, clock), clock, 10)
        last = points(history, 86_400)[-1]
        assert last["queues"]["main"] == {"ready": 5, "oldest": 2.5, "put": 1}  # not the counters.
        assert last["started_ms"] == again.started_ms


numbers = st.integers(0, 20)
server = st.lists(st.one_of(st.none(), st.just("restart"), st.tuples(numbers, numbers)), min_size=1, max_size=8)


@given(st.lists(server, min_size=2, max_size=3))
def test_charts_add_up_the_calls_of_all_servers_and_take_queues_once(servers: list[list[Any]]) -> None:
    """Of each step, a server has a sample with more calls and a depth, or none, or it has started again."""
    total = NodeTotal(10_000, since_ms=1_000)
    calls_of_step: Counter[int] = Counter()
    depth_of_step: Counter[int] = Counter()
    steps = set()
    for node, samples_of_node in enumerate(servers):
        began = 1_000 + node
        own, calls = [], 0
        late = 0  # Calls since the last sample.
        for step, sample in enumerate(samples_of_node):
            if sample == "restart":
                began, calls, late = began + 10, 0, 0
            elif sample is not None:
                grown, depth = sample
                calls += grown
                late += grown
                point = {"at_ms": step * 10_000 + node, "started_ms": began, "calls": calls, "sync": [calls, 2 * calls]}
                own.append(point | {"rejects": {"all": calls}, "queues": {"main": {"ready": depth}}})
                calls_of_step[step] += late
                depth_of_step[step] = max(depth_of_step[step], depth)
                steps.add(step)
                late = 0
        if own:
            total.add(own)
    found = total.points()
    assert [point["at_ms"] // 10_000 for point in found] == sorted(steps)
    sums = list(accumulate(calls_of_step[step] for step in sorted(steps)))
    assert [point["calls"] for point in found] == [point["rejects"]["all"] for point in found] == sums
    assert [point["sync"] for point in found] == [[calls, 2 * calls] for calls in sums]
    assert [point["queues"]["main"]["ready"] for point in found] == [depth_of_step[step] for step in sorted(steps)]
    assert len({point["started_ms"] for point in found}) <= 1


def test_calls_before_a_chart_are_not_in_it() -> None:
    total = NodeTotal(10_000, since_ms=50_000)
    for started_ms in (1_000, 55_000):  # One that ran before, and one that has started since.
        total.add(
            [
                {"at_ms": at_ms, "started_ms": started_ms, "calls": calls, "queues": {}}
                for at_ms, calls in ((60_000, 7), (70_000, 9))
            ]
        )
    assert [point["calls"] for point in total.points()] == [7, 11]


def test_a_short_history_has_no_ring_of_a_day(clock: ManualClock) -> None:
    with MemoryDatabase(clock=clock) as database:
        history = record(database, Numbers(), clock, seconds=3_600)
        run(history, clock, 7_200)
        assert stored(database) == STEPS[0][1] + 1
        assert len(points(history, 86_400)) == 360


def test_a_clock_that_is_set_back_hides_the_future(clock: ManualClock) -> None:
    with MemoryDatabase(clock=clock) as database:
        times = [clock.now_ms() + 600_000, clock.now_ms()]
        history = History(Numbers(), database, now_ms=lambda: times[0])  # type: ignore[arg-type]
        asyncio.run(history.store())
        times.pop(0)
        asyncio.run(history.store())
        assert [point["at_ms"] for point in points(history, 3_600)] == times


@pytest.mark.parametrize("name", ["short", "n" * 200])
def test_a_sample_is_bounded_and_keeps_the_largest_queues(clock: ManualClock, name: str) -> None:
    with MemoryDatabase(clock=clock) as database:
        history = record(database, Numbers(queues=2_000, name=name), clock)
        run(history, clock, 10)
        sizes = [len(value) for _, value in database.read(Transaction.scan, *SUBSPACE.range(), limit=10)]
        assert max(sizes) <= HISTORY_RECORD_BYTES_MAX
        (found,) = database.read(samples.read, "local", 0, since_ms=0, until_ms=clock.now_ms())
        kept = found.queues["main"]
        assert len(kept) == HISTORY_QUEUES_MAX
        assert f"{name}-1999" in kept
        assert f"{name}-0" not in kept


def test_a_sample_with_long_names_keeps_fewer_queues(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.layers.samples.HISTORY_RECORD_BYTES_MAX", 2_000)
    with MemoryDatabase(clock=clock) as database:
        run(record(database, Numbers(queues=100), clock), clock, 10)
        (found,) = database.read(samples.read, "local", 0, since_ms=0, until_ms=clock.now_ms())
        assert 0 < len(found.queues["main"]) < 100
    monkeypatch.setattr("fastness.layers.samples.HISTORY_RECORD_BYTES_MAX", 10)
    with MemoryDatabase(clock=clock) as database:
        run(record(database, Numbers(), clock), clock, 10)
        (found,) = database.read(samples.read, "local", 0, since_ms=0, until_ms=clock.now_ms())
        assert (found.queues, found.universes, found.numbers["calls"]) == ({}, {}, 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2])), max_size=30), st.integers(2, 5))
def test_merged_points_have_the_largest_depth_and_the_last_counter(
    given_points: list[tuple[int, int]], together: int
) -> None:
    given_points.sort(key=lambda each: each[1])
    original: list[dict[str, Any]] = [
        {"at_ms": number, "started_ms": started, "queues": {"main": {"ready": ready, "put": number} if ready else {}}}
        for number, (ready, started) in enumerate(given_points)
    ]
    found = merged(original, together)
    for started in (1, 2):
        own = [point for point in original if point["started_ms"] == started]
        groups = [own[begin : begin + together] for begin in range(0, len(own), together)]
        expected = [
            (
                group[-1]["at_ms"],
                max(point["queues"]["main"].get("ready", 0) for point in group),
                max(point["queues"]["main"].get("put", 0) for point in group),
            )
            for group in groups
        ]
        assert [
            (point["at_ms"], point["queues"]["main"].get("ready", 0), point["queues"]["main"].get("put", 0))
            for point in found
            if point["started_ms"] == started
        ] == expected


def test_samples_belong_to_the_part_of_the_nodes() -> None:
    key = SUBSPACE.key("http://one:9440", 1, 1_439)
    assert part_of(key) == part_of_range(*SUBSPACE.range("local", 0)) == nodes.ALL
    assert StoredSample(1, 2, {}).queues == {}
