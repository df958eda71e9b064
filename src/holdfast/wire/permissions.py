"""Permissions: which verbs and universes a token allows, and which ones a request needs.

queue:put    one operation: the noun and the verb of a request
queue:*      every operation of a noun
*            everything
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, get_args

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.names import checked_name
from holdfast.wire.catalog import PERMISSIONS

EVERYTHING: Final = "*"  # Every verb, or every universe.
METRICS: Final = "metrics:read"  # The verb of the metrics endpoint, which is no request of a plane.
TOKEN_UNIVERSES_MAX: Final = 64  # They are checked with every call.


def known_verbs() -> list[str]:
    """Every verb that a token can allow, with the patterns."""
    verbs = PERMISSIONS | {METRICS}
    return sorted(verbs | {f"{verb.partition(':')[0]}:*" for verb in verbs} | {EVERYTHING})


def covers(allowed: Collection[str], verb: str) -> bool:
    """Whether a verb, or a pattern of verbs, is among those that are allowed."""
    return EVERYTHING in allowed or verb in allowed or f"{verb.partition(':')[0]}:*" in allowed


def covers_universes(allowed: Collection[str], universes: Collection[str]) -> bool:
    """Whether every one of these universes, or "*", is among those that are allowed."""
    return EVERYTHING in allowed or (bool(universes) and set(universes) <= set(allowed))


def checked_verbs(verbs: Iterable[str]) -> list[str]:
    """The verbs in order, each once.

    Raises:
        InvalidArgument: there is none, or one of them is unknown.
    """
    known, wanted = known_verbs(), sorted({verb.strip().lower() for verb in verbs})
    for verb in wanted:
        if verb not in known:
            near = get_close_matches(verb, known, n=1, cutoff=0.3) or ["queue:put, queue:* or *"]
            raise InvalidArgument(f"Unknown verb {verb!r}; did you mean {near[0]}?")
    if not wanted:
        raise InvalidArgument("A token needs at least one verb; give verbs, as in queue:put,queue:receive, or *")
    return wanted


def checked_universes(universes: Iterable[str]) -> list[str]:
    """The universes in order, each once; ["*"] if they are all.

    Raises:
        InvalidArgument: there is none, or too many.
        InvalidName: one of them is not a valid name.
    """
    wanted = set(universes)
    if EVERYTHING in wanted:
        return [EVERYTHING]
    if not 0 < len(wanted) <= TOKEN_UNIVERSES_MAX:
        raise InvalidArgument(f"A token is for 1 to {TOKEN_UNIVERSES_MAX} universes, or for all of them: *")
    return sorted({checked_name("universe", universe) for universe in wanted})


def universes_of(request: Any) -> Iterator[str]:
    """Every universe that a request names: its own, and those of its leases and of its steps."""
    kind: Any = type(request)
    for name, search in _universe_fields(kind):
        value = getattr(request, name)
        if search is None:
            yield value
        else:
            yield from search(value)


@cache
def _universe_fields(kind: type[Any]) -> tuple[tuple[str, Callable[[Any], Iterator[str]] | None], ...]:
    """The fields of a struct that name universes, and for those that hold structs the function that searches them."""
    fields: list[tuple[str, Callable[[Any], Iterator[str]] | None]] = []
    for field in msgspec.structs.fields(kind):
        if field.name == "universe":
            fields.append((field.name, None))
        elif any(_universe_fields(struct) for struct in _structs_in(field.type)):
            fields.append((field.name, _nested))
    return tuple(fields)


def _nested(value: Any) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        yield from universes_of(value)
    elif isinstance(value, dict):
        yield from _nested(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _nested(each)


def _structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type annotation names."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in get_args(kind):
        yield from _structs_in(part)
