"""Sends between universes: an event from a claimed world to a world of another universe, if both universes allow it.

    (u, universe, "send-policy")  ->  the universes that its worlds send to, and those that they accept events from

Nothing crosses by default. The claim and both policies are read in the transaction that enqueues the event, so a send
that is committed was allowed at that time.
"""

from functools import lru_cache
from typing import Final

import msgspec

from fastness.errors import InvalidArgument, InvalidName, PayloadTooLarge, SendRefused
from fastness.kv import Subspace, Transaction
from fastness.layers import hosting, inboxes
from fastness.layers.worlds import World
from fastness.limits import SEND_BYTES_MAX
from fastness.wire.hosting import SendPolicy
from fastness.wire.inboxes import DomainEvent
from fastness.wire.runs import RUN_PREFIX

ALL: Final = "*"  # Every universe.
_NONE: Final = SendPolicy()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SendPolicy).decode


def send(tx: Transaction, sender: World, receiver: World, event: DomainEvent, *, owner: str, fence: int) -> None:
    """Enqueue an event of a claimed world in a world of another universe. The event has its sender.

    Raises:
        InvalidArgument, InvalidName: the universes are the same, or the sending world has no address.
        Fenced: the host does not hold the sending world.
        SendRefused: a universe does not allow it, or the receiver is the world of a run.
        PayloadTooLarge: the event is too large.
        WorldNotFound, WorldNotActive: the receiver does not exist, or is archived.
    """
    if sender.universe == receiver.universe:
        raise InvalidArgument(f"World {receiver.name} is in the same universe; put an item into its inbox")
    if "@" in sender.name:  # Its address would be read as that of a world of a universe with another name.
        raise InvalidName(f"World {sender.name} cannot send to another universe: its name has an @")
    hosting.require_claim(tx, sender, owner=owner, fence=fence)
    _require_allowed(tx, sender.universe, receiver.universe)
    if receiver.name.startswith(RUN_PREFIX):
        # Its inbox has what a run trusts: its start, signals, and the results of its children.
        raise SendRefused(f"{receiver.name} is the world of a run, which accepts nothing from other universes")
    if len(event.payload) > SEND_BYTES_MAX:
        raise PayloadTooLarge(
            f"A send to another universe has at most {SEND_BYTES_MAX} bytes, not {len(event.payload)}: blobs belong to "
            "one universe; send several events"
        )
    named = msgspec.structs.replace(event, sender=f"{sender.name}@{sender.universe}")
    inboxes.enqueue(tx, receiver, named, is_checked=True, payload_bytes_max=SEND_BYTES_MAX)


def policy_of(tx: Transaction, universe: str) -> SendPolicy:
    """Which sends between universes a universe allows."""
    stored = tx.get(_key(universe))
    return _NONE if stored is None else _decode(stored)


def set_policy(
    tx: Transaction, universe: str, *, sends_to: list[str] | None, accepts_from: list[str] | None
) -> SendPolicy:
    """Replace the lists of a universe's policy; None keeps one.

    Raises:
        InvalidName: something is no name of a universe.
        InvalidArgument: there are too many names.
    """
    before = policy_of(tx, universe)
    after = SendPolicy(
        before.sends_to if sends_to is None else sorted(set(sends_to)),
        before.accepts_from if accepts_from is None else sorted(set(accepts_from)),
    )
    tx.put(_key(universe), _encode(after))
    return after


def _require_allowed(tx: Transaction, source: str, target: str) -> None:
    if not _has(policy_of(tx, source).sends_to, target):
        raise SendRefused(
            f"Universe {source} does not allow sends to {target}; add {target} to sends_to in {source} "
            f"(plane.hosting.set_policy, or `fastness world policy --sends-to {target}`)"
        )
    if not _has(policy_of(tx, target).accepts_from, source):
        raise SendRefused(
            f"Universe {target} does not accept sends from {source}; add {source} to accepts_from in {target} "
            f"(plane.hosting.set_policy, or `fastness world policy --accepts-from {source}`)"
        )


def _has(names: list[str], universe: str) -> bool:
    return universe in names or ALL in names


@lru_cache(maxsize=256)
def _key(universe: str) -> bytes:
    return Subspace("u", universe).key("send-policy")
