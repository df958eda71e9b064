"""Rate limits: token buckets per caller, in bounded memory."""

from fastness.runtime.rate_limits import RateLimiter
from fastness.testing.clock import ManualClock


def test_a_bucket_refills_up_to_its_burst(clock: ManualClock) -> None:
    rate_limiter = RateLimiter(10.0, 5, callers_max=100, clock=clock)
    assert [rate_limiter.wait_ms("a") for _ in range(6)] == [0] * 5 + [100]
    clock.advance_ms(100)
    assert [rate_limiter.wait_ms("a") for _ in range(2)] == [0, 100]
    clock.advance_ms(60_000)
    assert [rate_limiter.wait_ms("a") for _ in range(6)] == [0] * 5 + [100]
    assert [RateLimiter(0.0, 1, callers_max=1, clock=clock).wait_ms("a") for _ in range(100)] == [0] * 100


def test_buckets_are_pruned_and_bounded(clock: ManualClock) -> None:
    rate_limiter = RateLimiter(10.0, 5, callers_max=1_000, clock=clock)
    for number in range(5_000):
        assert rate_limiter.wait_ms(number) == 0
    assert len(rate_limiter) <= 1_000
    clock.advance_ms(1_000)
    for _ in range(600):
        rate_limiter.wait_ms("a")
    assert len(rate_limiter) == 1, "idle callers are removed"
