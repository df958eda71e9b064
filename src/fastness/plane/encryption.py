"""Handlers of requests for encryption at rest."""

from fastness.names import checked_name
from fastness.plane.handlers import service
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.maintenance.encryption import Encryption
from fastness.wire.encryption import (
    EnableEncryption,
    EncryptionStatus,
    RewriteValues,
    Rewritten,
    RotateKey,
    ShowEncryption,
    UniverseEncryption,
)


@service
def show(stores: AnyStores, request: ShowEncryption) -> Served[EncryptionStatus]:
    del request
    return stores.run_in_thread(_encryption(stores.services).show)


@service
def enable(stores: AnyStores, request: EnableEncryption) -> Served[UniverseEncryption]:
    universe = checked_name("universe", request.universe)
    return stores.run_in_thread(_encryption(stores.services).enable, universe)


@service
def rotate(stores: AnyStores, request: RotateKey) -> Served[UniverseEncryption]:
    universe = _checked(request.universe)
    encryption = _encryption(stores.services)
    return stores.run_in_thread(encryption.rewrap if request.master else encryption.rotate, universe)


@service
def rewrite(stores: AnyStores, request: RewriteValues) -> Served[Rewritten]:
    request.check()
    return stores.run_in_thread(_encryption(stores.services).rewrite, _checked(request.universe), request.limit)


def _checked(universe: str) -> str:
    return checked_name("universe", universe) if universe else universe


def _encryption(services: Services) -> Encryption:
    return Encryption(services.database, services.objects, services.clock)
