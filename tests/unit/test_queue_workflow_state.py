"""The workflow state of queue messages, and the lease on it, on every backend."""

from typing import Any

import cbor2
import pytest

from fastness.errors import (
    LeaseConflict,
    LeaseExpired,
    LeaseRequired,
)
from fastness.kv import Database
from fastness.layers import leases, queues, states
from fastness.layers.leases import LeaseKey
from fastness.layers.queues import Leased, QueueKey, StoredMessage
from fastness.testing.clock import ManualClock
from tests.unit.queue_calls import (
    DEAD,
    JOBS,
    ack,
    extend,
    lease,
    lease_one,
    lease_or_wait,
    nack,
    process_due,
    put,
    reject,
    remaining_keys,
)


def state_of(database: Database, message: StoredMessage, queue: QueueKey = JOBS) -> Any:
    found = database.read(states.get, "main", f"q/{queue.name}/state/{queues.format_id(message.id)}")
    return None if found is None else (cbor2.loads(found.value), found.correlation_id)


def holder_of(database: Database, message: StoredMessage, queue: QueueKey = JOBS) -> tuple[str, int] | None:
    """The holder of the lease on a message's state, and its expiry."""
    key = LeaseKey("main", f"q/{queue.name}/state/{queues.format_id(message.id)}")
    grant, held = database.read(leases.inspect, key)
    return (grant.owner, grant.expires_ms) if grant is not None and held else None


def save(database: Database, found: Leased, value: Any) -> None:
    sidecar = found.states[0]
    assert sidecar is not None
    database.transact(states.update, "main", sidecar.lease.key, cbor2.dumps(value), lease=sidecar.lease)


def test_a_workflow_state_starts_empty_with_the_first_delivery_that_requests_it(database: Database) -> None:
    put(database, b"a", correlation_id="because")
    message = lease_one(database)
    assert state_of(database, message) is None
    nack(database, message, delay_seconds=0)
    found = lease_or_wait(database, with_state=True)
    (message,) = found.messages
    assert state_of(database, message) == (None, "because")
    assert holder_of(database, message) == ("ada", message.due_ms)
    sidecar = found.states[0]
    assert sidecar is not None
    assert (cbor2.loads(sidecar.value), sidecar.expires_ms) == (None, message.due_ms)


def test_a_consumer_writes_the_workflow_state_and_the_next_consumer_reads_it(
    database: Database, clock: ManualClock
) -> None:
    put(database, b"a")
    first = lease_or_wait(database, with_state=True)
    save(database, first, {"step": 1})
    with pytest.raises(LeaseRequired):
        database.transact(states.update, "main", first.states[0].lease.key, b"\xf6")
    clock.advance_ms(30_000)
    second = lease_or_wait(database, with_state=True, owner="bob")
    sidecar = second.states[0]
    assert sidecar is not None
    assert cbor2.loads(sidecar.value) == {"step": 1}
    with pytest.raises((LeaseConflict, LeaseExpired)):
        save(database, first, {"step": 0})
    save(database, second, {"step": 2})
    assert state_of(database, second.messages[0]) == ({"step": 2}, second.messages[0].correlation_id)


def test_the_lease_on_a_state_ends_with_the_lease_on_its_message(database: Database, clock: ManualClock) -> None:
    put(database, b"a")
    found = lease_or_wait(database, with_state=True, visibility_ms=1_000)
    (message,) = found.messages
    clock.advance_ms(500)
    extend(database, message, 2_000)
    assert holder_of(database, message) == ("ada", clock.now_ms() + 2_000)
    clock.advance_ms(1_999)
    save(database, found, "in time")
    clock.advance_ms(1)
    assert holder_of(database, message) is None
    with pytest.raises(LeaseExpired):
        save(database, found, "late")


def test_a_nack_releases_the_workflow_state(database: Database) -> None:
    put(database, b"a")
    found = lease_or_wait(database, with_state=True)
    save(database, found, 1)
    nack(database, found.messages[0], delay_seconds=60)
    assert holder_of(database, found.messages[0]) is None
    assert state_of(database, found.messages[0])[0] == 1
    with pytest.raises(LeaseExpired):
        save(database, found, 2)


def test_a_workflow_state_moves_with_its_dead_letter_and_back(database: Database) -> None:
    put(database, b"a", correlation_id="because")
    found = lease_or_wait(database, with_state=True)
    save(database, found, {"step": 1})
    (message,) = found.messages
    reject(database, message)
    assert (state_of(database, message), state_of(database, message, DEAD)) == (None, ({"step": 1}, "because"))
    assert holder_of(database, message) is None
    with pytest.raises((LeaseConflict, LeaseExpired)):
        save(database, found, {"step": 2})
    letter = lease_one(database, queue=DEAD, with_state=True)
    assert holder_of(database, letter, DEAD) == ("ada", letter.due_ms)
    nack(database, letter, DEAD, delay_seconds=0)
    database.transact(queues.redrive, JOBS)
    assert (state_of(database, message, DEAD), state_of(database, message)) == (None, ({"step": 1}, "because"))
    found = lease_or_wait(database, with_state=True)
    save(database, found, {"step": 3})
    ack(database, found.messages[0])
    assert remaining_keys(database) == []


def test_a_workflow_state_is_removed_when_its_message_expires(database: Database, clock: ManualClock) -> None:
    put(database, b"ready", b"leased", ttl_seconds=60)
    first, second = lease(database, 2, with_state=True, visibility_ms=90_000)
    nack(database, first, delay_seconds=0)
    clock.advance_ms(60_000)
    process_due(database)
    assert (state_of(database, first), state_of(database, second)) == (None, (None, second.correlation_id))
    clock.advance_ms(30_000)
    process_due(database)
    assert remaining_keys(database) == []
