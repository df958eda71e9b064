"""Random histories: what plain Python reads through handles equals the lake, table by table.

A history is several periods of random operations. After each one there is an ingest, which may be killed before or
after any of its commits. Worlds are forked and deleted, and between two periods the plane may be restored from a
backup. A model records what the operations returned; it shares no code with the pipeline.
"""

import copy
import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import fastness
from fastness.cli import backup_format
from fastness.cli.main import root as cli
from fastness.errors import AnotherHistory
from fastness.handles.sync.messages import Message
from fastness.pipeline import events, lifecycles, replays
from fastness.pipeline.config import Config
from fastness.pipeline.intake import ingest_run, plans
from fastness.pipeline.jobs import accept, audit, ingest, rollup
from fastness.pipeline.lake import Lake, LakeTable
from fastness.pipeline.schemas import MAIL, MESSAGES, TABLES
from fastness.testing.clock import ManualClock
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent
from fastness.wire.queues import QueuePolicy
from tests.pipeline import planes

WORLDS = ("ada", "bob", "cleo")
QUEUES = ("jobs", "emails")
AGENTS = ("eve", "fay", "gus")
LEASE_SECONDS = 40_000.0  # No lease expires: a history takes minutes.


class Killed(BaseException):
    """Simulates a kill: nothing handles it."""


class MessageModel(SimpleNamespace):
    """What happened to a message."""

    queue: str
    put_ms: int
    attempts: int
    nacks: int
    outcome: str
    error: str | None
    first_leased_ms: int | None
    ended_ms: int | None


