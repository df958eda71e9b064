"""All endpoints of a server, in the order in which the router matches their paths."""

from typing import Final

from holdfast.server.http import (
    activity,
    backups,
    blobs,
    calls,
    entities,
    json_rpc,
    leases,
    mail,
    messages,
    queues,
    states,
    stats,
    subscriptions,
    worlds,
)
from holdfast.server.http.endpoints import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *calls.ENDPOINTS,
    *messages.ENDPOINTS,
    *subscriptions.ENDPOINTS,
    *stats.ENDPOINTS,
    *queues.ENDPOINTS,
    *leases.ENDPOINTS,
    *states.ENDPOINTS,
    *entities.ENDPOINTS,
    *worlds.ENDPOINTS,
    *mail.ENDPOINTS,
    *json_rpc.ENDPOINTS,
    *activity.ENDPOINTS,
    *blobs.ENDPOINTS,
    *backups.ENDPOINTS,
)
