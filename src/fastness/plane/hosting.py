"""Handlers of hosting requests: how hosts claim worlds and commit turns."""

from typing import Protocol

from fastness.kv import Transaction
from fastness.layers import runs, sends, turns
from fastness.layers.worlds import World
from fastness.plane.handlers import service, transaction
from fastness.plane.stores import AnyStores, Served
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


class _OfWorld(Protocol):
    @property
    def world(self) -> str: ...

    @property
    def universe(self) -> str: ...


@service
def claim(stores: AnyStores, request: ClaimWorlds) -> Served[ClaimedWorlds]:
    return stores.hosting.claim(
        request.universe,
        sorted(set(request.programs)),
        owner=request.owner,
        limit=request.limit,
        lease_ms=round(request.lease_seconds * 1_000),
        wait_ms=round(request.wait_seconds * 1_000),
    )


@transaction
def commit(tx: Transaction, request: CommitTurn) -> TurnCommitted:
    return turns.commit_turn(tx, _world(request), request, lease_ms=round(request.lease_seconds * 1_000))


@transaction
def fail(tx: Transaction, request: FailTurn) -> Committed:
    world = _world(request)
    turns.fail_turn(
        tx,
        world,
        owner=request.owner,
        fence=request.fence,
        error=request.error,
        delay_ms=round(request.delay_seconds * 1_000),
        is_stopped=request.is_stopped,
    )
    runs.follow_world(tx, world)
    return Committed(request.tier)


@transaction
def send(tx: Transaction, request: SendToWorld) -> Committed:
    receiver = World(request.to_universe, request.to)
    event = DomainEvent(schema=request.schema, key=request.key, payload=request.payload)
    sends.send(tx, _world(request), receiver, event, owner=request.owner, fence=request.fence)
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
    hosted = turns.set_program(tx, _world(request), request.program)
    runs.follow_world(tx, _world(request))
    return hosted


@transaction
def describe(tx: Transaction, request: DescribeHosting) -> HostingInfo:
    return turns.describe(tx, _world(request))


@transaction
def resume(tx: Transaction, request: ResumeWorld) -> HostingInfo:
    hosted = turns.resume(tx, _world(request))
    runs.follow_world(tx, _world(request))
    return hosted


@transaction
def list_aside(tx: Transaction, request: ListAside) -> AsideItems:
    return AsideItems(turns.aside(tx, _world(request), after=request.after, limit=request.limit))


@transaction
def retry_aside(tx: Transaction, request: RetryAside) -> Committed:
    turns.retry_aside(tx, _world(request), request.sequence, drop=request.drop)
    return Committed(request.tier)


def _world(request: _OfWorld) -> World:
    return World(request.universe, request.world)
