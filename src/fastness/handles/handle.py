"""What handles have in common."""

from fastness.wire import AsyncTransport


class AsyncHandle:
    """A handle of something in a universe, which calls the plane."""

    def __init__(self, transport: AsyncTransport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
