"""Tiered writes of entities: each field is stored by its tier, all durable fields in one commit.

    CRITICAL      one synced commit
    IMPORTANT     one commit that is synced within 5 s, checked against the expected versions
    BEST_EFFORT   a record in the session log, after the commit of the other fields

A commit with a CRITICAL field includes the IMPORTANT fields, with the stronger durability. The transaction checks
versions, also between processes; they do not depend on locks.

A durable write waits for ordered locks of others (`plane.locks`) on its rows, their type or the database:

    locks of one process     a CRITICAL write locks its rows in the lock table, and so does an IMPORTANT one once a
                             caller of the plane has acquired a lock there
    locks that processes     the transaction of the write looks for locks of other sessions. Only if it finds one, the
    share                    rows are acquired for the caller's session, in lock order, and released by the write
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from secrets import token_hex
from typing import Any, Final

import msgspec

from fastness import limits
from fastness.errors import FastnessError, LeaseExpired
from fastness.kv import Database, Transaction
from fastness.layers import entities, field_tiers, locks
from fastness.layers.entities import EntityKey
from fastness.layers.field_tiers import CriticalFieldRemoved, TieredWrite
from fastness.layers.idempotency import KeyedCall, store_result, stored_result
from fastness.lock_rules import Mode, Path
from fastness.runtime.activity.best_effort import BestEffortFields
from fastness.runtime.activity.format import encode_record
from fastness.runtime.activity.log import ActivityLog
from fastness.runtime.cancellation import undo_async
from fastness.runtime.locks.table import LocksBegun, LockTable
from fastness.runtime.shared_locks import AsyncSharedLockWaiter
from fastness.tiers import Tier, TierPolicy, strongest
from fastness.wire.atomic import Answers
from fastness.wire.canonical import canonical
from fastness.wire.entities import (
    BestEffortValue,
    DeleteEntity,
    Entities,
    EntityKind,
    EntityKinds,
    EntityRecord,
    FoundEntity,
    GetEntity,
    PutEntity,
    ScanEntities,
    WriteEntities,
    Written,
)
from fastness.wire.locks import LockSession

_log = logging.getLogger("fastness.activity")
_decode = msgspec.msgpack.Decoder(Written).decode
_SESSION_BYTES: Final = 16  # As hard to guess as a token.
_CLAIM_BYTES: Final = 8
_Outcome = tuple[Written, bool]  # And whether it was written now, not by an earlier call with the same key.


class AsyncEntityStore:
    """Writes entities according to the tier policy of a plane, and reads them with their BEST_EFFORT values."""

    def __init__(
        self,
        database: Database,
        *,
        tables: Callable[[str], LockTable],
        shares_locks: Callable[[], bool],
        waiter: AsyncSharedLockWaiter,
        activity: Callable[[], ActivityLog],
        policy: TierPolicy,
        session: str,
        best_effort: BestEffortFields,
        run_in_thread: Callable[..., Any],
    ) -> None:
        """`shares_locks`: callers in other processes acquire locks. `run_in_thread` calls a function that blocks."""
        self._shares_locks = shares_locks
        self._waiter = waiter
        self._best_effort = best_effort
        self._run_in_thread = run_in_thread
        self._database = database
        self._tables = tables
        self._activity = activity
        self._policy = policy
        self._session = session

    async def kinds(self, universe: str, *, after: str, limit: int, tier: Tier) -> EntityKinds:
        """A page of kinds, with the tiers of their fields."""
        found = await self._database.read_async(entities.kinds, universe, after=after, limit=limit, tier=tier)
        return EntityKinds(
            [
                EntityKind(
                    kind,
                    {name: self._policy.classify(kind, name) for name in sorted({*fields, *self._policy.named(kind)})},
                )
                for kind, fields in found
            ],
            self._policy.patterns,
        )

    async def get(self, request: GetEntity) -> FoundEntity:
        """An entity with the newest BEST_EFFORT values of its fields.

        Raises:
            Backend: the object store does not answer.
        """
        key = EntityKey(request.universe, request.kind, request.id)
        await self._load(key.universe)

        def work(tx: Transaction) -> FoundEntity:
            stored = entities.get(tx, key)
            return FoundEntity(self._merged(tx, key, stored), stored.version, stored.stamp)

        return await self._database.stale.read_async(work, tier=request.tier)

    async def scan(self, request: ScanEntities) -> Entities:
        """A page of entities with their newest BEST_EFFORT values, and of entities that have no others."""
        universe, kind, after = request.universe, request.kind, request.after
        await self._load(universe)

        def work(tx: Transaction) -> Entities:
            durable = entities.scan(tx, universe, kind, after=after, limit=request.limit)
            last = durable[-1].id if len(durable) == request.limit else None
            found: list[EntityRecord] = []
            for id in self._best_effort.ids(universe, kind, after, last):
                key = EntityKey(universe, kind, id)
                record = self._merged(tx, key, entities.get(tx, key))
                if record is not None:
                    found.append(record)
                if len(found) == request.limit:
                    break
            named = {each.id for each in found}
            found += [each for each in durable if each.id not in named]
            return Entities(sorted(found, key=attrgetter("id"))[: request.limit])

        return await self._database.stale.read_async(work, tier=request.tier)

    async def write(self, request: WriteEntities, call: KeyedCall | None = None) -> Written:
        """Change entities, all or none; once per `call`.

        Raises:
            VersionConflict: one of `seen` has a different version.
            LockTimeout: another caller kept one of the rows locked.
            LeaseExpired: the caller's lock session has ended.
        """
        universe = request.universe
        parts = field_tiers.tiered_writes(self._policy, universe, request.writes)
        tier = parts[0].tier if len(parts) == 1 else strongest(part.tier for part in parts)
        log = self._prepare_log(universe, request.session, parts)
        if tier is Tier.BEST_EFFORT and not request.seen:
            self._log_deduplicated(log, call)
            return Written([None] * len(parts), tier)
        at_least = Tier.CRITICAL if tier is Tier.CRITICAL else Tier.IMPORTANT

        def work(tx: Transaction) -> Written:
            return Written(field_tiers.write(tx, parts, request.seen, universe, tier=at_least), tier)

        return await self._commit(parts, at_least, work, call, log, lock_session=request.lock_session)

    async def put(self, request: PutEntity, call: KeyedCall | None = None) -> Written:
        """Replace an entity if it has the expected version.

        Raises:
            VersionConflict: it has a different version.
        """
        universe = request.universe
        key = EntityKey(universe, request.kind, request.id)
        part = field_tiers.tiered_write(self._policy, key, request.fields)
        tier = strongest((part.tier, Tier.IMPORTANT))
        log = self._prepare_log(universe, request.session, [part])
        put = partial(self._put, part, request, call=call, log=log)
        try:
            return await put(tier)
        except CriticalFieldRemoved:
            return await put(Tier.CRITICAL)

    async def delete(self, request: DeleteEntity, call: KeyedCall | None = None) -> Written:
        """Delete an entity."""
        universe = request.universe
        part = TieredWrite(EntityKey(universe, request.kind, request.id), {}, [], {}, Tier.CRITICAL)

        def work(tx: Transaction) -> Written:
            version = entities.delete(tx, part.key, expected_version=request.expected_version)
            return Written([version], Tier.CRITICAL)

        written = await self._commit([part], Tier.CRITICAL, work, call, _log_nothing, lock_session=request.lock_session)
        if written.versions[0] is not None:
            self._best_effort.forget(part.key)
        return written

    async def commit_rows(
        self, writes: Sequence[WriteEntities], commit: Callable[[], Awaitable[Answers]], locked: set[str]
    ) -> Answers:
        """Run `commit`, which writes these rows among others, while they are locked in this process as they have to be.

        It does not wait for a row. `locked` gets the universes whose rows are locked. Locks that processes share are
        looked for by the transaction itself.

        Raises:
            LockTimeout: another caller has locked one of the rows.
        """
        try:
            return await self._commit_rows(writes, commit, locked)
        except LocksBegun:
            return await self._commit_rows(writes, commit, locked)

    async def _commit_rows(
        self, writes: Sequence[WriteEntities], commit: Callable[[], Awaitable[Answers]], locked: set[str]
    ) -> Answers:
        with ExitStack() as held:
            for universe in sorted({each.universe for each in writes} if not self._shares_locks() else ()):
                table = self._tables(universe)
                if table.has_callers:
                    changes = [change for each in writes if each.universe == universe for change in each.writes]
                    parts = field_tiers.tiered_writes(self._policy, universe, changes)
                    paths = [_path(part) for part in parts if part.tier is not Tier.BEST_EFFORT]
                    held.enter_context(await table.acquire_all_async(paths, timeout_seconds=0))
                    locked.add(universe)
            return await commit()

    async def _load(self, universe: str) -> None:
        if self._best_effort.is_due(universe):
            await self._run_in_thread(self._best_effort.load, universe)

    def _merged(self, tx: Transaction, key: EntityKey, stored: entities.Entity) -> EntityRecord | None:
        """The entity with its newest BEST_EFFORT values; None if it has neither.

        A value counts if its field is BEST_EFFORT by the policy, and no durable change of the field and no deletion of
        the entity came later.
        """
        values = {
            field: BestEffortValue(canonical(msgspec.json.decode(value)), at_ms)
            for field, (at_ms, value) in self._best_effort.get(key).items()
            if value is not None
            and self._policy.classify(key.kind, field) is Tier.BEST_EFFORT
            and not _is_superseded(tx, key, stored, field, at_ms)
        }
        if not stored.deleted:
            return msgspec.structs.replace(entities.record(key, stored), best_effort=values)
        if not values:
            return None
        times = [each.at_ms for each in values.values()]
        return EntityRecord(key.kind, key.id, stored.version, {}, min(times), max(times), values)

    async def _put(
        self, part: TieredWrite, request: PutEntity, tier: Tier, *, call: KeyedCall | None, log: Callable[[], None]
    ) -> Written:
        def work(tx: Transaction) -> Written:
            version = field_tiers.put(tx, part, self._policy, expected_version=request.expected_version, tier=tier)
            return Written([version], tier)

        return await self._commit([part._replace(tier=tier)], tier, work, call, log, lock_session=request.lock_session)

    async def _commit(
        self,
        parts: Sequence[TieredWrite],
        promise: Tier,
        work: Callable[[Transaction], Written],
        call: KeyedCall | None,
        log: Callable[[], None],
        *,
        lock_session: str | None,
    ) -> Written:
        def write(tx: Transaction) -> _Outcome:
            before = None if call is None else stored_result(tx, call)
            written = work(tx) if before is None else _decode(before)
            if call is not None and before is None:
                store_result(tx, call, written)
            return written, before is None

        durable = [part for part in parts if part.tier is not Tier.BEST_EFFORT]
        if not durable:
            written, is_new = await self._database.transact_async(write, tier=promise)
        elif self._shares_locks():
            is_done = partial(stored_result, call=call) if call is not None else _never
            written, is_new = await self._commit_shared(durable, promise, write, is_done, lock_session)
        else:
            written, is_new = await self._commit_alone(durable, promise, write)
        if is_new:
            try:
                log()
            except FastnessError as error:  # BEST_EFFORT: the session ended meanwhile, and no new one can be opened.
                _log.warning("BEST_EFFORT fields are missing in the session log; durable fields are stored: %s", error)
        elif written.durability is Tier.CRITICAL and promise is not Tier.CRITICAL:
            # The first call promised CRITICAL, and this one runs at a weaker tier: wait for the sync.
            await self._database.read_async(_read_barrier, tier=Tier.CRITICAL)
        return written

    async def _commit_alone(
        self, parts: Sequence[TieredWrite], promise: Tier, write: Callable[[Transaction], _Outcome]
    ) -> _Outcome:
        """Commit while the rows are locked in this process: the CRITICAL ones, or all once the table has callers."""
        table = self._tables(parts[0].key.universe)
        paths = [_path(part) for part in parts if part.tier is Tier.CRITICAL or table.has_callers]
        outcome = await self._commit_locked(table, paths, promise, write, is_complete=len(paths) == len(parts))
        if outcome is None:  # The first caller has come meanwhile.
            paths = [_path(part) for part in parts]
            outcome = await self._commit_locked(table, paths, promise, write, is_complete=True)
            assert outcome is not None
        return outcome

    async def _commit_locked(
        self,
        table: LockTable,
        paths: Sequence[Path],
        promise: Tier,
        write: Callable[[Transaction], _Outcome],
        *,
        is_complete: bool,
    ) -> _Outcome | None:
        """Commit while `paths` are locked; None if these are not all rows, and others have to be locked, too.

        Callers come before their lock is granted, and wait for the transactions that run. So a transaction that finds
        no caller runs before the first lock is granted.
        """

        def write_unless_incomplete(tx: Transaction) -> _Outcome | None:
            return None if table.has_callers and not is_complete else write(tx)

        if not paths:
            return await self._database.transact_async(write_unless_incomplete, tier=promise)
        with await table.acquire_all_async(paths) as held:

            def write_and_unlock(tx: Transaction) -> _Outcome | None:
                outcome = write_unless_incomplete(tx)
                # The next writer of the row commits and syncs after this commit, so the row need not stay locked during
                # the sync, and all writers that wait for one row can share a sync.
                held.release()
                return outcome

            return await self._database.transact_async(write_and_unlock, tier=promise)

    async def _commit_shared(
        self,
        parts: Sequence[TieredWrite],
        promise: Tier,
        write: Callable[[Transaction], _Outcome],
        is_done: Callable[[Transaction], object],
        lock_session: str | None,
    ) -> _Outcome:
        """Commit unless other sessions exclude it; otherwise acquire the rows, and release them with the commit.

        `is_done`: an earlier call with the same key has written, so that this one only returns its answer.

        Raises:
            LeaseExpired: the caller's session has ended, and others may have held its locks since.
        """
        universe = parts[0].key.universe
        rows = [(part.key.kind, part.key.id) for part in parts]

        def write_unless_excluded(tx: Transaction) -> _Outcome | None:
            try:
                is_excluded = locks.obstacles(tx, universe, rows, session=lock_session) and not is_done(tx)
            except LeaseExpired:
                if not is_done(tx):
                    raise
                is_excluded = False
            return None if is_excluded else write(tx)

        outcome = await self._database.transact_async(write_unless_excluded, tier=promise)
        if outcome is not None:
            return outcome
        session = LockSession(token_hex(_SESSION_BYTES) if lock_session is None else lock_session, universe)
        claim = token_hex(_CLAIM_BYTES)
        await self._waiter.acquire(
            session,
            claim,
            [_path(part) for part in parts],
            Mode.EXCLUSIVE,
            owner="a write of entities",
            lease_ms=round(limits.LOCK_LEASE_SECONDS * 1_000),
            wait_ms=round(limits.LOCK_WAIT_SECONDS * 1_000),
            continues=lock_session is not None,
        )

        def write_and_release(tx: Transaction) -> _Outcome | None:
            # A claim that is released in the same commit was held until then.
            return write(tx) if locks.release(tx, session, claim) else None

        try:
            outcome = await self._database.transact_async(write_and_release, tier=promise)
        except BaseException:
            release = partial(self._database.transact, locks.release, session, claim, tier=Tier.IMPORTANT)
            await undo_async(release)
            raise
        if outcome is None:
            raise LeaseExpired("The locks of this write ended before it was committed; nothing was written. Try again")
        return outcome

    def _log_deduplicated(self, log: Callable[[], None], call: KeyedCall | None) -> None:
        if call is None:
            log()
            return
        recent_keys = self._activity().recent_keys
        if not recent_keys.contains(call):
            log()
            recent_keys.add(call)

    def _prepare_log(self, universe: str, session: str | None, parts: Sequence[TieredWrite]) -> Callable[[], None]:
        """A function that logs the BEST_EFFORT fields. A record that the log would reject raises here, not later."""
        records = [
            encode_record(field_tiers.best_effort_record(part))
            for part in parts
            if part.best_effort or part.best_effort_removed
        ]
        if not records:
            return _log_nothing
        log = self._activity().session(universe, self._session if session is None else session, field_tiers.LOG_KIND)
        return partial(log.accept, records)


def _never(tx: Transaction) -> bool:
    del tx
    return False


def _path(part: TieredWrite) -> tuple[str, str]:
    return "record_id", f"{part.key.kind}/{part.key.id}"


def _is_superseded(tx: Transaction, key: EntityKey, stored: entities.Entity, field: str, at_ms: int) -> bool:
    """Whether a durable change of the field, or a deletion of the entity, came after a BEST_EFFORT value."""
    if not stored.version or stored.updated_ms <= at_ms:
        return False
    # Only these have to be looked up: the policy made it a durable field for a while, or the entity may have been
    # deleted in between. Otherwise no durable change can have touched the field.
    needs_history = stored.deleted or field in stored.fields or at_ms < stored.created_ms
    return needs_history and entities.was_changed_after(tx, key, field, at_ms)


def _log_nothing() -> None:
    """Used when there are no BEST_EFFORT fields."""


def _read_barrier(tx: Transaction) -> None:
    """Read something: a CRITICAL read waits for the sync of everything committed before it."""
    tx.get(b"once")
