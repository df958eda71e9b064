"""Handlers of backup and health check requests."""

from fastness.plane.handlers import service
from fastness.plane.stores import AnyStores, Served, Streamed
from fastness.wire.backups import BackupBegun, BackupEnded, BeginBackup, EndBackup, ListBackup, OpenBackup
from fastness.wire.health_checks import RunCheckups


@service
def begin(stores: AnyStores, request: BeginBackup) -> Served[BackupBegun]:
    del request
    return stores.backups.begin()


@service
def files(stores: AnyStores, request: ListBackup) -> Streamed:
    return stores.backups.files(request.id)


@service
def open(stores: AnyStores, request: OpenBackup) -> Streamed:
    return stores.backups.open(request.id, request.path, request.start, request.length)


@service
def end(stores: AnyStores, request: EndBackup) -> Served[BackupEnded]:
    return stores.backups.end(request.id)


@service
def examine(stores: AnyStores, request: RunCheckups) -> Streamed:
    return stores.backups.examine(deep=request.deep)
