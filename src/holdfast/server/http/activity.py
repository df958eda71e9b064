"""Session logs over HTTP. Records have the BEST_EFFORT tier."""

from typing import Final

from holdfast.server.http.endpoints import Endpoint, operation
from holdfast.wire.activity import EndSession, ListLogs, LogRecords, ReadLog

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    operation(
        "POST", "/v1/activity", LogRecords, "Append records to the log of a session.", tag="activity", status=202
    ),
    operation("GET", "/v1/activity", ReadLog, "Read the records of a session, of a kind, or all.", tag="activity"),
    operation("GET", "/v1/activity/files", ListLogs, "List the log files.", tag="activity"),
    operation("POST", "/v1/activity/end", EndSession, "Close the logs of a session.", tag="activity"),
)
