"""Entities: fields go where their tier says, versions are compared and swapped, and histories stay readable."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import holdfast
from holdfast import Plane, Tier, TierPolicy
from holdfast.backends.memory import MemoryDatabase
from holdfast.errors import (
    BatchTooLarge,
    EmptyBatch,
    HoldfastError,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    LockTimeout,
    PathUnusable,
    ValueTooLarge,
    VersionConflict,
)
from holdfast.kv import Database, Transaction
from holdfast.layers import entities, field_tiers
from holdfast.layers.entities import EntityKey
from holdfast.layers.field_tiers import CriticalFieldRemoved
from holdfast.limits import (
    ACTIVITY_RECORD_BYTES_MAX,
    ENTITY_ATTEMPTS,
    ENTITY_BYTES_MAX,
    ENTITY_FIELDS_MAX,
    ENTITY_HISTORY_VERSIONS,
    ENTITY_WRITES_MAX,
    READ_ENTRIES_MAX,
)
from holdfast.plane.embedded import EmbeddedTransport
from holdfast.plane.services import Services
from holdfast.testing.clock import START_MS, ManualClock
from holdfast.testing.faults import FaultyDatabase
from holdfast.wire.entities import EntityWrite, SeenEntity, WriteEntities

PATIENCE_SECONDS = 30.0  # Far more than anything here takes; whoever waits for a condition must end some day.
TASK = EntityKey("main", "task", "1")


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str, clock: ManualClock) -> Iterator[Plane]:
    with holdfast.open(url, clock=clock) as plane:
        yield plane


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(8)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)  # Whoever waits still is woken when the plane is closed.


def everything(plane: Plane) -> list[tuple[bytes, bytes]]:
    return plane.transact(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000))


def logged(plane: Plane, **which: Any) -> list[dict[str, Any]]:
    return [msgspec.json.decode(each.record) for each in plane.activity.read(**which).records]


def rows_locked(plane: Plane) -> int:
    return plane.locks.stats()["record_id"].acquisitions


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to get somewhere."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


# Which tier a field has.


@pytest.mark.parametrize(
    ("kind", "field", "tier"),
    [
        ("task", "status", Tier.CRITICAL),
        ("task", "id", Tier.CRITICAL),
        ("decision", "id", Tier.CRITICAL),
        ("edge", "type", Tier.CRITICAL),
        ("TASK", "Status", Tier.CRITICAL),
        ("task", "priority", Tier.IMPORTANT),
        ("edge", "weight", Tier.IMPORTANT),
        ("edge", "status", Tier.IMPORTANT),
        ("anything", "else", Tier.IMPORTANT),
        ("task", "metrics", Tier.BEST_EFFORT),
        ("metrics", "cpu", Tier.BEST_EFFORT),
        ("task", "ml_score", Tier.BEST_EFFORT),
        ("ml_model", "weights", Tier.BEST_EFFORT),
        ("task", "debug_trace", Tier.BEST_EFFORT),
        ("task", "observability", Tier.BEST_EFFORT),
        ("task", "my_metrics", Tier.IMPORTANT),
        ("task", "metrics2", Tier.IMPORTANT),
        ("task", "html_body", Tier.IMPORTANT),
    ],
)
def test_a_field_has_the_tier_of_the_seed(kind: str, field: str, tier: Tier) -> None:
    assert TierPolicy().classify(kind, field) is tier


def test_an_exact_field_comes_before_patterns_and_patterns_in_their_order() -> None:
    policy = TierPolicy(
        fields={"Task.Debug_Trace": Tier.CRITICAL},
        patterns={"debug_*": Tier.IMPORTANT, "d*": Tier.CRITICAL, "trace": Tier.BEST_EFFORT},
    )
    assert policy.classify("task", "debug_trace") is Tier.CRITICAL
    assert policy.classify("task", "debug_other") is Tier.IMPORTANT
    assert policy.classify("task", "due") is Tier.CRITICAL
    assert policy.classify("task", "ml_score") is Tier.BEST_EFFORT
    assert policy.classify("trace", "anything") is Tier.BEST_EFFORT
    assert policy.classify("task", "status") is Tier.CRITICAL


def test_a_toml_document_overrides_the_defaults() -> None:
    policy = TierPolicy.from_toml(
        """
        [fields]
        "order.total" = "critical"
        "task.status" = "Important"

        [patterns]
        "trace_*" = "best_effort"
        "ml_*" = "important"
        """
    )
    assert policy.classify("order", "total") is Tier.CRITICAL
    assert policy.classify("task", "status") is Tier.IMPORTANT
    assert policy.classify("order", "trace_id") is Tier.BEST_EFFORT
    assert policy.classify("order", "ml_score") is Tier.IMPORTANT
    assert policy.classify("order", "debug_x") is Tier.BEST_EFFORT
    assert policy.classify("task", "id") is Tier.CRITICAL
    assert TierPolicy.from_toml("").classify("task", "status") is Tier.CRITICAL


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("[feilds]\n", "did you mean fields"),
        ("[pattern]\n", "did you mean patterns"),
        ("[xyz]\n", "fields or patterns"),
        ("fields = 3", r"write \[fields\]"),
        ('[fields]\n"task.status" = "crucial"', "crucial"),
        ('[fields]\n"task.status" = 7', "7"),
        ('[fields]\ntask.status = "critical"', "critical"),  # TOML reads this as a table in a table.
        ('[fields]\nstatus = "critical"', r"kind\.field"),
        ('[patterns]\n"x_*" = ""', "x_"),
        ("[fields", "not TOML"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_what_to_write(document: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        TierPolicy.from_toml(document)


def test_a_plane_is_opened_with_a_policy_or_the_file_of_one(tmp_path: Path) -> None:
    (tmp_path / "tiers.toml").write_text('[fields]\n"order.total" = "critical"\n')
    for tiers in (tmp_path / "tiers.toml", str(tmp_path / "tiers.toml"), TierPolicy({"order.total": Tier.CRITICAL})):
        with holdfast.open("memory:", tiers=tiers) as plane:
            assert plane.entities.write("order", "1", {"total": 3}).durability is Tier.CRITICAL
    with pytest.raises(PathUnusable, match=r"none\.toml"):
        holdfast.open("memory:", tiers=str(tmp_path / "none.toml"))


# Where a field goes.


def test_a_critical_field_is_synced_and_locks_its_row(plane: Plane) -> None:
    written = plane.entities.write("task", "1", {"status": "open"})
    assert (written.versions, written.durability) == ([1], Tier.CRITICAL)
    stats = plane.locks.stats()
    assert (stats["record_id"].acquisitions, stats["record_id"].holders) == (1, 0)
    assert (stats["entity_type"].intents, stats["database"].intents) == (1, 1)


def test_an_important_field_takes_no_lock(plane: Plane) -> None:
    written = plane.entities.write("task", "1", {"priority": 3, "note": "x"})
    assert (written.versions, written.durability) == ([1], Tier.IMPORTANT)
    assert plane.entities.get("task", "1").fields == {"priority": 3, "note": "x"}
    assert plane.entities.put_if_version("task", "1", {"note": "y"}, expected_version=1).durability is Tier.IMPORTANT
    with plane.entities.transaction() as transaction:
        transaction.get("task", "1")
        transaction.remove("task", "1", "note")
    assert plane.entities.get("task", "1").version == 3
    assert rows_locked(plane) == 0


def test_a_best_effort_field_is_logged_and_writes_no_key(plane: Plane) -> None:
    plane.entities.write("task", "1", {"status": "open"})
    before, locked = everything(plane), rows_locked(plane)
    written = plane.entities.write("task", "1", {"debug_trace": [1, {"x": 2.5}], "metrics": None}, session="Abc")
    assert (written.versions, written.durability) == ([None], Tier.BEST_EFFORT)
    assert everything(plane) == before
    assert rows_locked(plane) == locked
    record = {"kind": "task", "id": "1", "fields": {"debug_trace": [1, {"x": 2.5}], "metrics": None}}
    assert logged(plane, session="abc", kind="entities") == [record]
    assert plane.entities.get("task", "1").fields == {"status": "open"}
    assert len(plane.entities.history("task", "1")) == 1


def test_a_best_effort_field_without_a_session_is_logged_under_the_planes_own(plane: Plane) -> None:
    plane.entities.write("task", "1", {"debug_trace": 1})
    plane.entities.put_if_version("task", "1", {"debug_trace": 2, "note": "x"}, expected_version=0)
    records = plane.activity.read(kind="entities").records
    assert [msgspec.json.decode(each.record)["fields"] for each in records] == [{"debug_trace": 1}, {"debug_trace": 2}]
    assert {each.session for each in records} == {plane._transport.services.session}


def test_one_write_may_mix_tiers_at_the_stronger_promise(plane: Plane) -> None:
    written = plane.entities.write("task", "1", {"status": "open", "note": "x", "debug_trace": 1}, session="s")
    assert (written.versions, written.durability) == ([1], Tier.CRITICAL)
    assert plane.entities.get("task", "1").fields == {"status": "open", "note": "x"}
    assert logged(plane, session="s") == [{"kind": "task", "id": "1", "fields": {"debug_trace": 1}}]
    assert plane.entities.write("task", "1", {"note": "y", "debug_trace": 2}).durability is Tier.IMPORTANT


def test_a_promise_is_kept_and_not_more_than_that(tmp_path: Path) -> None:
    """An IMPORTANT commit does not pay for a sync; a CRITICAL one has paid for those before it too."""
    database = FaultyDatabase(MemoryDatabase())
    with Plane(EmbeddedTransport(Services(database, logs=tmp_path))) as plane:
        plane.entities.write("task", "1", {"note": 1})
        database.sync()
        for write in (
            lambda: plane.entities.write("task", "1", {"note": 2}),
            lambda: plane.entities.write("task", "1", {"note": 2, "debug_x": 1}),
            lambda: read_and_write(plane, "note"),
            lambda: plane.entities.update("task", "1", lambda entity: {"note": entity["note"] + 1}),
            lambda: plane.entities.put_if_version("task", "1", {"note": 2}, expected_version=1),
        ):
            write()
            assert database.power_loss() == 1
        for write in (
            lambda: plane.entities.write("task", "2", {"status": 1}),
            lambda: read_and_write(plane, "status"),
            lambda: plane.entities.put_if_version("task", "1", {"note": 2, "status": 2}, expected_version=2),
            lambda: plane.entities.put_if_version("task", "1", {"note": 3}, expected_version=3),
            lambda: plane.entities.delete("task", "1"),
        ):
            plane.entities.write("edge", "1", {"weight": 1})
            write()
            assert database.power_loss() == 0
        assert plane.entities.get("task", "1") is None
        assert plane.entities.get("edge", "1").version == 5


def read_and_write(plane: Plane, field: str) -> None:
    with plane.entities.transaction() as transaction:
        transaction.get("task", "1")
        transaction.write("task", "1", field, 2)


# Transactions.


def test_a_transaction_mixes_entities_and_tiers_in_one_commit(plane: Plane) -> None:
    with plane.entities.transaction(session="s") as transaction:
        transaction.write("task", "1", "status", "open")
        transaction.write("task", "2", "note", "x")
        transaction.write("task", "3", "debug_trace", 1)
        transaction.write("Task", "2", "metrics", {"ms": 3})
        assert everything(plane) == []
    assert plane.entities.get("task", "1").fields == {"status": "open"}
    assert plane.entities.get("task", "2").fields == {"note": "x"}
    assert plane.entities.get("task", "3") is None
    assert [(each["id"], each["fields"]) for each in logged(plane, session="s")] == [
        ("2", {"metrics": {"ms": 3}}),
        ("3", {"debug_trace": 1}),
    ]
    assert plane.entities.history("task", "2")[0].durability is Tier.CRITICAL
    assert rows_locked(plane) == 1


def test_a_transaction_tells_the_version_of_each_write(plane: Plane) -> None:
    plane.entities.write("task", "2", {"note": 1})
    transaction = plane.entities.transaction()
    for id, field in (("1", "status"), ("2", "note"), ("3", "metrics")):
        transaction.write("task", id, field, 1)
    written = transaction.commit()
    assert (written.versions, written.durability) == ([1, 2, None], Tier.CRITICAL)


@pytest.mark.parametrize("field", ["status", "note", "debug_trace"])
def test_a_transaction_that_read_something_that_changed_does_nothing(plane: Plane, field: str) -> None:
    """Nothing is written, and nothing is logged either."""
    plane.entities.write("task", "1", {"note": 1})
    transaction = plane.entities.transaction(session="s")
    assert transaction.get("task", "1")["note"] == 1
    plane.entities.write("task", "1", {"note": 2})
    before = everything(plane)
    transaction.get("task", "1")  # Looking again does not make it unseen.
    transaction.write("task", "2", field, "x")
    transaction.write("task", "2", "metrics", "x")
    with pytest.raises(VersionConflict, match="task 1 has version 2, not 1") as conflict:
        transaction.commit()
    assert (conflict.value.expected, conflict.value.actual) == (1, 2)
    assert everything(plane) == before
    assert logged(plane) == []
    with pytest.raises(InvalidArgument, match="ended"):
        transaction.commit()
    assert plane.locks.stats()["record_id"].holders == 0


@pytest.mark.parametrize("changed", ["1", "2", "3"])
def test_a_transaction_minds_whichever_of_those_that_it_read_has_changed(plane: Plane, changed: str) -> None:
    plane.entities.write("task", "2", {"note": 1})
    transaction = plane.entities.transaction()
    for id in ("1", "2", "3"):
        transaction.get("task", id)
    plane.entities.write("task", changed, {"note": 2})
    transaction.write("task", "4", "status", 1)
    with pytest.raises(VersionConflict, match=f"task {changed}"):
        transaction.commit()
    assert plane.entities.get("task", "4") is None


def test_a_transaction_that_saw_nothing_there_minds_if_something_comes(plane: Plane) -> None:
    transaction = plane.entities.transaction()
    assert transaction.get("task", "1") is None
    transaction.write("task", "1", "status", "mine")
    plane.entities.write("task", "1", {"status": "theirs"})
    with pytest.raises(VersionConflict):
        transaction.commit()
    assert plane.entities.get("task", "1")["status"] == "theirs"


def test_a_transaction_whose_block_fails_writes_nothing(plane: Plane) -> None:
    with pytest.raises(ZeroDivisionError), plane.entities.transaction() as transaction:
        transaction.write("task", "1", "status", "open")
        transaction.write("task", "1", "debug_trace", "open")
        raise ZeroDivisionError
    assert everything(plane) == []
    assert logged(plane) == []


def test_a_transaction_with_nothing_to_write_is_fine(plane: Plane) -> None:
    with plane.entities.transaction() as transaction:
        transaction.get("task", "1")
    assert plane.entities.transaction().commit() is None
    assert everything(plane) == []


def test_the_last_word_on_a_field_counts(plane: Plane) -> None:
    plane.entities.write("task", "1", {"a": 1, "b": 1})
    with plane.entities.transaction() as transaction:
        transaction.write("task", "1", "a", 2)
        transaction.remove("task", "1", "a")
        transaction.remove("task", "1", "b")
        transaction.write("task", "1", "b", 2)
        transaction.write("task", "1", "b", 3)
    assert plane.entities.get("task", "1").fields == {"b": 3}
    change = plane.entities.history("task", "1")[-1]
    assert (change.version, change.fields, change.removed) == (2, {"b": 3}, ["a"])


def test_removing_a_critical_field_is_critical(plane: Plane) -> None:
    plane.entities.write("task", "1", {"status": 1, "note": 1})
    locked = rows_locked(plane)
    transaction = plane.entities.transaction()
    transaction.remove("task", "1", "status")
    assert transaction.commit().durability is Tier.CRITICAL
    assert rows_locked(plane) == locked + 1
    assert plane.entities.get("task", "1").fields == {"note": 1}


# What is refused after a commit that it should have stopped.


@pytest.mark.parametrize(
    ("value", "session"),
    [("x" * ACTIVITY_RECORD_BYTES_MAX, None), ({None: 1}, None), (1, "no session")],
    ids=["too large for a log", "no JSON", "no name of a session"],
)
@pytest.mark.parametrize("how", ["write", "transaction", "put"])
def test_a_write_that_cannot_be_logged_is_refused_as_a_whole(
    plane: Plane, value: Any, session: str | None, how: str
) -> None:
    """Once: a BEST_EFFORT field that the session log refuses is refused after the CRITICAL one was committed, so its
    caller is told that nothing was written, and tries again what has succeeded (Lesson 5).
    """
    fields = {"status": "open", "debug_trace": value}
    with pytest.raises(HoldfastError) as refused:
        if how == "write":
            plane.entities.write("task", "1", fields, session=session)
        elif how == "put":
            plane.entities.put_if_version("task", "1", fields, expected_version=0, session=session)
        else:
            with plane.entities.transaction(session=session) as transaction:
                for field, each in fields.items():
                    transaction.write("task", "1", field, each)
    assert isinstance(refused.value, (InvalidArgument, InvalidValue, InvalidName))
    assert everything(plane) == []
    assert logged(plane) == []


# Compare and swap.


def test_a_put_replaces_an_entity_that_has_the_version(plane: Plane, clock: ManualClock) -> None:
    assert plane.entities.put_if_version("task", "1", {"status": 1, "a": 1}, expected_version=0).versions == [1]
    clock.advance_ms(5)
    assert plane.entities.put_if_version("task", "1", {"status": 2, "b": 1}, expected_version=1).versions == [2]
    entity = plane.entities.get("task", "1")
    assert (entity.fields, entity.version) == ({"status": 2, "b": 1}, 2)
    assert (entity.created_ms, entity.updated_ms) == (START_MS, START_MS + 5)
    assert (entity["status"], entity.get("b"), entity.get("a"), entity.get("a", 7)) == (2, 1, None, 7)
    change = plane.entities.history("task", "1")[-1]
    assert (change.fields, change.removed) == ({"status": 2, "b": 1}, ["a"])


@pytest.mark.parametrize("expected_version", [0, 1, 3, -1])
@pytest.mark.parametrize("field", ["status", "note", "debug_trace"])
def test_a_put_for_another_version_does_nothing(plane: Plane, expected_version: int, field: str) -> None:
    for number in range(2):
        plane.entities.write("task", "1", {"note": number})
    before = everything(plane)
    with pytest.raises(VersionConflict) as conflict:
        plane.entities.put_if_version("task", "1", {field: 1, "metrics": 1}, expected_version=expected_version)
    assert (conflict.value.expected, conflict.value.actual) == (expected_version, 2)
    assert everything(plane) == before
    assert logged(plane) == []


def test_a_put_that_drops_a_critical_field_is_critical(plane: Plane) -> None:
    plane.entities.write("task", "1", {"status": "open", "note": 1})
    locked = rows_locked(plane)
    written = plane.entities.put_if_version("task", "1", {"note": 2}, expected_version=1)
    assert (written.versions, written.durability) == ([2], Tier.CRITICAL)
    assert rows_locked(plane) == locked + 1
    assert plane.entities.history("task", "1")[-1].durability is Tier.CRITICAL
    assert plane.entities.put_if_version("task", "1", {"note": 3}, expected_version=2).durability is Tier.IMPORTANT


def test_the_layer_says_when_a_put_needs_a_stronger_promise(database: Database) -> None:
    policy = TierPolicy()
    part = field_tiers.part_of(policy, TASK, {"note": b"\x01"})

    def put(tx: Transaction, expected: int, tier: Tier) -> int:
        return field_tiers.put(tx, part, policy, expected_version=expected, tier=tier)

    database.transact(lambda tx: entities.put(tx, TASK, {"status": b"\x01"}, expected_version=0, tier=Tier.CRITICAL))
    with pytest.raises(CriticalFieldRemoved):
        database.transact(put, 1, Tier.IMPORTANT)
    with pytest.raises(VersionConflict):
        database.transact(put, 2, Tier.IMPORTANT)
    assert database.read(entities.get, TASK).version == 1
    assert database.transact(put, 1, Tier.CRITICAL) == 2
    assert database.transact(put, 2, Tier.IMPORTANT) == 3


@pytest.mark.parametrize("field", ["status", "note"])
def test_compare_and_swap_loses_no_increment(plane: Plane, threads: ThreadPoolExecutor, field: str) -> None:
    """Lesson 17: "check the version, then put" is not compare-and-swap; this is."""
    barrier = threading.Barrier(8)

    def increment() -> int:
        barrier.wait(PATIENCE_SECONDS)
        conflicts = 0
        for _ in range(25):
            while True:
                entity = plane.entities.get("task", "1", tier=Tier.IMPORTANT)
                version, number = (0, 0) if entity is None else (entity.version, entity[field])
                try:
                    plane.entities.put_if_version("task", "1", {field: number + 1}, expected_version=version)
                    break
                except VersionConflict:
                    conflicts += 1
        return conflicts

    conflicts = sum(each.result(PATIENCE_SECONDS) for each in [threads.submit(increment) for _ in range(8)])
    print(f"{conflicts} conflicts")
    entity = plane.entities.get("task", "1")
    assert (entity[field], entity.version) == (200, 200)
    history = plane.entities.history("task", "1", limit=1_000)
    assert [each.fields[field] for each in history] == list(range(1, 201))


async def test_compare_and_swap_of_tasks_loses_no_increment(url: str) -> None:
    async with holdfast.open_async(url) as plane:

        async def increment() -> None:
            for _ in range(10):
                done = False
                while not done:
                    entity = await plane.entities.get("task", "1", tier=Tier.IMPORTANT)
                    version, number = (0, 0) if entity is None else (entity.version, entity["status"])
                    try:
                        await plane.entities.put_if_version(
                            "task", "1", {"status": number + 1}, expected_version=version
                        )
                        done = True
                    except VersionConflict:
                        await asyncio.sleep(0)

        await asyncio.gather(*(increment() for _ in range(8)))
        entity = await plane.entities.get("task", "1")
        assert (entity["status"], entity.version) == (80, 80)


@pytest.mark.parametrize("field", ["status", "note"])
def test_transactions_that_read_and_write_lose_no_increment(
    plane: Plane, threads: ThreadPoolExecutor, field: str
) -> None:
    def increment() -> None:
        for _ in range(10):
            while True:
                try:
                    with plane.entities.transaction() as transaction:
                        found = transaction.get("task", "1")
                        transaction.write("task", "1", field, 1 if found is None else found[field] + 1)
                    break
                except VersionConflict:
                    continue

    for each in [threads.submit(increment) for _ in range(8)]:
        each.result(PATIENCE_SECONDS)
    assert plane.entities.get("task", "1")[field] == 80


@pytest.mark.parametrize("how", ["transaction", "update"])
def test_a_version_that_the_power_took_back_names_no_other_state(tmp_path: Path, how: str) -> None:
    """Once: transactions and updates read at IMPORTANT. A caller that outlives the database's power (one that is in
    another process than it) has seen a version that is then given out again for another state, and its comparison
    with that version succeeds: what the other wrote is lost, at CRITICAL. `layers/entities.py` promises that a version
    names one state for ever.
    """
    database = FaultyDatabase(MemoryDatabase())
    with Plane(EmbeddedTransport(Services(database, logs=tmp_path))) as plane:
        plane.entities.write("task", "1", {"status": 0})
        plane.entities.write("task", "1", {"n": 10})

        def power_fails_and_others_write() -> None:
            database.power_loss()
            plane.entities.write("task", "1", {"n": 1, "status": 1})

        if how == "transaction":
            transaction = plane.entities.transaction()
            number = transaction.get("task", "1").get("n", 0)
            power_fails_and_others_write()
            transaction.write("task", "1", "status", 2)
            transaction.write("task", "1", "n", number + 1)
            with pytest.raises(VersionConflict):
                transaction.commit()
        else:
            accidents = [power_fails_and_others_write]

            def change(entity: Any) -> dict[str, int]:
                while accidents:
                    accidents.pop()()
                return {"n": entity.get("n", 0) + 1, "status": 2}

            plane.entities.update("task", "1", change)
            assert plane.entities.get("task", "1")["n"] == 2


# Updates that try again.


def test_an_update_sets_what_its_function_says(plane: Plane) -> None:
    assert plane.entities.update("task", "1", lambda entity: {"n": 1 if entity is None else 0}).versions == [1]
    assert plane.entities.update("task", "1", lambda entity: {"m": entity["n"] + 1}).versions == [2]
    assert plane.entities.get("task", "1").fields == {"n": 1, "m": 2}


def test_an_update_begins_again_when_somebody_was_faster(plane: Plane) -> None:
    seen: list[int] = []

    def change(entity: Any) -> dict[str, int]:
        seen.append(0 if entity is None else entity["n"])
        if len(seen) < 3:
            plane.entities.write("task", "1", {"n": len(seen) * 100})
        return {"n": seen[-1] + 1}

    assert plane.entities.update("task", "1", change).versions == [3]
    assert seen == [0, 100, 200]
    assert plane.entities.get("task", "1")["n"] == 201


@pytest.mark.parametrize("attempts", [1, 3, None])
def test_an_update_gives_up_some_day(plane: Plane, attempts: int | None) -> None:
    calls = 0

    def change(entity: Any) -> dict[str, int]:
        nonlocal calls
        calls += 1
        plane.entities.write("task", "1", {"n": calls})
        return {"n": -1}

    options = {} if attempts is None else {"attempts": attempts}
    with pytest.raises(VersionConflict):
        plane.entities.update("task", "1", change, **options)
    assert calls == (attempts or ENTITY_ATTEMPTS)
    assert plane.entities.get("task", "1")["n"] == calls


@pytest.mark.parametrize("attempts", [0, -1])
def test_an_update_is_tried_at_least_once(plane: Plane, attempts: int) -> None:
    with pytest.raises(InvalidArgument, match="attempts"):
        plane.entities.update("task", "1", lambda entity: {"n": 1}, attempts=attempts)


# Histories, deletions and scans.


def test_a_history_tells_every_change(plane: Plane, clock: ManualClock) -> None:
    plane.entities.write("task", "1", {"status": "open", "note": "x"})
    clock.advance_ms(5)
    plane.entities.write("task", "1", {"note": "y"})
    with plane.entities.transaction() as transaction:
        transaction.remove("task", "1", "note")
    plane.entities.delete("task", "1")
    told = [
        (each.version, each.at_ms, each.durability, each.fields, each.removed, each.deleted)
        for each in plane.entities.history("task", "1")
    ]
    assert told == [
        (1, START_MS, Tier.CRITICAL, {"status": "open", "note": "x"}, [], False),
        (2, START_MS + 5, Tier.IMPORTANT, {"note": "y"}, [], False),
        (3, START_MS + 5, Tier.IMPORTANT, {}, ["note"], False),
        (4, START_MS + 5, Tier.CRITICAL, {}, ["status"], True),
    ]
    assert [each.version for each in plane.entities.history("task", "1", after=1, limit=2)] == [2, 3]
    assert plane.entities.history("task", "1", after=4) == []
    assert plane.entities.history("task", "2") == []
    for limit in (0, READ_ENTRIES_MAX + 1):
        with pytest.raises(InvalidArgument):
            plane.entities.history("task", "1", limit=limit)


def test_a_history_keeps_the_latest_versions_and_no_more(database: Database) -> None:
    def write(tx: Transaction) -> None:
        for number in range(ENTITY_HISTORY_VERSIONS + 5):
            entities.write(tx, TASK, {"n": cbor2.dumps(number)}, [], tier=Tier.IMPORTANT)

    database.transact(write)
    history = database.read(entities.history, TASK, after=0, limit=READ_ENTRIES_MAX)
    assert [each.version for each in history] == list(range(6, ENTITY_HISTORY_VERSIONS + 6))
    assert history[-1].fields == database.read(entities.get, TASK).fields


def test_a_version_goes_on_when_an_entity_is_deleted_and_comes_back(plane: Plane, clock: ManualClock) -> None:
    """So that whoever saw it before its deletion cannot take it for the same."""
    plane.entities.write("task", "1", {"status": 1})
    assert plane.entities.delete("task", "1")
    assert plane.entities.get("task", "1") is None
    assert not plane.entities.delete("task", "1")
    for stale in (0, 1):
        with pytest.raises(VersionConflict) as conflict:
            plane.entities.put_if_version("task", "1", {"status": 2}, expected_version=stale)
        assert conflict.value.actual == 2
    clock.advance_ms(5)
    assert plane.entities.write("task", "1", {"note": 1}).versions == [3]
    entity = plane.entities.get("task", "1")
    assert (entity.fields, entity.created_ms, entity.version) == ({"note": 1}, START_MS + 5, 3)
    assert [each.version for each in plane.entities.history("task", "1")] == [1, 2, 3]


def test_only_the_expected_version_is_deleted(plane: Plane) -> None:
    plane.entities.write("task", "1", {"note": 1})
    for wrong in (0, 2):
        with pytest.raises(VersionConflict):
            plane.entities.delete("task", "1", expected_version=wrong)
    assert plane.entities.delete("task", "1", expected_version=1)
    assert not plane.entities.delete("task", "1", expected_version=2)
    with pytest.raises(VersionConflict):
        plane.entities.delete("task", "1", expected_version=1)


def test_a_scan_pages_through_the_living(plane: Plane) -> None:
    for number in range(10):
        plane.entities.write("task", f"t{number}", {"n": number})
        plane.entities.write("edge", f"t{number}", {"n": number})
    for number in (0, 3, 4, 5, 9):
        plane.entities.delete("task", f"t{number}")
    assert [each.id for each in plane.entities.scan("task")] == ["t1", "t2", "t6", "t7", "t8"]
    found, after = list[str](), ""
    while page := plane.entities.scan("Task", after=after, limit=2):
        assert len(page) <= 2
        found += [each.id for each in page]
        after = page[-1].id
    assert found == ["t1", "t2", "t6", "t7", "t8"]
    assert [each.id for each in plane.entities.scan("task", after="T3", limit=1)] == ["t6"]
    assert plane.entities.scan("nothing") == []
    for limit in (0, READ_ENTRIES_MAX + 1):
        with pytest.raises(InvalidArgument):
            plane.entities.scan("task", limit=limit)


def test_names_are_lower_cased_and_fields_are_not(plane: Plane) -> None:
    plane.entities.write("Task", "ABC", {"Note": 1, "note": 2})
    assert plane.entities.get("task", "abc").fields == {"Note": 1, "note": 2}
    for kind, id in (("no name", "1"), ("task", "no/name"), ("", "1"), ("task", ""), (7, "1")):
        for call in (
            lambda: plane.entities.write(kind, id, {"note": 1}),  # noqa: B023
            lambda: plane.entities.get(kind, id),  # noqa: B023
            lambda: plane.entities.delete(kind, id),  # noqa: B023
            lambda: plane.entities.transaction().write(kind, id, "note", 1),  # noqa: B023
        ):
            with pytest.raises(InvalidName):
                call()


def test_each_universe_has_entities_of_its_own(plane: Plane) -> None:
    other = Plane(plane._transport, "other")
    plane.entities.write("task", "1", {"status": 1, "metrics": 1})
    assert other.entities.get("task", "1") is None
    assert other.entities.scan("task") == []
    assert other.entities.write("task", "1", {"status": 2}).versions == [1]
    assert logged(other) == []
    assert rows_locked(plane) == rows_locked(other) == 1


# Limits.


def refused_and_unwritten(plane: Plane, error: type[HoldfastError], call: Callable[[], object]) -> None:
    before = everything(plane)
    with pytest.raises(error):
        call()
    assert everything(plane) == before
    assert logged(plane) == []
    assert plane.locks.stats()["record_id"].holders == 0


@pytest.mark.parametrize("first", [{}, {"status": 1}], ids=["important", "critical"])
def test_an_entity_has_only_so_many_fields(plane: Plane, first: dict[str, int]) -> None:
    fields = first | {f"f{number}": number for number in range(ENTITY_FIELDS_MAX - len(first))}
    plane.entities.write("task", "1", fields)
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "1", {"one-more": 1}))
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "2", {**fields, "one-more": 1}))
    refused_and_unwritten(
        plane,
        ValueTooLarge,
        lambda: plane.entities.put_if_version("task", "1", {**fields, "one-more": 1}, expected_version=1),
    )


def test_an_entity_has_only_so_many_bytes(plane: Plane) -> None:
    overhead = len(cbor2.dumps(b"x" * 100_000)) - 100_000
    half = ENTITY_BYTES_MAX // 2 - overhead - 1
    plane.entities.write("task", "1", {"a": b"x" * half})
    plane.entities.write("task", "1", {"b": b"x" * half})
    assert plane.entities.get("task", "1").version == 2
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "1", {"b": b"x" * (half + 1)}))
    refused_and_unwritten(plane, ValueTooLarge, lambda: plane.entities.write("task", "1", {"status": 1}))


def test_a_transaction_has_only_so_many_writes(plane: Plane) -> None:
    def fill(transaction: Any, count: int) -> Any:
        for number in range(count):
            transaction.write("task", str(number), "status", 1)
        return transaction

    written = fill(plane.entities.transaction(), ENTITY_WRITES_MAX).commit()
    assert written.versions == [1] * ENTITY_WRITES_MAX
    too_many = fill(plane.entities.transaction(), ENTITY_WRITES_MAX + 1)
    refused_and_unwritten(plane, BatchTooLarge, too_many.commit)
    saw_too_much = plane.entities.transaction()
    for number in range(ENTITY_WRITES_MAX + 1):
        saw_too_much.get("task", str(number))
    saw_too_much.write("task", "1", "status", 2)
    refused_and_unwritten(plane, BatchTooLarge, saw_too_much.commit)


def test_a_request_that_writes_nothing_is_refused(plane: Plane) -> None:
    refused_and_unwritten(
        plane, EmptyBatch, lambda: plane._transport.call(WriteEntities([], [SeenEntity("task", "1", 0)]))
    )


@pytest.mark.parametrize("field", ["", "two words", "ü", "x" * 129, "a/b", "line\n"])
def test_a_field_has_a_plain_name(plane: Plane, field: str) -> None:
    refused_and_unwritten(plane, InvalidName, lambda: plane.entities.write("task", "1", {field: 1, "status": 1}))
    refused_and_unwritten(
        plane, InvalidName, lambda: plane.entities.put_if_version("task", "1", {field: 1}, expected_version=0)
    )


def test_a_best_effort_field_has_a_plain_name_too(plane: Plane) -> None:
    """Once broken: names of BEST_EFFORT fields are not looked at, and `debug_` with a space is logged."""
    refused_and_unwritten(plane, InvalidName, lambda: plane.entities.write("task", "1", {"debug_ two words": 1}))


def test_one_transaction_that_fails_late_writes_nothing_of_what_came_before(plane: Plane) -> None:
    transaction = plane.entities.transaction()
    transaction.write("task", "1", "status", 1)
    transaction.write("task", "2", "metrics", 1)
    transaction.write("task", "3", "note", b"x" * (ENTITY_BYTES_MAX + 1))
    refused_and_unwritten(plane, ValueTooLarge, transaction.commit)


def test_an_entity_may_be_written_twice_in_one_commit(plane: Plane) -> None:
    writes = [EntityWrite("task", "1", {"a": cbor2.dumps(number)}) for number in range(2)]
    assert plane._transport.call(WriteEntities(writes)).versions == [1, 2]
    assert [each.fields for each in plane.entities.history("task", "1")] == [{"a": 0}, {"a": 1}]


# Locks.


def test_a_holder_of_the_whole_kind_writes_its_rows(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same thread holds more than the row already. Others wait for the row, and give up in time."""
    monkeypatch.setattr("holdfast.limits.LOCK_WAIT_SECONDS", 0.01)
    with ThreadPoolExecutor(1) as other:
        write, status = plane.entities.write, {"status": "theirs"}
        with plane.locks.acquire(["entity_type", "task"]):
            write("task", "1", {"status": "ours"})
            with plane.entities.transaction() as transaction:
                transaction.write("task", "1", "status", "ours")
                transaction.write("task", "2", "status", "ours")
            for call in (
                lambda: write("task", "1", status),
                lambda: plane.entities.put_if_version("task", "1", status, expected_version=2),
                lambda: plane.entities.put_if_version("task", "1", {}, expected_version=2),
                lambda: plane.entities.delete("task", "1"),
            ):
                with pytest.raises(LockTimeout, match="task is held"):
                    other.submit(call).result(PATIENCE_SECONDS)
            assert plane.entities.get("task", "1")["status"] == "ours"
            other.submit(write, "task", "1", {"note": "theirs"}).result(PATIENCE_SECONDS)  # IMPORTANT asks nobody.
            other.submit(write, "edge", "1", {"type": "theirs"}).result(PATIENCE_SECONDS)
        other.submit(write, "task", "1", status).result(PATIENCE_SECONDS)
    assert plane.entities.get("task", "1").fields == {"status": "theirs", "note": "theirs"}
    assert plane.locks.stats()["entity_type"].timeouts == 4


