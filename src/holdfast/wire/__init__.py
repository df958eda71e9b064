"""Speech: every operation as a request struct, its answer, and the port that carries them. No I/O here."""

from holdfast.wire.requests import Request
from holdfast.wire.transport import AsyncTransport, Transport

__all__ = ["AsyncTransport", "Transport", "Request"]
