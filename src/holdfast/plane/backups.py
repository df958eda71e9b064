"""Backups and checkups of a plane that goes on: all of it is done aside, by the port's store."""

from typing import Any

from holdfast.wire.backups import BeginBackup, EndBackup, ListBackup, OpenBackup
from holdfast.wire.health_checks import RunCheckups


def begin(transport: Any, request: BeginBackup) -> Any:
    del request
    return transport.backups.begin()


def files(transport: Any, request: ListBackup) -> Any:
    return transport.backups.files(request.id)


def open(transport: Any, request: OpenBackup) -> Any:
    return transport.backups.open(request.id, request.path, request.start, request.length)


def end(transport: Any, request: EndBackup) -> Any:
    return transport.backups.end(request.id)


def examine(transport: Any, request: RunCheckups) -> Any:
    return transport.backups.examine(deep=request.deep)
