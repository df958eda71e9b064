"""Claims and turns: how hosts run worlds. `hosting` has the record and the indexes that these functions change.

    w/<world>/aside/<sequence>  ->  the item, the error of its program, and when it was set aside

A turn moves items from the inbox to the journal, with everything else of the turn, in one commit. It is refused unless
its host holds the world, so at most one process writes the journal, and each item is taken once. A turn without items
reads the record and the head, and writes its records and the head.
"""

from typing import TypeVar

import msgspec

from fastness.errors import HeadAdvanced, InvalidArgument, ItemNotFound
from fastness.kv import Transaction, fence_floor
from fastness.layers import blobs, effects, hosting, inboxes, journal_records, journals, timers, worlds
from fastness.layers.hosting import Hosting, Idle, Ready
from fastness.layers.worlds import World, WorldState, subspace
from fastness.limits import (
    ASIDE_ERROR_BYTES_MAX,
    BATCH_BYTES_MAX,
    INBOX_ITEM_BYTES_MAX,
    INTENT_HASH_BYTES_MAX,
    TURN_ITEMS_MAX,
)
from fastness.wire.canonical import canonical
from fastness.wire.hosting import (
    AsideItem,
    ClaimedWorld,
    CommitTurn,
    FailTurn,
    GivenBack,
    HostingInfo,
    RenewedWorld,
    TurnCommitted,
)
from fastness.wire.inboxes import Effect, InboxItem, Timer, check_requests

_Asked = TypeVar("_Asked", Effect, Timer)
_NEW = Hosting(None)
_encode = msgspec.msgpack.Encoder().encode
_decode_aside = msgspec.msgpack.Decoder(tuple[InboxItem, str, int]).decode


def set_program(tx: Transaction, world: World, program: str | None) -> HostingInfo:
    """Have a world run by the hosts that have this program; with None, by no host. Another program ends the claim.

    Raises:
        WorldNotFound, WorldNotActive: the world does not exist, or is being deleted.
    """
    worlds.require_readable(tx, world)
    before = hosting.find(tx, world)
    if (before or _NEW).program != program:
        kept = _NEW if before is None else Hosting(None, fence=before.fence, set_aside=before.set_aside)
        after = msgspec.structs.replace(kept, program=program)
        # A world with a journal is ready even without items: its host may have been at work.
        if (
            program is not None
            and _is_active(tx, world)
            and (inboxes.has_undrained(tx, world) or journals.head(tx, world))
        ):
            after = msgspec.structs.replace(after, ready_ms=tx.now_ms)
        hosting.write(tx, world, before, after)
    return describe(tx, world)


def describe(tx: Transaction, world: World) -> HostingInfo:
    """How a world is run."""
    worlds.describe(tx, world)
    record = hosting.find(tx, world) or _NEW
    is_held = record.is_held_at(tx.now_ms)
    return HostingInfo(
        world.name,
        record.program,
        record.owner if is_held else None,
        record.fence,
        record.expires_ms if is_held else None,
        None if is_held else record.ready_ms,
        record.attempts,
        record.error,
        record.is_stopped,
        record.set_aside,
    )


def note_state(tx: Transaction, world: World) -> None:
    """Follow a change of the world's state: only an active world has a claim or is ready.

    A world that is active again is ready even without items: its host may have been at work when it was paused.
    """
    record = hosting.find(tx, world)
    if record is None or record.program is None:
        return
    if not _is_active(tx, world):
        hosting.write(tx, world, record, hosting.end_claim(record, ready_ms=None))
    elif record.ready_ms is None and not record.is_stopped:
        hosting.write(tx, world, record, hosting.end_claim(record, ready_ms=tx.now_ms))


