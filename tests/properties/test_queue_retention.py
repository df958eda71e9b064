"""Random histories of a queue whose messages are kept by age, on every backend.

The model knows from when the age of each message counts. Stored messages that are too old may wait for the next pass,
but none is delivered, found or hidden again, and none that is young enough is ever missing.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import FastnessError, MessageNotFound, QueueMessageLeaseMismatch
from fastness.kv import Database, Transaction
from fastness.layers import queues
from fastness.layers.queues import QueueKey, message_leases
from fastness.limits import RETENTION_PASS_MS_MIN
from fastness.testing.clock import ManualClock
from fastness.wire import stored_messages
from fastness.wire.queues import MessageInfo, MessageLease, NewMessage, QueuePolicy, VisibilityChange

news = st.builds(
    NewMessage,
    payload=st.sampled_from((b"a", b"b" * 2_000)),
    priority=st.sampled_from((5, 5, 0, 9)),
    delay_seconds=st.sampled_from((None, None, 0.5, 50.0)),
) | st.builds(
    NewMessage,
    group=st.sampled_from((None, "a", "b")),
    key=st.sampled_from((None, "k", "l")),
)
picks = st.integers(0, 1_000)


class Retention(RuleBasedStateMachine):
    """A queue, and from when the age of each of its messages counts."""

    openers: Iterator[Callable[..., Database]]
    names: Iterator[int]

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.database = next(self.openers)(clock=self.clock)
        name = f"kept-{next(self.names)}"
        self.queue, self.dead = QueueKey("main", name), QueueKey("main", f"{name}.dlq")
        self.since: dict[bytes, int] = {}
        self.proofs: list[MessageLease] = []
        self.kept_ms = 60_000
        self.set_retention(60.0, fair=False)

    def is_over(self, id: bytes) -> bool:
        return self.since[id] + self.kept_ms <= self.clock.now_ms()

    @rule(seconds=st.sampled_from((1.0, 30.0, 60.0, 600.0)), fair=st.booleans())
    def set_retention(self, seconds: float, fair: bool) -> None:
        policy = QueuePolicy(
            retention_seconds=seconds, retention_by_age=True, fair=fair, concurrency_per_key=1, max_attempts=2
        )
        self.database.transact(queues.set_policy, self.queue, policy)
        self.kept_ms = round(seconds * 1_000)

    @rule(some=st.lists(news, min_size=1, max_size=4))
    def messages_are_put(self, some: list[NewMessage]) -> None:
        for receipt in self.database.transact(queues.put, self.queue, some):
            id = stored_messages.parse_id(receipt.id)
            self.since[id] = stored_messages.put_at_ms(id)

    @rule(limit=st.integers(1, 4), seconds=st.sampled_from((1, 100)))
    def messages_are_leased(self, limit: int, seconds: int) -> None:
        found = self.database.transact(
            queues.lease, self.queue, owner="ada", limit=limit, visibility_ms=seconds * 1_000
        )
        assert not [each for each in found if self.is_over(each.id)]
        self.proofs += [MessageLease(queues.format_id(each.id), each.lease_id, each.fence) for each in found]

    @rule(pick=picks, how=st.sampled_from(("ack", "nack", "defer", "reject")))
    def a_message_is_settled(self, pick: int, how: str) -> None:
        if not self.proofs:
            return
        proof = self.proofs[pick % len(self.proofs)]
        options: dict[str, Any] = {"counts": how == "nack", "delay_seconds": 0.0} if how in ("nack", "defer") else {}
        work = queues.nack if options else getattr(queues, how)
        try:
            self.database.transact(work, self.queue, proof, **options)
        except QueueMessageLeaseMismatch:
            return
        id = stored_messages.parse_id(proof.id)
        if how == "ack":
            self.since.pop(id, None)

    @rule(pick=picks, seconds=st.sampled_from((0.0, 1.0, 100.0)), late=st.booleans())
    def a_message_is_hidden_again(self, pick: int, seconds: float, late: bool) -> None:
        if not self.proofs:
            return
        proof = self.proofs[pick % len(self.proofs)]
        change, late_owner = VisibilityChange(proof, seconds), "ada" if late else ""
        [answer] = self.database.transact(queues.change_visibility, self.queue, [change], late_owner=late_owner)
        assert isinstance(answer, FastnessError) or not self.is_over(answer.id)

    @rule(pick=picks)
    def a_message_is_looked_up(self, pick: int) -> None:
        if not self.since:
            return
        id = sorted(self.since)[pick % len(self.since)]
        is_dead = id in self.database.read(self.stored, self.dead)
        try:
            found = self.database.read(queues.get, self.queue, queues.format_id(id))
        except MessageNotFound:
            assert self.is_over(id)
            assert not is_dead
        else:
            assert isinstance(found, MessageInfo)
            assert is_dead or not self.is_over(id)

    @rule(limit=st.integers(1, 3))
    def dead_letters_are_redriven(self, limit: int) -> None:
        before = self.database.read(self.stored, self.dead)
        self.database.transact(queues.redrive, self.queue, limit=limit)
        for id in before - self.database.read(self.stored, self.dead):
            self.since[id] = self.clock.now_ms()

    @rule(ms=st.sampled_from((1, 500, 999, 1_000, 10_000, 29_500, 60_000)))
    def time_passes(self, ms: int) -> None:
        self.clock.advance_ms(ms)

    @rule()
    def a_sweep_removes_what_is_too_old(self) -> None:
        """Messages whose leases end while a pass runs are left for the next one, which is a second later."""
        for _ in range(2):
            self.clock.advance_ms(RETENTION_PASS_MS_MIN)
            while self.database.transact(queues.sweep, self.queue) <= self.clock.now_ms():
                pass
        left = {id for id in self.database.read(self.stored, self.queue) if self.is_over(id)}
        late_ms = {self.clock.now_ms() - self.since[id] - self.kept_ms for id in left}
        assert not left or max(late_ms) < RETENTION_PASS_MS_MIN, late_ms

    @invariant()
    def nothing_is_missing(self) -> None:
        letters = self.database.read(self.stored, self.dead)
        stored = self.database.read(self.stored, self.queue)
        expected = {id for id in self.since if not self.is_over(id)} - letters
        assert expected <= stored
        assert stored <= self.since.keys()
        self.since = {id: since for id, since in self.since.items() if id in stored | letters}
        stats = self.database.read(queues.stats, self.queue)
        assert stats.ready + stats.delayed + stats.leased + stats.blocked == len(stored)

    def stored(self, tx: Transaction, queue: QueueKey) -> set[bytes]:
        keys = queues.keys_of(queue)
        prefixes = (keys.ready, keys.delayed, keys.waiting.prefix)
        found = {
            stored_messages.decode(value).id
            for prefix in prefixes
            for _, value in tx.scan(prefix, prefix + b"\xff", limit=1_000)
        }
        return found | {each.id for each in message_leases.leased_messages(tx, keys)}

    def teardown(self) -> None:
        self.database.close()


@pytest.mark.examples(60)
def test_retention_in_memory_matches_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Retention, steps=40, openers=repeat(MemoryDatabase), names=count())


@pytest.mark.examples(15)
def test_retention_on_rocksdb_matches_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    openers = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Retention, steps=40, openers=openers, names=count())


@pytest.mark.examples(10)
def test_retention_on_postgres_matches_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Retention, steps=40, openers=repeat(open_postgres), names=count())
