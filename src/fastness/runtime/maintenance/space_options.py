"""How long data is kept that nothing needs any more."""

import msgspec

from fastness.errors import InvalidArgument
from fastness.limits import AUDIT_KEEP_SECONDS, GC_GRACE_SECONDS, GC_GRACE_SECONDS_MAX


class SpaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How long data is kept that nothing needs any more. Limits of bytes are for each universe."""

    grace_seconds: float = GC_GRACE_SECONDS  # How long a blob that nothing names is kept.
    log_keep_seconds: float | None = None  # How long a rotated session log is kept; None: for ever.
    log_bytes_max: int | None = None  # Bytes of rotated session logs; None: no limit.
    archived_keep_seconds: float | None = None  # How long an archived world is kept; None: for ever.
    archived_bytes_max: int | None = None  # Bytes of the journals of archived worlds; None: no limit.
    dead_letter_bytes_max: int | None = None  # Bytes of dead letters; None: no limit.
    audit_keep_seconds: float | None = AUDIT_KEEP_SECONDS  # How long an entry of the audit log is kept; None: for ever.

    @property
    def grace_ms(self) -> int:
        return round(self.grace_seconds * 1_000)


def check_options(options: SpaceOptions) -> None:
    """Check the values of options.

    Raises:
        InvalidArgument: one is negative.
    """
    for name, value in msgspec.structs.asdict(options).items():
        if value is not None and not value >= 0:
            raise InvalidArgument(f"{name} is {value}; give a number from 0 on, or None")


def checked_grace_ms(seconds: float) -> int:
    """A grace period in milliseconds.

    Raises:
        InvalidArgument: it is negative or too long.
    """
    if not 0 <= seconds <= GC_GRACE_SECONDS_MAX:
        raise InvalidArgument(f"The grace period is {seconds:,g} s; give 0 to {GC_GRACE_SECONDS_MAX:,} s (a year)")
    return round(seconds * 1_000)
