"""The families of errors, and what a caller may do after each."""

from enum import StrEnum
from typing import ClassVar


class Retry(StrEnum):
    """What a caller may do after an error."""

    NEVER = "never"  # The same request will fail again; change it.
    REFRESH = "refresh"  # Read the current state, then decide.
    LATER = "later"  # The same request may succeed after a pause.
    IDEMPOTENT = "idempotent"  # It may have happened; repeat it only with an idempotency key or after a look.


class HoldfastError(Exception):
    """The root of everything that Holdfast raises on purpose."""

    code: ClassVar[str] = "error"
    retry: ClassVar[Retry] = Retry.NEVER


class Validation(HoldfastError):
    """The request is wrong; nothing was written."""

    code = "validation"


class NotAllowed(HoldfastError):
    """The token does not allow this; nothing was done. Ask for one that does."""

    code = "not_allowed"


class NotFound(HoldfastError):
    """What was named is not there."""

    code = "not_found"


class Conflict(HoldfastError):
    """Somebody else was first; read the current state, then decide."""

    code = "conflict"
    retry = Retry.REFRESH


class Busy(HoldfastError):
    """A bound was reached and nothing was written; the same request may succeed later."""

    code = "busy"
    retry = Retry.LATER


class Closed(HoldfastError):
    """The handle was closed; open it again."""

    code = "closed"


class Corrupt(HoldfastError):
    """What is stored is damaged. Restore it from a backup; Holdfast never heals damage in silence."""

    code = "corrupt"


class Backend(HoldfastError):
    """What lies below Holdfast failed."""

    code = "backend"
    retry = Retry.LATER
