"""One client for each server, with the same methods. When a call returns, its effect is synced and acknowledged.

| method | Fastness | NATS JetStream | Redis |
|---|---|---|---|
| put | `queue.put` | `js.publish`, its PubAck | `XADD` |
| receive | `receive_many`, or `receive` for one | `fetch` of a pull consumer | `XREADGROUP` of a group |
| ack_each, concurrently | `message.ack` | `ack_sync` | `XACK` and `XDEL` |
| ack_batch | one `ack_many` of all | `ack` each, unconfirmed | one `XACK` and `XDEL` of all |
| lock | `lease.acquire`, `release` | | `Lock.acquire`, `release` |

The NATS stream has work-queue retention, and acknowledged Redis entries are deleted, so all three are queues. NATS
confirms an acknowledgement only with `ack_sync`; its `ack` returns when the data is in the client's buffer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import nats
import nats.errors
import redis.asyncio
import redis.asyncio.lock
import uvloop
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

import fastness
from benches.peers.bare import BareClient
from fastness import AsyncPlane, Tier

BATCH: Final = 256  # The maximum of one Fastness call, and the size of a NATS fetch.
CALLERS: Final = 256
_WAIT_SECONDS: Final = 20.0  # A timeout; reached only if something is wrong.
_LEASE_SECONDS: Final = 120.0  # Message leases: longer than a run, so that no message is redelivered.
_GROUP: Final = "workers"

Receive = Callable[[int], Awaitable[list[Any]]]
Ack = Callable[[Sequence[Any]], Awaitable[None]]


class Client(Protocol):
    """A connection to a server, for one queue."""

    def put(self, body: bytes) -> Coroutine[Any, Any, None]: ...
    async def fill(self, count: int, body: bytes) -> None: ...
    async def consumers(self, count: int) -> list[Receive]: ...
    async def ack_each(self, messages: Sequence[Any]) -> None: ...
    async def ack_batch(self, messages: Sequence[Any]) -> None: ...
    def body(self, message: Any) -> bytes: ...
    async def close(self) -> None: ...


class FastnessClient:
    """`fastness.connect_async`, without automatic lease renewal, which the other clients do not have."""

    def __init__(self, plane: AsyncPlane, queue: str) -> None:
        self.plane = plane
        self.queue = plane.queue(queue)

    @classmethod
    async def connect(cls, url: str, queue: str) -> "FastnessClient":
        return cls(await fastness.connect_async(url), queue)

    async def put(self, body: bytes) -> None:
        await self.queue.put(body)

    async def fill(self, count: int, body: bytes) -> None:
        sizes = iter([BATCH] * (count // BATCH) + [count % BATCH] * (count % BATCH > 0))

        async def put_batches() -> None:
            for size in sizes:
                await self.queue.put_many([body] * size, tier=Tier.IMPORTANT)

        await asyncio.gather(*(put_batches() for _ in range(4)))

    async def consumers(self, count: int) -> list[Receive]:
        return [self._receive] * count

    async def _receive(self, most: int) -> list[Any]:
        if most > 1:
            return await self.queue.receive_many(
                most, wait_seconds=_WAIT_SECONDS, visibility_seconds=_LEASE_SECONDS, extend_for_seconds=0
            )
        message = await self.queue.receive(
            wait_seconds=_WAIT_SECONDS, visibility_seconds=_LEASE_SECONDS, extend_for_seconds=0
        )
        return [] if message is None else [message]

    async def ack_each(self, messages: Sequence[Any]) -> None:
        await _concurrently([message.ack() for message in messages])

    async def ack_batch(self, messages: Sequence[Any]) -> None:
        await self.queue.ack_many(messages)

    async def work(self, count: int, slots: int) -> int:
        """Run a worker until it has handled `count` messages, and return how many it handled when it has stopped."""
        handled = 0

        async def handle(_: Any) -> None:
            nonlocal handled
            handled += 1
            if handled == count:
                worker.stop()

        worker = fastness.AsyncWorker(
            self.plane,
            {self.queue.name: handle},
            concurrency=slots,
            visibility_seconds=_LEASE_SECONDS,
            extend_for_seconds=0,
        )
        await worker.run()
        return worker.stats.handled

    def body(self, message: Any) -> bytes:
        found: bytes = message.payload
        return found

    async def lock_and_unlock(self, owner: str) -> None:
        lease = await self.plane.lease("deploy").acquire(owner, ttl_seconds=30, wait_seconds=_WAIT_SECONDS)
        await lease.release()

    async def close(self) -> None:
        await self.plane.close()


class NatsClient:
    """`nats-py`, with a durable pull consumer shared by all consumers."""

    def __init__(self, connection: Any, subject: str) -> None:
        self._connection = connection
        self._stream = connection.jetstream()
        self._subject = subject

    @classmethod
    async def connect(cls, url: str, subject: str) -> "NatsClient":
        client = cls(await nats.connect(url), subject)
        await client._stream.add_stream(
            StreamConfig(
                name=subject, subjects=[subject], retention=RetentionPolicy.WORK_QUEUE, storage=StorageType.FILE
            )
        )
        return client

    async def put(self, body: bytes) -> None:
        await self._stream.publish(self._subject, body, timeout=_WAIT_SECONDS)

    async def fill(self, count: int, body: bytes) -> None:
        await call_concurrently(lambda: self.put(body), count)

    async def consumers(self, count: int) -> list[Receive]:
        settings = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=_LEASE_SECONDS, max_ack_pending=100_000)
        pulls = [
            await self._stream.pull_subscribe(self._subject, durable=_GROUP, config=settings) for _ in range(count)
        ]
        return [self._receiver(pull) for pull in pulls]

    def _receiver(self, pull: Any) -> Receive:
        async def receive(most: int) -> list[Any]:
            try:
                found: list[Any] = await pull.fetch(most, timeout=_WAIT_SECONDS)
            except nats.errors.TimeoutError:
                return []
            return found

        return receive

    async def ack_each(self, messages: Sequence[Any]) -> None:
        await _concurrently([message.ack_sync(timeout=_WAIT_SECONDS) for message in messages])

    async def ack_batch(self, messages: Sequence[Any]) -> None:
        for message in messages:
            await message.ack()

    def body(self, message: Any) -> bytes:
        found: bytes = message.data
        return found

    async def close(self) -> None:
        await self._connection.close()


class RedisClient:
    """`redis.asyncio` with hiredis: a stream and a consumer group; each concurrent command has its own connection."""

    def __init__(self, redis: Any, key: str) -> None:
        self._redis = redis
        self._key = key

    @classmethod
    async def connect(cls, url: str, key: str) -> "RedisClient":
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, max_connections=CALLERS + 8, socket_timeout=_WAIT_SECONDS + 5
        )
        client = cls(redis.asyncio.Redis(connection_pool=pool), key)
        try:
            await client._redis.xgroup_create(key, _GROUP, mkstream=True)
        except redis.asyncio.ResponseError as error:  # Another client has created it.
            if "BUSYGROUP" not in str(error):
                raise
        return client

    async def put(self, body: bytes) -> None:
        await self._redis.xadd(self._key, {"b": body})

    async def fill(self, count: int, body: bytes) -> None:
        for start in range(0, count, 1_000):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for _ in range(min(1_000, count - start)):
                    pipeline.xadd(self._key, {"b": body})
                await pipeline.execute()

    async def consumers(self, count: int) -> list[Receive]:
        return [self._receiver(f"consumer-{number}") for number in range(count)]

    def _receiver(self, name: str) -> Receive:
        async def receive(most: int) -> list[Any]:
            found = await self._redis.xreadgroup(
                _GROUP, name, {self._key: ">"}, count=most, block=int(_WAIT_SECONDS * 1_000)
            )
            return [entry for _, entries in found for entry in entries]

        return receive

    async def ack_each(self, messages: Sequence[Any]) -> None:
        await _concurrently([self.ack_batch([message]) for message in messages])

    async def ack_batch(self, messages: Sequence[Any]) -> None:
        names = [name for name, _ in messages]
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.xack(self._key, _GROUP, *names)
            pipeline.xdel(self._key, *names)
            await pipeline.execute()

    def body(self, message: Any) -> bytes:
        found: bytes = message[1][b"b"]
        return found

    async def lock_and_unlock(self, owner: str) -> None:
        del owner  # A Lock generates its own token.
        lock = redis.asyncio.lock.Lock(self._redis, "deploy", timeout=30, blocking_timeout=_WAIT_SECONDS)
        assert await lock.acquire()
        await lock.release()

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.aclose()


async def call_concurrently(call: Callable[[], Awaitable[Any]], count: int, callers: int = CALLERS) -> int:
    """Make `count` calls in total, by concurrent callers that each make one call at a time."""
    numbers = iter(range(count))

    async def caller() -> None:
        for _ in numbers:
            await call()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return count


async def _concurrently(acks: list[Any]) -> None:
    if len(acks) == 1:
        await acks[0]
    else:
        await asyncio.gather(*acks)


def loop_factory(*, use_uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    """The event loop of the clients: the standard library's, which most users have, or uvloop."""
    return uvloop.new_event_loop if use_uvloop else asyncio.new_event_loop


CLIENTS: Final[dict[str, Any]] = {
    "fastness": FastnessClient,
    "nats": NatsClient,
    "redis": RedisClient,
    "bare": BareClient,
}
