"""State documents: one value per key, guarded by leases and ETags."""

import msgspec

from fastness.names import UNIVERSE
from fastness.wire.canonical import check_canonical
from fastness.wire.fields import CorrelationId, Key, Name
from fastness.wire.leases import LeaseProof
from fastness.wire.requests import Operation, Request, Route


class StateDocument(msgspec.Struct, frozen=True):
    """A state document: its value as canonical CBOR, and the ETag of this version of it."""

    value: bytes
    etag: str
    version: int
    updated_ms: int
    correlation_id: str | None


class FoundState(msgspec.Struct, frozen=True):
    """The document of a key, if it exists."""

    state: StateDocument | None


class UpdatedState(msgspec.Struct, frozen=True):
    """The ETag and the number of the version that was written."""

    etag: str
    version: int


class RemovedState(msgspec.Struct, frozen=True):
    """Whether the document existed."""

    removed: bool


class GetState(Request[FoundState], frozen=True, tag="states.get"):
    operation = Operation(
        reads=True,
        stale=True,
        http=(Route("POST", "/v1/state/get", "Read the state document of a key, with its ETag."),),
    )

    key: Key
    universe: Name = UNIVERSE


class UpdateState(Request[UpdatedState], frozen=True, tag="states.update"):
    """Write a document. `if_match`: its current ETag ("*": any); `if_absent`: it must not exist."""

    operation = Operation(
        stores=True,
        atomic=True,
        http=(Route("POST", "/v1/state/update", "Write a state document, guarded by a lease or an ETag."),),
    )

    key: Key
    value: bytes
    lease: LeaseProof | None = None
    if_match: str | None = None
    if_absent: bool = False
    correlation_id: CorrelationId | None = None
    universe: Name = UNIVERSE

    def check(self) -> None:
        check_canonical(self.value)


class RemoveState(Request[RemovedState], frozen=True, tag="states.remove"):
    operation = Operation(atomic=True, http=(Route("POST", "/v1/state/remove", "Remove a state document."),))

    key: Key
    lease: LeaseProof | None = None
    if_match: str | None = None
    universe: Name = UNIVERSE
