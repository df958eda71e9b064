"""All endpoints of a server: those that request classes declare, and those that need HTTP-specific handling."""

from types import ModuleType
from typing import Final

from fastness.server.http import (  # noqa: F401 (`ENDPOINTS` has theirs)
    backups,
    blobs,
    calls,
    entities,
    json_codec,
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
# In the order of the endpoints.
TAGS: Final = {
    "calls": "Any request, and atomic lists of operations.",
    "messages": "Work queues: messages are leased and fenced, and delivered at least once. Requests may also say "
    + ", ".join(f"`{alias}` for `{name}`" for alias, name in json_codec.ALIASES.items())
    + "; answers never do.",
    "queues": "Queue administration.",
    "mail": "Mail between agents, stored until it is delivered.",
    "ingress": "Pushes: data for agents, accepted in memory, and stored as mail.",
    "agents": "Registered agents and their keys.",
    "leases": "Exclusive ownership of keys for a limited time, with fences.",
    "locks": "Ordered locks of the database, entity types and records, held by sessions.",
    "states": "One document per key, guarded by leases and ETags.",
    "entities": "Records whose fields have durability tiers.",
    "collections": "Rows in the order of their keys, in partitions, changed by commits of several rows.",
    "worlds": "Event-sourced agents: journals, inboxes, snapshots.",
    "hosting": "Worlds that have a program: claimed by hosts, and run turn by turn.",
    "runs": "Runs of workflows: started once, signalled, cancelled and awaited.",
    "effects": "External calls that worlds ask for: claimed, carried out, and completed with a receipt.",
    "timers": "Times at which worlds want an item in their inbox.",
    "universes": "Tenants, each with a key space of its own.",
    "activity": "Session logs.",
    "blobs": "Content-addressed binary objects.",
    "space": "What is kept, and the deletion of what nothing needs.",
    "planes": "The version and identity of the plane.",
    "nodes": "The processes that share the plane.",
    "backups": "Backups and health checks.",
    "tokens": "The token of the caller.",
    "audit": "Who did what, when and from where.",
}
ENDPOINTS: Final[tuple[Endpoint, ...]] = tuple(
    sorted(
        (
            *_DECLARED,
            *(
                endpoint
                for module in list(vars().values())
                if isinstance(module, ModuleType)
                for endpoint in getattr(module, "ENDPOINTS", ())
            ),
        ),
        key=lambda endpoint: list(TAGS).index(endpoint.tag),
    )
)
