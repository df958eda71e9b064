"""Handlers of requests for the quotas of universes."""

from fastness.kv import Transaction
from fastness.layers import quotas
from fastness.plane.handlers import service, transaction
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.wire.quotas import GetQuota, GetUsage, Quota, SetQuota, Usage


@service
def set_quota(stores: AnyStores, request: SetQuota) -> Served[Quota]:
    return stores.run_in_thread(_set, stores.services, request)


@transaction
def get_quota(tx: Transaction, request: GetQuota) -> Quota:
    return quotas.quota_of(tx, request.universe)


@service
def get_usage(stores: AnyStores, request: GetUsage) -> Served[Usage]:
    return stores.run_in_thread(stores.services.quotas.usage, request.universe)


def _set(services: Services, request: SetQuota) -> Quota:
    quota = services.database.transact(quotas.set_quota, request.universe, request.quota, tier=request.tier)
    services.quotas.load()
    return quota
