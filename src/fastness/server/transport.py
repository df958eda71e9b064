"""What a server needs of the plane that it serves."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from fastness.kv import Result
from fastness.layers.idempotency import KeyedCall
from fastness.plane.services import Services
from fastness.runtime.ingress.ingress import Ingress
from fastness.tiers import Tier
from fastness.wire.frames import Call
from fastness.wire.requests import Answer, Request


class ServerTransport(Protocol):
    """An embedded plane, measured (`metrics.MeasuredTransport`) or not (`plane.embedded.AsyncEmbeddedTransport`)."""

    @property
    def services(self) -> Services: ...

    @property
    def ingress(self) -> Ingress: ...

    async def call(self, request: Request[Answer], call: KeyedCall | None = None) -> Answer: ...

    async def call_all(self, calls: Sequence[Call], is_wanted: Callable[[], bool] | None = None) -> list[object]: ...

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer: ...

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]: ...

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result: ...
