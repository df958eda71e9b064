"""Histograms that are cheap enough to update on every call."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Final

SECONDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    30.0,
)
DWELL_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    900.0,
    3_600.0,
    21_600.0,
    86_400.0,
)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 4_096)

Record = Callable[[float, int], None]  # Gets a value, and how often it was seen.
# The function that also gets the values of the histogram with this name, these bounds and labels, or None.
Recorder = Callable[[str, Sequence[float], Mapping[str, str]], Record | None]


def no_recorder(name: str, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
    """Record the values of no histogram."""
    del name, bounds, labels


class Histogram:
    """Counts of values by bucket. Not thread-safe. `record`, if any, also gets every value."""

    __slots__ = ("bounds", "counts", "record", "sum")

    def __init__(self, bounds: Sequence[float], record: Record | None = None) -> None:
        self.bounds = bounds
        self.record = record
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        if self.record is not None:
            self.record(value, times)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus expects them."""
        total, rows = 0, []
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows
