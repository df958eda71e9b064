"""The requests that a standby may serve."""

from typing import Any

import pytest

from fastness.plane.batching import may_be_stale
from fastness.plane.operations import OPERATIONS
from fastness.wire.catalog import REQUESTS
from fastness.wire.leases import CheckLease, LeaseProof
from fastness.wire.queues import GetQueueStats, ListQueues
from fastness.wire.requests import Request, permission_of


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS if kind.operation.stale])
def test_a_stale_read_only_reads_and_never_waits(kind: type[Request[Any]]) -> None:
    assert kind in OPERATIONS
    assert kind.operation.reads, permission_of(kind)
    assert "wait_seconds" not in kind.__struct_fields__


def test_a_batch_with_a_read_that_must_be_current_is_current() -> None:
    stale: list[Request[Any]] = [ListQueues("", 10, "main"), GetQueueStats("jobs", "main")]
    assert may_be_stale(stale)
    assert not may_be_stale([*stale, CheckLease(LeaseProof("key", "id", 1, None, "main"))])
