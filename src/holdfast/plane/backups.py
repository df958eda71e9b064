"""Backups and checkups of a plane that goes on: all of it is done aside, by the port's store."""

from typing import Any

from holdfast.wire.backups import BeginBackup, EndBackup, ListBackup, OpenBackup
from holdfast.wire.health_checks import RunCheckups


def begin(port: Any, request: BeginBackup) -> Any:
    del request
    return port.backups.begin()


def files(port: Any, request: ListBackup) -> Any:
    return port.backups.files(request.id)


def open(port: Any, request: OpenBackup) -> Any:
    return port.backups.open(request.id, request.path, request.start, request.length)


def end(port: Any, request: EndBackup) -> Any:
    return port.backups.end(request.id)


def examine(port: Any, request: RunCheckups) -> Any:
    return port.backups.examine(deep=request.deep)
