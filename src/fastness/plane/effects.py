"""Handlers of requests for effects."""

import msgspec

from fastness.errors import InvalidArgument
from fastness.kv import Transaction
from fastness.layers import effect_leases, effects, leases
from fastness.layers.effects import EffectKey
from fastness.layers.idempotency import KeyedCall
from fastness.limits import (
    EFFECT_CLAIMS_MAX,
    EFFECT_DELAY_SECONDS_LONGEST,
    EFFECT_KIND_BYTES_MAX,
    EFFECT_KINDS_MAX,
    EFFECT_LEASE_SECONDS_MAX,
    HOST_WAIT_SECONDS_MAX,
)
from fastness.names import checked_name
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.wire.effects import (
    Attempted,
    ClaimedEffect,
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
    universe = checked_name("universe", request.universe)
    world = None if request.world is None else checked_name("world", request.world)
    return effects.page(tx, universe, world, after=request.after, limit=request.limit)


@service
def claim(stores: AnyStores, request: ClaimEffects, call: KeyedCall | None = None) -> Served[EffectPage]:
    leases.check_owner(request.owner)
    if not 0 < request.limit <= EFFECT_CLAIMS_MAX:
        raise InvalidArgument(f"limit is {request.limit}; one claim takes 1 to {EFFECT_CLAIMS_MAX} effects")
    if not 0 <= request.wait_seconds <= HOST_WAIT_SECONDS_MAX:
        raise InvalidArgument(
            f"wait_seconds is {request.wait_seconds}; give 0 (do not wait) to {HOST_WAIT_SECONDS_MAX}"
        )
    checked_name("universe", request.universe)
    _lease_ms(request.lease_seconds)  # Refused if it is out of bounds.
    return stores.effects.claim(msgspec.structs.replace(request, kinds=_kinds(request.kinds)), call)


@transaction
def release(tx: Transaction, request: ReleaseEffects) -> Committed:
    if not 0 < len(request.effects) <= EFFECT_CLAIMS_MAX:
        raise InvalidArgument(f"{len(request.effects)} effects are given; one call releases 1 to {EFFECT_CLAIMS_MAX}")
    universe = checked_name("universe", request.universe)
    for each in request.effects:
        _key(each)
    effect_leases.release(tx, universe, request.effects)
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
    if delay is not None and not 0 <= delay <= EFFECT_DELAY_SECONDS_LONGEST:
        raise InvalidArgument(f"delay_seconds is {delay}; give 0 to {EFFECT_DELAY_SECONDS_LONGEST}")
    delay_ms = None if delay is None else round(delay * 1_000)
    return effect_leases.fail(
        tx, *_effect(request), request.fence, error=request.error, delay_ms=delay_ms, is_final=request.is_final
    )


@transaction
def extend(tx: Transaction, request: ExtendEffect) -> Committed:
    effect_leases.extend(tx, *_effect(request), request.fence, lease_ms=_lease_ms(request.lease_seconds))
    return Committed(request.tier)


def _effect(request: CompleteEffect | FailEffect | ExtendEffect) -> tuple[str, EffectKey]:
    return checked_name("universe", request.universe), _key(request)


def _key(effect: ClaimedEffect | CompleteEffect | FailEffect | ExtendEffect) -> EffectKey:
    if not (0 <= effect.height < 1 << 63 and 0 <= effect.number < 1 << 63):
        raise InvalidArgument(f"There is no effect {effect.number} of record {effect.height}; both count from 0")
    return EffectKey(checked_name("world", effect.world), effect.height, effect.number)


def _kinds(kinds: list[str]) -> list[str]:
    if not 0 < len(kinds) <= EFFECT_KINDS_MAX:
        raise InvalidArgument(f"kinds has {len(kinds)} names; a claim names 1 to {EFFECT_KINDS_MAX} kinds")
    for kind in kinds:
        try:
            size = len(kind.encode())
        except UnicodeEncodeError:
            raise InvalidArgument(f"{kind!r} is not valid text") from None
        if size > EFFECT_KIND_BYTES_MAX:
            raise InvalidArgument(f"A kind has {size} bytes and may have {EFFECT_KIND_BYTES_MAX}")
    return sorted(set(kinds))


def _lease_ms(seconds: float) -> int:
    if not 0.001 <= seconds <= EFFECT_LEASE_SECONDS_MAX:  # NaN fails this too.
        raise InvalidArgument(f"lease_seconds is {seconds}; give 0.001 to {EFFECT_LEASE_SECONDS_MAX}")
    return round(seconds * 1_000)
