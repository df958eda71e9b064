"""All endpoints of a server: those that request classes declare, and those that need HTTP-specific handling."""

from typing import Final

from fastness.server.http import (
    backups,
    blobs,
    calls,
    entities,
    json_rpc,
    leases,
    messages,
    pushes,
    queues,
    settlements,
    states,
    stats,
    subscriptions,
)
from fastness.server.http.endpoints import Endpoint, operation
from fastness.wire.catalog import REQUESTS

# Declared endpoints come first: their fixed paths take precedence over those that end in a path parameter.
_DECLARED: Final = tuple(
    operation(
        route.method,
        route.path,
        kind,
        route.summary,
        tag=str(kind.__struct_config__.tag).partition(".")[0],
        fixed=route.fixed,
        defaults=route.defaults,
        status=route.status,
        body_field=route.body_field,
        wrapper=route.wrapper,
        read_only=route.read_only,
    )
    for kind in REQUESTS
    for route in kind.operation.http
)
_TAGS: Final = (
    "calls",
    "messages",
    "queues",
    "leases",
    "locks",
    "states",
    "entities",
    "collections",
    "worlds",
    "hosting",
    "runs",
    "effects",
    "timers",
    "universes",
    "mail",
    "ingress",
    "agents",
    "activity",
    "blobs",
    "space",
    "planes",
    "nodes",
    "backups",
    "tokens",
    "audit",
)

ENDPOINTS: Final[tuple[Endpoint, ...]] = tuple(
    sorted(
        (
            *_DECLARED,
            *calls.ENDPOINTS,
            *messages.ENDPOINTS,
            *settlements.ENDPOINTS,
            *subscriptions.ENDPOINTS,
            *stats.ENDPOINTS,
            *queues.ENDPOINTS,
            *leases.ENDPOINTS,
            *states.ENDPOINTS,
            *entities.ENDPOINTS,
            *json_rpc.ENDPOINTS,
            *pushes.ENDPOINTS,
            *blobs.ENDPOINTS,
            *backups.ENDPOINTS,
        ),
        key=lambda endpoint: _TAGS.index(endpoint.tag) if endpoint.tag in _TAGS else len(_TAGS),
    )
)
