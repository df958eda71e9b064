"""Session logs: a record is accepted in memory; file access runs in a thread."""

from fastness.errors import InvalidArgument
from fastness.layers.idempotency import KeyedCall
from fastness.plane.handlers import immediate, service
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.activity.log import ActivityLog, Position
from fastness.wire.activity import (
    ACCEPTED,
    EndSession,
    ListLogs,
    LogFile,
    LogFiles,
    LoggedRecord,
    LoggedRecords,
    LogRecords,
    ReadLog,
)
from fastness.wire.requests import Committed


@immediate
def log(stores: AnyStores, request: LogRecords, call: KeyedCall | None = None) -> Committed:
    logs: ActivityLog = stores.services.log()
    if call is not None and logs.recent_keys.contains(call):
        return ACCEPTED
    logs.log_encoded(request.universe, request.session, request.kind, request.records)
    if call is not None:
        logs.recent_keys.add(call)
    return ACCEPTED


@service
def read(stores: AnyStores, request: ReadLog) -> Served[LoggedRecords]:
    stores.services.events.write()  # A reader finds events that were published before.
    return stores.run_in_thread(_read, stores.services.log(), request)


@service
def files(stores: AnyStores, request: ListLogs) -> Served[LogFiles]:
    return stores.run_in_thread(_files, stores.services.log(), request.universe)


@service
def end(stores: AnyStores, request: EndSession) -> Served[Committed]:
    return stores.run_in_thread(_end, stores.services.log(), request)


def _read(logs: ActivityLog, request: ReadLog) -> LoggedRecords:
    after = None if request.after is None else _position(request.after)
    found = logs.read(request.universe, session=request.session, kind=request.kind, after=after, limit=request.limit)
    records = [
        LoggedRecord(each.session, each.kind, each.position.file, each.position.n, each.at_ms, bytes(each.record))
        for each in found
    ]
    last = records[-1] if len(records) == request.limit else None
    return LoggedRecords(records, None if last is None else f"{last.file}:{last.n}")


def _files(logs: ActivityLog, universe: str) -> LogFiles:
    return LogFiles([LogFile(each.name, each.path, each.is_rotated, each.size) for each in logs.files(universe)])


def _end(logs: ActivityLog, request: EndSession) -> Committed:
    logs.end_session(request.universe, request.session, request.kind)
    return ACCEPTED


def _position(text: str) -> Position:
    file, colon, number = text.rpartition(":")
    if not colon or not (number.isascii() and number.isdigit()):
        raise InvalidArgument(f"{text!r} is not a log position; give the `next` of the previous page")
    return Position(file, int(number))
