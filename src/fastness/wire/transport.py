"""Transports: what carries a handle's requests, to the plane in this process or to a server."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from fastness.errors import Fenced
from fastness.tiers import Tier
from fastness.wire.ingress import DataPush
from fastness.wire.leases import LeaseProof
from fastness.wire.locks import LockProof, LockSession
from fastness.wire.queues import MessageLease
from fastness.wire.requests import Answer, Request

Result = TypeVar("Result")
OnDataPush = Callable[[DataPush], object]  # Is called with every accepted push.


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

    def hold(
        self, lease: HeldLease, proof: LeaseProof | LockSession, *, seconds: float, renewed_at: float
    ) -> HeldLeaseRenewal:
        """Renew a lease for `seconds` again and again until the renewal is stopped.

        `renewed_at` is when its last renewal was requested, of the monotonic clock.
        """
        ...


class ProvenLock(Protocol):
    """Locks that a caller holds, and how a write can check that it still holds them."""

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The level and name of each lock, in lock order."""
        ...

    @property
    def fence(self) -> int | None:
        """The fence of the first lock, which grows with every grant of it; None for a lock of this process."""
        ...

    @property
    def fences(self) -> Mapping[tuple[str, str], int]:
        """The fence of each lock, by its path; empty for locks of this process."""
        ...

    @property
    def proof(self) -> LockProof | None:
        """What proves to the plane that the locks are held; None for locks of this process."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the locks ended before they were released, so that others may hold them: stop the work."""
        ...

    def check(self) -> None:
        """Return if the locks are held, as far as this process knows.

        Raises:
            Fenced: they are lost, or were released.
        """
        ...


class HeldLock(ProvenLock, Protocol):
    """Locks that the caller holds; released by `release`, or at the end of a `with` block."""

    def release(self) -> None:
        """Release the locks. Releasing twice is fine."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class AsyncHeldLock(ProvenLock, Protocol):
    """Locks that the caller holds; released by `release`, or at the end of an `async with` block."""

    async def release(self) -> None:
        """Release the locks. Releasing twice is fine."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class HeldLockSession(Protocol):
    """The session of one caller that holds locks which processes share."""

    seconds: float
    unreleased: set[str]

    @property
    def identity(self) -> LockSession: ...

    @property
    def owner(self) -> str: ...

    @property
    def has_claims(self) -> bool: ...

    @property
    def loss(self) -> Fenced | None:
        """Why its locks are lost; None while they are certainly held."""
        ...

    def add(self, claim: str, *, seconds: float, renewed_at: float) -> None:
        """Register a claim that was granted, and renew the session from now on."""
        ...

    def remove(self, claim: str) -> None:
        """Forget a claim, which is to be released."""
        ...


class LockSessions(Protocol):
    """The sessions of locks that the callers of this process hold."""

    def find(self, universe: str) -> HeldLockSession | None:
        """The session of the calling task or thread; None if it holds no locks."""
        ...

    def find_async(self, universe: str) -> HeldLockSession | None:
        """`find` for a coroutine: without a task it is a caller of its own."""
        ...

    def find_id(self, universe: str) -> str | None:
        """The id of the caller's session, for the writes that its locks must not exclude.

        Raises:
            Fenced: its locks are lost, so others may have changed what the caller has read under them.
        """
        ...

    def begin(self, universe: str) -> HeldLockSession:
        """A new session of the caller, which is registered with its first claim."""
        ...

    def begin_async(self, universe: str) -> HeldLockSession:
        """`begin` for a coroutine."""
        ...


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
    """The ordered locks of one universe, among the threads and tasks of one process."""

    def acquire(self, path: Sequence[str], mode: str = "X", *, timeout_seconds: float | None = None) -> HeldLock: ...

    async def acquire_async(
        self, path: Sequence[str], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> AsyncHeldLock: ...

    def acquire_all(
        self, paths: Sequence[Sequence[str]], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> HeldLock: ...

    async def acquire_all_async(
        self, paths: Sequence[Sequence[str]], mode: str = "X", *, timeout_seconds: float | None = None
    ) -> AsyncHeldLock: ...

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
        """The lock table of a universe; None if several processes share the locks of the plane."""
        ...

    @property
    def lock_sessions(self) -> LockSessions:
        """The sessions of locks that processes share."""
        ...

    @property
    def on_data_push(self) -> Callable[[OnDataPush], Callable[[], None]] | None:
        """Registers a listener with the ingress of this process; None if the plane is in another process.

        The listener gets the pushes of all universes. The returned function stops it.
        """
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
    def on_data_push(self) -> Callable[[OnDataPush], Callable[[], None]] | None: ...

    @property
    def lock_sessions(self) -> LockSessions: ...

    @property
    def execute(self) -> Callable[[Any, Request[Any]], Any]: ...

    async def close(self) -> None: ...
