"""Handlers of hosting requests: how hosts claim worlds and commit turns."""

import msgspec

from fastness.kv import Transaction
from fastness.layers import runs, sends, turns
from fastness.layers.worlds import World
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
    return stores.hosting.claim(msgspec.structs.replace(request, programs=sorted(set(request.programs))))


@transaction
def commit(tx: Transaction, request: CommitTurn) -> TurnCommitted:
    return turns.commit_turn(tx, world_of(request), request, lease_ms=round(request.lease_seconds * 1_000))


@transaction
def fail(tx: Transaction, request: FailTurn) -> Committed:
    world = world_of(request)
    turns.fail_turn(tx, world, request)
    runs.follow_world(tx, world)
    return Committed(request.tier)


@transaction
def send(tx: Transaction, request: SendToWorld) -> Committed:
    receiver = World(request.to_universe, request.to)
    event = DomainEvent(schema=request.schema, key=request.key, payload=request.payload)
    sends.send(tx, world_of(request), receiver, event, owner=request.owner, fence=request.fence)
    return Committed(request.tier)


@transaction
def get_policy(tx: Transaction, request: GetSendPolicy) -> SendPolicy:
    return sends.policy_of(tx, request.universe)


@transaction
def set_policy(tx: Transaction, request: SetSendPolicy) -> SendPolicy:
    return sends.set_policy(tx, request.universe, sends_to=request.sends_to, accepts_from=request.accepts_from)


@service
def renew(stores: AnyStores, request: RenewWorlds) -> Served[RenewedWorlds]:
    claims = [(World(request.universe, name), fence) for name, fence in request.worlds]
    return stores.hosting.renew(claims, owner=request.owner, lease_ms=round(request.lease_seconds * 1_000))


@service
def release(stores: AnyStores, request: ReleaseWorlds) -> Served[Committed]:
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
