"""Effects: the external calls that worlds ask for, until they are complete or dead.

An effect is claimed under a lease with a fence, as a message of a queue is, carried out, and completed: its receipt
goes into the inbox of its world in the commit that removes it.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.limits import EFFECT_LEASE_SECONDS
from fastness.names import UNIVERSE
from fastness.wire.fields import (
    Hash,
    Limit,
    Name,
    Owner,
    RecordNumber,
    batch_of,
    short_text,
)
from fastness.wire.requests import Committed, Operation, Request, Route


class EffectInfo(msgspec.Struct, frozen=True):
    """An effect that is not complete. It is due at `due_ms`; while it is in flight, its lease ends then.

    `height` is that of the journal record that asks for it, and `number` counts the effects of that record.
    """

    world: str
    height: int
    number: int
    kind: str
    intent_hash: bytes
    params: bytes
    state: str  # pending, or inflight
    due_ms: int
    attempts: int = 0  # How many have begun, with the one in flight.
    max_attempts: int = 0
    fence: int = 0
    owner: str | None = None
    error: str | None = None  # Of the last attempt that failed.


class EffectPage(msgspec.Struct, frozen=True):
    """Effects in the order of their worlds, heights and numbers; `next` is where the next page starts."""

    effects: list[EffectInfo]
    next: str | None = None


class Attempted(msgspec.Struct, frozen=True):
    """What a failed attempt led to: when the next one is due, or that the effect is dead."""

    is_dead: bool
    due_ms: int | None = None


class ListEffects(Request[EffectPage], frozen=True, tag="effects.list"):
    """The effects of a world, or of all worlds of the universe."""

    operation = Operation(
        reads=True,
        http=(
            Route("GET", "/v1/effects", "List effects that are not complete."),
            Route("GET", "/v1/worlds/{world}/effects", "List the effects of a world that are not complete."),
        ),
    )

    world: Name | None = None
    after: str = ""
    limit: Limit = 100
    universe: Name = UNIVERSE


class ClaimEffects(Request[EffectPage], frozen=True, tag="effects.claim"):
    """Lease effects of the given kinds that are due, the oldest first; waits up to `wait_seconds` for one."""

    operation = Operation(http=(Route("POST", "/v1/effects/claim", "Lease effects that are due."),))

    kinds: Annotated[
        list[Annotated[str, short_text(limits.EFFECT_KIND_BYTES_MAX, least=0)]],
        Meta(min_length=1, max_length=limits.EFFECT_KINDS_MAX),
    ]
    owner: Owner
    limit: Annotated[int, Meta(ge=1, le=limits.EFFECT_CLAIMS_MAX)] = 1
    lease_seconds: Annotated[float, Meta(ge=0.001, le=limits.EFFECT_LEASE_SECONDS_MAX)] = EFFECT_LEASE_SECONDS
    wait_seconds: Annotated[float, Meta(ge=0, le=limits.HOST_WAIT_SECONDS_MAX)] = 0.0
    universe: Name = UNIVERSE


class ClaimedEffect(msgspec.Struct, frozen=True):
    """An effect, and the fence of a claim on it."""

    world: Name
    height: RecordNumber
    number: RecordNumber
    fence: int


class ReleaseEffects(Request[Committed], frozen=True, tag="effects.release"):
    """Give claimed effects back that have not begun: no attempt is counted. Those that are lost already are skipped."""

    operation = Operation(http=(Route("POST", "/v1/effects/release", "Give claimed effects back."),))

    effects: Annotated[list[ClaimedEffect], batch_of(limits.EFFECT_CLAIMS_MAX, "effects")]
    universe: Name = UNIVERSE


class CompleteEffect(Request[Committed], frozen=True, tag="effects.complete"):
    """Remove an effect and put its receipt into the inbox of its world, in one commit."""

    operation = Operation(
        stores=True,
        atomic=True,
        http=(Route("POST", "/v1/worlds/{world}/effects/{height}/{number}/complete", "Complete an effect."),),
    )

    world: Name
    height: RecordNumber
    number: RecordNumber
    fence: int
    payload: bytes = b""
    payload_blob: Hash | None = None
    adapter_id: str = ""
    signature: bytes = b""
    universe: Name = UNIVERSE


class FailEffect(Request[Attempted], frozen=True, tag="effects.fail"):
    """Record a failed attempt. The effect is due again after the delay (by default a back-off), or dead.

    A dead effect is removed, and its receipt has the error: after the last attempt, or with `is_final`.
    """

    operation = Operation(
        http=(Route("POST", "/v1/worlds/{world}/effects/{height}/{number}/fail", "Record a failed attempt."),)
    )

    world: Name
    height: RecordNumber
    number: RecordNumber
    fence: int
    error: str
    delay_seconds: Annotated[float, Meta(ge=0, le=limits.EFFECT_DELAY_SECONDS_LONGEST)] | None = None
    is_final: bool = False
    universe: Name = UNIVERSE


class ExtendEffect(Request[Committed], frozen=True, tag="effects.extend"):
    """Extend the lease of an effect to at least `lease_seconds` from now."""

    operation = Operation(
        http=(Route("POST", "/v1/worlds/{world}/effects/{height}/{number}/extend", "Extend the lease of an effect."),),
    )

    world: Name
    height: RecordNumber
    number: RecordNumber
    fence: int
    lease_seconds: Annotated[float, Meta(ge=0.001, le=limits.EFFECT_LEASE_SECONDS_MAX)] = EFFECT_LEASE_SECONDS
    universe: Name = UNIVERSE
