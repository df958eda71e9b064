"""Searches, moves and deletions of random messages match a plain filter over a list of all messages, on every backend.

The model has one dict: what `get` says of each message that should be there. A search must find what a filter over that
dict finds, in pages of any size; a move changes only the queue of a message, and of a dead letter its state.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.clock import IdSource
from fastness.errors import MessageNotFound
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.queues import QueueKey
from fastness.testing.clock import ManualClock
from fastness.wire.queues import MessageInfo, MessageLease, NewMessage, NewResult, QueuePolicy, SearchMessages

STATES = ("ready", "delayed", "blocked", "leased", "dead", "done", "cancelled")
NAMES = ("jobs", "slow")
NEW = st.builds(
    NewMessage,
    payload=st.sampled_from([b"", b"small", b"x" * 1_100]),
    attributes=st.sampled_from([{}, {"a": "b"}]),
    priority=st.sampled_from([2, 5]),
    group=st.sampled_from([None, None, "g"]),
    key=st.sampled_from([None, None, "a", "b"]),
    delay_seconds=st.sampled_from([0.0, 0.0, 3.0]),
    ttl_seconds=st.sampled_from([None, None, 8.0]),
    keep_result=st.booleans(),
    unique_key=st.sampled_from([None, None, None, "u"]),
    max_attempts=st.sampled_from([1, 3]),
) | st.builds(
    NewMessage, payload=st.just(b"debounced"), debounce_key=st.just("n"), debounce_seconds=st.sampled_from([1.0, 4.0])
)
FILTERS: dict[str, st.SearchStrategy[Any]] = {
    "states": st.lists(st.sampled_from(STATES), max_size=3),
    "key": st.sampled_from(["a", "missing"]),
    "group": st.just("g"),
    "owner": st.sampled_from(["ada", "bob"]),
    "error": st.sampled_from(["TIMEOUT", "time", "disk"]),
    "older_than_seconds": st.sampled_from([0.0, 2.0]),
    "newer_than_seconds": st.sampled_from([0.0, 2.0]),
}


class Searches(RuleBasedStateMachine):
    """Two queues of one plane, whose messages are moved between them."""

    openers: Iterator[Callable[..., Database]]
    numbers: Iterator[int]

    @initialize(fair=st.booleans(), limit=st.sampled_from([None, 1]))
    def open(self, fair: bool, limit: int | None) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        self.database = next(self.openers)(clock=self.clock, ids=IdSource(seed=1))
        universe = f"u{next(self.numbers)}"
        self.queues = {name: QueueKey(universe, name) for name in NAMES}
        policy = QueuePolicy(fair=fair, concurrency_per_key=limit, retry_delay_seconds=2.0, retry_jitter=0.0)
        for queue in self.queues.values():
            self.database.transact(queues.set_policy, queue, policy)
        self.where: dict[str, str] = {}  # The queue of each message that is known to its queue.
        self.leases: dict[str, MessageLease] = {}

    @rule(name=st.sampled_from(NAMES), messages=st.lists(NEW, min_size=1, max_size=4))
    def put(self, name: str, messages: list[NewMessage]) -> None:
        for receipt in self.database.transact(queues.put, self.queues[name], messages):
            assert self.where.setdefault(receipt.id, name) == name

    @rule(
        name=st.sampled_from(NAMES),
        owner=st.sampled_from(["ada", "bob"]),
        limit=st.integers(1, 3),
        with_state=st.booleans(),
    )
    def lease(self, name: str, owner: str, limit: int, with_state: bool) -> None:
        leased = self.database.transact(
            queues.lease, self.queues[name], owner=owner, limit=limit, visibility_ms=5_000, with_state=with_state
        )
        for message in leased:
            id = queues.format_id(message.id)
            self.leases[id] = MessageLease(id, message.lease_id, message.fence)

    @rule(data=st.data(), how=st.sampled_from(["ack", "result", "nack", "reject"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        held = [id for id, info in self.known().items() if info.state == "leased"]
        if not held:
            return
        id = data.draw(st.sampled_from(sorted(held)))
        queue, lease = self.queues[self.where[id]], self.leases[id]
        if how == "nack":
            self.database.transact(queues.nack, queue, lease, error="read failed", error_type="DiskError")
        elif how == "reject":
            self.database.transact(queues.reject, queue, lease, error="Timeout of the model")
        else:
            results = [NewResult(b"done")] if how == "result" else []
            is_kept = how == "result" or self.known()[id].keep_result
            assert self.database.transact(queues.ack_many, queue, [lease], results)[0] is not None
            if not is_kept:
                del self.where[id]

    @rule(data=st.data(), source=st.sampled_from(NAMES))
    def move(self, data: st.DataObject, source: str) -> None:
        target = "slow" if source == "jobs" else "jobs"
        ids, before = self.chosen(data, source), self.known()
        refusals = self.database.transact(queues.move_messages, self.queues[source], ids, to=self.queues[target])
        outcomes = dict(zip(ids, refusals, strict=True))
        self.where |= {id: target for id, refusal in outcomes.items() if refusal is None}
        after = self.known()
        for id, refusal in outcomes.items():
            if refusal is not None:
                assert refusal.code in (code_of(before.get(id)), "message_key_taken")
                continue
            was, now = before[id], after[id]
            assert code_of(was) is None
            assert kept_by_a_move(now) == kept_by_a_move(was)
            if was.state == "dead":
                assert (now.state in ("ready", "blocked"), now.failure_attempts) == (True, 0)
            else:
                assert (now.ttl_at_ms, now.failure_attempts) == (was.ttl_at_ms, was.failure_attempts)
                assert was.state != "delayed" or now.state == "blocked" or now.due_ms == was.due_ms

    @rule(data=st.data(), source=st.sampled_from(NAMES))
    def delete(self, data: st.DataObject, source: str) -> None:
        ids, before = self.chosen(data, source), self.known()
        for id, refusal in zip(
            ids, self.database.transact(queues.delete_messages, self.queues[source], ids), strict=True
        ):
            assert (None if refusal is None else refusal.code) == code_of(before.get(id))
            if refusal is None:
                del self.where[id]

    @rule(data=st.data(), source=st.sampled_from(NAMES))
    def cancel(self, data: st.DataObject, source: str) -> None:
        ids, before = self.chosen(data, source), self.known()
        queue = self.queues[source]
        leases, _ = self.database.read(queues.search_leases, queue, ids, after=b"")
        answers = self.database.transact(queues.by_ids, queues.cancel, queue, ids, leases=leases)
        for id, answer in zip(ids, answers, strict=True):
            known = before.get(id)
            is_open = known is not None and known.state not in ("dead", "done")
            assert (isinstance(answer, MessageInfo) and answer.state == "cancelled") is is_open
            assert not is_open or self.known()[id].state == "cancelled"

    @rule(seconds=st.sampled_from([1, 3, 6]))
    def wait(self, seconds: int) -> None:
        before = self.known()
        self.clock.advance_ms(seconds * 1_000)
        for queue in self.queues.values():
            for _ in range(3):
                self.database.transact(queues.sweep, queue)
        for id, info in before.items():
            if 0 < info.ttl_at_ms <= self.clock.now_ms() and info.state != "dead":
                del_if_gone(self, id)

    @rule(
        name=st.sampled_from(NAMES),
        wanted=st.fixed_dictionaries({}, optional=FILTERS),
        limit=st.sampled_from([1, 3, 100]),
    )
    def search(self, name: str, wanted: dict[str, Any], limit: int) -> None:
        known = self.known()
        expected = {
            id for id, info in known.items() if self.where[id] == name and is_wanted(info, wanted, self.clock.now_ms())
        }
        found: list[str] = []
        request = SearchMessages(name, **wanted, limit=limit)
        while True:
            page = self.database.read(queues.search_messages, self.queues[name], request)
            assert len(page.messages) <= limit
            assert page.scanned <= 7
            for each in page.messages:
                fields = {field: getattr(known[each.id], field) for field in each.__struct_fields__}
                is_over = each.state in ("done", "cancelled")  # Their last errors and lease ends are not kept.
                assert msgspec.structs.asdict(each) == fields | (
                    {"expires_ms": each.expires_ms, "owner": each.owner} if each.state == "dead" or is_over else {}
                )
                found.append(each.id)
            if page.next is None:
                break
            request = msgspec.structs.replace(request, after=page.next)
        assert sorted(found) == sorted(expected)

    @invariant()
    def counts_are_right(self) -> None:
        for name, queue in self.queues.items():
            states = [info.state for id, info in self.known().items() if self.where[id] == name]
            stats = self.database.read(queues.stats, queue)
            assert (stats.ready, stats.delayed, stats.leased, stats.blocked, stats.dead) == tuple(
                states.count(state) for state in ("ready", "delayed", "leased", "blocked", "dead")
            )

    def known(self) -> dict[str, MessageInfo]:
        """What the queue of each message says of it."""
        found = {id: self.database.read(queues.get, self.queues[name], id) for id, name in self.where.items()}
        assert all(isinstance(each, MessageInfo) for each in found.values())
        return {id: each for id, each in found.items() if isinstance(each, MessageInfo)}

    def chosen(self, data: st.DataObject, name: str) -> list[str]:
        """Ids of a queue, and one that it does not have."""
        ids = sorted(id for id, each in self.where.items() if each == name)
        missing = "0199a1b2-0000-7000-8000-000000000000"
        return data.draw(st.lists(st.sampled_from([*ids, missing]), min_size=1, max_size=4, unique=True))

    def teardown(self) -> None:
        """Once every message is deleted, nothing of it is left."""
        if not hasattr(self, "database"):
            return
        try:
            for id, info in self.known().items():
                if info.state == "leased":
                    self.database.transact(queues.ack, self.queues[self.where[id]], self.leases[id])
            for name, queue in self.queues.items():
                left = [id for id, each in self.where.items() if each == name]
                self.database.transact(queues.delete_messages, queue, left)
            self.clock.advance_ms(4_000_000)
            for queue in self.queues.values():
                for _ in range(3):
                    self.database.transact(queues.sweep, queue)
                for each in (queue, QueueKey(queue.universe, f"{queue.name}.dlq")):
                    assert self.database.read(leftovers, each) == []
        finally:
            self.database.close()


def del_if_gone(machine: Searches, id: str) -> None:
    """Forget a message whose TTL has expired: a queue keeps nothing of it."""
    try:
        machine.database.read(queues.get, machine.queues[machine.where[id]], id)
    except MessageNotFound:
        del machine.where[id]


def kept_by_a_move(info: MessageInfo) -> tuple[object, ...]:
    return (
        info.id,
        info.payload,
        info.attributes,
        info.priority,
        info.created_ms,
        info.attempts,
        info.fence,
        info.failures,
        info.key,
        info.group,
        info.unique_key,
        info.state_value,
        info.keep_result,
    )


def code_of(info: MessageInfo | None) -> str | None:
    """The code of the refusal to move or delete a message; None if it can be."""
    if info is None:
        return "message_not_found"
    return {"leased": "message_leased", "done": "message_finished", "cancelled": "message_finished"}.get(info.state)


def is_wanted(info: MessageInfo, wanted: dict[str, Any], now_ms: int) -> bool:
    """The filter of a search, in plain Python."""
    age = (now_ms - info.created_ms) / 1_000
    return (
        (not wanted.get("states") or info.state in wanted["states"])
        and wanted.get("key", info.key) == info.key
        and wanted.get("group", info.group) == info.group
        and wanted.get("owner", info.owner) == info.owner
        and age >= wanted.get("older_than_seconds", -1)
        and age < wanted.get("newer_than_seconds", 1e9)
        and wanted.get("error", "").lower() in (info.last_error or "").lower()
    )


def leftovers(tx: Transaction, queue: QueueKey) -> list[bytes]:
    """The keys of a queue other than its policy, its counters and its ack records."""
    keys = queues.keys_of(queue)
    kept = (keys.policy, keys.all_counters.prefix, keys.acks.prefix)
    pairs = tx.scan(keys.prefix, keys.prefix + b"\xff", limit=1_000)
    return [key[len(keys.prefix) :] for key, _ in pairs if not key.startswith(kept)]


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastness.layers.queues.message_search.SEARCH_ENTRIES", 7)
    monkeypatch.setattr("fastness.layers.queues.message_search.DUE_BATCH_MAX", 3)


@pytest.mark.examples(60)
def test_searches_in_memory_match_a_filter(run_machine: Callable[..., None]) -> None:
    run_machine(Searches, steps=30, openers=repeat(MemoryDatabase), numbers=count())


@pytest.mark.examples(10)
def test_searches_on_rocksdb_match_a_filter(run_machine: Callable[..., None], tmp_path: Path) -> None:
    openers = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Searches, steps=30, openers=openers, numbers=count())


@pytest.mark.examples(5)
def test_searches_on_postgres_match_a_filter(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Searches, steps=30, openers=repeat(open_postgres), numbers=count())
