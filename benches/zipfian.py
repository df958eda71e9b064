"""YCSB's distributions of keys, drawn from a given random generator, so that a seed repeats the sequence.

    uniform   every key is equally likely
    zipfian   the key of rank r has a probability proportional to 1 / r ** 0.99; hot keys are spread over the key space
    latest    zipfian, from the newest key backwards
    hotspot   a share of the keys gets nine tenths of the draws

There are as many ranks as keys. YCSB's own scrambled generator draws from ten billion ranks and folds them onto the
keys, which makes a small key space nearly uniform; these choosers are meant to cause contention.
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
    """A chooser among `count` keys, all equally likely."""
    draw = generator.random
    return lambda: int(draw() * count)


def zipfian(count: int, generator: random.Random) -> Chooser:
    """A chooser among `count` keys: few of them often, most rarely. The hot keys are the same for every generator."""
    ranks, keys, draw = Ranks(count), hash_order(count), generator.random
    return lambda: keys[ranks.at(draw())]


def latest(count: Callable[[], int], generator: random.Random) -> Chooser:
    """A chooser among `count()` keys, the newest most often; the count may grow between draws."""
    ranks, draw = Ranks(count()), generator.random

    def choose() -> int:
        ranks.grow(count())
        return ranks.count - 1 - ranks.at(draw())

    return choose


def hotspot(count: int, generator: random.Random, *, hot: float) -> Chooser:
    """A chooser that gives a share `hot` of the keys HOT_DRAWS of the draws."""
    keys, draw = hash_order(count), generator.random
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
        if count > 2:  # The first two ranks do not need it.
            self._slope = (1 - (2 / count) ** (1 - self._theta)) / (1 - self._first_two / self._sum)

    def at(self, draw: float) -> int:
        """The rank of a draw between 0 and 1."""
        share = draw * self._sum
        if share < 1:
            return 0
        if share < self._first_two:
            return 1
        rank = int(self.count * (self._slope * draw - self._slope + 1) ** self._power)
        return min(rank, self.count - 1)  # A draw close to 1 may be rounded up.


@lru_cache(maxsize=8)
def hash_order(count: int) -> tuple[int, ...]:
    """The keys below `count` in the order of their hashes, so that adjacent ranks are not adjacent keys."""
    return tuple(sorted(range(count), key=fnv1a))


def fnv1a(number: int) -> int:
    """The 64-bit FNV-1a hash of a number's eight bytes."""
    hashed = _FNV_OFFSET
    for byte in number.to_bytes(8, "little"):
        hashed = (hashed ^ byte) * _FNV_PRIME & _LOW_64
    return hashed
