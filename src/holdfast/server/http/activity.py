"""Session logs over HTTP: BEST_EFFORT records."""

from typing import Final

from holdfast.server.http.endpoints import Endpoint, noun
from holdfast.wire.activity import EndSession, ListLogs, LogRecords, ReadLog

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    noun("POST", "/v1/activity", LogRecords, "Log records of a session", of="activity", status=202),
    noun("GET", "/v1/activity", ReadLog, "Records of a session or kind, or all", of="activity"),
    noun("GET", "/v1/activity/files", ListLogs, "The files that hold the logs", of="activity"),
    noun("POST", "/v1/activity/end", EndSession, "Close the logs of a session", of="activity"),
)
