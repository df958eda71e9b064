"""Undoing calls whose caller was cancelled: leased messages, leases, locks, claimed effects and worlds are released."""

from collections.abc import Callable
from typing import Any

from fastness.wire.effects import ClaimedEffect, ClaimEffects, EffectPage, ReleaseEffects
from fastness.wire.frames import AnyRequest
from fastness.wire.hosting import ClaimedWorlds, ClaimWorlds, GivenBack, ReleaseWorlds
from fastness.wire.leases import AcquireLease, Granted, LeaseProof, ReleaseLease
from fastness.wire.locks import AcquireLocks, ReleaseLocks
from fastness.wire.queues import Deliveries, NackMessages, ReceiveMessages


def undo_of(request: AnyRequest) -> Callable[[Any], AnyRequest | None] | None:
    """A function from the answer to the request that releases what was leased; None if nothing needs releasing."""
    if isinstance(request, ReceiveMessages):
        return lambda answer: _defer_request(request, answer)
    if isinstance(request, AcquireLease):
        return lambda answer: _release_request(request, answer)
    if isinstance(request, AcquireLocks):
        return lambda answer: ReleaseLocks(request.session, answer.claim)
    if isinstance(request, ClaimEffects):
        return lambda answer: _release_effects(request, answer)
    if isinstance(request, ClaimWorlds):
        return lambda answer: _give_back_request(request, answer)
    return None


def _defer_request(request: ReceiveMessages, answer: Deliveries) -> NackMessages | None:
    """Defer the messages: no caller has seen them, so this does not count as a failed attempt."""
    leases = answer.leases()
    return NackMessages(request.queue, leases, intent="defer", universe=request.universe) if leases else None


def _release_effects(request: ClaimEffects, answer: EffectPage) -> ReleaseEffects | None:
    claims = [ClaimedEffect(each.world, each.height, each.number, each.fence) for each in answer.effects]
    return ReleaseEffects(claims, request.universe) if claims else None


def _release_request(request: AcquireLease, answer: Granted) -> ReleaseLease:
    return ReleaseLease(LeaseProof(answer.key, answer.lease_id, answer.fence, answer.txn_id, request.universe))


def _give_back_request(request: ClaimWorlds, answer: ClaimedWorlds) -> ReleaseWorlds | None:
    """Give back the worlds that the host has not seen. It still holds the others, for which items arrived."""
    worlds = [GivenBack(each.world, each.fence, each.head, has_work=True) for each in answer.worlds if each.is_new]
    return ReleaseWorlds(worlds, request.owner, request.universe) if worlds else None
