"""How long a saver keeps checkpoints."""

from dataclasses import dataclass

from fastness.errors import InvalidArgument
from fastness.limits import LANGGRAPH_KEEP_CHECKPOINTS_MAX, LANGGRAPH_KEEP_DAYS_MAX


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What a saver deletes by itself, in the commit that stores a checkpoint, or when its time has come.

    What a delta channel is rebuilt from stays.

    Args:
        checkpoints: the newest checkpoints of each namespace of a thread that are kept; None: all.
        days: how long a checkpoint is kept, with its writes; None: for ever. Threads with delta channels are kept.
    """

    checkpoints: int | None = None
    days: float | None = None

    def __post_init__(self) -> None:
        if self.checkpoints is not None and not (
            self.checkpoints.__class__ is int and 1 <= self.checkpoints <= LANGGRAPH_KEEP_CHECKPOINTS_MAX
        ):
            raise InvalidArgument(
                f"checkpoints is {self.checkpoints!r}; keep 1 to {LANGGRAPH_KEEP_CHECKPOINTS_MAX}, or None for all"
            )
        if self.days is not None and not (
            self.days.__class__ in (int, float) and 0 < self.days <= LANGGRAPH_KEEP_DAYS_MAX
        ):
            raise InvalidArgument(
                f"days is {self.days!r}; give more than 0 and at most {LANGGRAPH_KEEP_DAYS_MAX}, or None for ever"
            )

    @property
    def ttl_seconds(self) -> float | None:
        """How long rows are kept."""
        return None if self.days is None else self.days * 86_400