class History:
    """A plane under random operations, and a model of it."""

    def __init__(self, root: Path, seed: int, postgres: str | None = None) -> None:
        self.root = root
        self.config = Config(data=f"dir:{root / 'data'}", lake=str(root / "lake"), reducer=planes.CHAIN)
        self.nodes: list[dict[str, Any]] = [{}]
        if postgres is not None:
            folders, objects = (str(root / "one"), str(root / "two")), f"dir:{root / 'objects'}"
            self.config = msgspec.structs.replace(self.config, data=postgres, objects=objects, activity=folders)
            self.nodes = [{"objects": objects, "activity": folder} for folder in folders]
        self.dice = random.Random(seed)
        self.clock = ManualClock(planes.START_MS)
        self.messages: dict[str, MessageModel] = {}
        self.mails: dict[tuple[str, str, str], list[int | None]] = {}  # Times of storing, reading and confirming.
        self.entities: set[str] = set()
        self.worlds: set[str] = set()
        self.deleted: dict[str, list[bytes]] = {}  # The records of deleted worlds, when they were deleted.
        self.forks = 0
        self.held: list[Message] = []
        self.backup: tuple[Any, ...] | None = None  # The model at the time of the backup.

    def run(self) -> None:
        for _ in range(self.dice.randrange(2, 5)):
            self.held = []  # Leases of a closed plane are not used again.
            with self.opened() as nodes:
                for name in QUEUES:
                    nodes[0].queue(name).set_policy(QueuePolicy(max_attempts=2, visibility_seconds=LEASE_SECONDS))
                for _ in range(self.dice.randrange(4, 25)):
                    self.clock.advance_ms(self.dice.randrange(1, 5_000))
                    getattr(self, f"_{self.dice.choice(OPERATIONS)}")(self.dice.choice(nodes))
            self._maybe_die(lambda: ingest.run(None, self.config))
            if len(self.nodes) > 1:
                continue  # PostgreSQL is backed up with its own tools.
            if self.backup is None and self.dice.random() < 0.4:
                self._back_up()
            elif self.backup is not None and self.dice.random() < 0.5:
                self._restore()

    @contextmanager
    def opened(self) -> Iterator[list[fastness.Plane]]:
        """The plane, opened by each node."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(planes.opened(self.config.data, clock=self.clock, **options))
                for options in self.nodes
            ]

    def _back_up(self) -> None:
        command = ["--url", self.config.data, "backup", str(self.root / "backup")]
        self.clock.advance_ms(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backup_format, "time", SimpleNamespace(time=lambda: self.clock.now_ms() / 1_000))
            assert CliRunner().invoke(cli, command).exit_code == 0
        self.clock.advance_ms(1)
        self.backup = copy.deepcopy((self.messages, self.mails, self.entities, self.worlds, self.deleted))

    def _restore(self) -> None:
        """Replace the plane by its backup, and let the lake follow it."""
        assert self.backup is not None
        shutil.rmtree(self.root / "data")
        command = ["restore", str(self.root / "backup"), str(self.root / "data")]
        assert CliRunner().invoke(cli, command).exit_code == 0
        self.messages, self.mails, self.entities, self.worlds, self.deleted = copy.deepcopy(self.backup)
        with pytest.raises(AnotherHistory):
            ingest.run(None, self.config)
        self._maybe_die(lambda: accept.run(None, self.config))
        accept.run(None, self.config)

    def _maybe_die(self, work: Callable[[], Any]) -> None:
        replace, count, at = LakeTable.replace, [0], self.dice.randrange(12)
        is_after = self.dice.random() < 0.5

        def counted(table: LakeTable, *args: Any, **options: Any) -> None:
            count[0] += 1
            if count[0] == at and not is_after:
                raise Killed
            replace(table, *args, **options)
            if count[0] == at and is_after:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LakeTable, "replace", counted)
            try:
                work()
            except Killed:
                return

    def _append(self, plane: fastness.Plane) -> None:
        name = self.dice.choice([name for name in (*WORLDS, *sorted(self.worlds)) if name not in self.deleted])
        world = plane.world(name)
        if name not in self.worlds:
            world.create()
            self.worlds.add(name)
        entries = [{"n": self.dice.random(), "of": name} for _ in range(self.dice.randrange(1, 30))]
        world.append(entries, expected_head=world.head())

    def _fork(self, plane: fastness.Plane) -> None:
        if self.worlds:
            name = self.dice.choice(sorted(self.worlds))
            self.forks += 1
            target = f"{name}-{self.forks}"
            plane.world(name).fork(target, height=self.dice.randint(0, plane.world(name).head()))
            self.worlds.add(target)

    def _delete(self, plane: fastness.Plane) -> None:
        if len(self.worlds) > 1:
            name = self.dice.choice(sorted(self.worlds))
            self.deleted[name] = planes._records(plane, name)
            plane.world(name).archive()
            plane.world(name).delete()
            self.worlds.remove(name)

    def _drain(self, plane: fastness.Plane) -> None:
        for name in sorted(self.worlds):
            plane.world(name).inbox.put(DomainEvent(schema="made", payload=b"%d" % self.dice.randrange(100)))
            plane.world(name).drain()

    def _compact(self, plane: fastness.Plane) -> None:
        for name in sorted(self.worlds):
            world, records = plane.world(name), planes._records(plane, name)
            height = world.head()
            baseline = world.snapshots.baseline().height
            if height > baseline:
                state = replays.replay(records[:height], replays.chain)
                world.snapshots.commit(state, height=height)
                world.compact(entries=self.dice.randrange(4, 20), margin=0)

    def _put(self, plane: fastness.Plane) -> None:
        queue = self.dice.choice(QUEUES)
        size = self.dice.choice((10, 2_000, 20_000))  # Inline, stored separately, and a blob.
        for _ in range(self.dice.randrange(1, 4)):
            receipt = plane.queue(queue).put(b"x" * size, tier=fastness.Tier.IMPORTANT)
            self.messages[receipt.id] = MessageModel(
                queue=queue,
                put_ms=self.clock.now_ms(),
                attempts=0,
                nacks=0,
                outcome="waiting",
                error=None,
                first_leased_ms=None,
                ended_ms=None,
            )

    def _receive(self, plane: fastness.Plane) -> None:
        for message in plane.queue(self.dice.choice(QUEUES)).receive_many(self.dice.randrange(1, 5)):
            model = self.messages[message.id]
            model.attempts += 1
            model.outcome = "leased"
            model.first_leased_ms = model.first_leased_ms or self.clock.now_ms()
            self.held.append(message)

    def _settle(self, plane: fastness.Plane) -> None:
        del plane
        self.dice.shuffle(self.held)
        for _ in range(min(len(self.held), self.dice.randrange(1, 4))):
            message = self.held.pop()
            model = self.messages[message.id]
            self.clock.advance_ms(1)
            match self.dice.randrange(4):
                case 0 | 1:
                    message.ack()
                    model.outcome = "acked"
                case 2:
                    message.nack(delay_seconds=0.0, error=f"error {model.attempts}")
                    model.nacks += 1
                    model.outcome, model.error = ("waiting", None) if model.attempts < 2 else ("dead", "error 2")
                case _:
                    message.reject("rejected")
                    model.outcome, model.error = "dead", "rejected"
            model.ended_ms = self.clock.now_ms() if model.outcome in ("acked", "dead") else None

    def _send(self, plane: fastness.Plane) -> None:
        sender, recipient = self.dice.sample(AGENTS, 2)
        sent = plane.mailbox(sender).send(recipient, b"hello")
        self.mails[recipient, sender, sent.id] = [self.clock.now_ms(), None, None]

    def _read(self, plane: fastness.Plane) -> None:
        agent = self.dice.choice(AGENTS)
        mails = plane.mailbox(agent).read(limit=self.dice.randrange(1, 5))
        for mail in mails:
            times = self.mails[agent, mail.sender.partition("@")[0], mail.id]
            times[1] = times[1] or self.clock.now_ms()
        if mails and self.dice.random() < 0.7:
            self.clock.advance_ms(1)
            plane.mailbox(agent).confirm(mails[:1])
            self.mails[agent, mails[0].sender.partition("@")[0], mails[0].id][2] = self.clock.now_ms()

    def _change(self, plane: fastness.Plane) -> None:
        id = f"o-{self.dice.randrange(4)}"
        self.entities.add(id)
        if self.dice.random() < 0.2:
            plane.entities.delete("order", id)
        else:
            plane.entities.write("order", id, {"total": self.dice.randrange(100), "paid": self.dice.random() < 0.5})

    def _log(self, plane: fastness.Plane) -> None:
        session = f"session-{self.dice.randrange(3)}"
        for _ in range(self.dice.randrange(1, 6)):
            plane.activity.log(session, {"cost": self.dice.random()}, kind="metrics")
        if self.dice.random() < 0.3:
            plane.activity.end(session)


OPERATIONS = (
    "append",
    "append",
    "fork",
    "delete",
    "drain",
    "compact",
    "put",
    "put",
    "receive",
    "settle",
    "settle",
    "send",
    "read",
    "change",
    "log",
)


def lake_rows(history: History, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = Lake(history.config.lake).table(TABLES[name]).rows().to_pylist()
    return rows


def at_ms(moment: Any) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1_000)


def expected_tables(history: History) -> dict[str, Any]:
    """The tables that are filled by `ingest` and `audit`, computed from what handles return."""
    tables: dict[str, Any] = {
        name: Counter() for name in ("journal", "segments", "activity", "entity_changes", "world_state")
    }
    with history.opened() as nodes:
        plane = nodes[0]
        for name in history.worlds:
            records = planes._records(plane, name)
            assert len(records) == plane.world(name).head()
            for height, record in enumerate(records):
                tables["journal"][name, height, hashlib.sha256(record).hexdigest(), record] += 1
            for each in plane.world(name).segments():
                tables["segments"][name, each.start, each.end, each.object_path, each.checksum, each.size, "ok"] += 1
            link = None
            for record in records:
                link = hashlib.sha256((link or b"") + record).digest()
            digest = hashlib.sha256(canonical(link)).hexdigest()
            tables["world_state"][name, len(records), digest, "ok"] += 1
        for id in history.entities:
            for change in plane.entities.history("order", id):
                fields = orjson.dumps(change.fields, option=orjson.OPT_SORT_KEYS)
                tables["entity_changes"][id, change.version, change.at_ms, fields, change.deleted] += 1
        for node in nodes:
            tables["activity"] |= Counter(logged(node))  # Both read the logs in the object store.
    return tables


def logged(plane: fastness.Plane) -> Iterator[tuple[Any, ...]]:
    after = None
    while True:
        page = plane.activity.read(after=after)
        for each in page.records:
            yield each.session, each.kind, each.n, each.at_ms, each.record
        if not page.records or page.next is None:
            return
        after = page.next


def found_tables(history: History) -> dict[str, Any]:
    def count(name: str, *columns: str) -> Counter[Any]:
        return Counter(tuple(row[column] for column in columns) for row in lake_rows(history, name))

    def of_live_worlds(rows: Counter[Any]) -> Counter[Any]:
        return Counter({row: number for row, number in rows.items() if row[0] not in history.deleted})

    return {
        "journal": of_live_worlds(count("journal", "world", "height", "hash", "raw")),
        "segments": of_live_worlds(
            count("segments", "world", "start", "last", "object_path", "checksum", "size", "verdict")
        ),
        "activity": Counter(
            (row["session"], row["kind"], row["n"], at_ms(row["logged_at"]), row["record"].encode())
            for row in lake_rows(history, "activity")
        ),
        "entity_changes": Counter(
            (
                row["id"],
                row["version"],
                at_ms(row["changed_at"]),
                orjson.dumps(orjson.loads(row["fields"]), option=orjson.OPT_SORT_KEYS),
                row["deleted"],
            )
            for row in lake_rows(history, "entity_changes")
        ),
        "world_state": count("world_state", "world", "height", "digest", "verdict"),
    }


def expected_messages(history: History) -> Counter[Any]:
    return Counter(
        (id, m.queue, m.put_ms, m.first_leased_ms, m.ended_ms, m.attempts, m.nacks, m.outcome, m.error)
        for id, m in history.messages.items()
    )


def expected_mails(history: History) -> Counter[Any]:
    return Counter(
        (*key, *times, "confirmed" if times[2] else "delivered" if times[1] else "waiting")
        for key, times in history.mails.items()
    )


def message_key(row: dict[str, Any]) -> tuple[Any, ...]:
    times = (at_ms(row[name]) for name in ("put_at", "first_leased_at", "ended_at"))
    return (row["id"], row["queue"], *times, row["attempts"], row["nacks"], row["outcome"], row["error"])


def mail_key(row: dict[str, Any]) -> tuple[Any, ...]:
    recipient, sender = (row[name].partition("@")[0] for name in ("recipient", "sender"))
    times = (at_ms(row[name]) for name in ("stored_at", "delivered_at", "ended_at"))
    return (recipient, sender, row["id"], *times, row["outcome"])


def folded(history: History, kind: str) -> list[dict[str, Any]]:
    """The rows of `messages` or `mail` as the rollup folds them from the lake, in this process."""
    rows = [row for row in lake_rows(history, "activity") if row["kind"] == kind]
    batch = pa.RecordBatch.from_pylist(
        [{"universe": row["universe"], "record": row["record"]} for row in rows],
        pa.schema([("universe", pa.string()), ("record", pa.string())]),
    )
    if kind == "queues":
        payloads = [payload for _, payload in events.bucket_messages(batch, 1)]
        batches = [lifecycles.message_rows(groups) for groups in events.group_messages(payloads)]
    else:
        payloads = [payload for _, payload in events.bucket_mails(batch, 1)]
        batches = [lifecycles.mail_rows(groups) for groups in events.group_mails(payloads)]
    found: list[dict[str, Any]] = [row for each in batches for row in each.to_pylist()]
    return found


def check(root: Path, seed: int, postgres: str | None = None) -> History:
    history = History(root, seed, postgres)
    history.run()
    expected = expected_tables(history)
    assert ingest.run(None, history.config).findings == []
    assert audit.run(None, history.config).findings == []
    found = found_tables(history)
    for name in expected:
        assert found[name] == expected[name], (seed, name)
    assert lake_rows(history, "quarantine") == []
    for name, records in history.deleted.items():
        rows = sorted((row["height"], row["raw"]) for row in lake_rows(history, "journal") if row["world"] == name)
        assert rows == list(enumerate(records[: len(rows)])), (seed, name)  # What was ingested before.
    assert Counter(map(message_key, folded(history, "queues"))) == expected_messages(history), seed
    assert Counter(map(mail_key, folded(history, "mail"))) == expected_mails(history), seed
    return history


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every ingest take several commits."""
    monkeypatch.setattr(ingest_run, "INGEST_TASK_BYTES", 4_000)
    monkeypatch.setattr(plans, "INGEST_WORLD_ROWS", 20)


