"""One process of `bench_nodes`: a node on PostgreSQL, or a plain table that asyncpg drives.

python benches/node_process.py plane URL      {"work": "put", "queue": "jobs", "callers": 64, "operations": 6400}
python benches/node_process.py table URL

It reads a task from each line, and prints how many messages it has put or consumed, with the plane's contention:

    put      each of `callers` puts its share of `operations` messages, one by one, and each put is synced
    fill     `operations` messages are put in large batches
    drain    each of `callers` receives up to `batch` messages and acknowledges them, until nothing is left
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, Final, Protocol, Self

import asyncpg

import fastness
from fastness import AsyncPlane, Tier
from fastness.limits import MESSAGES_MAX

PAYLOAD: Final = b"x" * 200
CONNECTIONS: Final = 16  # Of the plain table's pool.
LEASE_SECONDS: Final = 30


class Contestant(Protocol):
    """What puts and consumes messages."""

    async def prepare(self, queue: str) -> None:
        """Called before the first task of a queue."""
        ...

    async def put(self, queue: str) -> None: ...

    async def put_many(self, queue: str, count: int) -> None: ...

    async def consume(self, queue: str, batch: int) -> int:
        """Receive and acknowledge up to `batch` messages; returns how many there were."""
        ...

    def contention(self) -> dict[str, int]: ...


class Node:
    """A plane in this process."""

    def __init__(self, plane: AsyncPlane) -> None:
        self._plane = plane

    @classmethod
    async def open(cls, url: str) -> Self:
        return cls(await fastness.open_async(url, gc_every_seconds=None))

    async def prepare(self, queue: str) -> None:
        """A put creates the queue."""

    async def put(self, queue: str) -> None:
        await self._plane.queue(queue).put(PAYLOAD)

    async def put_many(self, queue: str, count: int) -> None:
        await self._plane.queue(queue).put_many([PAYLOAD] * count, tier=Tier.IMPORTANT)

    async def consume(self, queue: str, batch: int) -> int:
        jobs = self._plane.queue(queue)
        if batch == 1:
            message = await jobs.receive(extend_for_seconds=0)
            if message is None:
                return 0
            await message.ack()
            return 1
        messages = await jobs.receive_many(batch, extend_for_seconds=0)
        if messages:
            await jobs.ack_many(messages)
        return len(messages)

    def contention(self) -> dict[str, int]:
        transport: Any = self._plane._transport
        return asdict(transport.services.database.contention)


class PlainTable:
    """A table for each queue, with the statements that one writes by hand: a lease is an UPDATE, an ack a DELETE."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]") -> None:
        self._pool = pool

    @classmethod
    async def open(cls, url: str) -> Self:
        return cls(await asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS))

    async def prepare(self, queue: str) -> None:
        await self._pool.execute(
            f"""CREATE TABLE IF NOT EXISTS {_table(queue)} (id bigserial PRIMARY KEY, payload bytea NOT NULL,
                leased_until timestamptz NOT NULL DEFAULT '-infinity')"""
        )

    async def put(self, queue: str) -> None:
        await self._pool.execute(f"INSERT INTO {_table(queue)} (payload) VALUES ($1)", PAYLOAD)

    async def put_many(self, queue: str, count: int) -> None:
        await self._pool.execute(f"INSERT INTO {_table(queue)} (payload) SELECT unnest($1::bytea[])", [PAYLOAD] * count)

    async def consume(self, queue: str, batch: int) -> int:
        table = _table(queue)
        rows = await self._pool.fetch(
            f"""UPDATE {table} SET leased_until = now() + interval '{LEASE_SECONDS} s' WHERE id IN
                (SELECT id FROM {table} WHERE leased_until < now() ORDER BY id FOR UPDATE SKIP LOCKED LIMIT {batch})
                RETURNING id, payload"""
        )
        if rows:
            await self._pool.execute(f"DELETE FROM {table} WHERE id = ANY($1)", [row["id"] for row in rows])
        return len(rows)

    def contention(self) -> dict[str, int]:
        return {}


def _table(queue: str) -> str:
    return f"plain_{queue}".replace("-", "_")


async def put(contestant: Contestant, task: dict[str, Any]) -> int:
    each: int = task["operations"] // task["callers"]

    async def caller() -> int:
        for _ in range(each):
            await contestant.put(task["queue"])
        return each

    return await _sum_of(caller, task["callers"])


async def fill(contestant: Contestant, task: dict[str, Any]) -> int:
    left = task["operations"]
    while left:
        count = min(left, MESSAGES_MAX)
        await contestant.put_many(task["queue"], count)
        left -= count
    return int(task["operations"])


async def drain(contestant: Contestant, task: dict[str, Any]) -> int:
    async def consumer() -> int:
        consumed = 0
        while found := await contestant.consume(task["queue"], task["batch"]):
            consumed += found
        return consumed

    return await _sum_of(consumer, task["callers"])


async def _sum_of(caller: Callable[[], Coroutine[Any, Any, int]], callers: int) -> int:
    return sum(await asyncio.gather(*(caller() for _ in range(callers))))


WORK: Final[dict[str, Callable[[Contestant, dict[str, Any]], Coroutine[Any, Any, int]]]] = {
    "put": put,
    "fill": fill,
    "drain": drain,
}


async def main() -> None:
    kind, url = sys.argv[1:]
    contestant: Contestant = await Node.open(url) if kind == "plane" else await PlainTable.open(url)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        task = json.loads(line)
        await contestant.prepare(task["queue"])
        before = contestant.contention()
        operations = await WORK[task["work"]](contestant, task)
        counts = {name: count - before[name] for name, count in contestant.contention().items()}
        print(json.dumps({"operations": operations, **counts}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