def claim(
    tx: Transaction, world: World, ready: Ready, *, owner: str, lease_ms: int, bytes_max: int = BATCH_BYTES_MAX
) -> ClaimedWorld | None:
    """Lease a world that `ready` found in the index, with its next items; None if another host was faster.

    A world whose claim ended without being given back is returned even without items: its host may have been at work.
    """
    record, now_ms = hosting.find(tx, world), tx.now_ms
    if record is None or (record.program, record.ready_ms) != (ready.program, ready.at_ms):
        hosting.clear_stale(tx, world, ready)
        return None
    if ready.at_ms > now_ms:
        return None  # The time of this transaction may be a little older than that of the search.
    meta = worlds.describe(tx, world)
    if meta.state is not WorldState.ACTIVE:  # A caller of the layers has not called `note_state`.
        hosting.write(tx, world, record, hosting.end_claim(record, ready_ms=None))
        return None
    after = msgspec.structs.replace(
        record,
        owner=owner,
        fence=fence_floor.next_fence(tx, record.fence, meta.fences_from),
        expires_ms=now_ms + lease_ms,
        ready_ms=now_ms + lease_ms,
        idle=None,
    )
    hosting.write(tx, world, record, after)
    return _claimed(tx, world, after, meta.incarnation, bytes_max=bytes_max, is_new=True)


def claim_woken(tx: Transaction, world: World, *, owner: str, bytes_max: int = BATCH_BYTES_MAX) -> ClaimedWorld | None:
    """A world that `owner` holds and for which items arrived; None if it is lost, or has no items."""
    if not hosting.clear_wake(tx, world, owner):
        return None
    record = hosting.find(tx, world)
    if record is None or record.owner != owner or not record.is_held_at(tx.now_ms):
        return None
    found = _claimed(tx, world, record, worlds.describe(tx, world).incarnation, bytes_max=bytes_max, is_new=False)
    return found if found.items else None


def undo_claim(tx: Transaction, world: World, claimed: ClaimedWorld, *, owner: str) -> None:
    """Give back a world whose claim did not reach its host."""
    if claimed.is_new:
        release(tx, world, GivenBack(world.name, claimed.fence, claimed.head, has_work=True), owner=owner)
    else:
        hosting.note_work(tx, world)


def commit_turn(tx: Transaction, world: World, turn: CommitTurn, *, lease_ms: int) -> TurnCommitted:
    """Append the records of a turn, take its items, and index what it asks for.

    Raises:
        LeaseConflict, LeaseExpired: the host does not hold the world any more.
        WorldNotActive, WorldNotFound: the world is paused, archived or deleted.
        HeadAdvanced: the head is not `expected_head`.
        BatchTooLarge: the turn has more records than one batch allows.
        InvalidArgument: it names an item or a record that it does not have.
        BlobNotFound: it names a blob that is not stored.
    """
    if turn.effects or turn.timers or turn.cancelled_timers or turn.blobs:
        _check(turn)
    tx.prefetch(hosting.record_key(world), journals.head_key(world))
    record = hosting.require_claim(tx, world, owner=turn.owner, fence=turn.fence)
    head = journals.head(tx, world)
    if head != turn.expected_head:
        raise HeadAdvanced(turn.expected_head, head)
    taken = [] if turn.take is None else inboxes.read_to(tx, world, turn.take)
    errors = dict(turn.aside)
    if not errors.keys() <= {sequence for sequence, _ in taken}:
        raise InvalidArgument("An item can be set aside only by the turn that takes it; raise `take`, or leave it out")
    records = [
        *(journal_records.entry(value) for value in turn.opening),
        *(
            journal_records.entry(canonical({"aside": sequence}))
            if sequence in errors
            else journal_records.ingress(sequence, item)
            for sequence, item in taken
        ),
        *(journal_records.entry(value) for value in turn.entries),
    ]
    own = [
        (offset, item)
        for offset, (sequence, item) in enumerate(taken, len(turn.opening))
        if sequence not in errors and (item.effects or item.timers)
    ]
    asked_effects = _by_record(turn.effects, [(offset, item.effects) for offset, item in own], len(records))
    asked_timers = _by_record(turn.timers, [(offset, item.timers) for offset, item in own], len(records))
    for hash in turn.blobs:
        blobs.use(tx, world.universe, hash)
    if records:
        journals.check_batch(records)
        journals.write(tx, world, records, head)
    if taken:
        inboxes.set_cursor(tx, world, taken[-1][0])
    for sequence, item in taken:
        if sequence in errors:
            tx.put(_aside_key(world, sequence), _encode((item, _cut(errors[sequence]), tx.now_ms)))
    for intent_hash in turn.cancelled_timers:  # First: a timer that the turn sets stays.
        timers.cancel(tx, world, intent_hash)
    for offset, asked in asked_effects.items():
        for number, effect in enumerate(asked):
            effects.request(tx, world, head + offset, number, effect)
    for offset, wanted in asked_timers.items():
        for timer in wanted:
            timers.set(tx, world, head + offset, timer)
    has_more = bool(taken) and inboxes.next_sequence(tx, world) > taken[-1][0] + 1
    expires_ms = _settle(tx, world, record, aside=len(errors), lease_ms=lease_ms)
    return TurnCommitted(head + len(records), expires_ms, has_more)


