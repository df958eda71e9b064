"""The overhead of a call: a handle, request struct and transport, against the same function called with `transact`."""

import asyncio

from benches.bench_rocksdb import on_loop, repeat
from benches.comparison import compare, echo
from fastness.backends.memory import MemoryDatabase
from fastness.handles.plane import AsyncPlane
from fastness.handles.sync.plane import Plane
from fastness.kv import Transaction
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.plane.services import Services


def put(tx: Transaction, key: bytes, value: bytes) -> None:
    tx.put(key, value)


def main() -> None:
    database = MemoryDatabase()
    plane = Plane(EmbeddedTransport(Services(database)))
    async_plane = AsyncPlane(AsyncEmbeddedTransport(Services(database)))

    async def bare_async() -> None:
        await database.transact_async(put, b"key", b"value")

    async def handle_async() -> None:
        await async_plane.pairs.put(b"key", b"value")

    rates = compare(
        "A put on the key space in memory",
        {
            "transact(layer function)": lambda: repeat(lambda: database.transact(put, b"key", b"value"), 20_000),
            "handle, struct, transport": lambda: repeat(lambda: plane.pairs.put(b"key", b"value"), 20_000),
            "transact_async(layer function)": lambda: on_loop(bare_async, 1, 20_000),
            "async handle, struct, transport": lambda: on_loop(handle_async, 1, 20_000),
        },
    )
    each = [1e6 / rate for rate in rates.values()]
    echo(f"A call adds {each[1] - each[0]:.2f} µs, with asyncio {each[3] - each[2]:.2f} µs.")
    asyncio.run(async_plane.close())


if __name__ == "__main__":
    main()
