"""The audit log: entries before actions, outcomes after them, bounds, and what is never recorded."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.cli.main import root
from fastness.errors import Busy, DatabaseFailed, FastnessError, InvalidArgument, NotAllowed
from fastness.kv import Database, Transaction
from fastness.layers import audit as layer
from fastness.layers import tokens, worlds
from fastness.limits import AUDIT_REFUSALS_PER_MINUTE, AUDIT_TEXT_BYTES_MAX
from fastness.plane import audit, audited, embedded, open_plane_async
from fastness.plane.audit import Caller
from fastness.plane.open import Options
from fastness.runtime.maintenance.retention import trim_audit
from fastness.runtime.maintenance.space_options import SpaceOptions
from fastness.server.audit import RefusalRecorder, call_audited
from fastness.server.authorization import AllowAll
from fastness.server.mcp.transport import AuthorizedTransport
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.audit import AuditEntry, ReadAudit, audited_parts, count_of, detail_of, target_of
from fastness.wire.catalog import REQUESTS
from fastness.wire.queues import (
    DeleteQueue,
    NewMessage,
    Outcome,
    Outcomes,
    PauseKey,
    PurgeQueue,
    PutMessages,
    QueuePolicy,
    RedriveMessages,
    SetQueuePolicy,
)
from fastness.wire.sqs import CreateSqsQueue, StartMoveTask
from tests.support.failures import Failures
from tests.support.request_values import unannotated

AUDITED = [kind for kind in REQUESTS if kind.operation.audited]
SECRET = "s3cr3t"
ADA = Caller(actor="ada", token_id="1", client="10.0.0.1", entry="http")


def entry(action: str = "queue:purge", actor: str = "ada", universe: str | None = "main") -> AuditEntry:
    return AuditEntry("", 0, action, "jobs", universe, actor)


def sample(kind: Any, text: str) -> Any:
    """A value of a type in which all texts and bytes are `text`."""
    kind = unannotated(kind)
    options = get_args(kind)
    if get_origin(kind) in (UnionType, Union):
        return sample(next(each for each in options if each is not NoneType), text)
    if get_origin(kind) is list:
        return [sample(options[0], text)]
    if get_origin(kind) is dict:
        return {text: sample(options[1], text)}
    if kind in (bool, int, float):
        return kind(1)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {
            field.name: sample(field.type, text) for field in msgspec.structs.fields(kind) if field.name != "tier"
        }
        return kind(**fields)
    return text.encode() if kind is bytes else text


# The log.


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["queue:purge", "queue:pause", "token:revoke"]))),
    st.sampled_from(["", "a", "c"]),
    st.sampled_from(["", "queue:*", "queue:pause"]),
    st.integers(1, 5),
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_pages_have_the_entries_that_match_newest_first(
    actions: list[tuple[str, str]], actor: str, action: str, limit: int, times: tuple[int, int]
) -> None:
    clock = ManualClock()
    start_ms = clock.now_ms()
    with MemoryDatabase(clock=clock) as database:
        stored = []
        for number, (who, what) in enumerate(actions):
            stored.append(database.transact(layer.begin, entry(what, who)))
            clock.advance_ms(number % 3)
        database.transact(layer.begin, entry(universe="other"))
        since_ms, until_ms = start_ms + times[0], start_ms + times[1]
        expected = [
            each
            for each in reversed(stored)
            if since_ms <= each.at_ms < until_ms
            and actor in ("", each.actor)
            and (not action or each.action == action or (action == "queue:*" and each.action.startswith("queue:")))
        ]
        found: list[AuditEntry] = []
        after: str | None = ""
        while after is not None:
            request = ReadAudit("main", since_ms, until_ms, actor, action, after, limit)
            page = database.read(layer.page, request)
            assert len(page.entries) <= limit
            found += page.entries
            after = page.next
        assert found == expected


def test_a_page_reads_a_bounded_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "AUDIT_SCANNED_MAX", 3)
    with MemoryDatabase() as database:
        for number in range(8):
            database.transact(layer.begin, entry(actor="bob" if number == 1 else "ada"))
        pages = [database.read(layer.page, ReadAudit("main", actor="bob"))]
        while (after := pages[-1].next) is not None:
            pages.append(database.read(layer.page, ReadAudit("main", actor="bob", after=after)))
        assert [len(page.entries) for page in pages] == [0, 0, 1]


def test_invalid_pages_are_refused() -> None:
    with MemoryDatabase() as database:
        for bad in (ReadAudit(after="x"), ReadAudit(after="1-" + "0" * 60)):
            with pytest.raises(InvalidArgument):
                database.read(layer.page, bad)


def test_a_full_log_loses_its_oldest_entries(database: Database) -> None:
    for number in range(5):
        database.transact(layer.begin, entry(actor=str(number)), entries_max=3)
    assert [each.actor for each in database.read(layer.page, ReadAudit("main")).entries] == ["4", "3", "2"]
    lost = AuditEntry("0" * 32, 1, "queue:purge", universe="main")
    database.transact(layer.finish, lost, "ok")  # The entry of a slow action may be gone by then.
    assert len(database.read(layer.page, ReadAudit("main")).entries) == 3


def test_old_entries_are_deleted_from_every_log(database: Database, clock: ManualClock) -> None:
    for universe in ("main", "other", None):
        database.transact(layer.begin, entry(universe=universe))
    clock.advance_ms(90_000)
    database.transact(layer.begin, entry(actor="bob"))
    assert trim_audit(database, SpaceOptions(audit_keep_seconds=None)) == 0
    assert trim_audit(database, SpaceOptions(audit_keep_seconds=60)) == 3
    assert [each.actor for each in database.read(layer.page, ReadAudit("main")).entries] == ["bob"]
    for _ in range(2):  # The deleted entries do not count any more.
        database.transact(layer.begin, entry(actor="bob"), entries_max=3)
    assert len(database.read(layer.page, ReadAudit("main")).entries) == 3


def test_a_universe_that_has_only_an_audit_log_is_not_listed(database: Database) -> None:
    for universe in ("a", "typo", "typo2", "z"):
        database.transact(layer.begin, entry(universe=universe))
    for universe in ("a", "z"):
        database.transact(_put, worlds.subspace(worlds.World(universe, "w")).key())
    assert database.read(worlds.universes, limit=10) == ["a", "z"]
    assert database.read(worlds.universes, limit=1) == ["a"]
    assert database.read(worlds.universes, after="a", limit=1) == ["z"]


def _put(tx: Transaction, key: bytes) -> None:
    tx.put(key, b"")


# Entries.


def test_no_secret_or_payload_is_in_the_audit_log() -> None:
    failures = Failures()
    for kind in AUDITED:
        with failures.of(kind.__name__):
            named = {"queue", "world", "agent", "workflow", "name", "key", "id", "number", "universe", "source"}
            named |= {"handle", "destination"}
            listed = {
                "ids",
                "universes",
                "verbs",
                "queues",
                "sends_to",
                "accepts_from",
                "state",
                "to",
                "cron",
                "timezone",
            }
            listed |= {"program"}
            request = sample(kind, SECRET)
            plain: dict[str, Any] = {name: "name" for name in named if isinstance(getattr(request, name, None), str)}
            plain |= {
                name: "x" if isinstance(getattr(request, name), str) else ["x"]
                for name in listed
                if hasattr(request, name)
            }
            request = msgspec.structs.replace(request, **plain)
            with MemoryDatabase() as database:
                stored = database.transact(audit.begin, [request], ADA)[0]
                database.transact(audit.refuse, [request], ADA, "not_allowed")
                database.transact(audit.finish, [stored], [request], "ok", sample(QueuePolicy, SECRET))
                pairs = database.read(Transaction.scan, b"", b"\xff" * 8, limit=100)
            assert SECRET not in repr(pairs)
            assert len(msgspec.msgpack.encode(stored)) < 2_048
            assert stored.target or not plain, "an entry names what was changed"
    failures.check()


def test_an_entry_says_what_was_asked_for() -> None:
    redrive = RedriveMessages("jobs", ["a", "b"])
    assert (target_of(redrive), detail_of(redrive)) == ("jobs", "ids=a b, limit=1000")
    assert detail_of(DeleteQueue("jobs", force=True)) == "force=true"
    create = CreateSqsQueue(name="jobs", attributes={"VisibilityTimeout": "7", "DelaySeconds": "1", SECRET: "x"})
    assert (target_of(create), detail_of(create)) == ("jobs", "attributes=DelaySeconds VisibilityTimeout")
    move = StartMoveTask(source="dead", destination="jobs", per_second=5)
    assert (target_of(move), detail_of(move)) == ("dead", "destination=jobs, per_second=5")
    many = RedriveMessages("jobs", [f"id-{number}" for number in range(1_000)])
    assert len(detail_of(many).encode()) <= AUDIT_TEXT_BYTES_MAX
    assert count_of(redrive, Outcomes([Outcome(), Outcome("not_found")])) == 1
    assert count_of(redrive, None) is None


def test_a_new_policy_is_recorded_by_the_fields_that_change() -> None:
    with fastness.open("memory:") as plane:
        plane.queue("jobs").set_policy(QueuePolicy(max_attempts=8, dead_letter_queue="old"))
        policy = QueuePolicy(max_attempts=3, dead_letter_queue="new", rate_per_second=2.5)
        request = SetQueuePolicy("jobs", policy, plane.universe)
        (stored,) = plane.transact(audit.begin, [request], ADA)
    assert stored.detail == "max_attempts 8 → 3, dead_letter_queue, rate_per_second none → 2.5"
    (stored,) = MemoryDatabase().transact(audit.begin, [SetQueuePolicy("", policy)], ADA)  # Refused afterwards.
    assert stored.detail == "policy"


def test_the_operations_of_a_commit_are_recorded() -> None:
    pause = PauseKey("jobs", "customer", seconds=60.0)
    commit = CommitAtomic([PutMessages("jobs", [NewMessage(b"1")]), pause])
    assert audited_parts(commit) == [pause]
    assert audited_parts(CommitAtomic([PutMessages("jobs", [NewMessage(b"1")])])) == []


# Calls.


def calls(test: Callable[[Any], Awaitable[None]]) -> None:
    """Run a test with the transport of an embedded plane."""

    async def run() -> None:
        transport = await open_plane_async("memory:", Options())
        try:
            await test(transport)
        finally:
            await transport.close()

    asyncio.run(run())


def page_of(database: Database, universe: str | None = "main") -> list[AuditEntry]:
    return database.read(layer.page, ReadAudit(universe)).entries


def test_an_entry_is_committed_before_the_action_and_gets_its_outcome() -> None:
    async def test(transport: Any) -> None:
        database = transport.services.database
        before: list[AuditEntry] = []

        async def act() -> Any:
            before.extend(page_of(database))
            return await transport.call(PurgeQueue("jobs"))

        await transport.call(PutMessages("jobs", [NewMessage(b"1"), NewMessage(b"2")]))
        await call_audited(transport, AllowAll(client="127.0.0.1"), PurgeQueue("jobs"), act)
        (stored,) = page_of(database)
        assert (stored.outcome, stored.count, stored.client, stored.entry) == ("ok", 2, "127.0.0.1", "http")
        assert before == [msgspec.structs.replace(stored, outcome="started", count=None)]

        async def fail() -> Any:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await call_audited(transport, AllowAll(), PurgeQueue("jobs"), fail)
        assert page_of(database)[0].outcome == "internal"

    calls(test)


def test_without_an_entry_there_is_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(transport: Any) -> None:
        acted = []

        async def act() -> Any:
            acted.append(True)

        def fail(*args: Any) -> None:
            raise DatabaseFailed("The disk is gone")

        monkeypatch.setattr(layer, "begin", fail)
        with pytest.raises(DatabaseFailed):
            await call_audited(transport, AllowAll(), PurgeQueue("jobs"), act)
        assert not acted
        monkeypatch.undo()
        monkeypatch.setattr(layer, "finish", fail)
        await call_audited(transport, AllowAll(), PurgeQueue("jobs"), act)  # What was done is not reported as failed.
        assert acted
        assert page_of(transport.services.database)[0].outcome == "started"

    calls(test)


def test_a_call_whose_caller_has_left_gets_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(transport: Any) -> None:
        database = transport.services.database
        begun, released = asyncio.Event(), asyncio.Event()

        async def act() -> Any:
            begun.set()
            await released.wait()
            return await transport.call(PurgeQueue(""))

        def start() -> "asyncio.Future[Any]":
            return asyncio.ensure_future(call_audited(transport, AllowAll(), PurgeQueue("jobs"), act))

        left = start()
        await begun.wait()
        left.cancel()
        await asyncio.wait([left])
        assert (left.cancelled(), page_of(database)[0].outcome) == (True, "started")
        monkeypatch.setattr(audited, "AUDITED_CALLS_MAX", 1)
        with pytest.raises(Busy):
            await start()
        released.set()
        async with asyncio.timeout(60):
            while transport.services.recorded_calls:
                await asyncio.sleep(0)
        assert [each.outcome for each in page_of(database)] == ["invalid_name"]

    calls(test)


def test_a_plane_that_closes_waits_for_calls_whose_callers_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"dir:{tmp_path / 'data'}"

    async def run(*, ends: bool) -> None:
        transport = await open_plane_async(url, Options())
        begun = asyncio.Event()

        async def act() -> Any:
            begun.set()
            await (asyncio.sleep(0) if ends else asyncio.Event().wait())

        left = asyncio.ensure_future(call_audited(transport, AllowAll(), PurgeQueue("jobs"), act))
        await begun.wait()
        left.cancel()
        await transport.close()

    asyncio.run(run(ends=True))
    monkeypatch.setattr(embedded, "AUDIT_CLOSE_SECONDS", 0.01)
    asyncio.run(run(ends=False))
    with fastness.open(url) as plane:
        assert [each.outcome for each in plane.audit.read().entries] == ["started", "ok"]


def test_calls_of_mcp_clients_are_recorded() -> None:
    async def test(transport: Any) -> None:
        inside = AuthorizedTransport(transport, AllowAll(client="10.1.1.1"), asyncio.Event().wait)  # type: ignore[arg-type]
        await inside.call(PutMessages("jobs", [NewMessage(b"1")]))
        await inside.call(PurgeQueue("jobs"))
        (stored,) = page_of(transport.services.database)
        assert (stored.action, stored.entry, stored.client) == ("queue:purge", "mcp", "10.1.1.1")

    calls(test)


def test_refused_calls_are_in_the_log_of_the_plane_up_to_a_bound() -> None:
    async def test(transport: Any) -> None:
        recorder = RefusalRecorder(transport)
        for _ in range(AUDIT_REFUSALS_PER_MINUTE + 100):
            recorder.record(AllowAll(client="10.1.1.1"), PurgeQueue("jobs", universe="other"), NotAllowed("no"))
        recorder.record(AllowAll(), PutMessages("jobs", []), NotAllowed("no"))
        recorder.record(AllowAll(), PurgeQueue("jobs"), InvalidArgument("no"))
        await recorder.stop()
        database = transport.services.database
        refused = database.read(layer.page, ReadAudit(limit=1_000)).entries
        assert AUDIT_REFUSALS_PER_MINUTE <= len(refused) <= AUDIT_REFUSALS_PER_MINUTE + 2
        assert {(each.action, each.target, each.outcome) for each in refused} == {
            ("queue:purge", "other/jobs", "not_allowed")
        }
        assert page_of(database, "other") == []

    calls(test)


# Commands.


def test_a_command_on_a_directory_is_recorded_with_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    url = f"dir:{tmp_path / 'data'}"

    def run(*words: str) -> str:
        result = CliRunner().invoke(root, ["--url", url, *words])
        assert result.exit_code in (0, 4), result.output
        return result.stdout

    run("queue", "put", "jobs", "{}")
    run("queue", "purge", "jobs", "--yes")
    run("message", "cancel", "jobs", "0" * 32)
    token = run("token", "create", "t", "--allow", "*").strip()
    found = json.loads(run("--json", "audit"))
    assert [(each["action"], each["target"], each["outcome"]) for each in found] == [
        ("queue:cancel", f"jobs/{'0' * 32}", "message_not_found"),
        ("queue:purge", "jobs", "ok"),
    ]
    assert found[0]["actor"].startswith("ann@")
    assert found[0]["from"] == "cli"
    (created,) = json.loads(run("--json", "audit", "--plane", "--since", "1h", "--action", "token:*"))
    assert (created["target"], created["universe"]) == ("t", None)
    assert token.rpartition("_")[2] not in json.dumps(created)
    assert "queue:purge" in run("audit")
    with fastness.open(url) as plane:  # A program that opens the plane is not recorded.
        plane.queue("jobs").purge()
        assert len(plane.audit.read().entries) == 2
        assert plane.transact(tokens.all_tokens)


KILLED = """
import os, signal, sys
import msgspec
from fastness.plane import Options, open_plane
from fastness.plane.audited import command_caller
from fastness.plane.handlers import HANDLERS
from fastness.wire.queues import PurgeQueue

