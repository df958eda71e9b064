"""Space: deletes what nothing names any more, and shows what is kept and why."""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.wire.requests import Operation, Request, Route


class Collected(msgspec.Struct, frozen=True):
    """What a collection deleted, or with `dry_run` would delete now."""

    dry_run: bool
    deleted: int  # Blobs that nothing names, whose grace period is over.
    deleted_bytes: int
    freed: int  # Bodies that left the object store, a grace period after their blobs were deleted.
    waiting: int  # Blobs that nothing names, in their grace period.
    waiting_bytes: int
    kept: int  # Blobs that are pinned or named.
    kept_bytes: int
    unsearched: list[str] = []  # What could not be read. It might name any blob, so none was deleted.


class SpaceUse(msgspec.Struct, frozen=True):
    """How much one kind of data takes, and why it is kept."""

    universe: str  # Empty: data outside of all universes.
    kind: str
    reason: str
    count: int
    bytes: int
    until: str = ""  # Until when it is kept, in words.
    next_ms: int | None = None  # When the first of these is deleted by the next collection. None: no time is set.


class LastCollection(msgspec.Struct, frozen=True):
    """The collections of one process since it started. A server starts one every `gc_every_seconds`."""

    succeeded_ms: int | None = None  # The end of the last one that succeeded. None: there was none yet.
    result: Collected | None = None  # What it deleted. None: nothing was due, so it searched nothing.
    error: str | None = None  # Why the last one failed. None: it succeeded.
    failures: int = 0


class StandbyStatus(msgspec.Struct, frozen=True):
    """How far the standby that serves stale reads has replayed the primary's log, as of a recent read."""

    answers: bool  # False: no standby answered, and the primary serves the reads.
    position: str = ""  # The log position of PostgreSQL.
    lag_ms: int | None = None  # None: not known.
    measured_ms: int = 0  # When; 0: not yet.


class StorageStatus(msgspec.Struct, frozen=True):
    """Whether the key space works, how full its disk is, and how the last collection went."""

    failure: str | None = None  # Why the key space has failed: writes are refused. None: it works.
    disk_low: bool = False  # Only the reserve is left: new data is refused.
    refuses_writes: bool = False  # Too little is left for any write, until merges have freed some. Reads work.
    disk_free_bytes: int | None = None  # None: not in a local directory, or no reserve is kept.
    disk_reserve_bytes: int | None = None
    collection: LastCollection = LastCollection()
    standby: StandbyStatus | None = None  # None: all reads come from the primary.


class SpaceReport(msgspec.Struct, frozen=True):
    """What is kept, and why."""

    uses: list[SpaceUse]
    unsearched: list[str] = []  # What could not be read, so that no blob can be deleted.
    status: StorageStatus = StorageStatus()
    measured_ms: int = 0  # When the key space was read.


class CollectGarbage(Request[Collected], frozen=True, tag="space.collect"):
    """Delete blobs that nothing names any more, after their grace period."""

    operation = Operation(
        audited=True,
        repeatable="what is deleted stays deleted; only the answer differs",
        permission="space:collect",
        http=(Route("POST", "/v1/space/collect", "Delete blobs that nothing names any more."),),
    )

    dry_run: bool = False
    grace_seconds: Annotated[float, Meta(ge=0, le=limits.GC_GRACE_SECONDS_MAX)] | None = (
        None  # None: the setting of the plane.
    )


class ShowSpace(Request[SpaceReport], frozen=True, tag="space.show"):
    """What is kept, and why."""

    operation = Operation(
        reads=True, permission="space:show", http=(Route("GET", "/v1/space", "Show what is kept, and why."),)
    )


class ShowStorage(Request[StorageStatus], frozen=True, tag="space.status"):
    """Whether the key space works, how full its disk is, and how the last collection went. Reads no stored data."""

    operation = Operation(
        reads=True,
        permission="space:status",
        http=(Route("GET", "/v1/space/status", "Show whether the key space works, and how full its disk is."),),
    )
