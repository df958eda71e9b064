"""The plane: where every other handle comes from."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.handles.blobs import AsyncBlobs
from holdfast.handles.pairs import AsyncPairs
from holdfast.handles.worlds import AsyncWorld
from holdfast.names import UNIVERSE, checked_name
from holdfast.tiers import Tier
from holdfast.wire import AsyncPort
from holdfast.wire.worlds import ListWorlds

Result = TypeVar("Result")


class AsyncPlane:
    """An open plane. Close it, or use it as a context manager."""

    def __init__(self, port: AsyncPort, universe: str = UNIVERSE) -> None:
        self._port = port
        self.universe = checked_name("universe", universe)
        self.pairs = AsyncPairs(port)
        self.blobs = AsyncBlobs(port, self.universe)

    def world(self, name: str) -> AsyncWorld:
        """The world of that name; `create` it before its first use."""
        return AsyncWorld(self._port, self.universe, name)

    async def worlds(self, *, after: str = "", limit: int = 100) -> list[str]:
        """At most `limit` names of worlds, in order, the first one behind `after`."""
        return (await self._port.call(ListWorlds(after, limit, self.universe))).names

    async def transact(
        self, work: Callable[..., Result], /, *args: Any, tier: Tier = Tier.CRITICAL, **kwargs: Any
    ) -> Result:
        """Run `work(tx, *args, **kwargs)` as one commit across all layers and return its result.

        `work` is a plain function that touches nothing but `tx`. It may run more than once, and on another thread.
        If it raises, nothing was written.

        Raises:
            NotEmbedded: the plane is in another process; use `atomic` there.
            NestedTransaction: called from inside a transaction of this plane.
        """
        return await self._port.transact(work, *args, tier=tier, **kwargs)

    async def close(self) -> None:
        """Make everything durable and let go of it. Closing twice is fine."""
        await self._port.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
