"""Every operation can be sent twice: it only reads, is repeatable, or has a key and is executed once."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import FastnessError, IdempotencyKeyReused
from fastness.kv import Database
from fastness.plane.operations import OPERATIONS
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.wire.activity import LogRecords
from fastness.wire.atomic import CommitAtomic
from fastness.wire.backups import BeginBackup, ListBackup, OpenBackup
from fastness.wire.blobs import OpenBlob, WriteBlob
from fastness.wire.effects import ReleaseEffects
from fastness.wire.health_checks import RunCheckups
from fastness.wire.hosting import ClaimWorlds
from fastness.wire.ingress import Push, PushMany
from fastness.wire.mail import SeeReceipts
from fastness.wire.queues import AckMessages, CheckMessages, MessageLease, PurgeQueue, SurveyQueues
from fastness.wire.requests import Request
from fastness.wire.worlds import CommitSnapshot, CompactWorld
from tests.support.failures import Failures
from tests.support.populated_plane import READS, REPEATABLES, WRITES, PopulatedPlane

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
KEYED = [kind for kind in OPERATIONS if kind.operation.takes_key]
REPEATABLE = [kind for kind in OPERATIONS if kind.operation.repeatable]


# Declarations.


def test_transactions_that_only_read_run_on_snapshots() -> None:
    for kind, handler in OPERATIONS.items():
        if handler.run is not None:
            assert handler.reads_only == kind.operation.reads, kind.__name__


def test_every_operation_reads_or_is_repeatable_or_takes_a_key() -> None:
    for kind, handler in OPERATIONS.items():
        assert not (kind.operation.reads and kind.operation.repeatable), kind.__name__
        if handler.run is not None:
            assert kind.operation.reads or kind.operation.takes_key, kind.__name__
        else:
            assert handler.takes_call == kind.operation.takes_key, kind.__name__


def test_the_protocol_lists_repeatable_operations_with_the_reason() -> None:
    rows = re.findall(r"^\| `([a-z._]+)` \| (.*) \|$", PROTOCOL.read_text(), re.MULTILINE)
    reasons = {kind.__struct_config__.tag: kind.operation.repeatable for kind in REPEATABLE}
    assert reasons.items() <= dict(rows).items()


def test_every_operation_is_tested() -> None:
    assert WRITES.keys() == set(KEYED)
    assert REPEATABLES.keys() == set(REPEATABLE)


@pytest.fixture(autouse=True)
def no_move_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no loop move messages between two looks at the data."""
    monkeypatch.setattr(Services, "_note_sqs_work", lambda *_: None)


@contextmanager
def populated(database: Database, clock: ManualClock) -> Iterator[PopulatedPlane]:
    """A plane with data of every kind, and nothing else, in a database that may have data. Closes the database."""
    database.transact(lambda tx: tx.delete_range(b"", b"\xff" * 8))
    plane = PopulatedPlane(database, clock)
    with closing(plane.transport):
        yield plane


def outcome(populated: PopulatedPlane, work: Callable[[], Any]) -> Any:
    try:
        answer = work()
    except FastnessError as error:
        answer = error.code
    return answer, populated.everything()


def test_a_repeated_write_is_executed_once(open_database: Callable[..., Database], clock: ManualClock) -> None:
    failures = Failures()
    for kind in KEYED:
        with failures.of(kind.__name__), populated(open_database(clock=clock), clock) as plane:
            check_repetition(plane, kind)
    failures.check()


def check_repetition(populated: PopulatedPlane, kind: type[Request[Any]]) -> None:
    request, *meanwhile = WRITES[kind](populated)
    assert type(request) is kind
    first = populated.send(request)
    populated.clock.advance_ms(1_000)
    for other in meanwhile:
        populated.transport.call(other)
    before = populated.everything()
    again = outcome(populated, lambda: populated.send(request))
    assert again == (first, before)
    with pytest.raises(IdempotencyKeyReused):
        populated.send(changed(request))
    assert populated.everything() == before
    # The test could fail: without its key it is done again, or refused, or answered differently.
    is_harmless = kind in (SeeReceipts, AckMessages, ReleaseEffects)
    assert is_harmless or outcome(populated, lambda: populated.transport.call(request)) != again


def changed(request: Request[Any]) -> Request[Any]:
    if isinstance(request, LogRecords):  # Remembered in memory, apart from all others.
        return LogRecords("s", [b'{"n":2}'])
    return (
        PurgeQueue("jobs")
        if isinstance(request, CommitAtomic)
        else CommitAtomic([CheckMessages("jobs", [MessageLease("0" * 32, "a", 1)])])
    )


# Operations without keys.


def execute(populated: PopulatedPlane, request: Request[Any]) -> Any:
    if isinstance(request, WriteBlob):
        return populated.transport.send(request, iter([bytes(20_000)]))
    # A claim has a random name for the call that asked last, which is not compared here.
    with patch("fastness.runtime.sync.shared_locks.token_hex", return_value="attempt"):
        return populated.transport.call(request)


def test_a_repeatable_operation_leaves_the_same_data(
    open_database: Callable[..., Database], clock: ManualClock
) -> None:
    failures = Failures()
    tell_what_they_have_done = (ClaimWorlds, CompactWorld, BeginBackup, Push, PushMany)
    for kind in REPEATABLE:
        with failures.of(kind.__name__), populated(open_database(clock=clock), clock) as plane:
            plane.transport.call(CommitSnapshot("w", b"\x01", 2))
            request = REPEATABLES[kind](plane)
            assert type(request) is kind
            outcomes = [outcome(plane, partial(execute, plane, request)) for _ in range(3)]
            assert outcomes[1][1] == outcomes[0][1]
            assert outcomes[2][0] == outcomes[0][0] or kind in tell_what_they_have_done
    failures.check()


def test_services_that_read_write_nothing(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    database = MemoryDatabase(clock=clock)
    populated = PopulatedPlane(database, clock)
    reads = [*(each(populated) for each in READS.values()), SurveyQueues(text="job")]
    streams = {ListBackup, OpenBackup, RunCheckups}  # They read a copy, and have their own tests.
    served = {kind for kind, handler in OPERATIONS.items() if kind.operation.reads and handler.run is None}
    assert served - READS.keys() == streams
    before = populated.everything()

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("it writes")

    with monkeypatch.context() as patch:
        patch.setattr(database, "transact", refuse)
        for request in reads:
            if type(request) not in served:
                continue
            found = (
                populated.transport.receive(request)
                if isinstance(request, OpenBlob)
                else populated.transport.call(request)
            )
            assert found is not None
    assert populated.everything() == before
    populated.transport.close()
