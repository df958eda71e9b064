"""The last hour of the table `live_queue_minutes`, which `fastness pipeline live` writes into a lake.

The lake is only read, in a thread, without Spark. The packages that read it are imported with the first request: a
server without them works, and the answer says which extra to install.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.errors import Backend, Unsupported
from fastness.extras import how_to_install
from fastness.limits import CONSOLE_LIVE_MINUTES, CONSOLE_LIVE_QUEUES_MAX, CONSOLE_LIVE_ROWS_MAX
from fastness.names import UNIVERSE, checked_name
from fastness.server.context import ServerContext
from fastness.server.http.middleware import authenticate_request
from fastness.server.problems import JSON
from fastness.wire.permissions import METRICS

if TYPE_CHECKING:
    import pyarrow as pa

_TABLE: Final = "live_queue_minutes"
_SUMS: Final = ("put", "leased", "acked", "retries", "expired", "dead_lettered", "waits", "wait_sum_ms", "late")


class LiveQueue(msgspec.Struct, frozen=True):
    """The sums of one queue."""

    queue: str
    put: int
    leased: int
    acked: int
    retries: int
    expired: int
    dead_lettered: int
    waits: int
    wait_sum_ms: int
    late: int
    wait_max_ms: int | None


class LiveHour(msgspec.Struct, frozen=True):
    """The hour that ends with the newest minute of a universe."""

    newest_ms: int | None = None  # The start of the newest minute; None: there are no rows.
    minutes: int = CONSOLE_LIVE_MINUTES
    queues: list[LiveQueue] = []  # Those with the most events.
    left_off: int = 0  # The number of other queues.
    truncated: bool = False  # There are more rows than the server reads, so the sums are too low.


class LiveAggregates:
    """Serves the live aggregates of a lake in a local folder."""

    def __init__(self, context: ServerContext, lake: Path) -> None:
        self._context = context
        self._table = lake / _TABLE
        self._lock = asyncio.Lock()  # One read at a time: it may take as much memory as its rows.

    def route(self) -> Route:
        """`/console/live`."""
        return Route("/console/live", self._answer, methods=["GET"])

    async def _answer(self, request: HttpRequest) -> Response:
        authorizer = authenticate_request(self._context, request.headers, request.client.host if request.client else "")
        authorizer.authorize_verb(METRICS)
        universe = checked_name("universe", request.query_params.get("universe", UNIVERSE))
        async with self._lock:
            found = await asyncio.to_thread(read_hour, self._table, universe)
        return Response(msgspec.json.encode(found), headers={"Cache-Control": "no-store"}, media_type=JSON)


def read_hour(folder: Path, universe: str) -> LiveHour:
    """The last hour of a universe.

    Raises:
        Unsupported: the packages that read a lake are not installed.
        Backend: the table cannot be read.
    """
    try:
        import pyarrow as pa
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"The server cannot read the lake: it lacks {error.name}; {how_to_install('spark')}"
        ) from error
    if not folder.is_dir():
        return LiveHour()
    try:
        return _read(DeltaTable(str(folder)), folder, universe)
    except TableNotFoundError:
        return LiveHour()
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise Backend(
            f"The table {folder} cannot be read ({error}); check the lake with: fastness pipeline audit"
        ) from error


def _read(table: Any, folder: Path, universe: str) -> LiveHour:
    import pyarrow as pa

    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    files = [_File(each) for each in actions if each["partition.universe"] == universe]
    newest = max((file.newest for file in files), default=None)
    if newest is None:
        return LiveHour()
    after = newest - timedelta(minutes=CONSOLE_LIVE_MINUTES)
    parts, left = [], CONSOLE_LIVE_ROWS_MAX
    for file in sorted(files, key=lambda file: file.newest, reverse=True):
        if file.newest > after and left > 0:
            parts.append(_read_file(folder / file.path, after).slice(0, left))
            left -= parts[-1].num_rows
    queues = sorted(
        _sum_by_queue(pa.concat_tables(parts)), key=lambda row: (-row.put - row.leased - row.acked, row.queue)
    )
    return LiveHour(
        newest_ms=round(newest.timestamp() * 1_000),
        queues=queues[:CONSOLE_LIVE_QUEUES_MAX],
        left_off=max(len(queues) - CONSOLE_LIVE_QUEUES_MAX, 0),
        truncated=left <= 0,
    )


class _File:
    """A file of the table, and the newest minute in it."""

    def __init__(self, action: Mapping[str, Any]) -> None:
        newest: datetime = action["max.minute"]
        self.path: str = action["path"]
        self.newest = newest if newest.tzinfo is not None else newest.replace(tzinfo=UTC)


def _read_file(path: Path, after: datetime) -> "pa.Table":
    import pyarrow.parquet as pq

    columns = ["queue", *_SUMS, "wait_max_ms"]
    return pq.read_table(
        path, columns=columns, filters=[("minute", ">", after)], partitioning=None, page_checksum_verification=True
    )


def _sum_by_queue(rows: "pa.Table") -> list[LiveQueue]:
    summed = rows.group_by("queue").aggregate([*((name, "sum") for name in _SUMS), ("wait_max_ms", "max")])
    return [_queue(row) for row in summed.to_pylist()]


def _queue(row: Mapping[str, Any]) -> LiveQueue:
    sums = {name: row[f"{name}_sum"] for name in _SUMS}
    return LiveQueue(queue=row["queue"], wait_max_ms=row["wait_max_ms_max"], **sums)
