"""Quotas: how much each universe may hold and do."""

from fastness.handles.handle import AsyncHandle
from fastness.wire.quotas import GetQuota, GetUsage, Quota, SetQuota, Usage


class AsyncQuotas(AsyncHandle):
    """Limits universes, and shows what they hold. A call without a universe is for that of the plane."""

    async def set(self, universe: str, quota: Quota) -> Quota:
        """Limit what a universe may hold and do. It replaces the earlier quota.

        A universe may hold more than its new quota. Then more is refused until it holds less.

        Raises:
            InvalidArgument: a limit is out of range.
            NotAllowed: the caller's token is not for all universes.
        """
        return await self._transport.call(SetQuota(universe, quota))

    async def get(self, universe: str | None = None) -> Quota:
        """The quota of a universe; an empty one if it has none."""
        return await self._transport.call(GetQuota(universe or self._universe))

    async def clear(self, universe: str) -> None:
        """Remove the quota of a universe. Does nothing if it has none."""
        await self._transport.call(SetQuota(universe))

    async def usage(self, universe: str | None = None) -> Usage:
        """What a universe holds and does, with its quota.

        It is measured first, unless that would cost too much: a measurement is repeated after twenty times the time
        that it took. `measured_ms` and `bytes_measured_ms` say when it was.
        """
        return await self._transport.call(GetUsage(universe or self._universe))
