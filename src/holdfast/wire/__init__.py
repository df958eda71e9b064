"""Speech: every operation as a request struct, its answer, and the port that carries them. No I/O here."""

from holdfast.wire.port import AsyncPort, Port
from holdfast.wire.requests import Request

__all__ = ["AsyncPort", "Port", "Request"]