FOUND_A_FAULT = [319312351]


# Each history takes seconds, and every other seed is as good as another.
@pytest.mark.parametrize(
    "seed", [0, 1, *FOUND_A_FAULT, *(pytest.param(n, marks=pytest.mark.rotating) for n in range(2, 30))]
)
def test_lake_equals_what_handles_return(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.rotating)])
def test_lake_of_two_nodes_equals_what_handles_return(tmp_path: Path, postgres_url: str, seed: int) -> None:
    check(tmp_path, seed, postgres_url)


@pytest.mark.nightly
def test_lake_equals_what_handles_return_in_many_histories(tmp_path: Path) -> None:
    for _ in range(1_000):
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        check(tmp_path / "history", seed)
        shutil.rmtree(tmp_path / "history")


@pytest.mark.always
def test_rollup_equals_what_handles_return(spark: SparkSession, tmp_path: Path) -> None:
    history = check(tmp_path, 7)
    rollup.run(spark, history.config)
    assert Counter(map(message_key, lake_rows(history, MESSAGES.name))) == expected_messages(history)
    assert Counter(map(mail_key, lake_rows(history, MAIL.name))) == expected_mails(history)
    models = list(history.messages.values())
    for row in lake_rows(history, "rollup_queues"):
        here = [model for model in models if model.queue == row["queue"]]
        outcomes = Counter(model.outcome for model in here)
        assert row["messages"] == len(here)
        assert {name: row[name] for name in ("acked", "dead", "waiting", "leased")} == {
            name: outcomes[name] for name in ("acked", "dead", "waiting", "leased")
        }
        if here:  # Dead letters are the backlog of their own queue.
            assert row["backlog"] == outcomes["waiting"] + outcomes["leased"]
        assert row["retries"] == sum(max(model.attempts - 1, 0) for model in here)
    talk = {
        (row["recipient"].partition("@")[0], row["sender"].partition("@")[0]): row["mails"]
        for row in lake_rows(history, "rollup_talk")
    }
    assert talk == Counter(key[:2] for key in history.mails)
