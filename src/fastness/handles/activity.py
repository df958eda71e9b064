"""Session logs: BEST_EFFORT records of what happened."""

from collections.abc import Mapping
from typing import Any

from fastness.errors import InvalidValue
from fastness.handles.arguments import checked_items
from fastness.handles.handle import AsyncHandle
from fastness.wire.activity import EndSession, ListLogs, LogFile, LoggedRecords, LogRecords, ReadLog
from fastness.wire.json_values import encode_json


class AsyncActivity(AsyncHandle):
    """BEST_EFFORT records: acknowledged in memory, written to a file within 200 ms, lost if the process dies before."""

    async def log(self, session: str, record: Mapping[str, Any], *, kind: str = "activity") -> None:
        """Accept a record into the log of `session`."""
        await self._transport.call(LogRecords(session, [encode_record(record)], kind, self._universe))

    async def log_many(self, session: str, records: list[Mapping[str, Any]], *, kind: str = "activity") -> None:
        """Accept records, in order."""
        encoded = list(map(encode_record, checked_items(records, "call log(session, record)")))
        await self._transport.call(LogRecords(session, encoded, kind, self._universe))

    async def read(
        self, *, session: str | None = None, kind: str | None = None, after: str | None = None, limit: int = 1_000
    ) -> LoggedRecords:
        """At most `limit` records, in the order of their files; `after` is the `next` of the previous page."""
        return await self._transport.call(ReadLog(session, kind, after, limit, self._universe))

    async def files(self) -> list[LogFile]:
        """The log files, local ones and those in the object store."""
        return (await self._transport.call(ListLogs(self._universe))).files

    async def end(self, session: str, *, kind: str | None = None) -> None:
        """Close the logs of a session, and move them to the object store."""
        await self._transport.call(EndSession(session, kind, self._universe))


def encode_record(record: Mapping[str, Any]) -> bytes:
    """A record as JSON.

    Raises:
        InvalidValue: it is not a map, or cannot be encoded as JSON.
    """
    line = encode_json(record)
    if line[:1] != b"{":
        raise InvalidValue(f"A record is a map, not {type(record).__name__}; give a dictionary")
    return line
