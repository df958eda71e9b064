"""What every request has in common."""

from typing import Generic, TypeVar

import msgspec

from holdfast.tiers import Tier

Answer = TypeVar("Answer")


class Request(msgspec.Struct, Generic[Answer], frozen=True, forbid_unknown_fields=True, tag_field="op", kw_only=True):
    """An operation to carry out; `Request[Answer]` is answered by an `Answer`.

    `tier` is the promise that the caller waits for. A write returns when it holds for what was written, a read when
    it holds for what was seen.
    """

    tier: Tier = Tier.CRITICAL

    def check(self) -> None:
        """Raise what is wrong with a request beyond its types. A door calls this on what comes in from outside; a
        handle makes nothing that would fail it."""


class Committed(msgspec.Struct, frozen=True):
    """The answer to a write that has nothing else to tell: which promise it carries."""

    durability: Tier
