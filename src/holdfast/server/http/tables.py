"""All endpoints of a server, in the order in which paths are tried."""

from typing import Final

from holdfast.server.http import (
    activity,
    backups,
    blobs,
    calls,
    deliveries,
    enqueues,
    entities,
    leases,
    mail,
    queues,
    rpc,
    settlements,
    states,
    stats,
    subscriptions,
    surveys,
    worlds,
)
from holdfast.server.http.endpoints import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *calls.ENDPOINTS,
    enqueues.ENQUEUE,
    *deliveries.ENDPOINTS,
    *subscriptions.ENDPOINTS,
    *settlements.ENDPOINTS,
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
