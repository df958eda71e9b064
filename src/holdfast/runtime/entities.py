"""Tiered writes of entities: each field as its tier asks, all durable ones in one commit.

    CRITICAL      the entity's row is locked in this process, then one synced commit
    IMPORTANT     no lock; one commit that is synced within 5 s, checked against the versions that were seen
    BEST_EFFORT   a record in the session log, after the commit of the others

A commit that touches a CRITICAL field carries the IMPORTANT ones with it, at the stronger promise. Rows are locked so
that writers of one process wait for each other instead of failing; that versions are right is the transaction's
business, between processes too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.kv import Database, Transaction
from holdfast.layers import entities, tiering
from holdfast.layers.tiering import CriticalFieldRemoved, Part
from holdfast.names import checked_name
from holdfast.runtime.activity import ActivityLog
from holdfast.runtime.locktable import LockTable
from holdfast.runtime.loglines import encoded
from holdfast.tiers import Tier, TierPolicy, strongest
from holdfast.wire.entities import DeleteEntity, PutEntity, WriteEntities, Written


class AsyncEntityStore:
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

    async def write(self, request: WriteEntities) -> Written:
        """Change entities, all or none.

        Raises:
            VersionConflict: one of `seen` has another version by now.
            LockTimeout: somebody kept the row of a CRITICAL field locked.
        """
        universe = checked_name("universe", request.universe)
        parts = tiering.parts_of(self._policy, universe, request.writes)
        tier = parts[0].tier if len(parts) == 1 else strongest(part.tier for part in parts)
        log = self._ready_to_log(universe, request.session, parts)
        versions: list[int | None] = [None] * len(parts)
        if tier is not Tier.BEST_EFFORT or request.seen:
            at_least = Tier.CRITICAL if tier is Tier.CRITICAL else Tier.IMPORTANT
            versions = await self._commit(parts, at_least, tiering.write, parts, request.seen, universe, tier=at_least)
        log()
        return Written(versions, tier)

    async def put(self, request: PutEntity) -> Written:
        """Replace an entity if it has the version that the caller saw.

        Raises:
            VersionConflict: it has another one by now.
        """
        universe = checked_name("universe", request.universe)
        key = tiering.entity_key(universe, request.kind, request.id)
        part = tiering.part_of(self._policy, key, request.fields)
        tier = strongest((part.tier, Tier.IMPORTANT))
        expected = request.expected_version
        log = self._ready_to_log(universe, request.session, [part])
        try:
            version = await self._put(part, tier, expected)
        except CriticalFieldRemoved:
            tier = Tier.CRITICAL
            version = await self._put(part, tier, expected)
        log()
        return Written([version], tier)

    async def delete(self, request: DeleteEntity) -> Written:
        """Delete an entity."""
        universe = checked_name("universe", request.universe)
        part = Part(tiering.entity_key(universe, request.kind, request.id), {}, [], {}, Tier.CRITICAL)
        expected = request.expected_version
        version = await self._commit([part], Tier.CRITICAL, entities.delete, part.key, expected_version=expected)
        return Written([version], Tier.CRITICAL)

    async def _put(self, part: Part, tier: Tier, expected: int) -> int:
        version: int = await self._commit(
            [part._replace(tier=tier)], tier, tiering.put, part, self._policy, expected_version=expected, tier=tier
        )
        return version

    async def _commit(self, parts: Sequence[Part], promise: Tier, work: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [["record_id", f"{part.key.kind}/{part.key.id}"] for part in parts if part.tier is Tier.CRITICAL]
        if not rows:
            return await self._transact(promise, work, args, kwargs, None)
        with await self._locks(parts[0].key.universe).acquire_all_async(rows) as held:
            return await self._transact(promise, work, args, kwargs, held.release)

    async def _transact(
        self, promise: Tier, work: Any, args: tuple[Any, ...], kwargs: dict[str, Any], done: Callable[[], None] | None
    ) -> Any:
        def and_let_go(tx: Transaction) -> Any:
            result = work(tx, *args, **kwargs)
            # The next writer of a row runs after this commit, and so will its sync: there is no need to keep the row
            # locked while the disk works, and all that wait for one row can share one sync.
            if done is not None:
                done()
            return result

        return await self._database.transact_async(and_let_go, tier=promise)

    def _ready_to_log(self, universe: str, session: str | None, parts: Sequence[Part]) -> Callable[[], None]:
        """Logs the BEST_EFFORT sides. What a log would refuse is refused here, before anything is committed."""
        records = [encoded(tiering.loose_record(part)) for part in parts if part.loose]
        if not records:
            return _nothing
        log = self._activity().session(universe, self._session if session is None else session, tiering.LOG_KIND)
        return partial(log.accept, records)


def _nothing() -> None:
    """There is nothing to log."""
