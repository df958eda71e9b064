"""What every request has in common."""

from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec

from holdfast.tiers import Tier

Answer = TypeVar("Answer")


class Request(
    msgspec.Struct,
    Generic[Answer],
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="op",
    kw_only=True,
):
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


def answer_type(request: type[Request[Any]]) -> Any:
    """The type of the answer to a type of request."""
    return _ANSWERS.get(request) or _ANSWERS.setdefault(request, _declared(request))


_ANSWERS: dict[type[Request[Any]], Any] = {}


def _declared(request: type[Request[Any]]) -> Any:
    for base in getattr(request, "__orig_bases__", ()):
        if get_origin(base) is Request:
            return get_args(base)[0]
    raise TypeError(f"{request.__name__} does not say what answers it; write Request[Answer]")
