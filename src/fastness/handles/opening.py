"""The result of `open_async` and `connect_async`: await it, or enter it with `async with`."""

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any

from fastness.handles.plane import AsyncPlane


class Opening:
    """A plane that is opened by `await` or `async with`."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncPlane]) -> None:
        self._opening = opening
        self._plane: AsyncPlane | None = None

    def __await__(self) -> Generator[Any, Any, AsyncPlane]:
        return self._opening.__await__()

    async def __aenter__(self) -> AsyncPlane:
        self._plane = await self._opening
        return self._plane

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._plane is not None:
            await self._plane.close()
