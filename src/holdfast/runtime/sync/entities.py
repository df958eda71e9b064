"""Generated from runtime/entities.py by tools/make_twins.py; change that file instead."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from holdfast.errors import HoldfastError
from holdfast.kv import Database, Transaction
from holdfast.layers import entities, field_tiers
from holdfast.layers.field_tiers import CriticalFieldRemoved, Part
from holdfast.layers.idempotency import KeyedCall, recall, remember
from holdfast.names import checked_name
from holdfast.runtime.activity.format import encoded
from holdfast.runtime.activity.log import ActivityLog
from holdfast.runtime.locks.table import LockTable
from holdfast.tiers import Tier, TierPolicy, strongest
from holdfast.wire.entities import DeleteEntity, EntityKind, EntityKinds, PutEntity, WriteEntities, Written

_log = logging.getLogger("holdfast.activity")
_decode = msgspec.msgpack.Decoder(Written).decode


class EntityStore:
    """Writes entities by the policy of a plane."""

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
        """Change entities, all or none; once for each `call`.

        Raises:
            VersionConflict: one of `seen` has another version by now.
            LockTimeout: somebody kept the row of a CRITICAL field locked.
        """
        universe = checked_name("universe", request.universe)
        parts = field_tiers.parts_of(self._policy, universe, request.writes)
        tier = parts[0].tier if len(parts) == 1 else strongest(part.tier for part in parts)
        log = self._ready_to_log(universe, request.session, parts)
        if tier is Tier.BEST_EFFORT and not request.seen:
            self._log_once(log, call)
            return Written([None] * len(parts), tier)
        at_least = Tier.CRITICAL if tier is Tier.CRITICAL else Tier.IMPORTANT

        def work(tx: Transaction) -> Written:
            return Written(field_tiers.write(tx, parts, request.seen, universe, tier=at_least), tier)

        return self._commit(parts, at_least, work, call, log)

    def put(self, request: PutEntity, call: KeyedCall | None = None) -> Written:
        """Replace an entity if it has the version that the caller saw.

        Raises:
            VersionConflict: it has another one by now.
        """
        universe = checked_name("universe", request.universe)
        key = field_tiers.entity_key(universe, request.kind, request.id)
        part = field_tiers.part_of(self._policy, key, request.fields)
        tier = strongest((part.tier, Tier.IMPORTANT))
        log = self._ready_to_log(universe, request.session, [part])
        put = partial(self._put, part, request.expected_version, call=call, log=log)
        try:
            return put(tier)
        except CriticalFieldRemoved:
            return put(Tier.CRITICAL)

    def delete(self, request: DeleteEntity, call: KeyedCall | None = None) -> Written:
        """Delete an entity."""
        universe = checked_name("universe", request.universe)
        part = Part(field_tiers.entity_key(universe, request.kind, request.id), {}, [], {}, Tier.CRITICAL)

        def work(tx: Transaction) -> Written:
            version = entities.delete(tx, part.key, expected_version=request.expected_version)
            return Written([version], Tier.CRITICAL)

        return self._commit([part], Tier.CRITICAL, work, call, _nothing)

    def _put(
        self, part: Part, expected: int, tier: Tier, *, call: KeyedCall | None, log: Callable[[], None]
    ) -> Written:
        def work(tx: Transaction) -> Written:
            return Written([field_tiers.put(tx, part, self._policy, expected_version=expected, tier=tier)], tier)

        return self._commit([part._replace(tier=tier)], tier, work, call, log)

    def _commit(
        self,
        parts: Sequence[Part],
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
            except HoldfastError as error:  # BEST_EFFORT: its session ended meanwhile, and no other can be had.
                _log.warning("fields of entities are not in a session log, and the others are written: %s", error)
        elif written.durability is Tier.CRITICAL and promise is not Tier.CRITICAL:
            # It was promised more before than was asked for now: see to it that this holds.
            self._database.read(_look, tier=Tier.CRITICAL)
        return written

    def _transact(
        self,
        promise: Tier,
        work: Callable[[Transaction], Written],
        call: KeyedCall | None,
        done: Callable[[], None] | None,
    ) -> tuple[Written, bool]:
        def and_let_go(tx: Transaction) -> tuple[Written, bool]:
            before = None if call is None else recall(tx, call)
            written = work(tx) if before is None else _decode(before)
            if call is not None and before is None:
                remember(tx, call, written)
            # The next writer of a row runs after this commit, and so will its sync: there is no need to keep the row
            # locked while the disk works, and all that wait for one row can share one sync.
            if done is not None:
                done()
            return written, before is None

        return self._database.transact(and_let_go, tier=promise)

    def _log_once(self, log: Callable[[], None], call: KeyedCall | None) -> None:
        if call is None:
            log()
            return
        recent = self._activity().recent
        if not recent.knows(call):
            log()
            recent.add(call)

    def _ready_to_log(self, universe: str, session: str | None, parts: Sequence[Part]) -> Callable[[], None]:
        """Logs the BEST_EFFORT sides. What a log would refuse is refused here, before anything is committed."""
        records = [encoded(field_tiers.loose_record(part)) for part in parts if part.loose]
        if not records:
            return _nothing
        log = self._activity().session(universe, self._session if session is None else session, field_tiers.LOG_KIND)
        return partial(log.accept, records)


def _nothing() -> None:
    """There is nothing to log."""


def _look(tx: Transaction) -> None:
    """Whoever looks waits for the sync of what is there."""
    tx.get(b"once")
