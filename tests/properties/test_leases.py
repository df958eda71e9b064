"""Random histories of leases and states match a plain Python model, on every backend."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import (
    CasMismatch,
    CommitUnknown,
    FastnessError,
    FencingMismatch,
    LeaseConflict,
    LeaseExpired,
    LeaseHeld,
    LeaseRequired,
    TxnMismatch,
)
from fastness.kv import Database, Pair, Transaction, fence_floor
from fastness.layers import leases, states
from fastness.layers.leases import Grant, LeaseKey
from fastness.limits import LOCK_LATE_MS_MAX
from fastness.testing.clock import ManualClock
from fastness.testing.faults import ChosenFault, FaultyDatabase
from fastness.tiers import Tier
from fastness.wire.leases import LeaseProof
from tests.support.restores import START_MS, back_up, restore

KEYS = ("x", "y/1", "y/2")
TTLS_MS = (1, 500, 1_000, 60_000)
ANSWER = 2  # transact: begin, transact: commit, transact: answer

keys = st.sampled_from(KEYS)
owners = st.sampled_from(("ada", "bob", "eve"))
ttls = st.sampled_from(TTLS_MS)
txn_ids = st.sampled_from((None, None, None, "t-1", "t-2"))
picks = st.integers(0, 30)  # An existing one, counted from the newest.
values = st.binary(max_size=3)
tiers = st.sampled_from((Tier.CRITICAL, Tier.IMPORTANT))


class OnPurpose(Exception):
    """Aborts a transaction, which must write nothing."""


class Held(NamedTuple):
    """The latest grant of a key in the model."""

    proof: LeaseProof
    owner: str
    acquired_ms: int
    expires_ms: int
    ttl_ms: int
    released: bool = False

    def ends_ms(self, now_ms: int) -> int:
        """When it ends: at most its TTL from now, if the clock was set back by more than transactions may be late."""
        was_set_back = self.expires_ms - now_ms > self.ttl_ms + LOCK_LATE_MS_MAX
        return now_ms + self.ttl_ms if was_set_back and not self.released else self.expires_ms

    def still_held(self, now_ms: int) -> bool:
        return not self.released and now_ms < self.expires_ms


class Written(NamedTuple):
    """A state document in the model."""

    etag: str
    version: int
    value: bytes


class Leases(RuleBasedStateMachine):
    """Three keys and three owners, with lost responses, clocks that are set back, and restores of older backups."""

    openers: Iterator[Callable[..., Database]]  # Opens the database of one example.
    names: Iterator[int]  # Examples may share a database, so each has its own universe.
    lasting: bool  # Whether data survives reopening the database.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(START_MS)
        self.open = partial(next(self.openers), clock=self.clock)
        self.database = self.open()
        self.universe = str(next(self.names))
        self.held: dict[str, Held] = {}
        self.written: dict[str, Written] = {}
        self.proofs: dict[str, list[LeaseProof]] = {key: [] for key in KEYS}  # All proofs ever granted.
        self.etags: list[str] = []
        self.floor = self.database.transact(fence_floor.load)
        self.backup: tuple[list[Pair], dict[str, Held], dict[str, Written]] = (
            back_up(self.database, self.universe),
            {},
            {},
        )
        self.restored_ms = 0

    # Acquiring and releasing.

    @rule(key=keys, owner=owners, ttl_ms=ttls, txn_id=txn_ids)
    def an_owner_acquires(self, key: str, owner: str, ttl_ms: int, txn_id: str | None) -> None:
        now_ms, last = self.clock.now_ms(), self.held.get(key)
        acquire = partial(
            self.database.transact, leases.acquire, self.lease(key), owner=owner, ttl_ms=ttl_ms, txn_id=txn_id
        )
        if last is not None and last.still_held(now_ms) and last.owner != owner:
            with pytest.raises(LeaseHeld) as refused:
                acquire()
            assert (refused.value.owner, refused.value.expires_ms) == (last.owner, last.ends_ms(now_ms))
            assert refused.value.now_ms == now_ms
        else:
            self.was_granted(key, acquire(), owner, ttl_ms, txn_id)

    @rule(key=keys, owner=owners, ttl_ms=ttls)
    def the_response_of_an_acquire_is_lost(self, key: str, owner: str, ttl_ms: int) -> None:
        """The owner does not get the response. It can acquire again; other owners cannot before the expiry."""
        last = self.held.get(key)
        faulty = FaultyDatabase(self.database, ChosenFault(ANSWER, partial(CommitUnknown, "on purpose")))
        with pytest.raises((CommitUnknown, LeaseHeld)) as lost:
            faulty.transact(leases.acquire, self.lease(key), owner=owner, ttl_ms=ttl_ms)
        is_held = last is not None and last.still_held(self.clock.now_ms()) and last.owner != owner
        assert isinstance(lost.value, LeaseHeld) == is_held
        if not is_held:
            granted = self.database.read(leases.last_grant, self.lease(key))
            assert granted is not None
            self.was_granted(key, granted, owner, ttl_ms, None)

    @rule(
        key=keys,
        pick=picks,
        ttl_ms=ttls,
        forged=st.sampled_from(({}, {}, {}, {"fence": 9_999}, {"lease_id": "0"}, {"txn_id": None})),
    )
    def an_owner_renews(self, key: str, pick: int, ttl_ms: int, forged: dict[str, Any]) -> None:
        proof = self.proof(key, pick, forged)
        expected = self.expected_error(proof)
        if expected is not None:
            with pytest.raises(expected):
                self.database.transact(leases.keepalive, proof, ttl_ms=ttl_ms)
            return
        last = self.held[key]
        kept = self.database.transact(leases.keepalive, proof, ttl_ms=ttl_ms)
        now_ms = self.clock.now_ms()
        assert kept.expires_ms == max(last.ends_ms(now_ms), now_ms + ttl_ms)
        self.held[key] = last._replace(expires_ms=kept.expires_ms, ttl_ms=kept.expires_ms - now_ms)

    @rule(key=keys, pick=picks)
    def an_owner_releases(self, key: str, pick: int) -> None:
        proof, last = self.proof(key, pick), self.held.get(key)
        is_theirs = last is not None and last.still_held(self.clock.now_ms()) and _named(last.proof) == _named(proof)
        assert self.database.transact(leases.release, proof) == is_theirs
        if is_theirs:
            self.held[key] = last._replace(released=True, expires_ms=last.ends_ms(self.clock.now_ms()))

    @rule(key=keys)
    def a_lease_from_before_the_clock_was_set_back_is_shortened(self, key: str) -> None:
        last, now_ms = self.held.get(key), self.clock.now_ms()
        is_too_long = last is not None and last.ends_ms(now_ms) < last.expires_ms
        assert self.database.transact(leases.shorten, self.lease(key)) == is_too_long
        if last is not None:
            self.held[key] = last._replace(expires_ms=last.ends_ms(now_ms))

    # Writing states.

    @rule(
        key=keys, pick=st.none() | picks, other=keys, match=st.none() | picks | st.just("*"), value=values, tier=tiers
    )
    def a_state_is_updated(
        self, *, key: str, pick: int | None, other: str, match: int | str | None, value: bytes, tier: Tier
    ) -> None:
        """With a lease on the key, with one on another key, or without a lease."""
        lease = None if pick is None else self.proof(other if pick % 5 == 0 else key, pick)
        if_match = self.etag(match)
        update = partial(
            self.database.transact, states.update, self.universe, key, value, lease=lease, if_match=if_match, tier=tier
        )
        if self.is_refused(key, lease, if_match, update):
            return
        self.was_written(key, update(), value)

    @rule(key=keys, value=values)
    def a_state_is_created(self, key: str, value: bytes) -> None:
        update = partial(self.database.transact, states.update, self.universe, key, value, if_absent=True)
        if self.is_refused(key, None, None, update):
            return
        current = self.written.get(key)
        if current is None:
            self.was_written(key, update(), value)
        else:
            with pytest.raises(CasMismatch) as mismatch:
                update()
            assert mismatch.value.current_etag == current.etag

    @rule(key=keys, pick=st.none() | picks, match=st.none() | picks | st.just("*"))
    def a_state_is_removed(self, key: str, pick: int | None, match: int | str | None) -> None:
        lease = None if pick is None else self.proof(key, pick)
        if_match = self.etag(match)
        remove = partial(self.database.transact, states.remove, self.universe, key, lease=lease, if_match=if_match)
        if not self.is_refused(key, lease, if_match, remove):
            assert remove() == (self.written.pop(key, None) is not None)

    @rule(key=keys, owner=owners, ttl_ms=ttls, value=values, fails=st.booleans())
    def one_commit_acquires_and_writes(self, key: str, owner: str, ttl_ms: int, value: bytes, fails: bool) -> None:
        """A lease is valid within the transaction that acquires it; if the transaction fails, it was never granted."""

        def work(tx: Transaction) -> tuple[Grant, states.State]:
            grant = leases.acquire(tx, self.lease(key), owner=owner, ttl_ms=ttl_ms)
            proof = LeaseProof(key, grant.lease_id, grant.fence, universe=self.universe)
            state = states.update(tx, self.universe, key, value, lease=proof)
            if fails:
                raise OnPurpose
            return grant, state

        last = self.held.get(key)
        if last is not None and last.still_held(self.clock.now_ms()) and last.owner != owner:
            with pytest.raises(LeaseHeld, match=last.owner):
                self.database.transact(work)
        elif fails:
            with pytest.raises(OnPurpose):
                self.database.transact(work)
        else:
            grant, state = self.database.transact(work)
            self.was_granted(key, grant, owner, ttl_ms, None)
            self.was_written(key, state, value)

    # Time.

    @rule(milliseconds=st.sampled_from((0, 1, 499, 500, 1_000, 60_000)))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance_ms(milliseconds)

    @rule(milliseconds=st.sampled_from((1, 600, 61_000)), seldom=st.integers(0, 3))
    def the_clock_is_set_back(self, milliseconds: int, seldom: int) -> None:
        if not seldom:
            # Setting it back over a restore, and restoring the same backup again, is more than a restore bears.
            self.clock.jump_to_ms(max(self.clock.now_ms() - milliseconds, self.restored_ms))

    @precondition(lambda self: self.lasting)
    @rule()
    def the_database_is_reopened(self) -> None:
        self.database.close()
        self.database = self.open()

    # Restores.

    @rule()
    def a_backup_is_made(self) -> None:
        self.backup = back_up(self.database, self.universe), {**self.held}, {**self.written}

    @rule(seldom=st.integers(0, 3))
    def the_backup_is_restored(self, seldom: int) -> None:
        """Holders keep the proofs that they got since."""
        if not seldom:
            pairs, held, written = self.backup
            restore(self.database, self.universe, pairs, self.clock)
            self.held, self.written = {**held}, {**written}
            self.floor = self.database.transact(fence_floor.load)
            self.restored_ms = self.clock.now_ms()

    # Invariants.

    @invariant()
    def stored_data_equals_the_model(self) -> None:
        now_ms = self.clock.now_ms()

        def check_lease(tx: Transaction) -> None:
            for key in KEYS:
                last, held = self.held.get(key), leases.inspect(tx, self.lease(key))
                assert held[1] == (last is not None and last.still_held(now_ms))
                if last is not None:
                    grant_fields = (
                        last.proof.lease_id,
                        last.owner,
                        last.proof.fence,
                        last.acquired_ms,
                        last.ends_ms(now_ms),
                    )
                    assert held[0] == Grant(*grant_fields, last.ttl_ms, last.proof.txn_id, last.released)
                state = states.get(tx, self.universe, key)
                found = None if state is None else Written(state.etag, state.version, state.value)
                assert found == self.written.get(key)
            listed = [key for key, _ in leases.page(tx, self.universe, after="", limit=10)]
            assert listed == sorted(self.held)

        self.database.read(check_lease)

    @invariant()
    def no_stale_proof_passes(self) -> None:
        """Of all proofs ever granted, only the newest of each key passes, and only while it is held."""

        def passing(tx: Transaction) -> list[LeaseProof]:
            return [proof for proofs in self.proofs.values() for proof in proofs if _passes(tx, proof)]

        now_ms = self.clock.now_ms()
        alive = [self.held[key].proof for key in KEYS if key in self.held and self.held[key].still_held(now_ms)]
        assert self.database.read(passing) == alive

    @invariant()
    def fences_grow_and_etags_never_repeat(self) -> None:
        for proofs in self.proofs.values():
            assert all(one.fence < other.fence for one, other in pairwise(proofs))
        assert len(set(self.etags)) == len(self.etags)

    # The model.

    def lease(self, key: str) -> LeaseKey:
        return LeaseKey(self.universe, key)

    def proof(self, key: str, pick: int, forged: dict[str, Any] | None = None) -> LeaseProof:
        """A proof of a key, usually a recent one; an invented one if there is none."""
        proofs = self.proofs[key]
        if not proofs:
            return LeaseProof(key, "invented", 1, universe=self.universe)
        found = proofs[-1 - min(pick // 5, len(proofs) - 1)]
        shown = {"lease_id": found.lease_id, "fence": found.fence, "txn_id": found.txn_id, **(forged or {})}
        return LeaseProof(key, universe=self.universe, **shown)

    def etag(self, match: int | str | None) -> str | None:
        if not isinstance(match, int):
            return match
        return self.etags[-1 - min(match // 4, len(self.etags) - 1)] if self.etags else "invented"

    def expected_error(self, proof: LeaseProof) -> type[FastnessError] | None:
        """The error that a proof gets; None if it is valid."""
        last = self.held.get(proof.key)
        if last is None or last.proof.lease_id != proof.lease_id:
            return LeaseConflict
        if not last.still_held(self.clock.now_ms()):
            return LeaseExpired
        if last.proof.fence != proof.fence:
            return FencingMismatch
        if last.proof.txn_id not in (None, proof.txn_id):
            return TxnMismatch
        return None

    def is_refused(self, key: str, lease: LeaseProof | None, if_match: str | None, call: Callable[[], object]) -> bool:
        """Whether a change of the state must be refused. If so, checks that it is."""
        expected = None if lease is None else self.expected_error(lease)
        holder, current = self.held.get(key), self.written.get(key)
        if expected is None and (lease is None or lease.key != key):
            is_held = holder is not None and holder.still_held(self.clock.now_ms())
            expected = LeaseRequired if is_held else None
        if expected is None and if_match is not None and (current is None or if_match not in ("*", current.etag)):
            expected = CasMismatch
        if expected is None:
            return False
        with pytest.raises(expected) as refused:
            call()
        if isinstance(refused.value, CasMismatch):
            assert refused.value.current_etag == (None if current is None else current.etag)
        return True

    def was_granted(self, key: str, grant: Grant, owner: str, ttl_ms: int, txn_id: str | None) -> None:
        now_ms, last = self.clock.now_ms(), self.held.get(key)
        assert (grant.owner, grant.txn_id, grant.released) == (owner, txn_id, False)
        assert grant.fence == max(self.floor, 0 if last is None else last.proof.fence) + 1
        if last is not None and last.still_held(now_ms):
            assert last.owner == owner
            assert (grant.lease_id, grant.acquired_ms) == (last.proof.lease_id, last.acquired_ms)
            assert grant.expires_ms == max(last.ends_ms(now_ms), now_ms + ttl_ms)
        else:
            known = {proof.lease_id for proofs in self.proofs.values() for proof in proofs}
            assert grant.lease_id not in known
            assert (grant.acquired_ms, grant.expires_ms) == (now_ms, now_ms + ttl_ms)
        proof = LeaseProof(key, grant.lease_id, grant.fence, txn_id, self.universe)
        self.proofs[key].append(proof)
        self.held[key] = Held(proof, owner, grant.acquired_ms, grant.expires_ms, grant.expires_ms - now_ms)

    def was_written(self, key: str, state: states.State, value: bytes) -> None:
        current = self.written.get(key)
        assert (state.value, state.updated_ms) == (value, self.clock.now_ms())
        assert state.version == (1 if current is None else current.version + 1)
        self.etags.append(state.etag)
        self.written[key] = Written(state.etag, state.version, value)

    def teardown(self) -> None:
        self.database.close()


def _named(proof: LeaseProof) -> tuple[str, int]:
    return proof.lease_id, proof.fence


def _passes(tx: Transaction, proof: LeaseProof) -> bool:
    try:
        return leases.check(tx, proof).fence == proof.fence
    except FastnessError:
        return False


@pytest.mark.examples(60)
def test_leases_and_states_in_memory_match_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Leases, steps=40, openers=repeat(MemoryDatabase), names=count(), lasting=False)


@pytest.mark.examples(10)
def test_leases_and_states_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Leases, steps=40, openers=fresh, names=count(), lasting=True)


@pytest.mark.examples(8)
def test_leases_and_states_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Leases, steps=40, openers=repeat(open_postgres), names=count(), lasting=True)
