"""Rare cases of the key space, the layers and locks: late calls, wrong arguments, damage, missing records, forks."""

import asyncio
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import (
    BatchTooLarge,
    BlobNotFound,
    Closed,
    DamagedDatabase,
    EmptyBatch,
    HeadAdvanced,
    InvalidArgument,
    InvalidKey,
    MissingEntry,
    NotAllowed,
    RunNotEnded,
    RunNotFound,
    SnapshotNotFound,
    TransactionEnded,
    Unsupported,
)
from fastness.kv import Database, Transaction, closing_at_exit, formats, keys, watches
from fastness.kv.batch import BATCH_WRITE_BYTES_MAX, run_batch
from fastness.layers import (
    blobs,
    effect_leases,
    effects,
    entities,
    field_tiers,
    hosting,
    inboxes,
    journals,
    leases,
    mailboxes,
    migrations,
    page_tokens,
    queues,
    runs,
    segments,
    snapshots,
    states,
    timer_firing,
    timers,
    tokens,
    turns,
    world_forks,
    worlds,
)
from fastness.layers.blobs import Blob
from fastness.layers.effects import DueEffect, EffectKey
from fastness.layers.entities import EntityKey
from fastness.layers.hosting import Ready
from fastness.layers.idempotency import KeyedCall
from fastness.layers.leases import LeaseKey
from fastness.layers.mailboxes import keys as mail_keys
from fastness.layers.queues import failures, history, message_leases
from fastness.layers.queues.keys import QueueKey
from fastness.layers.snapshots import SnapshotRecord
from fastness.layers.timers import DueTimer
from fastness.layers.worlds import World, WorldState
from fastness.limits import (
    BATCH_ENTRIES_MAX,
    BLOB_NAMED_MAX,
    DELAY_SECONDS_MAX,
    KEY_BYTES_MAX,
    PAGE_ITEMS,
)
from fastness.runtime.locks.table import LockTable
from fastness.testing.clock import ManualClock
from fastness.tiers import Tier, TierPolicy
from fastness.wire.entities import EntityWrite
from fastness.wire.hosting import ClaimedWorld, CommitTurn, FailTurn
from fastness.wire.inboxes import Control, Effect, Timer
from fastness.wire.mail import NewMail
from fastness.wire.queues import MessageLease, NewMessage, NewResult, QueuePolicy
from fastness.wire.runs import CancelRun, ListRuns, StartRun

ADA = World("main", "ada")
JOBS = QueueKey("main", "jobs")


@pytest.fixture
def database(clock: ManualClock) -> Iterator[Database]:
    with MemoryDatabase(clock=clock) as database:
        yield database


# The key space.


def test_a_batch_after_other_writes_stops_where_it_is_told_to(database: Database) -> None:
    def work(tx: Transaction) -> list[Any]:
        tx.put(b"before", b"1")
        calls = [(Transaction.get, b"before"), (_fail_after_a_write, b"lost"), (Transaction.get, b"lost")]
        assert [type(each) for each in run_batch(tx, calls)] == [bytes, InvalidArgument, type(None)]
        return run_batch(tx, calls, should_stop=lambda: True)

    assert database.transact(work) == [b"1"]
    assert database.read(Transaction.get, b"before") == b"1"


def test_a_batch_after_other_writes_ends_when_it_has_written_much(database: Database) -> None:
    def work(tx: Transaction) -> int:
        tx.put(b"before", b"1")
        return len(run_batch(tx, [(_write_much, number) for number in range(50)]))

    assert 0 < database.transact(work) < 50


def _fail_after_a_write(tx: Transaction, key: bytes) -> None:
    tx.put(key, b"1")
    raise InvalidArgument("it failed")


