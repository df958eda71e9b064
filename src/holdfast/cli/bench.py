"""`holdfast bench`: how fast the plane at the given URL is, as one client sees it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import click

from holdfast.cli import connect, printing
from holdfast.cli.commands import Verb
from holdfast.client.transport import AsyncRemoteTransport
from holdfast.errors import Conflict
from holdfast.handles import AsyncPlane
from holdfast.plane import Options, open_plane_async
from holdfast.tiers import Tier

_COLUMNS: Final = ("step", "count", "rate_per_second", "p50_ms", "p99_ms", "max_ms")


@click.command(
    cls=Verb, examples=["holdfast bench --messages 20000 --callers 256", "holdfast --url dir:./scratch bench"]
)
@click.option("--messages", type=click.IntRange(1, 10_000_000), default=5_000, show_default=True, help="How many.")
@click.option("--callers", type=click.IntRange(1, 1_000), default=64, show_default=True, help="How many at once.")
@click.option(
    "--bytes", "size", type=click.IntRange(0, 1_048_576), default=256, show_default=True, help="Of a payload."
)
@click.option("--queue", "name", default="holdfast-bench", show_default=True, help="An empty queue to use.")
@click.option("--tier", type=click.Choice(["critical", "important"]), default="critical", help="What is promised.")
def bench(*, messages: int, callers: int, size: int, name: str, tier: str) -> None:
    """Put messages, each acknowledged by itself, then receive and acknowledge them all."""
    place = connect.target()
    found = asyncio.run(_bench(place, name, messages=messages, callers=callers, size=size, tier=Tier(tier)))
    printing.rows(found, _COLUMNS)


async def _bench(
    place: connect.Target, name: str, *, messages: int, callers: int, size: int, tier: Tier
) -> list[dict[str, Any]]:
    plane = await _opened(place)
    try:
        queue, payload = plane.queue(name), bytes(size)
        stats = await queue.stats()
        if stats.ready or stats.delayed or stats.leased or stats.blocked:
            raise Conflict(f"{name} has messages, which a bench would consume; choose another --queue, or purge it")
        leased: list[Any] = []

        async def put() -> None:
            await queue.put(payload, tier=tier)

        async def receive() -> None:
            message = await queue.receive(wait_seconds=5.0, extend_for_seconds=0, tier=tier)
            if message is None:
                raise Conflict(f"Somebody else consumes {name}; choose another --queue")
            leased.append(message)

        async def ack() -> None:
            await leased.pop().ack(tier=tier)

        return [await _timed(step, messages, callers) for step in (put, receive, ack)]
    finally:
        await plane.close()


async def _opened(place: connect.Target) -> AsyncPlane:
    if place.is_server:
        remote = AsyncRemoteTransport(
            place.url, token=place.token, tls=place.tls(), patience_seconds=place.patience_seconds
        )
        return AsyncPlane(remote, place.universe)
    return AsyncPlane(await open_plane_async(place.url, Options(objects=place.objects)), place.universe)


async def _timed(step: Callable[[], Awaitable[None]], count: int, callers: int) -> dict[str, Any]:
    """Take a step so many times, some of them at once."""
    numbers, seconds = iter(range(count)), list[float]()
    with printing.progress(step.__name__, count) as advance:

        async def one_after_the_other() -> None:
            for _ in numbers:
                began = time.perf_counter()
                await step()
                seconds.append(time.perf_counter() - began)
                advance(1)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(callers, count)):
                group.create_task(one_after_the_other())
        took = time.perf_counter() - began
    seconds.sort()
    return {
        "step": step.__name__,
        "count": count,
        "rate_per_second": round(count / took),
        "p50_ms": round(seconds[count // 2] * 1_000, 3),
        "p99_ms": round(seconds[min(count * 99 // 100, count - 1)] * 1_000, 3),
        "max_ms": round(seconds[-1] * 1_000, 3),
    }
