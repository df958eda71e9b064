"""Handlers of hosting requests: how hosts claim worlds and commit turns."""

import msgspec

from fastness.errors import BatchTooLarge, EmptyBatch, InvalidArgument
from fastness.kv import Transaction
from fastness.layers import leases, runs, sends, turns
from fastness.layers.worlds import World
from fastness.limits import (
    DELAY_SECONDS_MAX,
    HOST_LEASE_SECONDS_MAX,
    HOST_PROGRAMS_MAX,
    HOST_WAIT_SECONDS_MAX,
    HOSTED_WORLDS_MAX,
)
from fastness.names import checked_name
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
from fastness.plane.worlds import world_of
from fastness.wire.hosting import (
    AsideItems,
    ClaimedWorlds,
    ClaimWorlds,
    CommitTurn,
    DescribeHosting,
    FailTurn,
    GetSendPolicy,
    HostingInfo,
    ListAside,
    ReleaseWorlds,
    RenewedWorlds,
    RenewWorlds,
    ResumeWorld,
    RetryAside,
    SendPolicy,
    SendToWorld,
    SetProgram,
    SetSendPolicy,
    TurnCommitted,
)
from fastness.wire.inboxes import DomainEvent
from fastness.wire.requests import Committed


@service
def claim(stores: AnyStores, request: ClaimWorlds) -> Served[ClaimedWorlds]:
    if len(request.programs) > HOST_PROGRAMS_MAX:
        raise InvalidArgument(f"A claim names at most {HOST_PROGRAMS_MAX} programs, not {len(request.programs)}")
    if not 0 < request.limit <= HOSTED_WORLDS_MAX:
        raise InvalidArgument(f"limit is {request.limit}; one claim returns 1 to {HOSTED_WORLDS_MAX} worlds")
    if not 0 <= request.wait_seconds <= HOST_WAIT_SECONDS_MAX:
        raise InvalidArgument(f"wait_seconds is {request.wait_seconds}; give 0 to {HOST_WAIT_SECONDS_MAX:.0f}")
    leases.check_owner(request.owner)
    checked_name("universe", request.universe)
    programs = sorted({checked_name("program", program) for program in request.programs})
    _lease_ms(request.lease_seconds)  # Refused if it is out of bounds.
    return stores.hosting.claim(msgspec.structs.replace(request, programs=programs))


@transaction
def commit(tx: Transaction, request: CommitTurn) -> TurnCommitted:
    return turns.commit_turn(tx, world_of(request), request, lease_ms=_lease_ms(request.lease_seconds))


@transaction
def fail(tx: Transaction, request: FailTurn) -> Committed:
    if not 0 <= request.delay_seconds <= DELAY_SECONDS_MAX:
        raise InvalidArgument(f"delay_seconds is {request.delay_seconds}; give 0 to {DELAY_SECONDS_MAX:.0f}")
    world = world_of(request)
    turns.fail_turn(tx, world, request)
    runs.follow_world(tx, world)
    return Committed(request.tier)


@transaction
def send(tx: Transaction, request: SendToWorld) -> Committed:
    receiver = World(checked_name("universe", request.to_universe), checked_name("world", request.to))
    event = DomainEvent(schema=request.schema, key=request.key, payload=request.payload)
    sends.send(tx, world_of(request), receiver, event, owner=request.owner, fence=request.fence)
    return Committed(request.tier)


@transaction
def get_policy(tx: Transaction, request: GetSendPolicy) -> SendPolicy:
    return sends.policy_of(tx, checked_name("universe", request.universe))


@transaction
def set_policy(tx: Transaction, request: SetSendPolicy) -> SendPolicy:
    universe = checked_name("universe", request.universe)
    return sends.set_policy(tx, universe, sends_to=request.sends_to, accepts_from=request.accepts_from)


@service
def renew(stores: AnyStores, request: RenewWorlds) -> Served[RenewedWorlds]:
    _check_claims(request.universe, [name for name, _ in request.worlds])
    claims = [(World(request.universe, name), fence) for name, fence in request.worlds]
    return stores.hosting.renew(claims, owner=request.owner, lease_ms=_lease_ms(request.lease_seconds))


@service
def release(stores: AnyStores, request: ReleaseWorlds) -> Served[Committed]:
    _check_claims(request.universe, [each.world for each in request.worlds])
    return stores.hosting.release(request.universe, request.worlds, owner=request.owner)


@transaction
def set_program(tx: Transaction, request: SetProgram) -> HostingInfo:
    hosted = turns.set_program(tx, world_of(request), request.program)
    runs.follow_world(tx, world_of(request))
    return hosted


@transaction
def describe(tx: Transaction, request: DescribeHosting) -> HostingInfo:
    return turns.describe(tx, world_of(request))


@transaction
def resume(tx: Transaction, request: ResumeWorld) -> HostingInfo:
    hosted = turns.resume(tx, world_of(request))
    runs.follow_world(tx, world_of(request))
    return hosted


@transaction
def list_aside(tx: Transaction, request: ListAside) -> AsideItems:
    return AsideItems(turns.aside(tx, world_of(request), after=request.after, limit=request.limit))


@transaction
def retry_aside(tx: Transaction, request: RetryAside) -> Committed:
    turns.retry_aside(tx, world_of(request), request.sequence, drop=request.drop)
    return Committed(request.tier)


def _check_claims(universe: str, names: list[str]) -> None:
    if not names:
        raise EmptyBatch("The batch has no worlds; name at least one")
    if len(names) > HOSTED_WORLDS_MAX:
        raise BatchTooLarge(f"One batch has at most {HOSTED_WORLDS_MAX} worlds, not {len(names)}; split it")
    checked_name("universe", universe)
    for name in names:
        checked_name("world", name)


def _lease_ms(seconds: float) -> int:
    if not 0.001 <= seconds <= HOST_LEASE_SECONDS_MAX:  # NaN fails this too.
        raise InvalidArgument(f"lease_seconds is {seconds}; give 0.001 to {HOST_LEASE_SECONDS_MAX:.0f}")
    return round(seconds * 1_000)
