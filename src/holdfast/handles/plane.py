"""The plane: where every other handle comes from."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.handles.blobs import AsyncBlobs
from holdfast.handles.pairs import AsyncPairs
from holdfast.names import UNIVERSE, checked_name
from holdfast.tiers import Tier
from holdfast.wire import AsyncPort

Result = TypeVar("Result")


class AsyncPlane:
    """An open plane. Close it, or use it as a context manager."""

    def __init__(self, port: AsyncPort, universe: str = UNIVERSE) -> None:
        self._port = port
        self.universe = checked_name("universe", universe)
        self.pairs = AsyncPairs(port)
        self.blobs = AsyncBlobs(port, self.universe)

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
