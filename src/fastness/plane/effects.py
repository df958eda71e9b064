"""Handlers of requests for effects."""

import msgspec

from fastness.kv import Transaction
from fastness.layers import effect_leases, effects
from fastness.layers.effects import EffectKey
from fastness.layers.idempotency import KeyedCall
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.effects import (
    Attempted,
    ClaimEffects,
    CompleteEffect,
    EffectPage,
    ExtendEffect,
    FailEffect,
    ListEffects,
    ReleaseEffects,
)
from fastness.wire.requests import Committed


@transaction
def page(tx: Transaction, request: ListEffects) -> EffectPage:
    return effects.page(tx, request.universe, request.world, after=request.after, limit=request.limit)


@service
def claim(stores: AnyStores, request: ClaimEffects, call: KeyedCall | None = None) -> Served[EffectPage]:
    return stores.effects.claim(msgspec.structs.replace(request, kinds=sorted(set(request.kinds))), call)


@transaction
def release(tx: Transaction, request: ReleaseEffects) -> Committed:
    effect_leases.release(tx, request.universe, request.effects)
    return Committed(request.tier)


@transaction
def complete(tx: Transaction, request: CompleteEffect) -> Committed:
    effect_leases.complete(
        tx,
        *_effect(request),
        request.fence,
        payload=request.payload,
        payload_blob=request.payload_blob,
        adapter_id=request.adapter_id,
        signature=request.signature,
    )
    return Committed(request.tier)


@transaction
def fail(tx: Transaction, request: FailEffect) -> Attempted:
    delay = request.delay_seconds
    delay_ms = None if delay is None else round(delay * 1_000)
    return effect_leases.fail(
        tx, *_effect(request), request.fence, error=request.error, delay_ms=delay_ms, is_final=request.is_final
    )


@transaction
def extend(tx: Transaction, request: ExtendEffect) -> Committed:
    effect_leases.extend(tx, *_effect(request), request.fence, lease_ms=round(request.lease_seconds * 1_000))
    return Committed(request.tier)


def _effect(request: CompleteEffect | FailEffect | ExtendEffect) -> tuple[str, EffectKey]:
    return request.universe, EffectKey(request.world, request.height, request.number)
