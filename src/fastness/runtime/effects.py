"""Waiting for effects: a caller that carries them out is woken when one of its kinds is due.

    look ──► due: claim them, in one commit ──► returned
      ▲ └──► none: wait for a commit that asks for one, or until the next one is due ─┐
      └───────────────────────────────────────────────────────────────────────────────┘

What is due is looked for in a snapshot, because the index has the effects of all worlds: a transaction over it would
lock them all. The claim then checks each effect. If another caller has taken them all meanwhile, the next ones are
looked for. Where several nodes share a PostgreSQL database, a poll every few seconds covers lost notifications.
"""

from functools import partial
from typing import Final

from fastness.clock import Clock
from fastness.kv import Database, Transaction
from fastness.layers import effect_leases, effects
from fastness.layers.effects import DueEffect
from fastness.layers.idempotency import KeyedCall
from fastness.runtime.cancellation import finish_or_undo_async
from fastness.runtime.commit_waits import AsyncCommitWaits
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.tiers import Tier
from fastness.wire.effects import ClaimEffects, EffectInfo, EffectPage

_LOOKS_MAX: Final = 64  # How often a caller whose effects are taken by others looks again before it waits.


class AsyncEffectWaiter:
    """Claims effects, immediately or after a wait."""

    def __init__(self, database: Database, clock: Clock | None, options: ConsumerOptions) -> None:
        self._database = database
        self._waits = AsyncCommitWaits(database, clock, options)

    async def claim(self, request: ClaimEffects, call: KeyedCall | None = None) -> EffectPage:
        """At least one effect of these kinds, unless `wait_seconds` pass without any.

        Always CRITICAL: a fence must be durable before its holder learns it. A repeated `call` gets the effects that it
        claimed before and still holds. A caller that is cancelled holds none.
        """
        if call is not None and not call.is_new_call():
            before = await self._database.transact_async(effect_leases.stored_claims, request.universe, call)
            if before is not None:
                return EffectPage(before)
        wait_ms = round(request.wait_seconds * 1_000)
        until_ms = self._waits.now_ms() + wait_ms
        claimed, _ = await self._try_claim(request, call)
        if claimed or not wait_ms:
            return EffectPage(claimed)
        prefixes = effects.watch_prefixes(request.universe, request.kinds)
        with self._waits.open(*prefixes, until_ms=until_ms, additions=True) as wait:
            while True:
                claimed, due_in_ms = await self._try_claim(request, call)
                if claimed or wait.is_over:
                    return EffectPage(claimed)
                await wait.pause(due_in_ms)

    async def _try_claim(self, request: ClaimEffects, call: KeyedCall | None) -> tuple[list[EffectInfo], int | None]:
        """The effects that were claimed, or in how many milliseconds the next one is due, if there is one."""
        universe, lease_ms = request.universe, round(request.lease_seconds * 1_000)
        for _ in range(_LOOKS_MAX):
            entries, due_in_ms = await self._database.read_async(
                _look, universe, request.kinds, limit=request.limit, tier=Tier.IMPORTANT
            )
            if not entries:
                return [], due_in_ms
            claimed = await finish_or_undo_async(
                self._database.transact_async(
                    effect_leases.claim, universe, entries, owner=request.owner, lease_ms=lease_ms, call=call
                ),
                partial(self._release_undelivered, universe, call),
            )
            if claimed:
                return claimed, None
        return [], 1

    def _release_undelivered(self, universe: str, call: KeyedCall | None, claimed: list[EffectInfo]) -> None:
        """Give back effects whose caller was cancelled before it received them."""
        claims = effect_leases.claims_of(claimed)
        if call is not None:
            self._database.transact(effect_leases.release_undelivered, universe, claims, call)
        else:
            self._database.transact(effect_leases.release, universe, claims)


def _look(tx: Transaction, universe: str, kinds: list[str], *, limit: int) -> tuple[list[DueEffect], int | None]:
    found = effects.due(tx, universe, kinds, until_ms=tx.now_ms, limit=limit)
    if found:
        return found, None
    next_ms = effects.next_due_ms(tx, universe, kinds)
    return [], None if next_ms is None else next_ms - tx.now_ms
