"""Permissions: which verbs and universes a token allows, and which ones a request needs.

queue:put    one operation: the noun and the verb of a request
queue:*      every operation of a noun
*            everything

A token may be limited to queues: names such as `orders`, or prefixes such as `orders-*`. None of them means all queues.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, get_args

import msgspec

from fastness.errors import InvalidArgument
from fastness.limits import TOKEN_QUEUES_MAX
from fastness.names import checked_name
from fastness.wire.catalog import PERMISSIONS

EVERYTHING: Final = "*"  # Every verb, or every universe.
METRICS: Final = "metrics:read"  # The verb of the metrics endpoint, which is no request of a plane.
# What all actions of the SQS endpoint need. Large bodies are blobs.
SQS_VERBS: Final = ("blob:find", "blob:get", "blob:put", "queue:*", "sqs:*")
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


def covers_queue(allowed: Collection[str], queue: str) -> bool:
    """Whether a queue, or a pattern of queues, is among those that are allowed; none allowed: all of them are."""
    return not allowed or any(_matches(pattern, queue) for pattern in allowed)


def covers_queues(allowed: Collection[str], queues: Collection[str]) -> bool:
    """Whether every one of these queues and patterns is among those that are allowed; none: all queues."""
    return not allowed or (bool(queues) and all(covers_queue(allowed, queue) for queue in queues))


def checked_queues(queues: Iterable[str]) -> list[str]:
    """The names and patterns in order, without those that others cover; none if they are all queues.

    Raises:
        InvalidArgument: there are too many.
        InvalidName: one of them is neither a name nor the beginning of one with a star.
    """
    wanted = set(queues)
    if EVERYTHING in wanted:
        return []
    if len(wanted) > TOKEN_QUEUES_MAX:
        raise InvalidArgument(
            f"A token is for {TOKEN_QUEUES_MAX} queues at most, not {len(wanted)}; give patterns, such as orders-*"
        )
    for queue in wanted:
        checked_name("queue", queue.removesuffix(EVERYTHING))
    return sorted(queue for queue in wanted if not any(_matches(other, queue) for other in wanted - {queue}))


def _matches(pattern: str, queue: str) -> bool:
    # A pattern matches longer ones, too: `orders-*` has all queues of `orders-eu-*`. No name has a star in it.
    return queue == pattern or (pattern.endswith(EVERYTHING) and queue.startswith(pattern[:-1]))


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
    """Every universe that a request names: its own, and those of its leases and of its steps; none: all of them."""
    kind: Any = type(request)
    for name, search in _universe_fields(kind):
        value = getattr(request, name)
        if search is not None:
            yield from search(value)
        elif value is not None:  # None: the plane itself, which is every universe.
            yield value


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
