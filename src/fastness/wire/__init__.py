"""Requests and answers: every operation as a struct, and the transports that carry them. No I/O."""

from fastness.wire.requests import Request
from fastness.wire.transport import AsyncTransport, Transport

__all__ = ["AsyncTransport", "Transport", "Request"]
