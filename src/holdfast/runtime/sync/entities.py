"""Generated from runtime/entities.py by tools/make_twins.py; change that file instead."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from holdfast.errors import HoldfastError
from holdfast.kv import Database, Transaction
from holdfast.layers import entities, field_tiers
from holdfast.layers.field_tiers import CriticalFieldRemoved, TieredWrite
from holdfast.layers.idempotency import KeyedCall, store_result, stored_result
from holdfast.names import checked_name
from holdfast.runtime.activity.format import encode_record
from holdfast.runtime.activity.log import ActivityLog
from holdfast.runtime.locks.table import LockTable
from holdfast.tiers import Tier, TierPolicy, strongest
from holdfast.wire.entities import DeleteEntity, EntityKind, EntityKinds, PutEntity, WriteEntities, Written

_log = logging.getLogger("holdfast.activity")
_decode = msgspec.msgpack.Decoder(Written).decode


class EntityStore:
    """Writes entities according to the tier policy of a plane."""

    def __init__(
        self,
        database: Database,
        locks: Callable[[str], LockTable],
        activity: Callable[[], ActivityLog],
        policy: TierPolicy,
        session: str,
    ) -> None:
        self._database = database
        self._locks = locks
        self._activity = activity
        self._policy = policy
        self._session = session

    def kinds(self, universe: str, *, after: str, limit: int, tier: Tier) -> EntityKinds:
        """A page of kinds, with the tiers of their fields."""
        found = self._database.read(entities.kinds, universe, after=after, limit=limit, tier=tier)
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

    def write(self, request: WriteEntities, call: KeyedCall | None = None) -> Written:
        """Change entities, all or none; once per `call`.

        Raises:
            VersionConflict: one of `seen` has a different version.
            LockTimeout: another caller kept the row of a CRITICAL field locked.
        """
        universe = checked_name("universe", request.universe)
        parts = field_tiers.tiered_writes(self._policy, universe, request.writes)
        tier = parts[0].tier if len(parts) == 1 else strongest(part.tier for part in parts)
        log = self._prepare_log(universe, request.session, parts)
        if tier is Tier.BEST_EFFORT and not request.seen:
            self._log_deduplicated(log, call)
            return Written([None] * len(parts), tier)
        at_least = Tier.CRITICAL if tier is Tier.CRITICAL else Tier.IMPORTANT

        def work(tx: Transaction) -> Written:
            return Written(field_tiers.write(tx, parts, request.seen, universe, tier=at_least), tier)

        return self._commit(parts, at_least, work, call, log)

    def put(self, request: PutEntity, call: KeyedCall | None = None) -> Written:
        """Replace an entity if it has the expected version.

        Raises:
            VersionConflict: it has a different version.
        """
        universe = checked_name("universe", request.universe)
        key = field_tiers.entity_key(universe, request.kind, request.id)
        part = field_tiers.tiered_write(self._policy, key, request.fields)
        tier = strongest((part.tier, Tier.IMPORTANT))
        log = self._prepare_log(universe, request.session, [part])
        put = partial(self._put, part, request.expected_version, call=call, log=log)
        try:
            return put(tier)
        except CriticalFieldRemoved:
            return put(Tier.CRITICAL)

    def delete(self, request: DeleteEntity, call: KeyedCall | None = None) -> Written:
        """Delete an entity."""
        universe = checked_name("universe", request.universe)
        part = TieredWrite(field_tiers.entity_key(universe, request.kind, request.id), {}, [], {}, Tier.CRITICAL)

        def work(tx: Transaction) -> Written:
            version = entities.delete(tx, part.key, expected_version=request.expected_version)
            return Written([version], Tier.CRITICAL)

        return self._commit([part], Tier.CRITICAL, work, call, _log_nothing)

    def _put(
        self, part: TieredWrite, expected: int, tier: Tier, *, call: KeyedCall | None, log: Callable[[], None]
    ) -> Written:
        def work(tx: Transaction) -> Written:
            return Written([field_tiers.put(tx, part, self._policy, expected_version=expected, tier=tier)], tier)

        return self._commit([part._replace(tier=tier)], tier, work, call, log)

    def _commit(
        self,
        parts: Sequence[TieredWrite],
        promise: Tier,
        work: Callable[[Transaction], Written],
        call: KeyedCall | None,
        log: Callable[[], None],
    ) -> Written:
        rows = [["record_id", f"{part.key.kind}/{part.key.id}"] for part in parts if part.tier is Tier.CRITICAL]
        if not rows:
            written, is_new = self._transact(promise, work, call, None)
        else:
            with self._locks(parts[0].key.universe).acquire_all(rows) as held:
                written, is_new = self._transact(promise, work, call, held.release)
        if is_new:
            try:
                log()
            except HoldfastError as error:  # BEST_EFFORT: the session ended meanwhile, and no new one can be opened.
                _log.warning("BEST_EFFORT fields are missing in the session log; durable fields are stored: %s", error)
        elif written.durability is Tier.CRITICAL and promise is not Tier.CRITICAL:
            # The first call promised CRITICAL, and this one runs at a weaker tier: wait for the sync.
            self._database.read(_read_barrier, tier=Tier.CRITICAL)
        return written

    def _transact(
        self,
        promise: Tier,
        work: Callable[[Transaction], Written],
        call: KeyedCall | None,
        unlock: Callable[[], None] | None,
    ) -> tuple[Written, bool]:
        def write_and_unlock(tx: Transaction) -> tuple[Written, bool]:
            before = None if call is None else stored_result(tx, call)
            written = work(tx) if before is None else _decode(before)
            if call is not None and before is None:
                store_result(tx, call, written)
            # The next writer of the row commits and syncs after this commit, so the row need not stay locked during the
            # sync, and all writers that wait for one row can share a sync.
            if unlock is not None:
                unlock()
            return written, before is None

        return self._database.transact(write_and_unlock, tier=promise)

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
        records = [encode_record(field_tiers.best_effort_record(part)) for part in parts if part.best_effort]
        if not records:
            return _log_nothing
        log = self._activity().session(universe, self._session if session is None else session, field_tiers.LOG_KIND)
        return partial(log.accept, records)


def _log_nothing() -> None:
    """Used when there are no BEST_EFFORT fields."""


def _read_barrier(tx: Transaction) -> None:
    """Read something: a CRITICAL read waits for the sync of everything committed before it."""
    tx.get(b"once")