def die(tx, request):
    os.kill(os.getpid(), signal.SIGKILL)

HANDLERS[PurgeQueue] = msgspec.structs.replace(HANDLERS[PurgeQueue], run=die)
open_plane(sys.argv[1], Options(caller=command_caller())).call(PurgeQueue("jobs"))
"""


def test_an_empty_log_says_how_many_entries_the_other_log_has(cli: Any) -> None:
    cli("token", "create", "admin", "--universe", "*", "--allow", "*")
    assert "No entries of the universe main; the log of the plane has 1: fastness audit --plane" in cli("audit").stderr
    assert cli("audit", "--plane").stderr == ""
    assert cli("audit", "--action", "queue:*").stderr == "No entries.\n"
    cli("queue", "put", "jobs", "1")
    cli("queue", "purge", "jobs", "--yes")
    empty = cli("audit", "--plane", "--action", "queue:*").stderr
    assert "No entries of the plane; the log of the universe main has 1: fastness audit" in empty
    assert cli("audit", "--action", "token:*", "--json").stdout == "[]\n"


def test_a_killed_process_leaves_a_started_entry(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'data'}"
    done = subprocess.run([sys.executable, "-c", KILLED, url], env=os.environ, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    with fastness.open(url) as plane:
        assert [(each.action, each.outcome) for each in plane.audit.read().entries] == [("queue:purge", "started")]
        assert plane.audit.read_plane().entries == []


def test_errors_of_an_action_are_those_of_the_caller(tmp_path: Path) -> None:
    async def run() -> None:
        caller = Caller(actor="ann@host", entry="cli")
        transport = await open_plane_async(f"dir:{tmp_path / 'data'}", Options(caller=caller))
        try:
            with pytest.raises(FastnessError):
                await transport.call(RedriveMessages("", ["x"]))
            await transport.call(PutMessages("jobs", [NewMessage(b"1")]))
            await transport.call(PurgeQueue("jobs"))
            stored = page_of(transport.services.database)
            assert [(each.outcome, each.actor) for each in stored] == [("ok", "ann@host"), ("invalid_name", "ann@host")]
        finally:
            await transport.close()

    asyncio.run(run())
