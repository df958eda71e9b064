"""Bounds of the HTTP door. `holdfast.limits` has those of the plane behind it."""

from typing import Final

import msgspec

META_BYTES_MAX: Final = 65_536  # The `meta` part of an enqueue: attributes and options, never bodies.
PART_HEADERS_MAX: Final = 8  # Of one part of a multipart body.
PART_HEADER_BYTES_MAX: Final = 4_096
PAGE_SIZE_MAX: Final = 64  # Messages of one dequeue.
CREDIT: Final = 16  # Unsettled messages of a subscription that names no other number.
IDEMPOTENCY_KEY_CHARACTERS_MAX: Final = 255
PIPELINED_MAX: Final = 128  # Requests that wait behind another one; a read may bring thousands, some kilobytes each.
DRAIN_LOOK_SECONDS: Final = 0.1  # How soon those who wait hear that the server is about to stop.
LINGER_SECONDS: Final = 1.0  # How long the rest of a body that is too large is read, so that its sender hears why.


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server lets its callers do."""

    body_bytes_max: int = 8_388_608  # A body that is held in memory: 256 messages of 16 KiB, in base64, with room.
    stream_bytes_max: int = 5_368_709_120  # A body that is streamed to the object store; S3 copies up to this at once.
    body_seconds_max: float = 30.0  # For all of a body that is held in memory.
    pause_seconds_max: float = 15.0  # Between two pieces of a body that is streamed.
    stream_bytes_per_second_min: int = 1_024  # Beyond that pause; whoever is slower may hold a connection for years.
    wait_seconds_max: float = 20.0  # Proxies in between give up on answers that take much longer.
    subscribe_seconds_max: float = 3_600.0  # Then the client connects again, perhaps to another server.
    heartbeat_seconds: float = 15.0  # Proxies in between close connections that are silent for a minute.
    watch_seconds: float = 0.5  # How often a watch looks at the stats of its queue.
    watches_max: int = 256
