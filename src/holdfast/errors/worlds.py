"""Worlds and blobs."""

from holdfast.errors.families import Conflict, Corrupt, NotFound


class BlobNotFound(NotFound):
    """Nobody has stored a blob of that hash."""

    code = "blob_not_found"


class HashMismatch(Corrupt):
    """A blob's bytes do not have the hash that names it."""

    code = "hash_mismatch"


class SizeMismatch(Corrupt):
    """A blob's body has another size than was recorded."""

    code = "size_mismatch"


class WorldNotFound(NotFound):
    """Nobody has created a world of that name."""

    code = "world_not_found"


class SnapshotNotFound(NotFound):
    """The world has no snapshot at that height."""

    code = "snapshot_not_found"


class WorldExists(Conflict):
    """A world of that name was created before."""

    code = "world_exists"


class WorldNotActive(Conflict):
    """The world is paused, archived or deleted, and takes nothing."""

    code = "world_not_active"


class HeadAdvanced(Conflict):
    """Somebody appended first: the journal's head is not where the caller expected it."""

    code = "head_advanced"

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"The journal's head is {actual}, not {expected}; read from {expected} on, then append again")
        self.expected = expected
        self.actual = actual


class CursorAdvanced(Conflict):
    """Somebody drained first: the inbox's cursor is not where the caller expected it."""

    code = "cursor_advanced"

    def __init__(self, expected: int | None, actual: int | None) -> None:
        super().__init__(f"The inbox's cursor is {actual}, not {expected}; read from there on, then commit it again")
        self.expected = expected
        self.actual = actual


class SnapshotExists(Conflict):
    """Another snapshot is indexed at that height, and snapshots never change."""

    code = "snapshot_exists"


class BaselineRegressed(Conflict):
    """The baseline only moves forward."""

    code = "baseline_regressed"


class PromotionRefused(Conflict):
    """A snapshot does not qualify as a baseline; the message says which condition it fails."""

    code = "promotion_refused"


class SegmentExists(Conflict):
    """Another segment covers these heights, and segments never change."""

    code = "segment_exists"


class MissingEntry(Corrupt):
    """The journal has a hole below its head."""

    code = "missing_entry"


class ChecksumMismatch(Corrupt):
    """A segment's bytes do not have the checksum that was recorded."""

    code = "checksum_mismatch"


class MalformedSegment(Corrupt):
    """A segment's bytes do not hold the records that were recorded."""

    code = "malformed_segment"
