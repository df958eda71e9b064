"""`fastness bench`: measures a queue's throughput and latency, as one client sees them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import click

from fastness.cli import connect, printing
from fastness.cli.commands import LeafCommand
from fastness.cli.completion import Names, queues
from fastness.client.transport import AsyncRemoteTransport
from fastness.errors import Conflict, FastnessError
from fastness.handles.messages import AsyncMessage
from fastness.handles.plane import AsyncPlane
from fastness.handles.queues import AsyncQueue
from fastness.limits import BENCH_CALLERS_MAX, VALUE_BYTES_MAX
from fastness.plane import Options, open_plane_async
from fastness.tiers import Tier
from fastness.wire.queues import QueuePolicy

_ACKS_AT_ONCE: Final = 256
_COLUMNS: Final = ("step", "count", "rate_per_second", "p50_ms", "p99_ms", "max_ms")


@click.command(
    cls=LeafCommand, examples=["fastness bench --messages 20000 --callers 256", "fastness --url dir:./scratch bench"]
)
@click.option(
    "--messages", type=click.IntRange(1, 10_000_000), default=5_000, show_default=True, help="The number of messages."
)
@click.option(
    "--callers",
    type=click.IntRange(1, BENCH_CALLERS_MAX),
    default=64,
    show_default=True,
    help="The number of concurrent callers.",
)
@click.option(
    "--bytes",
    "size",
    type=click.IntRange(0, VALUE_BYTES_MAX),
    default=256,
    show_default=True,
    help="The size of each payload.",
)
@click.option(
    "--queue",
    "name",
    type=Names(queues),
    default="fastness-bench",
    show_default=True,
    help="The queue to use. It must be empty.",
)
@click.option(
    "--tier", type=click.Choice(["critical", "important"]), default="critical", help="The durability tier of each call."
)
def bench(*, messages: int, callers: int, size: int, name: str, tier: str) -> None:
    """Makes one call per message, from concurrent callers.

    The queue is deleted afterwards, also after an interrupt or an error. If it existed before, only the messages are.
    """
    target = connect.current_target()
    steps = asyncio.run(_bench(target, name, messages=messages, callers=callers, size=size, tier=Tier(tier)))
    printing.rows(steps, _COLUMNS)


async def _bench(
    target: connect.Target, name: str, *, messages: int, callers: int, size: int, tier: Tier
) -> list[dict[str, Any]]:
    plane = await _open_plane(target)
    try:
        queue, payload = plane.queue(name), bytes(size)
        stats = await queue.stats()
        if stats.ready or stats.delayed or stats.leased or stats.blocked:
            raise Conflict(
                f"Queue {name} is not empty, and the benchmark would consume its messages; choose another --queue"
            )
        is_new = not stats.put_total and await queue.policy() == QueuePolicy() and not await queue.schedules()
        leased: list[AsyncMessage] = []

        async def put() -> None:
            await queue.put(payload, tier=tier)

        async def receive() -> None:
            own_tier = None if tier is Tier.CRITICAL else tier  # As applications do.
            message = await queue.receive(wait_seconds=5.0, extend_for_seconds=0, tier=own_tier)
            if message is None:
                raise Conflict(f"Another consumer receives from {name}; choose another --queue")
            leased.append(message)

        async def ack() -> None:
            message = leased.pop()
            try:
                await message.ack(tier=tier)
            except BaseException:
                leased.append(message)
                raise

        try:
            return [await _measure(step, messages, callers) for step in (put, receive, ack)]
        finally:
            await (_delete(queue) if is_new else _remove_messages(queue, leased))
    finally:
        await plane.close()


async def _delete(queue: AsyncQueue) -> None:
    """Delete the queue that the measurement created."""
    try:
        await queue.delete(force=True)
    except FastnessError as error:
        click.echo(
            f"fastness: cannot delete {queue.name} ({error}); delete it with: "
            f"fastness queue delete {queue.name} --force",
            err=True,
        )


async def _remove_messages(queue: AsyncQueue, leased: list[AsyncMessage]) -> None:
    """Remove what an interrupted measurement has left."""
    try:
        for start in range(0, len(leased), _ACKS_AT_ONCE):
            await asyncio.gather(*(message.ack() for message in leased[start : start + _ACKS_AT_ONCE]))
        await queue.purge()
    except FastnessError as error:
        click.echo(
            f"fastness: cannot remove the messages of {queue.name} ({error}); remove them with: "
            f"fastness queue purge {queue.name}",
            err=True,
        )


async def _open_plane(target: connect.Target) -> AsyncPlane:
    if target.is_server:
        remote = AsyncRemoteTransport(
            target.url, token=target.token, tls=target.tls(), patience_seconds=target.patience_seconds
        )
        return AsyncPlane(remote, target.universe)
    return AsyncPlane(await open_plane_async(target.url, Options(objects=target.objects)), target.universe)


async def _measure(step: Callable[[], Awaitable[None]], count: int, callers: int) -> dict[str, Any]:
    """Run `step` `count` times from concurrent callers, and measure it."""
    numbers, seconds = iter(range(count)), list[float]()
    with printing.progress(step.__name__, count) as advance:

        async def run_steps() -> None:
            for _ in numbers:
                began = time.perf_counter()
                await step()
                seconds.append(time.perf_counter() - began)
                advance(1)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(callers, count)):
                group.create_task(run_steps())
        elapsed = time.perf_counter() - began
    seconds.sort()
    return {
        "step": step.__name__,
        "count": count,
        "rate_per_second": round(count / elapsed),
        "p50_ms": round(seconds[count // 2] * 1_000, 3),
        "p99_ms": round(seconds[min(count * 99 // 100, count - 1)] * 1_000, 3),
        "max_ms": round(seconds[-1] * 1_000, 3),
    }
