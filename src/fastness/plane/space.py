"""Handlers of space requests."""

import msgspec

from fastness.plane.handlers import immediate, service
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.maintenance import space_use
from fastness.runtime.maintenance.space_options import checked_grace_ms
from fastness.wire.space import (
    Collected,
    CollectGarbage,
    ShowSpace,
    ShowStorage,
    SpaceReport,
    StandbyStatus,
    StorageStatus,
)


@service
def collect(stores: AnyStores, request: CollectGarbage) -> Served[Collected]:
    seconds = stores.services.space.grace_seconds if request.grace_seconds is None else request.grace_seconds
    return stores.run_in_thread(_collect, stores.services, request, grace_ms=checked_grace_ms(seconds))


@service
def show(stores: AnyStores, request: ShowSpace) -> Served[SpaceReport]:
    del request
    return stores.run_in_thread(_report, stores.services)


@immediate
def show_storage(stores: AnyStores, request: ShowStorage) -> StorageStatus:
    del request
    return storage_status(stores.services)


def storage_status(services: Services) -> StorageStatus:
    """Whether the key space works, how full its disk is, and how the last collection went."""
    failure, disk, replayed = services.database.failure, services.disk_space, services.database.replayed_position
    return StorageStatus(
        failure=None if failure is None else f"{failure.code}: {failure}",
        disk_low=services.database.low_space,
        refuses_writes=services.database.refuses_writes,
        disk_free_bytes=None if disk is None else disk.free_bytes,
        disk_reserve_bytes=None if disk is None else disk.reserve_bytes,
        collection=services.space_counters.last,
        standby=None if replayed is None else StandbyStatus(*replayed),
    )


def _collect(services: Services, request: CollectGarbage, *, grace_ms: int) -> Collected:
    counters = services.space_counters
    with counters.count_failures():
        return counters.collect(
            services.database,
            services.objects,
            services.space,
            grace_ms=grace_ms,
            dry_run=request.dry_run,
        )


def _report(services: Services) -> SpaceReport:
    report = space_use.report(services.database, services.objects, services.space)
    services.space_counters.set_uses(report.uses)
    return msgspec.structs.replace(report, status=storage_status(services))
