"""Hosting: how a host claims worlds and commits turns. `Host` does this by itself; programs do not need it."""

from collections.abc import Sequence

from fastness.handles.arguments import checked_items
from fastness.handles.handle import AsyncHandle
from fastness.limits import HOST_LEASE_SECONDS
from fastness.wire.canonical import canonical
from fastness.wire.hosting import (
    ClaimedWorld,
    ClaimWorlds,
    CommitTurn,
    FailTurn,
    GetSendPolicy,
    GivenBack,
    ReleaseWorlds,
    RenewedWorld,
    RenewWorlds,
    SendPolicy,
    SetSendPolicy,
    TurnCommitted,
)
from fastness.wire.inboxes import Effect, Timer


class AsyncHosting(AsyncHandle):
    """The worlds of a universe that have programs, as a host sees them.

    A claim is a lease on a world with a fence. Only its holder commits turns, so at most one host writes a world.
    """

    async def claim(
        self,
        programs: Sequence[str],
        *,
        owner: str,
        limit: int = 16,
        lease_seconds: float = HOST_LEASE_SECONDS,
        wait_seconds: float = 0.0,
    ) -> list[ClaimedWorld]:
        """Worlds of these programs that have work, the one that has waited longest first, each with its next items.

        These are worlds that no host holds, and worlds of `owner` for which items arrived (`is_new` is false). A world
        whose claim ended without being given back is returned even if it has no items.

        Args:
            programs: the names of programs.
            owner: names the host; every host needs another name.
            limit: how many worlds to return at most.
            lease_seconds: how long a claim lasts. Turns and `renew` renew it.
            wait_seconds: how long to wait for a world; up to 20.
        """
        names = list(checked_items(programs, 'wrap it in a list: claim(["shop"], …)'))
        request = ClaimWorlds(names, owner, limit, lease_seconds, wait_seconds, self._universe)
        return (await self._transport.call(request)).worlds

    async def commit(
        self,
        claimed: ClaimedWorld,
        *,
        owner: str,
        expected_head: int,
        take: int | None = None,
        opening: Sequence[object] = (),
        entries: Sequence[object] = (),
        effects: Sequence[tuple[int, Effect]] = (),
        timers: Sequence[tuple[int, Timer]] = (),
        cancelled_timers: Sequence[bytes] = (),
        aside: Sequence[tuple[int, str]] = (),
        lease_seconds: float = HOST_LEASE_SECONDS,
    ) -> TurnCommitted:
        """Commit a turn of a claimed world: its records go to the end of the journal.

        The records are `opening`, the items up to the sequence `take`, and `entries`, in this order. An effect or timer
        names the record that asks for it, counted from the first one of the turn. Timers are cancelled before others
        are set.

        Args:
            claimed: the world.
            owner: the host that claimed it.
            expected_head: the height of the first record.
            take: the sequence of the last item that the turn handles.
            opening: values (text, numbers, bytes, lists, maps) that come before the items.
            entries: values that come after the items.
            effects: external calls that a record asks for.
            timers: times at which the world wants an item. A timer with the same intent hash is replaced.
            cancelled_timers: the intent hashes of timers that are no longer wanted.
            aside: items that the program failed to handle, by their sequences, with the error.
            lease_seconds: how long the claim lasts from now on, if half of it is over.

        Raises:
            Fenced: the host does not hold the world any more. Nothing was written.
            HeadAdvanced: the journal is longer than the host knows.
            WorldNotActive: the world is paused or archived.
        """
        request = CommitTurn(
            claimed.world,
            owner,
            claimed.fence,
            expected_head,
            take,
            [canonical(value) for value in opening],
            [canonical(value) for value in entries],
            list(effects),
            list(timers),
            list(cancelled_timers),
            list(aside),
            lease_seconds,
            self._universe,
        )
        return await self._transport.call(request)

    async def fail(
        self,
        claimed: ClaimedWorld,
        *,
        owner: str,
        error: str,
        delay_seconds: float = 0.0,
        is_stopped: bool = False,
    ) -> None:
        """Record that a turn failed, and give the world back: it has work again after the delay, or is stopped.

        Raises:
            Fenced: the host does not hold the world any more.
        """
        request = FailTurn(
            claimed.world, owner, claimed.fence, error, delay_seconds, is_stopped, universe=self._universe
        )
        await self._transport.call(request)

    async def renew(
        self, claims: Sequence[ClaimedWorld], *, owner: str, lease_seconds: float = HOST_LEASE_SECONDS
    ) -> list[RenewedWorld]:
        """Extend claims to at least `lease_seconds` from now; the worlds that the host still holds."""
        worlds = [(each.world, each.fence) for each in checked_items(claims, "wrap it in a list")]
        return (await self._transport.call(RenewWorlds(worlds, owner, lease_seconds, self._universe))).worlds

    async def release(self, claims: Sequence[ClaimedWorld], *, owner: str, has_work: bool = False) -> None:
        """Give worlds back. They are ready for other hosts with `has_work`, or if these hosts have seen less than all.

        Args:
            claims: the worlds. After a commit, give its head:
                `release([msgspec.structs.replace(claimed, head=done.head)], …)`. A world with items in its inbox, or
                with records above that head, is ready, so that another host looks at it.
            owner: the host that claimed them.
            has_work: they are ready in any case.
        """
        worlds = [
            GivenBack(each.world, each.fence, each.head, has_work)
            for each in checked_items(claims, "wrap it in a list")
        ]
        await self._transport.call(ReleaseWorlds(worlds, owner, self._universe))

    async def policy(self) -> SendPolicy:
        """Which sends between universes this universe allows; by default none."""
        return await self._transport.call(GetSendPolicy(self._universe))

    async def set_policy(
        self, *, sends_to: Sequence[str] | None = None, accepts_from: Sequence[str] | None = None
    ) -> SendPolicy:
        """Allow worlds to send events to worlds of other universes. Both universes must allow it.

        Args:
            sends_to: the universes to which worlds of this one may send; `*` is all of them. None keeps the list.
            accepts_from: the universes whose worlds may send to this one; `*` is all of them. None keeps the list.

        Returns:
            The policy from now on.
        """
        request = SetSendPolicy(
            None if sends_to is None else list(checked_items(sends_to, "wrap it in a list")),
            None if accepts_from is None else list(checked_items(accepts_from, "wrap it in a list")),
            self._universe,
        )
        return await self._transport.call(request)
