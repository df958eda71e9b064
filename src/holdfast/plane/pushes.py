"""Pushes: what a door asks of the ingress."""

from typing import Any

from holdfast.layers.mailboxes import Address
from holdfast.names import checked_agent, checked_name
from holdfast.wire.ingress import NewPush, Pushed


async def push(transport: Any, sender: str, to: str, new: NewPush, *, universe: str) -> Pushed:
    """Accept what `sender` pushes to `to`.

    Raises:
        InvalidName: an address is none, or is in another universe.
        HoldfastError: as `Ingress.push`.
    """
    universe = checked_name("universe", universe)
    recipient = Address(universe, checked_agent(to, universe))
    pushed: Pushed = await transport.ingress.push(Address(universe, checked_agent(sender, universe)), recipient, new)
    return pushed
