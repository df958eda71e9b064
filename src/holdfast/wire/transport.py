"""The port between a handle and whoever carries its requests out: the plane in this process, or a server."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from holdfast.tiers import Tier
from holdfast.wire.requests import Answer, Request

Result = TypeVar("Result")


class LeaseRenewer(Protocol):
    """Extends the leases of messages by itself."""

    def start(self, message: Any, universe: str, queue: str, lease: Any, *, seconds: float, cap_seconds: float) -> Any:
        """Begin to extend a lease; what this returns has `stop`."""
        ...


class Transport(Protocol):
    """Carries requests out while the caller's thread waits."""

    def call(self, request: Request[Answer]) -> Answer:
        """The answer to `request`."""
        ...

    def send(self, request: Request[Answer], chunks: Iterable[bytes]) -> Answer:
        """The answer to a request whose body is streamed beside it."""
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

    @property
    def lease_renewer(self) -> "LeaseRenewer":
        """Extends leases while messages are worked on."""
        ...

    @property
    def execute(self) -> Callable[[Any, Request[Any]], Any]:
        """Carries a request out inside a transaction that `transact` runs."""
        ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Carries requests out while the caller's event loop goes on."""

    async def call(self, request: Request[Answer]) -> Answer: ...

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer: ...

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]: ...

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result: ...

    @property
    def lease_renewer(self) -> "LeaseRenewer": ...

    @property
    def execute(self) -> Callable[[Any, Request[Any]], Any]: ...

    async def close(self) -> None: ...
