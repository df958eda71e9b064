"""Handlers of run requests."""

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers import runs
from fastness.limits import RUN_WAIT_SECONDS_MAX
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.requests import Committed
from fastness.wire.runs import (
    CancelRun,
    DeleteRun,
    GetRun,
    ListRuns,
    RunInfo,
    Runs,
    SignalRun,
    StartRun,
    UpdateRun,
)


@transaction
def start(tx: Transaction, request: StartRun) -> RunInfo:
    return runs.start(tx, request)


@service
def get(stores: AnyStores, request: GetRun) -> Served[RunInfo]:
    if request.wait_seconds > RUN_WAIT_SECONDS_MAX:  # Not declared: a server waits for its own `wait_seconds_max`.
        raise InvalidArgument(f"wait_seconds is {request.wait_seconds}; give 0 to {RUN_WAIT_SECONDS_MAX:.0f}")
    return stores.runs.get(request.universe, request.id, wait_ms=round(request.wait_seconds * 1_000), tier=request.tier)


@transaction
def page(tx: Transaction, request: ListRuns) -> Runs:
    return runs.page(tx, request)


@transaction
def signal(tx: Transaction, request: SignalRun) -> Committed:
    runs.signal(tx, request)
    return Committed(request.tier)


@transaction
def cancel(tx: Transaction, request: CancelRun) -> RunInfo:
    return runs.cancel(tx, request)


@transaction
def update(tx: Transaction, request: UpdateRun) -> RunInfo:
    return runs.update(tx, request)


@service
def delete(stores: AnyStores, request: DeleteRun) -> Served[Committed]:
    return stores.runs.delete(request.universe, request.id, tier=request.tier)
