"""Generated from handles/handle.py by tools/make_twins.py; change that file instead."""

from fastness.wire import Transport


class Handle:
    """A handle of something in a universe, which calls the plane."""

    def __init__(self, transport: Transport, universe: str) -> None:
        self._transport = transport
        self._universe = universe
