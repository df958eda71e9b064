"""Claiming worlds: a host is woken by the commit that makes a world ready, or that adds items to a world it holds.

    search ──► candidates ──► claim each in a transaction ──► claimed ──► returned
      ▲  │                                            └─► another host was faster ─┐
      │  └─► none: wait for a commit in the indexes, or for the next time there ─┐ │
      └──────────────────────────────────────────────────────────────────────────┴─┘

The search reads a snapshot and locks nothing. The watch is opened before the search, so what becomes ready between the
search and the wait is not missed. Where several nodes share a PostgreSQL database, the watch fires for the commits of
all of them, and a poll every few seconds covers lost notifications.

Every few seconds a claim also checks the next running runs of its universe, a bounded number. One that nothing would
continue is made ready again, logged and counted: that it could happen is a bug.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from fastness.clock import Clock
from fastness.errors import FastnessError
from fastness.kv import Database, Transaction
from fastness.layers import hosting, runs, turns
from fastness.layers.hosting import Ready
from fastness.layers.worlds import World
from fastness.limits import (
    BATCH_BYTES_MAX,
    HOST_CLAIM_BATCH,
    HOST_CLAIM_BYTES_MAX,
    RUN_SWEEP_SECONDS,
    RUNS_SWEPT,
)
from fastness.runtime.cancellation import finish_or_undo_async
from fastness.runtime.commit_waits import AsyncCommitWaits
from fastness.runtime.consumer_options import ConsumerOptions
from fastness.tiers import Tier
from fastness.wire.hosting import ClaimedWorld, ClaimedWorlds, ClaimWorlds, GivenBack, RenewedWorld, RenewedWorlds
from fastness.wire.requests import Committed

_log = logging.getLogger("fastness.host")
Each = TypeVar("Each")


class _Sweep(NamedTuple):
    """Where the next sweep of a universe's runs begins, and when."""

    next_ms: int
    after: str


class AsyncHostingStore:
    """Claims, renews and gives back worlds."""

    def __init__(
        self, database: Database, clock: Clock | None, options: ConsumerOptions, revived_runs: Counter[str]
    ) -> None:
        """Hosting on a database; `revived_runs` counts by universe the runs that nothing would have continued."""
        self._database = database
        self._waits = AsyncCommitWaits(database, clock, options)
        self._revived_runs = revived_runs
        self._sweeps: dict[str, _Sweep] = {}  # By universe.

    async def claim(self, claim: ClaimWorlds) -> ClaimedWorlds:
        """At least one world, unless `wait_ms` pass without any.

        Always CRITICAL: a fence must be durable before its holder learns it. If the caller is cancelled, the worlds are
        given back.
        """
        lease_ms = round(claim.lease_seconds * 1_000)
        if not claim.wait_seconds:
            return ClaimedWorlds((await self._claim_once(claim, lease_ms))[0])
        until_ms = self._waits.now_ms() + round(claim.wait_seconds * 1_000)
        prefixes = hosting.watch_prefixes(claim.universe, claim.programs, claim.owner)
        with self._waits.open(*prefixes, until_ms=until_ms, additions=True) as wait:
            while True:
                found, next_ms = await self._claim_once(claim, lease_ms)
                if found or wait.is_over:
                    return ClaimedWorlds(found)
                await wait.pause(None if next_ms is None else next_ms - self._waits.now_ms())

    async def renew(self, claims: Sequence[tuple[World, int]], *, owner: str, lease_ms: int) -> RenewedWorlds:
        """Renew claims (world, fence); those that the caller still holds."""
        renewed: list[RenewedWorld] = []
        for batch in _batches(claims):
            renewed += await self._database.transact_async(_renew, batch, owner=owner, lease_ms=lease_ms)
        return RenewedWorlds(renewed)

    async def release(self, universe: str, given: Sequence[GivenBack], *, owner: str) -> Committed:
        """Give worlds back."""
        for batch in _batches(given):
            await self._database.transact_async(_release, universe, batch, owner=owner)
        return Committed(Tier.CRITICAL)

    async def _claim_once(self, claim: ClaimWorlds, lease_ms: int) -> tuple[list[ClaimedWorld], int | None]:
        """The worlds that could be claimed, and when the next one becomes ready."""
        await self._revive_stuck(claim.universe)
        # What the search finds may be lost in a power failure until the claim, which waits for it, is durable.
        found = await self._database.read_async(
            hosting.candidates,
            claim.universe,
            programs=claim.programs,
            owner=claim.owner,
            limit=claim.limit,
            tier=Tier.IMPORTANT,
        )
        claimed: list[ClaimedWorld] = []
        for batch in _batches((*found.woken, *found.ready)):
            try:
                claimed += await finish_or_undo_async(
                    self._database.transact_async(
                        _claim, claim, batch, lease_ms, HOST_CLAIM_BYTES_MAX - _size_of(claimed)
                    ),
                    partial(self._undo, claim),
                )
            except FastnessError:
                if not claimed:
                    raise
                break  # The host works on what it has.
            if _size_of(claimed) >= HOST_CLAIM_BYTES_MAX:
                break
        # Another host was faster: search again at once.
        is_behind = not claimed and (found.woken or found.ready)
        return claimed, self._waits.now_ms() if is_behind else found.next_ms

    async def _revive_stuck(self, universe: str) -> None:
        """Check the next running runs of a universe, and make those ready that nothing would continue."""
        now_ms = self._waits.now_ms()
        before = self._sweeps.get(universe, _Sweep(0, ""))
        if now_ms < before.next_ms:
            return
        next_ms = now_ms + RUN_SWEEP_SECONDS * 1_000
        self._sweeps[universe] = _Sweep(next_ms, before.after)  # Other claims do not wait for this one.
        try:
            found, after = await self._database.read_async(
                runs.find_stuck, universe, after=before.after, limit=RUNS_SWEPT, tier=Tier.IMPORTANT
            )
            revived = await self._database.transact_async(runs.revive, universe, found) if found else []
        except FastnessError as error:  # Claims do not depend on it.
            _log.warning("runs of %s are not checked: %s", universe, error)
            return
        self._sweeps[universe] = _Sweep(next_ms, after)
        for name in revived:
            self._revived_runs[universe] += 1
            _log.error("nothing would have continued %s of %s; it is ready again. Please report this", name, universe)

    def _undo(self, claim: ClaimWorlds, claimed: list[ClaimedWorld]) -> None:
        self._database.transact(_undo, claim, claimed)


