"""The key choosers of the benchmarks have the distributions of their names."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from benches import zipfian

KEYS = 1_000
DRAWS = 50_000


Chooser = Callable[[], int]

CHOOSERS: dict[str, Callable[[random.Random], Chooser]] = {
    "uniform": lambda generator: zipfian.uniform(KEYS, generator),
    "zipfian": lambda generator: zipfian.zipfian(KEYS, generator),
    "latest": lambda generator: zipfian.latest(lambda: KEYS, generator),
    "hotspot": lambda generator: zipfian.hotspot(KEYS, generator, hot=0.1),
}


def draw_counts(chooser: Chooser, draws: int = DRAWS) -> Counter[int]:
    return Counter(chooser() for _ in range(draws))


def share_of_hottest(counts: Counter[int], keys: int) -> float:
    return sum(count for _, count in counts.most_common(keys)) / counts.total()


@pytest.mark.parametrize("name", CHOOSERS)
def test_draws_are_keys_and_repeat_with_the_same_seed(name: str) -> None:
    first, second = (CHOOSERS[name](random.Random(7)) for _ in range(2))
    draws = [first() for _ in range(5_000)]
    assert draws == [second() for _ in range(5_000)]
    assert min(draws) >= 0
    assert max(draws) < KEYS


@pytest.mark.parametrize("name", CHOOSERS)
def test_another_seed_draws_other_keys(name: str) -> None:
    first, second = (CHOOSERS[name](random.Random(seed)) for seed in (7, 8))
    assert [first() for _ in range(100)] != [second() for _ in range(100)]


def test_uniform_has_no_preference() -> None:
    counts = draw_counts(zipfian.uniform(KEYS, random.Random(1)))
    assert len(counts) == KEYS
    assert max(counts.values()) < 3 * DRAWS / KEYS


def test_zipfian_ranks_follow_the_power_law() -> None:
    ranks, generator = zipfian.Ranks(KEYS), random.Random(1)
    counts = draw_counts(lambda: ranks.at(generator.random()))
    total = sum(1 / rank**0.99 for rank in range(1, KEYS + 1))
    for rank in (0, 1, 9, 99):
        expected = DRAWS / (rank + 1) ** 0.99 / total
        assert expected / 1.5 < counts[rank] < expected * 1.5


def test_a_tenth_of_the_keys_gets_two_thirds_of_a_zipfian_workload() -> None:
    share = share_of_hottest(draw_counts(zipfian.zipfian(KEYS, random.Random(1))), KEYS // 10)
    assert 0.6 < share < 0.8


def test_zipfian_hot_keys_are_spread_and_the_same_for_every_seed() -> None:
    hottest = [key for key, _ in draw_counts(zipfian.zipfian(KEYS, random.Random(1))).most_common(10)]
    assert max(hottest) - min(hottest) > KEYS / 3
    others = [key for key, _ in draw_counts(zipfian.zipfian(KEYS, random.Random(2))).most_common(10)]
    assert hottest[:3] == others[:3]


def test_hash_order_contains_every_key() -> None:
    assert sorted(zipfian.hash_order(KEYS)) == list(range(KEYS))


def test_latest_prefers_the_newest_key_while_keys_are_inserted() -> None:
    newest = KEYS
    choose = zipfian.latest(lambda: newest, random.Random(1))
    assert draw_counts(choose).most_common(1)[0][0] == KEYS - 1
    newest = 2 * KEYS
    later = draw_counts(choose)
    assert later.most_common(1)[0][0] == 2 * KEYS - 1
    assert sum(count for key, count in later.items() if key >= KEYS) > 0.8 * DRAWS


def test_grown_ranks_equal_ranks_created_at_that_size() -> None:
    grown, made = zipfian.Ranks(10), zipfian.Ranks(KEYS)
    grown.grow(KEYS)
    grown.grow(5)
    draws = [step / 1_000 for step in range(1_000)]
    assert [grown.at(draw) for draw in draws] == [made.at(draw) for draw in draws]


def test_draw_close_to_one_is_a_valid_rank() -> None:
    assert zipfian.Ranks(KEYS).at(1 - 2**-53) == KEYS - 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_choosers_work_with_few_keys(count: int) -> None:
    for chooser in (zipfian.zipfian(count, random.Random(1)), zipfian.latest(lambda: count, random.Random(1))):
        assert set(draw_counts(chooser, 1_000)) == set(range(count))


def test_a_hotspot_gets_nine_tenths_of_the_draws() -> None:
    counts = draw_counts(zipfian.hotspot(KEYS, random.Random(1), hot=0.1))
    assert 0.88 < share_of_hottest(counts, KEYS // 10) < 0.93


def test_the_hash_is_fnv_1a() -> None:
    assert zipfian.fnv1a(0) == 0xA8C7F832281A39C5
