"""Handlers of requests for a plane's identity."""

from typing import Protocol, runtime_checkable

import msgspec

from fastness.errors import PlaneInUse
from fastness.kv import Transaction, formats
from fastness.kv.formats import FORMAT, OLDEST_FORMAT
from fastness.layers import lineages, nodes
from fastness.layers.lineages import Identity
from fastness.plane.handlers import service, transaction
from fastness.plane.services import Services
from fastness.plane.stores import AnyStores, Served
from fastness.version import __version__
from fastness.wire.planes import MarkRestored, PlaneStatus, RaiseFormat, ShowPlane

_UNKNOWN = Identity("", "", 0, "")  # Tools may open a key space that has no identity.


@runtime_checkable
class SharedFormat(Protocol):
    """A key space whose format can be raised while nodes have it open."""

    def raise_format(self, to: int) -> None:
        """Raise the format from `to - 1` to `to`."""


@transaction
def show(tx: Transaction, request: ShowPlane) -> PlaneStatus:
    del request
    return _status(tx, lineages.load(tx) or _UNKNOWN)


@transaction
def mark_restored(tx: Transaction, request: MarkRestored) -> PlaneStatus:
    return _status(tx, lineages.begin(tx, "copied", until_ms=request.until_ms))


@service
def raise_format(stores: AnyStores, request: RaiseFormat) -> Served[PlaneStatus]:
    del request
    return stores.run_in_thread(_raise_format, stores.services)


def _raise_format(services: Services) -> PlaneStatus:
    """Raise the format one by one. A key space that is not shared is always in the newest one."""
    database = services.database
    if isinstance(database, SharedFormat):
        found = database.read(formats.format_of)
        formats.check_supported("The plane", found, oldest=OLDEST_FORMAT)
        for to in range(found + 1, FORMAT + 1):
            if older := database.read(_nodes_before, to):
                raise PlaneInUse(
                    f"These nodes do not know format {to}: {', '.join(older)}; upgrade or stop them, then try again"
                )
            database.raise_format(to)
            database.data_format = to
    return database.read(show, ShowPlane())


def _nodes_before(tx: Transaction, format: int) -> list[str]:
    """The nodes that are alive and do not know a format, each with its version and address or host."""
    return [
        f"{node.id} ({node.version} at {node.address or node.host})"
        for node in nodes.list_nodes(tx)
        if node.newest_format < format and node.alive
    ]


def _status(tx: Transaction, identity: Identity) -> PlaneStatus:
    return PlaneStatus(__version__, formats.format_of(tx), *msgspec.structs.astuple(identity))
