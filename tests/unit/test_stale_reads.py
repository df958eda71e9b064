"""The requests that a standby may serve."""

from typing import Any

import pytest

from fastness.plane.executor import Batch
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
    services: Any = None
    batch = Batch(services, None)
    for request in stale:
        batch.add(request, None)
    assert batch.may_be_stale
    batch.add(CheckLease(LeaseProof("key", "id", 1, None, "main")), None)
    assert not batch.may_be_stale
