"""All endpoints of a server, in the order in which paths are tried."""

from typing import Final

from holdfast.server.http import (
    activity,
    backups,
    blobs,
    entities,
    leases,
    mail,
    messages,
    queues,
    rpc,
    rpc_endpoints,
    states,
    stats,
    subscriptions,
    surveys,
    worlds,
)
from holdfast.server.http.endpoints import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *rpc_endpoints.ENDPOINTS,
    *messages.ENDPOINTS,
    *subscriptions.ENDPOINTS,
    *messages.SETTLE_ENDPOINTS,
    *stats.ENDPOINTS,
    *queues.ENDPOINTS,
    *leases.ENDPOINTS,
    *states.ENDPOINTS,
    *entities.ENDPOINTS,
    *worlds.ENDPOINTS,
    *surveys.ENDPOINTS,
    *mail.ENDPOINTS,
    *rpc.ENDPOINTS,
    *activity.ENDPOINTS,
    *blobs.ENDPOINTS,
    *backups.ENDPOINTS,
)
