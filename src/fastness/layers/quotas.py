"""Quotas of universes.

("quotas", "version")              ->  changes with every quota, so that servers see it with one small read
("quotas", "universe", universe)   ->  a Quota; universes without limits have none
"""

from typing import Any, Protocol, cast

import msgspec

from fastness.errors import Busy
from fastness.kv import Database, Subspace, Transaction, pages
from fastness.limits import QUOTAS_MAX
from fastness.wire.quotas import Quota
from fastness.wire.requests import Request

SUBSPACE = Subspace("quotas")
_VERSION = SUBSPACE.key("version")
_UNIVERSES = SUBSPACE.at("universe")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Quota).decode


class TransactionQuotas(Protocol):
    """The quotas of all universes, as one transaction sees them. See `runtime.quotas`."""

    def admit_messages(self, tx: Transaction, universe: str, count: int, *, unsaved: int = 0) -> None:
        """Count messages that the transaction will add to queues; raise QuotaExceeded if they are too many.

        `unsaved` is how many it was admitted before, and has not counted in the key space yet.
        """

    def admit_bytes(self, universe: str, size: int) -> None:
        """Count bytes that are stored outside the key space; raise QuotaExceeded if they are too many."""

    def check_size(self, universe: str, size: int) -> None:
        """Raise QuotaExceeded if so many bytes are more than what is left of a universe's."""

    def check_request(self, request: Request[Any]) -> None:
        """Raise QuotaExceeded if a request that adds data is larger than what is left of a universe's bytes."""

    def check_written(self, tx: Transaction, request: Request[Any]) -> None:
        """Raise QuotaExceeded if the transaction has written more than what is left of the bytes of its universes."""


def quotas_of(counted: Database | Transaction) -> TransactionQuotas:
    """The quotas that a transaction obeys. Its `usage` is not None: otherwise no universe has a quota."""
    return cast("TransactionQuotas", counted.usage)


def set_quota(tx: Transaction, universe: str, quota: Quota) -> Quota:
    """Store the quota of a universe in place of its earlier one. An empty one is not stored.

    Raises:
        Busy: as many universes have quotas as allowed.
    """
    key = _UNIVERSES.key(universe)
    stored = tx.get(key)
    if stored is not None and _decode(stored) == quota:
        return quota
    if quota.is_empty:
        if stored is None:
            return quota
        tx.delete(key)
    else:
        if stored is None and len(all_quotas(tx)) >= QUOTAS_MAX:
            raise Busy(f"{QUOTAS_MAX} universes have quotas, the maximum; remove some first")
        tx.put(key, _encode(quota))
    tx.put(_VERSION, tx.new_id_bytes())
    return quota


def quota_of(tx: Transaction, universe: str) -> Quota:
    """The quota of a universe; an empty one if it has none."""
    stored = tx.get(_UNIVERSES.key(universe))
    return Quota() if stored is None else _decode(stored)


def version(tx: Transaction) -> bytes:
    """Changes with every quota; empty until the first one is set."""
    return tx.get(_VERSION) or b""


def all_quotas(tx: Transaction) -> dict[str, Quota]:
    """The quotas by universe."""
    return {_UNIVERSES.unpack(key)[0]: _decode(value) for page in pages(tx, *_UNIVERSES.range()) for key, value in page}
