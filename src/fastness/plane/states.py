"""Handlers of state requests."""

from fastness.kv import Transaction
from fastness.layers import states
from fastness.plane.handlers import transaction
from fastness.wire.states import (
    FoundState,
    GetState,
    RemovedState,
    RemoveState,
    StateDocument,
    UpdatedState,
    UpdateState,
)


@transaction
def get(tx: Transaction, request: GetState) -> FoundState:
    state = states.get(tx, *_key(request))
    return FoundState(
        None
        if state is None
        else StateDocument(state.value, state.etag, state.version, state.updated_ms, state.correlation_id)
    )


@transaction
def update(tx: Transaction, request: UpdateState) -> UpdatedState:
    state = states.update(
        tx,
        *_key(request),
        request.value,
        lease=request.lease,
        if_match=request.if_match,
        if_absent=request.if_absent,
        correlation_id=request.correlation_id,
    )
    return UpdatedState(state.etag, state.version)


@transaction
def remove(tx: Transaction, request: RemoveState) -> RemovedState:
    return RemovedState(states.remove(tx, *_key(request), lease=request.lease, if_match=request.if_match))


def _key(request: GetState | UpdateState | RemoveState) -> tuple[str, str]:
    return request.universe, request.key
