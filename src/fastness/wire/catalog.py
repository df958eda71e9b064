"""Every request that Fastness has, found by importing the modules that define them."""

from types import ModuleType
from typing import Any, Final

from fastness.wire import (  # noqa: F401 (`REQUESTS` reads their names)
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
    health_checks,
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
    universes,
    worlds,
)
from fastness.wire.requests import Request, permission_of

REQUESTS: Final[tuple[type[Request[Any]], ...]] = tuple(
    kind
    for module in list(vars().values())
    if isinstance(module, ModuleType)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Request) and kind.__module__ == module.__name__
)
NETWORK_REQUESTS: Final = tuple(kind for kind in REQUESTS if kind.operation.network)
PERMISSIONS: Final = frozenset(permission_of(kind) for kind in REQUESTS)
