"""Generated from handles/effects.py by tools/make_twins.py; change that file instead."""

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from fastness.handles.arguments import checked_items
from fastness.handles.sync.handle import Handle
from fastness.limits import EFFECT_LEASE_SECONDS, INBOX_INLINE_BYTES_MAX
from fastness.names import checked_name
from fastness.wire import Transport
from fastness.wire.blobs import PutBlob
from fastness.wire.effects import (
    Attempted,
    ClaimedEffect,
    ClaimEffects,
    CompleteEffect,
    EffectInfo,
    EffectPage,
    ExtendEffect,
    FailEffect,
    ListEffects,
    ReleaseEffects,
)


class EffectClaim:
    """An effect that was claimed. Carry it out, then complete it; its receipt goes into the inbox of its world.

    It may be carried out more than once: by another holder after its lease ended. Pass `idempotency_key` to what is
    called, so that it happens once there.
    """

    def __init__(self, transport: Transport, universe: str, info: EffectInfo, lease_seconds: float) -> None:
        self.info = info
        self.world = info.world
        self.height = info.height
        self.number = info.number
        self.kind = info.kind
        self.params = info.params
        self.fence = info.fence
        self.attempt = info.attempts  # 1 at the first one.
        self.lease_seconds = lease_seconds
        self._transport = transport
        self._universe = universe

    @property
    def idempotency_key(self) -> str:
        """The same in every attempt, and different for every effect of a host: the intent hash as hex digits."""
        return self.info.intent_hash.hex()

    def json(self) -> Any:
        """The params as JSON."""
        return msgspec.json.decode(self.params)

    def complete(self, result: Any = b"", *, adapter_id: str = "", signature: bytes = b"") -> None:
        """Remove the effect, and put its receipt into the inbox of its world, in one commit.

        Args:
            result: bytes, or anything that JSON has. Over 4 KiB it is stored as a blob.
            adapter_id: names what carried the effect out, for the receipt.
            signature: of the adapter, for the receipt.

        Raises:
            EffectNotFound: it is complete or dead, or its world was deleted.
            FencingMismatch: its lease ended, and it was claimed again or failed since; this result does not count.
        """
        payload = result if isinstance(result, bytes) else msgspec.json.encode(result)
        blob: str | None = None
        if len(payload) > INBOX_INLINE_BYTES_MAX:
            blob = (self._transport.call(PutBlob(payload, self._universe, pinned=False))).hash
            payload = b""
        request = CompleteEffect(
            self.world, self.height, self.number, self.fence, payload, blob, adapter_id, signature, self._universe
        )
        self._transport.call(request)

    def fail(self, error: str | BaseException, *, delay_seconds: float | None = None, final: bool = False) -> Attempted:
        """Record that this attempt failed: when the effect is due again, or that it is dead.

        Args:
            error: what went wrong. The receipt of a dead effect has it, cut to 1 KiB.
            delay_seconds: until the next attempt; by default 1 s, doubled with every attempt up to 5 minutes.
            final: do not try again, although attempts are left.

        Raises:
            EffectNotFound, FencingMismatch: as `complete`.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        request = FailEffect(
            self.world, self.height, self.number, self.fence, text, delay_seconds, final, self._universe
        )
        return self._transport.call(request)

    def extend(self, lease_seconds: float | None = None) -> None:
        """Extend the lease to at least `lease_seconds` from now (default: those of the claim).

        Raises:
            EffectNotFound, FencingMismatch: as `complete`; stop the work.
        """
        seconds = self.lease_seconds if lease_seconds is None else lease_seconds
        request = ExtendEffect(self.world, self.height, self.number, self.fence, seconds, self._universe)
        self._transport.call(request)

    def release(self) -> None:
        """Give the effect back before it has begun: another holder may claim it at once, and no attempt is counted."""
        claim = ClaimedEffect(self.world, self.height, self.number, self.fence)
        self._transport.call(ReleaseEffects([claim], self._universe))

    def __repr__(self) -> str:
        return f"<effect {self.number} of {self.world}/{self.height}, kind {self.kind}, fence {self.fence}>"


class Effects(Handle):
    """The effects that worlds have asked for and that are not complete."""

    def claim(
        self,
        kinds: Sequence[str],
        *,
        owner: str | None = None,
        limit: int = 1,
        lease_seconds: float = EFFECT_LEASE_SECONDS,
        wait_seconds: float = 0.0,
    ) -> list[EffectClaim]:
        """At most `limit` effects of these kinds that are due, the oldest first, leased to `owner`.

        Complete or fail each of them before its lease ends, or extend it; otherwise it is claimed again. Waits up to
        `wait_seconds` for the first one.
        """
        kinds = list(checked_items(kinds, "pass the kinds as a list"))
        owner = uuid.uuid4().hex if owner is None else owner
        request = ClaimEffects(kinds, owner, limit, lease_seconds, wait_seconds, self._universe)
        claimed = (self._transport.call(request)).effects
        return [EffectClaim(self._transport, self._universe, each, lease_seconds) for each in claimed]

    def claimed(
        self, world: str, height: int, number: int, *, fence: int, lease_seconds: float = EFFECT_LEASE_SECONDS
    ) -> EffectClaim:
        """An effect that another process claimed, by its fence: to complete it, to fail it, or to extend its lease.

        This makes no call, so `kind` and `params` are empty.
        """
        info = EffectInfo(checked_name("world", world), height, number, "", b"", b"", "inflight", 0, fence=fence)
        return EffectClaim(self._transport, self._universe, info, lease_seconds)

    def list(self, world: str | None = None, *, after: str = "", limit: int = 100) -> EffectPage:
        """Effects of a world, or of all worlds, that are pending or in flight; `next` is where the next page starts."""
        return self._transport.call(ListEffects(world, after, limit, self._universe))
