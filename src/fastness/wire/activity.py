"""Session logs: BEST_EFFORT records, accepted in memory and appended to a file shortly after."""

import msgspec

from fastness.errors import InvalidValue
from fastness.names import UNIVERSE
from fastness.tiers import Tier
from fastness.wire.fields import Limit, Name
from fastness.wire.requests import Committed, Operation, Request, Route


class LoggedRecord(msgspec.Struct, frozen=True):
    """A logged record: JSON, with its session and kind, its position in its file, and its time."""

    session: str
    kind: str
    file: str
    n: int
    at_ms: int
    record: bytes


class LoggedRecords(msgspec.Struct, frozen=True):
    """Records in order; `next` continues after the last one, if there may be more."""

    records: list[LoggedRecord]
    next: str | None


class LogFile(msgspec.Struct, frozen=True):
    """A file of a session log: local, or rotated to `path` in the object store."""

    name: str
    path: str
    rotated: bool
    size: int


class LogFiles(msgspec.Struct, frozen=True):
    """Files in the order of their names."""

    files: list[LogFile]


class LogRecords(Request[Committed], frozen=True, tag="activity.log"):
    """Add records, each one JSON object, to the log of a session. Always BEST_EFFORT; `tier` is ignored."""

    operation = Operation(
        stores=True, http=(Route("POST", "/v1/activity", "Append records to the log of a session.", status=202),)
    )

    session: Name
    records: list[bytes]
    kind: Name = "activity"
    universe: Name = UNIVERSE

    def check(self) -> None:
        for record in self.records:
            try:
                msgspec.json.decode(record, type=dict)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise InvalidValue(f"{record[:32]!r} is not a JSON object ({error}); encode a map") from None


class ReadLog(Request[LoggedRecords], frozen=True, tag="activity.read"):
    """Records of a session or kind, or all, in the order of their files; `after` is the `next` of the previous page."""

    operation = Operation(
        reads=True, http=(Route("GET", "/v1/activity", "Read the records of a session, of a kind, or all."),)
    )

    session: Name | None = None
    kind: str | None = None
    after: str | None = None
    limit: Limit = 1_000
    universe: Name = UNIVERSE


class ListLogs(Request[LogFiles], frozen=True, tag="activity.files"):
    operation = Operation(reads=True, http=(Route("GET", "/v1/activity/files", "List the log files."),))

    universe: Name = UNIVERSE


class EndSession(Request[Committed], frozen=True, tag="activity.end"):
    """Write out, close and rotate the logs of a session."""

    operation = Operation(
        repeatable="a closed file stays closed",
        http=(Route("POST", "/v1/activity/end", "Close the logs of a session."),),
    )

    session: Name
    kind: Name | None = None
    universe: Name = UNIVERSE


ACCEPTED = Committed(Tier.BEST_EFFORT)
