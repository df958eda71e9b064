"""Durability tiers of entity fields: the policy, and where each tier is stored."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import fastness
from fastness import Plane, Tier, TierPolicy
from fastness.backends.memory import MemoryDatabase
from fastness.errors import (
    FastnessError,
    InvalidArgument,
    InvalidName,
    InvalidValue,
    PathUnusable,
)
from fastness.limits import (
    ACTIVITY_RECORD_BYTES_MAX,
)
from fastness.plane.embedded import EmbeddedTransport
from fastness.plane.services import Services
from fastness.testing.faults import FaultyDatabase
from tests.support.failures import Failures
from tests.unit import entity_fixtures
from tests.unit.entity_fixtures import logged, row_locks, rows_locked
from tests.unit.stored_pairs import everything

url = entity_fixtures.url
plane = entity_fixtures.plane


# Tiers of fields.


def test_default_tiers_of_fields() -> None:
    failures = Failures()
    for kind, field, tier in [
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
    ]:
        with failures.of((kind, field, tier)):
            assert TierPolicy().classify(kind, field) is tier
    failures.check()


def test_exact_fields_precede_patterns_and_patterns_match_in_order() -> None:
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

        [records]
        "task_*" = "task"
        "*" = "other"
        """
    )
    assert (policy.record_name("task_1"), policy.record_name("Task_1")) == ("task/task_1", "other/Task_1")
    assert policy.classify("order", "total") is Tier.CRITICAL
    assert policy.classify("task", "status") is Tier.IMPORTANT
    assert policy.classify("order", "trace_id") is Tier.BEST_EFFORT
    assert policy.classify("order", "ml_score") is Tier.IMPORTANT
    assert policy.classify("order", "debug_x") is Tier.BEST_EFFORT
    assert policy.classify("task", "id") is Tier.CRITICAL
    assert TierPolicy.from_toml("").classify("task", "status") is Tier.CRITICAL


def test_an_invalid_tier_policy_is_refused_with_a_hint() -> None:
    failures = Failures()
    for document, says in [
        ("[feilds]\n", "did you mean fields"),
        ("[pattern]\n", "did you mean patterns"),
        ("[xyz]\n", "fields, patterns or records"),
        ("[record]\n", "did you mean records"),
        ("records = 3", r"write \[records\]"),
        ('[records]\n"a/*" = "task"', "pattern of record ids"),
        ("fields = 3", r"write \[fields\]"),
        ('[fields]\n"task.status" = "crucial"', "crucial"),
        ('[fields]\n"task.status" = 7', "7"),
        ('[fields]\ntask.status = "critical"', "critical"),  # TOML parses this as nested tables.
        ('[fields]\nstatus = "critical"', r"kind\.field"),
        ('[patterns]\n"x_*" = ""', "x_"),
        ("[fields", "not TOML"),
        (f"fields = {'[' * 10_000}", "not TOML"),
    ]:
        with failures.of((document, says)), pytest.raises(InvalidArgument, match=says):
            TierPolicy.from_toml(document)
    failures.check()


def test_a_plane_opens_with_a_tier_policy_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "tiers.toml").write_text('[fields]\n"order.total" = "critical"\n')
    for tiers in (tmp_path / "tiers.toml", str(tmp_path / "tiers.toml"), TierPolicy({"order.total": Tier.CRITICAL})):
        with fastness.open("memory:", tiers=tiers) as plane:
            assert plane.entities.write("order", "1", {"total": 3}).durability is Tier.CRITICAL
    with pytest.raises(PathUnusable, match=r"none\.toml"):
        fastness.open("memory:", tiers=str(tmp_path / "none.toml"))


# Storage by tier.


def test_a_critical_field_is_synced_and_locks_its_row(plane: Plane) -> None:
    written = plane.entities.write("task", "1", {"status": "open"})
    assert (written.versions, written.durability) == ([1], Tier.CRITICAL)
    stats = plane.locks.stats()
    assert (stats["record_id"].acquisitions, stats["record_id"].holders) == (row_locks(plane, 1), 0)
    intents = [stats[level].intents for level in ("entity_type", "database")]  # type: ignore[attr-defined]
    assert intents == [row_locks(plane, 1)] * 2


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
    assert logged(plane, session="Abc", kind="entities") == [record]
    assert plane.entities.get("task", "1").fields == {"status": "open"}
    assert len(plane.entities.history("task", "1")) == 1


def test_a_best_effort_field_without_a_session_is_logged_under_the_planes_own(plane: Plane) -> None:
    plane.entities.write("task", "1", {"debug_trace": 1})
    plane.entities.put_if_version("task", "1", {"debug_trace": 2, "note": "x"}, expected_version=0)
    records = plane.activity.read(kind="entities").records
    assert [msgspec.json.decode(each.record)["fields"] for each in records] == [{"debug_trace": 1}, {"debug_trace": 2}]
    assert {each.session for each in records} == {plane._transport.services.session}  # type: ignore[attr-defined]


def test_a_write_with_mixed_tiers_gets_the_stronger_durability(plane: Plane) -> None:
    written = plane.entities.write("task", "1", {"status": "open", "note": "x", "debug_trace": 1}, session="s")
    assert (written.versions, written.durability) == ([1], Tier.CRITICAL)
    assert plane.entities.get("task", "1").fields == {"status": "open", "note": "x"}
    assert logged(plane, session="s") == [{"kind": "task", "id": "1", "fields": {"debug_trace": 1}}]
    assert plane.entities.write("task", "1", {"note": "y", "debug_trace": 2}).durability is Tier.IMPORTANT


def test_each_tier_syncs_exactly_as_documented(tmp_path: Path) -> None:
    """An IMPORTANT commit does not sync; a CRITICAL commit also syncs those before it."""
    database = FaultyDatabase(MemoryDatabase())
    with Plane(EmbeddedTransport(Services(database, logs=tmp_path))) as plane:
        plane.entities.write("task", "1", {"note": 1})
        database.sync()
        write: Callable[[], object]
        for write in (
            lambda: plane.entities.write("task", "1", {"note": 2}),
            lambda: plane.entities.write("task", "1", {"note": 2, "debug_x": 1}),
            lambda: read_and_write(plane, "note"),
            lambda: plane.entities.update("task", "1", lambda entity: {"note": entity.fields["note"] + 1}),
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


# Writes that are refused as a whole.


def test_a_write_that_cannot_be_logged_is_refused_as_a_whole(plane: Plane) -> None:
    """A BEST_EFFORT field that the session log refuses is detected before the CRITICAL fields are committed."""
    failures = Failures()
    for how in ["write", "transaction", "put"]:
        for value, session in [("x" * ACTIVITY_RECORD_BYTES_MAX, None), ({None: 1}, None), (1, "no session")]:
            with failures.of((how, value, session)):
                fields = {"status": "open", "debug_trace": value}
                with pytest.raises(FastnessError) as refused:
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
    failures.check()