def fail_turn(tx: Transaction, world: World, failed: FailTurn) -> None:
    """Record that a turn failed, and give the world back.

    Raises:
        LeaseConflict, LeaseExpired, WorldNotActive, WorldNotFound: as `commit_turn`.
    """
    record = hosting.require_claim(tx, world, owner=failed.owner, fence=failed.fence)
    ready_ms = None if failed.is_stopped else tx.now_ms + round(failed.delay_seconds * 1_000)
    after = msgspec.structs.replace(
        hosting.end_claim(record, ready_ms=ready_ms),
        attempts=record.attempts + 1,
        error=_cut(failed.error),
        is_stopped=failed.is_stopped,
    )
    hosting.write(tx, world, record, after)


def renew(tx: Transaction, world: World, *, owner: str, fence: int, lease_ms: int) -> RenewedWorld | None:
    """Extend a claim to at least `lease_ms` from now; None if the host does not hold the world any more."""
    record = hosting.find(tx, world)
    if record is None or (record.owner, record.fence) != (owner, fence) or not record.is_held_at(tx.now_ms):
        return None
    expires_ms = max(tx.now_ms + lease_ms, record.expires_ms)
    if expires_ms != record.expires_ms:
        hosting.write(tx, world, record, msgspec.structs.replace(record, expires_ms=expires_ms, ready_ms=expires_ms))
    return RenewedWorld(world.name, fence, expires_ms)


def release(tx: Transaction, world: World, given: GivenBack, *, owner: str) -> bool:
    """Give a world back; whether the host had it until now.

    It is ready with `has_work`, if items are left, or if its journal has grown since: the host's last commit may have
    been acknowledged to a caller that was cancelled, or the host may have taken the world again before this request
    arrived. Records come with every item that is taken, so what happened after the host has looked moves the head.
    """
    record = hosting.find(tx, world)
    if record is None or (record.owner, record.fence) != (owner, given.fence):
        return False
    if given.has_work or journals.head(tx, world) != given.head or inboxes.has_undrained(tx, world):
        after = hosting.end_claim(record, ready_ms=tx.now_ms)
    else:
        after = hosting.end_claim(record, ready_ms=None, idle=Idle(given.head, given.waits))
    hosting.write(tx, world, record, after)
    return True


def resume(tx: Transaction, world: World) -> HostingInfo:
    """Let hosts run a world again that is stopped by an error. Its failed attempts are forgotten."""
    record = hosting.find(tx, world)
    if record is not None and record.is_stopped:
        ready_ms = tx.now_ms if _is_active(tx, world) else None
        after = msgspec.structs.replace(record, is_stopped=False, attempts=0, error=None, ready_ms=ready_ms)
        hosting.write(tx, world, record, after)
    return describe(tx, world)