def _claim(
    tx: Transaction, claim: ClaimWorlds, batch: Sequence[str | Ready], lease_ms: int, bytes_max: int
) -> list[ClaimedWorld]:
    claimed: list[ClaimedWorld] = []
    size = 0
    for each in batch:
        most = min(BATCH_BYTES_MAX, bytes_max - size)
        if most <= 0:
            break
        if isinstance(each, Ready):
            world = World(claim.universe, each.world)
            found = turns.claim(tx, world, each, owner=claim.owner, lease_ms=lease_ms, bytes_max=most)
        else:
            found = turns.claim_woken(tx, World(claim.universe, each), owner=claim.owner, bytes_max=most)
        if found is not None:
            claimed.append(found)
            size = _size_of(claimed)
    return claimed


def _undo(tx: Transaction, claim: ClaimWorlds, claimed: list[ClaimedWorld]) -> None:
    for each in claimed:
        turns.undo_claim(tx, World(claim.universe, each.world), each, owner=claim.owner)


def _renew(tx: Transaction, batch: Sequence[tuple[World, int]], *, owner: str, lease_ms: int) -> list[RenewedWorld]:
    renewed = [turns.renew(tx, world, owner=owner, fence=fence, lease_ms=lease_ms) for world, fence in batch]
    return [each for each in renewed if each is not None]


def _release(tx: Transaction, universe: str, batch: Sequence[GivenBack], *, owner: str) -> None:
    for given in batch:
        turns.release(tx, World(universe, given.world), given, owner=owner)


def _batches(items: Sequence[Each]) -> Iterator[Sequence[Each]]:
    for start in range(0, len(items), HOST_CLAIM_BATCH):
        yield items[start : start + HOST_CLAIM_BATCH]


def _size_of(claimed: list[ClaimedWorld]) -> int:
    """About the bytes of the items."""
    return sum(len(item.payload) + 256 for each in claimed for _, item in each.items)
