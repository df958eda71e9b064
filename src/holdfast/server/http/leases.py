"""Leases over HTTP."""

from typing import Any, Final

from holdfast.limits import LEASE_TTL_SECONDS
from holdfast.server.http.endpoints import Endpoint, noun
from holdfast.server.http.request_context import Visit
from holdfast.tiers import Tier
from holdfast.wire.leases import (
    AcquireLease,
    CheckLease,
    DescribeLease,
    KeepLease,
    LeaseProof,
    ListLeases,
    ReleaseLease,
)

_PROOF: Final = ("key", "lease_id", "fencing_token", "txn_id", "universe")


def nest_lease(visit: Visit, given: dict[str, Any]) -> None:
    """A lease may be shown flat, as the original has it, or as the `lease` of the request."""
    del visit
    if "lease" not in given:
        given["lease"] = {name: given.pop(name) for name in _PROOF if name in given}


class ProofBody(LeaseProof, frozen=True, kw_only=True):
    """A lease that the caller holds."""

    tier: Tier = Tier.CRITICAL


class KeepBody(ProofBody, frozen=True, kw_only=True):
    """A lease, and how long it shall last from now."""

    ttl_seconds: float = LEASE_TTL_SECONDS


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    noun("POST", "/v1/lock/acquire", AcquireLease, "Acquire a lease, waiting in line if asked to", of="leases"),
    noun(
        "POST",
        "/v1/lock/keepalive",
        KeepLease,
        "Let a lease last longer",
        of="leases",
        fill=nest_lease,
        takes=KeepBody,
    ),
    noun("POST", "/v1/lock/release", ReleaseLease, "Give a lease back", of="leases", fill=nest_lease, takes=ProofBody),
    noun(
        "POST",
        "/v1/lock/check",
        CheckLease,
        "See whether a lease holds",
        of="leases",
        fill=nest_lease,
        takes=ProofBody,
    ),
    noun("POST", "/v1/lock/describe", DescribeLease, "Who holds a lease, and how many wait", of="leases"),
    noun("GET", "/v1/locks", ListLeases, "Leases that are held", of="leases"),
)