def aside(tx: Transaction, world: World, *, after: int | None, limit: int) -> list[AsideItem]:
    """At most `limit` items that were set aside, after the sequence `after`."""
    worlds.require_readable(tx, world)
    begin, end = subspace(world).range("aside")
    if after is not None:
        begin = _aside_key(world, after) + b"\x00"
    return [
        AsideItem(subspace(world).unpack(key)[1], *_decode_aside(stored))
        for key, stored in tx.scan(begin, end, limit=limit)
    ]


def retry_aside(tx: Transaction, world: World, sequence: int, *, drop: bool) -> None:
    """Put an item that was set aside back at the end of the inbox; with `drop`, remove it.

    Raises:
        ItemNotFound: no such item is set aside.
        WorldNotActive: the inbox accepts no items, because the world is archived.
    """
    key = _aside_key(world, sequence)
    stored = tx.get(key)
    if stored is None:
        worlds.describe(tx, world)
        raise ItemNotFound(f"No item {sequence} of world {world.name} is set aside; list those that are")
    if not drop:
        # It was accepted before, with its sender, and may have a longer payload than callers may put.
        item = _decode_aside(stored)[0]
        inboxes.enqueue(tx, world, item, is_checked=True, payload_bytes_max=INBOX_ITEM_BYTES_MAX)
    tx.delete(key)
    record = hosting.find(tx, world)
    if record is not None:
        after = msgspec.structs.replace(record, set_aside=max(record.set_aside - 1, 0))
        hosting.write(tx, world, record, after)


def _claimed(
    tx: Transaction, world: World, record: Hosting, incarnation: int, *, bytes_max: int, is_new: bool
) -> ClaimedWorld:
    assert record.program is not None, "only a world with a program is claimed"
    cursor = inboxes.cursor(tx, world)
    items = inboxes.read_batch(tx, world, after=cursor, limit=TURN_ITEMS_MAX, bytes_max=bytes_max)
    return ClaimedWorld(
        world.name,
        record.program,
        incarnation,
        record.fence,
        record.expires_ms,
        journals.head(tx, world),
        cursor,
        items,
        is_new,
        record.attempts,
    )


def _settle(tx: Transaction, world: World, record: Hosting, *, aside: int, lease_ms: int) -> int:
    """Update the record after a turn, if anything changed; when the claim ends."""
    after = record
    if record.attempts or record.error is not None or aside:
        after = msgspec.structs.replace(record, attempts=0, error=None, set_aside=record.set_aside + aside)
    if record.expires_ms - tx.now_ms <= lease_ms // 2:
        expires_ms = tx.now_ms + lease_ms
        after = msgspec.structs.replace(after, expires_ms=expires_ms, ready_ms=expires_ms)
    if after is not record:
        hosting.write(tx, world, record, after)
    return after.expires_ms


def _by_record(
    asked: list[tuple[int, _Asked]], own: list[tuple[int, tuple[_Asked, ...]]], records: int
) -> dict[int, list[_Asked]]:
    """What each record of a turn asks for: first what the item itself does."""
    found = {offset: list(each) for offset, each in own}
    for offset, one in asked:
        if not 0 <= offset < records:
            raise InvalidArgument(f"An effect or timer is of record {offset} of the turn, which has {records} records")
        found.setdefault(offset, []).append(one)
    return found


def _check(turn: CommitTurn) -> None:
    if any(len(intent_hash) > INTENT_HASH_BYTES_MAX for intent_hash in turn.cancelled_timers):
        raise InvalidArgument(f"An intent hash has at most {INTENT_HASH_BYTES_MAX} bytes")
    check_requests([effect for _, effect in turn.effects], [timer for _, timer in turn.timers])


def _is_active(tx: Transaction, world: World) -> bool:
    return worlds.describe(tx, world).state is WorldState.ACTIVE


def _aside_key(world: World, sequence: int) -> bytes:
    return subspace(world).key("aside", sequence)


def _cut(error: str) -> str:
    """The end of an error, which says most in a traceback."""
    encoded = error.encode(errors="replace")
    return encoded[-ASIDE_ERROR_BYTES_MAX:].decode(errors="ignore")
