"""Transports: what carries a handle's requests, to the plane in this process or to a server."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from holdfast.errors import Fenced
from holdfast.tiers import Tier
from holdfast.wire.leases import LeaseProof
from holdfast.wire.queues import MessageLease
from holdfast.wire.requests import Answer, Request

Result = TypeVar("Result")


class LeasedMessage(Protocol):
    """A received message whose lease is extended until it is settled or lost."""

    settled: bool
    lost: bool
    expires_ms: int

    @property
    def lease(self) -> MessageLease: ...

    def mark_refused(self, code: str) -> None: ...


class HeldLease(Protocol):
    """A lease in a `with` block, which is renewed."""

    expires_ms: int


class HeldLeaseRenewal(Protocol):
    """The automatic renewal of a lease in a `with` block."""

    def stop(self) -> None: ...

    @property
    def loss(self) -> Fenced | None:
        """Why the lease is lost; None while it is certainly held. A lost lease stays lost."""
        ...

    def extend_until(self, held_until: float) -> None:
        """Record a renewal that the holder has requested itself."""
        ...


class LeaseRenewer(Protocol):
    """Renews the leases of received messages, and those in `with` blocks, in the background."""

    def start(
        self, messages: Sequence[LeasedMessage], universe: str, queue: str, *, seconds: float, cap_seconds: float
    ) -> None:
        """Extend the leases of messages by `seconds` again and again, for `cap_seconds` at most."""
        ...

    def hold(self, lease: HeldLease, proof: LeaseProof, *, seconds: float, renewed_at: float) -> HeldLeaseRenewal:
        """Renew a lease for `seconds` again and again until the renewal is stopped.

        `renewed_at` is when its last renewal was requested, of the monotonic clock.
        """
        ...


class HeldLock(Protocol):
    """Locks that the caller holds; released by `release`, or at the end of a `with` block."""

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The level and name of each lock."""
        ...

    def release(self) -> None:
        """Release the locks. Releasing twice is fine."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LockStats(Protocol):
    """Lock statistics of one level: totals since the plane was opened, and current counts."""

    @property
    def acquisitions(self) -> int:
        """How many locks were acquired."""
        ...

    @property
    def waits(self) -> int:
        """How many acquisitions had to wait."""
        ...

    @property
    def wait_seconds_total(self) -> float:
        """The time that all acquisitions waited."""
        ...

    @property
    def wait_seconds_max(self) -> float:
        """The longest wait."""
        ...

    @property
    def timeouts(self) -> int:
        """How many acquisitions timed out."""
        ...

    @property
    def violations(self) -> int:
        """How many acquisitions were refused because of the lock order."""
        ...

    @property
    def holders(self) -> int:
        """How many locks are held now."""
        ...

    @property
    def waiting(self) -> int:
        """How many acquisitions wait now."""
        ...


class LockTable(Protocol):
    """The ordered locks of one universe and its agents, among the threads and tasks of one process."""

    def acquire(self, path: Sequence[str], mode: str = "X", *, timeout_seconds: float | None = None) -> HeldLock: ...

    async def acquire_async(
        self, path: Sequence[str], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> HeldLock: ...

    def acquire_all(
        self, paths: Sequence[Sequence[str]], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> HeldLock: ...

    async def acquire_all_async(
        self, paths: Sequence[Sequence[str]], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> HeldLock: ...

    def stats(self) -> Mapping[str, LockStats]: ...


class Transport(Protocol):
    """Executes requests while the caller's thread waits."""

    def call(self, request: Request[Answer]) -> Answer:
        """The answer to `request`."""
        ...

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        """The answer to a request whose body is streamed."""
        ...

    def receive(self, request: Request[Answer]) -> Iterator[bytes]:
        """The body of the answer, as a stream."""
        ...

    def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        """Run `work(tx, *args, **kwargs)` as one commit.

        Raises:
            NotEmbedded: the plane is in another process, where `work` cannot run.
        """
        ...

    def within(self, connection: object) -> "Transport":
        """A transport that executes requests in the open transaction of the caller's own connection.

        Raises:
            NotEmbedded: the plane is in another process.
            Unsupported: the plane is not on PostgreSQL.
        """
        ...

    def reopen(self) -> None:
        """Open the key space again after a failure.

        Raises:
            NotEmbedded: the plane is in another process, which reopens it by itself.
        """
        ...

    @property
    def lease_renewer(self) -> LeaseRenewer:
        """Renews the leases of received messages, and those in `with` blocks."""
        ...

    @property
    def locks(self) -> Callable[[str], LockTable] | None:
        """The lock table of a universe; None if the plane is in another process."""
        ...

    @property
    def execute(self) -> Callable[[Any, Request[Any]], Any]:
        """Executes a request inside a transaction that `transact` runs."""
        ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Executes requests without blocking the caller's event loop."""

    async def call(self, request: Request[Answer]) -> Answer: ...

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer: ...

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]: ...

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result: ...

    def within(self, connection: object) -> "AsyncTransport": ...

    async def reopen(self) -> None: ...

    @property
    def lease_renewer(self) -> LeaseRenewer: ...

    @property
    def locks(self) -> Callable[[str], LockTable] | None: ...

    @property
    def execute(self) -> Callable[[Any, Request[Any]], Any]: ...

    async def close(self) -> None: ...