def _write_much(tx: Transaction, number: int) -> None:
    tx.put(b"%d" % number, bytes(BATCH_WRITE_BYTES_MAX // 10))


def test_memory_has_no_checkpoints_and_no_connections_of_callers(database: Database, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no checkpoints"):
        database.checkpoint(tmp_path)
    with pytest.raises(Unsupported, match="open the plane on PostgreSQL"):
        database.within(object())
    assert database.failure is None


def test_a_closed_database_refuses_watches_and_subscriptions(database: Database) -> None:
    database.close()
    with pytest.raises(Closed):
        database.watch(b"")
    with pytest.raises(Closed):
        database.subscribe(lambda keys, cleared: None)


def test_a_transaction_writes_the_newest_format_unless_its_plane_has_another(database: Database) -> None:
    def work(tx: Transaction) -> tuple[int, int]:
        newest = formats.written_format(tx)
        tx.data_format = newest + 1
        return newest, formats.written_format(tx)

    assert database.transact(work) == (formats.FORMAT, formats.FORMAT + 1)


def test_a_key_that_a_transaction_has_cleared_is_gone_in_it(database: Database) -> None:
    database.transact(Transaction.put, b"b", b"1")

    def work(tx: Transaction) -> bytes | None:
        tx.delete_range(b"a", b"c")
        return tx.get(b"b")

    assert database.transact(work) is None


@pytest.mark.parametrize("call", [Transaction.new_id, Transaction.new_id_bytes, lambda tx: tx.new_numbers(1)])
def test_an_ended_transaction_makes_no_ids(database: Database, call: Callable[[Transaction], object]) -> None:
    ended, _ = database.transact(lambda tx: (tx, tx.now_ms))
    with pytest.raises(TransactionEnded):
        call(ended)


def test_a_number_that_is_not_packed_in_the_shortest_form_is_refused() -> None:
    packed = keys.pack((1,))
    longer = bytes((packed[0] + 1, 0)) + packed[1:]
    with pytest.raises(InvalidKey):
        keys.unpack(longer)


async def test_a_waiter_that_was_cancelled_is_not_woken() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    watches._wake(future)
    assert future.cancelled()


def test_what_fails_to_close_at_the_end_of_a_program_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Resource:
        closed = False

        def close_at_exit(self) -> None:
            self.closed = True
            raise InvalidArgument("the disk is gone")

    first, last = Resource(), Resource()
    monkeypatch.setattr(closing_at_exit, "_open", weakref.WeakValueDictionary())
    closing_at_exit.close_at_exit(first)
    closing_at_exit.keep_until_exit(last)()
    closing_at_exit._close_all()
    assert first.closed
    assert last.closed
    assert caplog.messages == ["closing at the end of the program failed: the disk is gone"] * 2


# Queues.


def test_a_back_off_that_exceeds_every_number_is_the_longest() -> None:
    assert failures._growing(1.0, 1_000.0, 999, 300.0) == 300.0


def test_a_key_is_paused_for_a_year_at_most(database: Database, clock: ManualClock) -> None:
    with pytest.raises(InvalidArgument, match="at most a year"):
        database.transact(queues.pause_key, JOBS, "host", until_ms=clock.now_ms() + int(DELAY_SECONDS_MAX * 1_000) + 1)


def test_the_position_of_a_time_is_before_its_events(database: Database, clock: ManualClock) -> None:
    database.transact(queues.set_policy, JOBS, QueuePolicy(history="durable"))
    database.transact(queues.put, JOBS, [NewMessage(b"1")])
    for at_ms, count in ((clock.now_ms(), 1), (clock.now_ms() + 1, 0)):
        page = database.read(queues.read_history, JOBS, after=history.position_at(at_ms), limit=10)
        assert len(page.events) == count


def test_every_leased_message_of_a_queue_is_found(database: Database) -> None:
    ids = [each.id for each in database.transact(queues.put, JOBS, [NewMessage(b"%d" % n) for n in range(3)])]
    database.transact(queues.lease, JOBS, owner="ada", limit=2)
    found = database.read(lambda tx: list(message_leases.leased_messages(tx, queues.keys_of(JOBS))))
    assert [queues.format_id(each.id) for each in found] == ids[:2]


def test_the_result_of_an_ack_is_kept(database: Database) -> None:
    database.transact(queues.set_policy, JOBS, QueuePolicy(result_ttl_seconds=60))
    (receipt,) = database.transact(queues.put, JOBS, [NewMessage(b"1")])
    (message,) = database.transact(queues.lease, JOBS, owner="ada", limit=1)
    proof = MessageLease(receipt.id, message.lease_id, message.fence)
    database.transact(queues.ack, JOBS, proof, NewResult(b"done"))
    found = database.read(queues.result, JOBS, receipt.id)
    assert found is not None
    assert found.value == b"done"


def test_a_page_token_is_not_longer_than_a_key() -> None:
    with pytest.raises(InvalidArgument, match="it is too long"):
        page_tokens.key_after(b"a", "00" * (KEY_BYTES_MAX + 1), b"a", b"b")


# Mail, blobs, entities, tokens.


def test_a_mail_that_is_missing_is_damage(database: Database) -> None:
    box_keys = mail_keys.keys_of(mail_keys.address_of("ada@main"))
    with pytest.raises(DamagedDatabase, match="ada"):
        database.read(mail_keys.mail_at, box_keys, 1)
    with pytest.raises(DamagedDatabase, match="ada"):
        database.transact(mail_keys.save_after_removal, box_keys, mail_keys.Box(count=1, first=0, next=2))


def test_the_mail_of_a_mailbox_is_read_from_a_sequence_on(database: Database) -> None:
    ada, bob = mail_keys.address_of("ada@main"), mail_keys.address_of("bob@main")
    for number in range(3):
        database.transact(mailboxes.send, ada, bob, NewMail(str(bob), b"%d" % number))
    begin, end = mail_keys.keys_of(bob).mails_from(1)
    found = database.read(lambda tx: tx.scan(begin, end, limit=10))
    assert [mail_keys.decode_mail(value).body for _, value in found] == [b"1", b"2"]


def test_only_the_mark_of_a_blob_that_is_not_recorded_is_dropped(database: Database) -> None:
    digest = bytes(32)
    database.transact(blobs.release, "main", digest.hex())
    assert database.read(blobs.mark_of, "main", digest) is not None
    database.transact(blobs.drop_mark, "main", digest)
    assert database.read(blobs.mark_of, "main", digest) is None


def test_a_blob_that_is_not_stored_cannot_be_pinned(database: Database) -> None:
    with pytest.raises(BlobNotFound):
        database.transact(blobs.set_pinned, "main", "00" * 32, pinned=True)


def test_an_upload_with_an_unknown_name_is_not_abandoned() -> None:
    assert not blobs.is_abandoned("not-an-upload", now_ms=10**15, after_ms=0)


def test_writes_that_change_nothing_are_refused() -> None:
    with pytest.raises(EmptyBatch, match="name at least one field"):
        field_tiers.tiered_writes(TierPolicy(), "main", [EntityWrite("task", "1", {})])


def test_a_token_that_was_removed_makes_no_tokens(database: Database) -> None:
    with pytest.raises(NotAllowed, match="was removed"):
        database.read(tokens._usable_maker, "gone")


# Worlds.


def test_records_below_the_first_hot_one_need_a_segment(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.transact(worlds.create, ADA)
    monkeypatch.setattr(journals, "first_hot", lambda tx, world: 10)
    with pytest.raises(MissingEntry, match="neither hot nor in a segment"):
        database.read(segments.read, ADA, 0, 10)


def test_a_run_of_records_ends_at_a_gap(database: Database) -> None:
    database.transact(worlds.create, ADA)
    database.transact(journals.write_at, ADA, [b"0", b"1", b"2", b"3"], 0)
    assert database.read(journals.next_run, ADA, 0, 4, 10) == (0, [b"0", b"1", b"2", b"3"])
    database.transact(Transaction.delete, journals._entries(ADA) + (2).to_bytes(8, "big"))
    assert database.read(journals.next_run, ADA, 0, 4, 10) == (0, [b"0", b"1"])
    assert database.read(journals.next_run, ADA, 2, 4, 10) == (3, [b"3"])
    assert database.read(journals.next_run, ADA, 4, 9, 10) == (9, [])


def test_no_more_items_are_read_than_one_batch_takes(database: Database) -> None:
    database.transact(worlds.create, ADA)
    sequences = [database.transact(inboxes.enqueue, ADA, Control(command="go")) for _ in range(BATCH_ENTRIES_MAX + 1)]
    assert len(database.read(inboxes.read_to, ADA, sequences[-2])) == BATCH_ENTRIES_MAX
    with pytest.raises(BatchTooLarge, match="take fewer"):
        database.read(inboxes.read_to, ADA, sequences[-1])


def test_records_are_not_copied_behind_a_gap(database: Database) -> None:
    database.transact(worlds.create, ADA)
    with pytest.raises(HeadAdvanced):
        database.transact(journals.write_at, ADA, [b"record"], 5)


def test_a_world_that_the_layer_alone_has_made_has_no_baseline(database: Database) -> None:
    database.transact(worlds.create, ADA)
    with pytest.raises(SnapshotNotFound, match="no baseline"):
        database.read(snapshots.baseline, ADA)


def test_a_world_that_is_being_deleted_is_described_without_its_snapshots(database: Database) -> None:
    database.transact(worlds.create, ADA)
    for state in (WorldState.ARCHIVED, WorldState.DELETING):
        database.transact(worlds.change_state, ADA, state)
    assert database.read(segments.describe, ADA).state is WorldState.DELETING


def test_the_heads_of_worlds_have_incarnations_unless_their_records_are_damaged(database: Database) -> None:
    database.transact(worlds.create, ADA)
    database.transact(worlds.create, World("main", "bob"))
    database.transact(Transaction.put, worlds.subspace(ADA).key("meta"), b"\xff")
    found = database.read(journals.heads, "main", after="", limit=10)
    assert [tuple(each) for each in found] == [("ada", 0, None), ("bob", 0, 1)]


def test_an_intent_hash_that_is_no_text_is_shown_as_hex() -> None:
    assert (timers.timer_id(b"tick"), timers.timer_id(b"\xff\x00")) == ("tick", "ff00")


def test_a_turn_with_too_long_a_request_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="An intent hash has at most"):
        turns._check(CommitTurn(world="ada", owner="host", fence=1, expected_head=0, cancelled_timers=[bytes(1_000)]))


def test_a_run_that_is_running_or_unknown_is_not_deleted(database: Database) -> None:
    database.transact(runs.start, StartRun("w", "r1"))
    with pytest.raises(RunNotEnded):
        database.transact(runs.begin_delete, "main", "r1")
    with pytest.raises(RunNotFound):
        database.transact(runs.begin_delete, "main", "r2")


def test_a_run_is_asked_once_to_end_and_runs_are_listed_in_pages(database: Database) -> None:
    for id in ("r1", "r2"):
        database.transact(runs.start, StartRun("w", id))
    first = database.transact(runs.cancel, CancelRun("r1", "late"))
    assert database.transact(runs.cancel, CancelRun("r1", "again")) == first
    page = database.read(runs.page, ListRuns(limit=1))
    assert ([each.id for each in page.runs], page.next) == (["r1"], "r1")


# Locks.


async def test_a_forked_child_holds_and_waits_for_no_locks_of_its_parent() -> None:
    table, path = LockTable(), ["record_id", "task/1"]
    inherited = await asyncio.create_task(table.acquire_async(path))
    waiting = asyncio.create_task(table.acquire_async(path, timeout_seconds=600))
    while table.line_length(path) < 2:
        await asyncio.sleep(0)
    table.invalidate_after_fork()  # As in the child.
    own = await table.acquire_async(path, timeout_seconds=0.001)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    inherited.release()
    assert waiting.cancelled()
    assert table.line_length(path) == 1
    own.release()
    assert table.holders() == []


# What others did meanwhile.

CALL = KeyedCall(b"key", b"1234", lambda: False)
MAIL = EffectKey("ada", 0, 0)


def _claim_mail(database: Database, *, at_ms: int = 0, call: KeyedCall | None = None) -> list[int]:
    """The fences of the effects that a host gets."""

    def work(tx: Transaction) -> list[int]:
        due = effects.due(tx, "main", ["mail"], until_ms=at_ms or tx.now_ms, limit=10)
        return [each.fence for each in effect_leases.claim(tx, "main", due, owner="host", lease_ms=1_000, call=call)]

    return database.transact(work)


def _delete_ada(database: Database) -> None:
    """Begin to delete the world."""
    for state in (WorldState.ARCHIVED, WorldState.DELETING):
        database.transact(worlds.change_state, ADA, state)


@pytest.fixture
def mail(database: Database) -> None:
    """A world with an effect."""
    database.transact(worlds.create, ADA)
    database.transact(effects.request, ADA, 0, 0, Effect("mail", b"1"))


@pytest.mark.usefixtures("mail")
def test_a_repeated_claim_returns_only_the_effects_that_it_still_holds(database: Database) -> None:
    assert database.transact(effect_leases.stored_claims, "main", CALL) is None
    (fence,) = _claim_mail(database, call=CALL)
    for _ in range(2):
        claimed = database.transact(effect_leases.stored_claims, "main", CALL)
        assert claimed is not None
        assert [each.fence for each in claimed] == [fence]
    database.transact(effect_leases.fail, "main", MAIL, fence, error="no answer")
    assert database.transact(effect_leases.stored_claims, "main", CALL) == []


@pytest.mark.usefixtures("mail")
@pytest.mark.parametrize("repeated", [False, True])
def test_undelivered_effects_are_released_unless_the_call_was_repeated(database: Database, repeated: bool) -> None:
    claimed = effect_leases.claims_of(
        database.transact(
            lambda tx: effect_leases.claim(
                tx, "main", [DueEffect(tx.now_ms, "mail", MAIL)], owner="host", lease_ms=1_000, call=CALL
            )
        )
    )
    if repeated:
        database.transact(effect_leases.stored_claims, "main", CALL)
    for _ in range(2):  # The second time there is nothing to release.
        database.transact(effect_leases.release_undelivered, "main", claimed, CALL)
    (found,) = database.read(effects.page, "main", None, after="", limit=10).effects
    assert (found.state, found.attempts) == (("inflight", 1) if repeated else ("pending", 0))
    assert (database.transact(effect_leases.stored_claims, "main", CALL) is not None) is repeated


@pytest.mark.usefixtures("mail")
def test_an_effect_that_a_clock_ahead_found_is_not_claimed_before_it_is_due(
    database: Database, clock: ManualClock
) -> None:
    (fence,) = _claim_mail(database)
    assert _claim_mail(database, at_ms=clock.now_ms() + 1_000) == []
    clock.advance_ms(1_000)
    assert _claim_mail(database) == [fence + 1]


@pytest.mark.usefixtures("mail")
def test_an_effect_of_a_world_that_is_being_deleted_is_not_claimed(database: Database) -> None:
    _delete_ada(database)
    assert _claim_mail(database) == []


def test_the_mark_of_a_blob_that_has_changed_or_is_recorded_stays(database: Database, clock: ManualClock) -> None:
    digest = bytes(32)
    database.transact(blobs.record, "main", digest, Blob(1, b"1"))
    database.transact(blobs.release, "main", digest.hex())
    seen = database.read(blobs.mark_of, "main", digest)
    assert seen is not None
    clock.advance_ms(1)
    database.transact(blobs.release, "main", digest.hex())
    database.transact(blobs.unmark, "main", digest, seen)
    database.transact(blobs.drop_mark, "main", digest)
    changed = database.read(blobs.mark_of, "main", digest)
    assert changed == seen._replace(at_ms=clock.now_ms())
    database.transact(blobs.unmark, "main", digest, changed)
    assert database.read(blobs.mark_of, "main", digest) is None


def test_content_with_too_many_names_is_not_searched_further() -> None:
    search = blobs.NameSearch()
    search.feed(b"".join(b"%064x " % number for number in range(BLOB_NAMED_MAX + 1)))
    found = search._search.found.copy()
    search.feed(b" " + b"f" * 64)
    assert search._search.found == found
    assert search.result() is None


def test_a_change_of_a_field_is_found_behind_many_changes_of_others(database: Database, clock: ManualClock) -> None:
    key = EntityKey("main", "task", "1")

    def work(tx: Transaction) -> None:
        entities.write(tx, key, {"title": b"1"}, (), tier=Tier.IMPORTANT)
        for number in range(2 * entities._PAGE):
            entities.write(tx, key, {"state": b"%d" % number}, (), tier=Tier.IMPORTANT)

    database.transact(work)
    before_ms = clock.now_ms() - 1
    assert database.read(entities.was_changed_after, key, "title", before_ms)
    assert not database.read(entities.was_changed_after, key, "owner", before_ms)


def test_a_removed_field_has_the_tier_of_its_name() -> None:
    policy = TierPolicy({"task.cursor": Tier.BEST_EFFORT, "task.title": Tier.IMPORTANT})
    write = field_tiers.tiered_write(policy, EntityKey("main", "task", "1"), {}, ["cursor", "title"])
    assert (write.removed, write.best_effort_removed, write.tier) == (["title"], ["cursor"], Tier.IMPORTANT)


def test_a_token_allows_no_more_requests_than_its_maker(database: Database) -> None:
    maker = tokens.Token("1", "maker", ["*"], ["*"], b"", 0, rate_per_second=5.0)
    wanted = tokens.Token("2", "wanted", ["*"], ["*"], b"", 0, rate_per_second=6.0)
    with pytest.raises(NotAllowed, match="rate_per_second"):
        tokens.limited_by(maker, wanted)


def test_a_lease_that_is_not_held_is_not_extended(database: Database, clock: ManualClock) -> None:
    lease = LeaseKey("main", "deploy")
    database.transact(leases.extend, lease, until_ms=clock.now_ms() + 1_000)
    assert database.read(leases.last_grant, lease) is None
    grant = database.transact(leases.acquire, lease, owner="ada", ttl_ms=1_000)
    clock.advance_ms(1_000)
    database.transact(leases.extend, lease, until_ms=clock.now_ms() + 1_000)
    assert database.read(leases.inspect, lease) == (grant, False)


def test_a_state_that_was_removed_is_not_moved(database: Database) -> None:
    database.transact(states.move, "main", "old", "new")
    assert database.read(states.get, "main", "new") is None


def test_a_migration_that_has_copied_something_is_not_withdrawn(database: Database) -> None:
    begun = database.transact(migrations.begin, "dir:source")
    copied = migrations.Migration(source=begun.source, began_ms=begun.began_ms, at=b"k", keys=1)
    database.transact(migrations.save_progress, begun, copied)
    for progress in (begun, copied):
        database.transact(migrations.withdraw, progress)
    assert database.read(migrations.load) == copied


def test_records_that_were_copied_before_are_not_copied_again(database: Database) -> None:
    database.transact(worlds.create, ADA)
    database.transact(journals.write_at, ADA, [b"0", b"1"], 0)
    database.transact(journals.write_at, ADA, [b"other"], 0)
    assert database.read(journals.read_hot, ADA, 0, 10) == [(0, b"0"), (1, b"1")]


def test_the_baseline_of_a_fork_is_found_behind_many_snapshots_that_do_not_qualify(database: Database) -> None:
    bob, count = World("main", "bob"), PAGE_ITEMS + 1
    database.transact(snapshots.create_world, ADA)

    def work(tx: Transaction) -> None:
        journals.write(tx, ADA, [b"record"] * count, 0)
        first = snapshots.baseline(tx, ADA)
        for height in range(1, count + 1):
            record = SnapshotRecord(first.snapshot_ref, height, 0, None, first.manifest_hash)
            tx.put(snapshots._key(ADA, height), snapshots._encode(record))

    database.transact(work)
    database.transact(world_forks.begin, ADA, bob, count)
    assert database.read(snapshots.baseline, bob).height == 0


def test_a_fork_of_a_world_without_snapshots_has_no_baseline(database: Database) -> None:
    bob = World("main", "bob")
    database.transact(worlds.create, ADA)
    database.transact(world_forks.begin, ADA, bob, 0)
    assert database.read(snapshots.find_baseline, bob) is None


def test_a_batch_of_items_is_bounded_by_their_bytes_and_their_number(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inboxes, "_PAGE", 2)
    database.transact(worlds.create, ADA)
    for _ in range(5):
        database.transact(inboxes.enqueue, ADA, Control(command="go", payload=bytes(1_000)))

    def sequences(limit: int, bytes_max: int) -> list[int]:
        batch = database.read(inboxes.read_batch, ADA, after=None, limit=limit, bytes_max=bytes_max)
        return [sequence for sequence, _ in batch]

    assert sequences(10, 1) == [0]
    assert sequences(10, 3_500) == [0, 1, 2]
    assert sequences(4, 10_000) == [0, 1, 2, 3]
    assert sequences(10, 10_000) == [0, 1, 2, 3, 4]


def test_the_timer_of_a_world_that_is_being_deleted_is_removed_and_does_not_fire(
    database: Database, clock: ManualClock
) -> None:
    tick = DueTimer(clock.now_ms() * 1_000_000, b"tick", "ada")
    database.transact(worlds.create, ADA)
    database.transact(timers.set, ADA, 0, Timer(tick.deliver_at_ns, b"tick"))
    _delete_ada(database)
    assert database.transact(timer_firing.fire, "main", [tick]) == 0
    assert database.read(timers.next_due_ns, "main") is None


def test_the_end_of_a_run_is_not_told_to_a_parent_that_is_being_deleted(database: Database) -> None:
    parent = runs.world_of("main", "r1")
    database.transact(runs.start, StartRun("w", "r1"))
    database.transact(runs.start, StartRun("w", "r2", parent="r1"))
    for state in (WorldState.ARCHIVED, WorldState.DELETING):
        database.transact(worlds.change_state, parent, state)
    sequence = database.read(inboxes.next_sequence, parent)
    assert database.transact(runs.cancel, CancelRun("r2", force=True)).state == "cancelled"
    assert database.read(inboxes.next_sequence, parent) == sequence


# Hosting.


@pytest.fixture
def hosted(database: Database) -> ClaimedWorld:
    """A world that a host holds, with one item."""
    database.transact(worlds.create, ADA)
    database.transact(turns.set_program, ADA, "bot")
    database.transact(inboxes.enqueue, ADA, Control(command="go"))
    claimed = _claim_ada(database)
    assert claimed is not None
    return claimed


def _candidates(database: Database) -> hosting.Candidates:
    return database.read(hosting.candidates, "main", programs=["bot"], owner="host", limit=10)


def _claim_ada(database: Database) -> ClaimedWorld | None:
    (ready,) = _candidates(database).ready
    return database.transact(turns.claim, ADA, ready, owner="host", lease_ms=1_000)


def test_a_claim_that_did_not_reach_its_host_is_given_back(database: Database, hosted: ClaimedWorld) -> None:
    database.transact(turns.undo_claim, ADA, hosted, owner="host")
    assert database.read(turns.describe, ADA).owner is None
    again = _claim_ada(database)
    assert again is not None
    assert again.fence > hosted.fence


def test_a_host_that_did_not_learn_of_new_items_is_woken_again(database: Database, hosted: ClaimedWorld) -> None:
    database.transact(inboxes.enqueue, ADA, Control(command="go"))
    woken = database.transact(turns.claim_woken, ADA, owner="host")
    assert woken is not None
    assert _candidates(database).woken == []
    database.transact(turns.undo_claim, ADA, woken, owner="host")
    assert _candidates(database).woken == ["ada"]
    assert database.read(turns.describe, ADA).fence == hosted.fence


def test_a_world_is_not_claimed_before_its_claim_ends(
    database: Database, hosted: ClaimedWorld, clock: ManualClock
) -> None:
    ended = Ready(hosted.expires_ms, "ada", "bot")
    assert database.transact(turns.claim, ADA, ended, owner="other", lease_ms=1_000) is None
    clock.advance_ms(1_000)
    assert database.transact(turns.claim, ADA, ended, owner="other", lease_ms=1_000) is not None


@pytest.mark.usefixtures("hosted")
def test_a_key_of_the_ready_index_that_is_wrong_is_removed(database: Database, clock: ManualClock) -> None:
    wrong = Ready(1, "ada", "bot")
    database.transact(Transaction.put, hosting._ready("main").key("bot", 1, "ada"), b"")
    assert _candidates(database).ready == [wrong]
    assert _claim_ada(database) is None
    assert _candidates(database).ready == []
    assert database.transact(turns.claim, ADA, wrong, owner="host", lease_ms=1_000) is None


def test_the_program_that_a_world_has_keeps_its_claim(database: Database, hosted: ClaimedWorld) -> None:
    info = database.transact(turns.set_program, ADA, "bot")
    assert (info.owner, info.fence) == ("host", hosted.fence)


def test_a_world_that_an_error_stopped_is_not_started_by_a_pause(database: Database, hosted: ClaimedWorld) -> None:
    database.transact(turns.fail_turn, ADA, FailTurn("ada", "host", hosted.fence, "bad", is_stopped=True))
    for state in (WorldState.PAUSED, WorldState.ACTIVE):
        database.transact(worlds.change_state, ADA, state)
        database.transact(turns.note_state, ADA)
    info = database.read(turns.describe, ADA)
    assert (info.is_stopped, info.ready_ms) == (True, None)


def test_a_turn_may_only_cancel_timers(database: Database, hosted: ClaimedWorld) -> None:
    database.transact(timers.set, ADA, 0, Timer(1, b"tick"))
    turn = CommitTurn(world="ada", owner="host", fence=hosted.fence, expected_head=0, cancelled_timers=[b"tick"])
    assert database.transact(turns.commit_turn, ADA, turn, lease_ms=1_000).head == 0
    assert database.read(timers.next_due_ns, "main") is None


def test_an_item_that_was_set_aside_can_be_dropped_while_its_world_is_being_deleted(
    database: Database, hosted: ClaimedWorld
) -> None:
    (sequence, _), *_ = hosted.items
    turn = CommitTurn(
        world="ada", owner="host", fence=hosted.fence, expected_head=0, take=sequence, aside=[(sequence, "bad")]
    )
    database.transact(turns.commit_turn, ADA, turn, lease_ms=1_000)
    _delete_ada(database)
    assert database.transact(hosting.clear, ADA, 1, 10)
    database.transact(turns.retry_aside, ADA, sequence, drop=True)
    assert database.read(hosting.find, ADA) is None
    assert database.read(Transaction.get, turns._aside_key(ADA, sequence)) is None
