"""Session logs: BEST_EFFORT records, accepted in memory and appended to a file shortly after."""

import msgspec

from holdfast.errors import InvalidValue
from holdfast.names import UNIVERSE
from holdfast.tiers import Tier
from holdfast.wire.requests import Committed, Operation, Request


class LoggedRecord(msgspec.Struct, frozen=True):
    """A record as it was logged: JSON, with its session and kind, its place in its file, and when it came."""

    session: str
    kind: str
    file: str
    n: int
    at_ms: int
    record: bytes


class LoggedRecords(msgspec.Struct, frozen=True):
    """Records in order; `next` continues behind the last one, if there may be more."""

    records: list[LoggedRecord]
    next: str | None


class LogFile(msgspec.Struct, frozen=True):
    """A file of a session log: still local, or rotated into the object store under `path`."""

    name: str
    path: str
    rotated: bool
    size: int


class LogFiles(msgspec.Struct, frozen=True):
    """Files in the order of their names."""

    files: list[LogFile]


class LogRecords(Request[Committed], frozen=True, tag="activity.log"):
    """Accept records, each one JSON object, into the log of a session. BEST_EFFORT, whatever `tier` says."""

    session: str
    records: list[bytes]
    kind: str = "activity"
    universe: str = UNIVERSE

    def check(self) -> None:
        for record in self.records:
            try:
                msgspec.json.decode(record, type=dict)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise InvalidValue(f"{record[:32]!r} is no JSON object ({error}); encode a map") from None


class ReadLog(Request[LoggedRecords], frozen=True, tag="activity.read"):
    """Records of a session or kind, or all, in the order of their files; `after` is the `next` of the page before."""

    operation = Operation(reads=True)

    session: str | None = None
    kind: str | None = None
    after: str | None = None
    limit: int = 1_000
    universe: str = UNIVERSE


class ListLogs(Request[LogFiles], frozen=True, tag="activity.files"):
    operation = Operation(reads=True)

    universe: str = UNIVERSE


class EndSession(Request[Committed], frozen=True, tag="activity.end"):
    """Write out, close and rotate the logs of a session."""

    operation = Operation(repeatable="a closed file stays closed")

    session: str
    kind: str | None = None
    universe: str = UNIVERSE


ACCEPTED = Committed(Tier.BEST_EFFORT)