def test_a_writer_waits_for_a_row_that_another_has_locked(plane: Plane, threads: ThreadPoolExecutor) -> None:
    with plane.locks.acquire(["record_id", "task/1"]):
        waiter = threads.submit(plane.entities.write, "task", "1", {"status": "theirs"})
        threads.submit(plane.entities.write, "task", "2", {"status": "theirs"}).result(PATIENCE_SECONDS)
        until(lambda: plane.locks.stats()["record_id"].waiting == 1)
        plane.entities.write("task", "1", {"status": "ours"})
    assert waiter.result(PATIENCE_SECONDS).versions == [2]
    assert plane.entities.get("task", "1")["status"] == "theirs"


def test_a_transaction_locks_the_row_of_each_critical_field_and_no_other(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.limits.LOCK_WAIT_SECONDS", 0.01)
    with ThreadPoolExecutor(1) as other:
        for locked, fields in (("1", ("status", "note")), ("2", ("note", "status")), ("2", ("status", "status"))):
            transaction = plane.entities.transaction()
            for id, field in zip("12", fields, strict=True):
                transaction.write("task", id, field, 1)
            with (
                plane.locks.acquire(["record_id", f"task/{locked}"]),
                pytest.raises(LockTimeout, match=f"task/{locked} is held"),
            ):
                other.submit(transaction.commit).result(PATIENCE_SECONDS)
        transaction = plane.entities.transaction()
        transaction.write("task", "1", "note", 1)
        transaction.write("task", "2", "status", 1)
        with plane.locks.acquire(["record_id", "task/1"]):
            other.submit(transaction.commit).result(PATIENCE_SECONDS)


def test_transactions_over_the_same_rows_in_any_order_never_deadlock(plane: Plane, threads: ThreadPoolExecutor) -> None:
    """Lesson 16: rows are locked in sorted order, however a transaction names them."""

    def write(number: int) -> None:
        ids = ["1", "2", "3"] if number % 2 else ["3", "2", "1"]
        for _ in range(20):
            with plane.entities.transaction() as transaction:
                for id in ids:
                    transaction.write("task", id, "status", number)

    for each in [threads.submit(write, number) for number in range(8)]:
        each.result(PATIENCE_SECONDS)
    assert {plane.entities.get("task", id)["status"] for id in "123"} <= {*range(8)}
    assert len({plane.entities.get("task", id)["status"] for id in "123"}) == 1
    assert [plane.entities.get("task", id).version for id in "123"] == [160] * 3


# The asynchronous handle.


async def test_tasks_write_entities_too(url: str, clock: ManualClock) -> None:
    async with holdfast.open_async(url, clock=clock) as plane:
        written = await plane.entities.write("task", "1", {"status": 1, "metrics": 2}, session="s")
        assert (written.versions, written.durability) == ([1], Tier.CRITICAL)
        async with plane.entities.transaction(session="s") as transaction:
            entity = await transaction.get("task", "1")
            transaction.write("task", "1", "status", entity["status"] + 1)
            transaction.write("task", "1", "debug_x", 3)
        transaction = plane.entities.transaction()
        await transaction.get("task", "1")
        await plane.entities.update("task", "1", lambda entity: {"status": entity["status"] + 1})
        transaction.write("task", "1", "status", 0)
        with pytest.raises(VersionConflict):
            await transaction.commit()
        assert [each.fields["status"] for each in await plane.entities.history("task", "1")] == [1, 2, 3]
        assert [each.id for each in await plane.entities.scan("task")] == ["1"]
        records = (await plane.activity.read(session="s")).records
        assert [msgspec.json.decode(each.record)["fields"] for each in records] == [{"metrics": 2}, {"debug_x": 3}]
        async with await plane.locks.acquire(["entity_type", "task"]):
            await plane.entities.write("task", "1", {"status": 4})
            with pytest.raises(LockTimeout):
                await asyncio.create_task(plane.locks.acquire(["record_id", "task/1"], timeout_seconds=0))
        assert plane.locks.stats()["record_id"].acquisitions == 5
        assert await plane.entities.delete("task", "1", expected_version=4)


# The layer on every backend.


def test_the_layer_keeps_versions_and_histories(database: Database, clock: ManualClock) -> None:
    nobody = database.read(entities.get, TASK)
    assert (nobody.version, nobody.deleted, nobody.fields) == (0, True, {})
    assert database.transact(entities.delete, TASK) is None
    one, two = cbor2.dumps(1), cbor2.dumps(2)

    def write(tx: Transaction, fields: dict[str, bytes], removed: list[str]) -> int:
        return entities.write(tx, TASK, fields, removed, tier=Tier.CRITICAL)

    assert database.transact(write, {"a": one, "b": one}, []) == 1
    clock.advance_ms(5)
    assert database.transact(write, {"a": two}, ["b", "c"]) == 2
    found = database.read(entities.get, TASK)
    assert (found.version, found.fields, found.deleted) == (2, {"a": two}, False)
    assert (found.created_ms, found.updated_ms) == (START_MS, START_MS + 5)
    with pytest.raises(VersionConflict):
        database.transact(entities.require_version, TASK, 1)
    assert database.transact(entities.delete, TASK, expected_version=2) == 3
    assert database.transact(entities.delete, TASK) is None
    assert database.read(entities.require_version, TASK, 3).deleted
    assert [each.removed for each in database.read(entities.history, TASK, after=0, limit=10)] == [
        [],
        ["b", "c"],
        ["a"],
    ]


def test_the_layer_scans_past_any_number_of_deleted_ones(database: Database) -> None:
    def write(tx: Transaction) -> None:
        for number in range(300):
            key = EntityKey("main", "task", f"{number:03}")
            entities.write(tx, key, {"n": cbor2.dumps(number)}, [], tier=Tier.IMPORTANT)
            if number % 100:
                entities.delete(tx, key)

    database.transact(write)
    for limit in (1, 2, 3, 10):
        found = database.read(entities.scan, "main", "task", after="", limit=limit)
        assert [each.id for each in found] == ["000", "100", "200"][:limit]
    assert [each.id for each in database.read(entities.scan, "main", "task", after="100", limit=1)] == ["200"]


def test_two_nodes_on_one_postgres_lose_no_increment(
    postgres_url: str, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """Rows are locked in one process only; between processes the transaction sees to it that versions are right."""
    with (
        holdfast.open(postgres_url, activity=str(tmp_path / "one")) as one,
        holdfast.open(postgres_url, activity=str(tmp_path / "other")) as other,
    ):

        def increment(plane: Plane) -> None:
            for _ in range(10):
                plane.entities.update(
                    "task", "1", lambda entity: {"status": (entity["status"] if entity else 0) + 1}, attempts=1_000
                )

        for each in [threads.submit(increment, plane) for plane in (one, other, one, other)]:
            each.result(PATIENCE_SECONDS)
        assert one.entities.get("task", "1")["status"] == 40
        assert other.entities.get("task", "1").version == 40
