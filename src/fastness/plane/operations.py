"""The operations of a plane. Importing this module registers the handler of every request.

handle, HTTP endpoint, stream frame, CLI ──► request ──► its handler ──► answer
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
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
from fastness.wire.type_checks import check_types

OPERATIONS: Final[Mapping[type[Request[Any]], Handler]] = MappingProxyType(HANDLERS)


def handler_of(request: Request[Answer]) -> Handler:
    """The handler of a request.

    Raises:
        InvalidArgument: it is not a request, or not one of this plane.
    """
    handler = HANDLERS.get(type(request))
    if handler is None:
        raise InvalidArgument(f"{type(request).__name__} is not a request of this plane; send one of fastness.wire")
    if type(request) in BEST_EFFORT_READS and request.best_effort:  # type: ignore[attr-defined]
        return BEST_EFFORT_READS[type(request)]
    return handler


def execute(tx: Transaction, request: Request[Answer]) -> Answer:
    """Execute `request` inside a transaction that the caller commits.

    Raises:
        InvalidArgument: it needs more than one transaction.
    """
    run = handler_of(request).run
    check_types(request)
    if run is None:
        raise InvalidArgument(f"{type(request).__name__} takes more than one commit; send it by itself")
    answer: Answer = run(tx, request)
    return answer
