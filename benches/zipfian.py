"""Which key comes next, as YCSB chooses them, drawn from a generator that is given: a seed repeats.

    uniform   every key alike
    zipfian   the key of rank r with a probability in proportion to 1 / r ** 0.99, and hot keys lie anywhere
    latest    zipfian from the newest key backwards
    hotspot   a share of the keys gets nine tenths of the draws

Unlike YCSB's own scrambled generator, which draws from ten billion ranks and folds them onto the keys, ranks here are
as many as keys: folding makes a small key space nearly uniform, and contention is what these choosers are for.
"""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Final

THETA: Final = 0.99
HOT_DRAWS: Final = 0.9

_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_LOW_64: Final = (1 << 64) - 1

Chooser = Callable[[], int]  # The index of a key.


def uniform(count: int, generator: random.Random) -> Chooser:
    """Every one of `count` keys alike."""
    draw = generator.random
    return lambda: int(draw() * count)


def zipfian(count: int, generator: random.Random) -> Chooser:
    """Few of `count` keys often, most of them rarely; the same keys are the hot ones for everybody."""
    ranks, keys, draw = Ranks(count), scattered(count), generator.random
    return lambda: keys[ranks.at(draw())]


def latest(count: Callable[[], int], generator: random.Random) -> Chooser:
    """The newest of `count()` keys most often; the count may grow between draws."""
    ranks, draw = Ranks(count()), generator.random

    def choose() -> int:
        ranks.grow(count())
        return ranks.count - 1 - ranks.at(draw())

    return choose


def hotspot(count: int, generator: random.Random, *, hot: float) -> Chooser:
    """A share `hot` of the keys gets HOT_DRAWS of the draws, the others get the rest."""
    keys, draw = scattered(count), generator.random
    hot_count = max(1, min(round(count * hot), count - 1))

    def choose() -> int:
        if draw() < HOT_DRAWS:
            return keys[int(draw() * hot_count)]
        return keys[hot_count + int(draw() * (count - hot_count))]

    return choose


class Ranks:
    """Zipfian ranks from 0, by the method of Gray et al., "Quickly generating billion-record synthetic databases"."""

    def __init__(self, count: int, theta: float = THETA) -> None:
        self.count = 0
        self._theta = theta
        self._sum = 0.0  # Of 1 / r ** theta over all ranks.
        self._first_two = 1 + 0.5**theta
        self._power = 1 / (1 - theta)
        self._slope = 0.0
        self.grow(count)

    def grow(self, count: int) -> None:
        """Draw from `count` ranks from now on, if that is more than before."""
        if count <= self.count:
            return
        self._sum += sum(1 / rank**self._theta for rank in range(self.count + 1, count + 1))
        self.count = count
        if count > 2:  # The first two ranks are told apart without it.
            self._slope = (1 - (2 / count) ** (1 - self._theta)) / (1 - self._first_two / self._sum)

    def at(self, draw: float) -> int:
        """The rank that a draw from 0 to 1 falls on."""
        share = draw * self._sum
        if share < 1:
            return 0
        if share < self._first_two:
            return 1
        rank = int(self.count * (self._slope * draw - self._slope + 1) ** self._power)
        return min(rank, self.count - 1)  # A draw next to 1 may be rounded up.


@lru_cache(maxsize=8)
def scattered(count: int) -> tuple[int, ...]:
    """The keys 0 to `count` in the order of their hashes: neighbours in rank are no neighbours in the key space."""
    return tuple(sorted(range(count), key=fnv))


def fnv(number: int) -> int:
    """The 64-bit FNV-1a hash of a number's eight bytes."""
    hashed = _FNV_OFFSET
    for byte in number.to_bytes(8, "little"):
        hashed = (hashed ^ byte) * _FNV_PRIME & _LOW_64
    return hashed
