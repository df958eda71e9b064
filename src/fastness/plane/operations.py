"""The operations of a plane. Importing this module registers the handler of every request.

handle, HTTP endpoint, stream frame, CLI ──► request ──► its handler ──► answer
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from fastness.errors import InvalidArgument
from fastness.plane import (  # noqa: F401 (each registers its handlers)
    activity,
    agents,
    atomic,
    audit,
    backups,
    blobs,
    collections,
    effects,
    encryption,
    entities,
    hosting,
    ingress,
    leases,
    locks,
    mail,
    nodes,
    pairs,
    planes,
    queues,
    quotas,
    runs,
    space,
    sqs,
    states,
    timers,
    tokens,
    worlds,
)
from fastness.plane.handlers import BEST_EFFORT_READS, HANDLERS, Handler
from fastness.wire.requests import Answer, Request

OPERATIONS: Final[Mapping[type[Request[Any]], Handler]] = MappingProxyType(HANDLERS)


def handler_of(request: Request[Answer]) -> Handler:
    """The handler of a request.

    Raises:
        InvalidArgument: it is not a request, or not one of this plane.
    """
    kind = request.__class__
    handler = HANDLERS.get(kind)
    if handler is None:
        raise InvalidArgument(f"{kind.__name__} is not a request of this plane; send one of fastness.wire")
    if kind in BEST_EFFORT_READS and request.best_effort:  # type: ignore[attr-defined]
        return BEST_EFFORT_READS[kind]
    return handler
