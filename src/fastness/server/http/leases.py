"""Leases over HTTP."""

from typing import Any, Final

from fastness.limits import LEASE_TTL_SECONDS
from fastness.server.http.endpoints import Endpoint, operation
from fastness.server.http.request_context import RequestContext
from fastness.tiers import Tier
from fastness.wire.fields import LeaseTtlSeconds
from fastness.wire.leases import CheckLease, KeepLease, LeaseProof, ReleaseLease

_PROOF: Final = ("key", "lease_id", "fence", "txn_id", "universe")


def _nest_lease(context: RequestContext, given: dict[str, Any]) -> None:
    """Accept the fields of a lease at the top level as well as inside `lease`."""
    del context
    if "lease" not in given:
        given["lease"] = {name: given.pop(name) for name in _PROOF if name in given}


class ProofBody(LeaseProof, frozen=True, kw_only=True):
    """A lease that the caller holds."""

    tier: Tier = Tier.CRITICAL


class KeepBody(ProofBody, frozen=True, kw_only=True):
    """A lease, and its new duration from now on."""

    ttl_seconds: LeaseTtlSeconds = LEASE_TTL_SECONDS


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    operation(
        "POST",
        "/v1/lease/keepalive",
        KeepLease,
        "Extend a lease.",
        tag="leases",
        prepare=_nest_lease,
        body_type=KeepBody,
    ),
    operation(
        "POST",
        "/v1/lease/release",
        ReleaseLease,
        "Release a lease.",
        tag="leases",
        prepare=_nest_lease,
        body_type=ProofBody,
    ),
    operation(
        "POST",
        "/v1/lease/check",
        CheckLease,
        "Check whether a lease is still held.",
        tag="leases",
        prepare=_nest_lease,
        body_type=ProofBody,
    ),
)
