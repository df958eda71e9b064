"""Handlers of requests for a plane's identity."""

from holdfast.kv import Transaction
from holdfast.kv.formats import FORMAT
from holdfast.layers import lineages
from holdfast.layers.lineages import Identity
from holdfast.plane.handlers import transaction
from holdfast.version import __version__
from holdfast.wire.planes import MarkRestored, PlaneParent, PlaneStatus, ShowPlane

_UNKNOWN = Identity("", "", 0, "")  # Tools may open a key space that has no identity.


@transaction
def show(tx: Transaction, request: ShowPlane) -> PlaneStatus:
    del request
    return _status(lineages.load(tx) or _UNKNOWN)


@transaction
def mark_restored(tx: Transaction, request: MarkRestored) -> PlaneStatus:
    return _status(lineages.begin(tx, "copied", until_ms=request.until_ms))


def _status(identity: Identity) -> PlaneStatus:
    return PlaneStatus(
        __version__,
        FORMAT,
        identity.plane,
        identity.lineage,
        identity.since_ms,
        identity.cause,
        [PlaneParent(parent.lineage, parent.until_ms) for parent in identity.parents],
    )
