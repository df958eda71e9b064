"""Lists over HTTP that tell something of each thing in them: what a console shows."""

from typing import Final

from holdfast.server.http.endpoints import Endpoint, noun
from holdfast.wire.entities import ListKinds
from holdfast.wire.leases import ListWaits
from holdfast.wire.queues import SurveyQueues
from holdfast.wire.universes import ListUniverses
from holdfast.wire.worlds import CheckWorld, SurveyWorlds

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    noun("GET", "/v1/universes", ListUniverses, "Universes in which there is anything", of="universes"),
    noun("GET", "/v1/surveys/queues", SurveyQueues, "How each queue is doing", of="queues"),
    noun("GET", "/v1/surveys/worlds", SurveyWorlds, "What is known of each world", of="worlds"),
    noun("GET", "/v1/surveys/kinds", ListKinds, "Kinds of entities, and the tiers of their fields", of="entities"),
    noun("GET", "/v1/surveys/waits", ListWaits, "Who waits for leases and locks at this server", of="leases"),
    noun(
        "GET",
        "/v1/worlds/{world}/check",
        CheckWorld,
        "Look for damage from `start` on, a segment or `limit` records at a time",
        of="worlds",
    ),
)
