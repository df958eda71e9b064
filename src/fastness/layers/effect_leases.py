"""Claims on effects: who carries one out, until when, and what became of it.

A claim has a fence, which is higher than that of every earlier claim on the effect. Completing, failing and extending
need the fence of the last claim, so that a holder whose lease ended, and whose effect was claimed by another one since,
changes nothing. Until then a late holder may still complete: the call is done, and no other one has begun.

An effect leaves with a receipt in the inbox of its world, in one commit: with the result, or with the error of the last
attempt. So a world gets one receipt for each effect, however often the call was tried.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fastness.errors import EffectNotFound, FencingMismatch
from fastness.kv import Transaction, fence_floor
from fastness.layers import effects, inboxes, worlds
from fastness.layers.effects import DueEffect, EffectKey, key_of
from fastness.layers.idempotency import KeyedCall, delete_result, read_result, store_result, stored_result
from fastness.layers.worlds import World, WorldMeta, WorldState
from fastness.limits import (
    EFFECT_ARCHIVED_SECONDS,
    EFFECT_DELAY_SECONDS,
    EFFECT_DELAY_SECONDS_MAX,
    EFFECT_ERROR_BYTES_MAX,
)
from fastness.wire.effects import Attempted, ClaimedEffect, EffectInfo
from fastness.wire.inboxes import EffectReceipt

_ARCHIVED: Final = frozenset((WorldState.ARCHIVING, WorldState.ARCHIVED))
_GONE: Final = frozenset((WorldState.DELETING, WorldState.DELETED))


class _KeyedClaims(msgspec.Struct, frozen=True, array_like=True):
    """The claims of a call with an idempotency key."""

    claims: list[ClaimedEffect]
    retried: bool = False  # The call was repeated, so its caller has the claims.


_decode_keyed = msgspec.msgpack.Decoder(_KeyedClaims).decode


def claim(
    tx: Transaction,
    universe: str,
    entries: Sequence[DueEffect],
    *,
    owner: str,
    lease_ms: int,
    call: KeyedCall | None = None,
) -> list[EffectInfo]:
    """Lease the effects of these entries of the due index to `owner`, except those that are not due any more.

    An effect whose lease ended in its last attempt is dead. One of an archived world is not claimed, and due again
    later.
    """
    attempts = (_claimed(tx, universe, entry, owner, lease_ms) for entry in entries)
    claimed = [effect for effect in attempts if effect is not None]
    if claimed and call is not None:
        store_result(tx, call, _KeyedClaims(claims_of(claimed)))
    return claimed


def stored_claims(tx: Transaction, universe: str, call: KeyedCall) -> list[EffectInfo] | None:
    """What an earlier attempt of the call claimed and still holds; None if there was none."""
    before = stored_result(tx, call)
    if before is None:
        return None
    keyed = _decode_keyed(before)
    if not keyed.retried:
        store_result(tx, call, msgspec.structs.replace(keyed, retried=True))
    return list(_still_held(tx, universe, keyed.claims))


def claims_of(claimed: Sequence[EffectInfo]) -> list[ClaimedEffect]:
    """The fences of effects that were claimed."""
    return [ClaimedEffect(each.world, each.height, each.number, each.fence) for each in claimed]


def release_undelivered(tx: Transaction, universe: str, claims: Sequence[ClaimedEffect], call: KeyedCall) -> None:
    """`release` effects whose claimer disconnected before the response, and forget its call.

    Does nothing if the caller repeated the call on another connection, because it has them then.
    """
    before = read_result(tx, call)
    if before is not None and not _decode_keyed(before).retried:
        delete_result(tx, call)
        release(tx, universe, claims)


def release(tx: Transaction, universe: str, claims: Sequence[ClaimedEffect]) -> None:
    """Give back effects that have not begun: they are due at once, and no attempt is counted.

    Effects that were claimed again, failed or completed since are skipped.
    """
    for effect in _still_held(tx, universe, claims):
        free = msgspec.structs.replace(effect, owner=None, attempts=effect.attempts - 1)
        effects.write(tx, universe, free, due_ms=tx.now_ms)


def extend(tx: Transaction, universe: str, key: EffectKey, fence: int, *, lease_ms: int) -> None:
    """Extend the lease of a claim to at least `lease_ms` from now.

    Raises:
        EffectNotFound, FencingMismatch: as `complete`.
    """
    record = _held(tx, universe, key, fence)
    effects.write(tx, universe, record, due_ms=max(record.due_ms, tx.now_ms + lease_ms))


def complete(
    tx: Transaction,
    universe: str,
    key: EffectKey,
    fence: int,
    *,
    payload: bytes = b"",
    payload_blob: str | None = None,
    adapter_id: str = "",
    signature: bytes = b"",
) -> None:
    """Remove an effect, and put its receipt into the inbox of its world.

    Raises:
        EffectNotFound: it is complete or dead, or its world was deleted.
        FencingMismatch: it was claimed again since; the receipt of that claim counts.
        PayloadTooLarge, InvalidArgument, BlobNotFound: the receipt is not one.
    """
    record = _held(tx, universe, key, fence)
    receipt = EffectReceipt(
        intent_hash=record.intent_hash,
        effect_kind=record.kind,
        adapter_id=adapter_id,
        signature=signature,
        payload=payload,
        payload_blob=payload_blob,
    )
    _finish(tx, universe, record, receipt)


def fail(
    tx: Transaction,
    universe: str,
    key: EffectKey,
    fence: int,
    *,
    error: str,
    delay_ms: int | None = None,
    is_final: bool = False,
) -> Attempted:
    """Record a failed attempt: the effect is due again after the delay, by default a back-off, or dead.

    Raises:
        EffectNotFound, FencingMismatch: as `complete`.
    """
    record = _held(tx, universe, key, fence)
    error = cut(error)
    if is_final or record.attempts >= record.max_attempts:
        _dead(tx, universe, record, error)
        return Attempted(is_dead=True)
    due_ms = tx.now_ms + (backoff_ms(record.attempts) if delay_ms is None else delay_ms)
    effects.write(tx, universe, msgspec.structs.replace(record, owner=None, error=error), due_ms=due_ms)
    return Attempted(is_dead=False, due_ms=due_ms)


def backoff_ms(attempts: int) -> int:
    """How long an effect waits after this many failed attempts."""
    doublings = min(attempts - 1, EFFECT_DELAY_SECONDS_MAX.bit_length())
    return min(EFFECT_DELAY_SECONDS << doublings, EFFECT_DELAY_SECONDS_MAX) * 1_000


def cut(error: str) -> str:
    """The start of an error that fits in a receipt."""
    return error.encode(errors="replace")[:EFFECT_ERROR_BYTES_MAX].decode(errors="ignore")


def _claimed(tx: Transaction, universe: str, entry: DueEffect, owner: str, lease_ms: int) -> EffectInfo | None:
    """The effect, claimed; None if it cannot be."""
    record = effects.find(tx, universe, entry.effect)
    if record is None or record.due_ms != entry.at_ms:
        return None
    if entry.at_ms > tx.now_ms:
        return None
    meta = _meta(tx, World(universe, entry.effect.world))
    if meta is None:
        return None
    if meta.state in _ARCHIVED:
        effects.write(tx, universe, record, due_ms=tx.now_ms + EFFECT_ARCHIVED_SECONDS * 1_000)
        return None
    if record.attempts >= record.max_attempts:  # The lease of its last attempt ended.
        _dead(tx, universe, record, f"Attempt {record.attempts} of {record.owner} did not end in time")
        return None
    # The effects of another incarnation have the same heights, and must have other fences.
    fence = fence_floor.next_fence(tx, record.fence, meta.fences_from)
    claimed = msgspec.structs.replace(record, attempts=record.attempts + 1, fence=fence, owner=owner)
    return effects.write(tx, universe, claimed, due_ms=tx.now_ms + lease_ms)


def _still_held(tx: Transaction, universe: str, claims: Sequence[ClaimedEffect]) -> Iterator[EffectInfo]:
    """The effects whose last claim is one of these, and was not given back. Each is read when it is wanted."""
    for each in claims:
        effect = effects.find(tx, universe, key_of(each))
        if effect is not None and effect.owner is not None and effect.fence == each.fence:
            yield effect


def _held(tx: Transaction, universe: str, key: EffectKey, fence: int) -> EffectInfo:
    """The effect, if its last claim has this fence."""
    record = effects.find(tx, universe, key)
    name = f"Effect {key.number} of record {key.height} of world {key.world}"
    if record is None or _meta(tx, World(universe, key.world)) is None:
        raise EffectNotFound(
            f"{name} was not found: it is complete or dead, or its world was deleted; do not repeat the call"
        )
    if record.owner is None or record.fence != fence:
        raise FencingMismatch(
            f"{name} is not claimed with fence {fence}; its lease ended, and what became of it since counts"
        )
    return record


def _dead(tx: Transaction, universe: str, record: EffectInfo, error: str) -> None:
    receipt = EffectReceipt(
        intent_hash=record.intent_hash, effect_kind=record.kind, adapter_id="", signature=b"", error=error
    )
    _finish(tx, universe, record, receipt)


def _finish(tx: Transaction, universe: str, record: EffectInfo, receipt: EffectReceipt) -> None:
    inboxes.enqueue(tx, World(universe, record.world), receipt, requested=True)
    effects.remove(tx, universe, record)


def _meta(tx: Transaction, world: World) -> WorldMeta | None:
    """The record of a world; None if it does not exist or is being deleted."""
    meta = worlds.find(tx, world)
    return None if meta is None or meta.state in _GONE else meta
