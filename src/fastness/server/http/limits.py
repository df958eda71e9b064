"""Limits of the HTTP API. `fastness.limits` has those of the plane."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

META_BYTES_MAX: Final = 65_536  # The `meta` part of an enqueue: attributes and options, never bodies.
PART_HEADERS_MAX: Final = 8  # Of one part of a multipart body.
PART_HEADER_BYTES_MAX: Final = 4_096
PAGE_SIZE_MAX: Final = 64  # Messages of one dequeue.
PageSize = Annotated[int, Meta(ge=1, le=PAGE_SIZE_MAX)]
CREDIT: Final = 16  # Default number of unsettled messages of a subscription.
IDEMPOTENCY_KEY_CHARACTERS_MAX: Final = 255
PIPELINED_MAX: Final = 128  # Requests queued behind an unfinished one; one read may bring thousands.
DRAIN_POLL_SECONDS: Final = 0.1  # How often waiting requests check whether the server is shutting down.
LINGER_SECONDS: Final = 1.0  # How long the rest of an oversized body is read, so that its sender gets the response.


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on HTTP requests and responses of one server."""

    body_bytes_max: int = 8_388_608  # A body that is held in memory: 256 messages of 16 KiB in base64, with a margin.
    stream_bytes_max: int = 5_368_709_120  # A body that is streamed to the object store; S3 copies up to this at once.
    body_seconds_max: float = 30.0  # For a whole body that is held in memory.
    pause_seconds_max: float = 15.0  # Between two chunks of a streamed body.
    stream_bytes_per_second_min: int = 1_024  # After that pause; slower senders could hold a connection for years.
    wait_seconds_max: float = 20.0  # Proxies abandon responses that take much longer.
    subscribe_seconds_max: float = 3_600.0  # Then the client reconnects, perhaps to another server.
    heartbeat_seconds: float = 15.0  # Proxies close connections that are idle for a minute.
    watch_seconds: float = 0.5  # How often a watch polls the stats of its queue.
    watches_max: int = 256
