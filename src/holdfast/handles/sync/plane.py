"""Generated from handles/plane.py by tools/make_twins.py; change that file instead."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.handles.sync.blobs import Blobs
from holdfast.handles.sync.pairs import Pairs
from holdfast.handles.sync.worlds import World
from holdfast.names import UNIVERSE, checked_name
from holdfast.tiers import Tier
from holdfast.wire import Port
from holdfast.wire.worlds import ListWorlds

Result = TypeVar("Result")


class Plane:
    """An open plane. Close it, or use it as a context manager."""

    def __init__(self, port: Port, universe: str = UNIVERSE) -> None:
        self._port = port
        self.universe = checked_name("universe", universe)
        self.pairs = Pairs(port)
        self.blobs = Blobs(port, self.universe)

    def world(self, name: str) -> World:
        """The world of that name; `create` it before its first use."""
        return World(self._port, self.universe, name)

    def worlds(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of worlds, in order, the first one behind `after`."""
        return (self._port.call(ListWorlds(after, limit, self.universe))).names

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)` as one commit across all layers and return its result.

        `work` is a plain function that touches nothing but `tx`. It may run more than once, and on another thread.
        If it raises, nothing was written.

        Raises:
            NotEmbedded: the plane is in another process; use `atomic` there.
            NestedTransaction: called from inside a transaction of this plane.
        """
        return self._port.transact(work, *args, tier=tier, **kwargs)

    def close(self) -> None:
        """Make everything durable and let go of it. Closing twice is fine."""
        self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
