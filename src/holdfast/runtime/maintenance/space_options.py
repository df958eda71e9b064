"""How long data is kept that nothing needs any more."""

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.limits import GC_GRACE_SECONDS, GC_GRACE_SECONDS_MAX


class SpaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How long blobs and session logs are kept."""

    grace_seconds: float = GC_GRACE_SECONDS  # How long a blob that nothing names is kept.
    log_keep_seconds: float | None = None  # How long a rotated session log is kept; None: for ever.
    log_bytes_max: int | None = None  # Bytes of rotated session logs per universe; None: no limit.

    @property
    def grace_ms(self) -> int:
        return round(self.grace_seconds * 1_000)


def checked_grace_ms(seconds: float) -> int:
    """A grace period in milliseconds.

    Raises:
        InvalidArgument: it is negative or too long.
    """
    if not 0 <= seconds <= GC_GRACE_SECONDS_MAX:
        raise InvalidArgument(f"The grace period is {seconds} s; give 0 to {GC_GRACE_SECONDS_MAX} s")
    return round(seconds * 1_000)
