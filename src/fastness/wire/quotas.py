"""Quotas: how much one universe may hold and do, and how much it does."""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.wire.fields import Name
from fastness.wire.requests import Operation, Request, Route

_Count = Annotated[int, Meta(ge=0, le=limits.QUOTA_COUNT_MAX)]


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limits of a universe. None is no limit.

    What is over a limit is refused with QuotaExceeded. Reads, acks and deletions are never refused for `messages` and
    `bytes`, so a full universe can be drained.
    """

    messages: Annotated[
        _Count | None,
        Meta(description="The maximum number of messages in all queues, with leased ones and dead letters."),
    ] = None
    bytes: Annotated[
        _Count | None,
        Meta(description="The maximum size of all keys, values and blobs; a command takes 500MiB or 10GiB."),
    ] = None
    connections: Annotated[
        _Count | None,
        Meta(
            description="The maximum number of connections to each server: of agents, and of tokens for this universe "
            "only."
        ),
    ] = None
    rate_per_second: Annotated[
        Annotated[float, Meta(ge=limits.QUOTA_RATE_MIN, le=limits.QUOTA_RATE_MAX)] | None,
        Meta(description="The maximum calls per second to each server."),
    ] = None

    @property
    def is_empty(self) -> bool:
        """Whether it limits nothing."""
        return self == Quota()


class Usage(msgspec.Struct, frozen=True):
    """What a universe holds and does, as the answering process counts it.

    `messages` and `bytes` are never below what is stored. What was acked or deleted since `measured_ms` may still be
    in them.
    """

    quota: Quota
    messages: int
    bytes: int | None  # None: the first measurement since the process started has not ended.
    connections: int  # To the answering server.
    calls_per_second: float  # To the answering server, over the last seconds. Counted while the universe has a quota.
    measured_ms: int  # When the messages were last counted.
    bytes_measured_ms: int = 0  # When the bytes were last measured; 0: not yet.


class SetQuota(Request[Quota], frozen=True, tag="universes.quota.set"):
    """Limit what a universe may hold and do. It replaces the earlier quota; an empty one removes it.

    A universe may hold more than its new quota. Then it is refused more until it holds less.
    """

    operation = Operation(
        repeatable="setting the same quota again changes nothing",
        all_universes=True,
        audited=True,
        http=(
            Route(
                "PUT",
                "/v1/universes/{universe}/quota",
                "Set the quota of a universe.",
                body_field="quota",
            ),
            Route(
                "DELETE",
                "/v1/universes/{universe}/quota",
                "Remove the quota of a universe.",
                fixed={"quota": {}},
            ),
        ),
    )

    universe: Name
    quota: Quota = Quota()


class GetQuota(Request[Quota], frozen=True, tag="universes.quota.get"):
    """The quota of a universe; an empty one if it has none."""

    operation = Operation(
        reads=True,
        permission="universe:usage",
        http=(Route("GET", "/v1/universes/{universe}/quota", "Return the quota of a universe."),),
    )

    universe: Name


class GetUsage(Request[Usage], frozen=True, tag="universes.usage"):
    """What a universe holds and does, with its quota."""

    operation = Operation(
        reads=True,
        http=(Route("GET", "/v1/universes/{universe}/usage", "Show what a universe holds, and its quota."),),
    )

    universe: Name
