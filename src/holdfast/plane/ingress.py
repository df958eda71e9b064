"""Ingress: what `agent.data.push` asks of a plane."""

from typing import Protocol

from holdfast.layers.mailboxes import Address
from holdfast.names import checked_agent, checked_name
from holdfast.runtime.ingress.ingress import Ingress
from holdfast.wire.ingress import NewPush, Pushed


class HasIngress(Protocol):
    """A transport of a plane in this process."""

    @property
    def ingress(self) -> Ingress: ...


async def push(stores: HasIngress, sender: str, to: str, new: NewPush, *, universe: str) -> Pushed:
    """Accept a push from `sender` to `to`.

    Raises:
        InvalidName: an address is invalid, or in another universe.
        HoldfastError: as `Ingress.push`.
    """
    universe = checked_name("universe", universe)
    recipient = Address(universe, checked_agent(to, universe))
    return await stores.ingress.push(Address(universe, checked_agent(sender, universe)), recipient, new)
