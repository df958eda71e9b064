"""Leases, locks, and documents that only a holder, or whoever saw the latest version, may change."""

from holdfast.errors.families import Busy, Conflict, HoldfastError, Retry, Validation


class Fenced(HoldfastError):
    """The lease that came with a write does not entitle to it; nothing was written. Acquire it again, then look."""

    code = "fenced"


class LeaseRequired(Fenced):
    """Somebody holds a lease on this, so a write must name it."""

    code = "lease_required"


class LeaseConflict(Fenced):
    """Another lease has taken the place of this one."""

    code = "lease_conflict"


class LeaseExpired(Fenced):
    """The lease ran out before the write."""

    code = "lease_expired"


class FencingMismatch(Fenced):
    """The lease was acquired again since: this copy has an old fence."""

    code = "fencing_mismatch"


class TxnMismatch(Fenced):
    """The lease belongs to another transaction of its owner's."""

    code = "txn_mismatch"


class LeaseHeld(Conflict):
    """Somebody else's lease has not expired."""

    code = "lease_held"
    retry = Retry.LATER

    def __init__(self, key: str, *, owner: str, expires_ms: int, now_ms: int) -> None:
        super().__init__(
            f"{owner} holds {key} for another {max(expires_ms - now_ms, 0) / 1_000:.3f} s; give wait_seconds to wait"
        )
        self.key = key
        self.owner = owner
        self.expires_ms = expires_ms
        self.now_ms = now_ms


class CasMismatch(Conflict):
    """Somebody changed the document since its ETag was read."""

    code = "cas_mismatch"

    def __init__(self, key: str, *, current_etag: str | None) -> None:
        there = "is not there any more" if current_etag is None else f"has ETag {current_etag} now"
        super().__init__(f"State {key} {there}; get it again, then decide")
        self.current_etag = current_etag


class VersionConflict(Conflict):
    """Somebody changed the entity since its version was read."""

    code = "version_conflict"

    def __init__(self, kind: str, id: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{kind} {id} has version {actual}, not {expected}; get it again, then decide")
        self.expected = expected
        self.actual = actual


class LockOrderViolation(Validation):
    """A lock was asked for against the declared order; waiting for it could have become a deadlock."""

    code = "lock_order_violation"


class LockTimeout(Busy):
    """Others kept the lock for as long as the caller wanted to wait."""

    code = "lock_timeout"
