"""Handlers of requests for encryption at rest."""

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
    return stores.run_in_thread(_encryption(stores.services).enable, request.universe)


@service
def rotate(stores: AnyStores, request: RotateKey) -> Served[UniverseEncryption]:
    encryption = _encryption(stores.services)
    return stores.run_in_thread(encryption.rewrap if request.master else encryption.rotate, request.universe)


@service
def rewrite(stores: AnyStores, request: RewriteValues) -> Served[Rewritten]:
    return stores.run_in_thread(_encryption(stores.services).rewrite, request.universe, request.limit)


def _encryption(services: Services) -> Encryption:
    return Encryption(services.database, services.objects, services.clock)
