"""Requests and answers: every operation as a struct, and the transports that carry them. No I/O."""

from holdfast.wire.requests import Request
from holdfast.wire.transport import AsyncTransport, Transport

__all__ = ["AsyncTransport", "Transport", "Request"]
