"""Handlers of space requests."""

from holdfast.plane.handlers import service
from holdfast.plane.stores import AnyStores, Served
from holdfast.runtime.maintenance import garbage_collection, space_use
from holdfast.runtime.maintenance.space_options import checked_grace_ms
from holdfast.wire.space import Collected, CollectGarbage, ShowSpace, SpaceReport


@service
def collect(stores: AnyStores, request: CollectGarbage) -> Served[Collected]:
    services = stores.services
    seconds = services.space.grace_seconds if request.grace_seconds is None else request.grace_seconds
    return stores.run_in_thread(
        garbage_collection.collect,
        services.database,
        services.objects,
        grace_ms=checked_grace_ms(seconds),
        dry_run=request.dry_run,
        with_old=request.with_old,
    )


@service
def show(stores: AnyStores, request: ShowSpace) -> Served[SpaceReport]:
    del request
    services = stores.services
    return stores.run_in_thread(space_use.report, services.database, services.objects, services.space)
