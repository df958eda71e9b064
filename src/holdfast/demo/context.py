"""What the chapters of one night share."""

import msgspec

from holdfast.demo.output import Output
from holdfast.demo.processes import Processes, Server
from holdfast.handles import Plane


class DemoContext(msgspec.Struct):
    """A server with a plane, who works on it, and what later chapters must know of earlier ones."""

    stage: Output
    cast: Processes
    server: Server
    plane: Plane  # Goes on by itself when the server comes back.
    orphan: str = ""  # The message whose desk was killed.
    poison: str = ""  # The message that nobody could read.
