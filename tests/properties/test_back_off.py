"""The back-off between retries: bounded, growing up to its maximum, and the same whenever it is computed."""

from hypothesis import given
from hypothesis import strategies as st

from fastness.layers.queues.failures import retry_delay_ms
from fastness.limits import DELAY_SECONDS_MAX, RETRY_FACTOR_MAX
from fastness.wire.queues import QueuePolicy
from fastness.wire.stored_messages import StoredMessage

delays = st.floats(0, DELAY_SECONDS_MAX)
policies = st.builds(
    QueuePolicy,
    retry_delay_seconds=delays,
    retry_factor=st.floats(1, RETRY_FACTOR_MAX),
    retry_delay_max_seconds=delays,
    retry_jitter=st.floats(0, 1),
)
ids = st.binary(min_size=16, max_size=16)
failures = st.integers(1, 3) | st.integers(1, 1_000_000)
own_delays_ms = st.none() | st.integers(0, round(DELAY_SECONDS_MAX * 1_000))


def failed(id: bytes, failures: int, own_delay_ms: int | None = None) -> StoredMessage:
    return StoredMessage(
        id=id,
        fence=0,
        attempts=0,
        ttl_at_ms=0,
        has_failures=False,
        stateful=False,
        is_special=False,
        payload=b"",
        blob=None,
        size=0,
        content_type="",
        attributes={},
        correlation_id="",
        job=None,
        priority=5,
        group=None,
        created_ms=0,
        max_attempts=1,
        visibility_ms=1,
        failures=failures,
        retry_delay_ms=own_delay_ms,
    )


@given(policies, ids, failures, own_delays_ms)
def test_a_back_off_is_within_its_bounds(policy: QueuePolicy, id: bytes, count: int, own_ms: int | None) -> None:
    delay_ms = retry_delay_ms(policy, failed(id, count, own_ms))
    first = policy.retry_delay_seconds * 1_000 if own_ms is None else own_ms
    longest_ms = policy.retry_delay_max_seconds * 1_000
    assert delay_ms <= longest_ms * (1 + policy.retry_jitter) + 1
    assert delay_ms >= min(first, longest_ms) * (1 - policy.retry_jitter) - 1
    if not first:
        assert delay_ms == 0
    if count == 1:
        assert delay_ms <= first * (1 + policy.retry_jitter) + 1
    assert delay_ms == retry_delay_ms(policy, failed(id, count, own_ms))


@given(policies, ids, failures)
def test_a_back_off_grows_by_its_factor_up_to_its_maximum(policy: QueuePolicy, id: bytes, count: int) -> None:
    still = QueuePolicy(
        retry_delay_seconds=policy.retry_delay_seconds,
        retry_factor=policy.retry_factor,
        retry_delay_max_seconds=policy.retry_delay_max_seconds,
        retry_jitter=0,
    )
    delay_ms, next_ms = (retry_delay_ms(still, failed(id, each)) for each in (count, count + 1))
    grown_ms = min((delay_ms + 1) * policy.retry_factor, policy.retry_delay_max_seconds * 1_000)
    assert delay_ms <= next_ms <= grown_ms + 1


@given(st.lists(ids, min_size=50, max_size=50, unique=True))
def test_messages_that_fail_together_are_spread(some: list[bytes]) -> None:
    policy = QueuePolicy(retry_delay_seconds=1_000, retry_delay_max_seconds=1_000, retry_jitter=0.5)
    found = {retry_delay_ms(policy, failed(id, 1)) for id in some}
    assert len(found) > 40
    assert max(found) - min(found) > 200_000
