"""Generated from handles/quotas.py by tools/make_twins.py; change that file instead."""

from fastness.handles.sync.handle import Handle
from fastness.wire.quotas import GetQuota, GetUsage, Quota, SetQuota, Usage


class Quotas(Handle):
    """Limits universes, and shows what they hold. A call without a universe is for that of the plane."""

    def set(self, universe: str, quota: Quota) -> Quota:
        """Limit what a universe may hold and do. It replaces the earlier quota.

        A universe may hold more than its new quota. Then more is refused until it holds less.

        Raises:
            InvalidArgument: a limit is out of range.
            NotAllowed: the caller's token is not for all universes.
        """
        return self._transport.call(SetQuota(universe, quota))

    def get(self, universe: str | None = None) -> Quota:
        """The quota of a universe; an empty one if it has none."""
        return self._transport.call(GetQuota(universe or self._universe))

    def clear(self, universe: str) -> None:
        """Remove the quota of a universe. Does nothing if it has none."""
        self._transport.call(SetQuota(universe))

    def usage(self, universe: str | None = None) -> Usage:
        """What a universe holds and does, with its quota.

        It is measured first, unless that would cost too much: a measurement is repeated after twenty times the time
        that it took. `measured_ms` and `bytes_measured_ms` say when it was.
        """
        return self._transport.call(GetUsage(universe or self._universe))
