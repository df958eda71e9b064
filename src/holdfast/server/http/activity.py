"""Session logs over HTTP: BEST_EFFORT records."""

from typing import Any, Final

from holdfast.server.http.endpoints import Endpoint, noun
from holdfast.server.http.visits import Visit
from holdfast.wire.activity import EndSession, ListLogs, LogRecords, ReadLog


def _one_or_many(visit: Visit, given: dict[str, Any]) -> None:
    """A single record may come as `record`."""
    del visit
    if "record" in given and "records" not in given:
        given["records"] = [given.pop("record")]


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    noun(
        "POST", "/v1/activity", LogRecords, "Log records of a session", of="activity", status=202, fill=_one_or_many
    ),
    noun("GET", "/v1/activity", ReadLog, "Records of a session or kind, or all", of="activity"),
    noun("GET", "/v1/activity/files", ListLogs, "The files that hold the logs", of="activity"),
    noun("POST", "/v1/activity/end", EndSession, "Close the logs of a session", of="activity"),
)
